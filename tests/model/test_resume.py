"""Which state a generation begins with: the table of PROTOCOL 21, 22 and 24."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, plan
from elasticd.rendezvous.records import CauseKind, CheckpointRecord, GenerationRecord, MemberId, MemberRecord, Mode, ResumePoint, SnapshotRef
from elasticd.rendezvous.resume import choose_resume
from elasticd.rendezvous.view import Keyed
from tests.rendezvous.world import KEYS, LONG_AGO, NOW, TIMING, generation, member, mid, proposal, view

pytestmark = pytest.mark.timeout(30)


def refs(text: str) -> tuple[SnapshotRef, ...]:
    """ "1.5 2.7x": step 5 of generation 1, and step 7 of generation 2 with another content."""
    found = []
    for word in text.split():
        number, _, step = word.partition(".")
        found.append(SnapshotRef(generation=int(number), step=int(step.rstrip("xyz")), digest=word))
    return tuple(found)


def committed(text: str, *holders: str) -> CheckpointRecord | None:
    if not text:
        return None
    (ref,) = refs(text)
    return CheckpointRecord(scope=KEYS.scope, generation=ref.generation, step=ref.step, digest=ref.digest, holders=holders)


def newer(text: str) -> CheckpointRecord:
    record = committed(text)
    assert record
    return record


def chosen(held: Mapping[str, str], survivors: str, checkpoint: str = "", *holders: str) -> str:
    inventories = {mid(node): refs(text) for node, text in held.items()}
    resume = choose_resume(inventories, {mid(node) for node in survivors}, committed(checkpoint, *holders))
    return f"{resume.digest} {''.join(resume.holders)}".strip() if resume else ""


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
        ({}, "ab", "1.5", "1.5"),
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
    ],
)  # fmt: skip
def test_one_state_is_chosen_for_all(held: dict[str, str], survivors: str, checkpoint: str, expected: str) -> None:
    assert chosen(held, survivors, checkpoint) == expected


def test_the_holders_of_a_checkpoint_are_named() -> None:
    """Who has it in memory can give it too."""
    assert chosen({"a": "1.5", "c": "1.4"}, "a", "1.5", "b") == "1.5 ab"
    assert chosen({"a": "1.4"}, "a", "1.5", "b", "c") == "1.5 bc"


def stopped(node: str, age: int, held: str, *, leaving: bool = False) -> Keyed[MemberRecord]:
    keyed = member(node, age, stopped=4, leaving=leaving)
    return Keyed(keyed.record.model_copy(update={"inventory": refs(held)}), keyed.create_revision, keyed.mod_revision, keyed.lease)


def activation(*members: Keyed[MemberRecord], nodes: str, old: str = "abc", checkpoint: str = "") -> tuple[Activate, GenerationRecord]:
    record = committed(checkpoint)
    seen = view(
        *members,
        generation=generation(4, old),
        proposal=proposal(5, nodes, mode=Mode.KILL, kind=CauseKind.LOSS),
        checkpoint=Keyed(record, 7, 7) if record else None,
    )
    decision = plan(seen, NOW, LONG_AGO, TIMING)
    assert isinstance(decision, Activate)
    txn = transitions.activate(KEYS, seen, decision, mid("a"), frozen_max=1.0, at=0.0)
    return decision, GenerationRecord.model_validate_json(txn.ops[0].value)  # type: ignore[union-attr]


def test_a_generation_is_activated_with_its_resume_point() -> None:
    """b and c survive; a is gone, and d is new and holds nothing."""
    decision, record = activation(stopped("b", 2, "4.7 4.8"), stopped("c", 3, "4.6 4.7"), stopped("d", 4, ""), nodes="bcd")
    assert record.resume == decision.resume == ResumePoint(generation=4, step=7, digest="4.7", holders=("b", "c"))


def test_an_old_member_that_leaves_can_still_give_its_state() -> None:
    _, record = activation(stopped("a", 1, "4.8", leaving=True), stopped("d", 4, ""), nodes="d", old="a")
    assert record.resume == ResumePoint(generation=4, step=8, digest="4.8", holders=("a",))


def test_a_generation_without_any_state_begins_anew() -> None:
    _, record = activation(stopped("b", 2, ""), stopped("c", 3, ""), nodes="bc")
    assert record.resume is None


def test_a_generation_goes_back_to_the_committed_checkpoint_and_never_behind_it() -> None:
    _, record = activation(stopped("b", 2, "4.7"), stopped("c", 3, "4.7"), nodes="bc", checkpoint="4.9")
    assert record.resume == ResumePoint(generation=4, step=9, digest="4.9")


def test_states_are_ordered_by_generation_and_then_by_step() -> None:
    """Back from a cut, step 9 of generation 1 does not beat step 1 of generation 2."""
    ordered = refs("1.2 1.9 2.1 2.3")
    assert sorted(ordered, key=lambda ref: ref.order) == list(ordered)


def test_only_what_is_newer_is_committed_and_only_by_the_active_generation() -> None:
    """In the transaction: neither the generation nor the checkpoint has changed since."""
    seen = view(member("a", 1), generation=generation(4, "a"), checkpoint=Keyed(newer("4.7"), 7, 7))
    for text in ("4.7", "4.6", "3.9", "5.1"):
        with pytest.raises(ValueError, match=r"active|newer"):
            transitions.commit(KEYS, seen, newer(text))
    txn = transitions.commit(KEYS, seen, newer("4.8"))
    assert {(compare.key, compare.value) for compare in txn.compares} == {(KEYS.generation, 500), (KEYS.checkpoint, 7)}


def test_a_survivor_is_known_by_its_incarnation() -> None:
    """A restarted agent on the node of a survivor holds nothing of it."""
    again: dict[MemberId, tuple[SnapshotRef, ...]] = {mid("a", 2): (), mid("b"): refs("1.5")}
    resume = choose_resume(again, {mid("b")}, None)
    assert resume
    assert resume.holders == ("b",)
