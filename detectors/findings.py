"""What detectors say: findings, each with all that it rests on.

Owns: the words of a finding. Must not: decide what is done about it; that is a policy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Class(StrEnum):
    """Whose fault it is, as far as it can be told, and with it what helps."""

    TRANSIENT = "transient"
    """Restart on the same nodes."""
    HARDWARE = "hardware"
    """Go on without the node."""
    USER = "user"
    """Code, data or configuration: a restart ends the same way."""
    CASCADE = "cascade"
    """Follows from something else: look for that."""
    ADVISE = "advise"
    """Worth knowing, no reason to act."""
    UNKNOWN = "unknown"


class Role(StrEnum):
    """What a finding may do to incidents."""

    ROOT = "root"
    """Opens one."""
    CONFIRM = "confirm"
    """Strengthens one that is open on the same node, or opens one that waits for a second."""
    CASCADE = "cascade"
    """Joins one; never opens one."""
    ADVISE = "advise"
    """Is told, and touches none."""


class Certainty(StrEnum):
    """How much it may be leant on."""

    CERTAIN = "certain"
    """Somebody said so, or a counter counts it: non-finite values, a dead rank, an Xid, a message that means one thing."""
    STRONG = "strong"
    """A comparison with peers or with itself that held on."""
    WEAK = "weak"
    """A statistic alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One number that a finding rests on.

    Attributes:
        name: what was measured, with its unit ("compute_s", "temperature_c").
        value: as it is.
        baseline: what is usual for this rank, None where there is no such.
        peers: median of the other ranks, None where there are none.
        z: how far from usual, in robust standard deviations; None where that is not how it was judged.
    """

    name: str
    value: float
    baseline: float | None = None
    peers: float | None = None
    z: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """See the module.

    Attributes:
        at: when it was seen; that of the line or of the window's end.
        detector: "guard", "signature", "sequence", "drifts", "peers", "forest".
        kind: what it is, a name that stays: "nonfinite", "xid_79", "straggler", "joint_drift".
        summary: one sentence for people, with numbers and units.
        scope: "rank", "node" or "job": what it concerns.
        line: the log line that it rests on, "" if none.
        began: since when, if that is known to be earlier.
    """

    at: float
    detector: str
    kind: str
    summary: str
    cls: Class
    role: Role
    certainty: Certainty
    scope: str = "rank"
    node: str = ""
    rank: int | None = None
    generation: int | None = None
    features: tuple[Feature, ...] = ()
    line: str = ""
    began: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @property
    def subject(self) -> Mapping[str, Any]:
        """What it concerns, as far as its scope goes."""
        found: dict[str, Any] = {"scope": self.scope}
        if self.scope != "job":
            found["node"] = self.node
        if self.scope == "rank":
            found["rank"] = self.rank
        return found
