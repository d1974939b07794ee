"""What would be done about a simulated job: its windows through peers, forest and incidents, and these through the policy in mode "act".

Owns: the loop that `detectors.pipeline`, `daemon.case` and `daemon.acting` are in the service, without files, processes or etcd. Must not: judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from detectors.forest import Forest
from detectors.incidents import Incidents
from detectors.incidents import State as Standing
from detectors.peers import Peers
from elasticd.policy.budgets import Ledger, Progress
from elasticd.policy.costs import Measured
from elasticd.policy.decide import decide
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.evidence import Incident
from elasticd.policy.settings import Settings
from elasticd.policy.state import Cluster, State, World

if TYPE_CHECKING:
    from detectors.features import Measured as Numbers
    from detectors.findings import Finding
    from detectors.windows import Window

MEASURED: Final = Measured(checkpoints=(3.0,), restarts=(8.0,), intervals=(600.0,), step_s=0.3)
"""A job that saves and restarts quickly, as elasticd has it: the quicker, the sooner something is worth it."""
EVERY: Final = 600.0
"""Seconds between its checkpoints."""
STEP: Final = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one job.

    Attributes:
        decisions: that do something, in the order of time.
        findings: all that was found, likewise.
    """

    decisions: tuple[Decision, ...]
    findings: tuple[Finding, ...]

    def of(self, *actions: Action) -> tuple[Decision, ...]:
        """Those of some kinds."""
        return tuple(one for one in self.decisions if one.action in actions)


def acted(windows: Sequence[tuple[Window, Numbers | None]], settings: Settings | None = None, *, every: float = EVERY) -> Outcome:
    """Judge a job's windows in their order, and act on what is found. What would be done changes nothing in them: the job was recorded.

    Args:
        every: seconds between the job's own checkpoints.
    """
    peers = Peers()
    findings = [*Forest().see_many(windows), *(one for window, measured in windows for one in peers.see(window, measured))]
    findings.sort(key=lambda one: one.at)
    incidents, known, done = Incidents(), dict[str, Incident](), list[Decision]()
    ledger, generation, place = Ledger(), windows[0][0].generation, 0
    for window, _ in windows:
        now = window.ended
        changed = []
        if window.generation != generation:
            generation = window.generation
            changed += incidents.world_changed("another generation")
        while place < len(findings) and findings[place].at <= now:
            changed += incidents.take(findings[place])
            place += 1
        changed += incidents.turn(now)
        for one in changed:
            known[one.id] = Incident.from_dict(one.as_dict())
        known = {name: one for name, one in known.items() if one.standing.value != Standing.OVER.value}
        if not known:
            continue
        state = _state(window, tuple(known.values()), ledger, settings or Settings(), windows[0][0].began, every)
        for decision in decide(state, now):
            ledger = ledger.after(decision, state.progress)
            done += [decision] if decision.acts else []
    return Outcome(decisions=tuple(done), findings=tuple(findings))


def _state(window: Window, incidents: tuple[Incident, ...], ledger: Ledger, settings: Settings, began: float, every: float) -> State:
    nodes: dict[str, tuple[int, ...]] = {}
    for rank, row in sorted(window.rows.items()):
        nodes[row.node] = (*nodes.get(row.node, ()), rank)
    step = int((window.ended - began) / STEP)
    saved = began + (window.ended - began) // every * every
    return State(
        settings=settings,
        world=World(generation=window.generation or 0, formed_at=began, nodes=nodes, min_nodes=1),
        cluster=Cluster(nodes=max(20, len(nodes))),
        progress=Progress(step=step, checkpoint_step=int((saved - began) / STEP), checkpoint_at=saved),
        measured=MEASURED,
        ledger=ledger,
        incidents=incidents,
    )
