"""Which job gets which of the node's slots: a pure function of what is wanted and what is held.

Owns: that decision, and the words for those who wait. Must not: look at the machine, or know what runs (the caller says what is held).

The order is strict, so that it can be foretold: higher priority first, then who has waited longer, then by name. Nobody overtakes a job that waits
and could run here once slots are free; one that never could, since it needs more than the node has, holds up nobody. What is held is kept: no job is
moved or put out for another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Room for one worker.

    Attributes:
        id: names it for as long as the machine is put together as it is: the GPU's UUID, or "slot-3" where there is no GPU.
        gpu_uuid: its GPU, None without one.
        cpus: CPUs near it, to which its worker is bound; none: it is not bound.
        numa: NUMA node that it is on; None: unknown, or it makes no difference.
    """

    id: str
    gpu_uuid: str | None = None
    cpus: tuple[int, ...] = ()
    numa: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The slots of a node, in the order of its GPUs.

    Attributes:
        problems: what an operator should know of how they were found, one line each.
    """

    slots: tuple[Slot, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """A job that is to run here, and does not.

    Attributes:
        slots: how many it needs.
        wants_since: seconds on any clock, the same for all; 0 where it is not known.
    """

    job: str
    priority: int = 0
    slots: int
    wants_since: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Who has what.

    Attributes:
        granted: job -> ids of its slots: all that is held, and what is given now.
        waiting: job -> why it gets none, one line.
        problems: what cannot be right with what is held, one line each.
    """

    granted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def allocate(wants: Sequence[Want], holds: Mapping[str, tuple[str, ...]], inventory: Inventory) -> Allocation:
    """Give free slots to those who want them.

    Args:
        wants: one for each job; those that hold slots already keep just these.
        holds: job -> ids of the slots of a job that runs, wanted or not.
        inventory: what the node has now, which may be less than what is held.
    """
    held = Counter(slot for slots in holds.values() for slot in slots)
    free = [slot for slot in inventory.slots if slot.id not in held]
    granted = {job: tuple(slots) for job, slots in holds.items()}
    waiting: dict[str, str] = {}
    first: Want | None = None  # who waits at the head: all after it wait behind it
    for want in sorted(wants, key=lambda want: (-want.priority, want.wants_since, want.job)):
        if want.job in granted or want.job in waiting:
            continue
        if want.slots > len(inventory.slots):
            waiting[want.job] = f"it needs {_count(want.slots)}, and this node has {len(inventory.slots)}"
        elif first is not None:
            waiting[want.job] = f"behind job {first.job}, which comes before it and waits for {_count(first.slots)}"
        elif want.slots > len(free):
            first = want
            waiting[want.job] = f"it needs {_count(want.slots)}, and {len(free)} of {len(inventory.slots)} are free{_held_by(granted)}"
        else:
            chosen = _close_together(free, want.slots)
            granted[want.job] = tuple(slot.id for slot in free if slot.id in chosen)
            free = [slot for slot in free if slot.id not in chosen]
    return Allocation(granted=MappingProxyType(granted), waiting=MappingProxyType(waiting), problems=_problems(holds, held, inventory))


def _close_together(free: Sequence[Slot], count: int) -> frozenset[str]:
    """Ids of `count` slots on as few NUMA nodes as there can be; of those, on the ones with the least room that is enough."""
    rooms: defaultdict[int | None, list[Slot]] = defaultdict(list)
    for slot in free:
        rooms[slot.numa].append(slot)
    left = list(rooms.values())  # in the order of the inventory, which decides between equals
    chosen: list[Slot] = []
    while len(chosen) < count:
        missing = count - len(chosen)
        enough = [room for room in left if len(room) >= missing]
        # Taking the largest while none is enough needs the fewest; ending in the tightest leaves whole nodes to the next job.
        room = min(enough, key=len) if enough else max(left, key=len)
        left.remove(room)
        chosen += room[:missing]
    return frozenset(slot.id for slot in chosen)


def _problems(holds: Mapping[str, tuple[str, ...]], held: Counter[str], inventory: Inventory) -> tuple[str, ...]:
    present = {slot.id for slot in inventory.slots}
    found = []
    for job, slots in sorted(holds.items()):
        gone = [slot for slot in slots if slot not in present]
        if gone:
            found.append(f"job {job} runs on {', '.join(gone)}, which this node has no longer")
    for slot, count in sorted(held.items()):
        if count > 1:
            found.append(f"{slot} is held {count} times, by {', '.join(sorted(job for job, slots in holds.items() if slot in slots))}")
    return tuple(found)


def _held_by(granted: Mapping[str, tuple[str, ...]]) -> str:
    holders = [f"{job} ({len(slots)})" for job, slots in sorted(granted.items()) if slots]
    return f"; held by {', '.join(holders)}" if holders else ""


def _count(slots: int) -> str:
    return f"{slots} slot" if slots == 1 else f"{slots} slots"
