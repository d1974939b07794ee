"""What the ranks of test worlds run with Lightning. Not a test; test_lightning.py starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer
from tests.support.worlds import note
from tests.trainer._programs import settings
from trainer.integrations.lightning import ElasticCallback
from trainer.wire import channel

SAMPLES, BATCH, EPOCHS = 46, 8, 3
"""Six steps an epoch, the last of six samples."""
STEPS = 18


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        values = torch.sin(torch.arange(4.0) * (index + 1))
        return index, values, values.sum().unsqueeze(0)


class Module(pl.LightningModule):
    """Writes down of which samples a loss is computed, and sends itself SIGTERM where it is told to.

    Args:
        stop: (rank, optimizer steps done, "train" or "validation").
        dropout: of the only layer that draws random numbers.
    """

    def __init__(self, stop: tuple[int, int, str] | None = None, dropout: float = 0.2) -> None:
        super().__init__()
        self.stop = stop
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.net(values)
        return out

    def training_step(self, batch: Any, _index: int) -> Tensor:
        samples, values, wanted = batch
        note(Path.cwd(), seen=samples.tolist(), epoch=self.current_epoch, step=self.global_step)
        self._maybe_stop("train")
        return nn.functional.mse_loss(self(values), wanted)

    def validation_step(self, batch: Any, _index: int) -> None:
        _, values, wanted = batch
        if not self.trainer.sanity_checking:
            self._maybe_stop("validation")
        self.log("val", nn.functional.mse_loss(self(values), wanted), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step), "interval": "step"}]

    def _maybe_stop(self, place: str) -> None:
        if self.stop is not None and tuple(self.stop) == (self.global_rank, self.global_step, place):
            self.stop = None
            os.kill(os.getpid(), signal.SIGTERM)


class Count(Callback):
    """Counts validations and epochs that came to their end, and keeps the count."""

    def __init__(self) -> None:
        self.validations: list[int] = []
        self.epochs: list[int] = []

    def on_validation_end(self, lit: pl.Trainer, module: pl.LightningModule) -> None:
        if not lit.sanity_checking:
            self.validations.append(lit.global_step)

    def on_train_epoch_end(self, lit: pl.Trainer, module: pl.LightningModule) -> None:
        self.epochs.append(lit.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validations, self.epochs = list(state["validations"]), list(state["epochs"])


def train(
    folder: Path,
    *,
    stop: tuple[int, int, str] | None = None,
    dropout: float = 0.2,
    trainer_options: dict[str, Any] | None = None,
    models: bool = False,
    hook: bool = False,
) -> dict[str, Any]:
    """Train to the end, from wherever the run is; what came of it."""
    warnings.simplefilter("ignore")  # Lightning's own
    torch.manual_seed(5)
    run = trainer.join(device="cpu", settings=settings(folder))
    elastic = ElasticCallback(run)
    count, early = Count(), EarlyStopping("val", patience=50)
    options = {**elastic.options, "max_epochs": EPOCHS, "val_check_interval": 3, **(trainer_options or {})}
    callbacks = [elastic, count, early]
    if models:
        callbacks.append(ModelCheckpoint(folder / "models", monitor="val", save_top_k=2))
        options["enable_checkpointing"] = True
    lit = pl.Trainer(callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
    module = Module(stop, dropout)
    loader: Any = None
    if hook:
        module.train_dataloader = lambda: elastic.loader(Points(), batch_size=BATCH)  # type: ignore[method-assign]
    else:
        loader = elastic.loader(Points(), batch_size=BATCH)
    lit.fit(module, loader, DataLoader(Points(), batch_size=8))
    optimizer: Any = lit.optimizers[0]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        "weights": [value.flatten().tolist() for value in module.state_dict().values()],
        "moments": [optimizer.state[one]["exp_avg_sq"].flatten().tolist() for one in parameters],
        "lr": optimizer.param_groups[0]["lr"],
        "global_step": lit.global_step,
        "step": run.step,
        "epoch": lit.current_epoch,
        "begun": lit.fit_loop.epoch_progress.total.ready,
        "validations": count.validations,
        "epochs": count.epochs,
        "stepped": lit.fit_loop.epoch_loop._batches_that_stepped,
        "best": float(early.best_score),
    }


def under_agent(folder: Path, *, path: str, **arguments: Any) -> dict[str, Any]:
    """The same as a worker of an agent."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    os.environ[channel.FD_VARIABLE] = str(sock.detach())
    return train(folder, **arguments)


def refused(folder: Path, *, cases: list[str]) -> dict[str, str]:
    """What `fit` says to each of some cases."""
    warnings.simplefilter("ignore")
    run = trainer.join(device="cpu", settings=settings(folder))
    return {case: _refusal(run, case) for case in cases}


def _refusal(run: trainer.Session, case: str) -> str:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging

    elastic = ElasticCallback(run)
    callbacks: dict[str, Callback] = {
        "exception": OnExceptionCheckpoint("."),
        "saves": ModelCheckpoint(save_on_exception=True),
        "swa": StochasticWeightAveraging(0.1),
    }
    options: dict[str, dict[str, Any]] = {
        "accumulate": {"accumulate_grad_batches": 2},
        "limit": {"limit_train_batches": 2},
        "strategy": {"strategy": "auto"},
        "reload": {"reload_dataloaders_every_n_epochs": 1},
        "overfit": {"overfit_batches": 1},
    }
    module = Module()
    module.automatic_optimization = case != "manual"
    more = [callbacks[case]] if case in callbacks else []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    settled = {**elastic.options, **quiet, "enable_checkpointing": case in {"saves", "exception"}, **options.get(case, {})}
    lit = pl.Trainer(callbacks=[elastic, *more], max_epochs=1, **settled)
    loader: Any = DataLoader(Points(), batch_size=8) if case == "loader" else elastic.loader(Points(), batch_size=BATCH)
    try:
        if case == "microbatch":
            ElasticCallback(run).loader(Points(), batch_size=8, microbatch=2)
        if case == "twice":
            elastic.loader(Points(), batch_size=8)
        if case == "path":
            torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, "some.ckpt")
        lit.fit(module, loader, ckpt_path="some.ckpt" if case == "path" else None)
    except trainer.SetupError as error:
        return str(error)
    return json.dumps("it trained")
