"""How a member stands in its job, for whoever tells people of it.

Owns: reading that off a view, pure. Must not: decide anything; `membership` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticd.rendezvous.records import MemberId
    from elasticd.rendezvous.view import View


class Place(StrEnum):
    """What a member without workers does."""

    WAITING = "waiting"  # for more nodes, or as a spare
    FORMING = "forming"  # a generation with it is on its way
    FROZEN = "frozen"  # etcd is out of reach


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """See the module.

    Attributes:
        place: counts while no workers run.
        desired, min_nodes, max_nodes: as wanted; 0 before that is known.
        restarts_used, restarts_max: of the job's budget, as far as this member sees it: the coordinator does.
        problem: what keeps the job from going on, in one line; "" if nothing does, or if this member is only a spare.
    """

    place: Place
    desired: int = 0
    min_nodes: int = 0
    max_nodes: int = 0
    restarts_used: int = 0
    restarts_max: int = 0
    problem: str = ""


def standing(view: View, me: MemberId | None, *, whole: bool, frozen: bool) -> Standing:
    """Read it off.

    Args:
        view: the job, as last seen.
        me: this member; None before it is one.
        whole: whether the view holds every member.
        frozen: etcd is out of reach.
    """
    target = view.target.record if view.target else None
    return Standing(
        place=Place.FROZEN if frozen else _place(view, me, whole=whole),
        desired=target.desired if target else 0,
        min_nodes=target.min_nodes if target else 0,
        max_nodes=target.max_nodes if target else 0,
        restarts_used=view.restarts_used,
        restarts_max=target.max_restarts if target else 0,
        problem="etcd is out of reach: membership is frozen" if frozen else _lacking(view, whole=whole),
    )


def _lacking(view: View, *, whole: bool) -> str:
    """Says that there are too few nodes; "" if there are not, or this member cannot see that."""
    target = view.target.record if view.target else None
    if target is None or view.over or view.pending is not None or not whole or len(view.able) >= target.min_nodes:
        return ""
    return f"{len(view.able)} of the {target.min_nodes} nodes needed are here"


def _place(view: View, me: MemberId | None, *, whole: bool) -> Place:
    target = view.target.record if view.target else None
    if target is None or me is None:
        return Place.FORMING  # it has only begun
    if view.over:
        return Place.WAITING
    if view.pending is not None:
        return Place.FORMING if me in view.pending.record.members else Place.WAITING
    if _lacking(view, whole=whole):
        return Place.WAITING
    active = view.active
    if active is None or me in active.ids:
        return Place.FORMING
    spare = target.paused or len(active.members) >= target.limit
    return Place.WAITING if spare else Place.FORMING
