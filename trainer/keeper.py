"""Who keeps the state of a run: what a session asks of an agent, or, where there is none, of `trainer.alone`.

Owns: the questions. Must not: answer them, or import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainer.settings import Settings
from trainer.wire.channel import Ranks, Telemetry
from trainer.wire.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """Buffers for snapshots, as `trainer.snapshot.Snapshots` takes them. Whoever is given them closes the descriptors.

    Attributes:
        board: descriptor of the control page.
        buffers: descriptors of the buffers.
        local_rank, local_world: whose share of an image this process copies, of how many.
    """

    board: int
    buffers: tuple[int, ...]
    local_rank: int
    local_world: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """A state to go on from.

    Attributes:
        lent: where it lies.
        index: of the buffer that it is in.
        step: of it.
        layout: of it.
    """

    lent: Lent
    index: int
    step: int
    layout: Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the keeper wants this rank to ask all ranks for.

    Attributes:
        stop: to snapshot and end.
        checkpoint: to snapshot, and have it written to disk.
        reason: for people.
        seconds: after which nobody waits any longer; 0: not said.
    """

    stop: bool = False
    checkpoint: bool = False
    reason: str = ""
    seconds: float = 0.0


NOTHING_ASKED = Asked()


class Keeper(Protocol):
    """Keeps states. All ranks have one of the same kind; its methods are called from one thread."""

    @property
    def settings(self) -> Settings:
        """As they count on this node."""

    @property
    def generation(self) -> int:
        """The number that snapshots bear."""

    @property
    def beginning(self) -> Beginning | None:
        """The state to go on from; None to begin at the beginning."""

    @property
    def skip(self) -> int:
        """Steps whose data are left out before the first: they led to a divergence."""

    @property
    def lasting(self) -> bool:
        """It outlives this process, so that a snapshot is of use before it is on disk."""

    def look(self) -> Asked:
        """What it wants by now; never waits. What was wanted once is told once.

        Raises:
            ChannelError: it is gone.
        """

    def describe(self, layout: Layout) -> None:
        """The layout of states from now on; what comes of it is `lend`."""

    def lend(self, *, wait: float = 0.0) -> Lent | None:
        """Buffers for the layout described last, once; without any in it if there will be none; None if that is not known within `wait` seconds."""

    def restored(self, step: int, digest: str, seconds: float) -> None:
        """All ranks have taken over the beginning, and have the same state."""

    def sealed(self, step: int, index: int) -> None:
        """The snapshot of that step is whole in that buffer, and somebody wants it on disk."""

    def stopped(self, step: int, *, saved: bool, reason: str) -> None:
        """This process ends at that step; `saved`: nothing is lost. Returns when it may."""

    def unfit(self, part: str, detail: str) -> None:
        """This node cannot take part: it differs from the others in `part`."""

    def tell(self, message: Telemetry | Ranks, *, wait: float = 0.0) -> bool:
        """Pass on what steps came to, if there is room for it at once, or within `wait` seconds; whether there was."""

    def close(self) -> None:
        """The run is over. Returns when what it was given is safe."""
