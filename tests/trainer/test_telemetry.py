"""What a session tells of its steps: where time goes, whom ranks wait for, what is lost and what is not, and that training does not notice."""

from __future__ import annotations

import json
import math
import signal
import socket
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds import run, world
from tests.trainer import _agents as agents
from tests.trainer import _measured as measured
from tests.trainer._agents import Agent
from trainer.agent import AgentKeeper
from trainer.compare import EVERY_S, spacing
from trainer.errors import EXIT_STOPPED
from trainer.settings import Settings
from trainer.tally import Stepped, Tallies, Tally
from trainer.wire import channel
from trainer.wire.window import PHASES, STEP_BOUNDS, VALUES_MAX, Spread, Window

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
SLOW = 0.1
"""Seconds that a slow rank takes longer."""


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    path = folder / measured.FILE
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in found if line.pop("event") == event]


def windows(folder: Path, rank: int = 0) -> list[Window]:
    """Those of one rank, in their order; each is one that the other side would take."""
    return [Window.from_dict(line) for line in lines(folder, "window") if line["rank"] == rank]


def numbers(some: list[Window]) -> list[int]:
    """Of all steps in them."""
    return [number for window in some for number in range(window.first, window.last + 1)]


def per_step(some: list[Window], *, after: int = 2) -> dict[str, float]:
    """Mean seconds of each phase, of the windows that begin after so many steps."""
    late = [window for window in some if window.first > after]
    steps = sum(window.steps for window in late)
    assert steps
    return {phase: sum(window.phases[phase][0] for window in late) / steps for phase in PHASES}


# --- where the time goes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("forward", {}),
        ("forward", {"how": "loss.backward"}),
        ("forward", {"how": "scale"}),
        ("forward", {"how": "accumulate", "microbatch": 12}),
        ("forward", {"how": "compiled"}),
        ("forward", {"net": {"norm": True}}),
        ("forward", {"wrap": {"find_unused_parameters": True}}),
        ("backward", {}),
        ("backward", {"how": "loss.backward"}),
        ("backward", {"how": "compiled"}),
        ("backward", {"wrap": {"static_graph": True}}),
        ("backward", {"wrap": {"bucket_cap_mb": 0.0001}}),
    ],
)
def test_a_slow_rank_shows_in_its_own_work_and_in_the_wait_of_the_other(tmp_path: Path, where: str, options: dict[str, Any]) -> None:
    run(measured.measured, 2, tmp_path, where=where, every_s=0.1, seconds=SLOW, max_steps=8, **options)  # all of one size: nothing is compiled anew
    slow, other = per_step(windows(tmp_path, 1)), per_step(windows(tmp_path, 0))
    assert slow[where] > 0.9 * SLOW
    assert other["communication"] > 0.6 * SLOW
    assert slow["communication"] < 0.4 * SLOW
    assert max(other["forward"], other["backward"]) < 0.4 * SLOW


@pytest.mark.parametrize("where", ["data", "optimizer"])
def test_a_slow_loader_shows_in_data_and_a_slow_optimizer_in_its_own_phase(tmp_path: Path, where: str) -> None:
    run(measured.measured, 2, tmp_path, where=where, slow_rank=0, every_s=0.1, seconds=SLOW)
    slow, other = per_step(windows(tmp_path, 0)), per_step(windows(tmp_path, 1))
    assert slow[where] > (0.9 if where == "optimizer" else 0.3) * SLOW  # the first sample of a step is not always this rank's
    assert other[where] < 0.3 * SLOW
    assert other["communication"] > slow["communication"]


def test_waiting_for_the_buffers_of_rank_0_is_no_work_of_the_forward_pass(tmp_path: Path) -> None:
    run(measured.measured, 2, tmp_path, where="before", slow_rank=0, every_s=0.1, seconds=SLOW, net={"norm": True})
    slow, other = per_step(windows(tmp_path, 0)), per_step(windows(tmp_path, 1))
    assert slow["other"] > 0.9 * SLOW
    assert other["communication"] > 0.6 * SLOW
    assert other["forward"] < 0.4 * SLOW


def test_what_comes_after_stepped_is_no_step(tmp_path: Path) -> None:
    run(measured.ends, 1, tmp_path, how="evaluates")
    for window in windows(tmp_path):
        assert window.slowest[1] < 0.1
        assert window.ended - window.began >= window.seconds - 1e-3


