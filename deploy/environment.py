"""The virtual environment of one version: made beside the others, complete before it gets its name.

Owns: building a wheel of this tree, making the environment from it, and telling whether a version that is there is the same. Must not: know units,
configuration or which version is in use (`install` does), or need anything but Python's own library.

A version's directory is never changed. The same version number with other contents (a tree in development) becomes VERSION-2, VERSION-3, …: agents
that run load modules for as long as they live, and must find those they were started with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.errors import ElasticdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUILD_FILE: Final = "elasticd-build.json"
"""In each version: what it was made from."""
_SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "elasticd", "trainer", "detectors")
_PIP: Final = ("-m", "pip", "--disable-pip-version-check")
_AGENT: Final = """#!/bin/sh
# What elasticd-agent@.service runs. The version is named in full: through the link, a later upgrade would mix its modules with ours.
exec {final}/bin/python -P -m elasticd.agent "$@"
"""
# Asked of the new environment itself: does it lack anything that elasticd requires, and is elasticd in it the one just installed?
_CHECK: Final = """
import importlib.metadata, re, sys
import elasticd.cli.main, elasticd.daemon.config
names = [re.match(r"[A-Za-z0-9_.-]+", text)[0] for text in importlib.metadata.requires("elasticd") if "extra ==" not in text]
present = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in importlib.metadata.distributions()}
lacking = [name for name in names if name.lower().replace("_", "-") not in present]
if lacking:
    sys.exit("the environment lacks " + ", ".join(lacking))
