"""What a coordinator decides and what a member does, case by case; each test is a sentence of the protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.rendezvous.membership import (
    Activate,
    Decision,
    End,
    Leave,
    Local,
    Memory,
    Propose,
    Report,
    Start,
    Stay,
    Stop,
    Wait,
    candidates,
    choose,
    fate,
    not_ready_marks,
    observe,
    orphan_hold,
    plan,
    react,
    reported_result,
    without_unreachable,
)
from elasticd.rendezvous.records import CauseKind, GenerationState, Mode, RequestKind, RequestRecord, Result
from elasticd.rendezvous.view import View
from tests.rendezvous.world import KEYS, LONG_AGO, NOW, TIMING, generation, member, mid, nodes, proposal, target, view

pytestmark = pytest.mark.timeout(10)
JUST_CHANGED = Memory(changed_at=NOW, restless_since=NOW)
JUST_SEEN = Memory(proposal_seen_at=NOW)


def decide(seen: View, memory: Memory = LONG_AGO, now: float = NOW) -> Decision:
    return plan(seen, now, memory, TIMING)


def proposed(seen: View, memory: Memory = LONG_AGO, now: float = NOW) -> Propose:
    decision = decide(seen, memory, now)
    assert isinstance(decision, Propose), decision
    return decision


def waits(seen: View, memory: Memory = LONG_AGO, now: float = NOW) -> Wait:
    decision = decide(seen, memory, now)
    assert isinstance(decision, Wait), decision
    return decision


# --- forming -------------------------------------------------------------------------------------------------------------


def test_forms_at_once_when_the_desired_nodes_are_here() -> None:
    decision = proposed(view(member("a", 10), member("b", 11), target=target(1, 2)), JUST_CHANGED)
    assert (decision.number, decision.mode, decision.cause.kind) == (1, Mode.AGREED_STOP, CauseKind.FORM)
    assert nodes(decision.members) == ["a", "b"]
    assert decision.charge == 0


def test_with_fewer_than_desired_it_forms_only_after_the_settle_time() -> None:
    seen = view(member("a", 10), member("b", 11), target=target(1, 3))
    assert waits(seen, JUST_CHANGED).until == NOW + TIMING.settle
    assert nodes(proposed(seen, JUST_CHANGED, NOW + TIMING.settle).members) == ["a", "b"]


def test_restlessness_cannot_put_forming_off_for_ever() -> None:
    restless = Memory(changed_at=NOW, restless_since=NOW - TIMING.settle_cap)
    assert nodes(proposed(view(member("a", 10), target=target(1, 3)), restless).members) == ["a"]


def test_below_the_minimum_it_waits_without_a_deadline() -> None:
    decision = waits(view(member("a", 10), target=target(2, 3)))
    assert decision.until is None
    assert "1 of at least 2" in decision.why


def test_nodes_above_the_limit_stand_by() -> None:
    crowd = [member(name, age) for age, name in enumerate("abcde", start=10)]
    assert nodes(proposed(view(*crowd, target=target(1, 5, 3))).members) == ["a", "b", "c"]
    assert nodes(proposed(view(*crowd, target=target(1, 2, 4))).members) == ["a", "b"]


def test_without_a_target_nothing_is_proposed() -> None:
    assert isinstance(decide(view(member("a", 10), target=None)), Wait)


def test_a_leaver_is_not_in_the_first_generation() -> None:
    assert nodes(proposed(view(member("a", 10, leaving=True), member("b", 11))).members) == ["b"]


def test_a_pending_first_proposal_is_activated_when_everybody_is_ready() -> None:
    decision = decide(view(member("a", 10), member("b", 11), proposal=proposal(1, "ab", kind=CauseKind.FORM)))
    assert isinstance(decision, Activate)
    assert [one.id for one in decision.members] == [mid("a"), mid("b")]
    assert decision.restarts == 0


# --- joining -------------------------------------------------------------------------------------------------------------


def restart(number: int, reason: str = "") -> dict[RequestKind, RequestRecord]:
    return {RequestKind.RESTART: RequestRecord(scope=KEYS.scope, kind=RequestKind.RESTART, generation=number, reason=reason)}


def test_a_newcomer_is_admitted_by_an_agreed_stop_after_the_settle_time() -> None:
    seen = view(member("a", 10), member("b", 11), generation=generation(1, "a"))
    assert waits(seen, JUST_CHANGED).until == NOW + TIMING.settle
    decision = proposed(seen, JUST_CHANGED, NOW + TIMING.settle)
    assert (decision.number, decision.mode, decision.cause.kind, decision.cause.nodes) == (2, Mode.AGREED_STOP, CauseKind.JOIN, ("b",))
    assert nodes(decision.members) == ["a", "b"]


def test_several_newcomers_join_in_one_batch() -> None:
    seen = view(member("a", 10), member("c", 12), member("b", 11), generation=generation(1, "a"), target=target(1, 4))
    assert nodes(proposed(seen).members) == ["a", "b", "c"]


def test_a_newcomer_that_fills_the_job_joins_at_once() -> None:
    seen = view(member("a", 10), member("b", 11), generation=generation(1, "a"), target=target(1, 2))
    assert isinstance(decide(seen, JUST_CHANGED), Propose)


def test_a_newcomer_above_the_limit_stands_by_while_the_others_train() -> None:
    seen = view(member("a", 10), member("b", 11), member("c", 12), generation=generation(1, "ab"), target=target(1, 2))
    assert waits(seen).until is None


def test_while_paused_nobody_joins_and_nothing_is_scaled() -> None:
    paused = target(1, 3, paused=True)
    newcomer = view(member("a", 10), member("b", 11), generation=generation(1, "a"), target=paused)
    assert waits(newcomer).why == "training, paused: nobody joins and nothing is scaled"
    surplus = view(member("a", 10), member("b", 11), generation=generation(1, "ab"), target=target(1, 3, 1, paused=True))
    assert waits(surplus).until is None


def test_while_paused_recovery_leaving_and_an_operators_restart_go_on() -> None:
    paused = target(1, 3, paused=True)
    lost = proposed(view(member("a", 10), generation=generation(1, "ab"), target=paused))
    assert (lost.mode, lost.cause.kind) == (Mode.KILL, CauseKind.LOSS)
    leaver = proposed(view(member("a", 10), member("b", 11, leaving=True), generation=generation(1, "ab"), target=paused))
    assert leaver.cause.kind is CauseKind.LEAVE
    first = proposed(view(member("a", 10), target=paused))
    assert first.cause.kind is CauseKind.FORM
    asked = proposed(view(member("a", 10), generation=generation(1, "a"), target=paused, requests=restart(1)))
    assert asked.cause.kind is CauseKind.RESTART


def test_a_restart_that_is_asked_for_is_an_agreed_stop_that_costs_no_budget() -> None:
    seen = view(member("a", 10), member("b", 11), generation=generation(4, "ab"), requests=restart(4, "slow link"))
    decision = proposed(seen)
    assert (decision.number, decision.mode, decision.charge) == (5, Mode.AGREED_STOP, 0)
    assert str(decision.cause) == "restart (slow link)"
    assert nodes(decision.members) == ["a", "b"]


def test_what_was_asked_of_an_earlier_generation_is_void() -> None:
    seen = view(member("a", 10), member("b", 11), generation=generation(5, "ab"), target=target(1, 2), requests=restart(4))
    assert waits(seen).why == "training"


def test_joins_wait_while_a_proposal_is_pending() -> None:
    seen = view(member("a", 10, stopped=1), member("b", 11), member("c", 12), generation=generation(1, "a"), proposal=proposal(2, "ab"))
    assert waits(replace(seen, members={**seen.members, "b": member("b", 11)}), JUST_SEEN).why == "waiting for b to stop"
    decision = decide(replace(seen, members={**seen.members, "b": member("b", 11, stopped=1)}), JUST_SEEN)
    assert isinstance(decision, Activate)
    assert [one.id.node for one in decision.members] == ["a", "b"]


def test_a_lower_desired_size_scales_down_by_an_agreed_stop_dropping_the_last_ranks() -> None:
    seen = view(member("c", 10), member("a", 11), member("b", 12), generation=generation(3, "abc"), target=target(1, 3, 2))
    decision = proposed(seen)
    assert (decision.mode, decision.cause.kind, decision.cause.nodes) == (Mode.AGREED_STOP, CauseKind.SCALE, ("c",))
    assert nodes(decision.members) == ["a", "b"]


# --- losing --------------------------------------------------------------------------------------------------------------


def test_a_loss_forms_at_once_with_the_survivors() -> None:
    seen = view(member("a", 10), member("c", 12), generation=generation(4, "abc"))
    decision = proposed(seen, JUST_CHANGED)
    assert (decision.number, decision.mode, decision.cause.kind, decision.cause.nodes) == (5, Mode.KILL, CauseKind.LOSS, ("b",))
    assert nodes(decision.members) == ["a", "c"]
    assert decision.charge == 0


def test_a_loss_takes_in_whoever_stands_by() -> None:
    seen = view(member("a", 10), member("d", 13), generation=generation(4, "ab"), target=target(1, 2))
    assert nodes(proposed(seen, JUST_CHANGED).members) == ["a", "d"]


def test_a_restarted_agent_is_a_loss_and_a_newcomer() -> None:
    seen = view(member("a", 10), member("b", 20, life=2), generation=generation(1, "ba"))
    decision = proposed(seen)
    assert decision.cause.nodes == ("b",)
    assert decision.members == (mid("a"), mid("b", 2))


def test_a_loss_below_the_minimum_stops_the_rest_and_waits() -> None:
    seen = view(member("a", 10), generation=generation(1, "ab"), target=target(2, 3))
    decision = proposed(seen)
    assert nodes(decision.members) == ["a"]
    pending = replace(seen, members={"a": member("a", 10, stopped=1)}, proposal=proposal(2, "a", mode=Mode.KILL, kind=CauseKind.LOSS))
    assert waits(pending).until is None


def test_below_the_minimum_it_forms_at_once_when_somebody_comes() -> None:
    pending = proposal(2, "a", mode=Mode.KILL, kind=CauseKind.LOSS)
    seen = view(member("a", 10, stopped=1), member("c", 12, stopped=1), generation=generation(1, "ab"), proposal=pending, target=target(2, 3))
    decision = proposed(seen, replace(JUST_CHANGED, proposal_seen_at=NOW))
    assert (decision.number, nodes(decision.members), decision.mode) == (3, ["a", "c"], Mode.KILL)


def test_a_loss_that_comes_after_others_finished_restarts_all() -> None:
    seen = view(member("a", 10, finished=1), member("b", 11), generation=generation(1, "abc"))
    decision = proposed(seen)
    assert (decision.mode, nodes(decision.members)) == (Mode.KILL, ["a", "b"])


def test_no_loss_is_believed_in_the_blind_time_after_an_outage() -> None:
    blind = Memory(no_loss_before=NOW + 3)
    lost = view(member("a", 10), generation=generation(1, "ab"))
    assert waits(lost, blind).until == NOW + 3
    assert proposed(lost, blind, NOW + 3).cause.kind is CauseKind.LOSS
    vanished = view(member("a", 10, stopped=1), generation=generation(1, "ab"), proposal=proposal(2, "ab"))
    assert waits(vanished, blind).until == NOW + 3
    newcomer = view(member("a", 10, stopped=1), generation=generation(1, "a"), proposal=proposal(2, "ac"))
    assert waits(newcomer, blind).until == NOW + 3


def test_the_blind_time_does_not_hide_a_failure() -> None:
    seen = view(member("a", 10, failed=1), member("b", 11), generation=generation(1, "ab"))
    assert proposed(seen, Memory(no_loss_before=NOW + 3)).cause.kind is CauseKind.WORKER_FAILED


# --- workers that fail ---------------------------------------------------------------------------------------------------


def test_a_failed_worker_restarts_all_and_is_charged() -> None:
    seen = view(member("a", 10), member("b", 11, failed=1, detail="rank 1: KeyError"), generation=generation(1, "ab"), used=3)
    decision = proposed(seen)
    assert (decision.mode, decision.cause.kind, decision.cause.nodes) == (Mode.KILL, CauseKind.WORKER_FAILED, ("b",))
    assert decision.cause.detail == "rank 1: KeyError"
    assert (decision.charge, decision.counted) == (1, True)
    assert nodes(decision.members) == ["a", "b"]


def test_the_first_to_fail_is_named_and_only_one_restart_is_charged() -> None:
    seen = view(member("a", 10, failed=1, detail="echo", mod=31), member("b", 11, failed=1, detail="cause", mod=30), generation=generation(1, "ab"))
    decision = proposed(seen)
    assert (decision.cause.nodes, decision.cause.detail, decision.charge) == (("b",), "cause", 1)


def test_a_used_up_budget_ends_the_job_as_failed_and_says_why() -> None:
    seen = view(member("a", 10, failed=7, detail="rank 0: boom"), generation=generation(7, "a"), target=target(budget=2), used=2)
    decision = decide(seen)
    assert isinstance(decision, End)
    assert (decision.state, decision.drained) == (GenerationState.FAILED, True)
    assert "2 of 2" in decision.reason
    assert "rank 0: boom" in decision.reason


def test_the_echo_of_a_node_loss_does_not_end_a_job_whose_budget_is_used_up() -> None:
    """b's node died; a's worker notices first, and its agent reports the failure before b's death is known."""
    running = view(member("a", 10), member("b", 11), generation=generation(1, "ab"), target=target(budget=0))
    echo = view(member("a", 10, failed=1), member("b", 11), generation=generation(1, "ab"), target=target(budget=0))
    memory = observe(Memory(), running, echo, NOW, TIMING)
    assert waits(echo, memory).until == NOW + TIMING.ttl
    lost = view(member("a", 10, failed=1), generation=generation(1, "ab"), target=target(budget=0))
    assert (proposed(lost, observe(memory, echo, lost, NOW + 0.5, TIMING), NOW + 0.5).charge) == 0
    ending = decide(echo, memory, NOW + TIMING.ttl)
    assert isinstance(ending, End)
    assert (ending.state, ending.drained) == (GenerationState.FAILED, False)


