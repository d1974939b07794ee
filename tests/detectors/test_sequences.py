"""What never followed on each other is news; what is usual is learnt from usual sessions alone."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.sequences import Bigrams, Novelty

pytestmark = pytest.mark.timeout(30)

IDS = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(IDS, st.booleans())
def test_nothing_that_was_learnt_is_news(ids: list[str], whole: bool) -> None:
    bigrams = Bigrams()
    bigrams.learn(ids, whole=whole)
    assert bigrams.unseen(ids, whole=whole) == 0


@given(IDS, IDS)
def test_news_are_the_pairs_that_were_not_learnt(learnt: list[str], ids: list[str]) -> None:
    bigrams = Bigrams()
    bigrams.learn(learnt)
    known = set(itertools.pairwise(learnt))
    assert bigrams.unseen(ids) == len(set(itertools.pairwise(ids)) - known)


def test_a_whole_session_that_ends_early_is_news_though_all_its_pairs_are_known() -> None:
    bigrams = Bigrams()
    bigrams.learn("abc", whole=True)
    assert bigrams.unseen("ab") == 0
    assert bigrams.unseen("ab", whole=True) == 1


def test_a_pair_is_new_once() -> None:
    bigrams = Bigrams()
    assert bigrams.add(("a", "b"))
    assert not bigrams.add(("a", "b"))
    assert bigrams.add(("b", "a"))


def test_who_has_learnt_all_that_fits_knows_nothing_new_any_more() -> None:
    bigrams = Bigrams(most=3)
    for second in "abcdefg":
        bigrams.add(("x", second))
    assert len(bigrams) == 3
    assert bigrams.full
    assert bigrams.unseen("yz") == 0


def test_the_next_run_knows_what_was_learnt() -> None:
    bigrams = Bigrams()
    bigrams.learn("abca", whole=True)
    later = Bigrams.load(bigrams.dump())
    assert len(later) == len(bigrams)
    assert later.unseen("abca", whole=True) == 0
    assert later.unseen("ac") == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2, "pairs": []}', '{"version": 1, "pairs": [["a"]]}', '{"version": 1, "pairs": [[1, 2]]}', "[" * 99_999]
)
def test_what_is_no_list_of_pairs_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Bigrams.load(text)


def usual(chance: random.Random) -> list[str]:
    """A block is opened, written by three in any order, closed, and deleted or not."""
    writers = [["alloc", f"recv{one}", "done"] for one in range(3)]
    chance.shuffle(writers)
    return ["open", *(step for writer in writers for step in writer), "close", *(["delete"] if chance.random() < 0.5 else [])]


def test_sessions_that_are_cut_off_repeated_or_out_of_order_are_unusual_and_others_are_not() -> None:
    chance = random.Random(7)
    novelty = Novelty([usual(chance) for _ in range(500)])
    assert novelty.limit == 0
    assert not any(novelty.unusual(usual(chance)) for _ in range(500))
    session = usual(random.Random(1))
    assert novelty.unusual(session[:5])
    assert novelty.unusual(session[:1] + session[4:])
    assert novelty.unusual(["close", *session])
    assert novelty.unusual(session[:7] + session[4:])  # one writer more: no pair of it need be new
    assert novelty.unusual([*session, "never heard of"])
    assert novelty.unusual([])


def test_the_limit_is_what_keeps_to_the_budget_on_sessions_that_were_not_learnt_from() -> None:
    """Every tenth usual session has an id that no other has: that much news is usual, if one in a hundred may be called unusual."""
    chance = random.Random(3)
    sessions = [usual(chance) + ([f"odd{number}"] if number % 10 == 0 else []) for number in range(400)]
    strict = Novelty(sessions, budget=0.01)
    assert strict.limit > 0
    assert not strict.unusual([*usual(chance), "odd new"])
    assert strict.unusual(["close", "close", "open", *usual(chance), "odd new"])
    assert Novelty(sessions, budget=0.2).limit == 0


def test_too_few_sessions_teach_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        Novelty([["a"]] * 4)
