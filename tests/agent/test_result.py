"""The agent's last word is there in whole or not at all, and nobody else's."""

from __future__ import annotations

import json
import stat
import time
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from elasticd.agent.result import ResultFile
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_word_is_whole_and_the_agents_alone(tmp_path: Path) -> None:
    """Nothing is left beside it, and an earlier one is replaced."""
    path = tmp_path / "job.result.json"
    path.write_text("of an earlier run")
    before = time.time()
    ResultFile(path).write(code=1, result="failed", reason="rank 0: boom\nagain")
    told = json.loads(path.read_text())
    assert before <= told.pop("ended_at") <= time.time()
    assert told == {"code": 1, "result": "failed", "reason": "rank 0: boom\nagain"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_that_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    """Whether there is one or not."""
    path = tmp_path / "job.result.json"
    path.write_text("{}")
    ResultFile(path).clear()
    ResultFile(path).clear()
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_removed_is_an_error_in_one_line(tmp_path: Path) -> None:
    """A directory stands there."""
    with pytest.raises(UsageError, match=f"cannot remove result_file {tmp_path}: Is a directory"):
        ResultFile(tmp_path).clear()


def test_one_that_cannot_be_written_is_logged(tmp_path: Path) -> None:
    """The exit code stays what it is."""
    with capture_logs() as logs:
        ResultFile(tmp_path / "no/such/directory/r.json").write(code=0, result="left", reason="")
    assert [entry["event"] for entry in logs] == ["result_not_written"]


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"result_file": "/run/r.json", "nproc": "no"}', "/run/r.json"), ("not JSON", None), ("[]", None), ('{"result_file": 7}', None), ("[" * 100_000, None)],
)
def test_the_file_is_known_even_if_the_configuration_is_wrong(tmp_path: Path, text: str, named: str | None) -> None:
    """So that a daemon is told of the mistake."""
    (tmp_path / "agent.json").write_text(text)
    found = ResultFile.named_in(tmp_path / "agent.json").path
    assert (None if found is None else str(found)) == named


def test_without_a_file_nothing_happens(tmp_path: Path) -> None:
    """The configuration names none, or is missing."""
    results = ResultFile.named_in(tmp_path / "missing.json")
    results.clear()
    results.write(code=0, result="succeeded", reason="")
    assert (results.path, list(tmp_path.iterdir())) == (None, [])
