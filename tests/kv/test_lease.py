"""Leases: kept alive, let go, and lost."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticd.errors import LeaseLostError
from elasticd.kv import Compare, EtcdKV, Put, Target
from elasticd.kv.lease import boottime
from tests.support.etcd import Cluster, Server, await_

if TYPE_CHECKING:
    from tests.kv.conftest import Connect

pytestmark = pytest.mark.timeout(60)


class Changes:
    """Counts on_change and lets a test wait for it."""

    def __init__(self) -> None:
        self.count = 0
        self.event = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.event.set()


def always() -> bool:
    return True


def bind(kv: EtcdKV, key: str, lease_id: int) -> None:
    assert kv.txn([Compare(key=key, target=Target.CREATE, op="==", value=0)], [Put(key=key, value=b"1", lease=lease_id)]).succeeded


@pytest.mark.parametrize(("asked", "granted"), [(1, 2.0), (2, 2.0), (2.2, 3.0), (10, 10.0)])
def test_a_ttl_is_whole_seconds_and_at_least_two(kv: EtcdKV, asked: float, granted: float) -> None:
    """etcd's floor is 2 s; fractions are rounded up."""
    lease = kv.lease(asked)
    assert lease.ttl == granted
    assert boottime() - 5 < lease.last_renewed <= boottime()
    lease.revoke()


def test_a_lease_outlives_its_ttl_while_it_is_renewed(kv: EtcdKV, prefix: str) -> None:
    """Renewed each third, counted apart from other requests, and dated at the sending."""
    lease = kv.lease(2)
    changes = Changes()
    bind(kv, prefix + "a", lease.id)
    requests = kv.stats.requests
    lease.start(always, changes)
    granted = lease.last_renewed
    await_(lambda: lease.last_renewed - granted > 3.2, what="renewals past the TTL")
    assert kv.stats.keepalives == 5
    assert kv.stats.requests == requests
    assert kv.get(prefix + "a") is not None
    assert (lease.lost, lease.reachable, changes.count) == (False, True, 0)


def test_a_lease_lapses_while_its_owner_hangs(kv: EtcdKV, prefix: str) -> None:
    """may_renew() false, or broken, lets etcd drop the keys; true again finds the lease lost."""
    hung, broken = kv.lease(2), kv.lease(2)
    changes = Changes()
    alive = threading.Event()
    bind(kv, prefix + "hung", hung.id)
    bind(kv, prefix + "broken", broken.id)
    hung.start(alive.is_set, changes)
    broken.start(lambda: 1 // 0 == 0, Changes())
    await_(lambda: not kv.list(prefix).items, what="expiry")
    assert not hung.lost
    assert kv.stats.keepalives == 0
    alive.set()
    assert changes.event.wait(3)
    assert hung.lost


def test_a_lease_revoked_by_somebody_is_reported_lost(kv: EtcdKV, server: Server, connect: Connect, prefix: str) -> None:
    """TTL 0 in the answer is loss, told once; a put under it is LeaseLostError."""
    lease = kv.lease(2)
    changes = Changes()
    bind(kv, prefix + "a", lease.id)
    lease.start(always, changes)
    kv._caller.call("test", lambda link, timeout: link.lease.LeaseRevoke(_revoke(lease.id), timeout=timeout))
    assert changes.event.wait(3)
    assert (lease.lost, changes.count) == (True, 1)
    with pytest.raises(LeaseLostError):
        kv.txn([], [Put(key=prefix + "b", value=b"1", lease=lease.id)])


def _revoke(lease_id: int) -> object:
    from elasticd.kv import _etcd3

    return _etcd3.rpc.LeaseRevokeRequest(ID=lease_id)


def test_revoke_drops_the_keys_at_once(kv: EtcdKV, prefix: str) -> None:
    """A planned leave does not wait for the TTL."""
    lease = kv.lease(30)
    bind(kv, prefix + "a", lease.id)
    lease.start(always, Changes())
    lease.revoke()
    assert kv.get(prefix + "a") is None
    lease.revoke()  # again is harmless


def test_stop_keeps_the_lease_until_it_lapses(kv: EtcdKV, prefix: str) -> None:
    """stop() ends the thread promptly and revokes nothing."""
    lease = kv.lease(30)
    bind(kv, prefix + "a", lease.id)
    lease.start(always, Changes())
    started = time.monotonic()
    lease.stop()
    assert time.monotonic() - started < 1
    assert kv.get(prefix + "a") is not None
    assert not [thread for thread in threading.enumerate() if thread.name == f"lease-{lease.id:x}"]


def test_a_short_outage_keeps_the_lease(server: Server, connect: Connect, prefix: str) -> None:
    """Unreachable is told after a third of the TTL, reachable again after the return, and nothing is lost."""
    kv = connect(server.endpoint)
    lease = kv.lease(3)
    changes = Changes()
    bind(kv, prefix + "a", lease.id)
    lease.start(always, changes)
    other = kv.lease(3)
    other.start(always, lambda: 1 // 0)  # a listener that raises stops nothing
    server.kill()
    await_(lambda: not lease.reachable and not other.reachable, what="unreachable")
    assert not lease.lost
    server.start()
    await_(lambda: changes.count == 2, what="the news of the return")
    await_(lambda: other.reachable, what="the return for the other")
    assert (lease.lost, lease.reachable) == (False, True)
    assert kv.get(prefix + "a") is not None


def test_a_member_that_falls_silent_does_not_make_its_clients_take_themselves_for_cut_off(cluster: Cluster, connect: Connect, prefix: str) -> None:
    """It leaves the others their time within the third: a host that loses its power sends no reset."""
    leader, lost, other = cluster.ordered(leader_first=True)
    kv = connect(lost.endpoint, leader.endpoint, other.endpoint)
    lease = kv.lease(3)
    changes = Changes()
    bind(kv, prefix + "a", lease.id)
    lease.start(always, changes)
    renewed = lease.last_renewed
    await_(lambda: lease.last_renewed > renewed, what="a renewal by the member that is to be lost")
    lost.pause()
    at = boottime()
    await_(lambda: lease.last_renewed - at > 3.2, what="renewals by the others past the TTL")
    assert (lease.reachable, lease.lost, changes.count) == (True, False, 0)


def test_a_pause_past_the_ttl_loses_the_lease(server: Server, connect: Connect, prefix: str) -> None:
    """While etcd is stopped the lease is unreachable and not lost; when it goes on, it is lost, and a write says so."""
    kv = connect(server.endpoint, call_timeout=1.0)
    lease = kv.lease(2)
    changes = Changes()
    bind(kv, prefix + "a", lease.id)
    lease.start(always, changes)
    renewed = lease.last_renewed
    server.pause()
    await_(lambda: boottime() - renewed > 3.2, what="the TTL passing")
    assert (lease.lost, lease.reachable) == (False, False)
    server.resume()
    await_(lambda: lease.lost, what="loss")
    assert lease.reachable
    with pytest.raises(LeaseLostError):
        kv.txn([Compare(key=prefix + "b", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "b", value=b"1", lease=lease.id)])


def test_a_lease_starts_once(kv: EtcdKV) -> None:
    """A second start() is a mistake in the program."""
    lease = kv.lease(30)
    lease.start(always, Changes())
    with pytest.raises(RuntimeError, match="started before"):
        lease.start(always, Changes())
    lease.revoke()
