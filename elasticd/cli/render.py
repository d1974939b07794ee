"""How a job's status looks, for people and for programs.

Owns: the table, the JSON contract and the words for times. Must not: read etcd or derive anything that `job` could.

JSON: `{"apiVersion": "elasticd/v1", "kind": "JobStatus", "revision": N, "data": {...}}`, snake_case, times in RFC 3339 UTC, durations in seconds.
A list has kind JobStatusList, revision null (its jobs may live in different etcds) and data `{"jobs": [{"revision": N, ...}, ...]}`.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from elasticd.cli.job import JobState, NodeState
from elasticd.cli.progress import cause_text, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from elasticd.cli.job import JobStatus, NodeStatus

API_VERSION = "elasticd/v1"
EVENTS_SHOWN = 5

STYLES: dict[str, str] = {
    JobState.TRAINING: "green",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.STOPPED: "yellow",
    JobState.WAITING: "yellow",
    JobState.FORMING: "cyan",
    JobState.RESTARTING: "cyan",
    JobState.STOPPING: "yellow",
    NodeState.FINISHED: "green",
    NodeState.LOST: "bold red",
    NodeState.JOINING: "cyan",
    NodeState.LEAVING: "yellow",
    NodeState.STANDBY: "dim",
    NodeState.ENDED: "dim",
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


def rfc3339(at: float | None) -> str | None:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond. None stays None, and 0 is a clock that nobody read."""
    if not at:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None  # a float in etcd may be anything


# --- for people --------------------------------------------------------------------------------------------------------


def to_screen(status: JobStatus, *, store: Sequence[str], now: float) -> RenderableType:
    """One job on one screen.

    Args:
        status: the job.
        store: where it was read, host:port each.
        now: seconds since the epoch, for ages.
    """
    parts: list[RenderableType] = [_headline(status), _facts(status, store, now)]
    if status.nodes:
        parts += [Text(), _nodes(status.nodes)]
    if status.events:
        parts += [Text(), Text("last events", style="bold"), _events(status)]
    if status.problems:
        parts += [Text(), Text("problems in etcd", style="bold red"), *(Padding(Text(problem), (0, 0, 0, 2)) for problem in status.problems)]
    return Group(*parts)


def jobs_to_screen(statuses: Sequence[JobStatus]) -> RenderableType:
    """Many jobs, a line each."""
    table = _table("job", "state", "generation", "nodes", "world size", "restarts", "why")
    for status in statuses:
        table.add_row(
            status.job,
            state_text(status.state),
            str(status.generation or "-"),
            of_text(status.nodes_training, status.nodes_desired),
            str(status.world_size or "-"),
            of_text(status.restarts_used, status.restarts_max),
            Text(status.why),
        )
    return table


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(str(state), style=STYLES.get(state, ""))


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


def clock_text(at: float) -> str:
    """The time of day here."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def _headline(status: JobStatus) -> Text:
    text = Text.assemble((status.job, "bold"), "  ", state_text(status.state))
    if status.why:
        text.append(f": {status.why}")
    return text


def _facts(status: JobStatus, store: Sequence[str], now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    if status.generation:
        since = f", formed {age_text(now - status.formed_at)} ago" if status.formed_at else ""
        table.add_row("generation", Text(f"{status.generation}: {cause_text(status.cause or '')}{since}"))
    if status.world_size:
        table.add_row("world size", f"{count(status.world_size, 'worker')} on {count(status.nodes_training, 'node')}")
    if status.nodes_desired is not None:
        table.add_row("nodes", f"{status.nodes_desired} wanted, {status.nodes_min} at least, {status.nodes_max} at most")
    table.add_row("restarts", f"{of_text(status.restarts_used, status.restarts_max)} used")
    if status.checkpoint_step is not None:
        table.add_row("checkpoint", f"step {status.checkpoint_step}")
    if status.store:
        table.add_row("store", Text(status.store))
    if status.coordinator:
        table.add_row("coordinator", Text(status.coordinator))
    table.add_row("etcd", Text(f"{', '.join(store)}, revision {status.revision}"))
    return table


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("node", "state", "ranks", "slots", "address", "incarnation")
    for node in nodes:
        table.add_row(Text(node.name), state_text(node.state), ranks_text(node.ranks), str(node.slots), Text(node.address), node.incarnation[:8])
    return table


def _events(status: JobStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for event in status.events[-EVENTS_SHOWN:]:
        table.add_row(f"  {clock_text(event.at)}", Text(f"generation {event.generation} {event.what}: {event.detail}"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column != "why", overflow="fold" if column == "why" else "ellipsis")
    return table
