"""What was done and what may still be done: the ledger of one job, and the limits that are read from it.

Owns: the ledger's form, how failures are charged and budgets refilled, and every limit on what is done of free will. Must not: write it anywhere; a
transaction that carries a decision out writes the ledger that `after` gives, so that both happen or neither.

The ledger lives in etcd, since a limit that a restarted agent or another coordinator forgets is none (pytorch#147064). Its times are seconds since the epoch
by whichever coordinator wrote them. A time that lies in the future counts as now: a clock that is behind never frees a budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from elasticd.errors import RecordError
from elasticd.policy.decisions import DISRUPTIVE, Action
from elasticd.policy.evidence import Certainty, Fault
from elasticd.policy.failures import FailureClass
from elasticd.policy.reading import Reader
from elasticd.policy.settings import DAY, HOUR, Mode, Settings

if TYPE_CHECKING:
    from elasticd.policy.decisions import Decision
    from elasticd.policy.evidence import Incident
    from elasticd.policy.failures import Failure

DEEDS_MAX: Final = 64
"""Deeds that are remembered; those that stopped the workers are the last to be forgotten."""
FAILURES_MAX: Final = 32
NODES_MAX: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the job is.

    Attributes:
        step: the highest it has ever done, 0 before the first.
        checkpoint_step: of the newest committed checkpoint, 0 if there is none.
        checkpoint_at: when that was committed, seconds since the epoch.
    """

    step: int = 0
    checkpoint_step: int = 0
    checkpoint_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deed:
    """One thing done of free will, or, where `done` is False, one that mode "act" would have done."""

    at: float
    action: Action
    about: str
    fingerprint: str
    node: str = ""
    certain: bool = False
    done: bool = True
    checkpoint_step: int = 0
    step: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PastFailure:
    """One failure that happened."""

    at: float
    cls: FailureClass
    kind: str
    node: str = ""
    checkpoint_step: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """See the module.

    Attributes:
        deeds, failures: the newest, in order of time.
        spent: restarts by class since a checkpoint was further than `refilled_at`.
        refilled_at: the highest step that a committed checkpoint had when anything was charged.
        best_step: the highest step done when a failure was last counted.
        barren: failures in a row without a step beyond that.
        hardware: when a fault of hardware was last seen, by node.
    """

    deeds: tuple[Deed, ...] = ()
    failures: tuple[PastFailure, ...] = ()
    spent: Mapping[FailureClass, int] = field(default_factory=dict)
    refilled_at: int = 0
    best_step: int = 0
    barren: int = 0
    hardware: Mapping[str, float] = field(default_factory=dict)

    def crashes(self, kind: str, node: str | None = None) -> int:
        """Failures of that kind that are remembered, on one node or on all."""
        return sum(one.kind == kind and node in (None, one.node) for one in self.failures)

    def used(self, cls: FailureClass, progress: Progress) -> int:
        """Restarts of that class since the last progress."""
        return 0 if progress.checkpoint_step > self.refilled_at else self.spent.get(cls, 0)

    def losses(self, node: str, progress: Progress) -> int:
        """Losses of that node since the last checkpoint."""
        return sum(one.cls is FailureClass.MEMBERSHIP and one.node == node and one.checkpoint_step >= progress.checkpoint_step for one in self.failures)

    # --- writing ---------------------------------------------------------------------------------------------------------

    def noticed(self, incidents: Iterable[Incident]) -> Ledger:
        """The same, with the faults of hardware among the incidents: they outlive these, and the world in which they were seen."""
        hardware = dict(self.hardware)
        for incident in incidents:
            root = incident.root
            if root.fault is Fault.HARDWARE and root.node and (root.certainty is Certainty.CERTAIN or incident.corroborated):
                hardware[root.node] = max(hardware.get(root.node, 0.0), root.at)
        newest = sorted(hardware, key=lambda node: hardware[node])[-NODES_MAX:]
        kept = {node: hardware[node] for node in newest}
        return self if kept == self.hardware else replace(self, hardware=kept)

    def after(self, decision: Decision, progress: Progress) -> Ledger:
        """The same, with what was decided of free will. Decisions to log leave no trace."""
        if decision.failure or decision.would is Action.LOG:
            return self
        deed = Deed(
            at=decision.at,
            action=decision.would,
            about=decision.about,
            fingerprint=decision.fingerprint,
            node=decision.node,
            certain=decision.certain,
            done=decision.action is decision.would,
            checkpoint_step=progress.checkpoint_step,
            step=progress.step,
            cost_s=decision.numbers.get("C_s", 0.0) + (decision.numbers.get("R_s", 0.0) if decision.would in DISRUPTIVE else 0.0),
        )
        return replace(self, deeds=_shortened((*self.deeds, deed)))

    def failed(self, failure: Failure, decision: Decision, progress: Progress) -> Ledger:
        """The same, with a failure and what it is charged to."""
        past = [
            PastFailure(at=failure.at, cls=failure.cls, kind=failure.kind, node=node, checkpoint_step=progress.checkpoint_step, step=progress.step)
            for node in (failure.nodes[:NODES_MAX] or (failure.node,))
        ]
        refilled = progress.checkpoint_step > self.refilled_at
        spent = {} if refilled else dict(self.spent)
        if decision.charged:
            cls = FailureClass(decision.charged)
            spent[cls] = spent.get(cls, 0) + 1
        return replace(
            self,
            failures=(*self.failures, *past)[-FAILURES_MAX:],
            spent=spent,
            refilled_at=max(self.refilled_at, progress.checkpoint_step),
            barren=barren(self, failure, progress),
            best_step=max(self.best_step, progress.step),
        )

    def opened_again(self) -> Ledger:
        """The same, after somebody has started a job again that a verdict had ended: its restarts are whole again, what happened is not forgotten."""
        return replace(self, spent={}, barren=0)

    # --- in etcd -----------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "deeds": [asdict(deed) for deed in self.deeds],
            "failures": [asdict(past) for past in self.failures],
            "spent": {cls.value: count for cls, count in self.spent.items()},
            "refilled_at": self.refilled_at,
            "best_step": self.best_step,
            "barren": self.barren,
            "hardware": dict(self.hardware),
        }

    @classmethod
    def from_dict(cls, data: object) -> Ledger:
        """Parse what `as_dict` gives, also after JSON.

        Raises:
            RecordError: it is anything else. Who cannot read the ledger has to act as if every budget were used up.
        """
        reader = Reader(data, "ledger")
        spent = reader.counts("spent")
        unknown = set(spent) - {one.value for one in FailureClass}
        if unknown:
            raise RecordError(f"ledger.spent: {min(unknown)[:60]!r} is no class of failures")
        ledger = cls(
            deeds=tuple(_deed(one, f"ledger.deeds[{place}]") for place, one in enumerate(reader.sequence("deeds", DEEDS_MAX))),
            failures=tuple(_past(one, f"ledger.failures[{place}]") for place, one in enumerate(reader.sequence("failures", FAILURES_MAX))),
            spent={FailureClass(name): count for name, count in spent.items()},
            refilled_at=reader.whole("refilled_at", 0),
            best_step=reader.whole("best_step", 0),
            barren=reader.whole("barren", 0),
            hardware=reader.times("hardware", NODES_MAX),
        )
        reader.end()
        return ledger


