"""A fresh worker for bench.checkpoint: does what one JSON on the command line asks, and prints one JSON of seconds.

Owns: what is timed in a worker. Must not: be run by hand.

A worker is a new process where the first time counts. Floors, ours and the peers' are timed in turn within it, each on the same bytes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bench._checkpoint_state import parameters, shapes
from trainer.snapshot import Snapshots
from trainer.wire.layout import Layout, pack_extras

EXTRAS: Final = pack_extras({"step": 1, "lr": 0.1})
STEP_SECONDS: Final = 0.25
"""What a first step takes at least in a worker of this size."""

Seconds = dict[str, float]


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


class Floor:
    """memcpy of as many bytes as the image has, one thread, from one aligned block into a warm mapping of shared memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fd = os.memfd_create("floor")
        os.truncate(self._fd, size)
        self._to = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._from = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)
        self()  # both ends are warm from here on

    def __call__(self) -> float:
        return timed(lambda: ctypes.memmove(self._to.data_ptr(), self._from.data_ptr(), self._size))


class Dcp:
    """torch.distributed.checkpoint.async_save with a stager that keeps its shared memory: the cheapest of its ways that is done when it returns."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._folder = folder
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False))
        self._count = 0

    def save(self, state: Mapping[str, torch.Tensor]) -> float:
        """Seconds that the caller was blocked; waits for the rest outside of them."""
        import torch.distributed.checkpoint as dcp

        self._count += 1
        began = time.perf_counter()
        future: Any = dcp.async_save(dict(state), checkpoint_id=self._folder / str(self._count % 2), async_stager=self._stager)
        took = time.perf_counter() - began
        future.result()
        return took

    def load(self, state: Mapping[str, torch.Tensor]) -> float:
        """In place, from the page cache."""
        import torch.distributed.checkpoint as dcp

        return timed(lambda: dcp.load(dict(state), checkpoint_id=self._folder / str(self._count % 2)))


def state_of(size: str) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, index % 7 + 0.5) for index, (name, shape) in enumerate(shapes(size).items())}


def attached(job: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Snapshots:
    layout = Layout.parse(Path(job["header"]).read_text())
    return Snapshots(layout, state, job["fds"][0], job["fds"][1:], local_rank=0, local_world=1)


def repeated(job: Mapping[str, Any]) -> list[Seconds]:
    """Warm: one process, everything in turn, `runs` times."""
    state = state_of(job["size"])
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    snapshots = attached(job, state)
    dcp = Dcp(Path(job["folder"]))
    file = Path(job["folder"]) / "state.pt"
    step = job["step"]
    rows: list[Seconds] = []
    for run in range(job["runs"] + 2):  # the first two of everything are not warm
        row = {"floor": floor()}
        step += 1
        taken = snapshots.take(1, step, EXTRAS)
        assert taken is not None
        row["take"] = taken.seconds
        index = taken.index
        row["floor_2"] = floor()
        row["restore"] = timed(lambda: snapshots.restore(index, state))  # noqa: B023 - called at once
        row["dcp_save"] = dcp.save(state)
        row["torch_save"] = timed(lambda: torch.save(state, file))
        row["floor_3"] = floor()
        row["dcp_load"] = dcp.load(state)
        row["torch_load"] = timed(lambda: copied(torch.load(file, weights_only=True), state))
        if run >= 2:
            rows.append(row)
    snapshots.close()
    return rows


def copied(loaded: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


def first(job: Mapping[str, Any]) -> Seconds:
    """The first snapshot of a new worker, `wait` seconds after it has its buffers."""
    state = state_of(job["size"])
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    row = {"floor": floor()}
    began = time.perf_counter()
    snapshots = attached(job, state)
    row["attach"] = time.perf_counter() - began
    time.sleep(job["wait"])
    taken = snapshots.take(1, job["step"], EXTRAS)
    assert taken is not None
    row["take"] = taken.seconds
    row["floor_2"] = floor()
    snapshots.close()
    return row


def first_dcp(job: Mapping[str, Any]) -> Seconds:
    state = state_of(job["size"])
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    dcp = Dcp(Path(job["folder"]))
    return {"floor": floor(), "take": dcp.save(state), "floor_2": floor()}


def fresh(job: Mapping[str, Any]) -> Seconds:
    """A new worker: the model into the tensors that the script has just made, as a script does, the optimizer's share into new ones."""
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    row = {"floor": floor()}
    snapshots = attached(job, {})
    index = job["index"]
    names = list(snapshots.view(index))
    model = parameters(job["size"])
    began = time.perf_counter()
    copies = snapshots.copies(index, [name for name in names if name not in model])
    row["begin"] = time.perf_counter() - began
    made = {name: torch.empty(shape).normal_(std=0.02) for name, shape in model.items()}
    row["built"] = time.perf_counter() - began
    began = time.perf_counter()
    snapshots.restore(index, made, partial=True)
    made |= copies.take(snapshots.view(index), [name for name in names if name not in model])
    row["fresh"] = time.perf_counter() - began
    assert float(made["embedding"].reshape(-1)[-1]) == 0.5
    assert float(made["adam.embedding.exp_avg"].reshape(-1)[-1]) != 0
    row["floor_2"] = floor()
    copies.close()
    snapshots.close()
    return row


def fresh_at_once(job: Mapping[str, Any]) -> Seconds:
    """All into new tensors of a new worker: from its first sight of the buffers until they are there."""
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    row = {"floor": floor()}
    began = time.perf_counter()
    snapshots = attached(job, {})
    copies = snapshots.copies(job["index"], ())
    made = copies.take(snapshots.view(job["index"]), [entry.name for entry in snapshots.layout.tensors])
    row["fresh"] = time.perf_counter() - began
    assert float(made["embedding"].reshape(-1)[-1]) == 0.5
    row["floor_2"] = floor()
    copies.close()
    snapshots.close()
    return row


def fresh_torch(job: Mapping[str, Any]) -> Seconds:
    """torch.load of a file that is in the page cache."""
    floor = Floor(Layout.parse(Path(job["header"]).read_text()).size)
    file = Path(job["folder"]) / "state.pt"
    return {"floor": floor(), "fresh": timed(lambda: torch.load(file, weights_only=True)), "floor_2": floor()}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    known = {
        "repeated": repeated,
        "first": first,
        "first_dcp": first_dcp,
        "fresh": fresh,
        "fresh_at_once": fresh_at_once,
        "fresh_torch": fresh_torch,
    }
    result = known[job["do"]](job)
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # what DCP's threads still hold is not waited for


if __name__ == "__main__":
    main()
