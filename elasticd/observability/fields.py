"""What becomes of the fields of an event before they are written: plain, bounded, harmless, and without secrets.

Owns: that. Must not: add fields, or choose a format.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from elasticd.observability.harmless import CUT
from elasticd.observability.redaction import HIDDEN, Secrecy, hidden, is_secret, secrecy
from elasticd.observability.tracebacks import traceback_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TEXT_MOST: Final = 4096
"""Characters of a text in a field."""
ITEMS_MOST: Final = 2048
"""Values of an event, nested ones included: a node has a thousand workers at most."""
TEXTS_MOST: Final = 16
"""How many texts of full length an event may have; what comes after them is left out."""
DEPTH_MOST: Final = 6
KEY_MOST: Final = 64

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OPTION: Final = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]{0,127})")
_BITS_MOST: Final = 256


def clean(event: Mapping[str, Any], text_most: int = TEXT_MOST) -> dict[str, Any]:
    """The fields as they may be written, in plain values that JSON knows.

    Args:
        event: whatever was logged. Its event's name is kept as it is, if it is one.
        text_most: characters of a text; of a traceback three times as many.
    """
    return _Cleaner(text_most).table(event, 0)


class _Cleaner:
    """Cleans one event: counts what it has taken in."""

    def __init__(self, text_most: int) -> None:
        self._text_most = text_most
        self._left = ITEMS_MOST
        self._room = TEXTS_MOST * text_most

    def table(self, table: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for key, value in list(table.items()):
            if self._left <= 0:
                told[CUT] = f"{len(table) - len(told)} more"
                break
            name = key if isinstance(key, str) else _text_of(key)
            told[hidden(name, KEY_MOST)] = self._field(name, value, depth)
        return told

    def _field(self, name: str, value: Any, depth: int) -> Any:
        if is_secret(name, value):
            self._left -= 1
            return HIDDEN
        if depth == 0 and isinstance(value, str):
            if name == "event" and _NAME.fullmatch(value):
                self._left -= 1
                return value
            if name in ("exception", "stack"):
                self._left -= 1
                return self._text(value, 3 * self._text_most, keep="\n\t")
        return self._value(value, depth)

    def _value(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value, self._text_most)
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _BITS_MOST else f"a number of {value.bit_length()} bits"
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return self._text(bytes(value[: 5 * self._text_most]), self._text_most)
        if isinstance(value, BaseException):
            return self._text(f"{type(value).__name__}: {_text_of(value)}", self._text_most)
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._container(value, depth + 1)
        return self._text(_text_of(value), self._text_most)

    def _text(self, text: str | bytes, limit: int, *, keep: str = "") -> str:
        self._room -= min(len(text), limit)
        if self._room < 0:
            self._left = 0
        return hidden(text, limit, keep=keep)

    def _container(self, value: Any, depth: int) -> Any:
        if depth > DEPTH_MOST:
            return CUT
        if isinstance(value, dict):
            return self.table(value, depth)
        return self._sequence(value, depth)

    def _sequence(self, values: Iterable[Any], depth: int) -> list[Any]:
        told: list[Any] = []
        name = ""  # of an option, or of the first of a pair, whose value comes next
        pair = isinstance(values, tuple | list) and len(values) == 2
        for value in values:
            if self._left <= 0:
                told.append(CUT)
                break
            told.append(HIDDEN if name and is_secret(name, value) else self._value(value, depth))
            name = _announced(value, pair=pair and len(told) == 1)
        return told


def _announced(value: object, *, pair: bool) -> str:
    """The name of a secret whose value comes next, as in `--token VALUE` or ("authorization", VALUE); "" if it is none."""
    if not isinstance(value, str) or len(value) > 2 * KEY_MOST:
        return ""
    option = _OPTION.fullmatch(value)
    name = option[1] if option else value if pair and " " not in value else ""
    return name if name and secrecy(name) is not Secrecy.NONE else ""


def _text_of(value: object) -> str:
    """As text: the code behind it is not ours."""
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be told>"


def told_exception(exc_info: object) -> str | None:
    """What `exc_info` of a logging call stands for, as text: True, an exception, or the three values of `sys.exc_info`."""
    error = sys.exc_info()[1] if exc_info is True else exc_info[1] if isinstance(exc_info, tuple) and len(exc_info) == 3 else exc_info
    return traceback_text(error) if isinstance(error, BaseException) else None
