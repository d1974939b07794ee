"""When to snapshot: the arithmetic, and the running means behind it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.interval import Cadence, steps_between, young_daly

positive = st.floats(1e-4, 1e4)


@pytest.mark.parametrize(
    ("step", "cost", "every", "percent", "mean", "steps"),
    [
        (0.1, 0.002, 0, 2.0, 10_800, 1),  # 2 % of a step: every one
        (0.1, 0.0021, 0, 2.0, 10_800, 67),  # sqrt(2 * 0.0021 * 10800) = 6.73 s
        (0.5, 0.19, 0, 2.0, 10_800, 128),  # 64.06 s
        (100.0, 5.0, 0, 2.0, 60, 1),  # sqrt(600) = 24 s is less than a step
        (0.1, 50.0, 7, 2.0, 10_800, 7),  # as somebody set it
        (0.0, 1.0, 0, 2.0, 10_800, 1),
    ],
)
def test_steps_between(step: float, cost: float, every: int, percent: float, mean: float, steps: int) -> None:
    assert steps_between(step, cost, every=every, cost_percent=percent, mean_time_to_failure_s=mean) == steps


@given(cost=positive, mean=positive, other=st.floats(0.1, 10.0))
def test_no_other_interval_loses_less(cost: float, mean: float, other: float) -> None:
    def lost(interval: float) -> float:
        return cost / interval + interval / (2 * mean)

    best = young_daly(cost, mean)
    assert lost(best) <= lost(best * other) * (1 + 1e-9)


@given(step=positive, cost=positive, mean=positive, percent=st.floats(0.1, 10.0))
def test_it_is_a_step_at_least_and_never_dearer_than_both_bounds(step: float, cost: float, mean: float, percent: float) -> None:
    steps = steps_between(step, cost, every=0, cost_percent=percent, mean_time_to_failure_s=mean)
    assert steps >= 1
    assert steps == 1 or math.isclose(steps * step, young_daly(cost, mean), abs_tol=step)


def cadence(every: int = 0) -> Cadence:
    return Cadence(every=every, cost_percent=2.0, mean_time_to_failure_s=10_800)


def test_the_first_is_due_at_once_and_the_second_when_the_cost_is_known() -> None:
    one = cadence()
    assert one.due(1)
    one.stepped(0.5)
    one.took(1, 0.19)
    assert one.interval == 128
    assert not one.due(128)
    assert one.due(129)


def test_cheap_ones_are_due_each_step() -> None:
    one = cadence()
    one.stepped(0.5)
    one.took(4, 0.001)
    assert one.due(5)


def test_what_is_set_holds_from_the_first_on() -> None:
    one = cadence(every=3)
    one.took(6, 9.0)
    assert [one.due(step) for step in (7, 8, 9)] == [False, False, True]


def test_a_single_slow_step_does_not_change_much() -> None:
    one = cadence()
    for _ in range(10):
        one.stepped(0.1)
    one.took(10, 0.05)
    before = one.interval
    one.stepped(0.2)
    assert before == 329
    assert one.interval == 299
