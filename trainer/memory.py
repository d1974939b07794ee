"""Moving bytes between tensors and an image, as fast as the machine copies.

Owns: which part of an image a local rank copies, the copies, and fresh memory for whole states. Must not: know buffers, generations or steps.

What costs time, measured on 2 cores with a state of 300 MB in 300 tensors (one memcpy of it, warm and aligned: 28 ms):

- The first touch of a page through a mapping, 1.1 us each: 84 ms. The kernel does it in bulk for 16 ms, if asked (`wire.pages`).
- New memory for tensors, page by page as by torch.empty: 110 to 130 ms, the copy included; asked for at once: 130, and then the copy. But that can be
  done while a script builds its model (`Copies`). In huge pages: 25 to 700 ms, by what the machine has at hand.
- copy_ to addresses that are no multiples of 64: half again as much (the layout sees to that).
- memmove tensor by tensor: 1.09 to 1.16 of the memcpy, since only a very large one goes past the caches. copy_: 1.01 to 1.08, in as many threads
  as torch uses; but 1.2 to 1.34 where elements are single bytes, so those are left to memmove.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from trainer.errors import SetupError, StateError
from trainer.wire.layout import PAGE, Entry, Layout
from trainer.wire.pages import populate

if TYPE_CHECKING:
    from torch import Tensor

CODES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""safetensors code of each dtype that can be kept."""
_CLOSE: Final = 4 * 1024 * 1024
"""Bytes between two tensors that are asked for too, rather than asking twice."""
DTYPES: Final = {code: dtype for dtype, code in CODES.items()}


def layout_of(tensors: Mapping[str, Tensor], *, extras: int) -> Layout:
    """The layout of these tensors.

    Args:
        tensors: by name.
        extras: bytes that the extras may need at most.

    Raises:
        SetupError: a dtype or a kind of tensor that cannot be kept, or as `Layout.build`.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = "on the meta device" if tensor.device.type == "meta" else f"{tensor.layout}, {tensor.dtype}"
            raise SetupError(f"{name} cannot be kept: it is {kind}", remedy="register dense tensors with values")
    return Layout.build([(name, _code(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()], extras=extras)


def _code(tensor: Tensor) -> str:
    return CODES.get(tensor.dtype, str(tensor.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a tensor: rows `first` to `last` (exclusive) of its first dimension that is longer than 1.

    Attributes:
        entry: the tensor.
        first, last: rows.
        skip: bytes of the tensor before it.
        nbytes: its own.
    """

    entry: Entry
    first: int
    last: int
    skip: int
    nbytes: int

    @property
    def offset(self) -> int:
        """In the image."""
        return self.entry.offset + self.skip

    @property
    def whole(self) -> bool:
        """It is the whole tensor."""
        return self.nbytes == self.entry.nbytes

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that has the shape of the entry."""
        if self.whole:
            return tensor
        while tensor.shape[0] == 1:
            tensor = tensor[0]
        return tensor[self.first : self.last]


def share(layout: Layout, local_rank: int, local_world: int) -> list[Piece]:
    """What one local rank copies: the rows that begin in its part of the image, cut into equal parts by bytes.

    Depends on the layout alone, not on how a tensor lies in memory, so that the shares of all local ranks cover every byte once.
    """
    end = layout.extras.offset
    low, high = (end * rank // local_world // PAGE * PAGE if rank < local_world else end for rank in (local_rank, local_rank + 1))
    pieces = []
    for entry in layout.entries[:-1]:
        if not entry.nbytes:
            continue
        rows = next((size for size in entry.shape if size > 1), 1)
        row = entry.nbytes // rows
        first, last = (min(max(-(-(edge - entry.offset) // row), 0), rows) for edge in (low, high))
        if first < last:
            pieces.append(Piece(entry=entry, first=first, last=last, skip=first * row, nbytes=(last - first) * row))
    return pieces


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def distinct(tensor: Tensor) -> Tensor:
    """Without the repetitions that `expand` made: those cannot be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def check_fits(layout: Layout, tensors: Mapping[str, Tensor], *, partial: bool = False) -> None:
    """Raise unless a state of this layout is one of these tensors.

    Args:
        partial: it may have more tensors than are given.

    Raises:
        StateError: names the first that differs.
    """
    wanted = layout_of(tensors, extras=0)
    if partial:
        kept = [(entry.name, entry.dtype, entry.shape) for entry in layout.tensors if entry.name in tensors]
        layout = Layout.build(kept, extras=0)
    problem = wanted.difference(layout)
    if problem:
        raise StateError(f"the state does not fit what is registered: {problem}")


def move(to: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
    """Copy values bit for bit between tensors of the same shape and dtype."""
    if to.element_size() == 1 and _plain(to) and _plain(source):
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.numel())
    else:
        to.copy_(source, non_blocking=non_blocking)


class Arena:
    """Fresh memory for a state, in one piece. Each tensor of it keeps it alive; nothing else needs to.

    In pages of the usual size: huge ones are three times as fast where the machine has them at hand, and five times as slow where it has not.

    Args:
        layout: of the state.
    """

    def __init__(self, layout: Layout) -> None:
        self._memory = mmap.mmap(-1, layout.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:  # a kernel without them
            pass

    def ask_for(self, entries: Sequence[Entry], stop: Callable[[], bool] = lambda: False) -> None:
        """Have the pages of these entries at once, rather than by a fault for each; `stop` as in `populate`."""
        with memoryview(self._memory) as memory:
            for begin, end in _stretches(entries):
                with memory[begin:end] as part:
                    populate(part, stop, private=True)

    def tensor(self, entry: Entry) -> Tensor:
        """A tensor with a storage of its own, at the place it has in the image."""
        dtype = DTYPES[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _stretches(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Where the entries lie, in whole pages; what lies close together is one stretch."""
    found: list[tuple[int, int]] = []
    for entry in sorted(entries, key=lambda one: one.offset):
        begin, end = entry.offset // PAGE * PAGE, -(-(entry.offset + entry.nbytes) // PAGE) * PAGE
        if found and begin - found[-1][1] < _CLOSE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


class Copies:
    """New CPU tensors with what an image holds. Their memory is asked for in the background from now on: that takes longer than the copies.

    Args:
        layout: of the image.
        names: of the tensors that will be wanted, as far as one knows.
        before: to be done in the background before that.
    """

    def __init__(self, layout: Layout, names: Collection[str], before: Callable[[], None]) -> None:
        self._entries: Final = {entry.name: entry for entry in layout.tensors}
        self._arena: Final = Arena(layout)
        self._before: Final = before
        self._expected: Final = [entry for entry in layout.tensors if entry.name in names]
        self._stopping: Final = threading.Event()
        self._taken: set[str] = set()
        self._thread: Final = threading.Thread(target=self._prepare, name="elasticd-fresh", daemon=True)
        self._thread.start()

    def take(self, views: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Some of them.

        Args:
            views: the image's tensors.
            names: of those wanted; each can be had once.
        """
        if self._taken & set(names):
            raise ValueError(f"handed out already: {', '.join(sorted(self._taken & set(names)))}")
        self._taken |= set(names)
        self._thread.join()
        made = {name: self._arena.tensor(self._entries[name]) for name in names}
        for name, tensor in made.items():
            move(tensor, views[name])
        return made

    def close(self) -> None:
        """No more will be wanted. Twice does no harm."""
        self._stopping.set()
        self._thread.join()

    def _prepare(self) -> None:
        self._before()
        self._arena.ask_for(self._expected, self._stopping.is_set)
