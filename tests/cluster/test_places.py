"""Project and environment are shown on hosts where neither a host nor a unit on it hides them, wherever they lie."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cluster import hosts, places
from tests.cluster.places import ENVIRONMENT, PROJECT, hidden, moves, placed

BASE = Path("/usr")


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/run/user/0", "/var/tmp", "/root", "/home/ci", "/srv", "/builds/a b,c:d"])
def test_a_project_is_seen_at_the_same_place_wherever_it_lies(folder: str) -> None:
    root = Path(folder, "elasticd")
    among = moves(root, root / ".venv", BASE)
    assert placed(root, among) == PROJECT
    assert placed(root / "tests" / "x.py", among) == PROJECT / "tests" / "x.py"
    assert placed(root / ".venv" / "bin" / "python", among) == ENVIRONMENT / "bin" / "python"


def test_an_environment_outside_the_project_is_seen_at_the_same_place_as_one_inside() -> None:
    among = moves(Path("/work/elasticd"), Path("/tmp/venv"), BASE)
    assert placed(Path("/tmp/venv/bin/python"), among) == ENVIRONMENT / "bin" / "python"
    assert placed(Path("/work/elasticd/.venv/bin/python"), among) == PROJECT / ".venv" / "bin" / "python"


def test_a_project_inside_the_environment_is_told_apart_from_it() -> None:
    among = moves(Path("/venv/src/elasticd"), Path("/venv"), BASE)
    assert placed(Path("/venv/src/elasticd/Makefile"), among) == PROJECT / "Makefile"
    assert placed(Path("/venv/bin/python"), among) == ENVIRONMENT / "bin" / "python"


def test_what_is_installed_is_seen_where_it_lies() -> None:
    among = moves(Path("/work/elasticd"), BASE, BASE)
    assert placed(Path("/usr/bin/python3"), among) == Path("/usr/bin/python3")
    assert placed(Path("/work/elasticd2"), among) == Path("/work/elasticd2")


def test_no_place_is_hidden_from_a_unit_but_what_a_host_has_of_its_own_is() -> None:
    """A unit hides by PrivateTmp= and ProtectHome=."""
    for place, folder in itertools.product((PROJECT, ENVIRONMENT), ("/tmp", "/var/tmp", "/run", "/home", "/root", "/dev", "/proc", "/sys")):
        assert not place.is_relative_to(folder)
    paths = [Path(path) for path in ("/usr", "/usr/local/bin", "/opt/py", "/var/tmp/py/bin", "/tmp/py", "/tmpfs", "/run/py", ENVIRONMENT)]
    assert [str(path) for path in hidden(paths)] == ["/var/tmp/py/bin", "/tmp/py", "/run/py", str(ENVIRONMENT)]


def test_a_python_that_no_host_could_see_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "installation", lambda: {Path("/usr"), Path("/var/tmp/py")})
    assert hosts.missing() == "needs a Python that is installed elsewhere than in /var/tmp/py, where a host or a unit on it has files of its own"


def test_the_tests_own_python_is_among_what_hosts_are_shown() -> None:
    assert places.PYTHON.is_relative_to(places.PREFIX)
    assert hosts.shown()[places.ROOT] == PROJECT
