"""A worker's output gives up its older lines while it is written, and none is lost where the file system allows it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd.agent import rotation
from elasticd.agent.rotation import Rotated, predecessor, rotate
from elasticd.observability.shorten import shorten

pytestmark = pytest.mark.timeout(60)

MOST = 256 * 1024
Make = Callable[[], tuple[Path, int]]

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
sys.stdin.read(1)
for number in range(int(sys.argv[2])):
    os.write(fd, b"%09d\\n" % number)
"""


def can_collapse(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(b"x" * 65_536)
    with path.open("r+b") as file:
        able = rotation.collapse(file.fileno(), 4096)
    path.unlink()
    return able


@pytest.fixture(params=["/var/tmp", "/dev/shm"], ids=["disk", "memory"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """On a file system that can take a range out of a file, mostly, and on one that cannot."""
    made = Path(tempfile.mkdtemp(prefix="elasticd-rotation-", dir=request.param))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def output(folder: Path) -> Iterator[tuple[Path, int]]:
    """A worker's file, and a descriptor as the agent's."""
    path = folder / "generation-000001" / "rank-0" / "stdout.log"
    path.parent.mkdir(parents=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield path, fd
    os.close(fd)


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"%09d\n" % number for number in range(first, first + count))


def fill(fd: int) -> None:
    while True:
        os.write(fd, lines(1000))


def test_what_is_taken_out_and_what_is_left_are_what_was_written(output: tuple[Path, int]) -> None:
    path, fd = output
    os.write(fd, lines(10_000))
    done = rotate(fd, path, most=MOST, files=1)
    assert done == Rotated(predecessor(path).stat().st_size)
    assert path.stat().st_size < 8192
    os.write(fd, lines(10, 10_000))
    assert predecessor(path).read_bytes() + path.read_bytes() == lines(10_010)


def test_a_file_that_is_whole_blocks_long_keeps_its_last_one(folder: Path, output: tuple[Path, int]) -> None:
    """A range that reaches the end cannot be taken out."""
    path, fd = output
    block = os.fstatvfs(fd).f_bsize
    os.write(fd, b"x" * (8 * block))
    able = can_collapse(folder)
    assert rotate(fd, path, most=MOST, files=1).taken == (7 if able else 8) * block


def test_predecessors_move_on_and_the_oldest_goes(output: tuple[Path, int]) -> None:
    path, fd = output
    for number in range(4):
        os.write(fd, lines(5000, 5000 * number))
        rotate(fd, path, most=MOST, files=2)
    kept = b"".join(file.read_bytes() for file in (predecessor(path, 2), predecessor(path, 1), path))
    assert lines(20_000).endswith(kept)
    assert len(kept) >= 100_000
    assert sorted(file.name for file in path.parent.parent.iterdir()) == ["rank-0", "rank-0.stdout.log.1", "rank-0.stdout.log.2"]


def test_nothing_is_kept_if_nothing_is_to_be(output: tuple[Path, int]) -> None:
    path, fd = output
    os.write(fd, lines(10_000))
    assert rotate(fd, path, most=MOST, files=0).taken > 90_000
    assert [file.name for file in path.parent.parent.iterdir()] == ["rank-0"]


def test_of_much_more_than_the_cap_the_newest_are_kept(output: tuple[Path, int]) -> None:
    path, fd = output
    os.write(fd, lines(100_000))
    rotate(fd, path, most=MOST, files=1)
    kept = predecessor(path).read_bytes() + path.read_bytes()
    assert lines(100_000).endswith(kept)
    assert MOST <= len(kept) <= MOST + 8192


def test_no_line_is_lost_while_a_worker_writes_as_fast_as_it_can(folder: Path, output: tuple[Path, int]) -> None:
    if not can_collapse(folder):
        pytest.skip("this file system cannot take a range out of a file")
    path, fd = output
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "400000"], stdin=subprocess.PIPE)
    assert writer.stdin
    writer.stdin.write(b"go")
    writer.stdin.close()
    kept = b""
    rotations = 0
    while writer.poll() is None or os.fstat(fd).st_size > MOST:
        if os.fstat(fd).st_size > MOST:
            rotate(fd, path, most=1 << 30, files=1)
            kept += predecessor(path).read_bytes()
            rotations += 1
    assert writer.returncode == 0
    assert rotations > 3
    assert kept + path.read_bytes() == lines(400_000)


def test_on_a_full_disk_lines_are_dropped_and_the_file_gets_shorter(output: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, fd = output
    os.write(fd, lines(10_000))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rotation, "_copy", full)
    done = rotate(fd, path, most=MOST, files=1)
    assert done.taken > 90_000
    assert done.trouble == "No space left on device"
    assert path.stat().st_size < 8192
    assert [file.name for file in path.parent.parent.iterdir()] == ["rank-0"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system")
def test_on_a_disk_that_is_really_full_too(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)], check=True)
    try:
        path = tmp_path / "generation-000001" / "rank-0" / "stdout.log"
        path.parent.mkdir(parents=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with pytest.raises(OSError, match="No space left"):
            fill(fd)
        done = rotate(fd, path, most=MOST, files=1)
        os.close(fd)
        assert (done.trouble, path.stat().st_size) == ("No space left on device", 0)
        assert [file.name for file in path.parent.parent.iterdir()] == ["rank-0"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_a_worker_puts_in_the_way_is_not_followed(output: tuple[Path, int]) -> None:
    """A worker of our own user could; others cannot write there at all."""
    path, fd = output
    victim = path.parent / "victim"
    victim.write_text("mine")
    predecessor(path, 0).symlink_to(victim)
    predecessor(path).symlink_to(victim)
    os.write(fd, lines(10_000))
    path.unlink()
    path.symlink_to(victim)
    assert rotate(fd, path, most=MOST, files=1).trouble == ""
    assert victim.read_text() == "mine"
    assert stat.S_ISREG(predecessor(path).lstat().st_mode)
    assert os.fstat(fd).st_size < 8192


def test_a_directory_in_the_way_costs_the_lines_and_nothing_else(output: tuple[Path, int]) -> None:
    path, fd = output
    (predecessor(path) / "x").mkdir(parents=True)
    os.write(fd, lines(10_000))
    done = rotate(fd, path, most=MOST, files=1)
    assert done.trouble in ("Is a directory", "Directory not empty")
    assert os.fstat(fd).st_size < 8192


def test_a_file_that_its_worker_truncates_meanwhile_is_no_trouble(output: tuple[Path, int]) -> None:
    path, fd = output
    os.write(fd, lines(3))
    assert rotate(fd, path, most=MOST, files=1).taken in (0, 30)


# --- logs of our own


def test_a_log_of_our_own_keeps_its_last_half(folder: Path) -> None:
    fd = os.open(folder / "agent.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, lines(20_000))
    assert shorten(fd, 100_000)
    assert not shorten(fd, 100_000)
    os.write(fd, lines(1, 20_000))
    os.close(fd)
    kept = (folder / "agent.stderr").read_bytes()
    assert lines(20_001).endswith(kept)
    assert 40_000 <= len(kept) <= 60_000


def test_what_is_not_appended_to_is_left_alone(folder: Path) -> None:
    """After a truncation its writer would go on far behind the end."""
    fd = os.open(folder / "agent.stderr", os.O_WRONLY | os.O_CREAT)
    os.write(fd, lines(20_000))
    assert not shorten(fd, 100_000)
    os.close(fd)
    read, write = os.pipe()
    assert not shorten(write, 0)
    os.close(read)
    os.close(write)
