"""Signals to a command that runs long, as requests it can act on when it is ready.

Owns: the handlers of SIGINT, SIGTERM and SIGHUP. Must not: decide what a request means.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal came while everything is still being set up: give up at once. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Interrupts:
    """Collects signals while entered. Until `collect` is called, the first one raises `Interrupted` in the main thread instead.

    A signal that is ignored stays ignored, as nohup wants it for SIGHUP.
    """

    def __init__(self) -> None:
        self._collecting = False
        self._raised = False
        self._received: list[signal.Signals] = []
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def __enter__(self) -> Self:
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    @property
    def fd(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def collect(self) -> None:
        """From now on keep signals for `take`."""
        self._collecting = True

    def take(self) -> list[signal.Signals]:
        """The signals since the last call."""
        with suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass
        received, self._received = self._received, []
        return received

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._collecting:
            self._received.append(signal.Signals(number))
            with suppress(BlockingIOError):
                os.write(self._write, b"s")
        elif not self._raised:
            self._raised = True  # once: the cleaning up is not to be interrupted
            raise Interrupted(signal.Signals(number))
