"""Making a file shorter from its beginning while others append to it.

Owns: the two ways in which Linux can do that. Must not: know whose file it is, or keep what is taken away (`agent.rotation` does).

Whoever appends needs O_APPEND, so that the next write goes to wherever the end then is. Where the file system can take a range out of a file
(ext4, XFS: FALLOC_FL_COLLAPSE_RANGE, fallocate(2)), nothing that is written meanwhile is lost.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import Final

_COLLAPSE_RANGE: Final = 0x08  # <linux/falloc.h>
_UNABLE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.ENODEV})

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def blocks(fd: int, nbytes: int) -> int:
    """`nbytes` rounded down to what can be taken out of this file."""
    unit = max(4096, os.fstatvfs(fd).f_bsize)
    return nbytes - nbytes % unit


def collapse(fd: int, nbytes: int) -> bool:
    """Take the first `nbytes` out of a file, at one stroke. It must be a multiple of the block size, and less than the file.

    Returns:
        False if this file system cannot do that.

    Raises:
        OSError: it can, and failed.
    """
    if _fallocate(fd, _COLLAPSE_RANGE, 0, nbytes) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number))


def shorten(fd: int, most: int) -> bool:
    """Leave the last half of `most` bytes of a file that has more than `most`. For logs of this very process.

    Args:
        fd: open for appending; a terminal, a pipe, or a file that is not appended to is left alone.

    Returns:
        Whether it was too long.
    """
    with suppress(OSError):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size <= most or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            return False
        surplus = blocks(fd, status.st_size - most // 2)
        if not surplus or not collapse(fd, surplus):
            _rewrite(fd, status.st_size, most // 2)
        return True
    return False


def _rewrite(fd: int, size: int, keep: int) -> None:
    """By hand: what others append just now may be lost."""
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        last = os.pread(reading, min(keep, 1 << 20), max(0, size - min(keep, 1 << 20)))
    finally:
        os.close(reading)
    os.ftruncate(fd, 0)
    os.write(fd, last)
