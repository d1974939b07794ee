"""What workers tell of their steps, as far as it is believed: the last seconds of each, and sums since the agent began.

Owns: which windows are believed, and what they come to. Must not: write, log, read a clock, or know what an agent's time goes into (`ledger`).

A worker is a user's program: whatever it says may be wrong, and none of it may harm the agent or fill its memory. It can only spoil the numbers of
its own job.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticd.agent.ledger import Given, Made
from elasticd.observability.report import Histogram, RankReport
from trainer.errors import ChannelError
from trainer.wire.channel import Ranks
from trainer.wire.window import PHASES, STEP_BOUNDS, Spread, Window

KEEP_SECONDS: Final = 10.0
"""Age, before a rank's newest window, of those that its numbers are made of."""
KEEP_WINDOWS: Final = 64
"""Windows of a rank that are kept at most."""
TOLD_MAX: Final = 128
"""Ranks of one node that a report tells of, so that it stays one that is read."""
SECONDS_MAX: Final = 1e7
COUNT_MAX: Final = 2**40
"""Largest values that are believed, so that no sum of them is more than a report holds."""
MEMORY: Final = ("rss", "allocated", "reserved", "peak")
COLUMNS: Final = (*PHASES, "seconds")
DIGITS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """The workers of this node in the generation at hand.

    Attributes:
        given: the generation.
        base_rank: rank of the first of them.
        nproc: how many.
    """

    given: Given
    base_rank: int
    nproc: int


