"""Directories of logs, as agents write them: read back in the order of time, or followed while they grow.

Owns: which file is what, and when a line was written that does not say so. Must not: know the form of a line (`sources`), judge, or hold what was read.

    replay(Path("logs/digits"))     all of it, once, the oldest first
    Follower(directory).poll(now)   what is new since the call before

A directory as elasticd's agents write it is <job>/<node>/generation-000007/rank-3/stdout.log; of others `rank-3` or torchrun's `attempt_0/3` in a path
names the rank. What lies in a rank's directory was written by the user's program, and is believed nothing but its lines.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from detectors.observations import Line, Observation, Stream
from detectors.sources import JSON_MAX, LINE_MAX, Origin, Reader, kernel_line, observations, parse_time, plain_line

FILES_MAX: Final = 100_000
"""Files that are looked at."""
DEPTH_MAX: Final = 8
POLL_MAX: Final = 1 << 20
"""Bytes of one file that one poll reads."""
LOOK_EVERY: Final = 10.0
"""Seconds after which new files are looked for though no directory seems to have changed."""
QUIET: Final = 60
"""Polls in a row without a line after which a file is looked at so rarely too."""
RECENT: Final = 600.0
"""Seconds, before the last change of any, in which a directory must have changed to be watched."""
_CHUNK: Final = 32 * 1024
_PLAIN_MAX: Final = 4 * LINE_MAX
_ERROR_MAX: Final = 1 << 20
_TAIL: Final = 256
_SLACK: Final = 5.0  # seconds that a time in a line may lie outside the time of its file
_GENERATION: Final = re.compile(r"generation-(\d{1,15})(?:-\d+)?")
_RANK: Final = re.compile(r"(?:.*[^a-z])?rank[-_]?(\d{1,6})(?:\..*)?", re.IGNORECASE)
_ATTEMPT: Final = re.compile(r"attempt_\d+")
_STAMP: Final = re.compile(rb"\W{0,2}(?:\w{1,10}: ?)?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)")
_JSON: Final = frozenset({".jsonl", ".ndjson"})
_PLAIN: Final = frozenset({".log", ".out", ".err", ".txt", ".stdout", ".stderr"})
_KERNEL: Final = re.compile(r"(?:dmesg|kmsg|kern(?:el)?)(?:[.-].*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A file, with those that hold its older lines.

    Attributes:
        paths: the oldest lines first; the file itself is the last.
        kind: "json", "kernel", "plain" or "error" (torch's error file).
        origin: what is true of its lines.
        folder: of the generation that it belongs to, None if it belongs to none.
    """

    paths: tuple[Path, ...]
    kind: str
    origin: Origin
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """When workers ran, seconds since the epoch."""

    began: float
    ended: float


def find(directory: Path) -> list[Found]:
    """All files below that hold lines, by their paths. Links are not followed: `latest` would be read twice.

    Raises:
        OSError: the directory itself cannot be read.
    """
    paths, _ = _walk(directory)
    known = set(paths)
    return [found for path in paths if (found := _found(directory, path, known))]


def replay(directory: Path) -> Iterator[Observation]:
    """All that a directory of logs tells, in the order of time. Of each file a piece is held at a time.

    A printed line has the time that stands at its beginning, if it is one at which the worker ran; others are spread over the time between those.

    Raises:
        OSError: the directory cannot be read.
    """
    found = find(directory)
    spans = _spans(found)
    reader = Reader()
    heap: list[tuple[float, int, int, Observation | None, Iterator[Observation]]] = []
    for number, file in enumerate(found):
        span = spans.get(file.folder) if file.folder else None
        heapq.heappush(heap, (span.began if span else 0.0, 0, number, None, _read(file, span, reader)))
    while heap:
        at, _, number, observation, rest = heapq.heappop(heap)
        if observation is not None:
            yield observation
        following = next(rest, None)
        if following is not None:  # a file's own order holds, whatever its times say
            heapq.heappush(heap, (max(at, following.at), 1, number, following, rest))


