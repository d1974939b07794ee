"""The agent's log file: one JSON object a line, and never the end of whoever writes it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import structlog

from elasticd.errors import UsageError
from elasticd.observability.logging import log_to_file

pytestmark = pytest.mark.timeout(20)


def test_a_line_is_a_json_object_with_event_level_time_and_the_fixed_fields(tmp_path: Path) -> None:
    path = tmp_path / "new" / "agent.jsonl"
    with log_to_file(path, node="a"):
        structlog.get_logger("x").warning("something", number=3, path=Path("/p"))
    (line,) = path.read_text().splitlines()
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {"event": "something", "level": "warning", "node": "a", "number": 3, "path": "/p"}


def test_an_earlier_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    path.write_text("earlier\n")
    with log_to_file(path):
        structlog.get_logger("x").info("later")
    assert path.read_text().startswith("earlier\n{")


def test_a_full_disk_does_not_raise_into_whoever_logs() -> None:
    file = log_to_file(Path("/dev/full"))
    structlog.get_logger("x").error("nobody will read this")
    with contextlib.suppress(OSError):
        file.close()


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"agent\.jsonl"):
        log_to_file(tmp_path / "file" / "agent.jsonl")
