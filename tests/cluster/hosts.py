"""Throw-away hosts on one machine: boot them, work in them, cut their network, take their power.

Owns: the hosts of one test session from boot to removal. Must not: know what runs on them (etcd, elasticd).

A host is a process tree under `_boot.py`, which dies with whoever holds its stdin: this process. So nothing of it outlives a session, even one
that is killed; bridge and folders of such a one are swept away by the next. Hosts see the machine's files as they were when they booted: what a
host is to read later is given to it by `write` or `put_tree`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.cluster.network import BASE, CGROUP, Network, alone, cgroups, identity, ip, remove_cgroup, remove_link, sweep
from tests.cluster.places import MOVES, PREFIX, PROJECT, PYTHON, hidden, installation

if TYPE_CHECKING:
    from collections.abc import Sequence

BOOT = Path(__file__).with_name("_boot.py")
TOOLS = ("ip", "nsenter", "setpriv", "runuser", "dbus-daemon", "tar")
ENVIRONMENT = {"PATH": f"{PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}


PING = """\
import socket, sys, time
address, timeout = sys.argv[1], float(sys.argv[2])
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
    raw.settimeout(timeout)
    raw.sendto(bytes([8, 0, 0xF7, 0xFD, 0, 1, 0, 1]), (address, 0))  # echo request, id 1, number 1, with its checksum
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer, (source, _) = raw.recvfrom(1024)
        if source == address and answer[20] == 0:
            sys.exit(0)
sys.exit(1)
"""
"""For `pings`: ping(8) is not on every machine."""


class HostError(AssertionError):
    """A host did not do what a test needs of it."""


def missing() -> str:
    """Why this machine cannot have hosts, "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    unseen = sorted(hidden(installation()))
    if unseen:
        return f"needs a Python that is installed elsewhere than in {unseen[0]}, where a host or a unit on it has files of its own"
    if not any(Path(path).exists() for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd")):
        return "needs the package systemd"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (packages iproute2, util-linux, dbus)"
    if not any(Path(path).exists() for path in ("/usr/lib/polkit-1/polkitd", "/usr/libexec/polkitd")):
        return "needs the package polkitd"
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        return "needs overlayfs in the kernel"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True, text=True, timeout=20)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def shown() -> dict[Path, Path]:
    """What every host is to see of this machine, and where: the project, its environment and their Python."""
    return {path: path for path in installation()} | MOVES


