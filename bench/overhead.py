"""What elasticd costs while nothing happens, and how quickly it answers while a job trains.

    python -m bench.overhead [--quick] [--json FILE] [--seconds N] [--runs N]

One daemon with scratch state on an etcd of its own, and one job: a DDP script of one worker that steps every 20 ms.

row                       what
daemon_cpu_percent        of a core, while no job runs, over --seconds
daemon_rss_mb             resident memory then
api_p50_ms, api_p99_ms    GET /v1/status while the job trains, one request after the other
metrics_ms                GET /metrics of a node of eight ranks and eight GPUs in which every metric has a number; NVML is a stand-in
metrics_series            series in it
status_wall_s             `elasticctl status` from start to end, while the job trains
help_wall_s               `elasticctl --help`, likewise
trainer_step_ratio        a step of 20 ms of two ranks with a trainer's session, over a bare DDP loop's (peer `ddp`), block by block
telemetry_step_ratio      the same with a session's telemetry, over one without (peer `off`)
telemetry_window_ms       making and sending what is said once a second
*_x_import_typer          the same over `python -c "import typer"` (peer `floor`), run by run
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from bench._common import Row, command, paired_ratio, print_table, progress, write_json
from bench._overhead_metrics import scrapes
from bench._overhead_trainer import telemetry_step_ratio, trainer_step_ratio
from elasticd.daemon.client import ApiClient
from elasticd.errors import ElasticdError
from elasticd.kv import EmbeddedEtcd, find_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPT: Final = Path(__file__).with_name("_recovery_script.py")
ROOT: Final = Path(__file__).resolve().parent.parent
_TARGETS: Final = {
    "daemon_cpu_percent": 1.0,
    "daemon_rss_mb": 100.0,
    "api_p99_ms": 50.0,
    "metrics_ms": 20.0,
    "metrics_series": 300.0,
    "status_wall_s": 0.5,
    "help_wall_s_x_import_typer": 2.5,
}


class BenchError(Exception):
    """It could not be measured."""


class Daemon:
    """One daemon with scratch state; it and its agent die when it is closed.

    Args:
        folder: ours.
        endpoint: of its etcd.
    """

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.socket = folder / "run/api.sock"
        self._folder = folder
        (folder / "jobs.d").mkdir()
        (folder / "out").mkdir()
        job = folder / "jobs.d/job.toml"
        job.write_text(
            f"""name = "job"
argv = {json.dumps([sys.executable, "-u", str(SCRIPT)])}
cwd = "/"
max_nodes = 1
allow_root = true
env = {{ OUT = "{folder}/out", OMP_NUM_THREADS = "1" }}
"""
        )
        job.chmod(0o600)
        config = folder / "elasticd.toml"
        paths = "\n".join(f'{name}_dir = "{folder}/{name if name != "jobs" else "jobs.d"}"' for name in ("jobs", "run", "state", "log"))
        config.write_text(
            f"""node = "bench"
address = "127.0.0.1"
agents = "processes"
[etcd]
endpoints = ["{endpoint}"]
[paths]
{paths}
[metrics]
listen = "127.0.0.1:0"
[health]
disk_free_min = 0
"""
        )
        with (folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "elasticd.daemon", "run", "--config", str(config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self.api = ApiClient(self.socket)

    def await_(self, condition: Callable[[], bool], what: str, within: float = 60.0) -> None:
        """Wait for something.

        Raises:
            BenchError: it did not come, or the daemon ended.
        """
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(f"the daemon ended: {(self._folder / 'log.txt').read_text()[-1000:]}")
            try:
                if condition():
                    return
            except ElasticdError:
                pass
            time.sleep(0.1)
        raise BenchError(f"{what}: not within {within:g} s")

    @property
    def ready(self) -> bool:
        """It serves, and is registered."""
        return bool(self.api.get("/v1/status")["data"]["etcd"]["reachable"])

    @property
    def steps(self) -> bool:
        """The worker has made a hundred steps."""
        return any(path.read_text().count('"step"') > 100 for path in (self._folder / "out").glob("*.jsonl"))

    def close(self) -> None:
        """Let the agent leave, and end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def idle(daemon: Daemon, seconds: float) -> list[Row]:
    """What it costs while no job runs."""
    process = psutil.Process(daemon.process.pid)
    time.sleep(5)  # what the start left to do
    before, began = process.cpu_times(), time.monotonic()
    progress(f"idle for {seconds:g} s")
    time.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    percent = 100 * (after.user + after.system - before.user - before.system) / took
    rows = [Row.of("daemon_cpu_percent", "elasticd", [percent], unit="%", note=f"over {took:.0f} s")]
    return [*rows, Row.of("daemon_rss_mb", "elasticd", [process.memory_info().rss / 1e6], unit="MB")]


