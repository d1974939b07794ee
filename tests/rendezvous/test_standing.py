"""How a member without workers stands in its job: what it waits for, and whether anything keeps the job from going on."""

from __future__ import annotations

import pytest

from elasticd.rendezvous.standing import Place, Standing, standing
from elasticd.rendezvous.view import View
from tests.rendezvous.world import committed, generation, member, mid, proposal, target, view

A, B, C = (member(name, age) for age, name in enumerate("abc", 1))
ME = mid("c")

FORMING, WAITING = Place.FORMING, Place.WAITING


@pytest.mark.parametrize(
    ("seen", "place"),
    [
        (View(revision=1), FORMING),
        (view(A, B, C, target=target(1, 3)), FORMING),
        (view(A, C, target=target(3, 3)), WAITING),
        (view(A, B, C, target=target(1, 3), proposal=proposal(1, ["a", "b", "c"])), FORMING),
        (view(A, B, C, target=target(1, 2), proposal=proposal(1, ["a", "b"])), WAITING),
        (view(A, B, C, target=target(1, 3), generation=generation(1, ["a", "b", "c"])), FORMING),
        (view(A, B, C, target=target(1, 3), generation=generation(1, ["a", "b"])), FORMING),
        (view(A, B, C, target=target(1, 2), generation=generation(1, ["a", "b"])), WAITING),
        (view(A, B, C, target=target(1, 3, paused=True), generation=generation(1, ["a", "b"])), WAITING),
        (view(B, C, target=target(3, 3), generation=generation(1, ["a", "b", "c"])), WAITING),
    ],
    ids=[
        "nothing is known",
        "enough are here",
        "too few are here",
        "it is to be in the next one",
        "it is not to be in the next one",
        "its generation begins",
        "it may join",
        "it is a spare",
        "nobody may join",
        "too few are left",
    ],
)
def test_what_a_member_without_workers_waits_for(seen: View, place: Place) -> None:
    assert standing(seen, ME, whole=True, frozen=False).place is place


def test_who_is_no_member_yet_is_about_to_be_one() -> None:
    assert standing(view(A, target=target(3, 3)), None, whole=False, frozen=False).place is FORMING


def test_without_etcd_it_is_frozen_whatever_was_seen_last() -> None:
    told = standing(view(A, B, C, target=target(1, 3)), ME, whole=True, frozen=True)
    assert (told.place, told.problem) == (Place.FROZEN, "etcd is out of reach: membership is frozen")


def test_too_few_nodes_are_a_problem_and_being_a_spare_is_none() -> None:
    few = standing(view(A, C, target=target(3, 3)), ME, whole=True, frozen=False)
    assert few.problem == "2 of the 3 nodes needed are here"
    spare = standing(view(A, B, C, target=target(1, 2), generation=generation(1, ["a", "b"])), ME, whole=True, frozen=False)
    assert spare.problem == ""


def test_who_does_not_see_all_members_does_not_count_them() -> None:
    told = standing(view(C, target=target(3, 3)), ME, whole=False, frozen=False)
    assert (told.place, told.problem) == (FORMING, "")


def test_what_is_wanted_and_what_is_left_of_the_budget_is_told() -> None:
    seen = view(A, B, C, target=target(2, 5, 4, budget=9), used=3, checkpoint=committed("1.40", "a"))
    assert standing(seen, ME, whole=True, frozen=False) == Standing(
        place=FORMING, desired=4, min_nodes=2, max_nodes=5, restarts_used=3, restarts_max=9, problem=""
    )
