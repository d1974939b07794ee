"""What is done about a failure that happened: restart, go on without a node, go back, or stop.

Owns: those decisions. Must not: act on what may come (`prevention`), or wait.

What a mode or a pause forbids is done of free will; a job that has failed goes on in every mode. Only a node is never left out unless the mode is "act".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elasticd.policy import guards
from elasticd.policy.budgets import backoff, barren, limit, rolled_back
from elasticd.policy.costs import costs
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.failures import Failure, FailureClass
from elasticd.policy.settings import EXIT_NO_PROGRESS, EXIT_SAME_AGAIN, HOUR, Data, Mode

if TYPE_CHECKING:
    from elasticd.policy.state import State

_SAME_AGAIN: Final = frozenset({FailureClass.CODE, FailureClass.STARTUP, FailureClass.USER, FailureClass.MEMORY, FailureClass.NUMERICS})
_NEVER_BETTER: Final = frozenset({FailureClass.CODE, FailureClass.HARDWARE})
"""Classes whose limits hold for every job; the others' are refilled by progress, and a job that does not tell of its steps would never get theirs back."""
_OWN_TO_A_NODE: Final = frozenset({FailureClass.CODE, FailureClass.USER})
"""Classes that may be a node's: it lacks a package or a mount that the others have."""
_FAILED: Final = 1
"""Exit code of a job that failed, and that is all there is to say."""


def recover(state: State, failure: Failure, now: float) -> Decision:
    """What to do after a failure.

    Args:
        now: seconds since the epoch.
    """
    if failure.cls is FailureClass.MEMBERSHIP:
        return _after_loss(state, failure, now)
    cycles = barren(state.ledger, failure, state.progress)
    if state.tells_steps and cycles >= state.settings.barren_cycles:
        why = f"{cycles} failures in a row without a step beyond {state.progress.step}, the last: {failure.summary}"
        return _stop(failure, now, rule="no_progress", why=why, exit_code=EXIT_NO_PROGRESS, numbers={"cycles": cycles, "step": state.progress.step})
    if failure.cls is FailureClass.PREEMPTION:
        return _go_on(state, failure, now, rule="preempted", why=f"{failure.summary}; somebody asked for that, and no budget is charged")
    if failure.cls is FailureClass.NUMERICS and _went_back(state, now):
        why = f"{failure.summary}, again after a return to a good state: that is the model or the data"
        return _stop(failure, now, rule="diverged_again", why=why, exit_code=EXIT_SAME_AGAIN, numbers={"step": state.progress.step})
    used, most = state.ledger.used(failure.cls, state.progress), limit(failure.cls, state.settings)
    if most is not None and used >= most and (state.tells_steps or failure.cls in _NEVER_BETTER):
        return _used_up(state, failure, now, used, most)
    if failure.cls is FailureClass.HARDWARE:
        return _without(state, failure, now, rule="hardware", used=used, charged=failure.cls)
    return _go_on(state, failure, now, rule=failure.cls.value, why=failure.summary, used=used, charged=failure.cls)


def _went_back(state: State, now: float) -> bool:
    done = [deed for deed in state.ledger.deeds if deed.done]
    return rolled_back(state.ledger, done, state.progress, state.settings, now)


def _used_up(state: State, failure: Failure, now: float, used: int, most: int) -> Decision:
    if failure.cls in _OWN_TO_A_NODE and _only_there(state, failure):
        why = f"{failure.summary}; the job has trained, and it fails so on no other node"
        return _without(state, failure, now, rule="only_there", why=why, used=used, charged=failure.cls)
    again = failure.cls in _SAME_AGAIN
    remedy = "a restart would end the same way: change that first" if again else "its budget is used up until a checkpoint is further"
    tried = f" after {used} restart{'s' * (used != 1)}" if used else ""
    return _stop(
        failure,
        now,
        rule=f"{failure.cls.value}_budget",
        why=f"{failure.summary}{tried}; {remedy}",
        exit_code=EXIT_SAME_AGAIN if again else _FAILED,
        numbers={"used": used, "most": most},
    )


