"""A job that uses `trainer`, on hosts: its workers are a user of their own, states travel between nodes under mTLS, and every sample is counted."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.places import PROJECT, PYTHON
from tests.cluster.site import USER, Site
from tests.cluster.test_service import await_, story
from tests.support.ledger import Count, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

    Begin = Callable[[str], Site]

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
JOBS = ("lossless", "blackout")
"""One for each test: a job that has ended keeps what it trained."""
OUT = "/srv/lossless"
SCRIPT = PROJECT / "tests/e2e/elastic.py"
SAMPLES = 640
JOB_FILE = f"""\
argv = ["{PYTHON}", "-u", "{SCRIPT}"]
user = "{USER}"
min_nodes = 1
max_nodes = 3
[env]
OMP_NUM_THREADS = "1"
OUT = "{OUT}"
PYTHONPATH = "{PROJECT}"
SAMPLES = "{SAMPLES}"
STEPS = "1000000"
STEP_TIME = "0.05"
[trainer]
snapshot_every = 1
checkpoint_every_s = 2.0
"""


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    """Three hosts with etcd and the service, and a job that they may run."""
    made = make_site(3, ttl=4.0)
    for name in JOBS:
        made.job(name, JOB_FILE)
    made.start()
    return made


@pytest.fixture
def begin(site: Site) -> Iterator[Begin]:
    """Has a job train on all three hosts."""
    begun = []

    def make(job: str) -> Site:
        site.heal()
        for host in site.hosts:
            host.sh("rm", "-rf", OUT)
            host.sh("install", "-d", "-o", USER, OUT)
        began = time.time()
        begun.append(job)
        site.ctl(site.hosts[0], "start", job, "--timeout", "90", timeout=100)
        await_world(site, site.hosts, after=began)
        return site

    yield make
    site.heal()
    for job in begun:
        site.ctl(site.hosts[0], "stop", job, "--yes", "--timeout", "60", timeout=70, check=False)


def steps(site: Site, lines: int | None = None) -> list[dict[str, Any]]:
    """What the workers of all hosts that run have written down, in the order of time; only the last lines of each, where a number is given."""
    found = []
    for host in site.hosts:
        if host.on:
            show = f"tail -q -n {lines}" if lines else "cat"
            told = host.sh("sh", "-c", f'for f in {OUT}/steps-*.jsonl; do [ -e "$f" ] && {show} "$f"; done; true').stdout
            found += [{**json.loads(line), "node": host.name} for line in told.splitlines() if line.endswith("}")]
    return sorted(found, key=lambda line: float(line["at"]))


def await_world(site: Site, hosts: list[Host], *, after: float, within: float = 60) -> None:
    """Wait until every one of these hosts has trained in a world of just them."""
    names = {host.name for host in hosts}

    def seen() -> bool:
        return {line["node"] for line in steps(site, 20) if line["world"] == len(hosts) and line["at"] > after} == names

    await_(seen, within=within, what=f"training on {', '.join(sorted(names))}", site=site)


def finished(site: Site, job: str) -> Count:
    """Let the job end, wait for that, and count."""
    site.hosts[0].sh("touch", f"{OUT}/enough")
    await_(lambda: state(site, job) == "succeeded", within=60, what="the end of the job", site=site)
    return count(steps(site), samples=SAMPLES)


def state(site: Site, job: str) -> str:
    jobs = {one["job"]: one for one in site.get(site.hosts[0], "/v1/status")["jobs"]}
    return str(jobs[job]["state"])


def _served(host: Host, job: str) -> list[dict[str, Any]]:
    """States that the agent of a host has given to others."""
    told = host.sh("sh", "-c", f"grep -h state_served /var/log/elasticd/{job}/*/agent.jsonl; true").stdout
    return [json.loads(line) for line in told.splitlines()]


def test_power_off_drain_and_return_cost_a_step_at_most_and_no_sample(begin: Begin) -> None:
    """3 -> power off -> 2 -> it comes back with an empty memory, and is given the state -> 3 -> a drain -> 2 -> back -> 3."""
    job = JOBS[0]
    training = begin(job)
    first, second, third = training.hosts
    # The first steps of a job are made before there is memory for snapshots (docs/limits.md).
    await_(lambda: max(line["step"] for line in steps(training, 5)) >= 20, within=60, what="twenty steps", site=training)
    third.power_off()
    cut = time.time()
    await_world(training, [first, second], after=cut)
    back = time.time()
    training.heal()
    await_world(training, [first, second, third], after=back)
    drained = time.time()
    training.ctl(first, "drain", second.name, "--reason", "a test", "--yes", timeout=70)
    await_world(training, [first, third], after=drained)
    returned = time.time()
    training.ctl(first, "uncordon", second.name)
    await_world(training, [first, second, third], after=returned)
    counted = finished(training, job)
    assert (counted.repeated, counted.missed) == (0, 0)
    assert sum(counted.lost) <= 1, (counted, story(training))
    served = [served for host in (first, second) for served in _served(host, job)]
    assert third.name in {line["to"] for line in served}, served


def test_all_nodes_without_power_go_on_from_the_newest_checkpoint(begin: Begin) -> None:
    """Memory is gone everywhere: what was done since the last checkpoint on disk is done again, and no sample is repeated or missed."""
    job = JOBS[1]
    training = begin(job)
    before = time.time()
    await_(lambda: training.get(training.hosts[0], f"/v1/jobs/{job}")["checkpoint_step"], within=30, what="a checkpoint", site=training)
    await_(lambda: any(line["at"] > before + 3 for line in steps(training, 3)), within=30, what="more steps", site=training)
    for host in training.hosts:
        host.power_off()
    training.heal()
    cut = time.time()
    await_world(training, training.hosts, after=cut, within=90)
    reached = max(line["step"] for line in steps(training) if line["at"] < cut)  # written down before; the last lines may be lost with the power
    await_(lambda: max(line["step"] for line in steps(training, 3) if line["at"] > cut) > reached, within=60, what="as many steps as before", site=training)
    counted = finished(training, job)
    assert (counted.repeated, counted.missed) == (0, 0)
    assert counted.steps > sum(counted.lost)
    assert any(counted.lost), "nothing was lost, so nothing was cut"
