"""Structured logs as JSON lines.

Owns: how a log line looks and where it goes. Must not: decide what is worth logging.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

import structlog

from elasticd.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class _Unfailing:
    """A file that drops what it cannot take: a full disk must not end the thread that keeps a job together."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()


def log_to_file(path: Path, *, level: int = logging.INFO, **fixed: str) -> TextIO:
    """Append every structlog line of this process to `path`, one JSON object each, with `fixed` fields in all of them.

    Fields of every line: `event`, `level`, `timestamp` (RFC 3339, UTC).

    Returns:
        The open file, to be closed by a caller that outlives its logging.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        msg = f"cannot write log {path}: {error.strerror}"
        raise UsageError(msg, remedy="give a directory that can be written") from None
    _configure(cast("TextIO", _Unfailing(file)), level, fixed, structlog.processors.JSONRenderer(default=str))
    return file


def log_to_stream(stream: TextIO, *, level: int = logging.INFO, **fixed: str) -> None:
    """Write every structlog line of this process to `stream`: for people if it is a terminal, else as one JSON object a line.

    Under systemd a line begins with its priority, as sd-daemon(3) has it, which journald takes off again.
    """
    if stream.isatty():
        _configure(stream, level, fixed, structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ))
        return
    plain = structlog.processors.JSONRenderer(default=str)
    _configure(cast("TextIO", _Unfailing(stream)), level, fixed, _Prioritised(plain) if "JOURNAL_STREAM" in os.environ else plain)


class _Prioritised:
    """A renderer whose lines begin with "<N>"."""

    _PRIORITIES: ClassVar = {"critical": 2, "error": 3, "exception": 3, "warning": 4, "info": 6, "debug": 7}

    def __init__(self, plain: structlog.processors.JSONRenderer) -> None:
        self._plain = plain

    def __call__(self, logger: Any, name: str, event: Any) -> str:
        return f"<{self._PRIORITIES.get(event.get('level', 'info'), 6)}>{self._plain(logger, name, event)!s}"


def _configure(stream: TextIO, level: int, fixed: dict[str, str], renderer: Any) -> None:
    pretty = isinstance(renderer, structlog.dev.ConsoleRenderer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            lambda _logger, _method, event: {**fixed, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if pretty else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
