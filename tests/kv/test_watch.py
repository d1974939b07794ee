"""Watches on a single member: order, resumption, compaction, close."""

from __future__ import annotations

import importlib
import threading
import time

import pytest

from elasticd.kv import Compare, Delete, EtcdKV, EventKind, Put, Target, WatchBatch, WatchRange
from tests.kv.conftest import Batches, Connect, put_next
from tests.support.etcd import Server, await_

pytestmark = pytest.mark.timeout(60)


def write(kv: EtcdKV, key: str, values: range) -> int:
    revision = 0
    for value in values:
        revision = kv.txn([], [Put(key=key, value=b"%d" % value)]).revision
    return revision


def numbers(values: range) -> list[bytes]:
    return [b"%d" % value for value in values]


def test_changes_arrive_in_order(kv: EtcdKV, prefix: str, batches: Batches) -> None:
    """Every change after the start revision, none before, deletions included."""
    start = write(kv, prefix + "a", range(3)) + 1
    kv.watch([WatchRange(key=prefix, prefix=True)], start, batches)
    write(kv, prefix + "a", range(3, 20))
    last = kv.txn([], [Delete(key=prefix + "a")]).revision
    assert batches.await_values(18) == [*numbers(range(3, 20)), b""]
    event = batches.all[-1].events[-1]
    assert (event.kind, event.item.key, event.item.mod_revision) == (EventKind.DELETE, prefix + "a", last)
    assert [batch.revision for batch in batches.all] == sorted({batch.revision for batch in batches.all})


def test_history_since_the_start_revision_is_replayed(kv: EtcdKV, prefix: str, batches: Batches) -> None:
    """A watch may begin in the past."""
    first = write(kv, prefix + "a", range(1))
    write(kv, prefix + "a", range(1, 10))
    kv.watch([WatchRange(key=prefix + "a")], first, batches)
    assert batches.await_values(10) == numbers(range(10))


def test_several_ranges_share_a_stream(kv: EtcdKV, prefix: str, batches: Batches) -> None:
    """Each change comes once, from its own range; neighbours stay out."""
    start = kv.list(prefix).revision + 1
    kv.watch([WatchRange(key=prefix + "a/", prefix=True), WatchRange(key=prefix + "b")], start, batches)
    for name in ("a/1", "b", "b2", "a", "a/2"):
        kv.txn([], [Put(key=prefix + name, value=name.encode())])
    write(kv, prefix + "a/3", range(1))
    await_(lambda: {b"0", b"b"} <= set(batches.values), what="the last change of each range")
    assert sorted(batches.values) == [b"0", b"a/1", b"a/2", b"b"]
    assert kv.stats.by_operation["watch"] == 1


def test_a_callback_that_raises_does_not_end_the_watch(kv: EtcdKV, prefix: str) -> None:
    """The next batch still comes."""
    seen: list[bytes] = []

    def fragile(batch: WatchBatch) -> None:
        seen.extend(event.item.value for event in batch.events)
        raise RuntimeError("on purpose")

    kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, fragile)
    write(kv, prefix + "a", range(2))
    await_(lambda: seen == numbers(range(2)), what="both batches")


def test_close_is_prompt_and_leaves_no_thread(kv: EtcdKV, prefix: str, batches: Batches) -> None:
    """After close() nothing is delivered and no thread of the watch remains, grpc's included."""
    kv.get(prefix)
    before = set(threading.enumerate())
    watch = kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    write(kv, prefix + "a", range(1))
    batches.await_values(1)
    started = time.monotonic()
    watch.close()
    assert time.monotonic() - started < 1
    write(kv, prefix + "a", range(1, 2))
    await_(lambda: set(threading.enumerate()) <= before, what="threads ending")
    assert batches.values == numbers(range(1))


def test_close_from_the_callback_works(kv: EtcdKV, prefix: str) -> None:
    """A receiver may decide that it has seen enough."""
    seen: list[WatchBatch] = []
    ready = threading.Event()

    def once(batch: WatchBatch) -> None:
        ready.wait(5)
        seen.append(batch)
        watch.close()

    watch = kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, once)
    ready.set()
    write(kv, prefix + "a", range(1))
    await_(lambda: not watch._thread.is_alive(), what="the thread ending")
    assert len(seen) == 1


