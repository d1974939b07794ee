"""The lock that proves a predecessor dead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticd.errors import RefusedError, UsageError
from elasticd.rendezvous.nodelock import NodeLock, boot_id, default_state_dir
from tests.rendezvous.helpers import Helper

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state"


def lock(directory: Path, node: str = "a") -> NodeLock:
    return NodeLock(directory, "cluster", "job", node)


def test_a_second_holder_is_refused_and_told_the_first_ones_pid(directory: Path) -> None:
    with Helper("hold_lock", directory=str(directory), node="a") as holder, pytest.raises(RefusedError, match=rf"pid {holder.pid}\b"):
        lock(directory)


def test_even_the_same_process_cannot_hold_it_twice(directory: Path) -> None:
    with lock(directory), pytest.raises(RefusedError, match=rf"pid {os.getpid()}\b"):
        lock(directory)


def test_killing_the_holder_frees_it(directory: Path) -> None:
    with Helper("hold_lock", directory=str(directory), node="a") as holder:
        holder.kill()
        lock(directory).close()


def test_it_is_free_again_once_closed_and_closing_twice_is_harmless(directory: Path) -> None:
    first = lock(directory)
    first.close()
    with lock(directory):
        first.close()
        with pytest.raises(RefusedError):
            lock(directory)


def test_a_shorter_pid_leaves_nothing_of_a_longer_one(directory: Path) -> None:
    with lock(directory) as first:
        path = first.path
    path.write_text("99999999999\n")
    with lock(directory):
        assert path.read_text() == f"{os.getpid()}\n"


def test_nodes_of_one_machine_do_not_share_it(directory: Path) -> None:
    with lock(directory, "a"), lock(directory, "b"):
        pass


def test_a_process_started_by_the_holder_does_not_keep_it(directory: Path) -> None:
    """The descriptor is closed on exec, so that a worker that outlives its agent does not look like one."""
    held = lock(directory)
    with Helper("answer_echoes", incarnation="0" * 16, running=0):
        held.close()
        lock(directory).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        lock(directory)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(UsageError, match="can be written by others"):
        lock(directory)


def test_what_it_makes_is_for_its_owner_alone(directory: Path) -> None:
    with lock(directory) as held:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert held.path.stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=str(file)):
        lock(file / "below")
    with pytest.raises(UsageError, match=str(file)):
        lock(file)


@pytest.mark.parametrize("name", ["../a", "", "a/b", "."])
def test_a_name_that_would_leave_the_directory_is_refused(directory: Path, name: str) -> None:
    for triple in (("cluster", "job", name), ("cluster", name, "a"), (name, "job", "a")):
        with pytest.raises(UsageError, match="not a usable name"):
            NodeLock(directory, *triple)
    assert not directory.exists()


def test_a_boot_has_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_state_dir() == tmp_path / "elasticd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in str(default_state_dir())
