"""What a node says about its code, settings and packages: alike where nodes may train together, different where they may not."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent import fingerprint as module
from elasticd.agent.config import AgentConfig
from elasticd.agent.fingerprint import LONGEST, code_part, config_part, fingerprint, packages_part
from elasticd.agent.settings import OwnLayers
from elasticd.errors import UsageError
from elasticd.rendezvous.keys import checked_name
from trainer.settings import ALIKE, Settings

PYTHON = (sys.executable, "-u")
pytestmark = pytest.mark.timeout(60)


def words(part: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in part.split(" ")) if part else {}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """train.py, which imports a package beside it, and files that it does not import."""
    write(tmp_path, "train.py", "import os, nets.resnet\nfrom data import load\nfrom nets import heads\n")
    write(tmp_path, "data.py", "def load(): import helper\n")
    write(tmp_path, "helper.py", "A = 1\n")
    write(tmp_path, "nets/__init__.py", "from . import parts\n")
    write(tmp_path, "nets/resnet.py", "from .parts import block\nfrom ..nets.deep.er import x\n")
    write(tmp_path, "nets/parts.py", "block = 1\n")
    write(tmp_path, "nets/heads.py", "")
    write(tmp_path, "nets/deep/er.py", "x = 1\n")
    write(tmp_path, "unused.py", "")
    write(tmp_path, "config.yaml", "")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def code(cwd: Path, *argv: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    return words(code_part((*PYTHON, *argv), cwd, env or {}))


def different(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


# --- code ----------------------------------------------------------------------------------------------------------------


def test_the_script_and_what_it_imports_beside_it_are_in_the_fingerprint(project: Path) -> None:
    before = code(project, "train.py")
    assert set(before) == {"script", "modules"}
    assert all(len(digest) == 16 for digest in before.values())
    assert code(project, str(project / "train.py")) == before


@pytest.mark.parametrize("changed", ["data.py", "helper.py", "nets/__init__.py", "nets/resnet.py", "nets/parts.py", "nets/heads.py", "nets/deep/er.py"])
def test_a_module_that_differs_is_named_as_one(project: Path, changed: str) -> None:
    before = code(project, "train.py")
    write(project, changed, (project / changed).read_text() + "# edited\n")
    assert different(before, code(project, "train.py")) == {"modules"}


def test_a_script_that_differs_is_named_as_one(project: Path) -> None:
    before = code(project, "train.py")
    write(project, "train.py", (project / "train.py").read_text() + "# edited\n")
    assert different(before, code(project, "train.py")) == {"script"}


@pytest.mark.parametrize("changed", ["unused.py", "config.yaml"])
def test_a_file_that_nobody_imports_may_differ(project: Path, changed: str) -> None:
    before = code(project, "train.py")
    write(project, changed, "edited")
    assert code(project, "train.py") == before


def test_the_same_files_in_another_directory_are_the_same(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "deeper"
    for path in list(project.rglob("*.py")):
        write(elsewhere, str(path.relative_to(project)), path.read_text())
    assert code(elsewhere, "train.py") == code(project, "train.py") == code(Path("/"), str(elsewhere / "train.py"))


def test_a_module_that_is_missing_on_one_node_differs(project: Path) -> None:
    before = code(project, "train.py")
    (project / "helper.py").unlink()
    assert different(before, code(project, "train.py")) == {"modules"}


def test_modules_that_import_each_other_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.py", "import a")
    write(tmp_path, "a.py", "import b, train")
    write(tmp_path, "b.py", "import a")
    read: list[str] = []
    original = module._read
    monkeypatch.setattr(module, "_read", lambda path: (read.append(path.name), original(path))[1])
    assert set(code(tmp_path, "train.py")) == {"script", "modules"}
    assert sorted(read) == ["a.py", "b.py", "train.py"]


def test_what_is_looked_at_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 3)
    write(tmp_path, "train.py", "import a, b, c, d")
    for name in "abcd":
        write(tmp_path, f"{name}.py", "")
    before = code(tmp_path, "train.py")
    write(tmp_path, "d.py", "edited")
    assert code(tmp_path, "train.py") == before, "the fourth, in an order that is alike everywhere"
    write(tmp_path, "c.py", "edited")
    assert different(before, code(tmp_path, "train.py")) == {"modules"}


def test_a_module_run_by_name_is_found_with_its_package(project: Path) -> None:
    write(project, "nets/__main__.py", "from . import parts\n")
    before, resnet = code(project, "-m", "nets"), code(project, "-m", "nets.resnet")
    assert set(before) == set(resnet) == {"script", "modules"}
    write(project, "nets/parts.py", "edited = 1")
    assert different(before, code(project, "-m", "nets")) == {"modules"}
    assert different(resnet, code(project, "-m", "nets.resnet")) == {"modules"}


def test_modules_in_the_pythonpath_of_the_job_are_seen(project: Path, tmp_path: Path) -> None:
    write(project, "train.py", "import elsewhere")
    write(tmp_path, "lib/elsewhere.py", "")
    env = {"PYTHONPATH": f"relative:{tmp_path}/lib"}
    assert set(code(project, "train.py")) == {"script"}
    before = code(project, "train.py", env=env)
    write(tmp_path, "lib/elsewhere.py", "edited = 1")
    assert different(before, code(project, "train.py", env=env)) == {"modules"}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (("--lr", "0.1"), ("--lr", "0.2"), False),
        (("--lr=0.1",), ("--lr=0.2",), False),
        (("--lr", "0.1"), (), False),
        (("--data", "/srv/a"), ("--data", "/mnt/b"), True),
        (("--data=/srv/a",), ("--data=/mnt/b",), True),
        (("--data=/srv/a",), ("--out=/srv/a",), False),
        (("s3://a/b",), ("s3://c/d",), True),
        (("a", "b"), ("a b",), False),
    ],
)
def test_arguments_count_and_directories_among_them_do_not(project: Path, one: Sequence[str], other: Sequence[str], *, alike: bool) -> None:
    apart = different(code(project, "train.py", *one), code(project, "train.py", *other))
    assert apart == (set() if alike else {"arguments"})


def test_options_of_the_interpreter_do_not_count(project: Path) -> None:
    assert words(code_part((sys.executable, "train.py"), project, {})) == code(project, "train.py")


def test_a_command_without_python_is_known_by_its_program(tmp_path: Path) -> None:
    write(tmp_path, "run.sh", "#!/bin/sh\nexec true\n")
    before = words(code_part((str(tmp_path / "run.sh"), "3"), tmp_path, {}))
    assert set(before) == {"script", "arguments"}
    write(tmp_path, "run.sh", "#!/bin/sh\nexec false\n")
    assert different(before, words(code_part((str(tmp_path / "run.sh"), "3"), tmp_path, {}))) == {"script"}


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to(path)])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, make: Any) -> None:
    """A missing script is the workers' failure to tell; a pipe must not keep the agent."""
    make(tmp_path / "train.py")
    assert code_part((*PYTHON, "train.py"), tmp_path, {}) == ""


