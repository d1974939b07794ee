"""What was seen, cut into windows of some seconds: one row of numbers for each rank, and one for each node.

Owns: what the numbers are, and which phase a window belongs to. Must not: judge a number, parse text, read a clock.

Everything is bounded: ranks, nodes, kinds of lines, windows that are open. A time that is far from all others moves nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from detectors.metrics import COUNTERS
from detectors.observations import Change, Line, Observation, Phase, Ranks, Reading, Steps, Stream
from detectors.sequences import Bigrams
from detectors.templates import OVERFLOW, Template, Templates

WIDTH: Final = 10.0
"""Seconds of a window."""
LATE: Final = 2.0
"""Seconds that a window waits for what comes late: lines of another file, or of a node whose clock is behind."""
RANKS_MAX: Final = 16_384
NODES_MAX: Final = 4096
KINDS_MAX: Final = 256
"""Kinds of lines of one rank in one window that are told apart."""
JUMP_MAX: Final = 60.0
"""Seconds that what a worker says may be ahead of all that was seen; only if nothing else is said by anybody, the clock is believed to be there."""
COMMON: Final = 0.25
"""Of windows in a row, the share with a checkpoint from which on checkpoints are a part of training."""
_COMMON_OVER: Final = 16
_JUMPS: Final = 8
_COUNTERS_MAX: Final = 200_000
_RARE: Final = 3

TIMES: Final = ("data", "forward", "backward", "communication", "optimizer", "snapshot", "other")
"""Phases of a step, as `Steps` has them."""
RANK_VALUES: Final = {
    "step_s": "mean seconds of a step",
    "data_s": "of it, waiting for data",
    "compute_s": "of it, this rank's own work: forward, backward, optimizer",
    "comm_s": "of it, waiting for other ranks",
    "snapshot_s": "of it, copying the state",
    "other_s": "of it, what is left",
    "steps": "steps that ended in the window",
    "samples_per_s": "samples of a second of steps",
    "loss": "mean of the finite ones",
    "loss_high": "highest finite one",
    "grad_norm": "mean of the finite ones",
    "grad_norm_high": "highest finite one",
    "n_nonfinite": "values that were NaN or infinite, of all names",
    "rss_bytes": "memory of the process, as last told",
    "gpu_allocated_bytes": "memory of the GPU that tensors hold, as last told",
    "gpu_reserved_bytes": "memory of the GPU that the process holds, as last told",
    "gpu_peak_bytes": "highest of what tensors held, as last told",
    "progress_age_s": "seconds from the end of the last steps that were told to the end of the window",
    "n_lines": "lines",
    "lines_per_s": "lines of a second",
    "n_error": "lines of level error and critical",
    "n_warn": "lines of level warning",
    "n_first_seen": "lines that were the first of their kind in this job type",
    "n_rare": "lines of a kind that had come twice at most before",
    "n_overflow": "lines of no kind that is told apart any more",
    "n_distinct": "kinds of lines",
    "entropy": "of the kinds of lines, in bits",
    "n_unseen_bigram": "kinds of lines that followed on each other for the first time in this job type",
}
"""Numbers of a rank. More come from readings of its GPU: "gpu_" and a name of `metrics.NAMES`, a counter's is by how much it rose in the window."""
NODE_VALUES: Final = {
    **{name: about for name, about in RANK_VALUES.items() if name.startswith("n_l") or name in ("lines_per_s", "entropy")},
    **{name: RANK_VALUES[name] for name in ("n_error", "n_warn", "n_first_seen", "n_rare", "n_overflow", "n_distinct", "n_unseen_bigram")},
    "host_cpu": "share of all processors' time that was not idle",
    "host_memory_used": "share of the memory that programs cannot have any more",
    "host_disk_busy": "seconds of a second that disks worked, of all disks together",
}
"""Numbers of a node: of lines that are no rank's, and as above "host_" and a name of `metrics.NAMES`, or "gpu3_" for a GPU that is no rank's (`own`)."""

