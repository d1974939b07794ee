"""How a job's status looks, for people and for programs.

Owns: the screens of one job and of many, the JSON contract and the words for times. Must not: read etcd or derive anything that
`rendezvous.status` could.

JSON: `{"apiVersion": "elasticd/v1", "kind": "JobStatus", "revision": N, "data": {...}}`, snake_case, times in RFC 3339 UTC, durations in seconds.
A list has kind JobStatusList, revision null (its jobs may live in different etcds) and data `{"jobs": [{"revision": N, ...}, ...]}`.
Screens are drawn from the `data` of that contract, so that a job looks the same whether it was read in etcd or told by a daemon.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from elasticd.cli.failures import one_line
from elasticd.cli.progress import cause_text, count
from elasticd.observability.times import rfc3339

if TYPE_CHECKING:
    from rich.console import RenderableType

    from elasticd.rendezvous.status import JobStatus

Document = Mapping[str, Any]
"""The `data` of an answer: see docs/api.md."""

API_VERSION = "elasticd/v1"
EVENTS_SHOWN = 5

STYLES: dict[str, str] = {
    # jobs
    "training": "green",
    "succeeded": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "waiting": "yellow",
    "forming": "cyan",
    "restarting": "cyan",
    "stopping": "yellow",
    # members of a job
    "finished": "green",
    "lost": "bold red",
    "joining": "cyan",
    "leaving": "yellow",
    "standby": "dim",
    "ended": "dim",
    # nodes of the cluster
    "ready": "green",
    "cordoned": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "down": "bold red",
}


# --- for programs ------------------------------------------------------------------------------------------------------


def to_json(status: JobStatus, *, store: Sequence[str]) -> str:
    """One job, as one line of JSON. `store` is where it was read, host:port each."""
    data = _data(status, store)
    return _document("JobStatus", data.pop("revision"), data)


def list_to_json(statuses: Sequence[tuple[JobStatus, Sequence[str]]]) -> str:
    """Several jobs with where each was read, as one line of JSON."""
    return _document("JobStatusList", None, {"jobs": [_data(status, store) for status, store in statuses]})


def _document(kind: str, revision: int | None, data: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": API_VERSION, "kind": kind, "revision": revision, "data": data})


def _data(status: JobStatus, store: Sequence[str]) -> dict[str, Any]:
    data = dataclasses.asdict(status)
    data["formed_at"] = rfc3339(status.formed_at)
    data["etcd"] = list(store)
    for event in data["events"]:
        event["at"] = rfc3339(event["at"])
    return data


def seconds(text: str | None) -> float | None:
    """RFC 3339 as seconds since the epoch; None where there is no time, or none that can be read."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError, OSError):
        return None


# --- for people --------------------------------------------------------------------------------------------------------


def to_screen(status: JobStatus, *, store: Sequence[str], now: float) -> RenderableType:
    """One job on one screen.

    Args:
        status: the job.
        store: where it was read, host:port each.
        now: seconds since the epoch, for ages.
    """
    return job_screen(_data(status, store), revision=status.revision, now=now)


def job_screen(job: Document, *, revision: int | None, now: float) -> RenderableType:
    """One job on one screen, from the `data` of its JobStatus.

    Args:
        job: the job.
        revision: etcd's, None where it is not known.
        now: seconds since the epoch, for ages.
    """
    parts: list[RenderableType] = [_headline(job), _facts(job, revision, now)]
    if job.get("nodes"):
        parts += [Text(), _nodes(job["nodes"])]
    if job.get("events"):
        parts += [Text(), Text("last events", style="bold"), _events(job["events"])]
    if job.get("problems"):
        parts += [Text(), Text("problems in etcd", style="bold red"), *(Padding(plain(problem), (0, 0, 0, 2)) for problem in job["problems"])]
    return Group(*parts)


def jobs_to_screen(statuses: Sequence[JobStatus]) -> RenderableType:
    """Many jobs, a line each."""
    return jobs_screen([_data(status, ()) for status in statuses])


def jobs_screen(jobs: Sequence[Document]) -> RenderableType:
    """Many jobs, a line each, from the `data` of their JobStatus."""
    table = table_of("job", "state", "generation", "nodes", "world size", "restarts", "why")
    for job in jobs:
        table.add_row(
            plain(job["job"]),
            job_state(job),
            str(job["generation"] or "-"),
            of_text(job["nodes_training"], job["nodes_desired"]),
            str(job["world_size"] or "-"),
            of_text(job["restarts_used"], job["restarts_max"]),
            plain(_why(job)),
        )
    return table


