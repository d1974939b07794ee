"""What an agent says of its job: one small file, replaced whole about once a second, that the daemon of the node reads.

Owns: its fields, units and place, writing it and reading it. Must not: measure, decide, or know where a number comes from.

The file is `reports/JOB.json` in the daemon's run directory. It outlives the daemon, so a new daemon shows the same numbers; counters begin again
at 0 with a new agent, as Prometheus expects of counters. Times are seconds since the epoch, durations seconds.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

REPORT_MAX: Final = 256 * 1024
"""Bytes of a report that are read."""
DURATION_BOUNDS: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Upper bounds, in seconds, of the buckets in which recoveries and checkpoints are counted."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Total = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Activity(StrEnum):
    """What the wall time of an agent went into. Every moment of its life is in exactly one."""

    TRAINING = "training"  # steps that had not been made before
    REPEATING = "repeating"  # steps that were lost, made again
    WAITING = "waiting"  # for enough nodes, or as a spare
    FORMING = "forming"  # from the workers' end, or a new member, to the next generation
    STARTING = "starting"  # workers start: from the generation to their first word
    RESTORING = "restoring"  # they take over the state, from the first word to the first step's beginning
    STOPPING = "stopping"  # they were told to stop and have not all ended
    FROZEN = "frozen"  # no etcd, and nobody trains here


class Phase(StrEnum):
    """Parts of a recovery, one after the other."""

    STOP = "stop"  # from the order, or the first worker's end, to the last worker's
    FORM = "form"  # to the next generation
    START = "start"  # to the workers' first word
    RESTORE = "restore"  # to the state taken over
    FIRST_STEP = "first_step"  # to the end of the first step


class Plain(BaseModel):
    """Base: unknown fields are left alone, so that an agent and a daemon of two versions understand each other."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Histogram(Plain):
    """Durations that were counted.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        counts: not cumulative; one more than bounds.
        total: their sum, in seconds.
    """

    bounds: tuple[float, ...] = DURATION_BOUNDS
    counts: tuple[Count, ...] = (0,) * (len(DURATION_BOUNDS) + 1)
    total: Total = 0.0

    def plus(self, seconds: float) -> Self:
        """The same and one more."""
        place = bisect_left(self.bounds, seconds)
        counts = tuple(count + (index == place) for index, count in enumerate(self.counts))
        return self.model_copy(update={"counts": counts, "total": self.total + seconds})


class RankReport(Plain):
    """One worker of this node, over its last windows (about ten seconds).

    Attributes:
        local_rank, rank: which.
        at: when its last window ended.
        step: its last.
        step_seconds: mean of a step.
        phases: of `trainer.wire.window.PHASES` -> mean seconds in a step.
        loss, grad_norm: last finite ones; None if it gave none.
        nonfinite: values of its loss or gradient norm that were not finite, since the agent began.
        memory: bytes, by kind.
    """

    local_rank: Count
    rank: Count
    at: float = 0.0
    step: Count = 0
    step_seconds: Total = 0.0
    phases: dict[str, Total] = {}
    loss: float | None = None
    grad_norm: float | None = None
    nonfinite: Count = 0
    memory: dict[str, Count] = {}


class CheckpointReport(Plain):
    """Checkpoints of this node.

    Attributes:
        written, failed: since the agent began.
        step, at, nbytes: of the last that is whole on disk; at 0: none yet.
        every_s: seconds between two, as set; 0 if none are asked for by time.
        durations: from the order to the disk.
        committed_step: newest of the job that counts.
    """

    written: Count = 0
    failed: Count = 0
    step: Count = 0
    at: float = 0.0
    nbytes: Count = 0
    every_s: Total = 0.0
    durations: Histogram = Histogram()
    committed_step: Count = 0


class SnapshotReport(Plain):
    """Snapshots in memory.

    Attributes:
        step: newest that is whole; 0 if none.
        buffers: that there are; 0 if there is no room.
        on_disk: they did not fit into memory.
    """

    step: Count = 0
    buffers: Count = 0
    on_disk: bool = False


class JobReport(Plain):
    """One job on one node.

    Attributes:
        at: when this was written.
        started_at: the agent's start.
        activity: at this moment.
        generation: at hand, or the last; 0 before the first.
        world_size: workers of all nodes, nodes: how many; of the generation at hand, 0 while there is none.
        node_rank: of this node in it; -1 if it has none.
        target_nodes, min_nodes, max_nodes: as wanted.
        restarts_used, restarts_max: the job's budget.
        step: newest step of this node's workers.
        stepped_at: when that was made.
        steps, samples: of this node since the agent began; a step counts once however many workers take part, samples are those of all workers here.
        steps_lost: that had to be made again.
        seconds: `Activity` -> wall time since the agent began, up to a few seconds ago (`elasticd.agent.timeline`): what workers tell of their steps
            comes later than it was so. Of an agent that has ended, all of it.
        downtime: kind of cause (`rendezvous.records.CauseKind`) -> seconds from the last step before to the first after.
        rescales: kind of cause -> generations that this node was given.
        worker_ends: "killed", "failed", "stopped", "finished" -> workers that ended so.
        recovery: whole recoveries, from the order or the first worker's end to the end of the first step.
        recovery_phases: `Phase` -> seconds of all recoveries together.
        step_times: steps by their length, of the lowest local rank.
        loss, grad_norm: of the lowest local rank.
        ranks: by local rank.
        slowest: rank that was slowest by its own work, and how many times the median of all ranks; on rank 0's node only.
        dropped: windows of telemetry that were lost.
        problem: what keeps the job from going on, in one line; "" if nothing.
    """

    v: Literal[1] = 1
    job: str
    node: str
    at: float
    started_at: float = 0.0
    activity: Activity = Activity.WAITING
    generation: Count = 0
    world_size: Count = 0
    nodes: Count = 0
    node_rank: int = -1
    target_nodes: Count = 0
    min_nodes: Count = 0
    max_nodes: Count = 0
    restarts_used: Count = 0
    restarts_max: Count = 0
    step: Count = 0
    stepped_at: float = 0.0
    steps: Count = 0
    samples: Count = 0
    steps_lost: Count = 0
    seconds: dict[Activity, Total] = {}
    downtime: dict[str, Total] = {}
    rescales: dict[str, Count] = {}
    worker_ends: dict[str, Count] = {}
    recovery: Histogram = Histogram()
    recovery_phases: dict[Phase, Total] = {}
    step_times: Histogram = Histogram()
    loss: float | None = None
    grad_norm: float | None = None
    ranks: tuple[RankReport, ...] = ()
    slowest: tuple[int, float] | None = None
    checkpoint: CheckpointReport = CheckpointReport()
    snapshot: SnapshotReport = SnapshotReport()
    dropped: Count = 0
    problem: str = ""

    def write(self, path: Path) -> None:
        """Replace the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(self.model_dump_json())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What lies there; None if there is nothing that makes sense."""
        try:
            with path.open("rb") as file:
                data = file.read(REPORT_MAX + 1)
            return cls.model_validate_json(data) if len(data) <= REPORT_MAX else None
        except (OSError, ValidationError):
            return None
