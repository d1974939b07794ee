"""The Trainer of transformers under a session: `ElasticTrainer`, or `Elastic` before any subclass of Trainer.

Owns: where that loop meets a session, and what of it cannot be kept. Must not: touch models, collators, metrics or how the loss is computed.

A TrainerCallback alone cannot do it: it sees neither the loader nor the place to resume at. What is overridden, and why there (read in transformers
5.24, tested with it):

* `get_train_dataloader` returns a `Feed`: one "batch" of Trainer is one optimizer step, whose microbatches `training_step` goes through itself.
  gradient_accumulation_steps stays 1, since how many microbatches a rank has depends on the world.
* `_wrap_model` makes the wrapper by `run.wrap`, so that the stop flag rides with the gradients; Trainer then leaves it alone.
* `compute_loss` weights the loss by the share of the microbatch, unless Trainer divides it by the tokens of all ranks already.
* Trainer resumes from a directory. It gets one that holds its counters alone; `_load_optimizer_and_scheduler`, where everything exists, is where all
  the rest is restored.
* A step is counted at the next fetch, after logs and files; or before an evaluation that nothing else depends on, which then begins anew if a stop
  cuts it short.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.data import Microbatch
from trainer.errors import SetupError
from trainer.integrations.feed import Feed
from trainer.integrations.huggingface_state import Counters, refusals
from trainer.session import Session, Turn

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object  # Elastic goes before some subclass of Trainer

STATE_FILE: Final = "trainer_state.json"


class _Inputs(dict[str, Any]):
    """A whole step, which Trainer takes for a batch. As a dict it is its first microbatch: Trainer counts operations by that."""

    def __init__(self, turn: Turn) -> None:
        self.microbatches = turn.microbatches
        super().__init__(self.microbatches[0].batch)


class _StepFeed(Feed):
    """A feed of steps, until as many are done as Trainer wants. Trainer asks its length, and its dataset for the number of samples."""

    def __init__(self, run: Session, loader: Any, dataset: Any, state: Callable[[], TrainerState]) -> None:
        super().__init__(run, loader)
        self.dataset = dataset
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        steps = super().__iter__()
        # Trainer itself would make one step more if it is started again after the last.
        return iter(()) if self._state().global_step >= self._state().max_steps else steps

    def unpack(self, turn: Turn) -> Any:
        return _Inputs(turn)


class ElasticCallback(TrainerCallback):
    """The part that callbacks can do; `Elastic` adds it.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner: Elastic) -> None:
        self._owner = owner

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything exists, and nothing was restored: this is the beginning of the run."""
        del args, state, control, kwargs
        self._owner.begin()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The evaluation at the start, if there was one, is over."""
        del args, state, control, kwargs
        self._owner.begun()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Trainer counts the epoch from the batches that it saw since it was started."""
        del args, control, kwargs
        state.epoch = state.global_step / self._owner.steps_per_epoch

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hear a stop in an evaluation."""
        del args, state, control, kwargs
        self._owner.poll()


