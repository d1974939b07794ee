"""Each sample once an epoch, in the same steps, whatever the world is and however often it changes or the run continues."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import ElasticLoader, Step
from trainer.errors import SetupError, StateError
from trainer.order import Order

pytestmark = pytest.mark.timeout(120)


class Numbers:
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.n
        return index


def read(step: Step) -> list[int]:
    """What one rank trains on."""
    return [sample for microbatch in step.microbatches if microbatch.samples for sample in microbatch.batch.tolist()]


class World:
    """All ranks of a world, each with a loader of its own, in lockstep."""

    def __init__(self, size: int, n: int, state: dict[str, Any] | None = None, **options: Any) -> None:
        self.loaders = [ElasticLoader(Numbers(n), rank=rank, world_size=size, **options) for rank in range(size)]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))

    @property
    def epoch(self) -> int:
        return self.loaders[0].epoch

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

    def steps(self, most: int = 10**9) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (epoch, offset, samples of all ranks in their order) of each step that is left in the epoch, and have it done."""
        iterators = [iter(loader) for loader in self.loaders]
        for _ in range(most):
            steps = [next(iterator, None) for iterator in iterators]
            if steps[0] is None:
                assert not any(steps)
                return
            yield self._check([step for step in steps if step is not None])

    def _check(self, steps: list[Step]) -> tuple[int, int, list[int]]:
        assert len(steps) == len(self.loaders)
        assert len({(step.epoch, step.offset, step.samples) for step in steps}) == 1
        assert math.isclose(sum(microbatch.weight for step in steps for microbatch in step.microbatches), 1, abs_tol=1e-12)
        assert sum(microbatch.samples for step in steps for microbatch in step.microbatches) == steps[0].samples
        for step in steps:
            assert step.microbatches, "each rank takes part"
            assert all(microbatch.batch.numel() > 0 for microbatch in step.microbatches)
        for loader, step in zip(self.loaders, steps, strict=True):
            loader.done(step)
        return steps[0].epoch, steps[0].offset, [sample for step in steps for sample in read(step)]


def expected(n: int, batch: int, seed: int, epochs: int, *, drop_last: bool = False) -> list[tuple[int, int, list[int]]]:
    """The steps of a run, by the order alone."""
    steps = []
    for epoch in range(epochs):
        order = Order(n, seed=seed, epoch=epoch).indices(0, n).tolist()
        offsets = range(0, n - n % batch if drop_last else n, batch)
        steps += [(epoch, offset, order[offset : offset + batch]) for offset in offsets]
    return steps


@settings(max_examples=120, deadline=None, database=None)
@given(
    n=st.integers(1, 70),
    batch=st.integers(1, 40),
    microbatch=st.none() | st.integers(1, 12),
    seed=st.integers(0, 3),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5),
)
def test_every_step_holds_the_same_samples_however_the_world_changes(
    n: int, batch: int, microbatch: int | None, seed: int, worlds: list[tuple[int, int]]
) -> None:
    """The world changes at any step, also at an epoch's end, several times in an epoch; each new one continues from a state."""
    options = {"batch_size": batch, "microbatch": microbatch, "seed": seed}
    state = None
    found = []
    for size, steps in worlds:
        world = World(size, n, state, **options)
        left = steps
        while left and world.epoch < 3:
            taken = list(world.steps(left))
            found += taken
            left -= len(taken)
        state = world.state()
    world = World(2, n, state, **options)
    while world.epoch < 3:
        found += list(world.steps())
    assert found == expected(n, batch, seed, 3)
    for epoch in range(3):
        assert sorted(sample for step in found if step[0] == epoch for sample in step[2]) == list(range(n))


