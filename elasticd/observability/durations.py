"""Counting how long things take, in buckets as Prometheus has them.

Owns: thread-safe counting. Must not: measure, or know what is counted.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What was counted so far; it does not change any more.

    Attributes:
        bounds: upper bounds of the buckets in seconds, ascending.
        counts: not cumulative; one more than bounds, for what is longer.
        total: sum of all durations, in seconds.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


class Durations:
    """Counts durations. Thread-safe.

    Args:
        bounds: upper bounds of the buckets in seconds, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._total += seconds

    @property
    def counted(self) -> Counted:
        """All so far."""
        with self._lock:
            return Counted(bounds=self._bounds, counts=tuple(self._counts), total=self._total)
