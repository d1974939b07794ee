"""Incidents as detectors tell them, as values of this package, and the parsing that refuses whatever else comes.

Owns: the form in which evidence is believed. Must not: import detectors (they say the same words in `detectors.incidents.Incident.as_dict`), or decide.

Texts come from lines that anybody may have written: they are cut, and what does not print is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from elasticd.policy.reading import Reader

SIGNS_MAX: Final = 128
NUMBERS_MAX: Final = 1024
_DERIVED: Final = frozenset({"cls", "certainty", "nodes", "ranks"})
"""Keys that repeat what the rest says."""


class Fault(StrEnum):
    """Whose it is."""

    TRANSIENT = "transient"
    HARDWARE = "hardware"
    USER = "user"
    CASCADE = "cascade"
    ADVISE = "advise"
    UNKNOWN = "unknown"


class Role(StrEnum):
    """What part a sign has in its incident."""

    ROOT = "root"
    CONFIRM = "confirm"
    CASCADE = "cascade"
    ADVISE = "advise"


class Certainty(StrEnum):
    """How much it may be leant on."""

    CERTAIN = "certain"
    STRONG = "strong"
    WEAK = "weak"


class Standing(StrEnum):
    """How an incident stands."""

    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    OVER = "over"


class Scope(StrEnum):
    """What it concerns."""

    RANK = "rank"
    NODE = "node"
    JOB = "job"


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A measurement; None where there is none, or none that is finite. `z` is in robust standard deviations."""

    name: str
    value: float | None
    baseline: float | None = None
    peers: float | None = None
    z: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """A detector's finding. Times are seconds since the epoch."""

    at: float
    detector: str
    kind: str
    summary: str
    fault: Fault
    role: Role
    certainty: Certainty
    scope: Scope = Scope.RANK
    node: str = ""
    rank: int | None = None
    generation: int | None = None
    numbers: tuple[Number, ...] = ()
    line: str = ""
    began: float | None = None

    @property
    def fingerprint(self) -> str:
        """What it is and where, in whatever generation: "straggler@node-3/r5"."""
        if self.scope is Scope.JOB:
            return self.kind
        rank = f"/r{self.rank}" if self.scope is Scope.RANK and self.rank is not None else ""
        return f"{self.kind}@{self.node}{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One thing that goes wrong.

    Attributes:
        id: the same whoever saw it.
        root: what it is believed to come from, one of `signs` as a rule.
        corroborated: two detectors or more saw something that does not merely follow.
    """

    id: str
    standing: Standing
    root: Sign
    signs: tuple[Sign, ...] = ()
    count: int = 1
    opened: float
    updated: float
    corroborated: bool = False
    why_over: str = ""

    @property
    def began(self) -> float:
        """When it began, as far as is known."""
        return min(self.opened, self.root.began if self.root.began is not None else self.opened)

    @property
    def own(self) -> tuple[Sign, ...]:
        """What does not follow from something else."""
        return tuple(sign for sign in (self.root, *self.signs) if sign.role is not Role.CASCADE)

    @property
    def ranks(self) -> tuple[int, ...]:
        """On which it shows itself, echoes aside."""
        return tuple(dict.fromkeys(sign.rank for sign in self.own if sign.rank is not None))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The same of nodes."""
        return tuple(dict.fromkeys(sign.node for sign in self.own if sign.node))

    @classmethod
    def from_dict(cls, data: object) -> Incident:
        """Parse what `detectors.incidents.Incident.as_dict` gives, also after JSON.

        Raises:
            RecordError: it is anything else. The message names the place.
        """
        reader = Reader(data, "incident")
        incident = cls(
            id=reader.name("id"),
            standing=reader.word("state", Standing),
            root=_sign(reader.take("root"), "incident.root"),
            signs=tuple(_sign(one, f"incident.findings[{place}]") for place, one in enumerate(reader.sequence("findings", SIGNS_MAX))),
            count=reader.whole("count", 1),
            opened=reader.time("opened"),
            updated=reader.time("updated"),
            corroborated=reader.flag("corroborated"),
            why_over=reader.text("why_over", ""),
        )
        reader.end(_DERIVED)
        return incident


def merged(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """One of each name: two nodes may tell of the same. The newer word counts, and what both saw together; an end counts only if nobody sees more of it."""
    found: dict[str, Incident] = {}
    for one in incidents:
        known = found.get(one.id)
        found[one.id] = one if known is None else _both(known, one)
    return tuple(found.values())


def _both(one: Incident, other: Incident) -> Incident:
    newer, older = (one, other) if (one.updated, one.standing is not Standing.OVER) >= (other.updated, other.standing is not Standing.OVER) else (other, one)
    signs = tuple(dict.fromkeys((*newer.signs, *older.signs)))[:SIGNS_MAX]
    detectors = {sign.detector for sign in (*newer.own, *older.own)}
    standings = {newer.standing, older.standing} - ({older.standing} if older.standing is Standing.OVER else set())
    standing = newer.standing if newer.standing is Standing.OVER else (Standing.CONFIRMED if Standing.CONFIRMED in standings else newer.standing)
    return replace(
        newer,
        signs=signs,
        standing=standing,
        opened=min(one.opened, other.opened),
        corroborated=one.corroborated or other.corroborated or len(detectors) >= 2,
    )


# --- parsing -----------------------------------------------------------------------------------------------------------


def _sign(data: object, where: str) -> Sign:
    reader = Reader(data, where)
    sign = Sign(
        at=reader.time("at"),
        detector=reader.name("detector"),
        kind=reader.name("kind"),
        summary=reader.text("summary"),
        fault=reader.word("cls", Fault),
        role=reader.word("role", Role),
        certainty=reader.word("certainty", Certainty),
        scope=reader.word("scope", Scope, "rank"),
        node=reader.name("node", ""),
        rank=reader.whole_or_none("rank"),
        generation=reader.whole_or_none("generation"),
        numbers=tuple(_number(one, f"{where}.features[{place}]") for place, one in enumerate(reader.sequence("features", NUMBERS_MAX))),
        line=reader.text("line", ""),
        began=reader.time_or_none("began"),
    )
    reader.end()
    return sign


def _number(data: object, where: str) -> Number:
    reader = Reader(data, where)
    number = Number(
        name=reader.text("name"),
        value=reader.measured("value"),
        baseline=reader.measured("baseline", None),
        peers=reader.measured("peers", None),
        z=reader.measured("z", None),
    )
    reader.end()
    return number
