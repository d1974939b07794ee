"""Reading and writing against a healthy etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticd.errors import KVClosedError, KVInvalidError, LeaseLostError, UsageError
from elasticd.kv import Compare, Delete, EtcdKV, KVConfig, Put, Target

if TYPE_CHECKING:
    from tests.kv.conftest import Connect
    from tests.support.etcd import Server

pytestmark = pytest.mark.timeout(60)


def absent(key: str) -> Compare:
    return Compare(key=key, target=Target.CREATE, op="==", value=0)


def put(kv: EtcdKV, *pairs: tuple[str, bytes]) -> int:
    return kv.txn([], [Put(key=key, value=value) for key, value in pairs]).revision


def test_a_missing_key_is_none(kv: EtcdKV, prefix: str) -> None:
    """get() of what is not there returns None."""
    assert kv.get(prefix + "nothing") is None


def test_a_key_comes_back_with_its_revisions(kv: EtcdKV, prefix: str) -> None:
    """create_revision stays at the first write, mod_revision follows the last."""
    first = put(kv, (prefix + "a", b"1"))
    second = put(kv, (prefix + "a", b"2"))
    found = kv.get(prefix + "a")
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.lease) == (b"2", first, second, 0)


def test_a_listing_is_in_key_order_at_one_revision(kv: EtcdKV, prefix: str) -> None:
    """list() returns all below the prefix and nothing beside it."""
    put(kv, (prefix + "b", b"2"), (prefix + "a", b"1"), (prefix[:-1] + "0", b"neighbour"))
    listing = kv.list(prefix)
    assert [(item.key, item.value) for item in listing.items] == [(prefix + "a", b"1"), (prefix + "b", b"2")]
    assert listing.revision >= max(item.mod_revision for item in listing.items)


def test_a_listing_of_keys_only_leaves_values_out(kv: EtcdKV, prefix: str) -> None:
    """keys_only keeps revisions and drops values."""
    revision = put(kv, (prefix + "a", b"1"))
    (item,) = kv.list(prefix, keys_only=True).items
    assert (item.key, item.value, item.mod_revision) == (prefix + "a", b"", revision)


def test_newest_first_sorts_by_creation(kv: EtcdKV, prefix: str) -> None:
    """A later change does not make a key newer; the limit counts in that order."""
    for name in ("c", "a", "b"):
        put(kv, (prefix + name, b"1"))
    put(kv, (prefix + "c", b"2"))
    assert [item.key[-1] for item in kv.list(prefix, newest_first=True).items] == ["b", "a", "c"]
    assert [item.key[-1] for item in kv.list(prefix, newest_first=True, limit=2).items] == ["b", "a"]


def test_created_before_excludes_its_own_revision(kv: EtcdKV, prefix: str) -> None:
    """created_before=N is strictly below N, and a bound below every key finds none."""
    put(kv, (prefix + "a", b"1"))
    second = put(kv, (prefix + "b", b"1"))
    assert [item.key[-1] for item in kv.list(prefix, created_before=second).items] == ["a"]
    assert [item.key[-1] for item in kv.list(prefix, created_before=second + 1, newest_first=True, limit=1).items] == ["b"]
    assert kv.list(prefix, created_before=1).items == ()
    assert kv.list(prefix, created_before=0).items == ()


def test_keys_that_are_not_text_do_not_break_a_listing(kv: EtcdKV, server: Server, prefix: str) -> None:
    """Somebody else's odd key is listed, and can be deleted by the name it was listed under."""
    odd = prefix + "\udcff\udcfe"
    put(kv, (odd, b"1"))
    assert [item.key for item in kv.list(prefix).items] == [odd]
    kv.txn([], [Delete(key=odd)])
    assert kv.list(prefix).items == ()


