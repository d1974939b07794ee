"""The jobs that `bench.faults` records: two nodes of two workers on this machine, by `elasticctl run`, and whatever is done to them from outside.

Owns: processes, the control file of the training script, and signals. Must not: know which fault is which, or write labels.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from bench._common import progress

JOB: Final = "train"
WORKERS: Final = 2
NODES: Final = ("node-0", "node-1")
START_WITHIN: Final = 400.0
END_WITHIN: Final = 20.0
_SCRIPT: Final = Path(__file__).with_name("_faults_script.py")
ROOT: Final = _SCRIPT.parents[1]


_MORTAL: Final = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)  # PR_SET_PDEATHSIG, SIGKILL


def mortal(command: list[str]) -> list[str]:
    """The same command, which ends with the thread that starts it, even if that is killed; `elasticctl run` takes all that is its own along."""
    return [sys.executable, "-c", _MORTAL, str(os.getpid()), *command]


class JobFailedError(RuntimeError):
    """It never trained, or ended too early."""


class Job:
    """One of them. Nothing of it is left after `end`.

    Args:
        folder: for everything that it writes; made.
        etcd: its endpoint.
        cluster: no other job there has it.
        seed: of the training.
        settings: of the training.
    """

    def __init__(self, folder: Path, etcd: str, cluster: str, *, seed: int, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._etcd = etcd
        self._cluster = cluster
        self._seed = seed
        self._settings = settings
        self._runs: dict[str, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        self.logs = folder / "logs" / JOB
        self.control = folder / "control.json"
        for made in (folder / "logs", folder / "run", folder / "tmp"):
            made.mkdir(parents=True)
        (folder / "run").chmod(0o700)
        self.tell([])

    def tell(self, faults: list[dict[str, Any]]) -> None:
        """What is wrong from now on, for the training script to do."""
        partial = self.control.with_suffix(".partial")
        partial.write_text(json.dumps({"faults": faults}))
        partial.replace(self.control)

    def start(self, node: str, *, again: bool = False) -> None:
        """Start a node, or start it again."""
        settings = {**self._settings, "checkpoint_dir": str(self._folder / f"checkpoints-{node}")}
        command = [str(Path(sys.executable).with_name("elasticctl")), "run", "--etcd", self._etcd, "--cluster", self._cluster, "--job", JOB]
        command += ["--node", node, "--address", "127.0.0.1", "--nodes", "2", "--max-nodes", "2", "--nproc-per-node", str(WORKERS)]
        command += ["--log-dir", str(self.logs.parent), "--show", "none", "--settle", "4", "--stop-grace", "10", *(["--again"] if again else [])]
        command += [word for name, value in settings.items() for word in ("--trainer", f"{name}={value}")]
        command += ["--", str(_SCRIPT), "--control", str(self.control), "--seed", str(self._seed)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self._folder / "run"), "TMPDIR": str(self._folder / "tmp")}
        with (self._folder / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(mortal(command), cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._runs[node] = process
        self._all.append(process)

    def leave(self, node: str) -> None:
        """Let a node leave in order; see `left`."""
        self._runs[node].send_signal(signal.SIGTERM)  # a bench in the background of a shell has its SIGINT ignored, and so have its children

    def left(self, node: str, within: float) -> None:
        """Wait until it has left.

        Raises:
            JobFailedError: it has not.
        """
        try:
            self._runs.pop(node).wait(within)
        except subprocess.TimeoutExpired:
            raise JobFailedError(f"{node} has not left within {within:g} s\n{self.story()}") from None

    def trains(self, nodes: tuple[str, ...] = NODES, *, since: float = 0.0, within: float = START_WITHIN) -> float:
        """Wait until all ranks of these nodes have told of steps that ended after `since`; seconds since the epoch at which that was so.

        Raises:
            JobFailedError: they have not.
        """
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if self.trained(nodes, since=since):
                return time.time()
            if any(self._runs[node].poll() is not None for node in nodes):
                break
            time.sleep(0.1)
        raise JobFailedError(f"no steps\n{self.story()}")

    def trained(self, nodes: tuple[str, ...] = NODES, *, since: float = 0.0) -> bool:
        """Whether all ranks of these nodes have told of steps that ended after `since`."""
        return all(self._stepped(node, since) for node in nodes)

    def _stepped(self, node: str, since: float) -> bool:
        ranks = set()
        for path in sorted((self.logs / node).glob("generation-*/telemetry.jsonl")):
            if path.stat().st_mtime >= since:
                ranks = {line["local_rank"] for line in _lines(path) if line["event"] == "window" and line["ended"] >= since}
        return len(ranks) == WORKERS

    def worker(self, rank: int) -> tuple[str, int]:
        """(node, pid) of a rank, as the newest generation has it.

        Raises:
            JobFailedError: no agent tells of such a rank.
        """
        found = {}
        for path in self.logs.glob("*/agent.jsonl"):
            for line in _lines(path):
                if line["event"] == "workers_started" and rank in line["ranks"]:
                    found[line["generation"]] = (path.parent.name, line["pids"][line["ranks"].index(rank)])
        if not found:
            raise JobFailedError(f"there is no rank {rank}")
        node, pid = found[max(found)]
        return str(node), int(pid)

    def running(self) -> bool:
        """Whether every node that should runs."""
        return all(process.poll() is None for process in self._runs.values())

    def story(self) -> str:
        """The end of what each node said, for when something went wrong."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self._folder.glob("*.log")))

    def end(self) -> None:
        """Kill what is left of it: an orderly end is not recorded, and who is stopped or starved would take long."""
        below = [child for run in self._all if run.poll() is None for child in _children(run.pid)]
        for run in self._all:
            run.kill()
            run.wait()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(below, timeout=END_WITHIN)


@contextlib.contextmanager
def job(folder: Path, etcd: str, cluster: str, *, seed: int, settings: Mapping[str, str]) -> Iterator[Job]:
    """A job of both nodes that trains, and of which nothing is left afterwards.

    Raises:
        JobFailedError: it does not train.
    """
    made = Job(folder, etcd, cluster, seed=seed, settings=settings)
    try:
        yield made
    except JobFailedError:
        progress(made.story())
        raise
    finally:
        made.end()


def _children(pid: int) -> list[psutil.Process]:
    try:
        below: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return below


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of JSON of a file that may be growing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield json.loads(raw)
