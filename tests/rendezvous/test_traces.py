"""Traces from reading the code against the protocol: each goes wrong in a way that only shows when several things meet."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.errors import KVPermissionError, KVUnavailableError, LeaseLostError
from elasticd.rendezvous.coordinator import Coordinator
from elasticd.rendezvous.membership import Stop
from elasticd.rendezvous.records import GenerationState, Mode
from elasticd.rendezvous.transitions import Txn
from elasticd.rendezvous.view import Ledger
from tests.rendezvous.conftest import Job, MakeJob
from tests.rendezvous.pretend import PretendStore
from tests.rendezvous.world import KEYS, TIMING, generation, member, mid, target, view
from tests.support.etcd import Server, await_

pytestmark = pytest.mark.timeout(60)
TTL = 2.0


def test_two_members_never_take_each_other_for_the_predecessor(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """a's key lapses and is taken up again before b looks: b sees a key where it expects one, but a is the younger now. Somebody must coordinate."""
    a, b = job.start("ab")
    first = job.settled("ab")
    take_in = b.member._sight.take_in  # type: ignore[union-attr]
    held = [True]

    def later() -> None:
        while held[0]:
            time.sleep(0.01)
        take_in()

    monkeypatch.setattr(b.member._sight, "take_in", later)
    b.member._wake.set()
    created = job.view().members["a"].create_revision
    job.delete(job.keys.member("a"))
    await_(lambda: "a" in job.view().members and job.view().members["a"].create_revision > created, what="a's key")
    await_(lambda: not a.member._sight.coordinator, what="a standing back")  # type: ignore[union-attr]
    held[0] = False
    job.start("c")
    job.await_training("abc", after=first, within=6)


def test_a_member_that_becomes_coordinator_during_a_hiccup_of_etcd_sees_everybody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """a and b go, and c's first listing as coordinator fails: c must not go on with the five keys it knew, for then d looks lost."""
    a, b, c, _d = job.start("abcd")
    first = job.settled("abcd")
    a.close()
    second = job.await_training("bcd", after=first)
    listing = c.member._kv.list  # type: ignore[union-attr]
    failures = [KVUnavailableError("a hiccup")]

    def once(prefix: str, **more: Any) -> Any:
        if prefix == job.keys.prefix and failures:
            raise failures.pop()
        return listing(prefix, **more)

    monkeypatch.setattr(c.member._kv, "list", once)
    b.close()
    await_(lambda: (c.running or 0) > second, what="the next generation", within=15)
    assert not failures
    assert [identity.node for identity in c.worlds[-1].ids] == ["c", "d"]


def test_a_member_that_sees_little_does_not_believe_a_generation_orphaned(make_job: MakeJob) -> None:
    """c watches only b's key and its own. Counting from here, its hold would be long over when a is cut off and b dies (PROTOCOL 15)."""
    job = make_job(nodes=(1, 1, 1))
    job.start("a")
    job.settled("a")
    job.start("b")
    (c,) = job.start("c")
    await_(lambda: c.member._view.generation, what="c seeing the generation")
    assert c.member._coordinator._memory.orphaned_since is None


def test_a_member_that_has_finished_takes_its_key_up_again_too(job: Job) -> None:
    """Same process, same generation, no proposal: the exception of PROTOCOL 4. Else a job that is all but done starts again."""
    a, b = job.start("ab")
    number = job.settled("ab")
    was = a.member.id
    a.finish()
    await_(lambda: job.view().members["a"].record.outcome, what="a's report")
    job.delete(job.keys.members, prefix=True)
    await_(lambda: set(job.view().members) == {"a", "b"}, what="both keys")
    time.sleep(0.3)
    assert a.member.id == was
    assert (b.running, b.stops) == (number, [])
    b.finish()
    assert await_(lambda: b.member.ended, what="the end").state is GenerationState.SUCCEEDED


def test_a_key_written_back_without_its_lease_is_bound_again_and_nobody_stops(job: Job) -> None:
    """As by an operator who edits a record, or restores a key."""
    a, b = job.start("ab")
    number = job.settled("ab")
    job.put(job.keys.member("b"), job.view().members["b"].record)
    await_(lambda: job.view().members["b"].lease, what="the lease")
    time.sleep(0.3)
    assert (a.running, b.running, b.stops) == (number, number, [])


def test_a_lease_that_is_gone_before_it_is_known_to_be_does_not_make_the_loop_spin(job: Job) -> None:
    """Between the revocation and the next keepalive every write under it fails."""
    (a,) = job.start("a")
    job.settled("a")
    kv = a.member._kv
    assert kv
    before, created = kv.stats.requests, job.view().members["a"].create_revision
    job.revoke("a")
    await_(lambda: "a" in job.view().members and job.view().members["a"].create_revision > created, what="the key")
    print(f"requests until the key was taken up again: {kv.stats.requests - before}")
    assert kv.stats.requests - before < 30


def test_a_stray_key_older_than_every_member_does_not_keep_them_from_coordinating(job: Job) -> None:
    """Nobody serves it, and it has no lease to lose."""
    job.put(job.keys.member("ghost"), b"\x00garbage")
    job.start("ab")
    job.await_training("ab", within=5)


def test_a_deleted_target_does_not_stop_the_job_from_losing_a_node(job: Job) -> None:
    a, b = job.start("ab")
    first = job.settled("ab")
    job.delete(job.keys.target)
    b.close()
    assert job.await_training("a", after=first, within=6) > first
    assert a.running


