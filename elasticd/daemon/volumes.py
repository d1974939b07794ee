"""The places on disk that jobs need on this node.

Owns: which they are, and what each is called in metrics and readings. Must not: look at them (`host` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.daemon.launching import checkpoints_of

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig

VOLUMES: Final = ("logs", "state", "checkpoints")


def volumes_of(config: DaemonConfig, board: Board) -> Mapping[str, Callable[[], Sequence[Path]]]:
    """Of each, the directories: those of checkpoints are what the allowed jobs say at the time."""
    paths = config.paths

    def checkpoints() -> Sequence[Path]:
        return [checkpoints_of(config, spec, board.own) for spec in board.turn.allowed.values()]

    return dict(zip(VOLUMES, (lambda: (paths.log_dir,), lambda: (paths.state_dir,), checkpoints), strict=True))
