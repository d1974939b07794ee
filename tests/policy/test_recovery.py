"""What is done about failures that happened: budgets, back-off, and when it is enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.policy.budgets import Ledger, Progress, backoff
from elasticd.policy.decide import decide
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.failures import Failure, FailureClass
from elasticd.policy.settings import EXIT_NO_PROGRESS, EXIT_SAME_AGAIN, Mode, Settings
from elasticd.policy.state import Cluster, State
from tests.policy.made import NOW, state, world

pytestmark = pytest.mark.timeout(30)


def failure(cls: str, **changes: Any) -> Failure:
    return replace(Failure(cls=FailureClass(cls), kind=cls, at=NOW, node="n3", rank=3, summary=f"rank 3 on n3: {cls}"), **changes)


def after(seen: State, what: Failure, now: float = NOW) -> tuple[Decision, State]:
    """The decision, and what is known once it was carried out."""
    (decision,) = decide(replace(seen, failure=what), now)
    return decision, replace(seen, ledger=seen.ledger.failed(what, decision, seen.progress))


def until_stopped(seen: State, what: Failure, *, steps: int = 0, checkpoints: int = 0, most: int = 20) -> list[Decision]:
    """Let it fail again and again, with so much progress in between."""
    decisions = []
    for _ in range(most):
        decision, seen = after(seen, what)
        decisions.append(decision)
        if decision.action is Action.STOP:
            break
        progress = seen.progress
        seen = replace(seen, progress=replace(progress, step=progress.step + steps, checkpoint_step=progress.checkpoint_step + checkpoints))
    return decisions


@pytest.mark.parametrize(
    ("cls", "restarts", "exit_code"),
    [
        ("code", 0, EXIT_SAME_AGAIN),
        ("startup", 0, EXIT_SAME_AGAIN),
        ("user", 1, EXIT_SAME_AGAIN),
        ("memory", 1, EXIT_SAME_AGAIN),
        ("unknown", 3, 1),
        ("infrastructure", 3, 1),
    ],
)
def test_each_class_has_so_many_restarts_without_a_checkpoint(cls: str, restarts: int, exit_code: int) -> None:
    """Steps alone refill nothing."""
    decisions = until_stopped(state(world=world(nodes=1)), failure(cls, node="n0"), steps=10)
    assert [one.action for one in decisions] == [Action.RESTART] * restarts + [Action.STOP]
    assert decisions[-1].exit_code == exit_code
    assert decisions[-1].rule == f"{cls}_budget"


@pytest.mark.parametrize("cls", ["user", "memory", "unknown", "infrastructure"])
def test_a_checkpoint_that_is_further_refills_the_budget(cls: str) -> None:
    decisions = until_stopped(state(), failure(cls), steps=10, checkpoints=10)
    assert {one.action for one in decisions} == {Action.RESTART}
    assert len(decisions) == 20


def test_an_older_checkpoint_refills_nothing() -> None:
    """After the newest was lost, the same steps are done again: that is no progress."""
    _, seen = after(state(), failure("memory"))
    seen = replace(seen, progress=Progress(step=5010, checkpoint_step=3000))
    assert after(seen, failure("memory"))[0].action is Action.STOP


@pytest.mark.parametrize("cls", ["code", "user"])
def test_what_fails_on_one_node_alone_costs_that_node_and_on_a_second_one_the_job(cls: str) -> None:
    """It lacks a package or a mount that the others have."""
    seen = state()
    decision, seen = after(seen, failure(cls))
    while decision.action is Action.RESTART:
        seen = replace(seen, progress=replace(seen.progress, step=seen.progress.step + 10))
        decision, seen = after(seen, failure(cls))
    assert (decision.action, decision.rule, decision.node) == (Action.EXCLUDE, "only_there", "n3")
    seen = replace(seen, progress=replace(seen.progress, step=seen.progress.step + 10))
    assert after(seen, failure(cls, node="n5"))[0].action is Action.STOP


def test_a_job_that_does_not_tell_of_its_steps_is_not_measured_by_them() -> None:
    """Its class budgets would never be refilled. What its code says is the same each time all the same."""
    seen = state(tells_steps=False, progress=Progress())
    assert {one.action for one in until_stopped(seen, failure("unknown"))} == {Action.RESTART}
    assert {one.action for one in until_stopped(seen, failure("user"))} == {Action.RESTART}
    assert until_stopped(seen, failure("code"))[0].action is Action.STOP


def test_budgets_of_classes_are_apart() -> None:
    _, seen = after(state(), failure("user"))
    seen = replace(seen, progress=replace(seen.progress, step=6000))
    assert after(seen, failure("memory"))[0].action is Action.RESTART


def test_without_a_new_step_the_job_stops_after_three_cycles_with_its_own_exit_code() -> None:
    """Whatever its class: these budgets would last longer."""
    settings = Settings(unknown_restarts=50)
    decisions = until_stopped(state(settings=settings, progress=Progress()), failure("unknown"))
    assert [one.action for one in decisions] == [Action.RESTART, Action.RESTART, Action.STOP]
    assert (decisions[-1].rule, decisions[-1].exit_code) == ("no_progress", EXIT_NO_PROGRESS)
    assert "rank 3 on n3" in decisions[-1].why


def test_a_worker_that_is_asked_to_stop_again_and_again_makes_no_progress_either() -> None:
    decisions = until_stopped(state(progress=Progress()), failure("preemption"))
    assert decisions[-1].rule == "no_progress"
    assert decisions[0].charged == ""


def test_steps_done_again_are_no_new_ones() -> None:
    seen = state(settings=Settings(unknown_restarts=50))
    for _ in range(2):
        decision, seen = after(seen, failure("unknown"))
        assert decision.action is Action.RESTART
    assert seen.ledger.best_step == 5000
    again = replace(seen, progress=replace(seen.progress, step=5000))
    assert after(again, failure("unknown"))[0].action is Action.RESTART  # the first of them had brought new steps
    _, again = after(again, failure("unknown"))
    assert after(again, failure("unknown"))[0].rule == "no_progress"


def test_losses_are_never_charged_and_never_stop_a_job() -> None:
    decisions = until_stopped(state(progress=Progress()), failure("membership", nodes=("n3",)))
    assert Action.STOP not in {one.action for one in decisions}
    assert {one.charged for one in decisions} == {""}


def test_a_node_that_is_lost_a_third_time_is_left_out() -> None:
    decisions = until_stopped(state(), failure("membership", nodes=("n3",)), most=3)
    assert [one.action for one in decisions] == [Action.RESTART, Action.RESTART, Action.EXCLUDE]
    assert (decisions[-1].node, decisions[-1].rule) == ("n3", "flapping")


def test_different_nodes_lost_are_no_flapping() -> None:
    seen = state()
    for name in ("n1", "n2", "n3", "n4"):
        decision, seen = after(seen, failure("membership", node=name, nodes=(name,)))
        assert decision.action is Action.RESTART


def test_a_fault_of_hardware_leaves_its_node_out() -> None:
    decision, _ = after(state(), failure("hardware"))
    assert (decision.action, decision.node, decision.charged, decision.agreed) == (Action.EXCLUDE, "n3", "hardware", False)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"world": world(2, min_nodes=2)}, "min_nodes"),
        ({"cluster": Cluster(nodes=6, excluded={"x": False})}, "cluster_guard"),
        ({"cluster": Cluster(nodes=20, excluded={"n3": False})}, "already_out"),
    ],
)
def test_where_a_node_may_not_be_left_out_the_job_tries_again_and_says_so(changes: dict[str, Any], rule: str) -> None:
    where = "n1" if rule == "min_nodes" else "n3"
    decision, _ = after(state(**changes), failure("hardware", node=where))
    assert (decision.action, decision.wanted, decision.rule, decision.alert) == (Action.RESTART, Action.EXCLUDE, rule, True)


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.ADVISE])
def test_only_mode_act_leaves_a_node_out(mode: Mode) -> None:
    decision, _ = after(state(settings=Settings(mode=mode)), failure("hardware"))
    assert (decision.action, decision.would) == (Action.RESTART, Action.EXCLUDE)


def test_a_job_recovers_while_it_is_paused() -> None:
    assert after(state(paused=True), failure("unknown"))[0].action is Action.RESTART


def test_numbers_that_are_none_go_back_once_and_then_stop() -> None:
    decisions = until_stopped(state(), failure("numerics"), steps=10, checkpoints=10)
    assert [one.action for one in decisions] == [Action.ROLLBACK, Action.STOP]
    assert (decisions[0].good_before, decisions[0].skip_data) == (NOW, True)
    assert decisions[-1].exit_code == EXIT_SAME_AGAIN


@pytest.mark.parametrize(
    ("used", "dice", "delay"), [(0, 0.9, 0.0), (1, 0.0, 1.0), (2, 0.0, 2.0), (3, 0.0, 4.0), (3, 1.0, 2.0), (3, 0.5, 3.0), (50, 0.0, 60.0), (5000, 0.0, 60.0)]
)
def test_the_delay_doubles_up_to_a_limit_and_a_share_of_it_is_drawn(used: int, dice: float, delay: float) -> None:
    assert backoff(used, Settings(), dice) == delay


def test_the_delay_is_in_the_decision() -> None:
    first, seen = after(state(), failure("unknown"))
    seen = replace(seen, dice=0.5, progress=replace(seen.progress, step=6000))
    second, _ = after(seen, failure("unknown"), NOW + 5.0)
    assert (first.after, second.after) == (None, NOW + 5.0 + 0.75)
    assert "restart 2 of 3 in 0.8 s" in second.why


def test_a_decision_names_the_root_in_one_line() -> None:
    decision, _ = after(state(), failure("unknown"))
    assert (decision.node, decision.ranks, decision.rule) == ("n3", (3,), "unknown")
    assert decision.why == "rank 3 on n3: unknown; restart 1 of 3"
    assert Ledger().failed(failure("unknown"), decision, Progress()).spent == {FailureClass.UNKNOWN: 1}
