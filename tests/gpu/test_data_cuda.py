"""Keyed random numbers and page-locked batches on a CUDA device."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from trainer import rng
from trainer.data import ElasticLoader

with rng.keyed(1, 2, 3):
    pass
assert not torch.cuda.is_initialized()
torch.rand(1, device="cuda")


def drawn(step, restore=False):
    with rng.keyed(1, step, 3, restore=restore):
        return torch.rand(4, device="cuda").tolist()


assert drawn(2) == drawn(2) != drawn(3)
rng.seed_all(7)
expected = torch.rand(4, device="cuda").tolist()
rng.seed_all(7)
drawn(2, restore=True)
assert torch.rand(4, device="cuda").tolist() == expected
for workers in (0, 2):
    loader = ElasticLoader(TensorDataset(torch.arange(20)), batch_size=8, microbatch=4, pin_memory=True, workers=workers)
    found = []
    for step in loader:
        for part in step.microbatches:
            assert part.batch[0].is_pinned()
            found += part.batch[0].to("cuda", non_blocking=True).tolist()
        loader.done(step)
    assert sorted(found) == list(range(20))
    loader.close()
print("done")
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_what_is_drawn_on_a_device_is_keyed_and_batches_are_pinned() -> None:
    """In a process of its own, which has not begun to use CUDA."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    run = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert (run.stdout, run.stderr) == ("done\n", "")
