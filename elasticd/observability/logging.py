"""Structured logs as JSON lines.

Owns: how a log line looks and where it goes. Must not: decide what is worth logging.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, cast

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
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            lambda _logger, _method, event: {**fixed, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Unfailing(file))),
        cache_logger_on_first_use=False,
    )
    return file
