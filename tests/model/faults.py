"""What goes wrong in a walk: drawn from a seed, kept as a list of plain values so that a failing walk can be shrunk.

Owns: the kinds of faults, the mixes they are drawn from, and how each is done to a world. Must not: judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from elasticd.rendezvous.records import RequestKind, RequestRecord, TargetRecord
from elasticd.rendezvous.transitions import request, write_target
from tests.model.agents import Agent
from tests.model.world import KEYS, TIMING, World

FOREVER = 1e9
NOT_MODELLED = """
Narrow views: every member sees the whole job (`sight` shows most of them seven keys), though only the coordinator and the deputy decide.
A write whose answer was lost: `kv.client` reads back what became of it.
Garbage and keys removed by hand: tests/rendezvous/test_membership_properties.py.
Clock rates: all clocks run alike; rule 15 has two TTLs to spare.
A main thread that hangs while nobody else's workers of its generation stop, or before it has started its own (see `_stuck`): its member goes on
reporting for it, so that the others wait for workers that never come, or train beside those that nobody stops.
A hung process that the watchdog of rule 6 does not end, and workers that outlive their agent.
Buffers: what is read is pinned, or a snapshot would overwrite it (rule 25). Which directories a clean-up may touch (rule 26).
States that a leaver takes along when too few are left to form a generation without it.
"""
"""What the walks say nothing about."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: when (or at the first write of `on` after that), what, to whom, for how long."""

    at: float
    kind: str
    node: str = ""
    seconds: float = 0.0
    other: str = ""
    on: str = ""

    def __str__(self) -> str:
        when = f"at {self.at:.2f}" + (f" or the next {self.on} after it" if self.on else "")
        what = f"{self.kind} {self.node}" + (f" and {self.other}" if self.other else "")
        return f"{when}: {what}" + (f" for {self.seconds:.2f} s" if self.seconds else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What a walk is drawn from.

    Attributes:
        weights: kind of fault -> how often, relative to the others.
        count: how many, from and to.
        minimum: the job's least nodes; 0 draws it.
        finishes: how often the job has an end within the walk.
        keep: kinds that are not healed when the walk ends.
        calm: nothing of it may cost a generation, once the job has formed.
        together: how often a fault comes right upon a write, rather than at some time.
        shared: how often checkpoints lie on shared storage.
    """

    weights: Mapping[str, float]
    count: tuple[int, int] = (2, 7)
    nodes: tuple[int, int] = (2, 4)
    minimum: int = 0
    budget: tuple[int, ...] = (0, 1, 3, 30)
    finishes: float = 0.4
    keep: frozenset[str] = frozenset()
    calm: bool = False
    together: float = 0.4
    span: tuple[float, float] = (12.0, 40.0)
    start_within: float = 3.0
    longest: float = 0.0
    must_not_fail: bool = False
    shared: float = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything a walk depends on, besides the seed of its delays."""

    mix: str
    nodes: str
    starts: tuple[float, ...]
    target: TargetRecord
    total: int
    faults: tuple[Fault, ...]
    span: float
    exact: bool = False
    keep: frozenset[str] = field(default_factory=frozenset)
    calm: bool = False
    must_not_fail: bool = False
    shared: bool = False


ALL = {
    "crash": 3.0, "power": 1.5, "pause": 3.0, "cut": 3.0, "part": 1.5, "outage": 1.5, "mass": 1.5, "hang": 1.5, "stuck": 0.7,
    "leave": 1.5, "fail": 2.0, "second": 2.0, "slow": 2.5, "scale": 0.7, "stop": 0.2, "corrupt": 0.3, "join": 1.5, "reopen": 0.3,
    "restart": 0.7, "hold": 0.5, "wipe": 0.7, "rot": 1.0, "blind": 0.5, "upgrade": 0.5,
}  # fmt: skip
MIXES: dict[str, Mix] = {
    "all": Mix(weights=ALL),
    "gentle": Mix(weights=ALL, count=(1, 2)),
    "storm": Mix(weights=ALL, count=(8, 14), span=(30.0, 60.0)),
    "loss": Mix(weights={"crash": 3, "power": 3, "second": 1, "slow": 1, "fail": 1}, together=0.7),
    "apart": Mix(weights={"cut": 4, "part": 2, "pause": 3, "join": 1, "slow": 1, "second": 1, "mass": 0.5}, count=(2, 6), finishes=0.2),
    "stale": Mix(weights={"slow": 4, "second": 4, "pause": 2, "cut": 1, "crash": 1, "fail": 1, "leave": 1, "join": 1}, together=0.7),
    "end": Mix(weights={"cut": 2, "crash": 2, "join": 3, "leave": 2, "slow": 2, "pause": 1, "mass": 1, "second": 1}, finishes=1.0, count=(1, 4), span=(8, 20)),
    "planned": Mix(weights={"leave": 3, "join": 3, "scale": 2, "slow": 1, "restart": 2, "hold": 1}, together=0.6),
    "asleep": Mix(weights={"mass": 1}, count=(1, 1), nodes=(2, 4), calm=True, finishes=0.0, together=0.0, span=(14, 14), start_within=0.3),
    "again": Mix(weights={"reopen": 4, "stop": 1, "fail": 2, "cut": 2, "crash": 1, "pause": 1, "slow": 1, "power": 1}, count=(3, 8), finishes=0.6),
    "disks": Mix(weights={"wipe": 2, "rot": 2, "crash": 3, "power": 3, "blind": 1, "leave": 1, "join": 1, "fail": 1, "cut": 1}, count=(3, 8), minimum=1),
    "upgraded": Mix(weights={"upgrade": 3, "crash": 1, "leave": 1, "join": 1}, count=(1, 5)),
    "hung": Mix(weights={"hang": 1}, count=(1, 1), keep=frozenset({"hang"}), longest=FOREVER, nodes=(3, 4), minimum=1, finishes=0.0, span=(8, 20)),
    "alone": Mix(weights={"cut": 1}, count=(1, 2), nodes=(2, 3), minimum=1, finishes=0.0, keep=frozenset({"cut"}), longest=FOREVER, together=0.3),
}
GENERAL = ("all", "all", "all", "gentle", "storm", "loss", "apart", "stale", "end", "planned", "asleep", "hung", "alone", "again", "disks", "upgraded")


def draw(seed: int, mix: str | None = None, *, nodes: tuple[int, int] | None = None, mixes: Mapping[str, Mix] = MIXES) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed * 1_000_003 + 5)
    name = mix or rng.choice(GENERAL)
    what = mixes[name]
    names = "abcdefgh"[: rng.randint(*(nodes or what.nodes))]
    minimum = what.minimum or rng.randint(1, len(names))
    limit = len(names) if rng.random() < 0.8 else rng.randint(minimum, len(names))
    target = TargetRecord(scope=KEYS.scope, min_nodes=minimum, max_nodes=limit, desired=limit, max_restarts=rng.choice(what.budget))
    span = rng.uniform(*what.span)
    late = rng.random() < 0.3
    starts = tuple(rng.random() * (span if late and index and not what.calm else what.start_within) for index in range(len(names)))
    total = rng.randint(2, 15) if rng.random() < what.finishes else 1_000_000
    kinds, weights = list(what.weights), list(what.weights.values())
    faults = [_fault(rng, what, rng.choices(kinds, weights)[0], names, span) for _ in range(rng.randint(*what.count))]
    return Scenario(
        mix=name, nodes=names, starts=starts, target=target, total=total, faults=tuple(sorted(faults, key=lambda fault: fault.at)), span=span,
        exact=seed % 16 == 0, keep=what.keep, calm=what.calm, must_not_fail=what.must_not_fail, shared=rng.random() < what.shared,
    )  # fmt: skip


