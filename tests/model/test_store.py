"""The model of etcd does what the protocol takes for granted; tests/kv shows that the real one does it too."""

from __future__ import annotations

import pytest

from elasticd.kv.types import Compare, Delete, Put, Target
from elasticd.rendezvous.transitions import Txn
from tests.model.store import HISTORY, NoLeaseError, VirtualEtcd
from tests.rendezvous.world import KEYS

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(name="store")
def _store() -> VirtualEtcd:
    return VirtualEtcd(KEYS, lambda _keys: None)


def put(store: VirtualEtcd, key: str, lease: int = 0) -> int:
    return store.txn(Txn((), (Put(key=key, value=b"x", lease=lease),)))


def unchanged(prefix: str, revision: int) -> Compare:
    return Compare(key=prefix, prefix=True, target=Target.MOD, op="<", value=revision + 1)


def test_the_comparison_over_a_prefix_sees_additions_and_changes_and_no_deletions(store: VirtualEtcd) -> None:
    put(store, "m/a")
    seen = put(store, "m/b")
    assert store.txn(Txn((unchanged("m/", seen),), (Put(key="k", value=b""),)))
    store.txn(Txn((), (Delete(key="m/a"),)))
    assert store.txn(Txn((unchanged("m/", seen),), (Put(key="k", value=b""),)))
    put(store, "m/c")
    assert not store.txn(Txn((unchanged("m/", seen),), (Put(key="k", value=b""),)))


def test_a_lease_takes_its_keys_along(store: VirtualEtcd) -> None:
    lease = store.grant(4.0)
    put(store, "m/a", lease)
    store.now = 3.9
    store.expire()
    assert store.renew(lease)
    store.now = 7.0
    store.expire()
    assert "m/a" in store.items
    store.now = 8.0
    store.expire()
    assert not store.items
    assert not store.renew(lease)
    with pytest.raises(NoLeaseError):
        put(store, "m/a", lease)


def test_no_lease_ends_while_the_store_stands_still(store: VirtualEtcd) -> None:
    put(store, "m/a", store.grant(1.0))
    store.up, store.now = False, 10.0
    store.expire()
    assert store.items
    store.up = True
    store.expire()
    assert not store.items


def test_a_key_put_again_keeps_its_create_revision_and_a_new_one_does_not(store: VirtualEtcd) -> None:
    created = put(store, "a")
    put(store, "a")
    assert store.items["a"].create_revision == created
    store.txn(Txn((), (Delete(key="a"),)))
    put(store, "a")
    assert store.items["a"].create_revision > created


def test_a_watch_brings_what_came_after_or_everything(store: VirtualEtcd) -> None:
    first = put(store, KEYS.member("a"))
    put(store, KEYS.member("b"))
    assert [event.item.key for event in store.changes_after(first).events] == [KEYS.member("b")]
    for _ in range(3 * HISTORY):
        put(store, KEYS.member("b"))
    assert store.changes_after(first).reset
    assert len(store.changes_after(first).events) == 2
