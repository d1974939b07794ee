"""Where the time of a step goes: a clock that is in exactly one phase at any moment, so that the phases together are the whole step.

Owns: the clock, and the places in torch at which it changes its phase: a module's forward, autograd's engine, an optimizer's step. Must not: know what
a step is for, or what becomes of the numbers (`telemetry`).

**Own work and waiting for others.** DDP waits for its reductions in a callback that autograd's engine runs when the whole backward pass is done; DDP
queues it with the last bucket. The stop flag's node in the graph (`flag`) is the first to run in a pass, and queues ours before it: ours runs when the
last local gradient is there and nothing was waited for. It queues another, which runs after DDP's. What lies between is the wait, whoever called
backward, with one bucket or many, and compiled or not. DDP's broadcast of buffers before a forward pass is waiting, too.

On a GPU the host only launches work. There an event is recorded in the stream wherever the phase changes, and read when it has happened, one step
later or more; nothing waits for it. The host's times count where events cannot be had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trainer.wire.window import PHASES

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, SNAPSHOT, OTHER = range(len(PHASES))
MARKS_MAX: Final = 1024
"""Changes of phase that are marked on a device in one step; a step with more is timed by the host."""


class Lap(NamedTuple):
    """One step.

    Attributes:
        seconds: by the host.
        spent: of it in each of `PHASES`, by the host.
        device: the same by the device, to be asked later; None if only the host knows.
    """

    seconds: float
    spent: list[float]
    device: DeviceLap | None


class Stopwatch:
    """The clock. For one step at a time; every change of phase costs less than a microsecond on the host.

    Args:
        on: False for a clock that stands still and costs nothing.
        device: that the work is done on.

    Attributes:
        running: within a step.
        after_backward: called when a backward pass through a wrapped module is done and its gradients are reduced, if they are.
    """

    def __init__(self, *, on: bool = True, device: torch.device | None = None) -> None:
        self.on: Final = on
        self.running = False
        self.after_backward: Callable[[], None] | None = None
        self._marks = _Marks() if on and device is not None and device.type == "cuda" else None
        self._spent: list[float] = []
        self._began = self._since = 0.0
        self._at = self._base = OTHER
        self._closure = self._passing = False

    def start(self) -> None:
        """A step begins, with waiting for its data."""
        if not self.on:
            return
        self._spent = [0.0] * len(PHASES)
        self._at, self._base = DATA, OTHER
        self._closure = self._passing = False
        self.running = True
        if self._marks is not None:
            self._marks.begin(DATA)
        self._began = self._since = time.perf_counter()

    def stop(self) -> Lap:
        """The step has ended."""
        self.switch(OTHER)
        self.running = False
        return Lap(self._since - self._began, self._spent, self._marks.end() if self._marks is not None else None)

    def discard(self) -> None:
        """There was no step."""
        self.running = False

    def switch(self, phase: int) -> None:
        """From here on it is this phase."""
        if not self.running:
            return
        now = time.perf_counter()
        self._spent[self._at] += now - self._since
        self._since = now
        if self._marks is not None and phase != self._at:
            self._marks.mark(phase)
        self._at = phase

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """This phase, then the one before again."""
        before = self._at
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def forward(self) -> None:
        """A module's forward begins."""
        self.switch(FORWARD)

    def forward_done(self) -> None:
        """It has ended; recomputed within a backward pass, that goes on."""
        self.switch(BACKWARD if self._passing else self._base)

    def backward(self) -> None:
        """Somebody calls backward."""
        self.switch(BACKWARD)

    def backward_done(self) -> None:
        """It has returned. If a wrapped module took part, that is known already."""
        if self._at == BACKWARD:
            self._own_again()

    def pass_begins(self) -> None:
        """Called within a backward pass, before any gradient of a parameter is there."""
        if not self.running or self._passing:
            return
        self._passing = True
        self.switch(BACKWARD)
        _queue(self._own_work_done)

    def attend(self, optimizer: torch.optim.Optimizer) -> None:
        """Time the steps of this one."""
        if self.on:
            optimizer.register_step_pre_hook(self._optimizer_begins)
            optimizer.register_step_post_hook(self._optimizer_done)

    def _own_work_done(self) -> None:
        self.switch(COMMUNICATION)
        _queue(self._pass_done)

    def _pass_done(self) -> None:
        self._passing = False
        self._own_again()
        if self.running and self.after_backward is not None:
            self.after_backward()

    def _own_again(self) -> None:
        if self._closure:
            self._base = OPTIMIZER
        self.switch(self._base)

    def _optimizer_begins(self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With a closure, forward and backward come within the optimizer's step, and what is the optimizer's own is what comes after them.
        self._closure = any(callable(one) for one in (*args[1:], kwargs.get("closure")))
        self._base = OTHER if self._closure else OPTIMIZER
        self.switch(self._base)

    def _optimizer_done(self, *_: object) -> None:
        self._closure = False
        self._base = OTHER
        self.switch(OTHER)


OFF: Final = Stopwatch(on=False)
"""One that never runs, for whoever must have one."""


def _queue(callback: Callable[[], None]) -> None:
    """Have it called when the backward pass under way is done, after those queued before."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - as DDP and FSDP do it


class Begins:
    """A hook before a module's forward, that tells a clock. A copy of the module gets one that does nothing.

    Args:
        watch: to tell; None for nobody.
        phase: that begins.
    """

    def __init__(self, watch: Stopwatch | None, phase: int) -> None:
        self._watch = watch
        self._phase = phase

    def __deepcopy__(self, _memo: object) -> Begins:
        return Begins(None, self._phase)

    def __reduce__(self) -> tuple[type[Begins], tuple[None, int]]:
        return Begins, (None, self._phase)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        """From here on it is that phase."""
        if self._watch is not None:
            self._watch.switch(self._phase)


def watch_forward(watch: Stopwatch, model: DistributedDataParallel) -> None:
    """Tell the clock when a forward pass of this model begins. That it ends is told by the flag's hook."""
    if not watch.on:
        return
    model.module.register_forward_pre_hook(Begins(watch, FORWARD))
    # A model with buffers gets rank 0's before each forward pass, and waits for them.
    if model.forward_sync_buffers and next(model.module.buffers(), None) is not None:
        model.register_forward_pre_hook(Begins(watch, COMMUNICATION))


class _Marks:
    """Events of the step under way on a CUDA device, taken from those of steps that were read."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._lap: list[tuple[int, torch.cuda.Event]] = []
        self._whole = True

    def begin(self, phase: int) -> None:
        self._free += [event for _, event in self._lap]  # of a step that there was not
        self._lap = []
        self._whole = True
        self.mark(phase)

    def mark(self, phase: int) -> None:
        if not self._whole or len(self._lap) >= MARKS_MAX or torch.cuda.is_current_stream_capturing():
            self._whole = False
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        # In callbacks of autograd's engine the current streams are those of whoever called backward, and wait for the pass's own.
        event.record()
        self._lap.append((phase, event))

    def end(self) -> DeviceLap | None:
        if self._whole:
            self.mark(OTHER)
        if not self._whole:
            return None
        lap, self._lap = DeviceLap(self._lap, self._free), []
        return lap


class DeviceLap:
    """A step as the device did it. Ask `done`, then `read` once.

    Args:
        marks: phases and the events at which they began; the last one is the end.
        free: where the events go when they are read.
    """

    def __init__(self, marks: list[tuple[int, torch.cuda.Event]], free: list[torch.cuda.Event]) -> None:
        self._marks = marks
        self._free = free

    @property
    def done(self) -> bool:
        """Whether the device has come to the end of the step."""
        return bool(self._marks[-1][1].query())

    def wait(self) -> None:
        """Until it has."""
        self._marks[-1][1].synchronize()

    def read(self) -> tuple[float, list[float]]:
        """Seconds of the step, and of each phase."""
        spent = [0.0] * len(PHASES)
        for (phase, began), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            spent[phase] += began.elapsed_time(ended) / 1000.0
        self._free += [event for _, event in self._marks]
        return sum(spent), spent
