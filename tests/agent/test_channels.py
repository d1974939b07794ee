"""The agent's conversations with workers: over sockets, with workers that behave and workers that do not."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.agent.channels import Channels
from trainer.errors import ChannelError
from trainer.wire import channel

pytestmark = pytest.mark.timeout(30)

HELLO = channel.Hello(rank=3, local_rank=1, pid=1)


class Ear:
    """Keeps what the agent heard."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[int, channel.Message]] = queue.SimpleQueue()
        self.channels = Channels(lambda rank, message: self.heard.put((rank, message)))

    def wait(self) -> tuple[int, channel.Message]:
        return self.heard.get(timeout=10)


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.channels.close()


def read_one(sock: socket.socket) -> channel.Message:
    sock.settimeout(10)
    inbox = channel.Inbox()
    while not (messages := channel.receive(sock, inbox)):
        pass
    return messages[0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_what_a_worker_says_is_heard_under_its_local_rank(ear: Ear) -> None:
    with ear.channels.open(0) as zero, ear.channels.open(1) as one:
        assert ear.channels.listening == ()
        channel.send(one, HELLO)
        assert ear.wait() == (1, HELLO)
        assert ear.channels.listening == (1,)
        channel.send(zero, HELLO)
        assert ear.wait() == (0, HELLO)


def test_descriptors_are_copied_at_once(ear: Ear) -> None:
    read, write = os.pipe()
    with ear.channels.open(0) as worker:
        assert ear.channels.say(0, channel.Buffers(count=1), [write])
        os.close(write)
        message = read_one(worker)
        os.write(message.fds[0], b"x")
        os.close(message.fds[0])
    assert os.read(read, 8) == b"x"
    assert os.read(read, 8) == b""  # no copy is left
    os.close(read)


def test_a_long_message_reaches_a_worker_that_reads_late(ear: Ear) -> None:
    long = channel.Welcome(generation=1, settings={}, header="x" * 5_000_000)
    with ear.channels.open(0) as worker:
        assert ear.channels.say(0, long)
        assert ear.channels.say(0, channel.Raise(flag="stop", reason="asked"))
        worker.settimeout(10)
        inbox, got = channel.Inbox(), []
        while len(got) < 2:
            got += channel.receive(worker, inbox)
        assert got == [long, channel.Raise(flag="stop", reason="asked")]


def test_a_worker_that_says_what_is_no_message_is_hung_up_on_and_the_others_are_not(ear: Ear) -> None:
    with ear.channels.open(0) as bad, ear.channels.open(1) as good:
        bad.sendall(b"\0\0\0\2{}")
        assert hung_up(bad)
        channel.send(good, HELLO)
        assert ear.wait() == (1, HELLO)
        assert not ear.channels.say(0, HELLO)


def test_a_worker_that_never_reads_fills_no_memory(ear: Ear) -> None:
    with ear.channels.open(0) as worker:
        long = channel.Welcome(generation=1, settings={}, header="x" * 50_000_000)
        assert [ear.channels.say(0, long) for _ in range(4)] == [True, True, False, False]
        assert hung_up(worker)


def test_descriptors_that_a_worker_sends_are_not_kept(ear: Ear) -> None:
    before = open_files()
    read, write = os.pipe()
    with ear.channels.open(0) as worker:
        for _ in range(50):
            socket.send_fds(worker, [channel.encode(HELLO)], [write])
            ear.wait()
        assert open_files() <= before + 4
    os.close(read)
    os.close(write)


def test_a_new_worker_of_the_same_rank_takes_the_place_of_the_old(ear: Ear) -> None:
    with ear.channels.open(0) as old, ear.channels.open(0) as new:
        assert hung_up(old)
        channel.send(new, HELLO)
        assert ear.wait() == (0, HELLO)


def test_a_handler_that_fails_ends_no_conversation() -> None:
    done = threading.Event()

    def fail_once(_rank: int, message: channel.Message) -> None:
        if message.kind == "hello":
            raise RuntimeError
        done.set()

    channels = Channels(fail_once)
    with channels.open(0) as worker:
        channel.send(worker, HELLO)
        channel.send(worker, channel.Raise(flag="stop", reason=""))
        assert done.wait(10)
    channels.close()


def test_hanging_up_ends_every_conversation_and_nothing_is_left(ear: Ear) -> None:
    with ear.channels.open(0) as worker:
        channel.send(worker, HELLO)
        ear.wait()
        ear.channels.end()
        assert ear.channels.listening == ()
        with pytest.raises(ChannelError, match="hung up"):
            read_one(worker)


def test_the_last_words_of_a_worker_that_is_gone_are_heard_before_it_is_hung_up_on(ear: Ear) -> None:
    with ear.channels.open(0) as worker:
        for step in range(200):
            channel.send(worker, channel.Sealed(generation=1, step=step, index=0, persist=True))
    ear.channels.end()
    steps = {ear.heard.get_nowait()[1].step for _ in range(200)}  # type: ignore[attr-defined]  # they are all Sealed
    assert steps == set(range(200))
