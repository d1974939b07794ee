"""What a real agent says of its job while real workers train, are killed and finish; and what it says where nothing trains."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.agent.reporting import Reporter, ends_of
from elasticd.observability.report import Activity, CheckpointReport, JobReport, Phase, SnapshotReport
from elasticd.rendezvous.desk import Assignment
from elasticd.rendezvous.standing import Place, Standing
from tests.rendezvous.world import generation
from tests.support.etcd import Server, await_
from trainer.errors import EXIT_STOPPED
from trainer.wire import channel
from trainer.wire.window import PHASES, STEP_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import MakeNodes
    from tests.e2e.nodes import Nodes

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "elastic.py"


class Job:
    """One node with a job that trains `elastic.py`, and what is reported of it."""

    def __init__(self, server: Server, make_nodes: MakeNodes, folder: Path, *, argv: list[str] | None = None, trainer: dict[str, Any] | None = None) -> None:
        self.path = folder / "report.json"
        self.nodes: Nodes = make_nodes(
            [server.endpoint],
            argv=argv or [sys.executable, "-u", str(SCRIPT)],
            env={"STEPS": "1000000", "PYTHONPATH": str(ROOT)},
            trainer_file={"snapshot_every": 1, "checkpoint_every_s": 0.0, **(trainer or {})},
            max_nodes=2,
            desired=2,
            max_restarts=1000,
            report_file=str(self.path),
        )
        self.nodes.start("a")

    def report(self) -> JobReport:
        found = JobReport.read(self.path)
        assert found is not None
        return found

    def until(self, condition: Callable[[JobReport], bool], what: str, path: Path | None = None) -> JobReport:
        """The first report of which that is true."""

        def look() -> JobReport | None:
            found = JobReport.read(path or self.path)
            return found if found is not None and condition(found) else None

        try:
            seen: JobReport = self.nodes.await_(look, what=what, within=60.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{JobReport.read(self.path)}") from None
        return seen

    def worker(self) -> int:
        (pid,) = self.nodes.workers("a")
        return pid

    def lines(self) -> list[dict[str, Any]]:
        """Of telemetry, of all generations."""
        folders = [Path(line["logs"]) for line in self.nodes.events("a", "workers_started")]
        return [json.loads(line) for folder in folders for line in (folder / "telemetry.jsonl").read_text().splitlines()]


# --- real workers


def test_a_report_shows_what_a_training_comes_to(server: Server, make_nodes: MakeNodes, tmp_path: Path) -> None:
    job = Job(server, make_nodes, tmp_path)
    seen = job.until(lambda report: report.steps > 40 and report.seconds.get(Activity.TRAINING, 0) > 0, "forty steps")
    assert (seen.job, seen.node, seen.activity, seen.generation) == ("job", "a", Activity.TRAINING, 1)
    assert (seen.world_size, seen.nodes, seen.node_rank) == (1, 1, 0)
    assert (seen.target_nodes, seen.min_nodes, seen.max_nodes, seen.restarts_used, seen.restarts_max) == (2, 1, 2, 0, 1000)
    assert (seen.steps, seen.steps_lost) == (seen.step, 0)
    assert 0 < seen.samples <= 24 * seen.steps
    assert seen.loss is not None
    assert seen.rescales == {"form": 1}
    assert seen.worker_ends == {}
    assert sum(seen.step_times.counts) == seen.steps
    assert seen.step_times.total / seen.steps > 0.02  # each sleeps so long
    (rank,) = seen.ranks
    assert (rank.local_rank, rank.rank, rank.step) == (0, 0, seen.step)
    assert set(rank.phases) == set(PHASES)
    assert sum(rank.phases.values()) == pytest.approx(rank.step_seconds, rel=0.05)
    assert rank.memory["rss"] > 50_000_000
    assert seen.snapshot.buffers == 3
    assert seen.snapshot.step > 0
    assert set(seen.seconds) >= {Activity.FORMING, Activity.STARTING, Activity.RESTORING, Activity.TRAINING}
    assert sum(seen.seconds.values()) == pytest.approx(seen.at - seen.started_at - 3.0, abs=0.5)
    (nodes, out) = (job.nodes, job.nodes.out)
    (out / "enough").touch()
    assert nodes.wait("a") == 0
    last = job.report()
    assert last.worker_ends == {"finished": 1}
    assert last.world_size == 0
    assert last.steps == last.step > seen.step
    assert sum(last.seconds.values()) == pytest.approx(last.at - last.started_at, abs=0.5)
    assert last.checkpoint.written == 1
    assert last.checkpoint.step == last.checkpoint.committed_step > 0
    assert last.checkpoint.nbytes > 1000
    assert sum(last.checkpoint.durations.counts) == 1
    lines = [line for line in job.lines() if line["event"] == "window"]
    assert sum(line["last"] - line["first"] + 1 for line in lines) == last.steps
    assert {(line["job"], line["node"], line["rank"], line["generation"], line["level"]) for line in lines} == {("job", "a", 0, 1, "info")}
    assert all(line["step"] == line["last"] and line["time"].endswith("Z") for line in lines)
    assert any(line["event"] == "ranks" and len(line["columns"]["seconds"]) == 1 for line in job.lines())


def test_a_killed_worker_shows_as_one_rescale_one_recovery_and_what_was_lost(server: Server, make_nodes: MakeNodes, tmp_path: Path) -> None:
    """After the first steps no snapshot is taken, so that nearly all are lost and made again."""
    job = Job(server, make_nodes, tmp_path, trainer={"snapshot_every": 1_000_000, "telemetry_every_s": 0.2})
    before = job.until(lambda report: report.steps >= 60, "sixty steps")
    os.kill(job.worker(), signal.SIGKILL)
    caught_up = job.until(lambda report: report.generation == 2 and report.step > before.step + 100, "new steps")
    done = max(line["step"] for line in job.nodes.steps() if line["generation"] == 1) + 1
    resumed = min(line["step"] for line in job.nodes.steps() if line["generation"] == 2)
    assert before.step <= resumed + caught_up.steps_lost <= done
    assert caught_up.rescales == {"form": 1, "worker_failed": 1}
    assert caught_up.worker_ends == {"killed": 1}
    assert caught_up.restarts_used == 1
    assert sum(caught_up.recovery.counts) == 1
    assert set(caught_up.recovery_phases) == set(Phase)
    assert sum(caught_up.recovery_phases.values()) == pytest.approx(caught_up.recovery.total)
    assert caught_up.downtime["worker_failed"] == pytest.approx(caught_up.recovery.total, abs=0.5)
    assert 0 < caught_up.recovery_phases[Phase.START] < caught_up.recovery.total
    settled = job.until(lambda report: report.at > caught_up.at + 3, "all of it being summed up")
    redone = [line["at"] for line in job.nodes.steps() if line["generation"] == 2 and line["step"] < resumed + caught_up.steps_lost]
    assert settled.seconds[Activity.REPEATING] == pytest.approx(redone[-1] - redone[0], abs=0.5)
    (line,) = job.nodes.events("a", "recovered")
    assert (line["cause"], line["generation"], line["from_generation"], line["from_world_size"], line["world_size"]) == ("worker_failed", 2, 1, 1, 1)
    assert line["steps_lost"] == caught_up.steps_lost
    assert sum(line["phases"].values()) == pytest.approx(line["seconds"], abs=0.01)
    assert {line["generation"] for line in job.lines()} == {1, 2}


def test_a_node_that_joins_costs_no_step_and_shows_as_a_planned_interruption(server: Server, make_nodes: MakeNodes, tmp_path: Path) -> None:
    job = Job(server, make_nodes, tmp_path)
    before = job.until(lambda report: report.steps > 20, "twenty steps")
    job.nodes.start("b", report_file=str(tmp_path / "b.json"))
    joined = job.until(lambda report: report.world_size == 2 and report.slowest is not None, "two nodes, compared")
    assert joined.rescales == {"form": 1, "join": 1}
    assert (joined.worker_ends, joined.steps_lost, joined.restarts_used) == ({"stopped": 1}, 0, 0)
    assert Activity.REPEATING not in {activity for activity, seconds in joined.seconds.items() if seconds}
    assert joined.downtime["join"] == pytest.approx(joined.recovery.total, abs=1.0)
    assert joined.steps == joined.step > before.step
    (line,) = job.nodes.events("a", "recovered")
    assert (line["cause"], line["from_world_size"], line["world_size"], line["steps_lost"]) == ("join", 1, 2, 0)
    other = job.until(lambda report: report.steps > 0, "steps of the other node", tmp_path / "b.json")
    assert (other.node, other.node_rank, other.world_size, other.slowest) == ("b", 1, 2, None)
    assert (other.steps_lost, other.downtime, sum(other.recovery.counts)) == (0, {}, 0)  # it has no step before
    assert other.steps < other.step


def test_a_report_can_be_read_at_every_instant_and_stays_when_the_agent_is_killed(server: Server, make_nodes: MakeNodes, tmp_path: Path) -> None:
    job = Job(server, make_nodes, tmp_path, argv=["sleep", "1000"])
    job.until(lambda report: report.activity is Activity.STARTING, "a worker")
    versions, until = set(), time.monotonic() + 2.5
    while time.monotonic() < until:
        versions.add(job.report().at)
    assert len(versions) >= 2
    job.nodes.kill("a")
    assert job.report().at >= max(versions)
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.json"]


# --- where nothing trains


class Sources:
    """In the place of membership and states: what they say is set by the test."""

    def __init__(self) -> None:
        self.standing = Standing(place=Place.FORMING)
        self.checkpoints = CheckpointReport()
        self.snapshots = SnapshotReport()
        self.failure = ""
        self.trouble = ""


class Teller:
    """A reporter of two workers, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reports" / "job.json"
        self.path.parent.mkdir()
        self.folder = folder
        self.sources = Sources()
        self.reporter = Reporter(
            AgentConfig(
                job="job",
                node="a",
                nproc=2,
                argv=("x",),
                cwd=folder,
                log_dir=folder,
                endpoints=("127.0.0.1:1",),
                min_nodes=1,
                max_nodes=3,
                desired=2,
                max_restarts=7,
                report_file=self.path,
            )
        )

    def begin(self) -> None:
        self.reporter.begin(self.sources, self.sources)

    def give(self, number: int = 1, *, base_rank: int = 0) -> None:
        record: Any = generation(number, ["a", "b"]).record
        self.reporter.given(Assignment(generation=record, node_rank=base_rank, base_rank=base_rank, store_socket=None, fresh_until=0.0))
        self.reporter.started(self.folder)

    def hear(self, local_rank: int, rank: int | None = None, **changes: Any) -> None:
        self.reporter.heard(local_rank, channel.Telemetry(window=window(local_rank if rank is None else rank, **changes)))

    def await_(self, condition: Callable[[JobReport], bool], what: str) -> JobReport:
        def look() -> JobReport | None:
            found = JobReport.read(self.path)
            return found if found is not None and condition(found) else None

        seen: JobReport = await_(look, within=10.0, what=what)
        return seen


