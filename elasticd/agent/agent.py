"""The elastic agent of one job on one node: torch's SimpleElasticAgent, driven by generations instead of by collective errors.

Owns: the turns from one assignment to the next, and the end. Must not: decide who trains (`rendezvous`), how a process is started (`launch`), or
when workers are stopped (`watching`).

One turn: wait for an assignment, start the workers, watch them until they are stopped and reported, wait again. Everything here happens in the main
thread, on which the workers' lives hang (PDEATHSIG).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

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

from elasticd.agent.environment import inherited, torch_environment
from elasticd.agent.launch import Launcher, WorkerLaunch, worker_environment
from elasticd.agent.logs import GenerationLogs, RankLogs
from elasticd.agent.watching import Running, Watch
from elasticd.agent.wishes import Wishes
from elasticd.errors import KVError, RefusedError
from elasticd.observability.logging import bind
from elasticd.rendezvous.address import interface_of
from elasticd.rendezvous.handler import EtcdRendezvousHandler, serve_store
from elasticd.rendezvous.records import GenerationRecord, GenerationState
from trainer.wire.channel import FD_VARIABLE

if TYPE_CHECKING:
    from elasticd.agent.config import AgentConfig
    from elasticd.agent.identity import Identity
    from elasticd.agent.outputs import OutputKeeper
    from elasticd.agent.reporting import Reporter
    from elasticd.agent.state import StateKeeper
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member

log = structlog.get_logger("elasticd.agent")


class Ending(Enum):
    """How this agent's part in the job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # an operator stopped the job
    LEFT = "left"  # this node left; the job goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The end, for whoever started the agent. `code`: the exit code where it has failed."""

    ending: Ending
    reason: str
    code: int = 1


class JobAgent(SimpleElasticAgent):
    """See the module.

    Args:
        config: what to run.
        member: registered.
        launcher: how workers are started.
        states: what the workers' states are kept in.
        reporter: who is told what happens to them.
        outputs: who keeps what they write from filling the disk.
        identity: who they are; None: who the agent is.

    Attributes:
        finish: how it ended, once it has.
    """

    def __init__(  # what it drives, and what for
        self,
        config: AgentConfig,
        member: Member,
        launcher: Launcher,
        states: StateKeeper,
        reporter: Reporter,
        outputs: OutputKeeper,
        identity: Identity | None = None,
    ) -> None:
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
        self._current: Running | None = None
        self._wishes = Wishes()
        self._reporter = reporter
        self._outputs = outputs
        self._watcher = Watch(config, member, states, self._wishes, reporter, self._let_go)
        self.finish: Finish | None = None

    # --- from outside ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the job in order. Safe to call from a signal handler; a second call changes nothing."""
        self._wishes.ask_leave()

    def ask_checkpoint(self) -> None:
        """Let workers that catch SIGUSR1 know that a checkpoint is wanted. Safe to call from a signal handler."""
        self._wishes.ask_checkpoint()

    def ring(self) -> None:
        """Have the loop look at everything now. From any thread, and from a signal handler."""
        self._wishes.ring()

    @property
    def difference(self) -> str:
        """In what this node differs from the others, if it left for that."""
        return self._watcher.difference

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
            assignment = self._member.next_assignment(give_up=lambda: self._wishes.leave or bool(self._member.left_out))
        except RefusedError:
            raise _NoAssignment from None
        if assignment is None:
            raise _NoAssignment
        generation = assignment.generation
        store = serve_store(assignment) if assignment.store_socket is not None else None
        self._assignment = assignment
        self._reporter.given(assignment)
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
        bind(generation=number)
        foreign = self._identity is not None and self._identity.foreign
        logs = GenerationLogs.create(config.log_dir, config.job, config.node, number, self._member.id.incarnation, passage=foreign)
        ranks = {worker.local_rank: logs.rank(worker.global_rank) for worker in worker_group.workers}
        self._outputs.begin(ranks.values())
        with ExitStack() as until_started:
            ends = {local_rank: until_started.enter_context(self._states.open(local_rank)) for local_rank in ranks}
            workers = self._launcher.start([self._launch(assignment, local_rank, files, ends[local_rank].fileno()) for local_rank, files in ranks.items()])
        self._current = Running(assignment=assignment, workers=workers, ranks=ranks, started_at=time.monotonic())
        self._reporter.started(logs.directory)
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

    def _watch(self) -> None:
        """Until the workers run no more, and that is reported."""
        assert self._current is not None  # they were started
        self._watcher.until_stopped(self._current)

    def _let_go(self) -> None:
        """No worker runs any more, and the store was theirs."""
        self._current = None
        self._store = self._worker_group.store = None

    # --- the end ---------------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """No assignment will come: the job has ended, or this node is to leave."""
        ended = self._member.ended
        if ended is not None:
            self.finish = _finish_of(ended)
            return
        if not self._wishes.leave and not self._member.left_out:
            self.finish = Finish(ending=Ending.FAILED, reason=self._member.why or "membership lost")
            return
        self._member.ask_to_leave()
        if self._wait_left():
            self._keep_last()
            self._wait_left()  # a generation that formed meanwhile may begin with what is here
        self.finish = Finish(ending=Ending.LEFT, reason=self._member.left_out or "asked to leave")

    def _wait_left(self) -> bool:
        left = self._member.wait_left(self._config.leave_timeout, owed=self._states.owed)
        if not left:
            log.warning("left_without_the_others", timeout=self._config.leave_timeout)
        return left

    def _keep_last(self) -> None:
        """Where no generation follows, see that the newest state does not go with this node's memory (PROTOCOL 29)."""
        try:
            generation = self._member.active()  # no older look will do
        except KVError as error:
            log.warning("last_state_not_kept", why=str(error))
            return
        if generation is None or self._member.id not in generation.ids:
            return  # the others go on, or the job has ended: its last state was written when its workers returned
        if not self._states.keep_last(generation, self._config.ready_timeout):
            log.warning("not_all_written", generation=generation.number, timeout=self._config.ready_timeout)

    def _result(self) -> RunResult:
        assert self.finish is not None
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        if self.finish.ending is Ending.FAILED:
            failed = self._watcher.failure
            failures = {failed[0]: failed[1]} if failed and failed[0] in ranks else {}
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
    return Finish(ending=endings[ended.state], reason=ended.reason, code=ended.code or 1)
