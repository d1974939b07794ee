"""`deploy/etcd/roles.py` against a real etcd with auth: every allowed write succeeds, every other is refused.

One member on loopback, so that it runs without root and with each tested version; `test_etcd` does the same on three hosts.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elasticd.errors import KVPermissionError, KVUnavailableError
from elasticd.kv import KVConfig, TLSFiles
from elasticd.rendezvous.keys import ClusterKeys
from tests.cluster import matrix
from tests.cluster.etcd import Certificates, etcdctl, missing, run_roles
from tests.cluster.hosts import HostError
from tests.support.etcd import Authority, Identity, Server, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.conftest import Connect

pytestmark = pytest.mark.skipif(etcdctl() is None or shutil.which("openssl") is None, reason=missing() or "never")
KEYS = ClusterKeys(matrix.CLUSTER)
# For what is the script's doing rather than the server's.
one_version = pytest.mark.parametrize("binary", ["3.5"], indirect=True)


@dataclass(frozen=True)
class Guarded:
    """An etcd with auth, and who may use it."""

    server: Server
    certificates: Certificates

    def roles(self, *arguments: str, cluster: str = matrix.CLUSTER) -> str:
        return run_roles([f"https://{self.server.endpoint}"], self.certificates.root, cluster, *arguments)

    def config(self, files: TLSFiles) -> KVConfig:
        return KVConfig(endpoints=(self.server.endpoint,), tls=files, call_timeout=1.0)


@pytest.fixture(scope="module")
def guarded(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    certificates = Certificates(folder / "certs")
    certificates.init()
    certificates.run("member", "m0", "127.0.0.1")
    mine = certificates.folder / "members/m0"
    tls = (cast("Authority", SimpleNamespace(cacert=mine / "ca.pem")), Identity(cert=mine / "server.pem", key=mine / "server.key"))
    # Its gateway would call itself with the server's certificate, which is no client's.
    with running(Server(binary, folder / "etcd", tls=tls, flags=["--enable-grpc-gateway=false"])) as server:
        made = Guarded(server=server, certificates=certificates)
        names = [f"--node={matrix.NODE}", f"--node={matrix.OTHER_NODE}", f"--operator={matrix.OPERATOR}"]
        made.roles(*names, f"--job={matrix.JOB}", f"--job={matrix.OTHER_JOB}", "--enable-auth")
        yield made


def test_a_node_may_write_what_is_a_nodes_and_nothing_else(guarded: Guarded, connect: Connect) -> None:
    kv = connect(guarded.config(guarded.certificates.node(matrix.NODE)))
    assert matrix.writes(kv) == {row.key: row.node for row in matrix.MATRIX}
    assert matrix.reads(kv) == matrix.READABLE


def test_an_operator_may_write_what_is_an_operators_and_nothing_else(guarded: Guarded, connect: Connect) -> None:
    kv = connect(guarded.config(guarded.certificates.operator(matrix.OPERATOR)))
    assert matrix.writes(kv) == {row.key: row.operator for row in matrix.MATRIX}
    assert matrix.reads(kv) == matrix.READABLE


def test_root_may_do_everything(guarded: Guarded, connect: Connect) -> None:
    """Otherwise the two tests above would prove little."""
    kv = connect(guarded.config(guarded.certificates.root))
    assert all(matrix.writes(kv).values())
    assert all(matrix.reads(kv).values())


@pytest.mark.parametrize("name", ["n3", "nobody"])
def test_a_good_certificate_of_no_user_may_do_nothing(guarded: Guarded, connect: Connect, name: str) -> None:
    kv = connect(guarded.config(guarded.certificates.node(name)))
    assert not any(matrix.writes(kv).values())
    assert not any(matrix.reads(kv).values())


@one_version
def test_a_members_own_certificate_is_no_clients(guarded: Guarded, connect: Connect) -> None:
    folder = guarded.certificates.folder / "members/m0"
    files = TLSFiles(cacert=folder / "ca.pem", cert=folder / "server.pem", key=folder / "server.key")
    with pytest.raises(KVUnavailableError, match="client certificate"):
        connect(guarded.config(files)).check()


def test_a_second_run_changes_nothing_and_prints_the_same_matrix(guarded: Guarded) -> None:
    names = [f"--node={matrix.NODE}", f"--operator={matrix.OPERATOR}", f"--job={matrix.JOB}"]
    told = guarded.roles(*names)
    assert told.splitlines()[0] == "nothing to do: all of it is there"
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in told.splitlines()[2:]}
    cells = {key: [cell.strip() for cell in rest if cell.strip()] for key, rest in rows.items()}
    assert cells["key below /elasticd/v1/test/"] == ["NODE", "an operator"]
    assert cells["nodes/NODE"] == ["rw", "r"]
    assert cells["nodes/(another)"] == ["r", "r"]
    assert cells["jobs/mnist/target"] == ["r", "rw"]
    assert cells["jobs/mnist/generation"] == ["rw", "r"]
    assert cells["jobs/mnist/budget"] == ["rw", "rw"]
    assert cells["(anything else)"] == ["-", "-"]


@one_version
def test_a_dry_run_says_all_and_does_nothing(guarded: Guarded) -> None:
    arguments = ["--node=dry", "--job=dry"]
    told = guarded.roles("--dry-run", *arguments)
    assert "would do: etcdctl user add elasticd-node-dry --no-password" in told.splitlines()
    assert "would do: etcdctl role grant-permission elasticd:test:node:dry readwrite /elasticd/v1/test/nodes/dry" in told.splitlines()
    assert "would do: etcdctl role grant-permission elasticd:test:nodes --prefix readwrite /elasticd/v1/test/jobs/dry/members/" in told.splitlines()
    assert guarded.roles("--dry-run", *arguments) == told


def test_a_job_may_come_later_and_be_taken_away_again(guarded: Guarded, connect: Connect) -> None:
    node = connect(guarded.config(guarded.certificates.node(matrix.NODE)))
    operator = connect(guarded.config(guarded.certificates.operator(matrix.OPERATOR)))
    later = KEYS.job("later")
    assert not matrix.may_write(node, later.proposal)
    guarded.roles("--job=later")
    assert matrix.may_write(node, later.proposal)
    assert matrix.may_write(operator, later.target)
    assert not matrix.may_write(node, later.target)
    guarded.roles("--remove-job=later")
    assert not matrix.may_write(node, later.proposal)
    assert not matrix.may_write(operator, later.target)
    assert matrix.may_write(node, KEYS.job(matrix.JOB).proposal)


def test_a_removed_node_may_do_nothing_at_once_whatever_it_holds(guarded: Guarded, connect: Connect) -> None:
    guarded.roles("--node=leaver", "--operator=leaver")
    node = connect(guarded.config(guarded.certificates.node("leaver")))
    operator = connect(guarded.config(guarded.certificates.operator("leaver")))
    assert matrix.may_write(node, KEYS.node("leaver"))
    assert matrix.may_write(operator, KEYS.policy("x"))
    told = guarded.roles("--remove-node=leaver", "--remove-operator=leaver")
    assert "done: etcdctl user delete elasticd-node-leaver" in told.splitlines()
    for kv in (node, operator):
        with pytest.raises(KVPermissionError):
            kv.get(KEYS.prefix + "x")
    assert "nothing to do" in guarded.roles("--remove-node=leaver", "--remove-operator=leaver")


@one_version
def test_two_clusters_of_one_etcd_are_kept_apart(guarded: Guarded, connect: Connect) -> None:
    """The same node name in both: its certificate counts for both, each cluster's operators for their own."""
    guarded.roles("--operator=bob", f"--job={matrix.JOB}", cluster="second")
    bob = connect(guarded.config(guarded.certificates.operator("bob")))
    assert matrix.may_write(bob, ClusterKeys("second").job(matrix.JOB).target)
    assert not matrix.may_write(bob, KEYS.job(matrix.JOB).target)
    assert not matrix.may_read(bob, KEYS.job(matrix.JOB).target)


@one_version
def test_jobs_are_taken_from_a_directory_of_job_files(guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "from-file"\nargv = ["true"]\nmax_nodes = 1\n')
    assert "jobs/from-file/target" in guarded.roles("--dry-run", f"--jobs-dir={tmp_path}")
    (tmp_path / "b.toml").write_text("nothing = 1\n")
    with pytest.raises(HostError, match=r"b\.toml: KeyError\('name'\) is no job file's beginning"):
        guarded.roles("--dry-run", f"--jobs-dir={tmp_path}")


@one_version
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--node=../x"], "'../x' is no usable name"),
        (["--job=a/b"], "'a/b' is no usable name"),
    ],
)
def test_a_name_that_would_escape_its_prefix_is_refused(guarded: Guarded, arguments: list[str], said: str) -> None:
    with pytest.raises(HostError, match=said):
        guarded.roles(*arguments)
