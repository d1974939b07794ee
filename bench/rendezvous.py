"""How the rendezvous grows: 10, 100 and 1,000 members, as `python -m bench.rendezvous [--quick] [--json FILE] [--sizes 10,100,1000]`.

Real `Member`s (no torch) in a few client processes form one generation over one real etcd; then one joins, and is lost with its process. Workers
are faked: they stop at once. Times are on the clock that all processes of this machine share, imports excluded.

    form_N          from the word to go until every member has its assignment: connections, leases and registration included
    registered_N    of that, until the last member is registered
    seen_N          from the generation's appearance in etcd, as a watch of this process sees it, until every member has its assignment
    join_N, loss_N  from the newcomer's start, or the SIGKILL of its process, until each member of the next generation has its assignment
    ..._per_member  requests (keepalives and answers to watches excepted), KiB of messages both ways, writes to the store, processor time

All members share this machine's cores, and etcd with them: what a thousand machines do at the same time is done one after the other here, so
that form_1000 and seen_1000 are bounds from above. The processor times say how much of it is whose.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from bench._common import Row, command, print_table, progress, write_json
from bench._rendezvous_cluster import BenchError, Cluster, Usage
from elasticd.kv import find_etcd

if TYPE_CHECKING:
    from collections.abc import Sequence

TTL: Final = 10.0
SHORT_TTL: Final = 2.0
CROWDED: Final = 500
CROWDED_TTL: Final = 30.0
"""From so many members on, the lease is longer: hundreds that share a core are late with everything, and not dead."""
CHANGES: Final = ("form", "join", "loss")
TARGETS: Final = {
    "form_1000": 5.0,
    "seen_1000": 1.0,
    "idle_requests_per_node_s": 3 / TTL + 0.1,
    "idle_requests_per_node_s_ttl_2": 3 / SHORT_TTL + 0.1,
    "outage_cpu_percent": 2.0,
}
WRITES: Final = 2.0
"""Writes of a member in a generation at most, in any of the changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured. Seconds for `idle` and `outage`."""

    sizes: tuple[int, ...]
    processes: int
    runs: int
    idle: float
    outage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one change took of all `members` of a job, or an idle while."""

    members: int
    seconds: float
    requests: int
    keepalives: int
    bytes: int
    writes: int
    etcd_cpu: float
    members_cpu: float

    @classmethod
    def between(cls, before: Usage, after: Usage, members: int) -> Cost:
        """From the counters."""
        return cls(
            members=members,
            seconds=after.at - before.at,
            requests=after.requests - before.requests,
            keepalives=after.keepalives - before.keepalives,
            bytes=after.bytes - before.bytes,
            writes=after.writes - before.writes,
            etcd_cpu=after.etcd_cpu - before.etcd_cpu,
            members_cpu=after.members_cpu - before.members_cpu,
        )


@dataclass(slots=True)
class Found:
    """What one size brought: seconds by name, costs by change, and what went wrong."""

    size: int
    times: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    holds: str = ""
    trouble: str = ""


# --- measuring ---------------------------------------------------------------------------------------------------------------


def measure(size: int, plan: Plan) -> Found:
    """Form, join and lose, a few times."""
    found = Found(size=size)
    for run in range(plan.runs):
        progress(f"{size} members, run {run + 1} of {plan.runs}")
        try:
            with Cluster(size=size, ttl=CROWDED_TTL if size >= CROWDED else TTL) as cluster:
                _one_run(cluster, plan, found, last=run + 1 == plan.runs)
        except BenchError as error:
            progress(f"  {error}")
            found.trouble = str(error)
            _never(found)
            break
    return found


def _never(found: Found) -> None:
    """What a run that broke off did not reach counts as never; further runs would only take as long."""
    most = max((len(times) for times in found.times.values()), default=0) or 1
    for name in ("registered", "form", "seen", "join", "loss"):
        found.times[name] += [None] * (most - len(found.times[name]))


