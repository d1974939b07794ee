"""The agents of this node, across restarts of the daemon.

Owns: the files by which an agent is found again, how many times in a row it ended, and asking it to leave. Must not: decide; `reconcile` does. What
an agent is to the machine (a unit, a process group) is its `Backend`'s business.

Files of a job below `run_dir`, readable by us alone::

    agents/JOB.json   the agent's configuration
    notes/JOB.json    ours: slots, digest, pid, what was asked of it, ends in a row
    results/JOB.json  the agent's last word: code, result, reason
    reports/JOB.json  how the job goes, as the agent says about once a second (`observability.report`); stays when it has ended
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from elasticd.agent.launch import catches
from elasticd.daemon.reconcile import AgentSeen
from elasticd.errors import ElasticdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elasticd.agent.config import AgentConfig

log = structlog.get_logger("elasticd.daemon")

LONG_LIFE: Final = 60.0
"""Seconds after which an agent's end is the first of a new row."""


class Note(BaseModel):
    """What a daemon remembers of an agent it started.

    Attributes:
        pid: of its main process; 0 where the service manager knows it.
        born: start time that goes with the pid, in the kernel's ticks.
        started_at: seconds since the epoch.
        ended: it was seen to have ended.
        ends: bad ends in a row.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    slots: tuple[str, ...] = ()
    digest: str = ""
    pid: int = 0
    born: int = 0
    started_at: float = 0.0
    asked_to_leave: bool = False
    ended: bool = False
    ends: int = 0


class Result(BaseModel):
    """An agent's last word, from its result file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    code: int
    result: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that a backend started: pid 0 if only the service manager knows it."""

    pid: int = 0
    born: int = 0


class Backend(Protocol):
    """What agents are to the machine."""

    def start(self, job: str, config: Path, log_folder: Path) -> Started:
        """Start one.

        Raises:
            ElasticdError: it could not be started.
        """

    def pids(self, notes: Mapping[str, Note]) -> dict[str, int]:
        """Job -> pid of the main process, of those that live; also of agents that no note speaks of."""

    def leave(self, job: str, pid: int) -> None:
        """Ask it to leave its job in order."""

    def kill(self, job: str, pid: int) -> None:
        """End it and its workers at once."""


class Agents:
    """See the module. Used by the loop's thread alone.

    Raises:
        UsageError: the directory cannot be used.
    """

    def __init__(self, run_dir: Path, backend: Backend) -> None:
        folders = (_own_folder(run_dir / name) for name in ("agents", "notes", "results", "reports"))
        self._configs, self._files, self._results, self._reports = folders
        self.backend = backend
        self._notes: dict[str, Note] = {job: note for job in self._jobs() if (note := self._read_note(job))}
        self._ended_at: dict[str, float] = {}
        self._pids: dict[str, int] = {}
        self._fds: dict[str, tuple[int, int]] = {}

    # --- seeing ----------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> dict[str, AgentSeen]:
        """Every agent that runs, and the last that ran of every other job.

        Args:
            now: monotonic seconds.
        """
        self._pids = self.backend.pids(self._notes)
        for job in self._pids.keys() - self._notes.keys():
            log.warning("agent_unknown", job=job, pid=self._pids[job], action="taken over")
            self._write(job, Note(started_at=time.time()))
        for job, note in list(self._notes.items()):
            if job not in self._pids and not note.ended:
                self._note_end(job, note)
            elif job in self._pids and note.ended:  # somebody else started it again
                self._write(job, note.model_copy(update={"ended": False, "asked_to_leave": False, "started_at": time.time()}))
        self._follow_ends()
        return {job: self._seen(job, note, now) for job, note in self._notes.items()}

    @property
    def fds(self) -> Sequence[int]:
        """Descriptors that poll finds readable when an agent has ended."""
        return [fd for _pid, fd in self._fds.values()]

    def code_of(self, job: str) -> int | None:
        """How the last agent of a job ended: its exit code, 137 if it was killed and could say nothing; None if there was none, or it runs."""
        note = self._notes.get(job)
        if note is None or not note.ended:
            return None
        result = self._result(job)
        return result.code if result else 128 + signal.SIGKILL

    @property
    def running(self) -> Mapping[str, int]:
        """Job -> pid, as `look` last saw it."""
        return self._pids

    def _seen(self, job: str, note: Note, now: float) -> AgentSeen:
        if job in self._pids:
            return AgentSeen(running=True, slots=note.slots, digest=note.digest, asked_to_leave=note.asked_to_leave)
        result = self._result(job)
        return AgentSeen(
            running=False,
            digest=note.digest,
            code=result.code if result else None,
            reason=result.reason if result else "",
            ended_at=self._ended_at.setdefault(job, now),
            ends=note.ends,
        )

    def _note_end(self, job: str, note: Note) -> None:
        result = self._result(job)
        bad = result is None or result.code != 0
        ends = (1 if time.time() - note.started_at >= LONG_LIFE else note.ends + 1) if bad else 0
        self._ended_at.pop(job, None)
        self._write(job, note.model_copy(update={"ended": True, "ends": ends, "pid": 0, "born": 0}))
        log.log(
            30 if bad else 20,
            "agent_ended",
            job=job,
            code=result.code if result else None,
            result=result.result if result else "killed",
            reason=result.reason if result else "it left no result",
            in_a_row=ends,
        )

    def _follow_ends(self) -> None:
        """Keep a pidfd of each, so that an end wakes the loop."""
        for job, (pid, fd) in list(self._fds.items()):
            if self._pids.get(job) != pid:
                os.close(fd)
                del self._fds[job]
        for job, pid in self._pids.items():
            if job not in self._fds:
                with suppress(OSError):
                    self._fds[job] = (pid, os.pidfd_open(pid))

    # --- acting ----------------------------------------------------------------------------------------------------------

    def start(self, job: str, config: AgentConfig, *, slots: tuple[str, ...], digest: str) -> None:
        """Start one that does not run.

        Raises:
            ElasticdError: it could not be started; that counts as an end.
        """
        previous = self._notes.get(job, Note())
        for left in (self.result_file(job), self.report_file(job)):
            left.unlink(missing_ok=True)
        note = Note(slots=slots, digest=digest, started_at=time.time(), ends=previous.ends)
        self._ended_at.pop(job, None)
        # On disk before the process is there: a daemon that dies in between finds a note without a process, and tries again.
        self._put(self._configs / f"{job}.json", config.model_dump_json())
        self._write(job, note)
        try:
            started = self.backend.start(job, self._configs / f"{job}.json", config.log_dir / job / config.node)
        except ElasticdError as error:
            self._put(self.result_file(job), json.dumps({"code": error.exit_code, "result": "failed", "reason": str(error)}))
            raise
        self._write(job, note.model_copy(update={"pid": started.pid, "born": started.born}))
        log.info("agent_started", job=job, pid=started.pid or None, slots=list(slots))

    def try_again(self) -> None:
        """Start anew, at the next turn, what has ended for reasons that somebody has seen to."""
        for job, note in list(self._notes.items()):
            if note.ended and (note.digest or note.ends):
                self._write(job, note.model_copy(update={"digest": "", "ends": 0}))

    def leave(self, job: str, why: str) -> None:
        """Ask one to leave in order, once."""
        note, pid = self._notes.get(job), self._pids.get(job)
        if note is None or pid is None:
            return
        self._write(job, note.model_copy(update={"asked_to_leave": True}))
        log.info("agent_asked_to_leave", job=job, pid=pid, why=why)
        self.backend.leave(job, pid)

    def ask_checkpoint(self, job: str) -> None:
        """Pass on that a checkpoint is wanted."""
        if pid := self._pids.get(job):
            _tell(pid, signal.SIGUSR1)

    def reload_certificates(self) -> None:
        """Let every agent read its certificates again."""
        for pid in self._pids.values():
            _tell(pid, signal.SIGHUP)

    def kill(self, job: str) -> None:
        """End one at once, and its workers."""
        if pid := self._pids.get(job):
            self.backend.kill(job, pid)

    def close(self) -> None:
        """Let go of the descriptors; the agents go on."""
        for _pid, fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    # --- files -----------------------------------------------------------------------------------------------------------

    def result_file(self, job: str) -> Path:
        """Where an agent leaves its last word."""
        return self._results / f"{job}.json"

    def report_file(self, job: str) -> Path:
        """Where an agent says how its job goes."""
        return self._reports / f"{job}.json"

    def _jobs(self) -> Iterator[str]:
        for path in self._files.glob("[!.]*.json"):
            yield path.name.removesuffix(".json")

    def _read_note(self, job: str) -> Note | None:
        try:
            return Note.model_validate_json((self._files / f"{job}.json").read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("agent_note_unreadable", job=job, error=str(error).splitlines()[0])
            return None

    def _result(self, job: str) -> Result | None:
        with suppress(OSError, ValidationError):
            return Result.model_validate_json(self.result_file(job).read_bytes())
        return None

    def _write(self, job: str, note: Note) -> None:
        self._notes[job] = note
        self._put(self._files / f"{job}.json", note.model_dump_json())

    def _put(self, path: Path, text: str) -> None:
        """Whole or not at all, also after a crash of ours."""
        temporary = path.with_name(f".{path.name}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)


def _tell(pid: int, number: signal.Signals) -> None:
    """Signal an agent, unless it is so young that it has no handler yet and would die of it: then it has nothing to reload or to pass on."""
    if catches(pid, number):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _own_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.geteuid():
            raise UsageError(f"{path} belongs to another user")
    except OSError as error:
        raise UsageError(f"cannot use {path}: {error.strerror}") from None
    return path
