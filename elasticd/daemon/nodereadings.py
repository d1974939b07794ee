"""What the detectors are told of the machine and its GPUs every ten seconds.

Owns: the form (docs/detection.md) and the pace. Must not: judge a number, or wait for a disk or a driver that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from elasticd.daemon.gpureadings import GpuReading
from elasticd.daemon.host import Host, HostReading

EVERY: Final = 10.0
"""Seconds between two readings."""


class NodeReadings:
    """Used by one thread.

    Args:
        node: its name.
        volumes: name -> gives its directories, as of `Host`.
        gpus: gives how they do.
    """

    def __init__(self, node: str, volumes: Mapping[str, Callable[[], Sequence[Path]]], gpus: Callable[[], Sequence[GpuReading]]) -> None:
        self._node = node
        self._host = Host(volumes)
        self._gpus = gpus
        self._due = 0.0

    def due(self, now: float, clock: float) -> list[dict[str, Any]]:
        """One document for the machine and one for each GPU, if it is time; else nothing.

        Args:
            now: monotonic seconds.
            clock: seconds since the epoch, to be said in them.
        """
        if now < self._due:
            return []
        self._due = now + EVERY
        said = {"event": "reading", "time": clock, "node": self._node}
        gpus = [{**said, "gpu": gpu.index, "values": _known(asdict(gpu), leave_out=("index", "bus"))} for gpu in self._gpus()]
        return [{**said, "values": of_host(self._host.read())}, *gpus]


def of_host(reading: HostReading) -> dict[str, float]:
    """By the names that detectors know; a volume's have its name after a dot."""
    values = {
        "cpu": reading.cpu,
        "load1": reading.load,
        "memory_total_bytes": reading.memory_total,
        "memory_available_bytes": reading.memory_available,
        "received_bytes": reading.received,
        "sent_bytes": reading.sent,
    }
    for name, disk in reading.disks.items():
        values |= {f"disk_free_bytes.{name}": disk.free, f"disk_size_bytes.{name}": disk.size, f"disk_free_inodes.{name}": disk.free_inodes}
    return _known(values)


def _known(values: Mapping[str, Any], *, leave_out: Sequence[str] = ()) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and name not in leave_out}
