"""The decision loop: look at everything, decide, do it, say how things stand; again and again.

Owns: one turn, and the order of its steps. Must not: know signals, listeners or the service manager (`service` does), or decide (`reconcile` does).

Etcd may be away for as long as it likes: then the last outlook is kept, nothing is started on it, and what runs goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from elasticd import __version__
from elasticd.daemon.board import Board, Turn
from elasticd.daemon.deserted import end_if_deserted
from elasticd.daemon.jobs import check_parameters, load_jobs
from elasticd.daemon.launching import agent_config, digest_of
from elasticd.daemon.outlook import Lookout, Outlook
from elasticd.daemon.reconcile import Action, AgentSeen, Check, Cordon, Desired, JobWanted, Leave, Seen, Start, Verdict, reconcile
from elasticd.errors import ElasticdError, KVError, UsageError
from elasticd.kv.types import Compare, Delete, Put, Target
from elasticd.observability.redaction import know
from elasticd.rendezvous.nodelock import boot_id
from elasticd.rendezvous.records import TEXT_MAX, NodeJobState, NodePolicyRecord, NodeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticd.daemon.acting import Acting
    from elasticd.daemon.agents import Agents
    from elasticd.daemon.checking import Checking
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.jobs import JobFiles, JobSpec
    from elasticd.daemon.nodekey import NodeKey
    from elasticd.daemon.nodereadings import NodeReadings
    from elasticd.daemon.slots import Inventory, Slot
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.records import TargetRecord

log = structlog.get_logger("elasticd.daemon")

_PROBLEMS_TOLD = 64


class Loop:
    """See the module. Used by one thread.

    Args:
        config: what the daemon was told; `reconfigure` changes it.
        node_key: None: this daemon is no node of the cluster, but a run's own.
        address: where peers reach this node.
        owner: uid that job files must belong to.
        strangers_only: a job must name a user for its workers, who must not be who we are.

    Attributes:
        peer_port: where the API listens for other nodes; None if nowhere.
        detecting: the detectors of this node, told which jobs run here; None if there are none.
        readings: what they are told of the machine; None for nothing.
        acting: what acts on what they find, if there is anything.
        leaving: all agents are to leave.
    """

    def __init__(
        self,
        config: DaemonConfig,
        *,
        kv: EtcdKV,
        board: Board,
        agents: Agents,
        lookout: Lookout,
        node_key: NodeKey | None,
        checking: Checking,
        inventory: Inventory,
        address: str,
        owner: int,
        strangers_only: bool = False,
    ) -> None:
        self._config = config
        self._kv = kv
        self._board = board
        self._agents = agents
        self._lookout = lookout
        self._node_key = node_key
        self._checking = checking
        self._inventory = inventory
        self._address = address
        self._owner = owner
        self._strangers_only = strangers_only
        self._seen_agents: Mapping[str, AgentSeen] = {}
        self._outlook = Outlook()
        self._etcd_problem = ""
        self._etcd_since = time.time()
        self._checkpoints: dict[str, int] | None = None
        self._told: frozenset[str] = frozenset()
        self._stands: dict[str, tuple[NodeJobState, str]] = {}
        self._in_vain = False
        self.peer_port: int | None = None
        self.detecting: Detecting | None = None
        self.readings: NodeReadings | None = None
        self.acting: Acting | None = None
        self.leaving = False

    def reconfigure(self, config: DaemonConfig) -> None:
        """Use what was read anew from the next turn on."""
        self._config = config

    def turn(self) -> Verdict:
        """Once around. Whatever goes wrong in one step is logged and named; the other steps are done all the same."""
        files = load_jobs(self._config.paths.jobs_dir, owner=self._owner)
        now = time.monotonic()
        agents, blind = self._look_at_agents(now)
        self._look_at_etcd(sorted({*files.jobs, *agents}))
        self._lift()
        desired = self._desired(files)
        seen = Seen(
            inventory=self._inventory,
            agents=agents,
            health=self._checking.seen,
            digests={name: digest_of(spec, self._target(name)) for name, spec in files.jobs.items()},
            etcd_problem=self._etcd_problem,
        )
        verdict = reconcile(desired, seen, now)
        if blind:  # what runs is not known, so nothing is done about it
            verdict = replace(verdict, actions=())
        failures = [said for action in verdict.actions if (said := self._carry_out(action, files))]
        self._in_vain = bool(failures)
        self._pass_on_checkpoints()
        self._tell_detectors(agents)
        self._end_deserted(agents)
        problems = self._problems(files, [*verdict.problems, *failures, *([blind] if blind else [])])
        self._say_changes(verdict, problems)
        registered = self._keep_node_key(verdict, problems)
        self._board.post(
            Turn(
                at=time.monotonic(),
                registered=registered,
                unregistered=self._node_key.problem if self._node_key and not registered else "",
                etcd_problem=self._etcd_problem,
                etcd_since=self._etcd_since,
                slots=len(self._inventory.slots),
                allowed=files.jobs,
                times=self._config.agent,
                jobs=verdict.jobs,
                wanted={name: wanted.target for name, wanted in self._outlook.jobs.items() if wanted.target},
                failed=frozenset(name for name, wanted in self._outlook.jobs.items() if wanted.failed),
                policy=self._outlook.policy if self._outlook.revision else None,
                problems=problems,
            )
        )
        return verdict

    def rest(self, verdict: Verdict, longest: float) -> None:
        """Wait for something to happen, at most until the next turn is due.

        Args:
            longest: seconds.
        """
        due = longest if verdict.until is None else min(longest, verdict.until - time.monotonic())
        if verdict.actions and not self._in_vain:  # what was done is to be seen at once
            due = 0.05
        self._board.wait(due, self._agents.fds)

    # --- seeing ----------------------------------------------------------------------------------------------------------

    def _look_at_agents(self, now: float) -> tuple[Mapping[str, AgentSeen], str]:
        """The agents; or, if the service manager cannot be asked, those of last time and why."""
        try:
            self._seen_agents = self._agents.look(now)
        except (ElasticdError, OSError) as error:
            return self._seen_agents, f"agents cannot be looked at: {error}"
        return self._seen_agents, ""

    def _look_at_etcd(self, jobs: list[str]) -> None:
        out = self._kept_out
        try:
            self._outlook = self._lookout.read(jobs)
        except KVError as error:
            self._etcd(str(error))
        else:
            self._etcd("")
            if out and not self._kept_out:
                self._agents.try_again()  # whoever lifts it has seen to what kept an agent from running

    @property
    def _kept_out(self) -> bool:
        return self._outlook.policy.cordoned or self._outlook.policy.draining

    def _etcd(self, problem: str) -> None:
        if bool(problem) != bool(self._etcd_problem):
            self._etcd_since = time.time()
            if problem:
                log.error("frozen", problem=problem, action="what runs goes on, nothing is started")
            else:
                log.warning("thawed")
        self._etcd_problem = problem

    def _target(self, job: str) -> TargetRecord | None:
        wanted = self._outlook.jobs.get(job)
        return wanted.target if wanted else None

    def _desired(self, files: JobFiles) -> Desired:
        return Desired(
            specs=files.jobs,
            refused=files.refused_jobs,
            unreadable=next((str(one) for one in files.refused if one.file == self._config.paths.jobs_dir), ""),
            jobs={name: self._with_problem(wanted, files.jobs.get(name)) for name, wanted in self._outlook.jobs.items()},
            policy=self._outlook.policy,
            leaving=self.leaving,
        )

    def _with_problem(self, wanted: JobWanted, spec: JobSpec | None) -> JobWanted:
        """The same, with why the job cannot run here as it is wanted."""
        if spec is None or wanted.target is None:
            return wanted
        if self._strangers_only and spec.user is None:
            return replace(wanted, problem="its file names no user: its workers would be who the daemon is, and could read its keys")
        try:
            check_parameters(spec, wanted.target.parameters)
        except UsageError as error:
            return replace(wanted, problem=str(error))
        return wanted

    def _problems(self, files: JobFiles, more: list[str]) -> tuple[str, ...]:
        found = [str(refused) for refused in files.refused]
        found += [*self._outlook.problems, *more]
        found += [self._node_key.problem] if self._node_key and self._node_key.problem else []
        found += [self.acting.problem] if self.acting and self.acting.problem and not self._etcd_problem else []
        return tuple(problem[:TEXT_MAX] for problem in found[:_PROBLEMS_TOLD])

    # --- doing -----------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action, files: JobFiles) -> str:
        """Do one thing. Returns what went wrong, "" if nothing did."""
        try:
            match action:
                case Start(job, slots):
                    self._start(files.jobs[job], slots)
                case Leave(job, why):
                    self._agents.leave(job, why)
                case Check(job, slots):
                    self._checking.begin(files.jobs[job], self._chosen(slots))
                case Cordon(reason):
                    self._cordon(reason)
        except (ElasticdError, OSError) as error:
            log.error("action_failed", action=type(action).__name__.lower(), job=getattr(action, "job", None), error=str(error))  # noqa: TRY400
            return f"{type(action).__name__.lower()} {getattr(action, 'job', '')}: {error}"
        return ""

    def _start(self, spec: JobSpec, slots: tuple[str, ...]) -> None:
        target = self._target(spec.name)
        assert target is not None  # reconcile starts only what somebody wants
        told = agent_config(
            self._config,
            spec,
            target,
            self._chosen(slots),
            node=self._board.node,
            address=self._address,
            result_file=self._agents.result_file(spec.name),
            report_file=self._agents.report_file(spec.name),
            own=self._board.own,
        )
        know(spec.env)
        self._agents.start(spec.name, told, slots=slots, digest=digest_of(spec, target))

    def _chosen(self, slots: tuple[str, ...]) -> tuple[Slot, ...]:
        known = {slot.id: slot for slot in self._inventory.slots}
        return tuple(known[name] for name in slots)

    def _cordon(self, reason: str) -> None:
        """Keep this node out, unless an operator says something at this moment: then his word counts."""
        keys, item = self._config.keys, self._outlook.policy_key
        record = NodePolicyRecord(scope=keys.scope, cordoned=True, reason=reason[:TEXT_MAX], by=f"elasticd on {self._board.node}", at=round(time.time(), 3))
        key = keys.policy(self._board.node)
        compare = Compare(key=key, target=Target.MOD, op="==", value=item.mod_revision if item else 0)
        done = self._kv.txn((compare,), (Put(key=key, value=record.to_bytes()),)).succeeded
        log.error("node_cordoned" if done else "node_not_cordoned", reason=reason)
        self._checking.forget()  # whoever lifts it wants the checks to run again

    def _lift(self) -> None:
        """End what the policy said of this node for a time. Whoever kept it out may be gone; the node itself is not."""
        policy, item = self._outlook.policy, self._outlook.policy_key
        if self._etcd_problem or policy.until is None or item is None or time.time() < policy.until:
            return
        try:
            compare = Compare(key=item.key, target=Target.MOD, op="==", value=item.mod_revision)
            if self._kv.txn((compare,), (Delete(key=item.key),)).succeeded:
                log.warning("comes_back", reason=policy.reason)
        except KVError as error:
            self._etcd(str(error))

    def _pass_on_checkpoints(self) -> None:
        """Ask the agents for what was asked of their generations. What was asked before this daemon was there has been passed on already."""
        asked = dict(self._outlook.checkpoints)
        if self._checkpoints is not None:
            for job, number in asked.items():
                if number > self._checkpoints.get(job, 0):
                    self._agents.ask_checkpoint(job)
        self._checkpoints = asked if not self._etcd_problem or self._checkpoints is not None else None

    def _tell_detectors(self, agents: Mapping[str, AgentSeen]) -> None:
        if self.detecting is not None:
            folder, node = self._config.paths.log_dir, self._board.node
            self.detecting.watch({job: folder / job / node for job, agent in sorted(agents.items()) if agent.running})
            for document in self.readings.due(time.monotonic(), time.time()) if self.readings is not None else ():
                self.detecting.tell(document)

    def _end_deserted(self, agents: Mapping[str, AgentSeen]) -> None:
        """End what is to stop and has no member left. Whose agent runs here is left alone: it registers, or ends the job itself."""
        if self._etcd_problem:
            return
        for job in self._outlook.stopping:
            if job in agents and agents[job].running:
                continue
            try:
                end_if_deserted(self._kv, self._config.keys.job(job))
            except KVError as error:
                self._etcd(str(error))

    # --- saying ----------------------------------------------------------------------------------------------------------

    def _say_changes(self, verdict: Verdict, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self._told:
                log.warning("problem", problem=problem)
        self._told = frozenset(problems)
        for job in verdict.jobs:
            if self._stands.get(job.name, ("", ""))[0] != job.state:
                log.info("job", job=job.name, state=job.state.value, slots=job.slots, why=job.why)
        self._stands = {job.name: (job.state, job.why) for job in verdict.jobs}

    def _keep_node_key(self, verdict: Verdict, problems: tuple[str, ...]) -> bool:
        if self._etcd_problem or self._node_key is None:
            return not self._etcd_problem
        record = NodeRecord(
            scope=self._config.keys.scope,
            node=self._board.node,
            incarnation=self._board.incarnation,
            address=self._address,
            slots=len(self._inventory.slots),
            gpus=tuple(slot.gpu_uuid for slot in self._inventory.slots if slot.gpu_uuid),
            labels=self._config.labels,
            version=__version__,
            boot_id=boot_id(),
            started_at=round(self._board.started_at, 3),
            jobs=tuple(job.model_copy(update={"why": _steady(job.why)}) for job in verdict.jobs),
            problems=problems,
            peer_port=self.peer_port,
        )
        try:
            return self._node_key.keep(self._outlook.own, record)
        except KVError as error:
            self._etcd(str(error))
            return False


def _steady(why: str) -> str:
    """The words without the countdown at their end: the key is written when something changes, not once a second."""
    return why.partition(": again in ")[0]
