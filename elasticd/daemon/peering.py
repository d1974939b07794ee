"""Asking the daemons of other nodes: over their peer listeners, with this node's certificate, all at the same time.

Owns: which nodes there are to ask, TLS with them, and how long all of it may take. Must not: know what an answer means, ask for a change, or fail
because a node does: what it did not answer is told beside what others did.

Who is there says etcd, where each daemon publishes its listener's port; while etcd is away the last listing counts. A node is believed to be who we
asked if its certificate is of our authority and its Common Name is elasticd-node-NAME. One that did not answer is left alone for a moment, and one
that still owes an answer until that has come: a sick node costs each question nothing, and never more than one thread.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import quote, urlencode

import structlog

from elasticd.daemon.values import printable
from elasticd.errors import KVError, RecordError
from elasticd.rendezvous.records import NodeRecord, parse

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.kv import EtcdKV

T = TypeVar("T")

STEP_TIME: Final = 3.0
"""Seconds for each step: the connection, TLS, each piece of an answer."""
WHOLE_TIME: Final = 6.0
"""Seconds for everything."""
_REFUSAL_MOST: Final = 64 * 1024
_THREADS: Final = 16
_LISTING_AGE: Final = 3.0  # seconds for which a listing of the nodes is good
_STRANGE: Final = "its answer is none of this API's"
_LEFT_ALONE: Final = 5.0  # seconds for which one that did not answer is not asked again

log = structlog.get_logger("elasticd.daemon")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another node. `port` is None where it serves no other nodes; `jobs` are those that it allows or runs."""

    name: str
    address: str
    port: int | None
    jobs: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard(Generic[T]):
    """What became of asking one node: its answer, or why there is none."""

    answer: T | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Generic[T]):
    """What is asked of each node.

    Attributes:
        path: of the node API, to be read.
        query: what is asked of one node; what is None is left out.
        read: makes something of the body of an answer; a ValueError says that it is none.
        most: bytes that the body may have.
    """

    path: str
    query: Callable[[Peer], Mapping[str, str | int | float | None]]
    read: Callable[[bytes], T]
    most: int


