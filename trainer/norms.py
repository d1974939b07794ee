"""The norm of the gradients, now and then, where the script does not say it.

Owns: when, so that it costs at most `COST` of the steps' time, and computing it. Must not: change a gradient, or make anybody wait for a device.

It is taken when a backward pass is done and its gradients are reduced: before they are clipped. What one costs is measured; each step earns its share
of its own time, and the next is due when that suffices for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from trainer.wrap import ElasticDDP

COST: Final = 0.0005
"""Of the time of all steps."""
WARM_UP: Final = 3
"""Steps before the first one, which are longer than others."""


class Norms:
    """See the module. For one thread at a time.

    Args:
        device: that the gradients are on.

    Attributes:
        models: whose gradients; without any nothing is taken.
        unscale: undoes what a GradScaler does.
    """

    def __init__(self, device: torch.device) -> None:
        self.models: tuple[ElasticDDP, ...] = ()
        self.unscale: Callable[[Tensor], Tensor] | None = None
        self._cuda: Final = device.type == "cuda"
        self._earned = 0.0
        self._price = 0.0
        self._steps = 0
        self._known = False
        self._norm: float | Tensor | None = None
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def known(self) -> None:
        """The script says it: nothing is to be taken any more."""
        self._known = True
        self._norm = None

    def earn(self, seconds: float) -> None:
        """A step of so many seconds was made."""
        self._steps += 1
        if self._steps > WARM_UP:
            self._earned += COST * seconds

    def look(self) -> None:
        """A backward pass is done: take the norm, if it is due and the gradients are reduced."""
        if self._known or self._steps < WARM_UP or not self._due():
            return
        if any(not model.require_backward_grad_sync for model in self.models):
            return  # microbatches follow
        began = time.perf_counter()
        ends = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if self._cuda else None
        if ends is not None:
            ends[0].record()
        norm = self._total()
        if ends is not None:
            ends[1].record()
        self._timed = ends
        self._price = time.perf_counter() - began
        self._earned -= self._price
        self._norm = norm if self._cuda or norm is None else norm.item()

    def take(self) -> float | Tensor | None:
        """That of the step that ends, if it was taken; on a GPU a tensor there."""
        norm, self._norm = self._norm, None
        return norm

    def _due(self) -> bool:
        """Whether the last one is paid for, or is of this step and another pass has changed it."""
        if self._norm is not None:
            return True
        if self._timed is not None:  # on a GPU the price is known when the device has come to it
            began, ended = self._timed
            if not ended.query():
                return False
            more = max(0.0, began.elapsed_time(ended) / 1000.0 - self._price)
            self._price += more
            self._earned -= more
            self._timed = None
        return self._earned >= self._price

    def _total(self) -> Tensor | None:
        with torch.no_grad():
            gradients = [
                parameter.grad
                for model in self.models
                for parameter in model.module.parameters()
                if parameter.grad is not None and parameter.grad.layout == torch.strided
            ]
            if not gradients:
                return None
            norm = torch.nn.utils.get_total_norm(gradients).float()
            return self.unscale(norm) if self.unscale is not None else norm
