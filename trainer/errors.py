"""Every error that `trainer` raises on purpose, in one tree.

Owns: the classes. Must not: log, or know who raises what.

::

    TrainerError             anything below; catch this one
    ├── SetupError           what the script asks for cannot work; the message says why and what to do
    ├── StateError           a state does not fit what is registered; names the first that differs
    ├── DamagedError         a checkpoint is not what was written; names the file and what is wrong with it
    ├── NoSpaceError         the disk is full; nothing that was there before is harmed
    ├── CancelledError       who asked for it asked for its end; nothing that was there before is harmed
    └── ChannelError         the agent does not answer, or says what we do not understand

`Stopped` is no error: it is how a worker ends that was asked to stop, and derives from SystemExit.
"""

from __future__ import annotations

from typing import Final

EXIT_STOPPED: Final = 143
"""Exit code of a worker that stopped as asked, at a step that all agreed on: 128 + SIGTERM, so that nobody takes it for success."""


class TrainerError(Exception):
    """Root of the tree.

    Args:
        message: one line that names the thing at fault.
        remedy: what the reader can do about it, or "" if nothing is known.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class SetupError(TrainerError):
    """What the script asks for cannot work."""


class StateError(TrainerError):
    """A state does not fit what is registered."""


class DamagedError(TrainerError):
    """A checkpoint is not what was written."""


class NoSpaceError(TrainerError):
    """The disk is full."""


class CancelledError(TrainerError):
    """Who asked for it asked for its end."""


class ChannelError(TrainerError):
    """The agent does not answer, or says what we do not understand."""


class Stopped(SystemExit):
    """This worker was asked to stop and did, with its state kept. Let it pass: `finally` blocks run, and the process ends.

    Args:
        step: optimizer steps done.
        reason: who asked, and why.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.step = step
        self.reason = reason