def answers(daemon: Daemon, count: int) -> list[Row]:
    """How quickly the API answers, the job training."""
    progress(f"{count} requests")
    took = []
    for _ in range(count):
        began = time.monotonic()
        daemon.api.get("/v1/status")
        took.append(1000 * (time.monotonic() - began))
        time.sleep(0.01)
    took.sort()
    p50, p99 = took[len(took) // 2], took[math.ceil(0.99 * len(took)) - 1]
    return [Row.of("api_p50_ms", "elasticd", [p50], unit="ms"), Row.of("api_p99_ms", "elasticd", [p99], unit="ms", note=f"of {count} requests")]


def commands(daemon: Daemon, runs: int) -> list[Row]:
    """How long the command line takes, beside importing its library, in turns."""
    elasticctl = str(Path(sys.executable).with_name("elasticctl"))
    wanted = {
        "floor": [sys.executable, "-c", "import typer"],
        "status_wall_s": [elasticctl, "status", "--socket", str(daemon.socket)],
        "help_wall_s": [elasticctl, "--help"],
    }
    took: dict[str, list[float | None]] = {name: [] for name in wanted}
    progress(f"{runs} runs of each command")
    for _ in range(runs):
        for name, argv in wanted.items():
            began = time.monotonic()
            done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            took[name].append(time.monotonic() - began)
            if done.returncode:
                raise BenchError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    rows = [Row.of("import_typer_wall_s", "floor", took["floor"])]
    for name in ("status_wall_s", "help_wall_s"):
        rows.append(Row.of(name, "elasticd", took[name]))
        over = paired_ratio(f"{name}_x_import_typer", "elasticd", list(zip(took[name], took["floor"], strict=True)))
        rows += [over] if over else []
    return rows


def judged(row: Row) -> Row:
    """The row with whether it met its target, where it has one."""
    target = _TARGETS.get(row.name)
    if target is None or row.median is None:
        return row
    verdict = "met" if row.median <= target else "MISSED"
    return row.noted(f"target <= {target:g} {row.unit}: {verdict}" + (f"; {row.note}" if row.note else ""))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 s of idleness, 200 requests, 3 runs, 8 blocks of steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--seconds", type=float, default=None, help="of idleness (120; 20 if quick)")
    parser.add_argument("--runs", type=int, default=None, help="of each command (11; 3 if quick)")
    options = parser.parse_args(argv)
    seconds = options.seconds or (20.0 if options.quick else 120.0)
    runs = options.runs or (3 if options.quick else 11)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-overhead-")))
        etcd = EmbeddedEtcd(folder / "etcd", binary=find_etcd())
        stack.callback(etcd.stop)
        daemon = Daemon(folder, etcd.endpoint)
        stack.callback(daemon.close)
        daemon.await_(lambda: daemon.ready, "the daemon")
        rows = idle(daemon, seconds)
        daemon.api.post("/v1/jobs/job/start", {})
        daemon.await_(lambda: daemon.steps, "steps of the job")
        rows += answers(daemon, 200 if options.quick else 2000)
        rows += commands(daemon, runs)
    rows += scrapes(10 if options.quick else 50)
    rows += trainer_step_ratio(8 if options.quick else 32)  # with nothing else there: it looks for hundredths of a step
    rows += telemetry_step_ratio(8 if options.quick else 64)
    rows = [judged(row) for row in rows]
    print_table(rows, title="what elasticd costs")
    if options.json:
        write_json(options.json, "overhead", command(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