class Peers:
    """See the module. Thread-safe.

    Args:
        config: certificates, and the cluster.
        kv: this node's connection.
        board: this node's name, and whether etcd answers.
    """

    def __init__(self, config: DaemonConfig, kv: EtcdKV, board: Board) -> None:
        self._keys = config.keys
        self._kv = kv
        self._board = board
        self._files = _files(config)
        self._lock = threading.Lock()
        self._listing: tuple[Peer, ...] = ()
        self._listed = 0.0
        self._context: tuple[tuple[int, ...], ssl.SSLContext] | None = None
        self._asking: dict[str, dict[Future[Any], float]] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="elasticd-peer")

    @property
    def unable(self) -> str:
        """Why no other node can be asked from here, "" if they can."""
        return "" if self._files else "this node has no certificate to ask other nodes with: see [etcd] and [peer] of elasticd.toml"

    def others(self) -> tuple[Peer, ...]:
        """The other nodes of the cluster, by name; while etcd is away those that were there before."""
        with self._lock:
            fresh = time.monotonic() - self._listed < _LISTING_AGE and self._listed > 0
            if fresh or self._board.turn.etcd_problem:
                return self._listing
        try:
            items = self._kv.list(self._keys.nodes).items
        except KVError:
            return self._listing
        listing = tuple(peer for item in items if (peer := self._peer(item.key, item.value)) and peer.name != self._board.node)
        with self._lock:
            self._listing, self._listed = listing, time.monotonic()
        return listing

    def ask(self, peers: Sequence[Peer], question: Question[T]) -> dict[str, Heard[T]]:
        """Ask nodes for the same thing.

        Returns:
            What became of it, by name of the node.
        """
        futures = {peer.name: self._begin(peer, question) for peer in peers}
        wait([future for future in futures.values() if isinstance(future, Future)], WHOLE_TIME)
        return {name: self._heard(name, future) for name, future in futures.items()}

    # --- one node --------------------------------------------------------------------------------------------------------

    def _begin(self, peer: Peer, question: Question[T]) -> Future[T] | Heard[T]:
        if peer.port is None or not self._files:
            return Heard(problem=self.unable or "it has no listener for other nodes: see [peer] of its elasticd.toml")
        with self._lock:
            now = time.monotonic()
            owing = {future: began for future, began in self._asking.get(peer.name, {}).items() if not future.done()}
            self._asking[peer.name] = owing
            if any(now - began > WHOLE_TIME for began in owing.values()):
                return Heard(problem="it still owes the answer to an earlier question")
            since, problem = self._failed.get(peer.name, (0.0, ""))
            if problem and now - since < _LEFT_ALONE:
                return Heard(problem=problem)
            future = self._pool.submit(self._one, peer, question)
            owing[future] = now
            return future

    def _heard(self, name: str, future: Future[T] | Heard[T]) -> Heard[T]:
        if isinstance(future, Heard):
            return future
        if not future.done():
            if future.cancel():
                return Heard(problem="it was not asked: too many other nodes were slow to answer")
            return self._failure(name, f"no answer within {WHOLE_TIME:g} s")
        try:
            answer = future.result()
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            return self._failure(name, _why(error))
        with self._lock:
            self._failed.pop(name, None)
        return Heard(answer=answer)

    def _failure(self, name: str, problem: str) -> Heard[T]:
        with self._lock:
            self._failed[name] = (time.monotonic(), problem)
        log.debug("peer_did_not_answer", peer=name, reason=problem)
        return Heard(problem=problem)

    def _one(self, peer: Peer, question: Question[T]) -> T:
        """One answer. Raises an OSError, HTTPException or ValueError if there is none."""
        assert peer.port
        stop = time.monotonic() + WHOLE_TIME
        given = {name: value for name, value in question.query(peer).items() if value is not None}
        target = quote(question.path) + (f"?{urlencode(given)}" if given else "")
        with socket.create_connection((peer.address, peer.port), timeout=STEP_TIME) as plain, self._tls().wrap_socket(plain) as secure:
            names = _common_names(secure)
            if names != [f"elasticd-node-{peer.name}"]:
                raise ConnectionError(f"whoever answers there is {', '.join(names) or 'nobody known'}, not this node")
            connection = http.client.HTTPConnection(peer.address, peer.port)
            connection.sock = secure
            connection.request("GET", target, headers={"Accept": "application/json", "Connection": "close"})
            body = bytearray()
            with connection.getresponse() as answer:  # which holds the socket open otherwise, as long as anybody holds the error
                while piece := answer.read1(256 * 1024):
                    body += piece
                    if len(body) > question.most or time.monotonic() > stop:
                        raise ConnectionError("its answer is too long" if len(body) > question.most else "it answers too slowly")
        if answer.status != http.client.OK:
            raise ConnectionError(f"it refuses: {_refusal(bytes(body)) or answer.status}")
        return question.read(bytes(body))

    def _tls(self) -> ssl.SSLContext:
        """The context for the files as they are now."""
        assert self._files
        stamp = tuple(path.stat().st_mtime_ns for path in self._files)
        with self._lock:
            if self._context is None or self._context[0] != stamp:
                self._context = (stamp, _context(*self._files))
            return self._context[1]

    def _peer(self, key: str, value: bytes) -> Peer | None:
        try:
            record = parse(NodeRecord, key, value, self._keys.scope)
        except RecordError:
            return None
        if key != self._keys.node(record.node):
            return None
        return Peer(name=record.node, address=record.address, port=record.peer_port, jobs=frozenset(job.name for job in record.jobs))


def _files(config: DaemonConfig) -> tuple[Path, Path, Path] | None:
    """Authority, certificate and key. A server's certificate is, as certs.py makes it, none for a client, so etcd's comes first."""
    cacert = config.peer.clients_ca or config.etcd.cacert
    cert, key = (config.etcd.cert, config.etcd.key) if config.etcd.cert else (config.peer.cert, config.peer.key)
    return (cacert, cert, key) if cacert and cert and key else None


def _context(cacert: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the name of the node is compared, which no other node's certificate bears
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cacert)
    context.load_cert_chain(cert, key, password="")  # an encrypted key would ask for its pass phrase on the terminal
    return context


def _common_names(secure: ssl.SSLSocket) -> list[str]:
    subject: Any = (secure.getpeercert() or {}).get("subject", ())
    return [str(value) for part in subject for name, value in part if name == "commonName"]


def _refusal(body: bytes) -> str:
    """What an error answer says; "" if it is none."""
    try:
        return str(json.loads(body[:_REFUSAL_MOST])["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def _why(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return printable(f"its certificate is not good: {error.verify_message}")[:300]
    if isinstance(error, ssl.SSLError):
        return printable(f"no TLS with it: {error.reason or error}")[:300]
    if isinstance(error, TimeoutError):
        return f"no answer within {STEP_TIME:g} s"
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)[:300]
    if isinstance(error, (ValueError, RecursionError)):
        return _STRANGE
    return printable(str(error) or type(error).__name__)[:300]