_Subject = int | str  # a rank, or a node by its name
_PHASES: Final = (Phase.STOPPED, Phase.RESCALE, Phase.INIT, Phase.EVAL, Phase.CHECKPOINT)
_COMPUTE: Final = ("forward", "backward", "optimizer")
_MEMORY: Final = {"rss": "rss_bytes", "allocated": "gpu_allocated_bytes", "reserved": "gpu_reserved_bytes", "peak": "gpu_peak_bytes"}
_VALUES: Final = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The numbers of one rank, or of one node, in one window.

    Attributes:
        values: name -> number, always finite; a name that is not there was not measured.
        node: "" if it is not known.
        rank: None in the row of a node.
        gathered: the times are rank 0's word (`observations.Ranks`), as nothing came from the rank itself.
    """

    values: Mapping[str, float]
    node: str = ""
    rank: int | None = None
    gathered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A window that is closed: nothing is added to it any more.

    Attributes:
        began, ended: seconds since the epoch; `began` is a multiple of the width.
        generation: None if nothing said it.
        phase: TRAIN only if the job did nothing else from the window before to its end; statistics learn from and score no other.
        world_size: ranks of the job, None if nothing said it.
        rows: by rank. Names: see `windows.RANK_VALUES`.
        nodes: by name of the node, what belongs to no rank. Names: see `windows.NODE_VALUES`.
    """

    began: float
    ended: float
    generation: int | None = None
    phase: Phase = Phase.TRAIN
    world_size: int | None = None
    rows: Mapping[int, Row] = field(default_factory=dict)
    nodes: Mapping[str, Row] = field(default_factory=dict)


