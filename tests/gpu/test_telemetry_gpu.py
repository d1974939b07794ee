"""Telemetry on a CUDA device: phases as the device spent them, values without a synchronize, memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.support.worlds import run
from tests.trainer._programs import Points, settings
from trainer.wire.window import PHASES, Window

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 12
CYCLES = 100_000_000
"""That the device is kept busy for in each forward pass: some fifty milliseconds."""


class Busy(nn.Module):
    """Returns at once; the device takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        out: torch.Tensor = self.layer(x)
        return out


def busy(folder: Path) -> dict[str, Any]:
    """A training whose steps are long on the device alone, and in which nothing of telemetry may make the host wait."""
    run = trainer.join(seed=3, settings=settings(folder, telemetry_file=folder / "telemetry.jsonl", telemetry_every_s=0.2))
    model = run.wrap(Busy().to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    losses, launched = [], 0.0
    for x, y in run.steps(run.loader(Points(), batch_size=24), max_steps=STEPS):
        optimizer.zero_grad()
        on_device, wanted = x.to(run.device), y.to(run.device)
        began = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        loss = nn.functional.cross_entropy(model(on_device), wanted)
        run.backward(loss)
        run.log(twice=loss * 2)
        torch.cuda.set_sync_debug_mode("default")
        launched += time.perf_counter() - began
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return {"losses": torch.stack(losses).tolist(), "launched": launched, "asleep": start.elapsed_time(end) / 1000.0}


def test_phases_are_the_devices_and_every_step_has_its_loss(tmp_path: Path) -> None:
    (found,) = run(busy, 1, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
    windows = [Window.from_dict({name: value for name, value in line.items() if name != "event"}) for line in lines if line["event"] == "window"]
    assert [number for window in windows for number in range(window.first, window.last + 1)] == list(range(1, STEPS + 1))
    forward = sum(window.phases["forward"][0] for window in windows)
    assert forward > 0.8 * STEPS * found["asleep"]  # which the host did not see
    for window in windows:
        assert sum(window.phases[phase][0] for phase in PHASES) == pytest.approx(window.seconds, rel=1e-3)
        assert 0 < window.memory["allocated"] <= window.memory["peak"]
        assert window.memory["allocated"] <= window.memory["reserved"]
    assert sum(window.values["loss"].count for window in windows) == STEPS
    assert windows[-1].values["loss"].last == pytest.approx(found["losses"][-1], rel=1e-5)
    assert windows[-1].values["twice"].last == pytest.approx(2 * found["losses"][-1], rel=1e-5)
