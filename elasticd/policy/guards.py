"""Which nodes may be left out at all, whatever the evidence.

Owns: the cluster guard. Must not: weigh evidence.

A driver that fits nowhere is a certain fault of every node, and a badly set threshold makes outliers of any: neither may empty a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticd.policy.budgets import Refusal

if TYPE_CHECKING:
    from elasticd.policy.state import State


def refuse_exclusion(state: State, node: str, *, statistic: bool) -> Refusal | None:
    """Why a node may not be left out; None if it may.

    Args:
        statistic: a statistic alone is the reason.
    """
    settings, cluster, world = state.settings, state.cluster, state.world
    if node in cluster.excluded:
        return Refusal(rule="already_out", why=f"{node} is left out already")
    if world is None or node not in world.nodes:
        return Refusal(rule="not_training", why=f"{node} does not train in this job now")
    left = len(world.nodes) - 1 + world.spare
    if left < max(1, world.min_nodes):
        return Refusal(rule="min_nodes", why=f"{left} nodes would be left, of at least {max(1, world.min_nodes)}")
    out = len(cluster.excluded) + 1
    most = allowed(settings.excluded_share, cluster.nodes)
    if out > most:
        return Refusal(rule="cluster_guard", why=f"{out} of the cluster's {cluster.nodes} nodes would be left out, and at most {most} may be")
    by_statistics = sum(cluster.excluded.values()) + 1
    most = allowed(settings.statistic_share, cluster.nodes)
    if statistic and by_statistics > most:
        return Refusal(rule="cluster_guard", why=f"{by_statistics} of {cluster.nodes} nodes would be left out by statistics alone, and at most {most} may be")
    return None


def allowed(share: float, nodes: int) -> int:
    """Nodes of a cluster that may be left out: that share, but one at least."""
    return max(1, int(share * nodes))
