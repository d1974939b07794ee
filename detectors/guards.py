"""Rules for what needs no statistics: numbers that are none, ranks and monitors that fall silent, disks that fill, counters that may not rise.

Owns: those rules and their limits. Must not: learn, compare ranks by how fast they are (`peers`), read a clock.

`see` is given every observation, `turn` the time every few seconds; both give findings. A forest takes a missing value for the most usual one, so what is
missing or not finite is judged here, and first (scikit-learn's IsolationForest scores a row of NaN below any row it was trained on).

Whether silence means anything depends on what the job does: a rank is judged while its node trains, with more patience in a checkpoint or an evaluation,
and not at all otherwise. All that is pending about a node's ranks is forgotten when it starts, rescales or stops, so that nothing old is ever held
against what came after.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.observations import Change, Observation, Phase, Ranks, Reading, Steps
from detectors.signatures import Table

SILENT_AFTER: Final = 30.0
"""Seconds without a word after which a training rank is silent, if that is not less than `USUAL_GAPS` of its usual gaps."""
USUAL_GAPS: Final = 10.0
PATIENCE: Final = 1800.0
"""Seconds of silence in a checkpoint or an evaluation after which that is told."""
UNSEEN_AFTER: Final = 60.0
"""The same as `SILENT_AFTER`, for the readings of a node or of a GPU while others still come."""
WORDS_LEAST: Final = 3
"""Words of a rank, or readings, before their usual gap is known."""
DISK_SHARE: Final = 0.05
"""Share of a volume, or of its inodes, below which what is free is little."""
DISK_BYTES: Final = float(2 << 30)
"""Bytes below which it is too little, if that is less than the share."""
DISK_INODES: Final = 10_000.0
DISK_SOON: Final = 1800.0
"""Seconds within which a volume is full if it goes on as it does."""
RANKS_MAX: Final = 1 << 16
"""Ranks, and counters, that are remembered; beyond that the oldest is forgotten."""

_TREND_SAMPLES: Final = 20
_TREND_LEAST: Final = 11  # samples, so that the writing of one checkpoint is no trend
_TREND_EVERY: Final = 30.0  # seconds between two samples
_TREND_FALLS: Final = 0.8  # share of them at which less was free than at the one before
_APART: Final = 10.0  # seconds after the last word of the silent ones at which others must have spoken, to be going on without them
_APART_GAPS: Final = 6.0  # and so many of its usual gaps: in an evaluation ranks end at different times, and their words come late by a few
_NO_NUMBER: Final = 1e15  # DCGM fills what it does not know with numbers of this size
_SCALE_FALL: Final = 4096.0
_SCALE_LOW: Final = 8.0
_SCALES: Final = frozenset({"loss_scale", "loss scale", "lossscale", "grad_scale", "amp_scale", "scaler_scale"})
_JUDGED: Final = (Phase.TRAIN, Phase.EVAL, Phase.CHECKPOINT)

_K = TypeVar("_K")
_V = TypeVar("_V")


class Guards:
    """See the module.

    Args:
        table: what the numbers of a GPU driver's errors mean; the built-in table if none is given.
    """

    def __init__(self, table: Table | None = None) -> None:
        self._numbers = _Numbers()
        self._silence = _Silence()
        self._readings = _Readings(table or Table.load())

    def see(self, observation: Observation) -> list[Finding]:
        """What one observation says by itself, or compared with the one before it."""
        match observation:
            case Steps():
                self._silence.stepped(observation)
                return list(self._numbers.stepped(observation))
            case Ranks():
                self._silence.gathered(observation)
            case Reading():
                return list(self._readings.read(observation))
            case Change():
                self._silence.changed(observation)
                self._numbers.changed(observation)
        return []

    def turn(self, now: float) -> list[Finding]:
        """What is missing at this time, in seconds since the epoch as the observations have them."""
        return [*self._silence.missing(now), *self._readings.missing(now)]


# --- numbers -------------------------------------------------------------------------------------------------------------


class _Numbers:
    """Values of steps that are not finite, and a loss scale that collapsed. Each is told once, until it was well again or the job began anew."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._scales: OrderedDict[tuple[int, str], float] = OrderedDict()  # rank and name -> highest so far

    def changed(self, change: Change) -> None:
        if change.phase in _JUDGED:
            return
        self._told.clear()
        self._scales.clear()

    def stepped(self, steps: Steps) -> Iterator[Finding]:
        scaled = any(name.lower() in _SCALES for name in steps.values)
        for name, count in steps.nonfinite.items():
            if count > 0 and _first(self._told, ("nonfinite", steps.rank, name)):
                yield _nonfinite(steps, name, count, scaled=scaled)
        for name, value in steps.values.items():
            if name not in steps.nonfinite and value is not None:
                self._told.pop(("nonfinite", steps.rank, name), None)
            if value is not None and name.lower() in _SCALES:
                yield from self._scale(steps, name, value)

    def _scale(self, steps: Steps, name: str, value: float) -> Iterator[Finding]:
        """Schemes begin high, at 2^16 or 2^32, and halve what overflows; so low, after so high, every step overflows."""
        highest = max(value, self._scales.get((steps.rank, name), value))
        _keep(self._scales, (steps.rank, name), highest)
        if value >= _SCALE_LOW or value * _SCALE_FALL > highest:
            self._told.pop(("scale", steps.rank, name), None)
        elif _first(self._told, ("scale", steps.rank, name)):
            yield Finding(
                at=steps.at,
                detector="guard",
                kind="loss_scale_collapsed",
                summary=f"the loss scale fell from {highest:g} to {value:g}: gradients overflow at nearly every step",
                cls=Class.USER,
                role=Role.CONFIRM,
                certainty=Certainty.STRONG,
                scope="job",
                node=steps.node,
                rank=steps.rank,
                generation=steps.generation,
                features=(Feature(name=name, value=value, baseline=highest),),
            )


