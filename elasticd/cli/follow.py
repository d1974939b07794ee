"""Following files that others write: agents' event logs and workers' output.

Owns: reading what was appended since last time, in whole lines, whatever happens to the files meanwhile. Must not: wait, print, or judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticd.agent.rotation import predecessor
from elasticd.observability.harmless import harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_CHUNK = 256 * 1024
_AT_ONCE = 4 * 1024 * 1024
_PATIENCE = 20
LONGEST_LINE = 64 * 1024
"""Bytes after which an unfinished line is handed out in pieces: a worker may never write a line break."""


class Tail:
    """What is new in a file. It need not exist yet, may be replaced, and may be cut short.

    Args:
        path: the file.
        from_end: begin after what is there now.
        predecessor: where its older lines go when they are taken out of it (`agent.rotation`); None if that does not happen.
    """

    def __init__(self, path: Path, *, from_end: bool = False, predecessor: Path | None = None) -> None:
        self.path = path
        self._predecessor = predecessor
        self._taken = _inode(predecessor)
        self._waited = 0
        self._fd = -1
        self._inode = -1
        self._offset = 0
        self._partial = b""
        if from_end:
            self._open()
            with contextlib.suppress(OSError):
                self._offset = os.fstat(self._fd).st_size

    def lines(self) -> list[bytes]:
        """Complete lines since the last call, without their line breaks; of very much the first 4 MiB, and the rest next time."""
        return self._new_lines(_AT_ONCE)

    def rest(self) -> list[bytes]:
        """The same, and the last line even if it is unfinished: for when nobody writes any more. Closes the file."""
        lines = self._new_lines(sys.maxsize) + self._take_partial()
        self.close()
        return lines

    def close(self) -> None:
        """Let go of the file; `lines` would begin anew."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._offset, self._partial = -1, 0, b""

    def _new_lines(self, limit: int) -> list[bytes]:
        lines: list[bytes] = []
        if self._fd >= 0 and self._replaced():
            lines += self._read(sys.maxsize)
            lines += self._take_partial()
            self.close()
        if self._fd < 0:
            self._open()
        return lines + self._read(limit)

    def _open(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # a pipe that somebody put there would be emptied by us
            os.close(fd)
            return
        self._fd, self._inode = fd, status.st_ino

    def _replaced(self) -> bool:
        try:
            return self.path.stat().st_ino != self._inode
        except OSError:
            return False

    def _read(self, limit: int) -> list[bytes]:
        if self._fd < 0:
            return []
        lines = self._follow_what_was_taken()
        if os.fstat(self._fd).st_size < self._offset:
            if self._predecessor and self._waited < _PATIENCE:  # older lines have just been taken out, and will be there in a moment
                self._waited += 1
                return lines
            self._offset, self._partial = 0, b""
        self._waited = 0
        while limit > 0 and (data := os.pread(self._fd, _CHUNK, self._offset)):
            self._offset += len(data)
            limit -= len(data)
            lines += self._cut(data)
        return lines

    def _cut(self, data: bytes) -> list[bytes]:
        """The lines that end in new data."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LONGEST_LINE:
            lines.append(self._partial[:LONGEST_LINE])
            self._partial = self._partial[LONGEST_LINE:]
        return lines

    def _follow_what_was_taken(self) -> list[bytes]:
        """If older lines were taken out since last time: those of them that were not read yet; what is left then begins so much earlier."""
        if self._predecessor is None or (inode := _inode(self._predecessor)) == self._taken:
            return []
        self._taken = inode
        lines: list[bytes] = []
        try:
            with self._predecessor.open("rb") as file:
                taken = file.seek(0, os.SEEK_END)
                file.seek(min(self._offset, taken))
                while data := file.read(_CHUNK):
                    lines += self._cut(data)
        except OSError:
            return []
        self._offset = max(0, self._offset - taken)
        return lines

    def _take_partial(self) -> list[bytes]:
        partial, self._partial = self._partial, b""
        return [partial] if partial else []


def _inode(path: Path | None) -> int:
    """Which file it is; 0 if there is none."""
    try:
        return path.stat().st_ino if path else 0
    except OSError:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEvent:
    """One line of an agent's log.

    Attributes:
        at: seconds since the epoch, None if the line does not say.
        fields: everything else in the line, as JSON gave it.
    """

    node: str
    name: str
    level: str = "info"
    at: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """A field as text, "" if it is missing."""
        value = self.fields.get(key)
        return "" if value is None else str(value)

    def number(self, key: str) -> int | None:
        """A field that is a whole number, else None."""
        value = self.fields.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def seconds(self, key: str) -> float | None:
        """A field that is a number, else None."""
        value = self.fields.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def numbers(self, key: str) -> tuple[int, ...]:
        """A field that is a list of whole numbers, else ()."""
        value = self.fields.get(key)
        return tuple(item for item in value if isinstance(item, int)) if isinstance(value, list) else ()


def parse_event(node: str, line: bytes) -> AgentEvent | None:
    """An event of `node`'s agent; None for a line that is none, such as one that was cut by a crash."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("event"), str):
        return None
    fields = {key: value for key, value in document.items() if key not in ("event", "level", "time")}
    return AgentEvent(node=node, name=document["event"], level=str(document.get("level", "info")), at=_epoch(document.get("time")), fields=fields)


def _epoch(time: object) -> float | None:
    if not isinstance(time, str):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


class AgentLogs:
    """The event logs of several agents.

    Args:
        root: directory of the job's logs; each node has one below it.
        nodes: whose. What their logs hold already is an earlier run's, and skipped.
    """

    def __init__(self, root: Path, nodes: Iterable[str]) -> None:
        self._tails = {node: Tail(root / node / "agent.jsonl", from_end=True) for node in nodes}

    def events(self) -> list[AgentEvent]:
        """New events, in the order of their time."""
        found = [event for node, tail in self._tails.items() for line in tail.lines() if (event := parse_event(node, line))]
        return sorted(found, key=lambda event: event.at or 0.0)

    def close(self) -> None:
        """Let go of the files."""
        for tail in self._tails.values():
            tail.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLine:
    """One line that a worker wrote, without its line break. `stream` is "stdout" or "stderr"."""

    node: str
    rank: int
    stream: str
    data: bytes


class WorkerOutput:
    """What workers write, from one generation to the next.

    Args:
        all_ranks: follow every worker, not rank 0 alone.
    """

    def __init__(self, *, all_ranks: bool) -> None:
        self._all_ranks = all_ranks
        self._tails: dict[str, list[tuple[int, str, Tail]]] = {}
        self._ended: list[OutputLine] = []

    def started(self, event: AgentEvent) -> None:
        """A node has started the workers of a generation (`workers_started`); those of the one before have ended."""
        self._ended += self._drain(event.node)
        folder = Path(event.text("logs"))
        ranks = [rank for rank in event.numbers("ranks") if self._all_ranks or rank == 0]
        files = [(rank, stream, folder / f"rank-{rank}" / f"{stream}.log") for rank in ranks for stream in ("stdout", "stderr")]
        self._tails[event.node] = [(rank, stream, Tail(path, predecessor=predecessor(path))) for rank, stream, path in files]

    def lines(self) -> list[OutputLine]:
        """New lines of all workers."""
        ended, self._ended = self._ended, []
        return ended + [
            OutputLine(node=node, rank=rank, stream=stream, data=line)
            for node, tails in self._tails.items()
            for rank, stream, tail in tails
            for line in tail.lines()
        ]

    def rest(self) -> list[OutputLine]:
        """The same and unfinished lines too, when every worker has ended."""
        ended, self._ended = self._ended, []
        return ended + [line for node in list(self._tails) for line in self._drain(node)]

    def _drain(self, node: str) -> list[OutputLine]:
        return [OutputLine(node=node, rank=rank, stream=stream, data=line) for rank, stream, tail in self._tails.pop(node, []) for line in tail.rest()]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, at most `count`, from its last 16 KiB; [] if it cannot be read. Control characters are taken out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 16 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [harmless(line, LONGEST_LINE, keep="\t") for line in text.splitlines() if line.strip()][-count:]