def test_a_failure_of_an_earlier_generation_is_history() -> None:
    seen = view(member("a", 10, failed=1), member("b", 11), generation=generation(2, "ab"), target=target(1, 2))
    assert waits(seen).why == "training"


def test_a_failure_that_was_the_echo_of_a_node_loss_is_refunded() -> None:
    charged = proposal(2, "ab", mode=Mode.KILL, kind=CauseKind.WORKER_FAILED, counted=True)
    decision = proposed(view(member("a", 10, failed=1), generation=generation(1, "ab"), proposal=charged, used=1))
    assert (decision.charge, decision.counted, decision.cause.kind, decision.cause.nodes) == (-1, False, CauseKind.LOSS, ("b",))
    assert nodes(decision.members) == ["a"]


def test_a_loss_is_refunded_once() -> None:
    refunded = proposal(3, "abc", mode=Mode.KILL, kind=CauseKind.LOSS, counted=False)
    decision = proposed(view(member("a", 10, failed=1), generation=generation(1, "abc"), proposal=refunded, used=1))
    assert decision.charge == 0


def test_a_newcomers_death_keeps_the_charge() -> None:
    charged = proposal(2, "abn", mode=Mode.KILL, kind=CauseKind.WORKER_FAILED, counted=True)
    decision = proposed(view(member("a", 10, failed=1), member("b", 11), generation=generation(1, "ab"), proposal=charged, used=1))
    assert (decision.charge, decision.counted, decision.cause.kind) == (0, True, CauseKind.WORKER_FAILED)


