"""What a daemon does next, by tables: every state that a job can be in on a node, and what leads there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.reconcile import (
    HEALTH_FRESH,
    LONGEST_PAUSE,
    AgentSeen,
    Check,
    Cordon,
    Desired,
    HealthSeen,
    JobWanted,
    Leave,
    Policy,
    Seen,
    Start,
    Verdict,
    pause_after,
    reconcile,
)
from elasticd.daemon.slots import Inventory, Slot
from elasticd.rendezvous.records import NodeJobState as S
from elasticd.rendezvous.records import TargetRecord

NOW = 1000.0
TWO = Inventory(slots=(Slot(id="slot-0"), Slot(id="slot-1")))
FIT = HealthSeen(ok=True, at=NOW - 1)
ALL = ("slot-0", "slot-1")


def spec(name: str = "a", **values: Any) -> JobSpec:
    return JobSpec(name=name, argv=("/bin/true",), max_nodes=4, **values)


def target(**values: Any) -> TargetRecord:
    return TargetRecord(scope="c/a", min_nodes=1, max_nodes=4, desired=2, **values)


WANTED = JobWanted(target=target())
PLAIN = Desired(specs={"a": spec()}, jobs={"a": WANTED})
FREE = Seen(inventory=TWO, health={"a": FIT}, digests={"a": "d1"})
RUNS = AgentSeen(running=True, slots=ALL, digest="d1")


def only(verdict: Verdict) -> tuple[S, str]:
    (job,) = verdict.jobs
    return job.state, job.why


def test_a_wanted_job_on_a_free_and_healthy_node_is_started_on_all_its_slots() -> None:
    verdict = reconcile(PLAIN, FREE, NOW)
    assert verdict.actions == (Start("a", ALL),)
    assert only(verdict) == (S.STARTING, "")


def test_before_it_starts_the_checks_run_once() -> None:
    unchecked = replace(FREE, health={})
    assert reconcile(PLAIN, unchecked, NOW).actions == (Check("a", ALL),)
    running = replace(FREE, health={"a": HealthSeen(running=True)})
    verdict = reconcile(PLAIN, running, NOW)
    assert (verdict.actions, only(verdict)[0]) == ((), S.CHECKING)
    stale = replace(FREE, health={"a": HealthSeen(ok=True, at=NOW - HEALTH_FRESH - 1)})
    assert reconcile(PLAIN, stale, NOW).actions == (Check("a", ALL),)


def test_a_failed_check_cordons_the_node_with_what_it_said() -> None:
    verdict = reconcile(PLAIN, replace(FREE, health={"a": HealthSeen(ok=False, reason="disk: 3 MB free", at=NOW)}), NOW)
    assert verdict.actions == (Cordon("check before job a: disk: 3 MB free"),)
    assert only(verdict) == (S.KEPT_OUT, "disk: 3 MB free")


@pytest.mark.parametrize(
    ("desired", "state", "why"),
    [
        (replace(PLAIN, jobs={}), S.IDLE, "nobody has started it"),
        (replace(PLAIN, jobs={"a": JobWanted(target=target(run=False, reason="night"))}), S.IDLE, "night"),
        (replace(PLAIN, jobs={"a": JobWanted(target=target(), over="succeeded at generation 3: all done")}), S.ENDED, "succeeded at generation 3: all done"),
        (replace(PLAIN, jobs={"a": JobWanted(target=target(), problem="lr: 9 is above 1")}), S.REFUSED, "lr: 9 is above 1"),
        (replace(PLAIN, specs={}, refused={"a": "a.toml: argv: missing"}), S.REFUSED, "a.toml: argv: missing"),
        (replace(PLAIN, specs={}), S.IDLE, "its file has gone"),
        (replace(PLAIN, specs={}, unreadable="jobs.d: others can write it"), S.REFUSED, "jobs.d: others can write it"),
        (replace(PLAIN, policy=Policy(cordoned=True, reason="fan")), S.KEPT_OUT, "the node is cordoned: fan"),
        (replace(PLAIN, policy=Policy(draining=True, reason="fan")), S.KEPT_OUT, "the node is drained: fan"),
        (replace(PLAIN, leaving=True), S.KEPT_OUT, "the daemon is being stopped"),
    ],
)
def test_nothing_is_started_when(desired: Desired, state: S, why: str) -> None:
    verdict = reconcile(desired, FREE, NOW)
    assert (verdict.actions, only(verdict)) == ((), (state, why))


def test_nothing_is_started_on_what_was_read_before_etcd_went_away() -> None:
    verdict = reconcile(PLAIN, replace(FREE, etcd_problem="no endpoint answered"), NOW)
    assert (verdict.actions, only(verdict)) == ((), (S.WAITING, "for etcd: no endpoint answered"))


@pytest.mark.parametrize(
    ("desired", "seen"),
    [
        (PLAIN, FREE),
        (replace(PLAIN, jobs={}), FREE),
        (replace(PLAIN, jobs={"a": JobWanted(target=target(run=False))}), FREE),
        (replace(PLAIN, jobs={"a": JobWanted(target=target(), over="failed")}), FREE),
        (replace(PLAIN, specs={}), FREE),
        (replace(PLAIN, specs={}, refused={"a": "bad"}), FREE),
        (replace(PLAIN, policy=Policy(cordoned=True, reason="fan")), FREE),
        (PLAIN, replace(FREE, etcd_problem="away")),
        (PLAIN, replace(FREE, digests={"a": "d2"})),
        (PLAIN, replace(FREE, health={"a": HealthSeen(ok=False, reason="x", at=NOW)})),
        (PLAIN, replace(FREE, inventory=Inventory(slots=()))),
    ],
    ids=["all well", "no target", "to stop", "over", "no file", "bad file", "cordoned", "etcd away", "file changed", "check failed", "slots gone"],
)
def test_an_agent_that_runs_is_left_alone_when(desired: Desired, seen: Seen) -> None:
    """Its membership ends it where the job ends; nothing else does but a drain."""
    verdict = reconcile(desired, replace(seen, agents={"a": RUNS}), NOW)
    assert (verdict.actions, only(verdict)[0]) == ((), S.RUNNING)


def test_a_drained_node_tells_its_agents_to_leave_once() -> None:
    drained = replace(PLAIN, policy=Policy(draining=True, reason="fan"))
    verdict = reconcile(drained, replace(FREE, agents={"a": RUNS}), NOW)
    assert verdict.actions == (Leave("a", "the node is drained: fan"),)
    again = reconcile(drained, replace(FREE, agents={"a": replace(RUNS, asked_to_leave=True)}), NOW)
    assert (again.actions, only(again)) == ((), (S.LEAVING, "the node is drained: fan"))


def test_a_daemon_that_is_to_end_with_its_agents_tells_them_to_leave_even_without_etcd() -> None:
    verdict = reconcile(replace(PLAIN, leaving=True), replace(FREE, agents={"a": RUNS}, etcd_problem="away"), NOW)
    assert verdict.actions == (Leave("a", "the daemon is being stopped"),)


def test_after_an_end_there_is_a_pause_that_doubles_and_is_told() -> None:
    ended = AgentSeen(running=False, code=1, reason="no route", ended_at=NOW - 3, ends=3, digest="d1")
    verdict = reconcile(PLAIN, replace(FREE, agents={"a": ended}), NOW)
    assert verdict.actions == ()
    assert verdict.until == NOW + 1
    assert only(verdict) == (S.WAITING, "its agent ended (no route), 3 in a row: again in 1 s")
    assert reconcile(PLAIN, replace(FREE, agents={"a": ended}), NOW + 1).actions == (Start("a", ALL),)
    assert [pause_after(ends) for ends in (0, 1, 2, 3, 4)] == [1, 1, 2, 4, 8]
    assert pause_after(10_000) == LONGEST_PAUSE


def test_an_agent_that_was_told_nonsense_is_started_again_only_when_it_would_be_told_something_else() -> None:
    ended = AgentSeen(running=False, code=2, reason="cwd: no such directory", ended_at=0.0, ends=1, digest="d1")
    assert only(reconcile(PLAIN, replace(FREE, agents={"a": ended}), NOW)) == (S.REFUSED, "cwd: no such directory")
    assert reconcile(PLAIN, replace(FREE, agents={"a": ended}, digests={"a": "d2"}), NOW).actions == (Start("a", ALL),)


def test_of_two_jobs_that_want_the_same_slots_the_one_with_priority_goes_and_the_other_says_what_it_waits_for() -> None:
    both = Desired(specs={"a": spec("a"), "b": spec("b", priority=5)}, jobs={"a": WANTED, "b": WANTED})
    verdict = reconcile(both, replace(FREE, health={"a": FIT, "b": FIT}), NOW)
    assert verdict.actions == (Start("b", ALL),)
    states = {job.name: job.state for job in verdict.jobs}
    assert states == {"a": S.WAITING, "b": S.STARTING}
    assert next(job.why for job in verdict.jobs if job.name == "a")


def test_a_slot_that_an_agent_holds_is_not_given_away() -> None:
    both = Desired(specs={"a": spec("a", slots=1), "b": spec("b", slots=1, priority=5)}, jobs={"a": WANTED, "b": WANTED})
    verdict = reconcile(both, replace(FREE, agents={"a": AgentSeen(running=True, slots=("slot-0",))}, health={"b": FIT}), NOW)
    assert verdict.actions == (Start("b", ("slot-1",)),)


def test_a_daemon_that_has_just_started_decides_as_one_that_has_run_for_years() -> None:
    """No memory but what it sees: the verdict for an adopted agent is the one for its own."""
    assert reconcile(PLAIN, replace(FREE, agents={"a": RUNS}, health={}), NOW).jobs == reconcile(PLAIN, replace(FREE, agents={"a": RUNS}), NOW + 1e6).jobs
