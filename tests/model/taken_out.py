"""Each rule that has a trace in docs/protocol.md ("What goes wrong without them"), taken out, and the faults that show it soonest.

Owns: the functions without the rule, made of the real ones; the mixes; the kind of violation to expect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elasticd.kv.types import Target
from elasticd.rendezvous import membership, transitions
from elasticd.rendezvous.membership import Activate, Decision, End, Memory, Propose, Report, Stay, Timing, Wait, fate
from elasticd.rendezvous.records import CauseKind, GenerationState, Mode, ResumePoint
from elasticd.rendezvous.resume import Choice
from elasticd.rendezvous.transitions import Txn
from elasticd.rendezvous.view import View
from tests.model.faults import FOREVER, MIXES, Mix
from tests.model.rules import Rules


@dataclass(frozen=True, kw_only=True)
class TakenOut:
    """A rule's number, what it is like without it, the faults that show it, and what the checker then says."""

    number: str
    rules: Rules
    mix: Mix
    kinds: frozenset[str]
    within: int = 2000
    name: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def _without(txn: Txn, drop: Callable[[Any], bool]) -> Txn:
    return Txn(tuple(compare for compare in txn.compares if not drop(compare)), txn.ops)


def register_over(keys: Any, record: Any, lease: int) -> Txn:
    """1: overwrite whoever stands there."""
    return _without(transitions.register(keys, record, lease), lambda compare: compare.target is Target.CREATE)


def activate_without_range(*args: Any, **kwargs: Any) -> Txn:
    """12: additions and changes since the look go unseen."""
    return _without(transitions.activate(*args, **kwargs), lambda compare: compare.prefix)


def activate_without_checkpoint(keys: Any, *args: Any, **kwargs: Any) -> Txn:
    """12, 23: a commit since the look goes unseen."""
    return _without(transitions.activate(keys, *args, **kwargs), lambda compare: compare.key == keys.checkpoint)


def commit_without_generation(keys: Any, view: View, record: Any) -> Txn:
    """23: an old commit may land late."""
    return _without(transitions.commit(keys, view, record), lambda compare: compare.key == keys.generation)


def commit_anything(keys: Any, view: View, record: Any) -> Txn:
    """23: not only to a greater one."""
    return transitions.commit(keys, replace(view, checkpoint=None), record) if view.checkpoint is None else _only_generation(keys, view, record)


def _only_generation(keys: Any, view: View, record: Any) -> Txn:
    txn = transitions.commit(keys, replace(view, checkpoint=None), record)
    return _without(txn, lambda compare: compare.key == keys.checkpoint)


