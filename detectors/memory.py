"""What is usual for a type of job, from one run to the next: kinds of lines, what follows on what, and the forest's windows.

Owns: the directory that it lies in, and that a damaged file in it costs what that file knew and nothing else. Must not: learn, or judge.

Plain JSON and npz, never a pickle: a forest is grown again from its windows when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from detectors.forest import Forest
from detectors.pipeline import Pipeline
from detectors.sequences import Bigrams
from detectors.signatures import Table
from detectors.templates import Templates
from detectors.windows import WIDTH

TEMPLATES: Final = "templates.json"
BIGRAMS: Final = "bigrams.json"
FOREST: Final = "forest.npz"
SIZE_MAX: Final = 256 << 20
"""Bytes of a file that is read."""
ASIDE: Final = ".damaged"
"""What is added to the name of a file that cannot be read, so that it is looked at by people and by nobody else."""

_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True)
class Memory:
    """See the module.

    Attributes:
        problems: one line for each file that could not be read; it was set aside.
    """

    templates: Templates | None = None
    bigrams: Bigrams | None = None
    forest: Forest | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> Memory:
        """What an earlier run left; empty where there is nothing.

        Raises:
            OSError: the directory cannot be read.
        """
        os.scandir(directory).close()
        memory = cls()
        memory.templates = memory._read(directory / TEMPLATES, lambda path: Templates.load(path.read_text("utf-8")))
        memory.bigrams = memory._read(directory / BIGRAMS, lambda path: Bigrams.load(path.read_text("utf-8")))
        memory.forest = memory._read(directory / FOREST, Forest.load)
        return memory

    @classmethod
    def of(cls, pipeline: Pipeline) -> Memory:
        """What a pipeline knows by now."""
        return cls(templates=pipeline.templates, bigrams=pipeline.bigrams, forest=pipeline.forest)

    def pipeline(self, *, table: Table | None = None, width: float = WIDTH, forest: bool = True) -> Pipeline:
        """A pipeline that knows it.

        Args:
            table: signatures, the built-in ones if none is given.
            width: seconds of a window.
            forest: with the isolation forest.
        """
        grown = (self.forest or Forest()) if forest else None
        return Pipeline(table=table, forest=grown, templates=self.templates, bigrams=self.bigrams, width=width)

    def save(self, directory: Path) -> None:
        """Write it; each file whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if self.templates is not None:
            _write(directory / TEMPLATES, lambda path: _text(path, self.templates.dump() if self.templates else ""))
        if self.bigrams is not None:
            _write(directory / BIGRAMS, lambda path: _text(path, self.bigrams.dump() if self.bigrams else ""))
        if self.forest is not None and self.forest.learnt:
            _write(directory / FOREST, self.forest.save)

    def _read(self, path: Path, read: Callable[[Path], _T]) -> _T | None:
        try:
            if path.stat().st_size > SIZE_MAX:
                raise ValueError(f"it is larger than {SIZE_MAX >> 20} MiB")
            return read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.problems.append(f"{path}: {error}; learning it anew")
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + ASIDE))
            return None


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Beside it first, so that nobody ever reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    beside = Path(name)
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