@settings(max_examples=40, deadline=None, database=None)
@given(n=st.integers(1, 60), batch=st.integers(1, 30), world=st.integers(1, 6), data=st.data())
def test_a_shorter_step_is_left_out_if_asked_in_any_world(n: int, batch: int, world: int, data: st.DataObject) -> None:
    if n < batch:
        with pytest.raises(SetupError, match="drop_last leaves no step"):
            World(world, n, batch_size=batch, drop_last=True)
        return
    first = World(world, n, batch_size=batch, drop_last=True)
    stop = data.draw(st.integers(0, n // batch))
    found = list(first.steps(stop))
    second = World(data.draw(st.integers(1, 6)), n, first.state(), batch_size=batch, drop_last=True)
    while second.epoch < 2:
        found += list(second.steps())
    assert found == expected(n, batch, 0, 2, drop_last=True)


def test_a_world_may_change_without_a_state_between_two_passes() -> None:
    loaders = [ElasticLoader(Numbers(40), batch_size=8, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    first = [next(iterator) for iterator in iterators]
    for loader, step in zip(loaders, first, strict=True):
        loader.done(step)
    loaders[0].reshard(0, 1)
    second = next(iter(loaders[0]))
    order = Order(40, seed=0, epoch=0).indices(0, 16).tolist()
    assert read(first[0]) + read(first[1]) == order[:8]
    assert read(second) == order[8:]


@pytest.mark.parametrize(
    "change",
    [
        lambda loader: loader.reshard(1, 2),
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: next(iter(loader)),
        lambda loader: loader.close(),
    ],
    ids=["another world", "a state", "another pass", "close"],
)
def test_a_pass_is_over_with_what_it_was_begun_for(change: Callable[[ElasticLoader], object]) -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    steps = iter(loader)
    next(steps)
    change(loader)
    with pytest.raises(SetupError, match="this pass over the loader has ended"):
        next(steps)


def test_a_step_that_was_read_but_not_done_comes_again() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    steps = iter(loader)
    loader.done(next(steps))
    lost = next(steps)
    again = next(iter(loader))
    assert (again.offset, read(again)) == (8, read(lost))


def test_a_step_is_done_once_and_in_turn() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    steps = iter(loader)
    first, second = next(steps), next(steps)
    with pytest.raises(StateError, match="epoch 0, sample 8; the next one is that of epoch 0, sample 0"):
        loader.done(second)
    loader.done(first)
    with pytest.raises(StateError, match="epoch 0, sample 0; the next one is that of epoch 0, sample 8"):
        loader.done(first)


@pytest.mark.parametrize(("n", "batch"), [(40, 8), (41, 8), (5, 8)])
def test_a_state_from_the_end_of_an_epoch_neither_drops_nor_repeats_one(n: int, batch: int) -> None:
    loader = ElasticLoader(Numbers(n), batch_size=batch)
    for step in loader:
        loader.done(step)
    state = loader.state_dict()
    assert (state["epoch"], state["offset"]) == (1, 0)
    for _ in range(3):
        again = ElasticLoader(Numbers(n), batch_size=batch)
        again.load_state_dict(state)
        state = again.state_dict()
    assert [step.epoch for step in again] == [1] * len(loader)


def test_a_state_that_names_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "offset": 40})
    assert (loader.epoch, loader.offset) == (3, 0)
    assert next(iter(loader)).epoch == 3


def test_two_resumes_in_one_epoch_continue_where_they_were() -> None:
    found: list[int] = []
    state = None
    for steps in (2, 3, 10):
        world = World(3, 50, state, batch_size=5)
        for _, _, samples in world.steps(steps):
            found += samples
        state = world.state()
    assert found == Order(50, seed=0, epoch=0).indices(0, 50).tolist()


def test_a_state_has_the_same_size_wherever_it_is_taken() -> None:
    loader = ElasticLoader(Numbers(10**6), batch_size=100)
    began = loader.state_dict()
    assert set(began) == {"epoch", "offset", "samples", "seed", "batch", "shuffle", "fingerprint"}
    assert (began["samples"], began["seed"], began["batch"], began["shuffle"]) == (10**6, 0, 100, True)
    for step, _ in zip(loader, range(50), strict=False):
        loader.done(step)
    assert loader.offset == 5000
    assert json.loads(json.dumps(loader.state_dict())) == {**began, "offset": 5000}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"n": 41}, "samples in the data set: 40 here, 41 in the state"),
        ({"seed": 1}, "seed: 0 here, 1 in the state"),
        ({"batch_size": 9}, "samples in a step, over all ranks: 8 here, 9 in the state"),
        ({"shuffle": False}, "shuffle: True here, False in the state"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name_unless_allowed(other: dict[str, Any], named: str) -> None:
    state = ElasticLoader(**{"dataset": Numbers(other.pop("n", 40)), "batch_size": 8, **other}).state_dict()
    loader = ElasticLoader(Numbers(40), batch_size=8)
    with pytest.raises(StateError, match=named):
        loader.load_state_dict(state)
    changed = [name for name in ("samples", "seed", "batch", "shuffle", "fingerprint") if state[name] != loader.state_dict()[name]]
    allowing = ElasticLoader(Numbers(40), batch_size=8, may_change=changed)
    allowing.load_state_dict({**state, "offset": 16})
    assert next(iter(allowing)).offset == 16


def test_a_state_of_other_data_is_refused() -> None:
    state = ElasticLoader(list(range(100)), batch_size=8).state_dict()
    loader = ElasticLoader([*range(99), 7], batch_size=8)
    with pytest.raises(StateError, match=r"fingerprint of the data set: .* give the data that the run began with, or allow it"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": "1", "offset": 0}, {"epoch": 0, "offset": -8}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    with pytest.raises(StateError, match="no state of a loader"):
        loader.load_state_dict(state)
    assert (loader.epoch, loader.offset) == (0, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 8, "microbatch": 0}, "microbatch is 0"),
        ({"batch_size": 8, "rank": 2, "world_size": 2}, "no rank 2 in a world of 2"),
        ({"batch_size": 8, "may_change": ["batch_size"]}, "may_change has .*batch_size"),
        ({"batch_size": 8, "dataset": []}, "list has 0 samples"),
        ({"batch_size": 8, "dataset": iter([1])}, "can be read once only"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        ElasticLoader(**{"dataset": Numbers(40), **options})


def test_length_is_that_of_a_whole_epoch() -> None:
    assert len(ElasticLoader(Numbers(41), batch_size=8)) == 6
    assert len(ElasticLoader(Numbers(41), batch_size=8, drop_last=True)) == 5
    assert len(ElasticLoader(Numbers(41), batch_size=8, world_size=3)) == 6


def test_microbatches_are_the_same_in_any_world_where_their_size_is_given() -> None:
    """So that what is drawn for one, and its batch statistics, do not depend on the world."""

    def microbatches(size: int) -> list[tuple[int, list[int]]]:
        loaders = [ElasticLoader(Numbers(50), batch_size=20, microbatch=3, rank=rank, world_size=size) for rank in range(size)]
        return [(part.index, part.batch.tolist()) for loader in loaders for part in next(iter(loader)).microbatches if part.samples]

    assert microbatches(1) == microbatches(2) == microbatches(5) == microbatches(20)
    assert [index for index, _ in microbatches(3)] == list(range(7))


def test_a_rank_without_samples_repeats_the_first_microbatch_with_weight_0() -> None:
    steps = [next(iter(ElasticLoader(Numbers(3), batch_size=8, rank=rank, world_size=5))) for rank in range(5)]
    idle = [step.microbatches[0] for step in steps if step.microbatches[0].samples == 0]
    assert sorted(step.microbatches[0].weight for step in steps) == [0, 0, 1 / 3, 1 / 3, 1 / 3]
    first = steps[0].microbatches[0]
    assert (first.samples, first.index) == (1, 0), "rank 0, which says how training goes, always has some"
    assert [(part.weight, part.index, part.batch.tolist()) for part in idle] == [(0, 0, first.batch.tolist())] * 2


def test_reading_ahead_of_a_huge_data_set_begins_at_once() -> None:
    loader = ElasticLoader(Numbers(10**12), batch_size=4)
    loader.load_state_dict({**loader.state_dict(), "offset": 10**12 - 6})
    assert [read(step) for step in loader] == [
        Order(10**12, seed=0, epoch=0).indices(10**12 - 6, 10**12 - 2).tolist(),
        Order(10**12, seed=0, epoch=0).indices(10**12 - 2, 10**12).tolist(),
    ]


def test_the_batch_is_what_the_collate_function_makes() -> None:
    loader = ElasticLoader(Numbers(10), batch_size=5, shuffle=False, collate_fn=tuple)
    assert next(step.microbatches[0].batch for step in loader) == (0, 1, 2, 3, 4)


def test_samples_of_torch_data_sets_are_batched_as_ever() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    (images, labels) = next(iter(ElasticLoader(data, batch_size=4, shuffle=False))).microbatches[0].batch
    assert images.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert labels.tolist() == [0, 1, 2, 3]


def test_a_step_travels_to_another_process() -> None:
    step = next(iter(ElasticLoader(Numbers(10), batch_size=4)))
    assert read(pickle.loads(pickle.dumps(step))) == read(step)


@settings(max_examples=100, deadline=None, database=None)
@given(n=st.integers(1, 120), batch=st.integers(1, 40), world=st.integers(1, 9))
def test_a_test_set_is_dealt_whole_and_nothing_of_it_twice(n: int, batch: int, world: int) -> None:
    loaders = [ElasticLoader(Numbers(5), batch_size=1, rank=rank, world_size=world) for rank in range(world)]
    sets = [loader.evaluation(Numbers(n), batch_size=batch) for loader in loaders]
    parts = [list(one) for one in sets]
    assert [sample for one in parts for part in one for sample in part.batch.tolist()] == list(range(n))
    assert math.isclose(sum(part.weight for one in parts for part in one), 1, abs_tol=1e-12)
    assert all(part.samples == len(part.batch) <= batch and part.weight == part.samples / n for one in parts for part in one)
    assert [len(one) for one in parts] == [len(one) for one in sets]
    assert max(map(len, parts)) == sets[0].turns
    assert {one.turns for one in sets} == {sets[0].turns}
    if n >= sets[0].turns * world:
        assert {len(one) for one in parts} == {sets[0].turns}, "nobody waits for others"


def test_a_test_set_can_be_gone_through_again_and_does_not_move_the_cursor() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=8)
    evaluation = loader.evaluation(Numbers(30), batch_size=16)
    assert [part.batch.tolist() for part in evaluation] == [part.batch.tolist() for part in evaluation]
    assert (loader.epoch, loader.offset) == (0, 0)


@pytest.mark.parametrize("dataset", [[], iter([1])])
def test_a_test_set_that_is_empty_or_a_stream_is_refused(dataset: Any) -> None:
    with pytest.raises(SetupError, match="cannot be evaluated"):
        ElasticLoader(Numbers(40), batch_size=8).evaluation(dataset, batch_size=4)


# --- data that are left out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("done", "skipped"), [(0, 1), (2, 3), (3, 1), (0, 4), (1, 9), (3, 40)])
def test_steps_that_are_left_out_are_those_that_would_have_come(done: int, skipped: int, *, drop_last: bool) -> None:
    """Over the ends of epochs too, whose last step is shorter or not there."""
    all_steps = expected(26, 8, 3, 20, drop_last=drop_last)
    world = World(2, 26, seed=3, batch_size=8, drop_last=drop_last)
    seen = list(world.steps(done))
    for loader in world.loaders:
        loader.skip(skipped)
    state = world.state()
    follow = World(3, 26, state, seed=3, batch_size=8, drop_last=drop_last)
    rest = list(follow.steps(2))
    assert seen + rest == all_steps[:done] + all_steps[done + skipped :][: len(rest)]
    assert rest


def test_a_pass_at_hand_ends_where_data_are_left_out() -> None:
    loader = ElasticLoader(Numbers(26), rank=0, world_size=1, seed=3, batch_size=8)
    steps = iter(loader)
    loader.done(next(steps))
    loader.skip(1)
    with pytest.raises(SetupError, match="has ended"):
        next(steps)
