"""What the values in etcd hold: one model per kind of key, JSON, each with a schema version.

Owns: the schemas, and refusing what does not fit them. Must not: know revisions (that is `view`) or decide anything.
Unknown fields are refused, so that a newer writer is noticed rather than half understood.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from elasticd.errors import RecordError

MAX_BYTES: Final = 64 * 1024
"""Largest value believed, but for the two that name every member."""
MAX_BYTES_WORLD: Final = 1024 * 1024
"""Largest proposal or generation believed; 1,000 members need about 150 KiB."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
"""As `keys.checked_name` has it: a part of a key, fit for a log line."""
TEXT_MAX: Final = 2000
"""Longest text in a record, in characters."""
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Port = Annotated[int, Field(ge=1, le=65535)]
Number = Annotated[int, Field(ge=0, lt=2**53)]
Digest = Annotated[str, Field(max_length=128)]
INVENTORY_MAX: Final = 64
"""Most states that a member's key names."""
LOST_MAX: Final = 16
"""Most digests that a member's key declares lost."""
PARTS_MAX: Final = 8
"""Most parts of a fingerprint."""
VOID_MAX: Final = 8
"""Most stretches of a job's past that are void; the oldest is forgotten."""
DECISIONS_MAX: Final = 24
"""Most decisions that a job's policy key tells of."""
ACKS_MAX: Final = 64
"""Most incidents of which it is remembered that an operator knows them."""
INCIDENTS_MAX: Final = 8
"""Most incidents that one node tells of for one job."""
ENDS_MAX: Final = 4
"""Most ends of workers that a member tells of: the first ones."""
ERROR_MAX: Final = 500
"""Longest error of a worker that is told, in characters."""
LEFT_OUT_MAX: Final = 64
"""Most agents that are remembered as left out."""


class Record(BaseModel):
    """Base of every value: frozen, strict about unknown fields, tied to one job by `scope` ("cluster/job")."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    v: Literal[1] = 1
    scope: Annotated[str, Field(max_length=300)]

    def to_bytes(self) -> bytes:
        """Encode as compact JSON."""
        return self.model_dump_json(exclude_defaults=False).encode()


class Part(BaseModel):
    """Base of what records are made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MemberId(Part):
    """A member is a node and one agent process on it; a restarted agent is somebody else."""

    node: Name
    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]

    def __str__(self) -> str:
        return f"{self.node}/{self.incarnation[:8]}"

    # Pydantic's own two go over the fields in a loop, and every decision compares each member with each list of members.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemberId) and self.incarnation == other.incarnation and self.node == other.node

    def __hash__(self) -> int:
        return hash((self.incarnation, self.node))


class Result(StrEnum):
    """How a member's workers of one generation ended."""

    FINISHED = "finished"  # every worker returned 0
    FAILED = "failed"  # one ended otherwise, by itself


class WorkerExit(Part):
    """How one worker ended, before anybody stopped it.

    Attributes:
        code: exit code as subprocess gives it, -9 for SIGKILL.
        exception: first line of the error that it left, "" if it left none.
        message: that error's last line, where there is another one.
        at: when its agent saw it, seconds since the epoch.
    """

    rank: Number
    code: Annotated[int, Field(ge=-1024, le=1024)]
    exception: Annotated[str, Field(max_length=ERROR_MAX)] = ""
    message: Annotated[str, Field(max_length=ERROR_MAX)] = ""
    at: float = 0.0


class Outcome(Part):
    """How a member's workers ended, and in which generation. `detail` names the first failing rank and its error.

    Attributes:
        ends: of its workers, those that nobody stopped.
        step: how far they had come; None if they do not tell.
    """

    generation: Number
    result: Result
    detail: Text = ""
    ends: Annotated[tuple[WorkerExit, ...], Field(max_length=ENDS_MAX)] = ()
    step: Number | None = None


