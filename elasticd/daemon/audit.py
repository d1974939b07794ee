"""Who changed what: a line in the log, and a record in etcd's ring.

Owns: who a caller is, and where the next record of the ring goes. Must not: decide who may do what, or fail a change that is made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.errors import ConflictError, ElasticdError
from elasticd.kv.types import Compare, Put, Target
from elasticd.rendezvous.records import TEXT_MAX, AuditRecord

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import ClusterKeys

SLOTS: Final = 256
_ATTEMPTS: Final = 8
"""Races for a slot that may be lost: each is lost to somebody who wrote one, so they end."""

log = structlog.get_logger("elasticd.daemon")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks, as the kernel or a certificate says.

    Attributes:
        name: the user's name, or the certificate's Common Name.
        common_name: None on the unix socket; there, uid, gid and pid are known.
        may_change: whether changes are allowed, or reading alone.
    """

    name: str
    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    common_name: str | None = None
    may_change: bool = False

    def __str__(self) -> str:
        if self.common_name is not None:
            return f"certificate {self.common_name[:200]}"
        return f"{self.name[:200]} (uid {self.uid}, pid {self.pid})"


class Audit:
    """Keeps the records. Thread-safe.

    Args:
        kv: the connection that may write what is operators'.
        keys: the cluster.
        node: this one.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, node: str) -> None:
        self._kv = kv
        self._keys = keys
        self._node = node

    def done(self, caller: Caller, action: str, subject: str, detail: str) -> None:
        """A change was made. That its record cannot be kept is logged, and does not undo it."""
        self._say(caller, action, subject, detail, "done")
        record = AuditRecord(scope=self._keys.scope, at=time.time(), node=self._node, by=str(caller), action=action, subject=subject, detail=detail[:TEXT_MAX])
        try:
            self._keep(record)
        except ElasticdError as error:
            log.error("audit_not_kept", action=action, subject=subject, by=str(caller), reason=str(error))  # noqa: TRY400 - etcd's fault, not the code's

    def unsure(self, caller: Caller, action: str, subject: str) -> None:
        """A change was sent to etcd, and no answer came."""
        self._say(caller, action, subject, "", "not known: etcd did not answer")

    def _say(self, caller: Caller, action: str, subject: str, detail: str, outcome: str) -> None:
        who = {"by": caller.name, "uid": caller.uid, "pid": caller.pid, "common_name": caller.common_name}
        log.info("audit", action=action, subject=subject, detail=detail, outcome=outcome, **who)

    def _keep(self, record: AuditRecord) -> None:
        for _ in range(_ATTEMPTS):
            key, seen = self._oldest()
            compare = Compare(key=key, target=Target.MOD, op="==", value=seen)
            if self._kv.txn((compare,), (Put(key=key, value=record.to_bytes()),)).succeeded:
                return
        raise ConflictError("others took each slot first")

    def _oldest(self) -> tuple[str, int]:
        """The slot to write next, and its mod revision. There is no counter, which would be a key that everybody writes."""
        known = {item.key: item.mod_revision for item in self._kv.list(self._keys.audit, keys_only=True).items}
        key = min((f"{self._keys.audit}{slot:03d}" for slot in range(SLOTS)), key=lambda slot: known.get(slot, 0))
        return key, known.get(key, 0)
