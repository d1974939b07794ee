"""What is read of a job's files on this node, whatever workers put there and whatever becomes of the files meanwhile."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent.rotation import rotate
from elasticd.daemon.joblogs import LINE_MAX, ROOM_LEAST, Part, Wanted, document, read_logs, shown, time_of, without_old
from elasticd.errors import UsageError


class Files:
    """Logs of the job `llm` on node n1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "llm" / "n1"

    def path(self, rank: int = 0, stream: str = "stdout", generation: int = 7, start: int = 1) -> Path:
        folder = self.home / (f"generation-{generation:06d}" + (f"-{start}" if start > 1 else "")) / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{stream}.log"

    def write(self, text: str | bytes, *place: Any, **more: Any) -> Path:
        path = self.path(*place, **more)
        with path.open("ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        return path

    def read(self, **wanted: Any) -> Part:
        return read_logs(self.root, "llm", "n1", Wanted(**wanted))

    def texts(self, **wanted: Any) -> list[str]:
        return [line.text for line in self.read(**wanted).lines]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def numbered(first: int, last: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, last + 1))


def lines(first: int, last: int) -> list[str]:
    return numbered(first, last).splitlines()


# --- which lines ---------------------------------------------------------------------------------------------------------


def test_the_last_lines_of_each_worker_of_the_newest_generation_are_told(files: Files) -> None:
    files.write("old\n", generation=6)
    files.write(numbered(1, 500))
    files.write("oops\n", stream="stderr")
    files.write("other\n", 1)
    part = files.read(tail=2)
    assert [(line.rank, line.stream, line.generation, line.text) for line in part.lines] == [
        (0, "stdout", 7, "line 499"),
        (0, "stdout", 7, "line 500"),
        (0, "stderr", 7, "oops"),
        (1, "stdout", 7, "other"),
    ]
    assert (part.generation, part.more) == (7, False)


def test_a_generation_that_was_started_again_counts_by_its_last_start(files: Files) -> None:
    for start, text in ((2, "second\n"), (10, "tenth\n"), (1, "first\n")):
        files.write(text, start=start)
    assert files.texts() == ["tenth"]
    assert files.texts(generation=7) == ["tenth"]


def test_a_generation_a_rank_and_a_stream_can_be_asked_for(files: Files) -> None:
    for generation in (6, 7):
        for rank in (0, 1):
            for stream in ("stdout", "stderr"):
                files.write(f"{generation} {rank} {stream}\n", rank, stream, generation=generation)
    assert files.texts(generation=6, rank=1, stream="stderr") == ["6 1 stderr"]
    assert files.texts(rank=1) == ["7 1 stdout", "7 1 stderr"]
    assert files.texts(generation=5) == []
    assert files.texts(rank=12) == []


def test_the_agents_events_are_a_stream_of_their_own(files: Files) -> None:
    files.write("worker\n")
    (files.home / "agent.jsonl.1").write_text('{"time": "2026-11-30T12:00:00.000Z", "event": "before"}\n')
    (files.home / "agent.jsonl").write_text('{"time": "2026-11-30T12:00:01.500Z", "event": "started"}\n')
    part = files.read(stream="agent")
    assert [(line.rank, line.generation, "before" in line.text) for line in part.lines] == [(None, None, True), (None, None, False)]
    assert part.lines[1].at == pytest.approx(1_796_040_001.5)


def test_a_node_that_never_ran_the_job_has_nothing(files: Files) -> None:
    part = files.read()
    assert (part.generation, part.lines, part.more) == (None, (), False)


def test_a_last_line_that_has_not_ended_is_told_unless_somebody_follows(files: Files) -> None:
    path = files.write("whole\nhal")
    assert files.texts() == ["whole", "hal"]
    followed = files.read(follow=True)
    assert [line.text for line in followed.lines] == ["whole"]
    path.write_text("whole\nhalf\n")
    assert files.texts(after=followed.place, follow=True) == ["half"]


@pytest.mark.parametrize("text", ["x", "", "\n", "\n\n\nx\n", "no end"])
def test_small_files_are_read_to_the_byte(files: Files, text: str) -> None:
    files.write(text)
    assert files.texts() == text.splitlines()
    assert files.texts(after=files.read(tail=0, follow=True).place, follow=True) == []


