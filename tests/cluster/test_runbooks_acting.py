"""The runbooks of the alerts about detectors and what the policy does, followed against their faults, as `test_runbooks` does with the others.

Some three minutes: `pytest -m root tests/cluster/test_runbooks_acting.py`. Stand-ins: as there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.rehearsal import JOB, Rehearsal, rehearse, says
from tests.cluster.test_detectors import detector
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import MakeSite

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]
# One stop of the job in an hour, so that the second finds the budget used up.
MORE = """\
width = 5.0
[policy]
certain_per_hour = 1
cluster_per_hour = 1000
"""
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid={}, name=python, GPU has fallen off the bus."
SAME = 65.0
"""Seconds after which what is found anew on a node is another incident."""


@pytest.fixture(scope="module")
def run(make_site: MakeSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    site = make_site(3)
    site.detectors, site.more = True, MORE
    for host in site.hosts:
        site.configure(host)
    with rehearse(site, tmp_path_factory) as made:
        made.await_training()
        await_(lambda: made.watch.query("sum(elasticd_detectors_up) == 3"), within=90, what="detectors on each host")
        yield made


def incident(run: Rehearsal) -> str:
    """The newest one's id."""
    found = run.site.get(run.site.hosts[1], "/v1/anomalies?nodes=own")["incidents"]
    return str(max(found, key=lambda one: one["opened"])["id"])


def test_a_gpu_that_falls_off_the_bus_costs_its_node_and_the_second_time_a_budget(run: Rehearsal) -> None:
    node = run.site.hosts[1]
    began = time.monotonic()
    says(node, XID.format(1))
    run.fires("ElasticdPolicyActed", job_name=JOB)
    shown = run.follows("ElasticdPolicyActed", node, ID=incident(run))
    assert "rule hardware" in shown
    assert "n2" in shown
    run.ends("ElasticdPolicyActed", within=90)
    run.cures("ElasticdPolicyActed", "elasticctl uncordon NODE", NODE=node.name)
    run.await_training()
    time.sleep(max(0.0, began + SAME - time.monotonic()))
    says(node, XID.format(2))
    run.fires("ElasticdPolicyWithheld", job_name=JOB)
    shown = run.follows("ElasticdPolicyWithheld", node, ID=incident(run))
    assert "rule budget_job_hour" in shown
    assert "Not done (exclude)" in shown
    assert run.trains()
    run.fires("ElasticdIncidentOpen", job_name=JOB)
    run.follows("ElasticdIncidentOpen", node, ID=incident(run))
    assert XID.format(2) in run.site.ctl(node, "explain", incident(run)).stdout  # as the README says: these hosts have no listener for each other
    run.cures("ElasticdPolicyWithheld", "elasticctl ack ID", ID=incident(run))
    run.ends("ElasticdPolicyWithheld", within=120)
    run.ends("ElasticdIncidentOpen", within=120)


def test_detectors_that_cannot_be_started(run: Rehearsal) -> None:
    host = run.site.hosts[2]
    (package,) = host.sh("sh", "-c", "ls -d /opt/elasticd/*/lib/python3*/site-packages/detectors").stdout.split()
    host.sh("mv", package, f"{package}.away")
    try:
        host.sh("kill", "-KILL", str(detector(host)))
        run.fires("ElasticdDetectorsDown", instance=host.address)
        shown = run.follows("ElasticdDetectorsDown", host)
        assert "No module named" in shown
        assert host.name in shown
    finally:
        host.sh("mv", f"{package}.away", package)
    run.ends("ElasticdDetectorsDown", within=90)
    assert run.trains()
