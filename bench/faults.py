"""Faults with labels: real trainings on this machine, each harmed in one way or troubled by one benign event, recorded small enough to ship.

    python -m bench.faults [--list] [--only NAME …] [--missing] [--out DIR] [--jobs N] [--seconds S]

Each trace is a job of its own: `elasticctl run`, two nodes of two workers over gloo, steps of about 60 ms of which most is a sleep
(`_faults_script.py`), 90 s, most faults from second 50 on. The time scale is one tenth of real life: a rank speaks three times a second, and
windows of 1 s stand for windows of 10 s. What is done, to whom and when is a table, `_faults_kinds.py`; no two traces have the same seed, and those to
judge by have other amounts, places and times than those to tune on.

Written: DIR/SPLIT/NAME.tar.gz, the log directory as agents and daemons wrote it (`_faults_pack.py` says what was left out), with the machine's readings
once a second (host.jsonl), and DIR/labels.json. `_faults_read.py` reads them. An earlier trace of the same name is replaced. A trace in whose healthy
part the machine was too busy (`load` in its label: by which share own work took longer than it should) should be recorded again; this is said
at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench._common import progress
from bench._faults_acts import BUSES, XIDS, Neighbours, UnavailableError, Volume, kernel_line, reading, write_reading
from bench._faults_jobs import NODES, ROOT, Job, JobFailedError, job
from bench._faults_kinds import KINDS, SECONDS, WINDOW, Case, Kind, label, parse_name, settings_of, trace_names
from bench._faults_pack import names_of_this_machine, pack, places
from bench._faults_read import LABELS, TRACES, Trace, traces
from detectors.observations import Steps
from elasticd.kv.embedded import EmbeddedEtcd

TRIES: Final = 2
FORWARD_S: Final = 0.045
"""What a forward pass takes on a machine that has nothing else to do, as the training script has it; the rest of a rank's own work takes next to nothing."""
SPOILT: Final = 0.15
"""By which share own work took longer than that, from which on a trace is spoilt."""
TICK: Final = 0.25
LEAVE_WITHIN: Final = 40.0
AGAIN_WITHIN: Final = 400.0
AFTER: Final = 15.0
"""Seconds that a job is watched after it has begun again."""


