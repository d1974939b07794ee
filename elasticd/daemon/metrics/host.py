"""Metrics of the machine, and of what its kernel says.

Owns: their names. Must not: ask the kernel (`daemon.host`, `daemon.kmsg` do).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elasticd.daemon.kmsg import EventKind
from elasticd.daemon.metrics.families import Label, counter, gauge
from elasticd.daemon.volumes import VOLUMES

if TYPE_CHECKING:
    from elasticd.daemon.host import HostReading
    from elasticd.daemon.kmsg import KernelCounts
    from elasticd.daemon.metrics.families import Sheet

_VOLUME: Final = Label(name="volume", values=VOLUMES)

CPU: Final = gauge("elasticd_host_cpu_ratio", "Share of all processors' time since the last scrape that was not idle, 0 to 1.")
LOAD: Final = gauge("elasticd_host_load1", "Load average over the last minute.")
MEMORY: Final = gauge("elasticd_host_memory_total_bytes", "Memory of the machine.")
AVAILABLE: Final = gauge("elasticd_host_memory_available_bytes", "Memory that programs could still have without swapping.")
FREE: Final = gauge(
    "elasticd_host_disk_free_bytes",
    "Room for users that are not root, on the file system of the logs, of the daemon's state, and of the jobs' checkpoints (the one with the least).",
    _VOLUME,
)
SIZE: Final = gauge("elasticd_host_disk_size_bytes", "Size of the file system of the logs, of the daemon's state, and of the jobs' checkpoints.", _VOLUME)
INODES: Final = gauge(
    "elasticd_host_disk_free_inodes", "Files that the file system of the logs, of the daemon's state, or of the jobs' checkpoints can still take.", _VOLUME
)
RECEIVED: Final = counter("elasticd_host_network_receive_bytes_total", "Received over all network devices but the loopback.")
SENT: Final = counter("elasticd_host_network_transmit_bytes_total", "Sent over all network devices but the loopback.")
EVENTS: Final = counter(
    "elasticd_kernel_events_total",
    "What the kernel's log said: a GPU's Xid, another failure of NVIDIA's driver, a process killed for memory, a machine check, a hang, a disk that fails,"
    " a file system with errors.",
    Label(name="kind", values=tuple(kind.value for kind in EventKind)),
)
READABLE: Final = gauge("elasticd_kernel_log_readable", "1 while the kernel's log is read; 0 where that is not allowed, and no kernel event is counted.")
FAMILIES: Final = (CPU, LOAD, MEMORY, AVAILABLE, FREE, SIZE, INODES, RECEIVED, SENT, EVENTS, READABLE)


def fill_host(sheet: Sheet, reading: HostReading) -> None:
    """How the machine does."""
    sheet.put(CPU, reading.cpu)
    sheet.put(LOAD, reading.load)
    sheet.put(MEMORY, reading.memory_total)
    sheet.put(AVAILABLE, reading.memory_available)
    sheet.put(RECEIVED, reading.received)
    sheet.put(SENT, reading.sent)
    for volume, disk in reading.disks.items():
        sheet.put(FREE, disk.free, volume)
        sheet.put(SIZE, disk.size, volume)
        sheet.put(INODES, disk.free_inodes, volume)


def fill_kernel(sheet: Sheet, counts: KernelCounts) -> None:
    """What the kernel said."""
    sheet.put(READABLE, counts.readable)
    for kind, count in counts.events.items():
        sheet.put(EVENTS, count, kind.value)
