"""From keys and changes to a view: order, resets, and garbage that never hides the last good value."""

from __future__ import annotations

import pytest

from elasticd.kv.types import EventKind, KeyValue, Listing, WatchBatch, WatchEvent
from elasticd.rendezvous.records import BudgetRecord, EventRecord, GenerationState, Record
from elasticd.rendezvous.view import Ledger, View
from tests.rendezvous.world import KEYS, generation, member, mid, proposal, target, view

pytestmark = pytest.mark.timeout(10)
GARBAGE = b"\x00garbage"


def item(key: str, value: Record | bytes, mod: int, *, created: int | None = None, lease: int = 0) -> KeyValue:
    raw = value if isinstance(value, bytes) else value.to_bytes()
    return KeyValue(key=key, value=raw, create_revision=mod if created is None else created, mod_revision=mod, lease=lease)


def put(*items: KeyValue) -> WatchBatch:
    return WatchBatch(revision=max(one.mod_revision for one in items), events=tuple(WatchEvent(kind=EventKind.PUT, item=one) for one in items))


def deleted(key: str, mod: int) -> WatchBatch:
    gone = KeyValue(key=key, value=b"", create_revision=0, mod_revision=mod)
    return WatchBatch(revision=mod, events=(WatchEvent(kind=EventKind.DELETE, item=gone),))


def loaded(*items: KeyValue, revision: int = 100) -> Ledger:
    ledger = Ledger(KEYS)
    ledger.load(Listing(revision=revision, items=items))
    return ledger


def used(number: int) -> BudgetRecord:
    return BudgetRecord(scope=KEYS.scope, used=number)


def budget_of(seen: View) -> int | None:
    return seen.budget.record.used if seen.budget else None


# --- reading -------------------------------------------------------------------------------------------------------------


def test_every_key_of_the_layout_has_its_place_in_the_view() -> None:
    seen = loaded(
        item(KEYS.target, target().record, 5),
        item(KEYS.proposal, proposal(2, "a").record, 6),
        item(KEYS.generation, generation(1, "a").record, 7),
        item(KEYS.budget, used(1), 8),
        item(KEYS.member("a"), member("a", 9).record, 10, created=9, lease=77),
        item(KEYS.event(2, "formed"), EventRecord(scope=KEYS.scope, number=2, at=0, what="formed"), 12),
        item(KEYS.event(1, "formed"), EventRecord(scope=KEYS.scope, number=1, at=0, what="formed"), 11),
    ).view()
    assert (seen.revision, seen.number) == (100, 1)
    assert seen.target
    assert seen.proposal
    assert seen.pending
    assert seen.active
    assert seen.restarts_used == 1
    own = seen.present[mid("a")]
    assert (own.create_revision, own.mod_revision, own.lease) == (9, 10, 77)
    assert [one.number for one in seen.events] == [1, 2]
    assert (seen.problems, seen.damaged) == ({}, {})


def test_an_empty_job_is_an_empty_view() -> None:
    seen = loaded().view()
    assert (seen.number, seen.pending, seen.active, seen.over, seen.reopened, seen.restarts_used) == (0, None, None, False, False, 0)


def test_a_proposal_is_pending_while_it_is_newer_than_the_generation() -> None:
    assert view(proposal=proposal(1, "a")).pending
    assert view(proposal=proposal(2, "a"), generation=generation(1, "a")).pending
    assert not view(proposal=proposal(2, "a"), generation=generation(2, "a")).pending


@pytest.mark.parametrize(("mod", "run", "over"), [(400, True, True), (501, True, False), (501, False, True)])
def test_a_job_is_over_until_an_operator_asks_to_run_it_later_than_it_ended(mod: int, run: bool, over: bool) -> None:
    seen = view(generation=generation(3, "a", state=GenerationState.STOPPED, mod=500), target=target(run=run, mod=mod))
    assert seen.over is over
    assert seen.active is None


def test_a_view_is_made_anew_only_when_something_changed() -> None:
    ledger = loaded(item(KEYS.budget, used(1), 5))
    assert ledger.view() is ledger.view()
    first = ledger.view()
    ledger.apply(put(item(KEYS.budget, used(2), 101, created=5)))
    assert budget_of(first) == 1
    assert budget_of(ledger.view()) == 2


# --- order ---------------------------------------------------------------------------------------------------------------


def test_changes_are_applied_in_order_and_the_revision_follows_them() -> None:
    ledger = loaded()
    ledger.apply(put(item(KEYS.budget, used(1), 101), item(KEYS.budget, used(2), 102, created=101)))
    assert (budget_of(ledger.view()), ledger.view().revision) == (2, 102)
    ledger.apply(deleted(KEYS.budget, 103))
    assert (budget_of(ledger.view()), ledger.view().revision) == (None, 103)


def test_a_change_that_a_later_listing_already_holds_is_skipped() -> None:
    ledger = loaded(item(KEYS.budget, used(9), 100, created=50), revision=100)
    ledger.apply(put(item(KEYS.budget, used(1), 60, created=50)))
    ledger.apply(deleted(KEYS.budget, 99))
    assert (budget_of(ledger.view()), ledger.view().revision) == (9, 100)


def test_a_batch_that_only_says_how_far_the_store_is_proves_nothing_beyond_its_events() -> None:
    ledger = loaded()
    ledger.apply(WatchBatch(revision=900, events=(WatchEvent(kind=EventKind.PUT, item=item(KEYS.budget, used(1), 101)),)))
    assert ledger.view().revision == 101


