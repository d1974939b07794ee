"""Reading jobs from etcd, and asking one to stop.

Owns: one look at a job, all jobs of a cluster, and a thread that keeps looking while a run lasts. Must not: interpret what it reads (`rendezvous.status`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from elasticd.errors import ConflictError, KVError, NotRunningError, RecordError, UsageError
from elasticd.kv import EtcdKV, Listing
from elasticd.rendezvous import transitions
from elasticd.rendezvous.keys import JobKeys, jobs_prefix
from elasticd.rendezvous.records import TargetRecord, parse
from elasticd.rendezvous.status import JobStatus, job_status
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from elasticd.cli.options import Store

LOOK_EVERY = 1.0
"""Seconds between two looks of a run at its job."""
_KEYS_PER_SECOND = 200
"""A job of very many nodes is looked at less often, so that those who watch it cost etcd no more than those who train."""


def read_view(kv: EtcdKV, keys: JobKeys) -> View:
    """The job as etcd holds it now.

    Raises:
        KVError: etcd does not answer, or refuses.
    """
    ledger = Ledger(keys)
    ledger.load(kv.list(keys.prefix))
    return ledger.view()


def read_job(kv: EtcdKV, keys: JobKeys) -> JobStatus:
    """One job.

    Raises:
        NotRunningError: etcd holds nothing of it.
        KVError: etcd does not answer, or refuses.
    """
    view = read_view(kv, keys)
    if view.target is None and view.generation is None and not view.members and not view.problems:
        raise NotRunningError(f"there is no job {keys.job!r} in cluster {keys.cluster!r}", remedy="check its name, and --cluster")
    return job_status(view, cluster=keys.cluster, job=keys.job)


def read_jobs(kv: EtcdKV, cluster: str) -> list[JobStatus]:
    """Every job of a cluster, by name.

    Raises:
        KVError: etcd does not answer, or refuses.
    """
    prefix = jobs_prefix(cluster)
    listing = kv.list(prefix)
    names = sorted({item.key.removeprefix(prefix).partition("/")[0] for item in listing.items})
    jobs = []
    for name in names:
        try:
            keys = JobKeys(cluster, name)
        except UsageError:
            continue  # a key that somebody else put there
        ledger = Ledger(keys)
        ledger.load(Listing(revision=listing.revision, items=tuple(item for item in listing.items if item.key.startswith(keys.prefix))))
        jobs.append(job_status(ledger.view(), cluster=cluster, job=name))
    return jobs


def ask_to_stop(kv: EtcdKV, keys: JobKeys, reason: str) -> bool:
    """Write `run: false` into the job's target, as long as nobody else changed it meanwhile.

    Returns:
        False if there is no target to write it into.

    Raises:
        ConflictError: somebody changed it first; ask again.
        RecordError: the target holds garbage.
        KVError: etcd does not answer, or refuses.
    """
    seen = kv.get(keys.target)
    if seen is None:
        return False
    target = parse(TargetRecord, keys.target, seen.value, keys.scope)
    if not target.run:
        return True
    txn = transitions.write_target(keys, seen, target.model_copy(update={"run": False, "reason": reason}))
    if not kv.txn(txn.compares, txn.ops).succeeded:
        raise ConflictError(f"the target of job {keys.job!r} was changed meanwhile", remedy="try again")
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the last look brought: a view, or why there is none now. `at` is on the monotonic clock."""

    view: View | None
    problem: str
    at: float


class JobWatcher:
    """A thread that looks at one job about once a second, so that an etcd that does not answer holds up nobody else.

    Args:
        store: its etcd.
        keys: the job.
    """

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._kv = EtcdKV(store.kv)
        self._keys = keys
        self._wake = threading.Event()
        self._closing = False
        self._stop_reason: str | None = None
        self._look = Look(view=None, problem="", at=time.monotonic())
        self.stop_written = False
        self._thread = threading.Thread(target=self._run, name="elasticctl-watcher", daemon=True)
        self._thread.start()

    @property
    def look(self) -> Look:
        """The last one."""
        return self._look

    def stop_job(self, reason: str) -> None:
        """Ask the job to stop, again and again until it is written; `stop_written` tells."""
        self._stop_reason = reason
        self._wake.set()

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    def close(self) -> None:
        """End the thread and its connection."""
        self._closing = True
        self._wake.set()
        self._kv.close()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing:
            pause = LOOK_EVERY
            try:
                if self._stop_reason is not None and not self.stop_written:
                    self.stop_written = ask_to_stop(self._kv, self._keys, self._stop_reason)
                view = read_view(self._kv, self._keys)
                pause = max(pause, len(view.members) / _KEYS_PER_SECOND)
                self._look = Look(view=view, problem="", at=time.monotonic())
            except (KVError, ConflictError, RecordError) as error:
                self._look = Look(view=self._look.view, problem=error.message, at=time.monotonic())
                pause = 0.2 if isinstance(error, ConflictError) else pause
            self._wake.wait(pause)
            self._wake.clear()
