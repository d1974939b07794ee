"""Etcd away, in part or in whole, while real workers train."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.nodes import Nodes, now

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeNodes
    from tests.support.etcd import Cluster, Server


def train_two(make_nodes: MakeNodes, endpoints: list[str]) -> Nodes:
    nodes = make_nodes(endpoints, max_nodes=2, desired=2, settle=20.0)  # nobody begins without the other, however slow this machine is
    begun = now()
    nodes.start("a")
    nodes.start("b")
    nodes.stepping(2, after=begun)
    return nodes


def still_generation_1(nodes: Nodes) -> None:
    for node in "ab":
        assert [event["generation"] for event in nodes.events(node, "generation_formed")] == [1], nodes.story()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_one_etcd_member_of_three_may_go(cluster: Cluster, make_nodes: MakeNodes, how: str) -> None:
    """The member that everybody is connected to, and leads, dies or hangs: training goes on in the same generation, and a join still works."""
    members = cluster.ordered(leader_first=True)
    nodes = train_two(make_nodes, [member.endpoint for member in members])
    getattr(members[0], how)()
    at = now()
    nodes.await_(lambda: nodes.steps()[-1]["at"] > at + 6, "6 s of training", within=20)
    still_generation_1(nodes)
    killed = now()
    nodes.kill("b")
    nodes.stepping(1, after=killed)


@pytest.mark.timeout(200)
def test_all_of_etcd_gone_for_60_seconds(server: Server, make_nodes: MakeNodes) -> None:
    """Training goes on, membership is frozen and says so, and everything recovers by itself: same generation, and a loss is noticed again."""
    nodes = train_two(make_nodes, [server.endpoint])
    server.kill()
    gone = time.time()
    nodes.await_(lambda: nodes.events("a", "etcd_unreachable"), "a word about etcd")
    nodes.await_(lambda: nodes.steps()[-1]["at"] > gone + 60, "60 s of training", within=80)
    still_generation_1(nodes)
    gaps = [later["at"] - sooner["at"] for sooner, later in zip(nodes.steps(), nodes.steps()[1:], strict=False) if sooner["at"] > gone]
    assert max(gaps) < 3, "training paused"
    server.start()
    nodes.await_(lambda: nodes.events("a", "etcd_back") and nodes.events("b", "etcd_back"), "recovery")
    back = now()
    nodes.await_(lambda: nodes.steps()[-1]["at"] > back + 3, "training afterwards")
    still_generation_1(nodes)
    at = now()
    nodes.kill("b")
    nodes.stepping(1, after=at)


@pytest.mark.timeout(150)
def test_etcd_and_a_peer_gone_stops_the_workers(server: Server, make_nodes: MakeNodes) -> None:
    """Without etcd, and with a peer out of reach too, somebody else may go on: the workers are stopped after the lease, and resume when etcd is back."""
    nodes = train_two(make_nodes, [server.endpoint])
    (old,) = nodes.workers("b")
    server.kill()
    nodes.await_(lambda: nodes.events("a", "etcd_unreachable"), "a word about etcd")
    stopped = nodes.silence("b")
    nodes.await_(lambda: nodes.events("a", "workers_stopped"), "a stop", within=15)
    assert "out of reach" in nodes.events("a", "workers_stopped")[0]["why"]
    server.start()
    at = now()
    nodes.stepping(1, after=at)
    nodes.wake(stopped)
    nodes.stepping(2, after=now())
    nodes.never_two_worlds(woken=old)


@pytest.mark.timeout(150)
def test_a_pause_of_etcd_past_every_lease_changes_nothing(server: Server, make_nodes: MakeNodes) -> None:
    """All keys are gone when etcd wakes: each agent takes its own up again, and the generation goes on."""
    nodes = train_two(make_nodes, [server.endpoint])
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(7)  # the outage itself: more than three lease times
    os.kill(server.pid, signal.SIGCONT)
    nodes.await_(lambda: nodes.events("a", "etcd_back") and nodes.events("b", "etcd_back"), "recovery")
    back = now()
    nodes.await_(lambda: nodes.steps()[-1]["at"] > back + 4, "training afterwards")
    still_generation_1(nodes)
