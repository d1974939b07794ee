"""What a daemon does next: a pure function of what is wanted and what is seen.

Owns: when an agent is started, told to leave, checked for or left alone, and the words that say why. Must not: touch a process, a file, etcd or a
clock. Level-triggered: it needs no memory of what it decided before, so that a daemon that has just started decides as one that has run for years.

Two rules stand above all others. An agent that runs is left alone unless its node is drained: neither a changed job file nor an etcd out of reach nor a
restarted daemon ends training. And nothing is started on what was read before etcd went away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.slots import Inventory, Want, allocate
from elasticd.rendezvous.records import NodeJob, NodeJobState, TargetRecord

HEALTH_FRESH: Final = 60.0
"""Seconds for which a passed check may be relied upon."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds between the end of an agent and its next start: doubled for each end in a row, from the first to the longest."""
USAGE: Final = 2
"""Exit code of an agent that was told something it cannot work with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWanted:
    """One job as etcd has it.

    Attributes:
        target: None: nobody has started it yet.
        over: why it has ended, "" while it has not.
        failed: it ended since it could not go on.
        problem: why it cannot run here with the parameters that are wanted, "" if it can.
    """

    target: TargetRecord | None = None
    over: str = ""
    failed: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What operators want of this node, or the policy; `until`: that ends then, seconds since the epoch."""

    cordoned: bool = False
    draining: bool = False
    reason: str = ""
    until: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """What is wanted of this node.

    Attributes:
        specs: the jobs that this node's files allow.
        refused: job -> why its file is not believed.
        unreadable: why none of the files is, "" if the directory is well.
        jobs: what etcd says of them.
        policy: what operators say of the node.
        leaving: the daemon is to end with its agents: none is started, and those that run leave.
    """

    specs: Mapping[str, JobSpec] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""
    jobs: Mapping[str, JobWanted] = field(default_factory=dict)
    policy: Policy = Policy()
    leaving: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSeen:
    """The agent of one job on this node, running or the last that did.

    Attributes:
        running: its process lives.
        slots: what it was given.
        digest: of the job file and the parameters it was started with.
        asked_to_leave: it was told so by a daemon.
        code: its exit code; None while it runs, or if nobody knows.
        reason: what it said at its end.
        ended_at: when it was first seen to have ended, on the clock of `now`.
        ends: ends in a row, none of which came after a long life.
    """

    running: bool
    slots: tuple[str, ...] = ()
    digest: str = ""
    asked_to_leave: bool = False
    code: int | None = None
    reason: str = ""
    ended_at: float = 0.0
    ends: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthSeen:
    """The last check before a job, or the one that runs."""

    running: bool = False
    ok: bool = False
    reason: str = ""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What there is on this node.

    Attributes:
        etcd_problem: why etcd is out of reach, "" while it answers.
        digests: job -> digest of its file and the wanted parameters now.
    """

    inventory: Inventory
    agents: Mapping[str, AgentSeen] = field(default_factory=dict)
    health: Mapping[str, HealthSeen] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    etcd_problem: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the agent of a job on these slots."""

    job: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell the agent of a job to leave in order."""

    job: str
    why: str


@dataclass(frozen=True, slots=True)
class Check:
    """Run the checks that come before a job, for these slots."""

    job: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cordon:
    """Keep this node out until a person has looked: a check failed."""

    reason: str


Action = Start | Leave | Check | Cordon


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What to do, how each job stands, and when to look again even if nothing changes (None: no hurry).

    Attributes:
        problems: what cannot be right with the slots that are held.
    """

    actions: tuple[Action, ...]
    jobs: tuple[NodeJob, ...]
    problems: tuple[str, ...] = ()
    until: float | None = None


def reconcile(desired: Desired, seen: Seen, now: float) -> Verdict:
    """Compare what is wanted with what is seen.

    Args:
        now: seconds on the clock of `AgentSeen.ended_at` and `HealthSeen.at`.
    """
    actions: list[Action] = []
    stands: dict[str, NodeJob] = {}
    ready: list[str] = []
    until: float | None = None
    for name in sorted({*desired.specs, *desired.refused, *desired.jobs, *seen.agents}):
        agent = seen.agents.get(name)
        if agent and agent.running:
            stands[name], leave = _running(name, agent, desired, seen)
            actions += [leave] if leave else []
            continue
        state, why, due = _hindrance(name, agent, desired, seen, now)
        if state is None:
            ready.append(name)
            continue
        stands[name] = NodeJob(name=name, state=state, why=why)
        until = due if until is None or (due is not None and due < until) else until
    held = {name: agent.slots for name, agent in seen.agents.items() if agent.running}
    wants = [_want(name, desired.specs[name], seen) for name in ready]
    allocation = allocate(wants, held, seen.inventory)
    for name in ready:
        slots = allocation.granted.get(name)
        if slots is None:
            stands[name] = NodeJob(name=name, state=NodeJobState.WAITING, why=allocation.waiting.get(name, "no slots are free"))
            continue
        stands[name], action = _may_start(name, slots, seen, now)
        actions += [action] if action else []
    jobs = tuple(stands[name] for name in sorted(stands))
    return Verdict(actions=tuple(actions), jobs=jobs, problems=(*seen.inventory.problems, *allocation.problems), until=until)


