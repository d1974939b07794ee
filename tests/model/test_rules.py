"""Each rule of docs/protocol.md that has a trace is needed: without it the checker finds what the trace tells, and with it nothing."""

from __future__ import annotations

import pytest

from tests.model.run import describe, find, shrink
from tests.model.taken_out import TAKEN_OUT, TakenOut

pytestmark = pytest.mark.timeout(300)

BESIDE = 40
"""Walks that must pass with the rule in place, besides those that it took to break without."""


@pytest.mark.parametrize("rule", TAKEN_OUT, ids=str)
def test_without_the_rule_its_trace_is_found_and_with_it_nothing_is(rule: TakenOut) -> None:
    broken, count = find(range(rule.within), rule.mix, rule.rules, set(rule.kinds))
    assert broken is not None, f"{rule} is never missed in {count} walks"
    well, _ = find(range(count + BESIDE), rule.mix)
    assert well is None, describe(shrink(well))
