"""The same job on this machine under each peer: nodes started, killed and silenced, and everything gone afterwards.

Owns: processes. A node is an agent with all its descendants; it is lost by SIGKILL of all of them at once, for a machine takes its workers along, and
silenced by SIGSTOP: it no longer does or answers anything, and nobody closes its connections.
Must not: measure; `bench.recovery` does, from what the workers log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from bench._recovery_timeline import read_lines

if TYPE_CHECKING:
    from bench._recovery_timeline import Lines, Worker

TTL: Final = 2.0
"""Lease of elasticd and of torchrun over etcd-v3: the shortest that etcd grants."""
TUNED: Final = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
MAX_NODES: Final = 3
MAX_RESTARTS: Final = 50
_SCRIPT: Final = Path(__file__).with_name("_recovery_script.py")
_ROOT: Final = _SCRIPT.parents[1]
_PR_SET_CHILD_SUBREAPER: Final = 36


class Job(ABC):
    """A job of up to three nodes with one worker each, which goes on with one.

    Args:
        folder: for everything that it writes; made.
        etcd: an endpoint, for those who use it.
        name: of the job; no other one on this etcd has it.
    """

    peer: str

    def __init__(self, folder: Path, etcd: str, name: str) -> None:
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self._folder = folder
        self._etcd = etcd
        self._name = name
        self.agents: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def _command(self, index: int) -> list[str]:
        """The agent of one node."""

    def _environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        """Start the agent of another node."""
        index = len(self.agents)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment(), "OUT": str(self.out)}
        with (self._folder / f"agent-{index}.log").open("wb") as log:
            command = self._command(index)
            process = subprocess.Popen(command, cwd=_ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(process)

    def running(self) -> bool:
        """Whether any agent is left."""
        return any(agent.poll() is None for agent in self.agents)

    def logs(self) -> dict[str, Lines]:
        """What the agents logged about their membership; empty for those who do not."""
        return {}

    def story(self) -> str:
        """The end of every agent's output, for when something went wrong."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self._folder.glob("agent-*.log")))


class Elasticd(Job):
    """`python -m elasticd.agent`, as `elasticctl run` starts it."""

    peer = "elasticd"

    def _command(self, index: int) -> list[str]:
        config = {
            "job": self._name,
            "node": f"node-{index}",
            "argv": [sys.executable, str(_SCRIPT)],
            "cwd": str(_ROOT),
            "log_dir": str(self._folder / "logs"),
            "state_dir": str(self._folder / "state"),
            "endpoints": [self._etcd],
            "max_nodes": MAX_NODES,
            "desired": MAX_NODES,
            "max_restarts": MAX_RESTARTS,
            "ttl": TTL,
        }
        path = self._folder / f"node-{index}.json"
        path.write_text(json.dumps(config))
        return [sys.executable, "-m", "elasticd.agent", str(path)]

    def logs(self) -> dict[str, Lines]:
        return {path.parent.name: read_lines(path) for path in self._folder.glob("logs/*/*/agent.jsonl")}


class _Torchrun(Job):
    """Stock torchrun; with --max-restarts, without which the loss of any worker or peer ends it."""

    def _command(self, index: int) -> list[str]:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        sizes = [f"--nnodes=1:{MAX_NODES}", "--nproc-per-node=1", f"--max-restarts={MAX_RESTARTS}", "--local-addr=127.0.0.1"]
        return [torchrun, *sizes, f"--rdzv-id={self._name}", *self._rendezvous(index), str(_SCRIPT)]

    @abstractmethod
    def _rendezvous(self, index: int) -> list[str]:
        """The options that say where and how the agents meet."""


class TorchrunEtcdV3(_Torchrun):
    """Over our rendezvous."""

    peer = "torchrun-etcd-v3"

    def _rendezvous(self, index: int) -> list[str]:  # noqa: ARG002 - all nodes alike
        return ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={self._etcd}", f"--rdzv-conf=ttl={TTL:g},state_dir={self._folder / 'state'}"]


class Torchrun(_Torchrun):
    """Over its own rendezvous, c10d, with default settings. Node 0 hosts it, so that the loss of rank 0's node is the loss of the host."""

    peer = "torchrun"
    conf = ""

    def __init__(self, folder: Path, etcd: str, name: str) -> None:
        super().__init__(folder, etcd, name)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]

    def _rendezvous(self, index: int) -> list[str]:
        conf = ",".join(filter(None, [f"is_host={int(index == 0)}", self.conf]))
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}"]


class TorchrunTuned(Torchrun):
    """The same with short timeouts, and without the shared store, with which a node that joins ends the job (torch 2.13)."""

    peer = "torchrun-tuned"
    conf = TUNED

    def _environment(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


PEERS: Final[dict[str, type[Job]]] = {job.peer: job for job in (Elasticd, TorchrunTuned, TorchrunEtcdV3, Torchrun)}


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that `end_all` finds it: torchrun leaves workers behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(spare: Collection[int], agents: Collection[subprocess.Popen[bytes]] = ()) -> None:
    """SIGKILL and reap every descendant of this process but those to `spare`: what a job started, its `agents`, and what these left behind."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in spare]
        if not left:
            return
        send(left, signal.SIGKILL)
        for agent in agents:
            agent.poll()
        for pid in {process.pid for process in left} - {agent.pid for agent in agents}:
            with contextlib.suppress(ChildProcessError):  # its own parent still has to end
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    raise RuntimeError(f"processes outlive SIGKILL: {left}")


def node_of(job: Job, worker: Worker) -> list[psutil.Process]:
    """The processes of a worker's node: its agent first, then all that descend from it. Takes tens of milliseconds, so look before you time.

    Raises:
        ValueError: no agent of the job started it.
    """
    if worker.parent not in {agent.pid for agent in job.agents}:
        raise ValueError(f"worker {worker.pid} was started by {worker.parent}, which is no agent of {job.peer}")
    agent = psutil.Process(worker.parent)
    return [agent, *agent.children(recursive=True)]


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def job_of(peer: str, folder: Path, etcd: str, spare: Collection[int]) -> Iterator[Job]:
    """A job that is not started yet, and of which nothing is left afterwards."""
    job = PEERS[peer](folder, etcd, folder.name)
    try:
        yield job
    finally:
        end_all(spare, job.agents)
