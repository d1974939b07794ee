"""States between agents: over real sockets and processes, with real certificates, and with whatever callers and holders may do wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from elasticd.agent import stateserver, statewire, transfer
from elasticd.agent.transfer import TransferError, fetch, is_node, tell_has, tell_holds
from elasticd.kv.types import TLSFiles
from tests.agent.serving import SCOPE, Serving, make_state
from tests.cluster.etcd import Certificates
from tests.support.etcd import Authority, await_
from trainer.checkpoint import digest_image
from trainer.errors import DamagedError
from trainer.wire.layout import Layout

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


class Room:
    """Where a fetched state is put: kept only if it was whole."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.image: bytearray | None = None
        self.tried = 0

    def __call__(self, layout: Layout, fill: Callable[[memoryview], None]) -> None:
        self.tried += 1
        image = bytearray(layout.size)
        fill(memoryview(image))
        self.layout, self.image = layout, image


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def one(*args: Any, **more: Any) -> Serving:
        made.append(Serving(*args, **more))
        return made[-1]

    yield one
    for serving in made:
        serving.server.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elasticd-state")]
    assert not any(serving.reading for serving in made), "a state is still pinned"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def files_of(authority: Authority, name: str, common_name: str, **more: Any) -> TLSFiles:
    identity = authority.issue(name, common_name=common_name, **more)
    return TLSFiles(cacert=authority.cacert, cert=identity.cert, key=identity.key)


@pytest.fixture(scope="module")
def node_a(authority: Authority) -> TLSFiles:
    return files_of(authority, "a", "elasticd-node-a", hosts=("nowhere.example",))


@pytest.fixture(scope="module")
def node_b(authority: Authority) -> TLSFiles:
    return files_of(authority, "b", "elasticd-node-b", hosts=("nowhere.example",))


def take(serving: Serving, room: Room | None = None, **more: Any) -> transfer.Fetched:
    wanted: dict[str, Any] = {"scope": SCOPE, "node": "b", "place": room or Room(), **more}
    return fetch("127.0.0.1", serving.server.port, wanted.pop("digest", serving.digest), **wanted)


# --- states ----------------------------------------------------------------------------------------------------------------


def test_a_state_arrives_as_it_was_and_it_is_known_who_has_it(serve: Callable[..., Serving]) -> None:
    serving, room = serve(33), Room()
    steps: list[tuple[int, int]] = []
    got = take(serving, room, progress=lambda *step: steps.append(step))
    assert room.layout is not None
    assert room.image is not None
    assert (room.layout.header, bytes(room.image)) == (serving.layout.header, bytes(serving.image))
    assert digest_image(room.layout.header, memoryview(room.image))[0] == serving.digest
    assert (got.header, got.size) == (serving.layout.header, serving.layout.size)
    size = serving.layout.size
    assert steps == [(16 << 20, size), (32 << 20, size), (size, size)]
    await_(lambda: serving.server.served(serving.digest) == {"b"}, what="b being known to have it")
    assert serving.server.served("another") == frozenset()


