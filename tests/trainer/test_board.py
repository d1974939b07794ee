"""The control page: who may write where, whatever dies or lies."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ChannelError
from trainer.wire import board as board_module
from trainer.wire.board import BOARD_SIZE, MAX_BUFFERS, MAX_LOCAL, Board, Held

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def board() -> Iterator[Board]:
    """Three buffers, one local rank."""
    made = Board.create(3, 1)
    yield made
    made.close()


def take(board: Board, generation: int, step: int, local_world: int = 1) -> int | None:
    """A snapshot by all local ranks."""
    index = board.begin(generation, step)
    for local_rank in range(local_world if index is not None else 0):
        assert board.finish(index or 0, generation, step, local_rank) == (local_rank == local_world - 1)
    return index


def held(board: Board) -> list[tuple[int, int, int]]:
    return [(one.index, one.generation, one.step) for one in board.valid()]


def test_a_state_is_valid_once_the_last_local_rank_has_finished() -> None:
    board = Board.create(3, 3)
    index = board.begin(1, 5)
    assert index == 0
    assert [board.begin(1, 5) for _ in range(3)] == [0, 0, 0]
    assert [board.finish(0, 1, 5, rank) for rank in (2, 0, 0, 2)] == [False] * 4
    assert board.valid() == []
    assert board.finish(0, 1, 5, 1)
    assert board.valid() == [Held(index=0, generation=1, step=5)]
    board.close()


def test_empty_buffers_first_then_the_oldest_never_the_newest(board: Board) -> None:
    assert [take(board, 1, step) for step in (1, 2, 3, 4, 5)] == [0, 1, 2, 0, 1]
    assert held(board) == [(1, 1, 5), (0, 1, 4), (2, 1, 3)]
    board.discard(0)
    assert take(board, 1, 6) == 0


def test_newer_is_a_higher_generation_then_a_higher_step(board: Board) -> None:
    """PROTOCOL 21."""
    assert [take(board, *pair) for pair in ((1, 9), (2, 2), (2, 3))] == [0, 1, 2]
    assert held(board) == [(2, 2, 3), (1, 2, 2), (0, 1, 9)]
    assert take(board, 2, 4) == 0


def test_a_state_that_is_no_news_is_skipped(board: Board) -> None:
    """What is left of an old world must not throw out the new one's states."""
    take(board, 2, 3)
    assert board.begin(2, 3) is None
    assert board.begin(2, 2) is None
    assert board.begin(1, 99, wait=30.0) is None
    assert held(board) == [(0, 2, 3)]


def test_a_pinned_buffer_is_never_chosen(board: Board) -> None:
    for step in (1, 2, 3):
        take(board, 1, step)
    assert board.pin(0, 1, 1)
    assert board.pin(0, 1, 1)
    assert take(board, 1, 4) == 1
    board.unpin(0)
    assert take(board, 1, 5) == 2
    board.unpin(0)
    assert take(board, 1, 6) == 0


def test_a_discarded_state_that_is_still_read_is_not_overwritten(board: Board) -> None:
    take(board, 1, 1)
    assert board.pin(0, 1, 1)
    board.reset(1)
    assert held(board) == []
    assert [board.begin(1, step) for step in (2, 3, 4)] == [1, 2, None]


def test_only_a_state_that_is_there_can_be_pinned(board: Board) -> None:
    take(board, 1, 1)
    board.begin(1, 2)
    assert not board.pin(0, 1, 2)
    assert not board.pin(0, 2, 1)
    assert not board.pin(1, 1, 2), "it is being written"
    assert not board.pin(3, 1, 1)
    assert not board.pin(-1, 1, 1)


def test_with_two_buffers_and_one_pinned_all_local_ranks_skip_alike() -> None:
    board = Board.create(2, 2)
    take(board, 1, 1, 2)
    take(board, 1, 2, 2)
    board.pin(0, 1, 1)
    assert board.begin(1, 3) is None
    board.unpin(0)
    assert board.begin(1, 3) is None, "the first local rank has skipped it"
    assert take(board, 1, 4, 2) == 0
    board.close()


def test_a_skip_is_remembered_beside_later_ones() -> None:
    board = Board.create(1, 2)
    board.begin(1, 1)
    assert [board.begin(1, step) for step in (2, 3, 4)] == [None] * 3
    board.discard(0)
    assert [board.begin(1, step) for step in (4, 2, 3)] == [None] * 3
    assert board.begin(1, 5) == 0
    board.close()


def test_a_worker_waits_for_a_reader_and_all_get_the_same_buffer() -> None:
    board = Board.create(2, 2)
    take(board, 1, 1, 2)
    take(board, 1, 2, 2)
    board.pin(0, 1, 1)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(board.begin, 1, 3, wait=50.0) for _ in range(2)]
        assert not asked[0].done()
        board.unpin(0)
        assert [one.result() for one in asked] == [0, 0]
    board.close()