class SnapshotRef(Part):
    """A state that a node holds whole, by what is in it. States are ordered by generation, then by step (PROTOCOL 21)."""

    generation: Number
    step: Number
    digest: Digest

    @property
    def order(self) -> tuple[int, int]:
        """What states are ordered by."""
        return self.generation, self.step


class ResumePoint(SnapshotRef):
    """The one state that every member of a generation begins with, and the nodes that can give it to the others (PROTOCOL 22)."""

    holders: tuple[Name, ...] = ()


class Void(Part):
    """A stretch of a job's past that no generation begins with again: states of `generation` from `step` on.

    Attributes:
        until: the step at which it was left; where `skip`, the data of the steps up to it are not trained on again.
        skip: whether they are not.
    """

    generation: Number
    step: Number
    until: Number
    skip: bool = False


class MemberRecord(Record):
    """`members/<node>`: one agent, under its lease.

    Attributes:
        address: where its peers reach it.
        slots: workers it runs.
        stopped: the highest generation whose workers it has stopped for good (PROTOCOL 3).
        store_port: a listening socket it holds for the next generation's TCPStore.
        probe_port: where it answers echoes.
        unreachable: incarnations it could not reach after a failed generation.
        leaving: it asks to be left out; it stays until others have formed without it.
        inventory: every valid state this node holds, in memory or on its disk, as of when it stopped, or as a standby last looked.
        state_port: where its states are served, None if nowhere.
        fingerprint: what must be alike on all nodes, by part (code, data, settings): a digest of each.
        lost: digests of committed checkpoints that this node was to hold and cannot read any more.
    """

    id: MemberId
    address: Annotated[str, Field(min_length=1, max_length=255)]
    slots: Annotated[int, Field(ge=1, le=1024)]
    boot_id: Annotated[str, Field(max_length=64)]
    store_port: Port
    probe_port: Port
    stopped: Number = 0
    outcome: Outcome | None = None
    unreachable: tuple[str, ...] = ()
    leaving: bool = False
    inventory: Annotated[tuple[SnapshotRef, ...], Field(max_length=INVENTORY_MAX)] = ()
    state_port: Port | None = None
    fingerprint: Annotated[dict[Name, Digest], Field(max_length=PARTS_MAX)] = {}
    lost: Annotated[tuple[Digest, ...], Field(max_length=LOST_MAX)] = ()


class Mode(StrEnum):
    """How the old generation's workers are to end."""

    AGREED_STOP = "agreed_stop"  # everybody is well: SIGTERM and a grace period
    KILL = "kill"  # somebody is gone and the rest hang in a collective: at once


class CauseKind(StrEnum):
    """Why there is to be another generation."""

    FORM = "form"
    JOIN = "join"
    LOSS = "loss"
    WORKER_FAILED = "worker_failed"
    WORKER_STOPPED = "worker_stopped"
    LEAVE = "leave"
    SCALE = "scale"
    RESTART = "restart"  # an operator's word, or the policy's
    ROLLBACK = "rollback"  # the policy's: the state is bad
    STOP = "stop"  # an operator's word


class Cause(Part):
    """Why, whose doing, and one line for people."""

    kind: CauseKind
    nodes: tuple[Name, ...] = ()
    detail: Text = ""

    def __str__(self) -> str:
        who = f" of {', '.join(self.nodes)}" if self.nodes else ""
        return f"{self.kind.value}{who}" + (f" ({self.detail})" if self.detail else "")


class ProposalRecord(Record):
    """`proposal`: the next world as the coordinator wants it. `number` is fresh for every proposal.

    Attributes:
        not_ready: incarnation -> mod revision of its key when it was found not ready; it is left out until that changes.
        counted: the budget was charged for it.
    """

    number: Annotated[int, Field(ge=1, lt=2**53)]
    mode: Mode
    members: tuple[MemberId, ...]
    cause: Cause
    proposer: MemberId
    not_ready: dict[str, int] = {}
    counted: bool = False


