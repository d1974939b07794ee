"""The order of an epoch is a permutation that looks like chance and costs no memory, and a step is cut and dealt without gap or overlap."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import order
from trainer.order import Cursor, Order, Plan, advance, bound, deal, key, step_samples, weights

pytestmark = pytest.mark.timeout(60)

# Around powers of two, where the domain walked in fits n exactly or is nearly twice as large; primes; both sides of FEW.
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 97, 1009, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 4097, 65536, 65537, 99991]

ORDER_OF_TEN = [5, 6, 8, 7, 9, 2, 4, 3, 0, 1]
BEGIN_OF_5000 = [1704, 4525, 4402, 4239, 632, 2363, 3040, 265]
END_OF_A_BILLION = [732679103, 238595562, 676046078, 920642593]


def excess(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """Chi-square against even counts, in standard deviations from what chance gives."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", SIZES)
def test_every_sample_has_one_position(n: int) -> None:
    for seed, epoch in ((0, 0), (7, 3), (-1, 2**70)):
        found = Order(n, seed=seed, epoch=epoch).indices(0, n)
        assert found.dtype == np.int64
        assert np.array_equal(np.sort(found), np.arange(n))


@settings(max_examples=200, deadline=None, database=None)
@given(n=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 2**40), data=st.data())
def test_a_slice_of_an_order_is_that_slice_of_the_whole(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    whole = Order(n, seed=seed, epoch=epoch).indices(0, n)
    assert Order(n, seed=seed, epoch=epoch).indices(start, stop).tolist() == whole[start:stop].tolist()


def test_seed_and_epoch_give_another_order_each() -> None:
    orders = {tuple(Order(5000, seed=seed, epoch=epoch).indices(0, 5000).tolist()) for seed, epoch in product(range(5), range(5))}
    assert len(orders) == 25
    few = {tuple(Order(50, seed=seed, epoch=epoch).indices(0, 50).tolist()) for seed, epoch in product(range(5), range(5))}
    assert len(few) == 25


def test_an_order_never_changes() -> None:
    """A run that continues under a later version must find the order it began with."""
    assert Order(10, seed=0, epoch=0).indices(0, 10).tolist() == ORDER_OF_TEN
    assert Order(5000, seed=1, epoch=2).indices(0, 8).tolist() == BEGIN_OF_5000
    assert Order(10**9, seed=1, epoch=2).indices(10**9 - 4, 10**9).tolist() == END_OF_A_BILLION


def test_without_shuffling_samples_come_as_they_lie() -> None:
    assert Order(7, seed=1, epoch=1, shuffle=False).indices(2, 6).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 8), (3, 2)])
def test_positions_out_of_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="of an epoch of 7"):
        Order(7, seed=0, epoch=0).indices(start, stop)


@pytest.mark.parametrize("n", [0, -1, order.MAX_SAMPLES + 1])
def test_an_order_of_nothing_or_too_much_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="samples, not"):
        Order(n, seed=0, epoch=0)


