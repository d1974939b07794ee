"""Following files that others write."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent.rotation import predecessor, rotate
from elasticd.cli.follow import LONGEST_LINE, AgentEvent, AgentLogs, Tail, WorkerOutput, last_lines, parse_event


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_line_is_handed_out_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.lines() == []
    append(tail.path, "one\ntw")
    assert tail.lines() == [b"one"]
    assert tail.lines() == []
    append(tail.path, "o\n\nthree")
    assert tail.lines() == [b"two", b""]
    assert tail.rest() == [b"three"]
    assert tail._fd == -1


def test_what_was_there_before_is_skipped_if_asked(tmp_path: Path) -> None:
    append(tmp_path / "log", "old\n")
    tail = Tail(tmp_path / "log", from_end=True)
    append(tail.path, "new\n")
    assert tail.lines() == [b"new"]


def test_a_file_that_comes_after_its_follower_is_read_from_its_start(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log", from_end=True)
    append(tail.path, "new\n")
    assert tail.lines() == [b"new"]


def test_a_file_that_is_cut_short_is_read_anew(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    append(tail.path, "a long line\nhalf")
    tail.lines()
    tail.path.write_text("x\n")
    assert tail.lines() == [b"x"]


def test_a_file_that_is_replaced_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    append(tail.path, "one\n")
    tail.lines()
    append(tail.path, "two\nlast words")
    tail.path.rename(tmp_path / "log.1")
    append(tail.path, "three\n")
    assert tail.lines() == [b"two", b"last words", b"three"]


def test_a_line_without_end_is_handed_out_in_pieces(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    append(tail.path, "x" * (2 * LONGEST_LINE + 5))
    assert [len(line) for line in tail.lines()] == [LONGEST_LINE, LONGEST_LINE]
    assert tail.rest() == [b"xxxxx"]


def test_a_flood_is_taken_in_portions_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    append(tmp_path / "log", "".join(f"{number:09d}\n" for number in range(1_000_000)))
    tail = Tail(tmp_path / "log")
    first = tail.lines()
    assert 100_000 < len(first) < 900_000
    assert first + tail.rest() == [b"%09d" % number for number in range(1_000_000)]


def test_a_pipe_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    assert Tail(tmp_path / "log").lines() == []


def test_an_event_is_read_and_what_is_none_is_not() -> None:
    event = parse_event("node-0", b'{"event": "workers_started", "level": "info", "time": "2026-11-30T14:00:00.5Z", "ranks": [0, 1], "at": 1.5, "n": true}')
    assert event is not None
    assert (event.name, event.level, event.at) == ("workers_started", "info", 1796047200.5)
    assert (event.numbers("ranks"), event.seconds("at"), event.number("at"), event.number("n"), event.text("none")) == ((0, 1), 1.5, None, None, "")
    for junk in (b"", b"{", b'{"event": 3}', b"[]", b"null", b"\xff", b"[" * 100_000):
        assert parse_event("node-0", junk) is None
    odd = parse_event("node-0", b'{"event": "x", "time": "yesterday", "ranks": "0"}')
    assert odd is not None
    assert (odd.at, odd.numbers("ranks")) == (None, ())


def line_of(name: str, second: int, **fields: Any) -> str:
    return json.dumps({"event": name, "time": f"2026-11-30T14:00:{second:02d}Z", **fields}) + "\n"


def test_events_of_several_agents_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    append(tmp_path / "a" / "agent.jsonl", line_of("old", 0))
    logs = AgentLogs(tmp_path, ["a", "b"])
    append(tmp_path / "a" / "agent.jsonl", line_of("first", 1) + line_of("third", 3) + "garbage\n")
    append(tmp_path / "b" / "agent.jsonl", line_of("second", 2))
    assert [(event.node, event.name) for event in logs.events()] == [("a", "first"), ("b", "second"), ("a", "third")]
    assert logs.events() == []
    logs.close()


def started(folder: Path, *ranks: int, node: str = "node-0") -> AgentEvent:
    return AgentEvent(node=node, name="workers_started", fields={"ranks": list(ranks), "logs": str(folder)})


def test_output_is_followed_from_one_generation_to_the_next(tmp_path: Path) -> None:
    output = WorkerOutput(all_ranks=False)
    first, second = tmp_path / "generation-000001", tmp_path / "generation-000002"
    output.started(started(first, 0, 1))
    append(first / "rank-0" / "stdout.log", "one\n")
    append(first / "rank-1" / "stdout.log", "not shown\n")
    append(first / "rank-0" / "stderr.log", "careful\n")
    assert [(line.stream, line.data) for line in output.lines()] == [("stdout", b"one"), ("stderr", b"careful")]
    append(first / "rank-0" / "stdout.log", "last words")
    output.started(started(second, 0, 1))
    append(second / "rank-0" / "stdout.log", "two\nend")
    assert [line.data for line in output.lines()] == [b"last words", b"two"]
    assert [line.data for line in output.rest()] == [b"end"]
    assert output.rest() == []


def test_rank_0_is_followed_to_another_node(tmp_path: Path) -> None:
    output = WorkerOutput(all_ranks=False)
    output.started(started(tmp_path / "a1", 0, node="a"))
    output.started(started(tmp_path / "b1", 1, node="b"))
    output.started(started(tmp_path / "b2", 0, node="b"))
    append(tmp_path / "b2" / "rank-0" / "stdout.log", "here now\n")
    assert [(line.node, line.rank, line.data) for line in output.lines()] == [("b", 0, b"here now")]


def test_all_ranks_are_followed_if_asked(tmp_path: Path) -> None:
    output = WorkerOutput(all_ranks=True)
    output.started(started(tmp_path, 2, 3))
    append(tmp_path / "rank-3" / "stdout.log", "three\n")
    assert [(line.rank, line.data) for line in output.lines()] == [(3, b"three")]


def test_last_lines_are_few_and_harmless(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"x\n" * 100_000 + b"a\x1b[2Jb\n\n\xff end\n")
    assert last_lines(path, 2) == ["a?[2Jb", "� end"]
    assert last_lines(tmp_path / "none", 2) == []


# --- output whose older lines are taken out


@pytest.fixture(params=["/var/tmp", "/dev/shm"], ids=["disk", "memory"])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    """A worker's file on a file system that can take a range out of it, mostly, and on one that cannot."""
    folder = Path(tempfile.mkdtemp(prefix="elasticd-follow-", dir=request.param))
    path = folder / "generation-000001" / "rank-0" / "stdout.log"
    path.parent.mkdir(parents=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield path, fd
    os.close(fd)
    shutil.rmtree(folder)


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%09d" % number for number in range(first, first + count)]


@pytest.mark.parametrize("read_before", [True, False])
def test_no_line_is_missed_or_told_twice_when_older_ones_are_taken_out(worker: tuple[Path, int], *, read_before: bool) -> None:
    path, fd = worker
    tail = Tail(path, predecessor=predecessor(path))
    seen: list[bytes] = []
    for number in range(5):
        os.write(fd, b"\n".join(numbered(number * 3000, 3000)) + b"\n")
        if read_before:
            seen += tail.lines()
        rotate(fd, path, most=1 << 20, files=1)
        os.write(fd, b"half a ")
        seen += tail.lines()
        os.write(fd, b"line\n")
    seen += tail.rest()
    assert [line for line in seen if line != b"half a line"] == numbered(0, 15_000)
    assert seen.count(b"half a line") == 5


def test_a_reader_waits_a_moment_for_lines_that_were_just_taken_out(worker: tuple[Path, int]) -> None:
    """The file is short already, and its predecessor is not there yet."""
    path, fd = worker
    tail = Tail(path, predecessor=predecessor(path))
    os.write(fd, b"one\ntwo\n")
    assert tail.lines() == [b"one", b"two"]
    os.write(fd, b"three\n")
    os.ftruncate(fd, 0)
    assert tail.lines() == []
    predecessor(path).write_bytes(b"one\ntwo\nthree\n")
    os.write(fd, b"four\n")
    assert tail.lines() == [b"three", b"four"]


def test_a_file_that_is_cut_without_a_predecessor_is_read_anew_after_a_while(worker: tuple[Path, int]) -> None:
    path, fd = worker
    tail = Tail(path, predecessor=predecessor(path))
    os.write(fd, b"a long first line\n")
    tail.lines()
    os.ftruncate(fd, 0)
    os.write(fd, b"new\n")
    seen = [line for _ in range(50) for line in tail.lines()]
    assert seen == [b"new"]