def test_who_waits_may_still_have_what_was_skipped_when_nobody_would_wait() -> None:
    """The last state of a run is that of a step whose own snapshot may have been skipped."""
    board = Board.create(2, 2)
    take(board, 1, 1, 2)
    take(board, 1, 2, 2)
    board.pin(0, 1, 1)
    assert [board.begin(1, 3) for _ in range(2)] == [None, None]
    board.unpin(0)
    assert [board.begin(1, 3, wait=5.0) for _ in range(2)] == [0, 0]
    assert [board.finish(0, 1, 3, rank) for rank in range(2)] == [False, True]
    board.close()


def test_a_wait_ends_and_then_counts_for_all() -> None:
    board = Board.create(2, 2)
    take(board, 1, 1, 2)
    take(board, 1, 2, 2)
    board.pin(0, 1, 1)
    began = time.monotonic()
    assert board.begin(1, 3, wait=0.05) is None
    assert 0.05 <= time.monotonic() - began < 5.0
    assert board.begin(1, 3, wait=50.0) is None
    board.close()


def test_a_worker_that_dies_while_it_labels_a_buffer_leaves_no_state_there(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a new label on a buffer that still counts would pass old bytes off as a new state."""
    for step in (1, 2, 3):
        take(board, 1, step)

    class Killed:
        size = board_module._PAIR.size
        unpack_from = board_module._PAIR.unpack_from

        @staticmethod
        def pack_into(*_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(board_module, "_PAIR", Killed)
    with pytest.raises(KeyboardInterrupt):
        board.begin(1, 4)
    assert held(board) == [(2, 1, 3), (1, 1, 2)]


def test_two_snapshots_racing_never_share_a_buffer() -> None:
    board = Board.create(3, 2)
    first, second, third, fourth = (board.begin(1, step) for step in (1, 2, 3, 4))
    assert (first, second, third, fourth) == (0, 1, 2, None)
    assert not board.finish(0, 1, 2, 0), "that is the other's"
    assert [board.finish(1, 1, 2, rank) for rank in (0, 1)] == [False, True]
    assert [board.finish(0, 1, 1, rank) for rank in (0, 1)] == [False, True]
    assert held(board) == [(1, 1, 2), (0, 1, 1)]
    board.close()


def test_tidy_makes_half_written_buffers_empty_and_keeps_the_rest() -> None:
    board = Board.create(3, 2)
    take(board, 1, 1, 2)
    board.begin(1, 2)
    board.finish(1, 1, 2, 0)
    board.tidy(1)
    assert held(board) == [(0, 1, 1)]
    assert not board.finish(1, 1, 2, 1), "its writer is gone"
    assert take(board, 2, 2, 1) == 1
    board.close()


def test_a_state_changes_its_generation_and_keeps_its_step(board: Board) -> None:
    take(board, 1, 5)
    board.begin(1, 6)
    assert board.retag(0, 4)
    assert not board.retag(1, 4), "that one is not whole"
    assert not board.retag(7, 4)
    assert held(board) == [(0, 4, 5)]


def test_the_agent_claims_a_buffer_for_an_older_state_too(board: Board) -> None:
    take(board, 3, 9)
    index = board.claim(2, 5)
    assert index == 1
    assert held(board) == [(0, 3, 9)]
    assert not board.seal(1, 2, 6)
    assert board.seal(1, 2, 5)
    assert not board.seal(1, 2, 5)
    assert held(board) == [(0, 3, 9), (1, 2, 5)]


@pytest.mark.parametrize("numbers", [(0, 1), (MAX_BUFFERS + 1, 1), (3, 0), (3, MAX_LOCAL + 1)])
def test_numbers_out_of_bounds_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"buffers|local ranks"):
        Board.create(*numbers)


def test_the_most_local_ranks_there_can_be() -> None:
    board = Board.create(MAX_BUFFERS, MAX_LOCAL)
    assert take(board, 1, 1, MAX_LOCAL) == 0
    assert take(board, 2**63 - 1, 2**63 - 1, MAX_LOCAL) == 1
    assert held(board) == [(1, 2**63 - 1, 2**63 - 1), (0, 1, 1)]
    board.close()


def test_what_is_no_control_page_is_not_attached(tmp_path: Path) -> None:
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(memory, BOARD_SIZE)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(unsealed, Board.create(3, 1)._page[:])
    sealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(sealed, BOARD_SIZE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, board_module._SEALS)
    reading, writing = os.pipe()
    with (tmp_path / "file").open("wb") as file:
        for fd in (memory, unsealed, sealed, reading, file.fileno(), 999_999, -1):
            with pytest.raises(ChannelError, match="no control page"):
                Board.attach(fd)
    for fd in (memory, unsealed, sealed, reading, writing):
        os.close(fd)


def test_the_page_can_neither_shrink_nor_be_sealed_against_writing(board: Board) -> None:
    for act in (
        lambda: os.truncate(board.fd, 0),
        lambda: os.truncate(board.fd, 2 * BOARD_SIZE),
        lambda: fcntl.fcntl(board.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda: fcntl.fcntl(board.fd, fcntl.F_ADD_SEALS, 0x10),  # F_SEAL_FUTURE_WRITE
    ):
        with pytest.raises(PermissionError):
            act()


@given(st.integers())
@settings(max_examples=200, deadline=None)
def test_garbage_on_the_page_hurts_nobody(seed: int) -> None:
    rng = random.Random(seed)
    board = Board.create(3, 2)
    try:
        board._page[:] = rng.randbytes(BOARD_SIZE)
        for place in range(3):  # likely and unlikely values where they matter
            at = board_module._BUFFERS_AT + place * board_module._BUFFER
            board._page[at] = rng.choice([0, 1, 2, 3, 255])
            board._page[at + 8 : at + 24] = rng.choice([bytes(16), b"\xff" * 16, rng.randbytes(16)])
        for one in board.valid():
            assert 0 <= one.index < 3
            assert board.pin(one.index, one.generation, one.step)
            board.unpin(one.index)
            board.retag(one.index, 5)
        assert board.begin(7, 1) in {None, 0, 1, 2}
        assert board.claim(8, 1) in {None, 0, 1, 2}
        board.finish(0, 7, 1, 0)
        board.reset(1)
        assert board.valid() == []
    finally:
        board.close()


def test_after_garbage_a_reset_gives_a_working_page(board: Board) -> None:
    board._page[:] = b"\xff" * BOARD_SIZE
    board.reset(2)
    assert [take(board, 1, step, 2) for step in (1, 2, 3, 4)] == [0, 1, 2, 0]
    Board.attach(board.fd).close()


LOCKER = """
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_stopped_process_that_holds_the_lock_is_not_waited_for_for_ever_and_a_killed_one_not_at_all(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "LOCK_SECONDS", 0.2)
    process = subprocess.Popen([sys.executable, "-c", LOCKER, str(board.fd)], pass_fds=[board.fd], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ChannelError, match="stopped"):
            board.valid()
        process.kill()
        process.wait()
        assert board.valid() == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_threads_of_one_process_keep_each_other_out() -> None:
    """A record lock alone would let them in."""
    board = Board.create(3, 8)
    other = Board.attach(board.fd)
    firsts = threading.Barrier(8)

    def rank(local_rank: int) -> list[tuple[int | None, bool]]:
        seen = []
        mine = board if local_rank % 2 else other
        for step in range(1, 60):
            firsts.wait()
            index = mine.begin(1, step)
            seen.append((index, index is not None and mine.finish(index, 1, step, local_rank)))
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(rank, range(8)))
    for step in zip(*seen, strict=True):
        assert len({index for index, _ in step}) == 1
        assert sum(whole for _, whole in step) == 1
    other.close()
    board.close()