def test_garbage_in_the_target_of_an_ended_job_does_not_open_it_again(job: Job) -> None:
    """Its repair is a write later than the end, and that is how operators reopen a job."""
    (a,) = job.start("a")
    job.settled("a")
    a.finish()
    await_(lambda: a.member.ended, what="the end")
    job.put(job.keys.target, b"\x00garbage")
    time.sleep(1.0)
    seen = job.view()
    assert seen.over or seen.target is None


def test_how_long_workers_may_be_frozen_is_what_the_generation_says(make_job: MakeJob, server: Server) -> None:
    """The hold of PROTOCOL 15 goes by the record; a node that is configured otherwise must too."""
    job = make_job(nodes=(1, 1, 1), timing={"frozen_max": 600.0})
    (a,) = job.start("a")
    job.settled("a")
    record = job.view().active
    assert record
    job.put(job.keys.generation, record.model_copy(update={"frozen_max": 2.5}))
    await_(lambda: a.member._view.active and a.member._view.active.frozen_max == 2.5, what="a seeing it")
    server.pause()
    frozen = time.monotonic()
    await_(lambda: a.stops, within=20, what="the stop")
    assert time.monotonic() - frozen > 1.5
    assert a.stops[0].mode is Mode.KILL
    assert "without etcd" in a.stops[0].why


def test_an_assignment_that_nobody_took_is_withdrawn_when_a_newer_proposal_is_seen(job: Job) -> None:
    """On seeing proposal n a member starts nothing older (PROTOCOL 11): the main thread was busy and comes for its assignment only now."""
    a = job.node("a")
    a.member.connect()
    a.member.start()
    first = await_(lambda: a.member._desk.running, what="an assignment")
    job.start("b")
    await_(lambda: isinstance(a.directive, Stop) or a.member._desk.running != first, what="the join being seen")
    assignment = a.member.next_assignment(5.0)
    assert assignment
    if assignment.store_socket:
        assignment.store_socket.close()
    assert assignment.generation.number > first


def test_when_the_coordinator_goes_there_is_a_deputy_again(job: Job) -> None:
    """The third becomes the second; nothing about its own predecessor changed (PROTOCOL 8)."""
    a, _b, c = job.start("abc")
    first = job.settled("abc")
    a.close()
    job.await_training("bc", after=first)
    await_(lambda: c.member._sight.deputy, within=4, what="c being deputy")  # type: ignore[union-attr]


def test_a_closed_member_leaves_no_pipe_behind(job: Job) -> None:
    """Sockets are left out: grpc lets go of its own when it pleases."""

    def pipes() -> int:
        found = 0
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found += str(path.readlink()).startswith("pipe:")
        return found

    before = pipes()
    for _ in range(2):
        (node,) = job.start("a")
        job.await_training("a")
        node.close()
    assert pipes() <= before


def test_a_member_looks_around_as_soon_as_it_has_registered(make_job: MakeJob) -> None:
    """Alone it hears of nothing that would wake its loop, and half a TTL is five seconds by default."""
    job = make_job(nodes=(1, 1, 1), timing={"ttl": 10.0})
    job.start("a")
    began = time.monotonic()
    job.await_training("a")
    assert time.monotonic() - began < 2.5


def test_a_lease_that_lapses_while_registering_is_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine too busy to create its key within the TTL of its first lease: seen at TTL 2 under a load of 400."""
    node = job.node("a")
    node.member.connect()
    take, tries = node.member._own.take, []  # type: ignore[union-attr]

    def once_lost() -> bool:
        tries.append(1)
        if len(tries) == 1:
            raise LeaseLostError("requested lease not found")
        return take()

    monkeypatch.setattr(node.member._own, "take", once_lost)
    node.member.start()
    assert "a" in job.view().members


def test_a_job_is_not_ended_over_an_operators_write_that_was_not_seen() -> None:
    """The budget is used up; the operator raises it just before the end is written, which is later than his write: nothing reopens the job."""
    store = PretendStore()
    store.put(KEYS.target, target(budget=0).record.to_bytes())
    store.put(KEYS.generation, generation(1, "a").record.to_bytes())
    store.put(KEYS.member("a"), member("a", 1, failed=1).record.to_bytes())
    ledger, sent = Ledger(KEYS), []
    ledger.load(store.listing())

    def send(txn: Txn) -> bool:
        store.put(KEYS.target, target(budget=50).record.to_bytes())
        sent.append(store.txn(txn))
        return sent[-1]

    seen = SimpleNamespace(whole=True, coordinator=True, view=ledger.view(), looked_at=0.0, load=lambda: None)
    Coordinator(KEYS, TIMING, send).turn(mid("a"), seen, 0)  # type: ignore[arg-type]
    assert sent == [False]


def test_what_etcds_roles_keep_from_a_node_is_tried_once_and_told() -> None:
    """Garbage in `target`, which only operators may write: the coordinator says so, and does not take etcd's refusal for an outage."""
    tried: list[object] = []

    def refuse(txn: object) -> bool:
        tried.append(txn)
        raise KVPermissionError("txn: etcdserver: permission denied")

    damaged = replace(
        view(member("a", 10), generation=generation(1, "a")),
        problems={KEYS.target: "target: not JSON"},
        damaged={KEYS.target: 77},
        repairable=frozenset({KEYS.target}),
    )
    seen = SimpleNamespace(whole=True, coordinator=True, view=damaged, load=lambda: None)
    coordinator = Coordinator(KEYS, TIMING, refuse)
    for _ in range(3):
        coordinator.turn(mid("a"), seen, 0)  # type: ignore[arg-type]
    assert len(tried) == 1
    assert coordinator.why == "target: not JSON; this node may not put it right: membership is frozen until an operator does"