class Elastic(_Base):
    """Before a subclass of transformers.Trainer, it gives that the session's guarantees.

    ::

        run = trainer.join()
        hf = ElasticTrainer(run=run, batch_size=64, model=model, args=args, train_dataset=dataset)
        hf.train()

    Args:
        run: the session.
        batch_size: samples of an optimizer step, over all ranks; it stays when the world changes. args.per_device_train_batch_size is the most that a
            rank works on at once.
        parts: more that is to survive, as `Session.register` takes it.
        args, kwargs: Trainer's own.

    Raises:
        SetupError: something is asked for that cannot be kept; the message says what and why.
    """

    def __init__(self, *args: Any, run: Session, batch_size: int, parts: Mapping[str, object] | None = None, **kwargs: Any) -> None:
        self._run: Final = run
        self._batch_size: Final = batch_size
        self._more: Final = dict(parts or {})
        self._feed: _StepFeed | None = None
        self._micro: Microbatch | None = None
        self._state = Counters(self)
        self._registered = False
        self._again = False
        super().__init__(*args, **kwargs)
        for message, remedy in refusals(self, run):
            raise SetupError(message, remedy=remedy)
        self.add_callback(ElasticCallback(self))

    # -- what ElasticCallback asks --

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self._data())

    def begin(self) -> None:
        """Register everything, if that is not done, and begin with the evaluation that a stop cut short."""
        self._register()
        if self._state.evaluating and not self._hf.args.eval_on_start:
            self._hf.args.eval_on_start = True
            self._again = True

    def begun(self) -> None:
        """The evaluation at the start is over."""
        if self._again:
            self._hf.args.eval_on_start = False
            self._again = False

    def poll(self) -> None:
        """May raise Stopped."""
        if self._state.evaluating or not self._hf.is_in_train:
            self._run.poll()

    # -- what Trainer asks --

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, from where the run's state is.

        Raises:
            SetupError: resume_from_checkpoint is given: a run has one state, and the session has it.
        """
        if resume_from_checkpoint:
            raise SetupError("train(resume_from_checkpoint=…): a run has one state, and the session has it", remedy="leave it out")
        self._data()
        self._run.register(trainer=self._state)
        start: str | None = None
        with tempfile.TemporaryDirectory(prefix="elasticd-") as directory:
            if self._state.counters is not None:
                (Path(directory) / STATE_FILE).write_text(json.dumps(self._state.counters, default=float))
                self._hf.args.ignore_data_skip = True
                start = directory
            result = super().train(start, *args, **kwargs)
        self._data().settle()
        self._run.finish()
        return result

    def get_train_dataloader(self) -> Any:
        """The steps of the run."""
        return self._data()

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of an optimizer step."""
        del args
        return self._batch_size

    def get_batch_samples(self, epoch_iterator: Iterator[_Inputs], num_batches: int, *device: Any) -> tuple[list[_Inputs], Any]:
        """The next step, and the labelled tokens in it over all ranks, where the model wants to know them."""
        del num_batches
        inputs = next(epoch_iterator, None)
        if inputs is None:
            return [], None
        batches = [_countable(micro) for micro in inputs.microbatches]
        _, items = super().get_batch_samples(iter(batches), len(batches), *device)
        return [inputs], items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All microbatches of this rank; gradients are reduced with the last."""
        micros = inputs.microbatches
        total = torch.zeros((), device=self._hf.args.device)
        try:
            for index, micro in enumerate(micros):
                self._micro = micro
                self._run.enter(micro)
                with nullcontext() if index == len(micros) - 1 else model.no_sync():  # type: ignore[operator]
                    total += super().training_step(model, micro.batch, num_items_in_batch)
        finally:
            self._micro = None
        share = 1.0 if self._is_scaled(num_items_in_batch) else self._run.world_size * sum(micro.weight for micro in micros)
        if share:
            self._run.log(loss=total / share)
        return total

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss, weighted so that DDP's mean over ranks is the mean over the step."""
        result: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if self._micro is None:
            return result
        factor = self._factor(num_items_in_batch)
        return (result[0] * factor, result[1]) if return_outputs else result * factor

    def floating_point_ops(self, inputs: Any) -> int:
        """Of the whole step."""
        if not isinstance(inputs, _Inputs):
            return int(super().floating_point_ops(inputs))
        return sum(int(super(Elastic, self).floating_point_ops(micro.batch)) for micro in inputs.microbatches)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Count the step before it is measured, so that a stop need not wait; not if the measure decides what comes next."""
        if not self._hf.is_in_train or self._decides():
            return super().evaluate(*args, **kwargs)
        self._state.evaluating = True
        self._data().settle()
        result = super().evaluate(*args, **kwargs)
        self._state.evaluating = False
        return result

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training or isinstance(model, DistributedDataParallel):
            return super()._wrap_model(model, training=training, dataloader=dataloader)
        accelerator = self._hf.accelerator
        prepared = accelerator.prepare_model(model, evaluation_mode=True)  # mixed precision, but no wrapper of its own
        devices = [accelerator.device.index] if accelerator.device.type == "cuda" else None
        return self._run.wrap(prepared, device_ids=devices, **_ddp_options(accelerator))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The session has the model."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        del checkpoint
        self._register()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """The session has the scaler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random numbers depend on the step, not on what was drawn before."""

    def _load_best_model(self) -> None:
        self._data().settle()  # the last step is counted with its own weights
        super()._load_best_model()

    @property
    def _hf(self) -> Any:
        return self

    def _data(self) -> _StepFeed:
        if self._feed is None:
            hf = self._hf
            dataset, collate = hf.train_dataset, hf.data_collator
            if hasattr(dataset, "column_names"):
                dataset = hf._remove_unused_columns(dataset, description="training")  # noqa: SLF001 - as Trainer's own loader
            else:
                collate = hf._get_collator_with_removed_columns(collate, description="training")  # noqa: SLF001
            loader = self._run.loader(
                dataset,
                batch_size=self._batch_size,
                microbatch=hf.args.per_device_train_batch_size,
                workers=hf.args.dataloader_num_workers,
                drop_last=hf.args.dataloader_drop_last,
                shuffle=hf.args.train_sampling_strategy == "random",
                collate_fn=collate,
            )
            self._feed = _StepFeed(self._run, loader, dataset, lambda: hf.state)
        return self._feed

    def _register(self) -> None:
        if self._registered:
            return
        self._registered = True
        hf = self._hf
        optimizer = getattr(hf.optimizer, "optimizer", hf.optimizer)
        parts = {"model": hf.model, "optimizer": optimizer, "scheduler": hf.lr_scheduler, **self._more}
        scaler = getattr(hf.accelerator, "scaler", None)
        self._run.register(**parts if scaler is None else {**parts, "scaler": scaler})

    def _factor(self, items: Any) -> float:
        """What to multiply a microbatch's loss with."""
        assert self._micro is not None
        if self._is_scaled(items):  # only what is read twice must not count twice
            return 1.0 if self._micro.samples else 0.0
        return self._micro.weight * self._run.world_size

    def _is_scaled(self, items: Any) -> bool:
        """Whether Trainer divides the loss by the labelled tokens of all ranks."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        return bool((self._hf.model_accepts_loss_kwargs and items is not None) or self._hf.compute_loss_func is not None) if scaled is None else bool(scaled)

    def _decides(self) -> bool:
        """Whether training depends on what an evaluation finds."""
        hf = self._hf
        by_metric = hf.lr_scheduler is not None and not isinstance(hf.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        plateau = isinstance(hf.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return bool(by_metric or plateau or hf.args.metric_for_best_model)


class ElasticTrainer(Elastic, Trainer):
    """transformers.Trainer with the session's guarantees; see `Elastic`."""


def _countable(micro: Microbatch) -> Any:
    """The batch, with no label in it if it is another rank's."""
    batch = micro.batch
    if micro.samples or "labels" not in batch:
        return batch
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def _ddp_options(accelerator: Any) -> dict[str, Any]:
    handler = accelerator.ddp_handler
    return {} if handler is None else {name: value for name, value in handler.to_kwargs().items() if not name.startswith("comm_")}