class Windows:
    """Takes observations, gives windows that are closed. For one job; for one thread at a time.

    Args:
        width: seconds of a window.
        late: seconds that a window stays open after its end.
        templates: kinds of lines that are known; those of the job type's last run.
        bigrams: the same for what follows on each other.

    Attributes:
        late: observations that came after their window was closed.
        refused: observations whose time was too far ahead to be believed, or of more ranks or nodes than there can be.
    """

    def __init__(self, width: float = WIDTH, *, late: float = LATE, templates: Templates | None = None, bigrams: Bigrams | None = None) -> None:
        self.templates: Final = Templates() if templates is None else templates
        self.bigrams: Final = Bigrams() if bigrams is None else bigrams
        self.late = 0
        self.refused = 0
        self._width = width
        self._wait = late
        self._open: dict[int, _Open] = {}  # by number: seconds since the epoch over the width
        self._closed = -1  # windows up to this number are
        self._newest = -math.inf
        self._jumps = 0
        self._job = _Job()
        self._nodes: set[str] = set()
        self._kinds: dict[tuple[_Subject, Stream], str] = {}  # of the last line
        self._counters: dict[tuple[str, int | None, int | None, str], float] = {}
        self._gpus: dict[tuple[str, int], int] = {}

    @property
    def newest(self) -> float:
        """The latest time that was believed; minus infinity before the first."""
        return self._newest

    @property
    def now(self) -> float:
        """The newest time that was believed, in seconds since the epoch; -inf before any was."""
        return self._newest

    def see(self, observation: Observation) -> list[Window]:
        """Take an observation.

        Returns:
            Windows that are closed by it, the oldest first. Mostly none.
        """
        at = observation.at
        if at > self._newest:
            if at > self._newest + JUMP_MAX and not self._believed(observation):
                return []
            self._newest = at
        self._jumps = 0
        number = int(at // self._width)
        window = self._open.get(number)
        if window is None:
            if number <= self._closed:
                self._too_late(observation)
                return []
            window = self._open[number] = _Open()
        self._take(window, observation)
        return self.turn(self._newest) if len(self._open) > 1 else []

    def turn(self, now: float) -> list[Window]:
        """Close the windows whose time is over.

        Args:
            now: seconds since the epoch.
        """
        return self._close(math.floor((now - self._wait) / self._width) - 1)

    def flush(self) -> list[Window]:
        """Close all: nothing more comes."""
        return self._close(max(self._open, default=self._closed))

    def own(self, node: str, gpu: int, rank: int) -> None:
        """A GPU of a node is this rank's, until the next generation: what is read of it stands in the rank's row."""
        if len(self._gpus) < RANKS_MAX:
            self._gpus[node, gpu] = rank

    # --- taking ----------------------------------------------------------------------------------------------------------

    def _believed(self, observation: Observation) -> bool:
        """Whether a time so far ahead is; workers say what they like."""
        worker = type(observation) is Steps or (type(observation) is Line and observation.rank is not None)
        if not worker or self._newest == -math.inf or self._jumps >= _JUMPS:
            return True
        self._jumps += 1
        self.refused += 1
        return False

    def _too_late(self, observation: Observation) -> None:
        self.late += 1
        if isinstance(observation, Change):  # what holds now is worth knowing, whenever it is told
            self._job.change(self._open[min(self._open)] if self._open else None, observation)

    def _take(self, window: _Open, observation: Observation) -> None:
        if type(observation) is Line:
            self._line(window, observation)
        elif type(observation) is Steps:
            if self._admitted(observation.node, observation.rank) and self._in_generation(observation):
                self._job.stepped(window, observation)
                window.step(observation)
        elif type(observation) is Ranks:
            if len(observation.ranks) <= RANKS_MAX and self._in_generation(observation):
                self._job.gathered(observation)
                window.gather(observation)
        elif type(observation) is Reading:
            if self._admitted(observation.node, observation.rank):
                self._read(window, observation)
        else:
            assert isinstance(observation, Change)
            self._in_generation(observation)
            self._job.change(window, observation)

    def _line(self, window: _Open, line: Line) -> None:
        subject: _Subject = line.node if line.rank is None else line.rank
        lines = window.lines.get(subject)
        if lines is None:
            if not self._admitted(line.node, line.rank):
                return
            lines = window.lines[subject] = _Lines(line.node)
        template = self.templates.see(line)
        kind = template.id
        lines.count += 1
        if line.level:
            lines.level(line.level)
        if template.count <= _RARE or kind == OVERFLOW:
            lines.news(template)
        kinds = lines.kinds
        if kind in kinds:
            kinds[kind] += 1
        elif len(kinds) < KINDS_MAX:
            kinds[kind] = 1
        place = (subject, line.stream)
        before = self._kinds.get(place)
        if before is not None and self.bigrams.add((before, kind)):
            lines.unseen += 1
        self._kinds[place] = kind

    def _admitted(self, node: str, rank: int | None) -> bool:
        if node not in self._nodes:
            if len(self._nodes) >= NODES_MAX:
                self.refused += 1
                return False
            self._nodes.add(node)
        if rank is not None and not 0 <= rank < RANKS_MAX:
            self.refused += 1
            return False
        return True

    def _in_generation(self, observation: Steps | Ranks | Change) -> bool:
        """Whether it is of the newest generation; which it may be the first to tell of."""
        generation = observation.generation
        if generation is None or generation == self._job.generation:
            return True
        if self._job.generation is not None and generation < self._job.generation:
            return False
        self._job.begin(generation)
        self._gpus.clear()
        for window in self._open.values():
            window.steps.clear()
            window.gathers.clear()
        return True

    def _read(self, window: _Open, reading: Reading) -> None:
        node, gpu = reading.node, reading.gpu
        rank = reading.rank if reading.rank is not None or gpu is None else self._gpus.get((node, gpu))
        prefix = "host_" if gpu is None else "gpu_" if rank is not None else f"gpu{gpu}_"
        values = window.values.setdefault(node if rank is None else rank, _Values(node))
        for name, value in reading.values.items():
            if name.partition(".")[0] not in COUNTERS:
                values.gauge(prefix + name, value)
                continue
            key = (node, gpu, reading.rank, name)
            before = self._counters.get(key)
            if before is not None:
                values.rise(prefix + name, value - before if value >= before else value)
            if before is not None or len(self._counters) < _COUNTERS_MAX:
                self._counters[key] = value

    # --- closing ---------------------------------------------------------------------------------------------------------

    def _close(self, upto: int) -> list[Window]:
        if upto <= self._closed:
            return []
        found = [self._made(number, self._open.pop(number)) for number in sorted(self._open) if number <= upto]
        self._closed = upto
        return found

    def _made(self, number: int, window: _Open) -> Window:
        ended = (number + 1) * self._width
        job = self._job
        phase = job.phase_of(number, window.phases)
        rows: dict[int, dict[str, float]] = {rank: {} for rank in job.ranks}
        nodes: dict[str, dict[str, float]] = {}
        owners = dict(job.ranks)
        gathered = set()
        for rank, steps in window.steps.items():
            rows.setdefault(rank, {}).update(steps.row())
        for rank, gathers in window.gathers.items():
            if rank not in window.steps:
                rows.setdefault(rank, {}).update(_times({name: total / count for name, (total, count) in gathers.items()}))
                gathered.add(rank)
        for rank, row in rows.items():
            if (last := job.progress.get(rank)) is not None:
                row["progress_age_s"] = max(0.0, ended - last)
        for subject, values in window.values.items():
            _row(rows, nodes, subject).update(values.row(self._width))
            owners.update({subject: values.node} if isinstance(subject, int) else {})
        silent = _Lines("")
        for subject in {*rows, *nodes, *window.lines}:
            lines = window.lines.get(subject, silent)
            _row(rows, nodes, subject).update(lines.row(self._width))
            if isinstance(subject, int) and lines.node:
                owners[subject] = lines.node
        return Window(
            began=ended - self._width,
            ended=ended,
            generation=job.generation,
            phase=phase,
            world_size=job.world_size,
            rows={rank: Row(values=_finite(values), node=owners.get(rank, ""), rank=rank, gathered=rank in gathered) for rank, values in sorted(rows.items())},
            nodes={name: Row(values=_finite(values), node=name) for name, values in sorted(nodes.items())},
        )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Sums of numbers that are finite need not be."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _row(rows: dict[int, dict[str, float]], nodes: dict[str, dict[str, float]], subject: _Subject) -> dict[str, float]:
    return rows.setdefault(subject, {}) if isinstance(subject, int) else nodes.setdefault(subject, {})


class _Job:
    """What is known of the job now: its generation, its phase, and the ranks that were heard of in it."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self.world_size: int | None = None
        self.ranks: dict[int, str] = {}  # -> node
        self.progress: dict[int, float] = {}
        self._phase = Phase.INIT
        self._since = -math.inf
        self._carried = Phase.INIT  # at the end of the last window that was closed
        self._last: tuple[int, Phase] = (-2, Phase.TRAIN)  # number of the last window that was closed, and what it was by itself
        self._checkpoints: deque[bool] = deque(maxlen=_COMMON_OVER)

    def begin(self, generation: int) -> None:
        """Another one: nothing of the ranks before holds."""
        self.generation = generation
        self.ranks = {}
        self.progress = {}
        self._checkpoints.clear()

    def change(self, window: _Open | None, change: Change) -> None:
        """The phase from now on; not if it is of an older generation."""
        if change.generation is not None and self.generation is not None and change.generation < self.generation:
            return
        if change.world_size is not None:
            self.world_size = change.world_size
            for rank in [rank for rank in self.ranks if rank >= change.world_size]:
                del self.ranks[rank]
        self._phase, self._since = change.phase, max(change.at, self._since)
        if window is None:
            self._carried = change.phase
        else:
            window.phases.append(change.phase)

    def stepped(self, window: _Open, steps: Steps) -> None:
        """Whole steps after another phase began: it is over."""
        self.ranks[steps.rank] = steps.node
        self.progress[steps.rank] = max(steps.at, self.progress.get(steps.rank, steps.at))
        if self._phase is not Phase.TRAIN and steps.at - steps.seconds >= self._since:
            self._phase, self._since = Phase.TRAIN, steps.at
            window.phases.append(Phase.TRAIN)

    def gathered(self, ranks: Ranks) -> None:
        """Word of all ranks."""
        self.world_size = len(ranks.ranks)
        for rank in range(len(ranks.ranks)):
            self.ranks.setdefault(rank, "")
            self.progress[rank] = max(ranks.at, self.progress.get(rank, ranks.at))

    def phase_of(self, number: int, phases: list[Phase]) -> Phase:
        """The phase of a window that is closed. To be asked of each once, in their order.

        Args:
            number: the window's.
            phases: into which the job went in it.
        """
        seen = {self._carried, *phases}
        if phases:
            self._carried = phases[-1]
        self._checkpoints.append(Phase.CHECKPOINT in seen)
        if len(self._checkpoints) == _COMMON_OVER and sum(self._checkpoints) > COMMON * _COMMON_OVER:
            seen.discard(Phase.CHECKPOINT)
        own = next((phase for phase in _PHASES if phase in seen), Phase.TRAIN)
        before = self._last[1] if self._last[0] == number - 1 else Phase.TRAIN
        self._last = (number, own)
        return before if own is Phase.TRAIN else own


class _Open:
    """What a window has got so far."""

    __slots__ = ("gathers", "lines", "phases", "steps", "values")

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.lines: dict[_Subject, _Lines] = {}
        self.steps: dict[int, _Steps] = {}
        self.gathers: dict[int, dict[str, tuple[float, int]]] = {}  # rank -> name -> (sum, how many)
        self.values: dict[_Subject, _Values] = {}

    def step(self, steps: Steps) -> None:
        """Add steps of a rank."""
        self.steps.setdefault(steps.rank, _Steps()).add(steps)

    def gather(self, ranks: Ranks) -> None:
        """Add what rank 0 gathered."""
        for rank, values in enumerate(ranks.ranks):
            sums = self.gathers.setdefault(rank, {})
            for name, value in values.items():
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)


class _Steps:
    """Sums over the steps of a rank."""

    __slots__ = ("bad", "high", "memory", "phases", "samples", "seconds", "steps", "sums")

    def __init__(self) -> None:
        self.steps = self.samples = self.bad = 0
        self.seconds = 0.0
        self.phases: dict[str, float] = {}
        self.sums: dict[str, tuple[float, int]] = {}
        self.high: dict[str, float] = {}
        self.memory: dict[str, int] = {}

    def add(self, steps: Steps) -> None:
        count = steps.last - steps.first + 1
        self.steps += count
        self.samples += steps.samples
        self.seconds += steps.seconds
        self.bad += sum(steps.nonfinite.values())
        for name in TIMES:
            if (value := steps.phases.get(name)) is not None:
                self.phases[name] = self.phases.get(name, 0.0) + value
        for name in _VALUES:
            if (mean := steps.values.get(name)) is not None:
                total, weight = self.sums.get(name, (0.0, 0))
                self.sums[name] = (total + mean * count, weight + count)
            if (high := steps.highest.get(name)) is not None:
                self.high[name] = max(high, self.high.get(name, high))
        self.memory.update({kind: size for kind, size in steps.memory.items() if kind in _MEMORY})

    def row(self) -> dict[str, float]:
        means = {name: total / self.steps for name, total in self.phases.items()}
        row = _times({**means, "seconds": self.seconds / self.steps})
        row["steps"] = float(self.steps)
        row["n_nonfinite"] = float(self.bad)
        if self.samples and self.seconds > 0:
            row["samples_per_s"] = self.samples / self.seconds
        row |= {name: total / weight for name, (total, weight) in self.sums.items()}
        row |= {f"{name}_high": high for name, high in self.high.items()}
        row |= {_MEMORY[kind]: float(size) for kind, size in self.memory.items()}
        return row


def _times(means: Mapping[str, float]) -> dict[str, float]:
    """Names of the row for mean seconds of a step by phase."""
    row = {f"{'comm' if name == 'communication' else name}_s": means[name] for name in TIMES if name in means and name not in _COMPUTE}
    if all(name in means for name in _COMPUTE):
        row["compute_s"] = sum(means[name] for name in _COMPUTE)
    if "seconds" in means:
        row["step_s"] = means["seconds"]
    return row


class _Lines:
    """Counts of the lines of a rank or a node."""

    __slots__ = ("count", "errors", "first", "kinds", "node", "overflow", "rare", "unseen", "warnings")

    def __init__(self, node: str) -> None:
        self.node = node
        self.count = self.errors = self.warnings = self.first = self.rare = self.overflow = self.unseen = 0
        self.kinds: dict[str, int] = {}

    def level(self, level: str) -> None:
        if level in ("error", "critical"):
            self.errors += 1
        elif level == "warning":
            self.warnings += 1

    def news(self, template: Template) -> None:
        if template.id == OVERFLOW:
            self.overflow += 1
            return
        self.rare += 1
        if template.count == 1:
            self.first += 1

    def row(self, width: float) -> dict[str, float]:
        counts = self.kinds.values()
        known = sum(counts)
        return {
            "n_lines": float(self.count),
            "lines_per_s": self.count / width,
            "n_error": float(self.errors),
            "n_warn": float(self.warnings),
            "n_first_seen": float(self.first),
            "n_rare": float(self.rare),
            "n_overflow": float(self.overflow),
            "n_distinct": float(len(self.kinds)),
            "entropy": max(0.0, -math.fsum(count / known * math.log2(count / known) for count in counts)),
            "n_unseen_bigram": float(self.unseen),
        }


class _Values:
    """Readings of a rank's GPU, or of a node: means of gauges, and by how much counters rose."""

    __slots__ = ("_gauges", "_rises", "node")

    def __init__(self, node: str) -> None:
        self.node = node
        self._gauges: dict[str, tuple[float, int]] = {}
        self._rises: dict[str, float] = {}

    def gauge(self, name: str, value: float) -> None:
        total, count = self._gauges.get(name, (0.0, 0))
        self._gauges[name] = (total + value, count + 1)

    def rise(self, name: str, by: float) -> None:
        self._rises[name] = self._rises.get(name, 0.0) + by

    def row(self, width: float) -> dict[str, float]:
        row = {name: total / count for name, (total, count) in self._gauges.items()} | self._rises
        total, available = row.get("host_memory_total_bytes", 0.0), row.get("host_memory_available_bytes")
        if total > 0 and available is not None:
            row["host_memory_used"] = 1 - available / total
        seconds, busy = row.get("host_cpu_seconds", 0.0), row.get("host_cpu_busy_seconds")
        if seconds > 0 and busy is not None:
            row.setdefault("host_cpu", busy / seconds)
        if (disk := row.get("host_disk_busy_seconds")) is not None:
            row["host_disk_busy"] = disk / width
        return row
