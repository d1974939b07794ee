"""Metrics of GPUs, by the index that `nvidia-smi` shows.

Owns: their names. Must not: ask NVML (`daemon.gpureadings` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from elasticd.daemon.metrics.families import Family, Label, counter, gauge

if TYPE_CHECKING:
    from elasticd.daemon.gpureadings import GpuReading
    from elasticd.daemon.kmsg import KernelCounts
    from elasticd.daemon.metrics.families import Sheet

GPU: Final = Label(name="gpu", about="index of the GPU")

_READINGS: Final[tuple[tuple[Family, Callable[[GpuReading], float | None]], ...]] = (
    (gauge("elasticd_gpu_utilization_ratio", "Share of time that a kernel ran on the GPU, 0 to 1.", GPU), lambda one: one.utilization),
    (gauge("elasticd_gpu_memory_used_bytes", "Memory of the GPU that is in use.", GPU), lambda one: one.memory_used),
    (gauge("elasticd_gpu_memory_total_bytes", "Memory of the GPU.", GPU), lambda one: one.memory_total),
    (gauge("elasticd_gpu_temperature_celsius", "How hot the GPU is.", GPU), lambda one: one.temperature),
    (gauge("elasticd_gpu_power_watts", "What the GPU draws.", GPU), lambda one: one.power),
    (gauge("elasticd_gpu_throttled", "1 while the GPU is slowed down by heat or by its power supply.", GPU), lambda one: one.throttled),
    (
        counter("elasticd_gpu_ecc_uncorrected_errors_total", "Memory errors of the GPU that ECC could not correct, since the driver was loaded.", GPU),
        lambda one: one.uncorrected,
    ),
)
XIDS: Final = counter("elasticd_gpu_xid_errors_total", "Xid errors of the GPU in the kernel's log since the daemon's start.", GPU)
LAST_XID: Final = gauge("elasticd_gpu_last_xid", "Number of the GPU's last Xid error; not there before one.", GPU)
FAMILIES: Final = (*(family for family, _ in _READINGS), XIDS, LAST_XID)


def fill_gpus(sheet: Sheet, readings: Sequence[GpuReading], counts: KernelCounts, index_of: Callable[[str], int | None]) -> None:
    """How they do. One that has fallen off the bus keeps what the kernel said of it."""
    for reading in readings:
        for family, number in _READINGS:
            sheet.put(family, number(reading), str(reading.index))
        if counts.readable:
            sheet.put(XIDS, 0, str(reading.index))
    for bus, (count, last) in counts.xids.items():
        index = index_of(bus)
        if index is not None:
            sheet.put(XIDS, count, str(index))
            sheet.put(LAST_XID, last, str(index))
