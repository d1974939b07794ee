"""bench.recovery: its arithmetic on made-up logs, the shape of its result, and one real run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import recovery
from bench._common import Row, paired_ratio, print_table, ratio, write_json
from bench._recovery_timeline import Phases, Worker, generations, phases, read_workers, stepping, without_startup
from bench.recovery import Outcome, Plan, Results
from tests.support.etcd import await_

ROOT = Path(__file__).resolve().parents[2]
EVENT = 1_800_000_000.0


def line(at: float, event: str, **more: Any) -> dict[str, Any]:
    return {"time": datetime.fromtimestamp(EVENT + at, UTC).isoformat(), "event": event, **more}


def worker(rank: int, *marks: float, world: int = 2, pid: int = 0) -> Worker:
    names = ("process", "imported", "group", "ddp", "step")
    return Worker(pid=pid or 100 + rank, parent=1, rank=rank, world=world, marks={name: EVENT + at for name, at in zip(names, marks, strict=False)})


# A worker of b dies; a is told by a proposal; b's new worker imports torch last, and a's steps last.
KILL_LOGS = {
    "a": [
        line(-9.0, "workers_started", generation=1, pids=[10]),
        line(0.07, "decision", text="proposing 2 (kill): worker_failed of b"),
        line(0.10, "directive", action="stop"),
        line(0.25, "workers_stopped", generation=1),
        line(0.30, "generation_formed", generation=2),
        line(0.31, "workers_started", generation=2, pids=[100]),
    ],
    "b": [
        line(-9.0, "generation_formed", generation=1),
        line(0.05, "worker_failed", generation=1),
        line(0.06, "workers_stopped", generation=1),
        line(0.28, "generation_formed", generation=2),
        line(0.29, "workers_started", generation=2, pids=[101]),
    ],
}
KILL_WORKERS = [worker(0, 0.32, 1.3, 2.01, 3.0, 3.1), worker(1, 0.30, 2.0, 2.01, 2.9, 3.05)]


def approx(**seconds: float) -> dict[str, Any]:
    return {name: pytest.approx(seconds.get(name, 0.0), abs=1e-5) for name in Phases.names()}


def test_a_recovery_is_cut_where_the_last_node_passed() -> None:
    """Each phase ends with the last node or rank that passes it, and together they are the total."""
    cut = phases("worker_kill", EVENT, KILL_LOGS, KILL_WORKERS)
    told = approx(detect=0.05, agree=0.05 + 0.05, stop=0.15, launch=0.02, start=1.68, group=0.01, wrap=0.99, first_step=0.1)
    assert asdict(cut) == told
    assert cut.total == pytest.approx(3.1, abs=1e-5)
    assert without_startup("worker_kill", EVENT, KILL_WORKERS, cut) == pytest.approx(0.33, abs=1e-5)
    assert without_startup("worker_kill", EVENT, KILL_WORKERS, None) == pytest.approx(0.33, abs=1e-5), "other peers are measured alike"


def test_a_run_in_which_more_happened_is_told_from_a_clean_one() -> None:
    """Generations that formed after the event are counted, whichever node told of them."""
    assert generations(EVENT, KILL_LOGS) == 1
    assert generations(EVENT, {**KILL_LOGS, "c": [line(5.0, "generation_formed", generation=3)]}) == 2


def test_the_start_up_of_a_node_that_joins_is_not_the_rendezvous_fault() -> None:
    """The proposal that counts it in ends its start-up, though it logs its registration later."""
    logs = {
        "a": [
            line(2.0, "decision", text="proposing 2 (agreed_stop): join of c"),
            line(2.01, "directive", action="stop"),
            line(2.05, "workers_stopped", generation=1),
            line(2.10, "generation_formed", generation=2),
            line(2.11, "workers_started", generation=2, pids=[100]),
        ],
        "c": [line(2.02, "registered"), line(2.09, "generation_formed", generation=2)],
    }
    workers = [worker(0, 2.12, 3.0, 3.1, 3.2, 3.3, world=1)]
    cut = phases("node_join", EVENT, logs, workers)
    assert asdict(cut) == approx(detect=2.0, agree=0.01 + 0.05, stop=0.04, launch=0.02, start=0.88, group=0.1, wrap=0.1, first_step=0.1)
    assert without_startup("node_join", EVENT, workers, cut) == pytest.approx(0.22, abs=1e-5)
    assert without_startup("node_join", EVENT, workers, None) is None, "nobody says when an agent that is not ours was ready"


def test_a_clock_of_10_ms_does_not_make_a_phase_negative() -> None:
    """A worker that, by the kernel's coarse clock, began before its generation formed: the phases still add up."""
    workers = [worker(0, 0.295, 1.3, 1.4, 2.0, 2.1), worker(1, 0.29, 1.3, 1.4, 2.0, 2.1)]
    cut = phases("worker_kill", EVENT, KILL_LOGS, workers)
    assert cut.launch == 0.0
    assert cut.total == pytest.approx(2.1, abs=1e-5)


