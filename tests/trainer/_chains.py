"""A run in several worlds, one after the other, each but the last stopped on its way; and what all of them together saw. Not a test."""

from __future__ import annotations

import multiprocessing.forkserver
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support import worlds
from tests.support.worlds import Ranks, world
from trainer.checkpoint import scan
from trainer.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Seen = Counter[tuple[int, int]]
"""How often a loss was computed of each (epoch, sample)."""


@contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Worlds are forked from a process that has these modules, which take seconds to import, for as long as this lasts."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()
    context = worlds._context()
    before = list(server._preload_modules)
    context.set_forkserver_preload([*before, *modules])
    yield
    server._stop()
    context.set_forkserver_preload(before)


def seen(ranks: Ranks) -> Seen:
    """By the ranks of one world."""
    lines = [line for rank in range(len(ranks.processes)) for line in ranks.lines(rank) if "seen" in line]
    return Counter((line["epoch"], sample) for line in lines for sample in line["seen"])


def chain(program: Callable[..., Any], folder: Path, *links: tuple[int, Any], late: int = 0, **arguments: Any) -> tuple[list[Any], Seen]:
    """Run worlds of (count, stop), all in `folder`; the last has no stop. `late`: how many steps a stop comes later than it could.

    Returns:
        what the ranks of the last returned, and what all saw.
    """
    total: Seen = Counter()
    for count, stop in links:
        with world(program, count, folder, stop=stop, **arguments) as ranks:
            if stop is None:
                results = ranks.results()
                return results, total + seen(ranks)
            assert ranks.codes() == [EXIT_STOPPED] * count, ranks.story()
            total += seen(ranks)
        steps = stop[1] + (stop[2] == "train")  # who is stopped in the body of step k + 1 does that step
        assert scan(folder / "checkpoints")[0].step == steps + late
    raise AssertionError("the last link has a stop")
