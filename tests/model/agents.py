"""A model of one agent process: the member's loop, its keepalive, its main thread, and the workers it owns.

Owns: the order of things in `rendezvous.member`, `ownkey`, `desk`, `coordinator` and `agent.agent`, each look at etcd apart from the write built
on it. What is decided, and what is written, comes from the real functions by way of `Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from elasticd.agent.commit import last_rank, writes
from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, Decision, Drain, Judge, Leave, Local, Memory, Propose, Report, Start, Stay, Stop, Wait
from elasticd.rendezvous.records import (
    CauseKind,
    CheckpointRecord,
    GenerationRecord,
    MemberId,
    MemberRecord,
    Mode,
    Outcome,
    Result,
    ResumePoint,
    SnapshotRef,
)
from elasticd.rendezvous.view import Keyed, Ledger, View
from tests.model.store import AwayError, NoLeaseError
from tests.model.world import KEYS, Node, World

if TYPE_CHECKING:
    from elasticd.rendezvous.transitions import Txn

RETRY = 0.5
SILENT_AFTER = 1.5
LOOK_EVERY = 5.0
STAND_IN_AFTER = 2.5
FOREIGN_WAIT = 10.0
STOP_GRACE = 5.0
KILL_GRACE = 1.0
LEAVE_TIMEOUT = 20.0
COPIES = 2
KEEP_WITHIN = 2.5
"""Seconds that the last state may take to be committed."""


@dataclass(slots=True)
class Workers:
    """The workers of one generation on this node."""

    number: int
    started_at: float
    stopping: Mode | None = None
    ends_at: float = float("inf")
    orderly: bool = False
    asked_to_leave_at: float | None = None
    writing: bool = False


class Agent:
    """See the module. Handlers run as events; `later` puts them off while the machine stands still or their thread hangs."""

    def __init__(self, world: World, node: Node, *, reopen: bool = False) -> None:
        node.lives += 1
        self.world, self.node, self.rules = world, node, world.rules
        self.store, self.timing = world.store, world.timing
        self.reopen = reopen
        self.rng = Random((world.seed * 64 + node.number) * 64 + node.lives)
        self.dead = False
        self.lives = 0
        self.id = self._identity()
        self.held: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []
        self.hung_until = self.stuck_until = self.slow_until = self.second_until = 0.0
        # loop
        self.ledger = Ledger(KEYS)
        self.view = View(revision=0)
        self.looked = self.view
        self.looked_at = -100.0
        self.place = 99
        self.registered = self.registering = False
        self.register_by = world.now + self.timing.ttl + FOREIGN_WAIT
        self.lease: int | None = None
        self.lease_gone = False
        self.reachable = True
        self.last_renewed = world.now
        self.ticked_at = world.now
        self.missed = 0
        self.outage_since: float | None = None
        self.answered: dict[MemberId, float] = {}
        self.written = 0
        self.round_at = float("inf")
        self.token = 0
        self.thinking = self.woken = False
        # coordinator
        self.memory = Memory()
        self.seen = View(revision=0)
        self.undone: Decision | None = None
        self.undone_since = 0.0
        self.next_turn = float("inf")
        # desk and main thread
        self.running: int | None = None
        self.stopped = 0
        self.outcome: Outcome | None = None
        self.unreachable: tuple[str, ...] = ()
        self.leaving = self.leave_asked = self.over = False
        self.dirty = False
        self.directive: Any = Stay(why="starting")
        self.assignment: tuple[GenerationRecord, float] | None = None
        self.workers: Workers | None = None
        self._no_states()
        world.agents[self.id] = self
        node.agent, node.exited = self, ""
        self.say("starts")
        self.later("loop", 0.02 + 0.1 * self.rng.random(), self._open_job)
        self.later("keepalive", self.timing.ttl / 3 * self.rng.random(), self._keepalive)

    def _no_states(self) -> None:
        self.snapshots: tuple[SnapshotRef, ...] = ()
        self.unreadable: set[str] = set()
        self.holders: dict[str, set[str]] = {}
        self.begun = 0  # the generation at hand
        self.keeping = self.kept = False
        self.code = self.node.code
        self.port = self._port()

    def _identity(self) -> MemberId:
        self.lives += 1
        life = f"{self.node.number + 10:x}{self.node.lives:03d}{self.lives:03d}" if self.rules.fresh_identity else f"{self.node.number:07d}"
        return MemberId(node=self.node.name, incarnation=f"{life:0>8}".ljust(16, "0"))

    def _port(self) -> int:
        self.world.ports += 1
        return self.world.ports

    def say(self, what: str) -> None:
        if self.world.lines is not None:
            self.world.say(f"{self.id.node}{self.id.incarnation[1:7].lstrip('0') or ''}", what)

    # --- time as this process has it

    def later(self, thread: str, delay: float, what: Callable[..., None], *args: Any) -> None:
        self.world.at(delay, self._happens, thread, what, args)

    def _happens(self, thread: str, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.dead:
            return
        now = self.world.now
        blocked = self.node.paused_until
        if thread == "loop" and self.hung_until > blocked:
            blocked = self.hung_until
        elif thread == "main" and self.stuck_until > blocked:
            blocked = self.stuck_until
        if blocked > now:
            self.held.append((thread, what, args))
            return
        try:
            what(*args)
        except AwayError:
            if not self.registered and thread == "loop":
                self.exit("no etcd")
                return
            self.registering = False
            self._outage()
            self._rest(RETRY)
        except NoLeaseError:
            self.lease_gone = True
            self.registering = False
            if self.registered:
                self._rest(0.01)
            else:
                self.later("loop", 0.1, self._take)

    def release(self) -> None:
        """The machine has woken up, or a thread no longer hangs: what it missed happens now, in the order in which it was due."""
        held, self.held = self.held, []
        for thread, what, args in held:
            self.later(thread, 0.02 * self.rng.random(), what, *args)

    def _think(self) -> float:
        """Between a look and the write built on it."""
        if self.slow_until > self.world.now:
            return self.rng.uniform(0.5, 5.0)
        luck = self.rng.random()
        return 0.0 if luck < 0.5 else 0.05 * self.rng.random() if luck < 0.95 else self.rng.uniform(0.2, 2.0)

    def _rest(self, delay: float) -> None:
        """Turn the loop again in `delay` seconds at the latest; one that is in the middle of a round finishes it first."""
        if self.thinking:
            self.woken = True
            return
        when = self.world.now + delay
        if when >= self.round_at - 1e-9 and self.round_at > self.world.now:
            return
        self.round_at = when
        self.token += 1
        self.later("loop", delay, self._round, self.token)

    def watches(self, keys: list[str]) -> bool:
        if not self.registered:
            return False
        own = KEYS.members + self.id.node
        for key in keys:
            if self.place == 0 or key == own or not key.startswith(KEYS.members) or key not in self.store.items:
                return not (self.node.cut or not self.store.up)
        return False

    def hear(self) -> None:
        """The watch brought something."""
        luck = self.rng.random()
        self._rest(0.005 + 0.05 * luck if luck < 0.9 else self.rng.uniform(0.1, 1.0))

    # --- etcd

    def _reach(self) -> None:
        if self.node.cut or not self.store.up:
            raise AwayError

    def _send(self, txn: Txn) -> bool:
        self._reach()
        self.ticked_at = self.world.now
        revision = self.store.txn(txn)
        self.written = max(self.written, revision)
        return bool(revision)

    def _look(self) -> View:
        self._reach()
        if not self.world.exact:
            return self.store.view()
        if self.rng.random() < 0.3 or not self.ledger.view().revision:
            self.ledger.load(self.store.listing())
        else:
            self.ledger.apply(self.store.changes_after(self.ledger.view().revision))
        return self.ledger.view()

    def _keepalive(self) -> None:
        ttl, now = self.timing.ttl, self.world.now
        away = self.node.cut or not self.store.up
        self.later("keepalive", 0.7 if away or not self.reachable else ttl / 3, self._keepalive)
        if self.lease is None or self.lease_gone:
            return
        if self.registered and self.rules.lease_needs_loop and now - self.ticked_at > ttl:
            self.missed += 1
            if now - self.ticked_at > self.timing.frozen_max and self.missed > 1:
                self.say("its loop stands still: the process ends")
                self.crash()
            return
        self.missed = 0
        if away:
            if self.reachable:
                self.reachable = False
                self._rest(0.0)
            return
        if not self.reachable:
            self.reachable = True
            self._rest(0.0)
        if self.store.renew(self.lease):
            self.last_renewed = now
        else:
            self.lease_gone = True
            self._rest(0.0)

    # --- registering

    def _open_job(self) -> None:
        self._send(transitions.create_target(KEYS, self.world.target))
        view = self._look()
        if view.over and self.reopen:
            self._send(transitions.reopen(KEYS, self.store.items.get(KEYS.target), self.world.target))
            self.world.reopened = True
        elif view.over:
            self.exit("refused")
            return
        if view.active and any(identity not in view.present for identity in view.active.ids):
            self._blind()
        self.later("loop", self._think(), self._take)

    def _take(self) -> None:
        """Create the key under a new incarnation, in two steps: look, then write."""
        self.registering = True
        self._reach()
        if self.lease is None or self.lease_gone or self.lease not in self.store.leases:
            self.lease, self.lease_gone = self.store.grant(self.timing.ttl), False
            self.last_renewed = self.world.now
        del self.world.agents[self.id]
        self.id = self._identity()
        self.world.agents[self.id] = self
        self.ledger = Ledger(KEYS)
        self.view = self._look()
        if self.rules.fresh_identity:
            self.stopped = max(self.stopped, self.view.number)
        self.outcome, self.unreachable, self.dirty = None, (), False
        self.later("loop", self._think(), self._register)

    def _register(self) -> None:
        assert self.lease is not None
        if self._send(self.rules.register(KEYS, self.record(), self.lease)):
            self.say(f"is {self.id}")
            self.registered, self.registering = True, False
            self.ticked_at = self.world.now
            self._rest(0.01)
            return
        held = self.store.items.get(KEYS.member(self.node.name))
        if held is None:
            self.later("loop", 0.0, self._take)
            return
        keyed = self._fetch()
        if keyed is None or keyed.record.boot_id == self._boot():
            self.later("loop", self._think(), self._remove_predecessor, held.mod_revision)
        elif self.registered or self.world.now > self.register_by:
            self.exit("refused")
        else:
            self.later("loop", 0.5, self._take)

    def _remove_predecessor(self, mod_revision: int) -> None:
        self._send(transitions.remove_member(KEYS, self.node.name, mod_revision))
        self.later("loop", self._think(), self._take)

    def _fetch(self) -> Keyed[MemberRecord] | None:
        return self.store.view().members.get(self.node.name)

    def _boot(self) -> str:
        return f"boot{self.node.boot}"

    def keep(self, ref: SnapshotRef) -> None:
        """In memory, which has room for three."""
        self.snapshots = (*[known for known in self.snapshots if known.digest != ref.digest][-2:], ref)

    def holdings(self) -> tuple[tuple[SnapshotRef, ...], tuple[str, ...]]:
        """What it holds, as far as it knows, and which committed checkpoint it was to hold and does not."""
        held = {ref.digest: ref for ref in (*self.node.disk.values(), *self.snapshots)}
        known = self.view.checkpoint.record if self.view.checkpoint else None
        lost = set(self.unreadable)
        if known and self.node.name in known.holders:
            lost.add(known.digest)
        inventory = sorted(held.values(), key=lambda ref: (ref.order, ref.digest), reverse=True)
        return tuple(inventory), tuple(sorted(lost.difference(held)))

    def record(self) -> MemberRecord:
        inventory, lost = self.holdings() if self.rules.keeps_holdings or self.lives == 2 else ((), ())
        return MemberRecord(
            scope=KEYS.scope,
            id=self.id,
            address=self.node.name,
            slots=1,
            boot_id=self._boot(),
            store_port=self.port,
            probe_port=9,
            stopped=self.stopped,
            outcome=self.outcome,
            unreachable=self.unreachable,
            leaving=self.leaving,
            inventory=inventory,
            lost=lost,
            fingerprint={"code": str(self.code)},
        )

    # --- the loop

    def _round(self, token: int) -> None:
        if token != self.token or self.registering:
            return
        self.round_at = float("inf")
        self.ticked_at = self.world.now
        if not self.reachable:
            self._outage()
            self._rest(RETRY)
            return
        self.looked = self._look()
        pause = self._think()
        if pause:
            self.thinking = True
            self.later("loop", pause, self._act)
        else:
            self._act()

    def _act(self) -> None:
        self.thinking = False
        if self.registering:
            return
        if self.woken:
            self.woken = False
            self._rest(0.01)
        self.ticked_at = self.world.now
        own = self.looked.members.get(self.node.name)
        if not (own and own.record.id == self.id and own.lease == self.lease and not self.lease_gone):
            self._recover()
            return
        if self.outage_since is not None:
            self.outage_since = None
            self._blind()
        self.view = self.looked
        self._find_place(own)
        self._leave_if_done()
        if self.dead:
            return
        self._obey()
        if self.running is None and (own.record.inventory, own.record.lost) != self.holdings() and self.rules.keeps_holdings:
            self.dirty = True  # a standby's disk has changed
        self._write()
        self._turn()
        self._rest(max(0.0, min(self.next_turn - self.world.now, self.timing.ttl / 2)))

    def _find_place(self, own: Keyed[MemberRecord]) -> None:
        before = sum(1 for keyed in self.view.members.values() if keyed.create_revision < own.create_revision)
        if before == 0 and self.place:
            self.say("coordinates")
        self.place = before

    def _blind(self) -> None:
        if self.rules.blind_after_outage:
            self.memory = self.memory.blinded_until(self.world.now + self.timing.ttl)

    def _obey(self) -> None:
        view = self.view
        generation = view.generation.record if view.generation else None
        proposal = view.proposal.record if view.proposal else None
        if generation and self.id.incarnation in generation.without and not self.leaving:
            self.later("main", 0.2 * self.rng.random(), self._ask_to_leave)
        local = Local(id=self.id, running=self.running, floor=proposal.number if proposal else 0, stopped=self.stopped)
        directive = self.rules.react(generation, proposal, local, over=view.over)
        if isinstance(directive, Start):
            self._assign(directive.number)
        elif isinstance(directive, Report):
            self.stopped, self.dirty = max(self.stopped, directive.number), True
        elif isinstance(directive, Leave):
            self.over = True
            if self.workers is None:
                self.later("main", 0.02, self._conclude)
        self._direct(directive)

    def _direct(self, directive: Any) -> None:
        if directive == self.directive:
            return
        self.directive = directive
        if isinstance(directive, Stop | Leave):
            if self.assignment is not None:
                self.assignment = None
                self.running = None
                self._rest(0.0)
            elif self.workers is not None:
                self.later("main", 0.02 * self.rng.random(), self._main_stop, self.workers.number, directive.mode)

    def _assign(self, number: int) -> None:
        """One more look, right now; what is handed out is good for one TTL (PROTOCOL 14)."""
        looked_at = self.world.now
        if self.rules.look_before_start:
            self.view = self._look()
            self._rest(0.0)
            own = self.view.members.get(self.node.name)
            held = own and own.record.id == self.id and own.lease == self.lease
        else:
            looked_at, held = float("inf"), True
        active = self.view.active
        if active is None or active.number != number or self.view.pending or not held or self.running is not None or self.leaving:
            return
        self.running = number
        self.assignment = (active, looked_at + self.timing.ttl)
        self.answered = {identity: self.world.now for identity in active.ids if identity != self.id}
        delay = self._think() if self.slow_until > self.world.now else self.rng.choice((0.01, 0.05, 0.3)) * self.rng.random()
        self.later("main", delay, self._start_workers, self.assignment)

    def _write(self) -> None:
        own = self.view.members.get(self.node.name)
        if not self.dirty or own is None or self.lease is None:
            return
        try:
            written = self._send(transitions.report(KEYS, self.record(), own.mod_revision, self.lease))
        except (AwayError, NoLeaseError):
            self.dirty = True
            raise
        self.dirty = not written
        if not written:
            self._rest(0.01)

    # --- coordinating

    def _turn(self) -> None:
        now = self.world.now
        second = self.second_until > now
        coordinator = self.place == 0 or second
        whole = coordinator
        if not coordinator and self.place == 1 and self.rules.deputy and now - self.looked_at >= LOOK_EVERY / 2:
            self.looked_at, whole = now, True
        self.next_turn = float("inf")
        if not whole:
            return
        self.memory = self.rules.observe(self.memory, self.seen, self.view, now, self.timing)
        self.seen = self.view
        if self.view.revision < self.written:
            self._rest(0.02)
            return
        decision = self.rules.plan(self.view, now, self.memory, self.timing)
        if not coordinator and not self._may_stand_in(decision):
            return
        if isinstance(decision, Wait):
            self.next_turn = decision.until if decision.until is not None else float("inf")
            return
        if not self._send(self._txn(decision)):
            self.say(f"was too late with {type(decision).__name__.lower()}")
        self._rest(0.01)

    def _txn(self, decision: Any) -> Txn:
        if isinstance(decision, Propose):
            return transitions.propose(KEYS, self.view, decision, self.id)
        if isinstance(decision, Activate):
            return self.rules.activate(KEYS, self.view, decision, self.id, frozen_max=self.timing.frozen_max, at=0.0)
        if isinstance(decision, Drain):
            return transitions.drain(KEYS, self.view)
        if isinstance(decision, Judge):
            return self.rules.judge(KEYS, self.view, *self.world.judge(self.view))
        return transitions.end(KEYS, self.view, decision, at=0.0)

    def _may_stand_in(self, decision: Decision) -> bool:
        now = self.world.now
        if isinstance(decision, Wait):
            self.undone = None
            return False
        if self.undone != decision:
            self.undone, self.undone_since = decision, now
            return False
        if now - self.undone_since < STAND_IN_AFTER:
            return False
        self.say("stands in for the coordinator")
        self.undone = None
        return True

    # --- losing and regaining etcd

    def _outage(self) -> None:
        now = self.world.now
        if self.outage_since is None:
            self.outage_since = now
            self.say("has lost etcd")
        if self.running is None or not self.rules.frozen_stop:
            return
        for identity in self.answered:
            peer = self.world.agent_of(identity)
            if peer and peer.running == self.running and self.world.reach(self.node, peer.node):
                self.answered[identity] = now
        frozen = now - self.last_renewed
        longest = self.view.active.frozen_max if self.view.active else self.timing.frozen_max
        silent = any(now - answered > SILENT_AFTER for answered in self.answered.values())
        if frozen > longest or (frozen > self.timing.ttl and silent):
            self._direct(Stop(number=self.running, mode=Mode.KILL, why="without etcd"))

    def _recover(self) -> None:
        """Etcd answers, and the own key or its lease is gone (PROTOCOL 4)."""
        self.looked = self.view = view = self._look()
        own = view.members.get(self.node.name)
        if own and own.record.id == self.id and not self.lease_gone and self.lease in self.store.leases:
            self.dirty = True
            self._write()
            self._rest(0.01)
            return
        self._blind()
        held = self.store.items.get(KEYS.member(self.node.name))
        self.registering = True
        if held is None and self._may_take_up_again(view):
            self.later("loop", self._think(), self._take_up_again, view)
            return
        self._start_anew(held.mod_revision if held else 0)

    def _start_anew(self, held: int) -> None:
        self.registering = False
        if self.running is not None:
            self._direct(Stop(number=self.running, mode=Mode.KILL, why="this node's lease ended"))
            self._rest(RETRY)
            return
        self.registering = True
        keyed = self._fetch()
        if held and keyed and keyed.record.boot_id != self._boot():
            self.exit("refused")
        elif held:
            self.later("loop", self._think(), self._remove_predecessor, held)
        else:
            self.later("loop", self._think(), self._take)

    def _may_take_up_again(self, view: View) -> bool:
        if not self.rules.reattach or view.active is None or view.pending or self.id not in view.active.ids:
            return False
        outcome = self.outcome
        finished = bool(outcome and outcome.generation == view.number and outcome.result is Result.FINISHED)
        return self.running == view.number or finished

    def _take_up_again(self, view: View) -> None:
        if self.lease is None or self.lease_gone or self.lease not in self.store.leases:
            self._reach()
            self.lease, self.lease_gone = self.store.grant(self.timing.ttl), False
            self.last_renewed = self.world.now
        assert view.generation
        if self._send(transitions.reattach(KEYS, self.record(), self.lease, view.generation, view.proposal)):
            self.say("takes its key up again")
            self.registering = False
            self._rest(0.01)
            return
        self._start_anew(0)

    def peer_died(self, identity: MemberId) -> None:
        """Refused twice: its key goes, unless somebody changed it (PROTOCOL 17)."""
        if self.registering or not self.registered or self.lease_gone:
            return
        self._reach()
        keyed = self.store.view().members.get(identity.node)
        if keyed and keyed.record.id == identity:
            self.later("loop", self._think(), self._evict, identity, keyed.mod_revision)

    def _evict(self, identity: MemberId, mod_revision: int) -> None:
        if self._send(transitions.remove_member(KEYS, identity.node, mod_revision)):
            self.say(f"removes {identity}, which is dead")

    # --- the main thread and its workers

    def _start_workers(self, assignment: tuple[GenerationRecord, float]) -> None:
        if self.assignment is not assignment or self.leave_asked:
            return
        self.assignment = None
        generation, fresh_until = assignment
        if self.world.now >= fresh_until:
            self.running = None
            self._rest(0.0)
            return
        number = generation.number
        self.world.check.starts(self.node.name, number)
        self.say(f"starts the workers of generation {number}")
        self.workers = Workers(number, self.world.now)
        self.begun = number
        resume = generation.resume
        here = resume is None or any(ref.digest == resume.digest for ref in self.snapshots)
        self.later("main", 0.05 * self.rng.random() if here else self.rng.uniform(0.1, 1.5), self._restore, generation)
        if self.id == generation.ids[0]:
            self.later("persist", self.rng.uniform(1.0, 4.0), self._persist, number)

    # --- states

    def _restore(self, generation: GenerationRecord) -> None:
        """The state that the record names, from wherever it is; no other will do (PROTOCOL 22)."""
        workers, resume = self.workers, generation.resume
        if workers is None or workers.number != generation.number or workers.stopping:
            return
        digest = resume.digest if resume else "init"
        if self.node.blind_until > self.world.now or (resume and not self._obtain(resume)):
            if self.rules.begins_as_told or not self.snapshots:
                self.workers_fail(generation.number, f"the state {digest} cannot be had")
                return
            digest = self.snapshots[-1].digest
        self.keep(SnapshotRef(generation=generation.number, step=resume.step if resume else 0, digest=digest))
        self.world.runs[generation.number].restored[self.id] = digest
        self.world.workers_start(self, generation.number)

    def _obtain(self, resume: ResumePoint) -> bool:
        if self._read(resume.digest):
            return True
        known = self.view.checkpoint.record if self.view.checkpoint else None
        if known and known.shared and known.digest == resume.digest:
            if resume.digest in self.world.storage:
                return True
            self.unreadable.add(resume.digest)
        holders = [self.world.nodes[name].agent for name in resume.holders if name != self.node.name]
        return any(agent and self.world.reach(self.node, agent.node) and agent.give(resume.digest) for agent in holders)

    def _read(self, digest: str) -> bool:
        """Memory, then disk; what is damaged there is found out when it is read."""
        if any(ref.digest == digest for ref in self.snapshots):
            return True
        if digest in self.node.rotten and digest in self.node.disk:
            del self.node.disk[digest]
            self.say(f"finds {digest} damaged on its disk")
            self._rest(0.01)
        return digest in self.node.disk

    def look_again(self) -> None:
        """A standby looks at its disk now and then."""
        self._rest(0.0)

    def give(self, digest: str) -> bool:
        """Serve it to another node, if it is here after all."""
        return not self.dead and self._read(digest)

    def _write_disk(self, ref: SnapshotRef, first: MemberId) -> None:
        """Write it, take away what is old and not committed, and tell rank 0's agent."""
        if self.node.blind_until > self.world.now:
            return
        if self.world.shared:
            self.world.storage[ref.digest] = ref
        else:
            self.node.disk[ref.digest] = ref
            self.node.rotten.discard(ref.digest)
            self._tidy()
        agent = self.world.agent_of(first)
        if agent and self.world.reach(self.node, agent.node):
            agent.hear_holds(ref, self.node.name)

    def _tidy(self) -> None:
        known = self.view.checkpoint.record if self.view.checkpoint else None
        newest = sorted(self.node.disk.values(), key=lambda ref: ref.order)[-3:]
        self.node.disk = {ref.digest: ref for ref in self.node.disk.values() if ref in newest or (known and ref.digest == known.digest)}

    def hear_holds(self, ref: SnapshotRef, node: str) -> None:
        """A node has written it; with enough of them it is committed (PROTOCOL 24)."""
        if ref.generation != self.begun:
            return
        run = self.world.runs[ref.generation]
        holders = self.holders.setdefault(ref.digest, set())
        holders.add(node)
        wanted = 1 if self.world.shared or not self.rules.two_disks else min(2, len(run.record.members))
        if len(holders) >= wanted:
            del self.holders[ref.digest]
            self.later("persist", self._think(), self._commit_look, ref, tuple(sorted(holders)))

    def _main_stop(self, number: int, mode: Mode) -> None:
        workers = self.workers
        if workers is None or workers.number != number:
            return
        if workers.stopping is mode or workers.stopping is Mode.KILL:
            return
        workers.stopping = mode
        luck = self.rng.random()
        workers.orderly = mode is Mode.AGREED_STOP and luck < 0.9
        takes = (0.2 * luck if luck < 0.9 else KILL_GRACE) if mode is Mode.KILL else luck if luck < 0.9 else STOP_GRACE
        if self.world.now + takes < workers.ends_at:
            workers.ends_at = self.world.now + takes
            self.later("main", takes, self._workers_ended, number)

    def _workers_ended(self, number: int) -> None:
        workers = self.workers
        if workers is None or workers.number != number or self.world.now < workers.ends_at - 1e-6:
            return
        orderly = workers.stopping is Mode.AGREED_STOP and workers.orderly
        if workers.writing:
            return
        if self.rules.keeps_last and workers.stopping is Mode.AGREED_STOP and self._none_follows():
            workers.writing = True
            self.world.workers_end(self.id, number, orderly=orderly)
            self._write_last(self.world.runs[number].record, self._reported_last)
            return
        looks = workers.stopping is Mode.KILL and not self.over and self.rules.killed_early_looks
        staying = self.directive.staying if isinstance(self.directive, Stop) else None
        self._report(None, self._broken_links(workers, staying) if looks else (), orderly=orderly)

    def _none_follows(self) -> bool:
        staying = self.directive.staying if isinstance(self.directive, Stop) else None
        return staying is not None and len(staying) < self.world.target.min_nodes

    def _reported_last(self) -> None:
        if self.workers and self.workers.writing:
            self._report(None)

    def _report(self, outcome: Outcome | None, broken: tuple[str, ...] = (), *, orderly: bool = False) -> None:
        assert self.workers
        number, self.workers = self.workers.number, None
        finished = outcome is not None and outcome.result is Result.FINISHED
        self.world.workers_end(self.id, number, returned=finished, orderly=orderly)
        self.say(f"has stopped generation {number}" + (f": {outcome.result.value}" if outcome else ""))
        self.running = None
        self.stopped = max(self.stopped, number)
        self.outcome = outcome or self.outcome
        self.unreachable = broken
        self.dirty = True
        self.port = self._port()
        self._rest(0.01)
        if self.over or self.leave_asked:
            self.later("main", 0.02, self._conclude)

    def workers_fail(self, number: int, why: str) -> None:
        """A worker ends by itself, and not well."""
        workers = self.workers
        if workers is None or workers.number != number or workers.stopping:
            return
        if isinstance(self.directive, Leave) or (isinstance(self.directive, Stop) and self.directive.number == number):
            self._main_stop(number, self.directive.mode)
            return
        self.world.failures += 1
        self.say(f"a worker of generation {number} fails: {why}")
        self._report(Outcome(generation=number, result=Result.FAILED, detail=why), self._broken_links(workers))

    def _broken_links(self, workers: Workers, staying: Collection[MemberId] | None = None) -> tuple[str, ...]:
        """Whom this node cannot reach, if the generation did not last: why it failed may be there (PROTOCOL 16)."""
        if self.world.now - workers.started_at > self.timing.ready_timeout or not self.rules.name_unreachable:
            return ()
        found = []
        for identity in self.world.runs[workers.number].record.ids:
            peer = self.world.agent_of(identity)
            if identity != self.id and (staying is None or identity in staying) and (peer is None or not self.world.reach(self.node, peer.node)):
                found.append(identity.incarnation)
        return tuple(found)

    def formation_check(self, number: int) -> None:
        run = self.world.runs[number]
        if not run.began and not run.over:
            self.workers_fail(number, "the others cannot be reached")

    def workers_return(self, number: int) -> None:
        """Every worker returned 0."""
        if self.workers and self.workers.number == number and not self.workers.stopping:
            self._report(Outcome(generation=number, result=Result.FINISHED))

    # --- checkpoints

    def _persist(self, number: int) -> None:
        run = self.world.runs[number]
        if run.began and self.snapshots:
            ref = self.world.snapshot(run, run.reached if run.reached is not None else self.world.step_of(run))
            others = [identity for identity in run.record.ids if identity != self.id]
            for identity in (self.id, *([] if self.world.shared else self.rng.sample(others, min(2, len(others))))):
                agent = self.world.agent_of(identity)
                if agent:
                    agent.later("persist", self.rng.choice((0.1, 0.3, 1.0)), agent._write_disk, ref, self.id)
        if self.running == number:
            self.later("persist", self.rng.uniform(2.0, 5.0), self._persist, number)

    def _commit_look(self, ref: SnapshotRef, holders: tuple[str, ...]) -> None:
        if self.node.cut or not self.store.up:
            return
        self.later("persist", self._think(), self._commit, ref, holders, self._look())

    def _commit(self, ref: SnapshotRef, holders: tuple[str, ...], view: View) -> None:
        if self.node.cut or not self.store.up:
            return
        shared = self.world.shared
        named = () if shared else holders
        record = CheckpointRecord(scope=KEYS.scope, generation=ref.generation, step=ref.step, digest=ref.digest, holders=named, shared=shared)
        try:
            txn = self.rules.commit(KEYS, view, record)
        except ValueError:
            return
        self.store.txn(txn)

    # --- the end

    def leave(self) -> None:
        """SIGTERM."""
        if self.leave_asked:
            return
        self.say("is asked to leave")
        self.leave_asked = True
        self.later("main", 0.01, self._ask_to_leave)
        self.later("main", LEAVE_TIMEOUT, self._leave_by_force, 1)

    def _ask_to_leave(self) -> None:
        self.leaving, self.dirty = True, True
        self._rest(0.01)
        if not self.rules.leaver_stays:
            if self.workers:
                self._main_stop(self.workers.number, Mode.AGREED_STOP)
            else:
                self._conclude()

    def _leave_by_force(self, times: int) -> None:
        """The others did not agree on a stop in time."""
        self.world.trouble = True
        if self.workers and times == 1:
            self._main_stop(self.workers.number, Mode.KILL)
            self.later("main", LEAVE_TIMEOUT, self._leave_by_force, 2)
        elif self.workers is None:
            self.exit("left")

    def _leave_if_done(self) -> None:
        """Nobody needs this leaver any more (PROTOCOL 18)."""
        view = self.view
        if not self.leaving or self.workers is not None or (self.keeping and not self.kept):
            return
        own = view.present.get(self.id)
        counted_on = (own and not own.record.leaving) or (view.pending and self.id in view.pending.record.members)
        if counted_on and self.rules.leaver_waits_for_proposal:
            return
        if view.active is None or self.id not in view.active.ids:
            if view.active and self.rules.leaver_gives and self._owes(view.active):
                self._rest(0.2)
                return
            self.world.left.add(self.id)
            self.exit("left")
            return
        short = view.pending and view.target and len(view.pending.record.members) < view.target.record.min_nodes
        if view.pending and short and (view.active.drained or (view.pending.record.cause.kind is CauseKind.LOSS and not self.dirty)):
            if self.rules.keeps_last and not self.kept:
                self.keeping = True
                self.later("main", self._think(), self._keep_last)
                return
            self.exit("left")

    def _keep_last(self) -> None:
        """No generation follows: what its memory holds is written first, as the active generation's (PROTOCOL 29)."""
        view = None if self.node.cut or not self.store.up else self._look()
        active = view.active if view else None
        if view is None or active is None or self.id not in active.ids:
            self._has_kept()
            return
        if self.begun == active.number:
            self._write_last(active, self._has_kept)
            return
        resume, known = active.resume, view.checkpoint.record if view.checkpoint else None
        if resume is None or (known and known.digest == resume.digest):
            self._has_kept()
            return
        self.begun = active.number
        here = any(ref.digest == resume.digest for ref in self.snapshots)
        self.later("main", 0.05 * self.rng.random() if here else self.rng.uniform(0.1, 1.5), self._begin_last, active, resume)

    def _begin_last(self, active: GenerationRecord, resume: ResumePoint) -> None:
        if self.node.blind_until <= self.world.now and self._obtain(resume):
            self.keep(SnapshotRef(generation=active.number, step=resume.step, digest=resume.digest))
            self._write_last(active, self._has_kept, last_rank(active, self.node.name, copies=COPIES, shared=self.world.shared))
            return
        self._has_kept()

    def _write_last(self, generation: GenerationRecord, then: Callable[[], None], rank: int | None = None) -> None:
        """Have the newest state written; who commits waits for that."""
        rank = generation.ids.index(self.id) if rank is None else rank
        ref = max(self.snapshots, key=lambda ref: ref.order, default=None)
        if ref is None or ref.generation != generation.number or not writes(rank, copies=COPIES, shared=self.world.shared):
            self.later("main", 0.01, then)
            return
        took = self.rng.choice((0.1, 0.3, 1.0))
        self.later("persist", took, self._write_disk, ref, self.id if rank == 0 else generation.ids[0])
        self.later("main", took + 0.01, self._last_written, ref, self.world.now + KEEP_WITHIN if rank == 0 else 0.0, then)

    def _last_written(self, ref: SnapshotRef, until: float, then: Callable[[], None]) -> None:
        known = self.store.view().checkpoint
        if self.world.now < until and (known is None or known.record.order < ref.order):
            self.later("main", 0.2, self._last_written, ref, until, then)
            return
        then()

    def _has_kept(self) -> None:
        self.kept = True
        self._rest(0.01)

    def _owes(self, generation: GenerationRecord) -> bool:
        """Whether a member has yet to get the state that this leaver can give (PROTOCOL 18)."""
        resume, run = generation.resume, self.world.runs[generation.number]
        if resume is None or self.node.name not in resume.holders:
            return False
        return any(identity.node not in resume.holders and identity not in run.restored for identity in generation.ids)

    def _conclude(self) -> None:
        if self.workers is None and self.over:
            self.exit("over")
        elif self.workers is None and self.leave_asked and not self.rules.leaver_stays:
            self.world.left.add(self.id)
            self.exit("left")

    def exit(self, why: str) -> None:
        """The process ends in order: its key goes with its lease."""
        if self.dead:
            return
        self.say(f"exits: {why}")
        self._gone(why)
        if self.lease is not None and not self.node.cut and self.store.up:
            self.store.revoke(self.lease)

    def crash(self, *, quietly: bool = False) -> None:
        """The process is no more, and its workers with it. A machine that lost its power refuses nobody's call: it is silent."""
        self.say("dies" + (" with its machine" if quietly else ""))
        self.world.trouble = True
        identity = self.id
        self._gone("crash")
        if quietly:
            return
        for agent in list(self.world.agents.values()):
            if identity in agent.answered and agent.running is not None and self.world.reach(agent.node, self.node):
                agent.later("loop", agent.rng.uniform(0.05, 0.4), agent.peer_died, identity)

    def _gone(self, why: str) -> None:
        self.dead = True
        self.world.agents.pop(self.id, None)
        self.node.agent, self.node.exited = None, why
        if self.workers:
            self.world.workers_end(self.id, self.workers.number)
            self.workers = None
