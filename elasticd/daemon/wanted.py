"""What a job's target becomes by an operator's word: pure functions.

Owns: which sizes count where several are given, what is out of bounds, and whether a job may be started. Must not: read or write anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from elasticd.daemon.jobs import check_parameters
from elasticd.errors import RefusedError, UsageError
from elasticd.rendezvous.records import Parameter, TargetRecord

if TYPE_CHECKING:
    from elasticd.daemon.jobs import JobSpec
    from elasticd.rendezvous.view import View

_PARAMETERS_MAX: Final = 64
_LARGEST: Final = 2**53
"""Integers up to here survive JSON."""
_PARAMETER: Final[TypeAdapter[Parameter]] = TypeAdapter(Parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes that somebody gave; None is not given."""

    nodes: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    max_restarts: int | None = None


def shape(target: TargetRecord | None) -> dict[str, Any] | None:
    """What of a target a change shows."""
    if target is None:
        return None
    return {
        "run": target.run,
        "nodes": target.desired,
        "min_nodes": target.min_nodes,
        "max_nodes": target.max_nodes,
        "max_restarts": target.max_restarts,
        "paused": target.paused,
        "parameters": dict(target.parameters),
    }


def same(old: TargetRecord, new: TargetRecord) -> bool:
    """Whether both want the same, whoever wrote them and why."""
    return shape(old) == shape(new)


def may_start(view: View, *, job: str, again: bool) -> bool:
    """Whether starting it is starting anew what has run before, so that its budget is to be whole again.

    Raises:
        RefusedError: it runs already; or it has ended, or is stopping, and `again` is not given.
    """
    generation = view.generation.record if view.generation else None
    if view.over and generation:
        if not again:
            raise RefusedError(f"job {job!r} has ended: {generation.state.value}", remedy="--again starts it anew, with a whole restart budget")
        return True
    if view.target is None:
        return False
    if view.target.record.run:
        raise RefusedError(f"job {job!r} runs already", remedy="scale changes its size; restart begins its next generation")
    if view.active is None:
        return False  # it was stopped before it ever formed
    if not again:
        raise RefusedError(f"job {job!r} is stopping", remedy="wait until it has stopped, or let it go on with --again")
    return True


def started(
    old: TargetRecord | None,
    spec: JobSpec | None,
    sizes: Sizes,
    *,
    scope: str,
    job: str,
    parameters: Mapping[str, object] | None,
    reason: str,
    by: str,
) -> TargetRecord:
    """The target of a job that is to run.

    Args:
        old: the target it had; what is not given stays as it was.
        spec: the job file, where this node has it; what is neither given nor was comes from there.

    Raises:
        RefusedError: not min_nodes <= nodes <= max_nodes.
        UsageError: nothing says how many nodes, or a parameter is unknown or not allowed.
    """
    nodes, least, most, restarts = sizes.nodes, sizes.min_nodes, sizes.max_nodes, sizes.max_restarts
    if old is not None:
        known = Sizes(nodes=old.desired, min_nodes=old.min_nodes, max_nodes=old.max_nodes, max_restarts=old.max_restarts)
    elif spec is not None:
        top = most if most is not None else spec.max_nodes
        known = Sizes(nodes=spec.nodes or top, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes, max_restarts=spec.max_restarts)
    elif nodes is None:
        raise UsageError(f"how many nodes job {job!r} wants is not known here: this node has no file of it", remedy="give nodes, or ask a node that has it")
    else:
        known = Sizes(nodes=nodes, min_nodes=1, max_nodes=nodes, max_restarts=10)
    target = TargetRecord(
        scope=scope,
        desired=_first(nodes, known.nodes),
        min_nodes=_first(least, known.min_nodes),
        max_nodes=_first(most, known.max_nodes),
        max_restarts=_first(restarts, known.max_restarts),
        parameters=_parameters(old, spec, parameters, job=job),
        reason=reason,
        by=by,
    )
    _check_bounds(target, job)
    return target


def scaled(old: TargetRecord, sizes: Sizes, *, job: str, reason: str, by: str) -> TargetRecord:
    """The target with other sizes.

    Raises:
        RefusedError: the job is paused, or not min_nodes <= nodes <= max_nodes.
    """
    if old.paused:
        raise RefusedError(f"job {job!r} is paused{f': {old.reason}' if old.reason else ''}", remedy=f"first: elasticctl resume {job}")
    target = old.model_copy(
        update={
            "desired": _first(sizes.nodes, old.desired),
            "min_nodes": _first(sizes.min_nodes, old.min_nodes),
            "max_nodes": _first(sizes.max_nodes, old.max_nodes),
            "reason": reason,
            "by": by,
        }
    )
    _check_bounds(target, job)
    return target


def _first(given: int | None, known: int | None) -> int:
    value = known if given is None else given
    assert value is not None  # what is known is known whole
    return value


def _check_bounds(target: TargetRecord, job: str) -> None:
    if not target.min_nodes <= target.desired <= target.max_nodes:
        raise RefusedError(
            f"job {job!r}: {target.desired} nodes are not within min_nodes {target.min_nodes} and max_nodes {target.max_nodes}",
            remedy="give another number, or other bounds with it",
        )


def _parameters(old: TargetRecord | None, spec: JobSpec | None, given: Mapping[str, object] | None, *, job: str) -> dict[str, Parameter]:
    """What is given over what was; what the job file no longer declares is dropped, unless it is given."""
    kept = dict(old.parameters) if old else {}
    if spec is not None:
        merged = check_parameters(spec, {name: value for name, value in kept.items() if name in spec.parameters} | dict(given or {}))
    else:
        merged = kept | {name: _believable(name, value) for name, value in (given or {}).items()}
    if len(merged) > _PARAMETERS_MAX:
        raise UsageError(f"job {job!r}: {len(merged)} parameters are more than the {_PARAMETERS_MAX} that a job may have")
    return merged


def _believable(name: str, value: object) -> Parameter:
    """A value that only the job files of other nodes can judge, in a form that etcd may hold."""
    try:
        checked = _PARAMETER.validate_python(_number(value), strict=True)
        if isinstance(checked, str) or (math.isfinite(checked) if isinstance(checked, float) else abs(checked) <= _LARGEST):
            return checked
    except (ValidationError, ValueError, OverflowError):
        pass
    raise UsageError(f"parameter {name}: {repr(value)[:80]} is no number, no yes or no, and no single word", remedy="a word has letters, digits and _ . + -")


def _number(value: object) -> object:
    """A number in place of a command line's text that is one and no word, as "-5" is. Other text stays: job files take "8" for 8."""
    if not isinstance(value, str) or value[:1] not in ("-", "+", "."):
        return value
    return int(value) if value[1:].isdigit() else float(value)
