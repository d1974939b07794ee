"""Values that came from elsewhere, taken apart with suspicion.

Owns: what a name, a text, a number and a time may be. Must not: know what they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeVar

from elasticd.errors import RecordError

TEXT_MAX: Final = 1000
"""Characters of a text that are kept."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]{0,255}")

E = TypeVar("E", bound=StrEnum)
_MISSING: Final = object()


class Reader:
    """One mapping, taken apart key by key; what is left over at the end is refused.

    All methods raise RecordError for what they do not expect. Its message names the place.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise RecordError(f"{where}: not a mapping")
        self._data = dict(data)
        self._where = where

    def fail(self, key: str, what: str) -> RecordError:
        """What is wrong with one key."""
        return RecordError(f"{self._where}.{key}: {what}")

    def take(self, key: str, default: object = _MISSING) -> object:
        """The value of a key, which then is read."""
        value = self._data.pop(key, default)
        if value is _MISSING:
            raise self.fail(key, "missing")
        return value

    def end(self, derived: frozenset[str] = frozenset()) -> None:
        """Nothing is left but what repeats the rest."""
        left = sorted(str(key)[:60] for key in self._data if key not in derived)
        if left:
            raise self.fail(left[0], "not known")

    def text(self, key: str, default: object = _MISSING) -> str:
        """Any text, made harmless."""
        value = self.take(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "not a text")
        return harmless(value)

    def name(self, key: str, default: object = _MISSING) -> str:
        """A text that can stand in a key; "" only where that is the default."""
        value = self.take(key, default)
        if value == default == "":
            return ""
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            raise self.fail(key, "not a name")
        return value

    def word(self, key: str, words: type[E], default: object = _MISSING) -> E:
        """One of a few words."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in {word.value for word in words}:
            raise self.fail(key, f"not one of {', '.join(words)}")
        return words(value)

    def flag(self, key: str) -> bool:
        """False where it is missing."""
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise self.fail(key, "neither true nor false")
        return value

    def whole(self, key: str, least: int) -> int:
        """A whole number."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
            raise self.fail(key, f"not a whole number from {least} on")
        return value

    def whole_or_none(self, key: str) -> int | None:
        """None where it is missing."""
        return None if self._data.get(key) is None and self.take(key, None) is None else self.whole(key, 0)

    def time(self, key: str) -> float:
        """Seconds since the epoch, or of a duration."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 2**53:
            raise self.fail(key, "not a time in seconds")
        return float(value)

    def time_or_none(self, key: str) -> float | None:
        """None where it is missing."""
        return None if self._data.get(key) is None and self.take(key, None) is None else self.time(key)

    def measured(self, key: str, default: object = _MISSING) -> float | None:
        """A number; None for one that is not finite, which is what a finding may be about."""
        value = self.take(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "not a number")
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None

    def sequence(self, key: str, most: int) -> Sequence[object]:
        """A list of that many entries at most."""
        value = self.take(key, ())
        if not isinstance(value, list | tuple):
            raise self.fail(key, "not a list")
        if len(value) > most:
            raise self.fail(key, f"{len(value)} entries, more than the {most} believed")
        return value

    def counts(self, key: str) -> dict[str, int]:
        """Whole numbers by name."""
        inner = Reader(self.take(key), f"{self._where}.{key}")
        if not all(isinstance(name, str) for name in inner._data):
            raise self.fail(key, "a name that is no text")
        return {name: inner.whole(name, 0) for name in list(inner._data)}

    def times(self, key: str, most: int) -> dict[str, float]:
        """Times by name."""
        inner = Reader(self.take(key), f"{self._where}.{key}")
        names = list(inner._data)
        if len(names) > most or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
            raise self.fail(key, "too many names, or one that is none")
        return {name: inner.time(name) for name in names}


def harmless(text: str) -> str:
    """A text of somebody else's, cut, and on one line."""
    cut = text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
    return "".join(char if char.isprintable() else " " for char in cut)
