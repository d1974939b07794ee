"""What to do now: one decision for the failure that happened, or one for each incident.

Owns: the order in which incidents are heard, and what budgets, guards, the pause and the mode leave of what they ask for. Must not: weigh evidence
(`prevention`), or carry anything out.

At most one decision of a call stops the workers; the others' turn comes again. One incident has each action once: who carries a decision out writes
`state.ledger.after(decision, state.progress)` in the same transaction, and the next call sees it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elasticd.policy import guards
from elasticd.policy.budgets import Limits, Refusal
from elasticd.policy.costs import costs
from elasticd.policy.decisions import DISRUPTIVE, Action, Decision
from elasticd.policy.evidence import Certainty, Incident, Standing, merged
from elasticd.policy.prevention import Wish, probability, saved, sure, wish
from elasticd.policy.recovery import recover
from elasticd.policy.settings import EXIT_SAME_AGAIN, Mode

if TYPE_CHECKING:
    from elasticd.policy.costs import Costs
    from elasticd.policy.state import State

_HEARD: Final = {Certainty.CERTAIN: 0, Certainty.STRONG: 1, Certainty.WEAK: 2}
_UNBOUND: Final = frozenset({Action.ROLLBACK, Action.STOP})
"""Bounded by their own rule: a job that trains on a bad state gains nothing from waiting."""
_FINAL: Final = frozenset({"paused", "done", "busy", "already_out", "not_training"})
"""Refusals after which nothing less is done either."""
_SKEW: Final = 60.0
"""Seconds by which a detector's clock may be before the coordinator's: what was done since an incident was opened was done for it."""


def decide(state: State, now: float) -> tuple[Decision, ...]:
    """What to do.

    Args:
        state: all that is seen.
        now: seconds since the epoch.

    Returns:
        One decision if `state.failure` is set; else one for each incident, the surest first.
    """
    if state.failure is not None:
        return (recover(state, state.failure, now),)
    incidents = sorted(merged(state.incidents), key=lambda one: (_HEARD[one.root.certainty], not one.corroborated, one.opened, one.id))
    state = replace(state, incidents=tuple(incidents))
    decisions: list[Decision] = []
    for incident in incidents:
        decision = _one(state, incident, now, busy=next((one for one in decisions if one.would in DISRUPTIVE), None))
        decisions.append(decision)
        state = replace(state, ledger=state.ledger.after(decision, state.progress))
    return tuple(decisions)


def _one(state: State, incident: Incident, now: float, busy: Decision | None) -> Decision:
    if state.world is None:
        over = incident.standing is Standing.OVER
        wanted = Wish(
            action=Action.LOG, rule="over" if over else "not_training", why=f"{incident.root.summary}; {'over' if over else 'no generation trains now'}"
        )
        return _decision(state, incident, wanted, Action.LOG, None, now)
    since = None if state.progress.checkpoint_at is None else max(0.0, now - state.progress.checkpoint_at)
    estimate = costs(state.measured, state.settings, since)
    known = limits(state, now)
    wanted = wish(state, incident, known, estimate, now)
    would, refusal = _allowed(state, incident, wanted, known, estimate, busy)
    return _decision(state, incident, wanted, would, refusal, now)


def _allowed(state: State, incident: Incident, wanted: Wish, known: Limits, estimate: Costs, busy: Decision | None) -> tuple[Action, Refusal | None]:
    """What budgets and guards leave of a wish, in mode "act"."""
    if wanted.action is Action.LOG:
        return Action.LOG, None
    refusal = _refused(state, incident, wanted, known, busy)
    if refusal is None:
        return wanted.action, None
    # The rung below: what is likely to come is not held up by a budget, but its price is kept low.
    may_fall = wanted.action in (Action.RESTART, Action.EXCLUDE) and wanted.agreed and refusal.rule not in _FINAL
    if may_fall and not saved(incident, known) and probability(state, incident) >= estimate.checkpoint_from and known.refuse_checkpoint() is None:
        return Action.CHECKPOINT, refusal
    return Action.LOG, refusal


def _refused(state: State, incident: Incident, wanted: Wish, known: Limits, busy: Decision | None) -> Refusal | None:
    if state.paused:
        return Refusal(rule="paused", why="an operator has paused what is done of free will")
    if any(deed.about == incident.id and deed.action is wanted.action and deed.at >= incident.opened - _SKEW for deed in known.deeds):
        return Refusal(rule="done", why="that has been done for it")
    if busy is not None:
        return Refusal(rule="busy", why=f"the workers stop for {busy.about} already")
    if wanted.action is Action.CHECKPOINT:
        return known.refuse_checkpoint()
    if wanted.action in _UNBOUND:
        return None
    if wanted.action is Action.EXCLUDE:
        refusal = guards.refuse_exclusion(state, wanted.node, statistic=not wanted.certain)
        if refusal is not None:
            return refusal
    return known.refuse_stop_of_workers(incident.root.fingerprint, certain=wanted.certain)


def _decision(state: State, incident: Incident, wanted: Wish, would: Action, refusal: Refusal | None, now: float) -> Decision:
    mode = state.settings.mode
    action = would if mode is Mode.ACT else Action.LOG
    quiet = refusal is not None and refusal.rule in ("done", "busy", "already_out")
    why = wanted.why
    if refusal is not None:
        why += f". Not done ({wanted.action.value}): {refusal.why}" + ("; an early checkpoint instead" if would is Action.CHECKPOINT else "")
    if would is not action:
        why += f". Mode {mode.value}: {would.value} is not done"
    return Decision(
        action=action,
        would=would,
        wanted=wanted.action,
        rule=refusal.rule if refusal is not None else wanted.rule,
        why=why,
        about=incident.id,
        fingerprint=incident.root.fingerprint,
        at=now,
        node=wanted.node or incident.root.node,
        ranks=wanted.ranks or incident.ranks,
        numbers=wanted.numbers,
        alert=(wanted.alert or refusal is not None or would is not action) and not quiet,
        until=_until(state, incident, would, now),
        agreed=wanted.agreed,
        good_before=wanted.good_before,
        skip_data=wanted.skip_data,
        hold_commits=wanted.hold_commits and mode is Mode.ACT and not state.paused,
        certain=wanted.certain,
        exit_code=EXIT_SAME_AGAIN if would is Action.STOP else None,
    )


def _until(state: State, incident: Incident, would: Action, now: float) -> float | None:
    """When a node that is left out may come back: one that is slow by itself, one that is broken, or was left out too often, when somebody has looked."""
    if would is not Action.EXCLUDE or sure(incident) or not incident.root.node:
        return None
    if limits(state, now).exclusions(incident.root.node) + 1 >= state.settings.node_exclusions:
        return None
    return now + state.settings.exclusion_s


def limits(state: State, now: float) -> Limits:
    """What the ledger allows at this moment."""
    return Limits(
        ledger=state.ledger,
        settings=state.settings,
        progress=state.progress,
        cluster=state.cluster.stops,
        restart_s=costs(state.measured, state.settings).restart_s,
        now=now,
    )
