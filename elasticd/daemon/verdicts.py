"""What was decided about jobs' incidents and failures, as people are told.

Owns: reading each job's policy key, counting what was done and what is left, and its words. Must not: decide or write.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticd.daemon.case import step_time
from elasticd.errors import KVError, RecordError
from elasticd.observability.report import JobReport
from elasticd.policy.budgets import Ledger
from elasticd.policy.decisions import DISRUPTIVE, Action
from elasticd.policy.report import came_to, counterfactual
from elasticd.policy.settings import DAY, HOUR, Mode, Settings
from elasticd.rendezvous.records import PolicyRecord, parse

if TYPE_CHECKING:
    from pathlib import Path

    from elasticd.kv import EtcdKV
    from elasticd.rendezvous.keys import ClusterKeys

FRESH: Final = 60.0
"""Seconds for which what an agent reports is how the job does now."""
SPAN: Final = 7 * DAY
"""Seconds over which it is counted what was done and what came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How often a job's workers were stopped of free will, and how often they may be. In an hour and in a day; `certain`: on whatever evidence."""

    hour: int
    hour_most: int
    day: int
    day_most: int
    certain_hour: int
    certain_hour_most: int
    certain_day: int
    certain_day_most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobVerdicts:
    """What stands in a job's policy key.

    Attributes:
        held: no checkpoint is committed: the state may be bad.
        decisions: the last ones, the oldest first, each with what it `came_to`.
        came_of: one sentence each on what was done, or would have been, and what followed.
        acks: incidents that operators know of, and what they said.
        problem: why it is not known, "" if it is.
    """

    job: str
    mode: Mode
    held: bool = False
    decisions: tuple[Mapping[str, Any], ...] = ()
    came_of: tuple[str, ...] = ()
    acks: Mapping[str, str]
    budget: Budget | None = None
    problem: str = ""


class Verdicts:
    """Reads them. Thread-safe.

    Args:
        kv: the connection to read by.
        keys: the cluster.
        settings: of the policy on this node.
        reports: directory of what this node's agents say of their jobs.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, settings: Settings, reports: Path) -> None:
        self._kv = kv
        self._keys = keys
        self._settings = settings
        self._reports = reports

    def read(self, jobs: Iterable[str]) -> tuple[JobVerdicts, ...]:
        """Those of some jobs. A job of which nothing was ever decided is left out.

        Raises:
            KVError: etcd does not answer, or refuses.
        """
        names = sorted(jobs)
        by_key = {self._keys.job(name).policy: name for name in names}
        found = []
        for start in range(0, len(names), 100):
            items = self._kv.get_many(list(by_key)[start : start + 100]).items
            found += [self._of(by_key[item.key], item.key, item.value) for item in items]
        return tuple(found)

    def known(self, jobs: Iterable[str]) -> tuple[JobVerdicts, ...] | str:
        """The same; or why it cannot be read."""
        try:
            return self.read(jobs)
        except KVError as error:
            return error.message

    def _of(self, job: str, key: str, value: bytes) -> JobVerdicts:
        mode = self._settings.mode
        try:
            record = parse(PolicyRecord, key, value, self._keys.job(job).scope)
            ledger = Ledger.from_dict(record.ledger)
            decisions = tuple(self._with_outcome(job, one, ledger, time.time()) for one in record.decisions)
        except RecordError as error:
            return JobVerdicts(job=job, mode=mode, acks={}, problem=f"what was done cannot be read, so nothing is done of free will: {error.message}")
        now = time.time()
        done = [
            str(one)
            for happened in (True, False)
            for one in counterfactual(ledger.deeds, ledger.failures, since=_since(ledger, now), now=now, followed_s=self._settings.followed_s, done=happened)
        ]
        return JobVerdicts(
            job=job,
            mode=mode,
            held=record.hold is not None,
            decisions=decisions,
            came_of=tuple(done),
            acks=record.acks,
            budget=_budget(ledger, self._settings, now),
        )

    def _with_outcome(self, job: str, decision: Mapping[str, Any], ledger: Ledger, now: float) -> dict[str, Any]:
        """A decision with one sentence on what it came to; one about nothing that was done has none."""
        try:
            action, at, node = Action(decision["action"]), float(decision["at"]), decision.get("node")
            numbers = {str(name): float(value) for name, value in dict(decision.get("numbers") or {}).items()}
        except (KeyError, TypeError, ValueError):
            raise RecordError(f"{self._keys.job(job).policy}: holds a decision that is none") from None
        if action is Action.LOG:
            return {**decision, "came_to": ""}
        after = [one.at for one in ledger.failures if 0.0 <= one.at - at <= self._settings.followed_s and (not node or not one.node or one.node == node)]
        report = JobReport.read(self._reports / f"{job}.json")
        fresh = report is not None and now - report.at < FRESH
        said = came_to(
            action,
            numbers,
            at=at,
            failed_at=min(after, default=None),
            step=report.step if report and fresh else None,
            step_s=step_time(report) if report and fresh else None,
        )
        return {**decision, "came_to": said}


def _since(ledger: Ledger, now: float) -> float:
    """The oldest deed that is remembered, a week at most."""
    return max(now - SPAN, min((deed.at for deed in ledger.deeds), default=now))


def _budget(ledger: Ledger, settings: Settings, now: float) -> Budget:
    stops = [deed for deed in ledger.deeds if deed.done and deed.action in DISRUPTIVE]

    def within(seconds: float, *, unsure: bool = False) -> int:
        return sum(now - deed.at < seconds and not (unsure and deed.certain) for deed in stops)

    return Budget(
        hour=within(HOUR, unsure=True),
        hour_most=settings.restarts_per_hour,
        day=within(DAY, unsure=True),
        day_most=settings.restarts_per_day,
        certain_hour=within(HOUR),
        certain_hour_most=settings.certain_per_hour,
        certain_day=within(DAY),
        certain_day_most=settings.certain_per_day,
    )
