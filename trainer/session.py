"""What a training script talks to: one session for each process, from `join` to `finish`.

Owns: the loop from one step's end to the next, and who is asked what in which order there. Must not: decide anything that can be a function
elsewhere (when to snapshot: `interval`; what a flag says: `flag`; what a state is: `state`), or know how agents and files work.

What happens at the end of a step, on all ranks alike::

    step + 1, the loader's cursor moves
    read what all ranks said in this step's gradient bucket (`flag`)       nothing was said, as there was no backward: ask them now
    stop?         snapshot, tell the keeper, raise Stopped
    checkpoint?   snapshot, and tell the keeper to write it
    snapshot?     snapshot

In between, in each backward pass, this rank says what it wants: a signal, the keeper's word, and on rank 0 the cadence of snapshots.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer import rng
from trainer.agent import AgentKeeper, inherited_socket
from trainer.agreement import Agreement
from trainer.alone import AloneKeeper
from trainer.data import ElasticLoader, Microbatch, Step
from trainer.data.workers import LoaderOptions
from trainer.errors import SetupError, StateError, Stopped
from trainer.flag import Wish
from trainer.keeper import Keeper
from trainer.saving import Resumed, Saver
from trainer.settings import Settings, from_environment, merge
from trainer.stopwatch import COMMUNICATION, OTHER
from trainer.telemetry import Telemetry
from trainer.world import Place, World, choose_device, prepare_environment
from trainer.wrap import ElasticDDP, wrap

STOP_SECONDS: Final = 30.0
"""How long a stop waits for buffers if nobody says otherwise."""
SLACK: Final = 1e-9
"""By how much a weight may miss an even share and still be one."""


def join(*, seed: int = 0, settings: Settings | None = None, device: torch.device | str | None = None) -> Session:
    """Take this process's place: of an agent that started it, else torchrun's, else alone.

    Args:
        seed: of the run: of the order of the data, and of all random numbers.
        settings: for a run without an agent; None takes them from the environment (ELASTICD_TRAINER_…). An agent's own count before these.
        device: to train on; None for this local rank's GPU if there is one, else the CPU.

    Raises:
        SetupError: variables, settings or the device make no sense.
        ChannelError: the agent does not answer.
    """
    place = Place.read(os.environ)
    sock = inherited_socket(os.environ)
    agent = AgentKeeper(sock, rank=place.rank, local_rank=place.local_rank, local_world=place.local_world_size) if sock is not None else None
    if agent is not None:
        settings = agent.settings
    elif settings is None:
        settings, _origins = merge([("environment", from_environment(os.environ))])
    prepare_environment(settings, os.environ)
    world = World.connect(place, choose_device(device, place), settings)
    rng.seed_all(seed)
    return Session(world, agent or AloneKeeper(world, settings), seed=seed)


class Session:
    """One process's part of a run. Made by `join`; a context manager, which finishes if the block ends without an error.

    Attributes:
        rank, world_size, local_rank, local_world_size: this process among all, and on its node.
        device: to train on.
        is_main: rank 0, which prints and draws.
        seed: of the run.
        settings: as they count.
        step: optimizer steps done.
    """

    def __init__(self, world: World, keeper: Keeper, *, seed: int = 0) -> None:
        self.rank: Final = world.rank
        self.world_size: Final = world.size
        self.local_rank: Final = world.place.local_rank
        self.local_world_size: Final = world.place.local_world_size
        self.device: Final = world.device
        self.is_main: Final = world.rank == 0
        self.seed: Final = seed
        self.settings: Final = keeper.settings
        self._world = world
        self._keeper = keeper
        self._telemetry = Telemetry(world, keeper)
        self._saver = Saver(keeper, world, self._telemetry.watch)
        self._resumed = Resumed(keeper.beginning) if keeper.beginning is not None else None
        self._data: dict[str, Any] = self._resumed.data if self._resumed is not None else {}
        self.step: int = self._resumed.step if self._resumed is not None else 0
        self._first = self.step
        self._skip = keeper.skip
        self._loader: ElasticLoader | None = None
        self._agreement = Agreement(world, keeper, lambda: self._saver.unready)
        self._agreement.listen()
        self._open: Step | None = None  # handed out, and not counted yet
        self._weight: float | None = None
        self._scaled = True
        self._begun = self._finished = self._stopping = False
        self._since = time.perf_counter()
        atexit.register(self._at_exit)

    @property
    def generation(self) -> int:
        """Number of this world; it grows with each change."""
        return self._keeper.generation

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, counted from 0."""
        return self._loader.epoch if self._loader is not None else int(self._data.get("epoch", 0))

    def wrap(self, module: nn.Module, *, compress: str | None = None, **options: Any) -> ElasticDDP:
        """Make the module train on all ranks together: DistributedDataParallel that also carries the stop flag. Collective.

        Args:
            module: on `device` already.
            compress: "fp16" or "bf16" to send gradients in that type, "none" as they are; None for what is set.
            options: DistributedDataParallel's.

        Raises:
            SetupError: an option or the module would crash or hang later.
        """
        options.setdefault("init_sync", self._resumed is None)  # else all ranks take over the same state anyway, and `agree` looks
        compress, warm_up = self._of_rank_0(compress or self.settings.compress.value, self.settings.warm_up)
        model = wrap(module, self._agreement.wish, compress=compress, warm_up=warm_up, watch=self._telemetry.watch, **options)
        self._agreement.models.append(model)
        self._telemetry.models(self._agreement.models)
        return model

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        microbatch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        sample_rng: bool = True,
        may_change: tuple[str, ...] = (),
        **options: Unpack[LoaderOptions],
    ) -> ElasticLoader:
        """Make a loader over all ranks: see `ElasticLoader`. `batch_size` is of a step, over all of them."""
        return ElasticLoader(
            dataset,
            batch_size=batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            microbatch=microbatch,
            shuffle=shuffle,
            drop_last=drop_last,
            sample_rng=sample_rng,
            may_change=may_change,
            **options,
        )

    def register(self, **parts: Any) -> int:
        """Name what must outlive this process, and give it its state at once if there is one. Before the first step; may be called again.

        Args:
            parts: modules (wrapped, compiled or not), optimizers, schedulers, scalers, averages, tensors, dicts, or whatever else has state_dict
                and load_state_dict. A loader need not be among them; if it is, it is where the state is from then on, not from the first step on.

        Returns:
            Optimizer steps done in that state; 0 to begin at the beginning.

        Raises:
            SetupError: one of them cannot be kept.
            StateError: the state is that of something else; names the first tensor that differs.
        """
        if self._begun:
            raise SetupError("register comes too late: steps have begun", remedy="register everything before the first step")
        for loader in [part for part in parts.values() if isinstance(part, ElasticLoader)]:
            self._position(loader)
        self._telemetry.parts(parts)
        names = self._saver.parts.add({name: part for name, part in parts.items() if not isinstance(part, ElasticLoader)})
        if self._resumed is not None:
            self._saver.parts.restore(names, self._resumed)
        return self.step

    def saved(self, part: str) -> Any:
        """What is no tensor in the state that this run goes on from, for one part; None at the very beginning, and for a part that it has not.

        For scripts that must know something of it before they can make what they register. Not after the first step.
        """
        return self._resumed.rest.get(part) if self._resumed is not None else None

    def steps(self, loader: ElasticLoader, *, epochs: int | None = None, max_steps: int | None = None) -> Iterator[Any]:
        """Yield this rank's batch of each optimizer step that is left. The body makes one step of the optimizer with it.

        Args:
            loader: from `loader`.
            epochs: end after so many, counted from the run's beginning.
            max_steps: end after so many steps, counted likewise. Neither: to the end of this epoch.

        Raises:
            Stopped: this world was asked to stop, and the state is kept.
            SetupError: what the body does cannot give right gradients; a rank has other data than the rest.
            StateError: the state does not fit this loader.
        """
        for step in self._turns(loader, epochs, max_steps):
            if len(step.microbatches) > 1:
                raise SetupError(f"this rank has {len(step.microbatches)} microbatches in a step", remedy="use run.accumulate, or make microbatch larger")
            self._enter(step.microbatches[0])
            yield step.microbatches[0].batch

    def accumulate(self, loader: ElasticLoader, *, epochs: int | None = None, max_steps: int | None = None) -> Iterator[Turn]:
        """Yield a `Turn` for each optimizer step that is left: its microbatches are for the body to iterate, all of them, with `backward` for each.

        Arguments and errors as of `steps`.
        """
        if any(model.static_graph for model in self._agreement.models):
            raise SetupError("static_graph=True and accumulation crash together in torch 2.13", remedy="leave static_graph out, or use run.steps")
        for step in self._turns(loader, epochs, max_steps):
            turn = Turn(self, step)
            yield turn
            if not turn.done:
                raise SetupError(f"the body left some of the {len(turn)} microbatches of step {self.step + 1} out", remedy="iterate all of them")

    def scale(self, loss: Tensor) -> Tensor:
        """The mean loss over this microbatch times its weight and the number of ranks: DDP's mean over ranks is then the mean over the step's samples."""
        weighed = self._weighed(loss)
        self.observe(loss, scaled=False)
        return weighed

    def backward(self, loss: Tensor) -> None:
        """`scale(loss).backward()`. With a GradScaler: `run.backward(scaler.scale(loss))`."""
        weighed = self._weighed(loss)
        self.observe(loss)
        watch = self._telemetry.watch
        watch.backward()
        weighed.backward()
        watch.backward_done()

    def _weighed(self, loss: Tensor) -> Tensor:
        if self._weight is None:
            raise SetupError("a loss is to be weighed outside of a step", remedy="use run.backward in the body of run.steps or run.accumulate")
        self._scaled = True
        scale = self._weight * self.world_size
        return loss if scale == 1.0 else loss * scale

    def observe(self, loss: Tensor, *, scaled: bool = True) -> None:
        """Take note of the mean loss over this microbatch, where neither `scale` nor `backward` is called with it; for telemetry alone.

        Args:
            loss: before it is weighed.
            scaled: what a registered GradScaler makes of it.
        """
        if self._weight is not None:
            self._telemetry.observe(loss, self._weight, scaled=scaled)

    def log(self, **values: float | Tensor) -> None:
        """Say something of this step, for telemetry: `run.log(accuracy=…)`. What is on a GPU is read when it is there, without waiting.

        `loss` replaces the mean that `backward` was given, and `grad_norm` the one that is taken now and then. A name may be given several times.

        Raises:
            SetupError: a value is no number, or a name none.
        """
        self._telemetry.log(values)

    def enter(self, microbatch: Microbatch) -> None:
        """Seed for a microbatch and weigh by it, for loops that iterate `Turn.microbatches` themselves."""
        self._weight = microbatch.weight
        self._scaled = True
        rng.seed_microbatch(self.seed, self.step, microbatch.index)

    def stepped(self) -> None:
        """The optimizer has made the step of this turn: count it now, not at the turn's end. For bodies that go on to something long, such as an evaluation.

        Raises:
            Stopped: see `steps`.
        """
        if self._open is not None:
            step, self._open = self._open, None
            self._boundary(step)

    def poll(self) -> None:
        """Ask all ranks now whether somebody wants to stop. For what takes long and has no steps: evaluation, warm-up. All ranks call it alike.

        In the body of a turn it does nothing before `stepped`: what the optimizer has changed is not a step yet.

        Raises:
            Stopped: somebody does, and the state of the last step is kept.
        """
        if self._open is None:
            self._act(self._agreement.ask())

    def listen(self) -> None:
        """Hear SIGTERM and SIGUSR1 again, where a library has put handlers of its own in the place of ours."""
        self._agreement.listen()

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64. All ranks call it alike."""
        with self._telemetry.watch.during(COMMUNICATION):
            return self._world.total(values)

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank. All ranks call it alike."""
        with self._telemetry.watch.during(COMMUNICATION):
            return self._world.gather(data)

    def _of_rank_0(self, *values: Any) -> list[Any]:
        """What rank 0 has: an operator may have changed a setting between two agents' looks at it, and ranks that differ would hang."""
        return list(json.loads(self.gather(json.dumps(values).encode())[0]))

    def finish(self) -> None:
        """The run is done: its last state is kept. Returns when it is safe. Once is enough; `steps` does it when `epochs` or `max_steps` are reached."""
        if self._finished:
            return
        self._finished = True
        self._telemetry.close()
        if self.step > self._first:
            self._saver.save(self.step, self._cursor(), persist=True, wait=STOP_SECONDS)
        self._end_loader()
        self._keeper.close()
        self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.finish()

    def _turns(self, loader: ElasticLoader, epochs: int | None, max_steps: int | None) -> Iterator[Step]:
        self._begin(loader, past=max_steps is not None and self.step >= max_steps)
        bounded = epochs is not None or max_steps is not None
        while (epochs is None or loader.epoch < epochs) and (max_steps is None or self.step < max_steps):
            for step in self._telemetry.fetched(loader):
                self._open = step
                try:
                    yield step
                except GeneratorExit:  # the body left the loop
                    self._abandon()
                    raise
                self.stepped()
                if max_steps is not None and self.step >= max_steps:
                    break
            if not bounded:
                return
        self.finish()

    def _begin(self, loader: ElasticLoader, *, past: bool) -> None:
        if not self._begun:
            self._begin_all()
        if past or loader is self._loader:
            return
        self._compare_data(loader)  # before the state is looked at, which on a rank with other data does not fit
        self._position(loader)
        self._loader = loader
        self._data = {}
        self._since = time.perf_counter()

    def _position(self, loader: ElasticLoader) -> None:
        if self._data:
            loader.load_state_dict(self._data)
        if self._skip:
            loader.skip(self._skip)
            self._skip = 0

    def _begin_all(self) -> None:
        self._begun = True
        for model in self._agreement.models:
            if not self._saver.parts.knows(model.module):
                raise SetupError("a module is wrapped and not registered: its state would be lost", remedy="run.register(model=model, optimizer=optimizer)")
        if self._resumed is None:
            return
        if left := self._saver.parts.left_over(self._resumed.rest):
            raise StateError(f"the state has {', '.join(left)}, and nothing is registered by that name", remedy="register what the state was made with")
        self._saver.agree(self._resumed)
        self._resumed.close()
        self._resumed = None

    def _compare_data(self, loader: ElasticLoader) -> None:
        """All ranks must read the same data: who differs from most says so, and goes."""
        mine = {"step": self.step, **loader.state_dict()}
        wanted = b"1" if self._telemetry.on else b"0"
        gathered = self._world.gather(wanted + json.dumps(mine, sort_keys=True).encode())
        self._telemetry.begin(self.step, compare=gathered[0].startswith(b"1"))
        known = [one[1:] for one in gathered]
        most, count = Counter(known).most_common(1)[0]
        usual = json.loads(known[0] if Counter(known)[known[0]] == count else most)
        name = next((name for name in mine if mine[name] != usual[name]), "")
        if name:
            detail = f"rank {self.rank} has another {name} than most ranks: {mine[name]}, not {usual[name]}"
            self._keeper.unfit("data", detail)
            raise SetupError(detail, remedy="give all nodes the same data and the same script")

    def _enter(self, microbatch: Microbatch) -> None:
        self.enter(microbatch)
        self._scaled = abs(microbatch.weight * self.world_size - 1.0) < SLACK

    def _leave(self) -> None:
        self._weight = None
        if not self._scaled and self._agreement.had_backward():
            raise SetupError(
                f"loss.backward() in step {self.step + 1}, whose samples cannot be dealt evenly to {self.world_size} ranks: a mean of means is not the mean",
                remedy="call run.backward(loss), or make the loader with drop_last=True and a batch_size that all world sizes divide",
            )

    def _abandon(self) -> None:
        """The body has left the loop within a turn. If it made the step, that counts."""
        step, self._open = self._open, None
        if step is not None and self._agreement.had_backward():
            self._agreement.skip()
            self._count(step)
        self._telemetry.end()

    def _boundary(self, step: Step) -> None:
        self._leave()
        self._saver.cadence.stepped(time.perf_counter() - self._since)
        self._count(step)
        watch = self._telemetry.watch
        watch.switch(COMMUNICATION)
        agreed = self._agreement.of_step()
        watch.switch(OTHER)
        self._saver.advance()
        self._act(agreed)
        self._agreement.due = self._is_due()
        self._telemetry.end()
        self._telemetry.compare(self.step)
        self._since = time.perf_counter()

    def _count(self, step: Step) -> None:
        self._weight = None
        self.step += 1
        self._telemetry.count(self.step)
        assert self._loader is not None
        self._loader.done(step)

    def _act(self, agreed: Wish) -> None:
        if agreed.stop:
            self._stop(persist=agreed.checkpoint)
        if not (agreed.checkpoint or agreed.snapshot) or agreed.unready or self.step == self._first:
            return
        saved = self._saver.save(self.step, self._cursor(), persist=agreed.checkpoint)
        self._agreement.served(checkpoint=agreed.checkpoint and (saved or not self.is_main))

    def _stop(self, *, persist: bool) -> None:
        wait = self._agreement.seconds or self.settings.stop_step_timeout_s or STOP_SECONDS
        saved = self.step == self._first or self._saver.save(self.step, self._cursor(), persist=persist, wait=wait)
        self._telemetry.close()
        self._end_loader()
        self._finished = self._stopping = True
        self._keeper.stopped(self.step, saved=saved, reason=self._agreement.reason)
        raise Stopped(self.step, self._agreement.reason)

    def _is_due(self) -> bool:
        wanted = self.is_main and self._keeper.lasting and self.settings.snapshots
        return wanted and not self._saver.unready and self._saver.cadence.due(self.step + 1)

    def _cursor(self) -> dict[str, Any]:
        return self._loader.state_dict() if self._loader is not None else self._data

    def _end_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _at_exit(self) -> None:
        """A process group that is still there would make NCCL complain; but only where all is well do the others end theirs too."""
        if not self._finished:  # the script failed, or left its loop for good
            with suppress(RuntimeError):  # it may be the device that has failed
                self._telemetry.close()
        if self._finished and dist.is_initialized() and not self._stopping:
            self._world.close()


