"""What may be read: each path of docs/api.md, exactly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from elasticd import __version__
from elasticd.daemon.board import Turn
from elasticd.rendezvous.records import EventRecord
from tests.daemon.api.world import IDLE, JOB, OPERATOR, RUNNING, World

if TYPE_CHECKING:
    from elasticd.daemon.api.server import ApiServer


def data(world: World, path: str, **query: Any) -> Any:
    return world.client.get(path, **query)["data"]


def test_an_envelope_says_what_it_holds(world: World, api: ApiServer) -> None:
    for path, kind in (
        ("/v1/status", "ClusterStatus"),
        ("/v1/jobs", "JobStatusList"),
        ("/v1/jobs/train", "JobStatus"),
        ("/v1/jobs/train/history", "History"),
        ("/v1/nodes", "NodeStatusList"),
        ("/v1/events", "EventList"),
    ):
        envelope = world.client.get(path)
        assert list(envelope) == ["apiVersion", "kind", "revision", "data"]
        assert (envelope["apiVersion"], envelope["kind"]) == ("elasticd/v1", kind)
        assert isinstance(envelope["revision"], int)


def test_one_job_has_everything_that_status_always_had_and_what_is_wanted(world: World, api: ApiServer) -> None:
    world.training("n1", "n2", parameters={"seconds": 5}, reason="monday", by="ada")
    keys = world.keys.job("train")
    world.put(keys.event(5, "formed"), EventRecord(scope=keys.scope, number=5, at=1_700_000_000.5, what="formed", detail="2 nodes"))
    target = world.job().target
    assert target is not None
    assert data(world, "/v1/jobs/train") == {
        "cluster": world.keys.cluster,
        "job": "train",
        "state": "training",
        "why": "",
        "generation": 5,
        "cause": "form",
        "cause_kind": "form",
        "formed_at": "2023-11-14T22:13:20.000Z",
        "world_size": 4,
        "nodes_training": 2,
        "nodes_min": 1,
        "nodes_desired": 2,
        "nodes_max": 4,
        "restarts_used": 0,
        "restarts_max": 10,
        "store": "10.0.0.1:4000",
        "coordinator": "n1",
        "checkpoint_step": None,
        "problems": [],
        "etcd": [world.server.endpoint],
        "run": True,
        "paused": False,
        "parameters": {"seconds": 5},
        "target_revision": target.mod_revision,
        "reason": "monday",
        "by": "ada",
        "nodes": [
            {
                "name": name,
                "state": "training",
                "rank": rank,
                "ranks": [2 * rank, 2 * rank + 1],
                "slots": 2,
                "address": "10.0.0.1",
                "incarnation": name.encode().hex().rjust(16, "0"),
            }
            for rank, name in enumerate(("n1", "n2"))
        ],
        "events": [{"generation": 5, "at": "2023-11-14T22:13:20.500Z", "what": "formed", "detail": "2 nodes"}],
    }
    assert data(world, "/v1/jobs/train/history") == {
        "generations": [{"number": 5, "at": "2023-11-14T22:13:20.500Z", "what": "formed", "detail": "2 nodes"}]
    }


def test_the_revision_of_a_target_is_good_for_if_revision(world: World, api: ApiServer) -> None:
    world.training()
    revision = data(world, "/v1/jobs/train")["target_revision"]
    world.client.post("/v1/jobs/train/scale", {"nodes": 3, "if_revision": revision})
    assert world.request("POST", "/v1/jobs/train/scale", {"nodes": 4, "if_revision": revision})[0] == 409


def test_jobs_are_all_that_are_known_or_allowed(world: World, api: ApiServer) -> None:
    world.training(job="other")
    world.node("n2", IDLE.model_copy(update={"name": "third"}))
    assert [(job["job"], job["state"], job["run"]) for job in data(world, "/v1/jobs")["jobs"]] == [
        ("other", "training", True),
        ("third", "stopped", None),
        ("train", "stopped", None),
    ]


def test_one_node_is_told_whole(world: World, api: ApiServer) -> None:
    world.node("n2", RUNNING, gpus=("G1",), labels={"rack": "7"}, started_at=1_700_000_000.0, problems=("hot",))
    world.policy("n2", cordoned=True)
    assert data(world, "/v1/nodes/n2") == {
        "name": "n2",
        "state": "cordoned",
        "reason": "because",
        "by": "ada",
        "at": "2023-11-14T22:13:20.000Z",
        "address": "10.0.0.1",
        "slots": 8,
        "slots_used": 2,
        "gpus": ["G1"],
        "labels": {"rack": "7"},
        "version": "0.1.0",
        "boot_id": "boot",
        "started_at": "2023-11-14T22:13:20.000Z",
        "jobs": [{"name": "train", "state": "running", "slots": 2, "why": ""}],
        "problems": ["hot"],
    }
    assert [node["name"] for node in data(world, "/v1/nodes")["nodes"]] == ["n2"]


def test_the_cluster_is_told_at_once(world: World, api: ApiServer) -> None:
    world.training()
    world.node("n1", RUNNING)
    world.put(world.keys.prefix + "odd", b"")
    found = data(world, "/v1/status")
    assert {name: found[name] for name in ("cluster", "node", "version", "etcd", "problems")} == {
        "cluster": world.keys.cluster,
        "node": "n1",
        "version": __version__,
        "etcd": {"reachable": True, "endpoints": [world.server.endpoint], "since": "2023-11-14T22:13:20.000Z", "problem": ""},
        "problems": [f"{world.keys.prefix}odd: not a key of this cluster's layout"],
    }
    assert [(job["job"], job["state"]) for job in found["jobs"]] == [("train", "training")]
    assert not {"nodes", "events"} & set(found["jobs"][0])
    assert [(node["name"], node["slots_used"]) for node in found["nodes"]] == [("n1", 2)]


def test_with_etcd_out_of_reach_the_cluster_is_this_node(world: World, api: ApiServer) -> None:
    world.board.post(Turn(at=1e12, slots=8, allowed={"train": JOB}, jobs=(RUNNING,), etcd_problem="gone", etcd_since=1_700_000_000.0))
    world.server.kill()
    envelope = world.client.get("/v1/status")
    assert envelope["revision"] is None
    found = envelope["data"]
    assert (found["etcd"]["reachable"], found["jobs"]) == (False, [])
    assert found["etcd"]["problem"] != ""
    assert [(node["name"], node["slots_used"], node["jobs"][0]["state"]) for node in found["nodes"]] == [("n1", 2, "running")]
    assert world.client.text("/healthz") == (200, "ok\n")
    assert world.client.text("/readyz") == (503, "etcd: gone\n")


def test_events_are_told_once_to_whoever_gives_back_last(world: World, api: ApiServer) -> None:
    world.node("n1")
    world.training()
    world.operations.scale(OPERATOR, "train", nodes=3, reason="more")
    world.operations.drain(OPERATOR, "n1", reason="disk")
    found = data(world, "/v1/events")
    assert [(one["kind"], one["what"], one["job"], one["node"], one["detail"], one["by"], one["generation"]) for one in found["events"]] == [
        ("audit", "scale", "train", None, "nodes 2 -> 3: more", "ada (uid 1000, pid 77) on n1", None),
        ("audit", "drain", None, "n1", "cordoned - -> true, draining - -> true: disk", "ada (uid 1000, pid 77) on n1", None),
    ]
    assert found["last"] == found["events"][-1]["id"]
    assert data(world, "/v1/events", after=found["last"]) == {"events": [], "last": found["last"]}
    assert [one["what"] for one in data(world, "/v1/events", job="train")["events"]] == ["scale"]
    assert [one["what"] for one in data(world, "/v1/events", node="n1")["events"]] == ["drain"]


def test_health_says_why(world: World, api: ApiServer) -> None:
    assert world.client.text("/livez") == (200, "ok\n")
    world.board.post(Turn(at=1.0, registered=True, etcd_problem=""))
    status, text = world.client.text("/livez")
    assert status == 503
    assert text.startswith("the decision loop has not turned for ")
    world.board.post(Turn(at=1e12, registered=False, etcd_problem=""))
    assert world.client.text("/readyz") == (503, "this node is not registered yet\n")
    assert world.client.text("/healthz") == (200, "ok\n")


def test_metrics_are_those_of_the_registry(world: World, api: ApiServer) -> None:
    status, text = world.client.text("/metrics")
    assert (status, "elasticd_test 42.0" in text) == (200, True)


@pytest.mark.parametrize("value", [b"", b"{", b"\xff\x00", b'{"v": 1}', b"[" * 5000, b"9" * 5000, b'"\\ud800"'])
def test_garbage_in_every_key_is_told_and_never_a_fault(world: World, api: ApiServer, value: bytes) -> None:
    keys = world.keys.job("train")
    places = [keys.target, keys.generation, keys.proposal, keys.budget, keys.checkpoint, keys.member("n1"), keys.request("restart"), keys.event(1, "x")]
    for key in (*places, world.keys.node("n1"), world.keys.policy("n1"), world.keys.audit + "000", world.keys.prefix + "odd"):
        world.put(key, value)
    for path in ("/v1/status", "/v1/jobs", "/v1/jobs/train", "/v1/jobs/train/history", "/v1/nodes", "/v1/nodes/n1", "/v1/events"):
        assert world.request("GET", path)[0] == 200, path
    assert len(data(world, "/v1/jobs/train")["problems"]) == len(places)
    assert len(data(world, "/v1/nodes/n1")["problems"]) == 2
    assert len(data(world, "/v1/status")["problems"]) == 2


def test_the_openapi_document_names_every_path_of_the_contract(world: World, api: ApiServer) -> None:
    status, document = world.request("GET", "/openapi.json")
    assert status == 200
    changes = {f"/v1/jobs/{{job}}/{verb}" for verb in ("start", "stop", "scale", "pause", "resume", "checkpoint", "restart", "incidents/{incident}/ack")}
    changes |= {f"/v1/nodes/{{node}}/{verb}" for verb in ("cordon", "drain", "uncordon")}
    reads = {"/v1/status", "/v1/jobs", "/v1/jobs/{job}", "/v1/jobs/{job}/history", "/v1/nodes", "/v1/nodes/{node}", "/v1/events"}
    reads |= {"/v1/jobs/{job}/logs", "/v1/telemetry", "/v1/anomalies"}
    health = {"/healthz", "/livez", "/readyz", "/metrics"}
    both = {"/v1/config", "/v1/config/{job}"}
    expected = {path: {"get"} for path in reads | health} | {path: {"post"} for path in changes} | {path: {"get", "post"} for path in both}
    assert {path: set(methods) for path, methods in document["paths"].items()} == expected
    assert "ValidationError" not in json.dumps(document)