def _fault(rng: Random, mix: Mix, kind: str, names: str, span: float) -> Fault:
    node = rng.choice(names)
    other = rng.choice([name for name in names if name != node] or [node])
    ttl = TIMING.ttl
    short, long = rng.uniform(0.2, ttl), rng.uniform(ttl, ttl + TIMING.frozen_max)
    seconds = mix.longest or (short if rng.random() < 0.4 else long)
    if kind == "crash":
        seconds = rng.choice((rng.uniform(0.1, 1.0), rng.uniform(1.0, 8.0), FOREVER))
    elif kind == "power":
        seconds = rng.choice((rng.uniform(3.0, 8.0), FOREVER))
    elif kind == "mass":
        seconds = rng.uniform(ttl + 0.5, ttl + 3.0)
    on = rng.choice(("proposal", "generation", "checkpoint", "finish")) if rng.random() < mix.together else ""
    if kind == "reopen":
        on = "end"
    at = rng.uniform(6.0, 8.0) if mix.calm else rng.random() * span * 0.8
    return Fault(round(at, 2), kind, node, round(seconds, 2), other if kind == "part" else "", on)


# --- doing it ----------------------------------------------------------------------------------------------------------


def schedule(world: World, scenario: Scenario) -> None:
    """Put the faults of a scenario into a world's future."""
    for fault in scenario.faults:
        act = _doer(world, fault, calm=scenario.calm)
        if fault.on:
            world.triggers.setdefault(fault.on, []).append((fault.at, act))
        else:
            world.at(fault.at, act)


