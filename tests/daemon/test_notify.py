"""The messages to the service manager, read from a real socket."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from elasticd.daemon.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        name = str(tmp_path / "notify") if request.param == "path" else f"@elasticd-test-{os.getpid()}"
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        yield sock, name


def test_the_service_manager_hears_of_readiness_life_status_and_the_end(manager: tuple[socket.socket, str]) -> None:
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
    assert notifier.watchdog == 30.0
    notifier.ready()
    notifier.alive()
    notifier.status("two\nlines")
    notifier.status("two\nlines")
    notifier.extend(1.5)
    notifier.stopping()
    notifier.close()
    assert [sock.recv(1000) for _ in range(5)] == [b"READY=1", b"WATCHDOG=1", b"STATUS=two lines", b"EXTEND_TIMEOUT_USEC=1500000", b"STOPPING=1"]


def test_a_reload_is_told_with_its_time(manager: tuple[socket.socket, str]) -> None:
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.reloading()
    notifier.close()
    kind, _, clock = sock.recv(1000).partition(b"\n")
    assert kind == b"RELOADING=1"
    assert clock.startswith(b"MONOTONIC_USEC=")
    assert int(clock.partition(b"=")[2]) > 0


@pytest.mark.parametrize(
    "environ",
    [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}],
    ids=["no manager", "meant for another process", "garbage"],
)
def test_without_a_manager_or_a_watchdog_nothing_is_expected(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.ready()
    notifier.alive()
    assert notifier.watchdog == 0.0
    notifier.close()


def test_a_manager_that_has_gone_does_no_harm(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    notifier.ready()
    notifier.close()
    notifier.ready()
