"""Structured logs as JSON lines.

Owns: how a log line looks, which fields are in all of them, and where it goes. Must not: decide what is worth logging, or what is a secret
(`redaction`) or harmless (`harmless`).

Fields of every line, in the daemon, the agent and its membership: `time` (RFC 3339, UTC), `level`, `event`, and those that are bound: `node`, and
`job`, `generation`, `rank`, `step` where they apply. A line is at most LINE_MOST bytes long and one line, tracebacks included.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, TextIO, cast

import structlog

from elasticd.errors import UsageError
from elasticd.observability.fields import TEXT_MOST, clean, told_exception
from elasticd.observability.ownlog import OWN_BYTES, OwnLog
from elasticd.observability.redaction import hidden
from elasticd.observability.shorten import shorten

if TYPE_CHECKING:
    from pathlib import Path

    from structlog.typing import EventDict, WrappedLogger

LINE_MOST: Final = 32 * 1024
"""Bytes of a line. journald cuts longer ones than 48 KiB in pieces (LineMax=, journald.conf(5)), which would be no JSON any more."""

_FIRST: Final = ("time", "level", "event", "job", "node", "rank", "generation", "step")
_bound: dict[str, Any] = {}


def bind(**fields: Any) -> None:
    """Put fields into every line of this process from now on; None takes one out again. A line that names one itself keeps its own."""
    global _bound  # noqa: PLW0603  (of the process, as its log is; replaced whole, so that no thread sees half of it)
    _bound = {name: value for name, value in {**_bound, **fields}.items() if value is not None}


def set_level(level: int) -> None:
    """Write nothing below `level` from now on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def log_to_file(path: Path, *, level: int = logging.INFO, most: int = OWN_BYTES, **fixed: str) -> OwnLog:
    """Append every structlog line of this process to `path`, one JSON object each, with `fixed` fields in all of them.

    Args:
        path: the file; its directory is made if it is missing.
        level: what is less is not written.
        most: bytes after which the file is moved aside, to NAME.1.
        fixed: as of `bind`; those of an earlier log are gone.

    Returns:
        The open file, to be closed by a caller that outlives its logging.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = OwnLog(path, most)
    except OSError as error:
        msg = f"cannot write log {path}: {error.strerror}"
        raise UsageError(msg, remedy="give a directory that can be written") from None
    _configure(cast("TextIO", file), level, fixed, json_line)
    return file


def log_to_stream(stream: TextIO, *, level: int = logging.INFO, most: int = OWN_BYTES, **fixed: str) -> None:
    """Write every structlog line of this process to `stream`: for people if it is a terminal, else as one JSON object a line.

    Under systemd a line begins with its priority, as sd-daemon(3) has it, which journald takes off again. A file is kept below `most` bytes.
    """
    if stream.isatty():
        pretty = structlog.dev.ConsoleRenderer(
            colors="NO_COLOR" not in os.environ, timestamp_key="time", exception_formatter=structlog.dev.plain_traceback, sort_keys=False
        )
        _configure(cast("TextIO", _Unfailing(stream, most)), level, fixed, pretty)
        return
    _configure(cast("TextIO", _Unfailing(stream, most)), level, fixed, _Prioritised() if is_journal(stream) else json_line)


def is_journal(stream: TextIO) -> bool:
    """Whether `stream` is what systemd connected to the journal: JOURNAL_STREAM names its device and inode (systemd.exec(5)).

    The variable alone says nothing: it is inherited by programs whose output somebody has sent elsewhere.
    """
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def log_uncaught(log: WrappedLogger, name: str) -> None:
    """Log what nobody caught, in any thread. What ends the process is also said in one line on standard error, by the program `name`.

    Python itself would print it to standard error, at any length, with whatever an exception's text holds.
    """

    def uncaught(kind: type[BaseException], error: BaseException, *_: object) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.critical("uncaught", exc_info=error)
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{name}: {hidden(f'{kind.__name__}: {error}', 500)}\n")
            sys.stderr.flush()

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            log.critical("uncaught", thread=args.thread.name if args.thread else None, exc_info=args.exc_value)

    def unraisable(args: Any) -> None:
        log.error("unraisable", where=repr(args.object)[:200], exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, uncaught_in_thread, unraisable


def log_libraries(log: WrappedLogger) -> None:
    """Pass on what libraries say by the standard library's logging, from warnings on, and Python's own warnings."""
    logging.basicConfig(handlers=[_Passing(log)], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)


class _Passing(logging.Handler):
    """A handler of the standard library that passes records on."""

    def __init__(self, log: WrappedLogger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a record whose arguments do not fit its text
            self._log.log(min(record.levelno, logging.CRITICAL), "library_says", logger=record.name, text=record.getMessage(), exc_info=record.exc_info)


class _Unfailing:
    """A stream that drops what it cannot take: a full disk must not end the thread that keeps a job together. A file is kept short."""

    def __init__(self, stream: TextIO, most: int) -> None:
        self._stream = stream
        self._most = most

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()
            shorten(self._stream.fileno(), self._most)


def json_line(logger: WrappedLogger, name: str, event: EventDict) -> str:  # noqa: ARG001 - structlog's signature
    """An event that was completed (`_complete`) as one line of JSON, plain ASCII, LINE_MOST bytes at most."""
    for text_most in (TEXT_MOST, 512, 64):
        line = json.dumps(clean(event, text_most))
        if len(line) <= LINE_MOST:
            return line
    return json.dumps({**clean({key: event[key] for key in _FIRST if key in event}, 64), "left_out": len(event)})


class _Prioritised:
    """A renderer whose lines begin with "<N>"."""

    _PRIORITIES: ClassVar = {"critical": 2, "error": 3, "exception": 3, "warning": 4, "info": 6, "debug": 7}

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> str:
        return f"<{self._PRIORITIES.get(event.get('level', 'info'), 6)}>{json_line(logger, name, event)}"


def _complete(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """With the bound fields, those of all lines first, and its exception as text."""
    event = {**_bound, **event}
    exc_info = event.pop("exc_info", None)
    if exc_info and (text := told_exception(exc_info)):
        event = {"exception": text, **event}  # before what there may be too much of
    return {**{name: event[name] for name in _FIRST if name in event}, **event}


def _clean_for_people(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    return clean(event)


def _configure(stream: TextIO, level: int, fixed: dict[str, str], renderer: Any) -> None:
    global _bound  # noqa: PLW0603
    _bound = dict(fixed)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.StackInfoRenderer(),
            _complete,
            *([_clean_for_people] if isinstance(renderer, structlog.dev.ConsoleRenderer) else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
