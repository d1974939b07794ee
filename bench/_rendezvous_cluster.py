"""One etcd and the client processes of the rendezvous bench around one job.

Owns: processes, and what they say. Must not: decide what is a result.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from bench._rendezvous_worker import Order
from elasticd.kv import EmbeddedEtcd, EtcdKV, KVConfig, Put, WatchBatch, WatchRange
from elasticd.rendezvous.records import GenerationRecord, TargetRecord, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
START_WITHIN = 60.0
"""Seconds for a process to import what it needs."""
CROWD = 64
"""Members in one process at most: with 250, each having six threads, they wait for the interpreter's lock until leases lapse."""


class BenchError(Exception):
    """A member failed, or something did not happen in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Totals over all members at one moment.

    Attributes:
        at: seconds on the monotonic clock.
        requests, keepalives: attempts; an opened watch stream counts as one request.
        bytes: of messages, both ways, without gRPC's and HTTP/2's own.
        writes: transactions that changed the store: etcd's revision.
        etcd_cpu, members_cpu: seconds of processor time.
        threads, files: held by all client processes.
    """

    at: float
    requests: int
    keepalives: int
    bytes: int
    failures: int
    writes: int
    etcd_cpu: float
    members_cpu: float
    threads: int
    files: int


@dataclass(slots=True)
class Worker:
    """One client process and what it said last."""

    process: subprocess.Popen[str]
    count: int
    ready: bool = False
    stats: dict[str, Any] | None = None
    error: str = ""


@dataclass(slots=True)
class Heard:
    """What the members of the job said.

    Attributes:
        registered: node -> when.
        assigned: generation -> node -> when.
        sizes: generation -> members in it.
        seen: generation -> when this process's own watch brought it.
    """

    registered: dict[str, float] = field(default_factory=dict)
    assigned: dict[int, dict[str, float]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)


