"""What ranks of `test_fit` run. Not a test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import trainer
from tests.support.worlds import note
from tests.trainer._programs import Net, Points, digest, settings
from trainer.fit import Progress, evaluate, fit

if TYPE_CHECKING:
    from pathlib import Path


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def right(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x, y = batch
    assert not model.training
    assert not torch.is_grad_enabled()
    return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def fitted(folder: Path, *, max_steps: int, evaluates: bool = True, slow: float = 0.0, **how: Any) -> dict[str, Any]:
    """`trainer.fit` with all that it has."""
    run = trainer.join(seed=3, settings=settings(folder))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    loader = run.loader(Points(), batch_size=24, microbatch=how.get("microbatch"))
    told: list[dict[str, Any]] = []
    seen: dict[str, int] = {"calls": 0}

    def tell(progress: Progress) -> None:
        seen["calls"] += 1
        told.append(
            {name: getattr(progress, name) for name in ("step", "epoch", "loss", "gradient_norm", "learning_rate")} | {"metrics": dict(progress.metrics)}
        )
        note(folder, step=progress.step)
        time.sleep(slow)

    metrics = fit(
        loss_of,
        run=run,
        model=model,
        optimizer=optimizer,
        loader=loader,
        max_steps=max_steps,
        scheduler=scheduler,
        clip=how.get("clip"),
        autocast=torch.bfloat16 if how.get("autocast") else None,
        evaluation=loader.evaluation(Points(53, seed=8), batch_size=10) if evaluates else None,
        metrics=right if evaluates else None,
        evaluate_every=how.get("evaluate_every", 0),
        tell_every=5,
        callbacks=[tell],
        keep={"seen": seen},
    )
    exact = float((model.eval()(Points(53, seed=8).x).argmax(1) == Points(53, seed=8).y).float().mean())
    return {"metrics": metrics, "told": told, "digest": digest(model), "exact": exact, "calls": seen["calls"], "step": run.step}


def evaluated_by_few(folder: Path) -> dict[str, float]:
    """A test set with fewer samples than ranks."""
    run = trainer.join(settings=settings(folder))
    model = Net()
    loader = run.loader(Points(), batch_size=24)
    torch.manual_seed(0)
    return evaluate(run, model, loader.evaluation(Points(2), batch_size=10), right)
