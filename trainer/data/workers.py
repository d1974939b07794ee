"""The processes that read ahead: how a torch DataLoader is built, begun and ended here.

Owns: the options passed on to DataLoader, and that its workers outlive signals meant for the training process, but not that process. Must
not: decide what is read.

A stop is often sent to a whole process group or service. The training process then finishes its step and keeps its state; readers that died
of the same signal would turn that into a crash. So they hear SIGTERM and its like and go on, and the training process ends them itself.
"""

from __future__ import annotations

import atexit
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypedDict

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

GRACE: Final = 2.0
"""Seconds that the readers of a pass have to finish the batches they are at, when nobody wants them any more."""
OUTLIVED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class LoaderOptions(TypedDict, total=False):
    """What is passed on to torch's DataLoader, with its defaults where nothing else is said.

    Attributes:
        workers: processes that read ahead; 0 reads in the training process.
        collate_fn: makes a batch of a list of samples.
        pin_memory: whether batches lie in page-locked memory.
        prefetch_factor: microbatches that each worker is ahead.
        persistent_workers: whether workers stay from epoch to epoch; yes if there are any. Those of a stream never do.
        worker_init_fn: called with the worker's number in each.
        timeout: seconds to wait for a batch, 0 for ever.
        multiprocessing_context: how workers are started.
    """

    workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool | None
    worker_init_fn: Callable[[int], None] | None
    timeout: float
    multiprocessing_context: str | BaseContext | None


def collate_of(options: LoaderOptions) -> Callable[[list[Any]], Any]:
    """The function that makes batches."""
    return options.get("collate_fn") or default_collate


def build(dataset: Any, user_dataset: Any, options: LoaderOptions, *, persistent: bool, **how: Any) -> DataLoader[Any]:
    """A DataLoader over `dataset`, which hands out finished batches and stands in for `user_dataset`."""
    workers = options.get("workers", 0)
    return DataLoader(
        dataset,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=options.get("pin_memory", False),
        prefetch_factor=options.get("prefetch_factor"),
        persistent_workers=persistent,
        worker_init_fn=_Begin(user_dataset, options.get("worker_init_fn")),
        timeout=options.get("timeout", 0),
        multiprocessing_context=options.get("multiprocessing_context") if workers else None,
        generator=torch.Generator(),  # it draws a number for each pass, and not from the generator that the user's code draws from
        **how,
    )


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a pass, and with it the workers if there are none. No signal reaches them before they can hear it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTLIVED)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if getattr(iterator, "_workers", None):
        _begun.add(iterator)
        # Anew each time: what is registered last runs first, and torch's own, which may wait for ten seconds a worker, not before this.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    return iterator


def end(iterator: Iterator[Any]) -> None:
    """End the workers of a pass: at once if they wait, killed if they are still at something after GRACE."""
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return
    # torch waits five seconds for each, sends SIGTERM, which they do not heed, and waits again. It does so in the right order, after its thread
    # that reads from them has ended, and it is there that the patience ends. A thread of ours could not: none begins while Python ends.
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.join = partial(_join, worker, deadline)
    with suppress(RuntimeError):  # that a worker was killed
        iterator._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - what its __del__ does, but now
    _begun.discard(iterator)


def _join(worker: BaseProcess, deadline: float, timeout: float | None = None) -> None:
    """Wait for a worker until the deadline, then kill it. The timeout is torch's, and longer."""
    join = type(worker).join
    join(worker, max(0.0, deadline - time.monotonic()))
    if worker.is_alive():
        worker.kill()
        join(worker, timeout)


_begun: weakref.WeakSet[Iterator[Any]] = weakref.WeakSet()


def _end_all() -> None:
    for iterator in list(_begun):
        end(iterator)


def _as_is(batch: Any) -> Any:
    return batch


def _survive(_number: int, _frame: object) -> None:
    """Do nothing. Unlike SIG_IGN this is not inherited by what a dataset starts."""


class _Begin:
    """The first thing that runs in a worker."""

    def __init__(self, user_dataset: Any, user_init: Callable[[int], None] | None) -> None:
        self._user_dataset = user_dataset
        self._user_init = user_init

    def __call__(self, worker: int) -> None:
        for number in OUTLIVED:
            signal.signal(number, _survive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTLIVED)
        info = get_worker_info()
        assert info is not None, "called by a worker alone"
        object.__setattr__(info, "dataset", self._user_dataset)  # read-only, and ours is not the one that the user knows
        if self._user_init is not None:
            self._user_init(worker)
