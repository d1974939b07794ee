"""Nothing lost, nothing doubled: real agents, real workers that use `trainer`, and every sample counted where its loss was computed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.kv import EtcdKV, KVConfig, TLSFiles
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.records import CheckpointRecord
from tests.e2e.nodes import now
from tests.support.etcd import Authority, Server, running
from tests.support.ledger import Count, count

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeNodes

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).with_name("elastic.py")
SAMPLES = 640


class Job:
    """A job of nodes that train `elastic.py`."""

    def __init__(
        self,
        server: Server,
        make_nodes: MakeNodes,
        *,
        steps: int = 0,
        least: int = 1,
        trainer: dict[str, Any] | None = None,
        tls: TLSFiles | None = None,
        **env: Any,
    ) -> None:
        self.server, self.endless = server, not steps
        variables = {
            "STEPS": str(steps or 1_000_000),
            "SAMPLES": str(SAMPLES),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            **{k: str(v) for k, v in env.items()},
        }
        settings = {"snapshot_every": 1, "checkpoint_every_s": 0.0, **(trainer or {})}
        command = [sys.executable, "-u", str(SCRIPT)]
        files = {"cacert": str(tls.cacert), "cert": str(tls.cert), "key": str(tls.key)} if tls else {}
        sizes = {"min_nodes": least, "max_nodes": 4, "desired": 4, "max_restarts": 1000}
        self.nodes = make_nodes([server.endpoint], argv=command, env=variables, trainer_file=settings, stop_grace=15.0, **sizes, **files)

    def begin(self, *names: str) -> None:
        begun = now()
        for name in names:
            self.nodes.start(name)
        self.nodes.stepping(len(names), after=begun)

    def at_step(self, step: int, within: float = 60.0) -> None:
        """Wait until a worker is at that step or beyond."""
        self.nodes.await_(lambda: any(line["step"] >= step for line in self.nodes.steps()), f"step {step}", within=within)

    def worker(self, node: str) -> int:
        (pid,) = self.nodes.workers(node)
        return int(pid)

    def finish(self, *names: str) -> Count:
        """Wait for success on these nodes, at once where no number of steps was given; what was counted."""
        if self.endless:
            (self.nodes.out / "enough").touch()
        for name in names:
            assert self.nodes.wait(name, within=120.0) == 0, self.nodes.story()
        return self.count()

    def count(self) -> Count:
        return count(self.nodes.steps(), samples=SAMPLES)

    def weights(self) -> set[str]:
        return {json.loads(path.read_text())["weights"] for path in self.nodes.out.glob("result-*.json")}

    def key(self, name: str, **wanted: Any) -> bool:
        """Whether that key of the job says all this."""
        with EtcdKV(KVConfig(endpoints=(self.server.endpoint,))) as kv:
            held = kv.get(JobKeys("default", "job").prefix + name)
        said = json.loads(held.value) if held else {}
        return bool(wanted.items() <= said.items())

    def committed(self) -> CheckpointRecord | None:
        with EtcdKV(KVConfig(endpoints=(self.server.endpoint,))) as kv:
            held = kv.get(JobKeys("default", "job").checkpoint)
        return CheckpointRecord.model_validate_json(held.value) if held else None


def test_a_node_that_joins_and_one_that_leaves_cost_no_step_and_no_sample(server: Server, make_nodes: MakeNodes) -> None:
    """1 -> 2 -> 1, planned both times."""
    job = Job(server, make_nodes)
    job.begin("a")
    joined = now()
    job.nodes.start("b")
    job.nodes.stepping(2, after=joined)
    left = now()
    job.nodes.processes["a"].terminate()
    job.nodes.stepping(1, after=left)
    assert job.nodes.wait("a") == 0
    counted = job.finish("b")
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)


def test_killed_workers_cost_a_step_at_most_and_the_weights_are_those_of_an_unbroken_run(server: Server, make_nodes: MakeNodes) -> None:
    """SIGKILL at any instant, three times, at the same world size: bitwise equal in the end."""
    job = Job(server, make_nodes, steps=60, least=2)
    job.begin("a", "b")
    for step in (10, 25, 40):
        job.at_step(step)
        at = now()
        os.kill(job.worker(random.choice("ab")), signal.SIGKILL)
        job.nodes.stepping(2, after=at)
    counted = job.finish("a", "b")
    assert (counted.steps, counted.repeated, counted.missed) == (60, 0, 0)
    assert len(counted.lost) >= 3
    assert max(counted.lost) <= 1
    unbroken = Job(server, make_nodes, steps=60, least=2, STEP_TIME=0.0)
    unbroken.nodes._config["job"] = "unbroken"
    unbroken.begin("a", "b")
    unbroken.finish("a", "b")
    assert len(job.weights()) == 1
    assert job.weights() == unbroken.weights()


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_rank_that_dies_around_its_optimizer_step_while_the_other_finishes_it_leaves_one_state(server: Server, make_nodes: MakeNodes, where: str) -> None:
    """The other may hold a newer snapshot: both begin with the newest that both have, and no sample is doubled."""
    job = Job(server, make_nodes, steps=40, least=2, DIE=f"1:17:{where}")
    job.begin("a", "b")
    counted = job.finish("a", "b")
    assert (counted.steps, counted.repeated, counted.missed) == (40, 0, 0)
    assert (job.nodes.out / "died").exists()
    assert sum(counted.lost) <= 1
    assert len(job.weights()) == 1


def test_a_lost_node_costs_a_step_at_most(server: Server, make_nodes: MakeNodes) -> None:
    """SIGKILL of rank 0's agent: the survivor goes on from its own memory."""
    job = Job(server, make_nodes)
    job.begin("a", "b")
    job.at_step(15)
    at = now()
    job.nodes.kill("a")
    job.nodes.stepping(1, after=at)
    counted = job.finish("b")
    assert (counted.repeated, counted.missed) == (0, 0)
    assert sum(counted.lost) <= 1
    assert {event["source"] for event in job.nodes.events("b", "state_ready")} == {"memory"}


