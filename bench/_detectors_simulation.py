"""Jobs that never ran: windows of benign training with its usual nuisances, and the same with one fault whose beginning is known.

Owns: how benign noise looks, and how faults are laid over it. Must not: know any detector.

Noise has heavy tails and memory; ranks differ from the start; checkpoints, evaluations and rescales come as the phases of windows say, and now and then
unsaid; neighbours slow down all ranks of a node for a while. How much of each stands in `_detectors_noise.json`, to be fitted to recorded traces.
What one rank takes longer the others wait for, as in DDP: the length of a step is the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter  # type: ignore[import-untyped]

from detectors.features import METRICS, TINY, Measured, median_of_others
from detectors.observations import Phase
from detectors.windows import Row, Window

WIDTH: Final = 10.0
PER_HOUR: Final = 360
RANK_METRICS: Final = (
    "step_s",
    "data_s",
    "compute_s",
    "comm_s",
    "other_s",
    "loss",
    "grad_norm",
    "rss_bytes",
    "gpu_temperature_c",
    "gpu_power_w",
    "gpu_utilization",
    "gpu_clock_mhz",
    "n_error",
    "n_warn",
    "n_first_seen",
    "n_distinct",
    "entropy",
    "lines_per_s",
)
NODE_METRICS: Final = ("host_cpu", "host_memory_used", "host_disk_busy")
COUNTS: Final = ("n_error", "n_warn", "n_first_seen", "n_distinct")
LINEAR: Final = (*COUNTS, "gpu_temperature_c", "gpu_utilization", "entropy", "host_cpu", "host_memory_used", "host_disk_busy")
LAYOUTS: Final = ((1, 8), (2, 4), (4, 2), (1, 4), (2, 2), (4, 1), (4, 4))
"""Nodes, and ranks on each."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """See `_detectors_noise.json`; names end in their unit where it is not a share, pairs are the bounds of a uniform draw for each job."""

    step_s: tuple[float, float]
    heterogeneous_jobs: float
    heterogeneous_spread: float
    rank_spread: float
    compute_sigma: tuple[float, float]
    compute_memory: float
    tail_df: float
    shared_sigma: float
    wander_sigma: float
    wander_hours: float
    spike_rate: float
    spike_size: float
    spike_size_log_sigma: float
    wait_sigma: float
    neighbour_rate: float
    neighbour_seconds: float
    neighbour_seconds_log_sigma: float
    neighbour_compute: float
    neighbour_data: float
    neighbour_log_sigma: float
    checkpoint_minutes: tuple[float, float]
    evaluation_minutes: tuple[float, float]
    rescale_hours: float
    unmarked: float
    missing: float
    log_bursts: float

    @classmethod
    def load(cls, path: Path | None = None) -> Noise:
        """Of this file, or the one that lies here.

        Raises:
            ValueError: if it lacks a name or has one too many.
        """
        found: dict[str, Any] = json.loads((path or Path(__file__).with_name("_detectors_noise.json")).read_text())
        found.pop("about", None)
        wanted = {one.name for one in fields(cls)}
        if wanted != set(found):
            raise ValueError(f"noise of simulated jobs: {sorted(wanted ^ set(found))} missing or unknown")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return cls(**values)


@dataclass(kw_only=True, slots=True)
class Job:
    """Some hours of a job, in arrays: windows along the first axis, ranks or nodes along the second.

    Attributes:
        values: `RANK_METRICS` and `NODE_METRICS` -> numbers; NaN: not measured.
        phases: of each window. generations: likewise; ranks change places only with it.
        alive: ranks that are there.
    """

    nodes: int
    per_node: int
    values: dict[str, Array]
    phases: list[Phase]
    generations: NDArray[np.int64]
    alive: NDArray[np.bool_]
    began: float = 1_800_000_000.0
    drifted: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        """How many there are at most."""
        return self.nodes * self.per_node

    def windows(self, first: int = 0, last: int | None = None) -> Iterator[Window]:
        """As `detectors.windows` would close them."""
        names = [f"node-{index}" for index in range(self.nodes)]
        ranked = np.stack([self.values[name] for name in RANK_METRICS], axis=-1)
        noded = np.stack([self.values[name] for name in NODE_METRICS], axis=-1)
        whole = not np.isnan(ranked).any()
        for index in range(first, len(self.phases) if last is None else last):
            alive = self.alive[index]
            rows = {}
            for rank, numbers in enumerate(ranked[index].tolist()):
                if alive[rank]:
                    values = dict(zip(RANK_METRICS, numbers, strict=True))
                    if not whole:
                        values = {name: number for name, number in values.items() if number == number}  # noqa: PLR0124  # not NaN
                    rows[rank] = Row(values=values, node=names[rank // self.per_node], rank=rank)
            nodes = {
                names[node]: Row(values=dict(zip(NODE_METRICS, numbers, strict=True)), node=names[node])
                for node, numbers in enumerate(noded[index].tolist())
                if alive[node * self.per_node]
            }
            at = self.began + index * WIDTH
            yield Window(
                began=at,
                ended=at + WIDTH,
                generation=int(self.generations[index]),
                phase=self.phases[index],
                world_size=int(alive.sum()),
                rows=rows,
                nodes=nodes,
            )

    def measured(self) -> Iterator[tuple[Window, Measured | None]]:
        """The same windows with their numbers compared already, for all windows of a generation at once; their rows say who is there, and no more."""
        names = [f"node-{index}" for index in range(self.nodes)]
        owners = np.arange(self.ranks) // self.per_node
        columns = [self.values[metric.name][:, owners] if metric.name in NODE_METRICS else self.values[metric.name] for metric in METRICS]
        values = np.stack(columns, axis=-1)
        for index, metric in enumerate(METRICS):
            if metric.scale in {"log", "trend"}:
                values[..., index] = np.log(np.maximum(np.abs(values[..., index]), TINY))
            elif metric.scale == "count":
                values[..., index] = np.log1p(values[..., index])
        for generation in np.unique(self.generations):
            where = np.flatnonzero(self.generations == generation)
            ranks = np.flatnonzero(self.alive[where[0]])
            block = values[where][:, ranks]
            flat = block.transpose(1, 0, 2).reshape(len(ranks), -1)
            apart = (flat - median_of_others(flat)).reshape(len(ranks), len(where), -1).transpose(1, 0, 2)
            rows = {place: Row(values={}, node=names[rank // self.per_node], rank=place) for place, rank in enumerate(ranks.tolist())}
            for place, index in enumerate(where.tolist()):
                at = self.began + index * WIDTH
                train = self.phases[index] is Phase.TRAIN
                yield (
                    Window(began=at, ended=at + WIDTH, generation=int(generation), phase=self.phases[index], world_size=len(ranks), rows=rows),
                    Measured(ranks=tuple(rows), values=block[place], apart=apart[place]) if train else None,
                )


def benign(noise: Noise, seed: int, *, hours: float, layout: tuple[int, int] | None = None, rescales: bool = True) -> Job:
    """A job in which nothing is wrong."""
    rng = np.random.default_rng(seed)
    nodes, per_node = layout or LAYOUTS[rng.integers(len(LAYOUTS))]
    count, ranks = round(hours * PER_HOUR), nodes * per_node
    node_of = np.arange(ranks) // per_node
    phases, dips, generations, alive = _phases(noise, rng, count=count, nodes=nodes, per_node=per_node, rescales=rescales)
    busy, strength = _neighbours(noise, rng, count=count, nodes=nodes)

    wander = _memory(rng, (count, ranks), np.exp(-WIDTH / (3600 * noise.wander_hours)), df=30.0)
    node_wander = _memory(rng, (count, nodes), np.exp(-WIDTH / (3600 * noise.wander_hours)), df=30.0)
    sigma = rng.uniform(*noise.compute_sigma) * np.exp(0.2 * rng.standard_normal(ranks))
    own = sigma * _memory(rng, (count, ranks), noise.compute_memory, df=noise.tail_df)
    shared = noise.shared_sigma * _memory(rng, (count, 1), 0.7, df=noise.tail_df)
    slow = noise.wander_sigma * (0.8 * wander + 0.6 * node_wander[:, node_of])
    offsets = _offsets(noise, rng, generations, nodes=nodes, per_node=per_node)
    slowed = np.log1p(busy * strength[0])[:, node_of]
    compute = np.exp(np.log(rng.uniform(*noise.step_s)) + offsets + shared + slow + own + slowed + _spikes(noise, rng, (count, ranks)))
    compute *= 1 + 0.05 * dips[:, None]

    def waiting(share: float, neighbour: float, *, unshared: float = 1.0) -> Array:
        base = np.median(compute) * share * np.exp(0.1 * rng.standard_normal(ranks))
        moves = noise.wait_sigma * unshared * _memory(rng, (count, ranks), 0.4, df=noise.tail_df)
        return np.asarray(base * np.exp(moves + 0.1 * node_wander[:, node_of] + np.log1p(busy * neighbour)[:, node_of]) * (1 + dips[:, None]))

    data, other = waiting(0.03, 1.0) * (1 + busy * strength[1])[:, node_of], waiting(0.02, 0.15)
    values = {"data_s": data, "compute_s": compute, "other_s": other}
    transfer = waiting(0.08, 0.1, unshared=0.3).mean(axis=1, keepdims=True)
    _couple(values, transfer, alive)
    values |= _learning(rng, count=count, ranks=ranks, memory=noise)
    values |= _devices(rng, count=count, nodes=nodes, node_of=node_of, wander=wander, node_wander=node_wander, dips=dips, df=noise.tail_df)
    values |= _logs(noise, rng, count=count, ranks=ranks, step_s=values["step_s"], dips=dips)
    values["host_cpu"] = np.clip(0.25 + 0.03 * _memory(rng, (count, nodes), 0.6, df=5.0) + 0.02 * node_wander + 0.3 * busy * (strength[0] > 0.0), 0, 1)
    values["host_disk_busy"] = np.clip(0.05 + 0.02 * np.abs(_memory(rng, (count, nodes), 0.5, df=4.0)) + 0.2 * busy + 0.3 * dips[:, None], 0, 1)
    for name in RANK_METRICS:
        values[name] = np.where(rng.random((count, ranks)) < noise.missing, np.nan, values[name])
    return Job(nodes=nodes, per_node=per_node, values=values, phases=phases, generations=generations, alive=alive)


def straggle(job: Job, *, rank: int, share: float, at: float) -> None:
    """From `at` (windows, with a fraction) this rank's own work takes `share` longer, and all others wait for it."""
    first = int(at)
    part = np.ones(len(job.phases) - first)
    part[0] = 1 - (at - first)
    transfer = job.values["step_s"] - job.values["data_s"] - job.values["compute_s"] - job.values["other_s"]
    transfer = np.nanmin(np.where(job.alive, transfer, np.inf), axis=1, keepdims=True)  # what the slowest waits
    job.values["compute_s"][first:, rank] *= 1 + share * part
    missing = np.isnan(job.values["comm_s"])
    _couple(job.values, transfer, job.alive)
    job.values["comm_s"][missing] = np.nan


