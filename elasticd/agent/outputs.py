"""Seeing that what workers write does not fill the disk.

Owns: a thread that looks at the present workers' files about once a second, and at old generations' now and then. Must not: hold up workers or the
agent, or end for whatever it meets.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.agent.retention import retain
from elasticd.agent.rotation import rotate
from elasticd.observability.shorten import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from elasticd.agent.logs import RankLogs
    from elasticd.observability.limits import LogLimits

CHECK_EVERY: Final = 1.0
"""Seconds between two looks at files that grow slowly."""
CHECK_LEAST: Final = 0.05
"""The same for those that would be full sooner."""
RETAIN_EVERY: Final = 60.0
"""Seconds between two looks at old generations; there is one at the beginning of each, too."""
_ALERT_EVERY: Final = 60.0
_CLOSE_WITHIN: Final = 5.0
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

log = structlog.get_logger("elasticd.agent.logs")


@dataclass(slots=True)
class _Output:
    """One file of a worker. Its descriptor is from before the worker's start: whatever the worker puts in its place, this is the one it writes."""

    path: Path
    fd: int
    size: int = 0
    seen_at: float = 0.0


class OutputKeeper:
    """See the module.

    Args:
        folder: `<root>/<job>/<node>`.
        limits: how much may stay.
    """

    def __init__(self, folder: Path, limits: LogLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._lock = threading.Lock()
        self._generations: list[list[_Output]] = []
        self._present: str = ""
        self._retain_at = 0.0
        self._alerted_at: dict[str, float] = {}
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="elasticd-logs", daemon=True)
        self._thread.start()

    def begin(self, ranks: Iterable[RankLogs]) -> None:
        """Workers are about to be started with these files; their directories are still ours. Files that cannot be opened are left to who needs them."""
        outputs = []
        for rank in ranks:
            for path in (rank.stdout, rank.stderr):
                with suppress(OSError):
                    fd = os.open(path, _OPEN, 0o644)
                    if stat.S_ISREG(os.fstat(fd).st_mode):
                        outputs.append(_Output(path, fd))
                    else:
                        os.close(fd)
            self._present = rank.directory.parent.name
        with self._lock:
            self._generations.append(outputs)
        self._retain_at = 0.0
        self._wake.set()

    def close(self) -> None:
        """Stop looking."""
        self._stopped = True
        self._wake.set()
        self._thread.join(_CLOSE_WITHIN)

    def _run(self) -> None:
        pause = CHECK_EVERY
        while not self._stopped:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                pause = self._look()
            except Exception:
                pause = CHECK_EVERY
                self._alert("outputs_not_looked_at")
        with self._lock:
            while self._generations:
                self._let_go(self._generations.pop())

    def _look(self) -> float:
        """One look at everything. Returns seconds until the next."""
        with self._lock:
            # Workers of the one before may still be dying.
            while len(self._generations) > 2:
                self._let_go(self._generations.pop(0))
            outputs = [output for generation in self._generations for output in generation]
        pause = min((self._see_to(output) for output in outputs), default=CHECK_EVERY)
        for fd in (1, 2):
            shorten(fd, self._limits.own_bytes)
        if not self._stopped and time.monotonic() >= self._retain_at:
            self._retain_at = time.monotonic() + RETAIN_EVERY
            retain(
                self._folder,
                {self._present},
                generations=self._limits.generations,
                nbytes=self._limits.job_bytes,
                stopped=lambda: self._stopped,
            )
        return max(CHECK_LEAST, pause)

    def _see_to(self, output: _Output) -> float:
        """Keep one file below its cap. Returns seconds in which it may be full again, if it goes on growing as it did."""
        most, now = self._limits.worker_bytes, time.monotonic()
        size = os.fstat(output.fd).st_size
        pace = max(0, size - output.size) / max(CHECK_LEAST, now - output.seen_at)
        if size > most:
            try:
                done = rotate(output.fd, output.path, most=most, files=self._limits.worker_files)
                size -= done.taken
                if done.trouble:
                    self._alert("older_output_not_kept", file=str(output.path), error=done.trouble)
            except OSError as error:
                self._alert("output_not_shortened", file=str(output.path), error=error.strerror)
        output.size, output.seen_at = max(0, size), now
        # Half of what is left may pass until then.
        return min(CHECK_EVERY, max(0, most - size) / (2 * pace)) if pace else CHECK_EVERY

    def _alert(self, event: str, **fields: object) -> None:
        """Say it once a minute."""
        now = time.monotonic()
        if now - self._alerted_at.get(event, -_ALERT_EVERY) >= _ALERT_EVERY:
            self._alerted_at[event] = now
            log.warning(event, exc_info=not fields, **fields)

    @staticmethod
    def _let_go(outputs: list[_Output]) -> None:
        for output in outputs:
            os.close(output.fd)
