"""Logs of a generation are never lost, and an error file is never trusted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from elasticd.agent.logs import (
    ERROR_FILE_LIMIT,
    EXCEPTION_LIMIT,
    MESSAGE_LIMIT,
    GenerationLogs,
    WorkerError,
    describe_exit,
    read_error,
    read_traceback,
    safe_name,
)
from elasticd.errors import UsageError

pytestmark = pytest.mark.timeout(30)


def create(root: Path, generation: int = 7, incarnation: str = "a1") -> GenerationLogs:
    return GenerationLogs.create(root, "resnet", "node-1", generation, incarnation)


# --- directories


def test_whoever_works_there_can_pass_through_whatever_the_umask(tmp_path: Path) -> None:
    """And read by the agent's group; the root of the logs is an operator's."""
    root = tmp_path / "logs"
    old = os.umask(0o077)
    try:
        made = GenerationLogs.create(root, "resnet", "node-1", 7, "a1", passage=True)
    finally:
        os.umask(old)
    modes = [path.stat().st_mode & 0o7777 for path in (root, root / "resnet", root / "resnet/node-1", made.directory)]
    assert modes == [0o700, 0o751, 0o751, 0o751]


def test_files_lie_where_the_layout_says(tmp_path: Path) -> None:
    """<root>/<job>/<node>/generation-000007/rank-3/."""
    logs = create(tmp_path / "made" / "too").rank(3)
    assert logs.directory == tmp_path / "made/too/resnet/node-1/generation-000007/rank-3"
    assert logs.directory.is_dir()
    assert [path.name for path in (logs.stdout, logs.stderr, logs.error)] == ["stdout.log", "stderr.log", "error.json"]
    assert {path.parent for path in (logs.stdout, logs.stderr, logs.error)} == {logs.directory}


def test_each_generation_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """Also one whose number is longer than the padding."""
    names = [create(tmp_path, generation).directory.name for generation in (0, 7, 8, 12_345_678)]
    assert names == ["generation-000000", "generation-000007", "generation-000008", "generation-12345678"]


def test_repeated_generation_gets_a_suffix_and_the_old_logs_stay(tmp_path: Path) -> None:
    """The agent was restarted, twice: nothing it wrote before is deleted or truncated."""
    kept = []
    for incarnation in ("a1", "b2", "c3"):
        logs = create(tmp_path, incarnation=incarnation)
        kept.append(logs)
        logs.rank(0).stdout.write_text(f"by {incarnation}")
    assert [logs.directory.name for logs in kept] == ["generation-000007", "generation-000007-2", "generation-000007-3"]
    assert [logs.rank(0).stdout.read_text() for logs in kept] == ["by a1", "by b2", "by c3"]
    assert [(logs.directory / "incarnation").read_text() for logs in kept] == ["a1\n", "b2\n", "c3\n"]


def test_latest_points_at_the_newest(tmp_path: Path) -> None:
    """By a relative link, so that a copied tree still works; nothing else is left beside it."""
    create(tmp_path, 7)
    create(tmp_path, 8)
    create(tmp_path, 7)
    node = tmp_path / "resnet/node-1"
    assert (node / "latest").readlink() == Path("generation-000007-2")
    assert sorted(path.name for path in node.iterdir()) == ["generation-000007", "generation-000007-2", "generation-000008", "latest"]


def test_latest_that_is_not_a_link_is_left_alone(tmp_path: Path) -> None:
    """Somebody put a file there: logged, and training goes on."""
    (tmp_path / "resnet/node-1").mkdir(parents=True)
    (tmp_path / "resnet/node-1/latest").write_text("mine")
    with capture_logs() as logs:
        assert create(tmp_path).directory.is_dir()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert (tmp_path / "resnet/node-1/latest").read_text() == "mine"


def test_dangling_latest_is_replaced(tmp_path: Path) -> None:
    """Somebody removed old logs."""
    (tmp_path / "resnet/node-1").mkdir(parents=True)
    (tmp_path / "resnet/node-1/latest").symlink_to("generation-000001")
    create(tmp_path)
    assert (tmp_path / "resnet/node-1/latest").readlink() == Path("generation-000007")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\0b", "a\n", "-rf", ".hidden", "a b", "é", "a" * 129, "~", "$HOME"])
def test_path_tricks_are_refused(tmp_path: Path, name: str) -> None:
    """Neither a job nor a node can place a log outside its directory, and nothing is made."""
    with pytest.raises(UsageError, match="job name"):
        GenerationLogs.create(tmp_path, name, "node", 1, "a1")
    with pytest.raises(UsageError, match="node name"):
        GenerationLogs.create(tmp_path, "job", name, 1, "a1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "resnet-50_v1.5", "_x", "10.0.0.1", "A" * 128, "a..b"])
def test_harmless_names_pass_unchanged(name: str) -> None:
    """Host names and addresses among them."""
    assert safe_name(name, "node") == name


def test_negative_generation_is_refused(tmp_path: Path) -> None:
    """It would not sort, and no generation has such a number."""
    with pytest.raises(UsageError, match="generation -1"):
        create(tmp_path, -1)


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file is in the way of the root, then of a rank."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/resnet/node-1.*Not a directory"):
        create(tmp_path / "file")
    logs = create(tmp_path)
    (logs.directory / "rank-0").write_text("")
    with pytest.raises(UsageError, match=r"rank-0.*File exists"):
        logs.rank(0)


# --- error.json


def write_error(path: Path, message: object, **extra: object) -> Path:
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": "Traceback ...", **extra}}}))
    return path


def test_error_file_that_leads_elsewhere_is_not_read(tmp_path: Path) -> None:
    """A worker's user could have the agent read, and publish, what only the agent may."""
    secret = write_error(tmp_path / "secret.json", "the key")
    (tmp_path / "symbolic.json").symlink_to(secret)
    assert read_error(tmp_path / "symbolic.json") is None
    (tmp_path / "hard.json").hardlink_to(secret)
    assert read_error(tmp_path / "hard.json") is None


