"""Real members on a real etcd: forming, joining, losing, leaving, ending; and what others do to their keys."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.errors import KVUnavailableError, RefusedError
from elasticd.kv import EventKind, WatchRange
from elasticd.rendezvous import coordinator as coordinating
from elasticd.rendezvous import ownkey, sight
from elasticd.rendezvous.coordinator import Coordinator
from elasticd.rendezvous.membership import Leave, Stop
from elasticd.rendezvous.records import CauseKind, GenerationState, MemberId, MemberRecord, Mode
from elasticd.rendezvous.sight import Sight
from tests.rendezvous.conftest import Job, MakeJob
from tests.rendezvous.nodes import Node, config_of
from tests.support.etcd import Server, await_

if TYPE_CHECKING:
    from elasticd.kv import WatchBatch

pytestmark = pytest.mark.timeout(60)
GARBAGE = b"\x00garbage"
TTL = 2.0


def stops(*some: Node) -> list[list[Mode]]:
    return [[stop.mode for stop in node.stops] for node in some]


# --- forming, joining, losing, leaving -----------------------------------------------------------------------------------


def test_members_form_join_lose_and_leave(job_on_each_version: Job) -> None:
    """The whole life of a job, on each version of etcd."""
    job = job_on_each_version
    a, b = job.start("ab", nodes=(1, 3, 2))
    first = job.settled("ab")
    assert (a.ranks[-1], b.ranks[-1]) == (0, 1)
    assert (a.served[-1], b.served[-1]) == (True, False)
    assert a.worlds[0].cause.kind is CauseKind.FORM

    job.put(job.keys.target, job.view().target.record.model_copy(update={"desired": 3}))  # type: ignore[union-attr]
    (c,) = job.start("c")
    second = job.await_training("abc", after=first)
    assert job.names() == ["a", "b", "c"]
    assert stops(a, b, c) == [[Mode.AGREED_STOP], [Mode.AGREED_STOP], []]

    b.close()
    third = job.await_training("ac", after=second)
    assert stops(a, c) == [[Mode.AGREED_STOP, Mode.KILL], [Mode.KILL]]
    assert job.names() == ["a", "c"]

    a.member.ask_to_leave()
    assert a.member.wait_left(10.0)
    fourth = job.await_training("c", after=third)
    assert stops(a, c) == [[Mode.AGREED_STOP, Mode.KILL, Mode.AGREED_STOP], [Mode.KILL, Mode.AGREED_STOP]]
    assert (c.ranks, c.served) == ([2, 1, 0], [False, False, True])
    assert c.worlds[-1].restarts == c.worlds[0].restarts + 2
    a.close()
    time.sleep(0.2)
    assert c.running == fourth


def test_a_killed_agent_is_missed_at_once_and_the_rest_go_on(job: Job) -> None:
    """Long before its lease ends: its connections do."""
    job.start("a")
    helper = job.process("b")
    job.start("c")
    await_(lambda: job.names() == ["a", "b", "c"] and job.nodes["c"].running, what="three nodes")
    first = job.settled("ac")
    await_(lambda: helper.ask("running") == first, what="b training")
    time.sleep(0.1)  # the neighbours have called each other
    killed = time.monotonic()
    os.kill(helper.pid, signal.SIGKILL)
    second = job.await_training("ac", after=first)
    took = max(job.nodes[name].started_at[second] for name in "ac") - killed
    print(f"kill -9 to new generation: {took:.3f} s")
    assert took < 1.0
    assert job.names() == ["a", "c"]


def test_the_loss_of_the_coordinator_is_met_by_its_successor(job: Job) -> None:
    coordinator = job.process("a")
    job.start("bc")
    await_(lambda: job.names() == ["a", "b", "c"], what="three nodes")
    first = job.settled("bc")
    time.sleep(0.1)
    killed = time.monotonic()
    os.kill(coordinator.pid, signal.SIGKILL)
    second = job.await_training("bc", after=first)
    took = max(job.nodes[name].started_at[second] for name in "bc") - killed
    print(f"kill -9 of the coordinator to new generation: {took:.3f} s")
    assert took < 1.5


def test_a_restarted_agent_replaces_its_dead_predecessor_without_waiting_for_the_lease(job: Job) -> None:
    job.start("a")
    helper = job.process("b")
    await_(lambda: job.names() == ["a", "b"], what="two nodes")
    first = job.settled("a")
    helper.kill()
    (b,) = job.start("b")
    second = job.await_training("ab", after=first, within=TTL)
    assert b.member.id.incarnation != helper.ready
    assert second > first


def test_whoever_is_above_the_limit_stands_by_and_steps_in(make_job: MakeJob) -> None:
    job = make_job(nodes=(1, 2, 2))
    _a, b = job.start("ab")
    first = job.settled("ab")
    (c,) = job.start("c")
    time.sleep(0.5)
    assert (c.running, b.running, c.starts) == (None, first, [])
    b.close()
    job.await_training("ac", after=first)


def test_below_the_minimum_everybody_waits(make_job: MakeJob) -> None:
    job = make_job(nodes=(2, 3, 3))
    a, b = job.start("ab")
    first = job.settled("ab")
    b.close()
    await_(lambda: a.running is None, what="a stopping")
    await_(lambda: "1 of at least 2" in a.member.why, what="saying why")
    job.start("c")
    job.await_training("ac", after=first)


def test_an_agent_that_does_not_stop_is_left_out_and_taken_back_when_it_reports(make_job: MakeJob) -> None:
    job = make_job(timing={"ready_timeout": 0.5})
    a, b, c = job.start("abc")
    first = job.settled("abc")
    b.deaf = True
    c.close()
    second = job.await_training("a", after=first)
    assert job.names() == ["a"]
    b.deaf = False
    job.await_training("ab", after=second)
    assert a.stops[-1].mode is Mode.AGREED_STOP


# --- workers that end by themselves --------------------------------------------------------------------------------------


def test_failures_are_counted_and_a_used_up_budget_ends_the_job_everywhere(make_job: MakeJob) -> None:
    job = make_job(nodes=(1, 2, 2), max_restarts=2)
    a, b = job.start("ab")
    number = job.settled("ab")
    for used in (1, 2):
        b.fail(f"rank 1: failure {used}")
        number = job.await_training("ab", after=number)
        assert job.view().restarts_used == used
        assert a.worlds[-1].cause.detail == f"rank 1: failure {used}"
    b.fail("the last straw")
    for node in (a, b):
        ended = await_(lambda node=node: node.member.ended, what=f"the end at {node.name}")  # type: ignore[misc]
        assert ended.state is GenerationState.FAILED
        assert "the last straw" in ended.reason
        assert isinstance(node.directive, Leave)
    assert "failed" in {event.what for event in job.view().events}


def test_when_all_have_finished_everybody_sees_success(job: Job) -> None:
    some = job.start("abc")
    job.settled("abc")
    for node in some:
        node.finish()
    for node in some:
        await_(lambda node=node: node.member.ended, what=f"the end at {node.name}")  # type: ignore[misc]
        assert node.member.ended.state is GenerationState.SUCCEEDED
        assert isinstance(await_(lambda node=node: node.error, what="being told"), RefusedError)  # type: ignore[misc]
    with pytest.raises(RefusedError, match="has ended"):
        job.start("d")


def test_a_long_error_message_neither_keeps_the_job_from_restarting_nor_from_ending(make_job: MakeJob) -> None:
    job = make_job(nodes=(1, 1, 1), max_restarts=1)
    (a,) = job.start("a")
    first = job.settled("a")
    a.fail("x" * 2000)
    job.await_training("a", after=first)
    a.fail("y" * 2000)
    assert await_(lambda: a.member.ended, what="the end").state is GenerationState.FAILED
    assert not job.view().problems


def test_an_ended_job_can_be_opened_again_on_request(job: Job) -> None:
    (a,) = job.start("a")
    first = job.settled("a")
    a.finish()
    await_(lambda: a.member.ended, what="the end")
    a.close()
    with pytest.raises(RefusedError, match="ask to start this one again"):
        job.start("a")
    job.start("a", reopen=True)
    assert job.await_training("a", after=first) > first


# --- what others write over its keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *((what, GARBAGE) for what in ("generation", "proposal", "target", "members/a", "members/b", "budget", "checkpoint", "members/ghost", "nonsense")),
        *((what, b"{}") for what in ("generation", "members/b")),
    ],
)
def test_garbage_written_over_a_key_disturbs_nobody(job: Job, what: str, value: bytes) -> None:
    """Whoever trains goes on; what has an owner is put right; a newcomer is taken in and a failure is met as ever."""
    a, b = job.start("ab")
    first = job.settled("ab")
    job.put(job.keys.prefix + what, value)
    if what.rpartition("/")[2] in {"generation", "proposal", "target", "a", "b"}:
        await_(lambda: not job.view().problems, what="its repair")
        assert job.view().members["a"].lease
        assert job.view().members["b"].lease
    assert (a.running, b.running) == (first, first)
    job.start("c")
    second = job.await_training("abc", after=first)
    assert stops(a, b) == [[Mode.AGREED_STOP], [Mode.AGREED_STOP]]
    b.fail()
    job.await_training("abc", after=second)
    assert job.view().restarts_used == 1


def test_a_deleted_proposal_disturbs_nobody(job: Job) -> None:
    a, b = job.start("ab")
    first = job.settled("ab")
    job.delete(job.keys.proposal)
    job.start("c")
    job.await_training("abc", after=first)
    assert stops(a, b) == [[Mode.AGREED_STOP], [Mode.AGREED_STOP]]


def test_a_deleted_generation_key_costs_at_most_a_restart(job: Job) -> None:
    """The proposal it came from still stands, and is activated again: the number neither falls nor changes hands."""
    a, b = job.start("ab")
    first = job.settled("ab")
    before = job.view().active
    job.delete(job.keys.generation)
    after = await_(lambda: job.view().active, what="a generation")
    assert before
    assert after.number == first
    assert after.ids == before.ids
    job.start("c")
    job.await_training("abc", after=first)
    assert len(a.starts) <= 3
    assert len(b.starts) <= 3


def test_a_member_whose_lease_is_ended_behind_its_back_stops_and_comes_back_as_somebody_else(job: Job) -> None:
    _a, b = job.start("ab")
    first = job.settled("ab")
    was = b.member.id
    job.revoke("b")
    job.await_training("ab", after=first)
    assert b.member.id != was
    assert b.stops[-1].mode is Mode.KILL
    assert job.view().members["b"].lease


@pytest.mark.parametrize("how", ["delete", "revoke"])
def test_a_member_whose_key_went_takes_it_up_again_if_nothing_else_happened(job: Job, how: str) -> None:
    """Alone, so that nobody has noticed."""
    (a,) = job.start("a")
    first = job.settled("a")
    was, before = a.member.id, job.view().members["a"].create_revision
    job.delete(job.keys.member("a")) if how == "delete" else job.revoke("a")
    await_(lambda: "a" in job.view().members and job.view().members["a"].create_revision > before, what="the key")
    time.sleep(0.2)
    assert (a.member.id, a.running, a.stops) == (was, first, [])
    job.start("b")
    job.await_training("ab", after=first)


def test_when_every_key_goes_at_once_everybody_takes_up_its_own_and_nobody_is_lost(job: Job) -> None:
    """As when an etcd was out for long; here nobody saw an outage, only the own key gone."""
    some = job.start("abc")
    first = job.settled("abc")
    was = [node.member.id for node in some]
    job.delete(job.keys.members, prefix=True)
    await_(lambda: set(job.view().members) == set("abc"), what="all keys")
    time.sleep(0.5)
    nobody_stopped(job, first)
    assert [node.member.id for node in some] == was


def test_a_node_name_taken_by_another_boot_is_never_taken_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownkey, "FOREIGN_WAIT", 0.5)
    foreign = MemberRecord(
        scope=job.keys.scope, id=MemberId(node="a", incarnation="f" * 16), address="elsewhere", slots=1, boot_id="another", store_port=1, probe_port=2
    )
    job.put(job.keys.member("a"), foreign)
    with pytest.raises(RefusedError, match="another machine or boot"):
        job.start("a")
    assert job.view().members["a"].record == foreign


def test_a_node_name_held_by_another_boot_is_taken_once_it_is_free(job: Job) -> None:
    foreign = MemberRecord(
        scope=job.keys.scope, id=MemberId(node="a", incarnation="f" * 16), address="elsewhere", slots=1, boot_id="another", store_port=1, probe_port=2
    )
    job.put(job.keys.member("a"), foreign)
    threading.Timer(0.5, job.delete, [job.keys.member("a")]).start()
    began = time.monotonic()
    job.start("a")
    assert time.monotonic() - began >= 0.4
    job.settled("a")


def test_garbage_under_its_own_name_does_not_keep_a_node_out(job: Job) -> None:
    job.put(job.keys.member("a"), GARBAGE)
    job.start("a")
    job.settled("a")


def test_a_node_is_served_once_on_a_machine(job: Job) -> None:
    job.start("a")
    with pytest.raises(RefusedError, match=f"pid {os.getpid()}"):
        Node(config_of(**job.arguments("a"))).start()


# --- etcd comes and goes -------------------------------------------------------------------------------------------------


def nobody_stopped(job: Job, number: int) -> None:
    for node in job.nodes.values():
        assert node.stops == [], node.name
        assert node.running == number, node.name


def test_while_etcd_pauses_everybody_goes_on_in_the_same_generation(job: Job, server: Server) -> None:
    """After three times the TTL every lease has lapsed: all of them at once, and nobody is lost."""
    some = job.start("abc")
    first = job.settled("abc")
    was = [node.member.id for node in some]
    for times in (1, 3):
        server.pause()
        await_(lambda: "out of reach" in some[0].member.why, what="noticing")
        time.sleep(times * TTL)
        server.resume()
        await_(lambda: all(node.member._outage_since is None for node in some) and set(job.view().members) == set("abc"), within=20, what="everybody back")
        nobody_stopped(job, first)
    time.sleep(TTL + 0.5)  # until the blind time is over
    nobody_stopped(job, first)
    assert [node.member.id for node in some] == was
    job.start("d")
    job.await_training("abcd", after=first)


def test_an_etcd_that_restarts_disturbs_nobody(job: Job, server: Server) -> None:
    some = job.start("abc")
    first = job.settled("abc")
    server.kill()
    time.sleep(0.5)
    server.start()
    await_(lambda: set(job.view().members) == set("abc"), within=20, what="everybody back")
    time.sleep(TTL + 0.5)
    nobody_stopped(job, first)
    some[2].close()
    job.await_training("ab", after=first)


def test_without_etcd_nobody_can_start(job: Job, server: Server) -> None:
    server.kill()
    began = time.monotonic()
    with pytest.raises(KVUnavailableError):
        job.start("a")
    assert time.monotonic() - began < 5.0


def test_frozen_workers_stop_after_one_ttl_when_a_partner_is_gone_too(job: Job, server: Server) -> None:
    job.start("a")
    helper = job.process("b")
    await_(lambda: job.names() == ["a", "b"], what="two nodes")
    job.settled("a")
    time.sleep(0.2)
    server.pause()
    os.kill(helper.pid, signal.SIGKILL)
    await_(lambda: job.nodes["a"].stops, within=8, what="the stop")
    assert "out of reach" in job.nodes["a"].stops[0].why
    assert "b" in job.nodes["a"].stops[0].why


def test_a_member_process_that_sleeps_beyond_its_lease_comes_back_as_somebody_else(job: Job) -> None:
    """The others go on without it; awake, it does not go on with what it ran."""
    job.start("a")
    helper = job.process("b")
    await_(lambda: job.names() == ["a", "b"], what="two nodes")
    first = job.settled("a")
    await_(lambda: helper.ask("running") == first, what="b training")
    os.kill(helper.pid, signal.SIGSTOP)
    second = job.await_training("a", after=first, within=3 * TTL + 2)
    assert job.names() == ["a"]
    os.kill(helper.pid, signal.SIGCONT)
    third = job.await_training("a", after=second)
    assert helper.ask("incarnation") != helper.ready
    await_(lambda: helper.ask("running") == third, what="b training")
    assert helper.ask("starts") == [first, third]


# --- whoever coordinates -------------------------------------------------------------------------------------------------


def test_any_number_of_coordinators_do_no_harm(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who coordinates is a rule of load, not of safety: here everybody does."""
    original = Sight.find_place

    def everybody(self: Sight) -> None:
        original(self)
        if not self.coordinator and self._watch:
            self.coordinator = True
            self.load()
            self._watch.close()
            self._batches.clear()
            self._watch = self._kv.watch([WatchRange(key=self._keys.prefix, prefix=True)], self.view.revision + 1, self._on_batch)

    monkeypatch.setattr(Sight, "find_place", everybody)
    some = job.start("abcd")
    number = job.settled("abcd")
    for _ in range(3):
        some[3].fail()
        number = job.await_training("abcd", after=number)
    some[0].close()
    number = job.await_training("bcd", after=number)
    some[1].member.ask_to_leave()
    assert some[1].member.wait_left(10)
    job.await_training("cd", after=number)
    assert job.view().restarts_used == 3
    assert some[3].starts == sorted(set(some[3].starts))


