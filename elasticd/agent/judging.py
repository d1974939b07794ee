"""What a generation failed of, and what is done about it: the coordinator's `elasticd.policy.decide` for what has happened (PROTOCOL 31).

Owns: what etcd says of a failed generation as the `State` that the policy takes, and its decision as the record that is written. Must not: decide, or
write.

Failures are judged by agents, since a job has to go on where no daemon runs; what may come is judged by daemons, which have the detectors' word. Both
keep one ledger, in the job's key `policy`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.errors import RecordError
from elasticd.policy.budgets import Ledger, Progress
from elasticd.policy.decide import decide
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.evidence import Incident
from elasticd.policy.failures import Failure, FailureClass, WorkerEnd, classify
from elasticd.policy.state import Cluster, State, World
from elasticd.rendezvous.membership import fate, used_up
from elasticd.rendezvous.records import (
    DECISIONS_MAX,
    TEXT_MAX,
    EventRecord,
    GenerationRecord,
    IncidentsRecord,
    NodePolicyRecord,
    PolicyRecord,
    Verdict,
    Void,
    parse,
)
from elasticd.rendezvous.view import View

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV, KeyValue
    from elasticd.policy.settings import Settings
    from elasticd.rendezvous.keys import ClusterKeys, JobKeys

log = structlog.get_logger("elasticd.agent")

IDLE_MAX: Final = DECISIONS_MAX // 2
"""Incidents of which it is told that nothing is done."""
_NODES_READ: Final = 4096


class Judge:
    """See the module; the `judge` of a `Coordinator`.

    Args:
        kv: where incidents and nodes are read.
    """

    def __init__(self, kv: EtcdKV, cluster: ClusterKeys, job: JobKeys, settings: Settings) -> None:
        self._kv = kv
        self._cluster = cluster
        self._job = job
        self._settings = settings

    def __call__(self, view: View, at: float) -> tuple[PolicyRecord, EventRecord]:
        """See `coordinator.Judging`."""
        state = state_of_failure(
            self._job,
            view,
            self._settings,
            incidents=self._incidents(),
            cluster=self._nodes(view),
            dice=random.random(),  # noqa: S311 - spreads restarts in time
            now=at,
        )
        decision = decided(view, state, at)
        log.warning("failure_judged", generation=view.number, rule=decision.rule, action=decision.action.value, why=decision.why)
        return record_of(self._job, view, state, decision, at)

    def _incidents(self) -> tuple[Incident, ...]:
        """What detectors say of the job, as far as it can be believed."""
        found: list[Incident] = []
        for item in self._kv.list(self._cluster.incidents_of_job(self._job.job), limit=_NODES_READ).items:
            try:
                found += incidents_in(item, self._job)
            except RecordError as error:
                log.warning("incidents_not_believed", key=item.key, why=error.message)
        return tuple(found)

    def _nodes(self, view: View) -> Cluster:
        """How many nodes there are, and who is left out, by whoever's word."""
        excluded: dict[str, bool] = {}
        for item in self._kv.list(self._cluster.policies, limit=_NODES_READ).items:
            try:
                policy = parse(NodePolicyRecord, item.key, item.value, self._cluster.scope)
            except RecordError:
                continue  # the daemon of that node says so
            if policy.cordoned or policy.draining:
                excluded[item.key.removeprefix(self._cluster.policies)] = policy.statistic
        nodes = len(self._kv.list(self._cluster.nodes, keys_only=True).items)
        return Cluster(nodes=max(nodes, len(view.members), len(excluded), 1), excluded=excluded)


# --- what etcd says ---------------------------------------------------------------------------------------------------------


def incidents_in(item: KeyValue, keys: JobKeys) -> list[Incident]:
    """What the detectors of one node told of a job.

    Raises:
        RecordError: it is nothing that they would say, or another node's word.
    """
    record = parse(IncidentsRecord, item.key, item.value, keys.scope)
    if record.node != item.key.rpartition("/")[2]:
        raise RecordError(f"{item.key}: holds the word of node {record.node!r}")
    return [Incident.from_dict(one) for one in record.incidents]


