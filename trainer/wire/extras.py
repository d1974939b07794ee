r"""Values that are no tensors, as JSON: learning rates, counters, the data cursor, the state of random number generators.

Owns: what may be kept and how it is written. Must not: import torch, execute or unpickle anything.

Text is the same for the same values, whatever the order of a dict, so that replicas agree byte for byte. What JSON lacks is written as an object
with the one key "$elasticd"::

    (1, 2)          {"$elasticd": ["tuple", [1, 2]]}
    math.inf        {"$elasticd": ["float", "inf"]}
    {1: "a"}        {"$elasticd": ["dict", [[1, "a"]]]}         keys that are no texts
    Counter("aa")   {"$elasticd": ["counter", [["a", 2]]]}
    b"\0"            {"$elasticd": ["bytes", "00"]}
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from trainer.errors import DamagedError, SetupError

TAG: Final = "$elasticd"
MAX_DEPTH: Final = 100


def pack_extras(value: Mapping[str, Any]) -> bytes:
    """Write values as canonical JSON: the same values give the same bytes.

    None, bool, int, float, text, bytes, list, tuple, dict and Counter may be nested. Order in a dict is lost, a subclass comes back as its base.

    Raises:
        SetupError: one of them is something else, or nested too deeply; the message says where it stands.
    """
    return _dump(_packed(dict(value), "")).encode()


def unpack_extras(data: bytes) -> dict[str, Any]:
    """Read them again.

    Raises:
        DamagedError: this is no such JSON.
    """
    try:
        value = _unpacked(json.loads(data), 0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"extras that cannot be read: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise DamagedError("extras that are no table")
    return value


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _packed(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise SetupError(f"{where[:80]}… is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: ["float", repr(float(value))]}
    if isinstance(value, bytes):
        return {TAG: ["bytes", value.hex()]}
    if isinstance(value, list | tuple):
        items = [_packed(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: ["tuple", items]}
    if isinstance(value, Mapping):
        return _packed_table(value, where, depth)
    kind = type(value)
    raise SetupError(f"{where.lstrip('.')} is a {kind.__module__}.{kind.__qualname__}", remedy="keep numbers, texts, lists, dicts and tensors in a state")


def _packed_table(value: Mapping[Any, Any], where: str, depth: int) -> Any:
    plain = all(isinstance(key, str) for key in value) and TAG not in value and not isinstance(value, Counter)
    if plain:
        return {str(key): _packed(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    pairs = [[_packed(key, f"{where}.{key}", depth + 1), _packed(item, f"{where}.{key}", depth + 1)] for key, item in value.items()]
    return {TAG: ["counter" if isinstance(value, Counter) else "dict", sorted(pairs, key=lambda pair: _dump(pair[0]))]}


def _unpacked(value: Any, depth: int) -> Any:
    if depth > 4 * MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        return [_unpacked(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _unpacked(item, depth + 1) for key, item in value.items()}
    kind, content = value[TAG]
    if kind == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
    if kind == "bytes":
        return bytes.fromhex(content)
    items = _unpacked(content, depth + 1)
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    if kind == "counter":
        return Counter(dict(items))
    raise ValueError(f"a {kind!r}")
