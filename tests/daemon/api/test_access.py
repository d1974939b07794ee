"""Who may what: by what the kernel says on the socket, and by the certificate's Common Name on the peer listener."""

from __future__ import annotations

import grp
import http.client
import json
import os
import pwd
import socket
import ssl
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticd.daemon.api.access import Access, Anybody, Certified, Local
from elasticd.errors import AccessDeniedError
from tests.daemon.api.world import World
from tests.support.etcd import Authority, Identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticd.daemon.api.server import ApiServer
    from tests.support.etcd import Server

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""The child does nothing but ask, and ends."""
READERS, OPERATORS, OTHERS = 7001, 7002, 7003
USERS = {"ada": (1001, OPERATORS, [OPERATORS]), "bob": (1002, OTHERS, [OTHERS, READERS]), "eve": (1003, OTHERS, [OTHERS])}


# --- the rule ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> Access:
    """With users and groups that are not this machine's; we are user 500."""

    def getpwuid(uid: int) -> Any:
        for name, (number, gid, _) in USERS.items():
            if number == uid:
                return SimpleNamespace(pw_name=name, pw_gid=gid)
        raise KeyError(uid)

    def getgrnam(name: str) -> Any:
        return SimpleNamespace(gr_gid={"readers": READERS, "operators": OPERATORS}[name])

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setattr(grp, "getgrnam", getgrnam)
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, *USERS[name][2]])
    monkeypatch.setattr(os, "geteuid", lambda: 500)
    return Access(readers="readers", operators="operators")


def verdict(access: Access, peer: Any) -> str:
    """What somebody may: nothing, read, or change."""
    may = "nothing"
    for change, word in ((False, "read"), (True, "change")):
        try:
            caller = access.admit(peer, change=change)
        except AccessDeniedError:
            return may
        assert caller.may_change or not change
        may = word
    return may


@pytest.mark.parametrize(
    ("uid", "gid", "may"),
    [
        (0, 0, "change"),
        (0, OTHERS, "change"),
        (500, OTHERS, "read"),  # the daemon's own user
        (1001, OPERATORS, "change"),
        (1001, OTHERS, "change"),  # by the group database, whatever group they came with
        (1002, OTHERS, "read"),
        (1003, OTHERS, "nothing"),
        (1003, READERS, "read"),  # by the group they came with
        (1003, OPERATORS, "change"),
        (9999, OTHERS, "nothing"),  # unknown: only that group counts
        (9999, READERS, "read"),
        (9999, OPERATORS, "change"),
        (9999, 0, "nothing"),
    ],
)
def test_what_a_user_may(access: Access, uid: int, gid: int, may: str) -> None:
    assert verdict(access, Local(pid=1, uid=uid, gid=gid)) == may


def test_a_group_that_does_not_exist_has_no_members(access: Access) -> None:
    nowhere = Access(readers="none", operators="nobody")
    assert verdict(nowhere, Local(pid=1, uid=1001, gid=OPERATORS)) == "nothing"
    assert verdict(nowhere, Local(pid=1, uid=0, gid=0)) == "change"


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("elasticd-operator-ada", "change"),
        ("elasticd-node-n1", "read"),
        ("elasticd-operator-", "nothing"),
        ("elasticd-operator", "nothing"),
        ("elasticd-operator-a b", "nothing"),
        ("elasticd-operator-a\n", "nothing"),
        ("x-elasticd-operator-ada", "nothing"),
        ("elasticd-node-", "nothing"),
        ("ELASTICD-OPERATOR-ada", "nothing"),
        ("", "nothing"),
    ],
)
def test_what_a_common_name_may(access: Access, name: str, may: str) -> None:
    assert verdict(access, Certified(name)) == may


@pytest.mark.parametrize(
    "certificate",
    [None, {}, {"subject": ()}, {"subject": ((("commonName", "elasticd-operator-a"),), (("commonName", "elasticd-node-b"),))}],
)
def test_a_certificate_without_exactly_one_common_name_is_nobodys(access: Access, certificate: Any) -> None:
    assert verdict(access, Certified.of(certificate)) == "nothing"


def test_whoever_is_not_known_may_nothing(access: Access) -> None:
    assert verdict(access, Anybody()) == "nothing"


