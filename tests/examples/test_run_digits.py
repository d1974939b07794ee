"""examples/run_digits.py, the demonstration behind `make run`: it shows a real kill, join and drain, counts, and fails where the count is not clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from examples.digits_count import Line, Witnesses, count
from tests.support.ledger import count as count_again

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLEAN = "0 steps lost, 0 samples repeated, 0 missed"


# --- the real thing ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_kill_a_join_and_a_drain_cost_no_step_and_no_sample(tmp_path: Path) -> None:
    """The main job, as `make run` runs it: real etcd, two nodes and a third one, real signals."""
    command = [sys.executable, str(EXAMPLES / "run_digits.py"), "--out", str(tmp_path / "run"), "--timeout", "200"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=230, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f": {CLEAN}\n")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"] >= 0.95
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["result"] == "succeeded"
    lines = [json.loads(line) for path in (tmp_path / "run").glob("samples-*.jsonl") for line in path.read_text().splitlines()]
    counted = count_again([line for line in lines if line["ids"]], samples=1347)
    assert (counted.steps, sum(counted.lost), counted.repeated, counted.missed) == (264, 0, 0, 0)
    worlds = {line["generation"]: line["world"] for line in lines}
    assert [world for _, world in sorted(worlds.items())] == [2, 2, 3, 2]


# --- a stand-in, which does not always do what it should ------------------------------------------------------------------


STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, signal, subprocess, sys, time

out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
pids, at = [], 0  # of the workers; the step they are at

def begin(*, orderly=True):
    if "--etcd" in sys.argv:  # the third node
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
        (out / "joined").touch()
        signal.sigwait({{signal.SIGTERM}})
        print("left in order" if orderly else "oh", flush=True)
        (out / "left").touch()
        sys.exit(143)
    print("another node joins by: elasticctl run --etcd here -- counted_digits.py --out", out, flush=True)

def note(generation, world, *, extra=()):
    epoch, step = divmod(at, 22)
    ids = [*range(64 * step, min(64 * step + 64, 1347)), *extra]
    for rank in range(world):
        line = {{"generation": generation, "world": world, "rank": rank, "step": at, "epoch": epoch, "ids": ids[rank::world], "at": time.time()}}
        with (out / f"samples-{{rank}}-{{pids[rank]}}.jsonl").open("a") as file:
            file.write(json.dumps(line) + chr(10))

def killed():
    global at, pids
    worker = subprocess.Popen(["sleep", "50"], stdout=subprocess.DEVNULL)
    pids = [1, worker.pid]
    while worker.poll() is None:
        note(1, 2)
        at += 1
        time.sleep(0.1 if at > 40 else 0)
    at -= 1

def train(generation, world, *, until, again=0, **wrong):
    global at, pids
    pids = [1000 * generation + rank for rank in range(world)]
    at -= again
    while at < until:
        note(generation, world, **wrong)
        at, wrong = at + 1, {{}}

def wait_for(name):
    while not (out / name).exists():
        time.sleep(0.01)

def replaced(**wrong):
    train(2, 2, until=66, **wrong)

def joined():
    wait_for("joined")
    train(3, 3, until=88)  # four epochs

def drained(**wrong):
    wait_for("left")
    train(4, 2, until=264, **wrong)

def finish(*, accuracy=0.97, steps=264, result="succeeded"):
    (out / "result.json").write_text(json.dumps({{"accuracy": accuracy, "world_size": 2, "steps": steps}}))
    (out / "summary.json").write_text(json.dumps({{"result": result}}))

"""
STORY = "begin(); killed(); replaced(); joined(); drained(); "


def stand_in(directory: Path, code: str, *, timeout: float = 40) -> subprocess.CompletedProcess[str]:
    """Run the demonstration with `code` in the place of elasticctl, for the job and for the third node."""
    interpreter = directory / "bin" / "python"
    interpreter.parent.mkdir()
    elasticctl = directory / "bin" / "elasticctl"
    elasticctl.write_text(STAND_IN + textwrap.dedent(code) + "\n")
    elasticctl.chmod(0o755)
    program = f"import sys; sys.executable = {str(interpreter)!r}; sys.path.insert(0, {str(EXAMPLES)!r}); import run_digits; sys.exit(run_digits.main())"
    command = [sys.executable, "-c", program, "--out", str(directory / "run"), "--timeout", str(timeout)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)


