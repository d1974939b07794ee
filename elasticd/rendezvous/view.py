"""What etcd says about one job, parsed: the only input that decisions have.

Owns: turning keys and watch events into a `View`, and remembering the last good value of a key that holds garbage. Must not: decide or write.

Garbage never ends a job: a key that cannot be believed keeps its last good value as long as it is the same key (same create revision), is
named in `problems`, and is put right by whoever owns it. Nor does removing one of the three keys that are never removed by the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Generic, TypeVar

from elasticd.errors import RecordError
from elasticd.kv.types import EventKind, KeyValue, Listing, WatchBatch
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.records import (
    BudgetRecord,
    CheckpointRecord,
    EventRecord,
    GenerationRecord,
    MemberId,
    MemberRecord,
    PolicyRecord,
    ProposalRecord,
    Record,
    RequestKind,
    RequestRecord,
    TargetRecord,
    Verdict,
    parse,
)

R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)


@dataclass(frozen=True, slots=True)
class Keyed(Generic[R_co]):
    """A record and the revisions of its key."""

    record: R_co
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class View:
    """One job at one revision.

    A key that never existed is None. `problems` says what is wrong with a key; `damaged` holds its mod revision, 0 if it was removed;
    `repairable` names those of which every write since the good value was seen, so that putting that back undoes no newer one.
    """

    revision: int
    target: Keyed[TargetRecord] | None = None
    proposal: Keyed[ProposalRecord] | None = None
    generation: Keyed[GenerationRecord] | None = None
    budget: Keyed[BudgetRecord] | None = None
    checkpoint: Keyed[CheckpointRecord] | None = None
    policy: Keyed[PolicyRecord] | None = None
    members: Mapping[str, Keyed[MemberRecord]] = field(default_factory=dict)
    requests: Mapping[RequestKind, RequestRecord] = field(default_factory=dict)
    events: tuple[EventRecord, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    repairable: frozenset[str] = frozenset()

    @cached_property
    def present(self) -> Mapping[MemberId, Keyed[MemberRecord]]:
        """Members by identity."""
        return MappingProxyType({keyed.record.id: keyed for keyed in self.members.values()})

    @cached_property
    def able(self) -> frozenset[MemberId]:
        """Members that do not ask to be left out."""
        return frozenset(keyed.record.id for keyed in self.members.values() if not keyed.record.leaving)

    @property
    def number(self) -> int:
        """Number of the last generation, 0 before the first."""
        return self.generation.record.number if self.generation else 0

    @property
    def pending(self) -> Keyed[ProposalRecord] | None:
        """The proposal, if it is newer than the generation, and not left over from before the job ended."""
        if self.proposal is None or self.proposal.record.number <= self.number:
            return None
        if self.generation and self.generation.record.ended and self.proposal.mod_revision < self.generation.mod_revision:
            return None
        return self.proposal

    @property
    def active(self) -> GenerationRecord | None:
        """The generation that trains, if one does."""
        if self.generation and not self.generation.record.ended:
            return self.generation.record
        return None

    @property
    def reopened(self) -> bool:
        """Whether an operator wrote `target` after the job ended, asking it to run again (PROTOCOL 19)."""
        return bool(
            self.generation
            and self.generation.record.ended
            and self.target
            and self.target.record.run
            and self.target.mod_revision > self.generation.mod_revision
        )

    @property
    def over(self) -> bool:
        """Whether the job has ended and nobody reopened it."""
        return bool(self.generation and self.generation.record.ended and not self.reopened)

    def asked(self, kind: RequestKind) -> RequestRecord | None:
        """What is asked of the generation that trains; what was asked of an earlier one is void."""
        request = self.requests.get(kind)
        return request if request and self.active and request.generation == self.active.number else None

    @property
    def verdict(self) -> Verdict | None:
        """On the active generation, if it has been judged."""
        verdict = self.policy.record.verdict if self.policy else None
        return verdict if verdict and self.active and verdict.generation == self.active.number else None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Incarnation -> why, of agents that are to be in no further generation."""
        before = self.generation.record.without if self.generation else {}
        return {**before, **self.verdict.without} if self.verdict else before

    @property
    def restarts_used(self) -> int:
        """Restarts charged to the budget."""
        return self.budget.record.used if self.budget else 0


_SINGLE: Mapping[str, type[Record]] = {
    "target": TargetRecord,
    "proposal": ProposalRecord,
    "generation": GenerationRecord,
    "budget": BudgetRecord,
    "checkpoint": CheckpointRecord,
    "policy": PolicyRecord,
}


