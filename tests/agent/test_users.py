"""Workers that are somebody else than their agent: what they are, what they may touch, and that they end with it.

Root's tests: they start real processes as `nobody`, and agents that are no root but hold the four capabilities. What a worker runs comes from
the system, for root's own Python may lie where nobody can go.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent.identity import CAPABILITIES, Identity
from elasticd.agent.launch import ExecLauncher, WorkerLaunch, WorkerSet
from elasticd.agent.logs import GenerationLogs
from elasticd.errors import UsageError
from tests.e2e.nodes import ROOT, Nodes, alive
from tests.support.etcd import Authority, Server, await_, running

USER = "nobody"
AGENT_UID = 64_321  # nobody else's on a Debian machine
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
FOREVER = "while :; do sleep 1; done"

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root may start processes as somebody else"),
]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may enter: pytest's own are root's."""
    folder = Path(tempfile.mkdtemp(prefix="elasticd-users-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def somebody() -> Identity:
    return Identity.find(USER)


@pytest.fixture
def start(public: Path, somebody: Identity) -> Iterator[Callable[..., WorkerSet]]:
    """Start one worker of `somebody` with a log tree of its own; it is gone afterwards."""
    sets: list[WorkerSet] = []

    def run(script: str, **changes: Any) -> WorkerSet:
        ranks = GenerationLogs.create(public / "logs", "job", "a", len(sets) + 1, "a1", passage=True).rank(0)
        values: dict[str, Any] = {
            "local_rank": 0,
            "argv": ("sh", "-c", script),
            "env": {"PATH": PATH, "ERROR": str(ranks.error)},
            "cwd": Path("/"),
            "stdout": ranks.stdout,
            "stderr": ranks.stderr,
            "identity": somebody,
            "directory": ranks.directory,
        }
        sets.append(ExecLauncher().start([WorkerLaunch(**{**values, **changes})]))
        return sets[-1]

    yield run
    for one in sets:
        one.stop(0.0)
        assert one.alive == ()


def ended(workers: WorkerSet) -> int:
    while workers.alive:
        assert select.select(list(workers.pidfds()), [], [], 10.0)[0], "the worker did not end"
        workers.poll()
    return workers.poll()[0]


def wait_gone(pid: int) -> None:
    await_(lambda: not alive(pid), what=f"the end of {pid}")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}


def output(public: Path) -> str:
    return (public / "logs/job/a/latest/rank-0/stdout.log").read_text()


def up(public: Path) -> None:
    """Wait until the worker has said so: it is the program now, and no longer what becomes it."""
    await_(lambda: output(public).startswith("up"), what="the worker")


def powers(status: dict[str, str]) -> dict[str, int]:
    return {name: int(value, 16) for name, value in status.items() if name.startswith("Cap")}


# --- what it is


def test_a_worker_is_its_user_in_every_way_and_cannot_become_anybody_else(start: Callable[..., WorkerSet], public: Path, somebody: Identity) -> None:
    """Every id and group, no capability, not even in the bounding set, and no way to gain one by exec."""
    (worker,) = start(f"echo up; {FOREVER}").workers
    up(public)
    status = status_of(worker.pid)
    assert status["Uid"] == " ".join([str(somebody.uid)] * 4)
    assert status["Gid"] == " ".join([str(somebody.gid)] * 4)
    assert {int(group) for group in status["Groups"].split()} == set(somebody.groups)
    assert powers(status) == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert status["NoNewPrivs"] == "1"
    assert int(status["Umask"], 8) == 0o022


def test_a_worker_holds_no_descriptor_but_its_three(start: Callable[..., WorkerSet], public: Path) -> None:
    """No socket, no log and no key file of the agent's."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    (worker,) = start(f"echo up; {FOREVER}").workers
    up(public)
    held = {int(fd.name): str(fd.readlink()) for fd in Path(f"/proc/{worker.pid}/fd").iterdir()}
    os.close(read)
    os.close(write)
    rank = (public / "logs/job/a/latest/rank-0").resolve()
    assert held == {0: "/dev/null", 1: str(rank / "stdout.log"), 2: str(rank / "stderr.log")}


def test_a_worker_enters_its_working_directory_as_its_user(start: Callable[..., WorkerSet], public: Path, somebody: Identity) -> None:
    """One that is closed to it is said to be."""
    for name, owner in (("own", somebody.uid), ("roots", 0)):
        (public / name).mkdir(mode=0o700)
        os.chown(public / name, owner, owner)
    assert ended(start("pwd", cwd=public / "own")) == 0
    assert output(public) == f"{public}/own\n"
    assert ended(start("pwd", cwd=public / "roots")) == 126
    errors = (public / "logs/job/a/latest/rank-0/stderr.log").read_text()
    assert errors == f"elasticd: cannot enter working directory '{public}/roots': Permission denied\n"


def test_a_program_that_the_user_may_not_run_is_named(start: Callable[..., WorkerSet], public: Path) -> None:
    """Whether the agent may is another question."""
    program = public / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    assert ended(start("", argv=(str(program),))) == 126
    errors = (public / "logs/job/a/latest/rank-0/stderr.log").read_text()
    assert errors == f"elasticd: cannot run '{program}': Permission denied\n"


# --- what it may touch


def test_of_the_log_tree_a_worker_may_write_its_ranks_directory_and_nothing_else(start: Callable[..., WorkerSet], public: Path) -> None:
    """Its error file is there; the logs are the agent's, and its group reads them. Whatever the agent's umask."""
    old = os.umask(0o077)
    (public / "logs").mkdir(mode=0o755)
    (public / "logs").chmod(0o755)
    try:
        script = 'echo out; echo "{}" > "$ERROR"; cd "${ERROR%/*}"; for d in . .. ../.. ../../.. ../../../..; do touch $d/new && echo wrote $d; done'
        assert ended(start(script)) == 1  # the last touch failed
    finally:
        os.umask(old)
    rank = (public / "logs/job/a/latest/rank-0").resolve()
    assert (rank / "stdout.log").read_text() == "out\nwrote .\n"
    assert (rank / "error.json").read_text() == "{}\n"
    found = {path.name: (path.stat().st_uid == 0, path.stat().st_gid, path.stat().st_mode & 0o7777) for path in (rank, *rank.iterdir())}
    assert found == {
        "rank-0": (False, 0, 0o2750),
        "stdout.log": (True, 0, 0o640),
        "stderr.log": (True, 0, 0o640),
        "error.json": (False, 0, 0o644),
        "new": (False, 0, 0o644),
    }


def test_a_worker_cannot_put_a_link_in_a_logs_place_before_it_is_opened(start: Callable[..., WorkerSet], public: Path) -> None:
    """The agent would write, as root, where the link leads: here to a file that a fresh directory should not hold."""
    secret = public / "secret"
    secret.write_text("kept\n")
    link = public / "stdout.log"
    link.symlink_to(secret)
    with pytest.raises(UsageError, match="cannot write worker log"):
        start("echo overwritten", stdout=link)
    assert secret.read_text() == "kept\n"


# --- an agent that is not root

AGENT = """
import sys
from pathlib import Path
from elasticd.agent.identity import Identity
from elasticd.agent.launch import ExecLauncher, WorkerLaunch
from elasticd.agent.logs import GenerationLogs
folder, user, script = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
identity = None
if user:
    identity = Identity.find(user)
    identity.check()
rank = GenerationLogs.create(folder / "logs", "job", "a", 1, "a1", passage=True).rank(0)
workers = ExecLauncher().start([
    WorkerLaunch(local_rank=0, argv=("sh", "-c", script), env={"PATH": "/usr/bin:/bin"}, cwd=folder / "home", stdout=rank.stdout,
                 stderr=rank.stderr, identity=identity, directory=rank.directory, powerless=True)
])
print(workers.workers[0].pid, flush=True)
sys.stdin.readline()
print(workers.stop(5.0), flush=True)
"""


def as_agent(*capabilities: str) -> list[str]:
    """The beginning of a command that runs as no root, with these ambient capabilities and one to read what root's Python is made of."""
    raised = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in (*capabilities, "CAP_DAC_READ_SEARCH"))
    return ["setpriv", f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups", f"--inh-caps={raised}", f"--ambient-caps={raised}"]


@pytest.fixture
def agent(public: Path, somebody: Identity) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start AGENT, in a folder of its own, with a home that only the worker's user may enter."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *capabilities: str, root: bool = False, user: str = USER) -> subprocess.Popen[str]:
        folder = public / "agent"
        (folder / "home").mkdir(parents=True)
        if not root:
            os.chown(folder, AGENT_UID, AGENT_UID)
        if user:
            (folder / "home").chmod(0o700)
            os.chown(folder / "home", somebody.uid, somebody.gid)
        command = [] if root else as_agent(*capabilities)
        command += [sys.executable, "-c", AGENT, str(folder), user, script]
        env = {"PATH": PATH, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def pid_from(agent: subprocess.Popen[str]) -> int:
    assert agent.stdout is not None
    line = agent.stdout.readline()
    assert line, agent.communicate()[1]
    return int(line)


def test_an_agent_with_four_ambient_capabilities_hands_none_of_them_on(agent: Callable[..., subprocess.Popen[str]], public: Path, somebody: Identity) -> None:
    """Its worker is the user, in a home that the agent may not enter; and the agent can end it."""
    one = agent(f"pwd; {FOREVER}", *CAPABILITIES)
    pid = pid_from(one)
    log = public / "agent/logs/job/a/latest/rank-0/stdout.log"
    await_(lambda: log.read_text() == f"{public}/agent/home\n", what="the worker being at home")
    status = status_of(pid)
    assert (status["Uid"], status["NoNewPrivs"]) == (" ".join([str(somebody.uid)] * 4), "1")
    assert {int(group) for group in status["Groups"].split()} == set(somebody.groups)
    assert {**powers(status), "CapBnd": 0} == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)  # bounding: only CAP_SETPCAP may
    said, errors = one.communicate("stop\n", timeout=20.0)
    assert (said, errors, one.returncode) == ("{0: -15}\n", "", 0)
    assert log.stat().st_gid == AGENT_UID


def test_a_worker_that_is_who_such_an_agent_is_gets_none_of_its_capabilities_either(agent: Callable[..., subprocess.Popen[str]], public: Path) -> None:
    """The job names no user."""
    one = agent(f"echo up; {FOREVER}", *CAPABILITIES, user="")
    pid = pid_from(one)
    log = public / "agent/logs/job/a/latest/rank-0/stdout.log"
    await_(lambda: log.read_text() == "up\n", what="the worker")
    status = status_of(pid)
    assert status["Uid"] == " ".join([str(AGENT_UID)] * 4)
    assert {**powers(status), "CapBnd": 0} == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)


