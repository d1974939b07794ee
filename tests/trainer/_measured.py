"""What ranks of `test_telemetry` run: trainings of which one rank is slow at some place, and what telemetry says of them. Not a test."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer
from tests.support.etcd import await_
from tests.support.worlds import note
from tests.trainer._programs import Net, Points, digest, settings
from trainer import compare, norms
from trainer.fit import fit
from trainer.wire import channel

if TYPE_CHECKING:
    from pathlib import Path

FILE = "telemetry.jsonl"


class Place:
    """Sleeps where it is told to, on the rank that it is told to.

    Args:
        where: data, forward, backward, optimizer, before.
    """

    def __init__(self, where: str, rank: int, seconds: float) -> None:
        self.where, self.rank, self.seconds = where, rank, seconds

    def reached(self, where: str) -> None:
        if where == self.where and (not dist.is_initialized() or dist.get_rank() == self.rank):
            time.sleep(self.seconds)


class _Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.place.reached("backward")
        return grads[0], None


class SlowNet(Net):
    def __init__(self, place: Place, **net: Any) -> None:
        super().__init__(dropout=0.0, **net)
        self._place = place

    @torch.compiler.disable
    def _sleep(self, x: Tensor) -> Tensor:
        self._place.reached("forward")
        return _Sleepy.apply(x, self._place)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._sleep(torch.relu(self.norm(self.first(x)))))


class SlowPoints(Points):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % 24 == 0:  # the order is not shuffled: once a step
            self._place.reached("data")
        return super().__getitem__(index)


class SlowSGD(torch.optim.SGD):
    place: Place

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.place.reached("optimizer")
        return found


def measured(
    folder: Path,
    *,
    max_steps: int = 10,
    where: str = "",
    slow_rank: int = 1,
    seconds: float = 0.1,
    how: str = "run.backward",
    every_s: float = 0.5,
    sets: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
    wrap: dict[str, Any] | None = None,
    microbatch: int | None = None,
) -> dict[str, Any]:
    """A training of one shape or another."""
    run = trainer.join(seed=3, settings=settings(folder, **{"telemetry_file": folder / FILE, "telemetry_every_s": every_s, **(sets or {})}))
    place = Place(where, slow_rank, seconds)
    torch.manual_seed(0)
    module: Any = SlowNet(place, **(net or {}))
    if how == "compiled":
        module = torch.compile(module, backend="eager")
    model: Any = run.wrap(module, **(wrap or {}))
    SlowSGD.place = place
    optimizer = SlowSGD(model.parameters(), lr=0.05)
    run.register(model=model, optimizer=optimizer)
    loader = run.loader(SlowPoints(place), batch_size=24, microbatch=microbatch, shuffle=False)
    loop = _accumulated if how == "accumulate" else _stepped
    losses = loop(run, model, optimizer, loader, max_steps, how, place)
    return {"losses": losses, "digest": digest(model.module), "step": run.step}


def _accumulated(run: Any, model: Any, optimizer: Any, loader: Any, max_steps: int, *_: Any) -> list[float]:
    """This rank's mean loss of each step."""
    losses = []
    for turn in run.accumulate(loader, max_steps=max_steps):
        optimizer.zero_grad()
        total = weights = 0.0
        for micro in turn:
            x, y = micro.batch
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            total += micro.weight * loss.item()
            weights += micro.weight
        optimizer.step()
        if weights:  # else it has no samples in this step
            losses.append(total / weights)
    return losses


def _stepped(run: Any, model: Any, optimizer: Any, loader: Any, max_steps: int, how: str, place: Place) -> list[float]:
    losses = []
    for x, y in run.steps(loader, max_steps=max_steps):
        place.reached("before")
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if how == "loss.backward":
            loss.backward()
        elif how == "scale":
            run.scale(loss).backward()
        else:
            run.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def sick(folder: Path, *, telemetry: bool = True) -> dict[str, Any]:
    """Losses that are no numbers, and values of the script's own; every step in a window of its own."""
    run = trainer.join(settings=settings(folder, telemetry=telemetry, telemetry_file=folder / FILE, telemetry_every_s=0.1))
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.register(model=model, optimizer=optimizer)
    factors = {2: float("nan"), 4: float("inf")}
    refused = []
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=6):
        number = run.step + 1
        optimizer.zero_grad()
        run.backward(nn.functional.cross_entropy(model(x), y) * factors.get(number, 1.0))
        if number not in factors:
            optimizer.step()
        run.log(accuracy=torch.tensor(number / 10), huge=1e308, tokens=10**400, **{f"value_{index}": index for index in range(60)})
        if number == 1:
            wrong: list[dict[str, Any]] = [{"text": "x"}, {"vector": torch.ones(2)}, {"a b": 1}, {"a" * 65: 1}]
            for values in wrong:
                try:
                    run.log(**values)
                except trainer.SetupError as error:
                    refused.append(str(error))
    return {"refused": refused}