def _nonfinite(steps: Steps, name: str, count: int, *, scaled: bool) -> Finding:
    """The loss is the job's own word; of a gradient's norm that a loss scale overflowed, and of what a script logs besides, that is not sure."""
    low = name.lower()
    sure = "loss" in low or ("grad" in low and not scaled)
    return Finding(
        at=steps.at,
        detector="guard",
        kind="nonfinite",
        summary=f"{name} was not a finite number {count} times in steps {steps.first} to {steps.last}",
        cls=Class.USER,
        role=Role.ROOT if sure else Role.CONFIRM,
        certainty=Certainty.CERTAIN if sure else Certainty.STRONG,
        scope="job",
        node=steps.node,
        rank=steps.rank,
        generation=steps.generation,
        features=(Feature(name=f"{name}_nonfinite", value=float(count), baseline=0.0), Feature(name="step", value=float(steps.first))),  # to go back before
        began=steps.at - steps.seconds,
    )


# --- silence -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Gaps:
    """How often something is heard of.

    Attributes:
        last: when it was heard of last.
        words: how often, so far.
        usual: the seconds between two, smoothed.
        told: what was said of its silence, "" for nothing yet.
    """

    last: float
    words: int = 1
    usual: float = 0.0
    told: str = ""

    def heard(self, at: float) -> None:
        self.told = ""
        if at <= self.last:
            return
        gap = at - self.last
        self.usual = gap if self.words == 1 else self.usual + 0.1 * (gap - self.usual)
        self.words += 1
        self.last = at

    def silent_after(self, least: float) -> float:
        return max(least, USUAL_GAPS * self.usual)


@dataclass(slots=True, kw_only=True)
class _Rank(_Gaps):
    node: str
    generation: int | None
    step: int


