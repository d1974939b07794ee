"""Logs: one JSON object a line with the same fields everywhere, bounded and harmless, and never the end of whoever writes it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from elasticd.errors import UsageError
from elasticd.observability.limits import LEVEL_VARIABLE, LogLimits
from elasticd.observability.logging import LINE_MOST, bind, log_to_file, log_to_stream, set_level
from elasticd.observability.redaction import HIDDEN, forget, know

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    forget()


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Log to a file from here on; what is in it so far."""
    path = tmp_path / "agent.jsonl"
    with log_to_file(path, level=logging.DEBUG, node="a"):
        yield lambda: [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def log() -> Any:
    return structlog.get_logger("x")


# --- fields


def test_a_line_is_a_json_object_with_event_level_time_and_the_fixed_fields(tmp_path: Path) -> None:
    path = tmp_path / "new" / "agent.jsonl"
    with log_to_file(path, node="a", job="llm"):
        log().warning("something", number=3, path=Path("/p"))
    (line,) = path.read_text().splitlines()
    fields = json.loads(line)
    assert list(fields)[:5] == ["time", "level", "event", "job", "node"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", fields.pop("time"))
    assert fields == {"event": "something", "level": "warning", "node": "a", "job": "llm", "number": 3, "path": "/p"}


def test_bound_fields_are_in_every_line_of_every_thread_until_they_are_taken_out(logged: Callable[[], list[dict[str, Any]]]) -> None:
    bind(generation=7)
    thread = threading.Thread(target=lambda: log().info("there", rank=3))
    thread.start()
    thread.join()
    log().info("here", generation=6)
    bind(generation=None)
    log().info("later")
    assert [(line["event"], line.get("generation"), line.get("rank"), line["node"]) for line in logged()] == [
        ("there", 7, 3, "a"),
        ("here", 6, None, "a"),
        ("later", None, None, "a"),
    ]


def test_contextvars_are_fields_too(logged: Callable[[], list[dict[str, Any]]]) -> None:
    with structlog.contextvars.bound_contextvars(step=12):
        log().info("done")
    assert logged()[0]["step"] == 12


# --- levels


def test_the_level_can_be_set_while_loggers_are_in_use(logged: Callable[[], list[dict[str, Any]]]) -> None:
    one = structlog.get_logger("x")
    one.debug("first")
    set_level(logging.WARNING)
    one.info("second")
    one.warning("third")
    set_level(logging.DEBUG)
    one.debug("fourth")
    assert [line["event"] for line in logged()] == ["first", "third", "fourth"]


def test_the_environment_overrules_the_level_and_nonsense_in_it_is_named() -> None:
    limits = LogLimits(level="warning")
    assert limits.overruled({}).number == logging.WARNING
    assert limits.overruled({LEVEL_VARIABLE: " Debug "}).number == logging.DEBUG
    with pytest.raises(UsageError, match="ELASTICD_LOG_LEVEL='loud' is no level"):
        limits.overruled({LEVEL_VARIABLE: "loud"})


# --- whatever is logged


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError


def test_whatever_is_logged_is_one_line_of_json_without_secrets(logged: Callable[[], list[dict[str, Any]]]) -> None:
    know({"HF_TOKEN": "the-token-of-the-job"})
    endless: dict[str, Any] = {}
    endless["self"] = endless
    log().info(
        "odd",
        text="a\nb\x1b[2J\ud800",
        data=b"\xff\x00",
        numbers=[float("nan"), float("inf"), 10**5000],
        unshowable=Unshowable(),
        endless=endless,
        error=ValueError("said the-token-of-the-job"),
        password="hunter2",
        kinds={1, 2},
    )
    (line,) = logged()
    assert line["text"] == "a?b?[2J?"
    assert line["data"] == "\ufffd?"
    assert line["numbers"] == ["nan", "inf", "a number of 16610 bits"]
    assert line["unshowable"] == "<Unshowable that cannot be told>"
    assert line["error"] == f"ValueError: said {HIDDEN}"
    assert line["password"] == HIDDEN
    assert line["kinds"] == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x" * 1_000_000},
        {f"key{number}": "ä" * 1000 for number in range(1000)},
        {"list": list(range(1_000_000))},
        {"list": ["ä" * 10_000] * 2000},
        {"k" * 100_000: 1},
    ],
    ids=["text", "keys", "list", "texts", "key"],
)
def test_a_line_is_never_longer_than_journald_takes(logged: Callable[[], list[dict[str, Any]]], tmp_path: Path, fields: dict[str, Any]) -> None:
    began = time.process_time()
    log().info("much", generation=3, **fields)
    assert time.process_time() - began < 0.5
    assert len((tmp_path / "agent.jsonl").read_bytes()) <= LINE_MOST + 1
    (line,) = logged()
    assert (line["event"], line["node"], line["generation"]) == ("much", "a", 3)