def _one_run(cluster: Cluster, plan: Plan, found: Found, *, last: bool) -> None:
    size = cluster.size
    within = 30.0 + 0.15 * size
    workers = cluster.add_all(plan.processes)
    before = cluster.usage()
    start = cluster.go(*workers)
    number = cluster.await_formed(size, within=within)
    found.times["form"].append(cluster.last_assigned(number) - start)
    found.times["registered"].append(max(cluster.heard.registered.values()) - start)
    found.times["seen"].append(cluster.last_assigned(number) - cluster.heard.seen[number])
    after = cluster.usage()
    found.costs["form"].append(Cost.between(before, after, size))
    found.holds = f"clients hold {after.threads / size:.1f} threads and {after.files / size:.1f} files a member"
    if last:
        found.costs["idle"].append(_idle(cluster, plan.idle))
    cluster.resize(min_nodes=1, desired=size + 1)
    _join_and_lose(cluster, found, number, within)


def _join_and_lose(cluster: Cluster, found: Found, number: int, within: float) -> None:
    size = cluster.size
    stayers = cluster.workers
    newcomer = cluster.add(size, 1)
    cluster.await_ready(newcomer)
    before = cluster.usage()
    start = cluster.go(newcomer)
    number = cluster.await_formed(size + 1, above=number, within=within)
    found.times["join"].append(cluster.last_assigned(number) - start)
    found.costs["join"].append(Cost.between(before, cluster.usage(), size + 1))
    time.sleep(2.0)  # until its neighbours have made friends with it
    before = cluster.usage(stayers)
    start = cluster.kill(newcomer)
    number = cluster.await_formed(size, above=number, within=within)
    found.times["loss"].append(cluster.last_assigned(number) - start)
    found.costs["loss"].append(Cost.between(before, cluster.usage(), size))


def _idle(cluster: Cluster, seconds: float) -> Cost:
    time.sleep(1.0)
    before = cluster.usage()
    time.sleep(seconds)
    return Cost.between(before, cluster.usage(), cluster.size)


def idle_at(ttl: float, plan: Plan) -> Cost:
    """What a small job takes of etcd while nothing happens."""
    progress(f"idle at a TTL of {ttl:g} s")
    size = min(plan.sizes)
    with Cluster(size=size, ttl=ttl) as cluster:
        cluster.go(*cluster.add_all(plan.processes))
        cluster.await_formed(size, within=60.0)
        return _idle(cluster, plan.idle)


def outage_cpu(seconds: float) -> float:
    """Per cent of a core that an agent's membership takes while it trains on without etcd."""
    progress("outage of etcd")
    with Cluster(size=1, ttl=TTL) as cluster:
        (worker,) = cluster.add_all(1)
        cluster.go(worker)
        cluster.await_formed(1, within=60.0)
        cluster.kill_etcd()
        used, start = cluster.cpu(worker)
        time.sleep(seconds)
        used_then, end = cluster.cpu(worker)
    return 100 * (used_then - used) / (end - start)


# --- telling -----------------------------------------------------------------------------------------------------------------


def rows_of(found: Found) -> list[Row]:
    """Times and costs of one size."""
    rows = [_timed(name, found) for name in ("form", "registered", "seen", "join", "loss")]
    for change in CHANGES:
        costs = found.costs[change]
        if costs:
            rows += _cost_rows(change, found.size, costs)
    return rows


def _timed(name: str, found: Found) -> Row:
    row = Row.of(f"{name}_{found.size}", "elasticd", found.times[name])
    note = found.trouble if row.median is None or row.max is None else found.holds if name == "form" else ""
    return judged(row, note=note)


def _cost_rows(change: str, size: int, costs: Sequence[Cost]) -> list[Row]:
    def row(what: str, unit: str, values: list[float]) -> Row:
        return Row.of(f"{change}_{what}_per_member_{size}", "elasticd", values, unit=unit)

    return [
        row("requests", "", [cost.requests / cost.members for cost in costs]),
        row("kib", "KiB", [cost.bytes / cost.members / 1024 for cost in costs]),
        judged(row("writes", "", [cost.writes / cost.members for cost in costs]), WRITES),
        row("etcd_cpu_ms", "ms", [1e3 * cost.etcd_cpu / cost.members for cost in costs]),
        row("client_cpu_ms", "ms", [1e3 * cost.members_cpu / cost.members for cost in costs]),
    ]


def idle_rows(cost: Cost, suffix: str = "") -> list[Row]:
    """Idle load of one lease."""
    total = (cost.requests + cost.keepalives) / cost.seconds / cost.members
    others = cost.requests / cost.seconds / cost.members
    note = f"of these {total - others:.3f} keepalives; over {cost.seconds:.0f} s"
    return [
        judged(Row.of(f"idle_requests_per_node_s{suffix}", "elasticd", [total], unit="1/s"), note=note),
        Row.of(f"idle_other_requests_per_node_s{suffix}", "elasticd", [others], unit="1/s"),
    ]


