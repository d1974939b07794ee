"""Counters of what went over the wire.

Owns: thread-safe counting. Must not: decide anything from the numbers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from elasticd.kv.outcomes import Code
from elasticd.kv.types import KVStats
from elasticd.observability.durations import Durations

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS: Final = (0.01, 0.1, 0.5, 2.0)
"""Upper bounds, in seconds, of the buckets that attempts are counted in."""


class Counters:
    """Shared by a client, its leases and its watches; read through `EtcdKV.stats`.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()
        self._codes: dict[Code, int] = dict.fromkeys(Code, 0)
        self._durations = Durations(BOUNDS)
        self._last_success = 0.0

    def add(self, name: str, amount: int = 1) -> None:
        """Raise the `KVStats` field called `name`."""
        with self._lock:
            self._totals[name] += amount

    def request(self, operation: str) -> None:
        """Count one attempt at one endpoint, keepalives excepted."""
        with self._lock:
            self._totals["requests"] += 1
            self._operations[operation] += 1

    def ended(self, code: Code, seconds: float) -> None:
        """Count how an attempt ended, keepalives included; a watch, which is to last, is none."""
        self._durations.add(seconds)
        with self._lock:
            self._codes[code] += 1
            if code is Code.OK:
                self._last_success = self._clock()

    def sent(self, payload: bytes) -> bytes:
        """Count the bytes of an outgoing message and hand them on."""
        self.add("bytes_sent", len(payload))
        return payload

    def received(self, payload: bytes) -> bytes:
        """Count the bytes of an incoming message and hand them on."""
        self.add("bytes_received", len(payload))
        return payload

    def snapshot(self) -> KVStats:
        """A copy that does not change any more."""
        with self._lock:
            return KVStats(
                **self._totals,
                by_operation=dict(self._operations),
                by_code={code.value: count for code, count in self._codes.items()},
                durations=self._durations.counted,
                last_success=self._last_success,
            )
