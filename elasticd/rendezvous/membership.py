"""What to do about the membership: pure functions of what is seen and the time.

Owns: every decision of PROTOCOL's "generations" part, as `plan` (what a coordinator does) and `react` (what each member does). Must not: read
a clock, talk to etcd, or touch a process. Tested by tables, by hypothesis, and walked by the protocol checker.

`plan` looks at one `View` and returns one decision; whoever executes it does so in a transaction that fails if the view was stale, so that two
coordinators, or a slow one, are ordinary cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticd.rendezvous.fingerprint import alike
from elasticd.rendezvous.records import (
    Cause,
    CauseKind,
    CheckpointRecord,
    GenerationMember,
    GenerationRecord,
    GenerationState,
    MemberId,
    MemberRecord,
    Mode,
    ProposalRecord,
    RequestKind,
    Result,
    ResumePoint,
    StoreAddress,
    TargetRecord,
    Void,
)
from elasticd.rendezvous.resume import Choice, choose_resume
from elasticd.rendezvous.rollback import voids
from elasticd.rendezvous.view import Keyed, View


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long to wait for what, in seconds.

    Attributes:
        settle: quiet time before forming or admitting with fewer nodes than desired; never applied to a loss.
        settle_cap: longest such wait in all, however restless the membership.
        ready_timeout: how long a proposed member may take to report before it is left out.
        drain_timeout: how long an agreed stop may take before it becomes a kill.
        ttl: the members' lease.
        frozen_max: how long workers may go on without etcd.
        judged: whether a generation that failed is judged before the next one begins (PROTOCOL 31).
    """

    settle: float = 1.0
    settle_cap: float = 10.0
    ready_timeout: float = 15.0
    drain_timeout: float = 60.0
    ttl: float = 10.0
    frozen_max: float = 600.0
    judged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What an observer remembers besides the view, on its own monotonic clock.

    Attributes:
        changed_at: when the set of candidates last changed.
        restless_since: when there was first something to settle (enough candidates, or a newcomer).
        proposal_seen_at: when the pending proposal was first seen.
        orphaned_since: when it was first seen that nobody of the last generation is left who trains it, or who may be waited for; None while one is.
        failed_since: when a failure in the active generation was first seen; None while there is none.
        no_loss_before: a loss is not believed before this (an etcd outage lets many leases lapse at once; PROTOCOL 4).
        judged_at: when the last verdict was first seen.
        unjudged: the last generation that could not be judged: it is gone on from without.
    """

    changed_at: float = 0.0
    restless_since: float = 0.0
    proposal_seen_at: float = 0.0
    orphaned_since: float | None = None
    failed_since: float | None = None
    no_loss_before: float = 0.0
    judged_at: float = 0.0
    unjudged: int = 0

    def blinded_until(self, moment: float) -> Memory:
        """The same, believing no loss before `moment`."""
        return replace(self, no_loss_before=moment)

    def without_verdict(self, number: int) -> Memory:
        """The same, after generation `number` could not be judged."""
        return replace(self, unjudged=number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Nothing to do now. `until` is when to look again even if nothing changes; `why` is for people, who have to act if `alert`."""

    why: str
    until: float | None = None
    alert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Propose:
    """Write a proposal. `charge` is what it adds to the budget: 1, 0, or -1 where a charged proposal turns out to be a loss."""

    number: int
    mode: Mode
    members: tuple[MemberId, ...]
    cause: Cause
    not_ready: Mapping[str, int]
    charge: int = 0
    counted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    """Make the pending proposal the generation. `fell_back` is the committed checkpoint, if it is lost and `resume` is older."""

    proposal: ProposalRecord
    members: tuple[GenerationMember, ...]
    store: StoreAddress
    restarts: int
    resume: ResumePoint | None = None
    fell_back: CheckpointRecord | None = None
    void: tuple[Void, ...] = ()
    cause: Cause
    without: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Close the job: succeeded, failed with its budget used up, or stopped by an operator.

    `drained`: every member of the generation is known to have stopped. `code`: the job's exit code, where it has one of its own; else 0.
    """

    state: GenerationState
    reason: str
    drained: bool = False
    code: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Put on record that every worker of generation `number` has stopped, although no other can be formed now.

    Whoever starts the job again need not wait for workers that nobody can see (PROTOCOL 15), and a leaver may go.
    """

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Find out what generation `number` failed of, and write down what is done about it: all of its members here have reported."""

    number: int


Decision = Wait | Propose | Activate | Drain | End | Judge


# --- who may train ---------------------------------------------------------------------------------------------------


def not_ready_marks(view: View) -> dict[str, int]:
    """Incarnation -> mod revision of members marked not ready and silent since (PROTOCOL 13)."""
    marks: dict[str, int] = {}
    if view.generation:
        marks.update(view.generation.record.not_ready)
    if view.pending:
        marks.update(view.pending.record.not_ready)
    if not marks:
        return marks
    return {keyed.record.id.incarnation: keyed.mod_revision for keyed in view.members.values() if marks.get(keyed.record.id.incarnation) == keyed.mod_revision}


def candidates(view: View, marks: Mapping[str, int]) -> list[Keyed[MemberRecord]]:
    """Members that may be in the next generation: survivors in the order of their ranks, then newcomers in the order they came."""
    order: dict[MemberId, int] = {}
    if view.generation:
        order = {identity: rank for rank, identity in enumerate(view.generation.record.ids)}
    out = {*marks, *view.left_out}
    able = [keyed for keyed in view.members.values() if not keyed.record.leaving and keyed.record.id.incarnation not in out]
    return sorted(able, key=lambda keyed: (order.get(keyed.record.id, len(order)), keyed.create_revision))


def without_unreachable(members: Sequence[Keyed[MemberRecord]]) -> list[Keyed[MemberRecord]]:
    """Leave out the fewest members so that all that stay reach each other, the youngest first (PROTOCOL 16).

    Takes out the member with the most broken pairs until none is left: exact for the usual case, one bad node or one bad pair.
    """
    kept = list(members)
    if not any(keyed.record.unreachable for keyed in kept):
        return kept
    while True:
        here = {keyed.record.id.incarnation for keyed in kept}
        broken: dict[str, set[str]] = {incarnation: set() for incarnation in here}
        for keyed in kept:
            me = keyed.record.id.incarnation
            for other in here.intersection(keyed.record.unreachable) - {me}:
                broken[me].add(other)
                broken[other].add(me)
        worst = max(kept, key=lambda keyed: (len(broken[keyed.record.id.incarnation]), keyed.create_revision), default=None)
        if worst is None or not broken[worst.record.id.incarnation]:
            return kept
        kept.remove(worst)


def choose(view: View, target: TargetRecord, marks: Mapping[str, int]) -> tuple[MemberId, ...]:
    """The members of the next generation, in rank order.

    Only those that are like the first survivor, or like the oldest member where none is left (PROTOCOL 28). If too few reach each other, all are
    tried: a report of who cannot be reached is as old as the generation that failed, and nobody writes another while nothing forms, so that a
    network that has recovered would be waited for, for ever.
    """
    able, _ = alike(candidates(view, marks))
    connected = without_unreachable(able)
    return tuple(keyed.record.id for keyed in (connected if len(connected) >= target.min_nodes else able)[: target.limit])


def unlike(view: View, marks: Mapping[str, int]) -> str:
    """Who is left out because its code, data or settings are not those of the others, and how it differs; "" if nobody is."""
    _, differences = alike(candidates(view, marks))
    return _some([str(one) for one in differences], joined="; ")


def too_few(view: View, count: int, target: TargetRecord, marks: Mapping[str, int]) -> str:
    """Why nothing forms with `count` nodes."""
    different = unlike(view, marks)
    return f"{count} of at least {target.min_nodes} nodes are here" + (f"; {different}" if different else "")


# --- what became of the generation's members ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """The members of the active generation, by what became of them."""

    lost: tuple[MemberId, ...] = ()
    failed: tuple[Keyed[MemberRecord], ...] = ()
    idle: tuple[Keyed[MemberRecord], ...] = ()
    finished: tuple[Keyed[MemberRecord], ...] = ()
    leaving: tuple[Keyed[MemberRecord], ...] = ()
    running: tuple[Keyed[MemberRecord], ...] = ()


def fate(view: View) -> Fate:
    """Sort the active generation's members. `idle` have stopped their workers without saying that they failed or finished."""
    generation = view.active
    if generation is None:
        return Fate()
    lost: list[MemberId] = []
    groups: dict[str, list[Keyed[MemberRecord]]] = {"failed": [], "idle": [], "finished": [], "running": []}
    for identity in generation.ids:
        keyed = view.present.get(identity)
        if keyed is None:
            lost.append(identity)
            continue
        groups[_condition(keyed.record, generation.number)].append(keyed)
    here = [keyed for group in groups.values() for keyed in group]
    return Fate(
        lost=tuple(lost),
        failed=tuple(groups["failed"]),
        idle=tuple(groups["idle"]),
        finished=tuple(groups["finished"]),
        running=tuple(groups["running"]),
        leaving=tuple(keyed for keyed in here if keyed.record.leaving),
    )


