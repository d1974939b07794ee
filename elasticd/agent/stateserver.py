"""Serves the states of this node to the agents of other nodes, and hears what they say about theirs.

Owns: the listening socket, one thread for each caller, and who is known to have which state. Must not: know where states lie (one callback reads
them), or believe anybody: a caller costs a thread and a few seconds at most, and a reader that is too slow is hung up on.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.agent.statewire import NAME, QUESTION_TIME, STALL_TIME, Lines, TransferError, is_node, is_number, patience, say, secured, speaks_tls
from elasticd.errors import ElasticdError
from elasticd.rendezvous.peers import bind
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticd.kv.types import TLSFiles

log = structlog.get_logger("elasticd.agent.transfer")

MAX_CALLERS: Final = 32
"""Connections that are served at a time; further ones are hung up on, and may call again."""
MAX_KNOWN: Final = 64
"""Digests of which it is remembered who has them."""
_PIECE: Final = 4 * 1024 * 1024


class _RefusedError(Exception):
    """What was asked cannot be answered; for the asker to know."""


class StateServer:
    """Serves this node's states of one job, from its making until `close`.

    Args:
        address: where to listen.
        scope: of the job; whoever asks for another is refused.
        read: given a digest, the header and the image of that state, which must not change while the context lasts. It is called in a thread
            of its own for each caller, and raises an error of either tree, OSError or LookupError where there is no such state.
        tls: certificates; None, or without one of this node's, plain text is spoken with everybody.
        holds: called with (generation, step, digest, node) when a node says that it has written a checkpoint.
        port: 0 for a free one.
        accept: whether the owner of a certificate with this Common Name may ask.

    Raises:
        UsageError: the address or port cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        scope: str,
        read: Callable[[str], AbstractContextManager[tuple[bytes, memoryview]]],
        tls: TLSFiles | None = None,
        holds: Callable[[int, int, str, str], None] | None = None,
        port: int = 0,
        accept: Callable[[str], bool] = is_node,
    ) -> None:
        self._scope, self._read, self._tls, self._holds, self._accept = scope, read, tls, holds, accept
        self._lock = threading.Lock()
        self._have: dict[str, set[str]] = {}
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._closing = False
        self._listener = bind(address, port)
        self._port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="elasticd-states", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    def served(self, digest: str) -> frozenset[str]:
        """Nodes that are known to have this state: they fetched it here, whole, or said that they have it."""
        with self._lock:
            return frozenset(self._have.get(digest, ()))

    def close(self) -> None:
        """Hang up on everybody. May be called again."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(timeout=2.0)
        self._listener.close()
        with self._lock:
            callers = list(self._callers)
            for sock in self._callers.values():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in callers:
            thread.join(timeout=2.0)

    # --- callers ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                sock, where = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("no_caller_taken", error=str(error))
                    time.sleep(0.1)  # out of descriptors, say: it would spin
                continue
            thread = threading.Thread(target=self._serve, args=(sock, str(where[0])), name="elasticd-state-caller", daemon=True)
            if self._take_on(thread, sock):
                thread.start()
            else:
                sock.close()

    def _take_on(self, thread: threading.Thread, sock: socket.socket) -> bool:
        with self._lock:
            if len(self._callers) >= MAX_CALLERS or self._closing:
                return False
            try:
                self._callers[thread] = sock.dup()  # to hang up by: TLS takes the other one for itself
            except OSError:
                return False
            return True

    def _serve(self, sock: socket.socket, where: str) -> None:
        try:
            sock.settimeout(QUESTION_TIME)
            sock, name = secured(sock, self._tls, ssl.PROTOCOL_TLS_SERVER)
            self._answer(sock, "" if not speaks_tls(self._tls) or self._accept(name) else f"the certificate of {name!r} is no node's")
        except (ElasticdError, OSError, ValueError) as error:  # ValueError: closed meanwhile, under TLS
            if not self._closing:
                log.warning("caller_failed", caller=where, error=str(error) or type(error).__name__)
        except Exception:  # whatever a caller makes us do, the others are served
            log.exception("caller_failed", caller=where)
        finally:
            sock.close()
            with self._lock:
                self._callers.pop(threading.current_thread()).close()

    def _answer(self, sock: socket.socket, stranger: str) -> None:
        lines = Lines(sock)
        question = lines.read(QUESTION_TIME)  # also of a stranger, who would not hear why if it were left unread
        try:
            if stranger:
                raise _RefusedError(stranger)
            if question.get("scope") != self._scope:
                raise _RefusedError(f"states of {self._scope!r} are served here")
            if "holds" in question:
                self._note_holds(question["holds"])
            elif "has" in question:
                self._note_has(_digest(question["has"]), _node(question))
            else:
                self._give(sock, lines, _digest(question.get("digest")), _node(question))
                return
        except _RefusedError as refused:
            log.warning("caller_refused", why=str(refused))
            say(sock, {"error": str(refused)[:1000]})
            return
        say(sock, {"ok": True})

    def _note_holds(self, value: Any) -> None:
        if not isinstance(value, dict) or not (is_number(value.get("generation")) and is_number(value.get("step"))):
            raise _RefusedError("a message that names no generation and step")
        digest, node = _digest(value.get("digest")), _node(value)
        if self._holds:
            self._holds(value["generation"], value["step"], digest, node)

    def _note_has(self, digest: str, node: str) -> None:
        with self._lock:
            self._have.setdefault(digest, set()).add(node)
            while len(self._have) > MAX_KNOWN:
                del self._have[next(iter(self._have))]

    def _give(self, sock: socket.socket, lines: Lines, digest: str, node: str) -> None:
        began = time.monotonic()
        with ExitStack() as stack:
            try:
                header, image = stack.enter_context(self._read(digest))
            except (ElasticdError, TrainerError, OSError, LookupError) as error:
                raise _RefusedError(f"{digest[:12]} is not to be had here: {error}") from None
            flat = stack.enter_context(image.cast("B"))
            size = len(flat)
            say(sock, {"size": size, "header": len(header)})
            deadline = patience(size)
            for part in (memoryview(header), flat):
                _send(sock, part, deadline)
        if lines.read(QUESTION_TIME).get("got") is True:
            self._note_has(digest, node)
            log.info("state_served", digest=digest, to=node, bytes=size, seconds=round(time.monotonic() - began, 3))


def _send(sock: socket.socket, content: memoryview, deadline: float) -> None:
    for start in range(0, len(content), _PIECE):
        if time.monotonic() > deadline:
            raise TransferError("the caller takes the state too slowly")
        sock.settimeout(STALL_TIME)
        with content[start : start + _PIECE] as piece:
            sock.sendall(piece)


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 128:
        raise _RefusedError("a question that names no state")
    return value


def _node(question: Mapping[str, Any]) -> str:
    """Who asks, by its own word: it is counted, never trusted."""
    node = question.get("node")
    if not isinstance(node, str) or not NAME.fullmatch(node):
        raise _RefusedError("a question that names no node")
    return node
