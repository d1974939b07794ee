"""What is usual for a type of job, kept from one run to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.memory import ASIDE, BIGRAMS, FOREST, TEMPLATES, Memory
from detectors.observations import Line, Stream
from detectors.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


def taught() -> Pipeline:
    pipeline = Pipeline()
    for number in range(40):
        at = 1_700_000_000.0 + number
        pipeline.see(Line(at=at, stream=Stream.OUT, text=f"step {number} done", node="n0", rank=0))
        pipeline.see(Line(at=at, stream=Stream.OUT, text=f"saved in {number} ms", node="n0", rank=0))
    pipeline.finish()
    return pipeline


def test_what_was_learnt_is_known_to_the_next_run(tmp_path: Path) -> None:
    Memory.of(taught()).save(tmp_path / "llm")
    memory = Memory.load(tmp_path / "llm")
    assert memory.problems == []
    assert memory.templates is not None
    assert memory.bigrams is not None
    assert (len(memory.templates), len(memory.bigrams)) == (2, 2)
    known = memory.templates.see(Line(at=0.0, stream=Stream.OUT, text="step 77 done"))
    assert not known.first


def test_a_forest_that_has_learnt_nothing_leaves_no_file(tmp_path: Path) -> None:
    Memory.of(Memory().pipeline()).save(tmp_path)
    assert not (tmp_path / FOREST).exists()
    assert Memory.load(tmp_path).forest is None


@pytest.mark.parametrize("name", [TEMPLATES, BIGRAMS, FOREST])
@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00\xff" * 100, b"PK\x03\x04 no archive", b'{"version": 99, "templates": {}, "pairs": []}'])
def test_a_damaged_file_costs_what_it_knew_and_is_set_aside(tmp_path: Path, name: str, damage: bytes) -> None:
    Memory.of(taught()).save(tmp_path)
    (tmp_path / name).write_bytes(damage)
    memory = Memory.load(tmp_path)
    (problem,) = memory.problems
    assert name in problem
    assert "learning it anew" in problem
    assert not (tmp_path / name).exists()
    assert (tmp_path / (name + ASIDE)).read_bytes() == damage
    assert sum(part is not None for part in (memory.templates, memory.bigrams)) == (2 if name == FOREST else 1)
    memory.pipeline()


def test_nothing_there_is_nothing_known(tmp_path: Path) -> None:
    assert Memory.load(tmp_path) == Memory()
    with pytest.raises(FileNotFoundError):
        Memory.load(tmp_path / "none")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory.of(taught()).save(tmp_path)
    before = (tmp_path / TEMPLATES).read_bytes()

    def full(_path: Path, _text: str, **_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        Memory.of(taught()).save(tmp_path)
    assert (tmp_path / TEMPLATES).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [BIGRAMS, TEMPLATES]
