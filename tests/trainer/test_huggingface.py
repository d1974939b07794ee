"""The Trainer of transformers under a session, with the real library in real worlds over gloo: stopped, resumed, rescaled, and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'elasticd[dev]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elasticd[dev]'")

from tests.support.worlds import run, world
from tests.trainer import _huggingface_programs as programs
from tests.trainer._agents import Agent
from tests.trainer._chains import chain, preloaded, seen
from trainer.errors import EXIT_STOPPED
from trainer.wire import channel
from trainer.wire.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)
ONCE = {(epoch, sample): 1 for epoch in range(programs.EPOCHS) for sample in range(programs.SAMPLES)}
SGD = {"optim": "sgd", "learning_rate": 0.1}
"""Adam divides by the size of a gradient, and makes whole steps of the rounding where that is zero."""
RESCALED = ("step", "global_step", "epoch", "steps", "evaluations", "lr")
"""What does not depend on the world at all."""


@pytest.fixture(scope="module", autouse=True)
def _ready() -> Iterator[None]:
    with preloaded("transformers.trainer", "trainer.integrations.huggingface", "transformers.models.gpt2.modeling_gpt2"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of two ranks comes to that was never interrupted."""
    with world(programs.train, 2, tmp_path_factory.mktemp("whole")) as ranks:
        first, second = ranks.results()
        assert seen(ranks) == ONCE
    assert second == first
    return first  # type: ignore[no-any-return]


