"""How a cluster looks: its jobs and nodes on one screen, a node by itself, and what happened.

Owns: the screens of what a daemon tells, drawn from the `data` of docs/api.md. Must not: ask for it, or derive what the daemon could.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from elasticd.cli.failures import one_line
from elasticd.cli.progress import count
from elasticd.cli.render import Document, age_text, date_text, jobs_screen, of_text, plain, seconds, state_text, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_QUIET_JOBS = ("idle", "ended", "kept_out")  # of the last, the node's own state and reason say all


def cluster_screen(data: Document, now: float) -> RenderableType:
    """The whole cluster: a line for etcd, one for each job, one for each node, and what is wrong.

    Args:
        data: of a ClusterStatus.
        now: seconds since the epoch, for ages.
    """
    parts: list[RenderableType] = [_cluster_line(data), _etcd_line(data["etcd"], now), Text()]
    if data["jobs"]:
        parts.append(jobs_screen(data["jobs"]))
    elif data["etcd"]["reachable"]:
        parts.append(Text("no job is known", style="dim"))
    if data["nodes"]:
        parts += [Text(), _nodes(data["nodes"], now)]
    problems = [("etcd", problem) for problem in data.get("problems", ())]
    problems += [(job["job"], problem) for job in data["jobs"] for problem in job.get("problems", ())]
    return Group(*parts, *_problems([*problems, *_node_problems(data["nodes"])]))


def nodes_screen(nodes: Sequence[Document], now: float) -> RenderableType:
    """Many nodes, a line each, and what is wrong with them."""
    if not nodes:
        return Text("no node is known", style="dim")
    return Group(_nodes(nodes, now), *_problems(_node_problems(nodes)))


def node_screen(node: Document, now: float) -> RenderableType:
    """One node on one screen."""
    head = Text.assemble((one_line(node["name"]), "bold"), "  ", state_text(node["state"]))
    if why := _word(node, now):
        head.append(f": {one_line(why)}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(node, now):
        facts.add_row(name, plain(value))
    jobs: list[RenderableType] = [Text(), _node_jobs(node["jobs"])] if node.get("jobs") else []
    return Group(head, facts, *jobs, *_problems([(node["name"], problem) for problem in node.get("problems", ())]))


def history_screen(generations: Sequence[Document]) -> RenderableType:
    """What happened to each generation, oldest first."""
    table = table_of("generation", "when", "what", "detail", fold=("detail",))
    for one in generations:
        table.add_row(str(one["number"]), date_text(seconds(one["at"])), state_text(one["what"]), plain(one["detail"]))
    return table


def event_line(event: Document) -> str:
    """One event in one line, as `events` prints it."""
    where = " ".join(str(word) for word in (event.get("job"), event.get("node")) if word) or "-"
    what = f"generation {event['generation']} {event['what']}" if event.get("generation") else str(event["what"])
    by = f" by {event['by']}" if event.get("by") else ""
    detail = f": {event['detail']}" if event.get("detail") else ""
    return one_line(f"{date_text(seconds(event['at']))}  {where}  {what}{by}{detail}")


def _cluster_line(data: Document) -> Text:
    nodes = data["nodes"]
    states = [node["state"] for node in nodes]
    words = [f"{states.count(state)} {state}" for state in dict.fromkeys(("ready", *states)) if state in states]
    text = Text.assemble("cluster ", (one_line(data["cluster"]), "bold"), f"  {count(len(nodes), 'node')}")
    text.append(f": {', '.join(words)}" if words else "")
    return text.append(f"  asked {one_line(data['node'])}, elasticd {one_line(data['version'])}", style="dim")


def _etcd_line(etcd: Document, now: float) -> Text:
    endpoints = one_line(", ".join(etcd["endpoints"]))
    if etcd["reachable"]:
        return Text.assemble("etcd ", ("answers", "green"), (f"  {endpoints}", "dim"))
    since = seconds(etcd.get("since"))
    text = Text.assemble("etcd ", ("is out of reach", "bold red"), f" for {age_text(now - since)}" if since else "", f": {one_line(etcd.get('problem') or '')}")
    return text.append("\nTraining goes on and membership is frozen. Jobs are not shown; below, this node as its daemon knows it.", style="yellow")


def _nodes(nodes: Sequence[Document], now: float) -> Table:
    table = table_of("node", "state", "slots", "gpus", "jobs", "reason", fold=("jobs", "reason"))
    for node in nodes:
        table.add_row(
            plain(node["name"]),
            state_text(node["state"]),
            of_text(node.get("slots_used") or 0, node.get("slots")),
            str(len(node.get("gpus") or ()) or "-"),
            plain(", ".join(_job_words(job) for job in node.get("jobs", ()) if job["state"] not in _QUIET_JOBS) or "-"),
            plain(_word(node, now)),
        )
    return table


def _job_words(job: Document) -> str:
    """A job on a node: its name, and what it does there unless it runs."""
    if job["state"] == "running":
        return str(job["name"])
    why = f": {job['why']}" if job.get("why") else ""
    return f"{job['name']} ({str(job['state']).replace('_', ' ')}{why})"


def _word(node: Document, now: float) -> str:
    """Why a node is as it is: the reason, who gave it and when."""
    at = seconds(node.get("at"))
    by = str(node.get("by") or "").partition(" (")[0]  # a user's name; the audit has the numbers
    who = ", ".join(word for word in (by, f"{age_text(now - at)} ago" if at else "") if word)
    reason = str(node.get("reason") or "")
    return f"{reason} ({who})" if reason and who else reason or who


def _facts(node: Document, now: float) -> list[tuple[str, str]]:
    started = seconds(node.get("started_at"))
    labels = ", ".join(f"{name}={value}" for name, value in (node.get("labels") or {}).items())
    facts: list[tuple[str, Any]] = [
        ("address", node.get("address")),
        ("slots", f"{node.get('slots_used') or 0} of {node['slots']} in use" if node.get("slots") is not None else ""),
        ("gpus", ", ".join(node.get("gpus") or ())),
        ("labels", labels),
        ("elasticd", node.get("version")),
        ("up", age_text(now - started) if started else ""),
        ("boot id", node.get("boot_id")),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _node_jobs(jobs: Sequence[Document]) -> Table:
    table = table_of("job", "state", "slots", "why")
    for job in jobs:
        table.add_row(plain(job["name"]), state_text(str(job["state"]).replace("_", " ")), str(job.get("slots") or "-"), plain(job.get("why")))
    return table


def _node_problems(nodes: Sequence[Document]) -> list[tuple[str, str]]:
    return [(node["name"], problem) for node in nodes for problem in node.get("problems", ())]


def _problems(problems: Sequence[tuple[str, str]]) -> list[RenderableType]:
    if not problems:
        return []
    return [Text(), Text("problems", style="bold red"), *(Padding(plain(f"{whose}: {problem}"), (0, 0, 0, 2)) for whose, problem in problems)]
