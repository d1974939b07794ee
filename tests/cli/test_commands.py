"""The command line from outside: what a mistake costs, and what it says."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner, Result

import elasticd
from elasticd.cli.failures import code_of
from elasticd.cli.main import app
from elasticd.errors import KVUnavailableError, NotRunningError, UsageError
from elasticd.kv import EmbeddedEtcd

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("ELASTICCTL_SOCKET", "ELASTICCTL_ETCD", "ELASTICCTL_CACERT", "ELASTICCTL_CERT", "ELASTICCTL_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('step 1')\n")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="elasticctl")


def only_line(result: Result) -> str:
    """The one line that a failing command printed."""
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize("arguments", [("version",), ("--version",)])
def test_the_version_is_told(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (0, f"elasticctl {elasticd.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--", "trian.py"), "there is no script 'trian.py'"),
        (("run", "--nodes", "0", "--", "train.py"), "--nodes 0: at least 1 node"),
        (("run", "--min-nodes", "3", "--max-nodes", "2", "--", "train.py"), "--min-nodes 3 is more than --nodes 1"),
        (("run", "--nodes", "3", "--max-nodes", "2", "--", "train.py"), "--nodes 3 is more than --max-nodes 2"),
        (("run", "--nproc-per-node", "0", "--", "train.py"), "--nproc-per-node 0: must be from 1"),
        (("run", "--lease-ttl", "1", "--", "train.py"), "--lease-ttl 1: must be from 2"),
        (("run", "--lease-ttl", "nan", "--", "train.py"), "--lease-ttl nan: must be from 2"),
        (("run", "--max-restarts", "-1", "--", "train.py"), "--max-restarts -1: must be from 0"),
        (("run", "--job", "a/b", "--", "train.py"), "job 'a/b' is not a usable name"),
        (("run", "--cluster", "", "--", "train.py"), "cluster '' is not a usable name"),
        (("run", "--summary", "no/such/dir.json", "--", "train.py"), "--summary no/such/dir.json: there is no directory"),
        (("run", "--node", "x", "--", "train.py"), "--node is for one node of a job elsewhere"),
        (("run", "--etcd", "127.0.0.1:1", "--node", "../x", "--", "train.py"), "node '../x' is not a usable name"),
        (("run", "--etcd", "127.0.0.1:x", "--", "train.py"), "--etcd '127.0.0.1:x' is not HOST:PORT"),
        (("run", "--cacert", "no.pem", "--", "train.py"), "--cacert no.pem: No such file or directory"),
        (("status", "../x"), "job '../x' is not a usable name"),
        (("status", "--every", "0"), "--every 0: must be from 0.1"),
        (("status", "--key", "x.key"), "--cert and --key need --cacert"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in only_line(result)
    assert only_line(result).startswith("elasticctl: ")


@pytest.mark.parametrize("arguments", [("run",), ("run", "--nodes", "x", "train.py"), ("status", "--what"), ("nothing",), ("run", "--show", "some", "x")])
def test_a_line_that_cannot_be_parsed_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


@pytest.mark.timeout(30)
@pytest.mark.parametrize("arguments", [("status", "train"), ("status",), ("run", "train.py")])
def test_an_etcd_that_is_not_there_exits_with_4_in_bounded_time(arguments: tuple[str, ...]) -> None:
    port = free_port()
    verb, *rest = arguments
    began = time.monotonic()
    result = call(verb, "--etcd", f"127.0.0.1:{port}", *rest)
    assert result.exit_code == 4
    assert f"127.0.0.1:{port}: nothing listens there" in only_line(result)
    assert time.monotonic() - began < 10


def test_an_error_is_json_if_json_was_asked_for() -> None:
    result = call("status", "train", "-o", "json")
    assert (result.exit_code, result.stdout) == (3, "")
    error = json.loads(only_line(result))["error"]
    assert error == {
        "code": "not_running",
        "message": "job 'train' does not run on this machine",
        "hint": "name its etcd with --etcd if it runs elsewhere",
    }


def test_error_codes_are_the_names_of_the_errors() -> None:
    assert [code_of(error("x")) for error in (UsageError, NotRunningError, KVUnavailableError)] == ["usage", "not_running", "kv_unavailable"]


def test_no_job_here_exits_with_3() -> None:
    result = call("status")
    assert result.exit_code == 3
    assert only_line(result) == "elasticctl: no job runs on this machine; start one with `elasticctl run`, or name another etcd with --etcd"


def pem(path: Path, blob: trustme.Blob) -> str:
    blob.write_to_path(str(path))
    return str(path)


@pytest.mark.timeout(60)
def test_tls_files_that_do_not_fit_are_told(tmp_path: Path) -> None:
    ours, other = trustme.CA(), trustme.CA()
    client, stranger = ours.issue_cert("client"), other.issue_cert("client")
    cacert = pem(tmp_path / "ca.pem", ours.cert_pem)
    cert = pem(tmp_path / "c.pem", client.cert_chain_pems[0])
    key = pem(tmp_path / "other.key", stranger.private_key_pem)
    port = free_port()
    result = call("status", "--etcd", f"https://127.0.0.1:{port}", "--cacert", cacert, "--cert", cert, "--key", key)
    assert result.exit_code == 2
    assert "are no usable pair" in only_line(result)
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    result = call("status", "--etcd", f"https://127.0.0.1:{port}", "--cacert", str(junk))
    assert result.exit_code == 2
    assert "holds no usable PEM certificate" in only_line(result)


class TlsEtcd:
    """A real etcd that speaks TLS and wants to know its clients."""

    def __init__(self, folder: Path, ca: trustme.CA) -> None:
        self.port, peer = free_port(), free_port()
        issued = ca.issue_cert("127.0.0.1", "localhost", not_after=datetime.now(UTC) + timedelta(days=1))
        cert, key, cacert = folder / "server.pem", folder / "server.key", folder / "server-ca.pem"
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
        ca.cert_pem.write_to_path(str(cacert))
        from elasticd.kv import find_etcd

        url = f"https://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                find_etcd().path,
                *("--data-dir", folder / "data", "--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
                *("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", cacert),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while socket.socket().connect_ex(("127.0.0.1", self.port)) != 0:
            assert self.process.poll() is None
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.timeout(90)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_certificate_of_another_ca_exits_with_4_and_says_so(tmp_path: Path) -> None:
    ours, other = trustme.CA(), trustme.CA()
    etcd = TlsEtcd(tmp_path, ours)
    try:
        good, stranger = ours.issue_cert("client"), other.issue_cert("client")
        url = f"https://127.0.0.1:{etcd.port}"
        ca, foreign_ca = pem(tmp_path / "ca.pem", ours.cert_pem), pem(tmp_path / "foreign.pem", other.cert_pem)
        cert, key = pem(tmp_path / "g.pem", good.cert_chain_pems[0]), pem(tmp_path / "g.key", good.private_key_pem)
        bad_cert, bad_key = pem(tmp_path / "b.pem", stranger.cert_chain_pems[0]), pem(tmp_path / "b.key", stranger.private_key_pem)
        result = call("status", "none", "--etcd", url, "--cacert", ca, "--cert", cert, "--key", key)
        assert (result.exit_code, only_line(result)) == (3, "elasticctl: there is no job 'none' in cluster 'default'; check its name, and --cluster")
        result = call("status", "--etcd", url, "--cacert", foreign_ca, "--cert", cert, "--key", key)
        assert result.exit_code == 4
        assert "is not signed by our CA (cacert)" in only_line(result)
        result = call("status", "--etcd", url, "--cacert", ca, "--cert", bad_cert, "--key", bad_key)
        assert result.exit_code == 4
        assert re.search(r"client certificate", only_line(result))
        result = call("status", "--etcd", f"127.0.0.1:{etcd.port}")
        assert result.exit_code == 4
        assert "does it want TLS?" in only_line(result)
    finally:
        etcd.stop()


@pytest.mark.timeout(60)
def test_an_empty_cluster_and_garbage_in_it(tmp_path: Path) -> None:
    from elasticd.kv import EtcdKV, KVConfig, Put

    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        result = call("status", "--etcd", etcd.endpoint)
        assert result.exit_code == 3
        assert "there is no job in cluster 'default'" in only_line(result)
        with EtcdKV(KVConfig(endpoints=(etcd.endpoint,))) as kv:
            kv.txn([], [Put(key="/elasticd/v1/default/jobs/train/generation", value=b"\x00junk"), Put(key="/elasticd/v1/default/jobs/ /x", value=b"")])
        result = call("status", "--etcd", etcd.endpoint, "-o", "json")
        assert result.exit_code == 0
        (job,) = json.loads(result.stdout)["data"]["jobs"]
        assert (job["job"], job["state"]) == ("train", "waiting")
        assert job["problems"][0].startswith("/elasticd/v1/default/jobs/train/generation: ")
        result = call("status", "train", "--etcd", etcd.endpoint)
        assert result.exit_code == 0
        assert "problems in etcd" in result.stdout


def test_help_tells_every_verb_with_examples() -> None:
    assert "Exit codes:" in call("--help").stdout
    for verb in ("run", "status"):
        text = call(verb, "--help").stdout
        assert "Examples:" in text
        assert f"elasticctl {verb}" in text


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_loads_nothing_that_is_heavy(arguments: list[str]) -> None:
    code = """if True:
        import sys, time
        began = time.perf_counter()
        import typer
        bare = time.perf_counter() - began
        from elasticd.cli.main import app
        try:
            app(sys.argv[1:], prog_name="elasticctl")
        except SystemExit:
            pass
        total = time.perf_counter() - began
        print(f"{total / bare:.2f}", sorted({"torch", "grpc", "etcd3", "sklearn", "structlog", "rich", "google"} & set(sys.modules)), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    ratio, loaded = done.stderr.split(" ", 1)
    print(f"elasticctl {' '.join(arguments)} takes {ratio} x `import typer`")
    assert loaded.strip() == "[]"
