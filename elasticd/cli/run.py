"""`elasticctl run`: from options to an exit code.

Owns: the order in which a run's parts begin and end. Must not: know how they work, or let one of them outlive it.

On one machine: an etcd in a scratch directory, N agents as process trees of their own, and this process that watches them. With --etcd: one agent,
this machine's part of a job that lives elsewhere. Either way nothing is left at the end: agents and etcd die with this process even by SIGKILL
(PDEATHSIG), and what they orphan is given to us by the kernel (PR_SET_CHILD_SUBREAPER) and swept.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from elasticd.agent.config import AgentConfig
from elasticd.cli.agents import Agents, adopt_orphans, sweep
from elasticd.cli.follow import AgentEvent, AgentLogs, last_lines
from elasticd.cli.follower import Follower
from elasticd.cli.interrupts import Interrupted, Interrupts
from elasticd.cli.localetcd import LocalEtcd
from elasticd.cli.options import Store, address_towards, default_node
from elasticd.cli.progress import Notice, Progress, Weight, count
from elasticd.cli.registry import SCRATCH_PREFIX, Registered, RunEntry, process_start, running
from elasticd.cli.render import age_text
from elasticd.cli.screen import make_screen
from elasticd.cli.store import JobWatcher, read_view
from elasticd.cli.summary import RunOutcome, RunResult, write_summary
from elasticd.errors import RefusedError, UsageError
from elasticd.kv import EtcdKV
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.nodelock import lock_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticd.cli.options import RunOptions
    from elasticd.cli.screen import Screen

_TAIL = 10
_LEAVE_SLACK = 10.0
_LOCALHOST = "127.0.0.1"


def run(options: RunOptions) -> int:
    """Run a job, or this machine's part of one, to its end.

    Returns:
        The exit code: 0 succeeded or stopped in order, 1 failed, 128 + N after signal N, else that of the error that kept agents from starting.

    Raises:
        ElasticdError: it could not be started, or the summary not be written.
    """
    started = time.monotonic()
    progress = Progress(job=options.job)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some parents, and then the kernel throws exit codes away
    spared = adopt_orphans()
    with _closing(make_screen(options.show, jsonl=options.jsonl, started=started)) as screen, Interrupts() as interrupts:
        try:
            outcome = _run(options, progress, screen, interrupts)
        except Interrupted as interrupted:
            outcome = RunOutcome(result=RunResult.INTERRUPTED, reason=f"{interrupted.number.name} while starting", exit_code=128 + interrupted.number)
        finally:
            interrupts.collect()  # nothing interrupts the sweeping
            sweep(spared)
    _tell_end(options, outcome, progress, screen, elapsed=time.monotonic() - started)
    if options.summary is not None:
        write_summary(
            options.summary,
            outcome,
            job=options.job,
            log_dir=options.log_dir / options.job,
            restarts=progress.restarts,
            generations=progress.generations.values(),
        )
    return outcome.exit_code


def _run(options: RunOptions, progress: Progress, screen: Screen, interrupts: Interrupts) -> RunOutcome:
    running()  # takes away what runs that were killed have left
    with ExitStack() as stack:
        scratch = _scratch(stack)
        etcd = stack.enter_context(LocalEtcd(scratch / "etcd")) if options.store is None else None
        store = etcd.store if etcd is not None else _existing(options)
        configs = _configs(options, store)
        if options.fresh_name:
            stack.callback(_remove_locks, configs)
        logs = AgentLogs(options.log_dir / options.job, [config.node for config in configs])
        agents = Agents(configs, scratch)
        stack.callback(agents.kill)
        watcher = stack.enter_context(JobWatcher(store, JobKeys(options.cluster, options.job)))
        stack.enter_context(Registered(_entry(options, store, scratch)))
        _introduce(options, store, screen, configs)
        follower = Follower(options, agents=agents, logs=logs, watcher=watcher, etcd=etcd, progress=progress, screen=screen, interrupts=interrupts)
        return follower.to_the_end()


# --- before ------------------------------------------------------------------------------------------------------------


def _scratch(stack: ExitStack) -> Path:
    path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))  # 0700
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def _existing(options: RunOptions) -> Store:
    """The etcd that --etcd names, looked at once, so that what is wrong with it is said before anything is started."""
    store = options.store
    assert store is not None
    with EtcdKV(store.kv) as kv:
        kv.check()
        view = read_view(kv, JobKeys(options.cluster, options.job))
    if view.over and view.generation and not options.again:
        record = view.generation.record
        raise RefusedError(
            f"job {options.job!r} has ended ({record.state.value} at generation {record.number}: {record.reason})",
            remedy="give another --job, or --again to start this one again",
        )
    return store


def _remove_locks(configs: list[AgentConfig]) -> None:
    """Remove the node locks of a job whose name was made up for this run: nobody will ever take them again."""
    for config in configs:
        with contextlib.suppress(OSError):
            lock_path(config.state_dir, config.cluster, config.job, config.node).unlink()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    name: str
    address: str


def _nodes(options: RunOptions, store: Store) -> list[_Node]:
    if options.local:
        return [_Node(name=f"node-{number}", address=_LOCALHOST) for number in range(options.sizes.nodes)]
    return [_Node(name=options.node or default_node(), address=options.address or address_towards(store.endpoints[0]))]


def _configs(options: RunOptions, store: Store) -> list[AgentConfig]:
    tls = store.tls
    try:
        return [
            AgentConfig(
                cluster=options.cluster,
                job=options.job,
                node=node.name,
                address=node.address,
                nproc=options.nproc,
                argv=options.argv,
                cwd=options.cwd,
                log_dir=options.log_dir,
                endpoints=store.endpoints,
                cacert=tls.cacert if tls else None,
                cert=tls.cert if tls else None,
                key=tls.key if tls else None,
                min_nodes=options.sizes.minimum,
                max_nodes=options.sizes.maximum,
                desired=options.sizes.desired,
                max_restarts=options.max_restarts,
                ttl=options.lease_ttl,
                settle=options.settle,
                stop_grace=options.stop_grace,
                leave_timeout=options.stop_grace + _LEAVE_SLACK,
                frozen_max=options.frozen_max,
                reopen=options.again,
            )
            for node in _nodes(options, store)
        ]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def _entry(options: RunOptions, store: Store, scratch: Path) -> RunEntry:
    tls = store.tls
    return RunEntry(
        job=options.job,
        cluster=options.cluster,
        endpoints=store.endpoints,
        cacert=tls.cacert if tls else None,
        cert=tls.cert if tls else None,
        key=tls.key if tls else None,
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        log_dir=options.log_dir / options.job,
        local=options.local,
        scratch=scratch,
    )


def _introduce(options: RunOptions, store: Store, screen: Screen, configs: list[AgentConfig]) -> None:
    """Say what runs, where its logs are, and how another node joins."""
    nodes = ", ".join(config.node for config in configs) if len(configs) <= 4 else count(len(configs), "node")
    logs = options.log_dir / options.job
    fields = {"job": options.job, "nodes": [config.node for config in configs], "etcd": list(store.endpoints), "log_dir": str(logs)}
    screen.event(AgentEvent(node="elasticctl", name="run_started", at=time.time(), fields=fields))
    screen.notice(Notice(text=f"job {options.job}: {nodes} of {count(options.nproc, 'worker')} each; etcd at {', '.join(store.endpoints)}"))
    screen.notice(Notice(text=f"logs are in {logs}"))
    if options.local:
        role = "another node joins" if options.sizes.maximum > options.sizes.nodes else "a spare node (give --max-nodes to let the job grow) joins"
        screen.notice(Notice(text=f"{role} by: {join_command(options, store)}"))


def join_command(options: RunOptions, store: Store) -> str:
    """The command that adds one more node to this job, ready for a shell."""
    words = ["elasticctl", "run", *store.as_options(), "--job", options.job, "--node", f"node-{options.sizes.nodes}"]
    words += ["--cluster", options.cluster] if options.cluster != "default" else []
    words += ["--nproc-per-node", str(options.nproc)] if options.nproc != 1 else []
    words += ["--lease-ttl", f"{options.lease_ttl:g}"]
    words += ["-m"] if options.module else []
    return shlex.join([*words, "--", *options.script])


# --- after -------------------------------------------------------------------------------------------------------------


def _tell_end(options: RunOptions, outcome: RunOutcome, progress: Progress, screen: Screen, *, elapsed: float) -> None:
    fields = {"job": options.job, "result": outcome.result.value, "reason": outcome.reason, "exit_code": outcome.exit_code}
    screen.event(AgentEvent(node="elasticctl", name="run_ended", at=time.time(), fields=fields))
    size = f"{count(len(progress.generations), 'generation')}, {count(progress.restarts, 'restart')}, {age_text(elapsed)}"
    weights = {RunResult.SUCCEEDED: Weight.GOOD, RunResult.FAILED: Weight.ERROR}
    weight = weights.get(outcome.result, Weight.WARNING)
    failure = progress.root_failure if outcome.result is RunResult.FAILED else None
    if failure is None:
        screen.notice(Notice(text=f"{outcome.result.value}: {outcome.reason} ({size})", weight=weight))
        return
    where = f"; log {failure.log}" if failure.log else ""
    why = "" if failure.detail in outcome.reason and outcome.reason.endswith(failure.detail) else f"; {outcome.reason}"
    screen.notice(Notice(text=f"{outcome.result.value}: {failure.detail}{where}{why} ({size})", weight=weight))
    for line in last_lines(failure.log, _TAIL) if failure.log else []:
        screen.notice(Notice(text=f"  | {line}", weight=weight))


@contextlib.contextmanager
def _closing(screen: Screen) -> Iterator[Screen]:
    try:
        yield screen
    finally:
        screen.close()
