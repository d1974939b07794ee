"""What the detectors find, what they cry about in vain, and what they cost; beside simpler ones, in the same run.

    python -m bench.detectors [--data DIR] [--quick] [--json FILE] [--only signatures,sequences,numeric,traces]

DIR holds public sets: `gpualert-eval`, `bigscience-logs`, `hdfs-sessions`, `nab`. Rows that need one are left out without it, and that is said. What is
made by this project (simulated jobs, recorded faults) needs nothing.

part        rows
signatures  macro-F1 of classes of failures over whole logs; false hits on logs of healthy runs; time a line
sequences   F1 on sessions of events; time a line with templates
numeric     stragglers, joint drifts, benign node-hours, NAB; beside a plain forest, robust z, ADWIN, HalfSpaceTrees, PCA, Mahalanobis
traces      recorded faults of real jobs, the judging half: found, and cried in vain
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from bench._common import Row, command, print_table, progress, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("signatures", "sequences", "numeric", "traces")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.detectors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="public sets to measure with")
    parser.add_argument("--quick", action="store_true", help="fewer runs: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of the parts, with commas (default: all)")
    options = parser.parse_args(arguments)
    wanted = [part for part in options.only.split(",") if part]
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data}: no such directory")
    if options.data is None:
        print("without --data: rows that need public sets are left out", file=sys.stderr)
    rows: list[Row] = []
    for part in wanted:
        progress(part)
        found = import_module(f"bench._detectors_{part}").rows(options.data, options.quick)
        print_table(found, title=part)
        rows += found
    if options.json:
        write_json(options.json, "detectors", command(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
