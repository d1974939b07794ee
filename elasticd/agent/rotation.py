"""Keeping a worker's output below its cap while the worker writes it.

Owns: how one file gives up its older lines, and where these go. Must not: look for files (`outputs` opens them), decide when, or hold what is in
them in memory.

A worker writes to its files by itself: an agent that hangs must not hold up training. So a file cannot be exchanged; it is made shorter from its
beginning. What is taken away is copied before, by the kernel, to a file beside the rank's directory::

    generation-000007/rank-3/stdout.log        what the worker writes: the newest lines
    generation-000007/rank-3.stdout.log.1      what came before, whole: the two after each other are what was written
    generation-000007/rank-3.stdout.log.2      and before that

The rank's directory may be another user's, who could put anything in the way of a file that we make; the generation's is ours.

Where the file system cannot take the beginning out of a file (`shorten.collapse`; tmpfs, NFS), all of it is copied and the file then truncated:
lines that are written between the two are lost, which is a matter of microseconds.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elasticd.observability.shorten import blocks, collapse

if TYPE_CHECKING:
    from pathlib import Path

_PIECE: Final = 4 << 20
_NO_SUCH_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY})


@dataclass(frozen=True, slots=True)
class Rotated:
    """What was done: bytes that were taken out, and why they are not kept, "" if they are."""

    taken: int
    trouble: str = ""


def predecessor(path: Path, number: int = 1) -> Path:
    """Where the lines are that a worker's file has given up: 1 is the newest of these files.

    Args:
        path: the worker's file, `.../rank-3/stdout.log`.
        number: how many times they were moved on.
    """
    return path.parent.parent / f"{path.parent.name}.{path.name}.{number}"


def rotate(fd: int, path: Path, *, most: int, files: int) -> Rotated:
    """Take the older lines out of a worker's file. Never raises for a full disk: then they are dropped instead of kept.

    Args:
        fd: the file, open for reading and writing; everybody who writes appends.
        path: where it is; only the predecessors' names are made of it.
        most: bytes of a predecessor; of more the newest are kept.
        files: predecessors to keep; 0 drops the lines.

    Raises:
        OSError: the file itself cannot be made shorter.
    """
    size = os.fstat(fd).st_size
    taken = blocks(fd, size)
    if taken == size:  # a range that reaches the end cannot be taken out
        taken = blocks(fd, size - 1)
    kept = _Kept(path) if files else None
    if kept:
        kept.copy(fd, max(0, taken - most), taken)
    if not taken or not collapse(fd, taken):
        taken = _truncate(fd, kept, taken)
    if kept:
        kept.end(files)
    return Rotated(taken, kept.trouble if kept else "")


def _truncate(fd: int, kept: _Kept | None, copied: int) -> int:
    """The way without `collapse`: copy on until there is nothing more, and drop all of it."""
    while kept and not kept.trouble and (size := os.fstat(fd).st_size) > copied:
        kept.copy(fd, copied, size)
        copied = size
    taken = max(copied, os.fstat(fd).st_size)
    os.ftruncate(fd, 0)
    return taken


class _Kept:
    """The predecessor that is being made, under a name of its own. `trouble`: why there will be none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.trouble = ""
        temporary = predecessor(path, 0)
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()
            self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def copy(self, fd: int, begin: int, end: int) -> None:
        """Append bytes `begin` to `end` of `fd`."""
        if self.trouble:
            return
        try:
            while begin < end:
                copied = _copy(fd, begin, self._fd, min(_PIECE, end - begin))
                if not copied:  # the worker has made it shorter itself
                    return
                begin += copied
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def end(self, files: int) -> None:
        """Put it in its place, and those before one further."""
        if self._fd >= 0:
            os.close(self._fd)
        try:
            if self.trouble:
                predecessor(self._path, 0).unlink(missing_ok=True)
                return
            for number in range(files, 0, -1):
                with suppress(FileNotFoundError):
                    predecessor(self._path, number - 1).replace(predecessor(self._path, number))
        except OSError as error:
            self.trouble = self.trouble or error.strerror or str(error)


def _copy(source: int, at: int, target: int, count: int) -> int:
    """Bytes from `at` on to the end of `target`, within the kernel."""
    try:
        return os.copy_file_range(source, target, count, at)
    except OSError as error:
        if error.errno not in _NO_SUCH_COPY:
            raise
    return os.sendfile(target, source, at, count)
