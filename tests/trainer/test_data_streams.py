"""Streams: each item once an epoch in any world, where all ranks read everything and where they need not."""
# ruff: noqa: NPY002 - NumPy's old global generator is what users draw from

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.children import children, forget
from trainer import rng
from trainer.data import ElasticLoader
from trainer.errors import SetupError, StateError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    forget()
    yield
    assert children(recursive=True) == []


class Counter:
    """Items 1000 * epoch + 0, 1, ...; notes what was read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = -1
        self.read: list[int] = []
        self.begun: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self.items(0)

    def items(self, start: int) -> Iterator[int]:
        self.begun.append(start)
        for index in range(start, self.n):
            self.read.append(index)
            yield 1000 * self.epoch + index


class Seeking(Counter):
    def iter_from(self, position: int) -> Iterator[int]:
        return self.items(position)


class Measured(Seeking):
    def __len__(self) -> int:
        return self.n


class Torch(IterableDataset[int]):
    """As the documentation of torch teaches: deals its items to the workers itself."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else islice(iter(range(self.n)), info.id, None, info.num_workers)


KINDS = [Counter, Seeking, Measured]


def world_steps(loaders: list[ElasticLoader], most: int = 10**9) -> list[list[int]]:
    """The samples of each step that is left in the epoch, over all ranks; has them done."""
    found = []
    iterators = [iter(loader) for loader in loaders]
    for _ in range(most):
        steps = [next(iterator, None) for iterator in iterators]
        if steps[0] is None:
            assert not any(steps)
            break
        assert len({(step.epoch, step.offset, step.samples) for step in steps if step}) == 1
        assert abs(sum(part.weight for step in steps if step for part in step.microbatches) - 1) < 1e-12
        found.append([sample for step in steps if step for part in step.microbatches if part.samples for sample in part.batch.tolist()])
        for loader, step in zip(loaders, steps, strict=True):
            assert step is not None
            loader.done(step)
    return found


def a_world(kind: type[Counter], n: int, size: int, state: dict[str, Any] | None = None, **options: Any) -> list[ElasticLoader]:
    loaders = [ElasticLoader(kind(n), rank=rank, world_size=size, **options) for rank in range(size)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, database=None)
@given(
    n=st.integers(1, 60),
    batch=st.integers(1, 25),
    microbatch=st.none() | st.integers(1, 9),
    drop_last=st.booleans(),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=4),
)
def test_every_step_holds_the_next_items_however_the_world_changes(
    kind: type[Counter], n: int, batch: int, microbatch: int | None, drop_last: bool, worlds: list[tuple[int, int]]
) -> None:
    drop_last = drop_last and n >= batch
    options = {"batch_size": batch, "microbatch": microbatch, "drop_last": drop_last}
    found = []
    state = None
    for size, steps in [*worlds, (2, 10**9)]:
        loaders = a_world(kind, n, size, state, **options)
        left = steps
        while loaders[0].epoch < 2 and left > 0:
            taken = world_steps(loaders, left)
            found += taken
            left -= max(1, len(taken))
        assert len({(loader.epoch, loader.offset) for loader in loaders}) == 1
        state = loaders[0].state_dict()
    whole = n - n % batch if drop_last else n
    assert found == [[1000 * epoch + item for item in range(at, min(at + batch, whole))] for epoch in range(2) for at in range(0, whole, batch)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "batch"), [(47, 5), (40, 5), (3, 5)])
def test_workers_take_turns_and_the_order_stays(kind: type[Counter], n: int, batch: int) -> None:
    for count in (1, 2):
        loaders = a_world(kind, n, 2, batch_size=batch, microbatch=2, workers=count)
        found = [step for _ in range(2) for step in world_steps(loaders)]
        assert found == [[1000 * epoch + item for item in range(at, min(at + batch, n))] for epoch in range(2) for at in range(0, n, batch)]
        assert {loader.epoch for loader in loaders} == {2}


def test_a_stream_that_deals_its_items_to_workers_itself_is_read_whole() -> None:
    loader = ElasticLoader(Torch(23), batch_size=5, workers=2)
    assert [sample for step in world_steps([loader]) for sample in step] == list(range(23))


def test_a_stream_that_seeks_is_not_read_twice_after_a_resume() -> None:
    state = {**ElasticLoader(Seeking(50), batch_size=10).state_dict(), "offset": 30}
    plain, seeking = Counter(50), Seeking(50)
    for dataset in (plain, seeking):
        loader = ElasticLoader(dataset, batch_size=10, rank=1, world_size=2)
        loader.load_state_dict({**state, "fingerprint": loader.fingerprint()})
        world_steps_of_one = [step.microbatches[0].batch.tolist() for step in loader]
        assert world_steps_of_one == [[35, 36, 37, 38, 39], [45, 46, 47, 48, 49]]
    assert plain.read == list(range(50))
    assert seeking.read == list(range(30, 50))


def test_of_a_stream_that_seeks_and_knows_its_length_each_rank_reads_its_own_items_alone() -> None:
    dataset = Measured(50)
    list(ElasticLoader(dataset, batch_size=10, rank=1, world_size=2))
    assert dataset.read == [index for index in range(50) if index % 10 >= 5]
    alone = Measured(50)
    list(ElasticLoader(alone, batch_size=10))
    assert (alone.read, alone.begun) == (list(range(50)), [0]), "no seek where none is needed"


