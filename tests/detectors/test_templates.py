"""Lines of one kind have one id, however their numbers, names and paths change; and nobody can fill the memory with kinds."""

from __future__ import annotations

import json
import random
import string
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detectors.observations import Line, Stream
from detectors.templates import OVERFLOW, Templates, exception_type, mask

pytestmark = pytest.mark.timeout(30)


def plain(text: str) -> Line:
    return Line(at=0.0, stream=Stream.OUT, text=text)


def event(name: str, *, logger: str = "", **fields: object) -> Line:
    return Line(at=0.0, stream=Stream.EVENT, text=name, event=name, logger=logger, fields=fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 10 loss 2.220", "step 12345 loss 0.1"),
        ("lr 1e-05", "lr 0.001"),
        ("loaded '/data/a.bin'", "loaded '/data/set two/b.bin'"),
        ("reading /data/train/00001.bin", "reading /scratch/x"),
        ("peer 10.0.0.1:29500 is gone", "peer 192.168.100.20:1 is gone"),
        ("job 3f2504e0-4f89-11d3-9a0c-0305e82c3301 ends", "job 00000000-4f89-11d3-9a0c-0305e82c3301 ends"),
        ("at 0x7f12ab", "at 0xdeadbeef0000"),
        ("sizes [1, 2, 3]", "sizes [16, 7]"),
        (" 12%|█▏        | 12/100 [00:01<00:10,  8.00it/s]", " 98%|█████████▊| 98/100 [00:12<00:00, 12.34it/s]"),
        ("2026-12-01T03:00:00 ready", "2025-01-31T23:59:59 ready"),
        ("===== run =====", "========== run =========="),
    ],
)
def test_what_varies_makes_no_other_kind(one: str, other: str) -> None:
    templates = Templates()
    first, count = templates.see(plain(one)).id, templates.see(plain(one)).count
    assert count == 2
    assert templates.see(plain(other)).id == first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 10 loss 2.220", "step 10 loss nan"),
        ("VM 3 started", "VM 3 paused"),
        ("saving to /a/b", "loading from /a/b"),
        ("rank 0 is here", "rank 0 is gone"),
    ],
)
def test_what_says_something_else_is_another_kind(one: str, other: str) -> None:
    templates = Templates()
    assert templates.see(plain(one)).id != templates.see(plain(other)).id


def test_an_event_is_known_by_logger_name_and_exception_whatever_its_fields_hold() -> None:
    templates = Templates()
    usual = templates.see(event("decision", logger="a", text="training")).id
    assert templates.see(event("decision", logger="a", text="the job has ended")).id == usual
    assert templates.see(event("decision", logger="b")).id != usual
    failed = templates.see(event("decision", logger="a", exception="Traceback …\nValueError: no")).id
    assert failed != usual
    assert templates.see(event("decision", logger="a", exception="Traceback …\nValueError: yes")).id == failed
    assert templates.see(event("decision", logger="a", exception="Traceback …\nKeyError: 'x'")).id != failed


def test_an_event_that_is_a_sentence_is_masked() -> None:
    templates = Templates()
    assert templates.see(event("Loaded 12 files")).id == templates.see(event("Loaded 7 files")).id


@pytest.mark.parametrize(
    ("text", "kind"), [("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA", "torch.OutOfMemoryError"), ("KeyboardInterrupt", "KeyboardInterrupt"), ("", "")]
)
def test_the_last_line_of_a_traceback_names_the_exception(text: str, kind: str) -> None:
    assert exception_type({"exception": text}) == kind


def test_first_and_rare_are_counted_with_the_line_at_hand() -> None:
    templates = Templates()
    told = []
    for number in range(5):
        kind = templates.see(plain(f"step {number}"))
        told.append((kind.first, kind.rare))
    assert told == [(True, True), (False, True), (False, True), (False, False), (False, False)]


def test_beyond_the_cap_all_new_kinds_are_one_that_is_counted_and_the_old_ones_stay() -> None:
    templates = Templates(most=10)
    words = ["".join(pair) for pair in zip(string.ascii_letters, string.ascii_letters[::-1], strict=True)]
    for word in words[:10]:
        templates.see(plain(word))
    assert templates.overflowed == 0
    assert {templates.see(plain(word)).id for word in words[10:30]} == {OVERFLOW}
    assert templates.overflowed == 20
    assert len(templates) == 10
    assert templates.see(plain(words[0])).count == 2


def test_a_flood_of_lines_that_are_all_different_takes_neither_memory_nor_much_time() -> None:
    chance = random.Random(1)
    lines = [plain("".join(chance.choices(string.ascii_letters + " ", k=250))) for _ in range(5_000)]
    templates = Templates()
    began = time.process_time()
    for line in lines:
        templates.see(line)
    assert (time.process_time() - began) / len(lines) < 2e-3
    assert len(templates) == 1024
    assert len(templates._cache) <= 8192


@pytest.mark.parametrize(
    "piece", ["'", '"', "deadbeef ", "1", "1.2.", "/", "/a", " ", "█", "a", "1 ", "<n>", "1e", "-", "http://", "a:/", "0x", "[", ",", "\x00", "\u0663"]
)
def test_no_line_takes_long_to_mask(piece: str) -> None:
    text = piece * (1024 // len(piece)) + "x"
    began = time.process_time()
    for _ in range(20):
        mask(text)
    assert (time.process_time() - began) / 20 < 5e-3


@example("1x0")
@given(st.text(st.sampled_from("0123456789abcdefx-+.,:eE '\"/[]()<>n|#=\u0663é"), max_size=60))
def test_which_digits_a_line_holds_changes_nothing(text: str) -> None:
    """The cache rests on it: it is asked with all digits made zeros."""
    zeros = text.translate(str.maketrans("123456789", "000000000"))
    assert mask(text) == mask(zeros)


def test_the_next_run_knows_what_came_more_than_once_and_begins_with_its_counts() -> None:
    templates = Templates()
    for text in ("step 1", "step 2", "epoch 1", "epoch 2", "only once"):
        templates.see(plain(text))
    later = Templates.load(templates.dump())
    assert len(later) == 2
    assert later.see(plain("step 77")).count == 3
    assert later.see(plain("only once")).first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        [
            "",
            "[]",
            "{}",
            '{"version": 99, "templates": {}}',
            '{"version": 1, "templates": [1]}',
            '{"version": 1, "templates": {"a": 3}}',
            '{"version": 1, "templates": {"a": ["x", "y"]}}',
            '{"version": 1, "templates": {"a": [-1, "y"]}}',
            "[" * 100_000,
        ],
        '{"version": 1, "templates": [1]}',
        '{"version": 1, "templates": {"a": 3}}',
        '{"version": 1, "templates": {"a": ["x", "y"]}}',
        '{"version": 1, "templates": {"a": [-1, "y"]}}',
        "[" * 100000,
    ],
)
def test_what_is_no_list_of_templates_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Templates.load(text)


def test_a_list_that_is_too_long_is_cut() -> None:
    kinds = {f"id{number}": [2, "x"] for number in range(50)}
    assert len(Templates.load(json.dumps({"version": 1, "templates": kinds}), most=10)) == 10
