"""An etcd of three members on three hosts, set up by `deploy/etcd`: it outlives one, keeps strangers out, and takes new certificates as it runs."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from elasticd.errors import KVPermissionError, KVUnavailableError
from elasticd.kv import Compare, Put, Target, TLSFiles
from elasticd.rendezvous.keys import ClusterKeys
from tests.cluster import matrix
from tests.cluster.etcd import Certificates, ThreeMembers
from tests.cluster.hosts import Host
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticd.kv import EtcdKV
    from tests.cluster.conftest import Connect

pytestmark = pytest.mark.root
KEYS = ClusterKeys(matrix.CLUSTER)


@pytest.fixture(scope="module", autouse=True)
def known(etcd3: ThreeMembers) -> None:
    """Users and roles of this module."""
    etcd3.roles(nodes=[matrix.NODE, matrix.OTHER_NODE], operators=[matrix.OPERATOR], jobs=[matrix.JOB, matrix.OTHER_JOB])


@pytest.fixture
def three(etcd3: ThreeMembers) -> Iterator[ThreeMembers]:
    """All three serve, before and after."""
    yield etcd3
    etcd3.heal()


@pytest.fixture
def node(three: ThreeMembers, connect: Connect) -> EtcdKV:
    return connect(three.config(three.certificates.node(matrix.NODE), call_timeout=1.0))


def write(kv: EtcdKV, value: str) -> None:
    """Write over what is there now. Compared, as the service's own writes are: one that got no answer may still be on its way to a member
    that hangs or is cut off, and must find nothing to overwrite when that is back."""
    key = KEYS.node(matrix.NODE)
    found = kv.get(key)
    if found is not None and found.value == value.encode():
        return
    seen = Compare(key=key, target=Target.MOD, op="==", value=found.mod_revision if found is not None else 0)
    assert kv.txn([seen], [Put(key=key, value=value.encode())]).succeeded


def value(kv: EtcdKV) -> str:
    found = kv.get(KEYS.node(matrix.NODE))
    return found.value.decode() if found is not None else ""


def leader(three: ThreeMembers) -> Host:
    """The member that leads, by its own metrics."""

    def found() -> Host | None:
        for host in three.hosts:
            if host.on:
                told = host.sh("python", "-I", "-S", "-c", LEADS, check=False).stdout
                if told.strip() == "1":
                    return host
        return None

    return await_(found, within=20, what="a leader") or three.hosts[0]


LEADS = """\
import urllib.request
text = urllib.request.urlopen("http://127.0.0.1:2381/metrics", timeout=2).read().decode()
print(next(line.split()[1] for line in text.splitlines() if line.startswith("etcd_server_is_leader ")))
"""


@pytest.mark.parametrize("how", ["power_off", "cut", "kill", "pause"])
def test_writes_go_on_when_the_leading_member_is_gone(three: ThreeMembers, node: EtcdKV, how: str) -> None:
    """Whether its host lost power or its network, or the process died or hangs; and what was written is there when it is back."""
    write(node, f"before {how}")
    lost = leader(three)
    {"power_off": Host.power_off, "cut": Host.cut, "kill": three.kill_member, "pause": three.pause_member}[how](lost)

    def written() -> bool:
        try:
            write(node, f"after {how}")
        except KVUnavailableError:
            return False
        return True

    await_(written, within=20, what="a write with two members")
    assert value(node) == f"after {how}"
    three.heal()
    assert leader(three) in three.hosts
    assert value(node) == f"after {how}"


def test_without_a_majority_nothing_is_written_until_one_is_back(three: ThreeMembers, node: EtcdKV) -> None:
    write(node, "whole")
    for host in three.hosts[:2]:
        three.stop_member(host)
    with pytest.raises(KVUnavailableError):
        write(node, "alone")
    three.hosts[0].sh("systemctl", "start", "--no-block", "etcd")
    three.await_healthy([three.hosts[0], three.hosts[2]])
    write(node, "two")
    assert value(node) == "two"


def test_a_node_may_write_what_is_a_nodes_and_nothing_else(three: ThreeMembers, node: EtcdKV) -> None:
    assert matrix.writes(node) == {row.key: row.node for row in matrix.MATRIX}
    assert matrix.reads(node) == matrix.READABLE


def test_an_operator_may_write_what_is_an_operators_and_nothing_else(three: ThreeMembers, connect: Connect) -> None:
    kv = connect(three.config(three.certificates.operator(matrix.OPERATOR)))
    assert matrix.writes(kv) == {row.key: row.operator for row in matrix.MATRIX}
    assert matrix.reads(kv) == matrix.READABLE


def test_a_client_without_a_certificate_is_refused(three: ThreeMembers, connect: Connect) -> None:
    files = TLSFiles(cacert=three.certificates.root.cacert)
    with pytest.raises(KVUnavailableError, match="client certificate"):
        connect(three.config(files, call_timeout=0.5)).check()


def test_a_client_of_another_authority_is_refused(three: ThreeMembers, connect: Connect, tmp_path: Path) -> None:
    """It calls itself root, and even trusts our authority."""
    stranger = Certificates(tmp_path / "strange")
    stranger.init()
    files = TLSFiles(cacert=three.certificates.root.cacert, cert=stranger.root.cert, key=stranger.root.key)
    with pytest.raises(KVUnavailableError, match="client certificate"):
        connect(three.config(files, call_timeout=0.5)).check()


def test_a_certificate_whose_name_is_no_user_may_do_nothing(three: ThreeMembers, connect: Connect) -> None:
    kv = connect(three.config(three.certificates.node("stranger")))
    with pytest.raises(KVPermissionError):
        kv.get(KEYS.node(matrix.NODE))
    with pytest.raises(KVPermissionError):
        write(kv, "mine")


def handshake(address: str, port: int, files: TLSFiles) -> bytes:
    """The peer's certificate (DER), after an answer to a request has been read; OSError if the other side does not want us."""
    context = ssl.create_default_context(cafile=files.cacert)
    assert files.cert is not None
    context.load_cert_chain(files.cert, files.key)
    with socket.create_connection((address, port), timeout=5) as raw, context.wrap_socket(raw, server_hostname=address) as tls:
        tls.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        if not tls.recv(1):
            raise ConnectionResetError("closed without an answer")
        certificate = tls.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


