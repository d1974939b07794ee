"""Metrics of jobs, as they are on this node: from the agent's report, and from what the decision loop knows of them.

Owns: their names, and which of them are true only while an agent lives. Must not: read files (`daemon.reports` does).

Job-wide numbers are said by every node of a job. `elasticd_job_coordinates` is 1 on one of them, to count them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from elasticd.daemon.metrics.families import OTHER, Family, Label, counter, gauge, histogram
from elasticd.observability.report import Activity, JobReport, Phase
from elasticd.rendezvous.records import CauseKind, NodeJobState

if TYPE_CHECKING:
    from elasticd.daemon.board import Turn
    from elasticd.daemon.metrics.families import Sheet
    from elasticd.rendezvous.records import TargetRecord

LIVING: Final = frozenset((NodeJobState.RUNNING, NodeJobState.LEAVING))
"""States in which there is an agent."""
STEP_PHASES: Final = ("data", "forward", "backward", "communication", "optimizer")
"""Of `trainer.wire.window.PHASES`, which is not imported here, those that tell ranks apart. The rest of a step is its length less these."""
MEMORY_KINDS: Final = ("rss", "allocated")
ENDS: Final = ("killed", "failed", "stopped", "finished")
CAUSES: Final = (*(kind.value for kind in CauseKind if kind is not CauseKind.STOP), OTHER)
"""Of generations: an operator's stop leads to none."""

JOB: Final = Label(name="job_name", about="a job that this node's files allow")
RANK: Final = Label(name="local_rank", about="0 to the node's slots less one")
_CAUSE: Final = Label(name="cause", values=CAUSES)
_ACTIVITY: Final = Label(name="activity", values=tuple(activity.value for activity in Activity))

