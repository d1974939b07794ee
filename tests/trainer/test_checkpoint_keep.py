"""Which checkpoints stay: the last, those of every so many steps, the best, and whatever is protected; nothing before a newer one is whole."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.states import make_state, newest
from trainer.checkpoint import Best, Found, Keep, make_room, name_of, retain, scan, set_aside
from trainer.checkpoint.keep import choose
from trainer.errors import SetupError

pytestmark = pytest.mark.timeout(60)

Order = tuple[int, int]
ORDERS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), unique=True, max_size=25)
NO_METRICS: dict[Order, dict[str, float]] = {}


def found(orders: list[Order]) -> list[Found]:
    return [Found(path=Path(name_of(*order)), generation=order[0], step=order[1]) for order in sorted(orders, reverse=True)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def fill(root: Path, *orders: Order, **losses: float) -> None:
    for generation, step in orders:
        loss = losses.get(f"s{step}")
        make_state(generation, step, metrics={} if loss is None else {"loss": loss}).write(root)


def orders(root: Path) -> list[Order]:
    return [item.order for item in reversed(scan(root))]


def damage(root: Path, order: Order) -> None:
    data = root / name_of(*order) / "state.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


class TestChoice:
    @pytest.mark.parametrize(
        ("there", "keep", "kept"),
        [
            ([(1, 1), (1, 2), (1, 3)], Keep(last=1), [(1, 3)]),
            ([(1, 1), (1, 2), (1, 3)], Keep(last=2), [(1, 2), (1, 3)]),
            ([(1, 1)], Keep(last=5), [(1, 1)]),
            # as numbers: step 10 is after step 9, generation 10 after generation 9
            ([(1, 9), (1, 10)], Keep(last=1), [(1, 10)]),
            ([(9, 5), (10, 1)], Keep(last=1), [(10, 1)]),
            # a later generation is newer, whatever its step
            ([(1, 50), (2, 40)], Keep(last=1), [(2, 40)]),
            ([(1, 10), (1, 20), (1, 30), (1, 40)], Keep(last=1, every=20), [(1, 20), (1, 40)]),
            # the first at or after each multiple, where no checkpoint falls on it
            ([(1, 7), (1, 23), (1, 31), (1, 44), (1, 59), (1, 61)], Keep(last=1, every=20), [(1, 23), (1, 44), (1, 61)]),
            # generation 2 began again behind step 23 of generation 1, so that is not on the way to what there is now
            ([(1, 8), (1, 23), (2, 21), (2, 30)], Keep(last=1, every=20), [(2, 21), (2, 30)]),
            ([], Keep(last=1, every=5), []),
        ],
    )
    def test_by_count_and_steps(self, there: list[Order], keep: Keep, kept: list[Order]) -> None:
        assert sorted(choose(found(there), keep, NO_METRICS)) == kept

    @pytest.mark.parametrize(
        ("best", "kept"),
        [
            (Best(metric="loss"), [(1, 2)]),
            (Best(metric="loss", mode="max"), [(1, 4)]),
            (Best(metric="loss", count=2), [(1, 2), (1, 3)]),
            (Best(metric="accuracy", mode="max"), [(1, 5)]),  # of two alike the newer
            (Best(metric="unheard of"), []),
        ],
    )
    def test_by_metric(self, best: Best, kept: list[Order]) -> None:
        metrics = {(1, 1): {"loss": 3.0}, (1, 2): {"loss": 1.0}, (1, 3): {"loss": 2.0, "accuracy": 0.5}, (1, 4): {"loss": 9.0}, (1, 5): {"accuracy": 0.5}}
        there = found([*metrics, (1, 6)])
        assert choose(there, Keep(last=1, best=(best,)), metrics) == {(1, 6), *kept}

    @given(ORDERS, st.integers(1, 5), st.integers(0, 20))
    def test_choosing_again_from_what_is_kept_keeps_all_of_it(self, there: list[Order], last: int, every: int) -> None:
        keep = Keep(last=last, every=every)
        kept = choose(found(there), keep, NO_METRICS)
        assert choose(found(list(kept)), keep, NO_METRICS) == kept
        assert set(sorted(there)[-last:]) <= kept <= set(there)

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20))
    def test_removing_at_each_step_keeps_what_removing_at_the_end_would(self, strides: list[int], every: int) -> None:
        keep, kept, step, all_steps = Keep(last=1, every=every), set[Order](), 0, list[Order]()
        for stride in strides:
            step += stride
            all_steps.append((1, step))
            kept = choose(found([*kept, (1, step)]), keep, NO_METRICS)
        assert kept == choose(found(all_steps), keep, NO_METRICS)

    @pytest.mark.parametrize(
        "wrong", [{"last": 0}, {"last": -1}, {"every": -1}, {"best": (Best(metric="x", count=0),)}, {"best": (Best(metric="x", mode="least"),)}]
    )  # type: ignore[arg-type]
    def test_a_wish_that_keeps_nothing_or_means_nothing_is_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(SetupError):
            Keep(**wrong)  # type: ignore[arg-type]


class TestRetaining:
    def test_what_is_not_kept_goes_whole(self, root: Path) -> None:
        fill(root, *[(1, step) for step in (8, 9, 10, 11)])
        assert [item.order for item in retain(root, Keep(last=2), verified=(1, 11))] == [(1, 9), (1, 8)]
        assert sorted(path.name for path in root.iterdir()) == [name_of(1, 10), name_of(1, 11)]

    def test_the_best_and_the_committed_stay(self, root: Path) -> None:
        fill(root, *[(1, step) for step in range(1, 7)], s2=0.5, s4=0.7)
        retain(root, Keep(last=1, best=(Best(metric="loss"),)), protect=[(1, 3)], verified=(1, 6))
        assert orders(root) == [(1, 2), (1, 3), (1, 6)]

    def test_nothing_goes_for_a_newer_one_that_is_damaged(self, root: Path) -> None:
        fill(root, (1, 1), (1, 2), (1, 3))
        damage(root, (1, 3))
        assert [item.order for item in retain(root, Keep(last=1))] == [(1, 1)]
        assert newest(root) == ((1, 2), [])

    def test_nothing_goes_where_nothing_is_whole(self, root: Path) -> None:
        fill(root, (1, 1), (1, 2))
        damage(root, (1, 1))
        damage(root, (1, 2))
        assert retain(root, Keep(last=1)) == []
        assert len(list(root.iterdir())) == 2

    def test_what_is_newer_than_what_was_verified_stays_and_does_not_count(self, root: Path) -> None:
        fill(root, *[(1, step) for step in (1, 2, 3, 4)])
        retain(root, Keep(last=2), verified=(1, 3))
        assert orders(root) == [(1, 2), (1, 3), (1, 4)]

    def test_who_is_of_an_earlier_generation_removes_nothing(self, root: Path) -> None:
        fill(root, (1, 1), (1, 2), (1, 3), (2, 2))
        assert retain(root, Keep(last=1), verified=(1, 3)) == []
        assert orders(root) == [(1, 1), (1, 2), (1, 3), (2, 2)]

    def test_of_those_set_aside_the_newest_stays(self, root: Path) -> None:
        import os

        fill(root, (1, 1), (1, 2), (1, 3), (2, 9))
        for at, order in enumerate([(1, 1), (1, 2), (2, 9)]):
            path = set_aside(root / name_of(*order), "for a test")
            os.utime(path, (at, at))
        retain(root, Keep(last=1), verified=(1, 3))
        assert sorted(path.name for path in root.iterdir()) == [f"{name_of(1, 2)}.bad", name_of(1, 3), f"{name_of(2, 9)}.bad"]

    def test_a_directory_that_refuses_is_told(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(root, (1, 1), (1, 2))

        def refuse(_self: Path, _target: Path) -> Path:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(PermissionError, match="Permission denied"):
            retain(root, Keep(last=1), verified=(1, 2))
        monkeypatch.undo()
        assert newest(root) == ((1, 2), [])


class TestMakingRoom:
    def test_first_go_drafts_of_the_dead_then_what_was_set_aside_then_the_oldest(self, root: Path) -> None:
        fill(root, (1, 1), (1, 2), (1, 3), (1, 4))
        set_aside(root / name_of(1, 1), "for a test")
        (root / f"{name_of(1, 9)}.0000.tmp").mkdir()
        gone = [make_room(root, Keep(last=3), generation=1, wanted=0) for _ in range(5)]
        assert [path and path.name for path in gone] == [f"{name_of(1, 9)}.0000.tmp", f"{name_of(1, 1)}.bad", name_of(1, 2), name_of(1, 3), None]
        assert newest(root) == ((1, 4), [])

    def test_the_committed_the_best_and_the_newest_whole_one_never_go(self, root: Path) -> None:
        fill(root, *[(1, step) for step in range(1, 7)], s2=0.1, s5=0.9)
        damage(root, (1, 6))
        keep = Keep(last=1, best=(Best(metric="loss"),))
        while make_room(root, keep, [(1, 3)], generation=1, wanted=0) is not None:
            pass
        assert orders(root) == [(1, 2), (1, 3), (1, 5)]

    def test_nothing_goes_if_it_would_not_be_enough(self, root: Path) -> None:
        fill(root, (1, 1), (1, 2), (1, 3))
        assert make_room(root, Keep(last=1), generation=1, wanted=shutil.disk_usage(root).free + 10**9) is None
        assert orders(root) == [(1, 1), (1, 2), (1, 3)]

    def test_those_of_a_later_generation_never_go(self, root: Path) -> None:
        fill(root, (2, 1), (2, 2), (3, 1))
        set_aside(root / name_of(3, 1), "for a test")
        assert make_room(root, Keep(), generation=1, wanted=0) is None

    def test_whatever_there_is_the_newest_whole_one_survives_any_demand(self, root: Path) -> None:
        chosen = random.Random(5)
        for _round in range(5):
            there = sorted({(chosen.randint(1, 3), chosen.randint(1, 30)) for _ in range(5)})
            fill(root, *there)
            bad = [order for order in there if chosen.random() < 0.4]
            for order in bad:
                damage(root, order)
            sound = [order for order in there if order not in bad]
            while make_room(root, Keep(last=1), generation=3, wanted=0) is not None:
                pass
            assert newest(root)[0] == (max(sound) if sound else None)
            shutil.rmtree(root)
