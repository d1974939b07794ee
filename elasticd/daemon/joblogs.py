"""What a job's workers and its agent have written on this node: the last lines, or what has come since a place.

Owns: finding the files below the log root, and reading them in bounded pieces. Must not: write, wait for more, or know other nodes (`peering` does).

A worker owns its directory. So whatever lies there is opened without following links, pipes and second names of other files are left alone, and no
file is believed to be there still, to be as long as before, or to hold lines. Memory is bounded by what is asked for, not by what is there.

A place is a short text that says how far each file has been read; nothing is remembered here between two questions. A file is known again by what
stands just before that place. So one that has given up its older lines meanwhile, or was moved aside, is found again, and its lines are told to the
end before those that came after them.
"""

from __future__ import annotations

import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from elasticd.errors import UsageError
from elasticd.observability.harmless import CUT, harmless, unstyled
from elasticd.observability.times import rfc3339

STREAMS: Final = ("stdout", "stderr")
"""What a worker writes."""
AGENT: Final = "agent"
"""The stream of the agent's events, which belong to no rank."""
LINE_MAX: Final = 4096
"""Characters of a line that are told."""
ROOM_LEAST: Final = 16 * 1024
ROOM_MOST: Final = 1024 * 1024
"""Bounds of the characters that one answer of one node may have."""
TAIL_MOST: Final = 10_000
PLACE_MOST: Final = 12_000
"""Characters that the places of all nodes may have: they travel in a URL."""

_BLOCK: Final = 64 * 1024
_AT_ONCE: Final = 256 * 1024  # bytes in which a line has to end, or it is told in part and the rest passed over
_BACK_MOST: Final = 1024 * 1024  # bytes from a file's end in which its last lines are looked for
_PASSED_MOST: Final = 16 * 1024 * 1024  # bytes of an endless line that are passed over in one go
_LINE_COST: Final = 96  # characters that a line costs besides its text
_FILES_MOST: Final = 256
_MOVED_MOST: Final = 9
_OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_GENERATION: Final = re.compile(r"generation-(\d{6,15})(?:-(\d{1,9}))?")
_RANK: Final = re.compile(r"rank-(\d{1,9})")
_TIME: Final = re.compile(r'(?:"(?:timestamp|time)": ?")?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)')
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_OFFSET_MOST: Final = 2**62
_MARKS: Final = 36**4
_MARKED: Final = 64  # bytes before a place by which its file is known again
_DISK_BLOCK: Final = 4096
_BLOCKS_TRIED: Final = 4096
_JUST_MOVED: Final = 60.0  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which lines.

    Attributes:
        generation: None: the newest that this node has; with `after` also those that came after it.
        rank: of the whole job; None: all that are here.
        stream: None: both of the workers'.
        tail: the last so many lines of each file, where there is no place to go on from.
        since: seconds since the epoch; older lines are left out, as far as a line says when it was written.
        after: the place that an earlier answer gave.
        follow: the place of this answer will be asked for: a line that has not ended is left for then.
        room: characters that the answer may have.
    """

    generation: int | None = None
    rank: int | None = None
    stream: str | None = None
    tail: int = 100
    since: float = 0.0
    after: str = ""
    follow: bool = False
    room: int = ROOM_MOST


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line. `rank` and `generation` are None for the agent's; `at` is what the line says of its time, in seconds since the epoch."""

    rank: int | None
    stream: str
    generation: int | None
    text: str
    at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """This node's part of an answer.

    Attributes:
        generation: newest that was read; None if there is none here.
        lines: in the order of files, and in each file in its own.
        place: to be given as `after`.
        more: there is more than there was room for.
    """

    generation: int | None = None
    lines: tuple[Line, ...] = ()
    place: str = ""
    more: bool = False


