"""What the options mean: text from a command line made into values, or into one clear error.

Owns: etcd endpoints, sizes, names, the workers' command, and where logs and the summary go. Must not: start anything or talk to etcd.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.cli.checks import check_range
from elasticd.errors import KVUnavailableError, UsageError
from elasticd.kv.types import KVConfig, TLSFiles
from elasticd.rendezvous.address import address_on_the_way_to
from elasticd.rendezvous.keys import checked_name, node_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticd.agent.settings import OwnLayers

DEFAULT_PORT = "2379"
CALL_TIMEOUT = 1.5
"""Seconds one attempt at etcd may take; a command gives up after twice that."""


class Show(StrEnum):
    """Whose output is passed through."""

    RANK0 = "rank0"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Where a job's etcd is.

    Attributes:
        endpoints: "host:port" each.
        tls: files for mutual TLS, None for plain text.
    """

    endpoints: tuple[str, ...]
    tls: TLSFiles | None = None

    @property
    def kv(self) -> KVConfig:
        """How this command reaches it."""
        return KVConfig(endpoints=self.endpoints, tls=self.tls, call_timeout=CALL_TIMEOUT)

    def as_options(self) -> list[str]:
        """The options that name it again on another command line."""
        options = ["--etcd", ",".join(self.endpoints)]
        if self.tls:
            options += ["--cacert", str(self.tls.cacert)]
            options += ["--cert", str(self.tls.cert)] if self.tls.cert else []
            options += ["--key", str(self.tls.key)] if self.tls.key else []
        return options


def parse_store(etcd: Sequence[str], cacert: Path | None, cert: Path | None, key: Path | None) -> Store | None:
    """The etcd that `--etcd`, `--cacert`, `--cert` and `--key` name; None without `--etcd`.

    Raises:
        UsageError: an endpoint is malformed, a file is not readable, or the options contradict each other.
    """
    tls = _parse_tls(cacert, cert, key)
    texts = [text.strip() for item in etcd for text in item.split(",") if text.strip()]
    if not texts:
        if tls or etcd:
            raise UsageError("--cacert, --cert and --key say how to reach the etcd that --etcd names, and it names none", remedy="add --etcd https://HOST:2379")
        return None
    return Store(endpoints=tuple(dict.fromkeys(_endpoint(text, tls=tls is not None) for text in texts)), tls=tls)


def _parse_tls(cacert: Path | None, cert: Path | None, key: Path | None) -> TLSFiles | None:
    if cacert is None:
        if cert or key:
            raise UsageError("--cert and --key need --cacert, the CA that signed etcd's certificate")
        return None
    if (cert is None) != (key is None):
        raise UsageError("--cert and --key come together", remedy=f"add --{'cert' if cert is None else 'key'}")
    for option, path in (("--cacert", cacert), ("--cert", cert), ("--key", key)):
        if path is not None:
            _check_readable(option, path)
    # Absolute: they are handed to an agent, and to other commands through the registry.
    return TLSFiles(cacert=cacert.absolute(), cert=cert.absolute() if cert else None, key=key.absolute() if key else None)


