"""What agents say of their jobs, as the daemon reads it: `reports/JOB.json` in its run directory.

Owns: reading a file only when it has changed, and what is believed when it cannot be read. Must not: interpret a report.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from elasticd.observability.report import JobReport

if TYPE_CHECKING:
    import os
    from pathlib import Path

_Stamp = tuple[int, int, int]


class Reports:
    """The reports of this node. Used by one thread at a time.

    Args:
        directory: where they lie.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[_Stamp, JobReport | None]] = {}

    def read(self, jobs: Collection[str]) -> Mapping[str, JobReport]:
        """The last report of each of `jobs` that made sense. It stays while its file is garbage or cannot be read, and goes with the file."""
        self._known = {job: known for job, known in self._known.items() if job in jobs}
        for job in jobs:
            self._look(job)
        return {job: report for job, (_, report) in self._known.items() if report is not None}

    def _look(self, job: str) -> None:
        path = self._directory / f"{job}.json"
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._known.pop(job, None)
            return
        except OSError:
            return
        seen, last = self._known.get(job, (None, None))
        stamp = _stamp(found)
        if stamp == seen or not stat.S_ISREG(found.st_mode):
            return
        report = JobReport.read(path)
        self._known[job] = stamp, report if report is not None and report.job == job else last


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_ino, found.st_mtime_ns, found.st_size
