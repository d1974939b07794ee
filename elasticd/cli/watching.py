"""The verbs that only look: status, history, events, version.

Owns: what each asks of the daemon, and how long it goes on asking. Must not: lay out (`render`, `render_cluster`), or read etcd (`status` does).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticd import __version__
from elasticd.cli.asking import Document, Manner, job_path, put
from elasticd.cli.failures import say
from elasticd.cli.looking import Picture, show
from elasticd.cli.waiting import OVER
from elasticd.errors import AccessDeniedError, DaemonUnavailableError, ElasticdError, KVUnavailableError
from elasticd.rendezvous.keys import checked_name

if TYPE_CHECKING:
    from rich.console import RenderableType

    from elasticd.daemon.client import ApiClient

FOLLOW_EVERY: Final = 1.0
"""Seconds between two questions of `events --follow`."""
_VERSION_TIMEOUT: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """How `status` is to look.

    Attributes:
        every: seconds between two looks, None for one look.
        exit_code: exit with 3 if a job shown has ended.
    """

    every: float | None
    exit_code: bool


# --- status ------------------------------------------------------------------------------------------------------------


def status(job: str | None, watch: Watch, manner: Manner) -> int:
    """Show one job, or the whole cluster, as the daemon tells it.

    Returns:
        0, or with `exit_code` 3 if a job has ended.

    Raises:
        NotRunningError: there is no such job.
        KVUnavailableError: etcd is out of reach; what is known without it has been shown.
        ElasticdError: the daemon does not answer, or refuses.
    """
    shown = show(lambda: look(job, manner), as_json=manner.as_json, every=watch.every)
    return 3 if watch.exit_code and shown.over else 0


def look(job: str | None, manner: Manner) -> Picture:
    """One job, or the whole cluster, as it is now.

    Raises:
        ElasticdError: as `status`, but for an etcd out of reach.
    """
    client = manner.client()
    return _cluster(client) if job is None else _job(client, job)


def _over(job: Document) -> bool:
    """Whether it has ended; one that nobody ever started has not."""
    return job["state"] in OVER and job.get("run", True) is not None


def _job(client: ApiClient, job: str) -> Picture:
    envelope = client.get(job_path(job))
    data, revision = envelope["data"], envelope.get("revision")

    def screen() -> RenderableType:
        from elasticd.cli.render import job_screen

        return job_screen(data, revision=revision, now=time.time())

    return Picture(json=json.dumps(envelope), screen=screen, over=_over(data))


def _cluster(client: ApiClient) -> Picture:
    envelope = client.get("/v1/status")
    data = envelope["data"]

    def screen() -> RenderableType:
        from elasticd.cli.render_cluster import cluster_screen

        return cluster_screen(data, time.time())

    etcd = data["etcd"]
    problem = None if etcd["reachable"] else KVUnavailableError(f"etcd is out of reach: {etcd.get('problem') or 'it does not answer'}")
    return Picture(json=json.dumps(envelope), screen=screen, over=any(map(_over, data["jobs"])), problem=problem)


# --- history and events ------------------------------------------------------------------------------------------------


def history(job: str, number: int | None, manner: Manner, *, lines: bool) -> None:
    """What happened to each generation of a job, oldest first.

    Args:
        job: its name.
        number: only the last so many entries.
        manner: how to ask and to answer.
        lines: one JSON object for each entry instead of one for all.
    """
    envelope = manner.client().get(job_path(job, "history"))
    generations = _last(envelope["data"]["generations"], number)
    if lines:
        _put_lines(generations)
    elif manner.as_json:
        put({**envelope, "data": {**envelope["data"], "generations": generations}})
    else:
        from elasticd.cli.looking import console
        from elasticd.cli.render_cluster import history_screen

        console().print(history_screen(generations))


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which events are wanted; None for all.

    Attributes:
        number: only the last so many, of those that have happened already.
    """

    job: str | None = None
    node: str | None = None
    number: int | None = None

    def check(self) -> None:
        """Refuse what can be no name.

        Raises:
            UsageError: names the one at fault.
        """
        for kind, name in (("job", self.job), ("node", self.node)):
            if name is not None:
                checked_name(kind, name)


def events(wanted: Filter, manner: Manner, *, lines: bool, follow: bool) -> None:
    """What happened in the cluster, oldest first; with `follow` also what will, until somebody interrupts.

    Args:
        wanted: which.
        manner: how to ask and to answer.
        lines: one JSON object for each event instead of one for all.
        follow: go on. A daemon that does not answer meanwhile is told of on stderr, once, and waited for.
    """
    wanted.check()
    client = manner.client()
    envelope = client.get("/v1/events", job=wanted.job, node=wanted.node)
    data = envelope["data"]
    found = _last(data["events"], wanted.number)
    if manner.as_json and not (lines or follow):
        put({**envelope, "data": {**data, "events": found}})
        return
    as_json = lines or manner.as_json
    _put_events(found, as_json=as_json)
    if follow:
        _follow(client, wanted, data.get("last"), as_json=as_json)


def _follow(client: ApiClient, wanted: Filter, last: Any, *, as_json: bool) -> None:
    away = False
    while True:
        time.sleep(FOLLOW_EVERY)
        try:
            data = client.get("/v1/events", job=wanted.job, node=wanted.node, after=last)["data"]
        except (DaemonUnavailableError, KVUnavailableError) as error:
            if not away:
                say(error, as_json=as_json)
            away = True
            continue
        away, last = False, data.get("last", last)
        _put_events(data["events"], as_json=as_json)


def _put_events(found: Sequence[Document], *, as_json: bool) -> None:
    if as_json:
        _put_lines(found)
        return
    from elasticd.cli.render_cluster import event_line

    for event in found:
        print(event_line(event), flush=True)


def _put_lines(documents: Sequence[Document]) -> None:
    for document in documents:
        print(json.dumps(document), flush=True)


def _last(items: Sequence[Document], number: int | None) -> list[Document]:
    return list(items if number is None else items[len(items) - min(number, len(items)) :])


# --- version -----------------------------------------------------------------------------------------------------------


def version(manner: Manner, *, named: bool) -> None:
    """This command's version, and the daemon's if one answers.

    Args:
        manner: how to ask and to answer.
        named: somebody said which daemon, and is told if it does not answer.
    """
    told: Document = {}
    try:
        told = manner.client(timeout=_VERSION_TIMEOUT).get("/v1/status")["data"]
    except AccessDeniedError as error:
        say(error, as_json=manner.as_json)
    except ElasticdError as error:
        if named:
            say(error, as_json=manner.as_json)
    if manner.as_json:
        data = {"client": __version__, "daemon": told.get("version"), "node": told.get("node")}
        put({"apiVersion": "elasticd/v1", "kind": "Version", "revision": None, "data": data})
        return
    print(f"elasticctl {__version__}")
    if told:
        print(f"elasticd {told['version']} on {told['node']}")
    sys.stdout.flush()