class Turn:
    """One optimizer step of `Session.accumulate`: iterate its microbatches once, each with forward and `run.backward`.

    Attributes:
        epoch, offset, samples: see `trainer.data.Step`.
        done: all microbatches were gone through, or the caller saw to it.
    """

    def __init__(self, session: Session, step: Step) -> None:
        self._session = session
        self._step = step
        self.epoch: Final = step.epoch
        self.offset: Final = step.offset
        self.samples: Final = step.samples
        self.done = False

    def __len__(self) -> int:
        """Microbatches of this rank."""
        return len(self._step.microbatches)

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """All of them, for loops that do by themselves what iterating this does: `Session.enter`, no_sync for all but the last, weighing the loss."""
        self.done = True
        return self._step.microbatches

    def __iter__(self) -> Iterator[Microbatch]:
        """Yield them; gradients are reduced over ranks with the last one."""
        session = self._session
        for index, microbatch in enumerate(self._step.microbatches):
            last = index == len(self) - 1
            session._enter(microbatch)  # noqa: SLF001 - a part of the session with a name of its own
            with ExitStack() as stack:
                for model in () if last else session._agreement.models:  # noqa: SLF001
                    stack.enter_context(model.no_sync())
                yield microbatch
            if not last:
                session._leave()  # noqa: SLF001
        self.done = True
