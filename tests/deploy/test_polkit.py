"""The polkit rule: the daemon's user may start, stop and kill agents, and may do nothing else, and nobody else may anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from elasticd.daemon import backends
from elasticd.rendezvous import keys
from tests.deploy.installation import ROOT

RULES = ROOT / "deploy" / "systemd" / "50-elasticd.rules"
MANAGE = "org.freedesktop.systemd1.manage-units"
AGENT = "elasticd-agent@digits.service"

# What polkitd hands to a rule: an action with an id and details, a subject with a user; lookup gives undefined for a detail that is not there.
HARNESS = """
const rules = [];
const polkit = {addRule: rule => rules.push(rule), Result: {YES: "yes", NO: "no", NOT_HANDLED: "not handled"}};
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
new Function("polkit", asked.rules)(polkit);
const answers = asked.cases.map(([id, user, details]) => rules.map(rule => rule({id, lookup: name => details[name]}, {user})));
console.log(JSON.stringify(answers));
"""


def answers(cases: list[tuple[str, str, dict[str, str]]]) -> list[list[str]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to run the rule as polkitd would")
    asked = json.dumps({"rules": RULES.read_text(), "cases": cases})
    done = subprocess.run([node, "-e", HARNESS], input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answered: list[list[str]] = json.loads(done.stdout)
    return answered


@pytest.mark.parametrize("verb", ["start", "stop", "kill"])
@pytest.mark.parametrize("job", ["digits", "a", "Llama-3.1_8B", "9"])
def test_the_daemon_may_start_stop_and_kill_an_agent(verb: str, job: str) -> None:
    assert answers([(MANAGE, "elasticd", {"unit": f"elasticd-agent@{job}.service", "verb": verb})]) == [["yes"]]


@pytest.mark.parametrize(
    ("action", "user", "details"),
    [
        (MANAGE, "trainer", {"unit": AGENT, "verb": "start"}),
        (MANAGE, "elasticd-ops", {"unit": AGENT, "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd.service", "verb": "stop"}),
        (MANAGE, "elasticd", {"unit": "ssh.service", "verb": "stop"}),
        (MANAGE, "elasticd", {"unit": "x-elasticd-agent@digits.service", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd-agent@digits.service.d", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd-agent@digits.socket", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd-agent@.service", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd-agent@a\\x2fb.service", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": "elasticd-agent@a\nssh.service", "verb": "start"}),
        (MANAGE, "elasticd", {"unit": AGENT, "verb": "set-property"}),
        (MANAGE, "elasticd", {"unit": AGENT, "verb": "restart"}),
        (MANAGE, "elasticd", {"unit": AGENT, "verb": "freeze"}),
        (MANAGE, "elasticd", {"unit": AGENT}),
        (MANAGE, "elasticd", {}),  # a transient unit: systemd names neither unit nor verb
        ("org.freedesktop.systemd1.manage-unit-files", "elasticd", {"unit": AGENT, "verb": "start"}),
        ("org.freedesktop.systemd1.reload-daemon", "elasticd", {}),
    ],
)
def test_anything_else_is_left_to_other_rules(action: str, user: str, details: dict[str, str]) -> None:
    assert answers([(action, user, details)]) == [["not handled"]]


def test_the_units_are_exactly_those_of_jobs() -> None:
    """Without running it: the rule's pattern is the daemon's unit name around the pattern of a job's name, but for its length."""
    (pattern,) = re.findall(r"/(\^elasticd.*?)/\.test\(action\.lookup\(\"unit\"\)\)", RULES.read_text())
    before, after = backends.UNIT.split("{}")
    name = keys._NAME.pattern.replace("{0,127}", "*")
    assert pattern == f"^{before}{name}{re.escape(after)}$"


def test_the_verbs_are_those_that_the_daemon_uses() -> None:
    source = (ROOT / "elasticd" / "daemon" / "backends.py").read_text()
    used = set(re.findall(r'_systemctl\("([a-z-]+)"', source)) - {"show", "list-jobs"}  # reading is everybody's
    (allowed,) = re.findall(r"/\^\(([a-z|-]+)\)\$/\.test\(action\.lookup\(\"verb\"\)\)", RULES.read_text())
    assert used == set(allowed.split("|"))
