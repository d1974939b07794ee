"""The nodes that a run starts on this machine, each a daemon with scratch state and the agent that it runs.

Owns: their configuration and job files, starting, signalling and reaping them, and making sure that nothing of theirs is left. Must not: decide when.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elasticd.agent.launch import ExecLauncher, WorkerLaunch, WorkerSet, worker_environment
from elasticd.agent.logs import describe_exit
from elasticd.cli.follow import last_lines
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.jobs import JobSpec

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_SWEEP_SECONDS = 5.0
_SAID: Final = ("elasticd-agent: ", "elasticd: ")
_OUTPUTS: Final = ("agent.stderr", "daemon.stderr")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What one node is told. `trainer`: settings of training from the command line."""

    config: DaemonConfig
    spec: JobSpec
    trainer: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the node."""
        assert self.config.node is not None  # a run names its nodes
        return self.config.node

    @property
    def logs(self) -> Path:
        """Where daemon and agent of this node write."""
        return self.config.paths.log_dir / self.spec.name / self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A node that has ended. `said` is the error that it printed, "" if none."""

    node: str
    code: int
    said: str

    def __str__(self) -> str:
        # A node whose agent was killed by signal N ends with 128 + N, as a shell would.
        return self.said or describe_exit(128 - self.code if self.code > 128 else self.code)


class LocalNodes:
    """Started when the constructor returns. A node ends when its agent does.

    Args:
        plans: one each, all of one job.

    Raises:
        UsageError: one cannot be started; none is left then.
    """

    def __init__(self, plans: Sequence[NodePlan]) -> None:
        self.nodes = tuple(plan.name for plan in plans)
        self._seen: set[str] = set()
        self._outputs: dict[str, list[tuple[Path, int]]] = {}
        self._set = ExecLauncher().start([self._launch(number, plan) for number, plan in enumerate(plans)])

    @property
    def alive(self) -> tuple[str, ...]:
        """Nodes that run, as `deaths` last saw it."""
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
        """Until a node ends, one of the descriptors `more` is readable, or `seconds` have passed."""
        poller = select.poll()
        for fd in (*self._set.pidfds(), *more):
            poller.register(fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def deaths(self) -> list[Death]:
        """Nodes that have ended since the last call."""
        found = []
        for number, code in self._set.poll().items():
            node = self.nodes[number]
            if node not in self._seen:
                self._seen.add(node)
                found.append(Death(node=node, code=code, said=self._said(node)))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Signal every node that runs."""
        for worker in self._set.workers:
            worker.send_signal(number)

    def kill(self) -> None:
        """Kill every node, and with it its agent and workers, and wait for their end."""
        self._set.stop(0.0, signal.SIGKILL)

    def _launch(self, number: int, plan: NodePlan) -> WorkerLaunch:
        folder = plan.logs
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make log directory {folder}: {error.strerror}", remedy="give another with --log-dir") from None
        jobs = plan.config.paths.jobs_dir
        jobs.mkdir(mode=0o700, parents=True)
        path = jobs.parent / "elasticd.toml"
        path.write_text(to_toml(plan.config.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        job = jobs / f"{plan.spec.name}.toml"
        job.write_text(to_toml(plan.spec.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        job.chmod(0o600)
        more = [word for name, value in plan.trainer.items() for word in ("--trainer", f"{name}={value}")]
        self._outputs[plan.name] = [(file, file.stat().st_size if file.exists() else 0) for file in (folder / name for name in _OUTPUTS)]
        return WorkerLaunch(
            local_rank=number,
            # -P: the directory it runs in is the user's, and may hold a logging.py.
            argv=(sys.executable, "-P", "-m", "elasticd.daemon", "run", "--config", str(path), "--only", plan.spec.name, *more),
            env=worker_environment(os.environ, {}),
            cwd=plan.spec.cwd,
            stdout=folder / "daemon.stdout",
            stderr=folder / "daemon.stderr",
        )

    def _said(self, node: str) -> str:
        """The agent's last word, else the daemon's."""
        for path, start in self._outputs[node]:
            with suppress(OSError):
                if path.stat().st_size <= start:
                    continue
                said = [line.removeprefix(mark) for line in last_lines(path, 50) for mark in _SAID if line.startswith(mark)]
                if said:
                    return said[-1]
        return ""


def to_toml(document: Mapping[str, Any], table: str = "") -> str:
    """A document of tables, lists, texts, numbers and booleans as TOML."""
    plain = {key: value for key, value in document.items() if not isinstance(value, dict)}
    lines = [f"{_text(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in document.items():
        if isinstance(value, dict):
            name = f"{table}.{_text(key)}" if table else _text(key)
            lines += ["", f"[{name}]", to_toml(value, name)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, which TOML wants escaped and JSON leaves.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
