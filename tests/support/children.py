"""The processes that a test has started, apart from those that an earlier test of the same process keeps for all (a forkserver)."""

from __future__ import annotations

import psutil

_before: set[int] = set()


def forget() -> None:
    """Count those that are there from now on as somebody else's."""
    _before.clear()
    _before.update(child.pid for child in psutil.Process().children(recursive=True))


def children(*, recursive: bool = False) -> list[psutil.Process]:
    """Our children since `forget`."""
    return [child for child in psutil.Process().children(recursive=recursive) if child.pid not in _before]