@dataclass(slots=True)
class Recording:
    """One trace while it is made: what is to be done when, and what has come of it.

    Attributes:
        due: (seconds since the start, what is done then), in this order.
        seen: what the label is told: when it really began and ended, where, notes.
        every: what is done once a second from the beginning of the fault on.
        told: the second at which the machine was read last.
        kernel: the line that the kernel was made to say.
        nodes: those that the job has.
    """

    job: Job
    kind: Kind
    case: Case
    seconds: float
    folder: Path
    stack: ExitStack
    volume: Volume | None = None
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    every: Callable[[], None] | None = None
    told: int = -1
    kernel: str = ""
    nodes: list[str] = field(default_factory=lambda: list(NODES))

    def run(self) -> None:
        """From the start of the job to the end of the recording.

        Raises:
            JobFailedError: the job has not trained, or not gone on.
            UnavailableError: this machine cannot do what is to be done.
        """
        if self.kind.act == "disk":
            self.volume = self.stack.enter_context(closing(Volume(self.folder)))
        if self.begins <= 0:
            self._begin()
        for node in self.nodes:
            self.job.start(node)
        started = self.job.trains()
        self.seen["started"] = round(started, 3)
        if self.begins <= 0:
            self.seen["began"] = self.seen["started"]
        else:
            self.due.append((self.begins, self._begin))
        if self.ends is not None and self.ends > self.begins:
            self.due.append((self.ends, self._end))
        self._watch(started, started + self.seconds)
        if self.kind.act in ("nodes", "again"):  # how long it takes to train again is up to the machine
            back = time.time()
            while not self.job.trained(tuple(self.nodes), since=self.seen["ended"]):
                if time.time() > back + AGAIN_WITHIN:
                    raise JobFailedError("it does not train again")
                self._watch(started, time.time() + TICK)
            self._watch(started, time.time() + AFTER * self.seconds / SECONDS)
        self.seen["until"] = round(time.time(), 3)
        self.seen.setdefault("ended", self.seen["until"])
        if not self.job.running():
            raise JobFailedError("a node has ended")

    def _watch(self, started: float, until: float) -> None:
        """Do what is due, and read the machine once a second."""
        while (now := time.time()) < until:
            while self.due and self.due[0][0] <= now - started:
                self.due.pop(0)[1]()
            if int(now - started) > self.told:
                self.told = int(now - started)
                self._tick()
            time.sleep(TICK - (time.time() - started) % TICK)

    @property
    def begins(self) -> float:
        """Seconds, in a recording of this length."""
        return self.case.begins * self.seconds / SECONDS

    @property
    def ends(self) -> float | None:
        """Likewise."""
        return None if self.case.ends is None else self.case.ends * self.seconds / SECONDS

    def _tick(self) -> None:
        for node in self.nodes:
            volume = self.volume.path if self.volume is not None and node == self.case.node else None
            write_reading(self.job.logs / node / "host.jsonl", node, reading(self.job.logs, volume))
        if self.every is not None:
            self.every()

    def _begin(self) -> None:
        self.seen["began"] = round(time.time(), 3)
        if self.case.rank is not None and self.begins > 0:
            self.seen["node"] = self.job.worker(self.case.rank)[0]
        match self.kind.act:
            case "script":
                rank = {} if self.case.rank is None else {"rank": self.case.rank}
                self.job.tell([{"kind": name, "amount": amount, **rank} for name, amount in self.case.script.items()])
            case "signal":
                assert self.case.rank is not None
                _, pid = self.job.worker(self.case.rank)
                os.kill(pid, SIGNALS[self.kind.name])
            case "disk":
                assert self.volume is not None
                volume, amount = self.volume, self.case.amount
                self.every = (lambda: volume.litter(int(amount))) if self.kind.name == "inodes_fill" else (lambda: volume.fill(int(amount * (1 << 30))))
            case "kernel":
                self._kernel()
            case "neighbour":
                self.stack.enter_context(closing(Neighbours(int(self.case.amount))))
            case "nodes":
                self.job.leave(NODES[1])
                self.nodes.remove(NODES[1])
            case "again":
                for node in NODES:
                    self.job.leave(node)
        if self.case.ends is not None and self.ends == self.begins:
            self.seen["ended"] = self.seen["began"]

    def _kernel(self) -> None:
        rank = next(rank for rank in range(4) if self.job.worker(rank)[0] == self.case.node)
        self.kernel = XIDS[int(self.case.amount)].format(bus=BUSES[self.case.node], pid=self.job.worker(rank)[1])
        line, note = kernel_line(self.kernel, self.case.node)
        with (self.job.logs / self.case.node / "kmsg.log").open("a") as file:
            file.write(line + "\n")
        if note:
            self.seen["note"] = note

    def _end(self) -> None:
        self.seen["ended"] = round(time.time(), 3)
        match self.kind.act:
            case "script":
                self.job.tell([])
            case "neighbour":
                self.stack.close()
            case "nodes":
                self.nodes.append("node-2")
                self.job.left(NODES[1], LEAVE_WITHIN)
                self.job.start("node-2")
            case "again":
                for node in NODES:
                    self.job.left(node, LEAVE_WITHIN)
                for node in NODES:
                    self.job.start(node, again=True)


SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""By the fault."""


class Recorder:
    """Records traces, several at a time.

    Args:
        out: where they go.
        etcd: an endpoint.
        scratch: a directory for all that is not kept.
        seconds: of a trace.
    """

    def __init__(self, out: Path, etcd: str, scratch: Path, *, seconds: float = SECONDS) -> None:
        self._out, self._etcd, self._scratch, self._seconds = out, etcd, scratch, seconds
        self._lock = threading.Lock()
        self._turn = 0

    def record(self, name: str) -> str:
        """Make one trace; what there is to say of it, "" if all is well."""
        try:
            for attempt in range(1, TRIES + 1):
                try:
                    said = self._record(name)
                except JobFailedError as error:
                    said = str(error).partition("\n")[0]
                    progress(f"{name}: {said} (attempt {attempt})")
                else:
                    return said
        except UnavailableError as error:
            return f"skipped: {error}"
        return f"failed: {said}"

    def _record(self, name: str) -> str:
        split, kind = parse_name(name)
        with self._lock:
            self._turn += 1
            folder = self._scratch / f"job-{self._turn}"
        with ExitStack() as stack, job(folder, self._etcd, folder.name, seed=kind.seed(split), settings=settings_of(kind, kind.case(split))) as made:
            recording = Recording(job=made, kind=kind, case=kind.case(split), seconds=self._seconds, folder=folder, stack=stack)
            recording.run()
            archive = self._out / f"{name}.tar.gz"
            node = kind.case(split).node
            size = pack(made.logs, archive, places=places(scratch=folder, root=ROOT), kernel=recording.kernel, node=node)
        found = label(name, **recording.seen)
        trace = Trace(name=name, path=archive, label=found)
        found["load"] = round(spoilt(trace), 3)
        self._add(name, found)
        progress(f"{name}: {size / 1024:.0f} KiB, load {found['load']:.2f}{', ' + found['note'] if 'note' in found else ''}")
        return f"spoilt: own work took {found['load']:.0%} longer than they should" if found["load"] > SPOILT else ""

    def _add(self, name: str, found: dict[str, Any]) -> None:
        with self._lock:
            path = self._out / LABELS
            known = json.loads(path.read_text())["traces"] if path.exists() else {}
            known[name] = found
            rows = ",\n".join(f"{json.dumps(one)}: {json.dumps(known[one])}" for one in sorted(known))
            path.write_text(f'{{"about": "see bench/faults.py", "window_s": {WINDOW}, "traces": {{\n{rows}\n}}}}\n')


def spoilt(trace: Trace) -> float:
    """By which share the ranks' own work took longer than it should, on average, before anything was done (or throughout, where that began with the job)."""
    until = trace.label["began"] if trace.label.get("began", 0) > trace.label["started"] else trace.label["until"]
    with trace.observations() as observed:
        steps = [one for one in observed if isinstance(one, Steps) and trace.label["started"] + 2 < one.at < until]
    count = sum(one.last - one.first + 1 for one in steps)
    return sum(one.phases[name] for one in steps for name in ("forward", "backward", "optimizer")) / count / FORWARD_S - 1 if count else 1.0


def record_all(names: Sequence[str], out: Path, *, jobs: int, seconds: float = SECONDS) -> dict[str, str]:
    """Record these, `jobs` at a time, and those that must be alone one after the other; what there is to say of each."""
    out.mkdir(parents=True, exist_ok=True)
    together = [name for name in names if not parse_name(name)[1].alone]
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder, EmbeddedEtcd(Path(folder) / "etcd") as etcd:
        recorder = Recorder(out, etcd.endpoint, Path(folder), seconds=seconds)
        with ThreadPoolExecutor(jobs) as pool:
            said = dict(zip(together, pool.map(recorder.record, together), strict=True))
        said |= {name: recorder.record(name) for name in names if name not in said}
    return said


def leaks(folder: Path) -> Iterator[str]:
    """What is said of this machine or its user in traces there, and should not be."""
    names = names_of_this_machine(scratch=Path(tempfile.gettempdir()), root=ROOT)
    for path in sorted(folder.glob("*/*.tar.gz")):
        with Trace(name="", path=path, label={}).unpacked() as job_logs:
            text = b"\n".join(file.read_bytes() for file in job_logs.rglob("*") if file.is_file())
        yield from (f"{path.name}: {name}" for name in names if name.encode() in text)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; the exit code: 1 if a trace failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="Record trainings with faults and benign events.")
    parser.add_argument("--list", action="store_true", help="name all traces, and what happens in them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help='traces ("tuning/kill"), or kinds of them ("kill"), in this order')
    parser.add_argument("--missing", action="store_true", help="of these, the ones that are not in DIR")
    parser.add_argument("--out", type=Path, default=TRACES, help="directory for the traces")
    parser.add_argument("--jobs", type=int, default=3, help="how many are recorded at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a trace; all times in it shrink alike")
    args = parser.parse_args(argv)
    if args.list:
        for name in trace_names("tuning"):
            kind = parse_name(name)[1]
            print(f"{kind.name:18} {'fault ' if kind.fault else 'benign'} {kind.scope:4}  {kind.about}")
        return 0
    names = trace_names()
    if args.only:
        if unknown := [one for one in args.only if one not in names and one not in KINDS]:
            parser.error(f"there is no trace {unknown[0]!r}; --list names them all")
        names = list(dict.fromkeys(name for one in args.only for name in names if one in (name, name.partition("/")[2])))
    if args.missing and (args.out / LABELS).exists():
        known = {trace.name for trace in traces(folder=args.out)}
        names = [name for name in names if name not in known]
    said = record_all(names, args.out, jobs=args.jobs, seconds=args.seconds)
    for name, text in said.items():
        if text:
            print(f"{name}: {text}")
    for leak in leaks(args.out):
        print(f"names this machine: {leak}")
    return int(any(text.startswith("failed") for text in said.values()))


if __name__ == "__main__":
    sys.exit(main())
