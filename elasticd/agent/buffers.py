"""A node's states in memory: the buffers that workers write their snapshots into, and that outlive the workers.

Owns: the memory, its control page, and the digests of what lies there. Must not: know where a state comes from or goes to, or which one counts.

Three buffers: one is written, one is valid, one may be pinned by a reader (with two, a crash during the persisting of one falls back to the state
that is being persisted, older than a cadence). They are memfds, handed to workers as open descriptors, so a worker of another user needs no right
to anything, and nothing is left behind by whatever dies. Where memory does not suffice they are two, then two unnamed files on the checkpoints'
disk, then none; that is never an error, and always said.

No access may end in SIGBUS, in us least of all: memfds are sealed at their size, and no file system bounds them; files have their blocks from the
start. (A worker that truncates such a file on purpose can still end its own job's agent so.)

A state stays where it is as long as anybody reads it: `reading` pins it. Should the layout change meanwhile, the old memory goes with its reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import structlog

from elasticd.agent.memory import available
from trainer.checkpoint.manifest import CHUNK, digest_of, sum_of
from trainer.errors import ChannelError, StateError
from trainer.wire.board import Board, Held
from trainer.wire.layout import Layout
from trainer.wire.pages import populate

log = structlog.stdlib.get_logger(__name__)

WANTED: Final = 3
"""Buffers, where there is room for them."""
LEAST: Final = 2
PERCENT: Final = 60
"""Share of the available memory that buffers may take."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HASHERS: Final = min(4, os.cpu_count() or 1)

Ref = tuple[int, int, str]
"""Generation, step, digest."""


