"""Run the digits example on two nodes of this machine and kill one of its workers on the way: what `make run` shows.

Starts `elasticctl run`, kills a worker with SIGKILL once the job has written a checkpoint, waits for the end, and then checks what the run
left behind: success, at least two generations, and a test accuracy of 0.95. Exits non-zero, and says why, where one of these is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).with_name("digits.py")
STEP = re.compile(r"step (\d+) loss ")
LEAVINGS = ("checkpoint.pt", "checkpoint.partial", "result.json", "result.json.partial", "summary.json", "rank-*.pid")


class DemonstrationError(Exception):
    """The run did not do what this demonstration promises."""


def say(text: str) -> None:
    """Print a line of the demonstration's own, told apart from those of the job."""
    print(f">>> {text}", flush=True)


def forget_earlier_run(out: Path) -> None:
    """Remove the files that an earlier run left in `out`, and nothing else: a finished checkpoint would end this run at once."""
    for pattern in LEAVINGS:
        for path in out.glob(pattern):
            path.unlink()


def read_pid(out: Path, rank: int) -> int | None:
    """Return the pid that the worker of this rank wrote, None where there is none (yet)."""
    try:
        return int((out / f"rank-{rank}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None


def find_elasticctl() -> str:
    """Return the elasticctl beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).with_name("elasticctl")
    found = str(beside) if beside.exists() else shutil.which("elasticctl")
    if found is None:
        message = "elasticctl is not installed; `make setup` installs it"
        raise DemonstrationError(message)
    return found


def output(job: subprocess.Popen[str], seconds: float) -> Iterator[str]:
    """Yield the job's lines as they come, until it has ended; give up after `seconds`.

    A thread reads them, since a process that outlives the job may hold the pipe open for ever.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            if job.poll() is not None:
                return
            continue
        if line is None:
            return
        yield line
    message = f"the job was not done after {seconds:.0f} s"
    raise DemonstrationError(message)


def follow(lines: Iterator[str], out: Path, *, rank: int, kill_at: int) -> None:
    """Pass the job's output on, kill the worker once a checkpoint exists and step `kill_at` is done, and say when its successor runs."""
    killed: int | None = None
    killed_at = 0.0
    back = False
    for line in lines:
        print(line, end="", flush=True)
        step = STEP.search(line)
        if step is None:
            continue
        pid = read_pid(out, rank)
        if killed is None:
            if pid is not None and int(step[1]) >= kill_at and (out / "checkpoint.pt").exists():
                say(f"step {step[1]} is done: killing the worker of rank {rank}, pid {pid}, with SIGKILL")
                os.kill(pid, signal.SIGKILL)
                killed, killed_at = pid, time.monotonic()
        elif not back and pid != killed:
            back = True
            say(f"rank {rank} is pid {pid} now; it reported its first step {time.monotonic() - killed_at:.1f} s after the kill")
    if killed is None:
        message = f"the job ended before it had reported step {kill_at}: nobody was killed"
        raise DemonstrationError(message)
    if not back:
        message = f"no worker took the place of rank {rank}, pid {killed}"
        raise DemonstrationError(message)


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the two files that a run leaves behind."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        message = f"the run left no {path}"
        raise DemonstrationError(message) from None
    assert isinstance(content, dict)
    return content


def check(out: Path, *, accuracy: float) -> None:
    """Compare what the run left behind with what it promised, and say it."""
    summary, result = read_json(out / "summary.json"), read_json(out / "result.json")
    count = len(summary["generations"])
    say(f"result {summary['result']}, {count} generations, {result['steps']} steps, test accuracy {result['accuracy']:.4f}")
    if summary["result"] != "succeeded":
        message = f"the result is {summary['result']!r}, not 'succeeded'"
        raise DemonstrationError(message)
    if count < 2:
        message = "there was one generation: the killed worker was not replaced in a new one"
        raise DemonstrationError(message)
    if result["accuracy"] < accuracy:
        message = f"the test accuracy is {result['accuracy']:.4f}, below {accuracy}"
        raise DemonstrationError(message)


def finish(job: subprocess.Popen[str]) -> int:
    """Return the exit code of a job whose output has ended; one that goes on regardless is asked to end, then made to."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
        try:
            return job.wait(patience)
        except subprocess.TimeoutExpired:
            job.send_signal(number)
    return job.wait()


def run(args: argparse.Namespace) -> None:
    """Start the job, disturb it, check it."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    forget_earlier_run(out)
    command = [find_elasticctl(), "run", "--nodes", "2", "--min-nodes", "1", "--summary", str(out / "summary.json")]
    command += ["--", str(SCRIPT), "--out", str(out)]
    say("$ " + " ".join(command))
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
    try:
        follow(output(job, args.timeout), out, rank=args.rank, kill_at=args.kill_at)
    finally:
        code = finish(job)
    if code != 0:
        message = f"elasticctl exited with {code}"
        raise DemonstrationError(message)
    check(out, accuracy=args.accuracy)


def main() -> int:
    """Read the command line, run, and turn a broken promise into an exit code."""
    parser = argparse.ArgumentParser(description="Run the digits example on two nodes and kill a worker on the way.")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="directory for what the run leaves behind")
    parser.add_argument("--rank", type=int, default=1, help="whose worker to kill")
    parser.add_argument("--kill-at", type=int, default=100, help="the step to wait for before the kill")
    parser.add_argument("--accuracy", type=float, default=0.95, help="the least test accuracy")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which the job is ended")
    try:
        run(parser.parse_args())
    except DemonstrationError as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    say("a worker was killed, another took its place, and the job reached its goal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
