"""`elasticctl logs`: lines of a job from all its nodes, once or as they come.

Owns: what is asked again and from where, how a line looks, and what is said about nodes that cannot be asked. Must not: know who answers
(`sources`), or read files.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from elasticd.cli.failures import one_line, say
from elasticd.daemon.joblogs import AGENT, LINE_MAX, PLACE_MOST, TAIL_MOST
from elasticd.errors import DaemonUnavailableError, ElasticdError, KVUnavailableError, NotRunningError, UsageError
from elasticd.observability.harmless import harmless

if TYPE_CHECKING:
    from elasticd.cli.asking import Document
    from elasticd.cli.sources import Source, Value

FOLLOW_EVERY: Final = 1.0
"""Seconds between two questions, unless there is more to be told at once."""
TAIL: Final = 100
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_NEW: Final = 100  # lines of before that a node begins with that comes while we follow


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions:
    """`elasticctl logs`, checked. None is: as it comes.

    Attributes:
        since: seconds since the epoch, 0 if all.
        tail: lines of before, for each file.
        as_json: a JSON object for each line.
    """

    job: str
    follow: bool = False
    rank: int | None = None
    node: str | None = None
    generation: int | None = None
    stream: str | None = None
    tail: int = TAIL
    since: float = 0.0
    as_json: bool = False

    def query(self, places: Mapping[str, str], *, tail: int) -> dict[str, Value]:
        """What is to be asked.

        Raises:
            UsageError: it is more than can be asked at once.
        """
        after = ",".join(f"{name}:{place}" for name, place in places.items())
        if len(after) > PLACE_MOST:
            raise UsageError(f"{len(places)} nodes have too many files to follow at once", remedy="follow fewer: --rank, --node or --stream")
        wanted: dict[str, Value] = {"rank": self.rank, "node": self.node, "generation": self.generation, "stream": self.stream, "tail": tail}
        return {**wanted, "since": int(self.since) or None, "follow": "true" if self.follow else None, "after": after or None}


def tail_of(number: int | None, since: str | None) -> int:
    """How many lines of before: what was said; else with --since as many as can be had, and 100 without."""
    return number if number is not None else TAIL_MOST if since else TAIL


def parse_since(text: str | None, now: float) -> float:
    """What `--since` means, in seconds since the epoch: "10m", "2h", "1d", "30s" or "30" ago, or a time in ISO 8601.

    Raises:
        UsageError: it is none of these.
    """
    if not text:
        return 0.0
    if found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", text):
        return max(1.0, now - float(found[1]) * _UNITS[found[2] or "s"])
    try:
        return max(1.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--since {text!r}: this is no time", remedy="say how long ago, as 10m, 2h or 1d, or when, as 2026-11-30T12:00") from None


def show_logs(options: LogOptions, source: Source) -> None:
    """Print them; with `follow` go on until somebody interrupts.

    Raises:
        NotRunningError: there is no such job, node or file.
        ElasticdError: nobody answers, or refuses.
    """
    voice = _Voice(as_json=options.as_json)
    view = _View(options, voice)
    view.take(source.logs(options.job, options.query({}, tail=options.tail)), first=True)
    while options.follow:
        if not view.more:
            time.sleep(FOLLOW_EVERY)
        try:
            data = source.logs(options.job, options.query(view.places, tail=max(options.tail, _NEW)))
        except (DaemonUnavailableError, KVUnavailableError, NotRunningError) as error:
            voice.away(error)
            view.more = False
            continue
        voice.back()
        view.take(data)


# --- what is known from one answer to the next ---------------------------------------------------------------------------


@dataclass(slots=True)
class _View:
    options: LogOptions
    voice: _Voice
    places: dict[str, str] = field(default_factory=dict)
    more: bool = False
    _widest: int = 0

    def take(self, data: Document, *, first: bool = False) -> None:
        """An answer: print its lines, and remember where to go on."""
        parts = data["nodes"]
        self.places |= {str(part["name"]): str(part["place"]) for part in parts if part["place"] and not part["problem"]}
        self.more = any(part["more"] for part in parts)
        self.voice.notes(data["notes"])
        for part in parts:
            self.voice.problem(one_line(str(part["name"])), str(part["problem"]))
        if first:
            self.voice.left_out(parts)
            self.voice.nothing(parts)
        lines = [{**line, "node": one_line(str(part["name"]))} for part in parts for line in part["lines"]]
        if self.options.stream == AGENT:
            lines.sort(key=lambda line: line["at"] or "")  # RFC 3339 in UTC: its order is that of time
        self._print(lines)

    def _print(self, lines: Sequence[Document]) -> None:
        if self.options.as_json:
            out = [json.dumps(line) for line in lines]
        else:
            self._widest = max(self._widest, *(len(prefix_of(line)) for line in lines), 0) if lines else self._widest
            out = [line_text(line, width=self._widest, colour=_coloured()) for line in lines]
        if out:
            sys.stdout.write("\n".join(out) + "\n")
            sys.stdout.flush()


class _Voice:
    """What is said on stderr, each thing once."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._noted: set[str] = set()
        self._silent: set[str] = set()
        self._away = False

    def notes(self, notes: Iterable[str]) -> None:
        """What an answer leaves out."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self._say(note)

    def problem(self, node: str, problem: str) -> None:
        """A node does not answer, or ("") does so again."""
        if problem and node not in self._silent:
            self._silent.add(node)
            self._say(f"{node} cannot be asked: {problem}")
        elif not problem and node in self._silent:
            self._silent.discard(node)
            self._say(f"{node} answers again")

    def left_out(self, parts: Sequence[Document]) -> None:
        """Nodes whose last generation is not the newest: their lines are not among those shown."""
        newest = max((part["generation"] for part in parts if part["generation"] is not None), default=None)
        for part in parts:
            if part["generation"] not in (None, newest) and not part["lines"]:
                self._say(
                    f"{one_line(str(part['name']))} has nothing of generation {newest}; its last is {part['generation']}: --generation {part['generation']}"
                )

    def nothing(self, parts: Sequence[Document]) -> None:
        """There is not one line, and no node's fault in it."""
        if not any(part["lines"] or part["problem"] or part["more"] for part in parts):
            self._say(f"no such lines on {', '.join(one_line(str(part['name'])) for part in parts)}")

    def away(self, error: ElasticdError) -> None:
        """Nobody answers."""
        if not self._away:
            say(error, as_json=self._as_json)
        self._away = True

    def back(self) -> None:
        """Somebody does."""
        self._away = False

    def _say(self, text: str) -> None:
        print(json.dumps({"note": text}) if self._as_json else f"elasticctl: {one_line(text)}", file=sys.stderr, flush=True)


