"""Who is slower, hotter or otherwise unlike its peers, when it was not so before.

Owns: the comparison of ranks with one another, window by window. Must not: score anything out of TRAIN, read a clock, need scikit-learn.

In DDP a step is equally long on all ranks, so a straggler shows in the time of its own work alone. For each rank, the logarithm of that time over the
median of the others', less the rank's own usual distance from it (nodes differ from the start), is summed up one-sidedly (CUSUM: E. S. Page, Biometrika 1954).
The sum says that something changed, not how much: before it may act, the change itself must have been large for a minute, or smaller for minutes.
All other measurements are compared alike, but only as robust z that hold for most of the last windows, and only as weak evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detectors.features import METRICS, RANKS_MAX, Array, Measured, Metric, measure, median_of_others, robust
from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.observations import Phase
from detectors.windows import Window

WORK: Final = "compute_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """When a rank is unlike its peers.

    Attributes:
        warm_up: windows in TRAIN from which on a rank's usual distance from its peers is believed.
        hold: windows that its spread is learnt from, every second one.
        recent: windows that the usual distance of its own work is learnt from.
        slack: k of the CUSUM, in standard deviations.
        alert, act: h of the CUSUM: from where on it is told, and from where on it is strong.
        step: the most that one window adds, in standard deviations, so that one spike is no straggler.
        short, large: windows over which the median change must be at least this share …
        long, small: … or these over which it must be at least this one.
        tolerance: a change of `large` counts from this much of it on, since what is measured lies around it.
        errors, memory: the change must also be this many of its standard errors; windows that follow one another resemble each other, so that only one in
            `memory` counts.
        share: more ranks than this at once are the job, its data or its storage, not a node.
        z, of, within: other measurements are outliers beyond this z in `of` of the last `within` windows.
        node_seconds: a node all of whose ranks are slow, or whose processor is oddly busy, is strong evidence only after this long: a neighbour may leave
            again, and for 10 % a restart pays after half an hour at the earliest.
        repeat: windows after which what goes on is told again.
    """

    warm_up: int = 30
    hold: int = 360
    recent: int = 120
    slack: float = 1.0
    alert: float = 12.0
    act: float = 20.0
    step: float = 6.0
    short: int = 5
    large: float = 0.10
    long: int = 15
    small: float = 0.05
    tolerance: float = 0.75
    errors: float = 6.0
    memory: float = 3.0
    share: float = 0.30
    z: float = 8.0
    of: int = 6
    within: int = 8
    node_seconds: float = 1200.0
    repeat: int = 6


@dataclass(kw_only=True, slots=True)
class _Compared:
    """What is known of the ranks of one generation. Arrays: ranks first; then metrics, the time of own work as the first of them."""

    key: tuple[int | None, int | None]
    ranks: tuple[int, ...]
    history: Array
    work: Array
    recent: Array
    outliers: NDArray[np.bool_]
    busy: NDArray[np.bool_]
    sums: Array
    since: Array
    slow_since: Array
    told: NDArray[np.int64]
    acted: NDArray[np.bool_]
    told_outliers: NDArray[np.int64]
    usual: Array
    sigma: Array
    own: Array
    rose: Array
    first: Array
    level: Array
    nodes: list[str] = field(default_factory=list)
    seen: int = 0
    kept: int = 0
    held: int = 0


class Peers:
    """Windows in, findings out."""

    def __init__(self, settings: Settings = Settings(), metrics: Sequence[Metric] = METRICS) -> None:
        if metrics[0].name != WORK:
            raise ValueError(f"the first metric that peers are compared by is {metrics[0].name}, not {WORK}")
        self._settings = settings
        self._metrics = tuple(metrics)
        self._hosts = [index for index, metric in enumerate(self._metrics) if metric.name == "host_cpu"]
        self._least = np.array([metric.least for metric in self._metrics])
        self._worse = np.array([metric.worse for metric in self._metrics])
        self._state: _Compared | None = None

    def see(self, window: Window, measured: Measured | None = None) -> list[Finding]:
        """What is odd in this window; nothing out of TRAIN, and nothing for a rank that is alone.

        Args:
            window: the next one.
            measured: its numbers, if the caller has them already; of no use where they are of other ranks than this generation began with.
        """
        if window.phase is not Phase.TRAIN or len(window.rows) < 2:
            return []
        state = self._state
        if state is None or state.key != (window.generation, window.world_size) or not window.rows.keys() <= set(state.ranks):
            state = self._state = self._begin(window)
        if measured is None or measured.ranks != state.ranks:
            measured = measure(window, state.ranks, self._metrics)
        values, apart = measured.values, measured.apart
        state.seen += 1
        if state.kept < self._settings.warm_up:
            self._remember(state, apart, values, np.ones(len(state.ranks), dtype=bool))
            return []
        apart = apart.copy()
        apart[:, 0] = _beside(values[:, 0] - state.level)
        change = apart - state.usual
        z = change / state.sigma
        slow = self._accumulate(state, z[:, 0], change[:, 0], values[:, 0], window.began)
        state.slow_since = np.where(slow, np.fmin(state.slow_since, window.began), np.nan)
        state.outliers[state.seen % len(state.outliers)] = np.where(self._worse == 0, np.abs(z), z * self._worse) > self._settings.z
        odd = np.count_nonzero(state.outliers, axis=0) >= self._settings.of
        odd[:, 0] = False
        if self._hosts:
            state.busy[state.seen % len(state.busy)] = z[:, self._hosts[0]] > self._settings.step / 2
        self._remember(state, apart, values, (state.sums < self._settings.alert / 2) & ~odd.any(axis=1))
        if not slow.any() and not odd.any():
            return []
        return [*self._stragglers(state, window, slow, values, z), *self._outliers(state, window, odd, values, z)]

    def _begin(self, window: Window) -> _Compared:
        ranks, settings = tuple(sorted(window.rows)[:RANKS_MAX]), self._settings
        shape = (len(ranks), len(self._metrics))
        hold = max(settings.warm_up, min(settings.hold, 4_000_000 // (shape[0] * shape[1])))
        return _Compared(
            key=(window.generation, window.world_size),
            ranks=ranks,
            nodes=[window.rows[rank].node for rank in ranks],
            history=np.full((hold, *shape), np.nan),
            work=np.full((settings.recent, len(ranks)), np.nan),
            recent=np.full((settings.long, len(ranks)), np.nan),
            outliers=np.zeros((settings.within, *shape), dtype=bool),
            busy=np.zeros((settings.long, shape[0]), dtype=bool),
            sums=np.zeros(len(ranks)),
            since=np.full(len(ranks), np.nan),
            slow_since=np.full(len(ranks), np.nan),
            told=np.full(len(ranks), -1_000_000),
            acted=np.zeros(len(ranks), dtype=bool),
            told_outliers=np.full(shape, -1_000_000),
            usual=np.full(shape, np.nan),
            sigma=np.ones(shape),
            own=np.full(len(ranks), np.nan),
            rose=np.full((settings.long, len(ranks)), np.nan),
            first=np.full((settings.warm_up, len(ranks)), np.nan),
            level=np.zeros(len(ranks)),
        )

    def _remember(self, state: _Compared, apart: Array, values: Array, quiet: NDArray[np.bool_]) -> None:
        """Learn from the ranks that are quiet; what is odd must not become usual."""
        settings, warm = self._settings, self._settings.warm_up
        if state.kept < warm:
            state.first[state.kept] = values[:, 0]
        state.work[state.kept % len(state.work)] = np.where(quiet, apart[:, 0], np.nan)
        if state.kept < warm or state.kept % 2 == 0:
            state.history[state.held % len(state.history)] = np.where(quiet[:, None], apart, np.nan)
            state.held += 1
        state.kept += 1
        if state.kept == warm:
            self._even(state)
        if state.kept == warm or (state.kept > warm and state.kept % (6 * warm) == 0) or state.kept in {2 * warm, 4 * warm}:
            self._learn(state)
        elif state.kept > warm and state.kept % (warm // 2) == 0:  # ranks wander; a straggler does it in seconds
            usual = robust(state.work, np.zeros(1))[0]
            np.copyto(state.usual[:, 0], usual, where=np.count_nonzero(~np.isnan(state.work), axis=0) >= warm // 2)
        own = values[:, 0]
        weight = 1 / min(state.kept, settings.recent)
        np.copyto(state.own, np.where(np.isnan(state.own), own, state.own + (own - state.own) * weight), where=quiet & ~np.isnan(own))

    def _even(self, state: _Compared) -> None:
        """Ranks that differ from the start are made alike before they are compared: else one that moves past others moves the median of them all."""
        common, _ = robust(state.first.T, np.zeros(1))
        state.level = np.nan_to_num(robust(state.first - common[:, None], np.zeros(1))[0])
        for index, own in enumerate(state.first):
            state.work[index] = state.history[index, :, 0] = _beside(own - state.level)

    def _learn(self, state: _Compared) -> None:
        warm = self._settings.warm_up
        block = state.history[: state.held]
        usual, sigma = robust(block, self._least)
        known = np.count_nonzero(~np.isnan(block), axis=0)
        enough = known >= warm // 2
        # Few windows tell a standard deviation badly, and rather too small where noise has a memory.
        np.copyto(state.sigma, sigma * (1 + 6 / np.maximum(known, 1)), where=enough)
        if state.kept > 2 * warm:
            enough[:, 0] = False  # that is followed more closely
        np.copyto(state.usual, usual, where=enough)

    def _accumulate(self, state: _Compared, z: Array, change: Array, own: Array, began: float) -> NDArray[np.bool_]:
        """One more window; which ranks are slower than they may be."""
        settings = self._settings
        there = ~np.isnan(z)
        grown = np.clip(state.sums + np.clip(np.where(there, z, settings.slack), -settings.step, settings.step) - settings.slack, 0, 2 * settings.act)
        state.since = np.where((grown > 0) & (state.sums == 0), began, state.since)
        state.sums = grown
        state.rose[state.seen % settings.long] = own - state.own
        state.recent[state.seen % settings.long] = change
        if not (grown >= settings.alert).any():
            return np.zeros(len(z), dtype=bool)
        slow = (grown >= settings.alert) & (self.change(state) > 0)
        # Who became slower, and not who stayed while a neighbour left the others, or one of two that became faster.
        change, large = self.change(state), math.log1p(settings.large) * settings.tolerance
        rose = [
            robust(state.rose[[(state.seen - back) % settings.long for back in range(windows)]], np.zeros(1))[0] for windows in (settings.short, settings.long)
        ]
        slow &= np.nan_to_num(np.where(change >= large, rose[0], np.fmax(rose[0], rose[1]))) > 0.4 * change
        return np.asarray(slow)

    def change(self, state: _Compared) -> Array:
        """For each rank the sustained change, as a logarithm: over a minute if large, over minutes if small and there are enough ranks, else 0."""
        settings = self._settings
        recent = state.recent[[(state.seen - back) % settings.long for back in range(settings.long)]]
        found = np.zeros(recent.shape[1])
        scales = ((settings.long, settings.small), (settings.short, settings.large))
        for windows, share in scales if len(state.ranks) > 3 else scales[1:]:  # two or three wander too far from one another for small ones
            middle, _ = robust(recent[:windows], np.zeros(1))
            error = state.sigma[:, 0] * math.sqrt(settings.memory / windows)
            least = np.fmax(settings.tolerance * math.log1p(share), settings.errors * error)
            # Not two spikes, and not one that dies away: all of a minute, and nearly all of minutes.
            above, there = recent[:windows] > np.fmax(least, middle) / 2, ~np.isnan(recent[:windows])
            below = np.count_nonzero(~above & there, axis=0) <= (windows - settings.short) // 3
            large = below & (np.count_nonzero(above, axis=0) >= windows - windows // 4)
            found = np.where(large & (np.nan_to_num(middle) >= least), middle, found)
        return found

    def _stragglers(self, state: _Compared, window: Window, slow: NDArray[np.bool_], values: Array, z: Array) -> list[Finding]:
        settings = self._settings
        acting = state.sums >= settings.act
        due = slow & ((state.seen - state.told >= settings.repeat) | (acting & ~state.acted))
        if not due.any():
            return []
        places = np.flatnonzero(slow)
        state.told[places], state.acted[places] = state.seen, acting[places]
        share = np.expm1(self.change(state))
        usual = "measured by its usual distance"
        if self._many(state, np.flatnonzero(slow | self._follows(state, slow))):
            text = f"{len(places)} of {len(state.ranks)} ranks take {_percent(np.median(share[places]))} longer for their own work than the others, {usual}"
            return [self._shared(state, window, "many_stragglers", "job", text, [self._feature(state, values, z, places[0], 0)])]
        found = []
        for node, members in self._by_node(state, np.flatnonzero(slow | self._follows(state, slow))):
            if not slow[members].any():  # on its way, and no more
                continue
            began = float(np.nanmin(state.since[members]))
            whole = len(members) > 1
            shared = whole or self._neighbour(state, members[0])
            strong = bool(acting[members].all()) and (not shared or window.ended - float(np.nanmax(state.slow_since[members])) >= settings.node_seconds)
            subject = f"all {len(members)} ranks of {node or 'a node'} take" if whole else f"rank {state.ranks[members[0]]} takes"
            text = f"{subject} {_percent(np.median(share[members]))} longer for own work than peers, {usual}, for {window.ended - began:.0f} s"
            found.append(
                Finding(
                    at=window.ended,
                    detector="peers",
                    kind="slow_node" if whole else "straggler",
                    summary=text,
                    cls=Class.HARDWARE if strong else Class.UNKNOWN,
                    role=Role.ROOT if strong else Role.CONFIRM,
                    certainty=Certainty.STRONG if strong else Certainty.WEAK,
                    scope="node" if whole else "rank",
                    node=node,
                    rank=None if whole else state.ranks[members[0]],
                    generation=window.generation,
                    features=tuple(self._feature(state, values, z, place, 0) for place in members),
                    began=began,
                )
            )
        return found

    def _outliers(self, state: _Compared, window: Window, odd: NDArray[np.bool_], values: Array, z: Array) -> list[Finding]:
        due = odd & (state.seen - state.told_outliers >= self._settings.repeat)
        found = []
        for column in np.flatnonzero(due.any(axis=0)).tolist():
            places = np.flatnonzero(odd[:, column])
            state.told_outliers[places, column] = state.seen
            name = self._metrics[column].name
            if self._many(state, places):
                text = f"{name} of {len(places)} of {len(state.ranks)} ranks is not as usual beside the others"
                found.append(self._shared(state, window, "many_outliers", "job", text, [self._feature(state, values, z, places[0], column)]))
                continue
            for node, members in self._by_node(state, places):
                features = [self._feature(state, values, z, place, column) for place in members]
                first, whole = features[0], len(members) > 1
                peers = "" if first.peers is None else f", {first.peers:.4g} at its peers"
                subject = f"all ranks of {node or 'a node'}: {name}" if whole else f"rank {state.ranks[members[0]]}: {name}"
                text = f"{subject} {first.value:.4g}{peers}, where {first.baseline or 0.0:.4g} would be usual"
                if whole:
                    found.append(self._shared(state, window, "node_outlier", "node", text, features, node=node))
                    continue
                found.append(
                    Finding(
                        at=window.ended,
                        detector="peers",
                        kind="peer_outlier",
                        summary=text,
                        cls=Class.UNKNOWN,
                        role=Role.CONFIRM,
                        certainty=Certainty.WEAK,
                        node=node,
                        rank=state.ranks[members[0]],
                        generation=window.generation,
                        features=tuple(features),
                    )
                )
        return found

    def _shared(self, state: _Compared, window: Window, kind: str, scope: str, text: str, features: list[Feature], *, node: str = "") -> Finding:
        """What many have in common is told, and is nobody's fault."""
        return Finding(
            at=window.ended,
            detector="peers",
            kind=kind,
            summary=text,
            cls=Class.ADVISE,
            role=Role.ADVISE,
            certainty=Certainty.WEAK,
            scope=scope,
            node=node,
            generation=state.key[0] if window.generation is None else window.generation,
            features=tuple(features),
        )

    def _many(self, state: _Compared, places: NDArray[np.int64]) -> bool:
        return len(places) > max(1.0, self._settings.share * len(state.ranks))

    def _follows(self, state: _Compared, slow: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ranks beside a slow one on its node that are on their way to it: what slows down a node reaches the threshold on one rank first."""
        beside = np.isin(np.array(state.nodes), [state.nodes[place] for place in np.flatnonzero(slow) if state.nodes[place]])
        if np.count_nonzero(beside & ~slow) == 0:
            return beside & False
        recent = state.recent[[(state.seen - back) % self._settings.long for back in range(self._settings.short)]]
        middle = np.nan_to_num(robust(recent, np.zeros(1))[0])
        return np.asarray(beside & ~slow & (middle > 0.4 * np.median(middle[slow])) & (state.sums > self._settings.slack))

    def _neighbour(self, state: _Compared, place: int) -> bool:
        """Whether the processor of its node was oddly busy in some of the last windows: somebody else may be at work there, and may leave again."""
        return bool(self._hosts) and int(np.count_nonzero(state.busy[:, place])) >= 3

    @staticmethod
    def _by_node(state: _Compared, places: NDArray[np.int64]) -> list[tuple[str, list[int]]]:
        """One entry for each node all of whose ranks are among them, if it has several; else one for each rank."""
        found = []
        for node in dict.fromkeys(state.nodes[place] for place in places):
            members = [int(place) for place in places if state.nodes[place] == node]
            whole = node and len(members) > 1 and len(members) == state.nodes.count(node)
            found += [(node, members)] if whole else [(node, [member]) for member in members]
        return found

    def _feature(self, state: _Compared, values: Array, z: Array, place: int, column: int) -> Feature:
        metric, value, score = self._metrics[column], float(values[place, column]), float(z[place, column])
        others = np.delete(values[:, column], place)
        others = others[~np.isnan(others)]
        middle = float(np.median(others)) if len(others) else None
        if math.isnan(value):  # odd in most of the last windows, not there in this one
            return Feature(name=metric.name, value=0.0, peers=None if middle is None else metric.back(middle))
        usual = None if middle is None or math.isnan(score) else metric.back(value - score * float(state.sigma[place, column]))
        return Feature(
            name=metric.name,
            value=metric.back(value),
            baseline=usual,
            peers=None if middle is None else metric.back(middle),
            z=None if math.isnan(score) else round(score, 2),
        )


def _beside(own: Array) -> Array:
    """How far each rank is from the median of the others."""
    return np.asarray(own - median_of_others(own[:, None])[:, 0])


def _percent(share: np.floating) -> str:
    return f"{100 * float(share):.0f} %"