class GenerationState(StrEnum):
    """Where the job stands."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the restart budget is used up
    STOPPED = "stopped"  # an operator's word


class GenerationMember(Part):
    """One member of a generation; its place in the list is its node rank."""

    id: MemberId
    address: Annotated[str, Field(min_length=1, max_length=255)]
    slots: Annotated[int, Field(ge=1, le=1024)]
    probe_port: Port


class StoreAddress(Part):
    """Where the generation's TCPStore is served, by the agent of the first member."""

    address: Annotated[str, Field(min_length=1, max_length=255)]
    port: Port


class GenerationRecord(Record):
    """`generation`: the world that trains, or how the job ended.

    Attributes:
        members: in the order of their ranks.
        restarts: generations that were active before this one: what workers see as TORCHELASTIC_RESTART_COUNT.
        frozen_max: seconds workers may go on without etcd, counted from the last successful keepalive.
        formed_at: seconds since the epoch on the coordinator's clock, for people only; no decision reads it.
        drained: when the job ended, every member of this generation had been seen to have stopped: nobody trains on unseen.
        resume: the state that all begin with; None is the very beginning.
        void: states that no generation begins with, this one and later ones, the oldest first.
        code: exit code of a job that failed, where there is one of its own; 0: the usual one.
        without: incarnation -> why, of agents that are to be in none (PROTOCOL 31).
    """

    number: Annotated[int, Field(ge=1, lt=2**53)]
    state: GenerationState = GenerationState.ACTIVE
    reason: Text = ""
    cause: Cause
    members: tuple[GenerationMember, ...]
    store: StoreAddress
    restarts: Number = 0
    frozen_max: Annotated[float, Field(ge=0)] = 600.0
    formed_at: float = 0.0
    not_ready: dict[str, int] = {}
    drained: bool = False
    resume: ResumePoint | None = None
    void: Annotated[tuple[Void, ...], Field(max_length=VOID_MAX)] = ()
    code: Annotated[int, Field(ge=0, le=255)] = 0
    without: Annotated[dict[str, Text], Field(max_length=LEFT_OUT_MAX)] = {}

    @cached_property
    def ids(self) -> tuple[MemberId, ...]:
        """Its members' identities in the order of their ranks."""
        return tuple(member.id for member in self.members)

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return sum(member.slots for member in self.members)

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state is not GenerationState.ACTIVE

    def base_rank(self, member: MemberId) -> int:
        """Global rank of the first worker of `member`.

        Raises:
            KeyError: it is not in this generation.
        """
        rank = 0
        for candidate in self.members:
            if candidate.id == member:
                return rank
            rank += candidate.slots
        raise KeyError(str(member))


Parameter = bool | int | float | Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
"""A value that etcd may hand to a job: a number, a yes or no, or one of the words that the node's own job file lists."""


class TargetRecord(Record):
    """`target`: what operators want. Numbers and names, never a command.

    Attributes:
        run: false asks for an orderly stop.
        desired: nodes wanted; nodes above it stand by.
        max_restarts: failures of workers the job may have in all.
        paused: nothing is changed of free will: nobody joins, nothing is scaled. Recovery goes on.
        parameters: values for the parameters that each node's job file declares.
        by: who wrote it last.
    """

    run: bool = True
    min_nodes: Annotated[int, Field(ge=1, le=100_000)]
    max_nodes: Annotated[int, Field(ge=1, le=100_000)]
    desired: Annotated[int, Field(ge=1, le=100_000)]
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    reason: Text = ""
    paused: bool = False
    parameters: Annotated[dict[Name, Parameter], Field(max_length=64)] = {}
    by: Text = ""

    @property
    def limit(self) -> int:
        """Nodes that train at most."""
        return min(self.desired, self.max_nodes)


class BudgetRecord(Record):
    """`budget`: restarts used so far, by the whole job."""

    used: Number = 0


