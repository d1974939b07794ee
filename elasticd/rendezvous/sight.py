"""What one member sees of its job: reading, watching, and its place in the order of members.

Owns: the ledger and the watch that feeds it. Must not: write to etcd, or decide.

A member's place decides how much it looks at (PROTOCOL 8). The coordinator, the member with the lowest create revision, watches everything.
The others watch seven keys, whatever the size of the job: the generation, the proposal, the target, the committed checkpoint, which no clean-up
may take away, their own key, and those of the two members before them, whose end may make them the coordinator or its deputy. The deputy, second
in the order, lists everything now and then as well.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.kv import EventKind, KeyValue, Listing, WatchBatch, WatchEvent, WatchRange
from elasticd.rendezvous.view import Keyed, Ledger, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv import EtcdKV, Watch
    from elasticd.rendezvous.keys import JobKeys
    from elasticd.rendezvous.records import MemberRecord

log = structlog.get_logger("elasticd.rendezvous")

LOOK_EVERY: Final = 15.0
"""Seconds between looks at etcd when the watch brings nothing: the watch is a hint, the list is the truth."""


class Sight:
    """See the module. Only `_on_batch` runs on another thread than the loop's.

    Args:
        wake: called when the watch brought something.
    """

    def __init__(self, kv: EtcdKV, keys: JobKeys, node: str, wake: Callable[[], None]) -> None:
        self._kv = kv
        self._keys = keys
        self._own_key = keys.member(node)
        self._node = node
        self._wake = wake
        self._ledger = Ledger(keys)
        self._batches: deque[WatchBatch] = deque()
        self._watch: Watch | None = None
        self._before: tuple[KeyValue, ...] = ()
        self._placed = False
        self._listed_revision = 0
        self.coordinator = False
        self.deputy = False
        self.looked_at = 0.0

    @property
    def view(self) -> View:
        """The job as known now."""
        return self._ledger.view()

    @property
    def own(self) -> Keyed[MemberRecord] | None:
        """The own key, as last seen."""
        return self.view.members.get(self._node)

    @property
    def whole(self) -> bool:
        """Whether the view holds every member as of its revision: always for the coordinator, for a deputy only right after a listing."""
        return self.coordinator or (self.deputy and self.view.revision == self._listed_revision)

    @property
    def stale(self) -> bool:
        """Whether it is time to look again although the watch brought nothing."""
        return time.monotonic() - self.looked_at >= LOOK_EVERY

    @property
    def place_changed(self) -> bool:
        """Whether this member's place is unknown, or one of the two members before it has gone, even if its name is back."""
        return not self._placed or any(self._ledger.create_revision(one.key) != one.create_revision for one in self._before)

    def take_in(self) -> None:
        """Apply what the watch brought."""
        while self._batches:
            self._ledger.apply(self._batches.popleft())

    def load(self) -> None:
        """Read what this member's place needs."""
        self._take(self._read(whole=self.coordinator or self.deputy, before=self._before), whole=self.coordinator or self.deputy)

    def forget(self) -> None:
        """Start anew, as somebody else: nothing seen so far counts (PROTOCOL 4)."""
        self._ledger = Ledger(self._keys)
        self._before = ()
        self._placed = self.coordinator = self.deputy = False
        self.load()

    def find_place(self) -> None:
        """Find out whether this member coordinates, and watch what its place needs. Changes nothing if etcd does not answer all of it."""
        own = self._kv.get(self._own_key)
        if own is None:
            return  # the next round finds the key gone
        before = self._members_before(own.create_revision)
        coordinator, deputy = not before, len(before) == 1
        whole = coordinator or deputy
        listing = self._read(whole=whole, before=before)
        ranges = [WatchRange(key=self._keys.prefix, prefix=True)] if coordinator else [WatchRange(key=key) for key in self._narrow_keys(before)]
        if self._watch:
            self._watch.close()
        self._batches.clear()
        self._watch = self._kv.watch(ranges, listing.revision + 1, self._on_batch)
        if coordinator and not self.coordinator:
            log.info("coordinating")
        self.coordinator, self.deputy, self._before, self._placed = coordinator, deputy, before, True
        self._take(listing, whole=whole)

    def _members_before(self, create_revision: int) -> tuple[KeyValue, ...]:
        """Up to two members that came before, the nearest first. A key without a lease is nobody's: it would stand before us for ever."""
        for limit in (4, 0):
            found = self._kv.list(self._keys.members, created_before=create_revision, newest_first=True, limit=limit, keys_only=True).items
            leased = tuple(item for item in found if item.lease)[:2]
            if len(leased) == 2 or len(found) < limit:
                return leased
        return leased

    def _read(self, *, whole: bool, before: tuple[KeyValue, ...]) -> Listing:
        if whole:
            return self._kv.list(self._keys.prefix)
        # What is known is not sent again: each member looks before each start, and a generation of 1,000 members is 110 KB.
        keys = self._narrow_keys(before)
        return self._kv.get_many(keys, self._ledger.known(keys))

    def _take(self, listing: Listing, *, whole: bool) -> None:
        self._ledger.load(listing)
        self.looked_at = time.monotonic()
        if whole:
            self._listed_revision = listing.revision

    def fetch(self, node: str) -> tuple[KeyValue | None, Keyed[MemberRecord] | None]:
        """One member key, read now; the second is None too if it holds garbage."""
        held = self._kv.get(self._keys.member(node))
        if held is None:
            return None, None
        ledger = Ledger(self._keys)
        ledger.apply(WatchBatch(revision=held.mod_revision, events=(WatchEvent(kind=EventKind.PUT, item=held),)))
        return held, ledger.view().members.get(node)

    def close(self) -> None:
        """End the watch."""
        if self._watch:
            self._watch.close()

    def _narrow_keys(self, before: tuple[KeyValue, ...]) -> list[str]:
        keys = self._keys
        return [keys.generation, keys.proposal, keys.target, keys.checkpoint, self._own_key, *(one.key for one in before)]

    def _on_batch(self, batch: WatchBatch) -> None:
        self._batches.append(batch)
        self._wake()