def _why(job: Document) -> str:
    """Why it is in that state, without what the state says already."""
    why = str(job["why"])
    return why.removeprefix(f"{job['state']}, paused: ") if job.get("paused") else why


def job_state(job: Document) -> Text:
    """A job's state in its colour, and whether it is paused."""
    if job.get("run", True) is None:
        return Text("not started", style="dim")
    text = state_text(job["state"])
    return text.append(", paused", style="yellow") if job.get("paused") else text


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(str(state), style=STYLES.get(state, ""))


def plain(text: object) -> Text:
    """What a user or a worker wrote, shown as it is: neither markup nor what a terminal would take for an order."""
    return Text(one_line(str(text or "")))


def of_text(used: int, most: int | None) -> str:
    """A count and its limit, as "2/10"; the count alone where no limit is known."""
    return f"{used}/{most}" if most is not None else str(used)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks of one node, which are consecutive: "0", "4-7", or "-" for none."""
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def age_text(seconds: float) -> str:
    """A duration in its largest unit that says enough: "8 s", "12 min", "3.5 h", "2.1 d"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def clock_text(at: float | None) -> str:
    """The time of day here."""
    return _local(at, "%H:%M:%S", "--:--:--")


def date_text(at: float | None) -> str:
    """The day and the time of day here."""
    return _local(at, "%Y-%m-%d %H:%M:%S", "-")


def _local(at: float | None, form: str, unknown: str) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime(form) if at is not None else unknown
    except (ValueError, OverflowError, OSError):
        return unknown


def _headline(job: Document) -> Text:
    text = Text.assemble((one_line(job["job"]), "bold"), "  ", job_state(job))
    why = one_line(_why(job))
    return text.append(f": {why}" if why else "")


def _facts(job: Document, revision: int | None, now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _known(job, revision, now):
        table.add_row(name, plain(value))
    return table


def _known(job: Document, revision: int | None, now: float) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if job["generation"]:
        formed = seconds(job["formed_at"])
        since = f", formed {age_text(now - formed)} ago" if formed else ""
        facts.append(("generation", f"{job['generation']}: {cause_text(job['cause'] or '')}{since}"))
    if job["world_size"]:
        facts.append(("world size", f"{count(job['world_size'], 'worker')} on {count(job['nodes_training'], 'node')}"))
    if job["nodes_desired"] is not None:
        facts.append(("nodes", f"{job['nodes_desired']} wanted, {job['nodes_min']} at least, {job['nodes_max']} at most"))
    facts.append(("restarts", f"{of_text(job['restarts_used'], job['restarts_max'])} used"))
    if job["checkpoint_step"] is not None:
        facts.append(("checkpoint", f"step {job['checkpoint_step']}"))
    if job.get("parameters"):
        facts.append(("parameters", ", ".join(f"{name}={value}" for name, value in job["parameters"].items())))
    if job.get("reason") or job.get("by"):
        facts.append(("operator", ": ".join(str(word) for word in (job.get("by"), job.get("reason")) if word)))
    facts += [(name, job[name]) for name in ("store", "coordinator") if job[name]]
    etcd = [", ".join(job.get("etcd") or ()), "" if revision is None else f"revision {revision}"]
    return [*facts, ("etcd", ", ".join(word for word in etcd if word))]


def _nodes(nodes: Sequence[Document]) -> Table:
    table = table_of("node", "state", "ranks", "slots", "address", "incarnation")
    for node in nodes:
        table.add_row(
            plain(node["name"]), state_text(node["state"]), ranks_text(node["ranks"]), str(node["slots"]), plain(node["address"]), node["incarnation"][:8]
        )
    return table


def _events(events: Sequence[Document]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for event in events[-EVENTS_SHOWN:]:
        table.add_row(f"  {clock_text(seconds(event['at']))}", plain(f"generation {event['generation']} {event['what']}: {event['detail']}"))
    return table


def table_of(*columns: str, fold: Sequence[str] = ("why",)) -> Table:
    """An empty table without lines. Columns named in `fold` go on below where they are too long, the others are cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column not in fold, overflow="fold" if column in fold else "ellipsis")
    return table
