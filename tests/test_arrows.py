"""The import arrows of the architecture: who may import whom, read from the source of every module.

Every import counts, also one inside a function or under TYPE_CHECKING, and `importlib.import_module("name")`. A new package of elasticd fails
here until it has its place in LAYERS.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent

# A layer may import those after it, never one before it or beside it.
LAYERS = [
    {"elasticd.cli"},
    {"elasticd.daemon"},
    {"elasticd.agent"},
    {"elasticd.policy", "elasticd.rendezvous"},
    {"elasticd.kv"},
    {"elasticd.observability"},
    {"elasticd.errors"},
    {"elasticd"},  # its __init__: the version, and nothing imported
]

# Packages of this project that are not layers of elasticd, and who else may import them.
APART = {
    "trainer.wire": {"elasticd.agent"},  # what a worker and its agent share: messages, control page, layout
    "trainer.checkpoint": {"elasticd.agent"},  # what both write
    "trainer.errors": {"elasticd.agent"},
    "trainer.settings": {"elasticd.agent", "elasticd.daemon", "elasticd.cli"},  # the schema of what operators set
    "trainer": set[str](),
    "detectors": set[str](),  # the daemon runs it as a process
}

# Foreign packages that only some may import, since they are slow, large or need taming.
FOREIGN = {
    "etcd3": {"elasticd.kv"},
    "grpc": {"elasticd.kv"},
    "google.protobuf": {"elasticd.kv"},
    "torch": {"elasticd.agent", "elasticd.rendezvous", "trainer"},
    "sklearn": {"detectors"},
}

DEPTH = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}

# Run by every invocation of a command or all day long on every node: they cannot afford what torch and scikit-learn cost.
LIGHT = ["elasticd.cli", "elasticd.daemon", "elasticd.kv", "elasticd.policy", "elasticd.observability", "elasticd.errors"]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(name: str) -> str:
    """The unit that the arrows speak of: "elasticd.kv" for elasticd.kv.client, "trainer" for trainer.ddp, "" for what is foreign."""
    parts = name.split(".")
    if parts[0] == "elasticd":
        return ".".join(parts[:2])
    return parts[0] if parts[0] in APART else ""


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for package in ("elasticd", "trainer", "detectors"):
        for path in sorted((root / package).rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that a module imports; `from a import b` yields a.b, since b may be a module."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            drop = node.level - (path.name == "__init__.py")
            parents = module.split(".")[: len(module.split(".")) - drop] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}:
            yield from ((node.lineno, a.value) for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def resolve(name: str, known: set[str]) -> str:
    """Drop the last part where it names an attribute: elasticd.__version__ is in elasticd."""
    return "elasticd" if name.startswith("elasticd.") and name.count(".") == 1 and name not in DEPTH and name not in known else name


def may_import(importer: str, imported: str) -> bool:
    """Whether a module of the room `importer` may import the module `imported`."""
    for package, friends in FOREIGN.items():
        if within(imported, package):
            return importer in friends
    room = room_of(imported)
    if room in {"", importer}:
        return True
    for package, friends in APART.items():
        if within(imported, package):
            return importer in friends
    return importer in DEPTH and DEPTH[importer] < DEPTH[room]


def violations(root: Path) -> list[str]:
    found = []
    known = {module for module, _ in modules(root)}
    known |= {module.rpartition(".")[0] for module in known}
    for module, path in modules(root):
        where = path.relative_to(root)
        importer = room_of(module)
        if importer not in DEPTH and importer not in APART:
            found.append(f"{where}: {importer} has no place in LAYERS of tests/test_arrows.py")
            continue
        for line, name in imports(module, path):
            imported = resolve(name, known)
            unplaced = within(imported, "elasticd") and room_of(imported) not in DEPTH
            if unplaced or not may_import(importer, imported):
                found.append(f"{where}:{line}: {importer} may not import {imported}")
    return found


def test_every_import_follows_the_arrows() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("elasticd/kv/a.py", "from elasticd.rendezvous import membership"),
        ("elasticd/kv/a.py", "from ..agent import runner"),
        ("elasticd/kv/a.py", "from elasticd import agent"),
        ("elasticd/kv/__init__.py", "from .. import cli"),
        ("elasticd/policy/a.py", "import elasticd.rendezvous"),
        ("elasticd/rendezvous/a.py", "import elasticd.policy.budget"),
        ("elasticd/rendezvous/a.py", "def f():\n    from elasticd.agent import runner"),
        ("elasticd/agent/a.py", "from elasticd.cli.main import main"),
        ("elasticd/agent/a.py", "import etcd3"),
        ("elasticd/agent/a.py", "from grpc import RpcError"),
        ("elasticd/agent/a.py", "from trainer.session import Session"),
        ("elasticd/agent/a.py", "from trainer import session"),
        ("elasticd/daemon/a.py", "import detectors.pipeline"),
        ("elasticd/daemon/a.py", "import sklearn"),
        ("elasticd/cli/a.py", "import torch.distributed"),
        ("elasticd/cli/a.py", "import importlib\nimportlib.import_module('torch')"),
        ("elasticd/errors.py", "import elasticd.kv"),
        ("elasticd/__init__.py", "from elasticd.kv import client"),
        ("elasticd/stray/a.py", ""),
        ("trainer/a.py", "from elasticd.errors import ElasticdError"),
        ("trainer/a.py", "import elasticd"),
        ("detectors/a.py", "from trainer.wire import channel"),
        ("detectors/a.py", "import torch"),
    ],
)
def test_an_import_against_an_arrow_is_found(tmp_path: Path, path: str, source: str) -> None:
    write(tmp_path, "elasticd/__init__.py", "")
    write(tmp_path, path, source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("elasticd/kv/a.py", "import etcd3, grpc, google.protobuf, elasticd.errors\nfrom . import types\nfrom .types import KeyValue"),
        ("elasticd/rendezvous/a.py", "import torch\nfrom elasticd.kv.types import KeyValue\nfrom elasticd.errors import ElasticdError"),
        ("elasticd/agent/a.py", "import torch\nfrom trainer.wire.channel import Raise\nfrom elasticd import policy, rendezvous, kv"),
        ("elasticd/daemon/a.py", "from elasticd.kv import client\nfrom elasticd import __version__"),
        ("elasticd/cli/a.py", "import typer\nfrom elasticd.daemon.api import Client"),
        ("trainer/a.py", "import torch\nfrom trainer.wire import channel\nfrom .wire.channel import Raise"),
        ("detectors/a.py", "import sklearn.ensemble\nfrom detectors import windows"),
    ],
)
def test_an_import_along_the_arrows_is_allowed(tmp_path: Path, path: str, source: str) -> None:
    write(tmp_path, "elasticd/__init__.py", "")
    write(tmp_path, path, source)
    assert violations(tmp_path) == []


def write(root: Path, path: str, source: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)


def light_modules() -> list[str]:
    return [name for name, _ in modules(ROOT) if room_of(name) in LIGHT and not name.endswith("__main__")]


def test_commands_and_daemon_load_neither_torch_nor_sklearn() -> None:
    """What the text of one module cannot show: what the imports of its imports load."""
    code = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            heavy = {"torch", "sklearn"} & set(sys.modules)
            assert not heavy, f"{name} loads {heavy}"
    """
    done = subprocess.run([sys.executable, "-c", code, *light_modules()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_module_hides_from_the_arrows_in_a_directory_without_init() -> None:
    """Packaging and mypy overlook such a directory too."""
    assert [str(path) for _, path in modules(ROOT) if not (path.parent / "__init__.py").exists()] == []


def test_the_packages_are_where_the_arrows_look() -> None:
    assert {name for name, _ in modules(ROOT)} >= {"elasticd", "elasticd.errors", "trainer", "detectors"}
