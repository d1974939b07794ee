"""Becomes another program without the rights that the daemon has beyond its user's: `python -I -S _plain_child.py PROGRAM ARGS…`.

Owns: giving up ambient capabilities, and dying with who started it. Must not: import anything of elasticd; it runs for a moment.

The daemon may change users, signal strangers and read the kernel's log. What reads hostile logs may do none of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4


def main() -> None:
    """Give up, and exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Without ambient ones, exec leaves a user that is not root none at all.
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - what the daemon says


if __name__ == "__main__":
    main()
