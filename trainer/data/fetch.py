"""Reads the samples of map-style datasets, microbatch by microbatch, ahead of need if there are workers.

Owns: one DataLoader over a dataset, and that a sample does not depend on who reads it, or after what. Must not: decide what is read.

What `dataset[i]` draws from torch, NumPy or `random` comes from generators seeded for (seed, epoch, i); what `collate_fn` draws, from those
seeded for (seed, epoch, position of its first sample). A dataset that draws nothing is not charged for it: see `trainer.rng.Draws`. The first
batch that is seen to draw is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from trainer import rng
from trainer.data import workers
from trainer.data.workers import LoaderOptions
from trainer.order import Cursor, Order, Plan, key

LOOKAHEAD: Final = 4096
"""Positions whose samples are computed at once: a call for a few costs as much as one for a thousand."""
_LOOKAHEAD_PARTS: Final = 256


class Request(NamedTuple):
    """A microbatch to read: samples `indices` of the dataset, the first of them at position `first` of `epoch`."""

    epoch: int
    first: int
    indices: list[int]


class Fetcher:
    """Stands in for a dataset within a DataLoader: answers a Request with a finished batch.

    Args:
        dataset: anything with `__getitem__`.
        collate: makes a batch of a list of samples.
        seed: of the run.
        sample_rng: False reads without regard to random numbers, by `__getitems__` where the dataset has it.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], *, seed: int, sample_rng: bool = True) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._sample_rng = sample_rng and not (_draws_nothing(dataset) and collate is default_collate)
        self._epoch = -1
        self._drawn = rng.Draws()
        self._collate_drawn = rng.Draws()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: Request) -> Any:
        """What DataLoader calls. Returns the batch."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            tell_epoch(self._dataset, request.epoch)
        if not self._sample_rng:
            return self._collate(self._bulk(request))
        batch = self._read(request)
        if get_worker_info() is None:
            # The training process draws from these too: not the same numbers after every batch.
            rng.seed_cpu(key(rng.BETWEEN, self._seed, request.epoch, request.first))
        return batch

    def _read(self, request: Request) -> Any:
        """The batch, read again as long as something draws that was not seen to before."""
        while True:
            self._drawn.arm()
            samples = self._one_by_one(request) if self._drawn else self._bulk(request)
            if self._drawn.found():
                continue
            if self._collate is default_collate:
                return default_collate(samples)
            self._collate_drawn.arm()
            self._collate_drawn.seed(key(rng.COLLATE, self._seed, request.epoch, request.first))
            batch = self._collate(samples)
            if not self._collate_drawn.found():
                return batch

    def _bulk(self, request: Request) -> list[Any]:
        dataset = self._dataset
        many = getattr(dataset, "__getitems__", None)
        if many is not None:
            return list(many(request.indices))
        return [dataset[index] for index in request.indices]

    def _one_by_one(self, request: Request) -> list[Any]:
        samples = []
        for index in request.indices:
            rng.begin_sample(self._seed, request.epoch, index)
            self._drawn.seed(key(rng.SAMPLE, self._seed, request.epoch, index))
            samples.append(self._dataset[index])
        return samples


def _draws_nothing(dataset: Any) -> bool:
    """Whether that is known without looking: samples that lie in memory are quicker to read than to look after."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    return type(dataset) in {TensorDataset, torch.Tensor, list, tuple, range}


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call `dataset.set_epoch(epoch)` where there is such a method, in the process that reads."""
    tell = getattr(dataset, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def requests(plan: Plan, cursor: Cursor, n: int) -> Iterator[Request]:
    """Yield what a rank reads from `cursor` to the end of an epoch of n: a request for each microbatch."""
    order = plan.order(n, cursor.epoch)
    parts: list[range] = []
    positions = 0
    for offset, samples in plan.steps(cursor.offset, n):
        mine = [range(offset + piece.start, offset + piece.stop) for piece in plan.pieces(samples)]
        positions += sum(map(len, mine))
        parts += mine
        if positions >= LOOKAHEAD or len(parts) >= _LOOKAHEAD_PARTS:
            yield from _requests(order, cursor.epoch, parts)
            parts, positions = [], 0
    yield from _requests(order, cursor.epoch, parts)


def _requests(order: Order, epoch: int, parts: list[range]) -> Iterator[Request]:
    if not parts:
        return
    positions = np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])
    indices = order.at(positions).tolist()
    at = 0
    for part in parts:
        yield Request(epoch, part.start, indices[at : at + len(part)])
        at += len(part)


class _Requests:
    """The DataLoader's batch sampler: what to read in the pass that is about to begin."""

    def __init__(self) -> None:
        self.next: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.next)


class Feed:
    """Batches for requests, in their order.

    Args:
        dataset: anything with `__getitem__`.
        options: for torch's DataLoader.
        seed, sample_rng: as of Fetcher.
        once: there will be one pass, so that no worker need stay.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, *, seed: int, sample_rng: bool = True, once: bool = False) -> None:
        self._fetcher = Fetcher(dataset, workers.collate_of(options), seed=seed, sample_rng=sample_rng)
        self._dataset = dataset
        self._options = options
        stay = options.get("persistent_workers")
        self._persistent = not once and (options.get("workers", 0) > 0 if stay is None else stay)
        self._requests = _Requests()
        self._loader = self._build()
        self._iterator: Iterator[Any] = iter(())

    def _build(self) -> DataLoader[Any]:
        return workers.build(self._fetcher, self._dataset, self._options, persistent=self._persistent, batch_sampler=self._requests)

    def batches(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield a batch for each request. A new pass ends the one before; what that one had read ahead is dropped."""
        self._requests.next = requests
        self._iterator = iterator = workers.begin(self._loader)
        try:
            yield from iterator
        finally:
            if not self._persistent:
                workers.end(iterator)

    def close(self) -> None:
        """End the workers. A pass that is still under way must not be continued; another can begin."""
        workers.end(self._iterator)
        self._iterator = iter(())
        self._loader = self._build()