class Follower:
    """Reads what is added to the files below a directory. For one thread at a time.

    Args:
        directory: it may be made later.
        from_end: of what is there at the first poll, nothing is told.
    """

    def __init__(self, directory: Path, *, from_end: bool = False) -> None:
        self._directory = directory
        self._skip = from_end
        self._reader = Reader()
        self._files: dict[Path, _Followed] = {}
        self._passed: set[Path] = set()  # files that hold no lines
        self._folders: dict[Path, int] = {}  # that are watched, and when their entries changed last
        self._looked = -math.inf

    def poll(self, now: float) -> list[Observation]:
        """What came since the call before, the oldest first.

        Args:
            now: seconds since the epoch: the time of lines that say none.
        """
        whole = not 0 <= now - self._looked < LOOK_EVERY
        if whole or any(_changed(folder) != changed for folder, changed in self._folders.items()):
            self._look(now)
        told: list[Observation] = []
        for followed in self._files.values():
            if whole or followed.quiet < QUIET:
                for raw in followed.read():
                    told += _observed(followed.file, raw, now, self._reader)
        told.sort(key=lambda one: one.at)
        return told

    def _look(self, now: float) -> None:
        """Which files there are, and which directories may get more of them: of old generations it is known."""
        try:
            paths, folders = _walk(self._directory)
        except OSError:
            return
        self._looked = now
        recent = max(folders.values()) - int(RECENT * 1e9)
        near = {folder for folder in folders if self._directory in (folder, folder.parent, folder.parent.parent)}
        self._folders = {folder: changed for folder, changed in folders.items() if changed >= recent or folder in near}
        known = set(paths)
        self._files = {path: followed for path, followed in self._files.items() if path in known}
        self._passed &= known
        for path in known - self._files.keys() - self._passed:
            file = _found(self._directory, path, known)
            if file is None or file.kind == "error":
                self._passed.add(path)
            else:
                self._files[path] = _Followed(file, from_end=self._skip)
        self._skip = False


class _Followed:
    """How far a file was read. Nothing is held open: there may be thousands."""

    def __init__(self, file: Found, *, from_end: bool) -> None:
        self.file: Final = file
        self.quiet = 0  # looks in a row at which nothing had come
        self._path = file.paths[-1]
        self._most = JSON_MAX if file.kind == "json" else _PLAIN_MAX
        self._inode = -1
        self._offset = 0
        self._half = b""
        self._tail = b""  # what stands before the offset, to find it again where a file has lost its beginning
        self._from_end = from_end

    def read(self) -> list[bytes]:
        """Lines that are whole now and were not before, as far as they are not too long."""
        try:
            status = self._path.lstat()
            if status.st_ino == self._inode and status.st_size == self._offset:  # as is most of what lies there
                self.quiet += 1
                return []
            self.quiet = 0
            fd = _open(self._path)
        except OSError:
            return []
        try:
            status = os.fstat(fd)
            data = b""
            if self._from_end:
                self._from_end, self._inode, self._offset = False, status.st_ino, status.st_size
            elif status.st_ino != self._inode:
                data = self._rest()
                self._inode, self._offset, self._tail = status.st_ino, 0, b""
            if status.st_size != self._offset:
                more = os.pread(fd, POLL_MAX, self._offset - len(self._tail))
                if not more.startswith(self._tail):
                    self._offset, self._tail = self._again(fd, status), b""
                    more = os.pread(fd, POLL_MAX, self._offset)
                more = more[len(self._tail) :]
                self._offset += len(more)
                self._tail = (self._tail + more)[-_TAIL:]
                data += more
        finally:
            os.close(fd)
        *whole, half = (self._half + data).split(b"\n")
        self._half = half[: self._most + 1]
        return [line[: self._most] for line in whole if line]

    def _rest(self) -> bytes:
        """What came to the file that was here before, which has another name now."""
        if self._inode < 0:
            return b""
        try:
            fd = _open(self._path.with_name(f"{self._path.name}.1"))
        except OSError:
            return b""
        try:
            return os.pread(fd, POLL_MAX, self._offset) if os.fstat(fd).st_ino == self._inode else b""
        finally:
            os.close(fd)

    def _again(self, fd: int, status: os.stat_result) -> int:
        """Where to go on in a file that has lost its beginning."""
        begin = max(0, status.st_size - 4 * POLL_MAX)
        data = os.pread(fd, 4 * POLL_MAX, begin)
        place = data.rfind(self._tail) if self._tail else -1
        if place >= 0:
            return begin + place + len(self._tail)
        # Less than that may be left of it.
        return next((length for length in range(min(len(self._tail), len(data)), 0, -1) if begin == 0 and data.startswith(self._tail[-length:])), 0)