def _only_there(state: State, failure: Failure) -> bool:
    """Whether a job that has trained on others fails so on one node alone, which can be done without."""
    if not failure.node or state.progress.step == 0 or state.settings.mode is not Mode.ACT:
        return False
    everywhere = state.ledger.crashes(failure.kind) > state.ledger.crashes(failure.kind, failure.node)
    return not everywhere and guards.refuse_exclusion(state, failure.node, statistic=False) is None


def _after_loss(state: State, failure: Failure, now: float) -> Decision:
    losses = {node: state.ledger.losses(node, state.progress) + 1 for node in failure.nodes}
    worst = max(losses, key=lambda node: losses[node], default="")
    if worst and losses[worst] >= state.settings.flapping and worst not in state.cluster.excluded:
        why = f"{worst} was lost {losses[worst]} times since the last checkpoint"
        return _without(state, failure, now, rule="flapping", node=worst, why=why, until=now + HOUR)
    return _go_on(state, failure, now, rule="loss", why=f"{failure.summary}; the others go on")


def _without(  # what differs between the two that leave a node out
    state: State,
    failure: Failure,
    now: float,
    *,
    rule: str,
    node: str = "",
    why: str = "",
    used: int = 0,
    charged: FailureClass | None = None,
    until: float | None = None,
) -> Decision:
    """Go on without the node, if that may be."""
    node, why = node or failure.node, why or failure.summary
    refusal = guards.refuse_exclusion(state, node, statistic=False) if node else None
    if not node or refusal is not None:
        said = f"; it cannot be left out: {refusal.why}" if refusal else ""
        return _go_on(
            state, failure, now, rule=refusal.rule if refusal else rule, why=why + said, used=used, charged=charged, wanted=Action.EXCLUDE, alert=True
        )
    acts = state.settings.mode is Mode.ACT
    return Decision(
        action=Action.EXCLUDE if acts else Action.RESTART,
        would=Action.EXCLUDE,
        wanted=Action.EXCLUDE,
        rule=rule,
        why=f"{why}; the job goes on without {node}" if acts else f"{why}; in mode act the job would go on without {node}",
        about=failure.fingerprint,
        fingerprint=failure.fingerprint,
        at=now,
        node=node,
        ranks=() if failure.rank is None else (failure.rank,),
        numbers={"used": used},
        alert=True,
        until=until,
        agreed=False,
        certain=True,
        charged=charged.value if charged else "",
        failure=True,
    )


def _go_on(  # one place where a restart is worded
    state: State,
    failure: Failure,
    now: float,
    *,
    rule: str,
    why: str,
    used: int = 0,
    charged: FailureClass | None = None,
    wanted: Action = Action.RESTART,
    alert: bool = False,
) -> Decision:
    delay = backoff(used, state.settings, state.dice) if charged else 0.0
    back = failure.cls is FailureClass.NUMERICS
    action = Action.ROLLBACK if back else Action.RESTART
    most = limit(failure.cls, state.settings)
    estimate = costs(state.measured, state.settings)
    numbers = {"used": float(used), "delay_s": round(delay, 3), "R_s": round(estimate.restart_s, 3)}
    if charged and most is not None:
        numbers["most"] = most
        why = f"{why}; restart {used + 1} of {most}" + (f" in {delay:.1f} s" if delay else "")
    return Decision(
        action=action,
        would=action,
        wanted=Action.ROLLBACK if back else wanted,
        rule=rule,
        why=why,
        about=failure.fingerprint,
        fingerprint=failure.fingerprint,
        at=now,
        node=failure.node,
        ranks=() if failure.rank is None else (failure.rank,),
        numbers=numbers,
        alert=alert,
        after=now + delay if delay else None,
        agreed=False,
        good_before=failure.at if back else None,
        skip_data=back and state.settings.after_divergence is Data.SKIP,
        charged=charged.value if charged else "",
        failure=True,
    )


def _stop(failure: Failure, now: float, *, rule: str, why: str, exit_code: int, numbers: dict[str, float]) -> Decision:
    return Decision(
        action=Action.STOP,
        would=Action.STOP,
        wanted=Action.STOP,
        rule=rule,
        why=why,
        about=failure.fingerprint,
        fingerprint=failure.fingerprint,
        at=now,
        node=failure.node,
        ranks=() if failure.rank is None else (failure.rank,),
        numbers=numbers,
        alert=True,
        agreed=False,
        exit_code=exit_code,
        charged=failure.cls.value,
        failure=True,
    )