class Telemetry:
    """See the module. For one thread at a time.

    Attributes:
        samples: that the workers of this node trained on.
        dropped: windows that did not get here, or were not believed.
        step_times: steps by their length, of the lowest local rank.
        loss, grad_norm: last finite ones of the lowest local rank.
        slowest: see `JobReport`.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.dropped = 0
        self.step_times = Histogram(bounds=STEP_BOUNDS, counts=(0,) * (len(STEP_BOUNDS) + 1))
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.slowest: tuple[int, float] | None = None
        self._ours: Ours | None = None
        self._ranks: dict[int, deque[Window]] = {}  # by local rank, the newest last
        self._nonfinite: dict[int, int] = {}

    def begin(self, ours: Ours) -> None:
        """A generation: what is said of another one from now on is not believed."""
        self._ours = ours
        self._ranks = {local_rank: deque(maxlen=KEEP_WINDOWS) for local_rank in range(ours.nproc)}
        self.slowest = None

    def end(self) -> None:
        """No worker runs any more."""
        self._ours, self._ranks, self.slowest = None, {}, None

    def take(self, local_rank: int, raw: Mapping[str, Any]) -> Window:
        """A window that a worker sent.

        Returns:
            It, as it is believed.

        Raises:
            ChannelError: it is not, and why.
        """
        try:
            window = self._checked(local_rank, Window.from_dict(raw))
        except ChannelError:
            self.dropped += 1
            raise
        self._ranks[local_rank].append(window)
        self.samples += window.samples
        self.dropped += window.dropped
        loss, norm = window.values.get("loss"), window.values.get("grad_norm")
        bad = sum(spread.nonfinite for spread in (loss, norm) if spread)
        self._nonfinite[local_rank] = self._nonfinite.get(local_rank, 0) + bad
        if local_rank == min(self._ranks):
            self.loss, self.grad_norm = _last(loss, self.loss), _last(norm, self.grad_norm)
            self.step_times = _with(self.step_times, window)
        return window

    def take_ranks(self, local_rank: int, said: Ranks) -> dict[str, list[float]]:
        """What rank 0 gathered of all ranks.

        Returns:
            Column -> a number for each rank.

        Raises:
            ChannelError: it is not believed, and why.
        """
        ours = self._ours
        if ours is None or ours.base_rank + local_rank != 0:
            raise ChannelError("only rank 0 speaks for all ranks, and while it runs")
        if not 1 <= said.steps <= COUNT_MAX or not 1 <= said.step <= COUNT_MAX:
            raise ChannelError(f"{said.steps} steps up to step {said.step}")
        columns = {name: _column(name, said.columns.get(name), ours.given.world_size) for name in COLUMNS}
        self.slowest = slowest(columns["seconds"], columns["communication"])
        return columns

    def reports(self) -> tuple[RankReport, ...]:
        """Every worker that has said something, by local rank; the first `TOLD_MAX` of them."""
        told = [(local_rank, windows) for local_rank, windows in sorted(self._ranks.items()) if windows]
        return tuple(self._report(local_rank, windows) for local_rank, windows in told[:TOLD_MAX])

    def _checked(self, local_rank: int, window: Window) -> Window:
        ours, windows = self._ours, self._ranks.get(local_rank)
        if ours is None or windows is None or window.generation != ours.given.number:
            raise ChannelError(f"a window of generation {window.generation}, which does not run here")
        if window.rank != ours.base_rank + local_rank:
            raise ChannelError(f"a window of rank {window.rank} from rank {ours.base_rank + local_rank}")
        before = windows[-1].last if windows else ours.given.resumed
        if window.first <= before:
            raise ChannelError(f"a window that begins with step {window.first} after step {before}")
        counts = (window.last, window.samples, window.batches, window.dropped, *(spread.nonfinite for spread in window.values.values()))
        if max(counts) > COUNT_MAX or sum(window.buckets) != window.steps:
            raise ChannelError("a window with counts that cannot be")
        lengths = (window.seconds, window.slowest[1], *(seconds for pair in window.phases.values() for seconds in pair))
        if max(lengths) > SECONDS_MAX:
            raise ChannelError("a window with times that cannot be")
        return window

    def _report(self, local_rank: int, windows: Sequence[Window]) -> RankReport:
        newest = windows[-1]
        recent = [window for window in windows if newest.ended - window.ended <= KEEP_SECONDS]
        steps = sum(window.steps for window in recent)
        losses = [window.values.get("loss") for window in recent]
        norms = [window.values.get("grad_norm") for window in recent]
        return RankReport(
            local_rank=local_rank,
            rank=newest.rank,
            at=newest.ended,
            step=newest.last,
            step_seconds=math.fsum(window.seconds for window in recent) / steps,
            phases={name: math.fsum(window.phases[name][0] for window in recent) / steps for name in PHASES},
            loss=_newest(losses),
            grad_norm=_newest(norms),
            nonfinite=self._nonfinite.get(local_rank, 0),
            memory={kind: newest.memory[kind] for kind in MEMORY if kind in newest.memory},
        )


def made_of(window: Window, *, clock: float, now: float) -> Made:
    """A window as the ledger takes it.

    Args:
        window: of the lowest local rank.
        clock: seconds since the epoch, now.
        now: the same on the ledger's clock.
    """
    ended = min(window.ended - clock, 0.0) + now
    began = min(window.began - clock + now, ended)
    # When the first step was done is not told. It usually is the longest by far: everything is warmed up in it.
    step, seconds = window.slowest
    others = (window.seconds - seconds) / max(1, window.steps - 1)
    first_ended = began + max(0.0, seconds if step == window.first else others)
    return Made(first=window.first, last=window.last, began=began, ended=ended, first_ended=min(first_ended, ended))


def slowest(seconds: Sequence[float], communication: Sequence[float]) -> tuple[int, float] | None:
    """Rank that was slowest by its own work, and how many times the median of all; None of less than two ranks, or where nothing was measured.

    Whoever waits for others does so in communication: it says nothing of this rank.
    """
    own = [max(0.0, whole - waited) for whole, waited in zip(seconds, communication, strict=True)]
    if len(own) < 2:  # alone nobody is slower
        return None
    median = statistics.median(own)
    rank = max(range(len(own)), key=own.__getitem__)
    return (rank, min(own[rank] / median, SECONDS_MAX)) if median > 0 else None


def _column(name: str, values: Any, size: int) -> list[float]:
    if not isinstance(values, list) or len(values) != size:
        raise ChannelError(f"{name} of all ranks is no list of {size}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
            raise ChannelError(f"{name} of all ranks holds {value!r:.40}")
    return [round(float(value), DIGITS) for value in values]


def _with(histogram: Histogram, window: Window) -> Histogram:
    counts = tuple(one + more for one, more in zip(histogram.counts, window.buckets, strict=True))
    return histogram.model_copy(update={"counts": counts, "total": histogram.total + window.seconds})


def _last(spread: Spread | None, before: float | None) -> float | None:
    return before if spread is None or spread.last is None else spread.last


def _newest(spreads: Sequence[Spread | None]) -> float | None:
    found: float | None = None
    for spread in spreads:
        found = _last(spread, found)
    return found
