"""The session in real worlds of 1 to 4 ranks over gloo, without an agent: what a script sees, and what it is refused."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.etcd import await_
from tests.support.worlds import Ranks, run, world
from tests.trainer import _programs as programs
from trainer.checkpoint import read_manifest, scan
from trainer.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
STEPS = 20
"""200 samples, 24 a step: the ninth step of an epoch has 8, which 3 ranks cannot share evenly, and the run goes into its third epoch."""


def checkpoints(folder: Path) -> list[tuple[int, int]]:
    """(generation, step) of those that are whole, newest first."""
    return [found.order for found in scan(folder / "checkpoints")]


def said(ranks: Ranks, within: float = 60.0) -> str:
    """What a world that ends with an error printed."""
    assert all(ranks.codes(within)), ranks.story()
    return ranks.story()


def test_importing_the_wire_loads_no_torch() -> None:
    code = "import sys, trainer.wire.layout, trainer.wire.board, trainer.wire.channel; assert 'torch' not in sys.modules; trainer.join; assert dir(trainer)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    import trainer

    with pytest.raises(AttributeError, match="'trainer' has no attribute 'jion'"):
        trainer.jion  # noqa: B018


def test_one_process_that_nobody_has_placed_trains(tmp_path: Path) -> None:
    (result,) = run(programs.train, 0, tmp_path, max_steps=STEPS)
    assert result["step"] == STEPS
    assert result["losses"]["20"] < result["losses"]["1"]
    assert checkpoints(tmp_path) == [(1, STEPS)]


def test_losses_do_not_depend_on_the_world(tmp_path: Path) -> None:
    """Dropout included, microbatches being cut alike; the shorter step at the end of an epoch included."""
    losses = [run(programs.train, count, tmp_path / str(count), max_steps=STEPS, microbatch=4)[0]["losses"] for count in (1, 2, 3, 4)]
    assert len(losses[0]) == STEPS
    for other in losses[1:]:
        assert other == {step: pytest.approx(loss, rel=1e-6) for step, loss in losses[0].items()}


def test_a_run_that_goes_on_alone_ends_bit_for_bit_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """Three ranks: the order of summation would show. Weights, moments, learning rate, dropout and data."""
    whole = run(programs.train, 3, tmp_path / "whole", max_steps=STEPS)
    first = run(programs.train, 3, tmp_path / "parts", max_steps=7)
    second = run(programs.train, 3, tmp_path / "parts", max_steps=STEPS)
    assert {**first[0]["losses"], **second[0]["losses"]} == whole[0]["losses"]
    assert {result["digest"] for result in [*whole, *second]} == {whole[0]["digest"]}
    assert second[0]["lr"] == whole[0]["lr"]
    assert [first[0]["generation"], second[0]["generation"]] == [1, 2]


def test_a_batch_norm_goes_on_bit_for_bit_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"net": {"norm": True}, "max_steps": 12}
    whole = run(programs.train, 2, tmp_path / "whole", **options)
    run(programs.train, 2, tmp_path / "parts", **{**options, "max_steps": 5})
    second = run(programs.train, 2, tmp_path / "parts", **options)
    assert second[0]["losses"].items() <= whole[0]["losses"].items()
    assert second[0]["digest"] == whole[0]["digest"]


def test_a_world_that_shrinks_to_one_and_grows_again_trains_as_one_that_never_changed(tmp_path: Path) -> None:
    whole = run(programs.train, 4, tmp_path / "whole", max_steps=25, microbatch=4)[0]
    losses: dict[str, float] = {}
    for count, until in ((4, 5), (3, 10), (2, 15), (1, 20), (4, 25)):
        losses |= run(programs.train, count, tmp_path / "parts", max_steps=until, microbatch=4)[0]["losses"]
    assert losses == {step: pytest.approx(loss, rel=1e-6) for step, loss in whole["losses"].items()}


def test_sigterm_to_one_rank_stops_all_at_the_same_step_and_nothing_is_lost(tmp_path: Path) -> None:
    whole = run(programs.train, 3, tmp_path / "whole", max_steps=STEPS)
    parts = tmp_path / "parts"
    with world(programs.train, 3, parts, max_steps=STEPS, step_seconds=0.1) as ranks:
        ranks.await_line(lambda line: line.get("step") == 5)
        ranks.send(1, signal.SIGTERM)
        assert ranks.codes() == [EXIT_STOPPED] * 3, ranks.story()
        (step,) = {ranks.lines(rank)[-1]["step"] for rank in range(3)}
    assert 5 <= step <= 7
    assert checkpoints(parts) == [(1, step)]
    again = run(programs.train, 3, parts, max_steps=STEPS)
    assert [int(one) for one in again[0]["losses"]] == list(range(step + 1, STEPS + 1))
    assert again[0]["digest"] == whole[0]["digest"]


def test_no_rank_ends_before_the_checkpoint_is_written(tmp_path: Path) -> None:
    """Torchrun would end the one that writes as soon as another is gone. 80 MB take long enough to see."""
    with world(programs.train, 2, tmp_path, max_steps=1000, net={"width": 500_000}, batch_size=2) as ranks:
        ranks.await_line(lambda line: line.get("step") == 2)
        ranks.send(1, signal.SIGTERM)
        ranks.processes[1].join(60)
        assert len(checkpoints(tmp_path)) == 1
        assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()


def test_sigterm_while_all_evaluate_is_heard_by_poll(tmp_path: Path) -> None:
    with world(programs.train, 2, tmp_path, max_steps=STEPS, poll_after=3) as ranks:
        for rank in range(2):
            ranks.await_line(lambda line: "polling" in line, rank)
        ranks.send(1, signal.SIGTERM)
        assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    assert checkpoints(tmp_path) == [(1, 3)]
    assert run(programs.train, 2, tmp_path, max_steps=4)[0]["losses"].keys() == {"4"}


def test_sigusr1_writes_a_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    with world(programs.train, 2, tmp_path, max_steps=STEPS, step_seconds=0.05) as ranks:
        ranks.await_line(lambda line: line.get("step") == 3)
        ranks.send(1, signal.SIGUSR1)
        await_(lambda: checkpoints(tmp_path), within=30, what="a checkpoint")
        assert [result["step"] for result in ranks.results()] == [STEPS, STEPS]
    assert [generation for generation, _ in checkpoints(tmp_path)] == [1, 1]
    (_, last), (_, asked) = checkpoints(tmp_path)
    assert last == STEPS
    assert 3 <= asked <= 6


def test_checkpoints_are_written_by_the_clock_and_the_oldest_go(tmp_path: Path) -> None:
    sets = {"checkpoint_every_s": 0.2, "checkpoint_keep_last": 2}
    run(programs.train, 2, tmp_path, max_steps=15, step_seconds=0.1, sets=sets)
    kept = checkpoints(tmp_path)
    assert len(kept) == 2
    assert kept[0] == (1, 15)
    assert 10 <= kept[1][1] < 15


def test_after_a_kill_in_the_middle_of_a_step_the_last_checkpoint_goes_on(tmp_path: Path) -> None:
    """The survivor does not wait for the dead, and what it had done of the step is in no state."""
    whole = run(programs.train, 2, tmp_path / "whole", max_steps=STEPS, microbatch=6)
    parts = tmp_path / "parts"
    with world(programs.train, 2, parts, max_steps=STEPS, microbatch=6, step_seconds=0.05, die_in_step=10) as ranks:
        ranks.await_line(lambda line: line.get("step") == 2)
        ranks.send(0, signal.SIGUSR1)
        for rank in range(2):
            ranks.await_line(lambda line: "dying" in line, rank)
        await_(lambda: checkpoints(parts), within=30, what="a checkpoint")
        ranks.send(1, signal.SIGKILL)
        ranks.send(0, signal.SIGKILL)
        assert ranks.codes() == [-signal.SIGKILL, -signal.SIGKILL]
    ((_, step),) = checkpoints(parts)
    again = run(programs.train, 2, parts, max_steps=STEPS, microbatch=6)
    assert min(map(int, again[0]["losses"])) == step + 1
    assert again[0]["digest"] == whole[0]["digest"]


def test_a_rank_whose_peer_is_killed_ends_by_itself(tmp_path: Path) -> None:
    with world(programs.train, 2, tmp_path, max_steps=1000, step_seconds=0.05) as ranks:
        ranks.await_line(lambda line: line.get("step") == 3)
        ranks.send(1, signal.SIGKILL)
        codes = ranks.codes(within=30)
    assert codes == [1, -signal.SIGKILL]


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_taken(tmp_path: Path) -> None:
    run(programs.train, 2, tmp_path, max_steps=4)
    run(programs.train, 2, tmp_path, max_steps=8)
    newest = scan(tmp_path / "checkpoints")[0].path
    data = newest / "state.safetensors"
    content = bytearray(data.read_bytes())
    content[-5000] ^= 1
    data.write_bytes(content)
    again = run(programs.train, 2, tmp_path, max_steps=9)
    assert sorted(map(int, again[0]["losses"])) == [5, 6, 7, 8, 9]
    assert newest.name + ".bad" in {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_the_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    run(programs.train, 2, tmp_path, max_steps=10)
    manifest = read_manifest(scan(tmp_path / "checkpoints")[0].path)
    assert (manifest.step, manifest.generation, manifest.world) == (10, 1, {"size": 2, "local_size": 2})
    assert (manifest.data["epoch"], manifest.data["offset"]) == (1, 24)


def test_workers_of_a_loader_outlive_a_sigterm_to_everybody(tmp_path: Path) -> None:
    import psutil

    with world(programs.train, 1, tmp_path, max_steps=200, step_seconds=0.05, workers=2) as ranks:
        ranks.await_line(lambda line: line.get("step") == 2)
        process = psutil.Process(ranks.processes[0].pid)
        children = process.children(recursive=True)
        assert len(children) >= 2
        for one in [*children, process]:
            one.send_signal(signal.SIGTERM)
        assert ranks.codes(within=30) == [EXIT_STOPPED], ranks.story()
        last = ranks.lines()[-1]["step"]
    assert checkpoints(tmp_path) == [(1, last)]


def test_sigterm_told_twice_at_once_is_one_and_a_later_one_ends_the_process(tmp_path: Path) -> None:
    with world(programs.stuck, 1, tmp_path) as ranks:
        ranks.await_line(lambda line: line.get("step") == 2)
        ranks.send(0, signal.SIGTERM)
        ranks.send(0, signal.SIGTERM)
        ranks.processes[0].join(1.2)
        assert ranks.processes[0].is_alive()
        ranks.send(0, signal.SIGTERM)
        assert ranks.codes(within=10) == [-signal.SIGTERM]


def test_a_script_may_make_the_group_itself_and_count_epochs_itself(tmp_path: Path) -> None:
    first = run(programs.given_group, 2, tmp_path)
    assert first[0] == first[1] == {"epochs": [0] * 4 + [1] * 4 + [2] * 4, "step": 12}
    assert checkpoints(tmp_path) == [(1, 12)]
    assert run(programs.given_group, 2, tmp_path)[0] == {"epochs": [], "step": 12}


def test_a_step_after_which_the_body_leaves_the_loop_counts(tmp_path: Path) -> None:
    assert run(programs.plain, 2, tmp_path, leave_after=3, max_steps=20)[0]["step"] == 3
    assert checkpoints(tmp_path) == [(1, 3)]
    again = run(programs.plain, 2, tmp_path, leave_after=3, max_steps=20)[0]
    assert (again["step"], again["offset"]) == (6, 144)


def test_a_run_that_is_done_does_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    first = run(programs.plain, 2, tmp_path, epochs=2, weighed=True)[0]
    again = run(programs.plain, 1, tmp_path, epochs=2, weighed=True)[0]
    assert len(first["seen"]) == 18
    assert again["seen"] == []
    assert again["digest"] == first["digest"]
    assert again["epoch"] == 2
    assert checkpoints(tmp_path) == [(1, 18)]


def test_weighed_losses_give_the_gradient_of_the_mean_whatever_the_shares(tmp_path: Path) -> None:
    """7 samples a step: 4 and 3, or 7."""
    two, one = (run(programs.plain, count, tmp_path / str(count), batch_size=7, samples=35, max_steps=15, weighed=True)[0] for count in (2, 1))
    assert two["seen"] == [4] * 15
    assert one["seen"] == [7] * 15
    losses = [run(programs.train, count, tmp_path / f"l{count}", batch_size=7, max_steps=9, net={"dropout": 0.0})[0]["losses"] for count in (2, 1)]
    assert losses[0] == {step: pytest.approx(loss, rel=1e-6) for step, loss in losses[1].items()}


@pytest.mark.parametrize(
    ("program", "count", "how", "words"),
    [
        (programs.plain, 3, {"batch_size": 8, "max_steps": 3}, r"SetupError: loss\.backward\(\) in step 1, .* 3 ranks.*call run\.backward\(loss\)"),
        (programs.plain, 1, {"max_steps": 3, "accumulate": True, "wrap": {"static_graph": True}}, "SetupError: static_graph=True and accumulation crash"),
        (programs.plain, 3, {"max_steps": 3, "odd": 1}, "SetupError: rank 1 has another .* than most ranks"),
        (programs.unregistered, 1, {}, "SetupError: a module is wrapped and not registered"),
        (programs.registered_late, 1, {}, "SetupError: register comes too late"),
    ],
)
def test_what_would_go_wrong_is_refused(tmp_path: Path, program: Callable[..., Any], count: int, how: dict[str, Any], words: str) -> None:
    with world(program, count, tmp_path, **how) as ranks:
        assert re.search(words, said(ranks)), ranks.story()


@pytest.mark.parametrize(
    ("program", "count", "how", "words"),
    [
        (
            programs.train,
            1,
            {"max_steps": 9, "net": {"width": 17}},
            r"StateError: model\.first\.weight has the shape \[16, 8\] in the state, and \[17, 8\] here",
        ),
        (programs.train, 1, {"max_steps": 9, "net": {"norm": True}}, r"StateError: model\.norm\.weight is not in the state"),
        (programs.train, 1, {"max_steps": 9, "batch_size": 25}, "StateError: samples in a step, over all ranks: 25 here, 24 in the state"),
        (programs.less_registered, 1, {}, "StateError: the state has optimizer, scheduler, and nothing is registered"),
        (programs.diverged, 2, {}, r"StateError: rank 1 does not have the state that rank 0 has .*: model\.last\.weight differs"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path: Path, program: Callable[..., Any], count: int, how: dict[str, Any], words: str) -> None:
    run(programs.train, 1, tmp_path, max_steps=3)
    with world(program, count, tmp_path, **how) as ranks:
        assert re.search(words, said(ranks)), ranks.story()
    assert checkpoints(tmp_path) == [(1, 3)]
