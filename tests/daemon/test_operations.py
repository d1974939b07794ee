"""Operations: what each change writes, what it refuses, and what happens when two ask at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticd.daemon.audit import SLOTS
from elasticd.daemon.operations import Change, Operations
from elasticd.errors import (
    AccessDeniedError,
    ConflictError,
    ElasticdError,
    KVPermissionError,
    KVUnavailableError,
    NotAllowedError,
    NotRunningError,
    RefusedError,
    UsageError,
)
from elasticd.kv import EtcdKV, KVConfig, TxnResult
from elasticd.rendezvous.records import BudgetRecord, NodeJob, NodeJobState, NodePolicyRecord, RequestKind, parse
from tests.daemon.api.world import IDLE, OPERATOR, READER, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.etcd import Server


@pytest.fixture
def world(daemon_server: Server) -> Iterator[World]:
    daemon_server.heal()
    daemon_server.await_serving()
    one = World(daemon_server)
    yield one
    daemon_server.heal()
    one.close()


@pytest.fixture
def ops(world: World) -> Operations:
    return world.operations


def policy_of(world: World, node: str) -> NodePolicyRecord | None:
    item = world.kv.get(world.keys.policy(node))
    return parse(NodePolicyRecord, item.key, item.value, world.keys.scope) if item else None


# --- start ---------------------------------------------------------------------------------------------------------------


def test_a_job_starts_with_the_sizes_of_its_file(world: World, ops: Operations) -> None:
    change = ops.start(OPERATOR, "train", reason="monday")
    target = world.wanted()
    assert (target.run, target.desired, target.min_nodes, target.max_nodes, target.max_restarts) == (True, 2, 1, 4, 7)
    assert (target.reason, target.by, target.parameters) == ("monday", "ada (uid 1000, pid 77)", {})
    assert change == Change(
        changed=True,
        job="train",
        before=None,
        after={"run": True, "nodes": 2, "min_nodes": 1, "max_nodes": 4, "max_restarts": 7, "paused": False, "parameters": {}},
        revision=change.revision,
    )
    view = world.job()
    assert view.target is not None
    assert view.target.mod_revision == change.revision


def test_given_sizes_and_parameters_count_before_those_of_the_file(world: World, ops: Operations) -> None:
    ops.start(OPERATOR, "train", nodes=3, min_nodes=2, max_nodes=9, max_restarts=0, parameters={"seconds": "90", "mode": "fast"})
    target = world.wanted()
    assert (target.desired, target.min_nodes, target.max_nodes, target.max_restarts) == (3, 2, 9, 0)
    assert target.parameters == {"seconds": 90, "mode": "fast"}


def test_a_job_that_another_node_allows_starts_with_given_sizes(world: World, ops: Operations) -> None:
    world.node("n2", IDLE.model_copy(update={"name": "other"}))
    with pytest.raises(UsageError, match="how many nodes job 'other' wants is not known here"):
        ops.start(OPERATOR, "other")
    ops.start(OPERATOR, "other", nodes=3, parameters={"lr": "-5", "word": "fast", "rate": 3e-4, "flag": True})
    target = world.wanted("other")
    assert (target.desired, target.min_nodes, target.max_nodes, target.max_restarts) == (3, 1, 3, 10)
    assert target.parameters == {"lr": -5, "word": "fast", "rate": 3e-4, "flag": True}


def test_a_job_that_no_node_allows_is_not_started(world: World, ops: Operations) -> None:
    world.node("n2", IDLE)
    with pytest.raises(NotAllowedError, match=f"no node of cluster '{world.keys.cluster}' that is up has a job file 'other'"):
        ops.start(OPERATOR, "other", nodes=1)
    assert world.kv.list(world.keys.jobs).items == ()


def test_a_job_whose_file_is_refused_is_not_started_and_the_reason_is_told(world: World, ops: Operations) -> None:
    refused = NodeJob(name="other", state=NodeJobState.REFUSED, why="other.toml: argv: there is no program /opt/x")
    world.node("n2", refused)
    world.node("n3", refused)
    with pytest.raises(NotAllowedError) as told:
        ops.start(OPERATOR, "other", nodes=1)
    assert told.value.message == f"the file of job 'other' is refused on n2: {refused.why}; 1 more of them refuse it"
    world.node("n4", IDLE.model_copy(update={"name": "other"}))
    assert ops.start(OPERATOR, "other", nodes=1).changed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parameters": {"sekonds": 5}}, "job train has no parameter 'sekonds'"),
        ({"parameters": {"seconds": "many"}}, "parameter seconds of job train: 'many' is not allowed"),
        ({"parameters": {"seconds": 3601}}, "parameter seconds of job train: 3601 is not allowed"),
        ({"parameters": {"mode": True}}, "parameter mode of job train: True is not allowed"),
    ],
)
def test_a_parameter_that_the_file_does_not_allow_is_named(world: World, ops: Operations, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ops.start(OPERATOR, "train", **given)
    assert world.job().target is None


@pytest.mark.parametrize("value", ["two words", "-x", "+", float("inf"), float("nan"), 2**60, "a" * 65, "-9007199254740993"])
def test_a_parameter_that_etcd_may_not_hold_is_named(world: World, ops: Operations, value: Any) -> None:
    world.node("n2", IDLE.model_copy(update={"name": "other"}))
    with pytest.raises(UsageError, match=r"parameter lr: .* is no number, no yes or no, and no single word"):
        ops.start(OPERATOR, "other", nodes=1, parameters={"lr": value})


def test_more_parameters_than_a_record_may_hold_are_refused(world: World, ops: Operations) -> None:
    world.node("n2", IDLE.model_copy(update={"name": "other"}))
    world.target("other", run=False, parameters={f"a{number}": number for number in range(64)})
    with pytest.raises(UsageError, match="65 parameters are more than the 64"):
        ops.start(OPERATOR, "other", parameters={"b": 1})


@pytest.mark.parametrize("sizes", [{"nodes": 5}, {"min_nodes": 3}, {"max_nodes": 1}, {"nodes": 1, "min_nodes": 2, "max_nodes": 4}])
def test_a_size_out_of_bounds_is_refused_at_the_start(world: World, ops: Operations, sizes: dict[str, int]) -> None:
    with pytest.raises(RefusedError, match="nodes are not within min_nodes"):
        ops.start(OPERATOR, "train", **sizes)  # type: ignore[arg-type]  # sizes only
    assert world.job().target is None


def test_a_job_that_runs_is_not_started_again(world: World, ops: Operations) -> None:
    world.target()
    for again in (False, True):
        with pytest.raises(RefusedError, match="job 'train' runs already"):
            ops.start(OPERATOR, "train", again=again)


def test_a_job_that_has_ended_needs_again_and_gets_its_budget_back(world: World, ops: Operations) -> None:
    world.target(desired=3, parameters={"seconds": 10, "gone": 1}, paused=True)
    world.put(world.keys.job("train").budget, BudgetRecord(scope=world.keys.job("train").scope, used=9))
    world.generation(state="failed")
    with pytest.raises(RefusedError, match="job 'train' has ended: failed"):
        ops.start(OPERATOR, "train")
    assert world.job().over
    change = ops.start(OPERATOR, "train", again=True, parameters={"mode": "fast"})
    view = world.job()
    assert view.reopened
    assert view.restarts_used == 0
    target = world.wanted()
    assert (target.desired, target.paused, target.parameters) == (3, False, {"seconds": 10, "mode": "fast"})
    assert change.generation is None


def test_a_job_that_is_stopping_goes_on_only_with_again(world: World, ops: Operations) -> None:
    world.training(run=False)
    with pytest.raises(RefusedError, match="job 'train' is stopping"):
        ops.start(OPERATOR, "train")
    change = ops.start(OPERATOR, "train", again=True)
    assert world.wanted().run
    assert change.generation == 5


def test_a_job_that_was_stopped_before_it_formed_starts_plainly(world: World, ops: Operations) -> None:
    world.target(run=False)
    assert ops.start(OPERATOR, "train").changed
    assert world.wanted().run


def test_a_target_that_holds_garbage_is_written_anew_by_start_alone(world: World, ops: Operations) -> None:
    world.put(world.keys.job("train").target, b"{")
    for change in (lambda: ops.stop(OPERATOR, "train"), lambda: ops.scale(OPERATOR, "train", nodes=2), lambda: ops.pause(OPERATOR, "train", reason="x")):
        with pytest.raises(RefusedError, match="what is wanted of job 'train' is unusable"):
            change()
    ops.start(OPERATOR, "train")
    assert world.wanted().desired == 2


def test_nothing_is_written_while_how_the_job_stands_is_unknown(world: World, ops: Operations) -> None:
    world.target(run=False)
    world.put(world.keys.job("train").generation, b"{}")
    with pytest.raises(RefusedError, match="how job 'train' stands is unusable"):
        ops.start(OPERATOR, "train", again=True)


# --- stop, scale, pause --------------------------------------------------------------------------------------------------


def test_stop_asks_once_and_says_who(world: World, ops: Operations) -> None:
    world.training()
    first, second = ops.stop(OPERATOR, "train"), ops.stop(OPERATOR, "train")
    assert (first.changed, second.changed) == (True, False)
    assert first.generation == 5
    assert (world.wanted().run, world.wanted().reason) == (False, "stopped by ada (uid 1000, pid 77)")
    assert second.before == second.after


def test_stop_of_a_job_that_has_ended_changes_nothing(world: World, ops: Operations) -> None:
    world.target()
    world.generation(state="succeeded")
    assert not ops.stop(OPERATOR, "train").changed
    assert world.job().over


def test_scale_is_absolute_and_idempotent(world: World, ops: Operations) -> None:
    world.training()
    change = ops.scale(OPERATOR, "train", nodes=3, max_nodes=6, reason="more")
    assert (change.changed, change.before["nodes"], change.after["nodes"], change.after["max_nodes"]) == (True, 2, 3, 6)  # type: ignore[index]
    assert not ops.scale(OPERATOR, "train", nodes=3).changed
    assert world.wanted().desired == 3


def test_a_dry_run_decides_and_writes_nothing(world: World, ops: Operations) -> None:
    revision = world.target()
    change = ops.scale(OPERATOR, "train", nodes=4, dry_run=True)
    assert (change.changed, change.dry_run, change.after["nodes"]) == (True, True, 4)  # type: ignore[index]
    assert world.job().target.mod_revision == revision  # type: ignore[union-attr]
    assert world.audit() == []
    with pytest.raises(RefusedError):
        ops.scale(OPERATOR, "train", nodes=5, dry_run=True)


def test_a_paused_job_is_not_scaled_and_the_reason_is_told(world: World, ops: Operations) -> None:
    world.training()
    assert ops.pause(OPERATOR, "train", reason="demo").changed
    assert not ops.pause(OPERATOR, "train", reason="demo again").changed
    with pytest.raises(RefusedError, match="job 'train' is paused: demo"):
        ops.scale(OPERATOR, "train", nodes=3)
    assert ops.resume(OPERATOR, "train").changed
    assert not ops.resume(OPERATOR, "train").changed
    assert ops.scale(OPERATOR, "train", nodes=3).changed


def test_a_revision_that_is_not_the_current_one_is_a_conflict(world: World, ops: Operations) -> None:
    revision = world.target(by="eve")
    with pytest.raises(ConflictError, match=f"changed by eve: at revision {revision}, not {revision - 1}"):
        ops.scale(OPERATOR, "train", nodes=3, if_revision=revision - 1)
    change = ops.scale(OPERATOR, "train", nodes=3, if_revision=revision)
    with pytest.raises(ConflictError):
        ops.scale(OPERATOR, "train", nodes=4, if_revision=revision)
    assert ops.scale(OPERATOR, "train", nodes=4, if_revision=change.revision).changed


ON_OPEN: dict[str, Callable[[Operations], Change]] = {
    "scale": lambda ops: ops.scale(OPERATOR, "train", nodes=3),
    "pause": lambda ops: ops.pause(OPERATOR, "train", reason="x"),
    "resume": lambda ops: ops.resume(OPERATOR, "train"),
    "restart": lambda ops: ops.restart(OPERATOR, "train", reason="x"),
    "checkpoint": lambda ops: ops.checkpoint(OPERATOR, "train"),
}


@pytest.mark.parametrize("name", ON_OPEN)
def test_a_job_that_has_ended_is_not_started_again_by_another_change(world: World, ops: Operations, name: str) -> None:
    world.target()
    world.generation(state="succeeded")
    before = world.kv.list(world.keys.prefix)
    with pytest.raises(NotRunningError):
        ON_OPEN[name](ops)
    assert world.kv.list(world.keys.prefix).items == before.items


@pytest.mark.parametrize("name", [*ON_OPEN, "stop"])
def test_a_job_that_nobody_knows_is_not_running(world: World, ops: Operations, name: str) -> None:
    with pytest.raises(NotRunningError, match=f"there is no job 'train' in cluster '{world.keys.cluster}'"):
        (ON_OPEN | {"stop": lambda ops: ops.stop(OPERATOR, "train")})[name](ops)


@pytest.mark.parametrize("name", ["scale", "pause", "resume"])
def test_a_job_that_is_stopping_is_left_alone(world: World, ops: Operations, name: str) -> None:
    world.training(run=False)
    with pytest.raises(RefusedError, match="job 'train' is to stop"):
        ON_OPEN[name](ops)


def test_a_name_that_would_leave_the_prefix_is_refused(ops: Operations) -> None:
    for name in ("../x", "a/b", "", "x" * 129):
        with pytest.raises(UsageError, match="is not a usable name"):
            ops.stop(OPERATOR, name)
        with pytest.raises(UsageError, match="is not a usable name"):
            ops.drain(OPERATOR, name, reason="x")


# --- requests ------------------------------------------------------------------------------------------------------------


def test_restart_is_asked_of_one_generation_once(world: World, ops: Operations) -> None:
    world.training()
    change = ops.restart(OPERATOR, "train", reason="stuck")
    assert (change.changed, change.generation, change.before) == (True, 5, None)
    assert change.after == {"generation": 5, "reason": "stuck", "by": str(OPERATOR)}
    assert not ops.restart(OPERATOR, "train", reason="still").changed
    assert world.job().asked(RequestKind.RESTART).reason == "stuck"  # type: ignore[union-attr]
    world.generation(number=6)
    assert world.job().asked(RequestKind.RESTART) is None
    assert ops.restart(OPERATOR, "train", reason="again").generation == 6


def test_each_checkpoint_asked_for_is_a_new_one(world: World, ops: Operations) -> None:
    world.training()
    key = world.keys.job("train").request("checkpoint")
    first, second = ops.checkpoint(OPERATOR, "train").revision, ops.checkpoint(OPERATOR, "train", reason="again").revision
    item = world.kv.get(key)
    assert item is not None
    assert first < second == item.mod_revision


def test_a_request_replaces_garbage(world: World, ops: Operations) -> None:
    world.training()
    world.put(world.keys.job("train").request("restart"), b"?")
    assert ops.restart(OPERATOR, "train", reason="x").changed
    assert world.job().asked(RequestKind.RESTART) is not None


# --- nodes ---------------------------------------------------------------------------------------------------------------


def test_cordon_drain_and_uncordon(world: World, ops: Operations) -> None:
    world.node("n2")
    assert ops.cordon(OPERATOR, "n2", reason="fan").after == {"cordoned": True, "draining": False, "reason": "fan", "by": str(OPERATOR)}
    assert not ops.cordon(OPERATOR, "n2", reason="fan").changed
    assert ops.drain(OPERATOR, "n2", reason="disk").changed
    policy = policy_of(world, "n2")
    assert policy is not None
    assert (policy.cordoned, policy.draining, policy.reason) == (True, True, "disk")
    for again in (ops.drain, ops.cordon):
        assert not again(OPERATOR, "n2", reason="x").changed
    change = ops.uncordon(OPERATOR, "n2")
    assert (change.changed, change.before["reason"], change.after) == (True, "disk", None)  # type: ignore[index]
    assert policy_of(world, "n2") is None
    assert not ops.uncordon(OPERATOR, "n2").changed


def test_a_node_that_is_down_can_be_kept_out_and_let_in_by_its_policy_alone(world: World, ops: Operations) -> None:
    world.policy("n9", cordoned=True)
    assert ops.drain(OPERATOR, "n9", reason="x").changed
    assert ops.uncordon(OPERATOR, "n9").changed
    for change in (ops.cordon, ops.drain, ops.uncordon):
        with pytest.raises(NotRunningError, match="there is no node 'n9'"):
            change(OPERATOR, "n9", reason="x")


def test_a_policy_that_holds_garbage_is_replaced(world: World, ops: Operations) -> None:
    world.put(world.keys.policy("n2"), b"[]")
    assert ops.cordon(OPERATOR, "n2", reason="x").changed
    world.put(world.keys.policy("n2"), b"[]")
    assert ops.uncordon(OPERATOR, "n2").changed
    assert world.kv.get(world.keys.policy("n2")) is None


# --- who, and the record of it -------------------------------------------------------------------------------------------


EVERYTHING: dict[str, Callable[[Operations, Any], Change]] = {
    "start": lambda ops, who: ops.start(who, "train"),
    "stop": lambda ops, who: ops.stop(who, "train"),
    "scale": lambda ops, who: ops.scale(who, "train", nodes=1),
    "pause": lambda ops, who: ops.pause(who, "train", reason="x"),
    "resume": lambda ops, who: ops.resume(who, "train"),
    "restart": lambda ops, who: ops.restart(who, "train", reason="x"),
    "checkpoint": lambda ops, who: ops.checkpoint(who, "train"),
    "acknowledge": lambda ops, who: ops.acknowledge(who, "train", "g1-x"),
    "cordon": lambda ops, who: ops.cordon(who, "n1", reason="x"),
    "drain": lambda ops, who: ops.drain(who, "n1", reason="x"),
    "uncordon": lambda ops, who: ops.uncordon(who, "n1"),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_whoever_may_only_read_changes_nothing(world: World, ops: Operations, name: str) -> None:
    world.node("n1")
    before = world.kv.list(world.keys.prefix)
    with pytest.raises(AccessDeniedError, match=r"bob .* may read, not change"):
        EVERYTHING[name](ops, READER)
    assert world.kv.list(world.keys.prefix).items == before.items


def test_every_change_leaves_a_line_in_the_log_and_in_the_ring(world: World, ops: Operations) -> None:
    world.node("n1")
    world.training()
    with structlog.testing.capture_logs() as logged:
        for name in ("scale", "pause", "resume", "restart", "checkpoint", "stop", "drain", "uncordon"):
            EVERYTHING[name](ops, OPERATOR)
    lines = [line for line in logged if line["event"] == "audit"]
    assert [(line["action"], line["subject"], line["uid"], line["pid"], line["outcome"]) for line in lines] == [
        (name, "node/n1" if name in ("drain", "uncordon") else "job/train", 1000, 77, "done")
        for name in ("scale", "pause", "resume", "restart", "checkpoint", "stop", "drain", "uncordon")
    ]
    assert [(one.what, one.job, one.node, one.detail) for one in world.audit()] == [
        ("scale", "train", None, "nodes 2 -> 1"),
        ("pause", "train", None, "paused false -> true: x"),
        ("resume", "train", None, "paused true -> false"),
        ("restart", "train", None, "generation - -> 5: x"),
        ("checkpoint", "train", None, "generation - -> 5"),
        ("stop", "train", None, "run true -> false"),
        ("drain", None, "n1", "cordoned - -> true, draining - -> true: x"),
        ("uncordon", None, "n1", "cordoned true -> -, draining true -> -"),
    ]
    assert {one.by for one in world.audit()} == {"ada (uid 1000, pid 77) on n1"}


def test_the_record_of_a_start_says_what_was_wanted(world: World, ops: Operations) -> None:
    ops.start(OPERATOR, "train", parameters={"mode": "fast", "seconds": 9}, reason="monday")
    (record,) = world.audit()
    assert record.detail == (
        "run - -> true, nodes - -> 2, min_nodes - -> 1, max_nodes - -> 4, max_restarts - -> 7, parameters - -> seconds=9 mode=fast: monday"
    )


def test_what_changes_nothing_leaves_no_line(world: World, ops: Operations) -> None:
    world.target()
    with structlog.testing.capture_logs() as logged:
        ops.scale(OPERATOR, "train", nodes=2)
    assert (logged, world.audit()) == ([], [])


def test_the_ring_forgets_the_oldest_and_nothing_else(world: World, ops: Operations) -> None:
    world.training()
    for number in range(SLOTS + 3):
        ops.checkpoint(OPERATOR, "train", reason=str(number))
    kept = [one.detail.rpartition(": ")[2] for one in world.audit()]
    assert kept == [str(number) for number in range(3, SLOTS + 3)]


class _NoAudit(EtcdKV):
    """A connection that may not write the ring, as with roles that forgot it."""

    def txn(self, compares: Any, ops: Any) -> TxnResult:
        if "/audit/" in ops[0].key:
            raise KVPermissionError("txn: permission denied")
        return super().txn(compares, ops)


def test_a_record_that_cannot_be_kept_does_not_undo_the_change_and_is_logged(world: World) -> None:
    world.target()
    with _NoAudit(KVConfig(endpoints=(world.server.endpoint,))) as operator_kv, structlog.testing.capture_logs() as logged:
        assert Operations(world.kv, operator_kv, world.keys, world.board).scale(OPERATOR, "train", nodes=3).changed
    assert world.wanted().desired == 3
    assert [line["event"] for line in logged] == ["audit", "audit_not_kept"]
    assert logged[1]["reason"] == "txn: permission denied"


def test_a_change_wakes_the_loop(world: World, ops: Operations) -> None:
    world.target()
    woken = threading.Thread(target=world.board.wait, args=(60.0,))
    woken.start()
    ops.scale(OPERATOR, "train", nodes=3)
    woken.join(10.0)
    assert not woken.is_alive()


def test_with_etcd_out_of_reach_a_change_says_so(world: World) -> None:
    world.target()
    with EtcdKV(KVConfig(endpoints=(world.server.endpoint,), call_timeout=0.3)) as kv:
        slow = Operations(kv, kv, world.keys, world.board)
        world.server.pause()
        with pytest.raises(KVUnavailableError):
            slow.scale(OPERATOR, "train", nodes=3)


# --- races ---------------------------------------------------------------------------------------------------------------


def race(count: int, what: Callable[[int], Any]) -> list[Any]:
    """`what(0)`, `what(1)`, … all at once; what each returned or raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = what(number)
        except ElasticdError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_two_that_scale_what_they_have_seen_exactly_one_wins(world: World, ops: Operations) -> None:
    for _ in range(20):
        revision = world.target()
        results = race(2, lambda number: ops.scale(OPERATOR, "train", nodes=3 + number, if_revision=revision))  # noqa: B023 - called within
        won = [result for result in results if isinstance(result, Change)]
        assert [type(result) for result in results if result not in won] == [ConflictError]
        assert world.wanted().desired == won[0].after["nodes"]  # type: ignore[index]


