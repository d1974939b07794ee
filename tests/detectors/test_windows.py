"""Windows hold what was seen in them and nothing else, know what the job did in them, and stay small whatever comes."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.observations import Change, Line, Observation, Phase, Ranks, Reading, Steps, Stream
from detectors.sequences import Bigrams
from detectors.templates import Templates
from detectors.windows import NODE_VALUES, NODES_MAX, RANK_VALUES, RANKS_MAX, TIMES, Window, Windows

pytestmark = pytest.mark.timeout(30)

T = 1_000_000.0  # where a window of ten seconds begins


def steps(at: float, rank: int = 0, *, first: int = 1, count: int = 2, seconds: float = 1.0, generation: int | None = 1, **more: Any) -> Steps:
    phases = more.pop("phases", dict.fromkeys(TIMES, seconds / 10))
    return Steps(at=at, rank=rank, first=first, last=first + count - 1, seconds=seconds, phases=phases, node=f"node-{rank}", generation=generation, **more)


def line(at: float, text: str = "step 1", rank: int | None = 0, **more: Any) -> Line:
    return Line(at=at, stream=more.pop("stream", Stream.OUT), text=text, node=more.pop("node", "node-0"), rank=rank, **more)


def change(at: float, phase: Phase, *, generation: int | None = 1, **more: Any) -> Change:
    return Change(at=at, phase=phase, generation=generation, node="node-0", **more)


def see(*observations: Observation, windows: Windows | None = None) -> list[Window]:
    """All windows that come of these, to the last."""
    windows = Windows() if windows is None else windows
    return [*(window for one in observations for window in windows.see(one)), *windows.flush()]


def training(windows: int, *others: Observation, ranks: int = 1) -> list[Observation]:
    """Steps in so many windows from T on, and other things, in the order of time."""
    made = [steps(T + 10 * number + 5, rank, first=1 + 2 * number) for number in range(windows) for rank in range(ranks)]
    return sorted([change(T - 5, Phase.TRAIN), *made, *others], key=lambda one: one.at)


# --- numbers -------------------------------------------------------------------------------------------------------------


def test_times_are_means_of_a_step_over_all_steps_of_the_window() -> None:
    phases = {"data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.2, "optimizer": 0.1, "snapshot": 0.04, "other": 0.06}
    first = steps(T + 1, count=3, seconds=1.0, samples=96, phases=phases, values={"loss": 2.0, "grad_norm": None}, highest={"loss": 3.0}, memory={"rss": 10})
    second = steps(T + 2, first=4, count=1, seconds=1.0, samples=32, phases={**phases, "data": 0.5}, values={"loss": 6.0, "grad_norm": 1.0}, memory={"rss": 20})
    (window,) = see(first, second, steps(T + 3, first=5, count=1, seconds=0.5, phases={}, nonfinite={"loss": 1, "grad_norm": 1}))
    values = window.rows[0].values
    expected = {
        "step_s": 2.5 / 5,
        "data_s": 0.6 / 5,
        "compute_s": 1.2 / 5,
        "comm_s": 0.4 / 5,
        "snapshot_s": 0.08 / 5,
        "other_s": 0.12 / 5,
        "steps": 5.0,
        "samples_per_s": 128 / 2.5,
        "loss": 3.0,
        "loss_high": 3.0,
        "grad_norm": 1.0,
        "n_nonfinite": 2.0,
        "rss_bytes": 20.0,
        "progress_age_s": 7.0,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert "gpu_peak_bytes" not in values  # nothing said it
    assert (window.began, window.ended, window.rows[0].node, window.rows[0].rank, window.rows[0].gathered) == (T, T + 10, "node-0", 0, False)


def test_of_ranks_on_other_nodes_the_times_are_what_rank_0_gathered() -> None:
    def gathered(at: float, own: float) -> Ranks:
        values = {"data": 0.1, "forward": 0.1, "backward": own, "communication": 0.2, "optimizer": 0.1, "snapshot": 0.0, "other": 0.0, "seconds": 1.0}
        return Ranks(at=at, step=4, ranks=(dict(values), dict(values)), node="node-0", generation=1)

    (window,) = see(steps(T + 1, 0), gathered(T + 2, 0.3), gathered(T + 6, 0.5))
    assert window.world_size == 2
    assert not window.rows[0].gathered
    assert window.rows[0].values["compute_s"] == pytest.approx(0.15)
    assert window.rows[1].gathered
    assert window.rows[1].values["compute_s"] == pytest.approx(0.6)
    assert window.rows[1].values["step_s"] == 1.0
    assert window.rows[1].values["progress_age_s"] == 4.0
    assert "steps" not in window.rows[1].values


def test_lines_are_counted_by_level_kind_and_what_they_follow() -> None:
    first = [line(T + 1, "step 1"), line(T + 1, "step 2"), line(T + 2, "step 3", level="warning"), line(T + 2, "step 4"), line(T + 3, "oops", level="critical")]
    later = [line(T + 11, "step 5"), line(T + 12, "step 6", level="error"), line(T + 13, "oops again 1")]
    one, two = see(*first, *later)
    expected = {"n_lines": 5, "lines_per_s": 0.5, "n_error": 1, "n_warn": 1, "n_first_seen": 2, "n_rare": 4, "n_distinct": 2, "n_unseen_bigram": 2}
    assert {name: one.rows[0].values[name] for name in expected} == expected
    assert one.rows[0].values["entropy"] == pytest.approx(-(0.8 * math.log2(0.8) + 0.2 * math.log2(0.2)))
    # oops -> step and step -> oops again are new, step -> step is not.
    expected = {"n_lines": 3, "n_error": 1, "n_warn": 0, "n_first_seen": 1, "n_rare": 1, "n_distinct": 2, "n_unseen_bigram": 2}
    assert {name: two.rows[0].values[name] for name in expected} == expected


def test_what_the_last_run_knew_is_no_news() -> None:
    templates, bigrams = Templates(), Bigrams()
    see(*(line(T + number, text) for number in range(8) for text in ("step 1", "saved")), windows=Windows(templates=templates, bigrams=bigrams))
    again = Windows(templates=Templates.load(templates.dump()), bigrams=Bigrams.load(bigrams.dump()))
    (window,) = see(line(T, "step 9"), line(T, "saved"), windows=again)
    assert {name: window.rows[0].values[name] for name in ("n_first_seen", "n_rare", "n_unseen_bigram")} == {
        "n_first_seen": 0,
        "n_rare": 0,
        "n_unseen_bigram": 0,
    }


def test_stdout_and_stderr_of_a_rank_do_not_follow_on_each_other() -> None:
    (window,) = see(line(T, "a"), line(T, "b", stream=Stream.ERR), line(T, "a"), line(T, "b", stream=Stream.ERR))
    assert window.rows[0].values["n_unseen_bigram"] == 2  # a after a, b after b


def test_lines_of_no_rank_are_the_nodes() -> None:
    (window,) = see(line(T, "a", rank=None, level="error"), line(T, "b", rank=None, node="node-5"))
    assert not window.rows
    assert {name: row.values["n_error"] for name, row in window.nodes.items()} == {"node-0": 1, "node-5": 0}
    assert window.nodes["node-5"].rank is None


def test_gauges_are_means_and_counters_are_what_they_rose_by() -> None:
    def reading(at: float, *, gpu: int | None, **values: float) -> Reading:
        return Reading(at=at, values=values, node="node-0", gpu=gpu)

    windows = Windows()
    windows.own("node-0", 1, 7)
    seen = [
        reading(T + 1, gpu=1, temperature_c=60.0, ecc_uncorrected=5),
        reading(T + 2, gpu=0, temperature_c=40.0),
        reading(T + 3, gpu=1, temperature_c=70.0, ecc_uncorrected=7),
        reading(T + 4, gpu=None, memory_total_bytes=100.0, memory_available_bytes=25.0, cpu_seconds=0.0, cpu_busy_seconds=0.0, disk_busy_seconds=0.0),
        reading(T + 8, gpu=None, memory_total_bytes=100.0, memory_available_bytes=25.0, cpu_seconds=40.0, cpu_busy_seconds=10.0, disk_busy_seconds=5.0),
        reading(T + 12, gpu=1, ecc_uncorrected=1),  # the driver was loaded again
        reading(T + 12, gpu=None, load1=3.0),
    ]
    one, two = see(*seen, windows=windows)
    assert one.rows[7].values["gpu_temperature_c"] == 65.0
    assert one.rows[7].values["gpu_ecc_uncorrected"] == 2.0
    assert one.nodes["node-0"].values["gpu0_temperature_c"] == 40.0
    assert {name: one.nodes["node-0"].values[name] for name in ("host_memory_used", "host_cpu", "host_disk_busy")} == {
        "host_memory_used": 0.75,
        "host_cpu": 0.25,
        "host_disk_busy": 0.5,
    }
    assert two.rows[7].values["gpu_ecc_uncorrected"] == 1.0
    assert "host_cpu" not in two.nodes["node-0"].values


def test_a_rank_that_says_nothing_any_more_keeps_its_row_and_grows_old() -> None:
    alone = [steps(T + 10 * number + 5, 0, first=2 * number + 1) for number in (1, 2)]
    windows = see(*training(1, ranks=2), *alone)
    assert [sorted(window.rows) for window in windows[1:]] == [[0, 1]] * 3
    silent = windows[3].rows[1].values
    assert silent["progress_age_s"] == 25.0
    assert "step_s" not in silent
    assert silent["n_lines"] == 0


def test_all_numbers_have_a_name_that_is_told() -> None:
    seen: list[Observation] = [
        steps(T, values={"loss": 1.0, "grad_norm": 1.0}, highest={"loss": 1.0, "grad_norm": 1.0}, samples=1),
        line(T),
        line(T, rank=None),
    ]
    (window,) = see(*seen)
    assert window.rows[0].values.keys() <= RANK_VALUES.keys()
    assert window.nodes["node-0"].values.keys() <= NODE_VALUES.keys()


# --- phases --------------------------------------------------------------------------------------------------------------


def phases(windows: list[Window]) -> list[str]:
    return [window.phase.value for window in windows]


def test_a_window_in_which_something_else_happened_and_the_one_after_are_not_training() -> None:
    seen = training(6, change(T + 22, Phase.EVAL), change(T + 24, Phase.TRAIN))
    assert phases(see(*seen)) == ["init", "init", "train", "eval", "eval", "train", "train"]


def test_another_phase_lasts_until_it_ends() -> None:
    seen = [one for one in training(7, change(T + 22, Phase.EVAL), change(T + 44, Phase.TRAIN)) if not (isinstance(one, Steps) and 22 < one.at - T < 44)]
    seen += [line(T + 31), line(T + 41)]
    assert phases(see(*sorted(seen, key=lambda one: one.at)))[1:] == ["init", "train", "eval", "eval", "eval", "eval", "train"]


def test_steps_alone_are_training_where_nobody_tells_phases() -> None:
    assert phases(see(*(steps(T + 10 * number + 5) for number in range(4)))) == ["init", "init", "train", "train"]


def test_steps_that_began_before_the_job_stopped_are_no_training() -> None:
    seen = training(2, change(T + 21, Phase.RESCALE), steps(T + 21.5, first=9, seconds=1.0), line(T + 35), line(T + 45))
    assert phases(see(*seen))[-3:] == ["rescale", "rescale", "rescale"]


def test_whole_steps_after_a_stop_are_training_again() -> None:
    seen = training(6, change(T + 12, Phase.RESCALE))
    assert phases(see(*seen)) == ["init", "init", "rescale", "rescale", "train", "train", "train"]


def test_checkpoints_that_come_all_the_time_are_a_part_of_training() -> None:
    saves = [change(T + 10 * number + 7 + half, phase) for number in range(40) for half, phase in ((0.0, Phase.CHECKPOINT), (0.1, Phase.TRAIN))]
    found = phases(see(*training(40, *saves)))
    assert found[3] == "checkpoint"
    assert set(found[20:]) == {"train"}


def test_a_checkpoint_now_and_then_is_not() -> None:
    saves = [change(T + 100 * number + 7 + half, phase) for number in range(1, 4) for half, phase in ((0.0, Phase.CHECKPOINT), (0.1, Phase.TRAIN))]
    found = phases(see(*training(40, *saves)))
    assert found.count("checkpoint") == 6
    assert found[11:13] == ["checkpoint", "checkpoint"]  # the window before T is the first


def test_a_new_generation_forgets_ranks_and_what_the_old_one_did_in_the_window() -> None:
    seen: list[Observation] = [
        change(T - 5, Phase.TRAIN, world_size=2),
        steps(T + 1, 0),
        steps(T + 1, 1),
        change(T + 3, Phase.INIT, generation=2, world_size=1),
        steps(T + 4, 1, first=3),  # of generation 1, late
        change(T + 4, Phase.STOPPED),  # and its last word
        steps(T + 6, 0, first=3, seconds=1.0, generation=2),
        steps(T + 15, 0, first=5, generation=2),
        steps(T + 25, 0, first=7, generation=2),
    ]
    _, window, after, last = see(*seen)
    assert (window.generation, window.world_size, window.phase, sorted(window.rows)) == (2, 1, Phase.INIT, [0])
    assert window.rows[0].values["steps"] == 2
    assert (after.phase, last.phase) == (Phase.INIT, Phase.TRAIN)


# --- time ----------------------------------------------------------------------------------------------------------------


def test_a_window_waits_a_moment_for_what_comes_late_and_then_no_more() -> None:
    windows = Windows()
    assert windows.see(line(T + 9)) == []
    assert windows.see(line(T + 11)) == []
    assert windows.see(line(T + 9.5)) == []  # late, and in time
    (closed,) = windows.see(line(T + 12.5))
    assert closed.rows[0].values["n_lines"] == 2
    assert windows.see(line(T + 9.9)) == []
    assert windows.late == 1


def test_time_that_passes_closes_windows_though_nothing_comes() -> None:
    windows = Windows()
    windows.see(line(T + 1))
    assert windows.turn(T + 11.9) == []
    (closed,) = windows.turn(T + 12)
    assert closed.ended == T + 10
    assert windows.turn(T + 100) == []


def test_a_worker_with_a_clock_far_ahead_moves_nothing() -> None:
    windows = Windows()
    windows.see(line(T + 1))
    for _ in range(50):
        assert windows.see(steps(T + 1e6)) == []
        assert windows.see(line(T + 2)) == []
    assert windows.refused == 50
    assert windows.newest == T + 2
    (closed,) = windows.turn(T + 13)
    assert closed.rows[0].values["n_lines"] == 51


def test_after_a_long_silence_the_new_time_is_believed() -> None:
    windows = Windows()
    windows.see(line(T + 1))
    closed = [window for number in range(20) for window in windows.see(line(T + 86400 + number))]
    assert closed[0].began == T
    assert closed[1].began == T + 86400
    assert windows.refused < 10


def test_an_agent_is_believed_at_once() -> None:
    windows = Windows()
    windows.see(line(T + 1))
    assert len(windows.see(change(T + 86400, Phase.INIT))) == 1


# --- whatever comes ------------------------------------------------------------------------------------------------------

_TIME = st.floats(0, 1e12) | st.floats(T, T + 60)
_VALUE = st.floats(allow_nan=False, allow_infinity=False, min_value=0)
_RANK = st.integers(0, 3) | st.integers(-5, 2**40)
_OBSERVED = st.one_of(
    st.builds(
        lambda at, rank, text, level: line(at, text, rank, level=level), _TIME, st.none() | _RANK, st.text(max_size=20), st.sampled_from(["", "error", "x"])
    ),
    st.builds(lambda at, rank, seconds, loss: steps(at, rank, seconds=seconds, values={"loss": loss}, samples=3), _TIME, _RANK, _VALUE, _VALUE),
    st.builds(lambda at, values: Ranks(at=at, step=1, ranks=tuple({"seconds": one, "data": one} for one in values)), _TIME, st.lists(_VALUE, max_size=4)),
    st.builds(lambda at, value, gpu: Reading(at=at, values={"cpu": value, "xids": value}, gpu=gpu), _TIME, _VALUE, st.none() | st.integers(0, 2)),
    st.builds(lambda at, phase, generation: change(at, phase, generation=generation), _TIME, st.sampled_from(Phase), st.none() | st.integers(0, 3)),
)


@given(st.lists(_OBSERVED, max_size=25))
def test_windows_come_in_order_once_and_hold_finite_numbers(observations: list[Observation]) -> None:
    found = see(*observations)
    assert [window.began for window in found] == sorted({window.began for window in found})
    for window in found:
        assert all(0 <= rank < RANKS_MAX for rank in window.rows)
        assert all(math.isfinite(value) for row in (*window.rows.values(), *window.nodes.values()) for value in row.values.values())


def test_more_ranks_nodes_or_kinds_than_there_can_be_are_refused() -> None:
    windows = Windows()
    for number in range(NODES_MAX + 100):
        windows.see(line(T, "x", rank=None, node=f"node-{number}"))
    windows.see(line(T, "x", rank=RANKS_MAX))
    (window,) = windows.flush()
    assert len(window.nodes) == NODES_MAX
    assert not window.rows
    assert windows.refused == 101


def test_a_long_run_needs_no_more_memory_than_a_short_one() -> None:
    windows = Windows()

    def run(begin: int, end: int) -> int:
        for number in range(begin, end):
            at = T + number
            for rank in range(4):
                windows.see(steps(at, rank, first=2 * number + 1))
                windows.see(line(at, f"step {number} {chr(97 + number % 26)}{chr(97 + number // 26 % 26)}", rank))
            windows.see(Reading(at=at, values={"cpu": 0.5, "xids": float(number)}, node="node-0", gpu=number % 8))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(0, 800)
        short = run(800, 1000)
        assert run(1000, 3000) - short < 200_000
    finally:
        tracemalloc.stop()
