"""Runs between fork and the worker's program: become who the worker is, tie our life to the agent's, put signals back to default, exec.

Owns: what `preexec_fn` would do, which CPython calls unsafe in a process with threads (the agent has gRPC's). Must not: import elasticd, or
anything slow: it is run as `python -I -S _exec_child.py PPID WHO CPUS CWD ARGV...` and each import delays each worker (`signal` alone costs 7 ms, for enum).

    WHO   same       as the agent is
          powerless  as the agent is, without capabilities unless that is root
          UID:GID:GROUP,GROUP,...:UMASK  that user, UMASK in octal; nothing is gained by exec any more
    CPUS  -          wherever the agent may run, or 0,1,2,...
    CWD   .          where we are, or a directory to enter as that user

Order matters. A change of credentials clears PR_SET_PDEATHSIG, so it comes before. PR_SET_PDEATHSIG says nothing if the agent died before the call,
so the parent is compared afterwards: either the signal is armed while the agent lives, or we see that we were given to another parent. And
/proc/self/environ is root's once we are somebody else, until exec.
"""

from __future__ import annotations

import ctypes
import os
import sys

EXIT_NOT_PREPARED = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
_SIGKILL = 9
_SIG_SETMASK = 2  # <asm-generic/signal-defs.h>; 2 on every architecture that has torch
_LAST_SIGNAL = 64
_SIGSET_BYTES = 128  # glibc's sigset_t; musl's is as large


def _say(message: str) -> None:
    os.write(2, f"elasticd: {message}\n".encode(errors="surrogateescape"))


def _fail(code: int, message: str) -> None:
    _say(message)
    os._exit(code)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> bool:
    return bool(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0)


def run_on(cpus: str) -> None:
    """Stay on these CPUs. A container may have none of them: then anywhere is better than not at all."""
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    except OSError as error:
        _say(f"cannot run on CPUs {cpus} alone: {error.strerror}; runs on any")


def become(libc: ctypes.CDLL, who: str) -> None:
    """Be the user for good: every user and group id, and no way back by any program that we exec."""
    uid, gid, groups, umask = who.split(":")
    try:
        if int(uid) != os.geteuid():
            capability = 0
            while _prctl(libc, _PR_CAPBSET_DROP, capability):  # to the last that the kernel knows; root's agents may, others need not
                capability += 1
            os.setgroups([int(group) for group in groups.split(",")])
            os.setresgid(int(gid), int(gid), int(gid))
            os.setresuid(int(uid), int(uid), int(uid))
    except OSError as error:
        _fail(EXIT_NOT_PREPARED, f"cannot become user {uid}: {error.strerror}")
    if not _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1):
        _fail(EXIT_NOT_PREPARED, f"cannot set no_new_privs: {os.strerror(ctypes.get_errno())}")
    os.umask(int(umask, 8))


def lose_capabilities(libc: ctypes.CDLL) -> None:
    """All but root's: unlike root's, an agent's ambient ones outlive a change of user and exec."""
    if os.geteuid() == 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice; what is ambient goes with the last two
    if libc.capset(header, none) != 0:
        _fail(EXIT_NOT_PREPARED, f"cannot give up capabilities: {os.strerror(ctypes.get_errno())}")


def tie_to_parent(libc: ctypes.CDLL, expected_ppid: int) -> None:
    """Die with the agent's main thread, or at once if it is gone already."""
    if not _prctl(libc, _PR_SET_PDEATHSIG, _SIGKILL):
        _fail(EXIT_NOT_PREPARED, f"cannot tie the worker to its agent: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != expected_ppid:
        _fail(EXIT_NOT_PREPARED, f"the agent (pid {expected_ppid}) died while this worker was being started")


def reset_signals(libc: ctypes.CDLL) -> None:
    """Default dispositions and an empty mask: ignored and blocked signals outlive exec."""
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    for signum in range(1, _LAST_SIGNAL + 1):
        libc.signal(signum, None)  # SIG_DFL; refused for KILL, STOP and libc's own two, which is fine
    libc.sigprocmask(_SIG_SETMASK, ctypes.create_string_buffer(_SIGSET_BYTES), None)


def enter(directory: str) -> None:
    """Be there as the user, whose home the agent may not be allowed to enter."""
    try:
        os.chdir(directory)
    except OSError as error:
        _fail(EXIT_NOT_EXECUTABLE, f"cannot enter working directory {directory!r}: {error.strerror}")


def given_environment() -> dict[bytes, bytes]:
    """The environment we were exec'ed with. os.environ is not it: in the C locale Python adds LC_CTYPE (PEP 538)."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib takes 10 ms to import
        pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    return {name: value for name, _, value in pairs}


def execute(argv: list[str], environment: dict[bytes, bytes]) -> None:
    """As os.execvpe, which imports another module for it: from a place that the user may not be allowed to read."""
    name = os.fsencode(argv[0])
    folders = [b""] if b"/" in name else environment.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    missing: OSError | None = None
    refused: OSError | None = None
    for folder in folders:
        try:
            os.execve(os.path.join(folder, name), argv, environment)  # noqa: PTH118, S606 - as above, pathlib
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            refused = refused or error
    raise refused or missing or FileNotFoundError()


def main(args: list[str]) -> None:
    """`args` as in the module's docstring. Does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    expected_ppid, who, cpus, cwd, argv = int(args[0]), args[1], args[2], args[3], args[4:]
    environment = given_environment()
    if cpus != "-":
        run_on(cpus)
    if who not in {"same", "powerless"}:
        become(libc, who)
    if who != "same":
        lose_capabilities(libc)
    tie_to_parent(libc, expected_ppid)
    reset_signals(libc)
    if cwd != ".":
        enter(cwd)
    try:
        execute(argv, environment)
    except (FileNotFoundError, NotADirectoryError):
        _fail(EXIT_NOT_FOUND, f"cannot run {argv[0]!r}: no such program, or the interpreter in its first line is missing")
    except OSError as error:
        _fail(EXIT_NOT_EXECUTABLE, f"cannot run {argv[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
