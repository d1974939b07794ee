"""What Prometheus reads of a daemon: of itself, its jobs, its machine and its GPUs.

Owns: that a scrape is answered whatever is the matter. Must not: keep numbers of its own that somebody else has, or ask etcd.

A room (`daemon`, `jobs`, `host`, `gpus`, `detectors`) names its metrics and fills them in. One that fails is left out of the scrape, and the log says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from elasticd.daemon.expiry import end_of
from elasticd.daemon.host import Host
from elasticd.daemon.metrics import daemon, detectors, gpus, host, jobs
from elasticd.daemon.metrics.families import Family, Sheet
from elasticd.daemon.reports import Reports
from elasticd.daemon.sampled import Sampled
from elasticd.daemon.volumes import volumes_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from elasticd.daemon.acting import Acting
    from elasticd.daemon.board import Board
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.detecting import Detecting
    from elasticd.daemon.gpureadings import Gpus
    from elasticd.daemon.kmsg import KernelLog
    from elasticd.kv import EtcdKV

FAMILIES: Final[tuple[Family, ...]] = (*daemon.FAMILIES, *jobs.FAMILIES, *host.FAMILIES, *gpus.FAMILIES, *detectors.FAMILIES)
"""Every metric there is but those of the process."""
REPORTS: Final = "reports"
"""Directory in the run directory where agents write."""
_PROCESS: Final = frozenset(("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"))
"""Of what prometheus-client says of the process, what somebody looks at."""
_CERTIFICATES_EVERY: Final = 60.0

log = structlog.get_logger("elasticd.daemon")


class Metrics(Collector):
    """Registers itself.

    Args:
        registry: where.
        board: what the decision loop says of itself.
        config: of the daemon; the parts of it that a reload does not change.
        kvs: its clients of etcd.
        gpus: the GPUs of this machine.
        kernel: what its kernel says.
        detecting, acting: the detectors of this node and what acts on them, if it has any.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        board: Board,
        *,
        config: DaemonConfig,
        kvs: Sequence[EtcdKV],
        gpus: Gpus,
        kernel: KernelLog,
        detecting: Detecting | None = None,
        acting: Acting | None = None,
    ) -> None:
        self._board = board
        self._config = config
        self._gpus = gpus
        self._kernel = kernel
        self._reports = Reports(config.paths.run_dir / REPORTS)
        self._host = Host(volumes_of(config, board))
        self._certificates = Sampled("certificates", self._ends, fresh=_CERTIFICATES_EVERY, kept=10 * _CERTIFICATES_EVERY)
        self._process = ProcessCollector(registry=None)
        self._failing: set[str] = set()
        self._rooms: Mapping[str, Callable[[Sheet], None]] = {
            "loop": lambda sheet: daemon.fill_loop(sheet, board, config),
            "etcd": lambda sheet: daemon.fill_etcd(sheet, [kv.stats for kv in kvs], config),
            "certificates": lambda sheet: daemon.fill_certificates(sheet, self._certificates.get() or {}),
            "jobs": self._fill_jobs,
            "host": lambda sheet: host.fill_host(sheet, self._host.read()),
            "kernel": lambda sheet: host.fill_kernel(sheet, kernel.counts),
            "gpus": self._fill_gpus,
            "detectors": lambda sheet: detectors.fill_detectors(sheet, detecting, acting),
            "policy": lambda sheet: detectors.fill_acting(sheet, acting),
        }
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        self._host.begin()
        self._gpus.begin()
        self._certificates.begin()
        for name, fill in self._rooms.items():
            sheet = Sheet()
            try:
                fill(sheet)
            except Exception:
                if name not in self._failing:
                    log.exception("metrics_failed", room=name)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            yield from sheet.metrics()
        yield from (metric for metric in self._process.collect() if metric.name in _PROCESS)

    def _fill_jobs(self, sheet: Sheet) -> None:
        turn = self._board.turn
        jobs.fill_jobs(sheet, turn, self._reports.read(jobs.names(turn)))

    def _fill_gpus(self, sheet: Sheet) -> None:
        gpus.fill_gpus(sheet, self._gpus.read(), self._kernel.counts, self._gpus.index_of)

    def _ends(self) -> Mapping[str, float]:
        found = {name: end_of(path) for name, path in daemon.certificate_files(self._config).items()}
        return {name: end for name, end in found.items() if end is not None}
