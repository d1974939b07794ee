"""Numbers of windows as deviations: comparison with the others, robust spread, summaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.features import CELLS_MAX, METRICS, Joint, Plane, Summaries, matrix, measure, median_of_others, robust, summarize
from detectors.observations import Phase
from detectors.windows import Row, Window

_NUMBERS = st.one_of(st.just(float("nan")), st.floats(-1e6, 1e6), st.integers(-3, 3).map(float))
_NAMES = [metric.name for metric in METRICS]


def window(index: int, rows: dict[int, dict[str, float]], *, phase: Phase = Phase.TRAIN, generation: int = 1, host: dict[str, float] | None = None) -> Window:
    began = 1000.0 + 10 * index
    nodes = {} if host is None else {"n0": Row(values=host, node="n0")}
    return Window(
        began=began,
        ended=began + 10,
        generation=generation,
        phase=phase,
        world_size=len(rows),
        rows={rank: Row(values=values, node="n0", rank=rank) for rank, values in rows.items()},
        nodes=nodes,
    )


def noisy(rng: np.random.Generator, ranks: int = 4, **shifts: float) -> dict[int, dict[str, float]]:
    """Rows of ordinary numbers; those of rank 0 shifted by factors."""
    rows = {}
    for rank in range(ranks):
        values = {"compute_s": 1.0, "data_s": 0.1, "grad_norm": 1.0, "gpu_power_w": 600.0, "gpu_temperature_c": 60.0}
        rows[rank] = {
            name: value * float(np.exp(0.02 * rng.standard_normal())) * (shifts.get(name, 1.0) if rank == 0 else 1.0) for name, value in values.items()
        }
    return rows


@settings(deadline=None)
@given(st.integers(1, 7).flatmap(lambda ranks: st.lists(st.lists(_NUMBERS, min_size=2, max_size=2), min_size=ranks, max_size=ranks)))
def test_the_median_of_the_others_leaves_out_the_number_itself_and_what_is_missing(rows: list[list[float]]) -> None:
    values = np.array(rows)
    found = median_of_others(values)
    for rank in range(len(values)):
        for column in range(2):
            others = [value for value in np.delete(values[:, column], rank) if not np.isnan(value)]
            if not others or np.isnan(values[rank, column]):
                assert np.isnan(found[rank, column])
            else:
                assert found[rank, column] == pytest.approx(np.median(others))


@settings(deadline=None)
@given(st.lists(_NUMBERS, min_size=1, max_size=30))
def test_median_and_spread_pass_over_what_is_missing(column: list[float]) -> None:
    middle, sigma = robust(np.array(column)[:, None], np.array([0.5]))
    there = [value for value in column if not np.isnan(value)]
    if not there:
        assert np.isnan(middle[0])
        assert sigma[0] == 0.5
        return
    assert middle[0] == pytest.approx(np.median(there))
    assert sigma[0] == pytest.approx(max(0.5, 1.4826 * float(np.median(np.abs(np.array(there) - np.median(there))))))


def test_a_metric_is_the_ranks_own_and_else_its_nodes() -> None:
    found = matrix(window(0, {0: {"compute_s": 2.0, "n_error": 3.0}}, host={"host_cpu": 0.4, "n_error": 9.0}), [0, 1], METRICS)
    assert found[0, _NAMES.index("compute_s")] == pytest.approx(np.log(2.0))
    assert found[0, _NAMES.index("n_error")] == pytest.approx(np.log(4.0))
    assert found[0, _NAMES.index("host_cpu")] == 0.4
    assert np.isnan(found[0, _NAMES.index("loss")])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_scale_leads_back_to_the_unit(metric: object) -> None:
    assert isinstance(metric, type(METRICS[0]))
    names = [metric]
    scaled = matrix(window(0, {0: {metric.name: 3.0}}), [0], names)
    assert metric.back(float(scaled[0, 0])) == pytest.approx(3.0)


def test_nothing_is_said_before_it_is_known_what_is_usual_or_out_of_phase() -> None:
    rng, summaries = np.random.default_rng(1), Summaries(warm_up=20, settle=30)
    said = [summaries.see(window(index, noisy(rng))) is not None for index in range(40)]
    assert said == [False] * 30 + [True] * 10
    assert summaries.see(window(41, noisy(rng), phase=Phase.CHECKPOINT)) is None
    assert summaries.see(window(42, noisy(rng), generation=2)) is None, "another world is learnt anew"


def test_one_bad_metric_among_many_is_the_worst_and_a_missing_one_is_counted() -> None:
    rng, summaries = np.random.default_rng(2), Summaries(warm_up=60, settle=60)
    for index in range(120):
        summaries.see(window(index, noisy(rng)))
    usual = summaries.see(window(120, noisy(rng)))
    assert usual is not None
    assert usual.sizes[:, 3].tolist() == [0, 0, 0, 0]
    odd = noisy(rng, gpu_power_w=0.5)
    del odd[1]["data_s"]
    found = summaries.see(window(121, odd))
    assert found is not None
    assert found.sizes[0, 0] > np.log1p(15) > usual.sizes[:, 0].max()
    assert found.sizes[0, 2] == 1
    assert found.sizes[:, 3].tolist() == [0, 1, 0, 0]


def test_a_spike_is_soon_forgotten_and_a_small_shift_that_stays_is_not() -> None:
    rng, summaries = np.random.default_rng(3), Summaries(warm_up=60, settle=60)
    for index in range(120):
        summaries.see(window(index, noisy(rng)))
    spike = summaries.see(window(120, noisy(rng, data_s=50.0)))
    assert spike is not None
    assert abs(spike.own[0, _NAMES.index("data_s")]) < 1.5
    for index in range(121, 160):
        found = summaries.see(window(index, noisy(rng, data_s=1.05)))
    assert found is not None
    assert 1.0 < found.own[0, _NAMES.index("data_s")] < 4.0
    assert found.apart[0, _NAMES.index("data_s")] > 1.0


def test_a_rank_that_strayed_from_its_peers_does_not_become_usual_but_what_all_do_does() -> None:
    rng, summaries = np.random.default_rng(4), Summaries(warm_up=60, settle=60, hold=360)
    for index in range(360):
        summaries.see(window(index, noisy(rng)))
    for index in range(360, 1080):
        rows = noisy(rng, gpu_temperature_c=1.3)
        rows = {rank: {**values, "gpu_power_w": values["gpu_power_w"] * 0.8} for rank, values in rows.items()}
        found = summaries.see(window(index, rows))
    assert found is not None
    assert found.own[0, _NAMES.index("gpu_temperature_c")] > 4
    assert abs(found.own[0, _NAMES.index("gpu_power_w")]) < 2


def test_a_deviation_against_the_way_things_go_together_is_farther_than_one_along_it() -> None:
    rng = np.random.default_rng(5)
    both = rng.standard_normal((2000, 1)) + 0.2 * rng.standard_normal((2000, 2))
    along, against = Joint.of(both).distance(np.array([[1.5, 1.5], [1.5, -1.5]]))
    assert against > 2 * along
    plane = Plane.of(both)
    inside, outside = plane.residual(np.array([[1.5, 1.5], [1.5, -1.5]]))
    assert inside < 0.2
    assert outside == pytest.approx(1.5 * np.sqrt(2) / np.sqrt(1.04), rel=0.1)
    assert summarize(np.array([[1.5, -1.5]]), Joint.of(both), plane)[0] == pytest.approx(np.log([0.01 + against, 0.01 + outside]))


@pytest.mark.timeout(60)
def test_thousands_of_ranks_are_held_in_bounded_memory() -> None:
    summaries = Summaries()
    rows = {rank: {"compute_s": 1.0} for rank in range(5000)}
    summaries.see(window(0, rows))
    assert summaries._own.size <= max(CELLS_MAX, 120 * 4096 * len(METRICS))
    assert measure(window(0, rows), sorted(rows)).apart.shape == (5000, len(METRICS))
