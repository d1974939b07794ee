"""What a request may hold: one model for each body, with bounds for every number and text.

Owns: the schemas. Must not: know what a change does. Unknown fields are refused, and nothing is converted: a number is no text.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from elasticd.rendezvous.records import Name

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
_LINE = "[^\\x00-\\x1f\\x7f-\\x9f\u2028\u2029]*"
_LARGEST = 2**53  # integers up to here survive JSON

Count = Annotated[int, Field(ge=1, le=100_000)]
Line = Annotated[str, Field(max_length=500, pattern=f"^{_LINE}$")]
"""One line of text, since it ends in logs and tables."""
Reason = Annotated[str, Field(min_length=1, max_length=500, pattern=f"^{_LINE}[^\\x00-\\x20\\x7f-\\xa0\u2028\u2029]{_LINE}$")]
"""One line that says something."""
Value = bool | Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)] | float | Annotated[str, Field(min_length=1, max_length=64)]

JobName = Annotated[str, Path(pattern=NAME, description="A job.")]
NodeName = Annotated[str, Path(pattern=NAME, description="A node.")]
IncidentName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,299}$", description="An incident.")]
JobFilter = Annotated[str | None, Query(pattern=NAME, description="Of this job alone.")]
NodeFilter = Annotated[str | None, Query(pattern=NAME, description="Of this node alone.")]
After = Annotated[int, Query(ge=0, le=2**63 - 1, description="Newer than this: the `last` of an earlier answer.")]


class Body(BaseModel):
    """Base of every body."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MayReason(Body):
    """Why, if there is something to say."""

    reason: Line = ""


class MustReason(Body):
    """Why: whoever finds the effect later wants to know."""

    reason: Reason


class StartBody(MayReason):
    """What is not given stays as it was, or comes from the job file."""

    nodes: Count | None = None
    min_nodes: Count | None = None
    max_nodes: Count | None = None
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    parameters: Annotated[dict[Name, Value], Field(max_length=64)] | None = None
    again: bool = False


class ScaleBody(MayReason):
    """The wanted number of nodes, absolute."""

    nodes: Count
    min_nodes: Count | None = None
    max_nodes: Count | None = None
    if_revision: Annotated[int, Field(ge=1, lt=_LARGEST)] | None = None
    dry_run: bool = False


class ConfigBody(MayReason):
    """Settings of training to set, and names of those that are not to be set any more."""

    give: Annotated[dict[Name, Value], Field(max_length=64, alias="set")] = {}
    take: Annotated[list[Name], Field(max_length=64, alias="unset")] = []
    if_revision: Annotated[int, Field(ge=0, lt=_LARGEST)] | None = None
    dry_run: bool = False
