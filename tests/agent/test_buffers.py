"""A node's states in memory: found again by content, never torn, never in anybody's way."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from elasticd.agent import buffers as buffers_module
from elasticd.agent.buffers import Buffers
from elasticd.agent.memory import UNKNOWN, Available, available
from trainer.checkpoint import CHUNK, digest_image
from trainer.errors import StateError
from trainer.wire.board import Board
from trainer.wire.layout import Layout

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
SMALL = Layout.build([("a", "F32", (5000,))], extras=100)
OTHER = Layout.build([("a", "F32", (6000,))], extras=100)
LARGE = Layout.build([("a", "U8", (CHUNK * 2 + 12345,))], extras=100)  # three chunks


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    made = Buffers()
    yield made
    made.close()


def worker_writes(buffers: Buffers, generation: int, step: int, content: bytes, local_world: int = 1) -> int:
    """A snapshot, as workers take it: through descriptors alone."""
    board_fd, *fds = buffers.fds()
    board = Board.attach(board_fd)
    index = board.begin(generation, step)
    assert index is not None
    os.pwrite(fds[index], content, 0)
    for local_rank in range(local_world):
        board.finish(index, generation, step, local_rank)
    board.close()
    return index


def filled(content: bytes) -> Callable[[memoryview], None]:
    def fill(image: memoryview) -> None:
        image[: len(content)] = content

    return fill


def digest_of(layout: Layout, content: bytes) -> str:
    return digest_image(layout.header, memoryview(content.ljust(layout.size, b"\0")))[0]


def test_three_buffers_in_memory_where_they_fit(buffers: Buffers) -> None:
    assert buffers.fds() == buffers.inventory() == ()
    assert buffers.board is None
    with capture_logs() as logs:
        assert buffers.open(SMALL, local_world=1) == 3
    assert logs == []
    assert (buffers.where, buffers.why, len(buffers.fds()), buffers.layout) == ("memory", "", 4, SMALL)


def test_two_where_three_do_not_fit_and_it_is_said(buffers: Buffers) -> None:
    with capture_logs() as logs:
        assert buffers.open(LARGE, local_world=1, budget_bytes=3 * LARGE.size - 1) == 2
    assert buffers.where == "memory"
    assert buffers.why == "3 of 32 MiB do not fit into 96 MiB (as configured)"
    assert [(line["log_level"], line["why"]) for line in logs] == [("warning", buffers.why)]


def test_two_files_without_a_name_where_memory_does_not_suffice(buffers: Buffers, tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert buffers.open(LARGE, local_world=1, budget_bytes=2 * LARGE.size - 1, disk=tmp_path / "new") == 2
    assert buffers.where == "disk"
    assert [line["directory"] for line in logs] == [str(tmp_path / "new")]
    assert list((tmp_path / "new").iterdir()) == []
    for fd in buffers.fds()[1:]:
        assert os.fstat(fd).st_blocks * 512 >= LARGE.size, "a later access would end in SIGBUS when the disk is full"
    worker_writes(buffers, 1, 1, b"hello")
    assert buffers.inventory() == ((1, 1, digest_of(LARGE, b"hello")),)


def test_none_with_a_reason_where_nothing_suffices(buffers: Buffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_files()
    with capture_logs() as logs:
        assert buffers.open(SMALL, local_world=1, budget_bytes=1, disk=tmp_path) == 0
        assert buffers.open(SMALL, local_world=1, budget_bytes=1) == 0
    assert [line["log_level"] for line in logs] == ["warning", "warning"]
    assert logs[0]["why"].endswith(f"{tmp_path}: No space left on device")
    assert logs[1]["why"].endswith("and there is no checkpoint directory")
    assert (buffers.where, buffers.fds(), buffers.inventory(), buffers.index_of(1, 1)) == ("", (), (), -1)
    buffers.tidy()
    buffers.discard_all()
    assert not buffers.retag("x", 1)
    with pytest.raises(StateError, match="there is no checkpoint directory"):
        buffers.place(SMALL, 1, 1, filled(b""))
    assert open_files() == before


def test_a_kernel_that_has_no_memory_is_no_error(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict overcommit it says so when the size is set."""
    real, calls = os.truncate, []

    def truncate(fd: int, size: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        real(fd, size)

    monkeypatch.setattr(os, "truncate", truncate)
    before = open_files()
    assert buffers.open(SMALL, local_world=1) == 2
    assert buffers.why.startswith("no memory for 3")
    buffers.close()
    assert open_files() == before


def test_the_default_budget_is_a_share_of_what_is_available(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "available", lambda: Available(nbytes=5 * LARGE.size, bound="the memory limit of /x"))
    assert buffers.open(LARGE, local_world=1) == 3
    buffers.close()
    assert buffers.open(LARGE, local_world=1, percent=59) == 2
    assert "59 % of what the memory limit of /x leaves" in buffers.why


def test_buffers_are_sealed_and_their_pages_are_there_soon(buffers: Buffers) -> None:
    buffers.open(LARGE, local_world=1)
    store = buffers._store
    assert store is not None
    store._toucher.join()
    for fd in buffers.fds()[1:]:
        assert os.fstat(fd).st_blocks * 512 >= LARGE.size
        for size in (0, 2 * LARGE.size):
            with pytest.raises(PermissionError):
                os.truncate(fd, size)


def test_the_same_layout_keeps_what_is_there_another_replaces_it(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    fds = buffers.fds()
    worker_writes(buffers, 1, 5, b"five")
    buffers.open(Layout.parse(SMALL.header_text), local_world=1, budget_bytes=1)
    assert buffers.fds() == fds
    buffers.open(SMALL, local_world=2)
    assert buffers.inventory() == ((1, 5, digest_of(SMALL, b"five")),)
    worker_writes(buffers, 2, 6, b"six", local_world=2)
    assert [held.step for held in buffers.held()] == [6, 5]
    buffers.open(OTHER, local_world=1)
    assert buffers.inventory() == ()
    assert buffers.layout == OTHER


def test_opening_again_does_not_disturb_a_snapshot_under_way(buffers: Buffers) -> None:
    """Each local rank describes its state; the first may be writing when the second does."""
    buffers.open(SMALL, local_world=2)
    assert buffers.board is not None
    assert buffers.board.begin(1, 1) == 0
    assert not buffers.board.finish(0, 1, 1, 0)
    buffers.open(SMALL, local_world=2)
    assert buffers.board.finish(0, 1, 1, 1)


def test_the_inventory_names_states_by_content_newest_first(buffers: Buffers) -> None:
    buffers.open(LARGE, local_world=1)
    for step in (1, 2, 3, 4):
        worker_writes(buffers, 1, step, b"%d" % step)
    assert buffers.inventory() == tuple((1, step, digest_of(LARGE, b"%d" % step)) for step in (4, 3, 2))


def test_a_state_is_hashed_once(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers.open(SMALL, local_world=1)
    hashed = []
    real = buffers_module._digest
    monkeypatch.setattr(buffers_module, "_digest", lambda header, image: hashed.append(1) or real(header, image))
    worker_writes(buffers, 1, 1, b"1")
    first = buffers.inventory()
    assert buffers.inventory() == first
    assert buffers.holds(first[0][2])
    assert buffers.retag(first[0][2], 2)
    assert buffers.inventory() == ((2, 1, first[0][2]),)
    assert len(hashed) == 1
    worker_writes(buffers, 2, 2, b"2")
    assert not buffers.holds(digest_of(SMALL, b"2")), "nobody asked for its content yet"
    assert [ref[1] for ref in buffers.inventory()] == [2, 1]
    assert len(hashed) == 2


def test_a_writer_cannot_take_a_state_that_is_being_hashed(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers.open(SMALL, local_world=1)
    for step in (1, 2, 3):
        worker_writes(buffers, 1, step, b"%d" % step)
    real, written = buffers_module._digest, []

    def slow(header: bytes, image: memoryview) -> str:
        step = int(bytes(image[:1]))
        written.append((step, worker_writes(buffers, 1, 4 + len(written), b"9")))
        return real(header, image)

    monkeypatch.setattr(buffers_module, "_digest", slow)
    inventory = buffers.inventory()
    assert written[0] == (3, 0), "the state of step 1 had to go"
    assert inventory == ((1, 3, digest_of(SMALL, b"3")), (1, 2, digest_of(SMALL, b"2"))), "and is left out"
    assert [step for step, _ in written] == [3, 2]


def test_a_reader_sees_the_whole_state_read_only_and_nobody_overwrites_it(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"one")
    with buffers.reading(1, 1) as (header, image):
        assert (header, bytes(image)) == (SMALL.header, b"one".ljust(SMALL.size, b"\0"))
        with pytest.raises(TypeError):
            image[0] = 1
        for step in range(2, 9):
            assert worker_writes(buffers, 1, step, b"x") != 0
        assert bytes(image[:3]) == b"one"
    assert worker_writes(buffers, 1, 9, b"x") == 0
    with pytest.raises(StateError, match="step 1 of generation 1 is not held"), buffers.reading(1, 1):
        pass


def test_a_state_is_read_by_its_content(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"one")
    ((_, _, digest),) = buffers.inventory()
    with buffers.reading_digest(digest) as (_, image):
        assert bytes(image[:3]) == b"one"
    with pytest.raises(StateError, match="no state 0123"), buffers.reading_digest("0123"):
        pass


def test_a_reader_keeps_its_memory_when_the_buffers_are_replaced(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"one")
    with buffers.reading(1, 1) as (header, image):
        buffers.open(OTHER, local_world=1)
        worker_writes(buffers, 2, 2, b"two")
        assert (header, bytes(image[:3])) == (SMALL.header, b"one")
    buffers.close()
    gc.collect()
    assert "elasticd-state" not in Path("/proc/self/maps").read_text(), "memory is left behind"


def test_what_comes_from_elsewhere_counts_once_it_is_whole(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=4)

    def fill(image: memoryview) -> None:
        assert len(image) == SMALL.size
        assert not image.readonly
        image[:3] = b"abc"
        assert buffers.held() == []

    assert buffers.place(SMALL, 3, 7, fill) == 0
    assert buffers.index_of(3, 7) == 0
    assert buffers.inventory() == ((3, 7, digest_of(SMALL, b"abc")),)


def test_what_did_not_come_whole_leaves_nothing_and_what_was_there_stays(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"one")

    def fill(image: memoryview) -> None:
        image[:3] = b"abc"
        raise ConnectionError("gone")

    for _ in range(5):
        with pytest.raises(ConnectionError):
            buffers.place(SMALL, 3, 7, fill)
    assert buffers.inventory() == ((1, 1, digest_of(SMALL, b"one")),)
    assert buffers.place(SMALL, 3, 7, filled(b"abc")) == 1


def test_an_older_state_can_be_placed_beside_newer_ones(buffers: Buffers) -> None:
    """The state that all begin with may be a step back (PROTOCOL 22)."""
    buffers.open(SMALL, local_world=1)
    for step in (8, 9, 10):
        worker_writes(buffers, 1, step, b"%d" % step)
    buffers.place(SMALL, 1, 5, filled(b"5"))
    assert [held.step for held in buffers.held()] == [10, 9, 5]
    assert buffers.retag(digest_of(SMALL, b"5"), 2)
    assert buffers.inventory() == ((2, 5, digest_of(SMALL, b"5")),)


def test_a_place_is_not_taken_from_readers(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1, budget_bytes=2 * SMALL.size)
    worker_writes(buffers, 1, 1, b"1")
    worker_writes(buffers, 1, 2, b"2")
    with buffers.reading(1, 1), pytest.raises(StateError, match="being read"):
        buffers.place(SMALL, 2, 3, filled(b""))
    with pytest.raises(StateError, match="another layout"):
        buffers.place(OTHER, 2, 3, filled(b""))


def test_a_digest_that_is_known_is_not_computed(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_digest", lambda header, image: pytest.fail("hashed"))
    buffers.open(SMALL, local_world=1)
    buffers.place(SMALL, 3, 7, filled(b"abc"), digest="d1")
    assert buffers.holds("d1")
    assert buffers.inventory() == ((3, 7, "d1"),)
    assert buffers.retag("d1", 4)
    assert buffers.inventory() == ((4, 7, "d1"),)


def test_another_content_under_the_same_name_in_the_same_place_is_hashed_anew(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    for content in (b"one", b"two"):
        assert buffers.place(SMALL, 3, 7, filled(content)) == 0
        assert buffers.inventory() == ((3, 7, digest_of(SMALL, content)),)
        assert buffers.board is not None
        buffers.board.discard(0)


def test_retag_keeps_one_state_and_throws_the_others_away(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    for step in (1, 2, 3):
        worker_writes(buffers, 1, step, b"%d" % step)
    assert not buffers.retag("0123", 2)
    assert len(buffers.inventory()) == 3
    with buffers.reading(1, 3) as (_, image):
        assert buffers.retag(digest_of(SMALL, b"2"), 2)
        assert buffers.inventory() == ((2, 2, digest_of(SMALL, b"2")),)
        written = {worker_writes(buffers, 2, step, b"x") for step in range(3, 8)}
        assert bytes(image[:1]) == b"3", "a reader of what was thrown away is not disturbed"
        assert written == {0, 1}


def test_what_was_half_written_is_void_after_the_workers(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=2)
    worker_writes(buffers, 1, 1, b"1", local_world=2)
    assert buffers.board is not None
    buffers.board.begin(1, 2)
    buffers.board.finish(1, 1, 2, 0)
    buffers.tidy()
    assert [ref[:2] for ref in buffers.inventory()] == [(1, 1)]
    assert not buffers.board.finish(1, 1, 2, 1)
    buffers.discard_all()
    assert buffers.inventory() == ()


def test_the_digest_is_that_of_a_checkpoint_file(buffers: Buffers) -> None:
    buffers.open(LARGE, local_world=1)
    content = os.urandom(LARGE.size)
    worker_writes(buffers, 1, 1, content)
    assert buffers.inventory() == ((1, 1, digest_image(LARGE.header, memoryview(content))[0]),)


def test_garbage_on_the_control_page_does_not_hurt_the_agent(buffers: Buffers) -> None:
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"1")
    page = mmap.mmap(buffers.fds()[0], 8192)
    for _ in range(200):
        page[:] = os.urandom(8192)
        for index in range(3):
            page[256 + 32 * index] = os.urandom(1)[0] % 4
        inventory = buffers.inventory()
        for generation, step, _ in inventory:
            with buffers.reading(generation, step) as (_, image):
                assert len(image) == SMALL.size
        if inventory:
            assert buffers.retag(inventory[-1][2], 7)
        buffers.tidy()
    buffers.discard_all()
    worker_writes(buffers, 9, 1, b"sound again")
    assert buffers.inventory() == ((9, 1, digest_of(SMALL, b"sound again")),)


def test_a_page_that_nobody_lets_go_of_is_said_and_survived(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.wire.board.LOCK_SECONDS", 0.1)
    buffers.open(SMALL, local_world=1)
    worker_writes(buffers, 1, 1, b"1")
    code = "import fcntl, sys\nfcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)\nprint(flush=True)\nsys.stdin.read()"
    fd = buffers.fds()[0]
    with subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with capture_logs() as logs:
            assert buffers.inventory() == ()
        assert "held the control page" in logs[0]["error"]
    assert len(buffers.inventory()) == 1


WORKER = """
import os, sys
from trainer.wire.board import Board
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
board_fd, *fds = map(int, sys.argv[1:])
board = Board.attach(board_fd)
index = board.begin(1, 1)
import mmap
with mmap.mmap(fds[index], 0) as image:
    image[:5] = b"hello"
assert board.finish(index, 1, 1, 0)
"""


def test_a_worker_needs_nothing_but_the_descriptors(buffers: Buffers) -> None:
    """As root the test makes it somebody else, who could open nothing of ours."""
    buffers.open(SMALL, local_world=1)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import mmap; import trainer.wire.board\n" + WORKER
    subprocess.run([sys.executable, "-c", code, str(ROOT), *map(str, buffers.fds())], pass_fds=buffers.fds(), check=True)
    assert buffers.inventory() == ((1, 1, digest_of(SMALL, b"hello")),)


def test_readers_writers_and_askers_at_the_same_time(buffers: Buffers) -> None:
    """Every state that is handed out is the one of its step, whole."""
    buffers.open(LARGE, local_world=1)
    done = threading.Event()
    digests = {step: digest_of(LARGE, bytes([step]) * LARGE.size) for step in range(1, 9)}

    def write() -> None:
        for step in range(1, 200):
            board = buffers.board
            assert board is not None
            index = board.begin(1, step)
            if index is not None:
                os.pwrite(buffers.fds()[1 + index], bytes([step % 8 + 1]) * LARGE.size, 0)
                assert board.finish(index, 1, step, 0)
            if done.is_set():
                return

    def read() -> int:
        count = 0
        while count < 6:
            for held in buffers.held():
                try:
                    with buffers.reading(held.generation, held.step) as (_, image):
                        assert bytes(image) == bytes([held.step % 8 + 1]) * LARGE.size
                        count += 1
                except StateError:
                    continue
        return count

    with ThreadPoolExecutor(3) as pool:
        writer = pool.submit(write)
        reader = pool.submit(read)
        for _ in range(3):
            for _, step, digest in buffers.inventory():
                assert digest == digests[step % 8 + 1]
        assert reader.result() >= 6
        done.set()
        writer.result()


def test_nothing_is_left_behind(buffers: Buffers) -> None:
    before, threads = open_files(), threading.active_count()
    for layout in (SMALL, LARGE, SMALL):
        buffers.open(layout, local_world=1)
        worker_writes(buffers, 1, 1, b"1")
        buffers.inventory()
    buffers.close()
    buffers.close()
    gc.collect()
    assert open_files() == before
    assert threading.active_count() == threads
    assert "elasticd-state" not in Path("/proc/self/maps").read_text()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def machine(root: Path, files: dict[str, Any]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(str(content))
    return root


MEMINFO = "MemTotal: 100 kB\nMemAvailable:   1000 kB\n"
V2 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/job/worker\n",
    "proc/self/mountinfo": "31 23 0:28 / /cg rw,relatime shared:4 - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "5:cpu:/\n4:memory,x:/docker/abc\n0::/\n",
    "proc/self/mountinfo": "35 31 0:32 /docker/abc /cg/memory rw - cgroup cgroup rw,memory,x\n36 31 0:33 / /cg/unified rw - cgroup2 cgroup2 rw\n",
}


@pytest.mark.parametrize(
    ("files", "nbytes"),
    [
        ({}, UNKNOWN),
        ({"proc/meminfo": MEMINFO}, 1_024_000),
        (V2, 1_024_000),
        (V2 | {"cg/job/worker/memory.max": "max\n", "cg/job/worker/memory.current": "5\n"}, 1_024_000),
        (V2 | {"cg/job/worker/memory.max": 900, "cg/job/worker/memory.current": 300}, 600),
        (V2 | {"cg/job/memory.max": 900, "cg/job/memory.current": 300, "cg/job/memory.stat": "anon 3\ninactive_file 200\n"}, 800),
        (V2 | {"cg/job/memory.max": 900, "cg/job/memory.current": 2000}, 0),
        (V1, 1_024_000),
        (V1 | {"cg/memory/memory.limit_in_bytes": 900, "cg/memory/memory.usage_in_bytes": 300, "cg/memory/memory.stat": "total_inactive_file 7\n"}, 607),
        (V1 | {"cg/memory/memory.limit_in_bytes": 2**63 - 4096, "cg/memory/memory.usage_in_bytes": 300}, 1_024_000),
    ],
)
def test_the_least_of_machine_and_control_groups_bounds(files: dict[str, Any], nbytes: int, tmp_path: Path) -> None:
    assert available(machine(tmp_path, files)).nbytes == nbytes


def test_this_machine_has_some_memory() -> None:
    assert 0 < available().nbytes < UNKNOWN
