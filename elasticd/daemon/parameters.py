"""A value that etcd may hand to a job, as the job's file on this node declares it.

Owns: the schema of one parameter, and which values it takes. Must not: know jobs or commands.
"""

from __future__ import annotations

import math
import re
from typing import Final, Literal, Self

from pydantic import model_validator

from elasticd.daemon.values import Section
from elasticd.rendezvous.records import Parameter

_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")  # as records.Parameter: what etcd may hold
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL: Final = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_LARGEST: Final = 2**53
"""Integers up to here survive JSON."""


class ParameterSpec(Section):
    """A value that `elasticctl start --set name=value` may give.

    Attributes:
        type: `choice` takes one of `choices`.
        default: None: it must be given.
        min: smallest number allowed.
        max: largest number allowed.
    """

    type: Literal["int", "float", "bool", "choice"]
    default: Parameter | None = None
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        self._check_choices()
        if self.type not in ("int", "float") and (self.min is not None or self.max is not None):
            raise ValueError(f"min and max are for numbers, not for {self.type}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is greater than max {self.max:g}")
        if self.default is not None:
            # A file has types: there, text for a number is a slip, and not the only way to say it as on a command line.
            slip = isinstance(self.default, str) != (self.type == "choice")
            if slip or self.accept(self.default) is None:
                raise ValueError(f"default {self.default!r} is not allowed; give {self.allowed}")
        return self

    def _check_choices(self) -> None:
        if (self.type == "choice") != bool(self.choices):
            raise ValueError("type choice needs choices" if self.type == "choice" else f"choices are for type choice, not for {self.type}")
        for choice in self.choices:
            if not _WORD.fullmatch(choice):
                raise ValueError(f"choice {choice[:80]!r} is not made of letters, digits, '_', '.', '+' and '-' alone, at most 64, a letter or digit first")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("a choice is there twice")

    @property
    def allowed(self) -> str:
        """What it takes, for people: "a whole number from 1 to 8"."""
        if self.type == "bool":
            return "true or false"
        if self.type == "choice":
            return "one of " + ", ".join(self.choices)
        kind = "a whole number" if self.type == "int" else "a number"
        if self.min is None:
            return kind if self.max is None else f"{kind}, {self.max:g} or less"
        return f"{kind}, {self.min:g} or greater" if self.max is None else f"{kind} from {self.min:g} to {self.max:g}"

    def accept(self, value: object) -> Parameter | None:
        """The value as this parameter has it, from a typed value or from the text of a command line; None if it is not allowed."""
        if self.type == "bool":
            return value if isinstance(value, bool) else {"true": True, "false": False}.get(value) if isinstance(value, str) else None
        if self.type == "choice":
            word = str(value) if type(value) is int else value  # a client may have taken the word "8" for a number
            return word if isinstance(word, str) and word in self.choices else None
        number = _number(value, whole=self.type == "int")
        if number is None or (self.min is not None and number < self.min) or (self.max is not None and number > self.max):
            return None
        return number


def as_argument(value: Parameter) -> str:
    """As it stands in a command: true and false, 0.0003 for 3e-4."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: object, *, whole: bool) -> int | float | None:
    if isinstance(value, str):
        if not (_INTEGER if whole else _DECIMAL).fullmatch(value):
            return None
        value = int(value) if _INTEGER.fullmatch(value) else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else None
    return value if not whole and math.isfinite(value) else None
