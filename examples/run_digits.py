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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from digits_count import EPOCHS, FORWARD_TIME, SAMPLES, Count, Line, Witnesses, count

SCRIPT = Path(__file__).with_name("counted_digits.py")
LEAVINGS = ("result.json", "result.json.partial", "summary.json", "rank-*.pid", "samples-*.jsonl")

T = TypeVar("T")


class DemonstrationError(Exception):
    """The run did not do what this demonstration promises."""


def say(text: str) -> None:
    """Print a line of the demonstration's own, told apart from those of the job."""
    print(f">>> {text}", flush=True)


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
        arguments += [
            "--summary",
            str(out / "summary.json"),
            "--",
            str(SCRIPT),
            "--out",
            str(out),
            "--epochs",
            str(EPOCHS),
            "--forward-time",
            str(FORWARD_TIME),
        ]
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

        def under_way() -> Line | None:
            begun = self.witnesses.begun(rank)
            return begun if begun and begun.step >= step else None

        victim = self.until(under_way, f"nobody was killed, as rank {rank} was not seen in a step after {step}")
        os.kill(victim.pid, signal.SIGKILL)
        at = time.time()
        say(f"{victim.step} steps are done and the next is under way: rank {rank}, pid {victim.pid}, is killed with SIGKILL in the midst of it")
        first = self._trains(2, f"no worker took the place of rank {rank}, pid {victim.pid}", after=victim.generation)[rank]
        say(f"rank {rank} is pid {first.pid} now; {first.at - at:.1f} s after the kill it went on, with {first.step} steps done")

    def join_node(self) -> Elasticctl:
        """Start a third node, with the command that the job printed, and see that three train."""
        command = self.until(lambda: self._job.said(r"joins by: elasticctl (.+)"), "no node joined, as the job did not say how one does")
        say("a third node joins, by the command that the job has printed; the two go on until it is there")
        at = time.time()
        node = Elasticctl(shlex.split(command[1]), mark="  node-2: ")
        self._all.append(node)
        first = self._trains(3, "three nodes never trained together", after=self._generation)[0]
        say(f"three nodes train, {first.at - at:.1f} s later, and went on with {first.step} steps done")
        return node

    def drain_node(self, node: Elasticctl) -> None:
        """Let it leave in order, and see that two go on."""
        say("the third node is drained: its elasticctl gets SIGTERM, and it leaves in order")
        at, before = time.time(), self._generation
        self._all.remove(node)
        node.process.terminate()
        try:
            first = self._trains(2, "the third node was drained, but no two went on", after=before)[0]
            code = node.wait(self._deadline - time.monotonic())
        finally:
            node.end()
        if not node.said("left in order"):
            raise DemonstrationError(f"the third node did not leave in order: its elasticctl ended with {code}")
        say(f"two nodes train, {first.at - at:.1f} s later, and went on with {first.step} steps done")

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

    @property
    def _generation(self) -> int:
        return self.witnesses.newest[0].generation

    def _trains(self, world: int, otherwise: str, *, after: int) -> list[Line]:
        return self.until(lambda: self.witnesses.trains(world, after=after), otherwise)


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
    say(f"counted, from what the workers wrote: {counted.steps} steps by {counted.generations} generations, {EPOCHS} epochs of {SAMPLES} samples")
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
    counted = count(demonstration.witnesses.lines)
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
