"""How the machine does: processors, memory, network, and the disks that jobs need.

Owns: asking the kernel, by psutil. Must not: judge what it finds (`health` does), or look while nobody asks.

A share of time is that since the look before; the first says none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from elasticd.daemon.sampled import FRESH, Sampled

LOOPBACK: Final = "lo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """One file system, in bytes; `free_inodes` is None where it counts none. Free is what is free for users that are not root."""

    free: int
    size: int
    free_inodes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """How the machine did at one moment.

    Attributes:
        cpu: share of all processors' time that was not idle, 0 to 1.
        load: processes that ran or waited for a processor or a disk, on average over the last minute.
        memory_total, memory_available: bytes.
        received, sent: bytes over all network devices but the loopback since the machine's start.
        disks: name of a volume -> the file system it is on; one that does not answer is left out.
    """

    cpu: float | None
    load: float
    memory_total: int
    memory_available: int
    received: int
    sent: int
    disks: Mapping[str, Disk] = field(default_factory=dict)


class Host:
    """Looks at most once a second. Used by one thread at a time.

    Args:
        volumes: name -> gives its directories, of which that with the least room counts; one that is not there yet is where it would be made.
        clock: monotonic seconds.
    """

    def __init__(self, volumes: Mapping[str, Callable[[], Sequence[Path]]], *, clock: Callable[[], float] = time.monotonic) -> None:
        # A file server that hangs holds up neither us nor the other volumes.
        self._volumes = {name: Sampled(f"disk-{name}", _looker(where)) for name, where in volumes.items()}
        self._clock = clock
        self._busy = _busy(psutil.cpu_times())
        self._reading: HostReading | None = None
        self._at = 0.0

    def begin(self) -> None:
        """Look at the disks, if it is time: `read` waits less then."""
        for volume in self._volumes.values():
            volume.begin()

    def read(self) -> HostReading:
        """How it does now."""
        now = self._clock()
        if self._reading is None or now - self._at >= FRESH:
            self._reading, self._at = self._look(), now
        return self._reading

    def _look(self) -> HostReading:
        busy = _busy(psutil.cpu_times())
        memory = psutil.virtual_memory()
        received, sent = _traffic(psutil.net_io_counters(pernic=True))
        found = {name: volume.get() for name, volume in self._volumes.items()}
        reading = HostReading(
            cpu=share(self._busy, busy),
            load=os.getloadavg()[0],
            memory_total=memory.total,
            memory_available=memory.available,
            received=received,
            sent=sent,
            disks={name: disk for name, disk in found.items() if disk is not None},
        )
        self._busy = busy
        return reading


def share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """Of the time between two looks, what was not idle.

    Args:
        before: (seconds of all processors that were not idle, seconds of all) since the machine's start.
        after: the same later.
    """
    busy, whole = after[0] - before[0], after[1] - before[1]
    return min(1.0, max(0.0, busy / whole)) if whole > 0 else None


def narrowest(directories: Sequence[Path]) -> Disk | None:
    """Of the file systems that these are on, the one with the least room; None if none can be looked at."""
    disks = [disk for directory in directories if (disk := disk_of(directory)) is not None]
    return min(disks, key=lambda disk: disk.free, default=None)


def disk_of(directory: Path) -> Disk | None:
    """The file system that a directory is on, or is to be on; None if it cannot be looked at."""
    for place in (directory, *directory.parents):
        try:
            space = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return Disk(free=space.f_bavail * space.f_frsize, size=space.f_blocks * space.f_frsize, free_inodes=space.f_favail if space.f_files else None)
    return None


def _looker(where: Callable[[], Sequence[Path]]) -> Callable[[], Disk | None]:
    return lambda: narrowest(where())


def _busy(times: Any) -> tuple[float, float]:
    """Seconds that were not idle, and all; a guest's time is in its host's already."""
    fields = times._asdict()
    whole = sum(seconds for name, seconds in fields.items() if name not in ("guest", "guest_nice"))
    return whole - fields["idle"] - fields.get("iowait", 0.0), whole


def _traffic(devices: Mapping[str, Any]) -> tuple[int, int]:
    others = [device for name, device in devices.items() if name != LOOPBACK]
    return sum(device.bytes_recv for device in others), sum(device.bytes_sent for device in others)
