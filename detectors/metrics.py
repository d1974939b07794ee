"""Names of what monitors measure, and what they are here: values of nodes and of GPUs, in one unit each.

Owns: the names and units of `Reading.values`, and reading the text that Prometheus does. Must not: judge a value, or make differences of counters.

Names of others: NVIDIA's dcgm-exporter, Prometheus' node_exporter, elasticd's daemon (its metrics, and its node API's fields). Bytes, seconds,
megahertz, watts, degrees Celsius; shares are 0 to 1. A value of one volume has its name after a dot: "disk_free_bytes.checkpoints", "disk_free_bytes./scratch".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from detectors.observations import Reading

GAUGES: Final = frozenset(
    {
        "utilization",
        "memory_used_bytes",
        "memory_free_bytes",
        "memory_total_bytes",
        "temperature_c",
        "memory_temperature_c",
        "power_w",
        "clock_mhz",
        "memory_clock_mhz",
        "throttled",
        "remap_failed",
        "remap_pending",
        "retired_pending",
        "xid",
        "cpu",
        "load1",
        "memory_available_bytes",
        "disk_free_bytes",
        "disk_size_bytes",
        "disk_free_inodes",
        "disk_inodes",
    }
)
"""Values as they are now. "xid" is the number of the last one, 0 for none; "cpu" the share of all processors' time that was not idle."""
COUNTERS: Final = frozenset(
    {
        "ecc_uncorrected",
        "ecc_corrected",
        "remapped_uncorrectable",
        "remapped_correctable",
        "retired_single",
        "retired_double",
        "xids",
        "nvlink_errors",
        "pcie_replays",
        "received_bytes",
        "sent_bytes",
        "network_errors",
        "cpu_seconds",
        "cpu_busy_seconds",
        "disk_busy_seconds",
        "oom_kills",
        "edac_uncorrected",
        "edac_corrected",
        "kernel_events",
    }
)
"""Values that only rise, until whoever counts begins again at 0."""
NAMES: Final = GAUGES | COUNTERS