DRIFTS: Final[Mapping[str, Mapping[str, float]]] = {
    "cooling": {"gpu_temperature_c": 2.0, "gpu_clock_mhz": -2.0, "gpu_power_w": -1.6, "compute_s": 1.8},
    "power_cap": {"gpu_power_w": -2.0, "gpu_clock_mhz": -1.8, "gpu_temperature_c": -1.6, "compute_s": 1.8},
    "reader": {"data_s": 2.0, "other_s": 1.8, "gpu_utilization": -1.8, "rss_bytes": 1.6, "lines_per_s": 1.4},
    "leak": {"rss_bytes": 2.0, "host_memory_used": 2.0, "other_s": 1.8, "host_disk_busy": 1.6, "host_cpu": 1.5},
    "link": {"other_s": 1.6, "data_s": 1.8, "gpu_utilization": -2.0, "gpu_power_w": -1.8, "host_cpu": -1.5},
    "contention": {"host_cpu": 2.0, "data_s": 1.8, "other_s": 1.8, "compute_s": 1.6, "host_disk_busy": 1.5},
    "chatter": {"lines_per_s": 2.0, "entropy": 2.0, "other_s": 1.6, "host_disk_busy": 1.8, "rss_bytes": 1.5},
    "input": {"loss": 1.8, "grad_norm": 2.0, "data_s": 1.6, "compute_s": 1.6, "entropy": 1.4},
}
"""Joint drifts of one rank, and of its node's own numbers: each metric's shift in its own robust standard deviations. None of them goes beyond 2.5."""
WITHIN: Final = 2.5


