"""What each verb asks of a daemon, says about the answer, and waits for; and what a mistake costs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import elasticd
from elasticd.cli import commands_watching, looking, waiting, watching
from elasticd.cli.main import app
from elasticd.cli.registry import Registered, RunEntry
from elasticd.daemon.processes import process_start
from tests.cli.pretend import PretendDaemon, change, cluster, job, member, node, target

ROOT = Path(__file__).resolve().parents[2]
REASON = ("--reason", "bad fan")

# Every verb that asks a daemon, and the request that decides.
VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "status": (("status",), "GET /v1/status"),
    "status of a job": (("status", "llm"), "GET /v1/jobs/llm"),
    "nodes": (("nodes",), "GET /v1/nodes"),
    "nodes of one": (("nodes", "node-3"), "GET /v1/nodes/node-3"),
    "history": (("history", "llm"), "GET /v1/jobs/llm/history"),
    "events": (("events",), "GET /v1/events"),
    "start": (("start", "llm"), "POST /v1/jobs/llm/start"),
    "stop": (("stop", "llm"), "POST /v1/jobs/llm/stop"),
    "scale": (("scale", "llm", "4"), "POST /v1/jobs/llm/scale"),
    "pause": (("pause", "llm", *REASON), "POST /v1/jobs/llm/pause"),
    "pause of all": (("pause", *REASON), "GET /v1/jobs"),
    "resume": (("resume", "llm"), "POST /v1/jobs/llm/resume"),
    "checkpoint": (("checkpoint", "llm"), "GET /v1/jobs/llm"),
    "restart": (("restart", "llm", *REASON), "POST /v1/jobs/llm/restart"),
    "drain": (("drain", "node-3", *REASON), "POST /v1/nodes/node-3/drain"),
    "drain of this node": (("drain", "--self", *REASON), "GET /v1/status"),
    "cordon": (("cordon", "node-3", *REASON), "POST /v1/nodes/node-3/cordon"),
    "uncordon": (("uncordon", "node-3"), "POST /v1/nodes/node-3/uncordon"),
    "anomalies": (("anomalies",), "GET /v1/anomalies"),
    "anomalies of a job": (("anomalies", "llm"), "GET /v1/anomalies?job=llm"),
    "explain": (("explain", "g7-nonfinite-n1-r0"), "GET /v1/anomalies"),
}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("ELASTICCTL_SOCKET", "ELASTICCTL_ETCD", "ELASTICCTL_CACERT", "ELASTICCTL_CERT", "ELASTICCTL_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(waiting, "LOOK_EVERY", 0.01)


@pytest.fixture
def daemon() -> Iterator[PretendDaemon]:
    # A socket's path may have 107 characters, and tmp_path comes near to that.
    with tempfile.TemporaryDirectory(prefix="elasticctl-test-") as folder, PretendDaemon(Path(folder) / "api.sock") as daemon:
        yield daemon


def call(daemon: PretendDaemon | Path, *arguments: str) -> Result:
    socket = daemon.path if isinstance(daemon, PretendDaemon) else daemon
    verb, *rest = arguments
    return CliRunner().invoke(app, [verb, "--socket", str(socket), *rest], prog_name="elasticctl")


def only_line(result: Result) -> str:
    """The one line that a failing command printed."""
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def succeeded(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


# --- errors ------------------------------------------------------------------------------------------------------------


REFUSALS = [
    (400, "usage", 2),
    (422, "usage", 2),
    (403, "permission", 7),
    (404, "not_running", 3),
    (409, "conflict", 5),
    (403, "refused", 8),
    (404, "not_allowed", 9),
    (503, "kv_unavailable", 4),
    (500, "internal", 1),
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_refusal_is_one_line_and_its_exit_code(daemon: PretendDaemon, verb: str) -> None:
    arguments, asked = VERBS[verb]
    for status, code, exit_code in REFUSALS:
        daemon.refuse_everything(status, code, "no such luck", "try again")
        result = call(daemon, *arguments, "-o", "json")
        assert (result.exit_code, json.loads(only_line(result))) == (exit_code, {"error": {"code": code, "message": "no such luck", "hint": "try again"}})
    result = call(daemon, *arguments)
    assert (result.exit_code, only_line(result)) == (1, "elasticctl: no such luck; try again")
    assert daemon.times(asked) >= len(REFUSALS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_daemon_that_is_not_there_exits_with_4(tmp_path: Path, verb: str) -> None:
    arguments, _ = VERBS[verb]
    result = call(tmp_path / "no.sock", *arguments)
    assert result.exit_code == 4
    assert only_line(result).startswith(f"elasticctl: no daemon answers at {tmp_path}/no.sock")
    result = call(tmp_path / "no.sock", *arguments, "-o", "json")
    assert result.exit_code == 4
    assert json.loads(only_line(result))["error"]["code"] == "daemon_unavailable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scale", "llm", "x"), "invalid value for 'N'"),
        (("scale", "llm", "2.5"), "invalid value for 'N'"),
        (("scale", "llm", "0"), "N 0: must be from 1 to 100000"),
        (("scale", "llm", "-1"), "no such option: -1"),
        (("scale", "llm", "100001"), "N 100001: must be from 1 to 100000"),
        (("scale", "llm"), "missing argument 'N'"),
        (("scale", "llm", "2", "--min", "0"), "--min 0: must be from 1"),
        (("scale", "llm", "2", "--max", "0"), "--max 0: must be from 1"),
        (("scale", "llm", "2", "--if-revision", "-3"), "--if-revision -3: must be from 1"),
        (("scale", "llm", "2", "--timeout", "nan"), "--timeout nan: must be from 0"),
        (("start",), "missing argument 'JOB'"),
        (("start", "../x"), "job '../x' is not a usable name"),
        (("start", "llm", "--nodes", "0"), "--nodes 0: must be from 1"),
        (("start", "llm", "--max-restarts", "-1"), "--max-restarts -1: must be from 0"),
        (("start", "llm", "--set", "lr"), "--set 'lr' is not NAME=VALUE"),
        (("start", "llm", "--set", "=1"), "--set '=1' is not NAME=VALUE"),
        (("start", "llm", "--set", "lr=1", "--set", "lr=2"), "--set lr is given twice"),
        (("start", "llm", "--timeout", "-1"), "--timeout -1: must be from 0"),
        (("stop", "llm", "--wait"), "no such option: --wait"),
        (("stop", "a/b"), "job 'a/b' is not a usable name"),
        (("pause", "llm"), "missing option '--reason'"),
        (("pause", "llm", "--reason", " "), "--reason is empty"),
        (("restart", "llm"), "missing option '--reason'"),
        (("restart", "llm", "--reason", ""), "--reason is empty"),
        (("checkpoint", ""), "job '' is not a usable name"),
        (("resume", "a b"), "job 'a b' is not a usable name"),
        (("history", "llm", "-n", "x"), "invalid value for '--number' / '-n'"),
        (("history", "llm", "-n", "-1"), "--number -1: must be from 0"),
        (("events", "--job", "a/b"), "job 'a/b' is not a usable name"),
        (("events", "--node", "a/b"), "node 'a/b' is not a usable name"),
        (("nodes", "a/b"), "node 'a/b' is not a usable name"),
        (("drain", *REASON), "give either NODE or --self"),
        (("drain", "node-3", "--self", *REASON), "give either NODE or --self"),
        (("drain", "node-3"), "missing option '--reason'"),
        (("drain", "node-3", "--reason", ""), "--reason is empty"),
        (("drain", "no/de", *REASON), "node 'no/de' is not a usable name"),
        (("cordon", "node-3"), "missing option '--reason'"),
        (("cordon", "node-3", "--reason", ""), "--reason is empty"),
        (("uncordon", "no de"), "node 'no de' is not a usable name"),
        (("status", "a/b"), "job 'a/b' is not a usable name"),
        (("status", "--every", "0"), "--every 0: must be from 0.1"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(daemon: PretendDaemon, arguments: tuple[str, ...], message: str) -> None:
    result = call(daemon, *arguments)
    assert result.exit_code == 2
    assert message in only_line(result).lower() if message.islower() else message in only_line(result)
    assert only_line(result).startswith("elasticctl: ")
    result = call(daemon, *arguments, "-o", "json")
    assert result.exit_code == 2
    error = json.loads(only_line(result))["error"]
    assert (error["code"], message.lower() in error["message"].lower()) == ("usage", True)
    assert all(not what.startswith("POST") for what, _ in daemon.asked)


@pytest.mark.parametrize("arguments", [("stpo", "llm"), ("status", "-o", "yaml"), ("--what",)])
def test_a_line_that_cannot_be_parsed_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(arguments), prog_name="elasticctl")
    assert result.exit_code == 2
    assert only_line(result).startswith("elasticctl: ")
    assert "--help" in only_line(result)


def test_a_verb_misspelt_is_answered_with_the_one_meant() -> None:
    result = CliRunner().invoke(app, ["stpo", "llm"], prog_name="elasticctl")
    assert "did you mean 'stop'" in only_line(result).lower()


def test_nothing_typed_shows_the_help() -> None:
    result = CliRunner().invoke(app, [], prog_name="elasticctl")
    assert result.exit_code == 2
    assert "Commands:" in result.output


def test_what_answers_and_is_no_daemon_is_told(daemon: PretendDaemon) -> None:
    daemon._answers["GET /v1/nodes"] = [(200, {"hello": "world"})]
    result = call(daemon, "nodes")
    assert result.exit_code == 1
    assert "does not speak this API" in only_line(result)


# --- what is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "asked", "body"),
    [
        (("start", "llm"), "POST /v1/jobs/llm/start", {}),
        (
            ("start", "llm", "--nodes", "4", "--min", "2", "--max", "8", "--max-restarts", "0", "--set", "lr=1e-3", "--set", "fp=bf16", "--again", *REASON),
            "POST /v1/jobs/llm/start",
            {
                "nodes": 4,
                "min_nodes": 2,
                "max_nodes": 8,
                "max_restarts": 0,
                "parameters": {"lr": "1e-3", "fp": "bf16"},
                "again": True,
                "reason": "bad fan",
            },
        ),
        (("stop", "llm"), "POST /v1/jobs/llm/stop", {}),
        (("stop", "llm", *REASON), "POST /v1/jobs/llm/stop", {"reason": "bad fan"}),
        (("scale", "llm", "4"), "POST /v1/jobs/llm/scale", {"nodes": 4}),
        (
            ("scale", "llm", "4", "--min", "2", "--max", "8", "--if-revision", "90", *REASON),
            "POST /v1/jobs/llm/scale",
            {"nodes": 4, "min_nodes": 2, "max_nodes": 8, "if_revision": 90, "reason": "bad fan"},
        ),
        (("pause", "llm", *REASON), "POST /v1/jobs/llm/pause", {"reason": "bad fan"}),
        (("resume", "llm"), "POST /v1/jobs/llm/resume", {}),
        (("restart", "llm", *REASON), "POST /v1/jobs/llm/restart", {"reason": "bad fan"}),
        (("drain", "node-3", *REASON), "POST /v1/nodes/node-3/drain", {"reason": "bad fan"}),
        (("cordon", "node-3", *REASON), "POST /v1/nodes/node-3/cordon", {"reason": "bad fan"}),
        (("uncordon", "node-3"), "POST /v1/nodes/node-3/uncordon", {}),
    ],
)
def test_what_was_typed_is_what_is_asked(daemon: PretendDaemon, arguments: tuple[str, ...], asked: str, body: dict[str, Any]) -> None:
    daemon.tell(asked, "Change", change(before=target(), after=target()))
    detach = () if arguments[0] in ("pause", "resume", "cordon", "uncordon") else ("--detach",)
    succeeded(call(daemon, *arguments, *detach))
    assert daemon.asked == [(asked, body)]


def test_a_change_is_passed_through_as_json(daemon: PretendDaemon) -> None:
    told = change(before=target(nodes=2), after=target(nodes=4))
    daemon.tell("POST /v1/jobs/llm/scale", "Change", told, revision=123)
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(nodes_desired=4, nodes_training=4), revision=124)
    result = call(daemon, "scale", "llm", "4", "-o", "json")
    assert json.loads(succeeded(result)) == {"apiVersion": "elasticd/v1", "kind": "Change", "revision": 123, "data": told}
    assert result.stderr == ""


# --- waiting -----------------------------------------------------------------------------------------------------------


def test_start_waits_until_the_job_trains(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/start", "Change", change(after=target(nodes=4, min_nodes=2)))
    states = [job(state="waiting", why="1 of at least 2 nodes are here"), job(state="forming", why="form"), job(nodes_desired=4)]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", *states)
    result = call(daemon, "start", "llm")
    assert succeeded(result).splitlines() == [
        "llm: is to run on 4 nodes, 2 at least, 8 at most",
        "llm: training, generation 7, 2 of 4 nodes, 16 workers",
    ]
    assert result.stderr.splitlines() == [
        "llm: waiting: 1 of at least 2 nodes are here",
        "llm: forming: form",
    ]


def test_stop_waits_until_the_job_has_ended(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/stop", "Change", change(before=target(), after=target(run=False)))
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(state="stopping", run=False), job(state="stopped", why="wrong data", run=False))
    result = call(daemon, "stop", "llm", "--reason", "wrong data")
    assert succeeded(result).splitlines() == ["llm: is to stop", "llm: stopped: wrong data"]


def test_scale_says_from_where_to_where_and_waits_for_so_many_nodes(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/scale", "Change", change(before=target(nodes=2), after=target(nodes=4)))
    seen = [job(nodes_desired=4), job(state="restarting", why="join of node-4", nodes_desired=4), job(nodes_desired=4, nodes_training=4, generation=8)]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", *seen)
    result = call(daemon, "scale", "llm", "4")
    assert succeeded(result).splitlines() == ["llm: is to be scaled: nodes 2 -> 4", "llm: training, generation 8, 4 nodes, 16 workers"]
    assert daemon.times("GET /v1/jobs/llm") == 3


def test_a_dry_run_changes_nothing_and_waits_for_nothing(daemon: PretendDaemon) -> None:
    told = change(before=target(nodes=2), after=target(nodes=4, max_nodes=9), dry_run=True)
    daemon.tell("POST /v1/jobs/llm/scale", "Change", told)
    result = call(daemon, "scale", "llm", "4", "--max", "9", "--dry-run")
    assert succeeded(result) == "llm: would be scaled: nodes 2 -> 4, max_nodes 8 -> 9\n"
    assert daemon.asked == [("POST /v1/jobs/llm/scale", {"nodes": 4, "max_nodes": 9, "dry_run": True})]


def test_what_is_so_already_is_said(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/nodes/node-3/cordon", "Change", change(job=None, node="node-3", changed=False))
    assert succeeded(call(daemon, "cordon", "node-3", *REASON)) == "node-3: cordoned, nothing new is started there (it was so already)\n"


def test_a_daemon_that_reads_behind_its_writes_is_not_believed(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/scale", "Change", change(before=target(nodes=3), after=target(nodes=2)), revision=100)
    envelope = {"apiVersion": "elasticd/v1", "kind": "JobStatus"}
    old, new = job(nodes_desired=3, nodes_training=2), job()
    daemon._answers["GET /v1/jobs/llm"] = [(200, {**envelope, "revision": 99, "data": old}), (200, {**envelope, "revision": 100, "data": new})]
    succeeded(call(daemon, "scale", "llm", "2"))


def test_restart_waits_for_the_next_generation(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/restart", "Change", change(generation=7))
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(), job(state="restarting", why="restart (bad fan)"), job(generation=8))
    result = call(daemon, "restart", "llm", *REASON)
    assert succeeded(result).splitlines() == ["llm: is to restart", "llm: training, generation 8, 2 nodes, 16 workers"]


def test_a_checkpoint_is_waited_for_where_it_can_be_seen(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/checkpoint", "Change", change())
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(checkpoint_step=100), job(checkpoint_step=100), job(checkpoint_step=140))
    assert succeeded(call(daemon, "checkpoint", "llm")).splitlines() == ["llm: was asked for a checkpoint", "llm: checkpoint of step 140"]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job())
    assert "commits no checkpoints that can be seen here" in succeeded(call(daemon, "checkpoint", "llm"))


def test_drain_waits_until_nothing_runs_there(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/status", "ClusterStatus", cluster())
    daemon.tell("POST /v1/nodes/node-3/drain", "Change", change(job=None, node="node-3"))
    leaving = [{"name": "llm", "state": "leaving", "slots": 8, "why": ""}]
    daemon.tell("GET /v1/nodes/node-3", "NodeStatus", node(state="draining", jobs=leaving), node(state="drained", jobs=[]))
    result = call(daemon, "drain", "--self", *REASON)
    assert succeeded(result).splitlines() == ["node-3: is to drain", "node-3: drained"]
    assert result.stderr.splitlines() == ["node-3: draining (llm is leaving)"]


def test_a_node_that_goes_down_while_it_drains_is_looked_for_in_the_jobs(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/nodes/node-3/drain", "Change", change(job=None, node="node-3"))
    daemon.tell("GET /v1/nodes/node-3", "NodeStatus", node(state="down", jobs=[]))
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job(nodes=[member("node-3")])]}, {"jobs": [job()]})
    result = call(daemon, "drain", "node-3", *REASON)
    assert result.stderr.splitlines()[0] == "node-3: its daemon is down, and llm may still run there"
    assert succeeded(result).splitlines()[-1] == "node-3: down, and no job runs there; it is kept out when it comes back"


WAITS: dict[str, tuple[tuple[str, ...], str]] = {
    "start": (("start", "llm"), "elasticctl stop llm"),
    "stop": (("stop", "llm"), "elasticctl start llm --again"),
    "scale": (("scale", "llm", "4"), "elasticctl scale llm 2"),
    "restart": (("restart", "llm", *REASON), "elasticctl status llm"),
    "checkpoint": (("checkpoint", "llm"), "elasticctl status llm"),
    "drain": (("drain", "node-3", *REASON), "elasticctl uncordon node-3"),
}


def never(daemon: PretendDaemon, verb: str) -> str:
    """Let the daemon accept a change of which nothing comes. Returns what is looked at."""
    arguments, _ = WAITS[verb]
    if verb == "drain":
        daemon.tell("POST /v1/nodes/node-3/drain", "Change", change(job=None, node="node-3"))
        daemon.tell("GET /v1/nodes/node-3", "NodeStatus", node(state="draining"))
        return "GET /v1/nodes/node-3"
    daemon.tell(f"POST /v1/jobs/llm/{arguments[0]}", "Change", change(before=target(nodes=2), after=target(nodes=4)))
    state = {"start": "waiting", "stop": "stopping", "scale": "restarting", "restart": "restarting", "checkpoint": "training"}[verb]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(state=state, nodes_desired=4, checkpoint_step=100, run=verb != "stop"))
    return "GET /v1/jobs/llm"


@pytest.mark.parametrize("verb", WAITS)
def test_waiting_ends_with_6_when_the_time_is_over(daemon: PretendDaemon, verb: str) -> None:
    arguments, _ = WAITS[verb]
    never(daemon, verb)
    result = call(daemon, *arguments, "--timeout", "0.05")
    assert result.exit_code == 6
    last = result.stderr.splitlines()[-1]
    assert last.startswith("elasticctl: gave up waiting for ")
    assert "after 0.05 s, it goes on (" in last
    result = call(daemon, *arguments, "--timeout", "0.05", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["kind"]) == (6, "Change")
    assert json.loads(result.stderr)["error"]["code"] == "wait_timeout"


@pytest.mark.parametrize("verb", WAITS)
def test_detached_it_returns_at_once(daemon: PretendDaemon, verb: str) -> None:
    arguments, _ = WAITS[verb]
    never(daemon, verb)
    succeeded(call(daemon, *arguments, "--detach"))
    assert daemon.asked[-1][0].startswith("POST")


# --- every job ---------------------------------------------------------------------------------------------------------


def test_pause_without_a_job_pauses_every_one_that_runs_and_names_it(daemon: PretendDaemon) -> None:
    jobs = [job("a"), job("b", state="waiting"), job("c", state="succeeded"), job("d", state="stopped", run=None), job("e", state="stopping", run=False)]
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": jobs})
    for name in ("a", "b"):
        daemon.tell(f"POST /v1/jobs/{name}/pause", "Change", change(job=name))
    lines = succeeded(call(daemon, "pause", *REASON)).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["a", "b"]


def test_one_job_that_refuses_does_not_keep_the_others_from_being_paused(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job("a"), job("b")]})
    daemon.refuse("POST /v1/jobs/a/pause", 409, "conflict", "job 'a' is being changed")
    daemon.tell("POST /v1/jobs/b/pause", "Change", change(job="b"))
    result = call(daemon, "pause", *REASON, "-o", "json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["data"]["job"] == "b"
    assert json.loads(result.stderr)["error"]["message"] == "job 'a' is being changed"


def test_pause_with_no_job_running_exits_with_3(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job(state="stopped")]})
    result = call(daemon, "pause", *REASON)
    assert (result.exit_code, only_line(result)) == (3, "elasticctl: no job runs; see elasticctl status")


def test_resume_without_a_job_resumes_those_that_are_paused(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job("a", paused=True), job("b")]})
    daemon.tell("POST /v1/jobs/a/resume", "Change", change(job="a"))
    assert succeeded(call(daemon, "resume")) == "a: goes on as usual\n"
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job("b")]})
    assert succeeded(call(daemon, "resume")) == "no job is paused\n"


# --- looking -----------------------------------------------------------------------------------------------------------


def test_the_cluster_is_one_screen(daemon: PretendDaemon) -> None:
    paused = job("mnist", paused=True, state="waiting", why="1 of at least 2 nodes are here", generation=0, world_size=0, nodes_training=0)
    out = node("node-2", state="drained", reason="bad fan", by="ann (uid 1000, pid 7)", at="2026-11-30T12:00:00.000Z", slots_used=0, jobs=[])
    bad = node("node-1", state="down", slots=0, slots_used=0, gpus=[], jobs=[], problems=["jobs.d/llm.toml: unknown key"])
    waits = node(jobs=[{"name": "llm", "state": "running", "slots": 8, "why": ""}, {"name": "mnist", "state": "waiting", "slots": 0, "why": "for slots"}])
    daemon.tell("GET /v1/status", "ClusterStatus", cluster(jobs=[job(), paused], nodes=[bad, out, waits], problems=["/x: not a key"]))
    text = succeeded(call(daemon, "status"))
    print(text)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "cluster default  3 nodes: 1 ready, 1 down, 1 drained  asked node-3, elasticd 0.1.0"
    assert lines[1] == "etcd answers  10.0.0.1:2379, 10.0.0.2:2379"
    assert lines[4].split() == ["llm", "training", "7", "2/2", "16", "0/10"]
    assert lines[5].split()[:7] == ["mnist", "waiting,", "paused", "-", "0/2", "-", "0/10"]
    assert "1 of at least 2 nodes are here" in lines[5]
    assert [line.split()[:2] for line in lines[8:11]] == [["node-1", "down"], ["node-2", "drained"], ["node-3", "ready"]]
    assert "bad fan (ann, " in lines[9]
    assert "llm, mnist (waiting: for slots)" in text
    assert lines[-3:] == ["problems", "  etcd: /x: not a key", "  node-1: jobs.d/llm.toml: unknown key"]
    assert max(map(len, lines)) <= 100


def test_an_etcd_out_of_reach_is_shown_and_exits_with_4(daemon: PretendDaemon) -> None:
    etcd = {"reachable": False, "endpoints": ["10.0.0.1:2379"], "since": "2026-11-30T12:00:00.000Z", "problem": "10.0.0.1:2379: nothing listens there"}
    daemon.tell("GET /v1/status", "ClusterStatus", cluster(etcd=etcd, jobs=[]), revision=None)
    result = call(daemon, "status")
    assert result.exit_code == 4
    assert "etcd is out of reach for " in result.stdout
    assert "node-3  ready" in result.stdout
    assert result.stderr == "elasticctl: etcd is out of reach: 10.0.0.1:2379: nothing listens there\n"
    result = call(daemon, "status", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["data"]["etcd"]["reachable"]) == (4, False)
    assert json.loads(result.stderr)["error"]["code"] == "kv_unavailable"


def test_one_job_looks_as_it_does_when_it_is_read_in_etcd(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(paused=True, reason="network work"))
    text = succeeded(call(daemon, "status", "llm"))
    assert text.splitlines()[0] == "llm  training, paused"
    for words in (
        "7: join of node-2, formed ",
        "16 workers on 2 nodes",
        "2 wanted, 1 at least, 8 at most",
        "lr=0.001",
        "root (uid 0, pid 1): network work",
        "10.0.0.1:2379, revision 100",
        "node-2  training  8-15",
        "generation 7 formed: 2 nodes",
    ):
        assert words in text


def test_what_others_wrote_is_no_order_to_the_terminal(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job(why="\x1b[2J[red]x[/red]", reason="a\nb"))
    daemon.tell("GET /v1/nodes", "NodeStatusList", {"nodes": [node(state="cordoned", reason="\x1b]0;title\x07")]})
    for arguments in (("status", "llm"), ("nodes",)):
        text = succeeded(call(daemon, *arguments))
        assert not set(text) & {"\x1b", "\x07"}
    assert "[red]x[/red]" in succeeded(call(daemon, "status", "llm"))


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, daemon: PretendDaemon) -> Iterator[None]:
    """The daemon is where it always is, and this user has a run of `mine` whose etcd is gone."""
    monkeypatch.setattr(commands_watching, "SOCKET", daemon.path)
    started = process_start(os.getpid())
    assert started is not None
    base = {"cluster": "default", "endpoints": ("127.0.0.1:1",), "log_dir": Path("/nowhere"), "local": True, "scratch": Path("/nowhere")}
    with Registered(RunEntry(job="mine", pid=os.getpid(), started=started, **base)):  # type: ignore[arg-type]
        yield


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("status", "mine"), 404, "not_running"),
        (("status", "mine"), 403, "permission"),
        (("status",), 403, "permission"),
        (("status", "mine", "-w"), 403, "permission"),
    ],
)
def test_a_run_of_ours_is_found_where_the_daemon_does_not_tell_of_it(
    daemon: PretendDaemon, run_here: None, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int, code: str
) -> None:
    def end(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(looking.time, "sleep", end)
    daemon.refuse_everything(status, code)
    result = call(daemon, *arguments)
    assert result.exit_code == (130 if "-w" in arguments else 4)
    assert "127.0.0.1:1: nothing listens there" in result.output


def test_without_a_run_of_ours_the_daemons_word_stands(daemon: PretendDaemon, run_here: None) -> None:
    daemon.refuse_everything(404, "not_running", "there is no job 'other'")
    result = call(daemon, "status", "other")
    assert (result.exit_code, only_line(result)) == (3, "elasticctl: there is no job 'other'")


@pytest.mark.parametrize(
    ("jobs", "exit_code"),
    [([job()], 0), ([job(), job("old", state="succeeded")], 3), ([job(state="stopped", run=None, why="nobody has started it")], 0)],
)
def test_exit_code_tells_a_script_that_a_job_has_ended(daemon: PretendDaemon, jobs: list[dict[str, Any]], exit_code: int) -> None:
    daemon.tell("GET /v1/status", "ClusterStatus", cluster(jobs=jobs))
    assert call(daemon, "status", "--exit-code").exit_code == exit_code
    assert call(daemon, "status").exit_code == 0
    daemon.tell("GET /v1/jobs/llm", "JobStatus", jobs[-1])
    assert call(daemon, "status", "llm", "--exit-code", "-o", "json").exit_code == exit_code


@pytest.mark.parametrize(
    ("arguments", "asked", "kind", "data"),
    [
        (("status",), "GET /v1/status", "ClusterStatus", cluster()),
        (("status", "llm"), "GET /v1/jobs/llm", "JobStatus", job()),
        (("nodes",), "GET /v1/nodes", "NodeStatusList", {"nodes": [node()]}),
        (("nodes", "node-3"), "GET /v1/nodes/node-3", "NodeStatus", node()),
        (("history", "llm"), "GET /v1/jobs/llm/history", "History", {"generations": []}),
        (("events",), "GET /v1/events", "EventList", {"events": [], "last": 0}),
    ],
)
def test_answers_are_passed_through_as_json(daemon: PretendDaemon, arguments: tuple[str, ...], asked: str, kind: str, data: dict[str, Any]) -> None:
    daemon.tell(asked, kind, data, revision=5)
    result = call(daemon, *arguments, "-o", "json")
    assert json.loads(succeeded(result)) == {"apiVersion": "elasticd/v1", "kind": kind, "revision": 5, "data": data}
    assert len(result.stdout.splitlines()) == 1


def test_nodes_are_shown_with_their_state_and_reason(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/nodes", "NodeStatusList", {"nodes": [node(), node("node-4", state="cordoned", reason="ECC errors", by="ann", slots_used=0, jobs=[])]})
    lines = succeeded(call(daemon, "nodes")).splitlines()
    assert lines[1].split() == ["node-3", "ready", "8/8", "8", "llm"]
    assert lines[2].split() == ["node-4", "cordoned", "0/8", "8", "-", "ECC", "errors", "(ann)"]


def test_one_node_is_shown_whole(daemon: PretendDaemon) -> None:
    kept = [{"name": "llm", "state": "kept_out", "slots": 0, "why": "the node is drained"}]
    daemon.tell("GET /v1/nodes/node-3", "NodeStatus", node(state="drained", reason="bad fan", by="ann", jobs=kept, problems=["disk is full"]))
    text = succeeded(call(daemon, "nodes", "node-3"))
    assert text.splitlines()[0] == "node-3  drained: bad fan (ann)"
    for words in ("8 of 8 in use", "rack=b2", "GPU-7", "kept out  -      the node is drained", "node-3: disk is full"):
        assert words in text


def test_without_nodes_or_jobs_that_is_said(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/nodes", "NodeStatusList", {"nodes": []})
    assert succeeded(call(daemon, "nodes")) == "no node is known\n"
    daemon.tell("GET /v1/status", "ClusterStatus", cluster(jobs=[]))
    assert "no job is known" in succeeded(call(daemon, "status"))


GENERATIONS = [
    {"number": 6, "at": "2026-11-30T11:00:00.000Z", "what": "formed", "detail": "1 node, 8 workers: first formation"},
    {"number": 7, "at": "2026-11-30T12:00:00.000Z", "what": "formed", "detail": "2 nodes, 16 workers: join of node-2"},
]


def test_history_tells_what_became_of_each_generation(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/jobs/llm/history", "History", {"generations": GENERATIONS})
    lines = succeeded(call(daemon, "history", "llm")).splitlines()
    assert [line.split()[0] for line in lines] == ["generation", "6", "7"]
    assert "2 nodes, 16 workers: join of node-2" in lines[2]
    assert len(succeeded(call(daemon, "history", "llm", "-n", "1")).splitlines()) == 2
    assert [json.loads(line) for line in succeeded(call(daemon, "history", "llm", "-o", "jsonl")).splitlines()] == GENERATIONS
    assert json.loads(succeeded(call(daemon, "history", "llm", "-n", "1", "-o", "json")))["data"]["generations"] == GENERATIONS[1:]


def event(number: int, **fields: Any) -> dict[str, Any]:
    base = {"id": number, "at": "2026-11-30T12:00:00.000Z", "job": "llm", "node": None, "kind": "generation", "what": "formed", "detail": "2 nodes"}
    return {**base, "by": None, "generation": 7, **fields}


AUDIT = {"kind": "audit", "what": "scale", "detail": "nodes 2 -> 4", "by": "root (uid 0, pid 1) on node-3", "generation": None}


def test_events_are_a_line_each(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/events?job=llm&node=node-3", "EventList", {"events": [event(1), event(2, **AUDIT)], "last": 2})
    lines = succeeded(call(daemon, "events", "--job", "llm", "--node", "node-3")).splitlines()
    assert [line.partition("  ")[2] for line in lines] == ["llm  generation 7 formed: 2 nodes", "llm  scale by root (uid 0, pid 1) on node-3: nodes 2 -> 4"]
    daemon.tell("GET /v1/events", "EventList", {"events": [event(1), event(2)], "last": 2})
    assert [json.loads(line)["id"] for line in succeeded(call(daemon, "events", "-n", "1", "-o", "jsonl")).splitlines()] == [2]


# --- version -----------------------------------------------------------------------------------------------------------


def test_version_tells_the_daemons_too(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/status", "ClusterStatus", cluster(version="9.9.9"))
    assert succeeded(call(daemon, "version")) == f"elasticctl {elasticd.__version__}\nelasticd 9.9.9 on node-3\n"
    data = json.loads(succeeded(call(daemon, "version", "-o", "json")))["data"]
    assert data == {"client": elasticd.__version__, "daemon": "9.9.9", "node": "node-3"}


def test_version_of_a_daemon_that_is_named_and_not_there(tmp_path: Path) -> None:
    result = call(tmp_path / "no.sock", "version")
    assert (result.exit_code, result.stdout) == (0, f"elasticctl {elasticd.__version__}\n")
    assert result.stderr.startswith("elasticctl: no daemon answers")


# --- as processes ------------------------------------------------------------------------------------------------------


def process(daemon: PretendDaemon, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "ELASTICCTL_SOCKET": str(daemon.path), "TERM": "xterm", **options.pop("env", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "elasticd.cli", *arguments], cwd=ROOT, env=environment, **streams)


@pytest.mark.parametrize("verb", WAITS)
def test_ctrl_c_ends_the_waiting_and_says_that_the_work_goes_on(daemon: PretendDaemon, verb: str) -> None:
    arguments, command = WAITS[verb]
    looked = never(daemon, verb)
    with process(daemon, *arguments) as waits:
        daemon.await_asked(looked, times=3)
        waits.send_signal(signal.SIGINT)
        _, err = waits.communicate(timeout=20)
    assert waits.returncode == 130
    last = err.decode().splitlines()[-1]
    assert last.startswith("elasticctl: interrupted; ")
    assert "goes on" in last
    assert last.endswith(command)
    assert "Traceback" not in err.decode()


def test_ctrl_c_ends_following_events(daemon: PretendDaemon) -> None:
    daemon.tell("GET /v1/events", "EventList", {"events": [event(1)], "last": 1})
    daemon.tell("GET /v1/events?after=1", "EventList", {"events": [event(2)], "last": 2})
    daemon.tell("GET /v1/events?after=2", "EventList", {"events": [], "last": 2})
    with process(daemon, "events", "-f", "-o", "jsonl") as follows:
        daemon.await_asked("GET /v1/events?after=2", times=2)
        follows.send_signal(signal.SIGINT)
        out, err = follows.communicate(timeout=20)
    assert (follows.returncode, err) == (130, b"")
    assert [json.loads(line)["id"] for line in out.splitlines()] == [1, 2]


def test_following_goes_on_over_a_daemon_that_is_away(daemon: PretendDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.tell("GET /v1/events", "EventList", {"events": [], "last": 1})
    daemon.refuse("GET /v1/events?after=1", 503, "kv_unavailable", "etcd is away")
    daemon._answers["GET /v1/events?after=1"] *= 2
    daemon._answers["GET /v1/events?after=1"].append((200, {"apiVersion": "elasticd/v1", "kind": "EventList", "data": {"events": [event(2)], "last": 2}}))

    daemon.tell("GET /v1/events?after=2", "EventList", {"events": [], "last": 2})

    def end(_seconds: float) -> None:
        if daemon.times("GET /v1/events?after=2"):
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", end)
    result = call(daemon, "events", "-f")
    assert result.exit_code == 130
    assert "generation 7 formed" in result.stdout
    assert result.stderr.splitlines()[0] == "elasticctl: etcd is away"
    assert watching.FOLLOW_EVERY == 1.0


def read_terminal(terminal: int, until: str, *, within: float = 20.0) -> str:
    """What a process wrote to its terminal, up to some words."""
    text, deadline = "", time.monotonic() + within
    while until not in text:
        assert time.monotonic() < deadline, text
        text += os.read(terminal, 4096).decode()
    return text


def on_terminal(daemon: PretendDaemon, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    try:
        return process(daemon, *arguments, stdin=theirs, stderr=theirs, env={"COLUMNS": "80"}), ours
    finally:
        os.close(theirs)


DISRUPTIVE: dict[str, tuple[Sequence[str], str, str]] = {
    "stop": (("stop", "llm"), "Stop job llm: training, generation 7, 2 nodes, 16 workers? [y/N] ", "POST /v1/jobs/llm/stop"),
    "restart": (("restart", "llm", *REASON), "Restart job llm: training, generation 7, 2 nodes, 16 workers? [y/N] ", "POST /v1/jobs/llm/restart"),
    "drain": (("drain", "node-3", *REASON), "Drain node node-3? It leaves llm. [y/N] ", "POST /v1/nodes/node-3/drain"),
}


@pytest.mark.parametrize(("typed", "changed"), [("y\n", True), ("n\n", False), ("\n", False)])
@pytest.mark.parametrize("verb", DISRUPTIVE)
def test_what_disturbs_is_asked_about_on_a_terminal(daemon: PretendDaemon, verb: str, typed: str, changed: bool) -> None:
    arguments, question, asked = DISRUPTIVE[verb]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", job())
    daemon.tell("GET /v1/nodes/node-3", "NodeStatus", node())
    daemon.tell(asked, "Change", change())
    asks, terminal = on_terminal(daemon, *arguments, "--detach")
    with asks:
        assert read_terminal(terminal, "[y/N] ") == question
        os.write(terminal, typed.encode())
        if not changed:
            assert "elasticctl: nothing was changed" in read_terminal(terminal, "changed\r\n")
        assert asks.wait(20) == (0 if changed else 1)
    os.close(terminal)
    assert daemon.times(asked) == int(changed)


@pytest.mark.parametrize("verb", DISRUPTIVE)
def test_yes_answers_before_it_is_asked(daemon: PretendDaemon, verb: str) -> None:
    arguments, _, asked = DISRUPTIVE[verb]
    daemon.tell(asked, "Change", change())
    does, terminal = on_terminal(daemon, *arguments, "--detach", "-y")
    with does:
        assert does.wait(20) == 0
    os.close(terminal)
    assert [what for what, _ in daemon.asked] == [asked]


def test_on_a_terminal_progress_carries_the_time_and_is_drawn_in_place(daemon: PretendDaemon) -> None:
    daemon.tell("POST /v1/jobs/llm/scale", "Change", change(before=target(nodes=2), after=target(nodes=4)))
    seen = [job(state="restarting", why="x" * 200, nodes_desired=4)] * 3
    seen += [job(state="waiting", why="zzz", nodes_desired=4), job(nodes_desired=4, nodes_training=4)]
    daemon.tell("GET /v1/jobs/llm", "JobStatus", *seen)
    waits, terminal = on_terminal(daemon, "scale", "llm", "4")
    with waits:
        text = read_terminal(terminal, "zzz\r\n")
        out, _ = waits.communicate(timeout=20)
    os.close(terminal)
    assert (waits.returncode, out.splitlines()[-1]) == (0, b"llm: training, generation 7, 4 nodes, 16 workers")
    first, last = text.split("\r\n")[:2]
    drawn = first.split("\r\x1b[2K")[1:]
    assert len(drawn) == 3
    assert all(line.startswith("    ") and " s  llm: restarting: xxx" in line and len(line) < 80 for line in drawn)
    assert last.endswith(" s  llm: waiting: zzz")


# --- completion --------------------------------------------------------------------------------------------------------


def complete(line: str, socket: Path) -> tuple[list[str], str, float]:
    words = line.split(" ")
    environment = {**os.environ, "_ELASTICCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    environment["ELASTICCTL_SOCKET"] = str(socket)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "elasticd.cli"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    return done.stdout.split(), done.stderr, time.monotonic() - began


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("elasticctl scale l", ["llm", "llama"]),
        ("elasticctl status ", ["llm", "llama", "mnist"]),
        ("elasticctl events --job m", ["mnist"]),
        ("elasticctl drain node-", ["node-3", "node-4"]),
        ("elasticctl unc", ["uncordon"]),
    ],
)
def test_the_shell_completes_what_the_daemon_knows(daemon: PretendDaemon, line: str, names: list[str]) -> None:
    daemon.tell("GET /v1/jobs", "JobStatusList", {"jobs": [job("llm"), job("llama"), job("mnist")]})
    daemon.tell("GET /v1/nodes", "NodeStatusList", {"nodes": [node(), node("node-4")]})
    found, err, _ = complete(line, daemon.path)
    assert (found, err) == (names, "")


def test_without_a_daemon_completion_is_silent(tmp_path: Path) -> None:
    found, err, _ = complete("elasticctl scale l", tmp_path / "no.sock")
    assert (found, err) == ([], "")


# --- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    [
        *("run", "status", "nodes", "start", "stop", "scale", "drain", "cordon", "uncordon"),
        *("pause", "resume", "checkpoint", "restart", "history", "events", "version"),
    ],
)
def test_every_verb_has_help_with_examples(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"], prog_name="elasticctl")
    text = succeeded(result)
    assert "Examples:" in text
    assert f"elasticctl {verb}" in text
    assert f"  {verb} " in CliRunner().invoke(app, ["--help"], prog_name="elasticctl").stdout
