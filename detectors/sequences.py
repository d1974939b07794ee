"""Which kinds of lines follow on each other: two that never did are news, however often each was seen.

Owns: the pairs that were learnt, and how much news makes a session unusual. Must not: know what an id stands for, or read lines.

Of HDFS's block sessions a pair that was never seen tells nearly all that went wrong, an isolation forest over counts of the same ids next to nothing.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Self

PAIRS_MAX: Final = 65_536
"""Pairs that are kept. Who has learnt so many knows nothing unusual any more."""
BEGIN: Final = "<begin>"
END: Final = "<end>"
"""What stands before the first id of a session that is whole, and after its last."""
IDS_MAX: Final = 4096
"""Ids whose number in a session is learnt."""
FOLDS: Final = 5
_ID_MAX: Final = 64
_VERSION: Final = 1

Pair = tuple[str, str]


class Bigrams:
    """Pairs of ids that follow on each other, of one job type.

    Args:
        most: pairs that are kept.
    """

    def __init__(self, *, most: int = PAIRS_MAX) -> None:
        self._most = most
        self._pairs: set[Pair] = set()

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def full(self) -> bool:
        """No more are learnt, and nothing counts as new: what never ends to be new is a matter of the templates."""
        return len(self._pairs) >= self._most

    def learn(self, ids: Iterable[str], *, whole: bool = False) -> None:
        """Take these, in their order, for usual.

        Args:
            ids: of lines, the oldest first.
            whole: they are all of a session: where it begins and ends is learnt too.
        """
        for pair in _pairs(ids, whole=whole):
            self.add(pair)

    def unseen(self, ids: Iterable[str], *, whole: bool = False) -> int:
        """How many of the pairs in these are new; a pair that comes twice counts once."""
        return 0 if self.full else len({pair for pair in _pairs(ids, whole=whole) if pair not in self._pairs})

    def add(self, pair: Pair) -> bool:
        """Learn one pair; whether it was new."""
        if pair in self._pairs or self.full:
            return False
        self._pairs.add(pair)
        return True

    def dump(self) -> str:
        """For the next run, as JSON."""
        return json.dumps({"version": _VERSION, "pairs": sorted(self._pairs)}, separators=(",", ":"))

    @classmethod
    def load(cls, text: str, *, most: int = PAIRS_MAX) -> Self:
        """What was learnt before.

        Raises:
            ValueError: it is none of `dump`'s.
        """
        loaded = cls(most=most)
        try:
            document = json.loads(text)
            if document["version"] != _VERSION:
                raise ValueError(f"pairs of version {document['version']!r:.20}, not {_VERSION}")
            for first, second in itertools.islice(document["pairs"], most):
                if not isinstance(first, str) or not isinstance(second, str):
                    raise ValueError(f"a pair of others than ids: {first!r:.40}, {second!r:.40}")  # noqa: TRY004 - as all that is wrong in it
                loaded._pairs.add((first[:_ID_MAX], second[:_ID_MAX]))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a list of pairs: {error!r:.200}") from None
        return loaded


class Novelty:
    """Tells sessions that are unusual from those that are not: by pairs that are new, and by kinds that come more or less often than they ever did.

    Learnt once, of usual sessions alone. The second is for what is cut off early, or done over and over: all its pairs may be known.

    Args:
        sessions: whole ones, the ids of each in their order; at least `FOLDS`.
        budget: share of usual sessions that may be called unusual.

    Attributes:
        limit: news up to which a session is usual.

    Raises:
        ValueError: too few sessions.
    """

    def __init__(self, sessions: Sequence[Sequence[str]], *, budget: float = 0.01) -> None:
        if len(sessions) < FOLDS:
            raise ValueError(f"{len(sessions)} sessions are too few to learn from; {FOLDS} are the least")
        self.limit: Final = _limit(sessions, budget)
        self._usual = _Usual(sessions)

    def news(self, session: Sequence[str]) -> int:
        """New pairs of a whole session, and kinds that come unusually often or seldom in it."""
        return self._usual.news(session)

    def unusual(self, session: Sequence[str]) -> bool:
        """Whether there is more news in a whole session than in usual ones."""
        return self.news(session) > self.limit


class _Usual:
    """Pairs, and for each id how often it came at least and at most in a session."""

    def __init__(self, sessions: Iterable[Sequence[str]]) -> None:
        self._bigrams = Bigrams()
        self._least: dict[str, int] = {}
        self._most: dict[str, int] = {}
        for number, session in enumerate(sessions):
            self._bigrams.learn(session, whole=True)
            self._count(Counter(session), earlier=number > 0)

    def news(self, session: Sequence[str]) -> int:
        counts = Counter(session)
        often = sum(1 for id_, count in counts.items() if count > self._most.get(id_, 0))
        seldom = sum(1 for id_, least in self._least.items() if counts[id_] < least)
        return self._bigrams.unseen(session, whole=True) + often + seldom

    def _count(self, counts: Counter[str], *, earlier: bool) -> None:
        for id_, count in counts.items():
            if id_ not in self._most and len(self._most) >= IDS_MAX:
                continue
            self._most[id_] = max(count, self._most.get(id_, 0))
            if not earlier:
                self._least[id_] = count
        for id_ in [id_ for id_, least in self._least.items() if counts[id_] < least]:
            self._least[id_] = counts[id_]
            if not counts[id_]:  # it need not come at all
                del self._least[id_]


def _limit(sessions: Sequence[Sequence[str]], budget: float) -> int:
    """The smallest limit that keeps to the budget on sessions that were not learnt from, each fold in its turn.

    Whoever has learnt from all has seen more: the budget is then kept by a margin.
    """
    counts: list[int] = []
    for fold in range(FOLDS):
        usual = _Usual(session for number, session in enumerate(sessions) if number % FOLDS != fold)
        counts += [usual.news(session) for session in sessions[fold::FOLDS]]
    counts.sort(reverse=True)
    return counts[min(int(budget * len(counts)), len(counts) - 1)]


def _pairs(ids: Iterable[str], *, whole: bool) -> Iterator[Pair]:
    return itertools.pairwise(itertools.chain((BEGIN,), ids, (END,)) if whole else ids)