def plan_kills_for_a_leaver(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """9: every replacement of a pending proposal is a kill."""
    decision = membership.plan(view, now, memory, timing)
    return replace(decision, mode=Mode.KILL) if isinstance(decision, Propose) and view.pending else decision


def plan_never_escalates(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """9: an agreed stop stays one, and is waited for."""
    decision = membership.plan(view, now, memory, timing)
    agreed = view.pending and view.pending.record.mode is Mode.AGREED_STOP
    what = fate(view)
    if agreed and isinstance(decision, Propose) and decision.mode is Mode.KILL and (what.lost or what.running):
        return Wait(why="the stop was agreed")
    if agreed and isinstance(decision, Activate) and what.lost:
        return Wait(why="not everybody has reported")
    return decision


def plan_sees_keys_only(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """11: a member of the generation that has stopped is no reason to propose."""
    decision = membership.plan(view, now, memory, timing)
    if isinstance(decision, Propose) and decision.cause.kind in {CauseKind.WORKER_FAILED, CauseKind.WORKER_STOPPED} and not view.pending:
        return Wait(why="every key is there")
    return decision


def react_without_report(generation: Any, proposal: Any, local: Any, *, over: bool) -> Any:
    """11: who never started has nothing to say."""
    directive = membership.react(generation, proposal, local, over=over)
    return Stay(why="never started") if isinstance(directive, Report) else directive


def plan_awaits_the_proposed_only(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """12: old members that are not proposed are not waited for."""
    if view.pending and view.active and not fate(view).lost:
        proposed = view.pending.record.members
        late = [keyed for identity, keyed in view.present.items() if identity in proposed and keyed.record.stopped < view.number]
        here = all(identity in view.present and not view.present[identity].record.leaving for identity in proposed)
        enough = view.target and len(proposed) >= view.target.record.min_nodes
        if not late and here and enough:
            record = view.pending.record
            return membership._activate(view, record, membership._resume(view, record.members, record.mode))
    return membership.plan(view, now, memory, timing)


def plan_waits_for_the_late(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """13: nobody is ever marked not ready."""
    decision = membership.plan(view, now, memory, timing)
    if isinstance(decision, Propose) and view.pending and set(decision.not_ready) - set(view.pending.record.not_ready):
        return Wait(why="they will come")
    return decision


def plan_without_hold(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """15: a generation that shares nobody with the last one does not wait."""
    return membership.plan(view, now, replace(memory, orphaned_since=-FOREVER), timing)


def plan_ignores_the_finished(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """19: what is pending goes on, whoever has finished."""
    decision = membership.plan(view, now, memory, timing)
    if isinstance(decision, End) and decision.state is GenerationState.SUCCEEDED and view.pending and view.target:
        return membership._plan_pending(view, view.pending.record, view.target.record, now, memory, timing)
    return decision


def plan_joins_the_finished(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """19: something planned is proposed although somebody has finished."""
    decision = membership.plan(view, now, memory, timing)
    what = fate(view)
    if what.finished and view.target and not view.pending and isinstance(decision, Wait | End):
        size = membership._plan_size(view, view.target.record, {}, now, memory, timing)
        return size if isinstance(size, Propose) else decision
    if isinstance(decision, End) and decision.state is GenerationState.SUCCEEDED and view.pending and view.target:
        return membership._plan_pending(view, view.pending.record, view.target.record, now, memory, timing)
    return decision


def plan_goes_by_steps(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """21: the greatest step, whatever generation made it."""
    decision = membership.plan(view, now, memory, timing)
    if not isinstance(decision, Activate):
        return decision
    held = [ref for keyed in view.members.values() for ref in keyed.record.inventory]
    newest = max(held, key=lambda ref: (ref.step, ref.generation), default=None)
    if newest is None or (view.checkpoint and view.checkpoint.record.step >= newest.step):
        return decision
    holders = tuple(name for name, keyed in view.members.items() if newest in keyed.record.inventory)
    return replace(decision, resume=ResumePoint(generation=newest.generation, step=newest.step, digest=newest.digest, holders=holders))


def plan_resumes_what_it_can(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """22: the newest that all hold, even if something newer is committed."""
    return membership.plan(replace(view, checkpoint=None), now, memory, timing)


def plan_goes_back_however_far(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """22: the newest that all survivors hold, however old it is."""
    decision = membership.plan(view, now, memory, timing)
    if not isinstance(decision, Activate) or view.generation is None or decision.resume is None:
        return decision
    survivors = [keyed for identity, keyed in view.present.items() if identity in decision.proposal.members and identity in view.generation.record.ids]
    held = [{ref.digest: ref for ref in keyed.record.inventory} for keyed in survivors]
    common = set(held[0]).intersection(*held) if held else set()
    usable = [held[0][digest] for digest in common if view.checkpoint is None or held[0][digest].order >= view.checkpoint.record.order]
    newest = max(usable, key=lambda ref: ref.order, default=None)
    if newest is None:
        return decision
    holders = tuple(keyed.record.id.node for keyed in survivors)
    return replace(decision, resume=ResumePoint(generation=newest.generation, step=newest.step, digest=newest.digest, holders=holders))


def plan_spares_the_transfer(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """22: after an agreed stop, too, a step back is taken."""
    if view.pending is None or view.pending.record.mode is Mode.KILL:
        return membership.plan(view, now, memory, timing)
    decision = membership.plan(view, now, memory, timing)
    if not isinstance(decision, Activate):
        return decision
    return replace(decision, resume=membership._resume(view, decision.proposal.members, Mode.KILL).resume)


def plan_gives_up_on_the_absent(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """24: a holder that is not here counts as one that has lost it."""
    decision = membership.plan(view, now, memory, timing)
    return membership.plan(replace(view, checkpoint=None), now, memory, timing) if isinstance(decision, Wait) and decision.alert else decision


def plan_believes_one_of_two(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """24: one holder's word that it is lost is enough."""
    known = view.checkpoint
    if known and any(known.record.digest in keyed.record.lost for keyed in view.members.values()):
        view = replace(view, checkpoint=None)
    decision = membership.plan(view, now, memory, timing)
    return replace(decision, fell_back=known.record) if isinstance(decision, Activate) and known and view.checkpoint is None else decision


def plan_waits_for_no_holder(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """24: a generation is formed though nobody is here that can give it its state."""
    decision = membership.plan(view, now, memory, timing)
    if not (isinstance(decision, Wait) and decision.alert and view.checkpoint):
        return decision
    lost = view.checkpoint.record
    resume = ResumePoint(generation=lost.generation, step=lost.step, digest=lost.digest, holders=lost.holders)
    if view.pending:
        return membership._activate(view, view.pending.record, Choice(resume=resume))
    return membership.plan(replace(view, checkpoint=None), now, memory, timing)


def plan_says_nothing(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """24: falling back is told nobody."""
    decision = membership.plan(view, now, memory, timing)
    return replace(decision, fell_back=None) if isinstance(decision, Activate) else decision


def judge_without_looking(*args: Any) -> Txn:
    """31: whoever judges later does it again."""
    return _without(transitions.judge(*args), lambda compare: compare.key == args[0].policy)


def plan_judges_nothing(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """31: the next generation begins as if nothing had been found out."""
    return membership.plan(view, now, memory, replace(timing, judged=False))


def plan_takes_in_everybody(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """31: who is left out is taken in again."""
    if view.generation is None:
        return membership.plan(view, now, memory, timing)
    bare = replace(view.generation, record=view.generation.record.model_copy(update={"without": {}}))
    policy = view.policy
    if policy and policy.record.verdict:
        policy = replace(policy, record=policy.record.model_copy(update={"verdict": policy.record.verdict.model_copy(update={"without": {}})}))
    return membership.plan(replace(view, generation=bare, policy=policy), now, memory, timing)


def plan_mixes(view: View, now: float, memory: Memory, timing: Timing) -> Decision:
    """28: whatever code a node has, it may train."""
    blank = {name: replace(keyed, record=keyed.record.model_copy(update={"fingerprint": {}})) for name, keyed in view.members.items()}
    return membership.plan(replace(view, members=blank), now, memory, timing)


def _mix(weights: dict[str, float], **more: Any) -> Mix:
    """Without an end of the job within the walk, unless asked for."""
    return replace(Mix(weights=weights, finishes=0.0), **more)


def _kinds(*kinds: str) -> frozenset[str]:
    return frozenset(kinds)


APART = _mix(
    {"part": 1}, count=(1, 1), keep=frozenset({"part"}), longest=FOREVER, nodes=(3, 4), minimum=1, budget=(3,), must_not_fail=True, together=0.0
)
LEFT = _mix({"leave": 3, "join": 1}, count=(2, 5), nodes=(2, 3), minimum=1, together=0.9)
TAKEN_OUT: tuple[TakenOut, ...] = (
    TakenOut(number="1", name="a restarted agent overwrites its key and is taken for the old one", rules=Rules(register=register_over, fresh_identity=False),
             mix=_mix({"crash": 1, "power": 1}, count=(1, 3), minimum=1, together=0.2), kinds=_kinds("started_twice", "no_progress")),
    TakenOut(number="4, exception", name="a lost key is never taken up again", rules=Rules(reattach=False), mix=MIXES["asleep"],
             kinds=_kinds("needless_restart")),
    TakenOut(number="4, blindness", name="a loss is believed right after an outage", rules=Rules(blind_after_outage=False), mix=MIXES["asleep"],
             kinds=_kinds("needless_restart")),
    TakenOut(number="6, 8", name="a hung loop keeps its lease and nobody stands in", rules=Rules(lease_needs_loop=False, deputy=False),
             mix=replace(MIXES["hung"], weights={"hang": 2, "crash": 1, "fail": 1}, count=(2, 4)), kinds=_kinds("no_progress")),
    TakenOut(number="9, kill", name="a leaver makes a kill of an agreed stop", rules=Rules(plan=plan_kills_for_a_leaver),
             mix=_mix({"leave": 2, "join": 1}, together=0.8, count=(2, 5)), kinds=_kinds("kill_without_need")),
    TakenOut(number="9, agreed", name="an agreed stop waits for ever", rules=Rules(plan=plan_never_escalates),
             mix=_mix({"crash": 3, "stuck": 1, "leave": 1, "join": 1}, together=0.8, keep=frozenset({"stuck"}), longest=FOREVER, nodes=(3, 4), minimum=1),
             kinds=_kinds("no_progress")),
    TakenOut(number="11, reason", name="a worker's crash is no reason to propose", rules=Rules(plan=plan_sees_keys_only),
             mix=_mix({"fail": 1}, count=(1, 2), together=0.0), kinds=_kinds("no_progress")),
    TakenOut(number="11, report", name="who never started does not report", rules=Rules(react=react_without_report),
             mix=_mix({"crash": 1, "fail": 1}, count=(1, 3), nodes=(3, 4)), kinds=_kinds("no_progress")),
    TakenOut(number="12, old members", name="only the proposed are waited for", rules=Rules(plan=plan_awaits_the_proposed_only),
             mix=_mix({"leave": 2, "join": 1, "slow": 1}, count=(2, 5)), kinds=_kinds("not_stopped")),
    TakenOut(number="12, range", name="activate without the range compare", rules=Rules(activate=activate_without_range),
             mix=_mix({"leave": 2, "crash": 2, "slow": 2, "second": 2}, count=(3, 6), together=0.8), kinds=_kinds("stale_member", "not_stopped")),
    TakenOut(number="13", name="nobody is ever marked not ready", rules=Rules(plan=plan_waits_for_the_late),
             mix=_mix({"stuck": 2, "fail": 1, "crash": 1}, keep=frozenset({"stuck"}), longest=FOREVER, nodes=(3, 4), minimum=1, together=0.0),
             kinds=_kinds("no_progress")),
    TakenOut(number="14", name="workers start by a cached view", rules=Rules(look_before_start=False),
             mix=_mix({"pause": 3, "slow": 2}, together=0.9, count=(3, 6), nodes=(2, 3), minimum=1, shared=1.0), kinds=_kinds("stale_start", "both_train")),
    TakenOut(number="15, hold", name="a new generation does not wait for unseen workers", rules=Rules(plan=plan_without_hold),
             mix=_mix({"cut": 1}, count=(1, 2), minimum=1, together=0.3), kinds=_kinds("both_train")),
    TakenOut(number="15, freeze", name="workers go on for ever without etcd", rules=Rules(frozen_stop=False),
             mix=MIXES["alone"], kinds=_kinds("both_train")),
    TakenOut(number="16", name="nobody says whom it cannot reach", rules=Rules(name_unreachable=False),
             mix=APART,
             kinds=_kinds("ended_wrongly")),
    TakenOut(number="16, killed", name="only who failed first says whom it cannot reach", rules=Rules(killed_early_looks=False),
             mix=APART,
             kinds=_kinds("ended_wrongly")),
    TakenOut(number="18", name="a leaver takes its key along at once", rules=Rules(leaver_stays=False),
             mix=_mix({"leave": 1}, count=(1, 2), together=0.0), kinds=_kinds("kill_without_need")),
    TakenOut(number="18, proposed", name="a leaver goes while it is proposed", rules=Rules(leaver_waits_for_proposal=False),
             mix=_mix({"leave": 2, "join": 1}, together=0.9, start_within=12.0), kinds=_kinds("kill_without_need"), within=4000),
    TakenOut(number="19, pending", name="a pending join goes on when all have finished", rules=Rules(plan=plan_ignores_the_finished),
             mix=_mix({"join": 1, "leave": 1, "slow": 2}, finishes=1.0, together=0.5, start_within=12.0), kinds=_kinds("finished_restarts")),
    TakenOut(number="19, planned", name="a join is proposed although somebody has finished", rules=Rules(plan=plan_joins_the_finished),
             mix=_mix({"join": 1, "leave": 1, "slow": 1}, finishes=1.0, together=0.5, start_within=12.0), kinds=_kinds("finished_restarts")),
    TakenOut(number="21", name="states are compared by step alone", rules=Rules(plan=plan_goes_by_steps),
             mix=_mix({"cut": 3, "pause": 1, "crash": 2}, count=(2, 6), minimum=1, shared=1.0), kinds=_kinds("resume_behind_commit", "steps_lost"),
             within=4000),
    TakenOut(number="22", name="the resume point may be older than the committed one", rules=Rules(plan=plan_resumes_what_it_can),
             mix=_mix({"crash": 3, "cut": 1}, count=(2, 5), minimum=1), kinds=_kinds("resume_behind_commit")),
    TakenOut(number="3", name="a new incarnation says nothing of what its node holds", rules=Rules(keeps_holdings=False),
             mix=_mix({"cut": 2, "pause": 2, "mass": 1}, count=(1, 3), minimum=1), kinds=_kinds("steps_lost", "resume_behind_commit")),
    TakenOut(number="18, states", name="a leaver goes before the others have its state", rules=Rules(leaver_gives=False),
             mix=_mix({"leave": 2, "scale": 1}, count=(1, 3), minimum=1, together=0.0), kinds=_kinds("steps_lost", "planned_loss")),
    TakenOut(number="22, elsewhere", name="who cannot get the state begins with its own", rules=Rules(begins_as_told=False),
             mix=_mix({"blind": 3, "crash": 2}, count=(3, 7), minimum=1), kinds=_kinds("different_states")),
    TakenOut(number="22, near", name="the newest that all hold, however old", rules=Rules(plan=plan_goes_back_however_far),
             mix=_mix({"crash": 3, "join": 1, "fail": 1}, count=(3, 7), nodes=(3, 4), minimum=1, budget=(30,)), kinds=_kinds("steps_lost")),
    TakenOut(number="22, planned", name="a step back is taken after an agreed stop", rules=Rules(plan=plan_spares_the_transfer),
             mix=_mix({"restart": 2, "join": 1, "leave": 1}, count=(2, 5), nodes=(3, 4)), kinds=_kinds("planned_loss")),
    TakenOut(number="24, absent", name="who is absent counts as having lost it", rules=Rules(plan=plan_gives_up_on_the_absent),
             mix=_mix({"power": 3, "crash": 2}, count=(2, 6), minimum=1, shared=0.0), kinds=_kinds("resume_behind_commit")),
    TakenOut(number="24, one word", name="one holder's word that it is lost is enough", rules=Rules(plan=plan_believes_one_of_two),
             mix=_mix({"wipe": 3, "power": 3}, count=(3, 7), minimum=1, shared=0.0), kinds=_kinds("resume_behind_commit")),
    TakenOut(number="24, holder", name="nobody is waited for", rules=Rules(plan=plan_waits_for_no_holder),
             mix=_mix({"power": 3, "crash": 2}, count=(3, 6), minimum=1, shared=0.0, span=(40, 60), budget=(30,)), kinds=_kinds("nobody_gives")),
    TakenOut(number="24, disks", name="one disk is enough for a commit", rules=Rules(two_disks=False),
             mix=_mix({"wipe": 2, "power": 3}, count=(3, 7), minimum=1, shared=0.0), kinds=_kinds("fell_back_needlessly")),
    TakenOut(number="24, event", name="falling back is told nobody", rules=Rules(plan=plan_says_nothing),
             mix=_mix({"wipe": 3, "power": 3}, count=(3, 7), minimum=1, nodes=(1, 2), shared=0.0), kinds=_kinds("fell_back_unsaid")),
    TakenOut(number="29", name="the last nodes take the newest state along", rules=Rules(keeps_last=False), mix=LEFT, kinds=_kinds("planned_loss")),
    TakenOut(number="29, not begun", name="so does who leaves before it has begun", rules=Rules(keeps_last=False), mix=LEFT, kinds=_kinds("steps_lost")),
    TakenOut(number="28", name="nodes with different code train together", rules=Rules(plan=plan_mixes),
             mix=MIXES["upgraded"], kinds=_kinds("mixed_code")),
    TakenOut(number="23, generation", name="commit without the generation compare", rules=Rules(commit=commit_without_generation),
             mix=_mix({"slow": 2, "crash": 2, "join": 1, "pause": 1}, together=0.7, count=(3, 6)), kinds=_kinds("stale_commit")),
    TakenOut(number="23, greater", name="commit to an older one", rules=Rules(commit=commit_anything),
             mix=_mix({"slow": 2, "second": 1}, count=(2, 4)), kinds=_kinds("commit_falls")),
    TakenOut(number="12, 23 checkpoint", name="activate without the checkpoint compare", rules=Rules(activate=activate_without_checkpoint),
             mix=_mix({"slow": 2, "crash": 2, "second": 1, "fail": 1}, together=0.7, count=(3, 6)), kinds=_kinds("resume_behind_commit"), within=6000),
    TakenOut(number="31, once", name="who judges does not look whether somebody has", rules=Rules(judge=judge_without_looking),
             mix=_mix({"slow": 2, "second": 2, "fail": 3}, together=0.7, count=(3, 6), minimum=1), kinds=_kinds("judged_twice")),
    TakenOut(number="31, before", name="the next generation does not wait for the verdict", rules=Rules(plan=plan_judges_nothing),
             mix=_mix({"fail": 1}, count=(1, 3), minimum=1), kinds=_kinds("not_judged")),
    TakenOut(number="31, left out", name="who is left out is taken in again", rules=Rules(plan=plan_takes_in_everybody),
             mix=_mix({"fail": 3}, count=(2, 4), nodes=(3, 4), minimum=1), kinds=_kinds("left_out_is_in")),
)  # fmt: skip
