"""How `elasticctl top` looks: each job in a few lines, and below it a line for each rank.

Owns: what is derived from several nodes' reports, and which of it fits a screen. Must not: ask for anything, or touch a terminal. Pure.

What a node told last is kept here with its age, since a node that dies does not take what was known of it from the screen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from elasticd.cli.failures import one_line
from elasticd.cli.progress import count
from elasticd.cli.render import Document, age_text, clock_text, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

STALE: Final = 6.0
"""Seconds without a word after which numbers count as old."""
FORGOTTEN: Final = 300.0
"""Seconds for which a node is shown that is not told of any more."""
WIDE: Final = 120
"""Columns from which a rank's line says everything."""
SLOW: Final = 1.1
"""Times the median that a rank's own work must take to be marked."""

_ACTIVITIES: Final = {"training": "green", "repeating": "yellow", "waiting": "yellow", "frozen": "bold red", "stopping": "yellow"}
_NAME_MOST: Final = 20
_STEPPING: Final = ("training", "repeating")
_UNITS: Final = ("B", "K", "M", "G", "T", "P")


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known of a node.

    Attributes:
        part: what it told last, as docs/api.md has it; None if it never did.
        told: when that came here, in seconds of whatever clock the caller has.
        problem: why it does not answer now; "" if it does.
        missed: since when it does not, by the same clock.
    """

    part: Document | None = None
    told: float = 0.0
    problem: str = ""
    missed: float = 0.0


def learn(before: Mapping[str, Known], nodes: Iterable[Document], now: float) -> dict[str, Known]:
    """What is known after an answer: what did not come in it stays as it was, for a while.

    Args:
        before: after the answer before.
        nodes: of this one.
        now: by the caller's clock.
    """
    found = dict(before)
    seen = set()
    for part in nodes:
        name = one_line(str(part["name"]))
        seen.add(name)
        problem = one_line(str(part["problem"]))
        found[name] = _missed(before.get(name, Known()), problem, now) if problem else Known(part=part, told=now)
    for name in found.keys() - seen:
        found[name] = _missed(found[name], "it is gone", now)
    return {name: known for name, known in found.items() if not known.problem or now - max(known.told, known.missed) < FORGOTTEN}


def _missed(known: Known, problem: str, now: float) -> Known:
    return replace(known, problem=problem, missed=known.missed if known.problem else now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One worker. `gpu` is what its machine says of its GPU; `own`: seconds of a step that it does not wait for others."""

    node: str
    rank: int
    report: Document
    gpu: Document | None
    old: float
    own: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, of all nodes.

    Attributes:
        lead: the report that speaks for it: of rank 0's node, else of the newest.
        reports: of every node of its generation.
        ranks: by rank.
        old: seconds since `lead` was written.
        slowest: rank, and how many times the median its own work takes; None if none stands out.
        saved: seconds since the newest checkpoint; None if there is none.
    """

    name: str
    lead: Document
    reports: tuple[Document, ...]
    ranks: tuple[Rank, ...]
    old: float
    slowest: tuple[int, float] | None
    saved: float | None
    clock: float


# --- from reports to jobs ------------------------------------------------------------------------------------------------


def jobs_of(nodes: Mapping[str, Known], now: float) -> list[Job]:
    """All jobs that any node reports, by name."""
    told: dict[str, list[tuple[str, Known, Document]]] = {}
    for name, known in nodes.items():
        for entry in known.part["jobs"] if known.part else ():
            told.setdefault(str(entry["job"]), []).append((name, known, entry))
    return [_job(name, told[name], now) for name in sorted(told)]


def _job(name: str, told: Sequence[tuple[str, Known, Document]], now: float) -> Job:
    newest = max(entry["report"]["generation"] for _, _, entry in told)
    here = [one for one in told if one[2]["report"]["generation"] == newest]
    ages = {node: entry["age"] + now - known.told for node, known, entry in here}
    # Rank 0's node speaks for the job, as long as it speaks.
    node, known, entry = min(here, key=lambda one: (ages[one[0]] > STALE, one[2]["report"]["node_rank"] != 0, ages[one[0]]))
    lead = entry["report"]
    ranks = sorted((rank for one in here for rank in _ranks(*one, ages[one[0]])), key=lambda rank: rank.rank)
    clocks = [(known.part["clock"] + now - known.told, entry["report"]["checkpoint"]["at"]) for _, known, entry in told if known.part]
    saved = min((clock - at for clock, at in clocks if at), default=None)
    assert known.part
    return Job(
        name=name,
        lead=lead,
        reports=tuple(entry["report"] for _, _, entry in here),
        ranks=tuple(ranks),
        old=ages[node],
        slowest=_slowest(lead, [rank for rank in ranks if rank.old <= STALE]),
        saved=saved,
        clock=known.part["clock"] + now - known.told,
    )


def _ranks(node: str, known: Known, entry: Document, old: float) -> list[Rank]:
    gpus = {gpu["index"]: gpu for gpu in known.part["gpus"]} if known.part else {}
    found = []
    for report in entry["report"]["ranks"]:
        local = report["local_rank"]
        index = entry["gpus"][local] if local < len(entry["gpus"]) else None
        own = max(0.0, report["step_seconds"] - report["phases"].get("communication", 0.0))
        found.append(Rank(node=node, rank=report["rank"], report=report, gpu=gpus.get(index), old=old, own=own))
    return found


def _slowest(lead: Document, ranks: Sequence[Rank]) -> tuple[int, float] | None:
    """As rank 0's agent says; else by what the ranks tell themselves."""
    if lead["slowest"]:
        rank, times = lead["slowest"]
        return (int(rank), float(times)) if times >= SLOW else None
    working = [rank for rank in ranks if rank.own > 0]
    if len(working) < 2:
        return None
    slowest = max(working, key=lambda rank: rank.own)
    times = slowest.own / statistics.median(rank.own for rank in working)
    return (slowest.rank, times) if times >= SLOW else None


