"""examples/digits.py under stock torchrun: it needs nothing of this project, so neither do these tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
STEPS = 330  # 15 epochs of 22


def torchrun(out: Path, *options: str, script_options: tuple[str, ...] = ("--step-time", "0")) -> subprocess.Popen[str]:
    """Start the example on two local ranks; `out.log` beside it holds what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command += [str(SCRIPT), "--out", str(out), *script_options]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True)


def printed(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def wait_until(condition: Callable[[], bool], out: Path, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, printed(out)
        time.sleep(0.05)


def end(job: subprocess.Popen[str]) -> None:
    """Leave no torchrun behind where a test fails: on SIGTERM it ends its workers."""
    if job.poll() is None:
        job.terminate()
        job.wait(40)


def test_it_reaches_its_accuracy_and_does_not_train_again_when_run_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for _ in range(2):
        job = torchrun(out)
        try:
            assert job.wait(90) == 0, printed(out)
        finally:
            end(job)
    result = json.loads((out / "result.json").read_text())
    assert result["accuracy"] >= 0.95
    assert result == {"accuracy": result["accuracy"], "world_size": 2, "steps": STEPS}
    log = printed(out)
    assert log.count(f"step {STEPS} loss") == 1
    assert log.count(f"resumed at step {STEPS}\n") == 1
    assert log.count(f"test accuracy {result['accuracy']:.4f}\n") == 2


def test_it_goes_on_from_its_checkpoint_after_a_worker_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = torchrun(out, "--max-restarts", "0", script_options=("--step-time", "0.02"))
    try:
        wait_until(lambda: "step 100 loss" in printed(out), out)
        os.kill(int((out / "rank-1.pid").read_text()), signal.SIGKILL)
        assert job.wait(60) != 0
    finally:
        end(job)
    assert not (out / "result.json").exists()
    job = torchrun(out)
    try:
        assert job.wait(60) == 0, printed(out)
    finally:
        end(job)
    (resumed,) = map(int, re.findall(r"resumed at step (\d+)", printed(out)))
    assert 100 <= resumed < STEPS
    assert resumed % 10 == 0
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == STEPS
    assert result["accuracy"] >= 0.95


def test_it_resumes_a_checkpoint_that_another_world_size_wrote(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for world_size in ("2", "1"):
        epochs = {"2": "5", "1": "6"}[world_size]
        job = torchrun(out, "--nproc-per-node", world_size, script_options=("--step-time", "0", "--epochs", epochs))
        try:
            assert job.wait(90) == 0, printed(out)
        finally:
            end(job)
    assert "resumed at step 110" in printed(out)
    result = json.loads((out / "result.json").read_text())
    assert result["world_size"] == 1
    assert result["steps"] == 132


def test_it_imports_nothing_of_this_project() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='read'); sys.exit(', '.join({'elasticd', 'trainer', 'detectors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""
