"""A daemon's metrics without a daemon: a board, reports and a machine as a test wants them, and the text that Prometheus would read.

Owns: a world in which everything that can have a number has one. Must not: start daemons; NVML and the kernel's log are stand-ins here.
"""

from __future__ import annotations

import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elasticd.daemon.acting import Counts
from elasticd.daemon.board import Board, Turn
from elasticd.daemon.config import DaemonConfig
from elasticd.daemon.detecting import Pulse
from elasticd.daemon.gpureadings import Gpus
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.kmsg import KernelLog
from elasticd.daemon.metrics import REPORTS, Metrics
from elasticd.daemon.reconcile import Policy
from elasticd.kv import EtcdKV, KVConfig
from elasticd.observability.report import Activity, CheckpointReport, Histogram, JobReport, Phase, RankReport, SnapshotReport
from elasticd.policy.decisions import Action
from elasticd.policy.settings import Settings
from elasticd.rendezvous.records import CauseKind, NodeJob, NodeJobState, TargetRecord
from tests.support.nvml import Gpu, StandInNvml
from trainer.wire.window import PHASES, STEP_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest

RANKS = 8
NOW = time.time()
SPEC = JobSpec(name="train", argv=("/bin/true",), max_nodes=4)


def spec(name: str = "train", **values: Any) -> JobSpec:
    return SPEC.model_copy(update={"name": name, **values})


def running(name: str = "train", slots: int = RANKS, state: NodeJobState = NodeJobState.RUNNING) -> NodeJob:
    return NodeJob(name=name, state=state, slots=slots)


def target(**values: Any) -> TargetRecord:
    return TargetRecord(scope="s", **{"min_nodes": 2, "max_nodes": 4, "desired": 3, **values})


def turn(**values: Any) -> Turn:
    """Everything known, one job runs."""
    return Turn(
        **{
            "at": time.monotonic(),
            "registered": True,
            "etcd_problem": "",
            "slots": RANKS,
            "allowed": {"train": SPEC},
            "jobs": (running(),),
            "wanted": {"train": target()},
            "policy": Policy(),
            **values,
        }
    )


def rank(local_rank: int, **values: Any) -> RankReport:
    return RankReport(
        **{
            "local_rank": local_rank,
            "rank": 8 + local_rank,
            "at": NOW,
            "step": 41,
            "step_seconds": 0.5,
            "phases": {phase: (number + 1) / 100 for number, phase in enumerate(PHASES)},
            "loss": 0.25,
            "grad_norm": 1.5,
            "nonfinite": 1,
            "memory": {"rss": 1000, "allocated": 2000, "reserved": 3000, "peak": 4000},
            **values,
        }
    )


def report(job: str = "train", **values: Any) -> JobReport:
    """With a number for everything."""
    return JobReport(
        **{
            "job": job,
            "node": "n1",
            "at": NOW,
            "started_at": NOW - 1000,
            "activity": Activity.TRAINING,
            "generation": 7,
            "world_size": 24,
            "nodes": 3,
            "node_rank": 0,
            "target_nodes": 3,
            "min_nodes": 2,
            "max_nodes": 4,
            "restarts_used": 1,
            "restarts_max": 10,
            "step": 41,
            "stepped_at": NOW - 0.5,
            "steps": 40,
            "samples": 5120,
            "steps_lost": 2,
            "seconds": dict.fromkeys(Activity, 10.0),
            "downtime": {kind.value: 3.0 for kind in CauseKind if kind is not CauseKind.STOP},
            "rescales": {kind.value: 1 for kind in CauseKind if kind is not CauseKind.STOP},
            "worker_ends": {"killed": 1, "failed": 2, "stopped": 3, "finished": 4},
            "recovery": Histogram(counts=(0, 0, 1, 2, 0, 1, 0, 0, 0, 0, 1), total=1234.5),
            "recovery_phases": dict.fromkeys(Phase, 1.5),
            "step_times": Histogram(bounds=STEP_BOUNDS, counts=(1,) * (len(STEP_BOUNDS) + 1), total=60.0),
            "loss": 0.25,
            "grad_norm": 1.5,
            "ranks": tuple(map(rank, range(RANKS))),
            "slowest": (3, 1.4),
            "checkpoint": CheckpointReport(
                written=4, failed=1, step=40, at=NOW - 60, nbytes=1 << 30, every_s=600.0, durations=Histogram(counts=(4, *[0] * 10), total=1.0)
            ),
            "snapshot": SnapshotReport(step=41, buffers=3),
            "dropped": 5,
            **values,
        }
    )