def _doer(world: World, fault: Fault, *, calm: bool) -> Callable[[], None]:
    def act() -> None:
        if calm and world.calm_since is None and world.check.settled() is None and not world.trouble:
            world.calm_since = world.now
        world.say("", f"** {fault.kind} {fault.node} {fault.other} {fault.seconds:g}")
        DO[fault.kind](world, fault)

    return act


def start(world: World, name: str, *, reopen: bool = False) -> None:
    """Start an agent on a node that has none."""
    node = world.nodes[name]
    if node.agent is None and node.paused_until <= world.now:
        Agent(world, node, reopen=reopen)


def _crash(world: World, fault: Fault) -> None:
    agent = world.nodes[fault.node].agent
    if agent:
        agent.crash()
    if fault.seconds < FOREVER:
        world.at(fault.seconds, start, world, fault.node)


def _power(world: World, fault: Fault) -> None:
    node = world.nodes[fault.node]
    if node.agent:
        node.agent.crash(quietly=True)
    node.boot += 1
    if fault.seconds < FOREVER:
        world.at(fault.seconds, start, world, fault.node)


def _pause(world: World, fault: Fault) -> None:
    node = world.nodes[fault.node]
    world.trouble = world.stood_still = True
    node.paused_until = max(node.paused_until, world.now + fault.seconds)
    world.look_at_all()
    world.at(fault.seconds, _wake, world, fault.node)


def _wake(world: World, name: str) -> None:
    node = world.nodes[name]
    if node.paused_until > world.now:
        return
    node.woke_at = world.now
    world.say(name, "wakes up")
    if node.agent:
        node.agent.release()
    world.look_at_all()


def _cut(world: World, fault: Fault) -> None:
    world.trouble = True
    world.nodes[fault.node].cut = True
    if fault.seconds < FOREVER:
        world.at(fault.seconds, _join_etcd, world, fault.node)


def _join_etcd(world: World, name: str) -> None:
    world.say(name, "reaches etcd again")
    world.nodes[name].cut = False


def _part(world: World, fault: Fault) -> None:
    world.trouble = True
    one, two = world.nodes[fault.node], world.nodes[fault.other]
    one.away_from.add(two.name)
    two.away_from.add(one.name)
    world.look_at_all()
    for node in (one, two):
        agent = node.agent
        if agent and agent.running is not None:
            agent.later("main", agent.rng.uniform(1.0, 4.0), _link_fails, agent, agent.running, fault)
    if fault.seconds < FOREVER:
        world.at(fault.seconds, _mend, world, fault)


def _link_fails(agent: Agent, number: int, fault: Fault) -> None:
    other = fault.other if agent.node.name == fault.node else fault.node
    run = agent.world.runs.get(number)
    if run and other in agent.node.away_from and any(identity.node == other for identity in run.record.ids):
        agent.workers_fail(number, f"{other} cannot be reached")


def _mend(world: World, fault: Fault) -> None:
    world.nodes[fault.node].away_from.discard(fault.other)
    world.nodes[fault.other].away_from.discard(fault.node)
    world.look_at_all()