# --- how a line looks ----------------------------------------------------------------------------------------------------


def prefix_of(line: Document) -> str:
    """Who says it: "node-1 3", or "node-1 agent"."""
    return f"{line['node']} {AGENT if line['rank'] is None else line['rank']}"


def line_text(line: Document, *, width: int = 0, colour: bool = False) -> str:
    """One line for people.

    Args:
        line: of an answer, with its `node`.
        width: of the widest of those that stand below each other.
        colour: a colour for each node, and a red bar for what went to stderr.
    """
    prefix = f"{prefix_of(line):<{width}}"
    text = event_text(line["text"]) if line["stream"] == AGENT else _printable(line["text"])
    if not colour:
        return f"{prefix} | {text}"
    shade = _COLOURS[sum(map(ord, line["node"])) % len(_COLOURS)]
    bar = 31 if line["stream"] == "stderr" else shade
    return f"\x1b[{shade}m{prefix}\x1b[0m \x1b[{bar}m|\x1b[0m {text}"


def event_text(text: str) -> str:
    """An event of an agent's as a person reads it; what is no event as it is."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "event" not in document:
        return _printable(text)
    level, event, at = (document.pop(name, "") for name in ("level", "event", "time"))
    for name in ("job", "node"):
        document.pop(name, None)
    fields = " ".join(f"{name}={_short(value)}" for name, value in document.items())
    return _printable(f"{_clock(at)} {level} {event} {fields}".rstrip())


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value and not re.search(r'[\s"=]', value) else json.dumps(value)


def _clock(at: Any) -> str:
    from elasticd.cli.render import clock_text, seconds

    return clock_text(seconds(at if isinstance(at, str) else None))


def _printable(text: Any) -> str:
    """Whoever answers has made it so already; it is not to be relied on."""
    return harmless(str(text), 8 * LINE_MAX, keep="\t")


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
