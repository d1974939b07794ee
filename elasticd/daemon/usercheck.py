"""Running a job's own check: as the job's user, in time, with a bounded memory of what it prints.

Owns: that process and its whole process group, from start to reaping. Must not: know what its result is used for.

It becomes the job's user as workers do, by `agent._exec_child`: nothing of this daemon's rights is left in it, and it dies with the thread that
started it. Its group is killed at its end, whatever the end: by timeout, by cancelling, or because the program left children behind. As in
`agent.launch`, a group is signalled only while its leader is unreaped, since until then nobody else can have its number.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from elasticd.agent import _exec_child
from elasticd.agent.identity import CAPABILITIES, Identity, capabilities
from elasticd.agent.logs import describe_exit
from elasticd.daemon.values import printable
from elasticd.errors import UsageError

OUTPUT_MAX: Final = 1800
"""Characters of the line that says how it ended, the last ones of its output in it. A record takes 2,000, and others put words before ours."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEEDED: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
_SHIM: Final = Path(_exec_child.__file__).resolve()
_LOOK_SECONDS: Final = 0.2  # between two looks at `cancelled`, which no poll can wait for
_KILL_SECONDS: Final = 5.0
_CHUNK: Final = 1 << 16
_TAIL_BYTES: Final = 4 * OUTPUT_MAX  # UTF-8 needs at most four a character

_stuck: list[subprocess.Popen[bytes]] = []  # what SIGKILL did not end: dropped, the interpreter would warn of them and reap them behind our back


def run(argv: Sequence[str], user: str | None, *, cwd: Path, env: Mapping[str, str], seconds: float, cancelled: threading.Event) -> str:
    """Run a command to its end.

    Args:
        argv: the command, no shell.
        user: who it is run as; None is who we are.
        cwd: its working directory.
        env: variables besides the few that programs expect to find.
        seconds: it may take; then it is killed with its process group.
        cancelled: when set, it is killed within a quarter of a second.

    Returns:
        "" if it returned 0; else one line that says how it ended and what it printed last.
    """
    try:
        who, ours = _who(user)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), who, "-", str(cwd), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": PATH, "LANG": "C.UTF-8", **ours, **env},
            start_new_session=True,
        )
    except UsageError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"cannot run {argv[0]}: {error}"
    return _Run(process).until_its_end(seconds, cancelled)


def _who(user: str | None) -> tuple[str, Mapping[str, str]]:
    """As `_exec_child` reads it, and what the environment says of that user.

    Raises:
        UsageError: there is no such user, or we may not become it. Then it is not run as ourselves: its user may be able to change the program.
    """
    try:
        identity = Identity.find(str(os.geteuid()) if user is None else user)
    except UsageError:
        if user is not None:
            raise
        return "powerless", {"HOME": "/"}  # a uid without a name, as in many containers
    if not identity.foreign:
        return "powerless", identity.environment
    missing = [name for name in _NEEDED if not capabilities() >> CAPABILITIES[name] & 1]
    if missing:
        raise UsageError(f"it cannot be run as {user}: this daemon may not become another user", remedy=f"give it {', '.join(missing)}")
    return f"{identity.uid}:{identity.gid}:{','.join(map(str, identity.groups))}:{identity.umask:o}", identity.environment


class _Run:
    """One process that was started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._output = process.stdout.fileno()
        self._pidfd = os.pidfd_open(process.pid)
        self._tail = bytearray()
        os.set_blocking(self._output, False)

    def until_its_end(self, seconds: float, cancelled: threading.Event) -> str:
        """Wait for it, read what it prints, and leave nothing of it behind."""
        try:
            how = self._wait(seconds, cancelled)
            code = self._peek()
            self._kill_group()
            if not self._ended_within(_KILL_SECONDS):
                return f"{how}, and SIGKILL did not end it"
            self._drain()
            if not how and code == 0:
                return ""
            return self._with_output(how or ("somebody else took its exit code" if code is None else describe_exit(code)))
        finally:
            self._close()

    def _wait(self, seconds: float, cancelled: threading.Event) -> str:
        """Why it is to be ended, "" when it has ended by itself."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._output, select.POLLIN)
        while not cancelled.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return f"not done after {seconds:g} s"
            for fd, _ in poller.poll(min(left, _LOOK_SECONDS) * 1000):
                if fd == self._pidfd:
                    return ""
                if self._read() == 0:
                    poller.unregister(self._output)  # closed; it may go on all the same
        return "cancelled"

    def _read(self) -> int | None:
        """Take a piece of what it has printed. Returns its bytes, 0 when nobody can print any more, None if there is nothing now."""
        try:
            chunk = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return None
        self._tail += chunk
        del self._tail[:-_TAIL_BYTES]
        return len(chunk)

    def _drain(self) -> None:
        """What was in the pipe at its end. Somebody who left its group may hold it open, and print for ever."""
        for _ in range(32):
            if not self._read():
                return

    def _peek(self) -> int | None:
        """Its exit code, without reaping it; None while it runs, and if nobody knows."""
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _kill_group(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, 0)  # raises if it was reaped: then the group's number is no longer ours
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:  # a program with rights of its own; that it did not end is said by whoever waits for it
            return

    def _ended_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def _with_output(self, how: str) -> str:
        lines = (printable(line).strip() for line in self._tail.decode("utf-8", "replace").splitlines())
        said = " | ".join(line for line in lines if line)
        return f"{how}: {said[-(OUTPUT_MAX - len(how) - 2) :]}" if said else how

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._ended_within(0):
            self._process.wait()
        else:
            _stuck.append(self._process)
        os.close(self._pidfd)
