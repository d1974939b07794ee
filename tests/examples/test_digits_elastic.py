"""examples/digits_elastic.py: how little it differs from the plain script, and what it gains under stock torchrun."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.etcd import await_

pytestmark = pytest.mark.timeout(120)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 330  # 15 epochs of 22


def lines(name: str) -> list[str]:
    """Of the script below its docstring, without indentation and blank lines."""
    source = (EXAMPLES / name).read_text()
    first = ast.parse(source).body[0].end_lineno or 0
    return [line.strip() for line in source.splitlines()[first:] if line.strip()]


def test_five_places_make_the_plain_script_elastic() -> None:
    """Places where lines were added or changed; lines that are no longer needed do not count."""
    plain, elastic = lines("digits.py"), lines("digits_elastic.py")
    changes = [code for code in difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes() if code[0] in {"replace", "insert"}]
    added = [line for _, _, _, begin, end in changes for line in elastic[begin:end]]
    assert len(changes) <= 5, added
    assert len(added) <= 8, added
    assert len(elastic) < len(plain)


def torchrun(folder: Path, count: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(EXAMPLES / "digits_elastic.py")]
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--out", str(folder / "out"), *options], cwd=folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def test_it_goes_on_where_sigterm_stopped_it_with_another_world_and_reaches_its_accuracy(tmp_path: Path) -> None:
    job = torchrun(tmp_path, 2, "--step-time", "0.02")
    try:
        await_(lambda: "step 50 loss" in (tmp_path / "log").read_text(), within=60, what="step 50")
        os.kill(int((tmp_path / "out/rank-1.pid").read_text()), signal.SIGTERM)
        assert job.wait(60) != 0
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(40)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    stopped = int(re.fullmatch(r"step-(\d+)\.g1", checkpoint.name).group(1))  # type: ignore[union-attr]
    assert 50 <= stopped < STEPS
    (tmp_path / "log").unlink()
    job = torchrun(tmp_path, 1, "--step-time", "0")
    assert job.wait(90) == 0, (tmp_path / "log").read_text()
    assert min(map(int, re.findall(r"step (\d+) loss", (tmp_path / "log").read_text()))) == (stopped // 10 + 1) * 10
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["accuracy"] >= 0.95
    assert result == {"accuracy": result["accuracy"], "world_size": 1, "steps": STEPS}
