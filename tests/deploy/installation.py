"""Installing below a temporary directory, for tests of what comes of it.

Owns: running the installer on the working tree, with the packages that the tests themselves have. Must not: write outside that directory.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREFIX = Path("/opt/elasticd")


@functools.cache
def interpreter() -> Path | None:
    """A Python of the same version as ours that other users can run: a machine's own, if ours lies in somebody's home."""
    ours = sysconfig.get_python_version()
    for candidate in (Path(sys.base_exec_prefix) / "bin" / f"python{ours}", Path("/usr/bin") / f"python{ours}", Path("/usr/local/bin") / f"python{ours}"):
        try:
            if candidate.exists() and all(parent.stat().st_mode & 0o001 for parent in candidate.resolve().parents):
                return candidate
        except PermissionError:
            continue
    return None


def in_venv() -> Path:
    """The environment that the tests run in, with everything that elasticd needs."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment")
    return Path(sys.prefix)


@dataclass(frozen=True)
class Installation:
    """What stands below a DESTDIR."""

    destdir: Path

    def at(self, path: str | Path) -> Path:
        return self.destdir / Path(path).relative_to("/")

    @property
    def current(self) -> Path:
        return self.at(PREFIX / "current")

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the installer; a later option overrides an earlier one."""
        python = interpreter()
        if python is None:
            pytest.skip("needs a Python of this version that other users can run")
        return self._run("install", "--python", str(python), "--from-venv", str(in_venv()), *options)

    def uninstall(self) -> subprocess.CompletedProcess[str]:
        return self._run("uninstall")

    def _run(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy.install", "--destdir", str(self.destdir), *options, action]
        # As a careful root has it: what is installed must be readable by others all the same.
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, umask=0o077)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed interpreter, far from the source tree."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self.current / "bin" / "python"), "-P", *arguments]
        return subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=60)
