"""What operators may change: each change read, decided and written by compare-and-set.

Owns: start, stop, scale, pause, resume, checkpoint, restart, configure, cordon, drain and uncordon, as transactions. Must not: know HTTP, or touch anything but
etcd: daemons and agents see there what is wanted.

A change reads, decides and writes only if what it read still holds, and begins again if it does not; so two operators never undo each other unseen.
Whoever must know what he changes gives the revision that he has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from elasticd.daemon import wanted
from elasticd.daemon.audit import Audit, Caller
from elasticd.daemon.configuring import all_kept, changed, check_change
from elasticd.errors import AccessDeniedError, ConflictError, KVPermissionError, KVUnavailableError, NotAllowedError, NotRunningError, RecordError, RefusedError
from elasticd.kv.types import Compare, Delete, KeyValue, Put, Target
from elasticd.policy.budgets import Ledger as Deeds
from elasticd.rendezvous import transitions
from elasticd.rendezvous.records import (
    ACKS_MAX,
    TEXT_MAX,
    ConfigRecord,
    IncidentsRecord,
    NodeJobState,
    NodePolicyRecord,
    NodeRecord,
    PolicyRecord,
    RequestKind,
    RequestRecord,
    TargetRecord,
    parse,
)
from elasticd.rendezvous.transitions import Txn, unchanged
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.jobs import JobSpec
    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import ClusterKeys, JobKeys

_ATTEMPTS: Final = 8
"""Races that a change may lose: each is lost to somebody who wrote, so they end."""

Shape = Mapping[str, Any]
"""What is changed, as JSON has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a change did.

    Attributes:
        changed: false: it was so already.
        before: what was, None if nothing was.
        after: what is, or would be with `dry_run`.
        generation: the generation that was active.
        revision: etcd's, of the write, or of the read if nothing was written.
    """

    changed: bool
    job: str | None = None
    node: str | None = None
    before: Shape | None
    after: Shape | None
    generation: int | None = None
    dry_run: bool = False
    revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What is to be written, None if it is so already, and what that was decided on."""

    txn: Txn | None
    before: Shape | None
    after: Shape | None
    revision: int
    generation: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One job as it was read: what changes look at, and no members."""

    keys: JobKeys
    view: View
    items: Mapping[str, KeyValue]

    @property
    def target(self) -> TargetRecord:
        """What is wanted now.

        Raises:
            NotRunningError: there is no such job.
            RefusedError: the key holds garbage.
        """
        if self.view.target is not None:
            return self.view.target.record
        if self.keys.target in self.view.problems:
            raise RefusedError(f"what is wanted of job {self.keys.job!r} is unusable: {self.view.problems[self.keys.target]}", remedy="start the job anew")
        raise NotRunningError(f"there is no job {self.keys.job!r} in cluster {self.keys.cluster!r}", remedy="start it with: elasticctl start")

    @property
    def open_target(self) -> TargetRecord:
        """The same, of a job that has not ended: writing the target of one that has would start it again.

        Raises:
            NotRunningError, RefusedError: as `target`; or the job has ended, or is stopping.
        """
        target = self.target
        if self.view.over and self.view.generation:
            how = self.view.generation.record.state.value
            raise NotRunningError(f"job {self.keys.job!r} has ended: {how}", remedy="elasticctl start --again starts it anew")
        if not target.run:
            raise RefusedError(f"job {self.keys.job!r} is to stop", remedy="elasticctl start starts it again")
        return target

    def step(self, old: TargetRecord | None, new: TargetRecord, *, write: bool = True, anew: bool = False) -> _Step:
        """Write the target, unless anybody wrote it since, or the job ended or went on to another generation."""
        change = (transitions.reopen if anew else transitions.write_target)(self.keys, self.items.get(self.keys.target), new)
        txn = Txn((*change.compares, unchanged(self.keys.generation, self.view.generation)), change.ops)
        active = self.view.active.number if self.view.active else None
        return _Step(txn=txn if write else None, before=wanted.shape(old), after=wanted.shape(new), revision=self.view.revision, generation=active)


class Operations:
    """Makes changes for the API. Thread-safe.

    Every change raises, besides what it says itself: AccessDeniedError, the caller may only read; ConflictError, others were faster again and again;
    UsageError, a name is not usable; KVError, etcd refuses, or does not answer, and then the change may have been made all the same.

    Args:
        kv: this node's connection; reads.
        operator_kv: the connection that may write what is operators'.
        keys: the cluster.
        board: what this node allows; its loop is woken after a change.
    """

    def __init__(self, kv: EtcdKV, operator_kv: EtcdKV, keys: ClusterKeys, board: Board) -> None:
        self.kv = kv
        self.keys = keys
        self.board = board
        self._operator_kv = operator_kv
        self._audit = Audit(operator_kv, keys, board.node)

    # --- jobs ------------------------------------------------------------------------------------------------------------

    def start(
        self,
        caller: Caller,
        job: str,
        *,
        nodes: int | None = None,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        max_restarts: int | None = None,
        parameters: Mapping[str, object] | None = None,
        reason: str = "",
        again: bool = False,
    ) -> Change:
        """The job is to run. Sizes and parameters that are not given stay as they were, or come from the job file.

        Args:
            again: start it although it has ended, or is stopping; its restart budget is whole again.

        Raises:
            NotAllowedError: no node that is up has a job file of that name.
            RefusedError: it runs already, or has ended and `again` is not given, or the size is out of bounds.
            UsageError: a parameter is unknown or not allowed, or nothing says how large the job is to be.
        """
        sizes = wanted.Sizes(nodes=nodes, min_nodes=min_nodes, max_nodes=max_nodes, max_restarts=max_restarts)

        def decide() -> _Step:
            seen = self._job(job)
            spec = self._allowed(job)
            anew = wanted.may_start(seen.view, job=job, again=again)
            old = seen.view.target.record if seen.view.target else None
            new = wanted.started(old, spec, sizes, scope=seen.keys.scope, job=job, parameters=parameters, reason=reason, by=str(caller))
            return seen.step(old, new, anew=anew)

        return self._change(caller, "start", decide, job=job, reason=reason)

    def stop(self, caller: Caller, job: str, *, reason: str = "") -> Change:
        """The job is to stop in order. One that has ended, or is stopping, is so already.

        Raises:
            NotRunningError: there is no such job.
        """

        def decide() -> _Step:
            seen = self._job(job)
            old = seen.target
            new = old.model_copy(update={"run": False, "reason": reason or f"stopped by {caller}", "by": str(caller)})
            return seen.step(old, new, write=old.run and not seen.view.over)

        return self._change(caller, "stop", decide, job=job, reason=reason)

    def scale(
        self,
        caller: Caller,
        job: str,
        *,
        nodes: int,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        if_revision: int | None = None,
        dry_run: bool = False,
        reason: str = "",
    ) -> Change:
        """So many nodes are wanted.

        Args:
            if_revision: only if the target's mod revision is still this one.
            dry_run: decide, and write nothing.

        Raises:
            ConflictError: `if_revision` is not the current one.
            RefusedError: the job is paused or stopping, or not min_nodes <= nodes <= max_nodes.
            NotRunningError: there is no such job, or it has ended.
        """
        sizes = wanted.Sizes(nodes=nodes, min_nodes=min_nodes, max_nodes=max_nodes)

        def decide() -> _Step:
            seen = self._job(job)
            old = seen.open_target
            revision = seen.view.target.mod_revision if seen.view.target else 0
            if if_revision is not None and if_revision != revision:
                who = f" by {old.by}" if old.by else ""
                raise ConflictError(f"what is wanted of job {job!r} was changed{who}: at revision {revision}, not {if_revision}", remedy="look, then ask again")
            new = wanted.scaled(old, sizes, job=job, reason=reason, by=str(caller))
            return seen.step(old, new, write=not wanted.same(old, new))

        return self._change(caller, "scale", decide, job=job, reason=reason, dry_run=dry_run)

    def pause(self, caller: Caller, job: str, *, reason: str) -> Change:
        """Nothing of the job is changed of free will; recovery goes on.

        Raises:
            NotRunningError: there is no such job, or it has ended.
            RefusedError: it is stopping.
        """
        return self._set_paused(caller, "pause", job, paused=True, reason=reason)

    def resume(self, caller: Caller, job: str, *, reason: str = "") -> Change:
        """The end of a pause.

        Raises:
            NotRunningError, RefusedError: as `pause`.
        """
        return self._set_paused(caller, "resume", job, paused=False, reason=reason)

    def checkpoint(self, caller: Caller, job: str, *, reason: str = "") -> Change:
        """Ask the generation that trains for a checkpoint. Each time is a new one.

        Raises:
            NotRunningError: there is no such job, or it does not train.
        """
        return self._request(caller, job, RequestKind.CHECKPOINT, reason)

    def restart(self, caller: Caller, job: str, *, reason: str) -> Change:
        """Ask the generation that trains to stop in order, and for the next one. Asked twice of one generation, it is done once.

        Raises:
            NotRunningError: there is no such job, or it does not train.
        """
        return self._request(caller, job, RequestKind.RESTART, reason)

    def acknowledge(self, caller: Caller, job: str, incident: str, *, reason: str = "") -> Change:
        """An operator sees to an incident: nothing more is done about it of free will, and nobody is alerted.

        Raises:
            NotRunningError: no node knows such an incident.
            RefusedError: what was decided about the job cannot be read.
        """
        keys = self.keys.job(job)

        def decide() -> _Step:
            listing = self.kv.get_many([keys.policy])
            item = listing.items[0] if listing.items else None
            record = _policy_of(item, keys)
            known = {str(one.get("about")) for one in record.decisions} | self._incidents(job)
            if incident not in known:
                raise NotRunningError(f"no node knows an incident {incident!r} of job {job!r}", remedy=f"see: elasticctl anomalies {job} --all")
            said = f"{caller}{': ' + reason if reason else ''}"[:TEXT_MAX]
            acks = {**{name: word for name, word in record.acks.items() if name != incident}, incident: said}
            new = record.model_copy(update={"acks": dict(list(acks.items())[-ACKS_MAX:])})
            compare = Compare(key=keys.policy, target=Target.MOD, op="==", value=item.mod_revision if item else 0)
            txn = Txn((compare,), (Put(key=keys.policy, value=new.to_bytes()),))
            before = record.acks.get(incident)
            return _Step(
                txn=txn if before is None else None,
                before={"acknowledged": before} if before is not None else None,
                after={"acknowledged": said},
                revision=listing.revision,
            )

        return self._change(caller, "ack", decide, job=job, reason=reason)

    def _incidents(self, job: str) -> set[str]:
        """Names of those that daemons tell of."""
        found: set[str] = set()
        for item in self.kv.list(self.keys.incidents_of_job(job)).items:
            try:
                found |= {str(one.get("id")) for one in parse(IncidentsRecord, item.key, item.value, self.keys.job(job).scope).incidents}
            except RecordError:
                continue
        return found

    # --- settings of training ---------------------------------------------------------------------------------------------

    def configure(
        self,
        caller: Caller,
        job: str | None,
        *,
        give: Mapping[str, object] | None = None,
        take: Sequence[str] = (),
        if_revision: int | None = None,
        dry_run: bool = False,
        reason: str = "",
    ) -> Change:
        """Settings of training for one job, or with None for all; they count from a job's next generation on.

        Args:
            give: values to set, by name; text is taken for what a command line means by it.
            take: names that are not to be set any more.
            if_revision: only if the key's mod revision is still this one; 0: only if nobody has set anything.
            dry_run: decide, and write nothing.

        Raises:
            ConflictError: `if_revision` is not the current one.
            NotAllowedError: there is no such job, and no node that is up has a job file of that name.
            RefusedError: a setting is not for etcd.
            UsageError: one is unknown, a value is not allowed, or two would not fit each other.
        """
        key, scope = (self.keys.config_of_cluster, self.keys.scope) if job is None else (self.keys.config_of_job(job), self.keys.job(job).scope)

        def decide() -> _Step:
            if job is not None and self._job(job).view.target is None:
                self._allowed(job)
            kept = all_kept(self.kv.list(self.keys.config), self.keys)
            old = kept.of(job)
            if if_revision is not None and if_revision != old.revision:
                who = f" by {old.record.by}" if old.record and old.record.by else ""
                raise ConflictError(f"{key} was changed{who}: it is at revision {old.revision}, not {if_revision}", remedy="look, then ask again")
            values = changed(old.values, job, give or {}, take)
            check_change(kept, kept.with_values(job, scope, values), job, self.board)
            record = ConfigRecord(scope=scope, values=values, reason=reason, by=str(caller), at=time.time())
            # Whether it fits was decided on all of them. The second does not see deletions, which are nobody's business here; the first does.
            compares = (
                Compare(key=key, target=Target.MOD, op="==", value=old.revision),
                Compare(key=self.keys.config, target=Target.MOD, op="<", value=kept.revision + 1, prefix=True),
            )
            txn = None if values == old.values and not old.problem else Txn(compares, (Put(key=key, value=record.to_bytes()),))
            return _Step(txn=txn, before=old.values, after=values, revision=kept.revision)

        return self._change(caller, "configure", decide, job=job, reason=reason, dry_run=dry_run)

    # --- nodes -----------------------------------------------------------------------------------------------------------

    def cordon(self, caller: Caller, node: str, *, reason: str) -> Change:
        """Nothing new is started on the node. One that is drained is so already.

        Raises:
            NotRunningError: there is no such node.
        """
        return self._keep_out(caller, "cordon", node, draining=False, reason=reason)

    def drain(self, caller: Caller, node: str, *, reason: str) -> Change:
        """The node's agents leave their jobs, and none is started.

        Raises:
            NotRunningError: there is no such node.
        """
        return self._keep_out(caller, "drain", node, draining=True, reason=reason)

    def uncordon(self, caller: Caller, node: str, *, reason: str = "") -> Change:
        """The end of both.

        Raises:
            NotRunningError: there is no such node.
        """

        def decide() -> _Step:
            item, revision = self._policy(node)
            key = self.keys.policy(node)
            txn = Txn((Compare(key=key, target=Target.MOD, op="==", value=item.mod_revision),), (Delete(key=key),)) if item else None
            return _Step(txn=txn, before=_policy_shape(self._policy_record(item)), after=None, revision=revision)

        return self._change(caller, "uncordon", decide, node=node, reason=reason)

    # --- one change ------------------------------------------------------------------------------------------------------

    def _change(
        self,
        caller: Caller,
        action: str,
        decide: Callable[[], _Step],
        *,
        job: str | None = None,
        node: str | None = None,
        reason: str,
        dry_run: bool = False,
    ) -> Change:
        if not caller.may_change:
            raise AccessDeniedError(f"{caller} may read, not change", remedy="ask an operator")
        subject = f"job/{job}" if job is not None else f"node/{node}" if node is not None else f"cluster/{self.keys.cluster}"
        for _ in range(_ATTEMPTS):
            step = decide()
            after = step.after if step.txn else step.before
            change = Change(
                changed=step.txn is not None,
                job=job,
                node=node,
                before=step.before,
                after=after,
                generation=step.generation,
                dry_run=dry_run,
                revision=step.revision,
            )
            if step.txn is None or dry_run:
                return change
            try:
                result = self._operator_kv.txn(step.txn.compares, step.txn.ops)
            except KVUnavailableError:
                self._audit.unsure(caller, action, subject)
                raise
            except KVPermissionError as error:
                remedy = f"this node's operator certificate needs the role: deploy/etcd/roles.py --job {job}" if job else "see deploy/etcd/roles.py"
                raise KVPermissionError(f"etcd does not let the API change {subject}: {error.message}", remedy=remedy) from None
            if result.succeeded:
                self._audit.done(caller, action, subject, _difference(change, reason))
                self.board.wake()
                return replace(change, revision=result.revision)
        raise ConflictError(f"{subject} is being changed by others again and again", remedy="try again")

    # --- jobs, in detail -------------------------------------------------------------------------------------------------

    def _job(self, job: str, *kinds: RequestKind) -> _Job:
        keys = self.keys.job(job)
        listing = self.kv.get_many([keys.target, keys.generation, *(keys.request(kind.value) for kind in kinds)])
        ledger = Ledger(keys)
        ledger.load(listing)
        view = ledger.view()
        if view.generation is None and keys.generation in view.problems:
            # Whether it has ended is not known then, and a write might start it again.
            raise RefusedError(f"how job {job!r} stands is unusable: {view.problems[keys.generation]}", remedy="its agents put that right; try again")
        return _Job(keys=keys, view=view, items={item.key: item for item in listing.items})

    def _allowed(self, job: str) -> JobSpec | None:
        """The job file where this node has it, None where another node that is up has.

        Raises:
            NotAllowedError: none has one that is believed.
        """
        spec = self.board.turn.allowed.get(job)
        if spec is not None:
            return spec
        refused: dict[str, str] = {}
        for item in self.kv.list(self.keys.nodes).items:
            try:
                record = parse(NodeRecord, item.key, item.value, self.keys.scope)
            except RecordError:
                continue
            for known in record.jobs:
                if known.name == job and known.state is not NodeJobState.REFUSED:
                    return None
                if known.name == job:
                    refused[record.node] = known.why
        if refused:
            node, why = min(refused.items())
            more = f"; {len(refused) - 1} more of them refuse it" if len(refused) > 1 else ""
            raise NotAllowedError(f"the file of job {job!r} is refused on {node}: {why}{more}", remedy="elasticd check-config, on that node, says so too")
        remedy = f"put {job}.toml into jobs.d of the nodes that may run it"
        raise NotAllowedError(f"no node of cluster {self.keys.cluster!r} that is up has a job file {job!r}", remedy=remedy)

    def _set_paused(self, caller: Caller, action: str, job: str, *, paused: bool, reason: str) -> Change:
        def decide() -> _Step:
            seen = self._job(job)
            old = seen.open_target
            new = old.model_copy(update={"paused": paused, "reason": reason, "by": str(caller)})
            return seen.step(old, new, write=old.paused != paused)

        return self._change(caller, action, decide, job=job, reason=reason)

    def _request(self, caller: Caller, job: str, kind: RequestKind, reason: str) -> Change:
        def decide() -> _Step:
            seen = self._job(job, kind)
            generation = seen.view.generation
            if generation is None or seen.view.active is None:
                _ = seen.target  # says so if there is no such job
                raise NotRunningError(f"job {job!r} does not train now", remedy=f"see: elasticctl status {job}")
            number = generation.record.number
            asked = seen.view.asked(kind)
            new = RequestRecord(scope=seen.keys.scope, kind=kind, generation=number, reason=reason, by=str(caller), at=time.time())
            txn = transitions.request(seen.keys, new, seen.items.get(seen.keys.request(kind.value)), generation)
            so_already = asked is not None and kind is RequestKind.RESTART
            return _Step(
                txn=None if so_already else txn,
                before=_request_shape(asked) if asked else None,
                after=_request_shape(new),
                revision=seen.view.revision,
                generation=number,
            )

        return self._change(caller, kind.value, decide, job=job, reason=reason)

    # --- nodes, in detail ------------------------------------------------------------------------------------------------

    def _keep_out(self, caller: Caller, action: str, node: str, *, draining: bool, reason: str) -> Change:
        def decide() -> _Step:
            item, revision = self._policy(node)
            key = self.keys.policy(node)
            old = self._policy_record(item)
            so_already = old is not None and (old.draining or (old.cordoned and not draining))
            new = NodePolicyRecord(scope=self.keys.scope, cordoned=True, draining=draining, reason=reason, by=str(caller), at=time.time())
            compare = Compare(key=key, target=Target.MOD, op="==", value=item.mod_revision if item else 0)
            txn = None if so_already else Txn((compare,), (Put(key=key, value=new.to_bytes()),))
            return _Step(txn=txn, before=_policy_shape(old), after=_policy_shape(new), revision=revision)

        return self._change(caller, action, decide, node=node, reason=reason)

    def _policy(self, node: str) -> tuple[KeyValue | None, int]:
        """The node's policy key, and the revision of the read.

        Raises:
            NotRunningError: neither a daemon nor an operator has spoken of such a node.
        """
        key = self.keys.policy(node)
        listing = self.kv.get_many([key, self.keys.node(node)])
        if not listing.items:
            raise NotRunningError(f"there is no node {node!r} in cluster {self.keys.cluster!r}", remedy="see: elasticctl nodes")
        return next((item for item in listing.items if item.key == key), None), listing.revision

    def _policy_record(self, item: KeyValue | None) -> NodePolicyRecord | None:
        try:
            return parse(NodePolicyRecord, item.key, item.value, self.keys.scope) if item else None
        except RecordError:
            return None  # garbage is replaced


def _policy_of(item: KeyValue | None, keys: JobKeys) -> PolicyRecord:
    """What was decided about a job so far.

    Raises:
        RefusedError: it cannot be read; to write it anew would forget what was done.
    """
    if item is None:
        return PolicyRecord(scope=keys.scope, ledger=Deeds().as_dict())
    try:
        return parse(PolicyRecord, item.key, item.value, keys.scope)
    except RecordError as error:
        raise RefusedError(f"what was decided about job {keys.job!r} cannot be read: {error.message}", remedy=f"look at {item.key} in etcd") from None


def _policy_shape(record: NodePolicyRecord | None) -> Shape | None:
    return {"cordoned": record.cordoned, "draining": record.draining, "reason": record.reason, "by": record.by} if record else None


def _request_shape(record: RequestRecord) -> Shape:
    return {"generation": record.generation, "reason": record.reason, "by": record.by}


def _difference(change: Change, reason: str) -> str:
    """A change in one line: "nodes 2 -> 4: more GPUs are free"."""
    before, after = change.before or {}, change.after or {}
    pairs = [(name, before.get(name), after.get(name)) for name in {**before, **after} if name not in ("reason", "by")]
    # What is new and says nothing (not paused, no parameters) is left out.
    told = [f"{name} {_word(was)} -> {_word(now)}" for name, was, now in pairs if was != now and (now or was is not None or change.before is not None)]
    return ": ".join(part for part in (", ".join(told), reason) if part)


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_word(one)}" for name, one in value.items()) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
