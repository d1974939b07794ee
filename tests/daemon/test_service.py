"""A daemon from the outside: agents start, stay, leave and are found again, whatever happens to the daemon, its files and its etcd."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elasticd.daemon.processes import process_start
from elasticd.kv import Put
from elasticd.rendezvous.records import RequestKind, RequestRecord
from tests.support.etcd import await_

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemon.daemons import Cluster

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trains(cluster: Cluster) -> Cluster:
    """One node, whose daemon runs a job of one worker."""
    cluster.job("a")
    cluster.want()
    cluster.start("a")
    cluster.await_state("a", "running")
    cluster.await_workers(1)
    return cluster


def test_a_wanted_job_is_started_and_the_nodes_key_says_so(trains: Cluster) -> None:
    record = trains.record("a")
    assert record is not None
    assert [(job.name, job.state.value, job.slots) for job in record.jobs] == [("job", "running", 1)]
    assert record.problems == ()
    assert trains.events("a", "agent_started")[0]["pid"] == trains.agent("a")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT], ids=["killed", "ended alone"])
def test_the_next_daemon_takes_over_the_agent_of_one_that_was(trains: Cluster, number: signal.Signals) -> None:
    """Not one worker is started anew, and an end of the agent is still noticed."""
    agent, (worker,) = trains.agent("a"), trains.workers()
    code = trains.end("a", number)
    assert code == (0 if number is signal.SIGQUIT else -signal.SIGKILL)
    assert process_start(agent) is not None
    first = trains.record("a")
    trains.start("a")
    await_(lambda: (now := trains.record("a")) and (not first or now.incarnation != first.incarnation), within=20, what="the new daemon's key")
    assert trains.await_state("a", "running") == ""
    assert (trains.agent("a"), trains.workers()) == (agent, [worker])
    os.kill(agent, signal.SIGKILL)
    await_(lambda: trains.agent("a") not in (0, agent), within=20, what="another agent")
    assert trains.events("a", "agent_ended")[-1]["result"] == "killed"


def test_a_daemon_that_is_told_to_end_lets_its_agents_leave_first(trains: Cluster) -> None:
    (worker,) = trains.workers()
    assert trains.end("a") == 0
    assert trains.workers() == []
    assert f"{worker} {signal.SIGTERM.value}" in (trains.out / "signals").read_text().splitlines()
    assert trains.record("a") is None, "the node's key goes at once, not with its lease"
    assert trains.kv.get(trains.keys.job("job").member("a")) is None


def test_a_drained_node_leaves_its_jobs_and_is_taken_back_when_the_word_is(trains: Cluster) -> None:
    trains.say("a", draining=True, reason="new fan", by="kim")
    assert trains.await_state("a", "kept_out") == "the node is drained: new fan"
    assert trains.workers() == []
    trains.say("a")
    trains.await_state("a", "running")
    trains.await_workers(1)


def test_a_cordoned_node_goes_on_with_what_runs_and_starts_nothing_new(trains: Cluster) -> None:
    trains.say("a", cordoned=True, reason="noise")
    trains.job("a", "other")
    trains.want("other")
    assert trains.await_state("a", "kept_out", "other") == "the node is cordoned: noise"
    assert trains.stands("a")[0] == "running"
    assert len(trains.workers()) == 1


def test_a_stopped_job_ends_here_and_starts_again_when_it_is_wanted(trains: Cluster) -> None:
    trains.want(run=False, reason="night")
    await_(lambda: not trains.workers(), within=20, what="the end of the workers")
    assert trains.await_state("a", "ended").startswith("stopped at generation 1: night")
    trains.want()
    trains.await_state("a", "running")
    trains.await_workers(1)


def test_a_killed_agent_is_started_again_after_a_pause(trains: Cluster) -> None:
    (worker,), agent = trains.workers(), trains.agent("a")
    os.kill(agent, signal.SIGKILL)
    await_(lambda: trains.agent("a") not in (0, agent), within=20, what="another agent")
    (other,) = await_(lambda: [pid for pid in trains.workers() if pid != worker], within=20, what="another worker")
    assert process_start(worker) is None
    assert other != worker
    assert trains.events("a", "agent_ended")[-1]["in_a_row"] == 1


def test_without_etcd_all_stays_as_it_is_and_is_told(trains: Cluster) -> None:
    agent, workers = trains.agent("a"), trains.workers()
    trains.server.pause()
    await_(lambda: trains.events("a", "frozen"), within=20, what="the daemon noticing")
    trains.job("a", "other")
    assert (trains.agent("a"), trains.workers()) == (agent, workers)
    trains.server.resume()
    await_(lambda: trains.events("a", "thawed"), within=20, what="the daemon noticing")
    trains.await_state("a", "idle", "other")
    assert trains.stands("a")[0] == "running"


def test_a_bad_job_file_is_named_and_takes_no_other_with_it(trains: Cluster) -> None:
    path = trains.job("a", "bad", 'colour = "blue"')
    trains.want("bad")
    why = trains.await_state("a", "refused", "bad")
    assert "colour" in why
    record = trains.record("a")
    assert record is not None
    assert [problem for problem in record.problems if path.name in problem]
    trains.job("a", "job", 'colour = "blue"')
    await_(lambda: "could not be started again" in trains.stands("a")[1], within=10, what="the daemon noticing the running job's file")
    assert trains.stands("a")[0] == "running"
    assert len(trains.workers()) == 1


def test_a_failed_check_keeps_the_node_out_with_what_it_said(cluster: Cluster) -> None:
    script = cluster.folder / "check.sh"
    script.write_text("#!/bin/sh\necho fan 3 is dead\nexit 1\n")
    script.chmod(0o755)
    cluster.job("a", more=f'health_check = ["{script}"]')
    cluster.want()
    cluster.start("a")
    why = cluster.await_state("a", "kept_out")
    assert "fan 3 is dead" in why
    item = await_(lambda: cluster.kv.get(cluster.keys.policy("a")), what="the node's policy")
    policy = json.loads(item.value)
    assert (policy["cordoned"], policy["by"]) == (True, "elasticd on a")
    assert "fan 3 is dead" in policy["reason"]
    script.write_text("#!/bin/sh\nexit 0\n")
    cluster.say("a")
    cluster.await_state("a", "running")


def test_typed_parameters_reach_the_command_and_wrong_ones_are_refused(cluster: Cluster) -> None:
    cluster.job("a", more='[parameters.lr]\ntype = "float"\nmin = 0\nmax = 1', args=("--lr={lr}",))
    cluster.want(parameters={"lr": 7.0})
    cluster.start("a")
    assert "lr" in cluster.await_state("a", "refused")
    cluster.want(parameters={"lr": 0.25})
    cluster.await_state("a", "running")
    cluster.await_workers(1)
    assert (cluster.out / "started").read_text().split()[2:] == ["--lr=0.25"]


def test_a_checkpoint_that_is_asked_for_reaches_workers_that_listen(trains: Cluster) -> None:
    keys = trains.keys.job("job")
    record = RequestRecord(scope=keys.scope, kind=RequestKind.CHECKPOINT, generation=1, by="kim")
    trains.kv.txn([], [Put(key=keys.request("checkpoint"), value=record.to_bytes())])
    (worker,) = trains.workers()
    signals = trains.out / "signals"
    await_(lambda: signals.exists() and f"{worker} {signal.SIGUSR1.value}" in signals.read_text().splitlines(), what="the signal")
    assert trains.workers() == [worker]


def test_two_nodes_train_together_and_one_goes_on_alone(trains: Cluster) -> None:
    trains.job("b")
    trains.start("b")
    trains.await_state("b", "running")
    await_(lambda: [line.split()[1] for line in (trains.out / "started").read_text().splitlines()][-2:] == ["2", "2"], within=30, what="a world of two")
    assert trains.end("b") == 0
    await_(lambda: (trains.out / "started").read_text().splitlines()[-1].split()[1] == "1", within=30, what="a world of one")
    trains.await_workers(1)


def test_a_job_that_is_to_stop_when_all_its_nodes_are_gone_is_ended_by_another_node(trains: Cluster) -> None:
    trains.processes["a"].kill()
    os.kill(trains.agent("a"), signal.SIGKILL)
    trains.job("b")
    trains.say("b", cordoned=True, reason="noise")
    trains.start("b")
    trains.want(run=False, reason="night")
    assert trains.await_state("b", "ended", within=30).startswith("stopped at generation 1: night")
    assert trains.events("b", "deserted_job_ended")[0]["generation"] == 1


def test_the_service_manager_is_told_of_readiness_life_and_the_end(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(20)
        manager.bind(str(tmp_path / "notify"))
        cluster.start("a", environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1500000"})
        heard: list[bytes] = []
        while heard.count(b"WATCHDOG=1") < 4:
            heard.append(manager.recv(4096))
        assert b"READY=1" in heard
        assert any(line.startswith(b"STATUS=") for line in heard)
        cluster.processes["a"].send_signal(signal.SIGTERM)
        while heard[-1] != b"STOPPING=1":
            heard.append(manager.recv(4096))
        assert cluster.processes["a"].wait(20) == 0


def test_a_reload_takes_what_is_good_and_keeps_what_was_where_it_is_not(trains: Cluster) -> None:
    trains.configure("a", tables="[nonsense]\nx = 1")
    trains.processes["a"].send_signal(signal.SIGHUP)
    await_(lambda: trains.events("a", "not_reloaded"), what="the refusal")
    assert "nonsense" in trains.events("a", "not_reloaded")[-1]["reason"]
    trains.configure("a", 'labels = { rack = "7" }')
    trains.processes["a"].send_signal(signal.SIGHUP)
    await_(lambda: (record := trains.record("a")) and record.labels == {"rack": "7"}, what="the new label")
    assert len(trains.workers()) == 1


def test_a_second_daemon_of_the_node_is_refused(trains: Cluster) -> None:
    second = subprocess.run(
        [sys.executable, "-P", "-m", "elasticd.daemon", "run", "--config", str(trains.home("a") / "elasticd.toml")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 8
    assert f"another daemon (pid {trains.processes['a'].pid}) uses" in second.stderr.splitlines()[-1]
    assert trains.stands("a")[0] == "running"


def test_a_bad_configuration_ends_it_with_2_and_one_line_that_names_the_key(cluster: Cluster) -> None:
    path = cluster.configure("a", tables="[timing]")
    path.write_text(path.read_text().replace("loop_wait = 1.0", "loop_wait = 9").removesuffix("[timing]\n"))
    ended = subprocess.run([sys.executable, "-P", "-m", "elasticd.daemon", "run", "-c", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"elasticd: {path}: timing: loop_wait 9 + 2 x retry_timeout 1 <= ttl 4 does not hold: a slow round would cost the node its lease"
    )
