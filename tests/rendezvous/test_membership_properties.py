"""What must hold whatever happens: a small job in memory, its agents acting on stale views, driven by random events.

The store is a pretended one (`pretend`); the real etcd is in test_member.py. Here only the rules are under test, and time is a number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import (
    Activate,
    Drain,
    Leave,
    Local,
    Memory,
    Propose,
    Report,
    Start,
    Stop,
    Timing,
    Wait,
    not_ready_marks,
    observe,
    plan,
    react,
)
from elasticd.rendezvous.records import BudgetRecord, GenerationRecord, MemberId, MemberRecord, Outcome, ProposalRecord, Result, TargetRecord
from elasticd.rendezvous.view import Ledger, View
from tests.rendezvous.pretend import PretendStore
from tests.rendezvous.world import KEYS

pytestmark = pytest.mark.timeout(120)

NODES = "abcde"
TIMING = Timing(settle=1.0, settle_cap=5.0, ready_timeout=15.0, drain_timeout=30.0, ttl=10.0, frozen_max=100.0)
BUDGET = 3


@dataclass
class Agent:
    """One agent process: what it knows, and what its workers do."""

    id: MemberId
    ledger: Ledger = field(default_factory=lambda: Ledger(KEYS))
    view: View = field(default_factory=lambda: View(revision=0))
    memory: Memory = field(default_factory=Memory)
    running: int | None = None
    stopped: int = 0
    floor: int = 0
    outcome: Outcome | None = None
    leaving: bool = False
    cut_at: float | None = None
    gone: bool = False

    @property
    def node(self) -> str:
        return self.id.node

    def record(self) -> MemberRecord:
        return MemberRecord(
            scope=KEYS.scope,
            id=self.id,
            address="host",
            slots=1,
            boot_id="boot",
            store_port=1,
            probe_port=2,
            stopped=self.stopped,
            outcome=self.outcome,
            leaving=self.leaving,
        )


class Job:
    """Agents around one store. Every write of a generation is checked as it happens."""

    def __init__(self, minimum: int, maximum: int, desired: int) -> None:
        self.now = 1000.0
        self.store = PretendStore()
        self.truth = Ledger(KEYS)
        self.agents: dict[str, Agent] = {}
        self.died_at: dict[str, float] = {}
        self.counter = itertools.count(1)
        self.activated: list[GenerationRecord] = []
        self.good: dict[str, bytes] = {}
        self.retarget(minimum, maximum, desired)

    # --- what happens to it

    def retarget(self, minimum: int, maximum: int, desired: int) -> None:
        minimum, maximum = min(minimum, maximum), max(minimum, maximum)
        record = TargetRecord(scope=KEYS.scope, min_nodes=minimum, max_nodes=maximum, desired=max(minimum, desired), max_restarts=BUDGET)
        self.store.put(KEYS.target, record.to_bytes())

    def register(self, node: str) -> None:
        """A new agent; one that died here is proven dead by the node's lock, and its key is taken away first."""
        if node in self.agents:
            return
        self.store.remove(KEYS.member(node))
        self.agents[node] = self._join(node)

    def _join(self, node: str) -> Agent:
        agent = Agent(MemberId(node=node, incarnation=f"{next(self.counter):016x}"))
        agent.stopped = self.seen().number
        assert self.store.txn(transitions.register(KEYS, agent.record(), 1))
        self.look(agent)
        return agent

    def die(self, node: str) -> None:
        if self.agents.pop(node, None):
            self.died_at[node] = self.now

    def cut(self, node: str) -> None:
        """Away from etcd; its workers go on."""
        agent = self.agents.get(node)
        if agent and agent.cut_at is None:
            agent.cut_at = self.now

    def lapse(self, node: str) -> None:
        """Its lease ends, if nobody renews it; a dead one may be evicted by its peers at once."""
        agent = self.agents.get(node)
        if agent is None or (agent.cut_at is not None and self.now - agent.cut_at >= TIMING.ttl):
            self.store.remove(KEYS.member(node))

    def heal(self, node: str) -> None:
        agent = self.agents.get(node)
        if agent is None or agent.cut_at is None:
            return
        agent.cut_at = None
        agent.memory = replace(agent.memory, no_loss_before=self.now + TIMING.ttl)
        if KEYS.member(node) in self.store.items:
            self._report(agent)
            return
        view = self.seen()
        same = view.active and not view.pending and agent.running == view.number and agent.id in view.active.ids
        if same and view.generation and self.store.txn(transitions.reattach(KEYS, agent.record(), 1, view.generation, view.proposal)):
            return
        self.agents[node] = self._join(node)
        self.agents[node].leaving = agent.leaving

    def fail(self, node: str) -> None:
        self._ended(node, Result.FAILED)

    def finish(self, node: str) -> None:
        self._ended(node, Result.FINISHED)

    def hang_up(self, node: str) -> None:
        """Its workers end without a word."""
        self._ended(node, None)

    def _ended(self, node: str, result: Result | None) -> None:
        agent = self.agents.get(node)
        if agent and agent.cut_at is None and agent.running is not None:
            if result:
                agent.outcome = Outcome(generation=agent.running, result=result)
            self._stop(agent)

    def leave(self, node: str) -> None:
        agent = self.agents.get(node)
        if agent and agent.cut_at is None:
            agent.leaving = True
            self._report(agent)

    def spoil(self, node: str) -> None:
        """Garbage over a key of the job, chosen by `node`; only where somebody has seen a good value."""
        key = {"a": KEYS.generation, "b": KEYS.proposal, "c": KEYS.budget, "d": KEYS.checkpoint, "e": KEYS.member("a")}[node]
        if key in self.store.items or key == KEYS.checkpoint:
            if key in self.store.items and self.store.items[key].value != b"\x00garbage":
                self.good[key] = self.store.items[key].value
                for agent in self.agents.values():
                    agent.ledger.load(self.store.listing())  # a watch brings every value in its turn, the last good one too
            self.store.put(key, b"\x00garbage")

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for agent in self.agents.values():
            if agent.cut_at is None or agent.running is None:
                continue
            frozen = self.now - agent.cut_at
            generation = next(one for one in self.activated if one.number == agent.running)
            alone = any(not self._runs(identity, agent.running) for identity in generation.ids)
            if frozen > TIMING.frozen_max or (frozen > TIMING.ttl and alone):
                agent.stopped, agent.running = agent.running, None

    def _runs(self, identity: MemberId, number: int) -> bool:
        agent = self.agents.get(identity.node)
        return agent is not None and agent.id == identity and agent.running == number

    # --- what agents do

    def seen(self) -> View:
        self.truth.load(self.store.listing())
        return self.truth.view()

    def look(self, agent: Agent) -> None:
        if agent.cut_at is not None:
            return
        agent.ledger.load(self.store.listing())
        before, agent.view = agent.view, agent.ledger.view()
        agent.memory = observe(agent.memory, before, agent.view, self.now, TIMING)
        if agent.view.proposal:
            agent.floor = max(agent.floor, agent.view.proposal.record.number)

    def obey(self, agent: Agent) -> None:
        if agent.cut_at is not None or agent.gone:
            return
        view = agent.view
        own = self.store.items.get(KEYS.member(agent.node))
        if own and own.value == b"\x00garbage":
            self._report(agent)
        local = Local(id=agent.id, running=agent.running, floor=agent.floor, stopped=agent.stopped)
        generation, proposal = (view.generation.record if view.generation else None), (view.proposal.record if view.proposal else None)
        directive = react(generation, proposal, local, over=view.over)
        if isinstance(directive, Start):
            now = self.seen()  # the linearizable read
            if now.active and now.number == directive.number and not now.pending and agent.id in now.present and not agent.leaving:
                agent.running = directive.number
        elif isinstance(directive, Stop):
            self._stop(agent)
        elif isinstance(directive, Report):
            agent.stopped = max(agent.stopped, directive.number)
            self._report(agent)
        elif isinstance(directive, Leave):
            agent.running = None
            agent.gone = True
        out = view.active and agent.id not in view.active.ids
        short = view.pending and view.target and len(view.pending.record.members) < view.target.record.min_nodes
        if agent.leaving and agent.running is None and (view.active is None or out or short):
            agent.gone = True
        if agent.gone:
            self.store.remove(KEYS.member(agent.node))
            del self.agents[agent.node]

    def _stop(self, agent: Agent) -> None:
        assert agent.running is not None
        agent.stopped, agent.running = max(agent.stopped, agent.running), None
        self._report(agent)

    def _report(self, agent: Agent) -> None:
        own = self.store.items.get(KEYS.member(agent.node))
        if own is not None:
            assert self.store.txn(transitions.report(KEYS, agent.record(), own.mod_revision, 1))

    def coordinate(self, agent: Agent) -> None:
        """Any agent may, on whatever it saw last: who coordinates is a rule of load, not of safety."""
        view = agent.view
        if agent.cut_at is not None or view.revision == 0 or agent.id not in view.present:
            return
        for key, keyed in ((KEYS.generation, view.generation), (KEYS.proposal, view.proposal)):
            if key in view.damaged:
                if keyed:
                    self.store.txn(transitions.repair(key, keyed.record, view.damaged[key]))
                return
        decision = plan(view, self.now, agent.memory, TIMING)
        if isinstance(decision, Wait):
            return
        before = self.seen()
        if isinstance(decision, Propose):
            if self.store.txn(transitions.propose(KEYS, view, decision, agent.id)):
                self._check_proposal(before, self.seen())
        elif isinstance(decision, Activate):
            if self.store.txn(transitions.activate(KEYS, view, decision, agent.id, frozen_max=TIMING.frozen_max, at=self.now)):
                self._check_generation(before, view, self.seen())
        elif isinstance(decision, Drain):
            assert self.idle(view.number), "drained while somebody trains"
            self.store.txn(transitions.drain(KEYS, view))
        elif view.generation:
            self.store.txn(transitions.end(KEYS, view, decision, at=self.now))

    def idle(self, number: int) -> bool:
        """Whether nobody that can still be heard of runs the workers of this generation."""
        return not any(agent.running == number for agent in self.agents.values() if agent.id in self.seen().present)

    # --- what must hold

    def _check_proposal(self, before: View, after: View) -> None:
        assert after.proposal
        assert after.target
        record: ProposalRecord = after.proposal.record
        assert record.number > before.number
        assert not before.proposal or record.number > before.proposal.record.number
        assert len(set(record.members)) == len(record.members)
        assert len({identity.node for identity in record.members}) == len(record.members)
        assert len(record.members) <= after.target.record.limit
        assert 0 <= after.restarts_used <= BUDGET

    def _check_generation(self, before: View, seen: View, after: View) -> None:
        assert after.generation
        assert seen.target
        new = after.generation.record
        last = self.activated[-1] if self.activated else None
        self.activated.append(new)
        assert len(new.ids) >= seen.target.record.min_nodes
        assert len(set(new.ids)) == len(new.ids)
        marks = not_ready_marks(before)
        for identity in new.ids:
            assert identity in seen.present
            assert seen.present[identity].record.stopped >= before.number
        if last is None:
            assert new.restarts == 0
            return
        assert new.number > last.number
        assert new.restarts == last.restarts + 1
        common = [identity for identity in new.ids if identity in last.ids]
        assert common == [identity for identity in last.ids if identity in new.ids]
        assert list(new.ids[: len(common)]) == common
        for agent in self.agents.values():
            if agent.running is None or agent.id.incarnation in marks:
                continue
            # Whoever is here has stopped; whoever is not and still runs cannot step without a partner, unless none of them is left.
            assert agent.id not in after.present
            assert common, f"{agent.id} may train generation {agent.running} beside {new.number}"

    # --- the end of a random history

    def settle_down(self) -> None:
        """Nothing happens any more; everybody is well and does its work."""
        for node in NODES:
            self.heal(node)
            if node not in self.agents:
                self.lapse(node)
        for key, value in self.good.items():
            known = any(key not in agent.ledger.view().damaged and key in agent.ledger._good for agent in self.agents.values())
            if key in self.store.items and self.store.items[key].value == b"\x00garbage" and key != KEYS.checkpoint and not known:
                self.store.put(key, value)  # an operator's work, where no agent remembers
        target = self.seen().target
        assert target
        for node in NODES:
            if len([agent for agent in self.agents.values() if not agent.leaving]) < target.record.min_nodes:
                self.agents.pop(node, None) if node in self.agents and self.agents[node].leaving else None
                self.register(node)
        for _ in range(60):
            self.tick(1.0 if _ % 3 else 40.0)
            for agent in list(self.agents.values()):
                self.look(agent)
                self.obey(agent)
            for agent in sorted(self.agents.values(), key=lambda one: self.store.items[KEYS.member(one.node)].create_revision)[:1]:
                self.look(agent)
                self.coordinate(agent)


