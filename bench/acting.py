"""From a line of the kernel's log to what is asked of the job, as `python -m bench.acting [--quick] [--runs N] [--json FILE]`.

A real etcd, a real process of detectors, and the daemon's own parts that hear it and act; the job in etcd is made up, and no agent carries anything out
(what that takes is `bench.recovery`'s). Each run is another job with a fatal Xid on one of its nodes, so that its node is to be left out.

    line_to_incident      from the daemon's word to its detectors until it hears the incident
    incident_to_action    from then until a watch of etcd sees the word that drains the node: what the issue calls verdict to action
    line_to_action        both
    two_writes            floor: two transactions one after the other on the same etcd, which it cannot do without
    open_cpu_percent      share of one core that this process takes while an incident is open and nothing happens
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench._common import Row, command, print_table, progress, ratio, write_json
from elasticd.daemon.acting import Acting
from elasticd.daemon.detecting import Detecting
from elasticd.daemon.reports import Reports
from elasticd.kv import EtcdKV, KVConfig, Put
from elasticd.kv.embedded import EmbeddedEtcd
from elasticd.kv.types import WatchRange
from elasticd.policy.settings import Settings
from elasticd.rendezvous.keys import ClusterKeys
from elasticd.rendezvous.records import Cause, CauseKind, GenerationMember, GenerationRecord, MemberId, Record, StoreAddress, TargetRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticd.kv import WatchBatch

NODES: Final = 8
WITHIN: Final = 30.0
"""Seconds after which a run has failed."""
IDLE: Final = 20.0
TARGET: Final = 1.0
"""Seconds from verdict to action, without the step."""
LINE: Final = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@dataclass(frozen=True, slots=True)
class Times:
    """Of one run, in seconds."""

    incident: float
    action: float
    writes: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.acting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="jobs with a fault (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="three runs, and no look at an idle process")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    options.runs = 3 if options.quick else options.runs
    with tempfile.TemporaryDirectory(prefix="bench-acting-") as folder, EmbeddedEtcd(Path(folder) / "etcd") as etcd:
        config = KVConfig(endpoints=(etcd.endpoint,))
        times, idle = [], []
        for number in range(options.runs):
            with EtcdKV(config) as kv:
                run, share = _run(kv, Path(folder) / str(number), idle=number == 0 and not options.quick)
            times.append(run)
            idle += [share] if share is not None else []
            progress(f"run {number + 1}: {1000 * run.incident:.0f} ms to the incident, {1000 * run.action:.0f} ms to the action")
    rows = [
        Row.of("line_to_incident", "elasticd", [one.incident for one in times]),
        (action := Row.of("incident_to_action", "elasticd", [one.action for one in times], note=f"wanted: {TARGET:g} s at most")),
        Row.of("line_to_action", "elasticd", [one.incident + one.action for one in times]),
        (floor := Row.of("two_writes", "etcd", [one.writes for one in times], note="floor")),
        *([against] if (against := ratio(action, floor)) else []),
        *([Row.of("open_cpu_percent", "elasticd", idle, unit="%", note="this process alone, while an incident is open")] if idle else []),
    ]
    print_table(rows)
    if options.json:
        write_json(options.json, "acting", command(), rows)
    return 0 if action.median is not None and action.median <= TARGET else 1


def _run(kv: EtcdKV, folder: Path, *, idle: bool) -> tuple[Times, float | None]:
    keys = ClusterKeys(f"c{uuid.uuid4().hex[:12]}")
    _make_job(kv, keys)
    logs = folder / "logs"
    logs.mkdir(parents=True)
    drained = threading.Event()
    seen: list[float] = []

    def on_batch(batch: WatchBatch) -> None:
        if batch.events:
            seen.append(time.perf_counter())
            drained.set()

    watch = kv.watch([WatchRange(key=keys.policies, prefix=True)], 0, on_batch)
    due = threading.Event()
    heard: list[float] = []

    def wake() -> None:
        heard.append(time.perf_counter())
        due.set()

    detecting = Detecting(None, options=["--no-forest"], wake=wake)
    acting = Acting(kv=kv, operator_kv=kv, keys=keys, node="n0", settings=Settings(), detecting=detecting, reports=Reports(folder / "reports"), due=due)
    try:
        detecting.start()
        detecting.watch({"llm": logs})
        acting.start()
        _await(lambda: "llm" in detecting.pulse.jobs)
        began = time.perf_counter()
        detecting.tell({"event": "kernel_event", "time": time.time(), "node": "n3", "text": LINE})
        if not drained.wait(WITHIN):
            raise RuntimeError(f"nothing was done within {WITHIN:.0f} s: {acting.problem}")
        share = _share(IDLE) if idle else None
    finally:
        acting.close()
        detecting.close()
        watch.close()
    return Times(incident=heard[0] - began, action=seen[0] - heard[0], writes=_two_writes(kv, keys)), share


def _make_job(kv: EtcdKV, keys: ClusterKeys) -> None:
    job = keys.job("llm")
    members = tuple(
        GenerationMember(id=MemberId(node=f"n{number}", incarnation=f"{number:016x}"), address="127.0.0.1", slots=1, probe_port=1) for number in range(NODES)
    )
    records: dict[str, Record] = {
        job.target: TargetRecord(scope=job.scope, min_nodes=1, max_nodes=NODES, desired=NODES),
        job.generation: GenerationRecord(
            scope=job.scope,
            number=1,
            cause=Cause(kind=CauseKind.FORM),
            members=members,
            store=StoreAddress(address="127.0.0.1", port=1),
            formed_at=time.time() - 60.0,
        ),
    }
    for key, record in records.items():
        kv.txn((), (Put(key=key, value=record.to_bytes()),))


def _two_writes(kv: EtcdKV, keys: ClusterKeys) -> float:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2):
            kv.txn((), (Put(key=keys.prefix + "floor", value=b"x" * 4096),))
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _share(seconds: float) -> float:
    began, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return 100.0 * (time.process_time() - used) / (time.perf_counter() - began)


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"no detectors within {WITHIN:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    raise SystemExit(main())
