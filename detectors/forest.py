"""An isolation forest over the summaries of windows: which ranks are unlike what was usual in many measurements at once, each of which is within bounds.

Owns: learning it, its threshold, keeping it from one run to the next, and explaining it. Must not: say more than "weak"; read a clock.

Trained on what is in phase, scored on what it did not see: the first part of the remembered windows says what goes together, the next grows the trees, the
last sets the threshold. scikit-learn grows the trees; they are walked here, since its own scoring takes milliseconds for a single window. The model is kept
as the numbers that it was grown from, never as a pickle, and is grown again when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detectors.features import METRICS, SUMMARIES, Array, Joint, Measured, Plane, Summaries, Summary, summarize
from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.windows import Window

FORMAT: Final = 1
BEYOND: Final = 0.3
"""What is added to the score for each unit (of a logarithm) beyond the largest summary that trees were grown from."""
ROWS_MAX: Final = 20_000
"""Rows that are remembered; with many ranks these are fewer windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How it learns, and when it speaks.

    Attributes:
        warm_up: windows before it says anything.
        hold: windows that it is grown from at most.
        refit: windows after which it is grown anew.
        trees, sample: of the forest.
        budget: windows of an hour that a rank may be above the threshold by chance, as the held-out windows have it; `margin` times as far from the
            median as that lies the threshold.
        of, within: a finding needs `of` of the last `within` windows above it.
        share: more ranks than this at once are the job, not a node.
        quiet: seconds before and after an incident from which nothing is learnt.
        repeat: windows after which what goes on is told again.
    """

    warm_up: int = 500
    hold: int = 2160
    refit: int = 360
    trees: int = 100
    sample: int = 256
    budget: float = 3.6
    margin: float = 1.2
    of: int = 90
    within: int = 108
    share: float = 0.30
    quiet: float = 600.0
    repeat: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Trees:
    """A grown forest as arrays: trees by nodes.

    Attributes:
        feature, threshold: a row goes left where its feature is not above the threshold; feature -1 in leaves.
        left, right: nodes.
        length: of the path to a leaf, with what would be left to split there.
        deepest: levels. usual: length of a path in a random tree of as many rows.
    """

    feature: NDArray[np.int32]
    threshold: Array
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    length: Array
    deepest: int
    usual: float

    @classmethod
    def grow(cls, rows: Array, *, trees: int, sample: int, seed: int) -> Trees:
        """From rows without NaN. Columns that never change are jittered: no tree can split them, and a change of them would never be seen."""
        from sklearn.ensemble import IsolationForest

        rng = np.random.default_rng(seed)
        rows = rows + rng.normal(0.0, 0.02 * np.maximum(rows.std(axis=0), 0.5), rows.shape)
        forest = IsolationForest(n_estimators=trees, max_samples=min(sample, len(rows)), random_state=seed).fit(rows)
        grown = [estimator.tree_ for estimator in forest.estimators_]
        width = max(tree.node_count for tree in grown)
        feature, left, right = (np.zeros((trees, width), dtype=np.int32) for _ in range(3))
        threshold, length = np.zeros((trees, width)), np.zeros((trees, width))
        for index, tree in enumerate(grown):
            count = tree.node_count
            feature[index, :count] = np.where(tree.children_left < 0, -1, tree.feature)
            leaf = tree.children_left < 0
            left[index, :count] = np.where(leaf, np.arange(count), tree.children_left)
            right[index, :count] = np.where(leaf, np.arange(count), tree.children_right)
            threshold[index, :count] = tree.threshold
            depth = np.zeros(count)
            for node in range(count):  # children come after their parents
                if not leaf[node]:
                    depth[[tree.children_left[node], tree.children_right[node]]] = depth[node] + 1
            length[index, :count] = depth + _path(tree.n_node_samples)
        deepest = max(tree.max_depth for tree in grown)
        usual = float(_path(np.array([min(sample, len(rows))]))[0])
        return cls(feature=feature, threshold=threshold, left=left, right=right, length=length, deepest=deepest, usual=usual)

    def scores(self, rows: Array) -> Array:
        """For each row 0 to 1, more is odder: what `-IsolationForest.score_samples` says (Liu, Ting, Zhou, ICDM 2008)."""
        found = np.empty(len(rows))
        trees = np.arange(len(self.feature))
        for first in range(0, len(rows), 2048):
            block = rows[first : first + 2048].astype(np.float32)  # as scikit-learn compares
            node = np.zeros((len(block), len(trees)), dtype=np.int32)
            each = np.arange(len(block))[:, None]
            for _ in range(self.deepest):
                low = block[each, np.maximum(self.feature[trees, node], 0)] <= self.threshold[trees, node]
                node = np.where(low, self.left[trees, node], self.right[trees, node])
            found[first : first + 2048] = self.length[trees, node].mean(axis=1)
        return np.asarray(2.0 ** (-found / self.usual))


def _path(rows: NDArray[Any]) -> Array:
    """Mean length of an unsuccessful search in a random binary tree of so many rows."""
    rows = np.asarray(rows, dtype=float)
    many = np.maximum(rows, 3)
    return np.where(rows <= 1, 0.0, np.where(rows <= 2, 1.0, 2 * (np.log(many - 1) + np.euler_gamma) - 2 * (many - 1) / many))


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What was learnt.

    Attributes:
        joint, plane: how averaged deviations go together. most: of each summary, that the trees saw.
        threshold: of the score. rows: that the trees were grown from.
    """

    joint: Joint
    plane: Plane
    trees: Trees
    most: Array
    threshold: float
    rows: int

    @classmethod
    def fit(cls, sizes: Array, apart: Array, settings: Settings, *, seed: int = 0) -> Model:
        """From rows in the order of time."""
        second, third = int(0.4 * len(apart)), int(0.7 * len(apart))
        joint, plane = Joint.of(apart[:second]), Plane.of(apart[:second])
        rows = summarize(apart, joint, plane)
        worst = sizes[second:third, 0]
        grown = rows[second:third][worst <= np.quantile(worst, 0.99)]  # what went wrong without being told is in it, too
        trees = Trees.grow(grown, trees=settings.trees, sample=settings.sample, seed=seed)
        most = grown.max(axis=0)
        middle, high = np.quantile(_extended(trees, most, rows[third:]), [0.5, 1 - settings.budget / 360])
        threshold = float(middle + settings.margin * (high - middle))
        return cls(joint=joint, plane=plane, trees=trees, most=most, threshold=threshold, rows=len(grown))

    def scores(self, apart: Array) -> Array:
        """Of these rows, over the threshold: above 1 is too odd."""
        return _extended(self.trees, self.most, summarize(apart, self.joint, self.plane)) / self.threshold