def test_a_member_that_stopped_without_a_word_is_a_reason_to_propose() -> None:
    decision = proposed(view(member("a", 10, stopped=1), member("b", 11), generation=generation(1, "ab")))
    assert (decision.mode, decision.cause.kind, decision.cause.nodes, decision.charge) == (Mode.KILL, CauseKind.WORKER_STOPPED, ("a",), 0)


def test_a_loss_goes_before_a_failure_and_is_not_charged() -> None:
    decision = proposed(view(member("a", 10, failed=1), generation=generation(1, "ab")))
    assert (decision.cause.kind, decision.charge) == (CauseKind.LOSS, 0)


# --- agreed stop or kill -------------------------------------------------------------------------------------------------


def test_a_leaver_is_left_out_by_an_agreed_stop() -> None:
    decision = proposed(view(member("a", 10, leaving=True), member("b", 11), generation=generation(1, "ab")), JUST_CHANGED)
    assert (decision.mode, decision.cause.kind, decision.cause.nodes, nodes(decision.members)) == (Mode.AGREED_STOP, CauseKind.LEAVE, ("a",), ["b"])


def test_a_leaver_in_a_pending_proposal_leaves_it_an_agreed_stop() -> None:
    seen = view(member("a", 10, leaving=True), member("b", 11), member("c", 12), generation=generation(1, "ab"), proposal=proposal(2, "abc"))
    decision = proposed(seen)
    assert (decision.number, decision.mode, nodes(decision.members)) == (3, Mode.AGREED_STOP, ["b", "c"])


