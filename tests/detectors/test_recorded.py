"""A directory of logs is read back in the order of time, and followed while it grows, whatever a worker has put into it."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from detectors.observations import Change, Line, Observation, Phase, Steps, Stream
from detectors.recorded import Follower, find, replay
from elasticd.agent.logs import GenerationLogs
from elasticd.agent.rotation import rotate
from elasticd.observability.jsonl import JsonLines
from elasticd.observability.times import rfc3339
from trainer.wire.window import PHASES, STEP_BOUNDS, Window

pytestmark = pytest.mark.timeout(60)

T = 1_796_093_900.0


def told(event: str, at: float, **fields: Any) -> bytes:
    return json.dumps({"time": rfc3339(at), "level": "info", "event": event, "job": "digits", "node": "node-0", **fields}).encode() + b"\n"


def window(at: float, first: int) -> bytes:
    phases = dict.fromkeys(PHASES, (0.1, 0.1))
    buckets = (0,) * len(STEP_BOUNDS) + (1,)
    made = Window(rank=3, generation=7, first=first, last=first, began=at - 1, ended=at, seconds=1.0, phases=phases, buckets=buckets, slowest=(first, 1.0))
    return told("window", at, local_rank=0, step=first, **made.as_dict())


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of one rank over 100 seconds, as an agent leaves it."""
    root = tmp_path / "logs"
    logs = GenerationLogs.create(root, "digits", "node-0", 7, "abc")
    files = logs.rank(3)
    node = root / "digits" / "node-0"
    (node / "agent.jsonl").write_bytes(
        told("generation_formed", T, generation=7, world_size=4, cause="form")
        + told("workers_started", T, generation=7, ranks=[3], logs=f"/elsewhere/{logs.directory.name}")
        + told("worker_failed", T + 99, generation=7, rank=3, detail="exit code 1")
        + told("workers_stopped", T + 100, generation=7, outcome=None, why="rank 3 failed")
    )
    files.stdout.write_text("".join(f"step {number:02}\n" for number in range(10)))
    files.stderr.write_text('{"event": "agent_exit", "level": "error"}\nRuntimeError: no\n')
    files.error.write_text(json.dumps({"message": {"message": "RuntimeError: no\nmore", "extraInfo": {"timestamp": str(int(T + 97))}}}))
    writer = JsonLines(logs.directory / "telemetry.jsonl", max_bytes=4000)
    for number in range(9):
        writer.append([window(T + 10 * number + 6, number + 1)])
    writer.close()
    return root


def lines(found: list[Observation], stream: Stream) -> list[Line]:
    return [one for one in found if isinstance(one, Line) and one.stream is stream]


def test_files_are_found_once_with_what_is_true_of_their_lines(recorded: Path) -> None:
    found = {file.paths[-1].name: file for file in find(recorded)}
    assert {name: (file.kind, file.origin.trusted) for name, file in found.items()} == {
        "agent.jsonl": ("json", True),
        "telemetry.jsonl": ("json", True),
        "stdout.log": ("plain", False),
        "stderr.log": ("plain", False),
        "error.json": ("error", False),
    }
    origin = found["stderr.log"].origin
    assert (origin.node, origin.rank, origin.generation, origin.stream) == ("node-0", 3, 7, Stream.ERR)
    assert [path.name for path in found["telemetry.jsonl"].paths] == ["telemetry.jsonl.1", "telemetry.jsonl"]


def test_a_run_is_told_in_the_order_of_time(recorded: Path) -> None:
    found = list(replay(recorded))
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert [one.first for one in found if isinstance(one, Steps)] == list(range(1, 10))
    assert [one.phase for one in found if isinstance(one, Change)] == [Phase.INIT, Phase.INIT, Phase.TRAIN, Phase.RESCALE, Phase.RESCALE]


def test_printed_lines_are_spread_over_the_time_in_which_the_worker_ran(recorded: Path) -> None:
    printed = lines(list(replay(recorded)), Stream.OUT)
    assert [line.text for line in printed] == [f"step {number:02}" for number in range(10)]
    assert [line.at for line in printed] == pytest.approx([T + 10 * (number + 1) for number in range(10)], rel=0, abs=0.01)
    assert {(line.node, line.rank, line.generation) for line in printed} == {("node-0", 3, 7)}