RANK = """
import sys
from trainer.wire.board import Board
board, local_rank = Board.attach(int(sys.argv[1])), int(sys.argv[2])
sys.stdin.readline()
for step in range(1, 300):
    index = board.begin(1, step)
    print(step, index, index is not None and board.finish(index, 1, step, local_rank), flush=True)
"""


def test_processes_agree_on_every_snapshot_whole_or_skipped() -> None:
    """Not in lockstep, so a fast one is snapshots ahead. Nobody may ever see another answer than the others."""
    board = Board.create(3, 3)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(board.fd), str(local_rank)],
            pass_fds=[board.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for local_rank in range(3)
    ]
    try:
        for one in ranks:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        seen = [[line.split() for line in one.communicate()[0].splitlines()] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    whole = {step: index for lines in seen for step, index, done in lines if done == "True"}
    assert whole, "none was ever whole"
    for lines in seen:
        assert len(lines) == 299
        for step, index, _ in lines:
            assert whole.get(step, index) == index
    board.close()


def test_a_fork_while_another_thread_is_in_leaves_the_child_able_to_work(board: Board) -> None:
    assert board_module._within.acquire()
    try:
        child = os.fork()
        if not child:
            try:
                os._exit(0 if board.begin(1, 1) == 0 else 1)
            finally:
                os._exit(2)
    finally:
        board_module._within.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_page_says_so(board: Board) -> None:
    board.close()
    board.close()
    with pytest.raises(ChannelError, match="closed"):
        board.valid()
