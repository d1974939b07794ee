"""What NVML says of how GPUs do, as numbers.

Owns: which numbers, their units, and which GPU an address on the PCI bus is. Must not: judge them (`gpuhealth` does). A number that a GPU, driver
or version of `pynvml` does not know is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from elasticd.daemon.nvml import NvmlError, ask, text
from elasticd.daemon.sampled import Sampled

GPUS_MAX: Final = 64
"""GPUs that are looked at."""
# nvmlClocksEventReasons of nvml.h: thermal slowdown by the driver and by the hardware, power brake. Not the power cap, which is normal under load.
_THROTTLED: Final = 0x20 | 0x40 | 0x80
_BUS: Final = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})(\.[0-9a-f])?", re.IGNORECASE)

log = structlog.get_logger("elasticd.daemon")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU at one moment. What is not known is None.

    Attributes:
        index: NVML's, as `nvidia-smi` shows it.
        bus: address as `bus_of` writes it.
        utilization: share of time that a kernel ran, 0 to 1.
        memory_used, memory_total: bytes.
        temperature: degrees Celsius.
        power: watts.
        uncorrected: memory errors that ECC could not correct since the driver was loaded.
        throttled: it is slowed down by heat, or by its power supply.
    """

    index: int
    bus: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    power: float | None = None
    uncorrected: int | None = None
    throttled: bool | None = None


class Gpus:
    """The GPUs of this machine. A driver that hangs is not waited for: the last numbers are given for a minute, then none. Thread-safe."""

    def __init__(self) -> None:
        self._sampled = Sampled("gpus", self._look)
        self._buses: Mapping[str, int] = {}
        self._told = ""

    def begin(self) -> None:
        """Look, if it is time: `read` waits less then."""
        self._sampled.begin()

    def read(self) -> Sequence[GpuReading]:
        """How they do; a GPU that has fallen off the bus is missing."""
        return self._sampled.get() or ()

    def index_of(self, bus: str) -> int | None:
        """Which GPU is, or was, at an address.

        Args:
            bus: as `bus_of` writes it.
        """
        if not self._buses:
            self.read()
        return self._buses.get(bus)

    def _look(self) -> Sequence[GpuReading]:
        try:
            found = ask(readings) or ()
        except NvmlError as error:
            if str(error) != self._told:
                log.warning("gpus_not_read", reason=str(error))
            self._told = str(error)
            return ()
        self._told = ""
        # Who has fallen off is still named by the kernel.
        self._buses = {**self._buses, **{one.bus: one.index for one in found if one.bus}}
        return found


def readings(nvml: Any) -> Sequence[GpuReading]:
    """Of every GPU that can be asked."""
    found = []
    for index in range(min(nvml.nvmlDeviceGetCount(), GPUS_MAX)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:
            continue
        found.append(_reading(nvml, index, handle))
    return tuple(found)


def bus_of(address: str) -> str:
    """A PCI address as the kernel writes it, without the function: 0000:3b:00 for NVML's 00000000:3B:00.0; "" if it is none."""
    match = _BUS.fullmatch(address.strip())
    return f"{int(match[1], 16):04x}:{int(match[2], 16):02x}:{int(match[3], 16):02x}" if match else ""


def _reading(nvml: Any, index: int, handle: Any) -> GpuReading:
    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):  # not supported here, or an older pynvml
            return None

    rates = asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    milliwatts = asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    reasons = asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return GpuReading(
        index=index,
        bus=bus_of(text(asked(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId) or "")),
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        temperature=asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power=None if milliwatts is None else milliwatts / 1000,
        uncorrected=asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)),
        throttled=None if reasons is None else bool(reasons & _THROTTLED),
    )
