"""What the options mean, and what is said of those that mean nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elasticd.cli.options import (
    address_towards,
    check_summary,
    default_job,
    default_log_dir,
    default_node,
    parse_sizes,
    parse_store,
    worker_command,
)
from elasticd.errors import KVUnavailableError, UsageError


@pytest.mark.parametrize(
    ("given", "endpoints"),
    [
        (["a:2379"], ("a:2379",)),
        (["http://a:2379/", "b:1"], ("a:2379", "b:1")),
        (["a:1,b:2, a:1"], ("a:1", "b:2")),
        (["a"], ("a:2379",)),
        (["http://[::1]:99"], ("[::1]:99",)),
        (["[::1]"], ("[::1]:2379",)),
    ],
)
def test_endpoints_may_be_written_as_etcdctl_takes_them(given: list[str], endpoints: tuple[str, ...]) -> None:
    store = parse_store(given, None, None, None)
    assert store is not None
    assert store.endpoints == endpoints
    assert store.tls is None


def test_without_an_endpoint_there_is_no_store() -> None:
    assert parse_store([], None, None, None) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["ftp://a:1"], "unknown scheme 'ftp'"),
        (["a:port"], "is not HOST:PORT"),
        (["a:0"], "is not HOST:PORT"),
        (["a:70000"], "is not HOST:PORT"),
        (["http://a:1/v3"], "is not HOST:PORT"),
        (["user@a:1"], "is not HOST:PORT"),
        (["https://a:1"], "add --cacert"),
        ([" , "], "names none"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(given: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_store(given, None, None, None)


def test_tls_files_come_in_a_set_that_makes_sense(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.touch()
    store = parse_store(["https://a:1"], pem, pem, pem)
    assert store is not None
    assert store.tls is not None
    assert store.as_options() == ["--etcd", "a:1", "--cacert", str(pem), "--cert", str(pem), "--key", str(pem)]
    for arguments, problem in (
        ((["a:1"], None, pem, pem), "need --cacert"),
        ((["a:1"], pem, pem, None), "add --key"),
        ((["a:1"], pem, None, pem), "add --cert"),
        (([], pem, None, None), "add --etcd"),
        ((["http://a:1"], pem, None, None), "write https://"),
        ((["a:1"], pem, pem, tmp_path / "no.key"), r"--key .*no.key: No such file"),
    ):
        with pytest.raises(UsageError, match=problem):
            parse_store(*arguments)


@pytest.mark.parametrize(
    ("nodes", "least", "most", "problem"),
    [
        (0, 1, None, "--nodes 0: at least 1"),
        (2, 0, None, "--min-nodes 0: at least 1"),
        (1, 1, 0, "--max-nodes 0: at least 1"),
        (3, 1, 2, "--nodes 3 is more than --max-nodes 2"),
        (2, 3, None, "--min-nodes 3 is more than --nodes 2"),
        (2, 5, 4, "--min-nodes 5 is more than --nodes 2"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(nodes: int, least: int, most: int | None, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_sizes(nodes, least, most)


def test_a_job_wants_as_many_nodes_as_it_may_have() -> None:
    assert parse_sizes(2, 1, None).desired == 2
    assert parse_sizes(2, 1, 5).desired == 5


def script(path: Path, text: bytes, mode: int = 0o644) -> str:
    path.write_bytes(text)
    path.chmod(mode)
    return path.name


def test_a_script_is_run_by_this_python_and_a_program_as_it_is(tmp_path: Path) -> None:
    python = (sys.executable, "-u")
    train = script(tmp_path / "train.py", b"#!/bin/sh\n", 0o755)
    plain = script(tmp_path / "plain", b"print()\n")
    other = script(tmp_path / "other", b"#!/usr/bin/env python3\n", 0o755)
    shell = script(tmp_path / "run.sh", b"#!/bin/sh\n", 0o755)
    assert worker_command([train, "--x"], module=False, cwd=tmp_path) == (*python, "train.py", "--x")
    assert worker_command([plain], module=False, cwd=tmp_path) == (*python, "plain")
    assert worker_command([other], module=False, cwd=tmp_path) == (*python, "other")
    assert worker_command([shell, "a b"], module=False, cwd=tmp_path) == (str(tmp_path / "run.sh"), "a b")
    assert worker_command(["sleep", "1"], module=False, cwd=tmp_path) == ("sleep", "1")
    assert worker_command(["pkg.train", "-v"], module=True, cwd=tmp_path) == (*python, "-m", "pkg.train", "-v")


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no script 'trian.py' in {tmp_path}, and no such program"):
        worker_command(["trian.py"], module=False, cwd=tmp_path)
    with pytest.raises(UsageError, match=r"there is no script './x.py'"):
        worker_command(["./x.py"], module=False, cwd=tmp_path)
    with pytest.raises(UsageError, match="is a directory"):
        worker_command([str(tmp_path)], module=False, cwd=tmp_path)
    with pytest.raises(UsageError, match="no script was given"):
        worker_command([], module=False, cwd=tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_script_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"secret.py: Permission denied"):
        worker_command([script(tmp_path / "secret.py", b"", 0)], module=False, cwd=tmp_path)


def test_a_job_is_named_after_its_script() -> None:
    assert default_job("/a/train me!.py", local=False) == "train-me-"
    assert default_job("pkg.sub.train", local=False) == "train"
    assert default_job(".py", local=False) == "job"
    assert default_job("ünï.py", local=False) == "n-"
    first, second = default_job("train.py", local=True), default_job("train.py", local=True)
    assert first.startswith("train-")
    assert first != second


def test_the_summary_must_have_a_place(tmp_path: Path) -> None:
    check_summary(None)
    check_summary(tmp_path / "new.json")
    with pytest.raises(UsageError, match="there is no directory"):
        check_summary(tmp_path / "no" / "new.json")
    with pytest.raises(UsageError, match="is a directory"):
        check_summary(tmp_path)


def test_the_own_address_is_the_one_on_the_way_to_etcd() -> None:
    assert address_towards("127.0.0.1:2379") == "127.0.0.1"
    with pytest.raises(KVUnavailableError, match=r"no way to nowhere.invalid:2379"):
        address_towards("nowhere.invalid:2379")


def test_the_host_name_makes_a_node_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "_gpu 1.example.org")
    assert default_node() == "gpu-1.example.org"
    monkeypatch.setattr("socket.gethostname", lambda: "")
    assert default_node() == "node"


def test_logs_go_to_the_state_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_log_dir() == Path("/x/elasticd/logs")
