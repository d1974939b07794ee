"""What is done about incidents: told to the other nodes, decided once for the whole job, and asked of its agents.

Owns: the thread that does so, when it looks again, and the end of what the policy has kept out. Must not: weigh evidence (`policy`), shape writes (`case`),
or find anything itself (`detecting`).

Each daemon writes what its own detectors say to `incidents/<job>/<node>`. The daemon of the first rank's node decides, for it needs no other; those of the
other nodes do the same later and later, should it be gone. What is decided is written in one transaction with the ledger that bounds it, so that two who
decide at the same time come to one action. Nothing here holds up training: if etcd is away nothing is decided, and the next look makes up for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from elasticd.agent.judging import incidents_in
from elasticd.daemon.case import Case, carry_out, news, shown, standing, state_of, turn_of
from elasticd.daemon.reports import Reports
from elasticd.errors import KVError, KVPermissionError, RecordError
from elasticd.kv.types import Compare, Delete, Listing, Put, Target, WatchBatch, WatchRange
from elasticd.policy.budgets import Ledger as Deeds
from elasticd.policy.decide import decide
from elasticd.policy.decisions import DISRUPTIVE, Action, Decision
from elasticd.policy.evidence import Incident, Standing
from elasticd.policy.settings import HOUR, Settings
from elasticd.rendezvous.records import IncidentsRecord, NodePolicyRecord, PolicyRecord, parse
from elasticd.rendezvous.view import Ledger

if TYPE_CHECKING:
    from elasticd.daemon.detecting import Detecting
    from elasticd.kv import EtcdKV, Watch
    from elasticd.rendezvous.keys import ClusterKeys

log = structlog.get_logger("elasticd.daemon.acting")

AGAIN: Final = 5.0
"""Seconds between two looks while anything is open: what holds on is judged by how long."""
IDLE: Final = 60.0
"""The same while nothing is: a job that has come is looked at once, though nobody tells of it."""
DEPUTY: Final = 3.0
"""Seconds that each node of a generation leaves those before it to decide."""
NUMBERS_EVERY: Final = 10.0
"""Seconds after which other nodes are told newer numbers of an incident that stands as it did."""
RETRY: Final = 1.0
_ATTEMPTS: Final = 4
_INCIDENTS_READ: Final = 4096


@dataclass(slots=True)
class _Told:
    """What other nodes were told of a job last."""

    standing: tuple[object, ...] = ()
    updated: float = 0.0
    at: float = float("-inf")
    revision: int = 0  # of the key as it was written; 0: there is none


@dataclass(frozen=True, slots=True)
class Counts:
    """What the policy did on this daemon's word, since it started: (job, action) -> how often, and what budgets or the mode withheld."""

    done: Mapping[tuple[str, str], int] = field(default_factory=dict)
    withheld: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Acting:
    """See the module. `start` begins, `close` ends.

    Args:
        kv: this node's connection.
        operator_kv: the one that may ask things of jobs and keep nodes out.
        keys: the cluster.
        node: this one.
        settings: of the policy.
        detecting: the detectors of this node.
        reports: what agents say of their jobs.
        due: is set when the detectors say something new.
    """

    def __init__(
        self,
        *,
        kv: EtcdKV,
        operator_kv: EtcdKV,
        keys: ClusterKeys,
        node: str,
        settings: Settings,
        detecting: Detecting,
        reports: Reports,
        due: threading.Event,
    ) -> None:
        self._kv = kv
        self._operator_kv = operator_kv
        self._keys = keys
        self._node = node
        self._settings = settings
        self._detecting = detecting
        self._reports = reports
        self._due = due
        self._closing = False
        self._told: dict[str, _Told] = {}
        self._looked: set[str] = set()  # jobs that were looked at though nobody told of them: an earlier daemon may have left a hold
        self._held: frozenset[str] = frozenset()
        self._waiting: dict[tuple[str, str], float] = {}
        self._problem = ""
        self._settled: dict[str, frozenset[str]] = {}
        self._done: dict[tuple[str, str], int] = {}
        self._withheld: dict[tuple[str, str], int] = {}
        self._watch: Watch | None = None
        self._refused: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="elasticd-acting", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End it. May be called again."""
        self._closing = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def problem(self) -> str:
        """Why nothing can be decided, "" if it can."""
        return self._problem

    @property
    def settled(self) -> Mapping[str, frozenset[str]]:
        """Job -> incidents of which an operator has said that he knows."""
        return dict(self._settled)

    @property
    def counts(self) -> Counts:
        """What was done, and what was not; 0 for what may come, for Prometheus sees no increase in what begins with 1."""
        none = {(job, action.value): 0 for job in self._detecting.watched for action in Action if action is not Action.LOG}
        return Counts(done={**none, **self._done}, withheld={**none, **self._withheld})

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause: float | None = 0.0
        while not self._closing:
            self._due.wait(IDLE if pause is None else pause)
            self._due.clear()
            if self._closing:
                return
            try:
                pause = self.turn(time.time())
            except KVError as error:
                self._say(f"etcd: {error}")
                pause = RETRY
            except Exception:
                log.exception("acting_failed", training="goes on")
                pause = AGAIN

    def _say(self, problem: str) -> None:
        if bool(problem) != bool(self._problem):
            if problem:
                log.error("nothing_is_decided", why=problem, training="goes on")
            else:
                log.info("decides_again")
        self._problem = problem

    def turn(self, now: float) -> float | None:
        """Look, tell, decide, write.

        Args:
            now: seconds since the epoch.

        Returns:
            Seconds until the next look even if nobody wakes it; None: nothing is open.

        Raises:
            KVError: etcd does not answer, or refuses.
        """
        if self._watch is None:
            self._begin()
        for job in self._detecting.jobs:
            self._tell(job, now)
        listing = self._kv.list(self._keys.incidents)
        told = self._read(listing)
        pauses: list[float] = []
        problem = ""
        for job in sorted({*told, *self._held, *(set(self._detecting.watched) - self._looked)}):
            try:
                pause = self._decide(job, told.get(job, ()), now)
            except KVPermissionError as error:  # of one job: others have their roles
                problem, pause = f"etcd does not let this node act: {error.message}; see deploy/etcd/roles.py", AGAIN
            except RecordError as error:
                problem, pause = f"what was done about job {job} cannot be read, so nothing is done of free will: {error.message}", AGAIN
            else:
                self._looked.add(job)
            if pause is not None:
                pauses.append(pause)
        self._say(problem)
        if self._held or any(one.standing is not Standing.OVER for incidents in told.values() for one in incidents):
            pauses.append(AGAIN)
        return min(pauses, default=None)

    def _begin(self) -> None:
        """What an earlier daemon of this node told is over: its detectors are gone, and these begin anew."""
        listing = self._kv.list(self._keys.incidents)
        for item in listing.items:
            if item.key.rpartition("/")[2] == self._node:
                self._kv.txn((Compare(key=item.key, target=Target.MOD, op="==", value=item.mod_revision),), (Delete(key=item.key),))
        self._watch = self._kv.watch([WatchRange(key=self._keys.incidents, prefix=True)], listing.revision + 1, self._on_batch)

    def _on_batch(self, batch: WatchBatch) -> None:
        if batch.events or batch.reset:
            self._due.set()

    # --- telling ----------------------------------------------------------------------------------------------------------

    def _tell(self, job: str, now: float) -> None:
        """Write what our detectors say of a job, if it is something else than what stands there."""
        incidents = shown(self._detecting.incidents(job))
        last = self._told.setdefault(job, _Told())
        stands, updated = standing(incidents), max((float(one["updated"]) for one in incidents), default=0.0)
        if stands == last.standing and (updated <= last.updated or now - last.at < NUMBERS_EVERY):
            return
        try:
            record = IncidentsRecord(scope=self._keys.job(job).scope, node=self._node, incidents=incidents, at=now)
        except ValueError as error:
            log.error("incident_not_told", job=job, why=str(error)[:500])  # noqa: TRY400 - what detectors said, not a fault of ours
            return
        key = self._keys.incidents_of(job, self._node)
        # Compared, so that a telling that got no answer, and comes through later, cannot replace this one.
        seen = Compare(key=key, target=Target.MOD, op="==", value=last.revision)
        written = self._kv.txn((seen,), (Put(key=key, value=record.to_bytes()),))
        if written.succeeded:
            self._told[job] = _Told(standing=stands, updated=updated, at=now, revision=written.revision)
        else:
            found = self._kv.get(key)
            last.revision = found.mod_revision if found is not None else 0
            self._due.set()

    def _read(self, listing: Listing) -> dict[str, list[Incident]]:
        """Incidents by job, of all nodes. What cannot be believed is told once, and is as if nobody had said it."""
        found: dict[str, list[Incident]] = {}
        for item in listing.items[:_INCIDENTS_READ]:
            job = item.key.removeprefix(self._keys.incidents).partition("/")[0]
            try:
                found.setdefault(job, []).extend(incidents_in(item, self._keys.job(job)))
            except (RecordError, ValueError) as error:
                if item.key not in self._refused:
                    self._refused.add(item.key)
                    log.error("incidents_not_believed", key=item.key, why=str(error)[:500])  # noqa: TRY400 - somebody else's word
        return found

    # --- deciding ---------------------------------------------------------------------------------------------------------

    def _decide(self, job: str, incidents: Collection[Incident], now: float) -> float | None:
        """One job. Returns seconds after which it has to be looked at again, None if only a change makes that worth it."""
        for _ in range(_ATTEMPTS):
            case = self._look(job, incidents, now)
            self._settled[job] = case.settled
            place = turn_of(case, self._node)
            if place is None:
                self._held -= {job}
                return None
            state = state_of(case, self._settings)
            decisions = decide(state, now)
            txn = carry_out(self._keys, case, state, decisions)
            record = case.view.policy.record if case.view.policy else None
            self._held = self._held | {job} if record and record.hold == (case.view.active.number if case.view.active else None) else self._held - {job}
            if txn is None:
                self._forget(job)
                return None
            wait = self._patience(job, place, news(case, decisions), now)
            if wait > 0.0:
                return wait
            if self._operator_kv.txn(txn.compares, txn.ops).succeeded:
                self._forget(job)
                self._tell_people(job, case, decisions)
                if any(one.hold_commits for one in decisions):
                    self._held |= {job}
                return None
        return RETRY

    def _patience(self, job: str, place: int, fresh: Collection[Decision], now: float) -> float:
        """Seconds that nodes before this one still have for it."""
        if place == 0:
            return 0.0
        name = (job, "|".join(sorted(f"{one.key}/{one.rule}" for one in fresh)))
        since = self._waiting.setdefault(name, now)
        return max(0.0, since + place * DEPUTY - now)

    def _forget(self, job: str) -> None:
        self._waiting = {name: since for name, since in self._waiting.items() if name[0] != job}

    def _look(self, job: str, incidents: Collection[Incident], now: float) -> Case:
        keys = self._keys.job(job)
        ledger = Ledger(keys)
        ledger.load(self._kv.list(keys.prefix))
        policies = self._kv.list(self._keys.policies)
        kept_out: dict[str, NodePolicyRecord] = {}
        revisions: dict[str, int] = {}
        for item in policies.items:
            name = item.key.removeprefix(self._keys.policies)
            revisions[name] = item.mod_revision
            try:
                kept_out[name] = parse(NodePolicyRecord, item.key, item.value, self._keys.scope)
            except RecordError:
                continue
        return Case(
            keys=keys,
            view=ledger.view(),
            incidents=tuple(incidents),
            nodes=len(self._kv.list(self._keys.nodes).items),
            kept_out=kept_out,
            policies=revisions,
            report=self._reports.read([job]).get(job),
            stops=self._stops(job, now),
        )

    def _stops(self, job: str, now: float) -> tuple[float, ...]:
        """When workers of the other jobs that this node knows were stopped of free will, in the last hour."""
        others = [self._keys.job(name).policy for name in self._detecting.watched if name != job]
        found: list[float] = []
        for item in self._kv.get_many(others).items if others else ():
            try:
                scope = self._keys.job(item.key.removesuffix("/policy").rpartition("/")[2]).scope
                deeds = Deeds.from_dict(parse(PolicyRecord, item.key, item.value, scope).ledger).deeds
            except RecordError:
                continue
            found += [deed.at for deed in deeds if deed.done and deed.action in DISRUPTIVE and now - deed.at < HOUR]
        return tuple(sorted(found))

    # --- saying -----------------------------------------------------------------------------------------------------------

    def _tell_people(self, job: str, case: Case, decisions: Collection[Decision]) -> None:
        for one in news(case, tuple(decisions)):
            say = log.warning if one.acts or one.alert else log.info
            say(
                "acted" if one.acts else "decided",
                job=job,
                incident=one.about,
                action=one.action.value,
                would=one.would.value if one.withheld else None,
                wanted=one.wanted.value,
                rule=one.rule,
                on=one.node or None,
                why=one.why,
                numbers=dict(one.numbers) or None,
                until=one.until,
            )
            if one.acts:
                self._done[job, one.action.value] = self._done.get((job, one.action.value), 0) + 1
            if one.alert and one.wanted is not one.action:
                self._withheld[job, one.wanted.value] = self._withheld.get((job, one.wanted.value), 0) + 1