class _Silence:
    """Ranks that say nothing any more. While some ranks go on, those that do not are dead; where none goes on it cannot be told from silence who began."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[int, _Rank] = OrderedDict()
        self._phases: OrderedDict[str, tuple[Phase, float]] = OrderedDict()

    def changed(self, change: Change) -> None:
        if change.rank is not None:
            if change.phase not in _JUDGED:
                self._ranks.pop(change.rank, None)
            elif change.rank in self._ranks:
                self._ranks[change.rank].last = max(change.at, self._ranks[change.rank].last)
            return
        if not change.node:
            self._phases.clear()
        _keep(self._phases, change.node, (change.phase, change.at))
        here = [number for number, rank in self._ranks.items() if not change.node or rank.node == change.node]
        for number in here:
            if change.phase not in _JUDGED or (change.world_size is not None and number >= change.world_size):
                del self._ranks[number]
            else:
                self._ranks[number].last = max(change.at, self._ranks[number].last)

    def stepped(self, steps: Steps) -> None:
        phase, since = self._phase(steps.node)
        if phase is not Phase.TRAIN:
            if steps.at - steps.seconds < since:
                return  # a last word of before
            _keep(self._phases, steps.node, (Phase.TRAIN, steps.at - steps.seconds))
        known = self._ranks.get(steps.rank)
        if known and known.node == steps.node and known.generation == steps.generation:
            known.heard(steps.at)
            known.step = steps.last
        elif not known or (steps.generation or 0) >= (known.generation or 0):
            _keep(self._ranks, steps.rank, _Rank(last=steps.at, node=steps.node, generation=steps.generation, step=steps.last))

    def gathered(self, ranks: Ranks) -> None:
        """Every rank takes part in gathering these, so each was alive."""
        for number in range(len(ranks.ranks)):
            known = self._ranks.get(number)
            if known and known.generation == ranks.generation:
                known.last = max(known.last, ranks.at)

    def missing(self, now: float) -> Iterator[Finding]:
        judged = {number: (rank, self._phase(rank.node)[0]) for number, rank in self._ranks.items()}
        judged = {number: pair for number, pair in judged.items() if pair[1] in _JUDGED}
        silent = {
            number: rank
            for number, (rank, phase) in judged.items()
            if rank.words >= WORDS_LEAST and now - rank.last >= rank.silent_after(SILENT_AFTER if phase is Phase.TRAIN else PATIENCE)
        }
        if all(rank.told == "dead" for rank in silent.values()):
            return
        newest = max(rank.last for rank, _ in judged.values())
        dead = {number: rank for number, rank in silent.items() if newest > rank.last + max(_APART, _APART_GAPS * rank.usual)}
        if dead:
            yield from self._dead(now, dead, {number: rank for number, (rank, _) in judged.items()})
        elif not any(rank.told for rank in silent.values()):
            yield _stalled(now, silent, len(judged), judged[next(iter(silent))][1])
            for rank, _ in judged.values():
                rank.told = rank.told or "stalled"

    def _dead(self, now: float, dead: Mapping[int, _Rank], judged: Mapping[int, _Rank]) -> Iterator[Finding]:
        """One finding for a node of which no rank goes on while another node's do, else one for each rank."""
        for node in dict.fromkeys(rank.node for rank in dead.values()):
            mine = {number: rank for number, rank in dead.items() if rank.node == node}
            new = [number for number, rank in mine.items() if rank.told != "dead"]
            for rank in mine.values():
                rank.told = "dead"
            everyone = len(mine) > 1 and all(number in mine for number, rank in judged.items() if rank.node == node)
            if new and everyone:
                yield _silent_node(now, mine, node)
            else:
                yield from (_dead_rank(now, number, mine[number]) for number in new)

    def _phase(self, node: str) -> tuple[Phase, float]:
        """What a node does: as it said, or as somebody said of all; what makes steps trains."""
        known = self._phases.get(node) or self._phases.get("")
        return known or (Phase.TRAIN, -math.inf)


def _dead_rank(now: float, number: int, rank: _Rank) -> Finding:
    return Finding(
        at=now,
        detector="guard",
        kind="dead_rank",
        summary=f"rank {number} has said nothing for {now - rank.last:.0f} s while others train; it usually speaks every {rank.usual:.1f} s",
        cls=Class.UNKNOWN,
        role=Role.ROOT,
        certainty=Certainty.CERTAIN,
        scope="rank",
        node=rank.node,
        rank=number,
        generation=rank.generation,
        features=(Feature(name="silent_s", value=now - rank.last, baseline=rank.usual),),
        began=rank.last,
    )


def _silent_node(now: float, ranks: Mapping[int, _Rank], node: str) -> Finding:
    last = max(rank.last for rank in ranks.values())
    usual = max(rank.usual for rank in ranks.values())
    return Finding(
        at=now,
        detector="guard",
        kind="silent_node",
        summary=f"none of the {len(ranks)} ranks of node {node or '?'} has said anything for {now - last:.0f} s while other nodes train",
        cls=Class.UNKNOWN,
        role=Role.ROOT,
        certainty=Certainty.CERTAIN,
        scope="node",
        node=node,
        generation=next(iter(ranks.values())).generation,
        features=(Feature(name="silent_s", value=now - last, baseline=usual),),
        began=last,
    )


