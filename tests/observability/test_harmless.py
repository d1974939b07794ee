"""What others wrote cannot steer a terminal, break a line, or be too much."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.observability.harmless import coloured, harmless, one_line, unstyled

pytestmark = pytest.mark.timeout(30)

HOSTILE = st.text(st.characters() | st.sampled_from("\x00\x07\x1b\x7f\x9b\u202e\u2066\u2028\u2029\ud800\udfff\r\n\t"))


@given(HOSTILE | st.binary(), st.integers(1, 50))
def test_what_comes_out_is_printable_short_and_utf_8(text: str | bytes, limit: int) -> None:
    shown = harmless(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    shown.encode()


@given(HOSTILE | st.binary(), st.integers(1, 50))
def test_one_line_is_one_line_without_space_at_its_ends(text: str | bytes, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
    assert line == line.strip()


@given(HOSTILE, st.integers(1, 200))
def test_of_a_coloured_line_nothing_but_colours_and_tabs_is_left(text: str, limit: int) -> None:
    shown = coloured(text, limit)
    rest = "".join(part for part in unstyled(shown))
    assert all(char.isprintable() or char == "\t" for char in rest)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, äöü 漢字", "plain, äöü 漢字"),
        ("\x1b[31mred\x07", "?[31mred?"),
        ("\x9b2Jgone", "?2Jgone"),
        ("a\x00b\rc", "a?b?c"),
        ("abc\u202edef\u2066", "abc?def?"),
        ("a\u2028b", "a?b"),
        ("\ud800", "?"),
        (b"\xff\xfe ok", "\ufffd\ufffd ok"),
        (b"\xe2\x80\xae", "?"),
    ],
)
def test_each_kind_is_replaced(text: str | bytes, shown: str) -> None:
    assert harmless(text, 100) == shown


def test_what_is_cut_ends_with_a_mark_and_what_fits_does_not() -> None:
    assert harmless("abcdef", 5) == "abcd…"
    assert harmless("abcde", 5) == "abcde"
    assert harmless("äöüäöü".encode(), 5) == "äöüä…"
    assert harmless("äöüäö".encode(), 5) == "äöüäö"
    assert one_line("a " * 100, 6) == "a a a…"
    assert one_line(" " * 10_000, 6) == "…"


def test_line_breaks_stay_where_lines_are_kept() -> None:
    assert harmless("a\n\tb\r", 10, keep="\n\t") == "a\n\tb?"


def test_every_character_of_a_category_that_is_not_shown_is_replaced() -> None:
    """Controls, formats, surrogates, private use, what is not assigned; separators other than the space."""
    hidden = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert set(harmless("".join(hidden), len(hidden))) == {"?"}


def test_a_hundred_million_characters_cost_no_more_than_a_few() -> None:
    text = "\x1b[31m" * 20_000_000
    began = time.process_time()
    for show in (harmless, one_line, coloured):
        assert len(show(text, 1000)) <= 1000
    assert time.process_time() - began < 0.5


def test_sequences_are_taken_out_and_colours_kept_where_they_are_wanted() -> None:
    text = "\x1b[1;31mred\x1b[0m \x1b[2J\x1b]0;title\x07\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\ \x1b"
    assert unstyled(text) == "red link \x1b"
    assert coloured(text, 1000) == "\x1b[1;31mred\x1b[0m link ?"
