"""What the service manager is told: readiness, status, signs of life.

Owns: the datagrams of sd_notify(3). Must not: decide when; the loop does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """Speaks to the socket that systemd names in the environment, or to nobody.

    Args:
        environ: where NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are looked up. What is found is meant for this process alone: children are
            started without it.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if name else None
        self.watchdog = _watchdog(environ)
        self._status = ""

    def ready(self) -> None:
        """The daemon serves; also the end of a reload."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Configuration and certificates are being read again. systemd from 253 on wants the time with it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def alive(self) -> None:
        """The decision loop has turned."""
        if self.watchdog:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`, sent if it changed."""
        if text != self._status:
            self._status = text
            self._send("STATUS=" + " ".join(text.split()))

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def extend(self, seconds: float) -> None:
        """Start or stop takes so much longer, counted from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        """Say no more."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket:
            with suppress(OSError):  # a manager that does not listen is no reason to fail
                self._socket.sendto(text.encode(), self._address)


def _watchdog(environ: Mapping[str, str]) -> float:
    """Seconds within which a sign of life is expected, 0 if none is."""
    try:
        pid = int(environ.get("WATCHDOG_PID", os.getpid()))
        return int(environ.get("WATCHDOG_USEC", "0")) / 1e6 if pid == os.getpid() else 0.0
    except ValueError:
        return 0.0
