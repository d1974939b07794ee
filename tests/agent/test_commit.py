"""When a checkpoint counts: who writes it, how many must hold it, and what becomes of one that comes too late."""

from __future__ import annotations

import pytest

from elasticd.agent.commit import MAX_PENDING, Committer, enough, last_rank, writes
from elasticd.errors import KVUnavailableError
from elasticd.rendezvous.records import CheckpointRecord, ResumePoint, SnapshotRef
from tests.rendezvous.world import generation

pytestmark = pytest.mark.timeout(30)


def ref(step: int, generation: int = 1, digest: str = "") -> SnapshotRef:
    return SnapshotRef(generation=generation, step=step, digest=digest or f"of-{step}")


class Etcd:
    """Takes commits, or does not answer, or says no."""

    def __init__(self) -> None:
        self.records: list[CheckpointRecord] = []
        self.away = False
        self.refuses = False

    def commit(self, record: CheckpointRecord) -> bool:
        if self.away:
            raise KVUnavailableError("no endpoint answered")
        if not self.refuses:
            self.records.append(record)
        return not self.refuses


def committer(etcd: Etcd, *, nodes: int = 3, copies: int = 2, shared: bool = False) -> Committer:
    made = Committer(etcd.commit, "c/j", copies, shared)
    made.generation(1, nodes)
    return made


@pytest.mark.parametrize(
    ("holders", "nodes", "copies", "shared", "expected"),
    [
        ([], 1, 1, False, False),
        ([], 1, 1, True, False),
        (["a"], 1, 2, False, True),
        (["a"], 2, 2, False, False),
        (["a", "b"], 2, 2, False, True),
        (["a", "b"], 5, 3, False, False),
        (["a"], 5, 1, False, True),
        (["a"], 5, 3, True, True),
    ],
)
def test_a_checkpoint_counts_once_enough_disks_hold_it(holders: list[str], nodes: int, copies: int, shared: bool, expected: bool) -> None:
    assert enough(holders, nodes=nodes, copies=copies, shared=shared) is expected


@pytest.mark.parametrize(
    ("rank", "copies", "shared", "expected"), [(0, 2, False, True), (1, 2, False, True), (2, 2, False, False), (0, 2, True, True), (1, 2, True, False)]
)
def test_as_many_nodes_write_as_there_are_to_be_copies(rank: int, copies: int, shared: bool, expected: bool) -> None:
    assert writes(rank, copies=copies, shared=shared) is expected


def test_the_second_holder_makes_it_count() -> None:
    etcd = Etcd()
    made = committer(etcd)
    made.holds(ref(5), "b")
    assert made.settle() is None
    made.holds(ref(5), "a")
    assert made.settle() == ref(5)
    assert [(record.step, record.holders, record.shared) for record in etcd.records] == [(5, ("a", "b"), False)]
    assert not made.pending


def test_two_nodes_that_hold_different_contents_of_a_step_are_not_two_holders_of_one() -> None:
    made = committer(Etcd())
    made.holds(ref(5, digest="x"), "a")
    made.holds(ref(5, digest="y"), "b")
    assert made.settle() is None


def test_while_etcd_is_away_it_is_kept_and_committed_later() -> None:
    etcd = Etcd()
    made = committer(etcd, copies=1)
    made.holds(ref(5), "a")
    etcd.away = True
    with pytest.raises(KVUnavailableError):
        made.settle()
    assert made.pending
    etcd.away = False
    assert made.settle() == ref(5)


def test_of_several_the_newest_is_committed_and_the_older_ones_are_forgotten() -> None:
    etcd = Etcd()
    made = committer(etcd, copies=1)
    for step in (7, 5, 6):
        made.holds(ref(step), "a")
    assert made.settle() == ref(7)
    assert not made.pending
    made.holds(ref(6), "b")
    assert not made.pending
    assert [record.step for record in etcd.records] == [7]


def test_what_another_generation_wrote_is_never_committed_by_this_one() -> None:
    etcd = Etcd()
    made = committer(etcd, copies=1)
    made.holds(ref(5), "a")
    made.generation(2, 3)
    assert not made.pending
    made.holds(ref(6), "a")
    made.holds(ref(6, generation=3), "a")
    assert made.settle() is None
    assert etcd.records == []


def test_one_that_etcd_refuses_is_not_tried_again() -> None:
    etcd = Etcd()
    etcd.refuses = True
    made = committer(etcd, copies=1)
    made.holds(ref(5), "a")
    assert made.settle() is None
    assert not made.pending


def test_holders_that_never_come_fill_no_memory() -> None:
    made = committer(Etcd())
    for step in range(100):
        made.holds(ref(step + 1), "a")
    made.holds(ref(100 - MAX_PENDING), "b")
    assert made.settle() is None
    made.holds(ref(100), "b")
    assert made.settle() == ref(100)


@pytest.mark.parametrize(
    ("holders", "node", "shared", "expected"),
    [
        ("a", "a", False, 0),
        ("b", "b", False, 1),
        ("b", "b", True, 0),
        ("b", "a", True, 0),
        ("ab", "b", True, 1),
        ("c", "c", False, 1),
        ("cd", "c", False, 1),
        ("cd", "d", False, 3),
        ("cd", "b", False, 1),
        ("zc", "c", False, 1),
    ],
)
def test_of_those_who_hold_the_last_state_somebody_writes_it(holders: str, node: str, shared: bool, expected: int) -> None:
    """By its own rank, or in the place of one who would, if none of the holders would (PROTOCOL 29)."""
    resume = ResumePoint(generation=1, step=4, digest="of-4", holders=tuple(holders))
    record = generation(2, "abcd").record.model_copy(update={"resume": resume})
    rank = last_rank(record, node, copies=2, shared=shared)
    assert rank == expected
    if len(holders) == 1:
        assert writes(last_rank(record, holders, copies=2, shared=shared), copies=2, shared=shared)
