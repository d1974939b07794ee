"""The agent's process: `python -m elasticd.agent CONFIG.json`.

Owns: the order in which things begin and end, the exit code. Exit 0: the job succeeded, or this node left or stopped in order; 1: the job failed, or
10 and up where that has a code of its own (`elasticd.policy.settings`); else the code of the error that is printed as one line on standard error. The
same is in the result file, where the configuration names one.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.agent.signals import Errand, Signals
from elasticd.errors import ElasticdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.agent.agent import Finish
    from elasticd.agent.config import AgentConfig
    from elasticd.agent.identity import Identity
    from elasticd.agent.result import ResultFile
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.config import MemberConfig
    from trainer.settings import Settings

REASON_MAX: Final = 4096
"""Characters of why an agent ended."""


def member_config(config: AgentConfig, state_port: int = 0) -> MemberConfig:
    """The part of an agent's configuration that its membership needs, and where its states are served."""
    from elasticd.rendezvous.config import MemberConfig

    return MemberConfig(
        keys=config.keys,
        node=config.node,
        address=config.address,
        slots=config.nproc,
        kv=config.kv,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        desired=config.desired,
        max_restarts=config.max_restarts,
        timing=config.timing,
        probe_port=config.probe_port,
        state_dir=config.state_dir,
        reopen=config.reopen,
        state_port=state_port,
    )


def run(config: AgentConfig, signals: Signals) -> Finish:
    """Serve the job until it ends or this node leaves.

    Raises:
        ElasticdError: it could not begin, or the membership was lost for good.
    """
    from elasticd.agent.fingerprint import fingerprint
    from elasticd.agent.judging import Judge
    from elasticd.agent.outputs import OutputKeeper
    from elasticd.agent.reporting import Reporter
    from elasticd.agent.state import StateKeeper
    from elasticd.kv import EtcdKV
    from elasticd.policy.settings import Settings as PolicySettings
    from elasticd.rendezvous.keys import ClusterKeys
    from elasticd.rendezvous.member import Member

    identity = _identity(config)
    reporter = Reporter(config)
    reporter.clear()
    with ExitStack() as stack:
        kv = stack.enter_context(EtcdKV(config.kv))
        reloading = stack.enter_context(closing(Errand("elasticd-certificates", lambda: _reload(config, kv.reload))))
        # Under a daemon nobody hangs up: SIGHUP is what a service gets to be told of new files.
        signals.on_hangup(reloading.ask if config.result_file else None)
        states = stack.enter_context(closing(StateKeeper(config, lambda: read_settings(config, kv), reporter)))
        stack.enter_context(closing(reporter))  # its last word comes when the membership has ended
        judge = Judge(kv, ClusterKeys(config.cluster), config.keys, PolicySettings.from_dict(config.policy))
        member = stack.enter_context(closing(Member(member_config(config, states.port), kv=kv, attentive=True, judge=judge)))
        # What is wrong with etcd, files or names shows before torch has been imported, which takes seconds. Registering waits until workers
        # could be started: the others stop theirs as soon as they see a newcomer. And the import holds the interpreter for so long at a time
        # that a short lease would not live through it (tried: generations formed and were given up before the first worker ran).
        member.connect()
        from elasticd.agent.agent import JobAgent
        from elasticd.agent.launch import ExecLauncher

        states.attach(member)
        states.recall()
        inventory, lost = states.holdings()
        parts = fingerprint(config, os.environ)
        states.identify(parts)
        reporter.begin(member, states)
        member.start(inventory=inventory, lost=lost, fingerprint=parts)
        outputs = stack.enter_context(closing(OutputKeeper(config.log_dir / config.job / config.node, config.logs)))
        agent = JobAgent(config, member, ExecLauncher(), states, reporter, outputs, identity)
        states.call(agent.ring)
        signals.reach(agent)
        agent.run()
        if agent.difference:
            raise UsageError(f"node {config.node} differs from the others in {agent.difference}", remedy="make it alike, then start the job here again")
        if member.left_out:
            raise UsageError(f"node {config.node} was left out: {member.left_out}", remedy="see to it, then cordon and uncordon the node")
        if agent.finish is None:
            msg = "the agent ended without a result"
            raise ElasticdError(msg)
        return agent.finish


