"""The control page: what each buffer holds, known to the agent and to all its workers at once, and to nobody's surprise after a kill.

Owns: the states of the buffers and every change of them. Must not: touch a buffer, know what a tensor is, import torch.

A memfd of two pages, mapped by all. Every change is made under a POSIX record lock on it, which the kernel takes from whoever dies, and in an order
that leaves each prefix of it harmless: a buffer becomes VALID by its last store, and stops being it by its first.

::

            begin (first local rank)           finish (last local rank)
    EMPTY ──────────────────────────► WRITING ──────────────────────────► VALID
      ▲          ▲                       │                                  │ │
      │          └───────────────────────┼────────── begin, the oldest ─────┘ │
      └────────────── tidy ──────────────┴───────────── discard ──────────────┘

Two local ranks that snapshot the same (generation, step) must write into the same buffer, or both not at all. So the first to ask decides, and the
answer stands: the buffer's own label, or an entry in the ring of skipped ones.

Workers run foreign code, and may write anything here. Whatever is read is bounded before use, the number of buffers is taken from the mapping's
owner, and nobody waits for the lock for ever. The memfd is sealed, so that no access can fail with SIGBUS.

A trap of POSIX locks: closing *any* descriptor of the file drops the process's lock. Close one that you passed to `attach` while nothing else runs.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from trainer.errors import ChannelError

EMPTY: Final = 0
WRITING: Final = 1
VALID: Final = 2
STATES: Final[Mapping[int, str]] = {EMPTY: "EMPTY", WRITING: "WRITING", VALID: "VALID"}
MAX_BUFFERS: Final = 4
MAX_LOCAL: Final = 1024
"""Local ranks, at most."""
BOARD_SIZE: Final = 8192
LOCK_SECONDS: Final = 2.0
"""How long to wait for the lock, which is held for microseconds. Longer than that means a stopped process."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAGIC: Final = b"elstcd\x00\x01"
_HEAD: Final = struct.Struct("<8sIII")  # magic, buffers, local ranks, next place in the ring
_PAIR: Final = struct.Struct("<QQ")  # generation, step
_PINS: Final = struct.Struct("<I")
_RING_AT: Final = 64
_RING: Final = 8
_BUFFERS_AT: Final = 256
_BUFFER: Final = 32  # state at 0, pins at 4, generation and step at 8
_DONE_AT: Final = 4096  # a byte for each local rank of each buffer
_NOBODY: Final = (2**64 - 1, 2**64 - 1)
_WAITED: Final = 1 << 63  # in the generation of what was skipped although somebody waited
_MAX_PINS: Final = 1 << 16

_within = threading.Lock()  # a record lock does not keep out another thread of its process


