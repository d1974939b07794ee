"""Who asks, and what they may: the only place that says so.

Owns: the rules of docs/api.md's "Who may what". Must not: know requests beyond whether they read or change. Whatever is not allowed here is denied.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticd.daemon.audit import Caller
from elasticd.errors import AccessDeniedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPERATOR: Final = re.compile(r"elasticd-operator-[A-Za-z0-9_.-]{1,110}")
_NODE: Final = re.compile(r"elasticd-node-[A-Za-z0-9_.-]{1,110}")
_PEERCRED: Final = struct.Struct("=iII")
PEERCRED_SIZE: Final = _PEERCRED.size


@dataclass(frozen=True, slots=True)
class Local:
    """Who is at the other end of a unix socket, as the kernel says: as whom the process connected."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, credentials: bytes) -> Local:
        """From what SO_PEERCRED gives."""
        pid, uid, gid = _PEERCRED.unpack(credentials)
        return cls(pid=pid, uid=uid, gid=gid)


@dataclass(frozen=True, slots=True)
class Certified:
    """Who is at the other end of a TLS connection; "" if the certificate has not exactly one Common Name."""

    common_name: str

    @classmethod
    def of(cls, certificate: Mapping[str, Any] | None) -> Certified:
        """From what `getpeercert` gives."""
        subject = (certificate or {}).get("subject", ())
        names = [value for part in subject for name, value in part if name == "commonName"]
        return cls(common_name=names[0] if len(names) == 1 else "")


@dataclass(frozen=True, slots=True)
class Anybody:
    """Whoever connected to the plain listener, which serves only what anybody may read."""


Peer = Local | Certified | Anybody


class Access:
    """Tells what a peer may. Asks the user and group databases each time, which may be slow: not for the event loop.

    Args:
        readers: group whose members may read.
        operators: group whose members may also change.
    """

    def __init__(self, *, readers: str, operators: str) -> None:
        self._readers = readers
        self._operators = operators

    def admit(self, peer: Peer, *, change: bool) -> Caller:
        """Let somebody in.

        Args:
            change: they want to change something, not only to read.

        Raises:
            AccessDeniedError: they may not.
        """
        caller, may_read = self._local(peer) if isinstance(peer, Local) else _certified(peer) if isinstance(peer, Certified) else (_NOBODY, False)
        if not may_read:
            raise AccessDeniedError(f"{caller} may not use this API", remedy=self._remedy(peer, self._readers))
        if change and not caller.may_change:
            raise AccessDeniedError(f"{caller} may read, not change", remedy=self._remedy(peer, self._operators))
        return caller

    def _local(self, peer: Local) -> tuple[Caller, bool]:
        name, groups = _user(peer)
        may_change = peer.uid == 0 or _gid(self._operators) in groups
        may_read = may_change or peer.uid == os.geteuid() or _gid(self._readers) in groups
        return Caller(name=name, uid=peer.uid, gid=peer.gid, pid=peer.pid, may_change=may_change), may_read

    def _remedy(self, peer: Peer, group: str) -> str:
        if isinstance(peer, Local):
            return f"root and members of group {group} may"
        return "the certificate's Common Name must be elasticd-operator-* to change, or elasticd-node-* to read"


_NOBODY: Final = Caller(name="nobody", common_name="of none")


def _certified(peer: Certified) -> tuple[Caller, bool]:
    operator = _OPERATOR.fullmatch(peer.common_name) is not None
    caller = Caller(name=peer.common_name, common_name=peer.common_name, may_change=operator)
    return caller, operator or _NODE.fullmatch(peer.common_name) is not None


def _user(peer: Local) -> tuple[str, frozenset[int]]:
    """Their name, and all their groups; of a user that nobody knows, only the group that they came with."""
    try:
        user = pwd.getpwuid(peer.uid)
        return user.pw_name, frozenset((peer.gid, *os.getgrouplist(user.pw_name, user.pw_gid)))
    except (KeyError, OSError):
        return f"user {peer.uid}", frozenset((peer.gid,))


def _gid(group: str) -> int | None:
    """The group's number; None if there is no such group, and then nobody is in it."""
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, OSError):
        return None
