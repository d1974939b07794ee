"""The session on a CUDA device: the flag read one step late, snapshots from device memory, a state back onto the device."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.worlds import run, world
from tests.trainer import _agents as agents
from tests.trainer import _on_gpu as on_gpu
from tests.trainer._agents import Agent
from trainer.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_run_that_goes_on_alone_ends_bit_for_bit_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    whole = run(on_gpu.train, 1, tmp_path / "whole", max_steps=20)
    first = run(on_gpu.train, 1, tmp_path / "parts", max_steps=7)
    second = run(on_gpu.train, 1, tmp_path / "parts", max_steps=20)
    assert {**first[0]["losses"], **second[0]["losses"]} == whole[0]["losses"]
    assert second[0]["digest"] == whole[0]["digest"]


def test_sigterm_is_heard_at_most_two_steps_later_and_nothing_is_lost(tmp_path: Path) -> None:
    whole = run(on_gpu.train, 1, tmp_path / "whole", max_steps=20)
    with world(on_gpu.train, 1, tmp_path / "parts", max_steps=20, step_seconds=0.1) as ranks:
        ranks.await_line(lambda line: line.get("step") == 5)
        ranks.send(0, signal.SIGTERM)
        assert ranks.codes() == [EXIT_STOPPED], ranks.story()
        last = ranks.lines()[-1]["step"]
    assert 5 <= last <= 8
    again = run(on_gpu.train, 1, tmp_path / "parts", max_steps=20)
    assert min(map(int, again[0]["losses"])) == last + 1
    assert again[0]["digest"] == whole[0]["digest"]


def test_every_step_is_in_the_agents_buffers(tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=1, settings={"snapshot_every": 1})
    result = run(agents.under_agent, 1, tmp_path / "run", name="train_on_gpu", sockets=[str(agent.path)], max_steps=6, step_seconds=0.2)
    held = agent.valid()
    assert [one.order for one in held] == [(5, 6), (5, 5), (5, 4)]
    assert agent.shelf is not None
    image = agent.shelf.image(held[0].index)
    entry = agent.shelf.layout.entry("model.first.weight")
    kept = torch.frombuffer(bytearray(image[entry.offset : entry.end]), dtype=torch.float32)
    assert kept.tolist() == result[0]["first"]
    agent.close()