@pytest.mark.parametrize("text", ["def broken(:\n", "\0", "\udcff", 'a = "\\d"\n', "(" * 5000])
def test_a_source_that_does_not_parse_is_hashed_all_the_same(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert set(code(tmp_path, "train.py")) == {"script"}


# --- config --------------------------------------------------------------------------------------------------------------


def test_what_a_node_fixes_itself_is_named_with_its_value() -> None:
    own = OwnLayers(
        file={"backend": "gloo", "checkpoint_every_s": 300, "checkpoint_dir": "/srv"},
        environ={"ELASTICD_TRAINER_SNAPSHOTS": "no", "ELASTICD_TRAINER_BACKEND": "nccl"},
        command={"compress": "bf16"},
    )
    assert config_part(own) == "backend=nccl checkpoint_every_s=300 compress=bf16 snapshots=false"


def test_a_node_that_fixes_nothing_says_so() -> None:
    """Else a node that does would have nobody to differ from."""
    assert config_part(OwnLayers()) == config_part(OwnLayers(file={"checkpoint_dir": "/srv", "gloo_interface": "eth0"})) == "-"


def test_text_and_number_that_mean_the_same_are_the_same() -> None:
    assert config_part(OwnLayers(file={"checkpoint_every_s": 300})) == config_part(OwnLayers(command={"checkpoint_every_s": "3e2"}))


def test_a_url_is_told_apart_and_not_told() -> None:
    one, other = (config_part(OwnLayers(file={"checkpoint_url": f"s3://{bucket}/x"})) for bucket in ("a", "b"))
    assert one != other
    assert "s3" not in one


def test_many_settings_become_one_digest() -> None:
    everything = {name: str(getattr(Settings(), name)).lower() for name in ALIKE - {"checkpoint_url"}}
    part = config_part(OwnLayers(command=everything))
    assert len(part) == 16
    assert part != config_part(OwnLayers(command=everything | {"backend": "gloo"}))


def test_a_setting_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(UsageError, match="backend = 'mpi' in the file is not allowed"):
        config_part(OwnLayers(file={"backend": "mpi"}))


# --- packages ------------------------------------------------------------------------------------------------------------


def test_the_packages_of_our_own_interpreter_are_those_that_we_have() -> None:
    found = words(packages_part(PYTHON, os.environ))
    release = ".".join(platform.python_version_tuple()[:2])
    assert found == {"python": release, "torch": version("torch"), "numpy": version("numpy"), "elasticd": version("elasticd")}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Another virtual environment, as far as one is looked at: nothing in it can be run."""
    packages = tmp_path / "venv/lib/python3.12/site-packages"
    for name, number in (("torch", "2.12.0+cu128"), ("numpy", "2.1.0")):
        write(packages, f"{name}-{number}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    write(tmp_path, "venv/pyvenv.cfg", "version = 3.12.4\n")
    write(tmp_path, "base/bin/python3.12", "")
    (tmp_path / "base/bin/python3.12").chmod(0o755)
    (tmp_path / "base/lib/python3.12/site-packages").mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/python").symlink_to(tmp_path / "base/bin/python3.12")
    return tmp_path / "venv"


def test_the_packages_of_the_workers_interpreter_count_not_ours(environment: Path) -> None:
    part = packages_part((str(environment / "bin/python"), "train.py"), os.environ)
    assert part == "python=3.12 torch=2.12.0+cu128 numpy=2.1.0"


def test_the_interpreter_is_found_behind_other_programs_and_in_a_first_line(environment: Path, tmp_path: Path) -> None:
    expected = packages_part((str(environment / "bin/python"),), os.environ)
    path = {"PATH": f"{environment}/bin:/usr/bin:/bin"}
    assert packages_part(("/usr/bin/env", "A=1", "python", "train.py"), path) == expected
    write(tmp_path, "tool", f"#!{environment}/bin/python -u\n")
    (tmp_path / "tool").chmod(0o755)
    assert packages_part((str(tmp_path / "tool"), "x"), path) == expected


@pytest.mark.parametrize("argv", [("/bin/sleep", "1"), ("/nowhere/python", "x"), ("nowhere",)])
def test_a_command_that_no_python_runs_has_no_packages(argv: tuple[str, ...]) -> None:
    assert packages_part(argv, {"PATH": "/usr/bin:/bin"}) == ""


# --- all of it -----------------------------------------------------------------------------------------------------------


def told(project: Path, **more: Any) -> AgentConfig:
    values: dict[str, Any] = {"job": "job", "node": "a", "argv": [*PYTHON, "train.py", "--lr", "0.1"], "cwd": project, "log_dir": "/logs"}
    return AgentConfig.model_validate({**values, "endpoints": ["127.0.0.1:1"], "max_nodes": 1, "desired": 1, **more})


def test_a_fingerprint_fits_into_a_members_record(project: Path) -> None:
    found = fingerprint(told(project), {})
    assert set(found) == {"config", "code", "packages"}
    for name, part in found.items():
        assert checked_name("part", name)
        assert 0 < len(part) <= LONGEST
        assert part.isprintable()


def test_two_nodes_that_were_told_the_same_have_the_same_fingerprint(project: Path) -> None:
    assert fingerprint(told(project), {"HOME": "/a"}) == fingerprint(told(project, node="b", log_dir="/other"), {"HOME": "/b"})


@pytest.mark.parametrize(("more", "part"), [({"trainer_file": {"compress": "fp16"}}, "config"), ({"argv": [*PYTHON, "train.py", "--lr", "0.2"]}, "code")])
def test_a_node_that_was_told_something_else_differs_in_that_part(project: Path, more: dict[str, Any], part: str) -> None:
    assert different(fingerprint(told(project), {}), fingerprint(told(project, **more), {})) == {part}


def test_a_job_that_is_no_python_has_no_packages_and_no_empty_parts(tmp_path: Path) -> None:
    assert fingerprint(told(tmp_path, argv=["/nowhere/program"]), {}) == {"config": "-"}
