"""Which endpoint is in use.

Owns: one shared position in the list of endpoints and the news that it moved. Must not: talk to anything.

A client, its leases and its watches share one ring, so that whoever meets a dead or slow endpoint first moves the others with it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Ring:
    """A position among endpoints. Thread-safe.

    Args:
        endpoints: at least one; the first is tried first.
        on_switch: called with (from, to) at each move, outside the lock.
    """

    def __init__(self, endpoints: Sequence[str], *, on_switch: Callable[[str, str], None]) -> None:
        self._lock = threading.Lock()
        self._endpoints = tuple(endpoints)
        self._current = self._endpoints[0]
        self._failures = dict.fromkeys(self._endpoints, 0)
        self._ticks = 0
        self._on_switch = on_switch
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._endpoints)

    @property
    def current(self) -> str:
        """The endpoint to use now."""
        with self._lock:
            return self._current

    def failed(self, endpoint: str) -> None:
        """Report that `endpoint` did not answer, or too slowly.

        Moves to the endpoint whose last failure is longest ago, in the order given. A late report about an endpoint already left moves nothing,
        so that ten calls failing at once are one move.
        """
        with self._lock:
            self._ticks += 1
            self._failures[endpoint] = self._ticks
            if endpoint != self._current:
                return
            new = min(self._after(endpoint), key=lambda other: self._failures[other])
            self._current = new
        if new != endpoint:
            self._on_switch(endpoint, new)
            self.announce()

    def worked(self, endpoint: str) -> None:
        """Report that `endpoint` answered: its failures are forgotten."""
        with self._lock:
            self._failures[endpoint] = 0

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each move or `announce`, on the thread that caused it; it must not block. Returns the way to unsubscribe."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def announce(self) -> None:
        """Tell the listeners that what they hold is out of date."""
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def _after(self, endpoint: str) -> tuple[str, ...]:
        at = self._endpoints.index(endpoint)
        return self._endpoints[at + 1 :] + self._endpoints[: at + 1]
