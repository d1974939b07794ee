"""Text in, observations out: logs of elasticd's agents and daemons, of workers and of the kernel, and metrics as Prometheus reads them.

Owns: which forms are known, how much of a line is kept, and making it harmless. Must not: open a file (`recorded` does), read a clock, or judge.

What elasticd's own programs wrote may say what a job does: phases, steps of ranks, what the kernel said. What a worker printed is a line and nothing
else, however much it looks like one of those; only whether it evaluates or saves it may say itself: {"event": "phase", "phase": "eval"}, then "train".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from detectors.metrics import METRICS, prometheus_text, reading_of
from detectors.observations import Change, Line, Observation, Phase, Ranks, Reading, Steps, Stream

__all__ = [
    "LINE_MAX",
    "METRICS",
    "Origin",
    "Reader",
    "harmless",
    "kernel_line",
    "level_of",
    "observations",
    "parse_jsonl",
    "parse_time",
    "plain_line",
    "prometheus_text",
]

LINE_MAX: Final = 1024
"""Characters of a line that are kept."""
JSON_MAX: Final = 2 << 20
"""Bytes of a line that is parsed as JSON: room for the times of some thousands of ranks."""
FIELDS_MAX: Final = 32
"""Fields of an event that are kept, and values of a window."""
NAME_MAX: Final = 64
RANKS_MAX: Final = 1 << 16
"""Ranks that a job is believed to have."""
_NODES_MAX: Final = 4096
_TIME_MAX: Final = 1e11  # seconds; a larger number tells milliseconds or less

T = TypeVar("T")

# --- text that others wrote ----------------------------------------------------------------------------------------------

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\^_])")
_WORD_LEVEL: Final = re.compile(r"\b(?:(CRIT(?:ICAL)?|FATAL|EMERG|PANIC)|(ERROR|ERR)|(WARN(?:ING)?))\b")
_WORD_LEVELS: Final = (None, "critical", "error", "warning")
_GLOG_LEVEL: Final = re.compile(r"(?:^|[\[ ])([EWF])\d{4} \d\d:\d\d:\d\d")
_GLOG_LEVELS: Final = {"E": "error", "W": "warning", "F": "critical"}
_LEVEL_WITHIN: Final = 160  # characters of a line in which its level stands


def harmless(raw: bytes | str) -> str:
    """One line of at most `LINE_MAX` characters that can be shown anywhere: no terminal's orders, no control characters, no half characters.

    What is no UTF-8 becomes U+FFFD, a control character a space; of what a carriage return has written over, the last is kept.
    """
    text = raw[: 4 * LINE_MAX].decode("utf-8", "replace") if isinstance(raw, bytes) else raw[: 4 * LINE_MAX]
    text = text.rstrip("\r\n")
    if not text.isprintable():
        if "\r" in text:
            text = text.rpartition("\r")[2]
        if "\x1b" in text:
            text = _ESCAPE.sub("", text)
        text = "".join([char if char.isprintable() else " " for char in text[:LINE_MAX]])
    return text[:LINE_MAX]


def level_of(text: str) -> str:
    """The level that a plain line says it has, by a word in capitals or as glog has it ("[rank0]:[E1130 12:00:00.1 ..."); "" if it says none."""
    if "WARN" in text or "ERR" in text or "FATAL" in text or "CRIT" in text or "PANIC" in text or "EMERG" in text:
        match = _WORD_LEVEL.search(text, 0, _LEVEL_WITHIN)
        if match and match.lastindex:
            return _WORD_LEVELS[match.lastindex] or ""
    if "[E" in text or "[W" in text or "[F" in text or text[:1] in "EWF":
        match = _GLOG_LEVEL.search(text, 0, _LEVEL_WITHIN)
        if match:
            return _GLOG_LEVELS[match[1]]
    return ""


def plain_line(raw: bytes | str, *, at: float, stream: Stream, node: str = "", rank: int | None = None, generation: int | None = None) -> Line:
    """A line that a worker printed."""
    text = harmless(raw)
    return Line(at=at, stream=stream, text=text, node=node, rank=rank, generation=generation, level=level_of(text))


# --- the kernel ----------------------------------------------------------------------------------------------------------

_KMSG: Final = re.compile(r"(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]{0,64};")
_DMESG: Final = re.compile(r"\[ {0,12}(\d{1,12}\.\d{1,9})\] ?")
_SYSLOG: Final = re.compile(r"(?:<\d{1,3}>)?(\S{1,40}(?: {1,2}\d{1,2} \d\d:\d\d:\d\d)?) (\S{1,255}) kernel: ")
_KERNEL_LEVELS: Final = ("critical", "critical", "critical", "error", "warning", "info", "info", "debug")


def kernel_line(raw: bytes | str, *, at: float, node: str = "", booted: float | None = None) -> Line:
    """A line of the kernel's log: a record of /dev/kmsg, a line of dmesg or of syslog, or text alone.

    Args:
        at: its time, if it says none that is known here.
        booted: seconds since the epoch at the boot: records and dmesg count from there.
    """
    text, level = harmless(raw), ""
    if match := _KMSG.match(text):
        level = _KERNEL_LEVELS[int(match[1]) & 7]
        at = at if booted is None else booted + int(match[3]) / 1e6
        text = text[match.end() :]
    elif match := _SYSLOG.match(text):
        at = _or(parse_time(match[1]), at)
        text = _DMESG.sub("", text[match.end() :], count=1)
    elif match := _DMESG.match(text):
        at = at if booted is None else booted + float(match[1])
        text = text[match.end() :]
    return Line(at=at, stream=Stream.KERNEL, text=text, node=node, level=level)


# --- JSON ----------------------------------------------------------------------------------------------------------------

_TIMES: Final = ("time", "timestamp", "ts", "@timestamp", "asctime")
_LEVELS: Final = ("level", "severity", "levelname", "lvl")
_LOGGERS: Final = ("logger", "logger_name", "name")
_MESSAGES: Final = ("message", "msg")
_EXCEPTIONS: Final = ("exception", "exc_info", "stack", "stack_info")
_SAME_LEVEL: Final = {"warn": "warning", "err": "error", "exception": "error", "fatal": "critical", "crit": "critical", "panic": "critical"}
_PRIORITY: Final = re.compile(rb"<\d{1,3}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a line was read: what is true of it whatever it says.

    Attributes:
        at: its time, if it says none.
        trusted: elasticd wrote it, or a monitor: it may tell of steps, phases and readings, and name its node and rank.
        stream: what a line is that is not trusted.
    """

    node: str = ""
    rank: int | None = None
    generation: int | None = None
    at: float = 0.0
    trusted: bool = True
    stream: Stream = Stream.EVENT


