"""Steps, added up to a window while they are made.

Owns: the sums, in memory that does not grow with the steps. Must not: measure anything, or import torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.wire.window import PHASES, STEP_BOUNDS, VALUES_MAX, Spread, Window

LARGEST = 1e300
"""Beyond it a number counts as infinite: sums of such would be."""


@dataclass(slots=True)
class Stepped:
    """One step that was made.

    Attributes:
        number: counted from 1 over the run.
        ended: seconds since the epoch.
        seconds: that it took.
        spent: of it in each of `PHASES`.
        samples, batches: of this rank.
        values: what was said of it, by name; a name may come more than once.
    """

    number: int
    ended: float
    seconds: float
    spent: Sequence[float]
    samples: int
    batches: int
    values: Sequence[tuple[str, float]]


class Tally:
    """What one value did."""

    __slots__ = ("_count", "_finite", "_high", "_last", "_low", "_total")

    def __init__(self) -> None:
        self._count = self._finite = 0
        self._last = self._low = self._high = self._total = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._count += 1
        if not -LARGEST <= value <= LARGEST:  # NaN fails it too
            return
        if not self._finite:
            self._low = self._high = value
        self._finite += 1
        self._last = value
        if value < self._low:  # noqa: PLR1730 - as in Tallies
            self._low = value
        if value > self._high:  # noqa: PLR1730
            self._high = value
        self._total += value

    def spread(self) -> Spread:
        """All of it."""
        if not self._finite:
            return Spread(last=None, low=None, high=None, mean=None, count=self._count, nonfinite=self._count)
        mean = min(max(self._total / self._finite, self._low), self._high)  # rounding may carry it past the ends
        return Spread(last=self._last, low=self._low, high=self._high, mean=mean, count=self._count, nonfinite=self._count - self._finite)


class Tallies:
    """A window in the making.

    Args:
        rank, generation: see `Window`.
        first: the step that it begins with.
    """

    def __init__(self, rank: int, generation: int, first: Stepped) -> None:
        self._rank = rank
        self._generation = generation
        self._first = self._last = first.number
        self.began = max(0.0, first.ended - first.seconds)
        self._ended = first.ended
        self._seconds = 0.0
        self._phases = [0.0] * len(PHASES)
        self._most = [0.0] * len(PHASES)
        self._buckets = [0] * (len(STEP_BOUNDS) + 1)
        self._slowest = (first.number, 0.0)
        self._samples = self._batches = 0
        self._values: dict[str, Tally] = {}
        self.add(first)

    def add(self, step: Stepped) -> None:
        """The next step."""
        self._last, self._ended = step.number, step.ended
        self._seconds += step.seconds
        phases, most = self._phases, self._most
        for index, seconds in enumerate(step.spent):
            phases[index] += seconds
            if seconds > most[index]:  # noqa: PLR1730 - in each step, and max() takes twice as long
                most[index] = seconds
        self._buckets[bisect_left(STEP_BOUNDS, step.seconds)] += 1
        if step.seconds > self._slowest[1]:
            self._slowest = (step.number, step.seconds)
        self._samples += step.samples
        self._batches += step.batches
        self.note(step.values)

    def note(self, values: Iterable[tuple[str, float]]) -> None:
        """More values. Names beyond `VALUES_MAX` are left out."""
        for name, value in values:
            tally = self._values.get(name)
            if tally is None:
                if len(self._values) >= VALUES_MAX:
                    continue
                tally = self._values[name] = Tally()
            tally.add(value)

    @property
    def names(self) -> frozenset[str]:
        """Of values."""
        return frozenset(self._values)

    def window(self, *, memory: Mapping[str, int], dropped: int) -> Window:
        """What it came to."""
        return Window(
            rank=self._rank,
            generation=self._generation,
            first=self._first,
            last=self._last,
            began=self.began,
            ended=self._ended,
            seconds=self._seconds,
            phases=dict(zip(PHASES, zip(self._phases, self._most, strict=True), strict=True)),
            buckets=tuple(self._buckets),
            slowest=self._slowest,
            samples=self._samples,
            batches=self._batches,
            values={name: tally.spread() for name, tally in self._values.items()},
            memory=memory,
            dropped=dropped,
        )
