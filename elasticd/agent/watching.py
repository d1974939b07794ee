"""One generation's workers on this node, from their start to the report of how they ended.

Owns: watching them and the membership at the same time (pidfds and the member's wake-up in one poll), stopping them when told, and why they ended.
Must not: start them or wait for a generation (`agent`), or decide who trains (`rendezvous`).

Everything here happens in the main thread, on which the workers' lives hang (PDEATHSIG).
"""

from __future__ import annotations

import select
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elasticd.agent.logs import WorkerError, describe_exit, read_error, read_traceback
from elasticd.rendezvous.membership import Directive, Leave, Stop
from elasticd.rendezvous.peers import neighbours
from elasticd.rendezvous.peers import unreachable as out_of_reach
from elasticd.rendezvous.records import ENDS_MAX, ERROR_MAX, MemberId, Mode, Outcome, Result, WorkerExit
from trainer.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from elasticd.agent.config import AgentConfig
    from elasticd.agent.launch import WorkerSet
    from elasticd.agent.logs import RankLogs
    from elasticd.agent.reporting import Reporter
    from elasticd.agent.state import StateKeeper
    from elasticd.agent.wishes import Wishes
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member

log = structlog.get_logger("elasticd.agent")

CHECK_EVERY: Final = 1.0
"""Seconds between looks at workers and directive when nothing wakes the loop: events do, this is the net below them."""
PAUSE_UNFIT: Final = 1.0
"""Seconds before a generation that could not begin here is reported."""
PROBE_ALL_UP_TO: Final = 64
"""Members probed one by one after a failed formation; in larger worlds only the neighbours are."""


