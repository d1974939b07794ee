"""The coordinator's work: carrying out what `membership.plan` decides for the whole job.

Owns: what a coordinator remembers, when a deputy may stand in, and putting garbage right. Must not: decide about membership, or know this
node's workers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from elasticd.errors import KVError, KVPermissionError, RecordError
from elasticd.rendezvous import transitions
from elasticd.rendezvous.membership import Activate, Decision, Drain, End, Judge, Memory, Propose, Timing, Wait, observe, plan
from elasticd.rendezvous.sight import LOOK_EVERY
from elasticd.rendezvous.view import Keyed, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticd.rendezvous.keys import JobKeys
    from elasticd.rendezvous.records import EventRecord, MemberId, PolicyRecord, Record
    from elasticd.rendezvous.sight import Sight

log = structlog.get_logger("elasticd.rendezvous")

STAND_IN_AFTER: Final = LOOK_EVERY / 2
"""Seconds for which the same thing must have been left undone before a deputy does it (PROTOCOL 8): seen at two of its looks."""
OWN_WRITE_WITHIN: Final = 1.0
"""Seconds within which the watch is to bring this member's own write."""


class Judging(Protocol):
    """Whoever knows what a failure comes to."""

    def __call__(self, view: View, at: float) -> tuple[PolicyRecord, EventRecord]:
        """What to write about the active generation of `view`, all of whose members have reported.

        Args:
            at: seconds since the epoch.

        Raises:
            KVError: etcd does not answer, or refuses.
            RecordError: what was done before cannot be read.
        """


