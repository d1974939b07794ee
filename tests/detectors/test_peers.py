"""Ranks beside one another: stragglers, outliers, and what is nobody's fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from detectors.features import METRICS, measure
from detectors.findings import Certainty, Finding, Role
from detectors.observations import Phase
from detectors.peers import Peers, Settings
from detectors.windows import Row, Window

Numbers = Callable[[int, int, dict[str, float]], None]
"""Changes the values of a (window, rank)."""


def windows(count: int, change: Numbers, *, ranks: int = 4, per_node: int = 2, seed: int = 1, sigma: float = 0.01) -> Iterator[Window]:
    rng = np.random.default_rng(seed)
    offsets = 0.1 * rng.standard_normal(ranks)  # nodes are not alike
    for index in range(count):
        rows = {}
        for rank in range(ranks):
            values = {
                "compute_s": float(np.exp(offsets[rank] + sigma * rng.standard_normal())),
                "data_s": 0.05 * float(np.exp(0.1 * rng.standard_normal())),
                "gpu_temperature_c": 60 + float(rng.standard_normal()),
                "host_cpu": 0.3,
            }
            change(index, rank, values)
            rows[rank] = Row(values=values, node=f"n{rank // per_node}", rank=rank)
        yield Window(began=10.0 * index, ended=10.0 * index + 10, generation=1, phase=Phase.TRAIN, world_size=ranks, rows=rows)


def slower(rank: int, share: float, *, first: int = 200, last: int = 10_000) -> Numbers:
    def change(index: int, which: int, values: dict[str, float]) -> None:
        if which == rank and first <= index < last:
            values["compute_s"] *= 1 + share

    return change


def nothing(index: int, rank: int, values: dict[str, float]) -> None:
    """All is as usual."""


def strong(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.certainty is Certainty.STRONG]


def over(stream: Iterator[Window], peers: Peers | None = None) -> list[Finding]:
    peers = peers or Peers()
    return [finding for window in stream for finding in peers.see(window)]


@pytest.mark.parametrize(("share", "within"), [(0.10, 60), (0.05, 180)])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_straggler_is_found_in_time_and_named(share: float, within: float, ranks: int) -> None:
    found = strong(over(windows(240, slower(2, share), ranks=ranks)))
    first = found[0]
    assert (first.kind, first.rank, first.node, first.role, first.scope) == ("straggler", 2, "n1", Role.ROOT, "rank")
    assert 0 < first.at - 2000 <= within
    assert {finding.rank for finding in found} == {2}
    feature = first.features[0]
    assert feature.baseline is not None
    assert feature.value / feature.baseline == pytest.approx(1 + share, abs=0.04)
    assert first.began is not None
    assert first.began == pytest.approx(2000, abs=60)


def test_ranks_that_differ_from_the_start_are_no_stragglers() -> None:
    assert over(windows(600, slower(2, 0.3, first=0))) == []


def test_nothing_is_found_where_nothing_is() -> None:
    assert [finding for seed in range(5) for finding in strong(over(windows(1000, nothing, seed=seed, ranks=8)))] == []


def test_a_change_too_small_to_matter_is_not_strong_however_sure_it_is() -> None:
    assert over(windows(600, slower(1, 0.02), sigma=0.002)) == []


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_spike_is_no_straggler_even_if_it_dies_away_slowly(decay: float) -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        if rank == 1 and index >= 200:
            values["compute_s"] *= 1 + 2.0 * decay ** (index - 200)

    assert strong(over(windows(260, change))) == []


def test_a_job_that_becomes_slower_as_a_whole_has_no_straggler() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        values["compute_s"] *= 1.3 if index >= 200 else 1.0

    assert over(windows(400, change)) == []


def test_many_ranks_at_once_are_the_job_and_no_node() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        if index >= 200 and rank in {0, 3, 5}:
            values["compute_s"] *= 1.2

    found = over(windows(260, change, ranks=8))
    assert "many_stragglers" in {finding.kind for finding in found}
    assert {(finding.scope, finding.role) for finding in found if finding.at > 2100} == {("job", Role.ADVISE)}
    assert strong(found) == []


def test_a_node_whose_ranks_are_all_slow_is_one_finding_and_strong_only_after_long() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        if index >= 200 and rank in {2, 3}:
            values["compute_s"] *= 1.15

    found = over(windows(400, change, ranks=8))
    assert {(finding.kind, finding.scope, finding.node) for finding in found} == {("slow_node", "node", "n1")}
    assert strong(found)[0].at - 2000 > 1200


def test_a_rank_beside_a_busy_neighbour_is_not_strong_until_it_lasted() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        if index >= 200 and rank == 1:
            values["compute_s"] *= 1.15
            values["host_cpu"] = 0.9

    found = over(windows(400, change, per_node=1))
    assert {finding.kind for finding in found} >= {"straggler"}
    assert strong(found)[0].at - 2000 > 1200


def test_of_two_ranks_the_one_that_became_slower_is_named_and_not_the_one_beside_one_that_became_faster() -> None:
    found = strong(over(windows(260, slower(1, 0.2), ranks=2)))
    assert {finding.rank for finding in found} == {1}
    assert strong(over(windows(260, slower(1, -0.2), ranks=2))) == []


def test_a_straggler_is_told_again_each_minute_and_never_becomes_usual() -> None:
    found = strong(over(windows(1000, slower(2, 0.1))))
    times = [finding.at for finding in found]
    assert set(np.diff(times[2:]).tolist()) == {60.0}
    assert times[-1] > 9900


def test_an_end_of_it_is_an_end_of_findings() -> None:
    found = over(windows(500, slower(2, 0.1, last=260)))
    assert max(finding.at for finding in found) < 2600 + 400


def test_another_generation_begins_anew() -> None:
    peers = Peers()
    stream = list(windows(400, slower(2, 0.5, first=200)))
    for window in stream[:200]:
        peers.see(window)
    later = [Window(began=w.began, ended=w.ended, generation=2, phase=w.phase, world_size=w.world_size, rows=w.rows) for w in stream[200:]]
    assert over(iter(later), peers) == []


def test_only_training_is_compared_and_a_rank_alone_never() -> None:
    stream = windows(300, slower(0, 0.5))
    assert over(Window(began=w.began, ended=w.ended, generation=1, phase=Phase.EVAL, world_size=4, rows=w.rows) for w in stream) == []
    assert over(windows(300, slower(0, 0.5), ranks=1)) == []


def test_a_rank_that_is_missing_now_and_then_changes_nothing() -> None:
    def gaps() -> Iterator[Window]:
        for index, w in enumerate(windows(260, slower(2, 0.1))):
            rows = {rank: row for rank, row in w.rows.items() if (index + rank) % 7}
            yield Window(began=w.began, ended=w.ended, generation=1, phase=w.phase, world_size=4, rows=rows)

    found = strong(over(gaps()))
    assert found[0].rank == 2
    assert 0 < found[0].at - 2000 <= 90


def test_numbers_compared_beforehand_give_the_same_and_those_of_other_ranks_are_compared_anew() -> None:
    stream = list(windows(260, slower(2, 0.1)))
    plain = over(iter(stream))
    peers = Peers()
    ready = [finding for window in stream for finding in peers.see(window, measure(window, sorted(window.rows)))]
    other = Peers()
    wrong = [finding for window in stream for finding in other.see(window, measure(window, [0, 1]))]
    assert plain == ready == wrong
    assert plain


def test_a_hot_gpu_is_an_outlier_with_what_its_peers_have() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        values["gpu_temperature_c"] += 20 * (index >= 200 and rank == 3)

    found = over(windows(300, change))
    assert {(finding.kind, finding.rank, finding.certainty, finding.role) for finding in found} == {("peer_outlier", 3, Certainty.WEAK, Role.CONFIRM)}
    assert 50 < found[0].at - 2000 <= 80
    feature = found[0].features[0]
    assert feature.name == "gpu_temperature_c"
    assert feature.peers == pytest.approx(60, abs=5)
    assert (feature.value, feature.baseline) == pytest.approx((80, 60), abs=5)
    assert feature.z is not None
    assert feature.z > 8


def test_what_gets_better_is_no_outlier() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        values["gpu_temperature_c"] -= 20 * (index >= 200 and rank == 3)

    assert over(windows(300, change)) == []


def test_metrics_without_the_time_of_own_work_are_refused() -> None:
    with pytest.raises(ValueError, match="data_s, not compute_s"):
        Peers(Settings(), METRICS[1:])


@pytest.mark.timeout(60)
def test_thousands_of_ranks_are_looked_at_up_to_a_bound() -> None:
    peers = Peers()
    for window in windows(3, nothing, ranks=5000):
        assert peers.see(window) == []
    assert peers._state is not None
    assert len(peers._state.ranks) == 4096
    assert peers._state.history.size < 16_000_000


def test_a_rank_on_its_way_beside_a_slow_one_is_not_told_by_itself() -> None:
    def change(index: int, rank: int, values: dict[str, float]) -> None:
        if index >= 200:
            values["compute_s"] *= {4: 1.12, 5: 1.045}.get(rank, 1.0)

    found = over(windows(206, change, ranks=12, per_node=4))
    assert {finding.rank for finding in found} == {4}
