"""What must be alike on the nodes of a job, as each of them publishes it before it joins: code, settings, packages.

Owns: what goes into each part, and reading it from files. Must not: compare (`rendezvous.fingerprint` does), run anything of the job, or import torch.

A part is words of the form name=value, so that whoever compares two can name what differs, 128 characters at most; a longer one becomes one digest:

config    the settings in which nodes must not differ, as far as this node fixes them above etcd (file, environment, command line). What etcd or the
          defaults say is not in it: an operator may change that while nodes come and go, and each generation takes it anew. Two nodes with this part
          alike end up with the same values whatever etcd holds. "-" fixes nothing.
code      script: the first *.py of the command, else what `-m` runs, else the program itself. modules: the files that the script imports, and those
          that they import, as far as they lie beside it (or in PYTHONPATH); what is imported by a computed name, and data, is not seen. arguments:
          those behind the script; of what holds a slash, only that it is a path: directories may differ between nodes, numbers may not.
packages  versions in the workers' interpreter, which need not be the agent's: read from its directories. Of python the part that matters, 3.11.

What cannot be found or read is left out, and a part that only one of two nodes has is no difference.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticd.agent.settings import OwnLayers, said_as_usage
from trainer.settings import ALIKE, SAFE, check

if TYPE_CHECKING:
    from elasticd.agent.config import AgentConfig

PACKAGES: Final = ("torch", "numpy", "elasticd")
"""Distributions whose versions are compared."""
LONGEST: Final = 128
"""Characters of a part, as etcd's records have it."""
FILES_MAX: Final = 512
"""Modules that are looked at, in an order that is alike on all nodes."""
BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of one file that are looked at."""
_PYTHON: Final = re.compile(r"python[0-9.]*")


def fingerprint(config: AgentConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The parts that can be told before a worker runs.

    Args:
        config: what the agent was told.
        environ: the agent's environment.

    Raises:
        UsageError: a setting is not allowed where it is.
    """
    own = OwnLayers(file=config.trainer_file, environ=environ, command=config.trainer_command)
    parts = {
        "config": config_part(own),
        "code": code_part(config.argv, config.cwd, config.env),
        "packages": packages_part(config.argv, {**environ, **config.env}),
    }
    return {name: part for name, part in parts.items() if part}


