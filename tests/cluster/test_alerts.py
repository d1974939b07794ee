"""Real faults of real hosts reach a person: daemons are scraped by a Prometheus with the shipped rules, an Alertmanager sends what comes of it.

Each fault is mended as its runbook says, and then the alert ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import monitoring
from tests.cluster.monitoring import Message, Monitoring
from tests.cluster.network import ip
from tests.cluster.places import PYTHON, ROOT
from tests.cluster.site import CONFIG, USER, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
JOB = "steps"
SCRIPT = "/srv/steps.py"
LOGS = "/srv/steps"
PORT = 9464
SCRAPES = 20.0
"""Seconds within which a fault shows in a scrape, is looked at, waited for (`for`) and sent."""


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    """Three hosts with etcd and the service, whose metrics others may read, and a job that needs all three."""
    reason = monitoring.missing()
    if reason:
        pytest.skip(f"no Prometheus on this machine: {reason}")
    made = make_site(3)
    for host in made.hosts:
        host.write(CONFIG, f'{host.read(CONFIG)}\n[metrics]\nlisten = "0.0.0.0:{PORT}"\n')
        host.write(SCRIPT, Path(__file__).with_name("steps.py").read_text())
        host.sh("install", "-d", "-o", USER, LOGS)
    made.job(JOB, f'argv = ["{PYTHON}", "{SCRIPT}", "{LOGS}"]\nuser = "{USER}"\nmin_nodes = 3\nmax_nodes = 3\n[env]\nOMP_NUM_THREADS = "1"\n')
    made.start()
    made.ctl(made.hosts[0], "start", JOB, "--timeout", "90", timeout=100)
    return made


@pytest.fixture(scope="module")
def running(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitoring]:
    with Monitoring(tmp_path_factory.mktemp("monitoring"), [f"{host.address}:{PORT}" for host in site.hosts]) as made:
        yield made


@pytest.fixture
def watch(site: Site, running: Monitoring) -> Monitoring:
    """Everything is well, seen by Prometheus, and nobody has been told anything since."""
    site.heal()
    deadline = time.monotonic() + 90
    while not well(running):
        assert time.monotonic() < deadline, f"{running.query('up')} {running.query('ALERTS')} {running.query('elasticd_job_nodes')}"
        time.sleep(0.5)
    running.inbox.messages.clear()
    return running


def well(running: Monitoring) -> bool:
    """Whether all daemons are scraped, the job trains on three nodes, and no critical alert comes or is on its way."""
    up = [series["value"][1] for series in running.query('up{job="elasticd"}')]
    nodes = {series["value"][1] for series in running.query(f'elasticd_job_nodes{{job_name="{JOB}"}}')}
    return up == ["1", "1", "1"] and nodes == {"3"} and not running.query('ALERTS{severity="critical"}')


def fires(watch: Monitoring, alert: str, **labels: str) -> Message:
    """Wait until somebody is told of an alert with these labels."""
    wanted = {"alertname": alert, **labels}
    return watch.await_message(lambda one: one.firing and wanted.items() <= one.labels.items(), within=SCRAPES + 10, what=f"{wanted} firing")


def ends(watch: Monitoring, message: Message, within: float = SCRAPES + 10) -> None:
    """Wait until somebody is told that the alert of a message is over."""
    watch.await_message(lambda one: not one.firing and one.labels == message.labels and one.at > message.at, within=within, what=f"{message.labels} resolved")


def told(watch: Monitoring, alert: str) -> set[str]:
    """Nodes for which an alert has come."""
    return {one.labels["instance"] for one in watch.inbox.messages if one.firing and one.name == alert}


def test_a_daemon_that_is_killed_wakes_somebody_and_one_that_is_started_lets_them_sleep(site: Site, watch: Monitoring) -> None:
    host = site.hosts[1]
    host.sh("systemctl", "mask", "--runtime", "elasticd")
    try:
        host.sh("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "elasticd")
        message = fires(watch, "ElasticdDown", instance=host.address)
    finally:
        host.sh("systemctl", "unmask", "--runtime", "elasticd")
    assert message.receiver == "pager"
    assert message.labels == {"alertname": "ElasticdDown", "cluster": "prod", "instance": host.address, "job": "elasticd", "severity": "critical"}
    assert message.annotations["summary"] == f"elasticd on {host.address} does not answer"
    assert (ROOT / message.annotations["runbook_url"]).is_file()
    assert told(watch, "ElasticdDown") == {host.address}
    assert not [one for one in watch.inbox.messages if one.name == "ElasticdBelowMinNodes"], "the job did not notice"
    host.sh("systemctl", "reset-failed", "elasticd")
    host.sh("systemctl", "start", "elasticd")
    site.await_ready(host)
    ends(watch, message)


def test_a_host_without_power_is_down_and_its_job_has_too_few_nodes(site: Site, watch: Monitoring) -> None:
    lost, *others = site.hosts[::-1]
    lost.power_off()
    down = fires(watch, "ElasticdDown", instance=lost.address)
    few = fires(watch, "ElasticdBelowMinNodes", job_name=JOB)
    assert few.labels == {"alertname": "ElasticdBelowMinNodes", "cluster": "prod", "job_name": JOB, "severity": "critical"}
    assert few.annotations["description"].startswith("0 nodes form a generation")
    assert (few.receiver, down.receiver) == ("pager", "pager")
    nodes = {node["name"]: node["state"] for node in site.get(others[0], "/v1/nodes")["nodes"]}
    assert nodes.get(lost.name, "down") == "down"
    lost.boot()
    lost.wait_running()
    site.await_ready(lost)
    ends(watch, down)
    ends(watch, few, within=60)
    assert len([one for one in watch.inbox.messages if one.firing and one.name == few.name]) == 1, "once for the job, not for each of its nodes"


def test_a_host_that_is_cut_from_etcd_says_so_while_it_is_up(site: Site, watch: Monitoring) -> None:
    """From the two others, and so from their members of etcd; its own has no majority then. Prometheus still reaches it."""
    cut, *others = site.hosts
    for other in others:
        ip(f"route add blackhole {other.address}/32", netns=cut.pid)
    try:
        message = fires(watch, "ElasticdStoreUnreachable", instance=cut.address)
        assert watch.query(f'up{{instance="{cut.address}"}}')[0]["value"][1] == "1"
        assert site.ctl(others[0], "status", "-o", "json").returncode == 0
        assert seen_by(site, cut).startswith("etcd is out of reach")
    finally:
        for other in others:
            ip(f"route del blackhole {other.address}/32", netns=cut.pid)
    assert message.receiver == "pager"
    assert message.annotations["description"].startswith("No answer for ")
    assert told(watch, "ElasticdStoreUnreachable") == {cut.address}
    assert told(watch, "ElasticdDown") == set()
    assert not [one for one in watch.inbox.messages if one.name == "ElasticdFrozen"], "one of three nodes is not the cluster"
    site.await_ready(cut)
    ends(watch, message, within=60)


def seen_by(site: Site, host: Host) -> str:
    """What the runbook tells to look at: the daemon's own words in `systemctl status`."""
    return host.sh("systemctl", "show", "-P", "StatusText", "elasticd").stdout
