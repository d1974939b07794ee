"""All ranks' steps side by side on rank 0, every few seconds.

Owns: when, and the one small gather. Must not: judge what it finds.

The next time is a step's number that follows from what was gathered, which is the same on all ranks: nobody has to agree on it. The gather is begun
at the end of a step and looked at, at the end of the next, when it is long done: no rank waits for it. A stop at either step stops all ranks at the
same place, before the gather or with it begun on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.wire.channel import Ranks
from trainer.wire.window import PHASES
from trainer.world import World

EVERY_S: Final = 5.0
FIRST: Final = 2
"""Steps before the first gather, which shows how long steps are."""
COLUMNS: Final = (*PHASES, "seconds")
_NEVER: Final = 2**63


def spacing(slowest: float) -> int:
    """Steps to the next gather.

    Args:
        slowest: largest mean of a step's seconds of all ranks.
    """
    return min(1_000_000, max(1, round(EVERY_S / slowest))) if slowest > 0.0 else FIRST


class Comparison:
    """All ranks have one, and call `turn` at the end of the same steps.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = _NEVER
        self._begun = False
        self._last = 0
        self._sums = [0.0] * len(COLUMNS)
        self._count = 0
        self._flight: _Flight | None = None

    def begin(self, step: int) -> None:
        """Steps follow after this one. All ranks call it, or none."""
        if not self._begun:
            self._begun = True
            self._last, self._next = step, step + FIRST

    def add(self, seconds: float, spent: Sequence[float]) -> None:
        """A step of this rank."""
        sums = self._sums
        for index, value in enumerate(spent):
            sums[index] += value
        sums[-1] += seconds
        self._count += 1

    def begins_at(self, step: int) -> bool:
        """Whether `turn` at the end of this step begins a gather: what was added until then goes into it."""
        return step >= self._next

    def turn(self, step: int) -> Ranks | None:
        """A step has ended: what all ranks said, on rank 0, if it was gathered since. Collective."""
        found: Ranks | None = None
        if self._flight is not None:
            found = self._landed(step)
        if step >= self._next:
            self._launch(step)
        return found

    def _launch(self, step: int) -> None:
        means = [value / max(1, self._count) for value in self._sums]
        self._sums = [0.0] * len(COLUMNS)
        self._count = 0
        self._next = _NEVER
        self._flight = _Flight(self._world, step, means)

    def _landed(self, step: int) -> Ranks | None:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        try:
            rows = flight.rows()
        except RuntimeError:  # a rank is gone: the next backward pass says so
            return None
        self._next = max(step + 1, flight.step + spacing(max(row[-1] for row in rows)))
        steps, self._last = flight.step - self._last, flight.step
        if self._world.rank != 0:
            return None
        columns: dict[str, Any] = {name: [round(row[index], 6) for row in rows] for index, name in enumerate(COLUMNS)}
        return Ranks(step=flight.step, steps=steps, columns=columns)


class _Flight:
    """One gather under way.

    Args:
        world: the ranks.
        step: that has ended.
        values: this rank's.
    """

    def __init__(self, world: World, step: int, values: list[float]) -> None:
        self.step: Final = step
        self._event: torch.cuda.Event | None = None
        self._work: Any = None
        mine = torch.tensor(values, dtype=torch.float64)
        if world.size == 1:
            self._all = [mine]
        elif dist.get_backend() == "nccl":
            self._all = [self._over_nccl(world, mine)]
        else:
            self._all = [torch.empty_like(mine) for _ in range(world.size)]
            self._work = dist.all_gather(self._all, mine, async_op=True)
            self._mine = mine  # until it is done

    def _over_nccl(self, world: World, mine: Tensor) -> Tensor:
        """In the stream, and from there into host memory that is valid after the event."""
        carried = mine.pin_memory().to(world.device, non_blocking=True)
        gathered = torch.empty((world.size, mine.numel()), dtype=mine.dtype, device=world.device)
        dist.all_gather_into_tensor(gathered, carried)
        aside = torch.empty(gathered.shape, dtype=mine.dtype, pin_memory=True).copy_(gathered, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        return aside

    def rows(self) -> list[list[float]]:
        """What each rank gave, by rank."""
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            self._event.synchronize()  # one step old
            return list(self._all[0].tolist())
        return [one.tolist() for one in self._all]
