# ruff: noqa: PTH110 - written as users write it; it is copied to hosts and run there
"""A job for hosts that goes wrong as it is told: by files in the directory OUT, which it looks for at each step.

fail     every worker of this node raises        nan      the loss is no number
slow     this node's own work takes longer       hungry   each batch takes its time
late     a start takes its time                  hold     this node makes no step while the file is there
"""

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import trainer

OUT = os.environ["OUT"]


def told(word: str) -> bool:
    return os.path.exists(f"{OUT}/{word}")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if told("hungry"):
            time.sleep(0.03)
        x = torch.sin(torch.arange(8, dtype=torch.float32) * (index + 1))
        return x, x.sum().view(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.5 if told("slow") else 0.03)
        out: Tensor = self.layers(x)
        return out


def main() -> None:
    if told("late"):
        time.sleep(10)
    run = trainer.join(seed=1)
    torch.manual_seed(0)
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = run.loader(Numbers(), batch_size=24)
    run.register(model=model, optimizer=optimizer)
    for turn in run.accumulate(loader, max_steps=10_000_000):
        optimizer.zero_grad()
        for micro in turn:
            x, y = micro.batch
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss * float("nan") if told("nan") else loss)
        while told("hold"):
            time.sleep(0.1)
        if told("fail"):
            raise RuntimeError("the script was told to fail")
        optimizer.step()
        run.stepped()


if __name__ == "__main__":
    main()
