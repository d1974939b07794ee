"""How a state lies in memory and on disk: one flat image, and the safetensors header that describes it.

Owns: where each tensor lies, the header's text, and the room behind the tensors for what is none (`extras`). Must not: import torch, or read or
write a file.

An image is the bytes of all tensors one after another, the same on every node at the same step. A file is the header followed by the image, so a
checkpoint is written as it lies in memory, and the safetensors library opens it. That library allows no holes and puts no meaning into offsets;
hence the pads, and the order:

::

    large tensors (4096 bytes and more), each at a multiple of 64, those that end at one first     memcpy is slower from and to odd addresses
      elasticd.pad.N                                       zeros that fill the gap before the next
    small tensors, by falling size of an element           so none needs a pad
    elasticd.extras                                        8 bytes of length, JSON, zeros up to a multiple of 4096: for O_DIRECT

Where a tensor lies depends on names, dtypes and shapes alone, not on the order in which they were registered.

The format: https://github.com/huggingface/safetensors#format (8 bytes of length, little endian; JSON; data).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import xxhash

from trainer.errors import DamagedError, SetupError
from trainer.wire.extras import pack_extras, unpack_extras

__all__ = ["ALIGN", "EXTRAS", "ITEMSIZE", "PAD", "PAGE", "Entry", "Layout", "pack_extras", "unpack_extras"]

ALIGN: Final = 64
"""Large tensors begin at multiples of this many bytes."""
PAGE: Final = 4096
"""Header and image are multiples of this many bytes long."""
LARGE: Final = 4096
"""Bytes from which a tensor is large."""
EXTRAS: Final = "elasticd.extras"
"""Name of the last entry, which holds what is no tensor."""
PAD: Final = "elasticd.pad."
"""How the names of the entries begin that fill gaps."""
MAX_TEXT: Final = 64 * 1024 * 1024
"""Longest header believed, in characters; the library itself stops at 100 million bytes."""
MAX_ENTRIES: Final = 1_000_000
MAX_DIMENSIONS: Final = 64
MAX_SIZE: Final = 1 << 46
"""Largest image believed, in bytes: 64 TiB."""
ITEMSIZE: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Bytes of an element, by the safetensors code of its dtype."""

