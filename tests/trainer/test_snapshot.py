"""Snapshots: what goes in comes out bit for bit, and no kill ever leaves a torn state that counts."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ChannelError, SetupError, StateError
from trainer.hashing import words_hash
from trainer.memory import CODES, share
from trainer.snapshot import Snapshots, layout_of, state_hash
from trainer.wire.board import MAX_LOCAL, Board
from trainer.wire.layout import ITEMSIZE, Layout

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]


class Node:
    """An agent's part: control page and buffers; and workers of this process."""

    def __init__(self, layout: Layout, buffers: int = 3, local_world: int = 1) -> None:
        self.layout = layout
        self.local_world = local_world
        self.board = Board.create(buffers, local_world)
        self.fds = [os.memfd_create("buffer", os.MFD_ALLOW_SEALING) for _ in range(buffers)]
        for fd in self.fds:
            os.truncate(fd, layout.size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.workers: list[Snapshots] = []

    def worker(self, tensors: dict[str, torch.Tensor], local_rank: int = 0) -> Snapshots:
        made = Snapshots(self.layout, tensors, self.board.fd, self.fds, local_rank=local_rank, local_world=self.local_world)
        self.workers.append(made)
        return made

    def image(self, index: int) -> bytes:
        with mmap.mmap(self.fds[index], self.layout.size, prot=mmap.PROT_READ) as image:
            return image[:]

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """What the buffer holds, as the safetensors library sees it."""
        return safetensors.torch.load(self.layout.header + self.image(index))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.board.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Those that are appended are closed."""
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


def node_of(nodes: list[Node], tensors: dict[str, torch.Tensor], buffers: int = 3, local_world: int = 1) -> Node:
    node = Node(layout_of(tensors, extras=1000), buffers, local_world)
    nodes.append(node)
    return node


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so NaNs too."""
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return data.reshape(-1).view(torch.uint8) if data.numel() else torch.empty(0)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(got[name]), bits(tensor)), name


