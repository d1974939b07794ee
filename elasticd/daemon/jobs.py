"""The jobs that this node may run: `jobs.d/*.toml`, one file each, root's.

Owns: the schema of a job file, which files are believed, and the command that typed parameters make. Must not: know what runs.

Etcd can ask for a job by name and for values of the parameters that its file declares; what is run is said here alone. Nothing is interpreted by a
shell or split at spaces: one argument of the file is one argument of the command, whatever its parameters hold.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import Field, ValidationError, model_validator

from elasticd.agent.settings import said_as_usage
from elasticd.daemon.parameters import ParameterSpec, as_argument
from elasticd.daemon.trusted import TrustedDirectory, Untrusted
from elasticd.daemon.values import Name, Seconds, Section, explain, one_line
from elasticd.errors import UsageError
from elasticd.rendezvous.keys import checked_name
from elasticd.rendezvous.records import Parameter
from trainer.settings import Layer, check

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z0-9][A-Za-z0-9_.-]{0,127})\}|[{}]|[^{}]+")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_OURS: Final = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|ELASTICD_.*|CUDA_VISIBLE_DEVICES"
    r"|NOTIFY_SOCKET|WATCHDOG_(USEC|PID)|LISTEN_(PID|PIDFDID|FDS|FDNAMES)|CREDENTIALS_DIRECTORY"
)
"""Variables that the agent sets for each worker, or takes away since they were systemd's word to the agent alone."""


