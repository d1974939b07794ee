"""The agent's last word: a small file for the daemon that started it, or for that daemon's successor.

Owns: how the file is written and removed. Must not: decide what the end was.

::

    {"code": 0, "result": "succeeded", "reason": "", "ended_at": 1700000000.0}

`result` is succeeded, failed, stopped or left; `ended_at` seconds since the epoch. No file: the agent was killed, or a fault of ours ended it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import structlog

from elasticd.errors import UsageError

log = structlog.get_logger("elasticd.agent")


class ResultFile:
    """One such file; with None every method does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def named_in(cls, config: Path) -> ResultFile:
        """The one that a configuration names, even if the rest of that configuration is wrong."""
        try:
            named = json.loads(config.read_bytes()).get("result_file")
        except (OSError, ValueError, RecursionError, AttributeError):  # nothing there that could name one; whoever reads it all says so
            named = None
        return cls(Path(named) if isinstance(named, str) and named else None)

    def clear(self) -> None:
        """Remove what an earlier agent left.

        Raises:
            UsageError: it cannot be removed.
        """
        if self.path is None:
            return
        try:
            self.path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot remove result_file {self.path}: {reason}", remedy="give a file in a directory that can be written") from None

    def write(self, *, code: int, result: str, reason: str) -> None:
        """Leave the last word, whole or not at all. That it cannot be written is logged: the end stays what it is."""
        if self.path is None:
            return
        text = json.dumps({"code": code, "result": result, "reason": reason, "ended_at": time.time()})
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
                file.flush()
                os.fsync(fd)
            temporary.replace(self.path)
        except (OSError, ValueError) as error:
            log.error("result_not_written", path=str(self.path), error=str(error))  # noqa: TRY400 - a full disk, say: no traceback
            with suppress(OSError, ValueError):
                temporary.unlink()
