"""Settings of training that operators set: what is written, what is refused, what counts on this node, and what happens when two ask at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.agent.settings import OwnLayers
from elasticd.daemon.board import Board
from elasticd.daemon.cluster import ClusterReader
from elasticd.daemon.config import AgentTimes
from elasticd.daemon.configuring import ConfigReader, ConfigView, SettingView, changed
from elasticd.daemon.jobs import JobSpec, digest
from elasticd.daemon.operations import Change, Operations
from elasticd.errors import AccessDeniedError, ConflictError, ElasticdError, NotAllowedError, NotRunningError, RefusedError, UsageError
from elasticd.rendezvous.records import ConfigRecord, parse
from tests.daemon.api.world import JOB, OPERATOR, READER, RUNNING, World
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.daemon.daemons import Cluster
    from tests.support.etcd import Server

pytestmark = pytest.mark.timeout(60)


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


def kept(world: World, job: str | None = None) -> ConfigRecord | None:
    key, scope = (world.keys.config_of_cluster, world.keys.scope) if job is None else (world.keys.config_of_job(job), world.keys.job(job).scope)
    item = world.kv.get(key)
    return parse(ConfigRecord, item.key, item.value, scope) if item else None


def values(world: World, job: str | None = None) -> dict[str, Any]:
    record = kept(world, job)
    return dict(record.values) if record else {}


def shown(world: World, job: str | None = None, board: Board | None = None) -> ConfigView:
    board = board or world.board
    return ConfigReader(world.kv, world.keys, board, ClusterReader(world.kv, world.keys, board)).show(job)


def setting(view: ConfigView, name: str) -> SettingView:
    (found,) = (one for one in view.settings if one.name == name)
    return found


def with_file(world: World, trainer: Mapping[str, Any], *, own: OwnLayers | None = None, **spec: Any) -> Board:
    """This node with another job file, and layers of its own."""
    job = JOB.model_copy(update={"trainer": dict(trainer), **spec})
    world.board.post(replace(world.board.turn, allowed={"train": job}))
    world.board.own = own or OwnLayers()
    return world.board


# --- what is written -----------------------------------------------------------------------------------------------------


def test_a_setting_for_all_jobs_is_written_with_who_and_why(world: World, ops: Operations) -> None:
    change = ops.configure(OPERATOR, None, give={"checkpoint_every_s": "300", "snapshots": False, "backend": "gloo"}, reason="slow disks")
    assert (change.changed, change.job, change.node, change.before) == (True, None, None, {})
    assert change.after == {"backend": "gloo", "checkpoint_every_s": 300.0, "snapshots": False}
    record = kept(world)
    assert record is not None
    assert (record.values, record.reason, record.by) == (change.after, "slow disks", str(OPERATOR))
    (audit,) = world.audit()
    assert (audit.what, audit.job, audit.node) == ("configure", None, None)
    assert audit.detail == "backend - -> gloo, checkpoint_every_s - -> 300.0, snapshots - -> false: slow disks"


def test_a_setting_for_one_job_is_apart_from_that_for_all(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, None, give={"compress": "fp16"})
    change = ops.configure(OPERATOR, "train", give={"compress": "bf16"})
    assert (change.job, change.before, change.after) == ("train", {}, {"compress": "bf16"})
    assert (values(world), values(world, "train")) == ({"compress": "fp16"}, {"compress": "bf16"})
    assert [one.job for one in world.audit()] == [None, "train"]


def test_a_job_called_cluster_has_settings_of_its_own(world: World, ops: Operations) -> None:
    world.training(job="cluster")
    ops.configure(OPERATOR, None, give={"compress": "fp16"})
    ops.configure(OPERATOR, "cluster", give={"compress": "bf16"})
    assert (values(world), values(world, "cluster")) == ({"compress": "fp16"}, {"compress": "bf16"})


def test_what_is_taken_away_is_as_the_layer_below_has_it(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, "train", give={"compress": "bf16", "snapshot_every": 5})
    change = ops.configure(OPERATOR, "train", take=["compress"])
    assert (change.before, change.after) == ({"compress": "bf16", "snapshot_every": 5}, {"snapshot_every": 5})
    assert world.audit()[-1].detail == "compress bf16 -> -"
    assert setting(shown(world, "train"), "compress").origin == "default"


def test_setting_and_taking_away_are_one_change(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, None, give={"compress": "bf16"})
    change = ops.configure(OPERATOR, None, give={"backend": "gloo"}, take=["compress"])
    assert change.after == {"backend": "gloo"}


def test_what_is_so_already_is_not_written_again(world: World, ops: Operations) -> None:
    first = ops.configure(OPERATOR, None, give={"checkpoint_every_s": 300})
    for again in (ops.configure(OPERATOR, None, give={"checkpoint_every_s": "3e2"}), ops.configure(OPERATOR, None, take=["compress"])):
        assert (again.changed, again.before, again.after) == (False, first.after, first.after)
    assert len(world.audit()) == 1


def test_a_dry_run_decides_and_writes_nothing(world: World, ops: Operations) -> None:
    change = ops.configure(OPERATOR, None, give={"compress": "bf16"}, dry_run=True)
    assert (change.changed, change.dry_run, change.after) == (True, True, {"compress": "bf16"})
    assert (values(world), world.audit()) == ({}, [])
    with pytest.raises(UsageError):
        ops.configure(OPERATOR, None, give={"compress": "zip"}, dry_run=True)


def test_a_name_that_is_no_longer_a_setting_can_be_taken_away(world: World, ops: Operations) -> None:
    """Left by a newer version, it would keep every agent from starting."""
    world.put(world.keys.config_of_cluster, ConfigRecord(scope=world.keys.scope, values={"from_the_future": 1, "compress": "bf16"}))
    with pytest.raises(UsageError, match=r"'from_the_future' in etcd .* is no setting"):
        shown(world)
    ops.configure(OPERATOR, None, take=["from_the_future"])
    assert values(world) == {"compress": "bf16"}


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("give", "take", "error", "said"),
    [
        ({"checkpoint_dir": "/srv"}, [], RefusedError, "checkpoint_dir = '/srv' in etcd (config/cluster): etcd may hold numbers"),
        ({"checkpoint_url": "s3://a/b"}, [], RefusedError, "checkpoint_url = 's3://a/b' in etcd"),
        ({"gloo_interface": "eth0"}, [], RefusedError, "gloo_interface = 'eth0' in etcd"),
        ({"backend": "mpi"}, [], UsageError, "backend = 'mpi' in etcd (config/cluster) is not allowed; give one of auto, gloo, nccl"),
        ({"bakend": "gloo"}, [], UsageError, "'bakend' in etcd (config/cluster) is no setting; did you mean backend?"),
        ({"snapshot_every": "often"}, [], UsageError, "snapshot_every = 'often' in etcd (config/cluster) is not allowed"),
        ({"snapshot_every": -1}, [], UsageError, "snapshot_every = -1 in etcd (config/cluster) is not allowed"),
        ({"snapshot_every": 2**70}, [], UsageError, "is not allowed; give a whole number (steps) from 0 to 1000000"),
        ({}, ["bakend"], UsageError, "'bakend' is no setting; elasticctl config show lists them all"),
        ({"backend": "gloo"}, ["backend"], UsageError, "backend is both set and unset"),
        ({"process_group_timeout_s": 10, "stop_step_timeout_s": 20}, [], UsageError, "stop_step_timeout_s 20 < process_group_timeout_s 10 does not hold"),
        ({"process_group_timeout_s": 5}, [], UsageError, "job train: ttl 10 < process_group_timeout_s 5 does not hold"),
        ({"stop_step_timeout_s": 30}, [], UsageError, "job train: stop_step_timeout_s 30 < stop_grace 30 does not hold"),
    ],
)
def test_a_mistake_changes_nothing_and_says_what_is_wrong(
    world: World, ops: Operations, give: dict[str, Any], take: list[str], error: type[ElasticdError], said: str
) -> None:
    with pytest.raises(error) as caught:
        ops.configure(OPERATOR, None, give=give, take=take)
    assert said in str(caught.value)
    assert (values(world), world.audit()) == ({}, [])


def test_who_may_only_read_may_not_set(world: World, ops: Operations) -> None:
    with pytest.raises(AccessDeniedError):
        ops.configure(READER, None, give={"backend": "gloo"})
    assert values(world) == {}


def test_a_job_that_nobody_knows_has_no_settings(world: World, ops: Operations) -> None:
    with pytest.raises(NotAllowedError, match="no node of cluster"):
        ops.configure(OPERATOR, "none", give={"backend": "gloo"})
    with pytest.raises(NotRunningError, match="there is no job 'none'"):
        shown(world, "none")


def test_a_job_may_be_set_up_before_its_first_start_and_while_its_nodes_are_down(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, "train", give={"backend": "gloo"})
    world.target("elsewhere")
    ops.configure(OPERATOR, "elsewhere", give={"backend": "gloo"})
    world.node("n2", RUNNING.model_copy(update={"name": "there"}))
    ops.configure(OPERATOR, "there", give={"backend": "gloo"})
    assert [setting(shown(world, job), "backend").origin for job in ("train", "elsewhere", "there")] == ["etcd:job"] * 3


def test_a_change_must_fit_the_other_key_of_etcd(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, "train", give={"stop_step_timeout_s": 25})
    with pytest.raises(UsageError, match=r"job train: stop_step_timeout_s 25 < process_group_timeout_s 20 does not hold.*etcd:job.*etcd:cluster"):
        ops.configure(OPERATOR, None, give={"process_group_timeout_s": 20})
    ops.configure(OPERATOR, "train", take=["stop_step_timeout_s"])
    ops.configure(OPERATOR, None, give={"process_group_timeout_s": 20})
    with pytest.raises(UsageError, match="stop_step_timeout_s 25 < process_group_timeout_s 20"):
        ops.configure(OPERATOR, "train", give={"stop_step_timeout_s": 25})


def test_a_change_must_fit_what_the_job_file_of_this_node_says(world: World, ops: Operations) -> None:
    with_file(world, {"stop_step_timeout_s": 25})
    with pytest.raises(UsageError, match="job train: stop_step_timeout_s 25 < process_group_timeout_s 20 does not hold"):
        ops.configure(OPERATOR, "train", give={"process_group_timeout_s": 20})
    with_file(world, {"process_group_timeout_s": 600})
    ops.configure(OPERATOR, "train", give={"process_group_timeout_s": 20, "stop_step_timeout_s": 19})


def test_a_shared_directory_is_named_by_the_file_before_etcd_says_that_it_is_shared(world: World, ops: Operations) -> None:
    with pytest.raises(UsageError, match="checkpoint_shared needs checkpoint_dir"):
        ops.configure(OPERATOR, "train", give={"checkpoint_shared": True})
    with_file(world, {"checkpoint_dir": "/srv/shared"})
    ops.configure(OPERATOR, "train", give={"checkpoint_shared": True})
    assert values(world, "train") == {"checkpoint_shared": True}


def test_what_did_not_fit_before_keeps_nobody_from_a_change(world: World, ops: Operations) -> None:
    """A job file with a mistake is not the operators' to wait for."""
    with_file(world, {"stop_step_timeout_s": 700})
    ops.configure(OPERATOR, None, give={"backend": "gloo"})
    assert values(world) == {"backend": "gloo"}