def test_a_node_that_joins_takes_the_state_from_another_ones_memory(server: Server, make_nodes: MakeNodes) -> None:
    job = Job(server, make_nodes)
    job.begin("a")
    joined = now()
    job.nodes.start("b")
    job.nodes.stepping(2, after=joined)
    assert sum(job.finish("a", "b").lost) == 0
    assert [event["source"] for event in job.nodes.events("b", "state_ready")] == ["a's memory"]
    assert len(job.weights()) == 1


@pytest.mark.parametrize("name", ["elasticd-node-a", "somebody"])
def test_states_travel_under_the_nodes_certificates_alone(binary: Path, tmp_path: Path, make_nodes: MakeNodes, name: str) -> None:
    """Etcd speaks TLS alone, and so does each agent that gives its state to another. A node that gets none is left out; the job goes on."""
    authority = Authority(tmp_path)
    node = authority.issue("node", common_name=name)
    tls = TLSFiles(cacert=authority.cacert, cert=node.cert, key=node.key)
    with running(Server(binary, tmp_path / "etcd", tls=(authority, authority.issue("server")))) as server:
        job = Job(server, make_nodes, tls=tls)
        job.begin("a")
        joined = now()
        job.nodes.start("b")
        if name == "somebody":
            job.nodes.await_(lambda: job.nodes.events("b", "state_not_to_be_had"), "b's refusal", within=60.0)
            at = now()
            job.nodes.stepping(1, after=at)
            assert "no node's" in job.nodes.events("b", "state_not_to_be_had")[0]["why"]
            counted = job.finish("a")
        else:
            job.nodes.stepping(2, after=joined)
            counted = job.finish("a", "b")
            assert [event["source"] for event in job.nodes.events("b", "state_ready")] == ["a's memory"]
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)


def test_after_the_loss_of_all_nodes_at_once_the_committed_checkpoint_is_gone_on_from(server: Server, make_nodes: MakeNodes) -> None:
    """Both disks hold it; what came after it is done again, once."""
    job = Job(server, make_nodes, trainer={"checkpoint_every_s": 1.0})
    job.begin("a", "b")
    first = job.nodes.await_(job.committed, "a committed checkpoint")
    assert first.holders == ("a", "b")
    for name in ("a", "b"):
        job.nodes.kill(name)
    newest = job.committed()
    assert newest is not None
    job.begin("a", "b")
    counted = job.finish("a", "b")
    assert (counted.repeated, counted.missed) == (0, 0)
    assert job.nodes.events("a", "state_ready")[-1]["step"] >= newest.step
    last = job.committed()
    assert last is not None
    assert last.step == counted.steps, "the last state is written when the job succeeds"


def test_a_job_that_is_left_by_its_only_node_is_written_down_first(server: Server, make_nodes: MakeNodes) -> None:
    """SIGTERM to the agent, no other node: nothing is lost, and the next agent goes on from the disk."""
    job = Job(server, make_nodes)
    job.begin("a")
    job.at_step(10)
    job.nodes.processes["a"].terminate()
    assert job.nodes.wait("a") == 0
    job.begin("a")
    counted = job.finish("a")
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)


def test_two_nodes_that_are_drained_within_a_moment_leave_nothing_to_be_done_again(server: Server, make_nodes: MakeNodes) -> None:
    """The second asks while its workers stop for the first, without which it was to go on."""
    job = Job(server, make_nodes)
    job.begin("a", "b")
    job.at_step(10)
    job.nodes.processes["a"].terminate()
    job.nodes.await_(lambda: [event for event in job.nodes.events("b", "directive") if event["why"] == "leave of a"], "the order to stop")
    job.nodes.processes["b"].terminate()
    for name in ("a", "b"):
        assert job.nodes.wait(name) == 0, job.nodes.story()
    held = job.committed()
    assert held is not None, job.nodes.story()
    assert held.holders == ("a", "b")
    assert job.nodes.events("a", "not_all_written") + job.nodes.events("b", "not_all_written") == []
    job.begin("a", "b")
    counted = job.finish("a", "b")
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)