def ledger_of(keys: JobKeys, view: View) -> Ledger:
    """What was done so far.

    Raises:
        RecordError: what stands there cannot be read. Then nothing may be done, nor may it be written anew: a budget that is forgotten is none.
    """
    if keys.policy in view.problems:
        raise RecordError(view.problems[keys.policy])
    return Ledger.from_dict(view.policy.record.ledger) if view.policy else Ledger()


def world_of(view: View, generation: GenerationRecord) -> World:
    """A generation as the policy sees it."""
    ranks: dict[str, tuple[int, ...]] = {}
    first = 0
    for member in generation.members:
        ranks[member.id.node] = tuple(range(first, first + member.slots))
        first += member.slots
    out = view.left_out
    spare = sum(not keyed.record.leaving and identity not in generation.ids and identity.incarnation not in out for identity, keyed in view.present.items())
    least = view.target.record.min_nodes if view.target else 1
    return World(generation=generation.number, formed_at=generation.formed_at, nodes=ranks, min_nodes=least, spare=spare)


def ends_of(view: View) -> tuple[WorkerEnd, ...]:
    """How workers of the active generation ended by themselves, as they were reported."""
    generation = view.active
    ends: list[WorkerEnd] = []
    for order, keyed in enumerate(sorted(fate(view).failed, key=lambda one: one.mod_revision)):
        outcome, node = keyed.record.outcome, keyed.record.id.node
        if generation is None or outcome is None:
            continue
        for one in outcome.ends:
            message = one.message or one.exception
            ends.append(WorkerEnd(node=node, rank=one.rank, code=one.code, exception=one.exception, message=message, at=one.at or None, order=order))
        if not outcome.ends:  # told by an agent that did not get as far as its workers
            ends.append(WorkerEnd(node=node, rank=generation.base_rank(keyed.record.id), code=1, exception=outcome.detail, order=order))
    return tuple(ends)


def progress_of(view: View, ledger: Ledger) -> Progress | None:
    """How far the job is; None if it does not tell."""
    generation = view.active
    told = [
        keyed.record.outcome.step
        for keyed in view.members.values()
        if generation and keyed.record.outcome and keyed.record.outcome.generation == generation.number and keyed.record.outcome.step is not None
    ]
    committed = view.checkpoint.record.step if view.checkpoint else None
    resumed = generation.resume.step if generation and generation.resume else None
    known = [step for step in (*told, committed, resumed, ledger.best_step or None) if step is not None]
    return Progress(step=max(known), checkpoint_step=committed or 0) if known else None


def state_of_failure(keys: JobKeys, view: View, settings: Settings, *, incidents: Sequence[Incident], cluster: Cluster, dice: float, now: float) -> State:
    """All that is decided on, the failure included.

    Raises:
        RecordError: as `ledger_of`.
    """
    generation = view.active
    assert generation is not None  # only what trains can fail
    ledger = ledger_of(keys, view).noticed(incidents)
    last = view.policy.record.verdict if view.policy else None
    if last is not None and last.stop and last.generation < generation.number:
        ledger = ledger.opened_again()
    progress = progress_of(view, ledger)
    out = {keyed.record.id.node: False for keyed in view.members.values() if keyed.record.id.incarnation in view.left_out}
    lost = tuple(identity.node for identity in fate(view).lost)
    world = world_of(view, generation)
    failure = classify(
        ends_of(view),
        lost=lost,
        incidents=incidents,
        ledger=ledger,
        stepped=progress is None or progress.step > 0,
        settings=settings,
        now=now,
    )
    return State(
        settings=settings,
        world=replace(world, nodes={node: ranks for node, ranks in world.nodes.items() if node not in lost}),
        cluster=replace(cluster, excluded={**out, **cluster.excluded}),
        progress=progress or Progress(),
        tells_steps=progress is not None,
        ledger=ledger,
        incidents=tuple(incidents),
        failure=failure,
        paused=bool(view.target and view.target.record.paused),
        dice=dice,
    )


