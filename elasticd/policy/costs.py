"""What stops cost, what failures cost, and from which probability on one is worth the other. All in seconds of the whole job.

Owns: the cost model. Must not: decide; say where a number was measured.

An unforeseen failure costs D until it is noticed, L of work done again, and R until the job trains. To restart before costs C and R. So a restart is worth
it from p* = (C + R) / (L + D + R) on, if it removes the cause; a checkpoint alone, which saves L, from p* = C / L on.
(The optimal interval between checkpoints is another matter: Young 1974, Daly 2006, `trainer.interval`.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticd.policy.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What this job's own times were, in seconds, the newest few of each; empty where there are none yet.

    Attributes:
        checkpoints: how long a checkpoint held the steps up.
        restarts: from the stop of the workers to the first new step.
        detections: from a failure to the stop that it led to.
        intervals: from one checkpoint to the next.
        step_s: a step, None until known.
    """

    checkpoints: tuple[float, ...] = ()
    restarts: tuple[float, ...] = ()
    detections: tuple[float, ...] = ()
    intervals: tuple[float, ...] = ()
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """C, R, L and D at one moment. `guessed` names those that are the settings' word, not this job's times."""

    checkpoint_s: float
    restart_s: float
    lost_s: float
    detect_s: float
    step_s: float | None = None
    guessed: tuple[str, ...] = ()

    @property
    def restart_from(self) -> float:
        """p* of a restart: the probability of a failure from which on it is worth it. Infinite if a failure costs nothing."""
        return _ratio(self.checkpoint_s + self.restart_s, self.lost_s + self.detect_s + self.restart_s)

    @property
    def checkpoint_from(self) -> float:
        """p* of an early checkpoint."""
        return _ratio(self.checkpoint_s, self.lost_s)

    def pays_after(self, slowdown: float) -> float:
        """Seconds that a slow-down has to last until a restart without it has paid: (C + R) / s.

        Args:
            slowdown: 0.2 for steps that take 1.2 times as long.
        """
        return _ratio(self.checkpoint_s + self.restart_s, slowdown)

    def numbers(self) -> dict[str, float]:
        """For people, rounded to milliseconds."""
        return {"C_s": round(self.checkpoint_s, 3), "R_s": round(self.restart_s, 3), "L_s": round(self.lost_s, 3), "D_s": round(self.detect_s, 3)}


def costs(measured: Measured, settings: Settings, since_checkpoint_s: float | None = None) -> Costs:
    """Medians of the job's own times, or the settings' word where it has none.

    Args:
        since_checkpoint_s: the work that a failure now would throw away; None: half an interval, which is its mean.
    """
    guessed: list[str] = []

    def typical(name: str, values: Sequence[float], otherwise: float) -> float:
        believed = [value for value in values if math.isfinite(value) and value >= 0.0]
        if not believed:
            guessed.append(name)
            return otherwise
        return median(believed)

    if since_checkpoint_s is not None and math.isfinite(since_checkpoint_s):
        lost = max(0.0, since_checkpoint_s)
    else:
        lost = typical("L", measured.intervals, settings.interval_s) / 2.0
    return Costs(
        checkpoint_s=typical("C", measured.checkpoints, settings.checkpoint_s),
        restart_s=typical("R", measured.restarts, settings.restart_s),
        lost_s=lost,
        detect_s=typical("D", measured.detections, settings.detect_s),
        step_s=measured.step_s,
        guessed=tuple(guessed),
    )


def worth_dropping(slowdown: float, nodes: int, spare: int = 0) -> bool:
    """Whether the job is faster without its slow node.

    All nodes wait for the slowest, and the same batch over one node less takes N / (N - 1) as long: so from s > 1 / (N - 1) on. With a node standing by that
    takes its place nothing is lost but the restart.

    Args:
        slowdown: 0.2 for steps that take 1.2 times as long.
        nodes: that train, the slow one included.
        spare: nodes that stand by.
    """
    if nodes < 2 and not spare:
        return False
    return slowdown > 0.0 if spare > 0 else slowdown > 1.0 / (nodes - 1)


# --- what came of it, afterwards -----------------------------------------------------------------------------------------


def saved_by_checkpoint(*, failed_at: float, taken_at: float, before_at: float, cost_s: float) -> float:
    """Seconds that an early checkpoint saved a job that failed later: the work between the checkpoint before it and itself, less what it cost.

    0 is never returned for nothing: one after which nothing failed comes out as its cost, below 0.
    """
    return (max(0.0, taken_at - before_at) if failed_at >= taken_at else 0.0) - cost_s


def saved_by_dropping(*, before_step_s: float, after_step_s: float, steps: int, took_s: float) -> float:
    """Seconds that leaving a slow node out has saved so far; below 0 until it has paid.

    Args:
        before_step_s, after_step_s: a step with the node, and without.
        steps: done since.
    """
    return (before_step_s - after_step_s) * steps - took_s


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0.0 else math.inf
