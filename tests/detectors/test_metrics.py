"""What monitors say is understood by its names: NVIDIA's, Prometheus' and our own daemon's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.metrics import COUNTERS, GAUGES, METRICS, NAMES, prometheus_text, reading_of
from detectors.observations import Reading
from elasticd.daemon.metrics import gpus, host

pytestmark = pytest.mark.timeout(30)

DCGM = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",modelName="NVIDIA H100 80GB HBM3",Hostname="node-7"} 41
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",modelName="NVIDIA H100 80GB HBM3",Hostname="node-7"} 83
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",Hostname="node-7"} 97
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",Hostname="node-7"} 1024
DCGM_FI_DEV_XID_ERRORS{gpu="1",Hostname="node-7",err_code="79",err_msg="GPU has fallen off the bus, \\"79\\""} 79
DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{gpu="1",Hostname="node-7"} 3
DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL{gpu="1",Hostname="node-7"} 4
DCGM_FI_PROF_SOMETHING{gpu="1",Hostname="node-7"} 5
"""
NODE = """\
node_load1 1.5
node_memory_MemTotal_bytes 6.7e+10
node_filesystem_avail_bytes{device="/dev/sda1",fstype="ext4",mountpoint="/"} 1000
node_filesystem_avail_bytes{device="/dev/loop1",fstype="squashfs",mountpoint="/snap/x"} 0
node_filesystem_files_free{device="/dev/sda1",fstype="ext4",mountpoint="/"} 7
node_network_receive_bytes_total{device="lo"} 999
node_network_receive_bytes_total{device="eth0"} 10
node_network_receive_bytes_total{device="eth1"} 20 1796093927000
node_cpu_seconds_total{cpu="0",mode="idle"} 70
node_cpu_seconds_total{cpu="0",mode="user"} 20
node_cpu_seconds_total{cpu="1",mode="system"} 10
node_vmstat_oom_kill NaN
this is no sample
"""


def test_gpus_of_dcgm_exporter() -> None:
    assert list(prometheus_text(DCGM, at=5.0, node="scraper")) == [
        Reading(at=5.0, node="node-7", gpu=0, values={"temperature_c": 41.0}),
        Reading(
            at=5.0,
            node="node-7",
            gpu=1,
            values={"temperature_c": 83.0, "utilization": 0.97, "memory_used_bytes": 1024 * 1048576.0, "xid": 79.0, "nvlink_errors": 7.0},
        ),
    ]


def test_a_machine_of_node_exporter() -> None:
    (reading,) = prometheus_text(NODE, at=5.0, node="node-1")
    assert (reading.node, reading.gpu) == ("node-1", None)
    assert reading.values == {
        "load1": 1.5,
        "memory_total_bytes": 6.7e10,
        "disk_free_bytes./": 1000.0,
        "disk_free_inodes./": 7.0,
        "received_bytes": 30.0,
        "cpu_seconds": 100.0,
        "cpu_busy_seconds": 30.0,
    }


def test_all_that_our_daemon_measures_of_machine_and_gpus_is_known() -> None:
    names = {family.name for family in (*gpus.FAMILIES, *host.FAMILIES)} - {host.READABLE.name}
    assert names <= METRICS.keys()


def test_every_name_is_a_gauge_or_a_counter_and_each_is_known_by_itself() -> None:
    assert not GAUGES & COUNTERS
    assert {ours for ours, _ in METRICS.values()} == NAMES
    assert reading_of(dict.fromkeys(NAMES, 2)) == dict.fromkeys(NAMES, 2.0)


def test_values_of_a_volume_keep_its_name() -> None:
    assert reading_of({"disk_free_bytes.checkpoints": 5, "elasticd_host_disk_size_bytes.logs": 6}) == {
        "disk_free_bytes.checkpoints": 5.0,
        "disk_size_bytes.logs": 6.0,
    }


def test_what_is_no_finite_number_is_left_out() -> None:
    assert reading_of({"cpu": math.nan, "load1": math.inf, "power_w": None, "xid": "79", "xids": 10**400, "throttled": True}) == {"throttled": 1.0}


def test_a_page_with_a_million_volumes_is_cut() -> None:
    page = "\n".join(f'node_filesystem_avail_bytes{{mountpoint="/{number}"}} 1' for number in range(5000))
    (reading,) = prometheus_text(page, at=0.0)
    assert len(reading.values) == 256


@given(st.text(max_size=300) | st.lists(st.sampled_from(["xid", "{", "}", 'gpu="1"', "cpu", " ", "1", "\n", '"', "\\", ","]), max_size=60).map("".join))
def test_no_page_raises(text: str) -> None:
    for reading in prometheus_text(text, at=0.0):
        assert all(math.isfinite(value) for value in reading.values.values())
