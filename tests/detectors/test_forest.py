"""The isolation forest: that it scores as scikit-learn does, learns, speaks, explains, is kept and refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import IsolationForest

from detectors import forest as module
from detectors.features import METRICS, Joint
from detectors.findings import Certainty, Finding, Role
from detectors.forest import Forest, Settings, Trees
from detectors.observations import Phase
from detectors.windows import Row, Window

QUICK = Settings(warm_up=200, refit=200, trees=40, of=20, within=24)
_NUMBERS = {"compute_s": 1.0, "data_s": 0.1, "other_s": 0.1, "gpu_power_w": 600.0, "gpu_temperature_c": 60.0, "rss_bytes": 6e9, "host_cpu": 0.3}


def stream(
    count: int, *, drifts: frozenset[int] = frozenset(), first: int = 700, per_node: int = 4, seed: int = 1, phase: Phase = Phase.TRAIN, ranks: int = 4
) -> list[Window]:
    """Some ranks; each number of those that drift is by 2 standard deviations off from `first` on, up and down by turns."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        rows = {}
        for rank in range(ranks):
            moves = rng.standard_normal(len(_NUMBERS))
            if rank in drifts and index >= first:
                moves = moves + 2.0 * np.array([1, 1, 1, -1, 1, 1, 0])
            values = {name: value * float(np.exp(0.02 * move)) for (name, value), move in zip(_NUMBERS.items(), moves, strict=True)}
            rows[rank] = Row(values=values, node=f"n{rank // per_node}", rank=rank)
        found.append(Window(began=10.0 * index, ended=10.0 * index + 10, generation=1, phase=phase, world_size=ranks, rows=rows))
    return found


def over(forest: Forest, windows: list[Window]) -> list[Finding]:
    return [finding for window in windows for finding in forest.see(window)]


def test_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((3000, 6))
    tests = np.concatenate([rng.standard_normal((500, 6)) * 2, np.full((1, 6), 1e9), rows[:100]])
    trees = Trees.grow(rows, trees=30, sample=256, seed=7)
    noisy = rows + np.random.default_rng(7).normal(0.0, 0.02 * np.maximum(rows.std(axis=0), 0.5), rows.shape)
    theirs = -IsolationForest(n_estimators=30, max_samples=256, random_state=7).fit(noisy).score_samples(tests)
    assert trees.scores(tests) == pytest.approx(theirs, abs=1e-9)
    assert trees.scores(tests[:1])[0] == trees.scores(tests)[0], "one row alone and among others"


def test_a_column_that_was_constant_while_it_learnt_is_seen_when_it_moves() -> None:
    rng = np.random.default_rng(4)
    rows = np.column_stack([rng.standard_normal((2000, 3)), np.zeros(2000)])
    usual, odd = Trees.grow(rows, trees=60, sample=256, seed=1).scores(np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]]))
    assert odd > usual + 0.05


def test_nothing_is_said_and_nothing_can_be_saved_before_it_has_learnt(tmp_path: Path) -> None:
    forest = Forest(QUICK)
    assert over(forest, stream(300, drifts=frozenset({1}), first=0)) == []
    assert not forest.learnt
    assert forest.describe()["learnt"] is False
    with pytest.raises(ValueError, match="too few windows"):
        forest.save(tmp_path / "forest.npz")


def test_a_rank_that_drifts_in_many_numbers_a_little_is_found_and_explained() -> None:
    found = over(Forest(QUICK), stream(900, drifts=frozenset({2})))
    assert {(finding.kind, finding.rank, finding.scope) for finding in found} == {("joint_drift", 2, "rank")}
    assert found[0].at > 7000 + 190, "only what lasts"
    assert {(finding.certainty, finding.role) for finding in found} == {(Certainty.WEAK, Role.CONFIRM)}
    assert len(found[0].features) == 3
    assert {feature.name for feature in found[0].features} < set(_NUMBERS) - {"host_cpu"}
    for feature in found[0].features:
        assert feature.baseline == pytest.approx(_NUMBERS[feature.name], rel=0.02)
        assert feature.z is not None
        assert (feature.z > 0) == (feature.name != "gpu_power_w")


