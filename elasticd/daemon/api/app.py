"""The application: each path of docs/api.md, and what each error is answered with.

Owns: paths, and the table of errors. Must not: decide, interpret, or know how connections come in (`server`).

Paths that ask etcd are plain functions, run by a few threads, so that an etcd that hangs holds up neither health nor metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from elasticd import __version__, errors
from elasticd.daemon.api import answers
from elasticd.daemon.api.access import Access
from elasticd.daemon.api.anomalies import anomalies_router
from elasticd.daemon.api.answers import Envelope, change_answer, config_answer, envelope, job_answer, job_summary, node_answer
from elasticd.daemon.api.bodies import After, ConfigBody, IncidentName, JobFilter, JobName, MayReason, MustReason, NodeFilter, NodeName, ScaleBody, StartBody
from elasticd.daemon.api.exposition import Exposition
from elasticd.daemon.api.gate import Gate
from elasticd.daemon.api.logs import logs_router
from elasticd.daemon.api.telemetry import telemetry_router
from elasticd.daemon.audit import Caller
from elasticd.daemon.cluster import ClusterReader, ClusterView, own_node
from elasticd.daemon.configuring import ConfigReader
from elasticd.daemon.peering import Peers
from elasticd.daemon.telemetry import REPORTS
from elasticd.daemon.verdicts import Verdicts
from elasticd.observability.times import rfc3339
from elasticd.policy.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.gpureadings import Gpus
    from elasticd.daemon.operations import Operations

ERRORS: Final[tuple[tuple[type[errors.ElasticdError], int, str], ...]] = (
    (errors.UsageError, 400, "usage"),
    (errors.AccessDeniedError, 403, "permission"),
    (errors.KVPermissionError, 403, "permission"),
    (errors.NotRunningError, 404, "not_running"),
    (errors.NotAllowedError, 404, "not_allowed"),
    (errors.ConflictError, 409, "conflict"),
    (errors.RefusedError, 403, "refused"),
    (errors.KVUnavailableError, 503, "kv_unavailable"),
    (errors.LeaseLostError, 503, "kv_unavailable"),
    (errors.KVClosedError, 503, "kv_unavailable"),
)
"""What each error is answered with; any other is a fault of ours."""
_FRAMEWORK: Final = {404: "not_running", 405: "usage"}


def make_app(
    operations: Operations, board: Board, config: DaemonConfig, registry: CollectorRegistry, gpus: Gpus, detecting: Detecting | None = None
) -> FastAPI:
    """The API of one daemon.

    Args:
        operations: makes the changes, and knows the connection to read by.
        board: what the decision loop says of itself.
        config: names of the cluster and of the groups that may ask.
        registry: what /metrics shows.
        gpus: of this machine.
        detecting: the detectors of this node, if it has any.
    """
    app = FastAPI(title="elasticd node API", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json", redirect_slashes=False)
    documented: dict[int | str, dict[str, Any]] = {code: {"model": answers.ErrorAnswer} for code in (400, 403, 404, 405, 409, 422, 500, 503)}
    reader = ClusterReader(operations.kv, operations.keys, board)
    app.include_router(_reading(reader, board, config), responses=documented)
    peers = Peers(config, operations.kv, board)
    app.include_router(logs_router(config, board, reader, peers), responses=documented)
    app.include_router(telemetry_router(config, board, peers, gpus), responses=documented)
    verdicts = Verdicts(operations.kv, operations.keys, Settings.from_dict(config.policy), config.paths.run_dir / REPORTS)
    app.include_router(anomalies_router(board, peers, detecting, verdicts), responses=documented)
    app.include_router(_settings(ConfigReader(operations.kv, operations.keys, board, reader), board), responses=documented)
    app.include_router(_changing(operations), responses=documented)
    app.include_router(_configuring(operations), responses=documented)
    app.include_router(_health(board, registry))
    app.add_exception_handler(errors.ElasticdError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_middleware(Gate, access=Access(readers=config.api.readers, operators=config.api.operators))
    _prepare(app)
    return app


def _prepare(app: FastAPI) -> None:
    """FastAPI makes its routes ready when the first request looks through them: a second on a busy machine, which a peer does not wait."""
    nowhere = {"type": "http", "method": "GET", "path": "/-", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches(nowhere)


# --- reading -------------------------------------------------------------------------------------------------------------


def _reading(reader: ClusterReader, board: Board, config: DaemonConfig) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["reading"])
    endpoints = config.etcd.endpoints

    @router.get("/status", responses=_told(answers.ClusterAnswer))
    def status() -> Response:
        """Everything at once; also with etcd out of reach."""
        view: ClusterView | None = None
        problem = ""
        try:
            view = reader.cluster()
        except errors.KVUnavailableError as error:
            problem = error.message
        return envelope("ClusterStatus", view.revision if view else None, _cluster(view, problem, board, config))

    @router.get("/jobs", responses=_told(answers.JobListAnswer))
    def jobs() -> Response:
        """Jobs that are known in etcd, or allowed on any node that is up."""
        view = reader.cluster()
        return envelope("JobStatusList", view.revision, answers.JobListAnswer(jobs=tuple(job_answer(job, endpoints) for job in view.jobs)))

    @router.get("/jobs/{job}", responses=_told(answers.JobAnswer))
    def job(job: JobName) -> Response:
        """One job."""
        view = reader.job(job)
        return envelope("JobStatus", view.status.revision, job_answer(view, endpoints))

    @router.get("/jobs/{job}/history", responses=_told(answers.HistoryAnswer))
    def history(job: JobName) -> Response:
        """What happened to each generation, as far as the ring goes back."""
        found, revision = reader.history(job)
        return envelope("History", revision, answers.HistoryAnswer(generations=tuple(answers.history_entry(one) for one in found)))

    @router.get("/nodes", responses=_told(answers.NodeListAnswer))
    def nodes() -> Response:
        """All nodes."""
        view = reader.cluster()
        return envelope("NodeStatusList", view.revision, answers.NodeListAnswer(nodes=tuple(node_answer(node) for node in view.nodes)))

    @router.get("/nodes/{node}", responses=_told(answers.NodeAnswer))
    def node(node: NodeName) -> Response:
        """One node."""
        view, revision = reader.node(node)
        return envelope("NodeStatus", revision, node_answer(view))

    @router.get("/events", responses=_told(answers.EventListAnswer))
    def events(job: JobFilter = None, node: NodeFilter = None, after: After = 0) -> Response:
        """What happened to jobs, and what operators changed."""
        found, last, revision = reader.happenings(job=job, node=node, after=after)
        return envelope("EventList", revision, answers.EventListAnswer(events=tuple(answers.event_answer(one) for one in found), last=last))

    return router


def _settings(reader: ConfigReader, board: Board) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["reading"], responses=_told(answers.ConfigAnswer))

    @router.get("/config")
    def config() -> Response:
        """The settings of training on this node, for a job that says nothing itself."""
        return told(None)

    @router.get("/config/{job}")
    def job_config(job: JobName) -> Response:
        """The same for one job."""
        return told(job)

    def told(job: str | None) -> Response:
        view = reader.show(job)
        return envelope("Config", view.revision, config_answer(view, board.node))

    return router


def _cluster(view: ClusterView | None, problem: str, board: Board, config: DaemonConfig) -> answers.ClusterAnswer:
    turn = board.turn
    etcd = answers.EtcdAnswer(
        reachable=view is not None, endpoints=config.etcd.endpoints, since=rfc3339(turn.etcd_since), problem=problem and answers.one_line(problem)
    )
    return answers.ClusterAnswer(
        cluster=config.cluster,
        node=board.node,
        version=__version__,
        etcd=etcd,
        jobs=tuple(job_summary(job, config.etcd.endpoints) for job in view.jobs) if view else (),
        nodes=tuple(node_answer(node) for node in (view.nodes if view else (own_node(board),))),
        problems=view.problems if view else (),
    )


# --- changing ------------------------------------------------------------------------------------------------------------


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller  # the gate's; without one this fails, and nothing is changed
    return caller


Asking = Annotated[Caller, Depends(_caller)]


def _changing(operations: Operations) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["changing"], responses=_told(answers.ChangeAnswer))

    @router.post("/jobs/{job}/start")
    def start(job: JobName, caller: Asking, body: StartBody | None = None) -> Response:
        """The job is to run."""
        return change_answer(operations.start(caller, job, **dict(body or StartBody())))

    @router.post("/jobs/{job}/stop")
    def stop(job: JobName, caller: Asking, body: MayReason | None = None) -> Response:
        """It is to stop in order."""
        return change_answer(operations.stop(caller, job, **dict(body or MayReason())))

    @router.post("/jobs/{job}/scale")
    def scale(job: JobName, caller: Asking, body: ScaleBody) -> Response:
        """So many nodes are wanted."""
        return change_answer(operations.scale(caller, job, **dict(body)))

    @router.post("/jobs/{job}/pause")
    def pause(job: JobName, caller: Asking, body: MustReason) -> Response:
        """Nothing is changed of free will; recovery goes on."""
        return change_answer(operations.pause(caller, job, **dict(body)))

    @router.post("/jobs/{job}/resume")
    def resume(job: JobName, caller: Asking, body: MayReason | None = None) -> Response:
        """As usual again."""
        return change_answer(operations.resume(caller, job, **dict(body or MayReason())))

    @router.post("/jobs/{job}/checkpoint")
    def checkpoint(job: JobName, caller: Asking, body: MayReason | None = None) -> Response:
        """Asks the workers for a checkpoint."""
        return change_answer(operations.checkpoint(caller, job, **dict(body or MayReason())))

    @router.post("/jobs/{job}/restart")
    def restart(job: JobName, caller: Asking, body: MustReason) -> Response:
        """An agreed stop, then the next generation."""
        return change_answer(operations.restart(caller, job, **dict(body)))

    @router.post("/jobs/{job}/incidents/{incident}/ack")
    def acknowledge(job: JobName, incident: IncidentName, caller: Asking, body: MayReason | None = None) -> Response:
        """Somebody sees to it: nothing more is done about it of free will, and nobody is alerted."""
        return change_answer(operations.acknowledge(caller, job, incident, **dict(body or MayReason())))

    @router.post("/nodes/{node}/cordon")
    def cordon(node: NodeName, caller: Asking, body: MustReason) -> Response:
        """Nothing new is started there."""
        return change_answer(operations.cordon(caller, node, **dict(body)))

    @router.post("/nodes/{node}/drain")
    def drain(node: NodeName, caller: Asking, body: MustReason) -> Response:
        """Its agents leave their jobs, then it is kept out."""
        return change_answer(operations.drain(caller, node, **dict(body)))

    @router.post("/nodes/{node}/uncordon")
    def uncordon(node: NodeName, caller: Asking, body: MayReason | None = None) -> Response:
        """As usual again, after both."""
        return change_answer(operations.uncordon(caller, node, **dict(body or MayReason())))

    return router


def _configuring(operations: Operations) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["changing"], responses=_told(answers.ChangeAnswer))

    @router.post("/config")
    def configure(caller: Asking, body: ConfigBody) -> Response:
        """Settings of training for all jobs, from the next generation of each on."""
        return change_answer(operations.configure(caller, None, **dict(body)))

    @router.post("/config/{job}")
    def configure_job(job: JobName, caller: Asking, body: ConfigBody) -> Response:
        """Settings of training for one job, above those for all."""
        return change_answer(operations.configure(caller, job, **dict(body)))

    return router


# --- health and metrics --------------------------------------------------------------------------------------------------


def _health(board: Board, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter(tags=["health"], default_response_class=PlainTextResponse)

    @router.get("/healthz")
    async def healthz() -> Response:
        """The process serves."""
        return PlainTextResponse("ok\n")

    @router.get("/livez", responses={503: {"description": "The decision loop has not turned for too long."}})
    async def livez() -> Response:
        """The decision loop turns."""
        return _verdict(board.stuck)

    @router.get("/readyz", responses={503: {"description": "This node does not serve the cluster; the text says why."}})
    async def readyz() -> Response:
        """This node serves the cluster."""
        return _verdict(board.unready)

    exposition = Exposition(registry)

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        return await exposition.answer(request.headers.get("accept-encoding", ""))

    return router


def _verdict(problem: str) -> Response:
    return PlainTextResponse(f"{answers.one_line(problem)}\n", status_code=503) if problem else PlainTextResponse("ok\n")


# --- errors --------------------------------------------------------------------------------------------------------------


def _told(model: type[answers.Answer]) -> dict[int | str, dict[str, Any]]:
    """What a path answers with, for the OpenAPI document; nothing is validated on its way out."""
    return {200: {"model": Envelope[model]}}  # type: ignore[valid-type]  # made for the document at run time


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.ElasticdError)
    for kind, status, code in ERRORS:
        if isinstance(error, kind):
            return answers.error(status, code, error.message, error.remedy)
    raise error  # the gate's: logged, and nothing of it shown


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    place = ".".join(str(part)[:100] for part in found[0]["loc"])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return answers.error(422, "usage", f"{place}: {str(found[0]['msg']).removeprefix('Value error, ')}{more}", "docs: GET /openapi.json")


async def _on_http(request: Request, error: Exception) -> Response:
    """The framework's own."""
    assert isinstance(error, HTTPException)
    code = _FRAMEWORK.get(error.status_code, "usage")
    what = {404: f"there is no path {request.url.path[:200]!r}", 405: f"{request.url.path[:200]!r} knows no method {request.method[:20]}"}
    response = answers.error(error.status_code, code, what.get(error.status_code, str(error.detail)), "docs: GET /openapi.json")
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
