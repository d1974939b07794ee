"""What run_digits.py sees of its workers: what they wrote, in which world they train, and in the end which samples count.

Owns: reading the files of counted_digits.py, and the counting. Must not: start, disturb or judge anything.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EPOCHS = 12
SAMPLES = 1347  # that one trains on: the 1,797 images less the quarter that the test gets
FORWARD_TIME = 0.1  # seconds; most of a step
SETTLED = 10  # steps after which a new world is said to train


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What a worker wrote: a forward pass in training or, where it has no ids, its own end. `step`: steps done by then; see counted_digits.py."""

    generation: int
    world: int
    rank: int
    step: int
    epoch: int
    ids: tuple[int, ...]
    at: float
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What became of the training.

    Attributes:
        steps: that are in the weights.
        generations: of workers that trained.
        lost: steps that a rank had finished, and that were done again.
        repeated, missed: samples that an epoch had more than once, or not at all.
    """

    steps: int
    generations: int
    lost: int
    repeated: int
    missed: int

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, repeated or missed."""
        return not (self.lost or self.repeated or self.missed)

    def __str__(self) -> str:
        return f"{self.lost} steps lost, {self.repeated} samples repeated, {self.missed} missed"


def count(lines: Iterable[Line], *, epochs: int = EPOCHS, samples: int = SAMPLES) -> Count:
    """Follow the generations one after the other: what a later one did again replaces what earlier ones had done.

    A worker has finished a step if it began the next one, or says at its end that it did. One that was killed had not finished the step that it was at.
    """
    by_generation: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_generation[line.generation].append(line)
    lost = reached = 0
    kept: dict[int, list[Line]] = {}
    for _, of_one in sorted(by_generation.items()):
        first = min(line.step for line in of_one)
        lost += max(0, reached - first)
        reached = max(line.step for line in of_one)
        kept = {step: passes for step, passes in kept.items() if step < first}
        for line in of_one:
            if line.ids:
                kept.setdefault(line.step, []).append(line)
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for line in itertools.chain.from_iterable(kept.values()):
        seen[line.epoch].update(line.ids)
    repeated = sum(times - 1 for epoch in seen.values() for times in epoch.values())
    missed = sum(samples - len(seen[epoch]) for epoch in range(epochs))
    return Count(steps=len(kept), generations=len(by_generation), lost=lost, repeated=repeated, missed=missed)


class Witnesses:
    """What the workers have written so far.

    Args:
        out: where their files are.

    Attributes:
        lines: of all workers, in no order; `read` adds to them.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._read: dict[Path, int] = defaultdict(int)
        self.lines: list[Line] = []

    def read(self) -> None:
        """Take in what is new. A line that is not whole yet, or that a kill cut short, is left where it is."""
        for path in self._out.glob("samples-*.jsonl"):
            pid = int(path.stem.rpartition("-")[2])
            with path.open("rb") as file:
                file.seek(self._read[path])
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole) + len(end)
            self.lines += [Line(**line | {"ids": tuple(line["ids"]), "pid": pid}) for line in map(json.loads, whole.splitlines())]

    @property
    def newest(self) -> list[Line]:
        """Forward passes of the newest generation that has any, by step."""
        passes = [line for line in self.lines if line.ids]
        generation = max((line.generation for line in passes), default=0)
        return sorted((line for line in passes if line.generation == generation), key=lambda line: line.step)

    def begun(self, rank: int) -> Line | None:
        """The last pass of this rank, if it began just now and so still goes on."""
        last = next((line for line in reversed(self.newest) if line.rank == rank), None)
        return last if last and time.time() - last.at < FORWARD_TIME / 2 else None

    def trains(self, world: int, *, after: int) -> list[Line]:
        """The first pass of each rank of the newest generation, once it trains: it is of this many ranks, later than `after`, and well on its way."""
        newest = self.newest
        if not newest or newest[0].generation <= after or newest[0].world != world or newest[-1].step < newest[0].step + SETTLED:
            return []
        firsts = {line.rank: line for line in reversed(newest)}
        return [firsts[rank] for rank in sorted(firsts)]
