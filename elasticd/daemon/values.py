"""What the values in our files may be, and how a bad one is put in one line.

Owns: names, durations, addresses, files of certificates, as pydantic types; wording what pydantic finds. Must not: know any particular file.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Final, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from elasticd.observability.harmless import harmless
from elasticd.observability.harmless import one_line as harmless_line

LINE_MAX: Final = 300
"""Characters of one line for people."""
TEXT_MAX: Final = 64 * 1024
"""Characters of any other text."""
_CREDENTIAL: Final = "credential:"


def _resolve_credential(value: object) -> object:
    """`credential:NAME` as the file that systemd's LoadCredential=NAME made for this unit; anything else as it is.

    Raises:
        ValueError: it is no name, or this process was given no credentials.
    """
    if not isinstance(value, str) or not value.startswith(_CREDENTIAL):
        return value
    name = value.removeprefix(_CREDENTIAL)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", name):
        raise ValueError(f"{value[:80]!r} names no credential; use letters, digits, '_', '.' and '-'")
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise ValueError(f"{value}: there are no credentials here; the unit needs LoadCredential={name}:FILE")
    return str(Path(directory) / name)


def _refuse_credential(value: object) -> object:
    """A path as it is. A credential is the daemon's alone, and gone when the daemon's unit stops: agents read this file too, and go on.

    Raises:
        ValueError: it is a credential.
    """
    if isinstance(value, str) and value.startswith(_CREDENTIAL):
        raise ValueError(f"{value[:80]}: agents need this file too, and outlive the daemon's credentials; give its path")
    return value


def printable(text: str) -> str:
    """Harmless (`observability.harmless`), TEXT_MAX characters at most."""
    return harmless(text, TEXT_MAX)


def one_line(text: str) -> str:
    """In one line for people, LINE_MAX characters at most."""
    return harmless_line(text, LINE_MAX)


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """What is wrong with a document for `model`, in one line: the first unknown key, as it explains a missing one; else the first fault."""
    faults = error.errors(include_url=False, include_input=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    place = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(fault["loc"][-1]), _keys_beside(model, fault["loc"]), n=1)
        message = f"unknown key; did you mean {close[0]}?" if close else "unknown key"
    elif fault["type"] == "missing":
        message = "is missing"
    return one_line(f"{place}: {message}" if place else message)


def _keys_beside(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the table that holds the last part of `loc`."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))  # None: a name within a dictionary of tables
        model = next((kind for kind in kinds if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel)), model)
    return list(model.model_fields)


def _host_and_port(text: str, what: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not re.fullmatch(r"[^\s/@?]*", host):
        raise ValueError(f"{text[:80]!r} is not {what}")
    if int(port) > 65535:
        raise ValueError(f"{text!r}: a port is at most 65535")
    return text


def _endpoint(text: str) -> str:
    if text.startswith(":"):
        raise ValueError(f"{text[:80]!r} names no host")
    return _host_and_port(text, "HOST:PORT; whether TLS is spoken, cacert says")


def _listen(text: str) -> str:
    return _host_and_port(text, "ADDRESS:PORT")


def _listen_or_off(text: str) -> str:
    return _listen(text) if text else text


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Listen = Annotated[str, AfterValidator(_listen)]
"""ADDRESS:PORT to listen on; no address is all of them, port 0 a free one."""
ListenOrOff = Annotated[str, AfterValidator(_listen_or_off)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
"""HOST:PORT to connect to."""
PemFile = Annotated[Path, BeforeValidator(_resolve_credential)]
"""A file with a certificate or key: its path, or `credential:NAME`."""
SharedPemFile = Annotated[Path, BeforeValidator(_refuse_credential)]
"""One that the agents read too: its path."""


class Section(BaseModel):
    """Base of every table of the file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
