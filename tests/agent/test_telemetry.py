"""Which words of workers about their steps are believed, and what they come to."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticd.agent.ledger import Given
from elasticd.agent.telemetry import KEEP_SECONDS, KEEP_WINDOWS, MEMORY, TOLD_MAX, Ours, Telemetry, made_of, slowest
from elasticd.observability.report import REPORT_MAX, JobReport
from trainer.errors import ChannelError
from trainer.wire.channel import Ranks
from trainer.wire.window import PHASES, STEP_BOUNDS, Spread, Window

EACH = 0.1


def window(first: int, steps: int = 10, *, rank: int = 4, generation: int = 2, ended: float = 1000.0, **changes: Any) -> dict[str, Any]:
    """Steps of 0.1 s, as a worker sends them."""
    return {
        "rank": rank,
        "generation": generation,
        "first": first,
        "last": first + steps - 1,
        "began": ended - EACH * steps,
        "ended": ended,
        "seconds": EACH * steps,
        "phases": {name: (EACH * steps * share, EACH) for name, share in zip(PHASES, (0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1), strict=True)},
        "buckets": [0] * 4 + [steps] + [0] * (len(STEP_BOUNDS) - 4),
        "slowest": (first, EACH),
        "samples": 32 * steps,
        **changes,
    }


def spread(*values: float) -> dict[str, Any]:
    return asdict(Spread.of(values))


@pytest.fixture
def telemetry() -> Telemetry:
    """Of two workers, ranks 4 and 5 of 8, in generation 2, which begins with step 100."""
    made = Telemetry()
    made.begin(Ours(given=Given(number=2, cause="join", world_size=8, resumed=100), base_rank=4, nproc=2))
    return made


# --- what is believed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"generation": 1}, "generation 1, which does not run here"),
        ({"rank": 5}, "rank 5 from rank 4"),
        ({"first": 100}, "begins with step 100 after step 100"),
        ({"first": 1}, "begins with step 1 after step 100"),
        ({"first": 2**50, "last": 2**50 + 9}, "counts that cannot be"),
        ({"samples": 2**50}, "counts that cannot be"),
        ({"dropped": 2**62}, "counts that cannot be"),
        ({"buckets": [0] * (len(STEP_BOUNDS) + 1)}, "counts that cannot be"),
        ({"values": {"loss": {**spread(1.0), "nonfinite": 2**60}}}, "counts that cannot be"),
        ({"seconds": 1e9}, "times that cannot be"),
        ({"slowest": (101, 1e300)}, "times that cannot be"),
        ({"phases": dict.fromkeys(PHASES, (0.0, 1e300))}, "times that cannot be"),
        ({"seconds": math.nan}, "no number of seconds"),
        ({"rank": "4"}, "no count"),
    ],
)
def test_a_window_that_cannot_be_is_refused_counted_and_changes_nothing(telemetry: Telemetry, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ChannelError, match=why):
        telemetry.take(0, window(101) | changes)
    assert (telemetry.samples, telemetry.dropped, telemetry.reports(), sum(telemetry.step_times.counts)) == (0, 1, (), 0)


def test_a_step_is_believed_once_and_gaps_are_left_open(telemetry: Telemetry) -> None:
    telemetry.take(0, window(101))
    with pytest.raises(ChannelError, match="begins with step 110 after step 110"):
        telemetry.take(0, window(110))
    telemetry.take(0, window(131, dropped=2))
    assert sum(telemetry.step_times.counts) == 20
    assert telemetry.dropped == 3


def test_nothing_is_believed_once_the_workers_are_gone_or_from_more_of_them_than_there_are(telemetry: Telemetry) -> None:
    with pytest.raises(ChannelError):
        telemetry.take(2, window(101, rank=6))
    telemetry.end()
    with pytest.raises(ChannelError):
        telemetry.take(0, window(101))


# --- what it comes to


def test_sums_are_of_all_workers_and_steps_of_the_lowest(telemetry: Telemetry) -> None:
    telemetry.take(0, window(101))
    telemetry.take(1, window(101, rank=5))
    telemetry.take(1, window(111, rank=5))
    assert telemetry.samples == 960
    assert telemetry.step_times.counts[4] == 10
    assert telemetry.step_times.total == pytest.approx(1.0)
    assert telemetry.step_times.bounds == STEP_BOUNDS


def test_a_ranks_numbers_are_means_over_its_last_seconds(telemetry: Telemetry) -> None:
    telemetry.take(0, window(101, ended=1000.0, seconds=100.0))  # long ago when the last one comes
    telemetry.take(0, window(111, 10, ended=1000.5 + KEEP_SECONDS, memory={"rss": 5, "allocated": 6, "strange": 7}))
    telemetry.take(0, window(121, 30, ended=1001.0 + KEEP_SECONDS, seconds=6.0, memory={"rss": 8, "peak": 9, "strange": 7}))
    (rank,) = telemetry.reports()
    assert (rank.local_rank, rank.rank, rank.at, rank.step) == (0, 4, 1001.0 + KEEP_SECONDS, 150)
    assert rank.step_seconds == pytest.approx(7.0 / 40)
    assert rank.phases["backward"] == pytest.approx(0.03)
    assert rank.memory == {"rss": 8, "peak": 9}


def test_a_step_that_takes_longer_than_all_that_is_kept_shows_nevertheless(telemetry: Telemetry) -> None:
    telemetry.take(0, window(101, 1, ended=1000.0, seconds=60.0))
    telemetry.take(0, window(102, 1, ended=1090.0, seconds=90.0))
    (rank,) = telemetry.reports()
    assert rank.step_seconds == 90.0


def test_the_last_finite_loss_and_norm_are_told_and_others_counted(telemetry: Telemetry) -> None:
    telemetry.take(0, window(101, values={"loss": spread(3.0, 2.0), "grad_norm": spread(9.0), "accuracy": spread(math.nan)}))
    telemetry.take(0, window(111, values={"loss": spread(math.nan, math.inf), "grad_norm": spread(math.inf)}))
    telemetry.take(1, window(101, rank=5, values={"loss": spread(7.0)}))
    first, second = telemetry.reports()
    assert (first.loss, first.grad_norm, first.nonfinite) == (2.0, 9.0, 3)
    assert (second.loss, second.grad_norm, second.nonfinite) == (7.0, None, 0)
    assert (telemetry.loss, telemetry.grad_norm) == (2.0, 9.0)
    telemetry.begin(Ours(given=Given(number=3, cause="loss", world_size=8, resumed=100), base_rank=2, nproc=1))
    assert (telemetry.reports(), telemetry.loss) == ((), 2.0)
    telemetry.take(0, window(101, rank=2, generation=3, values={"loss": spread(math.nan)}))
    assert telemetry.reports()[0].nonfinite == 4  # since the agent began


def test_a_worker_that_talks_without_end_fills_no_memory(telemetry: Telemetry) -> None:
    for number in range(KEEP_WINDOWS + 100):
        telemetry.take(0, window(101 + number, 1))
    assert len(telemetry._ranks[0]) == KEEP_WINDOWS
    assert telemetry.samples == 32 * (KEEP_WINDOWS + 100)


def test_a_report_on_very_many_workers_can_still_be_read() -> None:
    telemetry = Telemetry()
    telemetry.begin(Ours(given=Given(number=2, cause="join", world_size=1024), base_rank=0, nproc=1024))
    odd = 1000.0 / 3  # all digits that a number may have
    for rank in range(1024):
        phases = dict.fromkeys(PHASES, (odd, odd))
        telemetry.take(rank, window(101, rank=rank, seconds=odd, phases=phases, memory=dict.fromkeys(MEMORY, 2**40 + 7), values={"loss": spread(odd)}))
    report = JobReport(job="j" * 128, node="n" * 128, at=odd, ranks=telemetry.reports())
    assert [rank.local_rank for rank in report.ranks] == list(range(TOLD_MAX))
    assert len(report.model_dump_json()) < REPORT_MAX / 2


@example({"slowest": ""})
@example({"phases": {"data": []}})
@given(st.dictionaries(st.sampled_from([*window(1), "more"]), st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.lists(st.integers()))))
def test_whatever_a_worker_says_the_report_can_be_written(changes: dict[str, Any]) -> None:
    telemetry = Telemetry()
    telemetry.begin(Ours(given=Given(number=2, cause="join", world_size=8), base_rank=4, nproc=1))
    try:
        telemetry.take(0, {**window(101), **changes})
    except ChannelError:
        assert telemetry.reports() == ()
    report = JobReport(job="j", node="n", at=time.time(), ranks=telemetry.reports(), samples=telemetry.samples, step_times=telemetry.step_times)
    assert JobReport.model_validate_json(report.model_dump_json()) == report


# --- when it was


def test_the_workers_clock_is_brought_to_the_ledgers() -> None:
    made = made_of(Window.from_dict(window(101, 10, ended=1000.0)), clock=1000.5, now=77.5)
    assert (made.first, made.last, made.ended) == (101, 110, 77.0)
    assert made.began == pytest.approx(76.0)


def test_what_a_worker_claims_of_the_future_is_now() -> None:
    made = made_of(Window.from_dict(window(101, 10, ended=9e9)), clock=1000.0, now=50.0)
    assert (made.began, made.ended, made.first_ended) == (50.0, 50.0, 50.0)


@pytest.mark.parametrize(
    ("slow", "seconds", "first_took"),
    [((101, 0.8), 1.7, 0.8), ((103, 0.8), 1.7, 0.1), ((101, 5.0), 1.7, 1.7)],
    ids=["it was the slowest", "it was one of the others", "it cannot have been longer than all"],
)
def test_how_long_the_first_step_took_follows_from_the_slowest(slow: tuple[int, float], seconds: float, first_took: float) -> None:
    made = made_of(Window.from_dict(window(101, 10, began=998.3, ended=1000.0, seconds=seconds, slowest=slow)), clock=1000.0, now=100.0)
    assert made.first_ended - made.began == pytest.approx(first_took)


# --- all ranks side by side


@pytest.mark.parametrize(
    ("seconds", "waited", "found"),
    [
        ([1.0, 1.0, 1.0], [0.5, 0.1, 0.6], (1, pytest.approx(0.9 / 0.5))),
        ([1.0, 1.0], [0.0, 0.0], (0, 1.0)),
        ([1.0], [0.0], None),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 0.0], None),
        ([1.0, 1.0], [2.0, 0.5], (1, pytest.approx(2.0))),
    ],
)
def test_who_waits_least_for_the_others_is_the_slowest(seconds: list[float], waited: list[float], found: object) -> None:
    assert slowest(seconds, waited) == found


def test_rank_0_speaks_for_all_and_nobody_else_does(telemetry: Telemetry) -> None:
    columns: dict[str, Any] = {name: [0.1] * 8 for name in (*PHASES, "seconds")}
    said = Ranks(step=120, steps=20, columns=columns)
    with pytest.raises(ChannelError, match="only rank 0"):
        telemetry.take_ranks(0, said)
    telemetry.begin(Ours(given=Given(number=2, cause="join", world_size=8), base_rank=0, nproc=2))
    with pytest.raises(ChannelError, match="only rank 0"):
        telemetry.take_ranks(1, said)
    columns["seconds"] = [1.0] * 7 + [2.00000049]
    assert telemetry.take_ranks(0, said)["seconds"][-1] == 2.0
    assert telemetry.slowest == (7, pytest.approx(1.9 / 0.9))
    telemetry.end()
    assert telemetry.slowest is None


@pytest.mark.parametrize("column", [[0.1] * 7, [0.1] * 7 + [math.nan], [0.1] * 7 + [-1], [0.1] * 7 + ["x"], [True] * 8, "many", None, [1e300] * 8])
def test_a_column_that_cannot_be_is_refused(telemetry: Telemetry, column: object) -> None:
    telemetry.begin(Ours(given=Given(number=2, cause="join", world_size=8), base_rank=0, nproc=2))
    columns: dict[str, Any] = {name: [0.1] * 8 for name in (*PHASES, "seconds")}
    with pytest.raises(ChannelError, match="forward"):
        telemetry.take_ranks(0, Ranks(step=1, steps=1, columns=columns | {"forward": column}))
    assert telemetry.slowest is None
