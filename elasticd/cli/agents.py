"""The agents that a run starts, as processes.

Owns: their configuration files, starting, signalling and reaping them, and making sure that nothing of theirs is left. Must not: decide when.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.agent.config import AgentConfig
from elasticd.agent.launch import ExecLauncher, WorkerLaunch, WorkerSet, worker_environment
from elasticd.agent.logs import describe_exit
from elasticd.cli.follow import last_lines
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_SWEEP_SECONDS = 5.0
_SAID: Final = "elasticd-agent: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """An agent that has ended. `said` is the error it printed, "" if none."""

    node: str
    code: int
    said: str

    def __str__(self) -> str:
        return self.said or describe_exit(self.code)


class Agents:
    """Started when the constructor returns.

    Args:
        configs: one each, all of one job.
        scratch: where their configuration files go; a directory of ours.

    Raises:
        UsageError: one cannot be started; none is left then.
    """

    def __init__(self, configs: Sequence[AgentConfig], scratch: Path) -> None:
        self.nodes = tuple(config.node for config in configs)
        self._seen: set[str] = set()
        self._stderr: dict[str, tuple[Path, int]] = {}
        self._set = ExecLauncher().start([self._launch(number, config, scratch) for number, config in enumerate(configs)])

    @property
    def alive(self) -> tuple[str, ...]:
        """Nodes whose agents run, as `deaths` last saw it."""
        return tuple(self.nodes[number] for number in self._set.alive)

    @property
    def codes(self) -> dict[str, int]:
        """Node -> exit code of those that have ended, as `deaths` last saw it."""
        return {self.nodes[worker.local_rank]: worker.exitcode for worker in self._set.workers if worker.exitcode is not None}

    @property
    def workers(self) -> WorkerSet:
        """The processes, to wait on."""
        return self._set

    def wait(self, seconds: float, *more: int) -> None:
        """Until an agent ends, one of the descriptors `more` is readable, or `seconds` have passed."""
        poller = select.poll()
        for fd in (*self._set.pidfds(), *more):
            poller.register(fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def deaths(self) -> list[Death]:
        """Agents that have ended since the last call."""
        found = []
        for number, code in self._set.poll().items():
            node = self.nodes[number]
            if node not in self._seen:
                self._seen.add(node)
                found.append(Death(node=node, code=code, said=self._said(node)))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Signal every agent that runs."""
        for worker in self._set.workers:
            worker.send_signal(number)

    def kill(self) -> None:
        """Kill every agent, and with it its workers, and wait for their end."""
        self._set.stop(0.0, signal.SIGKILL)

    def _launch(self, number: int, config: AgentConfig, scratch: Path) -> WorkerLaunch:
        folder = config.log_dir / config.job / config.node
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make log directory {folder}: {error.strerror}", remedy="give another with --log-dir") from None
        file = scratch / f"{config.node}.json"
        file.write_text(config.model_dump_json(), encoding="utf-8")
        stderr = folder / "agent.stderr"
        self._stderr[config.node] = (stderr, stderr.stat().st_size if stderr.exists() else 0)
        return WorkerLaunch(
            local_rank=number,
            # -P: the directory it runs in is the user's, and may hold a logging.py.
            argv=(sys.executable, "-P", "-m", "elasticd.agent", str(file)),
            env=worker_environment(os.environ, {}),
            cwd=config.cwd,
            stdout=folder / "agent.stdout",
            stderr=stderr,
        )

    def _said(self, node: str) -> str:
        path, start = self._stderr[node]
        with suppress(OSError):
            if path.stat().st_size <= start:
                return ""
        said = [line.removeprefix(_SAID) for line in last_lines(path, 50) if line.startswith(_SAID)]
        return said[-1] if said else ""


def adopt_orphans() -> frozenset[int]:
    """Let the kernel give us what our agents and their workers leave behind, so that `sweep` finds it.

    Returns:
        the children that this process has already: whoever exec'ed us started them, and `sweep` is to spare them.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return frozenset(_children())


def sweep(spare: Collection[int] = ()) -> int:
    """Kill and reap every child of this process and what those leave behind in turn, but for `spare`. Returns how many it killed.

    Only to be called when all that was started on purpose has been reaped by who started it.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < deadline:
        children = [pid for pid in _children() if pid not in spare]
        if not children:
            break
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    return len(killed)


def _children() -> list[int]:
    me = str(os.getpid())
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                if Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1] == me:
                    found.append(int(entry.name))
    return found
