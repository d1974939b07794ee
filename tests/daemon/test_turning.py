"""A fault of ours in one turn of the loop: survived, told, and not passed off as a sign of life."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from elasticd.daemon.board import Board
from elasticd.daemon.notify import Notifier
from elasticd.daemon.reconcile import Verdict
from elasticd.daemon.service import _turn

if TYPE_CHECKING:
    from pathlib import Path


class Loop:
    """Its first turn fails."""

    def __init__(self) -> None:
        self.turns = 0

    def turn(self) -> Verdict:
        self.turns += 1
        if self.turns == 1:
            raise ZeroDivisionError
        return Verdict(actions=(), jobs=(), until=7.0)


@pytest.mark.timeout(20)
def test_a_turn_that_fails_is_survived_and_is_no_sign_of_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(node="a", incarnation="0" * 16, stalled_after=60)
    board.wake()  # so that the pause after a failure is none here
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
        loop = Loop()
        assert _turn(loop, board, notifier) == Verdict(actions=(), jobs=())  # type: ignore[arg-type]
        assert "turn_failed" in capsys.readouterr().out
        assert _turn(loop, board, notifier).until == 7.0  # type: ignore[arg-type]
        assert manager.recv(100) == b"WATCHDOG=1"
        assert manager.recv(100).startswith(b"STATUS=")
        notifier.close()
    board.close()


def test_a_loop_that_stands_still_counts_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(node="a", incarnation="0" * 16, stalled_after=0.0)
    assert board.stuck.startswith("the decision loop has not turned for ")
    assert board.unready == board.stuck
    board.close()
    fresh = Board(node="a", incarnation="0" * 16, stalled_after=60.0)
    assert (fresh.stuck, fresh.unready) == ("", "etcd: not asked yet")
    fresh.close()
