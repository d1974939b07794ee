"""The worker's end of the channel to its agent.

Owns: the socket, and what has come through it. Must not: decide anything, import torch, or open what it is told of.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from trainer.errors import ChannelError
from trainer.keeper import NOTHING_ASKED, Asked, Beginning, Lent
from trainer.settings import Settings
from trainer.wire import channel
from trainer.wire.layout import Layout


def inherited_socket(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The socket that the agent left us, None if there is none. Nobody whom this process starts will see it.

    Raises:
        ChannelError: what the variable names is none.
    """
    text = environ.pop(channel.FD_VARIABLE, "")
    if not text:
        return None
    try:
        fd = int(text)
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except (ValueError, OSError) as error:
        raise ChannelError(f"{channel.FD_VARIABLE}={text[:20]!r} is no socket: {error}") from None
    sock.setblocking(True)
    return sock


class AgentKeeper:
    """A `trainer.keeper.Keeper`: the agent of this node.

    Args:
        sock: to it; ours from now on.
        rank, local_rank, local_world: of this process.

    Raises:
        ChannelError: it does not answer, or says what we do not understand.
    """

    lasting: Final = True

    def __init__(self, sock: socket.socket, *, rank: int, local_rank: int, local_world: int) -> None:
        self._sock = sock
        self._inbox = channel.Inbox()
        self._place = (local_rank, local_world)
        self._asked = NOTHING_ASKED
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lent: channel.Buffers | None = None
        self._unsent = memoryview(b"")
        channel.send(sock, channel.Hello(rank=rank, local_rank=local_rank, pid=os.getpid()))
        self.beginning: Beginning | None = None
        # No deadline: a state may have to come from another node first. A signal still ends us, there is no handler yet.
        self._early: list[channel.Message] = []
        welcome = self._await_welcome()
        self.generation = welcome.generation
        self.settings = Settings.model_validate(welcome.settings)
        self.skip = welcome.skip
        self._begin(welcome)
        for message in self._early:
            self._take(message)

    def look(self) -> Asked:
        """See `Keeper`."""
        while self._readable(0.0):
            self._receive()
        asked, self._asked = self._asked, NOTHING_ASKED
        return asked

    def describe(self, layout: Layout) -> None:
        """See `Keeper`."""
        self._drop()
        self._say(channel.Describe(header=layout.header_text, size=layout.size))

    def lend(self, *, wait: float = 0.0) -> Lent | None:
        """See `Keeper`."""
        deadline = time.monotonic() + wait
        while self._lent is None and self._readable(max(0.0, deadline - time.monotonic())):
            self._receive()
        if self._lent is None:
            return None
        answer, self._lent = self._lent, None
        return self._as_lent(answer.fds)

    def restored(self, step: int, digest: str, seconds: float) -> None:
        """See `Keeper`."""
        self._say(channel.Restored(step=step, digest=digest, seconds=seconds))

    def sealed(self, step: int, index: int) -> None:
        """See `Keeper`."""
        self._say(channel.Sealed(generation=self.generation, step=step, index=index, persist=True))

    def stopped(self, step: int, *, saved: bool, reason: str) -> None:
        """See `Keeper`. The agent reads it whenever it likes: nothing is to be waited for."""
        self._say(channel.Stopped(step=step, saved=saved, reason=reason))

    def unfit(self, part: str, detail: str) -> None:
        """See `Keeper`."""
        self._say(channel.Unfit(part=part, detail=detail))

    def tell(self, message: channel.Telemetry | channel.Ranks, *, wait: float = 0.0) -> bool:
        """See `Keeper`. An agent that is gone is `look`'s to find."""
        deadline = time.monotonic() + wait
        try:
            if not self._push(deadline):
                return False
            data = memoryview(channel.encode(message))
            self._unsent = data
            if not self._push(deadline) and len(self._unsent) == len(data):
                self._unsent = memoryview(b"")
                return False
        except OSError:
            self._unsent = memoryview(b"")
            return False
        return True  # if a part of it was taken, the rest goes before anything else

    def close(self) -> None:
        """See `Keeper`. The channel stays open until the process ends: a worker that hangs up has failed."""
        with suppress(ChannelError):
            self._flush()
        self._drop()

    def _await_welcome(self) -> channel.Welcome:
        while True:
            messages = channel.receive(self._sock, self._inbox)
            for index, message in enumerate(messages):
                if isinstance(message, channel.Welcome):
                    self._early = messages[index + 1 :]
                    return message
                self._early.append(message)

    def _begin(self, welcome: channel.Welcome) -> None:
        if welcome.resume < 0:
            for fd in welcome.fds:
                os.close(fd)
            return
        lent = self._as_lent(welcome.fds)
        if welcome.resume >= len(lent.buffers):
            raise ChannelError(f"the agent speaks of a state in buffer {welcome.resume}, and sent {len(welcome.fds)} descriptors")
        self.beginning = Beginning(lent=lent, index=welcome.resume, step=welcome.step, layout=Layout.parse(welcome.header))

    def _say(self, message: channel.Message) -> None:
        self._flush()
        channel.send(self._sock, message)

    def _flush(self) -> None:
        rest, self._unsent = self._unsent, memoryview(b"")
        if rest:
            try:
                self._sock.sendall(rest)
            except OSError as error:
                raise ChannelError(f"cannot send: {error.strerror or error}") from None

    def _push(self, deadline: float) -> bool:
        """Send what is begun, as far as there is room for it; whether nothing is left.

        Raises:
            OSError: the other side is gone.
        """
        while self._unsent:
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return False
                room = select.poll()
                room.register(self._sock, select.POLLOUT)
                room.poll(1000.0 * left)
        return True

    def _receive(self) -> None:
        for message in channel.receive(self._sock, self._inbox):
            self._take(message)

    def _take(self, message: channel.Message) -> None:
        if isinstance(message, channel.Buffers):
            self._drop()
            self._lent = message
        elif isinstance(message, channel.Raise):
            old = self._asked
            stop = old.stop or message.flag == "stop"
            self._asked = Asked(stop=stop, checkpoint=old.checkpoint or message.flag == "checkpoint", reason=message.reason, seconds=message.seconds)
        else:
            raise ChannelError(f"the agent sent a {message.kind} message, which is a worker's to send or came too late")

    def _as_lent(self, fds: tuple[int, ...]) -> Lent:
        local_rank, local_world = self._place
        if len(fds) < 2:
            for fd in fds:
                os.close(fd)
            return Lent(board=-1, buffers=(), local_rank=local_rank, local_world=local_world)
        return Lent(board=fds[0], buffers=fds[1:], local_rank=local_rank, local_world=local_world)

    def _readable(self, seconds: float) -> bool:
        return bool(self._poll.poll(1000.0 * seconds))

    def _drop(self) -> None:
        if self._lent is not None:
            for fd in self._lent.fds:
                os.close(fd)
            self._lent = None
