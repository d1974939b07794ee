"""The hosts that bench.poweroff takes the power of: arranged, trained on, cut off, and asked what they saw.

Owns: hosts, etcd and service from boot to removal, and every wait. Must not: decide what is measured (`poweroff`), or how hosts work (tests/cluster).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from bench._common import progress
from tests.cluster import etcd
from tests.cluster.hosts import Host, HostError, Lab
from tests.cluster.places import PYTHON, ROOT
from tests.cluster.site import CONFIG, JOBS, USER, Site

T = TypeVar("T")
Line = dict[str, Any]

TTL: Final = 4.0
"""Seconds of the agents' lease."""
WITHIN: Final = 60.0
"""Seconds within which the others must have gone on, or the run counts as never."""
NAMES: Final = ("n1", "n2", "n3", "n4")
JOB_NODES: Final = {"members": ("n1", "n2", "n3"), "apart": ("n1", "n2", "n4")}
"""Two jobs of three nodes each; n1 to n3 carry etcd's members, n4 none."""
LOGS: Final = "/srv/steps"
SCRIPT: Final = "/srv/steps.py"
ETCD_CONFIG: Final = "/etc/etcd/etcd.conf.yml"
STEPS: Final = ROOT / "tests/cluster/steps.py"
_ELECTION_KEYS: Final = ("heartbeat-interval:", "election-timeout:")
_LOOK_AFTER, _LOOK_EVERY = 3.0, 0.4  # seconds: looking costs processes, and the start-up is measured on the same cores
_QUIET: Final = 1.0  # seconds of training before a cut, at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Who carries what when the power goes.

    Attributes:
        name: of its rows.
        lost: the host that loses power.
        leads: the host that leads etcd then.
        job: of `JOB_NODES`.
        election: etcd's heartbeat and election time-out in ms; None as `deploy/etcd` ships it.
        own_first: the endpoints of a host that carries a member begin with that one, instead of n1's for everybody.
    """

    name: str
    lost: str
    leads: str
    job: str = "members"
    election: tuple[int, int] | None = None
    own_first: bool = False


@dataclass(kw_only=True, slots=True)
class Seen:
    """What the others told of one power cut.

    Attributes:
        at: when the power was cut.
        logs: lines of each survivor's agent since then.
        steps: each survivor's steps since then.
        elections: changes of leader between etcd's arrangement and the cut that nobody asked for.
    """

    at: float
    logs: dict[str, list[Line]] = field(default_factory=dict)
    steps: dict[str, list[Line]] = field(default_factory=dict)
    elections: int = 0


class ArrangedSite(Site):
    """A site whose hosts may list etcd's endpoints in an order of their own."""

    own_first = False

    def configure(self, host: Host, *, own_tls: str = etcd.CLIENT_TLS) -> None:
        """As `Site.configure`."""
        super().configure(host, own_tls=own_tls)
        names = [member.name for member in self.etcd.hosts]
        if self.own_first and host.name in names:
            at, common = names.index(host.name), self.etcd.endpoints
            host.write(CONFIG, host.read(CONFIG).replace(json.dumps(common), json.dumps([*common[at:], *common[:at]])))


