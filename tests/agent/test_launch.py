"""Workers are started, watched and ended for real: real processes, real signals, awaited through pidfds and pipes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from elasticd.agent import _exec_child
from elasticd.agent.launch import EXIT_UNKNOWN, ExecLauncher, WorkerLaunch, WorkerSet, worker_environment
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakeLaunch = Callable[..., WorkerLaunch]
    Start = Callable[..., WorkerSet]

pytestmark = pytest.mark.timeout(30)

SHIM = Path(_exec_child.__file__)
REPOSITORY = SHIM.parents[2]
WAIT_SECONDS = 10.0
FOREVER = "import signal\nwhile True: signal.pause()\n"
IGNORE_TERM = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
# Waits on a wakeup descriptor: signal.pause would sleep on after a signal that came just before it, handler unrun.
LEAVE_WITH_9 = """
import os, signal, sys
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
"""
FORK_SLEEPER = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-ISc', 'import signal\\nwhile True: signal.pause()'])\n"


class Pipe:
    """Worker programs say on it, in lines, when they are where a test wants them; and wait at its gate until the test opens that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gate = path.with_suffix(".gate")
        os.mkfifo(path)
        os.mkfifo(self._gate)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # RDWR: there is always a writer, so reads wait and never see the end
        self._rest = b""

    def say(self, expression: str) -> str:
        """Python source that writes the value of `expression` as one line. No file object: a signal handler's SystemExit would be lost in its destructor."""
        return f"import os\nos.write(os.open({str(self.path)!r}, os.O_WRONLY), (str({expression}) + chr(10)).encode())\n"

    def line(self) -> str:
        while b"\n" not in self._rest:
            assert select.select([self._fd], [], [], WAIT_SECONDS)[0], "the worker said nothing"
            self._rest += os.read(self._fd, 65536)
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def wait_at_gate(self) -> str:
        """Python source that waits for `open_gate`."""
        return f"open({str(self._gate)!r}).read()\n"

    def open_gate(self) -> None:
        self._gate.write_text("")

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "pipe")
    yield pipe
    pipe.close()


