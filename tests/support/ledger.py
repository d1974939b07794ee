"""Counts, from what workers wrote down, which samples were trained on in the end, and how many steps were done in vain.

Owns: the counting. Must not: know how the steps came to be.

A line names generation, step (optimizer steps done before it), epoch, rank and the ids of the samples whose loss was computed. What a later
generation did again replaces what an earlier one had done: the last generation that did a step is the one whose step is in the weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What became of the samples.

    Attributes:
        steps: that are in the weights, without a gap from 0.
        lost: for each change of generation the steps that a rank had done and that were done again.
        repeated, missed: samples of a whole epoch more than once, or not at all; of the last, unfinished epoch only repeated ones.
    """

    steps: int
    lost: tuple[int, ...]
    repeated: int
    missed: int


def count(lines: Iterable[Mapping[str, Any]], *, samples: int) -> Count:
    """Count; AssertionError if a step is missing altogether."""
    by_generation: dict[int, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        by_generation[line["generation"]][line["step"]].append(line)
    generations = sorted(by_generation)
    last_by: dict[int, int] = {}
    for number in generations:
        first = min(by_generation[number])
        last_by = {step: by for step, by in last_by.items() if step < first} | dict.fromkeys(by_generation[number], number)
    assert sorted(last_by) == list(range(len(last_by))), f"steps are missing: {sorted(set(range(max(last_by) + 1)) - set(last_by))}"
    lost = [max(0, max(by_generation[before]) - min(by_generation[after])) for before, after in pairwise(generations)]
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for step, number in last_by.items():
        for line in by_generation[number][step]:
            seen[line["epoch"]].update(line["ids"])
    whole = sorted(seen)[:-1] + [epoch for epoch in sorted(seen)[-1:] if sum(seen[epoch].values()) >= samples]
    repeated = sum(times - 1 for counts in seen.values() for times in counts.values())
    missed = sum(samples - len(seen[epoch]) for epoch in whole)
    return Count(steps=len(last_by), lost=tuple(lost), repeated=repeated, missed=missed)
