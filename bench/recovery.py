"""How long a job stands still when its world changes: elasticd beside stock torchrun, on this machine, in one call.

    python -m bench.recovery [--quick] [--json FILE] [--runs N] [--events …] [--peers …] [--defaults] [--keep DIR]

Two nodes with one worker each run the same plain DDP script (_recovery_script.py: gloo, a step of 20 ms, OMP_NUM_THREADS=1); a third node may join.
A value is the time from the event to the last rank's first finished step of the new world. Every run of every event is a job of its own, formed
and then left in peace for 2 s, and the peers take turns run by run, in a rotating order, so that a noisy machine is noisy for all of them.

row                what happens
form               the agents of both nodes are started; all peers but torchrun by default (30 s) then wait 1 s for a third
worker_kill        SIGKILL of the worker of the node that is not rank 0's
node_join          the agent of a third node is started
node_kill          SIGKILL of agent and worker of the node that is not rank 0's
rank0_node_loss    the same of the node of rank 0, which for torchrun hosts the rendezvous, and for elasticd coordinates
silent_node        SIGSTOP of agent and worker of the node that is not rank 0's
*_without_startup  the part that is not Python's start-up: without exec to `import torch` done, without wrapping the model (where torch imports
                   another 1.6 s worth) and the first step, for form and node_join without the newcomers' agents' start-up too;
                   _recovery_timeline.py defines it to the letter
*_x_torchrun_tuned elasticd's value / that of torchrun-tuned, run by run

peer               what it is
elasticd           `python -m elasticd.agent`, embedded etcd, lease 2 s, workers exec'ed
torchrun-tuned     c10d, with short timeouts, and without the shared store with which a node that joins ends the job
torchrun-etcd-v3   the same torchrun over our rendezvous, lease 2 s
torchrun           c10d, default settings; once in a full run, or with --defaults: its worker_kill alone takes 70 s

An event from which a peer has not recovered within its bound counts as longer than any other, and is null where the median would be such a run.
A full run takes half an hour on two quiet cores, --quick five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import psutil

from bench._common import Row, command, paired_ratio, print_table, progress, write_json
from bench._recovery_jobs import PEERS, Job, adopt_orphans, end_all, job_of, node_of, send
from bench._recovery_timeline import EVENTS, Phases, Worker, generations, last, phases, read_workers, stepping, without_startup
from elasticd.kv.embedded import EmbeddedEtcd

OURS: Final = "elasticd"
RIVAL: Final = "torchrun-tuned"
ONCE: Final = "torchrun"
"""Measured in the first run only."""
RUNS: Final = 5
FORM_WITHIN: Final = 120.0
BOUNDS: Final = {"rank0_node_loss": 30.0, "silent_node": 75.0}
BOUNDS_QUICK: Final = {**BOUNDS, "silent_node": 30.0}
"""Seconds that a recovery is waited for, where that is not `FORM_WITHIN`."""
PEACE: Final = 2.0
"""Seconds of training between the formation and the event."""
MISSES: Final = 2
"""Runs in a row without a recovery, after which an event is not tried again on that peer."""
POLL: Final = 0.05
WARM_UP: Final = "import torch.distributed.run, torch.nn.parallel, torch._dynamo, elasticd.agent.agent"

NOTES: Final = (
    "form: all wait 1 s for a third node (settle, last_call_timeout), torchrun with default settings 30 s",
    "*_without_startup: total - (exec to import torch done) - (DDP's constructor, first step) - (form, node_join: start-up of the agents)",
    "elasticd, detect … first_step: medians of the phases of the runs; they add up to the total in each run",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of one event on one peer. `seconds` is None if it did not recover; `why` says what happened instead, or besides."""

    seconds: float | None
    without_startup: float | None = None
    phases: Phases | None = None
    why: str = ""