def test_a_file_that_was_written_last_before_the_end_ends_there(recorded: Path) -> None:
    (stdout,) = recorded.glob("digits/node-0/generation-*/rank-3/stdout.log")
    os.utime(stdout, (T + 50, T + 50))
    assert [line.at for line in lines(list(replay(recorded)), Stream.OUT)] == pytest.approx([T + 5 * (number + 1) for number in range(10)], rel=0, abs=0.01)


def test_a_time_at_the_beginning_of_a_line_is_believed_if_the_worker_ran_then(recorded: Path) -> None:
    (stdout,) = recorded.glob("digits/node-0/generation-*/rank-3/stdout.log")
    stdout.write_text(f"{rfc3339(T + 33)} now\n[{rfc3339(T + 44)}] then\n{rfc3339(T - 4000)} never\n")
    now, then, never = lines(list(replay(recorded)), Stream.OUT)
    assert (now.at, then.at) == (T + 33, T + 44)
    assert T <= never.at <= T + 100


def test_what_a_worker_prints_is_no_word_of_the_agent_and_its_error_file_is_one_line(recorded: Path) -> None:
    (rank,) = recorded.glob("digits/node-0/generation-*/rank-3")
    (rank / "agent.jsonl").write_bytes(told("agent_exit", T + 10) + window(T + 11, 50))
    found = list(replay(recorded))
    assert not [one for one in found if isinstance(one, Steps) and one.first == 50]
    (rank / "agent.jsonl").unlink()
    found = list(replay(recorded))
    (forged,) = [line for line in lines(found, Stream.EVENT) if line.event == "agent_exit"]
    assert (forged.rank, forged.level) == (3, "error")
    assert not [one for one in found if isinstance(one, Change) and one.phase is Phase.STOPPED]
    assert [(line.text, line.at, line.level) for line in lines(found, Stream.ERR)] == [("RuntimeError: no", T + 97, "error"), ("RuntimeError: no", T + 100, "")]


def test_lines_that_a_full_file_gave_up_come_first(recorded: Path) -> None:
    (stdout,) = recorded.glob("digits/node-0/generation-*/rank-3/stdout.log")
    stdout.write_text("".join(f"line {number}\n" for number in range(3000)))
    fd = os.open(stdout, os.O_RDWR | os.O_APPEND)
    try:
        assert rotate(fd, stdout, most=1 << 20, files=2).taken
    finally:
        os.close(fd)
    assert [line.text for line in lines(list(replay(recorded)), Stream.OUT)] == [f"line {number}" for number in range(3000)]


def test_links_pipes_and_garbage_are_passed_over(recorded: Path) -> None:
    (rank,) = recorded.glob("digits/node-0/generation-*/rank-3")
    before, files = len(list(replay(recorded))), len(find(recorded))
    os.mkfifo(rank / "pipe.log")
    (rank / "link.log").symlink_to(recorded / "digits" / "node-0" / "agent.jsonl")
    (rank / "loop").symlink_to(recorded)
    (rank / "model.bin").write_bytes(b"\x00" * 1000)
    assert len(find(recorded)) == files
    (recorded / "digits" / "node-0" / "other.jsonl").write_bytes(b"\xff\xfe{]\n{\n[]\n")
    assert len(list(replay(recorded))) == before


def test_a_directory_of_others_is_read_too(tmp_path: Path) -> None:
    torchrun = tmp_path / "run1" / "attempt_0" / "5"
    torchrun.mkdir(parents=True)
    (torchrun / "stderr.log").write_text("one\n")
    (tmp_path / "train_rank12.out").write_text("two\n")
    (tmp_path / "dmesg").write_text("[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79\n")
    found = {(line.text, line.rank, line.stream.value) for line in replay(tmp_path) if isinstance(line, Line)}
    assert found == {("one", 5, "stderr"), ("two", 12, "stdout"), ("NVRM: Xid (PCI:0000:3b:00): 79", None, "kernel")}


