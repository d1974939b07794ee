"""Starting, watching and stopping the workers of one node.

Owns: worker processes from fork to reaping, and everything in their process groups. Must not: decide when to start or stop, know ranks or
rendezvous, choose where logs lie (`logs`), or look users up (`identity`). `ExecLauncher` is the one way so far; a fork from a warm zygote is to be
another `Launcher`.

How a worker is tied to its agent. Each worker leads its own session, so that one killpg reaches the children it forked, and has PDEATHSIG=SIGKILL,
so that a killed agent leaves no orphan training (torchrun does: seen with torch 2.13). `preexec_fn` is unsafe in a process with
threads, so a shim, `_exec_child.py`, becomes the job's user, sets this up and execs the program. Cost per worker, `/bin/true` from start to end,
2 cores: nothing 0.9 ms, `setpriv --pdeathsig` 1.5 ms, the shim 13 ms (9 ms of it Python's own start), in parallel over workers and beside the
1.5 s or more of `import torch`.
setpriv was not taken: it does not look at its parent afterwards, so an agent that dies in between still leaves an orphan, it keeps ignored and
blocked signals, and it ties us to util-linux.

Three rules of Linux that the code leans on:

- PDEATHSIG fires when the parent *thread* ends (prctl(2)), so `start` refuses to run in any but the main thread. It does not reach a worker's own
  children, and exec of a set-user-ID program clears it: the service manager's cgroup (KillMode=control-group) is the net below. A command that
  wraps the training program in a shell should `exec` it.
- A pid, and the group named by it, cannot be given to anybody else while its process is unreaped. So a group is signalled only while its leader is
  unreaped, and its leftovers are killed before the leader is reaped, never after.
- A pidfd becomes readable when its process ends, so nothing here sleeps or polls by time.

Nothing else in the agent may reap our children: no `waitpid(-1)`, no SIGCHLD set to SIG_IGN.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from elasticd.agent.checks import check_launches
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elasticd.agent.identity import Identity

EXIT_UNKNOWN: Final = 255
"""Exit code of a worker that somebody else reaped: it ended, and must not be taken for a success."""

KILL_WAIT_SECONDS: Final = 5.0
"""How long after SIGKILL a worker may take to end. Only uninterruptible sleep (state D: a driver, a dead NFS server) takes longer."""

_AGENT_ONLY: Final = frozenset(
    {
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_PID",
        "LISTEN_PIDFDID",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "CREDENTIALS_DIRECTORY",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
    }
)
_SHIM: Final = Path(__file__).resolve().with_name("_exec_child.py")

log = structlog.stdlib.get_logger(__name__)


def worker_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """`base` with `extra` on top, less what systemd meant for the agent alone: its notify socket, watchdog, sockets, credentials and journal."""
    return {name: value for name, value in {**base, **extra}.items() if name not in _AGENT_ONLY}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLaunch:
    """What to run for one worker.

    Attributes:
        local_rank: its index on this node; names it in every answer.
        argv: the program and its arguments. A program without "/" is looked up in the PATH of `env`, a relative one from `cwd`.
        env: the complete environment; nothing of the agent's is added. See `worker_environment`.
        cwd: its working directory.
        stdout: file its standard output is appended to; created if missing, in a directory that exists.
        stderr: the same for its standard error; may be the same file.
        identity: who it is; None: who the agent is.
        directory: given to `identity` once its output is open, before it runs; it must be fresh.
        powerless: it gets none of the agent's capabilities, unless it is root; always so with an `identity`.
        cpus: those it may run on; () leaves them alone.
        descriptors: of ours that it gets, under the same numbers; no other is left open.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    stdout: Path
    stderr: Path
    identity: Identity | None = None
    directory: Path | None = None
    powerless: bool = False
    cpus: tuple[int, ...] = ()
    descriptors: tuple[int, ...] = ()


class WorkerHandle(Protocol):
    """One started worker. Its methods may be called from any thread and never block."""

    @property
    def local_rank(self) -> int:
        """Its index on this node."""

    @property
    def pid(self) -> int:
        """Its process id, also the id of its group and session. Do not signal it: after the end it may be another's. Use `send_signal`."""

    @property
    def pidfd(self) -> int:
        """A descriptor that select or poll finds readable once the worker ended. Closed, and -1, after `poll` saw the end."""

    @property
    def exitcode(self) -> int | None:
        """As `poll` last saw it: None while running, negative for death by that signal."""

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""

    def poll(self) -> int | None:
        """Look whether it ended. If so kill what it left in its process group, reap it, and return its exit code; else None."""

    def send_signal(self, sig: signal.Signals) -> None:
        """Signal the worker and its whole process group. Does nothing once it ended."""

    def send_if_caught(self, sig: signal.Signals) -> bool:
        """Signal the worker alone if it has a handler for `sig`, without which most signals would end it. Whether it was sent."""