def test_changes_of_different_things_do_not_undo_each_other(world: World, ops: Operations) -> None:
    world.training(max_nodes=100)
    changes: list[Callable[[], Change]] = [
        lambda: ops.scale(OPERATOR, "train", nodes=50),
        lambda: ops.scale(OPERATOR, "train", nodes=50, min_nodes=3),
        lambda: ops.checkpoint(OPERATOR, "train"),
        lambda: ops.checkpoint(OPERATOR, "train"),
    ]
    results = race(len(changes), lambda number: changes[number]())
    assert all(isinstance(result, Change) for result in results), results
    assert (world.wanted().desired, world.wanted().min_nodes) == (50, 3)
    assert len(world.audit()) == sum(result.changed for result in results)


class _SlowWriter(EtcdKV):
    """A connection over which something happens between a read and the write that follows."""

    meanwhile: Callable[[], object] | None = None

    def txn(self, compares: Any, ops: Any) -> TxnResult:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().txn(compares, ops)


def test_a_job_that_ends_while_it_is_scaled_is_not_started_again_by_that(world: World) -> None:
    world.training()
    with _SlowWriter(KVConfig(endpoints=(world.server.endpoint,))) as operator_kv:
        operator_kv.meanwhile = lambda: world.generation(state="succeeded")
        with pytest.raises(NotRunningError, match="has ended: succeeded"):
            Operations(world.kv, operator_kv, world.keys, world.board).scale(OPERATOR, "train", nodes=3)
    assert world.job().over


def test_whoever_gave_no_revision_begins_again_after_a_lost_race(world: World) -> None:
    world.training()
    with _SlowWriter(KVConfig(endpoints=(world.server.endpoint,))) as operator_kv:
        operator_kv.meanwhile = lambda: world.target(max_nodes=8, desired=7)
        change = Operations(world.kv, operator_kv, world.keys, world.board).scale(OPERATOR, "train", nodes=3)
    assert (change.before["nodes"], change.after["nodes"], change.after["max_nodes"]) == (7, 3, 8)  # type: ignore[index]


def test_a_generation_that_goes_on_is_no_conflict_for_whoever_gave_a_revision(world: World) -> None:
    world.training()
    revision = world.target()
    with _SlowWriter(KVConfig(endpoints=(world.server.endpoint,))) as operator_kv:
        operator_kv.meanwhile = lambda: world.generation(number=6)
        change = Operations(world.kv, operator_kv, world.keys, world.board).scale(OPERATOR, "train", nodes=3, if_revision=revision)
    assert (change.changed, change.generation) == (True, 6)
