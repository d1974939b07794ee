"""How each step of the protocol is written: one transaction each, as plain values.

Owns: which revisions a step compares, and what it writes. Must not: send anything, or decide whether to.
Every value written holds something only its writer can have made (an incarnation, a fresh number), so that a write whose answer was lost can be
recognised when it is read back.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.errors import KVPermissionError
from elasticd.kv.types import Compare, Delete, KeyValue, Op, Put, Target
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import Activate, End, Propose
from elasticd.rendezvous.records import (
    TEXT_MAX,
    BudgetRecord,
    CheckpointRecord,
    EventRecord,
    GenerationRecord,
    MemberId,
    MemberRecord,
    PolicyRecord,
    ProposalRecord,
    Record,
    RequestRecord,
    TargetRecord,
)
from elasticd.rendezvous.resume import told
from elasticd.rendezvous.rollback import is_void, voids
from elasticd.rendezvous.view import Keyed, View


@dataclass(frozen=True, slots=True)
class Txn:
    """Do `ops` if all `compares` hold."""

    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]


def unchanged(key: str, keyed: Keyed[Record] | None, view: View | None = None) -> Compare:
    """`key` is as it was seen, garbage included if `view` is given; None means it did not exist."""
    seen = keyed.mod_revision if keyed else 0
    return Compare(key=key, target=Target.MOD, op="==", value=view.damaged.get(key, seen) if view else seen)


def _short(text: str) -> str:
    """What fits into a record: a cause may name a thousand nodes."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def not_ours_to_want(keys: JobKeys, error: KVPermissionError) -> KVPermissionError:
    """The same refusal, with what to do: where etcd has roles, what is wanted of a job is written by operators."""
    message = f"this certificate may not say what is wanted of job {keys.job!r} ({error.message})"
    return KVPermissionError(message, remedy=f"start it with `elasticctl start {keys.job}`, or give the job its roles in etcd")


def create_target(keys: JobKeys, target: TargetRecord) -> Txn:
    """Write the job's size, unless somebody has."""
    return Txn((Compare(key=keys.target, target=Target.CREATE, op="==", value=0),), (Put(key=keys.target, value=target.to_bytes()),))


def reopen(keys: JobKeys, seen: KeyValue | None, target: TargetRecord) -> Txn:
    """Start an ended job again, as long as nobody else wrote its target meanwhile; its budget is whole again."""
    txn = write_target(keys, seen, target)
    return Txn(txn.compares, (*txn.ops, Put(key=keys.budget, value=BudgetRecord(scope=keys.scope).to_bytes())))


def write_target(keys: JobKeys, seen: KeyValue | None, target: TargetRecord) -> Txn:
    """Change the job's size, or reopen it, as long as nobody else did meanwhile."""
    compare = Compare(key=keys.target, target=Target.MOD, op="==", value=seen.mod_revision if seen else 0)
    return Txn((compare,), (Put(key=keys.target, value=target.to_bytes()),))


def request(keys: JobKeys, record: RequestRecord, seen: KeyValue | None, generation: Keyed[GenerationRecord]) -> Txn:
    """Ask something of the generation that trains, as long as it still does and nobody asked the same meanwhile."""
    key = keys.request(record.kind.value)
    compare = Compare(key=key, target=Target.MOD, op="==", value=seen.mod_revision if seen else 0)
    return Txn((compare, unchanged(keys.generation, generation)), (Put(key=key, value=record.to_bytes()),))


def register(keys: JobKeys, record: MemberRecord, lease: int) -> Txn:
    """Create the own member key; never take one over (PROTOCOL 1)."""
    key = keys.member(record.id.node)
    return Txn((Compare(key=key, target=Target.CREATE, op="==", value=0),), (Put(key=key, value=record.to_bytes(), lease=lease),))


