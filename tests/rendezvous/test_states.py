"""Real members on a real etcd: what they say of their states, commits, and leaving with a state that others need."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.errors import KVClosedError, KVUnavailableError, UsageError
from elasticd.rendezvous.commits import Commits
from elasticd.rendezvous.desk import Desk
from elasticd.rendezvous.records import INVENTORY_MAX, LOST_MAX, CheckpointRecord, MemberRecord, Mode, Outcome, Result, ResumePoint, SnapshotRef
from elasticd.rendezvous.view import Keyed
from tests.rendezvous.world import KEYS, committed, generation, member, mid, proposal, refs, target, view
from tests.support.etcd import Server, await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticd.rendezvous.records import GenerationRecord
    from tests.rendezvous.conftest import Job

pytestmark = pytest.mark.timeout(60)
TWO = (1, 2, 2)


def key_of(job: Job, name: str) -> MemberRecord:
    return job.view().members[name].record


def told(job: Job, name: str) -> tuple[tuple[SnapshotRef, ...], tuple[str, ...]]:
    record = key_of(job, name)
    return record.inventory, record.lost


def checkpoint(job: Job, number: int, step: int, digest: str = "", **more: Any) -> CheckpointRecord:
    return CheckpointRecord(scope=job.keys.scope, generation=number, step=step, digest=digest or f"{number}.{step}", holders=("a",), **more)


# --- what a key says -------------------------------------------------------------------------------------------------------


def test_a_member_registers_with_what_it_holds_and_what_it_is(job: Job) -> None:
    a = job.node("a", nodes=(2, 2, 2), state_port=4321)
    a.start(inventory=refs("1.3 1.4"), lost=("x",), fingerprint={"code": "c1", "data": "d1"})
    record = key_of(job, "a")
    assert (record.inventory, record.lost, record.fingerprint, record.state_port) == (refs("1.4 1.3"), ("x",), {"code": "c1", "data": "d1"}, 4321)
    assert a.member.lookup("a") == record
    assert a.member.lookup("b") is None
    job.put(job.keys.member("b"), b"garbage")
    assert a.member.lookup("b") is None


def test_a_port_can_be_given_at_start(job: Job) -> None:
    job.node("a", nodes=(2, 2, 2)).start(state_port=77)
    assert key_of(job, "a").state_port == 77


def test_a_member_without_states_says_so(job: Job) -> None:
    job.start("a", nodes=(2, 2, 2))
    record = key_of(job, "a")
    assert (record.inventory, record.lost, record.fingerprint, record.state_port) == ((), (), {}, None)


def test_no_more_is_told_than_fits_and_the_newest_first(job: Job) -> None:
    many = refs(" ".join(f"1.{step}" for step in range(100)))
    job.node("a", nodes=(2, 2, 2)).start(inventory=many, lost=[f"d{number % 20}" for number in range(40)])
    inventory, lost = told(job, "a")
    assert inventory == many[::-1][:INVENTORY_MAX]
    assert lost == tuple(f"d{number}" for number in range(LOST_MAX))


@pytest.mark.parametrize("parts", [{f"p{number}": "d" for number in range(9)}, {"../code": "d"}, {"code": "d" * 129}], ids=["nine", "a path", "too long"])
def test_a_fingerprint_that_does_not_fit_is_refused_before_anything_is_written(job: Job, parts: dict[str, str]) -> None:
    a = job.node("a")
    with pytest.raises(UsageError, match="fingerprint"):
        a.start(fingerprint=parts)
    assert job.view().members == {}


def test_a_report_tells_what_the_node_holds_now(job: Job) -> None:
    a = job.node("a", nodes=(1, 1, 1))
    a.start(inventory=refs("1.3"), lost=("x",))
    first = job.settled("a")
    a.told = {"inventory": refs("1.7 1.8"), "lost": ("y",)}
    a.fail()
    second = job.await_training("a", after=first)
    assert told(job, "a") == (refs("1.8 1.7"), ("y",))
    assert a.worlds[-1].resume == ResumePoint(generation=1, step=8, digest="1.8", holders=("a",))
    a.told = {}
    a.fail()
    third = job.await_training("a", after=second)
    assert told(job, "a") == (refs("1.8 1.7"), ("y",)), "as said last"
    a.told = {"inventory": ()}
    a.fail()
    job.await_training("a", after=third)
    assert told(job, "a") == ((), ())
    assert a.worlds[-1].resume is None


def test_a_standby_whose_disk_changes_writes_its_key_and_only_then(job: Job) -> None:
    a = job.node("a", nodes=(2, 2, 2))
    a.start(inventory=refs("1.3"))
    before = job.view().members["a"].mod_revision
    a.member.holdings(refs("1.3"))
    a.member.holdings(refs("1.3 1.4"), ("z",))
    await_(lambda: told(job, "a") == (refs("1.4 1.3"), ("z",)), what="the key being written")
    assert job.view().members["a"].mod_revision > before
    assert key_of(job, "a").stopped == 0


def test_while_workers_run_nothing_is_written_and_the_report_tells_it(job: Job) -> None:
    a, _b = job.start("ab", nodes=TWO)
    first = job.settled("ab")
    await_(lambda: not a.member._desk.own().leaving and job.view().revision, what="quiet")
    before = job.view().members["a"].mod_revision
    a.member.holdings(refs("1.3"), ("z",))
    assert not a.member._desk.take_dirty()
    assert job.view().members["a"].mod_revision == before
    a.fail()
    job.await_training("ab", after=first)
    assert told(job, "a") == (refs("1.3"), ("z",))


def holding(job: Job, name: str) -> tuple[Any, ...]:
    record = key_of(job, name)
    return record.inventory, record.lost, record.fingerprint, record.state_port


def test_a_member_that_takes_its_key_up_again_says_the_same(job: Job) -> None:
    a = job.node("a", nodes=(1, 1, 1))
    a.start(inventory=refs("1.3"), lost=("x",), fingerprint={"code": "c1"}, state_port=9)
    first = job.settled("a")
    created = job.view().members["a"].create_revision
    job.revoke("a")
    await_(lambda: "a" in job.view().members and job.view().members["a"].create_revision > created, what="the key again")
    assert (key_of(job, "a").id, a.running) == (a.member.id, first)
    assert holding(job, "a") == (refs("1.3"), ("x",), {"code": "c1"}, 9)


def test_a_member_that_was_thrown_out_is_somebody_else_and_holds_what_it_held(job: Job) -> None:
    for name in "ab":
        job.node(name, nodes=(1, 2, 2)).start(inventory=refs("1.3"), lost=("x",), fingerprint={"code": "c1"}, state_port=9)
    a, b = job.nodes["a"], job.nodes["b"]
    first = job.settled("ab")
    before = b.member.id
    b.told = {"inventory": refs("1.8")}
    job.revoke("b")
    job.await_training("ab", after=first)
    assert b.member.id not in (before, a.member.id)
    assert holding(job, "b") == (refs("1.8"), (), {"code": "c1"}, 9)


def test_a_node_whose_code_differs_stands_by(job: Job) -> None:
    a, b = job.node("a", nodes=(1, 2, 2)), job.node("b", nodes=(1, 2, 2))
    a.start(fingerprint={"code": "old"})
    first = job.settled("a")
    b.start(fingerprint={"code": "new"})
    await_(lambda: a.member.why == "training; b differs in code (new, a has old)", what="it being told")
    assert (a.running, b.running) == (first, None)
    a.member.ask_to_leave()
    job.await_training("b", after=first)


# --- commits ---------------------------------------------------------------------------------------------------------------


def test_the_active_generation_commits_and_everybody_hears_of_it(job: Job) -> None:
    """Also those who watch a few keys only."""
    everybody = job.start("abc", nodes=(1, 3, 3))
    number = job.settled("abc")
    assert [node.member.checkpoint for node in everybody] == [None, None, None]
    record = checkpoint(job, number, 5)
    assert everybody[0].member.commit(record)
    assert everybody[0].member.checkpoint == record
    assert job.view().checkpoint.record == record  # type: ignore[union-attr]
    for node in everybody:
        await_(lambda node=node: node.member.checkpoint == record, what=f"{node.name} hearing of it")
    late = job.node("d", nodes=(1, 3, 3))
    late.member.connect()
    assert late.member.checkpoint == record
    assert [node.running for node in everybody] == [number] * 3


def test_a_commit_is_fenced_and_goes_only_to_something_newer_and_is_true_when_repeated(job: Job) -> None:
    a, _b = job.start("ab", nodes=TWO)
    number = job.settled("ab")
    commit = a.member.commit
    assert not commit(checkpoint(job, number + 1, 9))
    assert commit(checkpoint(job, number, 5))
    revision = job.view().revision
    assert commit(checkpoint(job, number, 5))
    assert not commit(checkpoint(job, number, 5, "another"))
    assert not commit(checkpoint(job, number, 4))
    assert job.view().checkpoint.mod_revision <= revision  # type: ignore[union-attr]
    assert commit(checkpoint(job, number, 6, shared=True))
    a.fail()
    job.await_training("ab", after=number)
    assert not commit(checkpoint(job, number, 7)), "its generation is over"
    assert commit(checkpoint(job, number, 6)), "what was committed is committed"
    assert a.member.checkpoint == checkpoint(job, number, 6, shared=True)


def test_of_several_commits_at_once_the_newest_stands(job: Job) -> None:
    a, _b = job.start("ab", nodes=TWO)
    number = job.settled("ab")
    threads = [threading.Thread(target=a.member.commit, args=(checkpoint(job, number, step),)) for step in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert a.member.commit(checkpoint(job, number, 9))
    assert job.view().checkpoint.record.step == 9  # type: ignore[union-attr]


def test_a_commit_is_no_sign_of_life(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes it: the loop that hangs must not look as if it turned (PROTOCOL 6)."""
    (a,) = job.start("a", nodes=(1, 1, 1))
    number = job.settled("a")
    ticking: list[str] = []
    monkeypatch.setattr(a.member, "_tick", lambda: ticking.append(threading.current_thread().name))
    assert a.member.commit(checkpoint(job, number, 1))
    assert a.member.lookup("a")
    assert threading.current_thread().name not in ticking


