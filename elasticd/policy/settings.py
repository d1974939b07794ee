"""Every number that decisions go by, with its unit, its limits and the reason for it.

Owns: names, defaults, limits, and parsing. Must not: decide. Where a reason says "judgement" nobody has measured it yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from elasticd.errors import UsageError

EXIT_NO_PROGRESS: Final = 10
"""Exit code of a job that was stopped since it restarted again and again without one new step."""
EXIT_SAME_AGAIN: Final = 11
"""Exit code of a job that was stopped since a restart would end the same way: its code, data or configuration has to change first."""

DAY: Final = 86400.0
HOUR: Final = 3600.0


class Mode(StrEnum):
    """How far the policy may go of its own will. Recovery from what has happened goes on in every mode."""

    SHADOW = "shadow"
    """Note what would be done."""
    ADVISE = "advise"
    """Tell people what they should do."""
    ACT = "act"
    """Do it."""


class Data(StrEnum):
    """What becomes of the data that led to a divergence, after the return to the last good state."""

    SKIP = "skip"
    KEEP = "keep"


# Not plain defaults, so that limits and reason stand beside each number.
def _number(default: float, least: float, most: float, why: str) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "why": why})


def _word(default: StrEnum, why: str) -> Any:
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """See the module. Names that end in _s are seconds, in _share and p_* are 0 to 1, the rest counts. `explain` lists them with their reasons.

    Raises:
        UsageError: a number is not within its limits.
    """

    mode: Mode = _word(Mode.ACT, "budgets, guards and costs bound what a false alarm can do; a site that wants to look first says shadow")  # noqa: RUF009 - it is a field()
    after_divergence: Data = _word(Data.SKIP, "the same data on the same state diverge again; who wants every sample trained on says keep")  # noqa: RUF009 - it is a field()

    # --- how evidence counts
    persist_s: float = _number(900.0, 0.0, DAY, "longer than any false alarm of the forest held in 12,012 simulated benign node-hours (820 s)")
    stale_s: float = _number(120.0, 1.0, DAY, "as long as detectors keep an incident open without new evidence")
    certain_valid_s: float = _number(600.0, 1.0, DAY, "an Xid is written once and stays true; a coordinator may be away for some leases")
    p_certain: float = _number(0.9, 0.0, 1.0, "signatures aim at a precision of 0.98; not each of them is followed by a failure; judgement")
    p_corroborated: float = _number(0.6, 0.0, 1.0, "two detectors that share no measurement; judgement")
    p_strong: float = _number(0.4, 0.0, 1.0, "a comparison with peers that held on; judgement")
    p_persisting: float = _number(0.3, 0.0, 1.0, "a statistic that held for persist_s; debouncing 3 of 5 cut false alarms to a sixth on NAB; judgement")
    p_weak: float = _number(0.1, 0.0, 1.0, "a statistic alone: 0.7 to 66 false alarms in 1000 series-hours on NAB; judgement")
    together_share: float = _number(0.3, 0.0, 1.0, "if more ranks than this show it at once it is the job, its data or its storage, not a node; judgement")

    # --- what things cost until the job has measured them
    checkpoint_s: float = _number(40.0, 0.0, DAY, "what a checkpoint holds a job up; a large model on a shared file system")
    restart_s: float = _number(180.0, 0.0, DAY, "from the stop to the first new step; long, so that too little is done rather than too much")
    detect_s: float = _number(600.0, 0.0, DAY, "NCCL's time limit: what a hang costs before anybody notices, if nobody looks")
    interval_s: float = _number(1800.0, 0.0, 30 * DAY, "from one checkpoint to the next, where none is known")

    # --- failures that happened: restarts by class until a checkpoint is further than the last one
    code_restarts: int = _number(0, 0, 1000, "an import, shape or argument error ends the same way each time (pytorch#133877, dlrover#1068)")
    startup_restarts: int = _number(0, 0, 1000, "a script that raised before its first step raises again (pytorch#60910)")
    user_restarts: int = _number(1, 0, 1000, "once, to see whether it comes again at the same place (NVRx: one confirmation)")
    memory_restarts: int = _number(1, 0, 1000, "memory may have been another process's; a second time it is the job's own")
    numerics_restarts: int = _number(1, 0, 1000, "back to the last good state once; if it diverges again that is the model's or the data's")
    unknown_restarts: int = _number(3, 0, 1000, "a general ceiling without progress (NVRx: 3)")
    infrastructure_restarts: int = _number(3, 0, 1000, "the same ceiling; network and storage usually come back within its back-off")
    hardware_restarts: int = _number(3, 0, 1000, "each leaves a node out; after three something else is broken")
    barren_cycles: int = _number(3, 1, 1000, "failures in a row without one new step after which nothing is gained by another (NVRx: 3)")
    backoff_first_s: float = _number(1.0, 0.0, HOUR, "the first restart is at once, the second after this, each further one after twice as long")
    backoff_most_s: float = _number(60.0, 0.0, DAY, "longer than a file server takes to fail over, shorter than people wait")
    backoff_jitter: float = _number(0.5, 0.0, 1.0, "the share of a delay that is drawn: many jobs fail together when their storage does")
    crash_repeats: int = _number(2, 1, 1000, "crashes of one sort on one node, and on no other, that make it the node's (tr11, 2022-03-21)")
    flapping: int = _number(3, 1, 1000, "losses of one node without a new checkpoint after which it is left out (pytorch#147064)")
    hardware_root_s: float = _number(600.0, 0.0, DAY, "a fault of hardware this long before a failure is its root: NCCL's time limit lies between the two")
    hardware_memory_s: float = _number(3600.0, 0.0, DAY, "an OOM this soon after a fault of hardware on the node is its echo (tr1-13B: the next start there)")

    # --- failures that may come
    restarts_per_hour: int = _number(1, 0, 1000, "of free will, without certain evidence, in one job; judgement")
    restarts_per_day: int = _number(4, 0, 1000, "the same; 0.1 % of overhead allows 16 false ones in 1000 job-hours at C + R = 220 s")
    certain_per_hour: int = _number(
        3, 0, 1000, "all that stop the job's workers, certain evidence included; three broken nodes in one hour are one broken switch"
    )
    certain_per_day: int = _number(8, 0, 1000, "the same; judgement")
    fingerprint_restarts: int = _number(3, 0, 1000, "for one thing on one node or rank without a new checkpoint in between (NVRx: 3)")
    statistic_restarts: int = _number(1, 0, 1000, "for one thing that only a statistic sees, in a day: if a restart did not help, a second will not")
    node_exclusions: int = _number(2, 1, 1000, "of one node in a day, the last of them until people have looked: 3 of 63 nodes had half of all failures")
    exclusion_s: float = _number(HOUR, 60.0, 30 * DAY, "of a node that is slow; slow-downs last tens of seconds to 10 h (FALCON)")
    cooldown_s: float = _number(900.0, 0.0, DAY, "after what stopped the workers; judgement")
    cooldown_restarts: float = _number(3.0, 0.0, 1000.0, "the same, in times that a restart takes; the longer of the two, and a new checkpoint, have to pass")
    early_gap_s: float = _number(300.0, 0.0, DAY, "between two early checkpoints: one that holds the job up for 3 s then costs 1 % at most")
    early_per_hour: int = _number(6, 0, 1000, "early checkpoints of one job; what asks for more is no drift but the job's nature; judgement")
    cluster_per_hour: int = _number(
        4, 0, 100_000, "all that stop workers, of all jobs together: more at once is a switch, a file server, or this policy; judgement"
    )
    statistic_share: float = _number(0.1, 0.0, 1.0, "of the cluster's nodes, but one at least, may be left out by statistics alone")
    excluded_share: float = _number(0.3, 0.0, 1.0, "the same for whatever evidence: a driver that fits nowhere is certain everywhere; judgement")
    divergence_clear_steps: int = _number(1000, 1, 10**9, "steps after a return to a good state from which on a divergence is a new one; spikes last 30 to 100")
    rollbacks_per_day: int = _number(2, 0, 1000, "new ones, too, are the model's or the data's from then on; judgement")
    followed_s: float = _number(HOUR, 1.0, DAY, "a failure within this long of what was done, or would have been, is said to have followed")

    def __post_init__(self) -> None:
        """Check every number."""
        for one in fields(self):
            _check(one.name, getattr(self, one.name), one.default, one.metadata)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Settings:
        """Parse values as operators set them; what is not there keeps its default.

        Raises:
            UsageError: a name is not known, or a value not of its type or within its limits. The message names both.
        """
        known = {one.name: one for one in fields(cls)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"policy setting {name!r} is not known", remedy=f"known are {', '.join(known)}")
            default = known[name].default
            if isinstance(default, StrEnum):
                words = [word.value for word in type(default)]
                if value not in words:
                    raise UsageError(f"policy setting {name}: {value!r} is not one of {', '.join(words)}")
                parsed[name] = type(default)(value)
            elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
                parsed[name] = float(value)
            else:
                parsed[name] = value
        return cls(**parsed)

    @classmethod
    def explain(cls) -> list[tuple[str, object, str]]:
        """Name, default and reason of each."""
        return [(one.name, one.default, str(one.metadata["why"])) for one in fields(cls)]


def _check(name: str, value: object, default: object, limits: Mapping[str, Any]) -> None:
    if isinstance(default, StrEnum):
        if not isinstance(value, type(default)):
            raise UsageError(f"policy setting {name}: {value!r} is not one of {', '.join(word.value for word in type(default))}")
        return
    wanted = int if isinstance(default, int) else (int, float)
    kind = "a whole number" if isinstance(default, int) else "a number"
    if isinstance(value, bool) or not isinstance(value, wanted) or not math.isfinite(value):
        raise UsageError(f"policy setting {name}: {value!r} is not {kind}")
    if not limits["least"] <= value <= limits["most"]:
        raise UsageError(f"policy setting {name}: {value} is not within {limits['least']:g} to {limits['most']:g}")
