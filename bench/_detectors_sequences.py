"""How well sessions of events are judged by what follows on what, and what a line costs until its kind is known.

Owns: HDFS's block sessions as DeepLog published them (DATA/hdfs-sessions; github.com/wuyifan18/DeepLog, MIT), and the lines of DATA/bigscience-logs.
Must not: learn from a session that is known to be abnormal.

Protocol: half of `hdfs_train` is learnt from, the other half and all of `hdfs_test_abnormal` are judged. The first run takes the first half, the others
a random one. `hdfs_test_normal` is not among the data, so that F1 is given for the share of abnormal sessions that all of HDFS has.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bench._common import Row, progress
from detectors.observations import Stream
from detectors.sequences import Bigrams, Novelty
from detectors.sources import plain_line
from detectors.templates import Templates

if TYPE_CHECKING:
    from pathlib import Path

ABNORMAL: Final = 0.0293
"""Share of HDFS's sessions that are abnormal: 16838 of 575061."""
RUNS: Final = 7
QUICK_RUNS: Final = 3
FOREST_TREES: Final = 100
FOREST_QUANTILE: Final = 0.99
LINES: Final = 20_000

Session = Sequence[str]
Judge = Callable[[Sequence[Session]], Iterable[bool]]


def rows(data: Path | None, quick: bool) -> list[Row]:
    """HDFS, if DATA is there; lines, ours in any case."""
    found: list[Row] = []
    if data is None or not (data / "hdfs-sessions").is_dir():
        progress("hdfs_*: left out, needs --data DIR with hdfs-sessions/ in it")
    else:
        found += _hdfs(data / "hdfs-sessions", QUICK_RUNS if quick else RUNS)
    found += _lines(data, 3 if quick else 9)
    return found


# --- sessions ------------------------------------------------------------------------------------------------------------


def _hdfs(folder: Path, runs: int) -> list[Row]:
    usual, abnormal = _read(folder / "hdfs_train"), _read(folder / "hdfs_test_abnormal")
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in _JUDGES}
    for run in range(runs):
        order = random.Random(run).sample(usual, len(usual)) if run else usual
        train, test = order[: len(order) // 2], order[len(order) // 2 :]
        for name, learn in _JUDGES.items():
            judge = learn(train)
            results[name].append((_share(judge, test), _share(judge, abnormal)))
    return [_row(name, pairs) for name, pairs in results.items()]


def _row(peer: str, pairs: Sequence[tuple[float, float]]) -> Row:
    false, recall = pairs[0]
    note = f"learnt from the first half: F1 {_f1(false, recall):.3f}, recall {recall:.3f}, of usual sessions {false:.2%} called abnormal"
    return Row.of("hdfs_f1", peer, [_f1(*pair) for pair in pairs], unit="", note=note)


def _read(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split()) for line in path.read_text().splitlines() if line.strip()]


def _share(judge: Judge, sessions: Sequence[tuple[str, ...]]) -> float:
    """Of the sessions, those that are called abnormal; each that comes again is judged once."""
    counts = Counter(sessions)
    return sum(count for count, odd in zip(counts.values(), judge(list(counts)), strict=True) if odd) / len(sessions)


def _f1(false_share: float, recall: float) -> float:
    hits, false = recall * ABNORMAL, false_share * (1 - ABNORMAL)
    return 2 * hits / (hits + false + ABNORMAL)


def _ours(train: Sequence[Session]) -> Judge:
    novelty = Novelty(train)
    return lambda sessions: map(novelty.unusual, sessions)


def _pairs_alone(train: Sequence[Session]) -> Judge:
    bigrams = Bigrams()
    for session in train:
        bigrams.learn(session, whole=True)
    return lambda sessions: (bigrams.unseen(session, whole=True) > 0 for session in sessions)


def _unseen_id(train: Sequence[Session]) -> Judge:
    known = {one for session in train for one in session}
    return lambda sessions: (not known.issuperset(session) for session in sessions)


def _forest(train: Sequence[Session]) -> Judge:
    """A forest over how often each event comes, with a quantile of its training scores for a limit."""
    import numpy as np
    from sklearn.ensemble import IsolationForest

    ids = {one: column for column, one in enumerate(sorted({one for session in train for one in session}))}

    def matrix(sessions: Sequence[Session]) -> np.ndarray:
        counted = np.zeros((len(sessions), len(ids) + 1))  # the last column: events that are unknown
        for row, session in enumerate(sessions):
            for one in session:
                counted[row, ids.get(one, len(ids))] += 1
        return counted

    forest = IsolationForest(n_estimators=FOREST_TREES, random_state=0).fit(matrix(train))
    limit = np.quantile(-forest.score_samples(matrix(train)), FOREST_QUANTILE)
    return lambda sessions: (-forest.score_samples(matrix(sessions)) > limit).tolist()


_JUDGES: Final[Mapping[str, Callable[[Sequence[Session]], Judge]]] = {
    "elasticd": _ours,
    "unseen-pair": _pairs_alone,
    "unseen-id": _unseen_id,
    "isolation-forest": _forest,
}


# --- lines ---------------------------------------------------------------------------------------------------------------


def _lines(data: Path | None, runs: int) -> list[Row]:
    """Processor time of a line from its bytes to its kind; of a flood of lines that are all different too."""
    chance = random.Random(1)
    progress_lines = [f"step {i} loss {9 / (i + 1):.3f} lr {1e-3 / (i + 1):.2e} tokens/s {chance.random() * 1e5:.1f}".encode() for i in range(LINES)]
    flood = ["".join(chance.choices("abcdefghij klmnopqrst", k=85)).encode() for _ in range(LINES)]
    found = [_cost("line_us", progress_lines, runs, "a line of progress"), _cost("flood_line_us", flood, runs, "85 random letters, none twice")]
    logs = sorted((data / "bigscience-logs").glob("meg_gpt2*.out")) if data else []
    if not logs:
        progress("line_us_real, new_kinds_per_1000: left out, need --data DIR with bigscience-logs/ in it")
        return found
    lines = [line for log in logs for line in log.read_bytes().splitlines()]
    found.append(_cost("line_us_real", lines, runs, f"{len(lines)} lines of three Megatron jobs of bigscience"))
    return [*found, _new_kinds([log.read_bytes().splitlines() for log in logs])]


def _cost(name: str, lines: Sequence[bytes], runs: int, note: str) -> Row:
    costs: list[float | None] = []
    for _ in range(runs):
        templates = Templates()
        began = time.process_time()
        for raw in lines:
            templates.see(plain_line(raw, at=0.0, stream=Stream.OUT, rank=0))
        costs.append((time.process_time() - began) / len(lines) * 1e6)
    return Row.of(name, "elasticd", costs, unit="us", note=note)


def _new_kinds(logs: Sequence[Sequence[bytes]]) -> Row:
    """Of lines of a job, those of a kind that no earlier job of its type had."""
    templates = Templates()
    shares: list[float | None] = []
    for log in logs:
        first = sum(templates.see(plain_line(raw, at=0.0, stream=Stream.OUT)).first for raw in log)
        shares.append(first / len(log) * 1000)
    note = f"each job after the first, in turn; that one {shares[0]:.0f}"
    return Row.of("new_kinds_per_1000", "elasticd", shares[1:], unit="", note=note)
