"""What a view of a job means to a person: its state, its nodes, and why.

Owns: `job_status`, a pure function, and the values it makes. Must not: read etcd or a clock, or know how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from elasticd.rendezvous.membership import Memory, Timing, Wait, choose, fate, not_ready_marks, plan, too_few
from elasticd.rendezvous.records import GenerationState, Result

if TYPE_CHECKING:
    from elasticd.rendezvous.records import GenerationRecord, MemberId, MemberRecord
    from elasticd.rendezvous.view import Keyed, View


class JobState(StrEnum):
    """Where a job stands."""

    FORMING = "forming"  # its first generation, or the first after it was started again, is on its way
    WAITING = "waiting"  # too few nodes, or nobody who can give the committed checkpoint
    TRAINING = "training"
    RESTARTING = "restarting"  # from one generation to the next
    STOPPING = "stopping"  # an operator asked for it
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class NodeState(StrEnum):
    """Where one node of a job stands."""

    TRAINING = "training"
    FINISHED = "finished"  # its workers returned 0
    FAILED = "failed"  # one of its workers did not
    STOPPED = "stopped"  # its workers are stopped, the next generation is awaited
    JOINING = "joining"  # proposed for the next generation
    STANDBY = "standby"  # here, and not needed now
    LEAVING = "leaving"
    LOST = "lost"  # its lease ended
    ENDED = "ended"  # it has gone, as the job has


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """One node.

    Attributes:
        rank: place in the generation; None outside.
        ranks: global ranks of its workers; () outside a generation.
        slots: workers it runs.
    """

    name: str
    state: NodeState
    rank: int | None
    ranks: tuple[int, ...]
    slots: int
    address: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStatus:
    """One thing that happened. `at` is seconds since the epoch."""

    generation: int
    at: float
    what: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """One job at one revision of its etcd. Times are seconds since the epoch; None is "not known yet".

    Attributes:
        why: why it is in that state, "" if there is nothing to add.
        generation: number of the last one, 0 before the first.
        cause: why that generation was formed.
        world_size: workers in it, in all.
        restarts_used: failures of workers charged so far.
        store: host:port of the generation's TCPStore.
        problems: keys in etcd that hold garbage, and what is wrong with them.
    """

    cluster: str
    job: str
    revision: int
    state: JobState
    why: str
    generation: int
    cause: str | None
    cause_kind: str | None
    formed_at: float | None
    world_size: int
    nodes_training: int
    nodes_min: int | None
    nodes_desired: int | None
    nodes_max: int | None
    restarts_used: int
    restarts_max: int | None
    store: str | None
    coordinator: str | None
    checkpoint_step: int | None
    nodes: tuple[NodeStatus, ...]
    events: tuple[EventStatus, ...]
    problems: tuple[str, ...]


def job_status(view: View, *, cluster: str, job: str) -> JobStatus:
    """Say what a view means.

    Args:
        view: the whole job, all members included.
        cluster: its cluster.
        job: its name.
    """
    state, why = _state(view)
    generation = view.generation.record if view.generation else None
    target = view.target.record if view.target else None
    coordinator = min(view.members.values(), key=lambda keyed: keyed.create_revision, default=None)
    return JobStatus(
        cluster=cluster,
        job=job,
        revision=view.revision,
        state=state,
        why=why,
        generation=view.number,
        cause=str(generation.cause) if generation else None,
        cause_kind=generation.cause.kind.value if generation else None,
        formed_at=generation.formed_at if generation else None,
        world_size=generation.world_size if generation and view.active else 0,
        nodes_training=len(generation.members) if generation and view.active else 0,
        nodes_min=target.min_nodes if target else None,
        nodes_desired=target.desired if target else None,
        nodes_max=target.max_nodes if target else None,
        restarts_used=view.restarts_used,
        restarts_max=target.max_restarts if target else None,
        store=f"{generation.store.address}:{generation.store.port}" if generation and view.active else None,
        coordinator=coordinator.record.id.node if coordinator else None,
        checkpoint_step=view.checkpoint.record.step if view.checkpoint else None,
        nodes=_nodes(view),
        events=tuple(EventStatus(generation=event.number, at=event.at, what=event.what, detail=event.detail) for event in view.events),
        problems=tuple(view.problems[key] for key in sorted(view.problems)),
    )


# --- the job -----------------------------------------------------------------------------------------------------------


def _state(view: View) -> tuple[JobState, str]:
    if view.over and view.generation:
        record = view.generation.record
        return JobState(record.state.value), record.reason
    if view.target and not view.target.record.run:
        return JobState.STOPPING, view.target.record.reason or "an operator asked for it"
    why, alert = _coordinators_why(view)
    here, least = _candidates(view), view.target.record.min_nodes if view.target else 1
    if here < least and (view.pending or view.active is None):
        return JobState.WAITING, _too_few(view, here)
    if alert:
        return JobState.WAITING, why
    if view.pending:
        cause = str(view.pending.record.cause)
        return (JobState.RESTARTING if view.active else JobState.FORMING), f"{cause}; {why}" if why else cause
    if view.active is None:
        return JobState.FORMING, why
    return _running(view, why, here=here, least=least)


def _running(view: View, why: str, *, here: int, least: int) -> tuple[JobState, str]:
    what = fate(view)
    troubled = ", ".join(identity.node for identity in what.lost) or ", ".join(keyed.record.id.node for keyed in (*what.failed, *what.idle))
    if not troubled:
        return JobState.TRAINING, "" if why == "training" else why.removeprefix("training; ")
    if here < least:
        return JobState.WAITING, _too_few(view, here)
    return JobState.RESTARTING, f"{troubled} {'lost' if what.lost else 'failed or stopped'}"


def _coordinators_why(view: View) -> tuple[str, bool]:
    """What a coordinator that saw only this view would wait for, and whether people have to act."""
    decision = plan(view, 0.0, Memory(), Timing())
    return (decision.why, decision.alert) if isinstance(decision, Wait) else ("", False)


def _too_few(view: View, here: int) -> str:
    return too_few(view, here, view.target.record, not_ready_marks(view)) if view.target else f"{here} nodes are here"


def _candidates(view: View) -> int:
    return len(choose(view, view.target.record, not_ready_marks(view))) if view.target else len(view.members)


# --- its nodes ---------------------------------------------------------------------------------------------------------


def _nodes(view: View) -> tuple[NodeStatus, ...]:
    """The generation's members in the order of their ranks, then all others by name."""
    generation = view.generation.record if view.generation and not view.reopened else None
    inside = _inside(view, generation) if generation else []
    known = {node.incarnation for node in inside}
    outside = [
        _node(keyed.record, state=_state_outside(view, keyed)) for name, keyed in sorted(view.members.items()) if keyed.record.id.incarnation not in known
    ]
    return (*inside, *outside)


