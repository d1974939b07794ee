"""Samples do not depend on who reads them, and the processes that read ahead live as long as the one that trains, no more and no less."""
# ruff: noqa: NPY002 - NumPy's old global generator is what users draw from

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Subset, default_collate, get_worker_info

from tests.support.children import children, forget
from trainer import rng
from trainer.data import ElasticLoader, workers

pytestmark = pytest.mark.timeout(120)
N = 30


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    forget()
    yield
    assert children(recursive=True) == []


class Noisy:
    """Sample i is (i, a number of each generator), as with augmentation; odd ones draw nothing if `sometimes`."""

    def __init__(self, *, sometimes: bool = False) -> None:
        self.sometimes = sometimes

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float, float, float, int]:
        if self.sometimes and index % 2:
            return index, 0.0, 0.0, 0.0, 0
        own = np.random.default_rng(rng.sample_key()).integers(2**31)
        return index, random.random(), float(np.random.standard_normal()), float(torch.rand(1)), int(own)


def steps_of(loader: ElasticLoader, most: int = 10**9) -> list[list[Any]]:
    """What each of the steps that are left in the epoch holds; has them done."""
    found = []
    for step in loader:
        found.append([part.batch for part in step.microbatches if part.samples])
        loader.done(step)
        if len(found) == most:
            break
    return found


def by_sample(batches: list[list[Any]]) -> dict[int, list[float]]:
    rows = [[column.tolist() for column in batch] for step in batches for batch in step]
    return {columns[0][row]: [column[row] for column in columns] for columns in rows for row in range(len(columns[0]))}


def all_ranks(world: int, dataset: Any, **options: Any) -> dict[int, list[float]]:
    found = {}
    for rank in range(world):
        loader = ElasticLoader(dataset, rank=rank, world_size=world, **options)
        found.update(by_sample(steps_of(loader)))
        loader.close()
    return found


@pytest.mark.parametrize("dataset", [Noisy(), Noisy(sometimes=True), Subset(Noisy(), range(N))], ids=["always", "sometimes", "subset"])
def test_a_sample_is_the_same_whoever_reads_it(dataset: Any) -> None:
    """A Subset fetches whole batches at once, which would leave the later samples to the earlier ones."""
    reference = all_ranks(1, dataset, batch_size=8, seed=3)
    assert sorted(reference) == list(range(N))
    drawing = [row[1:] for row in reference.values() if any(row[1:])]
    for column in zip(*drawing, strict=True):
        assert len(set(column)) == len(drawing), "each sample draws other numbers"
    assert all_ranks(3, dataset, batch_size=8, seed=3, microbatch=2) == reference
    assert all_ranks(1, dataset, batch_size=5, seed=3, shuffle=False, workers=1) == reference
    assert all_ranks(2, dataset, batch_size=8, seed=3, workers=2, prefetch_factor=3) == reference
    assert all_ranks(1, dataset, batch_size=8, seed=4) != reference


def test_a_sample_is_another_in_another_epoch_and_the_same_after_a_resume() -> None:
    loader = ElasticLoader(Noisy(), batch_size=8)
    first = by_sample(steps_of(loader))
    steps_of(loader, most=2)
    state = loader.state_dict()
    rest = by_sample(steps_of(loader))
    assert all(one != other for index, row in rest.items() for one, other in zip(first[index][1:], row[1:], strict=True))
    again = ElasticLoader(Noisy(), batch_size=8)
    again.load_state_dict(state)
    assert by_sample(steps_of(again)) == rest


def noisy_collate(samples: list[int]) -> tuple[torch.Tensor, float, float, float]:
    return default_collate(samples), random.random(), float(np.random.random_sample()), float(torch.rand(1))


def test_what_a_collate_function_draws_depends_on_the_microbatch_alone() -> None:
    def collated(world: int, count: int) -> dict[tuple[int, ...], list[float]]:
        loaders = [ElasticLoader(range(N), batch_size=8, microbatch=2, rank=r, world_size=world, collate_fn=noisy_collate, workers=count) for r in range(world)]
        found = {tuple(batch[0].tolist()): list(batch[1:]) for loader in loaders for step in steps_of(loader) for batch in step}
        for loader in loaders:
            loader.close()
        return found

    reference = collated(1, 0)
    assert len(reference) == 15
    assert len({tuple(row) for row in reference.values()}) == 15
    assert collated(3, 0) == reference
    assert collated(1, 2) == reference


