"""Which generations' logs are kept on this node, and taking the others away.

Owns: the directories `generation-*` of one job on one node (`logs`). Must not: touch the present one, anything else beside them, or anything
outside, whatever lies in them.

Workers own what is in a rank's directory, and may be hostile: links, second names of other files, directories in place of files, trees deeper than
any stack. So nothing is reached by its path: a directory is moved aside first, into one that nobody else may enter, each directory in it is made
ours by its descriptor before it is looked into, and directories in it are moved up instead of gone down into.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

_GENERATION: Final = re.compile(r"generation-\d{6,15}(?:-\d{1,9})?")
_LEFTOVER: Final = re.compile(r"\.removing-[0-9a-f]{16}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH: Final = 1000
DEPTH_MOST: Final = 16
"""Directories within each other that are counted."""
ENTRIES_MOST: Final = 100_000
"""Entries of one generation that are counted; what has more is as large as it was up to there."""

log = structlog.get_logger("elasticd.agent.logs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One generation's directory. `born` is seconds since the epoch, `nbytes` what it takes on disk."""

    name: str
    born: float
    nbytes: int


def surplus(found: Sequence[Kept], present: Collection[str], *, generations: int, nbytes: int) -> list[str]:
    """Which directories are to go, the oldest first.

    Args:
        found: all there are.
        present: names of those that are in use.
        generations: the newest so many may stay.
        nbytes: as long as those that stay do not take more together.
    """
    newest_first = sorted(found, key=lambda one: (one.born, one.name), reverse=True)
    gone = [one for one in newest_first[generations:] if one.name not in present]
    stay = [one for one in newest_first if one not in gone]
    total = sum(one.nbytes for one in stay)
    for one in reversed(stay[1:]):  # the newest may be about to begin
        if total <= nbytes:
            break
        if one.name not in present:
            gone.append(one)
            total -= one.nbytes
    return [one.name for one in sorted(gone, key=lambda one: (one.born, one.name))]


def retain(folder: Path, present: Collection[str] = (), *, generations: int, nbytes: int, stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """Take away what is too much below `folder`, `<root>/<job>/<node>`.

    Args:
        folder: must be ours, and no link.
        present: names of directories in use, besides the one that `latest` points at.
        generations, nbytes: as of `surplus`.
        stopped: whether to leave the rest for another time.

    Returns:
        Names of the directories that are gone. What cannot be taken away is logged and tried again the next time.
    """
    gone = []
    with _opened(folder) as parent:
        if parent is None:
            return []
        for name in _names(parent, _LEFTOVER):
            _try(lambda name=name: _finish(parent, name), folder / name)  # type: ignore[misc]
        in_use = {*present, *_latest(parent)}
        for name in surplus(_look(parent), in_use, generations=generations, nbytes=nbytes):
            if stopped():
                break
            if _try(lambda name=name: remove(parent, name), folder / name):  # type: ignore[misc]
                gone.append(name)
    if gone:
        log.info("old_logs_removed", directories=gone[:20], count=len(gone))
    return gone


def _try(action: Callable[[], None], path: Path) -> bool:
    try:
        action()
    except OSError as error:
        log.warning("old_logs_not_removed", directory=str(path), error=error.strerror, inside=str(error.filename or ""))
        return False
    return True


# --- looking -------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path | str, parent: int | None = None) -> Iterator[int | None]:
    """A directory that is no link; None if it cannot be had."""
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=parent)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _names(parent: int, form: re.Pattern[str]) -> list[str]:
    return sorted(name for name in os.listdir(parent) if form.fullmatch(name))


def _latest(parent: int) -> set[str]:
    try:
        return {os.path.basename(os.readlink("latest", dir_fd=parent))}  # noqa: PTH119
    except OSError:
        return set()


