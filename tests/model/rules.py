"""The functions under test, by name, so that a test can take one rule out and see the checker fail.

Owns: which functions a walk runs on, and the habits of agents that the real ones have in `member`, `ownkey`, `desk` and `agent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticd.rendezvous import membership, transitions


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The real thing, unless a test says otherwise. A flag that is False takes a habit out; the number is the rule's."""

    plan: Callable[..., Any] = membership.plan
    react: Callable[..., Any] = membership.react
    observe: Callable[..., Any] = membership.observe
    register: Callable[..., Any] = transitions.register
    activate: Callable[..., Any] = transitions.activate
    commit: Callable[..., Any] = transitions.commit
    judge: Callable[..., Any] = transitions.judge
    fresh_identity: bool = True  # 1: an agent process is a member of its own
    reattach: bool = True  # 4
    blind_after_outage: bool = True  # 4
    lease_needs_loop: bool = True  # 6
    deputy: bool = True  # 8
    look_before_start: bool = True  # 14
    frozen_stop: bool = True  # 15
    name_unreachable: bool = True  # 16
    killed_early_looks: bool = True  # 16: and not only who failed first (agent.agent does not yet)
    keeps_holdings: bool = True  # 3: what a node holds outlives an incarnation
    leaver_stays: bool = True  # 18
    leaver_gives: bool = True  # 18: it also waits until the others have its state
    leaver_waits_for_proposal: bool = True  # 18 (desk does not yet)
    begins_as_told: bool = True  # 22: no member begins elsewhere
    two_disks: bool = True  # 24
    keeps_last: bool = True  # 29: where no generation follows, the newest state is written before it goes
