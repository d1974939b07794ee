"""Deals a test set to the ranks: every sample once, none twice, so that a sum over the ranks is the sum over the set.

Owns: the shares. Must not: add anything up over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from trainer.data.fetch import Feed, Request
from trainer.data.fingerprint import is_stream, length
from trainer.data.steps import Microbatch
from trainer.data.workers import LoaderOptions
from trainer.errors import SetupError
from trainer.order import bound


class Evaluation:
    """Iterating yields this rank's Microbatches, in the order of the set. Nothing is repeated to make shares even: a rank may have none.

    A mean over the set is the sum over all ranks of each microbatch's mean times its weight.

    Args:
        dataset: map-style.
        batch_size: most samples of a microbatch.
        rank, world_size: who reads.
        seed: for data sets that draw at random, which then draw the same each time.
        options: for torch's DataLoader; workers end with each pass.

    Attributes:
        samples: of the whole set.
        turns: most microbatches that any rank has, for those who must do something together each turn.

    Raises:
        SetupError: it is a stream, or empty.
    """

    def __init__(self, dataset: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0, **options: Unpack[LoaderOptions]) -> None:
        n = None if is_stream(dataset) else length(dataset)
        if not n or batch_size < 1:
            raise SetupError(
                f"{type(dataset).__qualname__} cannot be evaluated", remedy="give a map-style data set that is not empty, and a batch_size of 1 or more"
            )
        self.samples = n
        self.turns = -(-n // (world_size * batch_size))
        self._pieces = min(n, self.turns * world_size)
        self._mine = range(bound(self._pieces, world_size, rank), bound(self._pieces, world_size, rank + 1))
        self._feed = Feed(dataset, options, seed=seed, once=True)

    def __len__(self) -> int:
        """Microbatches of this rank."""
        return len(self._mine)

    def __iter__(self) -> Iterator[Microbatch]:
        """Yield this rank's microbatches."""
        batches = self._feed.batches(self._requests())
        for piece, batch in zip(self._mine, batches, strict=True):
            samples = bound(self.samples, self._pieces, piece + 1) - bound(self.samples, self._pieces, piece)
            yield Microbatch(batch=batch, index=piece, samples=samples, weight=samples / self.samples)

    def _requests(self) -> Iterator[Request]:
        for piece in self._mine:
            start, stop = bound(self.samples, self._pieces, piece), bound(self.samples, self._pieces, piece + 1)
            yield Request(0, start, list(range(start, stop)))
