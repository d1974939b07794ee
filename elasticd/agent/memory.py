"""How much memory this process may still take, before the kernel kills somebody.

Owns: reading /proc and the control groups, version 1 and 2. Must not: take any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

UNKNOWN: Final = 1 << 62
"""Bytes available where nothing says how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Available:
    """Bytes that can still be taken, and what sets the bound, for people."""

    nbytes: int
    bound: str


def available(root: Path = Path("/")) -> Available:
    """The least that MemAvailable and the limits of this process's control groups leave. What cannot be read bounds nothing.

    Args:
        root: where proc and the control groups are found.
    """
    found = [_machine(root), *_groups(root)]
    return min((one for one in found if one is not None), key=lambda one: one.nbytes, default=Available(nbytes=UNKNOWN, bound="nothing known"))


def _machine(root: Path) -> Available | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return Available(nbytes=int(line.split()[1]) * 1024, bound="free memory")
    return None


def _groups(root: Path) -> Iterator[Available | None]:
    own = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    for mount, inside, kind in _mounts(root):
        for _, controllers, path in own:
            if (controllers == "" and kind == 2) or (kind == 1 and "memory" in controllers.split(",")):
                for folder in _upwards(mount, inside, PurePosixPath("/", path)):
                    yield _left_v2(folder) if kind == 2 else _left_v1(folder)


def _mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath, int]]:
    """(where it is mounted, which group that shows, version) of each hierarchy that may limit memory. See proc_pid_mountinfo(5)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2" or (tail[0] == "cgroup" and "memory" in tail[2].split(",")):
            yield root / fields[4].lstrip("/"), PurePosixPath(fields[3]), 2 if tail[0] == "cgroup2" else 1


def _upwards(mount: Path, inside: PurePosixPath, group: PurePosixPath) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount: each may set a limit."""
    below = group.relative_to(inside) if group.is_relative_to(inside) else group.relative_to("/")
    for depth in range(len(below.parts), -1, -1):
        yield mount.joinpath(*below.parts[:depth])


def _left_v2(folder: Path) -> Available | None:
    return _left(folder, _number(folder / "memory.max"), _number(folder / "memory.current"), "inactive_file")


def _left_v1(folder: Path) -> Available | None:
    return _left(folder, _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes"), "total_inactive_file")


def _left(folder: Path, limit: int | None, usage: int | None, reclaimable: str) -> Available | None:
    if limit is None or usage is None:
        return None
    stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if len(line.split()) > 1)
    used = max(0, usage - int(stat.get(reclaimable, 0)))
    return Available(nbytes=max(0, limit - used), bound=f"the memory limit of {folder}")


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is none


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
