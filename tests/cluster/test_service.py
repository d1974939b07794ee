"""The service as it is shipped, on three hosts: units, polkit rule, roles and mTLS.

Nodes are lost, cut off and added; daemons restarted, killed, stuck, upgraded, given new and wrong certificates.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticd import __version__
from tests.cluster import etcd
from tests.cluster.places import PYTHON
from tests.cluster.site import USER, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host, Lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
JOB = "steps"
LOGS = "/srv/steps"
SCRIPT = "/srv/steps.py"
AGENT = f"elasticd-agent@{JOB}"
TTL = 4.0
START_UP = 15.0
"""Seconds within which workers may start: importing torch, mostly."""
CONNECTIONS = 2
"""To etcd that daemon and agent always use: the lease's and the watch's."""
OTHER_TLS = "/etc/elasticd/other"

Step = dict[str, Any]


@dataclass(frozen=True)
class Running:
    """Process ids on a host at one moment."""

    host: Host
    daemon: int
    agent: int
    worker: int


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    """Three hosts with etcd and the service, and a job that they may run."""
    made = make_site(3, ttl=TTL)
    for host in made.hosts:
        put_script(host)
    made.job(JOB, f'argv = ["{PYTHON}", "{SCRIPT}", "{LOGS}"]\nuser = "{USER}"\nmin_nodes = 2\nmax_nodes = 4\n[env]\nOMP_NUM_THREADS = "1"\n')
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


def put_script(host: Host) -> None:
    """What the job needs on a host."""
    host.write(SCRIPT, Path(__file__).with_name("steps.py").read_text())
    host.sh("install", "-d", "-o", USER, LOGS)


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


def look(site: Site, host: Host) -> Running:
    """What runs on a host now; each of it must."""
    (worker,) = workers(host)
    found = Running(host=host, daemon=site.daemon_pid(host), agent=site.agent_pid(host, JOB), worker=worker)
    assert found.daemon
    assert found.agent
    return found


def assert_not_one_step_lost(site: Site, before: Running) -> None:
    """The same agent and worker as before go on from now, and the worker has logged every step of its one generation, each with all ranks' sum."""
    host, worker = before.host, before.worker
    last = all_steps(host, worker)[-1]["step"]
    await_(lambda: all_steps(host, worker)[-1]["step"] > last + 20, within=20, what=f"twenty steps more on {host.name}", site=site)
    assert site.agent_pid(host, JOB) == before.agent
    assert workers(host) == [worker]
    logged = all_steps(host, worker)
    assert [step["step"] for step in logged] == list(range(1, len(logged) + 1))
    assert {(step["generation"], step["sum"]) for step in logged} == {(logged[0]["generation"], float(logged[0]["world"]))}


def await_another_daemon(site: Site, before: Running, within: float = 30) -> None:
    """Wait until a host has another daemon than before, which serves the cluster."""
    host = before.host
    await_(lambda: site.daemon_pid(host) not in {0, before.daemon}, within=within, what=f"another daemon on {host.name}", site=site)
    site.await_ready(host)


def said(lines: str, event: str) -> list[dict[str, Any]]:
    """The lines of one event in a log."""
    found = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def daemon_said(host: Host, event: str) -> list[dict[str, Any]]:
    """What the daemons of a host have said of one event, since it was powered on."""
    return said(host.sh("journalctl", "--no-pager", "-o", "cat", "-u", "elasticd").stdout, event)


def agent_said(host: Host, event: str) -> list[dict[str, Any]]:
    """What the agents of a host have said of one event."""
    return said(host.read(f"/var/log/elasticd/{JOB}/{host.name}/agent.jsonl"), event)


def to_etcd(host: Host, pid: int) -> set[str]:
    """This end of each connection that a process has to etcd."""
    listed = host.sh("ss", "-Htnp", "state", "established", "dport = :2379").stdout
    return {line.split()[2] for line in listed.splitlines() if f"pid={pid}," in line}


