"""Hosts boot, reach each other, are cut off and lose power, and nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.cluster.hosts import Host, HostError, Lab
from tests.cluster.network import BASE, CGROUP, alone, lives, start_time, sweep, unified
from tests.cluster.places import MOVES, PREFIX, PROJECT, PYTHON, ROOT
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.root
StartSession = Callable[[str], tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def pair(lab: Lab) -> Iterator[tuple[Host, Host]]:
    """Two hosts of this module."""
    one, other = lab.boot("one", "other")
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def hosts(pair: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    """Both run and are connected, before and after."""
    yield pair
    for host in pair:
        if host.on:
            host.heal()
        else:
            host.boot()
    for host in pair:
        host.wait_running()


def test_a_host_runs_a_systemd_of_its_own(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    assert one.read("/proc/1/comm") == "systemd\n"
    assert one.sh("hostname").stdout == "one\n"
    assert one.sh("systemctl", "is-system-running").stdout == "running\n"
    assert one.sh("systemctl", "is-active", "dbus.service").stdout == "active\n"
    for told_apart in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        assert len({one.read(told_apart), other.read(told_apart), Path(told_apart).read_text() if Path(told_apart).exists() else ""}) == 3


def test_nothing_that_the_machine_has_enabled_runs_on_a_host(hosts: tuple[Host, Host]) -> None:
    units = hosts[0].sh("systemctl", "list-units", "--type=service", "--state=active", "--plain", "--no-legend").stdout
    names = {line.split()[0] for line in units.splitlines()}
    assert {name for name in names if not name.startswith(("systemd-", "dbus", "polkit", "user"))} == set()


def test_a_host_cannot_change_the_machine(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Neither its files nor its kernel's settings; each host has its own /tmp, /run and shared memory."""
    one, other = hosts
    (tmp_path / "mine").write_text("as it was")
    own = ("/etc/hostname", "/tmp/elasticd-mark", "/var/tmp/elasticd-mark", "/run/elasticd-mark", "/dev/shm/elasticd-mark")
    shown = {place / name: here / name for here, place in MOVES.items() for name in ("pyproject.toml", "pyvenv.cfg") if (here / name).exists()}
    for path, here in ({Path(path): Path(path) for path in own} | shown).items():
        before = here.read_text() if here.exists() else None
        one.sh("cp", "-a", path, "/root/before", check=False)
        one.write(path, "changed")
        assert one.read(path) == "changed"
        assert (here.read_text() if here.exists() else None) == before
        assert other.sh("cat", path, check=False).stdout != "changed"
        if path in shown:  # the other tests go on with it
            one.sh("mv", "/root/before", path)
    assert "Read-only file system" in one.sh("sh", "-c", "echo 40000 >/proc/sys/kernel/pid_max", check=False).stderr
    one.sh("systemd-tmpfiles", "--create", "--remove", "--boot", "--exclude-prefix=/dev", check=False)
    assert (tmp_path / "mine").read_text() == "as it was"


@pytest.mark.parametrize("user", [None, "nobody"])
def test_the_projects_virtual_environment_works_on_a_host_for_every_user(hosts: tuple[Host, Host], user: str | None) -> None:
    told = hosts[0].python("import elasticd, pydantic, sys; print(elasticd.__file__, sys.prefix)", user=user).stdout
    assert told == f"{PROJECT / 'elasticd' / '__init__.py'} {PREFIX}\n"


def test_a_unit_that_hides_as_much_as_the_shipped_one_sees_project_and_environment_as_they_are_here(hosts: tuple[Host, Host]) -> None:
    """Wherever they lie on this machine."""
    code = f"import pydantic; print(pydantic.VERSION); print(open({str(PROJECT / 'pyproject.toml')!r}).read(), end='')"
    hiding = [f"--property={name}" for name in ("User=nobody", "PrivateTmp=yes", "ProtectHome=read-only", "ProtectSystem=strict")]
    told = hosts[0].sh("systemd-run", "--quiet", "--pipe", "--wait", "--collect", *hiding, "--", PYTHON, "-c", code).stdout
    assert told == f"{pydantic.VERSION}\n{(ROOT / 'pyproject.toml').read_text()}"


