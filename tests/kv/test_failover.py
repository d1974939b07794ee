"""What happens while members die, hang and return: calls, leases and watches on real clusters."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticd.errors import ConflictError, KVError, KVUnavailableError
from elasticd.kv import Compare, Delete, EtcdKV, Put, Target, WatchRange
from tests.support.etcd import Cluster, Server, await_, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kv.conftest import Batches, Connect

pytestmark = pytest.mark.timeout(60)
CALL_TIMEOUT = 2.0


class Writer:
    """Writes 1, 2, 3... by compare-and-set on a thread of its own, and remembers how long each took."""

    def __init__(self, kv: EtcdKV, key: str) -> None:
        self.durations: list[float] = []
        self.errors: list[KVError] = []
        self._kv = kv
        self._key = key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        return len(self.durations)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        revision = 0
        while not self._stop.wait(0.02):
            started = time.monotonic()
            try:
                revision = self._write(revision)
            except KVError as error:
                self.errors.append(error)
                return
            self.durations.append(time.monotonic() - started)

    def _write(self, revision: int) -> int:
        put = Put(key=self._key, value=b"%d" % (self.count + 1))
        if not self._kv.txn([Compare(key=self._key, target=Target.MOD, op="==", value=revision)], [put]).succeeded:
            raise KVUnavailableError(f"write {self.count + 1} was refused, though nobody else writes")
        found = self._kv.get(self._key)
        assert found is not None
        return found.mod_revision


def sigkill(member: Server) -> None:
    member.kill()


def sigstop(member: Server) -> None:
    member.pause()


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("fault", [sigkill, sigstop])
def test_the_connected_member_fails_and_returns(
    cluster: Cluster, connect: Connect, prefix: str, batches: Batches, fault: Callable[[Server], None], leader: bool
) -> None:
    """Calls go on within 2 x call_timeout, the watch sees 1..N in order, the lease lives; then the same on the way back."""
    members = cluster.ordered(leader_first=leader)
    kv = connect(*(member.endpoint for member in members), call_timeout=CALL_TIMEOUT)
    lease = kv.lease(5)
    lease.start(lambda: True, lambda: None)
    kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    writer = Writer(kv, prefix + "n")
    try:
        await_(lambda: writer.count >= 10, what="writes before the fault")
        fault(members[0])
        at_fault = writer.count
        await_(lambda: writer.count >= at_fault + 10 or writer.errors, within=10, what="writes after the fault")
        # Before the member is back: the watch went along with the calls.
        batches.await_values(at_fault + 10)
        members[0].heal()
        members[0].await_serving()
        healed = writer.count
        await_(lambda: writer.count >= healed + 10 or writer.errors, within=10, what="writes after the return")
    finally:
        writer.stop()
    assert writer.errors == []
    # One write is a transaction and a read; only one of them meets the fault.
    assert max(writer.durations) < 2 * CALL_TIMEOUT
    print(f"\n{fault.__name__} of the {'leader' if leader else 'follower'}: longest write {max(writer.durations):.2f} s of {writer.count}")
    assert batches.await_values(writer.count) == [b"%d" % number for number in range(1, writer.count + 1)]
    assert kv.stats.endpoint_switches >= 1
    assert not lease.lost
    assert kv.txn([], [Put(key=prefix + "lease", value=b"", lease=lease.id)]).succeeded


def test_a_rolling_restart_goes_unnoticed(cluster: Cluster, connect: Connect, prefix: str, batches: Batches) -> None:
    """Each member is killed and started in turn: no error, no event lost or doubled."""
    kv = connect(*(member.endpoint for member in cluster.members), call_timeout=CALL_TIMEOUT)
    kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    writer = Writer(kv, prefix + "n")
    try:
        for member in cluster.members:
            before = writer.count
            await_(lambda seen=before: writer.count >= seen + 5 or writer.errors, what="writes")
            member.kill()
            member.start()
    finally:
        writer.stop()
    assert writer.errors == []
    assert batches.await_values(writer.count) == [b"%d" % number for number in range(1, writer.count + 1)]


def test_without_quorum_calls_fail_in_time(cluster: Cluster, connect: Connect, prefix: str) -> None:
    """Two of three gone: the survivor's "no leader" is one KVUnavailableError within the budget, and the return is found."""
    members = cluster.ordered(leader_first=True)
    kv = connect(*(member.endpoint for member in members), call_timeout=1.0)
    members[0].kill()
    members[1].kill()
    started = time.monotonic()
    with pytest.raises(KVUnavailableError) as caught:
        kv.get(prefix)
    assert time.monotonic() - started < 2.5
    for member in members:
        assert member.endpoint in str(caught.value)
    cluster.heal()
    started = time.monotonic()
    assert kv.get(prefix) is None
    assert time.monotonic() - started < 1