class CheckpointRecord(Record):
    """`checkpoint`: the newest committed checkpoint, and who holds it.

    Attributes:
        holders: nodes on whose disks it lies.
        shared: it lies on storage that every node reads.
    """

    generation: Number
    step: Number
    digest: Digest
    holders: tuple[Name, ...] = ()
    shared: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """What states are ordered by (PROTOCOL 21)."""
        return self.generation, self.step


class EventRecord(Record):
    """`events/<slot>`: one thing that happened. `at` is seconds since the epoch, for people."""

    number: Number
    at: float
    what: Annotated[str, Field(max_length=64)]
    detail: Text = ""


class RequestKind(StrEnum):
    """What may be asked of a generation that trains."""

    RESTART = "restart"
    CHECKPOINT = "checkpoint"
    ROLLBACK = "rollback"
    FAIL = "fail"


class RequestRecord(Record):
    """`requests/<kind>`: something asked of one generation; with the next one it is void.

    Attributes:
        generation: the one it is asked of.
        by: who asks.
        at: seconds since the epoch, for people.
        at_once: of a restart: the workers hang, and are killed; else they stop at a step that all agree on.
        before: of a rollback: no state of this generation from this step on is begun with.
        until: of a rollback: the step that the job has come to.
        skip_data: of a rollback: the data of the steps up to `until` are not trained on again.
        code: of a failure: the job's exit code.
    """

    kind: RequestKind
    generation: Annotated[int, Field(ge=1, lt=2**53)]
    reason: Text = ""
    by: Text = ""
    at: float = 0.0
    at_once: bool = False
    before: Number | None = None
    until: Number | None = None
    skip_data: bool = False
    code: Annotated[int, Field(ge=0, le=255)] = 0


class Verdict(Part):
    """What a generation failed of, and what is done about it: each is judged once, by whoever coordinates (PROTOCOL 31).

    Attributes:
        generation: that failed, or lost a member.
        root: one line: rank, node and error of what came first.
        delay: seconds for which no workers are started.
        stop: why the job is to end; "" if it goes on.
        code: its exit code then, 0 for the usual one.
        without: incarnation -> why, of agents that are to be in no further generation.
        void: states that are not begun with.
    """

    generation: Number
    root: Text
    delay: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    stop: Text = ""
    code: Annotated[int, Field(ge=0, le=255)] = 0
    without: Annotated[dict[str, Text], Field(max_length=LEFT_OUT_MAX)] = {}
    void: Void | None = None


class PolicyRecord(Record):
    """`policy`: what was done about failures and incidents, and what may be done yet. Whoever acts writes it in the same transaction.

    Attributes:
        ledger: as `elasticd.policy.budgets.Ledger.as_dict` has it.
        decisions: the last ones, the oldest first, as `elasticd.policy.decisions.Decision.as_dict` has them.
        hold: the generation whose states must not be committed as checkpoints: its state may be bad; None if there is none.
        acks: incidents of which an operator said that he knows: id -> who, when and why, in one line.
        verdict: on the last generation that failed.
    """

    ledger: dict[str, JsonValue]
    decisions: Annotated[tuple[dict[str, JsonValue], ...], Field(max_length=DECISIONS_MAX)] = ()
    hold: Number | None = None
    acks: Annotated[dict[str, Text], Field(max_length=ACKS_MAX)] = {}
    verdict: Verdict | None = None


class IncidentsRecord(Record):
    """`incidents/<job>/<node>`: what the detectors of one node say of one job, for whoever decides.

    Attributes:
        incidents: those that are open or have just ended, as `detectors.incidents.Incident.as_dict` has them.
        at: seconds since the epoch on the node's clock.
    """

    node: Name
    incidents: Annotated[tuple[dict[str, JsonValue], ...], Field(max_length=INCIDENTS_MAX)] = ()
    at: float = 0.0


class NodeJobState(StrEnum):
    """How one job stands on one node, as its daemon sees it."""

    RUNNING = "running"  # its agent runs
    STARTING = "starting"
    LEAVING = "leaving"  # its agent was asked to leave
    WAITING = "waiting"  # for slots, or for the time after a failure
    CHECKING = "checking"  # its health check runs
    KEPT_OUT = "kept_out"  # the node is cordoned or drained
    REFUSED = "refused"  # its file is not fit, or its agent said that it cannot work
    ENDED = "ended"  # it has ended
    IDLE = "idle"  # nobody wants it to run


