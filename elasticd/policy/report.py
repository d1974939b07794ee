"""What came of it: what was done, or would have been, and what failures followed.

Owns: counting, and the sentences. Must not: decide, or claim a saving that nobody measured: what is an estimate is called "about".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd.policy.budgets import Deed, PastFailure
from elasticd.policy.costs import saved_by_checkpoint, saved_by_dropping
from elasticd.policy.decisions import DISRUPTIVE, Action
from elasticd.policy.settings import HOUR

_WORDS = {
    Action.CHECKPOINT: ("made", "early checkpoint"),
    Action.RESTART: ("restarted", ""),
    Action.ROLLBACK: ("gone back to a good state", ""),
    Action.EXCLUDE: ("left a node out", ""),
    Action.STOP: ("stopped the job", ""),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterfactual:
    """What one action came to.

    Attributes:
        done: it was done, or would have been in mode "act".
        count: how often.
        followed: after how many of them a failure came within the time, on the same node where the action named one.
        hours: over which.
        cost_s: of all of them, as estimated when they were decided.
    """

    action: Action
    done: bool
    count: int
    followed: int
    hours: float
    cost_s: float

    def __str__(self) -> str:
        verb, thing = _WORDS[self.action]
        times = f"{self.count} time{'s' * (self.count != 1)}"
        what = f"{self.count} {thing}{'s' * (self.count != 1)}" if thing else times
        said = f"{verb} {what}" if self.done else f"would have {verb} {what}"
        return f"{said} in {_hours(self.hours)}, {self.followed} followed by a failure"


def counterfactual(
    deeds: Sequence[Deed], failures: Sequence[PastFailure], *, since: float, now: float, followed_s: float, done: bool = False
) -> tuple[Counterfactual, ...]:
    """Count what would have been done (or with `done` what was) since a moment, by action.

    An action that was really done may have forestalled its failure; only for one that was not does "not followed" mean that it would have been for nothing.

    Args:
        since, now: seconds since the epoch.
        followed_s: how soon a failure has to come to have followed.
    """
    found = []
    for action in _WORDS:
        own = [deed for deed in deeds if deed.action is action and deed.done == done and since <= deed.at <= now]
        if own:
            found.append(
                Counterfactual(
                    action=action,
                    done=done,
                    count=len(own),
                    followed=sum(followed(deed, failures, followed_s) for deed in own),
                    hours=(now - since) / HOUR,
                    cost_s=sum(deed.cost_s for deed in own),
                )
            )
    return tuple(found)


def followed(deed: Deed, failures: Sequence[PastFailure], within_s: float) -> bool:
    """Whether a failure came that soon after it, on its node if it names one and the failure does too."""
    return any(0.0 <= one.at - deed.at <= within_s and (not deed.node or not one.node or one.node == deed.node) for one in failures)


def came_to(
    action: Action, numbers: Mapping[str, float], *, at: float, failed_at: float | None, step: int | None = None, step_s: float | None = None
) -> str:
    """One sentence on what an action came to, as far as it is known by now; "" where nothing can be said.

    Args:
        numbers: that it was decided on, with "step" and "step_s" of that moment where they were known.
        at: when it was decided, seconds since the epoch.
        failed_at: the first failure that followed it, None if none has.
        step: the job's last step now. step_s: how long one takes now.
    """
    cost = numbers.get("C_s", 0.0) + (numbers.get("R_s", 0.0) if action in DISRUPTIVE else 0.0)
    if action is Action.CHECKPOINT and "C_s" in numbers:
        if failed_at is None:
            return f"cost {duration(cost)} at most; no failure has followed"
        return told(action, saved_s=saved_by_checkpoint(failed_at=failed_at, taken_at=at, before_at=at - numbers.get("L_s", 0.0), cost_s=cost), cost_s=cost)
    if action is Action.EXCLUDE and "slowdown" in numbers:
        before = numbers.get("step_s")
        if before is None or step is None or step_s is None or "step" not in numbers:
            return ""
        steps = max(0, step - int(numbers["step"]))
        return told(action, saved_s=saved_by_dropping(before_step_s=before, after_step_s=step_s, steps=steps, took_s=cost), cost_s=cost)
    if action in (Action.RESTART, Action.EXCLUDE) and "D_s" in numbers:
        would = sum(numbers.get(name, 0.0) for name in ("L_s", "D_s", "R_s"))
        return f"cost about {duration(cost)}; the failure that it was to forestall would have cost about {duration(would)}"
    return ""


def told(action: Action, *, saved_s: float, cost_s: float) -> str:
    """One sentence on what an action saved and cost: "this restart saved about 12 min, cost 0.4 s".

    Args:
        saved_s: net of what it cost; below 0 says so.
    """
    if saved_s >= 0.0:
        return f"this {action.value} saved about {duration(saved_s)}, cost {duration(cost_s)}"
    return f"this {action.value} has saved nothing so far, cost {duration(cost_s)}"


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use: "0.4 s", "12 min", "3.5 h"."""
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 2.0 * HOUR else f"{seconds / HOUR:.1f} h"


def _hours(hours: float) -> str:
    return f"{hours:.0f} h" if hours >= 10.0 else f"{hours:.1f} h"
