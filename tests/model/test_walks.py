"""Random walks over the real decisions: nothing that the rules forbid happens, and in the end the job trains. `make soak` runs millions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.model.faults import GENERAL, MIXES, draw
from tests.model.run import describe, main, shrink, walk
from tests.model.taken_out import TAKEN_OUT

pytestmark = pytest.mark.timeout(300)

CHUNK = 220


@pytest.mark.parametrize("first", [chunk * CHUNK for chunk in range(8)])
def test_whatever_goes_wrong_the_rules_hold_and_the_job_goes_on(first: int) -> None:
    """The failing walk is printed with what is left of its faults."""
    formed = 0
    for seed in range(first, first + CHUNK):
        done = walk(seed, draw(seed))
        formed += done.generations
        assert done.kind is None, describe(shrink(done))
    assert formed > CHUNK, "walks in which nothing happens prove nothing"


@pytest.mark.parametrize("nodes", [1, 6])
def test_it_holds_for_a_lone_node_and_for_six(nodes: int) -> None:
    mixes = [mix for mix in sorted(set(GENERAL)) if not MIXES[mix].calm]
    for seed in range(60):
        done = walk(seed, draw(seed, mixes[seed % len(mixes)], nodes=(nodes, nodes)))
        assert done.kind is None, describe(shrink(done))


def test_a_seed_is_replayed_exactly_in_another_process() -> None:
    """Whatever the hashes of strings are there."""
    seed = next(seed for seed in range(100) if len(draw(seed).faults) > 4)
    command = [sys.executable, "-m", "tests.model.run", "--seed", str(seed), "--trace"]
    told = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True).stdout for hashes in ("1", "2")
    }
    assert len(told) == 1
    assert "generation 1 active" in told.pop()


def test_a_broken_walk_is_shrunk_to_the_faults_that_matter() -> None:
    """Without its rule, one cut is enough for two generations to train; the rest of the storm goes."""
    rules = next(one.rules for one in TAKEN_OUT if one.number == "15, hold")
    stormy = ((seed, scenario) for seed in range(2000) if len((scenario := draw(seed, "apart")).faults) > 3)
    broken = next(done for seed, scenario in stormy if (done := walk(seed, scenario, rules)).kind == "both_train")
    small = shrink(broken, rules)
    assert small.kind == "both_train"
    assert len(small.scenario.faults) < len(broken.scenario.faults)
    assert any("!! both_train" in line for line in small.lines)


def test_the_command_tells_what_it_walked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:30", "--nodes", "2..3"]) == 0
    assert "30 walks" in capsys.readouterr().out


def test_real_bytes_make_no_difference_to_the_checker() -> None:
    """One walk in sixteen has every member parse for itself, from listings and watches."""
    for seed in range(0, 16 * 12, 16):
        scenario = draw(seed)
        assert scenario.exact
        done, quick = walk(seed, scenario), walk(seed, replace(scenario, exact=False))
        assert done.kind is None, describe(shrink(done))
        assert quick.kind is None, describe(shrink(quick))