def test_since_goes_by_what_lines_say_and_else_by_the_files_age(files: Files) -> None:
    files.write("2026-11-30T12:00:00Z one\n  its trace\n2026-11-30T12:10:00Z two\n  its trace\n")
    silent = files.write("nobody knows\n", 1)
    noon = 1_796_040_000.0
    assert files.texts(since=noon + 300) == ["2026-11-30T12:10:00Z two", "  its trace", "nobody knows"]
    os.utime(silent, (noon, noon))
    assert files.texts(since=noon + 300) == ["2026-11-30T12:10:00Z two", "  its trace"]
    assert files.texts(since=noon + 3600) == []


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('{"event": "x", "timestamp": "2026-11-30T12:00:00Z"}', 1_796_040_000.0),
        ('{"time":"2026-11-30T12:00:00.250+00:00"}', 1_796_040_000.25),
        ("2026-11-30 12:00:00,125+0000 INFO x", 1_796_040_000.125),
        ("2026-13-30T12:00:00Z x", None),
        ("step 12 of 2026-11-30T12:00:00Z", None),
        ("", None),
    ],
)
def test_the_time_that_a_line_says(text: str, at: float | None) -> None:
    assert time_of(text) == at


# --- going on from a place -----------------------------------------------------------------------------------------------


def test_what_comes_later_is_told_once(files: Files) -> None:
    files.write(numbered(1, 3))
    part = files.read(tail=1, follow=True)
    assert [line.text for line in part.lines] == ["line 3"]
    files.write(numbered(4, 6))
    files.write("first\n", 5)
    part = files.read(after=part.place, follow=True)
    assert [line.text for line in part.lines] == [*lines(4, 6), "first"]
    assert files.texts(after=part.place, follow=True) == []


def test_a_new_generation_follows_the_end_of_the_one_before(files: Files) -> None:
    files.write("a\n", generation=6)
    place = files.read(follow=True).place
    files.write("b\nunfinished", generation=6)
    for generation, start in ((7, 1), (7, 2), (8, 1)):
        files.write(f"{generation}.{start}\n", generation=generation, start=start)
    part = files.read(after=place, follow=True)
    assert [line.text for line in part.lines] == ["b", "unfinished", "7.1", "7.2", "8.1"]
    assert part.generation == 8
    assert files.texts(after=part.place, follow=True) == []


def test_who_follows_before_anything_is_there_gets_it_from_the_beginning(files: Files) -> None:
    place = files.read(follow=True, tail=0).place
    files.write(numbered(1, 3))
    assert files.texts(after=place, follow=True, tail=0) == lines(1, 3)


def test_old_generations_that_are_removed_are_passed_over(files: Files) -> None:
    path = files.write("a\n", generation=6)
    place = files.read(follow=True).place
    path.unlink()
    path.parent.rmdir()
    path.parent.parent.rmdir()
    files.write("b\n", generation=9)
    assert files.texts(after=place, follow=True) == ["b"]


def test_what_does_not_fit_is_told_next_time(files: Files) -> None:
    for rank in range(4):
        files.write("".join(f"rank {rank} {number} {'x' * 200}\n" for number in range(400)), rank)
    place, told, asked = files.read(tail=0, follow=True).place, [], 0
    place = place.split("~")[0]  # from the beginning
    while True:
        part = files.read(after=place, follow=True, room=ROOM_LEAST)
        assert sum(len(line.text) for line in part.lines) < 2 * ROOM_LEAST
        place = part.place
        told += [line.text[:12].rstrip("x ") for line in part.lines]
        asked += 1
        if not part.more:
            break
    assert asked > 10
    for rank in range(4):
        assert [text for text in told if text.startswith(f"rank {rank}")] == [f"rank {rank} {number}"[:12] for number in range(400)]


def test_a_file_that_was_cut_short_begins_anew(files: Files) -> None:
    path = files.write(numbered(1, 100))
    place = files.read(follow=True).place
    path.write_text("new 1\nnew 2\n")
    assert files.texts(after=place, follow=True) == ["new 1", "new 2"]


