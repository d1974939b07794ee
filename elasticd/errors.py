"""Every error this project raises on purpose, in one tree.

Owns: the classes and the exit code that each means for a command. Must not: log, or know who raises what.

::

    ElasticdError                    1  anything below; catch this one
    ├── UsageError                   2  the caller's arguments or configuration are wrong
    ├── NotRunningError              3  there is no such job, or it is not running
    ├── ConflictError                5  somebody else changed it first
    ├── WaitTimeoutError             6  gave up waiting; the work itself may go on
    ├── RefusedError                 8  a rule of the cluster forbids it (closed job, node already served)
    ├── NotAllowedError              9  no node of the cluster allows a job of that name
    ├── AccessDeniedError            7  the caller may not do this on the node API
    ├── DaemonUnavailableError       4  no daemon answers on its socket
    ├── RecordError                  1  a key in etcd holds something that is not ours to believe
    ├── JobFailedError               1  the job ended, and not by success
    └── KVError                      1  talking to etcd
        ├── KVUnavailableError       4  no endpoint answered in time
        ├── KVPermissionError        7  etcd knows us and says no, or does not know us
        ├── KVInvalidError           1  etcd refuses the request itself (too large, too many operations)
        ├── LeaseLostError           4  the lease is gone: our keys went with it
        └── KVClosedError            1  the client was closed while in use

Exit codes follow facts the field shares (LSB for 3 and 4); the table is in the README.
"""

from __future__ import annotations

from typing import ClassVar


class ElasticdError(Exception):
    """Root of the tree.

    Args:
        message: one line that names the thing at fault.
        remedy: what the reader can do about it, or "" if nothing is known.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(ElasticdError):
    """The caller's arguments or configuration are wrong."""

    exit_code = 2


class NotRunningError(ElasticdError):
    """There is no such job, or it is not running."""

    exit_code = 3


class ConflictError(ElasticdError):
    """Somebody else changed it first."""

    exit_code = 5


class WaitTimeoutError(ElasticdError):
    """Gave up waiting; the work itself may go on."""

    exit_code = 6


class RefusedError(ElasticdError):
    """A rule of the cluster forbids it."""

    exit_code = 8


class NotAllowedError(ElasticdError):
    """No node of the cluster allows a job of that name."""

    exit_code = 9


class AccessDeniedError(ElasticdError):
    """The caller may not do this on the node API."""

    exit_code = 7


class DaemonUnavailableError(ElasticdError):
    """No daemon answers on its socket. A change that raised this is ambiguous: it may have been made."""

    exit_code = 4


class RecordError(ElasticdError):
    """A key in etcd holds something that is not ours to believe: not JSON, a wrong schema, too large."""


class JobFailedError(ElasticdError):
    """The job ended, and not by success."""


class KVError(ElasticdError):
    """Talking to etcd failed."""


class KVUnavailableError(KVError):
    """No endpoint answered in time.

    A write that raised this is ambiguous: it may have happened, or happen still.
    """

    exit_code = 4


class KVPermissionError(KVError):
    """Etcd knows us and says no, or does not know us."""

    exit_code = 7


class KVInvalidError(KVError):
    """Etcd refuses the request itself: too large, too many operations, malformed."""


class LeaseLostError(KVError):
    """The lease is gone, and the keys bound to it went with it."""

    exit_code = 4


class KVClosedError(KVError):
    """The client was closed while in use."""