class PowerSite:
    """Four hosts: the first three with etcd, all with the service; made by `running`."""

    def __init__(self, site: ArrangedSite) -> None:
        self.site = site
        self.hosts = {host.name: host for host in site.hosts}
        self._pool = ThreadPoolExecutor(max_workers=len(NAMES))
        self._etcd_config = {host.name: host.read(ETCD_CONFIG) for host in site.etcd.hosts}
        self._election: tuple[int, int] | None = None
        self._job = ""
        self._elections = 0
        self._numbers = self._member_numbers()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    # --- before --------------------------------------------------------------------------------------------------------

    def arrange(self, arrangement: Arrangement) -> None:
        """Every host on, etcd and daemons as asked for, the job trained by fresh agents on its three nodes."""
        self._stop_job()
        self._configure_etcd(arrangement.election)
        self._configure_daemons(own_first=arrangement.own_first)
        if self.lead(arrangement.leads):
            time.sleep(0.5)  # until every member has counted it
        self._elections = self.elections()
        self._start_job(arrangement.job)

    def _stop_job(self) -> None:
        down = [host for host in self.hosts.values() if not host.on]
        for host in down:
            host.boot()
        if self._job:
            first = next(host for host in self.hosts.values() if host not in down)
            self._obeyed(first, "stop", self._job, done={0, 3})
            self._job = ""
        for host in down:
            host.wait_running()
        if down:
            self.site.etcd.await_healthy([host for host in down if host in self.site.etcd.hosts])
            self.each(self.site.await_ready, down)
        self.each(lambda host: host.sh("sh", "-c", f"rm -f {LOGS}/*.jsonl"))

    def _configure_etcd(self, election: tuple[int, int] | None) -> None:
        if election == self._election:
            return
        members = self.site.etcd.hosts

        def write(host: Host) -> None:
            shipped = self._etcd_config[host.name]
            kept = [line for line in shipped.splitlines() if election is None or not line.startswith(_ELECTION_KEYS)]
            asked = [f"{key} {value}" for key, value in zip(_ELECTION_KEYS, election or (), strict=False)]
            host.write(ETCD_CONFIG, "\n".join([*kept, *asked, ""]))

        self.each(self.site.etcd.kill_member, members)  # an orderly stop would wait for somebody to take over the lead
        self.each(write, members)
        self.each(lambda host: host.sh("systemctl", "start", "--no-block", "etcd"), members)
        self.site.etcd.await_healthy()
        self._election = election

    def _configure_daemons(self, *, own_first: bool) -> None:
        if own_first == self.site.own_first:
            return
        self.site.own_first = own_first

        def restart(host: Host) -> None:
            self.site.configure(host)
            host.sh("systemctl", "reset-failed", "elasticd")  # a bench restarts it more often than systemd thinks healthy
            host.sh("systemctl", "restart", "elasticd")
            self.site.await_ready(host)

        self.each(restart)

    def _start_job(self, job: str) -> None:
        nodes = [self.hosts[name] for name in JOB_NODES[job]]
        self._job = job
        self._obeyed(nodes[0], "start", job, "--again", done={0, 8})
        self.retried(lambda: self.last_world(nodes) == len(nodes), f"{job} on {', '.join(host.name for host in nodes)}")

    def _obeyed(self, host: Host, *command: str, done: Container[int]) -> None:
        """Give an operator's command until it is done, here or by an earlier try: etcd and daemons may just have been started."""
        deadline = time.monotonic() + 100
        while (told := self.site.ctl(host, *command, "--timeout", "30", check=False)).returncode not in done:
            if time.monotonic() > deadline:
                raise HostError(f"{host.name}: elasticctl {' '.join(command)} returned {told.returncode}: {told.stderr[-1000:]}")
            time.sleep(0.5)

    # --- etcd's leader -------------------------------------------------------------------------------------------------

    def lead(self, name: str) -> bool:
        """Let the member of that host lead; whether it had to be changed."""
        now = str(self.retried(self.leader, "a leader of etcd"))
        if now == name:
            return False
        self._etcdctl("move-leader", self._numbers[name], at=now)
        self.retried(lambda: self.leader() == name, f"{name} leading etcd")
        return True

    def leader(self) -> str:
        """The host whose member leads, by its own metrics; "" if none does."""
        leads = self.each(lambda host: self.metric(host, "etcd_server_is_leader"), [host for host in self.site.etcd.hosts if host.on])
        return next((name for name, value in leads.items() if value == 1), "")

    def elections(self) -> int:
        """Changes of leader that the member of n2 has seen since it was started."""
        return int(self.metric(self.hosts["n2"], "etcd_server_leader_changes_seen_total"))

    def metric(self, host: Host, name: str) -> float:
        """One number of a member's; -1 if it does not tell."""
        told = host.sh("python", "-I", "-S", "-c", METRIC, name, check=False).stdout.strip()
        return float(told or -1)

    def _member_numbers(self) -> dict[str, str]:
        lines = [line.split(", ") for line in self._etcdctl("member", "list").splitlines()]
        return {parts[2]: parts[0] for parts in lines}

    def _etcdctl(self, *arguments: str, at: str = NAMES[0]) -> str:
        files = self.site.etcd.certificates.root
        connection = [f"--endpoints=https://{self.hosts[at].address}:2379", f"--cacert={files.cacert}", f"--cert={files.cert}", f"--key={files.key}"]
        command = [str(etcd.etcdctl()), *connection, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env={"ETCDCTL_API": "3", "PATH": os.environ["PATH"]})
        if done.returncode:
            raise HostError(f"etcdctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    # --- the cut -------------------------------------------------------------------------------------------------------

    def cut(self, arrangement: Arrangement) -> Seen:
        """Take the power of one host while the job trains, and wait for the others' next step."""
        lost = self.hosts[arrangement.lost]
        others = [self.hosts[name] for name in JOB_NODES[arrangement.job] if name != lost.name]
        time.sleep(_QUIET + random.uniform(0, TTL / 3))  # at any moment between two renewals
        elections = self.elections() - self._elections
        if self.lead(arrangement.leads) or elections:  # it changed by itself: leases are long now, and agents may believe no loss
            time.sleep(TTL + 1)
        seen = Seen(at=time.time(), elections=elections)
        lost.power_off()
        self._await_steps(others, seen)
        seen.logs = {host.name: self._agent_log(host, seen.at) for host in others}
        seen.steps = {host.name: self.steps(host, 400, after=seen.at) for host in others}
        return seen

    def _await_steps(self, others: Sequence[Host], seen: Seen) -> None:
        deadline = seen.at + WITHIN
        wait = _LOOK_AFTER
        while time.time() + wait < deadline:
            time.sleep(wait)
            wait = _LOOK_EVERY
            last = [(self.steps(host, 1, after=seen.at) or [{"world": 0}])[-1]["world"] for host in others]
            if set(last) == {len(others)}:
                return

    # --- looking -------------------------------------------------------------------------------------------------------

    def steps(self, host: Host, lines: int, *, after: float = 0.0) -> list[Line]:
        """The last steps that each worker of a host has logged, those after a time."""
        told = host.sh("sh", "-c", f'for f in {LOGS}/*.jsonl; do [ -e "$f" ] && tail -n {lines} "$f"; done; true').stdout
        found = [json.loads(line) for line in told.splitlines() if line.endswith("}")]
        return sorted((step for step in found if step["at"] > after), key=lambda step: float(step["at"]))

    def last_world(self, hosts: Sequence[Host]) -> int:
        """The size of the world in which all these hosts step; 0 if they do not, or not together."""
        last = self.each(lambda host: self.steps(host, 1)[-1:], hosts).values()
        worlds = {(step["generation"], step["world"]) for found in last for step in found}
        return int(worlds.pop()[1]) if len(worlds) == 1 and all(last) else 0

    def _agent_log(self, host: Host, after: float) -> list[Line]:
        told = host.sh("tail", "-n", "200", f"/var/log/elasticd/{self._job}/{host.name}/agent.jsonl").stdout
        lines = [json.loads(line) for line in told.splitlines() if line.endswith("}")]
        return [line for line in lines if at(line) > after]

    # --- helpers -------------------------------------------------------------------------------------------------------

    def each(self, do: Callable[[Host], T], hosts: Sequence[Host] | None = None) -> dict[str, T]:
        """Do something on hosts (all if not given) side by side; what came of it, by name."""
        chosen = list(self.hosts.values()) if hosts is None else hosts
        return dict(zip([host.name for host in chosen], self._pool.map(do, chosen), strict=True))

    def retried(self, what: Callable[[], T], name: str, within: float = 120) -> T:
        """Ask until the answer is true.

        Raises:
            HostError: it is not within so many seconds.
        """
        deadline = time.monotonic() + within
        while not (found := what()):
            if time.monotonic() > deadline:
                raise HostError(f"{name} did not happen within {within:g} s")
            time.sleep(0.25)
        return found


def at(line: Mapping[str, Any]) -> float:
    """When a line of a log was written."""
    return datetime.fromisoformat(line["time"]).timestamp()


@contextlib.contextmanager
def running() -> Iterator[PowerSite]:
    """Hosts, etcd, service and jobs, not started; gone at the end, whatever happened."""
    with Lab() as lab, tempfile.TemporaryDirectory(prefix="bench-poweroff-") as folder:
        progress("booting four hosts")
        hosts = lab.boot(*NAMES)
        progress("etcd on three of them, the service on all")
        three = etcd.ThreeMembers(hosts[:3], Path(folder))
        three.start()
        site = ArrangedSite(hosts, three, ttl=TTL)
        site.install()
        for host in hosts:
            host.write(SCRIPT, STEPS.read_text())
            host.sh("install", "-d", "-o", USER, LOGS)
        for name, nodes in JOB_NODES.items():
            argv = json.dumps([str(PYTHON), SCRIPT, LOGS])
            site.job(name, f'argv = {argv}\nuser = "{USER}"\nmin_nodes = 2\nmax_nodes = 3\n[env]\nOMP_NUM_THREADS = "1"\n')
            for host in hosts:
                if host.name not in nodes:
                    host.sh("rm", JOBS / f"{name}.toml")
        site.start()
        power = PowerSite(site)
        try:
            yield power
        finally:
            power.close()


METRIC = """\
import sys, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:2381/metrics", timeout=2).read().decode()
print(next(line.split()[1] for line in text.splitlines() if line.startswith(sys.argv[1] + " ")))
"""
