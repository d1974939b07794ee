"""bench.poweroff: its arithmetic on made-up logs, and that `make bench` passes it by where there can be no hosts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bench import poweroff
from bench._poweroff_site import Seen
from bench.poweroff import DOUBT, Cut, rows_of, turns

CUT = 1_800_000_000.0
"""When the power went; all other times are seconds from then."""


def line(at: float, event: str, **more: Any) -> dict[str, Any]:
    return {"time": datetime.fromtimestamp(CUT + at, UTC).isoformat(), "event": event, **more}


def decision(at: float, text: str) -> dict[str, Any]:
    return line(at, "decision", text=text)


def step(at: float, generation: int, world: int) -> dict[str, Any]:
    return {"at": CUT + at, "generation": generation, "world": world}


def seen(n1: list[dict[str, Any]], n2: list[dict[str, Any]], steps: dict[str, list[dict[str, Any]]] | None = None) -> Seen:
    """Of two survivors; unless told otherwise they step in the old world for a moment, n1 again after 6.5 s, n2 after 6.7 s."""
    told = {
        "n1": [step(0.02, 4, 3), step(6.5, 5, 2), step(6.6, 5, 2)],
        "n2": [step(0.03, 4, 3), step(6.7, 5, 2)],
    }
    return Seen(at=CUT, logs={"n1": n1, "n2": n2}, steps=steps or told)


def seconds(gone: float, doubt: float, agree: float, startup: float) -> dict[str, Any]:
    return {"gone": pytest.approx(gone), "doubt": pytest.approx(doubt), "agree": pytest.approx(agree), "startup": pytest.approx(startup)}


def phases(cut: Cut | None) -> dict[str, float]:
    assert cut is not None
    return {name: getattr(cut, name) for name in poweroff.PHASES}


COORDINATES = [decision(4.1, "proposing 5 (loss): loss of n3"), decision(4.3, "draining 4"), line(4.5, "generation_formed", generation=5)]
FOLLOWS = [line(4.6, "generation_formed", generation=5)]


def test_a_cut_is_parted_at_the_proposal_and_at_the_last_agent_to_have_formed() -> None:
    cut = Cut.of(seen(COORDINATES, FOLLOWS))
    assert phases(cut) == seconds(4.1, 0.0, 0.5, 2.1)
    assert cut is not None
    assert cut.total == pytest.approx(6.7)  # the last survivor's first step, not the first one's
    assert cut.over_lease == pytest.approx(4.6)
    assert (cut.orphaned, cut.cut_off) == (False, 0)


def test_a_loss_that_is_not_believed_at_once_is_seen_when_it_is_first_doubted() -> None:
    doubting = [line(0.5, "etcd_unreachable"), decision(4.0, f"{DOUBT}, giving them time to come back"), *COORDINATES]
    cut = Cut.of(seen(doubting, FOLLOWS))
    assert phases(cut) == seconds(4.0, 0.1, 0.5, 2.1)
    assert cut is not None
    assert cut.cut_off == 1


def test_a_lost_coordinator_and_agents_without_etcd_are_told() -> None:
    """An agent counts once, however often it was without etcd."""
    without = [line(0.4, "etcd_unreachable"), line(0.9, "etcd_unreachable")]
    cut = Cut.of(seen([*without, line(4.05, "coordinating"), *COORDINATES], [line(0.4, "etcd_unreachable"), *FOLLOWS]))
    assert cut is not None
    assert (cut.orphaned, cut.cut_off) == (True, 2)


def test_who_coordinates_after_the_generation_has_formed_does_not_replace_a_lost_coordinator() -> None:
    cut = Cut.of(seen(COORDINATES, [*FOLLOWS, line(9.0, "coordinating")]))
    assert cut is not None
    assert not cut.orphaned


def test_the_first_generation_of_the_survivors_counts_not_one_after_it() -> None:
    later = [decision(8.0, "proposing 6 (kill): worker_failed of n2"), line(8.5, "generation_formed", generation=6)]
    again = {"n1": [step(6.5, 5, 2), step(11.0, 6, 2)], "n2": [step(6.7, 5, 2), step(11.1, 6, 2)]}
    cut = Cut.of(seen([*COORDINATES, *later], [*FOLLOWS, line(8.6, "generation_formed", generation=6)], again))
    assert phases(cut) == seconds(4.1, 0.0, 0.5, 2.1)


@pytest.mark.parametrize("steps", [[], [step(0.03, 4, 3)]], ids=["no step", "the old world's only"])
def test_a_survivor_that_does_not_go_on_makes_it_never(steps: list[dict[str, Any]]) -> None:
    assert Cut.of(seen(COORDINATES, FOLLOWS, {"n1": [step(6.5, 5, 2)], "n2": steps})) is None


def test_without_a_proposal_it_is_never() -> None:
    assert Cut.of(seen([decision(4.0, f"{DOUBT}, giving them time to come back")], [])) is None


def test_a_run_that_was_never_counts_as_missed() -> None:
    cut = Cut(gone=4.0, doubt=0.0, agree=0.5, startup=2.0)
    rows = {row.name: row for row in rows_of({"leader": [cut, None, None], "follower": [cut]}, 4.0)}
    assert rows["over_lease_follower"].median == pytest.approx(4.5)
    assert "met; in 1 of 1 runs" in rows["over_lease_follower"].note
    assert rows["over_lease_leader"].median is None
    assert "MISSED; in 1 of 3 runs" in rows["over_lease_leader"].note


def test_arrangements_take_turns_each_round_the_other_way_round() -> None:
    assert list(turns(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_without_root_it_is_skipped_in_one_line_and_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert poweroff.main(["--quick"]) == 0
    told = capsys.readouterr()
    assert told.out + told.err == "bench.poweroff: skipped, it needs root\n"