def test_a_newcomers_death_leaves_it_an_agreed_stop() -> None:
    decision = proposed(view(member("a", 10), member("b", 11), generation=generation(1, "ab"), proposal=proposal(2, "abc")))
    assert (decision.number, decision.mode, nodes(decision.members)) == (3, Mode.AGREED_STOP, ["a", "b"])


def test_a_vanished_old_member_turns_an_agreed_stop_into_a_kill() -> None:
    decision = proposed(view(member("a", 10), member("c", 12), generation=generation(1, "ab"), proposal=proposal(2, "abc")))
    assert (decision.number, decision.mode, decision.cause.kind, nodes(decision.members)) == (3, Mode.KILL, CauseKind.LOSS, ["a", "c"])


def test_a_vanished_old_member_does_so_though_it_was_not_proposed() -> None:
    seen = view(member("b", 11), generation=generation(1, "ab"), proposal=proposal(2, "b", kind=CauseKind.LEAVE))
    assert proposed(seen).mode is Mode.KILL


def test_an_old_member_that_fails_turns_an_agreed_stop_into_a_kill() -> None:
    decision = proposed(view(member("a", 10, failed=1), member("b", 11), generation=generation(1, "ab"), proposal=proposal(2, "ab")))
    assert decision.mode is Mode.KILL


def test_a_passed_drain_deadline_becomes_a_kill() -> None:
    seen = view(member("a", 10, stopped=1), member("b", 11), generation=generation(1, "ab"), proposal=proposal(2, "ab"))
    assert waits(seen, JUST_SEEN).until == NOW + TIMING.drain_timeout
    decision = proposed(seen, JUST_SEEN, NOW + TIMING.drain_timeout)
    assert (decision.number, decision.mode, nodes(decision.members), decision.not_ready) == (3, Mode.KILL, ["a", "b"], {})


def test_a_kill_stays_a_kill() -> None:
    kill = proposal(2, "bc", mode=Mode.KILL, kind=CauseKind.LOSS)
    assert proposed(view(member("b", 11), generation=generation(1, "ab"), proposal=kill)).mode is Mode.KILL


def test_a_second_loss_does_not_replace_a_proposal_that_does_not_need_it() -> None:
    kill = proposal(2, "a", mode=Mode.KILL, kind=CauseKind.LOSS)
    assert waits(view(member("a", 10), generation=generation(1, "abc"), proposal=kill), JUST_SEEN).why == "waiting for a to stop"


# --- activating ----------------------------------------------------------------------------------------------------------


def test_activation_waits_for_every_old_member_still_here_though_it_is_not_proposed() -> None:
    seen = view(member("a", 10, leaving=True), member("b", 11, stopped=1), generation=generation(1, "ab"), proposal=proposal(2, "b", kind=CauseKind.LEAVE))
    assert waits(seen, JUST_SEEN).why == "waiting for a to stop"
    ready = replace(seen, members={**seen.members, "a": member("a", 10, stopped=1, leaving=True)})
    assert isinstance(decide(ready, JUST_SEEN), Activate)


def test_activation_waits_for_every_proposed_member_though_it_is_new() -> None:
    seen = view(member("a", 10, stopped=3), member("c", 12, stopped=2), generation=generation(3, "a"), proposal=proposal(4, "ac"))
    assert waits(seen, JUST_SEEN).why == "waiting for c to stop"


