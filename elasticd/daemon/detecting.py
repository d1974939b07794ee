"""The detectors of this node: a process of its own, kept alive, told what runs here, and heard.

Owns: that process and what it has said. Must not: judge what it says (`policy`), or import `detectors`: scikit-learn takes 100 MB, and what a hostile
log does to the process that reads it must not happen to the daemon.

Training never depends on it. When it dies, hangs or grows too large it is killed and started again, later and later; what was known of open incidents
stays known.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from elasticd.observability.harmless import harmless

log = structlog.get_logger("elasticd.daemon.detecting")

SILENT_MAX: Final = 30.0
"""Seconds without a word after which the process counts as hung; it says something every five."""
RSS_MAX: Final = 512 << 20
"""Bytes beyond which it is started anew."""
BACKOFF: Final = (1.0, 60.0)
"""Seconds before it is started again: after the first death, and at most."""
HEALTHY: Final = 60.0
"""Seconds that it must live for the next death to be a first one."""
INCIDENTS_MAX: Final = 256
"""Incidents of a job that are remembered; the oldest that is over goes first."""
FINDINGS_MAX: Final = 256
LINE_MAX: Final = 1 << 20
QUEUE_MAX: Final = 1024
TEXT_MAX: Final = 2000
_CHILD: Final = Path(__file__).with_name("_plain_child.py")
_DEPTH_MAX: Final = 8
_ITEMS_MAX: Final = 256
_STARTS: Final = 90.0  # seconds for its first word: importing scikit-learn on a busy machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """How the detectors are.

    Attributes:
        alive: the process runs and has spoken lately.
        restarts: how often it was started again.
        at: seconds since the epoch of its last pulse, 0 if there was none.
        rss: bytes that it takes.
        jobs: by name what it says of each: windows, lines, incidents, model.
        problem: why it is blind, "" if it is not.
    """

    alive: bool
    restarts: int
    at: float
    rss: int
    jobs: Mapping[str, Mapping[str, Any]]
    problem: str


@dataclass(slots=True)
class _Known:
    """What was said of one job."""

    incidents: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    findings: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=FINDINGS_MAX))


class Detecting:
    """See the module. `start` begins, `close` ends; everything else may be called by any thread.

    Args:
        memory: directory below which what is usual for each job is kept; None: nowhere.
        options: for the process: `--signatures FILE`, `--width SEC`.
        wake: called when an incident has changed.
        command: what is started, for tests.
    """

    def __init__(
        self, memory: Path | None, *, options: Sequence[str] = (), wake: Callable[[], None] = lambda: None, command: Sequence[str] | None = None
    ) -> None:
        self._memory = memory
        self._command = list(command or (sys.executable, "-m", "detectors.node", *options))
        self._wake = wake
        self._lock = threading.Lock()
        self._jobs: dict[str, dict[str, str | None]] = {}
        self._known: dict[str, _Known] = {}
        self._queue: deque[bytes] = deque(maxlen=QUEUE_MAX)
        self._pulse: Mapping[str, Any] = {}
        self._restarts = 0
        self._alive = False
        self._problem = "it has not started yet"
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._due = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="elasticd-detecting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; what it learnt it writes first, if that takes no longer than a moment. May be called again."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join(15.0)
        os.close(self._stop)
        os.close(self._due)

    # --- what it is told -------------------------------------------------------------------------------------------------

    def watch(self, jobs: Mapping[str, Path]) -> None:
        """These jobs run here, and write their logs there; no others."""
        wanted: dict[str, dict[str, str | None]] = {
            name: {"logs": str(logs), "memory": str(self._memory / name) if self._memory is not None else None} for name, logs in jobs.items()
        }
        with self._lock:
            if wanted == self._jobs:
                return
            self._jobs = wanted
        self.tell({"jobs": wanted})

    def tell(self, document: Mapping[str, Any]) -> None:
        """Tell it something of the node. What it cannot take in time is dropped."""
        if self._closed:
            return
        self._queue.append(json.dumps(document, allow_nan=False, default=str).encode() + b"\n")
        with suppress(BlockingIOError, OSError):
            os.eventfd_write(self._due, 1)

    # --- what it says ----------------------------------------------------------------------------------------------------

    @property
    def watched(self) -> tuple[str, ...]:
        """Jobs that run here."""
        with self._lock:
            return tuple(sorted(self._jobs))

    @property
    def jobs(self) -> tuple[str, ...]:
        """Of which anything was said."""
        with self._lock:
            return tuple(sorted(self._known))

    def incidents(self, job: str) -> list[dict[str, Any]]:
        """Of a job, the oldest first: those that are open, and the last that are over."""
        with self._lock:
            known = self._known.get(job)
            return list(known.incidents.values()) if known else []

    def findings(self, job: str) -> list[dict[str, Any]]:
        """Of a job, the last ones, the oldest first."""
        with self._lock:
            known = self._known.get(job)
            return list(known.findings) if known else []

    @property
    def pulse(self) -> Pulse:
        """How it is."""
        with self._lock:
            said = self._pulse
            return Pulse(
                alive=self._alive,
                restarts=self._restarts,
                at=float(said.get("at", 0.0)),
                rss=int(said.get("rss", 0)),
                jobs=dict(said.get("jobs", {})),
                problem=self._problem,
            )

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = BACKOFF[0]
        while True:
            began = time.monotonic()
            why = self._live()
            if why is None:
                return
            with self._lock:
                self._alive, self._problem = False, why
                self._restarts += 1
            pause = BACKOFF[0] if time.monotonic() - began > HEALTHY else min(BACKOFF[1], 2 * pause)
            log.error("detector_died", why=why, again_in=pause, training="goes on")
            if select.select([self._stop], [], [], pause)[0]:
                return

    def _live(self) -> str | None:
        """One life of the process: why it ended, None if it was to end."""
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
                env=_environment(),
            )
        except OSError as error:
            return f"it cannot be started: {error}"
        talk = _Talk(process)
        try:
            return self._talk(process, talk)
        finally:
            talk.close()

    def _talk(self, process: subprocess.Popen[bytes], talk: _Talk) -> str | None:
        with self._lock:
            first = json.dumps({"jobs": self._jobs}).encode() + b"\n"
        talk.write(first)
        heard, patience = time.monotonic(), _STARTS
        while True:
            if self._stop in talk.ready([self._stop, self._due], 1.0):
                talk.end()
                return None
            with suppress(BlockingIOError):
                os.eventfd_read(self._due)
            while self._queue:
                talk.write(self._queue.popleft())
            if talk.stuck:
                return "it reads nothing any more"
            for line in talk.lines():
                heard, patience = time.monotonic(), SILENT_MAX
                self._hear(line)
            if talk.ended:
                code = process.wait(5.0)
                return f"it ended with {code}{': ' + talk.said if talk.said else ''}"
            if time.monotonic() - heard > patience:
                return f"it has said nothing for {patience:.0f} s"
            if int(self._pulse.get("rss", 0)) > RSS_MAX:
                self._pulse = {}
                return f"it took more than {RSS_MAX >> 20} MiB"

    def _hear(self, line: bytes) -> None:
        try:
            document = _clean(json.loads(line))
            kind, job = document["kind"], document.get("job", "")
        except (ValueError, TypeError, KeyError, RecursionError):
            log.warning("detector_not_understood", line=harmless(line[:200].decode("utf-8", "replace"), 200))
            return
        wake = False
        with self._lock:
            if kind == "pulse":
                self._pulse, self._alive = document, True
                problems = document.get("problems") or []
                self._problem = ""
            elif job in self._jobs and kind == "incident":
                wake = self._take_incident(job, document["incident"])
                problems = []
            elif job in self._jobs and kind == "finding":
                self._known.setdefault(job, _Known()).findings.append(document["finding"])
                problems = []
            else:
                return
        for problem in problems:
            log.error("detector_problem", why=problem)
        if wake:
            self._wake()

    def _take_incident(self, job: str, incident: dict[str, Any]) -> bool:
        known = self._known.setdefault(job, _Known()).incidents
        before = known.pop(incident["id"], None)
        known[incident["id"]] = incident
        while len(known) > INCIDENTS_MAX:
            over = next((name for name, one in known.items() if one.get("state") == "over"), next(iter(known)))
            del known[over]
        if before is None or before.get("state") != incident.get("state"):
            root = incident["root"]
            log.warning(
                "incident",
                job=job,
                incident=incident["id"],
                state=incident["state"],
                cause=root["kind"],
                certainty=root["certainty"],
                summary=root["summary"],
                why_over=incident.get("why_over") or None,
            )
        return True


def _environment() -> dict[str, str]:
    """One thread: numbers are few, and the other processors train."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _clean(value: Any, depth: int = 0) -> Any:
    """The same, with what log lines had in it made harmless and short."""
    if depth > _DEPTH_MAX:
        return None
    if isinstance(value, str):
        return harmless(value, TEXT_MAX)
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value[:_ITEMS_MAX]]
    if isinstance(value, dict):
        return {harmless(str(name), 128): _clean(item, depth + 1) for name, item in list(value.items())[:_ITEMS_MAX]}
    return value


