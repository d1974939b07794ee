"""What comparison of ranks and the isolation forest find in numbers, what they find where nothing is, and what they cost.

Owns: stragglers, benign hours and joint drifts in simulated jobs (`_detectors_simulation`); series of the Numenta benchmark (DATA/nab, MIT). Must not:
set a threshold by a seed that it judges with.

Time to find a straggler is counted in windows of training: nothing is compared during checkpoints and evaluations, and those last as they like.
Joint drifts: forest, Mahalanobis distance and PCA residuals see the same numbers and must persist alike ("rules" is the largest |z|, in 3 of 5 windows);
the threshold of each is its own held-out quantile, moved away by whatever factor gives the same number of alarms in benign calibration jobs.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bench._common import Row, progress
from bench._detectors_policy import acted
from bench._detectors_rivals import Adwin, HalfSpaceTrees, robust_z
from bench._detectors_simulation import DRIFTS, PER_HOUR, WIDTH, Noise, benign, drift, straggle
from detectors.features import Joint, Plane, Summaries
from detectors.findings import Certainty, Finding
from detectors.forest import Forest, Model, Settings, Trees
from detectors.observations import Phase
from detectors.peers import Peers
from elasticd.policy.decisions import DISRUPTIVE, Action

if TYPE_CHECKING:
    from pathlib import Path

Array = NDArray[np.float64]
_A = TypeVar("_A")
_B = TypeVar("_B")
LAYOUTS: Final = ((1, 4), (1, 8), (2, 4), (2, 2), (4, 1), (4, 2))
BOUNDS: Final = {10: 60.0, 5: 180.0}
"""Seconds within which a straggler of so many % must be found."""
HOURS: Final = 12.0
"""Of a benign job."""
BUDGET: Final = 5.0
"""Alarms in 1000 benign node-hours that a detector of joint drifts may give."""
FIRST_SEED: Final = {"straggler": 300_000, "benign": 910_000, "calibration": 700_000, "drift": 800_000}
"""Seeds above these were never looked at while anything was tuned."""


def rows(data: Path | None, quick: bool) -> list[Row]:
    """All of it; of Numenta's series only if DATA is there."""
    found = stragglers(12 if quick else 100)
    found += benign_hours(60 if quick else 12_000)
    found += joint_drifts(calibration=8 if quick else 60, drifts=16 if quick else 96)
    found += cost(120 if quick else 600)
    if data is None or not (data / "nab").is_dir():
        progress("nab_*: left out, needs --data DIR with nab/ in it")
        return found
    return found + numenta(data / "nab")


# --- stragglers ----------------------------------------------------------------------------------------------------------


def stragglers(runs: int) -> list[Row]:
    """One rank of 4 or 8 becomes slower; `runs` for each layout and size."""
    found = []
    for percent, bound in BOUNDS.items():
        cases = [(FIRST_SEED["straggler"] + run, layout, percent / 100) for layout in LAYOUTS for run in range(runs)]
        took = _map(_straggler, cases)
        inside = [100.0 * (seconds is not None and seconds <= bound) for seconds in took]
        per_layout = [float(np.mean(inside[index * runs : (index + 1) * runs])) for index in range(len(LAYOUTS))]
        wrong = sum(seconds is not None and seconds < 0 for seconds in took)
        note = f"within {bound:.0f} s of training, over layouts; {len(took)} runs, {wrong} found before it began count as not found"
        inside = [0.0 if seconds is not None and seconds < 0 else value for seconds, value in zip(took, inside, strict=True)]
        mean = float(np.mean(inside))
        found.append(
            Row(name=f"straggler_{percent}_recall", peer="elasticd", median=mean, min=min(per_layout), max=max(per_layout), unit="%", runs=len(took), note=note)
        )
        times = [seconds for seconds in took if seconds is not None and seconds >= 0]
        found.append(Row.of(f"straggler_{percent}_s", "elasticd", times or [None], note="of those found, from its beginning, pauses of training left out"))
    return found