class NodeJob(Part):
    """One job on one node."""

    name: Name
    state: NodeJobState
    slots: Annotated[int, Field(ge=0, le=1024)] = 0
    why: Text = ""


class NodeRecord(Record):
    """`nodes/<node>`: a daemon, under its lease.

    Attributes:
        incarnation: random, one for each start of the daemon.
        address: where peers reach the node.
        slots: workers it can run at most, one for each GPU where it has any.
        gpus: UUIDs of its GPUs.
        jobs: the jobs that it may run, and how they stand here.
        problems: what an operator should know: job files refused, checks that failed.
        peer_port: where its daemon listens for other nodes, None if nowhere.
    """

    node: Name
    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    address: Annotated[str, Field(min_length=1, max_length=255)]
    slots: Annotated[int, Field(ge=0, le=1024)]
    gpus: Annotated[tuple[Text, ...], Field(max_length=1024)] = ()
    labels: Annotated[dict[Name, Annotated[str, Field(max_length=128)]], Field(max_length=64)] = {}
    version: Annotated[str, Field(max_length=64)]
    boot_id: Annotated[str, Field(max_length=64)]
    started_at: float = 0.0
    jobs: Annotated[tuple[NodeJob, ...], Field(max_length=256)] = ()
    problems: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    peer_port: Port | None = None


class NodePolicyRecord(Record):
    """`nodes-policy/<node>`: operators' word about a node, and the daemon's own after a failed check. No key is: as usual.

    Attributes:
        cordoned: nothing new is started; what runs goes on.
        draining: its agents leave their jobs, and none is started.
        reason: why, for people.
        by: who.
        at: seconds since the epoch, for people.
        until: the policy's word ends then, seconds since the epoch; None: somebody has to lift it.
        about: the incident that it is about, "" for an operator's word.
        statistic: neither certain nor corroborated evidence was the reason.
    """

    cordoned: bool = False
    draining: bool = False
    reason: Text
    by: Text = ""
    at: float = 0.0
    until: float | None = None
    about: Annotated[str, Field(max_length=300)] = ""
    statistic: bool = False


class AuditRecord(Record):
    """`audit/<slot>`: one change that somebody made by the API."""

    at: float
    node: Name
    by: Text
    action: Annotated[str, Field(max_length=64)]
    subject: Annotated[str, Field(max_length=256)]
    detail: Text = ""


class ConfigRecord(Record):
    """`config/cluster` and `config/job/<job>`: settings of training as operators have set them. Numbers and words, never a path or a command.

    Attributes:
        values: by the names of `trainer.settings`, which says what each may be; what is not there is as the next layer has it.
        by: who wrote it last.
        at: seconds since the epoch, for people.
    """

    values: Annotated[dict[Name, Parameter], Field(max_length=64)] = {}
    reason: Text = ""
    by: Text = ""
    at: float = 0.0


R = TypeVar("R", bound=Record)


def parse(model: type[R], key: str, value: bytes, scope: str) -> R:
    """Read a value, or say what is wrong with it.

    Raises:
        RecordError: too large, not JSON, not this schema, or of another job or cluster. The message names the key.
    """
    limit = MAX_BYTES_WORLD if model in (ProposalRecord, GenerationRecord) else MAX_BYTES
    if len(value) > limit:
        msg = f"{key}: {len(value)} bytes, more than the {limit} believed"
        raise RecordError(msg)
    try:
        record = model.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        msg = f"{key}: {place + ': ' if place else ''}{first['msg']}"
        raise RecordError(msg) from None
    if record.scope != scope:
        msg = f"{key}: belongs to {record.scope!r}, not to {scope!r}"
        raise RecordError(msg)
    return record