def remove_member(keys: JobKeys, node: str, mod_revision: int) -> Txn:
    """Delete a member key that nobody changed since it was seen: a dead agent's, or the own on leaving (PROTOCOL 1, 17)."""
    key = keys.member(node)
    return Txn((Compare(key=key, target=Target.MOD, op="==", value=mod_revision),), (Delete(key=key),))


def reattach(keys: JobKeys, record: MemberRecord, lease: int, generation: Keyed[GenerationRecord], proposal: Keyed[ProposalRecord] | None) -> Txn:
    """Re-create the own key after its lease lapsed, while nothing else has happened to the job (PROTOCOL 4, exception)."""
    key = keys.member(record.id.node)
    return Txn(
        (
            Compare(key=key, target=Target.CREATE, op="==", value=0),
            unchanged(keys.generation, generation),
            unchanged(keys.proposal, proposal),
        ),
        (Put(key=key, value=record.to_bytes(), lease=lease),),
    )


def report(keys: JobKeys, record: MemberRecord, mod_revision: int, lease: int) -> Txn:
    """Write the own member key anew: stopped, outcome, a fresh store socket, leaving."""
    key = keys.member(record.id.node)
    return Txn((Compare(key=key, target=Target.MOD, op="==", value=mod_revision),), (Put(key=key, value=record.to_bytes(), lease=lease),))


def propose(keys: JobKeys, view: View, decision: Propose, proposer: MemberId) -> Txn:
    """Write a proposal, and charge the budget with it (PROTOCOL 20)."""
    record = ProposalRecord(
        scope=keys.scope,
        number=decision.number,
        mode=decision.mode,
        members=decision.members,
        cause=decision.cause,
        proposer=proposer,
        not_ready=dict(decision.not_ready),
        counted=decision.counted,
    )
    compares = [unchanged(keys.proposal, view.proposal), unchanged(keys.generation, view.generation), unchanged(keys.target, view.target)]
    ops: list[Op] = [Put(key=keys.proposal, value=record.to_bytes())]
    if decision.charge:
        compares.append(unchanged(keys.budget, view.budget, view))
        used = max(0, view.restarts_used + decision.charge)
        ops.append(Put(key=keys.budget, value=BudgetRecord(scope=keys.scope, used=used).to_bytes()))
    return Txn(tuple(compares), tuple(ops))


def activate(keys: JobKeys, view: View, decision: Activate, me: MemberId, *, frozen_max: float, at: float) -> Txn:
    """Make the pending proposal the generation (PROTOCOL 12).

    Compared: proposal, generation and checkpoint, the own key, and that no member was added or changed since `view`.
    """
    record = GenerationRecord(
        scope=keys.scope,
        number=decision.proposal.number,
        cause=decision.cause,
        members=decision.members,
        store=decision.store,
        restarts=decision.restarts,
        frozen_max=frozen_max,
        formed_at=at,
        not_ready=decision.proposal.not_ready,
        resume=decision.resume,
        void=decision.void,
        without=dict(decision.without),
    )
    own = view.members.get(me.node)
    compares = (
        unchanged(keys.proposal, view.proposal),
        unchanged(keys.generation, view.generation),
        unchanged(keys.checkpoint, view.checkpoint, view),
        unchanged(keys.member(me.node), own),
        Compare(key=keys.members, prefix=True, target=Target.MOD, op="<", value=view.revision + 1),
    )
    event = EventRecord(
        scope=keys.scope,
        number=record.number,
        at=at,
        what="formed",
        detail=_short(f"{_count(len(record.members), 'node')}, {_count(record.world_size, 'worker')}: {record.cause}"),
    )
    events = [event] if decision.fell_back is None else [event, _fell_back(keys, record, decision.fell_back, at)]
    return Txn(
        compares,
        (Put(key=keys.generation, value=record.to_bytes()), *(Put(key=keys.event(one.number, one.what), value=one.to_bytes()) for one in events)),
    )