def test_nothing_is_found_where_nothing_is_and_out_of_training() -> None:
    assert [finding for seed in range(3) for finding in over(Forest(QUICK), stream(1200, seed=seed))] == []
    forest = Forest(QUICK)
    over(forest, stream(700))
    assert over(forest, stream(300, drifts=frozenset({2}), first=0, phase=Phase.EVAL, seed=9)) == []


def test_what_all_ranks_of_a_node_have_in_common_is_nobodys_fault() -> None:
    found = over(Forest(QUICK), stream(900, drifts=frozenset({2, 3}), per_node=2, ranks=8))
    assert found
    assert {(finding.kind, finding.role) for finding in found} == {("shared_drift", Role.ADVISE)}


def test_windows_in_batches_give_the_same_as_one_by_one() -> None:
    windows = stream(900, drifts=frozenset({2}))
    assert Forest(QUICK).see_many((window, None) for window in windows) == over(Forest(QUICK), windows)


def test_nothing_is_learnt_from_around_an_incident() -> None:
    quiet, disturbed = Forest(QUICK), Forest(QUICK)
    disturbed.disturbed(2000.0)
    for forest in (quiet, disturbed):
        over(forest, stream(321))
    assert quiet.learnt
    assert not disturbed.learnt, "of its 200 windows less than half are left"


def test_a_forest_that_was_kept_scores_as_before_and_needs_no_warm_up(tmp_path: Path) -> None:
    forest = Forest(QUICK)
    over(forest, stream(320))
    forest.save(tmp_path / "forest.npz")
    kept = Forest.load(tmp_path / "forest.npz")
    assert kept.learnt
    assert kept.describe()["windows"] == forest.describe()["windows"]
    assert kept._model is not None
    assert forest._model is not None
    assert kept._model.threshold == pytest.approx(forest._model.threshold, rel=1e-3)
    assert {finding.rank for finding in over(kept, stream(300, drifts=frozenset({1}), first=150, seed=5))} == {1}


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, np.ndarray]:
    forest = Forest(QUICK)
    over(forest, stream(320))
    forest.save(tmp_path / "whole.npz")
    with np.load(tmp_path / "whole.npz") as file:
        return dict(file)


def _about(kept: dict[str, np.ndarray], **changes: object) -> dict[str, np.ndarray]:
    about = json.loads(kept["about"].tobytes()) | changes
    return kept | {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, allow_pickle=True, **arrays)


def test_a_forest_of_other_features_or_a_damaged_one_is_refused(tmp_path: Path, kept: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "forest.npz"
    cases = {
        "another version": _about(kept, schema="0" * 16),
        "settings": _about(kept, settings={"trees": 10, "leaves": 3}),
        "belong together": kept | {"lengths": kept["lengths"][:-1]},
        "do not belong": kept | {"apart": np.full_like(kept["apart"], np.nan)},
        "no forest": {name: value for name, value in kept.items() if name != "apart"},
    }
    for message, arrays in cases.items():
        _write(path, arrays)
        with pytest.raises(ValueError, match=message):
            Forest.load(path)
    for content in (b"", b"no archive", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            Forest.load(path)
    _write(path, kept | {"sizes": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError):
        Forest.load(path)
    _write(path, kept)
    Forest.load(path)
    monkeypatch.setattr(module, "METRICS", METRICS[1:])
    with pytest.raises(ValueError, match="another version"):
        Forest.load(path)


def test_a_joint_distance_needs_no_full_rank() -> None:
    rows = np.repeat(np.random.default_rng(1).standard_normal((50, 1)), 3, axis=1)
    assert np.isfinite(Joint.of(rows).distance(rows)).all()
