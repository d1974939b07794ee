"""What an agent and its workers that use `trainer` say to each other, in the generation at hand.

Owns: who has said what, who waits for an answer, and the answers. Must not: do anything that takes long: the channels' thread hears all workers. What
does is handed on as an errand, to the state thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from elasticd.agent.channels import Channels
from elasticd.observability.redaction import hidden
from trainer.wire import channel

if TYPE_CHECKING:
    import socket

    from elasticd.rendezvous.records import GenerationRecord
    from trainer.wire.channel import Message

TOLD_MAX: Final = 2000
"""Characters of what a worker says that are told to others."""

log = structlog.get_logger("elasticd.agent.state")


class Listener(Protocol):
    """Who else hears what workers say."""

    def heard(self, local_rank: int, message: Message) -> None:
        """In the channels' thread: it may not block."""


class Errands(Protocol):
    """Who does what workers ask for. Each is called in the channels' thread, and may not block."""

    def make_room(self, at_hand: Round, local_rank: int, header: str, size: int) -> None:
        """A worker described its state: it is to be answered with buffers."""

    def persist(self, at_hand: Round, generation: int, step: int) -> None:
        """A snapshot that was to be written is whole."""


@dataclass(slots=True)
class Round:
    """The generation at hand.

    Attributes:
        index: of the buffer to begin with; -1: at the very beginning.
        ready: the state is there, or there is none to be had and `failure` says why.
        hello: local ranks of workers that wait for their welcome.
        stopped: local rank -> what it said when it stopped as asked.
        unfit: why this node cannot take part, as a worker found out.
        asked_at: when a checkpoint was last asked for by the clock.
        owed: why a checkpoint was asked for when no worker could hear it yet; the first that is welcomed is told.
    """

    record: GenerationRecord
    node_rank: int
    index: int = -1
    ready: bool = False
    failure: str = ""
    hello: list[int] = field(default_factory=list)
    stopped: dict[int, channel.Stopped] = field(default_factory=dict)
    unfit: channel.Unfit | None = None
    asked_at: float = field(default_factory=time.monotonic)
    owed: str = ""


class Conversation:
    """See the module. Every method may be called from any thread.

    Args:
        errands: see `Errands`.
        welcome: what a worker of this round is told first, and the descriptors that go with it.
        listener: see `Listener`.
    """

    def __init__(self, errands: Errands, welcome: Callable[[Round], tuple[Mapping[str, Any], Sequence[int]]], listener: Listener | None = None) -> None:
        self._errands = errands
        self._welcome_of = welcome
        self._listener = listener
        self._lock = threading.RLock()
        self._round: Round | None = None
        self._ring: Callable[[], None] = lambda: None
        self._channels = Channels(self._heard)

    def call(self, ring: Callable[[], None]) -> None:
        """What to call, from any thread, when `failure` or `difference` is to be looked at."""
        self._ring = ring

    @property
    def at_hand(self) -> Round | None:
        """The generation at hand, or the last; None before the first."""
        with self._lock:
            return self._round

    def begin(self, record: GenerationRecord, node_rank: int) -> Round:
        """A generation. Its workers wait for their welcome until `ready`."""
        made = Round(record=record, node_rank=node_rank)
        with self._lock:
            self._round = made
        return made

    def ready(self, at_hand: Round, *, index: int = -1, failure: str = "") -> None:
        """The state to begin with is there, or there is none to be had: answer those that wait."""
        with self._lock:
            at_hand.index, at_hand.failure, at_hand.ready = index, failure, True
            waiting, at_hand.hello = at_hand.hello, []
        for local_rank in waiting:
            self._welcome(at_hand, local_rank)
        if failure:
            self._ring()

    @property
    def failure(self) -> str:
        """Why the generation at hand cannot begin here; "" while it can."""
        with self._lock:
            return self._round.failure if self._round else ""

    @property
    def difference(self) -> str:
        """In what this node differs from the others, as one of its workers found out; "" if in nothing."""
        with self._lock:
            unfit = self._round.unfit if self._round else None
            return hidden(f"{unfit.part}: {unfit.detail}", TOLD_MAX) if unfit else ""

    def stopped_as_asked(self, local_rank: int) -> bool:
        """Whether that worker said that it stops because somebody asked it to."""
        with self._lock:
            return self._round is not None and local_rank in self._round.stopped

    def open(self, local_rank: int) -> socket.socket:
        """The worker's end of its conversation, to be handed on and closed."""
        return self._channels.open(local_rank)

    def drain(self) -> None:
        """Take in what workers have said up to now."""
        self._channels.drain()

    def end(self) -> None:
        """The workers are gone."""
        self._channels.end()

    def close(self) -> None:
        """End every conversation and the thread."""
        self._channels.close()

    @property
    def listening(self) -> tuple[int, ...]:
        """Local ranks of the workers that use `trainer` and have not hung up."""
        return self._channels.listening

    def ask(self, flag: str, reason: str, seconds: float = 0.0) -> tuple[int, ...]:
        """Have a flag raised (`wire.channel.Raise`); local ranks of the workers that heard it."""
        message = channel.Raise(flag=flag, reason=reason, seconds=seconds)
        return tuple(rank for rank in self._channels.listening if self._channels.say(rank, message))

    def owe_checkpoint(self, reason: str) -> None:
        """Have one of the generation at hand as soon as there is somebody to ask."""
        with self._lock:
            if self._round is not None:
                self._round.owed = reason

    def lend(self, local_rank: int, answer: channel.Buffers, fds: Sequence[int] = ()) -> None:
        """Answer a worker that described its state."""
        self._channels.say(local_rank, answer, fds)

    # --- the channels' thread --------------------------------------------------------------------------------------------

    def _heard(self, local_rank: int, message: Message) -> None:
        at_hand = self.at_hand
        if at_hand is None:
            return
        if self._listener is not None:
            self._listener.heard(local_rank, message)
        number = at_hand.record.number
        match message:
            case channel.Hello():
                self._hello(at_hand, local_rank)
            case channel.Describe(header=header, size=size):
                self._errands.make_room(at_hand, local_rank, header, size)
            case channel.Restored(step=step, digest=digest, seconds=seconds):
                log.info("state_restored", generation=number, local_rank=local_rank, step=step, digest=digest, seconds=seconds)
            case channel.Sealed(persist=True) as sealed:
                self._errands.persist(at_hand, sealed.generation, sealed.step)
            case channel.Stopped() as stopped:
                at_hand.stopped[local_rank] = stopped
                log.info("worker_stopped", generation=number, local_rank=local_rank, step=stopped.step, saved=stopped.saved)
            case channel.Unfit() as unfit:
                log.error("node_unfit", generation=number, part=unfit.part, detail=unfit.detail)
                at_hand.unfit = unfit
                self._ring()
            case channel.Telemetry() | channel.Ranks():
                pass  # the listener's
            case _:
                log.warning("message_out_of_place", local_rank=local_rank, kind=message.kind)

    def _hello(self, at_hand: Round, local_rank: int) -> None:
        with self._lock:
            if not at_hand.ready:
                at_hand.hello.append(local_rank)
                return
        self._welcome(at_hand, local_rank)

    def _welcome(self, at_hand: Round, local_rank: int) -> None:
        if at_hand.failure:
            return  # its end is near
        told, fds = self._welcome_of(at_hand)
        self._channels.say(local_rank, channel.Welcome(**told), list(fds))
        with self._lock:
            reason, at_hand.owed = at_hand.owed, ""
        if reason:
            self._channels.say(local_rank, channel.Raise(flag="checkpoint", reason=reason))
