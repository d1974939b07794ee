"""What the daemon finds on a machine that has GPUs: the real NVML, the real kernel. Run by `make test-gpu`; needs `pip install elasticd[gpu]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticd.daemon.config import DaemonConfig
from elasticd.daemon.gpuhealth import faults_of
from elasticd.daemon.health import gpus
from elasticd.daemon.machine import inventory
from elasticd.daemon.nvml import NvmlError, ask

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def count() -> int:
    """GPUs of this machine."""
    try:
        found = ask(lambda nvml: int(nvml.nvmlDeviceGetCount()))
    except NvmlError as error:
        pytest.skip(f"the GPUs cannot be asked: {error}")
    if not found:
        pytest.skip("no GPU, no driver, or no pynvml on this machine")
    return found


def config(**values: Any) -> DaemonConfig:
    return DaemonConfig.model_validate({"etcd": {"endpoints": ["127.0.0.1:2379"]}, **values})


def test_each_gpu_is_a_slot(count: int) -> None:
    found = inventory(config())
    assert found.problems == ()
    assert len(found.slots) == count
    assert len({slot.id for slot in found.slots}) == count
    for slot in found.slots:
        assert slot.gpu_uuid == slot.id
        assert slot.id.startswith("GPU-")
        assert set(slot.cpus) <= os.sched_getaffinity(0)
        assert slot.numa is None or Path(f"/sys/devices/system/node/node{slot.numa}").is_dir()


def test_the_kernel_knows_the_pci_device_that_nvml_names() -> None:
    def known(nvml: Any) -> bool:
        bus = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByIndex(0)).busId
        domain, _, rest = (bus.decode() if isinstance(bus, bytes) else bus).lower().partition(":")
        return Path(f"/sys/bus/pci/devices/{int(domain, 16):04x}:{rest}").is_dir()

    assert ask(known) is True


def test_a_slots_uuid_chooses_just_that_gpu_for_a_worker() -> None:
    """What CUDA_VISIBLE_DEVICES does with it, as torch sees it."""
    slot = inventory(config()).slots[-1]
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot.id}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", slot.id.removeprefix("GPU-")]


def test_gpus_that_work_pass_the_checks_and_each_question_is_known_to_this_driver_or_passed_over() -> None:
    uuids = [slot.id for slot in inventory(config()).slots]
    assert ask(lambda nvml: faults_of(nvml, uuids)) == ()
    found = gpus(uuids)
    assert (found.ok, found.detail) == (True, "")


def test_a_gpu_that_is_not_there_fails_the_check() -> None:
    found = gpus(["GPU-00000000-0000-0000-0000-000000000000"])
    assert not found.ok
    assert found.detail.startswith("GPU-00000000-0000-0000-0000-000000000000: it is no longer there (")
