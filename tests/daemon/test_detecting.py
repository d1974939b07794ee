"""The detector process of a node: told what runs, heard, and started again when it dies, hangs, grows or talks nonsense. Real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticd.daemon import detecting
from elasticd.daemon.detecting import Detecting
from tests.support.etcd import await_

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., Detecting]

# Stands for the detectors: writes down what it is told, says a pulse, and does what a line of its script says.
PROGRAM = """
import json, os, sys, time
def say(**document): print(json.dumps(document), flush=True)
say(kind="pulse", at=time.time(), rss={rss}, jobs={{}}, problems={problems!r}, pid=os.getpid())
for line in sys.stdin:
    with open({notes!r}, "a") as notes: notes.write(line)
    document = json.loads(line)
    exec(document.get("do", ""))
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Detecting] = []

    def start(*, rss: int = 1000, problems: tuple[str, ...] = (), wake: Callable[[], None] = lambda: None, command: list[str] | None = None) -> Detecting:
        program = PROGRAM.format(rss=rss, problems=list(problems), notes=str(tmp_path / "notes"))
        made.append(Detecting(tmp_path / "memory", wake=wake, command=command or [sys.executable, "-c", program]))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.close()


def notes(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def incident(name: str = "g1-nonfinite-n1-r0", state: str = "confirmed", summary: str = "the loss is NaN") -> dict[str, Any]:
    return {"id": name, "state": state, "root": {"kind": "nonfinite", "certainty": "certain", "summary": summary}}


def says(**document: Any) -> Mapping[str, str]:
    return {"do": f"say(**{document!r})"}


def test_it_is_told_which_jobs_run_here_and_where_their_memory_is(make: Make, tmp_path: Path) -> None:
    one = make()
    one.watch({"llm": tmp_path / "logs/llm"})
    wanted = {"llm": {"logs": str(tmp_path / "logs/llm"), "memory": str(tmp_path / "memory/llm")}}
    await_(lambda: {"jobs": wanted} in notes(tmp_path), what="the list of jobs")
    before = len(notes(tmp_path))
    one.watch({"llm": tmp_path / "logs/llm"})
    one.tell({"last": True})
    await_(lambda: {"last": True} in notes(tmp_path), what="the last line")
    assert len(notes(tmp_path)) == before + 1, "what has not changed is not told again"


def test_an_incident_is_known_and_wakes_the_loop(make: Make, tmp_path: Path) -> None:
    woken: list[bool] = []
    one = make(wake=lambda: woken.append(True))
    one.watch({"llm": tmp_path})
    one.tell(says(kind="incident", job="llm", incident=incident(state="suspect")))
    one.tell(says(kind="incident", job="llm", incident=incident()))
    await_(lambda: [known["state"] for known in one.incidents("llm")] == ["confirmed"], what="the incident")
    assert woken
    assert one.watched == ("llm",)


def test_of_a_job_that_does_not_run_here_nothing_is_believed(make: Make, tmp_path: Path) -> None:
    one = make()
    one.watch({"llm": tmp_path})
    one.tell(says(kind="incident", job="other", incident=incident()))
    one.tell(says(kind="incident", job="llm", incident=incident("last")))
    await_(lambda: one.incidents("llm"), what="the incident")
    assert one.incidents("other") == []


def test_what_log_lines_bring_along_is_harmless(make: Make, tmp_path: Path) -> None:
    one = make()
    one.watch({"llm": tmp_path})
    one.tell(says(kind="incident", job="llm", incident=incident(summary="\x1b[31mred\x07" + "x" * 100_000)))
    await_(lambda: one.incidents("llm"), what="the incident")
    summary = one.incidents("llm")[0]["root"]["summary"]
    assert "\x1b" not in summary
    assert "\x07" not in summary
    assert len(summary) <= 2 * detecting.TEXT_MAX


@pytest.mark.parametrize("how", ["killed", "ends", "talks too much"])
def test_a_process_that_dies_is_started_again_and_told_everything_again(make: Make, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detecting, "BACKOFF", (0.05, 0.2))
    one = make()
    one.watch({"llm": tmp_path})
    one.tell(says(kind="incident", job="llm", incident=incident()))
    await_(lambda: one.incidents("llm") and one.pulse.alive, what="a pulse")
    told = sum("jobs" in note for note in notes(tmp_path))
    do = {"killed": "os.kill(os.getpid(), 9)", "ends": "sys.exit(3)", "talks too much": "print('x' * 5_000_000, flush=True); os._exit(1)"}[how]
    one.tell({"do": do})
    await_(lambda: one.pulse.restarts >= 1 and one.pulse.alive, what="the next one")
    await_(lambda: sum("jobs" in note for note in notes(tmp_path)) > told, what="the list of jobs, again")
    assert one.incidents("llm") == [incident()], "what was known stays known"


def test_a_process_that_hangs_is_killed(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detecting, "BACKOFF", (0.05, 0.2))
    monkeypatch.setattr(detecting, "SILENT_MAX", 1.0)
    one = make()
    await_(lambda: one.pulse.alive, what="a pulse")
    pid = _pid_of(one)
    os.kill(pid, signal.SIGSTOP)
    await_(lambda: one.pulse.restarts >= 1, what="its end")
    await_(lambda: not Path(f"/proc/{pid}").exists(), what="nothing left of it")


def test_a_process_that_grows_is_started_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detecting, "BACKOFF", (0.05, 0.2))
    one = make(rss=detecting.RSS_MAX + 1)
    await_(lambda: one.pulse.restarts >= 1, what="its end")


def test_one_that_cannot_be_started_is_said_and_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detecting, "BACKOFF", (0.05, 0.1))
    one = make(command=["/nonexistent/detectors"])
    await_(lambda: one.pulse.restarts >= 2, what="two attempts")
    assert "No such file or directory" in one.pulse.problem
    assert not one.pulse.alive


def test_what_it_does_not_read_does_not_hold_us_up(make: Make, tmp_path: Path) -> None:
    one = make()
    one.watch({"llm": tmp_path})
    await_(lambda: one.pulse.alive, what="a pulse")
    os.kill(_pid_of(one), signal.SIGSTOP)
    for number in range(5000):
        one.tell({"number": number, "text": "x" * 1000})
    one.close()


def test_the_real_one_finds_a_fault_in_the_logs_of_a_job(tmp_path: Path) -> None:
    one = Detecting(tmp_path / "memory")
    one.start()
    try:
        logs = tmp_path / "logs/llm/n1"
        logs.mkdir(parents=True)
        one.watch({"llm": logs})
        await_(lambda: one.pulse.alive, within=90, what="a pulse")
        assert one.pulse.rss < 180 << 20
        one.tell({"event": "kernel_event", "time": "2026-12-01T00:00:00Z", "node": "n1", "text": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."})
        await_(lambda: one.incidents("llm"), what="the incident")
        (found,) = one.incidents("llm")
        assert (found["root"]["kind"], found["cls"], found["state"]) == ("xid_79", "hardware", "confirmed")
    finally:
        one.close()


def _pid_of(one: Detecting) -> int:
    return int(one._pulse["pid"])
