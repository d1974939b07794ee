"""The books of one agent: what its time went into, which steps were made twice, and what each interruption of training cost.

Owns: turning what happens, with its time, into these numbers. Must not: read a clock, or know where an event comes from.

All times are seconds on one clock, the caller's. Events may come late and in any order: nothing is then counted twice, no sum ever falls.

An interruption begins with the order to stop, or with the first worker's end, and is over with the end of the first step after it. If the workers
of the next generation end before that, it goes on. A script that does not use `trainer` says nothing of its steps: it trains while it runs. One that
was told to keep what it measures to itself still says that it has taken over a state, and that its first step is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from elasticd.agent.timeline import Timeline
from elasticd.observability.report import Activity, Histogram, Phase

LAG: Final = 3.0
"""Seconds that a word about steps may take to get here; see `timeline`. What comes later still counts, from then on."""
UNTOLD: Final = 2.5
"""Seconds after the first step's end for which the word about it, which says when it began, is waited for."""
SILENCE: Final = 30.0
"""Seconds after which workers that have said nothing are taken not to use `trainer`."""
OVERDUE: Final = 2.5
"""Seconds, beyond the last word's own span, within which a worker that steps says the next one. If it did not, it had been hanging since then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A generation that this node was given.

    Attributes:
        number: of it.
        cause: kind of its cause.
        world_size: its workers on all nodes.
        resumed: step of the state that it begins with; 0: the very beginning.
    """

    number: int
    cause: str
    world_size: int
    resumed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Steps that were made, one after the other.

    Attributes:
        first, last: of them.
        began, ended: when.
        first_ended: when the first of them was done.
    """

    first: int
    last: int
    began: float
    ended: float
    first_ended: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """An interruption that is over.

    Attributes:
        cause: kind of cause of the first generation after it began.
        seconds: from its beginning to the end of the first step.
        phases: together they are `seconds`.
        downtime: seconds from the last step before to the end of the first one after; None if there was none before.
        steps_lost: that had to be made again.
        before, after: generations that trained.
    """

    cause: str
    seconds: float
    phases: Mapping[Phase, float]
    downtime: float | None
    steps_lost: int
    before: Given
    after: Given


@dataclass(slots=True)
class _Interruption:
    """One that is not over. `down_since`: the last step before it."""

    before: Given
    since: float
    down_since: float | None
    phase: Phase = Phase.STOP
    phases: dict[Phase, float] = field(default_factory=dict)
    cause: str = ""
    steps_lost: int = 0

    def move(self, at: float, phase: Phase) -> None:
        """Another phase begins."""
        at = max(at, self.since)
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + at - self.since
        self.phase, self.since = phase, at


class _Stage(Enum):
    IDLE = auto()  # no generation at hand
    STARTING = auto()
    RESTORING = auto()
    STEPPING = auto()
    STOPPING = auto()


class Ledger:
    """See the module.

    Args:
        at: when the agent began.
        lag: see `timeline`.

    Attributes:
        step: newest of the generation at hand, or the last.
        steps: made; a step counts once for each time that it is made.
        steps_lost: that had to be made again.
        downtime: kind of cause -> seconds from the last step before to the end of the first one after.
        rescales: kind of cause -> generations.
        recovery, recovery_phases: of the interruptions that are over.
    """

    def __init__(self, at: float, *, lag: float = LAG) -> None:
        self.step = 0
        self.steps = 0
        self.steps_lost = 0
        self.downtime: dict[str, float] = {}
        self.rescales: Counter[str] = Counter()
        self.recovery = Histogram()
        self.recovery_phases: dict[Phase, float] = {}
        self._time = Timeline(at, Activity.FORMING, lag)
        self._stage = _Stage.IDLE
        self._given: Given | None = None
        self._given_at = at
        self._high = 0  # newest step ever made
        self._silent = False  # the workers are known not to use `trainer`
        self._started_at: float | None = None
        self._stopping_at: float | None = None
        self._last: Made | None = None  # of the generation at hand
        self._first_ended: float | None = None  # of its steps
        self._interruption: _Interruption | None = None
        self._over: list[Recovery] = []

    # --- what happens ----------------------------------------------------------------------------------------------------

    def idle(self, at: float, activity: Activity) -> None:
        """What this node does while it has no generation."""
        if self._stage is _Stage.IDLE:
            self._time.mark(at, activity)

    def given(self, at: float, given: Given) -> None:
        """A generation: its workers are about to start."""
        lost = max(0, self.step - given.resumed)
        self.steps_lost += lost
        self.step = given.resumed
        self.rescales[given.cause] += 1
        self._given, self._given_at, self._stage = given, at, _Stage.STARTING
        self._started_at, self._stopping_at, self._last, self._first_ended = None, None, None, None
        self._time.mark(at, Activity.STARTING)
        if self._interruption is not None:
            self._interruption.move(at, Phase.START)
            self._interruption.cause = self._interruption.cause or given.cause
            self._interruption.steps_lost += lost

    def started(self, at: float) -> None:
        """The workers run."""
        self._started_at = at
        if self._silent:
            self._run_silently(at)

    def spoke(self, at: float) -> None:
        """All workers have said their first word."""
        if self._stage is _Stage.STARTING or (self._stage is _Stage.STEPPING and self._silent):
            self._stage = _Stage.RESTORING
            self._time.mark(at, Activity.RESTORING)
            self._move(at, Phase.RESTORE)
        self._silent = False

    def restored(self, at: float) -> None:
        """They have taken over the state: the first step begins."""
        if self._stage in {_Stage.STARTING, _Stage.RESTORING}:
            self._begin_steps(at)

    def first_step(self, at: float) -> None:
        """The first step is done."""
        if self._stage in {_Stage.IDLE, _Stage.STOPPING} or self._first_ended is not None:
            return
        self._first_ended = at
        if self._stage is _Stage.STEPPING:  # when it began is known
            self._end_interruption(at)

    def made(self, made: Made) -> None:
        """Steps were made, as the lowest local rank says. May arrive late; without a generation at hand it is passed over."""
        if self._stage is _Stage.IDLE or self._given is None:
            return
        floor = self._given_at  # a clock may have been set, and a worker may say anything
        made = replace(made, began=max(made.began, floor), ended=max(made.ended, floor), first_ended=max(made.first_ended, floor))
        if self._last is None:
            self._first_steps(made)
        self._catch_up(made)
        self.steps += made.last - made.first + 1
        self._last = made
        self.step = max(self.step, made.last)
        self._high = max(self._high, made.last)

    def stopping(self, at: float) -> None:
        """The workers are to stop, or the first of them has ended."""
        if self._stage in {_Stage.IDLE, _Stage.STOPPING} or self._given is None:
            return
        self._notice(at, patience=0.0)
        if self._interruption is None:
            self._interruption = _Interruption(before=self._given, since=at, down_since=self._last_step(at))
        else:
            self._interruption.move(at, Phase.STOP)
        self._stage, self._stopping_at = _Stage.STOPPING, at
        self._time.mark(at, Activity.STOPPING)

    def stopped(self, at: float, newest: int = 0) -> None:
        """The last worker has ended.

        Args:
            at: when.
            newest: step of the newest whole snapshot of this generation, 0 if there is none: a worker that was killed could not tell of its last steps.
        """
        if self._stage is _Stage.IDLE:
            return
        self.stopping(at)
        if self._last is not None:  # else nobody will tell when it is reached again
            self._high = max(self._high, newest)
        self.step = max(self.step, newest)
        self._stage = _Stage.IDLE
        self._time.mark(at, Activity.FORMING)
        self._move(at, Phase.FORM)

    def tick(self, at: float) -> None:
        """Time has passed."""
        self._notice(at, patience=UNTOLD)

    def close(self, at: float) -> None:
        """The agent ends."""
        self._time.close(at)

    # --- what came of it -------------------------------------------------------------------------------------------------

    @property
    def activity(self) -> Activity:
        """At this moment."""
        return self._time.activity

    @property
    def reached(self) -> int:
        """The newest step that is known to have been made in the generation at hand, or the one that it began with."""
        begun = self._given.resumed if self._given else 0
        return max(self.step, begun, begun + 1 if self._first_ended is not None else 0)

    @property
    def at_hand(self) -> Given | None:
        """The generation whose workers start, run or stop; None if there is none."""
        return self._given if self._stage is not _Stage.IDLE else None

    @property
    def last(self) -> Given | None:
        """The generation at hand, or the last."""
        return self._given

    def seconds(self, now: float) -> dict[Activity, float]:
        """What the time went into, up to `lag` before now."""
        return self._time.seconds(now)

    def take_recoveries(self) -> list[Recovery]:
        """Those that are over since this was last asked."""
        over, self._over = self._over, []
        return over

    # --- steps -----------------------------------------------------------------------------------------------------------

    @property
    def _kind_of_steps(self) -> Activity:
        return Activity.REPEATING if self.step < self._high else Activity.TRAINING

    def _first_steps(self, made: Made) -> None:
        """The first of this generation: the interruption before it is over, unless its workers are being stopped already."""
        if self._stage in {_Stage.STARTING, _Stage.RESTORING}:
            self._begin_steps(made.began)
        elif self._stage is _Stage.STOPPING and self._first_ended is None and self._before_the_stop(made.began):
            self._time.mark(made.began, self._kind_of_steps)
        if self._first_ended is None:
            self._first_ended = made.first_ended
        if self._stage is _Stage.STEPPING:
            self._end_interruption(self._first_ended)

    def _begin_steps(self, at: float) -> None:
        self._stage = _Stage.STEPPING
        self._time.mark(at, self._kind_of_steps)
        self._move(at, Phase.FIRST_STEP)

    def _notice(self, at: float, *, patience: float) -> None:
        """What nobody says: that a script does not use `trainer`, or keeps when it stepped to itself."""
        started, first = self._started_at, self._first_ended
        if self._stage is _Stage.STARTING and started is not None and at - started >= SILENCE:
            self._silent = True
            self._run_silently(started)
        elif self._stage in {_Stage.STARTING, _Stage.RESTORING} and first is not None and at - first >= patience:
            self._begin_steps(first)
            self._end_interruption(first)

    def _catch_up(self, made: Made) -> None:
        """The first step that had not been made before ends the repeating."""
        if not self.step < self._high <= made.last:
            return
        repeated = max(0, self._high - made.first + 1) / (made.last - made.first + 1)
        at = made.began + repeated * (made.ended - made.began)
        if self._before_the_stop(at):
            self._time.mark(at, Activity.TRAINING)

    def _before_the_stop(self, at: float) -> bool:
        return self._stopping_at is None or at < self._stopping_at

    def _last_step(self, at: float) -> float | None:
        """When the last step was made before workers were stopped at `at`, as far as one can know: they speak of their steps about once a second."""
        if self._last is None:
            return at if self._silent or self._first_ended is not None else None
        span = self._last.ended - self._last.began
        return at if at - self._last.ended <= OVERDUE + span else self._last.ended

    # --- interruptions ---------------------------------------------------------------------------------------------------

    def _run_silently(self, at: float) -> None:
        self._stage = _Stage.STEPPING
        self._time.mark(at, Activity.TRAINING)
        self._end_interruption(at)

    def _move(self, at: float, phase: Phase) -> None:
        if self._interruption is not None:
            self._interruption.move(at, phase)

    def _end_interruption(self, at: float) -> None:
        interruption, self._interruption = self._interruption, None
        if interruption is None:
            return
        interruption.move(at, interruption.phase)
        after, phases = self._given, interruption.phases
        assert after is not None  # it was given, or nothing would have ended
        seconds = sum(phases.values())
        downtime = None if interruption.down_since is None else max(0.0, interruption.since - interruption.down_since)
        self.recovery = self.recovery.plus(seconds)
        for phase, spent in phases.items():
            self.recovery_phases[phase] = self.recovery_phases.get(phase, 0.0) + spent
        if downtime is not None:
            self.downtime[interruption.cause] = self.downtime.get(interruption.cause, 0.0) + downtime
        self._over.append(
            Recovery(
                cause=interruption.cause,
                seconds=seconds,
                phases=dict(phases),
                downtime=downtime,
                steps_lost=interruption.steps_lost,
                before=interruption.before,
                after=after,
            )
        )
