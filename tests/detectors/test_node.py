"""The detectors of a node as a process: what it is told, follows, says and keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from detectors.node import Lines, Node, serve
from detectors.signatures import Table

pytestmark = pytest.mark.timeout(120)

Said = list[Mapping[str, Any]]
NOW = 1_700_000_000.0
XID = {"event": "kernel_event", "time": NOW, "node": "n1", "text": "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."}


def node(said: Said, **options: Any) -> Node:
    return Node(said.append, table=Table.load(), width=10.0, forest=False, **options)


def jobs(**logs: Path) -> bytes:
    return json.dumps({"jobs": {name: {"logs": str(path), "memory": None} for name, path in logs.items()}}).encode()


def of(said: Said, kind: str) -> Said:
    return [one for one in said if one["kind"] == kind]


def test_a_line_of_the_kernels_is_judged_for_every_job_here(tmp_path: Path) -> None:
    said: Said = []
    one = node(said)
    one.told(jobs(a=tmp_path, b=tmp_path), NOW)
    one.told(json.dumps(XID).encode(), NOW)
    assert [(found["job"], found["incident"]["root"]["kind"]) for found in of(said, "incident")] == [("a", "xid_79"), ("b", "xid_79")]


def test_what_a_worker_prints_is_followed_and_what_lay_there_before_is_not_judged(tmp_path: Path) -> None:
    said: Said = []
    log = tmp_path / "generation-000001/rank-0/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    one = node(said)
    one.told(jobs(llm=tmp_path), NOW)
    one.turn(NOW)
    assert of(said, "incident") == []
    with log.open("a") as file:
        file.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB\n")
    one.turn(NOW + 1)
    (found,) = of(said, "incident")
    assert found["incident"]["root"]["kind"] == "cuda_out_of_memory"
    assert "4.00 GiB" in found["incident"]["root"]["line"]


def test_it_says_how_it_is_and_what_it_could_not_do(tmp_path: Path) -> None:
    said: Said = []
    one = node(said)
    one.told(jobs(llm=tmp_path), NOW)
    for nonsense in (b"no json", b"[1, 2]", b'{"jobs": 7}', b'{"jobs": {"x": {}}}', b"\xff" * 10):
        one.told(nonsense, NOW)
    one.turn(NOW)
    (pulse,) = of(said, "pulse")
    assert pulse["rss"] > 1 << 20
    assert pulse["jobs"]["llm"]["windows"] == 0
    assert len(pulse["problems"]) == 5
    assert one.jobs == ("llm",), "what was understood stays"
    one.turn(NOW + 6)
    assert of(said, "pulse")[-1]["problems"] == [], "a problem is told once"


def test_a_job_that_has_ended_leaves_what_was_usual_for_it(tmp_path: Path) -> None:
    said: Said = []
    logs = tmp_path / "logs/generation-000001/rank-0"
    logs.mkdir(parents=True)
    one = node(said, fresh=False)
    one.told(json.dumps({"jobs": {"llm": {"logs": str(tmp_path / "logs"), "memory": str(tmp_path / "memory")}}}).encode(), NOW)
    (logs / "stdout.log").write_text("".join(f"step {number} done\nsaved {number} files\n" for number in range(20)))
    for second in range(30):
        one.turn(NOW + second)
    one.told(b'{"jobs": {}}', NOW + 30)
    assert one.jobs == ()
    assert "step" in (tmp_path / "memory/templates.json").read_text()


def test_while_an_incident_is_open_nothing_is_kept(tmp_path: Path) -> None:
    said: Said = []
    one = node(said)
    one.told(json.dumps({"jobs": {"llm": {"logs": str(tmp_path), "memory": str(tmp_path / "memory")}}}).encode(), NOW)
    one.told(json.dumps(XID).encode(), NOW)
    for second in range(30):
        one.turn(NOW + second)
    one.close(NOW + 30)
    assert not (tmp_path / "memory").exists()


def test_the_end_of_what_it_is_told_is_its_end(tmp_path: Path) -> None:
    said: Said = []
    read, write = os.pipe()
    os.write(write, jobs(llm=tmp_path) + b"\n" + json.dumps(XID).encode() + b"\n")
    os.close(write)
    try:
        serve(node(said), Lines(read), lambda: NOW)
    finally:
        os.close(read)
    assert len(of(said, "incident")) >= 1


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "detectors.node", "--no-forest"]
    one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])
    yield one
    one.kill()
    one.wait()
    for stream in (one.stdin, one.stdout):
        assert stream
        stream.close()


def test_as_a_process_it_answers_and_ends_when_it_is_left_alone(process: subprocess.Popen[str], tmp_path: Path) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write(jobs(llm=tmp_path).decode() + "\n" + json.dumps(XID) + "\n")
    process.stdin.flush()
    kinds = set()
    while "incident" not in kinds:
        kinds.add(json.loads(process.stdout.readline())["kind"])
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdin = Path(os.devnull).open()  # noqa: SIM115 - for the fixture to close


def test_ctrl_c_ends_it_without_a_traceback(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    process.stdout.readline()  # a pulse: it is up
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
