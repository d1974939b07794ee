"""The registry of runs on this machine."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elasticd.cli.registry import Registered, RunEntry, running
from elasticd.daemon.processes import process_start
from elasticd.errors import UsageError


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def entry(**more: Any) -> RunEntry:
    values: dict[str, Any] = {
        "job": "train", "cluster": "default", "endpoints": ("a:1",), "pid": os.getpid(), "started": process_start(os.getpid()),
        "log_dir": Path("/logs"), "local": True, "scratch": Path("/nowhere"), **more,
    }  # fmt: skip
    return RunEntry(**values)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "elasticd" / "runs").iterdir())


def test_a_run_is_found_while_it_lasts_and_is_private(tmp_path: Path) -> None:
    assert running() == []
    with Registered(entry()) as registered:
        assert running() == [entry()]
        assert stat.S_IMODE(registered.path.stat().st_mode) == 0o600
        assert files(tmp_path) == ["train.json"]
    assert running() == []
    assert files(tmp_path) == []


def test_two_nodes_of_one_job_on_one_machine_do_not_overwrite_each_other(tmp_path: Path) -> None:
    with Registered(entry()), Registered(entry(endpoints=("b:1",))):
        assert files(tmp_path) == [f"train.{os.getpid()}.json", "train.json"]
        assert len(running()) == 2


def dead() -> dict[str, Any]:
    """A pid that was somebody's."""
    process = subprocess.Popen(["true"])
    started = process_start(process.pid)
    process.wait()
    return {"pid": process.pid, "started": started or 1}


def test_what_a_dead_run_left_is_removed(tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="elasticctl-"))
    (scratch / "etcd").mkdir()
    Registered(entry(scratch=scratch, **dead()))
    assert running() == []
    assert files(tmp_path) == []
    assert not scratch.exists()


def test_a_pid_that_is_anothers_by_now_is_dead() -> None:
    assert not entry(started=1).alive
    assert entry().alive


def test_only_a_scratch_directory_is_removed_with_a_dead_run(tmp_path: Path) -> None:
    precious = tmp_path / "elasticctl-precious"
    precious.mkdir()
    Registered(entry(scratch=precious, **dead()))
    assert running() == []
    assert precious.exists()


def test_files_that_are_none_of_ours_are_passed_over(tmp_path: Path) -> None:
    with Registered(entry()):
        folder = tmp_path / "elasticd" / "runs"
        (folder / "junk.json").write_text("{")
        (folder / "link.json").symlink_to(folder / "train.json")
        os.mkfifo(folder / "pipe.json")
        assert len(running()) == 1


def test_a_directory_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "elasticd" / "runs").mkdir(parents=True)
    (tmp_path / "elasticd").chmod(0o777)
    with pytest.raises(UsageError, match="only you can write"):
        running()
    with pytest.raises(UsageError, match="set XDG_RUNTIME_DIR"):
        Registered(entry())
