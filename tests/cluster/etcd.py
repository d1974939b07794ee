"""A three-member etcd with mTLS and roles on three hosts, set up by what `deploy/etcd` ships, as an operator would.

Owns: certificates, members and roles of that etcd, and stopping, killing and starting members. Must not: know what elasticd does with it.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.kv import KVConfig, TLSFiles
from tests.cluster.hosts import Host, HostError
from tests.cluster.places import ROOT
from tests.support.etcd import await_, etcdctl_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEPLOY = ROOT / "deploy" / "etcd"
TLS = "/etc/etcd/tls"
CLIENT_TLS = "/etc/elasticd/tls"
OPERATOR_TLS = "/etc/elasticd/operator"
OPERATOR_CREDENTIAL = "/etc/credstore/elasticd.operator.key"
SYSUSERS = "u etcd - - /var/lib/etcd\n"


@functools.cache
def etcdctl() -> str | None:
    """The etcdctl to use: the machine's, else the wheel's."""
    return shutil.which("etcdctl") or (str(path) if (path := etcdctl_path()) is not None else None)


def missing() -> str:
    """Why this machine cannot have an etcd on hosts, "" if it can."""
    lacking = [
        package
        for package, there in (
            ("etcd-server (/usr/bin/etcd)", Path("/usr/bin/etcd").exists()),
            ("openssl", shutil.which("openssl") is not None),
            ("etcd-client", etcdctl() is not None),
        )
        if not there
    ]
    return f"needs the packages {', '.join(lacking)}" if lacking else ""


class Certificates:
    """What `certs.py` makes, in a directory of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> str:
        """One command of certs.py; what it said."""
        return script(DEPLOY / "certs.py", f"--dir={self.folder}", *arguments)

    def init(self) -> None:
        """The authorities, and root."""
        self.run("init")
        self.run("root")

    def node(self, name: str) -> TLSFiles:
        """A node's, made if it is not there."""
        return self._client("node", name)

    def operator(self, name: str) -> TLSFiles:
        """An operator's, made if it is not there."""
        return self._client("operator", name)

    @property
    def root(self) -> TLSFiles:
        """The administrator's."""
        return tls_files(self.folder / "root")

    def _client(self, kind: str, name: str) -> TLSFiles:
        folder = self.folder / f"{kind}s" / name
        if not folder.exists():
            self.run(kind, name)
        return tls_files(folder)


def tls_files(folder: Path) -> TLSFiles:
    """A client's three files in a directory of certs.py's."""
    return TLSFiles(cacert=folder / "ca.pem", cert=folder / "client.pem", key=folder / "client.key")


