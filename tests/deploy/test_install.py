"""`make install`: what goes where, that installing again and upgrading lose nothing, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import elasticd
from deploy import environment
from tests.deploy.installation import PREFIX, ROOT, Installation, in_venv

VERSION = elasticd.__version__


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def reversioned(wheel: Path, folder: Path, version: str) -> Path:
    """The same wheel as another version."""
    target = folder / wheel.name.replace(VERSION, version)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        for item in source.infolist():
            name = item.filename.replace(f"elasticd-{VERSION}.dist-info", f"elasticd-{version}.dist-info")
            content = source.read(item)
            if name.endswith("METADATA"):
                content = content.replace(f"\nVersion: {VERSION}\n".encode(), f"\nVersion: {version}\n".encode())
            if name.endswith("RECORD"):
                content = re.sub(rb",sha256=[^,]*,\d*", b",,", content.replace(f"elasticd-{VERSION}.dist".encode(), f"elasticd-{version}.dist".encode()))
            copy.writestr(name, content)
    return target


# --- where things are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/systemd/system/elasticd.service",
        "/usr/lib/systemd/system/elasticd-agent@.service",
        "/usr/lib/systemd/system/elasticd.slice",
        "/usr/lib/sysusers.d/elasticd.conf",
        "/usr/lib/tmpfiles.d/elasticd.conf",
        "/usr/share/polkit-1/rules.d/50-elasticd.rules",
        "/etc/elasticd/elasticd.toml",
        "/etc/elasticd/jobs.d/example.toml.disabled",
        f"/opt/elasticd/versions/{VERSION}/share/elasticd/elasticd.toml",
        f"/opt/elasticd/versions/{VERSION}/share/elasticd/operations.md",
    ],
)
def test_a_file_is_in_its_place_readable_by_all_and_made_for_the_prefix(installed: Installation, path: str) -> None:
    file = installed.at(path)
    assert mode(file) == 0o644
    assert "@PREFIX@" not in file.read_text()


def test_nothing_else_is_outside_the_prefix(installed: Installation) -> None:
    files = {f"/{path.relative_to(installed.destdir)}" for path in installed.destdir.rglob("*") if not path.is_dir() or path.is_symlink()}
    outside = {path for path in files if not path.startswith("/opt/elasticd/versions/")}
    assert outside == {
        "/opt/elasticd/current",
        "/usr/bin/elasticd",
        "/usr/bin/elasticctl",
        "/usr/lib/systemd/system/elasticd.service",
        "/usr/lib/systemd/system/elasticd-agent@.service",
        "/usr/lib/systemd/system/elasticd.slice",
        "/usr/lib/sysusers.d/elasticd.conf",
        "/usr/lib/tmpfiles.d/elasticd.conf",
        "/usr/share/polkit-1/rules.d/50-elasticd.rules",
        "/etc/elasticd/elasticd.toml",
        "/etc/elasticd/jobs.d/example.toml.disabled",
    }


def test_every_directory_can_be_entered_by_all(installed: Installation) -> None:
    closed = [path for path in installed.destdir.rglob("*") if path.is_dir() and not path.is_symlink() and mode(path) & 0o005 != 0o005]
    assert closed == []


@pytest.mark.parametrize("command", ["elasticd", "elasticctl"])
def test_a_command_is_a_link_through_current(installed: Installation, command: str) -> None:
    link = installed.at(f"/usr/bin/{command}")
    assert str(link.readlink()) == f"/opt/elasticd/current/bin/{command}"
    assert mode(installed.current / "bin" / command) & 0o555 == 0o555


def test_current_is_a_relative_link_to_the_version(installed: Installation) -> None:
    assert str(installed.current.readlink()) == f"versions/{VERSION}"


def test_nothing_in_the_environment_names_the_place_where_it_was_made(installed: Installation) -> None:
    stage = str(installed.destdir).encode()
    named = [path for path in installed.current.resolve().rglob("*") if path.is_file() and not path.is_symlink() and stage in path.read_bytes()]
    assert named == []


@pytest.mark.parametrize("command", ["elasticd", "elasticctl"])
def test_a_command_names_the_version_in_full(installed: Installation, command: str) -> None:
    """Through the link, a process would take modules of two versions after an upgrade."""
    first = (installed.current / "bin" / command).read_text().splitlines()[0]
    assert first.startswith(f"#!{PREFIX}/versions/{VERSION}/bin/python")


def test_the_agents_command_names_the_version_in_full(installed: Installation) -> None:
    script = installed.current / "bin" / "elasticd-agent"
    assert mode(script) == 0o755
    assert script.read_text().splitlines()[-1] == f'exec {PREFIX}/versions/{VERSION}/bin/python -P -m elasticd.agent "$@"'


# --- what is in the environment ------------------------------------------------------------------------------------------


def test_the_installed_modules_are_the_versions_own_not_those_of_the_source_tree(installed: Installation) -> None:
    told = installed.python("-c", "import elasticd, elasticd.agent, trainer; print(elasticd.__file__)")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(str(installed.at(PREFIX)))


def test_the_packages_of_the_other_environment_are_found(installed: Installation) -> None:
    told = installed.python("-c", "import pydantic; print(pydantic.__file__)")
    assert told.stdout.startswith(str(in_venv()))


def test_the_commands_work(installed: Installation) -> None:
    assert installed.python("-m", "elasticd.cli", "--version").stdout == f"elasticctl {VERSION}\n"
    assert installed.python("-m", "elasticd.daemon", "version").stdout == f"elasticd {VERSION}\n"


def test_modules_are_compiled_since_those_who_run_them_cannot_write_there(installed: Installation) -> None:
    sources = list(installed.current.resolve().glob("lib/python*/site-packages/elasticd/**/*.py"))
    tag = sys.implementation.cache_tag
    assert [path for path in sources if not (path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc").exists()] == []
    assert len(sources) > 30


def test_building_leaves_the_source_tree_as_it_was(tmp_path: Path) -> None:
    """setuptools would leave a build directory, and put modules from it into later wheels that the tree has no longer."""
    tree, scratch = tmp_path / "tree", tmp_path / "scratch"
    scratch.mkdir()
    for name in environment._SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree)
    before = sorted(tree.rglob("*"))
    built = environment._build_wheel(scratch, scratch, environment.Wanted(root=tree, python=Path(sys.executable), from_venv=in_venv(), shared={}))
    assert built.name == f"elasticd-{VERSION}-py3-none-any.whl"
    assert sorted(tree.rglob("*")) == before


# --- again, and another one ----------------------------------------------------------------------------------------------


def test_installing_twice_keeps_the_version_and_a_changed_configuration(tmp_path: Path, wheel: Path) -> None:
    installation = Installation(tmp_path)
    assert installation.install("--wheel", str(wheel)).returncode == 0
    config = installation.at("/etc/elasticd/elasticd.toml")
    config.write_text("# mine\n")
    built = installation.current.resolve().stat().st_ino
    again = installation.install("--wheel", str(wheel))
    assert again.returncode == 0, again.stderr
    assert f"version {VERSION} is there already" in again.stdout
    assert "kept /etc/elasticd/elasticd.toml" in again.stdout
    assert config.read_text() == "# mine\n"
    assert installation.current.resolve().stat().st_ino == built
    assert [path.name for path in installation.at(PREFIX / "versions").iterdir()] == [VERSION]


def test_an_upgrade_turns_the_link_and_leaves_the_old_version_whole(tmp_path: Path, wheel: Path) -> None:
    installation = Installation(tmp_path / "root")
    assert installation.install("--wheel", str(wheel)).returncode == 0
    done = installation.install("--wheel", str(reversioned(wheel, tmp_path, "99.1.0")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(installation.current.readlink()) == "versions/99.1.0"
    code = "from importlib.metadata import version; print(version('elasticd'))"
    assert installation.python("-c", code).stdout == "99.1.0\n"
    old = installation.at(PREFIX / "versions" / VERSION / "bin" / "python")
    assert subprocess.run([old, "-P", "-c", code], cwd="/", capture_output=True, text=True).stdout == f"{VERSION}\n"
    assert json.loads((installation.current / "elasticd-build.json").read_text())["packages"] == str(in_venv())


def test_other_contents_under_the_same_version_get_a_name_of_their_own(tmp_path: Path, wheel: Path) -> None:
    """A tree in development: the agents that run must find the modules they were started with."""
    installation = Installation(tmp_path / "root")
    assert installation.install("--wheel", str(wheel)).returncode == 0
    changed = tmp_path / wheel.name
    changed.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("elasticd/added.py", "here = True\n")
    assert installation.install("--wheel", str(changed)).returncode == 0
    assert str(installation.current.readlink()) == f"versions/{VERSION}-2"
    assert installation.python("-c", "import elasticd.added").returncode == 0
    assert not list(installation.at(PREFIX / "versions" / VERSION).glob("lib/python*/site-packages/elasticd/added.py"))


def test_uninstalling_leaves_the_configuration_and_nothing_else(tmp_path: Path, wheel: Path) -> None:
    installation = Installation(tmp_path)
    assert installation.install("--wheel", str(wheel)).returncode == 0
    assert installation.uninstall().returncode == 0
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert left == ["etc/elasticd/elasticd.toml", "etc/elasticd/jobs.d/example.toml.disabled"]
    assert not installation.at(PREFIX).exists()
    assert installation.uninstall().returncode == 0


# --- what it refuses -----------------------------------------------------------------------------------------------------


def test_a_failed_installation_leaves_the_version_in_use_alone(tmp_path: Path, wheel: Path) -> None:
    installation = Installation(tmp_path / "root")
    assert installation.install("--wheel", str(wheel)).returncode == 0
    broken = tmp_path / wheel.name.replace(VERSION, "99.2.0")
    broken.write_bytes(wheel.read_bytes()[:2000] + b"\0" * 100)
    done = installation.install("--wheel", str(broken))
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert str(installation.current.readlink()) == f"versions/{VERSION}"
    assert [path.name for path in installation.at(PREFIX / "versions").iterdir()] == [VERSION]


def test_a_command_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    theirs = installation.at("/usr/bin/elasticctl")
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    done = installation.install()
    assert done.returncode == 2
    assert done.stderr == f"error: {theirs} is there, and is not ours; remove it, or install with the PREFIX that it belongs to\n"
    assert theirs.read_text() == "theirs"


def test_an_interpreter_that_others_cannot_run_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python3"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.install", "--destdir", str(tmp_path / "root"), "--python", str(python), "install"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: PYTHON \S+ lies below \S+, which other users cannot enter; name another PYTHON\n", done.stderr)


def test_an_environment_of_another_kind_is_refused(tmp_path: Path) -> None:
    done = Installation(tmp_path).install("--from-venv", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "is no virtual environment: it has no bin/python" in done.stderr


def test_a_relative_prefix_is_refused(tmp_path: Path) -> None:
    done = Installation(tmp_path).install("--prefix", "opt")
    assert (done.returncode, done.stderr) == (2, "error: PREFIX 'opt' is not an absolute path\n")