def test_a_dead_endpoint_in_front_costs_next_to_nothing(server: Server, connect: Connect, prefix: str) -> None:
    """Refused at once: the first call is served by the next endpoint, and later calls go there directly."""
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    kv = connect(*dead, server.endpoint)
    started = time.monotonic()
    kv.get(prefix)
    assert time.monotonic() - started < 0.5
    kv.get(prefix)
    assert kv.stats.by_operation["get"] == 4


def test_an_unreachable_endpoint_is_one_error_within_the_budget(connect: Connect) -> None:
    """The message names endpoint and cause; the attempts stay few."""
    (port,) = free_ports(1)
    kv = connect(f"127.0.0.1:{port}", call_timeout=0.5)
    started = time.monotonic()
    with pytest.raises(KVUnavailableError, match=rf"127\.0\.0\.1:{port}: nothing listens there") as caught:
        kv.check()
    assert 0.8 < time.monotonic() - started < 1.3
    assert kv.stats.requests < 20
    assert caught.value.exit_code == 4
    assert not isinstance(caught.value, ConflictError)


def test_a_conditional_write_that_timed_out_is_done_once_and_known(server: Server, connect: Connect, prefix: str, batches: Batches) -> None:
    """etcd is stopped during the first attempt and applies it late: the retry finds our value and reports success."""
    kv = connect(server.endpoint, call_timeout=1.0)
    start = kv.list(prefix).revision + 1
    kv.get(prefix)
    server.pause()
    timer = threading.Timer(1.3, server.resume)
    timer.start()
    result = kv.txn([Compare(key=prefix + "a", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "a", value=b"unique")])
    timer.join()
    assert result.succeeded
    assert kv.stats.failures >= 1
    found = kv.get(prefix + "a")
    assert found is not None
    assert (found.value, found.create_revision) == (b"unique", found.mod_revision)
    kv.watch([WatchRange(key=prefix, prefix=True)], start, batches)
    kv.txn([], [Put(key=prefix + "z", value=b"end")])
    batches.await_values(2)
    assert batches.values == [b"unique", b"end"]


def test_a_conditional_write_that_was_committed_late_is_ours(cluster: Cluster, connect: Connect, prefix: str) -> None:
    """The leader has the first attempt in its log and no quorum: when that returns, the retry finds the comparison failed by ourselves."""
    leader, *followers = cluster.ordered(leader_first=True)
    kv = connect(leader.endpoint, call_timeout=0.6)
    kv.get(prefix)
    for follower in followers:
        follower.pause()
    timer = threading.Timer(0.8, lambda: [follower.resume() for follower in followers])
    timer.start()
    result = kv.txn([Compare(key=prefix + "a", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "a", value=b"unique")])
    timer.join()
    found = kv.get(prefix + "a")
    assert found is not None
    assert (result.succeeded, found.value, found.create_revision) == (True, b"unique", found.mod_revision)
    assert kv.stats.by_operation["txn"] >= 2


@pytest.mark.parametrize(
    ("ops", "succeeded"),
    [
        (("put", b"ours"), True),
        (("put", b"theirs"), False),
        (("delete", b""), True),
        (("both", b"ours"), False),
    ],
)
def test_a_failed_comparison_after_an_ambiguous_attempt_is_read_back(kv: EtcdKV, prefix: str, ops: tuple[str, bytes], succeeded: bool) -> None:
    """Success means: every put key holds exactly our value, and every deleted key is absent."""
    kind, value = ops
    kv.txn([], [Put(key=prefix + "fence", value=b""), Put(key=prefix + "a", value=b"ours")])
    absent, present = Delete(key=prefix + "absent"), Delete(key=prefix + "fence")
    wanted = {"put": [Put(key=prefix + "a", value=value)], "delete": [absent], "both": [Put(key=prefix + "a", value=value), present]}[kind]
    with _first_answer_lost(kv):
        result = kv.txn([Compare(key=prefix + "fence", target=Target.CREATE, op="==", value=0)], wanted)
    assert result.succeeded is succeeded


