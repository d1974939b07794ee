"""What this rank wants, what all ranks want together, and why.

Owns: asking signals and the keeper, the flags of all wrapped models, the collective where no gradient carries them. Must not: act on the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainer.flag import NOTHING, Reader, Signals, Wish
from trainer.keeper import NOTHING_ASKED, Keeper
from trainer.world import World
from trainer.wrap import ElasticDDP

_USUAL: Final = {(due, unready): Wish(snapshot=due, unready=unready) for due in (False, True) for unready in (False, True)}


class Agreement:
    """All ranks have one, and ask it at the same places.

    Args:
        world: the ranks.
        keeper: asked what it wants.
        unready: asked whether this rank could not snapshot yet.

    Attributes:
        models: wrapped modules, whose gradients carry the flag.
        due: a snapshot is due, says rank 0.
        reason, seconds: of the last stop or checkpoint that this rank was asked for; seconds 0 if nobody named any.
    """

    def __init__(self, world: World, keeper: Keeper, unready: Callable[[], bool]) -> None:
        self.models: Final[list[ElasticDDP]] = []
        self.due = False
        self.reason = "another rank was asked to"
        self.seconds = 0.0
        self._world = world
        self._keeper = keeper
        self._unready = unready
        self._reader = Reader(world.size, late=world.device.type == "cuda")
        self._signals = Signals()
        self._wanted = NOTHING

    def listen(self) -> None:
        """Hear signals from now on, or again."""
        self._signals.listen()

    def close(self) -> None:
        """Hear signals no longer."""
        self._signals.close()

    def wish(self) -> Wish:
        """What this rank wants now; asked in each backward pass."""
        asked, signals = self._keeper.look(), self._signals
        if asked is not NOTHING_ASKED:
            self.reason, self.seconds = asked.reason, asked.seconds
            self._wanted |= Wish(stop=asked.stop, checkpoint=asked.checkpoint)
        if signals.stop and not self._wanted.stop:
            self.reason = "SIGTERM"
            self._wanted |= Wish(stop=True)
        if signals.checkpoint:
            self._wanted |= Wish(checkpoint=True)
        # Most often nobody wants anything, and this runs in every step.
        usual = _USUAL[self.due, self._unready()]
        return usual if self._wanted is NOTHING else self._wanted | usual

    def ask(self) -> Wish:
        """What all want now. Collective."""
        return Wish.of(self._world.largest(self.wish().values))

    def of_step(self) -> Wish:
        """What all said in the step that ends, or, late, in the one before. Asks them if there was no backward pass to say it in. Collective."""
        averages = [average for model in self.models if (average := model.flag.take()) is not None]
        return self._reader.read(averages) if averages else self.ask()

    def had_backward(self) -> bool:
        """Whether there was a backward pass since the last step's end."""
        return any(model.flag.parameter.grad is not None for model in self.models)

    def skip(self) -> None:
        """This step's flag is not read."""
        for model in self.models:
            model.flag.take()

    def served(self, *, checkpoint: bool) -> None:
        """All have just made a snapshot, as was agreed; `checkpoint`: this rank need not ask for one on disk any more."""
        self._reader.served()
        if checkpoint:
            self._signals.checkpoint = False
            self._wanted = Wish(stop=True) if self._wanted.stop else NOTHING