def test_a_view_from_before_a_commit_does_not_take_it_back() -> None:
    """The watch is later than the answer to the commit."""
    commits = Commits(KEYS)
    seen = view(checkpoint=committed("4.7", "a"))
    commits.note(seen)
    commits.note(replace(seen, revision=seen.revision - 1, checkpoint=committed("4.6", "a")))
    assert commits.newest == committed("4.7", "a").record
    commits.note(replace(seen, revision=seen.revision + 1, checkpoint=None))
    assert commits.newest is None


def test_without_etcd_a_commit_says_so_and_is_made_later(job: Job, server: Server) -> None:
    (a,) = job.start("a", nodes=(1, 1, 1))
    number = job.settled("a")
    server.pause()
    with pytest.raises(KVUnavailableError):
        a.member.commit(checkpoint(job, number, 5))
    with pytest.raises(KVUnavailableError):
        a.member.lookup("a")
    assert a.member.checkpoint is None
    server.heal()
    server.await_serving()
    assert a.member.commit(checkpoint(job, number, 5))


def test_garbage_in_place_of_the_checkpoint_is_written_over_by_the_next_commit(job: Job) -> None:
    (a,) = job.start("a", nodes=(1, 1, 1))
    number = job.settled("a")
    job.put(job.keys.checkpoint, b"garbage")
    assert a.member.commit(checkpoint(job, number, 5))
    assert job.view().checkpoint.record.step == 5  # type: ignore[union-attr]


