"""Following changes without losing or doubling one.

Owns: one gRPC stream for several ranges, where each range resumes, and starting over when the stream breaks, stalls or is left behind by compaction.
Must not: interpret keys. A watch only wakes its user early; a listing is the truth.

Each range keeps its own next revision: on one stream they progress separately while they catch up. Answers to create requests come in the order of
the requests; that, and not the id in the answer, tells which range was refused (etcd 3.4 answers id 0, 3.5 answers -1).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog

from elasticd.errors import KVError, KVPermissionError, KVUnavailableError
from elasticd.kv import _etcd3, messages
from elasticd.kv.calls import Caller, Pauses, failure_of
from elasticd.kv.channels import METADATA, Channels
from elasticd.kv.types import EventKind, KVConfig, WatchBatch, WatchEvent, WatchRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticd.kv.ring import Ring
    from elasticd.kv.stats import Counters

_PAUSES = (0.1, 1.0)  # seconds between attempts while no endpoint serves
_REFUSED_AGAIN = 5.0  # seconds until a range that we may not read is asked for again
_REFUSALS = ("permission denied", "invalid auth token", "user name is empty")
_JOIN = 2.0  # seconds to wait for the thread

_log = structlog.get_logger("elasticd.kv")


class _BrokenError(Exception):
    """The stream has to be opened anew."""


class _CompactedError(Exception):
    """The history that a range needs is gone."""


class _Stream:
    """One gRPC stream: its requests, and which range each answer belongs to."""

    def __init__(self, stub: Any, ranges: dict[WatchRange, int]) -> None:
        self._ranges = ranges
        self._asked: deque[WatchRange] = deque()
        self._by_id: dict[int, WatchRange] = {}
        self._later: queue.SimpleQueue[tuple[float, WatchRange] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self.stalled = False
        self.call = stub.Watch(self._requests(list(ranges)), metadata=METADATA)

    def _requests(self, first: list[WatchRange]) -> Iterator[Any]:
        # Runs on a thread of grpc; the stream stays open as long as this does not return.
        for watched in first:
            yield self._create(watched)
        while (entry := self._later.get()) is not None:
            due, watched = entry
            if self._ended.wait(max(0.0, due - time.monotonic())):
                return
            yield self._create(watched)

    def _create(self, watched: WatchRange) -> Any:
        self._asked.append(watched)
        return messages.watch_create(watched, self._ranges[watched])

    def created(self, answer: Any) -> WatchRange:
        """Which range a create answer is about."""
        watched = self._asked.popleft()
        if not answer.canceled:
            self._by_id[answer.watch_id] = watched
        return watched

    def owner(self, watch_id: int) -> WatchRange | None:
        """The range that an answer belongs to, unless it was given up."""
        return self._by_id.get(watch_id)

    @property
    def complete(self) -> bool:
        """Whether every range asked for is being watched."""
        return len(self._by_id) == len(self._ranges)

    def ask_again(self, watched: WatchRange, delay: float) -> None:
        """Ask for a refused range once more, `delay` seconds from now."""
        self._later.put((time.monotonic() + delay, watched))

    def stall(self) -> None:
        """End it because nothing came."""
        self.stalled = True
        self.end()

    def end(self) -> None:
        """Let go of the stream and of grpc's thread."""
        self._ended.set()
        self._later.put(None)
        self.call.cancel()


