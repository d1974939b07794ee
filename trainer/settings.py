"""What can be set about elastic training, in one typed place, and how the layers that set it lie over each other.

Owns: every setting with its unit, range and default, which of them etcd may hold, and the merge. Must not: import torch or anything of `elasticd`,
read files or etcd, or act on a value: agent, daemon, command and session all read it.

Low to high::

    default        what stands here
    etcd:cluster   `config/cluster`: operators' word for all jobs (`elasticctl config set`)
    etcd:job       `config/job/JOB`: their word for one job
    file           the table [trainer] of the job's file, or of `elasticctl run --config`
    environment    ELASTICD_TRAINER_NAME of the agent's process
    command        `elasticctl run --trainer NAME=VALUE`

Whoever writes to etcd must not thereby choose what runs, or where it reads and writes. So etcd may hold numbers, booleans and words of a list, and
which settings those are follows from their types (`SAFE`): a path, a URL or a name set there is refused, not ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from enum import Enum, EnumMeta, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainer.errors import SetupError

VARIABLE: Final = "ELASTICD_TRAINER_"
"""What the name of a variable of the environment layer begins with."""
Value = bool | int | float | str
"""A setting as files, etcd and answers hold it."""


class Layer(StrEnum):
    """Who sets something, low to high."""

    DEFAULT = "default"
    CLUSTER = "etcd:cluster"
    JOB = "etcd:job"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND = "command"


class Backend(StrEnum):
    """What gradients travel by."""

    AUTO = "auto"  # nccl where every worker has a GPU, else gloo
    GLOO = "gloo"
    NCCL = "nccl"


class Compress(StrEnum):
    """How gradients are made smaller on their way."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


def _absolute(path: Path | None) -> Path | None:
    if path is not None and (not path.is_absolute() or "\0" in str(path)):
        raise ValueError("not an absolute path")
    return path


def _clean_url(url: str) -> str:
    if url and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[!-~]+", url):
        raise ValueError("not a URL such as s3://bucket/prefix")
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("a URL with a name or password in it, which logs would show")
    return url


PathOnNode = Annotated[Path | None, AfterValidator(_absolute)]
Url = Annotated[str, Field(max_length=1000), AfterValidator(_clean_url)]
Interface = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.:-]{0,14})?$")]
"""A network interface as the kernel names it, 15 characters at most; "" leaves the choice."""


def _setting(default: Any, about: str, *, unit: str = "", least: float | None = None, most: float | None = None, alike: bool = True) -> Any:
    """A field. `alike`: nodes of one job that differ in it would not train together; `fingerprint` looks at those alone."""
    return Field(default, ge=least, le=most, description=about, json_schema_extra={"unit": unit, "alike": alike})


