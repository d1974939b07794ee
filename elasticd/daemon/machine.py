"""What this machine is: its name, its address, its GPUs with the CPUs near them, and whether systemd runs it.

Owns: looking, once at a daemon's start. Must not: change anything, or judge whether what it finds is well (`health` does).
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self

from elasticd.daemon.config import DaemonConfig, Supervision
from elasticd.daemon.nvml import NvmlError, ask, text
from elasticd.daemon.slots import Inventory, Slot
from elasticd.errors import UsageError
from elasticd.rendezvous.address import address_on_the_way_to
from elasticd.rendezvous.keys import node_name
from elasticd.rendezvous.nodelock import boot_id

__all__ = ["AGENT_UNIT", "Inventory", "Machine", "Slot", "inventory", "parse_cpus", "supervision"]

AGENT_UNIT: Final = "elasticd-agent@.service"
_UNIT_FOLDERS: Final = ("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This machine, as a daemon sees it at its start.

    Attributes:
        node: the node's name.
        address: where peers reach it.
        boot_id: of this boot of its kernel.
        supervision: never AUTO.
    """

    node: str
    address: str
    boot_id: str
    supervision: Supervision
    inventory: Inventory

    @classmethod
    def look(cls, config: DaemonConfig) -> Self:
        """Look at everything. Where the configuration says something, that counts.

        Raises:
            UsageError: it has no address on the way to etcd, or systemd is asked for and cannot be used.
        """
        return cls(
            node=config.node or node_name(socket.gethostname()),
            address=config.address or _address(config.etcd.endpoints),
            boot_id=boot_id(),
            supervision=supervision(config.agents),
            inventory=inventory(config),
        )


def supervision(wanted: Supervision, *, root: Path = Path("/")) -> Supervision:
    """What agents are to be; AUTO is units if systemd is this machine's init and our template unit is installed, else processes.

    Raises:
        UsageError: units are asked for, and cannot be had.
    """
    if wanted not in (Supervision.AUTO, Supervision.SYSTEMD):
        return wanted
    lacking = _without_systemd(root)
    if not lacking:
        return Supervision.SYSTEMD
    if wanted is Supervision.SYSTEMD:
        raise UsageError(f'agents = "systemd", and {lacking}', remedy='install the units, or say agents = "processes"')
    return Supervision.PROCESSES


def inventory(config: DaemonConfig, *, sysfs: Path = Path("/sys")) -> Inventory:
    """The slots of this machine: one for each GPU, `config.slots` at most; without any GPU `config.slots`, or one.

    GPUs that are there and cannot be asked leave no slots, and a problem: a job made for GPUs must not find itself on the CPU.
    """
    try:
        found = ask(lambda nvml: _gpus(nvml, sysfs))
    except NvmlError as error:
        return Inventory(slots=(), problems=(f"no GPU can be used: {error}",))
    if found is None or (not found.slots and not found.problems):
        return Inventory(slots=tuple(Slot(id=f"slot-{number}") for number in range(config.slots or 1)))
    return Inventory(slots=found.slots[: config.slots], problems=found.problems)


def _gpus(nvml: Any, sysfs: Path) -> Inventory:
    slots: list[Slot] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text(nvml.nvmlDeviceGetUUID(handle))
            numa = _numa_node(text(nvml.nvmlDeviceGetPciInfo(handle).busId), sysfs)
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} cannot be used: {error}")
            continue
        slots.append(Slot(id=uuid, gpu_uuid=uuid, cpus=_cpus(numa, sysfs), numa=numa))
    return Inventory(slots=tuple(slots), problems=tuple(problems))


def _numa_node(bus_id: str, sysfs: Path) -> int | None:
    """NUMA node of a PCI device; NVML writes 00000000:3B:00.0 for what the kernel calls 0000:3b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cpus(numa: int | None, sysfs: Path) -> tuple[int, ...]:
    """CPUs of a NUMA node that this process may use."""
    if numa is None:
        return ()
    try:
        near = parse_cpus((sysfs / f"devices/system/node/node{numa}/cpulist").read_text())
    except (OSError, ValueError):
        return ()
    return tuple(sorted(near & os.sched_getaffinity(0)))


def parse_cpus(listing: str) -> frozenset[int]:
    """The kernel's "0-3,8" as {0, 1, 2, 3, 8}.

    Raises:
        ValueError: it is no such list.
    """
    cpus: set[int] = set()
    for part in filter(None, listing.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _address(endpoints: tuple[str, ...]) -> str:
    """Ours on the way to etcd; one that only this machine can reach is the last resort, as where a member of etcd runs on each node."""
    found: list[str] = []
    for endpoint in endpoints:
        try:
            found.append(address_on_the_way_to(endpoint))
        except (OSError, ValueError):
            continue
    if not found:
        raise UsageError(f"this machine has no route to any of {', '.join(endpoints)}", remedy="check etcd.endpoints, or give address")
    return next((address for address in found if not ip_address(address.partition("%")[0]).is_loopback), found[0])


def _without_systemd(root: Path) -> str:
    """What is lacking for agents to be units, "" if nothing is."""
    if not (root / "run/systemd/system").is_dir():
        return "systemd is not the init of this machine"
    if shutil.which("systemctl") is None:
        return "there is no systemctl in PATH"
    if not any((root / folder / AGENT_UNIT).is_file() for folder in _UNIT_FOLDERS):
        return f"{AGENT_UNIT} is not installed"
    return ""
