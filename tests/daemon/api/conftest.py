"""Fixtures: a cluster in a real etcd, and its API on real sockets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.api.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticd.daemon.api.server import ApiServer
    from tests.support.etcd import Server


@pytest.fixture(autouse=True)
def _no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert not died, died


@pytest.fixture
def world(daemon_server: Server) -> Iterator[World]:
    daemon_server.heal()
    daemon_server.await_serving()
    one = World(daemon_server)
    yield one
    daemon_server.heal()
    one.close()


@pytest.fixture
def api(world: World) -> Iterator[ApiServer]:
    """The world, served."""
    with world.served() as server:
        yield server