def _fell_back(keys: JobKeys, record: GenerationRecord, committed: CheckpointRecord, at: float) -> EventRecord:
    """Steps that were committed are done again: nobody is to wonder about that (PROTOCOL 24)."""
    lost = f"the committed checkpoint ({told(committed)}) is lost" + (f" on {', '.join(committed.holders)}" if committed.holders else "")
    return EventRecord(scope=keys.scope, number=record.number, at=at, what="fell_back", detail=_short(f"{lost}; begins with {told(record.resume)}"))


def drain(keys: JobKeys, view: View) -> Txn:
    """Put on record that every worker of the generation has stopped; no member may have changed since `view`."""
    generation = view.generation
    assert generation is not None  # plan drains only what has begun
    record = generation.record.model_copy(update={"drained": True})
    return Txn(
        (
            unchanged(keys.generation, generation),
            unchanged(keys.proposal, view.proposal),
            Compare(key=keys.members, prefix=True, target=Target.MOD, op="<", value=view.revision + 1),
        ),
        (Put(key=keys.generation, value=record.to_bytes()),),
    )


def end(keys: JobKeys, view: View, decision: End, *, at: float) -> Txn:
    """Close the job, whatever is pending (PROTOCOL 19), unless an operator has just written `target`: his word is to be read first."""
    generation = view.generation
    assert generation is not None  # plan ends only what has begun
    reason = _short(decision.reason)
    record = generation.record.model_copy(update={"state": decision.state, "reason": reason, "drained": decision.drained, "code": decision.code})
    event = EventRecord(scope=keys.scope, number=record.number, at=at, what=decision.state.value, detail=reason)
    return Txn(
        (unchanged(keys.generation, generation), unchanged(keys.target, view.target)),
        (Put(key=keys.generation, value=record.to_bytes()), Put(key=keys.event(event.number, event.what), value=event.to_bytes())),
    )


def judge(keys: JobKeys, view: View, record: PolicyRecord, event: EventRecord) -> Txn:
    """Put down what a generation failed of, once: as long as nobody else did, and neither the proposal nor what is wanted has changed."""
    compares = (
        unchanged(keys.policy, view.policy, view),
        unchanged(keys.generation, view.generation),
        unchanged(keys.proposal, view.proposal),
        unchanged(keys.target, view.target),
    )
    return Txn(compares, (Put(key=keys.policy, value=record.to_bytes()), Put(key=keys.event(event.number, event.what), value=event.to_bytes())))


def repair(key: str, record: Record, seen: int, lease: int = 0) -> Txn:
    """Put the last good value back over garbage (`seen` is its mod revision), or where the key was removed (0)."""
    return Txn((Compare(key=key, target=Target.MOD, op="==", value=seen),), (Put(key=key, value=record.to_bytes(), lease=lease),))


def commit(keys: JobKeys, view: View, record: CheckpointRecord) -> Txn:
    """Make a checkpoint the newest, fenced by the active generation (PROTOCOL 23), and by what is held (PROTOCOL 30).

    Raises:
        ValueError: no generation is active, the checkpoint is another generation's, not newer than the committed one, or its state may be bad.
    """
    generation = view.active
    if generation is None or generation.number != record.generation:
        msg = f"generation {record.generation} is not the active one"
        raise ValueError(msg)
    if view.checkpoint and record.order <= view.checkpoint.record.order:
        msg = f"step {record.step} of generation {record.generation} is not newer than the committed one"
        raise ValueError(msg)
    if is_void(record.order, voids(view)) or (view.policy and view.policy.record.hold == record.generation):
        msg = f"the state of generation {record.generation} may be bad: nothing of it is committed until that is known"
        raise ValueError(msg)
    return Txn(
        (unchanged(keys.generation, view.generation), unchanged(keys.checkpoint, view.checkpoint, view), unchanged(keys.policy, view.policy, view)),
        (Put(key=keys.checkpoint, value=record.to_bytes()),),
    )