def parse_jsonl(
    line: bytes | str, *, node: str = "", rank: int | None = None, generation: int | None = None, at: float = 0.0, trusted: bool = True
) -> Observation | None:
    """The first thing that a line of JSON tells; None if it is no JSON object, or a damaged one of ours. See `observations`."""
    return next(observations(line, Origin(node=node, rank=rank, generation=generation, at=at, trusted=trusted)), None)


def observations(line: bytes | str, origin: Origin) -> Iterator[Observation]:
    """All that a line of JSON tells: nothing, if it is none."""
    document = _document(line)
    if document is None:
        return
    if not origin.trusted:
        yield _event(document, origin)
        if document.get("event") == "phase" and (change := _change("phase", document, origin)) is not None and change.phase in _OWN_PHASES:
            yield replace(change, rank=origin.rank)
        return
    yield from _ours(document, _said(document, origin))


def _ours(document: Mapping[str, Any], said: Origin) -> Iterator[Observation]:
    """What a line tells that elasticd wrote, or a monitor."""
    one: Observation | None = None
    match document.get("event"):
        case "window" if "phases" in document:
            one = _steps(document, said)
        case "ranks" if "columns" in document:
            one = _ranks(document, said)
        case "reading":
            one = _reading(document, said)
        case None if isinstance(document.get("host"), dict) or isinstance(document.get("gpus"), list):
            yield from _node_part(document, said)
        case "kernel_event":
            text = harmless(str(document.get("text", "")))
            one = Line(at=said.at, stream=Stream.KERNEL, text=text, node=said.node, level="warning", fields=_fields(document))
        case event:
            yield _event(document, said)
            one = _change(event, document, said) if isinstance(event, str) else None
    if one is not None:
        yield one