class Coordinator:
    """See the module.

    Args:
        send: does one transaction and says whether its comparisons held.
        judge: finds out what a generation failed of; None: nobody does, and `timing.judged` is not set.
    """

    def __init__(self, keys: JobKeys, timing: Timing, send: Callable[[transitions.Txn], bool], judge: Judging | None = None) -> None:
        self._keys = keys
        self._timing = timing
        self._send = send
        self._judge = judge
        self._memory = Memory()
        self._seen = View(revision=0)
        self._forbidden: tuple[str, int] | None = None
        self._undone: Decision | None = None
        self._undone_since = 0.0
        self._said = ""
        self.why = ""

    def believe_no_loss_for_a_while(self) -> None:
        """After an outage many leases lapse at once: give their owners one TTL to come back (PROTOCOL 4)."""
        self._memory = self._memory.blinded_until(time.monotonic() + self._timing.ttl)

    def turn(self, me: MemberId, sight: Sight, written: int) -> float:
        """Do what is to be done, if it is this member's to do.

        Args:
            written: the revision of this member's own last write; nothing is decided on a view from before it.

        Returns:
            When to turn again even if nothing happens, on the monotonic clock.
        """
        if not sight.whole:
            return float("inf")  # what is not seen whole is not remembered either: it would look like the end of everybody
        self._memory = observe(self._memory, self._seen, sight.view, time.monotonic(), self._timing)
        self._seen = sight.view
        if sight.view.revision < written:
            return self._await_own_write(sight)
        if sight.coordinator and self._repair(sight.view):
            return time.monotonic() + OWN_WRITE_WITHIN
        decision = plan(sight.view, time.monotonic(), self._memory, self._timing)
        if not sight.coordinator and not self._may_stand_in(decision):
            return float("inf")
        self._say(decision)
        if isinstance(decision, Wait):
            return decision.until if decision.until is not None else float("inf")
        if isinstance(decision, Judge):
            self._judge_failure(sight.view, decision)
        else:
            self._send(self._txn(sight.view, decision, me))
        # Done, or somebody wrote first. The watch would tell, but etcd serves one that has just begun only each 100 ms.
        sight.load()
        return time.monotonic()

    def _await_own_write(self, sight: Sight) -> float:
        if time.monotonic() - sight.looked_at <= OWN_WRITE_WITHIN:
            return time.monotonic() + OWN_WRITE_WITHIN
        sight.load()
        return time.monotonic()

    def _txn(self, view: View, decision: Propose | Activate | Drain | End, me: MemberId) -> transitions.Txn:
        if isinstance(decision, Propose):
            return transitions.propose(self._keys, view, decision, me)
        if isinstance(decision, Activate):
            return transitions.activate(self._keys, view, decision, me, frozen_max=self._timing.frozen_max, at=time.time())
        if isinstance(decision, Drain):
            return transitions.drain(self._keys, view)
        return transitions.end(self._keys, view, decision, at=time.time())

    def _judge_failure(self, view: View, decision: Judge) -> None:
        """Write what the generation failed of. Where that cannot be found out or written, the job goes on without."""
        try:
            if self._judge is None:
                raise NotImplementedError
            self._send(transitions.judge(self._keys, view, *self._judge(view, time.time())))
        except (RecordError, KVPermissionError) as error:
            why = error.message
            log.error("failure_not_judged", generation=decision.number, why=why, effect="restarted within the job's budget")  # noqa: TRY400 - no fault of ours
        except KVError:
            raise  # as with anything else that etcd is asked: it is tried again when it answers
        except Exception:
            log.exception("failure_not_judged", generation=decision.number, effect="restarted within the job's budget")
        else:
            return
        self._memory = self._memory.without_verdict(decision.number)

    def _may_stand_in(self, decision: Decision) -> bool:
        now = time.monotonic()
        if isinstance(decision, Wait):
            self._undone = None
            return False
        if self._undone != decision:
            self._undone, self._undone_since = decision, now
            return False
        if now - self._undone_since < STAND_IN_AFTER:
            return False
        log.warning("standing_in_for_coordinator", decision=type(decision).__name__.lower())
        self._undone = None
        return True

    def _say(self, decision: Decision) -> None:
        match decision:
            case Propose():
                self.why = f"proposing {decision.number} ({decision.mode.value}): {decision.cause}"
            case Activate():
                self.why = f"activating {decision.proposal.number}"
            case Drain():
                self.why = f"every worker of generation {decision.number} has stopped, and there are too few nodes to go on"
            case Judge():
                self.why = f"judging what generation {decision.number} failed of"
            case End():
                self.why = f"ending: {decision.state.value}: {decision.reason}"
            case Wait():
                self.why = decision.why
        if self.why != self._said:
            self._said = self.why
            if isinstance(decision, Wait) and decision.alert:
                log.error("needs_attention", text=self.why)  # it goes on only if people do something
            else:
                log.info("decision", text=self.why)

    def _repair(self, view: View) -> bool:
        """Put right what somebody wrote over or removed: the last good value is this member's to restore. Whether anything was wrong.

        Not after the end: a write to `target` is how an operator opens a job again.
        """
        if view.over:
            return False
        records: list[tuple[str, Keyed[Record] | None]] = [
            (self._keys.generation, view.generation),
            (self._keys.proposal, view.proposal),
            (self._keys.target, view.target),
        ]
        for key, keyed in records:
            seen = view.damaged.get(key)
            if seen is None:
                continue
            if keyed is None or key not in view.repairable:
                self.why = f"{view.problems[key]}; what stood there last is not known here: membership is frozen until somebody puts it right"
            elif (key, seen) == self._forbidden:
                self.why = f"{view.problems[key]}; this node may not put it right: membership is frozen until an operator does"
            else:
                self._put_right(key, keyed, seen)
            return True
        return False

    def _put_right(self, key: str, keyed: Keyed[Record], seen: int) -> None:
        log.warning("repairing", key=key)
        try:
            self._send(transitions.repair(key, keyed.record, seen))
        except KVPermissionError as error:  # what operators write is not a node's to write, where etcd has roles
            self._forbidden = (key, seen)
            log.error("not_repaired", key=key, error=str(error))  # noqa: TRY400 - etcd's word, not a fault of ours