class Settings(BaseModel):
    """Every setting, as it counts. Numbers are in the unit that their description names.

    Raises:
        ValidationError: a value is unknown or out of range, or two of them do not fit each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False)

    backend: Backend = _setting(Backend.AUTO, "what gradients travel by; auto is nccl where every worker has a GPU, else gloo")
    process_group_timeout_s: float = _setting(
        600.0, "a collective that takes longer has failed; the net below the agents, which know of a loss much sooner", unit="s", least=1, most=86_400
    )
    gloo_interface: Interface = _setting("", 'network interface for gloo; "" is the one that bears the node\'s address', alike=False)
    nccl_interface: Interface = _setting("", 'network interface for NCCL; "" leaves the choice to it', alike=False)
    warm_up: bool = _setting(default=True, about="each generation begins with a collective of every size that a step has, before the first step")
    compress: Compress = _setting(Compress.NONE, "type in which gradients are sent and summed; it costs precision")
    expandable_segments: bool = _setting(default=True, about="let the CUDA allocator grow its segments, against fragmentation after a restore", alike=False)

    snapshots: bool = _setting(default=True, about="keep states in the agents' memory; without, a loss goes back to the last checkpoint")
    snapshot_every: int = _setting(0, "from one snapshot to the next; 0 lets the measured cost decide", unit="steps", least=0, most=1_000_000)
    snapshot_cost_percent: float = _setting(
        2.0, "every step has a snapshot if one costs at most this share of a step; else as many as keep to it", unit="%", least=0.01, most=100
    )
    snapshot_memory_percent: int = _setting(
        60, "share of a node's free memory that snapshots may take; beyond it they lie on the checkpoints' disk", unit="%", least=1, most=95, alike=False
    )
    snapshot_memory_mib: int = _setting(0, "the same as an amount; 0 goes by the share", unit="MiB", least=0, most=2**30, alike=False)
    stop_step_timeout_s: float = _setting(
        0.0, "how long workers may take to the next end of a step when they are to stop; 0 is three quarters of stop_grace", unit="s", least=0, most=86_400
    )

    checkpoint_every_s: float = _setting(600.0, "from one checkpoint to the next; 0 writes none by the clock", unit="s", least=0, most=604_800)
    checkpoint_keep_last: int = _setting(3, "newest checkpoints that are kept", unit="checkpoints", least=1, most=10_000)
    checkpoint_keep_every_steps: int = _setting(
        0, "checkpoints that are kept for good: the first of every so many steps; 0 keeps none", unit="steps", least=0, most=2**31
    )
    checkpoint_copies: int = _setting(2, "nodes whose disks must hold a checkpoint before it counts; all if there are fewer", unit="nodes", least=1, most=1024)
    checkpoint_shared: bool = _setting(default=False, about="checkpoint_dir is one directory that every node sees: one copy is enough")
    checkpoint_dir: PathOnNode = _setting(None, "directory of checkpoints; none is a directory of the agent's own", alike=False)
    checkpoint_url: Url = _setting("", 'where checkpoints are copied as well, as fsspec names it (s3://bucket/prefix); "" is nowhere')
    mean_time_to_failure_s: float = _setting(
        10_800.0,
        "from one loss of a node to the next, until it has been measured; how often to save follows from it",
        unit="s",
        least=60,
        most=31_536_000,
    )

    telemetry: bool = _setting(default=True, about="time the phases of steps and tell the agent what they come to; rank 0's word counts for comparing ranks")
    telemetry_every_s: float = _setting(1.0, "from one such word to the next; it is made of whole steps", unit="s", least=0.1, most=60, alike=False)
    telemetry_file: PathOnNode = _setting(None, "without an agent: file to which each of them is appended, a JSON line each", alike=False)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for lower, upper, why in ORDERED:
            if not getattr(self, lower) < getattr(self, upper):
                said = f"{lower} {getattr(self, lower):g} < {upper} {getattr(self, upper):g} does not hold: {why}"
                raise PydanticCustomError("ordered", "{said}", {"said": said, "fields": (lower, upper)})
        return self


ORDERED: Final = (("stop_step_timeout_s", "process_group_timeout_s", "collectives would fail while workers are still on their way to a common stop"),)
"""Pairs of which the first must be the smaller."""


class _Kind(Enum):
    BOOL = "bool"
    INT = "whole number"
    FLOAT = "number"
    WORD = "word"  # of a list
    FREE = "free"


def _kind(name: str) -> _Kind:
    annotation = Settings.model_fields[name].annotation
    kind = annotation if isinstance(annotation, type) else object
    if issubclass(kind, Enum):
        return _Kind.WORD
    return {bool: _Kind.BOOL, int: _Kind.INT, float: _Kind.FLOAT}.get(kind, _Kind.FREE)


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    kind: Any = Annotated[field.annotation, None, *field.metadata]
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


_KINDS: Final = {name: _kind(name) for name in Settings.model_fields}
_ADAPTERS: Final = {name: _adapter(field) for name, field in Settings.model_fields.items()}
SAFE: Final = frozenset(name for name, kind in _KINDS.items() if kind is not _Kind.FREE)
"""Settings that etcd may hold: numbers, booleans and words of a list."""
ALIKE: Final = frozenset(name for name, field in Settings.model_fields.items() if isinstance(extra := field.json_schema_extra, dict) and extra["alike"])
"""Settings in which nodes that train together must not differ."""
_WHERE: Final[dict[str, str]] = {
    Layer.CLUSTER: "in etcd (config/cluster)",
    Layer.JOB: "in etcd (config/job)",
    Layer.FILE: "in the file",
    Layer.ENVIRONMENT: "in the environment ({})",
    Layer.COMMAND: "on the command line",
}
_TRUSTED: Final[frozenset[str]] = frozenset((Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND))
"""Layers that root, or who starts the job, writes on the node itself."""
_TEXT: Final[frozenset[str]] = frozenset((Layer.ENVIRONMENT, Layer.COMMAND))
"""Layers that hold text alone."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL: Final = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_YES_NO: Final = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def unit(name: str) -> str:
    """The unit of a setting, "" where it has none."""
    extra = Settings.model_fields[name].json_schema_extra
    return str(extra["unit"]) if isinstance(extra, dict) else ""


def allowed(name: str) -> str:
    """What a setting takes, for people: "a whole number of steps from 0 to 1000000"."""
    field, kind = Settings.model_fields[name], _KINDS[name]
    if kind is _Kind.WORD:
        assert isinstance(field.annotation, EnumMeta)
        words: list[str] = [word.value for word in field.annotation]
        return f"one of {', '.join(words)}"
    if kind is _Kind.BOOL:
        return "true or false"
    if kind is _Kind.FREE:
        return {
            "checkpoint_dir": "an absolute path",
            "telemetry_file": "an absolute path",
            "checkpoint_url": "a URL without a password, such as s3://bucket/prefix",
        }.get(name, "the name of a network interface")
    bounds = {bound: getattr(one, bound) for one in field.metadata for bound in ("ge", "le") if hasattr(one, bound)}
    return f"a {kind.value}{f' ({unit(name)})' if unit(name) else ''} from {bounds['ge']:.15g} to {bounds['le']:.15g}"