def _renew_lock() -> None:
    global _within  # noqa: PLW0603 - a fork while another thread holds it would leave it held for ever
    _within = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A whole state: the buffer it lies in, its generation, the optimizer steps done."""

    index: int
    generation: int
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """Newer is greater (PROTOCOL 21)."""
        return self.generation, self.step


class Board:
    """The control page, mapped. Use `create` or `attach`; any thread may use it.

    Args:
        fd: of the page; ours from now on.
        buffers: how many there are.

    Attributes:
        fd: to hand to workers.
        buffers: how many there are, 1 to `MAX_BUFFERS`.
    """

    def __init__(self, fd: int, buffers: int) -> None:
        self.fd = fd
        self.buffers: Final = buffers
        self._page = mmap.mmap(fd, BOARD_SIZE)

    @classmethod
    def create(cls, buffers: int, local_world: int) -> Self:
        """A fresh page: all buffers EMPTY.

        Raises:
            ValueError: a number out of bounds.
            OSError: no descriptor or no memory left.
        """
        if not 1 <= buffers <= MAX_BUFFERS:
            raise ValueError(f"{buffers} buffers")
        _check_local_world(local_world)
        fd = os.memfd_create("elasticd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, BOARD_SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            board = cls(fd, buffers)
        except BaseException:
            os.close(fd)
            raise
        board._write_head(local_world)
        board._forget_tickets()
        return board

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map somebody's page. The descriptor stays the caller's: it is duplicated.

        Raises:
            ChannelError: this is no control page.
        """
        own = -1
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
            sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if sealed and os.fstat(own).st_size == BOARD_SIZE:
                magic, buffers, local_world, _ = _HEAD.unpack(os.pread(own, _HEAD.size, 0))
                if magic == _MAGIC and 1 <= buffers <= MAX_BUFFERS and 1 <= local_world <= MAX_LOCAL:
                    return cls(own, buffers)
            problem = "not one of ours"
        except (OSError, ValueError) as error:
            problem = str(error)
        if own >= 0:
            os.close(own)
        raise ChannelError(f"descriptor {fd} is no control page: {problem}")

    def close(self) -> None:
        """Unmap it. Twice does no harm."""
        with _within:
            if self.fd >= 0:
                self._page.close()
                os.close(self.fd)
                self.fd = -1

    def begin(self, generation: int, step: int, *, wait: float = 0.0) -> int | None:
        """Choose the buffer for a snapshot, and mark it WRITING; or learn what another local rank of this node chose.

        Never one that is pinned, being written, or holds the newest valid state. An empty one first, then the oldest state's.

        Args:
            generation: of the world that trains.
            step: optimizer steps done.
            wait: seconds to wait for a reader to let go of a buffer, if that is what it takes. All local ranks wait, or none does. What was skipped
                before without waiting may still be had so.

        Returns:
            Its index; None to skip this snapshot, as all local ranks then do: there is no buffer to be had, or a state as new is held already.

        Raises:
            ChannelError: somebody holds the lock and does not let go.
        """
        _check_pair(generation, step)
        deadline = time.monotonic() + wait
        pause = 0.0005
        while True:
            waits = time.monotonic() < deadline
            with self._locked():
                decided, index = self._ticket(generation, step, insist=wait > 0)
                if not decided:
                    news = self._is_news(generation, step)
                    index = self._choose() if news else None
                    if index is not None:
                        self._label(index, generation, step)
                    elif not waits or not news:
                        self._skip(generation | _WAITED if wait > 0 else generation, step)
                        decided = True
            if decided or index is not None:
                return index
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def finish(self, index: int, generation: int, step: int, local_rank: int) -> bool:
        """This local rank's share of the snapshot is in the buffer.

        Returns:
            True for the one that made it whole: the buffer is VALID now. False while others write, or if the buffer was taken away meanwhile.
        """
        with self._locked():
            if not self._is(index, WRITING, generation, step) or not 0 <= local_rank < MAX_LOCAL:
                return False
            first = self._done_at(index)
            self._page[first + local_rank] = 1
            whole = all(self._page[first : first + self._local_world()])
            if whole:
                self._page[self._at(index)] = VALID
            return whole

    def claim(self, generation: int, step: int) -> int | None:
        """A buffer for a state that comes from elsewhere, marked WRITING. For the agent, while no worker runs; `seal` it or `discard` it.

        Chosen as by `begin`, but the state may be older than what is held. None: all others are pinned.
        """
        _check_pair(generation, step)
        with self._locked():
            index = self._choose()
            if index is not None:
                self._label(index, generation, step)
            return index

    def seal(self, index: int, generation: int, step: int) -> bool:
        """What was claimed is whole: VALID. False if the buffer was taken away meanwhile."""
        with self._locked():
            if not self._is(index, WRITING, generation, step):
                return False
            self._page[self._at(index)] = VALID
            return True

    def valid(self) -> list[Held]:
        """The whole states, the newest first."""
        with self._locked():
            return self._valid()

    def find(self, generation: int, step: int) -> Held | None:
        """The whole state of that generation and step, if there is one."""
        return next((held for held in self.valid() if held.order == (generation, step)), None)

    def pin(self, index: int, generation: int, step: int) -> bool:
        """Keep a state from being overwritten until `unpin`; False if that buffer does not hold it (any more). Pins are counted."""
        with self._locked():
            if not self._is(index, VALID, generation, step):
                return False
            self._set_pins(index, self._pins(index) + 1)
            return True

    def unpin(self, index: int) -> None:
        """Take one pin away."""
        with self._locked():
            if 0 <= index < self.buffers:
                self._set_pins(index, max(self._pins(index) - 1, 0))

    def retag(self, index: int, generation: int) -> bool:
        """Give a whole state to another generation, at the same step (PROTOCOL 21); False if that buffer holds none."""
        _check_pair(generation, 0)
        with self._locked():
            if not 0 <= index < self.buffers or self._page[self._at(index)] != VALID:
                return False
            _, step = self._pair(index)
            _PAIR.pack_into(self._page, self._at(index) + 8, generation, step)
            return True

    def discard(self, index: int) -> None:
        """Throw away what a buffer holds."""
        with self._locked():
            if 0 <= index < self.buffers:
                self._page[self._at(index)] = EMPTY

    def tidy(self, local_world: int | None = None) -> None:
        """After the last worker is gone: half-written buffers are EMPTY, and skipped snapshots forgotten. Whole states and pins stay.

        Args:
            local_world: how many local ranks there will be; None: as many as before.
        """
        count = self._local_world() if local_world is None else local_world
        _check_local_world(count)
        with self._locked():
            for index in range(self.buffers):
                if self._page[self._at(index)] != VALID:
                    self._page[self._at(index)] = EMPTY
            self._write_head(count)
            self._forget_tickets()

    def reset(self, local_world: int) -> None:
        """As `tidy`, and whole states are thrown away too. Pins stay: a reader may still be at it."""
        for index in range(self.buffers):
            self.discard(index)
        self.tidy(local_world)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep everybody else out.

        Raises:
            ChannelError: not within `LOCK_SECONDS`, or the page is closed.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        if not _within.acquire(timeout=LOCK_SECONDS):
            raise ChannelError(f"a thread has held the control page for {LOCK_SECONDS:g} s")
        try:
            self._lock_against_others(deadline)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)
        finally:
            _within.release()

    def _lock_against_others(self, deadline: float) -> None:
        if self.fd < 0:
            raise ChannelError("the control page is closed")
        pause = 0.0001
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise ChannelError(f"another process has held the control page for {LOCK_SECONDS:g} s", remedy="is it stopped?") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.002)

    # What follows is called with the lock held.

    def _at(self, index: int) -> int:
        return _BUFFERS_AT + index * _BUFFER

    def _done_at(self, index: int) -> int:
        return _DONE_AT + index * MAX_LOCAL

    def _local_world(self) -> int:
        local_world: int = _HEAD.unpack_from(self._page)[2]
        return min(max(local_world, 1), MAX_LOCAL)

    def _write_head(self, local_world: int) -> None:
        _HEAD.pack_into(self._page, 0, _MAGIC, self.buffers, local_world, 0)

    def _pair(self, index: int) -> tuple[int, int]:
        generation, step = _PAIR.unpack_from(self._page, self._at(index) + 8)
        return generation, step

    def _is(self, index: int, state: int, generation: int, step: int) -> bool:
        return 0 <= index < self.buffers and self._page[self._at(index)] == state and self._pair(index) == (generation, step)

    def _valid(self) -> list[Held]:
        found = []
        for index in range(self.buffers):
            generation, step = self._pair(index)
            if self._page[self._at(index)] == VALID and generation < 1 << 63 and step < 1 << 63:
                found.append(Held(index=index, generation=generation, step=step))
        return sorted(found, key=lambda held: held.order, reverse=True)

    def _pins(self, index: int) -> int:
        (pins,) = _PINS.unpack_from(self._page, self._at(index) + 4)
        return pins if pins < _MAX_PINS else 0

    def _set_pins(self, index: int, pins: int) -> None:
        _PINS.pack_into(self._page, self._at(index) + 4, pins)

    def _ticket(self, generation: int, step: int, *, insist: bool) -> tuple[bool, int | None]:
        """(whether it is decided, index or None for a skipped one). `insist`: that it was skipped when nobody would wait decides nothing."""
        for index in range(self.buffers):
            if self._is(index, WRITING, generation, step):
                return True, index
        ring = {_PAIR.unpack_from(self._page, _RING_AT + place * _PAIR.size) for place in range(_RING)}
        return (generation | _WAITED, step) in ring or (not insist and (generation, step) in ring), None

    def _is_news(self, generation: int, step: int) -> bool:
        newest = self._valid()[:1]
        return not newest or (generation, step) > newest[0].order

    def _choose(self) -> int | None:
        held = self._valid()
        free = [index for index in range(self.buffers) if self._page[self._at(index)] == EMPTY]
        oldest_first = [one.index for one in reversed(held[1:])]
        return next((index for index in [*free, *oldest_first] if not self._pins(index)), None)

    def _label(self, index: int, generation: int, step: int) -> None:
        at, done = self._at(index), self._done_at(index)
        self._page[at] = EMPTY  # first: what it held is not to be believed from here on, wherever we are killed
        self._page[done : done + MAX_LOCAL] = bytes(MAX_LOCAL)
        _PAIR.pack_into(self._page, at + 8, generation, step)
        self._page[at] = WRITING

    def _skip(self, generation: int, step: int) -> None:
        magic, buffers, local_world, place = _HEAD.unpack_from(self._page)
        _PAIR.pack_into(self._page, _RING_AT + place % _RING * _PAIR.size, generation, step)
        _HEAD.pack_into(self._page, 0, magic, buffers, local_world, (place + 1) % _RING)

    def _forget_tickets(self) -> None:
        for place in range(_RING):
            _PAIR.pack_into(self._page, _RING_AT + place * _PAIR.size, *_NOBODY)


def _check_local_world(local_world: int) -> None:
    if not 1 <= local_world <= MAX_LOCAL:
        raise ValueError(f"{local_world} local ranks, 1 to {MAX_LOCAL} are possible")


def _check_pair(generation: int, step: int) -> None:
    if not (0 <= generation < 1 << 63 and 0 <= step < 1 << 63):
        raise ValueError(f"generation {generation}, step {step}")