_MIB: Final = 1048576.0
METRICS: Final[Mapping[str, tuple[str, float]]] = {
    **{name: (name, 1.0) for name in NAMES},
    # dcgm-exporter
    "DCGM_FI_DEV_GPU_UTIL": ("utilization", 0.01),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", _MIB),
    "DCGM_FI_DEV_FB_FREE": ("memory_free_bytes", _MIB),
    "DCGM_FI_DEV_FB_TOTAL": ("memory_total_bytes", _MIB),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", 1.0),
    "DCGM_FI_DEV_MEMORY_TEMP": ("memory_temperature_c", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("clock_mhz", 1.0),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", 1.0),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", 1.0),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("pcie_replays", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected", 1.0),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc_corrected", 1.0),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("remapped_uncorrectable", 1.0),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("remapped_correctable", 1.0),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("remap_failed", 1.0),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ("remap_pending", 1.0),
    "DCGM_FI_DEV_RETIRED_SBE": ("retired_single", 1.0),
    "DCGM_FI_DEV_RETIRED_DBE": ("retired_double", 1.0),
    "DCGM_FI_DEV_RETIRED_PENDING": ("retired_pending", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("nvlink_errors", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": ("nvlink_errors", 1.0),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("nvlink_errors", 1.0),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("nvlink_errors", 1.0),
    # node_exporter
    "node_load1": ("load1", 1.0),
    "node_memory_MemTotal_bytes": ("memory_total_bytes", 1.0),
    "node_memory_MemAvailable_bytes": ("memory_available_bytes", 1.0),
    "node_filesystem_avail_bytes": ("disk_free_bytes", 1.0),
    "node_filesystem_size_bytes": ("disk_size_bytes", 1.0),
    "node_filesystem_files_free": ("disk_free_inodes", 1.0),
    "node_filesystem_files": ("disk_inodes", 1.0),
    "node_network_receive_bytes_total": ("received_bytes", 1.0),
    "node_network_transmit_bytes_total": ("sent_bytes", 1.0),
    "node_network_receive_errs_total": ("network_errors", 1.0),
    "node_network_transmit_errs_total": ("network_errors", 1.0),
    "node_cpu_seconds_total": ("cpu_seconds", 1.0),
    "node_disk_io_time_seconds_total": ("disk_busy_seconds", 1.0),
    "node_vmstat_oom_kill": ("oom_kills", 1.0),
    "node_edac_uncorrectable_errors_total": ("edac_uncorrected", 1.0),
    "node_edac_correctable_errors_total": ("edac_corrected", 1.0),
    # elasticd's daemon, its metrics
    "elasticd_gpu_utilization_ratio": ("utilization", 1.0),
    "elasticd_gpu_memory_used_bytes": ("memory_used_bytes", 1.0),
    "elasticd_gpu_memory_total_bytes": ("memory_total_bytes", 1.0),
    "elasticd_gpu_temperature_celsius": ("temperature_c", 1.0),
    "elasticd_gpu_power_watts": ("power_w", 1.0),
    "elasticd_gpu_throttled": ("throttled", 1.0),
    "elasticd_gpu_ecc_uncorrected_errors_total": ("ecc_uncorrected", 1.0),
    "elasticd_gpu_xid_errors_total": ("xids", 1.0),
    "elasticd_gpu_last_xid": ("xid", 1.0),
    "elasticd_host_cpu_ratio": ("cpu", 1.0),
    "elasticd_host_load1": ("load1", 1.0),
    "elasticd_host_memory_total_bytes": ("memory_total_bytes", 1.0),
    "elasticd_host_memory_available_bytes": ("memory_available_bytes", 1.0),
    "elasticd_host_disk_free_bytes": ("disk_free_bytes", 1.0),
    "elasticd_host_disk_size_bytes": ("disk_size_bytes", 1.0),
    "elasticd_host_disk_free_inodes": ("disk_free_inodes", 1.0),
    "elasticd_host_network_receive_bytes_total": ("received_bytes", 1.0),
    "elasticd_host_network_transmit_bytes_total": ("sent_bytes", 1.0),
    "elasticd_kernel_events_total": ("kernel_events", 1.0),
    # the same, its node API
    "memory_used": ("memory_used_bytes", 1.0),
    "memory_total": ("memory_total_bytes", 1.0),
    "memory_available": ("memory_available_bytes", 1.0),
    "temperature": ("temperature_c", 1.0),
    "power": ("power_w", 1.0),
    "load": ("load1", 1.0),
    "uncorrected": ("ecc_uncorrected", 1.0),
}
"""A monitor's name -> (ours, what its values are multiplied by)."""

VALUES_MAX: Final = 256
"""Values of a reading that are kept."""
SERIES_MAX: Final = 200_000
"""Lines of a page that are looked at."""
_LINE_MAX: Final = 4096
_GPUS_MAX: Final = 64
_VOLUME_MAX: Final = 64
_VOLUMES: Final = ("volume", "mountpoint", "kind")
_IDLE: Final = frozenset({"idle", "iowait"})
_NO_DISKS: Final = frozenset({"squashfs", "iso9660", "erofs", "proc", "sysfs", "ramfs", "autofs"})  # always full, or never
_SERIES: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


def reading_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Values by our names and in our units; what has no name here, or is no finite number, is left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        base, dot, volume = str(name).partition(".")
        known = METRICS.get(base)
        if known is None or len(found) >= VALUES_MAX or not isinstance(value, bool | int | float):
            continue
        try:
            number = float(value) * known[1]
        except OverflowError:
            continue
        if math.isfinite(number):
            found[known[0] + (dot + volume[:_VOLUME_MAX] if dot else "")] = number
    return found


def prometheus_text(text: str, *, at: float, node: str = "") -> Iterator[Reading]:
    """What a page for Prometheus tells of a node and of its GPUs, in its text format 0.0.4.

    Of network devices, processors, disks and links the sum is told, the loopback left out. Pages of a whole cluster are told apart by dcgm-exporter's
    label "Hostname".

    Args:
        at: when it was read.
        node: whose page it is.
    """
    found: dict[tuple[str, int | None], dict[str, float]] = {}
    for number, line in enumerate(text.splitlines()):
        if number >= SERIES_MAX:
            break
        if len(line) > _LINE_MAX or not (match := _SERIES.fullmatch(line)) or (known := METRICS.get(match[1])) is None:
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        value = _number(match[3])
        if value is None or not _counts(labels):
            continue
        gpu = labels.get("gpu", "")
        subject = (labels.get("Hostname", node)[:_VOLUME_MAX], int(gpu) if gpu.isdecimal() and len(gpu) < 4 and int(gpu) < _GPUS_MAX else None)
        values = found.setdefault(subject, {})
        volume = next((labels[label] for label in _VOLUMES if label in labels), "")
        name = f"{known[0]}.{volume[:_VOLUME_MAX]}" if volume else known[0]
        names = (name, "cpu_busy_seconds") if name == "cpu_seconds" and labels.get("mode") not in _IDLE else (name,)
        for one in names:
            if one in values or len(values) < VALUES_MAX:
                values[one] = value * known[1] + (values.get(one, 0.0) if known[0] in COUNTERS else 0.0)
    for (name, index), values in found.items():
        yield Reading(at=at, values=values, node=name, gpu=index)


def _counts(labels: Mapping[str, str]) -> bool:
    return labels.get("device") != "lo" and labels.get("fstype") not in _NO_DISKS


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
