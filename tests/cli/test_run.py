"""`elasticctl run` with a real etcd and real agents: what is seen, what is left."""

from __future__ import annotations

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
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elasticd.kv import EmbeddedEtcd

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_MARK_OF_ELASTICD"  # workers are not given ELASTICD_*

STEPS = """
import os, sys, time
for step in range(int(sys.argv[1])):
    print(f"step {step} rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    time.sleep(0.2)
"""
POLITE = """
import signal, sys, time
def leave(*_):
    print("asked to stop", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
"""
STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("step 0", flush=True)
time.sleep(300)
"""
FAILING = """
import os, sys, time
print("step 0", flush=True)
time.sleep(0.5)
if os.environ["RANK"] == "1":
    raise ValueError("no such layer")
time.sleep(60)
"""

HOSTILE = """
import os, sys
os.write(1, b"step 0 \\x1b[31mred\\x1b[0m\\n")
for stream in (1, 2):
    os.write(stream, b"x" * 1_000_000 + b"\\n")
    os.write(stream, b"\\xff\\xfe\\x00\\x80 not utf-8 \\xed\\xa0\\x80\\n")
    os.write(stream, b"a\\x1b[2J\\x1b]0;owned\\x07\\x1b[?1049h\\x1b]8;;http://evil\\x1b\\\\link\\x1b]8;;\\x1b\\\\ ")
    os.write(stream, b"\\xc2\\x9b31m\\xe2\\x80\\xae\\xe2\\x80\\xa8b\\n")
raise ValueError("\\x1b[2J\\u202e\\x07owned")
"""

pytestmark = pytest.mark.timeout(90)


class Ctl:
    """One elasticctl, and everything that it starts, found again by a mark in the environment."""

    def __init__(self, home: Path, *arguments: str, tty: bool = False, term: str = "xterm") -> None:
        self.mark = uuid.uuid4().hex
        self.home = home
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home), "XDG_RUNTIME_DIR": str(home), MARK: self.mark}
        env = {name: value for name, value in env.items() if not name.startswith("ELASTICCTL_")} | {"TMPDIR": str(home)}
        self.out, self.err = home / f"{self.mark}.out", home / f"{self.mark}.err"
        command = [sys.executable, "-m", "elasticd.cli", *arguments]
        self.terminal = -1
        if tty:
            self.terminal, inside = pty.openpty()
            fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
            env["TERM"] = term
            env.pop("COLUMNS", None)  # pytest-xdist sets it, and it would outweigh the terminal's own size
            env.pop("NO_COLOR", None)
            self.process = subprocess.Popen(command, cwd=home, env=env, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
            os.close(inside)
            return
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, what: str, seconds: float = 40) -> str:
        """Wait until a pattern is in what it printed."""
        await_(lambda: re.search(what, self.stdout + self.stderr) or self.process.poll() is not None, seconds)
        found = re.search(what, self.stdout + self.stderr)
        assert found, f"{what!r} never came:\n{self.stdout}\n{self.stderr}"
        return found[0]

    def processes(self) -> dict[int, str]:
        """Pid -> command line of everything that carries the mark and is alive."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes() and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, pattern: str) -> int:
        (pid,) = [pid for pid, command in self.processes().items() if re.search(pattern, command)]
        return pid

    def assert_nothing_left(self, seconds: float = 10) -> None:
        await_(lambda: not self.processes(), seconds)
        assert self.processes() == {}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.terminal >= 0:
            os.close(self.terminal)


def await_(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


Start = Callable[..., Ctl]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Ctl] = []
    for name, text in (("steps.py", STEPS), ("polite.py", POLITE), ("stubborn.py", STUBBORN), ("failing.py", FAILING), ("hostile.py", HOSTILE)):
        (tmp_path / name).write_text(text)

    def begin(*arguments: str, **more: Any) -> Ctl:
        started.append(Ctl(tmp_path, *arguments, **more))
        return started[-1]

    yield begin
    for one in started:
        one.end()


def summary_of(tmp_path: Path) -> dict[str, Any]:
    document = json.loads((tmp_path / "summary.json").read_text())
    assert isinstance(document, dict)
    return document


def registered(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "elasticd" / "runs").glob("*")]


