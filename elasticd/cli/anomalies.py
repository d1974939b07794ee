"""What the detectors found, why they say so, and what is done about it: `elasticctl anomalies`, `explain`, `ack`.

Owns: what is asked, how it looks, and following. Must not: judge.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from elasticd.cli.asking import Document, Manner, put
from elasticd.cli.failures import one_line, say
from elasticd.errors import DaemonUnavailableError, KVUnavailableError, NotRunningError, UsageError

EVERY: Final = 1.0
"""Seconds between two questions of `-f`."""
FEATURES: Final = 8


def anomalies(job: str | None, manner: Manner, *, lines: bool, follow: bool, everything: bool) -> None:
    """Incidents of all nodes, the oldest first; with `follow` also those that come, until somebody interrupts.

    Args:
        job: only of this one.
        manner: how to ask and to answer.
        lines: one JSON object for each incident instead of one for all.
        follow: go on. Nodes that do not answer are told of on stderr, once.
        everything: suspicions too, and what is over.
    """
    client = manner.client()
    envelope = client.get("/v1/anomalies", job=job)
    data = envelope["data"]
    if manner.as_json and not (lines or follow):
        put(envelope)
        return
    voice = _Voice(as_json=lines or manner.as_json)
    told: dict[tuple[str, str], tuple[Any, ...]] = {}
    voice.blind(data)
    fresh = list(_fresh(data, told, everything=everything))
    voice.incidents(fresh)
    if not follow and not voice.as_json:
        if not fresh:
            print("nothing was found" if not everything else "nothing was ever found")
        for line in _came_of(data):
            print(line)
    while follow:
        time.sleep(EVERY)
        try:
            data = client.get("/v1/anomalies", job=job)["data"]
        except (DaemonUnavailableError, KVUnavailableError) as error:
            voice.away(error)
            continue
        voice.blind(data)
        voice.incidents(_fresh(data, told, everything=everything))


def explain(name: str, manner: Manner) -> None:
    """All that an incident rests on.

    Raises:
        NotRunningError: no node knows one of that name.
    """
    data = manner.client().get("/v1/anomalies")["data"]
    jobs = _jobs_of(data, name)
    found = [one for one in data["incidents"] if one["id"] == name]
    if manner.as_json:
        decided = [one for policy in data["policies"] for one in policy["decisions"] if one["about"] == name]
        put({"apiVersion": "elasticd/v1", "kind": "IncidentList", "revision": None, "data": {"incidents": found, "decisions": decided}})
        return
    parts = ["\n".join([*_explained(one), *_done_about(data, one["job"], name)]) for one in found]
    if not found:  # its detectors are gone, what was decided is not
        parts = ["\n".join([name, *_done_about(data, job, name)]) for job in jobs]
    print("\n\n".join(parts))


def acknowledge(name: str, job: str | None, reason: str, manner: Manner) -> None:
    """Say that somebody sees to an incident.

    Raises:
        NotRunningError: no node knows one of that name.
        UsageError: several jobs have one.
    """
    client = manner.client()
    if job is None:
        jobs = _jobs_of(client.get("/v1/anomalies")["data"], name)
        if len(jobs) > 1:
            raise UsageError(f"jobs {', '.join(jobs)} each have an incident {name!r}", remedy="say which with --job")
        (job,) = jobs
    envelope = client.post(f"/v1/jobs/{job}/incidents/{name}/ack", {"reason": reason})
    if manner.as_json:
        put(envelope)
    elif envelope["data"]["changed"]:
        print(f"{name}: nothing more is done about it of free will, and nobody is alerted")
    else:
        print(f"{name} was acknowledged before, by {envelope['data']['before']['acknowledged']}")


def _jobs_of(data: Document, name: str) -> list[str]:
    """Jobs that have an incident of that name, or about whose one something was decided.

    Raises:
        NotRunningError: none has.
    """
    jobs = {one["job"] for one in data["incidents"] if one["id"] == name}
    jobs |= {policy["job"] for policy in data["policies"] if any(one["about"] == name for one in policy["decisions"])}
    if not jobs:
        raise NotRunningError(f"no node knows an incident {name!r}", remedy="see: elasticctl anomalies --all")
    return sorted(jobs)


def _came_of(data: Document) -> Iterator[str]:
    """What was done so far, and what is held back, job by job."""
    for policy in data["policies"]:
        for sentence in policy["came_of"]:
            yield one_line(f"{policy['job']}: {sentence}")
        if policy["held"]:
            yield one_line(f"{policy['job']}: no checkpoint is committed until its state is known to be good")
        if policy["problem"]:
            yield one_line(f"{policy['job']}: {policy['problem']}")


def _done_about(data: Document, job: str, name: str) -> Iterator[str]:
    """What was decided about an incident, the oldest first."""
    policy = next((one for one in data["policies"] if one["job"] == job), None)
    if policy is None:
        yield "  decided    nothing"
        return
    for one in (one for one in policy["decisions"] if one["about"] == name):
        did = one["action"] if one["action"] != "log" else "nothing"
        would = f" (mode {policy['mode']}: would {one['would']})" if one["would"] != one["action"] else ""
        yield _in(f"decided    {did}{would} at {_clock(one['at'])}, rule {one['rule']}: {one['why']}")
        if one["numbers"]:
            yield _deep(", ".join(f"{key} {_number(value)}" for key, value in one["numbers"].items()))
        if one["came_to"]:
            yield _deep(one["came_to"])
        if one["until"] is not None:
            yield _deep(f"{one['node']} comes back at {_clock(one['until'])}")
    if name in policy["acks"]:
        yield _in(f"known to   {policy['acks'][name]}")


def _fresh(data: Document, told: dict[tuple[str, str], tuple[Any, ...]], *, everything: bool) -> Iterator[Document]:
    """Those that were not told of as they are now. What several nodes see is told by the first."""
    seen: set[str] = set()
    for incident in data["incidents"]:
        key = (incident["job"], incident["id"])
        shown = everything or incident["state"] == "confirmed"
        if not shown or incident["id"] in seen:
            continue
        seen.add(incident["id"])
        standing = (incident["state"], incident["root"]["kind"], incident["root"]["rank"], incident["corroborated"])
        if told.get(key) != standing:
            told[key] = standing
            yield incident


class _Voice:
    """How it is said."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._blind: frozenset[str] = frozenset()
        self._away = False

    def incidents(self, found: Sequence[Document] | Iterator[Document]) -> None:
        for incident in found:
            print(json.dumps(incident) if self.as_json else _line(incident), flush=True)

    def blind(self, data: Document) -> None:
        """Nodes whose detectors see nothing, once each, and again when that changes."""
        self._away = False
        problems = frozenset(f"{one['node']}: {one['problem']}" for one in data["detectors"] if one["problem"]) | frozenset(data["notes"])
        for problem in sorted(problems - self._blind):
            self._note(problem)
        self._blind = problems

    def away(self, error: DaemonUnavailableError | KVUnavailableError) -> None:
        if not self._away:
            say(error, as_json=self.as_json)
        self._away = True

    def _note(self, text: str) -> None:
        print(json.dumps({"note": text}) if self.as_json else f"elasticctl: {one_line(text)}", file=sys.stderr, flush=True)