@dataclass(slots=True)
class Running:
    """The generation whose workers run here.

    Attributes:
        ends: local rank -> exit code of those that had ended before anybody stopped them.
    """

    assignment: Assignment
    workers: WorkerSet
    ranks: dict[int, RankLogs]
    started_at: float
    ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of the generation."""
        return self.assignment.generation.number


class Watch:
    """See the module.

    Args:
        let_go: called when no worker runs any more, before that is told: what was served to them is to go.

    Attributes:
        difference: in what this node differs from the others, once a worker has found that out.
        failure: the last rank whose worker failed, and how.
    """

    def __init__(  # each of these is asked or told something here
        self, config: AgentConfig, member: Member, states: StateKeeper, wishes: Wishes, reporter: Reporter, let_go: Callable[[], None]
    ) -> None:
        self._config = config
        self._member = member
        self._states = states
        self._wishes = wishes
        self._reporter = reporter
        self._let_go = let_go
        self._leave_by: float | None = None
        self.difference = ""
        self.failure: tuple[int, ProcessFailure] | None = None

    def until_stopped(self, current: Running) -> None:
        """Watch the workers until they no longer run, and report how that came."""
        while True:
            exits = current.workers.poll()
            # The directive is read after the exits: a worker that died of a peer's end is not taken for a failure when that end is known.
            directive = self._member.directive
            if isinstance(directive, Leave) or (isinstance(directive, Stop) and directive.number == current.number):
                self._stop(current, directive)
                return
            if any(code != 0 for code in exits.values()):
                self._worker_ended(current, exits)
                return
            if len(exits) == self._config.nproc:
                self._finished(current)
                return
            if self._states.difference:
                self._differs(current)
                return
            if self._states.failure:
                self._unfit(current, self._states.failure)
                return
            if self._leaving_is_overdue():
                self._stop(current, Leave(mode=Mode.KILL, why="the others did not agree on a stop in time"))
                return
            if self._wishes.checkpoint:
                self._pass_on_checkpoint(current)
            self._wait(current, CHECK_EVERY)

    # --- while they run --------------------------------------------------------------------------------------------------

    def _wait(self, current: Running, seconds: float) -> None:
        """Until a worker ends, the directive changes, a signal comes, or `seconds` have passed."""
        poller = select.poll()
        for fd in (*current.workers.pidfds(), self._member.wake_fd, self._wishes.fd):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        self._member.drain_wake()
        self._wishes.heard()

    def _pass_on_checkpoint(self, current: Running) -> None:
        """A word to the workers that listen, SIGUSR1 to others that catch it; the rest would die of it."""
        self._wishes.checkpoint = False
        base = current.assignment.base_rank
        told = self._states.ask_checkpoint("asked for", owed=True)
        others = [worker for worker in current.workers.workers if worker.exitcode is None and worker.local_rank not in told]
        caught = {base + worker.local_rank: worker.send_if_caught(signal.SIGUSR1) for worker in others}
        log.info(
            "checkpoint_asked",
            generation=current.number,
            told=[base + local_rank for local_rank in told],
            signalled=[rank for rank, sent in caught.items() if sent],
            not_catching=[rank for rank, sent in caught.items() if not sent],
        )

    def _leaving_is_overdue(self) -> bool:
        """Ask to leave if a signal said so; whether the answer has been waited for long enough."""
        if not self._wishes.leave:
            return False
        if self._leave_by is None:
            self._leave_by = time.monotonic() + self._config.leave_timeout
            log.info("leaving", timeout=self._config.leave_timeout)
            self._member.ask_to_leave()
        return time.monotonic() >= self._leave_by

    # --- why they end ----------------------------------------------------------------------------------------------------

    def _begin_to_stop(self, current: Running) -> None:
        current.ends = current.workers.poll()
        self._member.stopping()
        self._reporter.stopping()

    def _stop(self, current: Running, directive: Stop | Leave | Directive) -> None:
        """Stop the workers as told: a grace period where everybody is well, and a cut one if that changes meanwhile."""
        assert isinstance(directive, Stop | Leave)
        self._begin_to_stop(current)
        agreed = directive.mode is Mode.AGREED_STOP
        grace = self._grace(directive.mode)
        deadline = time.monotonic() + grace
        # Those that use `trainer` stop at a step that all agree on. When somebody is gone they hang in a collective and their state is kept here
        # already: nothing is waited for.
        listening = self._states.ask_stop(directive.why, grace) if agreed else self._states.listening
        for worker in current.workers.workers:
            if worker.local_rank in listening:
                worker.send_signal(signal.SIGCONT if agreed else signal.SIGKILL)
                continue
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGCONT)  # a stopped process would not hear it
        while len(current.workers.poll()) < self._config.nproc and time.monotonic() < deadline:
            newest = self._member.directive
            if isinstance(newest, Stop | Leave) and newest.mode is Mode.KILL and agreed:
                deadline = min(deadline, time.monotonic() + self._grace(Mode.KILL))
                agreed = False
            self._wait(current, min(CHECK_EVERY, deadline - time.monotonic()))
        current.workers.stop(0.0, signal.SIGKILL)
        # Where no other generation follows at once, this one is still the active one: what is written can be committed now, and not later.
        # Who was to stay when the stop began may have asked to leave since.
        newest = self._member.directive
        latest = newest if isinstance(newest, Stop) and newest.number == current.number else directive
        staying = latest.staying if isinstance(latest, Stop) else None
        last = staying is not None and len(staying) < self._config.min_nodes
        # Who failed first is often a bystander: those at the two ends of a broken link hang in it, and are killed.
        killed = isinstance(directive, Stop) and directive.mode is Mode.KILL
        broken = (lambda: self._broken_links(current, staying)) if killed else tuple[str, ...]
        self._report(current, None, why=directive.why, broken=broken, last=last and agreed)

    def _grace(self, mode: Mode) -> float:
        return self._config.stop_grace if mode is Mode.AGREED_STOP else self._config.kill_grace

    def _finished(self, current: Running) -> None:
        """Every worker returned 0. What they had written last is committed while the generation is still active."""
        self._begin_to_stop(current)
        self._report(current, Outcome(generation=current.number, result=Result.FINISHED), why="every worker returned 0", last=True)

    def _worker_ended(self, current: Running, exits: dict[int, int]) -> None:
        """A worker ended by itself and not with 0: by failure, or because somebody else than the agent asked all to stop."""
        self._states.hear()
        if self._states.difference:
            self._differs(current)
            return
        if all(code in (0, EXIT_STOPPED) for code in exits.values()) and any(map(self._states.stopped_as_asked, exits)):
            self._begin_to_stop(current)
            current.workers.stop(self._config.stop_grace)
            self._report(current, None, why="the workers were asked to stop, not by their agent")
            return
        self._worker_failed(current, exits)

    def _differs(self, current: Running) -> None:
        """This node's data are not those of the others: it leaves them alone, and is not started again before somebody has changed that."""
        self._begin_to_stop(current)
        current.workers.stop(0.0, signal.SIGKILL)
        self.difference = self._states.difference
        log.error("node_differs", generation=current.number, difference=self.difference, action="this node leaves the job")
        self._wishes.ask_leave()
        self._report(current, None, why=f"{self._config.node} differs in {self.difference}"[:2000])

    def _unfit(self, current: Running, why: str) -> None:
        """This node cannot begin with the generation's state: it is as good as cut from those who hold it (PROTOCOL 16), and they go on without it."""
        self._begin_to_stop(current)
        current.workers.stop(0.0, signal.SIGKILL)
        log.error("node_failed", generation=current.number, why=why)
        detail = f"{self._config.node}: {why}"[:2000]
        generation = current.assignment.generation
        holders = set(generation.resume.holders) - {self._config.node} if generation.resume else set[str]()
        apart = tuple(identity.incarnation for identity in generation.ids if identity.node in holders)
        self._wait(current, PAUSE_UNFIT)  # where all are needed it is tried again, and must not spin
        end = WorkerExit(rank=current.assignment.base_rank, code=1, exception=f"StateUnavailable: {why}"[:ERROR_MAX], at=time.time())
        outcome = None if apart else Outcome(generation=current.number, result=Result.FAILED, detail=detail, ends=(end,), step=0)
        self._report(current, outcome, why=detail, broken=lambda: apart)

    def _worker_failed(self, current: Running, exits: dict[int, int]) -> None:
        """A worker ended by itself, and not well: the others of this node cannot go on without it."""
        self._begin_to_stop(current)
        local_rank = next(rank for rank, code in exits.items() if code != 0)
        rank, code = current.assignment.base_rank + local_rank, exits[local_rank]
        files = current.ranks[local_rank]
        error = _error(files, code)
        detail = f"rank {rank} on {self._config.node}: {describe_exit(code)}" + (f": {error.exception}" if error else "")
        ends, reached = self._ends(current, exits), self._reporter.reached
        if reached is not None:
            reached = max(reached, self._states.newest(current.number))  # who failed soon after had no time to tell
        log.error("worker_failed", generation=current.number, rank=rank, detail=detail, log=str(files.stderr))
        # Torch is not told of the file: it would read whatever a worker put there, follow its links, and raise for garbage.
        self.failure = (rank, ProcessFailure(local_rank, current.workers.workers[local_rank].pid, code, ""))
        if error:
            self.failure[1].message = error.message
        # Others that use `trainer` wait for it in a collective, or for an order; their state is kept here.
        for worker in current.workers.workers:
            if worker.local_rank in self._states.listening:
                worker.send_signal(signal.SIGKILL)
        current.workers.stop(self._config.kill_grace)
        outcome = Outcome(generation=current.number, result=Result.FAILED, detail=detail[:2000], ends=ends, step=reached)
        self._report(current, outcome, why=detail, broken=lambda: self._broken_links(current))

    def _ends(self, current: Running, exits: Mapping[int, int]) -> tuple[WorkerExit, ...]:
        """How those ended that failed by themselves, the first four."""
        ends = []
        for local_rank, code in [(one, code) for one, code in exits.items() if code != 0][:ENDS_MAX]:
            error = _error(current.ranks[local_rank], code)
            last = error.message.strip().splitlines()[-1] if error and error.message.strip() else ""
            ends.append(
                WorkerExit(
                    rank=current.assignment.base_rank + local_rank,
                    code=code,
                    exception=error.exception[:ERROR_MAX] if error else "",
                    message=last[:ERROR_MAX] if error and last != error.exception else "",
                    at=time.time(),
                )
            )
        return tuple(ends)

    def _broken_links(self, current: Running, staying: Collection[MemberId] | None = None) -> tuple[str, ...]:
        """Whom this node cannot reach, if its workers failed before they can have got far: a formation that fails has its cause there.

        Those who are not to stay are not asked: a silent node, lost already, would cost the others the whole time limit.
        """
        generation = current.assignment.generation
        if time.monotonic() - current.started_at > self._config.ready_timeout or len(generation.members) == 1:
            return ()
        me = self._member.id
        others = [member for member in generation.members if member.id != me and (staying is None or member.id in staying)]
        asked = others if len(others) < PROBE_ALL_UP_TO else neighbours(generation, me)
        return tuple(identity.incarnation for identity in out_of_reach(asked))

    # --- the report ------------------------------------------------------------------------------------------------------

    def _report(
        self, current: Running, outcome: Outcome | None, *, why: str, broken: Callable[[], tuple[str, ...]] = tuple[str, ...], last: bool = False
    ) -> None:
        self._states.gone()
        self._reporter.stopped(current.ends, current.workers.poll(), self._states.newest(current.number))
        unreachable = broken()
        if last:
            self._states.write_newest()
            if not self._states.settle(self._config.ready_timeout):
                log.warning("not_all_written", generation=current.number, timeout=self._config.ready_timeout)
        self._let_go()
        stuck = current.workers.stuck
        if stuck:
            # SIGKILL did not end them: they wait in the kernel and hold their devices, so that new workers here would fail for want of these.
            log.error("workers_stuck", generation=current.number, local_ranks=list(stuck), action="this node leaves the job; it needs a reboot")
            self._wishes.ask_leave()
        log.info("workers_stopped", generation=current.number, why=why, outcome=outcome.result.value if outcome else None)
        inventory, lost = self._states.holdings()
        self._member.report_stopped(current.number, outcome, unreachable, inventory=inventory, lost=lost)


def _error(files: RankLogs, code: int) -> WorkerError | None:
    """What a worker said of its own end: torch's file, or else what Python prints before it returns 1."""
    return read_error(files.error) or (read_traceback(files.stderr) if code == 1 else None)
