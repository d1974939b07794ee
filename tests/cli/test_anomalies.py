"""`elasticctl anomalies` and `explain`: what is shown of incidents, to people and to programs; and `detect` on recorded logs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elasticd.cli.main import app
from tests.cli.pretend import PretendDaemon
from tests.cli.test_logs import following

pytestmark = pytest.mark.timeout(120)

Document = dict[str, Any]
ASKED = "GET /v1/anomalies"


@pytest.fixture
def daemon() -> Iterator[PretendDaemon]:
    with tempfile.TemporaryDirectory(prefix="elasticctl-test-") as folder, PretendDaemon(Path(folder) / "api.sock") as daemon:
        yield daemon


def call(daemon: PretendDaemon, *arguments: str) -> Result:
    verb, *rest = arguments
    return CliRunner().invoke(app, [verb, "--socket", str(daemon.path), *rest], prog_name="elasticctl")


def finding(kind: str = "straggler", **changes: Any) -> Document:
    features = [{"name": "compute_s", "value": 0.0252, "baseline": 0.021, "peers": 0.0209, "z": 9.13}]
    said = {"at": 1_700_000_000.0, "detector": "peers", "kind": kind, "summary": "rank 5 takes 20 % longer than the others", "cls": "hardware", "role": "root"}
    where = {"certainty": "strong", "scope": "rank", "node": "node-3", "rank": 5, "generation": 7, "features": features, "line": "", "began": None}
    return {**said, **where, **changes}


def incident(name: str = "g7-straggler-node-3-r5", state: str = "confirmed", seen_by: str = "node-0", **changes: Any) -> Document:
    root = finding()
    more = {"root": root, "findings": [root], "count": 4, "opened": 1_700_000_000.0, "updated": 1_700_000_060.0, "corroborated": False, "why_over": ""}
    where = {"cls": "hardware", "certainty": "strong", "nodes": ["node-3"], "ranks": [5]}
    return {"id": name, "job": "llm", "seen_by": seen_by, "state": state, **more, **where, **changes}


def answer(*incidents: Document, problem: str = "", notes: tuple[str, ...] = (), policies: tuple[Document, ...] = ()) -> Document:
    detector = {"node": "node-0", "running": not problem, "restarts": 0, "rss": 1 << 27, "jobs": {}, "problem": problem}
    return {"node": "node-0", "detectors": [detector], "incidents": list(incidents), "policies": list(policies), "notes": list(notes)}


def decision(**changes: Any) -> Document:
    why = "rank 5 takes 20 % longer than the others; to leave it out pays"
    said = {
        "about": "g7-straggler-node-3-r5",
        "at": 1_700_000_060.0,
        "action": "exclude",
        "would": "exclude",
        "wanted": "exclude",
        "rule": "straggler",
        "why": why,
    }
    more = {"node": "node-3", "ranks": [5], "numbers": {"C_s": 0.5, "R_s": 3.0, "slowdown": 0.2}, "alert": True, "until": 1_700_003_660.0, "came_to": ""}
    return {**said, **more, **changes}


def policy(*decisions: Document, **changes: Any) -> Document:
    return {
        "job": "llm", "mode": "act", "held": False, "decisions": list(decisions), "came_of": [], "acks": {}, "budget": None, "problem": "", **changes
    }  # fmt: skip


def test_what_is_believed_is_a_line_and_what_is_not_is_shown_with_all(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(incident(), incident("g7-joint_drift-node-1-r2", "suspect"), incident("g6-nonfinite-n1-r0", "over")), revision=None)
    (line,) = call(daemon, "anomalies").stdout.splitlines()
    assert "llm  confirmed  hardware   node-3: rank 5 takes 20 % longer than the others  (g7-straggler-node-3-r5)" in line
    assert len(call(daemon, "anomalies", "--all").stdout.splitlines()) == 3


def test_one_that_several_nodes_see_is_told_once(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(incident(), incident(seen_by="node-1")), revision=None)
    assert len(call(daemon, "anomalies").stdout.splitlines()) == 1


def test_nothing_found_is_said_and_blind_nodes_are_named(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(problem="it ended with 1"), revision=None)
    result = call(daemon, "anomalies")
    assert result.stdout == "nothing was found\n"
    assert result.stderr == "elasticctl: node-0: it ended with 1\n"


def test_json_is_the_answer_and_lines_are_incidents(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(incident()), revision=None)
    assert json.loads(call(daemon, "anomalies", "-o", "json").stdout)["data"]["incidents"] == [incident()]
    assert json.loads(call(daemon, "anomalies", "-o", "jsonl").stdout) == incident()


def test_following_tells_what_comes_and_what_changes(daemon: PretendDaemon) -> None:
    grown = incident(corroborated=True)
    daemon.tell(ASKED, "Anomalies", answer(), answer(incident()), answer(incident()), answer(grown), revision=None)
    with following(daemon.path, verb="anomalies", job=None) as follower:
        follower.until("g7-straggler-node-3-r5")
        daemon.await_asked(ASKED, 5)
        assert follower.end() == 130
    assert len(follower.out) == 2, "once when it came, once when a second detector agreed"


def test_all_that_it_rests_on_is_explained(daemon: PretendDaemon) -> None:
    xid = finding("xid_79", detector="signature", summary="the GPU fell off the bus", line="NVRM: Xid (PCI:0000:3b:00): 79", certainty="certain")
    daemon.tell(ASKED, "Anomalies", answer(incident(findings=[finding(), xid], corroborated=True)), revision=None)
    shown = call(daemon, "explain", "g7-straggler-node-3-r5").stdout
    assert "g7-straggler-node-3-r5: rank 5 takes 20 % longer than the others" in shown
    assert "a comparison that held on, of more than one detector" in shown
    assert "hardware: go on without the node" in shown
    assert "compute_s 0.0252, usually 0.021, other ranks 0.0209, +9.1 standard deviations" in shown
    assert "with       signature xid_79" in shown
    assert "NVRM: Xid (PCI:0000:3b:00): 79" in shown


def test_one_that_nobody_knows_is_no_such_thing(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(), revision=None)
    result = call(daemon, "explain", "g1-nothing")
    assert result.exit_code == 3
    assert "no node knows an incident 'g1-nothing'" in result.stderr


def test_what_logs_brought_along_does_nothing_to_a_terminal(daemon: PretendDaemon) -> None:
    wild = finding(summary="\x1b]0;owned\x07 rank 5", line="\x1b[2J")
    daemon.tell(ASKED, "Anomalies", answer(incident(root=wild, findings=[wild])), revision=None)
    for verb in (("anomalies",), ("explain", "g7-straggler-node-3-r5")):
        assert "\x1b" not in call(daemon, *verb).stdout


# --- detect --------------------------------------------------------------------------------------------------------------


def detect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "elasticd.cli", "detect", *arguments], capture_output=True, text=True, timeout=90, check=False)


def test_a_recording_is_judged(tmp_path: Path) -> None:
    logs = tmp_path / "logs/n1"
    logs.mkdir(parents=True)
    (logs / "dmesg.log").write_text("[Tue Dec  1 00:00:00 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off the bus.\n")
    shown = detect("--replay", str(tmp_path / "logs"), "--no-forest")
    assert shown.returncode == 0, shown.stderr
    assert "1 incident: 1 confirmed" in shown.stdout
    assert "xid_79" in shown.stdout
    assert detect("--replay", str(tmp_path / "logs"), "--no-forest", "--exit-code").returncode == 3
    document = json.loads(detect("--replay", str(tmp_path / "logs"), "--no-forest", "-o", "json").stdout)
    assert [one["root"]["kind"] for one in document["incidents"]] == ["xid_79"]


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    shown = detect("--replay", str(tmp_path / "none"))
    assert shown.returncode == 2
    assert shown.stderr.splitlines() == [f"detectors: {tmp_path / 'none'}: No such file or directory"]


def test_learning_needs_a_place(tmp_path: Path) -> None:
    shown = detect("--replay", str(tmp_path), "--learn")
    assert shown.returncode == 2
    assert "--learn needs --memory DIR" in shown.stderr


# --- what was decided -----------------------------------------------------------------------------------------------------


def test_explain_tells_what_was_decided_why_what_was_weighed_and_what_it_came_to(daemon: PretendDaemon) -> None:
    saved = "this exclude saved about 12 min, cost 3.5 s"
    told = policy(decision(came_to=saved), acks={"g7-straggler-node-3-r5": "ada (uid 1000, pid 77): on my way"})
    daemon.tell(ASKED, "Anomalies", answer(incident(), policies=(told, policy(decision(), job="other"))), revision=None)
    shown = call(daemon, "explain", "g7-straggler-node-3-r5").stdout
    assert "  decided    exclude at " in shown
    assert "rule straggler: rank 5 takes 20 % longer than the others; to leave it out pays" in shown
    assert "C_s 0.5, R_s 3, slowdown 0.2" in shown
    assert saved in shown
    assert "node-3 comes back at " in shown
    assert "  known to   ada (uid 1000, pid 77): on my way" in shown
    assert shown.count("decided") == 1, "of its own job alone"


def test_what_the_mode_withholds_is_told_as_what_would_be(daemon: PretendDaemon) -> None:
    told = policy(decision(action="log", until=None), mode="advise")
    daemon.tell(ASKED, "Anomalies", answer(incident(), policies=(told,)), revision=None)
    assert "decided    nothing (mode advise: would exclude) at " in call(daemon, "explain", "g7-straggler-node-3-r5").stdout


def test_what_was_decided_is_told_though_its_detectors_are_gone(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(policies=(policy(decision()),)), revision=None)
    shown = call(daemon, "explain", "g7-straggler-node-3-r5")
    assert shown.exit_code == 0
    assert "decided    exclude" in shown.stdout


def test_anomalies_ends_with_what_came_of_it(daemon: PretendDaemon) -> None:
    sentence = "would have restarted 3 times in 40 h, 0 followed by a failure"
    told = policy(came_of=[sentence], held=True)
    broken = policy(job="other", problem="what was done cannot be read")
    daemon.tell(ASKED, "Anomalies", answer(policies=(told, broken)), revision=None)
    assert call(daemon, "anomalies").stdout.splitlines() == [
        "nothing was found",
        f"llm: {sentence}",
        "llm: no checkpoint is committed until its state is known to be good",
        "other: what was done cannot be read",
    ]


# --- ack ------------------------------------------------------------------------------------------------------------------

ACKED = "POST /v1/jobs/llm/incidents/g7-straggler-node-3-r5/ack"


def test_ack_finds_the_job_and_says_what_it_means(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(incident()), revision=None)
    daemon.tell(ACKED, "Change", {"changed": True, "job": "llm", "before": None, "after": {"acknowledged": "ada"}, "generation": None, "dry_run": False})
    result = call(daemon, "ack", "g7-straggler-node-3-r5", "--reason", "fan")
    assert result.stdout == "g7-straggler-node-3-r5: nothing more is done about it of free will, and nobody is alerted\n"
    assert daemon.body(ACKED) == {"reason": "fan"}


def test_ack_a_second_time_says_who_was_first(daemon: PretendDaemon) -> None:
    before = {"acknowledged": "bob (uid 7, pid 8)"}
    daemon.tell(ACKED, "Change", {"changed": False, "job": "llm", "before": before, "after": before, "generation": None, "dry_run": False})
    result = call(daemon, "ack", "g7-straggler-node-3-r5", "--job", "llm")
    assert result.stdout == "g7-straggler-node-3-r5 was acknowledged before, by bob (uid 7, pid 8)\n"


def test_ack_of_what_nobody_knows_or_several_jobs_have(daemon: PretendDaemon) -> None:
    daemon.tell(ASKED, "Anomalies", answer(incident(), incident(job="other")), revision=None)
    unknown = call(daemon, "ack", "g1-nothing")
    assert (unknown.exit_code, "no node knows an incident" in unknown.stderr) == (3, True)
    several = call(daemon, "ack", "g7-straggler-node-3-r5")
    assert (several.exit_code, "jobs llm, other each have" in several.stderr) == (2, True)
    odd = call(daemon, "ack", "no/name")
    assert odd.exit_code == 2
