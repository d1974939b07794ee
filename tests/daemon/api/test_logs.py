"""`GET /v1/jobs/{job}/logs` and `GET /v1/telemetry` of one daemon: exact answers, and each bad request with its code."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.daemon.api.logs import LogsAnswer
from elasticd.errors import KVUnavailableError, NotRunningError
from elasticd.observability.report import Activity, CheckpointReport, JobReport, RankReport
from tests.daemon.api.world import World
from tests.support.etcd import await_

if TYPE_CHECKING:
    from elasticd.daemon.api.server import ApiServer
    from tests.support.etcd import Server


@pytest.fixture
def world(daemon_server: Server, tmp_path: Path) -> Iterator[World]:
    daemon_server.heal()
    daemon_server.await_serving()
    one = World(daemon_server, paths={"log_dir": tmp_path / "logs", "run_dir": tmp_path / "run"})
    yield one
    daemon_server.heal()
    one.close()


def write(world: World, text: str, rank: int = 0, stream: str = "stdout", generation: int = 7) -> Path:
    folder = world.config.paths.log_dir / "train/n1" / f"generation-{generation:06d}/rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{stream}.log").open("a") as file:
        file.write(text)
    return folder / f"{stream}.log"


def report(world: World, job: str = "train", **fields: Any) -> None:
    folder = world.config.paths.run_dir / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    JobReport(**{"job": job, "node": "n1", "at": time.time(), **fields}).write(folder / f"{job}.json")


# --- logs ----------------------------------------------------------------------------------------------------------------


def test_the_last_lines_come_with_who_wrote_them(world: World, api: ApiServer) -> None:
    write(world, '{"time": "2026-11-30T12:00:00Z"}\n')
    write(world, "oops \x1b[31mred\n", stream="stderr")
    envelope = world.client.get("/v1/jobs/train/logs")
    assert (envelope["kind"], envelope["revision"]) == ("JobLogs", None)
    (part,) = envelope["data"].pop("nodes")
    assert envelope["data"] == {"job": "train", "node": "n1", "notes": []}
    assert part.pop("place").startswith("7.1~0o")
    assert part == {
        "name": "n1",
        "generation": 7,
        "problem": "",
        "more": False,
        "lines": [
            {"rank": 0, "stream": "stdout", "generation": 7, "at": "2026-11-30T12:00:00.000Z", "text": '{"time": "2026-11-30T12:00:00Z"}'},
            {"rank": 0, "stream": "stderr", "generation": 7, "at": None, "text": "oops red"},
        ],
    }


def test_a_place_is_gone_on_from(world: World, api: ApiServer) -> None:
    write(world, "a\n")
    (part,) = world.client.get("/v1/jobs/train/logs", follow="true")["data"]["nodes"]
    write(world, "b\n")
    (part,) = world.client.get("/v1/jobs/train/logs", follow="true", after=f"n1:{part['place']}")["data"]["nodes"]
    assert [line["text"] for line in part["lines"]] == ["b"]


def test_a_job_that_is_allowed_and_never_ran_has_no_lines(world: World, api: ApiServer) -> None:
    (part,) = world.client.get("/v1/jobs/train/logs")["data"]["nodes"]
    assert (part["generation"], part["lines"]) == (None, [])


def test_a_job_that_nobody_knows_is_none(world: World, api: ApiServer) -> None:
    with pytest.raises(NotRunningError, match="there is no job 'nope'"):
        world.client.get("/v1/jobs/nope/logs")


def test_a_node_that_nobody_knows_is_none(world: World, api: ApiServer) -> None:
    with pytest.raises(NotRunningError, match="no daemon on a node 'n9'"):
        world.client.get("/v1/jobs/train/logs", node="n9")


def test_the_own_nodes_lines_are_told_without_etcd(world: World, api: ApiServer) -> None:
    write(world, "a\n")
    world.server.pause()
    try:
        assert world.client.get("/v1/jobs/train/logs")["data"]["nodes"][0]["lines"][0]["text"] == "a"
        world.board.post(type(world.board.turn)(at=1e12, etcd_problem="it is away", etcd_since=1.0, allowed=world.board.turn.allowed))
        began = time.monotonic()
        assert world.client.get("/v1/jobs/nope/logs")["data"]["nodes"][0]["lines"] == []
        assert time.monotonic() - began < 1
        with pytest.raises(KVUnavailableError, match="has not seen node 'n9'"):
            world.client.get("/v1/jobs/train/logs", node="n9")
    finally:
        world.server.resume()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("generation=-1", 422),
        ("rank=x", 422),
        ("stream=error.json", 422),
        ("tail=-1", 422),
        ("tail=10001", 422),
        ("since=nan", 422),
        ("since=inf", 422),
        ("after=n1", 400),
        ("after=n1:", 400),
        ("after=:7.1", 400),
        ("after=../x:7.1", 400),
        ("after=n1:../..", 400),
        ("after=" + "x" * 13_000, 422),
        ("node=..", 422),
        ("nodes=some", 422),
        ("room=1", 422),
        ("follow=maybe", 422),
    ],
)
def test_what_is_out_of_bounds_is_refused(world: World, api: ApiServer, query: str, status: int) -> None:
    write(world, "a\n")
    answer = world.request("GET", f"/v1/jobs/train/logs?{query}")
    assert (answer[0], answer[1]["error"]["code"]) == (status, "usage")


@pytest.mark.parametrize("job", ["..", "%2e%2e", "a%2Fb", "-x", "%00"])
def test_a_name_that_is_no_jobs_reads_nothing(world: World, api: ApiServer, job: str) -> None:
    assert world.request("GET", f"/v1/jobs/{job}/logs")[0] in (404, 422)


def test_only_readers_are_told(world: World) -> None:
    write(world, "a\n")
    from elasticd.daemon.api.access import Access, Certified
    from elasticd.errors import AccessDeniedError

    access = Access(readers="nogroup", operators="nogroup")
    assert not access.admit(Certified("elasticd-node-n2"), change=False).may_change
    with pytest.raises(AccessDeniedError):
        access.admit(Certified("somebody"), change=False)


def test_the_answer_is_bounded_whatever_is_there(world: World, api: ApiServer) -> None:
    for rank in range(16):
        write(world, ("x" * 3000 + "\n") * 2000, rank)
    status, data = world.request("GET", "/v1/jobs/train/logs?tail=10000")
    assert status == 200
    assert data["data"]["nodes"][0]["more"]
    assert len(json.dumps(data)) < 2 << 20
    LogsAnswer.model_validate(data["data"])


def test_readers_of_logs_that_hang_hold_up_nobody_else(world: World, api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a disk that hangs: no file system here can be made to."""
    going = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        going.wait(60)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("elasticd.daemon.joblogs.read_logs", hang)
    problems: list[str] = []

    def ask() -> None:
        problems.append(world.request("GET", "/v1/jobs/train/logs")[1]["data"]["nodes"][0]["problem"])

    asking = [threading.Thread(target=ask) for _ in range(20)]
    for thread in asking:
        thread.start()
    try:
        await_(lambda: len(api._listeners[0]._state.tasks) == 20, what="20 requests that hang")
        world.training()
        assert world.client.get("/v1/jobs/train")["data"]["state"] == "training"
        assert world.client.text("/healthz") == (200, "ok\n")
        assert world.client.get("/v1/telemetry")["data"]["node"] == "n1"
    finally:
        going.set()
        for thread in asking:
            thread.join()
    assert set(problems) == {"its files cannot be read: Input/output error"}


