"""From the cut of a host's power to the next step of the others, and where that time goes, in several arrangements of etcd.

    python -m bench.poweroff [--quick] [--json FILE] [--runs N] [--arrangements NAME ...]

Skipped without root: it boots four throw-away hosts (tests/cluster), with etcd, the service and all of mTLS and roles as they are shipped. A job
trains on three of them, one loses its power, two go on. Lease TTL 4 s. Each run begins with fresh agents; the arrangements take turns.

arrangement                      the lost host                                                etcd's leader
follower                         carries a member that no agent was talking to                elsewhere
follower_first                   carries the member that all agents were talking to           elsewhere
leader                           carries the member that all agents were talking to           that member
leader_fast_election             likewise; heartbeat 50 ms, election 500 ms                   that member
leader_fast_election_own_first   likewise; every host's endpoints begin with its own member   that member
no_etcd                          carries no member                                            elsewhere

row                  what
power_off_NAME       power cut to the last survivor's first step of the next generation
startup_NAME         the floor: the last agent's generation_formed to that step, in the same runs
over_lease_NAME      the one less the other, run by run; wanted: the lease + 1 s

The second table (in the JSON rows of its own) tells where the time goes: `gone` until an agent sees that the lost node's lease has ended, `doubt` until it
proposes to go on without it, `agree` until the generation has formed, `startup`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Self

from bench._common import Row, command, print_table, progress, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench._poweroff_site import Arrangement, Seen

RUNS: Final = 4
MARGIN: Final = 1.0
"""Seconds over lease and start-up that are wanted at most."""
NAMES: Final = ("follower", "follower_first", "leader", "leader_fast_election", "leader_fast_election_own_first", "no_etcd")


def arrangements() -> dict[str, Arrangement]:
    """All of them, by name. Everybody's endpoints are n1, n2, n3 in this order, and fresh agents talk to the first."""
    from bench._poweroff_site import Arrangement

    fast = (50, 500)
    made = (
        Arrangement(name="follower", lost="n3", leads="n2"),
        Arrangement(name="follower_first", lost="n1", leads="n2"),
        Arrangement(name="leader", lost="n1", leads="n1"),
        Arrangement(name="leader_fast_election", lost="n1", leads="n1", election=fast),
        Arrangement(name="leader_fast_election_own_first", lost="n1", leads="n1", election=fast, own_first=True),
        Arrangement(name="no_etcd", lost="n4", leads="n2", job="apart"),
    )
    return {one.name: one for one in made}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One run, in seconds; the phases add up to `total`.

    Attributes:
        gone: power cut to an agent that coordinates seeing the lost node's key gone: its lease has ended.
        doubt: from there to the proposal to go on without it: more than nothing where that agent had been without etcd itself (PROTOCOL 4).
        agree: from there to the last agent's generation_formed.
        startup: from there to the last survivor's first step.
        orphaned: whether the lost node was the job's coordinator.
        cut_off: survivors whose agent was without etcd for a moment.
    """

    gone: float
    doubt: float
    agree: float
    startup: float
    orphaned: bool = False
    cut_off: int = 0

    @property
    def total(self) -> float:
        """Power cut to the next step."""
        return self.gone + self.doubt + self.agree + self.startup

    @property
    def over_lease(self) -> float:
        """What is to be held against the lease and `MARGIN`."""
        return self.total - self.startup

    @classmethod
    def of(cls, seen: Seen) -> Self | None:
        """Cut what was seen; None if the others did not go on."""
        from bench._poweroff_site import at

        lines = [line for log in seen.logs.values() for line in log]
        worlds = {host: [step for step in steps if step["world"] == len(seen.steps)] for host, steps in seen.steps.items()}
        decided = [line for line in lines if line["event"] == "decision"]
        proposed = [at(line) for line in decided if line["text"].startswith("proposing")]
        doubted = [at(line) for line in decided if line["text"].startswith(DOUBT)]
        if not proposed or not all(worlds.values()):
            return None
        number = min(steps[0]["generation"] for steps in worlds.values())
        formed = [at(line) for line in lines if line["event"] == "generation_formed" and line["generation"] == number]
        stepped = [next(step["at"] for step in steps if step["generation"] == number) for steps in worlds.values()]
        gone = min([*doubted, *proposed])
        return cls(
            gone=gone - seen.at,
            doubt=min(proposed) - gone,
            agree=max(formed) - min(proposed),
            startup=max(stepped) - max(formed),
            orphaned=any(line["event"] == "coordinating" and at(line) < max(formed) for line in lines),
            cut_off=sum(any(line["event"] == "etcd_unreachable" for line in log) for log in seen.logs.values()),
        )


PHASES: Final = ("gone", "doubt", "agree", "startup")
DOUBT: Final = "members are missing after an etcd outage"
"""How an agent begins to say that it sees a loss and does not believe it yet."""
DOUBTED: Final = 0.05
"""Seconds of doubt that count as such."""
Results = dict[str, list["Cut | None"]]


def turns(chosen: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """Run and arrangement, each round the other way round, so that what changes slowly hits all alike and etcd is set up anew as rarely as can be."""
    for run in range(runs):
        for name in chosen if run % 2 == 0 else chosen[::-1]:
            yield run, name


def measure(chosen: Mapping[str, Arrangement], runs: int, results: Results, notes: list[str]) -> None:
    """All runs of all arrangements."""
    from bench._poweroff_site import TTL, running

    elections: dict[str, int] = dict.fromkeys(chosen, 0)
    with running() as site:
        for run, name in turns(list(chosen), runs):
            site.arrange(chosen[name])
            seen = site.cut(chosen[name])
            cut = Cut.of(seen)
            results[name].append(cut)
            elections[name] += seen.elections
            progress(f"run {run + 1} of {runs}  {name:31} {_told(cut, TTL + MARGIN)}  (load {os.getloadavg()[0]:.1f})")
    notes += [f"{name}: {count} changes of etcd's leader before the cut that nobody had asked for" for name, count in elections.items() if count]


def _told(cut: Cut | None, wanted: float) -> str:
    if cut is None:
        return "never"
    phases = " + ".join(f"{phase} {getattr(cut, phase):.2f}" for phase in PHASES)
    asides = [
        *(["it had coordinated"] if cut.orphaned else []),
        *([f"{cut.cut_off} agents without etcd for a moment"] if cut.cut_off else []),
        *(["loss not believed at once"] if cut.doubt > DOUBTED else []),
    ]
    return "; ".join([f"{cut.total:5.2f} s = {phases}; less start-up {cut.over_lease:.2f} of {wanted:g}", *asides])


def rows_of(results: Results, ttl: float) -> list[Row]:
    """Three rows an arrangement."""
    rows = []
    for name, cuts in results.items():
        if not cuts:
            continue
        over = [None if cut is None else cut.over_lease for cut in cuts]
        doubted = sum(cut is not None and cut.doubt > DOUBTED for cut in cuts)
        row = Row.of(f"over_lease_{name}", "elasticd", over)
        verdict = "met" if row.median is not None and row.median <= ttl + MARGIN else "MISSED"
        inside = sum(value is not None and value <= ttl + MARGIN for value in over)
        aside = f"; loss not believed at once in {doubted}" if doubted else ""
        rows += [
            Row.of(f"power_off_{name}", "elasticd", [None if cut is None else cut.total for cut in cuts]),
            Row.of(f"startup_{name}", "floor", [None if cut is None else cut.startup for cut in cuts]),
            row.noted(f"target <= {ttl + MARGIN:g} s: {verdict}; in {inside} of {len(cuts)} runs{aside}"),
        ]
    return rows


def phase_rows(results: Results) -> list[Row]:
    """A row for each phase of each arrangement; `startup` has one already."""
    whole = {name: [cut for cut in cuts if cut is not None] for name, cuts in results.items()}
    phases = [phase for phase in PHASES if phase != "startup"]
    return [Row.of(f"{phase}_{name}", "elasticd", [getattr(cut, phase) for cut in cuts]) for name, cuts in whole.items() if cuts for phase in phases]


def print_phases(results: Results) -> None:
    """The second table: a line an arrangement, a column a phase."""
    print("\nwhere the time went, medians (least to most) in s")
    print("  ".join(["".ljust(32), *(phase.rjust(20) for phase in PHASES)]))
    for name, cuts in results.items():
        cells = []
        for phase in PHASES:
            values = [getattr(cut, phase) for cut in cuts if cut is not None]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-")
        print("  ".join([name.ljust(32), *(cell.rjust(20) for cell in cells)]))
    sys.stdout.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.poweroff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each arrangement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--runs", type=int, help=f"runs of each arrangement ({RUNS}; 1 if quick)")
    parser.add_argument("--arrangements", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="only these")
    options = parser.parse_args(argv)
    if options.runs is not None and options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def lacking() -> str:
    """Why this machine cannot be measured on, "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    from tests.cluster import etcd, hosts

    return hosts.missing() or etcd.missing()


