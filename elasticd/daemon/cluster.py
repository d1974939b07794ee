"""The whole cluster as etcd holds it, and what that means to a person: its nodes, its jobs, and what happened.

Owns: turning a listing into statuses, as pure functions, and reading the listing that each question needs. Must not: know HTTP, or write.
Garbage in a key is named in `problems` of what it belongs to, and is never an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from elasticd.daemon.values import printable
from elasticd.errors import NotRunningError, RecordError, UsageError
from elasticd.kv.types import KeyValue, Listing
from elasticd.rendezvous.keys import checked_name
from elasticd.rendezvous.records import AuditRecord, ConfigRecord, EventRecord, NodeJob, NodeJobState, NodePolicyRecord, NodeRecord, Parameter, Record, parse
from elasticd.rendezvous.status import JobState, JobStatus, job_status
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import ClusterKeys

R = TypeVar("R", bound=Record)


class NodeCondition(StrEnum):
    """Where a node stands."""

    READY = "ready"
    CORDONED = "cordoned"  # nothing new is started there
    DRAINING = "draining"  # its agents are leaving
    DRAINED = "drained"  # they have left
    DOWN = "down"  # no daemon holds its key


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node. Times are seconds since the epoch, 0 if not known.

    Attributes:
        reason: why it is kept out; with `by` and `at`, an operator's words.
        slots_used: slots held by agents that run.
        problems: what its daemon says, and what is wrong with its keys.
    """

    name: str
    state: NodeCondition
    reason: str = ""
    by: str = ""
    at: float = 0.0
    address: str | None = None
    slots: int = 0
    slots_used: int = 0
    gpus: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None
    boot_id: str | None = None
    started_at: float = 0.0
    jobs: tuple[NodeJob, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """One job: its status, and what is wanted of it.

    Attributes:
        run: None: nobody has ever asked for it.
        target_revision: mod revision of what is wanted, for `if_revision`.
        reason: why that was wanted, and by whom.
    """

    status: JobStatus
    run: bool | None = None
    paused: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    target_revision: int | None = None
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """One thing that happened, in the job or by an operator.

    Attributes:
        id: grows from one to the next; etcd's revision of its key.
        at: seconds since the epoch.
        kind: `generation` or `audit`.
    """

    id: int
    at: float
    kind: str
    what: str
    detail: str
    job: str | None = None
    node: str | None = None
    by: str | None = None
    generation: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """A cluster at one revision. `problems` are those of keys that belong to no node and no job."""

    revision: int
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    problems: tuple[str, ...]


# --- from keys to views --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The keys of a cluster by what they are about. `config`: with the scope that the record must have."""

    nodes: dict[str, KeyValue] = field(default_factory=dict)
    policies: dict[str, KeyValue] = field(default_factory=dict)
    jobs: dict[str, list[KeyValue]] = field(default_factory=dict)
    audit: list[KeyValue] = field(default_factory=list)
    config: list[tuple[KeyValue, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def cluster_view(listing: Listing, keys: ClusterKeys, allowed: Collection[str] = ()) -> ClusterView:
    """Say what the keys of a whole cluster mean.

    Args:
        listing: all that is under the cluster's prefix.
        keys: the cluster.
        allowed: jobs that this node allows, whether etcd knows them or not.
    """
    found = _sort(listing, keys)
    views = {name: _view(Listing(revision=listing.revision, items=tuple(items)), keys, name) for name, items in found.jobs.items()}
    agents = {node for view in views.values() for node in view.members}
    nodes = tuple(_node(name, found.nodes.get(name), found.policies.get(name), keys, agents) for name in sorted({*found.nodes, *found.policies}))
    known = {job.name for node in nodes for job in node.jobs} | set(allowed)
    views |= {name: View(revision=listing.revision) for name in known - set(views)}
    for item in found.audit:
        _believe(AuditRecord, item, keys.scope, found.problems)
    for item, scope in found.config:
        _believe(ConfigRecord, item, scope, found.problems)
    return ClusterView(
        revision=listing.revision,
        nodes=nodes,
        jobs=tuple(_job(views[name], keys.cluster, name) for name in sorted(views)),
        problems=tuple(printable(problem) for problem in found.problems),
    )


def _sort(listing: Listing, keys: ClusterKeys) -> _Sorted:
    found = _Sorted()
    for item in listing.items:
        kind, _, rest = item.key.removeprefix(keys.prefix).partition("/")
        name = rest.partition("/")[0]
        try:
            if kind == "audit":
                found.audit.append(item)
            elif item.key == keys.config_of_cluster:
                found.config.append((item, keys.scope))
            elif item.key.startswith(keys.config_of_jobs):
                found.config.append((item, keys.job(item.key.removeprefix(keys.config_of_jobs)).scope))
            elif kind == "jobs":
                found.jobs.setdefault(checked_name("job", name), []).append(item)
            elif kind == "nodes":
                found.nodes[checked_name("node", rest)] = item
            elif kind == "nodes-policy":
                found.policies[checked_name("node", rest)] = item
            else:
                found.problems.append(f"{item.key}: not a key of this cluster's layout")
        except UsageError as error:
            found.problems.append(f"{item.key}: {error.message}")
    return found


def _view(listing: Listing, keys: ClusterKeys, job: str) -> View:
    ledger = Ledger(keys.job(job))
    ledger.load(listing)
    return ledger.view()


def _believe(model: type[R], item: KeyValue | None, scope: str, problems: list[str]) -> R | None:
    if item is None:
        return None
    try:
        return parse(model, item.key, item.value, scope)
    except RecordError as error:
        problems.append(error.message)
        return None


def _node(name: str, own: KeyValue | None, policy_key: KeyValue | None, keys: ClusterKeys, agents: Collection[str]) -> NodeView:
    """One node. `agents` are the nodes that have an agent in any job."""
    problems: list[str] = []
    record = _believe(NodeRecord, own, keys.scope, problems)
    if record and record.node != name:
        problems.append(f"{keys.node(name)}: holds the record of node {record.node!r}")
        record = None
    policy = _believe(NodePolicyRecord, policy_key, keys.scope, problems)
    seen = NodeView(
        name=name,
        state=_condition(policy, up=own is not None, busy=name in agents or bool(record and any(job.slots for job in record.jobs))),
        reason=policy.reason if policy else "",
        by=policy.by if policy else "",
        at=policy.at if policy else 0.0,
        problems=tuple(printable(problem) for problem in (*problems, *(record.problems if record else ()))),
    )
    if record is None:
        return seen
    return replace(
        seen,
        address=record.address,
        slots=record.slots,
        slots_used=sum(job.slots for job in record.jobs),
        gpus=record.gpus,
        labels=record.labels,
        version=record.version,
        boot_id=record.boot_id,
        started_at=record.started_at,
        jobs=record.jobs,
    )


def _condition(policy: NodePolicyRecord | None, *, up: bool, busy: bool) -> NodeCondition:
    if policy and policy.draining and not busy:
        return NodeCondition.DRAINED
    if not up:
        return NodeCondition.DOWN
    if policy and policy.draining:
        return NodeCondition.DRAINING
    return NodeCondition.CORDONED if policy and policy.cordoned else NodeCondition.READY


def _job(view: View, cluster: str, job: str) -> JobView:
    status = job_status(view, cluster=cluster, job=job)
    status = replace(status, problems=tuple(printable(problem) for problem in status.problems))
    target = view.target.record if view.target else None
    if view.generation is None and not view.members and not view.problems and not (target and target.run):
        # It never formed: nothing is on its way, and nothing has to be stopped.
        status = replace(status, state=JobState.STOPPED, why=(target.reason or "it was stopped before it began") if target else "nobody has started it")
    if target is None or view.target is None:
        return JobView(status=status)
    return JobView(
        status=status,
        run=target.run,
        paused=target.paused,
        parameters=target.parameters,
        target_revision=view.target.mod_revision,
        reason=target.reason,
        by=target.by,
    )


# --- what happened -------------------------------------------------------------------------------------------------------


def happenings(items: Iterable[KeyValue], keys: ClusterKeys) -> tuple[Happening, ...]:
    """All that the rings hold, oldest first. Keys that are no events, and garbage, are left out.

    Args:
        items: keys of the cluster, as listed.
        keys: the cluster.
    """
    found = [one for item in items if (one := _happening(item, keys))]
    return tuple(sorted(found, key=lambda one: one.id))


def chosen(all_of_them: Sequence[Happening], *, job: str | None = None, node: str | None = None, after: int = 0) -> tuple[Happening, ...]:
    """Those about one job or one node, newer than `after`."""
    return tuple(one for one in all_of_them if one.id > after and job in (None, one.job) and node in (None, one.node))


def _happening(item: KeyValue, keys: ClusterKeys) -> Happening | None:
    if item.key.startswith(keys.audit):
        audit = _believe(AuditRecord, item, keys.scope, [])
        return _audited(item, audit) if audit else None
    job, _, rest = item.key.removeprefix(keys.jobs).partition("/")
    if not (item.key.startswith(keys.jobs) and rest.startswith("events/")):
        return None
    try:
        event = _believe(EventRecord, item, keys.job(job).scope, [])
    except UsageError:
        return None
    if event is None:
        return None
    return Happening(id=item.mod_revision, at=event.at, kind="generation", what=event.what, detail=event.detail, job=job, generation=event.number)


def _audited(item: KeyValue, audit: AuditRecord) -> Happening:
    kind, _, name = audit.subject.partition("/")
    return Happening(
        id=item.mod_revision,
        at=audit.at,
        kind="audit",
        what=audit.action,
        detail=audit.detail,
        job=name if kind == "job" else None,
        node=name if kind == "node" else None,
        by=f"{audit.by} on {audit.node}",
    )


# --- reading -------------------------------------------------------------------------------------------------------------


class ClusterReader:
    """Reads what each question needs, at one revision. Thread-safe. Every method raises a KVError where etcd does not answer, or refuses.

    Args:
        kv: this node's connection.
        keys: the cluster.
        board: what this node allows.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, board: Board) -> None:
        self._kv = kv
        self._keys = keys
        self._board = board

    def cluster(self) -> ClusterView:
        """All nodes and all jobs."""
        return cluster_view(self._kv.list(self._keys.prefix), self._keys, self._board.turn.allowed)

    def node(self, name: str) -> tuple[NodeView, int]:
        """One node, and the revision.

        Raises:
            NotRunningError: nobody has ever spoken of it.
        """
        checked_name("node", name)
        cluster = self.cluster()
        for node in cluster.nodes:
            if node.name == name:
                return node, cluster.revision
        raise NotRunningError(f"there is no node {name!r} in cluster {self._keys.cluster!r}", remedy="see: elasticctl nodes")

    def job(self, name: str) -> JobView:
        """One job.

        Raises:
            NotRunningError: etcd holds nothing of it, and no node that is up allows it.
        """
        return _job(_view(self._job_keys(name), self._keys, name), self._keys.cluster, name)

    def history(self, name: str) -> tuple[tuple[Happening, ...], int]:
        """What became of the generations of one job, and the revision.

        Raises:
            NotRunningError: as `job`.
        """
        listing = self._job_keys(name)
        return happenings(listing.items, self._keys), listing.revision

    def happenings(self, *, job: str | None, node: str | None, after: int) -> tuple[tuple[Happening, ...], int, int]:
        """What happened since `after`; the value to give as `after` next time; the revision."""
        if job is None:
            listing = self._kv.list(self._keys.prefix)
            items = listing.items
        else:
            listing = self._kv.list(self._keys.audit)
            # Read second, so it may be ahead: what is newer than the first is left for next time, or `last` would pass over an audit record.
            events = self._kv.list(self._keys.job(job).events).items
            items = (*listing.items, *(item for item in events if item.mod_revision <= listing.revision))
        found = happenings(items, self._keys)
        if after > listing.revision:
            after = 0  # another etcd's, or one that was put back
        wanted = chosen(found, job=job, node=node, after=after)
        return wanted, max((after, *(one.id for one in wanted))), listing.revision

    def _job_keys(self, name: str) -> Listing:
        listing = self._kv.list(self._keys.job(name).prefix)
        if not listing.items and name not in self._board.turn.allowed and not self._allowed_elsewhere(name):
            raise NotRunningError(f"there is no job {name!r} in cluster {self._keys.cluster!r}", remedy="see: elasticctl status")
        return listing

    def _allowed_elsewhere(self, name: str) -> bool:
        records = (_believe(NodeRecord, item, self._keys.scope, []) for item in self._kv.list(self._keys.nodes).items)
        return any(job.name == name for record in records if record for job in record.jobs)


def own_node(board: Board) -> NodeView:
    """This node as its own daemon knows it, for the time that etcd is out of reach."""
    turn = board.turn
    return NodeView(
        name=board.node,
        state=NodeCondition.CORDONED if any(job.state is NodeJobState.KEPT_OUT for job in turn.jobs) else NodeCondition.READY,
        slots=turn.slots,
        slots_used=sum(job.slots for job in turn.jobs),
        started_at=board.started_at,
        jobs=turn.jobs,
        problems=turn.problems,
    )
