"""Trainings with and without our wrapping, for `test_wrap`. Not a test."""

from __future__ import annotations

import hashlib
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from trainer.flag import Reader, Wish
from trainer.stopwatch import Stopwatch
from trainer.wire.window import PHASES
from trainer.wrap import ElasticDDP, wrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STOP_AT = 3
TURNS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination.

    Attributes:
        options: for DistributedDataParallel.
        compress: of gradients.
        accumulate: two microbatches a step, the first under no_sync.
        build: what to do to the module.
        after: what to do to the wrapped model.
        dtype: of everything.
        unused, norm, reentrant: of the network; reentrant None for no activation checkpointing.
    """

    options: dict[str, Any] | None = None
    compress: str = "none"
    accumulate: bool = False
    build: Callable[[nn.Module], nn.Module] = lambda module: module
    after: Callable[[Any], Any] = lambda model: model
    dtype: torch.dtype = torch.float32
    unused: bool = False
    norm: bool = False
    reentrant: bool | None = None
    sparse: bool = False
    of: Callable[[Tensor], Any] = lambda out: out
    use: Callable[[Any], Tensor] = lambda out: out


def _powersgd(model: Any) -> Any:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


CASES = {
    "plain": Case(),
    "unused parameters": Case(options={"find_unused_parameters": True}, unused=True),
    "none unused": Case(options={"find_unused_parameters": True}),
    "bucket view": Case(options={"gradient_as_bucket_view": True}),
    "accumulation": Case(accumulate=True),
    "accumulation, bucket view, unused": Case(accumulate=True, unused=True, options={"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "fp16": Case(compress="fp16"),
    "bf16": Case(compress="bf16"),
    "fp16, accumulation": Case(compress="fp16", accumulate=True),
    "PowerSGD": Case(after=_powersgd),
    "PowerSGD, accumulation": Case(after=_powersgd, accumulate=True),
    "activation checkpointing": Case(reentrant=False),
    "reentrant activation checkpointing": Case(reentrant=True),
    "activation checkpointing, accumulation": Case(reentrant=False, accumulate=True),
    "batch norm": Case(norm=True),
    "batch norm, buffers not broadcast": Case(norm=True, options={"forward_sync_buffers": False}),
    "bfloat16": Case(dtype=torch.bfloat16),
    "compiled module": Case(build=_compiled),
    "compiled module, accumulation": Case(build=_compiled, accumulate=True),
    "compiled model": Case(after=_compiled),
    "static graph": Case(options={"static_graph": True}),
    "static graph, unused": Case(options={"static_graph": True, "find_unused_parameters": True}, unused=True),
    "static graph, reentrant": Case(options={"static_graph": True}, reentrant=True),
    "one bucket a parameter": Case(options={"bucket_cap_mb": 0.0001}),
    "batched copies": Case(options={"batched_grad_copy": True}),
    "sparse gradients": Case(sparse=True),
    "loss of one of two outputs": Case(of=lambda out: {"aux": [out * 2], "logits": out}, use=lambda out: out["logits"]),
}


class Net(nn.Module):
    """Three layers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True) if case.sparse else None
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if case.norm else nn.Identity()
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        if case.unused:
            self.never = nn.Linear(3, 3)
        self._case = case

    def forward(self, x: Tensor) -> Any:
        if self.table is not None:
            x = x + self.table((x[:, 0].abs() * 3).long().clamp(max=9))
        x = self.norm(torch.relu(self.first(x)))
        x = self.middle(x) if self._case.reentrant is None else checkpoint(self.middle, x, use_reentrant=self._case.reentrant)
        return self._case.of(self.last(x))


def _hash(module: nn.Module) -> str:
    total = hashlib.sha256()
    for value in module.state_dict().values():
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _train(case: Case, *, ours: bool) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP takes rank 0's weights
    module = case.build(Net(case).to(case.dtype))
    said: list[bool | None] = []
    watch = Stopwatch()
    laps: list[dict[str, float]] = []
    step = 0
    inner: Any
    if ours:
        inner = wrap(module, lambda: Wish(stop=rank == world - 1 and step == STOP_AT), compress=case.compress, watch=watch, **(case.options or {}))
    else:
        inner = DistributedDataParallel(module, **(case.options or {}))
        if case.compress == "fp16":
            inner.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model = case.after(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(TURNS):
        watch.start()
        x = torch.randn(8 * world, 8, generator=torch.Generator().manual_seed(step))[8 * rank : 8 * rank + 8].to(case.dtype)
        parts = x.split(4) if case.accumulate else (x,)
        for index, part in enumerate(parts):
            with inner.no_sync() if index < len(parts) - 1 else nullcontext():
                (case.use(model(part)).float().square().mean() / len(parts)).backward()
        if ours:
            average = inner.flag.take()
            lap = watch.stop()
            laps.append({**dict(zip(PHASES, lap.spent, strict=True)), "seconds": lap.seconds})
            said.append(None if average is None else Reader(world, late=False).read([average]).stop)
        if not case.sparse:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()] + list(model.state_dict())
    return {"digest": _hash(module), "said": said, "names": names, "laps": laps}


def compare(folder: Path, *, name: str) -> dict[str, Any]:
    """The same training with plain DDP and with ours."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    case = CASES[name]
    theirs = None if case.compress == "bf16" else _train(case, ours=False)  # torch's own hook refuses bfloat16 over gloo
    return {"ours": _train(case, ours=True), "theirs": theirs}


def warm_up_leaves_no_trace(folder: Path) -> dict[str, Any]:
    """What of a model and of the generators is as before."""
    dist.init_process_group("gloo")

    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)
            self.called = 0

        def forward(self, x: Tensor) -> Tensor:
            self.called += 1
            out: Tensor = self.norm(self.linear(x))
            return out

    module = Loud()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), _hash(module))  # noqa: NPY002
    model = wrap(module, Wish)
    after = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), _hash(module))  # noqa: NPY002
    model(torch.randn(3, 2)).sum().backward()
    again = torch.ones(1)
    dist.all_reduce(again)
    return {
        "same": before == after,
        "called": module.called,
        "grads": [parameter.grad is not None for parameter in module.parameters()],
        "module": model.module is module,
        "training": module.training,
        "rebuilt": bool(model._has_rebuilt_buckets),
    }


def average_of_weights(folder: Path) -> dict[str, Any]:
    """AveragedModel copies the whole wrapped model, hook included."""
    dist.init_process_group("gloo")
    model = wrap(nn.Linear(2, 2), lambda: Wish(stop=True))
    averaged = AveragedModel(model.module)
    averaged(torch.ones(1, 2)).sum().backward()
    first = model.flag.take()
    model(torch.ones(1, 2)).sum().backward()
    averaged.update_parameters(model.module)
    return {"by the copy": first is not None, "by the model": model.flag.take() is not None, "type": isinstance(model, ElasticDDP)}