class Counting:
    """Notes how it is asked; with a Noisy inside, its samples draw."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.asked: list[str] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.asked.append("one")
        return self.inner[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append("many")
        return [self.inner[index] for index in indices]


def test_a_data_set_that_reads_many_at_once_does_so_unless_it_draws() -> None:
    quiet = Counting(range(N))
    steps_of(ElasticLoader(quiet, batch_size=10))
    assert quiet.asked == ["many"] * 3
    noisy = Counting(Noisy())
    found = by_sample(steps_of(ElasticLoader(noisy, batch_size=10)))
    assert noisy.asked == ["many", *["one"] * N]
    assert found == all_ranks(1, Noisy(), batch_size=10)
    careless = Counting(Noisy())
    steps_of(ElasticLoader(careless, batch_size=10, sample_rng=False))
    assert careless.asked == ["many"] * 3


def test_reading_leaves_other_numbers_after_each_step_but_the_same_in_each_run() -> None:
    """Without workers, what a script draws between steps comes from generators that reading has touched."""

    def between(dataset: Any) -> list[tuple[float, float, float]]:
        return [(random.random(), float(np.random.random_sample()), float(torch.rand(1))) for _ in ElasticLoader(dataset, batch_size=8)]

    for dataset in (Who(), Noisy()):
        found = between(dataset)
        torch.rand(3)
        random.random()
        assert between(dataset) == found
        for column in zip(*found, strict=True):
            assert len(set(column)) == len(found)


def test_samples_that_lie_in_memory_are_read_without_touching_a_generator() -> None:
    tensors = torch.utils.data.TensorDataset(torch.arange(N))
    for dataset in (list(range(N)), tensors, Subset(tensors, range(N))):
        rng.seed_all(5)
        expected = (random.random(), float(np.random.random_sample()), float(torch.rand(1)))
        rng.seed_all(5)
        for _ in ElasticLoader(dataset, batch_size=8):
            pass
        assert (random.random(), float(np.random.random_sample()), float(torch.rand(1))) == expected


def test_reading_by_workers_draws_nothing_in_the_training_process() -> None:
    rng.seed_all(5)
    expected = (random.random(), float(np.random.random_sample()), float(torch.rand(1)))
    rng.seed_all(5)
    loader = ElasticLoader(Noisy(), batch_size=8, workers=1)
    loader.fingerprint()
    steps_of(loader)
    loader.close()
    assert (random.random(), float(np.random.random_sample()), float(torch.rand(1))) == expected


class Who:
    """Sample i is (i, the process that read it, the epoch it was told)."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, os.getpid(), self.epoch


def test_workers_stay_from_epoch_to_epoch_and_no_sample_is_lost_by_that() -> None:
    """Also where a pass is left in the middle with batches read ahead, and where a state is loaded."""
    loader = ElasticLoader(Who(), batch_size=4, workers=2)
    reference = ElasticLoader(range(N), batch_size=4)
    pids = set()
    steps_of(loader, most=3)
    state = loader.state_dict()
    steps_of(loader, most=2)
    loader.load_state_dict({**state, "epoch": 1, "offset": 12})
    reference.load_state_dict({**reference.state_dict(), "epoch": 1, "offset": 12})
    for epoch in (1, 2):
        found = [[column.tolist() for column in batch] for step in steps_of(loader) for batch in step]
        assert [columns[0] for columns in found] == [batch.tolist() for step in steps_of(reference) for batch in step]
        assert {told for columns in found for told in columns[2]} == {epoch}
        pids |= {pid for columns in found for pid in columns[1]}
    assert pids == {child.pid for child in children()}
    assert len(pids) == 2
    loader.close()


def test_workers_end_with_the_epoch_if_they_are_not_to_stay() -> None:
    loader = ElasticLoader(range(N), batch_size=4, workers=1, persistent_workers=False)
    steps = iter(loader)
    loader.done(next(steps))
    assert len(children()) == 1
    for step in steps:
        loader.done(step)
    assert children() == []
    assert loader.epoch == 1


def test_a_closed_loader_can_be_read_again() -> None:
    loader = ElasticLoader(range(N), batch_size=4, workers=1)
    first = steps_of(loader, most=2)
    loader.close()
    assert children() == []
    rest = steps_of(loader)
    loader.close()
    assert sorted(sample for step in first + rest for batch in step for sample in batch.tolist()) == list(range(N))


