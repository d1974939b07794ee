"""A stand-in for NVIDIA's module `pynvml`, for machines without a GPU: as much of it as elasticd asks, with faults to order.

Names and numbers are those of nvml.h. What it cannot show is that the real one behaves so: tests/gpu does, on a machine that has it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

T = TypeVar("T")


class NVMLError(Exception):
    """As pynvml's: its number is in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Gpu:
    """One GPU. What is None is not supported by it."""

    uuid: str
    bus: str = "00000000:3B:00.0"
    recovery: int | None = 0
    uncorrected: int | None = 0
    links: tuple[bool, ...] | None = None
    lost: bool = False
    utilization: int | None = 97
    memory: tuple[int, int] | None = (60 << 30, 80 << 30)
    temperature: int | None = 64
    milliwatts: int | None = 512_500
    throttle_reasons: int | None = 0x4


@dataclass
class StandInNvml:
    """Put in place of the module in sys.modules."""

    gpus: list[Gpu] = field(default_factory=list)
    init_error: int | None = None
    hang: threading.Event | None = None
    as_bytes: bool = False
    sessions: int = 0

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_FEATURE_ENABLED = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_NVLINK_MAX_LINKS = 18
    _RECOVERY = 230

    def nvmlInit(self) -> None:  # noqa: N802
        if self.hang is not None:
            self.hang.wait()
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self._alive(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._alive(gpu)
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str | bytes:  # noqa: N802
        return gpu.uuid.encode() if self.as_bytes else gpu.uuid

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=gpu.bus.encode() if self.as_bytes else gpu.bus)

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [self._RECOVERY]
        code = self.NVML_ERROR_NOT_SUPPORTED if gpu.recovery is None else self.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=gpu.recovery or 0))]

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        if gpu.uncorrected is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu.uncorrected

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._known(gpu, gpu.utilization), memory=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        used, total = self._known(gpu, gpu.memory)
        return SimpleNamespace(used=used, total=total, free=total - used)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._known(gpu, gpu.temperature)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:  # noqa: N802
        return self._known(gpu, gpu.milliwatts)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:  # noqa: N802
        return self._known(gpu, gpu.throttle_reasons)

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:  # noqa: N802
        if gpu.links is None or link >= len(gpu.links):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return int(gpu.links[link])

    def _known(self, gpu: Gpu, value: T | None) -> T:
        if value is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        self._alive(gpu)
        return value

    def _alive(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return gpu
