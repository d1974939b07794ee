"""The agent's side of its conversations with workers: one thread for all of them.

Owns: the sockets, from before a worker starts until it is gone. Must not: know what a message means (`state` does), or believe a worker: one that
says what is no message is hung up on, one that does not listen fills no memory.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from trainer.errors import ChannelError
from trainer.wire import channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer.wire.channel import Message

log = structlog.get_logger("elasticd.agent.channels")

MAX_UNSENT: Final = 2 * channel.MAX_BYTES
"""Bytes kept for a worker that does not read."""


@dataclass(slots=True)
class _Talk:
    """One conversation."""

    local_rank: int
    sock: socket.socket
    inbox: channel.Inbox = field(default_factory=channel.Inbox)
    unsent: deque[tuple[memoryview, tuple[int, ...]]] = field(default_factory=deque)
    heard: bool = False


class Channels:
    """See the module. All methods may be called from any thread.

    Args:
        heard: called in the channels' thread with (local rank, message); it must not block.
    """

    def __init__(self, heard: Callable[[int, Message], None]) -> None:
        self._heard = heard
        self._lock = threading.RLock()
        self._hearing = threading.RLock()  # messages are heard in their order, by one thread at a time
        self._talks: dict[int, _Talk] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-channels", daemon=True)
        self._thread.start()

    @property
    def listening(self) -> tuple[int, ...]:
        """Local ranks of the workers that have said something and have not hung up: those that use `trainer`."""
        with self._lock:
            return tuple(rank for rank, talk in self._talks.items() if talk.heard)

    def open(self, local_rank: int) -> socket.socket:
        """Begin a conversation; the worker's end is returned, for the caller to hand on and close."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with self._lock:
            self._drop(local_rank)
            talk = _Talk(local_rank, ours)
            self._talks[local_rank] = talk
            self._selector.register(ours, selectors.EVENT_READ, talk)
        self._wake()
        return theirs

    def say(self, local_rank: int, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send when the worker reads; `fds` are copied at once. False if it has hung up, or has not read for long."""
        with self._lock:
            talk = self._talks.get(local_rank)
            if talk is None:
                return False
            data = memoryview(channel.encode(message))
            if sum(len(part) for part, _ in talk.unsent) + len(data) > MAX_UNSENT:
                log.error("worker_does_not_read", local_rank=local_rank)
                self._drop(local_rank)
                return False
            talk.unsent.append((data, tuple(os.dup(fd) for fd in fds)))
            self._flush(talk)
            return local_rank in self._talks

    def drain(self) -> None:
        """Hear at once what workers have said up to now."""
        with self._lock:
            talks = tuple(self._talks.values())
        for talk in talks:
            while self._read(talk):
                pass

    def end(self) -> None:
        """The workers are gone: hear what they said last, then hang up."""
        self.drain()
        with self._lock:
            talks = tuple(self._talks.values())
        for talk in talks:
            with self._lock:
                if self._talks.get(talk.local_rank) is talk:
                    self._drop(talk.local_rank)

    def close(self) -> None:
        """End every conversation and the thread."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=2.0)
        self.end()
        self._selector.close()
        os.close(self._wake_read)
        write, self._wake_write = self._wake_write, -1
        os.close(write)

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(OSError):  # closed, or full of unread wake-ups
            os.write(self._wake_write, b"w")

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                talk = key.data
                if talk is None:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                if events & selectors.EVENT_WRITE:
                    with self._lock:
                        self._flush(talk)
                if events & selectors.EVENT_READ:
                    self._read(talk)

    def _read(self, talk: _Talk) -> bool:
        """Take in what is there; whether there may be more."""
        with self._hearing:
            messages = self._receive(talk)
            for message in messages or ():
                try:
                    self._heard(talk.local_rank, message)
                except Exception:  # the thread serves the other workers too
                    log.exception("message_failed", local_rank=talk.local_rank, kind=message.kind)
        return messages is not None

    def _receive(self, talk: _Talk) -> list[Message] | None:
        """The messages that are whole now; None if there is nothing more to come for now."""
        with self._lock:
            if self._talks.get(talk.local_rank) is not talk:
                return None  # dropped meanwhile
            try:
                messages = channel.receive(talk.sock, talk.inbox, max_fds=0)
            except (BlockingIOError, InterruptedError):
                return None
            except ChannelError as error:
                if talk.heard:
                    log.info("worker_hung_up", local_rank=talk.local_rank, why=str(error))
                self._drop(talk.local_rank)
                return None
            talk.heard = talk.heard or bool(messages)
            return messages

    def _flush(self, talk: _Talk) -> None:
        """Send what the worker takes now; the lock is held."""
        try:
            while talk.unsent:
                data, fds = talk.unsent[0]
                sent = socket.send_fds(talk.sock, [data], list(fds)) if fds else talk.sock.send(data)
                for fd in fds:
                    os.close(fd)
                talk.unsent[0] = (data[sent:], ())
                if not talk.unsent[0][0]:
                    talk.unsent.popleft()
            wanted = selectors.EVENT_READ
        except BlockingIOError:
            wanted = selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError:
            self._drop(talk.local_rank)
            return
        if self._selector.get_key(talk.sock).events != wanted:
            self._selector.modify(talk.sock, wanted, talk)
            self._wake()

    def _drop(self, local_rank: int) -> None:
        """Hang up; the lock is held."""
        talk = self._talks.pop(local_rank, None)
        if talk is None:
            return
        self._selector.unregister(talk.sock)
        talk.sock.close()
        for _, fds in talk.unsent:
            for fd in fds:
                os.close(fd)