def read_logs(log_dir: Path, job: str, node: str, wanted: Wanted) -> Part:
    """What a node has of a job.

    Args:
        log_dir: root of all logs.
        job, node: names that are harmless in a path; the caller has seen to that.
        wanted: which lines.

    Raises:
        UsageError: `wanted.after` is no place.
    """
    place = _Place.parse(wanted.after) if wanted.after else None
    with _opened(log_dir / job / node) as folder:
        if folder < 0:
            return Part(place=(place or _Place((0, 0), {})).written())
        if wanted.stream == AGENT:
            return _agent(folder, wanted, place)
        return _workers(folder, wanted, place)


def document(name: str, part: Part | None, problem: str = "") -> dict[str, Any]:
    """One node's part as docs/api.md has it; without a part, why there is none."""
    part = part or Part()
    lines = [{"rank": line.rank, "stream": line.stream, "generation": line.generation, "at": rfc3339(line.at), "text": line.text} for line in part.lines]
    return {"name": name, "generation": part.generation, "problem": problem, "place": part.place, "more": part.more, "lines": lines}


def without_old(parts: Sequence[dict[str, Any]], wanted: Wanted, known: Sequence[str] = ()) -> None:
    """Where the newest generation is asked for, take away the lines of nodes that were not in it.

    Args:
        parts: of all nodes; they are changed.
        known: nodes that were asked to go on from a place: what they tell is new, whatever its generation.
    """
    if wanted.generation is not None or wanted.stream == AGENT:
        return
    newest = max((part["generation"] for part in parts if part["generation"] is not None), default=None)
    for part in parts:
        if part["generation"] != newest and part["name"] not in known:
            part["lines"] = []


# --- the files -----------------------------------------------------------------------------------------------------------


def _workers(folder: int, wanted: Wanted, place: _Place | None) -> Part:
    starts = sorted(_numbers(folder, _GENERATION))
    if wanted.generation is not None:
        starts = [start for start in starts if start[0] == wanted.generation]
    starts = starts[-1:] if place is None else [start for start in starts if start >= place.start]
    budget = _Budget(wanted.room)
    lines: list[Line] = []
    for number, start in enumerate(starts):
        files = dict(place.files) if place and place.start == start else {}
        ended = number < len(starts) - 1
        with _opened(_named(start), folder) as inside:
            if inside < 0:
                continue
            found, files, budget.more = _start(inside, start[0], wanted, files, budget, ended=ended, forward=place is not None)
        lines += found
        place = _Place(start=start, files=files)
        if budget.more:
            break
    place = place or _Place((0, 0), {})
    return Part(generation=place.start[0] or None, lines=tuple(lines), place=place.written(), more=budget.more)


def _start(
    folder: int, generation: int, wanted: Wanted, files: dict[str, _Spot], budget: _Budget, *, ended: bool, forward: bool
) -> tuple[list[Line], dict[str, _Spot], bool]:
    """The lines of one start of a generation's workers, how far each file has been read, and whether there is more."""
    ranks = sorted(rank for rank, _ in _numbers(folder, _RANK) if wanted.rank in (None, rank))
    streams = [wanted.stream] if wanted.stream else STREAMS
    todo = [(rank, stream) for rank in ranks for stream in streams][:_FILES_MOST]
    lines: list[Line] = []
    more = False
    for done, (rank, stream) in enumerate(todo):
        key = f"{rank}{stream[3]}"  # stdOut, stdErr
        with _opened(f"rank-{rank}", folder) as inside:
            if inside < 0:
                continue
            older = [(folder, f"rank-{rank}.{stream}.log.{number}") for number in range(1, _MOVED_MOST + 1)]
            reading = _Reading([(inside, f"{stream}.log"), *older], room=budget.share(len(todo) - done), ended=ended)
            spot = reading.forward(files.get(key)) if forward else reading.back(wanted.tail, wanted.follow, wanted.since)
        budget.take(reading.cost)
        if spot:
            files[key] = spot
        more = more or reading.more
        lines += [Line(rank=rank, stream=stream, generation=generation, text=text, at=at) for text, at in reading.told(wanted.since)]
    return lines, files, more


