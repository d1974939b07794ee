"""The states of one job on one node: what workers snapshot, kept over their deaths, written, offered to others, and begun with again.

Owns: the conversation with workers that use `trainer`, and who does what with a state: buffers keep it (`buffers`), the disk too (`persist`),
others fetch it (`transfer`), etcd is told (`commit`), a generation begins with it (`obtain`). Must not: decide who trains or which state is begun
with (`rendezvous`), or start and stop workers (`agent`).

Two threads work here beside the main one: the channels' hears the workers and must not wait, the state thread does what takes long (allocating,
reading, fetching, committing), one thing after the other. Reading, hashing and writing all happen with the buffer pinned.
"""

from __future__ import annotations

import platform
import queue
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.agent.buffers import Buffers
from elasticd.agent.channels import Channels
from elasticd.agent.commit import Committer, writes
from elasticd.agent.obtain import Sources, UnobtainableError, note_lost, obtain
from elasticd.agent.persist import Persister
from elasticd.agent.transfer import StateServer, fetch, tell_has, tell_holds
from elasticd.errors import ElasticdError, KVError
from elasticd.rendezvous.records import INVENTORY_MAX, SnapshotRef
from trainer import checkpoint
from trainer.errors import TrainerError
from trainer.wire import channel
from trainer.wire.layout import Layout, unpack_extras

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from elasticd.agent.config import AgentConfig
    from elasticd.rendezvous.desk import Assignment
    from elasticd.rendezvous.member import Member
    from elasticd.rendezvous.records import GenerationRecord, MemberRecord, ResumePoint
    from trainer.settings import Settings
    from trainer.wire.channel import Message

log = structlog.get_logger("elasticd.agent.state")

TURN: Final = 1.0
"""Seconds between looks at what is due, where nothing wakes the state thread."""
PACKAGES: Final = ("torch", "numpy", "elasticd")


@dataclass(slots=True)
class _Round:
    """The generation at hand.

    Attributes:
        index: of the buffer to begin with; -1: at the very beginning.
        ready: the state is there, or there is none to be had and `failure` says why.
        hello: local ranks of workers that wait for their welcome.
        stopped: local rank -> what it said when it stopped as asked.
        unfit: why this node cannot take part, as a worker found out.
    """

    record: GenerationRecord
    node_rank: int
    index: int = -1
    ready: bool = False
    failure: str = ""
    hello: list[int] = field(default_factory=list)
    stopped: dict[int, channel.Stopped] = field(default_factory=dict)
    unfit: channel.Unfit | None = None
    asked_at: float = field(default_factory=time.monotonic)


