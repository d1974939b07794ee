"""The states of one job on one node: what workers snapshot, kept over their deaths, written, offered to others, and begun with again.

Owns: who does what with a state: workers speak of it (`conversation`), buffers keep it (`buffers`), the disk too, for good (`durable`), others fetch
it (`transfer`), a generation begins with it (`obtain`). Must not: decide who trains or which state is begun with (`rendezvous`), or start and stop
workers (`agent`).

Two threads work here beside the main one: the channels' hears the workers and must not wait, the state thread does what takes long (allocating,
reading, fetching, committing), one thing after the other. Reading, hashing and writing all happen with the buffer pinned.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.agent.buffers import Buffers
from elasticd.agent.commit import last_rank
from elasticd.agent.conversation import Conversation, Listener, Round
from elasticd.agent.durable import Durable
from elasticd.agent.obtain import Sources, UnobtainableError, note_lost, obtain
from elasticd.agent.transfer import StateServer, fetch
from elasticd.errors import ElasticdError
from elasticd.observability.report import CheckpointReport, SnapshotReport
from elasticd.rendezvous.records import INVENTORY_MAX, SnapshotRef
from elasticd.rendezvous.rollback import steps_left_out
from trainer import checkpoint
from trainer.errors import TrainerError
from trainer.wire import channel
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from elasticd.agent.config import AgentConfig
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member
    from elasticd.rendezvous.records import GenerationRecord, MemberRecord, ResumePoint
    from trainer.settings import Settings

log = structlog.get_logger("elasticd.agent.state")

TURN: Final = 1.0
"""Seconds between looks at what is due, where nothing wakes the state thread."""


class StateKeeper:
    """See the module.

    Args:
        read_settings: the settings of training as they are now; read at once, and again for each generation.
        listener: who else hears what workers say.

    Raises:
        ElasticdError: as `read_settings`; or the address cannot be used.
    """

    def __init__(self, config: AgentConfig, read_settings: Callable[[], Settings], listener: Listener | None = None) -> None:
        self._config = config
        self._read_settings = read_settings
        self._settings = settings = read_settings()
        self._member: Member | None = None
        self._lost: list[str] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._buffers = Buffers()
        self._disk = Durable(config, settings, self._buffers, self._work.put, lambda: self._talk.at_hand)
        self._root = self._disk.root
        self._tls = tls = config.kv.tls
        self._server = StateServer(config.address, tls=tls, scope=config.keys.scope, read=self._read, holds=self._disk.told_holds)
        self._talk = Conversation(self, self._welcome, listener)
        self._thread = threading.Thread(target=self._run, name="elasticd-state", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where this node's states are served."""
        return self._server.port

    # --- the main thread's side ------------------------------------------------------------------------------------------

    def attach(self, member: Member) -> None:
        """The membership, connected: states are committed by it, and holders found."""
        self._member = member
        self._disk.attach(member)

    def call(self, ring: Callable[[], None]) -> None:
        """What to call, from any thread, when `failure` or `difference` is to be looked at."""
        self._talk.call(ring)

    def identify(self, fingerprint: Mapping[str, str]) -> None:
        """What this node trains with, by part, for the manifests of checkpoints."""
        self._disk.identify(fingerprint)

    def recall(self) -> None:
        """See what lies on the disk. If there is nothing, fetch the newest copy from storage, so that a job outlives all of its machines."""
        self._disk.recall()

    def begin(self, assignment: Assignment) -> None:
        """A generation: see that its state is here. Workers may be started meanwhile; they wait for their welcome."""
        made = self._talk.begin(assignment.generation, assignment.node_rank)
        self._work.put(lambda: self._prepare(made))

    def open(self, local_rank: int) -> socket.socket:
        """The worker's end of its conversation, to be handed on and closed."""
        return self._talk.open(local_rank)

    @property
    def failure(self) -> str:
        """Why the generation at hand cannot begin here; "" while it can."""
        return self._talk.failure

    @property
    def difference(self) -> str:
        """In what this node differs from the others, as one of its workers found out; "" if in nothing."""
        return self._talk.difference

    def hear(self) -> None:
        """Take in what workers have said up to now: who has just ended may have said why."""
        self._talk.drain()

    @property
    def listening(self) -> tuple[int, ...]:
        """Local ranks of the workers that use `trainer` and have not hung up."""
        return self._talk.listening

    def ask_stop(self, reason: str, seconds: float) -> tuple[int, ...]:
        """Ask the workers to stop at a step that all agree on; local ranks of those that heard it."""
        return self._talk.ask("stop", reason, seconds)

    def ask_checkpoint(self, reason: str, *, owed: bool = False) -> tuple[int, ...]:
        """Ask the workers for a checkpoint; local ranks of those that heard it.

        Args:
            owed: if nobody hears it, since they are just starting, the first to speak is asked.
        """
        told = self._talk.ask("checkpoint", reason)
        if owed and not told:
            self._talk.owe_checkpoint(reason)
        return told

    def stopped_as_asked(self, local_rank: int) -> bool:
        """Whether that worker said that it stops because somebody asked it to."""
        return self._talk.stopped_as_asked(local_rank)

    def gone(self) -> None:
        """No worker runs any more: what they were writing is void, what they have written whole is kept."""
        self._talk.end()
        self._buffers.tidy()

    def holdings(self) -> tuple[tuple[SnapshotRef, ...], tuple[str, ...]]:
        """What this node holds whole, newest first, in memory and on disk; and the digests of checkpoints that it has lost."""
        memory = [SnapshotRef(generation=generation, step=step, digest=digest) for generation, step, digest in self._buffers.inventory()]
        disk = self._disk.refs()
        committed = self._disk.committed
        if committed and (committed.shared or self._config.node in committed.holders) and committed.digest not in {ref.digest for ref in disk}:
            note_lost(self._lost, committed.digest)
        refs = sorted({*memory, *disk}, key=lambda ref: (ref.order, ref.digest), reverse=True)
        return tuple(refs[:INVENTORY_MAX]), tuple(self._lost)

    def newest(self, generation: int) -> int:
        """Step of the newest whole snapshot of that generation in memory; 0 if there is none."""
        held = self._buffers.held()
        return held[0].step if held and held[0].generation == generation else 0

    @property
    def checkpoints(self) -> CheckpointReport:
        """Checkpoints, for the report on the job."""
        return self._disk.report

    @property
    def snapshots(self) -> SnapshotReport:
        """Snapshots, for the report on the job."""
        held = self._buffers.held()
        return SnapshotReport(step=held[0].step if held else 0, buffers=self._buffers.count, on_disk=self._buffers.where == "disk")

    @property
    def trouble(self) -> str:
        """Why nothing gets to disk, in one line; "" if nothing is known to be wrong."""
        return self._disk.trouble

    def write_newest(self) -> None:
        """Have the newest snapshot written though nobody asked for it: no generation follows at once, and memory goes with its agents."""
        at_hand = self._talk.at_hand
        if at_hand is not None:
            self._work.put(lambda: self._write_newest(at_hand))  # after what is being fetched: that may be the newest

    def keep_last(self, generation: GenerationRecord, seconds: float) -> bool:
        """No generation follows the active one and this node goes: have the newest state written, and committed by the active one (PROTOCOL 29).

        That is what its workers have reached. Where they never started, it is what they were to begin with, which becomes the generation's as if
        they had: it then is a state of the active generation, like any other.

        Args:
            generation: the active one; this node is in it, and none of its workers runs.
            seconds: to wait for all that.

        Returns:
            False if `seconds` were not enough.
        """
        at_hand = self._talk.at_hand
        if at_hand is None or at_hand.record.number != generation.number:
            resume, committed = generation.resume, self._disk.committed
            if resume is None or (committed and committed.digest == resume.digest):
                return self.settle(seconds)
            rank = last_rank(generation, self._config.node, copies=self._settings.checkpoint_copies, shared=self._settings.checkpoint_shared)
            made = self._talk.begin(generation, rank)
            self._work.put(lambda: self._prepare(made))
        self.write_newest()
        return self.settle(seconds, committed=self._disk.may_commit(generation))

    def settle(self, seconds: float, *, committed: bool = True) -> bool:
        """Wait until everything asked for is written, told to those concerned, and `committed`; False after `seconds`."""
        deadline = time.monotonic() + seconds
        while self._flushed(deadline):
            written = self._disk.wait(max(0.0, min(0.1, deadline - time.monotonic())))
            if written and self._flushed(deadline) and (self._disk.settled or not committed):
                return True
            if time.monotonic() >= deadline:
                return False
            if written:
                time.sleep(0.02)  # for the word of another holder, or for etcd
        return False

    def _flushed(self, deadline: float) -> bool:
        """Wait until the state thread has done what it was given up to now; False at `deadline`."""
        done = threading.Event()
        self._work.put(done.set)
        return done.wait(max(0.0, deadline - time.monotonic()))

    def owed(self, generation: GenerationRecord) -> bool:
        """Whether members of a generation without this node have yet to fetch their state here (PROTOCOL 18)."""
        resume = generation.resume
        if resume is None or self._config.node not in resume.holders:
            return False
        without = {identity.node for identity in generation.ids} - set(resume.holders)
        return bool(without - self._server.served(resume.digest)) and self._buffers.holds(resume.digest)

    def close(self) -> None:
        """End every thread, and let the states in memory go."""
        self._work.put(None)
        self._talk.close()
        self._server.close()
        self._disk.close()
        self._thread.join(timeout=2.0)
        self._buffers.close()

    # --- what workers ask for, in the channels' thread -------------------------------------------------------------------

    def make_room(self, at_hand: Round, local_rank: int, header: str, size: int) -> None:
        """See `Errands`."""
        self._work.put(lambda: self._make_room(at_hand, local_rank, header, size))

    def persist(self, at_hand: Round, generation: int, step: int) -> None:
        """See `Errands`."""
        self._work.put(lambda: self._disk.order(at_hand, generation, step))

    def _welcome(self, at_hand: Round) -> tuple[Mapping[str, Any], Sequence[int]]:
        settings = self._settings.model_dump(mode="json")
        told: dict[str, Any] = {"generation": at_hand.record.number, "settings": settings, "directory": str(self._root)}
        if left_out := steps_left_out(at_hand.record):
            told["skip"] = left_out
        layout, resume = self._buffers.layout, at_hand.record.resume
        if at_hand.index < 0 or layout is None or resume is None:
            return told, ()
        told |= {"resume": at_hand.index, "step": resume.step, "header": layout.header_text, "size": layout.size, "digest": resume.digest}
        return told, self._buffers.fds()

    # --- the state thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                job = self._work.get(timeout=TURN)
            except queue.Empty:
                job = self._turn
            if job is None:
                return
            try:
                job()
            except Exception:  # the thread must outlive any fault of ours: without it nothing is kept
                log.exception("state_work_failed")

    def _turn(self) -> None:
        """What is due by time: a commit that etcd did not take, a checkpoint."""
        self._disk.turn()
        at_hand = self._talk.at_hand
        every = self._settings.checkpoint_every_s
        if at_hand is None or at_hand.node_rank != 0 or every <= 0:
            return
        if time.monotonic() - at_hand.asked_at >= every:
            at_hand.asked_at = time.monotonic()
            self.ask_checkpoint("the interval has passed")

    def _prepare(self, at_hand: Round) -> None:
        """Have the state that the generation begins with, then answer the workers that wait for it."""
        self._refresh_settings()
        self._disk.begin(at_hand, self._settings)
        if left_out := steps_left_out(at_hand.record):
            log.warning("data_left_out", generation=at_hand.record.number, steps=left_out, why="they led to a divergence; the job has gone back from it")
        began = time.monotonic()
        index, failure = -1, ""
        try:
            if at_hand.record.resume is not None:
                where = self._obtain(at_hand.record.resume, at_hand.record.number)
                index = self._buffers.index_of(at_hand.record.number, at_hand.record.resume.step)
                log.info(
                    "state_ready",
                    generation=at_hand.record.number,
                    step=at_hand.record.resume.step,
                    source=where,
                    seconds=round(time.monotonic() - began, 3),
                )
            else:
                self._buffers.discard_all()
        except (ElasticdError, TrainerError, OSError) as error:
            log.error("state_not_to_be_had", generation=at_hand.record.number, why=str(error))  # noqa: TRY400 - it says all there is to know
            failure = str(error)
        self._talk.ready(at_hand, index=index, failure=failure)
        if not failure:
            self._disk.tell_leavers(at_hand)

    def _write_newest(self, at_hand: Round) -> None:
        held = self._buffers.held()
        if held and held[0].generation == at_hand.record.number:
            self._disk.order(at_hand, held[0].generation, held[0].step)

    def _refresh_settings(self) -> None:
        try:
            self._settings = self._read_settings()
        except ElasticdError as error:
            log.warning("settings_kept", why=str(error))

    def _obtain(self, resume: ResumePoint, generation: int) -> str:
        member = self._member
        if member is None:
            raise UnobtainableError("no membership")
        sources = Sources(
            node=self._config.node,
            buffers=self._buffers,
            root=self._root,
            shared=self._settings.checkpoint_shared,
            url=self._disk.url,
            room=self._room,
            lookup=member.lookup,
            fetch=self._fetch,
            lost=self._lost,
        )
        return obtain(resume, generation, sources)

    def _fetch(self, record: MemberRecord, resume: ResumePoint, generation: int) -> None:
        if record.state_port is None:
            raise UnobtainableError(f"{record.id.node} serves no states")

        def place(layout: Layout, fill: Callable[[memoryview], None]) -> None:
            self._room(layout)
            self._buffers.place(layout, generation, resume.step, fill, digest=resume.digest)

        fetch(record.address, record.state_port, resume.digest, scope=self._config.keys.scope, node=self._config.node, tls=self._tls, place=place)

    def _room(self, layout: Layout) -> None:
        settings = self._settings
        budget = settings.snapshot_memory_mib * 1024 * 1024 if settings.snapshot_memory_mib else None
        self._buffers.open(layout, local_world=self._config.nproc, budget_bytes=budget, percent=settings.snapshot_memory_percent, disk=self._root.parent)

    def _make_room(self, at_hand: Round, local_rank: int, header: str, size: int) -> None:
        """Answer a worker that described its state."""
        if at_hand is not self._talk.at_hand:
            return
        try:
            layout = Layout.parse(header)
            if layout.size != size:
                raise TrainerError(f"a state of {size} bytes was described as {layout.size}")
            self._room(layout)
        except (TrainerError, OSError) as error:
            log.error("no_buffers", why=str(error))  # noqa: TRY400 - it says all there is to know
            self._talk.lend(local_rank, channel.Buffers(count=0, why=str(error)))
            return
        fds = self._buffers.fds()
        count = max(0, len(fds) - 1)
        self._talk.lend(local_rank, channel.Buffers(count=count, where=self._buffers.where, why=self._buffers.why), fds if count else ())

    def _read(self, digest: str) -> AbstractContextManager[tuple[bytes, memoryview]]:
        """For a peer that fetches: from memory, else from disk."""
        return self._buffers.reading_digest(digest) if self._buffers.holds(digest) else checkpoint.opened(self._root, digest)
