"""One place where an error becomes a line on stderr and an exit code.

Owns: how errors look, as text and as JSON, and the errors that only a command can have. Must not: catch what is a fault of ours; that keeps its
traceback.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Final, NoReturn

import typer

from elasticd.errors import AccessDeniedError, ElasticdError
from elasticd.observability.harmless import harmless

if TYPE_CHECKING:
    from collections.abc import Iterator


class DeclinedError(ElasticdError):
    """A person was asked and said no."""


class WaitInterruptedError(ElasticdError):
    """Ctrl-C while following what goes on by itself."""

    exit_code = 130


LINE_MOST: Final = 10_000
"""Characters of a line that is shown."""
_BREAKS: Final = dict.fromkeys(map(ord, "\n\r\t\v\f"), " ")
_CODES: Final[dict[type[ElasticdError], str]] = {AccessDeniedError: "permission", ElasticdError: "internal"}
"""Codes of docs/api.md that are not the class's name."""


@contextlib.contextmanager
def reported(*, as_json: bool = False) -> Iterator[None]:
    """End the command with one line and the right exit code where its body fails for a reason outside this program.

    Args:
        as_json: print `{"error": {"code", "message", "hint"}}` instead of a line for people.

    Raises:
        typer.Exit: in place of the error.
    """
    try:
        yield
    except ElasticdError as error:
        fail(error, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does: nobody is left to be told.
        _drop_stdout()
        raise typer.Exit(1) from None
    except OSError as error:
        fail(ElasticdError(_of_os(error)), as_json=as_json)


def fail(error: ElasticdError, *, as_json: bool) -> NoReturn:
    """Say it on stderr and end the command with its exit code.

    Raises:
        typer.Exit: always.
    """
    say(error, as_json=as_json)
    raise typer.Exit(error.exit_code) from None


def say(error: ElasticdError, *, as_json: bool) -> None:
    """Say it on stderr, in one line, and go on."""
    document = {"error": {"code": code_of(error), "message": error.message, "hint": error.remedy}}
    print(json.dumps(document) if as_json else f"elasticctl: {one_line(str(error))}", file=sys.stderr, flush=True)


def code_of(error: ElasticdError) -> str:
    """The error's name for programs, as in docs/api.md: "kv_unavailable" for KVUnavailableError."""
    name = type(error).__name__.removesuffix("Error")
    return _CODES.get(type(error)) or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def one_line(text: str) -> str:
    """`text` harmless and in one line: it may hold what a user or a server wrote. Spaces stay as they are, which tables need."""
    return harmless(text[: LINE_MOST + 1].translate(_BREAKS), LINE_MOST).strip()


def _of_os(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename else what


def _drop_stdout() -> None:
    """Keep Python's exit from flushing into the closed pipe and complaining."""
    import os

    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
