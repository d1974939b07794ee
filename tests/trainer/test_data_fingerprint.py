"""A fingerprint tells data sets apart by little reading, and is the same wherever and whenever it is taken."""
# ruff: noqa: NPY002 - NumPy's old global generator is what users draw from

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from trainer import rng
from trainer.data import fingerprint
from trainer.data.fingerprint import LOOKS, MOST_BYTES

pytestmark = pytest.mark.timeout(60)


class Image:
    """Answers as an image of PIL does."""

    def __init__(self, data: bytes, mode: str = "L") -> None:
        self.data = data
        self.mode = mode
        self.size = (2, len(data) // 2)

    def tobytes(self) -> bytes:
        return self.data


@dataclass
class Pair:
    left: Any
    right: Any


class Unknown:
    """Its text holds an address."""


TENSOR = torch.arange(12.0).view(3, 4)
ARRAY = np.arange(12, dtype=np.int16).reshape(3, 4)
# Each differs from all others.
SAMPLES: list[Any] = [
    None,
    True,
    1,
    2,
    1.0,
    1j,
    "1",
    "",
    "\ud800",
    b"1",
    bytearray(b"1"),
    (1, 2),
    [1, 2],
    (1, (2,)),
    ((1,), 2),
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": 1, "b": 1},
    Pair(1, 2),
    Pair(1, 3),
    TENSOR,
    TENSOR + 1,
    TENSOR.view(4, 3),
    TENSOR.double(),
    TENSOR.bfloat16(),
    TENSOR > 3,
    TENSOR.to(torch.complex64),
    TENSOR.to_sparse(),
    torch.tensor(1.0),
    torch.empty(0),
    torch.empty(0, 3),
    ARRAY,
    ARRAY + 1,
    ARRAY.reshape(4, 3),
    ARRAY.astype(np.int32),
    np.int64(1),
    np.float32(1),
    np.array(["a", None], dtype=object),
    np.array(["b", None], dtype=object),
    np.array(["a", "b"]),
    Image(b"1234"),
    Image(b"1235"),
    Image(b"1234", "P"),
    Unknown(),
    (TENSOR, 1),
    (TENSOR + 1, 1),
]


def test_other_samples_give_another_fingerprint() -> None:
    found = {fingerprint([sample] * 5): index for index, sample in enumerate(SAMPLES)}
    assert len(found) == len(SAMPLES)
    assert all(len(one) == 32 for one in found)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TENSOR.t().contiguous().t(), TENSOR),
        (TENSOR.clone().requires_grad_(), TENSOR),
        (np.asfortranarray(ARRAY), ARRAY),
        (ARRAY[:, ::-1][:, ::-1], ARRAY),
        (Unknown(), Unknown()),
        (TENSOR.to(torch.complex64).conj(), TENSOR.to(torch.complex64).conj().resolve_conj()),
    ],
)
def test_how_a_sample_lies_in_memory_does_not_count(one: Any, other: Any) -> None:
    assert fingerprint([one]) == fingerprint([other])


def test_class_and_length_count() -> None:
    assert len({fingerprint([1] * 5), fingerprint([1] * 6), fingerprint((1,) * 5), fingerprint([])}) == 4


class Noting:
    def __init__(self, n: int, sample: Any = 0) -> None:
        self.n = n
        self.sample = sample
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.sample


@pytest.mark.parametrize(("n", "read"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (100, [0, 33, 66, 99]), (10**12, [0, 333333333333, 666666666666, 10**12 - 1])])
def test_few_samples_are_read_the_first_and_the_last_among_them(n: int, read: list[int]) -> None:
    dataset = Noting(n)
    fingerprint(dataset)
    assert dataset.read == read
    assert len(read) <= LOOKS


@pytest.mark.parametrize("make", [bytes, lambda n: "a" * n, np.zeros, torch.zeros, lambda n: [0] * n, lambda n: Image(bytes(n))])
def test_of_large_samples_the_ends_count(make: Any) -> None:
    large = make(10 * MOST_BYTES)
    assert fingerprint([large]) == fingerprint([make(10 * MOST_BYTES)])
    assert fingerprint([large]) != fingerprint([make(10 * MOST_BYTES + 1)])


def test_a_change_at_either_end_of_a_large_array_is_seen() -> None:
    found = set()
    for index in (0, 10 * MOST_BYTES - 1, None):
        for make in (np.zeros, torch.zeros):
            values = make(10 * MOST_BYTES)
            if index is not None:
                values[index] = 1
            found.add(fingerprint([values]))
    found |= {fingerprint([bytes(10 * MOST_BYTES)]), fingerprint([b"1" + bytes(10 * MOST_BYTES - 1)]), fingerprint([bytes(10 * MOST_BYTES - 1) + b"1"])}
    assert len(found) == 9


def test_what_contains_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint([loop]) == fingerprint([loop])


class Own:
    def __init__(self, fingerprint: Any) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        raise AssertionError("need not be asked")


def test_a_data_set_that_knows_better_is_believed() -> None:
    assert fingerprint(Own("a")) == fingerprint(Own(lambda: "a"))
    assert fingerprint(Own("a")) != fingerprint(Own("b"))


class Noisy:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, float, torch.Tensor, int]:
        return random.random(), float(np.random.random_sample()), torch.rand(1), rng.sample_key()


def test_a_data_set_that_draws_has_one_fingerprint_and_leaves_no_trace() -> None:
    first = fingerprint(Noisy())
    with rng.keyed(1, 2, 3, restore=True):
        assert fingerprint(Noisy()) == first
        after = (random.random(), float(np.random.random_sample()), float(torch.rand(1)))
    with rng.keyed(1, 2, 3, restore=True):
        assert after == (random.random(), float(np.random.random_sample()), float(torch.rand(1)))


def test_it_is_the_same_in_another_process() -> None:
    code = "from trainer.data import fingerprint; print(fingerprint([{'a': 1, 'b': ('x', 2.5)}] * 9))"
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() for _ in range(2)]
    assert found == [fingerprint([{"a": 1, "b": ("x", 2.5)}] * 9)] * 2


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        raise AssertionError("is not begun")


def test_a_stream_is_not_begun_for_it() -> None:
    assert fingerprint(Stream()) == fingerprint(Stream())
