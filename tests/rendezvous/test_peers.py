"""The echo between agents: what proves a death, what only is silence."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd.rendezvous import peers
from elasticd.rendezvous.peers import PeerMonitor, bind, neighbours, unreachable
from elasticd.rendezvous.records import GenerationMember, MemberId
from tests.rendezvous.helpers import Helper
from tests.rendezvous.world import generation, mid, nodes
from tests.support.etcd import await_

pytestmark = pytest.mark.timeout(60)

ME, HER = mid("me"), mid("helper")


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Watcher:
    """A monitor under test, and the deaths it told of."""

    def __init__(self) -> None:
        self.deaths: list[tuple[MemberId, float]] = []
        self.monitor = PeerMonitor(bind("127.0.0.1"), lambda identity: self.deaths.append((identity, time.monotonic())))
        self.monitor.start()
        self.monitor.answer_as(ME, 3)

    def await_death(self, within: float = 5.0) -> float:
        await_(lambda: self.deaths, within=within, what="a death")
        return self.deaths[0][1]

    def hears(self, identity: MemberId = HER) -> bool:
        peer = self.monitor._peers.get(identity)
        return peer is not None and peer.heard


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    one = Watcher()
    yield one
    one.monitor.close()
    assert not one.monitor._thread.is_alive()


def at(port: int, identity: MemberId = HER, address: str = "127.0.0.1") -> GenerationMember:
    return GenerationMember(id=identity, address=address, slots=1, probe_port=port)


def helper(port: int = 0, identity: MemberId = HER, running: int = 3) -> Helper:
    return Helper("answer_echoes", incarnation=identity.incarnation, running=running, port=port)


def echo(port: int, question: bytes = b"?\n") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
        sock.sendall(question)
        return sock.recv(100)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rhythm, ten times as fast."""
    monkeypatch.setattr(peers, "ASK_EVERY", 0.1)
    monkeypatch.setattr(peers, "SILENT_AFTER", 0.3)