def window(rank: int, *, generation: int = 1, first: int = 1, steps: int = 10, **changes: Any) -> dict[str, Any]:
    """Steps of 0.1 s each."""
    now = time.time()
    return {
        "rank": rank,
        "generation": generation,
        "first": first,
        "last": first + steps - 1,
        "began": now - 0.1 * steps,
        "ended": now,
        "seconds": 0.1 * steps,
        "phases": {name: [0.1 * steps / len(PHASES), 0.02] for name in PHASES},
        "buckets": [0] * 4 + [steps] + [0] * (len(STEP_BOUNDS) - 4),
        "slowest": [first, 0.1],
        "samples": 32 * steps,
        "values": {"loss": {"last": 0.5, "low": 0.4, "high": 0.9, "mean": 0.6, "count": steps, "nonfinite": 0}},
        **changes,
    }


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(tmp_path)


def test_without_etcd_an_agent_that_trains_nothing_is_frozen_and_says_why(teller: Teller) -> None:
    teller.begin()
    teller.await_(lambda report: report.activity is Activity.FORMING, "the first report")
    teller.sources.standing = Standing(place=Place.FROZEN, desired=2, min_nodes=1, max_nodes=3, problem="etcd is out of reach: membership is frozen")
    seen = teller.await_(lambda report: report.activity is Activity.FROZEN, "a frozen agent")
    assert seen.problem == "etcd is out of reach: membership is frozen"
    teller.give()
    teller.hear(0)
    training = teller.await_(lambda report: report.activity is Activity.TRAINING, "training without etcd")
    assert training.problem == ""
    teller.reporter.close()


