"""The service as it is shipped, on three hosts: units, polkit rule, roles and mTLS, with nodes lost, cut off, and their daemons restarted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import etcd
from tests.cluster.hosts import ROOT
from tests.cluster.site import USER, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
JOB = "steps"
LOGS = "/srv/steps"
SCRIPT = "/srv/steps.py"
AGENT = f"elasticd-agent@{JOB}"
PYTHON = ROOT / ".venv" / "bin" / "python"
TTL = 4.0

Step = dict[str, Any]


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    """Three hosts with etcd and the service, and a job that they may run."""
    made = make_site(3, ttl=TTL)
    for host in made.hosts:
        host.write(SCRIPT, Path(__file__).with_name("steps.py").read_text())
        host.sh("install", "-d", "-o", USER, LOGS)
    made.job(JOB, f'argv = ["{PYTHON}", "{SCRIPT}", "{LOGS}"]\nuser = "{USER}"\nmin_nodes = 2\nmax_nodes = 3\n[env]\nOMP_NUM_THREADS = "1"\n')
    made.start()
    return made


@pytest.fixture
def training(site: Site) -> Site:
    """The job trains on all three, whatever the test before has done."""
    site.heal()
    if not running(site):
        site.ctl(site.hosts[0], "start", JOB, "--again", "--timeout", "90", timeout=100)
    await_world(site, site.hosts, after=time.time())
    return site


def running(site: Site) -> bool:
    """Whether the job is to run."""
    jobs = {job["job"]: job for job in site.get(site.hosts[0], "/v1/status")["jobs"]}
    return JOB in jobs and bool(jobs[JOB]["run"]) and jobs[JOB]["state"] not in {"stopped", "failed", "succeeded"}


def steps(host: Host, lines: int = 40) -> list[Step]:
    """The last steps that each worker of a host has logged."""
    told = host.sh("sh", "-c", f'for f in {LOGS}/*.jsonl; do [ -e "$f" ] && tail -n {lines} "$f"; done; true').stdout
    return sorted((json.loads(line) for line in told.splitlines() if line.endswith("}")), key=lambda step: float(step["at"]))


def all_steps(host: Host, pid: int) -> list[Step]:
    """Every step that one worker has logged."""
    return [json.loads(line) for line in host.read(f"{LOGS}/{pid}.jsonl").splitlines() if line.endswith("}")]


def workers(host: Host) -> list[int]:
    """Process ids of the workers that live on a host, as the host sees them."""
    return [int(pid) for pid in host.sh("pgrep", "-u", USER, "-f", SCRIPT, check=False).stdout.split()]


def await_(condition: Callable[[], Any], *, within: float, what: str, site: Site) -> Any:
    """Wait for something; tells the daemons' and agents' last words if it does not come. Looks four times a second: each look costs processes."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {within:g} s\n{story(site)}")
        time.sleep(0.25)
    return found


def story(site: Site) -> str:
    """What the units have said last."""
    parts = []
    for host in site.hosts:
        if host.on:
            agent = host.sh("sh", "-c", f"tail -n 15 /var/log/elasticd/{JOB}/*/agent.jsonl", check=False).stdout
            parts.append(f"--- {host.name}\n{host.journal('elasticd')[-1500:]}\n{host.journal(AGENT)[-1000:]}\n{agent[-3000:]}")
    return "\n".join(parts)


def await_world(site: Site, hosts: list[Host], *, after: float, within: float = 60) -> int:
    """Wait until exactly these hosts' workers step together; the generation."""

    def found() -> int | None:
        last = [next((step for step in reversed(steps(host, 1)) if step["at"] > after), None) for host in hosts]
        if None in last:
            return None
        generations = {(step["generation"], step["world"], step["sum"]) for step in last if step is not None}
        return generations.pop()[0] if len(generations) == 1 and next(iter(generations))[1:] == (len(hosts), float(len(hosts))) else None

    return int(await_(found, within=within, what=f"a world of {', '.join(host.name for host in hosts)}", site=site))


