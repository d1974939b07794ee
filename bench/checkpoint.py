"""What keeping a state costs: how long a step waits for a snapshot, and how fast it comes back.

    python -m bench.checkpoint [--quick] [--json FILE] [--sizes 300mb,1200mb] [--runs N] [--starts N] [--threads N] [--memory-only]
                                [--dir DIR]

A state of 25 and of 100 million fp32 parameters with Adam's moments, on the CPU. Buffers are the agent's; each worker is a process.
The floor is one memcpy of as many bytes, from one aligned block into shared memory that is mapped and warm, timed just before and after in the
same process; all use the same number of threads.

row (each as seconds, and as *_x_memcpy_SIZE over the floor, run by run)
snapshot_blocking      a step waits for a snapshot. dcp: async_save with a stager that keeps its memory; torch.save: without fsync
snapshot_first         the first one of a new worker, after a step of 0.25 s
snapshot_first_at_once the same, right after it has got the buffers
restore_memory         into the tensors that are there. dcp, torch.save: load from the page cache into the same tensors
restore_fresh          of a new worker, from the moment its script has built its model: that in place, the optimizer's share into new tensors
restore_fresh_at_once  all into new tensors, from the first sight of the buffers. torch.save: torch.load
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench._checkpoint_state import SIZES, shapes
from bench._common import Row, command, paired_ratio, print_table, progress, write_json
from elasticd.agent.buffers import Buffers
from trainer.wire.layout import Layout

ROOT: Final = Path(__file__).resolve().parent.parent
_EXTRAS: Final = 4096
_AT_ONCE: Final = "snapshot_first_at_once"
_FRESH_AT_ONCE: Final = "restore_fresh_at_once"
_STEP_SECONDS: Final = 0.25
_TARGETS: Final = {"snapshot_blocking": 1.2, "snapshot_first": 1.7, "restore_memory": 1.5, "restore_fresh": 3.0}

Seconds = dict[str, float]


class BenchError(Exception):
    """It could not be measured."""


class Bench:
    """One size: the agent's buffers, and workers that use them.

    Args:
        size: a key of `SIZES`.
        folder: for the peers' files.
        threads: that a worker may copy with.
    """

    def __init__(self, size: str, folder: Path, threads: int) -> None:
        self._size = size
        self._folder = folder
        self._threads = threads
        self._step = 0
        self.layout = Layout.build([(name, "F32", shape) for name, shape in shapes(size).items()], extras=_EXTRAS)
        (folder / "header").write_text(self.layout.header_text)
        self.buffers = Buffers()
        if not self.buffers.open(self.layout, local_world=1, percent=90):
            raise BenchError(f"no buffers: {self.buffers.why}")

    def worker(self, do: str, **values: Any) -> Any:
        """Run one, and return what it measured."""
        self._step += 1000
        job = {"do": do, "size": self._size, "folder": str(self._folder), "header": str(self._folder / "header")}
        job |= {"fds": self.buffers.fds(), "threads": self._threads, "step": self._step, **values}
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "bench._checkpoint_worker", json.dumps(job)],
            pass_fds=self.buffers.fds(),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"the worker that does {do!r} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def rows(self, runs: int, starts: int) -> list[Row]:
        """All rows of this size.

        Args:
            runs: of what is warm.
            starts: new workers for each row that needs one.
        """
        progress(f"{self._size}: {len(self.layout.tensors)} tensors, {self.layout.size / 1e6:.0f} MB; warm")
        warm: list[Seconds] = self.worker("repeated", runs=runs)
        rows = self._both("snapshot_blocking", "elasticd", warm, "take", ("floor", "floor_2"))
        rows += self._both("snapshot_blocking", "dcp", warm, "dcp_save", ("floor_2", "floor_3"))
        rows += self._both("snapshot_blocking", "torch.save", warm, "torch_save", ("floor_2", "floor_3"))
        rows += self._both("restore_memory", "elasticd", warm, "restore", ("floor", "floor_2"))
        rows += self._both("restore_memory", "dcp", warm, "dcp_load", ("floor_2", "floor_3"))
        rows += self._both("restore_memory", "torch.save", warm, "torch_load", ("floor_2", "floor_3"))
        floors = [row[name] for row in warm for name in ("floor", "floor_2", "floor_3")]
        return [Row.of(f"memcpy_{self._size}", "floor", floors), *rows, *self._starts(starts)]

    def _starts(self, starts: int) -> list[Row]:
        found: dict[tuple[str, str], list[Seconds]] = {}
        for start in range(starts):
            progress(f"{self._size}: new workers, {start + 1} of {starts}")
            jobs: list[tuple[str, str, str, dict[str, Any]]] = [
                ("snapshot_first", "elasticd", "first", {"wait": _STEP_SECONDS}),
                (_AT_ONCE, "elasticd", "first", {"wait": 0.0}),
                ("snapshot_first", "dcp", "first_dcp", {}),
                ("restore_fresh", "elasticd", "fresh", {}),
                (_FRESH_AT_ONCE, "elasticd", "fresh_at_once", {}),
                (_FRESH_AT_ONCE, "torch.save", "fresh_torch", {}),
            ]
            for name, peer, do, values in jobs:
                newest = self.buffers.held()[0].index
                found.setdefault((name, peer), []).append(self.worker(do, index=newest, **values))
        rows: list[Row] = []
        for (name, peer), measured in found.items():
            rows += self._both(name, peer, measured, "fresh" if name.startswith("restore_fresh") else "take", ("floor", "floor_2"))
        return rows

    def _both(self, name: str, peer: str, measured: Sequence[Seconds], what: str, floors: tuple[str, str]) -> list[Row]:
        """Seconds, and how many times the floor: the mean of those around it."""
        pairs = [(row[what], (row[floors[0]] + row[floors[1]]) / 2) for row in measured]
        over = paired_ratio(f"{name}_x_memcpy_{self._size}", peer, pairs)
        assert over is not None
        return [Row.of(f"{name}_{self._size}", peer, [row[what] for row in measured]), over]

    def persist(self, runs: int) -> list[Row]:
        """The rows of what is written to disk, where that part of the bench is there."""
        try:
            from bench._checkpoint_persist import persist_rows
        except ImportError:
            return []
        newest = self.buffers.held()[0]
        fd = self.buffers.fds()[1 + newest.index]
        # Pinned by the reader; mapped once more since ctypes, which times the copies, takes no read-only memory.
        with self.buffers.reading(newest.generation, newest.step) as (header, _), memoryview(mmap.mmap(fd, self.layout.size)) as image:
            return [Row(**row) for row in persist_rows(self._size, header, image, self._folder, runs)]


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with their targets."""
    told = []
    for row in rows:
        name = row.name.partition("_x_memcpy_")[0]
        target = _TARGETS.get(name) if row.unit == "x" and row.peer == "elasticd" else None
        met = row.median is not None and target is not None and row.median <= target
        told.append(row if target is None else row.noted(f"{'meets' if met else 'misses'} {target:g}"))
    return told


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small state, few runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--sizes", default="", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="of each warm row")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="new workers of each row that needs one")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that a worker may use (default: 1, as where a node runs several)")
    parser.add_argument("--memory-only", action="store_true", help="leave the disk out")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the files go: the disk that is measured (default: the directory for temporary files)")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes.split(",") if arguments.sizes else ["300mb"] if arguments.quick else list(SIZES)
    if not set(arguments.sizes) <= SIZES.keys():
        parser.error(f"--sizes: {', '.join(arguments.sizes)}; there are {', '.join(SIZES)}")
    return arguments


def main() -> None:
    arguments = parsed()
    runs = arguments.runs or (5 if arguments.quick else 9)
    starts = arguments.starts or (2 if arguments.quick else 5)
    rows: list[Row] = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(prefix="elasticd-bench-", dir=arguments.dir) as folder:
            try:
                bench = Bench(size, Path(folder), arguments.threads)
                rows += bench.rows(runs, starts)
                rows += [] if arguments.memory_only else bench.persist(runs)
                bench.buffers.close()
            except BenchError as error:
                sys.exit(f"error: {error}")
    rows = judged(rows)
    print_table(rows, title=f"states in memory and on disk, {arguments.threads} thread(s) a worker")
    if arguments.json:
        write_json(arguments.json, "checkpoint", command(), rows)


if __name__ == "__main__":
    main()
