"""States that are void: the job went back from them, since what it trained on from there was bad (PROTOCOL 30).

Owns: which states are void, and how much data is left out after a return. Must not: choose a state (`resume`), or know why it was bad.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elasticd.rendezvous.records import VOID_MAX, RequestKind, Void

if TYPE_CHECKING:
    from elasticd.rendezvous.records import GenerationRecord
    from elasticd.rendezvous.view import View


def is_void(order: tuple[int, int], void: Iterable[Void]) -> bool:
    """Whether the state of this (generation, step) is void: of a stretch's generation or an earlier one, and not before its first bad step.

    Earlier generations count as well: the last one may have begun with what one of them had reached, and what else they hold from that step on, the job
    has left behind.
    """
    generation, step = order
    return any(generation <= one.generation and step >= one.step for one in void)


def voids(view: View) -> tuple[Void, ...]:
    """What is void for the generation that comes next: as before, and what is asked to be rolled back now, or was judged to be bad.

    A stretch is forgotten once a checkpoint of a later generation is committed: nothing older than that is begun with.
    """
    previous = view.generation.record if view.generation else None
    if previous is None:
        return ()
    committed = view.checkpoint.record.generation if view.checkpoint else 0
    kept = [one for one in previous.void if one.generation >= committed]
    asked = view.asked(RequestKind.ROLLBACK)
    if asked is not None:
        step = asked.before or 0
        kept.append(Void(generation=previous.number, step=step, until=max(step, asked.until or 0), skip=asked.skip_data))
    elif view.verdict is not None and view.verdict.void is not None:
        kept.append(view.verdict.void)
    return tuple(kept[-VOID_MAX:])


def steps_left_out(generation: GenerationRecord) -> int:
    """Steps by whose data the workers of a generation move on before they begin: those that led to the stretches that it begins before."""
    order, step = (generation.resume.order, generation.resume.step) if generation.resume else ((0, 0), 0)
    return sum(max(0, one.until - step) for one in generation.void if one.skip and order < (one.generation, one.step))
