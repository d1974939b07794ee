"""What is typed and cannot be understood: one line on stderr, like every other error.

Owns: the group of all verbs, and how its parser's complaints look. Must not: know any verb.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperGroup

from elasticd.cli.failures import say
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_Complaint: Final[type[Exception]] = typer.BadParameter.__mro__[1]
"""The parser's UsageError, which typer does not export."""


class Verbs(TyperGroup):
    """All verbs. A line that cannot be parsed ends with exit code 2 and one line, as JSON where `-o json` was typed."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """See `TyperGroup`; it always ends in SystemExit."""
        typed = list(sys.argv[1:] if args is None else args)
        try:
            # With nothing typed it shows the help, in its own way.
            alone = standalone_mode and not typed
            code = super().main(typed, prog_name, complete_var, alone, windows_expand_args, **extra)
        except _Complaint as complaint:
            say(_in_our_words(complaint), as_json=wants_json(typed))
            sys.exit(UsageError.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def wants_json(typed: Sequence[str]) -> bool:
    """Whether the answer is for a program, as far as a line that cannot be parsed says."""
    for at, word in enumerate(typed):
        if word == "--":
            return False
        value = word.partition("=")[2] if word.startswith("--output=") else word[2:] if word.startswith("-o") else ""
        if word in ("-o", "--output"):
            value = typed[at + 1] if at + 1 < len(typed) else ""
        if value in ("json", "jsonl"):
            return True
    return False


def _in_our_words(complaint: Any) -> UsageError:
    message = " ".join(complaint.format_message().split()).rstrip(".")
    context = complaint.ctx
    return UsageError(message[:1].lower() + message[1:], remedy=f"see {context.command_path} --help" if context else "")