def last_formed(site: Site, what: str = "formed") -> dict[str, Any]:
    """The last entry of the job's history of one kind, as a daemon that is up tells it."""
    host = next(host for host in site.hosts if host.on and site.daemon_pid(host))
    history = site.get(host, f"/v1/jobs/{JOB}/history")["generations"]
    return dict(next(entry for entry in reversed(history) if entry["what"] == what))


def test_a_job_that_is_started_runs_on_every_node_as_its_user(training: Site) -> None:
    for host in training.hosts:
        assert host.sh("systemctl", "show", "-P", "Slice", AGENT).stdout == "elasticd.slice\n"
        uid = int(host.sh("id", "-u", USER).stdout)
        assert {step["uid"] for step in steps(host)} == {uid}
        assert len(workers(host)) == 1
    status = training.get(training.hosts[1], f"/v1/jobs/{JOB}")
    assert (status["world_size"], status["run"]) == (3, True)


def test_the_others_go_on_when_a_node_loses_power_and_it_comes_back_by_itself(training: Site) -> None:
    lost, *others = training.hosts
    before = steps(others[0], 1)[-1]["generation"]
    at = time.time()
    lost.power_off()
    after = await_world(training, others, after=at)
    assert after > before
    assert last_formed(training)["detail"] == f"2 nodes, 2 workers: loss of {lost.name}"
    lost.boot()
    lost.wait_running()
    assert await_world(training, training.hosts, after=time.time()) > after
    assert last_formed(training)["detail"] == f"3 nodes, 3 workers: join of {lost.name}"