def ends(folder: Path, *, how: str) -> dict[str, Any]:
    """Ends in one way or another, or leaves its loop and begins another."""
    run = trainer.join(seed=3, settings=settings(folder, telemetry_file=folder / FILE, telemetry_every_s=0.1))
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    loader = run.loader(Points(), batch_size=24)
    for _ in range(3):
        for turn in run.accumulate(loader, epochs=9):
            if run.step % 8 == 5 and how == "leaves before it has done anything":
                break
            for micro in turn:
                x, y = micro.batch
                run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            time.sleep(0.02)
            if how == "evaluates":
                run.stepped()
                time.sleep(0.1)
            if run.step >= 12 and how == "fails":
                atexit._run_exitfuncs()  # a script's process does; a rank of tests is a fork, whose end is another
                raise RuntimeError("the test wants it")
            if run.step % 8 == 5:
                break
    run.finish()
    return {"step": run.step}


def deaf(folder: Path) -> dict[str, Any]:
    """Trains under an agent that reads nothing from the first layout to step 50."""
    theirs, ours = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.environ[channel.FD_VARIABLE] = str(ours.detach())
    reads = threading.Event()
    heard: list[channel.Message] = []
    values = settings(folder, telemetry_every_s=0.1).model_dump(mode="json")

    def serve() -> None:
        inbox = channel.Inbox()
        channel.send(theirs, channel.Welcome(generation=5, settings=values))
        while not any(isinstance(message, channel.Describe) for message in heard):
            heard.extend(channel.receive(theirs, inbox))
        channel.send(theirs, channel.Buffers(count=0, why="the test has none"))
        reads.wait()
        while True:
            heard.extend(channel.receive(theirs, inbox))

    threading.Thread(target=serve, daemon=True).start()
    run = trainer.join()
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    took = []
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=60):
        took.append(time.monotonic())
        if run.step + 1 == 50:
            reads.set()
        run.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        time.sleep(0.05)

    def windows() -> list[dict[str, Any]]:
        return [message.window for message in heard if isinstance(message, channel.Telemetry)]

    await_(lambda: windows() and windows()[-1]["last"] == 60, within=30, what="the last window")
    return {"windows": windows(), "longest": max(later - earlier for earlier, later in pairwise(took[2:]))}


def gathered(folder: Path, *, max_steps: int, every_s: float, step_seconds: float = 0.0, leave_every: int = 0, off: int = -1) -> dict[str, Any]:
    """Ranks compared as often as `every_s` says; notes each step."""
    compare.EVERY_S = every_s  # type: ignore[misc]
    telemetry = int(os.environ["RANK"]) != off
    run = trainer.join(seed=3, settings=settings(folder, telemetry=telemetry, telemetry_file=folder / FILE, telemetry_every_s=0.3))
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    loader = run.loader(Points(), batch_size=24)
    while run.step < max_steps:
        for x, y in run.steps(loader, epochs=99):
            optimizer.zero_grad()
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            note(folder, step=run.step + 1)
            time.sleep(step_seconds * (1 + run.rank))
            if run.step + 1 >= max_steps or (leave_every and (run.step + 1) % leave_every == 0):
                break
    run.finish()
    return {"step": run.step}


def norm_of_each_step(folder: Path, *, logs: bool = False, clip: float = 0.0, cost: float = 1.0) -> dict[str, Any]:
    """The norm as the script finds it, before it clips. With cost 1.0 there is one in every step."""
    norms.COST = cost  # type: ignore[misc]
    run = trainer.join(seed=3, settings=settings(folder, telemetry_file=folder / FILE, telemetry_every_s=60))
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    found = []
    for turn in run.accumulate(run.loader(Points(), batch_size=24, microbatch=5), max_steps=8):
        for micro in turn:
            x, y = micro.batch
            run.backward(nn.functional.cross_entropy(model(x), y))
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        if logs:
            run.log(grad_norm=7.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    return {"found": found}


def fitted(folder: Path, *, clip: float) -> dict[str, Any]:
    """`fit` with clipping."""
    run = trainer.join(seed=3, settings=settings(folder, telemetry_file=folder / FILE, telemetry_every_s=60))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[float] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loader = run.loader(Points(), batch_size=24, microbatch=5)
    fit(
        loss_of,
        run=run,
        model=model,
        optimizer=optimizer,
        loader=loader,
        max_steps=6,
        clip=clip,
        tell_every=1,
        callbacks=[lambda progress: told.extend((progress.gradient_norm, progress.loss))],
    )
    return {"norms": told[::2], "losses": told[1::2]}


def scaled(folder: Path) -> dict[str, Any]:
    """With a GradScaler, whose factor must not be seen in losses and norms."""
    norms.COST = 1.0  # type: ignore[misc]
    run = trainer.join(seed=3, settings=settings(folder, telemetry_file=folder / FILE, telemetry_every_s=60))
    model = run.wrap(Net(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.register(model=model, optimizer=optimizer, scaler=scaler)
    losses, lengths = [], []
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if run.step % 2:
            scaler.scale(run.scale(loss)).backward()
        else:
            run.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        lengths.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {"losses": losses, "norms": lengths}
