"""Between our values and etcd's protobuf messages.

Owns: translation, both ways, of keys, ranges, comparisons, operations and events. Must not: send anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticd.errors import KVInvalidError
from elasticd.kv import _etcd3
from elasticd.kv.types import Compare, Delete, EventKind, KeyValue, Op, Put, Target, WatchEvent, WatchRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_OPERATIONS = 128  # etcd's --max-txn-ops
MAX_VALUE = 1 << 20  # bytes; etcd's own limit is 1.5 MiB for the whole request

# Names, not numbers: the messages themselves exist only after `_etcd3.load`.
_RESULTS = {"==": "EQUAL", "!=": "NOT_EQUAL", "<": "LESS", ">": "GREATER"}
_TARGETS = {Target.CREATE: "CREATE", Target.MOD: "MOD", Target.LEASE: "LEASE"}
_DELETED = 1  # mvccpb.Event.DELETE


def encode(key: str) -> bytes:
    """The bytes of a key. Keys that others wrote and that are not UTF-8 survive the way there and back."""
    return key.encode("utf-8", "surrogateescape")


def decode(key: bytes) -> str:
    """The inverse of `encode`."""
    return key.decode("utf-8", "surrogateescape")


def span(key: str, *, prefix: bool) -> dict[str, bytes]:
    """The fields `key` and `range_end` of a request: one key, or all below a prefix ("" is the whole store)."""
    start = encode(key)
    if not prefix:
        return {"key": start}
    if not start:
        return {"key": b"\0", "range_end": b"\0"}
    stem = start.rstrip(b"\xff")
    return {"key": start, "range_end": stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"}


def key_value(message: Any) -> KeyValue:
    """One key out of an answer."""
    return KeyValue(
        key=decode(message.key),
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        lease=message.lease,
        version=message.version,
    )


def compare(condition: Compare) -> Any:
    """One comparison of a transaction.

    Raises:
        KVInvalidError: the operator is none of "==", "!=", "<", ">".
    """
    if condition.op not in _RESULTS:
        raise KVInvalidError(f"no such comparison: {condition.op!r}", remedy='use one of "==", "!=", "<", ">"')
    return _etcd3.rpc.Compare(
        result=_RESULTS[condition.op],
        target=_TARGETS[condition.target],
        **{condition.target.value: condition.value},
        **span(condition.key, prefix=condition.prefix),
    )


def operation(op: Op) -> Any:
    """One write of a transaction."""
    if isinstance(op, Put):
        return _etcd3.rpc.RequestOp(request_put=_etcd3.rpc.PutRequest(key=encode(op.key), value=op.value, lease=op.lease))
    return _etcd3.rpc.RequestOp(request_delete_range=_etcd3.rpc.DeleteRangeRequest(key=encode(op.key)))


def read(key: str, *, prefix: bool = False) -> Any:
    """One read of a transaction."""
    return _etcd3.rpc.RequestOp(request_range=_etcd3.rpc.RangeRequest(**span(key, prefix=prefix)))


def check_size(compares: Sequence[Compare], ops: Sequence[Op]) -> None:
    """Refuse what etcd would refuse, before it is sent.

    Raises:
        KVInvalidError: over 128 comparisons and operations together, or a value over 1 MiB.
    """
    if len(compares) + len(ops) > MAX_OPERATIONS:
        raise KVInvalidError(f"a transaction of {len(compares)} comparisons and {len(ops)} operations; etcd takes {MAX_OPERATIONS} in all")
    for op in ops:
        if isinstance(op, Put) and len(op.value) > MAX_VALUE:
            raise KVInvalidError(f"the value for {op.key} is too large: {len(op.value)} bytes; at most {MAX_VALUE}")


def holds(op: Op, found: Sequence[Any]) -> bool:
    """Whether the store shows what `op` would have left: exactly its value and lease, or no key. `found` is what a read of its key returned."""
    if isinstance(op, Delete):
        return not found
    return len(found) == 1 and found[0].value == op.value and found[0].lease == op.lease


def watch_create(watched: WatchRange, start_revision: int) -> Any:
    """The request for one range on a watch stream."""
    create = _etcd3.rpc.WatchCreateRequest(start_revision=start_revision, **span(watched.key, prefix=watched.prefix))
    return _etcd3.rpc.WatchRequest(create_request=create)


def events(messages: Iterable[Any], *, since: int) -> tuple[WatchEvent, ...]:
    """The changes of one answer, without those before revision `since`."""
    return tuple(
        WatchEvent(kind=EventKind.DELETE if message.type == _DELETED else EventKind.PUT, item=key_value(message.kv))
        for message in messages
        if message.kv.mod_revision >= since
    )
