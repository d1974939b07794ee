"""Hosts with elasticd's service on them, installed as an operator does, and etcd on the first three.

Owns: installing the shipped units, their configuration and job files on hosts, upgrading them, and asking their daemons. Must not: know what a test
looks for.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.etcd import CLIENT_TLS, OPERATOR_TLS, ThreeMembers
from tests.cluster.hosts import Host, HostError, boot
from tests.cluster.places import PREFIX, PROJECT, PYTHON
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Sequence

OPERATOR = "admin"
CONFIG = Path("/etc/elasticd/elasticd.toml")
JOBS = Path("/etc/elasticd/jobs.d")
USER = "trainer"
"""Who the workers are."""
STAGE = "/var/tmp/stage"
SOURCE = "/var/tmp/source"

TOML = """\
cluster = "{cluster}"
node = "{node}"
address = "{address}"
slots = 1

[etcd]
endpoints = {endpoints}
cacert = "{tls}/ca.pem"
cert = "{own_tls}/client.pem"
key = "{own_tls}/client.key"
operator_cert = "{operator_tls}/client.pem"
operator_key = "credential:elasticd.operator.key"

[timing]
ttl = {ttl}
loop_wait = 1.0
retry_timeout = 1.0

[agent]
ttl = {ttl}
settle = 0.5
stop_grace = 5.0

[health]
disk_free_min = 0

