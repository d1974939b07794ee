"""Incidents as detectors tell them, parsed; and whatever else, refused. The same for settings and the ledger."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.incidents import Incidents
from elasticd.errors import RecordError, UsageError
from elasticd.policy import evidence
from elasticd.policy.budgets import Deed, Ledger, PastFailure
from elasticd.policy.decide import decide
from elasticd.policy.decisions import Action
from elasticd.policy.evidence import Incident, Scope, Standing
from elasticd.policy.failures import FailureClass
from elasticd.policy.settings import Mode, Settings
from tests.policy.made import NOW, state

pytestmark = pytest.mark.timeout(60)


def real(**changes: Any) -> dict[str, Any]:
    """An incident as the detectors' own code makes it."""
    values: dict[str, Any] = {
        "at": NOW - 5.0,
        "detector": "signature",
        "kind": "xid_79",
        "summary": "a GPU fell off the bus",
        "cls": Class.HARDWARE,
        "role": Role.ROOT,
        "certainty": Certainty.CERTAIN,
        "scope": "node",
        "node": "n3",
        "generation": 7,
        "features": (Feature(name="xids", value=1.0, baseline=0.0),),
        "line": "NVRM: Xid (PCI:0000:3b:00): 79",
        **changes,
    }
    (incident,) = Incidents().take(Finding(**values))
    return incident.as_dict()


def test_what_detectors_tell_is_understood_as_it_is_and_after_json() -> None:
    for told in (real(), json.loads(json.dumps(real()))):
        parsed = Incident.from_dict(told)
        assert (parsed.id, parsed.standing, parsed.nodes, parsed.ranks) == ("g7-xid_79-n3", Standing.CONFIRMED, ("n3",), ())
        assert (parsed.root.scope, parsed.root.line, parsed.root.numbers[0].name) == (Scope.NODE, "NVRM: Xid (PCI:0000:3b:00): 79", "xids")
        assert parsed.root.fingerprint == "xid_79@n3"
        (decision,) = decide(state(parsed), NOW)
        assert decision.action is Action.EXCLUDE


def test_the_words_are_those_of_the_detectors() -> None:
    """Whoever adds one there has to say here what it means."""
    assert {one.value for one in Class} == {one.value for one in evidence.Fault}
    assert {one.value for one in Role} == {one.value for one in evidence.Role}
    assert {one.value for one in Certainty} == {one.value for one in evidence.Certainty}


def test_a_number_that_is_none_is_what_a_finding_may_be_about() -> None:
    parsed = Incident.from_dict(real(features=(Feature(name="loss", value=math.nan), Feature(name="scale", value=math.inf, z=3.0))))
    assert [(one.value, one.z) for one in parsed.root.numbers] == [(None, None), (None, 3.0)]


def test_a_text_of_somebody_elses_is_made_harmless() -> None:
    root = Incident.from_dict(real(line="\x1b[2J\nrm" + "x" * 5000)).root
    assert root.line.isprintable()
    assert len(root.line) == 1000


def spoilt(path: str, value: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(real()))
    *parents, last = path.split(".")
    place: Any = told
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return told


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", ...),
        ("id", ""),
        ("id", "../x"),
        ("id", 7),
        ("state", "certain"),
        ("state", None),
        ("opened", "now"),
        ("opened", math.nan),
        ("opened", -1.0),
        ("opened", True),
        ("opened", 1e300),
        ("updated", None),
        ("count", 0),
        ("count", 1.5),
        ("corroborated", "yes"),
        ("extra", 1),
        ("root", []),
        ("root.cls", "disaster"),
        ("root.rank", -1),
        ("root.rank", True),
        ("root.node", "a b"),
        ("root.summary", 5),
        ("root.extra", 1),
        ("root.features", {}),
        ("root.features.0.value", "high"),
        ("root.features.0.extra", 1),
        ("findings", ["x"]),
        ("findings", [None] * 500),
        ("findings.0.at", ...),
    ],
)
def test_garbage_is_refused_and_the_place_is_named(path: str, value: object) -> None:
    with pytest.raises(RecordError, match=path.rpartition(".")[2] if not path.startswith("findings") else "findings"):
        Incident.from_dict(spoilt(path, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
PATHS = [
    "id",
    "state",
    "root",
    "findings",
    "count",
    "opened",
    "updated",
    "corroborated",
    "root.cls",
    "root.rank",
    "root.features",
    "root.began",
    "root.features.0.value",
]


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_whatever_comes_is_parsed_or_refused(path: str, value: object) -> None:
    try:
        parsed = Incident.from_dict(spoilt(path, value))
    except RecordError:
        return
    decide(state(parsed), NOW)


@settings(max_examples=50, deadline=None)
@given(value=JSON)
def test_no_garbage_is_taken_for_a_ledger(value: object) -> None:
    with pytest.raises(RecordError):
        Ledger.from_dict(value)


def test_a_ledger_comes_back_from_json_as_it_was() -> None:
    ledger = Ledger(
        deeds=(Deed(at=1.0, action=Action.RESTART, about="g7-a-n1", fingerprint="a@n1/r3", node="n1", certain=True, cost_s=2.5),),
        failures=(PastFailure(at=2.0, cls=FailureClass.USER, kind="KeyError", node="n1", checkpoint_step=4, step=5),),
        spent={FailureClass.USER: 2},
        refilled_at=3,
        best_step=4,
        barren=1,
        hardware={"n1": 5.0},
    )
    assert Ledger.from_dict(json.loads(json.dumps(ledger.as_dict()))) == ledger
    assert Ledger.from_dict(Ledger().as_dict()) == Ledger()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cooldown": 3}, "cooldown"),
        ({"cooldown_s": -1}, "cooldown_s"),
        ({"cooldown_s": "long"}, "cooldown_s"),
        ({"cooldown_s": math.nan}, "cooldown_s"),
        ({"user_restarts": 1.5}, "user_restarts"),
        ({"user_restarts": True}, "user_restarts"),
        ({"mode": "on"}, "mode"),
        ({"mode": 1}, "mode"),
        ({"p_weak": 1.1}, "p_weak"),
    ],
)
def test_settings_outside_of_their_limits_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Settings.from_dict(values)


def test_settings_are_parsed_and_each_has_a_reason() -> None:
    parsed = Settings.from_dict({"mode": "shadow", "cooldown_s": 60, "user_restarts": 2})
    assert (parsed.mode, parsed.cooldown_s, parsed.user_restarts, parsed.memory_restarts) == (Mode.SHADOW, 60.0, 2, 1)
    assert all(why.strip() for _, _, why in Settings.explain())
    with pytest.raises(UsageError, match="restarts_per_hour"):
        Settings(restarts_per_hour=-1)