def test_what_is_wanted_is_told_from_the_configuration_until_etcd_has_said(teller: Teller) -> None:
    teller.begin()
    seen = teller.await_(lambda _: True, "a report")
    assert (seen.target_nodes, seen.min_nodes, seen.max_nodes, seen.restarts_used, seen.restarts_max) == (2, 1, 3, 0, 7)
    teller.sources.standing = Standing(place=Place.WAITING, desired=5, min_nodes=4, max_nodes=6, restarts_used=3, restarts_max=9, problem="2 of 4")
    seen = teller.await_(lambda report: report.activity is Activity.WAITING, "another report")
    assert (seen.target_nodes, seen.min_nodes, seen.max_nodes, seen.restarts_used, seen.restarts_max) == (5, 4, 6, 3, 9)
    assert seen.problem == "2 of 4"
    teller.reporter.close()


def test_what_does_not_get_to_disk_is_told_while_training_goes_on(teller: Teller) -> None:
    teller.sources.checkpoints = CheckpointReport(failed=3)
    teller.sources.trouble = "checkpoints are not written: no space left on device"
    teller.give()
    teller.begin()
    seen = teller.await_(lambda _: True, "a report")
    assert (seen.problem, seen.checkpoint.failed) == (teller.sources.trouble, 3)
    teller.reporter.close()