@dataclass(slots=True)
class Results:
    """All outcomes so far, by event and peer, each with the number of its run."""

    outcomes: dict[tuple[str, str], dict[int, Outcome]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, event: str, peer: str, run: int, outcome: Outcome) -> None:
        """Keep one."""
        self.outcomes[event, peer][run] = outcome

    def hopeless(self, event: str, peer: str) -> bool:
        """Whether there is no point in trying again."""
        tried = list(self.outcomes[event, peer].values())
        return len(tried) >= MISSES and all(outcome.seconds is None for outcome in tried)

    def rows(self, events: Sequence[str], peers: Sequence[str]) -> list[Row]:
        """The rows of the result: the events, those without start-up, the ratios."""
        pairs = [(event, peer) for event in events for peer in peers if self.outcomes[event, peer]]
        totals = [self._total(event, peer) for event, peer in pairs]
        pure = [row for event, peer in pairs if (row := self._without_startup(event, peer))]
        return totals + pure + [row for event in events if (row := self._ratio(event))]

    def phase_rows(self, events: Sequence[str]) -> list[Row]:
        """Where elasticd's time went: `EVENT_PHASE`."""
        rows = []
        for event in events:
            cuts = [outcome.phases for outcome in self.outcomes[event, OURS].values() if outcome.phases]
            rows += [Row.of(f"{event}_{name}", OURS, [getattr(cut, name) for cut in cuts]) for name in Phases.names() if cuts]
        return rows

    def _total(self, event: str, peer: str) -> Row:
        outcomes = self.outcomes[event, peer].values()
        whys = sorted({outcome.why for outcome in outcomes if outcome.why})
        return Row.of(event, peer, [outcome.seconds for outcome in outcomes], note="; ".join(whys))

    def _without_startup(self, event: str, peer: str) -> Row | None:
        values = [outcome.without_startup for outcome in self.outcomes[event, peer].values() if outcome.without_startup is not None]
        return Row.of(f"{event}_without_startup", peer, values) if values else None

    def _ratio(self, event: str) -> Row | None:
        ours, theirs = self.outcomes[event, OURS], self.outcomes[event, RIVAL]
        pairs = [(ours[run].seconds, theirs[run].seconds) for run in sorted(ours.keys() & theirs.keys())]
        return paired_ratio(f"{event}_x_{RIVAL.replace('-', '_')}", OURS, pairs)


# --- one run -----------------------------------------------------------------------------------------------------------


def measure(job: Job, event: str, bound: float) -> Outcome:
    """Form the job, do the event to it, wait for the new world."""
    at = time.time()
    job.start()
    job.start()
    formed = _await_world(job, 2, within=FORM_WITHIN, known=())
    if event == "form" or isinstance(formed, str):
        return _outcome(job, event, at, formed)
    time.sleep(PEACE)
    known = {worker.pid for worker in read_workers(job.out)}
    at, world = _do(job, event, formed)
    return _outcome(job, event, at, _await_world(job, world, within=bound, known=known))


def _do(job: Job, event: str, formed: Sequence[Worker]) -> tuple[float, int]:
    """Do it; the time just before, and the size of the world that is to come of it."""
    first, second = sorted(formed, key=lambda worker: worker.rank)
    worker = psutil.Process(second.pid)
    node = node_of(job, first if event == "rank0_node_loss" else second)
    deeds: dict[str, tuple[Callable[[], None], int]] = {
        "worker_kill": (lambda: send([worker], signal.SIGKILL), 2),
        "node_join": (job.start, 3),
        "node_kill": (lambda: send(node, signal.SIGKILL), 1),
        "rank0_node_loss": (lambda: send(node, signal.SIGKILL), 1),
        "silent_node": (lambda: send(node, signal.SIGSTOP), 1),
    }
    deed, world = deeds[event]
    at = time.time()
    deed()
    return at, world


def _await_world(job: Job, world: int, *, within: float, known: Collection[int]) -> list[Worker] | str:
    """The workers of a world of this size, all new and all stepping; or why there is none."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = stepping(read_workers(job.out, known), world)
        if found:
            return found
        if not job.running():
            return "the job ended"
        time.sleep(POLL)
    return f"never within {within:.0f} s"


def _outcome(job: Job, event: str, at: float, workers: Sequence[Worker] | str) -> Outcome:
    if isinstance(workers, str):
        return Outcome(seconds=None, why=workers)
    logs = job.logs()
    cut = phases(event, at, logs, workers) if job.peer == OURS else None
    formed = generations(at, logs)
    why = f"{formed} generations in one run" if formed > 1 else ""
    return Outcome(seconds=last(workers, "step") - at, without_startup=without_startup(event, at, workers, cut), phases=cut, why=why)


# --- all runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure."""

    events: tuple[str, ...]
    peers: tuple[str, ...]
    runs: int
    bounds: dict[str, float]

    def steps(self) -> Iterator[tuple[int, str, str]]:
        """Run, event and peer: the peers in turn, each run beginning with another one."""
        for run in range(self.runs):
            for event in self.events:
                for place in range(len(self.peers)):
                    peer = self.peers[(run + place) % len(self.peers)]
                    if peer != ONCE or run == 0:
                        yield run, event, peer


