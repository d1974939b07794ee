"""Lightning's Trainer under a session: `ElasticCallback`.

Owns: where Lightning's loop meets a session, and what of Lightning cannot be kept. Must not: touch the user's training_step, or how Lightning trains.

What is hooked, and why there (read in lightning 2.6, tested with it):

* `DDPStrategy._setup_model` makes the wrapper; it calls `run.wrap` instead, so that the stop flag rides with the gradients.
* `on_before_backward` is the last place where the loss can be weighted. In place: the strategy goes on with the same tensor.
* the training loader is a `Feed`, which knows its length, so that Lightning fetches nothing ahead. A step is counted at the next fetch, after all
  hooks of the last; or before a validation, which then begins anew if a stop cuts it short.
* Lightning's own handler of SIGTERM calls a collective from within the handler, on whichever rank got the signal. It is not registered.
* at `on_fit_start` model, optimizers and schedulers exist and nothing has run: there they are registered and, if there is a state, restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import SetupError
from trainer.integrations.feed import Feed
from trainer.integrations.lightning_state import Callbacks, Loops
from trainer.session import Session, Turn

_OWN_WEIGHTS: Final = (StochasticWeightAveraging, WeightAveraging)


class ElasticCallback(Callback):
    """Gives `lightning.pytorch.Trainer` the session's guarantees.

    ::

        run = trainer.join()
        elastic = ElasticCallback(run)
        lit = L.Trainer(callbacks=[elastic], max_epochs=3, **elastic.options)
        lit.fit(module, elastic.loader(dataset, batch_size=64))

    Args:
        run: the session.
        parts: more that is to survive, as `Session.register` takes it: an average of weights, counters of your own.
    """

    def __init__(self, run: Session, **parts: object) -> None:
        self._run: Final = run
        self._parts: Final = parts
        self._feed: _LightningFeed | None = None
        self._callbacks: Callbacks | None = None
        self._polls = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of the Trainer that follow from the world."""
        run = self._run
        return {
            "accelerator": "gpu" if run.device.type == "cuda" else "cpu",
            "devices": run.local_world_size,
            "num_nodes": max(1, run.world_size // run.local_world_size),
            "strategy": "ddp",
            "plugins": [ElasticEnvironment(run)],
            "enable_checkpointing": False,
        }

    def loader(self, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> Feed:
        """The training loader to give to `fit`, or to return from `train_dataloader`.

        Args:
            dataset: map-style, or with a length.
            batch_size: samples of an optimizer step, over all ranks; it stays when the world changes.
            options: of `Session.loader`, without microbatch.

        Raises:
            SetupError: there is one already, or it has no length.
        """
        if options.pop("microbatch", None) is not None:
            raise SetupError(
                "loader(…, microbatch=…) cannot work with Lightning, which would count every microbatch as a step of its own",
                remedy="leave it out: each rank then has one batch a step",
            )
        if self._feed is not None:
            raise SetupError("elastic.loader was called twice, and a run has one place in its data", remedy="call it once, and return the same one")
        loader = self._run.loader(dataset, batch_size=batch_size, **options)
        try:
            len(loader)
        except TypeError:
            raise SetupError(
                "the dataset has no length, so Lightning would fetch a step ahead and none could be counted in time",
                remedy="give the dataset a __len__, or write the loop yourself (run.steps)",
            ) from None
        self._feed = _LightningFeed(self._run, loader)
        return self._feed

    # -- Lightning's hooks, in the order in which it calls them --

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be kept; take over the wrapping of the model and SIGTERM."""
        if stage != "fit":
            return
        for message, remedy in _refusals(trainer, pl_module, self._run):
            raise SetupError(message, remedy=remedy)
        strategy: Any = trainer.strategy
        strategy._setup_model = partial(self._wrap, strategy)  # noqa: SLF001 - its subclasses override it; a subclass here would forbid strategy="ddp"
        connector: Any = trainer._signal_connector  # noqa: SLF001 - there is no other way to keep it from registering its handlers
        connector.register_signal_handlers = lambda: None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register everything, and restore it."""
        if trainer.ckpt_path:
            raise SetupError(f"fit(ckpt_path={str(trainer.ckpt_path)!r}): a run has one state, and the session has it", remedy="leave ckpt_path out")
        self._callbacks = Callbacks(self, trainer)
        self._run.register(**_parts(trainer, pl_module), loops=Loops(trainer), callbacks=self._callbacks, **self._parts)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the data come from us, all of them."""
        del pl_module
        loader: object = trainer.train_dataloader
        feed = self._feed
        if feed is None or loader is not feed:
            raise SetupError(
                f"the training loader is a {type(loader).__qualname__}, whose place cannot be kept when the world changes",
                remedy="give fit(…) what elastic.loader(dataset, batch_size=…) returns",
            )
        if trainer.num_training_batches != len(feed):
            raise SetupError("limit_train_batches and fast_dev_run leave samples of an epoch out", remedy="use max_steps to train for less than an epoch")
        feed.before = self._callbacks.share if self._callbacks else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed for the step."""
        del trainer, pl_module, batch, batch_idx
        if self._feed is not None and self._feed.turn is not None:
            self._run.enter(self._feed.turn.microbatches[0])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weight the loss by this rank's share, so that DDP's mean over ranks is the mean over samples."""
        del trainer, pl_module
        if self._feed is not None and self._feed.turn is not None:
            weight = self._feed.turn.microbatches[0].weight
            self._run.observe(loss)
            loss.mul_(weight * self._run.world_size)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Other callbacks may have changed."""
        del trainer, pl_module
        if self._callbacks is not None:
            self._callbacks.changed()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the step before it is measured: a stop in here must not lose it."""
        del pl_module
        self._polls = 0
        if self._feed is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._feed.settle()
        self._polls = _fewest(self._run, trainer.num_val_batches)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_batch: Any, **_more: Any) -> None:
        """Hear a stop. As often as every rank gets here."""
        del trainer, pl_module
        if self._polls > 0:
            self._polls -= 1
            self._run.poll()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Other callbacks may have changed."""
        self._polls = 0
        self.on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the last step."""
        del trainer, pl_module
        if self._feed is not None:
            self._feed.settle()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last checkpoint."""
        del trainer, pl_module
        self._run.finish()

    def _wrap(self, strategy: Any, model: torch.nn.Module) -> torch.nn.Module:
        return self._run.wrap(model, device_ids=strategy.determine_ddp_device_ids(), **strategy._ddp_kwargs)  # noqa: SLF001 - what the user gave DDPStrategy


class _LightningFeed(Feed):
    """A feed of batches."""

    def __init__(self, run: Session, loader: Any) -> None:
        super().__init__(run, loader)
        self.before: Callable[[], None] | None = None

    def unpack(self, turn: Turn) -> Any:
        return turn.microbatches[0].batch

    def settle(self) -> None:
        if self.before is not None:
            self.before()
        super().settle()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the session has the place. Without it Lightning warns that the loader cannot resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


class ElasticEnvironment(ClusterEnvironment):
    """Ranks and world as the session has them: the process group is there already, and nodes may have different numbers of workers.

    Args:
        run: the session.
    """

    def __init__(self, run: Session) -> None:
        super().__init__()
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        """Yes."""
        return True

    @property
    def main_address(self) -> str:
        """Not used."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not used."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Only where it is named."""
        return False

    def world_size(self) -> int:
        """Ranks."""
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        """This rank."""
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        """This rank among those of its node."""
        return self._run.local_rank

    def node_rank(self) -> int:
        """Some number; 0 where rank 0 is, which is all that Lightning uses it for."""
        return self._run.rank // self._run.local_world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Devices times nodes need not be the world: nodes may differ."""


def _parts(trainer: Trainer, module: LightningModule) -> dict[str, object]:
    """Model, optimizers, schedulers and the scaler."""
    parts: dict[str, object] = {"model": module}
    optimizers: list[Any] = trainer.optimizers
    parts |= {f"optimizer{index or ''}": optimizer for index, optimizer in enumerate(optimizers)}
    parts |= {f"scheduler{index or ''}": config.scheduler for index, config in enumerate(trainer.lr_scheduler_configs)}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return parts if scaler is None else {**parts, "scaler": scaler}


def _fewest(run: Session, batches: Iterable[float]) -> int:
    """How many batches every rank has in a validation; 0 if that is not known."""
    total = sum(batches)
    count = torch.tensor(int(total) if total != float("inf") else 0, device=run.device)
    if run.world_size > 1:
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return int(count)


def _refusals(trainer: Any, module: LightningModule, run: Session) -> Iterable[tuple[str, str]]:
    """What cannot be kept, and what to do."""
    strategy = trainer.strategy
    if type(strategy) is not DDPStrategy:
        yield f"strategy {type(strategy).__qualname__} shards or moves the state; only DDP is kept", "Trainer(strategy='ddp')"
        return
    if trainer.world_size != run.world_size:
        yield f"Lightning sees {trainer.world_size} ranks, the session has {run.world_size}", "Trainer(**elastic.options)"
    if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:  # noqa: SLF001
        yield "a communication hook of DDPStrategy would change the stop flag, which rides with the gradients", "leave ddp_comm_hook out"
    if trainer.accumulate_grad_batches != 1:
        yield "accumulate_grad_batches changes the samples of a step with the world", "give elastic.loader the batch_size of the whole step"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs begins the data anew", "leave it out; every epoch has its own order already"
    if trainer.overfit_batches:
        yield "overfit_batches repeats samples", "give a smaller dataset"
    if not module.automatic_optimization:
        yield "manual optimization has no place at which a step is done", "write the loop yourself (run.steps), or use automatic optimization"
    yield from _refused_callbacks(trainer.callbacks)


def _refused_callbacks(callbacks: Iterable[Callback]) -> Iterable[tuple[str, str]]:
    for callback in callbacks:
        name = type(callback).__qualname__
        if isinstance(callback, _OWN_WEIGHTS):
            yield f"{name} keeps weights that no state_dict has", "average them in your module, and register the average: ElasticCallback(run, ema=…)"
        if isinstance(callback, GradientAccumulationScheduler):
            yield f"{name} changes the samples of a step", "give elastic.loader the batch_size of the whole step"
        if isinstance(callback, OnExceptionCheckpoint) or (isinstance(callback, ModelCheckpoint) and getattr(callback, "save_on_exception", False)):
            yield f"{name} writes a checkpoint of its own when a stop ends the run", "leave it out: the session keeps the state of the last step"
