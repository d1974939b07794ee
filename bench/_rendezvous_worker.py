"""One client process of the rendezvous bench: real members, each on a thread of its own, with workers that stop at once.

Owns: the members of this process. Must not: know what is measured; it says when each thing happened, on the monotonic clock that all processes
of a machine share.

Its one argument is JSON, see `Order`. It says {"ready": true}, and then does what each line on its stdin asks: `go`, `stats`; it ends with its
stdin. Each line it writes is one JSON object, see `_Fleet`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
import os
import resource
import select
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elasticd.kv import EtcdKV, KVConfig, KVStats
from elasticd.observability.logging import log_to_file
from elasticd.rendezvous.config import MemberConfig
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.member import Member
from elasticd.rendezvous.membership import Leave, Stop, Timing

CALL_TIMEOUT = 10.0
"""Seconds for one attempt: hundreds of members that share a core with etcd are slower than one on a machine of its own."""

SHARE = 32
"""Members that share one client and its one connection: with a client each, a thousand idle ones fill two cores."""

STARTING = 4
"""Members that register at the same time in one process: more would only queue for its interpreter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What this process is to be.

    Attributes:
        first, count: its members are node-<first> to node-<first + count - 1>.
        size: members that are to form the first generation.
    """

    endpoint: str
    job: str
    first: int
    count: int
    size: int
    ttl: float
    folder: str

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    @property
    def keys(self) -> JobKeys:
        """Where the job is kept."""
        return JobKeys("bench", self.job)

    @property
    def kv(self) -> KVConfig:
        """How to reach etcd."""
        return KVConfig(endpoints=(self.endpoint,), call_timeout=CALL_TIMEOUT, one_connection=True)

    def member(self, index: int, kv: EtcdKV) -> Member:
        """One of its members. Nobody forms before all are there: `min_nodes` is all."""
        config = MemberConfig(
            keys=self.keys,
            node=f"node-{index:04d}",
            address="127.0.0.1",
            slots=1,
            kv=self.kv,
            min_nodes=self.size,
            max_nodes=self.size + 1,
            desired=self.size,
            # A core shared by hundreds is slow, not hung: nobody is to be thrown out for being late.
            timing=Timing(ttl=self.ttl, ready_timeout=120.0, drain_timeout=120.0),
            state_dir=Path(self.folder),
        )
        return Member(config, kv=kv)


class _Fleet:
    """The members of this process, which say what happens to them.

    {"registered": node, "at": t}; {"assigned": node, "number": n, "nodes": members in it, "at": t}; {"error": text}.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._starting = threading.Semaphore(STARTING)
        self._clients = [EtcdKV(order.kv) for _ in range(math.ceil(order.count / SHARE))]

    def go(self) -> None:
        """Start every member."""
        for index in range(self._order.first, self._order.first + self._order.count):
            threading.Thread(target=self._live, args=(index,), daemon=True).start()

    def say(self, **what: Any) -> None:
        """One line to the bench."""
        with self._lock:
            print(json.dumps(what), flush=True)

    def stats(self) -> None:
        """What all clients here have counted so far, and what this process has used."""
        self.say(stats=_total([client.stats for client in self._clients]), cpu=time.process_time(), at=time.monotonic(), **_held())

    def _live(self, index: int) -> None:
        try:
            with self._starting:
                member = self._order.member(index, self._clients[(index - self._order.first) // SHARE])
                member.connect()
                member.start()
            self.say(registered=member.id.node, at=time.monotonic())
            self._train(member)
        except Exception as error:
            self.say(error=f"node-{index:04d}: {type(error).__name__}: {error}")

    def _train(self, member: Member) -> None:
        poll = select.poll()
        poll.register(member.wake_fd, select.POLLIN)
        while not isinstance(member.directive, Leave):
            assignment = member.next_assignment()
            if assignment is None:
                continue
            generation = assignment.generation
            self.say(assigned=member.id.node, number=generation.number, nodes=len(generation.members), at=time.monotonic())
            if assignment.store_socket is not None:
                assignment.store_socket.close()
            while not isinstance(member.directive, Stop | Leave):
                poll.poll()
                member.drain_wake()
            member.report_stopped(generation.number)


def _total(stats: list[KVStats]) -> dict[str, Any]:
    """Their counters together; when one of them was answered last is no count."""
    total: dict[str, Any] = {}
    for one in stats:
        for name, value in dataclasses.asdict(one).items():
            if isinstance(value, int):
                total[name] = total.get(name, 0) + value
    total["by_operation"] = dict(sum((Counter(one.by_operation) for one in stats), Counter()))
    return total


def _held() -> dict[str, int]:
    tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count of names
    return {"threads": tasks, "files": len(os.listdir("/proc/self/fd"))}  # noqa: PTH208 - as above


def main() -> None:
    order = Order.from_json(sys.argv[1])
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log_to_file(Path(order.folder) / f"worker-{order.first:04d}.jsonl", level=logging.WARNING)
    EtcdKV(KVConfig(endpoints=(order.endpoint,))).close()  # imports etcd3 and gRPC, so that it is not part of what is measured
    # Sixty threads that wait for one interpreter wake every 5 ms each to ask for it; a node has five.
    sys.setswitchinterval(0.1)
    gc.disable()  # each record parsed would have it go over those of all members; a node has one member
    fleet = _Fleet(order)
    fleet.say(ready=True)
    for line in sys.stdin:
        match line.strip():
            case "go":
                fleet.go()
            case "stats":
                fleet.stats()
    os._exit(0)  # hundreds of members would take minutes to leave one after the other


if __name__ == "__main__":
    main()