def _interrupt(*_: object) -> NoReturn:
    """Once; the clean-up that follows is not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 where there can be no hosts, 1 where they failed, 130 if interrupted, after printing what there was."""
    options = parse(argv)
    if why := lacking():  # no failure: `make bench` runs every bench, on any machine and by any user
        progress(f"bench.poweroff: skipped, it {why}")
        return 0
    from bench._poweroff_site import TTL

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    known = arrangements()
    chosen = {name: known[name] for name in dict.fromkeys(options.arrangements)}
    results: Results = {name: [] for name in chosen}
    notes = [f"lease TTL {TTL:g} s; three nodes train, two go on; fresh agents in each run"]
    code = 0
    try:
        measure(chosen, options.runs or (1 if options.quick else RUNS), results, notes)
    except KeyboardInterrupt:
        progress("interrupted; what follows is not the whole")
        code = 130
    except (AssertionError, subprocess.TimeoutExpired, OSError) as error:  # hosts say by the first what they did not do
        progress(f"{error}\nnot measured; what follows is not the whole")
        code = 1
    rows = rows_of(results, TTL)
    if rows:
        print_table(rows, title="from a power cut to the next step of the others")
        print_phases(results)
    if options.json and not code:
        write_json(options.json, "poweroff", command(), [*rows, *phase_rows(results)], notes=notes)
    return code


if __name__ == "__main__":
    sys.exit(main())
