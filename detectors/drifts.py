"""The loss of the whole job against its own past: it jumps, or it rises and stays.

Owns: these two. Must not: compare ranks (`peers`): reduced gradients make the loss of all of them go the same way.

A spike mostly heals by itself (BLOOM-176B: in 30 iterations, chronicle of 2022-04-12), so it is advice. A loss that stays above what it was is a
divergence. What is usual is the median of the last windows and the spread from one to the next, both of the logarithm; while the loss is out of bounds nothing
is learnt, or a slow divergence would become what is usual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.observations import Phase
from detectors.windows import Window

_MAD: Final = 1.4826
_LEAST: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """When the loss of a job is odd. Sizes are of the natural logarithm: 0.1 is 10 %.

    Attributes:
        hold: windows that the usual is learnt from; `warm_up` of them before anything is said.
        least: the spread is never taken to be smaller.
        spike_z, spike: a window's highest loss is a spike this many spreads above the usual, and at least this much.
        rise_z, rise: its mean is raised from here on.
        lasting: raised windows in a row that are a divergence.
        repeat: windows after which what goes on is told again.
    """

    hold: int = 60
    warm_up: int = 20
    least: float = 0.01
    spike_z: float = 8.0
    spike: float = 0.7
    rise_z: float = 5.0
    rise: float = 0.10
    lasting: int = 12
    repeat: int = 6


class Drifts:
    """Windows in, findings out."""

    def __init__(self, settings: Settings = Settings()) -> None:
        self._settings = settings
        self._past: deque[float] = deque(maxlen=settings.hold)
        self._raised = 0
        self._since = 0.0

    def see(self, window: Window) -> list[Finding]:
        """What is odd about the loss in this window; nothing out of TRAIN."""
        losses = [row.values["loss"] for row in window.rows.values() if row.values.get("loss", 0.0) > 0.0]
        if window.phase is not Phase.TRAIN or not losses:
            return []
        settings, mean = self._settings, math.log(max(_LEAST, median(losses)))
        highest = max((row.values.get("loss_high", 0.0) for row in window.rows.values()), default=0.0)
        high = math.log(highest) if highest > _LEAST else mean
        if len(self._past) < settings.warm_up:
            self._past.append(mean)
            return []
        usual = median(self._past)
        spread = max(settings.least, _spread(self._past))
        raised = mean - usual > max(settings.rise, settings.rise_z * spread)
        self._raised = self._raised + 1 if raised else 0
        if self._raised == 1:
            self._since = window.began
        if not raised:
            self._past.append(mean)
        found = []
        if high - usual > max(settings.spike, settings.spike_z * spread) and self._raised <= 1:
            found.append(_finding(window, "loss_spike", high, usual, spread, "jumped", role=Role.ADVISE, certainty=Certainty.STRONG, began=window.began))
        if self._raised >= settings.lasting and (self._raised - settings.lasting) % settings.repeat == 0:
            found.append(_finding(window, "diverged", mean, usual, spread, "rose and stays", role=Role.ROOT, certainty=Certainty.STRONG, began=self._since))
        return found


def _spread(past: Sequence[float]) -> float:
    """Standard deviation around a line that rises or falls: of what follows on each other, which a slow trend hardly changes."""
    return _MAD / math.sqrt(2.0) * median(abs(one - other) for one, other in pairwise(past))


def _finding(window: Window, kind: str, now: float, usual: float, spread: float, what: str, *, role: Role, certainty: Certainty, began: float) -> Finding:
    z = round((now - usual) / spread, 1)
    return Finding(
        at=window.ended,
        detector="drifts",
        kind=kind,
        summary=f"the loss {what}: {math.exp(now):.4g}, usually {math.exp(usual):.4g}",
        cls=Class.USER,
        role=role,
        certainty=certainty,
        scope="job",
        generation=window.generation,
        features=(Feature(name="loss", value=math.exp(now), baseline=math.exp(usual), z=z),),
        began=began,
    )
