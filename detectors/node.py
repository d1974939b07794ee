"""The detectors of one node as a process: told what to look at on standard input, it says on standard output what it finds.

Owns: the process, its two streams of JSON lines, and one pipeline for each job. Must not: judge, decide what is done, or know who started it.

In, one document a line:
    {"jobs": {"llm": {"logs": DIR, "memory": DIR or null}}}   all jobs that run here from now on; one that is not named any more has ended
    {"event": "kernel_event", "time": …, "text": …}           a line of the kernel's log, for every job
    {"name": NODE, "clock": …, "host": {…}, "gpus": […]}      readings of the node, for every job
Out:
    {"kind": "incident", "job": …, "incident": {…}}           an incident that changed
    {"kind": "finding", "job": …, "finding": {…}}             what was found that is no mere statistic
    {"kind": "pulse", "at": …, "rss": …, "jobs": {"llm": {…}}, "problems": […]}   every few seconds
The end of standard input is the end. What is usual for a job is written to its memory when the job ends, every hour, and at the end; never while an
incident is open, for that is not what is usual.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from detectors.findings import Certainty
from detectors.memory import Memory
from detectors.pipeline import Pipeline, Verdicts
from detectors.recorded import Follower
from detectors.signatures import Table, TableError
from detectors.sources import Origin, observations

EVERY: Final = 1.0
"""Seconds between two looks at the logs."""
PULSE: Final = 5.0
SAVE_EVERY: Final = 3600.0
FINDINGS_PER_TURN: Final = 64
"""Findings of a job that are told of one turn; incidents always are."""
LINE_MAX: Final = 1 << 20
"""Bytes of a line on standard input."""
JOBS_MAX: Final = 256
PROBLEMS_MAX: Final = 16


@dataclass(kw_only=True, slots=True)
class Watched:
    """One job."""

    logs: Path
    memory: Path | None
    follower: Follower
    pipeline: Pipeline
    saved: float
    heard: float = 0.0


class Node:
    """See the module. Time is handed in.

    Args:
        say: takes one document.
        table: signatures.
        width: seconds of a window.
        forest: with the isolation forest.
        fresh: what lies in the logs of a job when it is first seen is old, and not judged.
    """

    def __init__(self, say: Callable[[Mapping[str, Any]], None], *, table: Table, width: float, forest: bool = True, fresh: bool = True) -> None:
        self._say = say
        self._table = table
        self._width = width
        self._forest = forest
        self._fresh = fresh
        self._jobs: dict[str, Watched] = {}
        self._problems: list[str] = []
        self._pulsed = 0.0

    @property
    def jobs(self) -> tuple[str, ...]:
        """That are watched."""
        return tuple(self._jobs)

    def told(self, line: bytes, now: float) -> None:
        """Take a line of standard input; what is none of ours is a problem that is told, and nothing more."""
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise TypeError("no object")
            if "jobs" in document:
                self._watch(document["jobs"], now)
                return
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.problem(f"not understood: {error!r:.100}")
            return
        for observation in observations(line, Origin(at=now)):
            for name, job in self._jobs.items():
                self._tell(name, job.pipeline.see(observation))

    def turn(self, now: float) -> None:
        """Read what the logs have got, judge it, and say what came of it."""
        for name, job in self._jobs.items():
            verdicts = Verdicts()
            for observation in job.follower.poll(now):
                job.heard = now
                verdicts += job.pipeline.see(observation)
            verdicts += job.pipeline.turn(now)
            self._tell(name, verdicts)
            if now - job.saved >= SAVE_EVERY:
                self._save(name, job, now)
        if now - self._pulsed >= PULSE or now < self._pulsed:
            self._pulsed = now
            self._pulse(now)

    def close(self, now: float) -> None:
        """No more will be told."""
        for name in list(self._jobs):
            self._drop(name, now)

    # --- which jobs ------------------------------------------------------------------------------------------------------

    def _watch(self, jobs: Mapping[str, Mapping[str, Any]], now: float) -> None:
        wanted = {name: (Path(where["logs"]), Path(where["memory"]) if where.get("memory") else None) for name, where in jobs.items()}
        for name in self._jobs.keys() - wanted.keys():
            self._drop(name, now)
        for name, (logs, memory) in wanted.items():
            known = self._jobs.get(name)
            if known is not None and (known.logs, known.memory) == (logs, memory):
                continue
            if known is not None:
                self._drop(name, now)
            if len(self._jobs) >= JOBS_MAX:
                self.problem(f"job {name} is not watched: there are {JOBS_MAX} already")
                continue
            self._jobs[name] = Watched(
                logs=logs, memory=memory, follower=Follower(logs, from_end=self._fresh), pipeline=self._pipeline(name, memory), saved=now
            )

    def _pipeline(self, name: str, where: Path | None) -> Pipeline:
        memory = Memory()
        if where is not None:
            try:
                memory = Memory.load(where)
            except FileNotFoundError:
                pass
            except OSError as error:
                self.problem(f"job {name}: what is usual for it cannot be read: {error}")
        for problem in memory.problems:
            self.problem(f"job {name}: {problem}")
        return memory.pipeline(table=self._table, width=self._width, forest=self._forest)

    def _drop(self, name: str, now: float) -> None:
        job = self._jobs.pop(name)
        self._tell(name, job.pipeline.finish())
        self._save(name, job, now)

    def _save(self, name: str, job: Watched, now: float) -> None:
        job.saved = now
        if job.memory is None or job.pipeline.incidents or not job.pipeline.windows:
            return
        try:
            Memory.of(job.pipeline).save(job.memory)
        except OSError as error:
            self.problem(f"job {name}: what is usual for it cannot be written: {error}")

    # --- what is said ----------------------------------------------------------------------------------------------------

    def _tell(self, name: str, verdicts: Verdicts) -> None:
        for incident in {one.id: one for one in verdicts.incidents}.values():
            self._say({"kind": "incident", "job": name, "incident": incident.as_dict()})
        worth = [finding for finding in verdicts.findings if finding.certainty is not Certainty.WEAK]
        for finding in worth[:FINDINGS_PER_TURN]:
            self._say({"kind": "finding", "job": name, "finding": finding.as_dict()})

    def _pulse(self, now: float) -> None:
        jobs = {
            name: {
                "windows": job.pipeline.windows,
                "lines": job.pipeline.lines,
                "incidents": len(job.pipeline.incidents),
                "heard_s": round(now - job.heard, 1) if job.heard else None,
                "model": job.pipeline.forest.describe() if job.pipeline.forest is not None else None,
            }
            for name, job in self._jobs.items()
        }
        self._say({"kind": "pulse", "at": now, "rss": _rss(), "jobs": jobs, "problems": self._problems})
        self._problems = []

    def problem(self, text: str) -> None:
        """Something that people should know; told with the next pulse."""
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(text[:500])


def _rss() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - half as long as by Path
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the process ---------------------------------------------------------------------------------------------------------


class Lines:
    """Whole lines of a descriptor, without waiting longer than asked.

    Attributes:
        ended: nothing more comes.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._half = b""
        self.ended = False

    def within(self, seconds: float) -> list[bytes]:
        """Those that come within so many seconds; as soon as there is any, what there is."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if not ready:
            return []
        data = os.read(self._fd, 1 << 16)
        self.ended = not data
        *whole, half = (self._half + data).split(b"\n")
        self._half = half if len(half) <= LINE_MAX else b""
        return [line for line in whole if line]


def serve(node: Node, given: Lines, clock: Callable[[], float]) -> None:
    """Until the end of what is given."""
    due = clock()
    while not given.ended:
        for line in given.within(min(EVERY, due - clock())):
            node.told(line, clock())
        now = clock()
        if now >= due or due - now > 2 * EVERY:  # the clock may have been set back
            node.turn(now)
            due = now + EVERY
    node.close(clock())


def main(arguments: Iterable[str] = ()) -> int:
    """`python -m detectors.node [--width SEC] [--no-forest] [--signatures FILE]…`."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m detectors.node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=float, default=10.0, metavar="SEC", help="seconds of a window (default: %(default)g)")
    parser.add_argument("--no-forest", action="store_true", help="do without the isolation forest")
    parser.add_argument("--signatures", type=Path, action="append", default=[], metavar="FILE", help="TOML that changes the built-in table; may be repeated")
    parser.add_argument("--from-start", action="store_true", help="judge what lies in the logs already, too")
    options = parser.parse_args(list(arguments) or None)
    problems: list[str] = []
    try:
        table = Table.load(*options.signatures)
    except (OSError, TableError) as error:
        table = Table.load()
        problems.append(f"signatures: {error}; the built-in ones are in use")

    def say(document: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(document, allow_nan=False, default=str) + "\n")
        sys.stdout.flush()

    node = Node(say, table=table, width=options.width, forest=not options.no_forest, fresh=not options.from_start)
    for problem in problems:
        node.problem(problem)
    try:
        serve(node, Lines(sys.stdin.fileno()), time.time)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