class Host:
    """One host. `boot` returns before systemd is up; `wait_running` waits for that.

    Args:
        name: its hostname.
        address: on the session's network.
        folder: its own, under the session's.
        cgroup: of a name that no other has.
    """

    def __init__(self, name: str, address: str, network: Network, *, folder: Path, cgroup: str) -> None:
        self.name = name
        self.address = address
        self._network = network
        self._folder = folder
        self._cgroup = cgroup
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._pidfd = -1
        self._link = ""

    # --- power ---------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Power on. After a power cut, its disk is as it was."""
        self._ask("boot")
        self._link = self._network.plug(self._pid, self.address)
        self._ask("go")

    def wait_running(self, timeout: float = 60) -> None:
        """Wait until systemd says that everything it was to start runs.

        Raises:
            HostError: it does not within `timeout` seconds, or some unit failed; tells which.
        """
        deadline = time.monotonic() + timeout
        state = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = max(0.1, deadline - time.monotonic())
                state = self.sh("systemctl", "is-system-running", "--wait", check=False, timeout=left).stdout.strip()
            if state == "running":
                return
            if state == "degraded":
                break
            time.sleep(0.1)
        failed = self.sh("systemctl", "--failed", "--no-legend", "--plain", check=False).stdout
        raise HostError(f"{self.name} is {state or 'not up'} after {timeout:g} s; failed: {failed.strip() or 'none'}; its console:\n{self.console()}")

    def power_off(self) -> None:
        """A power cut: silence on the network, and every process gone. The disk stays, with what was not synced too."""
        if not self.on:
            return
        self.cut()  # first: ending processes would send the peers of their connections a goodbye
        self._off()

    def reboot(self, timeout: float = 60) -> None:
        """A power cut, and on again; returns when it runs."""
        self.power_off()
        self.boot()
        self.wait_running(timeout)

    @property
    def on(self) -> bool:
        """Whether PID 1 lives."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    @property
    def pid(self) -> int:
        """PID 1 of the host as the machine sees it."""
        if not self.on:
            raise HostError(f"{self.name} is off")
        return self._pid

    def console(self) -> str:
        """The end of what systemd wrote on the console."""
        with contextlib.suppress(OSError):
            return (self._folder / "console.log").read_text(errors="replace")[-3000:]
        return ""

    def close(self) -> None:
        """Power off and forget the disk. May be called again."""
        if self._supervisor is None:
            return
        supervisor, self._supervisor = self._supervisor, None
        self._unplug()
        for end in (supervisor.stdin, supervisor.stdout):
            assert end is not None  # both are pipes
            with contextlib.suppress(OSError):
                end.close()
        try:
            supervisor.wait(20)
        except subprocess.TimeoutExpired:  # PID 1 dies with it
            supervisor.kill()
            supervisor.wait()
        finally:
            self._close_pidfd()
            for group in cgroups(self._cgroup):  # the supervisor was killed
                remove_cgroup(group)
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- network -------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull the cable."""
        ip(f"link set {self._link} down")

    def heal(self) -> None:
        """Put the cable back."""
        ip(f"link set {self._link} up")

    def pings(self, address: str, timeout: float = 1.0) -> bool:
        """Whether an echo comes back from an address within `timeout` seconds."""
        return self.sh("python", "-I", "-S", "-c", PING, address, str(timeout), check=False).returncode == 0

    # --- work in it ----------------------------------------------------------------------------------------------------

    def sh(
        self,
        *argv: str | Path,
        check: bool = True,
        timeout: float = 60,
        input: str | bytes | None = None,  # noqa: A002 - as subprocess.run has it
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host, as root or as `user`, without a shell. The project's virtual environment is on its PATH.

        Raises:
            HostError: it did not return 0 and `check` is true; tells what it wrote.
            subprocess.TimeoutExpired: it took more than `timeout` seconds, and was killed.
        """
        data = input.encode() if isinstance(input, str) else input
        command = self._command(argv, user)
        if data is None:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=ENVIRONMENT)
        else:
            done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, env=ENVIRONMENT)
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if check and done.returncode:
            raise HostError(f"{self.name}: {shlex.join(map(str, argv))} returned {done.returncode}\n{out[-2000:]}\n{err[-2000:]}")
        return subprocess.CompletedProcess(argv, done.returncode, out, err)

    def python(self, code: str, *, user: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run code in the project's virtual environment, with the project's packages; otherwise as `sh`."""
        return self.sh("env", f"PYTHONPATH={PROJECT}", PYTHON, "-c", code, user=user, check=check)

    def popen(self, *argv: str | Path, user: str | None = None) -> subprocess.Popen[str]:
        """Start a command in the host, with pipes for its output. It dies with this Popen's process, and with the host."""
        return subprocess.Popen(
            self._command(argv, user), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )

    def write(self, path: str | Path, content: str | bytes, *, mode: int = 0o644, owner: str = "root:root") -> None:
        """Write a file in one go; its directories are made."""
        script = 'set -e; umask 077; (umask 022; mkdir -p "$(dirname "$1")"); cat >"$1.new"; chown "$2" "$1.new"; chmod "$3" "$1.new"; mv "$1.new" "$1"'
        self.sh("sh", "-c", script, "sh", path, owner, f"{mode:o}", input=content if isinstance(content, bytes) else content.encode())

    def read(self, path: str | Path) -> str:
        """A text file's content."""
        return self.sh("cat", path).stdout

    def put_tree(self, source: Path, target: str | Path) -> None:
        """Copy a directory of the machine, with modes and owners, into one of the host; directories that are there keep theirs."""
        packed = subprocess.run(["tar", "-C", str(source), "-c", "."], capture_output=True, check=True, timeout=60).stdout
        self.sh("mkdir", "-p", target)
        self.sh("tar", "-C", target, "-x", "-p", "--numeric-owner", "--no-overwrite-dir", input=packed)

    def journal(self, unit: str) -> str:
        """What a unit has written since the host was powered on, and what systemd said about it."""
        return self.sh("journalctl", "--no-pager", "-o", "short-precise", "-u", unit).stdout

    # --- inside --------------------------------------------------------------------------------------------------------

    def _command(self, argv: Sequence[str | Path], user: str | None) -> list[str]:
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-n", "-C", "-r", "-w", "--"]
        who = ["runuser", "-u", user, "--"] if user else []
        # nsenter does not pass a signal on: whoever kills it means the command.
        return [*enter, *who, "setpriv", "--pdeathsig", "KILL", "--", *map(str, argv)]

    def _ask(self, word: str) -> None:
        supervisor = self._supervisor or self._start_supervisor()
        assert supervisor.stdin is not None  # both are pipes
        assert supervisor.stdout is not None
        if word == "boot" and self._pidfd >= 0:
            self._off()  # it went down by itself: nobody has buried it yet
        with contextlib.suppress(BrokenPipeError):  # it has died; then there is no answer
            supervisor.stdin.write(f"{word}\n".encode())
        if not select.select([supervisor.stdout], [], [], 20)[0]:
            raise HostError(f"{self.name}: no answer to {word!r} within 20 s")
        answer = supervisor.stdout.readline().decode().strip()
        kind, _, number = answer.partition(" ")
        if kind == "pid":
            self._pid = int(number)
            self._pidfd = os.pidfd_open(self._pid)
        elif kind not in {"up", "off"}:
            raise HostError(f"{self.name}: {answer or 'its supervisor died'}\n{self.console()}")

    def _start_supervisor(self) -> subprocess.Popen[bytes]:
        self._folder.mkdir()
        views = [str(path) for view in sorted(shown().items()) for path in view]
        command = [sys.executable, "-I", "-S", "-B", str(BOOT), self.name, self.address, str(self._folder), self._cgroup, *views]
        with (self._folder / "console.log").open("ab") as errors:
            # A session of its own: Ctrl-C is for us, and reaches the host through us. Unbuffered: see select above.
            started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, bufsize=0)
        (self._folder / "supervisor").write_text(identity(started.pid))
        self._supervisor = started
        return started

    def _off(self) -> None:
        self._close_pidfd()
        self._ask("kill")
        self._unplug()

    def _unplug(self) -> None:
        if self._link:
            remove_link(self._link)
            self._link = ""

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Lab:
    """The hosts of one test session, and their network; a context manager. Everything is removed at its end, whatever happened."""

    def __init__(self) -> None:
        self._session = identity(os.getpid())
        self._folder = BASE / self._session
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []
        self._network = Network(self._folder)
        self.swept: list[str] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack, alone():
            self.swept = sweep()
            self._folder.mkdir()
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.enter_context(self._network)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def host(self, name: str) -> Host:
        """A new host, off. Its address is the next free one."""
        place = len(self._hosts) + 1
        host = Host(
            name,
            self._network.address(place),
            self._network,
            folder=self._folder / f"{place}-{name}",
            cgroup=f"{CGROUP}{self._session}-{place}",
        )
        self._hosts.append(host)
        self._stack.callback(host.close)
        return host

    def boot(self, *names: str, timeout: float = 60) -> list[Host]:
        """New hosts, booted side by side, that run and know each other by name."""
        hosts = [self.host(name) for name in names]
        boot(*hosts, timeout=timeout)
        for host in hosts:
            host.sh("tee", "-a", "/etc/hosts", input="".join(f"{other.address} {other.name}\n" for other in hosts if other is not host))
        return hosts


def boot(*hosts: Host, timeout: float = 60) -> None:
    """Power hosts on side by side and wait until they run."""
    for host in hosts:
        host.boot()
    for host in hosts:
        host.wait_running(timeout)