def test_the_last_node_that_is_drained_before_its_workers_have_begun_leaves_nothing_to_be_done_again(server: Server, make_nodes: MakeNodes) -> None:
    """The state it was to begin with lies in its memory alone. Both agents are stopped for a moment, so that the order of things is no luck."""
    job = Job(server, make_nodes)
    job.nodes._config["ttl"] = 10.0
    job.begin("a")  # the older one coordinates
    joined = now()
    job.nodes.start("b")
    job.nodes.stepping(2, after=joined)
    a, b = (job.nodes.processes[name].pid for name in ("a", "b"))
    job.nodes.processes["a"].terminate()
    job.nodes.await_(lambda: job.key("proposal", number=3), "the proposal without it")
    os.kill(a, signal.SIGSTOP)
    job.nodes.await_(lambda: job.key("members/b", stopped=2), "the other's word that its workers have stopped")
    os.kill(b, signal.SIGSTOP)
    os.kill(a, signal.SIGCONT)
    job.nodes.await_(lambda: job.key("generation", number=3), "the generation of the other alone")
    job.nodes.processes["b"].terminate()
    os.kill(b, signal.SIGCONT)
    for name in ("a", "b"):
        assert job.nodes.wait(name) == 0, job.nodes.story()
    assert [event["generation"] for event in job.nodes.events("b", "workers_started")] == [2]
    held = job.committed()
    assert held is not None, job.nodes.story()
    assert (held.generation, held.holders) == (3, ("b",))
    job.begin("a", "b")
    counted = job.finish("a", "b")
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)


def test_a_sigterm_that_reaches_one_worker_stops_all_at_one_step_and_the_job_goes_on(server: Server, make_nodes: MakeNodes) -> None:
    """As from somebody's kill: no restart is charged."""
    job = Job(server, make_nodes)
    job.begin("a", "b")
    job.at_step(10)
    at = now()
    before = len(job.nodes.events("a", "generation_formed"))
    os.kill(job.worker("b"), signal.SIGTERM)
    job.nodes.await_(lambda: len(job.nodes.events("a", "generation_formed")) > before, "the next generation")
    job.nodes.stepping(2, after=at)
    counted = job.finish("a", "b")
    assert (sum(counted.lost), counted.repeated, counted.missed) == (0, 0, 0)
    assert job.nodes.events("b", "worker_failed") == []


def test_a_node_whose_data_differ_leaves_by_itself_and_says_in_what(server: Server, make_nodes: MakeNodes) -> None:
    """The other goes on from where it was; one restart is charged at most."""
    job = Job(server, make_nodes)
    job.begin("a")
    job.at_step(5)
    other = {**job.nodes._config["env"], "SAMPLES": str(SAMPLES - 1)}
    job.nodes.start("b", env=other)
    assert job.nodes.wait("b") == 2
    said = job.nodes.events("b", "agent_exit")[-1]["reason"]
    assert "node b differs from the others in data" in said
    at = now()
    job.nodes.stepping(1, after=at)
    counted = job.finish("a")
    assert (counted.repeated, counted.missed) == (0, 0)
    assert job.nodes.wait("a") == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_random_rescales_repeat_and_miss_nothing(server: Server, make_nodes: MakeNodes) -> None:
    """Worlds of 1 to 4, by joins, leaves, killed workers and killed nodes, over 10,000 samples an epoch."""
    seed = int(os.environ.get("SEED", "0"))
    rng = random.Random(seed)
    samples = 10_000
    job = Job(server, make_nodes, STEP_TIME=0.05, BATCH=96, MICRO=16)
    job.nodes._config["env"]["SAMPLES"] = str(samples)
    here = ["n0"]
    job.begin("n0")
    crashes = 0
    for turn in range(1, 51):
        at = now()
        kinds = (["join"] if len(here) < 4 else []) + (["leave", "lose"] if len(here) > 1 else []) + ["worker"]
        kind = rng.choice(kinds)
        if kind == "join":
            here.append(f"n{turn}")
            job.nodes.start(here[-1])
        elif kind == "worker":
            os.kill(job.worker(rng.choice(here)), signal.SIGKILL)
        else:
            gone = here.pop(rng.randrange(len(here)))
            if kind == "leave":
                job.nodes.processes[gone].terminate()
            else:
                job.nodes.kill(gone)
        crashes += kind in {"worker", "lose"}
        job.nodes.stepping(len(here), after=at, within=90.0)
        print(f"{turn}: {kind}, world {len(here)}", flush=True)
    counted = count(job.nodes.steps(), samples=samples)
    print(counted)
    assert (counted.repeated, counted.missed) == (0, 0)
    assert sum(counted.lost) <= crashes
