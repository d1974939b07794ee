"""examples/digits.py, made elastic: what is kept, when a world changes and who reads what is `trainer`'s business now.

Compare the two. The loop is the script's own; what it did for saving, resuming and dealing the data is gone. It runs under elasticd, where nothing
is lost when nodes come and go, and as well under torchrun, where it keeps checkpoints in a directory::

    elasticctl run --nodes 2 -- examples/digits_elastic.py --out runs/digits
    torchrun --nproc-per-node 2 examples/digits_elastic.py --out runs/digits

Data: the UCI digits that scikit-learn ships, 1797 images of 8x8 pixels; a quarter, the same one each time, is kept for the test.

Writes under --out, which every node must see: result.json ({"accuracy", "world_size", "steps"}), and rank-R.pid, so that one can find a worker to
kill. Checkpoints lie in ./checkpoints, or where ELASTICD_TRAINER_CHECKPOINT_DIR says, if there is no agent to keep them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import trainer


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on the UCI digits with DDP.")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="directory for the checkpoint and the result")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step, over all ranks together")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--step-time", type=float, default=0.05, help="seconds slept in each step: this model alone would be done before one could watch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs a device for each local rank")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images (N, 1, 8, 8) scaled to 0..1, labels (N,)."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in split)
    train = TensorDataset(x_train.float().view(-1, 1, 8, 8) / 16, y_train.long())
    test = TensorDataset(x_test.float().view(-1, 1, 8, 8) / 16, y_test.long())
    return train, test


def build_model() -> nn.Module:
    """Two convolutions and two linear layers, 20,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Return the share of the test set that the model labels rightly, 0 to 1."""
    model.eval()
    images, labels = test.tensors
    return float((model(images.to(device)).argmax(dim=1).cpu() == labels).float().mean())


def main() -> None:
    """Train from the checkpoint, or from the beginning, to the last epoch; then test."""
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    run = trainer.join(device=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank-{rank}.pid").write_text(f"{os.getpid()}\n")

    torch.manual_seed(0)
    train, test = load_data()
    loader = run.loader(train, batch_size=args.batch_size)
    model = run.wrap(build_model().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    step = run.register(model=model, optimizer=optimizer)
    for images, labels in run.steps(loader, epochs=args.epochs):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        run.backward(loss)
        optimizer.step()
        step += 1
        time.sleep(args.step_time)
        if rank == 0 and step % args.save_every == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)

    if rank == 0:
        score = accuracy(model.module, test, device)
        print(f"test accuracy {score:.4f}", flush=True)
        partial = args.out / "result.json.partial"
        partial.write_text(json.dumps({"accuracy": score, "world_size": world_size, "steps": step}) + "\n")
        partial.replace(args.out / "result.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
