"""Runs between fork and the worker's program: tie our life to the agent's, put signals back to default, exec.

Owns: what `preexec_fn` would do, which CPython calls unsafe in a process with threads (the agent has gRPC's). Must not: import elasticd, or
anything slow: it is run as `python -I -S _exec_child.py PPID ARGV...` and each import delays each worker (`signal` alone costs 7 ms, for enum).

Order matters. PR_SET_PDEATHSIG says nothing if the agent died before the call, so the parent is compared afterwards: either the signal is armed
while the agent lives, or we see that we were given to another parent.
"""

from __future__ import annotations

import ctypes
import os
import sys

EXIT_NOT_TIED = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SIGKILL = 9
_SIG_SETMASK = 2  # <asm-generic/signal-defs.h>; 2 on every architecture that has torch
_LAST_SIGNAL = 64
_SIGSET_BYTES = 128  # glibc's sigset_t; musl's is as large


def _fail(code: int, message: str) -> None:
    os.write(2, f"elasticd: {message}\n".encode(errors="surrogateescape"))
    os._exit(code)


def tie_to_parent(libc: ctypes.CDLL, expected_ppid: int) -> None:
    """Die with the agent's main thread, or at once if it is gone already."""
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        _fail(EXIT_NOT_TIED, f"cannot tie the worker to its agent: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != expected_ppid:
        _fail(EXIT_NOT_TIED, f"the agent (pid {expected_ppid}) died while this worker was being started")


def reset_signals(libc: ctypes.CDLL) -> None:
    """Default dispositions and an empty mask: ignored and blocked signals outlive exec."""
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    for signum in range(1, _LAST_SIGNAL + 1):
        libc.signal(signum, None)  # SIG_DFL; refused for KILL, STOP and libc's own two, which is fine
    libc.sigprocmask(_SIG_SETMASK, ctypes.create_string_buffer(_SIGSET_BYTES), None)


def given_environment() -> dict[bytes, bytes]:
    """The environment we were exec'ed with. os.environ is not it: in the C locale Python adds LC_CTYPE (PEP 538)."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib takes 10 ms to import
        pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    return {name: value for name, _, value in pairs}


def main(args: list[str]) -> None:
    """`args` is the agent's pid and the worker's argv. Does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    expected_ppid, argv = int(args[0]), args[1:]
    tie_to_parent(libc, expected_ppid)
    reset_signals(libc)
    try:
        os.execvpe(argv[0], argv, given_environment())  # noqa: S606
    except (FileNotFoundError, NotADirectoryError):
        _fail(EXIT_NOT_FOUND, f"cannot run {argv[0]!r}: no such program, or the interpreter in its first line is missing")
    except OSError as error:
        _fail(EXIT_NOT_EXECUTABLE, f"cannot run {argv[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
