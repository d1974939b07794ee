"""Where the output of each generation's workers lies, and what it says about how a worker ended.

Owns: the directories below the log root, and reading torch's error file. Must not: delete, truncate or rotate anything (`retention` and `rotation`
do), or start a process.

::

    <root>/<job>/<node>/latest -> generation-000007-2
    <root>/<job>/<node>/generation-000007/incarnation          which agent wrote it
    <root>/<job>/<node>/generation-000007/rank-3/{stdout.log,stderr.log,error.json}
    <root>/<job>/<node>/generation-000007/rank-3.stdout.log.1   older lines of stdout.log, once there are too many (`rotation`)
    <root>/<job>/<node>/generation-000007-2/...                 the same generation, after the agent was restarted

torchrun empties a directory before it uses it again, and a membership change reuses the number: the logs that tell why a node was lost are gone
(torch 2.13, DefaultLogsSpecs.reify). Here every start gets a directory of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import signal
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.errors import UsageError
from elasticd.observability.redaction import hidden

if TYPE_CHECKING:
    from pathlib import Path

ERROR_FILE_LIMIT: Final = 1 << 20
"""Bytes of an error file that are read. torch writes one message and one traceback: a few kilobytes."""

MESSAGE_LIMIT: Final = 4096
"""Characters kept of a worker's message: it travels through etcd, to every node."""

EXCEPTION_LIMIT: Final = 200
"""Characters kept of the one line that names the exception."""

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
END_READ: Final = 64 * 1024
"""Bytes of a worker's standard error in which its last exception is looked for."""