def _straggler(case: tuple[int, tuple[int, int], float]) -> float | None:
    """Seconds of training to a strong finding of the right rank; negative if one came before."""
    seed, layout, share = case
    job = benign(_noise(), seed, hours=1.2, layout=layout, rescales=False)
    rng = np.random.default_rng(seed + 1)
    at, rank = 270 + rng.random() * 60, int(rng.integers(job.ranks))
    straggle(job, rank=rank, share=share, at=at)
    peers, began, paused = Peers(), job.began + at * WIDTH, 0.0
    for window in job.windows(last=int(at) + 60):
        paused += WIDTH * (window.ended > began and window.phase is not Phase.TRAIN)
        for finding in peers.see(window):
            if finding.certainty is Certainty.STRONG:
                if finding.at <= began:
                    return -1.0
                if finding.rank == rank:
                    return finding.at - began - paused
    return None


# --- nothing wrong -------------------------------------------------------------------------------------------------------


def benign_hours(wanted: float) -> list[Row]:
    """So many node-hours, and what would have been done in them."""
    jobs, hours, seed = [], 0.0, FIRST_SEED["benign"]
    while hours < wanted:
        jobs.append(seed)
        hours += HOURS * _nodes(seed)
        seed += 1
    results = _map(_benign, jobs, chunk=4, told="benign jobs")
    windows, actions, alarms = (sum(counts) for counts in zip(*(result[:3] for result in results), strict=True))
    stops, saves = (sum(counts) for counts in zip(*(result[5:] for result in results), strict=True))
    shared = {name: sum(result[3].get(name, 0) for result in results) for name in sorted({name for result in results for name in result[3]})}
    words = ", ".join(sorted({text for result in results for text in result[4]})[:8])
    note = f"strong or certain findings, and persisting ones of the forest, in {windows} windows of {len(jobs)} jobs; {words or 'none'}"
    per = 1000 / hours
    return [
        Row(name="benign_node_hours", peer="elasticd", median=hours, min=hours, max=hours, unit="h"),
        Row(name="false_actions", peer="elasticd", median=actions, min=actions, max=actions, unit="", note=note),
        Row(name="policy_stops", peer="elasticd", median=stops, min=stops, max=stops, unit="", note="by the policy in mode act, of all that was found"),
        Row(name="policy_checkpoints", peer="elasticd", median=saves, min=saves, max=saves, unit="", note="early ones, likewise"),
        Row(
            name="weak_findings_per_1000_h",
            peer="elasticd",
            median=alarms * per,
            min=alarms * per,
            max=alarms * per,
            unit="1/1000 h",
            note=f"by kind: {shared}",
        ),
    ]


def _nodes(seed: int) -> int:
    from bench._detectors_simulation import LAYOUTS as ALL

    return ALL[np.random.default_rng(seed).integers(len(ALL))][0]


def _benign(seed: int) -> tuple[int, int, int, dict[str, int], list[str], int, int]:
    windows = list(benign(_noise(), seed, hours=HOURS).measured())
    outcome = acted(windows)
    actions, alarms, told = _incidents(outcome.findings)
    stops, saves = outcome.of(*DISRUPTIVE), outcome.of(Action.CHECKPOINT)
    texts = [*actions, *(f"{one.action.value}: {one.why}" for one in stops)]
    return len(windows), len(actions), len(alarms), told, [f"seed {seed}: {text}" for text in texts], len(stops), len(saves)


def _incidents(found: Sequence[Finding]) -> tuple[list[str], list[str], dict[str, int]]:
    """Findings of one kind and subject within half an hour are one."""
    last: dict[tuple[str, object, object, bool], float] = {}
    actions: list[str] = []
    alarms: list[str] = []
    kinds: dict[str, int] = {}
    for finding in sorted(found, key=lambda finding: finding.at):
        acts = finding.certainty in {Certainty.STRONG, Certainty.CERTAIN} or finding.kind == "joint_drift"
        key = (finding.kind, finding.node if finding.scope != "job" else "", finding.rank, acts)
        if finding.at - last.get(key, -1e12) > 1800:
            (actions if acts else alarms).append(finding.summary)
            if not acts:
                kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
        last[key] = finding.at
    return actions, alarms, kinds


