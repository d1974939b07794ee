"""What each step compares: a step decided on an old view must fail, and one decided on the newest must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elasticd.kv.types import Put
from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, End, Memory, Propose, plan
from elasticd.rendezvous.records import TEXT_MAX, BudgetRecord, CheckpointRecord, GenerationState, Record
from elasticd.rendezvous.transitions import Txn
from elasticd.rendezvous.view import Ledger, View
from tests.rendezvous.pretend import PretendStore
from tests.rendezvous.world import KEYS, NOW, TIMING, generation, member, mid, proposal, target

pytestmark = pytest.mark.timeout(10)
ME = mid("a")
GARBAGE = b"\x00garbage"


def checkpoint(step: int, number: int = 1) -> CheckpointRecord:
    return CheckpointRecord(scope=KEYS.scope, generation=number, step=step, digest="d")


def budget(used: int) -> BudgetRecord:
    return BudgetRecord(scope=KEYS.scope, used=used)


class Store(PretendStore):
    """Holds a job: {a, b} train generation 1, and have stopped for the pending generation 2 with c."""

    def __init__(self) -> None:
        super().__init__()
        for key, record in (
            (KEYS.target, target().record),
            (KEYS.generation, generation(1, "ab").record),
            (KEYS.proposal, proposal(2, "abc").record),
            (KEYS.checkpoint, checkpoint(5)),
            *((KEYS.member(name), member(name, 1, stopped=1).record) for name in "abc"),
        ):
            self.put(key, record.to_bytes())

    def write(self, key: str, record: Record) -> None:
        self.put(key, record.to_bytes())

    def view(self) -> View:
        ledger = Ledger(KEYS)
        ledger.load(self.listing())
        return ledger.view()


def activation(store: Store) -> Txn:
    seen = store.view()
    decision = plan(seen, NOW, Memory(), TIMING)
    assert isinstance(decision, Activate), decision
    return transitions.activate(KEYS, seen, decision, ME, frozen_max=600.0, at=0.0)


def proposing(store: Store) -> Txn:
    seen = store.view()
    decision = plan(seen, NOW, Memory(), TIMING)
    assert isinstance(decision, Propose), decision
    return transitions.propose(KEYS, seen, decision, ME)


Change = Callable[[Store], None]
CHANGES: dict[str, Change] = {
    "a member came": lambda store: store.write(KEYS.member("d"), member("d", 9).record),
    "a member changed its mind": lambda store: store.write(KEYS.member("c"), member("c", 1, stopped=1, leaving=True).record),
    "a member finished while cut off": lambda store: store.write(KEYS.member("b"), member("b", 1, finished=1).record),
    "its own key went": lambda store: store.remove(KEYS.member("a")),
    "its own key is another agent's": lambda store: store.write(KEYS.member("a"), member("a", 1, life=2).record),
    "the proposal was replaced": lambda store: store.write(KEYS.proposal, proposal(3, "ab").record),
    "the proposal went": lambda store: store.remove(KEYS.proposal),
    "another generation is active": lambda store: store.write(KEYS.generation, generation(2, "ab").record),
    "the job ended": lambda store: store.write(KEYS.generation, generation(1, "ab", state=GenerationState.STOPPED).record),
    "a checkpoint was committed": lambda store: store.write(KEYS.checkpoint, checkpoint(6)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_generation_is_not_activated_on_a_view_from_before(change: Change) -> None:
    store = Store()
    txn = activation(store)
    change(store)
    assert not store.txn(txn)


def test_a_generation_is_activated_once() -> None:
    """Two coordinators decide the same."""
    store = Store()
    first, second = activation(store), activation(store)
    assert store.txn(first)
    assert not store.txn(second)
    seen = store.view()
    assert seen.active
    assert seen.number == 2
    assert [event.what for event in seen.events] == ["formed"]


def test_a_proposal_is_written_once() -> None:
    store = Store()
    store.remove(KEYS.member("c"))
    first, second = proposing(store), proposing(store)
    assert store.txn(first)
    assert not store.txn(second)


@pytest.mark.parametrize("key", ["target", "proposal", "generation"])
def test_nothing_is_proposed_on_a_view_from_before(key: str) -> None:
    store = Store()
    store.remove(KEYS.member("c"))
    txn = proposing(store)
    name = KEYS.prefix + key
    store.put(name, store.items[name].value)
    assert not store.txn(txn)


def test_a_charge_is_not_written_over_a_budget_that_changed() -> None:
    """As when an operator has just refilled it."""
    store = Store()
    store.remove(KEYS.proposal)
    store.write(KEYS.budget, budget(4))
    store.write(KEYS.member("b"), member("b", 1, failed=1).record)
    store.write(KEYS.member("a"), member("a", 1).record)
    txn = proposing(store)
    store.write(KEYS.budget, budget(0))
    assert not store.txn(txn)
    assert store.txn(proposing(store))
    assert store.view().restarts_used == 1


@pytest.mark.parametrize("before", [None, budget(2)], ids=["never seen", "seen before"])
def test_garbage_in_the_budget_does_not_keep_a_failure_from_being_met(before: BudgetRecord | None) -> None:
    store = Store()
    store.remove(KEYS.proposal)
    store.write(KEYS.member("b"), member("b", 1, failed=1).record)
    store.write(KEYS.member("a"), member("a", 1).record)
    ledger = Ledger(KEYS)
    if before:
        store.write(KEYS.budget, before)
        ledger.load(store.listing())
    store.put(KEYS.budget, GARBAGE)
    ledger.load(store.listing())
    decision = plan(ledger.view(), NOW, Memory(), TIMING)
    assert isinstance(decision, Propose)
    assert store.txn(transitions.propose(KEYS, ledger.view(), decision, ME))
    assert store.view().restarts_used == (before.used if before else 0) + 1


def test_garbage_in_the_checkpoint_keeps_neither_a_generation_nor_a_commit_out() -> None:
    store = Store()
    store.put(KEYS.checkpoint, GARBAGE)
    commit = transitions.commit(KEYS, store.view(), checkpoint(7))
    assert store.txn(commit)
    store.put(KEYS.checkpoint, GARBAGE)
    assert store.txn(activation(store))


def test_a_key_is_created_and_never_taken_over() -> None:
    store = Store()
    assert not store.txn(transitions.register(KEYS, member("a", 1, life=2).record, 7))
    assert store.txn(transitions.register(KEYS, member("z", 1).record, 7))


def test_a_dead_agents_key_is_removed_only_while_it_is_as_it_was_seen() -> None:
    store = Store()
    seen = store.items[KEYS.member("b")].mod_revision
    store.write(KEYS.member("b"), member("b", 1, stopped=1).record)
    assert not store.txn(transitions.remove_member(KEYS, "b", seen))
    assert store.txn(transitions.remove_member(KEYS, "b", store.items[KEYS.member("b")].mod_revision))
    assert "b" not in store.view().members


@pytest.mark.parametrize("change", ["generation", "proposal", "the key itself"])
def test_a_key_is_taken_up_again_only_if_nothing_else_happened(change: str) -> None:
    store = Store()
    seen = store.view()
    store.remove(KEYS.member("b"))
    assert seen.generation
    txn = transitions.reattach(KEYS, member("b", 1).record, 7, seen.generation, seen.proposal)
    if change == "the key itself":
        store.write(KEYS.member("b"), member("b", 1, life=2).record)
    else:
        store.put(KEYS.prefix + change, store.items[KEYS.prefix + change].value)
    assert not store.txn(txn)


def test_a_job_is_closed_over_the_generation_it_was_decided_on() -> None:
    store = Store()
    seen = store.view()
    assert seen.generation
    txn = transitions.end(KEYS, seen, End(state=GenerationState.SUCCEEDED, reason="done", drained=True), at=0.0)
    other = Store()
    other.write(KEYS.generation, generation(2, "abc").record)
    assert not other.txn(txn)
    assert store.txn(txn)
    after = store.view().generation
    assert after
    ended = after.record
    assert (ended.state, ended.reason, ended.drained, ended.ids) == (GenerationState.SUCCEEDED, "done", True, seen.generation.record.ids)


def test_texts_too_long_for_a_record_are_cut_and_not_written_unreadable() -> None:
    """A rack of three hundred nodes joins; the reason for the end is a whole traceback."""
    store = Store()
    seen = store.view()
    assert seen.generation
    store.txn(transitions.end(KEYS, seen, End(state=GenerationState.FAILED, reason="x" * 5000), at=0.0))
    assert len(store.view().generation.record.reason) == TEXT_MAX  # type: ignore[union-attr]
    many = Store()
    record = proposal(2, "abc").record
    names = tuple(f"node-number-{number}" for number in range(300))
    many.write(KEYS.proposal, record.model_copy(update={"cause": record.cause.model_copy(update={"nodes": names})}))
    assert many.txn(activation(many))
    assert not many.view().problems


@pytest.mark.parametrize(
    ("step", "number", "why"), [(5, 1, "not newer"), (4, 1, "not newer"), (9, 2, "not the active one")], ids=["the same step", "an older step", "not active"]
)
def test_a_checkpoint_that_is_not_newer_in_the_active_generation_is_not_committed(step: int, number: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        transitions.commit(KEYS, Store().view(), checkpoint(step, number))


@pytest.mark.parametrize("key", ["generation", "checkpoint"])
def test_a_commit_is_fenced_by_generation_and_checkpoint(key: str) -> None:
    store = Store()
    txn = transitions.commit(KEYS, store.view(), checkpoint(6))
    name = KEYS.prefix + key
    store.put(name, store.items[name].value)
    assert not store.txn(txn)
    assert store.txn(transitions.commit(KEYS, store.view(), checkpoint(6)))


def test_a_pending_proposal_does_not_block_a_commit() -> None:
    store = Store()
    txn = transitions.commit(KEYS, store.view(), checkpoint(6))
    store.write(KEYS.proposal, proposal(3, "ab").record)
    assert store.txn(txn)


def test_a_thousand_members_are_activated_within_etcds_limit() -> None:
    """At most 128 comparisons and operations, whatever the size of the job."""
    store = PretendStore()
    names = [f"n{number}" for number in range(1000)]
    for name in names:
        store.put(KEYS.member(name), member(name, 1).record.to_bytes())
    store.put(KEYS.target, target(1, 1000).record.to_bytes())
    store.put(KEYS.proposal, proposal(1, [mid(name) for name in names]).record.to_bytes())
    ledger = Ledger(KEYS)
    ledger.load(store.listing())
    decision = plan(ledger.view(), NOW, Memory(), TIMING)
    assert isinstance(decision, Activate)
    txn = transitions.activate(KEYS, ledger.view(), decision, mid("n0"), frozen_max=600.0, at=0.0)
    assert len(txn.compares) + len(txn.ops) <= 10
    assert store.txn(txn)


def test_every_put_makes_its_own_comparison_fail() -> None:
    """So that a write whose answer was lost can be told from one that never happened (elasticd.kv.client)."""
    store = Store()
    for txn in (activation(store), transitions.commit(KEYS, store.view(), checkpoint(6)), transitions.register(KEYS, member("z", 1).record, 7)):
        compared = {compare.key for compare in txn.compares}
        assert compared & {op.key for op in txn.ops if isinstance(op, Put)}