def run_all(plan: Plan, folder: Path, results: Results) -> None:
    """Carry out a plan, with everything that it writes in `folder`."""
    adopt_orphans()
    spare = {child.pid for child in psutil.Process().children()}
    try:
        subprocess.run([sys.executable, "-c", WARM_UP], check=True)
        with EmbeddedEtcd(folder / "etcd") as etcd:
            for run, event, peer in plan.steps():
                if not results.hopeless(event, peer):
                    with job_of(peer, folder / f"{event}-{peer}-{run + 1}", etcd.endpoint, {*spare, etcd.pid}) as job:
                        outcome = measure(job, event, plan.bounds.get(event, FORM_WITHIN))
                        _tell(run, plan.runs, event, job, outcome)
                    results.add(event, peer, run, outcome)
    finally:
        end_all(spare)  # an interrupt may have cut the other clean-up short; there is no second one


def _tell(run: int, runs: int, event: str, job: Job, outcome: Outcome) -> None:
    value = "" if outcome.seconds is None else f"{outcome.seconds:.2f} s"
    progress(f"run {run + 1} of {runs}  {event:16} {job.peer:17} {value:>8}  (load {os.getloadavg()[0]:.1f})  {outcome.why}")
    if outcome.seconds is None and job.peer == OURS:
        progress(job.story())


# --- the command -------------------------------------------------------------------------------------------------------


def print_phases(results: Results, events: Sequence[str]) -> None:
    """The second table: a line an event, a column a phase."""
    names = (*Phases.names(), "total")
    lines = [["", *names]]
    for event in events:
        cuts = [outcome.phases for outcome in results.outcomes[event, OURS].values() if outcome.phases]
        if cuts:
            lines.append([event, *(f"{statistics.median(getattr(cut, name) for cut in cuts):.3f}" for name in names)])
    if len(lines) == 1:
        return
    print("\nwhere elasticd's time went, medians in s")
    for line in lines:
        print("  ".join([line[0].ljust(16), *(cell.rjust(10) for cell in line[1:])]))


def parse(argv: Sequence[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run, shorter bounds, no default torchrun")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--runs", type=int, help=f"runs of each event (default {RUNS})")
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all, but torchrun with default settings not in --quick")
    parser.add_argument("--defaults", action="store_true", help="torchrun with default settings too; minutes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all logs there, in a new directory")
    options = parser.parse_args(argv)
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} exists already; give a new directory to --keep")
    if options.runs is not None and options.runs < 1:
        parser.error("--runs must be at least 1")
    peers = list(options.peers or [peer for peer in PEERS if peer != ONCE or not options.quick])
    if options.defaults and ONCE not in peers:
        peers.append(ONCE)
    runs = options.runs or (1 if options.quick else RUNS)
    bounds = BOUNDS_QUICK if options.quick else BOUNDS
    return Plan(events=tuple(dict.fromkeys(options.events)), peers=tuple(dict.fromkeys(peers)), runs=runs, bounds=bounds), options


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
            yield Path(folder)
    else:
        keep.mkdir(parents=True)
        yield keep.resolve()


def _interrupt(*_: object) -> NoReturn:
    """Once; the clean-up that follows is not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 130 if interrupted, after printing what there was."""
    plan, options = parse(argv)
    results = Results()
    code = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with _folder(options.keep) as folder:
            run_all(plan, folder, results)
    except KeyboardInterrupt:
        progress("interrupted; what follows is not the whole")
        code = 130
    rows = results.rows(plan.events, plan.peers)
    if rows:
        print_table(rows, title="time from the event to the last rank's first step of the new world")
        print_phases(results, plan.events)
    if options.json and not code:
        write_json(options.json, "recovery", command(), [*rows, *results.phase_rows(plan.events)], notes=NOTES)
    return code


if __name__ == "__main__":
    sys.exit(main())