# --- many things a little ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """One job: for each method how far each rank was beyond its held-out quantile for as long as a finding must persist, by window."""

    kind: str
    rank: int
    nodes: int
    first: int
    levels: dict[str, Array]
    peers: bool
    shipped: bool


def joint_drifts(*, calibration: int, drifts: int) -> list[Row]:
    """Each detector at the margin that gives it the budget's alarms in calibration jobs."""
    quiet = _map(_scored, [(FIRST_SEED["calibration"] + index, "") for index in range(calibration)], told="calibration jobs")
    kinds = list(DRIFTS)
    faulty = _map(_scored, [(FIRST_SEED["drift"] + index, kinds[index % len(kinds)]) for index in range(drifts)], told="drifts")
    hours = sum((len(job.levels["forest"]) - job.first) * job.nodes for job in quiet) / PER_HOUR
    allowed = int(BUDGET * hours / 1000)
    found = []
    for name in quiet[0].levels:
        peaks = sorted((level for job in quiet for level in _peaks(job.levels[name][job.first :].max(axis=1))), reverse=True)
        margin = max(peaks[allowed], 0.1) + 1e-6
        hits = {kind: [bool((job.levels[name][job.first :, job.rank] > margin).any()) for job in faulty if job.kind == kind] for kind in kinds}
        recall = 100 * float(np.mean([hit for each in hits.values() for hit in each]))
        shares = [100 * float(np.mean(each)) for each in hits.values() if each]
        note = f"{allowed} alarms in {hours:.0f} benign node-hours allowed, margin {margin:.2f}; " + ", ".join(
            f"{k} {sum(v)}/{len(v)}" for k, v in hits.items()
        )
        found.append(Row(name=f"{name}_only_recall", peer="elasticd", median=recall, min=min(shares), max=max(shares), unit="%", runs=drifts, note=note))
    peers, shipped = (100.0 * float(np.mean([getattr(job, name) for job in faulty])) for name in ("peers", "shipped"))
    return [
        *found,
        Row(name="peers_only_recall", peer="elasticd", median=peers, min=peers, max=peers, unit="%", runs=drifts, note="strong findings"),
        Row(
            name="joint_drift_recall", peer="elasticd", median=shipped, min=shipped, max=shipped, unit="%", runs=drifts, note="by Forest with its own settings"
        ),
    ]


def _scored(case: tuple[int, str]) -> _Scored:
    seed, kind = case
    hours, settings = (6.5 if kind else 10.0), Settings()
    job = benign(_noise(), seed, hours=hours, rescales=False)
    rng = np.random.default_rng(seed + 1)
    rank, begins = int(rng.integers(job.ranks)), round((hours - 1) * PER_HOUR)
    if kind:
        drift(job, kind=kind, rank=rank, first=begins, last=begins + 240)
    summaries, peers, kept, windows = Summaries(), Peers(), [], list(job.measured())
    since, until = job.began + begins * WIDTH, job.began + (begins + 240) * WIDTH
    mine: list[Finding] = []
    for index, (window, measured) in enumerate(windows):
        mine += peers.see(window, measured)
        summary = summaries.see(window, measured)
        if summary is not None:
            kept.append((index, summary))
    if kind:
        mine += Forest().see_many(windows)
    mine = [one for one in mine if one.rank == rank and since < one.at <= until]
    end = next(place for place, (index, _) in enumerate(kept) if index >= (begins if kind else 4 * PER_HOUR))
    apart = np.concatenate([one.apart for _, one in kept])
    ranks = len(kept[0][1].ranks)
    third = int(0.7 * end)
    learnt = apart[: third * ranks]
    model = Model.fit(np.concatenate([one.sizes for _, one in kept])[: end * ranks], apart[: end * ranks], settings)
    plain = Trees.grow(learnt, trees=settings.trees, sample=256, seed=0)
    scores = {
        "forest": model.scores(apart),
        "plain_forest": plain.scores(apart),
        "mahalanobis": Joint.of(learnt).distance(apart),
        "pca": Plane.of(learnt).residual(apart),
    }
    busy = np.array([one.busy for _, one in kept])
    levels = {name: _lasting(score.reshape(-1, ranks), third, end, busy, settings) for name, score in scores.items()}
    worst = np.stack([one.sizes[:, 0] for _, one in kept])
    levels["rules"] = _lasting(worst, third, end, busy, Settings(of=3, within=5))
    return _Scored(
        kind=kind,
        rank=rank,
        nodes=job.nodes,
        first=end + settings.within,
        levels=levels,
        peers=any(one.certainty is Certainty.STRONG for one in mine),
        shipped=any(one.kind == "joint_drift" for one in mine),
    )


