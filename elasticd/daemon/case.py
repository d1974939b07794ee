"""One job's incidents as whoever decides sees them, and the transaction that carries a decision out. Pure.

Owns: what etcd and this node say as the `State` that `policy.decide` takes, and decisions as writes. Must not: decide, read a clock, or talk to etcd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from elasticd.agent.judging import IDLE_MAX, ledger_of, plain, told, world_of
from elasticd.kv.types import Compare, Op, Put, Target
from elasticd.observability.report import Histogram, JobReport
from elasticd.policy.budgets import Progress
from elasticd.policy.costs import Measured
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.evidence import Incident
from elasticd.policy.settings import Settings
from elasticd.policy.state import Cluster, State
from elasticd.rendezvous.keys import ClusterKeys, JobKeys
from elasticd.rendezvous.records import (
    INCIDENTS_MAX,
    TEXT_MAX,
    GenerationRecord,
    NodePolicyRecord,
    PolicyRecord,
    RequestKind,
    RequestRecord,
)
from elasticd.rendezvous.transitions import Txn, unchanged
from elasticd.rendezvous.view import View

BY: Final = "elasticd's policy"
"""Who has written what the policy does."""
FINDINGS_TOLD: Final = 8
"""Findings of an incident that other nodes are told: the root, and the first of the others."""
STEP: Final = "step"
"""The number of a divergence's finding that is the first bad step."""
_ABOUT_MAX: Final = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One job at one revision of etcd.

    Attributes:
        view: target, generation, checkpoint, policy, requests and members.
        incidents: of all nodes.
        nodes: of the cluster, that are up.
        kept_out: node -> what keeps it out, by whoever's word; with mod revisions in `policies`.
        policies: node -> mod revision of its policy's key; absent: there is none.
        report: what this node's agent says of the job.
        stops: when workers of other jobs were stopped of free will, seconds since the epoch.
    """

    keys: JobKeys
    view: View
    incidents: tuple[Incident, ...]
    nodes: int = 1
    kept_out: Mapping[str, NodePolicyRecord] = field(default_factory=dict)
    policies: Mapping[str, int] = field(default_factory=dict)
    report: JobReport | None = None
    stops: tuple[float, ...] = ()

    @property
    def generation(self) -> GenerationRecord | None:
        """The one that trains; None if none does, or the next one is on its way."""
        return None if self.view.pending else self.view.active

    @property
    def settled(self) -> frozenset[str]:
        """Incidents of which an operator has said that he knows: nothing is done about them, and nobody is alerted."""
        return frozenset(self.view.policy.record.acks) if self.view.policy else frozenset()


def turn_of(case: Case, node: str) -> int | None:
    """Whose turn it is to decide: 0 for the node of the first rank, then by rank; None for a node that does not train in it."""
    generation = case.view.active
    names = [member.id.node for member in generation.members] if generation else []
    return names.index(node) if node in names else None


def state_of(case: Case, settings: Settings) -> State:
    """What `policy.decide` is to look at.

    Raises:
        RecordError: as `ledger_of`.
    """
    incidents = tuple(incident for incident in case.incidents if incident.id not in case.settled)
    return State(
        settings=settings,
        world=world_of(case.view, case.generation) if case.generation else None,
        cluster=_cluster(case),
        progress=_progress(case),
        measured=measured(case.report),
        ledger=ledger_of(case.keys, case.view).noticed(incidents),
        incidents=incidents,
        paused=bool(case.view.target and case.view.target.record.paused),
    )


def measured(report: JobReport | None) -> Measured:
    """The job's own times. A checkpoint's is that from the order to the disk, of which the steps are held up for a part only: rather too long."""
    if report is None:
        return Measured()
    return Measured(
        checkpoints=_mean(report.checkpoint.durations),
        restarts=_mean(report.recovery),
        intervals=(report.checkpoint.every_s,) if report.checkpoint.every_s else (),
        step_s=step_time(report),
    )


def step_time(report: JobReport) -> float | None:
    """Seconds that a step takes now: of the last windows of this node's workers."""
    return max((rank.step_seconds for rank in report.ranks if rank.step_seconds > 0.0), default=None)


def _mean(histogram: Histogram) -> tuple[float, ...]:
    count = sum(histogram.counts)
    return (histogram.total / count,) if count else ()


def _cluster(case: Case) -> Cluster:
    excluded = {node: policy.statistic for node, policy in case.kept_out.items() if policy.cordoned or policy.draining}
    return Cluster(nodes=max(1, case.nodes, len(excluded)), excluded=excluded, stops=case.stops)


def _progress(case: Case) -> Progress:
    committed, report = case.view.checkpoint, case.report
    own = report.checkpoint if report else None
    return Progress(
        step=report.step if report else committed.record.step if committed else 0,
        checkpoint_step=committed.record.step if committed else 0,
        checkpoint_at=own.at if own and own.at else None,
    )


# --- decisions as writes --------------------------------------------------------------------------------------------------