def script(path: Path, *arguments: str) -> str:
    """Run a script as its user does; what it said."""
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise HostError(f"{path.name} {' '.join(arguments)} returned {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class ThreeMembers:
    """Etcd on three hosts. `start` brings it up; roles count from then on.

    Args:
        hosts: three that run.
        folder: for the certificates, on this machine.
        cluster: elasticd's name of the cluster that gets roles.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, *, cluster: str = "test") -> None:
        assert len(hosts) == 3
        self.hosts = list(hosts)
        self.cluster = cluster
        self.certificates = Certificates(folder)
        self.endpoints = tuple(f"{host.address}:2379" for host in hosts)

    # --- setting up ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Certificates, configuration, members, auth."""
        self.certificates.init()
        peers = ",".join(f"{host.name}=https://{host.address}:2380" for host in self.hosts)
        for host in self.hosts:
            self.certificates.run("member", host.name, host.address, "127.0.0.1")
            self._install(host, peers)
        self.await_healthy()
        self.roles("--enable-auth")

    def _install(self, host: Host, peers: str) -> None:
        config = (DEPLOY / "etcd.conf.yml").read_text()
        for place, value in (("@NAME@", host.name), ("@ADDRESS@", host.address), ("@MEMBERS@", peers)):
            config = config.replace(place, value)
        host.sh("systemd-sysusers", "-", input=SYSUSERS)
        host.write("/etc/etcd/etcd.conf.yml", config)
        host.write("/etc/systemd/system/etcd.service", (DEPLOY / "etcd.service").read_text())
        self.put_member_certificates(host)
        host.sh("systemctl", "daemon-reload")
        host.sh("systemctl", "enable", "etcd")  # as after a power cut
        host.sh("systemctl", "start", "--no-block", "etcd")

    def put_member_certificates(self, host: Host) -> None:
        """Copy a member's certificates to it, as they are now."""
        put_keys(host, self.certificates.folder / "members" / host.name, TLS, "root:etcd", mode=0o640)

    def install_client(self, host: Host, *, node: str, operator: str | None = None, owner: str = "root:root") -> None:
        """Give a host its node's certificate (CLIENT_TLS), and an operator's (OPERATOR_TLS) with the key in the credential store; roles are `roles`'.

        Args:
            owner: of the node's key, which nobody else may read.
        """
        self.certificates.node(node)
        put_keys(host, self.certificates.folder / "nodes" / node, CLIENT_TLS, owner, mode=0o400)
        if operator is not None:
            self.certificates.operator(operator)
            folder = self.certificates.folder / "operators" / operator
            put_keys(host, folder, OPERATOR_TLS, "root:root", mode=0o400)
            host.write(OPERATOR_CREDENTIAL, (folder / "client.key").read_bytes(), mode=0o600)

    def roles(self, *arguments: str, nodes: Iterable[str] = (), operators: Iterable[str] = (), jobs: Iterable[str] = ()) -> str:
        """Run roles.py as root; what it said."""
        names = [f"--{kind}={name}" for kind, given in (("node", nodes), ("operator", operators), ("job", jobs)) for name in given]
        return run_roles([f"https://{endpoint}" for endpoint in self.endpoints], self.certificates.root, self.cluster, *names, *arguments)

    # --- using it ------------------------------------------------------------------------------------------------------

    def config(self, files: TLSFiles | None, *, call_timeout: float = 2.0) -> KVConfig:
        """How a client with these files reaches it from this machine."""
        return KVConfig(endpoints=self.endpoints, tls=files, call_timeout=call_timeout)

    def healthy(self, host: Host) -> bool:
        """Whether a member serves, under a leader."""
        if not host.on:
            return False
        told = host.sh("python", "-I", "-S", "-c", HEALTH, check=False, timeout=20)
        return told.returncode == 0 and json.loads(told.stdout).get("health") == "true"

    def await_healthy(self, hosts: Iterable[Host] | None = None, within: float = 60) -> None:
        """Wait until members (all of them if not given) serve; tells the journal of one that does not."""
        for host in self.hosts if hosts is None else hosts:
            try:
                await_(functools.partial(self.healthy, host), within=within, what=f"etcd on {host.name} serving")
            except AssertionError as error:
                raise HostError(f"{error}\n{host.journal('etcd')[-3000:] if host.on else 'the host is off'}") from None

    def heal(self) -> None:
        """Every member's host on and connected, every member up and serving."""
        for host in self.hosts:
            if host.on:
                host.heal()
                host.sh("systemctl", "reset-failed")  # first: with a member that was killed, a host does not count as running
            else:
                host.boot()
        for host in self.hosts:
            host.wait_running()
            self.resume_member(host)
            host.sh("systemctl", "start", "--no-block", "etcd")
        self.await_healthy()

    # --- members -------------------------------------------------------------------------------------------------------

    def stop_member(self, host: Host) -> None:
        """In order."""
        host.sh("systemctl", "stop", "etcd")

    def start_member(self, host: Host) -> None:
        """And wait until it serves."""
        host.sh("systemctl", "start", "etcd")
        self.await_healthy([host])

    def kill_member(self, host: Host) -> None:
        """SIGKILL; it is not started again until `start_member` or `heal`."""
        host.sh("systemctl", "kill", "--signal=KILL", "etcd")
        host.sh("systemctl", "stop", "etcd")

    def pause_member(self, host: Host) -> None:
        """SIGSTOP: its connections stay, its answers stop."""
        host.sh("systemctl", "kill", "--signal=STOP", "etcd")

    def resume_member(self, host: Host) -> None:
        """SIGCONT."""
        host.sh("systemctl", "kill", "--signal=CONT", "etcd", check=False)


HEALTH = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:2381/health', timeout=2).read().decode())"


def put_keys(host: Host, folder: Path, target: str, owner: str, *, mode: int) -> None:
    """Copy certificates; the keys get owner and mode."""
    host.sh("mkdir", "-p", target)
    for path in sorted(folder.iterdir()):
        key = path.suffix == ".key"
        host.write(f"{target}/{path.name}", path.read_bytes(), mode=mode if key else 0o644, owner=owner if key else "root:root")


def run_roles(endpoints: Sequence[str], root: TLSFiles, cluster: str, *arguments: str) -> str:
    """Run roles.py; what it said."""
    connection = [f"--endpoints={','.join(endpoints)}", f"--cacert={root.cacert}", f"--cert={root.cert}", f"--key={root.key}"]
    program = etcdctl()
    assert program is not None  # `missing` has been asked
    return script(DEPLOY / "roles.py", *connection, f"--etcdctl={program}", f"--cluster={cluster}", *arguments)
