"""The client that the rest of elasticd talks to.

Owns: what each operation asks of etcd, and when a write may be sent again. Must not: know jobs, nodes or keys by name.

A write that timed out is ambiguous: it may have happened, or happen still. Only a transaction with comparisons is sent again, and then a failed
comparison is read back in the same transaction: if every key holds exactly what was to be written, an earlier attempt did it. Hence two duties of
callers: values are unique to the write (a number, an incarnation), and what is written makes its own comparison fail (compare the key you put).
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Self

import structlog

from elasticd.errors import KVUnavailableError, UsageError
from elasticd.kv import _etcd3, messages
from elasticd.kv.calls import Caller
from elasticd.kv.certificates import Certificates
from elasticd.kv.channels import METADATA, Borrowed, Channels, Link
from elasticd.kv.lease import Lease, boottime
from elasticd.kv.ring import Ring
from elasticd.kv.stats import Counters
from elasticd.kv.types import Compare, KeyValue, KVConfig, KVStats, Listing, Op, Target, TxnResult, WatchBatch, WatchRange
from elasticd.kv.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticd.kv.outcomes import Failure

_log = structlog.get_logger("elasticd.kv")


class EtcdKV:
    """A client of one etcd cluster. Thread-safe; a context manager.

    Reads are linearizable. Every method raises a `KVError` below: KVUnavailableError after 2 x `call_timeout`, KVPermissionError, KVInvalidError,
    LeaseLostError for a write under a lease that is gone, KVClosedError.

    Args:
        config: endpoints, TLS files and the seconds that one attempt may take.

    Raises:
        UsageError: an endpoint is not "host:port", a TLS file is unusable, or protobuf was imported first in the wrong way.
    """

    def __init__(self, config: KVConfig) -> None:
        _check_endpoints(config)
        _etcd3.load()
        self.config = config
        self._counters = Counters()
        self._ring = Ring(config.endpoints, on_switch=self._switched)
        self._certificates = Certificates(config.tls, on_change=self._ring.announce)
        self._lender: Channels | None = None
        self._lender = self._channels()
        self._caller = Caller(self._ring, self._lender, self._counters, timeout=config.call_timeout, tls=config.tls is not None)
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._watches: list[Watch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def get(self, key: str) -> KeyValue | None:
        """One key, or None."""
        request = _etcd3.rpc.RangeRequest(**messages.span(key, prefix=False))
        answer = self._range("get", request)
        return messages.key_value(answer.kvs[0]) if answer.kvs else None

    def list(
        self,
        prefix: str,
        *,
        keys_only: bool = False,
        limit: int = 0,
        newest_first: bool = False,
        created_before: int | None = None,
    ) -> Listing:
        """Every key under `prefix` at one revision.

        Args:
            prefix: "" lists the whole store.
            keys_only: leave values empty.
            limit: at most so many, in the order asked for; 0 for all.
            newest_first: by create revision, falling, instead of by key.
            created_before: only keys with a create revision below this one.
        """
        request = _etcd3.rpc.RangeRequest(keys_only=keys_only, limit=limit, **messages.span(prefix, prefix=True))
        if newest_first:
            request.sort_order = _etcd3.rpc.RangeRequest.DESCEND
            request.sort_target = _etcd3.rpc.RangeRequest.CREATE
        if created_before is not None:
            # 0 would mean "no bound"; no key has revision 1, for an empty store is at it.
            request.max_create_revision = max(1, created_before - 1)
        answer = self._range("list", request)
        return Listing(revision=answer.header.revision, items=tuple(messages.key_value(item) for item in answer.kvs))

    def get_many(self, keys: Sequence[str], known: Mapping[str, int] | None = None) -> Listing:
        """Those of `keys` that exist, all at one revision.

        Args:
            known: the mod revision of each of `keys` as the caller knows it, 0 for one that does not exist. If all still hold, only that is
                said: the listing is empty and `unchanged`.
        """
        compares = [Compare(key=key, target=Target.MOD, op="==", value=known[key]) for key in keys] if known is not None else []
        reads = [messages.read(key) for key in keys]
        if compares:
            request = _etcd3.rpc.TxnRequest(compare=[messages.compare(one) for one in compares], failure=reads)
        else:
            request = _etcd3.rpc.TxnRequest(success=reads)
        answer = self._caller.call("get_many", lambda link, timeout: link.kv.Txn(request, timeout=timeout, metadata=METADATA))
        found = [messages.key_value(item) for one in answer.responses for item in one.response_range.kvs]
        return Listing(revision=answer.header.revision, items=tuple(found), unchanged=bool(compares) and answer.succeeded)

    def txn(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        """Do all `ops` if all `compares` hold, else nothing. See the module for what is sent again.

        Raises:
            KVInvalidError: over 128 comparisons and operations together, a value over 1 MiB, a key written twice.
            LeaseLostError: a put names a lease that is gone.
            KVUnavailableError: no endpoint answered, and the transaction may have happened, or happen still.
        """
        messages.check_size(compares, ops)
        request = _etcd3.rpc.TxnRequest(compare=[messages.compare(one) for one in compares], success=[messages.operation(op) for op in ops])
        unsure = False

        def send(link: Link, timeout: float) -> Any:
            return link.kv.Txn(request, timeout=timeout, metadata=METADATA)

        def again(failure: Failure) -> bool:
            nonlocal unsure
            if failure.maybe_done and not unsure:
                unsure = True
                # Reading needs permission even where it does not happen, so it is asked for only now.
                request.failure.extend(messages.read(op.key) for op in ops)
            return not unsure or bool(compares)

        answer = self._caller.call("txn", send, again=again)
        succeeded = bool(answer.succeeded)
        if not succeeded and unsure and ops:
            succeeded = all(messages.holds(op, found.response_range.kvs) for op, found in zip(ops, answer.responses, strict=True))
        return TxnResult(succeeded=succeeded, revision=answer.header.revision)

    def lease(self, ttl: float) -> Lease:
        """Grant a lease. It renews nothing before its `start`.

        Args:
            ttl: seconds, rounded up to whole ones; etcd grants 2 at least.
        """
        request = _etcd3.rpc.LeaseGrantRequest(TTL=math.ceil(ttl))

        def send(link: Link, timeout: float) -> tuple[float, Any]:
            sent = boottime()
            return sent, link.lease.LeaseGrant(request, timeout=timeout, metadata=METADATA)

        # Sent again freely: a grant whose answer was lost holds no key and lapses.
        sent, answer = self._caller.call("lease_grant", send)
        lease = Lease(
            lease_id=answer.ID,
            ttl=float(answer.TTL),
            granted_at=sent,
            ring=self._ring,
            channels=self._channels(),
            counters=self._counters,
            config=self.config,
        )
        with self._lock:
            self._leases = [one for one in self._leases if not one.stopped] + [lease]
        return lease

    def watch(self, ranges: Sequence[WatchRange], start_revision: int, on_batch: Callable[[WatchBatch], None]) -> Watch:
        """Follow the changes of `ranges` from `start_revision` on (a listing's revision + 1).

        Args:
            ranges: they must not overlap, else a change arrives once for each.
            start_revision: the first revision of interest, at least 1.
            on_batch: called on the watch's own thread, in order; what it raises is logged.

        Raises:
            KVClosedError: this client was closed. All else is retried, and shown by `Watch.error`.
        """
        self._caller.check_open("watch")
        watch = Watch(
            ranges=ranges,
            start_revision=start_revision,
            on_batch=on_batch,
            ring=self._ring,
            channels=self._channels(),
            counters=self._counters,
            config=self.config,
        )
        with self._lock:
            self._watches = [one for one in self._watches if not one.closed] + [watch]
        return watch

    def reload(self) -> None:
        """Read the certificates again and make every channel anew.

        Raises:
            UsageError: the files are not usable; what was in use stays in use.
        """
        self._certificates.reload()

    def check(self, prefix: str = "") -> None:
        """See once that an endpoint answers, has a leader, and lets us read.

        Args:
            prefix: where to try a read of one key; "" tries none.

        Raises:
            KVUnavailableError: names each endpoint and why it did not serve.
            KVPermissionError: reading under `prefix` is not allowed.
        """
        request = _etcd3.rpc.StatusRequest()
        answer = self._caller.call("check", lambda link, timeout: link.maintenance.Status(request, timeout=timeout, metadata=METADATA))
        if answer.leader == 0:
            raise KVUnavailableError(f"check: {self._ring.current} has no leader (quorum lost?)")
        if prefix:
            self.list(prefix, keys_only=True, limit=1)

    @property
    def stats(self) -> KVStats:
        """Counters since this client was made, its leases and watches included."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Stop the watches and leases made here (without revoking) and cut every connection. Calls in flight raise KVClosedError."""
        self._caller.close()
        with self._lock:
            watches, leases = self._watches, self._leases
        for watch in watches:
            watch.close()
        for lease in leases:
            lease.stop()

    def _range(self, operation: str, request: Any) -> Any:
        return self._caller.call(operation, lambda link, timeout: link.kv.Range(request, timeout=timeout, metadata=METADATA))

    def _channels(self) -> Channels:
        if self._lender is not None and self.config.one_connection:
            return Borrowed(self._lender)
        return Channels(self._certificates, self._counters, grace=2 * self.config.call_timeout + 1)

    def _switched(self, old: str, new: str) -> None:
        self._counters.add("endpoint_switches")
        _log.debug("endpoint_switched", old=old, new=new)


def _check_endpoints(config: KVConfig) -> None:
    if not config.endpoints:
        raise UsageError("no etcd endpoint was given", remedy='name at least one as "host:port"')
    for endpoint in config.endpoints:
        host, colon, port = endpoint.rpartition(":")
        if not (colon and host and port.isdigit() and "/" not in host):
            raise UsageError(f"etcd endpoint {endpoint!r} is not of the form host:port", remedy="leave out the scheme; TLS is on when cacert is given")
    if not config.call_timeout > 0:
        raise UsageError(f"call_timeout must be above 0 seconds, not {config.call_timeout}")


__all__ = ["EtcdKV"]
