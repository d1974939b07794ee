"""Where the time of a recovery went: pure arithmetic on what workers and agents logged.

Owns: the definition of every number that bench.recovery prints. Must not: start, stop or wait for anything.

A recovery is cut at points that all nodes have passed, in this order; a point that a clock's grain puts before its predecessor is moved onto it, so
that the phases add up to the total exactly.

=============  ==============================================================================================================================
event          what was done to the job, by the bench's clock, which is that of the logs
sign           an agent knows: a worker failed, a peer is dead, a proposal or a stop is decided; `form`, `node_join`: the newcomers are registered,
               by their own log or, if that is sooner, by the proposal that counts them in
told           every surviving node knows that its workers are to end (its `directive`, or its own `worker_failed`)
stopped        the last `workers_stopped`
formed         the last `generation_formed` of the generation that the new workers belong to
forked         the last new worker's process began, as the kernel says (grain: 10 ms)
imported       the last new worker has imported torch
grouped        the last new worker has initialised its process group
wrapped        the last new worker has wrapped its model in DistributedDataParallel
stepped        the last rank's first step of the new world is done: the end
=============  ==============================================================================================================================

==============  ==========================================================================================================================
detect          event to sign; for `form` and `node_join` that is the newcomers' own start-up
agree           sign to told, and stopped to formed: what passes through etcd (in `form` with it `settle`, 1 s)
stop            told to stopped
launch          formed to forked
start           forked to imported: exec, the interpreter, `import torch`
group           imported to grouped: workers of several nodes find each other
wrap            grouped to wrapped: mostly an import again, of torch._dynamo with sympy, 823 modules (torch 2.13); else milliseconds
first_step      wrapped to stepped: of it 20 ms the script's sleep
==============  ==========================================================================================================================

`*_without_startup` is the total without Python's share: without start, wrap and first_step, and for `form` and `node_join` without detect too, which
there is the interpreter and the imports of agents. Of agents that are not ours no log says when they were ready, so those two rows are elasticd's alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

EVENTS: Final = ("form", "worker_kill", "node_join", "node_kill", "rank0_node_loss", "silent_node")
STARTS_AGENTS: Final = frozenset({"form", "node_join"})
"""Events in which agents start, so that their start-up is part of the total."""
PROCESS, IMPORTED, GROUP, DDP, STEP = "process", "imported", "group", "ddp", "step"
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker process, as it told of itself. `marks` holds when it first told each thing; see _recovery_script.py."""

    pid: int
    parent: int
    rank: int
    world: int
    marks: Mapping[str, float]

    @classmethod
    def of(cls, lines: Lines) -> Self:
        """The process that wrote these lines, at least one."""
        marks: dict[str, float] = {}
        for line in lines:
            marks.setdefault(line["what"], line["at"])
        first = lines[0]
        return cls(pid=first["pid"], parent=first["ppid"], rank=first["rank"], world=first["world"], marks=marks)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines that are complete so far; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_workers(folder: Path, known: Collection[int] = ()) -> list[Worker]:
    """All workers that wrote something, but those `known` by their pids."""
    unread = [path for path in folder.glob("worker-*.jsonl") if int(path.stem.partition("-")[2]) not in known]
    return [Worker.of(lines) for path in unread if (lines := read_lines(path))]


def stepping(workers: Iterable[Worker], world: int) -> list[Worker] | None:
    """One worker of each rank that has stepped in a world of this size, the newest where there are several; None unless all have."""
    newest: dict[int, Worker] = {}
    for worker in workers:
        held = newest.get(worker.rank)
        if worker.world == world and STEP in worker.marks and (held is None or held.marks[STEP] < worker.marks[STEP]):
            newest[worker.rank] = worker
    return list(newest.values()) if len(newest) == world else None