def short(data: bytes) -> str:
    """16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


# --- config --------------------------------------------------------------------------------------------------------------


def config_part(own: OwnLayers) -> str:
    """See the module.

    Raises:
        UsageError: a setting is not allowed where it is.
    """
    fixed: dict[str, object] = {}
    with said_as_usage():
        for layer, values in own.layers:
            fixed |= check(layer, values)
    return _words({name: _word(name, value) for name, value in sorted(fixed.items()) if name in ALIKE}) or "-"


def _word(name: str, value: object) -> str:
    if name not in SAFE:
        return short(str(value).encode())  # of any length, and nothing that etcd is to hold
    return str(value).lower() if isinstance(value, bool) else f"{value:.15g}" if isinstance(value, float) else str(value)


def _words(named: Mapping[str, str]) -> str:
    text = " ".join(f"{name}={value}" for name, value in named.items() if value)
    return text if len(text) <= LONGEST else short(text.encode())


# --- code ----------------------------------------------------------------------------------------------------------------


def code_part(argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
    """See the module.

    Args:
        argv: the workers' command.
        cwd: their working directory.
        env: what the job adds to their environment.
    """
    at, script, module = _script(argv, cwd)
    content = _read(script)
    if content is None:
        return ""
    roots = [cwd if module else script.parent, *_python_path(env)]
    package = module if script.name == "__main__.py" else module.rpartition(".")[0]
    modules = sorted(_modules(script, content, package, roots))
    arguments = [_without_path(argument) for argument in argv[at + 1 :]]
    return _words(
        {
            "script": short(content),
            "modules": short("\n".join(modules).encode()) if modules else "",
            "arguments": short("\0".join(arguments).encode()) if arguments else "",
        }
    )


def _script(argv: Sequence[str], cwd: Path) -> tuple[int, Path, str]:
    """Where in the command the script is named, its file, and its name if it is a module."""
    for at, word in enumerate(argv):
        if word.endswith(".py") and not word.startswith("-"):
            return at, cwd / word, ""
        if word == "-m" and at + 1 < len(argv):
            base = cwd.joinpath(*argv[at + 1].split("."))
            return at + 1, base / "__main__.py" if base.is_dir() else base.with_name(f"{base.name}.py"), argv[at + 1]
    return 0, Path(shutil.which(argv[0]) or argv[0]), ""


def _python_path(env: Mapping[str, str]) -> list[Path]:
    return [Path(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry.startswith("/")]


def _without_path(argument: str) -> str:
    """`--data=/srv/a` without what may be elsewhere on another node."""
    if "/" not in argument:
        return argument
    name, equals, _ = argument.partition("=")
    return f"{name}=/" if equals and "/" not in name else "/"


def _modules(script: Path, content: bytes, package: str, roots: Sequence[Path]) -> Iterator[str]:
    """A line for each file that is imported: where it is below its root, and what is in it."""
    seen: set[Path] = {script}
    waiting: list[tuple[bytes, str]] = [(content, package)]
    while waiting:
        text, package = waiting.pop(0)
        for name in sorted(set(_imports(text, package))):
            found = _find(name, roots)
            if found is None or found[1] in seen or len(seen) > FILES_MAX:
                continue
            root, file = found
            seen.add(file)
            data = _read(file)
            if data is not None:
                yield f"{file.relative_to(root)} {short(data)}"
                waiting.append((data, name if file.name == "__init__.py" else name.rpartition(".")[0]))


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Dotted names that a source imports, and the packages above them; `from a import b` may mean a module a.b."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the parser thinks of the user's strings is not for our log
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".") if package else []
            parents = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1) if parts[0])


def _find(name: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """The file of a module, and the root that it is below."""
    for root in roots:
        base = root.joinpath(*name.split("."))
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return root, file
    return None


def _read(path: Path) -> bytes | None:
    """A regular file's beginning; None for what is none, or closed to us."""
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read(BYTES_MAX)
    return None


# --- packages ------------------------------------------------------------------------------------------------------------


def packages_part(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """See the module; "" for a command that no Python runs.

    Args:
        argv: the workers' command.
        env: the workers' environment, for its PATH.
    """
    python = _interpreter(argv, env)
    if python is None:
        return ""
    release, folders = _folders(python)
    found = {"python": release} | {name: _version(name, folders) for name in PACKAGES}
    return _words(found)


def _interpreter(argv: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """The Python that runs the command: named in it (also behind `env` or `numactl`), or in the first line of its program."""
    path = env.get("PATH", os.defpath)
    for word in argv:
        if _PYTHON.fullmatch(Path(word).name):
            found = shutil.which(word, path=path)
            return Path(found) if found else None
    program = shutil.which(argv[0], path=path)
    first = (_read(Path(program)) or b"")[:256].split(b"\n")[0].decode("utf-8", "replace") if program else ""
    return _interpreter(first[2:].split(), env) if first.startswith("#!") and first[2:].split() else None


def _folders(python: Path) -> tuple[str, list[str]]:
    """The release of an interpreter ("3.11", "" if it cannot be told) and the directories of its packages."""
    if python == Path(sys.executable):
        return f"{sys.version_info.major}.{sys.version_info.minor}", sys.path
    environment = python.parent.parent
    prefix = environment if (environment / "pyvenv.cfg").is_file() else python.resolve().parent.parent
    release = re.fullmatch(r"python(3\.[0-9]+)", python.resolve().name)
    libraries = sorted(prefix.glob(f"lib/python{release[1] if release else '3.*'}"))
    below = [library / name for library in libraries for name in ("site-packages", "dist-packages")]
    more = [prefix / "lib/python3/dist-packages", *prefix.glob("local/lib/python3.*/*-packages")] if prefix != environment or not libraries else []
    return libraries[-1].name.removeprefix("python") if libraries else "", [str(folder) for folder in (*below, *more)]


def _version(name: str, folders: list[str]) -> str:
    with suppress(OSError, StopIteration, KeyError, TypeError, ValueError):
        found: str | None = next(iter(Distribution.discover(name=name, path=folders))).version
        return found or ""
    return ""
