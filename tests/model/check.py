"""What must hold: invariants looked at after every write and every start, and progress at the end.

Owns: the verdicts. Must not: drive anything. A verdict has a kind, so that a test can ask for the one it expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticd.rendezvous.membership import candidates, fate, not_ready_marks, without_unreachable
from elasticd.rendezvous.records import (
    CauseKind,
    GenerationRecord,
    GenerationState,
    MemberId,
    MemberRecord,
    Mode,
    PolicyRecord,
    ProposalRecord,
    Result,
)
from elasticd.rendezvous.view import View

if TYPE_CHECKING:
    from tests.model.world import World

WAKE_GRACE = 2.0
"""Seconds that an agent may take, after its whole machine stood still, to stop workers that are no longer wanted."""
STALE = 6.5
"""Seconds for which a decision may rest on an old look, where no machine stood still."""


class ViolationError(Exception):
    """A rule is broken. `kind` is a word for tests, the rest for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Checker:
    """Sees every write of the job as it happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before = View(revision=0)
        self.committed: list[tuple[int, int]] = []
        self.generations: list[GenerationRecord] = []
        self.proposed_at: dict[int, float] = {}
        self.started: set[tuple[str, int]] = set()
        self.gone_at: dict[str, float] = {}
        self.judged_at: dict[int, float] = {}
        self.left_out: set[str] = set()

    # --- after each write

    def wrote(self, after: View) -> None:
        """Compare the job before and after one revision."""
        before, self.before = self.before, after
        for node in before.members.keys() - after.members.keys():
            self.gone_at[node] = self.world.now
        if after.proposal is not before.proposal and after.proposal:
            self._proposed(before, after, after.proposal.record)
        if after.checkpoint is not before.checkpoint and after.checkpoint:
            self._committed(before, after)
        if after.policy is not before.policy and after.policy:
            self._judged(before, after.policy.record)
        if after.generation is not before.generation and after.generation:
            self._generation(before, after, after.generation.record)
        for node, keyed in after.members.items():
            if keyed is not before.members.get(node):
                self._member(keyed.record.id, keyed.record.stopped)

    def _member(self, identity: MemberId, stopped: int) -> None:
        agent = self.world.agent_of(identity)
        if agent and agent.workers and agent.workers.number <= stopped:
            raise ViolationError("false_report", f"{identity} says it stopped {stopped} and runs {agent.workers.number}")

    def _proposed(self, before: View, after: View, record: ProposalRecord) -> None:
        if record.number <= after.number or (before.proposal and record.number <= before.proposal.record.number):
            raise ViolationError("number_falls", f"proposal {record.number} after {before.proposal and before.proposal.record.number}")
        self._no_member_twice(record.members)
        self.proposed_at[record.number] = self.world.now
        if before.target and after.restarts_used > before.target.record.max_restarts:
            raise ViolationError("budget", f"{after.restarts_used} restarts of {before.target.record.max_restarts}")
        if after.restarts_used > self.world.failures:
            raise ViolationError("budget", f"{after.restarts_used} restarts charged for {self.world.failures} failures")
        if record.mode is Mode.KILL or record.cause.kind is CauseKind.LOSS:
            self._kill_has_a_reason(before, record)

    def _kill_has_a_reason(self, before: View, record: ProposalRecord) -> None:
        """Nobody loses a step for a plan: somebody of the old generation is gone, failed, idle or late (PROTOCOL 9, 18)."""
        generation = before.generation.record if before.generation else None
        if generation is None:
            raise ViolationError("kill_without_need", f"proposal {record.number} and there is no generation")
        pending = before.pending.record if before.pending else None
        if pending and pending.mode is Mode.KILL and record.cause.kind is not CauseKind.LOSS:
            return
        drained = pending and self.world.now - self.proposed_at[pending.number] >= self.world.timing.drain_timeout - 1e-6
        if drained and record.cause.kind is not CauseKind.LOSS:
            return
        for identity in generation.ids:
            keyed = before.present.get(identity)
            if keyed is None:
                if identity not in self.world.left:
                    return
            elif self._said(keyed.record, generation.number, Result.FAILED):
                return
            elif keyed.record.stopped >= generation.number and not pending and not self._said(keyed.record, generation.number, Result.FINISHED):
                return  # idle
        # What the proposer saw may have been put right since: a key taken up again, say.
        if self.world.trouble:
            return
        raise ViolationError("kill_without_need", f"proposal {record.number} ({record.mode.value}): {record.cause}")

    def _committed(self, before: View, after: View) -> None:
        assert after.checkpoint
        record = after.checkpoint.record
        if after.active is None or record.generation != after.active.number:
            raise ViolationError("stale_commit", f"generation {record.generation} commits while {after.number} is the last one")
        if self.committed and record.order <= self.committed[-1]:
            raise ViolationError("commit_falls", f"{record.order} after {self.committed[-1]}")
        self.committed.append(record.order)

    def _generation(self, before: View, after: View, record: GenerationRecord) -> None:
        last = before.generation.record if before.generation else None
        if last and record.number == last.number:
            self._ended(before, last, record)
            return
        if record.ended:
            raise ViolationError("ended_wrongly", f"generation {record.number} was never active")
        if last and record.number < last.number:
            raise ViolationError("number_falls", f"generation {record.number} after {last.number}")
        if record.restarts != (last.restarts + 1 if last else 0):
            raise ViolationError("restarts", f"generation {record.number} says {record.restarts}")
        self._no_member_twice(record.ids)
        self.generations.append(record)
        self._members_as_they_are(before, record)
        self._alike(before, record)
        self._resumes(before, after, record)
        if last:
            self._after(before, last, record)
            if not last.ended:
                self._follows_the_verdict(before, last, record)

    def _judged(self, before: View, record: PolicyRecord) -> None:
        """Each failure once, by whoever was the first, and none is forgotten (PROTOCOL 31)."""
        assert record.verdict
        if before.policy and before.policy.record.verdict and before.policy.record.verdict.generation >= record.verdict.generation:
            raise ViolationError("judged_twice", f"generation {record.verdict.generation}")
        if record.ledger["judged"] != len(self.judged_at) + 1:
            raise ViolationError("judged_twice", f"{record.ledger} after {len(self.judged_at)} verdicts")
        if before.active is None or before.active.number != record.verdict.generation or not (fate(before).failed or fate(before).lost):
            raise ViolationError("judged_wrongly", f"generation {record.verdict.generation} has not failed")
        self.judged_at[record.verdict.generation] = self.world.now
        self.left_out |= {keyed.record.id.node for keyed in before.members.values() if keyed.record.id.incarnation in record.verdict.without}

    def _follows_the_verdict(self, before: View, last: GenerationRecord, record: GenerationRecord) -> None:
        """Whoever activates has seen each report, if not each loss."""
        if not self.world.timing.judged:
            return
        verdict = before.policy.record.verdict if before.policy else None
        judged = verdict is not None and verdict.generation == last.number
        if not judged and any(self._said(keyed.record, last.number, Result.FAILED) for keyed in before.members.values() if keyed.record.id in last.ids):
            raise ViolationError("not_judged", f"generation {record.number} begins, and {last.number} failed")
        if verdict is not None and judged:
            if verdict.stop:
                raise ViolationError("not_judged", f"generation {record.number} begins, and the job was to end: {verdict.stop}")
            if self.world.now < self.judged_at[last.number] + verdict.delay - 1e-6:
                raise ViolationError("not_judged", f"generation {record.number} begins before its delay is over")
        out = {*last.without, *(verdict.without if verdict and judged else ())}
        inside = [str(identity) for identity in record.ids if identity.incarnation in out]
        if inside:
            raise ViolationError("left_out_is_in", f"generation {record.number} has {inside}")

    def _alike(self, before: View, record: GenerationRecord) -> None:
        codes = {keyed.record.fingerprint["code"] for identity in record.ids if (keyed := before.present.get(identity))}
        if len(codes) > 1:
            raise ViolationError("mixed_code", f"generation {record.number} runs {sorted(codes)}")

    # --- states

    def _resumes(self, before: View, after: View, record: GenerationRecord) -> None:
        """Nothing older than what was committed, unless it is lost for good, which is told; and no more is thrown away than a snapshot."""
        known = before.checkpoint.record if before.checkpoint else None
        order = record.resume.order if record.resume else (0, 0)
        behind = known is not None and order < known.order
        told = any(event.what == "fell_back" and event.number == record.number for event in after.events)
        if behind is not told:
            raise ViolationError("fell_back_unsaid" if behind and self._lost(before, record) else "resume_behind_commit",
                                 f"generation {record.number} resumes {order}, committed {known and known.order}, told {told}")  # fmt: skip
        if behind and not self._lost(before, record):
            raise ViolationError("resume_behind_commit", f"generation {record.number} resumes {order}, {known and known.order} is committed and not lost")
        if behind and not self.world.shared and len(self.world.disks_lost) < 2 and known and len(self._run_of(known.generation)) > 1:
            raise ViolationError("fell_back_needlessly", f"generation {record.number} falls back, and one disk was lost: {self.world.disks_lost}")
        self._somebody_gives(before, record)
        self._throws_away(record, order)

    def _run_of(self, number: int) -> tuple[MemberId, ...]:
        return self.world.runs[number].record.ids if number in self.world.runs else ()

    def _lost(self, before: View, record: GenerationRecord) -> bool:
        """Whether all who were to hold the committed checkpoint are here and say that they do not; where all read it, all who are to begin."""
        assert before.checkpoint
        known = before.checkpoint.record
        said = {node for node, keyed in before.members.items() if known.digest in keyed.record.lost}
        has = any(ref.digest == known.digest for keyed in before.members.values() for ref in keyed.record.inventory)
        wanted = {identity.node for identity in record.ids} if known.shared else set(known.holders)
        return bool(wanted) and wanted <= said and not has

    def _somebody_gives(self, before: View, record: GenerationRecord) -> None:
        known = before.checkpoint.record if before.checkpoint else None
        if record.resume is None or (known and known.shared and known.digest == record.resume.digest):
            return
        # A deletion is not seen by the activation, and whoever activates may have looked a while ago.
        late = self.world.now - (STALE if not self.world.stood_still else 1e9)
        if not any(node in before.members or self.gone_at.get(node, -1e9) >= late for node in record.resume.holders):
            raise ViolationError("nobody_gives", f"generation {record.number} resumes {record.resume.order}, and none of {record.resume.holders} is here")

    def _throws_away(self, record: GenerationRecord, order: tuple[int, int]) -> None:
        """Of what its members' agents hold, in truth, one snapshot is newer at most."""
        if self.world.corrupted:
            return
        held: dict[str, tuple[int, int]] = {}
        for identity in record.ids:
            agent = self.world.agent_of(identity)
            for ref in agent.snapshots if agent else ():
                held[ref.digest] = max(ref.order, held.get(ref.digest, (0, 0)))
        newer = sorted({one for one in held.values() if one > order})
        if len(newer) > 1:
            raise ViolationError("steps_lost", f"generation {record.number} resumes {order}, and its members hold {newer}")

    def begins(self, record: GenerationRecord, restored: Mapping[MemberId, str]) -> None:
        """A generation makes its first step: all from the state that the record names."""
        wanted = record.resume.digest if record.resume else "init"
        if {restored.get(identity) for identity in record.ids} != {wanted}:
            raise ViolationError("different_states", f"generation {record.number} begins with {restored}, the record says {wanted}")

    def _members_as_they_are(self, before: View, record: GenerationRecord) -> None:
        """Nobody in it was somebody else, or asked to leave, or held another socket, at the moment it was written; deletions are not seen."""
        for rank, member in enumerate(record.members):
            keyed = before.members.get(member.id.node)
            if keyed is None:
                continue
            if keyed.record.id != member.id:
                raise ViolationError("stale_member", f"generation {record.number} has {member.id}, the key says {keyed.record.id}")
            if keyed.record.leaving:
                raise ViolationError("stale_member", f"generation {record.number} has {member.id}, which is leaving")
            if rank == 0 and record.store.port != keyed.record.store_port:
                raise ViolationError("stale_member", f"generation {record.number} names a socket that {member.id} no longer holds")

    def _after(self, before: View, last: GenerationRecord, record: GenerationRecord) -> None:
        common = [identity for identity in record.ids if identity in last.ids]
        if common != [identity for identity in last.ids if identity in record.ids] or list(record.ids[: len(common)]) != common:
            raise ViolationError("ranks_change", f"{[str(one) for one in last.ids]} became {[str(one) for one in record.ids]}")
        marks = not_ready_marks(before)
        for identity in last.ids:
            agent = self.world.agent_of(identity)
            keyed = before.present.get(identity)
            if keyed is None or identity.incarnation in marks:
                continue
            if keyed.record.stopped < last.number or (agent and agent.workers and agent.workers.number <= last.number):
                raise ViolationError("not_stopped", f"generation {record.number} is active and {identity} has not stopped {last.number}")
        if not last.ended and all(self._finished(before, identity, last.number) for identity in last.ids):
            raise ViolationError("finished_restarts", f"everybody finished generation {last.number}, and {record.number} is active")
        if last.state is GenerationState.SUCCEEDED and not self.world.reopened:
            raise ViolationError("finished_restarts", f"the job ended with generation {last.number}, and {record.number} is active")
        self._loses_a_step_at_most(last, record)
        self._plan_loses_nothing(before, last, record)
        again = record.cause.kind is CauseKind.JOIN and self.left_out.intersection(record.cause.nodes)
        if self.world.calm_since is not None and self.world.calm_since <= self.proposed_at.get(record.number, 0.0) and not again:
            raise ViolationError("needless_restart", f"generation {record.number} ({record.cause}), and nothing had happened to any node")

    def _loses_a_step_at_most(self, last: GenerationRecord, record: GenerationRecord) -> None:
        """Whoever survives holds the last step or the one before it."""
        run = self.world.runs.get(last.number)
        if run is None or run.reached is None or self.world.corrupted:
            return
        if not any(identity in last.ids and self.world.agent_of(identity) for identity in record.ids):
            return
        if record.resume is None or record.resume.order < (last.number, run.reached - 1):
            raise ViolationError("steps_lost", f"{last.number} reached step {run.reached}, {record.number} resumes {record.resume and record.resume.order}")

    def _plan_loses_nothing(self, before: View, last: GenerationRecord, record: GenerationRecord) -> None:
        """An agreed stop that went well costs no step; nor does a generation that never began, if nothing went wrong at all.

        One that failed before it began may cost a snapshot, as any failure may: a newcomer in it lacks the newest state (PROTOCOL 22). That it is
        one at most, `_throws_away` sees to.
        """
        run, proposal = self.world.runs.get(last.number), before.proposal
        order = record.resume.order if record.resume else (0, 0)
        if run is None or self.world.corrupted or proposal is None or last.ended:
            return
        if proposal.record.mode is Mode.AGREED_STOP and run.sealed and run.reached is not None and order < (last.number, run.reached):
            raise ViolationError("planned_loss", f"{last.number} was stopped by agreement at step {run.reached}, {record.number} resumes {order}")
        if run.sealed and not self.world.trouble and run.reached is not None and order < (last.number, run.reached - 1):
            raise ViolationError("planned_loss", f"{last.number} was stopped by agreement at step {run.reached}, and since then all have left: {order}")
        # The same state may be held under an older number, on disk, when those who had restored it in memory are gone.
        same = record.resume is not None and last.resume is not None and record.resume.digest == last.resume.digest
        failed = proposal.record.cause.kind is CauseKind.WORKER_FAILED
        if not run.began and not failed and not self.world.trouble and last.resume and order < last.resume.order and not same:
            raise ViolationError("steps_lost", f"{last.number} was to begin with {last.resume.order}, {record.number} resumes {order}")

    def _finished(self, view: View, identity: MemberId, number: int) -> bool:
        return identity in view.present and self._said(view.present[identity].record, number, Result.FINISHED)

    @staticmethod
    def _said(member: MemberRecord, number: int, result: Result) -> bool:
        return bool(member.outcome and member.outcome.generation == number and member.outcome.result is result)

    def _ended(self, before: View, last: GenerationRecord, record: GenerationRecord) -> None:
        if not last.ended and not record.ended and record == last.model_copy(update={"drained": True}):
            self._drained(last)
            return
        if last.ended or not record.ended:
            raise ViolationError("ended_wrongly", f"generation {record.number} goes from {last.state.value} to {record.state.value}")
        if record.ids != last.ids:
            raise ViolationError("ended_wrongly", f"the end of generation {record.number} changes its members")
        if record.state is GenerationState.SUCCEEDED and last.number not in self.world.succeeded:
            raise ViolationError("ended_wrongly", f"generation {record.number} did not succeed everywhere")
        if record.state is GenerationState.STOPPED and self.world.asked_to_stop is False:
            raise ViolationError("ended_wrongly", "nobody asked to stop")
        if record.state is GenerationState.FAILED:
            assert before.target
            if self.world.failures <= before.target.record.max_restarts:
                raise ViolationError("ended_wrongly", f"{self.world.failures} failures of {before.target.record.max_restarts} end the job: {record.reason}")
            if self.world.must_not_fail:
                raise ViolationError("ended_wrongly", f"the budget was used up, and some nodes could have trained: {record.reason}")
        if record.drained:
            self._drained(last)

    def _drained(self, last: GenerationRecord) -> None:
        for identity in last.ids:
            agent = self.world.agent_of(identity)
            if agent and agent.workers and agent.workers.number <= last.number:
                raise ViolationError("not_stopped", f"generation {last.number} is called drained, and {identity} trains")

    @staticmethod
    def _no_member_twice(ids: tuple[MemberId, ...]) -> None:
        if len(set(ids)) != len(ids) or len({identity.node for identity in ids}) != len(ids):
            raise ViolationError("member_twice", ", ".join(str(one) for one in ids))

    # --- workers

    def starts(self, node: str, number: int) -> None:
        """Workers of a generation are about to start."""
        if (node, number) in self.started:
            raise ViolationError("started_twice", f"{node} starts generation {number} again")
        self.started.add((node, number))
        replaced = self.world.replaced_at.get(number)
        if replaced is not None and self.world.now - replaced > self.world.timing.ttl:
            raise ViolationError("stale_start", f"{node} starts generation {number}, {self.world.now - replaced:.1f} s after it was replaced")

    def trains(self, number: int) -> None:
        """A generation makes steps from now on. An agent whose machine stood still has a moment to see that it is late (PROTOCOL 15)."""
        others = [one for one in self.world.stepping if one != number]
        if not others:
            return
        grace = max((self.world.woke_at(one) + WAKE_GRACE for one in (*others, number)), default=0.0)
        if self.world.now < grace:
            self.world.at(grace - self.world.now + 0.01, self.trains_on, number)
            return
        raise ViolationError("both_train", f"generations {sorted([*others, number])} train at the same time")

    def trains_on(self, number: int) -> None:
        if number in self.world.stepping:
            self.trains(number)

    # --- the end

    def settled(self) -> str | None:
        """None if the job is where it belongs, else what is missing."""
        view = self.world.store.view()
        if view.over or (view.target and not view.target.record.run and view.generation is None):
            return None
        if self.world.expected_nodes() < (view.target.record if view.target else self.world.target).min_nodes:
            return None
        if self._waits_for_a_holder(view):
            return None
        if view.active is None:
            return "no generation is active" if not view.pending else f"proposal {view.pending.record.number} is pending"
        if view.pending:
            return f"proposal {view.pending.record.number} is pending"
        if any(self._finished(view, identity, view.number) for identity in view.active.ids):
            return "some have finished, and the job is not closed"
        missing = [str(identity) for identity in view.active.ids if not self._runs(identity, view.number)]
        if missing:
            return f"generation {view.number} does not run on {', '.join(missing)}"
        if view.number not in self.world.stepping:
            return f"generation {view.number} makes no steps"
        assert view.target
        marks = not_ready_marks(view) if self.world.stuck_for_good else {}
        wanted = without_unreachable(candidates(view, marks))[: view.target.record.limit]
        if len(wanted) >= view.target.record.min_nodes and len(view.active.ids) < len(wanted):
            return f"{len(view.active.ids)} nodes train, {len(wanted)} could"
        if self.world.expected_nodes() > len(view.members):
            return f"{len(view.members)} members, {self.world.expected_nodes()} nodes are well"
        return None

    def _waits_for_a_holder(self, view: View) -> bool:
        """Whether the committed checkpoint, and all that is newer, lies where nobody will come from: then there is nothing else to do."""
        known = view.checkpoint.record if view.checkpoint else None
        if known is None or known.shared or not self.world.cut_for_good or all(node in view.members for node in known.holders):
            return False
        held = {ref for keyed in view.members.values() for ref in keyed.record.inventory}
        gives = [node for node in known.holders if node in view.members and known.digest not in view.members[node].record.lost]
        return not gives and not any(ref.order > known.order or ref.digest == known.digest for ref in held)

    def _runs(self, identity: MemberId, number: int) -> bool:
        agent = self.world.agent_of(identity)
        return bool(agent and agent.workers and agent.workers.number == number)
