"""Which sample comes when, and who reads it: arithmetic that every rank does alike, without a word to the others.

Owns: the order of an epoch, the place in it, how a step is cut and dealt to ranks, what each part weighs. Must not: import torch, read
samples, or remember anything; all is a function of its arguments, so that a run that continues in another world sees the same samples.

::

    positions of epoch e   0 ........ offset ............... offset + batch ........ n      order of e: position → sample
    one step                          │ piece 0 │ piece 1 │ piece 2 │                      cut evenly, none larger than `microbatch`
    ranks                             │ rank 0            │ rank 1  │                      neighbours stay together, shares differ by one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_SAMPLES: Final = 2**62
"""Most samples of an epoch: both halves of a position must fit the 32 bits that a round mixes."""
ROUNDS: Final = 4
"""Rounds of the permutation, each over both halves. With two, neighbours can be told from strangers; with three no more."""
FEW: Final = 1024
"""Up to so many samples an order is sorted by hashes instead: rounds over halves of one or two bits do not reach every order alike."""
_MASK: Final = 2**64 - 1
_ODD: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the constants of splitmix64
_MULTIPLIERS: Final = tuple(np.uint64(odd) for odd in _ODD[1:])
_HALF: Final = np.uint64(32)

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def key(*parts: int) -> int:
    """Return 64 well mixed bits that depend on every part and on their order. Parts are integers of any size and sign, taken modulo 2**64."""
    word = 0
    for part in parts:
        word = ((word ^ (part & _MASK)) + _ODD[0]) & _MASK
        word = ((word ^ (word >> 30)) * _ODD[1]) & _MASK
        word = ((word ^ (word >> 27)) * _ODD[2]) & _MASK
        word ^= word >> 31
    return word


class Order:
    """The order of one epoch: a permutation of range(n), computed where it is asked for, in constant memory (8 KiB at most).

    A position of `bits` bits is cut in two halves, and each in turn is changed by a keyed hash of the other, which can be undone and so is a
    permutation of range(2**bits) (a Feistel network). Where that leads out of range(n) it is applied again until it leads back in (cycle
    walking): fewer than two turns on average, since 2**bits < 2n.

    Args:
        n: samples of the epoch, 1 to MAX_SAMPLES.
        seed: of the run.
        epoch: counted from 0.
        shuffle: False leaves every sample where it lies.
    """

    __slots__ = ("_few", "_keys", "_masks", "_shift", "n", "shuffle")

    def __init__(self, n: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        if not 1 <= n <= MAX_SAMPLES:
            raise ValueError(f"an order has 1 to {MAX_SAMPLES} samples, not {n}")
        self.n = n
        self.shuffle = shuffle
        bits = (n - 1).bit_length()
        low = bits - bits // 2
        self._shift = np.uint64(low)
        self._masks = (np.uint64((1 << bits // 2) - 1), np.uint64((1 << low) - 1))
        self._keys = [tuple(np.uint64(key(seed, epoch, turn, half)) for half in (0, 1)) for turn in range(ROUNDS)]
        self._few = self._sorted() if n <= FEW and shuffle else None

    def at(self, positions: Indices) -> Indices:
        """Return the samples at `positions`, int64 of the same length, each within range(n)."""
        if not self.shuffle:
            return positions.copy()
        if self._few is not None:
            return self._few[positions]
        found = self._permute(positions.astype(np.uint64))
        out = np.flatnonzero(found >= self.n)
        while out.size:
            moved = self._permute(found[out])
            found[out] = moved
            out = out[moved >= self.n]
        return found.astype(np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions start to stop - 1, int64.

        Raises:
            IndexError: the epoch has no such positions.
        """
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions {start} to {stop} of an epoch of {self.n}")
        return self.at(np.arange(start, stop, dtype=np.int64))

    def _sorted(self) -> Indices:
        """All of range(n), sorted by 64 keyed bits of each."""
        words = np.arange(self.n, dtype=np.uint64)
        high, low = (_mixed(words, salt) for salt in self._keys[0])
        return np.argsort((high << _HALF) | low, kind="stable").astype(np.int64)

    def _permute(self, words: _Words) -> _Words:
        high, low = words >> self._shift, words & self._masks[1]
        for one, other in self._keys:
            high ^= _mixed(low, one) & self._masks[0]
            low ^= _mixed(high, other) & self._masks[1]
        return (high << self._shift) | low


