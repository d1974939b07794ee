"""What a run says about what happens to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elasticd.cli.follow import AgentEvent, OutputLine
from elasticd.cli.progress import Progress, Weight
from elasticd.rendezvous.status import JobState, JobStatus


def event(name: str, node: str = "node-0", at: float = 100.0, level: str = "info", **fields: Any) -> AgentEvent:
    return AgentEvent(node=node, name=name, level=level, at=at, fields=fields)


def formed(number: int, node: str = "node-0") -> AgentEvent:
    return event("generation_formed", node, generation=number, nodes=2, world_size=4, cause="loss of node-1", formed_at=99.0)


def said(progress: Progress, *events: AgentEvent) -> list[str]:
    return [notice.text for one in events for notice in progress.on_event(one)]


def status(state: JobState, why: str = "", **more: Any) -> JobStatus:
    values: dict[str, Any] = {
        "cluster": "default", "job": "train", "revision": 1, "state": state, "why": why, "generation": 0, "cause": None, "cause_kind": None,
        "formed_at": None, "world_size": 0, "nodes_training": 0, "nodes_min": 1, "nodes_desired": 2, "nodes_max": 2, "restarts_used": 0,
        "restarts_max": 10, "store": None, "coordinator": None, "checkpoint_step": None, "nodes": (), "events": (), "problems": (), **more,
    }  # fmt: skip
    return JobStatus(**values)


def test_a_generation_is_told_once_however_many_nodes_tell_it() -> None:
    progress = Progress(job="train")
    assert said(progress, formed(2), formed(2, "node-1"), formed(3)) == [
        "generation 2: 2 nodes, 4 workers; loss of node-1",
        "generation 3: 2 nodes, 4 workers; loss of node-1",
    ]


def test_a_generation_keeps_when_it_formed_and_its_first_worker_came_up() -> None:
    progress = Progress(job="train")
    said(progress, formed(2), event("workers_started", generation=2, at=101.5), event("workers_started", "node-1", generation=2, at=101.0))
    seen = progress.generations[2]
    assert (seen.formed_at, seen.first_worker_up_at, seen.world_size, seen.cause) == (99.0, 101.0, 4, "loss of node-1")


def test_the_root_of_a_failure_is_the_earliest_of_the_last_generation_that_failed() -> None:
    progress = Progress(job="train")
    assert progress.root_failure is None
    said(
        progress,
        event("worker_failed", at=1.0, generation=1, rank=0, detail="old"),
        event("worker_failed", "node-1", at=9.0, generation=2, rank=3, detail="victim"),
        event("worker_failed", at=8.0, generation=2, rank=1, detail="culprit", log="/logs/stderr.log"),
    )
    root = progress.root_failure
    assert root is not None
    assert (root.detail, root.rank, root.log) == ("culprit", 1, Path("/logs/stderr.log"))


def test_waiting_for_nodes_is_said_once_per_reason() -> None:
    progress = Progress(job="train")
    waiting = status(JobState.WAITING, "1 of at least 2 nodes are here")
    assert progress.on_status(waiting) == []  # nobody of ours is there yet: of course it waits
    said(progress, event("registered"))
    assert [notice.text for notice in progress.on_status(waiting)] == ["1 of at least 2 nodes are here"]
    assert progress.on_status(waiting) == []
    said(progress, formed(1))
    assert len(progress.on_status(waiting)) == 1


def test_what_the_coordinator_said_is_not_said_again() -> None:
    progress = Progress(job="train")
    assert said(progress, event("registered"), event("decision", text="1 of at least 2 nodes are here"))[1:] == ["1 of at least 2 nodes are here"]
    assert progress.on_status(status(JobState.WAITING, "1 of at least 2 nodes are here")) == []


def test_an_outage_of_etcd_is_said_when_it_begins_and_ends() -> None:
    progress = Progress(job="train")
    told = [[notice.text for notice in progress.on_store(problem)] for problem in ("", "refused", "timed out", "", "")]
    assert told == [[], ["etcd unreachable, the job goes on as it is (refused)"], [], ["etcd answers again"], []]


def test_a_warning_without_a_sentence_is_spelled_out_and_not_repeated_for_a_while() -> None:
    progress = Progress(job="train")
    trouble = {"level": "warning", "node": "node-0", "peer_name": "node-1", "exception": "Traceback:\n  File x\nValueError: no"}
    first = progress.on_event(
        AgentEvent(node="node-0", name="evicted_dead_peer", level="warning", at=10.0, fields={k: trouble[k] for k in trouble if k != "level"})
    )
    assert [(notice.text, notice.weight) for notice in first] == [("node-0: evicted dead peer (peer name: node-1, exception: ValueError: no)", Weight.WARNING)]
    again = event("trouble", level="error", at=10.0), event("trouble", level="error", at=20.0), event("trouble", level="error", at=90.0)
    assert said(progress, *again) == ["node-0: trouble", "node-0: trouble"]
    assert said(progress, event("anything else")) == []


def test_what_a_failure_comes_to_is_said_once_and_in_words() -> None:
    why = "rank 1 on node-1: killed by SIGKILL; restart 2 of 3 in 0.5 s"
    told = said(
        Progress(job="train"),
        event("decision", text="judging what generation 2 failed of"),
        event("failure_judged", level="warning", generation=2, rule="unknown", action="restart", why=why),
        event("decision", text="rank 1 on node-1: killed by SIGKILL; the workers start again in a moment"),
        event("failure_judged", level="warning", generation=3, rule="max_restarts", action="stop", why="restart budget used up"),
        event("decision", text="training; node-2 differs in code"),
    )
    assert told == [why, "training; node-2 differs in code"]


def test_the_step_is_that_of_rank_0() -> None:
    progress = Progress(job="train")
    for rank, data in ((0, b"epoch 3 Step: 17 loss 0.5"), (1, b"step 99"), (0, b"footstep 5"), (0, b"no number: step by step")):
        progress.on_output(OutputLine(node="node-0", rank=rank, stream="stdout", data=data))
    assert progress.step == 17


def test_the_store_fills_in_generations_that_no_agent_of_ours_told() -> None:
    progress = Progress(job="train")
    progress.on_status(status(JobState.TRAINING, generation=7, cause="join of node-2", formed_at=5.0, world_size=8, restarts_used=2))
    assert (progress.generations[7].cause, progress.generations[7].world_size, progress.restarts) == ("join of node-2", 8, 2)


def test_an_event_with_missing_fields_breaks_nothing() -> None:
    progress = Progress(job="train")
    for name in ("registered", "decision", "generation_formed", "workers_started", "worker_failed", "etcd_unreachable", "etcd_back", "agent_exit"):
        progress.on_event(AgentEvent(node="node-0", name=name))
    assert progress.root_failure is not None