@pytest.mark.parametrize(("how", "outages"), [("kill", 1), ("pause", 2)])
def test_a_watch_goes_on_after_an_outage(server: Server, connect: Connect, prefix: str, batches: Batches, how: str, outages: int) -> None:
    """Nothing is lost or doubled over outages of the only member, and `error` tells while one lasts."""
    kv = connect(server.endpoint, call_timeout=1.0)
    revision = put_next(kv, prefix + "a", b"1", 0)
    watch = kv.watch([WatchRange(key=prefix, prefix=True)], revision, batches)
    batches.await_values(1)
    for number in range(2, outages + 2):
        if how == "kill":
            server.kill()
            await_(lambda: watch.error is not None, what="the error")
            assert server.endpoint in str(watch.error)
            server.start()
        else:
            server.pause()
            threading.Event().wait(0.5)
            server.resume()
        revision = put_next(kv, prefix + "a", b"%d" % number, revision)
        batches.await_values(number)
    await_(lambda: watch.error is None, what="the error clearing")
    assert batches.values == numbers(range(1, outages + 2))


def test_a_server_that_never_answers_is_noticed(server: Server, connect: Connect, prefix: str, batches: Batches) -> None:
    """A stopped server keeps its connections: a stream opened anew over one is given up after call_timeout, and served when the server goes on."""
    kv = connect(server.endpoint, call_timeout=0.5)
    watch = kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    put_next(kv, prefix + "a", b"1", 0)
    batches.await_values(1)
    server.pause()
    kv._ring.announce()  # as a move or a renewed certificate would
    await_(lambda: watch.error is not None, within=2, what="the error")
    assert "no answer in time" in str(watch.error)
    server.resume()
    await_(lambda: watch.error is None, what="the error clearing")
    kv.txn([], [Put(key=prefix + "a", value=b"2")])
    assert batches.await_values(2) == [b"1", b"2"]


def test_events_delivered_before_are_dropped(kv: EtcdKV) -> None:
    """etcd before 3.4.25 and 3.5.8 may send a resumed watch older events than it asked for."""
    from elasticd.kv import messages

    event = importlib.import_module("etcd3.etcdrpc.kv_pb2").Event
    sent = [event(kv={"key": b"a", "mod_revision": revision}) for revision in (4, 5, 6)]
    assert [event.item.mod_revision for event in messages.events(sent, since=5)] == [5, 6]


def test_compaction_resets_a_watch_that_was_left_behind(kv: EtcdKV, server: Server, prefix: str, batches: Batches) -> None:
    """One batch with reset=True holds every key that exists; later changes follow."""
    first = write(kv, prefix + "a", range(1))
    write(kv, prefix + "a", range(1, 5))
    write(kv, prefix + "b/x", range(7, 8))
    write(kv, prefix + "gone", range(1))
    last = kv.txn([], [Delete(key=prefix + "gone")]).revision
    server.compact(last)
    kv.watch([WatchRange(key=prefix + "a"), WatchRange(key=prefix + "b/", prefix=True), WatchRange(key=prefix + "gone")], first, batches)
    await_(lambda: batches.all, what="a batch")
    reset = batches.all[0]
    assert reset.reset
    assert reset.revision >= last
    assert [(event.kind, event.item.value) for event in reset.events] == [(EventKind.PUT, b"4"), (EventKind.PUT, b"7")]
    write(kv, prefix + "a", range(5, 7))
    assert batches.await_values(4)[2:] == numbers(range(5, 7))
    assert not any(batch.reset for batch in batches.all[1:])


def test_ranges_that_progressed_apart_resume_each_at_its_own_place(server: Server, connect: Connect, prefix: str, batches: Batches) -> None:
    """After an outage a quiet range still gets its older event, a busy one none again."""
    kv = connect(server.endpoint)
    start = kv.list(prefix).revision + 1
    watch = kv.watch([WatchRange(key=prefix + "busy"), WatchRange(key=prefix + "quiet")], start, batches)
    write(kv, prefix + "busy", range(5))
    batches.await_values(5)
    server.kill()
    await_(lambda: watch.error is not None, what="the error")
    server.start()
    result = kv.txn([Compare(key=prefix + "quiet", target=Target.CREATE, op="==", value=0)], [Put(key=prefix + "quiet", value=b"q")])
    assert result.succeeded
    write(kv, prefix + "busy", range(5, 6))
    assert sorted(batches.await_values(7)) == sorted([*numbers(range(6)), b"q"])
