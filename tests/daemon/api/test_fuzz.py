"""Whatever is asked, fit or not: never a fault of ours, and etcd holds nothing afterwards that could not be read.

Requests are made from the API's own OpenAPI document: mostly what it allows, with any part replaced by something else now and then.
"""

from __future__ import annotations

import http.client
import json
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.daemon.client import _UnixConnection
from tests.daemon.api.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticd.daemon.api.server import ApiServer

Schema = dict[str, Any]
EXPECTED = {200, 400, 403, 404, 405, 409, 422}
PER_EXAMPLE = 25
SETTINGS = ["snapshot_every", "checkpoint_copies", "checkpoint_dir"]
JOBS, NODES = ["train", "other", "ended", "none"], ["n1", "n2", "n3"]
INCIDENTS = ("g3-nonfinite-n1-r1", "g1-x")

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.sampled_from([None, True, False, "", "\x00", "\ud800", "; rm"]), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=30)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


def values(schema: Schema, document: Schema, *, junk: bool = False) -> st.SearchStrategy[Any]:
    """What a schema allows; with `junk`, any field of an object may be something else."""
    if "$ref" in schema:
        return values(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document, junk=junk)
    if "anyOf" in schema:
        return st.one_of([values(one, document, junk=junk) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        return objects(schema, document, junk=junk)
    if kind == "integer":
        # Small numbers most of the time: they are within the bounds of jobs.
        return st.integers(1, 6) | st.integers(1, 6) | st.integers(schema.get("minimum", 0), min(schema.get("maximum", 1 << 40), 1 << 62))
    if kind == "number":
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array":
        return st.lists(st.sampled_from(SETTINGS) | values(schema["items"], document, junk=junk), max_size=3)
    assert kind == "string", schema
    longest = schema.get("maxLength", 40)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: len(text) <= longest)
    return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=min(longest, 40))


def objects(schema: Schema, document: Schema, *, junk: bool) -> st.SearchStrategy[dict[str, Any]]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if not properties:
        (inner,) = schema["patternProperties"].values()
        return st.dictionaries(st.sampled_from(["seconds", "mode", "x", *SETTINGS]), values(inner, document), max_size=3)
    needed = set(schema.get("required", ()))
    fields = {name: mostly(values(one, document)) if junk else values(one, document) for name, one in properties.items()}
    return st.fixed_dictionaries(
        {name: one for name, one in fields.items() if name in needed}, optional={name: one for name, one in fields.items() if name not in needed}
    )


def mostly(fit: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(fit, fit, fit, fit, fit, JUNK)


def requests(document: Schema) -> st.SearchStrategy[tuple[str, str, bytes | None]]:
    """Method, target and body. Changes are asked for more often than anything is read."""
    found = {path: [operations(path, method, one, document) for method, one in methods.items()] for path, methods in document["paths"].items()}
    reads = st.one_of([one for path, several in found.items() for one in several if "post" not in document["paths"][path]])
    changes = st.one_of([one for path, several in found.items() for one in several if "post" in document["paths"][path]])
    return st.one_of(changes, changes, changes, reads)


def operations(path: str, method: str, operation: Schema, document: Schema) -> st.SearchStrategy[tuple[str, str, bytes | None]]:
    names: Mapping[str, st.SearchStrategy[Any]] = {
        "job": mostly(st.sampled_from(JOBS)),
        "node": mostly(st.sampled_from(NODES)),
        "incident": mostly(st.sampled_from(INCIDENTS)),
    }
    given = {one["name"]: one for one in operation.get("parameters", ())}
    inside = {name: names[name] for name in given if given[name]["in"] == "path"}
    query = {name: mostly(names.get(name, values(one["schema"], document))) for name, one in given.items() if one["in"] == "query"}
    body: st.SearchStrategy[bytes | None] = st.none()
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        fit = values(schema, document)
        written = st.one_of(fit, fit, fit, values(schema, document, junk=True), JUNK).map(lambda value: json.dumps(value).encode())
        body = st.one_of(written, written, written, written, st.binary(max_size=40), st.none())
    return st.builds(
        lambda method, parts, asked, body: (method, path.format(**{name: quote(text(part), safe="") for name, part in parts.items()}) + asked, body),
        st.sampled_from([method.upper()] * 20 + ["GET", "POST", "DELETE"]),
        st.fixed_dictionaries(dict(inside)),
        st.fixed_dictionaries({}, optional=query).map(lambda found: f"?{urlencode({name: text(part) for name, part in found.items()})}" if found else ""),
        body,
    )


def text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


class Asker:
    """One connection that is made anew when it ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._connection: http.client.HTTPConnection | None = None
        self.statuses: Counter[int] = Counter()
        self.changes = 0

    def ask(self, method: str, target: str, body: bytes | None) -> None:
        for attempt in range(3):
            if self._connection is None:
                self._connection = _UnixConnection(self._world.config.socket, 20.0)
            try:
                self._connection.request(method, target, body, {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                data = answer.read()
                break
            except (http.client.RemoteDisconnected, ConnectionError):
                self.close()
                if attempt == 2:
                    raise
        self.statuses[answer.status] += 1
        self.changes += b'"changed":true' in data
        assert answer.status in EXPECTED, (answer.status, method, target, body, data)

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None


def prepare(world: World) -> None:
    """Jobs and nodes that there is something to change about."""
    for node in NODES:
        world.node(node)
    world.training("n1", "n2")
    world.training("n2", job="other", paused=True)
    world.target("ended")
    world.generation(job="ended", state="failed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_that_is_asked_is_a_fault_of_ours(world: World, api: ApiServer, count: int) -> None:
    document = world.request("GET", "/openapi.json")[1]
    asker = Asker(world)

    @settings(max_examples=count // PER_EXAMPLE, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(requests(document), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def run(batch: list[tuple[str, str, bytes | None]]) -> None:
        prepare(world)
        for one in batch:
            asker.ask(*one)

    try:
        run()
    finally:
        asker.close()
    print(f"{asker.changes} changes; {asker.statuses}")
    assert asker.statuses.total() >= count
    # It reached what it was to try: changes were made, and every kind of refusal was met; the rarest (a rule forbids it) not in every short run.
    assert asker.changes > count / 200, asker.statuses
    assert {200, 404, 405, 422} | ({403} if count >= 10_000 else set()) <= set(asker.statuses)
    view = world.view()
    assert view.problems == ()
    assert [job.status.problems for job in view.jobs if job.status.problems] == []
    assert [node.problems for node in view.nodes if node.problems] == []
    assert len(world.kv.list(world.keys.audit).items) == len(world.audit()) > 0
    assert {job.status.job for job in view.jobs} <= {*JOBS, *(job.status.job for job in view.jobs if job.run is not None)}
