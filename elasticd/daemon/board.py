"""What the decision loop says about itself, for the API, health and metrics: one value, replaced as a whole.

Owns: handing that value from the loop's thread to all others, and waking the loop. Must not: decide anything.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from elasticd.agent.settings import OwnLayers
from elasticd.daemon.config import AgentTimes
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.reconcile import Policy
from elasticd.observability.durations import Durations
from elasticd.rendezvous.records import NodeJob, TargetRecord

TURN_BOUNDS: Final = (0.1, 1.0, 5.0)
"""Upper bounds, in seconds, of the buckets that turns are counted in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """How things stood at the end of one turn of the loop.

    Attributes:
        at: when it ended, on the monotonic clock; 0 before the first.
        registered: this node's key is in etcd under our lease.
        unregistered: why it is not, "" if it is, or if that is not known.
        etcd_problem: why etcd is out of reach, "" while it answers.
        etcd_since: since when it has been so, in seconds since the epoch.
        allowed: the jobs that this node's files allow.
        times: of agents, where a job's file does not say otherwise.
        jobs: how each of them stands here.
        wanted: what operators want of jobs, as far as etcd ever said; the last word while it is away.
        failed: those of `wanted` that ended since they could not go on.
        policy: what they want of this node, likewise.
        problems: what an operator should know.
    """

    at: float = 0.0
    registered: bool = False
    unregistered: str = ""
    etcd_problem: str = "not asked yet"
    etcd_since: float = 0.0
    slots: int = 0
    allowed: Mapping[str, JobSpec] = field(default_factory=dict)
    times: AgentTimes = field(default_factory=AgentTimes)
    jobs: tuple[NodeJob, ...] = ()
    wanted: Mapping[str, TargetRecord] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    policy: Policy | None = None
    problems: tuple[str, ...] = ()


class Board:
    """Thread-safe. Whoever reads gets a value that nobody changes any more.

    Args:
        node: this node's name.
        incarnation: of this daemon.
        stalled_after: seconds without a turn after which the loop counts as stuck.
        own: settings of training that every agent gets from this daemon: the environment that it inherits, and our command line.

    Attributes:
        turns: how long turns took.
    """

    def __init__(self, *, node: str, incarnation: str, stalled_after: float, own: OwnLayers | None = None) -> None:
        self.node = node
        self.incarnation = incarnation
        self.own = own or OwnLayers()
        self.started_at = time.time()
        self.turns = Durations(TURN_BOUNDS)
        self._stalled_after = stalled_after
        self._began = time.monotonic()
        self._turn = Turn()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def turn(self) -> Turn:
        """The last one."""
        return self._turn

    def post(self, turn: Turn) -> None:
        """Say how the last turn ended."""
        self._turn = turn

    def wake(self) -> None:
        """Let the loop look now. From any thread, and from signal handlers."""
        with suppress(OSError):  # closed: the daemon has ended
            os.eventfd_write(self._wake, 1)

    def wait(self, seconds: float, fds: Sequence[int] = ()) -> None:
        """The loop's: until somebody wakes it, one of `fds` is readable, or `seconds` have passed."""
        poller = select.poll()
        for fd in (self._wake, *fds):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """Nobody waits any more."""
        os.close(self._wake)

    @property
    def stuck(self) -> str:
        """Why the loop counts as stuck, "" while it turns."""
        silent = time.monotonic() - (self._turn.at or self._began)
        return f"the decision loop has not turned for {silent:.0f} s" if silent > self._stalled_after else ""

    @property
    def unready(self) -> str:
        """Why this node does not serve the cluster, "" while it does."""
        turn = self._turn
        if self.stuck:
            return self.stuck
        if turn.etcd_problem:
            return f"etcd: {turn.etcd_problem}"
        return "" if turn.registered else f"this node is not registered: {turn.unregistered}" if turn.unregistered else "this node is not registered yet"
