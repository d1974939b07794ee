"""What is counted of the way to etcd: attempts by how they ended, how long they took, and when one went well last; on real servers where it can be."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticd.errors import KVClosedError, KVError, KVInvalidError, KVPermissionError, KVUnavailableError, LeaseLostError
from elasticd.kv import Compare, Put, Target, WatchRange
from elasticd.kv.outcomes import Code, Failure, judge
from elasticd.kv.stats import BOUNDS, Counters
from elasticd.observability.durations import Durations
from tests.support.etcd import await_, free_ports

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV
    from tests.kv.conftest import Batches, Connect
    from tests.support.etcd import Cluster, Server

pytestmark = pytest.mark.timeout(60)


# --- counting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "late", "code"),
    [
        (KVUnavailableError, False, Code.UNAVAILABLE),
        (KVUnavailableError, True, Code.TIMEOUT),
        (KVClosedError, False, Code.UNAVAILABLE),
        (KVPermissionError, False, Code.DENIED),
        (KVInvalidError, False, Code.ERROR),
        (LeaseLostError, False, Code.ERROR),
    ],
)
def test_each_failure_is_counted_as_one_of_four(error: type[KVError], late: bool, code: Code) -> None:
    assert Failure(error=error, cause="", maybe_done=False, late=late).code is code


@pytest.mark.parametrize(
    ("status", "details", "late"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", True),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to connection lost", True),
        ("UNAVAILABLE", "failed to connect to all addresses", False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", False),
    ],
)
def test_what_did_not_answer_in_time_is_late(status: str, details: str, late: bool) -> None:
    assert judge(status, details, tls=False).late is late


def test_a_duration_is_counted_in_the_first_bucket_that_holds_it() -> None:
    durations = Durations((1.0, 2.0))
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        durations.add(seconds)
    assert (durations.counted.counts, durations.counted.total) == ((2, 2, 2), 107.0)


def test_a_snapshot_does_not_change_any_more_and_nothing_is_lost_between_threads() -> None:
    counters = Counters(lambda: 5.0)
    before = counters.snapshot()

    def count() -> None:
        for number in range(2000):
            counters.ended(Code.OK if number % 2 else Code.TIMEOUT, 0.05)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = counters.snapshot()
    assert (before.by_code, before.last_success, sum(before.durations.counts)) == (dict.fromkeys(Code, 0), 0.0, 0)
    assert (after.by_code["ok"], after.by_code["timeout"], after.last_success) == (4000, 4000, 5.0)
    assert after.durations.counts == (0, 8000, 0, 0, 0)
    assert after.durations.bounds == BOUNDS


# --- on real servers -----------------------------------------------------------------------------------------------------


def test_calls_that_go_well_are_counted_with_their_time(kv: EtcdKV, prefix: str) -> None:
    began = time.time()
    kv.txn([Compare(key=prefix, target=Target.CREATE, op="==", value=0)], [Put(key=prefix, value=b"1")])
    kv.get(prefix)
    stats = kv.stats
    assert stats.by_code == {"ok": 2, "unavailable": 0, "timeout": 0, "denied": 0, "error": 0}
    assert sum(stats.durations.counts) == 2
    assert 0 < stats.durations.total < time.time() - began
    assert began <= stats.last_success <= time.time()


def test_keepalives_count_too(kv: EtcdKV) -> None:
    lease = kv.lease(2)
    before = kv.stats.by_code["ok"]
    lease.start(lambda: True, lambda: None)
    await_(lambda: kv.stats.by_code["ok"] >= before + 2, what="two keepalives")
    lease.stop()
    assert kv.stats.requests == 1, "the grant; attempts that were begun are counted without keepalives"


def test_what_etcd_refuses_is_an_error_and_no_success(kv: EtcdKV, prefix: str) -> None:
    with pytest.raises(LeaseLostError):
        kv.txn([Compare(key=prefix, target=Target.CREATE, op="==", value=0)], [Put(key=prefix, value=b"1", lease=12345)])
    assert (kv.stats.by_code["error"], kv.stats.by_code["ok"], kv.stats.last_success) == (1, 0, 0.0)


def test_where_nothing_listens_attempts_are_unavailable(connect: Connect) -> None:
    kv = connect(*(f"127.0.0.1:{port}" for port in free_ports(2)), call_timeout=0.5)
    with pytest.raises(KVUnavailableError):
        kv.get("/x")
    stats = kv.stats
    assert stats.by_code["unavailable"] >= 2
    assert stats.by_code["ok"] == 0
    assert stats.endpoint_switches >= 1


def test_a_server_that_hangs_is_a_timeout_and_leaves_the_last_success_behind(server: Server, connect: Connect) -> None:
    kv = connect(server.endpoint, call_timeout=0.3)
    kv.get("/x")
    before = kv.stats
    server.pause()
    with pytest.raises(KVUnavailableError):
        kv.get("/x")
    stats = kv.stats
    assert stats.by_code["timeout"] >= 1
    assert (stats.by_code["ok"], stats.last_success) == (1, before.last_success)
    assert sum(stats.durations.counts) == sum(stats.by_code.values())


def test_a_member_that_is_left_is_a_switch_and_a_broken_watch_a_restart(cluster: Cluster, connect: Connect, prefix: str, batches: Batches) -> None:
    members = cluster.ordered(leader_first=False)
    kv = connect(*(member.endpoint for member in members), call_timeout=1.0)
    revision = kv.list(prefix).revision
    watch = kv.watch([WatchRange(key=prefix, prefix=True)], revision + 1, batches)
    kv.txn([], [Put(key=f"{prefix}a", value=b"1")])
    batches.await_values(1)
    before = kv.stats
    members[0].kill()
    await_(lambda: kv.stats.watch_restarts > before.watch_restarts, what="a restart of the watch")
    await_(lambda: kv.stats.endpoint_switches > before.endpoint_switches, what="a switch")
    watch.close()
