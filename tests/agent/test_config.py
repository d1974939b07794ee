"""What an agent's configuration takes and refuses, in one line each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

LEAST: dict[str, Any] = {
    "job": "job",
    "node": "a",
    "argv": ["true"],
    "cwd": "/",
    "log_dir": "/logs",
    "endpoints": ["127.0.0.1:1"],
    "max_nodes": 1,
    "desired": 1,
}


def read(tmp_path: Path, **more: Any) -> AgentConfig:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**LEAST, **more}))
    return AgentConfig.read(path)


def test_what_a_daemon_adds_is_off_unless_it_is_given(tmp_path: Path) -> None:
    """Workers are who the agent is, and see what it sees."""
    config = read(tmp_path)
    assert (config.user, config.env, config.devices, config.cpus, config.result_file, config.report_file) == (None, {}, (), (), None, None)


def test_a_configuration_survives_being_written_and_read(tmp_path: Path) -> None:
    """As the daemon hands it over."""
    config = read(
        tmp_path,
        nproc=2,
        user="train",
        env={"A.B": "c=d\n", "EMPTY": ""},
        devices=["GPU-1f0e2f9c-0001", "MIG-GPU-5a/1/0"],
        cpus=[[0, 1], []],
        result_file="/run/r.json",
        report_file="/run/reports/job.json",
    )
    again = tmp_path / "again.json"
    again.write_text(config.model_dump_json())
    assert AgentConfig.read(again) == config


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"nproc": 2, "devices": ["GPU-a"]}, "2 workers need a device each, 1 were given"),
        ({"nproc": 2, "devices": ["GPU-a", "GPU-a"]}, "devices GPU-a, GPU-a are not unique"),
        ({"devices": ["GPU-a,GPU-b"]}, "devices.0: "),
        ({"nproc": 2, "cpus": [[0]]}, "cpus are given for 1 of 2 workers"),
        ({"cpus": [[-1]]}, "cpus.0.0: "),
        ({"env": {"A=B": "x"}}, "env.A=B.[key]: "),
        ({"env": {"A": "x\0"}}, "env.A: "),
        ({"user": ""}, "user: "),
    ],
)
def test_values_that_do_not_fit_are_named(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    """File, key and what is wrong."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, **more)
    assert str(caught.value).startswith(f"{tmp_path / 'agent.json'}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_devices_than_workers_are_allowed(tmp_path: Path) -> None:
    """One worker may use two."""
    assert read(tmp_path, nproc=1, devices=["GPU-a", "GPU-b"]).devices == ("GPU-a", "GPU-b")
