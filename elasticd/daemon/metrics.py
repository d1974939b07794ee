"""What Prometheus reads of a daemon.

Owns: the names, and reading the board when asked. Must not: keep numbers of its own that the board has.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticd import __version__
from elasticd.rendezvous.records import NodeJobState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from elasticd.daemon.board import Board


class Metrics(Collector):
    """Registers itself.

    Args:
        registry: where.
        board: what is read.
    """

    def __init__(self, registry: CollectorRegistry, board: Board) -> None:
        self._board = board
        Info("elasticd_build", "Version of the daemon.", registry=registry).info({"version": __version__})
        ProcessCollector(registry=registry)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        turn = self._board.turn
        yield GaugeMetricFamily(
            "elasticd_loop_last_turn_age_seconds",
            "Time since the decision loop turned last.",
            value=time.monotonic() - turn.at if turn.at else float("nan"),
        )
        yield GaugeMetricFamily("elasticd_registered", "Whether the node's key is in etcd.", value=float(turn.registered))
        yield GaugeMetricFamily("elasticd_etcd_reachable", "Whether etcd answered last time.", value=float(not turn.etcd_problem))
        yield GaugeMetricFamily("elasticd_slots", "Workers this node can run.", value=turn.slots)
        yield GaugeMetricFamily("elasticd_slots_used", "Slots held by agents that run.", value=sum(job.slots for job in turn.jobs))
        yield GaugeMetricFamily("elasticd_problems", "Problems named in `elasticctl nodes`.", value=len(turn.problems))
        states = GaugeMetricFamily("elasticd_job_state", "1 for the state that a job is in on this node.", labels=["job_name", "state"])
        for job in turn.jobs:
            for state in NodeJobState:
                states.add_metric([job.name, state.value], float(job.state is state))
        yield states
