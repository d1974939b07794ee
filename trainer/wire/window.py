"""What a worker's steps of about a second came to: the unit in which telemetry travels from a worker to its agent, into files and to the detectors.

Owns: the fields, their units, and refusing what does not fit. Must not: measure anything, or import torch.

A window holds whole optimizer steps of one rank in one generation. All of a rank's steps are in exactly one window, unless `dropped` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from trainer.errors import ChannelError

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "snapshot", "other")
"""Where the time of a step goes; together they are the whole of it.

data: waiting for the next batch. forward, backward: this rank's own work. communication: waiting for other ranks after that. optimizer: its step.
snapshot: the copy of the state. other: what is left: the body's own, logging, the end of a step.
"""
STEP_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds, in seconds, of the buckets that steps are counted in; one more bucket holds what is longer."""
VALUES_MAX: Final = 32
"""Named values that a window may have."""
NAME_MAX: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """What one value did in a window. Values that are not finite are counted and left out of the rest, which is None if there was no other.

    Attributes:
        last, low, high, mean: of the finite ones.
        count: of all.
        nonfinite: of those that were NaN or infinite.
    """

    last: float | None
    low: float | None
    high: float | None
    mean: float | None
    count: int
    nonfinite: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these, oldest first."""
        finite = [value for value in values if math.isfinite(value)]
        count, nonfinite = len(values), len(values) - len(finite)
        if not finite:
            return cls(last=None, low=None, high=None, mean=None, count=count, nonfinite=nonfinite)
        return cls(last=finite[-1], low=min(finite), high=max(finite), mean=math.fsum(finite) / len(finite), count=count, nonfinite=nonfinite)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """See the module.

    Attributes:
        rank: whose.
        generation: in which.
        first, last: optimizer steps, counted from 1 over the whole run.
        began, ended: seconds since the epoch.
        seconds: of all its steps together.
        phases: of `PHASES` -> (seconds of all steps together, of the step that had most of it).
        buckets: steps by their length, one count for each of `STEP_BOUNDS` and one for longer ones.
        slowest: the longest step of all, and its seconds.
        samples: that this rank trained on.
        batches: microbatches of this rank.
        values: "loss", "grad_norm", "lr" and whatever the script logs.
        memory: bytes: "rss"; on a GPU "allocated", "reserved" and "peak".
        dropped: windows that could not be sent since the one before.
    """

    rank: int
    generation: int
    first: int
    last: int
    began: float
    ended: float
    seconds: float
    phases: Mapping[str, tuple[float, float]]
    buckets: tuple[int, ...]
    slowest: tuple[int, float]
    samples: int = 0
    batches: int = 0
    values: Mapping[str, Spread] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0

    @property
    def steps(self) -> int:
        """How many it holds."""
        return self.last - self.first + 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Window:
        """The reverse.

        Raises:
            ChannelError: something is missing, unknown, of another type, or makes no sense.
        """
        try:
            return cls._checked(dict(values))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ChannelError(f"a window that is none: {error}"[:300]) from None

    @classmethod
    def _checked(cls, raw: dict[str, Any]) -> Window:
        unknown = raw.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise ValueError(f"unknown {', '.join(sorted(map(str, unknown)))[:100]}")
        phases = {name: (_seconds(raw["phases"][name][0]), _seconds(raw["phases"][name][1])) for name in PHASES}
        buckets = tuple(_count(one) for one in raw["buckets"])
        if len(buckets) != len(STEP_BOUNDS) + 1 or len(raw["phases"]) != len(PHASES):
            raise ValueError("buckets or phases are not those known here")
        values, memory = raw.get("values") or {}, raw.get("memory") or {}
        if len(values) > VALUES_MAX or len(memory) > VALUES_MAX:
            raise ValueError("more values than allowed")
        window = cls(
            rank=_count(raw["rank"]),
            generation=_count(raw["generation"]),
            first=_count(raw["first"]),
            last=_count(raw["last"]),
            began=_seconds(raw["began"]),
            ended=_seconds(raw["ended"]),
            seconds=_seconds(raw["seconds"]),
            phases=phases,
            buckets=buckets,
            slowest=(_count(raw["slowest"][0]), _seconds(raw["slowest"][1])),
            samples=_count(raw.get("samples", 0)),
            batches=_count(raw.get("batches", 0)),
            values={_name(name): _spread(value) for name, value in values.items()},
            memory={_name(name): _count(value) for name, value in memory.items()},
            dropped=_count(raw.get("dropped", 0)),
        )
        if not 1 <= window.first <= window.last:
            raise ValueError(f"steps {window.first} to {window.last}")
        return window


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.40} is no number of seconds")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier() or len(value) > NAME_MAX:
        raise ValueError(f"{value!r:.80} is no name")
    return value


def _spread(value: Any) -> Spread:
    made = Spread(**value)
    for number in (made.last, made.low, made.high, made.mean):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number)):
            raise ValueError(f"{number!r:.40} is no number")
    _count(made.count)
    _count(made.nonfinite)
    return made
