"""What a PromQL expression asks for, and whether a daemon exports it.

Owns: the names, matchers and grouping labels of an expression, and judging them by the daemon's own list of metrics. Must not: evaluate anything, or
decide whether an expression is well formed: `promtool` does.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from elasticd.daemon.metrics import FAMILIES
from elasticd.daemon.metrics.families import Family, Kind
from tests.deploy.installation import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RULES = ROOT / "deploy" / "prometheus" / "elasticd.rules.yml"
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}
"""What prometheus-client says of a process, as far as daemons show it: docs/metrics.md."""
PROMETHEUS = {"up", "ALERTS"}
TARGET = {"cluster", "instance", "job"}
"""Labels that every series has from its target."""
KEYWORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "group_left", "group_right"}
_TEXT = r'"(?:[^"\\]|\\.)*"'
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{{((?:[^{{}}\"]|{_TEXT})*)\}}")
_MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({_TEXT})")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True)
class Asked:
    """What an expression asks for.

    Attributes:
        metrics: names.
        matchers: (metric, label, operator, value) of each.
        labels: that it groups or matches by.
    """

    metrics: frozenset[str]
    matchers: tuple[tuple[str, str, str, str], ...]
    labels: frozenset[str]


def asked(expr: str) -> Asked:
    """Take an expression apart."""
    matchers = tuple((name, label, operator, value[1:-1]) for name, inside in _SELECTOR.findall(expr) for label, operator, value in _MATCHER.findall(inside))
    labels = {label.strip() for _, inside in _GROUPING.findall(expr) for label in inside.split(",") if label.strip()}
    bare = _GROUPING.sub(" ", re.sub(r"\[[^\]]*\]", " ", _SELECTOR.sub(r" \1 ", expr)))
    names = {
        match[0]
        for match in _NAME.finditer(re.sub(_TEXT, " ", bare))
        if match[0] not in KEYWORDS and not bare[match.end() :].lstrip().startswith("(") and not re.search(r"[0-9.]$", bare[: match.start()])
    }
    return Asked(metrics=frozenset(names), matchers=matchers, labels=frozenset(labels))


@functools.cache
def exported() -> dict[str, Family]:
    """Every name under which a daemon's series are found."""
    found: dict[str, Family] = {}
    for family in FAMILIES:
        names = [family.name + end for end in ("_bucket", "_sum", "_count")] if family.kind is Kind.HISTOGRAM else [family.name]
        found |= dict.fromkeys(names, family)
    return found


def faults(expr: str, *, recorded: Sequence[str] = ()) -> list[str]:
    """What an expression asks for that nobody exports: metrics, labels, and values of labels with a closed set."""
    known, parts = exported(), asked(expr)
    found = [f"nobody exports {name}" for name in parts.metrics if name not in known and name not in recorded and name not in PROCESS | PROMETHEUS]
    every = TARGET | {"le", "alertstate", "alertname", "severity"} | {label.name for family in known.values() for label in family.labels}
    found += [f"nothing has a label {label}" for label in parts.labels if label not in every]
    for name, label, operator, value in parts.matchers:
        if name in known and label not in TARGET | {"le"}:
            found += _unfit(known[name], label, value.split("|") if "~" in operator else [value])
    return found


def _unfit(family: Family, label: str, values: list[str]) -> list[str]:
    has = {one.name: one.values for one in family.labels}
    if label not in has:
        return [f"{family.name} has no label {label}"]
    closed = has[label]
    return [f"{family.name} has no {label} {value!r}" for value in values if closed and value not in closed and not value.startswith("$")]


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Every rule that is shipped, in order. Look, and change nothing."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Those that alert."""
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> list[str]:
    """Names that others record."""
    return [rule["record"] for rule in rules() if "record" in rule]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; without it a test is skipped."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool (package prometheus)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=100)


def well_formed(exprs: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Let promtool read expressions: it takes them only in a file of rules."""
    path = folder / "expressions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": f"r{number}", "expr": expr} for number, expr in enumerate(exprs)]}]}))
    return promtool("check", "rules", "--lint=none", path)