def judged(row: Row, limit: float | None = None, *, note: str = "") -> Row:
    """With a note whether its target is met, if it has one."""
    limit = TARGETS.get(row.name, limit)
    if limit is None:
        return row.noted(note)
    met = row.median is not None and row.median <= limit
    verdict = f"target <= {limit:.3g} {row.unit}".rstrip() + (": met" if met else ": MISSED")
    return row.noted(f"{verdict}; {note}" if note else verdict)


def growth_rows(all_found: Sequence[Found]) -> list[Row]:
    """How totals grow from each size to the next: the exponent of the job's size, 1 where a member costs the same in any job."""
    rows = []
    for change in (*CHANGES, "idle"):
        known = [(found.size, found.costs[change][0]) for found in all_found if found.costs[change]]
        for (small, cheap), (large, dear) in itertools.pairwise(known):
            for what, before, after in (("requests", cheap.requests, dear.requests), ("bytes", cheap.bytes, dear.bytes)):
                if before > 0 and after > 0:
                    exponent = math.log(after / before) / math.log(large / small)
                    rows.append(Row.of(f"{change}_{what}_growth_{small}_to_{large}", "elasticd", [exponent], unit="exponent"))
    return rows


def print_growth(all_found: Sequence[Found]) -> None:
    """Totals and shares side by side."""
    print("\nGrowth: all members together, and each")
    print(f"{'':8}{'members':>9}{'requests':>10}{'each':>9}{'MiB':>10}{'KiB each':>10}{'writes each':>13}")
    for change in (*CHANGES, "idle"):
        for found in all_found:
            for cost in found.costs[change][:1]:
                counts = f"{cost.members:>9}{cost.requests:>10}{cost.requests / cost.members:>9.2f}"
                sizes = f"{cost.bytes / 2**20:>10.2f}{cost.bytes / cost.members / 1024:>10.2f}{cost.writes / cost.members:>13.2f}"
                print(f"{change:8}{counts}{sizes}" + (f"   in {cost.seconds:.0f} s" if change == "idle" else ""))


def run(plan: Plan) -> tuple[list[Row], list[Found]]:
    """Everything, smallest first."""
    all_found = [measure(size, plan) for size in sorted(plan.sizes)]
    rows = [row for found in all_found for row in rows_of(found)]
    rows += idle_rows(idle_at(TTL, plan)) + idle_rows(idle_at(SHORT_TTL, plan), "_ttl_2")
    for found in all_found:
        rows += [
            Row.of(f"idle_bytes_per_member_s_{found.size}", "elasticd", [cost.bytes / cost.seconds / cost.members], unit="B/s") for cost in found.costs["idle"]
        ]
    rows.append(judged(Row.of("outage_cpu_percent", "elasticd", [outage_cpu(plan.outage)], unit="%")))
    return rows + growth_rows(all_found), all_found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rendezvous", description="How the rendezvous grows with the number of members.")
    parser.add_argument("--quick", action="store_true", help="one run of each, short waits, no 1,000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--sizes", type=_sizes, help="members, separated by commas (10,100,1000; 10,100 if quick)")
    parser.add_argument("--processes", type=int, default=8, help="client processes that share them (%(default)s, and one for each 64 members)")
    parser.add_argument("--runs", type=int, help="of each size (3; 1 if quick)")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # that etcd goes away is part of it
    plan = Plan(
        sizes=given.sizes or ((10, 100) if given.quick else (10, 100, 1000)),
        processes=given.processes,
        runs=given.runs or (1 if given.quick else 3),
        idle=5.0 if given.quick else 30.0,  # each member looks every 15 s
        outage=4.0 if given.quick else 15.0,
    )
    rows, all_found = run(plan)
    ttls = f"TTL {TTL:g} s ({CROWDED_TTL:g} s from {CROWDED} members on) unless the name says otherwise"
    etcd = f"one etcd {find_etcd().version}, {plan.processes} client processes or more, {ttls}"
    print_table(rows, title=f"rendezvous: {etcd}")
    print_growth(all_found)
    if given.json:
        write_json(given.json, "rendezvous", command(), rows, notes=[etcd, "All members share the cores of this machine with etcd."])


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


if __name__ == "__main__":
    main()
