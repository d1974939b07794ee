"""What a metric is, and a sheet on which a scrape's numbers are collected.

Owns: that whatever is put on a sheet is fit for Prometheus: closed sets of label values, finite numbers, no series twice. Must not: know a metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

OTHER: Final = "other"
"""Stands for every value that is not in a closed set that has it."""
BOUNDS_MAX: Final = 64
"""Buckets of a histogram that is believed."""


class Kind(StrEnum):
    """What a metric's numbers mean."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """One label.

    Attributes:
        values: all that it may have; () where the set is bounded by something else, which `about` says.
        about: for people.
    """

    name: str
    values: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: as Prometheus shows it; of a histogram without `_bucket`.
        about: its help.
        bounds: of a histogram: the buckets that are shown, of those that were counted in.
    """

    name: str
    kind: Kind
    about: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()


def gauge(name: str, about: str, *labels: Label) -> Family:
    """A number that rises and falls."""
    return Family(name=name, kind=Kind.GAUGE, about=about, labels=labels)


def counter(name: str, about: str, *labels: Label) -> Family:
    """A number that only rises, until what counts is started anew."""
    return Family(name=name, kind=Kind.COUNTER, about=about, labels=labels)


def histogram(name: str, about: str, bounds: Sequence[float], *labels: Label) -> Family:
    """Durations in buckets."""
    return Family(name=name, kind=Kind.HISTOGRAM, about=about, labels=labels, bounds=tuple(bounds))


class Buckets(Protocol):
    """What `observability.report.Histogram` and `observability.durations.Counted` both are."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds, ascending."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Not cumulative; one more than bounds."""

    @property
    def total(self) -> float:
        """Sum of what was counted."""


@dataclass(slots=True)
class _Column:
    """The series of one family."""

    family: Family
    numbers: dict[tuple[str, ...], float] = field(default_factory=dict)
    buckets: dict[tuple[str, ...], tuple[list[tuple[str, float]], float]] = field(default_factory=dict)


class Sheet:
    """The numbers of one scrape. Used by one thread."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def put(self, family: Family, value: float | None, *labels: str) -> None:
        """One number. None and what is not finite say nothing, and there is no series then; counters whose labels come to the same are added up."""
        if value is None or not math.isfinite(value):
            return
        key = _fit(family, labels)
        if key is None:
            return
        numbers = self._column(family).numbers
        before = numbers.get(key, 0.0) if family.kind is Kind.COUNTER else 0.0
        numbers[key] = before + float(value)

    def spread(self, family: Family, counted: Buckets, *labels: str) -> None:
        """One histogram; one that makes no sense is left out."""
        key = _fit(family, labels)
        shown = shown_buckets(counted, family.bounds)
        if key is not None and shown is not None:
            self._column(family).buckets[key] = (shown, counted.total)

    def metrics(self) -> Iterator[Metric]:
        """All of it, in the order in which families came."""
        for column in self._columns.values():
            yield _metric(column)

    def _column(self, family: Family) -> _Column:
        return self._columns.setdefault(family.name, _Column(family))


def shown_buckets(counted: Buckets, bounds: Sequence[float]) -> list[tuple[str, float]] | None:
    """The cumulative buckets for Prometheus: those of `bounds` that were counted in, and all; None if `counted` makes no sense.

    Buckets are cumulative, so leaving some out leaves the others right.
    """
    rising = all(low < high for low, high in zip(counted.bounds, counted.bounds[1:], strict=False))
    if len(counted.counts) != len(counted.bounds) + 1 or len(counted.bounds) > BOUNDS_MAX or not rising:
        return None
    shown: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip(counted.bounds, counted.counts, strict=False):
        below += count
        if bound in bounds:
            shown.append((str(float(bound)), float(below)))
    return [*shown, ("+Inf", float(below + counted.counts[-1]))]


def _fit(family: Family, values: tuple[str, ...]) -> tuple[str, ...] | None:
    """The label values as they are shown; None if one is not allowed."""
    fit: list[str] = []
    for label, value in zip(family.labels, values, strict=True):
        known = not label.values or value in label.values
        if not known and OTHER not in label.values:
            return None
        fit.append(value if known else OTHER)
    return tuple(fit)


def _metric(column: _Column) -> Metric:
    family, names = column.family, [label.name for label in column.family.labels]
    if family.kind is Kind.HISTOGRAM:
        spread = HistogramMetricFamily(family.name, family.about, labels=names)
        for key, (buckets, total) in column.buckets.items():
            spread.add_metric(key, buckets, total)
        return spread
    if family.kind is Kind.INFO:
        info = InfoMetricFamily(family.name.removesuffix("_info"), family.about, labels=())
        for key in column.numbers:
            info.add_metric((), dict(zip(names, key, strict=True)))
        return info
    made = (CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily)(family.name, family.about, labels=names)
    for key, number in column.numbers.items():
        made.add_metric(key, number)
    return made
