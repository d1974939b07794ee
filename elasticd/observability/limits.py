"""How much may be logged, and from which level on.

Owns: the limits, their defaults, and the names of levels. Must not: log, or delete anything.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LEVEL_VARIABLE: Final = "ELASTICD_LOG_LEVEL"
"""Environment variable that overrules the configured level."""

Level = Literal["debug", "info", "warning", "error", "critical"]
FileBytes = Annotated[int, Field(ge=64 * 1024, le=1 << 50)]


class LogLimits(BaseModel):
    """What is kept of logs on one node.

    Attributes:
        level: of elasticd's own logs: what is less is not written.
        worker_bytes: of one file of a worker's output; at a full file the older lines are moved aside.
        worker_files: files with older lines that are kept beside it.
        generations: directories of generations that are kept, of one job.
        job_bytes: of these directories together; the present one is never taken.
        own_bytes: of each log of elasticd's own; one predecessor of the same size is kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level = "info"
    worker_bytes: FileBytes = 64 << 20
    worker_files: Annotated[int, Field(ge=0, le=9)] = 1
    generations: Annotated[int, Field(ge=2, le=100_000)] = 20
    job_bytes: FileBytes = 4 << 30
    own_bytes: FileBytes = 16 << 20

    @property
    def number(self) -> int:
        """The level as `logging` has it."""
        return int(getattr(logging, self.level.upper()))

    def overruled(self, environ: Mapping[str, str]) -> Self:
        """The same with the level that the environment names, if it names one.

        Raises:
            UsageError: it names none that there is.
        """
        name = environ.get(LEVEL_VARIABLE, "").strip().lower()
        if not name:
            return self
        if name not in get_args(Level):
            raise UsageError(f"{LEVEL_VARIABLE}={name[:40]!r} is no level", remedy=f"use one of {', '.join(get_args(Level))}")
        return self.model_copy(update={"level": name})
