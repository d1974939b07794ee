"""What a daemon's configuration file may say, and that a bad one is put in one line that names file, key and value."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from elasticd.daemon.config import DaemonConfig, Supervision
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.launching import agent_config
from elasticd.daemon.slots import Slot
from elasticd.daemon.values import LINE_MAX
from elasticd.errors import UsageError
from elasticd.kv.types import TLSFiles
from elasticd.observability.limits import LogLimits
from elasticd.rendezvous.records import TargetRecord

LEAST = '[etcd]\nendpoints = ["etcd-1:2379"]\n'
FULL = """
cluster = "blue"
node = "gpu-7"
slots = 4
agents = "processes"
labels = { rack = "r1" }
[etcd]
endpoints = ["etcd-1:2379", "[2001:db8::1]:2379"]
cacert = "/tls/ca.pem"
cert = "/tls/node.pem"
key = "/tls/node.key"
operator_cert = "/tls/operator.pem"
operator_key = "credential:operator.key"
[timing]
ttl = 10
loop_wait = 2
retry_timeout = 4.0
[metrics]
listen = ""
[peer]
listen = ":0"
cert = "/tls/peer.pem"
key = "/tls/peer.key"
clients_ca = "/tls/ca.pem"
"""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it reads as another user")


def read(tmp_path: Path, text: str | bytes) -> DaemonConfig:
    path = tmp_path / "elasticd.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return DaemonConfig.read(path)


def complaint(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/elasticd.toml: ")
    assert "\n" not in said
    return said.removeprefix(f"{tmp_path}/elasticd.toml: ")


def test_endpoints_are_all_that_must_be_said(tmp_path: Path) -> None:
    config = read(tmp_path, LEAST)
    assert config.etcd.endpoints == ("etcd-1:2379",)
    assert (config.cluster, config.node, config.slots, config.agents) == ("default", None, None, Supervision.AUTO)
    assert config.timing.loop_wait + 2 * config.timing.retry_timeout <= config.timing.ttl
    assert config.socket == Path("/run/elasticd/api.sock")
    assert config.kv.tls is None
    config.check_files()


def test_everything_that_can_be_said_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/elasticd.service")
    config = read(tmp_path, FULL)
    assert config.etcd.endpoints == ("etcd-1:2379", "[2001:db8::1]:2379")
    assert config.kv.tls == TLSFiles(cacert=Path("/tls/ca.pem"), cert=Path("/tls/node.pem"), key=Path("/tls/node.key"))
    operator_key = Path("/run/credentials/elasticd.service/operator.key")
    assert config.operator_kv.tls == TLSFiles(cacert=Path("/tls/ca.pem"), cert=Path("/tls/operator.pem"), key=operator_key)
    assert config.agents is Supervision.PROCESSES
    assert (config.timing.ttl, config.timing.loop_wait, config.timing.retry_timeout) == (10.0, 2.0, 4.0)
    assert (config.metrics.listen, config.peer.listen) == ("", ":0")
    assert config.labels == {"rack": "r1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "etcd: is missing"),
        ("[etcd]\n", "etcd.endpoints: is missing"),
        ('[etcd]\nendpoint = ["a:1"]\n', "etcd.endpoint: unknown key; did you mean endpoints?"),
        ('xyz = "red"\n' + LEAST, "xyz: unknown key"),
        ('[etcd]\nendpoints = ["https://a:2379"]\n', "etcd.endpoints.0: 'https://a:2379' is not HOST:PORT; whether TLS is spoken, cacert says"),
        ('[etcd]\nendpoints = ["a"]\n', "etcd.endpoints.0: 'a' is not HOST:PORT; whether TLS is spoken, cacert says"),
        ('[etcd]\nendpoints = [":2379"]\n', "etcd.endpoints.0: ':2379' names no host"),
        ('[etcd]\nendpoints = ["a:65536"]\n', "etcd.endpoints.0: 'a:65536': a port is at most 65535"),
        (LEAST + '[metrics]\nlisten = "127.0.0.1:99999"\n', "metrics.listen: '127.0.0.1:99999': a port is at most 65535"),
        (LEAST + '[metrics]\nlisten = "9464"\n', "metrics.listen: '9464' is not ADDRESS:PORT"),
        (LEAST + '[peer]\nlisten = ":1"\n', "peer: listen needs cert, key and clients_ca"),
        (LEAST + 'cert = "/a"\n', "etcd: cert and key come together or not at all"),
        (LEAST + 'cert = "/a"\nkey = "/b"\n', "etcd: cert and key need cacert"),
        (LEAST + 'cacert = "/c"\noperator_key = "/b"\n', "etcd: operator_cert and operator_key come together or not at all"),
        (LEAST + 'operator_key = "credential:../x"\n', "etcd.operator_key: 'credential:../x' names no credential; use letters, digits, '_', '.' and '-'"),
        (
            LEAST + 'cacert = "credential:ca"\n',
            "etcd.cacert: credential:ca: agents need this file too, and outlive the daemon's credentials; give its path",
        ),
        (
            LEAST + 'operator_cert = "credential:ca"\n',
            "etcd.operator_cert: credential:ca: there are no credentials here; the unit needs LoadCredential=ca:FILE",
        ),
        (LEAST + '[timing]\nttl = "30"\n', "timing.ttl: Input should be a valid number"),
        (LEAST + "[timing]\nttl = nan\n", "timing.ttl: Input should be a finite number"),
        (LEAST + "[agent]\nfrozen_max = inf\n", "agent.frozen_max: Input should be a finite number"),
        (
            LEAST + "[timing]\nttl = 10\n",
            "timing: loop_wait 10 + 2 x retry_timeout 10 <= ttl 10 does not hold: a slow round would cost the node its lease",
        ),
        ("slots = true\n" + LEAST, "slots: Input should be a valid integer"),
        ("slots = 0\n" + LEAST, "slots: Input should be greater than or equal to 1"),
        ('agents = "docker"\n' + LEAST, "agents: Input should be 'auto', 'systemd', 'processes' or 'children'"),
        ("slots = \n", "Invalid value (at line 1, column 9)"),
        (b'node = "\xff"\n', "'utf-8' codec can't decode byte 0xff in position 8: invalid start byte"),
        ("x = " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, said: str) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert complaint(tmp_path, text) == said


def test_what_a_file_says_cannot_steer_the_terminal_that_shows_it(tmp_path: Path) -> None:
    said = complaint(tmp_path, '"a\\u001b[31m\\u202e\\nb' + "c" * 1000 + '" = 1\n' + LEAST)
    assert said.startswith("a?[31m? bccc")
    assert len(said) == LINE_MAX


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^cannot read {tmp_path}/none\.toml: No such file or directory$"):
        DaemonConfig.read(tmp_path / "none.toml")


def test_a_certificate_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    text = LEAST + f'cacert = "{tmp_path}/ca.pem"\noperator_cert = "{tmp_path}/ca.pem"\noperator_key = "{tmp_path}/op.key"\n'
    with pytest.raises(UsageError, match=rf"^etcd\.operator_key: cannot read {tmp_path}/op\.key: No such file or directory; "):
        read(tmp_path, text).check_files()
    (tmp_path / "op.key").write_text("")
    read(tmp_path, text).check_files()
    peer = f'[peer]\nlisten = ":0"\ncert = "{tmp_path}/ca.pem"\nkey = "{tmp_path}"\nclients_ca = "{tmp_path}/ca.pem"\n'
    with pytest.raises(UsageError, match=rf"^peer\.key: cannot read {tmp_path}: Is a directory; "):
        read(tmp_path, text + peer).check_files()


@root_only
def test_a_key_that_the_daemon_may_not_read_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    key = tmp_path / "ca.pem"
    key.write_text("")
    key.chmod(0o600)
    config = read(tmp_path, LEAST + f'cacert = "{key}"\n')
    config.check_files()
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match="Permission denied"):
            config.check_files()
    finally:
        os.seteuid(0)


# --- limits of logs


def test_limits_of_logs_are_read_and_reach_the_agents(tmp_path: Path) -> None:
    config = read(
        tmp_path, LEAST + '[logs]\nlevel = "debug"\nworker_bytes = 1048576\nworker_files = 0\ngenerations = 3\njob_bytes = 10000000\nown_bytes = 65536\n'
    )
    spec = JobSpec(name="llm", argv=("/bin/true",), max_nodes=1)
    target = TargetRecord(scope=config.keys.scope, min_nodes=1, max_nodes=1, desired=1)
    told = agent_config(config, spec, target, [Slot(id="slot-0")], node="a", address="127.0.0.1", result_file=tmp_path / "result")
    assert told.logs == LogLimits(level="debug", worker_bytes=1 << 20, worker_files=0, generations=3, job_bytes=10_000_000, own_bytes=65_536)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('level = "loud"', "logs.level: Input should be 'debug', 'info', 'warning', 'error' or 'critical'"),
        ("worker_bytes = 100", "logs.worker_bytes: Input should be greater than or equal to 65536"),
        ("worker_files = 10", "logs.worker_files: Input should be less than or equal to 9"),
        ("generations = 1", "logs.generations: Input should be greater than or equal to 2"),
        ("worker_byte = 1", "logs.worker_byte: unknown key; did you mean worker_bytes?"),
    ],
)
def test_limits_that_cannot_be_are_refused(tmp_path: Path, line: str, said: str) -> None:
    assert complaint(tmp_path, f"{LEAST}[logs]\n{line}\n") == said


def test_the_installed_file_names_every_limit_with_its_default() -> None:
    text = (Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "elasticd.toml").read_text()
    section = re.split(r"\n#?\[", text.partition("\n[logs]\n")[2])[0]
    said = tomllib.loads("\n".join(line[1:] for line in section.splitlines() if re.match(r"#[a-z_]+ = ", line)))
    assert said == LogLimits().model_dump()


def test_a_level_that_is_none_ends_the_daemon_with_2_and_names_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "elasticd.toml"
    path.write_text(LEAST)
    env = {**os.environ, "ELASTICD_LOG_LEVEL": "loud"}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "elasticd.daemon", "run", "-c", str(path)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("elasticd: ELASTICD_LOG_LEVEL='loud' is no level; ")
    assert json.loads(ended.stderr.splitlines()[0])["event"] == "daemon_exit"


def test_checkpoints_lie_where_they_outlive_a_boot(tmp_path: Path) -> None:
    """run_dir is memory on a machine with systemd: what lies there is gone with the power."""
    config = read(tmp_path, LEAST + '[paths]\nrun_dir = "/run/elasticd"\nstate_dir = "/var/lib/elasticd"\n')
    target = TargetRecord(scope=config.keys.scope, min_nodes=1, max_nodes=1, desired=1)
    spec = JobSpec(name="llm", argv=("/bin/true",), max_nodes=1)
    told = agent_config(config, spec, target, [Slot(id="slot-0")], node="a", address="127.0.0.1", result_file=tmp_path / "result")
    assert told.checkpoints == Path("/var/lib/elasticd/checkpoints")