_METADATA: Final = "__metadata__"
_ABOUT: Final = {"elasticd.layout": "1", "format": "pt"}  # "format" is asked for by readers of the library's own files
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of an image.

    Attributes:
        name: unique within the image.
        dtype: its safetensors code, a key of `ITEMSIZE`.
        shape: () for a scalar.
        offset: of its first byte in the image.
        nbytes: how many it has; row-major, without gaps.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the byte after its last."""
        return self.offset + self.nbytes

    @property
    def padding(self) -> bool:
        """It only fills a gap."""
        return self.name.startswith(PAD)


class Layout:
    """Which tensors an image holds and where. Use `build` or `parse`.

    Args:
        entries: in the order of their offsets, without holes.
        header_text: the JSON that says the same.

    Attributes:
        entries: all of them, pads and extras included.
        size: bytes of the image, a multiple of `PAGE`.
        header_text: the JSON.
        header: how a file begins: length and JSON, padded with spaces to a multiple of `PAGE`.
        digest: of the header, 32 hexadecimal digits.
    """

    def __init__(self, entries: tuple[Entry, ...], header_text: str) -> None:
        self.entries: Final = entries
        self.size: Final = entries[-1].end
        self.header_text: Final = header_text
        body = header_text.encode()
        body += b" " * (-(_LENGTH.size + len(body)) % PAGE)
        self.header: Final = _LENGTH.pack(len(body)) + body
        self.digest: Final = xxhash.xxh3_128_hexdigest(self.header)

    def __repr__(self) -> str:
        return f"Layout({len(self.tensors)} tensors, {self.size} bytes, {self.digest})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.header == other.header

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def tensors(self) -> tuple[Entry, ...]:
        """The entries that somebody registered: without pads and extras."""
        return tuple(entry for entry in self.entries[:-1] if not entry.padding)

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def extras(self) -> Entry:
        """Where the extras lie: at the end."""
        return self.entries[-1]

    @property
    def extras_capacity(self) -> int:
        """Longest extras there is room for, in bytes."""
        return self.extras.nbytes - _LENGTH.size

    @classmethod
    def build(cls, tensors: Sequence[tuple[str, str, Sequence[int]]], *, extras: int) -> Self:
        """Lay out tensors.

        Args:
            tensors: (name, dtype, shape) of each, in any order.
            extras: bytes that the extras may need at most.

        Raises:
            SetupError: two share a name, a name is ours or no text, a dtype has no code, or the whole is too large.
        """
        _check_names([name for name, _, _ in tensors])
        sized = [(name, dtype, tuple(shape), _nbytes(name, dtype, shape)) for name, dtype, shape in tensors]
        entries = [*_place(sized)]
        end = entries[-1].end if entries else 0
        last = -(-(end + _LENGTH.size + extras) // PAGE) * PAGE
        entries.append(Entry(name=EXTRAS, dtype="U8", shape=(last - end,), offset=end, nbytes=last - end))
        text = _text(entries)
        if last > MAX_SIZE or len(entries) > MAX_ENTRIES or len(text) > MAX_TEXT:
            raise SetupError(f"the state is too large to keep: {len(entries)} tensors, {last} bytes", remedy="register fewer tensors")
        return cls(tuple(entries), text)

    @classmethod
    def parse(cls, header_text: str) -> Self:
        """Read a header's JSON, from whomever it came.

        Raises:
            DamagedError: it is none, or not one of ours: a hole, an overlap, a size that does not fit its shape, an unknown dtype.
        """
        if len(header_text) > MAX_TEXT:
            raise DamagedError(f"a header of {len(header_text)} characters, {MAX_TEXT} are allowed")
        try:
            header_text.encode()
            values = json.loads(header_text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"a header that is no JSON: {error}"[:200]) from None
        if not isinstance(values, dict):
            raise DamagedError("a header that is no JSON object")
        about = values.pop(_METADATA, {})
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
            raise DamagedError(f"a header whose {_METADATA} is no table of texts")
        if not 0 < len(values) <= MAX_ENTRIES:
            raise DamagedError(f"a header of {len(values)} tensors")
        entries = sorted((_entry(name, value) for name, value in values.items()), key=_in_image)
        _check_together(entries)
        return cls(tuple(entries), header_text)

    def entry(self, name: str) -> Entry:
        """The entry of that name.

        Raises:
            KeyError: there is none.
        """
        return self._by_name[name]

    def difference(self, other: Layout) -> str:
        """One line that names the first tensor of ours that `other` lacks or has otherwise, else the first it has besides; "" if there is none.

        Pads and extras do not count: they hold nothing that was registered.
        """
        for mine in self.tensors:
            theirs = other._by_name.get(mine.name)
            if theirs is None:
                return f"{mine.name} is missing"
            if theirs.shape != mine.shape:
                return f"{mine.name} has the shape {list(theirs.shape)}, not {list(mine.shape)}"
            if theirs.dtype != mine.dtype:
                return f"{mine.name} is {theirs.dtype}, not {mine.dtype}"
        return next((f"{theirs.name} is there, which nobody registered" for theirs in other.tensors if theirs.name not in self._by_name), "")

    def put_extras(self, image: memoryview, extras: bytes) -> None:
        """Write the extras at the end of an image, zeros behind them.

        Raises:
            SetupError: they are longer than there is room for.
        """
        if len(extras) > self.extras_capacity:
            raise SetupError(f"the extras have {len(extras)} bytes, and there is room for {self.extras_capacity}")
        where = self.extras
        image[where.offset : where.end] = (_LENGTH.pack(len(extras)) + extras).ljust(where.nbytes, b"\0")

    def get_extras(self, image: memoryview) -> bytes:
        """Read them again.

        Raises:
            DamagedError: their length says more than there is room for.
        """
        where = self.extras
        (length,) = _LENGTH.unpack_from(image, where.offset)
        if length > self.extras_capacity:
            raise DamagedError(f"extras of {length} bytes, and there is room for {self.extras_capacity}")
        begin = where.offset + _LENGTH.size
        return bytes(image[begin : begin + length])


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SetupError(f"two tensors are called {name!r}")
        if not _name_fits(name) or name == EXTRAS or name.startswith(PAD):
            raise SetupError(f"no tensor can be called {name!r:.200}", remedy="call it otherwise")
        seen.add(name)


def _name_fits(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: the safetensors library refuses the whole file
        return False
    return bool(name) and name != _METADATA


def _nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    if dtype not in ITEMSIZE:
        raise SetupError(f"{name} is {dtype}, which a checkpoint cannot hold", remedy=f"use one of {', '.join(ITEMSIZE)}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise SetupError(f"{name} has the shape {list(shape)!r:.200}")
    return math.prod(shape) * ITEMSIZE[dtype]


def _place(sized: Sequence[tuple[str, str, tuple[int, ...], int]]) -> list[Entry]:
    large = sorted((one for one in sized if one[3] >= LARGE), key=lambda one: (one[3] % ALIGN > 0, one[0]))
    small = sorted((one for one in sized if one[3] < LARGE), key=lambda one: (-ITEMSIZE[one[1]], one[0]))
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape, nbytes in [*large, *small]:
        gap = -end % (ALIGN if nbytes >= LARGE else ITEMSIZE[dtype])
        if gap:
            entries.append(Entry(name=f"{PAD}{end}", dtype="U8", shape=(gap,), offset=end, nbytes=gap))
        entries.append(Entry(name=name, dtype=dtype, shape=shape, offset=end + gap, nbytes=nbytes))
        end += gap + nbytes
    return sorted(entries, key=_in_image)


def _in_image(entry: Entry) -> tuple[int, int]:
    """By offset, and of those at the same one the empty first: as the library sees them."""
    return entry.offset, entry.end


def _text(entries: Sequence[Entry]) -> str:
    table: dict[str, Any] = {_METADATA: _ABOUT}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.offset, entry.end]}
    return json.dumps(table, separators=(",", ":"))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands there twice")
    return table


def _entry(name: str, value: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        fits = _name_fits(name) and len(value) == 3 and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        fits = fits and all(type(number) is int and 0 <= number <= MAX_SIZE for number in (begin, end, *shape))
        fits = fits and end - begin == math.prod(shape) * ITEMSIZE[dtype] and begin % ITEMSIZE[dtype] == 0
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise DamagedError(f"a header whose {name[:200]!r} makes no sense: {str(value)[:200]}")
    return Entry(name=name, dtype=dtype, shape=tuple(shape), offset=begin, nbytes=end - begin)


def _check_together(entries: Sequence[Entry]) -> None:
    if entries[0].offset:
        raise DamagedError(f"a header with a hole before {entries[0].name}")
    for before, after in pairwise(entries):
        if before.end != after.offset:
            raise DamagedError(f"a header where {after.name} does not begin where {before.name} ends")
    last = entries[-1]
    if last.name != EXTRAS or last.dtype != "U8" or len(last.shape) != 1 or last.nbytes < _LENGTH.size or last.end % PAGE:
        raise DamagedError(f"a header that does not end in {EXTRAS}, at a multiple of {PAGE} bytes")