def scratch_of(ctl: Ctl) -> Path:
    command = ctl.processes()[ctl.pid_of(r"--data-dir")]
    (path,) = re.findall(r"--data-dir (\S+)/etcd/member-data", command)
    assert Path(path).parent == ctl.home
    return Path(path)


def test_a_run_succeeds_and_is_seen_by_status_while_it_lasts(start: Start, tmp_path: Path) -> None:
    run = start("run", "--nodes", "2", "--job", "train", "--summary", "summary.json", "--", "steps.py", "25")
    run.until(r"step 3 ")
    scratch = scratch_of(run)
    await_(lambda: False, 1.0)
    table = start("status")
    asked = start("status", "train", "-o", "json")
    assert (table.wait(), asked.wait()) == (0, 0)
    assert re.search(r"train +training\n", table.stdout)
    assert re.search(r"node-1 +training", table.stdout)
    document = json.loads(asked.stdout)
    assert (document["kind"], document["data"]["state"], document["data"]["world_size"]) == ("JobStatus", "training", 2)
    assert {node["name"] for node in document["data"]["nodes"]} == {"node-0", "node-1"}

    assert run.wait() == 0, run.stderr
    assert run.stdout.splitlines() == [f"step {step} rank 0 of 2" for step in range(25)]
    assert "succeeded: every worker finished (1 generation, 0 restarts" in run.stderr.splitlines()[-1]
    summary = summary_of(tmp_path)
    assert {key: summary[key] for key in ("result", "reason", "job", "restarts")} == {
        "result": "succeeded", "reason": "every worker finished", "job": "train", "restarts": 0,
    }  # fmt: skip
    (generation,) = summary["generations"]
    assert (generation["number"], generation["cause"], generation["world_size"]) == (1, "form", 2)
    assert 0 <= generation["first_worker_up_at"] - generation["formed_at"] < 20
    assert summary["log_dir"] == str(tmp_path / "elasticd" / "logs" / "train")
    run.assert_nothing_left()
    assert registered(tmp_path) == []
    assert not scratch.exists()
    late = start("status", "train")
    assert late.wait() == 3


def test_a_failing_script_fails_the_run_and_the_root_cause_is_told(start: Start, tmp_path: Path) -> None:
    run = start("run", "--nodes", "2", "--max-restarts", "0", "--lease-ttl", "2", "--summary", "summary.json", "--", "failing.py")
    assert run.wait() == 1, run.stderr
    assert re.search(r"worker failed: rank 1 on node-\d: exit code 1: ValueError: no such layer\n", run.stderr)
    tail = re.split(r"\d failed: restart budget used up \(0 of 0\); rank 1 on node-", run.stderr)[1]
    assert re.match(r"\d: ValueError: no such layer; log \S+ \(1 generation, 0 restarts", tail)
    assert tail.splitlines()[-1].endswith("  | ValueError: no such layer")
    assert Path(re.findall(r"; log (\S+stderr.log)", tail)[0]).read_text().endswith("ValueError: no such layer\n")
    assert summary_of(tmp_path)["result"] == "failed"
    run.assert_nothing_left()
    # A made-up job name will never be taken again: neither will its locks.
    assert list((tmp_path / "elasticd").glob("*.lock")) == []


LACKING = """
import sys
print("begins", flush=True)
import a_package_that_nobody_has
"""
BARREN = """
import os, signal
import torch, torch.distributed as dist
import trainer
dist.init_process_group("gloo")
run = trainer.join()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.register(model=model, optimizer=optimizer)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""
ECHO = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("sample 17 is empty")
dist.all_reduce(torch.zeros(1))
"""


