"""The daemon as a process: what begins in which order, signals, and how it ends.

Owns: the lock that makes one daemon of a node, the listeners, the service manager's messages, reload and end. Must not: decide what runs (`loop`).

Ends, by signal::

    SIGTERM, SIGINT   under systemd: on `restart` the agents stay, on `stop` (and at shutdown) they leave their jobs first;
                      without systemd: they leave first. A second one ends the daemon at once, and what still runs stays.
    SIGQUIT           the daemon alone; agents stay and the next daemon takes them over
    SIGHUP            configuration, job files and certificates are read again
    SIGKILL, a crash  as SIGQUIT
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import CollectorRegistry

from elasticd import __version__
from elasticd.agent.settings import OwnLayers
from elasticd.daemon.acting import Acting
from elasticd.daemon.agents import Agents
from elasticd.daemon.api.server import ApiServer
from elasticd.daemon.backends import ChildBackend, ProcessBackend, UnitBackend, systemd_job_of
from elasticd.daemon.board import Board
from elasticd.daemon.checking import Checking
from elasticd.daemon.config import DaemonConfig, Supervision
from elasticd.daemon.detecting import Detecting
from elasticd.daemon.gpureadings import Gpus
from elasticd.daemon.health import Checker
from elasticd.daemon.kmsg import KernelLog
from elasticd.daemon.launching import leave_budget
from elasticd.daemon.loop import Loop
from elasticd.daemon.machine import Machine
from elasticd.daemon.metrics import Metrics
from elasticd.daemon.nodekey import NodeKey, incarnation
from elasticd.daemon.nodereadings import NodeReadings
from elasticd.daemon.notify import Notifier
from elasticd.daemon.outlook import Lookout
from elasticd.daemon.reconcile import Verdict
from elasticd.daemon.reports import Reports
from elasticd.daemon.telemetry import REPORTS
from elasticd.daemon.volumes import volumes_of
from elasticd.errors import ElasticdError, RefusedError, UsageError
from elasticd.kv import EtcdKV
from elasticd.observability.logging import bind, set_level
from elasticd.policy.settings import Settings
from elasticd.rendezvous.nodelock import FileLock
from elasticd.rendezvous.records import NodeJobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elasticd.daemon.agents import Backend
    from elasticd.daemon.kmsg import KernelEvent

log = structlog.get_logger("elasticd.daemon")

UNIT: Final = "elasticd.service"
_PATIENCE: Final = 5.0
"""Seconds for etcd to find a leader and to end the leases of who is gone, beyond two of their times."""
_FIXED: Final = ("cluster", "node", "address", "slots", "agents", "etcd", "timing", "paths", "api", "metrics", "peer", "detectors", "policy")
"""Parts of the configuration that a reload does not change."""
_STALLED_SLACK: Final = 20.0
"""Seconds beyond loop_wait after which a loop counts as stuck: etcd calls, systemctl and job files may all be slow at once."""


class Service:
    """See the module. Runs in the main thread.

    Args:
        path: the configuration file.
        only: end when the agent of this job has ended, or cannot be started; for runs that are to leave nothing behind.
        trainer: settings of training, as text, that every agent gets from this command line.
    """

    def __init__(self, path: Path, *, only: str | None = None, trainer: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._only = only
        self._trainer = dict(trainer or {})
        self._signals: list[signal.Signals] = []
        self._board: Board | None = None

    def run(self) -> int:
        """Serve until told to end.

        Returns:
            The exit code: 0, or with `only` that of the agent.

        Raises:
            ElasticdError: it could not begin.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        config = self._read()
        notifier = Notifier()
        with ExitStack() as stack:
            stack.callback(notifier.close)
            code = self._serve(config, notifier, stack)
        log.info("daemon_ended", code=code)
        return code

    def _read(self) -> DaemonConfig:
        """The configuration, and its level of logging put to use.

        Raises:
            UsageError: it cannot be read or is no good.
        """
        config = DaemonConfig.read(self._path)
        config.check_files()
        config = config.model_copy(update={"logs": config.logs.overruled(os.environ)})
        set_level(config.logs.number)
        return config

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(signal.Signals(number))
        if self._board:
            self._board.wake()

    def _serve(self, config: DaemonConfig, notifier: Notifier, stack: ExitStack) -> int:
        machine = Machine.look(config)
        bind(node=machine.node)
        stack.enter_context(
            FileLock(
                config.paths.run_dir,
                "daemon.lock",
                what=f"daemon (pid {{pid}}) uses {config.paths.run_dir}",
                remedy="one daemon serves a node; stop it first, or give this one another run_dir",
            )
        )
        # A unit has an environment of its own; what else we start has ours.
        own = OwnLayers(environ={} if machine.supervision is Supervision.SYSTEMD else dict(os.environ), command=self._trainer)
        board = Board(node=machine.node, incarnation=incarnation(), stalled_after=config.timing.loop_wait + _STALLED_SLACK, own=own)
        self._board = board
        stack.callback(board.close)
        backend = _backend(machine.supervision)
        agents = Agents(config.paths.run_dir, backend)
        stack.callback(agents.close)
        kv = stack.enter_context(EtcdKV(config.kv))
        operator_kv = stack.enter_context(EtcdKV(config.operator_kv))
        lookout = Lookout(kv, config.keys, machine.node, board.wake)
        stack.callback(lookout.close)
        node_key = None
        if machine.supervision is not Supervision.CHILDREN:
            node_key = NodeKey(kv, config.keys, machine.node, ttl=config.timing.ttl, may_renew=lambda: not board.stuck, wake=board.wake)
            stack.callback(node_key.close)
        checking = Checking(Checker(config.health, config.paths.log_dir, lookout.living_peers, patience=2 * config.agent.ttl + _PATIENCE), board.wake)
        stack.callback(checking.close)
        loop = Loop(
            config,
            kv=kv,
            board=board,
            agents=agents,
            lookout=lookout,
            node_key=node_key,
            checking=checking,
            inventory=machine.inventory,
            address=machine.address,
            owner=0 if machine.supervision is Supervision.SYSTEMD else os.geteuid(),
            strangers_only=machine.supervision is Supervision.SYSTEMD,
        )
        due = threading.Event()
        detecting = self._detecting(config, due, stack)
        loop.detecting = detecting
        acting = loop.acting = self._acting(config, machine.node, detecting, due, kv, operator_kv, stack)
        gpus = Gpus()
        loop.readings = NodeReadings(machine.node, volumes_of(config, board), gpus.read)
        kernel = KernelLog(gpus.index_of, note=config.paths.run_dir / "kmsg.json", told=lambda event: _tell_kernel(detecting, machine.node, event))
        stack.callback(kernel.close)
        kernel.start()
        registry = CollectorRegistry()
        Metrics(registry, board, config=config, kvs=(kv, operator_kv), gpus=gpus, kernel=kernel, detecting=detecting, acting=acting)
        api = ApiServer.of(config, kv=kv, operator_kv=operator_kv, board=board, registry=registry, gpus=gpus, detecting=detecting)
        api.start()
        stack.callback(api.stop, 5.0)
        loop.peer_port = api.peer_address[1] if api.peer_address else None
        log.info(
            "daemon_started",
            version=__version__,
            node=machine.node,
            address=machine.address,
            cluster=config.cluster,
            slots=len(machine.inventory.slots),
            agents=machine.supervision.value,
            socket=str(config.socket),
        )
        return self._turn_until_told(config, loop, board, agents, notifier, kvs=(kv, operator_kv), api=api)

    # --- the life of the loop --------------------------------------------------------------------------------------------

    def _detecting(self, config: DaemonConfig, due: threading.Event, stack: ExitStack) -> Detecting | None:
        """The detectors of this node, if it is to have any."""
        section = config.detectors
        if not section.run:
            return None
        options = ["--width", f"{section.width:g}", *(word for path in section.signatures for word in ("--signatures", str(path)))]
        options += [] if section.forest else ["--no-forest"]
        detecting = Detecting(config.paths.state_dir / "detectors", options=options, wake=due.set)
        stack.callback(detecting.close)
        detecting.start()
        return detecting

    def _acting(
        self, config: DaemonConfig, node: str, detecting: Detecting | None, due: threading.Event, kv: EtcdKV, operator_kv: EtcdKV, stack: ExitStack
    ) -> Acting | None:
        """What acts on what they find."""
        if detecting is None:
            return None
        acting = Acting(
            kv=kv,
            operator_kv=operator_kv,
            keys=config.keys,
            node=node,
            settings=Settings.from_dict(config.policy),
            detecting=detecting,
            reports=Reports(config.paths.run_dir / REPORTS),
            due=due,
        )
        stack.callback(acting.close)
        acting.start()
        return acting

    def _turn_until_told(
        self, config: DaemonConfig, loop: Loop, board: Board, agents: Agents, notifier: Notifier, *, kvs: tuple[EtcdKV, ...], api: ApiServer
    ) -> int:
        longest = min(config.timing.loop_wait, notifier.watchdog / 3) if notifier.watchdog else config.timing.loop_wait
        leave_by: float | None = None
        ready = False
        while True:
            verdict = _turn(loop, board, notifier)
            if not ready:
                ready = True
                notifier.ready()
            if self._only and (code := _end_of(self._only, verdict, agents)) is not None:
                return code
            for number in self._take_signals():
                with suppress(ElasticdError):
                    agents.look(time.monotonic())  # one may have been started in this very turn
                if number is signal.SIGHUP:
                    config = self._reload(config, loop, agents, notifier, kvs, api)
                    continue
                if loop.leaving or not self._agents_are_to_leave(number, agents):
                    log.info("daemon_ending", signal=number.name, agents_left_running=sorted(agents.running))
                    notifier.stopping()
                    return 0
                loop.leaving = True
                leave_by = time.monotonic() + leave_budget(config, board.turn.allowed)
                log.info("daemon_leaving", signal=number.name, agents=sorted(agents.running))
                notifier.stopping()
                break
            else:
                if loop.leaving:
                    if not agents.running:
                        return 0
                    if leave_by is not None and time.monotonic() > leave_by:
                        log.error("agents_did_not_leave", agents=sorted(agents.running), action="killing them")
                        for job in list(agents.running):
                            agents.kill(job)
                        return 0
                    notifier.extend(30.0)
                loop.rest(verdict, min(longest, 1.0) if loop.leaving else longest)

    def _take_signals(self) -> list[signal.Signals]:
        taken, self._signals = self._signals, []
        return taken

    def _agents_are_to_leave(self, number: signal.Signals, agents: Agents) -> bool:
        if number is signal.SIGQUIT or not agents.running:
            return False
        if isinstance(agents.backend, UnitBackend):
            return systemd_job_of(UNIT) == "stop"
        return True

    def _reload(self, config: DaemonConfig, loop: Loop, agents: Agents, notifier: Notifier, kvs: tuple[EtcdKV, ...], api: ApiServer) -> DaemonConfig:
        """Read everything again. What is bad is named, and what was in use stays in use."""
        notifier.reloading()
        try:
            fresh = self._read()
            fixed = [name for name in _FIXED if getattr(fresh, name) != getattr(config, name)]
            if fixed:
                raise UsageError(f"{', '.join(fixed)} changed", remedy="that needs `systemctl restart elasticd`; training goes on meanwhile")
            for kv in kvs:
                kv.reload()
            api.reload_certificates()
            agents.reload_certificates()
            loop.reconfigure(fresh)
        except ElasticdError as error:
            log.error("not_reloaded", reason=str(error))  # noqa: TRY400 - a bad file, not a fault of ours
            fresh = config
        else:
            log.info("reloaded")
        notifier.ready()
        return fresh


