"""Where a host sees what it needs of this machine: the project, the virtual environment of its tests, and their Python.

Owns: which directory is shown at which place. Must not: mount anything (`_boot` does), or look at a host.

Hosts have a /tmp and a /run of their own, and a unit with PrivateTmp= a /var/tmp as well; but a checkout may lie anywhere. So project and environment
are always shown at places of their own, wherever they lie, and what the tests run on a host goes by these. Two things still name the paths of this
machine, and so may lead nowhere there: the scripts in the environment's bin (`python -m` works), and an editable install (`Host.python` makes up for it).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[2]
"""The project on this machine."""
SHOWN = Path("/srv/elasticd-tests")
PROJECT = SHOWN / "project"
"""And on a host."""
ENVIRONMENT = SHOWN / "venv"
HIDDEN = tuple(Path(path) for path in ("/tmp", "/var/tmp", "/run", "/dev", "/proc", "/sys", SHOWN))
"""What a host, or a unit on it, has of its own."""


def moves(root: Path, prefix: Path, base_prefix: Path) -> dict[Path, Path]:
    """What is shown at another place than its own: path here -> path on a host.

    Args:
        root: the project.
        prefix: of the Python that runs the tests.
        base_prefix: of the installation it comes from: the same, if it is no virtual environment. Then it is not moved, as it knows where it lies.
    """
    return {root: PROJECT} if prefix == base_prefix else {root: PROJECT, prefix: ENVIRONMENT}


def placed(path: Path, among: Mapping[Path, Path]) -> Path:
    """Where a host sees a path of this machine, given `moves`: by the innermost of them that has it, at its own place if none has."""
    around = [source for source in among if path.is_relative_to(source)]
    if not around:
        return path
    source = max(around, key=lambda one: len(one.parts))
    return among[source] / path.relative_to(source)


def hidden(paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that are seen at their own place only, and not there."""
    return [path for path in paths if any(path.is_relative_to(place) for place in HIDDEN)]


MOVES = moves(ROOT, Path(sys.prefix), Path(sys.base_prefix))
PREFIX = placed(Path(sys.prefix), MOVES)
"""Of the tests' own Python, on a host."""
PYTHON = placed(Path(sys.executable), MOVES)
"""The tests' own Python, on a host."""


def installation() -> set[Path]:
    """Where the tests' Python itself is installed: what hosts see at its own path, or not at all."""
    program = Path(os.path.realpath(sys.executable)).parent
    copied = sys.prefix != sys.base_prefix and program.is_relative_to(Path(sys.prefix).resolve())
    return {Path(sys.base_prefix)} if copied else {Path(sys.base_prefix), program}