@pytest.mark.parametrize("n", [10**9, 2**40, 2**40 + 1, order.MAX_SAMPLES])
def test_a_huge_order_costs_no_memory(n: int) -> None:
    tracemalloc.start()
    try:
        for start in (0, n // 3, n - 4096):
            found = Order(n, seed=1, epoch=0).indices(start, start + 4096)
            assert len(set(found.tolist())) == 4096
            assert found.min() >= 0
            assert found.max() < n
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_few_samples_is_as_likely(n: int) -> None:
    every = {one: index for index, one in enumerate(permutations(range(n)))}
    drawn = max(2000, 50 * len(every))
    found = [every[tuple(Order(n, seed=seed, epoch=seed % 3).indices(0, n).tolist())] for seed in range(drawn)]
    assert excess(np.bincount(found, minlength=len(every))) < 4


@pytest.mark.parametrize("n", [7, 64, 1000, 1025, 2048, 5000])
def test_samples_are_as_likely_anywhere_and_after_any_other(n: int) -> None:
    """Over many epochs: where a sample lies, how far a sample's neighbour lies from it, near and half an epoch away."""
    epochs = max(200, 20000 // n)
    orders = np.array([Order(n, seed=1, epoch=epoch).indices(0, n) for epoch in range(epochs)])
    for position in (0, 1, n // 2, n - 1):
        if epochs >= 5 * min(n, 64):
            assert excess(np.bincount(orders[:, position] * min(n, 64) // n, minlength=min(n, 64))) < 5
    for away in (1, 2, n // 2):
        apart = (orders[:, away:] - orders[:, :-away]) % n
        assert excess(np.bincount(apart.ravel(), minlength=n)[1:]) < 5


def test_one_epoch_tells_nothing_of_the_next() -> None:
    n = 4096
    orders = np.array([Order(n, seed=9, epoch=epoch).indices(0, n) for epoch in range(101)])
    correlation = [float(np.corrcoef(one, other)[0, 1]) for one, other in pairwise(orders)]
    assert abs(np.mean(correlation)) < 5 / math.sqrt(n * len(correlation))
    assert max(map(abs, correlation)) < 5 / math.sqrt(n)
    fixed = [int((one == other).sum()) for one, other in pairwise(orders)]
    assert 0.6 < np.mean(fixed) < 1.5  # one on average


def test_key_depends_on_every_part_and_on_their_order() -> None:
    keys = [key(*parts) for parts in product(range(-3, 12), repeat=3)] + [key(), key(0), key(0, 0), key(1, 0)]
    assert len(set(keys)) == len(keys)
    assert key(2**64 + 1) == key(1)
    ones = np.array([[key(part) >> bit & 1 for bit in range(64)] for part in range(2000)]).mean(axis=0)
    assert abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(2000)


@settings(max_examples=300, deadline=None, database=None)
@given(total=st.integers(0, 200), parts=st.integers(1, 50))
def test_parts_differ_by_at_most_one_and_leave_nothing_out(total: int, parts: int) -> None:
    bounds = [bound(total, parts, index) for index in range(parts + 1)]
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1]) == (0, total)
    assert sizes.max() - sizes.min() <= 1
    assert sizes[0] == sizes.max()


@settings(max_examples=500, deadline=None, database=None)
@given(samples=st.integers(1, 300), microbatch=st.none() | st.integers(1, 64), world=st.integers(1, 40))
def test_a_step_is_dealt_whole_and_evenly(samples: int, microbatch: int | None, world: int) -> None:
    shares = [deal(samples, microbatch=microbatch, world_size=world, rank=rank) for rank in range(world)]
    counted = [piece for share in shares for piece in share if piece.samples]
    assert [position for piece in counted for position in range(piece.start, piece.stop)] == list(range(samples))
    assert [piece.index for piece in counted] == list(range(len(counted)))
    assert all(piece.samples == piece.stop - piece.start for piece in counted)
    assert all(piece.samples <= (microbatch or samples) for piece in counted)
    loads = [sum(piece.samples > 0 for piece in share) for share in shares]
    assert max(loads) - min(loads) <= 1
    assert math.isclose(sum(sum(weights([piece.samples for piece in share], samples)) for share in shares), 1, abs_tol=1e-12)
    assert len(counted) == (min(world, samples) if microbatch is None else math.ceil(samples / microbatch))


def test_the_cut_does_not_depend_on_the_world_where_a_microbatch_is_given() -> None:
    def cut(world: int) -> list[tuple[int, int, int]]:
        shares = [deal(61, microbatch=8, world_size=world, rank=rank) for rank in range(world)]
        return [(piece.index, piece.start, piece.stop) for share in shares for piece in share if piece.samples]

    assert cut(1) == cut(3) == cut(8) == cut(20)
    assert [stop - start for _, start, stop in cut(1)] == [8, 8, 7, 8, 8, 7, 8, 7]


def test_a_rank_without_samples_repeats_the_first_microbatch_and_counts_none() -> None:
    """Rank 0, which says how training goes, always has some."""
    shares = [deal(5, microbatch=2, world_size=4, rank=rank) for rank in range(4)]
    assert [[(piece.index, piece.start, piece.stop, piece.samples) for piece in share] for share in shares] == [
        [(0, 0, 2, 2)],
        [(1, 2, 4, 2)],
        [(2, 4, 5, 1)],
        [(0, 0, 2, 0)],
    ]


@pytest.mark.parametrize(
    ("offset", "n", "batch", "drop_last", "samples", "after"),
    [
        (0, 10, 4, False, 4, Cursor(epoch=3, offset=4)),
        (4, 10, 4, False, 4, Cursor(epoch=3, offset=8)),
        (8, 10, 4, False, 2, Cursor(epoch=4)),
        (4, 10, 4, True, 4, Cursor(epoch=4)),
        (8, 10, 4, True, 0, Cursor(epoch=4)),
        (4, 8, 4, False, 4, Cursor(epoch=4)),
        (4, 8, 4, True, 4, Cursor(epoch=4)),
        (0, 3, 4, False, 3, Cursor(epoch=4)),
        (8, 8, 4, False, 0, Cursor(epoch=4)),
        (9, 8, 4, False, 0, Cursor(epoch=4)),
    ],
)
def test_an_epoch_ends_where_no_step_is_left(offset: int, n: int, batch: int, drop_last: bool, samples: int, after: Cursor) -> None:
    assert step_samples(offset, n=n, batch=batch, drop_last=drop_last) == samples
    assert advance(Cursor(epoch=3, offset=offset), samples, n=n, batch=batch, drop_last=drop_last) == after


def test_a_plan_takes_the_steps_of_an_epoch_from_where_it_is() -> None:
    plan = Plan(batch=4, drop_last=False)
    assert list(plan.steps(0, 10)) == [(0, 4), (4, 4), (8, 2)]
    assert list(plan.steps(4, 10)) == [(4, 4), (8, 2)]
    assert list(Plan(batch=4, drop_last=True).steps(4, 10)) == [(4, 4)]


def test_weights_make_a_mean_over_tokens_of_means_over_microbatches() -> None:
    """Two ranks, and the second sees few tokens: the mean of means would be 4.0."""
    losses, counts = [[1.0, 3.0], [8.0]], [[30, 50], [20]]
    total = sum(map(sum, counts))
    weighed = sum(loss * weight for rank, own in enumerate(counts) for loss, weight in zip(losses[rank], weights(own, total), strict=True))
    assert math.isclose(weighed, (30 * 1.0 + 50 * 3.0 + 20 * 8.0) / 100)


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), min_size=1, max_size=8))
def test_weights_of_all_ranks_sum_to_one(counts: list[list[int]]) -> None:
    total = sum(map(sum, counts))
    assert math.isclose(sum(sum(weights(own, total)) for own in counts), 1 if total else 0, abs_tol=1e-12)


@pytest.mark.parametrize(("counts", "total"), [([3, -1], 10), ([6, 5], 10), ([1], 0)])
def test_counts_that_are_no_part_of_the_total_are_refused(counts: list[int], total: int) -> None:
    with pytest.raises(ValueError, match="no part of a total"):
        weights(counts, total)


def test_the_agent_can_import_it_without_torch() -> None:
    code = "import sys, trainer.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
