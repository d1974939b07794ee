"""Real daemons as processes, with scratch state, on a real etcd.

Owns: their files, processes and what they logged. A job's workers are small programs without torch, so that a start costs the agent's import only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticd.daemon.client import ApiClient
from elasticd.daemon.processes import process_start
from elasticd.errors import DaemonUnavailableError
from elasticd.kv import Delete, EtcdKV, KVConfig, Put
from elasticd.rendezvous.keys import ClusterKeys
from elasticd.rendezvous.records import NodePolicyRecord, NodeRecord, TargetRecord
from tests.support.etcd import await_

if TYPE_CHECKING:
    from tests.support.etcd import Server

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, signal, sys, time
out = os.environ["OUT"]
def told(number, frame):
    with open(out + "/signals", "a") as file:
        file.write(f"{os.getpid()} {number}\\n")
    if number == signal.SIGTERM:
        sys.exit(1)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGUSR1, told)
with open(out + "/started", "a") as file:
    file.write(f"{os.getpid()} {os.environ['WORLD_SIZE']} {' '.join(sys.argv[1:])}\\n")
while True:
    with open(f"{out}/steps-{os.getpid()}", "a") as file:
        file.write(f"{time.time()}\\n")
    time.sleep(0.05)
"""


class Cluster:
    """Daemons of one cluster on this machine, and its operator."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        (folder / "worker.py").write_text(WORKER)
        self.keys = ClusterKeys(f"c{uuid.uuid4().hex[:12]}")
        self.kv = EtcdKV(KVConfig(endpoints=(server.endpoint,), call_timeout=5.0))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    # --- files -----------------------------------------------------------------------------------------------------------

    def home(self, node: str) -> Path:
        home = self.folder / node
        (home / "jobs.d").mkdir(parents=True, exist_ok=True)
        return home

    def configure(self, node: str, more: str = "", *, tables: str = "", loop_wait: float = 1.0, detectors: bool = False) -> Path:
        home = self.home(node)
        path = home / "elasticd.toml"
        path.write_text(f"""
cluster = "{self.keys.cluster}"
node = "{node}"
address = "127.0.0.1"
agents = "processes"
{more}
[etcd]
endpoints = ["{self.server.endpoint}"]
[timing]
ttl = 4
loop_wait = {loop_wait}
retry_timeout = 1
[paths]
jobs_dir = "{home}/jobs.d"
run_dir = "{home}/run"
state_dir = "{home}/state"
log_dir = "{self.folder}/logs"
[metrics]
listen = ""
[agent]
ttl = 2
settle = 0.2
stop_grace = 5
[health]
disk_free_min = 0
[detectors]
run = {str(detectors).lower()}
{tables}
""")
        return path

    def job(self, node: str, name: str = "job", more: str = "", *, args: tuple[str, ...] = ()) -> Path:
        path = self.home(node) / "jobs.d" / f"{name}.toml"
        argv = [sys.executable, "-u", str(self.folder / "worker.py"), *args]
        fresh = path.with_suffix(".new")
        fresh.write_text(f"""
name = "{name}"
argv = {json.dumps(argv)}
cwd = "{self.folder}"
max_nodes = 3
allow_root = true
env = {{ OUT = "{self.out}" }}
{more}
""")
        fresh.chmod(0o600)
        fresh.rename(path)
        return path

    # --- processes -------------------------------------------------------------------------------------------------------

    def start(self, node: str, *, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        if not (self.home(node) / "elasticd.toml").exists():
            self.configure(node)
        with (self.home(node) / "log").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                [sys.executable, "-P", "-m", "elasticd.daemon", "run", "--config", str(self.home(node) / "elasticd.toml")],
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[node]

    def end(self, node: str, number: signal.Signals = signal.SIGTERM, *, within: float = 30.0) -> int:
        self.processes[node].send_signal(number)
        return self.processes[node].wait(within)

    def api(self, node: str) -> ApiClient:
        return ApiClient(self.home(node) / "run/api.sock")

    def ready(self, node: str) -> bool:
        """Whether its daemon serves the cluster; AssertionError if it has ended."""
        try:
            return self.api(node).text("/readyz")[0] == 200
        except DaemonUnavailableError:
            assert self.processes[node].poll() is None, self.text(node)
            return False

    # --- what is seen ----------------------------------------------------------------------------------------------------

    def text(self, node: str) -> str:
        return (self.home(node) / "log").read_text()

    def events(self, node: str, name: str) -> list[dict[str, Any]]:
        lines = (line for line in self.text(node).splitlines() if line.startswith("{"))
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def record(self, node: str) -> NodeRecord | None:
        item = self.kv.get(self.keys.node(node))
        return NodeRecord.model_validate_json(item.value) if item else None

    def stands(self, node: str, job: str = "job") -> tuple[str, str]:
        record = self.record(node)
        found = [one for one in record.jobs if one.name == job] if record else []
        return (found[0].state.value, found[0].why) if found else ("", "")

    def await_state(self, node: str, state: str, job: str = "job", *, within: float = 20.0) -> str:
        """Wait until the node's key says so; returns why."""
        await_(lambda: self.stands(node, job)[0] == state, within=within, what=f"{job} {state} on {node} (it is {self.stands(node, job)})")
        return self.stands(node, job)[1]

    def agent(self, node: str, job: str = "job") -> int:
        """Pid of the agent, from the daemon's note."""
        return int(json.loads((self.home(node) / f"run/notes/{job}.json").read_text())["pid"])

    def workers(self) -> list[int]:
        """Pids of living workers, oldest first."""
        path = self.out / "started"
        pids = [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []
        return [pid for pid in pids if process_start(pid) is not None]

    def await_workers(self, count: int, *, within: float = 20.0) -> list[int]:
        return await_(lambda: found if len(found := self.workers()) == count else None, within=within, what=f"{count} workers")  # type: ignore[return-value]

    # --- the operator ----------------------------------------------------------------------------------------------------

    def want(self, job: str = "job", **values: Any) -> None:
        record = TargetRecord(scope=self.keys.job(job).scope, **{"min_nodes": 1, "max_nodes": 3, "desired": 3, **values})
        self.kv.txn([], [Put(key=self.keys.job(job).target, value=record.to_bytes())])

    def say(self, node: str, **values: Any) -> None:
        """An operator's word about a node; without values it is taken back."""
        key = self.keys.policy(node)
        if not values:
            self.kv.txn([], [Delete(key=key)])
            return
        self.kv.txn([], [Put(key=key, value=NodePolicyRecord(scope=self.keys.scope, at=time.time(), **values).to_bytes())])

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(10)
        for note in self.folder.glob("*/run/notes/*.json"):
            pid, born = (json.loads(note.read_text())[name] for name in ("pid", "born"))
            if pid and process_start(pid) == born:
                os.kill(pid, signal.SIGKILL)
                await_(lambda pid=pid, born=born: process_start(pid) != born, what="the end of an agent")
        await_(lambda: not self.workers(), what="the end of the workers")
        self.kv.close()