class Watch:
    """A watch that heals itself; made by `EtcdKV.watch`.

    Batches come in order on the watch's own thread. Within one range no event is lost or doubled; batches of different ranges may interleave
    while they catch up after a break.
    """

    def __init__(
        self,
        *,
        ranges: Sequence[WatchRange],
        start_revision: int,
        on_batch: Callable[[WatchBatch], None],
        ring: Ring,
        channels: Channels,
        counters: Counters,
        config: KVConfig,
    ) -> None:
        self._next = dict.fromkeys(ranges, max(1, start_revision))
        self._on_batch = on_batch
        self._ring = ring
        self._channels = channels
        self._counters = counters
        self._config = config
        self._caller = Caller(ring, channels, counters, timeout=config.call_timeout, tls=config.tls is not None)
        self._error: KVError | None = None
        self._close = threading.Event()
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._moved = False
        self._served = 0  # streams on which every range was accepted
        self._unsubscribe = ring.subscribe(self._move)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def error(self) -> KVError | None:
        """Why the watch does not serve at the moment, or None. It keeps trying either way."""
        return self._error

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._close.is_set()

    def close(self) -> None:
        """Deliver nothing more and let go of thread and connection. Safe from the callback too."""
        self._close.set()
        self._unsubscribe()
        self._cut(moved=False)
        self._caller.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _move(self) -> None:
        self._cut(moved=True)

    def _cut(self, *, moved: bool) -> None:
        with self._lock:
            self._moved = self._moved or moved
            stream = self._stream
        if stream is not None:
            stream.end()

    def _run(self) -> None:
        pauses = Pauses(*_PAUSES)
        while not self._close.is_set():
            with self._lock:
                self._moved = False
            endpoint = self._ring.current
            served = self._served
            try:
                self._follow(endpoint)
            except _CompactedError:
                self._start_over()
                continue
            except Exception as error:  # whatever it is, a watch that is open goes on
                if self._close.is_set():
                    return
                self._broken(endpoint, error)
            self._counters.add("watch_restarts")
            if self._served > served:
                pauses.reset()
            with self._lock:
                free = self._moved and self._served > served
            # Following a move of a ring that served is free; otherwise a pause, so that dead endpoints do not make it spin.
            if not free:
                self._close.wait(pauses.take())

    def _broken(self, endpoint: str, error: Exception) -> None:
        with self._lock:
            moved = self._moved
        if moved:
            return
        failure = failure_of(error, tls=self._config.tls is not None)
        self._error = KVUnavailableError(f"watch at {endpoint}: {failure.cause}")
        _log.debug("watch_broken", endpoint=endpoint, cause=failure.cause)
        self._ring.failed(endpoint)

    def _follow(self, endpoint: str) -> None:
        """Serve one stream until it ends, always by an exception."""
        self._counters.request("watch")
        stream = _Stream(self._channels.link(endpoint).watch, self._next)
        with self._lock:
            self._stream = stream
            outdated = self._moved or self._close.is_set()
        # A stopped server takes the connection and never answers.
        alarm = threading.Timer(self._config.call_timeout, stream.stall)
        alarm.daemon = True
        alarm.start()
        try:
            if outdated:
                raise _BrokenError("moved")
            for answer in stream.call:
                alarm.cancel()
                self._take(stream, answer, endpoint)
            raise _BrokenError("the stream ended")
        except Exception as error:
            if stream.stalled:
                raise _BrokenError("no answer in time") from error
            raise
        finally:
            alarm.cancel()
            with self._lock:
                self._stream = None
            stream.end()

    def _take(self, stream: _Stream, answer: Any, endpoint: str) -> None:
        if self._close.is_set():
            return
        if answer.created:
            self._created(stream, answer, endpoint)
            return
        owner = stream.owner(answer.watch_id)
        if answer.canceled:
            if answer.compact_revision:
                raise _CompactedError
            raise _BrokenError(answer.cancel_reason or "the watch was cancelled")
        if owner is None or not answer.events:
            return
        events = messages.events(answer.events, since=self._next[owner])
        if events:
            revision = events[-1].item.mod_revision
            self._next[owner] = revision + 1
            self._deliver(WatchBatch(revision=revision, events=events))

    def _created(self, stream: _Stream, answer: Any, endpoint: str) -> None:
        watched = stream.created(answer)
        if not answer.canceled:
            if stream.complete:
                self._served += 1
                self._error = None
                self._ring.worked(endpoint)
            return
        if not any(mark in answer.cancel_reason.lower() for mark in _REFUSALS):
            raise _BrokenError(answer.cancel_reason or "the watch was refused")
        self._error = KVPermissionError(f"watch of {watched.key} at {endpoint}: {answer.cancel_reason}")
        _log.error("watch_refused", key=watched.key, endpoint=endpoint, reason=answer.cancel_reason)
        stream.ask_again(watched, _REFUSED_AGAIN)

    def _start_over(self) -> None:
        """After compaction: list every range in one transaction and go on from there."""
        request = _etcd3.rpc.TxnRequest(success=[messages.read(one.key, prefix=one.prefix) for one in self._next])
        try:
            answer = self._caller.call("list", lambda link, timeout: link.kv.Txn(request, timeout=timeout, metadata=METADATA))
        except KVError as error:
            self._error = error
            self._close.wait(_REFUSED_AGAIN if isinstance(error, KVPermissionError) else _PAUSES[1])
            return
        revision = answer.header.revision
        items = [messages.key_value(item) for found in answer.responses for item in found.response_range.kvs]
        self._next = dict.fromkeys(self._next, revision + 1)
        _log.warning("watch_reset", revision=revision, keys=len(items))
        self._deliver(WatchBatch(revision=revision, events=tuple(WatchEvent(kind=EventKind.PUT, item=item) for item in items), reset=True))

    def _deliver(self, batch: WatchBatch) -> None:
        try:
            self._on_batch(batch)
        except Exception:
            _log.exception("watch_callback_failed", revision=batch.revision)
