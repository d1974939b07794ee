"""Values that are looked up by a thread of their own, so that whoever reads them never waits for a driver, a file server or a disk that hangs.

Owns: one look at a time, how old a value may be, and how long a reader waits. Must not: know what is looked at.

Nothing is looked at while nobody asks.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

FRESH: Final = 1.0
"""Seconds for which a value is given again without another look."""
KEPT: Final = 60.0
"""Seconds for which an old value is given while a newer one does not come."""
_WAIT: Final = 0.01  # seconds that a reader waits who could have an old value
_WAIT_FIRST: Final = 0.5  # seconds after the beginning of a look until which a reader waits who could have none

log = structlog.get_logger("elasticd.daemon")


class Sampled(Generic[T]):
    """See the module. Thread-safe.

    Args:
        name: of its threads, and in the log.
        look: may take any time, or never end; what it raises is logged, and there is no value.
        fresh: as `FRESH`.
        kept: as `KEPT`.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, look: Callable[[], T], *, fresh: float = FRESH, kept: float = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._look = look
        self._fresh = fresh
        self._kept = max(kept, fresh)
        self._clock = clock
        self._changed = threading.Condition()
        self._value: T | None = None
        self._at: float | None = None
        self._asked_at: float | None = None
        self._failing = False

    def begin(self) -> None:
        """Look, if it is time. Whoever wants several values begins all looks before it waits for the first."""
        with self._changed:
            self._begin()

    def get(self) -> T | None:
        """The value, a new one if it comes soon; None if there is none, or only one that is too old."""
        with self._changed:
            asked_at = self._begin()
            if asked_at is None:
                return self._value
            usable = self._age() <= self._kept
            # A look that hangs is waited for once, and not by each reader again.
            wait = _WAIT if usable else max(0.0, asked_at + _WAIT_FIRST - self._clock())
            self._changed.wait_for(lambda: self._asked_at is None, timeout=wait)
            return self._value if self._age() <= self._kept else None

    def _begin(self) -> float | None:
        """When the look that is under way began; None if there is none, for the value is fresh."""
        if self._asked_at is None and self._age() > self._fresh:
            threading.Thread(target=self._work, name=f"elasticd-{self._name}", daemon=True).start()
            self._asked_at = self._clock()  # not if there can be no more threads; it waits for the lock, which we hold
        return self._asked_at

    def _age(self) -> float:
        return float("inf") if self._at is None else self._clock() - self._at

    def _work(self) -> None:
        value: T | None = None
        fault: Exception | None = None
        try:
            value = self._look()
        except Exception as error:
            fault = error
        with self._changed:
            # Also when it failed: then the value is that there is none, and it is not asked for again at once.
            self._value, self._at, self._asked_at = value, self._clock(), None
            told, self._failing = self._failing, fault is not None
            self._changed.notify_all()
        if fault is not None and not told:
            log.warning("not_sampled", what=self._name, reason=str(fault)[:300])