def test_the_ranks_of_a_thousand_workers_fit(logged: Callable[[], list[dict[str, Any]]]) -> None:
    log().info("workers_started", ranks=list(range(1024)), pids=list(range(4_000_000, 4_001_024)))
    assert logged()[0]["ranks"] == list(range(1024))


def test_an_exception_is_text_in_the_same_line(logged: Callable[[], list[dict[str, Any]]]) -> None:
    secret_local = "nobody reads this"
    try:
        raise ValueError(f"{len(secret_local)} is bad\nreally")
    except ValueError:
        log().exception("failed", step=3)
        log().error("failed", exc_info=True)
    first, second = logged()
    assert (first["level"], first["step"]) == ("error", 3)
    assert first["exception"].startswith("Traceback (most recent call last):\n")
    assert first["exception"].endswith("ValueError: 17 is bad\nreally")
    assert second["exception"].endswith("ValueError: 17 is bad\nreally")
    assert "nobody reads this" not in json.dumps([first["exception"].replace('secret_local = "nobody reads this"', "")])


# --- the file


def test_an_earlier_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    path.write_text("earlier\n")
    with log_to_file(path):
        log().info("later")
    assert path.read_text().startswith("earlier\n{")


def test_a_line_that_a_crash_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    path.write_text('{"event": "cut')
    with log_to_file(path):
        log().info("later")
    assert json.loads(path.read_text().splitlines()[1])["event"] == "later"


def test_a_full_file_is_moved_aside_once_and_no_more_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    with log_to_file(path, most=10_000):
        for number in range(1000):
            log().info("counted", number=number)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["agent.jsonl", "agent.jsonl.1"]
    assert path.stat().st_size <= 10_000
    assert path.with_name("agent.jsonl.1").stat().st_size <= 10_000
    lines = (path.with_name("agent.jsonl.1").read_text() + path.read_text()).splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(1000 - len(lines), 1000))


def test_two_processes_that_share_a_file_do_not_move_it_away_from_each_other(tmp_path: Path) -> None:
    """A second agent that is refused writes why, while the first goes on."""
    from elasticd.observability.ownlog import OwnLog

    path = tmp_path / "agent.jsonl"
    with OwnLog(path, 1000) as one, OwnLog(path, 1000) as other:
        for number in range(100):
            (one if number % 2 else other).write(f"{number:050d}\n")
    kept = [int(line) for name in ("agent.jsonl.1", "agent.jsonl") for line in (tmp_path / name).read_text().splitlines()]
    assert sorted(kept) == list(range(100 - len(kept), 100))
    assert len(kept) >= 19
    assert all(len(line) == 50 for line in path.read_text().splitlines())


def test_a_full_disk_does_not_raise_into_whoever_logs() -> None:
    file = log_to_file(Path("/dev/full"))
    log().error("nobody will read this")
    with contextlib.suppress(OSError):
        file.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system")