def test_a_transaction_does_all_or_nothing(kv: EtcdKV, prefix: str) -> None:
    """One comparison that fails keeps every operation from happening."""
    put(kv, (prefix + "a", b"1"))
    result = kv.txn([absent(prefix + "a"), absent(prefix + "b")], [Put(key=prefix + "b", value=b"2"), Delete(key=prefix + "a")])
    assert not result.succeeded
    assert [item.key[-1] for item in kv.list(prefix).items] == ["a"]
    result = kv.txn([absent(prefix + "b")], [Put(key=prefix + "b", value=b"2"), Delete(key=prefix + "a")])
    assert result.succeeded
    assert [(item.key[-1], item.mod_revision) for item in kv.list(prefix).items] == [("b", result.revision)]


@pytest.mark.parametrize(("op", "offset", "holds"), [("==", 0, True), ("==", 1, False), ("!=", 0, False), ("!=", 1, True), ("<", 1, True), (">", 0, False)])
def test_comparisons_compare(kv: EtcdKV, prefix: str, op: str, offset: int, holds: bool) -> None:
    """Each operator holds when it should, on the mod revision."""
    revision = put(kv, (prefix + "a", b"1"))
    assert kv.txn([Compare(key=prefix + "a", target=Target.MOD, op=op, value=revision + offset)], []).succeeded is holds


def test_a_comparison_sees_the_lease(kv: EtcdKV, prefix: str) -> None:
    """Target.LEASE compares the lease that a key is bound to."""
    lease = kv.lease(30)
    kv.txn([], [Put(key=prefix + "a", value=b"1", lease=lease.id)])
    assert kv.txn([Compare(key=prefix + "a", target=Target.LEASE, op="==", value=lease.id)], []).succeeded
    assert not kv.txn([Compare(key=prefix + "a", target=Target.LEASE, op="==", value=0)], []).succeeded
    lease.revoke()


def test_a_range_comparison_sees_additions_and_changes_and_no_deletion(kv: EtcdKV, prefix: str) -> None:
    """mod(prefix) < list revision + 1 is the fence of PROTOCOL 5."""

    def unchanged_since(revision: int) -> bool:
        return kv.txn([Compare(key=prefix, target=Target.MOD, op="<", value=revision + 1, prefix=True)], []).succeeded

    assert unchanged_since(kv.list(prefix).revision)  # an empty range holds
    put(kv, (prefix + "a", b"1"), (prefix + "b", b"1"))
    listed = kv.list(prefix).revision
    assert unchanged_since(listed)
    kv.txn([], [Delete(key=prefix + "b")])
    assert unchanged_since(listed)
    put(kv, (prefix + "c", b"1"))
    assert not unchanged_since(listed)
    listed = kv.list(prefix).revision
    put(kv, (prefix + "a", b"2"))
    assert not unchanged_since(listed)


def test_an_unknown_operator_is_refused(kv: EtcdKV, prefix: str) -> None:
    """A typo in a comparison is told before anything is sent."""
    before = kv.stats.requests
    with pytest.raises(KVInvalidError, match="<="):
        kv.txn([Compare(key=prefix, target=Target.MOD, op="<=", value=1)], [])
    assert kv.stats.requests == before


def test_too_many_operations_are_refused_before_sending(kv: EtcdKV, prefix: str) -> None:
    """128 in all go through, 129 raise KVInvalidError without a request."""
    ops = [Put(key=f"{prefix}{index}", value=b"") for index in range(127)]
    assert kv.txn([absent(prefix + "x")], ops).succeeded
    before = kv.stats.requests
    with pytest.raises(KVInvalidError, match="128"):
        kv.txn([absent(prefix + "x"), absent(prefix + "y")], ops)
    assert kv.stats.requests == before


def test_a_value_over_1_mib_is_refused_before_sending(kv: EtcdKV, prefix: str) -> None:
    """1 MiB goes through, a byte more raises KVInvalidError that names the key."""
    put(kv, (prefix + "fits", bytes(1 << 20)))
    before = kv.stats.requests
    with pytest.raises(KVInvalidError, match="big"):
        put(kv, (prefix + "big", bytes((1 << 20) + 1)))
    assert kv.stats.requests == before


