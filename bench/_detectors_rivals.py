"""Known detectors of oddities in a series, written small after their papers, to stand beside ours in the same run.

Owns: ADWIN, half-space trees, a rolling robust z. Must not: be used by anything but benches.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Adwin:
    """A. Bifet, R. Gavaldà: Learning from time-changing data with adaptive windowing, SDM 2007; ADWIN2 with its exponential histogram.

    Args:
        delta: how sure a change must be; the smaller, the surer.
    """

    BUCKETS: Final = 5
    EVERY: Final = 32
    """Samples from one check to the next."""
    LEAST: Final = 5
    """Samples on each side of a cut."""

    def __init__(self, delta: float = 0.002) -> None:
        self._delta = delta
        self._rows: list[deque[tuple[float, float]]] = [deque()]  # row i: (sum, sum of squares about the mean) of 2^i samples, newest left
        self._count = 0
        self._sum = 0.0
        self._square = 0.0
        self._time = 0

    def see(self, value: float) -> bool:
        """Whether the mean changed."""
        self._time += 1
        if self._count:
            mean = self._sum / self._count
            self._square += self._count * (value - mean) ** 2 / (self._count + 1)
        self._count += 1
        self._sum += value
        self._rows[0].appendleft((value, 0.0))
        self._compress()
        return self._time % self.EVERY == 0 and self._count > 2 * self.LEAST and self._shrink()

    def _compress(self) -> None:
        for index, row in enumerate(self._rows):
            if len(row) <= self.BUCKETS:
                return
            size = 1 << index
            (one, about_one), (two, about_two) = row.pop(), row.pop()
            apart = (one - two) ** 2 / (2 * size)
            if index + 1 == len(self._rows):
                self._rows.append(deque())
            self._rows[index + 1].appendleft((one + two, about_one + about_two + apart))

    def _shrink(self) -> bool:
        found = False
        while self._cut():
            found = True
            index = len(self._rows) - 1
            total, about = self._rows[index].pop()
            size = 1 << index
            rest = self._count - size
            if rest:
                mean, other = total / size, (self._sum - total) / rest
                self._square = max(0.0, self._square - about - size * rest / self._count * (mean - other) ** 2)
            self._count, self._sum = rest, self._sum - total
            while len(self._rows) > 1 and not self._rows[-1]:
                self._rows.pop()
        return found

    def _cut(self) -> bool:
        if self._count <= 2 * self.LEAST:
            return False
        variance, log = self._square / self._count, math.log(2 * math.log(max(self._count, 3)) / self._delta)
        left, total = 0, 0.0
        for index in range(len(self._rows) - 1, -1, -1):
            for part, _ in reversed(self._rows[index]):
                left, total = left + (1 << index), total + part
                right = self._count - left
                if right < self.LEAST:
                    return False
                if left < self.LEAST:
                    continue
                harmonic = 1 / (left - self.LEAST + 1) + 1 / (right - self.LEAST + 1)
                bound = math.sqrt(2 * harmonic * variance * log) + 2 / 3 * harmonic * log
                if abs(total / left - (self._sum - total) / right) > bound:
                    return True
        return False


class HalfSpaceTrees:
    """S. C. Tan, K. M. Ting, T. F. Liu: Fast anomaly detection for streaming data, IJCAI 2011.

    Args:
        low, high: what is expected of each feature; they are scaled to 0 to 1 by it.
        trees, height, window: as in the paper.
    """

    def __init__(self, low: Array, high: Array, *, trees: int = 25, height: int = 8, window: int = 250, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._low, self._range = low, np.maximum(high - low, 1e-9)
        nodes = 2 ** (height + 1) - 1
        self._height, self._window, self._seen = height, window, 0
        self._feature = rng.integers(0, len(low), (trees, nodes))
        self._split = np.zeros((trees, nodes))
        for tree in range(trees):
            middle = rng.random(len(low))
            spread = 2 * np.maximum(middle, 1 - middle)
            boxes = {0: (middle - spread, middle + spread)}
            for node in range(2**height - 1):
                lower, upper = boxes.pop(node)
                axis = self._feature[tree, node]
                cut = self._split[tree, node] = (lower[axis] + upper[axis]) / 2
                below, above = upper.copy(), lower.copy()
                below[axis] = above[axis] = cut
                boxes[2 * node + 1], boxes[2 * node + 2] = (lower, below), (above, upper)
        self._reference, self._latest = np.zeros((trees, nodes)), np.zeros((trees, nodes))
        self._each = np.arange(trees)

    def see(self, row: Array) -> float:
        """How odd it is, before it is learnt: more is odder."""
        row = (row - self._low) / self._range
        node = np.zeros(len(self._each), dtype=np.int64)
        mass, open_, score = self._window * 0.1, np.ones(len(node), dtype=bool), np.zeros(len(node))
        for depth in range(self._height + 1):
            here = self._reference[self._each, node]
            score = np.where(open_, here * 2.0**depth, score)
            open_ &= here >= mass
            self._latest[self._each, node] += 1
            if depth < self._height:
                node = 2 * node + 1 + (row[self._feature[self._each, node]] >= self._split[self._each, node])
        self._seen += 1
        if self._seen % self._window == 0:
            self._reference, self._latest = self._latest, np.zeros_like(self._latest)
        return -float(score.sum())


def robust_z(values: Array, *, window: int = 288, least: float = 1e-9) -> Array:
    """|value - median| / (1.4826 MAD) of the `window` values before; 0 for the first ones."""
    found = np.zeros(len(values))
    blocks = np.lib.stride_tricks.sliding_window_view(values, window)
    for first in range(0, len(values) - window, 4096):
        block = blocks[first : min(first + 4096, len(values) - window)]
        middle = np.median(block, axis=1)
        spread = 1.4826 * np.median(np.abs(block - middle[:, None]), axis=1)
        now = values[first + window : first + window + len(block)]
        found[first + window : first + window + len(block)] = np.abs(now - middle) / np.maximum(spread, least)
    return found
