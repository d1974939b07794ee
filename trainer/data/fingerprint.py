"""Tells one dataset from another, at the cost of reading a few samples.

Owns: the short text that two nodes, or a run and the state it continues from, compare. Must not: read much, or leave a trace in generators
of random numbers.

It finds another version of the data, another directory, another preprocessing. It does not find a change of a sample that it did not look at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Sized
from typing import Any, Final, Protocol

import numpy as np
import torch

from trainer import rng

LOOKS: Final = 4
"""Samples looked at, the first and the last among them."""
MOST_BYTES: Final = 65536
"""Bytes of one array or text that count, half from each end."""
_MOST_ITEMS: Final = 1000
_MOST_DEPTH: Final = 8


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def fingerprint(dataset: Any) -> str:
    """Return 32 hexadecimal digits that depend on the dataset's class, length, and samples at fixed positions.

    A dataset that knows better has a `fingerprint`, text or a method that returns it. Of a stream, of which nothing can be looked at without
    beginning it, the class and the length count, if it has one.
    """
    digest = hashlib.blake2b(digest_size=16)
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        _add(digest, str(own() if callable(own) else own), 0)
        return digest.hexdigest()
    _add(digest, type(dataset).__qualname__, 0)
    n = length(dataset)
    _add(digest, n, 0)
    if n and not is_stream(dataset):
        for index in sorted({look * (n - 1) // (LOOKS - 1) for look in range(LOOKS)}):
            with rng.aside(index):
                rng.begin_sample(0, 0, index)
                _add(digest, dataset[index], 0)
    return digest.hexdigest()


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from one end to the other."""
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__")


def length(dataset: Any) -> int | None:
    """The dataset's length, None if it has none."""
    if not isinstance(dataset, Sized):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _add(digest: _Hash, value: Any, depth: int) -> None:
    """Add a value, its kind first, so that 1, 1.0 and "1" differ. Of what is unknown only the kind counts: its text may hold addresses."""
    digest.update(f"<{_kind(value)}>".encode())
    if depth > _MOST_DEPTH:
        return
    data = _bytes(value)
    if data is not None:
        digest.update(struct.pack("<q", len(data)) + _ends(data))
        return
    for item in _items(value):
        _add(digest, item, depth + 1)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return f"{type(value).__name__}:{value.dtype}{tuple(value.shape)}"
    if callable(getattr(value, "tobytes", None)):  # images of PIL
        return f"{type(value).__name__}:{getattr(value, 'mode', '')}{getattr(value, 'size', '')}"
    return type(value).__name__


def _bytes(value: Any) -> bytes | memoryview | None:
    """The content of what is not made of other values, else None."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value).encode(errors="surrogatepass") if not isinstance(value, str) else value.encode(errors="surrogatepass")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.hasobject else _array_bytes(np.asarray(value))
    if callable(getattr(value, "tobytes", None)):
        return bytes(value.tobytes())
    return None


def _tensor_bytes(value: torch.Tensor) -> bytes:
    """Sparse, quantised and other strange ones count by what they are and no more."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return b""
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    most = MOST_BYTES // (2 * max(1, flat.element_size()))
    if flat.numel() > 2 * most:
        flat = torch.cat([flat[:most], flat[-most:]])
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _array_bytes(value: np.ndarray[Any, Any]) -> bytes:
    most = MOST_BYTES // (2 * max(1, value.itemsize))
    if value.size > 2 * most:
        return value.flat[:most].tobytes() + value.flat[-most:].tobytes()
    return value.tobytes()


def _ends(data: bytes | memoryview) -> bytes:
    half = MOST_BYTES // 2
    return bytes(data) if len(data) <= MOST_BYTES else bytes(data[:half]) + bytes(data[-half:])


def _items(value: Any) -> list[Any]:
    """What a value is made of, in a fixed order."""
    if isinstance(value, Mapping):
        return [part for pair in list(value.items())[:_MOST_ITEMS] for part in pair]
    if isinstance(value, list | tuple):
        return [len(value), *value[:_MOST_ITEMS]]
    if isinstance(value, np.ndarray):
        return list(value.flat[:_MOST_ITEMS])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []
