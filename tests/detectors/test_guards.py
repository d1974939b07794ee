"""Rules without statistics: what is not finite, silent, full, or counted, and that nothing old is held against what came after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.findings import Certainty, Class, Finding, Role
from detectors.guards import DISK_SOON, PATIENCE, SILENT_AFTER, UNSEEN_AFTER, Guards
from detectors.observations import Change, Observation, Phase, Ranks, Reading, Steps
from detectors.signatures import Table

TABLE = Table.load()
GIB = float(1 << 30)


@pytest.fixture
def guards() -> Guards:
    return Guards(TABLE)


def steps(rank: int, at: float, *, node: str = "", step: int = 0, generation: int | None = 1, seconds: float = 1.0, **more: object) -> Steps:
    number = step or int(at)
    return Steps(at=at, rank=rank, first=number, last=number, seconds=seconds, phases={}, node=node or f"n{rank // 2}", generation=generation, **more)  # type: ignore[arg-type]


def change(phase: Phase, at: float, *, node: str = "", rank: int | None = None, world_size: int | None = None) -> Change:
    return Change(at=at, phase=phase, node=node, rank=rank, world_size=world_size)


def trained(guards: Guards, ranks: Iterable[int], began: int, ended: int) -> list[Finding]:
    """All these ranks speak once a second; what the guards said meanwhile."""
    found = []
    for at in range(began, ended):
        for rank in ranks:
            found += guards.see(steps(rank, float(at)))
        found += guards.turn(float(at))
    return found


def all_of(guards: Guards, observations: Iterable[Observation]) -> list[Finding]:
    return [finding for observation in observations for finding in guards.see(observation)]


def kinds(found: Iterable[Finding]) -> list[str]:
    return [finding.kind for finding in found]


# --- numbers -------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_certain_at_the_first_window(guards: Guards) -> None:
    (found,) = guards.see(steps(3, 7.0, step=41, nonfinite={"loss": 2}))
    assert [one.value for one in found.features if one.name == "step"] == [steps(3, 7.0, step=41).first], "from where on the state may be bad"
    assert (found.kind, found.cls, found.role, found.certainty) == ("nonfinite", Class.USER, Role.ROOT, Certainty.CERTAIN)
    assert (found.rank, found.node, found.generation, found.at, found.began) == (3, "n1", 1, 7.0, 6.0)
    assert "loss was not a finite number 2 times in steps 41 to 41" in found.summary
    assert found.features[0].value == 2.0


def test_it_is_told_once_until_it_was_well_again(guards: Guards) -> None:
    bad, well = {"nonfinite": {"loss": 1}, "values": {"loss": None}}, {"values": {"loss": 2.3}}
    assert kinds(all_of(guards, [steps(0, 1.0, **bad), steps(0, 2.0, **bad)])) == ["nonfinite"]
    assert kinds(all_of(guards, [steps(0, 3.0, **well), steps(0, 4.0, **bad)])) == ["nonfinite"]


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("train_loss", {}, Role.ROOT),
        ("grad_norm", {"loss": 1.0}, Role.ROOT),
        ("grad_norm", {"loss": 1.0, "loss_scale": 65536.0}, Role.CONFIRM),  # a scaler lets it overflow now and then
        ("best_accuracy", {}, Role.CONFIRM),
    ],
)
def test_what_is_not_surely_a_fault_only_confirms_one(guards: Guards, name: str, values: Mapping[str, float], role: Role) -> None:
    (found,) = guards.see(steps(0, 1.0, nonfinite={name: 1}, values=values))
    assert found.role is role


def test_a_job_that_begins_anew_is_told_of_anew(guards: Guards) -> None:
    bad = {"nonfinite": {"loss": 1}}
    assert kinds(all_of(guards, [steps(0, 1.0, **bad), change(Phase.RESCALE, 2.0), steps(0, 9.0, **bad)])) == ["nonfinite"] * 2


def test_finite_values_are_nothing(guards: Guards) -> None:
    assert all_of(guards, [steps(rank, at, values={"loss": 1e9}, nonfinite={"loss": 0}) for at in (1.0, 2.0) for rank in range(4)]) == []


def scales(*values: float) -> list[Steps]:
    return [steps(0, float(at), values={"loss_scale": value}) for at, value in enumerate(values)]


def test_a_loss_scale_that_falls_to_nothing_is_told_once(guards: Guards) -> None:
    found = all_of(guards, scales(*(65536.0 / 2**halved for halved in range(20))))
    assert kinds(found) == ["loss_scale_collapsed"]
    assert found[0].features[0].baseline == 65536.0


@pytest.mark.parametrize(
    "values",
    [
        [2.0**32 / 2**halved for halved in range(18)],  # a scale that began far too high, as frameworks do
        [1.0] * 20,  # bf16: there is none
        [65536.0, 32768.0, 65536.0, 16384.0, 32768.0],
    ],
)
def test_a_loss_scale_that_finds_its_level_is_nothing(guards: Guards, values: list[float]) -> None:
    assert all_of(guards, scales(*values)) == []


# --- silence -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_falls_silent_while_others_train_is_dead(guards: Guards) -> None:
    assert trained(guards, range(4), 0, 20) == []
    found = trained(guards, [0, 2, 3], 20, 80)
    assert [(finding.kind, finding.rank, finding.node, finding.scope) for finding in found] == [("dead_rank", 1, "n0", "rank")]
    assert found[0].certainty is Certainty.CERTAIN
    assert found[0].role is Role.ROOT
    assert found[0].began == 19.0
    assert found[0].at == 19.0 + SILENT_AFTER


def test_a_rank_that_speaks_again_may_die_again(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    assert kinds(trained(guards, [0, 2, 3], 20, 80)) == ["dead_rank"]
    assert trained(guards, range(4), 80, 100) == []
    assert kinds(trained(guards, [0, 2, 3], 100, 200)) == ["dead_rank"]


def test_where_nobody_goes_on_the_job_stalls_and_no_rank_is_blamed(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(steps(2, 25.0, step=999))  # its window ended later than those of the others
    found = [finding for at in range(20, 200) for finding in guards.turn(float(at))]
    assert [(finding.kind, finding.scope, finding.rank) for finding in found] == [("stalled", "job", None)]
    assert found[0].began == 19.0
    assert found[0].at == 19.0 + SILENT_AFTER
    assert "lowest last step, 19, is that of rank 0" in found[0].summary


def test_a_node_of_which_no_rank_speaks_is_one_finding(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    found = trained(guards, [0, 1], 20, 80)
    assert [(finding.kind, finding.node, finding.scope) for finding in found] == [("silent_node", "n1", "node")]


def test_a_job_of_one_rank_that_hangs_is_seen(guards: Guards) -> None:
    trained(guards, [0], 0, 20)
    assert kinds(guards.turn(19.0 + SILENT_AFTER)) == ["stalled"]


def test_who_speaks_rarely_is_waited_for_longer(guards: Guards) -> None:
    for at in range(0, 300, 20):
        for rank in range(2):
            guards.see(steps(rank, float(at), seconds=20.0))
    guards.see(steps(1, 300.0, seconds=20.0))
    assert guards.turn(300.0 + 150.0) == []
    assert guards.turn(280.0 + 201.0) != []


def test_the_word_of_rank_0_that_all_took_part_counts(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    found = []
    for at in range(20, 100):
        found += all_of(guards, [steps(0, float(at)), Ranks(at=float(at), step=at, ranks=({}, {}, {}, {}), node="n0", generation=1)])
        found += guards.turn(float(at))
    assert found == []


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RESCALE, Phase.STOPPED])
def test_what_was_pending_is_forgotten_when_a_job_begins_anew(guards: Guards, phase: Phase) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(phase, 21.0))
    assert [finding for at in range(21, 4000, 10) for finding in guards.turn(float(at))] == []


def test_ranks_of_before_are_not_missed_when_fewer_train_again(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    all_of(guards, [change(Phase.RESCALE, 20.0), change(Phase.TRAIN, 25.0)])
    assert trained(guards, [0, 1], 25, 100) == []


def test_what_is_said_of_a_job_is_said_of_its_nodes(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    all_of(guards, [change(Phase.CHECKPOINT, 20.0, node="n0"), change(Phase.CHECKPOINT, 20.0, node="n1"), change(Phase.TRAIN, 21.0)])
    assert [finding.role for finding in guards.turn(21.0 + SILENT_AFTER)] == [Role.ROOT]


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RESCALE, Phase.STOPPED])
def test_only_the_node_that_stops_is_forgotten(guards: Guards, phase: Phase) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(phase, 20.0, node="n1"))
    assert trained(guards, [0, 1], 20, 100) == []
    assert kinds(guards.turn(99.0 + SILENT_AFTER)) == ["stalled"]


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVAL])
def test_a_checkpoint_or_an_evaluation_is_waited_for(guards: Guards, phase: Phase) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(phase, 20.0))
    assert [finding for at in range(20, 600) for finding in guards.turn(float(at))] == []
    found = guards.turn(20.0 + PATIENCE)
    assert [(finding.kind, finding.role) for finding in found] == [("stalled", Role.CONFIRM)]


def test_a_checkpoint_that_began_before_a_restart_is_never_held_against_the_job(guards: Guards) -> None:
    """A stale beginning of a checkpoint once killed another system's job every half hour, for ever."""
    trained(guards, range(4), 0, 20)
    guards.see(change(Phase.CHECKPOINT, 20.0))
    guards.see(change(Phase.RESCALE, 25.0))
    assert trained(guards, range(4), 30, 30 + 2 * int(PATIENCE)) == []


def test_steps_after_a_checkpoint_began_say_that_training_goes_on(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(Phase.CHECKPOINT, 20.0))
    assert trained(guards, range(4), 22, 40) == []
    assert kinds(trained(guards, [0, 2, 3], 40, 100)) == ["dead_rank"]


def test_a_late_word_of_before_does_not_make_a_job_train(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(Phase.STOPPED, 20.0))
    for late in (20.1, 20.2, 20.3, 20.4):
        for rank in range(4):
            guards.see(steps(rank, late))
    assert [finding for at in range(20, 200) for finding in guards.turn(float(at))] == []


def test_ranks_beyond_a_smaller_world_are_forgotten(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(Phase.TRAIN, 20.0, world_size=2))
    assert trained(guards, [0, 1], 20, 100) == []


def test_a_rank_that_says_that_it_stops_is_not_missed(guards: Guards) -> None:
    trained(guards, range(4), 0, 20)
    guards.see(change(Phase.STOPPED, 20.0, rank=3))
    assert trained(guards, [0, 1, 2], 20, 100) == []


# --- readings ------------------------------------------------------------------------------------------------------------


def readings(values: Iterable[Mapping[str, float]], *, node: str = "n0", gpu: int | None = 0, every: float = 10.0) -> list[Reading]:
    return [Reading(at=every * index, values=dict(each), node=node, gpu=gpu) for index, each in enumerate(values)]


def test_an_error_that_ecc_cannot_correct_is_the_hardwares(guards: Guards) -> None:
    (found,) = all_of(guards, readings({"ecc_uncorrected": value} for value in (3.0, 3.0, 5.0, 5.0)))
    assert (found.kind, found.cls, found.role, found.scope, found.node) == ("ecc_uncorrected", Class.HARDWARE, Role.ROOT, "node", "n0")
    assert (found.features[0].value, found.features[0].baseline) == (5.0, 3.0)
    assert found.summary.startswith("2 ECC errors")
    assert "GPU 0" in found.summary


def test_what_was_counted_before_we_came_is_no_news(guards: Guards) -> None:
    assert all_of(guards, readings([{"ecc_uncorrected": 7.0, "remapped_uncorrectable": 2.0, "xids": 4.0, "xid": 31.0, "oom_kills": 2.0}] * 3)) == []


def test_a_counter_that_began_again_is_no_fall_but_what_it_counts_is_new(guards: Guards) -> None:
    assert all_of(guards, readings({"ecc_uncorrected": value} for value in (7.0, 0.0, 0.0))) == []
    assert kinds(all_of(guards, readings([{"ecc_uncorrected": 1.0}]))) == ["ecc_uncorrected"]


def test_a_number_that_stands_for_unknown_counts_nothing(guards: Guards) -> None:
    assert all_of(guards, readings({"ecc_uncorrected": value} for value in (0.0, 9.223372036854775e18, float("nan"), 0.0))) == []


def test_a_flag_counts_from_the_first_reading_on_and_once(guards: Guards) -> None:
    assert kinds(all_of(guards, readings({"remap_failed": value} for value in (1.0, 1.0, 1.0)))) == ["remap_failed"]


def test_corrected_errors_are_told_when_there_are_many(guards: Guards) -> None:
    few = all_of(guards, readings({"ecc_corrected": 10.0 * index} for index in range(90)))
    assert few == []
    many = all_of(Guards(TABLE), readings({"ecc_corrected": 100.0 * index} for index in range(90)))
    assert [(finding.kind, finding.role) for finding in many] == [("ecc_corrected", Role.ADVISE)]


def test_an_xid_that_a_monitor_counted_means_what_the_table_says(guards: Guards) -> None:
    (found,) = all_of(guards, readings([{"xids": 0.0, "xid": 0.0}, {"xids": 1.0, "xid": 79.0}, {"xids": 1.0, "xid": 79.0}]))
    assert (found.kind, found.cls, found.role) == ("xid_79", Class.HARDWARE, Role.ROOT)
    (again,) = all_of(guards, readings([{"xids": 2.0, "xid": 79.0}]))
    assert again.kind == "xid_79"


def test_an_xid_of_which_only_the_last_number_is_shown_is_seen_when_it_changes(guards: Guards) -> None:
    found = all_of(guards, readings([{"xid": 0.0}, {"xid": 13.0}, {"xid": 13.0}, {"xid": 4711.0}]))
    assert [(finding.kind, finding.cls) for finding in found] == [("xid_13", Class.USER), ("xid_4711", Class.UNKNOWN)]


def volume(free: float, size: float = 1000.0 * GIB, name: str = "checkpoints") -> dict[str, float]:
    return {f"disk_free_bytes.{name}": free, f"disk_size_bytes.{name}": size}


def test_a_disk_that_is_full_is_told_with_what_is_left(guards: Guards) -> None:
    found = all_of(guards, readings([volume(500.0 * GIB), volume(1.0 * GIB), volume(0.5 * GIB)], gpu=None))
    assert [(finding.kind, finding.cls, finding.role) for finding in found] == [("disk_full", Class.USER, Role.CONFIRM)]
    assert "1.0 GiB of checkpoints (0.1 %) are free on node n0" in found[0].summary


def test_a_disk_with_little_left_is_advice_until_there_is_room_again(guards: Guards) -> None:
    found = all_of(guards, readings([volume(free * GIB) for free in (60.0, 40.0, 55.0, 40.0, 200.0, 40.0)], gpu=None))
    assert [(finding.kind, finding.role) for finding in found] == [("disk_low", Role.ADVISE)] * 2


def test_a_small_volume_with_room_is_not_full(guards: Guards) -> None:
    assert all_of(guards, readings([volume(1.0 * GIB, 1.5 * GIB)] * 5, gpu=None)) == []


def test_a_disk_that_will_be_full_within_half_an_hour_is_told_before_it_is(guards: Guards) -> None:
    found = all_of(guards, readings([volume((500.0 - 10.0 * index) * GIB) for index in range(45)], gpu=None, every=30.0))
    assert found[0].kind == "disk_filling"
    assert found[0].at <= 500.0 / 10.0 * 30.0 - DISK_SOON / 2
    assert "full in" in found[0].summary


def test_the_writing_of_one_checkpoint_is_no_trend(guards: Guards) -> None:
    free = [500.0, 500.0, 500.0, 500.0, 450.0, 400.0, 350.0, *[350.0] * 20, 300.0, 250.0, 200.0, *[200.0] * 20]
    assert all_of(guards, readings([volume(left * GIB) for left in free], gpu=None, every=30.0)) == []


def test_inodes_run_out_like_bytes_and_what_counts_none_has_enough(guards: Guards) -> None:
    names = ("disk_free_inodes.scratch", "disk_inodes.scratch")
    found = all_of(guards, readings([dict(zip(names, (9e5, 1e6), strict=True)), dict(zip(names, (100.0, 1e6), strict=True))], gpu=None))
    assert kinds(found) == ["disk_full"]
    assert "100 inodes" in found[0].summary
    assert all_of(Guards(TABLE), readings([dict.fromkeys(names, 0.0)] * 3, gpu=None)) == []


def monitored(guards: Guards, gpus: Iterable[int | None], nodes: Iterable[str], began: int, ended: int) -> Iterator[Finding]:
    gpus, nodes = list(gpus), list(nodes)
    for at in range(began, ended, 10):
        for node in nodes:
            for gpu in gpus:
                yield from guards.see(Reading(at=float(at), values={"temperature_c": 60.0}, node=node, gpu=gpu))
        yield from guards.turn(float(at))


def test_a_gpu_of_which_no_readings_come_any_more_is_told(guards: Guards) -> None:
    assert list(monitored(guards, [None, 0, 1], ["n0"], 0, 100)) == []
    found = list(monitored(guards, [None, 0], ["n0"], 100, 400))
    assert [(finding.kind, finding.node, finding.cls, finding.role) for finding in found] == [("gpu_unseen", "n0", Class.HARDWARE, Role.CONFIRM)]
    assert "GPU 1" in found[0].summary
    assert found[0].at <= 100.0 + 10.0 * 10.0 + UNSEEN_AFTER


def test_a_node_of_which_no_readings_come_any_more_is_told_once_and_not_by_gpu(guards: Guards) -> None:
    assert list(monitored(guards, [None, 0, 1], ["n0", "n1"], 0, 100)) == []
    assert [(finding.kind, finding.node) for finding in monitored(guards, [None, 0, 1], ["n0"], 100, 400)] == [("node_unseen", "n1")]


def test_where_no_readings_come_at_all_nobody_is_blamed(guards: Guards) -> None:
    assert list(monitored(guards, [None, 0, 1], ["n0", "n1"], 0, 100)) == []
    assert [finding for at in range(100, 4000, 10) for finding in guards.turn(float(at))] == []


# --- whatever comes ------------------------------------------------------------------------------------------------------


def test_what_is_remembered_stays_bounded(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detectors.guards.RANKS_MAX", 100)
    for number in range(300):
        guards.see(steps(number, 1.0, node=f"n{number}", nonfinite={"loss": 1}, values={"loss_scale": 1.0}))
        guards.see(change(Phase.TRAIN, 1.0, node=f"n{number}"))
        guards.see(Reading(at=1.0, values={"xid": 0.0, "ecc_uncorrected": 0.0, **volume(1.0, name=f"v{number}")}, node=f"n{number}"))
    kept = [guards._silence._ranks, guards._silence._phases, guards._numbers._told, guards._numbers._scales]
    kept += [guards._readings._gaps, guards._readings._counters, guards._readings._xid, guards._readings._volumes]
    assert [len(each) for each in kept] == [100] * len(kept)


TIMES = st.floats(min_value=-1e9, max_value=1e11)
OBSERVATIONS = st.one_of(
    st.builds(steps, st.integers(0, 5), TIMES, nonfinite=st.dictionaries(st.sampled_from(["loss", "x"]), st.integers(0, 3))),
    st.builds(change, st.sampled_from(Phase), TIMES, node=st.sampled_from(["", "n0", "n1"]), world_size=st.one_of(st.none(), st.integers(0, 5))),
    st.builds(
        Reading,
        at=TIMES,
        node=st.sampled_from(["n0", "n1"]),
        gpu=st.one_of(st.none(), st.integers(0, 2)),
        values=st.dictionaries(
            st.sampled_from(["ecc_uncorrected", "xid", "xids", "remap_failed", "disk_free_bytes.a", "disk_size_bytes.a", "ecc_corrected"]), st.floats()
        ),
    ),
    st.builds(Ranks, at=TIMES, step=st.integers(0, 5), ranks=st.just(({}, {})), generation=st.just(1)),
)


@given(st.lists(st.tuples(OBSERVATIONS, TIMES), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_order_of_any_observations_is_survived(sequence: list[tuple[Observation, float]]) -> None:
    guards = Guards(TABLE)
    for observation, now in sequence:
        for finding in [*guards.see(observation), *guards.turn(now)]:
            assert finding.detector == "guard"
            assert finding.summary
