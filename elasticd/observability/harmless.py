"""Text that others wrote, as it may stand in a log, a record or on a screen.

Owns: what becomes of control characters, of what is no UTF-8, and of too much. Must not: look for secrets (`redaction` does).

What others write may hold orders to a terminal (ANSI sequences, C1 controls, carriage returns), characters that turn the rest of a line around
(bidi overrides), line breaks that few think of (U+2028), half characters (surrogates), and may be a million characters long.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "?"
"""What stands for a character that is left out."""
CUT: Final = "…"
"""What stands for the rest."""

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\^_])")
_COLOUR: Final = re.compile(r"(\x1b\[[0-9;:]{0,32}m)")


def harmless(text: str | bytes, limit: int, *, keep: str = "") -> str:
    """`text` without what could steer a terminal, break a line, or not be UTF-8: each such character becomes "?".

    The cost is bounded by `limit`, however long the text is.

    Args:
        text: bytes are taken for UTF-8; what is none becomes U+FFFD.
        limit: characters of the result, 1 or more; what was cut off ends with "…".
        keep: control characters that may stay: line breaks and tabs, where lines are kept.
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit + 4].decode("utf-8", "replace")
    short = text if len(text) <= limit else text[: limit - 1] + CUT
    if short.isprintable():
        return short
    return "".join(char if char.isprintable() or char in keep else MARK for char in short)


def one_line(text: str | bytes, limit: int) -> str:
    """The same in one line: line breaks and other white space, however much, become one space."""
    most = 8 * limit + 8
    if isinstance(text, bytes):
        text = text[:most].decode("utf-8", "replace")
    line = " ".join(text[:most].split())
    return harmless(line + CUT if len(text) > most else line, limit)


def unstyled(text: str) -> str:
    """`text` without the ANSI sequences in it: colours, links, cursor movements. What is left is still to be made harmless."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def coloured(text: str | bytes, limit: int) -> str:
    """`text` for a terminal: harmless, but for colours and tabs. Whoever prints it sees that the colours end with it."""
    if isinstance(text, bytes):
        text = text[: 4 * limit + 4].decode("utf-8", "replace")
    text = text[:limit]
    if "\x1b" not in text:
        return harmless(text, limit, keep="\t")
    parts = _COLOUR.split(text)  # odd ones are colours
    return "".join(part if number % 2 else harmless(unstyled(part), limit, keep="\t") for number, part in enumerate(parts))
