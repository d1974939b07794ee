"""Writing a checkpoint, so that whatever ends it leaves the old one or the new one.

Owns: one checkpoint from nothing to its name. Must not: decide when, remove other checkpoints, or try again (`elasticd.agent.persist` does).

The order is what makes it safe: data, fsync; manifest, fsync; fsync of the draft's directory; rename to the name that readers look for; fsync of
the directory above. Nothing is ever written over. Each writer has a draft of its own, named by chance and locked while it lives, so that two that
write the same state do not touch each other: the second one to finish finds the first one's, and is content with it.

Data goes past the page cache (O_DIRECT) where the file system allows: on ext4 that takes half the time of write and fsync, and leaves the cache to
the training. The sums are made beside it, by a second thread on the same memory. The file is not allocated beforehand: where the
file system cannot, glibc writes a byte to each block.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainer.checkpoint.disk import check_space, draft_of, lock, make_root, saying, sync_directory
from trainer.checkpoint.load import set_aside, verify
from trainer.checkpoint.manifest import CHUNK, DATA, MANIFEST, Info, Manifest, digest_of, finite, header_digest_of, name_of, sum_of
from trainer.errors import CancelledError, DamagedError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_BLOCK: Final = 4096
"""What O_DIRECT wants addresses and lengths to be multiples of, on all but the oddest disks."""
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def write(
    root: Path,
    *,
    header: bytes,
    image: memoryview | mmap.mmap,
    info: Info,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write a checkpoint into `root`, durable when this returns.

    Args:
        root: directory of checkpoints; created if missing.
        header, image: the state (`trainer.wire.layout`); nobody may change the image meanwhile. Fastest if the length of the header and the address
            and length of the image are multiples of 4096.
        info: what is known of it.
        cancel: asked before each 16 MiB; True ends it.
        progress: told the bytes of the image that are written so far.

    Returns:
        its manifest. If another writer has finished the same state meanwhile, that one's.

    Raises:
        NoSpaceError: it does not fit. Nothing is left behind, no other checkpoint is touched.
        CancelledError: `cancel` said so. Nothing is left behind.
        StateError: `info` holds what JSON cannot, or there is another state of this generation and step.
        OSError: the disk refuses in another way; the path is its file name. Only a draft may be left, for `tidy`.
    """
    started = time.monotonic()
    final = root / name_of(info.generation, info.step)
    make_root(root)
    with memoryview(image) as whole, whole.cast("B") as view:
        check_space(root, len(header) + len(view))
        with draft(final) as ours:
            sums = put(ours.fd, ours.data, header, view, cancel=cancel, progress=progress)
            manifest = manifest_of(info, header, len(view), sums, seconds=time.monotonic() - started)
            return ours.publish(final, manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A checkpoint that is not complete yet: its directory, and its data file, open and locked."""

    path: Path
    fd: int

    @property
    def data(self) -> Path:
        """The data file."""
        return self.path / DATA

    def publish(self, final: Path, manifest: Manifest) -> Manifest:
        """Make all of it durable and give it its name.

        Raises:
            StateError, NoSpaceError, OSError: as `write`.
        """
        content = manifest.encode()
        with saying(self.data):
            os.fsync(self.fd)
        with saying(self.path / MANIFEST):
            _write_small(self.path / MANIFEST, content)
        with saying(self.path):
            sync_directory(self.path)
        with saying(final):
            kept = manifest if _renamed(self.path, final) else _yield_to(self.path, final, manifest)
            sync_directory(final.parent)
        return kept


@contextmanager
def draft(final: Path) -> Iterator[Draft]:
    """A draft of `final`, its own writer's alone. Gone afterwards unless it was published."""
    path, fd = _open_draft(final)
    try:
        yield Draft(path=path, fd=fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)  # after publish there is nothing of that name
        os.close(fd)


def put(
    fd: int,
    path: Path,
    header: bytes,
    image: memoryview,
    *,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[bytes]:
    """Write header and image to an empty file, past the page cache where possible.

    Returns:
        the sum of each chunk of the image.

    Raises:
        CancelledError, NoSpaceError, OSError: as `write`. No view of `image` is left in any case.
    """
    with saying(path), ExitStack() as stack:
        _go_direct(fd, direct=len(header) % _BLOCK == 0)
        _write_aligned(fd, header)
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="elasticd-sums"))
        sums: list[Future[bytes]] = []
        for start in range(0, len(image), CHUNK):
            if cancel is not None and cancel():
                raise CancelledError(f"the writing of {path.parent.name} was ended")
            with image[start : start + CHUNK] as chunk:
                sums.append(pool.submit(_sum, image, start))
                _write_all(fd, chunk, len(header) + start)
            if progress is not None:
                progress(min(start + CHUNK, len(image)))
        return [item.result() for item in sums]


