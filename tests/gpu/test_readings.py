"""What the daemon's metrics say of real GPUs, against what the driver's own program says. Run by `make test-gpu`; needs `pip install elasticd[gpu]`."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from elasticd.daemon.gpureadings import Gpus, bus_of, readings
from elasticd.daemon.nvml import NvmlError, ask
from tests.support.etcd import await_

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


def smi(*fields: str) -> list[list[str]]:
    """What nvidia-smi says, a row for each GPU, without units."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi on this machine")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def test_every_gpu_has_every_number_in_base_units(count: int) -> None:
    found = ask(readings)
    assert found is not None
    assert [one.index for one in found] == list(range(count))
    for one in found:
        assert one.utilization is not None
        assert 0 <= one.utilization <= 1
        assert one.memory_total is not None
        assert one.memory_used is not None
        assert 0 <= one.memory_used <= one.memory_total
        assert one.temperature is not None
        assert 10 < one.temperature < 120
        assert one.power is not None
        assert 1 < one.power < 2000
        assert one.throttled is not None


def test_addresses_and_memory_are_those_that_nvidia_smi_shows(count: int) -> None:
    found = ask(readings)
    assert found is not None
    for one, (index, bus, total) in zip(found, smi("index", "pci.bus_id", "memory.total"), strict=True):
        assert (one.index, one.bus) == (int(index), bus_of(bus))
        assert (one.memory_total or 0) >> 20 == pytest.approx(int(total), abs=2)


def test_a_look_at_all_gpus_takes_less_than_a_second(count: int) -> None:
    gpus = Gpus()
    began = time.monotonic()
    assert len(await_(gpus.read, what="the GPUs")) == count
    assert time.monotonic() - began < 1.0
    assert gpus.index_of(gpus.read()[0].bus) == 0
