"""When to snapshot: every step where that is next to free, else as seldom as losses are rare.

Owns: the arithmetic. Must not: look at a clock or at the state; durations are handed in. One rank decides for all (`trainer.flag`).

A snapshot of C seconds every T seconds costs a share C / T of the time, and a loss, one in M seconds, throws away T / 2 on average: the sum
C / T + T / 2M is smallest at T = sqrt(2 C M) (Young 1974; Daly 2006 has terms of higher order, which matter where C is not small against M).
"""

from __future__ import annotations

import math
from typing import Final

WEIGHT: Final = 0.1
"""Of a new measurement in the running mean."""


def young_daly(cost_s: float, mean_time_to_failure_s: float) -> float:
    """Seconds from one snapshot to the next that lose least, given what one costs."""
    return math.sqrt(2.0 * cost_s * mean_time_to_failure_s)


def steps_between(step_s: float, cost_s: float, *, every: int, cost_percent: float, mean_time_to_failure_s: float) -> int:
    """Steps from one snapshot to the next, 1 or more.

    Args:
        step_s: a step takes so long, without its snapshot.
        cost_s: a snapshot holds it up by so much.
        every: as somebody set it; 0 to let the cost decide.
        cost_percent: if one costs at most this share of a step, each step has one.
        mean_time_to_failure_s: from one loss to the next.
    """
    if every:
        return every
    if step_s <= 0.0 or cost_s <= step_s * cost_percent / 100.0:
        return 1
    return max(1, round(young_daly(cost_s, mean_time_to_failure_s) / step_s))


class Cadence:
    """Says when a snapshot is due, from what steps and snapshots were seen to take.

    Args:
        every, cost_percent, mean_time_to_failure_s: as in `steps_between`.
    """

    def __init__(self, *, every: int, cost_percent: float, mean_time_to_failure_s: float) -> None:
        self._every = every
        self._cost_percent = cost_percent
        self._mean_time_to_failure_s = mean_time_to_failure_s
        self._step_s: float | None = None
        self._cost_s: float | None = None
        self._last: int | None = None

    def stepped(self, seconds: float) -> None:
        """A step took so long, without its snapshot."""
        self._step_s = _mean(self._step_s, seconds)

    def took(self, step: int, seconds: float) -> None:
        """The snapshot of a step is in; it held the step up by so much."""
        self._cost_s = _mean(self._cost_s, seconds)
        self._last = step

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next; 1 until it is known what one costs."""
        if self._step_s is None or self._cost_s is None:
            return self._every or 1
        return steps_between(
            self._step_s,
            self._cost_s,
            every=self._every,
            cost_percent=self._cost_percent,
            mean_time_to_failure_s=self._mean_time_to_failure_s,
        )

    def due(self, step: int) -> bool:
        """Whether that step, counted in steps done, ends with a snapshot."""
        return self._last is None or step - self._last >= self.interval


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
