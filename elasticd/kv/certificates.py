"""The PEM files for TLS: are they usable, and did they change.

Owns: reading and checking them, and an epoch that rises when channels have to be made anew. Must not: make channels.
"""

from __future__ import annotations

import ssl
import threading
import time
from typing import TYPE_CHECKING

import structlog

from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticd.kv.types import TLSFiles

_CHECK_EVERY = 10.0  # seconds between two looks at the files

_log = structlog.get_logger("elasticd.kv")


class Certificates:
    """The files of one client, watched for renewal. Thread-safe.

    Args:
        files: what the configuration names; None for plain text.
        on_change: called after the epoch rose, on the thread that noticed.

    Raises:
        UsageError: a file is missing, unreadable or not PEM, a certificate comes without its key, or the two do not belong together.
    """

    def __init__(self, files: TLSFiles | None, *, on_change: Callable[[], None] = lambda: None) -> None:
        self.files = files
        self._on_change = on_change
        self._lock = threading.Lock()
        self._epoch = 0
        self._seen = _stamp(files)
        self._checked = time.monotonic()
        _verify(files)

    @property
    def epoch(self) -> int:
        """Rises with each renewal. Looks at the files at most every 10 s."""
        now = time.monotonic()
        with self._lock:
            due = self.files is not None and now - self._checked >= _CHECK_EVERY
            if due:
                self._checked = now
        if due and _stamp(self.files) != self._seen:
            try:
                self.reload()
            except UsageError as error:
                # A renewal is several files; half of one is no reason to drop channels that work.
                _log.warning("certificates_unusable", error=str(error))
        with self._lock:
            return self._epoch

    def reload(self) -> None:
        """Take the files as they are now.

        Raises:
            UsageError: they are not usable; what was in use stays in use.
        """
        stamp = _stamp(self.files)
        _verify(self.files)
        with self._lock:
            self._seen = stamp
            self._epoch += 1
        self._on_change()


def _stamp(files: TLSFiles | None) -> tuple[int, ...]:
    paths = () if files is None else (files.cacert, files.cert, files.key)
    return tuple(_mtime(path) for path in paths if path is not None)


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _verify(files: TLSFiles | None) -> None:
    if files is None:
        return
    for flag, path in (("cacert", files.cacert), ("cert", files.cert), ("key", files.key)):
        if path is not None:
            _readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(files.cacert)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"cacert {files.cacert} holds no usable PEM certificate ({error})") from None
    if files.cert is None and files.key is None:
        return
    if files.cert is None or files.key is None:
        given, missing = ("key", "cert") if files.cert is None else ("cert", "key")
        raise UsageError(f"{given} was given without {missing}", remedy="a client certificate takes both cert and key")
    try:
        # An encrypted key would ask for its pass phrase on the terminal of a daemon.
        context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UsageError(f"cert {files.cert} and key {files.key} are no usable pair ({error})") from None


def _readable(flag: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read ({error.strerror})", remedy="check the path and the file's permissions") from None
