"""`GET /v1/anomalies`: what the detectors of the nodes have found, and what was done about it.

Owns: its answer, and putting those of other nodes beside this one's. Must not: judge (`detectors` and `policy` do), or speak with nodes (`peering`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from elasticd.daemon.api.answers import Answer, Envelope, envelope
from elasticd.daemon.api.bodies import JobFilter, NodeFilter
from elasticd.daemon.api.logs import READERS, Nodes, chosen
from elasticd.daemon.peering import Question

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.peering import Heard, Peers
    from elasticd.daemon.verdicts import Verdicts

_MOST: Final = 8 * 1024 * 1024
"""Bytes that the answer of another node may have."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class FeatureAnswer(Answer):
    """A number that a finding rests on: as it is, as it usually is, as other ranks have it, and how far from usual in standard deviations."""

    name: str
    value: _Finite
    baseline: _Finite | None = None
    peers: _Finite | None = None
    z: _Finite | None = None


class FindingAnswer(Answer):
    """What one detector found. Times in seconds since the epoch."""

    at: _Finite
    detector: str
    kind: str
    summary: str
    cls: str
    role: str
    certainty: str
    scope: str
    node: str = ""
    rank: int | None = None
    generation: int | None = None
    features: tuple[FeatureAnswer, ...] = ()
    line: str = ""
    began: _Finite | None = None


class IncidentAnswer(Answer):
    """Findings that are one thing. `seen_by` is the node whose detectors say so."""

    id: str
    job: str
    seen_by: str
    state: str
    root: FindingAnswer
    findings: tuple[FindingAnswer, ...]
    count: int
    opened: _Finite
    updated: _Finite
    corroborated: bool
    why_over: str
    cls: str
    certainty: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]


class DetectorAnswer(Answer):
    """The detectors of one node. `problem`: why they see nothing, or why it is not known; "" if all is well."""

    node: str
    running: bool
    restarts: int
    rss: int
    jobs: dict[str, dict[str, Any]]
    problem: str


class DecisionAnswer(Answer):
    """What was decided about an incident: what is done, what would be in mode "act", what the evidence and the costs ask for, why, and what it came to."""

    about: str
    at: _Finite
    action: str
    would: str
    wanted: str
    rule: str
    why: str
    node: str = ""
    ranks: tuple[int, ...] = ()
    numbers: dict[str, _Finite] = Field(default_factory=dict)
    alert: bool = False
    until: _Finite | None = None
    came_to: str = ""


class BudgetAnswer(Answer):
    """Stops of free will in the last hour and day, and how many there may be; `certain_`: whatever the evidence."""

    hour: int
    hour_most: int
    day: int
    day_most: int
    certain_hour: int
    certain_hour_most: int
    certain_day: int
    certain_day_most: int


class PolicyAnswer(Answer):
    """What was decided about one job. `held`: no checkpoint is committed, the state may be bad. `came_of`: what was done so far, and what followed."""

    job: str
    mode: str
    held: bool
    decisions: tuple[DecisionAnswer, ...]
    came_of: tuple[str, ...]
    acks: dict[str, str]
    budget: BudgetAnswer | None
    problem: str


class AnomaliesAnswer(Answer):
    """Incidents of all nodes that were asked, the oldest first. `notes`: what is not shown, and why."""

    node: str
    detectors: tuple[DetectorAnswer, ...]
    incidents: tuple[IncidentAnswer, ...]
    policies: tuple[PolicyAnswer, ...] = ()
    notes: tuple[str, ...]


def anomalies_router(board: Board, peers: Peers, detecting: Detecting | None, verdicts: Verdicts) -> APIRouter:
    """The path.

    Args:
        board: this node.
        peers: other nodes.
        detecting: the detectors of this node, if it has any.
        verdicts: what was decided.
    """
    router = APIRouter(prefix="/v1", tags=["reading"])
    limiter = CapacityLimiter(READERS)
    told: dict[int | str, dict[str, Any]] = {200: {"model": Envelope[AnomaliesAnswer]}}

    @router.get("/anomalies", responses=told)
    async def anomalies(job: JobFilter = None, node: NodeFilter = None, nodes: Nodes = "all") -> Response:
        """What the detectors have found in logs and numbers; also with etcd out of reach."""
        data = await to_thread.run_sync(lambda: _answer(board, detecting, peers, verdicts, job, node, nodes), limiter=limiter)
        return envelope("Anomalies", None, data)

    return router


def _answer(
    board: Board, detecting: Detecting | None, peers: Peers, verdicts: Verdicts, job: str | None, node: str | None, nodes: str
) -> AnomaliesAnswer:
    others = () if nodes == "own" or node == board.node else chosen(peers, node, board)
    notes = [f"other nodes are not shown: {peers.unable}"] if others and peers.unable else []
    detectors: list[dict[str, Any]] = []
    incidents: list[dict[str, Any]] = []
    if node in (None, board.node):
        detectors.append(_own(board.node, detecting))
        incidents += _incidents(board, detecting, job)
    if others and not notes:
        question = Question(path="/v1/anomalies", query=lambda _: {"nodes": "own", "job": job}, read=_read, most=_MOST)
        for name, heard in peers.ask(others, question).items():
            detectors.append(_of(name, heard))
            incidents += [{**one.model_dump(), "seen_by": name} for one in heard.answer.incidents] if heard.answer else []
    detectors.sort(key=lambda one: str(one["node"]))
    incidents.sort(key=lambda one: float(one["opened"]))
    policies: list[dict[str, Any]] = []
    if nodes != "own":
        jobs = {job} if job is not None else {*board.turn.allowed, *(str(one["job"]) for one in incidents)}
        known = board.turn.etcd_problem or verdicts.known(jobs)  # an etcd that is known to be away is not waited for
        if isinstance(known, str):
            notes.append(f"what was decided is not shown: {known}")
        else:
            policies += [asdict(one) for one in known]
    return AnomaliesAnswer.model_validate(
        {"node": board.node, "detectors": detectors, "incidents": incidents, "policies": policies, "notes": notes}
    )


def _own(node: str, detecting: Detecting | None) -> dict[str, Any]:
    if detecting is None:
        return {"node": node, "running": False, "restarts": 0, "rss": 0, "jobs": {}, "problem": "this node has no detectors: [detectors] of elasticd.toml"}
    pulse = detecting.pulse
    problem = pulse.problem or ("" if pulse.alive else "it does not answer")
    return {"node": node, "running": pulse.alive, "restarts": pulse.restarts, "rss": pulse.rss, "jobs": pulse.jobs, "problem": problem}


def _incidents(board: Board, detecting: Detecting | None, job: str | None) -> list[dict[str, Any]]:
    if detecting is None:
        return []
    jobs = [job] if job is not None else list(detecting.jobs)
    return [{**incident, "job": name, "seen_by": board.node} for name in jobs for incident in detecting.incidents(name)]


def _of(name: str, heard: Heard[AnomaliesAnswer]) -> dict[str, Any]:
    """What a node said of its detectors, believed of itself alone."""
    if heard.answer is None or not heard.answer.detectors:
        return {"node": name, "running": False, "restarts": 0, "rss": 0, "jobs": {}, "problem": heard.problem or "it says nothing of its detectors"}
    return {**heard.answer.detectors[0].model_dump(), "node": name}


def _read(body: bytes) -> AnomaliesAnswer:
    """Another node's answer. Raises a ValueError if it is none."""
    return Envelope[AnomaliesAnswer].model_validate_json(body).data
