"""What a run has been through so far, and the sentences that tell it.

Owns: turning events, looks at etcd and worker output into a state to draw and notices to say. Must not: print, read a file or a clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.cli.follow import AgentEvent, OutputLine
    from elasticd.rendezvous.status import JobStatus

_STEP = re.compile(rb"\bstep[ =:]*([0-9]{1,15})", re.IGNORECASE)
_REPEAT = 60.0
"""Seconds in which one and the same warning is said once: an agent in trouble repeats itself every few seconds."""
_LONGEST_FIELD = 300
_TOLD_OTHERWISE = re.compile(r"training|the job has ended|(activating|proposing|ending|judging).*|.*; the workers start again in a moment", re.DOTALL)
"""Decisions that other events tell better."""


class Weight(Enum):
    """How much a notice matters."""

    QUIET = "quiet"
    NORMAL = "normal"
    GOOD = "good"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One sentence for a person. `at` is seconds since the epoch, None for now."""

    text: str
    weight: Weight = Weight.NORMAL
    at: float | None = None


@dataclass(kw_only=True, slots=True)
class GenerationSeen:
    """One generation of this run. Times are seconds since the epoch."""

    number: int
    cause: str = ""
    world_size: int = 0
    nodes: int = 0
    formed_at: float | None = None
    first_worker_up_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """A worker that failed by itself. `log` is its standard error."""

    generation: int
    rank: int
    node: str
    detail: str
    log: Path | None
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEnd:
    """How an agent says it ended: succeeded, stopped, left or failed."""

    result: str
    reason: str


