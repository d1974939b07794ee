"""What is installed: the command, torchrun's entry point, the types, and the versions that were tested."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

import elasticd

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    requirement.name.lower().replace("_", "-"): str(requirement.specifier).removeprefix("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def direct_requirements() -> list[str]:
    """Names of what `make setup` asks for: the dependencies, and the extras local and dev, where their markers hold."""
    extras = PROJECT["optional-dependencies"]
    requirements = [Requirement(text) for text in [*PROJECT["dependencies"], *extras["local"], *extras["dev"]]]
    return [r.name.lower() for r in requirements if r.marker is None or r.marker.evaluate(default_environment())]


def test_the_installed_version_is_that_of_the_source() -> None:
    assert metadata.version("elasticd") == elasticd.__version__


def test_elasticctl_is_installed_as_a_command() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="elasticctl")
    assert callable(script.load())


def test_torchrun_finds_the_etcd_v3_rendezvous() -> None:
    """As torch does it: load the object, call it with no argument, register what it returns as the creator."""
    (handler,) = metadata.entry_points(group="torchrun.handlers", name="etcd-v3")
    assert callable(handler.load()())


@pytest.mark.parametrize("name", direct_requirements())
def test_the_installed_version_of_a_dependency_is_the_pinned_one(name: str) -> None:
    assert metadata.version(name).partition("+")[0] == PINS[name]


def test_every_pin_names_one_public_version() -> None:
    """A local version such as +cpu would keep the pins from installing on a machine with a GPU."""
    assert {name: pin for name, pin in PINS.items() if not re.fullmatch(r"[0-9][0-9a-z.]*", pin)} == {}


@pytest.mark.parametrize("package", ["elasticd", "trainer", "detectors"])
def test_a_package_tells_type_checkers_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