def _lasting(scores: Array, third: int, end: int, busy: NDArray[np.bool_], settings: Settings) -> Array:
    """By window and rank the level that `of` of the last `within` windows are above; none where the node is busy."""
    held = scores[third:end]
    middle, high = np.quantile(held, [0.5, 1 - settings.budget / 360])
    level = (scores - middle) / (high - middle)
    windows = np.sort(sliding_window_view(level, settings.within, axis=0), axis=-1)[..., settings.within - settings.of]
    lasting = np.concatenate([np.full((settings.within - 1, level.shape[1]), -9.0), windows])
    return np.asarray(np.where(busy, -9.0, lasting))


def _peaks(levels: Array, apart: int = 180) -> list[float]:
    """The highest of each half hour: what lasts is one alarm."""
    return [float(levels[first : first + apart].max()) for first in range(0, len(levels), apart)]


# --- Numenta -------------------------------------------------------------------------------------------------------------

_COOLDOWN: Final = 72
"""Samples after an alarm in which another one is the same."""


def numenta(folder: Path) -> list[Row]:
    """First 15 % of each series to learn from; an event is found if an alarm lies in its window, all other alarms are false."""
    labels = json.loads((folder / "combined_windows.json").read_text())
    scored: dict[str, list[tuple[int, int, int, float]]] = {name: [] for name in _SERIES}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        times = np.array([datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines])
        values = np.array([float(line["value"]) for line in lines])
        events = next(windows for name, windows in labels.items() if name.endswith("/" + path.name))
        spans = [tuple(datetime.fromisoformat(text).timestamp() for text in event) for event in events]
        train = int(0.15 * len(values))
        for name, judge in _SERIES.items():
            alarms = judge(values, train)
            alarms[:train] = False
            scored[name].append(_events(alarms, times, spans, train))
    found = []
    for name, results in scored.items():
        hit, events, false, hours = (sum(result[index] for result in results) for index in range(4))
        found.append(Row.of("nab_recall", name, [hit / events], unit="", note=f"{hit} of {events} events in {len(results)} series"))
        found.append(Row.of("nab_false_per_1000_h", name, [1000 * false / hours], unit="1/1000 h"))
    return found


def _events(alarms: NDArray[np.bool_], times: Array, spans: Sequence[tuple[float, ...]], train: int) -> tuple[int, int, int, float]:
    false, hit, last = 0, set(), -_COOLDOWN
    for index in np.flatnonzero(alarms).tolist():
        inside = [number for number, (low, high) in enumerate(spans) if low <= times[index] <= high]
        hit.update(inside)
        if index - last >= _COOLDOWN:
            false += not inside
            last = index
    later = [number for number, (_, high) in enumerate(spans) if high > times[train]]
    return len(hit), len(later), false, float(times[-1] - times[train]) / 3600


def _features(values: Array) -> Array:
    """Five rolling ones: how far from the last day, from the last hour, how much it moves, and how both moved."""
    day = robust_signed(values, 288)
    hour = np.convolve(day, np.ones(12) / 12)[: len(day)]
    step = np.diff(values, prepend=values[0])
    moves = robust_signed(step, 288)
    busy = np.log(0.1 + np.convolve(np.abs(moves), np.ones(12) / 12)[: len(day)])
    return np.column_stack([day, hour, np.abs(day), moves, busy])