def test_the_state_that_a_generation_cannot_begin_with_is_the_first_thing_to_be_told(teller: Teller) -> None:
    teller.sources.failure, teller.sources.trouble = "nobody has step 8", "no space left"
    teller.give()
    teller.begin()
    assert teller.await_(lambda _: True, "a report").problem == "nobody has step 8"
    teller.reporter.close()


def test_only_what_fits_the_generation_and_the_rank_is_believed_and_the_rest_is_said_once(teller: Teller, capsys: pytest.CaptureFixture[str]) -> None:
    teller.begin()
    teller.give(base_rank=4)
    for _ in range(3):
        teller.hear(0, rank=0)
    teller.hear(1, rank=5, generation=2)
    teller.hear(0, rank=4)
    teller.reporter.close()
    seen = JobReport.read(teller.path)
    assert seen is not None
    assert (seen.steps, seen.samples, seen.dropped) == (10, 320, 4)
    assert [rank.rank for rank in seen.ranks] == [4]
    printed = capsys.readouterr().out
    assert printed.count("telemetry_refused") == 2
    assert "a window of rank 0 from rank 4" in printed
    assert "generation 2" in printed


def test_garbage_harms_nobody(teller: Teller) -> None:
    teller.begin()
    teller.give()
    for garbage in ({}, {"rank": []}, window(0, seconds=1e300), window(0, samples=2**62), window(0, values={"x" * 99: {}}), window(0, first=0)):
        teller.reporter.heard(0, channel.Telemetry(window=garbage))
    teller.reporter.heard(0, channel.Ranks(step=1, steps=1, columns={"seconds": "many"}))
    teller.reporter.heard(0, channel.Hello(rank=0, local_rank=0, pid=1))
    teller.reporter.heard(1, channel.Hello(rank=1, local_rank=1, pid=1))
    seen = teller.await_(lambda report: report.activity is Activity.RESTORING, "both workers heard")
    assert (seen.steps, seen.samples, seen.ranks, seen.slowest) == (0, 0, (), None)
    teller.reporter.close()


def test_the_slowest_of_all_ranks_is_told_where_rank_0_is(teller: Teller) -> None:
    teller.begin()
    teller.give()
    columns = {name: [0.01, 0.01] for name in PHASES} | {"communication": [0.06, 0.0], "seconds": [0.1, 0.1]}
    teller.reporter.heard(1, channel.Ranks(step=9, steps=9, columns=columns))  # not rank 0's to say
    teller.reporter.heard(0, channel.Ranks(step=9, steps=9, columns=columns))
    seen = teller.await_(lambda report: report.slowest is not None, "the slowest")
    assert seen.slowest == (1, pytest.approx(0.1 / 0.07))
    teller.reporter.close()
    (line,) = [json.loads(line) for line in (teller.folder / "telemetry.jsonl").read_text().splitlines()]
    assert (line["event"], line["rank"], line["step"], line["columns"]["communication"]) == ("ranks", 0, 9, [0.06, 0.0])


