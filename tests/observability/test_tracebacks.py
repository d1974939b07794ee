"""A traceback says where and what, and never with what."""

from __future__ import annotations

import time

import pytest

from elasticd.observability.redaction import HIDDEN
from elasticd.observability.tracebacks import CHAIN_MOST, FRAMES_MOST, MESSAGE_MOST, traceback_text

pytestmark = pytest.mark.timeout(20)


def fail(message: str, depth: int = 0) -> None:
    local = "a-local-variable-nobody-may-read"
    if depth:
        fail(message, depth - 1)
    assert local
    raise ValueError(message)


def caught(message: str = "no such layer", depth: int = 0) -> ValueError:
    try:
        fail(message, depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_it_names_file_line_function_and_ends_with_what_went_wrong() -> None:
    text = traceback_text(caught())
    assert text.startswith("Traceback (most recent call last):\n")
    assert f'File "{__file__}", line ' in text
    assert ", in fail" in text
    assert text.splitlines()[-1] == "ValueError: no such layer"


def test_no_local_variable_is_in_it() -> None:
    assert "a-local-variable-nobody-may-read" not in traceback_text(caught()).replace('local = "a-local-variable-nobody-may-read"', "")


def test_of_many_frames_the_innermost_are_told() -> None:
    text = traceback_text(caught(depth=500))
    assert text.count("  File ") == FRAMES_MOST
    assert text.splitlines()[-1] == "ValueError: no such layer"


def test_an_endless_recursion_is_told() -> None:
    def forever() -> None:
        forever()

    with pytest.raises(RecursionError) as raised:
        forever()
    assert len(traceback_text(raised.value)) < 10_000


def test_a_long_message_is_cut_and_a_hostile_one_made_harmless() -> None:
    text = traceback_text(caught("\x1b[2J" + "x" * 1_000_000))
    assert text.splitlines()[-1].startswith("ValueError: ?[2Jxxx")
    assert len(text.splitlines()[-1]) == MESSAGE_MOST


def test_secrets_in_messages_are_hidden() -> None:
    assert traceback_text(caught("cannot log in with password=hunter2")).endswith(f"ValueError: cannot log in with password={HIDDEN}")


def test_a_cause_comes_before_what_it_caused() -> None:
    try:
        try:
            fail("first")
        except ValueError as error:
            raise KeyError("second") from error
    except KeyError as error:
        text = traceback_text(error)
    assert text.index("ValueError: first") < text.index("The above exception was the direct cause") < text.index("KeyError: 'second'")
    assert text.splitlines()[-1] == "KeyError: 'second'"


def test_what_was_being_handled_is_told_unless_it_was_suppressed() -> None:
    def handle(*, suppress: bool) -> str:
        try:
            try:
                fail("first")
            except ValueError:
                if suppress:
                    raise KeyError("second") from None
                raise KeyError("second")  # noqa: B904
        except KeyError as error:
            return traceback_text(error)
        raise AssertionError

    assert "During handling of the above exception" in handle(suppress=False)
    assert "first" not in handle(suppress=True)


def test_a_chain_of_a_thousand_causes_and_one_that_bites_its_tail_are_told_in_part() -> None:
    error: BaseException = caught("the root")
    for number in range(1000):
        later = caught(f"number {number}")
        later.__cause__ = error
        error = later
    began = time.process_time()
    text = traceback_text(error)
    assert time.process_time() - began < 0.5
    assert text.count("\nValueError: ") == CHAIN_MOST
    assert "earlier exceptions are left out" in text
    one, other = caught("one"), caught("other")
    one.__cause__, other.__cause__ = other, one
    assert traceback_text(one).splitlines()[-1] == "ValueError: one"


def test_a_group_names_some_of_its_members() -> None:
    text = traceback_text(ExceptionGroup("many", [ValueError(f"number {number}") for number in range(100)]))
    assert "  | ValueError: number 0\n" in text
    assert "  | and 96 more" in text
    assert text.splitlines()[-1] == "ExceptionGroup: many (100 sub-exceptions)"


def test_notes_are_told() -> None:
    error = caught()
    error.add_note("while reading shard 7")
    assert traceback_text(error).endswith("ValueError: no such layer\nwhile reading shard 7")


def test_an_exception_whose_text_fails_is_told_without_it() -> None:
    class Bad(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError

    assert traceback_text(Bad()).splitlines()[-1].endswith("Bad: (it cannot be told)")