# --- which file is what --------------------------------------------------------------------------------------------------


def _found(root: Path, path: Path, known: set[Path]) -> Found | None:
    parts = path.relative_to(root).parts
    folder = next((parent for parent in path.parents if _GENERATION.fullmatch(parent.name) and parent.is_relative_to(root)), None)
    number = _GENERATION.fullmatch(folder.name) if folder else None
    rank = _rank(parts)
    origin = Origin(
        node=(folder.parent.name if folder else path.parent.name if path.with_name("agent.jsonl") in known else "")[:64],
        rank=rank,
        generation=int(number[1]) if number else None,
        trusted=False,
        stream=Stream.ERR if "stderr" in path.name or path.suffix == ".err" else Stream.OUT,
    )
    if path.name == "error.json" and rank is not None:
        return Found(paths=(path,), kind="error", origin=origin, folder=folder)
    if path.suffix in _JSON or path.name in {"daemon.stderr", "daemon.log"}:
        paths = tuple(one for one in (path.with_name(f"{path.name}.1"), path) if one in known)
        return Found(paths=paths, kind="json", origin=replace(origin, trusted=rank is None), folder=folder)
    if _KERNEL.fullmatch(path.stem) and rank is None:
        return Found(paths=(path,), kind="kernel", origin=replace(origin, stream=Stream.KERNEL), folder=folder)
    if path.suffix in _PLAIN:
        older = [path.parent.parent / f"{path.parent.name}.{path.name}.{number}" for number in range(9, 0, -1)] if rank is not None else []
        return Found(paths=(*(one for one in older if one in known), path), kind="plain", origin=origin, folder=folder)
    return None


