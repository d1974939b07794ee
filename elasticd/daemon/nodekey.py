"""This node's own key in etcd: taken, kept under a lease, written when what it says changes.

Owns: the lease of the daemon. Must not: decide what the key says.

One daemon a node holds the lock in the run directory, so a key of the same boot is a dead predecessor's, and is replaced. A key of another boot or
machine is never taken over: it lapses, or two machines bear one name, and then a person has to be told.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import structlog

from elasticd.errors import KVUnavailableError, LeaseLostError, RecordError
from elasticd.kv.types import Compare, Delete, KeyValue, Put, Target
from elasticd.rendezvous.records import NodeRecord, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv import EtcdKV, Lease
    from elasticd.rendezvous.keys import ClusterKeys

log = structlog.get_logger("elasticd.daemon")


class NodeKey:
    """See the module. Used by the loop's thread alone.

    Args:
        ttl: seconds of the lease.
        may_renew: asked before every renewal: a stuck loop loses the key.
        wake: called when the lease is lost, or etcd comes or goes.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, node: str, *, ttl: float, may_renew: Callable[[], bool], wake: Callable[[], None]) -> None:
        self._kv = kv
        self._keys = keys
        self._key = keys.node(node)
        self._ttl = ttl
        self._may_renew = may_renew
        self._wake = wake
        self._lease: Lease | None = None
        self.problem = ""

    @property
    def reachable(self) -> bool:
        """Whether the last renewals were answered."""
        return self._lease is None or self._lease.reachable

    def keep(self, seen: KeyValue | None, record: NodeRecord) -> bool:
        """See that the key is ours and says `record`.

        Args:
            seen: the key as it was just read.

        Returns:
            Whether it is ours now.

        Raises:
            KVError: etcd does not answer, or refuses.
        """
        self.problem = ""
        if self._mine(seen, record):
            assert seen is not None
            return seen.value == record.to_bytes() or self._put(record, Compare(key=self._key, target=Target.MOD, op="==", value=seen.mod_revision))
        if seen is not None and not self._may_replace(seen, record):
            return False
        if seen is not None:
            self._kv.txn((Compare(key=self._key, target=Target.MOD, op="==", value=seen.mod_revision),), (Delete(key=self._key),))
        done = self._put(record, Compare(key=self._key, target=Target.CREATE, op="==", value=0))
        if done:
            log.info("node_registered", incarnation=record.incarnation, replaced=seen is not None)
        return done

    def close(self) -> None:
        """Give the key away with its lease, if etcd can still be told."""
        if self._lease:
            self._lease.revoke()

    def _mine(self, seen: KeyValue | None, record: NodeRecord) -> bool:
        if seen is None or self._lease is None or self._lease.lost or seen.lease != self._lease.id:
            return False
        old = self._parsed(seen)
        return old is None or old.incarnation == record.incarnation

    def _may_replace(self, seen: KeyValue, record: NodeRecord) -> bool:
        old = self._parsed(seen)
        if old is None or old.boot_id == record.boot_id:
            return True
        self.problem = f"node {record.node!r} is registered by another machine or boot ({old.address}); waiting for the end of its lease"
        return False

    def _parsed(self, seen: KeyValue) -> NodeRecord | None:
        try:
            return parse(NodeRecord, seen.key, seen.value, self._keys.scope)
        except RecordError:
            return None

    def _put(self, record: NodeRecord, compare: Compare) -> bool:
        try:
            lease = self._live_lease()
            return self._kv.txn((compare,), (Put(key=self._key, value=record.to_bytes(), lease=lease.id),)).succeeded
        except LeaseLostError:
            self._lease = None
            raise KVUnavailableError("the node's lease was lost while its key was written") from None

    def _live_lease(self) -> Lease:
        if self._lease is None or self._lease.lost:
            if self._lease is not None:
                log.warning("node_lease_lost", silent_for=round(time.clock_gettime(time.CLOCK_BOOTTIME) - self._lease.last_renewed, 1))
                self._lease.stop()
            self._lease = self._kv.lease(self._ttl)
            self._lease.start(self._may_renew, self._wake)
        return self._lease


def incarnation() -> str:
    """A random id for one start of a daemon."""
    return os.urandom(8).hex()
