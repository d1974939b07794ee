"""What detectors are told: one small frozen value for each thing that was seen.

Owns: the kinds of observations. Must not: read files, parse text (`sources`), or judge.

Times are seconds since the epoch, as the clock of the node that saw it tells them. `node` is a name, "" if it is not known; `rank` is None for what
belongs to a node or to the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple


class Stream(StrEnum):
    """Where a line was read."""

    OUT = "stdout"
    ERR = "stderr"
    EVENT = "event"
    """A structlog event of elasticd's, or of anybody's who logs JSON with an `event`."""
    KERNEL = "kernel"


_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Line(NamedTuple):
    """One line of text, cut to `sources.LINE_MAX` characters and harmless. A tuple, since a frozen dataclass takes three times as long to make.

    Attributes:
        text: what stands there; of an event its name and its fields in one line, so that signatures can be looked for in it.
        event: the event's name, "" for plain text.
        level: "debug" to "critical", "" where nothing says it.
        logger: who logged it, "" if nothing says it.
        fields: of an event, without time, level, event, logger.
    """

    at: float
    stream: Stream
    text: str
    node: str = ""
    rank: int | None = None
    generation: int | None = None
    event: str = ""
    level: str = ""
    logger: str = ""
    fields: Mapping[str, Any] = _NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What one rank's steps of about a second came to: `trainer.wire.window.Window`, without what detectors do not read.

    Attributes:
        at: when the last of them ended.
        first, last: optimizer steps.
        seconds: of all of them.
        phases: "data", "forward", "backward", "communication", "optimizer", "snapshot", "other" -> seconds of all of them.
        values: "loss", "grad_norm" and what the script logs -> mean of the finite ones; None where there was none.
        highest: the same names -> the highest finite one.
        nonfinite: the same names -> how many were NaN or infinite; only those above 0.
        memory: "rss", "allocated", "reserved", "peak" -> bytes.
    """

    at: float
    rank: int
    first: int
    last: int
    seconds: float
    phases: Mapping[str, float]
    node: str = ""
    generation: int | None = None
    samples: int = 0
    values: Mapping[str, float | None] = field(default_factory=dict)
    highest: Mapping[str, float] = field(default_factory=dict)
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """All ranks side by side, as rank 0 gathered them; the only word of other nodes' ranks that a node has by itself.

    Attributes:
        step: the optimizer step at which it was gathered.
        ranks: for each rank, by rank, the mean seconds of a step: the names of `Steps.phases`, and "seconds" for the whole.
    """

    at: float
    step: int
    ranks: tuple[Mapping[str, float], ...]
    node: str = ""
    generation: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Values of a node or of one of its GPUs, by the names in `sources.METRICS` (dcgm-exporter's and node-exporter's are translated to them).

    Attributes:
        values: cumulative counters are as they were read; windows make differences of them.
        gpu: index on the node, None for the node itself.
    """

    at: float
    values: Mapping[str, float]
    node: str = ""
    gpu: int | None = None
    rank: int | None = None


class Phase(StrEnum):
    """What a job is doing. Only TRAIN is learnt from and scored by statistics."""

    INIT = "init"
    TRAIN = "train"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    RESCALE = "rescale"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The job, or a rank of it, goes into another phase.

    Attributes:
        world_size: ranks from now on, None if that does not change.
        why: in a few words, for people.
    """

    at: float
    phase: Phase
    node: str = ""
    rank: int | None = None
    generation: int | None = None
    world_size: int | None = None
    why: str = ""


Observation = Line | Steps | Ranks | Reading | Change
