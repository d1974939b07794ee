"""Random numbers that depend on what they are for, and on nothing else: no state of a generator is ever kept, sent or restored.

Owns: how torch, NumPy and `random` are seeded for a microbatch and for a sample. Must not: keep a generator, or know of ranks and worlds.

A state of a generator belongs to a process, and after a change of the world there are other processes. What is drawn for microbatch 3 of step
70 is therefore drawn from generators seeded with (seed, 70, 3), whoever trains on it; and what `dataset[i]` draws in epoch 2, from generators
seeded with (seed, 2, i), whoever reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch

from trainer.order import key

STEP: Final = 1
SAMPLE: Final = 2
COLLATE: Final = 3
BETWEEN: Final = 4
"""First part of a key: what the numbers are for, so that sample 3 of epoch 5 shares none with microbatch 3 of step 5."""
_MARK: Final = 0x5EED_0F_A_C0FFEE


@dataclass(frozen=True, slots=True)
class _Generator:
    """One of the generators that everybody shares. `look` returns what is another value, all but surely, once a number was drawn."""

    name: str
    seed: Callable[[int], object]
    look: Callable[[], float | bytes]


def _seed_numpy(word: int) -> None:
    """Only 32 bits: an array of two words takes seven times as long."""
    np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002 - the one that users' code draws from


def _seed_torch(word: int) -> None:
    """torch.manual_seed would seed every device, and where there is no CUDA yet keep a stack trace for each call."""
    torch.default_generator.manual_seed(word)


def _look_torch() -> bytes:
    """The state: here a look at it is cheaper than drawing a number, with the others it is dearer."""
    return torch.default_generator.get_state().numpy().tobytes()


class _Sample:
    """Which sample is being read, and whether anybody asked since `forget`."""

    __slots__ = ("asked", "parts")

    def __init__(self) -> None:
        self.parts = (0, 0, 0)
        self.asked = False

    def forget(self, _word: int) -> None:
        self.asked = False

    def look(self) -> float:
        return self.asked


_sample: Final = _Sample()


def begin_sample(seed: int, epoch: int, index: int) -> None:
    """Note which sample is read from now on, for `sample_key`."""
    _sample.parts = (seed, epoch, index)


def sample_key() -> int:
    """Return 64 bits that depend on the run's seed, the epoch and the sample being read, for a dataset with a generator of its own.

    Call it in `__getitem__`, or between two items of a stream: ``numpy.random.default_rng(trainer.rng.sample_key())``.
    """
    _sample.asked = True
    return key(SAMPLE, *_sample.parts)


_GENERATORS: Final = (
    _Generator("random", random.seed, random.random),
    _Generator("numpy", _seed_numpy, np.random.random_sample),
    _Generator("torch", _seed_torch, _look_torch),
    _Generator("sample_key", _sample.forget, _sample.look),  # whoever asks for it draws as well
)


_shared: Final[Any] = getattr(random.seed, "__self__")  # noqa: B009 - a method of the one that everybody shares
_seed_shared: Final = super(random.Random, _shared).seed


def _seed_random(word: int) -> None:
    """What `random.seed(word)` does with an int, without asking what it is: in a cold cache half of it."""
    _seed_shared(word)
    _shared.gauss_next = None


def seed_cpu(word: int) -> None:
    """Seed torch, NumPy's old global generator and `random` with 64 bits."""
    _seed_random(word)
    _seed_numpy(word)
    _seed_torch(word)


def seed_all(word: int) -> None:
    """Seed those of the CPU, and of CUDA the current device, if this process uses CUDA at all."""
    seed_cpu(word)
    if torch.version.cuda and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(word)


class Keyed:
    """What `keyed` returns: seeds on entry."""

    __slots__ = ("_before", "_restore", "_word")

    def __init__(self, word: int, *, restore: bool) -> None:
        self._word = word
        self._restore = restore
        self._before: _States | None = None

    def __enter__(self) -> Self:
        if self._restore:
            self._before = _States()
        seed_all(self._word)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._before.restore()


class _States:
    """Where all generators were. Takes a tenth of a millisecond, most of it NumPy's."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002
        self._torch = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def keyed(seed: int, step: int, microbatch: int, *, restore: bool = False) -> Keyed:
    """Seed every generator for one microbatch: dropout then does not depend on who trains on it, or after what.

    Args:
        seed: of the run.
        step: optimizer steps done.
        microbatch: its index within the step, over all ranks.
        restore: put the generators back on leaving, which costs more than all else; what draws next is keyed as well, as a rule.
    """
    return Keyed(key(STEP, seed, step, microbatch), restore=restore)


def seed_microbatch(seed: int, step: int, microbatch: int) -> None:
    """What entering `keyed` does, for where it is done in every step."""
    seed_all(key(STEP, seed, step, microbatch))


def aside(seed: int) -> Keyed:
    """Seed every generator for something that must leave no trace in them."""
    return Keyed(key(seed), restore=True)


class Draws:
    """Which generators some code draws from, found out at little cost, so that only those are seeded for every sample.

    Seeding all three for each sample costs more than reading a small one. So `arm` gives those not yet known to be drawn from a mark, and
    `found` looks whether it is still there. Whoever finds new ones has to run the code again, seeded.
    """

    def __init__(self) -> None:
        self._used: tuple[_Generator, ...] = ()
        self._unused: tuple[tuple[_Generator, float | bytes], ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Generators known to be drawn from."""
        return tuple(generator.name for generator in self._used)

    def __bool__(self) -> bool:
        return bool(self._used)

    def arm(self) -> None:
        """Mark the generators that nobody was seen to draw from."""
        if self._unused is None:
            self._unused = tuple((generator, _first(generator)) for generator in _GENERATORS)
        for generator, _ in self._unused:
            generator.seed(_MARK)

    def found(self) -> bool:
        """Whether a generator that was marked has been drawn from or seeded since; it is known from now on."""
        assert self._unused is not None, "found before arm"
        new = tuple(generator for generator, first in self._unused if generator.look() != first)
        if new:
            self._used += new
            self._unused = tuple(pair for pair in self._unused if pair[0] not in new)
        return bool(new)

    def seed(self, word: int) -> None:
        """Seed those known to be drawn from."""
        for generator in self._used:
            generator.seed(word)


def _first(generator: _Generator) -> float | bytes:
    generator.seed(_MARK)
    return generator.look()
