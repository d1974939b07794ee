"""What NVML says about the health of GPUs, in words.

Owns: which of its answers are bad. Must not: call what was not asked for a fault: a question that a GPU, driver or version of `pynvml` does not
know is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

# nvmlDeviceGpuRecoveryAction_t of nvml.h; 0 is none. What is not in this table is newer than it, and still no "none".
_ACTIONS: Final = {
    1: "it must be reset",
    2: "the node must be rebooted",
    3: "its peer-to-peer traffic must be drained",
    4: "it works at reduced capacity, and must be drained and reset",
    5: "its IMEX domain must be recovered",
    6: "its bus must be reset",
    7: "the whole system must be rebooted",
}
_RECOVERY_FIELD: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; pynvml knows its name since 12.570
_LINKS: Final = 18  # NVML_NVLINK_MAX_LINKS, where pynvml does not say


def faults_of(nvml: Any, uuids: Sequence[str]) -> tuple[str, ...]:
    """One line for each fault of these GPUs."""
    return tuple(f"{uuid}: {fault}" for uuid in uuids for fault in _faults(nvml, uuid))


def _faults(nvml: Any, uuid: str) -> list[str]:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_GPU_IS_LOST):
            return [f"it is no longer there ({error})"]
        return []
    found = []
    for question in (_recovery, _memory, _links):
        try:
            fault = question(nvml, handle)
        except AttributeError:  # an older pynvml
            continue
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return [f"it has fallen off the bus ({error})"]
            continue
        found += [fault] if fault else []
    return found


def _recovery(nvml: Any, handle: Any) -> str:
    """What the driver says must be done before it can be relied on (driver 570 and newer)."""
    field = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])[0]
    if field.nvmlReturn != nvml.NVML_SUCCESS or field.value.uiVal == 0:
        return ""
    return _ACTIONS.get(field.value.uiVal, f"the driver asks for recovery action {field.value.uiVal}")


def _memory(nvml: Any, handle: Any) -> str:
    """Errors since the driver was loaded that ECC could not correct; a reset sets the count back."""
    count = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return f"{count} memory errors could not be corrected since its last reset" if count else ""


def _links(nvml: Any, handle: Any) -> str:
    """Some of its NVLinks are up and others down. All of them down is what a GPU without a bridge looks like."""
    states: dict[int, bool] = {}
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _LINKS)):
        try:
            states[link] = nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break  # it has no more
    down = [str(link) for link, up in states.items() if not up]
    return f"NVLink {', '.join(down)} of {len(states)} is down" if down and len(down) < len(states) else ""