TRACEBACK: Final = "Traceback (most recent call last):"
_RANKED: Final = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before each line once there is a process group."""
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]{0,200}(: .*)?$")
_SYNTAX: Final = re.compile(r"(SyntaxError|IndentationError|TabError): ")
_LATEST: Final = "latest"

log = structlog.stdlib.get_logger(__name__)


def safe_name(name: str, what: str) -> str:
    """`name` itself, if it is one harmless path component: letters, digits, `_`, `.` and `-`, not starting with `.` or `-`, 128 at most.

    Args:
        name: the name of a job or node.
        what: what it names, for the message.

    Raises:
        UsageError: it is not; "..", "/" and an empty name among them.
    """
    if _SAFE_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{what} name {name[:200]!r} cannot be used in a path",
            remedy="use 1 to 128 letters, digits, '_', '.' or '-', beginning with a letter, digit or '_'",
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLogs:
    """Files of one worker. They need not exist.

    Attributes:
        directory: exists.
        stdout: what the worker printed.
        stderr: the same for standard error.
        error: for TORCHELASTIC_ERROR_FILE, which `@record` of torch.distributed.elastic writes; see `read_error`.
    """

    directory: Path
    stdout: Path
    stderr: Path
    error: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationLogs:
    """The directory of one generation on one node, as one agent started it."""

    directory: Path

    @classmethod
    def create(cls, root: Path, job: str, node: str, generation: int, incarnation: str, *, passage: bool = False) -> GenerationLogs:
        """Make a new directory and point `latest` at it.

        Args:
            root: directory for the logs of all jobs; made if missing.
            job: name of the job.
            node: name of the node.
            generation: number of the generation, 0 or more.
            incarnation: id of the agent's process, written to the file `incarnation`.
            passage: let everybody pass through the directories below `root` that are ours, and our group read them, whatever the umask: workers
                who are another user have their error file below.

        Raises:
            UsageError: a name is not safe in a path, or the directory cannot be made.
        """
        parent = root / safe_name(job, "job") / safe_name(node, "node")
        if generation < 0:
            raise UsageError(f"generation {generation} is negative")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            directory = _make_new(parent, f"generation-{generation:06d}")
            (directory / "incarnation").write_text(f"{incarnation}\n", encoding="utf-8")
            if passage:
                _open(parent.parent, parent, directory)
        except OSError as error:
            raise UsageError(f"cannot make a log directory in {str(parent)!r}: {error.strerror}") from error
        _point_latest(parent, directory.name)
        return cls(directory=directory)

    def rank(self, rank: int) -> RankLogs:
        """Files of the worker with this rank; makes their directory.

        Raises:
            UsageError: the directory cannot be made.
        """
        directory = self.directory / f"rank-{rank}"
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make log directory {str(directory)!r}: {error.strerror}") from error
        return RankLogs(directory=directory, stdout=directory / "stdout.log", stderr=directory / "stderr.log", error=directory / "error.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerError:
    """What a worker said of its own end. All text is harmless and without secrets: it came from a file that a user's program wrote.

    Attributes:
        message: as torch wrote it, `MESSAGE_LIMIT` characters at most.
        exception: its first line, as "ValueError: no such layer", `EXCEPTION_LIMIT` characters at most.
        timestamp: seconds since the epoch by the worker's clock; None if it gave none. The earliest in a job is the likely cause.
    """

    message: str
    exception: str
    timestamp: float | None


def read_error(path: Path) -> WorkerError | None:
    """Parse torch's error file; None if there is none, or nothing in it that can be read. Never raises for what the file holds.

    The format is that of `ErrorHandler.record_exception` in torch.distributed.elastic.multiprocessing.errors (2.13):
    {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": "1700000000"}}}, or {"message": text}.
    A file over `ERROR_FILE_LIMIT` is not parsed; the message then says so.
    """
    try:
        data = _read_regular(path)
    except (OSError, ValueError):
        return None
    if len(data) > ERROR_FILE_LIMIT:
        return _worker_error(f"error file {path} is over {ERROR_FILE_LIMIT} bytes and was not read", None)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        log.warning("error file is not JSON", path=str(path))
        return None
    return _parse_error(document)


def read_traceback(path: Path) -> WorkerError | None:
    """The last exception on a worker's standard error; None if there is none near the end. Never raises for what the file holds.

    Most scripts are not decorated with torch's `record`, and leave nothing else.
    """
    try:
        text = _read_end(path).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    _, found, after = text.rpartition(TRACEBACK)
    lines = [_RANKED.sub("", line) for line in (after if found else text).splitlines()]
    shape = _EXCEPTION if found else _SYNTAX  # Python shows no stack for a script that it cannot even read
    for place, line in enumerate(lines):
        if shape.match(line):
            return _worker_error("\n".join(lines[place:]), None)
    return None


def describe_exit(code: int) -> str:
    """An exit code as `subprocess` gives it, in words: "exit code 1", or "killed by SIGKILL (9)" for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"killed by signal {-code}"


def _make_new(parent: Path, stem: str) -> Path:
    """A directory that did not exist: `stem`, or else `stem`-2, `stem`-3, ..."""
    for attempt in itertools.count(1):
        directory = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError


def _open(*directories: Path) -> None:
    """Passage for all, and reading for our group, where the directory is ours to open."""
    for directory in directories:
        status = directory.stat()
        if status.st_uid == os.geteuid():
            directory.chmod(stat.S_IMODE(status.st_mode) | 0o051)


def _point_latest(parent: Path, target: str) -> None:
    """Replace the link in one step, so that a reader always finds one. It is a convenience: failing to is only logged."""
    link = parent / _LATEST
    fresh = parent / f".{_LATEST}-{secrets.token_hex(8)}"
    try:
        if link.exists() and not link.is_symlink():
            raise FileExistsError(0, "is there already and is not a link", str(link))
        fresh.symlink_to(target)
        fresh.replace(link)
    except OSError as error:
        log.warning("cannot update link", link=str(link), target=target, error=error.strerror)
        with suppress(OSError):
            fresh.unlink()


def _read_regular(path: Path) -> bytes:
    """One byte more than the limit at most, never waiting on a pipe that the worker put there, nor following a link to what only we may read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ValueError("not a file of its own")
        return file.read(ERROR_FILE_LIMIT + 1)


def _read_end(path: Path) -> bytes:
    """The last `END_READ` bytes, with the same care."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")
        file.seek(max(0, status.st_size - END_READ))
        return file.read(END_READ)


def _parse_error(document: object) -> WorkerError | None:
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        timestamp = extra.get("timestamp") if isinstance(extra, dict) else None
        message = message.get("message")
    else:
        timestamp = None
    return _worker_error(message, timestamp) if isinstance(message, str) else None


def _worker_error(message: str, timestamp: object) -> WorkerError:
    text = hidden(message, MESSAGE_LIMIT, keep="\n\t")  # it goes to terminals, and to etcd as UTF-8
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return WorkerError(message=text, exception=first_line[:EXCEPTION_LIMIT], timestamp=_seconds(timestamp))


def _seconds(value: object) -> float | None:
    if not isinstance(value, str | int | float):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