def zoo() -> dict[str, torch.Tensor]:
    """Every dtype, and every way a tensor may lie in memory."""
    base = some(torch.float32, 60, 40)
    tensors = {f"{dtype}.{index}": some(dtype, *shape) for dtype in CODES for index, shape in enumerate(((71, 33), (), (0, 3), (5,), (3, 2048)))}
    return tensors | {
        "odd": some(torch.uint8, 5001),
        "parameter": torch.nn.Parameter(some(torch.float32, 30, 50)),
        "channels_last": some(torch.float32, 4, 8, 9, 7).contiguous(memory_format=torch.channels_last),
        "transposed": some(torch.float32, 90, 70).t(),
        "strided": some(torch.bfloat16, 200, 30)[::2, 1::3],
        "tied": base,
        "tied again": base,
        "part of tied": base[10:20],
        "leading ones": some(torch.float64, 1, 1, 700).transpose(0, 1),
        "expanded": torch.arange(50).expand(3, 50),
        "conjugate": torch.randn(40, 3, dtype=torch.complex64).conj(),
        "negative": torch.randn(40, 3, dtype=torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("local_world", [1, 2, 5])
def test_a_snapshot_is_a_file_that_the_library_reads_bit_for_bit(local_world: int, nodes: list[Node], tmp_path: Path) -> None:
    tensors = zoo()
    node = node_of(nodes, tensors, local_world=local_world)
    taken = [node.worker(tensors, rank).take(1, 7, b"{}") for rank in range(local_world)]
    assert [one and one.complete for one in taken] == [False] * (local_world - 1) + [True]
    assert sum(one.bytes for one in taken if one) == sum(entry.nbytes for entry in node.layout.tensors)
    path = tmp_path / "state.safetensors"
    path.write_bytes(node.layout.header + node.image(0))
    assert_same(safetensors.torch.load_file(path), tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert_same({name: file.get_tensor(name) for name in tensors}, tensors)


def test_a_state_comes_back_in_place_however_the_tensors_lie(nodes: list[Node]) -> None:
    tensors = zoo()
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    taken = worker.take(1, 7, b'{"lr":1}')
    assert taken is not None
    others = {name: tensor for name, tensor in zoo().items() if "tied" not in name}
    base = torch.zeros(60, 40)
    others |= {"tied": base, "tied again": base, "part of tied": base[10:20]}
    addresses = {name: tensor.data_ptr() for name, tensor in others.items()}
    assert worker.restore(taken.index, others) == b'{"lr":1}' == worker.extras(taken.index)
    assert_same(others, tensors)
    assert {name: tensor.data_ptr() for name, tensor in others.items()} == addresses
    assert isinstance(others["parameter"], torch.nn.Parameter)


def test_fresh_tensors_are_their_own(nodes: list[Node]) -> None:
    tensors = zoo()
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    copies = worker.copies(0, [name for name in tensors if name != "odd"])
    made = copies.take(worker.view(0), list(tensors))
    assert_same(made, tensors)
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in made.items()} == {entry.name: entry.nbytes for entry in node.layout.tensors}
    os.pwrite(node.fds[0], bytes(node.layout.size), 0)
    assert_same(made, tensors)
    with pytest.raises(ValueError, match="handed out already: odd, tied"):
        copies.take(worker.view(0), ["tied", "odd"])
    copies.close()
    worker.close()
    made["odd"].add_(1)
    made["transposed"].zero_()
    assert_same(made, {name: tensor for name, tensor in tensors.items() if name not in {"odd", "transposed"}})


def test_a_view_shows_the_buffer_itself_and_outlives_the_worker(nodes: list[Node]) -> None:
    tensors = {"a": torch.arange(2000.0), "empty": torch.empty(0, 3)}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    view = worker.view(0)
    assert_same(view, tensors)
    worker.close()
    worker.close()
    os.pwrite(node.fds[0], bytes(8000), 0)
    assert not view["a"].any()


def test_what_changes_later_is_not_in_the_snapshot_and_the_next_has_it(nodes: list[Node]) -> None:
    tensors = {"a": torch.zeros(3000), "b": torch.nn.Parameter(torch.zeros(3))}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    for step in range(1, 8):
        with torch.no_grad():
            tensors["a"].fill_(step)
            tensors["b"].data = torch.full((3,), float(step))  # other memory behind the same tensor
        taken = worker.take(1, step, b"x" * step)
        assert taken is not None
        assert (taken.complete, taken.bytes) == (True, 12012)
    newest, before, oldest = node.board.valid()
    assert [held.step for held in (newest, before, oldest)] == [7, 6, 5]
    for held in (newest, before, oldest):
        assert_same(node.tensors(held.index), {"a": torch.full((3000,), float(held.step)), "b": torch.full((3,), float(held.step))})
        assert worker.extras(held.index) == b"x" * held.step


def test_tensors_that_took_the_place_of_others_are_bound_anew(nodes: list[Node]) -> None:
    tensors = {"a": torch.zeros(300)}
    node = node_of(nodes, tensors)
    worker = node.worker({})
    with pytest.raises(StateError, match="no tensors"):
        worker.take(1, 1, b"")
    node.board.tidy()
    worker.bind({"a": torch.ones(300)})
    worker.take(1, 2, b"")
    assert_same(node.tensors(0), {"a": torch.ones(300)})
    with pytest.raises(StateError, match=r"a has the shape \[300\], not \[301\]"):
        worker.bind({"a": torch.ones(301)})


def test_a_tensor_that_changed_its_shape_is_named_and_the_old_state_stays(nodes: list[Node]) -> None:
    tensors = {"a": torch.zeros(300), "b": torch.nn.Parameter(torch.zeros(3))}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    tensors["b"].data = torch.zeros(4)
    with pytest.raises(StateError, match=r"b is torch.float32 of the shape \[4\] now"):
        worker.take(1, 2, b"")
    assert [held.step for held in node.board.valid()] == [1]


def test_a_state_that_does_not_fit_changes_nothing(nodes: list[Node]) -> None:
    tensors = {"a": torch.ones(300), "b": torch.ones(4)}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    zeros = {"a": torch.zeros(300), "b": torch.zeros(5)}
    with pytest.raises(StateError, match=r"b has the shape \[4\], not \[5\]"):
        worker.restore(0, zeros)
    with pytest.raises(StateError, match="b is there, which nobody registered"):
        worker.restore(0, {"a": zeros["a"]})
    with pytest.raises(StateError, match="c is missing"):
        worker.restore(0, {**tensors, "c": torch.zeros(1)})
    with pytest.raises(StateError, match="a is F32, not F64"):
        worker.restore(0, {**tensors, "a": torch.zeros(300, dtype=torch.float64)})
    assert not zeros["a"].any()
    worker.restore(0, {"a": zeros["a"]}, partial=True)
    assert zeros["a"].all()
    with pytest.raises(StateError, match="c is missing"):
        worker.restore(0, {"c": torch.zeros(1)}, partial=True)


def test_only_a_whole_state_is_restored(nodes: list[Node]) -> None:
    tensors = {"a": torch.ones(300)}
    node = node_of(nodes, tensors, local_world=2)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    for index in (0, 1, 3, -1):
        with pytest.raises(StateError, match="no whole state"):
            worker.restore(index, tensors)
        with pytest.raises(StateError, match="no whole state"):
            worker.copies(index)
        with pytest.raises(StateError, match="no whole state"):
            worker.view(index)


@pytest.mark.parametrize("part", ["weight", "mask"])
def test_a_backward_through_what_was_restored_over_says_so(part: str, nodes: list[Node]) -> None:
    """Also where the copy is one that autograd does not see."""
    tensors = {"weight": torch.nn.Parameter(torch.ones(300)), "mask": torch.ones(300, dtype=torch.bool)}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    loss = torch.where(tensors["mask"], tensors["weight"] * tensors["weight"], 0).sum()
    worker.restore(0, {part: tensors[part]}, partial=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_that_is_held_already_is_not_copied_again_and_one_rank_tells(nodes: list[Node]) -> None:
    """What was restored is the new generation's (PROTOCOL 21): asked to stop before its first step, a world has its snapshot already."""
    tensors = {"a": torch.ones(300)}
    node = node_of(nodes, tensors, local_world=2)
    workers = [node.worker(tensors, rank) for rank in (0, 1)]
    for worker in workers:
        worker.take(1, 5, b"")
    again = [worker.take(1, 5, b"") for worker in workers]
    assert [(one.index, one.complete, one.bytes) for one in again if one] == [(0, True, 0), (0, False, 0)]


def test_all_skip_while_a_reader_holds_the_only_buffer_that_may_be_written(nodes: list[Node]) -> None:
    tensors = {"a": torch.ones(300)}
    node = node_of(nodes, tensors, buffers=2, local_world=2)
    workers = [node.worker(tensors, rank) for rank in (0, 1)]
    for step in (1, 2):
        for worker in workers:
            worker.take(1, step, b"")
    node.board.pin(0, 1, 1)
    assert workers[0].take(1, 3, b"") is None
    node.board.unpin(0)
    assert workers[1].take(1, 3, b"") is None
    assert [worker.take(1, 4, b"") is not None for worker in workers] == [True, True]
    assert [held.step for held in node.board.valid()] == [4, 2]


def test_two_snapshots_of_ranks_out_of_step_do_not_mix(nodes: list[Node]) -> None:
    slow, quick = ({"a": torch.zeros(50_000)} for _ in range(2))
    node = node_of(nodes, slow, local_world=2)
    first, second = node.worker(quick, 0), node.worker(slow, 1)
    for step in (1, 2):
        quick["a"].fill_(step)
        first.take(1, step, b"")
    for step in (1, 2):
        slow["a"].fill_(step)
        taken = second.take(1, step, b"")
        assert taken is not None
        assert taken.complete
    for held in node.board.valid():
        assert_same(node.tensors(held.index), {"a": torch.full((50_000,), float(held.step))})


def test_extras_that_grew_out_of_their_room_are_refused(nodes: list[Node]) -> None:
    tensors = {"a": torch.ones(300)}
    node = node_of(nodes, tensors)
    worker = node.worker(tensors)
    with pytest.raises(SetupError, match="room"):
        worker.take(1, 1, bytes(node.layout.extras_capacity + 1))
    assert node.board.valid() == []


def test_descriptors_that_are_not_buffers_are_refused_and_nothing_leaks(nodes: list[Node]) -> None:
    tensors = {"a": torch.ones(3000)}
    node = node_of(nodes, tensors)
    before = len(list(Path("/proc/self/fd").iterdir()))
    short = os.memfd_create("short")
    os.truncate(short, node.layout.size - 1)
    for board_fd, fds in (
        (node.board.fd, node.fds[:2]),
        (node.board.fd, [*node.fds[:2], short]),
        (node.board.fd, [*node.fds[:2], 999_999]),
        (node.fds[0], node.fds),
    ):
        with pytest.raises(ChannelError):
            Snapshots(node.layout, tensors, board_fd, fds, local_rank=0, local_world=1)
    os.close(short)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_mapping_all_pages_early_changes_none(nodes: list[Node]) -> None:
    tensors = {"a": torch.arange(3_000_000)}
    node = node_of(nodes, tensors)
    node.worker(tensors).take(1, 1, b"")
    again = node.worker(tensors)
    again._toucher.join()
    assert_same(again.view(0), tensors)
    assert os.fstat(node.fds[2]).st_blocks * 512 >= node.layout.size, "the pages are there before they are needed"


def test_no_thread_is_left_behind(nodes: list[Node]) -> None:
    import threading

    tensors = {"a": torch.arange(3_000_000)}
    node = node_of(nodes, tensors)
    before = threading.active_count()
    worker = node.worker(tensors)
    worker.take(1, 1, b"")
    worker.close()
    assert threading.active_count() == before


@given(
    st.lists(st.tuples(st.sampled_from(["F32", "U8", "BF16"]), st.lists(st.integers(0, 60), max_size=3)), max_size=8),
    st.integers(1, 9) | st.just(MAX_LOCAL),
)
@settings(max_examples=100, deadline=None)
def test_the_shares_of_all_local_ranks_cover_every_byte_once(tensors: list[tuple[str, list[int]]], local_world: int) -> None:
    layout = Layout.build([(f"{index}", dtype, shape) for index, (dtype, shape) in enumerate(tensors)], extras=0)
    pieces = [piece for rank in range(local_world) for piece in share(layout, rank, local_world)]
    end = 0
    for piece in pieces:
        assert piece.offset == end
        assert piece.nbytes > 0
        assert piece.nbytes % ITEMSIZE[piece.entry.dtype] == 0
        end += piece.nbytes
    assert end == layout.extras.offset


def test_shares_are_equal_by_bytes() -> None:
    layout = Layout.build([("a", "F32", (1, 1_000_000)), ("b", "F32", (3000, 1000)), ("c", "F32", ())], extras=0)
    sizes = [sum(piece.nbytes for piece in share(layout, rank, 4)) for rank in range(4)]
    assert max(sizes) - min(sizes) < 10_000


@pytest.mark.parametrize("tensor", [torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.complex128)])
def test_what_cannot_be_kept_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(SetupError, match="weight"):
        layout_of({"weight": tensor}, extras=0)


def test_the_hash_sees_every_bit_and_its_place() -> None:
    tensors = zoo()
    known = state_hash(tensors)
    assert state_hash(dict(reversed(tensors.items()))) == known == state_hash({name: tensor.clone() for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.is_contiguous() and not tensor.is_neg():
            other = tensor.detach().clone()
            other.reshape(-1).view(torch.uint8)[-1] ^= 1
            assert state_hash({**tensors, name: other}) != known, name
    assert state_hash({"a": torch.arange(10)}) != state_hash({"a": torch.arange(9, -1, -1)})
    assert state_hash({"a": torch.zeros(4)}) != state_hash({"a": torch.zeros(2, 2)})
    assert state_hash({"a": torch.zeros(4)}) != state_hash({"a": torch.zeros(4, dtype=torch.int32)})
    assert state_hash({"a": torch.zeros(4)}) != state_hash({"b": torch.zeros(4)})
    assert state_hash({"a": torch.zeros(1)}) != state_hash({"a": -torch.zeros(1)})


def test_the_hash_for_devices_sees_every_bit_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is torch alone, so it can be tried on the CPU."""
    data = torch.randint(256, (100_003,), dtype=torch.uint8)
    known = int(words_hash(data))
    monkeypatch.setattr("trainer.hashing._CHUNK", 1000)
    assert int(words_hash(data)) == known, "whatever is hashed at a time"
    assert int(words_hash(torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:])) == known, "whatever its address"
    for at in (0, 7, 8, 50_000, 99_999, 100_002):
        other = data.clone()
        other[at] ^= 128
        assert int(words_hash(other)) != known
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert int(words_hash(swapped)) != known
    assert int(words_hash(torch.zeros(8))) != int(words_hash(torch.zeros(9)))
    assert int(words_hash(torch.zeros(0))) == 0


NURSERY = r"""
import multiprocessing, os, sys
import torch
from trainer.snapshot import Snapshots, layout_of
torch.set_num_threads(1)
board_fd, *fds = map(int, sys.argv[2:])
local_world = int(sys.argv[1])
tensors = {"a": torch.zeros(600_000), "b": torch.zeros(700, 900).t(), "c": torch.zeros(())}
layout = layout_of(tensors, extras=100)
def run(local_rank, first, step_done):
    snapshots = Snapshots(layout, tensors, board_fd, fds, local_rank=local_rank, local_world=local_world)
    os.write(1, b"ready %d\n" % os.getpid())  # print may cut a line in two, and two ranks share the pipe
    for step in range(first, first + 1_000_000):
        step_done.wait()  # as the gradients' all-reduce keeps ranks in step
        for tensor in tensors.values():
            tensor.fill_(step)
        if local_rank == 0:
            os.write(1, b"takes\n")
        snapshots.take(1, step, b"%d" % step)
for line in sys.stdin:
    first = int(line)
    children = []
    step_done = multiprocessing.Barrier(local_world)
    for local_rank in range(local_world):
        child = os.fork()
        if not child:
            run(local_rank, first, step_done)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.write(1, b"gone\n")
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("local_world", [1, 2])
def test_a_kill_at_any_instant_leaves_only_whole_states(local_world: int, nodes: list[Node]) -> None:
    """A worker that copies all the time is killed 50 times. What is VALID afterwards is the very state of its step, and none is lost."""
    tensors = {"a": torch.zeros(600_000), "b": torch.zeros(700, 900).t(), "c": torch.zeros(())}
    node = Node(layout_of(tensors, extras=100), local_world=local_world)
    nodes.append(node)
    rng = random.Random(4)
    halves, before = 0, 0
    fds = [node.board.fd, *node.fds]
    command = [sys.executable, "-c", NURSERY, str(local_world), *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as nursery:
        try:
            assert nursery.stdin is not None
            assert nursery.stdout is not None
            for _ in range(50):
                nursery.stdin.write(f"{before + 1}\n")
                nursery.stdin.flush()
                ready = [nursery.stdout.readline().split() for _ in range(local_world)]
                assert {one[0] for one in ready} == {"ready"}
                for _ in range(rng.randint(1, 3)):
                    assert nursery.stdout.readline() == "takes\n"
                time.sleep(rng.random() * 0.003)  # the instant; a copy takes about 1 ms
                for pid in rng.sample([int(one[1]) for one in ready], local_world):
                    os.kill(pid, signal.SIGKILL)
                while (line := nursery.stdout.readline()) == "takes\n":
                    pass
                assert line == "gone\n"
                halves += 1 in (node.board._page[node.board._at(index)] for index in range(3))
                node.board.tidy()
                valid = node.board.valid()
                assert not before or valid[0].step >= before, "the newest whole state was lost"
                for held in valid:
                    assert_same(node.tensors(held.index), {name: torch.full_like(tensor, held.step) for name, tensor in tensors.items()})
                    assert node.layout.get_extras(memoryview(node.image(held.index))) == b"%d" % held.step
                before = valid[0].step if valid else 0
        finally:
            nursery.kill()
    assert min(before, halves) >= 5, f"{before} snapshots, {halves} kills met one: the test shows nothing"


RANK = """
import sys
import torch
from trainer.snapshot import Snapshots, layout_of
torch.set_num_threads(1)
board_fd, *fds = map(int, sys.argv[2:])
torch.manual_seed(3)
tensors = {"a": torch.randn(3000, 1000), "b": torch.randn(5, 7).t(), "c": torch.randn(99_999), "d": torch.randn(())}
snapshots = Snapshots(layout_of(tensors, extras=100), tensors, board_fd, fds, local_rank=int(sys.argv[1]), local_world=2)
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 21):
    for tensor in tensors.values():
        tensor.add_(1)
    taken = snapshots.take(1, step, b"%d" % step)
    print(None if taken is None else taken.complete, flush=True)
    sys.stdin.readline()
"""


def test_two_processes_writing_at_the_same_time_make_one_image(nodes: list[Node]) -> None:
    torch.manual_seed(3)
    tensors = {"a": torch.randn(3000, 1000), "b": torch.randn(5, 7).t(), "c": torch.randn(99_999), "d": torch.randn(())}
    node = Node(layout_of(tensors, extras=100), local_world=2)
    nodes.append(node)
    fds = [node.board.fd, *node.fds]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *map(str, fds)], pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for step in range(1, 21):
            told = set()
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("go\n")
                rank.stdin.flush()
            for rank in ranks:
                assert rank.stdout is not None
                told.add(rank.stdout.readline())
            assert told == {"True\n", "False\n"}
            for tensor in tensors.values():
                tensor.add_(1)
            newest = node.board.valid()[0]
            assert newest.step == step
            assert_same(node.tensors(newest.index), tensors)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
