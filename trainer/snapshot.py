"""A worker's side of snapshots: its share of the state into a buffer of the agent's, and a whole state back out of one.

Owns: the mappings of the buffers, and when they may be written. Must not: decide when to snapshot, allocate a buffer, speak to the agent.

Every node holds a full replica, so each local rank copies one share of it, and the buffer is VALID when all have. A worker that is killed in
between leaves it half-written, and never VALID (`wire.board`).

The step is blocked until the copy is done: then the parameters may change again. CUDA tensors go over a stream of their own into the buffer itself,
whose pages are pinned for it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from trainer.errors import ChannelError, StateError
from trainer.hashing import state_hash
from trainer.memory import CODES, DTYPES, Copies, check_fits, distinct, layout_of, move, share
from trainer.wire.board import Board
from trainer.wire.pages import populate

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.wire.layout import Entry, Layout

__all__ = ["CODES", "DTYPES", "Snapshots", "Taken", "layout_of", "state_hash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """This local rank's share of a snapshot is in.

    Attributes:
        index: of the buffer.
        complete: this local rank was the last, and the state is whole now. Exactly one of a node's local ranks sees True.
        seconds: that the caller was blocked.
        bytes: that were copied; 0 if the state was held already.
    """

    index: int
    complete: bool
    seconds: float
    bytes: int


class Snapshots:
    """The buffers of a node, as one worker sees them. For one thread at a time.

    Args:
        layout: of the state, the same in all workers of the node.
        tensors: what to snapshot, by name; {} if that is not known yet (`bind`). They are read anew at each `take`.
        board_fd: descriptor of the control page. It and the next stay the caller's, who may close them at once.
        buffer_fds: descriptors of the buffers, in the agent's order.
        local_rank: this worker's.
        local_world: workers on this node.

    Raises:
        StateError: the tensors are not those of the layout.
        ChannelError: a descriptor is not what it should be.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        board_fd: int,
        buffer_fds: Sequence[int],
        *,
        local_rank: int,
        local_world: int,
    ) -> None:
        if not 0 <= local_rank < local_world:
            raise ValueError(f"local rank {local_rank} of {local_world}")
        self.layout: Final = layout
        self._owns_end: Final = local_rank == local_world - 1
        self._local_rank: Final = local_rank
        pieces = share(layout, local_rank, local_world)
        self._pieces: Final = [piece for piece in pieces if not piece.entry.padding]
        self._pads: Final = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces if piece.entry.padding]
        self._tensors: dict[str, Tensor] = {}
        self._pin = False
        if tensors:
            check_fits(layout, tensors)
        self._board: Final = Board.attach(board_fd)
        try:
            if len(buffer_fds) != self._board.buffers:
                raise ChannelError(f"{len(buffer_fds)} buffers came, the control page speaks of {self._board.buffers}")
            self._buffers: Final = [_Buffer(fd, layout) for fd in buffer_fds]
        except BaseException:
            self._board.close()
            raise
        self._toucher = threading.Thread(target=self._touch, name="elasticd-populate", daemon=True)
        if tensors:
            self.bind(tensors)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on snapshot these, after an optimizer replaced its own for instance.

        Raises:
            StateError: they are not those of the layout; names the first that differs.
        """
        check_fits(self.layout, tensors)
        self._tensors = dict(tensors)
        self._pin = _on_cuda(tensors)
        if self._toucher.ident is None:
            self._toucher.start()

    def take(self, generation: int, step: int, extras: bytes, *, wait: float = 0.0) -> Taken | None:
        """Copy this local rank's share of the state. All local ranks call it for the same steps.

        Args:
            generation: of the world.
            step: optimizer steps done.
            extras: what is no tensor, the same on all ranks (`wire.extras`); one local rank writes them.
            wait: seconds to wait for a buffer that somebody reads.

        Returns:
            None if this snapshot is skipped, by all local ranks alike: no buffer is free.

        Raises:
            StateError: a tensor has another shape or dtype than at the beginning.
            SetupError: the extras are longer than the layout has room for.
            ChannelError: see `Board.begin`.
        """
        began = time.perf_counter()
        held = self._board.find(generation, step)
        if held is not None:
            return Taken(index=held.index, complete=self._local_rank == 0, seconds=time.perf_counter() - began, bytes=0)
        index = self._board.begin(generation, step, wait=wait)
        if index is None:
            return None
        nbytes = self._gather(self._buffers[index])
        if self._owns_end:
            self.layout.put_extras(self._buffers[index].memory, extras)
        complete = self._board.finish(index, generation, step, self._local_rank)
        return Taken(index=index, complete=complete, seconds=time.perf_counter() - began, bytes=nbytes)

    def restore(self, index: int, into: Mapping[str, Tensor], *, partial: bool = False) -> bytes:
        """Copy a whole state into tensors, in place.

        Args:
            index: of a buffer that is VALID.
            into: by name; requires_grad or not.
            partial: the state may have more tensors than are given.

        Returns:
            The extras.

        Raises:
            StateError: the buffer holds no whole state, or one that does not fit; names the first tensor that differs, and nothing is changed.
            DamagedError: the extras make no sense.
        """
        buffer = self._whole(index, pin=_on_cuda(into))
        check_fits(self.layout, into, partial=partial)
        with torch.no_grad():
            self._scatter(buffer, into)
        return self.layout.get_extras(buffer.memory)

    def copies(self, index: int, names: Collection[str] | None = None) -> Copies:
        """Begin to make room, in the background, for new CPU tensors with a state; and to map the state.

        Args:
            index: of a buffer that is VALID.
            names: of those that will be wanted; None: all. They share one allocation, which goes with the last of them.

        Raises:
            StateError: the buffer holds no whole state.
        """
        buffer = self._whole(index)
        wanted = {entry.name for entry in self.layout.tensors} if names is None else names
        return Copies(self.layout, wanted, before=lambda: buffer.prepare(pin=False))

    def view(self, index: int) -> dict[str, Tensor]:
        """A whole state as it lies in its buffer, without a copy: read it before the next snapshot, and never write to it.

        Raises:
            StateError: the buffer holds no whole state.
        """
        return dict(self._whole(index).views)

    def extras(self, index: int) -> bytes:
        """The extras of a whole state; errors as `restore`."""
        return self.layout.get_extras(self._whole(index).memory)

    def close(self) -> None:
        """Unmap the buffers, once the last view of them is gone. Twice does no harm."""
        for buffer in self._buffers:
            buffer.close()
        if self._toucher.ident is not None:
            self._toucher.join()
        self._board.close()

    def _touch(self) -> None:
        """Not before somebody means to snapshot: until then a new worker has its hands full with restoring."""
        for buffer in self._buffers:
            buffer.prepare(pin=self._pin)

    def _whole(self, index: int, *, pin: bool = False) -> _Buffer:
        if not any(held.index == index for held in self._board.valid()):
            raise StateError(f"buffer {index} holds no whole state")
        buffer = self._buffers[index]
        if pin:
            buffer.prepare(pin=True)
        return buffer

    def _gather(self, buffer: _Buffer) -> int:
        """From the tensors into the image; the bytes copied."""
        if not self._tensors:
            raise StateError("no tensors are registered")
        buffer.prepare(pin=self._pin)
        total = 0
        transfers = _Transfers()
        with torch.no_grad():
            for piece in self._pieces:
                entry = piece.entry
                tensor = self._tensors[entry.name]
                if tensor.shape != entry.shape or tensor.dtype != DTYPES[entry.dtype]:
                    raise StateError(f"{entry.name} is {tensor.dtype} of the shape {list(tensor.shape)} now", remedy="register it again")
                transfers.start(piece.of(buffer.views[entry.name]), piece.of(tensor))
                total += piece.nbytes
        for begin, end in self._pads:
            buffer.memory[begin:end] = bytes(end - begin)
        transfers.wait()
        return total

    def _scatter(self, buffer: _Buffer, into: Mapping[str, Tensor]) -> None:
        transfers = _Transfers()
        for entry in self.layout.tensors:
            tensor = into.get(entry.name)
            if tensor is not None and entry.nbytes:
                shown = distinct(tensor)
                view = buffer.views[entry.name]
                transfers.start(shown, view if shown is tensor else view[tuple(slice(size) for size in shown.shape)])
        transfers.wait()
        # A memmove goes past autograd: what was saved for a backward is stale now, and this makes it say so.
        torch.autograd.graph.increment_version(list(into.values()))


class _Buffer:
    """One buffer, mapped. Pages are entered into the page table, and pinned for CUDA, at the first `prepare`."""

    def __init__(self, fd: int, layout: Layout) -> None:
        try:
            size = os.fstat(fd).st_size
            if size < layout.size:
                raise ChannelError(f"a buffer of {size} bytes came, the state needs {layout.size}")
            mapping = mmap.mmap(fd, layout.size)
        except (OSError, ValueError) as error:
            raise ChannelError(f"descriptor {fd} cannot be mapped: {error}") from None
        # Never closed by hand: a tensor keeps the mapping alive, but would not keep it from being closed under its feet.
        self.memory = memoryview(mapping)
        self.image = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address: Final = self.image.data_ptr()
        self._entries = layout.tensors
        self._to_touch = True
        self._to_pin = True
        self._pinned = False
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """The tensors as they lie here."""
        return {entry.name: self._view(entry) for entry in self._entries}

    def _view(self, entry: Entry) -> Tensor:
        dtype = DTYPES[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return self.image[entry.offset : entry.end].view(dtype).view(entry.shape)

    def prepare(self, *, pin: bool) -> None:
        """Do what makes copies fast; waits for another thread that does.

        Args:
            pin: it is for CUDA.
        """
        with self._lock:
            if self._to_touch:
                populate(self.memory, self._closing.is_set)
                self._to_touch = False
            if self._to_pin and pin:
                self._to_pin = False
                self._pinned = _register(self.image)

    def close(self) -> None:
        """Let go of it; the mapping ends with the last tensor that shows it."""
        self._closing.set()
        with self._lock:
            self._to_touch = self._to_pin = False
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(self.address)
                self._pinned = False
            self.__dict__.pop("views", None)
            self.image = torch.empty(0, dtype=torch.uint8)
            self.memory.release()


def _on_cuda(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors.values())


def _register(image: Tensor) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(image.data_ptr(), image.numel(), 1))  # 1: for every context of this process
    if code:
        warnings.warn(f"the snapshot buffers cannot be pinned (CUDA error {code}); copies to them will be slow", RuntimeWarning, stacklevel=2)
    return code == 0


class _Transfers:
    """Copies. Those from or to CUDA run on a stream of their own, behind all that its device was given before."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, to: Tensor, source: Tensor) -> None:
        """Copy. What involves CUDA is only done after `wait`."""
        device = next((tensor.device for tensor in (to, source) if tensor.device.type == "cuda"), None)
        if device is None:
            move(to, source)
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._streams[device]):
            move(to, source, non_blocking=True)

    def wait(self) -> None:
        """Until all are done."""
        for stream in self._streams.values():
            stream.synchronize()
