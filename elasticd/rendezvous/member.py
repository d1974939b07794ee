"""One agent's membership of one job: the thread that keeps its key, sees the others, and does what `membership` decides.

Owns: the lease, the member key, the watch, the coordinator's work when it falls to this member. Must not: decide (that is `membership`), lay out
transactions (`transitions`), or touch workers: it tells the agent's main thread through `directive` and `next_assignment`, and hears from it
through `report_stopped` and `leave`.

One round of the loop: take in what the watch brought, look again at etcd when it is time, tell the main thread what to do, write the own key if
it changed, and coordinate if this member is the one (lowest create revision) or its deputy and nothing moves (PROTOCOL 8). Members that do not
coordinate read and watch five keys whatever the size of the job.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from elasticd.errors import ElasticdError, KVClosedError, KVError, KVUnavailableError, LeaseLostError, RefusedError, WaitTimeoutError
from elasticd.kv import EtcdKV, EventKind, KeyValue, KVConfig, Lease, Watch, WatchBatch, WatchEvent, WatchRange
from elasticd.rendezvous import transitions
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.membership import (
    Activate,
    Decision,
    Directive,
    End,
    Leave,
    Local,
    Memory,
    Propose,
    Report,
    Start,
    Stay,
    Stop,
    Timing,
    Wait,
    observe,
    plan,
    react,
)
from elasticd.rendezvous.nodelock import NodeLock, boot_id, default_state_dir
from elasticd.rendezvous.peers import PeerMonitor, bind, neighbours
from elasticd.rendezvous.records import GenerationRecord, GenerationState, MemberId, MemberRecord, Mode, Outcome, Record, TargetRecord
from elasticd.rendezvous.view import Keyed, Ledger, View

log = structlog.get_logger("elasticd.rendezvous")

LOOK_EVERY: Final = 15.0
"""Seconds between looks at etcd when the watch brings nothing: the watch is a hint, the list is the truth."""
RETRY_EVERY: Final = 0.5
"""Seconds between rounds while etcd is out of reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What an agent brings to a job.

    Attributes:
        address: where peers reach this agent; its sockets are bound there.
        slots: workers it runs.
        kv: how to reach etcd.
        min_nodes, max_nodes, desired, max_restarts: the job's size, written if nobody has written one.
        probe_port: fixed port for echoes, 0 for a free one.
        state_dir: where the node lock lives.
        reopen: start a job again that has ended.
    """

    keys: JobKeys
    node: str
    address: str
    slots: int
    kv: KVConfig
    min_nodes: int
    max_nodes: int
    desired: int
    max_restarts: int = 10
    timing: Timing = field(default_factory=Timing)
    probe_port: int = 0
    state_dir: Path = field(default_factory=default_state_dir)
    reopen: bool = False

    def target(self) -> TargetRecord:
        """The size to write when there is none."""
        return TargetRecord(
            scope=self.keys.scope,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            desired=self.desired,
            max_restarts=self.max_restarts,
        )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A generation that this member is to train in.

    Attributes:
        node_rank: this member's place among the nodes.
        base_rank: global rank of its first worker.
        store_socket: the listening socket for the TCPStore, if this member serves it (node_rank 0); the taker owns it.
        fresh_until: CLOCK_BOOTTIME seconds after which the look at etcd that allowed it is too old to start by (PROTOCOL 14).
    """

    generation: GenerationRecord
    node_rank: int
    base_rank: int
    store_socket: socket.socket | None
    fresh_until: float


