"""Going back from a divergence (PROTOCOL 30): what is asked, which states are void from then on, and what nothing is committed of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.kv.types import Put
from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, End, Memory, Propose, plan
from elasticd.rendezvous.records import (
    CauseKind,
    GenerationRecord,
    GenerationState,
    Mode,
    PolicyRecord,
    RequestKind,
    RequestRecord,
    ResumePoint,
    Void,
    parse,
)
from elasticd.rendezvous.resume import choose_resume
from elasticd.rendezvous.rollback import is_void, steps_left_out, voids
from elasticd.rendezvous.view import Keyed, View
from tests.rendezvous.world import KEYS, LONG_AGO, NOW, TIMING, committed, generation, member, mid, proposal, refs, target, view

pytestmark = pytest.mark.timeout(30)


def asked(kind: RequestKind, number: int, **more: Any) -> dict[RequestKind, RequestRecord]:
    return {kind: RequestRecord(scope=KEYS.scope, kind=kind, generation=number, reason="the loss is NaN", **more)}


def back(number: int, before: int, until: int = 99, *, skip: bool = False) -> dict[RequestKind, RequestRecord]:
    return asked(RequestKind.ROLLBACK, number, before=before, until=until, skip_data=skip)


def with_void(keyed: Keyed[GenerationRecord], *void: Void, resume: str = "") -> Keyed[GenerationRecord]:
    point = None
    if resume:
        (ref,) = refs(resume)
        point = ResumePoint(generation=ref.generation, step=ref.step, digest=ref.digest)
    return replace(keyed, record=keyed.record.model_copy(update={"void": void, "resume": point}))


def decide(seen: View) -> Any:
    return plan(seen, NOW, LONG_AGO, TIMING)


def stopped(node: str, age: int, held: str, number: int) -> Any:
    keyed = member(node, age, stopped=number)
    return replace(keyed, record=keyed.record.model_copy(update={"inventory": refs(held)}))


# --- which states are void ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "void"),
    [((3, 7), True), ((3, 8), True), ((3, 6), False), ((2, 7), True), ((2, 6), False), ((4, 7), False), ((4, 100), False), ((1, 0), False)],
)
def test_a_state_is_void_from_the_first_bad_step_on_in_that_generation_and_those_before(state: tuple[int, int], *, void: bool) -> None:
    assert is_void(state, (Void(generation=3, step=7, until=9),)) is void


def test_a_request_voids_what_its_generation_has_reached_and_what_was_void_stays_so() -> None:
    old = Void(generation=2, step=5, until=6)
    seen = view(member("a", 1), generation=with_void(generation(3, "a"), old), requests=back(3, 7, 12, skip=True))
    assert voids(seen) == (old, Void(generation=3, step=7, until=12, skip=True))
    assert voids(view(member("a", 1), generation=with_void(generation(3, "a"), old), requests=back(2, 7))) == (old,), "of an earlier generation it is over"
    assert voids(view(member("a", 1), requests=back(3, 7))) == ()


def test_what_is_void_is_forgotten_once_a_later_generation_has_committed() -> None:
    old = Void(generation=2, step=5, until=6)
    now = with_void(generation(4, "a"), old)
    assert voids(view(member("a", 1), generation=now, checkpoint=committed("2.9"))) == (old,)
    assert voids(view(member("a", 1), generation=now, checkpoint=committed("3.4"))) == ()


# --- what is begun with ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "checkpoint", "void", "expected"),
    [
        ({"a": "1.4 1.8 1.9", "b": "1.4 1.8 1.9"}, "", (1, 5), "1.4"),
        ({"a": "1.4 1.8", "b": "1.4"}, "1.8", (1, 5), "1.4"),
        ({"a": "1.2 1.4 1.8", "b": "1.2 1.4"}, "1.2", (1, 5), "1.4"),
        ({"a": "1.4", "b": "1.4"}, "1.8", (1, 5), "1.4"),
        ({"a": "1.3 2.3=1.3 2.9", "b": "2.9"}, "", (2, 5), "1.3"),
        ({"a": "1.9 2.9=1.9 2.12", "b": "1.4"}, "1.9", (2, 8), "1.4"),
        ({"a": "3.1 1.9", "b": "1.9"}, "", (1, 5), "3.1"),
    ],
    ids=[
        "the newest from before that",
        "older than the committed checkpoint, which is void",
        "not older than a committed checkpoint that is good",
        "the committed one is void though nobody says that he holds it",
        "what the generation began with, under any of its names",
        "a content that is void under one name is so under all",
        "a later generation's states are its own",
    ],
)
def test_nothing_void_is_begun_with(held: dict[str, str], checkpoint: str, void: tuple[int, int], expected: str) -> None:
    choice = choose_resume(
        {mid(node): refs(text) for node, text in held.items()},
        {mid(node) for node in held},
        committed(checkpoint, "ab").record if checkpoint else None,
        void=(Void(generation=void[0], step=void[1], until=20),),
        began_empty=False,
    )
    assert choice.resume is not None
    assert choice.resume.digest == expected


def test_where_nobody_holds_anything_good_an_operator_is_waited_for_unless_the_job_had_just_begun() -> None:
    held, void = {mid("a"): refs("1.8")}, (Void(generation=1, step=5, until=9),)
    waits = choose_resume(held, {mid("a")}, None, void=void, began_empty=False)
    assert waits.resume is None
    assert "from before the divergence" in waits.awaiting
    begins = choose_resume(held, {mid("a")}, None, void=void, began_empty=True)
    assert (begins.resume, begins.awaiting) == (None, "")


# --- how the job goes back -------------------------------------------------------------------------------------------------


def test_a_rollback_kills_the_workers_and_the_next_generation_begins_before_it() -> None:
    held = with_void(generation(3, "ab"), resume="2.1")
    seen = view(member("a", 1), member("b", 2), generation=held, target=target(1, 2), requests=back(3, 7, 12))
    decision = decide(seen)
    assert isinstance(decision, Propose)
    assert (decision.mode, decision.cause.kind, decision.cause.detail, decision.charge) == (Mode.KILL, CauseKind.ROLLBACK, "the loss is NaN", 0)
    later = replace(
        seen,
        members={"a": stopped("a", 1, "2.6 3.6 3.9", 3), "b": stopped("b", 2, "3.6 3.9", 3)},
        proposal=proposal(4, "ab", mode=Mode.KILL, kind=CauseKind.ROLLBACK),
    )
    activated = decide(later)
    assert isinstance(activated, Activate)
    assert activated.void == (Void(generation=3, step=7, until=12),)
    assert activated.resume is not None
    assert activated.resume.digest == "3.6"
    txn = transitions.activate(KEYS, later, activated, mid("a"), frozen_max=600.0, at=1.0)
    (value,) = [op.value for op in txn.ops if isinstance(op, Put) and op.key == KEYS.generation]
    assert parse(GenerationRecord, KEYS.generation, value, KEYS.scope).void == activated.void


def test_a_failure_that_comes_first_takes_the_rollback_with_it() -> None:
    """The worker that dies of the NaN, or a node that is lost meanwhile, leads to the next generation: that must not begin with the bad state."""
    held = with_void(generation(3, "ab"), resume="2.1")
    seen = view(
        stopped("a", 1, "3.6 3.9", 3),
        stopped("b", 2, "3.6 3.9", 3),
        generation=held,
        target=target(1, 2),
        requests=back(3, 7),
        proposal=proposal(4, "ab", mode=Mode.KILL, kind=CauseKind.LOSS),
    )
    activated = decide(seen)
    assert isinstance(activated, Activate)
    assert activated.resume is not None
    assert activated.resume.digest == "3.6"


def test_a_rollback_of_an_earlier_generation_is_void() -> None:
    seen = view(member("a", 1), generation=generation(4, "a"), target=target(1, 1), requests=back(3, 7))
    assert not isinstance(decide(seen), Propose)


def test_a_restart_at_once_kills_and_another_asks() -> None:
    for at_once, mode in ((True, Mode.KILL), (False, Mode.AGREED_STOP)):
        seen = view(member("a", 1), generation=generation(3, "a"), target=target(1, 1), requests=asked(RequestKind.RESTART, 3, at_once=at_once))
        decision = decide(seen)
        assert isinstance(decision, Propose)
        assert (decision.mode, decision.cause.kind) == (mode, CauseKind.RESTART)


def test_a_job_that_is_to_fail_ends_with_its_code() -> None:
    seen = view(member("a", 1), generation=generation(3, "a"), target=target(1, 1), requests=asked(RequestKind.FAIL, 3, code=11))
    decision = decide(seen)
    assert decision == End(state=GenerationState.FAILED, reason="the loss is NaN", drained=False, code=11)
    txn = transitions.end(KEYS, seen, decision, at=1.0)
    (value,) = [op.value for op in txn.ops if isinstance(op, Put) and op.key == KEYS.generation]
    assert parse(GenerationRecord, KEYS.generation, value, KEYS.scope).code == 11


# --- what is not committed -------------------------------------------------------------------------------------------------


def hold(number: int | None) -> Keyed[PolicyRecord]:
    return Keyed(PolicyRecord(scope=KEYS.scope, ledger={}, hold=number), 9, 90)


def test_nothing_of_a_generation_that_is_held_is_committed() -> None:
    record = committed("3.9", "a").record
    with pytest.raises(ValueError, match="may be bad"):
        transitions.commit(KEYS, view(generation=generation(3, "a"), policy=hold(3)), record)
    for other in (None, 2):
        txn = transitions.commit(KEYS, view(generation=generation(3, "a"), policy=hold(other)), record)
        assert any(one.key == KEYS.policy and one.value == 90 for one in txn.compares), "a hold that comes meanwhile refuses it"


def test_nothing_void_is_committed_even_before_the_next_generation_has_formed() -> None:
    seen = view(generation=generation(3, "a"), requests=back(3, 7))
    with pytest.raises(ValueError, match="may be bad"):
        transitions.commit(KEYS, seen, committed("3.7", "a").record)
    assert transitions.commit(KEYS, seen, committed("3.6", "a").record)


# --- data ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resume", "void", "steps"),
    [
        ("3.6", [(3, 7, 12, True)], 6),
        ("3.6", [(3, 7, 12, False)], 0),
        ("", [(3, 7, 12, True)], 12),
        ("4.6", [(3, 7, 12, True)], 0),
        ("2.5", [(3, 7, 12, True), (4, 9, 10, True)], 12),
        ("4.8", [(3, 7, 12, True), (4, 9, 10, True)], 2),
    ],
    ids=["what led there", "kept by choice", "from the very beginning", "a later state has left them out already", "both stretches", "the last one"],
)
def test_the_data_that_led_to_a_divergence_are_left_out(resume: str, void: list[tuple[int, int, int, bool]], steps: int) -> None:
    record = with_void(generation(5, "a"), *(Void(generation=g, step=s, until=u, skip=k) for g, s, u, k in void), resume=resume).record
    assert steps_left_out(record) == steps


def test_memory_of_a_coordinator_is_not_needed_for_it() -> None:
    """Another coordinator decides the same from the record alone."""
    seen = view(member("a", 1), generation=generation(3, "a"), target=target(1, 1), requests=back(3, 7))
    assert plan(seen, NOW, Memory(), TIMING) == decide(seen)
