"""Traces that `bench.faults` recorded, as detectors see them, each with its label.

Owns: finding, unpacking and telling them in the order of time. Must not: judge.

    for trace in traces("judging"):
        with trace.observations(stretch=SCALE) as observed:
            for observation in observed: …

A trace's time scale is one tenth of real life. Either give detectors windows of 1 s, or `stretch` the times by ten, so that windows of 10 s and rules
in seconds hold as they are; durations within an observation (seconds of steps) stay what they were.
"""

from __future__ import annotations

import contextlib
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from detectors.observations import Line, Observation
from detectors.recorded import replay

TRACES: Final = Path(__file__).with_name("traces")
LABELS: Final = "labels.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One of them.

    Attributes:
        name: "judging/kill".
        path: the archive.
        label: as `bench._faults_kinds.label` makes it: among others "kind", "split", "fault", "scope", "rank", "node", "began", "ended" (seconds since the
            epoch; of what goes on to the end, the end), "says", "within", and "started" and "until", between which it was recorded.
    """

    name: str
    path: Path
    label: Mapping[str, Any]

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[Path]:
        """The job's log directory, for as long as it is wanted."""
        with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
            with tarfile.open(self.path, "r:gz") as tar:
                tar.extractall(folder, filter="data")
            (job,) = Path(folder).iterdir()
            yield job

    @contextlib.contextmanager
    def observations(self, *, stretch: float = 1.0) -> Iterator[Iterator[Observation]]:
        """All that it tells, in the order of time; times are multiplied by `stretch` from "started" on."""
        with self.unpacked() as job:
            observed = replay(job)
            yield observed if stretch == 1.0 else (self._later(one, stretch) for one in observed)

    def stretched(self, at: float, stretch: float) -> float:
        """A time of this trace, or of its label, as `observations` tells it with the same `stretch`."""
        started = float(self.label["started"])
        return started + stretch * (at - started)

    def _later(self, one: Observation, stretch: float) -> Observation:
        at = self.stretched(one.at, stretch)
        return one._replace(at=at) if isinstance(one, Line) else replace(one, at=at)

    def right(self, kind: str, *, rank: int | None = None, node: str = "") -> bool:
        """Whether such a finding is among those that the label wants, and about what it concerns, as far as it says.

        Args:
            kind: of the finding.
            rank, node: that it names, if it does.
        """
        label = self.label
        if label["scope"] == "rank" and rank is not None and rank != label["rank"]:
            return False
        if label["scope"] != "job" and node and label["node"] and node != label["node"]:
            return False
        return any(re.fullmatch(re.escape(said).replace(r"\*", ".*"), kind) for said in label["says"])


def traces(split: str | None = None, folder: Path = TRACES) -> list[Trace]:
    """Those of "tuning" or of "judging", or all; in the order of their names.

    Raises:
        FileNotFoundError: there are no labels, or a trace that they name is not there.
    """
    labels = json.loads((folder / LABELS).read_text())["traces"]
    found = [Trace(name=name, path=folder / f"{name}.tar.gz", label=one) for name, one in sorted(labels.items()) if split in (None, one["split"])]
    for trace in found:
        if not trace.path.exists():
            raise FileNotFoundError(f"{trace.path}: {LABELS} names it")
    return found