def test_a_closed_member_commits_nothing(job: Job) -> None:
    node = job.node("a")
    with pytest.raises(KVClosedError):
        node.member.commit(checkpoint(job, 1, 1))


def test_a_job_that_starts_again_waits_for_the_node_that_holds_its_checkpoint_and_then_takes_it_in(job: Job) -> None:
    a, b = job.start("ab", nodes=TWO)
    number = job.settled("ab")
    record = checkpoint(job, number, 5).model_copy(update={"holders": ("b",)})
    assert a.member.commit(record)
    for node in (a, b):
        node.close()
    again = job.node("a", nodes=TWO)
    again.start()
    await_(lambda: "can give the committed checkpoint" in again.member.why, what="it being told")
    assert again.running is None
    job.node("b", nodes=TWO).start(inventory=[SnapshotRef(generation=number, step=5, digest=record.digest)])
    job.await_training("ab", after=number)
    assert again.worlds[-1].resume == ResumePoint(generation=number, step=5, digest=record.digest, holders=("b",))


def test_when_its_holder_has_lost_it_the_job_falls_back_and_says_so(job: Job) -> None:
    (a,) = job.start("a", nodes=(1, 1, 1))
    number = job.settled("a")
    assert a.member.commit(checkpoint(job, number, 5))
    a.close()
    again = job.node("a", nodes=(1, 1, 1))
    again.start(inventory=[SnapshotRef(generation=number, step=3, digest="older")], lost=(f"{number}.5",))
    job.await_training("a", after=number)
    assert again.worlds[-1].resume == ResumePoint(generation=number, step=3, digest="older", holders=("a",))
    (event,) = [event for event in job.view().events if event.what == "fell_back"]
    assert event.number == again.running
    assert event.detail == f"the committed checkpoint (generation {number}, step 5, {number}.5) is lost on a; begins with generation {number}, step 3, older"


