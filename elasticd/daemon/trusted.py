"""Reading files that decide what is run: only those that nobody but their owner could have written.

Owns: those checks, made on the opened file itself, so that nothing can be put in its place between the look and the reading. Must not: know what
is in the files.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final, Self

LIMIT: Final = 256 * 1024
"""Bytes of the largest file that is read."""
_LINKS: Final = 8  # as many as a chain may have: enough for `current -> v2`, and the end of a circle
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # NONBLOCK: a pipe or a device must not hold us


class Untrusted(Exception):  # noqa: N818  (a verdict on a file, which the caller words; not one of the tree in errors)
    """Why a file or directory is not believed, in one line."""


class TrustedDirectory:
    """A directory that `owner` alone can write, held open.

    Raises:
        Untrusted: it is not, or cannot be opened.
    """

    def __init__(self, path: Path, *, owner: int) -> None:
        self._path = path
        self._owner = owner
        try:
            self._fd = os.open(path, _OPEN | os.O_DIRECTORY)
        except OSError as error:
            raise Untrusted(f"cannot read the directory: {error.strerror}") from None
        try:
            self._check(os.fstat(self._fd))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it go."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def names(self, suffix: str) -> list[str]:
        """Names that end in `suffix` and do not begin with a dot, in order.

        Raises:
            Untrusted: the directory cannot be read.
        """
        try:
            return sorted(name for name in os.listdir(self._fd) if name.endswith(suffix) and not name.startswith("."))  # noqa: PTH208  (pathlib takes no fd)
        except OSError as error:
            raise Untrusted(f"cannot read the directory: {error.strerror}") from None

    def read(self, name: str) -> bytes:
        """What is in the file `name`, or in the one of this directory that it is a link to.

        Raises:
            Untrusted: it is no regular file of `owner`'s, others can write it, it is over LIMIT bytes, links elsewhere, or cannot be read.
        """
        fd = self._open(name)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Untrusted("not a regular file")
            self._check(status)
            data = b""
            while len(data) <= LIMIT and (chunk := os.read(fd, LIMIT + 1 - len(data))):
                data += chunk
        except OSError as error:
            raise Untrusted(f"cannot read it: {error.strerror}") from None
        finally:
            os.close(fd)
        if len(data) > LIMIT:
            raise Untrusted(f"larger than {LIMIT // 1024} KiB")
        return data

    def _open(self, name: str) -> int:
        for _ in range(_LINKS):
            try:
                return os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=self._fd)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise Untrusted(f"cannot read it: {error.strerror}") from None
            name = self._target(name)
        raise Untrusted("a link that leads through too many others")

    def _target(self, name: str) -> str:
        """The name within this directory that the link `name` holds."""
        try:
            link = os.readlink(name, dir_fd=self._fd)
        except OSError as error:
            raise Untrusted(f"cannot read it: {error.strerror}") from None
        target = Path(link)
        # Compared as text: to follow what a link says about folders is to believe whoever can write those.
        if target.parent not in (Path(), self._path.absolute()) or target.name in ("", ".."):
            raise Untrusted(f"a link to {link!r}, outside the directory")
        return target.name

    def _check(self, status: os.stat_result) -> None:
        if status.st_uid != self._owner:
            raise Untrusted(f"belongs to uid {status.st_uid}, and only uid {self._owner} is believed")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Untrusted(f"others can write it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w")