def test_on_a_disk_that_fills_up_every_line_is_whole_or_not_there(tmp_path: Path) -> None:
    """And what is logged once there is room again is."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], check=True)
    try:
        filler = mount / "filler"
        filler.write_bytes(b"x" * 40_000)
        with log_to_file(mount / "agent.jsonl"):
            for number in range(200):
                log().info("counted", number=number, text="y" * 500)
            filler.unlink()
            log().info("room")
        lines = [json.loads(line) for line in (mount / "agent.jsonl").read_text().splitlines()]
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert 10 < len(lines) < 200
    assert lines[-1]["event"] == "room"


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"agent\.jsonl"):
        log_to_file(tmp_path / "file" / "agent.jsonl")


# --- streams

SCRIPT = """
import sys, structlog
from elasticd.observability.logging import log_to_stream, log_uncaught, log_libraries
log_to_stream(sys.stderr, node="a", most=20000)
log = structlog.get_logger("x")
log_uncaught(log, "prog")
log_libraries(log)
{}
"""


def run(body: str, *, journal: bool | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """A process that logs to its standard error. `journal`: JOURNAL_STREAM names that very pipe, or another file."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("JOURNAL_STREAM", None)
    if journal is False:
        env["JOURNAL_STREAM"] = "1:1"
    prelude = ""
    if journal:  # only the child itself can know its pipe
        prelude = "import os; s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + SCRIPT.format(body)], env=env, text=True, timeout=60, check=False, **{"stderr": subprocess.PIPE, **more}
    )


EACH = """
log.debug("not shown"); log.info("one"); log.warning("two"); log.error("three"); log.critical("four")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("five\\nlines")
"""


def test_under_systemd_each_line_has_its_priority_and_is_one_line() -> None:
    lines = run(EACH, journal=True).stderr.splitlines()
    assert [line[:4] for line in lines] == ["<6>{", "<4>{", "<3>{", "<2>{", "<3>{"]
    assert [json.loads(line[3:])["event"] for line in lines] == ["one", "two", "three", "four", "five?lines"]


@pytest.mark.parametrize("journal", [None, False])
def test_a_stream_that_is_not_the_journals_has_none(journal: bool | None) -> None:
    """JOURNAL_STREAM is inherited by what writes elsewhere."""
    lines = run(EACH, journal=journal).stderr.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["one", "two", "three", "four", "five?lines"]


def test_on_a_terminal_lines_are_for_people_and_still_harmless() -> None:
    theirs, ours = pty.openpty()
    done = run(
        'log.info("seen", text="\\x1b]0;title\\x07bad", password="hunter2")\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception("failed")',
        stderr=ours,
    )
    os.close(ours)
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(theirs, 65536):
            shown += data
    os.close(theirs)
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode()
    assert done.returncode == 0
    assert "?]0;title?bad" in plain
    assert "hunter2" not in plain
    assert re.search(r"^\d{4}-\d\d-\d\dT.*Z \[info +\] seen", plain)
    assert "ZeroDivisionError: division by zero" in plain
    assert "\x1b" not in plain


def test_what_nobody_caught_and_what_libraries_say_is_in_the_log() -> None:
    body = """
import logging, threading, warnings
logging.getLogger("lib").warning("odd %s", "thing")
logging.getLogger("lib").info("not shown")
logging.getLogger("lib").error("bad %d", "arguments")
warnings.warn("old function")
def fall(): raise KeyError("in a thread")
t = threading.Thread(target=fall, name="t1"); t.start(); t.join()
password = "a local"
raise ValueError("password=hunter2 at the end")
"""
    done = run(body)
    *lines, last = done.stderr.splitlines()
    events = [json.loads(line) for line in lines]
    assert [(event["event"], event["level"]) for event in events] == [
        ("library_says", "warning"),
        ("library_says", "warning"),
        ("uncaught", "critical"),
        ("uncaught", "critical"),
    ]
    assert events[0]["text"] == "odd thing"
    assert "old function" in events[1]["text"]
    assert events[2]["thread"] == "t1"
    assert events[3]["exception"].endswith(f"ValueError: password={HIDDEN} at the end")
    assert last == f"prog: ValueError: password={HIDDEN} at the end"
    assert done.returncode == 1


def test_a_log_that_goes_to_a_file_is_kept_short(tmp_path: Path) -> None:
    """Its last lines stay, and are whole but for the first."""
    path = tmp_path / "daemon.stderr"
    with path.open("ab") as file:
        run('for number in range(2000):\n    log.info("counted", number=number)', stderr=file)
    assert path.stat().st_size <= 20_000 + 4096
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines[1:]] == list(range(2001 - len(lines), 2000))


def test_a_stream_that_takes_nothing_any_more_ends_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        log_to_stream(stream)
        log().error("nobody reads this")
        with contextlib.suppress(OSError):
            stream.close()
    log_to_stream(io.StringIO())
    log().info("no descriptor")