def test_the_phases_are_the_whole_of_a_step_and_its_buckets_count_it(tmp_path: Path) -> None:
    run(measured.measured, 2, tmp_path, how="accumulate", microbatch=5, where="forward", seconds=0.01, every_s=0.1)
    both = [windows(tmp_path, rank) for rank in range(2)]
    assert sum(window.samples for found in both for window in found) == 200 + 24
    assert sum(window.batches for found in both for window in found) == 9 * 5 + 2
    for found in both:
        assert numbers(found) == list(range(1, 11))
        for window in found:
            assert sum(total for total, _ in window.phases.values()) == pytest.approx(window.seconds, abs=1e-6)
            assert all(most <= total + 1e-12 for total, most in window.phases.values())
            assert sum(window.buckets) == window.steps
            assert window.first <= window.slowest[0] <= window.last
            assert window.slowest[1] <= window.seconds + 1e-12
            assert window.ended - window.began == pytest.approx(window.seconds, abs=0.1)
            assert window.memory["rss"] > 50e6


def test_telemetry_changes_no_weight(tmp_path: Path) -> None:
    options: dict[str, Any] = {"how": "accumulate", "microbatch": 5, "net": {"norm": True}, "every_s": 0.1}
    on = run(measured.measured, 3, tmp_path / "on", **options)
    off = run(measured.measured, 3, tmp_path / "off", sets={"telemetry": False}, **options)
    assert [one["digest"] for one in on] == [one["digest"] for one in off]
    assert on == off
    assert numbers(windows(tmp_path / "on", 2)) == list(range(1, 11))
    assert not (tmp_path / "off" / measured.FILE).exists()


# --- every step in exactly one window ------------------------------------------------------------------------------------


def told(agent: Agent, rank: int) -> list[Window]:
    return [Window.from_dict(message.window) for local_rank, message in agent.messages(channel.Telemetry) if local_rank == rank]


def test_every_step_is_in_exactly_one_window_when_a_stop_ends_them(tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=2, settings={"telemetry_every_s": 0.1})
    sockets = [str(agent.path)]
    with world(agents.under_agent, 2, tmp_path / "run", name="train", sockets=sockets, max_steps=1000, step_seconds=0.03) as ranks:
        ranks.await_line(lambda line: line.get("step") == 20)
        agent.tell(1, flag="stop", seconds=20.0)
        assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    ((_, stopped), _) = agent.await_(channel.Stopped, 2)
    for rank in range(2):
        found = told(agent, rank)
        assert numbers(found) == list(range(1, stopped.step + 1))
        assert len(found) > 3
        assert {(window.rank, window.generation, window.dropped) for window in found} == {(rank, 5, 0)}
        kinds = [type(message) for local_rank, message in agent.heard if local_rank == rank]
        assert kinds.index(channel.Stopped) > max(index for index, kind in enumerate(kinds) if kind is channel.Telemetry)
    assert any(window.phases["snapshot"][0] > 0.0 for window in told(agent, 0))
    agent.close()


def test_every_step_is_in_exactly_one_window_when_the_run_is_finished(tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=2, settings={"telemetry_every_s": 60.0})
    run(agents.under_agent, 2, tmp_path / "run", name="train", sockets=[str(agent.path)], max_steps=17)
    for rank in range(2):
        (window,) = told(agent, rank)
        assert (window.first, window.last, window.steps) == (1, 17, 17)
    agent.close()


@pytest.mark.parametrize(("how", "last"), [("leaves after the step", 22), ("leaves before it has done anything", 5), ("fails", 12)])
def test_loops_that_are_left_lose_no_step_and_count_none_twice(tmp_path: Path, how: str, last: int) -> None:
    with world(measured.ends, 2, tmp_path, how=how) as ranks:
        codes = ranks.codes()
    assert codes == [1, 1] if how == "fails" else [0, 0], ranks.story()
    for rank in range(2):
        assert numbers(windows(tmp_path, rank)) == list(range(1, last + 1))


def test_a_run_that_goes_on_counts_on(tmp_path: Path) -> None:
    run(measured.measured, 2, tmp_path, max_steps=6)
    run(measured.measured, 1, tmp_path, max_steps=11)
    assert numbers(windows(tmp_path)) == list(range(1, 12))
    assert len({window.generation for window in windows(tmp_path)}) == 2


def test_an_agent_that_does_not_read_holds_no_step_up_and_learns_what_was_lost(tmp_path: Path) -> None:
    (found,) = run(measured.deaf, 1, tmp_path)
    some = [Window.from_dict(window) for window in found["windows"]]
    assert found["longest"] < 1.0
    lost = 0
    for earlier, later in pairwise(some):
        gap = later.first - earlier.last - 1
        lost += gap
        assert (gap > 0) == (later.dropped > 0)
        assert gap >= later.dropped
    assert lost > 10
    assert some[-1].last == 60


