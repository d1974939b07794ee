"""What a training loop is handed.

Owns: the two values. Must not: know how they were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """What one forward and backward pass works on.

    Attributes:
        batch: what collate_fn made.
        index: which of the step's microbatches, over all ranks: part of the key for random numbers.
        samples: how many of its samples count: all, or 0 where this rank has none in this step and repeats the first microbatch, so that it
            takes part in every reduction.
        weight: samples / samples of the step. All weights of a step sum to 1 over the ranks.
    """

    batch: Any
    index: int
    samples: int
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One rank's part of an optimizer step.

    Attributes:
        epoch: counted from 0.
        offset: samples of the epoch before it, over all ranks.
        samples: of the step, over all ranks.
        microbatches: this rank's, one or more, in the order of the step.
    """

    epoch: int
    offset: int
    samples: int
    microbatches: tuple[Microbatch, ...]