def _stalled(now: float, silent: Mapping[int, _Rank], of: int, phase: Phase) -> Finding:
    last = max(rank.last for rank in silent.values())
    behind = min(silent, key=lambda number: (silent[number].step, silent[number].last))
    told = f"no rank of {of} has ended a step for {now - last:.0f} s (phase {phase.value})"
    return Finding(
        at=now,
        detector="guard",
        kind="stalled",
        summary=f"{told}; the lowest last step, {silent[behind].step}, is that of rank {behind}",
        cls=Class.UNKNOWN,
        role=Role.ROOT if phase is Phase.TRAIN else Role.CONFIRM,
        certainty=Certainty.CERTAIN if phase is Phase.TRAIN else Certainty.STRONG,
        scope="job",
        generation=next(iter(silent.values())).generation,
        features=(Feature(name="silent_s", value=now - last, baseline=max(rank.usual for rank in silent.values())),),
        began=last,
    )


# --- readings ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What it means if a counter rises, or a flag is set.

    Attributes:
        what: for people; "{}" stands for by how much.
        flag: a value other than 0 says it by itself, from the first reading on.
        least: by how much a counter must have risen within an hour.
    """

    kind: str
    what: str
    cls: Class
    role: Role
    flag: bool = False
    least: float = 1.0


_RULES: Final[Mapping[str, _Rule]] = {
    "ecc_uncorrected": _Rule(kind="ecc_uncorrected", what="{:.0f} ECC errors of the GPU's memory could not be corrected", cls=Class.HARDWARE, role=Role.ROOT),
    "remap_failed": _Rule(kind="remap_failed", what="a row of the GPU's memory could not be taken out of use", cls=Class.HARDWARE, role=Role.ROOT, flag=True),
    "remapped_uncorrectable": _Rule(
        kind="rows_remapped", what="{:.0f} rows of the GPU's memory were taken out of use after errors", cls=Class.HARDWARE, role=Role.CONFIRM
    ),
    "retired_double": _Rule(
        kind="pages_retired", what="{:.0f} pages of the GPU's memory were taken out of use after errors", cls=Class.HARDWARE, role=Role.CONFIRM
    ),
    "remap_pending": _Rule(
        kind="remap_pending", what="a row of the GPU's memory is to be taken out of use at the next reset", cls=Class.ADVISE, role=Role.ADVISE, flag=True
    ),
    "ecc_corrected": _Rule(
        kind="ecc_corrected", what="{:.0f} ECC errors of the GPU's memory were corrected within an hour", cls=Class.ADVISE, role=Role.ADVISE, least=1000.0
    ),
    "edac_uncorrected": _Rule(kind="edac_uncorrected", what="{:.0f} errors of the node's memory could not be corrected", cls=Class.HARDWARE, role=Role.ROOT),
    "edac_corrected": _Rule(
        kind="edac_corrected", what="{:.0f} errors of the node's memory were corrected within an hour", cls=Class.ADVISE, role=Role.ADVISE, least=1000.0
    ),
    "oom_kills": _Rule(kind="oom_killed", what="the kernel killed {:.0f} processes since memory was used up", cls=Class.USER, role=Role.CONFIRM),
}
_HOUR: Final = 3600.0
_VOLUMES: Final = {"disk_free_bytes": ("disk_size_bytes", "bytes", DISK_BYTES), "disk_free_inodes": ("disk_inodes", "inodes", DISK_INODES)}

_Where = tuple[str, int | None]


@dataclass(slots=True, kw_only=True)
class _Counter:
    """A counter at the beginning of an hour, and now."""

    base: float
    since: float
    told: bool = False


@dataclass(slots=True, kw_only=True)
class _Volume:
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TREND_SAMPLES))
    told: str = ""


class _Readings:
    """Counters, disks, and readings that come no more."""

    def __init__(self, table: Table) -> None:
        self._xids = {signature.id: signature for signature in table.signatures if signature.id.startswith("xid_")}
        self._gaps: OrderedDict[_Where, _Gaps] = OrderedDict()
        self._counters: OrderedDict[tuple[_Where, str], _Counter] = OrderedDict()
        self._xid: OrderedDict[_Where, tuple[float, float]] = OrderedDict()  # how many, and the number of the last
        self._volumes: OrderedDict[tuple[str, str], _Volume] = OrderedDict()

    def read(self, reading: Reading) -> Iterator[Finding]:
        where = (reading.node, reading.gpu)
        if known := self._gaps.get(where):
            known.heard(reading.at)
        else:
            _keep(self._gaps, where, _Gaps(last=reading.at))
        yield from self._xids_of(reading, where)
        for name, value in reading.values.items():
            if not math.isfinite(value) or value >= _NO_NUMBER:
                continue
            if rule := _RULES.get(name):
                yield from self._counted(reading, where, name, value, rule)
            elif reading.gpu is None and name.partition(".")[0] in _VOLUMES:
                yield from self._free(reading, name, value)

    def missing(self, now: float) -> Iterator[Finding]:
        """A GPU of which nothing comes while its node speaks, a node of which nothing comes while others do."""
        speaking: dict[str, float] = {}
        for (node, _), gaps in self._gaps.items():
            speaking[node] = max(gaps.last, speaking.get(node, -math.inf))
        newest = max(speaking.values(), default=-math.inf)
        for (node, gpu), gaps in self._gaps.items():
            patience = gaps.silent_after(UNSEEN_AFTER)
            if gaps.told or gaps.words < WORDS_LEAST or now - gaps.last < patience:
                continue
            heard = speaking[node]
            if gpu is not None and heard - gaps.last >= patience / 2:
                gaps.told = "unseen"
                yield _unseen(now, gaps, node, gpu)
            elif gpu is None and heard - gaps.last < patience / 2 and newest - heard >= patience / 2:
                gaps.told = "unseen"
                yield _unseen(now, gaps, node, None)

    def _counted(self, reading: Reading, where: _Where, name: str, value: float, rule: _Rule) -> Iterator[Finding]:
        known = self._counters.get((where, name))
        if rule.flag:
            if value > 0 and (known is None or not known.told):
                yield _counter_finding(reading, name, rule, value, 0.0)
            _keep(self._counters, (where, name), _Counter(base=0.0, since=reading.at, told=value > 0))
            return
        if known is None or (rule.least > 1.0 and reading.at - known.since >= _HOUR):
            _keep(self._counters, (where, name), _Counter(base=value, since=reading.at))
            return
        known.base = known.base if value >= known.base else 0.0  # whoever counts began again
        if known.told or value - known.base < rule.least:
            return
        yield _counter_finding(reading, name, rule, value, known.base)
        known.told = rule.least > 1.0
        known.base = known.base if known.told else value

    def _xids_of(self, reading: Reading, where: _Where) -> Iterator[Finding]:
        """An error of the driver that a monitor counted, or whose number it shows; only of the last one the number is known."""
        count, number = reading.values.get("xids"), reading.values.get("xid")
        if count is None and number is None:
            return
        now = (count if count is not None else -1.0, number if number is not None and 0 <= number < _NO_NUMBER else 0.0)
        before = self._xid.get(where)
        _keep(self._xid, where, now)
        if before is None or now[1] <= 0:
            return
        if now[0] > before[0] if count is not None else now[1] != before[1]:
            yield self._xid_finding(reading, int(now[1]), max(1.0, now[0] - before[0]))

    def _xid_finding(self, reading: Reading, number: int, times: float) -> Finding:
        known = self._xids.get(f"xid_{number}") or self._xids.get("xid_other")
        return Finding(
            at=reading.at,
            detector="guard",
            kind=f"xid_{number}",
            summary=f"Xid {number} of {_gpu(reading.gpu)}" + (f": {known.summary}" if known else ""),
            cls=known.cls if known else Class.UNKNOWN,
            role=known.role if known else Role.CONFIRM,
            certainty=known.certainty if known else Certainty.STRONG,
            scope="node",
            node=reading.node,
            features=(Feature(name="xids", value=times, baseline=0.0),),
        )

    def _free(self, reading: Reading, name: str, free: float) -> Iterator[Finding]:
        base, dot, volume = name.partition(".")
        total, unit, least = _VOLUMES[base]
        size = reading.values.get(total + dot + volume)
        known = self._volumes.get((reading.node, name))
        if known is None:
            known = _Volume()
            _keep(self._volumes, (reading.node, name), known)
        if not known.samples or reading.at - known.samples[-1][0] >= _TREND_EVERY:
            known.samples.append((reading.at, free))
        if size is not None and size <= 0:
            return  # a file system that does not count inodes
        share = math.inf if size is None else DISK_SHARE * size
        left = _seconds_left(known.samples)
        said = "full" if free < min(share, least) else "filling" if left < DISK_SOON else "low" if size is not None and free < share else ""
        worse = _DISK.index(said) > _DISK.index(known.told)
        if worse or (not said and free > 1.5 * (least if size is None else share) and left > 2 * DISK_SOON):
            known.told = said
        if worse:
            yield _disk_finding(reading, volume, unit, free, size, left, said)


_DISK: Final = ("", "low", "filling", "full")


def _seconds_left(samples: Iterable[tuple[float, float]]) -> float:
    """Until nothing is free, as the last minutes went; infinite while it does not fall steadily."""
    taken = list(samples)
    if len(taken) < _TREND_LEAST:
        return math.inf
    falls = sum(after[1] < before[1] for before, after in itertools.pairwise(taken))
    (began, first), (ended, last) = taken[0], taken[-1]
    if falls < _TREND_FALLS * (len(taken) - 1) or last >= first:
        return math.inf
    return last * (ended - began) / (first - last)


def _disk_finding(reading: Reading, volume: str, unit: str, free: float, size: float | None, left: float, said: str) -> Finding:
    amount = f"{free / (1 << 30):.1f} GiB" if unit == "bytes" else f"{free:.0f} inodes"
    share = f" of {volume or 'a volume'}" + (f" ({100 * free / size:.1f} %)" if size else "")
    soon = f", and full in {left / 60:.0f} min if it goes on so" if said == "filling" else ""
    mild = said == "low"
    return Finding(
        at=reading.at,
        detector="guard",
        kind=f"disk_{said}",
        summary=f"{amount}{share} are free on node {reading.node or '?'}{soon}",
        cls=Class.ADVISE if mild else Class.USER,
        role=Role.ADVISE if mild else Role.CONFIRM,
        certainty=Certainty.CERTAIN if said != "filling" else Certainty.STRONG,
        scope="node",
        node=reading.node,
        features=(Feature(name=f"free_{unit}", value=free, baseline=size),),
    )


def _counter_finding(reading: Reading, name: str, rule: _Rule, value: float, before: float) -> Finding:
    return Finding(
        at=reading.at,
        detector="guard",
        kind=rule.kind,
        summary=rule.what.format(value - before) + (f" ({_gpu(reading.gpu)})" if reading.gpu is not None else ""),
        cls=rule.cls,
        role=rule.role,
        certainty=Certainty.CERTAIN,
        scope="node",
        node=reading.node,
        features=(Feature(name=name, value=value, baseline=before),),
    )


def _unseen(now: float, gaps: _Gaps, node: str, gpu: int | None) -> Finding:
    what = "of the node" if gpu is None else f"of {_gpu(gpu)}"
    return Finding(
        at=now,
        detector="guard",
        kind="node_unseen" if gpu is None else "gpu_unseen",
        summary=f"no reading {what} came for {now - gaps.last:.0f} s while others do; usually there is one every {gaps.usual:.0f} s",
        cls=Class.UNKNOWN if gpu is None else Class.HARDWARE,
        role=Role.CONFIRM,
        certainty=Certainty.STRONG,
        scope="node",
        node=node,
        features=(Feature(name="silent_s", value=now - gaps.last, baseline=gaps.usual),),
        began=gaps.last,
    )


def _gpu(index: int | None) -> str:
    return "a GPU" if index is None else f"GPU {index}"


def _first(told: OrderedDict[_K, None], key: _K) -> bool:
    """Whether this is new; from now on it is not."""
    new = key not in told
    _keep(told, key, None)
    return new


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > RANKS_MAX:
        kept.popitem(last=False)
