"""What workers write does not fill the disk, does not make the agent grow, and does not get into its log as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent.logs import GenerationLogs, RankLogs
from elasticd.agent.outputs import CHECK_EVERY, OutputKeeper
from elasticd.agent.rotation import predecessor
from elasticd.observability.limits import LogLimits
from tests.e2e.conftest import MakeNodes
from tests.e2e.nodes import Nodes
from tests.support.etcd import Server, await_

pytestmark = pytest.mark.timeout(120)

CAP = 1 << 20
FLOOD = 200 << 20
LIMITS = LogLimits(worker_bytes=CAP, generations=2)

HOSTILE = """
import json, os, sys, time
out, gate = sys.argv[1], sys.argv[2]
os.write(1, b"x" * 1_000_000 + b"\\n")
os.write(1, b"\\xff\\xfe\\x00\\x80 not utf-8 \\xed\\xa0\\x80\\n")
os.write(2, b"\\x1b[2J\\x1b]0;owned\\x07\\x1b[?1049h\\x9b31m\\xe2\\x80\\xae" * 1000 + b"\\n")
began = time.monotonic()
for _ in range(%d // 65536):
    os.write(1, (b"y" * 1023 + b"\\n") * 64)
with open(out, "w") as file:
    file.write(str(time.monotonic() - began))
while not os.path.exists(gate):
    time.sleep(0.05)
message = "\\x1b[2J\\u202e" + "password=hunter2 " + os.environ["HF_TOKEN"] + "z" * 1_000_000
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": message, "extraInfo": {"timestamp": "1700000000"}}}, file)
sys.exit(3)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[OutputKeeper]:
    one = OutputKeeper(tmp_path / "job" / "a", LIMITS)
    yield one
    one.close()


def generation(root: Path, number: int = 1) -> RankLogs:
    return GenerationLogs.create(root, "job", "a", number, "a1").rank(0)


def flood(path: Path, count: int) -> None:
    """As a worker does it: another process, with a descriptor of its own."""
    script = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\nfor n in range(int(sys.argv[2])): os.write(fd, b'%09d\\n' % n * 100)"
    subprocess.run([sys.executable, "-c", script, str(path), str(count)], check=True)


def test_a_file_is_brought_below_its_cap_again(tmp_path: Path, keeper: OutputKeeper) -> None:
    files = generation(tmp_path)
    keeper.begin([files])
    flood(files.stdout, 5000)
    await_(lambda: files.stdout.stat().st_size <= CAP, within=5 * CHECK_EVERY, what="a short file")
    await_(lambda: predecessor(files.stdout).exists(), what="its older lines")
    assert predecessor(files.stdout).stat().st_size <= CAP + 8192
    flood(files.stderr, 5000)
    await_(lambda: files.stderr.stat().st_size <= CAP, within=5 * CHECK_EVERY, what="a short file")


@pytest.mark.parametrize("trick", ["removed", "renamed", "linked", "replaced by a directory", "replaced by a link"])
def test_a_worker_that_plays_tricks_with_its_file_has_the_same_cap(tmp_path: Path, keeper: OutputKeeper, trick: str) -> None:
    """And nothing of somebody else's is made shorter."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * (2 * CAP))
    files = generation(tmp_path)
    keeper.begin([files])
    fd = os.open(files.stdout, os.O_WRONLY | os.O_APPEND)
    if trick == "linked":
        os.link(files.stdout, files.directory / "second")
    else:
        files.stdout.rename(files.directory / "elsewhere")
    if trick == "removed":
        (files.directory / "elsewhere").unlink()
    if trick == "replaced by a directory":
        files.stdout.mkdir()
    if trick == "replaced by a link":
        files.stdout.symlink_to(victim)
    os.write(fd, b"w" * (3 * CAP))
    await_(lambda: os.fstat(fd).st_size <= CAP, within=5 * CHECK_EVERY, what="a short file")
    os.close(fd)
    assert victim.stat().st_size == 2 * CAP


def test_what_was_there_before_a_worker_is_not_believed(tmp_path: Path, keeper: OutputKeeper) -> None:
    """A link or a pipe in a file's place is left to who starts the worker, and waits for nobody."""
    files = generation(tmp_path)
    files.stdout.symlink_to(tmp_path / "victim")
    os.mkfifo(files.stderr)
    keeper.begin([files])
    assert not (tmp_path / "victim").exists()


def test_old_generations_go_when_a_new_one_begins(tmp_path: Path, keeper: OutputKeeper) -> None:
    for number in (1, 2, 3, 4):
        files = generation(tmp_path, number)
        keeper.begin([files])
    await_(lambda: not (tmp_path / "job" / "a" / "generation-000002").exists(), within=5 * CHECK_EVERY, what="the end of old logs")
    left = sorted(path.name for path in (tmp_path / "job" / "a").glob("generation-*"))
    assert left[-2:] == ["generation-000003", "generation-000004"]


def test_a_fault_of_ours_does_not_end_it(tmp_path: Path, keeper: OutputKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticd.agent import outputs

    failed = threading.Event()

    def fail(*_: object, **__: object) -> None:
        failed.set()
        raise ValueError("a fault")

    files = generation(tmp_path)
    monkeypatch.setattr(outputs, "retain", fail)
    keeper.begin([files])
    assert failed.wait(5 * CHECK_EVERY)
    flood(files.stdout, 5000)
    await_(lambda: files.stdout.stat().st_size <= CAP, within=5 * CHECK_EVERY, what="a short file")


def test_its_end_lets_go_of_every_file(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    keeper = OutputKeeper(tmp_path / "job" / "a", LIMITS)
    for number in range(1, 10):
        keeper.begin([generation(tmp_path, number)])
    keeper.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- with a real agent


@pytest.fixture
def hostile(make_nodes: MakeNodes, server: Server, tmp_path: Path) -> Callable[..., Nodes]:
    def make(**config: Any) -> Nodes:
        script = tmp_path / "hostile.py"
        script.write_text(HOSTILE % FLOOD)
        nodes = make_nodes(
            [server.endpoint],
            argv=[sys.executable, "-S", str(script), str(tmp_path / "flooded"), str(tmp_path / "gate")],
            max_nodes=1, desired=1, max_restarts=0, logs={"worker_bytes": CAP}, env={"HF_TOKEN": "the-token-of-this-job"},
            **config,
        )  # fmt: skip
        nodes.start("a")
        return nodes

    return make


def memory(pid: int) -> int:
    """Bytes that a process holds."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_two_hundred_megabytes_at_full_speed_are_capped_and_cost_the_agent_nothing(hostile: Callable[..., Nodes], tmp_path: Path) -> None:
    """A million characters, what is no UTF-8, and orders to terminals among them; training goes on, and the agent's log stays what it is."""
    nodes = hostile()
    nodes.await_(lambda: nodes.workers("a"), what="the worker", within=60.0)
    agent = nodes.processes["a"].pid
    before = memory(agent)
    rank = Path(nodes.events("a", "workers_started")[0]["logs"]) / "rank-0"
    largest = 0
    since = time.monotonic()
    while not (tmp_path / "flooded").exists() and time.monotonic() - since < 60:
        largest = max(largest, (rank / "stdout.log").stat().st_size)
        time.sleep(0.01)
    rate = FLOOD / float((tmp_path / "flooded").read_text() or "1")
    await_(lambda: (rank / "stdout.log").stat().st_size <= CAP, within=5 * CHECK_EVERY, what="a short file")
    assert largest <= CAP + 1.5 * CHECK_EVERY * rate
    assert sum(path.stat().st_blocks * 512 for path in rank.parent.rglob("*.log*")) < 4 * CAP
    assert (rank / "stderr.log").stat().st_size > 20_000
    assert memory(agent) - before < 32 << 20
    assert nodes.workers("a")
    (tmp_path / "gate").touch()
    assert nodes.wait("a") == 1
    text = (nodes.folder / "logs" / "job" / "a" / "agent.jsonl").read_text(encoding="ascii")
    events = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "event", "job", "node"} <= set(event) for event in events)
    (failed,) = [event for event in events if event["event"] == "worker_failed"]
    assert (failed["generation"], failed["rank"]) == (1, 0)
    assert failed["detail"].startswith("rank 0 on a: exit code 3: ?[2J?password=[redacted] [redacted]")
    assert len(failed["detail"]) < 1000
    assert "hunter2" not in text
    assert "the-token-of-this-job" not in text
