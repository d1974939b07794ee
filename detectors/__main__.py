"""Judge recorded logs: `python -m detectors DIR`, or any file of JSON lines, or `-` for what comes in.

Owns: the command line, and progress on long work. Must not: judge, or lay out (`report`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from detectors.memory import Memory
from detectors.observations import Line, Observation, Ranks, Steps, Stream
from detectors.recorded import replay
from detectors.report import Account, text
from detectors.signatures import Table, TableError
from detectors.sources import Origin, Reader, plain_line
from detectors.windows import WIDTH

_PROGRESS_EVERY: Final = 2.0
_EXAMPLES: Final = """\
examples:
  python -m detectors /var/log/elasticd/llm          the logs of a job, of all nodes that are there
  python -m detectors --json train.jsonl | jq .      findings and incidents as JSON
  journalctl -o cat -u elasticd | python -m detectors -
  python -m detectors --memory state/llm --learn logs/llm    learn what is usual from a run that went well
"""


def main(arguments: list[str] | None = None) -> int:
    """Run it.

    Returns:
        0; 3 with `--exit-code` if an incident was confirmed; 2 for what cannot be read; 130 for Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        return _judged(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (OSError, TableError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"detectors: {why}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m detectors",
        description="Find failures and drifts in the logs and telemetry of training jobs, and say what each rests on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a directory of logs, a file of JSON or plain lines, or - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of a report")
    parser.add_argument("--exit-code", action="store_true", help="exit with 3 if an incident was confirmed")
    parser.add_argument("--width", type=_width, default=WIDTH, metavar="SEC", help="seconds of a window (default: %(default)g)")
    parser.add_argument("--signatures", type=Path, action="append", default=[], metavar="FILE", help="TOML that changes the built-in table; may be repeated")
    parser.add_argument("--memory", type=Path, metavar="DIR", help="what is usual for this type of job, as an earlier run left it")
    parser.add_argument("--learn", action="store_true", help="write what this run showed to --memory, which need not exist")
    parser.add_argument("--no-forest", action="store_true", help="do without the isolation forest, and so without scikit-learn")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return parser


def _width(given: str) -> float:
    width = float(given)
    if not 0.1 <= width <= 3600.0:
        raise argparse.ArgumentTypeError("must be from 0.1 to 3600 seconds")
    return width


def _judged(options: argparse.Namespace) -> int:
    if options.learn and options.memory is None:
        raise OSError("--learn needs --memory")
    memory = Memory.load(options.memory) if options.memory is not None and options.memory.exists() else Memory()
    for problem in memory.problems:
        print(f"detectors: {problem}", file=sys.stderr)
    pipeline = memory.pipeline(table=Table.load(*options.signatures), width=options.width, forest=not options.no_forest)
    account, seen = Account(), _Seen(progress=not options.quiet and sys.stderr.isatty())
    for verdicts in pipeline.over(seen.count(_observations(options.paths))):
        account.take(verdicts)
    seen.end()
    how_much = {**seen.as_dict(), "windows": pipeline.windows, "lines": pipeline.lines}
    if options.json:
        json.dump({"seen": how_much, **account.as_dict()}, sys.stdout, allow_nan=False)
        print()
    else:
        sys.stdout.write(text(account, seen=how_much))
    sys.stdout.flush()
    if options.learn:
        Memory.of(pipeline).save(options.memory)
    return 3 if options.exit_code and account.confirmed else 0


def _observations(paths: Iterable[Path]) -> Iterator[Observation]:
    for path in paths:
        if str(path) == "-":
            yield from _stream(sys.stdin.buffer)
        elif path.is_dir():
            yield from replay(path)
        else:
            with path.open("rb") as file:
                yield from _stream(file)


def _stream(lines: Iterable[bytes]) -> Iterator[Observation]:
    """Lines of JSON or of plain text, mixed as they come. One without a time has that of the line before."""
    reader = Reader()
    at = 0.0
    for line in lines:
        found = list(reader.observations(line, Origin(at=at))) or [plain_line(line, at=at, stream=Stream.OUT)] if line.strip() else []
        for observation in found:
            at = max(at, observation.at)
            yield observation


class _Seen:
    """Counts what goes by, and says how far it is."""

    def __init__(self, *, progress: bool) -> None:
        self._progress = progress
        self._count = 0
        self._first = self._last = 0.0
        self._nodes: set[str] = set()
        self._ranks: set[int] = set()
        self._said = time.monotonic()

    def count(self, observations: Iterable[Observation]) -> Iterator[Observation]:
        for observation in observations:
            self._count += 1
            if observation.at > 0.0:
                self._first = observation.at if self._first == 0.0 else min(self._first, observation.at)
                self._last = max(self._last, observation.at)
            if observation.node:
                self._nodes.add(observation.node)
            if isinstance(observation, Steps | Line) and observation.rank is not None:
                self._ranks.add(observation.rank)
            elif isinstance(observation, Ranks):
                self._ranks.update(range(len(observation.ranks)))
            if self._progress and self._count % 1024 == 0 and time.monotonic() - self._said > _PROGRESS_EVERY:
                self._said = time.monotonic()
                sys.stderr.write(f"\r{self._count:,} observations, {self._last - self._first:,.0f} s of logs")
            yield observation

    def end(self) -> None:
        if self._progress:
            sys.stderr.write("\r\x1b[2K")

    def as_dict(self) -> dict[str, float]:
        return {"seconds": self._last - self._first, "nodes": len(self._nodes), "ranks": len(self._ranks)}


if __name__ == "__main__":
    sys.exit(main())
