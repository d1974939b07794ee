"""A daemon that answers what a test tells it to, over a real unix socket, as docs/api.md has it.

Owns: scripted answers, and what was asked. It stands in for the real daemon where a test needs a job to go through states one after another; what
the real one answers is tested in test_cluster.py.
"""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

Document = dict[str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: PretendDaemon

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        self._answer("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, method: str, body: Document | None) -> None:
        status, document = self.server.answer(method, self.path, body)
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *args: object) -> None:
        pass


class PretendDaemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers to "GET /v1/…" are used up one by one, and the last is given again and again.

    Attributes:
        asked: what was asked: method and path, and the body of a change.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.path = path
        self.asked: list[tuple[str, Document | None]] = []
        self._answers: dict[str, list[tuple[int, Document]]] = {}
        self._otherwise: tuple[int, Document] | None = None
        self._condition = threading.Condition()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()
        self.path.unlink(missing_ok=True)

    def tell(self, what: str, kind: str, *data: Document, revision: int | None = 100) -> None:
        """What is answered to `what`: each of `data` once, the last for ever."""
        self._answers[what] = [(200, {"apiVersion": "elasticd/v1", "kind": kind, "revision": revision, "data": one}) for one in data]

    def refuse(self, what: str, status: int, code: str, message: str = "no", hint: str = "") -> None:
        """What is refused."""
        self._answers[what] = [(status, {"error": {"code": code, "message": message, "hint": hint}})]

    def refuse_everything(self, status: int, code: str, message: str = "no", hint: str = "") -> None:
        """What else is refused."""
        self._otherwise = (status, {"error": {"code": code, "message": message, "hint": hint}})

    def await_asked(self, what: str, times: int = 1, *, within: float = 20.0) -> None:
        """Wait until `what` has been asked so many times."""
        with self._condition:
            assert self._condition.wait_for(lambda: self.times(what) >= times, within), f"{what} was asked {self.times(what)} times"

    def times(self, what: str) -> int:
        """How often it was asked."""
        return sum(one == what for one, _ in self.asked)

    def body(self, what: str) -> Document | None:
        """What the last such change held."""
        return [body for one, body in self.asked if one == what][-1]

    def answer(self, method: str, path: str, body: Document | None) -> tuple[int, Document]:
        """For the handler."""
        what = f"{method} {path}"
        with self._condition:
            self.asked.append((what, body))
            missing = (404, {"error": {"code": "not_running", "message": f"there is no {path}", "hint": ""}})
            answers = self._answers.get(what) or [self._otherwise or missing]
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            self._condition.notify_all()
        return found


def job(name: str = "llm", **fields: Any) -> Document:
    """A JobStatus, training on 2 nodes unless told otherwise."""
    return {
        "cluster": "default",
        "job": name,
        "state": "training",
        "why": "",
        "generation": 7,
        "cause": "join of node-2",
        "cause_kind": "join",
        "formed_at": "2026-11-30T12:00:00.000Z",
        "world_size": 16,
        "nodes_training": 2,
        "nodes_min": 1,
        "nodes_desired": 2,
        "nodes_max": 8,
        "restarts_used": 0,
        "restarts_max": 10,
        "store": "10.0.0.1:4711",
        "coordinator": "node-1",
        "checkpoint_step": None,
        "nodes": [member("node-1", rank=0, ranks=list(range(8))), member("node-2", rank=1, ranks=list(range(8, 16)))],
        "events": [{"generation": 7, "at": "2026-11-30T12:00:00.000Z", "what": "formed", "detail": "2 nodes, 16 workers: join of node-2"}],
        "problems": [],
        "etcd": ["10.0.0.1:2379"],
        "run": True,
        "paused": False,
        "parameters": {"lr": 0.001},
        "target_revision": 90,
        "reason": "",
        "by": "root (uid 0, pid 1)",
        **fields,
    }


def member(name: str, **fields: Any) -> Document:
    """A node of a job."""
    node = {"name": name, "state": "training", "rank": None, "ranks": [], "slots": 8, "address": "10.0.0.1", "incarnation": "0123456789abcdef"}
    return {**node, **fields}


def node(name: str = "node-3", **fields: Any) -> Document:
    """A NodeStatus, ready and running the job llm unless told otherwise."""
    return {
        "name": name,
        "state": "ready",
        "reason": "",
        "by": "",
        "at": None,
        "address": "10.0.0.3",
        "slots": 8,
        "slots_used": 8,
        "gpus": [f"GPU-{number}" for number in range(8)],
        "labels": {"rack": "b2"},
        "version": "0.1.0",
        "boot_id": "2f0c8a56-1111-2222-3333-444455556666",
        "started_at": "2026-11-30T10:00:00.000Z",
        "jobs": [{"name": "llm", "state": "running", "slots": 8, "why": ""}],
        "problems": [],
        **fields,
    }


def change(**fields: Any) -> Document:
    """A Change of the job llm."""
    return {"changed": True, "job": "llm", "node": None, "before": None, "after": None, "generation": 7, "dry_run": False, **fields}


def target(**fields: Any) -> Document:
    """`before` or `after` of a Change of a job."""
    return {"run": True, "nodes": 2, "min_nodes": 1, "max_nodes": 8, "max_restarts": 10, "paused": False, "parameters": {}, **fields}


def cluster(**fields: Any) -> Document:
    """A ClusterStatus of one job and one node."""
    summary = {name: value for name, value in job().items() if name not in ("nodes", "events")}
    etcd = {"reachable": True, "endpoints": ["10.0.0.1:2379", "10.0.0.2:2379"], "since": None, "problem": ""}
    base = {"cluster": "default", "node": "node-3", "version": "0.1.0", "etcd": etcd, "jobs": [summary], "nodes": [node()], "problems": []}
    return {**base, **fields}
