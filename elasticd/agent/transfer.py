"""Fetches a state from another agent, and tells agents the two little things they have to know about states.

Owns: the asking side. Must not: decide from whom to fetch, or where a state is kept: one callback makes the room. What comes is believed only if
its content has the digest that was asked for. The wire is told in `statewire`; the other side is `stateserver`.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticd.agent.stateserver import StateServer
from elasticd.agent.statewire import ANSWER_TIME, QUESTION_TIME, STALL_TIME, Lines, TransferError, is_node, is_number, patience, say, secured, speaks_tls
from trainer.checkpoint import CHUNK, digest_of
from trainer.checkpoint.manifest import sum_of
from trainer.errors import DamagedError
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elasticd.kv.types import TLSFiles

MAX_HEADER: Final = 64 * 1024 * 1024
CONNECT_TIME: Final = 5.0
_UNREACHABLE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL, errno.ENETRESET}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a fetch brought: `size` bytes of image in `seconds`."""

    header: bytes
    size: int
    seconds: float


def fetch(
    address: str,
    port: int,
    digest: str,
    *,
    scope: str,
    node: str,
    place: Callable[[Layout, Callable[[memoryview], None]], None],
    tls: TLSFiles | None = None,
    accept: Callable[[str], bool] = is_node,
    progress: Callable[[int, int], None] | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Fetched:
    """Fetch a state and see that it is the one asked for.

    Args:
        address, port: of the agent that holds it.
        node: who asks.
        place: makes room for a layout, and calls the second argument with it. What that raises goes on, and whatever is in the room is void.
        accept: whether the agent there may be one whose certificate has this Common Name.
        progress: told the bytes of the image that are here, and of how many, each 16 MiB.
        cancel: asked between two pieces; True ends it.

    Raises:
        TransferError: it cannot be reached, refuses, is no node's, hangs up, is too slow, or `cancel` said so.
        DamagedError: what came is not the state with this digest, or none at all.
        Exception: whatever `place` raises.
    """
    began = time.monotonic()
    where = f"{address}:{port}"
    with _asked(address, port, tls, accept) as sock:
        lines = Lines(sock)
        say(sock, {"scope": scope, "node": node, "digest": digest})
        size, length = _sizes(lines.read(ANSWER_TIME))
        stream = _Stream(sock, lines, patience(size + length), cancel)
        header = bytearray(length)
        stream.fill(memoryview(header))
        layout = _layout(bytes(header), size, where)
        filled = False

        def fill(image: memoryview) -> None:
            nonlocal filled
            with image.cast("B") as flat:
                if len(flat) != size:
                    raise TransferError(f"room of {len(flat)} bytes was made for a state of {size}")
                found = digest_of(layout.header, stream.chunks(flat, progress))
            if found != digest:
                raise DamagedError(f"{where} gave a state with the digest {found}, asked for was {digest}")
            filled = True

        place(layout, fill)
        if not filled:
            raise TransferError("no room was made for the state")
        with suppress(OSError):  # the state is here, whether the other side hears so or not
            say(sock, {"got": True})
    return Fetched(header=layout.header, size=size, seconds=time.monotonic() - began)


def tell_holds(
    address: str,
    port: int,
    *,
    scope: str,
    node: str,
    generation: int,
    step: int,
    digest: str,
    tls: TLSFiles | None = None,
    accept: Callable[[str], bool] = is_node,
) -> None:
    """Tell the agent of rank 0 that `node` has written this checkpoint whole.

    Raises:
        TransferError: it does not answer, or refuses.
    """
    _tell(address, port, {"scope": scope, "holds": {"generation": generation, "step": step, "digest": digest, "node": node}}, tls, accept)


def tell_has(address: str, port: int, *, scope: str, node: str, digest: str, tls: TLSFiles | None = None, accept: Callable[[str], bool] = is_node) -> None:
    """Tell a holder that `node` has this state from elsewhere: one that leaves need not wait for its call (PROTOCOL 18).

    Raises:
        TransferError: it does not answer, or refuses.
    """
    _tell(address, port, {"scope": scope, "node": node, "has": digest}, tls, accept)


def _tell(address: str, port: int, message: Mapping[str, Any], tls: TLSFiles | None, accept: Callable[[str], bool]) -> None:
    with _asked(address, port, tls, accept) as sock:
        say(sock, message)
        _answered(Lines(sock).read(QUESTION_TIME))


# --- the connection ------------------------------------------------------------------------------------------------------


@contextmanager
def _asked(address: str, port: int, tls: TLSFiles | None, accept: Callable[[str], bool]) -> Iterator[socket.socket]:
    """A connection to another agent; whatever goes wrong with it names that agent."""
    where = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIME) as plain:
            plain.settimeout(QUESTION_TIME)
            sock, name = secured(plain, tls, ssl.PROTOCOL_TLS_CLIENT)
            with sock:
                if speaks_tls(tls) and not accept(name):
                    raise TransferError(f"the certificate of {name!r} is no node's")
                yield sock
    except TransferError as error:
        raise TransferError(f"{where}: {error.message}", remedy=error.remedy) from None
    except (ssl.SSLError, ConnectionError, TimeoutError, socket.gaierror) as error:
        raise _named(where, error) from None
    except OSError as error:
        if error.errno not in _UNREACHABLE:  # what `place` has to say of memory and disk
            raise
        raise _named(where, error) from None


