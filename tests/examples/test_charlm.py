"""examples/charlm.py: it trains, is stopped, goes on where it was, and learns; that it beats a trigram model takes the minutes of its full size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "charlm.py"
SMALL = ["--megabytes", "0.2", "--width", "32", "--layers", "1", "--length", "32", "--report-every", "5"]


def train(folder: Path, steps: int) -> str:
    """Run it to that step, alone; what it said."""
    command = [sys.executable, str(EXAMPLE), "--out", str(folder / "out"), "--steps", str(steps), *SMALL]
    env = {**os.environ, "ELASTICD_TRAINER_CHECKPOINT_DIR": str(folder / "checkpoints"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_it_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    said = train(tmp_path, 40)
    first = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (first["steps"], first["world_size"]) == (40, 1)
    assert first["trigram_loss"] < first["loss"] < 4.0, "less than the 4.85 of a guess; a full run gets below the trigram model"
    assert "goes on" not in said
    assert "goes on from step 40" in train(tmp_path, 40)
