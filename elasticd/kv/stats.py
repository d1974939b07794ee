"""Counters of what went over the wire.

Owns: thread-safe counting. Must not: decide anything from the numbers.
"""

from __future__ import annotations

import threading
from collections import Counter

from elasticd.kv.types import KVStats


class Counters:
    """Shared by a client, its leases and its watches; read through `EtcdKV.stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise the `KVStats` field called `name`."""
        with self._lock:
            self._totals[name] += amount

    def request(self, operation: str) -> None:
        """Count one attempt at one endpoint, keepalives excepted."""
        with self._lock:
            self._totals["requests"] += 1
            self._operations[operation] += 1

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
            return KVStats(**self._totals, by_operation=dict(self._operations))
