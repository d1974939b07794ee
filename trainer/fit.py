"""A training loop for those who do not want to write one. It does nothing that a script could not do with a `Session`; read it as an example.

Owns: the loop and the evaluation. Must not: reach past the session's public methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import ElasticLoader, Evaluation
from trainer.session import Session, Turn
from trainer.state import unwrapped
from trainer.wrap import ElasticDDP

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss over the batch's samples."""
Metrics = Callable[[nn.Module, Any], Mapping[str, Tensor | float]]
"""(model, batch) -> means over the batch's samples, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What callbacks are told, on every rank.

    Attributes:
        step, epoch: optimizer steps and epochs done.
        loss: mean over the samples of this step, on all ranks.
        learning_rate: of the optimizer's first group, for the next step.
        gradient_norm: before clipping; 0.0 without.
        metrics: of an evaluation, if there was one at this step.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def fit(
    loss_fn: Loss,
    *,
    run: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ElasticLoader,
    epochs: int | None = None,
    max_steps: int | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    evaluation: Evaluation | None = None,
    metrics: Metrics | None = None,
    evaluate_every: int = 0,
    tell_every: int = 10,
    callbacks: Iterable[Callable[[Progress], None]] = (),
    keep: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train to the end, from wherever the run is.

    Args:
        loss_fn: see `Loss`; called once for each microbatch.
        run: the session.
        model: on `run.device`; wrapped here, unless it is wrapped already.
        optimizer: over its parameters.
        loader: `run.loader(…)`. Its `microbatch` decides how many microbatches are accumulated for a step.
        epochs, max_steps: when to end; one of them.
        scheduler: of the learning rate, stepped once a step.
        clip: largest norm of the gradient; None for no clipping.
        autocast: type for what of the forward pass may have less precision, torch.bfloat16 as a rule; None for none.
        evaluation: `loader.evaluation(…)`; every sample counts once, whatever the world.
        metrics: what to evaluate; with `evaluation`.
        evaluate_every: steps from one evaluation to the next; 0 for one at the end.
        tell_every: steps from one call of the callbacks to the next. Each costs a reduction over ranks.
        callbacks: told of progress, at steps of `tell_every` and of evaluations.
        keep: more to register, by name: averages of weights, counters.

    Returns:
        The metrics of the last evaluation; {} without.

    Raises:
        SetupError, StateError, Stopped: see `Session.accumulate`.
    """
    model = model if isinstance(model, ElasticDDP) else run.wrap(model)
    run.register(model=model, optimizer=optimizer, **({"scheduler": scheduler} if scheduler is not None else {}), **(keep or {}))
    unwrapped(model).train()
    found: dict[str, float] = {}
    at = -1
    for turn in run.accumulate(loader, epochs=epochs, max_steps=max_steps):
        loss = _backward(run, model, turn, loss_fn, autocast)
        norm: Tensor | None = None
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            run.log(grad_norm=norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        run.stepped()
        evaluates = evaluation is not None and bool(evaluate_every) and run.step % evaluate_every == 0
        if evaluates:
            found, at = evaluate(run, model, evaluation, metrics), run.step
        if evaluates or run.step % tell_every == 0:
            rate = float(optimizer.param_groups[0]["lr"])
            (mean,) = run.total(float(loss))
            length = 0.0 if norm is None else float(norm)
            told = Progress(step=run.step, epoch=run.epoch, loss=mean, learning_rate=rate, gradient_norm=length, metrics=found if evaluates else {})
            for callback in callbacks:
                callback(told)
    return found if evaluation is None or at == run.step else evaluate(run, model, evaluation, metrics)


def _backward(run: Session, model: nn.Module, turn: Turn, loss_fn: Loss, autocast: torch.dtype | None) -> Tensor:
    """Gradients of a whole step. Returns this rank's part of its mean loss."""
    mean = torch.zeros((), device=run.device)
    for microbatch in turn:
        with torch.autocast(run.device.type, dtype=autocast, enabled=autocast is not None):
            loss = loss_fn(model, microbatch.batch)
        run.backward(loss)
        mean += microbatch.weight * loss.detach()
    return mean


def evaluate(run: Session, model: nn.Module, evaluation: Evaluation | None, metrics: Metrics | None) -> dict[str, float]:
    """Means over a whole test set. A stop is heard at each batch. The model is in evaluation mode meanwhile, and is itself called, not DDP around it.

    Args:
        run: the session.
        model: wrapped or not.
        evaluation: how the set is dealt.
        metrics: what to take the mean of.
    """
    if evaluation is None or metrics is None:
        return {}
    inner = unwrapped(model)
    training = inner.training
    inner.eval()
    sums: dict[str, float] = {}
    mine = iter(evaluation)
    try:
        with torch.no_grad():
            for _ in range(evaluation.turns):  # as many as the rank with most has: all must ask alike
                microbatch = next(mine, None)
                if microbatch is not None:
                    for name, value in metrics(inner, microbatch.batch).items():
                        sums[name] = sums.get(name, 0.0) + microbatch.weight * float(value)
                run.poll()
    finally:
        inner.train(training)
    total: dict[str, float] = {}
    for part in run.gather(json.dumps(sums).encode()):
        for name, value in json.loads(part).items():
            total[name] = total.get(name, 0.0) + value
    return total