def _outage(world: World, fault: Fault) -> None:
    """Etcd is away, and comes back with a new leader, which gives every lease its whole time again."""
    world.trouble = True
    world.store.up = False
    world.at(min(fault.seconds, 20.0), _etcd_back, world, False)


def _mass(world: World, fault: Fault) -> None:
    """Etcd stands still, and ends every lease as it wakes."""
    world.trouble = True
    world.store.up = False
    world.at(min(fault.seconds, 20.0), _etcd_back, world, True)


def _etcd_back(world: World, mass: bool) -> None:
    world.say("etcd", "answers again")
    if not world.store.up:
        world.store.up = True
        if mass:
            world.store.expire()
        else:
            world.store.extend_all()


def _hang(world: World, fault: Fault) -> None:
    world.trouble = world.stood_still = True
    agent = world.nodes[fault.node].agent
    if agent:
        agent.hung_until = world.now + fault.seconds
        if fault.seconds < FOREVER:
            world.at(fault.seconds, agent.release)


def _stuck(world: World, fault: Fault) -> None:
    """The main thread hangs: no worker is stopped. One at a time, and only beside others that train: see NOT_MODELLED."""
    agent = world.nodes[fault.node].agent
    run = world.runs.get(agent.workers.number) if agent and agent.workers else None
    alone = any(other.stuck_until > world.now for other in world.agents.values())
    if agent and run and len(run.record.members) > 1 and not alone:
        world.trouble = True
        agent.stuck_until = world.now + fault.seconds
        if fault.seconds < FOREVER:
            world.at(fault.seconds, agent.release)


def _leave(world: World, fault: Fault) -> None:
    agent = world.nodes[fault.node].agent
    if agent and agent.registered:
        agent.leave()


def _fail(world: World, fault: Fault) -> None:
    agent = world.nodes[fault.node].agent
    if agent and agent.workers:
        agent.later("main", 0.01, agent.workers_fail, agent.workers.number, "a fault of its own")


def _second(world: World, fault: Fault) -> None:
    agent = world.nodes[fault.node].agent
    if agent:
        agent.second_until = world.now + fault.seconds
        agent.slow_until = world.now + fault.seconds / 2


def _slow(world: World, fault: Fault) -> None:
    agent = world.nodes[fault.node].agent
    if agent:
        agent.slow_until = world.now + fault.seconds


def _scale(world: World, fault: Fault) -> None:
    known = world.store.view().target
    if known and world.store.up and not world.store.view().over:
        wanted = world.rng.randint(known.record.min_nodes, known.record.max_nodes)
        world.store.txn(write_target(KEYS, world.store.items[KEYS.target], known.record.model_copy(update={"desired": wanted})))


def _restart(world: World, fault: Fault) -> None:
    """An operator wants the next generation; twice in a row is once."""
    view = world.store.view()
    if view.generation and view.active and world.store.up:
        record = RequestRecord(scope=KEYS.scope, kind=RequestKind.RESTART, generation=view.number, reason="an operator's word")
        world.store.txn(request(KEYS, record, world.store.items.get(KEYS.request("restart")), view.generation))


def _hold(world: World, fault: Fault) -> None:
    """An operator pauses the job, and resumes it after a while."""
    _write_paused(world, True)
    world.at(fault.seconds, _write_paused, world, False)


def _write_paused(world: World, paused: bool) -> None:
    known = world.store.view().target
    if known and known.record.paused != paused and world.store.up and not world.store.view().over:
        world.store.txn(write_target(KEYS, world.store.items[KEYS.target], known.record.model_copy(update={"paused": paused})))


def _stop(world: World, fault: Fault) -> None:
    known = world.store.view().target
    if known and world.store.up and not world.store.view().over:
        world.asked_to_stop = True
        world.store.txn(write_target(KEYS, world.store.items[KEYS.target], known.record.model_copy(update={"run": False})))


def _corrupt(world: World, fault: Fault) -> None:
    """A bit falls over in a snapshot: the same step, another content."""
    agent = world.nodes[fault.node].agent
    if agent and agent.snapshots:
        world.corrupted = True
        agent.snapshots = (*agent.snapshots[:-1], agent.snapshots[-1].model_copy(update={"digest": f"bad{fault.node}{world.now:g}"}))


