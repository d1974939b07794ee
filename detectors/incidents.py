"""Findings of many detectors, ranks and moments become incidents: one for each thing that goes wrong.

Owns: what opens an incident, what joins it, which finding is its root, when it is believed and when it is over. Must not: look for anything itself, or
decide what is done.

- A finding that is certain, or a comparison that held on, opens an incident that is believed (CONFIRMED). A statistic alone has to come again: in 3 of 5
  windows for a suspicion, in 6 of 8 to be believed. The forest speaks only of what has lasted for minutes: its first word is a suspicion, and its fourth
  about the same is believed.
- What comes within MERGE seconds of an incident's last evidence joins it, from whatever rank: a dead node shows on all of them.
- The root is the surest finding, and of equally sure ones the earliest: what follows from a failure is often louder than the failure.
- A cascade joins, and never opens. A confirmation opens nothing by itself, but two of different detectors on one node do.
- It is over when nothing has supported it for CLEAR seconds, or the world has changed: what was wrong there may be gone with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from detectors.findings import Certainty, Class, Finding, Role

MERGE: Final = 60.0
"""Seconds between two findings of one incident at most."""
CLEAR: Final = 120.0
"""Seconds without evidence after which an incident is over."""
SUSPECT_OF: Final = (3, 5)
CONFIRM_OF: Final = (6, 8)
"""Windows in which a weak finding must come, of how many in a row."""
PATIENT: Final = frozenset({"forest"})
"""Detectors that tell of what has held on already, and again while it goes on."""
CONFIRM_TOLD: Final = 4
"""Times that one of these must tell of it for it to be believed."""
FINDINGS_MAX: Final = 64
"""Findings that an incident keeps: the first ones, and the root."""
ENDED_MAX: Final = 1024
"""Names of incidents that are over and remembered."""
STREAKS_MAX: Final = 4096
"""Weak findings that are counted at a time, by kind and subject."""

_ORDER: Final = {Certainty.CERTAIN: 0, Certainty.STRONG: 1, Certainty.WEAK: 2}


class State(StrEnum):
    """How an incident stands."""

    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """See the module.

    Attributes:
        id: made of what it is and where, so that whoever sees the same thing gives it the same one.
        root: what it is believed to come from.
        findings: what it rests on, the oldest first, the root among them; `FINDINGS_MAX` at most.
        count: of all findings.
        opened, updated: times of the first and the newest evidence.
        corroborated: findings of two detectors or more, of two nodes or one, cascades aside.
        why_over: "" until it is.
    """

    id: str
    state: State
    root: Finding
    findings: tuple[Finding, ...]
    count: int
    opened: float
    updated: float
    corroborated: bool = False
    why_over: str = ""

    @property
    def cls(self) -> Class:
        """Whose fault it is: the root's."""
        return self.root.cls

    @property
    def certainty(self) -> Certainty:
        """The root's."""
        return self.root.certainty

    @property
    def nodes(self) -> tuple[str, ...]:
        """On which anything of it was seen, in order of time."""
        return tuple(dict.fromkeys(finding.node for finding in self.findings if finding.node))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The same of ranks."""
        return tuple(dict.fromkeys(finding.rank for finding in self.findings if finding.rank is not None))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "cls": self.cls, "certainty": self.certainty, "nodes": self.nodes, "ranks": self.ranks}


def incident_id(finding: Finding) -> str:
    """The name of an incident with this root: "g7-straggler-node-3-r5"."""
    parts = [f"g{finding.generation or 0}", finding.kind]
    if finding.scope != "job" and finding.node:
        parts.append(finding.node)
    if finding.scope == "rank" and finding.rank is not None:
        parts.append(f"r{finding.rank}")
    return "-".join(parts)


@dataclass(slots=True)
class _Streak:
    """In which of the last windows a weak finding came, by the number of the window."""

    windows: deque[int] = field(default_factory=lambda: deque(maxlen=CONFIRM_OF[1]))
    newest: Finding | None = None
    first: float = 0.0
    told: int = 0

    def came(self, finding: Finding, window: int) -> None:
        if not self.windows or self.windows[-1] != window:
            self.windows.append(window)
        if len(self.windows) == 1:
            self.first = finding.at
        self.newest = finding
        self.told += 1

    def state(self, *, patient: bool) -> State | None:
        """What it comes to by now; None for nothing."""
        if patient:
            return State.CONFIRMED if self.told >= CONFIRM_TOLD else State.SUSPECT
        if self.within(CONFIRM_OF):
            return State.CONFIRMED
        return State.SUSPECT if self.within(SUSPECT_OF) else None

    def within(self, rule: tuple[int, int]) -> bool:
        wanted, of = rule
        return bool(self.windows) and sum(window > self.windows[-1] - of for window in self.windows) >= wanted


class Incidents:
    """See the module. Give it findings in the order of time, as far as that is known.

    Args:
        width: seconds of a window, for counting those in which a weak finding came.
    """

    def __init__(self, width: float = 10.0) -> None:
        self._width = width
        self._open: dict[str, Incident] = {}
        self._ended: dict[str, int] = {}  # how often one of that name was over
        self._stems: dict[str, str] = {}  # of the open ones: the name without its number
        self._streaks: dict[tuple[Any, ...], _Streak] = {}
        self._waiting: deque[Finding] = deque(maxlen=32)  # confirmations and cascades without an incident

    @property
    def open(self) -> tuple[Incident, ...]:
        """Those that are not over."""
        return tuple(self._open.values())

    def take(self, finding: Finding) -> list[Incident]:
        """Take a finding in; the incidents that it changed, as they are now."""
        if finding.role is Role.ADVISE:
            return []
        if finding.certainty is Certainty.WEAK and finding.role is not Role.CASCADE:
            return self._take_weak(finding)
        return self._take_sure(finding)

    def turn(self, now: float) -> list[Incident]:
        """Time has passed: those that are over by it."""
        streaks = self._streaks
        for key in [key for key, streak in streaks.items() if streak.newest is None or now - streak.newest.at > CLEAR]:
            del streaks[key]
        ended = [incident for incident in self._open.values() if now - incident.updated > CLEAR]
        return [self._end(incident, f"nothing more of it for {CLEAR:.0f} s") for incident in ended]

    def world_changed(self, why: str) -> list[Incident]:
        """Another world: nothing of before counts in it."""
        self._streaks.clear()
        self._waiting.clear()
        return [self._end(incident, why) for incident in list(self._open.values())]

    # --- weak ones have to come again -----------------------------------------------------------------------------------

    def _take_weak(self, finding: Finding) -> list[Incident]:
        key = (finding.detector, finding.kind, finding.scope, finding.node, finding.rank)
        streak = self._streaks.get(key)
        if streak is None:
            if len(self._streaks) >= STREAKS_MAX:
                del self._streaks[next(iter(self._streaks))]
            streak = self._streaks[key] = _Streak()
        streak.came(finding, int(finding.at // self._width))
        state = streak.state(patient=finding.detector in PATIENT)
        if state is None:
            return []
        return self._join(replace(finding, began=finding.began if finding.began is not None else streak.first), state)

    # --- sure ones count at once ----------------------------------------------------------------------------------------

    def _take_sure(self, finding: Finding) -> list[Incident]:
        if finding.role is Role.ROOT or self._near(finding) is not None:
            return self._join(finding, State.CONFIRMED if finding.role is Role.ROOT else State.SUSPECT)
        if finding.role is Role.CONFIRM:
            for other in self._waiting:
                if other.role is Role.CONFIRM and other.detector != finding.detector and other.node == finding.node and abs(other.at - finding.at) <= MERGE:
                    self._waiting.remove(other)
                    return self._join(other, State.CONFIRMED) + self._join(finding, State.CONFIRMED)
        self._waiting.append(finding)
        return []

    def _near(self, finding: Finding) -> Incident | None:
        """The open incident that a finding belongs to."""
        near = [
            incident
            for incident in self._open.values()
            if incident_id(incident.root) == incident_id(finding) or (abs(finding.at - incident.updated) <= MERGE and _concerns(incident, finding))
        ]
        return min(near, key=lambda incident: incident.opened) if near else None

    def _join(self, finding: Finding, state: State) -> list[Incident]:
        incident = self._near(finding)
        if incident is None:
            waited = self._take_waiting(finding)
            made = Incident(
                id=self._name(finding),
                state=state,
                root=finding,
                findings=(*waited, finding),
                count=1 + len(waited),
                opened=min([finding.began or finding.at, *(one.at for one in waited)]),
                updated=finding.at,
                corroborated=_corroborated((*waited, finding)),
            )
            self._open[made.id] = made
            return [made]
        return [self._grow(incident, finding, state)]

    def _name(self, finding: Finding) -> str:
        """Its name, with a number if there was one of that name before."""
        name = incident_id(finding)
        before = self._ended.get(name, 0)
        full = f"{name}-{before + 1}" if before else name
        self._stems[full] = name
        return full

    def _take_waiting(self, finding: Finding) -> tuple[Finding, ...]:
        """What came shortly before without an incident of its own: a cascade is often told first."""
        near = tuple(other for other in self._waiting if abs(other.at - finding.at) <= MERGE)
        for other in near:
            self._waiting.remove(other)
        return near

    def _grow(self, incident: Incident, finding: Finding, state: State) -> Incident:
        findings, root = incident.findings, incident.root
        known = next((index for index, one in enumerate(findings) if _same(one, finding)), None)
        if known is not None:  # the same once more: the newest numbers, at the old place
            before = findings[known]
            finding = replace(finding, began=before.began if before.began is not None else before.at)
            root = finding if before is root else root
            findings = (*findings[:known], finding, *findings[known + 1 :])
        if finding.role is not Role.CASCADE and _rank(finding) < _rank(root):
            root = finding
        if known is None and (len(findings) < FINDINGS_MAX or root is finding):
            findings = (*findings[: FINDINGS_MAX - 1], finding)
        believed = State.CONFIRMED in (incident.state, state) and (finding.role is not Role.CASCADE or incident.state is State.CONFIRMED)
        grown = replace(
            incident,
            state=State.CONFIRMED if believed else incident.state,
            root=root,
            findings=findings,
            count=incident.count + 1,
            updated=max(incident.updated, finding.at) if finding.role is not Role.CASCADE else incident.updated,
            corroborated=_corroborated(findings),
        )
        self._open[incident.id] = grown  # it keeps its name: whoever has heard of it knows it by that
        return grown

    def _end(self, incident: Incident, why: str) -> Incident:
        del self._open[incident.id]
        stem = self._stems.pop(incident.id)
        count = self._ended.pop(stem, 0)
        while len(self._ended) >= ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[stem] = count + 1
        return replace(incident, state=State.OVER, why_over=why)


def _rank(finding: Finding) -> tuple[int, float]:
    """The smaller, the better a root: surer, then earlier."""
    return _ORDER[finding.certainty], finding.began if finding.began is not None else finding.at


def _same(one: Finding, other: Finding) -> bool:
    return _sort(one) == _sort(other)


def _sort(finding: Finding) -> tuple[object, ...]:
    return finding.detector, finding.kind, finding.role, finding.certainty, finding.scope, finding.node, finding.rank


def _concerns(incident: Incident, finding: Finding) -> bool:
    """Whether they can be one thing. All of a job's ranks wait for each other, so everything within it can; but for hardware of two nodes."""
    apart = Class.HARDWARE is finding.cls is incident.root.cls and "job" not in (finding.scope, incident.root.scope)
    return not (apart and finding.node != incident.root.node)


def _corroborated(findings: Iterable[Finding]) -> bool:
    return len({finding.detector for finding in findings if finding.role is not Role.CASCADE}) >= 2
