"""Lines get to a file whole, in their order, and without anybody waiting; a file gives way before it is too large."""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from elasticd.observability import jsonl
from elasticd.observability.jsonl import JsonLines, JsonWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT = 10.0


@pytest.fixture
def writer() -> Iterator[JsonWriter]:
    made = JsonWriter("elasticd-lines", max_bytes=1000, waiting_max=50)
    yield made
    made.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "elasticd-lines"] == []


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_there_in_their_order_and_in_the_file_they_were_put_to(writer: JsonWriter, tmp_path: Path) -> None:
    for number in range(6):
        writer.put(tmp_path / f"{number // 3}.jsonl", {"number": number})
    assert writer.wait(WAIT)
    assert [line["number"] for line in read(tmp_path / "0.jsonl")] == [0, 1, 2]
    assert [line["number"] for line in read(tmp_path / "1.jsonl")] == [3, 4, 5]


def test_what_was_put_is_there_after_the_end_and_nothing_is_taken_then(writer: JsonWriter, tmp_path: Path) -> None:
    writer.put(tmp_path / "a.jsonl", {"number": 1})
    writer.close()
    writer.put(tmp_path / "a.jsonl", {"number": 2})
    assert read(tmp_path / "a.jsonl") == [{"number": 1}]
    assert writer.lost == 1


def test_a_file_gives_way_before_it_is_too_large_and_one_predecessor_is_kept(writer: JsonWriter, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for number in range(200):
        writer.put(path, {"number": number, "text": "x" * 20})
        assert writer.wait(WAIT)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1"]
    assert all(900 < file.stat().st_size <= 1000 or file == path for file in tmp_path.iterdir())
    numbers = [line["number"] for file in (tmp_path / "a.jsonl.1", path) for line in read(file)]
    assert numbers == list(range(numbers[0], 200))


def test_a_file_goes_on_where_an_earlier_writer_left_it(tmp_path: Path) -> None:
    for number in range(2):
        lines = JsonLines(tmp_path / "a.jsonl", max_bytes=30)
        lines.append([b'{"number":%d}\n' % number])
        lines.close()
    assert [line["number"] for line in read(tmp_path / "a.jsonl")] == [0, 1]
    lines = JsonLines(tmp_path / "a.jsonl", max_bytes=30)
    lines.append([b'{"number":2}\n'])
    lines.close()
    assert [line["number"] for line in read(tmp_path / "a.jsonl")] == [2]


def test_a_disk_that_takes_half_a_line_keeps_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full one does: the kernel writes what fits."""
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([b'{"number":1}\n'])
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    with pytest.raises(OSError, match="no space"):
        lines.append([b'{"number":2}\n'])
    monkeypatch.undo()
    lines.append([b'{"number":3}\n'])
    lines.close()
    assert read(tmp_path / "a.jsonl") == [{"number": 1}, {"number": 3}]


def test_a_full_disk_is_said_once_and_lines_are_counted_until_there_is_room(writer: JsonWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_lines: JsonLines, _data: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with capture_logs() as logs:
        monkeypatch.setattr(jsonl.JsonLines, "append", full)
        for number in range(3):
            writer.put(tmp_path / "a.jsonl", {"number": number})
            assert writer.wait(WAIT)
        monkeypatch.undo()
        writer.put(tmp_path / "a.jsonl", {"number": 3})
        assert writer.wait(WAIT)
    assert [entry["event"] for entry in logs] == ["lines_not_written", "lines_written_again"]
    assert writer.lost == 3
    assert read(tmp_path / "a.jsonl") == [{"number": 3}]


def test_who_puts_lines_never_waits_for_a_disk_that_hangs(writer: JsonWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, opened = threading.Event(), threading.Event()
    real = JsonLines.append

    def hanging(lines: JsonLines, data: Any) -> None:
        entered.set()
        assert opened.wait(WAIT)
        real(lines, data)

    monkeypatch.setattr(jsonl.JsonLines, "append", hanging)
    writer.put(tmp_path / "a.jsonl", {"number": 0})
    assert entered.wait(WAIT)
    for number in range(1, 61):
        writer.put(tmp_path / "a.jsonl", {"number": number})
    assert writer.lost == 10
    opened.set()
    assert writer.wait(WAIT)
    assert [line["number"] for line in read(tmp_path / "a.jsonl")] == list(range(51))


def test_a_link_in_a_files_place_is_not_followed(writer: JsonWriter, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "elsewhere")
    writer.put(tmp_path / "a.jsonl", {"number": 0})
    assert writer.wait(WAIT)
    assert not (tmp_path / "elsewhere").exists()
    assert writer.lost == 1


def test_a_line_that_is_no_json_harms_no_other(writer: JsonWriter, tmp_path: Path) -> None:
    writer.put(tmp_path / "a.jsonl", {"odd": {1, 2}, "text": "\ud800"})
    assert writer.wait(WAIT)
    writer.put(tmp_path / "a.jsonl", {"number": 1})
    assert writer.wait(WAIT)
    assert read(tmp_path / "a.jsonl")[-1] == {"number": 1}
