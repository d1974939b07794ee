"""Acting on incidents: what is written for which evidence, once for all nodes, within budgets, and never on what cannot be believed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.daemon.acting import AGAIN, DEPUTY, NUMBERS_EVERY
from elasticd.kv import Put, TxnResult
from elasticd.policy.budgets import Deed, Ledger
from elasticd.policy.decisions import Action
from elasticd.policy.settings import EXIT_SAME_AGAIN
from elasticd.rendezvous.records import CheckpointRecord, GenerationState, IncidentsRecord, NodePolicyRecord, PolicyRecord, RequestKind, TargetRecord, parse
from tests.daemon.incidents import JOB, Site, Told, finding, incident, xid
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.etcd import Server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def make(daemon_server: Server, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    daemon_server.heal()
    daemon_server.await_serving()
    made: list[Site] = []

    def one(**options: Any) -> Site:
        site = Site(daemon_server, tmp_path / "reports", **options)
        made.append(site)
        site.report()
        return site

    yield one
    for site in made:
        site.close()


@pytest.fixture
def site(make: Callable[..., Site]) -> Site:
    return make()


def told(*incidents: dict[str, Any]) -> Told:
    one = Told()
    one.said[JOB] = list(incidents)
    return one


# --- what each sort of evidence comes to ----------------------------------------------------------------------------------


def test_a_certain_fault_of_hardware_drains_its_node_before_it_dies(site: Site) -> None:
    site.acting("n1", told(xid("n2"))).turn(time.time())
    word = site.word("n2")
    assert word is not None
    assert (word.cordoned, word.draining, word.statistic, word.until, word.about) == (True, True, False, None, "g7-xid_79-n2")
    assert "goes before it fails" in word.reason
    assert site.deeds() == ["exclude"]
    assert site.rules() == [("exclude", "hardware")]


def test_a_statistic_brings_a_checkpoint_and_only_when_it_holds_on_one_restart(site: Site) -> None:
    one = told(incident(finding()))
    acting = site.acting("n1", one)
    acting.turn(time.time())
    asked = site.request(RequestKind.CHECKPOINT)
    assert asked is not None
    assert (asked.generation, asked.by, asked.at_once) == (7, "elasticd's policy", False)
    assert site.request(RequestKind.RESTART) is None
    acting.turn(time.time())
    assert site.rules() == [("checkpoint", "early_checkpoint"), ("log", "not_persisting")]
    later = time.time() + NUMBERS_EVERY
    one.said[JOB] = [incident(finding(began=later - 2000.0), lasted=2000.0, updated=later)]
    acting.turn(later)
    assert site.request(RequestKind.RESTART) is not None
    assert site.deeds() == ["checkpoint", "restart"]
    acting.turn(later + 1.0)
    assert site.deeds() == ["checkpoint", "restart"], "one restart, however long it goes on"


def test_a_slow_node_is_left_out_for_a_time_if_another_stands_by(make: Callable[..., Site]) -> None:
    site = make(spare=True)
    slow = finding(
        "straggler",
        detector="peers",
        certainty="strong",
        cls="hardware",
        began=time.time() - 300.0,
        features=[{"name": "compute_s", "value": 0.12, "baseline": 0.1, "peers": 0.1, "z": None}],
    )
    site.acting("n1", told(incident(slow, lasted=300.0))).turn(time.time())
    word = site.word("n2")
    assert word is not None
    assert word.statistic
    assert word.until is not None
    assert word.until > time.time() + 3000.0
    assert "takes its place" in word.reason


def test_a_slow_node_stays_where_the_job_would_be_slower_without_it(site: Site) -> None:
    slow = finding("straggler", certainty="strong", began=time.time() - 300.0, features=[{"name": "compute_s", "value": 0.12, "baseline": 0.1}])
    site.acting("n1", told(incident(slow, lasted=300.0))).turn(time.time())
    assert site.word("n2") is None
    assert site.rules() == [("log", "straggler_kept")]


def test_a_divergence_goes_back_once_holds_commits_and_ends_the_job_if_it_returns(site: Site) -> None:
    bad = finding("nonfinite", detector="guard", cls="user", certainty="certain", scope="job", features=[{"name": "step", "value": 4711.0}])
    one = told(incident(bad, id="g7-nonfinite"))
    acting = site.acting("n1", one)
    acting.turn(time.time())
    back = site.request(RequestKind.ROLLBACK)
    assert back is not None
    assert (back.before, back.until, back.skip_data, back.generation) == (4711, 5000, True, 7)
    policy = site.policy()
    assert policy is not None
    assert policy.hold == 7
    site.generate(8)
    again = finding("nonfinite", detector="guard", cls="user", certainty="certain", scope="job", generation=8)
    one.said[JOB] = [incident(again, id="g8-nonfinite")]
    acting.turn(time.time())
    end = site.request(RequestKind.FAIL)
    assert end is not None
    assert (end.code, end.generation) == (EXIT_SAME_AGAIN, 8)
    assert "again after a return" in end.reason


def test_the_first_bad_step_is_counted_back_where_no_detector_says_it(site: Site) -> None:
    bad = finding("diverged", detector="drifts", cls="user", certainty="strong", scope="job", began=time.time() - 10.0)
    site.acting("n1", told(incident(bad, lasted=10.0))).turn(time.time())
    back = site.request(RequestKind.ROLLBACK)
    assert back is not None
    assert back.before is not None
    assert 4898 <= back.before <= 4900, "ten seconds of steps of 0.1 s before step 5000"


def test_a_suspicion_of_divergence_holds_commits_until_it_is_over(site: Site) -> None:
    one = told(incident(finding("diverged", certainty="strong", scope="job"), state="suspect"))
    acting = site.acting("n1", one)
    assert acting.turn(time.time()) == AGAIN
    policy = site.policy()
    assert policy is not None
    assert policy.hold == 7
    one.said[JOB] = [{**one.said[JOB][0], "state": "over", "why_over": "nothing more of it"}]
    acting.turn(time.time())
    policy = site.policy()
    assert policy is not None
    assert policy.hold is None
    assert acting.turn(time.time()) is None


def test_a_hold_that_an_earlier_daemon_has_left_ends_with_what_it_was_for(site: Site) -> None:
    site.acting("n1", told(incident(finding("diverged", certainty="strong", scope="job"), state="suspect"))).turn(time.time())
    policy = site.policy()
    assert policy is not None
    assert policy.hold == 7
    site.acting("n1", told()).turn(time.time())
    policy = site.policy()
    assert policy is not None
    assert policy.hold is None, "or no checkpoint would be committed in this generation any more"


def test_a_ledger_of_which_a_part_is_garbage_allows_nothing_either(site: Site) -> None:
    site.put(site.of_job.policy, PolicyRecord(scope=site.of_job.scope, ledger={"deeds": "all"}))
    acting = site.acting("n1", told(xid("n2")))
    for later in range(3):
        acting.turn(time.time() + 10.0 * later)
    assert site.word("n2") is None
    policy = site.policy()
    assert policy is not None
    assert policy.ledger == {"deeds": "all"}


def test_a_rank_that_hangs_is_killed_not_asked(site: Site) -> None:
    dead = finding("dead_rank", detector="guard", cls="unknown", certainty="certain")
    site.acting("n1", told(incident(dead))).turn(time.time())
    asked = site.request(RequestKind.RESTART)
    assert asked is not None
    assert asked.at_once


# --- once, whoever saw it -------------------------------------------------------------------------------------------------


def test_two_nodes_that_see_one_incident_at_the_same_time_come_to_one_action(site: Site) -> None:
    both = [site.acting("n1", told(incident(finding()))), site.acting("n2", told(incident(finding())))]
    at = time.time()
    gate = threading.Barrier(2)

    def decide(index: int) -> None:
        gate.wait(10.0)
        both[index].turn(at + index * DEPUTY * 2)

    threads = [threading.Thread(target=decide, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for one in both:
        one.turn(at + 60.0)
    assert site.deeds() == ["checkpoint"]


def test_the_node_of_the_first_rank_decides_and_the_next_stands_in_if_it_is_gone(site: Site) -> None:
    second, third = site.acting("n2", told(xid("n3"))), site.acting("n3", told())
    at = time.time()
    assert second.turn(at) == pytest.approx(DEPUTY, abs=0.1)
    assert third.turn(at) == AGAIN, "sooner than its turn would come"
    assert site.word("n3") is None
    second.turn(at + DEPUTY)
    assert site.word("n3") is not None


def test_a_node_that_does_not_train_in_the_job_decides_nothing(make: Callable[..., Site]) -> None:
    site = make(spare=True)
    acting = site.acting("spare", told(xid("n2")))
    for later in range(5):
        acting.turn(time.time() + 10.0 * later)
    assert site.policy() is None


def test_what_another_node_saw_wakes_the_one_that_decides(site: Site) -> None:
    first = site.acting("n1", told())
    first.start()
    site.acting("n3", told(xid("n2"))).turn(time.time())
    await_(lambda: site.word("n2"), within=5.0, what="the word about n2")


# --- limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shadow", "advise"])
def test_in_shadow_and_advise_nothing_is_done_and_what_would_have_been_is_counted(site: Site, mode: str) -> None:
    acting = site.acting("n1", told(xid("n2")), mode=mode)
    for _ in range(3):
        acting.turn(time.time())
    assert site.word("n2") is None
    policy = site.policy()
    assert policy is not None
    (deed,) = Ledger.from_dict(policy.ledger).deeds
    assert (deed.action, deed.done) == (Action.EXCLUDE, False)
    assert not any(acting.counts.done.values())
    assert acting.counts.withheld[JOB, "exclude"] == 1


def test_a_pause_stops_all_that_is_of_free_will(site: Site) -> None:
    site.put(site.of_job.target, TargetRecord(scope=site.of_job.scope, min_nodes=1, max_nodes=3, desired=3, paused=True))
    site.acting("n1", told(xid("n2"))).turn(time.time())
    assert site.word("n2") is None
    assert site.rules() == [("log", "paused")]


def test_a_budget_that_is_used_up_only_advises_and_alerts(site: Site) -> None:
    now = time.time()
    deeds = tuple(Deed(at=now - 60.0 * n, action=Action.EXCLUDE, about=f"g{n}-x", fingerprint=f"x@n{n}", node=f"n{n}", certain=True) for n in range(1, 9))
    site.put(site.of_job.policy, PolicyRecord(scope=site.of_job.scope, ledger=Ledger(deeds=deeds).as_dict()))
    acting = site.acting("n1", told(xid("n2")))
    acting.turn(now)
    assert site.word("n2") is None
    policy = site.policy()
    assert policy is not None
    assert policy.decisions[-1]["alert"] is True
    assert policy.decisions[-1]["wanted"] == "exclude"
    assert acting.counts.withheld[JOB, "exclude"] == 1


def test_a_node_is_not_left_out_below_the_least_that_the_job_needs(make: Callable[..., Site]) -> None:
    site = make(min_nodes=3)
    site.acting("n1", told(xid("n2"))).turn(time.time())
    assert site.word("n2") is None
    assert ("checkpoint", "min_nodes") in site.rules()


def test_what_an_operator_has_said_of_a_node_is_not_written_over(site: Site) -> None:
    site.put(site.keys.policy("n2"), NodePolicyRecord(scope=site.keys.scope, cordoned=True, reason="ada looks at it"))
    site.acting("n1", told(xid("n2"))).turn(time.time())
    word = site.word("n2")
    assert word is not None
    assert word.reason == "ada looks at it"
    assert site.rules() == [("log", "already_out")]


def test_an_incident_that_an_operator_knows_is_left_to_him(site: Site) -> None:
    site.put(site.of_job.policy, PolicyRecord(scope=site.of_job.scope, ledger=Ledger().as_dict(), acks={"g7-xid_79-n2": "ada: on my way"}))
    site.acting("n1", told(xid("n2"))).turn(time.time())
    assert site.word("n2") is None
    assert site.rules() == []


def test_nothing_is_decided_while_the_world_changes(site: Site) -> None:
    site.generate(7, state=GenerationState.FAILED)
    site.acting("n1", told(xid("n2"))).turn(time.time())
    assert site.word("n2") is None


def test_what_is_only_looked_at_again_is_written_once(site: Site) -> None:
    acting = site.acting("n1", told(incident(finding("loss_spike", cls="advise", certainty="strong", scope="job"))))
    acting.turn(time.time())
    before = site.kv.get(site.of_job.policy)
    for _ in range(3):
        acting.turn(time.time())
    after = site.kv.get(site.of_job.policy)
    assert before is not None
    assert after is not None
    assert after.mod_revision == before.mod_revision


def test_of_hundreds_of_incidents_the_policy_key_stays_small_and_comes_to_rest(site: Site) -> None:
    many = [incident(finding(f"kind_{number}", cls="advise", certainty="strong"), id=f"g7-kind-{number}") for number in range(300)]
    for number in range(40):
        chunk = tuple(many[number * 7 : number * 7 + 7])
        site.put(site.keys.incidents_of(JOB, f"x{number}"), IncidentsRecord(scope=site.of_job.scope, node=f"x{number}", incidents=chunk))
    acting = site.acting("n1", told())
    acting.turn(time.time())
    before = site.kv.get(site.of_job.policy)
    acting.turn(time.time())
    after = site.kv.get(site.of_job.policy)
    assert before is not None
    assert after is not None
    assert len(before.value) < 64 * 1024
    assert after.mod_revision == before.mod_revision


# --- what cannot be believed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"v": 1}', b"\xff\xfe", b'{"v": 2, "scope": "x"}'])
def test_a_ledger_that_cannot_be_read_stops_all_that_is_of_free_will(site: Site, garbage: bytes) -> None:
    """For good: it is not begun anew either, and the next look would find a whole budget."""
    site.kv.txn((), (Put(key=site.of_job.policy, value=garbage),))
    acting = site.acting("n1", told(xid("n2")))
    for later in range(3):
        acting.turn(time.time() + 10.0 * later)
    assert site.word("n2") is None
    assert site.request(RequestKind.CHECKPOINT) is None
    assert "cannot be read" in acting.problem
    item = site.kv.get(site.of_job.policy)
    assert item is not None
    assert item.value == garbage


@pytest.mark.parametrize("garbage", [b"", b"nonsense", b"[1]", b'{"v": 1, "scope": "other/job", "node": "n3"}', b'{"incidents": [{"id": 7}]}'])
def test_what_a_node_says_that_is_no_incident_hides_nobody_elses(site: Site, garbage: bytes) -> None:
    site.kv.txn((), (Put(key=site.keys.incidents_of(JOB, "n3"), value=garbage),))
    site.acting("n1", told(xid("n2"))).turn(time.time())
    assert site.word("n2") is not None


def test_a_node_speaks_only_for_itself(site: Site) -> None:
    record = IncidentsRecord(scope=site.of_job.scope, node="n1", incidents=(xid("n2"),))
    site.put(site.keys.incidents_of(JOB, "n3"), record)
    site.acting("n1", told()).turn(time.time())
    assert site.word("n2") is None


def test_what_an_earlier_daemon_of_the_node_told_is_over_when_the_next_begins(site: Site) -> None:
    site.acting("n3", told(xid("n2"))).turn(time.time())
    assert site.kv.list(site.keys.incidents).items
    site.acting("n3", told()).turn(time.time())
    assert site.kv.list(site.keys.incidents).items == ()


def test_the_same_incident_with_newer_numbers_is_told_now_and_then_only(site: Site) -> None:
    one = told(incident(finding("loss_spike", cls="advise", certainty="strong", scope="job")))
    acting = site.acting("n1", one)
    now = time.time()
    acting.turn(now)
    key = site.keys.incidents_of(JOB, "n1")
    first = site.kv.get(key)
    one.said[JOB] = [{**one.said[JOB][0], "updated": now + 1.0, "count": 2}]
    acting.turn(now + 1.0)
    assert site.kv.get(key) == first
    acting.turn(now + 20.0)
    later = site.kv.get(key)
    assert later is not None
    assert parse(IncidentsRecord, key, later.value, site.of_job.scope).incidents[0]["count"] == 2


def test_a_telling_that_comes_through_late_replaces_no_newer_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that hung in a paused member of etcd, or in the buffers of a cut connection."""
    one = told(incident(finding("loss_spike", cls="advise", certainty="strong", scope="job")))
    acting = site.acting("n1", one)
    key = site.keys.incidents_of(JOB, "n1")
    sent: list[tuple[Any, Any]] = []
    txn = site.kv.txn

    def noted(compares: Any, ops: Any) -> TxnResult:
        if any(op.key == key for op in ops):
            sent.append((compares, ops))
        return txn(compares, ops)

    monkeypatch.setattr(site.kv, "txn", noted)
    now = time.time()
    acting.turn(now)
    one.said[JOB] = [{**one.said[JOB][0], "state": "over", "updated": now + 1.0, "why_over": "gone"}]
    acting.turn(now + 1.0)
    newest = site.kv.get(key)
    assert len(sent) == 2
    for late in sent:
        assert not txn(*late).succeeded
    assert site.kv.get(key) == newest


