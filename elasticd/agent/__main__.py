"""The agent's process: `python -m elasticd.agent CONFIG.json`.

Owns: the order in which things begin and end, signals, the exit code. Exit 0: the job succeeded, or this node left or stopped in order; 1: the job
failed; else the code of the error that is printed as one line on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from elasticd.agent.config import AgentConfig
from elasticd.errors import ElasticdError, UsageError
from elasticd.observability.logging import log_to_file
from elasticd.rendezvous.config import MemberConfig
from elasticd.rendezvous.member import Member

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.agent.agent import Finish

log = structlog.get_logger("elasticd.agent")


def member_config(config: AgentConfig) -> MemberConfig:
    """The part of an agent's configuration that its membership needs."""
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
    )


class LeaveSignal:
    """SIGTERM, SIGINT and SIGHUP ask this node to leave; one that comes before there is an agent waits for it."""

    def __init__(self) -> None:
        self._came = False
        self._leave: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._came = True
        if self._leave:
            self._leave()

    def reaches(self, leave: Callable[[], None]) -> None:
        """Call `leave` for every signal from now on, and for an earlier one."""
        self._leave = leave
        if self._came:
            leave()


def run(config: AgentConfig) -> Finish:
    """Serve the job until it ends or this node leaves.

    Raises:
        ElasticdError: it could not begin, or the membership was lost for good.
    """
    member = Member(member_config(config))
    leave = LeaveSignal()
    try:
        # What is wrong with etcd, files or names shows before torch has been imported, which takes seconds. Registering waits until workers
        # could be started: the others stop theirs as soon as they see a newcomer. And the import holds the interpreter for so long at a time
        # that a short lease would not live through it (tried: generations formed and were given up before the first worker ran).
        member.connect()
        from elasticd.agent.agent import JobAgent
        from elasticd.agent.launch import ExecLauncher

        member.start()
        agent = JobAgent(config, member, ExecLauncher())
        leave.reaches(agent.leave)
        agent.run()
        if agent.finish is None:
            msg = "the agent ended without a result"
            raise ElasticdError(msg)
        return agent.finish
    finally:
        member.close()


def main(argv: list[str]) -> int:
    """Run the agent whose configuration file is the only argument."""
    try:
        if len(argv) != 1:
            msg = "usage: python -m elasticd.agent CONFIG.json"
            raise UsageError(msg)
        config = AgentConfig.read(Path(argv[0]))
        log_to_file(config.log_dir / config.job / config.node / "agent.jsonl", node=config.node)
        finish = run(config)
    except ElasticdError as error:
        log.error("agent_exit", code=error.exit_code, result="failed", reason=str(error))  # noqa: TRY400 - the user's fault, or etcd's: no traceback
        print(f"elasticd-agent: {error}", file=sys.stderr)  # noqa: T201  (the one line that its starter shows)
        return error.exit_code
    code = 1 if finish.ending.value == "failed" else 0
    log.info("agent_exit", code=code, result=finish.ending.value, reason=finish.reason)
    return code


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed by now. Taking torch and gRPC apart in an orderly way would cost another 2 to 3 s.
    os._exit(ended)
