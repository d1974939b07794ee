"""How answers look: one model for each kind, and the envelope around it.

Owns: field names, and times as RFC 3339. Must not: derive anything that `cluster` and `operations` could.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from elasticd.observability.harmless import harmless
from elasticd.observability.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticd.daemon.cluster import Happening, JobView, NodeView
    from elasticd.daemon.configuring import ConfigView, Kept
    from elasticd.daemon.operations import Change

API_VERSION = "elasticd/v1"
JSON = "application/json"

Time = Annotated[str | None, Field(description="RFC 3339 in UTC, or null if it is not known.")]
T = TypeVar("T")


class Answer(BaseModel):
    """Base of what `data` may be."""

    model_config = ConfigDict(frozen=True)


class Envelope(Answer, Generic[T]):
    """Around every answer."""

    api_version: Literal["elasticd/v1"] = Field(alias="apiVersion")
    kind: str
    revision: int | None = Field(description="etcd's, null where nothing was read there.")
    data: T


class Fault(Answer):
    """Why a request was not done."""

    code: Literal["usage", "permission", "not_running", "conflict", "refused", "not_allowed", "kv_unavailable", "internal"]
    message: str
    hint: str


class ErrorAnswer(Answer):
    """An error."""

    error: Fault


class JobNodeAnswer(Answer):
    """One node of a job."""

    name: str
    state: str
    rank: int | None
    ranks: tuple[int, ...]
    slots: int
    address: str
    incarnation: str


class JobEventAnswer(Answer):
    """One thing that happened to a job."""

    generation: int
    at: Time
    what: str
    detail: str


class JobSummary(Answer):
    """One job, without its nodes and events. `why` says why it is in that state; `reason` and `by` say what its operators last wanted, and who."""

    cluster: str
    job: str
    state: str
    why: str
    generation: int
    cause: str | None
    cause_kind: str | None
    formed_at: Time
    world_size: int
    nodes_training: int
    nodes_min: int | None
    nodes_desired: int | None
    nodes_max: int | None
    restarts_used: int
    restarts_max: int | None
    store: str | None
    coordinator: str | None
    checkpoint_step: int | None
    problems: tuple[str, ...]
    etcd: tuple[str, ...]
    run: bool | None
    paused: bool
    parameters: dict[str, bool | int | float | str]
    target_revision: int | None
    reason: str
    by: str


class JobAnswer(JobSummary):
    """One job."""

    nodes: tuple[JobNodeAnswer, ...]
    events: tuple[JobEventAnswer, ...]


class JobListAnswer(Answer):
    """All jobs, by name."""

    jobs: tuple[JobAnswer, ...]


class NodeJobAnswer(Answer):
    """One job on one node."""

    name: str
    state: str
    slots: int
    why: str


class NodeAnswer(Answer):
    """One node."""

    name: str
    state: str
    reason: str
    by: str
    at: Time
    address: str | None
    slots: int
    slots_used: int
    gpus: tuple[str, ...]
    labels: dict[str, str]
    version: str | None
    boot_id: str | None
    started_at: Time
    jobs: tuple[NodeJobAnswer, ...]
    problems: tuple[str, ...]


class NodeListAnswer(Answer):
    """All nodes, by name."""

    nodes: tuple[NodeAnswer, ...]


class EtcdAnswer(Answer):
    """How this node stands to etcd."""

    reachable: bool
    endpoints: tuple[str, ...]
    since: Time
    problem: str


class ClusterAnswer(Answer):
    """Everything at once. With etcd out of reach: no jobs, and this node as its daemon knows it."""

    cluster: str
    node: str
    version: str
    etcd: EtcdAnswer
    jobs: tuple[JobSummary, ...]
    nodes: tuple[NodeAnswer, ...]
    problems: tuple[str, ...]


class HistoryEntry(Answer):
    """What happened to a generation."""

    number: int
    at: Time
    what: str
    detail: str


class HistoryAnswer(Answer):
    """What happened to the generations of a job, oldest first."""

    generations: tuple[HistoryEntry, ...]


class EventAnswer(Answer):
    """One thing that happened."""

    id: int
    at: Time
    job: str | None
    node: str | None
    kind: Literal["generation", "audit"]
    what: str
    detail: str
    by: str | None
    generation: int | None


class EventListAnswer(Answer):
    """What happened, oldest first. `last` is to be given as `after` next time."""

    events: tuple[EventAnswer, ...]
    last: int


class SettingAnswer(Answer):
    """One setting of training on this node. `layers` is what each layer says that says something, low to high; `etcd`: it may be set there."""

    name: str
    value: bool | int | float | str | None
    origin: str
    unit: str
    layers: dict[str, bool | int | float | str]
    etcd: bool
    alike: bool


class KeptAnswer(Answer):
    """What operators have set in one key of etcd. `revision` is 0 where nobody has."""

    revision: int
    values: dict[str, bool | int | float | str]
    reason: str
    by: str
    at: Time


class ConfigAnswer(Answer):
    """The settings that count on this node; `etcd_job` is null without a job."""

    node: str
    job: str | None
    settings: tuple[SettingAnswer, ...]
    etcd_cluster: KeptAnswer
    etcd_job: KeptAnswer | None
    problems: tuple[str, ...]


class ChangeAnswer(Answer):
    """What a change did. `before` is null where nothing was, `generation` is the one that was active."""

    changed: bool
    job: str | None
    node: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    generation: int | None
    dry_run: bool


def envelope(kind: str, revision: int | None, data: Answer) -> Response:
    """An answer."""
    head = json.dumps({"apiVersion": API_VERSION, "kind": kind, "revision": revision})
    return Response(f'{head[:-1]}, "data": {data.model_dump_json()}}}'.encode(), media_type=JSON)


def error(status: int, code: str, message: str, hint: str = "") -> JSONResponse:
    """An error answer; message and hint become one line each."""
    return JSONResponse({"error": {"code": code, "message": one_line(message), "hint": one_line(hint)}}, status_code=status)


def one_line(text: str, most: int = 1000) -> str:
    """Text as it may stand in a log or a table: printable, on one line, of bounded length."""
    return harmless(text, most)


def job_summary(job: JobView, etcd: Sequence[str]) -> JobSummary:
    """One job of many."""
    return JobSummary.model_validate(_job(job, etcd))


def job_answer(job: JobView, etcd: Sequence[str]) -> JobAnswer:
    """One job."""
    return JobAnswer.model_validate(_job(job, etcd))


def _job(job: JobView, etcd: Sequence[str]) -> dict[str, Any]:
    data = dataclasses.asdict(job.status)
    data["formed_at"] = rfc3339(job.status.formed_at)
    data["events"] = [{**event, "at": rfc3339(event["at"])} for event in data["events"]]
    wanted = {name: getattr(job, name) for name in ("run", "paused", "target_revision", "reason", "by")}
    return data | wanted | {"parameters": dict(job.parameters), "etcd": tuple(etcd)}


def node_answer(node: NodeView) -> NodeAnswer:
    """One node."""
    data = {one.name: getattr(node, one.name) for one in dataclasses.fields(node)}
    jobs = [{"name": job.name, "state": job.state.value, "slots": job.slots, "why": job.why} for job in node.jobs]
    return NodeAnswer.model_validate(data | {"at": rfc3339(node.at), "started_at": rfc3339(node.started_at), "labels": dict(node.labels), "jobs": jobs})


def event_answer(one: Happening) -> EventAnswer:
    """One thing that happened."""
    return EventAnswer.model_validate(dataclasses.asdict(one) | {"at": rfc3339(one.at)})


def history_entry(one: Happening) -> HistoryEntry:
    """One thing that happened to a generation."""
    return HistoryEntry(number=one.generation or 0, at=rfc3339(one.at), what=one.what, detail=one.detail)


def config_answer(config: ConfigView, node: str) -> ConfigAnswer:
    """The settings on one node."""
    return ConfigAnswer(
        node=node,
        job=config.job,
        settings=tuple(SettingAnswer.model_validate(dataclasses.asdict(one)) for one in config.settings),
        etcd_cluster=_kept(config.cluster),
        etcd_job=_kept(config.own) if config.own else None,
        problems=config.problems,
    )


def _kept(kept: Kept) -> KeptAnswer:
    record = kept.record
    told = {"reason": record.reason, "by": record.by, "at": rfc3339(record.at)} if record else {"reason": "", "by": "", "at": None}
    return KeptAnswer.model_validate({"revision": kept.revision, "values": kept.values} | told)


def change_answer(change: Change) -> Response:
    """A change, in its envelope."""
    data = {name: getattr(change, name) for name in ("changed", "job", "node", "before", "after", "generation", "dry_run")}
    return envelope("Change", change.revision, ChangeAnswer.model_validate(data))