class Buffers:
    """The buffers of one node. Any thread may use them; none exist before `open`.

    Attributes:
        layout: of the states in them; None before `open`.
        where: "memory", "disk", or "" if there are none.
        why: one line if they are not three in memory, else "".
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.where = ""
        self.why = "no worker has described its state yet"
        self._store: _Store | None = None
        self._local_world = 1
        self._lock = threading.RLock()

    def open(self, layout: Layout, *, local_world: int, budget_bytes: int | None = None, percent: int = PERCENT, disk: Path | None = None) -> int:
        """Have buffers for states of this layout. Those there are stay, with what they hold, if they have that layout; else they are replaced.

        Args:
            layout: of the states.
            local_world: how many workers write. It changes only while none runs.
            budget_bytes: memory they may take together; None: `percent` of what is available.
            percent: see `budget_bytes`.
            disk: directory for files, if memory does not suffice; None: there is none.

        Returns:
            How many there are: 3, 2 or 0. `where` and `why` say more.
        """
        with self._lock:
            if self._store is not None and self.layout == layout:
                if local_world != self._local_world:
                    self._store.board.tidy(local_world)
            else:
                self.close()
                self.layout = layout
                self._store, self.where, self.why = _allocate(layout, local_world, budget_bytes, percent, disk)
            self._local_world = local_world
            return self.count

    @property
    def count(self) -> int:
        """How many there are."""
        store = self._store
        return len(store.fds) if store else 0

    @property
    def board(self) -> Board | None:
        """Their control page."""
        store = self._store
        return store.board if store else None

    def fds(self) -> tuple[int, ...]:
        """What a worker needs: the control page and each buffer, in this order; () if there are none. They stay ours, until the next `open`."""
        store = self._store
        return (store.board.fd, *store.fds) if store else ()

    def held(self) -> list[Held]:
        """The whole states, the newest first."""
        store = self._store
        return _valid(store) if store else []

    def index_of(self, generation: int, step: int) -> int:
        """The buffer that holds that state; -1 if none does."""
        return next((held.index for held in self.held() if held.order == (generation, step)), -1)

    def inventory(self) -> tuple[Ref, ...]:
        """The whole states, the newest first, by content. Each is hashed once, pinned; one that a worker overwrites meanwhile is left out."""
        with self._lock:
            store = self._store
            found = [(held, store.digest(held)) for held in _valid(store)] if store else []
        return tuple((held.generation, held.step, digest) for held, digest in found if digest)

    def holds(self, digest: str) -> bool:
        """Whether a state of that content lies here. Only those that were asked for before are known by content (`inventory`, `retag`)."""
        return self._known(digest) is not None

    def _known(self, digest: str) -> Held | None:
        store = self._store
        return next((held for held in _valid(store) if store.digests.get((held.index, *held.order)) == digest), None) if store else None

    @contextmanager
    def reading(self, generation: int, step: int) -> Iterator[tuple[bytes, memoryview]]:
        """Yield header and image of a state, which nobody overwrites before the end of the block. The image is read-only.

        Raises:
            StateError: it does not lie here.
        """
        store, layout = self._store, self.layout
        for held in _valid(store) if store else []:
            if store and layout and held.order == (generation, step):
                with store.pinned(held) as image:
                    yield layout.header, image
                    return
        raise StateError(f"step {step} of generation {generation} is not held in memory")

    @contextmanager
    def reading_digest(self, digest: str) -> Iterator[tuple[bytes, memoryview]]:
        """As `reading`, for a state that `holds`."""
        held = self._known(digest)
        if held is None:
            raise StateError(f"no state {digest} is held in memory")
        with self.reading(held.generation, held.step) as found:
            yield found

    def place(self, layout: Layout, generation: int, step: int, fill: Callable[[memoryview], None], *, digest: str = "") -> int:
        """Put a state from elsewhere into a buffer, while no worker runs. It counts only once `fill` has returned.

        Args:
            layout: that of the buffers.
            generation, step: what it is to be known as.
            fill: writes the image into the memory it is given; what it raises is passed on, and nothing is held.
            digest: of its content, if `fill` makes sure of it.

        Returns:
            The buffer's index.

        Raises:
            StateError: there are no buffers of that layout, or all are being read.
        """
        with self._lock:
            store = self._store
            if store is None or self.layout != layout:
                raise StateError(f"there is no room for the state in memory: {self.why if store is None else 'it is of another layout'}")
            index = store.board.claim(generation, step)
            if index is None:
                raise StateError("there is no room for the state in memory: every buffer is being read")
            store.forget(index)
            try:
                with store.images[index][:] as image:
                    fill(image)
                if not store.board.seal(index, generation, step):
                    raise StateError("the control page was changed while a state was put in place")
            except BaseException:
                store.board.discard(index)
                raise
            if digest:
                store.digests[index, generation, step] = digest
            return index

    def retag(self, digest: str, generation: int) -> bool:
        """Keep the state of that content alone, as one of `generation` (PROTOCOL 21), while no worker runs. False, and nothing changes, without it."""
        with self._lock:
            store = self._store
            wanted = next((held for held in self.held() if store and store.digest(held) == digest), None)
            if store is None or wanted is None or not store.board.retag(wanted.index, generation):
                return False
            for index in range(len(store.fds)):
                store.forget(index)
                if index != wanted.index:
                    store.board.discard(index)
            store.digests[wanted.index, generation, wanted.step] = digest
            return True

    def discard_all(self) -> None:
        """Throw away every state. Readers are not disturbed."""
        with self._lock:
            if self._store is not None:
                self._store.board.reset(self._local_world)
                self._store.digests.clear()

    def tidy(self) -> None:
        """After the last worker is gone: what was half-written is void."""
        with self._lock:
            if self._store is not None:
                self._store.board.tidy(self._local_world)

    def close(self) -> None:
        """Let everything go; `open` makes new ones. Twice does no harm."""
        with self._lock:
            if self._store is not None:
                self._store.close()
            self._store, self.layout, self.where, self.why = None, None, "", "the buffers are closed"


class _Store:
    """Control page and buffers of one layout, mapped. The mapping of a buffer lives as long as somebody has a view of it.

    Args:
        layout: of the states.
        local_world: how many workers write.
        fds: of the buffers; ours from now on, and closed if this fails.
        in_memory: they are memfds.

    Raises:
        OSError: no address space, descriptor or memory left.
    """

    def __init__(self, layout: Layout, local_world: int, fds: Sequence[int], *, in_memory: bool) -> None:
        self.layout: Final = layout
        self.fds: Final = tuple(fds)
        self.digests: Final[dict[tuple[int, int, int], str]] = {}
        try:
            self.images: Final = [memoryview(mmap.mmap(fd, layout.size)) for fd in fds]
            self.board: Final = Board.create(len(fds), local_world)
        except BaseException:
            _close(fds)
            raise
        self._closing: Final = threading.Event()
        self._toucher = threading.Thread(target=self._touch, name="elasticd-populate", daemon=True)
        if in_memory:
            self._toucher.start()

    def _touch(self) -> None:
        """Allocate and clear the pages, so that no worker waits for that in the middle of a step. A gigabyte takes half a second and more."""
        for image in self.images:
            populate(image, self._closing.is_set)

    @contextmanager
    def pinned(self, held: Held) -> Iterator[memoryview]:
        """The image of a state, pinned."""
        if not self.board.pin(held.index, held.generation, held.step):
            raise StateError(f"step {held.step} of generation {held.generation} is not held in memory any more")
        try:
            with self.images[held.index].toreadonly() as image:
                yield image
        finally:
            with suppress(ChannelError):  # the page was closed, or a worker holds it: then nobody will write this buffer either
                self.board.unpin(held.index)

    def digest(self, held: Held) -> str:
        """Of that state; "" if it is gone."""
        key = (held.index, held.generation, held.step)
        if key not in self.digests:
            self.forget(held.index)
            try:
                with self.pinned(held) as image:
                    digest = _digest(self.layout.header, image)
            except StateError:
                return ""
            self.digests[key] = digest
        return self.digests[key]

    def forget(self, index: int) -> None:
        """What that buffer's content hashed to."""
        for key in [key for key in self.digests if key[0] == index]:
            del self.digests[key]

    def close(self) -> None:
        """Close the descriptors. Memory goes when the last reader has ended."""
        self._closing.set()
        if self._toucher.ident is not None:
            self._toucher.join()
        self.board.close()
        for fd in self.fds:
            os.close(fd)
        for image in self.images:
            with suppress(BufferError):  # a reader has a view of it, and with it the mapping
                image.release()


