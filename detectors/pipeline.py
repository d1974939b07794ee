"""All detectors in one: observations in, findings and incidents out.

Owns: which detector hears what, in which order, and what is kept for the next run of the job type (`memory`). Must not: read files or clocks, or decide
what is done.

Cheapest first: guards and signatures judge each observation as it comes; windows are closed every ten seconds and given to the comparison of ranks and to
the forest. What they say goes into incidents. For one job, in one thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from detectors.drifts import Drifts
from detectors.features import measure
from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.forest import Forest
from detectors.guards import Guards
from detectors.incidents import Incident, Incidents
from detectors.observations import Change, Line, Observation, Phase
from detectors.peers import Peers
from detectors.sequences import Bigrams
from detectors.signatures import Signatures, Table
from detectors.templates import Templates
from detectors.windows import WIDTH, Row, Window, Windows

NEWS: Final = 3
"""Kinds of lines of one rank in one window that follow on each other as never before, from which on that is told."""
LEARNT: Final = 20
"""Pairs that a job type must have shown before that means anything."""
STORM: Final = 50
"""Lines of no known kind in one window from which on a log is said to explode."""

_ELSEWHERE: Final = (Phase.INIT, Phase.RESCALE, Phase.STOPPED)


@dataclass(slots=True)
class Verdicts:
    """What was said.

    Attributes:
        findings: in the order in which they were made.
        incidents: those that changed, as they were after it; one may come several times.
    """

    findings: list[Finding] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)

    def __iadd__(self, other: Verdicts) -> Self:
        self.findings += other.findings
        self.incidents += other.incidents
        return self


class Pipeline:
    """See the module.

    Args:
        table: signatures; the built-in ones if none is given.
        forest: what ranks windows; None to do without one.
        peers: what compares ranks.
        templates, bigrams: of the job type's last run.
        width: seconds of a window.

    Attributes:
        windows: that were closed so far.
        lines: that were seen.
    """

    def __init__(
        self,
        *,
        table: Table | None = None,
        forest: Forest | None = None,
        peers: Peers | None = None,
        templates: Templates | None = None,
        bigrams: Bigrams | None = None,
        width: float = WIDTH,
    ) -> None:
        table = table or Table.load()
        self.windows = 0
        self.lines = 0
        self.forest: Final = forest
        self._learnt = bigrams is not None and len(bigrams) >= LEARNT
        self._cutter: Final = Windows(width, templates=templates, bigrams=bigrams)
        self._guards: Final = Guards(table)
        self._signatures: Final = Signatures(table)
        self._drifts: Final = Drifts()
        self._peers: Final = Peers() if peers is None else peers
        self._incidents: Final = Incidents(width)
        self._generation = -1

    @property
    def templates(self) -> Templates:
        """Kinds of lines seen so far."""
        return self._cutter.templates

    @property
    def bigrams(self) -> Bigrams:
        """What followed on each other so far."""
        return self._cutter.bigrams

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Those that are open."""
        return self._incidents.open

    def see(self, observation: Observation) -> Verdicts:
        """Take an observation."""
        verdicts = Verdicts()
        if type(observation) is Change:
            verdicts.incidents += self._changed(observation)
        if type(observation) is Line:
            self.lines += 1
            found = self._signatures.see(observation)
            if found is not None:
                self._take(verdicts, [found])
        else:
            self._take(verdicts, self._guards.see(observation))
        self._judge(verdicts, self._cutter.see(observation))
        return verdicts

    def turn(self, now: float) -> Verdicts:
        """Time has passed. Call it once a second or so, with the time as observations have it.

        Args:
            now: seconds since the epoch.
        """
        verdicts = Verdicts()
        self._judge(verdicts, self._cutter.turn(now))
        self._take(verdicts, self._guards.turn(now))
        verdicts.incidents += self._incidents.turn(now)
        return verdicts

    def finish(self) -> Verdicts:
        """Nothing more comes: judge the windows that are still open."""
        verdicts = Verdicts()
        self._judge(verdicts, self._cutter.flush())
        return verdicts

    def over(self, observations: Iterable[Observation]) -> Iterator[Verdicts]:
        """All of a recording, in the order of time; time passes as the recording says."""
        for observation in observations:
            second = math.floor(self._cutter.now) if math.isfinite(self._cutter.now) else None
            verdicts = self.see(observation)
            now = self._cutter.now
            if second is not None and math.isfinite(now):
                for moment in range(max(second + 1, math.floor(now) - _CATCH_UP), math.floor(now) + 1):
                    verdicts += self.turn(moment)
            if verdicts.findings or verdicts.incidents:
                yield verdicts
        yield self.finish()

    # --- the parts -------------------------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> list[Incident]:
        """Another generation is another world."""
        if change.phase not in _ELSEWHERE or change.generation is None or change.generation <= self._generation:
            return []
        first, self._generation = self._generation < 0, change.generation
        return [] if first else self._incidents.world_changed(f"generation {change.generation} began")

    def _judge(self, verdicts: Verdicts, windows: Iterable[Window]) -> None:
        for window in windows:
            self.windows += 1
            self._take(verdicts, self._of_lines(window))
            self._take(verdicts, self._drifts.see(window))
            measured = measure(window, sorted(window.rows)) if window.rows else None
            self._take(verdicts, self._peers.see(window, measured))
            if self.forest is not None:
                self._take(verdicts, self.forest.see(window, measured))

    def _take(self, verdicts: Verdicts, findings: Iterable[Finding]) -> None:
        for finding in findings:
            verdicts.findings.append(finding)
            changed = self._incidents.take(finding)
            verdicts.incidents += changed
            if changed and self.forest is not None and finding.detector != "forest":
                self.forest.disturbed(finding.at)  # what is wrong is not what is usual

    def _of_lines(self, window: Window) -> Iterator[Finding]:
        """What the lines of a window say by how many of them are new; worth knowing, and no more: a new version says new things, too."""
        for row in (*window.rows.values(), *window.nodes.values()):
            if row.values.get("n_overflow", 0.0) >= STORM:
                yield _of_row(window, row, "log_storm", "n_overflow", "{:.0f} lines of kinds never seen before, more than are told apart")
            elif self._learnt and window.phase is Phase.TRAIN and row.values.get("n_unseen_bigram", 0.0) >= NEWS:
                yield _of_row(window, row, "new_sequence", "n_unseen_bigram", "{:.0f} times lines followed on each other as they never did in this job type")


_CATCH_UP: Final = 4000
"""Seconds of silence in a recording that are gone through one by one."""


def _of_row(window: Window, row: Row, kind: str, name: str, text: str) -> Finding:
    who = f"rank {row.rank}" if row.rank is not None else f"node {row.node}" if row.node else "the job"
    return Finding(
        at=window.ended,
        detector="sequence",
        kind=kind,
        summary=f"{who}: {text.format(row.values[name])}",
        cls=Class.ADVISE,
        role=Role.ADVISE,
        certainty=Certainty.WEAK,
        scope="rank" if row.rank is not None else "node",
        node=row.node,
        rank=row.rank,
        generation=window.generation,
        features=(Feature(name=name, value=row.values[name]),),
        began=window.began,
    )
