"""What of Trainer's own state goes into a session's, and what Trainer is asked for that a session cannot keep.

Owns: both lists. Must not: decide when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState

from trainer.session import Session

_NOT_KEPT: Final = frozenset({"log_history", "is_local_process_zero", "is_world_process_zero", "stateful_callbacks"})
"""What of TrainerState grows without end, differs from rank to rank, or is put together anew."""


class Counters:
    """Trainer's counters, and the states of callbacks that have one.

    Attributes:
        counters: those that were restored, as TrainerState's JSON has them; None at the beginning of a run.
        evaluating: the last step is counted, and an evaluation under way.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.counters: dict[str, Any] | None = None
        self.evaluating = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        state = self._owner.state
        counters = {item.name: getattr(state, item.name) for item in dataclasses.fields(state) if item.name not in _NOT_KEPT}
        callbacks = [[type(callback).__qualname__, callback.state()["attributes"]] for callback in self._callbacks()]
        return {"counters": counters, "callbacks": callbacks, "evaluating": self.evaluating}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the counters for Trainer, which makes its state anew; give each callback its own."""
        self.counters = dict(state["counters"])
        self.evaluating = state["evaluating"]
        for callback, (name, attributes) in zip(self._callbacks(), state["callbacks"], strict=False):
            if type(callback).__qualname__ == name:
                for attribute, value in attributes.items():
                    setattr(callback, attribute, value)

    def _callbacks(self) -> list[Any]:
        return [callback for callback in self._owner.callback_handler.callbacks if isinstance(callback, ExportableState)]


def refusals(hf: Any, run: Session) -> Iterable[tuple[str, str]]:
    """What cannot be kept, and what to do."""
    args: TrainingArguments = hf.args
    if args.world_size != run.world_size:
        yield f"Trainer sees {args.world_size} ranks, the session has {run.world_size}", "call trainer.join() before TrainingArguments is made"
    if hf.is_deepspeed_enabled or hf.is_fsdp_enabled or hf.is_model_parallel or args.n_gpu > 1:
        yield "the model is sharded or spread over devices; only DDP is kept", "leave deepspeed, fsdp, device_map and DataParallel out"
    if args.gradient_accumulation_steps != 1:
        yield (
            "gradient_accumulation_steps changes the samples of a step with the world",
            "give batch_size=, of the whole step; per_device_train_batch_size cuts it",
        )
    if args.save_strategy != "no" and not args.save_only_model:
        yield (
            f"save_strategy={str(args.save_strategy)!r} writes checkpoints of its own beside the session's",
            "save_strategy='no', or save_only_model=True for copies",
        )
    if args.enable_jit_checkpoint:
        yield "enable_jit_checkpoint answers SIGTERM with a checkpoint of its own", "leave it out: the session keeps the state of the last step"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the samples of a step", "give a smaller per_device_train_batch_size: it changes nothing else"
    if args.train_sampling_strategy not in {"random", "sequential"}:
        yield f"train_sampling_strategy={args.train_sampling_strategy!r} has an order of its own", "'random' or 'sequential'"
    if args.include_num_input_tokens_seen not in {False, "no"}:
        yield "include_num_input_tokens_seen counts batches of Trainer, which are whole steps here", "leave it out"
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False makes the loss a mean of means", "leave it out"
    if hf.train_dataset is None or isinstance(hf.train_dataset, IterableDataset):
        yield "train_dataset has no length, so Trainer cannot tell where in an epoch it is", "give a dataset with __len__ and __getitem__"