@pytest.mark.parametrize("root", [True, False])
def test_a_worker_of_another_user_dies_with_its_killed_agent(agent: Callable[..., subprocess.Popen[str]], public: Path, root: bool) -> None:
    """Also one that ignores SIGTERM: the death signal was armed after the change of user, which clears it."""
    one = agent(f"trap '' TERM; echo up; {FOREVER}", *CAPABILITIES, root=root)
    pid = pid_from(one)
    log = public / "agent/logs/job/a/latest/rank-0/stdout.log"
    await_(lambda: log.read_text() == "up\n", what="the worker")
    one.kill()
    one.wait()
    wait_gone(pid)


def test_a_signal_for_those_that_catch_it_reaches_another_users_worker(start: Callable[..., WorkerSet], public: Path) -> None:
    """The shell has a handler from here on."""
    (worker,) = start(f"trap 'echo asked' USR1; echo up; {FOREVER}").workers
    up(public)
    assert worker.send_if_caught(signal.SIGUSR1)
    await_(lambda: output(public) == "up\nasked\n", what="the handler")


@pytest.mark.parametrize("missing", CAPABILITIES)
def test_an_agent_that_lacks_one_of_them_says_which_and_starts_nothing(agent: Callable[..., subprocess.Popen[str]], missing: str, public: Path) -> None:
    """Before anything is made."""
    one = agent("true", *(name for name in CAPABILITIES if name != missing))
    said, errors = one.communicate(timeout=20.0)
    told = f"job file asks for user {USER}, but this agent may not change users; "
    assert errors.splitlines()[-1].endswith(f"{told}run it as root, or give it the ambient capabilities that it lacks: {missing}")
    assert (said, one.returncode != 0, (public / "agent/logs").exists()) == ("", True, False)