class Ledger:
    """Keeps the parsed keys of one job up to date from listings and watch batches, and hands out views."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._revision = 0
        self._listed = 0
        self._good: dict[str, Keyed[Record]] = {}
        self._problems: dict[str, str] = {}
        self._damaged: dict[str, int] = {}
        self._created: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._followed: set[str] = set()
        self._view: View | None = None

    def known(self, keys: Sequence[str]) -> dict[str, int] | None:
        """The mod revision under which each of `keys` is known, 0 if it is absent; None if more than `keys` is known, or nothing yet."""
        known = {key: keyed.mod_revision for key, keyed in self._good.items()} | self._damaged
        return {key: known.get(key, 0) for key in keys} if known and known.keys() <= set(keys) else None

    def load(self, listing: Listing) -> None:
        """Replace everything by a full listing of the job's prefix, or of what this member looks at."""
        if listing.unchanged:
            self._revision = self._listed = listing.revision
            self._view = None
            return
        present = {item.key for item in listing.items}
        for key in [key for key in (*self._good, *self._problems) if key not in present]:
            if self._damaged.get(key) != 0:
                self._followed.discard(key)  # what happened to it before it went, nobody here saw
            self._forget(key)
        for item in listing.items:
            self._put(item)
        self._revision = self._listed = listing.revision
        self._view = None

    def apply(self, batch: WatchBatch) -> None:
        """Apply changes in order; those already known from a later listing are skipped."""
        if batch.reset:
            self.load(Listing(revision=batch.revision, items=tuple(event.item for event in batch.events)))
            return
        for event in batch.events:
            if event.item.mod_revision <= self._listed:
                continue
            if event.kind is EventKind.DELETE:
                self._forget(event.item.key)
            else:
                self._put(event.item)
            self._view = None
        # A watcher that catches up is told the store's revision before it has all events up to it: only the events themselves prove.
        proven = max((event.item.mod_revision for event in batch.events), default=batch.revision)
        if proven > self._revision:
            self._revision = proven
            self._view = None

    def create_revision(self, key: str) -> int:
        """When `key` was created, whatever it holds; 0 if it is not there."""
        return self._created.get(key, 0)

    def _forget(self, key: str) -> None:
        self._created.pop(key, None)
        if key in (self._keys.target, self._keys.proposal, self._keys.generation) and key in self._good:
            self._problems[key] = f"{key}: was removed"
            self._damaged[key] = 0
            self._versions[key] = 0
            return
        self._good.pop(key, None)
        self._problems.pop(key, None)
        self._damaged.pop(key, None)

    def _put(self, item: KeyValue) -> None:
        self._created[item.key] = item.create_revision
        if item.version not in (self._versions.get(item.key), self._versions.get(item.key, -1) + 1):
            self._followed.discard(item.key)
        self._versions[item.key] = item.version
        model = self._model(item.key)
        if model is None:
            self._problems[item.key] = f"{item.key}: not a key of this job's layout"
            return
        known = self._good.get(item.key)
        if known and known.mod_revision == item.mod_revision:
            return
        try:
            record = parse(model, item.key, item.value, self._keys.scope)
            if isinstance(record, MemberRecord) and self._keys.members + record.id.node != item.key:
                msg = f"{item.key}: holds the record of node {record.id.node!r}"
                raise RecordError(msg)
            if isinstance(record, RequestRecord) and self._keys.requests + record.kind.value != item.key:
                msg = f"{item.key}: holds a request of kind {record.kind.value!r}"
                raise RecordError(msg)
        except RecordError as error:
            self._problems[item.key] = error.message
            self._damaged[item.key] = item.mod_revision
            if known and known.create_revision != item.create_revision:
                del self._good[item.key]
            return
        self._problems.pop(item.key, None)
        self._damaged.pop(item.key, None)
        self._good[item.key] = Keyed(record, item.create_revision, item.mod_revision, item.lease)
        self._followed.add(item.key)

    def _model(self, key: str) -> type[Record] | None:
        if key.startswith(self._keys.members):
            return MemberRecord
        if key.startswith(self._keys.events):
            return EventRecord
        if key.startswith(self._keys.requests):
            return RequestRecord
        return _SINGLE.get(key.removeprefix(self._keys.prefix))

    def _single(self, key: str, model: type[R]) -> Keyed[R] | None:
        keyed = self._good.get(key)
        if keyed is None or not isinstance(keyed.record, model):
            return None
        return keyed  # type: ignore[return-value]  # the isinstance above narrows the record, which mypy does not carry to Keyed

    def view(self) -> View:
        """The job as known now."""
        if self._view is None:
            self._view = self._build()
        return self._view

    def _build(self) -> View:
        members: dict[str, Keyed[MemberRecord]] = {}
        events: list[EventRecord] = []
        requests: dict[RequestKind, RequestRecord] = {}
        for key, keyed in self._good.items():
            if isinstance(keyed.record, MemberRecord):
                members[keyed.record.id.node] = keyed  # type: ignore[assignment]  # as in _single
            elif isinstance(keyed.record, EventRecord) and key.startswith(self._keys.events):
                events.append(keyed.record)
            elif isinstance(keyed.record, RequestRecord):
                requests[keyed.record.kind] = keyed.record
        return View(
            revision=self._revision,
            target=self._single(self._keys.target, TargetRecord),
            proposal=self._single(self._keys.proposal, ProposalRecord),
            generation=self._single(self._keys.generation, GenerationRecord),
            budget=self._single(self._keys.budget, BudgetRecord),
            checkpoint=self._single(self._keys.checkpoint, CheckpointRecord),
            policy=self._single(self._keys.policy, PolicyRecord),
            members=MappingProxyType(members),
            requests=MappingProxyType(requests),
            events=tuple(sorted(events, key=lambda event: event.number)),
            problems=MappingProxyType(dict(self._problems)),
            damaged=MappingProxyType(dict(self._damaged)),
            repairable=frozenset(self._followed.intersection(self._damaged)),
        )