# --- leaving ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="desk")
def _desk() -> Iterator[Desk]:
    desk = Desk("job", lambda: None)
    yield desk
    desk.close()


def leaving(desk: Desk, members: str, holders: str, **keys: Any) -> None:
    """Member x asked to leave, and generation 5 of `members` begins with a state that `holders` have."""
    desk.ask_to_leave()
    formed = generation(5, members)
    resume = ResumePoint(generation=4, step=7, digest="d", holders=tuple(holders))
    formed = Keyed(formed.record.model_copy(update={"resume": resume}), 2, 500)
    here: list[Keyed[MemberRecord]] = [member(node, age) for age, node in enumerate(members)]
    desk.note(view(member("x", 0, leaving=True), *here, target=target(1, 3), generation=formed, **keys), mid("x"))


def test_a_leaver_stays_while_the_others_have_yet_to_fetch_from_it(desk: Desk) -> None:
    asked: list[GenerationRecord] = []
    answers = [True, True, False]

    def owed(record: GenerationRecord) -> bool:
        asked.append(record)
        return answers[len(asked) - 1]

    leaving(desk, "ab", "x")
    assert desk.wait_left(5.0, owed)
    assert [record.number for record in asked] == [5, 5, 5]


def test_a_leaver_is_not_held_longer_than_it_said(desk: Desk) -> None:
    leaving(desk, "ab", "xa")
    assert not desk.wait_left(0.5, lambda _record: True)
    assert desk.wait_left(0.5), "nobody asks whether anything is owed"


@pytest.mark.parametrize(("members", "holders"), [("ab", "abx"), ("ab", "a"), ("ab", "")], ids=["all have it", "others give it", "nobody has it"])
def test_a_leaver_that_owes_nothing_goes_unasked(desk: Desk, members: str, holders: str) -> None:
    leaving(desk, members, holders)
    assert desk.wait_left(0.0, lambda _record: pytest.fail("asked"))


def test_a_leaver_stays_though_the_next_generation_is_already_pending(desk: Desk) -> None:
    """Who was to fetch from it has failed meanwhile: the next one may begin with the same state."""
    leaving(desk, "ab", "x", proposal=proposal(6, "a", mode=Mode.KILL))
    assert not desk.wait_left(0.3, lambda _record: True)


def test_the_answer_may_ask_the_member_itself(desk: Desk) -> None:
    """It is not asked under a lock."""
    leaving(desk, "ab", "x")

    def owed(_record: GenerationRecord) -> bool:
        return desk.own().leaving and desk.running is not None

    assert desk.wait_left(5.0, owed)


def test_a_lone_node_hands_its_state_to_the_one_that_takes_its_place(job: Job) -> None:
    """Whole: a trains alone, b stands by; a leaves and is held until b says that it has the state."""
    a, b = job.start("ab", nodes=(1, 1, 1))
    first = job.settled("a")
    a.told = {"inventory": refs(f"{first}.9")}
    a.member.ask_to_leave()
    has: list[str] = []
    gone: list[bool] = []
    thread = threading.Thread(target=lambda: gone.append(a.member.wait_left(20.0, lambda _record: not has)))
    thread.start()
    second = job.await_training("b", after=first)
    assert b.worlds[-1].resume == ResumePoint(generation=first, step=9, digest=f"{first}.9", holders=("a",))
    thread.join(1.0)
    assert thread.is_alive()
    assert key_of(job, "a").leaving
    has.append("b")
    thread.join(5.0)
    assert gone == [True]
    a.close()
    assert b.running == second


def test_an_outcome_is_history_after_a_new_beginning_and_holdings_are_not() -> None:
    desk = Desk("job", lambda: None)
    try:
        desk.describe(refs("1.1"), ("x",), {"code": "c"}, 7)
        desk.report_stopped(3, Outcome(generation=3, result=Result.FAILED), ["f" * 16], refs("1.2"), ("y",))
        desk.begin_anew(5)
        own = desk.own()
        assert (own.stopped, own.outcome, own.unreachable) == (5, None, ())
        assert (own.inventory, own.lost, own.fingerprint, own.state_port) == (refs("1.2"), ("y",), {"code": "c"}, 7)
    finally:
        desk.close()
