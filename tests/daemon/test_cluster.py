"""cluster_view and happenings: what the keys of a whole cluster mean to a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.daemon.board import Board, Turn
from elasticd.daemon.cluster import ClusterReader, ClusterView, NodeCondition, NodeView, chosen, cluster_view, happenings, own_node
from elasticd.errors import NotRunningError, UsageError
from elasticd.kv import KeyValue, Listing
from elasticd.rendezvous.keys import ClusterKeys
from elasticd.rendezvous.records import AuditRecord, EventRecord, NodeJob, NodeJobState, NodePolicyRecord, NodeRecord, Record, TargetRecord
from elasticd.rendezvous.status import JobState
from tests.daemon.api.world import IDLE, OPERATOR, RUNNING, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.etcd import Server

KEYS = ClusterKeys("c")
TRAIN = KEYS.job("train")


@pytest.fixture
def world(daemon_server: Server) -> Iterator[World]:
    daemon_server.heal()
    daemon_server.await_serving()
    one = World(daemon_server)
    yield one
    one.close()


def item(key: str, value: Record | bytes, revision: int = 1) -> KeyValue:
    data = value if isinstance(value, bytes) else value.to_bytes()
    return KeyValue(key=key, value=data, create_revision=revision, mod_revision=revision, version=1)


def node(name: str, *jobs: NodeJob, **more: Any) -> KeyValue:
    values: dict[str, Any] = {"incarnation": "a" * 16, "address": "10.0.0.1", "slots": 8, "version": "0.1.0", "boot_id": "boot", **more}
    return item(KEYS.node(name), NodeRecord(scope="c", node=name, jobs=jobs, **values))


def policy(name: str, **more: Any) -> KeyValue:
    return item(KEYS.policy(name), NodePolicyRecord(scope="c", **{"reason": "fan", "by": "ada", "at": 5.0, **more}))


def view(*items: KeyValue, allowed: tuple[str, ...] = ()) -> ClusterView:
    return cluster_view(Listing(revision=99, items=items), KEYS, allowed)


def only(*items: KeyValue) -> NodeView:
    (one,) = view(*items).nodes
    return one


# --- nodes ---------------------------------------------------------------------------------------------------------------


CONDITIONS = [
    ([node("n")], NodeCondition.READY),
    ([node("n"), policy("n", cordoned=True)], NodeCondition.CORDONED),
    ([node("n"), policy("n", draining=True, cordoned=True)], NodeCondition.DRAINED),
    ([node("n", RUNNING), policy("n", draining=True)], NodeCondition.DRAINING),
    ([node("n", IDLE), policy("n", draining=True)], NodeCondition.DRAINED),
    ([policy("n", cordoned=True)], NodeCondition.DOWN),
    ([policy("n", draining=True)], NodeCondition.DRAINED),
    ([policy("n")], NodeCondition.DOWN),
    ([node("n"), policy("n")], NodeCondition.READY),
    ([item(KEYS.node("n"), b"{}")], NodeCondition.READY),
]


@pytest.mark.parametrize(("items", "state"), CONDITIONS)
def test_where_a_node_stands(items: list[KeyValue], state: NodeCondition) -> None:
    assert only(*items).state is state


def test_a_node_with_an_agent_of_any_job_is_not_drained_yet(world: World) -> None:
    world.node("n2")
    world.policy("n2", draining=True)
    world.policy("n3", draining=True)
    world.training("n2", "n3", job="other")
    assert {one.name: one.state for one in world.view().nodes} == {"n2": NodeCondition.DRAINING, "n3": NodeCondition.DOWN}


def test_a_node_says_what_its_daemon_and_its_operators_said() -> None:
    jobs = (RUNNING, NodeJob(name="b", state=NodeJobState.STARTING, slots=3), IDLE)
    one = only(node("n", *jobs, gpus=("G1",), labels={"rack": "7"}, started_at=9.0, problems=("hot",)), policy("n", cordoned=True))
    assert one == NodeView(
        name="n",
        state=NodeCondition.CORDONED,
        reason="fan",
        by="ada",
        at=5.0,
        address="10.0.0.1",
        slots=8,
        slots_used=5,
        gpus=("G1",),
        labels={"rack": "7"},
        version="0.1.0",
        boot_id="boot",
        started_at=9.0,
        jobs=jobs,
        problems=("hot",),
    )


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"\xff", b'{"v":1,"scope":"c"}', b"x" * 70_000])
def test_garbage_in_a_nodes_keys_is_named_in_its_problems(value: bytes) -> None:
    one = only(item(KEYS.node("n"), value), item(KEYS.policy("n"), value))
    assert [problem.partition(": ")[0] for problem in one.problems] == [KEYS.node("n"), KEYS.policy("n")]
    assert one.slots == 0


def test_a_record_under_another_nodes_key_is_not_believed() -> None:
    one = only(item(KEYS.node("n"), NodeRecord.model_validate({**_plain("m")})))
    assert one.problems == (f"{KEYS.node('n')}: holds the record of node 'm'",)
    assert one.address is None


def _plain(name: str) -> dict[str, Any]:
    return {"scope": "c", "node": name, "incarnation": "a" * 16, "address": "10.0.0.1", "slots": 8, "version": "0.1.0", "boot_id": "boot"}


def test_keys_that_belong_to_nothing_are_named() -> None:
    found = view(
        item(KEYS.prefix + "strange\udcff/key", b""),
        item(KEYS.nodes + "a b", b""),
        item(KEYS.nodes + "a/b", b""),
        item(KEYS.jobs + "x y/target", b""),
        item(KEYS.audit + "000", b"?"),
    )
    assert (found.nodes, found.jobs) == ((), ())
    assert found.problems == (
        "/elasticd/v1/c/strange?/key: not a key of this cluster's layout",
        "/elasticd/v1/c/nodes/a b: node 'a b' is not a usable name",
        "/elasticd/v1/c/nodes/a/b: node 'a/b' is not a usable name",
        "/elasticd/v1/c/jobs/x y/target: job 'x y' is not a usable name",
        "/elasticd/v1/c/audit/000: Invalid JSON: expected value at line 1 column 1",
    )


@given(st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=40)), max_size=20))
def test_no_key_and_no_value_is_an_error(pairs: list[tuple[str, bytes]]) -> None:
    prefixes = [KEYS.prefix, KEYS.nodes, KEYS.policies, KEYS.audit, KEYS.jobs, TRAIN.prefix, TRAIN.members, TRAIN.events, TRAIN.requests]
    items = [item(prefixes[number % len(prefixes)] + name, value, number + 1) for number, (name, value) in enumerate(pairs)]
    found = view(*items, allowed=("train",))
    assert "train" in [job.status.job for job in found.jobs]
    assert happenings(items, KEYS) == ()


# --- jobs ----------------------------------------------------------------------------------------------------------------


def test_jobs_are_those_in_etcd_and_those_that_a_node_allows() -> None:
    target = item(KEYS.job("a").target, TargetRecord(scope="c/a", min_nodes=1, max_nodes=2, desired=2, reason="why", by="ada", paused=True), 7)
    found = view(target, node("n", NodeJob(name="b", state=NodeJobState.IDLE)), allowed=("c",))
    assert [job.status.job for job in found.jobs] == ["a", "b", "c"]
    first, second, _ = found.jobs
    assert (first.run, first.paused, first.target_revision, first.reason, first.by) == (True, True, 7, "why", "ada")
    assert (first.status.state, first.status.revision) == (JobState.WAITING, 99)
    assert (second.run, second.target_revision, second.status.state, second.status.why) == (None, None, JobState.STOPPED, "nobody has started it")


def test_a_job_that_was_stopped_before_it_began_is_stopped() -> None:
    target = item(TRAIN.target, TargetRecord(scope="c/train", min_nodes=1, max_nodes=2, desired=2, run=False, reason="not today"))
    (job,) = view(target).jobs
    assert (job.run, job.status.state, job.status.why) == (False, JobState.STOPPED, "not today")


def test_garbage_in_a_job_is_named_in_its_problems() -> None:
    (job,) = view(item(TRAIN.target, b"?"), item(TRAIN.prefix + "x\udcff\n", b"")).jobs
    assert len(job.status.problems) == 2
    assert all(problem.isprintable() for problem in job.status.problems)


# --- what happened -------------------------------------------------------------------------------------------------------


def happened(revision: int, number: int, job: str = "train") -> KeyValue:
    keys = KEYS.job(job)
    return item(keys.event(number, "formed"), EventRecord(scope=keys.scope, number=number, at=float(number), what="formed", detail="2 nodes"), revision)


def audited(revision: int, subject: str) -> KeyValue:
    record = AuditRecord(scope="c", at=1.0, node="n1", by="ada", action="drain", subject=subject, detail="disk")
    return item(f"{KEYS.audit}{revision:03d}", record, revision)


def test_what_happened_is_in_the_order_of_revisions() -> None:
    found = happenings([happened(30, 1), audited(20, "node/n7"), happened(10, 2, "other"), audited(40, "job/train"), node("n")], KEYS)
    assert [(one.id, one.kind, one.job, one.node, one.generation, one.by) for one in found] == [
        (10, "generation", "other", None, 2, None),
        (20, "audit", None, "n7", None, "ada on n1"),
        (30, "generation", "train", None, 1, None),
        (40, "audit", "train", None, None, "ada on n1"),
    ]
    assert [one.id for one in chosen(found, job="train")] == [30, 40]
    assert [one.id for one in chosen(found, node="n7")] == [20]
    assert [one.id for one in chosen(found, after=20)] == [30, 40]
    assert chosen(found, job="train", node="n7") == ()


def test_whoever_asks_again_with_last_gets_each_event_once(world: World) -> None:
    reader = ClusterReader(world.kv, world.keys, world.board)
    seen: list[int] = []
    after = 0
    for number in range(5):
        world.training()
        world.operations.checkpoint(OPERATOR, "train", reason=str(number))
        keys = world.keys.job("train")
        world.put(keys.event(number, "formed"), EventRecord(scope=keys.scope, number=number, at=1.0, what="formed"))
        for job in ("train", None):
            found, last, revision = reader.happenings(job=job, node=None, after=after)
            assert after <= last <= revision
        seen += [one.id for one in found]
        after = last
    assert seen == sorted(set(seen))
    assert len(seen) == 10
    assert reader.happenings(job=None, node=None, after=after)[:2] == ((), after)


class _Interrupted:
    """A connection over which something happens between the first list and the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._done = False

    def list(self, prefix: str) -> Listing:
        listing = self._world.kv.list(prefix)
        if not self._done:
            self._done = True
            self._world.operations.checkpoint(OPERATOR, "train", reason="meanwhile")
            keys = self._world.keys.job("train")
            self._world.put(keys.event(1, "formed"), EventRecord(scope=keys.scope, number=1, at=1.0, what="formed"))
        return listing


