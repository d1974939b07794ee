"""What is done about what may come: the ladder log, early checkpoint, restart, leave a node out, stop.

Owns: what the evidence of one incident asks for, and at what price. Must not: know budgets, guards or modes (`decide` holds what is asked for against those).

- Certain or corroborated evidence may ask for a restart, or for leaving a node out. A statistic alone asks for an early checkpoint and, if it persists,
  for one restart.
- What a restart does not help is not restarted for: errors of the user, whatever shows on many ranks at once, and stragglers, which are left out or borne.
- Everything is held against the costs: below p* a restart costs more than the failure that it forestalls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticd.policy.costs import Costs, worth_dropping
from elasticd.policy.decisions import Action
from elasticd.policy.evidence import Certainty, Fault, Scope, Standing
from elasticd.policy.settings import Data

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticd.policy.budgets import Limits
    from elasticd.policy.evidence import Incident
    from elasticd.policy.state import State, World

STRAGGLERS: Final = frozenset({"straggler", "slow_node"})
DIVERGENCES: Final = frozenset({"nonfinite", "loss_not_finite", "diverged", "loss_scale_collapsed"})
HANGS: Final = frozenset({"dead_rank"})
"""Nobody reaches the end of a step any more: no checkpoint, and no stop that all agree on."""
STALLS: Final = frozenset({"stalled"})
"""Nobody has for a while: an evaluation, a download or a compilation that nobody announced looks the same."""
MEMBERS: Final = frozenset({"silent_node"})
"""What membership notices and acts on by itself."""
NOTICES: Final = frozenset({"slurm_preempted", "slurm_time_limit"})
"""Somebody has said when the end comes."""
WORK: Final = "compute_s"
"""The number of a straggler: seconds of its own work in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What an incident asks for. Attributes as those of `Decision`."""

    action: Action
    rule: str
    why: str
    node: str = ""
    ranks: tuple[int, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    certain: bool = False
    alert: bool = False
    agreed: bool = True
    good_before: float | None = None
    skip_data: bool = False
    hold_commits: bool = False


def wish(state: State, incident: Incident, limits: Limits, costs: Costs, now: float) -> Wish:
    """What the evidence asks for.

    Args:
        state: with its world.
        limits: for what was done about this incident already.
        costs: C, R, L and D at this moment.
        now: seconds since the epoch.
    """
    assert state.world is not None  # the caller looked
    root = incident.root
    idle = _idle(state, state.world, incident, now)
    if idle is not None:
        return idle
    if root.kind in DIVERGENCES:
        return _divergence(state, incident, limits)
    if root.kind in NOTICES:
        return _notice(incident, limits, costs)
    if root.kind in HANGS:
        return _hang(incident, costs)
    if root.kind in STALLS:
        why = f"{root.summary}; it may evaluate or load without a word, and the time limits of collectives end what hangs"
        return Wish(action=Action.LOG, rule="stalled", why=why, alert=True)
    if root.kind in MEMBERS:
        return Wish(action=Action.LOG, rule="membership", why=f"{root.summary}; membership sees to that")
    if root.fault is Fault.USER:
        return Wish(action=Action.LOG, rule="user", why=f"{root.summary}; a restart would not change that", alert=True)
    if root.certainty is not Certainty.CERTAIN and (many := together(state, state.incidents)):
        why = f"{many} of {state.world.ranks} ranks show something at once: that is the job, its data or its storage, not {root.node or 'a node'}"
        return Wish(action=Action.LOG, rule="together", why=why, alert=True, numbers={"ranks": many, "of": state.world.ranks})
    if root.kind in STRAGGLERS and root.certainty is not Certainty.WEAK:
        return _straggler(state.world, incident, costs, now)
    return _drift(state, state.world, incident, limits, costs, now)


def sure(incident: Incident) -> bool:
    """Whether the evidence is certain or corroborated."""
    return incident.root.certainty is Certainty.CERTAIN or incident.corroborated


def persisting(state: State, incident: Incident) -> bool:
    """Whether it has held on for long enough, by its own evidence and not by the clock: a detector that died says nothing new."""
    return incident.updated - incident.began >= state.settings.persist_s


def probability(state: State, incident: Incident) -> float:
    """That a failure follows."""
    settings = state.settings
    by_certainty = {Certainty.CERTAIN: settings.p_certain, Certainty.STRONG: settings.p_strong, Certainty.WEAK: settings.p_weak}
    return max(
        by_certainty[incident.root.certainty],
        settings.p_corroborated if incident.corroborated else 0.0,
        settings.p_persisting if persisting(state, incident) else 0.0,
    )


def together(state: State, incidents: Iterable[Incident]) -> int:
    """Ranks that show something of uncertain nature, if they are so many, on two nodes or more, that it is nobody's own; else 0."""
    assert state.world is not None  # the caller looked
    ranks: set[int] = set()
    nodes: set[str] = set()
    for incident in incidents:
        if incident.standing is Standing.OVER or incident.root.certainty is Certainty.CERTAIN or incident.root.fault in (Fault.ADVISE, Fault.CASCADE):
            continue
        for sign in incident.own:
            if sign.node not in state.world.nodes:
                continue
            nodes.add(sign.node)
            ranks.update(state.world.nodes[sign.node] if sign.rank is None else (sign.rank,))
    many = len(nodes) >= 2 and len(ranks) > state.settings.together_share * state.world.ranks
    return len(ranks) if many else 0


