"""What the ranks of test worlds run with the Trainer of transformers. Not a test; test_huggingface.py starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing here needs a network

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

import trainer
from tests.support.worlds import note
from tests.trainer._programs import settings
from trainer.integrations.huggingface import ElasticTrainer
from trainer.wire import channel

SAMPLES, BATCH, EPOCHS = 46, 8, 3
"""Six steps an epoch, the last of six samples."""
STEPS = 18


class Points(Dataset[Any]):
    """Numbers and their sum; or tokens, of which some have labels, in every sample another number of them."""

    def __init__(self, *, tokens: bool = False) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._tokens:
            tokens = (torch.arange(8) * (index + 3) + index) % 17
            return {"input_ids": tokens, "labels": tokens.where(torch.arange(8) < 3 + index % 5, -100), "index": torch.tensor(index)}
        values = torch.sin(torch.arange(4.0) * (index + 1))
        return {"values": values, "labels": values.sum().unsqueeze(0), "index": torch.tensor(index)}


class Perceptron(nn.Module):
    """Its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.net(values)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def gpt() -> nn.Module:
    """A small one. Trainer divides its loss by the labelled tokens of the whole step."""
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


class Noting(ElasticTrainer):
    """Writes down of which samples a loss is computed, and sends itself SIGTERM where it is told to: (rank, optimizer steps done, place)."""

    stop: tuple[int, int, str] | None = None

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        samples = inputs.pop("index")
        if self.model.training and (self._micro is None or self._micro.samples):
            note(Path.cwd(), seen=samples.tolist(), epoch=self.state.global_step // 6, step=self.state.global_step)
        if self.model.training:
            self._maybe_stop("train")
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._maybe_stop("evaluation")
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _maybe_stop(self, place: str) -> None:
        if self.stop is not None and tuple(self.stop) == (self.args.process_index, self.state.global_step, place):
            self.stop = None
            os.kill(os.getpid(), signal.SIGTERM)


class Count(TrainerCallback, ExportableState):
    """Counts steps and evaluations that came to their end, and keeps the count."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluations.append(state.global_step)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": vars(self).copy()}


def arguments(**options: Any) -> TrainingArguments:
    """Small, quiet, on the CPU."""
    usual = {
        "output_dir": "out",
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.02,
        "warmup_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "logging_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 5,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**{**usual, **options})


def train(folder: Path, *, stop: tuple[int, int, str] | None = None, tokens: bool = False, args: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train to the end, from wherever the run is; what came of it."""
    _quiet()
    run = trainer.join(device="cpu", settings=settings(folder))
    torch.manual_seed(5)
    count = Count()
    model = gpt() if tokens else Perceptron()
    data = Points(tokens=tokens)
    hf = Noting(run=run, batch_size=BATCH, model=model, args=arguments(**(args or {})), train_dataset=data, eval_dataset=data, callbacks=[count])
    hf.stop = stop
    hf.train()
    optimizer: Any = hf.optimizer
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        "weights": [value.flatten().tolist() for value in hf.model.state_dict().values()],
        "moments": [optimizer.state[one]["exp_avg_sq"].flatten().tolist() for one in parameters if optimizer.state[one]],
        "lr": optimizer.param_groups[0]["lr"],
        "global_step": hf.state.global_step,
        "step": run.step,
        "epoch": hf.state.epoch,
        "flos": hf.state.total_flos,
        "steps": count.steps,
        "evaluations": count.evaluations,
        "best": hf.state.best_metric,
    }


def under_agent(folder: Path, *, path: str, **options: Any) -> dict[str, Any]:
    """The same as a worker of an agent."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    os.environ[channel.FD_VARIABLE] = str(sock.detach())
    return train(folder, **options)


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield {}


def refused(folder: Path, *, cases: list[str]) -> dict[str, str]:
    """What is said to each of some cases."""
    _quiet()
    run = trainer.join(device="cpu", settings=settings(folder))
    return {case: _refusal(run, case) for case in cases}


def _refusal(run: trainer.Session, case: str) -> str:
    options: dict[str, dict[str, Any]] = {
        "accumulation": {"gradient_accumulation_steps": 2},
        "saving": {"save_strategy": "steps"},
        "jit": {"enable_jit_checkpoint": True},
        "finds": {"auto_find_batch_size": True},
        "lengths": {"train_sampling_strategy": "group_by_length"},
        "counts": {"include_num_input_tokens_seen": "all"},
    }
    data: Any = _Endless() if case == "stream" else Points()
    try:
        args = arguments(**options.get(case, {}), **({"max_steps": 3} if case == "stream" else {}))
        hf = ElasticTrainer(run=run, batch_size=BATCH, model=Perceptron(), args=args, train_dataset=data, eval_dataset=Points())
        hf.train(resume_from_checkpoint="somewhere" if case == "path" else None)
    except trainer.SetupError as error:
        return str(error)
    return json.dumps("it trained")


def _quiet() -> None:
    warnings.simplefilter("ignore")  # those of transformers itself
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
