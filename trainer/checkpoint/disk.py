"""The few things done to files and directories of checkpoints, each so that a crash at any moment is harmless.

Owns: locks on drafts, fsync of directories, removal, and what an OSError means. Must not: know what a checkpoint holds.

Every call that changes the disk goes through the module `os`, pathlib's too, so that tests can stop the world before and after each one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainer.checkpoint.manifest import BAD, DATA, TMP, parse_name
from trainer.errors import NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Iterator

MARGIN: Final = 16 * 1024 * 1024
"""Bytes to leave free besides what is written: directories, the manifest, other people's logs."""

_FULL: Final = {errno.ENOSPC: "no space left", errno.EDQUOT: "the quota is used up", errno.EFBIG: "larger than a file may be here"}
_UNKNOWN: Final = 1 << 62
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


@contextmanager
def saying(path: Path) -> Iterator[None]:
    """What goes wrong below names `path`.

    Raises:
        NoSpaceError: the disk is full, a quota used up, or a limit of file sizes reached.
        OSError: anything else, with `path` as its file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(f"cannot write {path}: {_FULL[error.errno]}", remedy="free some space there, or keep fewer checkpoints") from None
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from None


def check_space(root: Path, wanted: int) -> None:
    """See before anything is written that `wanted` bytes and `MARGIN` fit.

    Raises:
        NoSpaceError: they do not.
    """
    free = free_space(root)
    if free < wanted + MARGIN:
        missing = wanted + MARGIN - free
        raise NoSpaceError(f"{root} has {free} bytes free, {missing} too few for {wanted}", remedy="free some space there, or keep fewer checkpoints")


def free_space(root: Path) -> int:
    """Bytes that may be written there; more than any disk has where the file system does not know: some network ones say 0 of 0."""
    with saying(root):
        stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else _UNKNOWN


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. A file system that knows no such thing is not blamed for it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def make_root(root: Path) -> None:
    """Create the directory of checkpoints where it is missing, durably."""
    with saying(root):
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            sync_directory(root.parent)


def draft_of(path: Path) -> Path:
    """A name beside `path` that no other writer has, for what is not complete yet or to be removed."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{TMP}")


def generation_of(name: str) -> int | None:
    """Generation of a draft's name, or of what was set aside; None if it is neither."""
    whole = name.split(".", 2)
    if len(whole) < 3 or not (name.endswith(TMP) or BAD in name):
        return None
    parsed = parse_name(".".join(whole[:2]))
    return None if parsed is None else parsed[0]


def lock(fd: int) -> bool:
    """Take the lock that says that a draft's writer lives; it goes with the writer. False: another has it, or the file is gone.

    Where the file system knows no locks everybody gets it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return os.fstat(fd).st_nlink > 0


def remove(path: Path) -> bool:
    """Remove a directory: first its name, at once, then its content. False: somebody else was quicker.

    A crash in between leaves a draft, which nobody takes for a damaged checkpoint, and `tidy` removes.
    """
    gone = draft_of(path)
    with saying(path):
        try:
            path.rename(gone)
        except FileNotFoundError:
            return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def tidy(root: Path, generation: int) -> list[Path]:
    """Remove drafts whose writers are dead, of `generation` and those before it, never of a later one (PROTOCOL 26).

    Returns:
        what was removed.
    """
    return [path for path in _drafts(root, generation) if _remove_abandoned(path)]


def _drafts(root: Path, generation: int) -> list[Path]:
    try:
        paths = sorted(root.iterdir())
    except OSError:
        return []
    return [path for path in paths if path.name.endswith(TMP) and (found := generation_of(path.name)) is not None and found <= generation]


def _remove_abandoned(path: Path) -> bool:
    """Remove one draft if nobody writes it. The file is made where it is missing: a writer that is about to open it shall see that it is taken."""
    fd = -1
    with suppress(OSError):
        fd = os.open(path / DATA, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not lock(fd):
            os.close(fd)
            return False
    shutil.rmtree(path, ignore_errors=True)
    if fd >= 0:
        os.close(fd)
    return not path.exists()
