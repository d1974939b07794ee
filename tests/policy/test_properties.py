"""What must hold whatever comes: a cluster that is told anything, whose coordinator carries out each decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from elasticd.policy.budgets import Deed, Ledger, Progress
from elasticd.policy.decide import decide
from elasticd.policy.decisions import DISRUPTIVE, Action, Decision
from elasticd.policy.evidence import Certainty, Fault, Incident, Number, Role, Scope, Sign, Standing
from elasticd.policy.failures import Failure, FailureClass
from elasticd.policy.settings import DAY, HOUR, Mode, Settings
from elasticd.policy.state import Cluster, State, World
from tests.policy.made import FAST, NOW

pytestmark = pytest.mark.timeout(180)

KINDS = ["joint_drift", "straggler", "slow_node", "xid_79", "nonfinite", "stalled", "dead_rank", "silent_node", "slurm_preempted", "nccl_remote", "oom_killed"]
NODES = 6


@dataclass
class Job:
    """One job in its cluster."""

    mode: Mode
    nodes: int
    min_nodes: int
    now: float = NOW
    generation: int = 1
    formed_at: float = NOW
    progress: Progress = field(default_factory=Progress)
    ledger: Ledger = field(default_factory=Ledger)
    excluded: dict[str, bool] = field(default_factory=dict)
    until: dict[str, float | None] = field(default_factory=dict)
    stops: list[float] = field(default_factory=list)
    taken: list[Decision] = field(default_factory=list)
    stopped: bool = False

    def state(self, incidents: tuple[Incident, ...] = (), failure: Failure | None = None, *, paused: bool = False) -> State:
        members = {f"n{one}": (one,) for one in range(self.nodes) if f"n{one}" not in self.excluded}
        return State(
            settings=Settings(mode=self.mode),
            world=World(generation=self.generation, formed_at=self.formed_at, nodes=members, min_nodes=self.min_nodes),
            cluster=Cluster(nodes=self.nodes, excluded=dict(self.excluded), stops=tuple(self.stops)),
            progress=self.progress,
            measured=FAST,
            ledger=self.ledger,
            incidents=incidents,
            failure=failure,
            paused=paused,
        )

    def step(self, seconds: float, steps: int, *, checkpoint: bool) -> None:
        self.now += seconds
        self.progress = replace(self.progress, step=self.progress.step + steps)
        if checkpoint:
            self.progress = replace(self.progress, checkpoint_step=self.progress.step, checkpoint_at=self.now)
        for node in [node for node, until in self.until.items() if until is not None and until <= self.now]:
            del self.excluded[node], self.until[node]

    def carry_out(self, seen: State) -> tuple[Decision, ...]:
        decisions = decide(seen, self.now)
        for decision in decisions:
            self.ledger = self.ledger.failed(seen.failure, decision, self.progress) if seen.failure else self.ledger.after(decision, self.progress)
            self._do(decision)
        assert Ledger.from_dict(self.ledger.as_dict()) == self.ledger
        return decisions

    def _do(self, decision: Decision) -> None:
        if not decision.acts:
            return
        self.taken.append(decision)
        event(f"{decision.action.value} for {'failure' if decision.failure else decision.rule}")
        if decision.action is Action.STOP:
            self.stopped = True
        if decision.action is Action.EXCLUDE:
            assert decision.node not in self.excluded
            self.excluded[decision.node] = not decision.certain
            self.until[decision.node] = decision.until
        if decision.action in DISRUPTIVE:
            self.generation += 1
            self.formed_at = self.now
            if not decision.failure:
                self.stops.append(self.now)


@st.composite
def tellings(draw: st.DrawFn, job: Job, kinds: list[str] = KINDS) -> Incident:
    """An incident of any kind; those that make no sense, too."""
    node = draw(st.integers(0, job.nodes - 1))
    at = job.now - draw(st.sampled_from([0.0, 5.0, 100.0, 500.0, -30.0]))
    root = Sign(
        at=at,
        detector=draw(st.sampled_from(["forest", "peers", "guard", "signature"])),
        kind=draw(st.sampled_from(kinds)),
        summary="something",
        fault=draw(st.sampled_from(list(Fault))),
        role=draw(st.sampled_from(list(Role))),
        certainty=draw(st.sampled_from(list(Certainty))),
        scope=draw(st.sampled_from(list(Scope))),
        node=draw(st.sampled_from([f"n{node}", ""])),
        rank=draw(st.sampled_from([node, None])),
        generation=draw(st.sampled_from([job.generation, job.generation, max(0, job.generation - 1), None])),
        numbers=(Number(name="compute_s", value=draw(st.sampled_from([1.0, 1.2, 5.0, None])), baseline=1.0),),
        began=draw(st.sampled_from([None, max(0.0, at - 400.0)])),
    )
    return Incident(
        id=f"g{root.generation or 0}-{root.kind}-{root.node or 'job'}-{draw(st.integers(0, 3))}",
        standing=draw(st.sampled_from([Standing.CONFIRMED, Standing.CONFIRMED, Standing.SUSPECT, Standing.OVER])),
        root=root,
        signs=(root,),
        opened=max(0.0, at - draw(st.sampled_from([0.0, 10.0, 300.0]))),
        updated=at,
        corroborated=draw(st.booleans()),
    )


def free(job: Job) -> list[Decision]:
    """What was done of free will and stopped the workers."""
    return [one for one in job.taken if one.action in DISRUPTIVE and not one.failure]


def most_within(times: list[float], seconds: float) -> int:
    return max((sum(begin <= at < begin + seconds for at in times) for begin in times), default=0)


QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(QUICK, max_examples=30)
@given(data=st.data())
def test_never_more_than_the_budgets_allow_and_no_node_beyond_the_guard(data: st.DataObject) -> None:
    job = Job(mode=Mode.ACT, nodes=data.draw(st.sampled_from([2, NODES, 20])), min_nodes=data.draw(st.integers(1, 3)))
    limits = Settings()
    for _ in range(data.draw(st.integers(5, 25))):
        job.step(
            data.draw(st.sampled_from([1.0, 30.0, 400.0, 2000.0, 20000.0])), data.draw(st.sampled_from([0, 50, 5000])), checkpoint=data.draw(st.booleans())
        )
        told = data.draw(st.lists(tellings(job), min_size=1, max_size=6))
        before = len(job.excluded)
        decisions = job.carry_out(job.state(tuple(told)))
        assert sum(one.action in DISRUPTIVE for one in decisions) <= 1
        assert len(decisions) == len({one.id for one in told})
        if len(job.excluded) > before:
            assert job.nodes - len(job.excluded) >= max(1, job.min_nodes)
            assert len(job.excluded) <= max(1, int(limits.excluded_share * job.nodes))
        if job.stopped:
            break
    bound = [one for one in free(job) if one.action in (Action.RESTART, Action.EXCLUDE)]
    unsure = [one.at for one in bound if not one.certain]
    assert most_within([one.at for one in bound], HOUR) <= min(limits.certain_per_hour, limits.cluster_per_hour)
    assert most_within([one.at for one in bound], DAY) <= limits.certain_per_day
    assert most_within(unsure, HOUR) <= limits.restarts_per_hour
    assert most_within(unsure, DAY) <= limits.restarts_per_day
    assert most_within([one.at for one in job.taken if one.action is Action.CHECKPOINT], HOUR) <= limits.early_per_hour
    assert all(most_within([one.at for one in bound if one.fingerprint == name and not one.certain], DAY) <= 1 for name in {one.fingerprint for one in bound})
    stops = [one for one in free(job) if one.action is Action.STOP]
    assert sum(one.action is Action.ROLLBACK for one in free(job)) >= len(stops)  # never stopped for a divergence without having gone back


@QUICK
@given(data=st.data())
def test_only_sure_or_lasting_evidence_stops_workers_and_it_is_of_this_world(data: st.DataObject) -> None:
    job = Job(mode=Mode.ACT, nodes=NODES, min_nodes=1, progress=Progress(step=10, checkpoint_step=10))
    job.step(1000.0, 1000, checkpoint=False)
    told = data.draw(tellings(job))
    (decision,) = job.carry_out(job.state((told,)))
    if decision.action in DISRUPTIVE:
        root = told.root
        assert told.standing is Standing.CONFIRMED
        assert root.fault not in (Fault.CASCADE, Fault.ADVISE)
        assert root.certainty is not Certainty.WEAK or told.corroborated or told.updated - told.began >= 120.0
        assert root.generation in (1, None) or root.fault is Fault.HARDWARE
        assert decision.action is not Action.EXCLUDE or told.root.node == decision.node
    assert decision.why
    assert decision.rule


@settings(QUICK, max_examples=25)
@given(data=st.data(), mode=st.sampled_from([Mode.SHADOW, Mode.ADVISE]), paused=st.booleans())
def test_shadow_advise_and_a_pause_never_act(data: st.DataObject, mode: Mode, paused: bool) -> None:
    job = Job(mode=Mode.ACT if paused else mode, nodes=NODES, min_nodes=1)
    for _ in range(data.draw(st.integers(1, 10))):
        job.step(data.draw(st.sampled_from([1.0, 400.0, 4000.0])), 50, checkpoint=data.draw(st.booleans()))
        decisions = job.carry_out(job.state(tuple(data.draw(st.lists(tellings(job), max_size=4))), paused=paused))
        assert not any(one.acts or one.hold_commits for one in decisions)
    assert job.generation == 1


@settings(QUICK, max_examples=15)
@given(data=st.data())
def test_a_benign_stream_brings_no_action(data: st.DataObject) -> None:
    """Suspicions, echoes, what is only worth knowing, what passed with its world; twenty rescales among them."""
    job = Job(mode=Mode.ACT, nodes=NODES, min_nodes=1)
    for _ in range(20):
        job.step(data.draw(st.sampled_from([10.0, 120.0, 3000.0])), 100, checkpoint=True)
        job.generation += 1
        told = []
        for one in data.draw(st.lists(tellings(job), max_size=2)):
            benign = data.draw(st.sampled_from(["suspect", "over", "cascade", "advise", "earlier"]))
            if benign in ("suspect", "over"):
                told.append(replace(one, standing=Standing(benign)))
            elif benign == "earlier":
                told.append(replace(one, root=replace(one.root, generation=job.generation - 1, certainty=Certainty.WEAK), corroborated=False))
            else:
                told.append(replace(one, root=replace(one.root, fault=Fault(benign))))
        job.carry_out(job.state(tuple(told)))
    assert job.taken == []
    assert job.ledger == Ledger()


@QUICK
@given(classes=st.lists(st.sampled_from(list(FailureClass)), min_size=1, max_size=40), data=st.data())
def test_a_job_that_fails_without_progress_ends_and_one_with_progress_goes_on(classes: list[FailureClass], data: st.DataObject) -> None:
    """All but losses end after three; with a checkpoint each time nothing but the user's code does."""
    progress = data.draw(st.booleans())
    job = Job(mode=Mode.ACT, nodes=20, min_nodes=1)
    counted: Counter[FailureClass] = Counter()
    for cls in classes:
        job.step(10.0, 2000 if progress else 0, checkpoint=progress)
        lost = ("n1",) if cls is FailureClass.MEMBERSHIP else ()
        failure = Failure(cls=cls, kind=cls.value, at=job.now, node="n1", summary="x", nodes=lost)
        job.carry_out(job.state(failure=failure))
        counted[cls] += 1
        if job.stopped:
            break
    charged = sum(counted.values()) - counted[FailureClass.MEMBERSHIP]
    if progress:
        last = job.taken[-1]
        assert not job.stopped or last.charged in ("code", "startup", "numerics")
    else:
        assert charged <= 3
        assert job.stopped or charged < 3


@settings(max_examples=30, deadline=None)
@given(ats=st.lists(st.tuples(st.floats(0, 1e9), st.sampled_from([Action.CHECKPOINT, Action.RESTART, Action.EXCLUDE])), max_size=100))
def test_a_full_ledger_forgets_checkpoints_first(ats: list[tuple[float, Action]]) -> None:
    ledger = Ledger()
    for at, action in ats:
        decision = Decision(action=action, would=action, wanted=action, rule="r", why="w", about="a", fingerprint="f", at=at)
        ledger = ledger.after(decision, Progress())
    kept = [one for one in ledger.deeds if one.action in DISRUPTIVE]
    assert len(ledger.deeds) <= 64
    assert kept == [Deed(at=at, action=action, about="a", fingerprint="f") for at, action in ats if action in DISRUPTIVE][-64:]