def _inside(view: View, generation: GenerationRecord) -> list[NodeStatus]:
    nodes, base = [], 0
    for rank, member in enumerate(generation.members):
        keyed = view.present.get(member.id)
        nodes.append(
            NodeStatus(
                name=member.id.node,
                state=_state_inside(generation, keyed.record if keyed else None),
                rank=rank,
                ranks=tuple(range(base, base + member.slots)),
                slots=member.slots,
                address=member.address,
                incarnation=member.id.incarnation,
            )
        )
        base += member.slots
    return nodes


def _state_inside(generation: GenerationRecord, member: MemberRecord | None) -> NodeState:
    if member is None:
        if generation.state is GenerationState.SUCCEEDED:
            return NodeState.FINISHED
        return NodeState.ENDED if generation.ended else NodeState.LOST
    if member.outcome and member.outcome.generation == generation.number:
        return NodeState.FINISHED if member.outcome.result is Result.FINISHED else NodeState.FAILED
    if member.leaving:
        return NodeState.LEAVING
    if member.stopped >= generation.number:
        return NodeState.STOPPED
    return NodeState.ENDED if generation.ended else NodeState.TRAINING


def _state_outside(view: View, keyed: Keyed[MemberRecord]) -> NodeState:
    if keyed.record.leaving:
        return NodeState.LEAVING
    proposed: tuple[MemberId, ...] = view.pending.record.members if view.pending else ()
    return NodeState.JOINING if keyed.record.id in proposed else NodeState.STANDBY


def _node(record: MemberRecord, *, state: NodeState) -> NodeStatus:
    return NodeStatus(name=record.id.node, state=state, rank=None, ranks=(), slots=record.slots, address=record.address, incarnation=record.id.incarnation)
