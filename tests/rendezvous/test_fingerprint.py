"""Who is left out because its code, data or settings differ, and how people are told."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd.rendezvous.fingerprint import alike
from elasticd.rendezvous.membership import Activate, Decision, Propose, Wait, choose, plan
from elasticd.rendezvous.records import CauseKind, MemberRecord, Mode
from elasticd.rendezvous.status import JobState, job_status
from elasticd.rendezvous.view import Keyed, View
from tests.rendezvous.world import LONG_AGO, NOW, TIMING, generation, member, mid, nodes, proposal, target, view

pytestmark = pytest.mark.timeout(10)


def running(node: str, age: int, code: str, **more: Any) -> Keyed[MemberRecord]:
    return member(node, age, fingerprint={"code": code} if code else {}, **more)


def group(*members: Keyed[MemberRecord], limits: tuple[int, int] = (1, 4), **keys: Any) -> str:
    seen = view(*members, target=target(*limits), **keys)
    assert seen.target
    return "".join(nodes(choose(seen, seen.target.record, {})))


def decide(seen: View) -> Decision:
    return plan(seen, NOW, LONG_AGO, TIMING)


@pytest.mark.parametrize(
    ("codes", "kept"),
    [("111", "abc"), ("121", "ac"), ("122", "a"), ("123", "a"), ("1", "a"), ("-11", "abc"), ("-12", "ab"), ("1-2", "ab"), ("---", "abc"), ("", "")],
)
def test_those_that_are_like_the_oldest_are_chosen(codes: str, kept: str) -> None:
    """A member without a fingerprint is like everybody, and does not make others alike that differ."""
    assert group(*(running("abc"[index], index, code.strip("-")) for index, code in enumerate(codes))) == kept


def test_only_parts_that_both_have_are_compared() -> None:
    parts: list[dict[str, str]] = [{"code": "1", "data": "7"}, {"code": "1", "config": "3"}, {"data": "8"}, {"config": "4"}, {"code": "1", "data": "7"}]
    members = [member("abcde"[index], index, fingerprint=one) for index, one in enumerate(parts)]
    kept, differences = alike(members)
    assert [keyed.record.id.node for keyed in kept] == ["a", "b", "e"]
    assert [str(one) for one in differences] == ["c differs in data (8, a has 7)", "d differs in config (4, b has 3)"]


def test_people_are_told_the_words_that_differ_and_the_beginning_of_long_ones() -> None:
    _, (one,) = alike([running("a", 1, "script=1 modules=2 " + "a" * 90), running("b", 2, "script=1 modules=3 " + "a" * 90)])
    assert str(one) == "b differs in code (modules=3, a has modules=2)"
    _, (one,) = alike([running("a", 1, "a" * 90), running("b", 2, "b" * 90)])
    assert str(one) == f"b differs in code ({'b' * 60}, a has {'a' * 60})"


def test_the_survivors_say_what_is_right_though_others_are_older() -> None:
    assert group(running("a", 1, "2"), running("b", 2, "1"), running("c", 3, "1"), running("d", 4, "2"), generation=generation(4, "bc")) == "bc"


def test_a_leaver_does_not_say_what_is_right() -> None:
    assert group(running("a", 1, "1", leaving=True), running("b", 2, "2"), generation=generation(4, "a")) == "b"


def test_a_newcomer_that_differs_stands_by_while_the_others_train_and_everybody_is_told_why() -> None:
    seen = view(running("a", 1, "one"), running("b", 2, "one"), running("c", 3, "two"), target=target(1, 3), generation=generation(4, "ab"))
    assert decide(seen) == Wait(why="training; c differs in code (two, a has one)")
    status = job_status(seen, cluster="c", job="j")
    assert (status.state, status.why) == (JobState.TRAINING, "c differs in code (two, a has one)")


def test_with_too_few_that_are_alike_it_waits_and_says_who_differs() -> None:
    seen = view(running("a", 1, "one"), running("b", 2, "two"), running("c", 3, "two"), target=target(2, 3))
    assert decide(seen) == Wait(why="1 of at least 2 nodes are here; b differs in code (two, a has one); c differs in code (two, a has one)")
    status = job_status(seen, cluster="c", job="j")
    assert status.state is JobState.WAITING
    assert status.why.startswith("1 of at least 2 nodes are here; b differs in code")


def test_of_many_that_differ_a_few_are_named() -> None:
    seen = view(*(running(f"n{index}", index, str(index)) for index in range(9)), target=target(2, 9))
    decision = decide(seen)
    assert isinstance(decision, Wait)
    assert decision.why.count("differs") == 3
    assert decision.why.endswith(" and 5 more")


def test_a_lone_node_goes_on_whatever_it_is() -> None:
    decision = decide(view(running("a", 1, "one"), target=target(1, 1)))
    assert isinstance(decision, Propose)


def test_a_change_of_code_on_all_nodes_at_once_forms_when_none_of_the_old_is_left() -> None:
    """Their agents were all started anew; the old generation is still on record."""
    again = [running(node, 10 + index, "two", life=2) for index, node in enumerate("abc")]
    assert group(*again, generation=generation(4, "abc"), limits=(3, 3)) == "abc"
    decision = decide(view(*again, target=target(3, 3), generation=generation(4, "abc")))
    assert isinstance(decision, Propose)
    assert decision.cause.kind is CauseKind.LOSS


def test_one_node_after_the_other_changes_its_code_and_the_job_follows_when_the_last_of_the_old_is_gone() -> None:
    old = [running("a", 1, "one"), running("b", 2, "one")]
    new = [running("c", 3, "two"), running("a", 4, "two", life=2)]
    trains = generation(4, "ab")
    assert group(*old, new[0], generation=trains) == "ab"
    assert group(old[1], *new, generation=trains) == "b"
    assert group(*new, generation=trains) == "ca"


def test_a_pending_proposal_is_not_changed_by_somebody_who_differs() -> None:
    seen = view(
        running("a", 1, "one", stopped=4), running("b", 2, "one", stopped=4), running("c", 0, "two"), target=target(1, 3),
        generation=generation(4, "ab"), proposal=proposal(5, "ab", mode=Mode.KILL),
    )  # fmt: skip
    decision = decide(seen)
    assert isinstance(decision, Activate)
    assert [one.id for one in decision.members] == [mid("a"), mid("b")]