class Reader:
    """The same, and when training begins: with the first steps that a generation's ranks on a node make. No line tells that by itself.

    A checkpoint is written while training goes on: its node is back in training at once.
    """

    def __init__(self) -> None:
        self._phases: dict[str, tuple[int | None, Phase, float]] = {}  # of a node: generation, phase, since when

    def observations(self, line: bytes | str, origin: Origin) -> Iterator[Observation]:
        """All that a line of JSON tells, with the changes that follow from it."""
        for found in observations(line, origin):
            match found:
                case Steps():
                    yield from self._stepped(found)
                    yield found
                case Change(phase=Phase.CHECKPOINT):
                    if self._of(found.node)[1] is Phase.TRAIN:
                        yield found
                        yield replace(found, phase=Phase.TRAIN)
                case Change():
                    self._note(found)
                    yield found
                case _:
                    yield found

    def _stepped(self, found: Steps) -> Iterator[Change]:
        """Whole steps after another phase began: it is over."""
        generation, phase, since = self._of(found.node)
        began = found.at - found.seconds
        if generation != found.generation or (phase is not Phase.TRAIN and began >= since):
            change = Change(at=began, phase=Phase.TRAIN, node=found.node, generation=found.generation, why="steps are made")
            self._note(change)
            yield change

    def _of(self, node: str) -> tuple[int | None, Phase, float]:
        return self._phases.get(node, (None, Phase.INIT, -math.inf))

    def _note(self, change: Change) -> None:
        if change.node in self._phases or len(self._phases) < _NODES_MAX:
            self._phases[change.node] = (change.generation, change.phase, change.at)