def test_a_node_that_is_cut_off_stops_within_its_lease_and_joins_again_when_healed(training: Site) -> None:
    cut, *others = training.hosts[::-1]
    pids = workers(cut)
    at = time.time()
    cut.cut()
    # A step that waits for the others does not end; the worker itself must end too, when the lease and a turn of the loop have passed.
    await_(lambda: not set(pids) & set(workers(cut)), within=TTL + 5, what="the end of the worker that was cut off", site=training)
    await_world(training, others, after=at)
    assert cut.sh("systemctl", "is-active", AGENT).stdout == "active\n"
    assert workers(cut) == []
    begun = min(step["at"] for step in steps(others[0], 10_000) if step["at"] > at and step["world"] == 2)
    assert [step for step in steps(cut) if step["at"] > begun] == []
    cut.heal()
    await_world(training, training.hosts, after=time.time())


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_training_does_not_notice_a_daemon_that_is_restarted(training: Site, how: str) -> None:
    """Neither by systemctl nor by a crash: the same agent, the same worker, every step."""
    host = training.hosts[1]
    (worker,) = workers(host)
    agent, daemon = training.agent_pid(host, JOB), training.daemon_pid(host)
    last = all_steps(host, worker)[-1]["step"]
    if how == "restart":
        host.sh("systemctl", "restart", "elasticd")
    else:
        host.sh("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "elasticd")
    await_(lambda: training.daemon_pid(host) not in {0, daemon}, within=30, what="another daemon", site=training)
    training.await_ready(host)
    time.sleep(1)  # time for a new daemon to do the wrong thing
    assert training.agent_pid(host, JOB) == agent != 0
    assert workers(host) == [worker]
    logged = all_steps(host, worker)
    assert [step["step"] for step in logged] == list(range(1, len(logged) + 1))
    assert len(logged) > last
    assert len({step["generation"] for step in logged}) == 1
    assert [job["state"] for job in training.get(host, f"/v1/nodes/{host.name}")["jobs"] if job["name"] == JOB] == ["running"]


def test_a_service_that_is_stopped_lets_its_agents_leave_first(training: Site) -> None:
    host, *others = training.hosts
    at = time.time()
    host.sh("systemctl", "stop", "elasticd", timeout=100)
    assert host.sh("systemctl", "is-active", AGENT, check=False).stdout == "inactive\n"
    assert workers(host) == []
    await_world(training, others, after=at)
    assert last_formed(training)["detail"].startswith(f"2 nodes, 2 workers: leave of {host.name}")
    states = {node["name"]: node["state"] for node in training.get(others[0], "/v1/nodes")["nodes"]}
    assert states.get(host.name, "down") == "down"
    assert {states[other.name] for other in others} == {"ready"}
    host.sh("systemctl", "start", "elasticd")
    await_world(training, training.hosts, after=time.time())


def test_an_operator_drains_a_node_and_gives_it_back(training: Site) -> None:
    host, *others = training.hosts[1:] + training.hosts[:1]
    at = time.time()
    training.ctl(others[0], "drain", host.name, "--reason", "replace fan", "--timeout", "60")
    assert host.sh("systemctl", "is-active", AGENT, check=False).stdout == "inactive\n"
    await_world(training, others, after=at)
    assert last_formed(training)["detail"].startswith(f"2 nodes, 2 workers: leave of {host.name}")
    training.ctl(others[0], "uncordon", host.name)
    await_world(training, training.hosts, after=time.time())


def test_an_operator_stops_a_job_and_starts_it_again(training: Site) -> None:
    first = training.hosts[0]
    training.ctl(first, "stop", JOB, "--timeout", "60")
    await_(lambda: not any(workers(host) for host in training.hosts), within=20, what="the end of all workers", site=training)
    await_(lambda: not any(training.agent_pid(host, JOB) for host in training.hosts), within=20, what="the end of all agents", site=training)
    assert last_formed(training, what="stopped")["what"] == "stopped"
    training.ctl(first, "start", JOB, "--again", "--timeout", "90", timeout=100)
    await_world(training, training.hosts, after=time.time())


def test_training_goes_on_when_a_member_of_etcd_dies(training: Site) -> None:
    host = training.hosts[2]
    generation = await_world(training, training.hosts, after=time.time())
    training.etcd.kill_member(host)
    time.sleep(TTL + 1)  # whoever was to lose its lease by it has
    assert await_world(training, training.hosts, after=time.time()) == generation


def test_the_daemon_may_start_its_agents_and_no_other_unit(training: Site) -> None:
    """The polkit rule that is shipped."""
    host = training.hosts[0]
    host.write("/etc/systemd/system/other.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    host.sh("systemctl", "daemon-reload")
    for unit in ("other", "etcd", "elasticd-agent-of-mine"):
        refused = host.sh("systemctl", "--no-ask-password", "restart", unit, user="elasticd", check=False)
        assert refused.returncode != 0
        assert "authentication required" in refused.stderr
    allowed = host.sh("systemctl", "--no-ask-password", "start", AGENT, user="elasticd", check=False)
    assert allowed.returncode == 0, allowed.stderr


def test_a_job_that_etcd_has_no_roles_for_is_not_started(training: Site) -> None:
    """Allowed by every node's files; roles.py was not told of it."""
    for host in training.hosts:
        host.write("/etc/elasticd/jobs.d/new.toml", f'name = "new"\nargv = ["/bin/true"]\nuser = "{USER}"\nmax_nodes = 3\n')
        host.sh("systemctl", "reload", "elasticd")
    refused = training.ctl(training.hosts[0], "start", "new", "--timeout", "20", check=False)
    assert refused.returncode == 7
    assert "permission denied" in refused.stderr
    assert training.etcd.roles(jobs=["new"], nodes=[host.name for host in training.hosts])
    assert training.ctl(training.hosts[0], "start", "new", "--detach").returncode == 0
    training.ctl(training.hosts[0], "stop", "new", "--timeout", "60")


def test_a_worker_cannot_read_the_nodes_key(training: Site) -> None:
    host = training.hosts[0]
    for path in (f"{etcd.CLIENT_TLS}/client.key", etcd.OPERATOR_CREDENTIAL, f"{etcd.OPERATOR_TLS}/client.key"):
        assert host.sh("cat", path, check=False).returncode == 0
        assert "Permission denied" in host.sh("cat", path, user=USER, check=False).stderr