[detectors]
run = {detectors}
{more}"""


class Site:
    """See the module.

    Args:
        hosts: that run; the first three are etcd's.
        etcd: that serves.
        ttl: of the daemons' and the agents' leases, in seconds.

    Attributes:
        detectors: each daemon that is configured from now on has detectors.
        more: is added to its configuration, below [detectors].
    """

    def __init__(self, hosts: Sequence[Host], etcd: ThreeMembers, *, ttl: float = 4.0) -> None:
        self.hosts = list(hosts)
        self.etcd = etcd
        self.ttl = ttl
        self.detectors = False
        self.more = ""
        self._packed = b""
        self._jobs: dict[str, str] = {}

    def install(self) -> None:
        """`make install` once, its result and a configuration on every host, users and roles in etcd. Nothing is started."""
        first = self.hosts[0]
        make_install(first, PROJECT, f"DESTDIR={STAGE}")
        self._packed = subprocess.run(
            ["nsenter", "-t", str(first.pid), "-m", "-r", "--", "tar", "-C", STAGE, "-c", "."], capture_output=True, check=True, timeout=60
        ).stdout
        self.etcd.roles(nodes=[host.name for host in self.hosts], operators=[OPERATOR])
        for host in self.hosts:
            self._set_up(host)

    def _set_up(self, host: Host) -> None:
        host.sh("tar", "-C", "/", "-x", "-p", "--numeric-owner", "--no-overwrite-dir", input=self._packed)
        host.sh("systemd-sysusers")
        host.sh("systemd-sysusers", "-", input=f"u {USER} - - /var/lib/{USER}\n")
        host.sh("systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/elasticd.conf")
        self.etcd.install_client(host, node=host.name, operator=OPERATOR, owner="elasticd:elasticd")
        self.configure(host)
        for name, text in self._jobs.items():
            allow(host, name, text)
        host.sh("systemctl", "daemon-reload")

    def add(self, host: Host) -> None:
        """Install on a further host, which gets its role in etcd and the jobs of the others. Nothing is started there."""
        self.etcd.roles(nodes=[host.name])
        self._set_up(host)
        self.hosts.append(host)

    def upgrade(self, host: Host, version: str) -> str:
        """Install this tree on a host that runs, as another version, as an operator does; what the installer said. Nothing is restarted."""
        host.sh("sh", "-c", COPY, "sh", PROJECT, SOURCE, version)
        return make_install(host, Path(SOURCE))

    def configure(self, host: Host, *, own_tls: str = CLIENT_TLS) -> None:
        """Write a host's elasticd.toml, with the node's certificate and key from the directory `own_tls`."""
        text = TOML.format(
            cluster=self.etcd.cluster,
            node=host.name,
            address=host.address,
            endpoints=json.dumps(self.etcd.endpoints),
            tls=CLIENT_TLS,
            own_tls=own_tls,
            operator_tls=OPERATOR_TLS,
            ttl=self.ttl,
            detectors=str(self.detectors).lower(),
            more=self.more,
        )
        host.write(CONFIG, text)

    def job(self, name: str, text: str, *, only: Host | None = None) -> None:
        """Allow a job on every host, or on one alone, and give it its roles in etcd."""
        self.etcd.roles(jobs=[name])
        if only is None:
            self._jobs[name] = text
        for host in self.hosts if only is None else [only]:
            allow(host, name, text)

    def start(self) -> None:
        """Start the service everywhere, and wait until every daemon is ready."""
        for host in self.hosts:
            host.sh("systemctl", "enable", "--now", "--no-block", "elasticd")
        for host in self.hosts:
            self.await_ready(host)

    def await_ready(self, host: Host, within: float = 60) -> None:
        """Wait until a host's daemon says that it serves the cluster."""
        try:
            await_(lambda: host.sh("python", "-I", "-S", "-c", READY, check=False).returncode == 0, within=within, what=f"{host.name}'s daemon ready")
        except AssertionError as error:
            raise HostError(f"{error}\n{host.journal('elasticd')[-4000:]}") from None

    def heal(self) -> None:
        """Every host on, connected and running, etcd and every daemon well."""
        down = [host for host in self.hosts if not host.on]
        for host in self.hosts:
            if host.on:
                host.heal()
                host.sh("systemctl", "reset-failed")  # first: with a unit that failed, a member of etcd that was killed, a host does not count as running
        boot(*down)
        self.etcd.heal()
        for host in self.hosts:
            host.sh("systemctl", "start", "--no-block", "elasticd")
        for host in self.hosts:
            self.await_ready(host)

    def ctl(self, host: Host, *arguments: str, check: bool = True, timeout: float = 60, user: str | None = None) -> subprocess.CompletedProcess[str]:
        """elasticctl on a host, as root or as `user`."""
        return host.sh("/usr/bin/elasticctl", *arguments, check=check, timeout=timeout, user=user)

    def get(self, host: Host, path: str) -> dict[str, Any]:
        """What a host's daemon answers to a GET on its socket: the `data`."""
        told = host.sh("python", "-I", "-S", "-c", GET, path, timeout=20).stdout
        return dict(json.loads(told)["data"])

    def agent_pid(self, host: Host, job: str) -> int:
        """Of the agent's unit; 0 if it does not run."""
        return int(host.sh("systemctl", "show", "-P", "MainPID", f"elasticd-agent@{job}").stdout)

    def daemon_pid(self, host: Host) -> int:
        """Of the service; 0 if it does not run."""
        return int(host.sh("systemctl", "show", "-P", "MainPID", "elasticd").stdout)


def make_install(host: Host, tree: Path, *arguments: str) -> str:
    """`make install` of a tree on a host, with the packages that the tests themselves have; what it said."""
    environment = (f"PYTHON={PYTHON}", f"FROM_VENV={PREFIX}")
    return host.sh("make", "-C", tree, "--no-print-directory", "install", *environment, *arguments, timeout=110).stdout


def allow(host: Host, name: str, text: str) -> None:
    """Write a job file."""
    host.write(JOBS / f"{name}.toml", f'name = "{name}"\n{text}')


COPY = """\
set -e
rm -rf "$2"
mkdir -p "$2"
cd "$1"
tar -c elasticd trainer detectors deploy docs pyproject.toml constraints.txt README.md LICENSE Makefile | tar -C "$2" -x --no-same-owner
sed -i "s/^__version__ = .*/__version__ = \\"$3\\"/" "$2/elasticd/__init__.py"
"""
"""A source tree at another place, of another version."""
READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=5)"
GET = """\
import http.client, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect("/run/elasticd/api.sock")
connection = Unix("localhost")
connection.request("GET", sys.argv[1])
print(connection.getresponse().read().decode())
"""
