# ruff: noqa: PTH108, PTH110, PTH116, PTH123, SIM115 - written as users write it; it is copied to hosts and run there
"""A job for hosts that drifts as it is told: by files in the directory OUT, which it looks for at each step. Each step is logged as a JSON line.

slow20   this node's own work takes 20 % longer     nan     the loss is no number while the file is there
oom      it raises what torch raises when a GPU has no memory left
babble   a thousand lines of nonsense a second      say     what stands in the file is printed, once for each change of it
"""

import json
import math
import os
import random
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import trainer

OUT = os.environ["OUT"]
WORK = float(os.environ.get("WORK", "0.1"))
NODE, GENERATION = os.environ["ELASTICD_NODE"], int(os.environ["ELASTICD_GENERATION"])


def told(word: str) -> bool:
    return os.path.exists(f"{OUT}/{word}")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(8, dtype=torch.float32) * (index + 1))
        return x, x.sum().view(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(WORK * (1.2 if told("slow20") else 1.0))
        out: Tensor = self.layers(x)
        return out


class Voice:
    """What it says besides."""

    def __init__(self) -> None:
        self.said = 0.0
        self.chance = random.Random(7)

    def step(self) -> None:
        if told("say") and (at := os.stat(f"{OUT}/say").st_mtime) > self.said:
            self.said = at
            print(open(f"{OUT}/say").read(), flush=True)
        if told("babble"):
            for _ in range(100):
                print("".join(chr(self.chance.randrange(1, 0x2FF)) for _ in range(self.chance.randrange(400))), flush=True)
            print("ERROR " * 5000, "\x1b[2J" * 50, flush=True)


def main() -> None:
    run = trainer.join(seed=1)
    torch.manual_seed(0)
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = run.loader(Numbers(), batch_size=24)
    run.register(model=model, optimizer=optimizer)
    voice = Voice()
    log = open(f"{OUT}/steps-{os.getpid()}.jsonl", "a", buffering=1)
    for turn in run.accumulate(loader, max_steps=10_000_000):
        optimizer.zero_grad()
        last = 0.0
        for micro in turn:
            x, y = micro.batch
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss * float("nan") if told("nan") else loss)
            last = loss.item()
            if told("oom"):
                os.unlink(f"{OUT}/oom")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.step()
        run.stepped()
        voice.step()
        record = {
            "at": time.time(),
            "step": run.step,
            "node": NODE,
            "generation": GENERATION,
            "world": run.world_size,
            "loss": last if math.isfinite(last) else None,
        }
        log.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