@dataclass(kw_only=True)
class Progress:
    """Everything that a run knows, its agents' events being the first source and etcd the second.

    Attributes:
        step: the last one that rank 0 reported, if it reports steps.
        store_problem: why etcd cannot be read now, "" while it can.
    """

    job: str
    status: JobStatus | None = None
    store_problem: str = ""
    step: int | None = None
    generations: dict[int, GenerationSeen] = field(default_factory=dict)
    failures: list[WorkerFailure] = field(default_factory=list)
    ends: dict[str, AgentEnd] = field(default_factory=dict)
    _said: dict[str, float] = field(default_factory=dict)
    _registered_nodes: set[str] = field(default_factory=set)
    _waits_for: str = ""

    def on_event(self, event: AgentEvent) -> list[Notice]:
        """Take in an agent's event; what to say about it."""
        tell: Callable[[AgentEvent], list[Notice]] | None = {
            "registered": self._registered,
            "decision": self._decision,
            "generation_formed": self._formed,
            "workers_started": self._started,
            "worker_failed": self._failed,
            "failure_judged": self._judged,
            "etcd_unreachable": self._etcd_lost,
            "etcd_back": self._etcd_back,
            "agent_exit": self._ended,
        }.get(event.name)
        if tell is not None:
            return tell(event)
        if event.level in ("warning", "error", "critical"):
            return self._other(event)
        return []

    def on_status(self, status: JobStatus) -> list[Notice]:
        """Take in a look at etcd; says what no agent of ours can tell."""
        self.status = status
        if status.generation:
            seen = self._generation(status.generation)
            seen.cause = seen.cause or status.cause or ""
            seen.world_size = seen.world_size or status.world_size
            seen.nodes = seen.nodes or status.nodes_training
            seen.formed_at = seen.formed_at or status.formed_at
        if status.state != "waiting" or not self._registered_nodes or status.why == self._waits_for:
            return []
        self._waits_for = status.why
        return [Notice(text=status.why, weight=Weight.WARNING)]

    def on_store(self, problem: str) -> list[Notice]:
        """Take in whether etcd could be read."""
        before, self.store_problem = self.store_problem, problem
        if problem and not before:
            return [Notice(text=f"etcd unreachable, the job goes on as it is ({problem})", weight=Weight.WARNING)]
        if before and not problem:
            return [Notice(text="etcd answers again")]
        return []

    def on_output(self, line: OutputLine) -> None:
        """Look for a step in rank 0's output."""
        if line.rank == 0 and (found := _STEP.search(line.data)):
            self.step = int(found[1])

    @property
    def root_failure(self) -> WorkerFailure | None:
        """The first worker that failed in the last generation in which one did: later ones there are mostly its victims."""
        if not self.failures:
            return None
        last = max(failure.generation for failure in self.failures)
        return min((failure for failure in self.failures if failure.generation == last), key=lambda failure: failure.at)

    @property
    def restarts(self) -> int:
        """Failures of workers charged to the job."""
        return self.status.restarts_used if self.status else 0

    # --- one kind of event each -----------------------------------------------------------------------------------------

    def _generation(self, number: int) -> GenerationSeen:
        return self.generations.setdefault(number, GenerationSeen(number=number))

    def _registered(self, event: AgentEvent) -> list[Notice]:
        self._registered_nodes.add(event.node)
        return [_notice(event, f"{event.node} is here", Weight.QUIET)]

    def _decision(self, event: AgentEvent) -> list[Notice]:
        text = event.text("text")
        if _TOLD_OTHERWISE.fullmatch(text):
            return []
        self._waits_for = text
        return [_notice(event, text, Weight.QUIET)]

    def _judged(self, event: AgentEvent) -> list[Notice]:
        """What a generation failed of, and what is done about it. Whether the job ends is told by its end."""
        why = event.text("why")
        return [] if event.text("action") == "stop" or not why else [_notice(event, why, Weight.WARNING)]

    def _formed(self, event: AgentEvent) -> list[Notice]:
        number = event.number("generation") or 0
        seen = self._generation(number)
        seen.cause = event.text("cause") or seen.cause
        seen.world_size = event.number("world_size") or seen.world_size
        seen.nodes = event.number("nodes") or seen.nodes
        seen.formed_at = event.seconds("formed_at") or seen.formed_at or event.at
        self._waits_for = ""
        if f"formed {number}" in self._said:
            return []
        self._said[f"formed {number}"] = event.at or 0.0
        size = f"{count(seen.nodes, 'node')}, {count(seen.world_size, 'worker')}"
        return [_notice(event, f"generation {number}: {size}; {cause_text(seen.cause)}", Weight.GOOD)]

    def _started(self, event: AgentEvent) -> list[Notice]:
        at = event.seconds("at") or event.at
        seen = self._generation(event.number("generation") or 0)
        if at is not None:
            seen.first_worker_up_at = min(at, seen.first_worker_up_at or at)
        return []

    def _failed(self, event: AgentEvent) -> list[Notice]:
        failure = WorkerFailure(
            generation=event.number("generation") or 0,
            rank=event.number("rank") or 0,
            node=event.node,
            detail=event.text("detail") or "a worker failed",
            log=Path(event.text("log")) if event.text("log") else None,
            at=event.at or 0.0,
        )
        self.failures.append(failure)
        return [_notice(event, f"worker failed: {failure.detail}", Weight.ERROR)]

    def _etcd_lost(self, event: AgentEvent) -> list[Notice]:
        return [_notice(event, f"{event.node} cannot reach etcd: membership frozen, workers go on", Weight.WARNING)]

    def _etcd_back(self, event: AgentEvent) -> list[Notice]:
        after = event.seconds("after")
        return [_notice(event, f"{event.node} reaches etcd again" + (f" after {after:g} s" if after is not None else ""))]

    def _ended(self, event: AgentEvent) -> list[Notice]:
        result = event.text("result")
        self.ends[event.node] = AgentEnd(result=result, reason=event.text("reason"))
        return [_notice(event, f"{event.node} is done: {result}", Weight.QUIET)]

    def _other(self, event: AgentEvent) -> list[Notice]:
        """A warning or error that has no sentence of its own; the same one only once in a while."""
        text, at = _spelled(event), event.at or 0.0
        if at - self._said.get(text, -_REPEAT) < _REPEAT:
            return []
        self._said[text] = at
        return [_notice(event, text, Weight.WARNING if event.level == "warning" else Weight.ERROR)]


def _notice(event: AgentEvent, text: str, weight: Weight = Weight.NORMAL) -> Notice:
    return Notice(text=text, weight=weight, at=event.at)


def _spelled(event: AgentEvent) -> str:
    """An event that has no sentence of its own."""
    fields = ", ".join(f"{key.replace('_', ' ')}: {_last_line(value)}" for key, value in event.fields.items() if key not in ("node", "job"))
    return f"{event.node}: {event.name.replace('_', ' ')}" + (f" ({fields})" if fields else "")


def _last_line(value: object) -> str:
    """What fits a sentence: of a traceback that is its last line."""
    return (str(value).strip().splitlines() or [""])[-1][:_LONGEST_FIELD]


def cause_text(cause: str) -> str:
    """A generation's cause as its record spells it, for people."""
    return "first formation" if cause == "form" else cause.replace("_", " ", 1)


def count(number: int, thing: str) -> str:
    """A number of things in words, as "1 node" or "2 nodes"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
