"""job_status: what a view of a job means to a person."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from rich.console import Console

from elasticd.cli.render import age_text, jobs_to_screen, list_to_json, ranks_text, to_json, to_screen
from elasticd.observability.times import rfc3339
from elasticd.rendezvous.records import (
    BudgetRecord,
    Cause,
    CauseKind,
    CheckpointRecord,
    EventRecord,
    GenerationMember,
    GenerationRecord,
    GenerationState,
    MemberId,
    MemberRecord,
    Mode,
    Outcome,
    ProposalRecord,
    Result,
    StoreAddress,
    TargetRecord,
)
from elasticd.rendezvous.status import JobState, JobStatus, NodeState, job_status
from elasticd.rendezvous.view import Keyed, View

SCOPE = "default/train"


def identity(number: int, life: int = 0) -> MemberId:
    return MemberId(node=f"node-{number}", incarnation=f"{number:08x}{life:08x}")


def member(number: int, *, life: int = 0, created: int | None = None, slots: int = 2, **more: Any) -> Keyed[MemberRecord]:
    record = MemberRecord(
        scope=SCOPE, id=identity(number, life), address=f"10.0.0.{number}", slots=slots, boot_id="b", store_port=4000, probe_port=4001, **more
    )
    revision = created if created is not None else 10 + number
    return Keyed(record, revision, revision, 7)


def target(**more: Any) -> Keyed[TargetRecord]:
    values: dict[str, Any] = {"min_nodes": 2, "max_nodes": 3, "desired": 3, **more}
    return Keyed(TargetRecord(scope=SCOPE, **values), 2, 2)


def generation(*numbers: int, number: int = 4, slots: int = 2, revision: int = 50, **more: Any) -> Keyed[GenerationRecord]:
    members = tuple(GenerationMember(id=identity(n), address=f"10.0.0.{n}", slots=slots, probe_port=4001) for n in numbers)
    values: dict[str, Any] = {"cause": Cause(kind=CauseKind.FORM), "formed_at": 1_700_000_000.0, **more}
    record = GenerationRecord(scope=SCOPE, number=number, members=members, store=StoreAddress(address="10.0.0.1", port=4000), **values)
    return Keyed(record, revision, revision)


def proposal(*numbers: int, number: int = 5, kind: CauseKind = CauseKind.LOSS) -> Keyed[ProposalRecord]:
    record = ProposalRecord(
        scope=SCOPE,
        number=number,
        mode=Mode.KILL,
        members=tuple(identity(n) for n in numbers),
        cause=Cause(kind=kind, nodes=("node-9",)),
        proposer=identity(numbers[0] if numbers else 0),
    )
    return Keyed(record, 60, 60)


def view(*members: Keyed[MemberRecord], **more: Any) -> View:
    values: dict[str, Any] = {"revision": 99, "target": target(), **more}
    return View(members={keyed.record.id.node: keyed for keyed in members}, **values)


def status_of(*members: Keyed[MemberRecord], **more: Any) -> JobStatus:
    return job_status(view(*members, **more), cluster="default", job="train")


def finished(number: int) -> Outcome:
    return Outcome(generation=number, result=Result.FINISHED)


def failed(number: int) -> Outcome:
    return Outcome(generation=number, result=Result.FAILED, detail="rank 0: exit code 1")


STATES: dict[str, tuple[View, JobState, str]] = {
    "nobody has come": (view(), JobState.WAITING, "0 of at least 2 nodes are here"),
    "too few have come": (view(member(0)), JobState.WAITING, "1 of at least 2 nodes are here"),
    "enough have come": (view(member(0), member(1)), JobState.FORMING, ""),
    "the first generation is proposed": (view(member(0), member(1), proposal=proposal(0, 1, kind=CauseKind.FORM)), JobState.FORMING, "form"),
    "all train": (view(member(0), member(1), generation=generation(0, 1)), JobState.TRAINING, ""),
    "one has finished": (view(member(0, outcome=finished(4)), member(1), generation=generation(0, 1)), JobState.TRAINING, "1 of 2 nodes have finished"),
    "a newcomer is there": (view(member(0), member(1), member(2), generation=generation(0, 1)), JobState.TRAINING, ""),
    "one is lost": (view(member(0), member(1), generation=generation(0, 1, 2)), JobState.RESTARTING, "node-2 lost"),
    "too many are lost": (view(member(0), generation=generation(0, 1, 2)), JobState.WAITING, "1 of at least 2 nodes are here"),
    "a worker has failed": (view(member(0, outcome=failed(4)), member(1), generation=generation(0, 1)), JobState.RESTARTING, "node-0 failed or stopped"),
    "the next is proposed": (view(member(0), member(1), generation=generation(0, 1, 2), proposal=proposal(0, 1)), JobState.RESTARTING, "loss of node-9"),
    "proposed with too few": (view(member(0), generation=generation(0, 1, 2), proposal=proposal(0)), JobState.WAITING, "1 of at least 2 nodes"),
    "an operator stops it": (
        view(member(0), member(1), target=target(run=False, reason="maintenance"), generation=generation(0, 1)),
        JobState.STOPPING,
        "maintenance",
    ),
    "it has succeeded": (
        view(generation=generation(0, 1, state=GenerationState.SUCCEEDED, reason="every worker finished")),
        JobState.SUCCEEDED,
        "every worker finished",
    ),
    "it has failed": (view(generation=generation(0, 1, state=GenerationState.FAILED, reason="budget used up")), JobState.FAILED, "budget used up"),
    "it was stopped": (view(generation=generation(0, 1, state=GenerationState.STOPPED, reason="by me")), JobState.STOPPED, "by me"),
    "it was started again": (
        view(target=Keyed(target().record, 2, 70), generation=generation(0, 1, state=GenerationState.FAILED)),
        JobState.WAITING,
        "0 of at least 2 nodes are here",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_job_when(case: str) -> None:
    seen, state, why = STATES[case]
    found = job_status(seen, cluster="default", job="train")
    assert (found.state, found.why[: len(why)] if why else why) == (state, why)


NODES: dict[str, tuple[View, list[tuple[str, NodeState, tuple[int, ...]]]]] = {
    "in rank order, newcomers after": (
        view(member(0), member(1), member(2), generation=generation(1, 0)),
        [("node-1", NodeState.TRAINING, (0, 1)), ("node-0", NodeState.TRAINING, (2, 3)), ("node-2", NodeState.STANDBY, ())],
    ),
    "one is lost": (view(member(0), generation=generation(0, 1)), [("node-0", NodeState.TRAINING, (0, 1)), ("node-1", NodeState.LOST, (2, 3))]),
    "a restarted agent is somebody else": (
        view(member(0), member(1, life=1), generation=generation(0, 1)),
        [("node-0", NodeState.TRAINING, (0, 1)), ("node-1", NodeState.LOST, (2, 3)), ("node-1", NodeState.STANDBY, ())],
    ),
    "one leaves, one has stopped": (
        view(member(0, leaving=True), member(1, stopped=4), generation=generation(0, 1)),
        [("node-0", NodeState.LEAVING, (0, 1)), ("node-1", NodeState.STOPPED, (2, 3))],
    ),
    "one finished, one failed": (
        view(member(0, outcome=finished(4)), member(1, outcome=failed(4)), generation=generation(0, 1)),
        [("node-0", NodeState.FINISHED, (0, 1)), ("node-1", NodeState.FAILED, (2, 3))],
    ),
    "an outcome of an earlier generation is past": (view(member(0, outcome=failed(3)), generation=generation(0)), [("node-0", NodeState.TRAINING, (0, 1))]),
    "one is to join": (
        view(member(0), member(2), generation=generation(0), proposal=proposal(0, 2)),
        [("node-0", NodeState.TRAINING, (0, 1)), ("node-2", NodeState.JOINING, ())],
    ),
    "after success": (view(generation=generation(0, state=GenerationState.SUCCEEDED)), [("node-0", NodeState.FINISHED, (0, 1))]),
    "after a stop": (view(generation=generation(0, state=GenerationState.STOPPED)), [("node-0", NodeState.ENDED, (0, 1))]),
    "before anything": (view(member(1), member(0)), [("node-0", NodeState.STANDBY, ()), ("node-1", NodeState.STANDBY, ())]),
}


@pytest.mark.parametrize("case", NODES)
def test_the_nodes_of_a_job_when(case: str) -> None:
    seen, nodes = NODES[case]
    found = job_status(seen, cluster="default", job="train").nodes
    assert [(node.name, node.state, node.ranks) for node in found] == nodes


def test_the_numbers_of_a_job_are_those_of_its_records() -> None:
    found = status_of(
        member(0, created=30),
        member(1, created=20),
        generation=generation(0, 1, cause=Cause(kind=CauseKind.JOIN, nodes=("node-1",))),
        budget=Keyed(BudgetRecord(scope=SCOPE, used=3), 5, 5),
        checkpoint=Keyed(CheckpointRecord(scope=SCOPE, generation=4, step=120, digest="d"), 6, 6),
        events=(EventRecord(scope=SCOPE, number=4, at=1_700_000_000.5, what="formed", detail="2 nodes"),),
        problems={"/b": "/b: not JSON", "/a": "/a: too large"},
    )
    assert (found.generation, found.cause, found.cause_kind) == (4, "join of node-1", "join")
    assert (found.world_size, found.nodes_training, found.nodes_min, found.nodes_desired, found.nodes_max) == (4, 2, 2, 3, 3)
    assert (found.restarts_used, found.restarts_max, found.checkpoint_step) == (3, 10, 120)
    assert (found.store, found.coordinator, found.revision) == ("10.0.0.1:4000", "node-1", 99)
    assert found.problems == ("/a: too large", "/b: not JSON")
    assert [event.what for event in found.events] == ["formed"]


def test_a_job_that_has_ended_has_no_world() -> None:
    found = status_of(generation=generation(0, 1, state=GenerationState.STOPPED))
    assert (found.world_size, found.nodes_training, found.store) == (0, 0, None)


def test_json_keeps_the_contract() -> None:
    document = json.loads(to_json(status_of(member(0), member(1), generation=generation(0, 1)), store=["etcd:2379"]))
    assert (document["apiVersion"], document["kind"], document["revision"]) == ("elasticd/v1", "JobStatus", 99)
    data = document["data"]
    assert (data["job"], data["state"], data["etcd"], data["formed_at"]) == ("train", "training", ["etcd:2379"], "2023-11-14T22:13:20.000Z")
    assert data["nodes"][1]["ranks"] == [2, 3]
    fields = {field.name for field in dataclasses.fields(JobStatus)}
    assert set(data) == fields - {"revision"} | {"etcd"}


def test_json_of_many_jobs_is_a_list_with_a_revision_each() -> None:
    document = json.loads(list_to_json([(status_of(), ["a:1"]), (status_of(), ["b:1"])]))
    assert (document["kind"], document["revision"]) == ("JobStatusList", None)
    assert [(job["revision"], job["etcd"]) for job in document["data"]["jobs"]] == [(99, ["a:1"]), (99, ["b:1"])]


def text_of(renderable: Any) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_one_screen_shows_state_cause_nodes_events_and_problems() -> None:
    found = status_of(
        member(0),
        generation=generation(0, 1, cause=Cause(kind=CauseKind.WORKER_FAILED, nodes=("node-1",), detail="[bold]rank 3[/bold]: exit code 1")),
        events=(EventRecord(scope=SCOPE, number=4, at=1_700_000_000.0, what="formed", detail="2 nodes"),),
        problems={"/a": "/a: not JSON"},
    )
    text = text_of(to_screen(found, store=["etcd:2379"], now=1_700_000_090.0))
    assert text.splitlines()[0].startswith("train  waiting: 1 of at least 2 nodes are here")
    # What a worker wrote is shown as it is, not taken for markup.
    assert "4: worker failed of node-1 ([bold]rank 3[/bold]: exit code 1), formed 90 s ago" in text
    for words in ("3 wanted, 2 at least, 3 at most", "0/10 used", "etcd:2379, revision 99", "node-1  lost", "generation 4 formed: 2 nodes", "/a: not JSON"):
        assert words in text


def test_many_jobs_are_shown_a_line_each() -> None:
    lines = text_of(jobs_to_screen([status_of(member(0)), status_of(member(0), member(1), generation=generation(0, 1))])).splitlines()
    assert lines[1].split()[:2] == ["train", "waiting"]
    assert lines[2].split() == ["train", "training", "4", "2/3", "4", "0/10"]


def test_odd_times_do_not_break_the_screen() -> None:
    assert rfc3339(1e300) is None
    assert rfc3339(0.0) is None
    found = status_of(member(0), generation=generation(0, formed_at=-1e300))
    assert "train" in text_of(to_screen(found, store=[], now=0.0))
    assert json.loads(to_json(found, store=[]))["data"]["formed_at"] is None


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0 s"), (8.4, "8 s"), (99, "99 s"), (720, "12 min"), (9000, "2.5 h"), (200_000, "2.3 d")])
def test_an_age_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(("ranks", "text"), [((), "-"), ((3,), "3"), ((4, 5, 6, 7), "4-7")])
def test_ranks_are_told_as_a_range(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text
