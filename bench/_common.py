"""What every bench needs: rows, the table on the screen, the JSON file, and the machine they were taken on.

Owns: the shape of a result (docs of the fields: `Row`). Must not: know what is measured.

    rows = [Row.of("form", "elasticd", [3.1, 2.9, 3.4]), Row.of("form", "torchrun", [None], note="never within 30 s")]
    rows += filter(None, [ratio(rows[0], rows[1])])     # or paired_ratio, where runs were taken side by side
    print_table(rows)
    write_json(path, "recovery", command(), rows, notes=["…"])
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOAD_AT_START = os.getloadavg()[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured quantity of one peer.

    Attributes:
        name: what was measured, as DESIGN.md, section 10, names it.
        peer: whose.
        median, min, max: over the runs; None where the thing did not happen within the bound.
        unit: "s", "1/s", "%", "x", …; "x" is a ratio.
        runs: how many runs were made.
        note: anything a reader must know; goes to "notes" in the JSON.
    """

    name: str
    peer: str
    median: float | None
    min: float | None
    max: float | None
    unit: str = "s"
    runs: int = 1
    note: str = ""

    @classmethod
    def of(cls, name: str, peer: str, values: Sequence[float | None], *, unit: str = "s", note: str = "") -> Self:
        """The row of some runs, at least one. A run that gave None counts as longer than any other."""
        spread = sorted(math.inf if value is None else value for value in values)
        low, mid, high = (value if math.isfinite(value) else None for value in (spread[0], statistics.median(spread), spread[-1]))
        return cls(name=name, peer=peer, median=mid, min=low, max=high, unit=unit, runs=len(values), note=note)

    def noted(self, note: str) -> Self:
        """The same row with a note."""
        return replace(self, note=note)


def ratio(ours: Row, theirs: Row, *, name: str | None = None) -> Row | None:
    """How many times `theirs` our median is, with the bounds that both spreads allow; None where a median is missing or zero."""
    if ours.median is None or not theirs.median:
        return None
    low = None if ours.min is None or not theirs.max else ours.min / theirs.max
    high = None if ours.max is None or not theirs.min else ours.max / theirs.min
    what = name or f"{ours.name}_x_{theirs.peer}"
    return Row(name=what, peer=ours.peer, median=ours.median / theirs.median, min=low, max=high, unit="x", runs=min(ours.runs, theirs.runs))


def paired_ratio(name: str, peer: str, pairs: Sequence[tuple[float | None, float | None]]) -> Row | None:
    """Ours over theirs run by run, so that what slows down both cancels out; None where no run has both."""
    values = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return Row.of(name, peer, values, unit="x") if values else None


def print_table(rows: Sequence[Row], *, title: str = "") -> None:
    """The rows on stdout, one a line, in the order given."""
    lines = [("", "peer", "median", "min", "max", "unit", "runs", "")]
    lines += [(row.name, row.peer, _shown(row.median), _shown(row.min), _shown(row.max), row.unit, str(row.runs), row.note) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(8)]
    if title:
        print(f"\n{title}")
    for line in lines:
        left, numbers, rest = line[:2], line[2:5], line[5:]
        cells = [text.ljust(width) for text, width in zip(left, widths[:2], strict=True)]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[2:5], strict=True)]
        cells += [text.ljust(width) for text, width in zip(rest, widths[5:], strict=True)]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def write_json(path: Path, bench: str, command: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """The result as DESIGN.md, section 10, lays it down, with the notes of the rows among "notes"."""
    document = {
        "bench": bench,
        "command": command,
        "machine": machine(),
        "rows": [{key: value for key, value in asdict(row).items() if key != "note"} for row in rows],
        "notes": [*notes, *(f"{row.name}, {row.peer}: {row.note}" for row in rows if row.note)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """The processor, versions, and the load average over a minute when the bench began and now. Call it at the end."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "etcd": _etcd_version(),
        "load_at_start": round(_LOAD_AT_START, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def command() -> str:
    """The command that is running, for somebody who wants to run it again."""
    package = getattr(sys.modules["__main__"].__spec__, "name", None)
    return shlex.join(["python", *(["-m", package] if package else sys.argv[:1]), *sys.argv[1:]])


def progress(message: str) -> None:
    """One line on stderr, for a long run."""
    print(message, file=sys.stderr, flush=True)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _etcd_version() -> str:
    from elasticd.kv.embedded import find_etcd

    return find_etcd().version
