"""An installation and a wheel, made once for all tests that only look at them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy import environment
from tests.deploy.installation import ROOT, Installation, in_venv


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Installed once. Look, and change nothing."""
    installation = Installation(tmp_path_factory.mktemp("destdir"))
    done = installation.install()
    assert done.returncode == 0, done.stdout + done.stderr
    return installation


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built as the installer builds it."""
    scratch = tmp_path_factory.mktemp("wheel")
    wanted = environment.Wanted(root=ROOT, python=Path(sys.executable), from_venv=in_venv(), shared={})
    return environment._build_wheel(scratch, scratch, wanted)
