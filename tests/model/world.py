"""The world of one walk: virtual time, machines, networks, and the training that workers do.

Owns: the queue of events, what a node is, when a generation makes steps, who then holds which snapshot. Must not: decide anything about
membership (`agents` asks the real functions), or choose faults (`faults`). Nothing here sleeps, starts a thread, or reads a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import Timing, candidates, fate, not_ready_marks, used_up
from elasticd.rendezvous.records import EventRecord, GenerationRecord, MemberId, PolicyRecord, SnapshotRef, TargetRecord, Verdict
from tests.model.check import Checker
from tests.model.rules import Rules
from tests.model.store import VirtualEtcd

if TYPE_CHECKING:
    from elasticd.rendezvous.view import View
    from tests.model.agents import Agent

KEYS = JobKeys("cluster", "job")
TIMING = Timing(settle=0.5, settle_cap=2.0, ready_timeout=5.0, drain_timeout=8.0, ttl=4.0, frozen_max=12.0)
STEP = 1.0
"""Seconds a training step takes; each step leaves a snapshot."""
STORE_TICK = 0.5
"""Seconds between two looks of etcd at its leases."""
FORM_TIMEOUT = 3.0
"""Seconds after which workers that cannot reach each other give up."""


@dataclass(slots=True)
class Node:
    """One machine, how it is connected, and what lies on its disk. `rotten` is what it only believes to have there."""

    name: str
    number: int
    boot: int = 1
    lives: int = 0
    cut: bool = False
    away_from: set[str] = field(default_factory=set)
    paused_until: float = 0.0
    woke_at: float = -100.0
    agent: Agent | None = None
    exited: str = ""
    code: int = 1
    disk: dict[str, SnapshotRef] = field(default_factory=dict)
    rotten: set[str] = field(default_factory=set)
    blind_until: float = 0.0


@dataclass(slots=True)
class Run:
    """One generation's training. `since` is when it began to make steps, None while it does not; `reached` the step at which it ended.

    `restored` says who has which state to begin with; `sealed` that it ended by agreement, with a snapshot of its last step.
    """

    record: GenerationRecord
    base: int
    running: set[MemberId] = field(default_factory=set)
    made: float = 0.0
    since: float | None = None
    began: bool = False
    over: bool = False
    finishing: bool = False
    reached: int | None = None
    restored: dict[MemberId, str] = field(default_factory=dict)
    sealed: bool = False
    returned: int = 0
    token: int = 0

    @property
    def number(self) -> int:
        return self.record.number


class World:
    """See the module."""

    def __init__(self, seed: int, names: str, target: TargetRecord, *, total: int, rules: Rules, exact: bool, tracing: bool, shared: bool) -> None:
        self.seed = seed
        self.shared = shared
        self.storage: dict[str, SnapshotRef] = {}
        self.disks_lost: set[str] = set()
        self.rng = Random(seed * 7919 + 17)
        self.timing = replace(TIMING, judged=seed % 3 == 0)
        self.target = target
        self.total = total
        self.rules = rules
        self.exact = exact
        self.now = 0.0
        self.lines: list[str] | None = [] if tracing else None
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.pushed = 0
        self.ports = 1000
        self.handled = 0
        self.nodes = {name: Node(name, number) for number, name in enumerate(names)}
        self.agents: dict[MemberId, Agent] = {}
        self.runs: dict[int, Run] = {}
        self.stepping: set[int] = set()
        self.replaced_at: dict[int, float] = {}
        self.succeeded: set[int] = set()
        self.left: set[MemberId] = set()
        self.failures = 0
        self.trouble = False
        self.corrupted = False
        self.reopened = False
        self.stood_still = False
        self.asked_to_stop = False
        self.must_not_fail = False
        self.stuck_for_good = self.cut_for_good = False
        self.calm_since: float | None = None
        self.triggers: dict[str, list[tuple[float, Callable[[], None]]]] = {}
        self.check = Checker(self)
        self.store = VirtualEtcd(KEYS, self._changed)
        self.at(STORE_TICK, self._tick)

    # --- judging

    def judge(self, view: View) -> tuple[PolicyRecord, EventRecord]:
        """In the place of the policy: the job's restarts in all, now and then a delay, and a node that failed is left out if it can be spared."""
        assert view.active
        assert view.target
        what, number = fate(view), view.active.number
        ledger = int(str(view.policy.record.ledger["judged"])) if view.policy else 0
        stop = "its restarts are used up" if used_up(view) and what.failed and not what.lost else ""
        spare = len(candidates(view, not_ready_marks(view))) > view.target.record.min_nodes
        out = what.failed[0].record.id.incarnation if what.failed and spare and self.rng.random() < 0.3 else ""
        verdict = Verdict(
            generation=number,
            root="a rank failed",
            delay=self.rng.choice((0.0, 0.0, 1.5)),
            stop=stop,
            without={out: "it fails"} if out and not stop else {},
        )
        record = PolicyRecord(scope=KEYS.scope, ledger={"judged": ledger + 1}, verdict=verdict)
        return record, EventRecord(scope=KEYS.scope, number=number, at=0.0, what="judged", detail="a rank failed")

    # --- time

    def at(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        """Have something happen `delay` seconds from now."""
        self.pushed += 1
        heapq.heappush(self.queue, (self.now + delay, self.pushed, what, args))

    def run_until(self, end: float) -> None:
        """Let everything happen that is due before `end`."""
        queue, store = self.queue, self.store
        while queue and queue[0][0] <= end:
            self.now, _, what, args = heapq.heappop(queue)
            store.now = self.now
            self.handled += 1
            what(*args)
        self.now = store.now = end

    def say(self, who: str, what: str) -> None:
        """One line of the trace."""
        if self.lines is not None:
            self.lines.append(f"{self.now:8.2f}  {who:5} {what}")

    def _tick(self) -> None:
        self.store.expire()
        self.at(STORE_TICK, self._tick)

    # --- etcd speaks

    def _changed(self, keys: list[str]) -> None:
        if self.lines is not None:
            self._say_changes(keys)
        view = self.store.view()
        if KEYS.generation in keys:
            self._new_generation()
        self.check.wrote(view)
        for agent in list(self.agents.values()):
            if agent.watches(keys):
                agent.hear()
        if view.over and KEYS.generation in keys:
            self._fire("end")
        for name, key in (("proposal", KEYS.proposal), ("generation", KEYS.generation), ("checkpoint", KEYS.checkpoint)):
            if key in keys:
                self._fire(name)

    def _new_generation(self) -> None:
        view = self.store.view()
        for number in self.runs:
            if number != view.number or not view.active:
                self.replaced_at.setdefault(number, self.now)
        if view.active and view.number not in self.runs:
            self.runs[view.number] = Run(view.active, view.active.resume.step if view.active.resume else 0)

    def _fire(self, name: str) -> None:
        waiting = self.triggers.get(name)
        if waiting and waiting[0][0] <= self.now:
            _, what = waiting.pop(0)
            self.at(self.rng.choice((0.0, 0.01, 0.05, 0.3)), what)

    def _say_changes(self, keys: list[str]) -> None:
        view = self.store.view()
        for key in keys:
            short = key.removeprefix(KEYS.prefix)
            if short.startswith("events/"):
                continue
            if key not in self.store.items:
                self.say("etcd", f"{self.store.revision}: {short} is gone")
            elif short == "proposal" and view.proposal:
                one = view.proposal.record
                self.say("etcd", f"{self.store.revision}: proposal {one.number} {one.mode.value} {[str(m) for m in one.members]} by {one.proposer}: {one.cause}"
                         + (f", not ready {sorted(one.not_ready)}" if one.not_ready else ""))
            elif short == "generation" and view.generation:
                gen = view.generation.record
                resume = f", resumes {gen.resume.order} of {gen.resume.holders}" if gen.resume else ""
                self.say("etcd", f"{self.store.revision}: generation {gen.number} {gen.state.value} {[str(m) for m in gen.ids]}{resume} {gen.reason}")
            elif short == "checkpoint" and view.checkpoint:
                self.say("etcd", f"{self.store.revision}: committed {view.checkpoint.record.order}")
            elif short.startswith("members/"):
                one_member = view.members[short.removeprefix("members/")].record
                outcome = f", {one_member.outcome.result.value} {one_member.outcome.generation}" if one_member.outcome else ""
                held = ", holds " + " ".join(str(ref.order) for ref in one_member.inventory) if one_member.inventory else ""
                away = f", cannot reach {list(one_member.unreachable)}" if one_member.unreachable else ""
                self.say("etcd", f"{self.store.revision}: {one_member.id} stopped {one_member.stopped}{outcome}{held}{away}"
                         + (", leaving" if one_member.leaving else ""))
            else:
                self.say("etcd", f"{self.store.revision}: {short}")

    # --- who is where

    def agent_of(self, identity: MemberId) -> Agent | None:
        return self.agents.get(identity)

    def reach(self, a: Node, b: Node) -> bool:
        """Whether agents on two machines can talk; a machine that stands still answers nobody."""
        return b.name not in a.away_from and a.paused_until <= self.now and b.paused_until <= self.now

    def woke_at(self, number: int) -> float:
        """When the last machine of a generation woke up."""
        return max((self.nodes[identity.node].woke_at for identity in self.runs[number].record.ids), default=-100.0)

    def expected_nodes(self) -> int:
        """Nodes whose agent is well."""
        return sum(1 for node in self.nodes.values() if node.agent and not node.agent.leave_asked and not node.cut and node.agent.hung_until <= self.now)

    # --- training

    def workers_start(self, agent: Agent, number: int) -> None:
        run = self.runs[number]
        run.running.add(agent.id)
        self.look_at(run)
        agent.later("main", FORM_TIMEOUT + agent.rng.random(), agent.formation_check, number)

    def look_at(self, run: Run) -> None:
        """Begin or cease to make steps, as the members now are."""
        able = not run.over and len(run.running) == len(run.record.members) and self._connected(run)
        if able and run.since is None:
            run.since = self.now
            self.stepping.add(run.number)
            if not run.began:
                self._begin(run)
            run.token += 1
            if self.total < 10_000:
                self.at(max(0.0, (self.total - run.base - run.made) * STEP), self._finish, run, run.token)
            self.check.trains(run.number)
        elif not able and run.since is not None:
            run.made += (self.now - run.since) / STEP
            run.since = None
            run.token += 1
            self.stepping.discard(run.number)

    def _connected(self, run: Run) -> bool:
        nodes = [self.nodes[identity.node] for identity in run.record.ids]
        return all(node.paused_until <= self.now for node in nodes) and not any(a.name in b.away_from for a in nodes for b in nodes)

    def _begin(self, run: Run) -> None:
        """The restored state becomes the new generation's before its first step (PROTOCOL 21)."""
        run.began = True
        self.say("", f"generation {run.number} trains from step {run.base}")
        self.check.begins(run.record, run.restored)
        for identity in run.record.ids:
            agent = self.agents.get(identity)
            if agent:
                agent.keep(self.snapshot(run, run.base))

    def step_of(self, run: Run) -> int:
        made = run.made + ((self.now - run.since) / STEP if run.since is not None else 0.0)
        return min(run.base + int(made + 1e-9), max(self.total, run.base))

    def snapshot(self, run: Run, step: int) -> SnapshotRef:
        if step == run.base:
            return SnapshotRef(generation=run.number, step=step, digest=run.record.resume.digest if run.record.resume else "init")
        return SnapshotRef(generation=run.number, step=step, digest=f"{run.number}.{step}")

    def workers_end(self, agent_id: MemberId, number: int, *, returned: bool = False, orderly: bool = False) -> None:
        """One member's workers are no more: nobody else makes a step either."""
        run = self.runs[number]
        if agent_id not in run.running:
            return
        run.running.discard(agent_id)
        if not run.over:
            run.sealed = orderly and run.began and run.since is not None
            self._run_over(run, echo=not returned)
        if returned:
            run.returned += 1
            if run.returned == len(run.record.members):
                self.succeeded.add(number)

    def _run_over(self, run: Run, *, echo: bool) -> None:
        step = self.step_of(run)
        run.over = True
        self.look_at(run)
        if run.began:
            run.reached = step
            whole = run.finishing or step == run.base
            for rank, identity in enumerate(run.record.ids):
                agent = self.agents.get(identity)
                if agent:
                    # Asked to stop, they agree on a step; one may have had no buffer free for it. Else their newest differ by one.
                    luck = agent.rng.random()
                    newest = step if whole or (run.sealed and (luck < 0.9 or not rank)) or (not run.sealed and luck < 0.6) else step - 1
                    for one in range(max(run.base, newest - 1), newest + 1):
                        agent.keep(self.snapshot(run, one))
        if echo and not run.finishing:
            for identity in run.record.ids:
                agent = self.agents.get(identity)
                if agent and agent.rng.random() < 0.7:
                    agent.later("main", agent.rng.uniform(0.3, 3.0), agent.workers_fail, run.number, "the others are gone")

    def _finish(self, run: Run, token: int) -> None:
        if run.token != token or run.over:
            return
        run.finishing = True
        self.say("", f"generation {run.number} has made its last step, {self.total}")
        for identity in run.record.ids:
            agent = self.agents.get(identity)
            if agent:
                agent.later("main", agent.rng.choice((0.0, 0.05, 0.3, 1.0)) * agent.rng.random(), agent.workers_return, run.number)
        self._fire("finish")

    def look_at_all(self) -> None:
        for run in self.runs.values():
            if not run.over:
                self.look_at(run)
