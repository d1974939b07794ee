"""An exception as text for a log: where and what, never with what.

Owns: how much of it is told, and in which order. Must not: show local variables, raise for what an exception's own code does, or be long.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Final

from elasticd.observability.redaction import hidden

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAIN_MOST: Final = 4
"""Exceptions that are told of a chain of causes, the last ones."""
FRAMES_MOST: Final = 16
"""Frames that are told of each, the innermost."""
MESSAGE_MOST: Final = 1000
"""Characters of what an exception says."""
GROUP_MOST: Final = 4
"""Exceptions of a group that are named."""
_LINE_MOST: Final = 200
_CAUSED: Final = "The above exception was the direct cause of the following exception:"
_MEANWHILE: Final = "During handling of the above exception, another exception occurred:"


def traceback_text(error: BaseException) -> str:
    """`error` with its causes as Python tells them, without secrets and harmless, in a few thousand characters. Its last line says what went wrong."""
    chain = list(_chain(error))
    told = [_one(one) + [one_joint] * bool(one_joint) for one, one_joint in reversed(chain[:CHAIN_MOST])]
    left_out = [f"({len(chain) - CHAIN_MOST} or more earlier exceptions are left out)"] if len(chain) > CHAIN_MOST else []
    return "\n".join([*left_out, *(line for lines in told for line in lines)])


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """It and its causes, the latest first, each with the sentence that leads to the one after it."""
    seen: set[int] = set()
    link = ""
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) <= CHAIN_MOST:
        seen.add(id(current))
        yield current, link
        cause, context = current.__cause__, current.__context__
        link = _CAUSED if cause is not None else _MEANWHILE
        current = cause if cause is not None or current.__suppress_context__ else context


def _one(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__, limit=-FRAMES_MOST)
    lines = ["Traceback (most recent call last):"] if frames else []
    for frame in frames:
        lines.append(hidden(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}', _LINE_MOST))
        if frame.line:
            lines.append(hidden(f"    {frame.line}", _LINE_MOST))
    lines += _members(error)
    return [*lines, _said(error, MESSAGE_MOST)]


def _members(error: BaseException) -> list[str]:
    if not isinstance(error, BaseExceptionGroup):
        return []
    shown = [f"  | {_said(one, _LINE_MOST)}" for one in error.exceptions[:GROUP_MOST]]
    rest = len(error.exceptions) - len(shown)
    return [*shown, f"  | and {rest} more"] if rest else shown


def _said(error: BaseException, limit: int) -> str:
    """Its type and message, and what was noted of it: the code behind both is not ours."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
        notes = [str(note)[:limit] for note in getattr(error, "__notes__", ())[:GROUP_MOST]]
    except Exception:
        message, notes = "(it cannot be told)", []
    return hidden("\n".join([f"{name}: {message}" if message else name, *notes]), limit, keep="\n\t")
