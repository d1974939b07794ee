"""All that a decision is made of, besides the time.

Owns: the values that whoever asks has to fill in. Must not: decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticd.policy.budgets import Ledger, Progress
from elasticd.policy.costs import Measured
from elasticd.policy.evidence import Incident
from elasticd.policy.failures import Failure
from elasticd.policy.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The generation that trains.

    Attributes:
        generation: its number.
        formed_at: when it was formed, seconds since the epoch.
        nodes: its nodes, with their ranks.
        min_nodes: with fewer the job waits.
        spare: nodes that stand by and could take a place.
    """

    generation: int
    formed_at: float
    nodes: Mapping[str, tuple[int, ...]]
    min_nodes: int = 1
    spare: int = 0

    @property
    def ranks(self) -> int:
        """Workers in all."""
        return sum(len(ranks) for ranks in self.nodes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What all jobs have in common.

    Attributes:
        nodes: there are, excluded ones included.
        excluded: node -> whether a statistic alone was the reason.
        stops: when workers of any job were stopped of free will, seconds since the epoch; of the last hour at least.
    """

    nodes: int = 1
    excluded: Mapping[str, bool] = field(default_factory=dict)
    stops: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """See the module.

    Attributes:
        world: None while no generation trains, or another one is on its way.
        failure: of the generation, if it has just failed; then only that is decided.
        incidents: those that are open, of whichever node.
        paused: nothing is done of free will.
        tells_steps: the job says how far it is; a script that does not use `trainer` never does, and is not measured by it.
        dice: a random number from 0 to 1, drawn once for a failure.
    """

    settings: Settings = field(default_factory=Settings)
    world: World | None = None
    cluster: Cluster = field(default_factory=Cluster)
    progress: Progress = field(default_factory=Progress)
    measured: Measured = field(default_factory=Measured)
    ledger: Ledger = field(default_factory=Ledger)
    incidents: tuple[Incident, ...] = ()
    failure: Failure | None = None
    paused: bool = False
    tells_steps: bool = True
    dice: float = 0.0