def test_whoever_stands_by_is_not_waited_for() -> None:
    seen = view(member("a", 10, stopped=3), member("z", 12), generation=generation(3, "a"), proposal=proposal(4, "a", kind=CauseKind.WORKER_STOPPED))
    assert isinstance(decide(seen, JUST_SEEN), Activate)


def test_the_generation_carries_ranks_the_first_members_store_and_one_restart_more() -> None:
    old = generation(3, "ba", restarts=5)
    seen = view(member("b", 11, stopped=3, port=5000, slots=2), member("a", 10, stopped=3), generation=old, proposal=proposal(9, "ba", kind=CauseKind.LOSS))
    decision = decide(seen)
    assert isinstance(decision, Activate)
    assert [(one.id.node, one.slots, one.address, one.probe_port) for one in decision.members] == [("b", 2, "host-b", 5001), ("a", 1, "host-a", 4001)]
    assert (decision.store.address, decision.store.port, decision.restarts) == ("host-b", 5000, 6)


def test_a_fresh_proposal_is_above_everything_seen() -> None:
    used_up = view(member("a", 10), generation=generation(4, "ab"), proposal=proposal(9, "abn", mode=Mode.KILL, kind=CauseKind.LOSS))
    assert proposed(used_up).number == 10


# --- rank order ----------------------------------------------------------------------------------------------------------


def test_survivors_keep_their_relative_order_and_newcomers_follow_by_age() -> None:
    seen = view(member("d", 5), member("e", 4), member("a", 30), member("c", 20), generation=generation(1, "cba"), target=target(1, 9))
    assert nodes(keyed.record.id for keyed in candidates(seen, {})) == ["c", "a", "e", "d"]
    assert nodes(choose(seen, seen.target.record, {})) == ["c", "a", "e", "d"] if seen.target else False


# --- not ready -----------------------------------------------------------------------------------------------------------


def test_a_member_that_does_not_report_in_time_is_marked_and_left_out() -> None:
    kill = proposal(2, "ab", mode=Mode.KILL, kind=CauseKind.LOSS)
    seen = view(member("a", 10, stopped=1), member("b", 11, mod=77), generation=generation(1, "abc"), proposal=kill)
    assert waits(seen, JUST_SEEN).until == NOW + TIMING.ready_timeout
    decision = proposed(seen, JUST_SEEN, NOW + TIMING.ready_timeout)
    assert (decision.number, nodes(decision.members), dict(decision.not_ready)) == (3, ["a"], {mid("b").incarnation: 77})


def test_a_marked_member_is_neither_chosen_nor_waited_for() -> None:
    marks = {mid("b").incarnation: 77}
    kill = proposal(3, "a", mode=Mode.KILL, kind=CauseKind.LOSS, not_ready=marks)
    seen = view(member("a", 10, stopped=1), member("b", 11, mod=77), generation=generation(1, "abc"), proposal=kill)
    assert not_ready_marks(seen) == marks
    assert isinstance(decide(seen, JUST_SEEN), Activate)


def test_a_mark_outlives_activation_and_ends_when_the_members_key_changes() -> None:
    active = generation(3, "a", not_ready={mid("b").incarnation: 77})
    still = view(member("a", 10), member("b", 11, mod=77), generation=active)
    assert waits(still).why == "training"
    back = view(member("a", 10), member("b", 11, stopped=1, mod=78), generation=active)
    assert not_ready_marks(back) == {}
    assert nodes(proposed(back).members) == ["a", "b"]


def test_marks_of_members_that_are_gone_are_dropped() -> None:
    assert not_ready_marks(view(member("a", 10), generation=generation(3, "a", not_ready={mid("b").incarnation: 77}))) == {}


# --- finishing and ending ------------------------------------------------------------------------------------------------


def test_nothing_planned_is_proposed_once_anybody_has_finished() -> None:
    finished, running = member("a", 10, finished=1), member("b", 11)
    assert waits(view(finished, running, member("c", 12), generation=generation(1, "ab"))).why == "1 of 2 nodes have finished"
    assert isinstance(decide(view(finished, member("b", 11, leaving=True), generation=generation(1, "ab"))), Wait)
    assert isinstance(decide(view(finished, running, generation=generation(1, "ab"), target=target(1, 3, 1))), Wait)


def test_a_finish_is_no_reason_to_restart_but_a_failure_after_it_is() -> None:
    seen = view(member("a", 10, finished=1), member("b", 11, failed=1), generation=generation(1, "ab"))
    decision = proposed(seen)
    assert (decision.cause.kind, nodes(decision.members)) == (CauseKind.WORKER_FAILED, ["a", "b"])


def test_when_all_have_finished_the_job_has_succeeded() -> None:
    done = view(member("a", 10, finished=1), member("b", 11, finished=1), generation=generation(1, "ab"))
    decision = decide(done)
    assert isinstance(decision, End)
    assert decision.state is GenerationState.SUCCEEDED


@pytest.mark.parametrize("keys", [{"proposal": proposal(2, "abc")}, {"target": target(run=False)}], ids=["a join is pending", "an operator stops it"])
def test_success_goes_before(keys: dict[str, object]) -> None:
    done = view(member("a", 10, finished=1), member("b", 11, finished=1), member("c", 12, stopped=1), generation=generation(1, "ab"), **keys)
    decision = decide(done)
    assert isinstance(decision, End)
    assert decision.state is GenerationState.SUCCEEDED