class _Talk:
    """The three streams of a process.

    Attributes:
        ended: it has closed its output.
        said: the last that it wrote to standard error.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        for stream in (self._in, self._out, self._err):
            os.set_blocking(stream.fileno(), False)
        self._half = b""
        self._rest = b""
        self._full_since = 0.0
        self._readable: set[int] = set()
        self._errors = True  # it may still write some
        self.ended = False
        self.said = ""

    @property
    def stuck(self) -> bool:
        """It has not read for long what it was told."""
        return bool(self._rest) and time.monotonic() - self._full_since > SILENT_MAX

    def ready(self, others: Sequence[int], seconds: float) -> set[int]:
        """Wait until something can be read; which of the others can be."""
        reading = [*others, self._out.fileno(), *([self._err.fileno()] if self._errors else [])]
        readable, _, _ = select.select(reading, [self._in.fileno()] if self._rest else [], [], seconds)
        self._readable = set(readable)
        if self._rest:
            self.write(b"")
        return self._readable & set(others)

    def write(self, data: bytes) -> None:
        """Now, or when it can take it; what is more than a megabyte is dropped."""
        if len(self._rest) < LINE_MAX:
            self._rest += data
        with suppress(BlockingIOError, BrokenPipeError):
            written = os.write(self._in.fileno(), self._rest)
            self._rest, self._full_since = self._rest[written:], time.monotonic()

    def lines(self) -> list[bytes]:
        """Whole lines that have come."""
        if self._err.fileno() in self._readable:
            with suppress(BlockingIOError):
                text = os.read(self._err.fileno(), 1 << 16).decode("utf-8", "replace")
                self._errors = bool(text)
                self.said = harmless((self.said + " " + text)[-500:], 500).strip()
        if self._out.fileno() not in self._readable:
            return []
        with suppress(BlockingIOError):
            data = os.read(self._out.fileno(), 1 << 18)
            self.ended = not data
            *whole, half = (self._half + data).split(b"\n")
            self._half = half if len(half) <= LINE_MAX else b""
            return [line for line in whole if line]
        return []

    def end(self) -> None:
        """Let it write what it has learnt, and end."""
        with suppress(OSError):
            self._in.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def close(self) -> None:
        """Leave nothing of it."""
        with suppress(OSError):
            self._in.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._err.close()