def read_settings(config: AgentConfig, kv: EtcdKV) -> Settings:
    """The settings of training as they are now, all layers of them.

    Raises:
        KVError: etcd is out of reach.
        UsageError: a value is not allowed where it is, or two do not fit each other.
        RecordError: what is in etcd is not ours to believe.
    """
    from elasticd.agent.settings import resolve
    from elasticd.rendezvous.keys import ClusterKeys
    from elasticd.rendezvous.records import ConfigRecord, parse

    keys = ClusterKeys(config.cluster)
    records = []
    for key, scope in ((keys.config_of_cluster, keys.scope), (keys.config_of_job(config.job), config.keys.scope)):
        held = kv.get(key)
        records.append(parse(ConfigRecord, key, held.value, scope) if held else None)
    return resolve(config, records[0], records[1], os.environ)[0]


def _identity(config: AgentConfig) -> Identity | None:
    """Who the workers are to be, if the configuration says so and this agent can do it.

    Raises:
        UsageError: there is no such user, or this agent may not become it.
    """
    if config.user is None:
        return None
    import structlog

    from elasticd.agent.identity import Identity

    identity = Identity.find(config.user)
    identity.check()
    closed = identity.kept_out_of(config.log_dir)
    if closed:
        log = structlog.get_logger("elasticd.agent")
        log.warning("logs_out_of_reach", user=identity.name, directory=str(closed), effect="workers cannot write why they failed (error.json)")
    return identity


def _reload(config: AgentConfig, reload: Callable[[], None]) -> None:
    """Take the certificates as they are now, and say whether that went well."""
    import structlog

    log = structlog.get_logger("elasticd.agent")
    if config.cacert is None:
        log.info("certificates_not_reloaded", reason="this agent uses none: no cacert is configured")
        return
    try:
        reload()
    except UsageError as error:
        log.error("certificates_not_reloaded", reason=str(error))  # noqa: TRY400 - an operator's mistake; the old ones stay in use
    except Exception:
        log.exception("certificates_not_reloaded")
    else:
        log.info("certificates_reloaded", cacert=str(config.cacert), cert=str(config.cert) if config.cert else None)


def main(argv: list[str]) -> int:
    """Run the agent whose configuration file is the only argument."""
    signals = Signals()  # before anything slow: until then a signal ends the process
    import structlog

    from elasticd.agent.result import ResultFile
    from elasticd.observability.redaction import hidden

    log = structlog.get_logger("elasticd.agent")
    results = ResultFile(None)
    try:
        if len(argv) != 1:
            msg = "usage: python -m elasticd.agent CONFIG.json"
            raise UsageError(msg)
        results = ResultFile.named_in(Path(argv[0]))
        finish = _serve(Path(argv[0]), results, signals)
    except ElasticdError as error:
        log.error("agent_exit", code=error.exit_code, result="failed", reason=str(error))  # noqa: TRY400 - the user's fault, or etcd's: no traceback
        told = hidden(str(error), REASON_MAX)
        print(f"elasticd-agent: {told}", file=sys.stderr)  # noqa: T201  (the one line that its starter shows)
        results.write(code=error.exit_code, result="failed", reason=told)
        return error.exit_code
    code = finish.code if finish.ending.value == "failed" else 0
    log.info("agent_exit", code=code, result=finish.ending.value, reason=finish.reason)
    results.write(code=code, result=finish.ending.value, reason=hidden(finish.reason, REASON_MAX))
    return code


def _serve(path: Path, results: ResultFile, signals: Signals) -> Finish:
    """From the configuration file to the end of the agent's part.

    Raises:
        ElasticdError: the file is no good, and as `run`.
    """
    import structlog

    from elasticd.agent.config import AgentConfig
    from elasticd.observability.logging import log_to_file, log_uncaught
    from elasticd.observability.redaction import know

    results.clear()
    know(os.environ)
    config = AgentConfig.read(path)
    know(config.env)
    limits = config.logs.overruled(os.environ)
    log_to_file(config.log_dir / config.job / config.node / "agent.jsonl", level=limits.number, most=limits.own_bytes, job=config.job, node=config.node)
    log_uncaught(structlog.get_logger("elasticd.agent"), "elasticd-agent")
    return run(config, signals)


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed by now. Taking torch and gRPC apart in an orderly way would cost another 2 to 3 s.
    os._exit(ended)
