"""The rules that Prometheus is given: it takes them, each alert comes when it is to and only then, and none looks at what nobody exports."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.installation import ROOT
from tests.deploy.promql import RULES, alerts, asked, exported, faults, promtool, recorded, rules

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "tests" / "deploy" / "prometheus"
FILES = sorted(FOLDER.glob("*.test.yml"))
NAMES = sorted({rule["alert"] for rule in alerts()})
PENDING = re.compile(r'count by \(alertstate\) \(ALERTS\{alertname="(\w+)"\}\)')


@functools.cache
def groups() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of cases, with the file it is in. Look, and change nothing."""
    return [(file, group) for file in (yaml.safe_load(path.read_text()) for path in FILES) for group in file["tests"]]


def checks(alert: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """File, group and check of each check of an alert."""
    return [(file, group, check) for file, group in groups() for check in group.get("alert_rule_test", []) if check["alertname"] == alert]


def seconds(text: Any) -> int:
    """Of a duration such as 1h5m."""
    return sum(int(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([dhms])", str(text)))


def severities_of(check: dict[str, Any]) -> set[str]:
    """Of the alerts that a check expects."""
    return {fired["exp_labels"]["severity"] for fired in check["exp_alerts"]}


def pending(file: dict[str, Any], group: dict[str, Any], alert: str) -> set[int]:
    """When an alert is said to be pending and no more."""
    return {
        seconds(test["eval_time"])
        for test in group.get("promql_expr_test", [])
        for named in PENDING.findall(test["expr"])
        if named == alert and [sample["labels"] for sample in test["exp_samples"]] == ['{alertstate="pending"}']
    }


def test_promtool_takes_the_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_example_configuration() -> None:
    done = promtool("check", "config", RULES.with_name("prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_amtool_takes_the_example_configuration() -> None:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("needs amtool (package prometheus-alertmanager)")
    done = subprocess.run([program, "check-config", RULES.with_name("alertmanager.yml")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_scrapes_by_the_name_that_the_rules_look_for() -> None:
    config = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
    assert {value for rule in rules() for name, label, _, value in asked(rule["expr"]).matchers if label == "job"} == {"elasticd"}
    assert [scrape["job_name"] for scrape in config["scrape_configs"]] == ["elasticd"]
    assert config["rule_files"] == [RULES.name]


def test_the_example_inhibits_alerts_that_exist() -> None:
    config = yaml.safe_load(RULES.with_name("alertmanager.yml").read_text())
    told = [matcher for rule in config["inhibit_rules"] for key in ("source_matchers", "target_matchers") for matcher in rule[key]]
    patterns = [pattern for matcher in told if matcher.startswith("alertname") for pattern in re.findall(r'"(.*)"', matcher)[0].split("|")]
    assert patterns
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in NAMES)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_every_case_comes_out_as_it_is_written(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", NAMES)
def test_an_alert_has_cases_in_which_it_is_silent_and_fires(alert: str) -> None:
    found = [bool(check["exp_alerts"]) for _, _, check in checks(alert)]
    assert True in found
    assert False in found or any(pending(file, group, alert) for file, group in groups())


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_has_a_case_of_the_look_at_which_it_fires_and_of_the_one_before(rule: dict[str, Any]) -> None:
    """Where it waits (`for`), it is pending at the one before, or less severe."""
    alert, severity = rule["alert"], rule["labels"]["severity"]
    fired = [(file, group, check) for file, group, check in checks(alert) if severity in severities_of(check)]
    edges = []
    for file, group, check in fired:
        before = seconds(check["eval_time"]) - seconds(file["evaluation_interval"])
        others = [one for one in group["alert_rule_test"] if one["alertname"] == alert and seconds(one["eval_time"]) == before]
        edges += [before] if before in pending(file, group, alert) or (others and not any(severity in severities_of(one) for one in others)) else []
    if "for" in rule:
        assert edges
    else:
        assert [check for _, _, check in checks(alert) if severity not in severities_of(check)]


@pytest.mark.parametrize("alert", NAMES)
def test_each_severity_of_an_alert_has_fired_in_a_case(alert: str) -> None:
    severities = {rule["labels"]["severity"] for rule in alerts() if rule["alert"] == alert}
    assert {severity for _, _, check in checks(alert) for severity in severities_of(check)} == severities


@pytest.mark.parametrize("alert", sorted({rule["alert"] for rule in alerts() if rule["labels"]["severity"] == "critical"}))
def test_an_alert_that_wakes_people_has_a_case_that_must_not_deceive_it(alert: str) -> None:
    assert len({group["name"] for _, group, _ in checks(alert)}) > 1


def test_what_is_recorded_has_a_case_by_value() -> None:
    told = {name for _, group in groups() for test in group.get("promql_expr_test", []) for name in asked(test["expr"]).metrics}
    assert set(recorded()) <= told


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_nothing_that_nobody_exports(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"], recorded=recorded()) == []


def test_no_case_is_made_of_series_that_nobody_exports() -> None:
    known = exported()
    for _, group in groups():
        for series in group["input_series"]:
            assert faults(series["series"]) == [], series
            (name,) = asked(series["series"]).metrics
            labels = {label for _, label, _, _ in asked(series["series"]).matchers} - {"cluster", "instance", "job", "le"}
            assert name not in known or labels == {label.name for label in known[name].labels}, series


def test_the_judge_of_expressions_sees_what_is_wrong() -> None:
    assert faults('sum by (cluster) (rate(elasticd_job_wall_seconds_total{activity="training"}[5m])) > 0.5 and up == 1') == []
    assert faults("elasticd_jobs_nodes > 1") == ["nobody exports elasticd_jobs_nodes"]
    assert faults("node_load1 > 1 or elasticd_frozen") == ["nobody exports node_load1"]
    assert faults('elasticd_job_activity{activity=~"training|sleeping"}') == ["elasticd_job_activity has no activity 'sleeping'"]
    assert faults('elasticd_frozen{node="n1"}') == ["elasticd_frozen has no label node"]
    assert faults("max by (nodename) (elasticd_frozen)") == ["nothing has a label nodename"]
    assert faults("elasticd_job_recovery_duration_seconds > 1") == ["nobody exports elasticd_job_recovery_duration_seconds"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_says_what_is_wrong_how_bad_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert annotations["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    assert not annotations["summary"].endswith(".")
    assert annotations["description"].endswith((".", "?"))
    assert all(len(text) <= 300 for text in annotations.values())


@pytest.mark.parametrize("alert", NAMES)
def test_no_text_of_an_alert_lacks_a_word_when_it_comes(alert: str) -> None:
    for _, _, check in checks(alert):
        for fired in check["exp_alerts"]:
            told = " ".join(fired["exp_annotations"].values())
            assert not re.search(r"<no value>|<error|NaN(?! or)|\bInf|\{\{|  |\b(GPU|Job|Certificate|of|on) (has|ends|is|does|of|$)", told), told
