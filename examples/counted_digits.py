"""digits_elastic.py, unchanged, but every sample is written down where its loss is computed: what run_digits.py starts, and then counts.

    elasticctl run --nodes 2 -- examples/counted_digits.py --out runs/digits

No two of the images are alike, so an image tells which sample it is. What is written does not come from a loader's word, then, but from what the
network was given.

Writes under --out, beside what digits_elastic.py does, samples-RANK-PID.jsonl: one line for each forward pass in training, {"generation", "world",
"rank", "step": steps done by then, "epoch", "ids": numbers of the samples in the training set, "at": seconds since the epoch}. It lies in the file as
soon as the pass begins, and so outlives a kill. A worker that ends in any other way says with a last line, which has no ids, how many steps it did.

The step's time is spent in the forward pass, as in real training, not after the optimizer as in digits_elastic.py. For worlds of three at most: an
epoch's last step has three samples, and a rank that gets none would be given one that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import digits_elastic
import torch
from torch import nn

import trainer

join, build_model = trainer.join, digits_elastic.build_model


class Witness:
    """Sees each batch that the network is given in training, and writes down of which samples it is.

    Args:
        out: directory of the file, which is made.
        forward_time: seconds that each forward pass takes at least.
    """

    def __init__(self, out: Path, *, forward_time: float) -> None:
        images = digits_elastic.load_data()[0].tensors[0]
        self._numbers = {image.numpy().tobytes(): number for number, image in enumerate(images)}
        assert len(self._numbers) == len(images), "two images are alike"
        self._forward_time = forward_time
        self._session: trainer.Session | None = None
        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / f"samples-{os.environ['RANK']}-{os.getpid()}.jsonl").open("a", buffering=1)  # a line is one write

    def join(self, **options: Any) -> trainer.Session:
        """`trainer.join`; the session knows the step."""
        self._session = join(**options)
        return self._session

    def build_model(self) -> nn.Module:
        """digits_elastic's, watched."""
        model = build_model()
        model.register_forward_pre_hook(self.saw)
        return model

    def saw(self, model: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        """A forward pass begins with these images, (N, 1, 8, 8)."""
        if model.training:
            self._write([self._numbers[image.numpy().tobytes()] for image in inputs[0].cpu()])
            time.sleep(self._forward_time)

    def end(self) -> None:
        """This worker ends, whatever the reason."""
        if self._session is not None:
            self._write([])

    def _write(self, ids: list[int]) -> None:
        run = self._session
        assert run is not None
        line = {"generation": run.generation, "world": run.world_size, "rank": run.rank, "step": run.step, "epoch": run.epoch, "ids": ids, "at": time.time()}
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    """Run digits_elastic.py with a witness; it gets the options that are not ours."""
    parser = argparse.ArgumentParser(description="Train a small network on the UCI digits, and write each sample down.", add_help=False)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--forward-time", type=float, default=0.1, help="seconds that a forward pass takes at least")
    args, rest = parser.parse_known_args()
    sys.argv[1:] = ["--out", str(args.out), "--step-time", "0", *rest]
    witness = Witness(args.out, forward_time=args.forward_time)
    with patch.object(trainer, "join", witness.join), patch.object(digits_elastic, "build_model", witness.build_model):
        try:
            digits_elastic.main()
        finally:
            witness.end()


if __name__ == "__main__":
    main()
