"""What a daemon finds on its machine. NVML is a stand-in here (tests.support.nvml), the kernel's files about PCI devices are laid out as it does."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from elasticd.daemon import nvml
from elasticd.daemon.config import DaemonConfig, Supervision
from elasticd.daemon.machine import AGENT_UNIT, Inventory, Machine, Slot, inventory, parse_cpus, supervision
from elasticd.errors import UsageError
from elasticd.rendezvous.keys import checked_name, node_name
from elasticd.rendezvous.nodelock import boot_id
from tests.support.nvml import Gpu, StandInNvml

if TYPE_CHECKING:
    from collections.abc import Callable

CPUS = tuple(sorted(os.sched_getaffinity(0)))


def config(**values: Any) -> DaemonConfig:
    return DaemonConfig.model_validate({"etcd": {"endpoints": ["127.0.0.1:2379"]}, **values})


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    standin = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", standin)
    return standin


@pytest.fixture
def device(tmp_path: Path) -> Callable[[str, str], None]:
    """Lay out a PCI device on a NUMA node, and the node with all our CPUs and one that we may not use."""

    def lay_out(address: str, numa: str) -> None:
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        node = tmp_path / f"devices/system/node/node{numa}"
        node.mkdir(parents=True, exist_ok=True)
        (node / "cpulist").write_text(",".join(map(str, [*CPUS, 9999])) + "\n")

    return lay_out


def test_this_machine_as_it_is() -> None:
    machine = Machine.look(config(agents="processes"))
    assert checked_name("node", machine.node) == machine.node
    assert machine.boot_id == boot_id()
    assert machine.address == "127.0.0.1"
    assert machine.supervision is Supervision.PROCESSES


def test_what_the_configuration_says_counts() -> None:
    machine = Machine.look(config(node="gpu-7", address="10.0.0.7", agents="children"))
    assert (machine.node, machine.address, machine.supervision) == ("gpu-7", "10.0.0.7", Supervision.CHILDREN)


def test_a_machine_without_a_way_to_etcd_says_so() -> None:
    with pytest.raises(UsageError, match=r"^this machine has no route to any of no-such-host\.invalid:2379; check etcd.endpoints, or give address$"):
        Machine.look(config(etcd={"endpoints": ["no-such-host.invalid:2379"]}))


def test_an_address_that_others_can_reach_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each node runs a member of etcd, the first endpoint is often this machine itself. The routing table is pretended."""
    addresses = {"localhost:2379": "127.0.0.1", "etcd-2:2379": "10.0.0.7"}
    monkeypatch.setattr("elasticd.daemon.machine.address_on_the_way_to", addresses.__getitem__)
    assert Machine.look(config(etcd={"endpoints": list(addresses)})).address == "10.0.0.7"
    assert Machine.look(config(etcd={"endpoints": ["localhost:2379"]})).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "name"),
    [("gpu-7.example.org", "gpu-7.example.org"), ("GPU 7", "GPU-7"), ("-.x", "x"), ("n\u00f6de", "n-de"), ("", "node"), ("a" * 200, "a" * 128)],
)
def test_a_hosts_name_becomes_a_nodes(host: str, name: str) -> None:
    assert node_name(host) == name
    assert checked_name("node", name) == name


# --- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "ids"), [(None, ["slot-0"]), (3, ["slot-0", "slot-1", "slot-2"])])
def test_without_a_gpu_there_are_as_many_slots_as_the_configuration_says(standin: StandInNvml, slots: int | None, ids: list[str]) -> None:
    found = inventory(config(slots=slots))
    assert found == Inventory(slots=tuple(Slot(id=name) for name in ids))
    assert standin.sessions == 0


def test_without_the_module_there_are_no_gpus_and_one_line_for_whoever_debugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what Python itself puts there for "cannot be imported"
    with capture_logs() as logs:
        assert [slot.id for slot in inventory(config()).slots] == ["slot-0"]
    assert [(line["log_level"], line["event"]) for line in logs] == [("debug", "no_gpus")]