def test_an_import_error_ends_the_job_at_once_though_restarts_are_left(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text(LACKING)
    run = start("run", "--nodes", "2", "--summary", "summary.json", "--", "lacking.py")
    assert run.wait() == 11, run.stderr
    summary = summary_of(tmp_path)
    assert (summary["result"], len(summary["generations"])) == ("failed", 1)
    said = r"rank \d on node-\d: ModuleNotFoundError: No module named 'a_package_that_nobody_has'; a restart would end the same way"
    assert re.search(said, summary["reason"])


def test_the_same_import_error_is_tried_again_where_the_policy_says_so(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text(LACKING)
    run = start("run", "--policy", "code_restarts=2", "--policy", "backoff_first_s=0", "--summary", "summary.json", "--", "lacking.py")
    assert run.wait() == 11, run.stderr
    assert len(summary_of(tmp_path)["generations"]) == 3


def test_workers_that_die_before_any_step_end_the_job_after_three(start: Start, tmp_path: Path) -> None:
    (tmp_path / "barren.py").write_text(BARREN)
    run = start("run", "--nodes", "2", "--max-restarts", "50", "--lease-ttl", "2", "--summary", "summary.json", "--", "barren.py")
    assert run.wait() == 10, run.stderr
    summary = summary_of(tmp_path)
    assert len(summary["generations"]) == 3
    assert re.search(r"3 failures in a row without a step beyond 0, the last: rank 1 on node-\d: killed by SIGKILL", summary["reason"])


def test_the_first_failing_rank_is_named_and_not_who_hears_of_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    run = start("run", "--nodes", "2", "--max-restarts", "1", "--lease-ttl", "2", "--summary", "summary.json", "--", "echo.py")
    assert run.wait() == 1, run.stderr
    summary = summary_of(tmp_path)
    assert re.fullmatch(r"restart budget used up \(1 of 1\); rank 1 on node-\d: ValueError: sample 17 is empty", summary["reason"])
    assert summary["restarts"] == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("unknown_restart=1", "setting 'unknown_restart' is not known"),
        ("mode=on", "setting mode: 'on' is not one of shadow, advise, act"),
        ("user_restarts", "--policy user_restarts: not of the form NAME=VALUE"),
    ],
)
def test_a_setting_of_the_policy_that_cannot_be_is_refused(start: Start, setting: str, said: str) -> None:
    run = start("run", "--policy", setting, "--", "steps.py", "1")
    assert run.wait() == 2
    assert said in run.stderr


@pytest.mark.parametrize(("number", "code", "nodes"), [(signal.SIGINT, 130, "2"), (signal.SIGTERM, 143, "1"), (signal.SIGHUP, 129, "1")])
def test_a_signal_stops_the_job_in_order(start: Start, tmp_path: Path, number: signal.Signals, code: int, nodes: str) -> None:
    run = start("run", "--nodes", nodes, "--stop-grace", "5", "--summary", "summary.json", "--", "polite.py")
    run.until(r"step 2\b")
    run.signal(number)
    assert run.wait() == code, run.stderr
    assert run.stdout.splitlines()[-1] == "asked to stop"
    assert f"{number.name}: stopping the job in order, workers have 5 s; another Ctrl-C kills it at once" in run.stderr
    assert "node-0 is done: stopped" in run.stderr  # by the job's target, not by leaving one by one
    assert (summary_of(tmp_path)["result"], summary_of(tmp_path)["reason"]) == ("interrupted", f"{number.name}: stopped in order")
    run.assert_nothing_left(0)


def test_ctrl_c_while_everything_is_starting_leaves_nothing(start: Start, tmp_path: Path) -> None:
    run = start("run", "--nodes", "2", "--summary", "summary.json", "--", "polite.py")
    await_(lambda: len(run.processes()) > 1, 20)
    run.signal(signal.SIGINT)
    assert run.wait(30) == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert summary_of(tmp_path)["result"] == "interrupted"
    run.assert_nothing_left(0)


def test_a_second_ctrl_c_kills_at_once_and_leaves_nothing(start: Start) -> None:
    run = start("run", "--stop-grace", "60", "--", "stubborn.py")
    run.until(r"step 0")
    await_(lambda: sum("sleep" in command for command in run.processes().values()) == 2, 20)
    run.signal(signal.SIGINT)
    run.until("stopping the job in order")
    began = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert time.monotonic() - began < 10
    # Even what its workers had detached from themselves.
    run.assert_nothing_left(0)


def test_nothing_outlives_a_run_that_is_killed(start: Start, tmp_path: Path) -> None:
    run = start("run", "--job", "train", "--", "polite.py")
    run.until(r"step 2\b")
    scratch = scratch_of(run)
    run.signal(signal.SIGKILL)
    assert run.wait() == -9
    run.assert_nothing_left()
    assert registered(tmp_path) == ["train.json"]
    status = start("status")
    assert status.wait() == 3
    assert registered(tmp_path) == []
    assert not scratch.exists()


