"""All detectors together, on a made-up job: what each fault comes to, and that a healthy job comes to nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from detectors.findings import Certainty, Class
from detectors.incidents import State
from detectors.observations import Change, Line, Observation, Phase, Steps, Stream
from detectors.pipeline import Pipeline
from detectors.report import Account, text

pytestmark = pytest.mark.timeout(120)

BEGAN = 1_700_000_000.0
RANKS = 4
Spoil = Callable[[Steps, float], Steps | None]


def job(seconds: float, spoil: Spoil = lambda steps, _: steps, *, seed: int = 1, begin: int = 0, generation: int = 1) -> Iterator[Observation]:
    """Two nodes with two ranks each, a word of each rank a second, steps of 50 ms."""
    noise = random.Random(seed)
    start = BEGAN + begin
    yield Change(at=start, phase=Phase.INIT, node="n0", generation=generation, world_size=RANKS, why="workers start")
    yield Change(at=start + 1, phase=Phase.TRAIN, node="n0", generation=generation, why="steps are made")
    yield Change(at=start + 1, phase=Phase.TRAIN, node="n1", generation=generation, why="steps are made")
    for second in range(2, int(seconds)):
        for rank in range(RANKS):
            own = 0.020 * noise.lognormvariate(0.0, 0.02)
            step = 0.050 * noise.lognormvariate(0.0, 0.02)
            steps = Steps(
                at=start + second + 0.01 * rank,
                rank=rank,
                first=20 * second,
                last=20 * second + 19,
                seconds=20 * step,
                phases={
                    "data": 20 * 0.002 * noise.lognormvariate(0.0, 0.1),
                    "forward": 20 * own / 3,
                    "backward": 20 * own * 2 / 3,
                    "communication": 20 * max(0.001, step - own - 0.004),
                    "optimizer": 20 * 0.001,
                    "snapshot": 0.0,
                    "other": 20 * 0.001,
                },
                node=f"n{rank // 2}",
                generation=generation,
                samples=640,
                values={"loss": 2.0 * noise.lognormvariate(0.0, 0.02), "grad_norm": noise.lognormvariate(0.0, 0.1)},
                memory={"rss": 1 << 30},
            )
            spoilt = spoil(steps, second)
            if spoilt is not None:
                yield spoilt


def slowed(rank: int, share: float, *, since: float) -> Spoil:
    def spoil(steps: Steps, second: float) -> Steps:
        if steps.rank != rank or second < since:
            return steps
        slow = {name: value * (1 + share) if name in ("forward", "backward", "optimizer") else value for name, value in steps.phases.items()}
        return replace(steps, phases=slow)

    return spoil


def judged(observations: Iterator[Observation], pipeline: Pipeline | None = None) -> Account:
    account = Account()
    for verdicts in (pipeline or Pipeline()).over(observations):
        account.take(verdicts)
    return account


def told(account: Account) -> list[tuple[str, State]]:
    return [(incident.root.kind, incident.state) for incident in account.incidents.values()]


def test_a_healthy_job_comes_to_nothing() -> None:
    account = judged(job(1200))
    assert told(account) == []
    assert text(account, seen={"seconds": 1200, "nodes": 2, "ranks": 4, "windows": 120, "lines": 0}) == (
        "No incident.  Seen: 20 min of 2 nodes, 4 ranks, 120 windows, 0 lines.\n"
    )


def test_a_loss_that_is_no_number_is_certain_at_once() -> None:
    def spoil(steps: Steps, second: float) -> Steps:
        return replace(steps, values={"loss": None}, nonfinite={"loss": 3}) if second == 100 else steps

    account = judged(job(130, spoil))
    (incident,) = account.incidents.values()
    assert (incident.root.kind, incident.certainty, incident.state) == ("nonfinite", Certainty.CERTAIN, State.CONFIRMED)
    assert BEGAN + 98.5 <= incident.opened < BEGAN + 101, "since the steps of that second began"
    assert incident.ranks == (0, 1, 2, 3), "all ranks say it, and it is one incident"


def test_a_slow_rank_is_named_with_its_numbers() -> None:
    account = judged(job(1000, slowed(2, 0.20, since=500)))
    (incident,) = account.incidents.values()
    assert (incident.root.detector, incident.root.rank, incident.root.node, incident.state) == ("peers", 2, "n1", State.CONFIRMED)
    assert BEGAN + 500 < incident.root.at < BEGAN + 1000
    assert incident.opened < BEGAN + 560, "within a minute"
    (feature, *_) = incident.root.features
    assert feature.value == pytest.approx(0.0252, rel=0.1)
    assert feature.peers == pytest.approx(0.021, rel=0.05)


def test_a_rank_that_falls_silent_is_dead() -> None:
    account = judged(job(300, lambda steps, second: None if steps.rank == 3 and second > 200 else steps))
    (incident,) = account.incidents.values()
    assert (incident.root.kind, incident.root.rank, incident.certainty) == ("dead_rank", 3, Certainty.CERTAIN)
    assert BEGAN + 230 <= incident.root.at <= BEGAN + 240


def test_a_fatal_xid_is_the_root_and_what_nccl_says_of_it_joins() -> None:
    def with_lines() -> Iterator[Observation]:
        for observation in job(200):
            yield observation
            if isinstance(observation, Steps) and observation.rank == 0 and observation.first == 20 * 150:
                at = observation.at
                yield Line(at=at, stream=Stream.KERNEL, node="n1", text="NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off the bus.")
                yield Line(
                    at=at + 1,
                    stream=Stream.ERR,
                    node="n0",
                    rank=0,
                    text="[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 ms",
                )

    account = judged(with_lines())
    (incident,) = account.incidents.values()
    assert (incident.root.kind, incident.cls, incident.root.node) == ("xid_79", Class.HARDWARE, "n1")
    assert len(incident.findings) == 2
    assert "GPU" in incident.root.summary


def test_another_generation_ends_what_was_open_and_begins_anew() -> None:
    def two() -> Iterator[Observation]:
        yield from job(1000, slowed(2, 0.30, since=500))
        yield from job(100, begin=1000, generation=2)

    account = judged(two())
    (incident,) = account.incidents.values()
    assert incident.why_over == "generation 2 began"
    assert incident.state is State.CONFIRMED, "it is told how sure it was, though it is over"


def test_a_storm_of_hostile_lines_is_told_and_is_no_incident() -> None:
    noise = random.Random(7)

    def stormy() -> Iterator[Observation]:
        for observation in job(150):
            yield observation
            if isinstance(observation, Steps) and observation.first >= 20 * 100:
                for _ in range(60):
                    junk = "".join(chr(noise.randrange(97, 123)) for _ in range(12))
                    yield Line(
                        at=observation.at, stream=Stream.ERR, node=observation.node, rank=observation.rank, level="error", text=f"ERROR {junk} {junk[::-1]}"
                    )

    pipeline = Pipeline()
    account = judged(stormy(), pipeline)
    assert told(account) == []
    assert {finding.kind for finding in account.findings} == {"log_storm"}
    assert len(pipeline.templates) <= 1024


def test_what_is_said_can_be_read() -> None:
    account = judged(job(1000, slowed(2, 0.20, since=500)))
    report = text(account, seen={"seconds": 1000, "nodes": 2, "ranks": 4, "windows": 100, "lines": 0})
    assert report.startswith("1 incident: 1 confirmed.  Seen: 17 min of 2 nodes")
    assert "rank 2" in report
    assert re.search(r"compute_s 0\.025\d*, usually 0\.02\d*, other ranks 0\.02", report)
