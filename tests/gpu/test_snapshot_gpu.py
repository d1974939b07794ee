"""Snapshots of tensors on a CUDA device: into pinned buffers, and back. Run by `make test-gpu`; docs/gpu-status.md says when it last was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from trainer.wire.board import Board

if TYPE_CHECKING:
    import torch

    from trainer.snapshot import Snapshots

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


def zoo(device: str) -> dict[str, torch.Tensor]:
    """On the device, in every way a tensor may lie there; a step on the CPU, as Adam's is."""
    import torch

    generator = torch.Generator().manual_seed(5)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    base = some(60, 40)
    return {
        "large": some(4000, 1000),
        "parameter": torch.nn.Parameter(some(300, 50)),
        "half": some(501, 3).bfloat16(),
        "double": some(33).double(),
        "numbers": torch.arange(1001, device=device),
        "flags": some(100) > 0,
        "scalar": some(1)[0],
        "empty": some(0, 3),
        "channels_last": some(4, 8, 9, 7).contiguous(memory_format=torch.channels_last),
        "transposed": some(900, 70).t(),
        "strided": some(200, 30)[::2, 1::3],
        "tied": base,
        "tied again": base,
        "step": torch.tensor(7.0),
    }


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    import torch

    for name, tensor in wanted.items():
        assert torch.equal(got[name].detach().cpu(), tensor.detach().cpu()), name


@pytest.fixture
def node() -> Iterator[tuple[Snapshots, dict[str, torch.Tensor], Board]]:
    from trainer.snapshot import Snapshots, layout_of

    tensors = zoo("cuda")
    layout = layout_of(tensors, extras=100)
    board = Board.create(3, 1)
    fds = [os.memfd_create("buffer") for _ in range(3)]
    for fd in fds:
        os.truncate(fd, layout.size)
    snapshots = Snapshots(layout, tensors, board.fd, fds, local_rank=0, local_world=1)
    yield snapshots, tensors, board
    snapshots.close()
    board.close()
    for fd in fds:
        os.close(fd)


def test_a_state_on_the_device_is_in_the_buffer_when_take_returns(node: tuple[Snapshots, dict[str, torch.Tensor], Board]) -> None:
    """What the device still had to compute is in it, what it computes afterwards is not."""
    import torch

    snapshots, tensors, board = node
    for step in range(1, 8):
        for _ in range(20):
            tensors["large"] @ tensors["large"].t()  # keeps the device busy
        tensors["large"].add_(1)
        taken = snapshots.take(1, step, b"%d" % step)
        wanted = on_cpu(tensors)
        tensors["large"].mul_(2)
        assert taken is not None
        assert taken.complete
        assert_same(snapshots.view(taken.index), wanted)
    torch.cuda.synchronize()
    assert [held.step for held in board.valid()] == [7, 6, 5]


def test_the_buffers_are_pinned(node: tuple[Snapshots, dict[str, torch.Tensor], Board]) -> None:
    snapshots, _, _ = node
    snapshots._toucher.join()
    assert all(buffer.image.is_pinned() for buffer in snapshots._buffers)


def test_a_state_comes_back_onto_the_device_in_place(node: tuple[Snapshots, dict[str, torch.Tensor], Board]) -> None:
    import torch

    snapshots, tensors, _ = node
    snapshots.take(1, 1, b"extras")
    wanted = on_cpu(tensors)
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in others.items()}
    assert snapshots.restore(0, others) == b"extras"
    assert_same(others, wanted)
    assert {name: tensor.data_ptr() for name, tensor in others.items()} == addresses
    assert others["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_the_hash_is_computed_on_the_device_and_sees_every_bit() -> None:
    import torch

    from trainer.hashing import words_hash
    from trainer.snapshot import state_hash

    tensors = zoo("cuda")
    known = state_hash(tensors)
    assert known == state_hash({name: tensor.clone() for name, tensor in tensors.items()})
    other = tensors["large"].clone()
    other[-1, -1] = torch.nextafter(other[-1, -1], torch.tensor(99.0, device="cuda"))
    assert state_hash({**tensors, "large": other}) != known
    assert int(words_hash(tensors["large"])) == int(words_hash(tensors["large"].cpu())), "the sum does not depend on its order"
