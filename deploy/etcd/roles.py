#!/usr/bin/env python3
"""Users, roles and grants in etcd for one cluster of elasticd, made by etcdctl.

Owns: who may write which key. Must not: need anything beyond Python 3.11 and etcdctl 3.4 or newer, or write anything but users and roles.

    roles.py CONNECTION --cluster prod --node gpu-1 --node gpu-2 --operator alice --job mnist --enable-auth
    roles.py CONNECTION --cluster prod --job bert            a further job: needed before it is started for the first time
    roles.py CONNECTION --cluster prod --remove-node gpu-2   its certificate is good for nothing from now on

CONNECTION is --endpoints, --cacert, --cert and --key, with the certificate of etcd's root. Run it as often as you like: it does what is missing and
says so. A user is the Common Name of a certificate and has no password. With --dry-run it only says what it would do.

A role in etcd is a set of key ranges, so "every job's target" is no range, and each job gets grants of its own. That keeps a node's certificate
from what only operators may say (`target`, `requests/`), and an operator's from what only the job's members may (`generation`, `members/`).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KEYS: Final = "/elasticd/v1"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
READ: Final = "read"
READ_WRITE: Final = "readwrite"
KINDS: Final = (READ, "write", READ_WRITE)
"""As etcd numbers them."""


class RolesError(Exception):
    """One line for whoever called."""


@dataclass(frozen=True, order=True)
class Grant:
    """A right to one key, or to all below one prefix (a key that ends with "/")."""

    key: str
    kind: str

    @property
    def prefix(self) -> bool:
        """Whether it is for all below `key`."""
        return self.key.endswith("/")

    def covers(self, key: str) -> bool:
        """Whether `key` is in its range."""
        return key.startswith(self.key) if self.prefix else key == self.key


@dataclass
class State:
    """Users with their roles, and roles with their grants: as etcd has them, or is to have them."""

    users: dict[str, set[str]] = field(default_factory=dict)
    roles: dict[str, set[Grant]] = field(default_factory=dict)

    def rights(self, user: str, key: str) -> str:
        """What a user may do with a key: "rw", "r", "w" or "-"."""
        kinds = {grant.kind for role in self.users.get(user, ()) for grant in self.roles.get(role, ()) if grant.covers(key)}
        read = "r" if kinds & {READ, READ_WRITE} else ""
        return read + ("w" if kinds & {"write", READ_WRITE} else "") or "-"


@dataclass(frozen=True)
class Cluster:
    """The names of users and roles, and the grants, of one cluster."""

    name: str

    @property
    def prefix(self) -> str:
        """Of all its keys."""
        return f"{KEYS}/{self.name}/"

    def job(self, job: str) -> str:
        """Prefix of a job's keys."""
        return f"{self.prefix}jobs/{job}/"

    @property
    def nodes_role(self) -> str:
        """What every node may do."""
        return f"elasticd:{self.name}:nodes"

    @property
    def operators_role(self) -> str:
        """What every operator may do."""
        return f"elasticd:{self.name}:operators"

    def node_role(self, node: str) -> str:
        """What one node may do, and no other."""
        return f"elasticd:{self.name}:node:{node}"

    def job_of_members(self, job: str) -> set[Grant]:
        """Any member may come to coordinate the job, and removes the keys of dead ones."""
        below = self.job(job)
        return {Grant(below + key, READ_WRITE) for key in ("members/", "events/", "proposal", "generation", "budget", "checkpoint", "policy")}

    def job_of_operators(self, job: str) -> set[Grant]:
        """The budget is whole again when a job that has ended is started again."""
        below = self.job(job)
        return {Grant(below + key, READ_WRITE) for key in ("target", "requests/", "budget", "policy")}

    def wanted(self, nodes: Iterable[str], operators: Iterable[str], jobs: Iterable[str]) -> State:
        """What there has to be, at least."""
        look = Grant(self.prefix, READ)
        state = State()
        state.roles[self.nodes_role] = {look, Grant(self.prefix + "incidents/", READ_WRITE)}
        state.roles[self.operators_role] = {look} | {Grant(self.prefix + key, READ_WRITE) for key in ("nodes-policy/", "audit/", "config/")}
        for job in jobs:
            state.roles[self.nodes_role] |= self.job_of_members(job)
            state.roles[self.operators_role] |= self.job_of_operators(job)
        for node in nodes:
            own = {Grant(f"{self.prefix}{kind}/{node}", READ_WRITE) for kind in ("nodes", "nodes-policy")}
            state.roles[self.node_role(node)] = own
            state.users[f"elasticd-node-{node}"] = {self.nodes_role, self.node_role(node)}
        for operator in operators:
            state.users[f"elasticd-operator-{operator}"] = {self.operators_role}
        return state


