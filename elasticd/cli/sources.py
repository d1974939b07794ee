"""Who tells `logs` and `top`: the daemon of this machine, or, where there is none for it, the files of this user's own runs.

Owns: that choice, and one form of answer for both: the `data` of docs/api.md. Must not: print, or know what an answer means.

The files of a run are its user's, so they are read without asking its daemons, and are there even for a node that has died.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from elasticd.cli.arguments import SOCKET
from elasticd.cli.asking import Document, job_path
from elasticd.daemon.client import ApiClient
from elasticd.errors import AccessDeniedError, DaemonUnavailableError, KVUnavailableError, NotRunningError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from elasticd.cli.registry import RunEntry
    from elasticd.daemon.telemetry import Telemetry

TIMEOUT: Final = 20.0
"""Seconds for each step of a request: the daemon gives slow nodes some time before it answers."""

Value = str | int | None


class Source(Protocol):
    """Answers with the `data` of a JobLogs and of a Telemetry. Both raise an ElasticdError where they cannot."""

    def logs(self, job: str, query: Mapping[str, Value]) -> Document:
        """Lines of a job; `query` as in docs/api.md, what is None is left out."""

    def telemetry(self, job: str | None) -> Document:
        """How nodes and jobs do."""


@dataclass(frozen=True, slots=True)
class DaemonSource:
    """The daemon behind a socket."""

    socket: Path

    def logs(self, job: str, query: Mapping[str, Value]) -> Document:
        """See `Source`."""
        data: Document = ApiClient(self.socket, timeout=TIMEOUT).get(job_path(job, "logs"), **query)["data"]
        return data

    def telemetry(self, job: str | None) -> Document:
        """See `Source`."""
        data: Document = ApiClient(self.socket, timeout=TIMEOUT).get("/v1/telemetry", job=job)["data"]
        return data


@dataclass(slots=True)
class RunsSource:
    """The `elasticctl run`s of this user on this machine."""

    _nodes: dict[Path, Telemetry] = field(default_factory=dict)

    def logs(self, job: str, query: Mapping[str, Value]) -> Document:
        """See `Source`."""
        from elasticd.daemon.joblogs import Wanted, document, read_logs, without_old

        places = dict(one.split(":", 1) for one in str(query.get("after") or "").split(",") if one)
        known = {name: value for name, value in query.items() if name in ("generation", "rank", "stream", "tail", "since") and value is not None}
        wanted: Any = {**known, "follow": query.get("follow") == "true"}
        parts = [
            document(home.name, read_logs(run.log_dir.parent, job, home.name, Wanted(**wanted, after=places.get(home.name, ""))))
            for run, home in _homes(job)
            if query.get("node") in (None, home.name)
        ]
        if not parts:
            raise _none(job)
        without_old(parts, Wanted(**wanted), tuple(places))
        return {"job": job, "node": "", "nodes": parts, "notes": []}

    def telemetry(self, job: str | None) -> Document:
        """See `Source`."""
        from elasticd.daemon.gpureadings import Gpus
        from elasticd.daemon.telemetry import Telemetry

        homes = [home for _, home in _homes(job)]
        if not homes:
            raise _none(job)
        gpus = next((one.gpus for one in self._nodes.values()), None) or Gpus()
        self._nodes = {home: self._nodes.get(home) or Telemetry(home / "run", home.name, gpus) for home in homes}
        parts = [node.own(job) for node in self._nodes.values()]
        for part in parts:
            part["jobs"] = [{**one, "report": one["report"].model_dump(mode="json")} for one in part["jobs"]]
        return {"node": "", "etcd": {"reachable": True, "endpoints": [], "since": None, "problem": ""}, "nodes": parts, "notes": []}


def source_for(job: str | None, socket: Path) -> Source:
    """Who is to be asked about a job, or about all.

    Args:
        job: None: all.
        socket: of a daemon; one that somebody named is asked, whatever comes of it.

    Raises:
        UsageError: the job's name is none.
        ElasticdError: nobody can be asked; why the daemon cannot.
    """
    daemon = DaemonSource(socket)
    if socket != SOCKET:
        return daemon
    try:
        if job is not None and not os.path.lexists(socket) and _runs_here(job):
            return RunsSource()
        ApiClient(socket, timeout=TIMEOUT).get("/v1/status" if job is None else job_path(job))
    except (AccessDeniedError, DaemonUnavailableError, NotRunningError):
        if not _runs_here(job):
            raise
        return RunsSource()
    except KVUnavailableError:
        pass  # it answers, and that is enough
    return daemon


def _runs_here(job: str | None) -> bool:
    return next(_homes(job), None) is not None


def _homes(job: str | None) -> Iterator[tuple[RunEntry, Path]]:
    """The nodes of this user's runs: each has a directory of its name in the run's scratch directory."""
    from elasticd.cli.registry import running

    for run in running():
        if job in (None, run.job):
            for path in sorted(run.scratch.glob("*/elasticd.toml")):
                yield run, path.parent


def _none(job: str | None) -> NotRunningError:
    return NotRunningError(f"job {job!r} does not run here any more" if job else "nothing runs here any more", remedy="its logs stay where they are")