def test_a_world_counts_once_every_rank_has_stepped() -> None:
    """Neither a rank that has not stepped nor one of another size; of two processes of a rank the newer."""
    first, second = worker(0, 1, 2, 3, 4, 5), worker(1, 1, 2, 3, 4, 6)
    assert stepping([first], 2) is None
    assert stepping([first, worker(1, 1, 2, 3, 4)], 2) is None
    assert stepping([first, worker(1, 1, 2, 3, 4, 6, world=3)], 2) is None
    assert stepping([first, second], 2) == [first, second]
    newer = worker(1, 1, 2, 3, 4, 7, pid=999)
    assert stepping([newer, first, second], 2) == [newer, first]


def test_workers_are_read_as_far_as_they_have_written(tmp_path: Path) -> None:
    """The first time of each mark counts; a line that is being written, and a known process, do not."""
    told = [{"what": what, "at": at, "pid": 7, "ppid": 3, "rank": 1, "world": 2} for what, at in (("process", 1.0), ("step", 2.0), ("step", 3.0))]
    (tmp_path / "worker-7.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told) + '{"what": "st')
    (tmp_path / "worker-8.jsonl").write_text("")
    assert read_workers(tmp_path) == [Worker(pid=7, parent=3, rank=1, world=2, marks={"process": 1.0, "step": 2.0})]
    assert read_workers(tmp_path, known={7}) == []


def test_a_run_without_recovery_counts_as_longer_than_any_other() -> None:
    """The median is null only where that run is one without a recovery; ratios are taken run by run."""
    assert (Row.of("x", "p", [None, 1.0, 3.0]).median, Row.of("x", "p", [None, 1.0, 3.0]).max) == (3.0, None)
    never = Row.of("x", "p", [None])
    assert (never.median, never.min, never.max, never.runs) == (None, None, None, 1)
    assert ratio(Row.of("x", "p", [1.0]), never) is None
    both = paired_ratio("x_x_q", "p", [(1.0, 2.0), (3.0, 4.0), (1.0, None)])
    assert both is not None
    assert (both.median, both.runs, both.unit) == (0.625, 2, "x")
    assert paired_ratio("x_x_q", "p", [(1.0, None)]) is None


def test_the_rows_are_those_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Event, without start-up, ratio; fields as in DESIGN.md; and why a peer has no value."""
    results = Results()
    cut = phases("worker_kill", EVENT, KILL_LOGS, KILL_WORKERS)
    results.add("worker_kill", "elasticd", 0, Outcome(seconds=3.0, without_startup=0.3, phases=cut))
    results.add("worker_kill", "torchrun-tuned", 0, Outcome(seconds=6.0, without_startup=2.0))
    results.add("silent_node", "torchrun-tuned", 0, Outcome(seconds=None, why="never within 75 s"))
    rows = results.rows(("worker_kill", "silent_node"), ("elasticd", "torchrun-tuned"))
    assert [(row.name, row.peer, row.median) for row in rows] == [
        ("worker_kill", "elasticd", 3.0),
        ("worker_kill", "torchrun-tuned", 6.0),
        ("silent_node", "torchrun-tuned", None),
        ("worker_kill_without_startup", "elasticd", 0.3),
        ("worker_kill_without_startup", "torchrun-tuned", 2.0),
        ("worker_kill_x_torchrun_tuned", "elasticd", 0.5),
    ]
    assert [row.name for row in results.phase_rows(("worker_kill", "silent_node"))] == [f"worker_kill_{name}" for name in Phases.names()]
    print_table(rows)
    assert "never within 75 s" in capsys.readouterr().out
    write_json(tmp_path / "r.json", "recovery", "the command", rows, notes=["a note"])
    document = json.loads((tmp_path / "r.json").read_text())
    assert set(document) == {"bench", "command", "machine", "rows", "notes"}
    assert document["rows"][0] == {"name": "worker_kill", "peer": "elasticd", "median": 3.0, "min": 3.0, "max": 3.0, "unit": "s", "runs": 1}
    assert document["notes"] == ["a note", "silent_node, torchrun-tuned: never within 75 s"]
    assert document["machine"].keys() >= {"cpu", "cores", "python", "torch", "etcd", "load_at_start", "load_at_end"}


def test_peers_take_turns() -> None:
    """Run by run and event by event, each run beginning with another peer; torchrun with default settings once only."""
    plan = Plan(events=("form", "node_kill"), peers=("elasticd", "torchrun-tuned", "torchrun"), runs=2, bounds={})
    assert [(event, peer) for run, event, peer in plan.steps() if run == 0] == [
        (event, peer) for event in ("form", "node_kill") for peer in ("elasticd", "torchrun-tuned", "torchrun")
    ]
    assert [peer for run, event, peer in plan.steps() if (run, event) == (1, "form")] == ["torchrun-tuned", "elasticd"]


def test_what_never_recovers_is_not_waited_for_in_every_run() -> None:
    """Twice without a recovery and never with one."""
    results = Results()
    never = Outcome(seconds=None, why="never within 30 s")
    results.add("silent_node", "torchrun-tuned", 0, never)
    assert not results.hopeless("silent_node", "torchrun-tuned")
    results.add("silent_node", "torchrun-tuned", 1, never)
    assert results.hopeless("silent_node", "torchrun-tuned")
    results.add("silent_node", "torchrun-tuned", 2, Outcome(seconds=4.0))
    assert not results.hopeless("silent_node", "torchrun-tuned")


@pytest.mark.parametrize(
    ("argv", "peers", "runs"),
    [
        ([], ("elasticd", "torchrun-tuned", "torchrun-etcd-v3", "torchrun"), 5),
        (["--quick"], ("elasticd", "torchrun-tuned", "torchrun-etcd-v3"), 1),
        (["--quick", "--defaults"], ("elasticd", "torchrun-tuned", "torchrun-etcd-v3", "torchrun"), 1),
        (["--peers", "elasticd", "--runs", "7"], ("elasticd",), 7),
    ],
)
def test_who_is_measured_how_often(argv: list[str], peers: tuple[str, ...], runs: int) -> None:
    plan, _ = recovery.parse(argv)
    assert (plan.peers, plan.runs) == (peers, runs)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "bench.recovery", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def left_behind(kept: Path) -> list[psutil.Process]:
    """Agents, workers and etcd whose command names the bench's files."""
    names = {"agent": str(kept), "worker": "_recovery_script.py"}
    pids = {int(path.stem.partition("-")[2]) for path in kept.glob("*/out/worker-*.jsonl")}
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if names["agent"] in (command := " ".join(process.info["cmdline"] or [])) or (process.pid in pids and names["worker"] in command)
    ]


