"""Incidents as detectors tell them, and a cluster in etcd in which they are acted on.

Owns: records that agents, daemons and detectors would write. Must not: find anything.
"""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticd.daemon.acting import Acting
from elasticd.daemon.reports import Reports
from elasticd.kv import Delete, EtcdKV, KVConfig, Put
from elasticd.observability.report import JobReport
from elasticd.policy.budgets import Ledger as Deeds
from elasticd.policy.settings import Settings
from elasticd.rendezvous.keys import ClusterKeys
from elasticd.rendezvous.records import (
    Cause,
    CauseKind,
    GenerationMember,
    GenerationRecord,
    MemberId,
    MemberRecord,
    NodePolicyRecord,
    NodeRecord,
    PolicyRecord,
    Record,
    RequestKind,
    RequestRecord,
    StoreAddress,
    TargetRecord,
    parse,
)

if TYPE_CHECKING:
    from tests.support.etcd import Server

JOB = "llm"


def finding(kind: str = "joint_drift", **changes: Any) -> dict[str, Any]:
    now = time.time()
    base: dict[str, Any] = {
        "at": now,
        "detector": "forest",
        "kind": kind,
        "summary": f"{kind} seen",
        "cls": "transient",
        "role": "root",
        "certainty": "weak",
        "scope": "rank",
        "node": "n2",
        "rank": 1,
        "generation": 7,
        "features": [],
        "line": "",
        "began": now,
    }
    return {**base, **changes}


def incident(root: dict[str, Any], *, lasted: float = 0.0, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "id": f"g{root['generation'] or 0}-{root['kind']}-{root['node']}",
        "state": "confirmed",
        "root": root,
        "findings": [root],
        "count": 1,
        "opened": root["at"] - lasted,
        "updated": root["at"],
        "corroborated": False,
        "why_over": "",
        "cls": root["cls"],
        "certainty": root["certainty"],
        "nodes": [root["node"]],
        "ranks": [root["rank"]] if root["rank"] is not None else [],
    }
    return {**base, **changes}


def xid(node: str = "n2") -> dict[str, Any]:
    """A GPU fell off the bus."""
    return incident(finding("xid_79", detector="signature", cls="hardware", certainty="certain", scope="node", node=node, rank=None, began=None))


class Told:
    """Stands for a node's detectors: says what a test puts in."""

    def __init__(self) -> None:
        self.said: dict[str, list[dict[str, Any]]] = {}

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(self.said)

    @property
    def watched(self) -> tuple[str, ...]:
        return (JOB,)

    def incidents(self, job: str) -> list[dict[str, Any]]:
        return self.said.get(job, [])


class Site:
    """A cluster of its own on a shared etcd: nodes n1 to nN train job `llm`, generation 7, one rank each."""

    def __init__(self, server: Server, folder: Path, nodes: int = 3, *, spare: bool = False, min_nodes: int = 1) -> None:
        self.keys = ClusterKeys(f"c{uuid.uuid4().hex[:12]}")
        self.of_job = self.keys.job(JOB)
        self.kv = EtcdKV(KVConfig(endpoints=(server.endpoint,), call_timeout=2.0))
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.made: list[Acting] = []
        here = [*self.names, *(["spare"] if spare else [])]
        for name in here:
            self.put(self.of_job.member(name), self.member(name))
            daemon = NodeRecord(scope=self.keys.scope, node=name, incarnation="0" * 16, address="127.0.0.1", slots=1, version="1", boot_id="b")
            self.put(self.keys.node(name), daemon)
        self.put(self.of_job.target, TargetRecord(scope=self.of_job.scope, min_nodes=min_nodes, max_nodes=nodes, desired=nodes))
        self.generate(7)

    def close(self) -> None:
        for one in self.made:
            one.close()
        self.kv.close()

    def put(self, key: str, record: Record) -> None:
        self.kv.txn((), (Put(key=key, value=record.to_bytes()),))

    def member(self, node: str, **changes: Any) -> MemberRecord:
        return MemberRecord(scope=self.of_job.scope, id=identity(node), address="127.0.0.1", slots=1, boot_id="b", store_port=1234, probe_port=1235, **changes)

    def generate(self, number: int, **changes: Any) -> None:
        members = tuple(GenerationMember(id=identity(name), address="127.0.0.1", slots=1, probe_port=1235) for name in self.names)
        record = GenerationRecord(
            scope=self.of_job.scope,
            number=number,
            cause=Cause(kind=CauseKind.FORM),
            members=members,
            store=StoreAddress(address="127.0.0.1", port=1234),
            formed_at=time.time() - 3600.0,
            **changes,
        )
        self.put(self.of_job.generation, record)

    def report(self, **values: Any) -> None:
        """What the agent of each node says; checkpoints and restarts are quick, as elasticd makes them."""
        base: dict[str, Any] = {
            "step": 5000,
            "ranks": [{"local_rank": 0, "rank": 0, "step": 5000, "step_seconds": 0.1}],
            "recovery": {"bounds": (5.0,), "counts": (2, 0), "total": 4.0},
            "checkpoint": {
                "step": 4000,
                "at": time.time() - 400.0,
                "every_s": 600.0,
                "committed_step": 4000,
                "durations": {"bounds": (1.0,), "counts": (10, 0), "total": 5.0},
            },
        }
        report = JobReport.model_validate({"job": JOB, "node": "n1", "at": time.time(), **base, **values})
        self.folder.mkdir(exist_ok=True)
        report.write(self.folder / f"{JOB}.json")

    def acting(self, node: str, told: Told, **settings: Any) -> Acting:
        one = Acting(
            kv=self.kv,
            operator_kv=self.kv,
            keys=self.keys,
            node=node,
            settings=Settings.from_dict(settings),
            detecting=told,  # type: ignore[arg-type]  # says the same, and finds nothing
            reports=Reports(self.folder),
            due=threading.Event(),
        )
        self.made.append(one)
        return one

    # --- what came of it ---

    def request(self, kind: RequestKind) -> RequestRecord | None:
        item = self.kv.get(self.of_job.request(kind.value))
        return parse(RequestRecord, item.key, item.value, self.of_job.scope) if item else None

    def policy(self) -> PolicyRecord | None:
        item = self.kv.get(self.of_job.policy)
        return parse(PolicyRecord, item.key, item.value, self.of_job.scope) if item else None

    def deeds(self) -> list[str]:
        record = self.policy()
        return [deed.action.value for deed in Deeds.from_dict(record.ledger).deeds] if record else []

    def rules(self) -> list[tuple[str, str]]:
        record = self.policy()
        return [(str(one["action"]), str(one["rule"])) for one in record.decisions] if record else []

    def word(self, node: str) -> NodePolicyRecord | None:
        item = self.kv.get(self.keys.policy(node))
        return parse(NodePolicyRecord, item.key, item.value, self.keys.scope) if item else None

    def remove(self, key: str) -> None:
        self.kv.txn((), (Delete(key=key),))


def identity(node: str) -> MemberId:
    return MemberId(node=node, incarnation=node.encode().hex()[:16].rjust(16, "0"))
