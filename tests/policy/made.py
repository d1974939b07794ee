"""A small job and what is told of it, for the tests of the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticd.policy.budgets import Progress
from elasticd.policy.costs import Measured
from elasticd.policy.evidence import Certainty, Fault, Incident, Number, Role, Scope, Sign, Standing
from elasticd.policy.failures import WorkerEnd
from elasticd.policy.settings import Settings
from elasticd.policy.state import Cluster, State, World

NOW = 1_000_000.0
FAST = Measured(checkpoints=(0.5,), restarts=(2.0,), detections=(30.0,), intervals=(600.0,))
"""A job with cheap checkpoints and restarts, as elasticd makes them."""


def world(nodes: int = 8, ranks: int = 1, **changes: Any) -> World:
    of = {f"n{node}": tuple(range(node * ranks, (node + 1) * ranks)) for node in range(nodes)}
    return replace(World(generation=7, formed_at=NOW - 5000.0, nodes=of), **changes)


def state(*incidents: Incident, settings: Settings | None = None, **changes: Any) -> State:
    base = State(
        settings=settings or Settings(),
        world=world(),
        cluster=Cluster(nodes=20),
        progress=Progress(step=5000, checkpoint_step=4000, checkpoint_at=NOW - 300.0),
        measured=FAST,
        incidents=incidents,
    )
    return replace(base, **changes)


def sign(kind: str = "joint_drift", **changes: Any) -> Sign:
    base = Sign(
        at=NOW - 5.0,
        detector="forest",
        kind=kind,
        summary=f"{kind} on rank 3",
        fault=Fault.UNKNOWN,
        role=Role.ROOT,
        certainty=Certainty.WEAK,
        node="n3",
        rank=3,
        generation=7,
    )
    return replace(base, **changes)


def incident(root: Sign | None = None, lasted: float = 20.0, **changes: Any) -> Incident:
    root = root or sign()
    base = Incident(
        id=f"g{root.generation or 0}-{root.kind}-{root.node}",
        standing=Standing.CONFIRMED,
        root=root,
        signs=(root,),
        opened=NOW - 5.0 - lasted,
        updated=NOW - 5.0,
    )
    return replace(base, **changes)


def hardware(node: str = "n3", **changes: Any) -> Incident:
    """A GPU fell off the bus: certain, told once."""
    root = sign(
        "xid_79",
        detector="signature",
        summary=f"a GPU of {node} fell off the bus",
        fault=Fault.HARDWARE,
        certainty=Certainty.CERTAIN,
        scope=Scope.NODE,
        node=node,
        rank=None,
        generation=None,
    )
    return incident(root, lasted=0.0, **changes)


def straggler(slow: float, lasted: float, node: str = "n3", **changes: Any) -> Incident:
    root = sign(
        "straggler",
        detector="peers",
        summary=f"rank 3 takes {slow:.0%} longer",
        fault=Fault.HARDWARE,
        certainty=Certainty.STRONG,
        node=node,
        numbers=(Number(name="compute_s", value=1.0 + slow, baseline=1.0, peers=1.0),),
        began=NOW - lasted,
    )
    return incident(root, lasted=lasted - 5.0, **changes)


def nonfinite(**changes: Any) -> Incident:
    root = sign("nonfinite", detector="guard", summary="the loss is NaN", fault=Fault.USER, certainty=Certainty.CERTAIN, scope=Scope.JOB, node="", rank=1)
    return incident(root, lasted=0.0, **changes)


def end(rank: int, exception: str = "", code: int = 1, **changes: Any) -> WorkerEnd:
    base = WorkerEnd(node=f"n{rank}", rank=rank, code=code, exception=exception, message=exception, at=NOW - 10.0 + rank, order=rank)
    return replace(base, **changes)
