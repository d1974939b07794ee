"""Which endpoint comes next."""

from __future__ import annotations

import pytest

from elasticd.kv.ring import Ring

pytestmark = pytest.mark.timeout(60)


def ring(*endpoints: str) -> tuple[Ring, list[tuple[str, str]]]:
    moves: list[tuple[str, str]] = []
    return Ring(endpoints, on_switch=lambda old, new: moves.append((old, new))), moves


def test_the_first_endpoint_is_used_first() -> None:
    """Configuration order counts."""
    made, moves = ring("a", "b")
    assert (made.current, moves) == ("a", [])


def test_ten_reports_of_one_failure_are_one_move() -> None:
    """Late reports about an endpoint that was left already move nothing."""
    made, moves = ring("a", "b", "c")
    for _ in range(10):
        made.failed("a")
    assert moves == [("a", "b")]


def test_the_endpoint_that_failed_longest_ago_is_next() -> None:
    """A fresh failure is not tried again while another one may have healed."""
    made, moves = ring("a", "b", "c")
    made.failed("a")
    made.failed("c")  # told by a straggler
    made.failed("b")
    assert moves[-1] == ("b", "a")


def test_an_answer_clears_an_endpoints_record() -> None:
    """worked() makes it as good as new."""
    made, _ = ring("a", "b", "c")
    made.failed("a")
    made.failed("c")
    made.worked("c")
    made.failed("b")
    assert made.current == "c"


def test_a_single_endpoint_stays() -> None:
    """There is nowhere to go, and nobody is told."""
    made, moves = ring("a")
    made.failed("a")
    assert (made.current, moves) == ("a", [])


def test_listeners_hear_of_moves_until_they_leave() -> None:
    """Watches hang on this."""
    made, _ = ring("a", "b")
    heard: list[str] = []
    leave = made.subscribe(lambda: heard.append(made.current))
    made.failed("a")
    leave()
    leave()
    made.failed("b")
    assert heard == ["b"]
