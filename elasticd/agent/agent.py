"""The elastic agent of one job on one node: torch's SimpleElasticAgent, driven by generations instead of by collective errors.

Owns: the life of this node's workers, from an assignment to its report. Must not: decide who trains (`rendezvous`), or how a process is started
(`launch`).

One turn: wait for an assignment, start the workers, watch them and the membership at the same time (pidfds and the member's wake-up in one poll),
stop them when told, report, wait again. Everything here happens in the main thread, on which the workers' lives hang (PDEATHSIG).
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import structlog
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elasticd.agent.environment import inherited, torch_environment
from elasticd.agent.launch import Launcher, WorkerLaunch, WorkerSet, worker_environment
from elasticd.agent.logs import GenerationLogs, RankLogs, describe_exit, read_error
from elasticd.errors import RefusedError
from elasticd.rendezvous.address import interface_of
from elasticd.rendezvous.handler import EtcdRendezvousHandler, serve_store
from elasticd.rendezvous.membership import Directive, Leave, Stop
from elasticd.rendezvous.peers import neighbours, unreachable
from elasticd.rendezvous.records import GenerationRecord, GenerationState, MemberId, Mode, Outcome, Result
from trainer.errors import EXIT_STOPPED
from trainer.wire.channel import FD_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it without saying so

    from elasticd.agent.config import AgentConfig
    from elasticd.agent.identity import Identity
    from elasticd.agent.state import StateKeeper
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member

log = structlog.get_logger("elasticd.agent")

CHECK_EVERY: Final = 1.0
"""Seconds between looks at workers and directive when nothing wakes the loop: events do, this is the net below them."""
PAUSE_UNFIT: Final = 1.0
"""Seconds before a generation that could not begin here is reported."""
PROBE_ALL_UP_TO: Final = 64
"""Members probed one by one after a failed formation; in larger worlds only the neighbours are."""


class Ending(Enum):
    """How this agent's part in the job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # an operator stopped the job
    LEFT = "left"  # this node left; the job goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The end, for whoever started the agent."""

    ending: Ending
    reason: str


@dataclass(slots=True)
class _Running:
    """The generation whose workers run here."""

    assignment: Assignment
    workers: WorkerSet
    logs: GenerationLogs
    ranks: dict[int, RankLogs]
    started_at: float
    store: Store | None = None

    @property
    def number(self) -> int:
        return self.assignment.generation.number


