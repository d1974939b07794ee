"""What the checker found, each as small as it gets."""

from __future__ import annotations

import pytest

from elasticd.rendezvous.desk import Desk
from elasticd.rendezvous.membership import Activate, Local, Propose, Report, Stay, choose, plan, react
from elasticd.rendezvous.records import CauseKind, Mode
from tests.rendezvous.world import LONG_AGO, NOW, TIMING, generation, member, mid, nodes, proposal, target, view

pytestmark = pytest.mark.timeout(30)


def test_who_was_too_late_to_be_admitted_writes_its_key_and_so_gets_another_chance() -> None:
    """It is left out until its key changes (PROTOCOL 13), and a standby has no other reason to write it: it would stand by for ever."""
    late = generation(5, "a", not_ready={mid("b").incarnation: 7}).record
    assert react(late, None, Local(id=mid("b"), stopped=3), over=False) == Report(number=5)
    assert isinstance(react(late, None, Local(id=mid("b"), stopped=5), over=False), Stay)
    assert isinstance(react(late, None, Local(id=mid("c"), stopped=3), over=False), Stay)


def test_nodes_that_could_not_reach_each_other_are_tried_again_when_too_few_are_left() -> None:
    """Nobody writes another report while nothing forms: a network that was away for seconds would have stopped the job for good."""
    seen = view(
        member("a", 1, failed=1, unreachable=[mid("b")]), member("b", 2, stopped=1), target=target(2, 2), generation=generation(1, "ab"), used=1,
        proposal=proposal(2, "ab", mode=Mode.KILL),
    )  # fmt: skip
    assert nodes(choose(seen, seen.target.record, {})) == ["a", "b"]  # type: ignore[union-attr]
    assert isinstance(plan(seen, NOW, LONG_AGO, TIMING), Activate)


def test_a_broken_link_that_is_reported_while_a_proposal_is_pending_changes_it() -> None:
    """Otherwise the same members fail once more, and that is charged to the budget."""
    seen = view(
        member("a", 1, stopped=1), member("b", 2, stopped=1, unreachable=[mid("c")]), member("c", 3, stopped=1), target=target(1, 3), used=1,
        generation=generation(1, "abc"), proposal=proposal(2, "abc", mode=Mode.KILL, counted=True),
    )  # fmt: skip
    decision = plan(seen, NOW, LONG_AGO, TIMING)
    assert isinstance(decision, Propose)
    assert (nodes(decision.members), decision.mode, decision.charge, decision.counted) == (["a", "b"], Mode.KILL, 0, True)


@pytest.mark.parametrize("heard", [True, False], ids=["proposed", "its word not in yet"])
def test_a_leaver_stays_while_others_may_count_on_it(heard: bool) -> None:
    """Before the first generation, or as a newcomer: its deleted key is not seen by activate, and what forms then has lost a member (PROTOCOL 18)."""
    pending = proposal(1, "ab", kind=CauseKind.FORM) if heard else None
    desk = Desk("job", lambda: None)
    try:
        desk.ask_to_leave()
        desk.note(view(member("a", 1), member("b", 2, leaving=heard), proposal=pending), mid("b"))
        assert not desk.wait_left(0.0)
    finally:
        desk.close()


def test_a_leaver_that_nobody_counts_on_goes() -> None:
    desk = Desk("job", lambda: None)
    try:
        desk.ask_to_leave()
        desk.note(view(member("a", 1), member("b", 2, leaving=True), generation=generation(1, "a")), mid("b"))
        assert desk.wait_left(0.0)
    finally:
        desk.close()
