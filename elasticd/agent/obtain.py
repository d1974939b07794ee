"""Where the state that a generation begins with comes from: this node's memory, its disk, shared storage, or another node (PROTOCOL 22).

Owns: the order in which sources are asked, and what is found out about them on the way. Must not: choose the state, or begin with another one
where it cannot be had: that is the coordinator's, who is told what this node has lost.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from elasticd.errors import ElasticdError, KVError
from elasticd.rendezvous.records import LOST_MAX
from trainer import checkpoint
from trainer.errors import DamagedError, TrainerError
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticd.agent.buffers import Buffers
    from elasticd.rendezvous.records import MemberRecord, ResumePoint

log = structlog.get_logger("elasticd.agent.obtain")


class UnobtainableError(ElasticdError):
    """No source that can be reached now has the state."""


@dataclass(slots=True)
class Sources:
    """What a state can be taken from.

    Attributes:
        buffers: this node's memory.
        root: this node's checkpoints.
        shared: they lie where every node sees them.
        url: the storage that this job's checkpoints are copied to, "" if none.
        room: opens buffers for a layout.
        lookup: the member record of a node, None if it is not here.
        fetch: (record, digest, room) gets a state from another agent into the buffers; raises an error of either tree.
        lost: digests of checkpoints that were here and cannot be read any more.
    """

    node: str
    buffers: Buffers
    root: Path
    shared: bool
    url: str
    room: Callable[[Layout], None]
    lookup: Callable[[str], MemberRecord | None]
    fetch: Callable[[MemberRecord, ResumePoint, int], None]
    lost: list[str] = field(default_factory=list)


def obtain(resume: ResumePoint, generation: int, sources: Sources) -> str:
    """Have the state in a buffer, tagged with `generation`; return where it came from, for people.

    Raises:
        UnobtainableError: no source has it; the message says what each answered.
    """
    failures: list[str] = []
    if sources.buffers.retag(resume.digest, generation):
        return "memory"
    for name, source in (("disk", _from_disk), ("storage", _from_url), ("peers", _from_peers)):
        try:
            told = source(resume, generation, sources)
        except (ElasticdError, TrainerError, OSError) as error:
            failures.append(f"{name}: {error}")
            continue
        if told:
            return told
    what = f"step {resume.step} of generation {resume.generation} ({resume.digest[:12]})"
    raise UnobtainableError(f"cannot get the state to begin with, {what}: {'; '.join(failures) or 'no source has it'}")


def _from_disk(resume: ResumePoint, generation: int, sources: Sources) -> str:
    """Load the checkpoint of that content, if this node has written it. A damaged one is set aside, and known to be lost."""
    for found in checkpoint.scan(sources.root):
        try:
            if checkpoint.read_manifest(found.path).digest != resume.digest:
                continue
            layout = Layout.parse(checkpoint.read_header(found.path))
            sources.room(layout)
            sources.buffers.place(layout, generation, resume.step, partial(_load, found.path), digest=resume.digest)
        except DamagedError as error:
            log.error("checkpoint_damaged", path=str(found.path), why=str(error))  # noqa: TRY400 - what it says is all there is to know
            with suppress(OSError):
                checkpoint.set_aside(found.path, str(error))
            continue
        return f"disk ({found.path.name})"
    if sources.shared or sources.node in resume.holders:
        # What is in memory was looked at before this: the record counts on a file that is not there.
        note_lost(sources.lost, resume.digest)
    return ""


def note_lost(lost: list[str], digest: str) -> None:
    """Add the digest of a checkpoint that this node was to hold; the oldest are forgotten."""
    if digest not in lost:
        lost.append(digest)
        del lost[:-LOST_MAX]


def _load(path: Path, image: memoryview) -> None:
    checkpoint.load_into(path, image)


def _from_url(resume: ResumePoint, generation: int, sources: Sources) -> str:
    """Download it beside this node's own checkpoints, and load it from there."""
    if not sources.url:
        return ""
    path = checkpoint.download(sources.url, sources.root, generation=resume.generation, step=resume.step)
    return f"storage ({path.name})" if _from_disk(resume, generation, sources) else ""


def _from_peers(resume: ResumePoint, generation: int, sources: Sources) -> str:
    failures: list[str] = []
    for node in resume.holders:
        if node == sources.node:
            continue
        try:
            record = sources.lookup(node)
            if record is None:
                failures.append(f"{node} is not here")
                continue
            sources.fetch(record, resume, generation)
        except KVError:
            raise
        except (ElasticdError, TrainerError, OSError) as error:
            failures.append(f"{node}: {error}")
            continue
        return f"{node}'s memory"
    raise UnobtainableError("; ".join(failures) or "nobody else has it")
