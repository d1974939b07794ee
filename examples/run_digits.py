"""Train the digits on nodes of this machine through a kill, a join and a drain, and count what that cost: what `make run` shows.

Starts `elasticctl run` with two nodes on counted_digits.py, which writes every sample down where its loss is computed. Once the job is at some step,
one of its workers gets SIGKILL in the midst of it. When the job goes on, a third node joins it, and when three train, that node is drained. At the end
it counts, from what the workers wrote, the steps that were lost and the samples that were trained on twice or not at all. Exits non-zero, and says
why, where any of this did not happen, where a count is not 0, or where the test accuracy is below 0.95.

Why in the midst of a step: who is killed between two steps may leave the others one finished step ahead, and then all begin one step earlier, since a
step done again is cheaper than a state fetched. The samples come out right all the same, but "0 steps lost" would be luck.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SCRIPT = Path(__file__).with_name("counted_digits.py")
EPOCHS = 12
SAMPLES = 1347  # that one trains on: the 1,797 images less the quarter that the test gets
SETTLED = 10  # steps after which a new world is said to train
LEAVINGS = ("result.json", "result.json.partial", "summary.json", "rank-*.pid", "samples-*.jsonl")

T = TypeVar("T")


class DemonstrationError(Exception):
    """The run did not do what this demonstration promises."""


def say(text: str) -> None:
    """Print a line of the demonstration's own, told apart from those of the job."""
    print(f">>> {text}", flush=True)


# --- counting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One forward pass of one worker. `step`: steps done before it; `at`: seconds since the epoch; the rest as counted_digits.py says."""

    generation: int
    world: int
    rank: int
    step: int
    epoch: int
    ids: tuple[int, ...]
    at: float
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What became of the training.

    Attributes:
        steps: that are in the weights.
        generations: of workers that trained.
        lost: steps that a rank had finished, and that were done again.
        repeated, missed: samples that an epoch had more than once, or not at all.
    """

    steps: int
    generations: int
    lost: int
    repeated: int
    missed: int

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, repeated or missed."""
        return not (self.lost or self.repeated or self.missed)

    def __str__(self) -> str:
        return f"{self.lost} steps lost, {self.repeated} samples repeated, {self.missed} missed"


def count(forwards: Iterable[Forward], *, epochs: int = EPOCHS, samples: int = SAMPLES) -> Count:
    """Follow the generations one after the other: what a later one did again replaces what earlier ones had done.

    A rank has finished a step if it began the next one. Who began a step before a change of generation thus loses all steps from the new one's first
    to the one before his; the one that he was at does not count, for nobody can have finished it.
    """
    by_generation: dict[int, dict[int, list[Forward]]] = defaultdict(lambda: defaultdict(list))
    for forward in forwards:
        by_generation[forward.generation][forward.step].append(forward)
    lost = 0
    kept: dict[int, list[Forward]] = {}
    for _, steps in sorted(by_generation.items()):
        first = min(steps)
        lost += max(0, max(kept, default=0) - first)
        kept = {step: done for step, done in kept.items() if step < first} | steps
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for done in kept.values():
        for forward in done:
            seen[forward.epoch].update(forward.ids)
    repeated = sum(times - 1 for epoch in seen.values() for times in epoch.values())
    missed = sum(samples - len(seen[epoch]) for epoch in range(epochs))
    return Count(steps=len(kept), generations=len(by_generation), lost=lost, repeated=repeated, missed=missed)


