"""The state of a session, into snapshots and out of what it goes on from.

Owns: what is registered, its layout, the mapped buffers, the cadence. Must not: know flags, signals or the loop; decide at which step all save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import xxhash
from torch import Tensor

from trainer.errors import DamagedError, StateError
from trainer.interval import Cadence
from trainer.keeper import Beginning, Keeper, Lent
from trainer.snapshot import Snapshots, layout_of, state_hash
from trainer.state import Parts
from trainer.stopwatch import COMMUNICATION, OFF, SNAPSHOT, Stopwatch
from trainer.wire.extras import pack_extras, unpack_extras
from trainer.wire.layout import Layout
from trainer.world import World

EXTRAS_ROOM: Final = 65536
"""Bytes that there is room for at least, for what is no tensor: it may grow to as much without new buffers."""


class Resumed:
    """The state that a run goes on from: a `trainer.state.Source`.

    Args:
        beginning: where it lies.

    Attributes:
        step: optimizer steps done.
        data: state of the loader; {} if there was none.
        names, rest: see `Source`.

    Raises:
        DamagedError, ChannelError: what lies there makes no sense.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._began = time.perf_counter()
        self._index = beginning.index
        self._snapshots = _mapped(beginning.layout, {}, beginning.lent)
        extras = unpack_extras(self._snapshots.extras(self._index))
        self.names: Sequence[str] = [entry.name for entry in beginning.layout.tensors]
        try:
            self.step: int = extras["step"]
            self.rest: Mapping[str, Any] = dict(extras["parts"])
            self.data: dict[str, Any] = dict(extras["data"] or {})
            kept = tuple(f"{name}." for name in extras.get("kept", ()))
        except (KeyError, TypeError) as error:
            raise DamagedError(f"the state of step {beginning.step} has no {error}") from None
        if self.step != beginning.step:
            raise DamagedError(f"the state of step {beginning.step} says that it is of step {self.step}")
        self._copies = self._snapshots.copies(self._index, {name for name in self.names if name.startswith(kept)})

    @property
    def seconds(self) -> float:
        """Since it was found."""
        return time.perf_counter() - self._began

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Source`."""
        whole = self._snapshots.view(self._index)
        return {name: whole[name] for name in names}

    def copies(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Source`."""
        return self._copies.take(self._snapshots.view(self._index), names)

    def close(self) -> None:
        """It is taken over."""
        self._copies.close()
        self._snapshots.close()


class Saver:
    """Takes snapshots of what is registered.

    Args:
        keeper: who has the buffers.
        world: the ranks.
        watch: told where the time goes.
    """

    def __init__(self, keeper: Keeper, world: World, watch: Stopwatch = OFF) -> None:
        settings = keeper.settings
        self.parts: Final = Parts()
        self.cadence: Final = Cadence(
            every=settings.snapshot_every,
            cost_percent=settings.snapshot_cost_percent,
            mean_time_to_failure_s=settings.mean_time_to_failure_s,
        )
        self._keeper = keeper
        self._world = world
        self._watch = watch
        self._layout: Layout | None = None
        self._bound: dict[str, Tensor] = {}
        self._lent: Lent | None = None
        self._snapshots: Snapshots | None = None
        self._last: int | None = None

    @property
    def unready(self) -> bool:
        """No buffers yet, and nobody has said that there will be none. No rank may snapshot: ranks of a node must all do it, or none."""
        return self._lent is None

    def advance(self) -> None:
        """A step is done: tell the keeper the layout, once there is one, and see whether there are buffers."""
        if self._layout is None:
            self._describe(*self._collect(0, {}))
        self._borrow(0.0)

    def save(self, step: int, data: Mapping[str, Any], *, persist: bool, wait: float = 0.0) -> bool:
        """Snapshot. All ranks call it for the same steps.

        Args:
            step: optimizer steps done.
            data: state of the loader.
            persist: somebody wants it on disk.
            wait: seconds to wait for buffers.

        Returns:
            Whether this rank's share is safe.
        """
        with self._watch.during(COMMUNICATION):
            if step == self._last:  # asked once more: which rank tells the keeper is only certain once all have their share in
                self._world.gather(b"")
            self._last = step
            if self._keeper.lasting:
                self._world.alike(self.parts.buffers())
        with self._watch.during(SNAPSHOT):
            return self._save(step, data, persist=persist, wait=wait)

    def _save(self, step: int, data: Mapping[str, Any], *, persist: bool, wait: float) -> bool:
        began = time.perf_counter()
        tensors, extras = self._collect(step, data)
        if self._layout is None or len(extras) > self._layout.extras_capacity or not self._fits(tensors):
            self._describe(tensors, extras)
        self._borrow(wait)
        if self._snapshots is None:
            return self._lent is not None and not self._keeper.lasting
        taken = self._snapshots.take(self._keeper.generation, step, extras, wait=wait)
        if taken is None:
            return False
        self.cadence.took(step, time.perf_counter() - began)
        if persist and taken.complete:
            self._keeper.sealed(step, taken.index)
        return True

    def agree(self, resumed: Resumed) -> None:
        """See that all ranks have taken over the same state. Collective.

        Raises:
            StateError: one has not; names it and the first tensor that differs.
        """
        tensors, rest = self.parts.collect()
        digest = f"{state_hash(tensors)}{xxhash.xxh3_64_hexdigest(pack_extras(rest))}"
        hashes = self._world.gather(digest.encode())
        if len(set(hashes)) > 1:
            raise StateError(self._divergence(hashes, tensors), remedy="is a value in the state of one rank alone? It must be the same on all")
        self._keeper.restored(resumed.step, digest, resumed.seconds)

    def _divergence(self, hashes: Sequence[bytes], tensors: Mapping[str, Tensor]) -> str:
        odd = next(rank for rank, one in enumerate(hashes) if one != hashes[0])
        mine = "\n".join(f"{name} {state_hash({name: tensor})}" for name, tensor in tensors.items())
        lists = [one.decode().split("\n") for one in self._world.gather(mine.encode())]
        differing = (ours.rpartition(" ")[0] for ours, theirs in zip(lists[0], lists[odd], strict=False) if ours != theirs)
        what = next(differing, "what is no tensor")
        return f"rank {odd} does not have the state that rank 0 has after both took it over: {what} differs"

    def _collect(self, step: int, data: Mapping[str, Any]) -> tuple[dict[str, Tensor], bytes]:
        tensors, rest = self.parts.collect()
        return tensors, pack_extras({"step": step, "data": dict(data), "parts": rest, "kept": self.parts.kept()})

    def _fits(self, tensors: dict[str, Tensor]) -> bool:
        """Whether they are those of the layout; binds them if they are others of the same kind."""
        bound = self._bound
        if len(bound) == len(tensors) and all(bound.get(name) is tensor for name, tensor in tensors.items()):
            return True
        assert self._layout is not None
        if layout_of(tensors, extras=self._layout.extras_capacity).difference(self._layout):
            return False
        self._bound = tensors
        if self._snapshots is not None:
            self._snapshots.bind(tensors)
        return True

    def _describe(self, tensors: dict[str, Tensor], extras: bytes) -> None:
        if self._snapshots is not None:
            self._snapshots.close()
        self._snapshots = self._lent = None
        self._bound = tensors
        self._layout = layout_of(tensors, extras=max(EXTRAS_ROOM, 2 * len(extras)))
        self._keeper.describe(self._layout)

    def _borrow(self, wait: float) -> None:
        if self._lent is not None or self._layout is None:
            return
        self._lent = self._keeper.lend(wait=wait)
        if self._lent is not None and self._lent.buffers:
            self._snapshots = _mapped(self._layout, self._bound, self._lent)


def _mapped(layout: Layout, tensors: Mapping[str, Tensor], lent: Lent) -> Snapshots:
    try:
        return Snapshots(layout, tensors, lent.board, lent.buffers, local_rank=lent.local_rank, local_world=lent.local_world)
    finally:
        close_all((lent.board, *lent.buffers))


def close_all(descriptors: Iterable[int]) -> None:
    """Close them."""
    for fd in descriptors:
        os.close(fd)