class JobAgent(SimpleElasticAgent):
    """See the module.

    Args:
        config: what to run.
        member: registered.
        launcher: how workers are started.
        states: what the workers' states are kept in.
        identity: who they are; None: who the agent is.

    Attributes:
        finish: how it ended, once it has.
        difference: in what this node differs from the others, if it left for that.
    """

    def __init__(self, config: AgentConfig, member: Member, launcher: Launcher, states: StateKeeper, identity: Identity | None = None) -> None:
        spec = WorkerSpec(
            role=DEFAULT_ROLE,
            local_world_size=config.nproc,
            rdzv_handler=EtcdRendezvousHandler(member, config.job),
            entrypoint=config.argv[0],
            args=config.argv[1:],
            max_restarts=config.max_restarts,
        )
        super().__init__(spec)
        self._config = config
        self._member = member
        self._launcher = launcher
        self._states = states
        self._identity = identity
        self._inherited = {**inherited(os.environ, identity), **config.env}
        self._interface = interface_of(config.address)
        self._current: _Running | None = None
        self._failure: tuple[int, ProcessFailure] | None = None
        self._leave_asked = False
        self._leave_by: float | None = None
        self._checkpoint_asked = False
        self._signal_read, self._signal_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.finish: Finish | None = None
        self.difference = ""

    # --- from outside ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the job in order. Safe to call from a signal handler; a second call changes nothing."""
        self._leave_asked = True
        self.ring()

    def ask_checkpoint(self) -> None:
        """Let workers that catch SIGUSR1 know that a checkpoint is wanted. Safe to call from a signal handler."""
        self._checkpoint_asked = True
        self.ring()

    def ring(self) -> None:
        """Have the loop look at everything now. From any thread, and from a signal handler."""
        try:
            os.write(self._signal_write, b"!")
        except BlockingIOError:
            pass

    # --- SimpleElasticAgent ----------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature
        """Turn until the job has ended or this node has left."""
        group = self._worker_group
        while self.finish is None:
            try:
                self._initialize_workers(group)
            except _NoAssignment:
                self._conclude()
                break
            self._watch()
        return self._result()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for an assignment and deal its ranks: they are in the record, nobody has to be asked."""
        try:
            assignment = self._member.next_assignment(give_up=lambda: self._leave_asked)
        except RefusedError:
            raise _NoAssignment from None
        if assignment is None:
            raise _NoAssignment
        if self._checkpoint_asked:  # of a generation before this one, or of none
            self._checkpoint_asked = False
            log.info("checkpoint_asked", generation=None, signalled=[], not_catching=[])
        generation = assignment.generation
        store = serve_store(assignment) if assignment.store_socket is not None else None
        self._assignment = assignment
        self._states.begin(assignment)
        self._store = store  # type: ignore[assignment]  # torch types it by its first value, None
        group: Any = worker_group  # torch types these fields by their first value, None
        group.store = store
        group.group_rank = assignment.node_rank
        group.group_world_size = len(generation.members)
        group.master_addr = generation.store.address
        group.master_port = generation.store.port
        group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=assignment.base_rank + local_rank,
                role_rank=assignment.base_rank + local_rank,
                world_size=generation.world_size,
                role_world_size=generation.world_size,
            )
            for local_rank in range(self._config.nproc)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this node's workers of the assignment at hand."""
        assignment, config = self._assignment, self._config
        number = assignment.generation.number
        foreign = self._identity is not None and self._identity.foreign
        logs = GenerationLogs.create(config.log_dir, config.job, config.node, number, self._member.id.incarnation, passage=foreign)
        ranks = {worker.local_rank: logs.rank(worker.global_rank) for worker in worker_group.workers}
        with ExitStack() as until_started:
            ends = {local_rank: until_started.enter_context(self._states.open(local_rank)) for local_rank in ranks}
            workers = self._launcher.start([self._launch(assignment, local_rank, files, ends[local_rank].fileno()) for local_rank, files in ranks.items()])
        self._current = _Running(assignment=assignment, workers=workers, logs=logs, ranks=ranks, started_at=time.monotonic(), store=worker_group.store)
        pids = {worker.local_rank: worker.pid for worker in workers.workers}
        log.info(
            "workers_started",
            generation=number,
            ranks=[worker.global_rank for worker in worker_group.workers],
            pids=list(pids.values()),
            at=time.time(),
            logs=str(logs.directory),
        )
        return pids

    def _launch(self, assignment: Assignment, local_rank: int, files: RankLogs, channel_fd: int) -> WorkerLaunch:
        config = self._config
        extra = torch_environment(
            self._inherited,
            assignment.generation,
            job=config.job,
            node=config.node,
            node_rank=assignment.node_rank,
            base_rank=assignment.base_rank,
            local_rank=local_rank,
            nproc=config.nproc,
            max_restarts=config.max_restarts,
            error_file=files.error,
            devices=config.devices,
            interface=self._interface,
        )
        return WorkerLaunch(
            local_rank=local_rank,
            argv=config.argv,
            env=worker_environment(self._inherited, {**extra, FD_VARIABLE: str(channel_fd)}),
            cwd=config.cwd,
            stdout=files.stdout,
            stderr=files.stderr,
            identity=self._identity,
            directory=files.directory,
            powerless=True,
            cpus=config.cpus[local_rank] if config.cpus else (),
            descriptors=(channel_fd,),
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        """Kill what runs, at once: the orderly way is `_stop`."""
        self._shutdown(signal.SIGKILL, 0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002 - torch's signature
        """How the workers are, for torch's API; the loop here looks at them itself."""
        return RunResult(state=WorkerState.HEALTHY if self._current and self._current.workers.alive else WorkerState.STOPPED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the workers, whatever state they are in."""
        if self._current is not None:
            self._current.workers.stop(float(timeout), death_sig)

    # --- while workers run -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch the workers until they no longer run, and report how that came."""
        current = self._current
        assert current is not None
        while True:
            exits = current.workers.poll()
            # The directive is read after the exits: a worker that died of a peer's end is not taken for a failure when that end is known.
            directive = self._member.directive
            if self._told_to_stop(directive, current.number):
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
            if self._checkpoint_asked:
                self._pass_on_checkpoint(current)
            self._wait(current, CHECK_EVERY)

    @staticmethod
    def _told_to_stop(directive: Directive, number: int) -> bool:
        return isinstance(directive, Leave) or (isinstance(directive, Stop) and directive.number == number)

    def _wait(self, current: _Running, seconds: float) -> None:
        """Until a worker ends, the directive changes, a signal comes, or `seconds` have passed."""
        poller = select.poll()
        for fd in (*current.workers.pidfds(), self._member.wake_fd, self._signal_read):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        self._member.drain_wake()
        try:
            while os.read(self._signal_read, 64):
                pass
        except BlockingIOError:
            pass

    def _pass_on_checkpoint(self, current: _Running) -> None:
        """A word to the workers that listen, SIGUSR1 to others that catch it; the rest would die of it."""
        self._checkpoint_asked = False
        base = current.assignment.base_rank
        told = self._states.ask_checkpoint("asked for")
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
        if not self._leave_asked:
            return False
        if self._leave_by is None:
            self._leave_by = time.monotonic() + self._config.leave_timeout
            log.info("leaving", timeout=self._config.leave_timeout)
            self._member.ask_to_leave()
        return time.monotonic() >= self._leave_by

    def _stop(self, current: _Running, directive: Stop | Leave | Directive) -> None:
        """Stop the workers as told: a grace period where everybody is well, and a cut one if that changes meanwhile."""
        assert isinstance(directive, Stop | Leave)
        self._member.stopping()
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
        # Who failed first is often a bystander: those at the two ends of a broken link hang in it, and are killed.
        broken = self._broken_links(current, directive.staying) if isinstance(directive, Stop) and directive.mode is Mode.KILL else ()
        # Where no other generation follows at once, this one is still the active one: what is written can be committed now, and not later.
        last = isinstance(directive, Stop) and directive.staying is not None and len(directive.staying) < self._config.min_nodes
        self._report(current, None, why=directive.why, broken=broken, last=last and agreed)

    def _grace(self, mode: Mode) -> float:
        return self._config.stop_grace if mode is Mode.AGREED_STOP else self._config.kill_grace

    def _finished(self, current: _Running) -> None:
        """Every worker returned 0. What they had written last is committed while the generation is still active."""
        self._member.stopping()
        self._report(current, Outcome(generation=current.number, result=Result.FINISHED), why="every worker returned 0", last=True)

    def _worker_ended(self, current: _Running, exits: dict[int, int]) -> None:
        """A worker ended by itself and not with 0: by failure, or because somebody else than the agent asked all to stop."""
        self._states.hear()
        if self._states.difference:
            self._differs(current)
            return
        if all(code in (0, EXIT_STOPPED) for code in exits.values()) and any(map(self._states.stopped_as_asked, exits)):
            self._member.stopping()
            current.workers.stop(self._config.stop_grace)
            self._report(current, None, why="the workers were asked to stop, not by their agent")
            return
        self._worker_failed(current, exits)

    def _differs(self, current: _Running) -> None:
        """This node's data are not those of the others: it leaves them alone, and is not started again before somebody has changed that."""
        self._member.stopping()
        current.workers.stop(0.0, signal.SIGKILL)
        self.difference = self._states.difference
        log.error("node_differs", generation=current.number, difference=self.difference, action="this node leaves the job")
        self.leave()
        self._report(current, None, why=f"{self._config.node} differs in {self.difference}"[:2000])

    def _unfit(self, current: _Running, why: str) -> None:
        """This node cannot begin with the generation's state: it is as good as cut from those who hold it (PROTOCOL 16), and they go on without it."""
        self._member.stopping()
        current.workers.stop(0.0, signal.SIGKILL)
        log.error("node_failed", generation=current.number, why=why)
        detail = f"{self._config.node}: {why}"[:2000]
        generation = current.assignment.generation
        holders = set(generation.resume.holders) - {self._config.node} if generation.resume else set[str]()
        apart = tuple(identity.incarnation for identity in generation.ids if identity.node in holders)
        self._wait(current, PAUSE_UNFIT)  # where all are needed it is tried again, and must not spin
        outcome = None if apart else Outcome(generation=current.number, result=Result.FAILED, detail=detail)
        self._report(current, outcome, why=detail, broken=apart)

    def _worker_failed(self, current: _Running, exits: dict[int, int]) -> None:
        """A worker ended by itself, and not well: the others of this node cannot go on without it."""
        self._member.stopping()
        local_rank = next(rank for rank, code in exits.items() if code != 0)
        rank, code = current.assignment.base_rank + local_rank, exits[local_rank]
        files = current.ranks[local_rank]
        error = read_error(files.error)
        detail = f"rank {rank} on {self._config.node}: {describe_exit(code)}" + (f": {error.exception}" if error else "")
        log.error("worker_failed", generation=current.number, rank=rank, detail=detail, log=str(files.stderr))
        # Torch is not told of the file: it would read whatever a worker put there, follow its links, and raise for garbage.
        self._failure = (rank, ProcessFailure(local_rank, current.workers.workers[local_rank].pid, code, ""))
        if error:
            self._failure[1].message = error.message
        # Others that use `trainer` wait for it in a collective, or for an order; their state is kept here.
        for worker in current.workers.workers:
            if worker.local_rank in self._states.listening:
                worker.send_signal(signal.SIGKILL)
        current.workers.stop(self._config.kill_grace)
        outcome = Outcome(generation=current.number, result=Result.FAILED, detail=detail[:2000])
        self._report(current, outcome, why=detail, broken=self._broken_links(current))

    def _broken_links(self, current: _Running, staying: Collection[MemberId] | None = None) -> tuple[str, ...]:
        """Whom this node cannot reach, if its workers failed before they can have got far: a formation that fails has its cause there.

        Those who are not to stay are not asked: a silent node, lost already, would cost the others the whole time limit.
        """
        generation = current.assignment.generation
        if time.monotonic() - current.started_at > self._config.ready_timeout or len(generation.members) == 1:
            return ()
        me = self._member.id
        others = [member for member in generation.members if member.id != me and (staying is None or member.id in staying)]
        asked = others if len(others) < PROBE_ALL_UP_TO else neighbours(generation, me)
        return tuple(identity.incarnation for identity in unreachable(asked))

    def _report(self, current: _Running, outcome: Outcome | None, *, why: str, broken: tuple[str, ...] = (), last: bool = False) -> None:
        self._current = None
        self._states.gone()
        if last:
            self._states.write_newest()
            if not self._states.settle(self._config.ready_timeout):
                log.warning("not_all_written", generation=current.number, timeout=self._config.ready_timeout)
        self._store = self._worker_group.store = current.store = None
        stuck = current.workers.stuck
        if stuck:
            # SIGKILL did not end them: they wait in the kernel and hold their devices, so that new workers here would fail for want of these.
            log.error("workers_stuck", generation=current.number, local_ranks=list(stuck), action="this node leaves the job; it needs a reboot")
            self.leave()
        log.info("workers_stopped", generation=current.number, why=why, outcome=outcome.result.value if outcome else None)
        inventory, lost = self._states.holdings()
        self._member.report_stopped(current.number, outcome, broken, inventory=inventory, lost=lost)

    # --- the end ---------------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """No assignment will come: the job has ended, or this node is to leave."""
        ended = self._member.ended
        if ended is not None:
            self.finish = _finish_of(ended)
            return
        if not self._leave_asked:
            self.finish = Finish(ending=Ending.FAILED, reason=self._member.why or "membership lost")
            return
        self._member.ask_to_leave()
        if not self._member.wait_left(self._config.leave_timeout, owed=self._states.owed):
            log.warning("left_without_the_others", timeout=self._config.leave_timeout)
        self.finish = Finish(ending=Ending.LEFT, reason="asked to leave")

    def _result(self) -> RunResult:
        assert self.finish is not None
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        if self.finish.ending is Ending.FAILED:
            failures = {self._failure[0]: self._failure[1]} if self._failure and self._failure[0] in ranks else {}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        state = WorkerState.SUCCEEDED if self.finish.ending is Ending.SUCCEEDED else WorkerState.STOPPED
        return RunResult(state=state, return_values=dict.fromkeys(ranks))


class _NoAssignment(Exception):  # noqa: N818  (not an error: the way out of torch's `_initialize_workers`)
    """There will be no further assignment."""


def _finish_of(ended: GenerationRecord) -> Finish:
    endings = {
        GenerationState.SUCCEEDED: Ending.SUCCEEDED,
        GenerationState.FAILED: Ending.FAILED,
        GenerationState.STOPPED: Ending.STOPPED,
        GenerationState.ACTIVE: Ending.FAILED,
    }
    return Finish(ending=endings[ended.state], reason=ended.reason)
