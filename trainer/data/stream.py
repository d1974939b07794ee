"""Reads iterable datasets, of which nobody can ask for sample i.

Owns: which items of a stream make up a rank's microbatches, and finding the place again. Must not: send samples from rank to rank.

The rule is the one of all other data: a step holds the next `batch` items of the stream, dealt to ranks by position. Every rank, and every
worker that reads ahead for it, runs the same stream and keeps its own. That is exact in any world and across any change, for a stream that
yields the same items each time it is begun with the same epoch and the same random numbers; its price is that everybody reads everything,
and that a run which continues reads what it had read before.

A dataset can lower the price:

* `iter_from(position)`: an iterator that begins at an item of the epoch. A run that continues then reads nothing twice.
* `__len__` besides: the exact number of items of an epoch. Then each rank reads its own items alone, one seek for each step.
* `set_epoch(epoch)`: called before each epoch, where the items are to depend on it.

A stream must not deal its items to workers or ranks itself: `get_worker_info()` is None within it. Each `next` finds the generators of random
numbers seeded for (seed, epoch, position), so that shuffle buffers repeat themselves too.
A stream that yields other items each time, such as a queue, is read without an error, but then no promise is kept: an item may come twice or
not at all after a change of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, _utils, get_worker_info

from trainer import rng
from trainer.data import workers
from trainer.data.fetch import tell_epoch
from trainer.data.fingerprint import length
from trainer.data.workers import LoaderOptions
from trainer.errors import SetupError, StateError
from trainer.order import Cursor, Piece, Plan, key


@runtime_checkable
class Seekable(Protocol):
    """A stream that can begin anywhere."""

    def iter_from(self, position: int, /) -> Iterator[Any]:
        """Return an iterator over the items from `position` of the epoch on."""


def read(dataset: Any, plan: Plan, cursor: Cursor, options: LoaderOptions, *, sample_rng: bool = True) -> Iterator[tuple[int, list[Any]]]:
    """Yield (samples over all ranks, this rank's batches) for every step from `cursor` to the end of its epoch."""
    turns = Turns(dataset, plan, cursor, workers.collate_of(options), sample_rng=sample_rng)
    iterator = workers.begin(workers.build(turns, dataset, options, persistent=False, batch_size=None))
    try:
        for samples, batches in iterator:
            yield samples, list(batches)
    finally:
        workers.end(iterator)


_Parts = tuple[int, int, list[tuple[Piece, list[Any]]]]
"""Where a step begins, its samples over all ranks, and the pieces of this rank with their items."""


class Turns(IterableDataset[Any]):
    """One pass of a rank over a stream, step by step. Of several workers each takes its turns.

    Args:
        dataset: the stream.
        plan: how the run reads.
        cursor: where to begin.
        collate: makes a batch of a list of samples.
        sample_rng: whether to seed for each item.
    """

    def __init__(self, dataset: Any, plan: Plan, cursor: Cursor, collate: Callable[[list[Any]], Any], *, sample_rng: bool) -> None:
        self._dataset = dataset
        self._plan = plan
        self._cursor = cursor
        self._collate = collate
        self._sample_rng = sample_rng

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        info = get_worker_info()
        worker, count = (info.id, info.num_workers) if info else (0, 1)
        _utils.worker._worker_info = None  # noqa: SLF001 - a stream that looks must see that it is alone
        tell_epoch(self._dataset, self._cursor.epoch)
        n = length(self._dataset) if isinstance(self._dataset, Seekable) else None
        steps = self._all() if n is None else self._own(n, worker, count)
        for turn, (offset, samples, parts) in enumerate(steps):
            if turn % count == worker:
                yield samples, [self._batch(offset + piece.start, items) for piece, items in parts]

    def _all(self) -> Iterator[_Parts]:
        """Every step, by reading every item."""
        offset = self._cursor.offset
        items = self._items(offset)
        while step := list(islice(items, self._plan.batch)):
            samples = self._plan.samples(0, len(step))
            if not samples:
                return
            yield offset, samples, [(piece, step[piece.start : piece.stop]) for piece in self._plan.pieces(samples)]
            offset += samples

    def _own(self, n: int, worker: int, count: int) -> Iterator[_Parts]:
        """Every step, but only the items of this rank, and of the steps that are this worker's."""
        items: Iterator[Any] = iter(())
        at = -1
        for turn, (offset, samples) in enumerate(self._plan.steps(self._cursor.offset, n)):
            if turn % count != worker:
                yield offset, samples, []
                continue
            pieces = self._plan.pieces(samples)
            start, stop = offset + pieces[0].start, offset + pieces[-1].stop
            if start != at:
                items = self._items(start)
            mine = list(islice(items, stop - start))
            at = stop
            if len(mine) < stop - start:
                raise SetupError(f"{type(self._dataset).__qualname__} ended after {start + len(mine)} items, its length is {n}", remedy="correct its __len__")
            first = pieces[0].start
            yield offset, samples, [(piece, mine[piece.start - first : piece.stop - first]) for piece in pieces]

    def _items(self, position: int) -> Iterator[Any]:
        """The items from `position` on.

        Raises:
            StateError: there are fewer.
        """
        dataset, epoch = self._dataset, self._cursor.epoch
        self._seed(rng.SAMPLE, -1)
        at = position if isinstance(dataset, Seekable) else 0
        items = dataset.iter_from(at) if isinstance(dataset, Seekable) else iter(dataset)
        while True:
            rng.begin_sample(self._plan.seed, epoch, at)
            self._seed(rng.SAMPLE, at)
            try:
                item = next(items)
            except StopIteration:
                break
            if at >= position:
                yield item
            at += 1
        if at < position:
            raise StateError(f"epoch {epoch} of {type(dataset).__qualname__} ended after {at} items, the state was made after {position}")

    def _batch(self, first: int, items: list[Any]) -> Any:
        self._seed(rng.COLLATE, first)
        return self._collate(items)

    def _seed(self, what: int, position: int) -> None:
        if self._sample_rng:
            rng.seed_cpu(key(what, self._plan.seed, self._cursor.epoch, position))
