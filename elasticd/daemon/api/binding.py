"""Addresses to listen on: bound before anything is served, so that what is wrong is said at the start.

Owns: the unix socket's file, TCP addresses, and the TLS context of the peer listener. Must not: accept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import ssl
import stat
from typing import TYPE_CHECKING

from elasticd.daemon.unixpath import reachable
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from elasticd.daemon.config import PeerSection

_BACKLOG = 64
_PORT_MAX = 65535


class UnixAddress:
    """A unix socket that is there as long as we serve it, and ours alone.

    Anybody may connect: who may ask what is decided for each request by what the kernel says of the peer, and two groups need the socket's mode.

    Args:
        path: its file. Beside it lies `path`.lock, which whoever serves holds.

    Raises:
        UsageError: somebody else serves there, or the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            with reachable(path) as name:
                self.socket.bind(name)
            path.chmod(0o666)
            self.socket.listen(_BACKLOG)
            self._inode = path.stat().st_ino
        except BaseException as error:
            self.socket.close()
            os.close(self._lock)
            if isinstance(error, OSError):
                raise UsageError(f"cannot serve the API on {path}: {error.strerror or error}", remedy="see api.socket and paths.run_dir") from None
            raise
        self.socket.setblocking(False)

    def close(self) -> None:
        """Take the file away, unless it is another one by now, and let go."""
        self.socket.close()
        try:
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        except OSError:
            pass  # gone already
        os.close(self._lock)


def _locked(path: Path) -> int:
    """Two daemons that begin at once must not each take the other's socket for a stale one."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"cannot serve the API on {path}: {error.strerror}", remedy="see api.socket and paths.run_dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise _served(path) from None
    return lock


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"cannot serve the API on {path}: it is there and no socket", remedy="take it away, or set api.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            with reachable(path) as name:
                probe.connect(name)
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise
    raise _served(path)


def _served(path: Path) -> UsageError:
    return UsageError(f"cannot serve the API on {path}: another daemon does", remedy="stop it first, or set api.socket")


def bind_tcp(what: str, address: str) -> socket.socket:
    """A listening socket.

    Args:
        what: the key of the configuration, for the message.
        address: host:port, [IPv6]:port, or :port for all addresses.

    Raises:
        UsageError: it cannot be bound; the message names the address and says why.
    """
    host, _, port = address.rpartition(":")
    if int(port) > _PORT_MAX:  # which getaddrinfo would take modulo 65536
        raise UsageError(f"{what}: cannot listen on {address}: {port} is no port")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"{what}: cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        raise UsageError(f"{what}: cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from None
    bound.setblocking(False)
    return bound


def peer_tls(section: PeerSection) -> ssl.SSLContext:
    """The context of the peer listener: TLS 1.2 or newer, and a client certificate of `clients_ca` needed.

    Raises:
        UsageError: a file is missing, unreadable or unusable.
    """
    assert section.cert
    assert section.key
    assert section.clients_ca
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # An encrypted key would ask for its pass phrase on the terminal of a daemon.
        context.load_cert_chain(section.cert, section.key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UsageError(f"peer.cert {section.cert} and peer.key {section.key} are no usable pair ({error})") from None
    try:
        context.load_verify_locations(section.clients_ca)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"peer.clients_ca {section.clients_ca} holds no usable PEM certificate ({error})") from None
    return context
