"""One agent per job and node: a lock that dies with its holder.

Owns: the flock that lets a restarted agent know that its predecessor is dead (PROTOCOL 1). Must not: read etcd.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import Self

from elasticd.errors import RefusedError, UsageError
from elasticd.rendezvous.keys import checked_name


def boot_id() -> str:
    """This boot of this kernel; another one cannot have our processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def default_state_dir() -> Path:
    """Where small state of this user's agents lives on this machine until it reboots."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "elasticd" if base else Path(f"/tmp/elasticd-{os.getuid()}")  # noqa: S108  (0700, checked in NodeLock)


def lock_path(directory: Path, cluster: str, job: str, node: str) -> Path:
    """The lock file of one node of one job: readable names, cut to what a file name may hold, and a digest that tells any two apart."""
    digest = hashlib.sha256(f"{cluster}/{job}/{node}".encode()).hexdigest()[:16]
    return directory / f"{job[:64]}-{node[:64]}-{digest}.lock"


class FileLock:
    """Exclusive on this machine, held until closed or until the process ends.

    Args:
        directory: made with mode 0700 if it is missing; it must be ours, and nobody else may write in it.
        name: of the file.
        what: what the holder is, for the message: "serves node x".

    Raises:
        RefusedError: a living process holds it.
        UsageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, name: str, *, what: str, remedy: str) -> None:
        self.path = directory / name
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid():
                raise UsageError(f"{directory} belongs to another user", remedy="give a directory of your own (XDG_RUNTIME_DIR, or run_dir)")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(f"{directory} can be written by others", remedy=f"chmod go-w {directory}")
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"cannot use {self.path}: {error.strerror}", remedy="give a directory that can be written") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise RefusedError(f"another {what.format(pid=holder or 'unknown')}", remedy=remedy) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let it go. The file stays: removing it would let two holders lock two files of one name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class NodeLock(FileLock):
    """Exclusive for (cluster, job, node) on this machine.

    Raises:
        RefusedError: a living agent holds it.
        UsageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, cluster: str, job: str, node: str) -> None:
        for kind, name in (("cluster", cluster), ("job", job), ("node", node)):
            checked_name(kind, name)
        super().__init__(
            directory,
            lock_path(directory, cluster, job, node).name,
            what=f"agent (pid {{pid}}) serves job {job!r} as node {node!r} on this machine",
            remedy="stop it first, or give this one another node name",
        )