class Witnesses:
    """What the workers have written so far.

    Args:
        out: where their files are.

    Attributes:
        forwards: every pass of every worker, in no order; `read` adds to it.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._read: dict[Path, int] = {}
        self.forwards: list[Forward] = []

    def read(self) -> None:
        """Take in what is new. A line that is not whole yet, or that a kill cut short, is left where it is."""
        for path in self._out.glob("samples-*.jsonl"):
            pid = int(path.stem.rpartition("-")[2])
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + (len(whole) + 1 if whole else 0)
            self.forwards += [Forward(**line | {"ids": tuple(line["ids"]), "pid": pid}) for line in map(json.loads, whole.splitlines())]

    @property
    def newest(self) -> int:
        """The generation that wrote last, 0 if none did."""
        return max((forward.generation for forward in self.forwards), default=0)

    def latest(self, rank: int) -> Forward | None:
        """The last pass that the newest worker of this rank began."""
        return max((forward for forward in self.forwards if forward.rank == rank), key=lambda forward: (forward.generation, forward.step), default=None)

    def settled(self, *, world: int, after: int) -> list[Forward]:
        """First pass of each rank in the newest generation, once it trains: it is of this many ranks, younger than `after`, and well on its way."""
        newest = self.newest
        of_newest = sorted((forward for forward in self.forwards if forward.generation == newest), key=lambda forward: forward.step)
        firsts = {forward.rank: forward for forward in reversed(of_newest)}
        if newest <= after or len(firsts) != world or of_newest[0].world != world or of_newest[-1].step - of_newest[0].step < SETTLED:
            return []
        return [firsts[rank] for rank in sorted(firsts)]


# --- the job, disturbed --------------------------------------------------------------------------------------------------


def find_elasticctl() -> str:
    """Return the elasticctl beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).with_name("elasticctl")
    found = str(beside) if beside.exists() else shutil.which("elasticctl")
    if found is None:
        raise DemonstrationError("elasticctl is not installed; `make setup` installs it")
    return found