@pytest.mark.parametrize("code", [StandInNvml.NVML_ERROR_LIBRARY_NOT_FOUND, StandInNvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_there_are_no_gpus_and_one_line_for_whoever_debugs(standin: StandInNvml, code: int) -> None:
    standin.init_error = code
    with capture_logs() as logs:
        assert [slot.id for slot in inventory(config()).slots] == ["slot-0"]
    assert [(line["log_level"], line["event"]) for line in logs] == [("debug", "no_gpus")]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_each_gpu_is_a_slot_with_the_cpus_near_it(standin: StandInNvml, tmp_path: Path, device: Callable[[str, str], None], *, as_bytes: bool) -> None:
    standin.as_bytes = as_bytes
    standin.gpus = [Gpu("GPU-a", "00000000:3B:00.0"), Gpu("GPU-b", "00010000:86:00.0"), Gpu("GPU-c", "00000000:AF:00.0"), Gpu("GPU-d", "rubbish")]
    device("0000:3b:00.0", "0")
    device("10000:86:00.0", "1")
    device("0000:af:00.0", "-1")  # what the kernel says where there is but one node
    found = inventory(config(), sysfs=tmp_path)
    assert found.slots == (
        Slot(id="GPU-a", gpu_uuid="GPU-a", cpus=CPUS, numa=0),
        Slot(id="GPU-b", gpu_uuid="GPU-b", cpus=CPUS, numa=1),
        Slot(id="GPU-c", gpu_uuid="GPU-c"),
        Slot(id="GPU-d", gpu_uuid="GPU-d"),
    )
    assert found.problems == ()
    assert standin.sessions == 0, "it was shut down"


def test_a_smaller_number_of_slots_leaves_gpus_out_and_a_greater_one_makes_none(standin: StandInNvml) -> None:
    standin.gpus = [Gpu("GPU-a"), Gpu("GPU-b")]
    assert [slot.id for slot in inventory(config(slots=1)).slots] == ["GPU-a"]
    assert [slot.id for slot in inventory(config(slots=8)).slots] == ["GPU-a", "GPU-b"]


def test_a_lost_gpu_is_named_and_the_others_are_used(standin: StandInNvml) -> None:
    standin.gpus = [Gpu("GPU-a", lost=True), Gpu("GPU-b")]
    found = inventory(config())
    assert [slot.id for slot in found.slots] == ["GPU-b"]
    assert found.problems == ("GPU 0 cannot be used: error 15",)


def test_gpus_that_cannot_be_asked_leave_no_slots_rather_than_one_on_the_cpu(standin: StandInNvml) -> None:
    standin.init_error = StandInNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert inventory(config(slots=4)) == Inventory(slots=(), problems=("no GPU can be used: NVML: error 18",))
    standin.init_error = None
    standin.gpus = [Gpu("GPU-a", lost=True)]
    assert inventory(config(slots=4)) == Inventory(slots=(), problems=("GPU 0 cannot be used: error 15",))


def test_a_driver_that_hangs_is_not_waited_for_and_not_asked_a_second_time(standin: StandInNvml) -> None:
    standin.hang = threading.Event()
    try:
        for said in (r"^NVML: no answer within 0\.05 s$", "^NVML still owes the answer to an earlier question$"):
            with pytest.raises(nvml.NvmlSilenceError, match=said):
                nvml.ask(lambda _: 1, seconds=0.05)
    finally:
        standin.hang.set()
    assert nvml.ask(lambda _: 1, seconds=10) == 1, "it has come back"


@pytest.mark.parametrize(("listing", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set[int]())])
def test_a_list_of_cpus_as_the_kernel_writes_it(listing: str, cpus: set[int]) -> None:
    assert parse_cpus(listing) == cpus


# --- systemd -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root where all is there that units need."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/system").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/system" / AGENT_UNIT).write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_agents_are_units_where_systemd_runs_the_machine_and_has_our_template(systemd: Path) -> None:
    assert supervision(Supervision.AUTO, root=systemd) is Supervision.SYSTEMD
    assert supervision(Supervision.SYSTEMD, root=systemd) is Supervision.SYSTEMD


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("run/systemd/system", "systemd is not the init of this machine"),
        ("bin/systemctl", "there is no systemctl in PATH"),
        (f"usr/lib/systemd/system/{AGENT_UNIT}", f"{AGENT_UNIT} is not installed"),
    ],
)
def test_without_one_of_the_three_agents_are_processes_and_units_a_clear_error(systemd: Path, missing: str, said: str) -> None:
    path = systemd / missing
    path.rmdir() if path.is_dir() else path.unlink()
    assert supervision(Supervision.AUTO, root=systemd) is Supervision.PROCESSES
    with pytest.raises(UsageError) as caught:
        supervision(Supervision.SYSTEMD, root=systemd)
    assert str(caught.value) == f'agents = "systemd", and {said}; install the units, or say agents = "processes"'


@pytest.mark.parametrize("wanted", [Supervision.PROCESSES, Supervision.CHILDREN])
def test_what_is_asked_for_by_name_is_not_second_guessed(systemd: Path, wanted: Supervision) -> None:
    assert supervision(wanted, root=systemd) is wanted
