"""A cluster in etcd for these tests: written key by key, as daemons and agents would, and served by a real API on real sockets.

Owns: its records, and the API's server and clients. Must not: run daemons or agents; tests/daemon/daemons.py does.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge

from elasticd.daemon.api.app import make_app
from elasticd.daemon.api.server import ApiServer
from elasticd.daemon.audit import Caller
from elasticd.daemon.board import Board, Turn
from elasticd.daemon.client import ApiClient
from elasticd.daemon.cluster import ClusterView, Happening, cluster_view, happenings
from elasticd.daemon.config import DaemonConfig
from elasticd.daemon.detecting import Detecting
from elasticd.daemon.gpureadings import Gpus
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.operations import Operations
from elasticd.kv import Delete, EtcdKV, KVConfig, Put
from elasticd.rendezvous.keys import ClusterKeys
from elasticd.rendezvous.records import (
    Cause,
    CauseKind,
    GenerationMember,
    GenerationRecord,
    GenerationState,
    MemberId,
    MemberRecord,
    NodeJob,
    NodeJobState,
    NodePolicyRecord,
    NodeRecord,
    Record,
    StoreAddress,
    TargetRecord,
)
from elasticd.rendezvous.view import Ledger, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticd.daemon.api.connections import Limits
    from tests.support.etcd import Server

OPERATOR = Caller(name="ada", uid=1000, gid=1000, pid=77, may_change=True)
READER = Caller(name="bob", uid=1001, gid=1001, pid=78)
OUR_GROUP = grp.getgrgid(os.getegid()).gr_name
"""Operators of these tests' daemons: whoever runs the tests is one, root or not."""

JOB = JobSpec(
    name="train",
    argv=("/bin/sleep", "{seconds}", "{mode}"),
    min_nodes=1,
    max_nodes=4,
    nodes=2,
    max_restarts=7,
    parameters={  # type: ignore[arg-type]  # pydantic makes them of these
        "seconds": {"type": "int", "default": 60, "min": 1, "max": 3600},
        "mode": {"type": "choice", "default": "slow", "choices": ("slow", "fast")},
    },
)


def identity(node: str) -> MemberId:
    return MemberId(node=node, incarnation=node.encode().hex()[:16].rjust(16, "0"))


