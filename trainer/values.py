"""Values with tensors in them, as a table of tensors and a value without, for `wire.extras`; and back again.

Owns: the marks that stand for tensors, and for what JSON does not know. Must not: know what was registered.

::

    {"lr": 0.1, "mean": tensor, "of": deque([1], 5)}    {"lr": 0.1, "mean": {"$tensor": "ema.mean"}, "of": {"$deque": [[1], 5]}}
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainer.errors import SetupError

TENSOR: Final = "$tensor"
_MARKS: Final = (TENSOR, "$array", "$numpy", "$dtype", "$ordered", "$deque", "$set")


def join(*names: str) -> str:
    """Names one below the other; empty ones are left out."""
    return ".".join(name for name in names if name)


def sound(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it can be kept.

    Raises:
        SetupError: it is sparse, quantized, or has no values.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "on the meta device" if tensor.device.type == "meta" else "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise SetupError(f"{name} is {kind}, which cannot be kept", remedy="keep dense tensors with values")
    return tensor


def flatten(value: Any, path: str, found: dict[str, Tensor]) -> Any:
    """Take the tensors out of a value.

    Args:
        value: nested as one likes.
        path: full name of the value itself.
        found: where the tensors go, by their full names.

    Returns:
        The value with marks for its tensors, and for what JSON does not know: NumPy's numbers and arrays, dtypes, ordered dicts, deques, sets.

    Raises:
        SetupError: a tensor or key that cannot be kept. What else cannot is left for `pack_extras` to refuse.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, Tensor):
        found[path] = sound(path, value)
        return {TENSOR: path}
    if isinstance(value, Mapping):
        return _flatten_mapping(value, path, found)
    if isinstance(value, list | tuple | deque):
        items = [flatten(item, join(path, str(index)), found) for index, item in enumerate(value)]
        if isinstance(value, deque):
            return {"$deque": [items, value.maxlen]}
        return items if isinstance(value, list) else tuple(items)
    return _flatten_leaf(value, path, found)


def _flatten_mapping(value: Mapping[Any, Any], path: str, found: dict[str, Tensor]) -> Any:
    if any(mark in value for mark in _MARKS):
        raise SetupError(f"{path} has a key like ours, {' or '.join(_MARKS)}", remedy="call it otherwise")
    items = {key: flatten(item, join(path, str(key)), found) for key, item in value.items()}
    if isinstance(value, OrderedDict):
        return {"$ordered": [[key, item] for key, item in items.items()]}
    return Counter(items) if isinstance(value, Counter) else items


def _flatten_leaf(value: Any, path: str, found: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"$numpy": [value.dtype.str, value.item()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        found[path] = torch.from_numpy(np.ascontiguousarray(value))
        return {"$array": path}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, set | frozenset):
        return {"$set": sorted(value)}
    if value is not None and not isinstance(value, bytes):
        raise SetupError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept",
            remedy="keep numbers, texts, lists, dicts and tensors in a state",
        )
    return value


def rebuild(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `flatten` made this of, given its tensors by path."""
    if isinstance(value, list):
        return [rebuild(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(rebuild(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        mark, content = next(iter(value.items()))
        make = _REBUILT.get(mark)
        if make is not None:
            return make(content, tensors)
    items = {key: rebuild(item, tensors) for key, item in value.items()}
    return Counter(items) if isinstance(value, Counter) else items


_REBUILT: Final[Mapping[object, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    TENSOR: lambda path, tensors: tensors[path],
    "$array": lambda path, tensors: tensors[path].numpy(),
    "$numpy": lambda content, _: np.dtype(content[0]).type(content[1]),
    "$dtype": lambda name, _: getattr(torch, name),
    "$ordered": lambda pairs, tensors: OrderedDict((key, rebuild(item, tensors)) for key, item in pairs),
    "$deque": lambda content, tensors: deque((rebuild(item, tensors) for item in content[0]), content[1]),
    "$set": lambda items, _: set(items),
}
