"""Lightning's Trainer under a session, with the real library in real worlds over gloo: stopped, resumed, rescaled, and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install 'elasticd[dev]'")

from tests.support.worlds import run, world
from tests.trainer import _lightning_programs as programs
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


@pytest.fixture(scope="module", autouse=True)
def _ready() -> Iterator[None]:
    with preloaded("lightning.pytorch", "trainer.integrations.lightning"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of two ranks comes to that was never interrupted."""
    with world(programs.train, 2, tmp_path_factory.mktemp("whole")) as ranks:
        first, second = ranks.results()
        assert seen(ranks) == ONCE
    assert second == first
    return first  # type: ignore[no-any-return]


def test_an_unbroken_run_counts_as_lightning_does(whole: dict[str, Any]) -> None:
    assert (whole["step"], whole["global_step"], whole["stepped"], whole["epoch"]) == (18, 18, 18, 3)
    assert whole["validations"] == [3, 6, 9, 12, 15, 18]
    assert whole["epochs"] == [0, 1, 2]
    assert whole["lr"] == pytest.approx(0.05 * 0.95**18)


def test_sigterm_at_one_rank_anywhere_changes_nothing_of_how_a_run_ends(whole: dict[str, Any], tmp_path: Path) -> None:
    """In a step, in the step before a validation, in a validation within an epoch and at its end, in an epoch's last step, right at its start."""
    stops = [(1, 1, "train"), (0, 2, "train"), (0, 3, "validation"), (1, 5, "train"), (1, 6, "validation"), (0, 6, "train"), (1, 17, "train")]
    results, counted = chain(programs.train, tmp_path, *((2, stop) for stop in stops), (2, None))
    assert results == [whole, whole]
    assert counted == ONCE


def test_a_stop_in_the_last_step_of_an_epoch_that_no_validation_follows_begins_with_the_next_epoch(tmp_path: Path) -> None:
    """In that of the run too, after which nothing is left to do. Epochs end once each, and are begun as by a run that was never interrupted."""
    options: dict[str, Any] = {"trainer_options": {"val_check_interval": 4}}
    whole, _ = chain(programs.train, tmp_path / "whole", (1, None), **options)
    parts, counted = chain(programs.train, tmp_path / "parts", *((1, (0, step, "train")) for step in (5, 11, 12)), (1, None), **options)
    assert parts == whole
    assert counted == ONCE
    assert whole[0]["validations"] == [4, 10, 16]


def test_a_run_goes_on_in_worlds_of_other_sizes(tmp_path: Path) -> None:
    """Without dropout, which is drawn for each rank's share."""
    alone = run(programs.train, 1, tmp_path / "alone", dropout=0.0)[0]
    (result,), counted = chain(programs.train, tmp_path / "parts", (2, (1, 4, "train")), (3, (2, 9, "validation")), (1, None), dropout=0.0)
    assert counted == ONCE
    for name in ("step", "global_step", "epoch", "validations", "epochs", "lr"):
        assert result[name] == alone[name]
    for mine, theirs in zip(result["weights"], alone["weights"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_run_that_is_done_trains_no_further(tmp_path: Path) -> None:
    """One process that nobody has placed."""
    first = run(programs.train, 0, tmp_path)
    with world(programs.train, 0, tmp_path) as ranks:
        again = ranks.results()
        assert seen(ranks) == {}
    assert [again[0][name] for name in ("weights", "step", "global_step", "epoch")] == [first[0][name] for name in ("weights", "step", "global_step", "epoch")]


def test_a_run_bounded_by_steps_ends_at_that_step_whatever_happens_on_the_way(tmp_path: Path) -> None:
    """The loader is made in the module's train_dataloader in one of the two."""
    options: dict[str, Any] = {"trainer_options": {"max_epochs": -1, "max_steps": 14}}
    whole, _ = chain(programs.train, tmp_path / "whole", (1, None), **options)
    parts, _ = chain(programs.train, tmp_path / "parts", (1, (0, 5, "train")), (1, (0, 7, "train")), (1, None), hook=True, **options)
    assert parts == whole
    assert (parts[0]["step"], parts[0]["global_step"]) == (14, 14)


def test_copies_of_the_best_models_go_together_with_a_stop(tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint may write models; it remembers across a stop which are the best."""
    results, counted = chain(programs.train, tmp_path, (2, (1, 7, "train")), (2, None), models=True)
    assert counted == ONCE
    assert results[0]["validations"] == [3, 6, 9, 12, 15, 18]
    assert len(list((tmp_path / "models").iterdir())) == 2


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
    assert not (tmp_path / "run" / "checkpoints").exists()
    agent.close()
    after.close()


def test_what_cannot_be_kept_is_refused_with_the_reason(tmp_path: Path) -> None:
    wanted = {
        "loader": "the training loader is a DataLoader, whose place cannot be kept",
        "accumulate": "accumulate_grad_batches changes the samples of a step",
        "limit": "limit_train_batches and fast_dev_run leave samples of an epoch out",
        "strategy": "SingleDeviceStrategy",
        "reload": "reload_dataloaders_every_n_epochs",
        "overfit": "overfit_batches repeats samples",
        "manual": "manual optimization has no place at which a step is done",
        "exception": "OnExceptionCheckpoint writes a checkpoint of its own",
        "saves": "ModelCheckpoint writes a checkpoint of its own",
        "swa": "StochasticWeightAveraging keeps weights that no state_dict has",
        "path": "a run has one state",
        "microbatch": "count every microbatch as a step",
        "twice": "called twice",
    }
    late = {case: run(programs.refused, 1, tmp_path / case, cases=[case])[0][case] for case in ("loader", "limit", "path")}
    (said,) = run(programs.refused, 1, tmp_path, cases=[case for case in wanted if case not in late])
    said |= late
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
