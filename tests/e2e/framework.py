"""Trains with a framework's own loop, Lightning's or that of transformers, and writes down each sample where its loss is computed, as `elastic.py` does.

    python framework.py lightning|transformers

Environment: OUT (a directory), EPOCHS, SAMPLES, BATCH, STEP_TIME (seconds slept in each step).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing here needs a network

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer

OUT = Path(os.environ["OUT"])
SAMPLES, BATCH, EPOCHS = (int(os.environ.get(name, default)) for name, default in (("SAMPLES", "640"), ("BATCH", "24"), ("EPOCHS", "3")))


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples that bear their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.sin(torch.arange(8, dtype=torch.float32) * (index + 1))
        return {"id": torch.tensor(index), "x": x, "labels": x.sum().view(1)}


class Net(nn.Module):
    """Its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Notes:
    """What was trained on."""

    def __init__(self, run: trainer.Session) -> None:
        self._run = run
        self._file = (OUT / f"steps-{run.rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, ids: Tensor) -> None:
        run = self._run
        line = {"rank": run.rank, "world": run.world_size, "generation": run.generation, "step": run.step, "epoch": run.epoch, "ids": ids.tolist()}
        self._file.write(json.dumps({**line, "at": time.time(), "pid": os.getpid()}) + "\n")
        time.sleep(float(os.environ.get("STEP_TIME", "0.02")))


def with_lightning(run: trainer.Session, notes: Notes) -> nn.Module:
    """Train; return the model."""
    import lightning.pytorch as pl

    from trainer.integrations.lightning import ElasticCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            notes(batch["id"])
            loss: Tensor = self.net(batch["x"], batch["labels"])["loss"]
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val", self.net(batch["x"], batch["labels"])["loss"], sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    elastic = ElasticCallback(run)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lit = pl.Trainer(callbacks=[elastic], max_epochs=EPOCHS, **quiet, **elastic.options)
    module = Module()
    lit.fit(module, elastic.loader(Numbered(), batch_size=BATCH), DataLoader(Numbered(), batch_size=64))
    return module


def with_transformers(run: trainer.Session, notes: Notes) -> nn.Module:
    """Train; return the model."""
    from transformers import TrainingArguments

    from trainer.integrations.huggingface import ElasticTrainer

    class Noting(ElasticTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            ids = inputs.pop("id")
            if self.model.training and (self._micro is None or self._micro.samples):
                notes(ids)
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    told = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False, "seed": 5}
    args = TrainingArguments(str(OUT / "hf"), num_train_epochs=EPOCHS, per_device_train_batch_size=8, **told)
    hf = Noting(run=run, batch_size=BATCH, model=Net(), args=args, train_dataset=Numbered())
    hf.train()
    model: nn.Module = hf.model
    return model


def main() -> None:
    warnings.simplefilter("ignore")  # the frameworks' own
    run = trainer.join(seed=3)
    torch.manual_seed(0)
    model = {"lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]](run, Notes(run))
    run.finish()
    weights = [value.flatten().tolist() for value in model.state_dict().values()]
    (OUT / f"result-{run.rank}.json").write_text(json.dumps({"step": run.step, "weights": weights}))


if __name__ == "__main__":
    main()