def test_a_file_that_was_replaced_by_a_longer_one_begins_anew(files: Files) -> None:
    path = files.write("old\n")
    place = files.read(follow=True).place
    path.unlink()
    files.write(numbered(1, 5))
    assert files.texts(after=place, follow=True) == lines(1, 5)


@pytest.mark.parametrize("before", [0, 1, 4000, 4999])
@pytest.mark.parametrize("most", [16 * 1024, 20_000, 1 << 20])
def test_no_line_is_lost_or_told_twice_when_older_lines_are_moved_aside(files: Files, before: int, most: int) -> None:
    path = files.write(numbered(1, before))
    part = files.read(tail=0, follow=True)
    files.write(numbered(before + 1, 5000))
    with path.open("rb+") as file:
        rotate(file.fileno(), path, most=most, files=1)
    files.write(numbered(5001, 5003))
    kept = most // 10 - 10  # lines that surely are
    told, place = [], part.place
    while not told or part.more:
        part = files.read(after=place, follow=True)
        told, place = told + [line.text for line in part.lines], part.place
    if before > 5000 - kept or most > 100_000:
        assert told == lines(before + 1, 5003)
    else:
        assert told[-kept:] == lines(5004 - kept, 5003)
        assert told.count("line 5003") == 1
    assert files.texts(after=place, follow=True) == []


def test_a_file_that_was_emptied_after_its_lines_were_moved_aside_is_not_told_twice(files: Files) -> None:
    path = files.write(numbered(1, 10))
    place = files.read(tail=0, follow=True).place
    older = path.parent.parent / "rank-0.stdout.log.1"
    older.write_text(numbered(1, 12))
    path.write_text("")
    part = files.read(after=place, follow=True)
    assert [line.text for line in part.lines] == lines(11, 12)
    part = files.read(after=part.place, follow=True)
    assert part.lines == ()
    files.write("line 13\nunf")
    part = files.read(after=part.place, follow=True)
    assert [line.text for line in part.lines] == ["line 13"]


def test_a_line_that_was_moved_aside_in_part_is_told_whole(files: Files) -> None:
    path = files.write("line 1\n")
    place = files.read(tail=0, follow=True).place
    (path.parent.parent / "rank-0.stdout.log.1").write_text("line 1\nline 2\nlin")
    path.write_text("e ")
    part = files.read(after=place, follow=True)
    assert [line.text for line in part.lines] == ["line 2"]
    path.write_text("e 3\nline 4\n")
    assert files.texts(after=part.place, follow=True) == ["line 3", "line 4"]
    assert files.texts(tail=3) == ["line 2", "line 3", "line 4"]


def test_the_last_lines_reach_back_over_what_was_moved_aside(files: Files) -> None:
    path = files.write(numbered(1, 5000))
    with path.open("rb+") as file:
        rotate(file.fileno(), path, most=1 << 20, files=1)
    files.write(numbered(5001, 5003))
    assert files.texts(tail=2000) == lines(3004, 5003)


def test_the_agents_log_is_followed_over_its_change(files: Files) -> None:
    files.home.mkdir(parents=True)
    log = files.home / "agent.jsonl"
    log.write_text('{"event": "a"}\n')
    place = files.read(stream="agent", follow=True).place
    with log.open("a") as file:
        file.write('{"event": "b"}\n')
    log.rename(files.home / "agent.jsonl.1")
    log.write_text('{"event": "c"}\n')
    assert files.texts(stream="agent", after=place, follow=True) == ['{"event": "b"}', '{"event": "c"}']


@pytest.mark.parametrize("place", ["x", "1", "1.2.3", "1.1~0x5.5", "1.1~0o5", "1.1~0o" + "z" * 13 + ".1", "../..", "1.1~" * 5000, "9" * 100 + ".1"])
def test_a_place_that_is_none_is_refused(files: Files, place: str) -> None:
    files.write("x\n")
    with pytest.raises(UsageError, match="no place"):
        files.read(after=place)


