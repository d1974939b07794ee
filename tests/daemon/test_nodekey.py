"""The node's own key on a real etcd: taken, kept, written when it says something else, never taken from another machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.daemon.nodekey import NodeKey, incarnation
from elasticd.daemon.outlook import Lookout
from elasticd.kv import Put
from elasticd.rendezvous.nodelock import boot_id
from elasticd.rendezvous.records import NodePolicyRecord, NodeRecord
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemon.daemons import Cluster


def record(cluster: Cluster, **values: Any) -> NodeRecord:
    plain = {"node": "a", "incarnation": "0" * 16, "address": "host-a", "slots": 1, "version": "1", "boot_id": boot_id()}
    return NodeRecord(scope=cluster.keys.scope, **{**plain, **values})


@pytest.fixture
def key(cluster: Cluster) -> Iterator[NodeKey]:
    key = NodeKey(cluster.kv, cluster.keys, "a", ttl=2, may_renew=lambda: True, wake=lambda: None)
    yield key
    key.close()


def read(cluster: Cluster) -> Any:
    return cluster.kv.get(cluster.keys.node("a"))


def test_the_key_is_taken_kept_and_written_only_when_it_says_something_else(cluster: Cluster, key: NodeKey) -> None:
    assert key.keep(None, record(cluster))
    first = read(cluster)
    assert first.lease != 0
    assert key.keep(first, record(cluster))
    assert read(cluster).mod_revision == first.mod_revision
    assert key.keep(first, record(cluster, problems=("x",)))
    second = read(cluster)
    assert (json.loads(second.value)["problems"], second.create_revision) == (["x"], first.create_revision)


def test_a_dead_predecessors_key_of_this_boot_is_replaced(cluster: Cluster, key: NodeKey) -> None:
    cluster.kv.txn([], [Put(key=cluster.keys.node("a"), value=record(cluster, incarnation="1" * 16).to_bytes())])
    assert key.keep(read(cluster), record(cluster))
    assert json.loads(read(cluster).value)["incarnation"] == "0" * 16


def test_a_key_of_another_machine_or_boot_is_never_taken(cluster: Cluster, key: NodeKey) -> None:
    cluster.kv.txn([], [Put(key=cluster.keys.node("a"), value=record(cluster, incarnation="1" * 16, boot_id="another", address="host-z").to_bytes())])
    assert not key.keep(read(cluster), record(cluster))
    assert key.problem == "node 'a' is registered by another machine or boot (host-z); waiting for the end of its lease"
    assert json.loads(read(cluster).value)["incarnation"] == "1" * 16


def test_garbage_in_the_keys_place_is_replaced(cluster: Cluster, key: NodeKey) -> None:
    cluster.kv.txn([], [Put(key=cluster.keys.node("a"), value=b"garbage")])
    assert key.keep(read(cluster), record(cluster))
    assert json.loads(read(cluster).value)["node"] == "a"


def test_a_lease_that_ended_is_followed_by_another(cluster: Cluster) -> None:
    may = [False]
    key = NodeKey(cluster.kv, cluster.keys, "a", ttl=2, may_renew=lambda: may[0], wake=lambda: None)
    assert key.keep(None, record(cluster))
    first = read(cluster).lease
    await_(lambda: read(cluster) is None, within=10, what="the end of a lease that is not renewed")
    may[0] = True
    assert await_(lambda: _kept(cluster, key), within=10, what="the key")
    assert read(cluster).lease != first
    key.close()
    assert read(cluster) is None


def _kept(cluster: Cluster, key: NodeKey) -> bool:
    from elasticd.errors import KVUnavailableError

    try:
        return key.keep(read(cluster), record(cluster))
    except KVUnavailableError:
        return False


def test_incarnations_differ() -> None:
    assert len({incarnation() for _ in range(100)}) == 100


def test_a_policy_that_turns_to_garbage_changes_nothing_and_is_named(cluster: Cluster) -> None:
    woken: list[None] = []
    lookout = Lookout(cluster.kv, cluster.keys, "a", lambda: woken.append(None))
    policy = NodePolicyRecord(scope=cluster.keys.scope, draining=True, reason="fan")
    cluster.kv.txn([], [Put(key=cluster.keys.policy("a"), value=policy.to_bytes())])
    assert lookout.read([]).policy.draining
    cluster.kv.txn([], [Put(key=cluster.keys.policy("a"), value=b"{}")])
    await_(lambda: woken, what="the watch")
    outlook = lookout.read([])
    assert outlook.policy.draining
    assert cluster.keys.policy("a") in outlook.problems[0]
    lookout.close()
