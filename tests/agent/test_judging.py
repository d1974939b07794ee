"""What a failed generation comes to: judged once, from what all nodes reported, before the next one begins."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.agent.judging import decided, record_of, state_of_failure, told
from elasticd.errors import KVPermissionError, KVUnavailableError, RecordError
from elasticd.policy.budgets import Ledger, PastFailure
from elasticd.policy.decisions import Action, Decision
from elasticd.policy.evidence import Certainty, Fault, Incident, Role, Sign, Standing
from elasticd.policy.failures import FailureClass
from elasticd.policy.settings import EXIT_NO_PROGRESS, EXIT_SAME_AGAIN, Mode, Settings
from elasticd.policy.state import Cluster, State
from elasticd.rendezvous.coordinator import Coordinator
from elasticd.rendezvous.membership import Activate, End, Judge, Local, Memory, Propose, Stay, Wait, plan, react
from elasticd.rendezvous.records import (
    CauseKind,
    EventRecord,
    GenerationState,
    MemberRecord,
    PolicyRecord,
    ResumePoint,
    Verdict,
    Void,
    WorkerExit,
)
from elasticd.rendezvous.records import (
    Mode as StopMode,
)
from elasticd.rendezvous.rollback import voids
from elasticd.rendezvous.view import Keyed, View
from tests.rendezvous.world import KEYS, LONG_AGO, NOW, TIMING, committed, generation, member, mid, proposal, refs, target, view

pytestmark = pytest.mark.timeout(30)

JUDGED = replace(TIMING, judged=True)
AT = 1_000_000.0


def failed(node: str, age: int, *ends: WorkerExit, step: int | None = None, number: int = 3, mod: int | None = None) -> Keyed[MemberRecord]:
    keyed = member(node, age, failed=number, mod=mod, detail="what was heard first")
    outcome = keyed.record.outcome
    assert outcome is not None
    return replace(keyed, record=keyed.record.model_copy(update={"outcome": outcome.model_copy(update={"ends": ends, "step": step})}))


def end(rank: int, code: int = 1, exception: str = "", message: str = "", at: float = AT) -> WorkerExit:
    return WorkerExit(rank=rank, code=code, exception=exception, message=message, at=at)


def stopped(node: str, age: int, number: int = 3) -> Keyed[MemberRecord]:
    return member(node, age, stopped=number)


def seen(*members: Keyed[MemberRecord], nodes: str = "ab", budget: int = 10, resume: str = "", used: int = 0, charge: bool = True, **more: Any) -> View:
    """Generation 3 of `nodes` has failed, all of `members` have reported, and the next one is proposed."""
    now = generation(3, nodes)
    if resume:
        (ref,) = refs(resume)
        now = replace(now, record=now.record.model_copy(update={"resume": ResumePoint(generation=ref.generation, step=ref.step, digest=ref.digest)}))
    here = "".join(keyed.record.id.node for keyed in members)
    pending = proposal(4, here, mode=StopMode.KILL, kind=CauseKind.WORKER_FAILED, counted=charge)
    more = {"target": target(1, 4, budget=budget), "proposal": pending, "used": used, **more}
    return view(*members, generation=now, **more)


def policy(**more: Any) -> Keyed[PolicyRecord]:
    more.setdefault("ledger", Ledger().as_dict())
    return Keyed(PolicyRecord(scope=KEYS.scope, **more), 5, 5)


def judged(one: View, *, settings: Settings | None = None, incidents: tuple[Incident, ...] = (), cluster: Cluster | None = None) -> tuple[State, Decision]:
    state = state_of_failure(KEYS, one, settings or Settings(), incidents=incidents, cluster=cluster or Cluster(nodes=20), dice=0.0, now=AT)
    return state, decided(one, state, AT)


def verdict(one: View, **more: Any) -> Verdict:
    state, decision = judged(one, **more)
    record, _ = record_of(KEYS, one, state, decision, AT)
    assert record.verdict is not None
    return record.verdict


def after(one: View, given: Verdict) -> View:
    return replace(one, policy=policy(verdict=given))


def decide(one: View, memory: Memory = LONG_AGO) -> Any:
    return plan(one, NOW, memory, JUDGED)


# --- when it is judged ----------------------------------------------------------------------------------------------------


def test_it_is_judged_when_all_have_reported_and_not_before() -> None:
    assert decide(seen(failed("a", 1, end(0)), stopped("b", 2))) == Judge(number=3)
    running = seen(failed("a", 1, end(0)), member("b", 2))
    assert isinstance(decide(running), Propose | Wait)


def test_a_lost_node_is_judged_too_and_a_planned_change_is_not() -> None:
    lost = seen(stopped("a", 1), nodes="ab", proposal=proposal(4, "a", mode=StopMode.KILL, kind=CauseKind.LOSS))
    assert decide(lost) == Judge(number=3)
    planned = seen(stopped("a", 1), stopped("b", 2))
    assert isinstance(decide(planned), Activate)


def test_who_goes_after_all_have_stopped_in_order_has_not_failed() -> None:
    one = seen(stopped("a", 1), nodes="ab", proposal=proposal(4, "a", mode=StopMode.KILL, kind=CauseKind.LOSS))
    assert one.generation is not None
    drained = replace(one.generation, record=one.generation.record.model_copy(update={"drained": True}))
    assert isinstance(decide(replace(one, generation=drained)), Activate)


def test_it_is_judged_once() -> None:
    one = seen(failed("a", 1, end(0)), stopped("b", 2))
    given = verdict(one)
    assert isinstance(decide(after(one, given)), Activate)
    assert decide(after(one, given.model_copy(update={"generation": 2}))) == Judge(number=3), "that was another generation's"


def test_whoever_does_not_judge_goes_on_as_before() -> None:
    one = seen(failed("a", 1, end(0)), stopped("b", 2))
    assert isinstance(plan(one, NOW, LONG_AGO, TIMING), Activate)
    assert isinstance(decide(one, LONG_AGO.without_verdict(3)), Activate)


def test_a_used_up_budget_waits_a_lease_for_who_has_not_reported_to_turn_out_as_lost() -> None:
    late = member("b", 2)
    one = seen(failed("a", 1, end(0)), late, budget=1, used=1, charge=False)
    assert one.proposal is not None
    marked = one.proposal.record.model_copy(update={"not_ready": {mid("b").incarnation: late.mod_revision}, "members": (mid("a"),)})
    one = replace(one, proposal=replace(one.proposal, record=marked))
    memory = replace(LONG_AGO, failed_since=NOW - 1.0)
    wait = plan(one, NOW, memory, JUDGED)
    assert isinstance(wait, Wait)
    assert wait.until == NOW - 1.0 + JUDGED.ttl
    assert plan(one, NOW + JUDGED.ttl, memory, JUDGED) == Judge(number=3)


def test_a_budget_that_is_used_up_ends_the_job_even_if_nothing_can_be_judged() -> None:
    one = seen(failed("a", 1, end(0)), stopped("b", 2), budget=1, used=1, charge=False)
    ended = decide(one, LONG_AGO.without_verdict(3))
    assert isinstance(ended, End)
    assert ended.state is GenerationState.FAILED
    assert "restart budget used up (1 of 1)" in ended.reason


# --- what it comes to -----------------------------------------------------------------------------------------------------


def test_the_root_is_told_and_not_what_was_heard_first() -> None:
    """The echo on a was reported first; the error on b came before it."""
    one = seen(
        failed("a", 1, end(0, exception="RuntimeError: Connection closed by peer"), step=50, mod=60),
        failed("b", 2, end(1, exception="ValueError: no such token"), step=50, mod=61),
    )
    given = verdict(one)
    assert given.root == "rank 1 on b: ValueError: no such token"
    activate = decide(after(one, given))
    assert activate.cause.kind is CauseKind.WORKER_FAILED
    assert activate.cause.detail == given.root


def test_an_import_error_ends_the_job_at_once_with_its_own_exit_code() -> None:
    one = seen(failed("a", 1, end(0, exception="ModuleNotFoundError: No module named 'flash'")), failed("b", 2, end(1, exception="ModuleNotFoundError: x")))
    ended = decide(after(one, verdict(one)))
    assert isinstance(ended, End)
    assert (ended.state, ended.code) == (GenerationState.FAILED, EXIT_SAME_AGAIN)
    assert "ModuleNotFoundError" in ended.reason
    assert ended.drained


def test_a_package_that_one_node_lacks_costs_that_node_and_not_the_job() -> None:
    one = seen(stopped("a", 1), stopped("b", 2), failed("c", 3, end(2, exception="ModuleNotFoundError: No module named 'flash'")), nodes="abc", resume="2.40")
    given = verdict(one)
    assert (given.stop, list(given.without)) == ("", [mid("c").incarnation])
    again = decide(after(one, given))
    assert isinstance(again, Propose)
    assert [identity.node for identity in again.members] == ["a", "b"]
    second = replace(one, policy=policy(ledger=Ledger(failures=(PastFailure(at=AT, cls=FailureClass.CODE, kind="import_error", node="a"),)).as_dict()))
    assert verdict(second).stop, "it is everywhere"


def test_a_script_that_raises_before_its_first_step_is_not_run_again_if_it_tells_of_steps() -> None:
    raised = end(0, exception="ValueError: bad config")
    assert verdict(seen(failed("a", 1, raised, step=0), stopped("b", 2))).code == EXIT_SAME_AGAIN
    assert verdict(seen(failed("a", 1, raised, step=None), stopped("b", 2))).stop == "", "one that never tells of its steps may have made many"
    assert verdict(seen(failed("a", 1, raised, step=7), stopped("b", 2))).stop == ""


def test_the_same_again_without_a_checkpoint_ends_the_job_and_with_one_it_goes_on() -> None:
    raised = end(0, exception="ValueError: at sample 17")
    one = seen(failed("a", 1, raised, step=70), stopped("b", 2), nodes="ab")
    state, decision = judged(one)
    first, _ = record_of(KEYS, one, state, decision, AT)
    assert decision.action is Action.RESTART
    same = replace(one, policy=Keyed(first.model_copy(update={"verdict": None}), 5, 5))
    further = replace(seen(failed("a", 1, raised, step=80), stopped("b", 2)), policy=same.policy)
    assert judged(further, settings=Settings(node_exclusions=1), cluster=Cluster(nodes=20, excluded={"a": False}))[1].exit_code == EXIT_SAME_AGAIN
    assert judged(replace(further, checkpoint=committed("3.75")))[1].action is Action.RESTART


def test_crashes_in_a_row_wait_longer_each_time_and_three_without_a_step_end_the_job() -> None:
    ledger, delays = Ledger(), []
    for _ in range(4):
        one = seen(failed("a", 1, end(0, code=-9), step=10), stopped("b", 2), policy=policy(ledger=ledger.as_dict()))
        state, decision = judged(one)
        record, _ = record_of(KEYS, one, state, decision, AT)
        assert record.verdict is not None
        if record.verdict.stop:
            assert record.verdict.code == EXIT_NO_PROGRESS
            break
        delays.append(record.verdict.delay)
        ledger = Ledger.from_dict(record.ledger)
    assert delays == [0.0, 1.0, 2.0]


def test_a_job_that_was_ended_and_is_started_again_has_its_restarts_back() -> None:
    spent = Ledger(spent={FailureClass.UNKNOWN: 3}, barren=2, best_step=50, refilled_at=0).as_dict()
    killed = end(0, code=-9)
    ended = seen(failed("a", 1, killed, step=50), stopped("b", 2), policy=policy(ledger=spent))
    assert verdict(ended).stop
    since = policy(ledger=spent, verdict=Verdict(generation=2, root="x", stop="it was over"))
    again = seen(failed("a", 1, killed, step=50), stopped("b", 2), policy=since)
    assert verdict(again).stop == ""


def test_workers_do_not_start_before_the_delay_is_over() -> None:
    one = seen(failed("a", 1, end(0)), stopped("b", 2))
    waiting = after(one, verdict(one).model_copy(update={"delay": 5.0}))
    memory = replace(LONG_AGO, judged_at=NOW - 1.0)
    wait = decide(waiting, memory)
    assert isinstance(wait, Wait)
    assert wait.until == NOW + 4.0
    assert isinstance(plan(waiting, NOW + 4.0, memory, JUDGED), Activate)


def test_a_lost_node_costs_nothing() -> None:
    one = seen(stopped("a", 1), nodes="ab", budget=0)
    given = verdict(one)
    assert (given.stop, given.delay, dict(given.without)) == ("", 0.0, {})


def test_an_oom_soon_after_a_fault_of_hardware_on_its_node_is_that_fault() -> None:
    xid = Sign(
        at=AT - 100.0,
        detector="signature",
        kind="xid_63",
        summary="Xid 63: a row of memory was remapped",
        fault=Fault.HARDWARE,
        role=Role.ROOT,
        certainty=Certainty.CERTAIN,
        node="b",
        rank=None,
        generation=3,
    )
    known = Incident(id="g3-xid_63-b", standing=Standing.CONFIRMED, root=xid, signs=(xid,), opened=AT - 100.0, updated=AT - 100.0)
    one = seen(stopped("a", 1), failed("b", 2, end(1, exception="torch.OutOfMemoryError: CUDA out of memory"), step=50), nodes="ab")
    given = verdict(one, incidents=(known,))
    assert list(given.without) == [mid("b").incarnation]
    assert given.root.startswith("b: Xid 63")
    alone = verdict(one)
    assert (dict(alone.without), alone.root) == ({}, "rank 1 on b: torch.OutOfMemoryError: CUDA out of memory")


def test_in_other_modes_no_node_is_left_out() -> None:
    crashes = Ledger(failures=(PastFailure(at=AT - 50.0, cls=FailureClass.UNKNOWN, kind="segfault", node="b"),)).as_dict()
    one = seen(stopped("a", 1), failed("b", 2, end(1, code=-11), step=50), policy=policy(ledger=crashes))
    assert list(verdict(one).without) == [mid("b").incarnation]
    assert dict(verdict(one, settings=Settings(mode=Mode.ADVISE)).without) == {}


def test_the_last_nodes_that_are_needed_stay() -> None:
    crashes = Ledger(failures=(PastFailure(at=AT - 50.0, cls=FailureClass.UNKNOWN, kind="segfault", node="b"),)).as_dict()
    one = seen(stopped("a", 1), failed("b", 2, end(1, code=-11), step=50), policy=policy(ledger=crashes), target=target(2, 4))
    given = verdict(one)
    assert (given.stop, dict(given.without)) == ("", {})


def test_nodes_that_are_lost_with_it_count_among_those_that_are_missing() -> None:
    crashes = Ledger(failures=(PastFailure(at=AT - 50.0, cls=FailureClass.UNKNOWN, kind="segfault", node="c"),)).as_dict()
    crashed = failed("c", 3, end(2, code=-11, exception="", message=""), step=50)
    for members, out in (((stopped("a", 1), stopped("b", 2), crashed), True), ((stopped("a", 1), crashed), False)):
        one = seen(*members, nodes="abc", policy=policy(ledger=crashes), target=target(2, 4))
        assert (mid("c").incarnation in verdict(one).without) is out


def test_a_loss_that_a_script_calls_nan_goes_back_to_the_last_checkpoint_once() -> None:
    nan = end(0, exception="FloatingPointError: loss is nan")
    one = seen(failed("a", 1, nan, step=90), stopped("b", 2), checkpoint=committed("3.60"), resume="2.40")
    state, decision = judged(one)
    record, _ = record_of(KEYS, one, state, decision, AT)
    assert record.verdict is not None
    assert record.verdict.void == Void(generation=3, step=61, until=90, skip=True)
    assert voids(after(one, record.verdict)) == (record.verdict.void,)
    again = replace(one, policy=Keyed(record.model_copy(update={"verdict": None}), 5, 5))
    assert judged(again)[1].exit_code == EXIT_SAME_AGAIN


def test_the_jobs_restarts_in_all_end_it_with_the_root() -> None:
    one = seen(failed("a", 1, end(0, code=-9), step=50), stopped("b", 2), budget=2, used=2, charge=False)
    given = verdict(one)
    assert given.stop == "restart budget used up (2 of 2); rank 0 on a: killed by SIGKILL"
    assert given.code == 0


@pytest.mark.parametrize("node", ["a", "b"])
def test_who_has_said_nothing_of_its_workers_is_named_all_the_same(node: str) -> None:
    members = {"a": stopped("a", 1), "b": stopped("b", 2), node: failed(node, "ab".index(node) + 1)}
    assert verdict(seen(*members.values())).root == f"rank {'ab'.index(node)} on {node}: what was heard first"


# --- what is written ------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_what_happened_and_keeps_what_others_wrote() -> None:
    acks, hold = {"g3-x": "ada"}, 2
    one = seen(failed("a", 1, end(0, code=-9), step=50), stopped("b", 2), policy=policy(acks=acks, hold=hold))
    state, decision = judged(one)
    record, event = record_of(KEYS, one, state, decision, AT)
    ledger = Ledger.from_dict(record.ledger)
    assert [(past.kind, past.node, past.step) for past in ledger.failures] == [("killed", "a", 50)]
    assert (ledger.spent, ledger.best_step) == ({FailureClass.UNKNOWN: 1}, 50)
    assert (record.acks, record.hold) == (acks, hold)
    assert [(entry["about"], entry["action"], entry["rule"]) for entry in record.decisions] == [("killed@a", "restart", "unknown")]
    assert event == EventRecord(scope=KEYS.scope, number=3, at=AT, what="judged", detail=decision.why)


def test_a_ledger_that_cannot_be_read_is_not_written_over() -> None:
    one = replace(seen(failed("a", 1, end(0))), problems={KEYS.policy: "policy: not JSON"})
    with pytest.raises(RecordError, match="not JSON"):
        judged(one)


def test_what_is_told_is_bounded() -> None:
    before: PolicyRecord | None = None
    for number in range(100):
        entries = told(before, [{"about": f"x{number}", "action": "restart"}, {"about": f"y{number}", "action": "log"}], {f"y{number}"})
        before = PolicyRecord(scope=KEYS.scope, ledger={}, decisions=entries)
    assert before is not None
    assert len(before.decisions) == 24
    assert before.decisions[-1]["about"] == "y99"


# --- who coordinates, and who is left out -----------------------------------------------------------------------------------


class Scene:
    """A coordinator over one view; what it sends is kept."""

    def __init__(self, one: View, judge: Any) -> None:
        self.sent: list[Any] = []
        self.sight = SimpleNamespace(whole=True, coordinator=True, view=one, looked_at=time.monotonic(), load=lambda: None)
        self.forbidden = ""
        self.coordinator = Coordinator(KEYS, JUDGED, self.send, judge)

    def send(self, txn: Any) -> bool:
        if any(op.key == self.forbidden for op in txn.ops):
            raise KVPermissionError("txn: etcdserver: permission denied")
        self.sent.append(txn)
        return True

    def turn(self) -> float:
        return self.coordinator.turn(mid("a"), self.sight, 0)  # type: ignore[arg-type]


def test_the_verdict_is_written_in_one_transaction_with_what_it_was_found_on() -> None:
    one = seen(failed("a", 1, end(0)), stopped("b", 2))
    record = PolicyRecord(scope=KEYS.scope, ledger={})
    event = EventRecord(scope=KEYS.scope, number=3, at=AT, what="judged", detail="x")
    scene = Scene(one, lambda _view, _at: (record, event))
    scene.turn()
    (txn,) = scene.sent
    assert {compare.key for compare in txn.compares} == {KEYS.policy, KEYS.generation, KEYS.proposal, KEYS.target}
    assert {op.key for op in txn.ops} == {KEYS.policy, KEYS.event(3, "judged")}


@pytest.mark.parametrize("error", [RecordError("policy: not JSON"), KVPermissionError("list: etcdserver: permission denied"), ZeroDivisionError()])
def test_a_failure_that_cannot_be_judged_does_not_hold_the_job_up(error: Exception) -> None:
    def raise_it(_view: View, _at: float) -> Any:
        raise error

    scene = Scene(seen(failed("a", 1, end(0)), stopped("b", 2)), raise_it)
    scene.turn()
    assert scene.sent == []
    scene.turn()
    (txn,) = scene.sent
    assert KEYS.generation in {op.key for op in txn.ops}


def test_a_node_that_may_not_write_the_verdict_goes_on_without() -> None:
    """Where etcd's roles are older than the key."""
    record, event = PolicyRecord(scope=KEYS.scope, ledger={}), EventRecord(scope=KEYS.scope, number=3, at=AT, what="judged", detail="x")
    scene = Scene(seen(failed("a", 1, end(0)), stopped("b", 2)), lambda _view, _at: (record, event))
    scene.forbidden = KEYS.policy
    scene.turn()
    scene.turn()
    assert [{op.key for op in txn.ops} & {KEYS.policy, KEYS.generation} for txn in scene.sent] == [{KEYS.generation}]


