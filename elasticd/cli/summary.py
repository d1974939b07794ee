"""How a run ended, and the file that says so to programs.

Owns: the outcome and the summary's schema. Must not: decide the outcome (`run` does).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.errors import ElasticdError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticd.cli.progress import GenerationSeen


class RunResult(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by an operator, or this node was asked to leave
    INTERRUPTED = "interrupted"  # by a signal to elasticctl


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended, why, and what to exit with."""

    result: RunResult
    reason: str
    exit_code: int


def write_summary(path: Path, outcome: RunOutcome, *, job: str, log_dir: Path, restarts: int, generations: Iterable[GenerationSeen]) -> None:
    """Write the summary in one step: a reader finds all of it or nothing. Times are seconds since the epoch.

    Raises:
        ElasticdError: it cannot be written.
    """
    document = {
        "result": outcome.result.value,
        "reason": outcome.reason,
        "job": job,
        "generations": [
            {
                "number": seen.number,
                "cause": seen.cause,
                "world_size": seen.world_size,
                "formed_at": seen.formed_at,
                "first_worker_up_at": seen.first_worker_up_at,
            }
            for seen in sorted(generations, key=lambda seen: seen.number)
        ],
        "restarts": restarts,
        "log_dir": str(log_dir),
    }
    path = path.absolute()
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp's 0600 would keep other users from it
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        raise ElasticdError(f"cannot write the summary {path}: {error.strerror}") from None


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
