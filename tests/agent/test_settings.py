"""Settings of training as one agent has them: its layers, its own times, and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.agent.settings import OwnLayers, parse_settings, resolve
from elasticd.errors import UsageError
from elasticd.rendezvous.records import ConfigRecord
from trainer.settings import Backend

pytestmark = pytest.mark.timeout(30)


def told(**more: Any) -> AgentConfig:
    least: dict[str, Any] = {"job": "job", "node": "a", "argv": ["true"], "cwd": "/", "log_dir": "/logs", "endpoints": ["127.0.0.1:1"]}
    return AgentConfig.model_validate({**least, "max_nodes": 1, "desired": 1, **more})


def record(**values: Any) -> ConfigRecord:
    return ConfigRecord(scope="default", values=values)


def test_each_layer_that_an_agent_knows_counts_in_its_place() -> None:
    config = told(trainer_file={"snapshot_every": 3, "checkpoint_dir": "/srv"}, trainer_command={"checkpoint_keep_last": "5"})
    cluster, job = record(backend="gloo", compress="fp16", snapshot_every=1), record(compress="bf16")
    settings, origins = resolve(config, cluster, job, {"ELASTICD_TRAINER_SNAPSHOTS": "no", "PATH": "/bin"})
    assert (settings.backend, settings.compress, settings.snapshot_every, settings.snapshots, settings.checkpoint_keep_last) == ("gloo", "bf16", 3, False, 5)
    assert {name: origin for name, origin in origins.items() if origin != "default"} == {
        "backend": "etcd:cluster",
        "compress": "etcd:job",
        "snapshot_every": "file",
        "checkpoint_dir": "file",
        "snapshots": "environment",
        "checkpoint_keep_last": "command",
    }


def test_what_the_daemon_hands_over_survives_being_written_as_json() -> None:
    config = told(trainer_file={"snapshots": True, "snapshot_every": 1, "checkpoint_every_s": 1.0, "backend": "gloo"}, trainer_command={"snapshot_every": "1"})
    again = AgentConfig.model_validate_json(config.model_dump_json())
    assert [(value, type(value)) for value in again.trainer_file.values()] == [(True, bool), (1, int), (1.0, float), ("gloo", str)]
    assert resolve(again, None, None, {}) == resolve(config, None, None, {})


@pytest.mark.parametrize(("stop_grace", "timeout", "share"), [(40.0, 600.0, 30.0), (30.0, 20.0, 15.0), (0.0, 600.0, 0.0)])
def test_the_time_for_a_last_step_is_a_share_of_what_there_is(stop_grace: float, timeout: float, share: float) -> None:
    """Unless somebody says otherwise; and it fits whatever the agent's times are."""
    settings, origins = resolve(told(stop_grace=stop_grace), record(process_group_timeout_s=timeout), None, {})
    assert (settings.stop_step_timeout_s, origins["stop_step_timeout_s"]) == (share, "default")


@pytest.mark.parametrize(
    ("config", "cluster", "said"),
    [
        (
            {"stop_grace": 10, "trainer_file": {"stop_step_timeout_s": 10}},
            {},
            "stop_step_timeout_s 10 < stop_grace 10 does not hold: workers would be killed on their way to a common stop; stop_step_timeout_s is from file;",
        ),
        (
            {"ttl": 60},
            {"process_group_timeout_s": 60},
            "ttl 60 < process_group_timeout_s 60 does not hold: workers would fail before the loss of a node is known; process_group_timeout_s is from etcd",
        ),
        (
            {},
            {"checkpoint_shared": True},
            "checkpoint_shared needs checkpoint_dir; checkpoint_shared is from etcd:cluster; name the shared directory in [trainer] of the job file",
        ),
        ({"trainer_file": {"backend": "mpi"}}, {}, "backend = 'mpi' in the file is not allowed; give one of auto, gloo, nccl"),
        ({"trainer_command": {"snapshots": "maybe"}}, {}, "snapshots = 'maybe' on the command line is not allowed; give true or false"),
        ({}, {"gloo_interface": "eth0"}, "gloo_interface = 'eth0' in etcd (config/cluster): etcd may hold numbers"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(config: dict[str, Any], cluster: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(told(**config), record(**cluster), None, {})
    assert str(caught.value).startswith(said)


def test_a_variable_that_names_no_setting_is_refused() -> None:
    with pytest.raises(UsageError, match="ELASTICD_TRAINER_BAKEND in the environment names no setting; did you mean ELASTICD_TRAINER_BACKEND"):
        resolve(told(), None, None, {"ELASTICD_TRAINER_BAKEND": "gloo"})


def test_etcd_may_hold_a_word_of_a_list_and_nothing_that_a_path_needs() -> None:
    """The record itself refuses it, whatever a setting's name."""
    for value in ("/srv", "s3://bucket", "a b", ""):
        with pytest.raises(ValueError, match="values"):
            record(backend=value)


def test_settings_of_a_command_line_are_looked_at_at_once() -> None:
    assert parse_settings(["backend=gloo", "checkpoint_url=s3://a/b?c=d"], "--trainer") == {"backend": "gloo", "checkpoint_url": "s3://a/b?c=d"}
    for texts, said in (
        (["backend"], "--trainer 'backend' is not NAME=VALUE"),
        (["=gloo"], "--trainer '=gloo' is not NAME=VALUE"),
        (["backend=gloo", "backend=nccl"], "--trainer backend is given twice"),
        (["bakend=gloo"], "'bakend' on the command line is no setting; did you mean backend?"),
    ):
        with pytest.raises(UsageError) as caught:
            parse_settings(texts, "--trainer")
        assert str(caught.value).startswith(said)


def test_layers_of_a_node_know_their_order() -> None:
    own = OwnLayers(file={"backend": "gloo"}, environ={"ELASTICD_TRAINER_BACKEND": "nccl"}, command={"backend": "auto"})
    assert [(layer, values["backend"]) for layer, values in own.layers] == [("file", "gloo"), ("environment", "nccl"), ("command", "auto")]
    assert Backend("auto") is resolve(told(trainer_file=own.file, trainer_command=own.command), None, None, own.environ)[0].backend
