"""The loop for those who do not write one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.worlds import run, world
from tests.trainer import _fitted as fitted
from trainer.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


def test_it_trains_and_tells_and_evaluates_every_sample_once(tmp_path: Path) -> None:
    one, two = (run(fitted.fitted, count, tmp_path / str(count), max_steps=40, microbatch=12, evaluate_every=8)[0] for count in (1, 2))
    assert one["metrics"]["accuracy"] == pytest.approx(one["exact"], abs=1e-6)
    assert one["metrics"]["accuracy"] > 0.8
    assert two["metrics"]["accuracy"] == pytest.approx(one["metrics"]["accuracy"], abs=1e-6)
    assert [told["step"] for told in one["told"]] == [5, 8, 10, 15, 16, 20, 24, 25, 30, 32, 35, 40]
    assert [told["step"] for told in one["told"] if told["metrics"]] == [8, 16, 24, 32, 40]
    assert [told["epoch"] for told in one["told"]][:4] == [0, 0, 1, 1]
    assert [told["loss"] for told in two["told"]] == pytest.approx([told["loss"] for told in one["told"]], rel=1e-5)
    assert one["told"][-1]["learning_rate"] == pytest.approx(0.0075)
    assert one["told"][-1]["loss"] < one["told"][0]["loss"]


def test_it_goes_on_where_it_stopped_with_what_it_was_told_to_keep(tmp_path: Path) -> None:
    whole = run(fitted.fitted, 2, tmp_path / "whole", max_steps=30)
    parts = tmp_path / "parts"
    with world(fitted.fitted, 2, parts, max_steps=30, slow=0.2) as ranks:
        ranks.await_line(lambda line: line["step"] == 10)
        ranks.send(1, signal.SIGTERM)
        assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    again = run(fitted.fitted, 2, parts, max_steps=30)
    assert again[0]["digest"] == whole[0]["digest"]
    assert again[0]["metrics"] == whole[0]["metrics"]
    assert again[0]["calls"] == whole[0]["calls"] == 6


def test_gradients_are_clipped_and_the_forward_pass_may_be_less_precise(tmp_path: Path) -> None:
    full = run(fitted.fitted, 1, tmp_path / "full", max_steps=10, evaluates=False, clip=0.1)[0]
    half = run(fitted.fitted, 1, tmp_path / "half", max_steps=10, evaluates=False, clip=0.1, autocast=True)[0]
    assert full["metrics"] == {}
    assert all(told["gradient_norm"] > 0.1 for told in full["told"])
    assert half["told"][0]["loss"] == pytest.approx(full["told"][0]["loss"], rel=0.02)
    assert half["told"][0]["loss"] != full["told"][0]["loss"]


def test_an_evaluation_of_fewer_samples_than_ranks(tmp_path: Path) -> None:
    results = run(fitted.evaluated_by_few, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    assert results[0]["accuracy"] in {0.0, 0.5, 1.0}