class World:
    """One cluster of its own on a shared etcd. This node is `n1`, whose file allows `train`."""

    def __init__(self, server: Server, **config: Any) -> None:
        self.server = server
        # Not below pytest's own directory: that one lets no other user through.
        self.folder = Path(tempfile.mkdtemp(prefix="elasticd-api-"))
        self.folder.chmod(0o755)
        self.keys = ClusterKeys(f"c{uuid.uuid4().hex[:12]}")
        self.kv = EtcdKV(KVConfig(endpoints=(server.endpoint,), call_timeout=2.0))
        self.board = Board(node="n1", incarnation="0" * 15 + "1", stalled_after=60.0)
        self.board.post(Turn(at=1e12, registered=True, etcd_problem="", etcd_since=1_700_000_000.0, slots=8, allowed={"train": JOB}))
        self.config = DaemonConfig.model_validate(
            {
                "cluster": self.keys.cluster,
                "etcd": {"endpoints": [server.endpoint]},
                "api": {"socket": self.folder / "api.sock", "readers": "nogroup", "operators": OUR_GROUP},
                "metrics": {"listen": "127.0.0.1:0"},
                **config,
            }
        )
        self.operations = Operations(self.kv, self.kv, self.keys, self.board)
        self.registry = CollectorRegistry()
        Gauge("elasticd_test", "A number.", registry=self.registry).set(42)
        self.client = ApiClient(self.config.socket, timeout=20.0)
        self.detecting: Detecting | None = None

    def close(self) -> None:
        self.kv.close()
        self.board.close()
        shutil.rmtree(self.folder)

    @contextlib.contextmanager
    def served(self, limits: Limits | None = None) -> Iterator[ApiServer]:
        """The API, until the end of the block."""
        server = ApiServer(make_app(self.operations, self.board, self.config, self.registry, Gpus(), self.detecting), self.config, limits)
        server.start()
        try:
            yield server
        finally:
            server.stop(2.0)

    # --- what others write -----------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes | Record, lease: int = 0) -> int:
        """Write whatever is there; the revision."""
        return self.kv.txn([], [Put(key=key, value=value if isinstance(value, bytes) else value.to_bytes(), lease=lease)]).revision

    def delete(self, key: str) -> None:
        self.kv.txn([], [Delete(key=key)])

    def wipe(self) -> None:
        """Nothing is in etcd any more."""
        for item in self.kv.list(self.keys.prefix, keys_only=True).items:
            self.delete(item.key)

    def node(self, name: str = "n1", *jobs: NodeJob, **more: Any) -> int:
        """A daemon's key."""
        values: dict[str, Any] = {"incarnation": "a" * 16, "address": "10.0.0.1", "slots": 8, "version": "0.1.0", "boot_id": "boot", **more}
        return self.put(self.keys.node(name), NodeRecord(scope=self.keys.scope, node=name, jobs=jobs, **values))

    def policy(self, name: str, **more: Any) -> int:
        return self.put(self.keys.policy(name), NodePolicyRecord(scope=self.keys.scope, **{"reason": "because", "by": "ada", "at": 1_700_000_000.0, **more}))

    def target(self, job: str = "train", **more: Any) -> int:
        values: dict[str, Any] = {"min_nodes": 1, "max_nodes": 4, "desired": 2, **more}
        keys = self.keys.job(job)
        return self.put(keys.target, TargetRecord(scope=keys.scope, **values))

    def generation(self, *nodes: str, job: str = "train", number: int = 5, state: str = "active", **more: Any) -> int:
        keys = self.keys.job(job)
        members = tuple(GenerationMember(id=identity(node), address="10.0.0.1", slots=2, probe_port=4001) for node in nodes or ("n1",))
        values: dict[str, Any] = {"cause": Cause(kind=CauseKind.FORM), "formed_at": 1_700_000_000.0, **more}
        record = GenerationRecord(
            scope=keys.scope, number=number, state=GenerationState(state), members=members, store=StoreAddress(address="10.0.0.1", port=4000), **values
        )
        return self.put(keys.generation, record)

    def member(self, node: str, job: str = "train", **more: Any) -> int:
        keys = self.keys.job(job)
        record = MemberRecord(scope=keys.scope, id=identity(node), address="10.0.0.1", slots=2, boot_id="boot", store_port=4000, probe_port=4001, **more)
        return self.put(keys.member(node), record)

    def training(self, *nodes: str, job: str = "train", **target: Any) -> None:
        """A job that trains on these nodes."""
        self.target(job, **target)
        for node in nodes or ("n1",):
            self.member(node, job)
        self.generation(*nodes, job=job)

    # --- what is there then ----------------------------------------------------------------------------------------------

    def job(self, name: str = "train") -> View:
        """One job as etcd holds it."""
        ledger = Ledger(self.keys.job(name))
        ledger.load(self.kv.list(self.keys.job(name).prefix))
        return ledger.view()

    def wanted(self, name: str = "train") -> TargetRecord:
        view = self.job(name)
        assert view.target is not None, view.problems
        return view.target.record

    def view(self) -> ClusterView:
        return cluster_view(self.kv.list(self.keys.prefix), self.keys, self.board.turn.allowed)

    def audit(self) -> list[Happening]:
        """The audit ring, oldest first."""
        return list(happenings(self.kv.list(self.keys.audit).items, self.keys))

    def request(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """One request on the socket, whatever it is; status, and what the answer holds."""
        from elasticd.daemon.client import _UnixConnection

        connection = _UnixConnection(self.config.socket, 20.0)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text.decode()


RUNNING = NodeJob(name="train", state=NodeJobState.RUNNING, slots=2)
IDLE = NodeJob(name="train", state=NodeJobState.IDLE)
