"""Connections: one etcd3 client per endpoint, made when first needed.

Owns: gRPC options, stubs, byte counts, and making channels anew when certificates change. Must not: retry or choose an endpoint.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from elasticd.kv import _etcd3

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv.certificates import Certificates
    from elasticd.kv.stats import Counters

# A member that lost its leader refuses at once instead of letting the call time out.
METADATA = (("hasleader", "true"),)

_OPTIONS: tuple[tuple[str, int], ...] = (
    # gRPC's default back-off grows to two minutes and outlives a lease.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    # This one is also the time that one attempt to connect may take, TLS handshake included: 200 ms would lock out a slow link for good.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd cuts off whoever pings faster than each 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Otherwise channels to one address share one connection, and a keepalive queues behind a long listing.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class _CountedChannel:
    """Stands in for a grpc.Channel while stubs are made, so that bytes are counted where they are (de)serialised."""

    def __init__(self, channel: Any, counters: Counters) -> None:
        self._channel = channel
        self._counters = counters

    def unary_unary(self, method: str, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]) -> Any:
        return self._channel.unary_unary(method, *self._count(request_serializer, response_deserializer))

    def stream_stream(self, method: str, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]) -> Any:
        return self._channel.stream_stream(method, *self._count(request_serializer, response_deserializer))

    def _count(self, write: Callable[[Any], bytes], read: Callable[[bytes], Any]) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
        counters = self._counters
        return (lambda message: counters.sent(write(message)), lambda payload: read(counters.received(payload)))


class Link:
    """The stubs for one endpoint over one channel."""

    def __init__(self, client: Any, counters: Counters) -> None:
        self._client = client
        counted: Any = _CountedChannel(client.channel, counters)
        self.kv = _etcd3.rpc.KVStub(counted)
        self.lease = _etcd3.rpc.LeaseStub(counted)
        self.watch = _etcd3.rpc.WatchStub(counted)
        self.maintenance = client.maintenancestub
        # One request and one answer over etcd's two-way stream: a keepalive with a deadline and without a thread.
        self.keepalive = counted.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=_etcd3.rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=_etcd3.rpc.LeaseKeepAliveResponse.FromString,
        )

    def close(self) -> None:
        """Cut the connection; calls in flight end as CANCELLED."""
        self._client.close()


class Channels:
    """The links of one user: the client's calls, one lease, or one watch. Thread-safe.

    Args:
        certificates: decides between TLS and plain text, and when links are out of date.
        counters: where bytes are counted.
        grace: seconds that a call in flight may go on over a link that was replaced.
    """

    def __init__(self, certificates: Certificates, counters: Counters, *, grace: float) -> None:
        self._certificates = certificates
        self._counters = counters
        self._grace = grace
        self._lock = threading.Lock()
        self._links: dict[str, tuple[int, Link]] = {}
        self._retired: list[tuple[float, Link]] = []
        self._closed = False

    def link(self, endpoint: str) -> Link:
        """The link to `endpoint`, over the certificates as they are now.

        Raises:
            ValueError: these channels were closed (as grpc itself says it).
            OSError: a certificate file vanished.
        """
        epoch = self._certificates.epoch
        with self._lock:
            if self._closed:
                raise ValueError("closed")
            self._drop_retired()
            made, link = self._links.get(endpoint, (-1, None))
            if link is not None and made == epoch:
                return link
            if link is not None:
                self._retired.append((time.monotonic() + self._grace, link))
            new = self._connect(endpoint)
            self._links[endpoint] = (epoch, new)
            return new

    def close(self) -> None:
        """Cut every link."""
        with self._lock:
            self._closed = True
            links = [link for _, link in self._links.values()] + [link for _, link in self._retired]
            self._links.clear()
            self._retired.clear()
        for link in links:
            link.close()

    def _connect(self, endpoint: str) -> Link:
        host, _, port = endpoint.rpartition(":")
        files = self._certificates.files
        paths = {} if files is None else {"ca_cert": files.cacert, "cert_cert": files.cert, "cert_key": files.key}
        return Link(_etcd3.etcd3.Etcd3Client(host=host, port=port, grpc_options=_OPTIONS, **paths), self._counters)

    def _drop_retired(self) -> None:
        now = time.monotonic()
        for _, link in [old for old in self._retired if old[0] <= now]:
            link.close()
        self._retired = [old for old in self._retired if old[0] > now]


class Borrowed(Channels):
    """Somebody else's links: used, and left open."""

    def __init__(self, lender: Channels) -> None:
        self._lender = lender

    def link(self, endpoint: str) -> Link:
        """As `Channels.link`."""
        return self._lender.link(endpoint)

    def close(self) -> None:
        """Leave them to their owner."""