# --- reasons to do nothing -------------------------------------------------------------------------------------------------


def _idle(state: State, world: World, incident: Incident, now: float) -> Wish | None:
    root, settings = incident.root, state.settings
    said = root.summary
    valid = settings.certain_valid_s if root.certainty is Certainty.CERTAIN else settings.stale_s
    age = max(0.0, now - incident.updated)
    if incident.standing is Standing.OVER:
        return Wish(action=Action.LOG, rule="over", why=f"{said}; that is over: {incident.why_over or 'nothing more of it'}")
    if root.fault is Fault.CASCADE:
        return Wish(action=Action.LOG, rule="cascade", why=f"{said}; that follows from something else")
    if root.fault is Fault.ADVISE:
        return Wish(action=Action.LOG, rule="advise", why=said)
    if incident.standing is not Standing.CONFIRMED:
        return Wish(action=Action.LOG, rule="suspect", why=f"{said}; suspected, not confirmed", hold_commits=root.kind in DIVERGENCES)
    if age > valid:
        return Wish(action=Action.LOG, rule="stale", why=f"{said}; the last evidence is {age:.0f} s old", numbers={"age_s": round(age, 1)})
    earlier = root.generation != world.generation if root.generation is not None else incident.updated < world.formed_at
    # A broken node stays broken in the next world, if it is in it; all else may have gone with the last one.
    if earlier and not (root.fault is Fault.HARDWARE and sure(incident) and root.node in world.nodes):
        return Wish(action=Action.LOG, rule="earlier_world", why=f"{said}; that was in an earlier world than generation {world.generation}")
    return None


# --- what each sort asks for -------------------------------------------------------------------------------------------------


def _divergence(state: State, incident: Incident, limits: Limits) -> Wish:
    """A bad state: nothing of it may be committed; back to a good one once, and then no further."""
    root = incident.root
    numbers = {"step": float(state.progress.step)}
    if root.certainty is Certainty.WEAK or root.kind == "loss_scale_collapsed":
        return Wish(action=Action.LOG, rule="spike", why=f"{root.summary}; spikes often pass: no checkpoint until it has", hold_commits=True, alert=True)
    if any(deed.about == incident.id and deed.action is Action.ROLLBACK for deed in limits.deeds):
        return Wish(action=Action.LOG, rule="done", why=f"{root.summary}; the job goes back for that already", hold_commits=True)
    if limits.rolled_back():
        why = f"{root.summary}, again after a return to a good state: that is the model or the data"
        return Wish(action=Action.STOP, rule="diverged_again", why=why, numbers=numbers, certain=True, alert=True, hold_commits=True)
    skip = state.settings.after_divergence is Data.SKIP
    why = f"{root.summary}; back to the last state from before that, {'without' if skip else 'with'} the data that led to it"
    return Wish(
        action=Action.ROLLBACK,
        rule="divergence",
        why=why,
        numbers=numbers,
        certain=True,
        alert=True,
        good_before=incident.began,
        skip_data=skip,
        hold_commits=True,
    )


def _notice(incident: Incident, limits: Limits, costs: Costs) -> Wish:
    if saved(incident, limits):
        return Wish(action=Action.LOG, rule="notice", why=f"{incident.root.summary}; a checkpoint has been made for that")
    return Wish(action=Action.CHECKPOINT, rule="notice", why=f"{incident.root.summary}; a checkpoint before that", certain=True, numbers=costs.numbers())


def _hang(incident: Incident, costs: Costs) -> Wish:
    root = incident.root
    if not sure(incident):
        return Wish(action=Action.LOG, rule="hang_unsure", why=f"{root.summary}; not certain", alert=True)
    why = f"{root.summary}; the job hangs, and would until a time limit of {costs.detect_s:.0f} s"
    return Wish(
        action=Action.RESTART,
        rule="hang",
        why=why,
        node=root.node,
        ranks=incident.ranks,
        numbers=costs.numbers(),
        certain=True,
        alert=True,
        agreed=False,
    )


