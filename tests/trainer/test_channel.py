"""Messages between worker and agent: what is sent arrives, and what is no message is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ChannelError
from trainer.wire import channel

pytestmark = pytest.mark.timeout(30)

EXAMPLES = [
    channel.Hello(rank=3, local_rank=1, pid=4711),
    channel.Welcome(generation=7, settings={"snapshots": True, "checkpoint_every_s": 600.0}, resume=1, step=12, header='{"a":1}', size=4096, digest="ab"),
    channel.Restored(step=12, digest="ab", seconds=0.5),
    channel.Describe(header="{}", size=8192),
    channel.Buffers(count=2, where="disk", why="they did not fit"),
    channel.Raise(flag="stop", reason="node d joins", seconds=30.0),
    channel.Sealed(generation=7, step=13, index=2, persist=True),
    channel.Stopped(step=13, saved=True, reason="node d joins"),
    channel.Unfit(part="data", detail="1,797 samples here, 1,796 on rank 0"),
    channel.Telemetry(window={"rank": 3, "first": 1, "last": 20}),
    channel.Ranks(step=240, steps=120, columns={"seconds": [0.02, 0.03]}),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_every_message_arrives_as_it_was_sent(message: channel.Message, ends: tuple[socket.socket, socket.socket]) -> None:
    channel.send(ends[0], message)
    assert channel.receive(ends[1], channel.Inbox()) == [message]


def test_descriptors_come_with_the_message_that_speaks_of_them(ends: tuple[socket.socket, socket.socket]) -> None:
    read, write = os.pipe()
    channel.send(ends[0], channel.Raise(flag="checkpoint", reason="asked"))
    channel.send(ends[0], channel.Buffers(count=1), [write])
    channel.send(ends[0], channel.Raise(flag="stop", reason="asked"))
    inbox, got = channel.Inbox(), []
    while len(got) < 3:
        got += channel.receive(ends[1], inbox)
    assert [message.kind for message in got] == ["raise", "buffers", "raise"]
    assert [len(message.fds) for message in got] == [0, 1, 0]
    os.write(got[1].fds[0], b"x")
    assert os.read(read, 1) == b"x"
    for fd in (read, write, *got[1].fds):
        os.close(fd)


@given(st.lists(st.sampled_from(EXAMPLES), max_size=6), st.integers(min_value=1, max_value=40))
def test_messages_arrive_however_the_stream_is_cut(messages: list[channel.Message], piece: int) -> None:
    stream = b"".join(map(channel.encode, messages))
    inbox, got = channel.Inbox(), []
    for start in range(0, len(stream), piece):
        got += inbox.feed(stream[start : start + piece])
    assert got == messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b'"hello"',
        b"{}",
        b'{"kind":"nonsense"}',
        b'{"kind":["hello"]}',
        b'{"kind":"hello"}',
        b'{"kind":"hello","rank":1,"local_rank":0,"pid":"1"}',
        b'{"kind":"hello","rank":true,"local_rank":0,"pid":1}',
        b'{"kind":"hello","rank":1.0,"local_rank":0,"pid":1}',
        b'{"kind":"hello","rank":1,"local_rank":0,"pid":1,"fds":[0]}',
        b'{"kind":"hello","rank":1,"local_rank":0,"pid":1,"more":0}',
        b'{"kind":"sealed","generation":1,"step":1,"index":0,"persist":1}',
        b'{"kind":"welcome","generation":1,"settings":[]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ChannelError):
        channel.decode(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    inbox = channel.Inbox()
    try:
        inbox.feed(data)
    except ChannelError:
        return
    assert len(data) < 4 or int.from_bytes(data[:4], "big") > len(data) - 4 or data[4:].startswith(b'{"kind"')


def test_a_message_longer_than_any_may_be_is_refused_before_it_is_here() -> None:
    with pytest.raises(ChannelError, match="longer"):
        channel.Inbox().feed((channel.MAX_BYTES + 1).to_bytes(4, "big"))


def test_one_that_hung_up_is_told_apart_from_silence(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive(ends[1], channel.Inbox())
    ends[0].close()
    with pytest.raises(ChannelError, match="hung up"):
        channel.receive(ends[1], channel.Inbox())
    with pytest.raises(ChannelError, match="cannot send"):
        channel.send(ends[1], EXAMPLES[0])


def test_every_kind_has_an_example_here() -> None:
    kinds = {cls.kind for cls in channel.Message.__subclasses__()}
    assert kinds == {message.kind for message in EXAMPLES}
    assert all(json.loads(channel.encode(message)[4:]).keys() == {"kind", *(f.name for f in fields(message))} - {"fds"} for message in EXAMPLES)
