"""The committed checkpoint: which one it is as far as this node knows, and making another one that.

Owns: the reads and the transaction of one commit, by any thread. Must not: decide what is worth a commit, or touch the membership's loop: its
view may be old, and a thread that writes to disk must not look like a loop that turns.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.errors import KVClosedError
from elasticd.rendezvous import transitions
from elasticd.rendezvous.records import RequestKind
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import JobKeys
    from elasticd.rendezvous.records import CheckpointRecord, GenerationRecord

log = structlog.get_logger("elasticd.rendezvous")

TRIES: Final = 5
"""Transactions that one commit sends at most: another writer of these two keys is rare, and may well have changed nothing that counts."""


class Commits:
    """See the module. Thread-safe."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._kv: EtcdKV | None = None
        self._lock = threading.Lock()
        self._newest: CheckpointRecord | None = None
        self._as_of = -1

    def open(self, kv: EtcdKV) -> None:
        """Use this client from now on, and read what is committed.

        Raises:
            KVError: etcd cannot be reached.
        """
        self._kv = kv
        self._look()

    @property
    def newest(self) -> CheckpointRecord | None:
        """As last seen or read."""
        with self._lock:
            return self._newest

    def note(self, view: View) -> None:
        """What a view says of it, unless something newer is known."""
        with self._lock:
            if view.revision >= self._as_of:
                self._as_of = view.revision
                self._newest = view.checkpoint.record if view.checkpoint else None

    def active(self) -> GenerationRecord | None:
        """The generation that is active now; None if none is.

        Raises:
            KVError: etcd cannot be reached.
        """
        return self._look().active

    def commit(self, record: CheckpointRecord) -> bool:
        """See `Member.commit`."""
        for _ in range(TRIES):
            view = self._look()
            known = view.checkpoint.record if view.checkpoint else None
            if known and (known.order, known.digest) == (record.order, record.digest):
                return True
            try:
                txn = transitions.commit(self._keys, view, record)
            except ValueError as error:
                log.warning("not_committed", generation=record.generation, step=record.step, why=str(error))
                return False
            if self._client().txn(txn.compares, txn.ops).succeeded:
                self._look()
                log.info("committed", generation=record.generation, step=record.step, holders=list(record.holders), shared=record.shared)
                return True
        log.warning("not_committed", generation=record.generation, step=record.step, why="generation or checkpoint change all the time")
        return False

    def _look(self) -> View:
        """The generation, the checkpoint, and what may not be committed, at one revision, now."""
        keys = self._keys
        ledger = Ledger(keys)
        ledger.load(self._client().get_many([keys.generation, keys.checkpoint, keys.policy, keys.request(RequestKind.ROLLBACK.value)]))
        view = ledger.view()
        self.note(view)
        return view

    def _client(self) -> EtcdKV:
        if self._kv is None:
            raise KVClosedError("commit: this member is not connected")
        return self._kv