class Watching:
    """Stands for the detectors of a node that see one incident of each certainty, and two that are strong."""

    pulse = Pulse(alive=True, restarts=2, at=NOW - 3.0, rss=150 << 20, jobs={"llm": {"windows": 77, "model": {"grown_at": NOW - 60.0}}}, problem="")
    watched = ("llm",)

    def incidents(self, job: str) -> list[dict[str, Any]]:
        assert job == "llm"
        seen = [("certain", "confirmed"), ("strong", "confirmed"), ("strong", "confirmed"), ("weak", "confirmed"), ("weak", "suspect"), ("certain", "over")]
        return [{"id": f"g7-{place}", "certainty": certainty, "state": state} for place, (certainty, state) in enumerate(seen)]


class Done:
    """Stands for what acts on them: it has left out a node, and was not allowed to restart; an operator knows one that is believed and one that is over."""

    settings = Settings()
    settled = MappingProxyType({"llm": frozenset({"g7-2", "g7-5"})})
    problem = ""
    counts = Counts(done={("llm", action.value): int(action in (Action.EXCLUDE, Action.CHECKPOINT)) for action in Action}, withheld={("llm", "restart"): 1})


class Node:
    """One node's metrics. Close it."""

    def __init__(self, folder: Path, *, watching: bool = False, **config: Any) -> None:
        self.folder = folder
        self.config = DaemonConfig.model_validate(
            {
                "etcd": {"endpoints": ["127.0.0.1:1"]},
                "paths": {name: str(folder / name) for name in ("jobs_dir", "run_dir", "state_dir", "log_dir")},
                **config,
            }
        )
        self.reports = self.config.paths.run_dir / REPORTS
        self.reports.mkdir(parents=True)
        self.board = Board(node="n1", incarnation="0" * 16, stalled_after=60.0)
        self.kv = EtcdKV(KVConfig(endpoints=("127.0.0.1:1",), call_timeout=0.5))
        self.gpus = Gpus()
        self.kernel = KernelLog(self.gpus.index_of, opened=self._no_kernel_log)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(
            self.registry,
            self.board,
            config=self.config,
            kvs=(self.kv,),
            gpus=self.gpus,
            kernel=self.kernel,
            detecting=Watching() if watching else None,  # type: ignore[arg-type]  # says the same, and finds nothing
            acting=Done() if watching else None,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        self.kernel.close()
        self.kv.close()
        self.board.close()

    def write(self, *reports: JobReport) -> None:
        for one in reports:
            one.write(self.reports / f"{one.job}.json")

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def scrape(self) -> dict[str, float]:
        return series(self.text())

    @staticmethod
    def _no_kernel_log() -> int:
        raise PermissionError(1, "Operation not permitted")


def series(text: str) -> dict[str, float]:
    """`name{label="value",…}` -> number. A series that is there twice is an error, as it is to Prometheus."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, name
            found[name] = sample.value
    return found


def having(found: dict[str, float], name: str) -> dict[str, float]:
    """The series of one metric, by their labels."""
    return {one.removeprefix(name): value for one, value in found.items() if one.partition("{")[0] == name}


def eight_gpus() -> list[Gpu]:
    return [Gpu(f"GPU-{index}", f"00000000:{0x10 + index:02X}:00.0") for index in range(8)]


def stand_in(monkeypatch: pytest.MonkeyPatch, gpus: Iterable[Gpu] = ()) -> StandInNvml:
    standin = StandInNvml(gpus=list(gpus))
    monkeypatch.setitem(sys.modules, "pynvml", standin)
    return standin