# --- telemetry -----------------------------------------------------------------------------------------------------------


def test_reports_are_told_as_they_are_with_their_age(world: World, api: ApiServer) -> None:
    rank = RankReport(local_rank=0, rank=3, step=12, step_seconds=0.25, phases={"data": 0.1}, loss=1.5, memory={"rss": 1 << 30})
    report(world, at=time.time() - 20, activity=Activity.TRAINING, generation=7, step=12, ranks=(rank,), checkpoint=CheckpointReport(step=10, at=5.0))
    envelope = world.client.get("/v1/telemetry")
    assert envelope["kind"] == "Telemetry"
    (part,) = envelope["data"]["nodes"]
    (job,) = part["jobs"]
    assert (job["job"], job["gpus"]) == ("train", [])
    assert 20 <= job["age"] < 25
    assert job["report"]["ranks"][0]["phases"] == {"data": 0.1}
    assert job["report"]["activity"] == "training"
    assert abs(part["clock"] - time.time()) < 5
    assert part["host"]["memory_total"] > part["host"]["memory_available"] > 0


def test_what_is_no_report_or_too_old_or_another_jobs_is_left_out(world: World, api: ApiServer) -> None:
    report(world, "old", at=time.time() - 3600)
    report(world, "good")
    folder = world.config.paths.run_dir / "reports"
    (folder / "garbage.json").write_text("{")
    (folder / "huge.json").write_text(" " * 300_000)
    (folder / "other.json").write_text((folder / "good.json").read_text())
    (folder / ".good.json.12").write_text((folder / "good.json").read_text())
    names = [job["job"] for part in world.client.get("/v1/telemetry")["data"]["nodes"] for job in part["jobs"]]
    assert names == ["good"]
    assert world.client.get("/v1/telemetry", job="none")["data"]["nodes"][0]["jobs"] == []
    assert world.client.get("/v1/telemetry", job="good")["data"]["nodes"][0]["jobs"][0]["job"] == "good"


