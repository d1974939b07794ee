"""DistributedDataParallel with the stop flag in its gradient bucket, and the same buckets from the first step on.

Owns: making it, the combinations of options that it refuses, and its warm-up. Must not: know snapshots, agents or the data.

Why a warm-up. DDP lays gradients into buckets by the order of registration, and lays them anew after the first backward pass, by the order in which
they arrived. The order of summation changes with that, so with three ranks or more a resumed run, whose first step has the first buckets, differs in
the last bit from one that was never interrupted. So every run, new or resumed, first makes one backward pass of zeros, over all parameters in the
order that DDP assumes itself, the last registered first; the buckets of every real step are those that follow from it. The module is not called for
that: random numbers, running statistics and whatever else a forward pass changes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import SetupError
from trainer.flag import NAME, Flag, Hook, Wish
from trainer.stopwatch import OFF, Stopwatch, watch_forward

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
REFUSED: Final[Mapping[str, str]] = {
    "process_group": "all ranks must agree on when to stop, so the gradients of a step must reach them all",
    "device_mesh": "all ranks must agree on when to stop, so the gradients of a step must reach them all",
    "delay_all_reduce_named_params": "the stop flag rides in the buckets that this takes apart",
    "param_to_hook_all_reduce": "the stop flag rides in the buckets that this takes apart",
    "mixed_precision": "it has no place for the stop flag, and crashes on a CPU; use torch.autocast",
}


class ElasticDDP(DistributedDataParallel):
    """What `wrap` makes. `flag` is the module's stop flag."""

    flag: Flag


def wrap(module: nn.Module, wish: Callable[[], Wish], *, compress: str = "none", warm_up: bool = True, watch: Stopwatch = OFF, **options: Any) -> ElasticDDP:
    """Make it. Collective: all ranks call it alike.

    Args:
        module: on its device already; not wrapped yet.
        wish: asked in each backward pass for what this rank wants.
        compress: "fp16" or "bf16" to send gradients in that type, "none" as they are.
        warm_up: begin with a backward pass of zeros. Left out all the same where it cannot be made: with static_graph, find_unused_parameters (whose
            buckets never change) and gradients that are sparse.
        watch: told of forward and backward passes.
        options: DistributedDataParallel's.

    Raises:
        SetupError: an option or the module is one that would crash or hang later; the message says why.
    """
    _check(module, options)
    first = next(parameter for parameter in module.parameters() if parameter.requires_grad)
    flag = Flag(first, wish, watch)
    with _carried(module, flag):
        model = ElasticDDP(module, **options)
    model.flag = flag
    watch_forward(watch, model)
    module.register_forward_hook(Hook(flag))
    if compress != "none":
        model.register_comm_hook(DTYPES[compress], compressed)
    if warm_up and _can_warm_up(model):
        _warm_up(model)
    return model


def compressed(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook: average in another type. torch's own refuses bfloat16 over gloo, which carries it."""
    buffer = bucket.buffer()
    small = buffer.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None

    def widen(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        reduced: Tensor = buffer.copy_(done.value()[0])
        return reduced

    averaged: torch.futures.Future[Tensor] = work.get_future().then(widen)
    return averaged


compressed.__annotations__.clear()  # DDP compares them with types, and here they are text


def _check(module: nn.Module, options: Mapping[str, Any]) -> None:
    for name, why in REFUSED.items():
        if options.get(name) is not None:
            raise SetupError(f"wrap(…, {name}=…) cannot work: {why}", remedy="leave it out")
    if isinstance(module, DistributedDataParallel):
        raise SetupError("the module is wrapped in DistributedDataParallel already", remedy="give the module itself: wrap does that")
    if isinstance(module, torch.jit.ScriptModule):
        raise SetupError("a TorchScript module cannot carry the stop flag", remedy="wrap the module itself, and torch.compile it if it is to be fast")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SetupError("no parameter of the module requires a gradient, so there is nothing to train", remedy="use the module as it is")
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise SetupError(f"the module's parameters lie on {names}", remedy="move it to one device (run.device) first")


@contextmanager
def _carried(module: nn.Module, flag: Flag) -> Iterator[None]:
    """The flag is a parameter of the module, for as long as DDP looks."""
    module.register_parameter(NAME, flag.parameter)
    try:
        yield
    finally:
        del module._parameters[NAME]  # noqa: SLF001 - delattr would ask the module's own __delattr__


def _can_warm_up(model: ElasticDDP) -> bool:
    sparse = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in model.module.modules())
    return not (sparse or model.static_graph or model.find_unused_parameters)


def _warm_up(model: ElasticDDP) -> None:
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    module, model._modules["module"] = model.module, _Zero([*parameters, model.flag.parameter])  # noqa: SLF001 - `model.module = …` would look at it
    model.require_forward_param_sync = False  # the module's buffers are none of this pass's business
    try:
        model(torch.zeros(())).backward()
    finally:
        model._modules["module"] = module  # noqa: SLF001
    for parameter in [*parameters, model.flag.parameter]:
        parameter.grad = None


class _Zero(nn.Module):
    """Gives the sum of its parameters: autograd runs what was made last first, so the last parameter's gradient arrives first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._all = tuple(parameters)  # a tuple, so that they are not registered

    def forward(self, _nothing: Tensor) -> Tensor:
        total = torch.zeros((), device=self._all[0].device)
        for parameter in self._all:
            total = total + 0.0 * parameter.sum().float().real
        return total