def pause_after(ends: int) -> float:
    """Seconds to wait after the `ends`-th end in a row."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(max(ends, 1) - 1, 16)))


def _running(name: str, agent: AgentSeen, desired: Desired, seen: Seen) -> tuple[NodeJob, Leave | None]:
    size = len(agent.slots)
    if desired.leaving or desired.policy.draining:
        why = "the daemon is being stopped" if desired.leaving else f"the node is drained: {desired.policy.reason}"
        leave = None if agent.asked_to_leave else Leave(name, why)
        return NodeJob(name=name, state=NodeJobState.LEAVING, slots=size, why=why), leave
    if agent.asked_to_leave:
        return NodeJob(name=name, state=NodeJobState.LEAVING, slots=size, why="it was told to leave"), None
    why = ""
    if name in desired.refused:
        why = f"it runs on, but could not be started again: {desired.refused[name]}"
    elif name not in desired.specs:
        why = f"it runs on, but could not be started again: {desired.unreadable or 'its file has gone'}"
    elif agent.digest and seen.digests.get(name, agent.digest) != agent.digest:
        why = "its file has changed since; that counts from the next start of its agent on"
    return NodeJob(name=name, state=NodeJobState.RUNNING, slots=size, why=why), None


def _hindrance(name: str, agent: AgentSeen | None, desired: Desired, seen: Seen, now: float) -> tuple[NodeJobState | None, str, float | None]:
    """Why a job whose agent does not run is not to be started now (state, words, when that changes by itself); state None: it is to be."""
    wanted = desired.jobs.get(name, JobWanted())
    if name in desired.refused:
        return NodeJobState.REFUSED, desired.refused[name], None
    if name not in desired.specs:
        return (NodeJobState.REFUSED, desired.unreadable, None) if desired.unreadable else (NodeJobState.IDLE, "its file has gone", None)
    if seen.etcd_problem:
        return NodeJobState.WAITING, f"for etcd: {seen.etcd_problem}", None
    unwanted = _unwanted(wanted) or _kept_out(desired)
    if unwanted:
        return (*unwanted, None)
    if wanted.problem:
        return NodeJobState.REFUSED, wanted.problem, None
    return _after_an_end(agent, seen.digests.get(name), now) if agent else (None, "", None)


def _unwanted(wanted: JobWanted) -> tuple[NodeJobState, str] | None:
    if wanted.target is None:
        return NodeJobState.IDLE, "nobody has started it"
    if wanted.over:
        return NodeJobState.ENDED, wanted.over
    return None if wanted.target.run else (NodeJobState.IDLE, wanted.target.reason or "it was stopped")


def _kept_out(desired: Desired) -> tuple[NodeJobState, str] | None:
    if desired.leaving:
        return NodeJobState.KEPT_OUT, "the daemon is being stopped"
    if desired.policy.draining or desired.policy.cordoned:
        return NodeJobState.KEPT_OUT, f"the node is {'drained' if desired.policy.draining else 'cordoned'}: {desired.policy.reason}"
    return None


def _after_an_end(agent: AgentSeen, digest: str | None, now: float) -> tuple[NodeJobState | None, str, float | None]:
    if agent.code == USAGE and agent.digest == digest:
        return NodeJobState.REFUSED, agent.reason or "its agent found its configuration unusable", None
    due = agent.ended_at + pause_after(agent.ends)
    if now >= due:
        return None, "", None
    how = agent.reason or (f"exit code {agent.code}" if agent.code is not None else "killed")
    row = f", {agent.ends} in a row" if agent.ends > 1 else ""
    return NodeJobState.WAITING, f"its agent ended ({how}){row}: again in {due - now:.0f} s", due


def _want(name: str, spec: JobSpec, seen: Seen) -> Want:
    return Want(job=name, priority=spec.priority, slots=spec.slots or max(1, len(seen.inventory.slots)))


def _may_start(name: str, slots: tuple[str, ...], seen: Seen, now: float) -> tuple[NodeJob, Action | None]:
    """Start it if a fresh check was passed, else check."""
    size, health = len(slots), seen.health.get(name)
    if health and health.running:
        return NodeJob(name=name, state=NodeJobState.CHECKING, slots=size, why="its checks run"), None
    if health is None or now - health.at > HEALTH_FRESH:
        return NodeJob(name=name, state=NodeJobState.CHECKING, slots=size, why="its checks begin"), Check(name, slots)
    if not health.ok:
        return NodeJob(name=name, state=NodeJobState.KEPT_OUT, slots=0, why=health.reason), Cordon(f"check before job {name}: {health.reason}")
    return NodeJob(name=name, state=NodeJobState.STARTING, slots=size), Start(name, slots)
