"""States in this process's memory, and their way to disk: what an agent does for others, for a run without one.

Owns: buffers, and the thread that writes them. Must not: decide when, or know ranks.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from trainer.checkpoint import Info, Keep, retain, write
from trainer.errors import NoSpaceError
from trainer.keeper import Lent
from trainer.wire.board import Board, Held
from trainer.wire.extras import unpack_extras
from trainer.wire.layout import Layout

BUFFERS: Final = 2
"""One is written to disk while the next snapshot goes into the other."""
NOTHING: Final = Lent(board=-1, buffers=(), local_rank=0, local_world=1)
log = logging.getLogger("trainer")


class Shelf:
    """Buffers for one layout, allocated in a thread, since the kernel has to clear them.

    Args:
        layout: of the states.
        root: where they go if memory has no room for them.
    """

    def __init__(self, layout: Layout, root: Path) -> None:
        self.layout: Final = layout
        self.board: Final = Board.create(BUFFERS, 1)
        self._root = root
        self._buffers: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._allocate, name="elasticd-buffers", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        for fd in self._buffers:
            os.close(fd)
        self.board.close()

    def lend(self, wait: float) -> Lent | None:
        """Descriptors of its own for the caller; `NOTHING` if there is no room for any, None if they are not there within `wait` seconds."""
        self._thread.join(wait)
        if self._thread.is_alive():
            return None
        if not self._buffers:
            return NOTHING
        return Lent(board=os.dup(self.board.fd), buffers=tuple(os.dup(fd) for fd in self._buffers), local_rank=0, local_world=1)

    def descriptor(self, index: int) -> int:
        """Of a buffer; ours."""
        return self._buffers[index]

    def _allocate(self) -> None:
        made: list[int] = []
        try:
            for _ in range(BUFFERS):
                made.append(buffer_of(self.layout.size, self._root))  # noqa: PERF401 - what was made before a failure must be closed
        except OSError as error:
            log.error("no room for snapshots of %d bytes, so there will be no checkpoints: %s", self.layout.size, error)  # noqa: TRY400
            for fd in made:
                os.close(fd)
            return
        self._buffers = tuple(made)


def buffer_of(size: int, root: Path) -> int:
    """Descriptor of `size` bytes of memory, or where there is none, of a nameless file below `root`.

    Raises:
        OSError: neither can be had.
    """
    fd = -1
    try:
        fd = os.memfd_create("elasticd-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if _available() < 2 * size:
            raise MemoryError
        os.posix_fallocate(fd, 0, size)
    except (OSError, MemoryError):
        if fd >= 0:
            os.close(fd)
        fd = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, size)
    return fd


class Writer:
    """Writes snapshots to disk, one after the other, in a thread of its own.

    Args:
        root: directory of checkpoints.
        info: what to note about a state.
        keep: which ones stay.
    """

    def __init__(self, root: Path, info: Callable[[Held, Mapping[str, object]], Info], keep: Keep) -> None:
        self._root = root
        self._info = info
        self._keep = keep
        self._todo: SimpleQueue[tuple[Shelf, Held] | None] = SimpleQueue()
        self._pending = 0
        self._done = threading.Condition()
        self._written: set[tuple[int, int]] = set()
        self._thread = threading.Thread(target=self._run, name="elasticd-checkpoints", daemon=True)
        self._thread.start()

    def put(self, shelf: Shelf, held: Held) -> None:
        """Write that state, if it is still there and not written yet; nobody overwrites it meanwhile."""
        if not shelf.board.pin(held.index, held.generation, held.step):
            return
        with self._done:
            self._pending += 1
        self._todo.put((shelf, held))

    def wait(self) -> None:
        """Until all that was put is on disk, or could not be."""
        with self._done:
            self._done.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """`wait`, and end the thread. Twice does no harm."""
        self.wait()
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._todo.get()) is not None:
            shelf, held = one
            try:
                if held.order not in self._written:
                    self._write(shelf, held)
            except NoSpaceError as error:
                log.error("no checkpoint of step %d: %s; training goes on, the next one is tried when it is time", held.step, error)  # noqa: TRY400
            except Exception:
                log.exception("no checkpoint of step %d; training goes on", held.step)
            finally:
                shelf.board.unpin(held.index)
                with self._done:
                    self._pending -= 1
                    self._done.notify_all()

    def _write(self, shelf: Shelf, held: Held) -> None:
        layout = shelf.layout
        image = mapped(shelf.descriptor(held.index), layout.size)
        try:
            with memoryview(image) as view:
                data = unpack_extras(layout.get_extras(view)).get("data") or {}
                write(self._root, header=layout.header, image=view, info=self._info(held, data))
        finally:
            image.close()
        self._written.add(held.order)
        retain(self._root, self._keep)


def mapped(fd: int, size: int) -> mmap.mmap:
    """That much of a buffer, readable and writable."""
    return mmap.mmap(fd, size)


def _available() -> int:
    """Bytes of memory that the kernel would give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 1 << 62
