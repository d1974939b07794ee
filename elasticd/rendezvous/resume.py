"""Which state a generation begins with: one for all, by what is in it (PROTOCOL 21, 22, 24).

Owns: the choice among what nodes say they hold and what was committed. Must not: know how states are kept or fetched, or look at etcd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from elasticd.rendezvous.records import CheckpointRecord, MemberId, ResumePoint, SnapshotRef


def choose_resume(
    inventories: Mapping[MemberId, Sequence[SnapshotRef]], survivors: AbstractSet[MemberId], committed: CheckpointRecord | None
) -> ResumePoint | None:
    """Choose the state that the next generation begins with.

    The newest that every survivor holds: after a crash their newest differ by a step, and a step back is cheaper than a transfer. Else the
    newest that anybody holds. Never one older than the committed checkpoint, which is the choice if nobody holds a newer one.

    Args:
        inventories: what each member that is here holds, leavers and standbys included.
        survivors: those of the last generation that are to be in the next one.
        committed: the newest committed checkpoint.

    Returns:
        None if there is nothing yet: the very beginning.
    """
    usable = {identity: {ref for ref in held if _usable(ref, committed)} for identity, held in inventories.items()}
    everybody = [usable.get(identity, set()) for identity in survivors]
    common = set.intersection(*everybody) if everybody else set()
    choice = _newest(common, usable) or _newest({ref for held in usable.values() for ref in held}, usable)
    if choice is None:
        return _resume(committed, committed.holders) if committed else None
    holders = {identity.node for identity, held in usable.items() if choice in held}
    if committed and choice.order == committed.order:
        holders.update(committed.holders)
    return _resume(choice, sorted(holders))


def _usable(ref: SnapshotRef, committed: CheckpointRecord | None) -> bool:
    """Whether it is not older than what was committed, nor another state under the same name."""
    return committed is None or ref.order > committed.order or (ref.order == committed.order and ref.digest == committed.digest)


def _newest(refs: AbstractSet[SnapshotRef], usable: Mapping[MemberId, AbstractSet[SnapshotRef]]) -> SnapshotRef | None:
    """The newest; where states of one step differ, the one that more nodes hold, and in the end the same one on every machine."""
    newest = max((ref.order for ref in refs), default=None)
    rivals = [ref for ref in refs if ref.order == newest]
    return max(rivals, key=lambda ref: (sum(ref in held for held in usable.values()), ref.digest), default=None)


def _resume(state: SnapshotRef | CheckpointRecord, holders: Sequence[str]) -> ResumePoint:
    return ResumePoint(generation=state.generation, step=state.step, digest=state.digest, holders=tuple(holders))