def test_a_window_that_was_sent_in_part_is_made_whole_before_anything_else_is_said() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel.send(theirs, channel.Welcome(generation=1, settings=Settings().model_dump(mode="json")))
        keeper = AgentKeeper(ours, rank=0, local_rank=0, local_world=1)
        columns = {"seconds": [0.0] * 200_000}  # more than a socket takes at once
        assert keeper.tell(channel.Ranks(step=1, steps=1, columns=columns))
        assert not keeper.tell(channel.Ranks(step=2, steps=1, columns={}))
        inbox, heard = channel.Inbox(), list[channel.Message]()
        while not any(isinstance(message, channel.Ranks) for message in heard):
            heard += channel.receive(theirs, inbox)
            keeper.tell(channel.Ranks(step=3, steps=1, columns={}))
        keeper.unfit("data", "so it is")
        while not isinstance(heard[-1], channel.Unfit):
            heard += channel.receive(theirs, inbox)
        ranks = [message for message in heard if isinstance(message, channel.Ranks)]
        assert ranks[0].columns == columns
        assert {message.step for message in ranks[1:]} == {3}
        theirs.close()
        assert not keeper.tell(channel.Ranks(step=4, steps=1, columns={}))
        ours.close()


# --- values --------------------------------------------------------------------------------------------------------------


def test_losses_that_are_no_numbers_are_counted_and_left_out_and_keys_are_bounded(tmp_path: Path) -> None:
    (found,) = run(measured.sick, 1, tmp_path)
    some = windows(tmp_path)
    losses = [window.values["loss"] for window in some]
    assert sum(loss.count for loss in losses) == 6
    assert sum(loss.nonfinite for loss in losses) == 2
    assert all(loss.last is None or 0.5 < loss.last < 3.0 for loss in losses)
    assert all(window.values["huge"].nonfinite == window.values["huge"].count for window in some)
    assert all(window.values["tokens"].nonfinite == window.values["tokens"].count for window in some)
    accuracy = some[-1].values["accuracy"]
    assert accuracy.last == pytest.approx(0.6)
    assert max(len(window.values) for window in some) == VALUES_MAX
    assert [said.partition(":")[0] for said in found["refused"]] == ["log(text=…)", "log(vector=…)", "log(a b=…)", f"log({'a' * 65}=…)"]


def test_with_telemetry_off_nothing_is_looked_at(tmp_path: Path) -> None:
    assert run(measured.sick, 1, tmp_path, telemetry=False) == [{"refused": []}]
    assert not (tmp_path / measured.FILE).exists()


@pytest.mark.parametrize("how", ["run.backward", "scale", "accumulate"])
def test_the_loss_is_the_mean_over_this_ranks_samples(tmp_path: Path, how: str) -> None:
    results = run(measured.measured, 2, tmp_path, how=how, every_s=60, microbatch=5 if how == "accumulate" else None, max_steps=9)
    for rank, result in enumerate(results):
        (window,) = windows(tmp_path, rank)
        loss = window.values["loss"]
        assert loss.mean == pytest.approx(sum(result["losses"]) / 9)
        assert (loss.last, loss.low) == pytest.approx((result["losses"][-1], min(result["losses"])))
        assert window.values["lr"].last == 0.05


@pytest.mark.parametrize("logs", [False, True])
def test_the_norm_of_gradients_is_that_of_all_ranks_before_clipping_unless_the_script_says_it(tmp_path: Path, logs: bool) -> None:
    found = run(measured.norm_of_each_step, 2, tmp_path, logs=logs, clip=0.01)[0]["found"]
    (window,) = windows(tmp_path)
    norm = window.values["grad_norm"]
    if logs:
        assert (norm.low, norm.high, norm.count) == (7.0, 7.0, 8)
        return
    assert norm.count >= 3
    for one in (norm.last, norm.low, norm.high):
        assert any(one == pytest.approx(of_a_step, rel=1e-5) for of_a_step in found)
    assert "grad_norm" not in windows(tmp_path, 1)[0].values


def test_a_norm_that_the_steps_have_not_paid_for_is_not_taken(tmp_path: Path) -> None:
    run(measured.norm_of_each_step, 2, tmp_path, cost=1e-9)
    (window,) = windows(tmp_path)
    assert window.values["grad_norm"].count == 1  # the first, which tells the price


def test_fit_says_what_it_clips_by(tmp_path: Path) -> None:
    found = run(measured.fitted, 2, tmp_path, clip=0.01)
    for rank, result in enumerate(found):
        (window,) = windows(tmp_path, rank)
        norm = window.values["grad_norm"]
        assert norm.count == 6
        assert norm.mean == pytest.approx(sum(result["norms"]) / 6)
        assert window.values["loss"].count == 6


def test_the_factor_of_a_grad_scaler_is_in_no_loss_and_no_norm(tmp_path: Path) -> None:
    (found,) = run(measured.scaled, 1, tmp_path)
    (window,) = windows(tmp_path)
    assert window.values["loss"].mean == pytest.approx(sum(found["losses"]) / 6, rel=1e-4)
    assert max(found["norms"]) * 1.001 > window.values["grad_norm"].high > 0.0  # type: ignore[operator]


# --- all ranks side by side ----------------------------------------------------------------------------------------------


def test_rank_0_says_now_and_then_what_all_ranks_steps_came_to(tmp_path: Path) -> None:
    run(measured.gathered, 3, tmp_path, max_steps=40, every_s=0.5, step_seconds=0.02)
    found = lines(tmp_path, "ranks")
    assert found[0]["step"] == 2
    assert len(found) >= 3
    for earlier, later in pairwise([{"step": 0}, *found]):
        assert later["steps"] == later["step"] - earlier["step"]
        assert list(later["columns"]) == [*PHASES, "seconds"]
        assert {len(column) for column in later["columns"].values()} == {3}
    columns = found[-1]["columns"]
    assert columns["other"][2] > columns["other"][0]  # which sleeps a third as long
    assert columns["communication"][0] > columns["communication"][2]
    assert columns["seconds"][0] == pytest.approx(sum(columns[phase][0] for phase in PHASES), abs=1e-5)


def test_a_stop_at_any_step_ends_all_ranks_though_they_compare_at_every_other(tmp_path: Path) -> None:
    for attempt in range(4):
        with world(measured.gathered, 2, tmp_path / str(attempt), max_steps=10_000, every_s=1e-9, leave_every=(0, 3)[attempt % 2]) as ranks:
            ranks.await_line(lambda line, least=3 + attempt: line.get("step", 0) >= least)
            ranks.send(attempt % 2, signal.SIGTERM)
            assert ranks.codes(60) == [EXIT_STOPPED] * 2, ranks.story()
            assert ranks.lines(0)[-1]["step"] == ranks.lines(1)[-1]["step"]


@pytest.mark.parametrize("off", [0, 1])
def test_ranks_that_were_told_otherwise_do_as_rank_0_does_and_none_hangs(tmp_path: Path, off: int) -> None:
    run(measured.gathered, 2, tmp_path, max_steps=12, every_s=1e-9, off=off)
    assert bool(lines(tmp_path, "ranks")) == (off == 1)
    assert numbers(windows(tmp_path, 1 - off)) == list(range(1, 13))
    assert not windows(tmp_path, off)


def test_the_next_comparison_is_five_seconds_of_the_slowest_ranks_steps_away() -> None:
    assert spacing(0.02) == EVERY_S / 0.02
    assert [spacing(slowest) for slowest in (60.0, 1e-9, 0.0)] == [1, 1_000_000, 2]


# --- sums ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(), max_size=50))
def test_a_tally_is_what_spread_says_of_all_values_at_once(values: list[float]) -> None:
    tally = Tally()
    for value in values:
        tally.add(value)
    found = tally.spread()
    expected = Spread.of([value if abs(value) <= 1e300 else math.inf for value in values])
    assert (found.last, found.low, found.high) == (expected.last, expected.low, expected.high)
    assert (found.count, found.nonfinite) == (expected.count, expected.nonfinite)
    if expected.mean is not None:
        assert found.mean is not None
        assert found.low <= found.mean <= found.high  # type: ignore[operator]


def test_the_slowest_step_and_the_most_of_each_phase_are_kept() -> None:
    made: Tallies | None = None
    for number, seconds in enumerate((0.02, 0.5, 0.03, 40.0), 7):
        step = Stepped(number=number, ended=1000.0 + number, seconds=seconds, spent=[0.0, seconds, *[0.0] * 5], samples=3, batches=2, values=[("x", seconds)])
        if made is None:
            made = Tallies(1, 2, step)
        else:
            made.add(step)
    assert made is not None
    window = made.window(memory={}, dropped=4)
    assert (window.first, window.last, window.slowest, window.dropped) == (7, 10, (10, 40.0), 4)
    assert window.phases["forward"] == (pytest.approx(40.55), 40.0)
    assert {bound: count for bound, count in zip((*STEP_BOUNDS, None), window.buckets, strict=True) if count} == {0.025: 1, 0.05: 1, 0.5: 1, None: 1}
    assert (window.samples, window.batches, window.values["x"].count) == (12, 8, 4)
    assert Window.from_dict(json.loads(json.dumps(window.as_dict()))) == window
