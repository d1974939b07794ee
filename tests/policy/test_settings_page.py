"""The table of settings in the documents is made of the settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from elasticd.policy.settings import Settings
from elasticd.policy.settings_page import table, within

pytestmark = pytest.mark.timeout(30)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "detection.md"


def test_the_page_has_the_settings_as_they_are() -> None:
    """If not: python -m elasticd.policy.settings_page."""
    text = PAGE.read_text()
    assert within(text) == text


def test_each_setting_is_in_the_table_with_its_default() -> None:
    lines = table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [one.name for one in fields(Settings)]
    assert '| `mode` | `"act"` |' in table()
    assert "| `restarts_per_hour` | 1 |" in table()