class Shuffled(IterableDataset[tuple[int, float, int]]):
    """A shuffle buffer, and noise on each item."""

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        buffer = list(range(10))
        for index in range(10, 40):
            at = random.randrange(len(buffer))
            yield buffer[at], float(torch.rand(1)) + float(np.random.random_sample()), rng.sample_key() % 2**31
            buffer[at] = index
        random.shuffle(buffer)
        yield from ((item, 0.0, 0) for item in buffer)


def test_a_stream_that_draws_yields_the_same_in_any_world_and_after_a_resume() -> None:
    def rows(loaders: list[ElasticLoader], most: int = 100) -> list[tuple[int, float, int]]:
        found: list[tuple[int, float, int]] = []
        for steps in islice(zip(*loaders, strict=True), most):
            for loader, step in zip(loaders, steps, strict=True):
                loader.done(step)
                found += [row for part in step.microbatches for row in zip(*(column.tolist() for column in part.batch), strict=True)]
            torch.rand(1)
            random.random()
        return found

    def loaders(size: int, count: int = 0) -> list[ElasticLoader]:
        return [ElasticLoader(Shuffled(), batch_size=8, rank=rank, world_size=size, seed=5, workers=count) for rank in range(size)]

    one = loaders(1)
    reference = rows(one)
    assert sorted(index for index, _, _ in reference) == list(range(40))
    assert [index for index, _, _ in reference] != list(range(40))
    assert len({key for _, _, key in reference[:30]}) == 30
    assert rows(loaders(3)) == reference
    assert rows(loaders(1, 2)) == reference
    assert rows(one) != reference, "another epoch"
    begun = loaders(2)
    first = rows(begun, 2)
    again = loaders(3)
    for loader in again:
        loader.load_state_dict(begun[0].state_dict())
    assert first + rows(again) == reference


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_the_end_of_an_epoch_neither_drops_nor_repeats_one(kind: type[Counter]) -> None:
    """Where the length is a multiple of the batch the end is seen only by reading on: such a state continues with nothing."""
    loader = ElasticLoader(kind(20), batch_size=5)
    for step in loader:
        loader.done(step)
        if step.offset == 15:
            before_the_end = loader.state_dict()
    assert (loader.epoch, loader.offset) == (1, 0)
    again = ElasticLoader(kind(20), batch_size=5)
    again.load_state_dict(before_the_end)
    assert list(again) == []
    assert (again.epoch, again.offset) == (1, 0)
    assert [sample for step in world_steps([again]) for sample in step] == list(range(1000, 1020))


def test_a_shorter_step_is_known_to_be_the_last() -> None:
    """A state taken then need not read the stream to its end only to find it."""
    loader = ElasticLoader(Counter(17), batch_size=5)
    for step in loader:
        loader.done(step)
        assert (loader.epoch, loader.offset) == ((1, 0) if step.samples < 5 else (0, step.offset + 5))


def test_a_pass_that_was_not_done_does_not_end_the_epoch() -> None:
    loader = ElasticLoader(Counter(20), batch_size=5)
    list(loader)
    assert (loader.epoch, loader.offset) == (0, 0)


def test_a_stream_shorter_than_its_state_is_refused() -> None:
    loader = ElasticLoader(Counter(20), batch_size=5)
    loader.load_state_dict({**loader.state_dict(), "offset": 25})
    with pytest.raises(StateError, match="epoch 0 of Counter ended after 20 items, the state was made after 25"):
        next(iter(loader))


@pytest.mark.parametrize("count", [0, 1])
def test_a_length_that_is_wrong_is_noticed(count: int) -> None:
    class Liar(Measured):
        def __len__(self) -> int:
            return 22

    loader = ElasticLoader(Liar(20), batch_size=5, workers=count)
    with pytest.raises(SetupError, match="ended after 20 items, its length is 22"):
        list(loader)


@pytest.mark.parametrize(("n", "options", "named"), [(0, {}, "Counter yields nothing"), (3, {"drop_last": True}, "Counter yields less than a step")])
def test_a_stream_that_yields_nothing_is_refused(n: int, options: dict[str, Any], named: str) -> None:
    """Else a run over epochs would never end."""
    with pytest.raises(SetupError, match=named):
        list(ElasticLoader(Counter(n), batch_size=5, **options))


def test_what_a_stream_cannot_have_is_refused() -> None:
    with pytest.raises(SetupError, match="cannot stay from epoch to epoch"):
        ElasticLoader(Counter(20), batch_size=5, workers=1, persistent_workers=True)
    with pytest.raises(TypeError, match="Counter is a stream and has no length"):
        len(ElasticLoader(Counter(20), batch_size=5))


def test_a_pass_over_a_stream_that_is_left_ends_its_workers() -> None:
    loader = ElasticLoader(Counter(1000), batch_size=5, workers=2)
    for step in loader:
        loader.done(step)
        if step.offset == 20:
            assert len(children()) == 2
            break
    del step
    assert children() == []
    assert loader.offset == 25