class JobSpec(Section):
    """One job, as this node's root allows it.

    Attributes:
        argv: the workers' command, no shell; `{name}` in an argument is replaced by that parameter's value, `{{` and `}}` are braces. The program
            itself is named by its absolute path and takes no parameter.
        user: who the workers are; None: who the agent is.
        allow_root: `user` may be root.
        env: variables for the workers, besides those of the agent and those that elasticd sets.
        slots: workers on each node; None: all that the node has.
        nodes: nodes wanted when it is started; None: max_nodes.
        priority: of jobs that want the same slots, the one with the greater goes first.
        health_check: a command that must return 0 before this node joins; it is run as `user`, and takes no parameters.
        trainer: settings of training, by the names of `trainer.settings`, above those that etcd holds.
    """

    name: Name
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    cwd: Path = Path("/")
    user: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}\$?$")] | None = None
    allow_root: bool = False
    env: dict[str, str] = Field(default_factory=dict)
    slots: Annotated[int, Field(ge=1, le=1024)] | None = None
    min_nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    max_nodes: Annotated[int, Field(ge=1, le=100_000)]
    nodes: Annotated[int, Field(ge=1, le=100_000)] | None = None
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    parameters: dict[Name, ParameterSpec] = Field(default_factory=dict, max_length=64)
    health_check: tuple[str, ...] = ()
    health_timeout: Seconds | None = None
    ttl: Annotated[float, Field(ge=2, le=3600)] | None = None
    settle: Annotated[float, Field(ge=0, le=86_400)] | None = None
    stop_grace: Annotated[float, Field(ge=0, le=86_400)] | None = None
    frozen_max: Seconds | None = None
    trainer: dict[Annotated[str, Field(max_length=128)], bool | int | float | str] = Field(default_factory=dict, max_length=64)

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        wanted = self.max_nodes if self.nodes is None else self.nodes
        if not self.min_nodes <= wanted <= self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} <= nodes {wanted} <= max_nodes {self.max_nodes} does not hold")
        if self.ttl is not None and self.frozen_max is not None and self.frozen_max < self.ttl:
            raise ValueError(f"frozen_max {self.frozen_max:g} is shorter than the lease, ttl {self.ttl:g}")
        if not self.cwd.is_absolute() or "\0" in str(self.cwd):
            raise ValueError(f"cwd {str(self.cwd)[:80]!r} is not an absolute path")
        _check_command("argv", self.argv)
        _check_command("health_check", self.health_check)
        _check_environment(self.env)
        self._check_templates()
        try:
            with said_as_usage():
                check(Layer.FILE, self.trainer)
        except UsageError as error:
            raise ValueError(f"trainer: {error}") from None
        return self

    def _check_templates(self) -> None:
        if set("{}") & set(self.argv[0]):
            raise ValueError("argv[0] names the program, which no parameter may choose: it takes no braces")
        used = {name for number, argument in enumerate(self.argv) for name in _names(number, argument)}
        for name in sorted(used - self.parameters.keys()):
            raise ValueError(f"argv uses {{{name}}}, which is not among parameters{_did_you_mean(name, self.parameters)}")
        for name in sorted(self.parameters.keys() - used):
            raise ValueError(f"parameter {name!r} is declared, and argv does not use it")


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that is not believed.

    Attributes:
        file: the file, or the directory if that is at fault.
        why: one line.
        job: the job it was to be, as far as the file says; else its own name without ".toml"; "" if neither is a job's name.
    """

    file: Path
    why: str
    job: str = ""

    def __str__(self) -> str:
        return f"{one_line(str(self.file))}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """What a directory of job files says: the jobs by name, and the files that are not believed."""

    jobs: Mapping[str, JobSpec] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()

    @property
    def refused_jobs(self) -> dict[str, str]:
        """Job -> why, of the jobs for which there is no file but one that is not believed."""
        return {item.job: str(item) for item in self.refused if item.job and item.job not in self.jobs}


def load_jobs(directory: Path, *, owner: int = 0) -> JobFiles:
    """Read every `*.toml` of a directory whose name does not begin with a dot. A file that is not fit takes no other with it.

    Args:
        directory: of the job files.
        owner: the uid whose files are believed, and to whom the directory must belong.
    """
    read: list[tuple[Path, JobSpec | Refused]] = []
    try:
        with TrustedDirectory(directory, owner=owner) as trusted:
            read.extend((directory / name, _read_job(trusted, directory / name)) for name in trusted.names(".toml"))
    except Untrusted as error:
        return JobFiles(refused=(Refused(directory, str(error)),))
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path, job in read:
        if isinstance(job, JobSpec):
            files[job.name].append(path.name)
    jobs: dict[str, JobSpec] = {}
    refused: list[Refused] = []
    for path, job in read:
        if isinstance(job, Refused):
            refused.append(job)
        elif len(files[job.name]) > 1:
            refused.append(_doubled(path, job.name, files[job.name]))
        else:
            jobs[job.name] = job
    return JobFiles(jobs=MappingProxyType(jobs), refused=tuple(refused))


def _doubled(path: Path, job: str, files: Sequence[str]) -> Refused:
    others = " and ".join(one_line(name) for name in files if name != path.name)
    return Refused(path, f"name: job {job} is also defined in {others}, and neither counts", job)


def _read_job(directory: TrustedDirectory, path: Path) -> JobSpec | Refused:
    job = path.name.removesuffix(".toml")
    try:
        document = tomllib.loads(directory.read(path.name).decode("utf-8"))
        job = document["name"] if isinstance(document.get("name"), str) else job
        spec = JobSpec.model_validate_json(json.dumps(document, default=str), strict=True)
        why = _unfit_here(spec)
        if not why:
            return spec
    except Untrusted as error:
        why = str(error)
    except ValidationError as error:
        why = explain(JobSpec, error)
    except RecursionError:
        why = "nested too deeply"  # tomllib recurses; a file of brackets must not reach the daemon's loop
    except ValueError as error:  # not UTF-8, not TOML, a number of thousands of digits
        why = one_line(str(error))
    return Refused(path, why, _as_name(job))


def _as_name(text: str) -> str:
    try:
        return checked_name("job", text)
    except UsageError:
        return ""


def _unfit_here(spec: JobSpec) -> str:
    """Why this machine cannot run a job that is right in itself, "" if it can."""
    if spec.user is not None:
        try:
            account = pwd.getpwnam(spec.user)
        except KeyError:
            return f"user: {spec.user!r} is not known on this machine"
        if account.pw_uid == 0 and not spec.allow_root:
            return f"user: {spec.user!r} is root; a job that is to run as root says so by allow_root = true"
    for what, argv in (("argv", spec.argv), ("health_check", spec.health_check)):
        why = _missing_program(argv, spec.env) if argv else ""
        if why:
            return f"{what}: {why}"
    return ""


def _missing_program(argv: Sequence[str], env: Mapping[str, str]) -> str:
    program = Path(argv[0])
    try:
        mode = program.stat().st_mode
    except PermissionError:
        return ""  # in a directory that the job's user may enter, and we may not
    except OSError as error:
        return f"cannot run {str(program)!r}: {error.strerror}"
    if not stat.S_ISREG(mode) or not mode & 0o111:
        return f"cannot run {str(program)!r}: not an executable file"
    if program.name == "env":
        wanted = next((word for word in argv[1:] if "=" not in word), "")
        # What an option of env would change, or a parameter is to name, is left to the start.
        if wanted and wanted[0] != "-" and not set("{}") & set(wanted):
            path = env.get("PATH") or os.environ.get("PATH") or os.defpath
            if shutil.which(wanted, path=path) is None:
                return f"{str(program)!r} finds no {wanted!r} in {path}"
    return ""


def check_parameters(spec: JobSpec, given: Mapping[str, object]) -> dict[str, Parameter]:
    """The parameters as the job's file has them, in its order, without those that are left to their defaults.

    Args:
        spec: the job.
        given: typed values, or text from a command line ("8", "3e-4", "true").

    Raises:
        UsageError: one is not declared, not allowed, or has no default and is not given; the message names it and what is allowed.
    """
    for name in given:
        if name not in spec.parameters:
            declared = ", ".join(spec.parameters) or "none"
            raise UsageError(f"job {spec.name} has no parameter {name[:80]!r}{_did_you_mean(name, spec.parameters)}", remedy=f"declared: {declared}")
    accepted: dict[str, Parameter] = {}
    for name, parameter in spec.parameters.items():
        if name in given:
            value = parameter.accept(given[name])
            if value is None:
                raise UsageError(f"parameter {name} of job {spec.name}: {given[name]!r:.80} is not allowed", remedy=f"give {parameter.allowed}")
            accepted[name] = value
        elif parameter.default is None:
            raise UsageError(f"parameter {name} of job {spec.name} has no default and is not given", remedy=f"give {parameter.allowed}")
    return accepted


def command(spec: JobSpec, parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    """The workers' command with parameters filled in, from `parameters` or from their defaults.

    Raises:
        UsageError: as in `check_parameters`: what comes from etcd is checked where it is used, too.
    """
    values = {name: item.default for name, item in spec.parameters.items()} | check_parameters(spec, parameters)
    texts = {name: as_argument(value) for name, value in values.items() if value is not None}
    return tuple("".join(_fill(piece, texts) for piece in _PIECE.finditer(argument)) for argument in spec.argv)


def digest(spec: JobSpec, parameters: Mapping[str, Parameter]) -> str:
    """16 hexadecimal digits that change when an agent would be started otherwise: command, parameters, user, environment, slots, times or settings.

    Sizes, priority and checks are not in it: they count when a job is started or placed, and say nothing of an agent that runs. Parameters that
    `command` would refuse have a digest as well.
    """
    values = {name: item.default for name, item in spec.parameters.items()} | dict(parameters)
    names = {"argv", "cwd", "user", "env", "slots", "ttl", "settle", "stop_grace", "frozen_max"}
    # A table that is not there says nothing: agents that an older daemon started are not to leave for it.
    meaning = spec.model_dump(mode="json", include=names | ({"trainer"} if spec.trainer else set()))
    return hashlib.sha256(json.dumps([meaning, values], sort_keys=True).encode()).hexdigest()[:16]


def _names(number: int, argument: str) -> Iterator[str]:
    """The parameters that an argument uses.

    Raises:
        ValueError: a brace stands alone.
    """
    for piece in _PIECE.finditer(argument):
        if piece[0] in ("{", "}"):
            raise ValueError(f"argv[{number}] {argument[:80]!r} has a lone {piece[0]!r}; write {piece[0] * 2!r} for a brace, '{{name}}' for a parameter")
        if piece[1] is not None:
            yield piece[1]


def _fill(piece: re.Match[str], texts: Mapping[str, str]) -> str:
    return texts[piece[1]] if piece[1] is not None else {"{{": "{", "}}": "}"}.get(piece[0], piece[0])


def _check_command(what: str, argv: Sequence[str]) -> None:
    if any("\0" in argument for argument in argv):
        raise ValueError(f"{what} holds a NUL character")
    if argv and not argv[0].startswith("/"):
        raise ValueError(f"{what}[0] {argv[0][:80]!r} is not an absolute path")


def _check_environment(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"env: {name[:80]!r} is no name for a variable; use letters, digits and '_', no digit first")
        if _OURS.fullmatch(name):
            raise ValueError(f"env: {name} is for elasticd to set")
        if "\0" in value:
            raise ValueError(f"env: {name} holds a NUL character")


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name[:128], known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
