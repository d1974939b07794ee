"""From a simulated drift to what is done about it: a checkpoint first, one restart when it holds on, and nothing where nothing is wrong."""

from __future__ import annotations

import pytest

from bench._detectors_numeric import _noise
from bench._detectors_policy import acted
from bench._detectors_simulation import PER_HOUR, WIDTH, benign, drift, straggle
from detectors.findings import Certainty
from elasticd.policy.decisions import DISRUPTIVE, Action
from elasticd.policy.settings import Mode, Settings

pytestmark = pytest.mark.timeout(240)
HOURS = 6.5
BEGINS = round(5.5 * PER_HOUR)
SEED = 777_004
"""A job whose drift the forest sees, and the comparison of ranks does not."""


def test_a_joint_drift_that_only_the_forest_sees_brings_a_checkpoint_then_one_restart() -> None:
    job = benign(_noise(), SEED, hours=HOURS, rescales=False)
    drift(job, kind="link", rank=1, first=BEGINS, last=BEGINS + 360)
    outcome = acted(list(job.measured()), every=1e9)
    assert [one.detector for one in outcome.findings if one.certainty is not Certainty.WEAK] == []
    assert [one.action for one in outcome.decisions] == [Action.CHECKPOINT, Action.RESTART]
    saved, restarted = outcome.decisions
    assert saved.at < restarted.at
    assert {(one.node, one.ranks) for one in outcome.decisions} == {("node-0", (1,))}
    assert "it has held for" in restarted.why
    assert restarted.agreed, "at a step that all ranks agree on"
    assert not restarted.certain


def test_in_shadow_the_same_drift_changes_nothing() -> None:
    job = benign(_noise(), SEED, hours=HOURS, rescales=False)
    drift(job, kind="link", rank=1, first=BEGINS, last=BEGINS + 360)
    assert acted(list(job.measured()), Settings(mode=Mode.SHADOW)).decisions == ()


def test_a_slow_rank_of_eight_nodes_is_left_out_and_one_of_two_is_borne() -> None:
    for layout, left_out in (((8, 1), True), ((2, 2), False)):
        job = benign(_noise(), 777_100, hours=1.5, layout=layout, rescales=False)
        straggle(job, rank=1, share=0.3, at=200.0)
        outcome = acted(list(job.measured()))
        excluded = outcome.of(Action.EXCLUDE)
        assert bool(excluded) is left_out
        if excluded:
            assert excluded[0].node == "node-1"
            assert excluded[0].at > job.began + 200 * WIDTH


def test_nothing_stops_a_job_in_which_nothing_is_wrong() -> None:
    for seed in (777_200, 777_201):
        assert acted(list(benign(_noise(), seed, hours=4.0).measured())).of(*DISRUPTIVE) == ()
