"""Who gets which slots: by tables for the words and the order, by properties for what must hold whatever is wanted and held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.daemon.slots import Allocation, Inventory, Slot, Want, allocate


def node(*numa: int | None) -> Inventory:
    """One slot for each argument, named by its place, on that NUMA node."""
    return Inventory(slots=tuple(Slot(id=f"s{number}", numa=place) for number, place in enumerate(numa)))


FOUR = node(0, 0, 1, 1)


def test_free_slots_go_to_who_wants_them_in_the_order_of_the_inventory() -> None:
    assert allocate([Want(job="a", slots=2), Want(job="b", slots=2)], {}, FOUR) == Allocation(granted={"a": ("s0", "s1"), "b": ("s2", "s3")})


def test_higher_priority_goes_first_then_who_has_waited_longer_then_the_name() -> None:
    wants = [
        Want(job="d", slots=1, priority=0, wants_since=1.0),
        Want(job="c", slots=1, priority=5, wants_since=9.0),
        Want(job="b", slots=1, priority=5, wants_since=3.0),
        Want(job="a", slots=1, priority=5, wants_since=9.0),
    ]
    allocation = allocate(wants, {}, node(0, 0, 0))
    assert allocation.granted == {"b": ("s0",), "a": ("s1",), "c": ("s2",)}
    assert allocation.waiting == {"d": "it needs 1 slot, and 0 of 3 are free; held by a (1), b (1), c (1)"}


def test_what_is_held_is_kept_even_by_a_job_of_lower_priority() -> None:
    allocation = allocate([Want(job="big", slots=3, priority=9)], {"small": ("s2", "s1")}, FOUR)
    assert allocation.granted == {"small": ("s2", "s1")}
    assert allocation.waiting == {"big": "it needs 3 slots, and 2 of 4 are free; held by small (2)"}
    assert allocation.problems == ()


def test_a_job_that_holds_slots_and_now_wants_more_keeps_just_these() -> None:
    assert allocate([Want(job="a", slots=3)], {"a": ("s1",)}, FOUR) == Allocation(granted={"a": ("s1",)})


def test_nobody_overtakes_a_job_that_waits_and_could_run_here() -> None:
    """Else a job that needs all slots would wait for ever while small ones come and go."""
    wants = [Want(job="big", slots=4, priority=1), Want(job="small", slots=1)]
    allocation = allocate(wants, {"old": ("s0",)}, FOUR)
    assert allocation.granted == {"old": ("s0",)}
    assert allocation.waiting == {
        "big": "it needs 4 slots, and 3 of 4 are free; held by old (1)",
        "small": "behind job big, which comes before it and waits for 4 slots",
    }


def test_a_job_that_could_never_run_here_holds_up_nobody() -> None:
    allocation = allocate([Want(job="huge", slots=5, priority=9), Want(job="small", slots=1)], {}, FOUR)
    assert allocation.granted == {"small": ("s0",)}
    assert allocation.waiting == {"huge": "it needs 5 slots, and this node has 4"}


def test_a_node_without_slots_says_so() -> None:
    assert allocate([Want(job="a", slots=1)], {}, node()).waiting == {"a": "it needs 1 slot, and this node has 0"}


def test_slots_that_are_gone_are_named_and_their_job_keeps_them() -> None:
    allocation = allocate([Want(job="b", slots=1)], {"a": ("s0", "s7")}, node(0))
    assert allocation.granted == {"a": ("s0", "s7")}
    assert allocation.waiting == {"b": "it needs 1 slot, and 0 of 1 are free; held by a (2)"}
    assert allocation.problems == ("job a runs on s7, which this node has no longer",)


def test_a_slot_that_two_jobs_hold_is_named_and_given_to_no_third() -> None:
    allocation = allocate([Want(job="c", slots=1)], {"b": ("s0",), "a": ("s0",)}, node(0, 0))
    assert allocation.granted == {"a": ("s0",), "b": ("s0",), "c": ("s1",)}
    assert allocation.problems == ("s0 is held 2 times, by a, b",)


@pytest.mark.parametrize(
    ("numa", "held", "count", "given_"),
    [
        ((0, 0, 1, 1), ("s0",), 2, ("s2", "s3")),  # both of one node rather than one of each
        ((0, 0, 1, 1), ("s0",), 1, ("s1",)),  # the node with the least room, so that the other stays whole
        ((0, 1, 0, 1), (), 2, ("s0", "s2")),  # of equals, the first
        ((0, 0, 1, 1, 1, 2), (), 3, ("s2", "s3", "s4")),
        ((0, 0, 1, 1, 1, 2), (), 4, ("s2", "s3", "s4", "s5")),  # the largest, and the tightest for the rest
        ((0, 0, 1, 1, 1, 2), (), 5, ("s0", "s1", "s2", "s3", "s4")),
        ((None, None, 0), (), 2, ("s0", "s1")),  # slots of unknown nodes are near each other as far as anybody knows
    ],
)
def test_slots_of_one_job_lie_on_as_few_numa_nodes_as_can_be(numa: tuple[int | None, ...], held: tuple[str, ...], count: int, given_: tuple[str, ...]) -> None:
    assert allocate([Want(job="a", slots=count)], {"x": held} if held else {}, node(*numa)).granted["a"] == given_


# --- whatever is wanted and held --------------------------------------------------------------------------------------

JOBS = "abcdefgh"
inventories = st.lists(st.sampled_from([None, 0, 1, 2]), max_size=8).map(lambda numa: node(*numa))
wants_of_jobs = st.lists(
    st.builds(
        Want,
        job=st.sampled_from(JOBS),
        priority=st.integers(-1, 1),
        slots=st.integers(1, 9),
        wants_since=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    max_size=8,
    unique_by=lambda want: want.job,
)


@st.composite
def holdings(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    """Disjoint, of slots that the inventory may or may not have any longer."""
    slots = draw(st.permutations([f"s{number}" for number in range(10)]))
    holds: dict[str, tuple[str, ...]] = {}
    for job in draw(st.lists(st.sampled_from(JOBS + "xyz"), unique=True, max_size=4)):
        count = draw(st.integers(1, 3))
        holds[job], slots = tuple(slots[:count]), slots[count:]
    return {job: taken for job, taken in holds.items() if taken}


@given(wants_of_jobs, holdings(), inventories)
def test_no_slot_is_given_twice_and_holders_keep_theirs(wants: list[Want], holds: dict[str, tuple[str, ...]], inventory: Inventory) -> None:
    allocation = allocate(wants, holds, inventory)
    assert {job: allocation.granted[job] for job in holds} == holds
    every = [slot for slots in allocation.granted.values() for slot in slots]
    assert len(every) == len(set(every))
    fresh = {job: slots for job, slots in allocation.granted.items() if job not in holds}
    assert {slot for slots in fresh.values() for slot in slots} <= {slot.id for slot in inventory.slots}
    sizes = {want.job: want.slots for want in wants}
    assert all(len(slots) == sizes[job] for job, slots in fresh.items())


@given(wants_of_jobs, holdings(), inventories)
def test_each_job_is_granted_or_told_why_not(wants: list[Want], holds: dict[str, tuple[str, ...]], inventory: Inventory) -> None:
    allocation = allocate(wants, holds, inventory)
    assert allocation.granted.keys() & allocation.waiting.keys() == set()
    assert allocation.granted.keys() | allocation.waiting.keys() == {want.job for want in wants} | holds.keys()
    assert all(why and "\n" not in why for why in allocation.waiting.values())


@given(wants_of_jobs, holdings(), inventories)
def test_the_order_is_respected(wants: list[Want], holds: dict[str, tuple[str, ...]], inventory: Inventory) -> None:
    """Of those that could ever run here, those that get slots are the first ones in the order, and the next did not fit."""
    allocation = allocate(wants, holds, inventory)
    able = [want for want in wants if want.job not in holds and want.slots <= len(inventory.slots)]
    line = sorted(able, key=lambda want: (-want.priority, want.wants_since, want.job))
    served = [want.job in allocation.granted for want in line]
    assert served == sorted(served, reverse=True)
    if not all(served):
        head = line[served.index(False)]
        taken = {slot for slots in allocation.granted.values() for slot in slots}
        assert head.slots > len([slot for slot in inventory.slots if slot.id not in taken])


@given(wants_of_jobs, holdings(), inventories, st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_listed_makes_no_difference(
    wants: list[Want], holds: dict[str, tuple[str, ...]], inventory: Inventory, random: object
) -> None:
    shuffled = list(wants)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis hands out a Random
    assert allocate(shuffled, dict(reversed(holds.items())), inventory) == allocate(wants, holds, inventory)


@given(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=10), st.data())
def test_no_choice_of_slots_lies_on_fewer_numa_nodes(numa: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(numa)))
    inventory = node(*numa)
    chosen = allocate([Want(job="a", slots=count)], {}, inventory).granted["a"]
    places = {slot.numa for slot in inventory.slots if slot.id in chosen}
    sizes = sorted((numa.count(place) for place in set(numa)), reverse=True)
    fewest = next(number for number in range(1, len(sizes) + 1) if sum(sizes[:number]) >= count)
    assert len(places) == fewest


@given(wants_of_jobs, inventories)
def test_what_was_granted_is_granted_again_once_it_is_held(wants: list[Want], inventory: Inventory) -> None:
    """A daemon that starts anew decides as the one before it."""
    first = allocate(wants, {}, inventory)
    again = allocate(wants, first.granted, inventory)
    assert again.granted == first.granted
    assert again.waiting.keys() == first.waiting.keys()


def test_problems_of_an_inventory_are_no_part_of_the_decision() -> None:
    wants = [Want(job="a", slots=1)]
    assert allocate(wants, {}, replace(FOUR, problems=("GPU 4 cannot be used",))) == allocate(wants, {}, FOUR)
