"""How this node and its jobs do at this moment: what its agents report, the machine, the GPUs.

Owns: which reports count, and putting them beside what the machine says. Must not: know other nodes, keep what was before, or wait for a driver.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from elasticd.daemon.gpureadings import Gpus
from elasticd.daemon.host import Host
from elasticd.daemon.nvml import NvmlError, ask, text
from elasticd.daemon.sampled import Sampled
from elasticd.observability.report import JobReport
from elasticd.observability.times import rfc3339

REPORTS: Final = "reports"
"""The directory of the reports, in the run directory."""
SHOWN_FOR: Final = 600.0
"""Seconds for which a report is shown that is not written any more."""
_REPORTS_MOST: Final = 256
_NOTE_MOST: Final = 64 * 1024
_NAMES_FRESH: Final = 60.0

_GPU: Final = ("index", "utilization", "memory_used", "memory_total", "temperature", "power", "throttled")


class Telemetry:
    """See the module. Thread-safe.

    Args:
        run_dir: where the agents of this node leave their reports.
        node: its name.
        gpus: of this machine; None: they are not looked at.
    """

    def __init__(self, run_dir: Path, node: str, gpus: Gpus | None = None) -> None:
        self._run_dir = run_dir
        self._node = node
        self.gpus = gpus
        self._indices = Sampled("gpu-names", _indices, fresh=_NAMES_FRESH)
        self._host = Host({})
        self._lock = threading.Lock()

    def own(self, job: str | None = None) -> dict[str, Any]:
        """This node's part, as docs/api.md has it; of one job only, if one is named."""
        now = time.time()
        with self._lock:
            host = self._host.read()
        gpus = self.gpus.read() if self.gpus else ()
        indices = (self._indices.get() or {}) if gpus else {}
        return {
            "name": self._node,
            "problem": "",
            "at": rfc3339(now),
            "clock": now,
            "host": {"cpu": host.cpu, "load": host.load, "memory_total": host.memory_total, "memory_available": host.memory_available},
            "gpus": [{name: value for name, value in asdict(gpu).items() if name in _GPU} for gpu in gpus],
            "jobs": [self._job(report, now, indices) for report in self._reports(job, now)],
        }

    def _job(self, report: JobReport, now: float, indices: Mapping[str, int]) -> dict[str, Any]:
        slots = _slots(self._run_dir / "notes" / f"{report.job}.json")
        return {"job": report.job, "age": max(0.0, now - report.at), "gpus": [indices.get(slot) for slot in slots], "report": report}

    def _reports(self, job: str | None, now: float) -> list[JobReport]:
        folder = self._run_dir / REPORTS
        try:
            paths = [folder / f"{job}.json"] if job else sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
        except OSError:
            return []
        found = (JobReport.read(path) for path in paths[:_REPORTS_MOST])
        return [report for path, report in zip(paths, found, strict=False) if report and report.job == path.stem and now - report.at < SHOWN_FOR]


def absent(name: str, problem: str) -> dict[str, Any]:
    """The part of a node that did not answer."""
    return {"name": name, "problem": problem, "at": None, "clock": 0.0, "host": None, "gpus": [], "jobs": []}


def _slots(note: Path) -> list[str]:
    """Which slots a job's agent was granted, by local rank: of a machine with GPUs their UUIDs."""
    try:
        with note.open("rb") as file:
            slots = json.loads(file.read(_NOTE_MOST)).get("slots", [])
        return [str(slot) for slot in slots] if isinstance(slots, list) else []
    except (OSError, ValueError, AttributeError):
        return []


def _indices() -> Mapping[str, int]:
    """UUID -> index of each GPU."""
    try:
        return ask(_names) or {}
    except NvmlError:
        return {}


def _names(nvml: Any) -> Mapping[str, int]:
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found[text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))] = index
        except nvml.NVMLError:
            continue
    return found