def robust_signed(values: Array, window: int) -> Array:
    """As `robust_z`, with its sign, within 50."""
    least = max(1e-9, 0.02 * float(np.std(values[:window])))
    size = np.minimum(robust_z(values, window=window, least=least), 50.0)
    middle = np.concatenate([np.zeros(window), np.median(sliding_window_view(values, window), axis=1)[:-1]])
    return np.asarray(size * np.sign(values - middle))


def _k_of_n(above: NDArray[np.bool_], of: int = 3, within: int = 5) -> NDArray[np.bool_]:
    return np.asarray(np.convolve(above, np.ones(within))[: len(above)] >= of)


def _forest_series(values: Array, train: int) -> NDArray[np.bool_]:
    rows = _features(values)
    first = min(288, train // 4)
    half = first + int(0.6 * (train - first))
    trees = Trees.grow(rows[first:half], trees=100, sample=1024, seed=0)
    scores = trees.scores(rows)
    return _k_of_n(scores > np.quantile(scores[half:train], 0.999))


def _plain_forest(values: Array, train: int) -> NDArray[np.bool_]:
    trees = Trees.grow(values[:train, None] / (values[:train].std() + 1e-9), trees=100, sample=256, seed=0)
    scores = trees.scores(values[:, None] / (values[:train].std() + 1e-9))
    return np.asarray(scores > np.quantile(scores[:train], 0.999))


def _robust(values: Array, train: int) -> NDArray[np.bool_]:
    return _k_of_n(robust_z(values, least=max(1e-9, 0.02 * float(values[:train].std()))) > 10)


def _adwin(values: Array, train: int) -> NDArray[np.bool_]:
    low, high = values[:train].min(), values[:train].max()
    window = Adwin()
    return np.array([window.see(float(value)) for value in (values - low) / max(high - low, 1e-9)])


def _half_space(values: Array, train: int, *, lasting: bool = True) -> NDArray[np.bool_]:
    rows = _features(values)
    trees = HalfSpaceTrees(rows[:train].min(axis=0), rows[:train].max(axis=0))
    scores = np.array([trees.see(row) for row in rows])
    above = scores > np.quantile(scores[500:train] if train > 1000 else scores[train // 2 : train], 0.999)
    return _k_of_n(above) if lasting else above


_SERIES: Final[dict[str, Callable[[Array, int], NDArray[np.bool_]]]] = {
    "elasticd": _forest_series,
    "isolation-forest": _plain_forest,
    "robust-z": _robust,
    "adwin": _adwin,
    "half-space-trees": _half_space,
}

# --- cost ----------------------------------------------------------------------------------------------------------------


def cost(count: int) -> list[Row]:
    """Of a window of 8 ranks: comparison, summaries and forest, one window at a time, as a node does it."""
    job = benign(_noise(), 1, hours=3.0 + count / PER_HOUR, layout=(1, 8), rescales=False)
    peers, forest = Peers(), Forest()
    learnt = round(3.0 * PER_HOUR)
    for window in job.windows(last=learnt):
        peers.see(window)
        forest.see(window)
    took = []
    for window in list(job.windows(first=learnt)):
        began = time.process_time()
        peers.see(window)
        forest.see(window)
        took.append(1000 * (time.process_time() - began))
    mean = float(np.mean(took))
    return [
        Row.of("window_ms", "elasticd", took, unit="ms", note=f"8 ranks, mean {mean:.2f} with the hourly growing of the forest, {max(took):.0f} ms"),
        Row.of("window_core_percent", "elasticd", [mean / (10 * WIDTH)], unit="%", note="of a core, at a window in 10 s"),
    ]


# --- all ranks of work ---------------------------------------------------------------------------------------------------


@cache
def _noise() -> Noise:
    return Noise.load()


def _map(work: Callable[[_A], _B], cases: Sequence[_A], *, chunk: int = 8, told: str = "") -> list[_B]:
    found, began = [], time.monotonic()
    with ProcessPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        for number, result in enumerate(pool.map(work, cases, chunksize=chunk), 1):
            found.append(result)
            if told and number % 50 == 0:
                progress(f"{number} of {len(cases)} {told}, {time.monotonic() - began:.0f} s")
    return found
