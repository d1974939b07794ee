"""The words of a decision.

Owns: actions and decisions as values. Must not: decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final


class Action(StrEnum):
    """What is done, from little to much."""

    LOG = "log"
    CHECKPOINT = "checkpoint"
    """One before its time."""
    RESTART = "restart"
    """The same nodes again."""
    ROLLBACK = "rollback"
    """Back to the newest state from before the divergence."""
    EXCLUDE = "exclude"
    """Go on without a node."""
    STOP = "stop"
    """End the job, with a reason."""


DISRUPTIVE: Final = frozenset({Action.RESTART, Action.ROLLBACK, Action.EXCLUDE, Action.STOP})
"""What stops the job's workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is to be done about one incident or one failure, and all that it rests on.

    Attributes:
        action: to be done now, in the mode that is set.
        would: in mode "act", budgets and guards considered.
        wanted: by the evidence and the costs alone.
        rule: which rule decided, a name that stays; that of a budget or guard if one said no.
        why: one sentence for people.
        about: the incident's id, or the failure's fingerprint.
        node, ranks: whom it concerns.
        numbers: what was weighed; seconds where a name ends in _s, probabilities where it begins with p.
        alert: people should look at it.
        after: not before that, seconds since the epoch.
        until: end of an exclusion; None: until somebody has looked at the node.
        agreed: the workers are to stop at a step that all agree on; else they hang, and are killed.
        good_before: for a rollback, no state from then on is to be begun with.
        skip_data: for a rollback, the data from there to the divergence are not trained on again.
        hold_commits: until that is over no checkpoint may be committed: the state may be bad.
        certain: the evidence was certain or corroborated; budgets tell such actions apart.
        exit_code: of the job, if it is stopped.
        charged: the class of failure whose budget it is charged to; "" if none.
        failure: it is about a failure that happened.
    """

    action: Action
    would: Action
    wanted: Action
    rule: str
    why: str
    about: str
    fingerprint: str
    at: float
    node: str = ""
    ranks: tuple[int, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    alert: bool = False
    after: float | None = None
    until: float | None = None
    agreed: bool = True
    good_before: float | None = None
    skip_data: bool = False
    hold_commits: bool = False
    certain: bool = False
    exit_code: int | None = None
    charged: str = ""
    failure: bool = False

    @property
    def acts(self) -> bool:
        """Whether anything is to be done."""
        return self.action is not Action.LOG

    @property
    def withheld(self) -> bool:
        """Whether mode "act" would do more."""
        return self.would is not self.action

    @property
    def key(self) -> str:
        """Names the decision: one incident has one of each action, whoever decides it."""
        return f"{self.about}:{self.would.value}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "numbers": dict(self.numbers), "key": self.key}