def test_numbers_of_workers_go_with_them_and_sums_stay(teller: Teller) -> None:
    teller.begin()
    teller.give()
    teller.hear(0)
    teller.hear(1)
    seen = teller.await_(lambda report: len(report.ranks) == 2, "both ranks")
    assert (seen.world_size, seen.nodes, seen.node_rank, seen.loss) == (2, 2, 0, 0.5)
    teller.reporter.stopping()
    assert teller.await_(lambda report: report.activity is Activity.STOPPING, "the stop").ranks
    teller.reporter.stopped({0: -9}, {0: -9, 1: -9}, 12)
    seen = teller.await_(lambda report: report.world_size == 0, "the end of the workers")
    assert (seen.ranks, seen.nodes, seen.node_rank) == ((), 0, -1)
    assert (seen.generation, seen.step, seen.steps, seen.samples, seen.loss) == (1, 12, 10, 640, 0.5)
    assert seen.worker_ends == {"killed": 1, "stopped": 1}
    teller.reporter.close()


@pytest.mark.parametrize(
    ("by_themselves", "exits", "counted"),
    [
        ({}, {0: 0, 1: -15}, {"stopped": 2}),
        ({0: 0, 1: 0}, {0: 0, 1: 0}, {"finished": 2}),
        ({1: 3}, {0: -9, 1: 3}, {"failed": 1, "stopped": 1}),
        ({0: -9, 1: EXIT_STOPPED}, {0: -9, 1: EXIT_STOPPED}, {"killed": 1, "stopped": 1}),
        ({}, {}, {}),
    ],
)
def test_how_a_worker_ended_depends_on_who_ended_it(by_themselves: dict[int, int], exits: dict[int, int], counted: dict[str, int]) -> None:
    assert ends_of(by_themselves, exits) == counted


def test_a_report_that_cannot_be_written_is_said_once_and_written_when_it_can(teller: Teller, capsys: pytest.CaptureFixture[str]) -> None:
    teller.path.parent.rmdir()
    teller.begin()
    heard: list[str] = []

    def said(event: str) -> bool:
        heard.append(capsys.readouterr().out)
        return "".join(heard).count(event) > 0

    await_(lambda: said("report_not_written"), within=10.0, what="the refusal")
    teller.give()
    await_(lambda: teller.reporter._ledger.at_hand, within=5.0, what="a generation")
    teller.path.parent.mkdir()
    seen = teller.await_(lambda _: True, "a report")
    assert seen.generation == 1
    await_(lambda: said("report_written_again"), within=10.0, what="the good news")
    assert "".join(heard).count("report_not_written") == 1
    teller.reporter.close()


def test_what_an_earlier_agent_reported_is_gone_at_the_start(teller: Teller) -> None:
    """And the half of a report in which it was killed, but nothing of another job, whatever its name."""
    theirs = {".job.json.json.7", ".job.json.new", "job.json.json"}
    for name in {"job.json", ".job.json.12", *theirs}:
        (teller.path.parent / name).write_text("of an earlier agent")
    teller.reporter.clear()
    assert {path.name for path in teller.path.parent.iterdir()} == theirs
    teller.reporter.clear()


def test_a_report_that_cannot_be_made_ends_neither_the_reports_nor_the_agent(teller: Teller, capsys: pytest.CaptureFixture[str]) -> None:
    teller.sources.trouble = 7  # type: ignore[assignment]  # a fault of ours
    teller.begin()
    teller.reporter.close()
    assert "report_failed" in capsys.readouterr().out
    assert not teller.path.exists()


def test_a_closed_reporter_leaves_no_thread_and_no_descriptor(teller: Teller) -> None:
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    teller.begin()
    teller.give()
    teller.hear(0)
    teller.reporter.close()
    await_(lambda: threading.active_count() <= threads, what="the end of its threads")
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    report = JobReport.read(teller.path)
    assert report is not None
    assert sum(report.seconds.values()) == pytest.approx(report.at - report.started_at, abs=0.1)
