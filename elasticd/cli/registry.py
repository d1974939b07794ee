"""Which runs this user has on this machine, so that other commands find them without options.

Owns: one small file per living `elasticctl run`, below the state directory, 0600. Must not: be believed about anything but where to look: the
job's state is in etcd.

A file whose process is gone is stale; whoever comes across it removes it, and the scratch directory that the dead run could not remove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elasticd.cli.options import Store
from elasticd.daemon.processes import process_start
from elasticd.errors import UsageError
from elasticd.kv.types import TLSFiles
from elasticd.rendezvous.nodelock import default_state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRATCH_PREFIX = "elasticctl-"
_MAX_BYTES = 64 * 1024


class RunEntry(BaseModel):
    """One `elasticctl run` that is alive.

    Attributes:
        started: start time of the process in the kernel's ticks; with the pid it names the process for good.
        scratch: its scratch directory, removed with a stale entry.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: str
    cluster: str
    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    pid: int
    started: int
    log_dir: Path
    local: bool
    scratch: Path

    @property
    def store(self) -> Store:
        """Its etcd."""
        return Store(endpoints=self.endpoints, tls=TLSFiles(cacert=self.cacert, cert=self.cert, key=self.key) if self.cacert else None)

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        return process_start(self.pid) == self.started


class Registered:
    """An entry for this process, there until it is closed.

    Raises:
        UsageError: the state directory cannot be used.
    """

    def __init__(self, entry: RunEntry) -> None:
        folder = _folder(create=True)
        assert folder is not None
        # Two runs of one job on one machine are two of its nodes; the second finds the plain name taken.
        for name in (f"{entry.job}.json", f"{entry.job}.{entry.pid}.json"):
            self.path = folder / name
            if not _held(self.path):
                break
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")  # 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(entry.model_dump_json())
        Path(temporary).replace(self.path)

    def close(self) -> None:
        """Take it away."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def running() -> list[RunEntry]:
    """All living runs of this user, in the order of their names. Removes what dead ones left."""
    return sorted(_living(), key=lambda entry: (entry.job, entry.pid))


def _living() -> Iterator[RunEntry]:
    folder = _folder(create=False)
    if folder is None:
        return
    for path in folder.glob("*.json"):
        entry = _read(path)
        if entry is None:
            continue
        if entry.alive:
            yield entry
        else:
            _remove_stale(path, entry)


def _held(path: Path) -> bool:
    entry = _read(path)
    return entry is not None and entry.alive


def _read(path: Path) -> RunEntry | None:
    """None for what cannot be read or is none of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return None
            return RunEntry.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None


def _remove_stale(path: Path, entry: RunEntry) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    scratch = entry.scratch
    # Only what `tempfile` made for a run of this user: the file could name anything.
    if scratch.name.startswith(SCRATCH_PREFIX) and scratch.parent == Path(tempfile.gettempdir()) and not scratch.is_symlink():
        with contextlib.suppress(OSError):
            if scratch.stat().st_uid == os.getuid():
                shutil.rmtree(scratch, ignore_errors=True)


def _folder(*, create: bool) -> Path | None:
    """The directory of the entries, if it is ours alone. A foreign one under /tmp could name any etcd, and is refused."""
    state = default_state_dir()
    folder = state / "runs"
    try:
        if create:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        for path in (state, folder):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise UsageError(f"{path} is not a directory that only you can write", remedy="set XDG_RUNTIME_DIR to a directory of your own")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot use {folder}: {error.strerror}", remedy="set XDG_RUNTIME_DIR to a directory of your own") from None
    return folder