def _extended(trees: Trees, most: Array, rows: Array) -> Array:
    """The forest's score, and more for what lies beyond all that it saw: to trees, what is a little beyond and what is far beyond are the same."""
    return np.asarray(trees.scores(rows) + BEYOND * np.maximum(rows - most, 0.0).sum(axis=1))


class Forest:
    """Windows in, findings out. One for a type of job; what it learnt outlives generations, as summaries say how far from usual and not how much."""

    def __init__(self, settings: Settings = Settings()) -> None:
        self._settings = settings
        self._summaries = Summaries()
        self._kept: deque[tuple[float, Array, Array]] = deque(maxlen=settings.hold)
        self._rows = 0
        self._since = 0
        self._disturbed: deque[float] = deque(maxlen=256)
        self._model: Model | None = None
        self._grown_at: float | None = None  # time of the last window in it
        self._ranks: tuple[object, ...] = ()
        self._above: NDArray[np.bool_] = np.zeros((settings.within, 0), dtype=bool)
        self._seen = 0
        self._told: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def learnt(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    def describe(self) -> dict[str, Any]:
        """For people: what it was grown from, and where its threshold lies."""
        model = self._model
        return {
            "learnt": model is not None,
            "windows": len(self._kept),
            "rows": model.rows if model else 0,
            "threshold": round(model.threshold, 4) if model else None,
            "grown_at": self._grown_at,
            "features": list(SUMMARIES),
        }

    def disturbed(self, at: float) -> None:
        """There was an incident; nothing is learnt from the minutes around it."""
        self._disturbed.append(at)

    def see(self, window: Window, measured: Measured | None = None) -> list[Finding]:
        """What is odd in this window. `measured` as in `Summaries.see`."""
        summary = self._summaries.see(window, measured)
        return self._judge([summary]) if summary is not None else []

    def see_many(self, windows: Iterable[tuple[Window, Measured | None]]) -> list[Finding]:
        """The same as `see` for one after the other, in batches."""
        found, batch = [], []
        for window, measured in windows:
            summary = self._summaries.see(window, measured)
            if summary is None:
                continue
            batch.append(summary)
            if self._since + len(batch) >= self._settings.refit or self._model is None or len(batch) >= 512:
                found += self._judge(batch)
                batch = []
        return found + self._judge(batch)

    def _judge(self, batch: list[Summary]) -> list[Finding]:
        found: list[Finding] = []
        if not batch:
            return found
        if self._model is not None:
            stacked = np.concatenate([one.apart for one in batch])
            scores = np.split(self._model.scores(stacked), np.cumsum([len(one.ranks) for one in batch])[:-1])
            for summary, score in zip(batch, scores, strict=True):
                found += self._persisting(summary, score)
        for summary in batch:
            self._keep(summary)
        if self._since >= self._settings.refit or self._model is None:
            self._grow()
        return found

    def _keep(self, summary: Summary) -> None:
        there = summary.there
        self._kept.append((summary.at, summary.sizes[there], summary.apart[there]))
        while len(self._kept) * max(1, len(summary.ranks)) > ROWS_MAX and len(self._kept) > self._settings.warm_up // 2:
            self._kept.popleft()
        self._since += 1

    def _grow(self) -> None:
        if len(self._kept) < self._settings.warm_up or (self._model is not None and self._since < self._settings.refit):
            return
        kept = [one for one in self._kept if not any(abs(one[0] - at) < self._settings.quiet for at in self._disturbed)]
        self._since = 0
        if len(kept) >= self._settings.warm_up // 2:
            sizes, apart = (np.concatenate([one[index] for one in kept]) for index in (1, 2))
            self._model = Model.fit(sizes, apart, self._settings)
            self._grown_at = kept[-1][0]

    def _persisting(self, summary: Summary, scores: Array) -> list[Finding]:
        settings = self._settings
        if (summary.generation, *summary.ranks) != self._ranks:
            self._ranks = (summary.generation, *summary.ranks)
            self._above = np.zeros((settings.within, len(summary.ranks)), dtype=bool)
            self._told = np.full(len(summary.ranks), -1_000_000)
        self._seen += 1
        self._above[self._seen % settings.within] = (scores > 1) & summary.there
        odd = np.count_nonzero(self._above, axis=0) >= settings.of
        due = odd & (self._seen - self._told >= settings.repeat)
        if not due.any():
            return []
        self._told[odd] = self._seen
        places = self._leading(summary)
        many = len(places) > max(1.0, settings.share * len(summary.ranks))
        return [self._finding(summary, place, float(scores[place]), places, many=many) for place in (places[:1] if many else places) if odd[place]]

    def _leading(self, summary: Summary) -> list[int]:
        """Ranks that are oddest. Who drifts moves the median that the others are compared with, and these seem to drift a little the other way."""
        assert self._model is not None
        often = np.count_nonzero(self._above, axis=0) >= self._settings.of // 2
        far = np.where(often, self._model.joint.distance(summary.apart), 0.0)
        return [int(place) for place in np.argsort(-far) if far[place] > 0.6 * far.max()]

    def _finding(self, summary: Summary, place: int, score: float, places: list[int], *, many: bool) -> Finding:
        node = summary.nodes[place]
        mates = [index for index, name in enumerate(summary.nodes) if name == node]
        shared = many or bool(summary.busy[place]) or (len(mates) > 1 and set(mates) <= set(places))
        features = self._explain(summary, place)
        named = ", ".join(f"{one.name} {one.value:.4g} (usual {one.baseline:.4g})" for one in features if one.baseline is not None)
        who = f"many of {len(summary.ranks)} ranks" if many else f"rank {summary.ranks[place]}"
        why = "; its node is oddly busy, or all of its ranks are alike" if shared and not many else ""
        return Finding(
            at=summary.at,
            detector="forest",
            kind="joint_drift" if not shared else "shared_drift",
            summary=f"{who}: measurements are oddly combined ({score:.2f} of the threshold), mostly {named}{why}",
            cls=Class.ADVISE if shared else Class.UNKNOWN,
            role=Role.ADVISE if shared else Role.CONFIRM,
            certainty=Certainty.WEAK,
            scope="job" if many else "rank",
            node="" if many else node,
            rank=None if many else summary.ranks[place],
            generation=summary.generation,
            features=features,
        )

    def _explain(self, summary: Summary, place: int) -> tuple[Feature, ...]:
        """The three metrics without whose deviation the score falls most: each set to its usual in turn, all in one batch."""
        assert self._model is not None
        count = summary.apart.shape[1]
        rows = np.repeat(summary.apart[place][None], count + 1, axis=0)
        rows[np.arange(count), np.arange(count)] = self._model.joint.middle
        scores = self._model.scores(rows)
        falls = scores[-1] - scores[:-1] + 1e-6 * np.abs(summary.apart[place])
        found: list[Feature] = []
        for index in np.argsort(-falls):
            metric, raw, usual = METRICS[index], summary.raw[place, index], summary.usual[place, index]
            if len(found) < 3 and math.isfinite(raw) and math.isfinite(usual):
                z = round(float(summary.apart[place, index]), 2)
                found.append(Feature(name=metric.name, value=metric.back(float(raw)), baseline=metric.back(float(usual)), z=z))
        return tuple(found)

    def save(self, path: Path) -> None:
        """The windows that it is grown from, and nothing that has to be run.

        Raises:
            OSError: it cannot be written.
            ValueError: nothing was learnt yet.
        """
        if self._model is None:
            raise ValueError("there is no model to save: too few windows were seen")
        import sklearn

        about = {"format": FORMAT, "schema": schema(), "settings": asdict(self._settings), "numpy": np.__version__, "scikit-learn": sklearn.__version__}
        sizes, apart = (np.concatenate([one[index] for one in self._kept]).astype(np.float32) for index in (1, 2))
        lengths = np.array([len(one[1]) for one in self._kept], dtype=np.int64)
        times = np.array([one[0] for one in self._kept])
        with path.open("wb") as file:
            text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
            np.savez_compressed(file, about=text, lengths=lengths, times=times, sizes=sizes, apart=apart)

    @classmethod
    def load(cls, path: Path) -> Forest:
        """Grown again from what `save` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged, or of other features than these.
        """
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                lengths, times = file["lengths"], file["times"]
                parts = [file[name].astype(float) for name in ("sizes", "apart")]
        except (KeyError, EOFError, zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise ValueError(f"no forest: {error}") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("schema") != schema():
            raise ValueError("a forest of another version, or of other features")
        try:
            forest = cls(Settings(**about["settings"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a forest with settings that are not known: {error}") from error
        rows = [len(part) for part in parts]
        if (
            parts[0].ndim != 2
            or parts[1].shape[1:] != (len(METRICS),)
            or len(lengths) != len(times)
            or lengths.sum() != rows[0]
            or len(set(rows)) > 1
            or not all(np.isfinite(part).all() for part in parts)
        ):
            raise ValueError("a forest whose rows do not belong together")
        ends = np.cumsum(lengths)[:-1]
        forest._kept.extend(zip(times.tolist(), *(np.split(part, ends) for part in parts), strict=True))
        forest._grow()
        return forest


def schema() -> str:
    """Changes with everything that rows mean."""
    return hashlib.sha256(repr((SUMMARIES, METRICS)).encode()).hexdigest()[:16]
