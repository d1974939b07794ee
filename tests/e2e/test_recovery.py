"""Real workers in a real collective: what happens to the job when workers and nodes die, join, fall silent or leave."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.nodes import Nodes, alive, now

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeNodes
    from tests.support.etcd import Server

pytestmark = pytest.mark.timeout(150)


def formed(nodes: Nodes, node: str) -> list[dict[str, Any]]:
    return nodes.events(node, "generation_formed")


def took(nodes: Nodes, node: str, first: str, last: str) -> float:
    """Seconds from the newest `first` in a node's log to the newest `last`."""
    begin, end = (datetime.fromisoformat(nodes.events(node, name)[-1]["time"]) for name in (first, last))
    return (end - begin).total_seconds()


@pytest.fixture
def two(server: Server, make_nodes: MakeNodes) -> Nodes:
    """Two nodes that train; a third may join."""
    nodes = make_nodes([server.endpoint])
    begun = now()
    nodes.start("a")
    nodes.await_(lambda: nodes.events("a", "registered"), "registration of a")
    nodes.start("b")
    nodes.stepping(2, after=begun)
    return nodes


def test_a_killed_worker_is_replaced_and_its_node_named(two: Nodes) -> None:
    """SIGKILL of one worker: both nodes train on in the next generation, one restart is charged, the log says whose worker died of what."""
    (victim,) = two.workers("b")
    before = formed(two, "a")[-1]["generation"]
    at = now()
    os.kill(victim, signal.SIGKILL)
    two.stepping(2, after=at)
    assert two.events("b", "worker_failed")[0]["detail"] == "rank 1 on b: killed by SIGKILL (9)"
    newest = formed(two, "a")[-1]
    assert (newest["generation"], newest["cause_kind"], newest["world_size"]) == (before + 1, "worker_failed", 2)
    two.never_two_worlds()
    first, second = (two.folder / "logs/job/b" / f"generation-00000{number}/rank-1/stderr.log" for number in (before, before + 1))
    assert first.exists()
    assert second.exists(), "each generation keeps its own logs"


def test_a_killed_node_is_left_behind(two: Nodes) -> None:
    """SIGKILL of an agent: its worker dies with it, the other trains on alone without any restart being charged."""
    (orphan,) = two.workers("b")
    at = now()
    two.kill("b")
    two.stepping(1, after=at)
    assert not alive(orphan)
    newest = formed(two, "a")[-1]
    assert (newest["cause"], newest["world_size"]) == ("loss of b", 1)
    two.never_two_worlds()


def test_the_loss_of_rank_0s_node_does_not_end_the_job(two: Nodes) -> None:
    """The node that coordinates and serves the workers' store dies: the other becomes rank 0 and trains on."""
    assert formed(two, "a")[-1]["node_rank"] == 0
    at = now()
    two.kill("a")
    two.stepping(1, after=at)
    newest = formed(two, "b")[-1]
    assert (newest["cause"], newest["node_rank"]) == ("loss of a", 0)
    two.never_two_worlds()


def test_a_node_that_joins_is_taken_in(two: Nodes) -> None:
    """A third node: the two stop in order, three train, ranks of the first two stay, nothing is charged."""
    at = now()
    two.start("c")
    two.stepping(3, after=at)
    assert [formed(two, node)[-1]["node_rank"] for node in "abc"] == [0, 1, 2]
    assert formed(two, "c")[-1]["cause"] == "join of c"
    assert not two.events("a", "worker_failed")
    assert not two.events("b", "worker_failed")
    two.never_two_worlds()


def test_a_silent_node_is_left_behind_and_its_waking_disturbs_nobody(two: Nodes) -> None:
    """SIGSTOP of a whole node: the other trains on after the lease. Woken, it kills its old worker and comes back as a newcomer."""
    (old,) = two.workers("b")
    at = now()
    stopped = two.silence("b")
    alone = two.stepping(1, after=at)
    assert alone < 2 + 0.6 + 15, "lease TTL, its expiry, and a start"
    assert took(two, "a", "directive", "workers_stopped") < 0.7, "no answer of the silent node is waited for: that would be 1 s"
    woken = now()
    two.wake(stopped)
    two.await_(lambda: not alive(old), "the end of the woken node's old worker", within=10)
    two.stepping(2, after=woken)
    assert [event["cause_kind"] for event in formed(two, "a")][-2:] == ["loss", "join"]
    assert not two.events("a", "worker_failed")
    two.never_two_worlds(woken=old)


def test_more_nodes_than_max_stand_by_and_take_over(server: Server, make_nodes: MakeNodes) -> None:
    """A surplus node waits without disturbing anybody, and replaces a node that dies."""
    nodes = make_nodes([server.endpoint], max_nodes=2, desired=2)
    begun = now()
    for name in ("a", "b"):
        nodes.start(name)
    nodes.stepping(2, after=begun)
    before = len(formed(nodes, "a"))  # one, or two if b came up a second later than a
    nodes.start("c")
    nodes.await_(lambda: nodes.events("c", "registered"), "registration of c")
    at = now()
    nodes.stepping(2, after=at)
    assert len(formed(nodes, "a")) == before
    assert not formed(nodes, "c")
    nodes.kill("b")
    nodes.stepping(2, after=now())
    assert formed(nodes, "c")[-1]["world_size"] == 2


def test_a_leaving_node_goes_in_order(two: Nodes) -> None:
    """SIGTERM to an agent: an agreed stop, the other trains on, the leaver exits with 0."""
    at = now()
    two.processes["b"].terminate()
    two.stepping(1, after=at)
    assert two.wait("b") == 0
    assert two.events("b", "agent_exit")[0]["result"] == "left"
    assert formed(two, "a")[-1]["cause"] == "leave of b"
    assert not two.events("a", "worker_failed")


def test_a_job_that_finishes_ends_everywhere(server: Server, make_nodes: MakeNodes) -> None:
    """Every worker returns 0: every agent exits with 0, also one whose nodes differ in slots, and a latecomer is told that it ended."""
    nodes = make_nodes([server.endpoint], max_nodes=2, desired=2)
    nodes.start("a", environment={"STEPS": "20"}, nproc=2)
    nodes.start("b", environment={"STEPS": "20"}, nproc=1)
    assert nodes.wait("a") == 0
    assert nodes.wait("b") == 0
    assert {line["rank"] for line in nodes.steps()} == {0, 1, 2}
    nodes.start("late")
    assert nodes.wait("late") == 8
    assert "has ended (succeeded at generation 1" in (nodes.folder / "late.err").read_text()


def test_a_script_that_always_fails_uses_up_the_budget(server: Server, make_nodes: MakeNodes) -> None:
    """The restarts of the whole job are counted in etcd; then every agent exits with 1 and the last failure is named."""
    import sys

    script = "import os,sys; sys.exit(3 if os.environ['RANK'] == '1' else 0) if os.environ['RANK'] == '1' else __import__('time').sleep(60)"
    nodes = make_nodes([server.endpoint], max_nodes=2, desired=2, max_restarts=2, argv=[sys.executable, "-c", script])
    nodes.start("a")
    nodes.start("b")
    assert nodes.wait("a") == 1
    assert nodes.wait("b") == 1
    reason = nodes.events("a", "agent_exit")[0]["reason"]
    assert "restart budget used up (2 of 2)" in reason
    assert "rank 1 on" in reason
    assert "exit code 3" in reason
    assert [event["generation"] for event in formed(nodes, "a")] == [1, 2, 3]
