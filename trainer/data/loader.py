"""The loader that a training script iterates: steps of a constant global batch, in any world, each sample once an epoch.

Owns: the cursor, and what a state of it must agree with. Must not: reduce anything over ranks, seed for a step, or count optimizer steps.

All that is kept is where the next step begins, and it moves when a step is done, not when it was read: what workers have read ahead is dropped
and read again. Order, cut and shares are computed (`trainer.order`), so that a change of the world between two steps changes who reads what,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Unpack

from trainer.data import stream
from trainer.data.evaluation import Evaluation
from trainer.data.fetch import Feed, requests
from trainer.data.fingerprint import fingerprint, is_stream, length
from trainer.data.steps import Microbatch, Step
from trainer.data.workers import LoaderOptions
from trainer.errors import SetupError, StateError
from trainer.order import MAX_SAMPLES, Cursor, Plan

AGREES: Final = {
    "samples": ("samples in the data set", "give the data that the run began with"),
    "seed": ("seed", "give the seed that the run began with"),
    "batch": ("samples in a step, over all ranks", "give the batch size that the run began with"),
    "shuffle": ("shuffle", "shuffle as the run began"),
    "fingerprint": ("fingerprint of the data set", "give the data that the run began with"),
}
"""What a state and the loader that takes it on must agree about: what it is, and what to do."""


class ElasticLoader:
    """Iterating yields a Step for each optimizer step that is left in the epoch; call `done` with each when its optimizer step is taken.

    ::

        while loader.epoch < epochs:
            for step in loader:
                for microbatch in step.microbatches: ...
                loader.done(step)

    Args:
        dataset: map-style (`__getitem__` and `__len__`) or iterable (`trainer.data.stream` says what is asked of it).
        batch_size: samples of an optimizer step, over all ranks.
        rank, world_size: who reads; `reshard` changes it.
        seed: of the run; the order of epoch e depends on it and e alone.
        microbatch: most samples that a rank works on at once. None: each rank's share in one.
        shuffle: another order in every epoch. Streams come as they come.
        drop_last: leave out the shorter step at the end of an epoch. Otherwise it is trained on like any other.
        sample_rng: seed for each sample, so that augmentation does not depend on who reads it, or after what. False saves a stream that draws
            nothing at random about 10 us an item.
        may_change: which of "seed", "batch", "samples", "shuffle" and "fingerprint" a state that is taken on may have otherwise. Unless that
            state is at the beginning of an epoch, another seed, shuffle or number of samples means that some samples of this epoch come
            twice and others not at all.
        options: for torch's DataLoader, see `LoaderOptions`.

    Raises:
        SetupError: these cannot work together, or there is nothing to read.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        microbatch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        sample_rng: bool = True,
        may_change: Collection[str] = (),
        **options: Unpack[LoaderOptions],
    ) -> None:
        _positive("batch_size", batch_size)
        if microbatch is not None:
            _positive("microbatch", microbatch)
        if unknown := set(may_change) - set(AGREES):
            raise SetupError(f"may_change has {sorted(unknown)}", remedy=f"choose from {sorted(AGREES)}")
        self.dataset = dataset
        self._plan = Plan(seed=seed, batch=batch_size, microbatch=microbatch, shuffle=shuffle, drop_last=drop_last)
        self._options = options
        self._may_change = frozenset(may_change)
        self._cursor = Cursor()
        self._pass = object()
        self._fingerprint = ""
        self._n: int | None = None
        self._read: Callable[[Plan, Cursor], Iterator[tuple[int, list[Any]]]]
        self._feed: Feed | None = None
        self.reshard(rank, world_size)
        if is_stream(dataset):
            self._use_stream(sample_rng=sample_rng)
        else:
            self._use_map(sample_rng=sample_rng)

    def _use_map(self, *, sample_rng: bool) -> None:
        n = self._n = length(self.dataset)
        if n is None or not 1 <= n <= MAX_SAMPLES:
            raise SetupError(f"{_name(self.dataset)} has {'no length' if n is None else f'{n} samples'}", remedy="give a data set with samples")
        if self._plan.drop_last and n < self._plan.batch:
            raise SetupError(f"drop_last leaves no step: {n} samples, {self._plan.batch} in a step", remedy="make batch_size smaller")
        feed = self._feed = Feed(self.dataset, self._options, seed=self._plan.seed, sample_rng=sample_rng)

        def read(plan: Plan, cursor: Cursor) -> Iterator[tuple[int, list[Any]]]:
            batches = feed.batches(requests(plan, cursor, n))
            for _, samples in plan.steps(cursor.offset, n):
                yield samples, [next(batches) for _ in plan.pieces(samples)]

        self._read = read

    def _use_stream(self, *, sample_rng: bool) -> None:
        if isinstance(self.dataset, Iterator):
            raise SetupError(f"{_name(self.dataset)} can be read once only", remedy="give an object whose __iter__ begins anew each time")
        if self._options.get("persistent_workers"):
            raise SetupError("the workers of a stream cannot stay from epoch to epoch", remedy="leave persistent_workers out")

        def read(plan: Plan, cursor: Cursor) -> Iterator[tuple[int, list[Any]]]:
            return stream.read(self.dataset, plan, cursor, self._options, sample_rng=sample_rng)

        self._read = read

    def reshard(self, rank: int, world_size: int) -> None:
        """Read as `rank` of `world_size` from the next pass on. The samples of each step stay what they are.

        Raises:
            SetupError: there is no such rank.
        """
        if not 0 <= rank < world_size:
            raise SetupError(f"there is no rank {rank} in a world of {world_size}")
        self._plan = replace(self._plan, rank=rank, world_size=world_size)
        self._pass = object()

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, counted from 0; epochs that are done."""
        return self._cursor.epoch

    @property
    def offset(self) -> int:
        """Samples of this epoch that are done, over all ranks."""
        return self._cursor.offset

    @property
    def batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._plan.batch

    @property
    def samples(self) -> int | None:
        """Samples of an epoch; None for a stream."""
        return self._n

    def __len__(self) -> int:
        """Steps of an epoch, over all of it. A stream has no length: TypeError."""
        if self._n is None:
            raise TypeError(f"{_name(self.dataset)} is a stream and has no length")
        return self._n // self._plan.batch if self._plan.drop_last else -(-self._n // self._plan.batch)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left in this epoch. Only one pass at a time: another one, `reshard` or a state end it.

        Raises:
            SetupError: a pass is continued that has ended so, or a stream yields nothing.
        """
        plan, cursor = self._plan, self._cursor
        mine = self._pass = object()
        offset = cursor.offset
        for samples, batches in self._read(plan, cursor):
            if self._pass is not mine:
                break
            yield _step(plan, cursor.epoch, offset, samples, batches)
            offset += samples
        if self._pass is not mine:
            raise SetupError("this pass over the loader has ended: another began, its world changed, or a state was loaded", remedy="iterate it anew")
        if offset == 0:
            raise SetupError(f"{_name(self.dataset)} yields {'less than a step' if plan.drop_last else 'nothing'}", remedy="give a data set with samples")
        if self._n is None and self._cursor == Cursor(epoch=cursor.epoch, offset=offset):
            self._cursor = Cursor(epoch=cursor.epoch + 1)

    def done(self, step: Step) -> None:
        """The optimizer step for `step` is taken: its samples will not come again in this epoch.

        Raises:
            StateError: it is not the next one.
        """
        if (step.epoch, step.offset) != (self._cursor.epoch, self._cursor.offset):
            here = f"epoch {self._cursor.epoch}, sample {self._cursor.offset}"
            raise StateError(f"the step done is that of epoch {step.epoch}, sample {step.offset}; the next one is that of {here}")
        self._cursor = self._after(step.samples)

    def _after(self, samples: int) -> Cursor:
        if self._n is not None:
            return self._plan.advance(self._cursor, samples, self._n)
        # Where a stream ends is known when it has; a shorter step is its last.
        last = 0 < samples < self._plan.batch
        return Cursor(epoch=self._cursor.epoch + 1) if last else replace(self._cursor, offset=self._cursor.offset + samples)

    def skip(self, steps: int) -> None:
        """Leave the data of the next `steps` steps out, over the ends of epochs, as if they had been trained on. It ends the pass at hand.

        Of a stream, whose end is not known, not further than that: a pass that finds nothing left ends the epoch.
        """
        self._pass = object()
        for _ in range(steps):
            samples = self._plan.batch if self._n is None else self._plan.samples(self._cursor.offset, self._n)
            self._cursor = self._after(samples)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that tell this data from other data; reads a few samples, once."""
        self._fingerprint = self._fingerprint or fingerprint(self.dataset)
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Return where the next step begins, and what that depends on: always of the same size, and fit for JSON."""
        return {"epoch": self._cursor.epoch, "offset": self._cursor.offset, **self._made_with()}

    def _made_with(self) -> dict[str, Any]:
        plan = self._plan
        return {"samples": self._n, "seed": plan.seed, "batch": plan.batch, "shuffle": plan.shuffle, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. A state from the end of an epoch is one from the beginning of the next.

        Raises:
            StateError: it is none, or was made with other data, another seed or another batch size and `may_change` does not allow that.
        """
        epoch, offset = state.get("epoch"), state.get("offset")
        if not isinstance(epoch, int) or not isinstance(offset, int) or min(epoch, offset) < 0:
            raise StateError(f"this is no state of a loader: epoch {epoch!r}, offset {offset!r}")
        for name, value in self._made_with().items():
            if state.get(name) != value and name not in self._may_change:
                what, remedy = AGREES[name]
                raise StateError(f"{what}: {value} here, {state.get(name)} in the state", remedy=f"{remedy}, or allow it with may_change=[{name!r}]")
        self._pass = object()
        self._cursor = Cursor(epoch=epoch, offset=offset)
        if self._n is not None:
            self._cursor = self._plan.advance(self._cursor, 0, self._n)

    def evaluation(self, dataset: Any, *, batch_size: int, **options: Unpack[LoaderOptions]) -> Evaluation:
        """Deal a test set to the ranks as they are now, every sample once: see `Evaluation`."""
        plan = self._plan
        return Evaluation(dataset, batch_size=batch_size, rank=plan.rank, world_size=plan.world_size, seed=plan.seed, **options)

    def close(self) -> None:
        """End the workers that read ahead. The loader can be iterated again."""
        self._pass = object()
        if self._feed is not None:
            self._feed.close()


def _step(plan: Plan, epoch: int, offset: int, samples: int, batches: list[Any]) -> Step:
    pieces = zip(plan.pieces(samples), batches, strict=True)
    parts = [Microbatch(batch=batch, index=piece.index, samples=piece.samples, weight=piece.samples / samples) for piece, batch in pieces]
    return Step(epoch=epoch, offset=offset, samples=samples, microbatches=tuple(parts))


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SetupError(f"{name} is {value!r}", remedy="give a whole number, 1 or more")


def _name(dataset: Any) -> str:
    return type(dataset).__qualname__