def close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [mine[name] for name in RESCALED] == [theirs[name] for name in RESCALED]
    for one, other in zip(mine["weights"], theirs["weights"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_an_unbroken_run_counts_as_trainer_does(whole: dict[str, Any]) -> None:
    assert (whole["step"], whole["global_step"], whole["epoch"]) == (18, 18, 3.0)
    assert whole["steps"] == list(range(1, 19))
    assert whole["evaluations"] == [4, 8, 12, 16, 18]
    assert whole["lr"] == 0.0


def test_sigterm_at_one_rank_anywhere_changes_nothing_of_how_a_run_ends(whole: dict[str, Any], tmp_path: Path) -> None:
    """In a step, in the step before an evaluation, in an evaluation within an epoch and at its end, in an epoch's last step, right at its start."""
    stops = [(1, 1, "train"), (0, 3, "train"), (0, 4, "evaluation"), (1, 5, "train"), (0, 6, "train"), (1, 12, "evaluation"), (1, 17, "train")]
    results, counted = chain(programs.train, tmp_path, *((2, stop) for stop in stops), (2, None))
    assert results == [whole, whole]
    assert counted == ONCE


def test_a_stop_in_the_last_step_of_an_epoch_begins_with_the_next_epoch(tmp_path: Path) -> None:
    """In that of the run too, after which nothing is left to do. No evaluation follows."""
    whole, _ = chain(programs.train, tmp_path / "whole", (1, None), args={"eval_strategy": "no"})
    parts, counted = chain(programs.train, tmp_path / "parts", *((1, (0, step, "train")) for step in (5, 11, 12)), (1, None), args={"eval_strategy": "no"})
    assert parts == whole
    assert counted == ONCE


@pytest.mark.parametrize("tokens", [False, True], ids=["mean over samples", "mean over tokens"])
def test_a_run_goes_on_in_worlds_of_other_sizes(tmp_path: Path, tokens: bool) -> None:
    """Eight samples in microbatches of three at most, dealt to one, two and three ranks; dropout included."""
    options: dict[str, Any] = {"tokens": tokens, "args": SGD}
    alone = run(programs.train, 1, tmp_path / "alone", **options)[0]
    (result,), counted = chain(programs.train, tmp_path / "parts", (2, (1, 4, "train")), (3, (2, 8, "evaluation")), (1, None), **options)
    assert counted == ONCE
    close(result, alone)


def test_ranks_without_samples_in_a_step_change_nothing(tmp_path: Path) -> None:
    """Two microbatches at the end of an epoch, for three ranks."""
    for tokens in (False, True):
        options: dict[str, Any] = {"tokens": tokens, "args": {**SGD, "per_device_train_batch_size": 4}}
        alone = run(programs.train, 1, tmp_path / f"alone-{tokens}", **options)[0]
        close(run(programs.train, 3, tmp_path / f"three-{tokens}", **options)[0], alone)


def test_a_run_that_is_done_trains_no_further(tmp_path: Path) -> None:
    """One process that nobody has placed."""
    first = run(programs.train, 0, tmp_path, args={"max_steps": 8})[0]
    with world(programs.train, 0, tmp_path, args={"max_steps": 8}) as ranks:
        (again,) = ranks.results()
        assert seen(ranks) == {}
    assert [again[name] for name in ("weights", "moments", "step", "global_step")] == [first[name] for name in ("weights", "moments", "step", "global_step")]
    assert again["step"] == 8


def test_an_evaluation_that_decides_what_comes_next_is_finished_before_a_stop(tmp_path: Path) -> None:
    """Here the learning rate follows from it, and which model is the best."""
    options: dict[str, Any] = {
        "args": {"metric_for_best_model": "loss", "greater_is_better": False, "lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0}
    }
    whole, _ = chain(programs.train, tmp_path / "whole", (1, None), **options)
    parts, counted = chain(programs.train, tmp_path / "parts", (1, (0, 4, "evaluation")), (1, None), late=1, **options)
    assert parts == whole
    assert counted == ONCE


def test_the_word_of_an_agent_stops_all_ranks_at_one_step_and_its_buffers_are_what_the_next_world_begins_with(whole: dict[str, Any], tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=2, settings={"snapshot_every": 1})
    with world(programs.under_agent, 2, tmp_path / "run", path=str(agent.path)) as ranks:
        ranks.await_line(lambda line: line.get("step") == 4)
        agent.tell(1, flag="stop", seconds=20.0)
        assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
        counted = seen(ranks)
    (_, one), (_, other) = agent.messages(channel.Stopped)
    assert (one.saved, one.step) == (other.saved, other.step) == (True, agent.valid()[0].step)
    assert agent.shelf is not None
    after = Agent(path=tmp_path / "after", local_world=2, generation=6, resume=(agent.shelf, agent.valid()[0]), settings={"snapshot_every": 1})
    with world(programs.under_agent, 2, tmp_path / "run", path=str(after.path)) as ranks:
        assert ranks.results() == [whole, whole]
        counted += seen(ranks)
    assert counted == ONCE
    agent.close()
    after.close()


def test_what_cannot_be_kept_is_refused_with_the_reason(tmp_path: Path) -> None:
    wanted = {
        "accumulation": "gradient_accumulation_steps changes the samples of a step",
        "saving": "writes checkpoints of its own beside the session's",
        "jit": "enable_jit_checkpoint answers SIGTERM with a checkpoint of its own",
        "finds": "auto_find_batch_size changes the samples of a step",
        "lengths": "has an order of its own",
        "counts": "include_num_input_tokens_seen",
        "stream": "train_dataset has no length",
        "path": "a run has one state",
    }
    (said,) = run(programs.refused, 1, tmp_path, cases=list(wanted))
    assert {case: said[case] for case, part in wanted.items() if part not in said[case]} == {}


def test_every_step_is_in_telemetry_with_its_loss_and_its_phases(tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=2, settings={"telemetry_every_s": 0.1})
    run(programs.under_agent, 2, tmp_path / "run", path=str(agent.path))
    for rank in range(2):
        found = [Window.from_dict(message.window) for local_rank, message in agent.messages(channel.Telemetry) if local_rank == rank]
        assert [number for window in found for number in range(window.first, window.last + 1)] == list(range(1, programs.STEPS + 1))
        assert sum(window.values["loss"].count for window in found) == programs.STEPS
        for phase in ("data", "forward", "backward", "communication", "optimizer", "snapshot", "other"):
            assert sum(window.phases[phase][0] for window in found) > 0.0
    agent.close()