def test_a_request_that_etcd_finds_too_large_is_invalid(kv: EtcdKV, prefix: str) -> None:
    """Values that fit alone and not together: etcd's refusal becomes KVInvalidError at once."""
    with pytest.raises(KVInvalidError, match="too large"):
        put(kv, (prefix + "a", bytes(1 << 20)), (prefix + "b", bytes(700_000)))
    with pytest.raises(KVInvalidError, match="larger than max"):
        put(kv, *((f"{prefix}{index}", bytes(1 << 20)) for index in range(4)))


def test_a_key_written_twice_is_invalid(kv: EtcdKV, prefix: str) -> None:
    """etcd's INVALID_ARGUMENT is not retried."""
    with pytest.raises(KVInvalidError, match="duplicate key"):
        put(kv, (prefix + "a", b"1"), (prefix + "a", b"2"))


def test_a_listing_larger_than_grpcs_default_arrives(kv: EtcdKV, prefix: str) -> None:
    """gRPC refuses over 4 MB unless told otherwise."""
    for index in range(6):
        put(kv, (f"{prefix}{index}", bytes(1 << 20)))
    assert sum(len(item.value) for item in kv.list(prefix).items) == 6 << 20


def test_a_put_under_a_dead_lease_is_lease_lost(kv: EtcdKV, prefix: str) -> None:
    """etcd's NOT_FOUND becomes LeaseLostError, and nothing is written."""
    lease = kv.lease(30)
    lease.revoke()
    with pytest.raises(LeaseLostError, match="lease not found"):
        kv.txn([absent(prefix + "a")], [Put(key=prefix + "a", value=b"1", lease=lease.id)])
    assert kv.get(prefix + "a") is None


def test_statistics_count_calls_and_bytes(kv: EtcdKV, prefix: str) -> None:
    """Each operation is counted under its name, and a value's bytes both ways."""
    put(kv, (prefix + "a", bytes(1000)))
    kv.get(prefix + "a")
    kv.list(prefix)
    stats = kv.stats
    assert stats.by_operation == {"txn": 1, "get": 1, "list": 1}
    assert stats.requests == 3
    assert 1000 < stats.bytes_sent < 1500
    assert 2000 < stats.bytes_received < 2500
    assert (stats.failures, stats.keepalives, stats.endpoint_switches) == (0, 0, 0)


def test_a_closed_client_says_so(kv: EtcdKV, prefix: str) -> None:
    """Every use after close() raises KVClosedError; closing twice is harmless."""
    kv.get(prefix)
    kv.close()
    kv.close()
    with pytest.raises(KVClosedError):
        kv.get(prefix)
    with pytest.raises(KVClosedError):
        kv.lease(5)
    with pytest.raises(KVClosedError):
        kv.watch([], 1, lambda batch: None)


def test_check_passes_on_a_healthy_endpoint(kv: EtcdKV, prefix: str) -> None:
    """check() is one request, two with a prefix to read."""
    kv.check()
    kv.check(prefix)
    assert kv.stats.by_operation == {"check": 2, "list": 1}


@pytest.mark.parametrize("endpoint", ["localhost", "http://localhost:2379", ":2379", "localhost:", "localhost:http"])
def test_a_malformed_endpoint_is_a_usage_error(endpoint: str) -> None:
    """The message names what was given and the form wanted."""
    with pytest.raises(UsageError, match="host:port"):
        EtcdKV(KVConfig(endpoints=(endpoint,)))


def test_no_endpoint_is_a_usage_error() -> None:
    """An empty list is told as such."""
    with pytest.raises(UsageError, match="no etcd endpoint"):
        EtcdKV(KVConfig(endpoints=()))


def test_a_host_name_works_as_well_as_an_address(server: Server, connect: Connect, prefix: str) -> None:
    """Endpoints are resolved by gRPC."""
    assert connect(f"localhost:{server.port}").get(prefix) is None