def news(case: Case, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Those that say something else than what stands there of the same incident already; of those that do nothing, of the first few incidents only.

    What is only looked at again is no news, nor that something has been done already, nor the end of something that was never told of.
    """
    known = {}
    for one in case.view.policy.record.decisions if case.view.policy else ():
        known[one.get("about")] = (one.get("action"), one.get("would"), one.get("rule"))
    idle = [one for one in decisions if not one.acts and one.rule != "done" and (one.about in known or one.rule != "over")][:IDLE_MAX]
    return tuple(one for one in decisions if one.acts or (one in idle and known.get(one.about) != (one.action.value, one.would.value, one.rule)))


def held(case: Case, decisions: Sequence[Decision]) -> int | None:
    """The generation whose states must not be committed."""
    generation = case.view.active
    return generation.number if generation is not None and any(one.hold_commits for one in decisions) else None


def carry_out(cluster: ClusterKeys, case: Case, state: State, decisions: Sequence[Decision]) -> Txn | None:
    """Write what was decided: the ledger, what people are told, and what is asked for; all of it or nothing. None if there is nothing to write.

    Args:
        state: that they were decided on.
    """
    fresh = news(case, decisions)
    hold = held(case, decisions)
    before = case.view.policy.record if case.view.policy else None
    if not fresh and hold == (before.hold if before else None):
        return None
    ledger = state.ledger
    for one in decisions:
        ledger = ledger.after(one, state.progress)
    record = PolicyRecord(
        scope=case.keys.scope,
        ledger=ledger.as_dict(),
        decisions=told(before, [plain(one, state) for one in fresh], {one.about for one in decisions}),
        hold=hold,
        acks=before.acks if before else {},
        verdict=before.verdict if before else None,
    )
    compares = [unchanged(case.keys.policy, case.view.policy, case.view), unchanged(case.keys.generation, case.view.generation)]
    ops: list[Op] = [Put(key=case.keys.policy, value=record.to_bytes())]
    for one in decisions:
        if one.acts:
            compares += _asks(cluster, case, one)
            ops += _ask(cluster, case, state, one)
    return Txn(tuple(compares), tuple(ops))


def _asks(cluster: ClusterKeys, case: Case, decision: Decision) -> list[Compare]:
    """That nobody else has spoken of the node meanwhile."""
    if decision.action is not Action.EXCLUDE:
        return []
    return [Compare(key=cluster.policy(decision.node), target=Target.MOD, op="==", value=case.policies.get(decision.node, 0))]


def _ask(cluster: ClusterKeys, case: Case, state: State, decision: Decision) -> list[Op]:
    if decision.action is Action.EXCLUDE:
        policy = NodePolicyRecord(
            scope=cluster.scope,
            cordoned=True,
            draining=True,
            reason=decision.why[:TEXT_MAX],
            by=BY,
            at=decision.at,
            until=decision.until,
            about=decision.about[:_ABOUT_MAX],
            statistic=not decision.certain,
        )
        return [Put(key=cluster.policy(decision.node), value=policy.to_bytes())]
    request = request_of(case, state, decision)
    return [Put(key=case.keys.request(request.kind.value), value=request.to_bytes())] if request else []


_KINDS: Final = {
    Action.CHECKPOINT: RequestKind.CHECKPOINT,
    Action.RESTART: RequestKind.RESTART,
    Action.ROLLBACK: RequestKind.ROLLBACK,
    Action.STOP: RequestKind.FAIL,
}


def request_of(case: Case, state: State, decision: Decision) -> RequestRecord | None:
    """What the generation is asked for; None if a decision asks nothing of it."""
    kind, generation = _KINDS.get(decision.action), case.view.active
    if kind is None or generation is None:
        return None
    back = kind is RequestKind.ROLLBACK
    return RequestRecord(
        scope=case.keys.scope,
        kind=kind,
        generation=generation.number,
        reason=decision.why[:TEXT_MAX],
        by=BY,
        at=decision.at,
        at_once=not decision.agreed,
        before=first_bad_step(case, state, decision) if back else None,
        until=state.progress.step if back else None,
        skip_data=decision.skip_data,
        code=decision.exit_code or 0,
    )


def first_bad_step(case: Case, state: State, decision: Decision) -> int:
    """The step from which on the state is bad: the detectors' word, or counted back from now with the time that a step takes."""
    incident = next((one for one in case.incidents if one.id == decision.about), None)
    said = [number.value for sign in (incident.own if incident else ()) for number in sign.numbers if number.name == STEP and number.value is not None]
    if said:
        return max(0, int(min(said)))
    step_s = state.measured.step_s
    if decision.good_before is None or not step_s:
        return 0
    return max(0, state.progress.step - math.ceil(max(0.0, decision.at - decision.good_before) / step_s))


# --- what other nodes are told --------------------------------------------------------------------------------------------


def shown(incidents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The incidents of this node as others are told of them: those that are open first, then the newest; each with some of its findings."""
    ordered = sorted(incidents, key=lambda one: (one.get("state") == "over", -float(one.get("updated") or 0.0)))
    return tuple(_shortened(one) for one in ordered[:INCIDENTS_MAX])


def _shortened(incident: Mapping[str, Any]) -> dict[str, Any]:
    root = incident["root"]
    others = [one for one in incident.get("findings", ()) if one != root and one.get("role") != "cascade"]
    return {**incident, "root": root, "findings": [root, *others[: FINDINGS_TOLD - 1]]}


def standing(incidents: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    """What of them other nodes must hear of at once; the rest are newer numbers of the same."""
    return tuple((one["id"], one.get("state"), one.get("corroborated"), one["root"].get("kind"), one["root"].get("certainty")) for one in incidents)
