"""What etcd wants of this node.

Owns: which keys are read, in one read at one revision, and the watch that tells of a change. Must not: decide, or write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from elasticd.daemon.reconcile import JobWanted, Policy
from elasticd.errors import KVError, RecordError
from elasticd.kv.types import KeyValue, Listing, WatchBatch, WatchRange
from elasticd.rendezvous.records import GenerationState, NodePolicyRecord, RequestKind, parse
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from elasticd.kv import EtcdKV, Watch
    from elasticd.rendezvous.keys import ClusterKeys, JobKeys

log = structlog.get_logger("elasticd.daemon")

_PEERS_MAX = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What etcd wants of this node at one revision.

    Attributes:
        own: this node's key as it stands, whoever wrote it.
        policy_key: the key of the policy as it stands.
        checkpoints: job -> a number that grows with each checkpoint asked of the generation that trains.
        stopping: jobs that are to stop and have not ended.
        problems: keys that hold garbage.
    """

    revision: int = 0
    own: KeyValue | None = None
    policy_key: KeyValue | None = None
    policy: Policy = field(default_factory=Policy)
    jobs: Mapping[str, JobWanted] = field(default_factory=dict)
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    stopping: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _PeerSeen:
    """An agent of another node, in a generation that trains."""

    key: str
    address: str
    port: int


class Lookout:
    """Reads this node's outlook, and wakes somebody when it changes.

    Args:
        on_change: called on the watch's thread.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, node: str, on_change: Callable[[], None]) -> None:
        self._kv = kv
        self._keys = keys
        self._node = node
        self._on_change = on_change
        self._watch: Watch | None = None
        self._watched: frozenset[str] = frozenset()
        self._ledgers: dict[str, Ledger] = {}
        self._policy = Policy()
        self._peers: tuple[_PeerSeen, ...] = ()

    def read(self, jobs: Sequence[str]) -> Outlook:
        """Look now.

        Args:
            jobs: those that this node may run or runs.

        Raises:
            KVError: etcd does not answer, or refuses.
        """
        names = {job: _keys_of(self._keys.job(job)) for job in jobs}
        own, policy = self._keys.node(self._node), self._keys.policy(self._node)
        listing = self._read([own, policy, *(key for keys in names.values() for key in keys)])
        found = {item.key: item for item in listing.items}
        problems: list[str] = []
        self._take_policy(found.get(policy), problems)
        views = {job: self._view(job, keys, found, listing.revision) for job, keys in names.items()}
        for view in views.values():
            problems += view.problems.values()
        self._peers = tuple(
            _PeerSeen(key=self._keys.job(job).member(one.id.node), address=one.address, port=one.probe_port)
            for job, view in views.items()
            if view.active
            for one in view.active.members
            if one.id.node != self._node
        )
        self._follow(frozenset(jobs), listing.revision + 1)
        return Outlook(
            revision=listing.revision,
            own=found.get(own),
            policy_key=found.get(policy),
            policy=self._policy,
            jobs={job: JobWanted(target=view.target.record if view.target else None, over=_over(view), failed=_failed(view)) for job, view in views.items()},
            checkpoints={job: request for job, view in views.items() if (request := _checkpoint(view, found, self._keys.job(job)))},
            stopping=frozenset(job for job, view in views.items() if view.active and view.target and not view.target.record.run),
            problems=tuple(problems),
        )

    def living_peers(self) -> list[tuple[str, int]]:
        """(address, port) of agents of other nodes that train: in the generation as last read, and with a lease now. From any thread.

        A generation outlives its members: after a power cut of them all it names agents that are no more. Only the first so many are looked at; none
        if etcd does not answer, for then there is nothing to find out.
        """
        some = self._peers[:_PEERS_MAX]
        try:
            live = {item.key for item in self._kv.get_many([one.key for one in some]).items} if some else set()
        except KVError:
            return []
        return [(one.address, one.port) for one in some if one.key in live]

    def close(self) -> None:
        """End the watch."""
        if self._watch:
            self._watch.close()

    def _read(self, keys: Sequence[str]) -> Listing:
        """In pieces that one transaction may hold; a change in between is seen by the watch, which begins before the last piece."""
        items: list[KeyValue] = []
        revision = 0
        for start in range(0, len(keys), 100):
            listing = self._kv.get_many(keys[start : start + 100])
            revision = revision or listing.revision
            items += listing.items
        return Listing(revision=revision, items=tuple(items))

    def _take_policy(self, item: KeyValue | None, problems: list[str]) -> None:
        """Garbage changes nothing: what was last understood goes on."""
        if item is None:
            self._policy = Policy()
            return
        try:
            record = parse(NodePolicyRecord, item.key, item.value, self._keys.scope)
        except RecordError as error:
            problems.append(error.message)
            return
        self._policy = Policy(cordoned=record.cordoned, draining=record.draining, reason=record.reason, until=record.until)

    def _view(self, job: str, keys: Sequence[str], found: Mapping[str, KeyValue], revision: int) -> View:
        ledger = self._ledgers.setdefault(job, Ledger(self._keys.job(job)))
        ledger.load(Listing(revision=revision, items=tuple(found[key] for key in keys if key in found)))
        return ledger.view()

    def _follow(self, jobs: frozenset[str], revision: int) -> None:
        if self._watch is not None and jobs == self._watched:
            return
        if self._watch:
            self._watch.close()
        keys = [self._keys.policy(self._node), self._keys.node(self._node), *(key for job in jobs for key in _keys_of(self._keys.job(job)))]
        self._watch = self._kv.watch([WatchRange(key=key) for key in keys], revision, self._on_batch)
        self._watched = jobs

    def _on_batch(self, batch: WatchBatch) -> None:
        if batch.events or batch.reset:
            self._on_change()


def _keys_of(keys: JobKeys) -> tuple[str, ...]:
    return keys.target, keys.generation, keys.request(RequestKind.CHECKPOINT.value)


def _over(view: View) -> str:
    if not view.over or view.generation is None:
        return ""
    record = view.generation.record
    return f"{record.state.value} at generation {record.number}: {record.reason}"


def _failed(view: View) -> bool:
    return view.over and view.generation is not None and view.generation.record.state is GenerationState.FAILED


def _checkpoint(view: View, found: Mapping[str, KeyValue], keys: JobKeys) -> int:
    item = found.get(keys.request(RequestKind.CHECKPOINT.value))
    return item.mod_revision if item and view.asked(RequestKind.CHECKPOINT) else 0