def _mixed(words: _Words, salt: np.uint64) -> _Words:
    """32 bits for each word; the upper half of a product is the one that every bit of the factor reaches."""
    mixed = (words ^ salt) * _MULTIPLIERS[0]
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIERS[1]
    mixed >>= _HALF
    return mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """How far a run has read: all that a loader keeps. `offset` counts samples of the epoch, over all ranks."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One microbatch of a step, as positions relative to where the step begins.

    Attributes:
        index: which of the step's microbatches, over all ranks.
        start, stop: its positions.
        samples: how many of them count: 0 if others train on them and this rank has none of its own.
    """

    index: int
    start: int
    stop: int
    samples: int


def step_samples(offset: int, *, n: int, batch: int, drop_last: bool = False) -> int:
    """Samples of the step that begins at `offset` of an epoch of n, over all ranks; 0 if the epoch ends there."""
    left = n - offset
    return min(batch, left) if left >= batch or (left > 0 and not drop_last) else 0


def advance(cursor: Cursor, samples: int, *, n: int, batch: int, drop_last: bool = False) -> Cursor:
    """The cursor after `samples` more: in the next epoch if no step is left in this one. With 0 samples it puts a cursor in order."""
    offset = cursor.offset + samples
    if step_samples(offset, n=n, batch=batch, drop_last=drop_last):
        return Cursor(epoch=cursor.epoch, offset=offset)
    return Cursor(epoch=cursor.epoch + 1)


def bound(total: int, parts: int, index: int) -> int:
    """Where part `index` begins if `total` things are cut into `parts` that differ by at most one; part 0 is as large as any."""
    return -(-index * total // parts)


@lru_cache(maxsize=256)
def deal(samples: int, *, microbatch: int | None, world_size: int, rank: int) -> tuple[Piece, ...]:
    """Cut a step of `samples` and return what `rank` trains on: one piece at least, neighbours in the step.

    Args:
        samples: of the step, over all ranks; 1 or more.
        microbatch: most samples of a piece. The cut then does not depend on the world. None: one piece for each rank that gets any.
        world_size: ranks.
        rank: whose share.

    Returns:
        Pieces in the order of the step. A rank without any gets the first one with `samples` 0: it must take part in every reduction.
    """
    pieces = min(samples, world_size if microbatch is None else -(-samples // microbatch))
    mine = range(bound(pieces, world_size, rank), bound(pieces, world_size, rank + 1))
    cuts = [(index, bound(samples, pieces, index), bound(samples, pieces, index + 1)) for index in mine or (0,)]
    return tuple(Piece(index=index, start=start, stop=stop, samples=stop - start if mine else 0) for index, start, stop in cuts)


def weights(counts: Sequence[float], total: float) -> tuple[float, ...]:
    """Return what each of a rank's microbatches weighs in the mean over the step, if they hold `counts` of `total` things over all ranks.

    Things are samples, or whatever the loss is a mean over: tokens without padding, pixels with a label. A microbatch that repeats another
    rank's samples counts 0. With the mean loss of each microbatch times its weight, the sum over all ranks is the mean over the step; means of
    means are not. Weights over all ranks sum to 1; they are all 0 if the total is.

    Raises:
        ValueError: a count is negative, or the counts exceed the total.
    """
    if min(counts, default=0) < 0 or sum(counts) > total * (1 + 1e-9):
        raise ValueError(f"counts {list(counts)} are no part of a total of {total}")
    return tuple(count / total if total else 0.0 for count in counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a run reads its data. Rank and world size may change between steps; the samples of each step do not.

    Attributes:
        seed: of the run.
        batch: samples of a step, over all ranks.
        microbatch: most samples of a microbatch, None for one microbatch a rank.
        shuffle: another order in every epoch.
        drop_last: whether a shorter step at the end of an epoch is left out.
        rank, world_size: who we are.
    """

    seed: int = 0
    batch: int
    microbatch: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def order(self, n: int, epoch: int) -> Order:
        """The order of an epoch."""
        return Order(n, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def pieces(self, samples: int) -> tuple[Piece, ...]:
        """What this rank reads of a step of `samples`."""
        return deal(samples, microbatch=self.microbatch, world_size=self.world_size, rank=self.rank)

    def samples(self, offset: int, n: int) -> int:
        """Samples of the step at `offset`, 0 if the epoch ends there."""
        return step_samples(offset, n=n, batch=self.batch, drop_last=self.drop_last)

    def steps(self, offset: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, samples) of every step from `offset` to the end of an epoch of n."""
        while samples := self.samples(offset, n):
            yield offset, samples
            offset += samples

    def advance(self, cursor: Cursor, samples: int, n: int) -> Cursor:
        """The cursor after `samples` more of an epoch of n."""
        return advance(cursor, samples, n=n, batch=self.batch, drop_last=self.drop_last)
