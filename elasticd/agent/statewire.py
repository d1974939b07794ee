"""What both sides of a transfer of states need: lines of JSON on a socket, TLS by the node's certificate, and how long anything may take.

Owns: the wire's limits, and who may be at the other end. Must not: know what is asked or answered (`stateserver`, `transfer`).

One connection for each question: a line of JSON, answered by a line of JSON. A state follows its answer: header, then image, raw.

::

    {"scope": "cluster/job", "node": "b", "digest": "…"}  ->  {"size": 1200000000, "header": 8192} header image, then <- {"got": true}
    {"scope": "cluster/job", "node": "b", "has": "…"}     ->  {"ok": true}       it has that state, from wherever
    {"scope": "cluster/job", "holds": {"generation": 3, "step": 70, "digest": "…", "node": "b"}}  ->  {"ok": true}       it is on b's disk
    anything else                                         ->  {"error": "…"}

With certificates both sides show one: that by which the node reaches etcd, which must be good for a server too. It names a node, not an address,
so that no host name is compared. Files are read anew for each connection: a renewed one counts at once.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from typing import TYPE_CHECKING, Any, Final

from elasticd.errors import ElasticdError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from elasticd.kv.types import TLSFiles

MAX_LINE: Final = 4096
QUESTION_TIME: Final = 10.0
"""Seconds for a caller's handshake and question, and for its last word."""
ANSWER_TIME: Final = 60.0
"""Seconds in which an answer must begin: the state may have to be read from disk."""
STALL_TIME: Final = 20.0
"""Seconds in which some part of a state must have moved."""
SLOWEST: Final = 4_000_000
"""Bytes a second below which a transfer is given up: the state's buffer is pinned as long as it lasts."""
NODE_PREFIX: Final = "elasticd-node-"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_MAX_NUMBER: Final = 2**53


class TransferError(ElasticdError):
    """A state could not be fetched from another node, or a node not be told something."""


def is_node(common_name: str) -> bool:
    """Whether a certificate is a node's, as `deploy/etcd/roles.py` names its user."""
    return common_name.startswith(NODE_PREFIX) and NAME.fullmatch(common_name.removeprefix(NODE_PREFIX)) is not None


def is_number(value: Any) -> bool:
    """Whether it can be a size, a step, or a generation."""
    return type(value) is int and 0 <= value < _MAX_NUMBER


def speaks_tls(tls: TLSFiles | None) -> bool:
    """Whether this node has a certificate to show; without one it speaks plain text."""
    return tls is not None and tls.cert is not None and tls.key is not None


def secured(sock: socket.socket, tls: TLSFiles | None, side: int) -> tuple[socket.socket, str]:
    """The same connection, under TLS where there is a certificate, and the Common Name at its other end ("" in plain text).

    Args:
        side: ssl.PROTOCOL_TLS_SERVER or PROTOCOL_TLS_CLIENT.

    Raises:
        TransferError: this node's own files cannot be used now.
        OSError: no TLS with whoever is there, or no certificate of our authority.
    """
    if tls is None or tls.cert is None or tls.key is None:
        return sock, ""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.cacert)
        context.load_cert_chain(tls.cert, tls.key, password="")  # an encrypted key would ask for its pass phrase on the terminal
    except (OSError, ValueError) as error:
        raise TransferError(f"this node's certificate {tls.cert} cannot be used: {error}") from None
    secure = context.wrap_socket(sock, server_side=side == ssl.PROTOCOL_TLS_SERVER)
    subject: Any = (secure.getpeercert() or {}).get("subject", ())
    return secure, next((str(value) for part in subject for name, value in part if name == "commonName"), "")


class Lines:
    """Reads lines from a socket, and hands on what came behind them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def read(self, seconds: float) -> Mapping[str, Any]:
        """One line of JSON, whole within `seconds`.

        Raises:
            TransferError: too long, too slow, cut off, or no JSON object.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not self._rest.startswith(b"{") and self._rest:
                raise TransferError("it does not speak this language; does only one of the two use TLS?")
            if len(self._rest) > MAX_LINE:
                raise TransferError(f"a line of more than {MAX_LINE} bytes")
            self._receive(deadline - time.monotonic(), seconds)
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise TransferError(f"a line that is no JSON object: {line[:40]!r}")
        return value

    def _receive(self, left: float, seconds: float) -> None:
        try:
            self._sock.settimeout(max(left, 1e-3))
            got = self._sock.recv(MAX_LINE) if left > 0 else None
        except TimeoutError:
            got = None
        if got is None:
            raise TransferError(f"no whole line within {seconds:g} s")
        if not got:
            raise TransferError("it hung up")
        self._rest += got

    def take(self, target: memoryview) -> int:
        """What was read too far, at the beginning of `target`; how much that is."""
        got = min(len(self._rest), len(target))
        target[:got] = self._rest[:got]
        self._rest = self._rest[got:]
        return got


def say(sock: socket.socket, value: Mapping[str, Any]) -> None:
    """One line of JSON."""
    sock.settimeout(QUESTION_TIME)
    sock.sendall(json.dumps(value).encode() + b"\n")


def patience(size: int) -> float:
    """The moment at which a transfer of `size` bytes is given up, on the monotonic clock."""
    return time.monotonic() + ANSWER_TIME + size / SLOWEST
