"""The checkpoints of one job on this node's disk, from the order to the commit.

Owns: what is ordered, who is told that it is written, and what is said of all this in reports. Must not: decide that a checkpoint is due, or hold a
state: `buffers` do, until it is written (`persist`).

Called in the state thread, unless another one is named.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.agent.commit import Committer, enough, writes
from elasticd.agent.holders import Holders
from elasticd.agent.persist import Persister
from elasticd.errors import KVError
from elasticd.observability.report import CheckpointReport
from elasticd.rendezvous.records import INVENTORY_MAX, CheckpointRecord, SnapshotRef
from trainer import checkpoint
from trainer.errors import TrainerError
from trainer.wire.layout import unpack_extras

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticd.agent.buffers import Buffers
    from elasticd.agent.config import AgentConfig
    from elasticd.agent.conversation import Round
    from elasticd.rendezvous.member import Member
    from elasticd.rendezvous.records import GenerationRecord
    from trainer.settings import Settings

log = structlog.get_logger("elasticd.agent.state")

PACKAGES: Final = ("torch", "numpy", "elasticd")


class Durable:
    """See the module.

    Args:
        settings: as they are now.
        buffers: where states are read from.
        hand_on: has something done in the state thread.
        at_hand: the generation at hand.
    """

    def __init__(
        self,
        config: AgentConfig,
        settings: Settings,
        buffers: Buffers,
        hand_on: Callable[[Callable[[], None]], None],
        at_hand: Callable[[], Round | None],
    ) -> None:
        self._config = config
        self._settings = settings
        self._buffers = buffers
        self._hand_on = hand_on
        self._at_hand = at_hand
        self._member: Member | None = None
        self._uncommitted = False
        self._ordered: tuple[int, int] | None = None
        self._fingerprint: Mapping[str, str] = {}
        self.root: Final = checkpoint_root(config, settings)
        self._holders = Holders(config.keys.scope, config.node, config.kv.tls)
        self._committer = Committer(self._commit, config.keys.scope, settings.checkpoint_copies, settings.checkpoint_shared)
        self._persister = Persister(self.root, job=config.job, keep=keep_of(settings), done=self._written)

    # --- the main thread's side ------------------------------------------------------------------------------------------

    def attach(self, member: Member) -> None:
        """The membership, connected: what is written is committed by it, and those to be told are found."""
        self._member = member
        self._holders.attach(member.lookup)
        self._note_committed()

    def identify(self, fingerprint: Mapping[str, str]) -> None:
        """What this node trains with, by part, for manifests."""
        self._fingerprint = fingerprint

    def recall(self) -> None:
        """Take note of what an earlier agent left. On a disk without a single checkpoint: fetch the newest copy from storage."""
        if self.url and not checkpoint.scan(self.root):
            self._download()
        for manifest in self._manifests()[:1]:
            self._persister.found(manifest)

    def _download(self) -> None:
        try:
            copies = checkpoint.list_remote(self.url)
            if copies:
                path = checkpoint.download(self.url, self.root, generation=copies[0].generation, step=copies[0].step)
                log.info("checkpoint_recalled", path=str(path))
        except (TrainerError, OSError) as error:
            log.error("checkpoint_not_recalled", why=str(error))  # noqa: TRY400 - it says all there is to know

    @property
    def url(self) -> str:
        """Where this job's checkpoints are copied to; "" for nowhere."""
        base = self._settings.checkpoint_url
        return f"{base.rstrip('/')}/{self._config.job}" if base else ""

    def refs(self) -> list[SnapshotRef]:
        """What lies on disk, the newest first."""
        return [_ref(manifest) for manifest in self._manifests()]

    def _manifests(self) -> list[checkpoint.Manifest]:
        manifests = []
        for found in checkpoint.scan(self.root)[:INVENTORY_MAX]:
            try:
                manifests.append(checkpoint.read_manifest(found.path))
            except (TrainerError, OSError):
                continue  # found out, and set aside, when it is to be loaded
        return manifests

    @property
    def settled(self) -> bool:
        """Everything ordered is written and committed."""
        return not self._persister.busy and not self._uncommitted

    def may_commit(self, generation: GenerationRecord) -> bool:
        """Whether what this node writes in that generation may yet be committed: it is enough alone, or another node that writes is here. In any thread."""
        settings, ids = self._settings, generation.ids
        if enough((self._config.node,), nodes=len(ids), copies=settings.checkpoint_copies, shared=settings.checkpoint_shared):
            return True
        try:
            return any(self._is_here(identity.node) for identity in ids[: settings.checkpoint_copies] if identity.node != self._config.node)
        except KVError:
            return True  # who cannot be asked may be here

    def wait(self, seconds: float) -> bool:
        """Wait until everything ordered is written; False after `seconds`."""
        return self._persister.wait(seconds)

    def close(self) -> None:
        """End its threads."""
        self._persister.close()

    # --- for the report, in any thread -----------------------------------------------------------------------------------

    @property
    def report(self) -> CheckpointReport:
        """What came of it so far."""
        tally, newest = self._persister.tally, self.committed
        return CheckpointReport(
            written=tally.written,
            failed=tally.failed,
            step=tally.step,
            at=tally.at,
            nbytes=tally.nbytes,
            every_s=max(0.0, self._settings.checkpoint_every_s),
            durations=tally.durations,
            committed_step=newest.step if newest else 0,
        )

    @property
    def trouble(self) -> str:
        """Why nothing gets to disk, in one line; "" if nothing is known to be wrong."""
        why = self._persister.tally.trouble
        return f"checkpoints are not written: {why}" if why else ""

    @property
    def committed(self) -> CheckpointRecord | None:
        """The job's newest checkpoint."""
        return self._member.checkpoint if self._member else None

    # --- ordered ---------------------------------------------------------------------------------------------------------

    def begin(self, at_hand: Round, settings: Settings) -> None:
        """A generation, and what is set for it."""
        self._settings = settings
        self._persister.keep = keep_of(settings)
        self._committer.copies = settings.checkpoint_copies
        self._committer.generation(at_hand.record.number, len(at_hand.record.members))

    def order(self, at_hand: Round, generation: int, step: int) -> None:
        """Have a snapshot written, if this node writes any."""
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
        url = self.url if at_hand.node_rank == 0 else ""
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

    # --- written, held, committed ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What is due by time: a commit that etcd did not take."""
        self._commit_due()
        self._note_committed()

    def tell_leavers(self, at_hand: Round) -> None:
        """This node has the state that the generation begins with."""
        self._holders.tell_leavers(at_hand.record)

    def told_holds(self, generation: int, step: int, digest: str, node: str) -> None:
        """In a thread of the server: another node has written that."""
        ref = SnapshotRef(generation=generation, step=step, digest=digest)
        self._hand_on(lambda: self._holds(ref, node))

    def _written(self, manifest: checkpoint.Manifest) -> None:
        """In the persister's thread."""
        ref = _ref(manifest)
        self._hand_on(lambda: self._holds(ref, self._config.node))

    def _holds(self, ref: SnapshotRef, node: str) -> None:
        at_hand = self._at_hand()
        if at_hand is None or ref.generation != at_hand.record.number:
            return
        if at_hand.node_rank == 0:
            self._committer.holds(ref, node)
            self._commit_due()
        elif node == self._config.node:
            self._holders.tell_first(at_hand.record, ref)

    def _is_here(self, node: str) -> bool:
        return self._member is not None and self._member.lookup(node) is not None

    def _commit(self, record: CheckpointRecord) -> bool:
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

    def _note_committed(self) -> None:
        """Whoever holds the job's newest checkpoint keeps it, whatever else goes."""
        record = self.committed
        if record is not None:
            self._persister.committed(record.generation, record.step)


def keep_of(settings: Settings) -> checkpoint.Keep:
    """Which checkpoints stay on this node's disk."""
    return checkpoint.Keep(last=settings.checkpoint_keep_last, every=settings.checkpoint_keep_every_steps)


def checkpoint_root(config: AgentConfig, settings: Settings) -> Path:
    """Where this node's checkpoints of the job lie: shared by all nodes, or its own."""
    base = settings.checkpoint_dir or config.checkpoints or config.state_dir / "checkpoints"
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


def _ref(manifest: checkpoint.Manifest) -> SnapshotRef:
    return SnapshotRef(generation=manifest.generation, step=manifest.step, digest=manifest.digest)
