"""`GET /v1/anomalies`: what the detectors of this node have said, also while they are dead."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.daemon.detecting import Detecting
from elasticd.errors import NotRunningError, RefusedError, UsageError
from elasticd.kv import Put
from elasticd.policy.budgets import Deed, Ledger
from elasticd.policy.decisions import Action
from elasticd.rendezvous.records import IncidentsRecord, PolicyRecord
from tests.daemon.api.world import World
from tests.support.etcd import await_

pytestmark = pytest.mark.timeout(120)

FINDING: dict[str, Any] = {
    "at": 1.7e9,
    "detector": "guard",
    "kind": "nonfinite",
    "summary": "the loss of rank 1 is NaN",
    "cls": "user",
    "role": "root",
    "certainty": "certain",
    "scope": "rank",
    "node": "n1",
    "rank": 1,
    "generation": 3,
    "features": [{"name": "loss", "value": 1.0, "baseline": None, "peers": None, "z": None}],
    "line": "",
    "began": None,
}
INCIDENT: dict[str, Any] = {
    "id": "g3-nonfinite-n1-r1",
    "state": "confirmed",
    "root": FINDING,
    "findings": [FINDING],
    "count": 1,
    "opened": 1.7e9,
    "updated": 1.7e9,
    "corroborated": False,
    "why_over": "",
    "cls": "user",
    "certainty": "certain",
    "nodes": ["n1"],
    "ranks": [1],
}
# Stands for the detectors: says what it is given, and waits.
SAYS = "import sys; print(sys.argv[1], flush=True); print(sys.argv[2], flush=True); sys.stdin.read()"
PULSE = {"kind": "pulse", "at": 1.7e9, "rss": 1000, "jobs": {"train": {"windows": 7}}, "problems": []}


@pytest.fixture
def detecting(world: World, tmp_path: Path) -> Iterator[Detecting]:
    said = {"kind": "incident", "job": "train", "incident": INCIDENT}
    one = Detecting(None, command=[sys.executable, "-c", SAYS, json.dumps(PULSE), json.dumps(said)])
    one.watch({"train": tmp_path})
    one.start()
    world.detecting = one
    yield one
    one.close()


def test_incidents_and_the_detectors_that_saw_them(world: World, detecting: Detecting) -> None:
    await_(lambda: detecting.incidents("train"), what="the incident", within=20)
    with world.served():
        data = world.client.get("/v1/anomalies")["data"]
        assert data["incidents"] == [{**INCIDENT, "job": "train", "seen_by": "n1"}]
        assert data["detectors"] == [{"node": "n1", "running": True, "restarts": 0, "rss": 1000, "jobs": {"train": {"windows": 7}}, "problem": ""}]
        assert world.client.get("/v1/anomalies", job="other")["data"]["incidents"] == []
        with pytest.raises(UsageError):
            world.client.get("/v1/anomalies", job="no/name")


def test_a_node_without_detectors_says_so(world: World) -> None:
    with world.served():
        data = world.client.get("/v1/anomalies", nodes="own")["data"]
    assert data["incidents"] == []
    assert [(one["running"], "[detectors]" in one["problem"]) for one in data["detectors"]] == [(False, True)]


# --- what was decided, and what an operator says to it ----------------------------------------------------------------------

ACK = "/v1/jobs/train/incidents/g3-nonfinite-n1-r1/ack"


def decided(world: World, **changes: Any) -> None:
    now = time.time()
    deeds = (Deed(at=now - 7200.0, action=Action.RESTART, about="g2-x", fingerprint="x@n2", node="n2", done=False),)
    decision = {
        "about": "g2-x",
        "at": now - 7200.0,
        "action": "log",
        "would": "restart",
        "wanted": "restart",
        "rule": "drift",
        "why": "it held",
        "numbers": {"p": 0.3},
    }
    values: dict[str, Any] = {"ledger": Ledger(deeds=deeds).as_dict(), "decisions": (decision,), **changes}
    world.put(world.keys.job("train").policy, PolicyRecord(scope=world.keys.job("train").scope, **values))


def told_of(world: World, name: str = "g3-nonfinite-n1-r1") -> None:
    record = IncidentsRecord(scope=world.keys.job("train").scope, node="n2", incidents=({**INCIDENT, "id": name},))
    world.put(world.keys.incidents_of("train", "n2"), record)


def test_what_was_decided_is_told_with_what_came_of_it_and_what_is_left(world: World) -> None:
    decided(world, hold=3, acks={"g1-y": "ada: mine"})
    with world.served():
        (policy,) = world.client.get("/v1/anomalies")["data"]["policies"]
        assert world.client.get("/v1/anomalies", nodes="own")["data"]["policies"] == [], "other nodes are asked for what they see, not for etcd"
    assert (policy["job"], policy["mode"], policy["held"], policy["acks"], policy["problem"]) == ("train", "act", True, {"g1-y": "ada: mine"}, "")
    assert policy["came_of"] == ["would have restarted 1 time in 2.0 h, 0 followed by a failure"]
    assert [(one["about"], one["would"], one["numbers"], one["came_to"]) for one in policy["decisions"]] == [("g2-x", "restart", {"p": 0.3}, "")]
    assert (policy["budget"]["hour"], policy["budget"]["day"], policy["budget"]["day_most"]) == (0, 0, 4), "what was not done is not charged"


@pytest.mark.parametrize(
    "garbage",
    [
        b"{",
        b"[]",
        b'{"v": 1, "scope": "x"}',
        None,
        [{"about": 7}],
        [{"about": "a", "action": "fly", "at": 1.0}],
        [{"about": "a", "action": "log", "at": "now"}],
    ],
)
def test_what_cannot_be_read_is_told_and_hides_nothing_else(world: World, garbage: Any) -> None:
    key = world.keys.job("train").policy
    if isinstance(garbage, bytes):
        world.kv.txn((), (Put(key=key, value=garbage),))
    elif garbage is None:
        decided(world, ledger={"deeds": "all of them"})
    else:
        decided(world, decisions=tuple(garbage))
    told_of(world)
    with world.served():
        status, body = world.request("GET", "/v1/anomalies")
    assert status == 200
    (policy,) = body["data"]["policies"]
    assert "cannot be read" in policy["problem"]
    assert policy["decisions"] == []


def test_an_incident_is_acknowledged_once_and_by_whom_is_known(world: World) -> None:
    told_of(world)
    with world.served():
        first = world.client.post(ACK, {"reason": "on my way"})["data"]
        second = world.client.post(ACK, {"reason": "me too"})["data"]
        (policy,) = world.client.get("/v1/anomalies")["data"]["policies"]
    assert (first["changed"], second["changed"]) == (True, False)
    assert policy["acks"]["g3-nonfinite-n1-r1"].endswith(": on my way")
    assert second["before"] == {"acknowledged": policy["acks"]["g3-nonfinite-n1-r1"]}
    assert [one.what for one in world.audit()] == ["ack"]


def test_what_was_decided_stays_when_an_incident_is_acknowledged(world: World) -> None:
    decided(world, hold=3)
    with world.served():
        assert world.client.post("/v1/jobs/train/incidents/g2-x/ack")["data"]["changed"], "it is known by what was decided about it"
    record = world.job().policy
    assert record is not None
    assert (record.record.hold, len(record.record.decisions), len(record.record.ledger["deeds"])) == (3, 1, 1)  # type: ignore[arg-type]  # a list


def test_an_incident_that_nobody_knows_is_not_acknowledged(world: World) -> None:
    told_of(world, "another")
    with world.served(), pytest.raises(NotRunningError, match="no node knows an incident"):
        world.client.post(ACK)
    assert world.job().policy is None


def test_what_was_decided_and_cannot_be_read_is_not_written_over_by_an_acknowledgement(world: World) -> None:
    told_of(world)
    key = world.keys.job("train").policy
    world.kv.txn((), (Put(key=key, value=b"{"),))
    with world.served(), pytest.raises(RefusedError, match="cannot be read"):
        world.client.post(ACK)
    item = world.kv.get(key)
    assert item is not None
    assert item.value == b"{"