class Cluster:
    """A fresh etcd and one job. Ends what it started when left."""

    def __init__(self, *, size: int, ttl: float) -> None:
        self.size = size
        self.ttl = ttl
        self.heard = Heard()
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="elasticd-bench-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        (self._path / "state").mkdir(mode=0o700)
        self._etcd = EmbeddedEtcd(self._path / "etcd")
        self._kv = EtcdKV(KVConfig(endpoints=(self._etcd.endpoint,), call_timeout=10.0))
        self._order = Order(endpoint=self._etcd.endpoint, job="bench", first=0, count=0, size=size, ttl=ttl, folder=str(self._path / "state"))
        self._watch = self._kv.watch([WatchRange(key=self._order.keys.generation)], 1, self._on_generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for worker in self._workers:
            self.kill(worker)
        self._kv.close()
        self._etcd.stop()
        self._folder.cleanup()

    # --- processes ---------------------------------------------------------------------------------------------------------

    def add(self, first: int, count: int) -> Worker:
        """Start a process that will hold members `first` and following; they do nothing before `go`."""
        order = Order(**{**{name: getattr(self._order, name) for name in Order.__slots__}, "first": first, "count": count})
        process = subprocess.Popen(
            [sys.executable, "-m", "bench._rendezvous_worker", order.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        worker = Worker(process=process, count=count)
        self._workers.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def add_all(self, processes: int) -> list[Worker]:
        """Start the processes for all `size` members, more than `processes` if these were crowded, and wait until they could begin."""
        processes = max(processes, math.ceil(self.size / CROWD))
        bounds = [self.size * part // processes for part in range(processes + 1)]
        workers = [self.add(first, after - first) for first, after in itertools.pairwise(bounds) if after > first]
        for worker in workers:
            self.await_ready(worker)
        return workers

    def await_ready(self, worker: Worker) -> None:
        """Wait until it could begin."""
        self.wait(lambda: worker.ready, START_WITHIN, "the start of a client process")

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The client processes that live."""
        return tuple(self._workers)

    def go(self, *workers: Worker) -> float:
        """Let them begin; when that was, on the monotonic clock."""
        at = time.monotonic()
        for worker in workers:
            self._tell(worker, "go")
        return at

    def kill(self, worker: Worker) -> float:
        """SIGKILL, as if the machine were gone; when that was."""
        at = time.monotonic()
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        for stream in (worker.process.stdin, worker.process.stdout):
            if stream:
                with suppress(OSError):  # what was not sent any more
                    stream.close()
        self._workers.remove(worker)
        return at

    def _tell(self, worker: Worker, what: str) -> None:
        assert worker.process.stdin is not None  # a pipe
        worker.process.stdin.write(what + "\n")
        worker.process.stdin.flush()

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None  # a pipe
        with suppress(ValueError, OSError):  # closed by kill
            for line in worker.process.stdout:
                self._hear(worker, json.loads(line))
        with self._changed:
            worker.error = worker.error or "a client process ended"
            self._changed.notify_all()

    def _hear(self, worker: Worker, said: dict[str, Any]) -> None:
        heard = self.heard
        with self._changed:
            if "assigned" in said:
                heard.assigned.setdefault(said["number"], {})[said["assigned"]] = said["at"]
                heard.sizes[said["number"]] = said["nodes"]
            elif "registered" in said:
                heard.registered[said["registered"]] = said["at"]
            elif "stats" in said:
                worker.stats = said
            elif "error" in said:
                worker.error = said["error"]
            else:
                worker.ready = True
            self._changed.notify_all()

    def _on_generation(self, batch: WatchBatch) -> None:
        at = time.monotonic()
        for event in batch.events:
            if event.item.value:
                record = parse(GenerationRecord, event.item.key, event.item.value, self._order.keys.scope)
                with self._changed:
                    self.heard.seen[record.number] = at
                    self._changed.notify_all()

    # --- what happens --------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], within: float, what: str) -> None:
        """Until `condition` holds.

        Raises:
            BenchError: a member failed, or it took longer than `within` seconds.
        """

        def settled() -> bool:
            return condition() or any(worker.error for worker in self._workers)

        with self._changed:
            self._changed.wait_for(settled, within)
            if condition():
                return
            errors = [worker.error for worker in self._workers if worker.error]
        raise BenchError(f"{what}: {errors[0] if errors else f'not within {within:g} s'}; {self._state()}")

    def formed(self, nodes: int, *, above: int = 0) -> int | None:
        """The generation above number `above` of which all of `nodes` members have told that they have it, if there is one."""
        for number, times in self.heard.assigned.items():
            if number > above and self.heard.sizes[number] == nodes == len(times) and number in self.heard.seen:
                return number
        return None

    def await_formed(self, nodes: int, *, above: int = 0, within: float) -> int:
        """Wait for it; its number."""
        self.wait(lambda: self.formed(nodes, above=above) is not None, within, f"a generation of {nodes}")
        number = self.formed(nodes, above=above)
        assert number is not None  # just waited for
        return number

    def last_assigned(self, number: int) -> float:
        """When the last member told that it has generation `number`."""
        return max(self.heard.assigned[number].values())

    def resize(self, *, min_nodes: int, desired: int) -> None:
        """Write the job's size, as an operator would."""
        keys = self._order.keys
        target = TargetRecord(scope=keys.scope, min_nodes=min_nodes, max_nodes=self.size + 1, desired=desired)
        self._kv.txn((), (Put(key=keys.target, value=target.to_bytes()),))

    def usage(self, workers: Sequence[Worker] | None = None) -> Usage:
        """What the members of `workers`, else of all, have used so far."""
        said = self._ask(self._workers if workers is None else workers)
        stats = [one["stats"] for one in said]
        cpu = psutil.Process(self._etcd.pid).cpu_times()
        return Usage(
            at=math.fsum(one["at"] for one in said) / len(said),
            requests=sum(one["requests"] for one in stats),
            keepalives=sum(one["keepalives"] for one in stats),
            bytes=sum(one["bytes_sent"] + one["bytes_received"] for one in stats),
            failures=sum(one["failures"] for one in stats),
            writes=self._kv.list(self._order.keys.prefix, keys_only=True, limit=1).revision,
            etcd_cpu=cpu.user + cpu.system,
            members_cpu=math.fsum(one["cpu"] for one in said),
            threads=sum(one["threads"] for one in said),
            files=sum(one["files"] for one in said),
        )

    def cpu(self, worker: Worker) -> tuple[float, float]:
        """Seconds of processor time that a client process has used, and when; etcd is not asked."""
        said = self._ask([worker])[0]
        return float(said["cpu"]), float(said["at"])

    def kill_etcd(self) -> None:
        """SIGKILL it."""
        psutil.Process(self._etcd.pid).kill()

    def _ask(self, workers: Sequence[Worker]) -> list[dict[str, Any]]:
        with self._changed:
            for worker in workers:
                worker.stats = None
        for worker in workers:
            self._tell(worker, "stats")
        self.wait(lambda: all(worker.stats for worker in workers), 60.0, "the members' counters")
        return [worker.stats for worker in workers if worker.stats]

    def _state(self) -> str:
        told = {number: f"{len(times)} of {self.heard.sizes[number]}" for number, times in self.heard.assigned.items()}
        return f"{len(self.heard.registered)} registered; generations told: {told or 'none'}"
