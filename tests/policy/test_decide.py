"""What is done about what may come, by tables: the ladder, the budgets, the guards, the modes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticd.policy.budgets import Deed, Ledger, Progress
from elasticd.policy.costs import Measured
from elasticd.policy.decide import decide
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.evidence import Certainty, Fault, Incident, Role, Scope, Standing
from elasticd.policy.settings import EXIT_SAME_AGAIN, Data, Mode, Settings
from elasticd.policy.state import Cluster, State
from tests.policy.made import FAST, NOW, hardware, incident, nonfinite, sign, state, straggler, world

pytestmark = pytest.mark.timeout(30)

STRONG = sign(certainty=Certainty.STRONG, detector="peers")


def only(seen: State, now: float = NOW) -> Decision:
    (decision,) = decide(seen, now)
    return decision


def carried_out(seen: State, now: float = NOW, **progress: Any) -> State:
    """What is known after the decisions were carried out."""
    ledger = seen.ledger
    for decision in decide(seen, now):
        ledger = ledger.after(decision, seen.progress)
    return replace(seen, ledger=ledger, progress=replace(seen.progress, **progress))


def deed(ago: float, action: Action = Action.RESTART, **changes: Any) -> Deed:
    return replace(Deed(at=NOW - ago, action=action, about="g6-x-n1", fingerprint="x@n1", node="n1"), **changes)


# --- the ladder ----------------------------------------------------------------------------------------------------------


def test_a_statistic_alone_brings_an_early_checkpoint() -> None:
    decision = only(state(incident()))
    assert (decision.action, decision.rule, decision.node, decision.ranks, decision.certain) == (Action.CHECKPOINT, "early_checkpoint", "n3", (3,), False)
    assert decision.numbers["p"] == 0.1


def test_it_brings_nothing_more_until_it_persists() -> None:
    seen = carried_out(state(incident()))
    assert (only(seen).action, only(seen).rule) == (Action.LOG, "not_persisting")


def test_if_it_persists_it_brings_one_restart() -> None:
    """From the first word to the restart, and none after it."""
    seen = carried_out(state(incident()))
    later = NOW + 2000.0
    held = incident(lasted=2000.0, opened=NOW - 25.0, updated=later - 5.0)
    seen = replace(seen, incidents=(held,), progress=replace(seen.progress, checkpoint_step=5000, checkpoint_at=NOW + 1.0))
    decision = only(seen, later)
    assert (decision.action, decision.rule, decision.agreed) == (Action.RESTART, "drift", True)
    seen = carried_out(seen, later)
    assert (only(seen, later).action, only(seen, later).rule) == (Action.LOG, "done")
    # The same in the next world, hours later, with new checkpoints: once a day is enough.
    root = replace(sign(), generation=8)
    again = incident(root, id="g8-joint_drift-n3", lasted=2000.0, opened=later + 7000.0, updated=later + 8995.0)
    seen = replace(seen, world=world(generation=8), incidents=(again,), progress=Progress(step=9000, checkpoint_step=9000, checkpoint_at=later + 7100.0))
    assert (only(seen, later + 9000.0).action, only(seen, later + 9000.0).rule) == (Action.LOG, "budget_statistic")
    assert only(seen, later + 9000.0).alert


def test_a_clock_alone_makes_nothing_persist() -> None:
    """A detector that died says nothing new."""
    seen = carried_out(state(incident()))
    assert only(seen, NOW + 100.0).rule == "not_persisting"
    assert only(seen, NOW + 500.0).rule == "stale"


def test_corroborated_it_brings_a_restart_at_once_after_the_checkpoint() -> None:
    seen = carried_out(state(incident(corroborated=True)), checkpoint_step=5000)
    assert only(seen).action is Action.RESTART
    assert only(seen).certain


def test_a_checkpoint_that_was_just_made_is_not_made_again() -> None:
    """Nothing is at risk then."""
    seen = state(incident(), progress=Progress(step=5000, checkpoint_step=5000, checkpoint_at=NOW - 1.0))
    assert only(seen).action is Action.LOG


def test_a_restart_below_its_price_is_not_done() -> None:
    """Where a failure is noticed at once and nothing is lost by it, to restart before it costs as much as it."""
    seen = state(
        incident(lasted=2000.0),
        progress=Progress(step=5000, checkpoint_step=5000, checkpoint_at=NOW - 1.0),
        measured=Measured(checkpoints=(0.5,), restarts=(20.0,), detections=(1.0,)),
    )
    assert (only(seen).action, only(seen).rule) == (Action.LOG, "below_p")
    assert only(seen).numbers["p"] < only(seen).numbers["p_restart"]


def test_a_fatal_fault_of_hardware_drains_its_node() -> None:
    decision = only(state(hardware()))
    assert (decision.action, decision.node, decision.rule, decision.agreed, decision.until) == (Action.EXCLUDE, "n3", "hardware", True, None)


def test_a_fault_of_hardware_is_as_true_in_the_next_world() -> None:
    root = replace(hardware().root, generation=6)
    assert only(state(replace(hardware(), root=root))).action is Action.EXCLUDE


def test_uncertain_hardware_is_not_restarted_for() -> None:
    """A restart on the same node would not change it."""
    root = sign("kernel_lockup", detector="signature", fault=Fault.HARDWARE, certainty=Certainty.STRONG, scope=Scope.NODE, rank=None)
    first = carried_out(state(incident(root)), checkpoint_at=NOW)
    assert first.ledger.deeds[-1].action is Action.CHECKPOINT
    assert (only(first).action, only(first).rule) == (Action.LOG, "hardware_unsure")
    assert only(replace(first, incidents=(incident(root, corroborated=True),))).action is Action.EXCLUDE


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        (incident(standing=Standing.SUSPECT), "suspect"),
        (incident(standing=Standing.OVER, why_over="it stopped"), "over"),
        (incident(sign(fault=Fault.ADVISE)), "advise"),
        (incident(sign("nccl_remote", fault=Fault.CASCADE, role=Role.CASCADE)), "cascade"),
        (incident(sign("bad_arguments", fault=Fault.USER, certainty=Certainty.CERTAIN)), "user"),
        (incident(sign("silent_node", certainty=Certainty.CERTAIN, scope=Scope.NODE, rank=None)), "membership"),
        (incident(sign(generation=6)), "earlier_world"),
        (incident(sign(generation=None), updated=NOW - 100.0), None),
        (incident(updated=NOW - 130.0), "stale"),
        (hardware("elsewhere"), "not_training"),
        (hardware(updated=NOW - 700.0), "stale"),
    ],
)
def test_what_asks_for_nothing(told: Incident, rule: str | None) -> None:
    decision = only(state(told))
    if rule is None:
        assert decision.action is Action.CHECKPOINT
    else:
        assert (decision.action, decision.wanted, decision.rule) == (Action.LOG, decision.wanted if rule == "not_training" else Action.LOG, rule)


def test_nothing_is_done_while_no_generation_trains() -> None:
    assert (only(state(hardware(), world=None)).action, only(state(hardware(), world=None)).rule) == (Action.LOG, "not_training")


def test_an_end_that_was_announced_brings_a_checkpoint_and_no_restart() -> None:
    root = sign("slurm_preempted", fault=Fault.TRANSIENT, certainty=Certainty.CERTAIN, scope=Scope.JOB, node="", rank=None)
    seen = state(incident(root))
    assert only(seen).action is Action.CHECKPOINT
    assert only(carried_out(seen)).action is Action.LOG


def test_a_job_in_which_nobody_ends_a_step_is_told_of_and_left_alone() -> None:
    """An evaluation that nobody announced, of minutes, looks the same: a kill at each would be worse than any hang."""
    (decision,) = decide(state(incident(sign("stalled", certainty=Certainty.CERTAIN, rank=None, node="", scope=Scope.JOB))), NOW)
    assert (decision.action, decision.would, decision.rule, decision.alert) == (Action.LOG, Action.LOG, "stalled", True)


@pytest.mark.parametrize("kind", ["dead_rank"])
def test_a_hang_is_ended_without_waiting_for_an_agreed_stop(kind: str) -> None:
    decision = only(state(incident(sign(kind, certainty=Certainty.CERTAIN))))
    assert (decision.action, decision.agreed) == (Action.RESTART, False)
    unsure = only(state(incident(sign(kind, certainty=Certainty.STRONG))))
    assert (unsure.action, unsure.rule) == (Action.LOG, "hang_unsure")


def test_what_many_ranks_show_at_once_is_nobodys_own() -> None:
    told = [incident(sign(node=f"n{rank}", rank=rank), id=f"g7-drift-n{rank}", corroborated=True) for rank in range(4)]
    decisions = decide(state(*told), NOW)
    assert {(one.action, one.rule) for one in decisions} == {(Action.LOG, "together")}
    assert all(one.alert for one in decisions)
    assert decide(state(*told[:2]), NOW)[0].action is Action.CHECKPOINT


def test_all_ranks_of_one_node_are_that_nodes() -> None:
    signs = tuple(sign(rank=rank) for rank in (6, 7))
    told = incident(signs[0], signs=signs)
    assert only(state(told, world=world(4, ranks=2))).action is Action.CHECKPOINT


# --- stragglers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "lasted", "nodes", "spare", "action", "rule"),
    [
        (0.20, 300.0, 8, 0, Action.EXCLUDE, "straggler"),
        (0.20, 5.0, 8, 0, Action.LOG, "straggler_waits"),  # pays after 2.5 / 0.2 = 12.5 s
        (0.14, 300.0, 8, 0, Action.LOG, "straggler_kept"),  # 1 / 7 = 0.143
        (0.15, 300.0, 8, 0, Action.EXCLUDE, "straggler"),
        (0.05, 300.0, 64, 0, Action.EXCLUDE, "straggler"),
        (0.20, 300.0, 3, 0, Action.LOG, "straggler_kept"),  # two nodes are 50 % slower than three
        (0.60, 300.0, 4, 0, Action.EXCLUDE, "straggler"),
        (0.20, 300.0, 4, 1, Action.EXCLUDE, "straggler"),  # one that stands by takes its place
        (0.05, 30.0, 4, 1, Action.LOG, "straggler_waits"),
        (0.0, 300.0, 4, 1, Action.LOG, "straggler_kept"),
    ],
)
def test_a_straggler_goes_if_the_job_is_faster_without_it_and_it_has_lasted(
    slow: float, lasted: float, nodes: int, spare: int, action: Action, rule: str
) -> None:
    decision = only(state(straggler(slow, lasted), world=world(nodes, spare=spare)))
    assert (decision.action, decision.rule) == (action, rule)
    assert decision.numbers["slowdown"] == pytest.approx(slow)
    assert decision.until == (NOW + 3600.0 if action is Action.EXCLUDE else None)


def test_where_its_work_is_a_small_part_of_a_step_a_straggler_costs_little() -> None:
    """20 % more of 1 s of work make 2 s of step 2.2 s: 11 % of the 1.8 s that it would be."""
    measured = replace(FAST, step_s=2.0)
    assert only(state(straggler(0.2, 300.0), measured=measured)).numbers["slowdown"] == pytest.approx(0.2 / 1.8, abs=1e-4)


def test_a_node_left_out_twice_in_a_day_stays_out_until_somebody_has_looked() -> None:
    before = Ledger(deeds=(deed(20000.0, Action.EXCLUDE, node="n3", fingerprint="straggler@n3/r3"),))
    settings = Settings(statistic_restarts=5)
    decision = only(
        state(straggler(0.3, 300.0), ledger=before, settings=settings, progress=Progress(step=9000, checkpoint_step=9000, checkpoint_at=NOW - 400.0))
    )
    assert (decision.action, decision.until) == (Action.EXCLUDE, None)


# --- divergence --------------------------------------------------------------------------------------------------------------


def test_a_state_that_is_no_number_is_left_once_and_the_job_stops_if_it_comes_again() -> None:
    first = only(state(nonfinite()))
    assert (first.action, first.good_before, first.skip_data, first.hold_commits) == (Action.ROLLBACK, NOW - 5.0, True, True)
    seen = carried_out(state(nonfinite()))
    assert (only(seen).rule, only(seen).hold_commits) == ("done", True)
    again = replace(nonfinite(), id="g8-nonfinite", root=replace(nonfinite().root, generation=8))
    seen = replace(seen, world=world(generation=8), incidents=(again,))
    assert (only(seen).action, only(seen).rule, only(seen).exit_code) == (Action.STOP, "diverged_again", EXIT_SAME_AGAIN)


def test_one_that_comes_long_after_is_a_new_one_and_the_day_has_two() -> None:
    back = deed(30000.0, Action.ROLLBACK, about="g6-nonfinite", step=1000)
    assert only(state(nonfinite(), ledger=Ledger(deeds=(back,)))).action is Action.ROLLBACK
    assert only(state(nonfinite(), ledger=Ledger(deeds=(back, replace(back, step=2000))))).action is Action.STOP


def test_the_data_may_be_kept() -> None:
    assert not only(state(nonfinite(), settings=Settings(after_divergence=Data.KEEP))).skip_data


@pytest.mark.parametrize("told", [incident(replace(nonfinite().root, certainty=Certainty.WEAK)), replace(nonfinite(), standing=Standing.SUSPECT)])
def test_a_state_that_may_be_bad_is_not_committed(told: Incident) -> None:
    decision = only(state(told))
    assert (decision.action, decision.hold_commits) == (Action.LOG, True)


# --- budgets, cooldown, guards ----------------------------------------------------------------------------------------------


HELD = incident(replace(STRONG, certainty=Certainty.STRONG), lasted=2000.0)
SAVED = Progress(step=5000, checkpoint_step=5000, checkpoint_at=NOW - 100.0)
FAR: dict[str, Any] = {"checkpoint_step": 100, "step": 100}


@pytest.mark.parametrize(
    ("deeds", "cluster", "rule"),
    [
        ((), (), "drift"),
        ((deed(600.0, **FAR),), (), "cooldown"),
        ((deed(1000.0, checkpoint_step=5000),), (), "cooldown"),  # no checkpoint since
        ((deed(1000.0, **FAR),), (), "budget_job_hour"),
        ((deed(4000.0, **FAR),), (), "drift"),
        (tuple(deed(4000.0 + 5000.0 * one, **FAR) for one in range(4)), (), "budget_job_day"),
        (tuple(deed(90000.0 + one, **FAR) for one in range(4)), (), "drift"),
        (tuple(deed(1000.0 + one, certain=True, **FAR) for one in range(3)), (), "budget_job_hour"),
        ((deed(5000.0, fingerprint="joint_drift@n3/r3", **FAR),), (), "budget_statistic"),
        ((), tuple(NOW - one for one in range(4)), "budget_cluster"),
        ((), tuple(NOW - 3601.0 for one in range(4)), "drift"),
        ((), tuple(NOW + 100.0 for one in range(4)), "budget_cluster"),  # a clock that is ahead frees nothing
        ((deed(-100.0, **FAR),), (), "cooldown"),
        ((deed(600.0, done=False, **FAR),), (), "drift"),  # what was never done costs nothing
    ],
)
def test_a_restart_for_a_statistic_is_held_against_every_budget(deeds: tuple[Deed, ...], cluster: tuple[float, ...], rule: str) -> None:
    decision = only(state(HELD, progress=SAVED, ledger=Ledger(deeds=deeds), cluster=Cluster(nodes=20, stops=cluster)))
    assert decision.rule == rule
    assert (decision.action, decision.wanted) == (Action.RESTART if rule == "drift" else Action.LOG, Action.RESTART)
    assert decision.alert


@pytest.mark.parametrize(("checkpoint", "rule"), [(5000, "budget_fingerprint"), (6000, "hang")])
def test_one_thing_on_one_rank_has_three_restarts_without_a_new_checkpoint(checkpoint: int, rule: str) -> None:
    """However certain it is."""
    deeds = tuple(deed(4000.0 * one, fingerprint="dead_rank@n3/r3", certain=True, checkpoint_step=5000) for one in (1, 2, 3))
    progress = Progress(step=6000, checkpoint_step=checkpoint, checkpoint_at=NOW - 100.0)
    told = incident(sign("dead_rank", certainty=Certainty.CERTAIN))
    assert only(state(told, ledger=Ledger(deeds=deeds), progress=progress)).rule == rule


def test_a_broken_node_needs_no_cooldown_but_has_a_budget_too() -> None:
    """Three within an hour; then people are asked."""
    one = deed(60.0, certain=True, **FAR)
    assert only(state(hardware(), ledger=Ledger(deeds=(one, one)))).action is Action.EXCLUDE
    used = only(state(hardware(), ledger=Ledger(deeds=(one, one, one))))
    assert (used.wanted, used.rule, used.alert) == (Action.EXCLUDE, "budget_job_hour", True)
    assert used.action is Action.CHECKPOINT  # the rung below: the node is still about to fail
    assert only(carried_out(state(hardware(), ledger=Ledger(deeds=(one, one, one))))).action is Action.LOG


@pytest.mark.parametrize(
    ("told", "changes", "rule"),
    [
        (hardware(), {"world": world(4, min_nodes=4)}, "min_nodes"),
        (hardware("n1"), {"world": world(2, min_nodes=1), "cluster": Cluster(nodes=2, excluded={"x": False})}, "cluster_guard"),
        (straggler(0.3, 300.0), {"cluster": Cluster(nodes=19, excluded={"x": True})}, "cluster_guard"),
        (straggler(0.3, 300.0), {"cluster": Cluster(nodes=20, excluded={"x": True})}, "straggler"),
        (hardware(), {"cluster": Cluster(nodes=20, excluded=dict.fromkeys("abcdef", True))}, "cluster_guard"),
        (hardware(), {"cluster": Cluster(nodes=20, excluded=dict.fromkeys("abcde", True))}, "hardware"),
        (hardware(), {"cluster": Cluster(nodes=20, excluded={"n3": False})}, "already_out"),
    ],
)
def test_no_node_is_left_out_beyond_the_guard(told: Incident, changes: dict[str, Any], rule: str) -> None:
    decision = only(state(told, **changes))
    assert (decision.wanted, decision.rule) == (Action.EXCLUDE, rule)
    assert (decision.would is Action.EXCLUDE) == (rule in ("straggler", "hardware"))


def test_a_node_that_stands_by_counts_for_the_least_size() -> None:
    assert only(state(hardware(), world=world(4, min_nodes=4, spare=1))).action is Action.EXCLUDE


def test_one_incident_told_by_two_nodes_is_one() -> None:
    other = replace(hardware(), updated=NOW - 3.0, signs=(replace(hardware().root, detector="guard"),))
    decisions = decide(state(hardware(), other), NOW)
    assert [one.action for one in decisions] == [Action.EXCLUDE]
    assert decisions[0].key == f"{hardware().id}:exclude"


def test_what_two_nodes_saw_each_corroborates() -> None:
    one, other = incident(), incident(signs=(sign(detector="peers", kind="peer_outlier"),), updated=NOW - 4.0)
    seen = state(one, other, progress=replace(SAVED, checkpoint_at=NOW - 1.0))
    assert only(seen).action is Action.RESTART
    assert only(replace(seen, incidents=(one,))).action is Action.LOG


def test_an_end_that_one_node_tells_does_not_hide_what_another_still_sees() -> None:
    over = replace(hardware(), standing=Standing.OVER, updated=NOW - 5.0)
    assert only(state(hardware(), over)).action is Action.EXCLUDE
    assert only(state(over, hardware())).action is Action.EXCLUDE


def test_two_incidents_at_once_stop_the_workers_once_the_surest_first() -> None:
    decisions = decide(state(HELD, hardware("n5"), progress=SAVED), NOW)
    assert [(one.action, one.rule, one.node) for one in decisions] == [(Action.EXCLUDE, "hardware", "n5"), (Action.LOG, "busy", "n3")]


def test_two_incidents_at_once_bring_one_checkpoint() -> None:
    other = incident(sign(node="n4", rank=4), id="g7-joint_drift-n4")
    assert sorted(one.action.value for one in decide(state(incident(), other), NOW)) == ["checkpoint", "log"]


# --- modes and pause -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [incident(), hardware(), straggler(0.3, 300.0), nonfinite(), incident(sign("dead_rank", certainty=Certainty.CERTAIN))])
@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.ADVISE])
def test_modes_that_do_not_act_say_what_acting_would_do(mode: Mode, told: Incident) -> None:
    acting, other = only(state(told)), only(state(told, settings=Settings(mode=mode)))
    assert (other.action, other.would, other.wanted) == (Action.LOG, acting.action, acting.wanted)
    assert acting.acts
    assert other.withheld
    assert other.alert
    assert not other.hold_commits


def test_what_shadow_would_do_is_held_against_what_it_would_have_done() -> None:
    seen = carried_out(state(incident(), settings=Settings(mode=Mode.SHADOW)))
    assert [(one.action, one.done) for one in seen.ledger.deeds] == [(Action.CHECKPOINT, False)]
    assert only(seen).would is Action.LOG


@pytest.mark.parametrize("told", [incident(), hardware(), straggler(0.3, 300.0), nonfinite(), incident(sign("dead_rank", certainty=Certainty.CERTAIN))])
def test_a_pause_stops_all_of_it(told: Incident) -> None:
    decision = only(state(told, paused=True))
    assert (decision.action, decision.would, decision.rule, decision.hold_commits) == (Action.LOG, Action.LOG, "paused", False)
    assert decision.wanted is not Action.LOG


def test_a_decision_is_plain_values_for_json() -> None:
    plain = json.loads(json.dumps(only(state(hardware())).as_dict(), allow_nan=False))
    assert plain["action"] == "exclude"
    assert plain["key"] == f"{hardware().id}:exclude"
