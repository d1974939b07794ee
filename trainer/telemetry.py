"""What a session tells of its steps: where their time went, what the script said of them, how much memory it takes; once a second, to whoever keeps.

Owns: what belongs to the step under way, the windows, and sending them. Must not: make a step wait, for a device, a socket or another rank; change
anything that training depends on; or judge what it finds.

A step lasts from asking for its data to the end of what the session does after it. What a body does after `stepped`, an evaluation say, is no step.
On a GPU a step is known one or more steps later, when its events have happened and its values are in host memory; windows are made of those.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from trainer.compare import Comparison
from trainer.data import Step
from trainer.errors import SetupError
from trainer.keeper import Keeper
from trainer.norms import Norms
from trainer.stopwatch import OTHER, DeviceLap, Stopwatch
from trainer.tally import LARGEST, Stepped, Tallies
from trainer.wire.channel import Telemetry as TelemetryMessage
from trainer.wire.window import NAME_MAX, VALUES_MAX
from trainer.world import World
from trainer.wrap import ElasticDDP

LATE_MAX: Final = 64
"""Steps that may wait for their device; if it is further behind, the oldest is waited for."""
PENDING_MAX: Final = 256
"""Steps that wait to be added up."""
END_SECONDS: Final = 1.0
"""How long the last window may wait for room in the socket."""
_STATM: Final = "/proc/self/statm"
log = logging.getLogger("trainer")


class Telemetry:
    """See the module. All methods cost next to nothing where the setting `telemetry` is off.

    Args:
        world: the ranks.
        keeper: who is told.

    Attributes:
        watch: times the step.
    """

    def __init__(self, world: World, keeper: Keeper) -> None:
        settings = keeper.settings
        self.on: Final = settings.telemetry
        self.watch: Final = Stopwatch(on=self.on, device=world.device)
        self._world = world
        self._keeper = keeper
        self._every: Final = settings.telemetry_every_s
        self._comparison = Comparison(world)
        # One rank is enough: reduced gradients are the same on all, and what it costs, all wait for.
        self._norms = Norms(world.device) if self.on and world.rank == 0 else None
        if self._norms is not None:
            self.watch.after_backward = self._norms.look
        self._scaler: Any = None
        self._one: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._number = 0  # of the step that is counted and has not ended
        self._step: Step | None = None
        self._share = 0.0
        self._loss: float | Tensor | None = None
        self._values: list[tuple[str, float]] = []
        self._on_device: list[tuple[str, Tensor]] = []
        self._late: deque[_Late] = deque()
        self._pending: list[Stepped] = []
        self._began = 0.0  # the window that is open, or the first of those pending
        self._open: Tallies | None = None
        self._dropped = 0
        self._warned = False

    # --- what there is -----------------------------------------------------------------------------------------------------

    def models(self, models: Iterable[ElasticDDP]) -> None:
        """These are the wrapped models."""
        if self._norms is not None:
            self._norms.models = tuple(models)

    def parts(self, parts: Mapping[str, object]) -> None:
        """These were registered: optimizers are timed, and what a scaler does to losses is undone."""
        if not self.on:
            return
        for part in parts.values():
            if isinstance(part, torch.optim.Optimizer):
                self.watch.attend(part)
                self._optimizer = self._optimizer or part
            elif isinstance(part, torch.amp.GradScaler):
                self._scaler = part
                if self._norms is not None:
                    self._norms.unscale = self._unscaled

    def begin(self, step: int, *, compare: bool) -> None:
        """Steps follow after this one; `compare`: and rank 0 wants those of all ranks, which all ranks know alike."""
        if compare:
            self._comparison.begin(step)

    # --- the step under way ------------------------------------------------------------------------------------------------

    def fetched(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield them; a step begins where the next one is asked for."""
        source = iter(steps)
        while True:
            self.watch.start()
            step = next(source, None)
            if step is None:
                self.watch.discard()
                return
            self.watch.switch(OTHER)
            self._loss = None
            self._step = step
            self._share = sum(microbatch.weight for microbatch in step.microbatches)
            yield step

    def observe(self, loss: Tensor, weight: float, *, scaled: bool = False) -> None:
        """A mean loss over a microbatch with this weight, before it is weighed; `scaled`: by the scaler, if there is one."""
        if not self.watch.running or weight == 0.0 or loss.numel() != 1:
            return
        value = loss.detach()
        if scaled and self._scaler is not None:
            value = self._unscaled(value)
        if value.device.type == "cpu":
            part: float | Tensor = weight * value.item()
        else:
            part = weight * value.reshape(()).float()
        self._loss = part if self._loss is None else self._loss + part

    def log(self, values: Mapping[str, object]) -> None:
        """See `Session.log`."""
        if not self.on:
            return
        for name, value in values.items():
            if not name.isidentifier() or len(name) > NAME_MAX:
                raise SetupError(f"log({name[:80]}=…): that is no name", remedy=f"give letters, digits and _, {NAME_MAX} at most")
            if len(self._values) + len(self._on_device) >= 4 * VALUES_MAX:
                self._too_many()
                return
            self._note(name, value)

    def count(self, number: int) -> None:
        """The step under way is this one, and is done; what still belongs to it follows until `end`."""
        if self.on:
            self._number = number

    def end(self) -> None:
        """It has ended. Without a `count` before there was none."""
        number, self._number = self._number, 0
        if not number:
            self.watch.discard()
            self._loss = None
            return
        self._take_own()
        names, aside = self._take_aside()
        lap = self.watch.stop()
        step, self._step = self._step, None
        stepped = Stepped(
            number=number,
            ended=time.time(),
            seconds=lap.seconds,
            spent=lap.spent,
            samples=sum(microbatch.samples for microbatch in step.microbatches) if step is not None else 0,
            batches=len(step.microbatches) if step is not None else 0,
            values=self._values,
        )
        self._values = []
        if lap.device is None and aside is None:
            self._add(stepped)
        else:
            self._late.append(_Late(stepped, lap.device, names, aside))
            self._catch_up(len(self._late) - LATE_MAX)

    def compare(self, step: int) -> None:
        """All ranks are at the end of this step, and go on. Collective."""
        if self._comparison.begins_at(step):
            self._add_up()
        ranks = self._comparison.turn(step)
        if ranks is not None and self.on:
            self._keeper.tell(ranks)

    def close(self) -> None:
        """No step follows: say what is not said yet."""
        self.end()
        self._catch_up(len(self._late))
        self._add_up()
        if self._open is not None:
            self._open.note(self._values)
            self._send(wait=END_SECONDS)

    # --- values ------------------------------------------------------------------------------------------------------------

    def _note(self, name: str, value: object) -> None:
        if name == "grad_norm" and self._norms is not None:
            self._norms.known()
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise SetupError(f"log({name}=…): a tensor of shape {tuple(value.shape)} is no number", remedy="give its mean, or what else says it")
            value = value.detach()
            if value.device.type != "cpu":
                self._on_device.append((name, value.reshape(()).to(torch.float32, copy=True)))
                return
        self._values.append((name, _number(name, value)))

    def _take_own(self) -> None:
        """Loss and norm, where the script has not said them; before all else, which must not crowd them out."""
        norm = self._norms.take() if self._norms is not None else None
        if norm is not None:
            self._first("grad_norm", norm)
        loss, self._loss = self._loss, None
        if loss is not None and self._share and not any(name == "loss" for name, _ in (*self._values, *self._on_device)):
            self._first("loss", loss / self._share)

    def _first(self, name: str, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self._on_device.insert(0, (name, value))
        else:
            self._values.insert(0, (name, value))

    def _take_aside(self) -> tuple[list[str], Tensor | None]:
        """Names, and a copy in host memory of the values on the device, valid when the step's end has come there."""
        if not self._on_device:
            return [], None
        names = [name for name, _ in self._on_device]
        with torch.no_grad():
            stacked = torch.stack([value.to(self._world.device) for _, value in self._on_device])
        self._on_device = []
        pinned = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.device.type == "cuda")
        return names, pinned.copy_(stacked, non_blocking=True)

    def _unscaled(self, value: Tensor) -> Tensor:
        if self._one is None or self._one.device != value.device:
            self._one = torch.ones((), device=value.device)
        unscaled: Tensor = value / self._scaler.scale(self._one)
        return unscaled

    def _too_many(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("run.log was given more than %d values in one step: the rest is left out", 4 * VALUES_MAX)

    # --- windows -----------------------------------------------------------------------------------------------------------

    def _catch_up(self, at_least: int) -> None:
        """Take in the steps whose device is done; wait for as many as `at_least`."""
        while self._late:
            late = self._late[0]
            if at_least > 0:
                late.wait()
            elif not late.done:
                return
            at_least -= 1
            self._late.popleft()
            self._add(late.read())

    def _add(self, step: Stepped) -> None:
        """Between two steps caches are cold, and adding up costs several times what it does when it is done for many steps at once."""
        if not self._pending and self._open is None:
            self._began = max(0.0, step.ended - step.seconds)
        self._pending.append(step)
        if self._norms is not None:
            self._norms.earn(step.seconds)
        if abs(step.ended - self._began) >= self._every:  # the clock may have been set back
            self._send()
        elif len(self._pending) >= PENDING_MAX:
            self._add_up()

    def _add_up(self) -> None:
        for step in self._pending:
            self._comparison.add(step.seconds, step.spent)
            if self._open is None:
                self._open = Tallies(self._world.rank, self._keeper.generation, step)
            else:
                self._open.add(step)
        self._pending.clear()

    def _send(self, *, wait: float = 0.0) -> None:
        self._add_up()
        assert self._open is not None
        made, self._open = self._open, None
        if "lr" not in made.names:
            made.note(_rate(self._optimizer))
        window = made.window(memory=memory(self._world.device), dropped=self._dropped)
        sent = self._keeper.tell(TelemetryMessage(window=window.as_dict()), wait=wait)
        self._dropped = 0 if sent else self._dropped + 1


class _Late:
    """A step that its device has not come to the end of."""

    def __init__(self, stepped: Stepped, device: DeviceLap | None, names: list[str], aside: Tensor | None) -> None:
        self._stepped = stepped
        self._device = device
        self._names = names
        self._aside = aside
        self._event: torch.cuda.Event | None = None
        if device is None and aside is not None and aside.is_pinned():
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def done(self) -> bool:
        if self._device is not None:
            return self._device.done
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._device is not None:
            self._device.wait()
        elif self._event is not None:
            self._event.synchronize()

    def read(self) -> Stepped:
        """It with the device's times and values."""
        if self._device is not None:
            self._stepped.seconds, self._stepped.spent = self._device.read()
        if self._aside is not None:
            self._stepped.values = [*zip(self._names, self._aside.tolist(), strict=True), *self._stepped.values]
        return self._stepped


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that this process takes: "rss", and on a GPU what torch's allocator has: "allocated", "reserved", "peak" (of allocated, since the start)."""
    found = {}
    try:
        with open(_STATM, "rb") as file:  # noqa: PTH123 - half as long as by Path
            found["rss"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no /proc
        pass
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        found["allocated"] = int(stats.get("allocated_bytes.all.current", 0))
        found["reserved"] = int(stats.get("reserved_bytes.all.current", 0))
        found["peak"] = int(stats.get("allocated_bytes.all.peak", 0))
    return found


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf
    except (TypeError, ValueError):
        raise SetupError(f"log({name}=…): {value!r:.80} is no number", remedy="give a number, or a tensor of one") from None


def _rate(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, float]]:
    """The learning rate, if it can be had without asking a device."""
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None and optimizer.param_groups else None
    if isinstance(rate, Tensor):
        rate = rate.item() if rate.device.type == "cpu" and rate.numel() == 1 else None
    return [("lr", float(rate))] if isinstance(rate, int | float) and abs(rate) <= LARGEST else []
