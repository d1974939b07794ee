"""What a waiting verb says while it waits.

Owns: progress lines on stderr, and the time that has passed beside them on a terminal. Must not: know what they are about.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

from elasticd.cli.failures import one_line


class Talk:
    """One line for each change. On a terminal the last one is drawn again in place with the time that has passed.

    Args:
        as_json: say nothing unless a person looks: whoever reads JSON reads stderr too.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        terminal = sys.stderr.isatty()
        self._as_json = as_json
        self._drawn = terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._silent = as_json and not terminal
        self._last = ""

    def show(self, line: str, elapsed: float) -> None:
        """How things stand, `elapsed` seconds after the change was asked for."""
        line = one_line(line)
        if self._silent or not line:
            return
        if self._drawn:
            self._draw(line, elapsed)
        elif line != self._last:
            self._write(f"{line}\n")
        self._last = line

    def done(self, line: str, elapsed: float) -> None:
        """How it ended. Whoever does not read JSON is told that on stdout."""
        if self._as_json:
            self.show(line, elapsed)

    def end(self) -> None:
        """Leave the terminal at the beginning of a line."""
        if self._drawn and self._last:
            self._write("\n")
        self._last = ""

    def _draw(self, line: str, elapsed: float) -> None:
        text = f"{elapsed:5.0f} s  {line}"
        width = shutil.get_terminal_size().columns
        if len(text) >= width:
            text = text[: width - 2] + "…"
        self._write(("\n" if self._last not in ("", line) else "") + f"\r\x1b[2K{text}")

    def _write(self, text: str) -> None:
        # A terminal that has hung up ends the talking, not the waiting.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
