"""Asking NVIDIA's library about the GPUs of this machine.

Owns: loading NVML, telling "there are none" from "they cannot be asked", and not waiting for ever. Must not: judge what it says (`machine` and
`health` do).

A sick GPU or driver can hold a call for ever. So one question is asked at a time, and as long as one that was given up has not come back, later
ones fail too.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog

from elasticd.daemon.patience import within

T = TypeVar("T")

SECONDS: Final = 20.0
"""How long NVML may take. Where the driver is not kept loaded, its start takes seconds on a machine of eight GPUs."""

log = structlog.get_logger("elasticd.daemon")
_busy = threading.Lock()


class NvmlError(Exception):
    """There is a driver, and what it says is an error. One line."""


class NvmlSilenceError(NvmlError):
    """It does not answer."""


def ask(question: Callable[[Any], T], *, seconds: float = SECONDS) -> T | None:
    """Ask NVML.

    Args:
        question: is given the module `pynvml`, initialized.
        seconds: to wait for the answer.

    Returns:
        The answer; None where there is no `pynvml`, no NVML or no driver, and so no GPU that could be used.

    Raises:
        NvmlError: it could not be asked, or did not answer in time.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        log.debug("no_gpus", reason=f"pynvml cannot be imported: {error}")
        return None
    if not _busy.acquire(timeout=seconds):
        raise NvmlSilenceError("NVML still owes the answer to an earlier question")
    try:
        return within(seconds, lambda: _answer(nvml, question), name="elasticd-nvml")
    except TimeoutError as error:
        raise NvmlSilenceError(f"NVML: {error}") from None
    except nvml.NVMLError as error:
        raise NvmlError(f"NVML: {error}") from None


def _answer(nvml: Any, question: Callable[[Any], T]) -> T | None:
    try:
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            log.debug("no_gpus", reason=str(error))
            return None
        raise
    finally:
        _busy.release()  # here, on the thread that asked: not before NVML has come back


def text(value: str | bytes) -> str:
    """What NVML calls a string: bytes in older versions of its module."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
