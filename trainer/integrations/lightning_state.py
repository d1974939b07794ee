"""What of Lightning's own state goes into a session's: its counters, and what other callbacks remember.

Owns: how both are read between two steps, where Lightning itself never saves, and put back. Must not: decide when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

_PROGRESS: Final = (
    "epoch_progress",
    "epoch_loop.batch_progress",
    "epoch_loop.scheduler_progress",
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.val_loop.batch_progress",
)
_SCALAR: Final = "elasticd.scalar"


class Loops:
    """Lightning's counters, as they are when a step has been counted.

    Lightning restores a run that it saved in one of its own hooks; between two steps it has none. In the middle of an epoch its loops are told that
    they restart, and find themselves after a whole turn. At the beginning of one they are not: they just go on to the next epoch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """All plain numbers."""
        loop: Any = self._trainer.fit_loop
        state = {name: attrgetter(name)(loop).state_dict() for name in _PROGRESS}
        in_epoch = state["epoch_loop.batch_progress"]["current"]["ready"] > 0 and loop.epoch_progress.current.ready > loop.epoch_progress.current.processed
        validating = self._trainer.validating and not self._trainer.sanity_checking
        if in_epoch:
            _close(state["epoch_loop.batch_progress"])
        else:
            _start_of_epoch(state)
        _at_validation(state["epoch_loop.val_loop.batch_progress"], pending=validating)
        return {"progress": state, "in_epoch": in_epoch, "stepped": loop.epoch_loop._batches_that_stepped}  # noqa: SLF001

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the class."""
        loop: Any = self._trainer.fit_loop
        epoch_loop = loop.epoch_loop
        epoch_loop._batches_that_stepped = state["stepped"]  # noqa: SLF001 - what loggers number by; Lightning's own files have it too
        if state["in_epoch"]:
            more = {"state_dict": {}, "epoch_loop.state_dict": {"_batches_that_stepped": state["stepped"]}}
            for name in ("epoch_loop.automatic_optimization", "epoch_loop.manual_optimization", "epoch_loop.val_loop"):
                more[f"{name}.state_dict"] = {}
            loop.load_state_dict({**state["progress"], **more})
            return
        for name in _PROGRESS:
            attrgetter(name)(loop).load_state_dict(state["progress"][name])


def _close(progress: dict[str, Any]) -> None:
    """The batch is completed."""
    for tracker in (progress["total"], progress["current"]):
        tracker["completed"] = tracker["processed"] = tracker["started"] = tracker["ready"]


def _start_of_epoch(state: dict[str, Any]) -> None:
    """No epoch is under way: the one that has just begun has not."""
    epoch = state["epoch_progress"]
    for tracker in (epoch["total"], epoch["current"]):
        tracker["ready"] = tracker["started"] = tracker["completed"] = tracker["processed"]


def _at_validation(progress: dict[str, Any], *, pending: bool) -> None:
    """Make Lightning validate from the beginning if it was about to, and not at all if it was not: it goes by these differences."""
    total, current = progress["total"], progress["current"]
    done = total["completed"]
    total.update(ready=done + pending, started=done + pending, processed=done)
    if pending:
        current.update(ready=0, started=0, processed=0, completed=0)


class Callbacks:
    """The states of other callbacks, as rank 0 has them: a metric that is not reduced differs from rank to rank, and a state must not."""

    def __init__(self, own: Callback, trainer: Any) -> None:
        self._own = own
        self._trainer = trainer
        self._stale = False
        self._shared = self._collect()

    def changed(self) -> None:
        """Something may have; all ranks call it alike."""
        self._stale = True

    def share(self) -> None:
        """Collective, where something may have changed."""
        if self._stale:
            self._stale = False
            self._shared = self._trainer.strategy.broadcast(self._collect())

    def state_dict(self) -> dict[str, Any]:
        """By Lightning's own keys."""
        return self._shared

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each its own. One that is new keeps what it has."""
        self._shared = dict(state)
        for callback in self._others():
            if callback.state_key in state:
                callback.load_state_dict(_unscalars(state[callback.state_key]))

    def _collect(self) -> dict[str, Any]:
        states = ((callback.state_key, callback.state_dict()) for callback in self._others())
        return {key: _scalars(state) for key, state in states if state}

    def _others(self) -> Iterable[Any]:
        return (callback for callback in self._trainer.callbacks if callback is not self._own)


def _scalars(value: Any) -> Any:
    """Scores are tensors of one number. As numbers they do not change the layout of the state when they come and go."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return {_SCALAR: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        return {key: _scalars(item) for key, item in value.items()}
    return value


def _unscalars(value: Any) -> Any:
    if isinstance(value, dict):
        if _SCALAR in value:
            return torch.tensor(value[_SCALAR], dtype=getattr(torch, value["dtype"]))
        return {key: _unscalars(item) for key, item in value.items()}
    return value