def parse_time(value: Any) -> float | None:
    """Seconds since the epoch of a time as logs have it: ISO 8601 (UTC, if it says nothing else), or a number of seconds, milli-, micro- or nanoseconds."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        if isinstance(value, str) and not value[:1].isdigit():
            return None
        if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
            moment = datetime.fromisoformat(value[:40].replace(",", "."))
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        seconds = float(value)
        while seconds > _TIME_MAX and math.isfinite(seconds):
            seconds /= 1000
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    except (ValueError, OverflowError):
        return None


def _document(line: bytes | str) -> dict[str, Any] | None:
    raw = line.encode("utf-8", "replace") if isinstance(line, str) else line
    raw = raw[:JSON_MAX].strip()
    if raw[:1] == b"<" and (priority := _PRIORITY.match(raw)):  # as under systemd
        raw = raw[priority.end() :]
    if raw[:1] != b"{":
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _said(document: Mapping[str, Any], origin: Origin) -> Origin:
    """Where the line says it is from, as far as it does."""
    node = document.get("node")
    return replace(
        origin,
        node=node[:NAME_MAX] if isinstance(node, str) and node.isprintable() and node else origin.node,
        rank=_or(_count(document.get("rank"), RANKS_MAX), origin.rank),
        generation=_or(_count(document.get("generation")), origin.generation),
        at=_or(_time_of(document), origin.at),
    )


def _event(document: Mapping[str, Any], origin: Origin) -> Line:
    event = document.get("event")
    event = harmless(event)[: 4 * NAME_MAX] if isinstance(event, str) else ""
    text = event or harmless(next((document[name] for name in _MESSAGES if isinstance(document.get(name), str)), ""))
    exception = next((document[name] for name in _EXCEPTIONS if isinstance(document.get(name), str)), "")
    fields = _fields(document)
    if exception:
        fields["exception"] = exception[-4 * LINE_MAX :]
    last = exception.rstrip().rpartition("\n")[2]  # what went wrong, before what there may be too much of
    told = " ".join([text, *([last] if last else []), *(f"{name}={value}" for name, value in fields.items() if name not in ("exception", *_MESSAGES))])
    return Line(
        at=origin.at if origin.trusted else _or(_time_of(document), origin.at),
        stream=Stream.EVENT if event else origin.stream,
        text=harmless(told),
        node=origin.node,
        rank=origin.rank,
        generation=origin.generation,
        event=event,
        level=_level(document),
        logger=next((harmless(document[name])[:NAME_MAX] for name in _LOGGERS if isinstance(document.get(name), str)), ""),
        fields=fields,
    )


def _fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """What else it says, as far as it is short: numbers as they are, all else as text."""
    left = (*_TIMES, *_LEVELS, *_LOGGERS, *_EXCEPTIONS, "event", "job", "node")
    fields: dict[str, Any] = {}
    for name, value in document.items():
        if name in left or len(fields) >= FIELDS_MAX:
            continue
        plain = value if value is None or isinstance(value, bool | int | float) else harmless(value if isinstance(value, str) else json.dumps(value)[:LINE_MAX])
        fields[harmless(name)[:NAME_MAX]] = plain
    return fields


def _level(document: Mapping[str, Any]) -> str:
    level = next((document[name] for name in _LEVELS if isinstance(document.get(name), str)), "")[:NAME_MAX].lower()
    level = _SAME_LEVEL.get(level, level)
    return level if level in ("debug", "info", "warning", "error", "critical") else ""


def _time_of(document: Mapping[str, Any]) -> float | None:
    return next((at for name in _TIMES if name in document and (at := parse_time(document[name])) is not None), None)


# --- what elasticd's own lines tell --------------------------------------------------------------------------------------


def _steps(document: Mapping[str, Any], said: Origin) -> Steps | None:
    """A window that a worker sent and its agent believed; None if it makes no sense all the same."""
    try:
        first, last, seconds, at = _count(document["first"]), _count(document["last"]), _seconds(document["seconds"]), _seconds(document["ended"])
        if said.rank is None or first is None or last is None or seconds is None or at is None or at > _TIME_MAX or not 1 <= first <= last:
            return None
        phases = {str(name)[:NAME_MAX]: _seconds(pair[0]) for name, pair in _some(document["phases"])}
        spreads = {str(name)[:NAME_MAX]: spread for name, spread in _some(document.get("values") or {}) if isinstance(spread, dict)}
        bad = {name: _count(spread.get("nonfinite")) or 0 for name, spread in spreads.items()}
        high = {name: _finite(spread.get("high")) for name, spread in spreads.items()}
        memory = {str(name)[:NAME_MAX]: _count(size) for name, size in _some(document.get("memory") or {})}
        return Steps(
            at=at,
            rank=said.rank,
            first=first,
            last=last,
            seconds=seconds,
            phases={name: value for name, value in phases.items() if value is not None},
            node=said.node,
            generation=said.generation,
            samples=_count(document.get("samples")) or 0,
            values={name: _finite(spread.get("mean")) for name, spread in spreads.items()},
            highest={name: value for name, value in high.items() if value is not None},
            nonfinite={name: count for name, count in bad.items() if count},
            memory={name: size for name, size in memory.items() if size is not None},
        )
    except (KeyError, TypeError, IndexError, AttributeError):
        return None


def _ranks(document: Mapping[str, Any], said: Origin) -> Ranks | None:
    columns, step = document["columns"], _count(document.get("step"))
    if not isinstance(columns, dict) or step is None:
        return None
    taken = {str(name)[:NAME_MAX]: values for name, values in _some(columns) if isinstance(values, list)}
    size = max((len(values) for values in taken.values()), default=0)
    if not size or size > RANKS_MAX or any(len(values) != size for values in taken.values()):
        return None
    ranks = tuple({name: number for name, values in taken.items() if (number := _seconds(values[rank])) is not None} for rank in range(size))
    return Ranks(at=said.at, step=step, ranks=ranks, node=said.node, generation=said.generation)


def _reading(document: Mapping[str, Any], said: Origin) -> Reading | None:
    """`{"event": "reading", "gpu": 0, "values": {...}}`: the form in which readings are recorded."""
    values = document.get("values")
    read = reading_of(values) if isinstance(values, dict) else {}
    return Reading(at=said.at, values=read, node=said.node, gpu=_count(document.get("gpu"), NAME_MAX), rank=said.rank) if read else None


def _node_part(document: Mapping[str, Any], said: Origin) -> Iterator[Reading]:
    """A daemon's word of its node (docs/api.md): the machine and its GPUs."""
    at, name = _or(parse_time(document.get("clock")), said.at), document.get("name")
    node = name[:NAME_MAX] if isinstance(name, str) and name else said.node
    host, gpus = document.get("host"), document.get("gpus")
    if isinstance(host, dict) and (values := reading_of(host)):
        yield Reading(at=at, values=values, node=node)
    for gpu in gpus[:NAME_MAX] if isinstance(gpus, list) else ():
        if isinstance(gpu, dict) and (values := reading_of({key: value for key, value in gpu.items() if key != "index"})):
            yield Reading(at=at, values=values, node=node, gpu=_count(gpu.get("index"), NAME_MAX))


