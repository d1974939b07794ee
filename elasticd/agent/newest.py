"""A thread that does one thing after the other, and of those that wait only the newest.

Owns: the thread and the place of the one that waits. Must not: know what is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger("elasticd.agent.newest")

T = TypeVar("T")


class Newest(Generic[T]):
    """See the module.

    Args:
        name: of the thread, which starts with the first `put`.
        work: does one; what it raises is logged and goes no further.
    """

    def __init__(self, name: str, work: Callable[[T], None]) -> None:
        self._work = work
        self._name = name
        self._changed = threading.Condition()
        self._waiting: T | None = None
        self._working = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> T | None:
        """Have `item` done next. Returns the one whose place it took, or itself where the end has come."""
        with self._changed:
            if self._closing:
                return item
            replaced, self._waiting = self._waiting, item
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return replaced

    @property
    def busy(self) -> bool:
        """Something is done or waits."""
        return self._working or self._waiting is not None

    @property
    def closing(self) -> bool:
        """The end has come: what is being done should end too."""
        return self._closing

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is done or waits; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, seconds)

    def pause(self, seconds: float) -> bool:
        """Called from `work`: wait. True after `seconds`; False at once when there is something newer, or the end has come."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing or self._waiting is not None, seconds)

    def close(self, seconds: float) -> None:
        """Do nothing more; wait up to `seconds` for the end of what is being done."""
        with self._changed:
            self._closing = True
            self._waiting = None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _next(self) -> T | None:
        with self._changed:
            self._working = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._waiting is not None)
            item, self._waiting = self._waiting, None
            self._working = item is not None
            return item

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._work(item)
            except Exception:
                log.exception("thread_failed", thread=self._name)