def test_a_place_far_beyond_the_file_begins_anew(files: Files) -> None:
    files.write("x\n")
    assert files.texts(after="7.1~0ozzzzzzzzzzzz.zzzz") == ["x"]


# --- what workers may put there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\x1b[31mred\x1b[0m and \x1b]0;title\x07plain", "red and plain"),
        (b"\x1b[2J\x1b[Hbomb\x07\x08\x9b1;1H", "bomb???1;1H".replace("???", "??\ufffd")),
        (b"caf\xc3\xa9 \xff\xfe", "café \ufffd\ufffd"),
        (b" 10%\r 50%\r100%\r", "100%"),
        (b"tab\there", "tab\there"),
        ("turned \u202earound\u2028".encode(), "turned ?around?"),
        (b"", ""),
    ],
)
def test_a_line_is_harmless(line: bytes, text: str) -> None:
    assert shown(line) == text


def test_a_long_line_is_cut_and_says_so(files: Files) -> None:
    files.write("x" * 1_000_000 + "\nnext\n")
    first, second = files.texts(after=Files.read(files, tail=0, follow=True).place.split("~")[0])
    assert (first, second) == ("x" * (LINE_MAX - 1) + "…", "next")


def test_an_endless_line_costs_little_memory_and_hides_nothing_that_comes_after(files: Files) -> None:
    path = files.path()
    with path.open("wb") as file:
        file.write(b"begin\n")
        file.truncate(256 << 20)  # sparse: zeros without an end
        file.seek(0, os.SEEK_END)
        file.write(b"\nafter\n")
    tracemalloc.start()
    try:
        assert files.texts(tail=1) == ["after"]
        place, told = "7.1", []
        for _ in range(400):
            part = files.read(after=place, follow=True)
            told += [line.text for line in part.lines]
            place = part.place
            if not part.more:
                break
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (told[0], told[1][:3], told[2]) == ("begin", "???", "after")
    assert len(told) == 3


def test_many_lines_cost_no_more_memory_than_there_is_room(files: Files) -> None:
    for rank in range(8):
        files.write("y" * 100 + "\n" + "z\n" * 500_000, rank)
    tracemalloc.start()
    try:
        part = files.read(tail=10_000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert part.more
    assert sum(len(line.text) + 96 for line in part.lines) <= 1 << 20
    assert {line.rank for line in part.lines} == set(range(8))


def test_links_pipes_and_second_names_are_left_alone(files: Files, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key\n")
    files.path(0).symlink_to(secret)
    files.path(1).hardlink_to(secret)
    os.mkfifo(files.path(2))
    files.path(3).mkdir()
    files.path(4).parent.rmdir()
    (files.home / "generation-000007/rank-4").symlink_to(tmp_path)
    files.write("fine\n", 5)
    done: list[list[str]] = []
    thread = threading.Thread(target=lambda: done.append(files.texts()), daemon=True)
    thread.start()
    thread.join(10)
    assert done == [["fine"]]


def test_a_generation_that_is_a_link_is_left_alone(files: Files, tmp_path: Path) -> None:
    files.write("fine\n", generation=7)
    elsewhere = tmp_path / "elsewhere/rank-0"
    elsewhere.mkdir(parents=True)
    (elsewhere / "stdout.log").write_text("not ours\n")
    (files.home / "generation-000008").symlink_to(elsewhere.parent)
    assert "not ours" not in files.texts()


# --- several nodes -------------------------------------------------------------------------------------------------------


def test_nodes_that_were_not_in_the_newest_generation_tell_nothing_unless_it_is_new(files: Files) -> None:
    files.write("old\n", generation=6)
    part = document("n1", files.read())
    other = {**part, "name": "n2", "generation": 7}
    without_old(parts := [dict(part), dict(other)], Wanted())
    assert [len(one["lines"]) for one in parts] == [0, 1]
    without_old(parts := [dict(part), dict(other)], Wanted(generation=6))
    assert [len(one["lines"]) for one in parts] == [1, 1]
    without_old(parts := [dict(part), dict(other)], Wanted(), ["n1"])
    assert [len(one["lines"]) for one in parts] == [1, 1]
