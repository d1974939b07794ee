"""What may be changed: each path of docs/api.md, and each answer of its table of errors."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticd.errors import RecordError
from tests.daemon.api.world import World

if TYPE_CHECKING:
    from elasticd.daemon.api.server import ApiServer

SCALE = "/v1/jobs/train/scale"


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    """Status and code of an error, of which everything is on one line each."""
    status, body = answer
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"code", "message", "hint"}
    assert all(isinstance(text, str) and text.isprintable() for text in body["error"].values())
    assert body["error"]["message"]
    assert "Traceback" not in json.dumps(body)
    return status, body["error"]["code"]


CHANGES: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    ("/v1/jobs/fresh/start", None, {"job": "fresh", "before": None, "generation": None}),
    ("/v1/jobs/train/stop", None, {"job": "train", "generation": 5}),
    ("/v1/jobs/train/scale", {"nodes": 3}, {"job": "train", "generation": 5}),
    ("/v1/jobs/train/pause", {"reason": "demo"}, {"job": "train", "generation": 5}),
    ("/v1/jobs/held/resume", None, {"job": "held", "generation": 5}),
    ("/v1/jobs/train/checkpoint", None, {"job": "train", "generation": 5}),
    ("/v1/jobs/train/restart", {"reason": "stuck"}, {"job": "train", "generation": 5}),
    ("/v1/nodes/n1/cordon", {"reason": "fan"}, {"node": "n1", "job": None, "generation": None}),
    ("/v1/nodes/n1/drain", {"reason": "disk"}, {"node": "n1", "job": None, "generation": None}),
    ("/v1/nodes/n2/uncordon", None, {"node": "n2", "job": None, "after": None}),
]


@pytest.fixture
def busy(world: World, api: ApiServer) -> World:
    """A cluster where each change has something to change."""
    turn = world.board.turn
    world.board.post(type(turn)(at=1e12, registered=True, etcd_problem="", allowed={"train": turn.allowed["train"], "fresh": turn.allowed["train"]}))
    world.training()
    world.training(job="held", paused=True)
    world.node("n1")
    world.node("n2")
    world.policy("n2", draining=True)
    return world


@pytest.mark.parametrize(("path", "body", "expected"), CHANGES)
def test_each_change_is_made_and_told(busy: World, path: str, body: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    envelope = busy.client.post(path, body)
    assert (envelope["kind"], envelope["revision"] > 0) == ("Change", True)
    data = envelope["data"]
    assert set(data) == {"changed", "job", "node", "before", "after", "generation", "dry_run"}
    assert (data["changed"], data["dry_run"]) == (True, False)
    assert {name: data[name] for name in expected} == expected
    assert data["before"] != data["after"]
    assert [one.what for one in busy.audit()] == [path.rpartition("/")[2]]


@pytest.mark.parametrize(("path", "body", "expected"), [change for change in CHANGES if change[0].rpartition("/")[2] not in ("start", "checkpoint")])
def test_each_change_made_twice_changes_nothing_the_second_time(busy: World, path: str, body: dict[str, Any] | None, expected: Any) -> None:
    busy.client.post(path, body)
    before = busy.kv.list(busy.keys.prefix).items
    data = busy.client.post(path, body)["data"]
    assert (data["changed"], data["before"]) == (False, data["after"])
    assert busy.kv.list(busy.keys.prefix).items == before


def test_a_body_may_be_left_out_where_nothing_of_it_is_needed(busy: World) -> None:
    assert busy.request("POST", "/v1/jobs/train/stop", headers={"Content-Length": "0"})[0] == 200
    assert code(busy.request("POST", "/v1/jobs/train/pause", headers={"Content-Length": "0"})) == (422, "usage")


BAD: list[tuple[str, str, Any, int, str]] = [
    # a value is wrong or out of range, a field is unknown, a field is missing
    ("POST", SCALE, {}, 422, "usage"),
    ("POST", SCALE, {"nodes": 0}, 422, "usage"),
    ("POST", SCALE, {"nodes": -1}, 422, "usage"),
    ("POST", SCALE, {"nodes": 100_001}, 422, "usage"),
    ("POST", SCALE, {"nodes": "3"}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3.0}, 422, "usage"),
    ("POST", SCALE, {"nodes": True}, 422, "usage"),
    ("POST", SCALE, {"nodes": None}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "command": ["rm"]}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "if_revision": 0}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "dry_run": "yes"}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "reason": "x" * 501}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "reason": "two\nlines"}, 422, "usage"),
    ("POST", SCALE, {"nodes": 3, "reason": "\x1b[2J"}, 422, "usage"),
    ("POST", SCALE, [], 422, "usage"),
    ("POST", SCALE, "scale", 422, "usage"),
    ("POST", "/v1/jobs/train/pause", {}, 422, "usage"),
    ("POST", "/v1/jobs/train/pause", {"reason": ""}, 422, "usage"),
    ("POST", "/v1/jobs/train/pause", {"reason": "  "}, 422, "usage"),
    ("POST", "/v1/jobs/train/restart", {"reason": None}, 422, "usage"),
    ("POST", "/v1/nodes/n1/drain", {}, 422, "usage"),
    ("POST", "/v1/nodes/n1/cordon", {}, 422, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"nodes": 2, "argv": ["/bin/sh"]}, 422, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {"a b": 1}}, 422, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {"seconds": 2**53 + 1}}, 400, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {"seconds": [1]}}, 422, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {f"a{n}": 1 for n in range(65)}}, 422, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {"sekonds": 1}}, 400, "usage"),
    ("POST", "/v1/jobs/fresh/start", {"parameters": {"seconds": "; rm -rf /"}}, 400, "usage"),
    ("POST", "/v1/jobs/a%20b/stop", {}, 422, "usage"),
    ("POST", "/v1/jobs/%2e%2e/stop", {}, 422, "usage"),
    ("GET", "/v1/jobs/%ff", None, 422, "usage"),
    ("GET", "/v1/nodes/-x", None, 422, "usage"),
    ("GET", "/v1/events?after=-1", None, 422, "usage"),
    ("GET", "/v1/events?after=x", None, 422, "usage"),
    ("GET", "/v1/events?after=" + "9" * 5000, None, 422, "usage"),
    ("GET", "/v1/events?job=a%20b", None, 422, "usage"),
    # there is no such job, node or path, or the job does not run
    ("POST", "/v1/jobs/none/stop", {}, 404, "not_running"),
    ("POST", "/v1/jobs/none/scale", {"nodes": 1}, 404, "not_running"),
    ("POST", "/v1/jobs/ended/scale", {"nodes": 1}, 404, "not_running"),
    ("POST", "/v1/jobs/ended/restart", {"reason": "x"}, 404, "not_running"),
    ("POST", "/v1/jobs/ended/checkpoint", {}, 404, "not_running"),
    ("POST", "/v1/nodes/none/drain", {"reason": "x"}, 404, "not_running"),
    ("POST", "/v1/nodes/none/uncordon", {}, 404, "not_running"),
    ("GET", "/v1/jobs/none", None, 404, "not_running"),
    ("GET", "/v1/jobs/none/history", None, 404, "not_running"),
    ("GET", "/v1/nodes/none", None, 404, "not_running"),
    ("GET", "/", None, 404, "not_running"),
    ("GET", "/v1", None, 404, "not_running"),
    ("GET", "/v1/jobs/", None, 404, "not_running"),
    ("GET", "/docs", None, 404, "not_running"),
    ("POST", "/v1/jobs/train/explode", {}, 404, "not_running"),
    ("GET", "/v1/jobs/../../etc/passwd", None, 404, "not_running"),
    # the path knows no such method
    ("GET", SCALE, None, 405, "usage"),
    ("DELETE", "/v1/jobs/train", None, 405, "usage"),
    ("PUT", SCALE, {"nodes": 3}, 405, "usage"),
    ("POST", "/v1/status", {}, 405, "usage"),
    ("POST", "/metrics", {}, 405, "usage"),
    # if_revision is not the current one
    ("POST", SCALE, {"nodes": 3, "if_revision": 1}, 409, "conflict"),
    # a rule forbids it
    ("POST", "/v1/jobs/held/scale", {"nodes": 3}, 403, "refused"),
    ("POST", SCALE, {"nodes": 5}, 403, "refused"),
    ("POST", SCALE, {"nodes": 2, "min_nodes": 3, "max_nodes": 4}, 403, "refused"),
    ("POST", "/v1/jobs/train/start", {}, 403, "refused"),
    ("POST", "/v1/jobs/train/start", {"again": True}, 403, "refused"),
    # no node of the cluster has a job file of that name
    ("POST", "/v1/jobs/none/start", {"nodes": 1}, 404, "not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "expected"), BAD)
def test_each_bad_request_gets_its_code_and_changes_nothing(busy: World, method: str, path: str, body: Any, status: int, expected: str) -> None:
    busy.training(job="ended")
    busy.generation(job="ended", state="failed")
    before = busy.kv.list(busy.keys.prefix).items
    assert code(busy.request(method, path, body)) == (status, expected)
    assert busy.kv.list(busy.keys.prefix).items == before


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 422),
        (b"nodes=3", 422),
        (b"\xff", 400),
        (b'{"nodes": NaN}', 422),
        (b'{"nodes": 1e999}', 422),
        (b'{"nodes": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 60_000, 400),
        (b'{"nodes": 3, "reason": "\\ud800"}', 422),
        (b'{"nodes": 3, "\\ud800\\n": 1}', 422),
        (b'{"nodes": 3, "reason": "\\u0000"}', 422),
    ],
)
def test_a_body_that_is_no_fit_json_is_usage(busy: World, raw: bytes, status: int) -> None:
    assert code(busy.request("POST", SCALE, raw=raw)) == (status, "usage")


def test_a_body_must_be_said_to_be_json(busy: World) -> None:
    assert code(busy.request("POST", SCALE, {"nodes": 3}, headers={"Content-Type": "text/plain"})) == (422, "usage")


@pytest.mark.parametrize("size", [64 * 1024 + 1, 1 << 20])
def test_a_body_that_is_too_large_is_refused(busy: World, size: int) -> None:
    status, body = busy.request("POST", SCALE, raw=b" " * size)
    assert code((status, body)) == (400, "usage")
    assert body["error"]["message"] == "the body is larger than 65536 bytes"


def test_a_body_as_large_as_it_may_be_is_taken(busy: World) -> None:
    raw = b'{"nodes": 3}'
    assert busy.request("POST", SCALE, raw=raw + b" " * (64 * 1024 - len(raw)))[0] == 200


def test_a_body_in_pieces_is_taken_and_refused_by_its_size(busy: World) -> None:
    chunked = {"Transfer-Encoding": "chunked"}
    assert busy.request("POST", SCALE, raw=b'c\r\n{"nodes": 3}\r\n0\r\n\r\n', headers=chunked)[0] == 200
    piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert code(busy.request("POST", SCALE, raw=piece * 3 + b"0\r\n\r\n", headers=chunked)) == (400, "usage")


def test_with_etcd_out_of_reach_a_change_is_unavailable(busy: World) -> None:
    busy.server.kill()
    assert code(busy.request("POST", SCALE, {"nodes": 3})) == (503, "kv_unavailable")


def test_a_fault_of_ours_is_logged_and_shows_nothing_of_itself(busy: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_more: Any) -> None:
        raise RecordError("secret of the inside")

    for wrong in (fail, lambda *_a, **_k: 1 / 0):
        monkeypatch.setattr(busy.operations, "scale", wrong)
        with structlog.testing.capture_logs() as logged:
            status, body = busy.request("POST", SCALE, {"nodes": 3})
        assert code((status, body)) == (500, "internal")
        assert body["error"] == {"code": "internal", "message": "a fault of the daemon's", "hint": "its log has it"}
        assert [line["event"] for line in logged] == ["request_failed"]


def test_of_two_callers_that_scale_what_they_have_seen_exactly_one_wins(busy: World) -> None:
    for _ in range(20):
        revision = busy.target()
        barrier = threading.Barrier(2)
        answers: list[tuple[int, Any]] = []

        def ask(nodes: int, revision: int = revision, barrier: threading.Barrier = barrier, answers: list[tuple[int, Any]] = answers) -> None:
            barrier.wait()
            answers.append(busy.request("POST", SCALE, {"nodes": nodes, "if_revision": revision}))

        threads = [threading.Thread(target=ask, args=(nodes,)) for nodes in (3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in answers) == [200, 409]
        (won,) = (body for status, body in answers if status == 200)
        assert busy.wanted().desired == won["data"]["after"]["nodes"]
