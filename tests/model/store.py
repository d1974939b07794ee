"""A model of etcd for the protocol checker: keys, revisions, leases in virtual time, transactions, outages.

Owns: what the protocol relies on, no more: comparisons (the one over a prefix sees additions and changes, never deletions), leases that take
their keys along, 128 comparisons and operations a transaction. It is a model: that the real etcd does the same is tested in tests/kv.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd.kv.types import Compare, EventKind, KeyValue, Listing, Put, Target, WatchBatch, WatchEvent
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.transitions import Txn
from elasticd.rendezvous.view import Ledger, View

MAX_OPS = 128
HISTORY = 64
_OPERATORS: dict[str, Callable[[int, int], bool]] = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}


class AwayError(Exception):
    """Etcd does not answer this caller now."""


class NoLeaseError(Exception):
    """The lease of a write has ended."""


@dataclass(slots=True)
class Lease:
    """One lease and the keys bound to it."""

    ttl: float
    ends: float
    keys: set[str] = field(default_factory=set)


class VirtualEtcd:
    """See the module. Whoever calls says what time it is by setting `now`; `on_change(keys)` hears of every revision."""

    def __init__(self, keys: JobKeys, on_change: Callable[[list[str]], None]) -> None:
        self.keys = keys
        self.now = 0.0
        self.up = True
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.leases: dict[int, Lease] = {}
        self.events: list[WatchEvent] = []
        self._on_change = on_change
        self._next_lease = 100
        self._ledger = Ledger(keys)
        self._view = View(revision=0)

    # --- reading

    def listing(self) -> Listing:
        return Listing(revision=self.revision, items=tuple(self.items[key] for key in sorted(self.items)))

    def view(self) -> View:
        """The job at this revision, parsed once for everybody."""
        if self._view.revision != self.revision:
            self._ledger.load(self.listing())
            self._view = self._ledger.view()
        return self._view

    def changes_after(self, revision: int) -> WatchBatch:
        """What a watch from `revision` + 1 brings; a reset where the history is too short."""
        if self.events and len(self.events) >= HISTORY and self.events[0].item.mod_revision > revision + 1:
            items = self.listing().items
            return WatchBatch(revision=self.revision, events=tuple(WatchEvent(kind=EventKind.PUT, item=item) for item in items), reset=True)
        return WatchBatch(revision=self.revision, events=tuple(event for event in self.events if event.item.mod_revision > revision))

    # --- writing

    def txn(self, txn: Txn) -> int:
        """Do it; the revision it got, or 0 if a comparison did not hold.

        Raises:
            NoLeaseError: a put names a lease that has ended.
        """
        assert len(txn.compares) + len(txn.ops) <= MAX_OPS
        assert len({op.key for op in txn.ops}) == len(txn.ops), "etcd refuses two operations on one key"
        if not all(self._holds(compare) for compare in txn.compares):
            return 0
        if any(isinstance(op, Put) and op.lease and op.lease not in self.leases for op in txn.ops):
            raise NoLeaseError
        self.revision += 1
        for op in txn.ops:
            if isinstance(op, Put):
                self._put(op)
            else:
                self._remove(op.key)
        revision = self.revision
        self._on_change([op.key for op in txn.ops])
        return revision

    def _holds(self, compare: Compare) -> bool:
        holds = _OPERATORS[compare.op]
        if compare.prefix:
            return all(holds(self._of(item, compare.target), compare.value) for key, item in self.items.items() if key.startswith(compare.key))
        return holds(self._of(self.items.get(compare.key), compare.target), compare.value)

    @staticmethod
    def _of(item: KeyValue | None, target: Target) -> int:
        if item is None:
            return 0
        return {Target.CREATE: item.create_revision, Target.MOD: item.mod_revision, Target.LEASE: item.lease}[target]

    def _put(self, op: Put) -> None:
        known = self.items.get(op.key)
        if known and known.lease in self.leases:
            self.leases[known.lease].keys.discard(op.key)
        if op.lease:
            self.leases[op.lease].keys.add(op.key)
        created = known.create_revision if known else self.revision
        item = KeyValue(key=op.key, value=op.value, create_revision=created, mod_revision=self.revision, lease=op.lease)
        self.items[op.key] = item
        self._note(WatchEvent(kind=EventKind.PUT, item=item))

    def _remove(self, key: str) -> None:
        known = self.items.pop(key, None)
        if known is None:
            return
        if known.lease in self.leases:
            self.leases[known.lease].keys.discard(key)
        item = KeyValue(key=key, value=b"", create_revision=known.create_revision, mod_revision=self.revision)
        self._note(WatchEvent(kind=EventKind.DELETE, item=item))

    def _note(self, event: WatchEvent) -> None:
        self.events.append(event)
        if len(self.events) > 2 * HISTORY:
            del self.events[:-HISTORY]

    # --- leases

    def grant(self, ttl: float) -> int:
        self._next_lease += 1
        self.leases[self._next_lease] = Lease(ttl, self.now + ttl)
        return self._next_lease

    def renew(self, lease: int) -> bool:
        """False if it has ended."""
        known = self.leases.get(lease)
        if known is None:
            return False
        known.ends = self.now + known.ttl
        return True

    def revoke(self, lease: int) -> None:
        known = self.leases.pop(lease, None)
        if known and known.keys:
            self._drop(known)

    def expire(self) -> None:
        """End the leases whose time has come; none does while etcd stands still."""
        if not self.up:
            return
        for lease in [lease for lease, known in self.leases.items() if known.ends <= self.now]:
            known = self.leases.pop(lease)
            if known.keys:
                self._drop(known)

    def next_expiry(self) -> float:
        return min((lease.ends for lease in self.leases.values()), default=float("inf"))

    def extend_all(self) -> None:
        """A new leader gives every lease its whole time again."""
        for lease in self.leases.values():
            lease.ends = self.now + lease.ttl

    def _drop(self, lease: Lease) -> None:
        self.revision += 1
        gone = sorted(lease.keys)
        for key in gone:
            self._remove(key)
        self._on_change(gone)
