"""An agent for tests of the session: it speaks the real channel, over a unix socket, and keeps real buffers. It decides nothing. Not a test."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from tests.support.etcd import await_
from tests.trainer import _programs as programs
from trainer.settings import Settings
from trainer.wire import channel
from trainer.wire.board import Board, Held
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Shelf:
    """Buffers of one layout."""

    layout: Layout
    board: Board
    buffers: list[int]

    @classmethod
    def make(cls, layout: Layout, local_world: int, count: int = 3) -> Shelf:
        buffers = []
        for _ in range(count):
            fd = os.memfd_create("test")
            os.posix_fallocate(fd, 0, layout.size)
            buffers.append(fd)
        return cls(layout, Board.create(count, local_world), buffers)

    def image(self, index: int) -> bytes:
        with mmap.mmap(self.buffers[index], self.layout.size) as mapping:
            return mapping[:]

    def close(self) -> None:
        self.board.close()
        for fd in self.buffers:
            os.close(fd)


@dataclass
class Agent:
    """The agent of one node.

    Attributes:
        path: where workers find it.
        local_world: how many there are.
        generation: of the world.
        resume: a shelf and what it holds, for workers to begin with.
        holds_back: answers no `Describe` until `release`: of any local rank, or of those in a list.
        count: of buffers to lend.
    """

    path: Path
    local_world: int
    generation: int = 5
    resume: tuple[Shelf, Held] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    holds_back: bool | list[int] = False
    count: int = 3
    heard: list[tuple[int, channel.Message]] = field(default_factory=list)
    shelf: Shelf | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._socks: dict[int, socket.socket] = {}
        self._asking: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def tell(self, local_rank: int, **values: Any) -> None:
        """Send Raise."""
        channel.send(self._socks[local_rank], channel.Raise(**{"reason": "the test wants it", **values}))

    def release(self) -> None:
        """Answer what was held back."""
        with self._lock:
            self.holds_back = False
            for sock in self._asking:
                self._lend(sock)

    def messages(self, kind: type[channel.Message]) -> list[tuple[int, Any]]:
        """(local rank, message) heard so far."""
        with self._lock:
            return [(rank, message) for rank, message in self.heard if isinstance(message, kind)]

    def await_(self, kind: type[channel.Message], count: int = 1) -> list[tuple[int, Any]]:
        return await_(lambda: found if len(found := self.messages(kind)) >= count else None, within=60, what=f"{count} {kind.__name__}")

    def valid(self) -> list[Held]:
        return self.shelf.board.valid() if self.shelf is not None else []

    def close(self) -> None:
        self._listener.close()
        for sock in self._socks.values():
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        inbox = channel.Inbox()
        rank = -1
        with contextlib.suppress(channel.ChannelError, OSError):
            while True:
                for message in channel.receive(sock, inbox):
                    if isinstance(message, channel.Hello):
                        rank = message.local_rank
                        self._socks[rank] = sock
                    with self._lock:
                        self.heard.append((rank, message))
                        self._answer(sock, message)

    def _answer(self, sock: socket.socket, message: channel.Message) -> None:
        if isinstance(message, channel.Hello):
            settings = Settings(**self.settings).model_dump(mode="json")
            if self.resume is None:
                channel.send(sock, channel.Welcome(generation=self.generation, settings=settings))
                return
            shelf, held = self.resume
            welcome = channel.Welcome(
                generation=self.generation,
                settings=settings,
                resume=held.index,
                step=held.step,
                header=shelf.layout.header_text,
                size=shelf.layout.size,
            )
            channel.send(sock, welcome, [shelf.board.fd, *shelf.buffers])
        elif isinstance(message, channel.Describe):
            layout = Layout.parse(message.header)
            if self.shelf is None or self.shelf.layout != layout:
                self.shelf = Shelf.make(layout, self.local_world, self.count) if self.count else None
            held_back = self.holds_back
            if held_back is True or (isinstance(held_back, list) and any(self._socks.get(rank) is sock for rank in held_back)):
                self._asking.append(sock)
            else:
                self._lend(sock)

    def _lend(self, sock: socket.socket) -> None:
        if self.shelf is None:
            channel.send(sock, channel.Buffers(count=0, why="the test has none"))
        else:
            channel.send(sock, channel.Buffers(count=len(self.shelf.buffers)), [self.shelf.board.fd, *self.shelf.buffers])


def under_agent(folder: Path, *, name: str, sockets: list[str], **arguments: Any) -> Any:
    """Run a program of `_programs` or of this module as a worker of the agent of its node."""
    node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sockets[node])
    os.environ[channel.FD_VARIABLE] = str(sock.detach())
    run: Callable[..., Any] = getattr(programs, name)
    return run(folder, **arguments)


def joined(folder: Path, *, sockets: list[str]) -> dict[str, Any]:
    """What a worker of an agent knows after `join`."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sockets[0])
    fd = sock.detach()
    os.set_inheritable(fd, True)
    os.environ[channel.FD_VARIABLE] = str(fd)
    run = trainer.join()
    return {"variable": os.environ.get(channel.FD_VARIABLE), "inheritable": os.get_inheritable(fd), "generation": run.generation, "step": run.step}
