"""The three listeners: where they are, what each serves, and what becomes of connections that are slow, many or strange."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.daemon.api.binding import UnixAddress, bind_tcp, peer_tls
from elasticd.daemon.api.connections import Limits
from elasticd.daemon.config import PeerSection
from elasticd.daemon.unixpath import reachable
from elasticd.errors import UsageError
from tests.daemon.api.world import World
from tests.support.etcd import Authority, await_

if TYPE_CHECKING:
    from elasticd.daemon.api.server import ApiServer

QUICK = Limits(connections=8, handshake=0.5, idle=1, request=0.5, answer=1.0)


def plainly(api: ApiServer, method: str, path: str) -> tuple[int, bytes]:
    assert api.metrics_address
    connection = http.client.HTTPConnection(*api.metrics_address, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def knock(world: World, timeout: float = 20.0) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    connection.connect(str(world.config.socket))
    return connection


def well(connection: socket.socket) -> bool:
    """Ask for health, and read the whole answer."""
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"ok\n"):
        piece = connection.recv(4096)
        if not piece:
            return False
        answer += piece
    return True


def placed(world: World) -> socket.socket:
    """A connection that is served, once whoever asked before has been seen to have gone."""

    def attempt() -> socket.socket | None:
        connection = knock(world)
        with suppress(OSError):
            if well(connection):
                return connection
        connection.close()
        return None

    found = await_(attempt, what="a place")
    assert found
    return found


def ended(connection: socket.socket) -> bool:
    """Wait for the other side to close."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


# --- what is served where ------------------------------------------------------------------------------------------------


def test_the_plain_listener_serves_health_and_metrics_and_nothing_else(world: World, api: ApiServer) -> None:
    for path, text in (("/healthz", b"ok\n"), ("/livez", b"ok\n"), ("/readyz", b"ok\n")):
        assert plainly(api, "GET", path) == (200, text)
    status, text = plainly(api, "GET", "/metrics")
    assert (status, b"elasticd_test 42.0" in text) == (200, True)
    document = world.request("GET", "/openapi.json")[1]
    paths = [path.format(job="train", node="n1", incident="g1-x") for path in document["paths"] if path.startswith("/v1/")]
    for path in (*paths, "/openapi.json", "/docs", "/", "/metrics/", "//metrics", "/v1/../metrics", "/%2e/metrics"):
        for method in ("GET", "POST"):
            status, text = plainly(api, method, path)
            assert (status, json.loads(text)["error"]["code"]) == (404, "not_running"), path
    for method in ("POST", "PUT", "DELETE"):
        assert plainly(api, method, "/metrics")[0] == 405


def test_without_an_address_there_is_no_plain_and_no_peer_listener(world: World) -> None:
    object.__setattr__(world.config.metrics, "listen", "")
    with world.served() as server:
        assert (server.metrics_address, server.peer_address) == (None, None)
        assert world.client.text("/healthz") == (200, "ok\n")
        server.reload_certificates()


def test_nothing_is_told_about_the_server(world: World, api: ApiServer) -> None:
    with knock(world) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert b"\r\nserver:" not in answer.lower()


# --- addresses -----------------------------------------------------------------------------------------------------------