ACTIONS = ["register", "register", "die", "lapse", "cut", "heal", "fail", "finish", "hang_up", "leave", "spoil"]
one_node = st.sampled_from(NODES)
calm = st.one_of(
    st.tuples(st.just("round"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["look", "obey", "coordinate", "turn", "turn"]), one_node),
    st.tuples(st.just("tick"), st.sampled_from([0.6, 1.5, 11.0, 31.0, 120.0])),
)
trouble = st.one_of(
    st.tuples(st.sampled_from(ACTIONS), one_node),
    st.tuples(st.just("retarget"), st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(1, 5))),
)
chapters = st.lists(st.tuples(trouble, st.lists(calm, max_size=4)), min_size=4, max_size=20)
"""Each trouble is followed by some work, stale or not, so that there is something left to go wrong."""


def run(job: Job, history: list[tuple[str, object]]) -> None:
    for what, who in history:
        if what == "tick":
            assert isinstance(who, float)
            job.tick(who)
        elif what == "retarget":
            assert isinstance(who, tuple)
            job.retarget(*who)
        elif what == "round":
            assert isinstance(who, int)
            for agent in [*job.agents.values()] * who:
                if agent.node in job.agents:
                    turn(job, agent)
        elif what in {"look", "obey", "coordinate", "turn"}:
            agent = job.agents.get(str(who))
            if agent:
                turn(job, agent) if what == "turn" else getattr(job, what)(agent)
        else:
            getattr(job, what)(who)