def test_a_key_that_holds_garbage_is_told_counts_for_nothing_and_is_replaced(world: World, ops: Operations) -> None:
    world.put(world.keys.config_of_cluster, b'{"scope": "other", "values": {"compress": "bf16"}}')
    view = shown(world)
    assert setting(view, "compress").origin == "default"
    (problem,) = view.problems
    assert problem.startswith(f"{world.keys.config_of_cluster}: belongs to 'other'")
    assert world.view().problems == (problem,)
    change = ops.configure(OPERATOR, None, give={"backend": "gloo"})
    assert (change.before, values(world), world.view().problems) == ({}, {"backend": "gloo"}, ())


@pytest.mark.parametrize(
    ("key", "scope"),
    [("config/other", ""), ("config/job/a b", "/a b"), ("config/job/", "/"), ("config/cluster/x", ""), ("config/", ""), ("config/job/x", "/y")],
)
def test_a_key_that_is_not_of_the_layout_is_told(world: World, key: str, scope: str) -> None:
    world.put(world.keys.prefix + key, ConfigRecord(scope=world.keys.scope + scope))
    assert len(world.view().problems) == 1
    assert world.keys.prefix + key in world.view().problems[0]


def test_keys_of_settings_are_no_problem(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, None, give={"backend": "gloo"})
    ops.configure(OPERATOR, "train", give={"backend": "gloo"})
    assert world.view().problems == ()