def test_root_in_a_container_that_keeps_it_from_changing_users_says_so() -> None:
    """It has the capability itself; what it starts will not."""
    drop = "import ctypes\nassert ctypes.CDLL(None).prctl(24, 7, 0, 0, 0) == 0\n"  # PR_CAPBSET_DROP, CAP_SETUID
    code = f"{drop}from elasticd.agent.identity import Identity\nIdentity.find({USER!r}).check()"
    done = subprocess.run([sys.executable, "-c", code], env={"PATH": PATH, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30)
    assert done.stderr.splitlines()[-1].endswith("ambient capabilities that it lacks: CAP_SETUID")


def test_only_root_makes_root(agent: Callable[..., subprocess.Popen[str]]) -> None:
    """An agent of lesser rank could, with CAP_SETUID; a job file must not be a way to it."""
    one = agent("true", *CAPABILITIES, user="root")
    _said, errors = one.communicate(timeout=20.0)
    assert "job file asks for user root, but this agent is not root; " in errors.splitlines()[-1]


def test_a_user_is_found_by_name_and_by_number(somebody: Identity) -> None:
    """And one that does not exist is named."""
    entry = pwd.getpwnam(USER)
    assert (somebody.uid, somebody.gid, somebody.home, somebody.name) == (entry.pw_uid, entry.pw_gid, entry.pw_dir, USER)
    assert Identity.find(str(entry.pw_uid)) == somebody
    for unknown in ("no-such-user", "3999999999", "99999999999999999999"):
        with pytest.raises(UsageError, match=f"job file asks for user {unknown}, whom this machine does not know"):
            Identity.find(unknown)


def test_a_directory_that_keeps_the_user_out_is_found(public: Path, somebody: Identity) -> None:
    """By its mode, for owner, group and others."""
    (public / "a/b").mkdir(parents=True)
    assert somebody.kept_out_of(public / "a/b") is None
    (public / "a").chmod(0o750)
    assert somebody.kept_out_of(public / "a/b") == public / "a"
    os.chown(public / "a", -1, somebody.gid)
    assert somebody.kept_out_of(public / "a/b") is None
    os.chown(public / "a", somebody.uid, -1)
    (public / "a").chmod(0o077)
    assert somebody.kept_out_of(public / "a/b") == public / "a"


# --- the whole agent


@pytest.fixture
def secure(public: Path) -> Iterator[tuple[Server, dict[str, Any]]]:
    """An etcd that wants certificates, and where an agent's lie."""
    from tests.support.etcd import binaries

    authority = Authority(public / "tls")
    made = authority.issue("agent", common_name="agent")
    made.key.chmod(0o600)
    binary = binaries()[max(binaries())]
    with running(Server(binary, public / "etcd", tls=(authority, authority.issue("server")))) as server:
        yield server, {"cacert": str(authority.cacert), "cert": str(made.cert), "key": str(made.key)}


SPY = """
cat "$CONFIG" && echo read the configuration
cat "$KEY" && echo read the key
ls "$STATE" && echo saw the locks
kill -0 $PPID && echo may signal the agent
cat /proc/$PPID/environ && echo read the environment of the agent
id -un; echo "$HOME $USER $LOGNAME"; ls /proc/$$/fd | grep -vx "$ELASTICD_CHANNEL_FD"; readlink "/proc/$$/fd/$ELASTICD_CHANNEL_FD" | cut -d : -f 1
printf '{"message": {"message": "ValueError: no such layer", "extraInfo": {"timestamp": "1700000000"}}}' > "$TORCHELASTIC_ERROR_FILE"
exit 3
"""


@pytest.mark.timeout(120)
def test_a_job_runs_as_its_user_who_learns_nothing_of_the_agent(secure: tuple[Server, dict[str, Any]], public: Path, somebody: Identity) -> None:
    """Configuration, key, locks and environment are closed to it, and of the agent's files it has its own conversation alone; why it failed comes out."""
    server, files = secure
    folder, result = public / "nodes", public / "result.json"
    spied = {"CONFIG": str(folder / "a.json"), "KEY": files["key"], "STATE": str(folder / "state")}
    nodes = Nodes(folder, [server.endpoint], argv=["sh", "-c", SPY], cwd="/", max_nodes=1, desired=1, max_restarts=0, env=spied, **files)
    result.touch(mode=0o600)
    (folder / "logs").mkdir(mode=0o755)
    old = os.umask(0o077)  # as strict as a daemon's may be
    try:
        nodes.start("a", user=USER, result_file=str(result))
    finally:
        os.umask(old)
    try:
        assert nodes.wait("a") == 1, nodes.story()
        told = json.loads(result.read_text())
        assert "rank 0 on a: ValueError: no such layer" in told["reason"]
        rank = Path(nodes.events("a", "workers_started")[0]["logs"]) / "rank-0"
        assert (rank / "stdout.log").read_text() == f"{USER}\n{somebody.home} {USER} {USER}\n0\n1\n2\nsocket\n"
        errors = (rank / "stderr.log").read_text()
        denied = sorted(line.rpartition(": ")[0].split(": ")[-1].strip("'").rpartition("/")[2] for line in errors.splitlines() if "ermission denied" in line)
        assert denied == ["a.json", "agent.key", "environ", "state"]
    finally:
        nodes.close()


@pytest.mark.timeout(60)
def test_an_agent_that_may_not_change_users_ends_before_anything_is_started(public: Path) -> None:
    """One line, exit code 2, and the same in the result file; etcd was not even asked."""
    for name in ("logs", "run"):
        (public / name).mkdir()
        os.chown(public / name, AGENT_UID, AGENT_UID)
    config = {"job": "job", "node": "a", "argv": ["true"], "cwd": "/", "endpoints": ["127.0.0.1:1"], "max_nodes": 1, "desired": 1, "user": USER}
    config |= {"log_dir": str(public / "logs"), "state_dir": str(public / "run"), "result_file": str(public / "run/result.json")}
    (public / "a.json").write_text(json.dumps(config))
    command = [*as_agent(), sys.executable, "-m", "elasticd.agent", str(public / "a.json")]
    done = subprocess.run(command, env={"PATH": PATH, "PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True, text=True, timeout=40)
    told = json.loads((public / "run/result.json").read_text())
    missing = ", ".join(CAPABILITIES)
    reason = f"job file asks for user {USER}, but this agent may not change users; run it as root, or give it the ambient capabilities that it lacks: {missing}"
    assert (done.returncode, told["code"], told["reason"]) == (2, 2, reason)
    assert done.stderr == f"elasticd-agent: {reason}\n"
    assert not list((public / "logs").rglob("generation-*"))