def test_several_fetch_at_the_same_time(serve: Callable[..., Serving]) -> None:
    serving, rooms = serve(20), [Room() for _ in range(4)]
    threads = [threading.Thread(target=take, args=(serving, room), kwargs={"node": f"n{number}"}) for number, room in enumerate(rooms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert all(room.image == bytes(serving.image) for room in rooms)
    await_(lambda: serving.server.served(serving.digest) == {"n0", "n1", "n2", "n3"}, what="all four known")


def test_a_state_comes_from_another_process_with_certificates(node_a: TLSFiles, node_b: TLSFiles) -> None:
    with Process({"mib": 40, "tls": node_a}) as other:
        room = Room()
        began = time.monotonic()
        fetch("127.0.0.1", other.port, other.digest, scope=SCOPE, node="b", place=room, tls=node_b)
        print(f"40 MiB with TLS: {40 / 1024 / (time.monotonic() - began):.2f} GiB/s")
        _layout, image, digest = make_state(40)
        assert digest == other.digest
        assert room.image == bytes(image)
        assert other.ask("served") == ["b"]


def test_a_plain_state_comes_about_as_fast_as_the_loopback_carries_it() -> None:
    """Against a bare sender and receiver of as many bytes, in the same minute on the same machine."""
    mib = 200
    with Process({"mib": mib}) as other:
        floor, ours = [], []
        place = Kept(make_state(mib)[0])
        for _ in range(3):
            floor.append(bare(mib))
            ours.append(fetch("127.0.0.1", other.port, other.digest, scope=SCOPE, node="b", place=place).seconds)
    print(f"{mib} MiB: bare {mib / 1024 / min(floor):.2f} GiB/s, a state {mib / 1024 / min(ours):.2f} GiB/s")
    assert min(ours) < 4 * min(floor)


class Kept:
    """Room that is there already, as an agent's buffers are."""

    def __init__(self, layout: Layout) -> None:
        self.image = bytearray(layout.size)

    def __call__(self, layout: Layout, fill: Callable[[memoryview], None]) -> None:
        fill(memoryview(self.image))


def bare(mib: int) -> float:
    """Seconds in which another process sends so many MiB, and this one receives them into memory that is there."""
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); c, _ = s.accept();"
        "block = memoryview(bytearray(4 << 20)); [c.sendall(block) for _ in range(int(sys.argv[1]) // 4)]; c.close(); s.close()"
    )
    target = memoryview(bytearray(16 << 20))
    with subprocess.Popen([sys.executable, "-c", program, str(mib)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as sock:
            began, got = time.monotonic(), 0
            while count := sock.recv_into(target):
                got += count
            took = time.monotonic() - began
    assert got == mib << 20
    return took


def test_a_bit_that_fell_over_on_the_way_is_found_and_nothing_is_kept(serve: Callable[..., Serving]) -> None:
    serving, room = serve(20, lie=True), Room()
    with pytest.raises(DamagedError, match=rf"127.0.0.1:\d+ gave a state with the digest [0-9a-f]+, asked for was {serving.digest}"):
        take(serving, room)
    assert (room.tried, room.image) == (1, None)
    assert serving.server.served(serving.digest) == frozenset()


def test_a_state_that_is_not_here_is_refused_and_so_is_another_jobs(serve: Callable[..., Serving]) -> None:
    serving, room = serve(), Room()
    with pytest.raises(TransferError, match="refuses: abc is not to be had here: 'another state'"):
        take(serving, room, digest="abc")
    with pytest.raises(TransferError, match="refuses: states of 'cluster/job' are served here"):
        take(serving, room, scope="cluster/other")
    assert room.tried == 0


def test_a_holder_that_dies_in_the_middle_ends_the_fetch() -> None:
    with Process({"mib": 64}) as other:
        room = Room()

        def kill(done: int, _size: int) -> None:
            if done == 16 << 20:
                other.process.kill()

        with pytest.raises(TransferError, match=r"127.0.0.1:\d+: (it hung up in the middle of the state|Connection reset by peer)"):
            fetch("127.0.0.1", other.port, other.digest, scope=SCOPE, node="b", place=room, progress=kill)
        assert room.image is None


def test_a_caller_that_dies_in_the_middle_lets_the_state_go(serve: Callable[..., Serving]) -> None:
    serving = serve(64)
    sock = ask(serving, {"scope": SCOPE, "node": "b", "digest": serving.digest})
    sock.recv(1 << 20)
    assert serving.reading == 1
    sock.close()
    await_(lambda: serving.reading == 0, what="the state being let go")
    assert serving.server.served(serving.digest) == frozenset()


def test_a_holder_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL_TIME", 0.5)
    with Process({"mib": 64}) as other:

        def stop(done: int, _size: int) -> None:
            if done == 16 << 20:
                os.kill(other.process.pid, signal.SIGSTOP)

        with pytest.raises(TransferError, match="silent for too long"):
            fetch("127.0.0.1", other.port, other.digest, scope=SCOPE, node="b", place=Room(), progress=stop)


def test_a_caller_that_takes_nothing_is_hung_up_on(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateserver, "STALL_TIME", 0.3)
    serving = serve(64)
    with ask(serving, {"scope": SCOPE, "node": "b", "digest": serving.digest}):
        await_(lambda: serving.reading == 1, what="the state being read")
        await_(lambda: serving.reading == 0, what="the state being let go")


def test_a_caller_that_takes_its_time_is_hung_up_on(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A little at a time, so that it never stalls: the whole has a limit too."""
    monkeypatch.setattr(statewire, "ANSWER_TIME", 0.2)
    monkeypatch.setattr(statewire, "SLOWEST", 1_000_000_000)
    serving = serve(64)
    with ask(serving, {"scope": SCOPE, "node": "b", "digest": serving.digest}) as sock:
        taken = 0
        while got := recv(sock, 1 << 20):
            taken += got
            time.sleep(0.02)  # what is under test is that it is slow
        assert taken < serving.layout.size


def test_a_fetch_can_be_called_off(serve: Callable[..., Serving]) -> None:
    serving, room, asked = serve(40), Room(), []
    with pytest.raises(TransferError, match="not wanted any more"):
        take(serving, room, cancel=lambda: asked.append(1) or len(asked) > 5)  # type: ignore[func-returns-value]
    assert room.image is None


def test_room_that_is_refused_ends_the_fetch_with_that_word(serve: Callable[..., Serving]) -> None:
    def no_room(_layout: Layout, _fill: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate memory"):
        take(serve(), place=no_room)
    with pytest.raises(TransferError, match="no room was made"):
        take(serve(), place=lambda _layout, _fill: None)
    with pytest.raises(TransferError, match="room of 10 bytes"):
        take(serve(), place=lambda _layout, fill: fill(memoryview(bytearray(10))))


# --- words -----------------------------------------------------------------------------------------------------------------


def test_a_node_tells_that_it_has_written_a_checkpoint(node_a: TLSFiles, node_b: TLSFiles) -> None:
    with Process({"tls": node_a}) as other:
        tell_holds("127.0.0.1", other.port, scope=SCOPE, node="b", generation=3, step=70, digest="d" * 32, tls=node_b)
        assert other.ask("told") == [[3, 70, "d" * 32, "b"]]


def test_a_node_tells_that_it_has_a_state_from_elsewhere(serve: Callable[..., Serving]) -> None:
    serving = serve()
    tell_has("127.0.0.1", serving.server.port, scope=SCOPE, node="c", digest=serving.digest)
    assert serving.server.served(serving.digest) == {"c"}


def test_only_so_many_states_are_remembered(serve: Callable[..., Serving]) -> None:
    serving = serve()
    for number in range(stateserver.MAX_KNOWN + 5):
        tell_has("127.0.0.1", serving.server.port, scope=SCOPE, node="c", digest=f"d{number}")
    assert len(serving.server._have) == stateserver.MAX_KNOWN
    assert serving.server.served(f"d{number}") == {"c"}


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"scope": "cluster/other", "holds": {"generation": 1, "step": 1, "digest": "d", "node": "b"}},
        {"scope": SCOPE},
        {"scope": SCOPE, "digest": "d"},
        {"scope": SCOPE, "digest": "", "node": "b"},
        {"scope": SCOPE, "digest": 7, "node": "b"},
        {"scope": SCOPE, "digest": "d" * 129, "node": "b"},
        {"scope": SCOPE, "digest": "d", "node": "../b"},
        {"scope": SCOPE, "has": "d"},
        {"scope": SCOPE, "has": ["d"], "node": "b"},
        {"scope": SCOPE, "holds": "me"},
        {"scope": SCOPE, "holds": {"generation": 1, "step": 1, "digest": "d"}},
        {"scope": SCOPE, "holds": {"generation": -1, "step": 1, "digest": "d", "node": "b"}},
        {"scope": SCOPE, "holds": {"generation": 1, "step": True, "digest": "d", "node": "b"}},
        {"scope": SCOPE, "holds": {"generation": 1, "step": 2**53, "digest": "d", "node": "b"}},
    ],
    ids=json.dumps,
)
def test_a_question_that_makes_no_sense_is_refused(serve: Callable[..., Serving], question: dict[str, Any]) -> None:
    serving = serve()
    with ask(serving, question) as sock:
        answer = json.loads(sock.makefile("rb").readline())
    assert list(answer) == ["error"]
    assert serving.told == []
    take(serving)  # and the next one is served


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"{" * 5000 + b"\n", b"[1]\n", b"{nonsense\n", b"{\n", b"7\n"])
def test_garbage_is_hung_up_on_at_once(serve: Callable[..., Serving], garbage: bytes) -> None:
    serving = serve()
    with connected(serving) as sock:
        sock.sendall(garbage)
        began = time.monotonic()
        assert recv(sock, 100) == 0
        assert time.monotonic() - began < 2.0
    take(serving)


# --- callers ---------------------------------------------------------------------------------------------------------------


def test_a_caller_that_says_nothing_costs_a_few_seconds_and_nobody_else(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateserver, "QUESTION_TIME", 0.5)
    serving = serve()
    with connected(serving) as silent, connected(serving) as slow:
        take(serving)
        began = time.monotonic()
        while time.monotonic() - began < 5.0:  # a byte now and then does not help
            try:
                slow.sendall(b"{")
            except OSError:
                break
            time.sleep(0.1)  # what is under test is that it is slow
        assert time.monotonic() - began < 3.0
        assert recv(silent, 10) == 0


def test_too_many_callers_are_hung_up_on_and_served_later(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateserver, "MAX_CALLERS", 3)
    serving = serve()
    callers = [connected(serving) for _ in range(3)]
    await_(lambda: len(serving.server._callers) == 3, what="three callers")
    with connected(serving) as fourth:
        assert recv(fourth, 10) == 0
    for sock in callers:
        sock.close()
    await_(lambda: not serving.server._callers, what="nobody")
    take(serving)


def test_a_server_out_of_descriptors_serves_again_when_there_are_some(serve: Callable[..., Serving]) -> None:
    serving = serve()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(serving) as waiting:
        await_(lambda: len(serving.server._callers) == 1, what="the first caller")
        with socket.socket() as second:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(waiting.fileno(), second.fileno()) + 1, hard))
                holes = fill_up()
                second.connect(("127.0.0.1", serving.server.port))
                time.sleep(0.3)  # nothing tells that accept fails but the log
            finally:
                for hole in holes:
                    os.close(hole)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            take(serving)


def fill_up() -> list[int]:
    holes = []
    while True:
        try:
            holes.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return holes


def test_closing_hangs_up_on_whoever_is_there(serve: Callable[..., Serving], node_a: TLSFiles) -> None:
    for tls in (None, node_a):
        serving = serve(64, tls=tls)
        with connected(serving) as silent:
            await_(lambda serving=serving: len(serving.server._callers) == 1, what="the caller")
            began = time.monotonic()
            serving.server.close()
            serving.server.close()
            assert time.monotonic() - began < 2.0
            assert recv(silent, 10) == 0
        with pytest.raises(TransferError, match="Connection refused"):
            take(serving)


# --- certificates ----------------------------------------------------------------------------------------------------------


def test_common_names_of_nodes_are_those_that_the_roles_give() -> None:
    assert is_node("elasticd-node-gpu-1")
    for other in ("", "root", "elasticd-operator-alice", "elasticd-node-", "elasticd-node-../a", "xelasticd-node-a"):
        assert not is_node(other)


def test_both_sides_refuse_whoever_is_no_node(serve: Callable[..., Serving], authority: Authority, node_a: TLSFiles, node_b: TLSFiles) -> None:
    alice = files_of(authority, "alice", "elasticd-operator-alice")
    serving, room = serve(tls=node_a), Room()
    with pytest.raises(TransferError, match="refuses: the certificate of 'elasticd-operator-alice' is no node's"):
        take(serving, room, tls=alice)
    with pytest.raises(TransferError, match=r"127.0.0.1:\d+: the certificate of 'elasticd-operator-alice' is no node's"):
        take(serve(tls=alice), room, tls=node_b)
    assert room.tried == 0
    take(serving, room, tls=node_b)
    assert room.image == bytes(serving.image)
    take(serve(tls=alice, accept=lambda name: name == "elasticd-node-b"), tls=node_b, accept=lambda _name: True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the package openssl")
def test_the_certificates_that_our_script_makes_are_good_for_it(serve: Callable[..., Serving], tmp_path: Path) -> None:
    """And those of an older one say what they lack."""
    certificates = Certificates(tmp_path / "certs")
    certificates.init()
    one, other, alice = certificates.node("gpu-1"), certificates.node("gpu-2"), certificates.operator("alice")
    room = Room()
    serving = serve(tls=one)
    take(serving, room, tls=other)
    assert room.image == bytes(serving.image)
    with pytest.raises(TransferError, match="'elasticd-operator-alice' is no node's"):
        take(serving, tls=alice)
    with pytest.raises(TransferError, match=r"purpose.*; its extended key usage has to name serverAuth beside clientAuth"):
        take(serve(tls=alice), tls=other)


def test_a_certificate_of_another_authority_is_refused_by_both_sides(serve: Callable[..., Serving], tmp_path: Path, node_a: TLSFiles, node_b: TLSFiles) -> None:
    other = Authority(tmp_path)
    stranger = files_of(other, "x", "elasticd-node-x")
    believing = TLSFiles(cacert=node_a.cacert, cert=stranger.cert, key=stranger.key)  # it trusts us, and we do not trust it
    room = Room()
    with pytest.raises(TransferError, match=r"no TLS with it|Connection reset|hung up"):
        take(serve(tls=node_a), room, tls=believing)
    with pytest.raises(TransferError, match="its certificate is not good here"):
        take(serve(tls=believing), room, tls=node_b)
    assert room.tried == 0


def test_a_plain_caller_gets_nothing_from_a_server_with_certificates(serve: Callable[..., Serving], node_a: TLSFiles, node_b: TLSFiles) -> None:
    serving, room = serve(tls=node_a), Room()
    with pytest.raises(TransferError, match=r"Connection reset|hung up|does only one of the two use TLS"):
        take(serving, room)
    with pytest.raises(TransferError, match=r"no TLS with it|Connection reset"):
        take(serve(), room, tls=node_b)
    assert room.tried == 0
    take(serving, room, tls=node_b)
    assert room.tried == 1


def test_a_caller_without_a_certificate_is_refused(serve: Callable[..., Serving], node_a: TLSFiles) -> None:
    serving = serve(tls=node_a)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(node_a.cacert)
    with connected(serving) as plain, context.wrap_socket(plain) as sock, pytest.raises(ssl.SSLError):
        sock.recv(10)  # the handshake of TLS 1.3 ends for the caller before it is refused


def test_old_tls_is_refused(serve: Callable[..., Serving], node_a: TLSFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with connected(serve(tls=node_a)) as plain, pytest.raises(OSError):
        context.wrap_socket(plain)


def test_a_renewed_certificate_counts_at_the_next_connection(serve: Callable[..., Serving], tmp_path: Path, node_a: TLSFiles) -> None:
    """A new authority on both sides, as when everything is renewed; the server is not told."""
    old = Authority(tmp_path / "one")
    files = files_of(old, "n", "elasticd-node-n")
    serving = serve(tls=files)
    take(serving, tls=files)
    new = Authority(tmp_path / "two")
    renewed = files_of(new, "n", "elasticd-node-n")
    with pytest.raises(TransferError):
        take(serving, tls=renewed)
    for ours, theirs in ((files.cacert, renewed.cacert), (files.cert, renewed.cert), (files.key, renewed.key)):
        assert ours
        assert theirs
        ours.write_bytes(theirs.read_bytes())
    take(serving, tls=renewed)


def test_certificates_that_cannot_be_read_now_cost_one_call(serve: Callable[..., Serving], authority: Authority, node_b: TLSFiles) -> None:
    files = files_of(authority, "half", "elasticd-node-half")
    serving = serve(tls=files)
    assert files.key
    key = files.key.read_bytes()
    files.key.write_bytes(key[:50])
    with pytest.raises(TransferError):
        take(serving, tls=node_b)
    with pytest.raises(TransferError, match=r"this node's certificate .*half.pem cannot be used"):
        take(serve(tls=node_b), tls=files)
    files.key.write_bytes(key)
    take(serving, tls=node_b)


# --- helpers ---------------------------------------------------------------------------------------------------------------


def connected(serving: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", serving.server.port), timeout=10.0)


def ask(serving: Serving, question: dict[str, Any]) -> socket.socket:
    sock = connected(serving)
    sock.sendall(json.dumps(question).encode() + b"\n")
    return sock


def recv(sock: socket.socket, most: int) -> int:
    """Bytes received; 0 if the other side hung up, however."""
    try:
        return len(sock.recv(most))
    except ConnectionError:
        return 0


class Process:
    """A server in a process of its own (`tests.agent.serving`)."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        tls = arguments.get("tls")
        if tls is not None:
            arguments = {**arguments, "tls": {"cacert": str(tls.cacert), "cert": str(tls.cert), "key": str(tls.key)}}
        command = [sys.executable, "-m", "tests.agent.serving", json.dumps(arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port, self.digest = self._hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()

    def ask(self, line: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)
