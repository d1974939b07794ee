"""What another library's loop is given as its training loader: the steps of a session, one at a turn.

Owns: when a step that this loop has done is counted. Must not: know which library asks.

A loop that is not ours fetches the next batch when everything that belongs to the last step is done: schedulers, logs, evaluation, the library's
own files. So a step is counted, and a state of it kept, at the next fetch; or earlier, where the loop begins an evaluation that a stop may cut short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from trainer.data import ElasticLoader
from trainer.session import Session, Turn


class Feed:
    """Steps to the end of an epoch, each time it is iterated. Between two passes nothing is lost and nothing comes twice.

    Args:
        run: the session.
        loader: of that session.

    Attributes:
        turn: the step that was handed out last.
    """

    def __init__(self, run: Session, loader: ElasticLoader) -> None:
        self.loader: Final = loader
        self.turn: Turn | None = None
        self._run: Final = run
        self._pass: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # The last pass is held until here: a library that drops it at the end of an epoch would leave its last step uncounted until then.
        self.settle()
        self._pass = self._steps()
        return self._pass

    def unpack(self, turn: Turn) -> Any:
        """What the library's loop gets of a step."""
        return turn

    def settle(self) -> None:
        """Count the step that was handed out last, if it is not counted yet. May raise Stopped."""
        self._run.stepped()

    def _steps(self) -> Iterator[Any]:
        for turn in self._run.accumulate(self.loader):
            self.turn = turn
            yield self.unpack(turn)
            self.settle()
