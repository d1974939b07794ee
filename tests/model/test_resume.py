"""Which state a generation begins with: the table of PROTOCOL 21, 22 and 24."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elasticd.kv.types import Put
from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, Propose, Wait, plan
from elasticd.rendezvous.records import (
    CauseKind,
    CheckpointRecord,
    EventRecord,
    GenerationRecord,
    MemberId,
    MemberRecord,
    Mode,
    ResumePoint,
    SnapshotRef,
)
from elasticd.rendezvous.resume import Choice, choose_resume
from elasticd.rendezvous.view import Keyed
from tests.rendezvous.world import KEYS, LONG_AGO, NOW, TIMING, committed, generation, member, mid, proposal, refs, target, view

pytestmark = pytest.mark.timeout(30)


def choice(
    held: Mapping[str, str], survivors: str, checkpoint: str = "", holders: str = "", *, lost: Mapping[str, str] | None = None, shared: bool = False,
    members: str = "", planned: bool = False,
) -> Choice:  # fmt: skip
    return choose_resume(
        {mid(node): refs(text) for node, text in held.items()},
        {mid(node) for node in survivors},
        committed(checkpoint, holders, shared=shared).record if checkpoint else None,
        lost={mid(node): tuple(text.split()) for node, text in (lost or {}).items()},
        members=[mid(node) for node in members],
        planned=planned,
    )


def chosen(*args: object, **more: object) -> str:
    made = choice(*args, **more)  # type: ignore[arg-type]
    assert not made.awaiting
    return f"{made.resume.digest} {''.join(made.resume.holders)}".strip() if made.resume else ""


@pytest.mark.parametrize(
    ("held", "survivors", "checkpoint", "expected"),
    [
        ({}, "", "", ""),
        ({"a": "", "b": ""}, "ab", "", ""),
        ({"a": "1.4 1.5", "b": "1.4 1.5"}, "ab", "", "1.5 ab"),
        ({"a": "1.4 1.5", "b": "1.3 1.4"}, "ab", "", "1.4 ab"),
        ({"a": "1.4 1.5", "b": "1.3 1.4"}, "a", "", "1.5 a"),
        ({"a": "1.4 1.5", "b": "1.4 1.5x"}, "ab", "", "1.4 ab"),
        ({"a": "1.5", "b": "1.7"}, "ab", "", "1.7 b"),
        ({"a": "1.5", "b": ""}, "ab", "", "1.5 a"),
        ({"a": "1.9", "b": "2.1", "c": "2.1"}, "bc", "", "2.1 bc"),
        ({"a": "1.9 2.1", "b": "1.9"}, "ab", "", "1.9 ab"),
        ({"a": "1.4 1.5", "b": "1.3 1.4"}, "ab", "1.5", "1.5 a"),
        ({"a": "1.3 1.4", "b": "1.3 1.4"}, "ab", "1.5", "1.5"),
        ({"a": "1.9"}, "a", "2.1", "2.1"),
        ({"a": "2.1x"}, "a", "2.1", "2.1"),
        ({"a": "", "b": "1.6"}, "a", "1.5", "1.6 b"),
        ({"a": "1.5", "b": "1.5x", "c": "1.5x"}, "", "", "1.5x bc"),
        ({"a": "1.5", "b": "1.5x"}, "", "", "1.5x b"),
        ({"l": "1.5", "a": "1.3"}, "", "", "1.5 l"),
        ({"c": ""}, "ab", "1.5", "1.5"),
        ({"a": "1.50 1.98 1.99", "b": "1.50"}, "ab", "", "1.99 a"),
        ({"a": "1.50 2.99", "b": "1.50"}, "ab", "1.50", "1.50 ab"),
        ({"a": "1.50 2.98 2.99", "b": "1.50"}, "ab", "1.50", "2.99 a"),
        ({"a": "1.4 2.5=1.5", "b": "1.4 1.5"}, "ab", "", "1.5 ab"),
        ({"a": "2.5=1.5 2.6", "b": "1.5"}, "ab", "", "1.5 ab"),
        ({"a": "1.5", "b": "2.5=1.5"}, "ab", "2.5=1.5", "1.5 ab"),
    ],
    ids=[
        "nothing at all",
        "nothing held",
        "the newest",
        "a step back rather than a transfer",
        "a lone survivor's newest",
        "the same step with another content is another",
        "nothing in common: the greatest, to be fetched",
        "a survivor without a state fetches",
        "a later generation beats a greater step",
        "what all hold, of an older generation",
        "never older than committed, though all hold it",
        "committed, if all is older",
        "committed, against a greater step",
        "another content than the committed one does not count",
        "newer than committed, held by no survivor",
        "of rivals, the one more nodes hold",
        "of equal rivals, the same one everywhere",
        "a leaver's state counts",
        "a survivor that is gone again",
        "who had yet to fetch fetches again: steps are not thrown away for it",
        "a snapshot back, though it is the committed one",
        "not two, though that is the committed one",
        "the same content under a later number is the same state",
        "and a snapshot back goes to it",
        "the committed content under an older number counts",
    ],
)  # fmt: skip
def test_one_state_is_chosen_for_all(held: dict[str, str], survivors: str, checkpoint: str, expected: str) -> None:
    assert chosen(held, survivors, checkpoint) == expected


def test_a_state_under_several_numbers_is_resumed_under_the_greatest() -> None:
    """Or what is restored would be older than what was committed of it."""
    assert choice({"a": "1.4 2.5=1.5", "b": "1.5"}, "ab").resume == ResumePoint(generation=2, step=5, digest="1.5", holders=("a", "b"))


def test_an_agreed_stop_costs_no_step_though_some_would_have_to_fetch() -> None:
    held = {"a": "1.4 1.5", "b": "1.3 1.4"}
    assert chosen(held, "ab") == "1.4 ab"
    assert chosen(held, "ab", planned=True) == "1.5 a"


# --- the committed checkpoint ------------------------------------------------------------------------------------------------


def test_those_who_are_here_and_hold_the_checkpoint_are_named() -> None:
    """On disk, as the record says, or in memory."""
    assert chosen({"a": "1.5", "b": "", "c": "1.4", "d": "1.5"}, "acd", "1.5", "bc") == "1.5 abcd"
    assert chosen({"a": "1.4", "b": ""}, "a", "1.5", "bc") == "1.5 b"


def test_without_anybody_who_can_give_the_checkpoint_its_holders_are_waited_for() -> None:
    made = choice({"a": "1.4", "d": "1.3"}, "a", "1.5", "bc")
    assert made == Choice(awaiting="nobody here can give the committed checkpoint (generation 1, step 5, 1.5): waiting for b, c")
    made = choice({"a": "1.4", "b": ""}, "a", "1.5", "bc", lost={"b": "1.5"})
    assert made.resume is None
    assert made.awaiting.endswith("waiting for c; b cannot read it any more")


def test_what_is_newer_than_a_checkpoint_that_nobody_has_is_begun_with() -> None:
    assert chosen({"a": "1.6"}, "a", "1.5", "bc") == "1.6 a"
    assert chosen({"a": "1.6", "b": "1.4", "c": ""}, "a", "1.5", "bc", lost={"b": "1.5", "c": "1.5"}) == "1.6 a"


def test_when_every_holder_has_lost_it_the_newest_that_is_left_is_fallen_back_to() -> None:
    held, lost = {"a": "1.4 1.2", "b": "1.3", "c": ""}, {"b": "1.5", "c": "1.5 1.1"}
    made = choice(held, "ab", "1.5", "bc", lost=lost)
    assert made.resume == ResumePoint(generation=1, step=4, digest="1.4", holders=("a",))
    assert made.fell_back == committed("1.5", "bc").record
    assert choice({"b": "", "c": ""}, "b", "1.5", "bc", lost=lost) == Choice(fell_back=committed("1.5", "bc").record)


@pytest.mark.parametrize("spoil", ["b is away", "c is away", "b has not said so", "a has it in memory"])
def test_nothing_less_lets_it_fall_back(spoil: str) -> None:
    held, lost = {"a": "1.4", "b": "1.3", "c": ""}, {"b": "1.5", "c": "1.5"}
    if spoil.endswith("away"):
        del held[spoil[0]]
    elif spoil.endswith("so"):
        del lost["b"]
    else:
        held["a"] += " 1.5"
    made = choice(held, "a", "1.5", "bc", lost=lost)
    assert made.fell_back is None
    assert made.awaiting or made.resume
    assert not made.resume or made.resume.digest == "1.5"


def test_who_lost_it_and_got_it_again_holds_it() -> None:
    """Fetched from another holder, say, into memory; that it is not on its disk any more is still said."""
    assert chosen({"b": "1.5 1.3"}, "b", "1.5", "b", lost={"b": "1.5"}) == "1.5 b"


def test_on_shared_storage_anybody_can_read_it_until_all_who_are_to_begin_say_that_it_is_lost() -> None:
    shared = {"shared": True, "members": "ab"}
    held = {"a": "1.3", "b": "", "c": ""}
    assert chosen(held, "ab", "1.5", **shared) == "1.5"
    assert chosen(held, "ab", "1.5", lost={"a": "1.5"}, **shared) == "1.5"
    made = choice(held, "ab", "1.5", lost={"a": "1.5", "b": "1.5"}, shared=True, members="ab")
    assert made.fell_back
    assert made.resume
    assert made.resume.digest == "1.3"
    # One who also keeps a copy of its own is waited for, as ever.
    assert choice(held, "ab", "1.5", "d", lost={"a": "1.5", "b": "1.5"}, shared=True, members="ab").awaiting
    assert chosen(held, "ab", "1.5", "c", lost={"a": "1.5", "b": "1.5"}, **shared) == "1.5 c"


def test_after_a_fall_back_what_was_made_of_it_is_newer_than_the_lost_checkpoint() -> None:
    """Generation 2 fell back to step 3 of generation 1, and is at its step 4."""
    assert chosen({"b": "2.3=1.3 2.4", "c": "2.3=1.3 2.4"}, "bc", "1.5", "bc", lost={"b": "1.5", "c": "1.5"}) == "2.4 bc"


# --- in a plan and its transaction ---------------------------------------------------------------------------------------------


def activation(
    *members: Keyed[MemberRecord], nodes: str, old: str = "abc", checkpoint: Keyed[CheckpointRecord] | None = None
) -> tuple[Activate, GenerationRecord, list[EventRecord]]:
    seen = view(*members, generation=generation(4, old), proposal=proposal(5, nodes, mode=Mode.KILL, kind=CauseKind.LOSS), checkpoint=checkpoint)
    decision = plan(seen, NOW, LONG_AGO, TIMING)
    assert isinstance(decision, Activate), decision
    txn = transitions.activate(KEYS, seen, decision, mid("a"), frozen_max=1.0, at=0.0)
    first, *events = [op for op in txn.ops if isinstance(op, Put)]
    assert (first.key, len(events) + 1) == (KEYS.generation, len(txn.ops))
    made = [EventRecord.model_validate_json(op.value) for op in events]
    assert [op.key for op in events] == [KEYS.event(5, one.what) for one in made]
    return decision, GenerationRecord.model_validate_json(first.value), made


def test_a_generation_is_activated_with_its_resume_point() -> None:
    """b and c survive; a is gone, and d is new and holds nothing."""
    members = member("b", 2, stopped=4, held="4.7 4.8"), member("c", 3, stopped=4, held="4.6 4.7"), member("d", 4, stopped=4)
    decision, record, events = activation(*members, nodes="bcd")
    assert record.resume == decision.resume == ResumePoint(generation=4, step=7, digest="4.7", holders=("b", "c"))
    assert [one.what for one in events] == ["formed"]


def test_an_old_member_that_leaves_can_still_give_its_state() -> None:
    members = member("a", 1, stopped=4, leaving=True, held="4.8"), member("d", 4, stopped=4)
    _, record, _ = activation(*members, nodes="d", old="a")
    assert record.resume == ResumePoint(generation=4, step=8, digest="4.8", holders=("a",))


def test_a_generation_without_any_state_begins_anew() -> None:
    _, record, _ = activation(member("b", 2, stopped=4), member("c", 3, stopped=4), nodes="bc")
    assert record.resume is None


def test_a_generation_goes_back_to_the_committed_checkpoint_and_never_behind_it() -> None:
    members = member("b", 2, stopped=4, held="4.7"), member("c", 3, stopped=4, held="4.7")
    _, record, events = activation(*members, nodes="bc", checkpoint=committed("4.9", "bc"))
    assert record.resume == ResumePoint(generation=4, step=9, digest="4.9", holders=("b", "c"))
    assert [one.what for one in events] == ["formed"]


def test_falling_back_is_told_in_the_same_transaction() -> None:
    members = member("b", 2, stopped=4, held="4.7", lost="4.9"), member("c", 3, stopped=4, lost="4.9")
    decision, record, events = activation(*members, nodes="bc", checkpoint=committed("4.9", "bc"))
    assert record.resume == ResumePoint(generation=4, step=7, digest="4.7", holders=("b",))
    assert decision.fell_back == committed("4.9", "bc").record
    assert [(one.what, one.detail) for one in events][1:] == [
        ("fell_back", "the committed checkpoint (generation 4, step 9, 4.9) is lost on b, c; begins with generation 4, step 7, 4.7")
    ]
    _, record, events = activation(*(member(node, 2, stopped=4, lost="4.9") for node in "bc"), nodes="bc", checkpoint=committed("4.9", "bc"))
    assert record.resume is None
    assert events[1].detail.endswith("; begins with the very beginning")


def test_a_pending_generation_waits_for_a_holder_and_says_so_until_one_comes_whatever_it_is() -> None:
    """As a standby, as a leaver: what is fetched from it is the same."""
    members = [member("b", 2, stopped=4, held="4.7"), member("c", 3, stopped=4)]
    keys = {"generation": generation(4, "bc"), "proposal": proposal(5, "bc", mode=Mode.KILL), "checkpoint": committed("4.9", "ad")}
    waits = plan(view(*members, **keys), NOW, LONG_AGO, TIMING)
    assert waits == Wait(why="nobody here can give the committed checkpoint (generation 4, step 9, 4.9): waiting for a, d", alert=True)
    for holder in (member("d", 9, stopped=4), member("a", 9, stopped=4, leaving=True)):
        decision = plan(view(*members, holder, **keys), NOW, LONG_AGO, TIMING)
        assert isinstance(decision, Activate)
        assert decision.resume == ResumePoint(generation=4, step=9, digest="4.9", holders=(holder.record.id.node,))


def test_before_anything_is_proposed_a_holder_is_waited_for_so_that_it_can_be_in_it() -> None:
    """The whole job starts again, and the first to come have no checkpoint."""
    ended = {"target": target(1, 3, mod=900), "checkpoint": committed("4.9", "c")}
    some = [member("a", 1), member("b", 2)]
    decision = plan(view(*some, **ended), NOW, LONG_AGO, TIMING)
    assert isinstance(decision, Wait)
    assert decision.alert
    decision = plan(view(*some, member("c", 3, held="4.9"), **ended), NOW, LONG_AGO, TIMING)
    assert isinstance(decision, Propose)
    assert [identity.node for identity in decision.members] == ["a", "b", "c"]


def test_states_are_ordered_by_generation_and_then_by_step() -> None:
    """Back from a cut, step 9 of generation 1 does not beat step 1 of generation 2."""
    ordered = refs("1.2 1.9 2.1 2.3")
    assert sorted(ordered, key=lambda ref: ref.order) == list(ordered)


def test_only_what_is_newer_is_committed_and_only_by_the_active_generation() -> None:
    """In the transaction: neither the generation nor the checkpoint has changed since, nor what is held."""
    seen = view(member("a", 1), generation=generation(4, "a"), checkpoint=committed("4.7"))
    for text in ("4.7", "4.6", "3.9", "5.1"):
        with pytest.raises(ValueError, match=r"active|newer"):
            transitions.commit(KEYS, seen, committed(text).record)
    txn = transitions.commit(KEYS, seen, committed("4.8").record)
    assert {(compare.key, compare.value) for compare in txn.compares} == {(KEYS.generation, 500), (KEYS.checkpoint, 7), (KEYS.policy, 0)}


def test_a_survivor_is_known_by_its_incarnation() -> None:
    """A restarted agent on the node of a survivor holds nothing of it."""
    again: dict[MemberId, tuple[SnapshotRef, ...]] = {mid("a", 2): (), mid("b"): refs("1.5")}
    resume = choose_resume(again, {mid("b")}, None).resume
    assert resume
    assert resume.holders == ("b",)