def test_the_deputy_stands_in_for_a_coordinator_that_does_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop turns and its lease lives, so that nobody takes its place."""
    monkeypatch.setattr(sight, "LOOK_EVERY", 0.5)
    monkeypatch.setattr(coordinating, "STAND_IN_AFTER", 0.3)
    a, _b, c = job.start("abc")
    first = job.settled("abc")
    original = Coordinator.turn
    idle = a.member._coordinator

    def turn(self: Coordinator, *arguments: Any) -> float:
        return float("inf") if self is idle else original(self, *arguments)

    monkeypatch.setattr(Coordinator, "turn", turn)
    c.close()
    job.await_training("ab", after=first, within=15)
    assert job.names() == ["a", "b"]


def test_a_coordinator_whose_loop_hangs_loses_its_lease_and_its_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _b, c = job.start("abc")
    first = job.settled("abc")
    released, hung = threading.Event(), a.member._coordinator
    original = Coordinator.turn

    def turn(self: Coordinator, *arguments: Any) -> float:
        if self is hung:
            released.wait(30)
        return original(self, *arguments)

    monkeypatch.setattr(Coordinator, "turn", turn)
    try:
        await_(lambda: time.monotonic() - a.member._ticked_at > 1.0, what="the hang")
        c.close()
        second = job.await_training("b", after=first, within=15)
    finally:
        released.set()
    job.await_training("ab", after=second)


# --- what it costs -------------------------------------------------------------------------------------------------------


def test_an_idle_member_asks_little(job: Job) -> None:
    """At most 3 keepalives a TTL and a request in ten seconds."""
    some = job.start("abc")
    job.settled("abc")
    time.sleep(1.0)  # whatever forming still brings
    before = [node.member._kv.stats for node in some]  # type: ignore[union-attr]
    began = time.monotonic()
    time.sleep(9.0)
    took = time.monotonic() - began
    for node, earlier in zip(some, before, strict=True):
        now = node.member._kv.stats  # type: ignore[union-attr]
        requests, keepalives = now.requests - earlier.requests, now.keepalives - earlier.keepalives
        print(f"{node.name}: {requests / took:.2f} requests/s, {keepalives / took:.2f} keepalives/s")
        assert keepalives <= 3 / TTL * took + 1
        assert requests <= 0.1 * took + 1


def test_a_member_writes_its_key_at_most_twice_a_generation(job: Job) -> None:
    writes: Counter[str] = Counter()

    def count(batch: WatchBatch) -> None:
        writes.update(event.item.key.rsplit("/", 1)[-1] for event in batch.events if event.kind is EventKind.PUT)

    some = job.start("ab")
    number = job.settled("ab")
    watch = job.kv.watch([WatchRange(key=job.keys.members, prefix=True)], job.view().revision + 1, count)
    for _ in range(3):
        some[1].fail()
        number = job.await_training("ab", after=number)
    job.start("c")
    number = job.await_training("abc", after=number)
    some[1].close()
    job.await_training("ac", after=number)
    time.sleep(0.3)
    watch.close()
    print(f"writes of a in 5 generations: {writes['a']}")
    assert writes["a"] <= 2 * 5
    assert writes["b"] <= 2 * 5


def test_an_assignment_nobody_took_in_time_is_replaced_by_a_fresh_one(job: Job) -> None:
    """As after a pause of the main thread: the look at etcd that allowed it is too old to start by."""
    node = job.node("a")
    node.member.connect()
    node.member.start()
    await_(lambda: node.member._desk.running, what="an assignment")
    time.sleep(TTL + 0.2)
    assignment = node.member.next_assignment(5.0)
    assert assignment
    assert assignment.fresh_until > time.clock_gettime(time.CLOCK_BOOTTIME) + TTL - 1.0
    assert assignment.store_socket
    assert assignment.store_socket.getsockname()[1] == assignment.generation.store.port
    assignment.store_socket.close()


def test_closing_leaves_no_thread_and_no_key(job: Job) -> None:
    (a,) = job.start("a")
    job.settled("a")
    a.close()
    a.member.close()
    assert not a.member._thread.is_alive()
    assert dict(job.view().members) == {}
    assert isinstance(a.directive, Stop | Leave) or a.directive
