"""An agent whose main thread hangs does not hold up the others, and its workers do not outlive what the others reckon with (PROTOCOL 6, 15)."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.rendezvous.desk import Assignment, Desk
from elasticd.rendezvous.member import Member
from elasticd.rendezvous.membership import Directive, Leave, Stay, Stop
from elasticd.rendezvous.records import Mode
from tests.e2e.nodes import Nodes, alive
from tests.rendezvous.nodes import QUICK, Node, config_of
from tests.rendezvous.world import generation
from tests.support.etcd import Server, await_

if TYPE_CHECKING:
    import pytest

    from tests.e2e.conftest import MakeNodes

STOP = Stop(number=1, mode=Mode.AGREED_STOP, why="b joined")
KILL = Stop(number=1, mode=Mode.KILL, why="b was lost")
LEAVE = Leave(mode=Mode.KILL, why="over")
STAY: Directive = Stay(why="all is well")


class Clock:
    """The monotonic clock that the desk reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("elasticd.rendezvous.desk.time.monotonic", lambda: self.now)


def desk_with_workers() -> Desk:
    desk = Desk("job", lambda: None)
    record = generation(1, ["a"]).record
    assert desk.offer(Assignment(generation=record, node_rank=0, base_rank=0, store_socket=None, fresh_until=float("inf")))
    taken = desk.next_assignment(None, None)
    assert taken is not None
    return desk


# --- when an order counts as not obeyed


def test_an_order_is_unobeyed_from_its_coming_until_the_main_thread_says_that_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order meanwhile does not give it new time."""
    clock, desk = Clock(monkeypatch), desk_with_workers()
    seen = [desk.unobeyed]
    for order in (STOP, KILL, LEAVE):
        desk.direct(order)
        clock.now += 3.0
        seen.append(desk.unobeyed)
    desk.stopping()
    assert [*seen, desk.unobeyed] == [0.0, 3.0, 6.0, 9.0, 0.0]
    desk.close()


def test_an_order_to_those_who_stop_already_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker failed, and all are being killed, when the order comes; the next generation starts anew."""
    clock, desk = Clock(monkeypatch), desk_with_workers()
    desk.stopping()
    desk.direct(STOP)
    clock.now += 5.0
    assert desk.unobeyed == 0.0
    desk.report_stopped(1, None, ())
    desk.direct(STAY)
    desk.offer(Assignment(generation=generation(2, ["a"]).record, node_rank=0, base_rank=0, store_socket=None, fresh_until=float("inf")))
    desk.next_assignment(None, None)
    desk.direct(Stop(number=2, mode=Mode.KILL, why="c was lost"))
    clock.now += 5.0
    assert desk.unobeyed == 5.0
    desk.close()


def test_an_order_that_is_taken_back_or_concerns_no_worker_needs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer vanished again; or nothing has been started."""
    clock, desk = Clock(monkeypatch), desk_with_workers()
    desk.direct(STOP)
    desk.direct(STAY)
    clock.now += 5.0
    assert desk.unobeyed == 0.0
    desk.close()
    idle = Desk("job", lambda: None)
    idle.direct(LEAVE)
    clock.now += 5.0
    assert idle.unobeyed == 0.0
    idle.close()


# --- what comes of it


class AttentiveNode(Node):
    """One whose main thread has promised to listen."""

    def __init__(self, server: Server, folder: Path, name: str) -> None:
        # So long that only the lease can be what lets the others go on.
        timing = {"ready_timeout": 300.0, "drain_timeout": 300.0}
        super().__init__(config_of(endpoints=[server.endpoint], cluster="hang", node=name, state_dir=str(folder / "state"), timing=timing))
        self.member = Member(self.member._config, attentive=True)


def test_the_others_go_on_without_a_member_that_hears_no_order(server: Server, tmp_path: Path) -> None:
    """Its loop turns all the time, and it is let go all the same after a TTL or two; one that is merely slow would be let go after 300 s."""
    first, second, third = nodes = [AttentiveNode(server, tmp_path, name) for name in "abc"]
    try:
        first.start()
        second.start()
        await_(lambda: first.running is not None and first.running == second.running, what="a and b training")
        second.deaf = True
        asked = time.monotonic()
        third.start()
        await_(lambda: third.running is not None and first.running == third.running, within=30.0, what="a and c training")
        assert [member.node for member in first.worlds[-1].ids] == ["a", "c"]
        assert time.monotonic() - asked > 2.0  # it was given a TTL
        assert second.running is not None
        assert second.running < (first.running or 0)
    finally:
        second.deaf = False
        for node in nodes:
            node.close()


def test_one_that_has_promised_nothing_keeps_its_lease(server: Server, tmp_path: Path) -> None:
    """torchrun's main thread may be busy for half a minute with stopping workers that ignore SIGTERM."""
    first, second = nodes = [AttentiveNode(server, tmp_path, name) for name in "ab"]
    first.member = member = Member(first.member._config)
    try:
        first.start()
        await_(lambda: first.running is not None, what="a training")
        first.deaf = True
        second.start()
        await_(lambda: member._desk.unobeyed > 1.25 * QUICK.ttl, what="a TTL and more without an answer")
        assert member._may_renew()
    finally:
        first.deaf = False
        for node in nodes:
            node.close()


HANG = """
import os, sys, threading
from elasticd.agent import agent
def hang(self):
    print("hangs", flush=True)
    threading.Event().wait()
agent.JobAgent._watch = hang
from elasticd.agent.__main__ import main
os._exit(main(sys.argv[1:]))
"""


def test_a_hung_agent_ends_itself_and_its_workers_after_the_frozen_time(make_nodes: MakeNodes, server: Server) -> None:
    """Nobody else could end them: the others wait so long, and then count on it."""
    nodes: Nodes = make_nodes([server.endpoint], argv=["sleep", "1000"], cwd="/", max_nodes=2, desired=2, frozen_max=3.0)
    nodes.start("a", program=("-c", HANG))
    (worker,) = nodes.await_(lambda: nodes.workers("a"), what="a training", within=60.0)
    nodes.start("b")
    assert nodes.wait("a") == -signal.SIGKILL
    assert "main_thread_stuck" in {line["event"] for line in nodes.log("a")}
    await_(lambda: not alive(worker), within=5.0, what="the end of its worker")
    nodes.await_(lambda: nodes.workers("b"), what="b training", within=30.0)


def test_a_long_grace_for_the_workers_does_not_count_as_hanging(make_nodes: MakeNodes, server: Server) -> None:
    """They ignore SIGTERM for two TTLs; the agent is busy with them, keeps its lease, and is in the next generation as who it was."""
    nodes: Nodes = make_nodes(
        [server.endpoint], argv=["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], cwd="/", max_nodes=2, desired=2, stop_grace=5.0
    )
    nodes.start("a")
    nodes.await_(lambda: nodes.workers("a"), what="a training", within=60.0)
    nodes.start("b")
    nodes.await_(lambda: nodes.workers("b"), what="both training", within=90.0)
    assert [line["event"] for line in nodes.log("a") if line["event"] in {"main_thread_stuck", "lease_lost"}] == []
    assert len(nodes.events("a", "registered")) == 1
    nodes.await_(lambda: nodes.events("a", "generation_formed")[-1]["nodes"] == 2, what="a in a generation of two", within=30.0)