def _straggler(world: World, incident: Incident, costs: Costs, now: float) -> Wish:
    """Leave out whom all wait for, if the job is faster without, and has been slow for long enough for that to pay."""
    root = incident.root
    slow = slowdown(incident, costs)
    lasted = max(0.0, now - incident.began)
    due = costs.pays_after(slow)
    count = len(world.nodes)
    least = 0.0 if world.spare else 1.0 / (count - 1) if count > 1 else math.inf
    numbers = {**costs.numbers(), "slowdown": round(slow, 4), "lasted_s": round(lasted, 1), "pays_after_s": _finite(due), "drop_above": _finite(least)}
    told = f"{root.summary}; {100 * slow:.0f} % slower"
    if not root.node:
        return _about(incident, numbers, Action.LOG, "straggler", f"{told}, on no known node", alert=True)
    if not worth_dropping(slow, count, world.spare):
        why = f"{told}, but {count} nodes without one are {100 * min(least, 99.0):.0f} % slower, and none stands by"
        return _about(incident, numbers, Action.LOG, "straggler_kept", why, alert=True)
    if lasted <= due:
        why = f"{told}; to go on without it pays after {due:.0f} s, and it has lasted {lasted:.0f} s"
        return _about(incident, numbers, Action.LOG, "straggler_waits", why)
    instead = "a node that stands by takes its place" if world.spare else f"{count - 1} nodes are faster without it"
    why = f"{told} for {lasted:.0f} s, more than the {due:.0f} s after which leaving it out pays; {instead}"
    return _about(incident, numbers, Action.EXCLUDE, "straggler", why, alert=True)


def slowdown(incident: Incident, costs: Costs) -> float:
    """By how much a straggler makes a step longer: 0.2 for 1.2 times as long. 0 where no number says so."""
    found = 0.0
    for number in (number for sign in incident.own if sign.kind in STRAGGLERS for number in sign.numbers if number.name == WORK):
        usual = number.baseline or number.peers
        if number.value is None or not usual or usual <= 0.0:
            continue
        # Its own work is a part of the step only; where the step is known, the longer work is measured by that.
        found = max(found, (number.value - usual) / max(usual, (costs.step_s or 0.0) - (number.value - usual)))
    return found


def _drift(state: State, world: World, incident: Incident, limits: Limits, costs: Costs, now: float) -> Wish:
    """Everything else: save first, then act if the evidence carries that."""
    root = incident.root
    p, needed, saving = probability(state, incident), costs.restart_from, costs.checkpoint_from
    lasted = max(0.0, now - incident.began)
    numbers = {**costs.numbers(), "p": p, "p_restart": _finite(needed), "p_checkpoint": _finite(saving), "lasted_s": round(lasted, 1)}
    if root.scope is not Scope.JOB and root.node and root.node not in world.nodes:
        return _about(incident, numbers, Action.LOG, "not_training", f"{root.summary}; {root.node} does not train in this job now")
    if root.fault is Fault.HARDWARE and root.node and sure(incident) and p >= needed:
        why = f"{root.summary}; a failure is likely ({p:.0%} against {needed:.0%} that make it worth it), so {root.node} goes before it fails"
        return _about(incident, numbers, Action.EXCLUDE, "hardware", why, alert=True)
    if not saved(incident, limits) and p >= saving:
        why = f"{root.summary}; {p:.0%} for a failure is worth a checkpoint, which is so from {saving:.1%} on"
        return _about(incident, numbers, Action.CHECKPOINT, "early_checkpoint", why)
    if root.scope is Scope.JOB:
        return _about(incident, numbers, Action.LOG, "job_wide", f"{root.summary}; it concerns the whole job, and a restart would not change that", alert=True)
    if root.fault is Fault.HARDWARE:
        return _about(incident, numbers, Action.LOG, "hardware_unsure", f"{root.summary}; a restart would not change that, and too little says so", alert=True)
    if not sure(incident) and not persisting(state, incident):
        why = f"{root.summary}; neither certain nor corroborated, and it has not held for {state.settings.persist_s:.0f} s"
        return _about(incident, numbers, Action.LOG, "not_persisting", why)
    if p < needed:
        why = f"{root.summary}; {p:.0%} for a failure, and a restart is worth it from {min(needed, 9.99):.0%} on"
        return _about(incident, numbers, Action.LOG, "below_p", why)
    reason = "certain" if root.certainty is Certainty.CERTAIN else "corroborated" if incident.corroborated else f"it has held for {lasted:.0f} s"
    why = f"{root.summary}; {reason}, {p:.0%} for a failure against {needed:.0%} that make a restart worth it"
    return _about(incident, numbers, Action.RESTART, "drift", why, alert=True)


def _about(incident: Incident, numbers: dict[str, float], action: Action, rule: str, why: str, *, alert: bool = False) -> Wish:
    """A wish that concerns where the incident's root is."""
    return Wish(action=action, rule=rule, why=why, node=incident.root.node, ranks=incident.ranks, numbers=numbers, certain=sure(incident), alert=alert)


def saved(incident: Incident, limits: Limits) -> bool:
    """Whether a checkpoint was asked for, or committed, since this began to be told."""
    if limits.progress.checkpoint_at is not None and limits.progress.checkpoint_at >= incident.opened:
        return True
    return any(deed.action is Action.CHECKPOINT and deed.at >= incident.opened for deed in limits.deeds)


def _finite(value: float) -> float:
    """A number for people and JSON: what is infinite is large."""
    return round(min(value, 1e9), 4)
