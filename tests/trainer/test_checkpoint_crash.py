"""A writer that ends before any one of its calls, or whose machine does, leaves the old checkpoint or the new one: whole, and never none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

REPOSITORY = Path(__file__).resolve().parents[2]


def walk(tmp_path: Path, action: str) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "tests.trainer._checkpoint_crash", str(tmp_path), action]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[-1]["done"], "the last one was not interrupted"
    assert {row["index"] for row in rows} == set(range(rows[-1]["index"] + 1))
    return rows


def check_after(row: dict[str, Any], wanted: list[int]) -> None:
    """What is left behind is no burden."""
    assert row["left"] == [], row
    assert (row["after"], row["later"]) == (wanted, []), row


def test_a_second_checkpoint_is_the_old_or_the_new_at_every_moment(tmp_path: Path) -> None:
    rows = walk(tmp_path, "write")
    assert rows[-1]["index"] > 12
    for row in rows:
        assert row["newest"] in ([1, 1], [1, 2]), row
        assert row["reports"] == [], row
        check_after(row, [1, 2])
    assert all(row["newest"] == [1, 2] for row in rows if row["done"]), "it said that it is durable"
    assert {row["how"] for row in rows} > {"killed"}
    assert any(row["drafts"] for row in rows)


def test_the_old_one_goes_only_when_the_new_one_is_there(tmp_path: Path) -> None:
    rows = walk(tmp_path, "retain")
    for row in rows:
        assert row["newest"] in ([1, 1], [1, 2]), row
        assert row["broken"] == [] or row["how"] != "killed", row
        # A power cut may bring a name back whose content is gone. It is older than what is loaded, so nobody looks at it.
        assert row["reports"] == [], row
        check_after(row, [1, 2])
    assert all(row["newest"] == [1, 2] and row["count"] == 1 for row in rows if row["done"])


def test_in_place_of_a_damaged_one_comes_a_sound_one(tmp_path: Path) -> None:
    rows = walk(tmp_path, "damaged")
    for row in rows:
        assert row["newest"] in ([1, 1], [1, 2]), row
        assert all("not what was written" in report for report in row["reports"]), row
        check_after(row, [1, 2])
    assert all(row["newest"] == [1, 2] for row in rows if row["done"])


def test_the_first_one_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = walk(tmp_path, "first")
    for row in rows:
        assert row["newest"] in (None, [1, 1]), row
        assert row["reports"] == [], row
        check_after(row, [1, 1])
    assert all(row["newest"] == [1, 1] for row in rows if row["done"])
