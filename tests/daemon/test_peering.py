"""Asking other nodes' daemons: over TLS, whom to believe, and that no node holds up or fails the whole."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.daemon import peering
from elasticd.daemon.api.server import ApiServer
from elasticd.daemon.board import Turn
from elasticd.daemon.peering import Peer, Peers, Question
from elasticd.observability.report import Activity, JobReport
from elasticd.rendezvous.records import NodeJob, NodeJobState, NodeRecord
from tests.daemon.api.world import World
from tests.support.etcd import Authority, Server, free_ports

ANYTHING = Question(path="/v1/telemetry", query=lambda _: {"nodes": "own"}, read=bytes, most=1 << 20)
RUNNING = NodeJob(name="train", state=NodeJobState.RUNNING, slots=2)


class Nodes:
    """Several nodes of one cluster, each with its API on a socket and on a peer listener, in this process."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.stack = contextlib.ExitStack()
        self.worlds: dict[str, World] = {}
        self.server = server

    def start(self, name: str, *, common_name: str | None = None, authority: Authority | None = None, peer: bool = True) -> World:
        """A node; its key is written as its daemon would."""
        authority = authority or self.authority
        own = authority.issue(name, common_name=common_name or f"elasticd-node-{name}")
        section = {"listen": "127.0.0.1:0", "cert": own.cert, "key": own.key, "clients_ca": self.authority.cacert}
        paths = {"log_dir": self.folder / name / "logs", "run_dir": self.folder / name / "run"}
        world = World(self.server, peer=section if peer else {}, paths=paths, metrics={"listen": ""})
        first = next(iter(self.worlds.values()), world)
        world.keys = first.keys
        object.__setattr__(world.config, "cluster", first.config.cluster)
        world.board.node = name
        self.worlds[name] = world
        self.stack.callback(world.close)
        served = self.stack.enter_context(world.served())
        world.node(name, RUNNING, address="127.0.0.1", peer_port=port_of(served))
        return world

    def log(self, node: str, rank: int, text: str, generation: int = 7) -> None:
        folder = self.folder / node / "logs/train" / node / f"generation-{generation:06d}/rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stdout.log").open("a") as file:
            file.write(text)

    def report(self, node: str, **fields: Any) -> None:
        folder = self.folder / node / "run/reports"
        folder.mkdir(parents=True, exist_ok=True)
        values = {"at": time.time(), "activity": Activity.TRAINING, "generation": 7, **fields}
        JobReport(job="train", node=node, **values).write(folder / "train.json")


def port_of(server: ApiServer) -> int | None:
    return server.peer_address[1] if server.peer_address else None


@pytest.fixture
def nodes(daemon_server: Server, tmp_path: Path) -> Iterator[Nodes]:
    daemon_server.heal()
    daemon_server.await_serving()
    made = Nodes(daemon_server, tmp_path)
    yield made
    daemon_server.heal()
    made.stack.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peering, "STEP_TIME", 1.0)
    monkeypatch.setattr(peering, "WHOLE_TIME", 2.0)
    monkeypatch.setattr(peering, "_LISTING_AGE", 0.0)


def logs(world: World, **query: Any) -> Any:
    return world.client.get("/v1/jobs/train/logs", **query)["data"]


def told(data: Any) -> dict[str, list[str]]:
    return {part["name"]: [line["text"] for line in part["lines"]] for part in data["nodes"]}


def problems(data: Any) -> dict[str, str]:
    return {part["name"]: part["problem"] for part in data["nodes"]}


# --- what several nodes tell ---------------------------------------------------------------------------------------------