def _look(parent: int) -> list[Kept]:
    """The directories of generations that are ours."""
    found = []
    for name in _names(parent, _GENERATION):
        with _opened(name, parent) as inside, suppress(OSError):
            if inside is None or os.fstat(inside).st_uid != os.geteuid():
                continue
            found.append(Kept(name=name, born=_born(inside), nbytes=_usage(inside)))
    return found


def _born(inside: int) -> float:
    """When it was made: the file `incarnation` is written once."""
    try:
        return os.stat("incarnation", dir_fd=inside, follow_symlinks=False).st_mtime
    except OSError:
        return os.fstat(inside).st_mtime


def _usage(top: int) -> int:
    """Bytes on disk. Directories that we may not read count as nothing."""
    left = ENTRIES_MOST

    def count(folder: int, depth: int) -> int:
        nonlocal left
        total = 0
        with os.scandir(folder) as entries:
            for entry in itertools.islice(entries, max(0, left)):
                left -= 1
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode) and depth < DEPTH_MOST:
                        total += below(entry.name, folder, depth + 1)
        return total

    def below(name: str, folder: int, depth: int) -> int:
        with _opened(name, folder) as inside:
            return count(inside, depth) if inside is not None and _mount(inside) == mount else 0

    mount = _mount(top)
    return count(top, 1)


def _mount(fd: int) -> bytes:
    """Which mount a descriptor belongs to (proc(5), fdinfo): a bind mount has the device of what it shows."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:  # noqa: PTH123
        return next((line for line in file if line.startswith(b"mnt_id:")), b"")


# --- removing ------------------------------------------------------------------------------------------------------------


def remove(parent: int, name: str) -> None:
    """Take a directory away with all that is in it.

    Args:
        parent: descriptor of the directory that it is in, which is ours.
        name: within it.

    Raises:
        OSError: something in it stays, as a mount point does; the rest is tried again as a leftover.
    """
    aside = f".removing-{secrets.token_hex(8)}"
    os.mkdir(aside, 0o700, dir_fd=parent)
    with _opened(aside, parent) as folder:
        assert folder is not None
        os.rename(name, "0", src_dir_fd=parent, dst_dir_fd=folder)
    _finish(parent, aside)


def _finish(parent: int, aside: str) -> None:
    """Empty what was moved aside."""
    folder = os.open(aside, _DIRECTORY, dir_fd=parent)
    try:
        mount = _mount(folder)
        numbers = itertools.count(1 + max((int(name) for name in _names(folder, re.compile(r"\d+"))), default=0))
        while names := _some(folder):
            for name in names:
                _dissolve(folder, name, mount, numbers)
    finally:
        os.close(folder)
    os.rmdir(aside, dir_fd=parent)


def _some(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _BATCH)]


def _dissolve(aside: int, name: str, mount: bytes, numbers: Iterator[int]) -> None:
    """Take one entry of the directory `aside` away: its files at once, while its directories become entries of `aside` themselves."""
    if not _own(name, aside, mount):
        os.unlink(name, dir_fd=aside)
        return
    folder = os.open(name, _DIRECTORY, dir_fd=aside)
    try:
        while inner := _some(folder):
            for one in inner:
                if _own(one, folder, mount):
                    os.rename(one, str(next(numbers)), src_dir_fd=folder, dst_dir_fd=aside)
                else:
                    os.unlink(one, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=aside)


def _own(name: str, parent: int, mount: bytes) -> bool:
    """Make a directory ours, so that nobody else changes it any more; False if it is none.

    By descriptor: between our looking and our changing, its owner could have put a second name of somebody's file in its place.

    Raises:
        OSError: something is mounted there.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            return False
        if _mount(fd) != mount:
            raise OSError(errno.EBUSY, "something is mounted there", name)
        path = f"/proc/self/fd/{fd}"
        if status.st_uid != os.geteuid():
            os.chown(path, os.geteuid(), -1)
        os.chmod(path, 0o700)  # noqa: PTH101
    finally:
        os.close(fd)
    return True