def test_who_asked_is_named(access: Access) -> None:
    assert str(access.admit(Local(pid=7, uid=1001, gid=1), change=True)) == "ada (uid 1001, pid 7)"
    assert str(access.admit(Certified("elasticd-node-n1"), change=False)) == "certificate elasticd-node-n1"
    with pytest.raises(AccessDeniedError) as denied:
        access.admit(Local(pid=7, uid=9999, gid=1), change=False)
    assert str(denied.value) == "user 9999 (uid 9999, pid 7) may not use this API; root and members of group readers may"


# --- on the socket -------------------------------------------------------------------------------------------------------


def ask_as(world: World, uid: int, gid: int, method: str, path: str, body: str = "") -> tuple[int, Any]:
    """One request by a process of another user, who may not be able to start a Python of his own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            status, answer = world.request(method, path, raw=body.encode())
            os.write(writing, json.dumps([status, answer]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        status, answer = json.loads(told.read())
    os.waitpid(child, 0)
    return status, answer


@needs_root
@forks
@pytest.mark.parametrize("path", ["/v1/status", "/v1/jobs/train", "/openapi.json", "/metrics", "/healthz", "/nothing"])
def test_a_foreign_user_is_refused_whatever_he_asks_for(world: World, api: ApiServer, path: str) -> None:
    with structlog.testing.capture_logs() as logged:
        status, body = ask_as(world, 61234, 61234, "GET", path)
    assert (status, body["error"]["code"]) == (403, "permission")
    assert [line["event"] for line in logged] == ["denied"]


@needs_root
@forks
def test_a_member_of_the_readers_may_read_and_not_change(world: World, api: ApiServer) -> None:
    world.training()
    readers = grp.getgrnam(world.config.api.readers).gr_gid
    assert ask_as(world, 61234, readers, "GET", "/v1/jobs/train")[0] == 200
    before = world.kv.list(world.keys.prefix).items
    for verb in ("start", "stop", "scale", "pause", "resume", "checkpoint", "restart"):
        status, body = ask_as(world, 61234, readers, "POST", f"/v1/jobs/train/{verb}", '{"nodes": 3, "reason": "x"}')
        assert (status, body["error"]["code"]) == (403, "permission")
    assert world.kv.list(world.keys.prefix).items == before


@needs_root
@forks
def test_a_member_of_the_operators_may_change_and_is_named_in_the_record(daemon_server: Server) -> None:
    world = World(daemon_server)
    object.__setattr__(world.config.api, "operators", grp.getgrgid(1).gr_name)
    try:
        with world.served():
            world.training()
            assert ask_as(world, 61234, 1, "POST", "/v1/jobs/train/scale", '{"nodes": 3}')[0] == 200
        assert world.wanted().desired == 3
        (record,) = world.audit()
        assert str(record.by).startswith("user 61234 (uid 61234, pid ")
    finally:
        world.close()


def test_the_socket_lets_everybody_connect_and_the_kernel_says_who(world: World, api: ApiServer) -> None:
    assert world.config.socket.stat().st_mode & 0o777 == 0o666
    world.training()
    assert world.client.post("/v1/jobs/train/stop")["data"]["changed"]
    (record,) = world.audit()
    assert record.by == f"{pwd.getpwuid(os.geteuid()).pw_name} (uid {os.geteuid()}, pid {os.getpid()}) on n1"


def test_a_page_in_a_browser_changes_nothing(world: World, api: ApiServer) -> None:
    world.training()
    status, body = world.request("POST", "/v1/jobs/train/stop", headers={"Origin": "https://elsewhere.example", "Content-Length": "0"})
    assert (status, body["error"]["code"]) == (403, "permission")
    assert world.wanted().run


# --- on the peer listener ------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def peers(daemon_server: Server, authority: Authority) -> Iterator[World]:
    """A world whose API serves peers too; `world.address` is where."""
    own = authority.issue("own", common_name="elasticd-node-n1")
    world = World(daemon_server, peer={"listen": "127.0.0.1:0", "cert": own.cert, "key": own.key, "clients_ca": authority.cacert})
    try:
        with world.served() as server:
            world.api = server  # type: ignore[attr-defined]
            yield world
    finally:
        world.close()


def connect(world: World, authority: Authority, client: Identity | None, **more: Any) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(authority.cacert))
    if client:
        context.load_cert_chain(client.cert, client.key)
    for name, value in more.items():
        setattr(context, name, value)
    host, port = world.api.peer_address  # type: ignore[attr-defined]
    return http.client.HTTPSConnection(host, port, timeout=20, context=context)


def ask_peer(world: World, authority: Authority, client: Identity | None, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = connect(world, authority, client)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_an_operators_certificate_may_change_and_is_named_in_the_record(peers: World, authority: Authority) -> None:
    peers.training()
    operator = authority.issue("operator", common_name="elasticd-operator-ada")
    assert ask_peer(peers, authority, operator, "GET", "/v1/jobs/train")[0] == 200
    assert ask_peer(peers, authority, operator, "POST", "/v1/jobs/train/scale", {"nodes": 3})[0] == 200
    assert [one.by for one in peers.audit()] == ["certificate elasticd-operator-ada on n1"]


def test_a_nodes_certificate_may_read_and_not_change(peers: World, authority: Authority) -> None:
    peers.training()
    node = authority.issue("node", common_name="elasticd-node-n2")
    assert ask_peer(peers, authority, node, "GET", "/v1/jobs/train")[0] == 200
    status, body = ask_peer(peers, authority, node, "POST", "/v1/jobs/train/scale", {"nodes": 3})
    assert (status, body["error"]["code"]) == (403, "permission")
    assert peers.wanted().desired == 2


def test_any_other_certificate_of_the_authority_may_nothing(peers: World, authority: Authority) -> None:
    other = authority.issue("other", common_name="somebody")
    status, body = ask_peer(peers, authority, other, "GET", "/v1/status")
    assert (status, body["error"]["code"]) == (403, "permission")


def test_without_a_certificate_or_with_a_strangers_nothing_is_served(peers: World, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger").issue("x", common_name="elasticd-operator-eve")
    for client in (None, stranger):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask_peer(peers, authority, client, "GET", "/healthz")


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_no_plain_http_and_no_old_tls_on_the_peer_listener(peers: World, authority: Authority) -> None:
    host, port = peers.api.peer_address  # type: ignore[attr-defined]
    with socket.create_connection((host, port), timeout=20) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in received(plain)
    client = authority.issue("operator", common_name="elasticd-operator-ada")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.cacert)
    context.load_cert_chain(client.cert, client.key)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        http.client.HTTPSConnection(host, port, timeout=20, context=context).connect()


def test_headers_of_a_proxy_make_nobody_somebody_else(peers: World, authority: Authority) -> None:
    node = authority.issue("node", common_name="elasticd-node-n2")
    connection = connect(peers, authority, node)
    forged = {"X-Forwarded-For": "127.0.0.1", "X-Client-CN": "elasticd-operator-ada", "Forwarded": "for=127.0.0.1"}
    connection.request("POST", "/v1/jobs/train/stop", b"{}", {"Content-Type": "application/json"} | forged)
    assert connection.getresponse().status == 403
    connection.close()


def test_new_certificates_are_taken_without_dropping_what_is_connected(peers: World, authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("operator", common_name="elasticd-operator-ada")
    old = connect(peers, authority, client)
    old.request("GET", "/healthz")
    old.getresponse().read()
    fresh = Authority(tmp_path / "fresh")
    renewed = fresh.issue("own", common_name="elasticd-node-n1")
    section = peers.config.peer
    assert section.cert
    assert section.key
    assert section.clients_ca
    for path, source in ((section.cert, renewed.cert), (section.key, renewed.key), (section.clients_ca, fresh.cacert)):
        path.write_bytes(source.read_bytes())
    peers.api.reload_certificates()  # type: ignore[attr-defined]
    old.request("GET", "/healthz")
    assert old.getresponse().read() == b"ok\n"
    old.close()
    operator = fresh.issue("operator", common_name="elasticd-operator-eve")
    assert ask_peer(peers, fresh, operator, "GET", "/v1/status")[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask_peer(peers, fresh, client, "GET", "/healthz")
