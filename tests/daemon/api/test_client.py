"""ApiClient: what the command line hears when a daemon answers, refuses, is slow, strange or not there."""

from __future__ import annotations

import http.client as http_client
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from elasticd.daemon.client import ERRORS, ApiClient
from elasticd.errors import AccessDeniedError, DaemonUnavailableError, ElasticdError, KVUnavailableError, NotAllowedError, UsageError
from tests.daemon.api.world import OPERATOR, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticd.daemon.api.server import ApiServer


def request(connection: socket.socket) -> bytes:
    """A whole request, however many pieces it comes in."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def answering(path: Path, answer: bytes | None) -> Iterator[list[bytes]]:
    """Somebody on the socket who gives one answer to whatever is asked, or none; what was asked."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                heard.append(request(connection))
                if answer is None:
                    while connection.recv(65536):  # until the other one gives up
                        pass
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield heard
        thread.join(10.0)


def http(status: str, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def test_a_ctrl_c_while_an_answer_is_put_away_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a finalizer without a word: `logs -f` went on after Ctrl-C, once in 400 times."""
    close = http_client.HTTPResponse.close

    def interrupted(response: http_client.HTTPResponse) -> None:
        monkeypatch.undo()
        close(response)
        raise KeyboardInterrupt

    monkeypatch.setattr(http_client.HTTPResponse, "close", interrupted)
    answer = http("200 OK\r\nConnection: close", {"apiVersion": "elasticd/v1", "data": {}})
    with answering(tmp_path / "s", answer), pytest.raises(KeyboardInterrupt):
        ApiClient(tmp_path / "s").get("/v1/events")


def test_an_answer_is_the_whole_envelope(tmp_path: Path) -> None:
    envelope = {"apiVersion": "elasticd/v1", "kind": "EventList", "revision": 7, "data": {"last": 3}}
    with answering(tmp_path / "s", http("200 OK", envelope)) as heard:
        assert ApiClient(tmp_path / "s").get("/v1/events", job="mnist", node=None, after=0) == envelope
    assert heard[0].startswith(b"GET /v1/events?job=mnist&after=0 HTTP/1.1\r\n")


def test_a_change_is_sent_as_json(tmp_path: Path) -> None:
    envelope = {"apiVersion": "elasticd/v1", "kind": "Change", "revision": 7, "data": {}}
    with answering(tmp_path / "s", http("200 OK", envelope)) as heard:
        ApiClient(tmp_path / "s").post("/v1/jobs/mnist/scale", {"nodes": 4})
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    assert json.loads(body) == {"nodes": 4}


@pytest.mark.parametrize("code", ERRORS)
def test_each_code_is_raised_as_its_own_error(tmp_path: Path, code: str) -> None:
    with (
        answering(tmp_path / "s", http("403 Forbidden", {"error": {"code": code, "message": "no", "hint": "ask"}})),
        pytest.raises(ElasticdError) as raised,
    ):
        ApiClient(tmp_path / "s").get("/v1/status")
    assert type(raised.value) is ERRORS[code]
    assert (raised.value.message, raised.value.remedy) == ("no", "ask")


def test_each_code_ends_a_command_with_the_exit_code_of_the_contract() -> None:
    assert {code: kind.exit_code for code, kind in ERRORS.items()} == {
        "usage": 2,
        "permission": 7,
        "not_running": 3,
        "conflict": 5,
        "refused": 8,
        "not_allowed": 9,
        "kv_unavailable": 4,
        "internal": 1,
    }


@pytest.mark.parametrize(
    "answer",
    [
        http("200 OK", b"<html>"),
        http("200 OK", []),
        http("200 OK", {}),
        http("200 OK", {"apiVersion": "elasticd/v2", "data": {}}),
        http("502 Bad Gateway", {"detail": "x"}),
        http("500 Oh", {"error": "x"}),
    ],
)
def test_what_speaks_something_else_is_no_daemon_of_ours(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer), pytest.raises(ElasticdError, match="does not speak this API") as raised:
        ApiClient(tmp_path / "s").get("/v1/status")
    assert raised.value.exit_code == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", b"SSH-2.0-x\r\n"])
def test_whoever_hangs_up_or_talks_nonsense_is_unavailable(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer), pytest.raises(DaemonUnavailableError, match="hung up"):
        ApiClient(tmp_path / "s").get("/v1/status")


def test_a_daemon_that_is_silent_is_given_up_on_and_a_change_may_have_been_made(tmp_path: Path) -> None:
    with answering(tmp_path / "s", None), pytest.raises(DaemonUnavailableError, match=r"did not answer within 0\.2 s; look whether the change was made"):
        ApiClient(tmp_path / "s", timeout=0.2).post("/v1/jobs/mnist/stop")


def test_no_socket_and_a_dead_socket_are_no_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    for name, why in (("none", "No such file or directory"), ("dead", "Connection refused")):
        with pytest.raises(DaemonUnavailableError) as raised:
            ApiClient(tmp_path / name).get("/v1/status")
        assert str(raised.value) == f"no daemon answers at {tmp_path / name} ({why}); start it: systemctl start elasticd"
        assert raised.value.exit_code == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_socket_that_may_not_be_connected_to_is_permission_denied(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(0o600)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                ApiClient(path).get("/v1/status")
            except AccessDeniedError as error:
                os._exit(error.exit_code)
            finally:
                os._exit(99)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_real_daemon_answers_and_refuses(world: World, api: ApiServer) -> None:
    world.target()
    world.operations.pause(OPERATOR, "train", reason="x")
    assert world.client.get("/v1/jobs/train")["data"]["paused"] is True
    assert world.client.post("/v1/jobs/train/resume")["data"]["changed"] is True
    with pytest.raises(UsageError, match=r"body\.nodes: Field required"):
        world.client.post("/v1/jobs/train/scale")
    with pytest.raises(NotAllowedError):
        world.client.post("/v1/jobs/other/start", {"nodes": 1})
    assert world.client.text("/readyz") == (200, "ok\n")


def test_with_etcd_out_of_reach_the_client_hears_that(world: World, api: ApiServer) -> None:
    world.server.kill()
    with pytest.raises(KVUnavailableError):
        world.client.get("/v1/jobs")


def test_the_client_loads_nothing_that_a_server_needs() -> None:
    code = "import sys; import elasticd.daemon.client; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"fastapi", "starlette", "uvicorn", "pydantic", "torch", "anyio", "grpc", "structlog"}
