"""Which state a generation begins with: one for all, by what is in it (PROTOCOL 21, 22, 24).

Owns: the choice among what nodes say they hold and what was committed. Must not: know how states are kept or fetched, or look at etcd.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from elasticd.rendezvous.records import CheckpointRecord, MemberId, ResumePoint, SnapshotRef, Void
from elasticd.rendezvous.rollback import is_void

SHOWN: Final = 12
"""Characters of a digest that people are shown."""
_NOBODY: Final[Mapping[MemberId, Sequence[str]]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the next generation begins with.

    Attributes:
        resume: None is the very beginning.
        fell_back: the committed checkpoint, if it is lost for good and `resume` is older.
        awaiting: what has to be waited for before anything can begin, in one line; "" if nothing.
    """

    resume: ResumePoint | None = None
    fell_back: CheckpointRecord | None = None
    awaiting: str = ""


@dataclass(frozen=True, slots=True)
class _Stock:
    """Who holds what. A state is known by its digest; restored, it is held under several generations' numbers, of which the greatest counts."""

    held: Mapping[MemberId, AbstractSet[str]]
    named: Mapping[str, SnapshotRef]
    lost: Mapping[MemberId, AbstractSet[str]]

    def newest(self, digests: AbstractSet[str]) -> str | None:
        """The newest; where states of one step differ, the one that more nodes hold, and in the end the same one on every machine."""
        greatest = max((self.named[digest].order for digest in digests), default=None)
        rivals = [digest for digest in digests if self.named[digest].order == greatest]
        return max(rivals, key=lambda digest: (sum(digest in held for held in self.held.values()), digest), default=None)

    def holders(self, digest: str, committed: CheckpointRecord | None) -> list[str]:
        """Nodes that are here and can give it; who is named in the record need not say so again, unless to say that it is lost."""
        named = committed.holders if committed and committed.digest == digest else ()
        return sorted(
            {identity.node for identity, held in self.held.items() if digest in held or (identity.node in named and digest not in self.lost.get(identity, ()))}
        )

    def resume(self, digest: str, committed: CheckpointRecord | None) -> ResumePoint:
        """The state of this digest, under its greatest number."""
        state = self.named[digest]
        return ResumePoint(generation=state.generation, step=state.step, digest=digest, holders=tuple(self.holders(digest, committed)))


def choose_resume(
    inventories: Mapping[MemberId, Sequence[SnapshotRef]],
    survivors: AbstractSet[MemberId],
    committed: CheckpointRecord | None,
    *,
    lost: Mapping[MemberId, Sequence[str]] = _NOBODY,
    members: Collection[MemberId] = (),
    planned: bool = False,
    void: Sequence[Void] = (),
    began_empty: bool = True,
) -> Choice:
    """Choose the state that the next generation begins with.

    The newest that every survivor holds, if that is at most a snapshot behind the newest of all: after a crash theirs differ by one, and a step
    back is cheaper than a transfer. Else, and after an agreed stop, which is to cost nothing, the newest that anybody holds. Never one older
    than the committed checkpoint, which is the choice if nobody holds a newer one, unless all who were to hold it say that it is lost.

    Args:
        inventories: what each member that is here holds, leavers and standbys included.
        survivors: those of the last generation that are to be in the next one.
        committed: the newest committed checkpoint.
        lost: what each of them was to hold and cannot read any more; what it holds all the same is not lost.
        members: who is to begin with it; all who are here if nobody is named.
        planned: the last generation stopped by agreement.
        void: what nothing is begun with, the committed checkpoint neither; then an older one is.
        began_empty: the last generation began at the very beginning, so that a return to that loses nothing.
    """
    bad = {ref.digest for held in inventories.values() for ref in held if is_void(ref.order, void)}
    if committed is not None and (is_void(committed.order, void) or committed.digest in bad):
        bad.add(committed.digest)
        committed = None
    inventories = {identity: [ref for ref in held if ref.digest not in bad] for identity, held in inventories.items()}
    stock = _take_stock(inventories, committed, lost)
    usable = {identity: {digest for digest in held if _usable(stock.named[digest], committed)} for identity, held in stock.held.items()}
    anybodys = {digest for held in usable.values() for digest in held}
    choice = None if planned else stock.newest(_common(stock, usable, anybodys, survivors))
    choice = choice or stock.newest(anybodys)
    if choice is not None:
        return Choice(resume=stock.resume(choice, committed))
    if committed is None:
        if bad and not began_empty:
            return Choice(awaiting="nobody here holds a state from before the divergence: waiting for a node that does, or for an operator")
        return Choice()
    return _committed(stock, committed, set(members or inventories))


