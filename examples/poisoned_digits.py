"""digits_elastic.py, unchanged, but from one step on the model gives no numbers any more: what a broken batch, an overflow or a bad GPU do to a training.

Nobody looks at the loss. The detectors do: the job goes back once to the last state from before that, leaves the data out that led there, and trains on::

    elasticctl run --nodes 2 --detect -- examples/poisoned_digits.py --out runs/poisoned

It happens in the first generation alone; a loss that is no number again after that would end the job, with the reason.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import digits_elastic
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

POISONED_AT = 100
"""Forward passes of a worker before it begins."""


class Poisoned(nn.Module):
    """A model whose output is NaN from its 101st forward pass in training on, in the job's first generation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.passes = 0 if os.environ.get("ELASTICD_GENERATION") == "1" else -1_000_000_000

    def forward(self, images: Tensor) -> Tensor:
        """As the model, or NaN of its shape."""
        self.passes += self.training
        out: Tensor = self.model(images)
        return out * float("nan") if self.passes > POISONED_AT else out


def main() -> None:
    """Run digits_elastic.py with a model that goes wrong."""
    healthy = digits_elastic.build_model
    with patch.object(digits_elastic, "build_model", lambda: Poisoned(healthy())):
        digits_elastic.main()


if __name__ == "__main__":
    main()