def test_evaluation_reads_with_workers_too() -> None:
    loader = ElasticLoader(range(N), batch_size=4)
    evaluation = loader.evaluation(Noisy(), batch_size=8, workers=1)
    first = [[column.tolist() for column in part.batch] for part in evaluation]
    assert [index for columns in first for index in columns[0]] == list(range(N))
    assert [[column.tolist() for column in part.batch] for part in loader.evaluation(Noisy(), batch_size=8)] == first


class Begun:
    """A worker_init_fn that looks at the data set it is given, as documented by torch."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Who)
        info.dataset.epoch = 100 + worker
        info.dataset.set_epoch = lambda _epoch: None  # type: ignore[method-assign]


def test_a_worker_init_function_finds_the_users_data_set() -> None:
    loader = ElasticLoader(Who(), batch_size=4, workers=2, worker_init_fn=Begun())
    assert {told for step in steps_of(loader) for batch in step for told in batch[2].tolist()} == {100, 101}
    loader.close()


class Broken:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        raise OSError(f"sample {index} cannot be read")


@pytest.mark.parametrize("count", [0, 1])
def test_a_sample_that_cannot_be_read_says_so(count: int) -> None:
    loader = ElasticLoader(Broken(), batch_size=4, workers=count)
    with pytest.raises(OSError, match="cannot be read"):
        next(iter(loader))
    loader.close()


class Stuck:
    """Samples take for ever once the first step is read."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            time.sleep(1000)
        return index


def test_workers_that_do_not_come_back_are_killed() -> None:
    loader = ElasticLoader(Stuck(), batch_size=4, workers=2, shuffle=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "GRACE", 0.2)
        patch.setattr(ElasticLoader, "fingerprint", lambda _self: "")
        steps = iter(loader)
        loader.done(next(steps))
        assert len(children()) == 2
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 4


Script = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Start a training script in a process group of its own; what is left of the group is killed afterwards."""
    started = []

    def start(source: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(source)
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0, env={**os.environ, "PYTHONPATH": root}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


HEARS = """
import os, signal, sys
import torch
from trainer.data import ElasticLoader

training, set_num_threads = os.getpid(), torch.set_num_threads


def earlier(count):
    # What a reader calls once torch has set its own handlers, which die of it, and before it has ours.
    if os.getpid() != training:
        os.kill(os.getpid(), signal.SIGTERM)
    set_num_threads(count)


torch.set_num_threads = earlier

heard = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, _: heard.append(number))


def begin(worker):
    os.kill(os.getpid(), signal.SIGTERM)


loader = ElasticLoader(range(1000), batch_size=10, workers=2, worker_init_fn=begin)
found = []
for turn, step in enumerate(loader):
    found += step.microbatches[0].batch.tolist()
    loader.done(step)
    if turn == 3:
        print("reading", flush=True)
        sys.stdin.readline()
print(sorted(found) == list(range(1000)), sorted(set(heard)), flush=True)
"""


def test_signals_to_the_whole_group_end_no_reader(script: Script) -> None:
    """The training process decides what they mean, and needs its data until then."""
    process = script(HEARS)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "reading\n"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.killpg(process.pid, number)
    process.stdin.write("on\n")
    process.stdin.flush()
    out, _ = process.communicate(timeout=60)
    assert out == f"True {[int(number) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)]}\n"
    assert process.returncode == 0


class Starts:
    """Samples that are read by a program of their own; yields the signal that ended it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["sleep", "100"])
        program.terminate()
        return -program.wait()


def test_a_program_started_by_a_reader_heeds_signals() -> None:
    """Readers do not: neither ignored nor blocked signals may be handed on."""
    loader = ElasticLoader(Starts(), batch_size=2, workers=1)
    assert next(iter(loader)).microbatches[0].batch.tolist() == [signal.SIGTERM] * 2
    loader.close()


ENDS = """
import time
from trainer.data import ElasticLoader


class Stuck:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index >= 10:
            time.sleep(1000)
        return index


loader = ElasticLoader(Stuck(), batch_size=10, workers=2, shuffle=False, persistent_workers=PERSISTENT)
steps = iter(loader)
next(steps)
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_a_process_that_ends_takes_its_readers_along(script: Script, persistent: bool) -> None:
    """Also those that are stuck in a sample, which do not heed the signal by which torch ends them."""
    process = script(ENDS.replace("PERSISTENT", str(persistent)))
    process.communicate(timeout=40)
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_process_that_is_killed_takes_its_readers_along(script: Script) -> None:
    process = script(HEARS)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    readers = psutil.Process(process.pid).children()
    assert len(readers) == 2
    process.kill()
    gone, _ = psutil.wait_procs(readers, timeout=30)
    assert len(gone) == 2