def _shortened(deeds: tuple[Deed, ...]) -> tuple[Deed, ...]:
    """The newest, but early checkpoints are forgotten before what stopped the workers: that is what the limits of a day are read from."""
    over = len(deeds) - DEEDS_MAX
    if over <= 0:
        return deeds
    ordered = sorted(range(len(deeds)), key=lambda place: (deeds[place].action in DISRUPTIVE, place))
    gone = set(ordered[:over])
    return tuple(deed for place, deed in enumerate(deeds) if place not in gone)


def _deed(data: object, where: str) -> Deed:
    reader = Reader(data, where)
    deed = Deed(
        at=reader.time("at"),
        action=reader.word("action", Action),
        about=reader.name("about"),
        fingerprint=reader.name("fingerprint"),
        node=reader.name("node", ""),
        certain=reader.flag("certain"),
        done=reader.flag("done"),
        checkpoint_step=reader.whole("checkpoint_step", 0),
        step=reader.whole("step", 0),
        cost_s=reader.time("cost_s"),
    )
    reader.end()
    return deed


def _past(data: object, where: str) -> PastFailure:
    reader = Reader(data, where)
    past = PastFailure(
        at=reader.time("at"),
        cls=reader.word("cls", FailureClass),
        kind=reader.name("kind"),
        node=reader.name("node", ""),
        checkpoint_step=reader.whole("checkpoint_step", 0),
        step=reader.whole("step", 0),
    )
    reader.end()
    return past