def _wipe(world: World, fault: Fault) -> None:
    """A disk is replaced; whose agent stands by sees that it is empty. Shared storage is somebody else's care."""
    node = world.nodes[fault.node]
    world.trouble = True
    if node.disk:
        world.disks_lost.add(node.name)
    node.disk.clear()
    if node.agent and node.agent.registered:
        node.agent.later("loop", 0.5, node.agent.look_again)


def _rot(world: World, fault: Fault) -> None:
    """The newest checkpoint is damaged: on one node's disk, which finds out when it reads it, or where all read it."""
    node, view = world.nodes[fault.node], world.store.view()
    world.trouble = True
    if world.shared and view.checkpoint:
        world.storage.pop(view.checkpoint.record.digest, None)
    elif node.disk:
        world.disks_lost.add(node.name)
        node.rotten.add(view.checkpoint.record.digest if view.checkpoint else max(node.disk.values(), key=lambda ref: ref.order).digest)


def _blind(world: World, fault: Fault) -> None:
    """A node can read and write no state for a while, for want of memory, say."""
    world.trouble = True
    world.nodes[fault.node].blind_until = world.now + min(fault.seconds, TIMING.ttl)


def _upgrade(world: World, fault: Fault) -> None:
    """A node gets new code, and its agent is started again."""
    node = world.nodes[fault.node]
    node.code += 1
    if node.agent:
        node.agent.crash()
    world.at(world.rng.uniform(0.1, 2.0), start, world, fault.node)


def _join(world: World, fault: Fault) -> None:
    """A node that is not there comes; one that is there is left alone."""
    if not world.store.view().over:
        start(world, fault.node)


def _reopen(world: World, fault: Fault) -> None:
    if world.store.view().over and world.store.up and not world.reopened:
        world.total += 5
        world.asked_to_stop = False
        for name in world.nodes:
            start(world, name, reopen=True)


DO: dict[str, Callable[[World, Fault], None]] = {
    "crash": _crash, "power": _power, "pause": _pause, "cut": _cut, "part": _part, "outage": _outage, "mass": _mass, "hang": _hang,
    "stuck": _stuck, "leave": _leave, "fail": _fail, "second": _second, "slow": _slow, "scale": _scale, "stop": _stop, "corrupt": _corrupt,
    "join": _join, "reopen": _reopen, "restart": _restart, "hold": _hold, "wipe": _wipe, "rot": _rot, "blind": _blind, "upgrade": _upgrade,
}  # fmt: skip


def heal(world: World, keep: frozenset[str]) -> None:
    """Faults stop: everything is well again but for what is to be kept, and nodes without an agent get one."""
    world.say("", "** all is well from now on")
    world.triggers.clear()
    if not world.store.up:
        _etcd_back(world, False)
    _write_paused(world, False)
    for name, node in world.nodes.items():
        if "cut" not in keep:
            node.cut = False
        if "part" not in keep:
            node.away_from.clear()
        if node.paused_until > world.now:
            node.paused_until = world.now
            _wake(world, name)
        agent = node.agent
        if agent:
            if "hang" not in keep:
                agent.hung_until = min(agent.hung_until, world.now)
            if "stuck" not in keep:
                agent.stuck_until = min(agent.stuck_until, world.now)
            agent.slow_until = agent.second_until = min(agent.slow_until, world.now)
            agent.release()
        node.blind_until = 0.0
    _finish_upgrade(world)
    world.look_at_all()
    revive(world)


def _finish_upgrade(world: World) -> None:
    """Every node has the newest code in the end."""
    newest = max(node.code for node in world.nodes.values())
    for node in world.nodes.values():
        node.code = newest
        if node.agent and node.agent.code != newest:
            node.agent.crash()


def revive(world: World) -> None:
    """Start an agent wherever there is none, as long as the job goes on."""
    view = world.store.view()
    if view.over or (view.target and not view.target.record.run):
        return
    for name, node in world.nodes.items():
        if node.agent is None and node.paused_until <= world.now and not node.cut:
            start(world, name)


def without(scenario: Scenario, index: int) -> Scenario:
    """The scenario with one fault less."""
    return replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