def boottime() -> float:
    """Seconds on the clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Member:
    """See the module. All methods may be called from any thread; `start` connects and registers, and raises what goes wrong in that."""

    def __init__(self, config: MemberConfig) -> None:
        self._config = config
        self._keys = config.keys
        self._timing = config.timing
        self._kv: EtcdKV | None = None
        self._lease: Lease | None = None
        self._watch: Watch | None = None
        self._lock: NodeLock | None = None
        self._peers: PeerMonitor | None = None
        self._store_socket: socket.socket | None = None
        self._ledger = Ledger(self._keys)
        self._view = View(revision=0)
        self._memory = Memory()
        self._me = MemberId(node=config.node, incarnation=secrets.token_hex(8))
        self._predecessor: str | None = None
        self._coordinator = False
        self._deputy = False
        self._stood_in_for: Decision | None = None
        self._stood_in_at = 0.0
        self._looked_at = 0.0
        self._listed_revision = 0
        self._expect_revision = 0
        self._next_decision = float("inf")
        self._outage_since: float | None = None
        self._why = ""
        self._said = ""

        self._batches: deque[WatchBatch] = deque()
        self._dead: deque[MemberId] = deque()
        self._wake = threading.Event()
        self._ticked_at = time.monotonic()
        self._missed_ticks = 0
        self._closing = False
        self._started = False
        self._thread = threading.Thread(target=self._run, name="elasticd-member", daemon=True)

        # Shared with the main thread, under this condition.
        self._changed = threading.Condition()
        self._running: int | None = None
        self._stopped = 0
        self._outcome: Outcome | None = None
        self._unreachable: tuple[str, ...] = ()
        self._leaving = False
        self._dirty = False
        self._lost_identity = False
        self._directive: Directive = Stay(why="starting")
        self._assignment: Assignment | None = None
        self._over: GenerationRecord | None = None
        self._fatal: ElasticdError | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # --- the main thread's side ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach etcd, take the node's lock and bind the sockets; nothing is written yet.

        Raises:
            KVError: etcd cannot be reached or refuses us.
            RefusedError: another agent on this machine serves this node.
            UsageError: an address, port, file or name cannot be used.
        """
        config = self._config
        try:
            self._keys.member(config.node)
            self._kv = EtcdKV(config.kv)
            self._kv.check(self._keys.prefix)
            self._lock = NodeLock(config.state_dir, self._keys.cluster, self._keys.job, config.node)
            self._peers = PeerMonitor(bind(config.address, config.probe_port), self._peer_died)
            self._peers.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Register, and begin. To be called after `connect`, when workers could be started at once.

        Raises:
            KVError: as `connect`.
            RefusedError: the job has ended, or another machine or boot serves this node.
        """
        try:
            self._open_job()
            self._register_first()
        except BaseException:
            self.close()
            raise
        self._turned()
        self._started = True
        self._thread.start()

    def next_assignment(self, timeout: float | None = None, give_up: Callable[[], bool] | None = None) -> Assignment | None:
        """Wait for a generation that holds this member.

        Args:
            timeout: seconds to wait at most.
            give_up: asked a few times a second; once it says True, the answer is None.

        Returns:
            An assignment fresh enough to start workers by. From then on this member counts as running it.

        Raises:
            RefusedError: the job has ended; `ended` tells how.
            WaitTimeoutError: `timeout` seconds have passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_if_done()
                if give_up is not None and give_up():
                    return None
                assignment = self._assignment
                if assignment is not None:
                    self._assignment = None
                    if boottime() < assignment.fresh_until:
                        return assignment
                    self._give_back(assignment)
                left = 3600.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    msg = f"job {self._keys.job!r}: no generation formed within {timeout:g} s ({self._why or 'waiting for the coordinator'})"
                    raise WaitTimeoutError(msg, remedy="see that enough nodes have started, with the same job name and etcd")
                self._changed.wait(left if give_up is None else min(left, 0.2))

    def _raise_if_done(self) -> None:
        if self._fatal:
            raise self._fatal
        if self._over:
            msg = f"job {self._keys.job!r} has ended ({self._over.state.value}: {self._over.reason})"
            raise RefusedError(msg)

    def _give_back(self, assignment: Assignment) -> None:
        """An assignment that came too late, as after a pause: as if it had never been handed out."""
        self._running = None
        if assignment.store_socket is not None:
            self._store_socket = assignment.store_socket
        self._wake.set()

    @property
    def directive(self) -> Directive:
        """What the agent is to do about its workers now."""
        with self._changed:
            return self._directive

    @property
    def ended(self) -> GenerationRecord | None:
        """How the job ended, once it has."""
        with self._changed:
            return self._over

    @property
    def wake_fd(self) -> int:
        """Readable when `directive` changed; to be drained by `drain_wake`."""
        return self._wake_read

    def drain_wake(self) -> None:
        """Forget earlier wake-ups."""
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    @property
    def id(self) -> MemberId:
        """Who this member is now; a lost lease makes it somebody else."""
        return self._me

    @property
    def why(self) -> str:
        """What the job waits for, in one line, as far as this member knows."""
        return self._why

    def report_stopped(self, generation: int, outcome: Outcome | None = None, unreachable: Sequence[str] = ()) -> None:
        """The workers of `generation` are stopped for good; `outcome` if they ended by themselves."""
        with self._changed:
            self._running = None
            self._stopped = max(self._stopped, generation)
            self._outcome = outcome or self._outcome
            self._unreachable = tuple(unreachable)
            self._dirty = True
        self._say_answer()
        self._wake.set()

    def ask_to_leave(self) -> None:
        """Ask to be left out. The workers go on until `directive` says Stop; then `wait_left` (PROTOCOL 18)."""
        with self._changed:
            self._leaving = True
            self._dirty = True
        self._wake.set()

    def wait_left(self, timeout: float) -> bool:
        """Wait until nobody needs this leaver any more; False after `timeout` seconds. Its workers must have been reported stopped."""
        with self._changed:
            return self._changed.wait_for(self._may_go, timeout)

    def _may_go(self) -> bool:
        """Whether nobody needs this leaver any more (PROTOCOL 18)."""
        if self._over or self._fatal:
            return True
        view = self._view
        if view.active is None or self._me not in view.active.ids:
            return True
        short = view.pending and view.target and len(view.pending.record.members) < view.target.record.min_nodes
        return bool(short) and not self._dirty

    def close(self) -> None:
        """Take the own key away if that is still possible, and end every thread and connection. May be called again."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._watch:
            self._watch.close()
        if self._lease:
            self._lease.revoke()  # takes the key with it
        for part in (self._peers, self._store_socket, self._kv, self._lock):
            if part is not None:
                part.close()
        self._watch = self._lease = self._peers = self._store_socket = self._kv = self._lock = None

    # --- registering -----------------------------------------------------------------------------------------------------

    @property
    def _etcd(self) -> EtcdKV:
        assert self._kv is not None
        return self._kv

    def _open_job(self) -> None:
        """Write the job's size if nobody has; refuse a job that has ended unless it is to be opened again."""
        self._send(transitions.create_target(self._keys, self._config.target()))
        self._load_narrow()
        view = self._ledger.view()
        if not view.over:
            return
        assert view.generation is not None
        if not self._config.reopen:
            record = view.generation.record
            msg = f"job {self._keys.job!r} has ended ({record.state.value} at generation {record.number}: {record.reason})"
            raise RefusedError(msg, remedy="give another job name, or ask to start this one again")
        seen = self._etcd.get(self._keys.target)
        self._send(transitions.write_target(self._keys, seen, self._config.target()))
        self._load_narrow()

    def _register_first(self) -> None:
        """Create the member key; a dead predecessor's on this boot is taken away, any other is waited for."""
        deadline = time.monotonic() + self._timing.ttl + 10.0
        key = self._keys.member(self._config.node)
        warned = False
        while not self._register():
            held = self._etcd.get(key)
            if held is None:
                continue
            ledger = Ledger(self._keys)
            ledger.apply(_as_batch(held))
            keyed = ledger.view().members.get(self._config.node)
            if keyed and keyed.record.boot_id == boot_id():
                log.info("predecessor_removed", key=key, incarnation=keyed.record.id.incarnation)
                self._send(transitions.remove_member(self._keys, self._config.node, held.mod_revision))
                continue
            if time.monotonic() > deadline:
                msg = f"node {self._config.node!r} of job {self._keys.job!r} is served from another machine or boot"
                raise RefusedError(msg, remedy="give this node another name, or stop the other agent")
            if not warned:
                log.warning("node_name_taken", node=self._config.node, waiting_for="its lease to end")
                warned = True
            time.sleep(0.2)

    def _register(self) -> bool:
        """One try at a new lease and a new key under a new incarnation. False if the key exists."""
        self._fresh_lease()
        if self._store_socket is None:
            self._store_socket = bind(self._config.address)
        self._me = MemberId(node=self._config.node, incarnation=secrets.token_hex(8))
        self._load_narrow()
        with self._changed:
            self._stopped = max(self._stopped, self._ledger.view().number)
            self._outcome = None
            self._dirty = False
        record = self._record()
        assert self._lease is not None
        if not self._send(transitions.register(self._keys, record, self._lease.id)):
            return False
        self._say_answer()
        self._find_place()
        log.info("registered", member=str(self._me), coordinator=self._coordinator)
        return True

    def _fresh_lease(self) -> None:
        if self._lease is not None and not self._lease.lost:
            return
        if self._lease is not None:
            self._lease.stop()
        self._lease = self._etcd.lease(self._timing.ttl)
        self._lease.start(self._may_renew, self._wake.set)

    def _may_renew(self) -> bool:
        """Renew only while the loop turns (PROTOCOL 6); asked by the keepalive thread each TTL/3."""
        if not self._started:
            return not self._closing  # still registering, in the caller's thread
        still = time.monotonic() - self._ticked_at
        if still <= self._timing.ttl:
            self._missed_ticks = 0
            return True
        self._missed_ticks += 1
        log.error("loop_stuck", seconds=round(still, 1))
        # Twice, so that a process that was stopped and has just been continued gets a chance to turn once.
        if still > self._timing.frozen_max and self._missed_ticks > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def _record(self) -> MemberRecord:
        assert self._store_socket is not None
        assert self._peers is not None
        with self._changed:
            return MemberRecord(
                scope=self._keys.scope,
                id=self._me,
                address=self._config.address,
                slots=self._config.slots,
                boot_id=boot_id(),
                store_port=int(self._store_socket.getsockname()[1]),
                probe_port=self._peers.port,
                stopped=self._stopped,
                outcome=self._outcome,
                unreachable=self._unreachable,
                leaving=self._leaving,
            )

    def _send(self, txn: transitions.Txn) -> bool:
        """Do one transaction; whether its comparisons held."""
        self._turned()
        result = self._etcd.txn(txn.compares, txn.ops)
        if result.succeeded:
            self._expect_revision = max(self._expect_revision, result.revision)
        return result.succeeded

    # --- seeing ----------------------------------------------------------------------------------------------------------

    def _load_narrow(self) -> int:
        """Read the five keys that every member needs; the revision they were read at."""
        self._turned()
        keys = self._keys
        wanted = [keys.generation, keys.proposal, keys.target, keys.member(self._config.node)]
        if self._predecessor:
            wanted.append(self._predecessor)
        listing = self._etcd.get_many(wanted)
        self._ledger.load(listing)
        self._looked_at = time.monotonic()
        return listing.revision

    def _load(self) -> int:
        """Read what this member's place needs."""
        return self._load_all() if self._coordinator or self._deputy else self._load_narrow()

    def _load_all(self) -> int:
        self._turned()
        listing = self._etcd.list(self._keys.prefix)
        self._ledger.load(listing)
        self._looked_at = time.monotonic()
        self._listed_revision = listing.revision
        return listing.revision

    def _find_place(self) -> None:
        """Find out whether this member coordinates, and watch what its place needs."""
        own = self._etcd.get(self._keys.member(self._config.node))
        if own is None:
            return  # the next round finds the key gone
        before = self._etcd.list(self._keys.members, created_before=own.create_revision, newest_first=True, limit=2, keys_only=True).items
        was = self._coordinator
        self._coordinator = not before
        self._deputy = len(before) == 1
        self._predecessor = before[0].key if before else None
        self._stood_in_for = None
        revision = self._load()
        if self._coordinator and not was:
            log.info("coordinating", member=str(self._me))
        ranges = [WatchRange(key=self._keys.prefix, prefix=True)] if self._coordinator else self._narrow_ranges()
        if self._watch:
            self._watch.close()
        self._batches.clear()
        self._watch = self._etcd.watch(ranges, revision + 1, self._on_batch)

    def _narrow_ranges(self) -> list[WatchRange]:
        keys = self._keys
        wanted = [keys.generation, keys.proposal, keys.target, keys.member(self._config.node)]
        return [WatchRange(key=key) for key in (*wanted, self._predecessor) if key]

    def _on_batch(self, batch: WatchBatch) -> None:
        self._batches.append(batch)
        self._wake.set()

    def _peer_died(self, identity: MemberId) -> None:
        self._dead.append(identity)
        self._wake.set()

    # --- the loop --------------------------------------------------------------------------------------------------------

    def _turned(self) -> None:
        self._ticked_at = time.monotonic()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._until_next_round())
            self._wake.clear()
            self._turned()
            try:
                self._round()
            except KVClosedError:
                if not self._closing:
                    log.exception("etcd_client_closed")
                return
            except LeaseLostError:
                self._wake.set()
            except (KVUnavailableError, KVError) as error:
                self._outage(error)
            except RefusedError as error:
                self._fail(error)
            except Exception:  # the loop must outlive any fault of ours: a dead loop lets the lease go and ends the job here
                log.exception("round_failed")
                time.sleep(RETRY_EVERY)

    def _until_next_round(self) -> float:
        now = time.monotonic()
        if self._outage_since is not None:
            return RETRY_EVERY
        due = min(self._looked_at + LOOK_EVERY, now + self._timing.ttl / 2)
        return max(0.0, min(due, self._next_decision) - now)

    def _round(self) -> None:
        assert self._lease is not None
        if not self._lease.reachable:
            self._outage(None)
            return
        self._take_in()
        self._evict_dead()
        own = self._ledger.view().members.get(self._config.node)
        if self._lease.lost or own is None or own.record.id != self._me or own.lease != self._lease.id:
            self._recover_identity()
            return
        if self._outage_since is not None:
            self._outage_over()
        if self._predecessor and self._place_changed():
            self._find_place()
        elif time.monotonic() - self._looked_at >= LOOK_EVERY:
            self._load()
        self._note_view()
        self._obey()
        self._write_own()
        self._coordinate()

    def _take_in(self) -> None:
        while self._batches:
            self._ledger.apply(self._batches.popleft())

    def _place_changed(self) -> bool:
        """Whether the predecessor's key has gone."""
        view = self._ledger.view()
        return self._predecessor is not None and not any(self._keys.member(node) == self._predecessor for node in view.members)

    def _note_view(self) -> None:
        view = self._ledger.view()
        if view is not self._view:
            self._memory = observe(self._memory, self._view, view, time.monotonic(), self._timing)
            for key in view.problems.keys() - self._view.problems.keys():
                log.error("garbage_in_etcd", key=key, problem=view.problems[key])
            with self._changed:
                self._view = view
                self._changed.notify_all()

    # --- doing what was decided ------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Tell the main thread what the view means for its workers."""
        view = self._view
        generation = view.generation.record if view.generation else None
        proposal = view.proposal.record if view.proposal else None
        with self._changed:
            local = Local(id=self._me, running=self._running, floor=self._floor(), stopped=self._stopped)
        directive = react(generation, proposal, local, over=view.over)
        match directive:
            case Start(number=number):
                self._assign(number)
            case Report(number=number):
                with self._changed:
                    self._stopped = max(self._stopped, number)
                    self._dirty = True
            case Leave():
                with self._changed:
                    self._over = generation
            case _:
                pass
        self._direct(directive)

    def _floor(self) -> int:
        return self._view.proposal.record.number if self._view.proposal else 0

    def _direct(self, directive: Directive) -> None:
        with self._changed:
            if directive == self._directive:
                return
            self._directive = directive
            self._changed.notify_all()
        if isinstance(directive, Stop | Leave):
            log.info("directive", action=type(directive).__name__.lower(), mode=directive.mode.value, why=directive.why)
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # full of unread wake-ups: it is awake

    def _assign(self, number: int) -> None:
        """Hand out a generation after one more linearizable look at it and at the own key (PROTOCOL 14)."""
        looked = boottime()
        self._load()
        self._wake.set()  # whatever this look brought beyond the generation is for the next round
        view = self._ledger.view()
        generation, own = view.active, view.members.get(self._config.node)
        if generation is None or generation.number != number or view.pending or own is None or own.record.id != self._me:
            return
        rank = generation.ids.index(self._me)
        with self._changed:
            if self._running is not None or self._leaving:
                return
            self._running = number
            serves = rank == 0
            self._assignment = Assignment(
                generation=generation,
                node_rank=rank,
                base_rank=generation.base_rank(self._me),
                store_socket=self._store_socket if serves else None,
                fresh_until=looked + self._timing.ttl,
            )
            if serves:
                self._store_socket = None
            self._changed.notify_all()
        log.info(
            "generation_formed",
            number=number,
            nodes=len(generation.members),
            world_size=generation.world_size,
            cause=str(generation.cause),
            cause_kind=generation.cause.kind.value,
            formed_at=generation.formed_at,
            node_rank=rank,
            base_rank=generation.base_rank(self._me),
        )
        self._say_answer()
        if self._peers:
            self._peers.ask(neighbours(generation, self._me))

    def _say_answer(self) -> None:
        if self._peers:
            self._peers.answer_as(self._me, self._running)

    def _write_own(self) -> None:
        """Write the own key if something in it changed, or if somebody wrote garbage over it."""
        own = self._view.members.get(self._config.node)
        key = self._keys.member(self._config.node)
        damaged = self._view.damaged.get(key)
        with self._changed:
            dirty, self._dirty = self._dirty, False
        if (not dirty and damaged is None) or own is None or self._lease is None:
            return
        try:
            if self._store_socket is None:
                self._store_socket = bind(self._config.address)
            record = self._record()
            if not self._send(transitions.report(self._keys, record, damaged or own.mod_revision, self._lease.id)):
                self._again()
        except BaseException:
            with self._changed:
                self._dirty = True
            raise

    def _again(self) -> None:
        """Something else was written first: look at everything again and take another round."""
        with self._changed:
            self._dirty = True
        self._load()
        self._wake.set()

    def _evict_dead(self) -> None:
        """Take away the keys of peers proven dead (PROTOCOL 17)."""
        while self._dead:
            identity = self._dead.popleft()
            held = self._etcd.get(self._keys.member(identity.node))
            if held is None:
                continue
            ledger = Ledger(self._keys)
            ledger.apply(_as_batch(held))
            keyed = ledger.view().members.get(identity.node)
            if keyed and keyed.record.id == identity and self._send(transitions.remove_member(self._keys, identity.node, held.mod_revision)):
                log.warning("evicted_dead_peer", peer=str(identity))

    # --- coordinating ----------------------------------------------------------------------------------------------------

    def _coordinate(self) -> None:
        self._next_decision = float("inf")
        if not self._coordinator and not (self._deputy and self._view.revision == self._listed_revision):
            return  # a deputy's watch does not cover the other members: only a listing just made will do
        if self._view.revision < self._expect_revision:
            self._next_decision = time.monotonic() + 1.0  # the watch brings our own write in a moment
            if time.monotonic() - self._looked_at > 1.0:
                self._load_all()
                self._wake.set()
            return
        if self._coordinator and self._repair():
            return
        decision = plan(self._view, time.monotonic(), self._memory, self._timing)
        if not self._coordinator and not self._may_stand_in(decision):
            return
        self._say(decision)
        if isinstance(decision, Wait):
            self._next_decision = decision.until if decision.until is not None else float("inf")
            return
        if not self._send(self._as_txn(decision)):
            self._load_all()
        self._wake.set()

    def _as_txn(self, decision: Propose | Activate | End) -> transitions.Txn:
        if isinstance(decision, Propose):
            return transitions.propose(self._keys, self._view, decision, self._me)
        if isinstance(decision, Activate):
            return transitions.activate(
                self._keys, self._view, decision, self._me, frozen_max=self._timing.frozen_max, at=time.time()
            )
        assert self._view.generation is not None
        return transitions.end(self._keys, self._view.generation, decision, at=time.time())

    def _may_stand_in(self, decision: Decision) -> bool:
        """A deputy acts only on what it saw undone at two looks (PROTOCOL 8)."""
        if isinstance(decision, Wait):
            self._stood_in_for = None
            return False
        if self._stood_in_for == decision and time.monotonic() - self._stood_in_at > LOOK_EVERY / 2:
            log.warning("standing_in_for_coordinator", decision=type(decision).__name__.lower())
            self._stood_in_for = None
            return True
        if self._stood_in_for != decision:
            self._stood_in_for, self._stood_in_at = decision, time.monotonic()
        return False

    def _say(self, decision: Decision) -> None:
        text = decision.why if isinstance(decision, Wait) else ""
        match decision:
            case Propose():
                text = f"proposing {decision.number} ({decision.mode.value}): {decision.cause}"
            case Activate():
                text = f"activating {decision.proposal.number}"
            case End():
                text = f"ending: {decision.state.value}: {decision.reason}"
            case Wait():
                pass
        self._why = text
        if text != self._said:
            self._said = text
            log.info("decision", text=text)

    def _repair(self) -> bool:
        """Put right what somebody wrote over or removed: the job's own memory of it is the last good value."""
        view = self._view
        records: list[tuple[str, Keyed[Record] | None]] = [
            (self._keys.generation, view.generation),
            (self._keys.proposal, view.proposal),
            (self._keys.target, view.target),
        ]
        for key, keyed in records:
            seen = view.damaged.get(key)
            if seen is None:
                continue
            if keyed is not None:
                log.warning("repairing", key=key)
                self._send(transitions.repair(key, keyed.record, seen))
                self._wake.set()
                return True
            self._why = f"{key} holds garbage and this member never saw a good value: freezing membership"
            return True
        return False

    # --- losing and regaining etcd ---------------------------------------------------------------------------------------

    def _outage(self, error: KVError | None) -> None:
        """Etcd is out of reach: freeze membership, and stop the workers once staying might mean training apart (PROTOCOL 15)."""
        now = boottime()
        if self._outage_since is None:
            self._outage_since = now
            log.warning("etcd_unreachable", error=str(error) if error else "", action="membership frozen, workers go on")
        assert self._lease is not None
        self._why = "etcd is out of reach: membership frozen"
        running = self._running
        if running is None or self._peers is None:
            return
        frozen = now - self._lease.last_renewed
        silent = self._peers.silent(running)
        if frozen > self._timing.frozen_max:
            self._direct(Stop(number=running, mode=Mode.KILL, why=f"without etcd for {frozen:.0f} s"))
        elif frozen > self._timing.ttl and silent:
            names = ", ".join(identity.node for identity in silent)
            self._direct(Stop(number=running, mode=Mode.KILL, why=f"etcd and {names} are out of reach"))

    def _outage_over(self) -> None:
        assert self._outage_since is not None
        log.info("etcd_back", after=round(boottime() - self._outage_since, 1))
        self._outage_since = None
        self._memory = replace(self._memory, no_loss_before=time.monotonic() + self._timing.ttl)
        self._wake.set()

    def _recover_identity(self) -> None:
        """Etcd answers, and the own key is gone or the lease is: go on as before if nothing happened meanwhile, else start anew (PROTOCOL 4)."""
        assert self._lease is not None
        held = self._etcd.get(self._keys.member(self._config.node))
        self._load_narrow()
        own = self._ledger.view().members.get(self._config.node)
        if held and own and own.record.id == self._me and not self._lease.lost:
            self._wake.set()
            return
        self._memory = replace(self._memory, no_loss_before=time.monotonic() + self._timing.ttl)
        if held is None and self._reattach():
            return
        with self._changed:
            running = self._running
        if running is not None:
            self._direct(Stop(number=running, mode=Mode.KILL, why="this node's lease ended: it is no longer a member"))
            self._looked_at = time.monotonic()
            self._next_decision = time.monotonic() + 0.2
            return
        if held is not None and own is not None and own.record.boot_id != boot_id():
            msg = f"node {self._config.node!r} of job {self._keys.job!r} was taken over from another machine or boot"
            raise RefusedError(msg, remedy="give this node another name")
        if held is not None:
            self._send(transitions.remove_member(self._keys, self._config.node, held.mod_revision))
        self._ledger = Ledger(self._keys)
        self._predecessor = None
        if self._register():
            log.info("registered_again", member=str(self._me))
        self._wake.set()

    def _reattach(self) -> bool:
        """Take the own key up again under a new lease, if the generation that runs here is still the active one and nothing is pending."""
        view = self._ledger.view()
        with self._changed:
            running = self._running
        if view.generation is None or view.active is None or view.pending or running != view.number or self._me not in view.active.ids:
            return False
        self._fresh_lease()
        assert self._lease is not None
        if self._store_socket is None:
            self._store_socket = bind(self._config.address)
        if not self._send(transitions.reattach(self._keys, self._record(), self._lease.id, view.generation, view.proposal)):
            return False
        log.warning("reattached", member=str(self._me), generation=view.number)
        self._find_place()
        self._wake.set()
        return True

    def _fail(self, error: ElasticdError) -> None:
        log.error("membership_failed", error=str(error))
        with self._changed:
            self._fatal = error
            self._changed.notify_all()
        self._direct(Leave(mode=Mode.KILL, why=error.message))
        self._closing = True


def succeeded(generation: GenerationRecord | None) -> bool:
    """Whether the job ended by success."""
    return generation is not None and generation.state is GenerationState.SUCCEEDED


def _as_batch(item: KeyValue) -> WatchBatch:
    return WatchBatch(revision=item.mod_revision, events=(WatchEvent(kind=EventKind.PUT, item=item),))
