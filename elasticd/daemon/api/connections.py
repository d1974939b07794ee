"""Connections of one listener: how many there may be, how long each may take, and who is at the other end.

Owns: accepting, TLS, the deadlines of a connection, and its end. Must not: know paths, or who may what. Runs in one event loop.

uvicorn speaks HTTP here, its server does not: nothing polls, nothing touches signals, and what waits in a handshake counts as a connection too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from elasticd.daemon.api.access import PEERCRED_SIZE, Anybody, Certified, Local, Peer

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

log = structlog.get_logger("elasticd.daemon")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one listener grants. Times in seconds.

    Attributes:
        connections: at one time; more are closed at once.
        handshake: for TLS.
        idle: between two requests.
        request: from the first byte to the last of a request's head, and again of its body; also for the first request of a connection to come.
        answer: for the answer to be made and to be taken.
        head: bytes that a request's head may have.
    """

    connections: int = 200
    handshake: float = 10.0
    idle: int = 5
    request: float = 10.0
    answer: float = 60.0
    head: int = 16 * 1024


def http_config(app: ASGIApp, limits: Limits) -> Config:
    """Uvicorn's configuration: HTTP by h11 alone, nothing believed of proxies, no logging of its own."""
    config = Config(
        app,
        http=H11Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=limits.idle,
        h11_max_incomplete_event_size=limits.head,
    )
    config.load()
    return config


class Connection(H11Protocol):
    """One connection. Tells the application who is at the other end, in `scope["state"]["peer"]`, and ends when a deadline has passed."""

    def __init__(self, config: Config, state: ServerState, limits: Limits, kind: type[Peer], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self._limits = limits
        self._kind = kind
        self._deadline: asyncio.TimerHandle | None = None
        self._stage: tuple[object, bool] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See asyncio."""
        super().connection_made(transport)
        try:
            self.app_state = {"peer": self._who(transport)}
        except OSError:
            transport.abort()  # gone already
        self._arm()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        self._arm()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _who(self, transport: asyncio.Transport) -> Peer:
        if self._kind is Local:
            return Local.of(transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED_SIZE))
        if self._kind is Certified:
            return Certified.of(transport.get_extra_info("peercert"))
        return Anybody()

    def _arm(self) -> None:
        """A deadline for each stage, which more bytes of the same stage do not move."""
        asking = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
        stage = (self.cycle, asking)
        if stage == self._stage:
            return
        self._stage = stage
        if self._deadline:
            self._deadline.cancel()
        # Also of a connection that is being closed: what it has not taken yet would keep it for ever.
        self._deadline = self.loop.call_later(self._limits.request if asking else self._limits.answer, self.transport.abort)


class Listener:
    """Accepts on one bound socket until it is stopped.

    Args:
        name: for the log.
        bound: the socket, listening.
        kind: what is asked of a connection, to know who it is.
        config: from `http_config`.
        limits: what is granted.
        tls: replaced by assignment; connections that are there keep theirs.
    """

    def __init__(self, name: str, bound: socket.socket, kind: type[Peer], config: Config, limits: Limits, *, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._name = name
        self._bound = bound
        self._kind = kind
        self._config = config
        self._limits = limits
        self._state = ServerState()
        self._greeted: set[asyncio.Task[Any]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the running loop."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self, timeout: float) -> None:
        """Accept no more, let answers be finished for `timeout` seconds, then cut."""
        if self._accepting:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._bound.close()
        for task in tuple(self._greeted):
            task.cancel()
        await asyncio.gather(*self._greeted, return_exceptions=True)
        for connection in tuple(self._state.connections):
            with contextlib.suppress(Exception):  # h11 refuses to end what is in the middle of something; that is cut below
                connection.shutdown()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._state.connections and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        for running in tuple(self._state.tasks):
            running.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._bound)
            except OSError as error:
                # Out of file descriptors, mostly: others need those we would take.
                log.warning("not_accepting", listener=self._name, reason=str(error))
                await asyncio.sleep(1.0)
                continue
            if len(self._state.connections) + len(self._greeted) >= self._limits.connections:
                accepted.close()
                continue
            task = loop.create_task(self._greet(accepted))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    async def _greet(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(self._config, self._state, self._limits, self._kind, loop),
                accepted,
                ssl=self.tls,
                ssl_handshake_timeout=self._limits.handshake if self.tls else None,
            )
        except (OSError, TimeoutError) as error:
            log.debug("connection_failed", listener=self._name, reason=str(error))
