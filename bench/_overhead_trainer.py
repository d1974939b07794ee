"""What a session costs a step, and what of it is telemetry: two trainings in the same two processes, step by step in turns.

Two ranks over gloo on this machine, snapshots off, steps of about 20 ms. Both read the same samples: plain DDP from a DataLoader with a
DistributedSampler, ours from `run.loader`. A block is STEPS steps of each; its value is their median, on rank 0. What telemetry does once a second
is not in a median: `telemetry_window_ms` is what one window costs.

    python -m bench._overhead_trainer [BLOCKS]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench._common import Row, paired_ratio, print_table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    Program = Callable[[Path], tuple[Iterator[None], Iterator[None]]]

WORLD: Final = 2
STEPS: Final = 25
"""Of a block."""
STEP_SECONDS: Final = 0.020
WIDTH: Final = 256
TARGET: Final = 1.01
TELEMETRY_TARGET: Final = 1.005


def trainer_step_ratio(blocks: int) -> list[Row]:
    """Seconds of a step of both, over `blocks` blocks of each, and ours over theirs, pair by pair."""
    return _compared("trainer", "ddp", _beside_ddp, blocks, TARGET)


def telemetry_step_ratio(blocks: int) -> list[Row]:
    """The same of a session with telemetry and one without; and what a window costs, beside the steps."""
    rows = _compared("telemetry", "off", _beside_silence, blocks, TELEMETRY_TARGET)
    return [Row.of("telemetry_window_ms", "elasticd", _windows(blocks), unit="ms", note="once a second"), *rows]


def _windows(count: int) -> list[float]:
    """Milliseconds in which a window is made and sent."""
    import torch

    from trainer.tally import Stepped, Tallies
    from trainer.telemetry import memory
    from trainer.wire import channel

    ours, theirs = socket.socketpair()
    took = []
    with ours, theirs:
        for _ in range(count):
            step = Stepped(number=1, ended=time.time(), seconds=0.02, spent=[0.002] * 7, samples=32, batches=1, values=[("loss", 0.5), ("grad_norm", 1.0)])
            made = Tallies(0, 1, step)
            began = time.perf_counter()
            window = made.window(memory=memory(torch.device("cpu")), dropped=0)
            channel.send(ours, channel.Telemetry(window=window.as_dict()))
            took.append(1000 * (time.perf_counter() - began))
            theirs.recv(65536)
    return took


def _compared(what: str, peer: str, program: Program, blocks: int, target: float) -> list[Row]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = multiprocessing.get_context("spawn")
    ours_end, theirs_end = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        ranks = [context.Process(target=_rank, args=(program, rank, store.port, blocks, folder, theirs_end)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        pairs: list[tuple[float, float]] = ours_end.recv() if ours_end.poll(60 + 2 * blocks * STEPS * 5 * STEP_SECONDS) else []
        for process in ranks:
            process.join(30)
            process.kill()
    if not pairs:
        raise RuntimeError("the ranks ended without a result")
    rows = [
        Row.of(f"{what}_step_ms", "elasticd", [1000 * ours for ours, _ in pairs], unit="ms"),
        Row.of(f"{what}_step_ms", peer, [1000 * theirs for _, theirs in pairs], unit="ms"),
    ]
    ratio = paired_ratio(f"{what}_step_ratio", "elasticd", pairs)
    assert ratio is not None
    assert ratio.median is not None
    return [*rows, ratio.noted(f"target <= {target:g} x: {'met' if ratio.median <= target else 'MISSED'}; {blocks} pairs of blocks of {STEPS} steps")]


def _rank(program: Program, rank: int, port: int, blocks: int, folder: str, result: Connection) -> None:
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
        | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ours, theirs = program(Path(folder))
    pairs = []
    for block in range(blocks + 2):
        theirs_s, ours_s = _timed(theirs, ours)
        if block > 1:  # the first ones warm up
            pairs.append((ours_s, theirs_s))
    if rank == 0:
        result.send(pairs)
    dist.barrier()
    os._exit(0)  # nobody wants the checkpoint


def _beside_ddp(folder: Path) -> tuple[Iterator[None], Iterator[None]]:
    run = _session(folder)  # makes the process group
    batch = _calibrated()
    return _ours(run, batch), _bare(batch)


def _beside_silence(folder: Path) -> tuple[Iterator[None], Iterator[None]]:
    loud, silent = _session(folder / "on", telemetry_file=folder / "telemetry.jsonl"), _session(folder / "off", telemetry=False)
    batch = _calibrated()
    return _ours(loud, batch), _ours(silent, batch)


def _session(folder: Path, **settings: Any) -> Any:
    import trainer

    return trainer.join(settings=trainer.Settings(checkpoint_dir=folder, checkpoint_every_s=0, snapshots=False, **settings))


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
        run.stepped()  # so that what a session does at the end of a step is in this turn
        yield


if __name__ == "__main__":
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print_table(trainer_step_ratio(turns) + telemetry_step_ratio(turns), title="what a session costs a step, and telemetry in it")
