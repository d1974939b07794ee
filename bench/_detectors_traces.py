"""Recorded faults of real jobs, judged by all detectors together: the half that nothing was tuned on.

Owns: what counts as found, and as cried in vain. Must not: record (`bench.faults`).

A fault is found if something that its label names was said of its rank or node after it began; an incident counts as a would-be action if it was
confirmed on evidence that is certain or held on. Times are stretched by ten, so that windows of 10 s and rules in seconds hold as they are. A recording of
100 s is 100 windows: too few for a forest to learn from, so these rows are of rules, signatures and the comparison of ranks. What is stretched is later by
ten times as much, too: words of ranks that come half a second apart in an evaluation seem to be five apart. So benign traces are judged as recorded as well.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench._common import Row, progress
from bench._faults_read import LABELS, TRACES, Trace, traces
from detectors.findings import Certainty, Finding
from detectors.incidents import Incident, State
from detectors.pipeline import Pipeline
from detectors.report import Account

SCALE: Final = 10.0
CERTAIN: Final = ("kill", "stop", "nonfinite", "xid")


def rows(data: Path | None, quick: bool) -> list[Row]:  # noqa: ARG001 - as of all parts
    if not (TRACES / LABELS).exists():
        progress("no traces are recorded yet: python -m bench.faults; their rows are left out")
        return []
    split = "tuning" if quick else "judging"
    judged = [(trace, _judged(trace)) for trace in traces(split)]
    faults = [(trace, account) for trace, account in judged if trace.label["fault"]]
    found = {trace.label["kind"]: _found(trace.label, account) for trace, account in faults}
    certain = {kind: delay for kind, delay in found.items() if kind.startswith(CERTAIN)}
    vain = [name for trace, account in judged for name in _in_vain(trace.label, account)]
    timely = [name for trace, _ in judged if not trace.label["fault"] for name in _in_vain(trace.label, _judged(trace, stretch=1.0))]
    benign = [trace for trace, _ in judged if not trace.label["fault"]]
    return [
        _share("traces_found", found),
        _share("traces_certain_found", certain),
        Row.of(
            "traces_false_actions",
            "elasticd",
            [float(len(vain))],
            unit="",
            note=f"{len(benign)} benign, {len(faults)} before their fault: {', '.join(vain) or 'none'}",
        ),
        Row.of(
            "traces_false_actions_as_recorded",
            "elasticd",
            [float(len(timely))],
            unit="",
            note=f"{len(benign)} benign, not stretched: {', '.join(timely) or 'none'}",
        ),
        *[Row.of(f"trace_{kind}_delay", "elasticd", [delay], unit="s", note=f"of {SCALE:g} s windows") for kind, delay in sorted(found.items())],
    ]


def _share(name: str, found: Mapping[str, float | None]) -> Row:
    missed = sorted(kind for kind, delay in found.items() if delay is None)
    share = (len(found) - len(missed)) / len(found) if found else None
    return Row.of(name, "elasticd", [share], unit="", note=f"of {len(found)}; not found: {', '.join(missed) or 'none'}")


def _judged(trace: Trace, *, stretch: float = SCALE) -> Account:
    account = Account()
    with trace.observations(stretch=stretch) as observed:
        for verdicts in Pipeline().over(observed):
            account.take(verdicts)
    return account


def _found(label: Mapping[str, Any], account: Account) -> float | None:
    """Seconds from the fault to the first word of it, None if there was none."""
    began = label["started"] + SCALE * (label["began"] - label["started"])
    words = [finding.at - began for finding in account.findings if finding.at >= began - SCALE and _says(label, finding)]
    return max(0.0, min(words)) if words else None


def _says(label: Mapping[str, Any], finding: Finding) -> bool:
    if not any(fnmatch.fnmatch(finding.kind, pattern) for pattern in label["says"]):
        return False
    if finding.scope == "job" or label["scope"] == "job":
        return True
    return finding.rank == label["rank"] if finding.scope == "rank" and label["rank"] is not None else finding.node in ("", label["node"])


def _in_vain(label: Mapping[str, Any], account: Account) -> Sequence[str]:
    """Would-be actions that nothing called for: in benign traces all, else those from before the fault."""
    began = label["started"] + SCALE * (label["began"] - label["started"]) if label["fault"] else float("inf")
    return [f"{label['kind']}: {one.root.kind}" for one in account.incidents.values() if _would_act(one) and _first_told(account, one) < began - SCALE]


def _first_told(account: Account, incident: Incident) -> float:
    """When it was first said. An incident's own time is that since when it is believed to be so, which is estimated."""
    root = incident.root
    return min((one.at for one in account.findings if (one.kind, one.node, one.rank) == (root.kind, root.node, root.rank)), default=incident.updated)


def _would_act(incident: Incident) -> bool:
    """As the policy has it: nothing is done about a stall, which an evaluation that nobody announced looks like."""
    return incident.root.kind != "stalled" and incident.state is State.CONFIRMED and incident.certainty in (Certainty.CERTAIN, Certainty.STRONG)