# --- failures that happened ----------------------------------------------------------------------------------------------


def limit(cls: FailureClass, settings: Settings) -> int | None:
    """Restarts that a class has until the next progress; None: as many as it takes."""
    limits = {
        FailureClass.CODE: settings.code_restarts,
        FailureClass.STARTUP: settings.startup_restarts,
        FailureClass.USER: settings.user_restarts,
        FailureClass.MEMORY: settings.memory_restarts,
        FailureClass.NUMERICS: settings.numerics_restarts,
        FailureClass.UNKNOWN: settings.unknown_restarts,
        FailureClass.INFRASTRUCTURE: settings.infrastructure_restarts,
        FailureClass.HARDWARE: settings.hardware_restarts,
    }
    return limits.get(cls)


def barren(ledger: Ledger, failure: Failure, progress: Progress) -> int:
    """Failures in a row without a new step, this one included. A lost node is not counted; it does not end the row either."""
    if progress.step > ledger.best_step:
        return 0
    return ledger.barren + (failure.cls is not FailureClass.MEMBERSHIP)


def backoff(used: int, settings: Settings, dice: float) -> float:
    """Seconds to wait before restart number `used` + 1 of its class: none before the first, then twice as long each time, up to a limit.

    Args:
        dice: a random number from 0 to 1; the greater, the shorter the delay, by `backoff_jitter` at most.
    """
    if used <= 0 or settings.backoff_first_s <= 0.0:
        return 0.0
    full = min(settings.backoff_most_s, settings.backoff_first_s * 2.0 ** min(used - 1, 62))
    return full * (1.0 - settings.backoff_jitter * min(1.0, max(0.0, dice)))


