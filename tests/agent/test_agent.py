"""An agent as whoever starts it sees it: a real process on a real etcd, told by a file and by signals, and judged by what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MakeNodes
from tests.e2e.nodes import Nodes, alive
from tests.support.etcd import Authority, Server, running

ALONE: dict[str, Any] = {"max_nodes": 1, "desired": 1, "cwd": "/", "max_restarts": 0}
WAIT = ("sh", "-c", 'until [ -e "$GATE" ]; do sleep 0.05; done')

MakeOne = Callable[..., Nodes]


@pytest.fixture
def one(make_nodes: MakeNodes, server: Server, tmp_path: Path) -> MakeOne:
    """A node of its own job, started, with a result file beside an earlier run's."""

    def make(
        *argv: str, endpoints: list[str] | None = None, env: dict[str, str] | None = None, environment: dict[str, str] | None = None, **config: Any
    ) -> Nodes:
        result = tmp_path / "result.json"
        result.write_text("of an earlier run")
        variables = {"GATE": str(tmp_path / "gate"), **(env or {})}
        nodes = make_nodes(endpoints or [server.endpoint], argv=list(argv), env=variables, result_file=str(result), **{**ALONE, **config})
        nodes.start("a", environment=environment)
        return nodes

    return make


def result_of(nodes: Nodes) -> dict[str, Any]:
    """What the agent left, when it was to have ended already."""
    found: dict[str, Any] = json.loads(Path(nodes._config["result_file"]).read_text())
    assert found.pop("ended_at") > 1e9
    return found


def trains(nodes: Nodes) -> list[int]:
    """Wait for the first workers."""
    pids: list[int] = nodes.await_(lambda: nodes.workers("a"), what="workers", within=60.0)
    return pids


# --- what workers get


def test_workers_get_what_the_configuration_says(one: MakeOne, tmp_path: Path) -> None:
    """Devices, CPUs and variables, and none of what belongs to elasticd; and the job succeeds."""
    cpu = min(os.sched_getaffinity(0))
    script = (
        'echo "$LOCAL_RANK $CUDA_VISIBLE_DEVICES $GREETING [$ELASTICD_SECRET$ETCDCTL_KEY$NOTIFY_SOCKET] $ELASTICD_JOB $WORLD_SIZE";'
        " grep Cpus_allowed_list /proc/self/status"
    )
    env = {"GREETING": "good day", "WORLD_SIZE": "77"}
    hidden = {"ELASTICD_SECRET": "a", "ETCDCTL_KEY": "b", "NOTIFY_SOCKET": "c"}
    nodes = one("sh", "-c", script, env=env, environment=hidden, nproc=2, devices=["GPU-x", "GPU-y"], cpus=[[cpu], []])
    assert nodes.wait("a") == 0
    first = nodes.events("a", "workers_started")[0]["logs"]
    told = [Path(first, f"rank-{rank}/stdout.log").read_text().splitlines() for rank in (0, 1)]
    assert [lines[0] for lines in told] == [f"{rank} GPU-x,GPU-y good day [] job 2" for rank in (0, 1)]
    assert told[0][1] == f"Cpus_allowed_list:\t{cpu}"
    assert result_of(nodes) == {"code": 0, "result": "succeeded", "reason": nodes.events("a", "agent_exit")[0]["reason"]}


# --- its last word


def test_a_failed_job_is_told_with_its_reason_whatever_the_worker_left(one: MakeOne) -> None:
    """Garbage where torch expects JSON is no trouble."""
    nodes = one("sh", "-c", 'echo "{garbage" > "$TORCHELASTIC_ERROR_FILE"; exit 3')
    assert nodes.wait("a") == 1
    told = result_of(nodes)
    assert (told["code"], told["result"]) == (1, "failed")
    assert "rank 0 on a: exit code 3" in told["reason"]


def test_a_node_that_is_asked_to_leave_says_that_it_left(one: MakeOne, tmp_path: Path) -> None:
    """The result of the earlier run was gone from the beginning."""
    nodes = one(*WAIT)
    trains(nodes)
    assert not (tmp_path / "result.json").exists()
    nodes.processes["a"].terminate()
    assert nodes.wait("a") == 0
    assert result_of(nodes) == {"code": 0, "result": "left", "reason": "asked to leave"}


def test_a_killed_agent_leaves_no_result(one: MakeOne, tmp_path: Path) -> None:
    """Not even that of an earlier run. Its workers die with it."""
    nodes = one(*WAIT)
    (worker,) = trains(nodes)
    nodes.kill("a")
    nodes.await_(lambda: not alive(worker), what="the end of its worker")
    assert not (tmp_path / "result.json").exists()