def _check_readable(option: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def _endpoint(text: str, *, tls: bool) -> str:
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise UsageError(f"--etcd {text!r}: unknown scheme {scheme!r}", remedy="use http://HOST:PORT, https://HOST:PORT or HOST:PORT")
    if scheme == "https" and not tls:
        raise UsageError(f"--etcd {text!r} asks for TLS", remedy="add --cacert, and --cert and --key if etcd wants to know its clients")
    if scheme == "http" and tls:
        raise UsageError(f"--etcd {text!r} is plain text, and --cacert asks for TLS", remedy="write https://")
    rest = rest.rstrip("/")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, DEFAULT_PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or any(char in "/@? " for char in rest):
        raise UsageError(f"--etcd {text!r} is not HOST:PORT")
    return f"{host}:{port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How many nodes. `desired` is what the job grows to, `nodes` what is there at first."""

    nodes: int
    minimum: int
    maximum: int

    @property
    def desired(self) -> int:
        """Nodes wanted in the end: as many as may train."""
        return self.maximum


def parse_sizes(nodes: int, min_nodes: int, max_nodes: int | None) -> Sizes:
    """Check 1 <= --min-nodes <= --nodes <= --max-nodes (= --nodes where it is not given).

    Raises:
        UsageError: it does not hold.
    """
    maximum = nodes if max_nodes is None else max_nodes
    for option, value in (("--nodes", nodes), ("--min-nodes", min_nodes), ("--max-nodes", maximum)):
        if value < 1:
            raise UsageError(f"{option} {value}: at least 1 node is needed")
    if nodes > maximum:
        raise UsageError(f"--nodes {nodes} is more than --max-nodes {maximum}")
    if min_nodes > nodes:
        raise UsageError(f"--min-nodes {min_nodes} is more than --nodes {nodes}: the job could never start")
    return Sizes(nodes=nodes, minimum=min_nodes, maximum=maximum)


def worker_command(script: Sequence[str], *, module: bool, cwd: Path) -> tuple[str, ...]:
    """The workers' command for SCRIPT [ARGS]... .

    A file is run by this Python, unbuffered, unless it is an executable program or a script with another interpreter in its first line. Anything
    else is looked up on PATH.

    Raises:
        UsageError: there is no such file and no such program.
    """
    if not script or not script[0]:
        raise UsageError("no script was given", remedy="elasticctl run [OPTIONS] -- SCRIPT [ARGS]...")
    name, *args = script
    python = [sys.executable, "-u"]
    if module:
        return (*python, "-m", name, *args)
    path = cwd / name
    if path.is_dir():
        raise UsageError(f"{name} is a directory, not a script")
    if path.exists():
        _check_readable("script", path)
        program = _runs_itself(path)
        return (str(path) if program else name, *args) if program else (*python, name, *args)
    if "/" not in name and shutil.which(name):
        return (name, *args)
    raise UsageError(f"there is no script {name!r} in {cwd}, and no such program on PATH" if "/" not in name else f"there is no script {name!r}")


def _runs_itself(path: Path) -> bool:
    """Whether it is an executable that Python should not read: a binary, or a script of another interpreter."""
    if path.suffix == ".py" or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)


def default_job(script: str, *, local: bool) -> str:
    """A name for a job that was given none: the script's, and on one machine a few random characters, so that it can be run twice at once."""
    stem = Path(script).name.removesuffix(".py").rpartition(".")[2] or "job"
    name = "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in stem).lstrip("_.-")[:100] or "job"
    return f"{name}-{secrets.token_hex(2)}" if local else name