def test_another_node_joins_by_the_command_that_was_told_and_leaves_again(start: Start) -> None:
    run = start("run", "--nodes", "1", "--max-nodes", "2", "--job", "train", "--stop-grace", "5", "--", "polite.py")
    told = run.until(r"another node joins by: elasticctl .*").partition("elasticctl ")[2]
    assert re.fullmatch(r"run --etcd 127\.0\.0\.1:\d+ --job train --node node-1 --lease-ttl 10 -- polite\.py", told)
    run.until(r"step 2\b")
    guest = start(*told.split())
    guest.until(r"generation \d: 2 nodes, 2 workers; join of node-1")
    run.until(r"generation 2: 2 nodes, 2 workers; join of node-1")
    guest.signal(signal.SIGTERM)
    assert guest.wait() == 143, guest.stderr
    assert "SIGTERM: leaving the job in order, it goes on elsewhere" in guest.stderr
    guest.assert_nothing_left(0)
    run.until(r"generation 3: 1 node, 1 worker; leave of node-1")
    assert run.process.poll() is None


@pytest.mark.parametrize("process", [r"elasticd\.agent .*/node-1/run/agents/", r"elasticd\.daemon .*/node-1/elasticd\.toml"], ids=["agent", "daemon"])
def test_the_run_goes_on_without_a_node_that_dies(start: Start, process: str) -> None:
    run = start("run", "--nodes", "2", "--", "steps.py", "15")
    run.until(r"step 1 rank 0 of 2")
    os.kill(run.pid_of(process), signal.SIGKILL)
    run.until(r"the agent of node-1 has died \(killed by SIGKILL \(9\)\); 1 of this machine's nodes go on")
    run.until(r"1 node, 1 worker; loss of node-1")
    assert run.wait() == 0, run.stderr
    assert "succeeded: every worker finished (2 generations, 0 restarts" in run.stderr


def test_the_run_fails_if_all_its_nodes_die(start: Start, tmp_path: Path) -> None:
    run = start("run", "--nodes", "1", "--summary", "summary.json", "--", "polite.py")
    run.until(r"step 1\b")
    os.kill(run.pid_of(r"elasticd\.agent .*/node-0/run/agents/"), signal.SIGKILL)
    assert run.wait() == 1
    assert summary_of(tmp_path)["reason"] == "the agent of node-0 has died (killed by SIGKILL (9))"
    run.assert_nothing_left(0)


def test_the_local_etcd_is_started_again_if_it_dies(start: Start) -> None:
    run = start("run", "--", "steps.py", "30")
    run.until(r"step 1 ")
    os.kill(run.pid_of(r"--data-dir"), signal.SIGKILL)
    run.until("the local etcd had ended and was started again")
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("step 0 ") == 1  # the workers went on meanwhile
    run.assert_nothing_left(0)


def test_a_parent_that_ignores_its_children_does_not_matter(start: Start, tmp_path: Path) -> None:
    (tmp_path / "deaf.sh").write_text(f"trap '' CHLD\nexec {sys.executable} -m elasticd.cli run -- steps.py 1\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["bash", "deaf.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "step 0 rank 0 of 1\n"), done.stderr


def test_jsonl_carries_events_and_output(start: Start) -> None:
    run = start("run", "--nodes", "2", "--job", "train", "--show", "all", "-o", "jsonl", "--", "steps.py", "2")
    assert run.wait() == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert (lines[0]["event"], lines[0]["nodes"]) == ("run_started", ["node-0", "node-1"])
    assert lines[-1] | {"time": ""} == {
        "event": "run_ended", "time": "", "level": "info", "node": "elasticctl", "job": "train",
        "result": "succeeded", "reason": "every worker finished", "exit_code": 0,
    }  # fmt: skip
    output = {(line["rank"], line["stream"], line["text"]) for line in lines if line["event"] == "output"}
    assert output == {(rank, "stdout", f"step {step} rank {rank} of 2") for rank in range(2) for step in range(2)}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert {"registered", "generation_formed", "workers_started", "agent_exit"} <= {line["event"] for line in lines}


