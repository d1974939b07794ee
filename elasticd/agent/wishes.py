"""What is asked of an agent by signals and by its other threads, and the bell that wakes its main thread for it.

Owns: the wishes until they are fulfilled, and the pipe. Must not: fulfil any.
"""

from __future__ import annotations

import os
from contextlib import suppress


class Wishes:
    """See the module. `ask_…` and `ring` may be called from any thread, and from a signal handler.

    Attributes:
        leave: this node is to leave the job.
        checkpoint: a checkpoint is wanted, and nobody has been told yet.
        fd: readable once the bell was rung.
    """

    def __init__(self) -> None:
        self.leave = False
        self.checkpoint = False
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ask_leave(self) -> None:
        """Leave the job in order. A second call changes nothing."""
        self.leave = True
        self.ring()

    def ask_checkpoint(self) -> None:
        """Pass on that a checkpoint is wanted."""
        self.checkpoint = True
        self.ring()

    def ring(self) -> None:
        """Have the main thread look at everything now."""
        with suppress(BlockingIOError):
            os.write(self._write, b"!")

    def heard(self) -> None:
        """Forget earlier rings."""
        with suppress(BlockingIOError):
            while os.read(self.fd, 64):
                pass
