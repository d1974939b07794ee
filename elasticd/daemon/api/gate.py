"""What each request must pass before the application sees it, whatever path it asks for.

Owns: that nobody is served who may not be, that the plain listener serves nothing but health and metrics, that no body is larger than it may be, and that
a fault of ours is logged and shows nothing of itself. Must not: know who may what (`access`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from anyio import CapacityLimiter, to_thread

from elasticd.daemon.api import answers
from elasticd.daemon.api.access import Access, Anybody
from elasticd.errors import AccessDeniedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elasticd.daemon.api.access import Peer
    from elasticd.daemon.audit import Caller

PUBLIC: Final = frozenset(("/healthz", "/livez", "/readyz", "/metrics"))
BODY_MAX: Final = 64 * 1024
"""Largest body of a request, in bytes."""
_ADMITTING: Final = 8
"""Requests whose caller may be looked up at one time: threads of their own, so that an etcd that hangs does not keep people from health."""
_READING: Final = frozenset(("GET", "HEAD", "OPTIONS"))

log = structlog.get_logger("elasticd.daemon")


class _GoneError(Exception):
    """Whoever asked is not there any more."""


class Gate:
    """ASGI middleware, around everything.

    Args:
        app: what is behind the gate.
        access: who may what.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._admitting = CapacityLimiter(_ADMITTING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The connection has put who asks into `scope["state"]["peer"]`; the caller, once admitted, goes into `state` too."""
        if scope["type"] != "http":
            return
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = began or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._pass(scope, receive, watched)
        except _GoneError:
            return  # part of a request is none
        except Exception:
            log.exception("request_failed", method=scope["method"], path=scope["path"][:200])
            if not began:
                await answers.error(500, "internal", "a fault of the daemon's", "its log has it")(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer: Peer = scope["state"]["peer"]
        if isinstance(peer, Anybody):
            if scope["path"] not in PUBLIC:
                await answers.error(404, "not_running", f"there is no path {scope['path'][:200]!r} on this listener")(scope, receive, send)
                return
        else:
            try:
                scope["state"]["caller"] = await self._admit(scope, peer)
            except AccessDeniedError as error:
                log.warning("denied", method=scope["method"], path=scope["path"][:200], reason=error.message)
                await answers.error(403, "permission", error.message, error.remedy)(scope, receive, send)
                return
        body = await _body(scope, receive)
        if body is None:
            await answers.error(400, "usage", f"the body is larger than {BODY_MAX} bytes")(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _admit(self, scope: Scope, peer: Peer) -> Caller:
        change = scope["method"] not in _READING
        if change and any(name == b"origin" for name, _ in scope["headers"]):
            # A browser that holds a certificate would send it along with what a page of another site asks for.
            raise AccessDeniedError("this API is not for pages in a browser")
        return await to_thread.run_sync(lambda: self._access.admit(peer, change=change), limiter=self._admitting)


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None if it is too large.

    Raises:
        _GoneError: the other side hung up before all of it was there.
    """
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not told.isdigit() or int(told[:20]) > BODY_MAX:
        return None
    pieces = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        pieces += message.get("body", b"")
        if len(pieces) > BODY_MAX:
            return None
        if not message.get("more_body", False):
            return bytes(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more for the application, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
