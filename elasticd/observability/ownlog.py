"""A log file of this process's own, that never grows beyond its cap and never ends who writes it.

Owns: whole lines on disk, one predecessor of the file (NAME.1). Must not: know what a line is made of.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

OWN_BYTES = 16 << 20


class OwnLog:
    """See the module. A disk that is full, or a file that cannot be moved, costs lines and nothing else.

    What a crash or a full disk cut is ended or taken back, so that every line is whole or not there.

    Args:
        path: the file; what is in it stays.
        most: bytes after which it becomes the predecessor.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, most: int = OWN_BYTES) -> None:
        self._path = path
        self._most = most
        self._fd = -1
        self._reopen()

    def write(self, text: str) -> None:
        """Append whole lines."""
        data = text.encode("utf-8", "backslashreplace")
        with suppress(OSError, ValueError):
            status = os.fstat(self._fd)
            if status.st_size + len(data) > self._most and status.st_size and stat.S_ISREG(status.st_mode):
                self._move_aside(status)
            self._append(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let go of the file; what is written afterwards is dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            written = len(data) - len(rest)
            status = os.fstat(self._fd)
            if written and stat.S_ISREG(status.st_mode):  # half a line would spoil the next one too
                os.ftruncate(self._fd, status.st_size - written)
            raise

    def _move_aside(self, status: os.stat_result) -> None:
        with suppress(OSError):
            at_path = self._path.stat()
            if (at_path.st_ino, at_path.st_dev) == (status.st_ino, status.st_dev):  # else another process has done it
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._reopen()

    def _reopen(self) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
        self.close()
        self._fd = fd
        with suppress(OSError):
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