def manifest_of(info: Info, header: bytes, size: int, sums: list[bytes], *, seconds: float) -> Manifest:
    """What is to be said of a state of `size` bytes that took `seconds` to write."""
    return Manifest(
        job=info.job,
        generation=info.generation,
        step=info.step,
        digest=digest_of(header, sums),
        size=size,
        header_size=len(header),
        header_digest=header_digest_of(header),
        chunk_bytes=CHUNK,
        chunks=tuple(item.hex() for item in sums),
        created_at=time.time(),
        seconds=round(seconds, 3),
        world=info.world,
        data=info.data,
        fingerprint=info.fingerprint,
        packages=info.packages,
        metrics=finite(info.metrics),
    )


def _sum(image: memoryview, start: int) -> bytes:
    with image[start : start + CHUNK] as chunk:
        return sum_of(chunk)


def _open_draft(final: Path) -> tuple[Path, int]:
    """A directory and its data file, locked. Somebody who tidies up may take it in the moment before the lock: then another."""
    while True:
        path = draft_of(final)
        with saying(path):
            path.mkdir()
            try:
                fd = os.open(path / DATA, _NEW_FILE, 0o666)
            except FileNotFoundError:
                continue
            except OSError:
                path.rmdir()
                raise
        if lock(fd):
            return path, fd
        os.close(fd)


def _go_direct(fd: int, *, direct: bool) -> None:
    """Write past the page cache, or not. A file system that cannot says so here, or at the first write."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
    except OSError:
        pass


def _write_aligned(fd: int, content: bytes) -> None:
    """Write `content` at the beginning, from memory that is aligned as O_DIRECT wants it."""
    if not content:
        return
    with mmap.mmap(-1, len(content)) as page, memoryview(page) as view, view[: len(content)] as part:
        part[:] = content
        _write_all(fd, part, 0)


def write_at(fd: int, content: bytes, offset: int) -> None:
    """Write all of `content` at `offset`, by way of the page cache."""
    with memoryview(content) as view:
        _write_all(fd, view, offset)


def _write_all(fd: int, part: memoryview, offset: int) -> None:
    """Write all of `part`. Where O_DIRECT is refused (no such file system, address or length), that is the end of it for this file."""
    done = 0
    while done < len(part):
        with part[done:] as rest:
            try:
                done += os.pwrite(fd, rest, offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT:
                    raise
                _go_direct(fd, direct=False)


def _write_small(path: Path, content: bytes) -> None:
    fd = os.open(path, _NEW_FILE | os.O_EXCL, 0o666)
    try:
        write_at(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _renamed(path: Path, final: Path) -> bool:
    """False: there is one already. A rename of directories replaces an empty one, which no reader would have taken for a checkpoint."""
    try:
        path.rename(final)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            raise
        return False
    return True


def _yield_to(path: Path, final: Path, manifest: Manifest) -> Manifest:
    """Another one was quicker: keep that if it is the same and whole, else put it aside."""
    try:
        theirs = verify(final)
    except DamagedError as error:
        set_aside(final, str(error))
        path.rename(final)
        return manifest
    if theirs.digest != manifest.digest:
        raise StateError(f"{final} holds another state of the same generation and step", remedy="give each job a directory of its own")
    return theirs