def drift(job: Job, *, kind: str, rank: int, first: int, last: int, ramp: int = 30, look_back: int = 2 * PER_HOUR) -> None:
    """Shift the metrics of `DRIFTS[kind]` from window `first` to `last`, over `ramp` windows; no value leaves 2.5 robust deviations of the hours before."""
    shape = np.minimum(1.0, np.arange(1, last - first + 1) / ramp)
    for name, shift in DRIFTS[kind].items():
        column = job.values[name][:, rank // job.per_node if name in NODE_METRICS else rank]
        flat = column if name in LINEAR else np.log(np.maximum(column, 1e-12))
        before = flat[max(0, first - look_back) : first][[phase is Phase.TRAIN for phase in job.phases[max(0, first - look_back) : first]]]
        now = flat[first:last]
        if name in {"loss", "grad_norm"}:  # they fall: what is usual is that of the last half hour
            before = before[-180:]
        middle = np.nanmedian(before)
        sigma = 1.4826 * np.nanmedian(np.abs(before - middle))
        moved = np.clip(now + shift * sigma * shape, middle - WITHIN * sigma, middle + WITHIN * sigma)
        column[first:last] = moved if name in LINEAR else np.exp(moved)


def _memory(rng: np.random.Generator, shape: tuple[int, int], memory: float, *, df: float) -> Array:
    """AR(1) with Student's t, of variance 1."""
    noise = rng.standard_t(df, shape) / np.sqrt(df / (df - 2))
    start = rng.standard_normal((1, shape[1])) * memory
    found, _ = lfilter([np.sqrt(1 - memory**2)], [1.0, -memory], noise, axis=0, zi=start)
    return np.asarray(found)


def _phases(
    noise: Noise, rng: np.random.Generator, *, count: int, nodes: int, per_node: int, rescales: bool
) -> tuple[list[Phase], Array, NDArray[np.int64], NDArray[np.bool_]]:
    phases = [Phase.TRAIN] * count
    dips = np.zeros(count)
    generations = np.ones(count, dtype=np.int64)
    alive = np.ones((count, nodes * per_node), dtype=bool)

    def mark(at: int, windows: int, phase: Phase, depth: float) -> None:
        unsaid = depth and rng.random() < noise.unmarked
        for index in range(at, min(count, at + windows)):
            dips[index] = depth
        for index in range(at, min(count, at + windows + 1)):  # and the one after
            phases[index] = phases[index] if unsaid else phase

    for every, phase, longest in ((noise.checkpoint_minutes, Phase.CHECKPOINT, 3), (noise.evaluation_minutes, Phase.EVAL, 12)):
        period, at = round(rng.uniform(*every) * 6), int(rng.integers(60))
        while at < count:
            mark(at, int(rng.integers(1, longest + 1)), phase, rng.uniform(0.2, 1.0) if phase is Phase.CHECKPOINT else 0.0)
            at += period
    mark(0, 3, Phase.INIT, 0.0)
    at = 0
    while rescales and nodes > 1:
        at += int(rng.exponential(noise.rescale_hours * PER_HOUR)) + 30
        if at >= count:
            break
        generations[at:] += 1
        gone = int(rng.integers(1, nodes)) if alive[at].all() else None
        alive[at:] = True
        if gone is not None:  # ranks are numbered anew, so the last ones are missing
            alive[at:, gone * per_node :] = False
        mark(at, int(rng.integers(2, 6)), Phase.RESCALE, 0.0)
    return phases, dips, generations, alive


def _neighbours(noise: Noise, rng: np.random.Generator, *, count: int, nodes: int) -> tuple[Array, tuple[Array, Array]]:
    """How much of each window a neighbour was there; and what it costs work and reading while it is."""
    busy, work, reading = np.zeros((count, nodes)), np.zeros((count, nodes)), np.zeros((count, nodes))
    for node in range(nodes):
        for at in rng.random(rng.poisson(noise.neighbour_rate * count / PER_HOUR)) * count:
            lasts = noise.neighbour_seconds * np.exp(noise.neighbour_seconds_log_sigma * rng.standard_normal()) / WIDTH
            inside = np.clip(np.minimum(np.arange(count) + 1, at + lasts) - np.maximum(np.arange(count), at), 0, 1)
            here = inside > 0
            busy[here, node] = inside[here]
            work[here, node] = noise.neighbour_compute * np.exp(noise.neighbour_log_sigma * rng.standard_normal())
            reading[here, node] = noise.neighbour_data * np.exp(noise.neighbour_log_sigma * rng.standard_normal())
    return busy, (work, reading)


def _offsets(noise: Noise, rng: np.random.Generator, generations: NDArray[np.int64], *, nodes: int, per_node: int) -> Array:
    """Ranks differ from the start, in some jobs whole nodes do; a new generation deals anew what lies in the ranks, not what lies in the nodes."""
    spread = noise.heterogeneous_spread if rng.random() < noise.heterogeneous_jobs else noise.rank_spread
    machines = np.repeat(spread * rng.standard_normal(nodes), per_node)
    dealt = noise.rank_spread * rng.standard_normal((int(generations.max()), nodes * per_node))
    return np.asarray(machines + dealt[generations - 1])


def _spikes(noise: Noise, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    found = np.zeros(shape)
    for _ in range(rng.poisson(noise.spike_rate * shape[0] / PER_HOUR * shape[1])):
        size = noise.spike_size * np.exp(noise.spike_size_log_sigma * rng.standard_normal())
        at, rank = rng.integers(shape[0]), rng.integers(shape[1])
        found[at : at + rng.integers(1, 3), rank] += np.log1p(min(size, 2.0))
    return found


def _couple(values: dict[str, Array], transfer: Array, alive: NDArray[np.bool_]) -> None:
    """Who is early waits: communication is the transfer and the wait for the slowest."""
    own = values["data_s"] + values["compute_s"] + values["other_s"]
    slowest = np.nanmax(np.where(alive, own, -np.inf), axis=1, keepdims=True)
    values["comm_s"] = transfer + slowest - own
    values["step_s"] = np.broadcast_to(slowest + transfer, own.shape).copy()


def _learning(rng: np.random.Generator, *, count: int, ranks: int, memory: Noise) -> dict[str, Array]:
    hours = np.arange(count)[:, None] / PER_HOUR
    falls = rng.uniform(0.1, 0.4)
    common = 0.01 * _memory(rng, (count, 1), 0.8, df=memory.tail_df)
    loss = 3.0 * (1 + hours + rng.uniform(0, 20)) ** -falls * np.exp(common + 0.02 * _memory(rng, (count, ranks), 0.1, df=memory.tail_df))
    norm = np.exp(0.15 * _memory(rng, (count, 1), 0.6, df=memory.tail_df) - falls * 0.5 * np.log1p(hours))
    return {"loss": loss, "grad_norm": np.repeat(norm, ranks, axis=1)}


def _devices(
    rng: np.random.Generator, *, count: int, nodes: int, node_of: NDArray[np.int64], wander: Array, node_wander: Array, dips: Array, df: float
) -> dict[str, Array]:
    """What a GPU says hangs together: a warm room and a long day move temperature, clock and power at once."""
    ranks = len(node_of)
    hours = np.arange(count)[:, None] / PER_HOUR
    day = np.sin(2 * np.pi * (hours / 24 + rng.random()))
    room = 0.7 * node_wander[:, node_of] + 0.4 * wander
    own = [_memory(rng, (count, ranks), 0.6, df=df) for _ in range(4)]
    spread = rng.standard_normal(ranks)
    utilization = np.clip(0.93 + 0.01 * own[0] - 0.3 * dips[:, None], 0, 1)
    grows = rng.uniform(0, 0.002) * hours
    return {
        "gpu_utilization": utilization,
        "gpu_temperature_c": 66 + 3 * spread + 1.5 * day + 1.5 * room + 0.8 * own[1] + 20 * (utilization - 0.93),
        "gpu_power_w": 600 * np.exp(0.02 * spread + 0.012 * own[2] + 0.5 * (utilization - 0.93) - 0.004 * room),
        "gpu_clock_mhz": 1700 * np.exp(0.004 * own[3] - 0.003 * room - 0.002 * day),
        "rss_bytes": 6e9 * np.exp(0.05 * spread + grows + 0.004 * _memory(rng, (count, ranks), 0.95, df=df)),
        "host_memory_used": np.clip(0.4 + grows[:, :1] * 0.2 + 0.005 * _memory(rng, (count, nodes), 0.95, df=df), 0, 1),
    }


def _logs(noise: Noise, rng: np.random.Generator, *, count: int, ranks: int, step_s: Array, dips: Array) -> dict[str, Array]:
    hours = np.arange(count)[:, None] / PER_HOUR
    burst = rng.random((count, ranks)) < noise.log_bursts / PER_HOUR
    steps = WIDTH / np.maximum(step_s, 0.05)
    lines = steps / 10 * np.exp(0.1 * _memory(rng, (count, ranks), 0.3, df=5.0)) * (1 + 3 * burst) + 3 * dips[:, None]
    return {
        "lines_per_s": np.maximum(lines, 0.1) / WIDTH * 5,
        "n_error": rng.poisson(0.0003 + 0.5 * burst * (rng.random((count, ranks)) < 0.2)).astype(float),
        "n_warn": rng.poisson(0.01 + 2.0 * burst).astype(float),
        "n_first_seen": rng.poisson(0.5 / (1 + 60 * hours) + 0.0005 + 1.0 * burst * (rng.random((count, ranks)) < 0.3)).astype(float),
        "n_distinct": 4 + rng.poisson(0.7 + 2.0 * burst).astype(float),
        "entropy": 1.2 + 0.08 * _memory(rng, (count, ranks), 0.3, df=5.0) + 0.4 * burst,
    }