def test_nothing_is_passed_over_that_happens_between_two_reads(world: World) -> None:
    world.training()
    reader = ClusterReader(_Interrupted(world), world.keys, world.board)  # type: ignore[arg-type]
    first, last, _ = reader.happenings(job="train", node=None, after=0)
    second, _, _ = reader.happenings(job="train", node=None, after=last)
    assert [one.what for one in (*first, *second)] == ["checkpoint", "formed"]


def test_after_a_revision_that_this_etcd_never_had_everything_is_told(world: World) -> None:
    world.training()
    world.operations.checkpoint(OPERATOR, "train")
    found, last, _ = ClusterReader(world.kv, world.keys, world.board).happenings(job=None, node=None, after=2**60)
    assert [one.id for one in found] == [last]


# --- reading -------------------------------------------------------------------------------------------------------------


def test_one_job_is_found_in_etcd_here_or_on_another_node(world: World) -> None:
    reader = ClusterReader(world.kv, world.keys, world.board)
    assert reader.job("train").status.why == "nobody has started it"
    with pytest.raises(NotRunningError, match="there is no job 'other'"):
        reader.job("other")
    world.node("n2", IDLE.model_copy(update={"name": "other"}))
    assert reader.job("other").status.state is JobState.STOPPED
    assert reader.history("other")[0] == ()
    world.training(job="third")
    assert reader.job("third").status.state is JobState.TRAINING


def test_one_node_is_found_by_its_name(world: World) -> None:
    reader = ClusterReader(world.kv, world.keys, world.board)
    world.node("n2")
    assert reader.node("n2")[0].address == "10.0.0.1"
    with pytest.raises(NotRunningError, match="there is no node 'n3'"):
        reader.node("n3")
    with pytest.raises(UsageError):
        reader.node("a/b")


def test_a_daemon_knows_its_own_node_without_etcd() -> None:
    board = Board(node="n1", incarnation="a" * 16, stalled_after=1.0)
    board.post(Turn(slots=8, jobs=(RUNNING, IDLE), problems=("hot",)))
    one = own_node(board)
    assert (one.name, one.state, one.slots, one.slots_used, one.jobs, one.problems) == ("n1", NodeCondition.READY, 8, 2, (RUNNING, IDLE), ("hot",))
    board.post(Turn(jobs=(NodeJob(name="a", state=NodeJobState.KEPT_OUT),)))
    assert own_node(board).state is NodeCondition.CORDONED
    board.close()
