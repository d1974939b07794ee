"""examples/run_digits.py, the demonstration behind `make run`: it shows a real kill, and fails where the job did not survive it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def demonstrate(directory: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "run_digits.py"), "--out", str(directory / "run"), "--timeout", str(timeout - 20)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)


def stand_in(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run the demonstration with `code` in the place of elasticctl: it has `out`, the --out of the run, and `summary`."""
    interpreter = directory / "bin" / "python"
    interpreter.parent.mkdir()
    elasticctl = directory / "bin" / "elasticctl"
    head = f"#!{sys.executable}\nimport json, os, pathlib, subprocess, sys, time\nout = pathlib.Path(sys.argv[-1])\n"
    elasticctl.write_text(head + textwrap.dedent(WORKER) + textwrap.dedent(code))
    elasticctl.chmod(0o755)
    program = f"import sys; sys.executable = {str(interpreter)!r}; sys.path.insert(0, {str(EXAMPLES)!r}); import run_digits; sys.exit(run_digits.main())"
    command = [sys.executable, "-c", program, "--out", str(directory / "run"), "--timeout", "5"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


WORKER = """
def start_worker():
    child = subprocess.Popen(["sleep", "50"], stdout=subprocess.DEVNULL)
    (out / "rank-1.pid").write_text(str(child.pid))
    (out / "checkpoint.pt").touch()
    return child

def finish(**result):
    (out / "result.json").write_text(json.dumps({"accuracy": result.pop("accuracy", 0.97), "world_size": 2, "steps": 330}))
    summary = {"result": "succeeded", "generations": [{"number": 1}, {"number": 2}]} | result
    (out / "summary.json").write_text(json.dumps(summary))

first = start_worker()
print("step 100 loss 0.5", flush=True)
"""
REPLACE = "first.wait()\nsecond = start_worker()\nprint('step 110 loss 0.4', flush=True)\nsecond.kill()\nsecond.wait()\n"


@pytest.mark.timeout(300)
def test_a_worker_killed_on_the_way_is_replaced_and_the_job_reaches_its_accuracy(tmp_path: Path) -> None:
    """The main job, as `make run` runs it: real etcd, two nodes, real kill."""
    done = demonstrate(tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with SIGKILL" in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"] >= 0.95
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["result"] == "succeeded"


def test_it_succeeds_where_the_worker_is_replaced(tmp_path: Path) -> None:
    done = stand_in(tmp_path, REPLACE + "finish()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ">>> result succeeded, 2 generations, 330 steps, test accuracy 0.9700" in done.stdout


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param("first.wait()\nprint('step 110 loss 0.4', flush=True)\nfinish()", "no worker took the place of rank 1", id="not replaced"),
        pytest.param("first.wait()\nsys.exit(1)", "no worker took the place of rank 1", id="job dies with the worker"),
        pytest.param(REPLACE + "finish(generations=[{'number': 1}])", "there was one generation", id="one generation"),
        pytest.param(REPLACE + "finish(accuracy=0.94)", "the test accuracy is 0.9400, below 0.95", id="accuracy"),
        pytest.param(REPLACE + "finish(result='failed')", "the result is 'failed', not 'succeeded'", id="result"),
        pytest.param(REPLACE + "finish()\nsys.exit(3)", "elasticctl exited with 3", id="exit code"),
        pytest.param(REPLACE, "the run left no", id="no summary"),
        pytest.param("first.wait()\ntime.sleep(100)", "the job was not done after 5 s", id="hangs"),
    ],
)
def test_it_fails_and_says_why(tmp_path: Path, code: str, reason: str) -> None:
    done = stand_in(tmp_path, code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f">>> failed: {reason}" in done.stdout


def test_it_removes_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in ("result.json", "summary.json", "rank-0.pid", "mine.txt"):
        (out / name).write_text("{}")
    done = stand_in(tmp_path, REPLACE)
    assert "the run left no" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.pt", "mine.txt", "rank-1.pid"]
