"""Builders of views for the pure tests: members, generations and proposals in one line each.

Owns: values only. Must not: decide, or read a clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import Memory, Timing
from elasticd.rendezvous.records import (
    BudgetRecord,
    Cause,
    CauseKind,
    CheckpointRecord,
    GenerationMember,
    GenerationRecord,
    GenerationState,
    MemberId,
    MemberRecord,
    Mode,
    Outcome,
    ProposalRecord,
    Result,
    SnapshotRef,
    StoreAddress,
    TargetRecord,
)
from elasticd.rendezvous.view import Keyed, View

KEYS = JobKeys("cluster", "job")
TIMING = Timing(settle=1.0, settle_cap=5.0, ready_timeout=15.0, drain_timeout=60.0, ttl=10.0, frozen_max=600.0)
LONG_AGO = Memory()
"""An observer for whom everything changed long before `NOW`."""
NOW = 10_000.0


def mid(node: str, life: int = 1) -> MemberId:
    """The `life`-th agent on `node`."""
    return MemberId(node=node, incarnation=hashlib.sha256(f"{node}-{life}".encode()).hexdigest()[:16])


def member(
    node: str,
    age: int,
    *,
    life: int = 1,
    stopped: int = 0,
    failed: int | None = None,
    finished: int | None = None,
    detail: str = "",
    leaving: bool = False,
    unreachable: Sequence[MemberId] = (),
    mod: int | None = None,
    slots: int = 1,
    port: int = 4000,
    fingerprint: dict[str, str] | None = None,
    held: str = "",
    lost: str = "",
) -> Keyed[MemberRecord]:
    """A member whose key was created at revision `age`; `failed` and `finished` name the generation its workers ended.

    `held` are states as `refs` has them, `lost` the digests of others.
    """
    outcome = None
    if failed is not None:
        outcome, stopped = Outcome(generation=failed, result=Result.FAILED, detail=detail), max(stopped, failed)
    if finished is not None:
        outcome, stopped = Outcome(generation=finished, result=Result.FINISHED), max(stopped, finished)
    record = MemberRecord(
        scope=KEYS.scope,
        id=mid(node, life),
        address=f"host-{node}",
        slots=slots,
        boot_id="boot",
        store_port=port,
        probe_port=port + 1,
        stopped=stopped,
        outcome=outcome,
        unreachable=tuple(identity.incarnation for identity in unreachable),
        leaving=leaving,
        fingerprint=fingerprint or {},
        inventory=refs(held),
        lost=tuple(lost.split()),
    )
    return Keyed(record, age, age if mod is None else mod, lease=age)


def refs(text: str) -> tuple[SnapshotRef, ...]:
    """ "1.5 2.7x 3.5=1.5": step 5 of generation 1, step 7 of generation 2 with another content, and the first again under a third number."""
    found = []
    for word in text.split():
        name, _, digest = word.partition("=")
        number, _, step = name.partition(".")
        found.append(SnapshotRef(generation=int(number), step=int(step.rstrip("xyz")), digest=digest or word))
    return tuple(found)


def committed(text: str, holders: str = "", *, shared: bool = False, mod: int = 7) -> Keyed[CheckpointRecord]:
    """A checkpoint as `refs` has it, held by the nodes that the letters name."""
    (ref,) = refs(text)
    record = CheckpointRecord(scope=KEYS.scope, generation=ref.generation, step=ref.step, digest=ref.digest, holders=tuple(holders), shared=shared)
    return Keyed(record, 7, mod)


def target(
    minimum: int = 1,
    maximum: int = 3,
    desired: int | None = None,
    *,
    budget: int = 10,
    run: bool = True,
    mod: int = 1,
    reason: str = "",
    paused: bool = False,
) -> Keyed[TargetRecord]:
    """What operators want."""
    wanted = maximum if desired is None else desired
    record = TargetRecord(scope=KEYS.scope, run=run, min_nodes=minimum, max_nodes=maximum, desired=wanted, max_restarts=budget, reason=reason, paused=paused)
    return Keyed(record, 1, mod)


def generation(
    number: int,
    nodes: Iterable[str | MemberId],
    *,
    state: GenerationState = GenerationState.ACTIVE,
    restarts: int = 0,
    frozen_max: float = 600.0,
    not_ready: dict[str, int] | None = None,
    drained: bool = False,
    mod: int = 500,
) -> Keyed[GenerationRecord]:
    """The generation of these nodes, in this order of ranks."""
    record = GenerationRecord(
        scope=KEYS.scope,
        number=number,
        state=state,
        cause=Cause(kind=CauseKind.FORM),
        members=tuple(GenerationMember(id=as_id(node), address=f"host-{as_id(node).node}", slots=1, probe_port=4001) for node in nodes),
        store=StoreAddress(address="host-a", port=4000),
        restarts=restarts,
        frozen_max=frozen_max,
        not_ready=not_ready or {},
        drained=drained,
    )
    return Keyed(record, 2, mod)


def proposal(
    number: int,
    nodes: Iterable[str | MemberId],
    *,
    mode: Mode = Mode.AGREED_STOP,
    kind: CauseKind = CauseKind.JOIN,
    counted: bool = False,
    not_ready: dict[str, int] | None = None,
    mod: int = 600,
) -> Keyed[ProposalRecord]:
    """A proposal of these nodes."""
    record = ProposalRecord(
        scope=KEYS.scope,
        number=number,
        mode=mode,
        members=tuple(as_id(node) for node in nodes),
        cause=Cause(kind=kind),
        proposer=mid("a"),
        not_ready=not_ready or {},
        counted=counted,
    )
    return Keyed(record, 3, mod)


def as_id(node: str | MemberId) -> MemberId:
    """A bare name means the first agent on that node."""
    return mid(node) if isinstance(node, str) else node


def view(*members: Keyed[MemberRecord], used: int | None = None, **keys: Any) -> View:
    """The job as a coordinator sees it; `used` is the budget used."""
    keys.setdefault("target", target())
    if used is not None:
        keys["budget"] = Keyed(BudgetRecord(scope=KEYS.scope, used=used), 4, 4)
    return View(revision=1000, members={keyed.record.id.node: keyed for keyed in members}, **keys)


def nodes(identities: Iterable[MemberId]) -> list[str]:
    """Their node names, in order."""
    return [identity.node for identity in identities]
