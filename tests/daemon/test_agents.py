"""What is remembered of agents, and what systemd says of them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.daemon.agents import LONG_LIFE, Agents, Note, Started
from elasticd.daemon.backends import parse_units
from elasticd.daemon.processes import process_start
from elasticd.errors import ElasticdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SHOWN = """Id=elasticd-agent@llm.service
ActiveState=active
MainPID=812

Id=elasticd-agent@old-one.2.service
ActiveState=failed
MainPID=0

Id=elasticd-agent@ends.service
ActiveState=deactivating
MainPID=900

Id=elasticd-agent@comes.service
ActiveState=activating
MainPID=0

Id=sshd.service
ActiveState=active
MainPID=1
"""


def test_of_what_systemd_shows_the_living_agents_are_taken() -> None:
    assert parse_units(SHOWN) == {"llm": 812, "ends": 900}


@pytest.mark.parametrize("shown", ["", "\n", "garbage", "Id=\nActiveState=active\nMainPID=x", "Id=elasticd-agent@../x.service\nActiveState=active\nMainPID=7"])
def test_what_systemd_shows_of_nothing_is_nothing(shown: str) -> None:
    assert parse_units(shown) == {}


class Sleepers:
    """Real processes that do nothing, in place of agents, which would import torch."""

    def __init__(self) -> None:
        self.refuse = ""
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.asked: list[str] = []

    def start(self, job: str, config: Path, log_folder: Path) -> Started:
        if self.refuse:
            raise ElasticdError(self.refuse)
        self.children[job] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pid = self.children[job].pid
        return Started(pid, process_start(pid) or 0)

    def pids(self, notes: Mapping[str, Note]) -> dict[str, int]:
        for child in self.children.values():
            child.poll()
        return {job: note.pid for job, note in notes.items() if note.pid and process_start(note.pid) == note.born}

    def leave(self, job: str, pid: int) -> None:
        self.asked.append(job)

    def kill(self, job: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def end(self, job: str) -> None:
        self.children[job].kill()
        self.children[job].wait(10)


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    backend = Sleepers()
    yield backend
    for job in backend.children:
        backend.end(job)


def config(folder: Path) -> AgentConfig:
    return AgentConfig(job="a", node="n", argv=("/bin/true",), cwd=folder, log_dir=folder / "logs", endpoints=("127.0.0.1:1",), max_nodes=1, desired=1)


def started(folder: Path, backend: Sleepers) -> Agents:
    agents = Agents(folder / "run", backend)
    agents.start("a", config(folder), slots=("slot-0",), digest="d1")
    return agents


def test_an_agent_that_was_started_is_seen_with_what_it_was_given(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = started(tmp_path, sleepers)
    seen = agents.look(1.0)["a"]
    assert (seen.running, seen.slots, seen.digest, seen.asked_to_leave) == (True, ("slot-0",), "d1", False)
    assert agents.running == {"a": sleepers.children["a"].pid}
    assert len(agents.fds) == 1
    agents.close()


def test_its_configuration_names_keys_and_is_for_us_alone(tmp_path: Path, sleepers: Sleepers) -> None:
    started(tmp_path, sleepers).close()
    for name in ("agents", "notes"):
        folder = tmp_path / "run" / name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {"a.json": 0o600}


def test_jobs_whose_names_hold_dots_are_kept_apart(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = Agents(tmp_path / "run", sleepers)
    for job in ("a", "a.json", "a.note"):
        agents.start(job, config(tmp_path), slots=(job,), digest="d1")
    agents.close()
    again = Agents(tmp_path / "run", sleepers)
    assert {job: seen.slots for job, seen in again.look(1.0).items()} == {"a": ("a",), "a.json": ("a.json",), "a.note": ("a.note",)}
    again.close()


def test_the_next_daemon_finds_it_and_what_was_asked_of_it(tmp_path: Path, sleepers: Sleepers) -> None:
    first = started(tmp_path, sleepers)
    first.look(1.0)
    first.leave("a", "drain")
    first.close()
    assert sleepers.asked == ["a"]
    second = Agents(tmp_path / "run", sleepers)
    seen = second.look(1.0)["a"]
    assert (seen.running, seen.slots, seen.digest, seen.asked_to_leave) == (True, ("slot-0",), "d1", True)
    second.close()


def test_a_pid_that_another_process_got_is_not_taken_for_it(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = started(tmp_path, sleepers)
    agents.close()
    path = tmp_path / "run/notes/a.json"
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "pid": os.getpid()}))
    second = Agents(tmp_path / "run", sleepers)
    assert not second.look(1.0)["a"].running
    assert second.running == {}
    second.close()


def test_an_end_is_seen_with_the_agents_last_word_and_counted(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = started(tmp_path, sleepers)
    agents.look(1.0)
    agents.result_file("a").write_text(json.dumps({"code": 1, "result": "failed", "reason": "no route", "ended_at": 1.0}))
    sleepers.end("a")
    seen = agents.look(5.0)["a"]
    assert (seen.running, seen.code, seen.reason, seen.ended_at, seen.ends) == (False, 1, "no route", 5.0, 1)
    assert agents.look(9.0)["a"].ended_at == 5.0
    assert agents.code_of("a") == 1
    assert agents.fds == []
    agents.start("a", config(tmp_path), slots=("slot-0",), digest="d1")
    agents.look(10.0)
    sleepers.end("a")
    seen = agents.look(11.0)["a"]
    assert (seen.code, seen.ends) == (None, 2), "killed: it left no word, and the earlier one is not taken for it"
    assert agents.code_of("a") == 137
    agents.close()


def test_a_report_stays_when_its_agent_has_ended_and_goes_when_another_is_started(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = started(tmp_path, sleepers)
    report = agents.report_file("a")
    assert report == tmp_path / "run/reports/a.json"
    assert stat.S_IMODE(report.parent.stat().st_mode) == 0o700
    report.write_text("{}")
    sleepers.end("a")
    assert not agents.look(1.0)["a"].running
    assert report.exists()
    agents.start("a", config(tmp_path), slots=(), digest="d1")
    assert not report.exists()
    agents.close()


def test_a_good_end_and_one_after_a_long_life_begin_the_count_anew(tmp_path: Path, sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = started(tmp_path, sleepers)
    agents.look(1.0)
    sleepers.end("a")
    assert agents.look(2.0)["a"].ends == 1
    agents.start("a", config(tmp_path), slots=(), digest="d1")
    agents.look(3.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LONG_LIFE + 1)
    sleepers.end("a")
    assert agents.look(4.0)["a"].ends == 1
    monkeypatch.undo()
    agents.start("a", config(tmp_path), slots=(), digest="d1")
    agents.look(5.0)
    agents.result_file("a").write_text(json.dumps({"code": 0, "result": "left"}))
    sleepers.end("a")
    assert agents.look(6.0)["a"].ends == 0
    agents.close()


def test_what_could_not_be_started_counts_as_an_end_with_its_reason(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = Agents(tmp_path / "run", sleepers)
    sleepers.refuse = "systemctl start: access denied"
    with pytest.raises(ElasticdError):
        agents.start("a", config(tmp_path), slots=(), digest="d1")
    seen = agents.look(1.0)["a"]
    assert (seen.running, seen.code, seen.reason, seen.ends) == (False, 1, "systemctl start: access denied", 1)
    agents.close()


def test_what_found_its_configuration_unusable_is_tried_again_once_somebody_has_seen_to_it(tmp_path: Path, sleepers: Sleepers) -> None:
    agents = started(tmp_path, sleepers)
    agents.look(1.0)
    agents.try_again()
    assert agents.look(2.0)["a"].digest == "d1", "what runs is left alone"
    agents.result_file("a").write_text(json.dumps({"code": 2, "result": "failed", "reason": "node n was left out"}))
    sleepers.end("a")
    assert (agents.look(3.0)["a"].digest, agents.look(3.0)["a"].ends) == ("d1", 1)
    agents.try_again()
    agents.close()
    for one in (agents, Agents(tmp_path / "run", sleepers)):  # also by the next daemon
        seen = one.look(4.0)["a"]
        assert (seen.running, seen.digest, seen.ends) == (False, "", 0)
        one.close()


def test_a_note_that_a_crash_cut_short_is_no_reason_to_fail(tmp_path: Path, sleepers: Sleepers) -> None:
    started(tmp_path, sleepers).close()
    (tmp_path / "run/notes/a.json").write_text('{"slots": [')
    agents = Agents(tmp_path / "run", sleepers)
    assert agents.look(1.0) == {}
    agents.close()


def test_a_run_directory_that_cannot_be_used_is_named(tmp_path: Path, sleepers: Sleepers) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        Agents(tmp_path / "file", sleepers)
