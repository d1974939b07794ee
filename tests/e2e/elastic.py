"""Trains something small with `trainer`, and writes down each sample where its loss is computed; a test counts them.

It ends after STEPS steps, or earlier at one by which the file OUT/enough is there.

Environment: OUT (a directory), STEPS, SAMPLES, BATCH, MICRO (0: one part a rank), STEP_TIME (seconds slept in each step), DIE (as
"rank:step:where": SIGKILL of itself, once, at that step, "before", "inside" or "after" the optimizer's step).

Writes steps-RANK-PID.jsonl (a line for each part of a step: rank, world, restarts, generation, step = steps done before it, epoch, ids, at, pid) and,
in the end, result-RANK.json ({"step", "weights"}: a digest of every parameter and of the optimizer's state).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import trainer

OUT = Path(os.environ["OUT"])
SAMPLES, BATCH, STEPS = (int(os.environ.get(name, default)) for name, default in (("SAMPLES", "640"), ("BATCH", "24"), ("STEPS", "60")))
MICRO = int(os.environ.get("MICRO", "0")) or None


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that bear their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.sin(torch.arange(8, dtype=torch.float32) * (index + 1))
        return index, x, x.sum().view(1)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.state_dict().values(), *(state[key] for state in map(optimizer.state.get, model.parameters()) for key in sorted(state))]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def die_at(run: trainer.Session, where: str) -> None:
    rank, step, place = os.environ.get("DIE", "-1:0:").split(":")
    if (run.rank, run.step, where) == (int(rank), int(step), place) and not (OUT / "died").exists():
        (OUT / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    run = trainer.join(seed=3)
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: die_at(run, "inside"))
    loader = run.loader(Numbered(), batch_size=BATCH, microbatch=MICRO)
    run.register(model=model, optimizer=optimizer)
    with (OUT / f"steps-{run.rank}-{os.getpid()}.jsonl").open("a", buffering=1) as out:
        for turn in run.accumulate(loader, max_steps=STEPS):
            optimizer.zero_grad()
            epoch = run.epoch
            for micro in turn:
                ids, x, y = micro.batch
                loss = nn.functional.mse_loss(model(x), y)
                line: dict[str, Any] = {"rank": run.rank, "world": run.world_size, "generation": run.generation, "step": run.step, "epoch": epoch}
                line["ids"] = ids.tolist() if micro.weight else []
                line |= {"at": time.time(), "pid": os.getpid(), "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "loss": loss.item()}
                out.write(json.dumps(line) + "\n")
                run.backward(loss)
            die_at(run, "before")
            optimizer.step()
            die_at(run, "after")
            time.sleep(float(os.environ.get("STEP_TIME", "0.02")))
            run.stepped()
            if run.total(float((OUT / "enough").exists()))[0]:
                break
    run.finish()
    (OUT / f"result-{run.rank}.json").write_text(json.dumps({"step": run.step, "weights": digest(model.module, optimizer)}))


if __name__ == "__main__":
    main()
