"""`elasticctl run`: from options to an exit code.

Owns: the order in which a run's parts begin and end. Must not: know how they work, or let one of them outlive it.

On one machine: an etcd in a scratch directory, N nodes (a daemon each, with scratch state, and its agent) as process trees of their own, and this
process that watches them. With --etcd: one node, this machine's part of a job that lives elsewhere. Either way nothing is left at the end: daemons,
agents and etcd die with this process even by SIGKILL (PDEATHSIG), and what they orphan is given to us by the kernel (PR_SET_CHILD_SUBREAPER) and swept.
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

from elasticd.cli.follow import AgentEvent, AgentLogs, last_lines
from elasticd.cli.follower import Follower
from elasticd.cli.interrupts import Interrupted, Interrupts
from elasticd.cli.localetcd import LocalEtcd
from elasticd.cli.localnodes import LocalNodes, NodePlan, adopt_orphans, sweep
from elasticd.cli.options import Store, address_towards, default_node
from elasticd.cli.progress import Notice, Progress, Weight, count
from elasticd.cli.registry import SCRATCH_PREFIX, Registered, RunEntry, running
from elasticd.cli.render import age_text
from elasticd.cli.screen import make_screen
from elasticd.cli.store import JobWatcher, read_view
from elasticd.cli.summary import RunOutcome, RunResult, write_summary
from elasticd.daemon.config import DaemonConfig, Supervision
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.launching import check_fit
from elasticd.daemon.processes import process_start
from elasticd.errors import ConflictError, KVPermissionError, RefusedError, UsageError
from elasticd.kv import EtcdKV
from elasticd.rendezvous import transitions
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.nodelock import default_state_dir, lock_path
from elasticd.rendezvous.records import TargetRecord

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
        plans = _plans(options, store, scratch)
        _open_job(options, store)
        if options.fresh_name:
            stack.callback(_remove_locks, plans)
        logs = AgentLogs(options.log_dir / options.job, [plan.name for plan in plans])
        nodes = LocalNodes(plans)
        stack.callback(nodes.kill)
        watcher = stack.enter_context(JobWatcher(store, JobKeys(options.cluster, options.job)))
        stack.enter_context(Registered(_entry(options, store, scratch)))
        _introduce(options, store, screen, plans)
        follower = Follower(options, nodes=nodes, logs=logs, watcher=watcher, etcd=etcd, progress=progress, screen=screen, interrupts=interrupts)
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


def _open_job(options: RunOptions, store: Store) -> None:
    """Write what is wanted, if nobody has, or if an ended job is to begin again. Who joins a job that is there takes it as it is."""
    keys = JobKeys(options.cluster, options.job)
    target = TargetRecord(
        scope=keys.scope,
        min_nodes=options.sizes.minimum,
        max_nodes=options.sizes.maximum,
        desired=options.sizes.desired,
        max_restarts=options.max_restarts,
        by="elasticctl run",
    )
    with EtcdKV(store.kv) as kv:
        seen = kv.get(keys.target)
        if seen is not None and not (options.again and read_view(kv, keys).over):
            return
        txn = transitions.create_target(keys, target) if seen is None else transitions.reopen(keys, seen, target)
        try:
            done = kv.txn(txn.compares, txn.ops).succeeded
        except KVPermissionError as error:
            raise transitions.not_ours_to_want(keys, error) from None
        if not done and read_view(kv, keys).over:
            raise ConflictError(f"the target of job {options.job!r} was changed meanwhile", remedy="try again")


def _remove_locks(plans: list[NodePlan]) -> None:
    """Remove the node locks of a job whose name was made up for this run: nobody will ever take them again."""
    for plan in plans:
        with contextlib.suppress(OSError):
            lock_path(default_state_dir(), plan.config.cluster, plan.spec.name, plan.name).unlink()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    name: str
    address: str


def _nodes(options: RunOptions, store: Store) -> list[_Node]:
    if options.local:
        return [_Node(name=f"node-{number}", address=_LOCALHOST) for number in range(options.sizes.nodes)]
    return [_Node(name=options.node or default_node(), address=options.address or address_towards(store.endpoints[0]))]


def _plans(options: RunOptions, store: Store, scratch: Path) -> list[NodePlan]:
    tls = store.tls
    try:
        spec = JobSpec(
            name=options.job,
            argv=tuple(word.replace("{", "{{").replace("}", "}}") for word in options.argv),
            cwd=options.cwd,
            slots=options.nproc,
            min_nodes=options.sizes.minimum,
            max_nodes=options.sizes.maximum,
            nodes=options.sizes.desired,
            max_restarts=options.max_restarts,
            ttl=options.lease_ttl,
            settle=options.settle,
            stop_grace=options.stop_grace,
            frozen_max=options.frozen_max,
            allow_root=True,
            trainer=dict(options.trainer_file),
        )
        plans = []
        for node in _nodes(options, store):
            home = scratch / node.name
            document = {
                "cluster": options.cluster,
                "node": node.name,
                "address": node.address,
                "slots": options.nproc,
                "agents": Supervision.CHILDREN,
                "etcd": {"endpoints": store.endpoints, "cacert": tls and tls.cacert, "cert": tls and tls.cert, "key": tls and tls.key},
                "paths": {"jobs_dir": home / "jobs.d", "run_dir": home / "run", "state_dir": home / "state", "log_dir": options.log_dir},
                "metrics": {"listen": ""},
                "health": {"disk_free_min": 0},
                "detectors": {"run": options.detect},
                "policy": options.policy,
            }
            plans.append(NodePlan(config=DaemonConfig.model_validate(document), spec=spec, trainer=options.trainer))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{place}: {said}" if place else said) from None
    for plan in plans:
        check_fit(plan.config, spec, options.own)
    return plans


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


def _introduce(options: RunOptions, store: Store, screen: Screen, plans: list[NodePlan]) -> None:
    """Say what runs, where its logs are, and how another node joins."""
    nodes = ", ".join(plan.name for plan in plans) if len(plans) <= 4 else count(len(plans), "node")
    logs = options.log_dir / options.job
    fields = {"job": options.job, "nodes": [plan.name for plan in plans], "etcd": list(store.endpoints), "log_dir": str(logs)}
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
    # Nodes that differ in settings do not train together.
    words += ["--config", str(options.config)] if options.config else []
    words += [word for name, value in options.trainer.items() for word in ("--trainer", f"{name}={value}")]
    words += [word for name, value in options.policy.items() for word in ("--policy", f"{name}={value}")]
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
    rank = failure.detail.partition(": ")[0]  # whoever judged the failure names it too
    why = outcome.reason if rank in outcome.reason else f"{failure.detail}; {outcome.reason}"
    screen.notice(Notice(text=f"{outcome.result.value}: {why}{where} ({size})", weight=weight))
    for line in last_lines(failure.log, _TAIL) if failure.log else []:
        screen.notice(Notice(text=f"  | {line}", weight=weight))


@contextlib.contextmanager
def _closing(screen: Screen) -> Iterator[Screen]:
    try:
        yield screen
    finally:
        screen.close()
