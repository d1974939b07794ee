"""What can be known to be wrong with workers before any is started.

Owns: those checks and their messages. Must not: start anything. A program may still vanish before exec: the worker then says so itself.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from elasticd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from elasticd.agent.launch import WorkerLaunch


def check_launches(launches: Sequence[WorkerLaunch]) -> None:
    """See that ranks are unique, and that programs and working directories are there, as far as we may look.

    Raises:
        UsageError: names the worker and the thing at fault.
    """
    ranks = [launch.local_rank for launch in launches]
    if len(set(ranks)) != len(ranks):
        raise UsageError(f"local ranks {ranks} are not unique")
    for launch in launches:
        if not launch.argv:
            raise UsageError(f"worker {launch.local_rank} has no program to run")
        if not _is(stat.S_ISDIR, launch.cwd, hidden=launch.identity is not None):
            raise UsageError(f"working directory {str(launch.cwd)!r} of worker {launch.local_rank} is not a directory")
        if not _is_program(launch):
            raise UsageError(
                f"cannot run {launch.argv[0]!r} for worker {launch.local_rank}: no such executable file",
                remedy="give its full path, or a name found in the worker's PATH",
            )


def _is_program(launch: WorkerLaunch) -> bool:
    """Whether exec would find `argv[0]`, looked up as the worker will: its PATH, its working directory."""
    name = launch.argv[0]
    folders = [""] if "/" in name else launch.env.get("PATH", os.defpath).split(os.pathsep)
    candidates = [launch.cwd / folder / name for folder in folders]
    if launch.identity is not None:
        return any(_is(_executable, path, hidden=True) for path in candidates)
    return any(_is(stat.S_ISREG, path, hidden=False) and os.access(path, os.X_OK) for path in candidates)


def _executable(mode: int) -> bool:
    """By somebody; os.access would speak of the agent."""
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _is(kind: Callable[[int], bool], path: Path, *, hidden: bool) -> bool:
    """As Path.is_dir and is_file; `hidden` is the answer for a path that we may not look at, as a user's home may be."""
    try:
        return kind(path.stat().st_mode)
    except PermissionError:
        return hidden
    except (OSError, ValueError):
        return False
