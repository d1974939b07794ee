"""Who is told what this node holds: rank 0's agent, which commits it, and those who stay only for the sake of it.

Owns: finding them and telling them. Must not: decide what counts (`commit`), or wait for an answer that does not come: what cannot be told is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from elasticd.agent.transfer import tell_has, tell_holds
from elasticd.errors import ElasticdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.kv.types import TLSFiles
    from elasticd.rendezvous.records import GenerationRecord, MemberRecord, SnapshotRef

log = structlog.get_logger("elasticd.agent.state")


class Holders:
    """See the module. For the state thread.

    Args:
        scope: of the job's keys.
        node: this one.
        tls: what peers know each other by.
    """

    def __init__(self, scope: str, node: str, tls: TLSFiles | None) -> None:
        self._scope = scope
        self._node = node
        self._tls = tls
        self._lookup: Callable[[str], MemberRecord | None] = lambda _node: None

    def attach(self, lookup: Callable[[str], MemberRecord | None]) -> None:
        """How a node's member is found; it may raise KVError."""
        self._lookup = lookup

    def tell_first(self, generation: GenerationRecord, ref: SnapshotRef) -> None:
        """Tell rank 0's agent that this node has written it too."""

        def tell(address: str, port: int, **known: Any) -> None:
            tell_holds(address, port, generation=ref.generation, step=ref.step, digest=ref.digest, **known)

        self._tell(generation.members[0].id.node, "holder_not_told", tell)

    def tell_leavers(self, generation: GenerationRecord) -> None:
        """Those who stay only because somebody may need their state hear that this node has it (PROTOCOL 18)."""
        resume = generation.resume
        if resume is None:
            return

        def tell(address: str, port: int, **known: Any) -> None:
            tell_has(address, port, digest=resume.digest, **known)

        for node in set(resume.holders) - {identity.node for identity in generation.ids}:
            self._tell(node, "leaver_not_told", tell)

    def _tell(self, node: str, failed: str, tell: Callable[..., None]) -> None:
        try:
            record = self._lookup(node)
            if record is not None and record.state_port is not None:
                tell(record.address, record.state_port, scope=self._scope, node=self._node, tls=self._tls)
        except (ElasticdError, OSError) as error:
            log.warning(failed, node=node, why=str(error))