def test_no_nodes_certificate_opens_the_peer_port(three: ThreeMembers) -> None:
    """Etcd asks nobody there for a role. A member's own peer certificate does open it."""
    member, other = three.hosts[:2]
    peer_ca = three.certificates.folder / "ca/peer-ca.pem"
    told = other.sh("python", "-c", PEER, member.address, check=False)
    assert told.stdout == "answered\n", told.stderr
    node = three.certificates.node(matrix.NODE)
    with pytest.raises(OSError, match=r"alert|reset|closed|EOF"):
        handshake(member.address, 2380, TLSFiles(cacert=peer_ca, cert=node.cert, key=node.key))


PEER = """\
import socket, ssl, sys
context = ssl.create_default_context(cafile="/etc/etcd/tls/peer-ca.pem")
context.load_cert_chain("/etc/etcd/tls/peer.pem", "/etc/etcd/tls/peer.key")
with socket.create_connection((sys.argv[1], 2380), timeout=5) as raw, context.wrap_socket(raw, server_hostname=sys.argv[1]) as tls:
    tls.sendall(b"GET /version HTTP/1.0\\r\\n\\r\\n")
    print("answered" if tls.recv(1) else "closed")
"""


def main_pid(host: Host) -> str:
    return host.sh("systemctl", "show", "-P", "MainPID", "etcd").stdout


def test_renewed_certificates_of_a_member_are_used_without_a_restart(three: ThreeMembers, node: EtcdKV) -> None:
    host = three.hosts[0]
    root = three.certificates.root
    before, pid = handshake(host.address, 2379, root), main_pid(host)
    three.certificates.run("renew")
    for one in three.hosts:
        three.put_member_certificates(one)
    after = handshake(host.address, 2379, root)
    assert after != before
    assert main_pid(host) == pid
    write(node, "renewed")
    # Peers, too, meet each other with the new ones.
    host.cut()
    await_(lambda: not three.healthy(host), within=20, what="the loss")
    host.heal()
    three.await_healthy()
    assert main_pid(host) == pid


def test_a_renewed_certificate_of_a_node_is_used_by_a_client_that_runs(three: ThreeMembers, node: EtcdKV) -> None:
    write(node, "old")
    three.certificates.run("renew", "--new-keys")
    node.reload()
    write(node, "new")
    assert value(node) == "new"


def test_a_node_reaches_etcd_from_its_own_host(three: ThreeMembers) -> None:
    """With the certificate where deploy/etcd says it goes, readable by its owner alone."""
    host = three.hosts[2]
    three.install_client(host, node=matrix.NODE, owner="daemon:daemon")
    code = (
        "from pathlib import Path; from elasticd.kv import *; folder = Path('/etc/elasticd/tls')\n"
        "files = TLSFiles(cacert=folder / 'ca.pem', cert=folder / 'client.pem', key=folder / 'client.key')\n"
        f"kv = EtcdKV(KVConfig(endpoints={three.endpoints!r}, tls=files))\n"
        f"kv.check({KEYS.prefix!r}); print('served'); kv.close()\n"
    )
    assert host.python(code, user="daemon").stdout == "served\n"
    refused = host.python(code, user="nobody", check=False)
    assert "key /etc/elasticd/tls/client.key cannot be read (Permission denied)" in refused.stderr