@pytest.mark.timeout(120)
def test_a_real_run(tmp_path: Path) -> None:
    """A worker is killed under elasticd: the row, its phases, and nothing left running."""
    kept, result = tmp_path / "kept", tmp_path / "result.json"
    bench = start("--quick", "--events", "worker_kill", "--peers", "elasticd", "--keep", str(kept), "--json", str(result))
    try:
        out, _ = bench.communicate(timeout=110)
    finally:
        bench.terminate()
        bench.wait()
    assert bench.returncode == 0
    rows = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
    total, pure = rows["worker_kill"]["median"], rows["worker_kill_without_startup"]["median"]
    assert 0 < pure < total < 60
    assert sum(rows[f"worker_kill_{name}"]["median"] for name in Phases.names()) == pytest.approx(total)
    assert rows["worker_kill_start"]["median"] > 0.1, "importing torch takes time"
    assert "where elasticd's time went" in out
    assert not left_behind(kept)


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Interrupted while workers train: exit code 130, and agents, workers and etcd are gone."""
    kept = tmp_path / "kept"
    bench = start("--quick", "--events", "worker_kill", "--peers", "elasticd", "--keep", str(kept))
    try:
        await_(lambda: list(kept.glob("*/out/worker-*.jsonl")), within=90, what="a worker")
        assert left_behind(kept)
        bench.send_signal(signal.SIGINT)
        assert bench.wait(timeout=20) == 130
    finally:
        bench.terminate()
        bench.communicate()
    assert not left_behind(kept)
