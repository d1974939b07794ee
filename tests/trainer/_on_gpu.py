"""What ranks of the GPU tests run: a training on the device that `join` chooses. Not a test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import trainer
from tests.support.worlds import note
from tests.trainer._programs import Net, Points, digest, settings

if TYPE_CHECKING:
    from pathlib import Path


def train(folder: Path, *, max_steps: int, step_seconds: float = 0.0) -> dict[str, Any]:
    """As `_programs.train`, on `run.device`."""
    run = trainer.join(seed=3, settings=settings(folder))
    torch.manual_seed(0)
    model = run.wrap(Net(norm=True).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    losses: dict[int, float] = {}
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=max_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
        run.backward(loss)
        optimizer.step()
        losses[run.step + 1] = float(loss.detach())
        note(folder, step=run.step + 1)
        time.sleep(step_seconds)
    first = model.module.first.weight.detach().cpu().flatten().tolist()
    return {"losses": losses, "digest": digest(model.module), "device": str(run.device), "first": first}