if not elasticd.__file__.startswith(sys.prefix + "/"):
    sys.exit("elasticd comes from " + elasticd.__file__)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to make an environment from.

    Attributes:
        root: the source tree.
        python: interpreter, absolute.
        from_venv: environment whose packages are used as they are; None installs all, at the versions of constraints.txt.
        wheel: of elasticd; None builds one from the tree.
        pip_args: passed on to `pip install`.
        shared: name -> text of the files to keep in share/elasticd.
    """

    root: Path
    python: Path
    from_venv: Path | None = None
    wheel: Path | None = None
    pip_args: tuple[str, ...] = ()
    shared: Mapping[str, str]


def provide(versions: Path, final: Path, wanted: Wanted) -> str:
    """Make a version, or find that it is there.

    Args:
        versions: directory to make it in.
        final: the same directory as it will be named when the version is used; another one where a package is made.
        wanted: what to make it from.

    Returns:
        The name of its directory in `versions`.

    Raises:
        UsageError: what is needed is missing.
        ElasticdError: a step failed; its output was shown, and nothing is left of the attempt.
    """
    _check(wanted)
    versions.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elasticd-wheel-") as scratch, tempfile.TemporaryDirectory(prefix=".new-", dir=versions) as place:
        stage = Path(place) / "venv"
        _make_venv(stage, wanted)
        wheel = wanted.wheel or _build_wheel(Path(scratch), stage, wanted)
        made_from = _fingerprint(wheel, wanted)
        name, there = _name(versions, wheel.name.split("-")[1], made_from)
        if there:
            print(f"version {name} is there already")  # noqa: T201 - a command prints
            return name
        _install_packages(stage, wheel, wanted)
        _finish(stage, final / name, made_from, wanted)
        stage.rename(versions / name)
        return name


def found(python: str) -> Path:
    """The interpreter that a name or path means; links are not resolved.

    Raises:
        UsageError: there is none.
    """
    path = shutil.which(python)
    if path is None:
        raise UsageError(f"there is no interpreter {python!r}", remedy="name one: make install PYTHON=/usr/bin/python3")
    return Path(path).absolute()


def check_open_to_all(path: Path, what: str) -> None:
    """Daemon, agents and jobs are other users: all of them must be able to enter every directory on the way.

    Raises:
        UsageError: they are not.
    """
    for parent in path.resolve().parents:
        if parent.exists() and not parent.stat().st_mode & 0o001:
            raise UsageError(f"{what} {path} lies below {parent}, which other users cannot enter", remedy=f"name another {what}")


def run(command: Sequence[str], *, cwd: Path | None = None) -> None:
    """Run a command whose output matters only if it fails.

    Raises:
        ElasticdError: it failed.
    """
    # A PYTHONPATH of the person who installs is not the daemon's.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, end="")  # noqa: T201
        raise ElasticdError(f"{' '.join(command[:6])} … failed with exit code {done.returncode}", remedy="its output is above")


def _check(wanted: Wanted) -> None:
    check_open_to_all(wanted.python, "PYTHON")
    if wanted.wheel is not None and not wanted.wheel.is_file():
        raise UsageError(f"there is no wheel {wanted.wheel}")
    version = _said_by(wanted.python, "import sys; print('%d.%d' % sys.version_info[:2])")
    if not version or tuple(int(part) for part in version.split(".")) < (3, 11):
        raise UsageError(f"{wanted.python} is not Python 3.11 or newer", remedy="name one: make install PYTHON=python3.12")
    if wanted.from_venv is not None:
        _check_other(wanted.from_venv, wanted.python, version)
    elif _said_by(wanted.python, "import ensurepip, venv; print('yes')") != "yes":
        raise UsageError(f"{wanted.python} cannot make virtual environments", remedy="on Debian: apt install python3-venv")


def _check_other(from_venv: Path, python: Path, version: str) -> None:
    other = from_venv / "bin" / "python"
    if not other.exists():
        raise UsageError(f"FROM_VENV {from_venv} is no virtual environment: it has no bin/python")
    check_open_to_all(from_venv / "bin", "FROM_VENV")
    of_other = _said_by(other, "import sys; print('%d.%d' % sys.version_info[:2])")
    if of_other != version:
        raise UsageError(f"FROM_VENV {from_venv} is of Python {of_other}, and {python} is Python {version}", remedy="name a PYTHON of the same version")
    if _said_by(other, "import pip; print('yes')") != "yes":
        raise UsageError(f"FROM_VENV {from_venv} has no pip", remedy=f"{other} -m ensurepip")


def _said_by(python: Path, code: str) -> str:
    done = subprocess.run([python, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _site_packages(environment: Path) -> Path:
    """Where an environment keeps its packages; asked of itself, as its Python may not be ours."""
    told = _said_by(environment / "bin" / "python", "import sysconfig; print(sysconfig.get_path('purelib'))")
    if not told:
        raise ElasticdError(f"{environment} does not say where its packages are")
    return Path(told)


def _make_venv(stage: Path, wanted: Wanted) -> None:
    pip = () if wanted.from_venv is None else ("--without-pip",)
    run([str(wanted.python), "-m", "venv", "--prompt", "elasticd", *pip, str(stage)])


def _pip(stage: Path, wanted: Wanted) -> list[str]:
    """Pip for the new environment: its own, or that of the other one."""
    if wanted.from_venv is None:
        return [str(stage / "bin" / "python"), *_PIP]
    return [str(wanted.from_venv / "bin" / "python"), *_PIP, "--python", str(stage / "bin" / "python")]


def _build_wheel(scratch: Path, stage: Path, wanted: Wanted) -> Path:
    """Build in a copy: setuptools leaves a build directory in the tree, and takes from it what the tree has no longer."""
    copy = scratch / "source"
    copy.mkdir()
    for name in _SOURCES:
        source = wanted.root / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    python = (wanted.from_venv or stage) / "bin" / "python"
    # With a setuptools of its own, as pyproject.toml asks for, the environment builds without a network.
    modern = _said_by(python, "import setuptools; print(int(setuptools.__version__.split('.')[0]) >= 77)") == "True"
    isolation = ["--no-build-isolation"] if modern else []
    run([str(python), *_PIP, "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(scratch), str(copy)])
    return next(scratch.glob("*.whl"))


def _fingerprint(wheel: Path, wanted: Wanted) -> dict[str, str]:
    """What tells two builds apart: contents, not times."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            contents = sorted((item.filename, item.CRC) for item in archive.infolist())
    except zipfile.BadZipFile as error:
        raise UsageError(f"{wheel} is no wheel: {error}") from None
    pins = (wanted.root / "constraints.txt").read_text(encoding="utf-8") if wanted.from_venv is None else ""
    return {
        "contents": _digest(contents),
        "python": str(wanted.python.resolve()),
        "packages": str(wanted.from_venv or ""),
        "pins": _digest(pins),
        "shared": _digest(dict(wanted.shared)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _name(versions: Path, version: str, made_from: dict[str, str]) -> tuple[str, bool]:
    """A name for a build, and whether it is there already."""
    number = 1
    while True:
        name = version if number == 1 else f"{version}-{number}"
        if not (versions / name).exists():
            return name, False
        try:
            if json.loads((versions / name / BUILD_FILE).read_text(encoding="utf-8")) == made_from:
                return name, True
        except (OSError, ValueError):
            pass  # not one of ours, or a broken one: it is left alone
        number += 1


def _install_packages(stage: Path, wheel: Path, wanted: Wanted) -> None:
    pip = [*_pip(stage, wanted), "install", "--quiet", "--no-compile"]
    if wanted.from_venv is None:
        print("installing torch and the rest; this takes minutes")  # noqa: T201
        run([*pip, *wanted.pip_args, "-c", str(wanted.root / "constraints.txt"), f"{wheel}[gpu]"])
        return
    run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)])
    # After pip has run: it would take the other environment's packages for ours. A path in a .pth file comes after our own packages, and the other
    # environment's .pth files are not read, so that an editable elasticd in it stays out of sight.
    (_site_packages(stage) / "elasticd-packages.pth").write_text(f"{_site_packages(wanted.from_venv)}\n", encoding="utf-8")


def _finish(stage: Path, final: Path, made_from: dict[str, str], wanted: Wanted) -> None:
    """Add what pip does not; look whether it is whole; let it name the place where it will be instead of that where it was made."""
    agent = stage / "bin" / "elasticd-agent"
    agent.write_text(_AGENT.format(final=final), encoding="utf-8")
    agent.chmod(0o755)
    share = stage / "share" / "elasticd"
    share.mkdir(parents=True)
    for name, text in wanted.shared.items():
        (share / name).write_text(text, encoding="utf-8")
    (stage / BUILD_FILE).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
    python, packages = str(stage / "bin" / "python"), str(_site_packages(stage))
    run([python, "-B", "-P", "-c", _CHECK], cwd=Path("/"))  # -B: what it compiled would name this place
    if Path("/proc/driver/nvidia").exists() and _said_by(stage / "bin" / "python", "import pynvml; print('yes')") != "yes":
        print("GPUs will not be seen: the environment lacks nvidia-ml-py")  # noqa: T201
    # Root compiles now what those who run it cannot write. What some package has that is no Python is no fault of ours.
    compiling = [python, "-m", "compileall", "-f", "-qq", "-j", "0", "-s", str(stage), "-p", str(final), packages]
    subprocess.run(compiling, stdin=subprocess.DEVNULL, check=False)
    for path in [*(stage / "bin").iterdir(), stage / "pyvenv.cfg"]:
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(os.fsencode(stage), os.fsencode(final)))