def test_telemetry_is_told_without_etcd(world: World, api: ApiServer) -> None:
    report(world, step=9)
    world.board.post(type(world.board.turn)(at=1e12, etcd_problem="it is\naway", etcd_since=1_700_000_000.0))
    world.server.pause()
    try:
        began = time.monotonic()
        data = world.client.get("/v1/telemetry")["data"]
        assert time.monotonic() - began < 2
    finally:
        world.server.resume()
    assert data["nodes"][0]["jobs"][0]["report"]["step"] == 9
    assert data["etcd"] == {"reachable": False, "endpoints": [world.server.endpoint], "since": "2023-11-14T22:13:20.000Z", "problem": "it is?away"}


def test_each_ranks_gpu_is_named_by_the_slots_that_its_agent_was_granted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticd.daemon.gpureadings import GpuReading, Gpus
    from elasticd.daemon.telemetry import Telemetry

    class TwoGpus(Gpus):
        """A stand-in for NVML, which this machine does not have."""

        def read(self) -> tuple[GpuReading, ...]:
            return (GpuReading(index=0, utilization=0.5, memory_used=1, memory_total=2, temperature=60), GpuReading(index=1))

    monkeypatch.setattr("elasticd.daemon.telemetry._indices", lambda: {"GPU-a": 0, "GPU-b": 1})
    report(world)
    notes = world.config.paths.run_dir / "notes"
    notes.mkdir()
    (notes / "train.json").write_text('{"slots": ["GPU-b", "GPU-a", "slot-7"]}')
    part = Telemetry(world.config.paths.run_dir, "n1", TwoGpus()).own()
    assert part["jobs"][0]["gpus"] == [1, 0, None]
    assert part["gpus"][0] == {
        "index": 0, "utilization": 0.5, "memory_used": 1, "memory_total": 2, "temperature": 60, "power": None, "throttled": None
    }  # fmt: skip
    (notes / "train.json").write_text("[1]")
    assert Telemetry(world.config.paths.run_dir, "n1", TwoGpus()).own()["jobs"][0]["gpus"] == []