def test_error_file_that_torch_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own handler, so that a change of its format is seen here."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise ValueError("no such layer\nsecond line")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    read = read_error(path)
    assert read is not None
    assert read.message == "ValueError: no such layer\nsecond line"
    assert read.exception == "ValueError: no such layer"
    assert read.timestamp == pytest.approx(path.stat().st_mtime, abs=2)


def test_plain_message_is_read(tmp_path: Path) -> None:
    """The other form that torch accepts has no timestamp."""
    (tmp_path / "error.json").write_text('{"message": "out of memory"}')
    assert read_error(tmp_path / "error.json") == WorkerError(message="out of memory", exception="out of memory", timestamp=None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00garbage",
        b'{"message": {"message": "cut of',
        b"[1, 2]",
        b"null",
        b"{}",
        b'{"message": 3}',
        b'{"message": {"message": ["x"]}}',
        b'{"message": {"extraInfo": {}}}',
        b"[" * 100_000,
        b'{"message": ' + b"9" * 10_000 + b"}",
    ],
)
def test_garbage_is_no_error(tmp_path: Path, content: bytes) -> None:
    """Nothing in the file can make reading it raise."""
    (tmp_path / "error.json").write_bytes(content)
    assert read_error(tmp_path / "error.json") is None


def test_missing_file_directory_and_pipe_are_no_error(tmp_path: Path) -> None:
    """A pipe that a worker put there is not waited on."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert [read_error(tmp_path / name) for name in ("missing", "directory", "pipe", "nul\0byte")] == [None] * 4


def test_long_message_is_truncated(tmp_path: Path) -> None:
    """It goes to every node through etcd."""
    read = read_error(write_error(tmp_path / "error.json", "E" * 100_000))
    assert read is not None
    assert (len(read.message), len(read.exception)) == (MESSAGE_LIMIT, EXCEPTION_LIMIT)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    """Its message says so instead."""
    path = write_error(tmp_path / "error.json", "E" * ERROR_FILE_LIMIT)
    read = read_error(path)
    assert read is not None
    assert "over 1048576 bytes" in read.message
    assert read.timestamp is None


def test_message_is_made_printable(tmp_path: Path) -> None:
    """No escape sequence reaches a terminal, and no lone surrogate an encoder."""
    read = read_error(write_error(tmp_path / "error.json", "\n Error: \x1b[2Jé\ud800\tx\n"))
    assert read is not None
    assert read.message == "\n Error: ?[2Jé?\tx\n"
    assert read.exception == "Error: ?[2Jé?\tx"


@pytest.mark.parametrize(
    ("given", "read"),
    [("1700000000", 1.7e9), (1700000000.5, 1700000000.5), ("soon", None), ("nan", None), ("inf", None), (-1, None), (10**400, None), ([], None), (None, None)],
)
def test_timestamp_is_a_time_or_none(tmp_path: Path, given: object, read: float | None) -> None:
    """The earliest one is blamed, so nonsense must not be."""
    error = read_error(write_error(tmp_path / "error.json", "E", timestamp=given))
    assert error is not None
    assert error.timestamp == read


# --- exit codes


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-signal.SIGKILL, "killed by SIGKILL (9)"),
        (-signal.SIGSEGV, "killed by SIGSEGV (11)"),
        (-50, "killed by signal 50"),
    ],
)
def test_exit_code_is_described_in_words(code: int, words: str) -> None:
    """A signal by its name, if it has one."""
    assert describe_exit(code) == words


# --- what Python prints ---------------------------------------------------------------------------------------------------

STACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'


@pytest.mark.parametrize(
    ("text", "exception"),
    [
        (STACK + "ValueError: no such layer\n", "ValueError: no such layer"),
        (STACK + "torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
        (
            STACK + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n" + STACK + "OSError: [Errno 5]\n",
            "OSError: [Errno 5]",
        ),
        (STACK + "AssertionError\n", "AssertionError"),
        ("".join(f"[rank1]: {line}\n" for line in (STACK + "ValueError: no such layer").splitlines()), "ValueError: no such layer"),
        (STACK + "ValueError: two\nlines of it\n", "ValueError: two"),
        (STACK + "ValueError: first\nsome library says good bye\n", "ValueError: first"),
        ('  File "train.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
    ],
)
def test_the_last_exception_on_standard_error_is_found(tmp_path: Path, text: str, exception: str) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("warming up: done\n" * 10_000 + text)
    read = read_traceback(path)
    assert read is not None
    assert read.exception == exception


@pytest.mark.parametrize("text", ["", "ValueError: only said so\n", "Traceback (most recent call last):\n", "\x00\xff" * 50_000, STACK])
def test_where_there_is_no_exception_none_is_made_up(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(text.encode("latin-1"))
    assert read_traceback(path) is None


def test_a_traceback_is_made_harmless_and_short(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(STACK.encode() + b"ValueError: \x1b[31m\xff" + b"x" * 50_000 + b"\n")
    read = read_traceback(path)
    assert read is not None
    assert len(read.exception) <= EXCEPTION_LIMIT
    assert len(read.message) <= MESSAGE_LIMIT
    assert "\x1b" not in read.message


def test_a_pipe_or_a_link_in_the_place_of_standard_error_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(STACK + "ValueError: secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "none"):
        assert read_traceback(tmp_path / name) is None