def pace(job: Job) -> tuple[float | None, float | None]:
    """Steps and samples a second; None where nothing is stepping, or nobody says."""
    steps = [rank.report["step_seconds"] for rank in job.ranks if rank.report["step_seconds"] > 0 and rank.old <= STALE]
    if not steps or job.lead["activity"] not in _STEPPING or job.old > STALE:
        return None, None
    rate = 1 / statistics.median(steps)
    per_step = sum(report["samples"] / report["steps"] for report in job.reports if report["steps"])
    return rate, per_step * rate or None


def goodput(reports: Iterable[Document]) -> float | None:
    """Share of the agents' time in which steps were made that had not been made before."""
    times = [report["seconds"] for report in reports]
    whole = sum(sum(one.values()) for one in times)
    return sum(one.get("training", 0.0) for one in times) / whole if whole > 0 else None


# --- the screen ----------------------------------------------------------------------------------------------------------


def top_screen(nodes: Mapping[str, Known], etcd: Document | None, *, now: float, at: float, size: tuple[int, int], job: str | None = None) -> RenderableType:
    """Everything.

    Args:
        nodes: what is known.
        etcd: how the daemon asked stands to it; None if it was not asked.
        now: by the clock of `nodes`.
        at: seconds since the epoch.
        size: columns and lines; what does not fit is left out, the quickest ranks first.
        job: only this one is wanted.
    """
    width, height = size
    jobs = [one for one in jobs_of(nodes, now) if job in (None, one.name)]
    heads = [_head(one, width) for one in jobs]
    machines = _machines(nodes, now, width)
    used = 3 + sum(len(head) + 2 for head in heads) + len(nodes) + 2
    shares = _shares([len(one.ranks) for one in jobs], max(len(jobs), height - used))
    parts: list[RenderableType] = [_title(nodes, etcd, at)]
    for one, head, share in zip(jobs, heads, shares, strict=True):
        parts += [Text(), *head]
        if one.ranks:
            parts.append(_table(one, share, width))
            parts += [Text(f"and {count(len(one.ranks) - share, 'quicker rank')}", style="dim")] if share < len(one.ranks) else []
    if not jobs:
        parts += [Text(), Text(f"no node reports job {job} now" if job else "no job reports now", style="dim")]
    return Group(*parts, Text(), machines)