def test_a_line_without_end_and_a_huge_file_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(b"x" * 10_000_000 + b"\nafter\n" + b"step 1\n" * 20_000)
    tracemalloc.start()
    try:
        texts = [(count, line.text) for count, line in enumerate(replay(tmp_path)) if isinstance(line, Line) and count < 2]
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert texts == [(0, "x" * 1024), (1, "after")]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(replay(tmp_path / "nowhere"))


# --- following -----------------------------------------------------------------------------------------------------------


def texts(found: list[Observation]) -> list[str]:
    return [line.text for line in found if isinstance(line, Line)]


def test_what_is_added_is_told_once_and_a_half_line_when_it_is_whole(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "logs")
    assert follower.poll(T) == []
    rank = tmp_path / "logs" / "rank-3"
    rank.mkdir(parents=True)
    with (rank / "stdout.log").open("w") as file:
        file.write("one\ntw")
        file.flush()
        (line,) = follower.poll(T + 1)
        assert isinstance(line, Line)
        assert (line.text, line.at, line.rank) == ("one", T + 1, 3)
        assert follower.poll(T + 2) == []
        file.write("o\nthree\n")
        file.flush()
        assert texts(follower.poll(T + 3)) == ["two", "three"]


def test_of_what_was_there_before_nothing_is_told_if_so_wanted_but_of_new_files_all(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("old\n")
    follower = Follower(tmp_path, from_end=True)
    assert follower.poll(T) == []
    (tmp_path / "rank1.log").write_text("new\n")
    assert texts(follower.poll(T + 1)) == ["new"]


def test_a_file_that_loses_its_older_lines_is_followed_on(tmp_path: Path) -> None:
    rank = tmp_path / "generation-000001" / "rank-3"
    rank.mkdir(parents=True)
    stdout = rank / "stdout.log"
    stdout.write_text("".join(f"line {number}\n" for number in range(3000)))
    follower = Follower(tmp_path)
    assert len(follower.poll(T)) == 3000
    fd = os.open(stdout, os.O_RDWR | os.O_APPEND)
    try:
        assert rotate(fd, stdout, most=1 << 20, files=1).taken
        os.write(fd, b"line 3000\n")
        assert texts(follower.poll(T + 1)) == ["line 3000"]
        # More is written than is taken out: its size alone does not tell.
        os.write(fd, b"".join(b"line %d\n" % number for number in range(3001, 5000)))
        assert len(follower.poll(T + 2)) == 1999
        size = os.fstat(fd).st_size
        assert rotate(fd, stdout, most=1 << 20, files=1).taken
        os.write(fd, b"".join(b"line %d\n" % number for number in range(5000, 9000)))
        assert os.fstat(fd).st_size > size
    finally:
        os.close(fd)
    assert texts(follower.poll(T + 3)) == [f"line {number}" for number in range(5000, 9000)]


def test_a_file_that_gives_way_to_a_new_one_is_followed_there(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "agent.jsonl", max_bytes=700)
    follower = Follower(tmp_path)
    found = []
    for number in range(10):
        writer.append([told("decision", T + number, text=f"number {number}")])
        found += texts(follower.poll(T + number)) if number % 3 == 0 else []
    writer.close()
    assert found == [f"decision text=number {number}" for number in range(10)]


def test_a_file_that_was_quiet_for_long_is_looked_at_again_after_a_while(tmp_path: Path) -> None:
    file = tmp_path / "rank0.log"
    file.write_text("one\n")
    follower = Follower(tmp_path)
    assert texts(follower.poll(T)) == ["one"]
    for number in range(300):
        assert follower.poll(T + number / 10) == []
    with file.open("a") as more:
        more.write("two\n")
    assert texts([one for number in range(110) for one in follower.poll(T + 30 + number / 10)]) == ["two"]


def test_a_generation_that_begins_is_seen_at_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    (tmp_path / "node-0").mkdir()
    follower.poll(T)
    for number in range(1, 4):
        rank = tmp_path / "node-0" / f"generation-{number:06}" / "rank-0"
        rank.mkdir(parents=True)
        (rank / "stdout.log").write_text(f"{number}\n")
        assert texts(follower.poll(T + 1)) == [str(number)]
