"""The network between the hosts of one test session, and what sessions leave behind.

Owns: a bridge with a subnet of its own, cables (veth pairs) to hosts, and sweeping away what dead sessions left. Must not: start hosts.

A session is known by its process id and that process's start time: a name alone proves nothing. Names of links are random, so that two sessions
do not collide; each is written down before it is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = Path("/run/elasticd-hosts")
"""A folder for each session. Root's, and forgotten by a reboot, as links and cgroups are."""
CGROUP = "elasticd-hosts-"
MACHINE = 254
"""The machine's own place in the subnet."""


class Network:
    """A bridge that hosts are plugged into; a context manager. The machine itself is on it, as `.254`.

    Where the machine filters bridged packets (net.bridge.bridge-nf-call-iptables with a FORWARD policy of DROP, as Docker sets it), hosts do not
    reach each other.

    Args:
        folder: the session's, where the names of links are written down.
    """

    def __init__(self, folder: Path) -> None:
        self._links = folder / "links"
        self._bridge = f"edh{secrets.token_hex(4)}"
        self._plugged = 0
        self._subnet: ipaddress.IPv4Network | None = None

    def __enter__(self) -> Self:
        self._links.write_text(f"{self._bridge}\n")
        self._subnet = free_subnet()
        try:
            ip(
                f"link add {self._bridge} type bridge",
                f"addr add {self._subnet[MACHINE]}/{self._subnet.prefixlen} dev {self._bridge}",
                f"link set {self._bridge} up",
            )
        except BaseException:
            remove_link(self._bridge)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        remove_link(self._bridge)

    def address(self, place: int) -> str:
        """The address of the host at `place`, which counts from 1."""
        assert self._subnet is not None  # entered
        if not 1 <= place < MACHINE:
            raise ValueError(f"no place {place} in {self._subnet}")
        return str(self._subnet[place])

    def plug(self, pid: int, address: str) -> str:
        """Lay a cable to the network namespace of `pid`, where it is called host0; the name of our end."""
        self._plugged += 1
        link = f"{self._bridge}-{self._plugged:x}"
        # The same hardware address after each boot, as a machine has: its neighbours remember it.
        mac = ":".join(["02", "ed", *(f"{int(part) % 256:02x}" for part in address.split("."))])
        ip(f"link add {link} type veth peer name host0 address {mac} netns {pid}", f"link set {link} master {self._bridge} up")
        try:
            ip(f"addr add {address}/24 dev host0", "link set host0 up", "link set lo up", netns=pid)
        except BaseException:
            remove_link(link)
            raise
        return link


def ip(*lines: str, netns: int | None = None) -> None:
    """Commands of ip(8), in the network namespace of process `netns` if one is given."""
    enter = ["nsenter", "-t", str(netns), "-n", "--"] if netns is not None else []
    done = subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {'; '.join(lines)}: {done.stderr.strip()}")


def remove_link(name: str) -> None:
    """Remove a link if it is there; a cable goes with either end."""
    if Path("/sys/class/net", name).exists():
        subprocess.run(["ip", "link", "del", name], capture_output=True, timeout=20)


def free_subnet() -> ipaddress.IPv4Network:
    """A /24 that no route of this machine touches, but for routes to half the world. Sessions ask one at a time (`alone`)."""
    told = subprocess.run(["ip", "-j", "-4", "route", "show", "table", "all"], capture_output=True, text=True, check=True, timeout=20).stdout
    taken = []
    for route in json.loads(told):
        with contextlib.suppress(ValueError):  # "default"
            taken.append(ipaddress.ip_network(route["dst"]))
    for number in range(256):
        subnet = ipaddress.IPv4Network(f"10.77.{(os.getpid() + number) % 256}.0/24")
        if not any(net.version == 4 and net.prefixlen >= 9 and net.overlaps(subnet) for net in taken):
            return subnet
    raise OSError("no free subnet in 10.77.0.0/16 for the hosts of the tests")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of all sessions on this machine."""
    BASE.mkdir(mode=0o700, exist_ok=True)
    if BASE.stat().st_uid != os.getuid():
        raise OSError(f"{BASE} belongs to another user")
    with (BASE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_time(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


def identity(pid: int) -> str:
    """`PID-STARTTIME`, which no other process ever has until the machine reboots."""
    return f"{pid}-{start_time(pid)}"


def lives(who: str) -> bool:
    """Whether the process of this identity runs."""
    pid = who.partition("-")[0]
    return pid.isdecimal() and start_time(int(pid)) is not None and identity(int(pid)) == who


def sweep() -> list[str]:
    """Remove what dead sessions left; their identities. To be called `alone`."""
    dead = [folder for folder in BASE.iterdir() if folder.is_dir() and not lives(folder.name)]
    for folder in dead:
        for supervisor in folder.glob("*/supervisor"):
            who = supervisor.read_text()
            if lives(who):  # it ends by itself when its session does; this one hangs
                os.kill(int(who.partition("-")[0]), signal.SIGKILL)
        for link in reversed((folder / "links").read_text().split() if (folder / "links").exists() else []):
            remove_link(link)
        for group in cgroups(f"{CGROUP}{folder.name}-*"):
            remove_cgroup(group)
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in dead]


def unified() -> Path | None:
    """Where the machine has the unified cgroup hierarchy mounted; it is the same one everywhere."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


def cgroups(pattern: str) -> list[Path]:
    """Cgroups at the root by name, if the machine has the unified hierarchy mounted at all."""
    root = unified()
    return list(root.glob(pattern)) if root is not None else []


def remove_cgroup(group: Path, within: float = 5.0) -> None:
    """End what is still in a cgroup, and remove it; what cannot be removed within so many seconds stays for the next sweep."""
    deadline = time.monotonic() + within
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while group.exists() and time.monotonic() < deadline:
        _remove_empty(group)
        time.sleep(0.01)


def _remove_empty(group: Path) -> None:
    for path in [*sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True), group]:
        with contextlib.suppress(OSError):
            path.rmdir()