def _agent(folder: int, wanted: Wanted, place: _Place | None) -> Part:
    reading = _Reading([(folder, "agent.jsonl"), (folder, "agent.jsonl.1")], room=wanted.room, ended=False)
    last = (wanted.tail, wanted.follow, wanted.since)
    spot = reading.back(*last) if place is None else reading.forward(place.files.get(AGENT[0]))
    lines = tuple(Line(rank=None, stream=AGENT, generation=None, text=text, at=at) for text, at in reading.told(wanted.since))
    files = {AGENT[0]: spot} if spot else {}
    return Part(lines=lines, place=_Place(start=(0, 0), files=files).written(), more=reading.more)


def _numbers(folder: int, form: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Numbers in the names of a directory's entries; the second is 1 where the name has none."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if found := form.fullmatch(name):
                yield int(found[1]), int(found[2] or 1) if found.re.groups > 1 else 1


def _named(start: tuple[int, int]) -> str:
    """The directory of a start of a generation."""
    return f"generation-{start[0]:06d}" + (f"-{start[1]}" if start[1] > 1 else "")


@contextmanager
def _opened(path: Path | str, inside: int | None = None) -> Iterator[int]:
    """A directory, never by way of a link; -1 if it cannot be had."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    except OSError:
        fd = -1
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


class _Budget:
    """Characters that are left, for so many files."""

    def __init__(self, room: int) -> None:
        self._left = room
        self.more = False

    def share(self, files: int) -> int:
        """For the next of so many: what others did not need is theirs too."""
        return max(_LINE_COST, self._left // max(1, files))

    def take(self, cost: int) -> None:
        """So much was used."""
        self._left = max(0, self._left - cost)


# --- one file ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spot:
    """How far a file has been read, and what stands just before: by that it is known again."""

    offset: int
    mark: int


@dataclass(frozen=True, slots=True)
class _File:
    fd: int
    size: int
    changed: float

    def spot(self, offset: int) -> _Spot:
        """The place `offset` bytes from the beginning."""
        return _Spot(offset, zlib.crc32(os.pread(self.fd, min(offset, _MARKED), max(0, offset - _MARKED))) % _MARKS)

    def is_at(self, spot: _Spot, offset: int) -> bool:
        """Whether it is the file of this place, and the place there."""
        return 0 <= offset <= self.size and self.spot(offset).mark == spot.mark


class _Reading:
    """Reads one file, and those that its older lines went to. `cost` is what the lines found cost, `more` that there was no room for all.

    Args:
        files: directory and name of the one that is written, and of those before it, newest first.
        room: characters that the lines may cost.
        ended: nobody writes any more, so that a last line without an end is one all the same.
    """

    def __init__(self, files: Sequence[tuple[int, str]], *, room: int, ended: bool) -> None:
        self._files = files
        self._room = room
        self._ended = ended
        self._texts: list[str] = []
        self.cost = 0
        self.more = False

    def told(self, since: float) -> list[tuple[str, float | None]]:
        """The lines and their times. With `since`, from the first one that was written then; all, if none says when it was."""
        timed = [(text, time_of(text)) for text in self._texts]
        if not since or all(at is None for _, at in timed):
            return timed
        first = next((number for number, (_, at) in enumerate(timed) if at is not None and at >= since), len(timed))
        return timed[first:]

    # --- from the end ----------------------------------------------------------------------------------------------------

    def back(self, count: int, follow: bool, since: float) -> _Spot | None:
        """The last lines. Returns where to go on from; None if there is no file."""
        spot: _Spot | None = None
        for number in range(len(self._files)):
            with self._opened(number) as file:
                if file is None:
                    break
                old = file.changed < since
                missing = 0 if old else count - len(self._texts) + bool(number)
                lines, end, whole = _last_lines(file, missing, unfinished=bool(number) or self._ended or not follow)
                if not number:
                    spot = file.spot(end)
            if number and lines and self._texts and not whole:  # the file was cut within a line
                self._texts[0] = f"{lines.pop()}{self._texts[0]}"[:LINE_MAX]
            self._put_before(lines)
            if old or len(self._texts) >= count or self.more:
                break
        self._texts = self._texts[len(self._texts) - min(count, len(self._texts)) :]
        return spot

    def _put_before(self, lines: Sequence[str]) -> None:
        fitting: list[str] = []
        for text in reversed(lines):
            if self.cost + len(text) + _LINE_COST > self._room:
                self.more = True
                break
            self.cost += len(text) + _LINE_COST
            fitting.append(text)
        self._texts = [*reversed(fitting), *self._texts]

    # --- from a spot on --------------------------------------------------------------------------------------------------

    def forward(self, spot: _Spot | None) -> _Spot | None:
        """What has come since. Returns where to go on from; None if there is no file yet."""
        begun = b""
        for number, begin in self._from(spot):
            with self._opened(number) as file:
                if file is None:
                    continue
                end, rest = self._read(file, begin, begun, ended=self._ended and not number)
                # At a file's beginning nothing tells it from others, and a line that began in the one before has not ended yet: then the end of
                # that one is the better place.
                if spot is None or end:
                    spot = file.spot(end)
                begun = rest
            if self.more:
                break
        return spot

    def _from(self, spot: _Spot | None) -> list[tuple[int, int]]:
        """Which files to read, oldest first, and where each begins."""
        fresh = 0
        for number in range(len(self._files)):
            with self._opened(number) as file:
                if file is None:
                    break
                begin = _found(file, spot, moved=bool(number)) if spot and spot.offset else None
                # Of what is not known again, older lines count if they have only just become so.
                fresh = number if spot is None or time.time() - file.changed < _JUST_MOVED else fresh
            if begin is not None:
                return [(number, begin), *((newer, 0) for newer in range(number - 1, -1, -1))]
        return [(number, 0) for number in range(fresh, -1, -1)]

    def _read(self, file: _File, begin: int, begun: bytes, *, ended: bool) -> tuple[int, bytes]:
        """Lines from there on, as far as there is room. Returns where they end, and what there is of the next.

        Args:
            begun: what an older file holds of the first line.
            ended: what there is of the last line is all of it.
        """
        if begin and os.pread(file.fd, 1, begin - 1) != b"\n":
            begin = self._pass_over(file, begin)
        while not self.more and (data := os.pread(file.fd, _AT_ONCE, begin)):
            *whole, rest = data.split(b"\n")
            if not whole and len(data) == _AT_ONCE:
                if not self._put(begun + data):
                    return begin, begun
                begin, begun = self._pass_over(file, begin + len(data)), b""
                continue
            for line in whole:
                if not self._put(begun + line):
                    return begin, begun
                begun = b""
                begin += len(line) + 1
            if len(data) < _AT_ONCE:
                if ended and rest and self._put(begun + rest):
                    return begin + len(rest), b""
                return begin, begun + rest
        return begin, begun

    def _put(self, line: bytes) -> bool:
        text = shown(line)
        if self.cost and self.cost + len(text) + _LINE_COST > self._room:
            self.more = True
            return False
        self.cost += len(text) + _LINE_COST
        self._texts.append(text)
        return True

    def _pass_over(self, file: _File, begin: int) -> int:
        """Where the line at hand ends, or how far it has been looked for."""
        stop = begin + _PASSED_MOST
        while begin < stop and (data := os.pread(file.fd, _AT_ONCE, begin)):
            end = data.find(b"\n")
            if end >= 0:
                return begin + end + 1
            begin += len(data)
        self.more = self.more or begin >= stop
        return begin

    @contextmanager
    def _opened(self, number: int) -> Iterator[_File | None]:
        """A regular file with one name; None if there is none."""
        folder, name = self._files[number]
        try:
            fd = os.open(name, _OPEN, dir_fd=folder)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(fd)
            # What has a second name may be somebody else's file, which only we can read.
            fit = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            yield _File(fd, status.st_size, status.st_mtime) if fit else None
        finally:
            os.close(fd)


def _found(file: _File, spot: _Spot, *, moved: bool) -> int | None:
    """Where in a file a place is; None if it is not of this file.

    A file gives up whole blocks of the file system from its beginning, and a file of older lines holds the newest of those: in either the place may be
    nearer to the beginning than it was.
    """
    if file.is_at(spot, spot.offset):
        return spot.offset
    odd = (spot.offset + file.size if moved else spot.offset) % _DISK_BLOCK
    last = min(file.size, spot.offset - 1)
    # In what is left of a file the place is as near to the beginning as can be, and in one of older lines as near to its end.
    places = range(odd, last + 1, _DISK_BLOCK)
    tried = places[-_BLOCKS_TRIED:][::-1] if moved else places[:_BLOCKS_TRIED]
    return next((place for place in tried if file.is_at(spot, place)), None)


def _last_lines(file: _File, count: int, *, unfinished: bool) -> tuple[list[str], int, bool]:
    """The last lines of a file, where the next one begins, and whether the last is whole. `unfinished`: one that has not ended counts."""
    begin, breaks = file.size, 0
    blocks: list[bytes] = []
    while begin > 0 and breaks <= count and file.size - begin < _BACK_MOST:
        size = min(_BLOCK, begin)
        block = os.pread(file.fd, size, begin - size)
        if len(block) < size:  # cut short meanwhile
            blocks = []
            break
        begin -= size
        blocks.append(block)
        breaks += block.count(b"\n")
    data = b"".join(reversed(blocks))
    lines = data.split(b"\n")
    rest = lines.pop()
    end = file.size if unfinished or not data else file.size - len(rest)
    if unfinished and rest:
        lines.append(rest)
    if begin > 0 and len(lines) > 1:
        lines = lines[1:]  # its beginning is not here
    return [shown(line) for line in lines[len(lines) - min(max(0, count), len(lines)) :]], end, not rest


def shown(line: bytes) -> str:
    """A line as it may go to a terminal: what a progress bar overwrote is gone, and so are orders to the terminal and what is no UTF-8."""
    last = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = harmless(unstyled(last[: 8 * LINE_MAX].decode("utf-8", "replace")), LINE_MAX, keep="\t")
    return f"{text[: LINE_MAX - 1]}{CUT}" if len(last) > 8 * LINE_MAX and not text.endswith(CUT) else text


def time_of(text: str) -> float | None:
    """When a line says that it was written: at its beginning, or as `timestamp` or `time` of a JSON object."""
    found = _TIME.match(text) if text[:1].isdigit() else _TIME.search(text, 0, 2000) if text[:1] == "{" else None
    try:
        return datetime.fromisoformat(found[1].replace(",", ".")).timestamp() if found else None
    except (ValueError, OverflowError, OSError):
        return None


# --- places --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """How far this node's files have been read: "7.2~0of3k.b0~0e4.zz": generation 7, second start, rank 0's stdout up to byte 19568, ..."""

    start: tuple[int, int]
    files: dict[str, _Spot]

    _FORM = re.compile(r"(\d{1,15})\.(\d{1,9})((?:~(?:\d{1,9}[oe]|a)[0-9a-z]{1,12}\.[0-9a-z]{1,4})*)")

    @classmethod
    def parse(cls, text: str) -> _Place:
        """Read one.

        Raises:
            UsageError: it is none.
        """
        found = cls._FORM.fullmatch(text) if len(text) <= PLACE_MOST else None
        if found is None:
            raise UsageError("after: this is no place that an answer gave")
        files = {}
        for one in found[3].split("~")[1:]:
            key = re.match(r"\d*[a-z]", one)
            assert key
            offset, _, mark = one[key.end() :].partition(".")
            files[key[0]] = _Spot(min(int(offset, 36), _OFFSET_MOST), int(mark, 36))
        return cls((int(found[1]), int(found[2])), files)

    def written(self) -> str:
        """As text."""
        files = (f"~{key}{_short(spot.offset)}.{_short(spot.mark)}" for key, spot in self.files.items())
        return f"{self.start[0]}.{self.start[1]}{''.join(files)}"


def _short(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
