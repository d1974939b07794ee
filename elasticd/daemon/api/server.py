"""Three listeners of one application: the unix socket, the plain one and the peers' one, in one thread with an event loop of its own.

Owns: which listener there is, and their beginning and end. Must not: know paths, or who may what.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
from anyio import to_thread

from elasticd.daemon.api.access import Anybody, Certified, Local, Peer
from elasticd.daemon.api.app import make_app
from elasticd.daemon.api.binding import UnixAddress, bind_tcp, peer_tls
from elasticd.daemon.api.connections import Limits, Listener, http_config
from elasticd.daemon.operations import Operations

if TYPE_CHECKING:
    import socket
    import ssl

    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.gpureadings import Gpus
    from elasticd.kv import EtcdKV

_THREADS: Final = 16
"""Requests that may ask etcd or the user database at one time; further ones wait."""

log = structlog.get_logger("elasticd.daemon")


class ApiServer:
    """Serves from `start` to `stop`.

    Args:
        app: the application.
        config: where to listen, and with which certificates.
        limits: what each listener grants.
    """

    def __init__(self, app: ASGIApp, config: DaemonConfig, limits: Limits | None = None) -> None:
        self._app = app
        self._config = config
        self._limits = limits or Limits()
        self._addresses: dict[str, tuple[Any, ...]] = {}
        self._listeners: list[Listener] = []
        self._peers: Listener | None = None
        self._resources = ExitStack()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grace = 0.0
        self._ready = threading.Event()
        self._ending: asyncio.Event | None = None

    @classmethod
    def of(
        cls, config: DaemonConfig, *, kv: EtcdKV, operator_kv: EtcdKV, board: Board, registry: CollectorRegistry, gpus: Gpus, detecting: Detecting | None = None
    ) -> Self:
        """The API of one daemon."""
        return cls(make_app(Operations(kv, operator_kv, config.keys, board), board, config, registry, gpus, detecting), config)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the plain listener, None if there is none."""
        return self._address("metrics")

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """Host and port of the peers' listener, None if there is none."""
        return self._address("peer")

    def start(self) -> None:
        """Bind everything, and serve.

        Raises:
            UsageError: something cannot be bound or a certificate is not usable; the message names it, and nothing is served.
        """
        config = self._config
        with ExitStack() as stack:
            unix = UnixAddress(config.socket)
            stack.callback(unix.close)
            listeners = [self._listener("socket", unix.socket, Local)]
            if config.metrics.listen:
                listeners.append(self._listener("metrics", stack.enter_context(bind_tcp("metrics.listen", config.metrics.listen)), Anybody))
            peers = None
            if config.peer.listen:
                tls = peer_tls(config.peer)
                peers = self._listener("peer", stack.enter_context(bind_tcp("peer.listen", config.peer.listen)), Certified, tls)
                listeners.append(peers)
            self._resources = stack.pop_all()
        self._listeners, self._peers = listeners, peers
        self._thread = threading.Thread(target=self._run, name="elasticd-api", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self, timeout: float) -> None:
        """Accept no more, let answers be finished for `timeout` seconds, then cut them. More than once does no harm."""
        if self._thread and self._loop and self._ending:
            self._grace = timeout
            try:
                self._loop.call_soon_threadsafe(self._ending.set)
            except RuntimeError:
                pass  # the loop has ended
            self._thread.join(timeout + 5.0)
        self._resources.close()

    def reload_certificates(self) -> None:
        """Take the peer listener's files as they are now, for connections to come.

        Raises:
            UsageError: they are not usable; what was in use stays in use.
        """
        if self._peers:
            self._peers.tls = peer_tls(self._config.peer)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.set()  # also if it could not begin: whoever waits must not wait for ever

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_log_failure)
        self._ending = asyncio.Event()
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        for listener in self._listeners:
            listener.start()
        self._ready.set()
        await self._ending.wait()
        await asyncio.gather(*(listener.stop(self._grace) for listener in self._listeners))

    def _listener(self, name: str, bound: socket.socket, kind: type[Peer], tls: ssl.SSLContext | None = None) -> Listener:
        self._addresses[name] = bound.getsockname() if name != "socket" else ()
        return Listener(name, bound, kind, http_config(self._app, self._limits), self._limits, tls=tls)

    def _address(self, name: str) -> tuple[str, int] | None:
        address = self._addresses.get(name)
        return (str(address[0]), int(address[1])) if address else None


def _log_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.warning("connection_fault", reason=str(context.get("exception") or context.get("message")))
