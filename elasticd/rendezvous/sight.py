"""What one member sees of its job: reading, watching, and its place in the order of members.

Owns: the ledger and the watch that feeds it. Must not: write to etcd, or decide.

A member's place decides how much it looks at (PROTOCOL 8). The coordinator, the member with the lowest create revision, watches everything.
The others watch five keys, whatever the size of the job: the generation, the proposal, the target, their own key, and that of the member before
them, whose end may make them the coordinator. The deputy, second in the order, lists everything now and then as well.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.kv import EventKind, KeyValue, WatchBatch, WatchEvent, WatchRange
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
        self._predecessor: str | None = None
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
    def predecessor_gone(self) -> bool:
        """Whether the member before this one has gone, so that its place may have changed."""
        return self._predecessor is not None and not any(self._keys.member(node) == self._predecessor for node in self.view.members)

    def take_in(self) -> None:
        """Apply what the watch brought."""
        while self._batches:
            self._ledger.apply(self._batches.popleft())

    def load(self) -> int:
        """Read what this member's place needs; the revision it was read at."""
        if self.coordinator or self.deputy:
            listing = self._kv.list(self._keys.prefix)
            self._listed_revision = listing.revision
        else:
            listing = self._kv.get_many(self._narrow_keys())
        self._ledger.load(listing)
        self.looked_at = time.monotonic()
        return listing.revision

    def forget(self) -> None:
        """Start anew, as somebody else: nothing seen so far counts (PROTOCOL 4)."""
        self._ledger = Ledger(self._keys)
        self._predecessor = None
        self.coordinator = self.deputy = False
        self.load()

    def find_place(self) -> None:
        """Find out whether this member coordinates, and watch what its place needs."""
        own = self._kv.get(self._own_key)
        if own is None:
            return  # the next round finds the key gone
        before = self._kv.list(self._keys.members, created_before=own.create_revision, newest_first=True, limit=2, keys_only=True).items
        if not before and not self.coordinator:
            log.info("coordinating")
        self.coordinator = not before
        self.deputy = len(before) == 1
        self._predecessor = before[0].key if before else None
        revision = self.load()
        if self._watch:
            self._watch.close()
        self._batches.clear()
        self._watch = self._kv.watch(self._ranges(), revision + 1, self._on_batch)

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

    def _narrow_keys(self) -> list[str]:
        keys = self._keys
        return [key for key in (keys.generation, keys.proposal, keys.target, self._own_key, self._predecessor) if key]

    def _ranges(self) -> list[WatchRange]:
        if self.coordinator:
            return [WatchRange(key=self._keys.prefix, prefix=True)]
        return [WatchRange(key=key) for key in self._narrow_keys()]

    def _on_batch(self, batch: WatchBatch) -> None:
        self._batches.append(batch)
        self._wake()