def _named(where: str, error: OSError) -> TransferError:
    if isinstance(error, ssl.SSLCertVerificationError):
        unfit = "purpose" in error.verify_message
        remedy = "its extended key usage has to name serverAuth beside clientAuth" if unfit else ""
        return TransferError(f"{where}: its certificate is not good here: {error.verify_message}", remedy=remedy)
    if isinstance(error, ssl.SSLError):
        return TransferError(f"{where}: no TLS with it: {error.reason or error}")
    return TransferError(f"{where}: {'silent for too long' if isinstance(error, TimeoutError) else error.strerror or error}")


def _answered(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if "error" in answer:
        raise TransferError(f"it refuses: {str(answer['error'])[:1000]}")
    return answer


def _sizes(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Of image and header."""
    size, length = _answered(answer).get("size"), answer.get("header")
    if not (is_number(size) and is_number(length)) or not isinstance(size, int) or not isinstance(length, int) or length > MAX_HEADER:
        raise TransferError(f"an answer that is none: {str(answer)[:100]}")
    return size, length


def _layout(header: bytes, size: int, where: str) -> Layout:
    """What the header says, if it says it in our way and of an image of that size."""
    try:
        text = header[8:].decode().rstrip(" ")
    except UnicodeDecodeError:
        raise DamagedError(f"{where} gave a header that is no text") from None
    layout = Layout.parse(text)
    if layout.size != size or layout.header != header:
        raise DamagedError(f"{where} gave a header that does not belong to its state")
    return layout


class _Stream:
    """What comes behind an answer: so many bytes, no more, and not too slowly."""

    def __init__(self, sock: socket.socket, lines: Lines, deadline: float, cancel: Callable[[], bool] | None) -> None:
        self._sock, self._lines, self._deadline, self._cancel = sock, lines, deadline, cancel

    def fill(self, target: memoryview) -> None:
        """The next bytes, until `target` is full."""
        got = self._lines.take(target)
        self._sock.settimeout(STALL_TIME)
        while got < len(target):
            if self._cancel is not None and self._cancel():
                raise TransferError("given up: the state is not wanted any more")
            if time.monotonic() > self._deadline:
                raise TransferError("it gives the state too slowly")
            with target[got:] as rest:
                count = self._sock.recv_into(rest)
            if not count:
                raise TransferError("it hung up in the middle of the state")
            got += count

    def chunks(self, image: memoryview, progress: Callable[[int, int], None] | None) -> list[bytes]:
        """Fill an image; the sum of each of its chunks, made while the chunk is in the processor's cache."""
        sums = []
        for start in range(0, len(image), CHUNK):
            with image[start : start + CHUNK] as chunk:
                self.fill(chunk)
                sums.append(sum_of(chunk))
            if progress is not None:
                progress(min(start + CHUNK, len(image)), len(image))
        return sums


__all__ = ["Fetched", "StateServer", "TransferError", "fetch", "is_node", "tell_has", "tell_holds"]