def test_a_value_under_another_lease_is_not_ours(kv: EtcdKV, prefix: str) -> None:
    """Reading back compares the lease too: an earlier incarnation wrote the same value."""
    lease = kv.lease(30)
    kv.txn([], [Put(key=prefix + "a", value=b"v")])
    with _first_answer_lost(kv):
        result = kv.txn([Compare(key=prefix + "a", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "a", value=b"v", lease=lease.id)])
    assert not result.succeeded
    lease.revoke()


def test_an_unconditional_write_is_not_sent_twice(server: Server, connect: Connect, prefix: str) -> None:
    """Without a comparison an ambiguous failure is the caller's: one attempt, then KVUnavailableError."""
    kv = connect(server.endpoint, call_timeout=0.5)
    kv.get(prefix)
    server.pause()
    with pytest.raises(KVUnavailableError, match="no answer in time"):
        kv.txn([], [Put(key=prefix + "a", value=b"1")])
    assert kv.stats.by_operation["txn"] == 1


def test_an_unconditional_write_that_was_never_sent_is_tried_elsewhere(server: Server, connect: Connect, prefix: str) -> None:
    """A refused connection is no ambiguity."""
    (port,) = free_ports(1)
    kv = connect(f"127.0.0.1:{port}", server.endpoint)
    assert kv.txn([], [Put(key=prefix + "a", value=b"1")]).succeeded
    assert kv.stats.by_operation["txn"] == 2


def test_down_for_seconds_and_back(server: Server, connect: Connect, prefix: str, batches: Batches) -> None:
    """While etcd is away, client, lease and watch together use at most 5 % of a core; afterwards all go on."""
    kv = connect(server.endpoint, call_timeout=1.5)
    lease = kv.lease(10)
    lease.start(lambda: True, lambda: None)
    watch = kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    server.kill()
    await_(lambda: watch.error is not None, what="the watch noticing")
    caller = threading.Thread(target=lambda: _fails(kv, prefix))
    caller.start()
    cpu, wall = time.process_time(), time.monotonic()
    threading.Event().wait(max(0.0, 3 - (time.monotonic() - wall)))
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    caller.join()
    server.start()
    started = time.monotonic()
    kv.txn([Compare(key=prefix + "a", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "a", value=b"1")])
    written = time.monotonic() - started
    batches.await_values(1)
    print(f"\nCPU while down: {share:.1%}; after the return: write {written:.2f} s, watch {time.monotonic() - started:.2f} s")
    assert share <= 0.05
    assert (lease.lost, batches.values) == (False, [b"1"])


def _fails(kv: EtcdKV, prefix: str) -> None:
    with pytest.raises(KVUnavailableError):
        kv.get(prefix)


class _first_answer_lost:  # noqa: N801 - reads as a statement
    """The next transaction reaches etcd never, but looks as if it may have: DEADLINE_EXCEEDED."""

    def __init__(self, kv: EtcdKV) -> None:
        self._link = kv._caller._channels.link(kv.config.endpoints[0])

    def __enter__(self) -> None:
        self._real = self._link.kv.Txn
        self._link.kv.Txn = self._lose

    def __exit__(self, *exc: object) -> None:
        self._link.kv.Txn = self._real

    def _lose(self, *arguments: object, **keywords: object) -> object:
        from elasticd.kv import _etcd3

        self._link.kv.Txn = self._real

        class Lost(_etcd3.grpc.RpcError):  # type: ignore[misc]
            def code(self) -> object:
                return _etcd3.grpc.StatusCode.DEADLINE_EXCEEDED

            def details(self) -> str:
                return "Deadline Exceeded"

        raise Lost
