"""`elasticctl top`: what is made of several nodes' reports, how it fits a screen, and how it behaves on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from elasticd.cli.main import app
from elasticd.cli.registry import Registered, RunEntry
from elasticd.cli.render_top import FORGOTTEN, Known, goodput, jobs_of, learn, number, pace, size_text, time_text, top_screen
from elasticd.daemon.processes import process_start
from elasticd.observability.report import Activity, CheckpointReport, JobReport, RankReport
from tests.cli.pretend import PretendDaemon

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]
ETCD: Document = {"reachable": True, "endpoints": ["10.0.0.1:2379"], "since": None, "problem": ""}
CLOCK = 1_796_040_000.0
PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.04, "communication": 0.02, "optimizer": 0.008, "snapshot": 0.001, "other": 0.001}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ELASTICCTL_SOCKET", raising=False)
    monkeypatch.setenv("COLUMNS", "160")


def rank(local: int, of_all: int, **fields: Any) -> RankReport:
    values = {"step": 500, "step_seconds": 0.1, "phases": PHASES, "loss": 2.5, "memory": {"rss": 3 << 30}, **fields}
    return RankReport(local_rank=local, rank=of_all, **values)


def entry(node: str, node_rank: int, *ranks: RankReport, age: float = 0.5, gpus: tuple[int | None, ...] = (), **fields: Any) -> Document:
    values: Document = {
        "job": "llm",
        "at": CLOCK,
        "activity": Activity.TRAINING,
        "generation": 7,
        "world_size": 4,
        "nodes": 2,
        "node_rank": node_rank,
        "target_nodes": 2,
        "restarts_used": 1,
        "restarts_max": 10,
        "step": 500,
        "stepped_at": CLOCK,
        "steps": 100,
        "samples": 6400,
        "seconds": {Activity.TRAINING: 90.0, Activity.FORMING: 10.0},
        "loss": 2.5,
        "grad_norm": 1.25,
        "checkpoint": CheckpointReport(step=400, at=CLOCK - 120, committed_step=400),
        **fields,
    }
    report = JobReport(node=node, ranks=ranks, **values)
    return {"job": report.job, "age": age, "gpus": list(gpus), "report": report.model_dump(mode="json")}


def node(name: str, *jobs: Document, gpus: tuple[Document, ...] = ()) -> Document:
    host = {"cpu": 0.25, "load": 3.5, "memory_total": 64 << 30, "memory_available": 32 << 30}
    return {"name": name, "problem": "", "at": "2026-11-30T12:00:00.000Z", "clock": CLOCK, "host": host, "gpus": list(gpus), "jobs": list(jobs)}


def silent(name: str, problem: str = "Connection refused") -> Document:
    return {"name": name, "problem": problem, "at": None, "clock": 0.0, "host": None, "gpus": [], "jobs": []}


def gpu(index: int, **fields: Any) -> Document:
    values = {"utilization": 0.97, "memory_used": 71 << 30, "memory_total": 80 << 30, "temperature": 64.0, "power": 650.0, "throttled": False}
    return {"index": index, **values, **fields}


def two(**fields: Any) -> list[Document]:
    return [
        node("n1", entry("n1", 0, rank(0, 0), rank(1, 1), **fields)),
        node("n2", entry("n2", 1, rank(0, 2), rank(1, 3), **fields)),
    ]


def drawn(nodes: dict[str, Known], width: int = 160, height: int = 50, *, now: float = 0.0, etcd: Document | None = ETCD, job: str | None = None) -> list[str]:
    console = Console(width=width, height=height, highlight=False, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(top_screen(nodes, etcd, now=now, at=CLOCK, size=(width, height), job=job), no_wrap=True)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in captured.get().rstrip("\n").split("\n")]


# --- what is made of reports ---------------------------------------------------------------------------------------------


def test_a_jobs_nodes_are_put_together(tmp_path: Path) -> None:
    (job,) = jobs_of(learn({}, two(), 0.0), 0.0)
    assert (job.name, [rank.rank for rank in job.ranks], job.lead["node"]) == ("llm", [0, 1, 2, 3], "n1")
    steps, samples = pace(job)
    assert steps == pytest.approx(10.0)
    assert samples == pytest.approx(2 * 64 * 10.0)
    assert goodput(job.reports) == pytest.approx(0.9)
    assert job.saved == pytest.approx(120.0)


def test_rank_0s_node_speaks_for_the_job_and_another_when_it_is_silent() -> None:
    nodes = [node("n1", entry("n1", 0, age=0.5, step=500)), node("n2", entry("n2", 1, age=0.1, step=499))]
    assert jobs_of(learn({}, nodes, 0.0), 0.0)[0].lead["node"] == "n1"
    nodes = [node("n1", entry("n1", 0, age=60.0)), node("n2", entry("n2", 1, age=0.1))]
    assert jobs_of(learn({}, nodes, 0.0), 0.0)[0].lead["node"] == "n2"


def test_reports_of_an_older_generation_do_not_count() -> None:
    nodes = [node("n1", entry("n1", 0, rank(0, 0), generation=8)), node("n2", entry("n2", 1, rank(0, 1), generation=7))]
    (job,) = jobs_of(learn({}, nodes, 0.0), 0.0)
    assert ([rank.node for rank in job.ranks], job.lead["generation"]) == (["n1"], 8)


@pytest.mark.parametrize("activity", ["waiting", "forming", "starting", "restoring", "stopping", "frozen"])
def test_who_does_not_step_has_no_pace(activity: str) -> None:
    (job,) = jobs_of(learn({}, two(activity=activity), 0.0), 0.0)
    assert pace(job) == (None, None)


def test_a_job_without_time_has_no_goodput() -> None:
    assert goodput([{"seconds": {}}]) is None
    assert goodput([]) is None


def test_the_slowest_rank_is_the_one_that_works_longest_not_the_one_that_waits() -> None:
    slow = {**PHASES, "backward": 0.06, "communication": 0.0}
    nodes = [node("n1", entry("n1", 0, rank(0, 0), rank(1, 1, phases=slow), rank(2, 2)))]
    assert jobs_of(learn({}, nodes, 0.0), 0.0)[0].slowest == (1, pytest.approx(1.25))
    nodes = [node("n1", entry("n1", 0, rank(0, 0), rank(1, 1), slowest=(3, 1.8)))]
    assert jobs_of(learn({}, nodes, 0.0), 0.0)[0].slowest == (3, 1.8)
    nodes = [node("n1", entry("n1", 0, rank(0, 0), rank(1, 1), slowest=(3, 1.02)))]
    assert jobs_of(learn({}, nodes, 0.0), 0.0)[0].slowest is None
    assert jobs_of(learn({}, two(), 0.0), 0.0)[0].slowest is None


def test_a_node_that_goes_silent_stays_for_a_while_with_what_it_told() -> None:
    known = learn({}, two(), 0.0)
    known = learn(known, [two()[0], silent("n2")], 2.0)
    assert (known["n2"].problem, known["n2"].told, known["n2"].missed) == ("Connection refused", 0.0, 2.0)
    assert known["n2"].part is not None
    known = learn(known, [two()[0]], 30.0)
    assert (known["n2"].problem, known["n2"].missed) == ("it is gone", 2.0)
    assert "n2" in learn(known, [two()[0]], FORGOTTEN)
    assert "n2" not in learn(known, [two()[0]], FORGOTTEN + 3)
    back = learn(known, two(), 31.0)
    assert (back["n2"].problem, back["n2"].told) == ("", 31.0)


# --- the screen ----------------------------------------------------------------------------------------------------------


def test_the_screen_says_everything_of_a_job_and_its_ranks() -> None:
    lines = drawn(learn({}, two(), 0.0))
    assert re.fullmatch(r"elasticctl top  \d\d:\d\d:\d\d  2 nodes", lines[0])
    assert lines[2:] == [
        "llm  training  generation 7  world 4 on 2 of 2 nodes  restarts 1/10",
        "  step 500  10 steps/s  1280 samples/s  loss 2.5  grad 1.25  goodput 90.0%  checkpoint 2 min ago (step 400)",
        "node  rank  step  step time  slow  data  comm  fwd  bwd  opt  snap  memory  loss",
        "n1       0   500     100 ms         10%   20%  20%  40%   8%    1%    3.0G   2.5",
        "n1       1   500     100 ms         10%   20%  20%  40%   8%    1%    3.0G   2.5",
        "n2       2   500     100 ms         10%   20%  20%  40%   8%    1%    3.0G   2.5",
        "n2       3   500     100 ms         10%   20%  20%  40%   8%    1%    3.0G   2.5",
        "",
        "node  load  cpu   memory",
        "n1     3.5  25%  32G/64G",
        "n2     3.5  25%  32G/64G",
    ]


def with_gpus() -> list[Document]:
    slow = {**PHASES, "backward": 0.06, "communication": 0.0}
    gpus = (gpu(0), gpu(1, temperature=91.0, throttled=True))
    ranks = [rank(local, local, memory={"rss": 3 << 30, "allocated": 68 << 30}, phases=slow if local == 1 else PHASES) for local in range(3)]
    return [node("gpu-node-01", entry("gpu-node-01", 0, *ranks, gpus=(0, 1, None)), gpus=gpus)]


def test_gpus_are_told_where_there_are_some_and_the_slowest_rank_is_marked() -> None:
    lines = drawn(learn({}, with_gpus(), 0.0))
    assert lines[4:8] == [
        "node         rank  step  step time  slow  data  comm  fwd  bwd  opt  snap  memory  loss  gpu  gpu util  gpu mem  gpu temp",
        "gpu-node-01     0   500     100 ms         10%   20%  20%  40%   8%    1%     68G   2.5    0       97%  71G/80G       64°",
        "gpu-node-01     1   500     100 ms  1.2x   10%    0%  20%  60%   8%    1%     68G   2.5    1       97%  71G/80G       91°",
        "gpu-node-01     2   500     100 ms         10%   20%  20%  40%   8%    1%     68G   2.5    -         -        -         -",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 119, 120, 160, 300])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    for nodes in (two(problem="x" * 500), with_gpus(), [silent("n" * 100, "y" * 300)]):
        assert max(map(len, drawn(learn({}, nodes, 0.0), width))) <= width


def test_at_80_columns_a_rank_still_says_all_that_matters() -> None:
    lines = drawn(learn({}, with_gpus(), 0.0), 80)
    head = next(line for line in lines if line.startswith("node "))
    assert len(head) <= 80
    for word in ("rank", "step", "slow", "data", "comm", "mem", "util", "gpu mem", "temp"):
        assert word in head
    row = lines[lines.index(head) + 2]
    for word in ("gpu-node-01", "100 ms", "1.2x", "10%", "0%", "68G", "97%", "71G/80G", "91°"):
        assert word in row


@pytest.mark.parametrize("height", [10, 16, 24, 50])
def test_what_does_not_fit_are_the_quickest_ranks(height: int) -> None:
    ranks = [rank(local, local, phases={**PHASES, "backward": 0.04 + 0.001 * local, "communication": 0.02 - 0.001 * local}) for local in range(16)]
    lines = drawn(learn({}, [node("n1", entry("n1", 0, *ranks))], 0.0), 80, height)
    shown = [int(line.split()[1]) for line in lines if re.match(r"n1 +\d+ +100 ms", line)]
    assert shown == list(range(16 - len(shown), 16))
    if height < 24:
        assert 1 <= len(shown) < 16
        assert f"and {16 - len(shown)} quicker rank" in "\n".join(lines)
    if height >= 16:
        assert len(lines) <= height


def test_several_jobs_share_the_screen() -> None:
    big = entry("n1", 0, *(rank(local, local) for local in range(64)))
    small = entry("n1", 0, rank(0, 0), job="small")
    small["job"] = small["report"]["job"] = "small"
    lines = drawn(learn({}, [node("n1", big, small)], 0.0), 80, 40)
    assert len(lines) <= 40
    assert sum(line.startswith(("llm  ", "small  ")) for line in lines) == 2
    assert drawn(learn({}, [node("n1", big, small)], 0.0), 80, 40, job="small")[2].startswith("small  ")


def test_what_is_old_is_shown_with_its_age() -> None:
    known = learn(learn({}, two(), 0.0), [two()[0], silent("n2")], 20.0)
    lines = drawn(known, now=20.0)
    assert lines[0].endswith("2 nodes, 1 silent")
    assert [line.split()[:2] for line in lines if "silent 20 s" in line] == [["n2", "2"], ["n2", "3"]]
    assert lines[-1] == "n2     3.5  25%  32G/64G  silent for 20 s: Connection refused"
    lines = drawn(learn({}, [node("n1", entry("n1", 0, rank(0, 0), age=45.0))], 0.0), now=5.0)
    assert "silent for 50 s, was training" in lines[2]
    assert "steps/s" not in lines[3]


def test_a_job_that_counts_as_training_and_makes_no_step_says_since_when() -> None:
    assert "step 500 60 s ago" in drawn(learn({}, two(stepped_at=CLOCK - 60), 0.0))[3]
    assert "step 500  " in drawn(learn({}, two(stepped_at=CLOCK - 2), 0.0))[3]


def test_etcd_out_of_reach_is_said_first() -> None:
    etcd = {**ETCD, "reachable": False, "since": "2026-11-30T11:59:00.000Z"}
    assert drawn(learn({}, two(), 0.0), etcd=etcd)[0].endswith("2 nodes  etcd is out of reach for 60 s")


def test_nothing_to_report_is_said() -> None:
    assert drawn(learn({}, [node("n1")], 0.0))[2] == "no job reports now"
    assert drawn(learn({}, two(), 0.0), job="other")[2] == "no node reports job other now"
    assert drawn({}, etcd=None)[0].endswith("0 nodes")


def test_a_fresh_report_with_nothing_in_it_can_be_drawn() -> None:
    report = JobReport(job="llm", node="n1", at=CLOCK, activity=Activity.WAITING, ranks=(RankReport(local_rank=0, rank=0),), problem="waits for 1 node")
    nodes = [node("n1", {"job": "llm", "age": 0.0, "gpus": [], "report": report.model_dump(mode="json")})]
    lines = drawn(learn({}, nodes, 0.0))
    assert lines[2] == "llm  waiting  generation -  world - on 0 nodes  restarts 0/0"
    assert lines[3:5] == ["  step 0  checkpoint none", "  waits for 1 node"]


def test_what_a_node_says_cannot_steer_the_terminal() -> None:
    nodes = [silent("n\x1b[2J", "\x1b]0;x\x07\n"), node("n1", entry("n1", 0, problem="\x1b[31m\r\n"))]
    assert "\x1b" not in "".join(drawn(learn({}, nodes, 0.0)))


@pytest.mark.parametrize(("value", "text"), [(0.0, "-"), (0.00085, "850 µs"), (0.0123, "12.3 ms"), (0.12, "120 ms"), (1.253, "1.25 s"), (83.21, "83.2 s")])
def test_times_are_written_short(value: float, text: str) -> None:
    assert time_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0, "0B"), (512 << 10, "512K"), (3.2 * 2**30, "3.2G"), (71 << 30, "71G"), (1000 << 20, "1.0G")])
def test_sizes_are_written_short(value: float | None, text: str) -> None:
    assert size_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0, "0"), (2.30259, "2.303"), (123456.0, "123456"), (1e-5, "1.00e-05"), (3e9, "3.00e+09")])
def test_numbers_are_written_short(value: float | None, text: str) -> None:
    assert number(value) == text


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon() -> Iterator[PretendDaemon]:
    with tempfile.TemporaryDirectory(prefix="elasticctl-test-") as folder, PretendDaemon(Path(folder) / "api.sock") as daemon:
        yield daemon


def telemetry(nodes: list[Document], **fields: Any) -> Document:
    return {"node": "n1", "etcd": ETCD, "nodes": nodes, "notes": [], **fields}


def call(daemon: PretendDaemon, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["top", "--socket", str(daemon.path), *arguments], prog_name="elasticctl")


def test_once_prints_one_picture(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/telemetry", "Telemetry", telemetry(two()), revision=None)
    result = call(daemon, "--once")
    assert result.exit_code == 0, result.output
    assert "llm  training  generation 7  world 4 on 2 of 2 nodes" in result.stdout
    assert daemon.times("GET /v1/telemetry") == 1


def test_json_is_the_answer_as_it_is(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/telemetry?job=llm", "Telemetry", telemetry(two()), revision=None)
    result = call(daemon, "llm", "--once", "-o", "json")
    assert json.loads(result.stdout) == {"apiVersion": "elasticd/v1", "kind": "Telemetry", "revision": None, "data": telemetry(two())}


def test_a_job_that_nobody_reports_exits_with_3(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/telemetry?job=other", "Telemetry", telemetry([node("n1")]), revision=None)
    result = call(daemon, "other", "--once")
    assert result.exit_code == 3
    assert "no node reports job 'other' now" in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [(("--every", "0.1"), "--every 0.1: must be from"), (("../x",), "name"), (("--every", "x"), "invalid")])
def test_a_mistake_costs_2(daemon: PretendDaemon, arguments: tuple[str, ...], message: str) -> None:
    result = call(daemon, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_run_of_this_user_is_looked_at_without_a_daemon(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    for place in (0, 1):
        home = scratch / f"node-{place}"
        (home / "run/reports").mkdir(parents=True)
        (home / "elasticd.toml").write_text("")
        report = JobReport(job="mine", node=home.name, at=time.time(), activity=Activity.TRAINING, generation=2, node_rank=place, ranks=(rank(0, place),))
        report.write(home / "run/reports/mine.json")
    own = RunEntry(
        job="mine",
        cluster="default",
        endpoints=("127.0.0.1:1",),
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        log_dir=tmp_path / "logs/mine",
        local=True,
        scratch=scratch,
    )
    with Registered(own):
        result = CliRunner().invoke(app, ["top", "mine", "--once", "-o", "json"])
        assert result.exit_code == 0, result.output
        parts = json.loads(result.stdout)["data"]["nodes"]
        assert [(part["name"], part["jobs"][0]["report"]["ranks"][0]["rank"]) for part in parts] == [("node-0", 0), ("node-1", 1)]
        assert "mine  training" in CliRunner().invoke(app, ["top", "--once"]).stdout


class Typist:
    """A command on a terminal of its own, and what it has drawn there."""

    def __init__(self, daemon: PretendDaemon, *arguments: str, size: tuple[int, int] = (80, 24)) -> None:
        self.main, side = pty.openpty()
        self.resize(size)
        command = ["setsid", "--ctty", sys.executable, "-m", "elasticd.cli", "top", "--socket", str(daemon.path), *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm-256color"}
        self.before = termios.tcgetattr(side)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=side, stdout=side, stderr=side)
        self.side = side
        self.text = ""

    def resize(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def read(self, seconds: float) -> str:
        """What comes within a moment."""
        until, found = time.monotonic() + seconds, ""
        while (left := until - time.monotonic()) > 0:
            if not select.select([self.main], [], [], left)[0]:
                break
            with contextlib.suppress(OSError):
                found += os.read(self.main, 65536).decode()
        self.text += found
        return found

    def until(self, what: str, within: float = 30.0) -> str:
        """Wait until it has drawn this; everything since then."""
        stop, found = time.monotonic() + within, ""
        while what not in found:
            assert time.monotonic() < stop, found
            found += self.read(0.2)
        return found

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def end(self) -> int:
        """Its exit code; the terminal must be as it was."""
        stop = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < stop:
            self.read(0.1)
        assert termios.tcgetattr(self.side)[3] == self.before[3]
        self.read(0.2)
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.main)
        os.close(self.side)


@pytest.fixture
def typist(daemon: PretendDaemon) -> Iterator[Typist]:
    daemon.tell("GET /v1/telemetry", "Telemetry", telemetry(two()), telemetry(two(step=501)), telemetry(two(step=777)), revision=None)
    one = Typist(daemon, "--every", "0.3")
    yield one
    one.close()


def test_on_a_terminal_it_is_drawn_in_place_until_q(typist: Typist) -> None:
    drawn_so_far = typist.until("777")
    assert drawn_so_far.startswith("\x1b[?1049h\x1b[?25l")
    assert "\x1b[2J" not in drawn_so_far  # nothing is cleared, so nothing flickers
    frame = drawn_so_far[drawn_so_far.rindex("\x1b[?2026h") :]
    assert frame.startswith("\x1b[?2026h\x1b[H")
    typist.type("xq")
    assert typist.end() == 0
    assert typist.text.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")


def test_ctrl_c_ends_it_with_130_and_the_terminal_as_it_was(typist: Typist) -> None:
    typist.until("step")
    typist.type("\x03")
    assert typist.end() == 130
    assert typist.text.endswith("\x1b[?1049l")
    assert "Traceback" not in typist.text


def test_another_size_is_drawn_at_once(typist: Typist) -> None:
    assert "fwd" not in typist.until("777")
    typist.resize((160, 40))
    os.kill(typist.process.pid, signal.SIGWINCH)
    assert "fwd" in typist.until("fwd", within=5)
    typist.type("q")
    assert typist.end() == 0


def test_a_daemon_that_goes_away_is_said_and_what_was_known_stays(daemon: PretendDaemon, typist: Typist) -> None:
    typist.until("777")
    daemon.__exit__()
    frame = typist.until("no daemon answers")
    assert "777" in typist.until("777", within=10) or "777" in frame
    typist.type("q")
    assert typist.end() == 0
