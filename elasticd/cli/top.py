"""`elasticctl top`: looking again and again, and drawing it in place.

Owns: asking beside the drawing, keys, and the terminal while it is drawn on. Must not: know how it looks (`render_top`), or who answers (`sources`).

A picture is written in one piece from the upper left corner on, each line to its end, and nothing is cleared before: so nothing flickers. Who is
asked may be slow; that holds up neither keys nor the ages on the screen.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import termios
import threading
import time
import tty
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from elasticd.cli.asking import Document
from elasticd.cli.failures import one_line
from elasticd.cli.looking import Picture, console, show
from elasticd.errors import ElasticdError, NotRunningError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from elasticd.cli.render_top import Known
    from elasticd.cli.sources import Source

_REDRAWN: Final = 1.0  # seconds after which ages are drawn anew
_TALL: Final = 1_000_000  # lines where nothing is cut off
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the other screen, no cursor, no wrapping
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions:
    """`elasticctl top`, checked. `every`: seconds between two looks, None for one look."""

    job: str | None
    every: float | None
    as_json: bool


def top(options: TopOptions, source: Source) -> None:
    """Show it once, or until q or Ctrl-C.

    Raises:
        NotRunningError: the only look found no report of the job.
        ElasticdError: the only look failed.
    """
    if options.every is None or options.as_json or not _drawable():
        show(lambda: _picture(options, source), as_json=options.as_json, every=options.every)
        return
    looks = _Looks(source, options.job, options.every)
    with _Terminal() as terminal:
        looks.start()
        while not terminal.asked_to_end(looks.news, _REDRAWN):
            terminal.draw(looks.screen(terminal.size))


def _picture(options: TopOptions, source: Source) -> Picture:
    """One look, for a pipe or a program."""
    data = source.telemetry(options.job)
    seen = _Seen()
    seen.learn(data)
    silent = options.job is not None and not any(one["job"] == options.job for part in data["nodes"] for one in part["jobs"])
    problem = NotRunningError(f"no node reports job {options.job!r} now", remedy=f"see: elasticctl status {options.job}") if silent else None
    document = {"apiVersion": "elasticd/v1", "kind": "Telemetry", "revision": None, "data": data}
    return Picture(json=json.dumps(document), screen=lambda: seen.screen(options.job, (console().width, _TALL)), problem=None if options.every else problem)


@dataclass(slots=True)
class _Seen:
    """All that answers have told so far."""

    nodes: Mapping[str, Known] = field(default_factory=dict)
    etcd: Document | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""

    def learn(self, data: Document) -> None:
        """An answer came."""
        from elasticd.cli.render_top import learn

        self.nodes = learn(self.nodes, data["nodes"], time.monotonic())
        self.etcd, self.notes, self.problem = data["etcd"], tuple(data["notes"]), ""

    def screen(self, job: str | None, size: tuple[int, int]) -> RenderableType:
        """It, drawn for a terminal of this size."""
        from rich.console import Group
        from rich.text import Text

        from elasticd.cli.render_top import top_screen

        width, height = size
        words = [Text(one_line(note), style="yellow") for note in self.notes]
        words += [Text(one_line(self.problem), style="bold red")] if self.problem else []
        for line in words:
            line.truncate(width, overflow="ellipsis")
        drawn = top_screen(self.nodes, self.etcd, now=time.monotonic(), at=time.time(), size=(width, height - len(words)), job=job)
        return Group(*words, drawn)


class _Looks:
    """Asks on a thread of its own, so that whoever answers slowly does not hold up the screen.

    Attributes:
        news: readable when there is something new to draw.
    """

    def __init__(self, source: Source, job: str | None, every: float) -> None:
        self._source = source
        self._job = job
        self._every = every
        self._seen = _Seen()
        self._lock = threading.Lock()
        self.news, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self) -> None:
        """Begin, for as long as the process lives."""
        threading.Thread(target=self._look, name="elasticctl-top", daemon=True).start()

    def screen(self, size: tuple[int, int]) -> RenderableType:
        """What is known now."""
        from rich.text import Text

        with contextlib.suppress(BlockingIOError):
            while os.read(self.news, 64):
                pass
        with self._lock:
            if not self._seen.nodes and not self._seen.problem:
                return Text("looking ...", style="dim")
            return self._seen.screen(self._job, size)

    def _look(self) -> None:
        while True:
            began = time.monotonic()
            try:
                data = self._source.telemetry(self._job)
            except ElasticdError as error:
                with self._lock:
                    self._seen.problem = f"elasticctl: {error}"
            else:
                with self._lock:
                    self._seen.learn(data)
            with contextlib.suppress(OSError):
                os.write(self._write, b"n")
            time.sleep(max(0.05, self._every - (time.monotonic() - began)))


class _Terminal:
    """The terminal while it is drawn on; as it was afterwards."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._put(_ENTER)
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError):
            self._put(_LEAVE)
        if self._before is not None:
            # What was typed meanwhile was for us, not for the shell.
            termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def draw(self, picture: RenderableType) -> None:
        """Put it in the place of the one before."""
        width, height = self.size
        screen = console()
        with screen.capture() as captured:
            screen.print(picture, width=width, no_wrap=True)
        lines = captured.get().rstrip("\n").split("\n")[:height]
        # Terminals that know the first and the last show all at once.
        self._put("\x1b[?2026h\x1b[H" + "\n".join(f"{line}\x1b[0m\x1b[K" for line in lines) + "\x1b[J\x1b[?2026l")

    def asked_to_end(self, news: int, longest: float) -> bool:
        """Wait for a key, for something new, for another size of the terminal, or `longest` seconds; whether q was typed."""
        until = time.monotonic() + longest
        size = self.size
        watched = [news] if self._before is None else [news, sys.stdin]
        while (left := until - time.monotonic()) > 0 and self.size == size:
            ready, _, _ = select.select(watched, (), (), min(left, 0.2))
            if sys.stdin in ready:
                typed = os.read(sys.stdin.fileno(), 64)
                return not typed or any(key in b"qQ" for key in typed)
            if ready:
                break
        return False

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _drawable() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
