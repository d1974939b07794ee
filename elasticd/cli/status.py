"""`elasticctl status` where etcd itself is asked: one job, or all there are.

Owns: which etcd to ask about what. Must not: interpret (`rendezvous.status`) or lay out (`render`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticd.cli.looking import Picture, show
from elasticd.cli.registry import running
from elasticd.cli.render import jobs_to_screen, list_to_json, to_json, to_screen
from elasticd.cli.store import read_job, read_jobs
from elasticd.errors import ElasticdError, NotRunningError
from elasticd.kv import EtcdKV
from elasticd.rendezvous.keys import JobKeys, checked_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from elasticd.cli.options import Store
    from elasticd.rendezvous.status import JobStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusOptions:
    """`elasticctl status`, checked.

    Attributes:
        job: None for all jobs.
        store: None for this user's runs on this machine.
        every: seconds between two looks, None for one look.
        exit_code: exit with 3 unless every job shown is on its way.
    """

    job: str | None
    cluster: str
    store: Store | None
    as_json: bool
    every: float | None
    exit_code: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """An etcd to ask, about one job or about all jobs of a cluster."""

    store: Store
    cluster: str
    job: str | None


def status(options: StatusOptions) -> int:
    """Show the status once, or again and again until interrupted.

    Returns:
        0, or with `exit_code` 3 if a job has ended.

    Raises:
        NotRunningError: there is no such job, or none at all.
        KVError: etcd does not answer, or refuses.
    """
    if options.job is not None:
        checked_name("job", options.job)
    checked_name("cluster", options.cluster)
    shown = show(lambda: _picture(_look(options), options), as_json=options.as_json, every=options.every)
    return 3 if options.exit_code and shown.over else 0


def runs_here(job: str | None) -> bool:
    """Whether an `elasticctl run` of this user runs this job on this machine; None is any job."""
    return any(job in (None, run.job) for run in running())


def _look(options: StatusOptions) -> list[tuple[JobStatus, Sequence[str]]]:
    found: list[tuple[JobStatus, Sequence[str]]] = []
    sources = _sources(options)
    for source in sources:
        try:
            found += [(one, source.store.endpoints) for one in _ask(source)]
        except ElasticdError:
            # One run that is just ending must not hide the others.
            if len(sources) == 1:
                raise
    if not found:
        raise NotRunningError(f"there is no job in cluster {options.cluster!r}" if options.store else "no job runs on this machine", remedy=_remedy(options))
    return found


def _remedy(options: StatusOptions) -> str:
    return "check --cluster" if options.store else "start one with `elasticctl run`, or name another etcd with --etcd"


def _sources(options: StatusOptions) -> list[_Source]:
    if options.store is not None:
        return [_Source(options.store, options.cluster, options.job)]
    runs = [run for run in running() if options.job in (None, run.job)]
    if not runs and options.job is not None:
        raise NotRunningError(f"job {options.job!r} does not run on this machine", remedy="name its etcd with --etcd if it runs elsewhere")
    return list(dict.fromkeys(_Source(run.store, run.cluster, run.job) for run in runs))


def _ask(source: _Source) -> list[JobStatus]:
    with EtcdKV(source.store.kv) as kv:
        if source.job is None:
            return read_jobs(kv, source.cluster)
        return [read_job(kv, JobKeys(source.cluster, source.job))]


def _picture(found: Sequence[tuple[JobStatus, Sequence[str]]], options: StatusOptions) -> Picture:
    return Picture(json=_json(found, options), screen=lambda: _screen(found), over=any(one.state.over for one, _ in found))


def _json(found: Sequence[tuple[JobStatus, Sequence[str]]], options: StatusOptions) -> str:
    if options.job is not None:
        one, endpoints = found[0]
        return to_json(one, store=endpoints)
    return list_to_json(found)


def _screen(found: Sequence[tuple[JobStatus, Sequence[str]]]) -> RenderableType:
    if len(found) == 1:
        one, endpoints = found[0]
        return to_screen(one, store=endpoints, now=time.time())
    return jobs_to_screen([one for one, _ in found])
