"""Checks before a node joins a job, run beside the decision loop.

Owns: one thread for each check that runs, and what came of the last. Must not: know what is checked (`health` does) or what follows (`reconcile`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from elasticd.daemon.reconcile import HealthSeen

if TYPE_CHECKING:
    from elasticd.daemon.health import Health
    from elasticd.daemon.jobs import JobSpec
    from elasticd.daemon.slots import Slot

log = structlog.get_logger("elasticd.daemon")

_JOIN = 5.0


class Runner(Protocol):
    """Runs all checks before one job; returns early when `cancelled` is set."""

    def __call__(self, spec: JobSpec, slots: Sequence[Slot], cancelled: threading.Event) -> Health:
        """How the node is. Must not raise."""


class Checking:
    """See the module. `begin` and `seen` belong to the loop's thread.

    Args:
        run: runs the checks.
        wake: called when one has ended.
    """

    def __init__(self, run: Runner, wake: Callable[[], None]) -> None:
        self._run = run
        self._wake = wake
        self._cancelled = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._results: dict[str, HealthSeen] = {}

    @property
    def seen(self) -> Mapping[str, HealthSeen]:
        """Job -> its last check, or the one that runs."""
        running = {job: HealthSeen(running=True) for job, thread in self._threads.items() if thread.is_alive()}
        return {**self._results, **running}

    def begin(self, spec: JobSpec, slots: Sequence[Slot]) -> None:
        """Check before `spec`, unless that is being done."""
        thread = self._threads.get(spec.name)
        if thread and thread.is_alive():
            return
        thread = threading.Thread(target=self._check, args=(spec, tuple(slots)), name=f"elasticd-check-{spec.name}", daemon=True)
        self._threads[spec.name] = thread
        thread.start()

    def forget(self) -> None:
        """Believe no result any more."""
        self._results = {}

    def close(self) -> None:
        """End what runs."""
        self._cancelled.set()
        for thread in self._threads.values():
            thread.join(_JOIN)

    def _check(self, spec: JobSpec, slots: tuple[Slot, ...]) -> None:
        try:
            health = self._run(spec, slots, self._cancelled)
            ok, reason = health.ok, health.reason
        except Exception as error:  # a check that breaks is not a node that is well
            log.exception("check_broke", job=spec.name)
            ok, reason = False, f"the check itself failed: {error}"
        if not self._cancelled.is_set():
            self._results[spec.name] = HealthSeen(ok=ok, reason=reason, at=time.monotonic())
            if not ok:
                log.warning("check_failed", job=spec.name, reason=reason)
        self._wake()
