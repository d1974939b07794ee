"""The numbers of a window as a few that say how unusual each rank is: against itself, against its peers, for a moment and for minutes.

Owns: which measurements are read (`METRICS`), what is usual for each rank, and the summaries (`SUMMARIES`). Must not: decide what is too unusual
(`forest`, `peers`), import scikit-learn.

A forest sees neither one bad metric among many nor a column that was constant while it learnt, and it takes what is missing for normal. So it is given no
measurements, but magnitudes of what they come to together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detectors.observations import Phase
from detectors.windows import Window

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measurement of a row, and how two values of it are compared.

    Attributes:
        name: in `Row.values` of the rank, else of its node.
        scale: "log" for what is compared by its ratio, "linear" by its difference, "count" by log(1 + n), "trend" by its ratio to the last minutes.
        least: the smallest standard deviation that is believed, on that scale: what never moved in the warm-up may move this much.
        worse: 1 where more is worse, -1 where less is, 0 where both are odd.
    """

    name: str
    scale: str
    least: float
    worse: int = 0

    def back(self, value: float) -> float:
        """From the metric's scale to its unit."""
        if self.scale in {"log", "trend"}:
            return math.exp(value)
        return math.expm1(value) if self.scale == "count" else value


METRICS: Final = (
    Metric(name="compute_s", scale="log", least=0.003, worse=1),
    Metric(name="data_s", scale="log", least=0.05, worse=1),
    Metric(name="comm_s", scale="log", least=0.05),
    Metric(name="other_s", scale="log", least=0.05, worse=1),
    Metric(name="loss", scale="trend", least=0.005, worse=1),
    Metric(name="grad_norm", scale="trend", least=0.02, worse=1),
    Metric(name="rss_bytes", scale="log", least=0.003, worse=1),
    Metric(name="gpu_temperature_c", scale="linear", least=0.5, worse=1),
    Metric(name="gpu_power_w", scale="log", least=0.005),
    Metric(name="gpu_utilization", scale="linear", least=0.01, worse=-1),
    Metric(name="gpu_clock_mhz", scale="log", least=0.002, worse=-1),
    Metric(name="host_cpu", scale="linear", least=0.02, worse=1),
    Metric(name="host_memory_used", scale="linear", least=0.005, worse=1),
    Metric(name="host_disk_busy", scale="linear", least=0.02, worse=1),
    Metric(name="n_error", scale="count", least=0.25, worse=1),
    Metric(name="n_warn", scale="count", least=0.25, worse=1),
    Metric(name="n_first_seen", scale="count", least=0.25, worse=1),
    Metric(name="entropy", scale="linear", least=0.05),
    Metric(name="lines_per_s", scale="log", least=0.05),
)
SUMMARIES: Final = ("joint", "residual")
"""What a rank's window comes to for the forest, as logarithms; of z against its peers (against itself where it has none), averaged over about two minutes.

joint: how odd the averages are together, given how they usually vary together (Mahalanobis distance). residual: how far they are from the plane that they
usually lie in (PCA). Measured before these two were left: with largest and second largest |z|, their number above 4 and root mean squares beside them, the
forest found next to no joint drift at the same number of false alarms; what has one large deviation is found by `peers` and rules in any case.
"""
SIZES: Final = ("worst", "second", "many", "missing")
"""Of z against its own usual, now: largest and second largest, as log(1 + z); how many are above 4; how many of the usual measurements are not there."""
LIMIT: Final = 50.0
"""No z is larger."""
RANKS_MAX: Final = 4096
"""Further ranks are not looked at."""
CELLS_MAX: Final = 4_000_000
"""Numbers that are remembered at most, whatever the number of ranks."""
TINY: Final = 1e-4
_SCALES: Final = ("log", "linear", "count", "trend")