def test_it_succeeds_where_all_went_well(tmp_path: Path) -> None:
    done = stand_in(tmp_path, STORY + "finish()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ">>> result succeeded, test accuracy 0.9700\n" in done.stdout
    assert "264 steps by 4 generations, 12 epochs of 1347 samples\n" in done.stdout
    assert done.stdout.endswith(f": {CLEAN}\n")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param("begin(); sys.exit(1)", "nobody was killed, as rank 1 was not seen in a step after 40: elasticctl ended with 1", id="never began"),
        pytest.param("begin(); killed(); sys.exit(1)", "no worker took the place of rank 1, pid", id="dies with the worker"),
        pytest.param("begin(); killed(); train(2, 1, until=100); sys.exit()", "no worker took the place of rank 1, pid", id="goes on without it"),
        pytest.param("begin(); killed(); replaced(); sys.exit()", "three nodes never trained together", id="nobody joins"),
        pytest.param("begin(); killed(); replaced(); joined(); sys.exit()", "the third node was drained, but no two went on", id="ends with the drain"),
        pytest.param(STORY.replace("begin()", "begin(orderly=False)") + "finish()", "the third node did not leave in order", id="disorderly"),
        pytest.param(STORY.replace("replaced()", "replaced(again=2)") + "finish()", "2 steps lost, 0 samples repeated, 0 missed", id="lost"),
        pytest.param(STORY.replace("drained()", "drained(extra=[1, 2, 3])") + "finish()", "0 steps lost, 3 samples repeated, 0 missed", id="repeated"),
        pytest.param(STORY.replace("drained()", "drained(again=-1)") + "finish(steps=263)", "0 steps lost, 0 samples repeated, 64 missed", id="left out"),
        pytest.param(STORY + "finish(accuracy=0.94)", "the test accuracy is 0.9400, below 0.95", id="accuracy"),
        pytest.param(STORY + "finish(steps=265)", "the job says that it made 265 steps, and 264 were counted", id="steps"),
        pytest.param(STORY + "finish(result='failed')", "the result is 'failed', not 'succeeded'", id="result"),
        pytest.param(STORY + "finish(); sys.exit(3)", "elasticctl exited with 3", id="exit code"),
        pytest.param(STORY, "the run left no", id="no summary"),
    ],
)
def test_it_fails_and_says_why(tmp_path: Path, code: str, reason: str) -> None:
    done = stand_in(tmp_path, code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f">>> failed: {reason}" in done.stdout


def test_it_ends_a_job_that_hangs(tmp_path: Path) -> None:
    done = stand_in(tmp_path, "begin(); (out / 'pid').write_text(str(os.getpid())); time.sleep(100)", timeout=3)
    assert done.returncode == 1, done.stdout + done.stderr
    assert ">>> failed: nobody was killed, as rank 1 was not seen in a step after 40: not within 3 s\n" in done.stdout
    assert not Path("/proc", (tmp_path / "run" / "pid").read_text()).exists()


def test_it_removes_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in ("result.json", "summary.json", "rank-0.pid", "samples-0-1.jsonl", "mine.txt"):
        (out / name).write_text("{}")
    done = stand_in(tmp_path, "begin()")
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt"]


# --- the counting --------------------------------------------------------------------------------------------------------


def wrote(generation: int, step: int, ids: tuple[int, ...], *, rank: int = 0) -> Line:
    """A line; an epoch has two steps."""
    return Line(generation=generation, world=2, rank=rank, step=step, epoch=step // 2, ids=ids, at=0.0, pid=10 * generation + rank)


def ended(generation: int, step: int, *, rank: int = 0) -> Line:
    return wrote(generation, step, (), rank=rank)


A, B, C, D = (wrote(1, step, ids) for step, ids in enumerate([(0, 1), (2, 3), (3, 1), (0, 2)]))
AGAIN_B, AGAIN_C, AGAIN_D = (wrote(2, step, ids) for step, ids in enumerate([(2, 3), (3, 1), (0, 2)], start=1))


@pytest.mark.parametrize(
    ("lines", "lost", "repeated", "missed"),
    [
        pytest.param([D, B, A, C, ended(1, 4)], 0, 0, 0, id="nothing happened"),
        pytest.param([A, B, C, AGAIN_C, AGAIN_D], 0, 0, 0, id="killed in a step, which is done again"),
        pytest.param([A, B, ended(1, 2), AGAIN_C, AGAIN_D], 0, 0, 0, id="stopped in order"),
        pytest.param([A, B, AGAIN_B, AGAIN_C, AGAIN_D], 0, 0, 0, id="a step that nobody had finished"),
        pytest.param([A, B, C, AGAIN_B, AGAIN_C, AGAIN_D], 1, 0, 0, id="a rank had begun the next step"),
        pytest.param([A, B, ended(1, 2, rank=1), AGAIN_B, AGAIN_C, AGAIN_D], 1, 0, 0, id="a rank says that it had finished the step"),
        pytest.param([A, B, C, wrote(2, 0, (1, 3)), wrote(2, 1, (0, 2)), AGAIN_C, AGAIN_D], 2, 0, 0, id="from the very beginning, in another order"),
        pytest.param([A, B, C, AGAIN_C, AGAIN_D, wrote(3, 3, (0, 2))], 0, 0, 0, id="two kills"),
        pytest.param([A, B, C, AGAIN_B, AGAIN_C, AGAIN_D, wrote(3, 2, (1, 3)), wrote(3, 3, (0, 2))], 2, 0, 0, id="two kills, both with a loss"),
        pytest.param([A, wrote(1, 0, (1,), rank=1), B, C, D], 0, 1, 0, id="two ranks had one sample"),
        pytest.param([A, wrote(1, 1, (0, 2, 3)), C, D], 0, 1, 0, id="two steps of an epoch had one sample"),
        pytest.param([A, wrote(1, 1, (2,)), C, D], 0, 0, 1, id="nobody had a sample"),
        pytest.param([A, B, wrote(1, 2, (3, 3)), D], 0, 1, 1, id="one in the place of another"),
        pytest.param([A, B, ended(1, 2), AGAIN_D], 0, 0, 2, id="a step was left out"),
        pytest.param([A, B], 0, 0, 4, id="an epoch was left out"),
        pytest.param([], 0, 0, 8, id="nothing was done"),
    ],
)
def test_steps_and_samples_are_counted_along_the_generations(lines: list[Line], lost: int, repeated: int, missed: int) -> None:
    counted = count(lines, epochs=2, samples=4)
    assert (counted.lost, counted.repeated, counted.missed) == (lost, repeated, missed)
    assert counted.clean == (lost == repeated == missed == 0)
    assert counted.steps == len({line.step for line in lines if line.ids})
    assert str(counted) == f"{lost} steps lost, {repeated} samples repeated, {missed} missed"


def text(step: int, *, rank: int = 0, generation: int = 1, world: int = 2, **others: Any) -> str:
    return json.dumps({"generation": generation, "world": world, "rank": rank, "step": step, "epoch": 0, "ids": [step], "at": 0.0} | others) + "\n"


def test_a_line_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    witnesses = Witnesses(tmp_path)
    path = tmp_path / "samples-0-77.jsonl"
    path.write_text(text(0) + text(1)[:20])
    witnesses.read()
    witnesses.read()
    assert [(line.step, line.pid) for line in witnesses.lines] == [(0, 77)]
    path.write_text(text(0) + text(1) + text(2)[:1])
    (tmp_path / "samples-1-78.jsonl").write_text(text(5, rank=1, ids=[]))
    witnesses.read()
    assert sorted((line.step, line.rank, line.ids, line.pid) for line in witnesses.lines) == [(0, 0, (0,), 77), (1, 0, (1,), 77), (5, 1, (), 78)]


@pytest.mark.parametrize(
    ("lines", "trains"),
    [
        pytest.param([text(step, rank=rank) for rank in (1, 0) for step in range(7, 18)], True, id="ten steps on"),
        pytest.param([text(step, rank=rank) for rank in (1, 0) for step in range(7, 17)], False, id="just begun"),
        pytest.param([text(step, rank=rank, world=3) for rank in (1, 0, 2) for step in range(7, 18)], False, id="another world"),
        pytest.param([text(step, rank=rank, generation=0) for rank in (1, 0) for step in range(7, 18)], False, id="an earlier world"),
    ],
)
def test_a_world_trains_when_it_has_come_some_steps_far(tmp_path: Path, lines: list[str], trains: bool) -> None:
    witnesses = Witnesses(tmp_path)
    (tmp_path / "samples-0-77.jsonl").write_text("".join(lines))
    witnesses.read()
    assert [(line.rank, line.step) for line in witnesses.trains(2, after=0)] == ([(0, 7), (1, 7)] if trains else [])
    assert witnesses.trains(2, after=1) == []
