"""What an agent brings to a job.

Owns: the values a `Member` is made from. Must not: read files or arguments; whoever starts members does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from elasticd.kv.types import KVConfig
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import Timing
from elasticd.rendezvous.nodelock import default_state_dir
from elasticd.rendezvous.records import TargetRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What an agent brings to a job.

    Attributes:
        address: where peers reach this agent; its sockets are bound there.
        slots: workers it runs.
        kv: how to reach etcd.
        min_nodes: fewest nodes that train; this and the next three are written as the job's target if nobody has written one.
        max_nodes: most nodes that may ever train.
        desired: nodes wanted now.
        max_restarts: failures of workers the whole job may have.
        probe_port: fixed port for echoes, 0 for a free one.
        state_dir: where the node lock lives.
        state_port: where this node's states are served, 0 if nowhere.
        reopen: start a job again that has ended.
    """

    keys: JobKeys
    node: str
    address: str
    slots: int
    kv: KVConfig
    min_nodes: int
    max_nodes: int
    desired: int
    max_restarts: int = 10
    timing: Timing = field(default_factory=Timing)
    probe_port: int = 0
    state_dir: Path = field(default_factory=default_state_dir)
    reopen: bool = False
    state_port: int = 0

    def target(self) -> TargetRecord:
        """The size to write when there is none."""
        return TargetRecord(
            scope=self.keys.scope,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            desired=self.desired,
            max_restarts=self.max_restarts,
        )
