"""Wrapping a module, over gloo with two ranks: the flag gets through, and nothing of the training changes, whatever DDP is told besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.support.worlds import run
from tests.trainer import _wrapped as wrapped
from trainer.errors import SetupError
from trainer.flag import Wish
from trainer.wire.window import PHASES
from trainer.wrap import REFUSED, wrap

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", wrapped.CASES)
def test_the_flag_gets_through_and_the_weights_are_those_of_plain_ddp(tmp_path: Path, name: str) -> None:
    results = run(wrapped.compare, 2, tmp_path, name=name)
    for result in results:
        assert result["ours"]["said"] == [step == wrapped.STOP_AT for step in range(wrapped.TURNS)]
        assert not any("flag" in one for one in result["ours"]["names"])
        if result["theirs"] is not None:
            assert result["ours"]["digest"] == result["theirs"]["digest"]
            assert result["ours"]["names"] == result["theirs"]["names"]
        for lap in result["ours"]["laps"]:  # each phase is seen, and none twice
            assert min(lap["forward"], lap["backward"], lap["communication"]) > 0.0
            assert sum(lap[phase] for phase in PHASES) == pytest.approx(lap["seconds"], abs=1e-9)
    if not wrapped.CASES[name].norm:
        assert results[0]["ours"]["digest"] == results[1]["ours"]["digest"]


def test_the_warm_up_leaves_no_trace(tmp_path: Path) -> None:
    expected = {"same": True, "called": 1, "grads": [True] * 4, "module": True, "training": True, "rebuilt": True}
    assert run(wrapped.warm_up_leaves_no_trace, 1, tmp_path) == [expected]


def test_an_average_of_weights_carries_no_flag(tmp_path: Path) -> None:
    assert run(wrapped.average_of_weights, 1, tmp_path) == [{"by the copy": False, "by the model": True, "type": True}]


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_would_crash_or_hang_are_refused(option: str) -> None:
    with pytest.raises(SetupError, match=rf"wrap\(…, {option}=…\) cannot work"):
        wrap(nn.Linear(1, 1), Wish, **{option: object()})


def two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(1, 1).requires_grad_(False), "no parameter of the module requires a gradient"),
        (two_devices, "the module's parameters lie on cpu, meta"),
        (lambda: torch.jit.script(nn.Linear(1, 1)), "a TorchScript module cannot carry the stop flag"),
    ],
)
def test_modules_that_cannot_be_wrapped_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        wrap(make(), Wish)
