"""The loss of a job against its own past."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from detectors.drifts import Drifts, Settings
from detectors.findings import Certainty, Finding, Role
from detectors.observations import Phase
from detectors.windows import Row, Window

pytestmark = pytest.mark.timeout(60)


def window(number: int, loss: float, high: float | None = None, phase: Phase = Phase.TRAIN) -> Window:
    rows = {rank: Row(values={"loss": loss * (1 + 0.001 * rank), "loss_high": high if high is not None else loss}, rank=rank, node="n0") for rank in range(4)}
    return Window(began=10.0 * number, ended=10.0 * number + 10, generation=1, phase=phase, rows=rows)


def found(loss: Callable[[int], float], windows: int, *, seed: int = 3, noise: float = 0.02) -> list[Finding]:
    rng, drifts = random.Random(seed), Drifts()
    return [one for number in range(windows) for one in drifts.see(window(number, loss(number) * rng.lognormvariate(0.0, noise)))]


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_falls_as_it_should_is_nothing(seed: int) -> None:
    assert found(lambda number: 2.0 + 6.0 * math.exp(-number / 100), 2000, seed=seed, noise=0.05) == []


def test_a_loss_that_stays_above_what_it_was_is_a_divergence_and_is_told_again_while_it_lasts() -> None:
    findings = found(lambda number: 2.0 if number < 100 else 2.6, 130)
    assert {one.kind for one in findings} == {"diverged"}
    assert [one.at for one in findings] == [10.0 * (100 + 12), 10.0 * (100 + 18), 10.0 * (100 + 24), 10.0 * (100 + 30)]
    first = findings[0]
    assert (first.began, first.scope, first.role, first.certainty) == (1000.0, "job", Role.ROOT, Certainty.STRONG)
    (feature,) = first.features
    assert feature.baseline == pytest.approx(2.0, rel=0.02)
    assert feature.value == pytest.approx(2.6, rel=0.1)


def test_a_slow_divergence_does_not_become_what_is_usual() -> None:
    findings = found(lambda number: 2.0 * math.exp(0.005 * max(0, number - 100)), 200)
    assert "diverged" in {one.kind for one in findings}
    assert findings[0].at < 10.0 * 175


def test_a_spike_is_advice_and_when_it_heals_nothing_follows() -> None:
    drifts = Drifts()
    said = [one for number in range(100) for one in drifts.see(window(number, 2.0, 20.0 if number == 60 else 2.1))]
    assert [(one.kind, one.role, one.at) for one in said] == [("loss_spike", Role.ADVISE, 610.0)]
    assert said[0].features[0].value == pytest.approx(20.0)


def test_out_of_training_nothing_is_learnt_or_said() -> None:
    drifts = Drifts()
    for number in range(40):
        drifts.see(window(number, 2.0))
    assert [one for number in range(40, 80) for one in drifts.see(window(number, 9.0, phase=Phase.EVAL))] == []
    assert drifts.see(window(80, 2.0)) == []


def test_before_there_is_a_past_nothing_is_said() -> None:
    drifts = Drifts(Settings(warm_up=20))
    assert [one for number in range(20) for one in drifts.see(window(number, 10.0 ** (number % 3)))] == []


def test_losses_that_have_no_logarithm_are_left_out() -> None:
    drifts = Drifts()
    assert [one for number in range(60) for one in drifts.see(window(number, 0.0 if number % 2 else -1.0))] == []