# --- of free will ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A limit that says no: its name, and a sentence."""

    rule: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the ledger allows at one moment. Real deeds are held against real ones, and what would have been done against the same.

    Attributes:
        cluster: times at which any job's workers were stopped of free will.
        restart_s: what a restart takes here.
    """

    ledger: Ledger
    settings: Settings
    progress: Progress
    cluster: tuple[float, ...]
    restart_s: float
    now: float

    @property
    def deeds(self) -> tuple[Deed, ...]:
        """Those of the mode that is set."""
        acting = self.settings.mode is Mode.ACT
        return tuple(deed for deed in self.ledger.deeds if deed.done == acting)

    def within(self, seconds: float, at: float) -> bool:
        """Whether that was less than so long ago; what lies in the future is now."""
        return self.now - at < seconds

    def stops(self, seconds: float) -> list[Deed]:
        """What stopped the workers that recently."""
        return [deed for deed in self.deeds if deed.action in DISRUPTIVE and self.within(seconds, deed.at)]

    def refuse_checkpoint(self) -> Refusal | None:
        """Whether another early checkpoint is too many."""
        times = [deed.at for deed in self.deeds if deed.action is Action.CHECKPOINT]
        last = max(times, default=None)
        settings = self.settings
        if last is not None and self.within(settings.early_gap_s, last):
            return Refusal(rule="checkpoint_gap", why=f"the last early checkpoint was asked for less than {settings.early_gap_s:.0f} s ago")
        if sum(self.within(HOUR, at) for at in times) >= settings.early_per_hour:
            return Refusal(rule="checkpoint_budget", why=f"{settings.early_per_hour} early checkpoints were asked for within the hour")
        return None

    def refuse_stop_of_workers(self, fingerprint: str, *, certain: bool) -> Refusal | None:
        """Whether another restart or exclusion is too many, for this thing, this job or the cluster."""
        settings = self.settings
        checks = (
            self._cluster(),
            self._job(HOUR, "hour", settings.certain_per_hour, None),
            self._job(DAY, "day", settings.certain_per_day, None),
            self._fingerprint(fingerprint),
            *(() if certain else self._by_statistics(fingerprint)),
        )
        return next((refusal for refusal in checks if refusal is not None), None)

    def _by_statistics(self, fingerprint: str) -> tuple[Refusal | None, ...]:
        settings = self.settings
        done = sum(deed.fingerprint == fingerprint and not deed.certain for deed in self.stops(DAY))
        again = f"{done} time{'s' * (done != 1)} in a day the workers were stopped for this by a statistic alone, of {settings.statistic_restarts}"
        return (
            self._cooldown(),
            self._job(HOUR, "hour", settings.restarts_per_hour, False),
            self._job(DAY, "day", settings.restarts_per_day, False),
            Refusal(rule="budget_statistic", why=again) if done >= settings.statistic_restarts else None,
        )

    def _cooldown(self) -> Refusal | None:
        last = max(self.stops(DAY), key=lambda deed: deed.at, default=None)
        if last is None:
            return None
        length = max(self.settings.cooldown_s, self.settings.cooldown_restarts * self.restart_s)
        if self.within(length, last.at):
            return Refusal(rule="cooldown", why=f"the workers were stopped less than {length:.0f} s ago for {last.fingerprint}")
        if self.progress.checkpoint_step <= last.checkpoint_step:
            return Refusal(rule="cooldown", why=f"no checkpoint is newer than the last stop of the workers, for {last.fingerprint}")
        return None

    def _job(self, seconds: float, name: str, most: int, certain: bool | None) -> Refusal | None:
        count = sum(certain is None or deed.certain == certain for deed in self.stops(seconds))
        which = "" if certain is None else " by statistics alone"
        return (
            Refusal(rule=f"budget_job_{name}", why=f"the job's workers were stopped {count} times of free will{which} in one {name}, of {most}")
            if count >= most
            else None
        )

    def _fingerprint(self, fingerprint: str) -> Refusal | None:
        most = self.settings.fingerprint_restarts
        count = sum(deed.fingerprint == fingerprint and deed.checkpoint_step >= self.progress.checkpoint_step for deed in self.stops(DAY))
        why = f"{count} stops of the workers for {fingerprint} without a new checkpoint, of {most}"
        return Refusal(rule="budget_fingerprint", why=why) if count >= most else None

    def _cluster(self) -> Refusal | None:
        most = self.settings.cluster_per_hour
        own = sum(1 for _ in self.stops(HOUR))
        count = max(own, sum(self.within(HOUR, at) for at in self.cluster))
        why = f"workers of the cluster's jobs were stopped {count} times of free will within the hour, of {most}"
        return Refusal(rule="budget_cluster", why=why) if count >= most else None

    def rolled_back(self) -> bool:
        """Whether the job went back to a good state and is not well beyond the place where it diverged."""
        return rolled_back(self.ledger, self.deeds, self.progress, self.settings, self.now)

    def exclusions(self, node: str) -> int:
        """Exclusions of that node within a day."""
        return Counter(deed.node for deed in self.stops(DAY) if deed.action is Action.EXCLUDE)[node]


def rolled_back(ledger: Ledger, deeds: Iterable[Deed], progress: Progress, settings: Settings, now: float) -> bool:
    """Whether the job has gone back for a divergence, and another one would be the same again: too near, or too often in a day.

    Args:
        deeds: those of the ledger that count.
    """
    back = [(deed.at, deed.step) for deed in deeds if deed.action is Action.ROLLBACK]
    back += [(past.at, past.step) for past in ledger.failures if past.cls is FailureClass.NUMERICS]
    if any(progress.step <= step + settings.divergence_clear_steps for _, step in back):
        return True
    return sum(now - at < DAY for at, _ in back) >= settings.rollbacks_per_day