class Elasticctl:
    """An `elasticctl run` that runs.

    Args:
        arguments: what it is given.
        mark: put before each of its lines, which a thread passes on: a process that outlives it may hold the pipe open for ever.
    """

    def __init__(self, arguments: list[str], *, mark: str = "") -> None:
        command = [find_elasticctl(), *arguments]
        say("$ " + shlex.join(command))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
        self._mark = mark
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            print(self._mark + line, end="", flush=True)

    def said(self, pattern: str) -> re.Match[str] | None:
        """The first line, from this pattern on, that it has printed."""
        return next(filter(None, (re.search(pattern, line) for line in list(self._lines))), None)

    def wait(self, seconds: float) -> int | None:
        """Return its exit code when all that it printed is read, None if it goes on for longer."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return code

    def end(self) -> None:
        """Ask it to end if it has not, then make it."""
        for number, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 30)):
            if self.process.poll() is None:
                self.process.send_signal(number)
            if self.wait(patience) is not None:
                return


class Demonstration:
    """The job, and what is done to it.

    Args:
        out: directory for what it leaves behind.
        seconds: how long all of it may take.
    """

    def __init__(self, out: Path, *, seconds: float) -> None:
        self.witnesses = Witnesses(out)
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        arguments = ["run", "--nodes", "2", "--max-nodes", "3", "--min-nodes", "1", "--trainer", "snapshot_every=1"]
        arguments += ["--summary", str(out / "summary.json"), "--", str(SCRIPT), "--out", str(out), "--epochs", str(EPOCHS)]
        self._job = Elasticctl(arguments)
        self._all = [self._job]

    def until(self, condition: Callable[[], T | None], otherwise: str) -> T:
        """Return what the condition gives once that is something, which is to be before any elasticctl ends.

        Raises:
            DemonstrationError: it was not; begins with `otherwise`.
        """
        while True:
            ended = [one.wait(1) for one in self._all if one.process.poll() is not None]
            late = time.monotonic() > self._deadline
            self.witnesses.read()
            if found := condition():
                return found
            if ended or late:
                why = f"elasticctl ended with {ended[0]}" if ended else f"not within {self._seconds:.0f} s"
                raise DemonstrationError(f"{otherwise}: {why}")
            time.sleep(0.02)

    def kill_worker(self, *, rank: int, step: int) -> None:
        """SIGKILL, in the midst of a step; then see that another takes its place."""

        def under_way() -> Forward | None:
            latest = self.witnesses.latest(rank)
            return latest if latest and latest.step >= step else None

        victim = self.until(under_way, f"nobody was killed, rank {rank} did not come to step {step}")
        os.kill(victim.pid, signal.SIGKILL)
        say(f"step {victim.step} is under way: rank {rank}, pid {victim.pid}, is killed with SIGKILL in the midst of it")
        at = time.time()
        firsts = self._settled(2, f"no worker took the place of rank {rank}, pid {victim.pid}", after=victim.generation)
        successor = firsts[rank]
        say(f"rank {rank} is pid {successor.pid} now, and began step {successor.step} {successor.at - at:.1f} s after the kill")

    def join_node(self) -> Elasticctl:
        """Start a third node, with the command that the job printed, and see that three train."""
        command = self.until(lambda: self._job.said(r"joins by: elasticctl (.+)"), "no node joined, as the job did not say how one does")
        at, before = time.time(), self.witnesses.newest
        say("a third node joins, by the command that the job has printed")
        node = Elasticctl(shlex.split(command[1]), mark="  node-2: ")
        self._all.append(node)
        first = self._settled(3, "three nodes never trained together", after=before)[0]
        say(f"three nodes train, from step {first.step} on, {first.at - at:.1f} s after that; those before stopped together after step {first.step - 1}")
        return node

    def drain_node(self, node: Elasticctl) -> None:
        """Let it leave in order, and see that two go on."""
        at, before = time.time(), self.witnesses.newest
        say("that node is drained: SIGTERM to its elasticctl, and it leaves in order")
        self._all.remove(node)
        node.process.terminate()
        first = self._settled(2, "the third node was drained, but no two went on", after=before)[0]
        say(f"two nodes train, from step {first.step} on, {first.at - at:.1f} s after that")
        if node.wait(self._deadline - time.monotonic()) is None or not node.said("left in order"):
            raise DemonstrationError(f"the third node did not leave in order; its exit code is {node.process.poll()}")

    def wait(self) -> None:
        """Until the job is done."""
        code = self._job.wait(self._deadline - time.monotonic())
        if code is None:
            raise DemonstrationError(f"the job was not done after {self._seconds:.0f} s")
        if code != 0:
            raise DemonstrationError(f"elasticctl exited with {code}")
        self.witnesses.read()

    def end(self) -> None:
        """Leave nothing that runs."""
        for one in reversed(self._all):
            one.end()

    def _settled(self, world: int, otherwise: str, *, after: int) -> list[Forward]:
        return self.until(lambda: self.witnesses.settled(world=world, after=after), otherwise)


# --- the end -------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the two files that a run leaves behind."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DemonstrationError(f"the run left no {path}") from None
    assert isinstance(content, dict)
    return content


def check(out: Path, counted: Count, *, accuracy: float) -> None:
    """Compare what the run left behind, and what was counted, with what it promised, and say it."""
    summary, result = read_json(out / "summary.json"), read_json(out / "result.json")
    say(f"result {summary['result']}, test accuracy {result['accuracy']:.4f}")
    say(f"counted: {counted.steps} steps in {counted.generations} generations, {EPOCHS} epochs of {SAMPLES} samples")
    broken = [
        (summary["result"] != "succeeded", f"the result is {summary['result']!r}, not 'succeeded'"),
        (result["accuracy"] < accuracy, f"the test accuracy is {result['accuracy']:.4f}, below {accuracy}"),
        (result["steps"] != counted.steps, f"the job says that it made {result['steps']} steps, and {counted.steps} were counted"),
        (not counted.clean, str(counted)),
    ]
    for is_so, what in broken:
        if is_so:
            raise DemonstrationError(what)


def forget_earlier_run(out: Path) -> None:
    """Remove the files that an earlier run left in `out`, and nothing else: they would be counted."""
    for pattern in LEAVINGS:
        for path in out.glob(pattern):
            path.unlink()


def run(args: argparse.Namespace) -> Count:
    """Start the job, disturb it, count and check."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    forget_earlier_run(out)
    demonstration = Demonstration(out, seconds=args.timeout)
    try:
        demonstration.kill_worker(rank=args.rank, step=args.kill_at)
        node = demonstration.join_node()
        demonstration.drain_node(node)
        demonstration.wait()
    finally:
        demonstration.end()
    counted = count(demonstration.witnesses.forwards)
    check(out, counted, accuracy=args.accuracy)
    return counted


def main() -> int:
    """Read the command line, run, and turn a broken promise into an exit code."""
    parser = argparse.ArgumentParser(description="Run the digits example through a kill, a join and a drain, and count what was lost.")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="directory for what the run leaves behind")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=1, help="whose worker to kill")
    parser.add_argument("--kill-at", type=int, default=40, help="the step to wait for before the kill")
    parser.add_argument("--accuracy", type=float, default=0.95, help="the least test accuracy")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which the job is ended")
    try:
        counted = run(parser.parse_args())
    except DemonstrationError as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"a worker was killed, a node joined and was drained: {counted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
