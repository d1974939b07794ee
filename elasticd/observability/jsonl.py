"""Files of JSON lines that fill no disk and hold nobody up.

Owns: appending, the size at which a file gives way to the next (its predecessor is kept as NAME.1), and a thread between the writer and a slow disk.
Must not: know what is in a line.

Lines are whole or not there at all: what a full disk took only half of is cut off again.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

log = structlog.get_logger("elasticd.observability.jsonl")

BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of a file; with its predecessor a file takes twice as many."""
WAITING_MAX: Final = 4096
"""Lines that wait for the disk."""


class JsonLines:
    """Appends to one file.

    Args:
        path: of the file; its directory exists.
        max_bytes: beyond which it gives way to the next.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int = BYTES_MAX) -> None:
        self.path: Final = path
        self._max_bytes = max_bytes
        self._fd, self._size = _open(path)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add these lines, each with its end.

        Raises:
            OSError: the disk did not take them; none of them is in the file.
        """
        data = b"".join(lines)
        if self._size and self._size + len(data) > self._max_bytes:
            self._give_way()
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(28, "no space left for a whole line")
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Let the file go."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _give_way(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self.close()
        self._fd, self._size = _open(self.path)


class JsonWriter:
    """Appends to files from a thread of its own, which starts with the first line. Every method may be called from any thread.

    Args:
        name: of the thread.
        max_bytes: of a file.
        waiting_max: lines that may wait; of more, the newest are dropped and counted.
    """

    def __init__(self, name: str, *, max_bytes: int = BYTES_MAX, waiting_max: int = WAITING_MAX) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Path, Mapping[str, Any]]] = deque()
        self._busy = False
        self._closing = False
        self._failing = False
        self._file: JsonLines | None = None
        self._thread: threading.Thread | None = None
        self.lost = 0

    def put(self, path: Path, line: Mapping[str, Any]) -> None:
        """Have a line added to the file at `path`. Never waits; nobody may change `line` from now on."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._waiting_max:
                self.lost += 1
                return
            self._waiting.append((path, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing waits for the disk; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Take no more, and wait up to `seconds` for the disk to have what was put."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next():
            self._write(batch)
        if self._file is not None:
            self._file.close()

    def _next(self) -> list[tuple[Path, Mapping[str, Any]]]:
        """Lines of one file; none in the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing)
            batch: list[tuple[Path, Mapping[str, Any]]] = []
            while self._waiting and (not batch or self._waiting[0][0] == batch[0][0]):
                batch.append(self._waiting.popleft())
            self._busy = bool(batch)
            return batch

    def _write(self, batch: list[tuple[Path, Mapping[str, Any]]]) -> None:
        path = batch[0][0]
        try:
            lines = [json.dumps(line, separators=(",", ":"), default=str).encode("utf-8", "backslashreplace") + b"\n" for _path, line in batch]
            self._open(path).append(lines)
        except Exception as error:  # whatever a line or a disk does, the next line may go well
            self.lost += len(batch)
            if not self._failing:
                log.error("lines_not_written", path=str(path), error=str(error))  # noqa: TRY400 - a full disk, say: no traceback
            self._failing = True
        else:
            if self._failing:
                log.info("lines_written_again", path=str(path), lost=self.lost)
            self._failing = False

    def _open(self, path: Path) -> JsonLines:
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._file.close()
            self._file = None
            self._file = JsonLines(path, max_bytes=self._max_bytes)
        return self._file


def _open(path: Path) -> tuple[int, int]:
    """(descriptor, bytes that are there)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    return fd, os.fstat(fd).st_size