def _valid(store: _Store) -> list[Held]:
    try:
        return store.board.valid()
    except ChannelError as error:  # closed by another thread, or held by a stopped worker: no state can be relied on now
        log.warning("the control page cannot be read", error=str(error))
        return []


def _digest(header: bytes, image: memoryview) -> str:
    """As `trainer.checkpoint.digest_image`, on several cores: who asks waits with a whole generation."""

    def one(begin: int) -> bytes:
        with image[begin : begin + CHUNK] as part:
            return sum_of(part)

    with ThreadPoolExecutor(_HASHERS) as pool:
        return digest_of(header, list(pool.map(one, range(0, len(image), CHUNK))))


def _allocate(layout: Layout, local_world: int, budget_bytes: int | None, percent: int, disk: Path | None) -> tuple[_Store | None, str, str]:
    """(buffers, where, why not three in memory)."""
    size = layout.size
    budget, bound = _budget(budget_bytes, percent)
    why = ""
    for count in (WANTED, LEAST):
        if count * size > budget:
            why = why or f"{count} of {size >> 20} MiB do not fit into {budget >> 20} MiB ({bound})"
            continue
        try:
            store = _Store(layout, local_world, _in_memory(count, size), in_memory=True)
        except OSError as error:
            why = f"no memory for {count} of {size >> 20} MiB: {error.strerror}"
            continue
        if why:
            log.warning("two snapshot buffers instead of three: snapshots are skipped while a checkpoint is written", why=why)
        return store, "memory", why
    if disk is None:
        why += ", and there is no checkpoint directory"
    else:
        try:
            store = _Store(layout, local_world, _on_disk(LEAST, size, disk), in_memory=False)
            log.warning("snapshots lie on disk, and are as slow as that", why=why, directory=str(disk))
            return store, "disk", why
        except OSError as error:
            why += f"; {disk}: {error.strerror}"
    log.warning("no snapshots are taken, a crash falls back to the last checkpoint", why=why)
    return None, "", why


def _budget(budget_bytes: int | None, percent: int) -> tuple[int, str]:
    if budget_bytes is not None:
        return budget_bytes, "as configured"
    left = available()
    return left.nbytes * percent // 100, f"{percent} % of what {left.bound} leaves"


def _in_memory(count: int, size: int) -> list[int]:
    fds: list[int] = []
    try:
        for _ in range(count):
            fds.append(os.memfd_create("elasticd-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.truncate(fds[-1], size)  # the kernel's books: with strict overcommit this fails, not a later access
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        _close(fds)
        raise
    return fds


def _on_disk(count: int, size: int, folder: Path) -> list[int]:
    """Files without a name: whatever ends us takes them along."""
    fds: list[int] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            with TemporaryFile(dir=folder, buffering=0) as file:
                fds.append(os.dup(file.fileno()))
            os.posix_fallocate(fds[-1], 0, size)
    except OSError:
        _close(fds)
        raise
    return fds


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