def test_an_address_that_is_taken_is_named_and_nothing_is_served(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        object.__setattr__(world.config.metrics, "listen", address)
        with pytest.raises(UsageError) as raised, world.served():
            pass
    assert str(raised.value) == f"metrics.listen: cannot listen on {address}: Address already in use"
    assert not world.config.socket.exists()


@pytest.mark.parametrize(("address", "why"), [("127.0.0.1:99999", "99999 is no port"), ("no.such.host.invalid:1", "known|resolution")])
def test_an_address_that_is_none_is_named(address: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"metrics.listen: cannot listen on {address}: .*({why})"):
        bind_tcp("metrics.listen", address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", ":0", "[::1]:0"])
def test_addresses_that_can_be_listened_on(address: str) -> None:
    try:
        bind_tcp("metrics.listen", address).close()
    except UsageError as error:
        if "::1" in address and "Cannot assign" in str(error):
            pytest.skip("no IPv6 on this machine")
        raise


def test_a_socket_that_a_living_daemon_serves_is_left_alone(world: World, api: ApiServer) -> None:
    with pytest.raises(UsageError, match=f"cannot serve the API on {world.config.socket}: another daemon does"), world.served():
        pass
    assert world.client.text("/healthz") == (200, "ok\n")


def test_a_socket_that_somebody_serves_without_the_lock_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(UsageError, match="another daemon does"):
            UnixAddress(tmp_path / "s")
        assert (tmp_path / "s").is_socket()


def test_a_socket_that_a_dead_daemon_left_is_replaced_and_taken_away_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    address = UnixAddress(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    address.close()
    assert not path.exists()


def test_a_path_longer_than_the_kernel_takes_is_served_and_found(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    served = UnixAddress(folder / "api.sock")
    assert (folder / "api.sock").is_socket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, reachable(folder / "api.sock") as name:
        caller.connect(name)
    with pytest.raises(UsageError, match="another daemon does"):
        UnixAddress(folder / "api.sock")
    served.close()
    assert not (folder / "api.sock").exists()


def test_a_socket_that_is_somebody_elses_by_now_is_not_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    address = UnixAddress(path)
    path.rename(tmp_path / "t")
    path.write_text("not ours")
    address.close()
    assert path.read_text() == "not ours"


@pytest.mark.parametrize("name", ["file", "none/s", "x" * 200])
def test_a_path_that_cannot_be_a_socket_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="cannot serve the API on "):
        UnixAddress(tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("broken", ["cert", "key", "clients_ca"])
def test_a_certificate_file_that_is_not_usable_is_named(tmp_path: Path, broken: str) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own", common_name="elasticd-node-n1")
    files: dict[str, Any] = {"cert": own.cert, "key": own.key, "clients_ca": authority.cacert}
    peer_tls(PeerSection(listen=":0", **files))
    (tmp_path / "bad.pem").write_text("-----BEGIN NOTHING-----")
    section = PeerSection(listen=":0", **files | {broken: tmp_path / "bad.pem"})
    with pytest.raises(UsageError, match=rf"peer\.{broken} .*bad\.pem" if broken != "key" else r"peer\.cert .* and peer\.key .*bad\.pem"):
        peer_tls(section)


# --- connections that are slow, many or strange --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /heal",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/jobs/train/stop HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    ],
)
def test_a_request_that_never_becomes_whole_is_cut(world: World, sent: bytes) -> None:
    with world.served(QUICK), knock(world) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        assert ended(connection)
        assert 0.4 < time.monotonic() - began < 5


def trickle(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes((byte,)))
        time.sleep(0.02)


def test_a_request_that_comes_a_byte_at_a_time_is_cut_all_the_same(world: World) -> None:
    with world.served(QUICK), knock(world) as connection:
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(connection, b"GET /healthz HTTP/1.1\r\nHost: " + b"x" * 1000)
        assert time.monotonic() - began < 5


def test_a_connection_that_asks_nothing_more_is_closed(world: World) -> None:
    with world.served(Limits(idle=1, request=30.0)), knock(world) as connection:
        assert well(connection)
        began = time.monotonic()
        assert ended(connection)
        assert 0.5 < time.monotonic() - began < 5


def test_an_answer_that_nobody_takes_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        world.training(*(f"n{index}" for index in range(20)), job=f"job{number}")
    with world.served(QUICK) as server, knock(world) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        listener = server._listeners[0]
        await_(lambda: listener._state.connections, what="the connection")
        await_(lambda: not listener._state.connections, within=20, what="its end")


def test_more_connections_than_allowed_are_closed_at_once_and_the_others_served(world: World) -> None:
    with world.served(Limits(connections=8)):
        kept = [placed(world) for _ in range(8)]
        with knock(world) as ninth:
            assert ended(ninth)
        assert well(kept[0])
        for connection in kept:
            connection.close()
        await_(lambda: world.client.text("/healthz")[0] == 200, what="a place")


def test_handshakes_that_never_end_count_as_connections_and_end(world: World, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own", common_name="elasticd-node-n1")
    section = PeerSection(listen="127.0.0.1:0", cert=own.cert, key=own.key, clients_ca=authority.cacert)
    object.__setattr__(world.config, "peer", section)
    with world.served(Limits(connections=8, handshake=3.0)) as server:
        assert server.peer_address
        began = time.monotonic()
        silent = [socket.create_connection(server.peer_address, timeout=20) for _ in range(9)]
        assert ended(silent[8])
        assert time.monotonic() - began < 2.5
        assert all(ended(connection) for connection in silent)
        assert time.monotonic() - began > 2.5
        for connection in silent:
            connection.close()
        assert world.client.text("/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 400_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 400_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/jobs/train/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_next_one_served(world: World, sent: bytes) -> None:
    with world.served(QUICK):
        with knock(world) as connection:
            try:
                connection.sendall(sent)
                answer = connection.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        assert world.client.text("/healthz") == (200, "ok\n")


def test_an_upgrade_to_a_websocket_is_not_made(world: World, api: ApiServer) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    assert world.request("GET", "/v1/status", headers=headers)[0] == 200


def test_health_is_told_while_all_that_ask_etcd_hang(world: World, api: ApiServer) -> None:
    world.server.pause()
    asking = [threading.Thread(target=world.request, args=("GET", "/v1/jobs")) for _ in range(30)]
    for thread in asking:
        thread.start()
    await_(lambda: len(api._listeners[0]._state.tasks) == 30, what="30 requests that hang")
    began = time.monotonic()
    assert world.client.text("/healthz") == (200, "ok\n")
    assert plainly(api, "GET", "/metrics")[0] == 200
    assert time.monotonic() - began < 1.5
    world.server.resume()
    for thread in asking:
        thread.join()


@pytest.mark.parametrize("head", [b"Content-Length: 3\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"])
def test_half_a_request_changes_nothing(world: World, api: ApiServer, head: bytes) -> None:
    world.training()
    state = api._listeners[0]._state
    with knock(world) as connection:
        connection.sendall(b"POST /v1/jobs/train/stop HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head)
        await_(lambda: state.tasks, what="the request")
    await_(lambda: not state.tasks and not state.connections, what="its end")
    assert world.wanted().run


def test_whoever_hangs_up_in_the_middle_disturbs_nobody(world: World, api: ApiServer) -> None:
    for sent in (b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /v1/jobs/train/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b""):
        for _ in range(20):
            with knock(world) as connection:
                connection.sendall(sent)
    assert world.client.text("/healthz") == (200, "ok\n")


# --- the end, and what it costs ------------------------------------------------------------------------------------------


def test_an_answer_that_is_being_made_is_finished_before_the_end(world: World) -> None:
    world.training()
    began = threading.Event()
    reading = world.kv.list

    def slowly(*args: Any, **more: Any) -> Any:
        began.set()
        time.sleep(0.5)
        return reading(*args, **more)

    answers: list[int] = []
    with world.served() as server:
        world.kv.list = slowly  # type: ignore[method-assign]
        asking = threading.Thread(target=lambda: answers.append(world.request("GET", "/v1/jobs")[0]))
        asking.start()
        began.wait(10.0)
        server.stop(10.0)
        asking.join(10.0)
    assert answers == [200]
    assert not world.config.socket.exists()


def test_idle_connections_do_not_hold_up_the_end(world: World) -> None:
    with world.served() as server:
        idle = [knock(world) for _ in range(5)]
        idle[0].sendall(b"GET /heal")
        began = time.monotonic()
        server.stop(1.0)
        assert time.monotonic() - began < 4
        assert all(ended(connection) for connection in idle)
        for connection in idle:
            connection.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "elasticd-api"]


def test_the_api_can_begin_again_where_it_ended(world: World) -> None:
    for _ in range(3):
        with world.served():
            assert world.client.text("/healthz") == (200, "ok\n")


def test_nothing_touches_signals_or_polls(world: World) -> None:
    """A server that waits costs nothing: three listeners, and no tick."""
    import signal

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with world.served():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        thread = next(thread for thread in threading.enumerate() if thread.name == "elasticd-api")
        before = switches(thread)
        time.sleep(1.0)
        assert switches(thread) - before < 5


def switches(thread: threading.Thread) -> int:
    with open(f"/proc/self/task/{thread.native_id}/status") as status:  # noqa: PTH123 - a line of /proc
        return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_connections_leave_no_file_descriptor_behind(world: World, api: ApiServer) -> None:
    world.client.get("/v1/status")
    before = open_files()
    for _ in range(50):
        world.client.get("/v1/status")
    await_(lambda: open_files() <= before, what="the end of the connections")


def test_the_api_is_light() -> None:
    """What it adds to a daemon: no torch, and less than 40 MB."""
    code = (
        "import resource, sys\n"
        "import elasticd.kv, elasticd.daemon.loop\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "import elasticd.daemon.api.server\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules\n"
        "print(after - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000, f"{done.stdout} KiB"
    assert resource.RUSAGE_SELF == 0