@pytest.mark.parametrize("state", [GenerationState.SUCCEEDED, GenerationState.STOPPED])
def test_an_ended_job_proposes_nothing(state: GenerationState) -> None:
    ended = view(member("a", 10), member("b", 11), generation=generation(4, "a", state=state, mod=500), target=target(mod=499))
    assert waits(ended).why == "the job has ended"


def test_an_operators_write_reopens_it_with_a_higher_number() -> None:
    reopened = view(member("a", 10), generation=generation(4, "a", state=GenerationState.STOPPED, mod=500), target=target(1, 1, mod=501))
    decision = proposed(reopened)
    assert (decision.number, decision.cause.kind) == (5, CauseKind.FORM)


def test_a_write_that_asks_for_a_stop_does_not_reopen_it() -> None:
    ended = view(member("a", 10), generation=generation(4, "a", state=GenerationState.STOPPED, mod=500), target=target(run=False, mod=501))
    assert waits(ended).why == "the job has ended"


def test_a_reopened_job_still_waits_for_old_members_that_have_not_stopped() -> None:
    """The drain deadline closed it over a member that hung; reopened at once, that member may train on."""
    ended = generation(4, "ab", state=GenerationState.STOPPED, mod=500)
    seen = view(member("a", 10, stopped=4), member("b", 11, stopped=3), generation=ended, proposal=proposal(5, "a"), target=target(1, 1, mod=501))
    assert waits(seen, JUST_SEEN).why == "waiting for b to stop"


def test_an_operators_stop_asks_everybody_to_stop_and_then_closes() -> None:
    stop = target(run=False, reason="maintenance")
    running = view(member("a", 10), member("b", 11), generation=generation(1, "ab"), target=stop)
    decision = proposed(running)
    assert (decision.number, decision.mode, decision.members, decision.cause.kind) == (2, Mode.AGREED_STOP, (), CauseKind.STOP)
    half = view(member("a", 10, stopped=1), member("b", 11), generation=generation(1, "ab"), target=stop, proposal=proposal(2, ""))
    assert waits(half, JUST_SEEN).until == NOW + TIMING.drain_timeout
    stopped = view(member("a", 10, stopped=1), member("b", 11, stopped=1), generation=generation(1, "ab"), target=stop, proposal=proposal(2, ""))
    for seen, now in ((stopped, NOW), (half, NOW + TIMING.drain_timeout)):
        ending = decide(seen, JUST_SEEN, now)
        assert isinstance(ending, End)
        assert (ending.state, ending.reason) == (GenerationState.STOPPED, "maintenance")


def test_an_operators_stop_activates_nothing_that_was_pending() -> None:
    seen = view(member("a", 10, stopped=1), member("b", 11), generation=generation(1, "a"), target=target(run=False), proposal=proposal(2, "ab"))
    assert isinstance(decide(seen), End)


def test_an_operators_stop_before_the_first_generation_forms_none() -> None:
    assert isinstance(decide(view(member("a", 10), target=target(run=False))), Wait)


# --- orphans (rule 15) ---------------------------------------------------------------------------------------------------


def orphaned(*members: object, since: float | None = NOW) -> tuple[View, Memory]:
    pending = proposal(2, "c", mode=Mode.KILL, kind=CauseKind.LOSS)
    return view(member("c", 12, stopped=1), *members, generation=generation(1, "ab"), proposal=pending), Memory(orphaned_since=since, proposal_seen_at=NOW)


def test_a_generation_that_shares_no_member_waits_until_frozen_workers_must_have_stopped() -> None:
    seen, memory = orphaned()
    due = NOW + TIMING.ttl + 600.0
    assert waits(seen, memory).until == due
    assert isinstance(decide(seen, memory, due - 0.1), Wait)
    assert isinstance(decide(seen, memory, due), Activate)


def test_the_hold_follows_the_generations_own_frozen_max() -> None:
    seen, memory = orphaned()
    assert waits(replace(seen, generation=generation(1, "ab", frozen_max=20.0)), memory).until == NOW + TIMING.ttl + 20.0


def test_one_shared_member_is_enough() -> None:
    seen = view(member("a", 10), generation=generation(1, "ab"))
    assert orphan_hold(seen, [mid("a")], NOW, LONG_AGO, TIMING) is None
    assert orphan_hold(view(member("c", 12)), [mid("c")], NOW, LONG_AGO, TIMING) is None


def test_restarted_agents_on_all_old_nodes_prove_that_the_old_workers_are_dead() -> None:
    seen, memory = orphaned(member("a", 20, life=2, stopped=1), member("b", 21, life=2, stopped=1))
    assert isinstance(decide(seen, memory), Activate)


def test_one_restarted_agent_leaves_its_partner_one_ttl() -> None:
    seen, memory = orphaned(member("a", 20, life=2, stopped=1))
    assert waits(seen, memory).until == NOW + TIMING.ttl
    assert isinstance(decide(seen, memory, NOW + TIMING.ttl), Activate)