def turn(job: Job, agent: Agent) -> None:
    job.look(agent)
    job.obey(agent)
    job.coordinate(agent)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    size=st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(1, 5)),
    first=st.integers(1, 5),
    story=chapters,
)
def test_whatever_happens_generations_are_sound_and_the_job_goes_on_when_it_can(
    size: tuple[int, int, int], first: int, story: list[tuple[tuple[str, object], list[tuple[str, object]]]]
) -> None:
    """Every proposal and activation is checked as it is written; then, left alone, all who are well train."""
    job = Job(*size)
    for node in NODES[:first]:
        job.register(node)
    run(job, [("round", 1), ("tick", 1.5), ("round", 3)])
    for event_, work in story:
        run(job, [event_, *work])
    event(f"generations: {min(len(job.activated), 8)}")
    job.settle_down()
    view = job.seen()
    if view.over:
        assert view.generation
        event(f"ended: {view.generation.record.state}")
        job.retarget(*size)
        for node in NODES[:3]:
            job.register(node)
        job.settle_down()
        view = job.seen()
    assert view.target
    well = [agent for agent in job.agents.values() if not agent.leaving]
    assert view.active, (view.proposal, plan(view, job.now, Memory(), TIMING))
    if any(agent.outcome == Outcome(generation=view.number, result=Result.FINISHED) for agent in job.agents.values()):
        return  # some have finished: whoever came later, or wants to leave, waits for the end
    assert len(view.active.ids) >= min(len(well), view.target.record.limit)
    assert set(view.active.ids) <= {agent.id for agent in well}
    assert all(agent.running == view.number for agent in well if agent.id in view.active.ids)


def test_the_budget_is_charged_once_for_each_failure_and_then_ends_the_job() -> None:
    """The same pretended job, with nothing random: BUDGET restarts, then the end."""
    job = Job(2, 2, 2)
    job.register("a")
    job.register("b")
    job.settle_down()
    for used in range(1, BUDGET + 1):
        job.fail("a")
        job.fail("b")
        job.settle_down()
        assert BudgetRecord.model_validate_json(job.store.items[KEYS.budget].value).used == used
        assert job.activated[-1].restarts == used
    job.fail("a")
    job.settle_down()
    assert job.seen().over