@pytest.fixture
def launch(tmp_path: Path) -> MakeLaunch:
    def make(source: str = FOREVER, *, rank: int = 0, argv: tuple[str, ...] | None = None, **changes: object) -> WorkerLaunch:
        values: dict[str, object] = {
            "local_rank": rank,
            "argv": argv if argv is not None else (sys.executable, "-ISc", source),
            "env": {"PATH": "/usr/bin:/bin"},
            "cwd": tmp_path,
            "stdout": tmp_path / f"stdout-{rank}.log",
            "stderr": tmp_path / f"stderr-{rank}.log",
        }
        return WorkerLaunch(**{**values, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers, and see afterwards that none is left."""
    sets: list[WorkerSet] = []

    def run(*launches: WorkerLaunch, kill_wait: float = 5.0) -> WorkerSet:
        sets.append(ExecLauncher(kill_wait=kill_wait).start(launches))
        return sets[-1]

    yield run
    for workers in sets:
        workers.stop(0.0)
        assert [worker.pid for worker in workers.workers if not gone(worker.pid)] == []


def gone(pid: int) -> bool:
    """No such process, or a zombie: whoever is to reap it has not yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def watch_end(pid: int) -> Iterator[Callable[[], None]]:
    """For a process that is not our child: gives what waits for its end."""
    fd = os.pidfd_open(pid)

    def wait() -> None:
        assert select.select([fd], [], [], WAIT_SECONDS)[0], f"process {pid} did not end"
        assert gone(pid)

    try:
        yield wait
    finally:
        if not select.select([fd], [], [], 0)[0]:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def wait_exit(workers: WorkerSet) -> dict[int, int]:
    """The exit codes once all ended by themselves."""
    while workers.alive:
        assert select.select(list(workers.pidfds()), [], [], WAIT_SECONDS)[0], "no worker ended"
        workers.poll()
    return workers.poll()


def all_pids_with(word: str) -> list[int]:
    """Live processes with `word` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in line and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


# --- what a worker starts with


def test_output_is_appended_to_its_files(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """Standard output and error go to the two files, after what was there."""
    (tmp_path / "stdout-0.log").write_text("before\n")
    workers = start(launch("import sys; print('out'); print('err', file=sys.stderr)"))
    assert wait_exit(workers) == {0: 0}
    assert (tmp_path / "stdout-0.log").read_text() == "before\nout\n"
    assert (tmp_path / "stderr-0.log").read_text() == "err\n"


def test_environment_is_exactly_what_was_given(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """Nothing of the agent's environment gets in, nor LC_CTYPE, which Python sets in the C locale; odd bytes survive."""
    env = {"PATH": "/usr/bin:/bin", "LC_CTYPE": "C", "ODD": "a=b\udcff\n", "EMPTY": ""}
    workers = start(launch(argv=("env", "-0"), env=env), launch(argv=("env", "-0"), rank=1))
    assert wait_exit(workers) == {0: 0, 1: 0}
    given = (tmp_path / "stdout-0.log").read_bytes().split(b"\0")
    assert sorted(given) == sorted([b"", *(os.fsencode(f"{name}={value}") for name, value in env.items())])
    assert (tmp_path / "stdout-1.log").read_bytes() == b"PATH=/usr/bin:/bin\0"


def test_arguments_arrive_byte_for_byte(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """Whatever the locale: not only ASCII, and not only valid UTF-8."""
    argv = ("printf", "%s|", "é", "\udcff", "", "two words")
    assert wait_exit(start(launch(argv=argv, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}))) == {0: 0}
    assert (tmp_path / "stdout-0.log").read_bytes() == "é|".encode() + b"\xff||two words|"


def test_stdin_is_empty_and_other_descriptors_are_closed(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """A worker reads nothing and holds no socket of the agent's."""
    read, write = os.pipe()
    own_stdin = os.dup(0)
    os.set_inheritable(write, True)
    os.dup2(read, 0)
    try:
        workers = start(launch("import os; print(os.readlink('/proc/self/fd/0'), sorted(int(n) for n in os.listdir('/proc/self/fd')))"))
        assert wait_exit(workers) == {0: 0}
    finally:
        os.dup2(own_stdin, 0)
        for fd in (read, write, own_stdin):
            os.close(fd)
    assert (tmp_path / "stdout-0.log").read_text() == "/dev/null [0, 1, 2, 3]\n"  # 3 is listdir's own


def test_worker_leads_its_own_session(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """Its pid is that of its group and session, so that one killpg reaches all it forked."""
    before = time.time()
    (worker,) = start(launch(pipe.say("(os.getpid(), os.getpgrp(), os.getsid(0))") + FOREVER)).workers
    assert pipe.line() == str((worker.pid,) * 3)
    assert before <= worker.started_at <= time.time()


def test_signals_are_back_to_default(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """What the agent ignores or blocks is neither ignored nor blocked in a worker."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2, signal.SIGRTMIN + 5})
    try:
        workers = start(launch(argv=("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")))
        assert wait_exit(workers) == {0: 0}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGHUP, old_handler)
    # 32 and 33 are glibc's own: nobody can change them, and a shell may hand them down ignored.
    reserved = 0b11 << 31
    assert [int(line.split()[1], 16) & ~reserved for line in (tmp_path / "stdout-0.log").read_text().splitlines()] == [0, 0]


def test_relative_program_is_looked_up_from_the_working_directory(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """The working directory counts, and not the agent's."""
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\nexit 5\n")
    script.chmod(0o755)
    assert wait_exit(start(launch(argv=("./run.sh",)))) == {0: 5}


def test_environment_is_scrubbed_of_what_systemd_gave_the_agent() -> None:
    """A worker must not answer the agent's watchdog, take its sockets or read its credentials."""
    agent_only = dict.fromkeys(
        ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "CREDENTIALS_DIRECTORY"), "x"
    ) | {"INVOCATION_ID": "x", "JOURNAL_STREAM": "x"}
    base = {"PATH": "/bin", "RANK": "stale", **agent_only}
    assert worker_environment(base, {"RANK": "3", "NOTIFY_SOCKET": "again"}) == {"PATH": "/bin", "RANK": "3"}
    assert base["RANK"] == "stale"


def test_variable_that_only_looks_like_systemds_is_kept() -> None:
    """A user's LISTEN_ADDRESS is a user's."""
    assert worker_environment({"LISTEN_ADDRESS": "a"}, {}) == {"LISTEN_ADDRESS": "a"}


def test_a_worker_stays_on_its_cpus(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """Each its own; one without any runs where the agent may."""
    first, *_ = allowed = sorted(os.sched_getaffinity(0))
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    assert wait_exit(start(launch(show, cpus=(first,)), launch(show, rank=1))) == {0: 0, 1: 0}
    assert (tmp_path / "stdout-0.log").read_text() == f"[{first}]\n"
    assert (tmp_path / "stdout-1.log").read_text() == f"{allowed}\n"


def test_cpus_that_this_container_does_not_have_are_no_reason_not_to_train(launch: MakeLaunch, start: Start, tmp_path: Path) -> None:
    """It says so, and runs anywhere."""
    assert wait_exit(start(launch("import os; print(len(os.sched_getaffinity(0)))", cpus=(1000,)))) == {0: 0}
    assert (tmp_path / "stdout-0.log").read_text() == f"{len(os.sched_getaffinity(0))}\n"
    assert (tmp_path / "stderr-0.log").read_text() == "elasticd: cannot run on CPUs 1000 alone: Invalid argument; runs on any\n"


# --- a signal for those that want it

# Waits on a wakeup descriptor, as above.
SAY_USR1 = """
import os, signal
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGUSR1, lambda *_: say())
"""


def test_a_signal_reaches_a_worker_that_has_a_handler(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """The worker, and not its children, who may have none."""
    look = "try: end = child.wait(0.3)\nexcept subprocess.TimeoutExpired: end = None\n"
    say = "def say():\n  " + (look + pipe.say("f'asked, and the child ended with {end}'")).replace("\n", "\n  ") + "\n"
    (worker,) = start(launch(say + SAY_USR1 + FORK_SLEEPER + pipe.say("child.pid") + "while True: os.read(read, 1)\n")).workers
    with watch_end(int(pipe.line())) as child_ended:
        assert worker.send_if_caught(signal.SIGUSR1)
        assert pipe.line() == "asked, and the child ended with None"
        assert (worker.poll(), select.select([worker.pidfd], [], [], 0)[0]) == (None, [])
        worker.send_signal(signal.SIGKILL)
        child_ended()


def test_a_worker_without_a_handler_is_not_ended_by_the_signal(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """Nor is one that ignores it told, nor one that has ended."""
    ignoring = "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
    workers = start(launch(pipe.say("'up'") + FOREVER), launch(ignoring + pipe.say("'up'") + FOREVER, rank=1))
    assert (pipe.line(), pipe.line()) == ("up", "up")
    assert [worker.send_if_caught(signal.SIGUSR1) for worker in workers.workers] == [False, False]
    assert workers.stop(10.0) == dict.fromkeys((0, 1), -signal.SIGTERM)
    assert [worker.send_if_caught(signal.SIGUSR1) for worker in workers.workers] == [False, False]


# --- how a worker ends


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_exit_code_is_that_of_the_program(launch: MakeLaunch, start: Start, source: str, code: int) -> None:
    """Codes are as in subprocess: negative for a signal."""
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    workers = start(launch(no_core + source))
    assert wait_exit(workers) == {0: code}
    assert workers.workers[0].exitcode == code
    assert workers.alive == ()
    assert workers.pidfds() == {}


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("#!/no/such/interpreter\n", (127, "cannot run './script': no such program, or the interpreter in its first line is missing")),
        ("neither script nor program\n", (126, "cannot run './script': Exec format error")),
    ],
)
def test_program_that_cannot_be_executed_says_so_in_one_line(launch: MakeLaunch, start: Start, tmp_path: Path, content: str, end: tuple[int, str]) -> None:
    """127 and 126 as a shell gives, and the reason in the worker's own log."""
    (tmp_path / "script").write_text(content)
    (tmp_path / "script").chmod(0o755)
    assert wait_exit(start(launch(argv=("./script",)))) == {0: end[0]}
    assert (tmp_path / "stderr-0.log").read_text() == f"elasticd: {end[1]}\n"


def test_pidfd_becomes_readable_on_exit_and_not_before(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """An agent can wait for its workers and its sockets in one select."""
    workers = start(launch(pipe.say("'up'") + pipe.wait_at_gate()))
    ((fd, rank),) = workers.pidfds().items()
    assert (rank, fd) == (0, workers.workers[0].pidfd)
    pipe.line()
    assert select.select([fd], [], [], 0)[0] == []
    assert workers.poll() == {}
    pipe.open_gate()
    assert select.select([fd], [], [], WAIT_SECONDS)[0] == [fd]
    assert workers.poll() == {0: 0}
    assert workers.workers[0].pidfd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_poll_names_only_those_that_ended(launch: MakeLaunch, start: Start) -> None:
    """One of two ends; the other is alive still."""
    workers = start(launch("raise SystemExit(4)", rank=2), launch(rank=5))
    assert select.select(list(workers.pidfds()), [], [], WAIT_SECONDS)[0] == [workers.workers[0].pidfd]
    assert workers.poll() == {2: 4}
    assert workers.alive == (5,)


def test_children_left_behind_by_a_worker_are_killed(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """A worker that ended by itself leaves nothing that holds a device or a port."""
    workers = start(launch(FORK_SLEEPER + pipe.say("child.pid") + pipe.wait_at_gate() + "os._exit(7)\n"))
    with watch_end(int(pipe.line())) as child_ended:
        pipe.open_gate()
        assert wait_exit(workers) == {0: 7}
        child_ended()


def test_worker_reaped_by_somebody_else_is_no_success(launch: MakeLaunch, start: Start) -> None:
    """An exit code that was lost is not 0, and the pid, now free for others, is not signalled."""
    workers = start(launch("pass"))
    (worker,) = workers.workers
    os.waitpid(worker.pid, 0)
    with capture_logs() as logs:
        assert workers.stop(0.0) == {0: EXIT_UNKNOWN}
    assert [entry["event"] for entry in logs] == ["worker was reaped by somebody else, its exit code is lost"]


# --- stop


def test_worker_that_ignores_sigterm_is_killed_after_its_grace(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """The grace is given in full, and not exceeded."""
    workers = start(launch(IGNORE_TERM + pipe.say("'up'") + FOREVER))
    pipe.line()
    began = time.monotonic()
    assert workers.stop(0.3) == {0: -signal.SIGKILL}
    assert 0.3 <= time.monotonic() - began < 0.8


def test_grace_is_shared(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """Three stubborn workers take as long as one."""
    workers = start(*(launch(IGNORE_TERM + pipe.say("'up'") + FOREVER, rank=rank) for rank in range(3)))
    for _ in range(3):
        pipe.line()
    began = time.monotonic()
    assert workers.stop(0.3) == dict.fromkeys(range(3), -signal.SIGKILL)
    assert time.monotonic() - began < 0.8


def test_worker_that_handles_sigterm_keeps_its_exit_code(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """A worker may save and leave with a code of its own; stop returns at once then."""
    workers = start(launch(LEAVE_WITH_9 + pipe.say("'up'") + "os.read(read, 1)\n"))
    pipe.line()
    began = time.monotonic()
    assert workers.stop(20.0) == {0: 9}
    assert time.monotonic() - began < 5.0


def test_another_signal_can_be_asked_for(launch: MakeLaunch, start: Start) -> None:
    """What a drain sends is the agent's choice."""
    assert start(launch()).stop(20.0, signal.SIGUSR1) == {0: -signal.SIGUSR1}


def test_stopped_worker_hears_sigterm(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """SIGCONT follows: a worker frozen with SIGSTOP does not use up the grace."""
    workers = start(launch(pipe.say("'up'") + FOREVER))
    pipe.line()
    os.kill(workers.workers[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, workers.workers[0].pid, os.WSTOPPED)
    assert workers.stop(20.0) == {0: -signal.SIGTERM}


def test_grandchildren_are_killed_with_a_worker(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """Also those that ignore SIGTERM, of a worker that does not."""
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + pipe.say("os.getpid()") + "while True: signal.pause()"
    workers = start(launch(f"import subprocess, sys\nsubprocess.run([sys.executable, '-ISc', {stubborn!r}])"))
    with watch_end(int(pipe.line())) as grandchild_ended:
        assert workers.stop(20.0) == {0: -signal.SIGTERM}
        grandchild_ended()


def test_stop_is_idempotent_and_knows_who_ended_before(launch: MakeLaunch, start: Start) -> None:
    """The second stop answers as the first and signals nobody."""
    workers = start(launch("raise SystemExit(3)"), launch(rank=1))
    assert select.select([workers.workers[0].pidfd], [], [], WAIT_SECONDS)[0]
    expected = {0: 3, 1: -signal.SIGTERM}
    assert workers.stop(20.0) == expected
    assert workers.stop(20.0) == expected
    assert workers.poll() == expected


def test_reaped_worker_is_never_signalled(launch: MakeLaunch, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be another's by now."""
    workers = start(launch("pass"))
    wait_exit(workers)
    monkeypatch.setattr(os, "killpg", lambda *args: pytest.fail(f"killpg{args}"))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *args: pytest.fail(f"pidfd_send_signal{args}"))
    workers.workers[0].send_signal(signal.SIGKILL)
    assert workers.stop(1.0) == {0: 0}


def test_group_is_killed_before_its_leader_is_reaped(launch: MakeLaunch, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards its number could name somebody else's group."""
    workers = start(launch("pass"))
    (worker,) = workers.workers
    assert select.select([worker.pidfd], [], [], WAIT_SECONDS)[0]
    killed: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(os, "killpg", lambda pid, sig: killed.append((pid, sig, Path(f"/proc/{pid}").exists())))
    assert workers.poll() == {0: 0}
    assert killed == [(worker.pid, signal.SIGKILL, True)]
    assert not Path(f"/proc/{worker.pid}").exists()


def test_worker_that_sigkill_does_not_end_is_reported_and_left(launch: MakeLaunch, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in uninterruptible sleep, played by a kill that does nothing, holds up neither this stop for ever nor the next at all."""
    workers = start(launch(rank=6), kill_wait=0.2)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(os, "killpg", lambda *_: None)
        assert workers.stop(0.1) == {}
        began = time.monotonic()
        assert workers.stop(5.0) == {}
        assert time.monotonic() - began < 1.0
    assert (workers.stuck, workers.alive) == ((6,), (6,))
    (entry,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert (entry["local_rank"], entry["pid"]) == (6, workers.workers[0].pid)
    assert entry["state"].startswith("state ")
    workers.workers[0].send_signal(signal.SIGKILL)
    assert wait_exit(workers) == {6: -signal.SIGKILL}
    assert workers.stuck == ()


def test_workers_can_be_stopped_from_another_thread_while_one_waits(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """Fencing must not wait for a drain with a long grace."""
    workers = start(launch(IGNORE_TERM + pipe.say("'up'") + FOREVER))
    pipe.line()
    drain = threading.Thread(target=workers.stop, args=(20.0,))
    drain.start()
    assert workers.stop(0.0, signal.SIGKILL) == {0: -signal.SIGKILL}
    drain.join(5.0)
    assert not drain.is_alive()


# --- start that fails


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"argv": ("no-such-program",)}, "'no-such-program'"),
        ({"argv": ("/no/such/python", "train.py")}, "'/no/such/python'"),
        ({"argv": ("/etc/passwd",)}, "'/etc/passwd'"),
        ({"argv": ()}, "worker 1 has no program"),
        ({"cwd": Path("/no/such/directory")}, "'/no/such/directory'"),
        ({"stderr": Path("/no/such/directory/err.log")}, "'/no/such/directory/err.log'"),
        ({"stdout": Path("/")}, "'/'"),
        ({"env": {"BIG": "x" * 200_000}}, "Argument list too long"),
        ({"env": {"A=B": "x"}}, "illegal environment variable name"),
        ({"local_rank": 0}, "not unique"),
    ],
)
def test_if_one_of_two_cannot_be_started_none_is_left(launch: MakeLaunch, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    """The error names the thing at fault, and the worker started before is gone."""
    marker = str(tmp_path)  # also in the command line of the shim
    with pytest.raises(UsageError) as caught:
        ExecLauncher().start([launch(f"{FOREVER}# {marker}"), launch(f"# {marker}", **{"rank": 1, **changes})])
    assert named in str(caught.value)
    assert all_pids_with(marker) == []


def test_worker_that_cannot_be_watched_is_not_left(launch: MakeLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor left for its pidfd: killed and reaped."""

    def refuse(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(UsageError, match="cannot watch worker 0: pidfd_open: Too many open files"):
        ExecLauncher().start([launch(f"{FOREVER}# {tmp_path}")])
    assert all_pids_with(str(tmp_path)) == []


def test_workers_are_started_from_the_main_thread_only(launch: MakeLaunch) -> None:
    """PDEATHSIG would end them with the thread."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            ExecLauncher().start([launch()])
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_workers_are_not_started_where_sigchld_is_ignored(launch: MakeLaunch) -> None:
    """Every exit code would be lost."""
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="SIGCHLD"):
            ExecLauncher().start([launch()])
    finally:
        signal.signal(signal.SIGCHLD, old)


# --- a worker and the life of its agent

AGENT = """
import sys, threading
from pathlib import Path
from elasticd.agent.launch import ExecLauncher, WorkerLaunch
threading.Thread(target=threading.Event().wait, daemon=True).start()
folder = Path(sys.argv[1])
workers = ExecLauncher().start([
    WorkerLaunch(local_rank=0, argv=(sys.executable, "-ISc", sys.argv[2]), env={}, cwd=folder, stdout=folder / "out", stderr=folder / "err")
])
threading.Event().wait()
"""


def test_worker_dies_when_its_agent_is_killed(tmp_path: Path, pipe: Pipe) -> None:
    """SIGKILL of the agent leaves no orphan training on, not even one that ignores SIGTERM."""
    command = [sys.executable, "-c", AGENT, str(tmp_path), IGNORE_TERM + pipe.say("os.getpid()") + FOREVER]
    agent = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)})
    try:
        with watch_end(int(pipe.line())) as worker_ended:
            agent.kill()
            worker_ended()
    finally:
        agent.kill()
        agent.wait()


def test_worker_whose_agent_died_meanwhile_does_not_run(tmp_path: Path) -> None:
    """The window before PDEATHSIG is armed: our parent is not who started us, so the program never runs."""
    ran = tmp_path / "ran"
    done = subprocess.run([sys.executable, "-I", "-S", str(SHIM), "999999999", "same", "-", ".", "/usr/bin/touch", str(ran)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (125, "elasticd: the agent (pid 999999999) died while this worker was being started\n")
    assert not ran.exists()


def test_shim_names_a_program_that_is_gone() -> None:
    """It was there when the agent looked."""
    done = subprocess.run([sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), "same", "-", ".", "gone-program"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "gone-program" in done.stderr


def test_death_signal_survives_exec(launch: MakeLaunch, start: Start, pipe: Pipe) -> None:
    """The program itself has PDEATHSIG=SIGKILL; it was set before exec."""
    get = "import ctypes\nv = ctypes.c_int()\nctypes.CDLL(None).prctl(2, ctypes.byref(v))\n"  # PR_GET_PDEATHSIG
    start(launch(get + pipe.say("v.value") + FOREVER))
    assert pipe.line() == str(int(signal.SIGKILL))
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value))
    assert value.value == 0  # and the agent has none