def last(workers: Iterable[Worker], what: str) -> float:
    """When the last of them told it."""
    return max(worker.marks[what] for worker in workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Seconds; see the module. They add up to the total."""

    detect: float
    agree: float
    stop: float
    launch: float
    start: float
    group: float
    wrap: float
    first_step: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """In the order of time, but for `agree`, which lies on both sides of `stop`."""
        return tuple(field.name for field in fields(cls))

    @property
    def total(self) -> float:
        """From the event to the last rank's first step."""
        return float(sum(astuple(self)))


def phases(event: str, at: float, logs: Mapping[str, Lines], workers: Sequence[Worker]) -> Phases:
    """Cut an elasticd recovery.

    Args:
        event: one of `EVENTS`.
        at: when it was done.
        logs: node -> the lines of its agent.jsonl.
        workers: those of the new world, each with all its marks.
    """
    cuts = _Cuts(at)
    generation = _generation_of(logs, {worker.pid for worker in workers})
    formed = max((_at(line) for line in _named(logs, "generation_formed") if line["generation"] == generation), default=at)
    recent = {node: [line for line in lines if at < _at(line) <= formed] for node, lines in logs.items()}
    detect = cuts.upto(_sign(event, recent))
    agree = cuts.upto(_told(recent))
    stop = cuts.upto(max((_at(line) for line in _named(recent, "workers_stopped")), default=at))
    agree += cuts.upto(formed)
    return Phases(
        detect=detect,
        agree=agree,
        stop=stop,
        launch=cuts.upto(last(workers, PROCESS)),
        start=cuts.upto(last(workers, IMPORTED)),
        group=cuts.upto(last(workers, GROUP)),
        wrap=cuts.upto(last(workers, DDP)),
        first_step=cuts.upto(last(workers, STEP)),
    )


def without_startup(event: str, at: float, workers: Sequence[Worker], cut: Phases | None) -> float | None:
    """The total without Python's share; None where nothing tells it. `cut` is None for agents that are not ours."""
    if event in STARTS_AGENTS and cut is None:
        return None
    agents = cut.detect if cut is not None and event in STARTS_AGENTS else 0.0
    return (last(workers, PROCESS) - at) + (last(workers, GROUP) - last(workers, IMPORTED)) - agents


def generations(at: float, logs: Mapping[str, Lines]) -> int:
    """How many generations formed after the event: more than one, and something else happened meanwhile, such as a lease lost to a busy machine."""
    return len({line["generation"] for line in _named(logs, "generation_formed") if _at(line) > at})


class _Cuts:
    """Goes from one point to the next, never backwards."""

    def __init__(self, at: float) -> None:
        self._at = at

    def upto(self, point: float) -> float:
        """Seconds from the point before."""
        passed = max(0.0, point - self._at)
        self._at += passed
        return passed


def _at(line: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _named(logs: Mapping[str, Lines], name: str) -> list[Mapping[str, Any]]:
    return [line for lines in logs.values() for line in lines if line["event"] == name]


def _generation_of(logs: Mapping[str, Lines], pids: Collection[int]) -> int:
    return max((line["generation"] for line in _named(logs, "workers_started") if set(line["pids"]) & set(pids)), default=0)


def _sign(event: str, recent: Mapping[str, Lines]) -> float:
    proposed = [_at(line) for line in _named(recent, "decision") if line["text"].startswith("proposing")]
    if event in STARTS_AGENTS:
        # A member is seen by the coordinator before it has found its own place and says so; where a smaller world formed first, the last proposal counts.
        registered = max((_at(line) for line in _named(recent, "registered")), default=0.0)
        return min([registered, *proposed[-1:]])
    noticed = [_at(line) for lines in recent.values() for line in lines if line["event"] == "peer_dead" or _ends_workers(line)]
    return min([*noticed, *proposed], default=0.0)


def _ends_workers(line: Mapping[str, Any]) -> bool:
    return bool(line["event"] == "worker_failed" or (line["event"] == "directive" and line["action"] == "stop"))


def _told(recent: Mapping[str, Lines]) -> float:
    """When the last node whose workers stopped began to stop them."""
    began = [
        min((_at(line) for line in lines if _ends_workers(line)), default=0.0)
        for lines in recent.values()
        if any(line["event"] == "workers_stopped" for line in lines)
    ]
    return max(began, default=0.0)
