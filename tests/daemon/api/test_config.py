"""The paths of settings of training, as docs/api.md has them: exact answers, and each bad request with its code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.api.test_changing import code
from tests.daemon.api.world import JOB, World
from trainer.settings import ALIKE, SAFE, Settings

if TYPE_CHECKING:
    from elasticd.daemon.api.server import ApiServer

ALL, ONE = "/v1/config", "/v1/config/train"
pytestmark = pytest.mark.timeout(60)


def test_settings_are_told_with_all_that_is_known_of_them(world: World, api: ApiServer) -> None:
    world.client.post(ALL, {"set": {"compress": "fp16"}, "reason": "slow network"})
    envelope = world.client.get(ALL)
    assert list(envelope) == ["apiVersion", "kind", "revision", "data"]
    assert envelope["kind"] == "Config"
    data = envelope["data"]
    assert set(data) == {"node", "job", "settings", "etcd_cluster", "etcd_job", "problems"}
    assert (data["node"], data["job"], data["etcd_job"], data["problems"]) == ("n1", None, None, [])
    assert [one["name"] for one in data["settings"]] == list(Settings.model_fields)
    assert {one["name"] for one in data["settings"] if one["etcd"]} == SAFE
    assert {one["name"] for one in data["settings"] if one["alike"]} == ALIKE
    (compress,) = (one for one in data["settings"] if one["name"] == "compress")
    assert compress == {
        "name": "compress",
        "value": "fp16",
        "origin": "etcd:cluster",
        "unit": "",
        "layers": {"etcd:cluster": "fp16"},
        "etcd": True,
        "alike": True,
    }
    kept = data["etcd_cluster"]
    assert (kept["values"], kept["reason"]) == ({"compress": "fp16"}, "slow network")
    assert kept["by"].endswith(")")
    assert kept["at"].endswith("Z")


def test_settings_of_a_job_say_what_is_set_for_it_and_for_all(world: World, api: ApiServer) -> None:
    world.client.post(ALL, {"set": {"snapshot_every": 1}})
    world.client.post(ONE, {"set": {"snapshot_every": 2, "snapshots": False}})
    data = world.client.get(ONE)["data"]
    assert (data["job"], data["etcd_cluster"]["values"], data["etcd_job"]["values"]) == (
        "train",
        {"snapshot_every": 1},
        {"snapshot_every": 2, "snapshots": False},
    )
    found = {one["name"]: one for one in data["settings"]}
    assert (found["snapshot_every"]["value"], found["snapshot_every"]["layers"]) == (2, {"etcd:cluster": 1, "etcd:job": 2})
    assert found["snapshots"]["value"] is False
    assert found["stop_step_timeout_s"]["value"] == 22.5


def test_a_change_is_told_as_every_other(world: World, api: ApiServer) -> None:
    envelope = world.client.post(ONE, {"set": {"checkpoint_every_s": 300}})
    assert envelope["kind"] == "Change"
    assert envelope["data"] == {
        "changed": True,
        "job": "train",
        "node": None,
        "before": {},
        "after": {"checkpoint_every_s": 300.0},
        "generation": None,
        "dry_run": False,
    }
    data = world.client.post(ONE, {"unset": ["checkpoint_every_s"], "dry_run": True})["data"]
    assert (data["changed"], data["before"], data["after"], data["dry_run"]) == (True, {"checkpoint_every_s": 300.0}, {}, True)
    assert world.client.get(ONE)["data"]["etcd_job"]["values"] == {"checkpoint_every_s": 300.0}
    assert [event["what"] for event in world.client.get("/v1/events", job="train")["data"]["events"]] == ["configure"]


def test_the_revision_that_is_told_is_good_for_if_revision(world: World, api: ApiServer) -> None:
    assert world.client.get(ALL)["data"]["etcd_cluster"] == {"revision": 0, "values": {}, "reason": "", "by": "", "at": None}
    world.client.post(ALL, {"set": {"snapshot_every": 1}, "if_revision": 0})
    revision = world.client.get(ALL)["data"]["etcd_cluster"]["revision"]
    world.client.post(ALL, {"set": {"snapshot_every": 2}, "if_revision": revision})
    assert code(world.request("POST", ALL, {"set": {"snapshot_every": 3}, "if_revision": revision})) == (409, "conflict")


BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", ALL, None, 422, "usage"),
    ("POST", ALL, {"set": ["backend"]}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": ["gloo"]}}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": None}}, 422, "usage"),
    ("POST", ALL, {"set": {"back end": "gloo"}}, 422, "usage"),
    ("POST", ALL, {"set": {"snapshot_every": 2**60}}, 400, "usage"),
    ("POST", ALL, {"set": {f"a{n}": 1 for n in range(65)}}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": "x" * 65}}, 422, "usage"),
    ("POST", ALL, {"give": {"backend": "gloo"}}, 422, "usage"),
    ("POST", ALL, {"unset": "backend"}, 422, "usage"),
    ("POST", ALL, {"unset": [1]}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": "gloo"}, "if_revision": -1}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": "gloo"}, "dry_run": 1}, 422, "usage"),
    ("POST", ALL, {"set": {"backend": "gloo"}, "reason": "two\nlines"}, 422, "usage"),
    ("POST", "/v1/config/a%20b", {"set": {"backend": "gloo"}}, 422, "usage"),
    ("GET", "/v1/config/-x", None, 422, "usage"),
    ("POST", ALL, {"set": {"backend": "mpi"}}, 400, "usage"),
    ("POST", ALL, {"set": {"bakend": "gloo"}}, 400, "usage"),
    ("POST", ALL, {"set": {"snapshot_every": -1}}, 400, "usage"),
    ("POST", ALL, {"set": {"snapshots": "\ud800"}}, 422, "usage"),
    ("POST", ALL, {"unset": ["bakend"]}, 400, "usage"),
    ("POST", ONE, {"set": {"stop_step_timeout_s": 700}}, 400, "usage"),
    ("POST", ONE, {"set": {"checkpoint_dir": "/srv"}}, 403, "refused"),
    ("POST", ALL, {"set": {"checkpoint_url": "s3://a/b"}}, 403, "refused"),
    ("POST", ALL, {"set": {"nccl_interface": "ib0"}}, 403, "refused"),
    ("POST", "/v1/config/none", {"set": {"backend": "gloo"}}, 404, "not_allowed"),
    ("GET", "/v1/config/none", None, 404, "not_running"),
    ("GET", "/v1/config/train/more", None, 404, "not_running"),
    ("PUT", ALL, {"set": {"backend": "gloo"}}, 405, "usage"),
    ("DELETE", ONE, None, 405, "usage"),
    ("POST", ALL, {"set": {"backend": "gloo"}, "if_revision": 7}, 409, "conflict"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "expected"), BAD)
def test_each_bad_request_gets_its_code_and_changes_nothing(
    world: World, api: ApiServer, method: str, path: str, body: Any, status: int, expected: str
) -> None:
    assert code(world.request(method, path, body)) == (status, expected)
    assert world.kv.list(world.keys.prefix).items == ()


def test_with_etcd_out_of_reach_settings_are_unavailable(world: World, api: ApiServer) -> None:
    world.server.kill()
    assert code(world.request("GET", ONE)) == (503, "kv_unavailable")
    assert code(world.request("POST", ONE, {"set": {"backend": "gloo"}})) == (503, "kv_unavailable")


def test_what_does_not_fit_on_this_node_is_told_as_a_mistake(world: World, api: ApiServer) -> None:
    turn = world.board.turn
    job = JOB.model_copy(update={"trainer": {"stop_step_timeout_s": 500}})
    world.board.post(type(turn)(at=1e12, registered=True, etcd_problem="", allowed={"train": job}))
    status, body = world.request("GET", ONE)
    assert code((status, body)) == (400, "usage")
    assert body["error"]["message"].startswith("stop_step_timeout_s 500 < stop_grace 30 does not hold")
    assert body["error"]["hint"] == "stop_step_timeout_s is from file; change one of them"


def test_the_openapi_document_has_the_paths(world: World, api: ApiServer) -> None:
    paths = world.request("GET", "/openapi.json")[1]["paths"]
    assert {path: set(paths[path]) for path in paths if "config" in path} == {"/v1/config": {"get", "post"}, "/v1/config/{job}": {"get", "post"}}