def _condition(member: MemberRecord, number: int) -> str:
    result = reported_result(member, number)
    if result:
        return result.value
    return "idle" if member.stopped >= number else "running"


def _nodes(identities: Iterable[MemberId]) -> tuple[str, ...]:
    return tuple(identity.node for identity in identities)


def _some(names: Sequence[str], shown: int = 3, joined: str = ", ") -> str:
    """A few and how many more: of a thousand members, each report would log all the others' names again."""
    more = len(names) - shown
    return joined.join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def _ids(members: Iterable[Keyed[MemberRecord]]) -> tuple[MemberId, ...]:
    return tuple(keyed.record.id for keyed in members)


# --- the coordinator ---------------------------------------------------------------------------------------------------


def plan(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """What a coordinator does next.

    Args:
        view: the whole job, every member included.
        now: seconds on the clock that `memory` uses.
    """
    if view.target is None:
        return Wait(why="no target written yet")
    if view.over:
        return Wait(why="the job has ended")
    target = view.target.record
    what = fate(view)
    if view.active and len(what.finished) == len(view.active.members):
        return End(state=GenerationState.SUCCEEDED, reason="every worker finished", drained=True)
    if not target.run:
        return _plan_stop(view, target, now, memory, timing)
    if asked := view.asked(RequestKind.FAIL):
        return End(state=GenerationState.FAILED, reason=asked.reason, drained=not what.running and not what.lost, code=asked.code)
    if view.pending:
        return _plan_pending(view, view.pending.record, target, now, memory, timing)
    if view.active is None:
        return _plan_first(view, target, now, memory, timing)
    return _plan_running(view, target, what, now, memory, timing)


def _believed(view: View, missing: Sequence[MemberId], now: float, memory: Memory) -> bool:
    """Whether missing members are gone for good: time enough has passed, or a new agent of each node proves it (it holds the node's lock)."""
    return now >= memory.no_loss_before or all(identity.node in view.members for identity in missing)


def _fresh(view: View) -> int:
    return max(view.number, view.proposal.record.number if view.proposal else 0) + 1


def _propose(view: View, target: TargetRecord, mode: Mode, cause: Cause, marks: Mapping[str, int], charge: int = 0) -> Propose:
    return Propose(
        number=_fresh(view),
        mode=mode,
        members=choose(view, target, marks),
        cause=cause,
        not_ready=dict(marks),
        charge=charge,
        counted=charge > 0,
    )


def _settled(count: int, target: TargetRecord, now: float, memory: Memory, timing: Timing) -> float | None:
    """None if `count` nodes may go now, else when they may."""
    if count >= target.limit:
        return None
    due = min(memory.changed_at + timing.settle, memory.restless_since + timing.settle_cap)
    return None if now >= due else due


def _plan_first(view: View, target: TargetRecord, now: float, memory: Memory, timing: Timing) -> Decision:
    marks = not_ready_marks(view)
    chosen = choose(view, target, marks)
    count = len(chosen)
    if count < target.min_nodes:
        return Wait(why=too_few(view, count, target, marks))
    due = _settled(count, target, now, memory, timing)
    if due is not None:
        return Wait(why=f"{count} of {target.limit} nodes are here, waiting a moment for more", until=due)
    awaiting = _resume(view, chosen, Mode.KILL).awaiting
    if awaiting:
        return Wait(why=awaiting, alert=True)  # who is waited for can then be proposed with the others
    return _propose(view, target, Mode.AGREED_STOP, Cause(kind=CauseKind.FORM), marks)


def _plan_running(view: View, target: TargetRecord, what: Fate, now: float, memory: Memory, timing: Timing) -> Decision:
    marks = not_ready_marks(view)
    if what.lost:
        if not _believed(view, what.lost, now, memory):
            return Wait(why="members are missing after an etcd outage, giving them time to come back", until=memory.no_loss_before)
        return _propose(view, target, Mode.KILL, Cause(kind=CauseKind.LOSS, nodes=_nodes(what.lost)), marks)
    if what.failed:
        return _plan_failed(view, target, what, marks, now, memory, timing)
    if what.idle:
        return _propose(view, target, Mode.KILL, Cause(kind=CauseKind.WORKER_STOPPED, nodes=_nodes(_ids(what.idle))), marks)
    if what.finished:
        return Wait(why=f"{len(what.finished)} of {len(what.finished) + len(what.running)} nodes have finished")
    if asked := view.asked(RequestKind.ROLLBACK):
        return _propose(view, target, Mode.KILL, Cause(kind=CauseKind.ROLLBACK, detail=asked.reason), marks)
    if what.leaving:
        return _propose(view, target, Mode.AGREED_STOP, Cause(kind=CauseKind.LEAVE, nodes=_nodes(_ids(what.leaving))), marks)
    if asked := view.asked(RequestKind.RESTART):
        mode = Mode.KILL if asked.at_once else Mode.AGREED_STOP
        return _propose(view, target, mode, Cause(kind=CauseKind.RESTART, detail=asked.reason), marks)
    if target.paused:
        return Wait(why="training, paused: nobody joins and nothing is scaled")
    return _plan_size(view, target, marks, now, memory, timing)


def _plan_failed(view: View, target: TargetRecord, what: Fate, marks: Mapping[str, int], now: float, memory: Memory, timing: Timing) -> Decision:
    """A worker failed. Before that ends the job, a dead node of which it may be the echo has one TTL to turn out as a loss.

    Usually the echo of a failure soon reaches the other nodes' workers too, and when nobody is left running nothing is waited for.
    """
    first = min(what.failed, key=lambda keyed: keyed.mod_revision)
    detail = first.record.outcome.detail if first.record.outcome else ""
    left = view.restarts_used < target.max_restarts
    if not left and not _judges(view, memory, timing):
        due = (now if memory.failed_since is None else memory.failed_since) + timing.ttl
        if what.running and now < due:
            return Wait(why="a worker failed and the restart budget is used up, unless a node was lost", until=due)
        return _end_used_up(view, target, what)
    cause = Cause(kind=CauseKind.WORKER_FAILED, nodes=(first.record.id.node,), detail=detail)
    return _propose(view, target, Mode.KILL, cause, marks, charge=1 if left else 0)


def _end_used_up(view: View, target: TargetRecord, what: Fate) -> End:
    first = min(what.failed, key=lambda keyed: keyed.mod_revision)
    detail = first.record.outcome.detail if first.record.outcome else ""
    reason = f"restart budget used up ({view.restarts_used} of {target.max_restarts}); last failure on {first.record.id.node}: {detail}"
    return End(state=GenerationState.FAILED, reason=reason, drained=not what.running)


def _judges(view: View, memory: Memory, timing: Timing) -> bool:
    """Whether the active generation is judged if it fails, or has been."""
    return timing.judged and view.active is not None and memory.unjudged != view.active.number


def used_up(view: View) -> bool:
    """Whether a failure that is answered now was no longer covered by the job's budget: it was proposed without a charge."""
    pending = view.pending.record if view.pending else None
    most = view.target.record.max_restarts if view.target else 0
    return pending is not None and pending.cause.kind is CauseKind.WORKER_FAILED and not pending.counted and view.restarts_used >= most


def _plan_verdict(view: View, target: TargetRecord, what: Fate, now: float, memory: Memory, timing: Timing) -> Decision | None:
    """What a failure comes to before the next generation begins (PROTOCOL 31); None if nothing stands against that."""
    if not timing.judged or view.active is None or not (what.failed or (what.lost and not view.active.drained)):
        return None  # who goes after all have stopped in order has not failed
    verdict = view.verdict
    if verdict is None and _judges(view, memory, timing):
        due = (now if memory.failed_since is None else memory.failed_since) + timing.ttl
        if used_up(view) and what.running and now < due:  # who has not reported may be gone, and the failure an echo of that
            return Wait(why="a worker failed and the restart budget is used up, unless a node was lost", until=due)
        return Judge(number=view.active.number)
    if verdict is None:
        return _end_used_up(view, target, what) if used_up(view) and what.failed else None
    if verdict.stop:
        return End(state=GenerationState.FAILED, reason=verdict.stop, drained=not what.running and not what.lost, code=verdict.code)
    due = memory.judged_at + verdict.delay
    return Wait(why=f"{verdict.root}; the workers start again in a moment", until=due) if now < due else None


def _plan_size(view: View, target: TargetRecord, marks: Mapping[str, int], now: float, memory: Memory, timing: Timing) -> Decision:
    assert view.active is not None
    old = set(view.active.ids)
    wanted = choose(view, target, marks)
    if len(old) > target.limit and len(wanted) >= target.min_nodes:
        surplus = _nodes(identity for identity in view.active.ids if identity not in wanted)
        return _propose(view, target, Mode.AGREED_STOP, Cause(kind=CauseKind.SCALE, nodes=surplus), marks)
    newcomers = [identity for identity in wanted if identity not in old]
    if not newcomers or len(wanted) <= len(old):
        different = unlike(view, marks)
        return Wait(why=f"training; {different}" if different else "training")
    due = _settled(len(wanted), target, now, memory, timing)
    if due is not None:
        return Wait(why=f"{', '.join(_nodes(newcomers))} may join, waiting a moment for more", until=due)
    return _propose(view, target, Mode.AGREED_STOP, Cause(kind=CauseKind.JOIN, nodes=_nodes(newcomers)), marks)


def _plan_stop(view: View, target: TargetRecord, now: float, memory: Memory, timing: Timing) -> Decision:
    """An operator asked for an orderly stop: everybody stops, then the job is closed."""
    if view.generation is None:
        return Wait(why="an operator asked not to run it")
    what = fate(view)
    reason = target.reason or "stopped by an operator"
    if not what.running or view.active is None:
        return End(state=GenerationState.STOPPED, reason=reason, drained=not what.running and not what.lost)
    if not view.pending:
        return Propose(number=_fresh(view), mode=Mode.AGREED_STOP, members=(), cause=Cause(kind=CauseKind.STOP, detail=reason), not_ready={})
    due = memory.proposal_seen_at + timing.drain_timeout
    if now >= due:
        return End(state=GenerationState.STOPPED, reason=reason)
    return Wait(why="stopping", until=due)


def _plan_pending(view: View, proposal: ProposalRecord, target: TargetRecord, now: float, memory: Memory, timing: Timing) -> Decision:
    marks = not_ready_marks(view)
    what = fate(view)
    missing = what.lost or [identity for identity in proposal.members if identity not in view.present]
    if missing and not _believed(view, missing, now, memory):
        return Wait(why="members are missing after an etcd outage, giving them time to come back", until=memory.no_loss_before)
    able = {keyed.record.id for keyed in candidates(view, marks)}
    gone = [identity for identity in proposal.members if identity not in able]
    mode = Mode.KILL if proposal.mode is Mode.KILL or what.lost or what.failed else Mode.AGREED_STOP
    new_loss = bool(what.lost) and proposal.cause.kind is not CauseKind.LOSS
    if gone or new_loss or (mode is Mode.KILL and proposal.mode is not Mode.KILL):
        return _replace(view, proposal, target, mode, marks, loss=what.lost if new_loss else ())
    late = _late(view, proposal, marks)
    if late:
        return _plan_late(view, proposal, target, late, now, memory, timing)
    judged = _plan_verdict(view, target, what, now, memory, timing)
    if judged is not None:
        return judged
    if len(proposal.members) < target.min_nodes:
        wanted = choose(view, target, marks)
        if len(wanted) >= target.min_nodes:
            return _replace(view, proposal, target, mode, marks)
        if view.active and not view.active.drained and not what.lost and not what.running:
            return Drain(number=view.active.number)
        return Wait(why=too_few(view, len(wanted), target, marks))
    if _apart(view, proposal) and choose(view, target, marks) != proposal.members:
        return _replace(view, proposal, target, mode, marks)
    hold = orphan_hold(view, proposal.members, now, memory, timing)
    if hold is not None:
        return Wait(why="no member of the last generation is left: waiting until its workers must have stopped", until=hold)
    choice = _resume(view, proposal.members, proposal.mode)
    if choice.awaiting:
        return Wait(why=choice.awaiting, alert=True)
    return _activate(view, proposal, choice)


def _apart(view: View, proposal: ProposalRecord) -> bool:
    """Whether proposed members have said meanwhile that they cannot reach each other: what formed now would only fail again (PROTOCOL 16)."""
    here = [view.present[identity] for identity in proposal.members]
    return any(keyed.record.unreachable for keyed in here) and len(without_unreachable(here)) < len(here)


def _replace(view: View, proposal: ProposalRecord, target: TargetRecord, mode: Mode, marks: Mapping[str, int], loss: Sequence[MemberId] = ()) -> Propose:
    """A pending proposal cannot go on as it is. A failure that turns out to be the echo of a loss is not charged."""
    cause = Cause(kind=CauseKind.LOSS, nodes=_nodes(loss)) if loss else proposal.cause
    refund = -1 if loss and proposal.counted else 0
    return Propose(
        number=_fresh(view),
        mode=mode,
        members=choose(view, target, marks),
        cause=cause,
        not_ready=dict(marks),
        charge=refund,
        counted=proposal.counted and not refund,
    )


def _late(view: View, proposal: ProposalRecord, marks: Mapping[str, int]) -> list[Keyed[MemberRecord]]:
    """Who has yet to report that it stopped the last generation: the proposed, and old members still here (PROTOCOL 12)."""
    awaited = set(proposal.members)
    if view.generation:
        awaited.update(view.generation.record.ids)
    return [
        keyed
        for keyed in view.members.values()
        if keyed.record.id in awaited and keyed.record.id.incarnation not in marks and keyed.record.stopped < view.number
    ]


def _plan_late(
    view: View, proposal: ProposalRecord, target: TargetRecord, late: Sequence[Keyed[MemberRecord]], now: float, memory: Memory, timing: Timing
) -> Decision:
    agreed = proposal.mode is Mode.AGREED_STOP
    due = memory.proposal_seen_at + (timing.drain_timeout if agreed else timing.ready_timeout)
    if now < due:
        return Wait(why=f"waiting for {_some(_nodes(_ids(late)))} to stop", until=due)
    if agreed:
        return _replace(view, proposal, target, Mode.KILL, not_ready_marks(view))
    marks = {**not_ready_marks(view), **{keyed.record.id.incarnation: keyed.mod_revision for keyed in late}}
    return _replace(view, proposal, target, Mode.KILL, marks)


def orphan_hold(view: View, chosen: Sequence[MemberId], now: float, memory: Memory, timing: Timing) -> float | None:
    """Until when a generation that shares no member with the last one must wait (PROTOCOL 15); None if it need not.

    A node's new agent held the node's lock before it registered, so the old agent there is dead, and its workers with it; an old member that
    is here and says so has stopped them. Old nodes of which neither is known may train on unseen: for one TTL if a partner is known to have
    stopped (they see it unreachable), else as long as they may be frozen.
    """
    generation = _undrained(view)
    if generation is None or set(chosen).intersection(generation.ids):
        return None
    old = set(generation.ids)
    proven = {keyed.record.id.node for keyed in view.members.values() if keyed.record.id not in old or keyed.record.stopped >= generation.number}
    unproven = [identity for identity in generation.ids if identity.node not in proven]
    if not unproven:
        return None
    since = now if memory.orphaned_since is None else memory.orphaned_since
    partner_dead = len(unproven) < len(generation.ids)
    due = since + timing.ttl + (0.0 if partner_dead else generation.frozen_max)
    return due if now < due else None


def _resume(view: View, members: Sequence[MemberId], mode: Mode) -> Choice:
    """What `members` are to begin with, as far as it is known now."""
    previous = view.generation.record.ids if view.generation else ()
    return choose_resume(
        {identity: keyed.record.inventory for identity, keyed in view.present.items()},
        set(members).intersection(previous),
        view.checkpoint.record if view.checkpoint else None,
        lost={identity: keyed.record.lost for identity, keyed in view.present.items() if keyed.record.lost},
        members=members,
        planned=mode is Mode.AGREED_STOP,
        void=voids(view),
        began_empty=view.generation is None or view.generation.record.resume is None,
    )


def _activate(view: View, proposal: ProposalRecord, choice: Choice) -> Activate:
    records = [view.present[identity].record for identity in proposal.members]
    previous = view.generation.record if view.generation else None
    here = {record.id.incarnation for record in (keyed.record for keyed in view.members.values())}
    return Activate(
        proposal=proposal,
        members=tuple(GenerationMember(id=record.id, address=record.address, slots=record.slots, probe_port=record.probe_port) for record in records),
        store=StoreAddress(address=records[0].address, port=records[0].store_port),
        restarts=previous.restarts + 1 if previous else 0,
        resume=choice.resume,
        fell_back=choice.fell_back,
        void=voids(view),
        cause=_cause(view, proposal),
        without={incarnation: why for incarnation, why in view.left_out.items() if incarnation in here},
    )


def _cause(view: View, proposal: ProposalRecord) -> Cause:
    """Why the next generation begins: what the last one failed of, if that was judged, and not what was heard of it first."""
    verdict = view.verdict
    return proposal.cause.model_copy(update={"detail": verdict.root}) if verdict and proposal.cause.kind is CauseKind.WORKER_FAILED else proposal.cause


def observe(memory: Memory, before: View, after: View, now: float, timing: Timing) -> Memory:
    """What to remember after the view changed from `before` to `after` at `now`."""
    changed_at, restless_since = memory.changed_at, memory.restless_since
    if before.able != after.able:
        restless_since = now if now - changed_at > timing.settle else restless_since
        changed_at = now
    seen = memory.proposal_seen_at
    if after.pending and (not before.pending or before.pending.record.number != after.pending.record.number):
        seen = now
    failed = None
    if fate(after).failed:
        failed = now if memory.failed_since is None or before.number != after.number else memory.failed_since
    return replace(
        memory,
        changed_at=changed_at,
        restless_since=restless_since,
        proposal_seen_at=seen,
        orphaned_since=_orphaned_since(memory, before, after, now),
        failed_since=failed,
        judged_at=now if after.verdict and not before.verdict else memory.judged_at,
    )


def _undrained(view: View) -> GenerationRecord | None:
    """The last generation, if its workers may still train somewhere."""
    return view.generation.record if view.generation and not view.generation.record.drained else None


def _training(view: View) -> set[MemberId]:
    """Members of the last generation that are here and have not stopped."""
    generation = _undrained(view)
    if generation is None:
        return set()
    return {identity for identity in generation.ids if identity in view.present and view.present[identity].record.stopped < generation.number}


def _orphaned_since(memory: Memory, before: View, after: View, now: float) -> float | None:
    """Whoever trains on unseen was last seen at the answer. Members marked not ready are not waited for, so their time runs too."""
    marks = not_ready_marks(after)
    if _undrained(after) is None or any(identity.incarnation not in marks for identity in _training(after)):
        return None
    vanished = any(identity not in after.present for identity in _training(before))
    if memory.orphaned_since is None or before.number != after.number or vanished:
        return now
    return memory.orphaned_since


# --- each member -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """What a member knows of itself.

    Attributes:
        running: the generation whose workers it runs, None if it runs none.
        floor: the highest proposal it has seen; it starts nothing older (PROTOCOL 11).
        stopped: the highest generation whose workers it has stopped for good.
    """

    id: MemberId
    running: int | None = None
    floor: int = 0
    stopped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start the workers of `number`, after one more look at etcd (PROTOCOL 14)."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Stop the workers of `number`.

    Attributes:
        staying: who is to be in the next generation, where a proposal says so.
    """

    number: int
    mode: Mode
    why: str
    staying: tuple[MemberId, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Write `stopped` = `number` into the own key: it runs nothing and never started that."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The job is over for this member: stop whatever runs, then go."""

    mode: Mode
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """Go on as you are."""

    why: str


Directive = Start | Stop | Report | Leave | Stay


def react(generation: GenerationRecord | None, proposal: ProposalRecord | None, local: Local, *, over: bool) -> Directive:
    """What a member does about what it sees.

    Args:
        over: the job has ended and nobody reopened it.
    """
    if over and generation:
        return Leave(mode=Mode.KILL, why=f"job {generation.state.value}: {generation.reason}")
    number = generation.number if generation else 0
    pending = proposal if proposal and proposal.number > number else None
    if local.running is not None:
        if pending and local.running < pending.number:
            return Stop(number=local.running, mode=pending.mode, why=str(pending.cause), staying=pending.members)
        if local.running < number:
            return Stop(number=local.running, mode=Mode.KILL, why=f"generation {number} formed without this node")
        if generation and generation.ended:
            return Stop(number=local.running, mode=Mode.KILL, why=f"generation {number} has ended")
        return Stay(why="training")
    if pending:
        return Report(number=number) if local.stopped < number else Stay(why=f"waiting for generation {pending.number}")
    if generation and not generation.ended and local.id in generation.ids and local.stopped < number and number >= local.floor:
        return Start(number=number)
    if generation and local.id.incarnation in generation.not_ready and local.stopped < number:
        return Report(number=number)  # it was too late to be in it, and is left out until its key changes (PROTOCOL 13)
    return Stay(why="standing by")


def reported_result(member: MemberRecord, number: int) -> Result | None:
    """How the member's workers of generation `number` ended, if it said."""
    if member.outcome and member.outcome.generation == number:
        return member.outcome.result
    return None
