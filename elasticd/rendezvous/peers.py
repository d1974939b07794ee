r"""Do the other agents still live? A tiny echo between agents, and what its silence means.

Owns: one thread that answers echoes and asks them of a few neighbours. Must not: touch etcd or workers; it reports through one callback.

A killed agent's connections end at once, long before its lease does. An ended connection makes a suspect, which is called again: refused twice,
or answered by another agent, is death now. A stopped process still accepts connections, so that success proves nothing and silence waits
for the lease (PROTOCOL 17). An answer names the generation whose workers the agent runs, for those who have lost etcd (PROTOCOL 15).

The wire: a question is ``?\\n``, an answer ``<incarnation> <running generation or 0>\\n``. Nothing else is read, nothing is ever executed.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from elasticd.errors import UsageError
from elasticd.rendezvous.records import GenerationMember, GenerationRecord, MemberId

log = structlog.get_logger("elasticd.rendezvous.peers")

ASK_EVERY: Final = 1.0
"""Seconds between questions to a neighbour."""
SILENT_AFTER: Final = 3.0
"""Seconds without an answer after which a peer counts as unreachable."""
RETRY_AFTER: Final = 0.01
"""Seconds between the two calls to a suspect that refuses."""
HUNG_UP_PAUSE: Final = 0.05
"""Seconds before calling somebody again who hung up without a word."""
FANOUT: Final = 3
"""Neighbours each agent asks: with up to four nodes everybody asks everybody."""
_MAX_LINE: Final = 64
_MAX_CALLERS: Final = 4096


def bind(address: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on `address`; port 0 takes a free one.

    Raises:
        UsageError: the address is not ours, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        msg = f"cannot use address {address!r}: {error.strerror or error}"
        raise UsageError(msg, remedy="give an address of this machine that its peers can reach") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        what = "port in use" if error.errno == errno.EADDRINUSE else error.strerror
        msg = f"cannot listen on {address}:{port}: {what}"
        raise UsageError(msg, remedy="give an address of this machine, and a free port or none") from None
    return sock


def neighbours(generation: GenerationRecord, me: MemberId, fanout: int = FANOUT) -> tuple[GenerationMember, ...]:
    """The `fanout` members after `me` in the ring of ranks: whom it asks."""
    ids = generation.ids
    if me not in ids:
        return ()
    start = ids.index(me)
    count = min(fanout, len(ids) - 1)
    return tuple(generation.members[(start + step) % len(ids)] for step in range(1, count + 1))


@dataclass(slots=True)
class _Peer:
    """One neighbour and the connection to it."""

    member: GenerationMember
    sock: socket.socket | None = None
    connected: bool = False
    heard: bool = False
    buffer: bytes = b""
    refused: int = 0
    next_ask: float = 0.0
    answered_at: float = field(default_factory=time.monotonic)
    generation: int = 0
    dead: bool = False


class PeerMonitor:
    """Answers echoes on `listener`, asks neighbours, and calls `on_dead(member)` once for a proven death."""

    def __init__(self, listener: socket.socket, on_dead: Callable[[MemberId], None]) -> None:
        self._listener = listener
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._answer = b""
        self._wanted: tuple[GenerationMember, ...] = ()
        self._adopted: tuple[GenerationMember, ...] = ()
        self._peers: dict[MemberId, _Peer] = {}
        self._callers: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-peers", daemon=True)

    @property
    def port(self) -> int:
        """Where this agent answers."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to answer."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout=2.0)

    def answer_as(self, me: MemberId, running: int | None) -> None:
        """What to answer from now on."""
        with self._lock:
            self._answer = f"{me.incarnation} {running or 0}\n".encode()

    def ask(self, members: Sequence[GenerationMember]) -> None:
        """Whom to ask from now on, instead of those before."""
        with self._lock:
            self._wanted = tuple(members)
        self._wake()

    def silent(self, generation: int) -> tuple[MemberId, ...]:
        """Neighbours that are dead, have not answered lately, or no longer run `generation`."""
        now = time.monotonic()
        with self._lock:
            return tuple(
                identity for identity, peer in self._peers.items() if peer.dead or now - peer.answered_at > SILENT_AFTER or peer.generation != generation
            )

    def _wake(self) -> None:
        with suppress(OSError):  # closed, or full of unread wake-ups
            os.write(self._wake_write, b"w")

    def _woken(self, _sock: object) -> None:
        os.read(self._wake_read, 4096)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._adopt_wanted()
                timeout = self._ask_due()
                for key, _events in self._selector.select(timeout):
                    if self._selector.get_map().get(key.fileobj) is key:  # else an earlier one of this round dropped it
                        key.data(key.fileobj)
        finally:
            for peer in self._peers.values():
                self._drop(peer)
            for sock in tuple(self._callers):
                self._hang_up(sock)
            self._selector.close()
            self._listener.close()
            os.close(self._wake_read)
            write, self._wake_write = self._wake_write, -1
            os.close(write)

    # --- answering ---

    def _accept(self, _listener: object) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        if len(self._callers) >= _MAX_CALLERS:
            sock.close()
            return
        sock.setblocking(False)
        self._callers[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, self._answer_caller)

    def _answer_caller(self, fileobj: object) -> None:
        assert isinstance(fileobj, socket.socket)
        sock = fileobj
        try:
            data = sock.recv(_MAX_LINE)
            buffer = self._callers[sock] + data
            if not data or len(buffer) > _MAX_LINE or not _only_questions(buffer):
                self._hang_up(sock)
                return
            questions, self._callers[sock] = buffer.count(b"\n"), buffer[buffer.rfind(b"\n") + 1 :]
            with self._lock:
                answer = self._answer
            if questions:
                sock.send(answer * questions)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(sock)

    def _hang_up(self, sock: socket.socket) -> None:
        self._callers.pop(sock, None)
        self._selector.unregister(sock)
        sock.close()

    # --- asking ---

    def _adopt_wanted(self) -> None:
        if self._adopted is self._wanted:
            return
        with self._lock:
            self._adopted = self._wanted
            wanted = {member.id: member for member in self._wanted}
            gone = [self._peers.pop(identity) for identity in tuple(self._peers) if identity not in wanted]
            for identity, member in wanted.items():
                if identity not in self._peers:
                    self._peers[identity] = _Peer(member=member)
        for peer in gone:
            self._drop(peer)

    def _ask_due(self) -> float:
        """Ask whoever is due; seconds until the next one is."""
        now = time.monotonic()
        soonest = now + ASK_EVERY
        for peer in tuple(self._peers.values()):
            if peer.dead:
                continue
            if now >= peer.next_ask:
                peer.next_ask = now + ASK_EVERY
                self._ask(peer)
            soonest = min(soonest, peer.next_ask)
        return max(0.0, soonest - now)

    def _ask(self, peer: _Peer) -> None:
        if peer.sock is None:
            self._call(peer)
        elif peer.connected:
            try:
                peer.sock.send(b"?\n")
            except BlockingIOError:
                pass
            except OSError:
                self._suspect(peer, refused=False)
        elif time.monotonic() - peer.answered_at > SILENT_AFTER:
            self._drop(peer)

    def _call(self, peer: _Peer) -> None:
        try:
            info = socket.getaddrinfo(peer.member.address, peer.member.probe_port, type=socket.SOCK_STREAM)[0]
            peer.sock = socket.socket(info[0], socket.SOCK_STREAM)
            peer.sock.setblocking(False)
            code = peer.sock.connect_ex(info[4])
        except OSError:
            self._drop(peer)
            return
        if code not in (0, errno.EINPROGRESS):
            self._suspect(peer, refused=code == errno.ECONNREFUSED)
            return
        peer.connected = peer.heard = False
        peer.buffer = b""
        self._selector.register(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, lambda _sock, peer=peer: self._ready(peer))

    def _ready(self, peer: _Peer) -> None:
        assert peer.sock is not None
        if not peer.connected:
            code = peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._suspect(peer, refused=code == errno.ECONNREFUSED)
                return
            peer.connected = True
            peer.refused = 0
            self._selector.modify(peer.sock, selectors.EVENT_READ, lambda _sock, peer=peer: self._ready(peer))
            self._ask(peer)
            return
        try:
            data = peer.sock.recv(_MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._suspect(peer, refused=False)
            return
        peer.buffer += data
        while b"\n" in peer.buffer:
            line, _, peer.buffer = peer.buffer.partition(b"\n")
            self._answered(peer, line)
        if len(peer.buffer) > _MAX_LINE:
            self._drop(peer)

    def _answered(self, peer: _Peer, line: bytes) -> None:
        incarnation, _, running = line.decode("ascii", "replace").partition(" ")
        if incarnation != peer.member.id.incarnation:
            self._died(peer, "another agent answers at its port")
            return
        peer.heard = True
        with self._lock:
            peer.answered_at = time.monotonic()
            peer.generation = int(running) if running.isdigit() else 0

    def _suspect(self, peer: _Peer, *, refused: bool) -> None:
        """A connection ended, or could not be made: call again soon; a second refusal in a row is death."""
        met, heard = peer.connected, peer.heard
        self._drop(peer)
        peer.refused = peer.refused + 1 if refused else peer.refused
        if peer.refused >= 2:
            self._died(peer, "refused twice")
            return
        # At once only after a connection that worked: a network that is down, or somebody who hangs up on us, would keep us spinning.
        after_meeting = 0.0 if heard else HUNG_UP_PAUSE
        pause = after_meeting if met else RETRY_AFTER if refused else ASK_EVERY
        peer.next_ask = time.monotonic() + pause

    def _died(self, peer: _Peer, why: str) -> None:
        if peer.dead:
            return
        with self._lock:
            peer.dead = True
        self._drop(peer)
        log.warning("peer_dead", peer=str(peer.member.id), why=why)
        self._on_dead(peer.member.id)

    def _drop(self, peer: _Peer) -> None:
        if peer.sock is not None:
            try:
                self._selector.unregister(peer.sock)
            except KeyError:
                pass
            peer.sock.close()
        peer.sock = None
        peer.connected = False


def _only_questions(buffer: bytes) -> bool:
    *questions, rest = buffer.split(b"\n")
    return all(question == b"?" for question in questions) and rest in {b"", b"?"}


def unreachable(members: Iterable[GenerationMember], timeout: float = 1.0) -> tuple[MemberId, ...]:
    """Members whose agent gives no right answer within `timeout` seconds: asked once each, all at the same time."""
    found: list[MemberId] = []
    lock = threading.Lock()

    def try_one(member: GenerationMember) -> None:
        try:
            with socket.create_connection((member.address, member.probe_port), timeout=timeout) as sock:
                sock.settimeout(timeout)
                sock.sendall(b"?\n")
                if sock.recv(_MAX_LINE).split(b" ")[0].decode("ascii", "replace") == member.id.incarnation:
                    return
        except OSError:
            pass
        with lock:
            found.append(member.id)

    threads = [threading.Thread(target=try_one, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * timeout)
    return tuple(found)