def _line(incident: Document) -> str:
    root = incident["root"]
    where = ", ".join([*incident["nodes"][:3], *(["…"] if len(incident["nodes"]) > 3 else [])]) or "the whole job"
    return one_line(
        f"{_clock(incident['opened'])}  {incident['job']}  {incident['state']:9}  {incident['cls']:9}  {where}: {root['summary']}  ({incident['id']})"
    )


def _explained(incident: Document) -> Iterator[str]:
    root = incident["root"]
    ranks = ", ".join(map(str, incident["ranks"])) or "none by itself"
    yield one_line(f"{incident['id']}: {root['summary']}")
    yield _in(f"state      {incident['state']}" + (f": {incident['why_over']}" if incident["why_over"] else ""))
    yield f"  evidence   {_EVIDENCE.get(incident['certainty'], incident['certainty'])}" + (", of more than one detector" if incident["corroborated"] else "")
    yield f"  class      {_CLASS.get(incident['cls'], incident['cls'])}"
    yield _in(f"where      job {incident['job']}, nodes {', '.join(incident['nodes']) or 'all'}, ranks {ranks}; seen by {incident['seen_by']}")
    yield f"  when       {_clock(incident['opened'])} to {_clock(incident['updated'])}, {incident['count']} findings"
    for finding in [root, *(one for one in incident["findings"] if one != root)]:
        yield _in(
            f"{'root' if finding == root else 'with'}       {finding['detector']} {finding['kind']} at {_clock(finding['at'])}: {finding['summary']}"
        )
        for feature in finding["features"][:FEATURES]:
            yield _deep(_feature(feature))
        if finding["line"]:
            yield _deep(finding["line"])


_EVIDENCE: Final = {"certain": "certain", "strong": "a comparison that held on", "weak": "a statistic alone"}
_CLASS: Final = {
    "transient": "transient: a restart on the same nodes helps",
    "hardware": "hardware: go on without the node",
    "user": "code, data or configuration: a restart ends the same way",
    "cascade": "follows from something else",
    "advise": "worth knowing",
    "unknown": "unknown",
}


def _in(text: str) -> str:
    """One line of what belongs to an incident."""
    return f"  {one_line(text)}"


def _deep(text: str) -> str:
    """One line of what belongs to such a line."""
    return f"{' ' * 15}{one_line(text)}"


def _feature(feature: Document) -> str:
    told = [f"{feature['name']} {_number(feature['value'])}"]
    if feature["baseline"] is not None:
        told.append(f"usually {_number(feature['baseline'])}")
    if feature["peers"] is not None:
        told.append(f"other ranks {_number(feature['peers'])}")
    if feature["z"] is not None:
        told.append(f"{feature['z']:+.1f} standard deviations")
    return ", ".join(told)


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def _clock(at: float) -> str:
    from elasticd.cli.render import clock_text

    return clock_text(at)
