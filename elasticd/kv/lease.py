"""A lease and the thread that keeps it alive.

Owns: when to renew, and whether etcd still honours the lease. Must not: decide what its loss means; it only tells.

The thread has its own channel: a keepalive must not queue behind a listing. It renews only while its owner says that the owner's loop is alive
(PROTOCOL 6), so that a hung agent loses its keys.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

from elasticd.errors import KVError, LeaseLostError
from elasticd.kv import _etcd3
from elasticd.kv.calls import SHORTEST, Caller, Pauses, failure_of
from elasticd.kv.channels import METADATA, Channels
from elasticd.kv.outcomes import Code

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv.ring import Ring
    from elasticd.kv.stats import Counters
    from elasticd.kv.types import KVConfig

_CONFIRM_AFTER = 0.1  # seconds between two answers of TTL 0
_JOIN = 2.0  # seconds to wait for the thread

_log = structlog.get_logger("elasticd.kv")


def boottime() -> float:
    """Seconds since boot, suspension included: the clock of `Lease.last_renewed`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A granted lease; made by `EtcdKV.lease`.

    Attributes:
        id: etcd's number for it, for `Put.lease`.
        ttl: seconds that etcd granted (2 at least).
    """

    def __init__(
        self,
        *,
        lease_id: int,
        ttl: float,
        granted_at: float,
        ring: Ring,
        channels: Channels,
        counters: Counters,
        config: KVConfig,
    ) -> None:
        self.id = lease_id
        self.ttl = ttl
        self._period = ttl / 3
        self._last_renewed = granted_at
        self._lost = False
        self._reachable = True
        self._ring = ring
        self._channels = channels
        self._counters = counters
        self._config = config
        self._caller = Caller(ring, channels, counters, timeout=config.call_timeout, tls=config.tls is not None)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def last_renewed(self) -> float:
        """CLOCK_BOOTTIME seconds at the sending of the last keepalive that etcd honoured; of the grant at first."""
        return self._last_renewed

    @property
    def lost(self) -> bool:
        """Whether etcd said that the lease is gone. It stays so."""
        return self._lost

    @property
    def reachable(self) -> bool:
        """False once a whole third of the TTL of tries brought no renewal, until one does."""
        return self._reachable

    @property
    def stopped(self) -> bool:
        """Whether `stop` or `revoke` was called."""
        return self._stop.is_set()

    def start(self, may_renew: Callable[[], bool], on_change: Callable[[], None]) -> None:
        """Renew each third of the TTL on a thread of its own.

        Args:
            may_renew: asked before each renewal; while false, none is sent. It must not block.
            on_change: called on that thread when `lost` or `reachable` changed.

        Raises:
            RuntimeError: started twice.
        """
        if self._thread is not None:
            raise RuntimeError("this lease was started before")
        self._on_change = on_change
        self._thread = threading.Thread(target=self._run, args=(may_renew,), name=f"lease-{self.id:x}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more; the lease lapses by itself."""
        self._stop.set()
        self._caller.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def revoke(self) -> None:
        """Stop, and ask etcd to drop the lease and its keys now. Gives up after `call_timeout` seconds, without an error: it lapses anyway."""
        self._stop.set()
        request = _etcd3.rpc.LeaseRevokeRequest(ID=self.id)
        try:
            self._caller.call(
                "lease_revoke",
                lambda link, timeout: link.lease.LeaseRevoke(request, timeout=timeout, metadata=METADATA),
                budget=self._config.call_timeout,
            )
        except KVError as error:
            _log.info("lease_not_revoked", lease=f"{self.id:x}", error=str(error))
        self.stop()

    def _run(self, may_renew: Callable[[], bool]) -> None:
        due = time.monotonic() + self._period
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            due = now + self._period
            if not _permitted(may_renew):
                continue
            self._set_reachable(self._renew(until=due))
            if self._lost:
                _log.error("lease_lost", lease=f"{self.id:x}")
                self._tell()
                return

    def _renew(self, *, until: float) -> bool:
        """Whether etcd answered before `until`."""
        pauses = Pauses(0.05, max(0.05, min(0.4, self._period / 4)))
        tried = 0
        while not self._stop.is_set() and (left := until - time.monotonic()) >= SHORTEST:
            # A silent endpoint must leave the others their time within this third, or who talks to it takes itself for cut off.
            share = left / (len(self._ring) - tried % len(self._ring))
            ttl = self._send(min(max(share, SHORTEST), self._config.call_timeout))
            if ttl is not None and ttl > 0:
                return True
            if ttl is not None:
                # A member that just became leader may not have applied the grant yet: one "gone" is not proof.
                if self._stop.wait(_CONFIRM_AFTER):
                    return True
                if self._send(self._period) == 0:
                    self._lost = True
                    return True
                continue
            tried += 1
            if tried % len(self._ring) == 0:
                self._stop.wait(pauses.take())
        return False

    def _send(self, timeout: float) -> int | None:
        """The TTL that one keepalive got, or None without an answer."""
        endpoint = self._ring.current
        sent = boottime()
        self._counters.add("keepalives")
        try:
            answer = self._channels.link(endpoint).keepalive(_etcd3.rpc.LeaseKeepAliveRequest(ID=self.id), timeout=timeout, metadata=METADATA)
        except Exception as error:  # whatever it is, the next try may bring the renewal
            return None if self._stop.is_set() else self._unanswered(endpoint, error, boottime() - sent)
        self._counters.ended(Code.OK, boottime() - sent)
        self._ring.worked(endpoint)
        if answer.TTL > 0:
            self._last_renewed = sent
        return max(0, int(answer.TTL))

    def _unanswered(self, endpoint: str, error: Exception, seconds: float) -> int | None:
        failure = failure_of(error, tls=self._config.tls is not None)
        self._counters.ended(failure.code, seconds)
        if failure.error is LeaseLostError:
            return 0
        self._counters.add("failures")
        _log.debug("keepalive_failed", endpoint=endpoint, cause=failure.cause)
        if failure.moves:
            self._ring.failed(endpoint)
        return None

    def _set_reachable(self, reachable: bool) -> None:
        if self._stop.is_set() or reachable == self._reachable:
            return
        self._reachable = reachable
        _log.warning("etcd_reachable" if reachable else "etcd_unreachable", lease=f"{self.id:x}")
        self._tell()

    def _tell(self) -> None:
        try:
            self._on_change()
        except Exception:
            _log.exception("lease_listener_failed", lease=f"{self.id:x}")


def _permitted(may_renew: Callable[[], bool]) -> bool:
    try:
        return may_renew()
    except Exception:
        _log.exception("may_renew_failed")
        return False