def test_a_reader_that_goes_away_does_not_end_the_job(start: Start, tmp_path: Path) -> None:
    (tmp_path / "head.sh").write_text(f"{sys.executable} -m elasticd.cli run --summary summary.json -- steps.py 10 | head -n 1\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["bash", "head.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "step 0 rank 0 of 1\n"
    assert "BrokenPipe" not in done.stderr
    assert "succeeded: " in done.stderr
    assert summary_of(tmp_path)["result"] == "succeeded"


def test_on_a_terminal_the_state_is_drawn_and_ctrl_c_works(start: Start) -> None:
    run = start("run", "--nodes", "2", "--show", "all", "--stop-grace", "5", "--", "polite.py", tty=True)
    seen = b""
    deadline = time.monotonic() + 60
    interrupted = False
    while time.monotonic() < deadline:
        if not select.select([run.terminal], [], [], 1)[0]:
            continue
        try:
            seen += os.read(run.terminal, 65536)
        except OSError:  # the last one that held the terminal has closed it
            break
        if not interrupted and re.search(rb"step [1-9]\d*  world size 2", seen):
            interrupted = True
            run.signal(signal.SIGINT)
    assert run.wait() == 130
    print(seen)
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", seen).decode()
    assert re.search(r"polite-[0-9a-f]{4}  training  step \d+  world size 2  restarts 0/10  \d+ s  generation 1: first formation", text)
    assert re.search(r"node-1  training +ranks \d", text)
    assert "[node-1 " in text
    assert "interrupted: SIGINT: stopped in order" in text
    run.assert_nothing_left(0)


def shown_on_a_terminal(run: Ctl, seconds: float = 60) -> bytes:
    """Everything that comes until the last one that held the terminal has closed it."""
    seen = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([run.terminal], [], [], 1)[0]:
            try:
                seen += os.read(run.terminal, 65536)
            except OSError:
                break
    return seen


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_what_a_script_prints_cannot_steer_the_terminal(start: Start, term: str) -> None:
    """Colours stay. What the live part itself needs are cursor movements and erasing lines."""
    run = start("run", "--max-restarts", "0", "--", "hostile.py", tty=True, term=term)
    seen = shown_on_a_terminal(run)
    assert run.wait() == 1
    assert b"red" in seen
    assert b"not utf-8" in seen
    assert b"link" in seen
    for bad in (b"\x07", b"\x00", b"owned\x07", b"\x1b]", b"\x1b[?1049h", b"\x1b[2J", "\x9b".encode(), "\u202e".encode(), "\u2028".encode()):
        assert bad not in seen, bad
    seen.decode()
    assert set(re.findall(rb"\x1b\[[0-9;?]*([A-Za-z])", seen)) <= {b"m", b"A", b"K", b"h", b"l"}


def test_output_in_json_is_harmless(start: Start) -> None:
    run = start("run", "--max-restarts", "0", "-o", "jsonl", "--", "hostile.py")
    assert run.wait() == 1
    texts = [line["text"] for line in map(json.loads, run.stdout.splitlines()) if line["event"] == "output"]
    assert "step 0 red" in texts
    assert "alink ?31m??b" in texts
    assert all(text.isprintable() for text in texts)
    assert max(map(len, texts)) <= 64 * 1024


def test_a_job_that_has_ended_is_started_again_only_if_asked(start: Start, tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "store") as etcd:
        base = ("run", "--etcd", etcd.endpoint, "--job", "train", "--node", "me")
        assert start(*base, "--", "steps.py", "1").wait() == 0
        refused = start(*base, "--", "steps.py", "1")
        assert refused.wait() == 8
        assert refused.stderr == (
            "elasticctl: job 'train' has ended (succeeded at generation 1: every worker finished); give another --job, or --again to start this one again\n"
        )
        over = start("status", "train", "--etcd", etcd.endpoint, "--exit-code")
        assert over.wait() == 3
        assert over.stdout.startswith("train  succeeded: every worker finished\n")
        again = start(*base, "--again", "--", "steps.py", "1")
        assert again.wait() == 0, again.stderr
        assert again.stdout == "step 0 rank 0 of 1\n"


def test_what_keeps_an_agent_from_starting_is_told_with_its_exit_code(start: Start, tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "store") as etcd:
        base = ("run", "--etcd", etcd.endpoint, "--job", "train", "--node", "me", "--stop-grace", "5", "--", "polite.py")
        first = start(*base)
        first.until(r"step 1\b")
        second = start(*base)
        assert second.wait() == 8
        assert re.search(r"failed: another agent \(pid \d+\) serves job 'train' as node 'me' on this machine", second.stderr)
        assert first.process.poll() is None