def _shares(counts: Sequence[int], room: int) -> list[int]:
    """How many of each job's ranks fit: small jobs whole, and the rest alike."""
    shares = [0] * len(counts)
    left = room
    for done, number in enumerate(sorted(range(len(counts)), key=lambda number: counts[number])):
        shares[number] = min(counts[number], max(1, left // (len(counts) - done))) if counts[number] else 0
        left -= shares[number]
    return shares


def _title(nodes: Mapping[str, Known], etcd: Document | None, at: float) -> Text:
    silent = sum(bool(known.problem) for known in nodes.values())
    text = Text.assemble(("elasticctl top", "bold"), f"  {clock_text(at)}  {len(nodes)} node{'' if len(nodes) == 1 else 's'}")
    if silent:
        text.append(f", {silent} silent", style="bold red")
    if etcd and not etcd["reachable"]:
        since = seconds(etcd.get("since"))
        text.append("  etcd is out of reach", style="bold red").append(f" for {age_text(at - since)}" if since else "")
    return text


def _head(job: Job, width: int) -> list[Text]:
    lead = job.lead
    old = job.old > STALE
    activity = str(lead["activity"])
    first = Text.assemble((one_line(job.name), "bold"), "  ")
    if old:
        first.append(f"silent for {age_text(job.old)}, was {activity}", style="bold red")
    else:
        first.append(activity, style=_ACTIVITIES.get(activity, "cyan"))
    first.append(f"  generation {lead['generation'] or '-'}")
    wanted = f" of {lead['target_nodes']}" if lead["target_nodes"] else ""
    first.append(f"  world {lead['world_size'] or '-'} on {lead['nodes']}{wanted} nodes")
    first.append(f"  restarts {lead['restarts_used']}/{lead['restarts_max']}")
    lines = [first, *_wrapped(_facts(job), width)]
    if lead["problem"]:
        lines.append(Text(f"  {one_line(str(lead['problem']))}", style="yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _facts(job: Job) -> list[Text]:
    lead = job.lead
    steps, samples = pace(job)
    share = goodput(job.reports)
    still = job.clock - lead["stepped_at"] if lead["stepped_at"] else 0.0
    waits = lead["activity"] in _STEPPING and still > max(10.0, 5 / steps if steps else 0.0)
    facts = [Text.assemble(("step ", "dim"), str(lead["step"]), (f" {age_text(still)} ago" if waits else "", "yellow"))]
    facts += [Text.assemble(number(steps), (" steps/s", "dim"))] if steps else []
    facts += [Text.assemble(number(samples), (" samples/s", "dim"))] if samples else []
    facts += [Text.assemble(("loss ", "dim"), number(lead["loss"]))] if lead["loss"] is not None else []
    bad = sum(rank.report["nonfinite"] for rank in job.ranks)
    facts += [Text(f"{bad} not finite", style="bold red")] if bad else []
    facts += [Text.assemble(("grad ", "dim"), number(lead["grad_norm"]))] if lead["grad_norm"] is not None else []
    facts += [Text.assemble(("goodput ", "dim"), f"{share:.1%}")] if share is not None else []
    saved = f"{age_text(job.saved)} ago" if job.saved is not None else "none"
    step = lead["checkpoint"]["committed_step"]
    return [*facts, Text.assemble(("checkpoint ", "dim"), saved, (f" (step {step})" if step else "", "dim"))]


def _wrapped(facts: Sequence[Text], width: int) -> list[Text]:
    """Facts side by side, in as many lines as they need."""
    lines = [Text("  ")]
    for fact in facts:
        if len(lines[-1]) > 2 and len(lines[-1]) + len(fact) > width:
            lines.append(Text("  "))
        lines[-1].append_text(fact).append("  ")
    for line in lines:
        line.rstrip()
    return lines


def _table(job: Job, share: int, width: int) -> Table:
    shown = job.ranks
    if share < len(shown):
        quickest = sorted(shown, key=lambda rank: (rank.old <= STALE, rank.own))[: len(shown) - share] if share else shown
        shown = tuple(rank for rank in shown if rank not in quickest)
    wide, gpus = width >= WIDE, any(rank.gpu for rank in job.ranks)
    columns = [(key, name if wide else short) for key, name, short in _COLUMNS if (wide or short) and (gpus or not key.startswith("gpu"))]
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide or not gpus else 1, 0, 0), header_style="dim")
    for key, name in columns:
        first = key == "node"
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if first else "right", max_width=_NAME_MOST if first else None)
    for rank in shown:
        cells = _cells(rank, job.slowest)
        table.add_row(*(cells[key] for key, _ in columns), style="dim" if rank.old > STALE else "")
    return table


# what it holds, its name where there is room, its name where there is little ("": left out)
_COLUMNS: Final = (
    ("node", "node", "node"),
    ("rank", "rank", "rank"),
    ("step", "step", ""),
    ("time", "step time", "step"),
    ("slow", "slow", "slow"),
    ("data", "data", "data"),
    ("comm", "comm", "comm"),
    ("fwd", "fwd", ""),
    ("bwd", "bwd", ""),
    ("opt", "opt", ""),
    ("snap", "snap", ""),
    ("memory", "memory", "mem"),
    ("loss", "loss", ""),
    ("gpu", "gpu", "gpu"),
    ("gpu util", "gpu util", "util"),
    ("gpu mem", "gpu mem", "gpu mem"),
    ("gpu temp", "gpu temp", "temp"),
)


def _cells(rank: Rank, slowest: tuple[int, float] | None) -> dict[str, Text]:
    report, gpu = rank.report, rank.gpu or {}
    whole = report["step_seconds"]

    def part(name: str) -> Text:
        value = report["phases"].get(name)
        if not whole or value is None:
            return Text("-", style="dim")
        return Text(f"{value / whole:.0%}", style="yellow" if name == "data" and value / whole > 0.2 else "")

    slow = Text(f"{slowest[1]:.1f}x", style="bold yellow") if slowest and slowest[0] == rank.rank else Text()
    memory = report["memory"].get("allocated") or report["memory"].get("rss")
    used, total, util, heat = (gpu.get(name) for name in ("memory_used", "memory_total", "utilization", "temperature"))
    return {
        "node": Text(rank.node),
        "rank": Text(str(rank.rank)),
        "step": Text(str(report["step"])),
        "time": Text(f"silent {age_text(rank.old)}", style="red") if rank.old > STALE else Text(time_text(whole)),
        "slow": slow,
        "data": part("data"),
        "comm": part("communication"),
        "fwd": part("forward"),
        "bwd": part("backward"),
        "opt": part("optimizer"),
        "snap": part("snapshot"),
        "memory": Text(size_text(memory)),
        "loss": Text(number(report["loss"])),
        "gpu": Text(str(gpu["index"]) if gpu else "-"),
        "gpu util": Text("-" if util is None else f"{util:.0%}"),
        "gpu mem": Text(size_text(used) if total is None else f"{size_text(used)}/{size_text(total)}"),
        "gpu temp": Text("-" if heat is None else f"{heat:.0f}°", style="bold red" if gpu.get("throttled") else ""),
    }


def _machines(nodes: Mapping[str, Known], now: float, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in (("node", False), ("load", True), ("cpu", True), ("memory", True), ("", False)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if right else "left", max_width=_NAME_MOST if name == "node" else None)
    for name in sorted(nodes):
        known = nodes[name]
        host: Mapping[str, Any] = (known.part or {}).get("host") or {}
        cpu, total, free = (host.get(key) for key in ("cpu", "memory_total", "memory_available"))
        table.add_row(
            Text(name),
            Text(f"{host['load']:.1f}" if host else "-"),
            Text("-" if cpu is None else f"{cpu:.0%}"),
            Text(f"{size_text(total - free)}/{size_text(total)}" if total is not None and free is not None else "-"),
            _word(known, now, width),
            style="dim" if known.problem else "",
        )
    return table


def _word(known: Known, now: float, width: int) -> Text:
    """Why a node says nothing, and for how long."""
    if not known.problem:
        return Text()
    since = f"silent for {age_text(now - (known.told if known.part else known.missed))}" if known.part else "never answered"
    text = Text(f"{since}: {known.problem}", style="red")
    text.truncate(max(10, width - 30), overflow="ellipsis")
    return text


# --- words ---------------------------------------------------------------------------------------------------------------


def time_text(value: float) -> str:
    """A step's time: "850 µs", "12.3 ms", "120 ms", "1.25 s"; "-" for none."""
    if value <= 0:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.{2 if value < 10 else 1}f} s"


def size_text(value: float | None) -> str:
    """Bytes in the unit that says enough: "512K", "3.2G", "71G"; "-" for none."""
    if value is None:
        return "-"
    size = float(value)
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.{1 if size < 10 and unit != 'B' else 0}f}{unit}"


def number(value: float | None) -> str:
    """A number in four digits or so; "-" for none."""
    if value is None:
        return "-"
    if value == 0 or 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:.2e}" if abs(value) < 0.001 or abs(value) >= 1e7 else f"{value:.0f}"