def test_a_stopped_leaver_left_behind_counts_as_proof_and_does_not_hold_for_ever() -> None:
    """{a, b} train; b leaves, has stopped and stays for the others; a vanishes; c is to go on alone."""
    before, _ = orphaned(member("a", 10), member("b", 11, stopped=1, leaving=True), since=None)
    seen, _ = orphaned(member("b", 11, stopped=1, leaving=True))
    memory = observe(Memory(), before, seen, NOW, TIMING)
    assert waits(seen, memory).until == NOW + TIMING.ttl
    assert isinstance(decide(seen, memory, NOW + TIMING.ttl), Activate)


def test_a_hung_member_that_is_not_ready_holds_no_longer_than_frozen_workers_could_train() -> None:
    """b lives, renews its lease and never reports: left out as not ready, it must not block for ever (rule 13)."""
    marks = {mid("b").incarnation: 11}
    pending = proposal(3, "c", mode=Mode.KILL, kind=CauseKind.LOSS, not_ready=marks)
    seen = view(member("c", 12, stopped=1), member("b", 11), generation=generation(1, "b"), proposal=pending)
    memory = observe(Memory(), replace(seen, proposal=None), seen, NOW, TIMING)
    due = NOW + TIMING.ttl + 600.0
    assert waits(seen, memory).until == due
    assert isinstance(decide(seen, memory, due), Activate)


def test_a_job_stopped_over_a_member_cut_off_is_not_reopened_beside_it() -> None:
    """{a} is cut from etcd and trains on; the operator stops the job, it closes at once, and is opened again for c."""
    ended = generation(1, "a", state=GenerationState.STOPPED, mod=500)
    seen = view(member("c", 12, stopped=1), generation=ended, proposal=proposal(2, "c", kind=CauseKind.FORM), target=target(1, 1, mod=501))
    memory = observe(Memory(), view(generation=generation(1, "a")), seen, NOW, TIMING)
    assert waits(seen, memory).until == NOW + TIMING.ttl + 600.0


def test_a_job_whose_members_had_all_stopped_is_reopened_without_a_hold() -> None:
    ended = generation(1, "a", state=GenerationState.SUCCEEDED, drained=True, mod=500)
    seen = view(member("c", 12, stopped=1), generation=ended, proposal=proposal(2, "c", kind=CauseKind.FORM), target=target(1, 1, mod=501))
    assert isinstance(decide(seen), Activate)


# --- cliques (rule 16) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ({}, "abcd"),
        ({"a": "b"}, "acd"),
        ({"b": "a"}, "acd"),
        ({"a": "d", "d": "a"}, "abc"),
        ({"b": "acd"}, "acd"),
        ({"a": "bcd"}, "bcd"),
        ({"a": "b", "c": "d"}, "ac"),
        ({"a": "x"}, "abcd"),
        ({"a": "a"}, "abcd"),
    ],
    ids=["all reach all", "the younger of a pair", "whoever says so", "both say so", "one bad node", "the oldest is bad", "two pairs", "a stranger", "itself"],
)
def test_the_fewest_are_left_out_so_that_the_rest_reach_each_other(broken: dict[str, str], kept: str) -> None:
    crowd = [member(name, age, unreachable=[mid(other) for other in broken.get(name, "")]) for age, name in enumerate("abcd", start=10)]
    assert "".join(nodes(keyed.record.id for keyed in without_unreachable(crowd))) == kept


def test_the_unreachable_are_left_out_before_the_limit_is_applied() -> None:
    seen = view(member("a", 10, unreachable=[mid("b")]), member("b", 11), member("c", 12), target=target(1, 2))
    assert nodes(proposed(seen).members) == ["a", "c"]


# --- what an observer remembers ------------------------------------------------------------------------------------------


def test_the_settle_time_begins_anew_with_each_change_of_candidates() -> None:
    one, two = view(member("a", 10)), view(member("a", 10), member("b", 11))
    first = observe(Memory(), view(), one, 100.0, TIMING)
    assert (first.changed_at, first.restless_since) == (100.0, 100.0)
    second = observe(first, one, two, 100.9, TIMING)
    assert (second.changed_at, second.restless_since) == (100.9, 100.0)
    calm = observe(second, two, one, 103.0, TIMING)
    assert (calm.changed_at, calm.restless_since) == (103.0, 103.0)


def test_reports_are_no_change_of_candidates_but_leaving_is() -> None:
    before = view(member("a", 10))
    assert observe(Memory(), before, view(member("a", 10, stopped=4, mod=11)), 100.0, TIMING).changed_at == 0.0
    assert observe(Memory(), before, view(member("a", 10, leaving=True)), 100.0, TIMING).changed_at == 100.0


def test_a_proposals_deadline_counts_from_when_it_was_first_seen() -> None:
    pending = view(member("a", 10), proposal=proposal(1, "a"))
    first = observe(Memory(), view(member("a", 10)), pending, 100.0, TIMING)
    assert first.proposal_seen_at == 100.0
    assert observe(first, pending, pending, 105.0, TIMING).proposal_seen_at == 100.0
    assert observe(first, pending, view(member("a", 10), proposal=proposal(2, "a")), 106.0, TIMING).proposal_seen_at == 106.0