STATE: Final = gauge(
    "elasticd_job_state",
    "1 for the state that a job is in on this node; the others are not there.",
    JOB,
    Label(name="state", values=tuple(state.value for state in NodeJobState)),
)
DESIRED: Final = gauge("elasticd_job_nodes_desired", "Nodes that are to train; 0 for a job that is to stop.", JOB)
LEAST: Final = gauge("elasticd_job_nodes_min", "Nodes without which the job does not train.", JOB)
MOST: Final = gauge("elasticd_job_nodes_max", "Nodes that may train at most.", JOB)
PAUSED: Final = gauge("elasticd_job_paused", "1 while operators let nothing be changed of free will; recovery goes on.", JOB)
FAILED: Final = gauge("elasticd_job_failed", "1 once the job has ended since it could not go on; 0 for one that goes on, has succeeded or was stopped.", JOB)
WRITTEN: Final = gauge("elasticd_job_report_timestamp_seconds", "When the job's agent here wrote its last report; it does so about once a second.", JOB)
ACTIVITY: Final = gauge("elasticd_job_activity", "1 for what the job's agent here spends its time on; the others are not there.", JOB, _ACTIVITY)
WALL: Final = counter("elasticd_job_wall_seconds_total", "Time since the agent's start, by what it went into; all together are its whole life.", JOB, _ACTIVITY)
DOWNTIME: Final = counter(
    "elasticd_job_downtime_seconds_total", "Time from the last step before a new generation to the first after, by its cause.", JOB, _CAUSE
)
RESCALES: Final = counter("elasticd_job_rescales_total", "Generations that this node was given, by their cause.", JOB, _CAUSE)
RECOVERIES: Final = histogram(
    "elasticd_job_recovery_duration_seconds",
    "Whole recoveries: from the order to stop, or the first worker's end, to the end of the first step.",
    (5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    JOB,
)
RECOVERY_PHASES: Final = counter(
    "elasticd_job_recovery_phase_seconds_total",
    "Time that all recoveries together spent in each part.",
    JOB,
    Label(name="phase", values=tuple(phase.value for phase in Phase)),
)
WORKER_ENDS: Final = counter("elasticd_job_worker_ends_total", "Workers of this node that ended, by how.", JOB, Label(name="reason", values=ENDS))
STEP_TIMES: Final = histogram(
    "elasticd_job_step_duration_seconds",
    "Steps by their length, of the lowest local rank.",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
    JOB,
)
CHECKPOINT_TIMES: Final = histogram(
    "elasticd_job_checkpoint_duration_seconds", "Checkpoints, from the order to the disk.", (1.0, 5.0, 10.0, 30.0, 60.0, 300.0), JOB
)
STEP_SECONDS: Final = gauge("elasticd_rank_step_seconds", "Mean length of a rank's last steps.", JOB, RANK)
PHASE_SECONDS: Final = gauge(
    "elasticd_rank_phase_seconds", "Mean time of a rank's last steps, by what it went into.", JOB, RANK, Label(name="phase", values=STEP_PHASES)
)
RANK_MEMORY: Final = gauge(
    "elasticd_rank_memory_bytes",
    "Memory of a rank: its process's resident set, and what its tensors have on the GPU.",
    JOB,
    RANK,
    Label(name="kind", values=MEMORY_KINDS),
)

_Number = Callable[[JobReport], float | None]

_LASTING: Final[tuple[tuple[Family, _Number], ...]] = (
    (gauge("elasticd_job_restarts_used", "Failures of workers that the whole job has had.", JOB), lambda told: told.restarts_used),
    (gauge("elasticd_job_restart_budget", "Failures of workers that the whole job may have.", JOB), lambda told: told.restarts_max),
    (gauge("elasticd_job_step", "Newest optimizer step of this node's workers, counted over the whole job.", JOB), lambda told: told.step),
    (gauge("elasticd_job_last_step_timestamp_seconds", "When the newest step of this node's workers was made.", JOB), lambda told: told.stepped_at or None),
    (counter("elasticd_job_steps_total", "Steps of this node, each counted once however many workers take part.", JOB), lambda told: told.steps),
    (counter("elasticd_job_samples_total", "Samples that all workers of this node trained on.", JOB), lambda told: told.samples),
    (counter("elasticd_job_steps_lost_total", "Steps that were lost and had to be made again.", JOB), lambda told: told.steps_lost),
    (
        counter("elasticd_job_nonfinite_values_total", "Losses and gradient norms of this node's ranks that were infinite or no numbers.", JOB),
        lambda told: sum(rank.nonfinite for rank in told.ranks),
    ),
    (counter("elasticd_job_checkpoints_total", "Checkpoints that this node wrote.", JOB), lambda told: told.checkpoint.written),
    (counter("elasticd_job_checkpoint_failures_total", "Checkpoints that this node could not write.", JOB), lambda told: told.checkpoint.failed),
    (
        gauge("elasticd_job_checkpoint_bytes", "Size of the last checkpoint that is whole on this node's disk.", JOB),
        lambda told: _of_checkpoint(told, told.checkpoint.nbytes),
    ),
    (
        gauge("elasticd_job_checkpoint_last_success_timestamp_seconds", "When the last checkpoint that is whole on this node's disk was written.", JOB),
        lambda told: told.checkpoint.at or None,
    ),
    (
        gauge("elasticd_job_checkpoint_step", "Step of the last checkpoint that is whole on this node's disk.", JOB),
        lambda told: _of_checkpoint(told, told.checkpoint.step),
    ),
    (
        gauge("elasticd_job_checkpoint_interval_seconds", "Time from one checkpoint to the next, as set; not there if none are written by the clock.", JOB),
        lambda told: told.checkpoint.every_s or None,
    ),
    (counter("elasticd_job_telemetry_dropped_total", "Windows of steps of which the numbers were lost on their way.", JOB), lambda told: told.dropped),
)
"""What stays true when the agent has ended."""

_PRESENT: Final[tuple[tuple[Family, _Number], ...]] = (
    (gauge("elasticd_job_nodes", "Nodes of the generation at hand; 0 while there is none.", JOB), lambda told: told.nodes),
    (gauge("elasticd_job_world_size", "Workers of all nodes in the generation at hand; 0 while there is none.", JOB), lambda told: told.world_size),
    (gauge("elasticd_job_generation", "Number of the generation at hand, or of the last.", JOB), lambda told: told.generation),
    (
        gauge("elasticd_job_coordinates", "1 on the node of rank 0, on others 0: by it, job-wide numbers are counted once.", JOB),
        lambda told: told.node_rank == 0,
    ),
    (gauge("elasticd_job_loss", "Last loss of the lowest local rank that was finite.", JOB), lambda told: told.loss),
    (gauge("elasticd_job_gradient_norm", "Last gradient norm of the lowest local rank that was finite.", JOB), lambda told: told.grad_norm),
    (
        gauge("elasticd_job_slowest_rank_ratio", "Own work of the slowest rank of all, over the median of all ranks; on the node of rank 0 only.", JOB),
        lambda told: told.slowest[1] if told.slowest and told.node_rank == 0 else None,
    ),
    (gauge("elasticd_job_snapshot_step", "Step of the newest whole snapshot in this node's memory.", JOB), lambda told: told.snapshot.step or None),
    (gauge("elasticd_job_snapshot_buffers", "Buffers for snapshots that this node has; 0 if there is no room.", JOB), lambda told: told.snapshot.buffers),
)
"""What is true only of an agent that lives."""

FAMILIES: Final = (
    *(STATE, DESIRED, LEAST, MOST, PAUSED, FAILED, *(family for family, _ in _PRESENT), ACTIVITY, WRITTEN, WALL, DOWNTIME, RESCALES),
    *(RECOVERIES, RECOVERY_PHASES, WORKER_ENDS, *(family for family, _ in _LASTING), STEP_TIMES, CHECKPOINT_TIMES),
    *(STEP_SECONDS, PHASE_SECONDS, RANK_MEMORY),
)


def names(turn: Turn) -> frozenset[str]:
    """Jobs that are shown: those that the files allow, and those that have an agent all the same."""
    return frozenset({*turn.allowed, *(job.name for job in turn.jobs if job.state in LIVING)})


def fill_jobs(sheet: Sheet, turn: Turn, reports: Mapping[str, JobReport]) -> None:
    """All jobs.

    Args:
        turn: what the decision loop knows.
        reports: of the jobs that are shown.
    """
    living = {job.name for job in turn.jobs if job.state in LIVING}
    shown = names(turn)
    for job in turn.jobs:
        if job.name in shown:
            sheet.put(STATE, 1, job.name, job.state.value)
    for name in sorted(shown):
        report = reports.get(name)
        if name in turn.wanted:
            _fill_wanted(sheet, name, turn.wanted[name])
            sheet.put(FAILED, name in turn.failed, name)
        elif report and name in living:
            _fill_told(sheet, name, report)
        if report:
            _fill_lasting(sheet, name, report)
        if report and name in living:
            _fill_present(sheet, name, report, max(turn.slots, 1))


def _fill_wanted(sheet: Sheet, name: str, target: TargetRecord) -> None:
    sheet.put(DESIRED, target.limit if target.run else 0, name)
    sheet.put(LEAST, target.min_nodes, name)
    sheet.put(MOST, target.max_nodes, name)
    sheet.put(PAUSED, target.paused, name)


def _fill_told(sheet: Sheet, name: str, report: JobReport) -> None:
    """Etcd has not answered this daemon yet; its agent knew what was wanted."""
    sheet.put(DESIRED, report.target_nodes or None, name)
    sheet.put(LEAST, report.min_nodes or None, name)
    sheet.put(MOST, report.max_nodes or None, name)


def _fill_lasting(sheet: Sheet, name: str, report: JobReport) -> None:
    sheet.put(WRITTEN, report.at, name)
    for family, number in _LASTING:
        sheet.put(family, number(report), name)
    # A counter that appears with its first event hides that event from rate(): so all are there from 0 on.
    for activity in Activity:
        sheet.put(WALL, report.seconds.get(activity, 0.0), name, activity.value)
    for cause in CAUSES[:-1]:
        sheet.put(DOWNTIME, 0, name, cause)
        sheet.put(RESCALES, 0, name, cause)
    for cause, seconds in report.downtime.items():
        sheet.put(DOWNTIME, seconds, name, cause)
    for cause, count in report.rescales.items():
        sheet.put(RESCALES, count, name, cause)
    for phase in Phase:
        sheet.put(RECOVERY_PHASES, report.recovery_phases.get(phase, 0.0), name, phase.value)
    for reason in ENDS:
        sheet.put(WORKER_ENDS, report.worker_ends.get(reason, 0), name, reason)
    sheet.spread(RECOVERIES, report.recovery, name)
    sheet.spread(STEP_TIMES, report.step_times, name)
    sheet.spread(CHECKPOINT_TIMES, report.checkpoint.durations, name)


def _fill_present(sheet: Sheet, name: str, report: JobReport, slots: int) -> None:
    for family, number in _PRESENT:
        sheet.put(family, number(report), name)
    sheet.put(ACTIVITY, 1, name, report.activity.value)
    for rank in report.ranks:
        if rank.local_rank >= slots:
            continue
        local = str(rank.local_rank)
        sheet.put(STEP_SECONDS, rank.step_seconds, name, local)
        for phase in STEP_PHASES:
            sheet.put(PHASE_SECONDS, rank.phases.get(phase), name, local, phase)
        for kind in MEMORY_KINDS:
            sheet.put(RANK_MEMORY, rank.memory.get(kind), name, local, kind)


def _of_checkpoint(report: JobReport, number: float) -> float | None:
    return number if report.checkpoint.at else None
