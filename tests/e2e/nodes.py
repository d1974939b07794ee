"""Real agents with real workers, as nodes that a test may lose, silence and wake.

Owns: agent processes and what they and their workers wrote. A node is an agent's process tree; SIGKILL of the agent is the end of that machine,
for its workers die with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("plain_ddp.py")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


class Nodes:
    """Agents of one job on this machine."""

    def __init__(self, folder: Path, endpoints: list[str], **config: Any) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self._config: dict[str, Any] = {
            "job": "job",
            "argv": [sys.executable, "-u", str(SCRIPT)],
            "cwd": str(ROOT),
            "log_dir": str(folder / "logs"),
            "endpoints": endpoints,
            "max_nodes": 3,
            "desired": 3,
            "ttl": 2.0,
            "settle": 0.5,
            "stop_grace": 5.0,
            "state_dir": str(folder / "state"),
            **config,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, *, environment: dict[str, str] | None = None, program: tuple[str, ...] = ("-m", "elasticd.agent"), **config: Any) -> None:
        """Start an agent; `program` is what Python is to run with the configuration as its argument."""
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps({**self._config, "node": node, **config}))
        env = {**os.environ, "OUT": str(self.out), "OMP_NUM_THREADS": "1", **(environment or {})}
        with (self.folder / f"{node}.err").open("ab") as err:
            self.processes[node] = subprocess.Popen([sys.executable, *program, str(path)], cwd=ROOT, env=env, stdout=err, stderr=err, start_new_session=True)

    def log(self, node: str) -> list[dict[str, Any]]:
        """What its agent logged."""
        path = self.folder / "logs" / self._config["job"] / node / "agent.jsonl"
        return _lines(path)

    def events(self, node: str, name: str) -> list[dict[str, Any]]:
        """The agent's log lines of one kind."""
        return [line for line in self.log(node) if line["event"] == name]

    def workers(self, node: str) -> list[int]:
        """Process ids of the workers it started last."""
        started = self.events(node, "workers_started")
        return list(started[-1]["pids"]) if started else []

    def steps(self) -> list[dict[str, Any]]:
        """Every step that any worker logged, in the order of time."""
        return sorted((line for path in self.out.glob("steps-*.jsonl") for line in _lines(path)), key=lambda line: line["at"])

    def stepping(self, world: int, *, after: float, within: float = 60.0) -> float:
        """Wait until every rank of a world of this size has stepped; seconds from `after` to the last rank's first step."""

        def seen() -> float | None:
            first: dict[int, float] = {}
            for line in self.steps():
                if line["world"] == world and line["at"] > after:
                    first.setdefault(line["rank"], line["at"])
            return max(first.values()) - after if len(first) == world else None

        return await_(seen, within=within, what=f"a world of {world} stepping\n{self.story()}") or 0.0

    def kill(self, node: str) -> None:
        """That machine is gone."""
        process = self.processes[node]
        process.kill()
        process.wait()

    def silence(self, node: str) -> list[int]:
        """SIGSTOP its whole tree; what to give to `wake`."""
        pids = [self.processes[node].pid, *self.workers(node)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def wake(self, pids: list[int]) -> None:
        """SIGCONT what `silence` stopped."""
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)

    def wait(self, node: str, within: float = 60.0) -> int:
        """Its exit code."""
        return self.processes[node].wait(timeout=within)

    def await_(self, condition: Callable[[], Any], what: str, within: float = 30.0) -> Any:
        """Wait for something, and tell the story if it does not come."""
        try:
            return await_(condition, within=within, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        """The last lines of every agent, for a failing test."""
        parts = []
        for node in self.processes:
            lines = [json.dumps({key: value for key, value in line.items() if key not in {"level", "node"}}) for line in self.log(node)[-12:]]
            errors = (self.folder / f"{node}.err").read_text(errors="replace")[-1500:]
            parts.append(f"--- {node}\n" + "\n".join(lines) + f"\n{errors}")
        return "\n".join(parts)

    def close(self) -> None:
        """End everything; check that no worker outlives its agent."""
        workers = [pid for node in self.processes for line in self.events(node, "workers_started") for pid in line["pids"]]
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.wait()
        for pid in workers:
            await_(lambda pid=pid: not alive(pid), within=5, what=f"the end of worker {pid}")

    def never_two_worlds(self, *, woken: int | None = None) -> None:
        """Assert that no worker of an older generation stepped after a newer one had begun to.

        A `woken` worker may log once: the step whose collective was over before it was stopped.
        """
        begun = 0
        for line in self.steps():
            if line["pid"] == woken and line["restarts"] < begun:
                woken = None
                continue
            assert line["restarts"] >= begun, f"generation of restart {line['restarts']} stepped after that of {begun}: {line}"
            begun = max(begun, line["restarts"])


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def now() -> float:
    """The clock of the step logs."""
    return time.time()
