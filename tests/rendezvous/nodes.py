"""An agent without workers: it takes every generation it is given, "trains", and stops when it is told to.

Owns: the main thread's side of one real `Member`, and what it went through. Must not: assert anything; the tests do.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticd.errors import ElasticdError, RefusedError
from elasticd.kv import KVConfig
from elasticd.rendezvous.config import MemberConfig
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.member import Member
from elasticd.rendezvous.membership import Leave, Stop, Timing
from elasticd.rendezvous.records import GenerationRecord, Outcome, Result

if TYPE_CHECKING:
    from elasticd.rendezvous.desk import Assignment

QUICK = Timing(ttl=2.0, settle=0.2, settle_cap=1.0, ready_timeout=3.0, drain_timeout=5.0)


def config_of(
    *,
    endpoints: list[str],
    cluster: str,
    node: str,
    state_dir: str,
    nodes: tuple[int, int, int] = (1, 4, 4),
    max_restarts: int = 10,
    timing: dict[str, float] | None = None,
    reopen: bool = False,
    slots: int = 1,
    state_port: int = 0,
) -> MemberConfig:
    """A member's configuration from what can be sent to another process; `nodes` is (min, max, desired)."""
    minimum, maximum, desired = nodes
    return MemberConfig(
        keys=JobKeys(cluster, "job"),
        node=node,
        address="127.0.0.1",
        slots=slots,
        kv=KVConfig(endpoints=tuple(endpoints), call_timeout=1.0),
        min_nodes=minimum,
        max_nodes=maximum,
        desired=desired,
        max_restarts=max_restarts,
        timing=Timing(**{**{name: getattr(QUICK, name) for name in QUICK.__slots__}, **(timing or {})}),
        state_dir=Path(state_dir),
        reopen=reopen,
        state_port=state_port,
    )


class Node:
    """One agent. `running` is what it trains now, `starts` and `stops` what it did so far."""

    def __init__(self, config: MemberConfig) -> None:
        self.name = config.node
        self.member = Member(config)
        self.running: int | None = None
        self.starts: list[int] = []
        self.ranks: list[int] = []
        self.worlds: list[GenerationRecord] = []
        self.stops: list[Stop] = []
        self.served: list[bool] = []
        self.started_at: dict[int, float] = {}
        self.error: ElasticdError | None = None
        self.deaf = False
        self.told: dict[str, Any] = {}
        """What it tells of its states when it stops."""
        self._end_with: Outcome | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"node-{config.node}", daemon=True)

    def start(self, **states: Any) -> None:
        """Register with what `Member.start` takes, and take generations from now on."""
        self.member.connect()
        self.member.start(**states)
        self._thread.start()

    def close(self) -> None:
        """Leave no thread and no key."""
        self._closing = True
        self.member.close()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        offered, returned = self.member._desk._assignment, self.member._desk.returned_socket()
        for sock in (offered.store_socket if offered else None, returned):
            if sock is not None:
                sock.close()  # nobody took it

    def fail(self, detail: str = "rank 0: boom") -> None:
        """Its worker ends by itself, badly."""
        self._end(Result.FAILED, detail)

    def finish(self) -> None:
        """Its worker returns 0."""
        self._end(Result.FINISHED, "")

    def _end(self, result: Result, detail: str) -> None:
        assert self.running is not None
        self._end_with = Outcome(generation=self.running, result=result, detail=detail)

    @property
    def directive(self) -> Any:
        return self.member.directive

    def _run(self) -> None:
        while not self._closing:
            try:
                assignment = self.member.next_assignment(give_up=lambda: self._closing)
            except RefusedError as error:
                self.error = error
                return
            if assignment is not None:
                self._train(assignment)

    def _train(self, assignment: Assignment) -> None:
        number = assignment.generation.number
        self.worlds.append(assignment.generation)
        self.ranks.append(assignment.node_rank)
        self.served.append(assignment.store_socket is not None)
        self.started_at[number] = time.monotonic()
        self.starts.append(number)
        self.running = number
        while not self._closing:
            directive, outcome = self.member.directive, self._end_with
            if outcome is not None or (not self.deaf and isinstance(directive, Stop | Leave)):
                if outcome is None and isinstance(directive, Stop):
                    self.stops.append(directive)
                self._end_with, self.running = None, None
                self.member.report_stopped(number, outcome, **self.told)
                break
            time.sleep(0.005)
        if assignment.store_socket is not None:
            assignment.store_socket.close()
