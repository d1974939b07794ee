"""The loops of Lightning and transformers under real agents: nodes join, leave and lose a worker, and every sample is counted."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.nodes import now
from tests.support.ledger import count

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeNodes
    from tests.support.etcd import Server

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("framework.py")
SAMPLES, EPOCHS, STEPS_AN_EPOCH = 480, 12, 20


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_framework_loop_survives_a_join_a_killed_worker_and_a_leaver_with_every_sample_once(server: Server, make_nodes: MakeNodes, framework: str) -> None:
    """1 -> 2 -> a worker is killed -> 2 -> 1: the samples of each epoch once, one step at most done again, and all epochs done."""
    pytest.importorskip({"lightning": "lightning", "transformers": "transformers"}[framework])
    env = {"SAMPLES": str(SAMPLES), "BATCH": "24", "EPOCHS": str(EPOCHS), "STEP_TIME": "0.1", "PYTHONPATH": str(ROOT)}
    settings = {"snapshot_every": 1, "checkpoint_every_s": 0.0}
    nodes = make_nodes(
        [server.endpoint],
        argv=[sys.executable, "-u", str(SCRIPT), framework],
        env=env,
        trainer_file=settings,
        stop_grace=30.0,
        min_nodes=1,
        max_nodes=2,
        desired=2,
        max_restarts=20,
    )
    begun = now()
    nodes.start("a")
    nodes.stepping(1, after=begun, within=90)
    joined = now()
    nodes.start("b")
    nodes.stepping(2, after=joined, within=90)
    killed = now()
    os.kill(nodes.workers("b")[0], signal.SIGKILL)
    nodes.stepping(2, after=killed, within=90)
    left = now()
    nodes.processes["a"].terminate()
    nodes.stepping(1, after=left, within=90)
    assert nodes.wait("a") == 0
    assert nodes.wait("b", within=120.0) == 0, nodes.story()
    counted = count(nodes.steps(), samples=SAMPLES)
    assert (counted.steps, counted.repeated, counted.missed) == (EPOCHS * STEPS_AN_EPOCH, 0, 0)
    assert sum(counted.lost) <= 1, counted
    (result,) = [json.loads(path.read_text()) for path in nodes.out.glob("result-*.json")]
    assert result["step"] == EPOCHS * STEPS_AN_EPOCH