def matrix(window: Window, ranks: Sequence[int], metrics: Sequence[Metric]) -> Array:
    """Ranks by metrics, on the metrics' scales ("trend" as "log"); NaN where nothing was measured."""
    names = [metric.name for metric in metrics]
    nothing = [np.nan] * len(names)
    found = []
    for rank in ranks:
        row = window.rows.get(rank)
        if row is None:
            found.append(nothing)
            continue
        node = window.nodes.get(row.node)
        get, more = row.values.get, (node.values if node else {}).get
        found.append([more(name, np.nan) if (value := get(name)) is None else value for name in names])
    values = np.array(found, dtype=float).reshape(len(ranks), len(names))
    of = {scale: [index for index, metric in enumerate(metrics) if metric.scale == scale] for scale in _SCALES}
    if ratios := of["log"] + of["trend"]:
        values[:, ratios] = np.log(np.maximum(np.abs(values[:, ratios]), TINY))
    if counts := of["count"]:
        values[:, counts] = np.log1p(np.maximum(values[:, counts], 0.0))
    return values


def median_of_others(values: Array) -> Array:
    """For each number of a column the median of the column's other numbers; NaN where there is none, or the number itself is NaN."""
    count = values.shape[0]
    order = np.argsort(values, axis=0)  # NaN last
    ranked = np.take_along_axis(values, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(count)[:, None], axis=0)
    others = np.count_nonzero(values == values, axis=0) - 1  # noqa: PLR0124  # not NaN
    low, high = np.maximum(others - 1, 0) // 2, np.maximum(others, 0) // 2
    columns = np.arange(values.shape[1])
    last = count - 1
    below = ranked[np.minimum(low + (place <= low), last), columns]  # without its own place, those from there on move up by one
    above = ranked[np.minimum(high + (place <= high), last), columns]
    return np.where((others > 0) & (values == values), (below + above) / 2, np.nan)  # noqa: PLR0124


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A window's numbers on the metrics' scales, ranks by metrics.

    Attributes:
        ranks: whose.
        values: as measured. apart: how far from the median of the other ranks.
    """

    ranks: tuple[int, ...]
    values: Array
    apart: Array


def measure(window: Window, ranks: Sequence[int], metrics: Sequence[Metric] = METRICS) -> Measured:
    """The numbers of these ranks."""
    values = matrix(window, ranks, metrics)
    return Measured(ranks=tuple(ranks), values=values, apart=values - median_of_others(values))


def robust(block: Array, least: Array) -> tuple[Array, Array]:
    """Median and standard deviation (1.4826 MAD, at least `least`) along the first axis, without NaN; NaN and `least` where there is nothing else."""
    ordered = np.sort(block, axis=0)  # np.nanmedian is many times slower
    counts = np.count_nonzero(block == block, axis=0)  # noqa: PLR0124
    middle = _middle(ordered, counts)
    spread = _middle(np.sort(np.abs(block - middle), axis=0), counts)
    return middle, np.fmax(1.4826 * spread, least)


def _middle(ordered: Array, counts: NDArray[np.int64]) -> Array:
    low = np.take_along_axis(ordered, np.maximum(counts - 1, 0)[None] // 2, axis=0)[0]
    high = np.take_along_axis(ordered, np.minimum(counts // 2, len(ordered) - 1)[None], axis=0)[0]
    return np.asarray((low + high) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One window in numbers.

    Attributes:
        ranks: whose the rows are; nodes: where these are. there: which of them said anything.
        sizes: ranks by `SIZES`.
        raw, usual: ranks by metrics, on the metrics' scales: what was measured, and the rank's median.
        own, apart: ranks by metrics: averaged z against the rank's own usual, and against its usual distance from its peers.
        busy: ranks whose node's processor was oddly busy lately, beside the other nodes or its own usual.
    """

    at: float
    began: float
    generation: int | None
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    there: NDArray[np.bool_]
    sizes: Array
    raw: Array
    usual: Array
    own: Array
    apart: Array
    busy: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joint:
    """How averaged deviations usually go together.

    Attributes:
        middle: mean of each. inverse: of their covariance, shrunk towards its diagonal.
    """

    middle: Array
    inverse: Array

    @classmethod
    def of(cls, rows: Array, *, shrink: float = 0.3) -> Joint:
        """From rows of deviations without NaN."""
        covariance = np.atleast_2d(np.cov(rows, rowvar=False))
        diagonal = np.diag(np.maximum(np.diag(covariance), 0.01))
        return cls(middle=rows.mean(axis=0), inverse=np.asarray(np.linalg.inv((1 - shrink) * covariance + shrink * diagonal), dtype=float))

    def distance(self, rows: Array) -> Array:
        """Mahalanobis distance of each row, as a root mean square over the columns."""
        away = rows - self.middle
        return np.asarray(np.sqrt(np.maximum(np.einsum("ij,ij->i", away @ self.inverse, away), 0.0) / rows.shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """The plane in which averaged deviations usually lie.

    Attributes:
        middle, spread: mean of each, and standard deviation. axes: of the plane, one a row.
    """

    middle: Array
    spread: Array
    axes: Array

    @classmethod
    def of(cls, rows: Array, *, kept: float = 0.8) -> Plane:
        """The principal components that explain `kept` of the variance of rows without NaN."""
        middle, spread = rows.mean(axis=0), rows.std(axis=0) + 0.05
        _, sizes, axes = np.linalg.svd((rows - middle) / spread, full_matrices=False)
        shares = np.cumsum(sizes**2) / max(float(np.sum(sizes**2)), 1e-12)
        return cls(middle=middle, spread=spread, axes=axes[: int(np.searchsorted(shares, kept)) + 1])

    def residual(self, rows: Array) -> Array:
        """Distance of each row from it, in standard deviations."""
        apart = (rows - self.middle) / self.spread
        return np.asarray(np.sqrt(np.maximum((apart**2).sum(axis=1) - ((apart @ self.axes.T) ** 2).sum(axis=1), 0.0)))


def summarize(apart: Array, joint: Joint, plane: Plane) -> Array:
    """Rows by `SUMMARIES`."""
    return np.column_stack([np.log(0.01 + joint.distance(apart)), np.log(0.01 + plane.residual(apart))])


class Summaries:
    """Windows in, their summaries out; what is usual is learnt on the way, for each rank of each generation anew.

    Args:
        metrics: what is read.
        hold: windows that are remembered, fewer where there are very many ranks.
        warm_up: windows in TRAIN from which on a rank's usual is believed.
        settle: windows in TRAIN from which on summaries are given.
        average: windows that z is averaged over, with exponential weights.
    """

    def __init__(self, *, metrics: Sequence[Metric] = METRICS, hold: int = 720, warm_up: int = 90, settle: int = 120, average: float = 12.0) -> None:
        self._metrics, self._hold, self._warm_up, self._settle, self._average = tuple(metrics), hold, warm_up, settle, average
        self._least = np.array([metric.least for metric in metrics])
        self._trends = [index for index, metric in enumerate(metrics) if metric.scale == "trend"]
        self._processor = next((index for index, metric in enumerate(metrics) if metric.name == "host_cpu"), None)
        self._key: object = None
        self._ranks: tuple[int, ...] = ()

    def see(self, window: Window, measured: Measured | None = None) -> Summary | None:
        """What it comes to; None out of TRAIN, and until it is known what is usual.

        Args:
            window: the next one.
            measured: its numbers, if the caller has them already; of no use where they are of other ranks than this generation began with.
        """
        if window.phase is not Phase.TRAIN or not window.rows:
            return None
        if (window.generation, window.world_size) != self._key or not window.rows.keys() <= set(self._ranks):
            self._begin(window)
        if measured is None or measured.ranks != self._ranks:
            measured = measure(window, self._ranks, self._metrics)
        raw, apart = self._without_trend(measured.values), measured.apart
        self._own[self._seen % len(self._own)], self._apart[self._seen % len(self._apart)] = raw, apart
        self._seen += 1
        summary = self._summary(window, raw, apart) if self._seen > self._warm_up else None
        if self._seen in {self._warm_up, 2 * self._warm_up, 4 * self._warm_up} or self._seen % 360 == 0:
            self._learn()
        return summary

    def _begin(self, window: Window) -> None:
        self._key, self._ranks = (window.generation, window.world_size), tuple(sorted(window.rows)[:RANKS_MAX])
        self._nodes = tuple(window.rows[rank].node for rank in self._ranks)
        shape = (len(self._ranks), len(self._metrics))
        hold = max(self._settle, min(self._hold, CELLS_MAX // max(1, shape[0] * shape[1])))
        self._seen = 0
        self._own, self._apart = np.full((hold, *shape), np.nan), np.full((hold, *shape), np.nan)
        self._trend = np.full((60, shape[0], len(self._trends)), np.nan)
        self._slow_own, self._slow_apart = np.zeros(shape), np.zeros(shape)
        self._busy = np.zeros((15, shape[0]), dtype=bool)
        self._middle: Array = np.full(shape, np.nan)
        self._sigma: Array = np.ones(shape)
        self._middle_apart: Array = np.full(shape, np.nan)
        self._sigma_apart: Array = np.ones(shape)

    def _without_trend(self, raw: Array) -> Array:
        if self._trends:
            raw, now = raw.copy(), raw[:, self._trends]
            if self._seen % 6 == 0:
                self._level = robust(self._trend, np.zeros(now.shape[1]))[0]
            self._trend[self._seen % len(self._trend)] = now
            raw[:, self._trends] = now - self._level
        return raw

    def _summary(self, window: Window, raw: Array, apart: Array) -> Summary | None:
        z = np.clip((raw - self._middle) / self._sigma, -LIMIT, LIMIT)
        z_apart = np.clip((apart - self._middle_apart) / self._sigma_apart, -LIMIT, LIMIT) if len(self._ranks) > 1 else z
        self._slow_own += np.nan_to_num(np.clip(z, -6.0, 6.0) - self._slow_own) / self._average  # clipped: a spike is no drift
        self._slow_apart += np.nan_to_num(np.clip(z_apart, -6.0, 6.0) - self._slow_apart) / self._average
        if self._processor is not None:
            self._busy[self._seen % len(self._busy)] = z[:, self._processor] > 3
        if self._seen <= self._settle:
            return None
        sizes = np.abs(np.nan_to_num(z))
        ordered = np.sort(sizes, axis=1)
        missing = np.count_nonzero(np.isnan(raw) & ~np.isnan(self._middle), axis=1)
        return Summary(
            at=window.ended,
            began=window.began,
            generation=window.generation,
            ranks=self._ranks,
            nodes=self._nodes,
            there=np.isin(self._ranks, list(window.rows)),
            sizes=np.column_stack([np.log1p(ordered[:, -1]), np.log1p(ordered[:, -2]), np.count_nonzero(sizes > 4, axis=1), missing]),
            raw=raw,
            usual=self._middle,
            own=self._slow_own.copy(),
            apart=self._slow_apart.copy(),
            busy=np.count_nonzero(self._busy, axis=0) >= 3,
        )

    def _learn(self) -> None:
        """What is usual, from what is remembered; a rank that moved away from its peers keeps what was usual for it before."""
        middle, sigma = robust(self._own, self._least)
        middle_apart, sigma_apart = robust(self._apart, self._least)
        if self._seen > 4 * self._warm_up:
            strayed = np.abs(middle_apart - self._middle_apart) > self._sigma_apart
            for new, old in ((middle, self._middle), (sigma, self._sigma), (middle_apart, self._middle_apart), (sigma_apart, self._sigma_apart)):
                np.copyto(new, old, where=strayed)
        self._middle, self._sigma, self._middle_apart, self._sigma_apart = middle, sigma, middle_apart, sigma_apart
