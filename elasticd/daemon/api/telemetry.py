"""`GET /v1/telemetry`: how the nodes and their jobs do at this moment.

Owns: its answer, and putting those of other nodes beside this one's. Must not: measure (`telemetry` does), or speak with nodes (`peering`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from elasticd.daemon.api.answers import Answer, Envelope, EtcdAnswer, Time, envelope, one_line
from elasticd.daemon.api.bodies import JobFilter, NodeFilter
from elasticd.daemon.api.logs import READERS, Nodes, chosen
from elasticd.daemon.peering import Question
from elasticd.daemon.telemetry import Telemetry, absent
from elasticd.observability.report import JobReport
from elasticd.observability.times import rfc3339

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.gpureadings import Gpus
    from elasticd.daemon.peering import Heard, Peers

_MOST: Final = 1024 * 1024
"""Bytes that the answer of another node may have."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class HostAnswer(Answer):
    """A machine: `cpu` is the share of its processors' time since the look before, `load` that of the last minute; memory in bytes."""

    cpu: float | None
    load: _Finite
    memory_total: int
    memory_available: int


class GpuAnswer(Answer):
    """A GPU: `utilization` from 0 to 1, memory in bytes, `temperature` in degrees Celsius, `power` in watts. What is not known is null."""

    index: int
    utilization: float | None
    memory_used: int | None
    memory_total: int | None
    temperature: float | None
    power: float | None
    throttled: bool | None


class JobTelemetryAnswer(Answer):
    """A job on a node. `age`: seconds since the report; `gpus`: index of each local rank's, null where it has none; times in `report` since the epoch."""

    job: str
    age: _Finite
    gpus: tuple[int | None, ...]
    report: JobReport


class NodeTelemetryAnswer(Answer):
    """One node. With a `problem` nothing is known of it. `clock` is its time, in seconds since the epoch."""

    name: str
    problem: str
    at: Time
    clock: _Finite
    host: HostAnswer | None
    gpus: tuple[GpuAnswer, ...]
    jobs: tuple[JobTelemetryAnswer, ...]


class TelemetryAnswer(Answer):
    """All nodes that were asked, by name. `notes`: what is not shown, and why."""

    node: str
    etcd: EtcdAnswer
    nodes: tuple[NodeTelemetryAnswer, ...]
    notes: tuple[str, ...]


def telemetry_router(config: DaemonConfig, board: Board, peers: Peers, gpus: Gpus) -> APIRouter:
    """The path.

    Args:
        config: where reports are.
        board: this node.
        peers: other nodes.
        gpus: of this machine.
    """
    router = APIRouter(prefix="/v1", tags=["reading"])
    limiter = CapacityLimiter(READERS)
    own = Telemetry(config.paths.run_dir, board.node, gpus)
    told: dict[int | str, dict[str, Any]] = {200: {"model": Envelope[TelemetryAnswer]}}

    @router.get("/telemetry", responses=told)
    async def telemetry(job: JobFilter = None, node: NodeFilter = None, nodes: Nodes = "all") -> Response:
        """What agents report of their jobs, machines and GPUs; also with etcd out of reach."""
        data = await to_thread.run_sync(lambda: _answer(config, board, own, peers, job, node, nodes), limiter=limiter)
        return envelope("Telemetry", None, data)

    return router


def _answer(config: DaemonConfig, board: Board, own: Telemetry, peers: Peers, job: str | None, node: str | None, nodes: str) -> TelemetryAnswer:
    others = () if nodes == "own" or node == board.node else chosen(peers, node, board)
    notes = [f"other nodes are not shown: {peers.unable}"] if others and peers.unable else []
    parts = [own.own(job)] if node in (None, board.node) else []
    if others and not notes:
        question = Question(path="/v1/telemetry", query=lambda _: {"nodes": "own", "job": job}, read=_own_part, most=_MOST)
        parts += [_part(name, one) for name, one in peers.ask(others, question).items()]
    turn = board.turn
    etcd = {
        "reachable": not turn.etcd_problem,
        "endpoints": config.etcd.endpoints,
        "since": rfc3339(turn.etcd_since),
        "problem": turn.etcd_problem and one_line(turn.etcd_problem),
    }
    parts.sort(key=lambda part: str(part["name"]))
    return TelemetryAnswer.model_validate({"node": board.node, "etcd": etcd, "nodes": parts, "notes": notes})


def _part(name: str, heard: Heard[NodeTelemetryAnswer]) -> dict[str, Any]:
    """What a node said, believed of itself alone."""
    return absent(name, heard.problem) if heard.answer is None else {**heard.answer.model_dump(), "name": name}


def _own_part(body: bytes) -> NodeTelemetryAnswer:
    """Of another node's answer. Raises a ValueError if it is none."""
    (part,) = Envelope[TelemetryAnswer].model_validate_json(body).data.nodes
    return part