def _take_stock(inventories: Mapping[MemberId, Sequence[SnapshotRef]], committed: CheckpointRecord | None, lost: Mapping[MemberId, Sequence[str]]) -> _Stock:
    named: dict[str, SnapshotRef] = {}
    if committed:
        named[committed.digest] = SnapshotRef(generation=committed.generation, step=committed.step, digest=committed.digest)
    for ref in (ref for held in inventories.values() for ref in held):
        if ref.digest not in named or ref.order > named[ref.digest].order:
            named[ref.digest] = ref
    held = {identity: {ref.digest for ref in refs} for identity, refs in inventories.items()}
    # Who lost one and has got it again, from another node, holds it.
    gone = {identity: set(digests).difference(held.get(identity, ())) for identity, digests in lost.items()}
    return _Stock(held, named, gone)


def _usable(ref: SnapshotRef, committed: CheckpointRecord | None) -> bool:
    """Whether it is not older than what was committed, nor another state under the same name."""
    return committed is None or ref.order > committed.order or ref.digest == committed.digest


def _common(stock: _Stock, usable: Mapping[MemberId, AbstractSet[str]], anybodys: AbstractSet[str], survivors: AbstractSet[MemberId]) -> set[str]:
    """What every survivor holds, of the two newest. One that had yet to fetch its state holds only old ones; its partners hold the last."""
    everybody = [usable.get(identity, frozenset()) for identity in survivors]
    near = sorted({stock.named[digest].order for digest in anybodys}, reverse=True)[:2]
    common = set(everybody[0]).intersection(*everybody) if everybody else set()
    return {digest for digest in common if stock.named[digest].order in near}


def _committed(stock: _Stock, committed: CheckpointRecord, members: AbstractSet[MemberId]) -> Choice:
    """Nobody says that he holds it or a newer one: it is the choice if somebody can give or read it, and given up only if nobody ever will."""
    here = {identity.node: identity for identity in stock.held}
    anywhere = committed.shared or not committed.holders
    readers = [identity for identity in members if committed.digest not in stock.lost.get(identity, ())]
    if stock.holders(committed.digest, committed) or (anywhere and readers):
        return Choice(resume=stock.resume(committed.digest, committed))
    absent = [node for node in committed.holders if node not in here]
    if absent or not members:
        return Choice(awaiting=_awaiting(committed, absent))
    rest = {digest for held in stock.held.values() for digest in held}
    choice = stock.newest(rest)
    return Choice(resume=stock.resume(choice, None) if choice else None, fell_back=committed)


def _awaiting(committed: CheckpointRecord, absent: Sequence[str]) -> str:
    gone = [node for node in committed.holders if node not in absent]
    return (
        f"nobody here can give the committed checkpoint ({told(committed)}): waiting for {', '.join(absent) or 'a node'}"
        + (f"; {', '.join(gone)} cannot read it any more" if gone else "")
    )  # fmt: skip


def told(state: SnapshotRef | CheckpointRecord | None) -> str:
    """A state in a few words, for people."""
    return f"generation {state.generation}, step {state.step}, {state.digest[:SHOWN]}" if state else "the very beginning"