# --- two at once ---------------------------------------------------------------------------------------------------------


def test_a_revision_that_is_no_longer_the_current_one_is_a_conflict(world: World, ops: Operations) -> None:
    assert shown(world, "train").own is not None
    assert (shown(world).cluster.revision, shown(world).own) == (0, None)
    ops.configure(OPERATOR, None, give={"backend": "gloo"}, if_revision=0)
    revision = shown(world).cluster.revision
    with pytest.raises(ConflictError, match=rf"changed by {OPERATOR.name} .*: it is at revision {revision}, not 0"):
        ops.configure(OPERATOR, None, give={"backend": "nccl"}, if_revision=0)
    ops.configure(OPERATOR, None, give={"backend": "nccl"}, if_revision=revision)
    assert values(world) == {"backend": "nccl"}


def test_of_two_that_change_what_they_have_seen_exactly_one_wins(world: World, ops: Operations) -> None:
    for number in range(10):
        revision = shown(world).cluster.revision
        barrier, results = threading.Barrier(2), []

        def ask(value: int, revision: int = revision, barrier: threading.Barrier = barrier, results: list[Change | None] = results) -> None:
            barrier.wait()
            try:
                results.append(ops.configure(OPERATOR, None, give={"snapshot_every": value}, if_revision=revision))
            except ConflictError:
                results.append(None)

        threads = [threading.Thread(target=ask, args=(2 * number + one,)) for one in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (won,) = (one for one in results if one)
        assert values(world) == won.after


def test_two_that_set_different_names_lose_neither(world: World, ops: Operations) -> None:
    """Each is decided anew on what the other has written."""
    names = ["snapshot_every", "checkpoint_keep_last", "checkpoint_copies", "snapshot_memory_mib"]
    threads = [threading.Thread(target=ops.configure, args=(OPERATOR, None), kwargs={"give": {name: 7}}) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(world) == dict.fromkeys(sorted(names), 7)


def test_two_changes_of_two_keys_that_do_not_fit_together_are_not_both_made(world: World, ops: Operations) -> None:
    """Each of them fits what was there before."""
    asked = [(None, {"process_group_timeout_s": 20}), ("train", {"stop_step_timeout_s": 25})]
    for _ in range(10):
        for job in (None, "train"):
            ops.configure(OPERATOR, job, take=["process_group_timeout_s", "stop_step_timeout_s"])
        barrier, refused = threading.Barrier(2), []

        def ask(job: str | None, give: dict[str, Any], barrier: threading.Barrier = barrier, refused: list[UsageError] = refused) -> None:
            barrier.wait()
            try:
                ops.configure(OPERATOR, job, give=give)
            except UsageError as error:
                refused.append(error)

        threads = [threading.Thread(target=ask, args=one) for one in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 1
        assert shown(world, "train").problems == ()


# --- what counts ---------------------------------------------------------------------------------------------------------


def test_each_setting_is_shown_with_its_origin_and_those_overruled(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, None, give={"snapshot_every": 1, "compress": "fp16"})
    ops.configure(OPERATOR, "train", give={"snapshot_every": 2})
    own = OwnLayers(environ={"ELASTICD_TRAINER_SNAPSHOT_EVERY": "4", "HOME": "/"}, command={"snapshot_every": "5"})
    view = shown(world, "train", with_file(world, {"snapshot_every": 3}, own=own))
    every = setting(view, "snapshot_every")
    assert (every.value, every.origin, every.unit, every.etcd, every.alike) == (5, "command", "steps", True, True)
    assert list(every.layers.items()) == [("etcd:cluster", 1), ("etcd:job", 2), ("file", 3), ("environment", 4), ("command", 5)]
    assert (setting(view, "compress").value, setting(view, "compress").origin) == ("fp16", "etcd:cluster")
    assert (setting(view, "checkpoint_dir").value, setting(view, "checkpoint_dir").etcd) == (None, False)


def test_without_a_job_the_files_of_jobs_do_not_count(world: World, ops: Operations) -> None:
    ops.configure(OPERATOR, "train", give={"snapshot_every": 2})
    view = shown(world, None, with_file(world, {"snapshot_every": 3}))
    assert (setting(view, "snapshot_every").origin, view.own) == ("default", None)


def test_a_time_that_follows_from_the_agents_is_shown_as_a_time(world: World) -> None:
    assert setting(shown(world), "stop_step_timeout_s").value == 0
    assert setting(shown(world, "train"), "stop_step_timeout_s").value == 22.5
    world.board.post(replace(world.board.turn, times=AgentTimes(stop_grace=8)))
    assert setting(shown(world, "train"), "stop_step_timeout_s").value == 6
    with_file(world, {}, stop_grace=4)
    assert setting(shown(world, "train"), "stop_step_timeout_s").value == 3


def test_what_does_not_fit_on_this_node_is_told(world: World) -> None:
    board = with_file(world, {}, own=OwnLayers(environ={"ELASTICD_TRAINER_BAKEND": "gloo"}))
    with pytest.raises(UsageError, match="ELASTICD_TRAINER_BAKEND in the environment names no setting"):
        shown(world, "train", board)


def test_text_that_looks_like_a_number_is_one_only_where_a_number_belongs() -> None:
    assert changed({}, None, {"snapshot_every": "8", "checkpoint_every_s": "8", "snapshots": "1"}, []) == {
        "checkpoint_every_s": 8.0,
        "snapshot_every": 8,
        "snapshots": True,
    }


# --- a real daemon -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
def test_an_agent_is_told_what_the_job_file_says_and_the_api_shows_what_the_agent_will_use(cluster: Cluster) -> None:
    cluster.job("a", more='[trainer]\nbackend = "gloo"\nsnapshot_every = 3\n')
    cluster.start("a", environment={"ELASTICD_TRAINER_SNAPSHOT_EVERY": "4"})
    cluster.await_state("a", "idle")
    api = cluster.api("a")
    api.post("/v1/config/job", {"set": {"backend": "nccl", "checkpoint_keep_last": 7}})
    told = {one["name"]: (one["value"], one["origin"]) for one in api.get("/v1/config/job")["data"]["settings"]}
    assert told["backend"] == ("gloo", "file")
    assert told["snapshot_every"] == (4, "environment")
    assert told["checkpoint_keep_last"] == (7, "etcd:job")
    assert told["stop_step_timeout_s"] == (3.75, "default"), "three quarters of the stop_grace in this daemon's configuration"
    cluster.want()
    config = await_(lambda: agent_told(cluster), within=20, what="an agent")
    assert (config.trainer_file, config.trainer_command) == ({"backend": "gloo", "snapshot_every": 3}, {})


def agent_told(cluster: Cluster) -> AgentConfig | None:
    path = cluster.home("a") / "run/agents/job.json"
    return AgentConfig.read(path) if path.exists() else None


@pytest.mark.timeout(90)
def test_a_job_file_with_a_bad_setting_is_refused_and_says_why(cluster: Cluster) -> None:
    cluster.job("a", more='[trainer]\nbackend = "mpi"\n')
    cluster.start("a")
    why = cluster.await_state("a", "refused")
    assert why.endswith("trainer: backend = 'mpi' in the file is not allowed; give one of auto, gloo, nccl")


def test_a_table_in_a_jobs_file_changes_the_digest_and_none_leaves_it_as_it_always_was() -> None:
    """With another digest an agent is started anew: an upgrade of the daemon is no reason for that."""
    parameters = {"seconds": {"type": "int", "default": 60}}
    spec = JobSpec(name="train", argv=("/bin/sleep", "{seconds}"), max_nodes=2, env={"A": "b"}, stop_grace=5.0, parameters=parameters)  # type: ignore[arg-type]
    assert digest(spec, {"seconds": 30}) == "02a270f2931fdcda"
    tables: list[dict[str, Any]] = [{"snapshot_every": 3}, {"snapshot_every": 4}, {"backend": "gloo"}]
    digests = {digest(spec.model_copy(update={"trainer": table}), {"seconds": 30}) for table in tables}
    assert len({*digests, "02a270f2931fdcda"}) == 4


@pytest.mark.timeout(90)
def test_an_agent_takes_what_operators_have_set_for_all_jobs_and_for_its_own(cluster: Cluster) -> None:
    """Two keys, each with the scope of its own."""
    cluster.job("a")
    cluster.start("a")
    cluster.await_state("a", "idle")
    for path in ("/v1/config", "/v1/config/job"):
        cluster.api("a").post(path, {"set": {"checkpoint_keep_last": 7}})
    cluster.want()
    cluster.await_workers(1, within=40)
    assert not [line for line in (cluster.folder / "logs/job/a/agent.jsonl").read_text().splitlines() if "config/" in line]
