"""The runbooks: each alert has one, it has what a person at night looks for, and what it tells them to type exists."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import typer.main

from elasticd.cli.main import app as elasticctl
from elasticd.daemon.__main__ import app as elasticd
from tests.deploy.installation import ROOT
from tests.deploy.promql import alerts, asked, faults, recorded, well_formed

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "docs" / "runbooks"
INDEX = (FOLDER / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.stem not in {"README", "followed"}}
FOLLOWED = (FOLDER / "followed.md").read_text()
NAMES = sorted({rule["alert"] for rule in alerts()})
HEADINGS = ["## Affected", "## Look", "## Causes, likeliest first", "## Over when"]
LINES_MAX = 60


def shell(text: str) -> list[str]:
    """Blocks of commands."""
    return re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    """What is set in backticks, and the lines of blocks."""
    return [*re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)), *"".join(shell(text)).splitlines()]


def promql(text: str) -> list[str]:
    """Expressions in backticks: what has a metric's name in it, and more than that name."""
    return [one for one in re.findall(r"`([^`\n]+)`", text) if re.search(r"\belasticd_\w+|up\{", one) and re.search(r"[({]", one)]


def sources() -> str:
    """All that is written in this project, but for the documents."""
    return "\n".join(path.read_text() for folder in ("elasticd", "trainer", "deploy") for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


SUFFIXES = {".py", ".toml", ".yml", ".service", ".md"}


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert sorted(PAGES) == NAMES


def test_the_index_names_every_page_with_the_severities_of_its_alert() -> None:
    told = dict(re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| ([a-z, ]+) \|", INDEX, flags=re.MULTILINE))
    assert told == {name: ", ".join(rule["labels"]["severity"] for rule in alerts() if rule["alert"] == name) for name in NAMES}


def test_it_is_told_of_every_alert_how_its_page_was_followed() -> None:
    rows = re.findall(r"^\| (Elasticd\w+(?:, Elasticd\w+)*) \|", FOLLOWED, flags=re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_what_is_looked_for_at_night_and_not_more(name: str) -> None:
    text = PAGES[name]
    title, _, meaning, *_ = text.splitlines()
    assert title == f"# {name}"
    assert len(meaning) > 20
    assert [line for line in text.splitlines() if line.startswith("## ")] == HEADINGS
    assert shell(text), "commands to look with"
    assert len(text.splitlines()) <= LINES_MAX


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_how_to_silence_its_alert_by_labels_that_it_has(name: str) -> None:
    (line,) = re.findall(r"^Silence: `(amtool silence add .*)`$", PAGES[name], flags=re.MULTILINE)
    words = line.split()[3:]
    assert words[0] == f"alertname={name}"
    labels = {word.partition("=")[0] for word in words[1:] if not word.startswith("--")}
    (first, *_) = [rule for rule in alerts() if rule["alert"] == name]
    fits = asked(first["expr"]).labels | {"instance", "certificate", "gpu", "job_name"}
    assert labels <= fits
    assert ("job_name" in labels) == ("job_name }} " in first["annotations"]["summary"] + " ")
    assert {word.partition("=")[0] for word in words if word.startswith("--")} == {"--duration", "--comment"}


@pytest.mark.parametrize("name", [*NAMES, "README"])
def test_links_lead_somewhere(name: str) -> None:
    text = PAGES.get(name, INDEX)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (FOLDER / target).exists(), target
    for path in re.findall(r"`((?:docs|deploy)/[\w./-]+)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_shell(name: str) -> None:
    for block in shell(PAGES[name]):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("program", "app"), [("elasticctl", elasticctl), ("elasticd", elasticd)])
def test_every_verb_and_option_exists(program: str, app: typer.Typer) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for text in (*PAGES.values(), INDEX) for part in code(text) for line in re.findall(rf"(?<![-/.\w]){program} ([a-z][^#|;)]*)", part)]
    assert len(lines) > (50 if program == "elasticctl" else 1)
    for line in lines:
        first, *words = line.split()
        if program == "elasticd" and first not in commands:  # a unit's name in systemctl or journalctl, followed by something else
            continue
        assert first in commands, line
        found = commands[first]
        if hasattr(found, "commands"):  # config show, config set
            found = found.commands[words[0]]
        options = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= options, line


def test_units_that_are_named_are_ours_or_of_what_we_need() -> None:
    named = {
        unit
        for text in PAGES.values()
        for unit in re.findall(r"journalctl -u ([\w@-]+)|systemctl (?:start|status|restart|reload) ([\w@-]+)", text)
        for unit in unit
        if unit
    }
    assert named <= {"elasticd", "elasticd-agent@JOB", "etcd", "dbus"}


def test_what_is_said_to_be_in_logs_or_settings_is_there() -> None:
    """Words with an underscore: events of the log, settings, fields of files."""
    have = sources() + (ROOT / "docs" / "metrics.md").read_text() + "".join(recorded())
    foreign = {"num_workers", "state_dict"}
    for name, text in PAGES.items():
        bare = re.sub(r"--[\w-]+", "", text)
        words = {word for part in code(bare) if not promql(f"`{part}`") for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", part)}
        words = {word for word in words if not word.startswith("etcd_")} - foreign - {"job_name"}
        assert [word for word in sorted(words) if not re.search(rf"\b{word}\b", have)] == [], name


def test_what_is_to_be_asked_of_prometheus_can_be(tmp_path: Path) -> None:
    exprs = [one for text in PAGES.values() for one in promql(text)]
    assert len(exprs) > 5
    assert [fault for expr in exprs for fault in faults(expr, recorded=recorded())] == []
    done = well_formed(exprs, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