def decided(view: View, state: State, now: float) -> Decision:
    """The policy's decision, within the restarts that the job has in all."""
    (decision,) = decide(state, now)
    failure = state.failure
    if failure is None or failure.cls is FailureClass.MEMBERSHIP or decision.action is Action.STOP or not used_up(view):
        return decision
    most = view.target.record.max_restarts if view.target else 0
    why = f"restart budget used up ({view.restarts_used} of {most}); {failure.summary}"
    return replace(decision, action=Action.STOP, would=Action.STOP, wanted=Action.STOP, rule="max_restarts", why=why, alert=True, after=None, exit_code=None)


# --- what is written --------------------------------------------------------------------------------------------------------


def record_of(keys: JobKeys, view: View, state: State, decision: Decision, at: float) -> tuple[PolicyRecord, EventRecord]:
    """The ledger, what people are told, and what the next generation comes to."""
    failure, before = state.failure, view.policy.record if view.policy else None
    assert failure is not None
    record = PolicyRecord(
        scope=keys.scope,
        ledger=state.ledger.failed(failure, decision, state.progress).as_dict(),
        decisions=told(before, [plain(decision, state)], {decision.about}),
        hold=before.hold if before else None,
        acks=before.acks if before else {},
        verdict=verdict_of(view, failure, decision),
    )
    return record, EventRecord(scope=keys.scope, number=view.number, at=at, what="judged", detail=decision.why[:TEXT_MAX])


def verdict_of(view: View, failure: Failure, decision: Decision) -> Verdict:
    """What the membership has to know of a decision."""
    out = [keyed.record.id.incarnation for keyed in view.members.values() if keyed.record.id.node == decision.node]
    stop = decision.action is Action.STOP
    return Verdict(
        generation=view.number,
        root=failure.summary[:TEXT_MAX],
        delay=max(0.0, decision.after - decision.at) if decision.after is not None else 0.0,
        stop=decision.why[:TEXT_MAX] if stop else "",
        code=(decision.exit_code or 0) if stop else 0,
        without=dict.fromkeys(out, decision.why[:TEXT_MAX]) if decision.action is Action.EXCLUDE else {},
        void=bad_states(view, decision) if decision.action is Action.ROLLBACK else None,
    )


def bad_states(view: View, decision: Decision) -> Void:
    """What a job goes back from whose workers said that it diverged: all beyond its last checkpoint, for nobody has looked at the rest."""
    generation = view.active
    assert generation is not None
    began = [one.order for one in (generation.resume, view.checkpoint.record if view.checkpoint else None) if one is not None]
    step = max((step for number, step in began if number <= generation.number), default=0)
    until = max([step, *(keyed.record.outcome.step or 0 for keyed in fate(view).failed if keyed.record.outcome)])
    return Void(generation=generation.number, step=step + 1, until=max(step + 1, until), skip=decision.skip_data)


def told(before: PolicyRecord | None, fresh: Sequence[Mapping[str, Any]], current: AbstractSet[str]) -> tuple[dict[str, Any], ...]:
    """The last that did something, and the newest of each incident that did nothing; of incidents that are gone first the oldest go."""
    about = {one["about"] for one in fresh}
    kept = [one for one in (before.decisions if before else ()) if one.get("about") not in about or one.get("action") != Action.LOG.value]
    entries = [*kept, *(dict(one) for one in fresh)]
    idle = [one for one in entries if one.get("action") == Action.LOG.value]
    idle = sorted(idle, key=lambda one: one.get("about") in current)[-IDLE_MAX:]
    deeds = [one for one in entries if one.get("action") != Action.LOG.value][-(DECISIONS_MAX - IDLE_MAX) :]
    return tuple(one for one in entries if one in idle or one in deeds)


def plain(decision: Decision, state: State) -> dict[str, Any]:
    """As it is kept, with how far and how fast the job was, to be compared with later."""
    kept = decision.as_dict()
    step_s = state.measured.step_s
    kept["numbers"] = {**decision.numbers, "step": float(state.progress.step), **({"step_s": step_s} if step_s else {})}
    kept["ranks"] = list(decision.ranks)[:64]
    kept["why"] = decision.why[:TEXT_MAX]
    return {name: value for name, value in kept.items() if name != "failure"}