def test_etcd_away_is_not_taken_for_a_failure_that_cannot_be_judged() -> None:
    def away(_view: View, _at: float) -> Any:
        raise KVUnavailableError("list: no answer")

    scene = Scene(seen(failed("a", 1, end(0)), stopped("b", 2)), away)
    for _ in range(2):
        with pytest.raises(KVUnavailableError):
            scene.turn()
    assert scene.sent == []


def test_who_is_left_out_is_in_no_further_generation_and_its_next_agent_may_come() -> None:
    one = seen(stopped("a", 1), stopped("b", 2), failed("c", 3, end(2, exception="ModuleNotFoundError: x")), nodes="abc", resume="2.40")
    one = after(one, verdict(one))
    one = replace(one, proposal=proposal(5, "ab", mode=StopMode.KILL, kind=CauseKind.WORKER_FAILED))
    activate = decide(one)
    assert isinstance(activate, Activate)
    assert list(activate.without) == [mid("c").incarnation]
    formed = generation(5, "ab").record.model_copy(update={"without": dict(activate.without)})
    assert isinstance(react(formed, None, Local(id=mid("c"), stopped=3), over=False), Stay)
    later = view(member("a", 1), member("b", 2), member("c", 3), generation=Keyed(formed, 9, 9), target=target(1, 4))
    assert isinstance(plan(later, NOW, LONG_AGO, JUDGED), Wait)
    back = view(member("a", 1), member("b", 2), member("c", 9, life=2), generation=Keyed(formed, 9, 9), target=target(1, 4))
    assert isinstance(plan(back, NOW, LONG_AGO, JUDGED), Propose)
