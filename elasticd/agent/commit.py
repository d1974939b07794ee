"""When a checkpoint that was written becomes the job's newest: the part of rank 0's agent (PROTOCOL 23, 24).

Owns: who is known to hold what was written in the generation at hand, and whether that is enough. Must not: write anything, or talk to etcd itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticd.rendezvous.records import CheckpointRecord, SnapshotRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.rendezvous.records import GenerationRecord

MAX_PENDING: Final = 8
"""Checkpoints of one generation that wait for holders; an older one than the newest committed is forgotten."""


def enough(holders: Collection[str], *, nodes: int, copies: int, shared: bool) -> bool:
    """Whether a checkpoint may be committed: it is on shared storage, or on the disks of `copies` nodes, or of all if there are fewer."""
    return bool(holders) and (shared or len(holders) >= min(copies, nodes))


def writes(node_rank: int, *, copies: int, shared: bool) -> bool:
    """Whether the node of that rank writes checkpoints to its disk."""
    return node_rank == 0 if shared else node_rank < copies


def last_rank(generation: GenerationRecord, node: str, *, copies: int, shared: bool) -> int:
    """The rank by which `node` writes the state of a generation that it leaves before its workers have started (PROTOCOL 29).

    Its own, unless no holder of the state would then write it: the first of the holders takes the place of the last who would.
    """
    ranks = {identity.node: rank for rank, identity in enumerate(generation.ids)}
    holders = sorted(ranks[name] for name in (generation.resume.holders if generation.resume else ()) if name in ranks)
    if holders and ranks[node] == holders[0] and not writes(holders[0], copies=copies, shared=shared):
        return 0 if shared else copies - 1
    return ranks[node]


@dataclass(slots=True)
class Committer:
    """Collects the holders of what one generation has written. Called from one thread.

    Attributes:
        commit: makes a record the newest; False if the generation is over or a newer one is there. May raise KVError: it is asked again.
    """

    commit: Callable[[CheckpointRecord], bool]
    scope: str
    copies: int
    shared: bool
    _generation: int = 0
    _nodes: int = 1
    _holders: dict[SnapshotRef, set[str]] = field(default_factory=dict)
    _done: tuple[int, int] = (0, 0)

    def generation(self, number: int, nodes: int) -> None:
        """Another generation: what the last one has not committed, it never will."""
        self._generation, self._nodes = number, nodes
        self._holders.clear()

    def holds(self, ref: SnapshotRef, node: str) -> None:
        """`node` has written `ref` whole."""
        if ref.generation == self._generation and ref.order > self._done:
            self._holders.setdefault(ref, set()).add(node)
            while len(self._holders) > MAX_PENDING:
                del self._holders[min(self._holders, key=lambda one: one.order)]

    @property
    def pending(self) -> bool:
        """Whether something is written that may still be committed."""
        return bool(self._holders)

    def settle(self) -> SnapshotRef | None:
        """Commit the newest that enough nodes hold; it, or None if there is none or it was refused.

        Raises:
            KVError: etcd is out of reach; call again.
        """
        ready = [ref for ref, held in self._holders.items() if enough(held, nodes=self._nodes, copies=self.copies, shared=self.shared)]
        if not ready:
            return None
        newest = max(ready, key=lambda ref: ref.order)
        record = CheckpointRecord(
            scope=self.scope,
            generation=newest.generation,
            step=newest.step,
            digest=newest.digest,
            holders=tuple(sorted(self._holders[newest])),
            shared=self.shared,
        )
        committed = self.commit(record)
        self._done = max(self._done, newest.order)
        for ref in [ref for ref in self._holders if ref.order <= newest.order]:
            del self._holders[ref]
        return newest if committed else None