def _walk(directory: Path) -> tuple[list[Path], dict[Path, int]]:
    """Files, no links to any; and directories, with when their entries changed last, in nanoseconds.

    Raises:
        OSError: it cannot be read.
    """
    paths: list[Path] = []
    changed: dict[Path, int] = {}
    waiting = [(directory, 0)]
    while waiting and len(paths) < FILES_MAX:
        place, depth = waiting.pop()
        changed[place] = _changed(place)  # before it is read: what comes meanwhile is seen at the next look
        try:
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            if place == directory:
                raise
            continue
        paths += [place / entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        if depth < DEPTH_MAX:
            waiting += [(place / entry.name, depth + 1) for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
    return paths[:FILES_MAX], changed


def _changed(folder: Path) -> int:
    """When its entries changed last, in nanoseconds."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1


def _rank(parts: tuple[str, ...]) -> int | None:
    for number, part in enumerate(parts):
        if match := _RANK.fullmatch(part):
            return int(match[1])
        if number and _ATTEMPT.fullmatch(parts[number - 1]) and part.isdecimal() and len(part) < 7:
            return int(part)
    return None


# --- when ----------------------------------------------------------------------------------------------------------------

_MARKS: Final = (b'"workers_started"', b'"workers_stopped"', b'"agent_exit"')


def _spans(found: Iterable[Found]) -> dict[Path, _Span]:
    """When the workers of each directory ran, as the agent beside them says; where it does not, by the files' times."""
    spans: dict[Path, _Span] = {}
    for file in found:
        if file.kind == "json" and file.paths[-1].name == "agent.jsonl":
            spans |= dict(_told(file))
    for file in found:
        if file.folder is not None and file.folder not in spans:
            spans[file.folder] = _by_files(file.folder)
    return spans


def _told(file: Found) -> Iterator[tuple[Path, _Span]]:
    running: tuple[Path, float] | None = None
    for _, raw in _lines(file.paths, JSON_MAX):
        if not any(mark in raw for mark in _MARKS):
            continue
        line = next(observations(raw, Origin()), None)
        if not isinstance(line, Line):
            continue
        at = line.at
        if running is not None:
            yield running[0], _Span(running[1], at)
            running = None
        if line.event == "workers_started":
            logs = line.fields.get("logs")
            running = (file.paths[-1].parent / Path(str(logs)).name, at)
    if running is not None:  # killed: the files say how long it went on
        yield running[0], _Span(running[1], max(running[1], _by_files(running[0]).ended))


def _by_files(folder: Path) -> _Span:
    times = []
    for place in (folder, *folder.glob("rank-*")):
        try:
            with os.scandir(place) as entries:
                times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries if entry.is_file(follow_symlinks=False)]
        except OSError:
            continue
    return _Span(min(times, default=0.0), max(times, default=0.0))


# --- reading -------------------------------------------------------------------------------------------------------------


def _read(file: Found, span: _Span | None, reader: Reader) -> Iterator[Observation]:
    if file.kind == "error":
        yield from _error(file, span)
        return
    written = _written(file.paths[-1])
    if span is None:
        span = _Span(written, written)
    ended = written if span.began <= written <= span.ended else span.ended  # files that were copied have another time
    began, size = span.began, max(1, sum(map(_size, file.paths)))
    for offset, raw in _lines(file.paths, JSON_MAX if file.kind == "json" else _PLAIN_MAX):
        at = began + (ended - began) * min(1.0, offset / size)
        if file.kind == "plain" and (stamp := _STAMP.match(raw)) and (said := parse_time(stamp[1].decode())) is not None:
            at = said if span.began - _SLACK <= said <= span.ended + _SLACK else at
        yield from _observed(file, raw, at, reader)


def _observed(file: Found, raw: bytes, at: float, reader: Reader) -> Iterator[Observation]:
    origin = file.origin
    if file.kind == "kernel":
        yield kernel_line(raw, at=at, node=origin.node)
        return
    if file.kind == "json" or raw.startswith(b"{"):
        told = list(reader.observations(raw, replace(origin, at=at)))
        if told or file.kind == "json":
            yield from told
            return
    if raw.strip():
        yield plain_line(raw, at=at, stream=origin.stream, node=origin.node, rank=origin.rank, generation=origin.generation)


def _error(file: Found, span: _Span | None) -> Iterator[Observation]:
    """What a worker said of its own end: the first line of its message in torch's error file."""
    path = file.paths[-1]
    data = b"".join(_chunks(path, _ERROR_MAX))
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    message = document.get("message") if isinstance(document, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    at = parse_time(extra.get("timestamp")) if isinstance(extra, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    if isinstance(text, str) and (first := next((line for line in text.splitlines() if line.strip()), "")):
        at = at if at is not None and (span is None or span.began <= at <= span.ended + _SLACK) else span.ended if span else _written(path)
        origin = file.origin
        line = plain_line(first, at=at, stream=Stream.ERR, node=origin.node, rank=origin.rank, generation=origin.generation)
        yield line._replace(level="error")


def _lines(paths: Iterable[Path], most: int) -> Iterator[tuple[int, bytes]]:
    """(where it ends, line) for each that is not empty; of longer ones than `most` bytes the beginning.

    A file that gave up its older lines may have been cut within one: all are read as if they were one file.
    """
    half, cut, end = b"", False, 0
    for chunk in itertools.chain.from_iterable(map(_chunks, paths)):
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            end += len(piece) + 1
            line = half if cut else (half + piece)[:most]
            half, cut = b"", False
            if line:
                yield end, line
        end += len(rest)
        if not cut:
            half += rest
            half, cut = half[:most], len(half) > most
    if half:
        yield end, half


def _chunks(path: Path, most: int | None = None) -> Iterator[bytes]:
    """The bytes of a file, which is open only while a piece is read."""
    offset = 0
    while most is None or offset < most:
        try:
            fd = _open(path)
        except OSError:
            return
        try:
            chunk = os.pread(fd, _CHUNK, offset)
        except OSError:
            return
        finally:
            os.close(fd)
        if not chunk:
            return
        offset += len(chunk)
        yield chunk


def _open(path: Path) -> int:
    """For reading; never waits on a pipe that was put there, nor follows a link.

    Raises:
        OSError: it is no file, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(2, "no file", str(path))
    return fd


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
