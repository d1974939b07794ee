"""What agents are to the machine: units of systemd, or process groups.

Owns: starting, finding, asking and killing them. Must not: remember anything that `agents.Note` does not; the next daemon must find them too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from elasticd.agent.launch import ExecLauncher, WorkerLaunch, worker_environment
from elasticd.daemon.agents import Note, Started
from elasticd.daemon.processes import process_start
from elasticd.errors import ElasticdError, UsageError

if TYPE_CHECKING:
    from elasticd.agent.launch import WorkerSet

UNIT: Final = "elasticd-agent@{}.service"
_UNIT_NAME: Final = re.compile(r"elasticd-agent@([A-Za-z0-9][A-Za-z0-9_.-]{0,127})\.service")
_SYSTEMCTL_SECONDS: Final = 15.0
_LIVING: Final = frozenset({"active", "activating", "reloading", "deactivating"})


class UnitBackend:
    """Agents are `elasticd-agent@JOB.service`. We need not be root: a polkit rule lets our user manage exactly these units."""

    def start(self, job: str, config: Path, log_folder: Path) -> Started:  # noqa: ARG002 - the unit names both
        """See `Backend`."""
        _systemctl("start", UNIT.format(job))
        return Started()

    def pids(self, notes: Mapping[str, Note]) -> dict[str, int]:  # noqa: ARG002 - systemd knows
        """See `Backend`."""
        shown = _systemctl("show", "--property=Id,ActiveState,MainPID", UNIT.format("*"))
        return parse_units(shown)

    def leave(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`. The unit's own stop: SIGTERM to the agent, and SIGKILL for all that is left after TimeoutStopSec."""
        _systemctl("stop", "--no-block", UNIT.format(job))

    def kill(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`."""
        _systemctl("kill", "--signal=SIGKILL", UNIT.format(job))


def parse_units(shown: str) -> dict[str, int]:
    """Job -> main pid of the units that live, from what `systemctl show` prints: blocks of NAME=VALUE, an empty line between."""
    found: dict[str, int] = {}
    for block in shown.split("\n\n"):
        fields = dict(line.partition("=")[::2] for line in block.splitlines())
        name = _UNIT_NAME.fullmatch(fields.get("Id", ""))
        pid = fields.get("MainPID", "0")
        if name and fields.get("ActiveState") in _LIVING and pid.isdigit() and int(pid):
            found[name[1]] = int(pid)
    return found


def systemd_job_of(unit: str) -> str:
    """The job that systemd works on for a unit: "stop", "restart", … or "" if there is none, or systemd cannot be asked."""
    try:
        listed = _systemctl("list-jobs", "--plain", "--no-legend", unit)
    except ElasticdError:
        return ""
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] == unit:
            return fields[2]
    return ""


def _systemctl(*args: str) -> str:
    try:
        done = subprocess.run(
            ["systemctl", "--no-ask-password", "--no-pager", *args],
            env=worker_environment(os.environ, {"LC_ALL": "C"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ElasticdError(f"systemctl {args[0]}: no answer within {_SYSTEMCTL_SECONDS:g} s") from None
    except OSError as error:
        raise ElasticdError(f"cannot run systemctl: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise ElasticdError(f"systemctl {' '.join(args)}: {said}")
    return done.stdout


class ProcessBackend:
    """Agents are processes that lead a session of their own, and outlive this daemon."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, job: str, config: Path, log_folder: Path) -> Started:
        """See `Backend`."""
        with _log_file(log_folder) as stderr:
            try:
                child = subprocess.Popen(
                    _command(config),
                    env=worker_environment(os.environ, {}),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError as error:
                raise ElasticdError(f"cannot start the agent of {job}: {error.strerror}") from None
        self._children.append(child)
        return Started(child.pid, process_start(child.pid) or 0)

    def pids(self, notes: Mapping[str, Note]) -> dict[str, int]:
        """See `Backend`."""
        self._children = [child for child in self._children if child.poll() is None]
        return {job: note.pid for job, note in notes.items() if note.pid and process_start(note.pid) == note.born}

    def leave(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`."""
        _signal(pid, signal.SIGTERM)

    def kill(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`. Its workers die with it (PDEATHSIG)."""
        _signal(pid, signal.SIGKILL)


class ChildBackend:
    """Agents are children that die with this daemon, even by SIGKILL: for runs that are to leave nothing behind."""

    def __init__(self) -> None:
        self._launcher = ExecLauncher()
        self._sets: dict[str, WorkerSet] = {}

    def start(self, job: str, config: Path, log_folder: Path) -> Started:
        """See `Backend`."""
        _log_file(log_folder).close()
        path = log_folder / "agent.stderr"
        launch = WorkerLaunch(local_rank=0, argv=_command(config), env=worker_environment(os.environ, {}), cwd=Path("/"), stdout=path, stderr=path)
        self._sets[job] = self._launcher.start([launch])
        pid = self._sets[job].workers[0].pid
        return Started(pid, process_start(pid) or 0)

    def pids(self, notes: Mapping[str, Note]) -> dict[str, int]:  # noqa: ARG002 - there is none before us
        """See `Backend`."""
        self._sets = {job: one for job, one in self._sets.items() if not one.poll()}
        return {job: one.workers[0].pid for job, one in self._sets.items()}

    def leave(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`."""
        if one := self._sets.get(job):
            one.workers[0].send_signal(signal.SIGTERM)

    def kill(self, job: str, pid: int) -> None:  # noqa: ARG002
        """See `Backend`."""
        if one := self._sets.get(job):
            one.stop(0.0, signal.SIGKILL)


def _command(config: Path) -> tuple[str, ...]:
    # -P: the directory it runs in may hold a logging.py.
    return (sys.executable, "-P", "-m", "elasticd.agent", str(config))


def _log_file(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "agent.stderr").open("ab")
    except OSError as error:
        raise UsageError(f"cannot write logs in {folder}: {error.strerror}") from None


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
