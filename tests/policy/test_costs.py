"""What stops and failures cost, against the table of the facts, and what came of it afterwards."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticd.policy.budgets import Deed, PastFailure
from elasticd.policy.costs import Costs, Measured, costs, saved_by_checkpoint, saved_by_dropping, worth_dropping
from elasticd.policy.decisions import Action
from elasticd.policy.failures import FailureClass
from elasticd.policy.report import came_to, counterfactual, duration, told
from elasticd.policy.settings import Settings

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("checkpoint", "restart", "detect", "interval", "restart_from", "checkpoint_from"),
    [
        (40, 180, 600, 1800, 0.131, 0.044),
        (40, 180, 600, 1518, 0.143, 0.053),
        (40, 600, 600, 1800, 0.305, 0.044),
        (40, 180, 60, 1800, 0.193, 0.044),
        (10, 180, 600, 300, 0.204, 0.067),
        (40, 180, 60, 300, 0.564, 0.267),
    ],
)
def test_probabilities_from_which_on_it_is_worth_it(
    checkpoint: float, restart: float, detect: float, interval: float, restart_from: float, checkpoint_from: float
) -> None:
    own = costs(Measured(checkpoints=(checkpoint,), restarts=(restart,), detections=(detect,), intervals=(interval,)), Settings())
    assert own.restart_from == pytest.approx(restart_from, abs=0.0006)
    assert own.checkpoint_from == pytest.approx(checkpoint_from, abs=0.0006)
    assert own.guessed == ()


@pytest.mark.parametrize(("slow", "minutes"), [(0.05, 73), (0.1, 37), (0.2, 18)])
def test_a_slow_down_pays_after(slow: float, minutes: float) -> None:
    own = Costs(checkpoint_s=40.0, restart_s=180.0, lost_s=900.0, detect_s=600.0)
    assert own.pays_after(slow) / 60.0 == pytest.approx(minutes, abs=0.5)
    assert own.pays_after(0.0) == math.inf


def test_medians_of_what_was_measured_and_the_settings_for_the_rest() -> None:
    own = costs(Measured(checkpoints=(1.0, 100.0, 2.0), restarts=(math.nan, -1.0)), Settings(), since_checkpoint_s=7.0)
    assert (own.checkpoint_s, own.restart_s, own.lost_s, own.detect_s) == (2.0, 180.0, 7.0, 600.0)
    assert own.guessed == ("R", "D")


def test_nothing_to_lose_makes_no_checkpoint_worth_it() -> None:
    assert costs(Measured(), Settings(), since_checkpoint_s=0.0).checkpoint_from == math.inf


@pytest.mark.parametrize(
    ("slow", "nodes", "spare", "worth"),
    [(0.15, 8, 0, True), (0.14, 8, 0, False), (0.017, 64, 0, True), (0.9, 2, 0, False), (1.1, 2, 0, True), (9.0, 1, 0, False), (0.01, 1, 1, True)],
)
def test_a_node_is_dropped_from_one_over_n_minus_one(slow: float, nodes: int, spare: int, worth: bool) -> None:
    assert worth_dropping(slow, nodes, spare) is worth


def test_what_it_saved() -> None:
    assert told(Action.RESTART, saved_s=719.6, cost_s=0.4) == "this restart saved about 12 min, cost 0.4 s"
    assert saved_by_checkpoint(failed_at=900.0, taken_at=800.0, before_at=200.0, cost_s=1.0) == 599.0
    assert saved_by_checkpoint(failed_at=700.0, taken_at=800.0, before_at=200.0, cost_s=1.0) == -1.0
    assert saved_by_dropping(before_step_s=1.2, after_step_s=1.0, steps=100, took_s=3.0) == pytest.approx(17.0)
    assert told(Action.EXCLUDE, saved_s=-1.0, cost_s=3.0) == "this exclude has saved nothing so far, cost 3.0 s"


COSTS = {"C_s": 1.0, "R_s": 9.0, "L_s": 300.0, "D_s": 600.0}


@pytest.mark.parametrize(
    ("action", "numbers", "now", "words"),
    [
        (Action.CHECKPOINT, COSTS, {}, "cost 1.0 s at most; no failure has followed"),
        (Action.CHECKPOINT, COSTS, {"failed_at": 1200.0}, "this checkpoint saved about 5 min, cost 1.0 s"),
        (Action.RESTART, COSTS, {}, "cost about 10 s; the failure that it was to forestall would have cost about 15 min"),
        (Action.EXCLUDE, COSTS, {}, "cost about 10 s; the failure that it was to forestall would have cost about 15 min"),
        (
            Action.EXCLUDE,
            {**COSTS, "slowdown": 0.2, "step": 500.0, "step_s": 1.2},
            {"step": 1100, "step_s": 1.0},
            "this exclude saved about 110 s, cost 10 s",
        ),
        (
            Action.EXCLUDE,
            {**COSTS, "slowdown": 0.2, "step": 500.0, "step_s": 1.2},
            {"step": 510, "step_s": 1.0},
            "this exclude has saved nothing so far, cost 10 s",
        ),
        (Action.EXCLUDE, {**COSTS, "slowdown": 0.2, "step": 500.0, "step_s": 1.2}, {}, ""),
        (Action.ROLLBACK, {"step": 4.0}, {}, ""),
    ],
)
def test_what_an_action_came_to_by_now(action: Action, numbers: dict[str, float], now: dict[str, Any], words: str) -> None:
    assert came_to(action, numbers, at=1000.0, **{"failed_at": None, **now}) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0.4 s"), (60.0, "60 s"), (720.0, "12 min"), (36000.0, "10.0 h")])
def test_durations_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_what_would_have_been_done_and_what_followed() -> None:
    deeds = [Deed(at=1000.0 * one, action=Action.RESTART, about="a", fingerprint="a", node="n1", done=False, cost_s=2.0) for one in (1, 50, 100)]
    real = Deed(at=2000.0, action=Action.CHECKPOINT, about="a", fingerprint="a", cost_s=0.5)
    end = 40 * 3600.0
    (shadow,) = counterfactual([*deeds, real], [], since=0.0, now=end, followed_s=3600.0)
    assert str(shadow) == "would have restarted 3 times in 40 h, 0 followed by a failure"
    assert shadow.cost_s == 6.0
    failures = [
        PastFailure(at=50_100.0, cls=FailureClass.UNKNOWN, kind="x", node="n1"),
        PastFailure(at=100_100.0, cls=FailureClass.UNKNOWN, kind="x", node="n2"),
    ]
    assert counterfactual(deeds, failures, since=0.0, now=end, followed_s=3600.0)[0].followed == 1
    (done,) = counterfactual([*deeds, real], failures, since=0.0, now=end, followed_s=3600.0, done=True)
    assert str(done) == "made 1 early checkpoint in 40 h, 0 followed by a failure"