def default_log_dir() -> Path:
    """Where logs go: this user's state directory, which outlives a reboot."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "elasticd" / "logs"


def default_node() -> str:
    """This machine's name, as far as it can be a node's."""
    return node_name(socket.gethostname())


def address_towards(endpoint: str) -> str:
    """This machine's address on the way to an etcd endpoint; nothing is sent.

    Raises:
        KVUnavailableError: the host's name does not resolve, or no route leads there.
    """
    try:
        return address_on_the_way_to(endpoint)
    except OSError as error:
        raise KVUnavailableError(f"no way to {endpoint}: {error.strerror}", remedy="check --etcd, or give --address") from None


def checked_names(*, cluster: str, job: str, node: str | None = None) -> None:
    """Refuse names that cannot be part of a key and of a path.

    Raises:
        UsageError: names the one at fault.
    """
    for kind, name in (("cluster", cluster), ("job", job), ("node", node)):
        if name is not None:
            checked_name(kind, name)


def check_summary(path: Path | None) -> None:
    """Refuse a summary file that could not be written at the end.

    Raises:
        UsageError: its directory is missing or closed to us, or it is a directory itself.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--summary {path}: there is no directory {folder}")
    if path.is_dir():
        raise UsageError(f"--summary {path}: is a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--summary {path}: {folder} cannot be written")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """`elasticctl run`, checked. Times are seconds.

    Attributes:
        store: None starts an etcd and all nodes here; else this machine is one node of the job there.
        node, address: of this machine, with `store`.
        script: as it was typed, to print the command for another node.
        argv: the workers' command.
        fresh_name: the job's name was made up, so that nobody else can have meant it.
        config: the file of `trainer_file`, to print the command for another node.
        trainer_file: settings of training from a file.
        trainer: the same from this command line, as text; they lie above all others.
        detect: with detectors, and what acts on them.
        jsonl: print events as JSON lines instead of talking to a person.
    """

    job: str
    fresh_name: bool
    cluster: str
    store: Store | None
    node: str | None
    address: str | None
    sizes: Sizes
    nproc: int
    script: tuple[str, ...]
    module: bool
    argv: tuple[str, ...]
    cwd: Path
    log_dir: Path
    summary: Path | None
    config: Path | None = None
    trainer_file: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    trainer: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int
    lease_ttl: float
    settle: float
    stop_grace: float
    frozen_max: float
    detect: bool = False
    policy: Mapping[str, int | float | str] = field(default_factory=dict)
    again: bool
    show: Show
    jsonl: bool

    @property
    def local(self) -> bool:
        """Whether everything runs on this machine."""
        return self.store is None

    @property
    def own(self) -> OwnLayers:
        """Settings of training as they are given here."""
        from elasticd.agent.settings import OwnLayers

        return OwnLayers(file=self.trainer_file, environ=os.environ, command=self.trainer)

    def check(self) -> None:
        """Refuse names, numbers, settings and files that cannot work, before anything is started.

        Raises:
            UsageError: names the option at fault.
        """
        checked_names(cluster=self.cluster, job=self.job, node=self.node)
        check_range("--nproc-per-node", self.nproc, 1, 1024)
        check_range("--max-restarts", self.max_restarts, 0, 1_000_000)
        check_range("--lease-ttl", self.lease_ttl, 2, 3600)
        check_range("--settle", self.settle, 0, 86_400)
        check_range("--stop-grace", self.stop_grace, 0, 3600)
        check_range("--frozen-max", self.frozen_max, 0.1, 86_400)
        check_summary(self.summary)
        from elasticd.agent.settings import fitted

        fitted(self.own, None, None, stop_grace=self.stop_grace, ttl=self.lease_ttl)


def read_trainer(path: Path) -> dict[str, bool | int | float | str]:
    """The table [trainer] of a file, which holds nothing else.

    Raises:
        UsageError: it cannot be read, is no TOML, holds something else, or a setting that is not allowed.
    """
    from elasticd.agent.settings import said_as_usage
    from trainer.settings import Layer, check

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    other = next((key for key in document if key != "trainer"), None)
    if other is not None:
        raise UsageError(f"--config {path}: {other!r} is not for this file", remedy="it holds one table, [trainer]")
    table = document.get("trainer", {})
    if not isinstance(table, dict):
        raise UsageError(f"--config {path}: trainer is no table")
    try:
        with said_as_usage():
            return check(Layer.FILE, table)
    except UsageError as error:
        raise UsageError(f"--config {path}: {error.message}", remedy=error.remedy) from None


def parse_trainer(texts: Sequence[str]) -> dict[str, str]:
    """What `--trainer NAME=VALUE` means, as text.

    Raises:
        UsageError: a setting is unknown, given twice, or not allowed.
    """
    from elasticd.agent.settings import parse_settings

    return parse_settings(texts, "--trainer")


def parse_policy(texts: Sequence[str]) -> dict[str, int | float | str]:
    """What `--policy NAME=VALUE` means.

    Raises:
        UsageError: a setting is unknown, given twice, or its value is not allowed.
    """
    from elasticd.policy.settings import Settings

    values: dict[str, int | float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--policy {text}: not of the form NAME=VALUE")
        if name in values:
            raise UsageError(f"--policy: {name} is given twice")
        values[name] = _number(value)
    try:
        Settings.from_dict(values)
    except UsageError as error:
        raise UsageError(f"--policy: {error.message.removeprefix('policy ')}", remedy=error.remedy) from None
    return values


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def needs_etcd(option: str) -> UsageError:
    """An option that means something only with --etcd."""
    return UsageError(f"{option} is for one node of a job elsewhere", remedy="add --etcd, or leave it out")