def test_a_key_that_somebody_else_wrote_is_told_over(site: Site) -> None:
    one = told(incident(finding("loss_spike", cls="advise", certainty="strong", scope="job")))
    acting = site.acting("n1", one)
    now = time.time()
    acting.turn(now)
    key = site.keys.incidents_of(JOB, "n1")
    site.kv.txn((), (Put(key=key, value=b"{}"),))
    one.said[JOB] = [{**one.said[JOB][0], "updated": now + 20.0, "count": 2}]
    acting.turn(now + 20.0)
    acting.turn(now + 20.1)
    item = site.kv.get(key)
    assert item is not None
    assert parse(IncidentsRecord, key, item.value, site.of_job.scope).incidents[0]["count"] == 2


def test_etcd_away_is_said_and_made_up_for(site: Site, daemon_server: Server) -> None:
    one = told()
    acting = site.acting("n1", one)
    acting.start()
    await_(lambda: acting.problem == "", what="the first look")
    daemon_server.pause()
    one.said[JOB] = [xid("n2")]
    acting._due.set()
    await_(lambda: acting.problem, within=20.0, what="a word that nothing can be decided")
    daemon_server.resume()
    await_(lambda: site.word("n2"), within=20.0, what="the word about n2")
    await_(lambda: acting.problem == "", what="well again")


def test_a_committed_checkpoint_is_progress(site: Site) -> None:
    site.put(site.of_job.checkpoint, CheckpointRecord(scope=site.of_job.scope, generation=7, step=4200, digest="d"))
    site.acting("n1", told(incident(finding()))).turn(time.time())
    policy = site.policy()
    assert policy is not None
    (deed,) = Ledger.from_dict(policy.ledger).deeds
    assert (deed.step, deed.checkpoint_step) == (5000, 4200)