class StateKeeper:
    """See the module.

    Args:
        read_settings: the settings of training as they are now; read at once, and again for each generation.

    Raises:
        ElasticdError: as `read_settings`; or the address cannot be used.
    """

    def __init__(self, config: AgentConfig, read_settings: Callable[[], Settings]) -> None:
        self._config = config
        self._read_settings = read_settings
        self._settings = settings = read_settings()
        self._ring: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._round: _Round | None = None
        self._member: Member | None = None
        self._lost: list[str] = []
        self._uncommitted = False
        self._ordered: tuple[int, int] | None = None
        self._fingerprint: Mapping[str, str] = {}
        self._root = checkpoint_root(config, settings)
        self._buffers = Buffers()
        self._committer = Committer(self._commit, config.keys.scope, settings.checkpoint_copies, settings.checkpoint_shared)
        self._persister = Persister(self._root, job=config.job, keep=keep_of(settings), done=self._written)
        tls = config.kv.tls
        self._server = StateServer(config.address, tls=tls, scope=config.keys.scope, read=self._read, holds=self._told_holds)
        self._tls = tls
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._channels = Channels(self._heard)
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
        self._note_committed()

    def call(self, ring: Callable[[], None]) -> None:
        """What to call, from any thread, when `failure` is to be looked at."""
        self._ring = ring

    def identify(self, fingerprint: Mapping[str, str]) -> None:
        """What this node trains with, by part, for the manifests of checkpoints."""
        self._fingerprint = fingerprint

    def recall(self) -> None:
        """On a disk without a single checkpoint: fetch the newest copy from storage, so that a job outlives all of its machines."""
        if not self._url or checkpoint.scan(self._root):
            return
        try:
            copies = checkpoint.list_remote(self._url)
            if copies:
                path = checkpoint.download(self._url, self._root, generation=copies[0].generation, step=copies[0].step)
                log.info("checkpoint_recalled", path=str(path))
        except (TrainerError, OSError) as error:
            log.error("checkpoint_not_recalled", why=str(error))  # noqa: TRY400 - it says all there is to know

    @property
    def _url(self) -> str:
        base = self._settings.checkpoint_url
        return f"{base.rstrip('/')}/{self._config.job}" if base else ""

    def begin(self, assignment: Assignment) -> None:
        """A generation: see that its state is here. Workers may be started meanwhile; they wait for their welcome."""
        made = _Round(record=assignment.generation, node_rank=assignment.node_rank)
        with self._lock:
            self._round = made
        self._work.put(lambda: self._prepare(made))

    def open(self, local_rank: int) -> socket.socket:
        """The worker's end of its conversation, to be handed on and closed."""
        return self._channels.open(local_rank)

    @property
    def failure(self) -> str:
        """Why the generation at hand cannot begin here; "" while it can."""
        with self._lock:
            return self._round.failure if self._round else ""

    @property
    def difference(self) -> str:
        """In what this node differs from the others, as one of its workers found out; "" if in nothing."""
        with self._lock:
            unfit = self._round.unfit if self._round else None
            return f"{unfit.part}: {unfit.detail}" if unfit else ""

    def hear(self) -> None:
        """Take in what workers have said up to now: who has just ended may have said why."""
        self._channels.drain()

    @property
    def listening(self) -> tuple[int, ...]:
        """Local ranks of the workers that use `trainer` and have not hung up."""
        return self._channels.listening

    def ask_stop(self, reason: str, seconds: float) -> tuple[int, ...]:
        """Ask the workers to stop at a step that all agree on; local ranks of those that heard it."""
        return self._raise("stop", reason, seconds)

    def ask_checkpoint(self, reason: str) -> tuple[int, ...]:
        """Ask the workers for a checkpoint; local ranks of those that heard it."""
        return self._raise("checkpoint", reason, 0.0)

    def stopped_as_asked(self, local_rank: int) -> bool:
        """Whether that worker said that it stops because somebody asked it to."""
        with self._lock:
            return self._round is not None and local_rank in self._round.stopped

    def gone(self) -> None:
        """No worker runs any more: what they were writing is void, what they have written whole is kept."""
        self._channels.end()
        self._buffers.tidy()

    def holdings(self) -> tuple[tuple[SnapshotRef, ...], tuple[str, ...]]:
        """What this node holds whole, newest first, in memory and on disk; and the digests of checkpoints that it has lost."""
        memory = [SnapshotRef(generation=generation, step=step, digest=digest) for generation, step, digest in self._buffers.inventory()]
        disk = self._on_disk()
        committed = self._member.checkpoint if self._member else None
        if committed and (committed.shared or self._config.node in committed.holders) and committed.digest not in {ref.digest for ref in disk}:
            note_lost(self._lost, committed.digest)
        refs = sorted({*memory, *disk}, key=lambda ref: (ref.order, ref.digest), reverse=True)
        return tuple(refs[:INVENTORY_MAX]), tuple(self._lost)

    def write_newest(self) -> None:
        """Have the newest snapshot written though nobody asked for it: no generation follows at once, and memory goes with its agents."""
        with self._lock:
            at_hand = self._round
        held = self._buffers.held()
        if at_hand is not None and held and held[0].generation == at_hand.record.number:
            self._work.put(lambda: self._persist(at_hand, held[0].generation, held[0].step))

    def settle(self, seconds: float) -> bool:
        """Wait until everything asked for is written and committed; False after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            done = threading.Event()
            self._work.put(done.set)
            if not done.wait(max(0.0, deadline - time.monotonic())):
                return False
            if not self._persister.busy and not self._uncommitted:
                return True
            if time.monotonic() >= deadline:
                return False
            self._persister.wait(0.1)
            if not self._persister.busy:
                time.sleep(0.02)  # for the word of another holder, or for etcd

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
        self._channels.close()
        self._server.close()
        self._persister.close()
        self._thread.join(timeout=2.0)
        self._buffers.close()

    # --- the conversation with workers -----------------------------------------------------------------------------------

    def _heard(self, local_rank: int, message: Message) -> None:
        """In the channels' thread."""
        with self._lock:
            at_hand = self._round
        if at_hand is None:
            return
        match message:
            case channel.Hello():
                self._hello(at_hand, local_rank)
            case channel.Describe(header=header, size=size):
                self._work.put(lambda: self._make_room(at_hand, local_rank, header, size))
            case channel.Restored(step=step, digest=digest, seconds=seconds):
                log.info("state_restored", generation=at_hand.record.number, local_rank=local_rank, step=step, digest=digest, seconds=seconds)
            case channel.Sealed(persist=True) as sealed:
                self._work.put(lambda: self._persist(at_hand, sealed.generation, sealed.step))
            case channel.Stopped() as stopped:
                at_hand.stopped[local_rank] = stopped
                log.info("worker_stopped", generation=at_hand.record.number, local_rank=local_rank, step=stopped.step, saved=stopped.saved)
            case channel.Unfit() as unfit:
                log.error("node_unfit", generation=at_hand.record.number, part=unfit.part, detail=unfit.detail)
                at_hand.unfit = unfit
                self._ring()
            case _:
                log.warning("message_out_of_place", local_rank=local_rank, kind=message.kind)

    def _hello(self, at_hand: _Round, local_rank: int) -> None:
        with self._lock:
            if not at_hand.ready:
                at_hand.hello.append(local_rank)
                return
        self._welcome(at_hand, local_rank)

    def _welcome(self, at_hand: _Round, local_rank: int) -> None:
        if at_hand.failure:
            return  # its end is near
        settings = self._settings.model_dump(mode="json")
        welcome: dict[str, Any] = {"generation": at_hand.record.number, "settings": settings, "directory": str(self._root)}
        fds: Iterable[int] = ()
        if at_hand.index >= 0 and self._buffers.layout is not None and at_hand.record.resume is not None:
            layout, resume = self._buffers.layout, at_hand.record.resume
            welcome |= {"resume": at_hand.index, "step": resume.step, "header": layout.header_text, "size": layout.size, "digest": resume.digest}
            fds = self._buffers.fds()
        self._channels.say(local_rank, channel.Welcome(**welcome), list(fds))

    def _raise(self, flag: str, reason: str, seconds: float) -> tuple[int, ...]:
        message = channel.Raise(flag=flag, reason=reason, seconds=seconds)
        return tuple(rank for rank in self._channels.listening if self._channels.say(rank, message))

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
        self._commit_due()
        self._note_committed()
        with self._lock:
            at_hand = self._round
        every = self._settings.checkpoint_every_s
        if at_hand is None or at_hand.node_rank != 0 or every <= 0:
            return
        if time.monotonic() - at_hand.asked_at >= every:
            at_hand.asked_at = time.monotonic()
            self.ask_checkpoint("the interval has passed")

    def _note_committed(self) -> None:
        """Whoever holds the job's newest checkpoint keeps it, whatever else goes."""
        record = self._member.checkpoint if self._member else None
        if record is not None:
            self._persister.committed(record.generation, record.step)

    def _prepare(self, at_hand: _Round) -> None:
        """Have the state that the generation begins with, then answer the workers that wait for it."""
        self._refresh_settings()
        self._committer.generation(at_hand.record.number, len(at_hand.record.members))
        began = time.monotonic()
        try:
            if at_hand.record.resume is not None:
                where = self._obtain(at_hand.record.resume, at_hand.record.number)
                at_hand.index = self._buffers.index_of(at_hand.record.number, at_hand.record.resume.step)
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
            at_hand.failure = str(error)
        with self._lock:
            at_hand.ready = True
            waiting, at_hand.hello = at_hand.hello, []
        for local_rank in waiting:
            self._welcome(at_hand, local_rank)
        if at_hand.failure:
            self._ring()
        else:
            self._tell_leavers(at_hand)

    def _refresh_settings(self) -> None:
        try:
            self._settings = self._read_settings()
        except ElasticdError as error:
            log.warning("settings_kept", why=str(error))
        self._persister.keep = keep_of(self._settings)
        self._committer.copies = self._settings.checkpoint_copies

    def _obtain(self, resume: ResumePoint, generation: int) -> str:
        member = self._member
        if member is None:
            raise UnobtainableError("no membership")
        sources = Sources(
            node=self._config.node,
            buffers=self._buffers,
            root=self._root,
            shared=self._settings.checkpoint_shared,
            url=self._url,
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

    def _make_room(self, at_hand: _Round, local_rank: int, header: str, size: int) -> None:
        """Answer a worker that described its state."""
        if at_hand is not self._round:
            return
        try:
            layout = Layout.parse(header)
            if layout.size != size:
                raise TrainerError(f"a state of {size} bytes was described as {layout.size}")
            self._room(layout)
        except (TrainerError, OSError) as error:
            log.error("no_buffers", why=str(error))  # noqa: TRY400 - it says all there is to know
            self._channels.say(local_rank, channel.Buffers(count=0, why=str(error)))
            return
        fds = self._buffers.fds()
        count = max(0, len(fds) - 1)
        self._channels.say(local_rank, channel.Buffers(count=count, where=self._buffers.where, why=self._buffers.why), fds if count else ())

    def _persist(self, at_hand: _Round, generation: int, step: int) -> None:
        record, settings = at_hand.record, self._settings
        if not writes(at_hand.node_rank, copies=settings.checkpoint_copies, shared=settings.checkpoint_shared):
            return
        if generation != record.number or (generation, step) == self._ordered:
            return  # of another world; or a worker wanted it, and then nothing newer came
        self._ordered = (generation, step)
        info = checkpoint.Info(
            job=self._config.job,
            generation=generation,
            step=step,
            world={"nodes": len(record.members), "world_size": record.world_size},
            data=self._cursor(generation, step),
            fingerprint=self._fingerprint,
            packages=packages(),
        )
        if at_hand.node_rank == 0:
            self._uncommitted = True
        url = self._url if at_hand.node_rank == 0 else ""
        self._persister.want(info, lambda: self._buffers.reading(generation, step), url=url)

    def _cursor(self, generation: int, step: int) -> dict[str, Any]:
        """Where the data stands in that snapshot, for people who read the manifest: what counts is in the state itself."""
        try:
            with self._buffers.reading(generation, step) as (_header, image):
                layout = self._buffers.layout
                data = unpack_extras(layout.get_extras(image)).get("data") if layout else None
        except (TrainerError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _read(self, digest: str) -> AbstractContextManager[tuple[bytes, memoryview]]:
        """For a peer that fetches: from memory, else from disk."""
        return self._buffers.reading_digest(digest) if self._buffers.holds(digest) else checkpoint.opened(self._root, digest)

    # --- written, held, committed ----------------------------------------------------------------------------------------

    def _on_disk(self) -> list[SnapshotRef]:
        refs = []
        for found in checkpoint.scan(self._root)[:INVENTORY_MAX]:
            try:
                manifest = checkpoint.read_manifest(found.path)
            except (TrainerError, OSError):
                continue  # found out, and set aside, when it is to be loaded
            refs.append(SnapshotRef(generation=manifest.generation, step=manifest.step, digest=manifest.digest))
        return refs

    def _written(self, manifest: checkpoint.Manifest) -> None:
        """In the persister's thread."""
        ref = SnapshotRef(generation=manifest.generation, step=manifest.step, digest=manifest.digest)
        self._work.put(lambda: self._holds(ref, self._config.node))

    def _told_holds(self, generation: int, step: int, digest: str, node: str) -> None:
        """In a thread of the server: another node has written that."""
        ref = SnapshotRef(generation=generation, step=step, digest=digest)
        self._work.put(lambda: self._holds(ref, node))

    def _holds(self, ref: SnapshotRef, node: str) -> None:
        with self._lock:
            at_hand = self._round
        if at_hand is None or ref.generation != at_hand.record.number:
            return
        if at_hand.node_rank == 0:
            self._committer.holds(ref, node)
            self._commit_due()
        elif node == self._config.node:
            self._tell_first(at_hand, ref)

    def _tell_first(self, at_hand: _Round, ref: SnapshotRef) -> None:
        """Tell rank 0's agent that this node has written it too."""

        def tell(address: str, port: int, **known: Any) -> None:
            tell_holds(address, port, generation=ref.generation, step=ref.step, digest=ref.digest, **known)

        self._tell(at_hand.record.members[0].id.node, "holder_not_told", tell)

    def _tell_leavers(self, at_hand: _Round) -> None:
        """Those who stay only because somebody may need their state hear that this node has it (PROTOCOL 18)."""
        resume = at_hand.record.resume
        if resume is None:
            return

        def tell(address: str, port: int, **known: Any) -> None:
            tell_has(address, port, digest=resume.digest, **known)

        for node in set(resume.holders) - {identity.node for identity in at_hand.record.ids}:
            self._tell(node, "leaver_not_told", tell)

    def _tell(self, node: str, failed: str, tell: Callable[..., None]) -> None:
        try:
            record = self._member.lookup(node) if self._member else None
            if record is not None and record.state_port is not None:
                tell(record.address, record.state_port, scope=self._config.keys.scope, node=self._config.node, tls=self._tls)
        except (ElasticdError, OSError) as error:
            log.warning(failed, node=node, why=str(error))

    def _commit(self, record: Any) -> bool:
        return self._member is not None and self._member.commit(record)

    def _commit_due(self) -> None:
        """Commit what may be; what etcd did not take is tried again."""
        try:
            committed = self._committer.settle()
        except KVError as error:
            log.warning("commit_postponed", why=str(error))
            return
        if committed is not None:
            log.info("checkpoint_committed", generation=committed.generation, step=committed.step, digest=committed.digest)
            self._note_committed()
        self._uncommitted = self._committer.pending


def keep_of(settings: Settings) -> checkpoint.Keep:
    """Which checkpoints stay on this node's disk."""
    return checkpoint.Keep(last=settings.checkpoint_keep_last, every=settings.checkpoint_keep_every_steps)


def checkpoint_root(config: AgentConfig, settings: Settings) -> Path:
    """Where this node's checkpoints of the job lie: shared by all nodes, or its own."""
    base = settings.checkpoint_dir or config.state_dir / "checkpoints"
    return Path(base) / config.job if settings.checkpoint_shared else Path(base) / config.job / config.node


def packages() -> dict[str, str]:
    """Versions of what a state's meaning may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
