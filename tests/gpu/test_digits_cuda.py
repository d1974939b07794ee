"""What touches a GPU so far: the example on CUDA with NCCL, under elasticctl. Run by `make test-gpu`; docs/gpu-status.md says when it last was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_example_trains_on_a_gpu_under_elasticctl(tmp_path: Path) -> None:
    """One node with one worker on one device: NCCL forms its group over the store that the agent serves."""
    command = [str(Path(sys.executable).with_name("elasticctl")), "run", "--nodes", "1", "--summary", str(tmp_path / "summary.json")]
    command += ["--", str(ROOT / "examples" / "digits.py"), "--out", str(tmp_path), "--device", "cuda", "--step-time", "0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads((tmp_path / "result.json").read_text())["accuracy"] >= 0.95
    assert json.loads((tmp_path / "summary.json").read_text())["result"] == "succeeded"
