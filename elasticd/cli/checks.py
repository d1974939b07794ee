"""Numbers from a command line, checked.

Owns: the words for a number out of range. Must not: import anything slow; every verb uses it.
"""

from __future__ import annotations

from elasticd.errors import UsageError


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Refuse a number out of range, naming the option. What is no number at all is out of every range.

    Raises:
        UsageError: it is.
    """
    if not least <= value <= most:
        raise UsageError(f"{option} {_written(value)}: must be from {_written(least)} to {_written(most)}")


def _written(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