def plain(value: object) -> Value | None:
    """A setting's value as files and JSON have it: a word for an Enum, text for a path."""
    if isinstance(value, Enum):
        return str(value.value)
    return str(value) if isinstance(value, Path) else value  # type: ignore[return-value]  # a field holds nothing else


def check(layer: str, values: Mapping[str, object]) -> dict[str, Value]:
    """One layer's values, each looked at by itself, in the types that they have in JSON.

    Args:
        layer: whose they are. Any name but those of the layers that the node's own files and commands make is treated as etcd's.
        values: by name; of the environment and of a command line, text.

    Raises:
        SetupError: a name is unknown or may not be set there, or a value is not allowed; it names layer, name and value, and what to do.
    """
    return {name: _checked(layer, name, value) for name, value in values.items()}


def from_text(name: str, text: str) -> Value:
    """What the text of a command line means for a setting; text that means nothing is returned as it is, for `check` to refuse."""
    kind = _KINDS.get(name, _Kind.FREE)
    if kind is _Kind.BOOL:
        return _YES_NO.get(text.lower(), text)
    if kind in (_Kind.INT, _Kind.FLOAT) and _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if kind is _Kind.FLOAT and _DECIMAL.fullmatch(text) else text


def merge(layers: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[Settings, dict[str, str]]:
    """What counts in the end.

    Args:
        layers: their names (`Layer`) and values, low to high: a later one is laid over an earlier one.

    Returns:
        The settings; and for each of them the name of the layer that set it.

    Raises:
        SetupError: as in `check`; or two values do not fit each other: then it says which layer each of them is from.
    """
    values: dict[str, Value] = {}
    origins: dict[str, str] = dict.fromkeys(Settings.model_fields, Layer.DEFAULT.value)
    for layer, given in layers:
        checked = check(layer, given)
        values |= checked
        origins |= dict.fromkeys(checked, str(layer))
    try:
        return Settings.model_validate(values), origins
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        fields = fault.get("ctx", {}).get("fields", fault["loc"])
        who = ", ".join(f"{name} is from {origins.get(str(name), 'nowhere')}" for name in fields)
        raise SetupError(fault["msg"], remedy=f"{who}; change one of them") from None


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment layer: ELASTICD_TRAINER_BACKEND=gloo is backend.

    Raises:
        SetupError: a variable that begins so names no setting.
    """
    found: dict[str, str] = {}
    for variable, text in environ.items():
        if variable.startswith(VARIABLE):
            name = variable.removeprefix(VARIABLE).lower()
            if name not in _KINDS or variable != variable.upper():
                shown = variable[:80] if variable.isprintable() else ascii(variable)[:80]
                raise SetupError(f"{shown} in the environment names no setting{_meant(name, prefix=VARIABLE)}", remedy="unset it")
            found[name] = text
    return found


def _checked(layer: str, name: str, value: object) -> Value:
    where = _WHERE.get(layer, f"in {layer}").format(VARIABLE + (name.upper() if name in _KINDS else "…"))
    if name not in _KINDS:
        raise SetupError(f"{name[:80]!r} {where} is no setting{_meant(name)}", remedy="docs/configuration.md lists them all")
    shown = re.sub("//[^/]*@", "//…@", repr(value))[:80]  # a password goes into no log
    said = f"{name} = {shown} {where}"
    if name not in SAFE and layer not in _TRUSTED:
        remedy = "put it into the table [trainer] of the job file on each node"
        raise SetupError(f"{said}: etcd may hold numbers, yes or no, and words of a list, and {name} takes {allowed(name)}", remedy=remedy)
    if isinstance(value, str) and layer in _TEXT:
        value = from_text(name, value)
    try:
        return _typed(name, value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        why = f" ({fault['msg'].removeprefix('Value error, ')})" if fault["type"] == "value_error" else ""
        raise SetupError(f"{said} is not allowed{why}", remedy=f"give {allowed(name)}") from None
    except TypeError:
        raise SetupError(f"{said} is not allowed", remedy=f"give {allowed(name)}") from None


def _typed(name: str, value: object) -> Value:
    """The value in the type of its kind; nothing is converted but whole numbers to numbers.

    Raises:
        TypeError: it is of another type.
        ValidationError: it is out of range.
    """
    kinds: dict[_Kind, type | tuple[type, ...]] = {_Kind.BOOL: bool, _Kind.INT: int, _Kind.FLOAT: (int, float), _Kind.WORD: str, _Kind.FREE: str}
    kind = _KINDS[name]
    if isinstance(value, Enum | Path):
        value = plain(value)
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind is not _Kind.BOOL):
        raise TypeError
    if kind is _Kind.FLOAT and abs(value) < 2**63:  # type: ignore[arg-type]  # a number, as was seen above
        value = float(value)  # type: ignore[arg-type]
    checked = plain(_ADAPTERS[name].validate_python(value))
    assert checked is not None  # what is given is something
    return checked


def _meant(name: str, *, prefix: str = "") -> str:
    close = difflib.get_close_matches(name[:80], _KINDS, n=1)
    return f"; did you mean {prefix + close[0].upper() if prefix else close[0]}?" if close else ""
