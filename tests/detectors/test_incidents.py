"""Findings become incidents: what opens one, what joins, which finding is the root, and when it is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.findings import Certainty, Class, Finding, Role
from detectors.incidents import CLEAR, FINDINGS_MAX, MERGE, Incident, Incidents, State, incident_id

pytestmark = pytest.mark.timeout(60)

BASE = Finding(
    at=1000.0,
    detector="guard",
    kind="nonfinite",
    summary="the loss of rank 1 is NaN",
    cls=Class.USER,
    role=Role.ROOT,
    certainty=Certainty.CERTAIN,
    node="n1",
    rank=1,
    generation=3,
)


def finding(at: float = 1000.0, **changes: Any) -> Finding:
    return replace(BASE, at=at, **changes)


def weak(at: float, **changes: Any) -> Finding:
    return finding(at, **{"detector": "peers", "kind": "outlier", "certainty": Certainty.WEAK, "cls": Class.UNKNOWN, **changes})


def cascade(at: float, **changes: Any) -> Finding:
    return finding(at, detector="signature", kind="nccl_timeout", role=Role.CASCADE, cls=Class.CASCADE, **changes)


def fed(*findings: Finding) -> tuple[Incidents, list[Incident]]:
    incidents = Incidents()
    return incidents, [incident for one in findings for incident in incidents.take(one)]


def test_a_certain_finding_opens_an_incident_that_is_believed() -> None:
    incidents, changed = fed(finding())
    (incident,) = changed
    assert (incident.id, incident.state, incident.root, incident.opened) == ("g3-nonfinite-n1-r1", State.CONFIRMED, BASE, 1000.0)
    assert incidents.open == (incident,)


def test_a_statistic_alone_is_suspected_after_three_of_five_windows_and_believed_after_six_of_eight() -> None:
    incidents = Incidents(width=10.0)
    came = [window for window in range(10) if window not in (1, 4)]  # it stays away twice
    states = [[incident.state for incident in incidents.take(weak(1000.0 + 10 * window))] for window in came]
    assert states == [[], [], [State.SUSPECT], [State.SUSPECT], [State.SUSPECT], [State.CONFIRMED], [State.CONFIRMED], [State.CONFIRMED]]
    assert incidents.open[0].opened == 1000.0, "it began with the first of them"


def test_a_statistic_that_comes_seldom_is_nothing() -> None:
    _, changed = fed(*[weak(1000.0 + 30 * window) for window in range(50)])
    assert changed == []


def test_the_forest_speaks_of_what_has_lasted_so_its_word_is_a_suspicion_and_its_fourth_is_believed() -> None:
    _, changed = fed(*[weak(1000.0 + 60 * turn, detector="forest", kind="joint_drift", role=Role.CONFIRM) for turn in range(5)])
    assert [incident.state for incident in changed] == [State.SUSPECT, State.SUSPECT, State.SUSPECT, State.CONFIRMED, State.CONFIRMED]
    assert changed[-1].certainty is Certainty.WEAK
    assert not changed[-1].corroborated


def test_the_same_window_told_twice_counts_once() -> None:
    _, changed = fed(*[weak(1001.0 + 0.1 * turn) for turn in range(20)])
    assert changed == []


def test_a_cascade_never_opens_an_incident_whenever_it_comes() -> None:
    incidents, changed = fed(*[cascade(1000.0 + second, rank=second % 8) for second in range(200)])
    assert changed == []
    assert incidents.open == ()


@pytest.mark.parametrize("first", ["root", "cascade"])
def test_a_cascade_joins_the_failure_it_comes_from_whichever_is_told_first(first: str) -> None:
    told = [finding(1000.0), cascade(1005.0, node="n2", rank=2)]
    if first == "cascade":
        told = [cascade(995.0, node="n2", rank=2), finding(1000.0)]
    incidents, _ = fed(*told)
    (incident,) = incidents.open
    assert incident.root == BASE
    assert {one.kind for one in incident.findings} == {"nonfinite", "nccl_timeout"}
    assert set(incident.nodes) == {"n1", "n2"}
    assert not incident.corroborated, "a cascade says nothing of its own"


def test_the_earliest_of_equally_sure_findings_is_the_root() -> None:
    xid = finding(1003.0, detector="signature", kind="xid_79", cls=Class.HARDWARE, began=998.0, rank=None, scope="node")
    incidents, _ = fed(finding(1000.0), xid)
    assert incidents.open[0].root.kind == "xid_79"


def test_a_sure_finding_is_the_root_before_a_statistic_that_came_earlier() -> None:
    incidents = Incidents()
    for window in range(4):
        incidents.take(weak(1000.0 + 10 * window))
    (changed,) = incidents.take(finding(1040.0))
    assert (changed.root.kind, changed.state, changed.corroborated) == ("nonfinite", State.CONFIRMED, True)
    assert changed.id == "g3-outlier-n1-r1", "it keeps the name that it was told by"


def test_two_confirmations_of_different_detectors_on_one_node_open_one() -> None:
    one = finding(1000.0, detector="signature", kind="host_oom", role=Role.CONFIRM)
    other = finding(1010.0, detector="guard", kind="disk_filling", role=Role.CONFIRM)
    assert fed(one)[1] == []
    assert fed(one, replace(one, at=1005.0))[1] == [], "of one detector it stays one word"
    assert fed(one, replace(other, node="n2"))[1] == []
    assert [incident.state for incident in fed(one, other)[1]] == [State.CONFIRMED, State.CONFIRMED]


def test_hardware_of_two_nodes_is_two_incidents() -> None:
    xid = finding(1000.0, detector="signature", kind="xid_79", cls=Class.HARDWARE, scope="node", rank=None)
    incidents, _ = fed(xid, replace(xid, at=1001.0, node="n2"))
    assert {incident.id for incident in incidents.open} == {"g3-xid_79-n1", "g3-xid_79-n2"}


def test_all_ranks_within_a_minute_are_one_incident() -> None:
    incidents, _ = fed(*[finding(1000.0 + 5 * rank, rank=rank, node=f"n{rank}") for rank in range(8)])
    (incident,) = incidents.open
    assert (incident.count, incident.ranks, incident.root.rank) == (8, tuple(range(8)), 0)


def test_what_comes_much_later_is_another_incident() -> None:
    incidents, _ = fed(finding(1000.0), finding(1000.0 + MERGE + 1, kind="dead_rank", rank=5))
    assert len(incidents.open) == 2


def test_it_is_over_when_nothing_supports_it_and_has_a_number_when_it_comes_again() -> None:
    incidents, _ = fed(finding(1000.0))
    assert incidents.turn(1000.0 + CLEAR) == []
    (over,) = incidents.turn(1000.1 + CLEAR)
    assert (over.state, over.why_over) == (State.OVER, "nothing more of it for 120 s")
    assert [one.id for one in incidents.take(finding(2000.0))] == ["g3-nonfinite-n1-r1-2"]


def test_a_cascade_keeps_no_incident_alive() -> None:
    incidents, _ = fed(finding(1000.0), *[cascade(1000.0 + 10 * turn) for turn in range(1, 20)])
    assert len(incidents.turn(1001.0 + CLEAR)) == 1


def test_another_world_ends_all_of_them_and_forgets_what_was_counted() -> None:
    incidents = Incidents()
    incidents.take(finding(1000.0))
    for window in range(5):
        incidents.take(weak(1100.0 + 10 * window, node="n9", rank=9))
    ended = incidents.world_changed("generation 4 begins")
    assert {one.why_over for one in ended} == {"generation 4 begins"}
    assert incidents.open == ()
    assert incidents.take(weak(1150.0, node="n9", rank=9)) == []


def test_advice_is_no_incident() -> None:
    assert fed(finding(role=Role.ADVISE))[1] == []


KINDS = st.sampled_from(["a", "b", "c"])
FINDINGS = st.builds(
    finding,
    at=st.floats(0, 2000),
    kind=KINDS,
    detector=st.sampled_from(["guard", "signature", "forest"]),
    role=st.sampled_from(list(Role)),
    certainty=st.sampled_from(list(Certainty)),
    cls=st.sampled_from(list(Class)),
    scope=st.sampled_from(["rank", "node", "job"]),
    node=st.sampled_from(["n1", "n2"]),
    rank=st.sampled_from([None, 0, 1]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FINDINGS, max_size=120))
def test_whatever_comes_an_incident_has_a_root_that_is_no_cascade_and_stays_small(found: list[Finding]) -> None:
    incidents = Incidents()
    for one in sorted(found, key=lambda one: one.at):
        for incident in [*incidents.turn(one.at), *incidents.take(one)]:
            assert incident.root.role in (Role.ROOT, Role.CONFIRM)
            assert len(incident.findings) <= FINDINGS_MAX
            assert any(kept == incident.root for kept in incident.findings)
            assert incident.opened <= incident.updated
    assert len({incident.id for incident in incidents.open}) == len(incidents.open)
    assert incident_id(BASE) == "g3-nonfinite-n1-r1"
