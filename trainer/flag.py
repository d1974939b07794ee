"""How all ranks come to act at the same step: four numbers that ride in DDP's gradient bucket.

Owns: the flag parameter, fastening it to a module's output, reading what all ranks together said, and the signals that raise it. Must not: act on
what was said, or know snapshots and agents.

A rank that was told to stop cannot just stop: the others would wait for it in their next all-reduce. So every rank says in each step what it wants,
and all read the sum at the same place. A collective of its own for that costs 3 % of a 20 ms step, one more parameter in a bucket that is reduced
anyway costs nothing that we could measure.

The parameter is in the module only while DDP is made, so no optimizer, no clipping and no state_dict ever sees it; DDP's reducer keeps it. A forward
hook passes the module's outputs through `_Attach`, whose backward gives the flag's gradient: what this rank wants. Averaged over W ranks, one rank's 1
is 1/W, also in 16 bits; whatever is above half of that counts, which leaves room for the rounding of compressing hooks. Microbatches add up: that is
more than 1, and means the same.

On a GPU, reading at once would wait for the backward pass. There the values are copied aside, and read one step later, on all ranks alike.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, MutableMapping
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainer.errors import SetupError
from trainer.stopwatch import OFF, Stopwatch

NAME: Final = "elasticd_flag"
"""What the parameter is called in its module, while it is there."""
SIZE: Final = 4
SAME_SECONDS: Final = 1.0
"""A second SIGTERM that comes so soon is the first one, told twice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What one rank wants, or all together.

    Attributes:
        stop: snapshot and end.
        checkpoint: snapshot, and have it written to disk.
        snapshot: snapshot; rank 0 alone decides it.
        unready: no snapshot yet, but for a stop: this rank has no buffers to take one with.
    """

    stop: bool = False
    checkpoint: bool = False
    snapshot: bool = False
    unready: bool = False

    @property
    def values(self) -> tuple[int, ...]:
        """As numbers, `SIZE` of them."""
        return int(self.stop), int(self.checkpoint), int(self.snapshot), int(self.unready)

    @classmethod
    def of(cls, values: Iterable[float]) -> Wish:
        """The other way: what is above a half is yes."""
        stop, checkpoint, snapshot, unready = (value >= 0.5 for value in values)
        return cls(stop=stop, checkpoint=checkpoint, snapshot=snapshot, unready=unready)

    def __or__(self, other: Wish) -> Wish:
        return Wish.of(map(max, self.values, other.values))


NOTHING: Final = Wish()


class Flag:
    """The flag of one wrapped module.

    Args:
        like: a parameter of it; the flag has its dtype and device.
        wish: asked in each backward pass for what this rank wants.
        watch: told where forward passes end and backward passes begin.
    """

    def __init__(self, like: Tensor, wish: Callable[[], Wish], watch: Stopwatch = OFF) -> None:
        self.parameter: Final = nn.Parameter(torch.zeros(SIZE, dtype=like.dtype, device=like.device))
        self.watch: Final = watch
        self._wish = wish
        self._said: dict[Wish, Tensor] = {}
        self._last = (NOTHING, self._as_tensor(NOTHING))

    def gradient(self) -> Tensor:
        """What this rank wants now, shape (4,): not to be changed."""
        wish = self._wish()
        last, value = self._last
        if wish is not last:  # most often it is; a hash would cost more than all the rest
            value = self._as_tensor(wish)
            self._last = (wish, value)
        return value

    def _as_tensor(self, wish: Wish) -> Tensor:
        if wish not in self._said:
            self._said[wish] = torch.tensor(wish.values, dtype=self.parameter.dtype, device=self.parameter.device)
        return self._said[wish]

    def take(self) -> Tensor | None:
        """The average over all ranks, shape (4,), if there was a backward pass since the last call; None if not."""
        value = self.parameter.grad
        self.parameter.grad = None
        return value


class Reader:
    """Reads what all ranks said in a step: at once, or one step late where reading at once would wait for a device.

    Args:
        world_size: of the group that the average is over.
        late: one step late.
    """

    def __init__(self, world_size: int, *, late: bool) -> None:
        self.late: Final = late
        self._world_size = world_size
        self._waiting: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._deaf = False

    def read(self, averages: Iterable[Tensor]) -> Wish:
        """What is agreed on, given the averages of this step, one for each wrapped module that had a backward pass."""
        if not self.late:
            return self._said([value.tolist() for value in averages])
        ready, self._waiting = self._waiting, [_aside(value) for value in averages]
        for _, event in ready:
            if event is not None:
                event.synchronize()
        said = self._said([value.tolist() for value, _ in ready])
        if self._deaf:
            said = Wish(stop=said.stop, unready=said.unready)
            self._deaf = False
        return said

    def served(self) -> None:
        """All ranks have just made a snapshot: what was said before it, and is not read yet, is done too."""
        self._deaf = self.late and bool(self._waiting)

    def _said(self, averages: list[list[float]]) -> Wish:
        if not any(map(any, averages)):  # most often; NaN is something
            return NOTHING
        said = NOTHING
        for average in averages:
            said |= Wish.of(value * self._world_size for value in average)
        return said


def _aside(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy in host memory that is there once the event has happened."""
    if value.device.type != "cuda":
        return value.clone(), None
    copy = torch.empty(SIZE, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event


class _Attach(torch.autograd.Function):
    """The identity for any number of tensors; its backward also gives the flag its gradient, whichever of them the loss was made of."""

    # No setup_context: with one, torch looks at the signature in each call, for a quarter of a millisecond.
    @staticmethod
    def forward(ctx: Any, _parameter: Tensor, flag: Flag, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flag = flag
        ctx.set_materialize_grads(False)
        # detach, not view_as: the loss may be computed in place, which autograd refuses for several views of one function.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.flag.watch.pass_begins()
        return (ctx.flag.gradient(), None, *grads)


class Hook:
    """The forward hook that fastens a flag to a module's output. A copy of the module (an average of its weights, say) gets one that does nothing."""

    def __init__(self, flag: Flag | None) -> None:
        self._flag = flag

    def __deepcopy__(self, _memo: object) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)

    # What a flag says changes from step to step, and a compiler would take it for a constant.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, _inputs: object, output: Any) -> Any:
        """The output as it was, but with the flag behind it. Not within torch.func's transforms, whose gradients are none that ranks share."""
        if self._flag is not None:
            self._flag.watch.forward_done()
        if self._flag is None or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # noqa: SLF001
            return output
        return attach(self._flag, output, of=type(module).__name__)


def attach(flag: Flag, output: Any, *, of: str) -> Any:
    """Fasten a flag to every tensor in an output that gradients flow through.

    Args:
        flag: whose gradient comes with theirs.
        output: a tensor, or tensors in lists, tuples, dicts and dataclasses, nested. Dicts of a class of their own and dataclasses are changed in place.
        of: what made it, for the message.

    Raises:
        SetupError: there is no tensor in it that we could find.
    """
    if isinstance(output, Tensor):
        return _attach(flag, output)[0] if output.requires_grad else output
    found: list[Tensor] = []
    _map(output, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    if not found:
        raise SetupError(
            f"{of} returns a {type(output).__qualname__} in which no tensor is to be found",
            remedy="return a tensor, or tensors in tuples, lists, dicts or dataclasses: the stop flag rides with their gradients",
        )
    differentiable = {id(tensor): tensor for tensor in found if tensor.requires_grad}
    if not differentiable:
        return output
    replaced = dict(zip(differentiable, _attach(flag, *differentiable.values()), strict=True))
    return _map(output, lambda tensor: replaced.get(id(tensor), tensor))


_apply = super(torch.autograd.Function, _Attach).apply
"""`_Attach.apply` without its care for torch.func's transforms, which costs it a third, and which `Hook` has seen to."""


def _attach(flag: Flag, *tensors: Tensor) -> tuple[Tensor, ...]:
    attached: tuple[Tensor, ...] = _apply(flag.parameter, flag, *tensors)  # type: ignore[no-untyped-call]
    return attached


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        for key in list(value):
            value[key] = _map(value[key], change)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_dataclass(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    changed = {item.name: _map(getattr(value, item.name), change) for item in dataclasses.fields(value)}
    if value.__dataclass_params__.frozen:
        return dataclasses.replace(value, **{item.name: changed[item.name] for item in dataclasses.fields(value) if item.init})
    for name, item in changed.items():
        setattr(value, name, item)
    return value


class Signals:
    """SIGTERM and SIGUSR1, heard: `stop` and `checkpoint` become true. What handled them before is called as well, if it is Python's.

    Another SIGTERM ends the process at once, unless it comes within a second of the first: a service manager tells a whole process group, and torchrun
    in it tells its workers once more. Use it from the main thread. Whoever is forked afterwards is not concerned.
    """

    def __init__(self) -> None:
        self.stop = False
        self.checkpoint = False
        self._stopped_at = 0.0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; once more, if somebody has put handlers in the place of ours. Off the main thread, where Python allows none, nothing is heard."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            try:
                before = signal.signal(number, self._heard)
            except ValueError:
                return
            if before != self._heard:
                self._before.setdefault(number, before)

    def close(self) -> None:
        """Put the handlers from before back."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        if number == signal.SIGTERM:
            self._terminate()
        else:
            self.checkpoint = True
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _terminate(self) -> None:
        now = time.monotonic()
        if self.stop and now - self._stopped_at > SAME_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(self._pid, signal.SIGTERM)
        elif not self.stop:
            self.stop = True
            self._stopped_at = now