def test_orphanhood_is_remembered_from_its_beginning_and_forgotten_at_its_end() -> None:
    active = generation(1, "ab")
    here, gone = view(member("a", 10), generation=active), view(member("c", 12), generation=active)
    memory = observe(Memory(), here, gone, 100.0, TIMING)
    assert memory.orphaned_since == 100.0
    assert observe(memory, gone, gone, 200.0, TIMING).orphaned_since == 100.0
    assert observe(memory, gone, here, 200.0, TIMING).orphaned_since is None


def test_orphanhood_of_one_generation_is_not_counted_for_the_next() -> None:
    gone, also_gone = view(member("d", 13), generation=generation(1, "ab")), view(member("d", 13), generation=generation(2, "c"))
    memory = observe(observe(Memory(), view(), gone, 100.0, TIMING), gone, also_gone, 900.0, TIMING)
    assert memory.orphaned_since == 900.0


# --- each member ---------------------------------------------------------------------------------------------------------


def do(generation_: object, proposal_: object, *, over: bool = False, **local: int | None) -> object:
    seen_generation = generation_.record if generation_ else None  # type: ignore[attr-defined]
    seen_proposal = proposal_.record if proposal_ else None  # type: ignore[attr-defined]
    return react(seen_generation, seen_proposal, Local(id=mid("a"), **local), over=over)  # type: ignore[arg-type]


def test_a_member_starts_the_generation_it_is_in() -> None:
    assert do(generation(3, "ab"), proposal(3, "ab"), stopped=2, floor=3) == Start(number=3)


@pytest.mark.parametrize(
    ("what", "local"),
    [
        (generation(3, "bc"), {"stopped": 2}),
        (generation(3, "ab"), {"stopped": 3}),
        (generation(3, "ab"), {"stopped": 2, "floor": 4}),
        (generation(3, [mid("a", 2)]), {"stopped": 2}),
        (generation(3, "ab", state=GenerationState.STOPPED), {"stopped": 2}),
        (None, {}),
    ],
    ids=["not in it", "already stopped it", "has seen a newer proposal", "another incarnation is in it", "it has ended", "there is none"],
)
def test_a_member_stands_by_when(what: object, local: dict[str, int]) -> None:
    assert isinstance(do(what, None, **local), Stay)


def test_a_running_member_stops_in_the_mode_of_a_newer_proposal() -> None:
    for mode in Mode:
        directive = do(generation(3, "ab"), proposal(4, "ab", mode=mode), running=3, stopped=2)
        assert isinstance(directive, Stop)
        assert (directive.number, directive.mode) == (3, mode)


def test_who_stops_is_told_who_stays_so_that_it_does_not_wait_for_an_answer_of_the_lost() -> None:
    directive = do(generation(3, "abc"), proposal(4, "ac", mode=Mode.KILL, kind=CauseKind.LOSS), running=3, stopped=2)
    assert isinstance(directive, Stop)
    assert directive.staying == (mid("a"), mid("c"))


def test_a_running_member_goes_on_in_its_generation() -> None:
    assert do(generation(3, "ab"), proposal(3, "ab"), running=3, stopped=2) == Stay(why="training")


def test_a_member_that_others_went_on_without_is_killed() -> None:
    assert do(generation(5, "bc"), proposal(5, "bc"), running=3, stopped=2) == Stop(number=3, mode=Mode.KILL, why="generation 5 formed without this node")


def test_on_seeing_a_proposal_a_member_that_never_started_reports_all_the_same() -> None:
    assert do(generation(3, "ab"), proposal(4, "ab"), stopped=2) == Report(number=3)
    assert isinstance(do(generation(3, "ab"), proposal(4, "ab"), stopped=3), Stay)
    assert isinstance(do(None, proposal(1, "ab")), Stay)


def test_when_the_job_is_over_everybody_leaves() -> None:
    directive = do(generation(3, "ab", state=GenerationState.SUCCEEDED), None, running=3, over=True)
    assert isinstance(directive, Leave)
    assert "succeeded" in directive.why


def test_workers_of_a_generation_that_was_stopped_do_not_train_on_when_the_job_is_reopened() -> None:
    """This member slept through the end: what it sees first is the job open again."""
    directive = do(generation(3, "ab", state=GenerationState.STOPPED), None, running=3, over=False)
    assert isinstance(directive, Stop)
    assert (directive.number, directive.mode) == (3, Mode.KILL)


def test_a_reported_result_counts_for_its_generation_alone() -> None:
    assert reported_result(member("a", 10, failed=3).record, 3) is Result.FAILED
    assert reported_result(member("a", 10, failed=3).record, 4) is None
    assert reported_result(member("a", 10).record, 0) is None


def test_fate_sorts_every_member_into_one_group() -> None:
    crowd = [member("a", 10), member("b", 11, failed=2), member("c", 12, finished=2), member("d", 13, stopped=2), member("e", 14, leaving=True)]
    what = fate(view(*crowd, generation=generation(2, "abcdef")))
    assert nodes(what.lost) == ["f"]
    groups = {name: nodes(keyed.record.id for keyed in getattr(what, name)) for name in ("running", "failed", "finished", "idle", "leaving")}
    assert groups == {"running": ["a", "e"], "failed": ["b"], "finished": ["c"], "idle": ["d"], "leaving": ["e"]}