def test_files_are_written_with_their_mode_and_owner(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host = hosts[0]
    host.write("/etc/elasticd-test/deep/a b", b"\x00\xff", mode=0o640, owner="nobody:daemon")
    assert host.sh("stat", "-c", "%a %U %G %s", "/etc/elasticd-test/deep/a b").stdout == "640 nobody daemon 2\n"
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/x").write_text("x")
    (tmp_path / "tree/sub/x").chmod(0o751)
    host.put_tree(tmp_path / "tree", "/srv/tree")
    assert host.sh("stat", "-c", "%a", "/srv/tree/sub/x").stdout == "751\n"
    assert host.read("/srv/tree/sub/x") == "x"


def test_a_command_that_fails_is_told_and_one_that_hangs_is_ended(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    with pytest.raises(HostError, match=r"one: sh -c 'echo why >&2; exit 7' returned 7\s+why"):
        host.sh("sh", "-c", "echo why >&2; exit 7")
    with pytest.raises(subprocess.TimeoutExpired):
        host.sh("sleep", "4711", timeout=1)
    await_(lambda: host.sh("pgrep", "-xf", "sleep 4711", check=False).returncode == 1, what="the end of what hung")


def test_a_unit_runs_restarts_and_leaves_its_journal(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    host.write("/etc/systemd/system/hello.service", "[Service]\nExecStart=/bin/sh -c 'echo hello from $$$$; exec sleep infinity'\nDynamicUser=yes\n")
    host.sh("systemctl", "daemon-reload")
    host.sh("systemctl", "start", "hello")
    pid = host.sh("systemctl", "show", "-P", "MainPID", "hello").stdout.strip()
    await_(lambda: f"hello from {pid}" in host.journal("hello"), what="the journal")
    host.sh("systemctl", "stop", "hello")
    assert host.sh("systemctl", "is-active", "hello", check=False).stdout == "inactive\n"


def test_hosts_reach_each_other_until_one_is_cut_and_again_when_it_is_healed(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    assert one.pings(other.address)
    other.cut()
    assert not one.pings(other.address)
    assert not other.pings(one.address)
    assert other.pings("127.0.0.1")
    other.heal()
    await_(lambda: one.pings(other.address), what="an answer")
    assert other.pings(one.address)


LISTEN = "import socket; s = socket.create_server(('', 7)); print('up', flush=True); c, _ = s.accept(); c.sendall(b'x'); c.recv(1)"
HEAR = "import socket, sys\nc = socket.create_connection((sys.argv[1], 7), 5)\nprint(c.recv(1), flush=True)\nc.settimeout(1.5)\nprint(c.recv(1))"


def test_a_power_cut_says_no_goodbye(hosts: tuple[Host, Host]) -> None:
    """The peer of a connection hears nothing: no reset, no end."""
    one, other = hosts
    with other.popen("python", "-c", LISTEN) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "up\n"
        with one.popen("python", "-c", HEAR, other.address) as hearing:
            assert hearing.stdout is not None
            assert hearing.stdout.readline() == "b'x'\n"
            other.power_off()
            assert not other.on
            assert hearing.stdout.read().splitlines()[-1] == "TimeoutError: timed out"
        assert listener.wait(5) != 0
    assert not one.pings(other.address)


def test_the_disk_outlives_a_power_cut_and_nothing_else_does(hosts: tuple[Host, Host]) -> None:
    other = hosts[1]
    other.write("/var/lib/kept", "kept")
    other.write(PROJECT / "kept", "kept there too")
    other.write("/run/gone", "gone")
    boot_id = other.read("/proc/sys/kernel/random/boot_id")
    machine_id = other.read("/etc/machine-id")
    assert hosts[0].pings(other.address)
    other.reboot()
    assert hosts[0].pings(other.address)  # its hardware address is the same, or this would take a while
    assert other.read("/var/lib/kept") == "kept"
    assert other.read(PROJECT / "kept") == "kept there too"
    assert other.sh("cat", "/run/gone", check=False).returncode == 1
    assert other.read("/proc/sys/kernel/random/boot_id") != boot_id
    assert other.read("/etc/machine-id") == machine_id


def test_a_host_may_switch_itself_off_and_be_booted_again(hosts: tuple[Host, Host]) -> None:
    other = hosts[1]
    other.sh("systemctl", "poweroff", check=False)
    await_(lambda: not other.on, within=30, what="the end of PID 1")
    with pytest.raises(HostError, match="other is off"):
        other.sh("true")
    other.boot()
    other.wait_running()


def test_what_cannot_be_plugged_in_leaves_nothing(lab: Lab) -> None:
    """A boot that fails half-way."""
    host = lab.host("bad")
    host.address = "10.77.0.999"
    with pytest.raises(OSError, match=r"10\.77\.0\.999"):
        host.boot()
    assert host.on
    pid = host.pid
    host.close()
    assert not host.on
    assert not Path(f"/proc/{pid}").exists()
    assert [path for path in lab_folder().iterdir() if path.name.endswith("-bad")] == []


def test_why_a_host_cannot_be_booted_is_told(lab: Lab) -> None:
    host = lab.host("worse")
    host._cgroup = "no/such/place"
    with pytest.raises(HostError, match=r"worse: error FileNotFoundError .*no/such"):
        host.boot()
    host.close()


def lab_folder() -> Path:
    """This session's."""
    (folder,) = [path for path in BASE.iterdir() if path.name.startswith(f"{os.getpid()}-")]
    return folder


# A session of its own, which tells what it has made and, once that has been looked at, ends as it is told to.
SESSION = """
    import json, os, signal, sys
    from tests.cluster.hosts import Lab
    from tests.cluster.network import CGROUP, cgroups
    with Lab() as lab:
        (host,) = lab.boot("short-lived")
        folder = lab._folder
        supervisor = int((folder / "1-short-lived" / "supervisor").read_text().partition("-")[0])
        print(json.dumps({"pids": [host.pid, supervisor], "links": [*(folder / "links").read_text().split(), host._link],
            "cgroups": [str(path) for path in cgroups(f"{CGROUP}{folder.name}-*")], "folder": str(folder)}), flush=True)
        sys.stdin.readline()
        if sys.argv[1] == "raise":
            raise RuntimeError("on purpose")
        if sys.argv[1] == "wait":
            signal.pause()
"""


@pytest.fixture
def start_session(lab: Lab) -> Iterator[StartSession]:
    """Start one that ends in a given way; what it has made."""
    with contextlib.ExitStack() as stack:

        def start(how: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
            command = [sys.executable, "-c", textwrap.dedent(SESSION), how]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
            )
            stack.callback(process.kill)
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise AssertionError(process.communicate()[1])
            made = json.loads(line)
            assert len(made["cgroups"]) == 1
            assert all(Path("/sys/class/net", link).exists() for link in made["links"])
            process.stdin.write("seen\n")
            process.stdin.flush()
            return process, made

        yield start


def left(made: dict[str, Any]) -> list[str]:
    """What of it is still there."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if made["folder"] in line]
    pids = [f"process {pid}" for pid in made["pids"] if start_time(pid) is not None]
    paths = [*made["cgroups"], made["folder"], *(f"/sys/class/net/{link}" for link in made["links"])]
    return [path for path in paths if Path(path).exists()] + pids + mounts


@pytest.mark.parametrize("how", ["end", "raise"])
def test_a_session_leaves_nothing_however_it_ends(start_session: StartSession, how: str) -> None:
    process, made = start_session(how)
    process.communicate(timeout=60)
    assert process.returncode == (0 if how == "end" else 1)
    assert left(made) == []


def test_ctrl_c_leaves_nothing(start_session: StartSession) -> None:
    process, made = start_session("wait")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert left(made) == []


def test_a_killed_session_takes_its_hosts_along_and_the_next_sweeps_up_the_rest(start_session: StartSession) -> None:
    process, made = start_session("wait")
    process.kill()
    process.communicate(timeout=60)
    bridge = f"/sys/class/net/{made['links'][0]}"
    await_(lambda: set(left(made)) == {made["folder"], bridge}, what="the end of its host")
    with alone():
        assert Path(made["folder"]).name in sweep()
    assert left(made) == []


def test_a_host_dies_with_its_supervisor(start_session: StartSession) -> None:
    process, made = start_session("wait")
    init, supervisor = made["pids"]
    os.kill(supervisor, signal.SIGKILL)
    await_(lambda: start_time(init) is None, what="the end of PID 1")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert left(made) == []


def test_sweeping_spares_the_living(lab: Lab) -> None:
    folder = lab_folder()
    assert lives(folder.name)
    with alone():
        assert folder.name not in sweep()
    assert folder.is_dir()


def test_what_still_runs_of_a_dead_session_is_ended(lab: Lab) -> None:
    """Known by the name of its cgroup, which bears the session's identity."""
    root = unified()
    assert root is not None
    session = "4194399-1"  # no process has such a number
    group = root / f"{CGROUP}{session}-1" / "init.scope"
    group.mkdir(parents=True)
    (BASE / session).mkdir()
    with subprocess.Popen(["sleep", "1000"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        with alone():
            assert session in sweep()
        assert process.wait(5) == -signal.SIGKILL
    assert not group.parent.exists()
    assert not (BASE / session).exists()
