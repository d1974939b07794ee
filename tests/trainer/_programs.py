"""What the ranks of test worlds run: small trainings, and one function for each thing to be seen. Not a test."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import trainer
from tests.support.worlds import note
from trainer import Session, Settings


class Points(Dataset[tuple[Tensor, Tensor]]):
    """A made-up classification, the same each time: `count` points in 8 dimensions, 4 classes."""

    def __init__(self, count: int = 200, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x[:, :2] > 0).long() @ torch.tensor([1, 2])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Net(nn.Module):
    """Two layers, with dropout and a batch norm if wanted."""

    def __init__(self, *, dropout: float = 0.2, norm: bool = False, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.relu(self.norm(self.first(x)))))
        return out


def digest(module: nn.Module) -> str:
    """Of all its parameters and buffers."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(name.encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def settings(folder: Path, **values: Any) -> Settings:
    """Checkpoints below `folder`, none by the clock."""
    return Settings(checkpoint_dir=folder / "checkpoints", **{"checkpoint_every_s": 0, **values})


def setup(run: Session, *, wrap: dict[str, Any] | None = None, **net: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler, registered."""
    torch.manual_seed(0)
    model = run.wrap(Net(**net), **(wrap or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    return model, optimizer, scheduler


def train(
    folder: Path,
    *,
    max_steps: int,
    batch_size: int = 24,
    microbatch: int | None = None,
    step_seconds: float = 0.0,
    poll_after: int | None = None,
    die_in_step: int = 0,
    workers: int = 0,
    sets: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole training, by `accumulate`; notes each step."""
    run = trainer.join(seed=3, settings=settings(folder, **(sets or {})))
    model, optimizer, scheduler = setup(run, **(net or {}))
    loader = run.loader(Points(), batch_size=batch_size, microbatch=microbatch, workers=workers)
    note(folder, begun=run.step, epoch=run.epoch)
    losses: dict[int, float] = {}
    for turn in run.accumulate(loader, max_steps=max_steps):
        optimizer.zero_grad()
        total = 0.0
        for microbatch_ in turn:
            x, y = microbatch_.batch
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            total += float(loss.detach()) * microbatch_.weight
            if run.step + 1 == die_in_step:
                note(folder, dying=True)
                time.sleep(60)
        optimizer.step()
        scheduler.step()
        losses[run.step + 1] = run.total(total)[0]
        note(folder, step=run.step + 1, epoch=turn.epoch, offset=turn.offset)
        time.sleep(step_seconds)
        if run.step + 1 == poll_after:
            run.stepped()
            note(folder, polling=True)
            while True:
                run.poll()
                time.sleep(0.01)
    return {"losses": losses, "digest": digest(model.module), "step": run.step, "generation": run.generation, "lr": scheduler.get_last_lr()}


def plain(folder: Path, *, sets: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """The loop as most write it, by `steps`, with `loss.backward()` or what `how` says."""
    run = trainer.join(seed=3, settings=settings(folder, **(sets or {})))
    model, optimizer, _ = setup(run, dropout=0.0, wrap=how.get("wrap"))
    loader = run.loader(Points(how.get("samples", 200) if run.rank != how.get("odd") else 100), batch_size=how.get("batch_size", 24))
    steps = run.accumulate if how.get("accumulate") else run.steps
    seen = []
    for x, y in steps(loader, **{name: how[name] for name in ("epochs", "max_steps") if name in how}):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if how.get("weighed"):
            run.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        seen.append(len(x))
        if len(seen) == how.get("leave_after"):
            break
    run.finish()
    return {"seen": seen, "step": run.step, "epoch": run.epoch, "digest": digest(model.module), "offset": loader.offset}


def unregistered(folder: Path) -> None:
    """Wraps a model, and registers another."""
    run = trainer.join(settings=settings(folder))
    run.wrap(Net())
    run.register(other=nn.Linear(1, 1))
    next(run.steps(run.loader(Points(), batch_size=8)))


def less_registered(folder: Path) -> None:
    """Goes on with a model alone."""
    run = trainer.join(seed=3, settings=settings(folder))
    run.register(model=run.wrap(Net()))
    next(run.steps(run.loader(Points(), batch_size=24)))


def registered_late(folder: Path) -> None:
    """Registers within the loop."""
    run = trainer.join(settings=settings(folder))
    run.register(model=run.wrap(Net()))
    for _ in run.steps(run.loader(Points(), batch_size=8)):
        run.register(late=nn.Linear(1, 1))


def diverged(folder: Path) -> None:
    """Rank 1 changes a weight after it has taken the state over."""
    run = trainer.join(seed=3, settings=settings(folder))
    model, _, _ = setup(run)
    if run.rank == 1:
        with torch.no_grad():
            model.module.last.weight[0, 0] += 1e-3
    next(run.accumulate(run.loader(Points(), batch_size=24)))


def given_group(folder: Path) -> dict[str, Any]:
    """A script that makes the process group itself, and trains in the nested form."""
    dist.init_process_group("gloo")
    run = trainer.join(seed=3, settings=settings(folder))
    model, optimizer, _ = setup(run)
    loader = run.loader(Points(), batch_size=50)
    epochs = []
    for epoch in range(run.epoch, 3):
        for x, y in run.steps(loader):
            optimizer.zero_grad()
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            epochs.append(epoch)
    run.finish()
    dist.destroy_process_group()
    return {"epochs": epochs, "step": run.step}


def stuck(folder: Path) -> None:
    """Takes for ever over its second step, without a word to the interpreter's signal handling being lost."""
    run = trainer.join(settings=settings(folder))
    model, optimizer, _ = setup(run)
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=9):
        run.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        note(folder, step=run.step + 1, pid=os.getpid())
        while run.step == 1:
            time.sleep(0.01)


def wait_before_the_first_step(folder: Path) -> None:
    """Registers, and polls for ever."""
    run = trainer.join(seed=3, settings=settings(folder))
    setup(run)
    note(folder, polling=True)
    while True:
        run.poll()
        time.sleep(0.01)


def thaw(folder: Path) -> None:
    """The last bias is trained from step 5 on."""
    run = trainer.join(seed=3, settings=settings(folder))
    model = run.wrap(Net(dropout=0.0), find_unused_parameters=True)
    optimizer = torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    for x, y in run.steps(run.loader(Points(), batch_size=20), max_steps=12):
        optimizer.zero_grad()
        run.backward(nn.functional.cross_entropy(model(x), y))
        if run.step < 5:
            model.module.last.bias.grad = None
        optimizer.step()
        time.sleep(0.1)


def never_welcome(folder: Path) -> None:
    """Joins an agent that does not answer."""
    import socket

    from trainer.wire import channel

    _theirs, ours = socket.socketpair()
    os.environ[channel.FD_VARIABLE] = str(ours.detach())
    note(folder, waiting=True)
    trainer.join()


def train_on_gpu(folder: Path, **arguments: Any) -> dict[str, Any]:
    """See `_on_gpu.train`."""
    from tests.trainer import _on_gpu

    return _on_gpu.train(folder, **arguments)
