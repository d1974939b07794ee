"""One call, however many attempts it takes.

Owns: deadlines, moving on, pauses and the error at the end. Must not: know what is asked; the caller hands in how to send it.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from elasticd.errors import KVClosedError, KVUnavailableError
from elasticd.kv import _etcd3, outcomes
from elasticd.kv.outcomes import Code, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv.channels import Channels, Link
    from elasticd.kv.ring import Ring
    from elasticd.kv.stats import Counters

_T = TypeVar("_T")
SHORTEST = 0.02  # seconds; an attempt with less than this left would only fail
_PAUSES = (0.05, 0.4)  # seconds; first and longest pause after every endpoint failed in a row

_log = structlog.get_logger("elasticd.kv")


def failure_of(error: Exception, *, tls: bool) -> Failure:
    """What an exception out of a stub means."""
    if isinstance(error, _etcd3.grpc.RpcError):
        # A call that grpc could not even start carries no status.
        code: Any = getattr(error, "code", lambda: None)()
        details: Any = getattr(error, "details", lambda: None)()
        return outcomes.judge(code.name if code is not None else "UNKNOWN", str(details or ""), tls=tls)
    if isinstance(error, ValueError):
        return Failure(error=KVClosedError, cause="the channel is closed", maybe_done=False)
    return Failure(error=KVUnavailableError, cause=str(error), maybe_done=False)


class Pauses:
    """Growing, jittered pauses: from `first` to `longest` seconds, each between half and all of its turn."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def reset(self) -> None:
        """Start small again."""
        self._next = self._first

    def take(self) -> float:
        """Seconds to wait now."""
        turn = self._next
        self._next = min(self._longest, turn * 2)
        return turn * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


class Caller:
    """Sends requests through the ring. Thread-safe.

    Args:
        timeout: seconds for one attempt; a call gives up after twice that.
        tls: only words errors.
    """

    def __init__(self, ring: Ring, channels: Channels, counters: Counters, *, timeout: float, tls: bool) -> None:
        self._ring = ring
        self._channels = channels
        self._counters = counters
        self._timeout = timeout
        self._tls = tls
        self._closed = threading.Event()

    def call(
        self,
        operation: str,
        send: Callable[[Link, float], _T],
        *,
        again: Callable[[Failure], bool] | None = None,
        budget: float | None = None,
    ) -> _T:
        """Send until an endpoint answers.

        Args:
            operation: its name in statistics and errors.
            send: makes one attempt over a link, within so many seconds.
            again: whether another attempt is allowed after this failure; None allows each.
            budget: seconds for all attempts; None takes twice the timeout.

        Raises:
            KVError: by the table of `outcomes`.
        """
        deadline = time.monotonic() + (2 * self._timeout if budget is None else budget)
        pauses = Pauses(*_PAUSES)
        causes: dict[str, str] = {}
        tried = 0
        while (left := deadline - time.monotonic()) >= SHORTEST:
            endpoint = self._ring.current
            outcome = self._attempt(operation, endpoint, send, min(self._timeout, left))
            if not isinstance(outcome, Failure):
                return outcome
            causes[endpoint] = outcome.cause
            if not outcome.moves:
                raise outcome.error(f"{operation} at {endpoint}: {outcome.cause}")
            if again is not None and not again(outcome):
                break
            tried += 1
            if tried % len(self._ring) == 0:
                self._closed.wait(max(0.0, min(pauses.take(), deadline - time.monotonic())))
        told = ", ".join(f"{endpoint}: {cause}" for endpoint, cause in causes.items())
        raise KVUnavailableError(f"{operation}: no etcd endpoint answered in time ({told})", remedy="check that etcd runs and that the endpoints are right")

    def close(self) -> None:
        """Let calls in flight end with KVClosedError, and refuse new ones."""
        self._closed.set()
        self._channels.close()

    def check_open(self, operation: str) -> None:
        """Raise KVClosedError after `close`."""
        if self._closed.is_set():
            raise KVClosedError(f"{operation}: the etcd client was closed")

    def _attempt(self, operation: str, endpoint: str, send: Callable[[Link, float], _T], timeout: float) -> _T | Failure:
        self.check_open(operation)
        self._counters.request(operation)
        began = time.monotonic()
        try:
            answer = send(self._channels.link(endpoint), timeout)
        except (_etcd3.grpc.RpcError, ValueError, OSError) as error:
            self._counters.add("failures")
            failure = failure_of(error, tls=self._tls)
            self._counters.ended(failure.code, time.monotonic() - began)
        else:
            self._counters.ended(Code.OK, time.monotonic() - began)
            self._ring.worked(endpoint)
            return answer
        if failure.error is KVClosedError:
            self.check_open(operation)
            failure = Failure(error=KVUnavailableError, cause=failure.cause, maybe_done=failure.maybe_done)
        if failure.moves:
            _log.debug("attempt_failed", operation=operation, endpoint=endpoint, cause=failure.cause)
            self._ring.failed(endpoint)
        return failure
