"""The configuration files that are installed: the project's own loaders take them, and each default that they show is the true one."""

from __future__ import annotations

import os
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from elasticd.daemon.config import DaemonConfig
from elasticd.daemon.jobs import JobSpec, command, load_jobs
from tests.deploy.installation import ROOT

CONFIG = (ROOT / "deploy" / "systemd" / "elasticd.toml").read_text()
JOB = (ROOT / "deploy" / "systemd" / "jobs.d" / "example.toml.disabled").read_text()


def everything(text: str) -> str:
    """With every commented setting put into force: a line of "#" and a letter, or of "#" and a table."""
    return re.sub(r"^#(?=[a-z\[])", "", text, flags=re.MULTILINE)


def flat(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every setting, "table.name", with its default; None where it has none of its own, undefined where it must be given."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= flat(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.get_default(call_default_factory=True)
    return found


def given(document: dict[str, Any], model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every setting of a file by the same names."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        field = model.model_fields.get(name)
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= given(value, inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def as_in_a_file(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path | StrEnum) else value


def read(tmp_path: Path, text: str) -> DaemonConfig:
    path = tmp_path / "elasticd.toml"
    path.write_text(text)
    return DaemonConfig.read(path)


def has_own_default(value: Any) -> bool:
    return value is not None and value is not PydanticUndefined and value not in ({}, ())


# --- elasticd.toml -------------------------------------------------------------------------------------------------------


def test_the_configuration_as_installed_is_nothing_but_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, CONFIG) == read(tmp_path, '[etcd]\nendpoints = ["127.0.0.1:2379"]\n')


def test_all_of_it_together_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/etc/credstore")
    config = read(tmp_path, everything(CONFIG))
    assert config.labels == {"rack": "b7"}
    assert (config.peer.listen, config.peer.key) == ("0.0.0.0:9465", Path("/etc/credstore/elasticd.peer.key"))


def test_every_setting_of_the_schema_is_shown_and_no_other() -> None:
    assert given(tomllib.loads(everything(CONFIG)), DaemonConfig).keys() == flat(DaemonConfig).keys()


@pytest.mark.parametrize(("name", "default"), [pair for pair in flat(DaemonConfig).items() if has_own_default(pair[1])])
def test_a_default_that_is_shown_is_the_true_one(name: str, default: Any) -> None:
    shown = given(tomllib.loads(everything(CONFIG)), DaemonConfig)[name]
    assert (shown, type(shown)) == (as_in_a_file(default), type(as_in_a_file(default)))


@pytest.mark.parametrize("name", [name for name, default in flat(DaemonConfig).items() if not has_own_default(default) and name != "etcd.endpoints"])
def test_a_setting_without_a_default_of_its_own_is_called_an_example(name: str) -> None:
    """The paragraph of comment and settings that it stands in says so; a table's says it before the table."""
    key = name.rpartition(".")[2]
    table = name.rpartition(".")[0]
    section = CONFIG[CONFIG.index(f"\n[{table}]") :] if table else CONFIG
    before = section[: re.search(rf"^#\[?{key}\b", section, flags=re.MULTILINE).start()]  # type: ignore[union-attr]
    comment = [line for line in before.splitlines() if line.startswith("# ")][-1]
    assert comment.endswith("Example:")


# --- a job's file --------------------------------------------------------------------------------------------------------


def here(text: str, folder: Path) -> str:
    """The same for this machine: its interpreter and user, which must exist where a file is believed."""
    program = folder / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return text.replace("/srv/train/venv/bin/python", str(program)).replace('"trainer"', '"nobody"').replace("/usr/bin/nvidia-smi", str(program))


@pytest.mark.parametrize("change", [str, everything], ids=["as installed", "with everything"])
def test_the_example_of_a_job_is_one_that_the_daemon_believes(tmp_path: Path, change: Any) -> None:
    folder = tmp_path / "jobs.d"
    folder.mkdir(mode=0o755)
    (folder / "digits.toml").write_text(here(change(JOB), tmp_path))
    (folder / "digits.toml").chmod(0o644)
    files = load_jobs(folder, owner=os.geteuid())
    assert files.refused == ()
    spec = files.jobs["digits"]
    assert command(spec, {"epochs": 20})[-2:] == ("--epochs", "20")
    assert command(spec, {})[-2:] == ("--epochs", "15")
    assert (spec.min_nodes, spec.max_nodes, spec.user) == (1, 10, "nobody")


def test_the_example_as_installed_is_no_job_yet() -> None:
    """Its name does not end in .toml."""
    assert [path.name for path in (ROOT / "deploy" / "systemd" / "jobs.d").iterdir()] == ["example.toml.disabled"]


def test_every_setting_of_a_job_is_shown_and_no_other() -> None:
    assert tomllib.loads(everything(JOB)).keys() == JobSpec.model_fields.keys()


@pytest.mark.parametrize(("name", "default"), [pair for pair in flat(JobSpec).items() if has_own_default(pair[1])])
def test_a_jobs_default_that_is_shown_is_the_true_one(name: str, default: Any) -> None:
    assert tomllib.loads(everything(JOB))[name] == as_in_a_file(default)


def test_a_job_that_says_only_what_it_must_is_otherwise_as_shown() -> None:
    """What the example puts into force and need not: env, parameters, user."""
    needed = {name for name, field in JobSpec.model_fields.items() if field.is_required()}
    assert tomllib.loads(JOB).keys() - needed == {"env", "parameters", "user"}