def _tell_kernel(detecting: Detecting | None, node: str, event: KernelEvent) -> None:
    if detecting is not None:
        detecting.tell({"event": "kernel_event", "time": time.time(), "node": node, "text": event.text})


def _backend(supervision: Supervision) -> Backend:
    backends: dict[Supervision, Callable[[], Backend]] = {
        Supervision.SYSTEMD: UnitBackend,
        Supervision.PROCESSES: ProcessBackend,
        Supervision.CHILDREN: ChildBackend,
    }
    return backends[supervision]()


def _turn(loop: Loop, board: Board, notifier: Notifier) -> Verdict:
    """One turn. A fault of ours is logged and does not end the daemon; if it lasts, there is no sign of life, and the watchdog does."""
    began = time.monotonic()
    try:
        verdict = loop.turn()
    except Exception:
        log.exception("turn_failed")
        board.wait(1.0)
        return Verdict(actions=(), jobs=board.turn.jobs)
    board.turns.add(time.monotonic() - began)
    notifier.alive()
    notifier.status(_status(board))
    return verdict


def _end_of(job: str, verdict: Verdict, agents: Agents) -> int | None:
    """The exit code of a daemon that is there for one job alone, None while there is something to wait for.

    Raises:
        ElasticdError: the job cannot run here.
    """
    if job in agents.running:
        return None
    if (code := agents.code_of(job)) is not None:
        return code
    stand = next((one for one in verdict.jobs if one.name == job), None)
    if stand is None or stand.state is NodeJobState.REFUSED:
        raise UsageError(f"job {job}: {stand.why if stand else 'there is no such job file'}")
    if stand.state in (NodeJobState.ENDED, NodeJobState.KEPT_OUT):
        raise RefusedError(f"job {job}: {stand.why}")
    return None


def _status(board: Board) -> str:
    turn = board.turn
    jobs = ", ".join(f"{job.name} {job.state.value}" for job in turn.jobs) or "no jobs"
    if turn.etcd_problem:
        return f"etcd is out of reach ({turn.etcd_problem}); {jobs}"
    why = f" ({turn.unregistered})" if turn.unregistered else ""
    return f"{'registered' if turn.registered else 'not registered'}{why}; {jobs}"