class Etcd:
    """Etcd by etcdctl; every change is said, and with `dry_run` only said.

    Args:
        command: etcdctl with its connection flags.
    """

    def __init__(self, command: Sequence[str], *, dry_run: bool) -> None:
        self._command = command
        self._dry_run = dry_run
        self.changes = 0

    def read(self, of: Callable[[str], bool]) -> State:
        """Users and roles that there are, as far as their name is wanted: each takes etcdctl another process."""
        state = State()
        for role in filter(of, self._json("role", "list").get("roles", [])):
            state.roles[role] = {one for one in map(grant, self._json("role", "get", role).get("perm", [])) if one is not None}
        for user in filter(of, self._json("user", "list").get("users", [])):
            state.users[user] = set(self._json("user", "get", user).get("roles", []))
        return state

    def change(self, *arguments: str) -> None:
        """One change."""
        self.changes += 1
        say(f"{'would do' if self._dry_run else 'done'}: etcdctl {shlex.join(arguments)}")
        if not self._dry_run:
            self._run(*arguments)

    def _json(self, *arguments: str) -> dict[str, list[str]]:
        answer = json.loads(self._run(*arguments, "-w", "json"))
        return answer if isinstance(answer, dict) else {}

    def _run(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL_")} | {"ETCDCTL_API": "3"}
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise RolesError(f"etcdctl {shlex.join(arguments)}: {lines[-1] if lines else 'failed without a word'}")
        return done.stdout


def grant(permission: object) -> Grant | None:
    """A grant as etcdctl tells it; None for a range that none of ours has."""
    if not isinstance(permission, dict):
        return None
    key, end = (base64.b64decode(permission.get(name, "")) for name in ("key", "range_end"))
    if end and (not key.endswith(b"/") or end != key[:-1] + b"0"):
        return None
    if not end and key.endswith(b"/"):
        return None
    return Grant(key.decode(errors="replace"), KINDS[permission.get("permType", 0)])


def span(one: Grant) -> list[str]:
    """A grant's range as etcdctl takes it."""
    return ["--prefix", one.key] if one.prefix else [one.key]


def add(etcd: Etcd, state: State, wanted: State) -> None:
    """Make what is missing; `state` follows."""
    for role, grants in wanted.roles.items():
        if role not in state.roles:
            etcd.change("role", "add", role)
        for one in sorted(grants - state.roles.setdefault(role, set())):
            flags = ["--prefix"] if one.prefix else []
            etcd.change("role", "grant-permission", role, *flags, one.kind, one.key)
        state.roles[role] |= grants
    for user, roles in wanted.users.items():
        if user not in state.users:
            etcd.change("user", "add", user, "--no-password")
        for role in sorted(roles - state.users.setdefault(user, set())):
            etcd.change("user", "grant-role", user, role)
        state.users[user] |= roles


def remove(etcd: Etcd, state: State, cluster: Cluster, options: argparse.Namespace) -> None:
    """Take away what the command line says; what is not there is no fault."""
    roles = [cluster.node_role(node) for node in options.remove_node]
    users = [f"elasticd-node-{node}" for node in options.remove_node] + [f"elasticd-operator-{name}" for name in options.remove_operator]
    for user in (user for user in users if user in state.users):
        etcd.change("user", "delete", user)
        del state.users[user]
    for role in (role for role in roles if role in state.roles):
        etcd.change("role", "delete", role)
        del state.roles[role]
    for job in options.remove_job:
        for role, grants in ((cluster.nodes_role, cluster.job_of_members(job)), (cluster.operators_role, cluster.job_of_operators(job))):
            for one in sorted(grants & state.roles.get(role, set())):
                etcd.change("role", "revoke-permission", role, *span(one))
                state.roles[role].discard(one)


def enable(etcd: Etcd, state: State) -> None:
    """Roles count from now on. Turning it on when it is on does nothing, and 3.4 cannot tell whether it is."""
    add(etcd, state, State(users={"root": {"root"}}))
    etcd.change("auth", "enable")


def matrix(state: State, cluster: Cluster, jobs: Sequence[str]) -> list[str]:
    """Who may do what with which key, one line each. All nodes are alike, and so are all operators: two stand for them."""
    state.users |= {"one": {cluster.nodes_role, cluster.node_role("NODE")}, "other": {cluster.operators_role}}
    state.roles |= cluster.wanted(["NODE"], [], []).roles | {role: state.roles.get(role, set()) for role in (cluster.nodes_role, cluster.operators_role)}
    below = ["nodes/NODE", "nodes/(another)", "nodes-policy/NODE", "nodes-policy/(another)", "audit/(any)", "config/(any)", "incidents/(any)"]
    of_job = ("target", "requests/(any)", "proposal", "generation", "budget", "checkpoint", "policy", "members/(any)", "events/(any)")
    for job in jobs or ["(unknown)"]:
        below += [f"jobs/{job}/{key}" for key in of_job]
    rows: list[tuple[str, ...]] = [("key below " + cluster.prefix, "NODE", "an operator")]
    rows += [(key, *(state.rights(user, cluster.prefix + key) for user in ("one", "other"))) for key in below]
    rows.append(("(anything else)", *(state.rights(user, "/elsewhere") for user in ("one", "other"))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def job_names(folder: Path) -> list[str]:
    """The names in a directory of job files."""
    names = []
    for path in sorted(folder.glob("*.toml")):
        try:
            names.append(str(tomllib.loads(path.read_text(encoding="utf-8"))["name"]))
        except (tomllib.TOMLDecodeError, KeyError, UnicodeDecodeError) as error:
            raise RolesError(f"{path}: {error!r} is no job file's beginning") from None
    return names


def say(line: str) -> None:
    """For the person who called."""
    sys.stdout.write(line + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--endpoints", required=True, help="https://host:port, several with commas")
    for flag, about in (("--cacert", "ca.pem"), ("--cert", "root's certificate"), ("--key", "root's key")):
        parser.add_argument(flag, help=about)
    parser.add_argument("--etcdctl", default="etcdctl", help="the program (default: %(default)s)")
    parser.add_argument("--cluster", required=True)
    for thing in ("node", "operator", "job"):
        parser.add_argument(f"--{thing}", action="append", default=[], metavar="NAME", help=f"a {thing}; may be given again")
        parser.add_argument(f"--remove-{thing}", action="append", default=[], metavar="NAME", help=f"take a {thing}'s rights away")
    parser.add_argument("--jobs-dir", type=Path, help="every job of a directory of job files, too")
    parser.add_argument("--enable-auth", action="store_true", help="make root, and let roles count from now on")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    options = parser.parse_args(argv)
    if options.jobs_dir is not None:
        options.job += job_names(options.jobs_dir)
    names = [options.cluster, *options.node, *options.operator, *options.job, *options.remove_node, *options.remove_operator, *options.remove_job]
    for name in names:
        if not NAME.fullmatch(name):
            raise RolesError(f'{name!r} is no usable name: letters, digits, "_", "." and "-", beginning with a letter or digit')
    return options


def run(argv: Sequence[str]) -> None:
    """Do what the command line says."""
    options = parse(argv)
    connection = [f"--{name}={value}" for name in ("endpoints", "cacert", "cert", "key") if (value := getattr(options, name)) is not None]
    etcd = Etcd([options.etcdctl, *connection], dry_run=options.dry_run)
    cluster = Cluster(options.cluster)
    wanted = cluster.wanted(options.node, options.operator, options.job)
    leaving = {f"elasticd-node-{node}" for node in options.remove_node} | {f"elasticd-operator-{name}" for name in options.remove_operator}
    names = {"root", *wanted.roles, *wanted.users, *leaving, *map(cluster.node_role, options.remove_node)}
    state = etcd.read(names.__contains__)
    remove(etcd, state, cluster, options)
    add(etcd, state, wanted)
    if options.enable_auth:
        enable(etcd, state)
    if not etcd.changes:
        say("nothing to do: all of it is there")
    say("")
    for line in matrix(state, cluster, options.job):
        say(line)


def main() -> NoReturn:
    """Exit codes: 0, or 1 with one line on stderr; 2 for wrong usage."""
    try:
        run(sys.argv[1:])
    except (RolesError, OSError) as error:
        sys.exit(f"roles.py: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
