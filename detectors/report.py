"""What a pipeline said of a recording, for people to read and for programs.

Owns: the words and the order. Must not: judge, or print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from detectors.findings import Certainty, Feature, Finding, Role
from detectors.incidents import Incident, State
from detectors.pipeline import Verdicts

SHOWN: Final = 5
"""Findings of one incident that are told one by one."""
LINE_SHOWN: Final = 200
"""Characters of a log line that are shown."""
FINDINGS_MAX: Final = 100_000
"""Findings outside of incidents that are kept."""

_NO_INCIDENT: Final = "No incident."


@dataclass(slots=True)
class Account:
    """What was said so far. Incidents are kept as they were last, in the order in which they opened."""

    incidents: dict[str, Incident] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    dropped: int = 0

    def take(self, verdicts: Verdicts) -> None:
        """More was said."""
        for incident in verdicts.incidents:
            known = self.incidents.get(incident.id)
            # One that is over keeps how sure it was; that it is over is said beside it.
            self.incidents[incident.id] = incident if known is None or incident.state is not State.OVER else _ended(known, incident)
        for finding in verdicts.findings:
            if len(self.findings) < FINDINGS_MAX:
                self.findings.append(finding)
            else:
                self.dropped += 1

    @property
    def confirmed(self) -> list[Incident]:
        """Incidents that were believed."""
        return [incident for incident in self.incidents.values() if incident.state is State.CONFIRMED]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "incidents": [incident.as_dict() for incident in self.incidents.values()],
            "findings": [finding.as_dict() for finding in self.findings],
            "findings_left_out": self.dropped,
        }


def _ended(known: Incident, over: Incident) -> Incident:
    return replace(known, why_over=over.why_over, updated=over.updated)


def text(account: Account, *, seen: Mapping[str, float]) -> str:
    """The whole report.

    Args:
        account: what was said.
        seen: "seconds", "lines", "windows", "nodes", "ranks": how much there was to judge.
    """
    parts = [_head(account, seen)]
    parts += [_incident(incident) for incident in sorted(account.incidents.values(), key=lambda one: one.opened)]
    if rest := _rest(account):
        parts.append(rest)
    return "\n\n".join(parts) + "\n"


def _head(account: Account, seen: Mapping[str, float]) -> str:
    confirmed, suspected = len(account.confirmed), len(account.incidents) - len(account.confirmed)
    what = ", ".join(f"{count} {name}" for count, name in ((confirmed, "confirmed"), (suspected, "suspected")) if count)
    found = f"{_many(len(account.incidents), 'incident')}: {what}." if account.incidents else _NO_INCIDENT
    of = f"{_many(seen['nodes'], 'node')}, {_many(seen['ranks'], 'rank')}, {_many(seen['windows'], 'window')}, {_many(seen['lines'], 'line')}"
    return f"{found}  Seen: {duration(seen['seconds'])} of {of}."


def _incident(incident: Incident) -> str:
    root = incident.root
    certainty = {Certainty.CERTAIN: "certain", Certainty.STRONG: "strong evidence", Certainty.WEAK: "a statistic alone"}[incident.certainty]
    lines = [
        f"{clock(incident.opened)}  {incident.id}",
        f"  {root.summary}",
        f"  {incident.state.value}, {incident.cls.value}, {certainty}{', corroborated' if incident.corroborated else ''}"
        f"; {_where(incident)}; {_many(incident.count, 'finding')}, the last at {clock(incident.updated)}"
        + (f"; {incident.why_over}" if incident.why_over else ""),
    ]
    lines += [f"    {_feature(one)}" for one in root.features[:SHOWN]]
    if root.line:
        lines.append(f"    {_cut(root.line)}")
    others = [finding for finding in incident.findings if finding is not root]
    lines += [f"  and {one.detector} {one.kind} at {clock(one.began or one.at)}: {one.summary}" for one in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"  and {_many(len(others) - SHOWN, 'other')}")
    return "\n".join(lines)


def _where(incident: Incident) -> str:
    nodes = ", ".join(incident.nodes[:4]) + (f" and {len(incident.nodes) - 4} more" if len(incident.nodes) > 4 else "")
    ranks = incident.ranks
    told = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}" if ranks else ""
    return " on ".join(part for part in (told, nodes) if part) or "the whole job"


def _feature(feature: Feature) -> str:
    told = [f"{feature.name} {number(feature.value)}"]
    if feature.baseline is not None:
        told.append(f"usually {number(feature.baseline)}")
    if feature.peers is not None:
        told.append(f"other ranks {number(feature.peers)}")
    if feature.z is not None:
        told.append(f"{feature.z:+.1f} standard deviations")
    return ", ".join(told)


def _rest(account: Account) -> str:
    """What was found and is told of in no incident; statistics that did not come again are left out, they are what chance gives."""
    told = {(one.kind, one.node) for incident in account.incidents.values() for one in incident.findings}
    loose = [one for one in account.findings if (one.kind, one.node) not in told and (one.role is Role.ADVISE or one.certainty is not Certainty.WEAK)]
    if not loose:
        return ""
    counts = Counter(one.kind for one in loose)
    first = {one.kind: one for one in reversed(loose)}
    lines = [f"  {count:>5} x {first[kind].detector} {kind}: {_cut(first[kind].summary)}" for kind, count in counts.most_common(20)]
    return "\n".join(["Beside that, without an incident:", *lines])


# --- words ---------------------------------------------------------------------------------------------------------------


def clock(at: float) -> str:
    """A moment, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """How long, in the two largest units."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def number(value: float) -> str:
    """With four digits that count."""
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.4e}" if abs(value) >= 1e15 else f"{value:,.0f}"


def _many(count: float, what: str) -> str:
    return f"{count:,.0f} {what}{'' if count == 1 else 's'}"


def _cut(line: str) -> str:
    return line if len(line) <= LINE_SHOWN else line[: LINE_SHOWN - 1] + "…"