_INIT: Final = frozenset({"generation_formed", "workers_started"})
_RESCALE: Final = frozenset({"directive", "worker_failed", "node_failed", "workers_stuck", "leaving"})
_CHECKPOINT: Final = frozenset({"checkpoint_written"})
_OWN_PHASES: Final = (Phase.TRAIN, Phase.EVAL, Phase.CHECKPOINT)  # that a worker may speak of
_PHASES: Final = {phase.value: phase for phase in Phase}


def _change(event: str, document: Mapping[str, Any], said: Origin) -> Change | None:
    """What an event makes of the job, by elasticd's names; of others' "phase" with its name, as {"event": "phase", "phase": "eval"}."""
    why = next((harmless(str(document[name]))[:200] for name in ("cause", "why", "reason", "detail") if document.get(name)), event)
    phase: Phase | None = None
    if event in _INIT:
        phase = Phase.INIT
    elif event in _RESCALE:
        phase = Phase.STOPPED if document.get("action") == "leave" else Phase.RESCALE
    elif event in _CHECKPOINT:
        phase, why = Phase.CHECKPOINT, f"checkpoint of step {document.get('step')!r:.24}"
    elif event == "workers_stopped":
        phase = Phase.STOPPED if document.get("outcome") == "finished" else Phase.RESCALE
    elif event == "agent_exit":
        phase = Phase.STOPPED
    elif event == "phase":
        phase = _PHASES.get(str(document.get("phase", "")))
    if phase is None:
        return None
    size = _count(document.get("world_size"), RANKS_MAX)
    return Change(at=said.at, phase=phase, node=said.node, generation=said.generation, world_size=size, why=why)


# --- numbers -------------------------------------------------------------------------------------------------------------


def _some(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(values.items())[:FIELDS_MAX]


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _seconds(value: Any) -> float | None:
    number = _finite(value)
    return number if number is not None and number >= 0 else None


def _count(value: Any, most: int = 2**63) -> int | None:
    return value if type(value) is int and 0 <= value < most else None


def _or(value: T | None, other: T) -> T:
    return other if value is None else value
