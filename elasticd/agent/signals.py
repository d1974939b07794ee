"""What the agent is asked by signals.

Owns: the handlers, and what comes before there is anybody to ask. Must not: import anything slow: until the handlers are set a signal ends the
process, and a daemon may send one at any time.

SIGTERM, SIGINT: leave the job in order. SIGHUP: read the certificates again if a daemon started this agent, else leave. SIGUSR1: a checkpoint is wanted.
"""

from __future__ import annotations

import queue
import signal
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Asked(Protocol):
    """Who obeys. Both are called from a signal handler: they may not block."""

    def leave(self) -> None:
        """Leave the job in order."""

    def ask_checkpoint(self) -> None:
        """Pass on to the workers that a checkpoint is wanted."""


class Signals:
    """The handlers, set at once. A signal to leave that comes before there is an agent waits for it; a wish for a checkpoint is dropped, for nothing trains."""

    def __init__(self) -> None:
        self._leaves = False
        self._hung_up = False
        self._decided = False
        self._reload: Callable[[], None] | None = None
        self._agent: Asked | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            if self._agent:
                self._agent.ask_checkpoint()
        elif number == signal.SIGHUP and not self._decided:
            self._hung_up = True
        elif number == signal.SIGHUP and self._reload is not None:
            self._reload()
        else:
            self._leave()

    def _leave(self) -> None:
        self._leaves = True
        if self._agent:
            self._agent.leave()

    def on_hangup(self, reload: Callable[[], None] | None) -> None:
        """What SIGHUP means: call `reload`, which may not block; None: leave, also because of one that came before this call."""
        self._reload = reload
        self._decided = True
        if self._hung_up and reload is None:
            self._leave()

    def reach(self, agent: Asked) -> None:
        """Tell `agent` from now on, and of an earlier wish that it leave."""
        self._agent = agent
        if self._leaves:
            agent.leave()


class Errand:
    """Does one thing on a thread of its own, each time it is asked: reading files may take long, and who watches workers must not wait for it."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self._do = do
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Do it soon. SimpleQueue.put is reentrant, so a signal handler may call this."""
        self._asked.put(True)

    def close(self) -> None:
        """Do no more; waits 2 s at most for one that is being done."""
        self._asked.put(False)
        self._thread.join(2.0)

    def _run(self) -> None:
        while self._asked.get():
            self._do()
