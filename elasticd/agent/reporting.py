"""What an agent says of its job (`observability.report`), put together and written about once a second.

Owns: handing what happens to the books (`ledger`) and to the sums (`telemetry`), with its time; the windows of workers, as lines of `telemetry.jsonl`
in the directory of their generation; and the thread that writes reports. Must not: decide anything, or hold anybody up: what a disk does not take is
counted, said once, and tried again.

Whoever tells something does so from the main thread or from the channels'; nobody waits for more than a lock that is held for microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from elasticd.agent.ledger import Given, Ledger, Recovery
from elasticd.agent.telemetry import Ours, Telemetry, made_of
from elasticd.observability.jsonl import JsonWriter
from elasticd.observability.redaction import hidden
from elasticd.observability.report import Activity, CheckpointReport, JobReport, SnapshotReport
from elasticd.observability.times import rfc3339
from elasticd.rendezvous.standing import Place, Standing
from trainer.errors import EXIT_STOPPED, ChannelError
from trainer.wire import channel

if TYPE_CHECKING:
    from pathlib import Path

    from elasticd.agent.config import AgentConfig
    from elasticd.rendezvous.desk import Assignment
    from trainer.wire.channel import Message

log = structlog.get_logger("elasticd.agent.reporting")

EVERY: Final = 1.0
"""Seconds between two reports."""
PROBLEM_MAX: Final = 300
TELEMETRY: Final = "telemetry.jsonl"
_IDLE: Final = {Place.WAITING: Activity.WAITING, Place.FORMING: Activity.FORMING, Place.FROZEN: Activity.FROZEN}


class Membership(Protocol):
    """What is asked of `rendezvous.member`."""

    @property
    def standing(self) -> Standing:
        """How this node stands in its job."""


class States(Protocol):
    """What is asked of `agent.state`."""

    @property
    def checkpoints(self) -> CheckpointReport:
        """On disk."""

    @property
    def snapshots(self) -> SnapshotReport:
        """In memory."""

    @property
    def failure(self) -> str:
        """Why the generation at hand cannot begin."""

    @property
    def trouble(self) -> str:
        """Why nothing gets to disk."""


class Reporter:
    """See the module. Without a `report_file` in the configuration all but the report is done."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._ledger = Ledger(time.monotonic())
        self._telemetry = Telemetry()
        self._lines = JsonWriter("elasticd-telemetry")
        self._started_at = time.time()
        self._stepped_at = 0.0
        self._place = (-1, 0)  # of this node in the generation at hand, and how many nodes it has
        self._directory: Path | None = None
        self._greeted: set[int] = set()
        self._refused: set[tuple[int, str]] = set()
        self._ends: Counter[str] = Counter()
        self._failing = False
        self._sources: tuple[Membership, States] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-report", daemon=True)

    # --- the main thread's side ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove what an earlier agent left: its numbers would be taken for ours. If it was killed in the middle of a report, half of that too."""
        path = self._config.report_file
        if path is None:
            return
        try:
            path.unlink(missing_ok=True)
            for half in path.parent.glob(f".{path.name}.*"):
                if half.suffix.removeprefix(".").isdigit() and half.stem == f".{path.name}":
                    half.unlink(missing_ok=True)
        except OSError as error:
            log.warning("report_not_removed", path=str(path), error=error.strerror)

    def begin(self, member: Membership, states: States) -> None:
        """Report from now on."""
        self._sources = (member, states)
        self._thread.start()

    def given(self, assignment: Assignment) -> None:
        """A generation: its workers are about to start."""
        record = assignment.generation
        resumed = record.resume.step if record.resume else 0
        given = Given(number=record.number, cause=record.cause.kind.value, world_size=record.world_size, resumed=resumed)
        with self._lock:
            self._ledger.given(time.monotonic(), given)
            self._telemetry.begin(Ours(given=given, base_rank=assignment.base_rank, nproc=self._config.nproc))
            self._place = (assignment.node_rank, len(record.members))
            self._greeted.clear()
            self._refused.clear()

    def started(self, directory: Path) -> None:
        """Its workers run; their files lie in that directory."""
        with self._lock:
            self._ledger.started(time.monotonic())
            self._directory = directory

    def stopping(self) -> None:
        """They are to stop, or the first of them has ended."""
        with self._lock:
            self._ledger.stopping(time.monotonic())

    def stopped(self, by_themselves: Mapping[int, int], exits: Mapping[int, int], newest: int) -> None:
        """The last of them has ended.

        Args:
            by_themselves: local rank -> exit code of those that ended before anybody stopped them.
            exits: of all that have ended.
            newest: step of this generation's newest whole snapshot here, 0 if there is none.
        """
        with self._lock:
            self._ledger.stopped(time.monotonic(), newest)
            self._telemetry.end()
            self._ends.update(ends_of(by_themselves, exits))
            self._place = (-1, 0)

    @property
    def reached(self) -> int | None:
        """How far the workers of the generation at hand have come, as far as they have told; None if none of them uses `trainer`."""
        with self._lock:
            return self._ledger.reached if self._greeted else None

    # --- the channels' thread --------------------------------------------------------------------------------------------

    def heard(self, local_rank: int, message: Message) -> None:
        """See `conversation.Listener`."""
        try:
            with self._lock:
                self._take(local_rank, message)
        except ChannelError as error:
            if (local_rank, message.kind) not in self._refused:
                self._refused.add((local_rank, message.kind))
                log.warning("telemetry_refused", local_rank=local_rank, kind=message.kind, why=str(error))

    def _take(self, local_rank: int, message: Message) -> None:
        now = time.monotonic()
        match message:
            case channel.Hello():
                self._greeted.add(local_rank)
                if len(self._greeted) == self._config.nproc:
                    self._ledger.spoke(now)
            case channel.Restored() if local_rank == 0:
                self._ledger.restored(now)
            case channel.Describe() if local_rank == 0:  # said at the end of the first step, which shows what a state is made of
                self._ledger.first_step(now)
            case channel.Telemetry(window=raw):
                self._take_window(local_rank, raw, now)
            case channel.Ranks() as said:
                columns = self._telemetry.take_ranks(local_rank, said)
                self._write_line("ranks", time.time(), rank=0, step=said.step, steps=said.steps, columns=columns)
            case _:
                pass

    def _take_window(self, local_rank: int, raw: Mapping[str, Any], now: float) -> None:
        window = self._telemetry.take(local_rank, raw)
        clock = time.time()
        if local_rank == 0:
            self._ledger.made(made_of(window, clock=clock, now=now))
            self._stepped_at = min(window.ended, clock)
        self._write_line("window", window.ended, local_rank=local_rank, step=window.last, **window.as_dict())

    def _write_line(self, event: str, at: float, **values: Any) -> None:
        at_hand = self._ledger.at_hand
        if self._directory is None or at_hand is None:
            return
        config = self._config
        known = {"time": rfc3339(at), "level": "info", "event": event, "job": config.job, "node": config.node, "generation": at_hand.number}
        self._lines.put(self._directory / TELEMETRY, {**known, **values})

    # --- the reporting thread --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The agent ends: the last report, with everything in it."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)
        self._lines.close()

    def _run(self) -> None:
        self._turn()
        while not self._closing.wait(EVERY):
            self._turn()
        with self._lock:
            self._ledger.close(time.monotonic())
        self._turn()

    def _turn(self) -> None:
        try:
            self._report()
        except Exception:  # the next one may go well, and without this thread nobody sees the job
            log.exception("report_failed")

    def _report(self) -> None:
        report, over = self._put_together()
        for recovery in over:
            _log_recovery(recovery)
        path = self._config.report_file
        if path is None:
            return
        try:
            report.write(path)
        except OSError as error:
            if not self._failing:
                log.error("report_not_written", path=str(path), error=str(error))  # noqa: TRY400 - a full disk, say: no traceback
            self._failing = True
        else:
            if self._failing:
                log.info("report_written_again", path=str(path))
            self._failing = False

    def _put_together(self) -> tuple[JobReport, list[Recovery]]:
        assert self._sources is not None  # begun
        member, states = self._sources
        standing, checkpoints, snapshots = member.standing, states.checkpoints, states.snapshots
        failure, trouble = states.failure, states.trouble
        with self._lock:
            now = time.monotonic()
            self._ledger.tick(now)
            self._ledger.idle(now, _IDLE[standing.place])
            idle = self._ledger.at_hand is None
            report = JobReport(
                **self._of_the_job(standing),
                **self._of_the_ledger(now),
                **self._of_the_telemetry(),
                checkpoint=checkpoints,
                snapshot=snapshots,
                problem=hidden(failure or (standing.problem if idle else "") or trouble, PROBLEM_MAX),
            )
            return report, self._ledger.take_recoveries()

    def _of_the_job(self, standing: Standing) -> dict[str, Any]:
        config, (node_rank, nodes) = self._config, self._place
        return {
            "job": config.job,
            "node": config.node,
            "at": time.time(),
            "started_at": self._started_at,
            "nodes": nodes,
            "node_rank": node_rank,
            "target_nodes": standing.desired or config.desired,
            "min_nodes": standing.min_nodes or config.min_nodes,
            "max_nodes": standing.max_nodes or config.max_nodes,
            "restarts_used": standing.restarts_used,
            "restarts_max": standing.restarts_max if standing.desired else config.max_restarts,
        }

    def _of_the_ledger(self, now: float) -> dict[str, Any]:
        ledger = self._ledger
        return {
            "activity": ledger.activity,
            "generation": ledger.last.number if ledger.last else 0,
            "world_size": ledger.at_hand.world_size if ledger.at_hand else 0,
            "step": ledger.step,
            "stepped_at": self._stepped_at,
            "steps": ledger.steps,
            "steps_lost": ledger.steps_lost,
            "seconds": ledger.seconds(now),
            "downtime": dict(ledger.downtime),
            "rescales": dict(ledger.rescales),
            "worker_ends": dict(self._ends),
            "recovery": ledger.recovery,
            "recovery_phases": dict(ledger.recovery_phases),
        }

    def _of_the_telemetry(self) -> dict[str, Any]:
        telemetry = self._telemetry
        return {
            "samples": telemetry.samples,
            "step_times": telemetry.step_times,
            "loss": telemetry.loss,
            "grad_norm": telemetry.grad_norm,
            "ranks": telemetry.reports(),
            "slowest": telemetry.slowest,
            "dropped": telemetry.dropped + self._lines.lost,
        }


def ends_of(by_themselves: Mapping[int, int], exits: Mapping[int, int]) -> Counter[str]:
    """How workers ended, counted as `JobReport.worker_ends` has it.

    Args:
        by_themselves: local rank -> exit code of those that ended before anybody stopped them.
        exits: of all that have ended: whoever is not in `by_themselves` was stopped, whatever it made of that.
    """
    return Counter(_end_of(by_themselves[rank]) if rank in by_themselves else "stopped" for rank in exits)


def _end_of(code: int) -> str:
    if code == 0:
        return "finished"
    if code == EXIT_STOPPED:
        return "stopped"
    return "killed" if code < 0 else "failed"


def _log_recovery(recovery: Recovery) -> None:
    log.info(
        "recovered",
        generation=recovery.after.number,
        cause=recovery.cause,
        seconds=round(recovery.seconds, 3),
        phases={phase.value: round(seconds, 3) for phase, seconds in recovery.phases.items()},
        downtime=None if recovery.downtime is None else round(recovery.downtime, 3),
        steps_lost=recovery.steps_lost,
        from_generation=recovery.before.number,
        from_world_size=recovery.before.world_size,
        world_size=recovery.after.world_size,
    )