@contextlib.contextmanager
def drop_in(site: Site, host: Host, text: str) -> Iterator[None]:
    """The service on a host with a drop-in, restarted for it."""

    def restart() -> None:
        host.sh("systemctl", "daemon-reload")
        host.sh("systemctl", "restart", "elasticd")
        site.await_ready(host)

    path = "/etc/systemd/system/elasticd.service.d/test.conf"
    host.write(path, text)
    try:
        restart()
        yield
    finally:
        host.sh("rm", path)
        restart()


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
    took = [min(step["at"] for step in steps(other, 10_000) if step["generation"] == after) - at for other in others]
    print(f"from power off to the next step of the others: {', '.join(f'{seconds:.2f} s' for seconds in took)}")
    assert 0 < min(took) <= max(took) <= TTL + START_UP
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
    before = look(training, training.hosts[1])
    host = before.host
    if how == "restart":
        host.sh("systemctl", "restart", "elasticd")
    else:
        host.sh("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "elasticd")
    await_another_daemon(training, before)
    assert_not_one_step_lost(training, before)
    assert [job["state"] for job in training.get(host, f"/v1/nodes/{host.name}")["jobs"] if job["name"] == JOB] == ["running"]


def test_training_does_not_notice_a_stuck_daemon_that_the_watchdog_replaces(training: Site) -> None:
    host = training.hosts[0]
    with drop_in(training, host, "[Service]\nWatchdogSec=5\n"):
        before = look(training, host)
        ended = host.journal("elasticd").count("Watchdog timeout (limit 5s)!")
        host.sh("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "elasticd")
        await_another_daemon(training, before, within=45)
        assert host.journal("elasticd").count("Watchdog timeout (limit 5s)!") == ended + 1
        assert host.sh("systemctl", "show", "-P", "NRestarts", "elasticd").stdout == "1\n"
        assert_not_one_step_lost(training, before)


def test_training_does_not_notice_an_upgrade_of_the_daemon_nor_the_way_back(training: Site) -> None:
    """As docs/ten-nodes.md has it: the agent goes on as the version it was started with."""
    before = look(training, training.hosts[1])
    host, first = before.host, before
    old = host.sh("readlink", "/opt/elasticd/current").stdout.strip()
    assert training.upgrade(host, "99.0.0").splitlines()[-2:] == [
        "installed version 99.0.0; /opt/elasticd/current is it now",
        "the daemon that runs is still the old one: systemctl restart elasticd (training goes on meanwhile)",
    ]
    assert training.daemon_pid(host) == before.daemon
    for version, link in (("99.0.0", "versions/99.0.0"), (__version__, old)):
        host.sh("ln", "-sfn", link, "/opt/elasticd/current")
        host.sh("systemctl", "restart", "elasticd")
        await_another_daemon(training, before)
        before = look(training, host)
        told = json.loads(training.ctl(host, "version", "-o", "json").stdout)["data"]
        assert told == {"client": version, "daemon": version, "node": host.name}
        assert host.read(f"/proc/{before.daemon}/cmdline").startswith(f"/opt/elasticd/{link}/bin/")
        assert host.read(f"/proc/{before.agent}/cmdline").startswith(f"/opt/elasticd/{old}/bin/")
        assert_not_one_step_lost(training, first)


def test_a_host_that_is_set_up_later_joins_a_job_that_runs(training: Site, lab: Lab) -> None:
    before = await_world(training, training.hosts, after=time.time())
    (host,) = lab.boot("n4")
    try:
        training.add(host)
        put_script(host)
        assert await_world(training, training.hosts[:3], after=time.time()) == before
        host.sh("systemctl", "enable", "--now", "elasticd")
        assert await_world(training, training.hosts, after=time.time()) > before
        assert last_formed(training)["detail"] == f"4 nodes, 4 workers: join of {host.name}"
        assert training.get(host, f"/v1/jobs/{JOB}")["world_size"] == 4
    finally:
        host.close()
        training.hosts = [other for other in training.hosts if other is not host]


def test_a_renewed_certificate_is_taken_by_a_reload(training: Site) -> None:
    before = look(training, training.hosts[2])
    host = before.host
    registered = daemon_said(host, "node_registered")
    reloads, of_agent = len(daemon_said(host, "reloaded")), len(agent_said(host, "certificates_reloaded"))
    serial = host.sh("openssl", "x509", "-noout", "-serial", "-in", f"{etcd.CLIENT_TLS}/client.pem").stdout
    old = {pid: to_etcd(host, pid) for pid in (before.daemon, before.agent)}
    assert all(len(connections) >= CONNECTIONS for connections in old.values())
    host.sh("cp", "-a", etcd.CLIENT_TLS, "/run/tls-before")
    training.etcd.certificates.run("node", host.name)
    training.etcd.install_client(host, node=host.name, owner="elasticd:elasticd")
    # Of the same age as the old ones, so that it is the reload that finds them, and not the look at the files that comes each 10 s.
    host.sh("sh", "-c", 'for file in "$1"/*; do touch -r "/run/tls-before/${file##*/}" "$file"; done', "sh", etcd.CLIENT_TLS)
    assert host.sh("openssl", "x509", "-noout", "-serial", "-in", f"{etcd.CLIENT_TLS}/client.pem").stdout != serial
    at = time.time()
    host.sh("systemctl", "reload", "elasticd")
    await_(lambda: len(daemon_said(host, "reloaded")) == reloads + 1, within=10, what="the daemon's reload", site=training)
    await_(lambda: len(agent_said(host, "certificates_reloaded")) == of_agent + 1, within=10, what="the agent's reload", site=training)

    def connected_anew() -> bool:
        return all(len(to_etcd(host, pid) - connections) >= CONNECTIONS for pid, connections in old.items())

    await_(connected_anew, within=TTL, what="new connections to etcd", site=training)
    # Whoever no longer renews has lost its key by then.
    await_(lambda: all_steps(host, before.worker)[-1]["at"] > at + 1.5 * TTL, within=4 * TTL, what="steps after a lease", site=training)
    nodes = json.loads(training.ctl(training.hosts[0], "nodes", "-o", "json").stdout)["data"]["nodes"]
    assert {node["name"]: node["state"] for node in nodes} == {other.name: "ready" for other in training.hosts}
    assert daemon_said(host, "node_registered") == registered
    assert training.daemon_pid(host) == before.daemon
    assert_not_one_step_lost(training, before)


@pytest.mark.parametrize(
    ("whose", "why"),
    [("of another authority", "it refuses our client certificate (cert, key)"), ("of a name without a role", "permission denied")],
)
def test_a_daemon_with_a_wrong_certificate_stays_out_says_why_and_disturbs_nobody(training: Site, tmp_path: Path, whose: str, why: str) -> None:
    host = training.hosts[2]
    others = training.hosts[:2]
    before = [look(training, one) for one in training.hosts]
    certificates = training.etcd.certificates
    if whose == "of another authority":
        certificates = etcd.Certificates(tmp_path / "certificates")
        certificates.init()
    name = host.name if whose == "of another authority" else "stranger"
    certificates.node(name)
    etcd.put_keys(host, certificates.folder / "nodes" / name, OTHER_TLS, "elasticd:elasticd", mode=0o400)
    frozen, registered = len(daemon_said(host, "frozen")), len(daemon_said(host, "node_registered"))
    training.configure(host, own_tls=OTHER_TLS)
    try:
        host.sh("systemctl", "restart", "elasticd")
        at = time.time()
        told = await_(lambda: daemon_said(host, "frozen")[frozen:], within=30, what="a word of the daemon's", site=training)
        assert why in told[0]["problem"]
        assert host.sh("systemctl", "show", "-P", "StatusText", "elasticd").stdout.startswith("etcd is out of reach")
        await_(lambda: steps(others[0], 1)[-1]["at"] > at + TTL, within=3 * TTL, what="steps after a lease", site=training)
        assert len(daemon_said(host, "node_registered")) == registered
        states = {node["name"]: node["state"] for node in training.get(others[0], "/v1/nodes")["nodes"]}
        assert states.pop(host.name, "down") == "down"
        assert states == {other.name: "ready" for other in others}
        for one in before:
            assert_not_one_step_lost(training, one)
        assert [training.daemon_pid(one.host) for one in before[:2]] == [one.daemon for one in before[:2]]
    finally:
        training.configure(host)
        host.sh("systemctl", "restart", "elasticd")
    training.await_ready(host)
    assert_not_one_step_lost(training, before[2])


def test_only_who_is_in_a_group_may_use_the_api(training: Site) -> None:
    before = look(training, training.hosts[0])
    host = before.host
    host.sh("systemd-sysusers", "-", input="u stranger - - -\nu reader - - -\nm reader elasticd\n")
    may_not_use, may_read = "may not use this API", "may read, not change"
    for user, command, code, why in (
        ("stranger", ("status",), 7, may_not_use),
        ("stranger", ("stop", JOB, "-y"), 7, may_not_use),
        ("reader", ("status",), 0, ""),
        ("reader", ("stop", JOB, "-y"), 7, may_read),
    ):
        done = training.ctl(host, *command, user=user, check=False)
        assert done.returncode == code, done
        assert why in done.stderr
        assert not why or f"{user} (uid {host.sh('id', '-u', user).stdout.strip()}, pid " in done.stderr
        assert (f"{JOB}  training" in done.stdout) == (code == 0)
    assert_not_one_step_lost(training, before)


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
