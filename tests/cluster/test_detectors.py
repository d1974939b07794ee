"""The detectors in the installed, hardened service: they see what a job's worker says, have no rights of their own, and may be killed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.places import PYTHON
from tests.cluster.site import USER, Site
from tests.support.etcd import await_

if TYPE_CHECKING:
    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
SAYS = "import time\nwhile True:\n    print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB', flush=True)\n    time.sleep(1)"
JOB_FILE = f"""\
argv = ["{PYTHON}", "-u", "-c", {json.dumps(SAYS)}]
user = "{USER}"
min_nodes = 1
max_nodes = 1
"""


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    made = make_site(3, ttl=4.0)
    made.detectors = True
    made.configure(made.hosts[0])  # one of them is enough to see it
    made.job("says", JOB_FILE, only=made.hosts[0])
    made.start()
    return made


def anomalies(site: Site, host: Host) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(site.ctl(host, "anomalies", "-o", "json").stdout)["data"]
    return data


def detector(host: Host) -> int:
    """Its pid as the host sees it, 0 while there is none."""
    told = host.sh("pgrep", "-f", "detectors.node", check=False).stdout.split()
    return int(told[0]) if told else 0


def test_what_a_worker_says_is_seen_without_any_right_and_survives_the_detectors_death(site: Site) -> None:
    host = site.hosts[0]
    await_(lambda: anomalies(site, host)["detectors"][0]["running"], within=90, what="the detectors")
    pid = detector(host)
    rights = {line.split(":")[0]: line.split()[1] for line in host.sh("cat", f"/proc/{pid}/status").stdout.splitlines() if line.startswith("Cap")}
    assert int(rights["CapEff"], 16) == int(rights["CapPrm"], 16) == int(rights["CapAmb"], 16) == 0
    site.ctl(host, "start", "says", "--timeout", "90", timeout=100)
    try:
        (found,) = await_(lambda: anomalies(site, host)["incidents"], within=60, what="the incident")
        assert (found["root"]["kind"], found["job"], found["state"]) == ("cuda_out_of_memory", "says", "confirmed")
        shown = site.ctl(host, "explain", found["id"]).stdout
        assert "torch.OutOfMemoryError: CUDA out of memory" in shown
        agent = host.sh("systemctl", "show", "--property=MainPID", "elasticd-agent@says.service").stdout
        host.sh("kill", "-KILL", str(pid))
        await_(lambda: (one := anomalies(site, host)["detectors"][0])["restarts"] >= 1 and one["running"], within=90, what="the next detectors")
        assert detector(host) not in (0, pid)
        assert host.sh("systemctl", "show", "--property=MainPID", "elasticd-agent@says.service").stdout == agent, "training has not noticed"
        assert [one["id"] for one in anomalies(site, host)["incidents"]] == [found["id"]]
    finally:
        site.ctl(host, "stop", "says", "--yes", "--timeout", "60", timeout=70, check=False)