def test_an_etcd_out_of_reach_is_told(one: MakeOne) -> None:
    """Before torch is imported."""
    nodes = one("true", endpoints=["127.0.0.1:1"])
    assert nodes.wait("a") == 4
    told = result_of(nodes)
    assert (told["code"], told["result"]) == (4, "failed")
    assert "127.0.0.1:1" in told["reason"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nproc": 0}, "nproc: Input should be greater than or equal to 1"),
        ({"no_such_key": 1}, "no_such_key: Extra inputs are not permitted"),
        ({"user": "no-such-user"}, "job file asks for user no-such-user, whom this machine does not know"),
    ],
)
def test_a_bad_configuration_is_told_where_the_daemon_looks(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """In the one line that is also on standard error."""
    result = tmp_path / "result.json"
    config = {**ALONE, "job": "job", "node": "a", "argv": ["true"], "log_dir": str(tmp_path / "logs"), "endpoints": ["127.0.0.1:1"]}
    (tmp_path / "a.json").write_text(json.dumps({**config, "result_file": str(result), **change}))
    done = subprocess.run([sys.executable, "-m", "elasticd.agent", str(tmp_path / "a.json")], capture_output=True, text=True, timeout=60)
    told = json.loads(result.read_text())
    assert (done.returncode, told["code"], told["result"]) == (2, 2, "failed")
    assert said in told["reason"]
    assert done.stderr == f"elasticd-agent: {told['reason']}\n"


# --- what it is asked while it runs

SAYS = """
trap 'echo asked >> "$SAID.$RANK"' USR1
echo up >> "$SAID.$RANK"
"""


def test_a_wish_for_a_checkpoint_reaches_the_workers_that_catch_it_and_ends_none(one: MakeOne, tmp_path: Path) -> None:
    """Rank 0 has a handler and rank 1 has none."""
    said = tmp_path / "said"
    script = f'if [ "$RANK" = 0 ]; then {SAYS} else echo up >> "$SAID.$RANK"; fi; until [ -e "$GATE" ]; do sleep 0.05; done'
    nodes = one("sh", "-c", script, env={"SAID": str(said)}, nproc=2)
    trains(nodes)
    nodes.await_(lambda: all(said.with_suffix(f".{rank}").exists() for rank in (0, 1)), what="both workers being up")
    nodes.processes["a"].send_signal(signal.SIGUSR1)
    nodes.await_(lambda: said.with_suffix(".0").read_text() == "up\nasked\n", what="rank 0 being asked")
    (line,) = nodes.events("a", "checkpoint_asked")
    assert (line["generation"], line["signalled"], line["not_catching"]) == (1, [0], [1])
    (tmp_path / "gate").touch()
    assert nodes.wait("a") == 0
    assert result_of(nodes)["result"] == "succeeded"
    assert len(nodes.events("a", "workers_started")) == 1


@pytest.fixture
def secure(binary: Path, tmp_path: Path) -> Iterator[tuple[Server, dict[str, Any]]]:
    """An etcd that wants certificates, and where an agent's lie."""
    authority = Authority(tmp_path / "tls")
    agent = authority.issue("agent", common_name="agent")
    with running(Server(binary, tmp_path / "secure", tls=(authority, authority.issue("server")))) as server:
        yield server, {"cacert": str(authority.cacert), "cert": str(agent.cert), "key": str(agent.key)}


def test_hanging_up_reloads_certificates_under_a_daemon(one: MakeOne, secure: tuple[Server, dict[str, Any]]) -> None:
    """Those that are no good are said to be, the old ones stay in use, and training never stops."""
    server, files = secure
    nodes = one(*WAIT, endpoints=[server.endpoint], **files)
    (worker,) = trains(nodes)
    agent = nodes.processes["a"]
    key = Path(files["key"]).read_text()
    Path(files["key"]).write_text("not a key")
    agent.send_signal(signal.SIGHUP)
    (line,) = nodes.await_(lambda: nodes.events("a", "certificates_not_reloaded"), what="a refusal")
    assert files["key"] in line["reason"]
    Path(files["key"]).write_text(key)
    agent.send_signal(signal.SIGHUP)
    nodes.await_(lambda: nodes.events("a", "certificates_reloaded"), what="a reload")
    assert alive(worker)
    agent.terminate()
    assert nodes.wait("a") == 0
    assert result_of(nodes)["result"] == "left"


def test_hanging_up_means_to_leave_where_no_daemon_started_it(make_nodes: MakeNodes, server: Server) -> None:
    """The terminal of `elasticctl run` is gone."""
    nodes = make_nodes([server.endpoint], argv=["sleep", "1000"], **ALONE)
    nodes.start("a")
    trains(nodes)
    nodes.processes["a"].send_signal(signal.SIGHUP)
    assert nodes.wait("a") == 0
    assert nodes.events("a", "agent_exit")[0]["result"] == "left"