def test_one_daemon_tells_the_lines_of_all_nodes(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2")
    nodes.start("n3")
    for node, rank in (("n1", 0), ("n2", 2), ("n3", 4)):
        nodes.log(node, rank, f"hello from {node}\n")
    data = logs(world)
    assert told(data) == {node: [f"hello from {node}"] for node in ("n1", "n2", "n3")}
    assert set(problems(data).values()) == {""}
    assert data["notes"] == []
    assert told(logs(world, node="n2")) == {"n2": ["hello from n2"]}
    assert told(logs(world, node="n1")) == {"n1": ["hello from n1"]}
    assert told(logs(world, nodes="own")) == {"n1": ["hello from n1"]}
    assert told(logs(world, rank=4)) == {"n1": [], "n2": [], "n3": ["hello from n3"]}


def test_all_nodes_are_followed_from_where_each_was(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2")
    nodes.log("n1", 0, "a\n")
    nodes.log("n2", 1, "b\n")
    data = logs(world, follow="true", tail=0)
    nodes.log("n2", 1, "c\n")
    nodes.log("n1", 0, "d\n", generation=8)
    after = ",".join(f"{part['name']}:{part['place']}" for part in data["nodes"])
    data = logs(world, follow="true", after=after)
    assert told(data) == {"n1": ["d"], "n2": ["c"]}


def test_one_daemon_tells_how_all_nodes_do(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2")
    nodes.report("n1", step=12, node_rank=0)
    nodes.report("n2", step=11, node_rank=1)
    data = world.client.get("/v1/telemetry")["data"]
    assert {part["name"]: [job["report"]["step"] for job in part["jobs"]] for part in data["nodes"]} == {"n1": [12], "n2": [11]}
    assert all(part["host"]["memory_total"] > 0 and part["clock"] > 0 for part in data["nodes"])


def test_while_etcd_is_away_the_nodes_that_were_there_before_are_asked(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2")
    nodes.log("n2", 1, "b\n")
    assert told(logs(world))["n2"] == ["b"]
    nodes.server.pause()
    try:
        for one in nodes.worlds.values():
            one.board.post(Turn(at=1e12, etcd_problem="it does not answer", etcd_since=1_700_000_000.0, allowed=one.board.turn.allowed))
        assert told(logs(world)) == {"n1": [], "n2": ["b"]}
        data = world.client.get("/v1/telemetry")["data"]
        assert (data["etcd"]["reachable"], [part["name"] for part in data["nodes"]]) == (False, ["n1", "n2"])
    finally:
        nodes.server.resume()


# --- nodes that do not ---------------------------------------------------------------------------------------------------


def test_a_node_that_is_gone_is_named_and_the_others_tell(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.log("n1", 0, "a\n")
    world.node("n2", RUNNING, address="127.0.0.1", peer_port=free_ports(1)[0])
    data = logs(world)
    assert told(data) == {"n1": ["a"], "n2": []}
    assert problems(data) == {"n1": "", "n2": "Connection refused"}


def test_a_node_without_a_peer_listener_is_named(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2", peer=False)
    assert "no listener for other nodes" in problems(logs(world))["n2"]


def test_a_daemon_without_a_certificate_tells_its_own_and_says_so(nodes: Nodes) -> None:
    world = nodes.start("n1", peer=False)
    nodes.start("n2")
    nodes.log("n1", 0, "a\n")
    data = logs(world)
    assert told(data) == {"n1": ["a"]}
    assert data["notes"] == ["other nodes are not shown: this node has no certificate to ask other nodes with: see [etcd] and [peer] of elasticd.toml"]
    assert world.client.get("/v1/telemetry")["data"]["notes"] == data["notes"]


def test_a_node_alone_says_nothing_of_others(nodes: Nodes) -> None:
    world = nodes.start("n1", peer=False)
    nodes.log("n1", 0, "a\n")
    assert logs(world)["notes"] == []


def test_a_silent_node_holds_nobody_up_for_long_and_the_next_question_not_at_all(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.log("n1", 0, "a\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world.node("n2", RUNNING, address="127.0.0.1", peer_port=silent.getsockname()[1])
        began = time.monotonic()
        assert problems(logs(world))["n2"] == "no answer within 1 s"
        assert time.monotonic() - began < 5
        began = time.monotonic()
        assert problems(logs(world))["n2"] == "no answer within 1 s"
        assert time.monotonic() - began < 0.9


def test_a_node_that_answers_again_is_told_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peering, "_LEFT_ALONE", 0.0)
    world = nodes.start("n1")
    world.node("n2", RUNNING, address="127.0.0.1", peer_port=free_ports(1)[0])
    assert problems(logs(world))["n2"] == "Connection refused"
    nodes.start("n2")
    nodes.log("n2", 1, "back\n")
    assert told(logs(world))["n2"] == ["back"]


def test_a_node_that_drips_its_answer_is_given_up(nodes: Nodes) -> None:
    world = nodes.start("n1")
    with pretending(nodes, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", drip=True) as port:
        world.node("n2", RUNNING, address="127.0.0.1", peer_port=port)
        began = time.monotonic()
        assert problems(logs(world))["n2"] == "no answer within 2 s"
        assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nno json !",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.1 200 OK\r\n\r\n{"apiVersion": "elasticd/v1", "kind": "JobLogs", "data": {"nodes": 3}}',
        b'HTTP/1.1 200 OK\r\n\r\n{"apiVersion": "elasticd/v1", "kind": "JobLogs", "data": {"job": "train", "node": "n2", "notes": [], "nodes": []}}',
        b"SSH-2.0-x\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_is_named_and_the_others_tell(nodes: Nodes, answer: bytes) -> None:
    world = nodes.start("n1")
    nodes.log("n1", 0, "a\n")
    with pretending(nodes, answer) as port:
        world.node("n2", RUNNING, address="127.0.0.1", peer_port=port)
        data = logs(world)
    assert told(data) == {"n1": ["a"], "n2": []}
    assert problems(data)["n2"] != ""


def test_an_endless_answer_is_given_up(nodes: Nodes) -> None:
    world = nodes.start("n1")
    with pretending(nodes, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (9 << 20)) as port:
        world.node("n2", RUNNING, address="127.0.0.1", peer_port=port)
        assert problems(logs(world))["n2"] in ("its answer is too long", "no answer within 2 s")


# --- whom to believe -----------------------------------------------------------------------------------------------------


def test_another_node_or_an_operator_in_a_nodes_place_is_not_believed(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2", common_name="elasticd-node-n3")
    nodes.log("n2", 1, "not believed\n")
    data = logs(world)
    assert told(data)["n2"] == []
    assert problems(data)["n2"] == "whoever answers there is elasticd-node-n3, not this node"


def test_a_certificate_of_another_authority_is_not_believed(nodes: Nodes, tmp_path: Path) -> None:
    world = nodes.start("n1")
    nodes.start("n2", authority=Authority(tmp_path / "other"))
    assert "certificate is not good" in problems(logs(world))["n2"]


def test_a_node_speaks_for_itself_alone(nodes: Nodes) -> None:
    world = nodes.start("n1")
    part = '{"name": "n1", "generation": 7, "problem": "", "place": "", "more": false, "lines": []}'
    body = f'{{"apiVersion": "elasticd/v1", "kind": "JobLogs", "data": {{"job": "train", "node": "n1", "notes": ["x"], "nodes": [{part}]}}}}'
    with pretending(nodes, f"HTTP/1.1 200 OK\r\n\r\n{body}".encode()) as port:
        world.node("n2", RUNNING, address="127.0.0.1", peer_port=port)
        data = logs(world)
    assert [part["name"] for part in data["nodes"]] == ["n1", "n2"]
    assert data["notes"] == []


def test_certificates_that_were_renewed_are_used(nodes: Nodes) -> None:
    world = nodes.start("n1")
    nodes.start("n2")
    peers = Peers(world.config, world.kv, world.board)
    (peer,) = peers.others()
    first = peers._tls()
    assert peers._tls() is first
    time.sleep(0.01)
    nodes.authority.issue("n1", common_name="elasticd-node-n1")
    assert peers._tls() is not first
    heard = peers.ask([peer], ANYTHING)
    assert b'"kind": "Telemetry"' in (heard["n2"].answer or b"")


def test_keys_that_are_garbage_or_lie_about_their_node_are_no_nodes(nodes: Nodes) -> None:
    world = nodes.start("n1")
    world.put(world.keys.node("n2"), b"garbage")
    world.put(world.keys.node("n3"), NodeRecord(scope=world.keys.scope, node="n4", incarnation="a" * 16, address="x", slots=1, version="1", boot_id="b"))
    assert Peers(world.config, world.kv, world.board).others() == ()


def test_a_sick_node_never_holds_more_than_a_few_threads(nodes: Nodes) -> None:
    world = nodes.start("n1")
    peers = Peers(world.config, world.kv, world.board)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(name="n2", address="127.0.0.1", port=silent.getsockname()[1])
        for _ in range(20):
            assert peers.ask([peer], ANYTHING)["n2"].problem
        assert len(peers._pool._threads) == 1


@contextlib.contextmanager
def pretending(nodes: Nodes, answer: bytes, *, drip: bool = False) -> Iterator[int]:
    """Somebody with n2's certificate who answers so, to anybody; the port."""
    own = nodes.authority.issue("pretender", common_name="elasticd-node-n2")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    ending = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            accepted, _ = server.accept()
            if ending.is_set():
                accepted.close()
                return
            with contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True) as secure:
                secure.recv(65536)
                secure.sendall(answer)
                while drip and not ending.wait(0.3):
                    secure.sendall(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        ending.set()
        socket.create_connection(server.getsockname()).close()
        thread.join(10)
        server.close()
    assert not thread.is_alive()  # whoever asked has hung up