class Listener:
    """A listening socket that does what it is told with each caller, and counts them."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.sock = bind("127.0.0.1")
        self.port = self.sock.getsockname()[1]
        self.calls = 0
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self.sock.accept()
            except OSError:
                return
            self.calls += 1
            self._serve(caller)

    def close(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


# --- answering -----------------------------------------------------------------------------------------------------------


def test_it_answers_who_it_is_and_what_it_runs(watcher: Watcher) -> None:
    assert echo(watcher.monitor.port) == f"{ME.incarnation} 3\n".encode()
    watcher.monitor.answer_as(mid("me", 2), None)
    assert echo(watcher.monitor.port) == f"{mid('me', 2).incarnation} 0\n".encode()
    assert echo(watcher.monitor.port, b"?\n?\n").count(b"\n") == 2


def test_a_question_may_come_in_pieces(watcher: Watcher) -> None:
    with socket.create_connection(("127.0.0.1", watcher.monitor.port), timeout=2) as sock:
        for piece in (b"?", b"\n?", b"\n"):
            sock.sendall(piece)
            time.sleep(0.02)
        assert sock.recv(100).count(b"\n") >= 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), b"??\n", b"\n", b"?" * 65, b"\xff" * 4096])
def test_a_caller_that_talks_garbage_is_hung_up_on_and_nobody_else(watcher: Watcher, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", watcher.monitor.port), timeout=2) as sock:
        sock.sendall(garbage)
        try:
            assert sock.recv(100) == b""
        except ConnectionResetError:
            pass  # hung up with garbage still unread
    assert echo(watcher.monitor.port).startswith(ME.incarnation.encode())


def test_a_caller_that_says_nothing_holds_up_nobody(watcher: Watcher) -> None:
    with socket.create_connection(("127.0.0.1", watcher.monitor.port)):
        assert echo(watcher.monitor.port).startswith(ME.incarnation.encode())


def test_two_hundred_callers_are_answered(watcher: Watcher) -> None:
    callers = [socket.create_connection(("127.0.0.1", watcher.monitor.port), timeout=5) for _ in range(200)]
    try:
        for caller in callers:
            caller.sendall(b"?\n")
        assert all(caller.recv(100).startswith(ME.incarnation.encode()) for caller in callers)
    finally:
        for caller in callers:
            caller.close()
    await_(lambda: not watcher.monitor._callers, what="forgetting them")


# --- death ---------------------------------------------------------------------------------------------------------------


def test_a_killed_agents_death_is_told_once_and_within_half_a_second(watcher: Watcher) -> None:
    with helper() as her:
        watcher.monitor.ask([at(her.ready)])
        await_(watcher.hears, what="an answer")
        killed = time.monotonic()
        os.kill(her.pid, signal.SIGKILL)
        assert watcher.await_death() - killed < 0.5
        assert watcher.monitor.silent(3) == (HER,)
        watcher.monitor.ask([at(her.ready)])
        time.sleep(0.3)  # long enough for a second report, were there one
        assert [identity for identity, _ in watcher.deaths] == [HER]


def test_a_port_that_refuses_from_the_start_is_death(watcher: Watcher) -> None:
    with bind("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    watcher.monitor.ask([at(port)])
    watcher.await_death(1.0)


def test_one_refusal_is_not_death(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two calls the agent is there again."""
    monkeypatch.setattr(peers, "RETRY_AFTER", 1.0)
    with bind("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    watcher.monitor.ask([at(port)])
    await_(lambda: watcher.monitor._peers and watcher.monitor._peers[HER].refused == 1, what="the first refusal")
    her = PeerMonitor(bind("127.0.0.1", port), lambda _identity: None)
    her.start()
    her.answer_as(HER, 3)
    await_(watcher.hears, what="an answer")
    assert watcher.monitor._peers[HER].refused == 0
    assert not watcher.deaths
    her.close()


def test_another_agent_at_the_same_port_is_death(watcher: Watcher) -> None:
    with helper(identity=mid("helper", 2)) as other:
        watcher.monitor.ask([at(other.ready)])
        watcher.await_death()


def test_an_agent_replaced_while_it_was_watched_is_death(watcher: Watcher) -> None:
    with helper() as her:
        watcher.monitor.ask([at(her.ready)])
        await_(watcher.hears, what="an answer")
        port = her.ready
    with helper(port, mid("helper", 2)):
        watcher.await_death()


def test_a_stopped_process_is_silent_and_never_dead(watcher: Watcher, faster: None) -> None:
    """Its kernel accepts connections for it: success proves nothing, and silence waits for the lease."""
    with helper() as her:
        watcher.monitor.ask([at(her.ready)])
        await_(watcher.hears, what="an answer")
        assert watcher.monitor.silent(3) == ()
        os.kill(her.pid, signal.SIGSTOP)
        await_(lambda: watcher.monitor.silent(3) == (HER,), what="silence")
        time.sleep(1.0)  # ten more questions
        assert not watcher.deaths
        os.kill(her.pid, signal.SIGCONT)
        await_(lambda: watcher.monitor.silent(3) == (), what="an answer")
        assert not watcher.deaths


def test_a_peer_that_runs_another_generation_counts_as_out_of_reach(watcher: Watcher) -> None:
    with helper(running=4) as her:
        watcher.monitor.ask([at(her.ready)])
        await_(watcher.hears, what="an answer")
        assert watcher.monitor.silent(4) == ()
        assert watcher.monitor.silent(3) == (HER,)
        assert not watcher.deaths


def test_whoever_is_no_longer_asked_is_neither_silent_nor_dead(watcher: Watcher) -> None:
    with helper() as her:
        watcher.monitor.ask([at(her.ready)])
        await_(watcher.hears, what="an answer")
        watcher.monitor.ask([])
        await_(lambda: watcher.monitor.silent(9) == (), what="being forgotten")
    assert not watcher.deaths


@pytest.mark.parametrize("answer", [b"x" * 200, b"\xff\xfe\n", b"\n"], ids=["no end", "no text", "empty"])
def test_an_answer_that_is_garbage_does_no_harm(watcher: Watcher, faster: None, answer: bytes) -> None:
    """Whoever sits at the port, it is not the agent; the monitor goes on."""
    kept: list[socket.socket] = []

    def serve(caller: socket.socket) -> None:
        kept.append(caller)
        caller.sendall(answer)

    stranger = Listener(serve)
    watcher.monitor.ask([at(stranger.port)])
    await_(lambda: kept and (watcher.deaths or watcher.monitor.silent(3)), what="a call")
    assert echo(watcher.monitor.port).startswith(ME.incarnation.encode())
    stranger.close()
    for caller in kept:
        caller.close()


# --- a bad network must not cost a core -----------------------------------------------------------------------------------


def test_somebody_who_hangs_up_on_every_call_is_not_called_in_a_frenzy(watcher: Watcher) -> None:
    stranger = Listener(socket.socket.close)
    watcher.monitor.ask([at(stranger.port)])
    await_(lambda: stranger.calls, what="a call")
    time.sleep(0.5)
    assert stranger.calls < 20
    assert not watcher.deaths
    stranger.close()


def test_a_network_that_is_down_is_tried_about_once_a_second(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = PeerMonitor._call
    monkeypatch.setattr(PeerMonitor, "_call", lambda self, peer: (calls.append(peer), original(self, peer)))
    watcher.monitor.ask([at(1, address="255.255.255.255")])  # refused by the kernel at once, and not as a refusal of the peer
    await_(lambda: calls, what="a call")
    time.sleep(0.5)
    assert len(calls) <= 2
    assert not watcher.deaths


# --- whom to ask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "me", "asked"),
    [("abcdef", "b", "cde"), ("abcdef", "e", "fab"), ("abcd", "c", "dab"), ("ab", "a", "b"), ("a", "a", ""), ("ab", "z", "")],
)
def test_each_asks_those_after_it_in_the_ring_of_ranks(members: str, me: str, asked: str) -> None:
    assert nodes(one.id for one in neighbours(generation(1, members).record, mid(me))) == list(asked)


def test_in_a_ring_everybody_is_asked_by_as_many_as_it_asks() -> None:
    record = generation(1, "abcdefgh").record
    asked = [one.id for identity in record.ids for one in neighbours(record, identity)]
    assert all(asked.count(identity) == peers.FANOUT for identity in record.ids)


# --- who can be reached --------------------------------------------------------------------------------------------------


def test_unreachable_names_those_that_do_not_answer_as_themselves() -> None:
    with helper() as well, helper() as stopped, bind("127.0.0.1") as closed, bind("127.0.0.1") as mute:
        port = closed.getsockname()[1]
        closed.close()
        os.kill(stopped.pid, signal.SIGSTOP)
        asked = [
            at(well.ready),
            at(well.ready, mid("other")),
            at(stopped.ready, mid("stopped")),
            at(port, mid("closed")),
            at(mute.getsockname()[1], mid("mute")),
            at(1, mid("nowhere"), "host.invalid"),
        ]
        began = time.monotonic()
        found = unreachable(asked, timeout=0.5)
        assert set(found) == {mid("other"), mid("stopped"), mid("closed"), mid("mute"), mid("nowhere")}
        assert time.monotonic() - began < 3.0
    assert unreachable([]) == ()


# --- beginning and ending ------------------------------------------------------------------------------------------------


def test_closing_leaves_no_thread_and_no_socket() -> None:
    before = descriptors()
    one = Watcher()
    with helper() as her:
        one.monitor.ask([at(her.ready)])
        await_(one.hears, what="an answer")
        port = one.monitor.port
        caller = socket.create_connection(("127.0.0.1", port))
        one.monitor.close()
        one.monitor.close()
        one.monitor.ask([])
        assert not one.monitor._thread.is_alive()
        assert caller.recv(1) == b""
        caller.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    assert descriptors() <= before


def test_an_address_that_is_not_ours_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"203\.0\.113\.1"):
        bind("203.0.113.1")
    with pytest.raises(UsageError, match=r"host\.invalid"):
        bind("host.invalid")


def test_a_port_in_use_is_refused_with_its_number() -> None:
    with bind("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(UsageError, match=f"{port}: port in use"):
            bind("127.0.0.1", port)
