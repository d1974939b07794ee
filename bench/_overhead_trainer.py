"""What a session costs a step: the same training with plain DDP and with `trainer`, in the same two processes, step by step in turns.

Two ranks over gloo on this machine, snapshots off, steps of about 20 ms. Both read the same samples: plain DDP from a DataLoader with a
DistributedSampler, ours from `run.loader`. A block is STEPS steps of each; its value is their median, on rank 0.

    python -m bench._overhead_trainer [BLOCKS]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench._common import Row, paired_ratio, print_table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WORLD: Final = 2
STEPS: Final = 25
"""Of a block."""
STEP_SECONDS: Final = 0.020
WIDTH: Final = 256
TARGET: Final = 1.01


def trainer_step_ratio(blocks: int) -> list[Row]:
    """Seconds of a step of both, over `blocks` blocks of each, and ours over theirs, pair by pair."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = multiprocessing.get_context("spawn")
    ours_end, theirs_end = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        ranks = [context.Process(target=_rank, args=(rank, store.port, blocks, folder, theirs_end)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        pairs: list[tuple[float, float]] = ours_end.recv() if ours_end.poll(60 + 2 * blocks * STEPS * 5 * STEP_SECONDS) else []
        for process in ranks:
            process.join(30)
            process.kill()
    if not pairs:
        raise RuntimeError("the ranks ended without a result")
    rows = [
        Row.of("trainer_step_ms", "elasticd", [1000 * ours for ours, _ in pairs], unit="ms"),
        Row.of("trainer_step_ms", "ddp", [1000 * theirs for _, theirs in pairs], unit="ms"),
    ]
    ratio = paired_ratio("trainer_step_ratio", "elasticd", pairs)
    assert ratio is not None
    assert ratio.median is not None
    return [*rows, ratio.noted(f"target <= {TARGET:g} x: {'met' if ratio.median <= TARGET else 'MISSED'}; {blocks} pairs of blocks of {STEPS} steps")]


def _rank(rank: int, port: int, blocks: int, folder: str, result: Connection) -> None:
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
        | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    )
    import torch
    import torch.distributed as dist

    import trainer

    torch.set_num_threads(1)
    run = trainer.join(settings=trainer.Settings(checkpoint_dir=Path(folder), checkpoint_every_s=0, snapshots=False))
    batch = _calibrated()
    bare, ours = _bare(batch), _ours(run, batch)
    pairs = []
    for block in range(blocks + 2):
        theirs_s, ours_s = _timed(bare, ours)
        if block > 1:  # the first ones warm up
            pairs.append((ours_s, theirs_s))
    if rank == 0:
        result.send(pairs)
    dist.barrier()
    os._exit(0)  # nobody wants the checkpoint


def _timed(*loops: Iterator[None]) -> list[float]:
    """Median seconds of a step of each, over a block in which they take turns, so that what slows down one slows down the others."""
    import torch.distributed as dist

    dist.barrier()
    took: list[list[float]] = [[] for _ in loops]
    for turn in range(STEPS):
        for index in range(len(loops)) if turn % 2 else reversed(range(len(loops))):
            began = time.perf_counter()
            next(loops[index])
            took[index].append(time.perf_counter() - began)
    return [statistics.median(one) for one in took]


def _net() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())], nn.Linear(WIDTH, 10))


def _data(batch: int) -> Any:
    import torch

    count = batch * WORLD * 64
    return torch.utils.data.TensorDataset(torch.randn(count, WIDTH), torch.randint(10, (count,)))


def _calibrated() -> int:
    """Samples a rank that make a step of plain DDP take about as long as it should; the same on all ranks."""
    import torch
    import torch.distributed as dist

    batch = 64
    for _ in range(6):
        steps = _bare(batch)
        _timed(steps)
        took = torch.tensor(_timed(steps))
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        batch = max(8, min(4096, round(batch * STEP_SECONDS / float(took))))
    return batch


def _bare(batch: int) -> Iterator[None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model = DistributedDataParallel(_net())
    optimizer = torch.optim.AdamW(model.parameters())
    data = _data(batch)
    sampler: Any = DistributedSampler(data)
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=batch, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _ours(run: Any, batch: int) -> Iterator[None]:
    import torch

    model = run.wrap(_net())
    optimizer = torch.optim.AdamW(model.parameters())
    run.register(model=model, optimizer=optimizer)
    for x, y in run.steps(run.loader(_data(batch), batch_size=batch * WORLD), max_steps=1_000_000_000):
        optimizer.zero_grad()
        run.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        yield


if __name__ == "__main__":
    print_table(trainer_step_ratio(int(sys.argv[1]) if len(sys.argv) > 1 else 30), title="what a session costs a step")