class ExecWorker:
    """A worker that is a direct child of the agent, started by `ExecLauncher`."""

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        # The Popen object is kept unreaped on purpose: dropping it would let the subprocess module reap the pid behind our back.
        self._process = process
        self._lock = threading.Lock()
        self.local_rank: Final = local_rank
        self.pid: Final = process.pid
        self.started_at: Final = time.time()
        self.exitcode: int | None = None
        self.pidfd = os.pidfd_open(process.pid)

    def poll(self) -> int | None:
        """See `WorkerHandle.poll`."""
        with self._lock:
            if self.exitcode is None:
                code = self._peek()
                if code is not None:
                    self._kill_group_and_reap(code)
            return self.exitcode

    def send_signal(self, sig: signal.Signals) -> None:
        """See `WorkerHandle.send_signal`."""
        with self._lock:
            if self.exitcode is None:
                self._signal_group(sig)

    def send_if_caught(self, sig: signal.Signals) -> bool:
        """See `WorkerHandle.send_if_caught`. Its children may have no handler, so they get nothing."""
        with self._lock:
            if self.exitcode is not None or not catches(self.pid, sig):
                return False
            try:
                signal.pidfd_send_signal(self.pidfd, sig)
            except (ProcessLookupError, PermissionError):
                return False
            return True

    def _peek(self) -> int | None:
        """The exit code if it ended, without reaping."""
        try:
            status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            log.error("worker was reaped by somebody else, its exit code is lost", local_rank=self.local_rank, pid=self.pid)  # noqa: TRY400
            return EXIT_UNKNOWN
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _kill_group_and_reap(self, code: int) -> None:
        self._signal_group(signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        self._process.returncode = code
        self.exitcode = code
        fd, self.pidfd = self.pidfd, -1
        os.close(fd)

    def _signal_group(self, sig: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, 0)  # raises if the leader was reaped: then the group's number is no longer ours
            os.killpg(self.pid, sig)
        except ProcessLookupError:
            return
        except PermissionError as error:
            log.warning("cannot signal worker", local_rank=self.local_rank, pid=self.pid, signal=sig.name, error=error.strerror)


class WorkerSet:
    """The workers started together, by any launcher. May be used from several threads; `stop` blocks only its caller.

    Args:
        workers: the started workers; local ranks are unique.
        kill_wait: seconds to wait for the end after SIGKILL.
    """

    def __init__(self, workers: Sequence[WorkerHandle], *, kill_wait: float = KILL_WAIT_SECONDS) -> None:
        self.workers: Final = tuple(workers)
        self._kill_wait = kill_wait
        self._given_up: frozenset[int] = frozenset()

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks of the workers not yet seen to have ended, by this or an earlier `poll`. Empty is false."""
        return tuple(worker.local_rank for worker in self.workers if worker.exitcode is None)

    @property
    def stuck(self) -> tuple[int, ...]:
        """Local ranks that `stop` killed and that had not ended in time. They still hold their devices; the node is not fit for new workers."""
        return tuple(rank for rank in self.alive if rank in self._given_up)

    def pidfds(self) -> dict[int, int]:
        """Descriptor to wait on -> local rank, of the workers not yet seen to have ended. Ask again after each `poll`: it closes some."""
        return {fd: worker.local_rank for worker in self.workers if (fd := worker.pidfd) >= 0}

    def poll(self) -> dict[int, int]:
        """Local rank -> exit code of every worker that has ended so far. Reaps them, and kills the children they left behind."""
        return {worker.local_rank: code for worker in self.workers if (code := worker.poll()) is not None}

    def stop(self, grace: float, sig: signal.Signals = signal.SIGTERM) -> dict[int, int]:
        """End every worker and whatever is in their process groups.

        Sends `sig` to the groups, waits up to `grace`, then kills them. A worker that SIGKILL does not end within 5 s is logged, named by
        `stuck` and left; a later `stop` does not wait for it again. Children of a worker are killed as soon as the worker itself ended.

        Args:
            grace: seconds all workers together have to end by themselves; 0 gives them none.
            sig: what to ask them with. SIGCONT follows, as from systemd (SendSIGCONT): a stopped process would not hear it.

        Returns:
            local rank -> exit code, of all that ended, before or now.
        """
        self.poll()
        if sig is signal.SIGKILL or not self._ask(grace, sig):
            self._kill()
        return self.poll()

    def _ask(self, grace: float, sig: signal.Signals) -> bool:
        """True if all ended by themselves."""
        self._signal(sig)
        self._signal(signal.SIGCONT)
        if self._wait(grace):
            return True
        log.warning("workers did not end in their grace, killing them", local_ranks=self._awaited_ranks(), grace=grace, signal=sig.name)
        return False

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        if not self._wait(self._kill_wait):
            self._give_up()

    def _awaited(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.exitcode is None and worker.local_rank not in self._given_up]

    def _awaited_ranks(self) -> list[int]:
        return [worker.local_rank for worker in self._awaited()]

    def _signal(self, sig: signal.Signals) -> None:
        for worker in self._awaited():
            worker.send_signal(sig)

    def _wait(self, seconds: float) -> bool:
        """Reap workers as they end, up to `seconds`. True if none is left to wait for."""
        deadline = time.monotonic() + seconds
        while awaited := self._awaited():
            remaining = deadline - time.monotonic()
            _wait_readable([worker.pidfd for worker in awaited], max(remaining, 0.0))
            self.poll()
            if remaining <= 0.0:
                return not self._awaited()
        return True

    def _give_up(self) -> None:
        for worker in self._awaited():
            log.error("worker is stuck: SIGKILL did not end it", local_rank=worker.local_rank, pid=worker.pid, state=_process_state(worker.pid))
        self._given_up |= frozenset(self._awaited_ranks())


class Launcher(Protocol):
    """Starts workers."""

    def start(self, launches: Sequence[WorkerLaunch]) -> WorkerSet:
        """Start all of them, or none.

        Raises:
            UsageError: one cannot be started; the message names the thing at fault, and no worker is left.
        """


class ExecLauncher:
    """Starts each worker as a new program.

    Args:
        kill_wait: seconds to wait for a worker's end after SIGKILL.
    """

    def __init__(self, *, kill_wait: float = KILL_WAIT_SECONDS) -> None:
        self._kill_wait = kill_wait

    def start(self, launches: Sequence[WorkerLaunch]) -> WorkerSet:
        """See `Launcher.start`. Returns before the programs run: one that vanishes meanwhile ends with 127, or 126 if it cannot be executed.

        Raises:
            UsageError: as in `Launcher.start`.
            RuntimeError: not called from the main thread, or SIGCHLD is ignored: the workers' lives and exit codes would not be safe.
        """
        _check_agent()
        check_launches(launches)
        started: list[ExecWorker] = []
        try:
            for launch in launches:
                started.append(_start_one(launch))  # noqa: PERF401 - what was started before a failure must be in the list
        except BaseException:
            WorkerSet(started, kill_wait=self._kill_wait).stop(0.0, signal.SIGKILL)
            raise
        return WorkerSet(started, kill_wait=self._kill_wait)


def _check_agent() -> None:
    if threading.get_native_id() != os.getpid():
        raise RuntimeError("start workers from the agent's main thread: PDEATHSIG fires when the thread that started them ends")
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RuntimeError("SIGCHLD is ignored: the kernel would throw away the workers' exit codes")


def _start_one(launch: WorkerLaunch) -> ExecWorker:
    command = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), _who(launch), ",".join(map(str, launch.cpus)) or "-"]
    # As another user it goes to its working directory by itself: the agent may not be allowed there.
    command += [".", *launch.argv] if launch.identity is None else [str(launch.cwd), *launch.argv]
    cwd = launch.cwd if launch.identity is None else "/"
    with _log_file(launch.stdout, launch.identity) as stdout, _log_file(launch.stderr, launch.identity) as stderr:
        _give(launch)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env=launch.env,
                start_new_session=True,
                pass_fds=launch.descriptors,
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument, a "=" in a variable's name
            raise UsageError(f"cannot start {launch.argv[0]!r} for worker {launch.local_rank}: {error}") from error
    return _adopt(launch.local_rank, process)


def _who(launch: WorkerLaunch) -> str:
    """As `_exec_child` reads it."""
    identity = launch.identity
    if identity is None:
        return "powerless" if launch.powerless else "same"
    return f"{identity.uid}:{identity.gid}:{','.join(map(str, identity.groups))}:{identity.umask:o}"


def _give(launch: WorkerLaunch) -> None:
    """Hand the directory over. Not earlier: whoever may write there could put a link in a log's place before we open it."""
    if launch.identity is None or launch.directory is None or not launch.identity.foreign:
        return
    try:
        launch.identity.give(launch.directory)
    except OSError as error:
        raise UsageError(f"cannot give {str(launch.directory)!r} to user {launch.identity.name}: {error.strerror}") from error


def _adopt(local_rank: int, process: subprocess.Popen[bytes]) -> ExecWorker:
    try:
        return ExecWorker(local_rank, process)
    except OSError as error:  # no descriptor left, or a kernel before 5.3
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise UsageError(f"cannot watch worker {local_rank}: pidfd_open: {error.strerror}") from error


@contextmanager
def _log_file(path: Path, identity: Identity | None) -> Iterator[int]:
    """A descriptor that appends to `path`: an earlier log is never cut short. Another user's is for us and our group alone to read, whatever the umask."""
    foreign = identity is not None and identity.foreign
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | (os.O_NOFOLLOW if foreign else 0)
    try:
        fd = os.open(path, flags, 0o644)
        if foreign:
            os.fchmod(fd, 0o640)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write worker log {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _wait_readable(fds: Sequence[int], seconds: float) -> None:
    """Until one of `fds` is readable, or one of them is closed already, or `seconds` passed."""
    if any(fd < 0 for fd in fds):  # another thread reaped it between our looking and now
        return
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(seconds * 1000.0)


def catches(pid: int, sig: signal.Signals) -> bool:
    """Whether a process has a handler for the signal; False if that cannot be seen."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (sig - 1) & 1)


def _process_state(pid: int) -> str:
    """State letter and kernel function of an unreaped child, for a log line."""
    folder = Path("/proc") / str(pid)
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return f"state {state}, in {(folder / 'wchan').read_text()}"
    except (OSError, IndexError):
        return "state unknown"