def test_a_reset_replaces_everything() -> None:
    ledger = loaded(item(KEYS.budget, used(1), 5), item(KEYS.member("a"), member("a", 6).record, 6))
    entry = WatchEvent(kind=EventKind.PUT, item=item(KEYS.member("b"), member("b", 300).record, 300))
    ledger.apply(WatchBatch(revision=400, events=(entry,), reset=True))
    seen = ledger.view()
    assert (budget_of(seen), list(seen.members), seen.revision) == (None, ["b"], 400)
    ledger.apply(put(item(KEYS.budget, used(7), 399)))
    assert budget_of(ledger.view()) is None


def test_a_listing_forgets_what_it_does_not_hold() -> None:
    ledger = loaded(item(KEYS.budget, used(1), 5), item(KEYS.target, GARBAGE, 6), item(KEYS.prefix + "what", b"", 7))
    ledger.load(Listing(revision=200, items=()))
    seen = ledger.view()
    assert (seen.budget, seen.problems, seen.damaged) == (None, {}, {})


# --- garbage -------------------------------------------------------------------------------------------------------------


KINDS = [
    (KEYS.target, target().record.to_bytes()),
    (KEYS.proposal, proposal(2, "a").record.to_bytes()),
    (KEYS.generation, generation(1, "a").record.to_bytes()),
    (KEYS.budget, used(1).to_bytes()),
    (KEYS.member("a"), member("a", 9).record.to_bytes()),
]


@pytest.mark.parametrize(("key", "good"), KINDS, ids=["target", "proposal", "generation", "budget", "member"])
def test_garbage_over_a_key_keeps_its_last_good_value_and_is_named(key: str, good: bytes) -> None:
    ledger = loaded(item(key, good, 5))
    before = ledger.view()
    ledger.apply(put(item(key, GARBAGE, 101, created=5)))
    after = ledger.view()
    for name in ("target", "proposal", "generation", "budget", "members"):
        assert getattr(after, name) == getattr(before, name)
    assert after.problems[key].startswith(f"{key}: ")
    assert after.damaged == {key: 101}
    ledger.load(Listing(revision=150, items=(item(key, GARBAGE, 101, created=5),)))
    assert (ledger.view().members, ledger.view().damaged) == (before.members, {key: 101})
    ledger.apply(put(item(key, good, 160, created=5)))
    assert (ledger.view().problems, ledger.view().damaged) == ({}, {})


@pytest.mark.parametrize(("key", "good"), KINDS, ids=["target", "proposal", "generation", "budget", "member"])
def test_garbage_in_a_key_made_anew_does_not_inherit_the_old_value(key: str, good: bytes) -> None:
    ledger = loaded(item(key, good, 5))
    ledger.apply(deleted(key, 101))
    ledger.apply(put(item(key, GARBAGE, 102)))
    seen = ledger.view()
    assert (seen.target, seen.proposal, seen.generation, seen.budget, dict(seen.members)) == (None, None, None, None, {})
    assert seen.damaged == {key: 102}
    again = loaded(item(key, good, 5))
    again.load(Listing(revision=200, items=(item(key, GARBAGE, 150, created=149),)))
    assert (again.view().budget, dict(again.view().members)) == (None, {})


def test_garbage_from_the_start_is_a_problem_and_no_value() -> None:
    seen = loaded(item(KEYS.generation, GARBAGE, 5)).view()
    assert seen.generation is None
    assert seen.damaged == {KEYS.generation: 5}


def test_a_member_record_under_another_nodes_key_is_garbage() -> None:
    seen = loaded(item(KEYS.member("a"), member("b", 5).record, 5)).view()
    assert dict(seen.members) == {}
    assert "'b'" in seen.problems[KEYS.member("a")]


@pytest.mark.parametrize("node", ["../a", "", "a/b", "a\\nb"])
def test_a_member_record_with_an_impossible_name_is_garbage_and_nothing_worse(node: str) -> None:
    """A single bad key must not keep anybody from reading the others."""
    bad = member("a", 5).record.to_bytes().replace(b'"node":"a"', f'"node":"{node}"'.encode())
    seen = loaded(item(KEYS.member("a"), bad, 5), item(KEYS.member("b"), member("b", 6).record, 6)).view()
    assert list(seen.members) == ["b"]
    assert KEYS.member("a") in seen.problems


@pytest.mark.parametrize("key", ["what", "generation/x", "members", "Target", ""])
def test_a_key_outside_the_layout_is_named_and_otherwise_ignored(key: str) -> None:
    seen = loaded(item(KEYS.prefix + key, used(1), 5), item(KEYS.budget, used(2), 6)).view()
    assert "not a key of this job's layout" in seen.problems[KEYS.prefix + key]
    assert (budget_of(seen), seen.damaged) == (2, {})


def test_a_deeper_key_under_the_members_is_garbage() -> None:
    seen = loaded(item(KEYS.members + "a/b", member("a", 5).record, 5)).view()
    assert dict(seen.members) == {}
    assert seen.problems


def test_garbage_in_the_ring_of_events_hides_only_itself() -> None:
    good = EventRecord(scope=KEYS.scope, number=1, at=0, what="formed")
    seen = loaded(item(KEYS.event(1, "formed"), good, 5), item(KEYS.event(2, "formed"), GARBAGE, 6)).view()
    assert seen.events == (good,)
