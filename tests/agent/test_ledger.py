"""What an agent's time went into, what was made twice, and what interruptions cost: events with their times in, numbers out."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from elasticd.agent.ledger import OVERDUE, SILENCE, UNTOLD, Given, Ledger, Made, Recovery
from elasticd.agent.timeline import Timeline
from elasticd.observability.report import Activity, Phase


def generation(number: int, *, cause: str = "loss", resumed: int = 0, world: int = 2) -> Given:
    return Given(number=number, cause=cause, world_size=world, resumed=resumed)


def steps(first: int, last: int, began: float, ended: float, first_ended: float | None = None) -> Made:
    each = (ended - began) / (last - first + 1)
    return Made(first=first, last=last, began=began, ended=ended, first_ended=began + each if first_ended is None else first_ended)


def trained_until_stopped() -> Ledger:
    """Began at 0, generation 1 at 10, workers up at 11, spoke at 15, 50 steps from 20 to 70, told to stop at 71 and gone at 73."""
    ledger = Ledger(0.0)
    ledger.given(10, generation(1, cause="form"))
    ledger.started(11)
    ledger.spoke(15)
    ledger.made(steps(1, 50, 20, 70))
    ledger.stopping(71)
    ledger.stopped(73)
    return ledger


def spent(ledger: Ledger, now: float) -> dict[str, float]:
    ledger.close(now)
    return {activity.value: pytest.approx(seconds) for activity, seconds in ledger.seconds(now).items() if seconds}


def again(ledger: Ledger, *, resumed: int, cause: str = "loss") -> None:
    """Generation 2 at 80: up at 81, spoke at 84, state taken over at 86, first step done at 87."""
    ledger.given(80, generation(2, cause=cause, resumed=resumed, world=1))
    ledger.started(81)
    ledger.spoke(84)
    ledger.restored(86)
    ledger.first_step(87)


# --- every moment in one activity


def test_an_undisturbed_run_is_forming_starting_restoring_and_training() -> None:
    ledger = Ledger(0.0)
    assert ledger.activity is Activity.FORMING
    ledger.idle(2, Activity.WAITING)
    ledger.idle(5, Activity.FORMING)
    ledger.given(10, generation(1, cause="form"))
    ledger.started(11)
    assert ledger.activity is Activity.STARTING
    ledger.spoke(15)
    assert ledger.activity is Activity.RESTORING
    ledger.made(steps(1, 50, 16, 17))
    assert ledger.activity is Activity.TRAINING
    assert spent(ledger, 30) == {"waiting": 3, "forming": 7, "starting": 5, "restoring": 1, "training": 14}


def test_the_newest_seconds_are_open_and_what_comes_late_falls_into_them() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1))
    ledger.spoke(10)
    assert sum(ledger.seconds(12).values()) == 9
    ledger.made(steps(1, 9, 10.5, 12))  # told at 12, and the first step began at 10.5
    assert spent(ledger, 20) == {"forming": 1, "starting": 9, "restoring": 0.5, "training": 9.5}


def test_what_comes_too_late_counts_from_then_on_and_takes_nothing_back() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1))
    ledger.spoke(2)
    before = ledger.seconds(20)
    ledger.made(steps(1, 2, 5, 20))
    after = ledger.seconds(20)
    assert after == before
    assert spent(ledger, 20) == {"forming": 1, "starting": 1, "restoring": 15, "training": 3}


def test_steps_made_while_workers_are_being_stopped_count_and_that_time_is_stopping() -> None:
    ledger = Ledger(0.0)
    ledger.given(0, generation(1))
    ledger.spoke(1)
    ledger.stopping(10)
    ledger.made(steps(1, 4, 11, 12))
    ledger.stopped(13)
    assert (ledger.steps, ledger.step) == (4, 4)
    assert spent(ledger, 13) == {"starting": 1, "restoring": 9, "stopping": 3}


def test_an_agent_without_etcd_and_without_workers_is_frozen_and_one_with_workers_trains() -> None:
    ledger = trained_until_stopped()
    ledger.idle(75, Activity.FROZEN)
    assert ledger.activity is Activity.FROZEN
    ledger.given(80, generation(2))
    ledger.idle(81, Activity.FROZEN)
    assert ledger.activity is Activity.STARTING


# --- what was made twice


def test_steps_that_were_lost_are_counted_and_made_again_until_the_first_new_one() -> None:
    ledger = trained_until_stopped()
    again(ledger, resumed=40)
    assert (ledger.steps_lost, ledger.step) == (10, 40)
    assert ledger.activity is Activity.REPEATING
    ledger.made(steps(41, 60, 86, 88))  # ten steps a second: the 50th is done at 87
    assert ledger.activity is Activity.TRAINING
    assert (ledger.steps, ledger.step) == (70, 60)
    assert spent(ledger, 90) == {"forming": 17, "starting": 9, "restoring": 7, "training": 54, "stopping": 2, "repeating": 1}


@pytest.mark.parametrize(("first", "last", "at"), [(41, 45, None), (41, 50, 87.0), (49, 52, 86.5), (51, 60, 86.0)])
def test_repeating_ends_where_the_highest_step_is_reached_again(first: int, last: int, at: float | None) -> None:
    ledger = trained_until_stopped()
    again(ledger, resumed=40)
    ledger.made(steps(first, last, 86, 87))
    ended = spent(ledger, 100)
    assert ended.get("repeating", 0) == pytest.approx(14 if at is None else at - 86)


def test_nothing_is_lost_where_the_next_generation_begins_at_the_newest_step() -> None:
    ledger = trained_until_stopped()
    again(ledger, resumed=50)
    assert ledger.steps_lost == 0
    assert ledger.activity is Activity.TRAINING


def test_a_second_loss_of_the_same_steps_counts_once_more_and_the_highest_step_stays() -> None:
    ledger = trained_until_stopped()
    again(ledger, resumed=40)
    ledger.made(steps(41, 45, 86, 88))
    ledger.stopping(88)
    ledger.stopped(88)
    ledger.given(89, generation(3, resumed=40))
    ledger.spoke(89)
    ledger.restored(90)
    assert ledger.steps_lost == 15
    assert ledger.activity is Activity.REPEATING
    ledger.made(steps(41, 50, 90, 100))
    assert ledger.activity is Activity.TRAINING


def test_a_snapshot_shows_that_a_killed_worker_had_got_further_than_it_told() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1))
    ledger.spoke(2)
    ledger.made(steps(1, 50, 3, 4))
    ledger.stopping(5)
    ledger.stopped(5, newest=57)
    ledger.given(6, generation(2, resumed=56))
    assert (ledger.steps_lost, ledger.steps) == (1, 50)


# --- interruptions


def test_a_recovery_has_phases_that_sum_to_it_and_its_downtime_goes_to_its_cause() -> None:
    ledger = trained_until_stopped()
    again(ledger, resumed=40, cause="loss")
    (recovery,) = ledger.take_recoveries()
    phases = {Phase.STOP: 2, Phase.FORM: 7, Phase.START: 4, Phase.RESTORE: 2, Phase.FIRST_STEP: 1}
    assert recovery == Recovery(
        cause="loss",
        seconds=16,
        phases=phases,
        downtime=16,  # it steps once a second, and was told to stop a second after its last word
        steps_lost=10,
        before=generation(1, cause="form"),
        after=generation(2, resumed=40, world=1),
    )
    assert ledger.downtime == {"loss": 16}
    assert ledger.rescales == {"form": 1, "loss": 1}
    assert ledger.recovery_phases == phases
    assert (sum(ledger.recovery.counts), ledger.recovery.total) == (1, 16)
    assert ledger.take_recoveries() == []


def test_the_first_formation_is_no_recovery() -> None:
    ledger = trained_until_stopped()
    assert ledger.take_recoveries() == []
    assert ledger.downtime == {}


def test_workers_that_had_hung_before_they_were_stopped_were_down_since_their_last_step() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1))
    ledger.spoke(2)
    ledger.made(steps(1, 5, 3, 4))
    ledger.stopping(4 + 1 + OVERDUE + 100)
    ledger.stopped(4 + 1 + OVERDUE + 100)
    ledger.given(200, generation(2, resumed=5))
    ledger.restored(201)
    ledger.first_step(202)
    assert ledger.downtime == {"loss": pytest.approx(202 - 4)}
    (recovery,) = ledger.take_recoveries()
    assert recovery.seconds == pytest.approx(202 - 107.5)


def test_a_generation_that_ends_before_its_first_step_prolongs_the_interruption_and_the_first_cause_counts() -> None:
    ledger = trained_until_stopped()
    ledger.given(80, generation(2, cause="join", resumed=50))
    ledger.started(81)
    ledger.stopping(85)
    ledger.stopped(86)
    ledger.given(90, generation(3, cause="loss", resumed=50))
    ledger.spoke(92)
    ledger.restored(93)
    ledger.first_step(94)
    (recovery,) = ledger.take_recoveries()
    assert (recovery.cause, recovery.seconds, recovery.before.number, recovery.after.number) == ("join", 23, 1, 3)
    assert recovery.phases == {Phase.STOP: 3, Phase.FORM: 11, Phase.START: 7, Phase.RESTORE: 1, Phase.FIRST_STEP: 1}
    assert ledger.rescales == {"form": 1, "join": 1, "loss": 1}


def test_without_a_state_to_take_over_the_first_word_about_steps_says_when_the_first_began() -> None:
    ledger = trained_until_stopped()
    ledger.given(80, generation(2))
    ledger.spoke(82)
    ledger.first_step(85)
    assert ledger.take_recoveries() == []
    ledger.made(steps(1, 10, 84, 86, first_ended=84.9))
    (recovery,) = ledger.take_recoveries()
    assert recovery.phases == {Phase.STOP: 2, Phase.FORM: 7, Phase.START: 2, Phase.RESTORE: 2, Phase.FIRST_STEP: 1}
    assert recovery.steps_lost == 50


def test_workers_that_keep_their_telemetry_to_themselves_have_recovered_after_their_first_step() -> None:
    ledger = trained_until_stopped()
    ledger.given(80, generation(2))
    ledger.spoke(82)
    ledger.first_step(85)
    ledger.tick(85 + UNTOLD)
    (recovery,) = ledger.take_recoveries()
    assert (recovery.seconds, recovery.phases[Phase.FIRST_STEP]) == (14, 0)
    assert ledger.activity is Activity.REPEATING


def test_a_script_that_does_not_use_trainer_trains_while_it_runs() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1, cause="form"))
    ledger.started(2)
    ledger.tick(SILENCE)
    assert ledger.activity is Activity.STARTING  # it may yet say something
    ledger.tick(2 + SILENCE)
    assert ledger.activity is Activity.TRAINING
    ledger.stopping(50)
    ledger.stopped(51)
    ledger.given(55, generation(2, cause="worker_failed"))
    ledger.started(56)
    assert ledger.activity is Activity.TRAINING  # known by now
    (recovery,) = ledger.take_recoveries()
    assert (recovery.seconds, recovery.downtime) == (6, 6)
    assert recovery.phases == {Phase.STOP: 1, Phase.FORM: 4, Phase.START: 1}
    assert (ledger.step, ledger.steps, ledger.steps_lost) == (0, 0, 0)


def test_a_script_that_was_silent_and_now_speaks_is_believed() -> None:
    ledger = Ledger(0.0)
    ledger.given(1, generation(1))
    ledger.started(2)
    ledger.tick(2 + SILENCE)
    ledger.stopping(50)
    ledger.stopped(51)
    ledger.given(55, generation(2))
    ledger.started(56)
    ledger.spoke(60)
    assert ledger.activity is Activity.RESTORING


# --- whatever happens, in whatever order

TIME = st.floats(0, 500, allow_nan=False)
STEP = st.integers(1, 60)
EVENTS: list[tuple[str, Any]] = [
    ("idle", st.tuples(st.sampled_from([Activity.WAITING, Activity.FORMING, Activity.FROZEN]))),
    ("given", st.tuples(st.builds(Given, number=STEP, cause=st.sampled_from(["loss", "join"]), world_size=STEP, resumed=st.integers(0, 60)))),
    ("started", st.just(())),
    ("spoke", st.just(())),
    ("restored", st.just(())),
    ("first_step", st.just(())),
    ("stopping", st.just(())),
    ("stopped", st.tuples(st.integers(0, 60))),
    ("tick", st.just(())),
]
EVENT = st.one_of(*(st.tuples(st.just(name), arguments) for name, arguments in EVENTS))
TIMES = st.fixed_dictionaries(dict.fromkeys(("began", "ended", "first_ended"), TIME))
MADE = st.builds(lambda first, more, times: Made(first=first, last=first + more, **times), STEP, st.integers(0, 20), TIMES)
HAPPENING = st.tuples(st.floats(0, 20), st.one_of(EVENT, st.tuples(st.just("made"), st.tuples(MADE))))


@settings(max_examples=300, deadline=None)
@drawn(st.lists(HAPPENING, max_size=60), st.floats(0, 10))
def test_all_time_is_in_some_activity_and_no_number_ever_falls(happenings: list[tuple[float, tuple[str, tuple[Any, ...]]]], lag: float) -> None:
    ledger, now = Ledger(0.0, lag=lag), 0.0
    seen: list[dict[str, float]] = []
    for later, (name, arguments) in happenings:
        now += later
        getattr(ledger, name)(*arguments) if name == "made" else getattr(ledger, name)(now, *arguments)
        seconds = ledger.seconds(now)
        assert math.fsum(seconds.values()) == pytest.approx(max(0.0, now - lag))
        numbers = {**seconds, **ledger.downtime, **ledger.rescales, **ledger.recovery_phases, "steps": ledger.steps, "lost": ledger.steps_lost}
        seen.append({str(key): value for key, value in numbers.items()} | {"recoveries": sum(ledger.recovery.counts)})
    for before, after in pairwise(seen):
        assert all(after.get(name, 0) >= value for name, value in before.items())
    ledger.close(now)
    assert math.fsum(ledger.seconds(now).values()) == pytest.approx(now)
    recoveries = ledger.take_recoveries()
    assert len(recoveries) == sum(ledger.recovery.counts)
    for recovery in recoveries:
        assert math.fsum(recovery.phases.values()) == pytest.approx(recovery.seconds)
        assert min(recovery.phases.values()) >= 0
    assert math.fsum(ledger.recovery_phases.values()) == pytest.approx(ledger.recovery.total)


@settings(max_examples=200, deadline=None)
@drawn(st.lists(st.tuples(TIME, st.sampled_from(list(Activity))), max_size=30))
def test_marks_in_any_order_come_to_the_same_as_in_theirs(marks: list[tuple[float, Activity]]) -> None:
    """As long as all of them fall into what is still open, and no two at the same time."""
    marks = list(dict(marks).items())
    given, sorted_ = Timeline(0.0, Activity.WAITING, 1000.0), Timeline(0.0, Activity.WAITING, 1000.0)
    for at, activity in marks:
        given.mark(at, activity)
    for at, activity in sorted(marks):
        sorted_.mark(at, activity)
    given.close(600)
    sorted_.close(600)
    assert given.seconds(600) == pytest.approx(sorted_.seconds(600))


# --- how far it has come


def test_what_is_reached_counts_the_first_step_before_anybody_tells_of_it() -> None:
    ledger = Ledger(0.0)
    assert ledger.reached == 0
    ledger.given(10, generation(1, cause="form", resumed=40))
    ledger.started(11)
    ledger.spoke(12)
    assert ledger.reached == 40
    ledger.restored(13)
    ledger.first_step(14)
    assert ledger.reached == 41
    ledger.made(steps(41, 50, 13, 20))
    assert ledger.reached == 50
    ledger.stopping(21)
    ledger.stopped(22)
    ledger.given(23, generation(2, resumed=45))
    assert ledger.reached == 45
