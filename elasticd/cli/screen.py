"""Telling a run's story while it happens: on a terminal, in a pipe, or to a program.

Owns: what goes to stdout (the script's output, or JSON lines) and what to stderr (everything we say). Must not: know where it comes from.

A closed pipe or a terminal that hung up ends the telling, never the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from elasticd.cli.failures import LINE_MOST
from elasticd.cli.follow import LONGEST_LINE
from elasticd.cli.options import Show
from elasticd.cli.progress import Notice, Weight, cause_text
from elasticd.cli.render import age_text, clock_text, of_text, ranks_text, state_text
from elasticd.observability.harmless import coloured, harmless, unstyled
from elasticd.observability.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from elasticd.cli.follow import AgentEvent, OutputLine
    from elasticd.cli.progress import Progress

_STYLES = {Weight.QUIET: "dim", Weight.NORMAL: "", Weight.GOOD: "green", Weight.WARNING: "yellow", Weight.ERROR: "bold red"}
_LAST_NOTICES = 4
_ROWS = 12
_REFRESH = 4.0  # redraws a second


class Screen(Protocol):
    """Whoever watches a run."""

    def notice(self, notice: Notice) -> None:
        """Say a sentence."""

    def event(self, event: AgentEvent) -> None:
        """An agent's event, as it is."""

    def output(self, line: OutputLine) -> None:
        """Pass a worker's line on."""

    def draw(self, progress: Progress) -> None:
        """The state may have changed."""

    def close(self) -> None:
        """The end: leave the terminal as it was."""


class _Writer:
    """Bytes to a stream, until nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: BinaryIO | None = stream.buffer
        self._text = stream

    def __call__(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
            # Python would try once more at its exit, and complain.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._text.fileno())


def _prefixed(line: OutputLine, show: Show, *, terminal: bool = False) -> bytes:
    """A line of output: as it is for a file or a program; for a terminal harmless, its colours ended."""
    prefix = f"[{line.node} {line.rank}] ".encode() if show is Show.ALL else b""
    data = line.data
    if terminal:
        text = coloured(data.rstrip(b"\r").rpartition(b"\r")[2], LONGEST_LINE)
        data = (text + "\x1b[0m" if "\x1b" in text else text).encode("utf-8", "replace")
    return prefix + data + b"\n"


class PlainScreen:
    """For a pipe or a log: notices with the time of day on stderr, output as it is, unless it goes to a terminal after all.

    Args:
        show: whether several workers' lines have to be told apart.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._to = {"stdout": _Writer(sys.stdout), "stderr": _Writer(sys.stderr)}
        self._terminals = {"stdout": sys.stdout.isatty(), "stderr": sys.stderr.isatty()}

    def notice(self, notice: Notice) -> None:
        """See `Screen`."""
        self._to["stderr"](f"{clock_text(notice.at or time.time())} {_shown(notice)}\n".encode("utf-8", "replace"))

    def event(self, event: AgentEvent) -> None:
        """See `Screen`."""

    def output(self, line: OutputLine) -> None:
        """See `Screen`."""
        self._to[line.stream](_prefixed(line, self._show, terminal=self._terminals[line.stream]))

    def draw(self, progress: Progress) -> None:
        """See `Screen`."""

    def close(self) -> None:
        """See `Screen`."""


class JsonScreen:
    """For a program: every event a JSON line on stdout, output among them; sentences still go to stderr."""

    def __init__(self) -> None:
        self._stdout, self._stderr = _Writer(sys.stdout), _Writer(sys.stderr)

    def notice(self, notice: Notice) -> None:
        """See `Screen`."""
        self._stderr(f"{clock_text(notice.at or time.time())} {_shown(notice)}\n".encode("utf-8", "replace"))

    def event(self, event: AgentEvent) -> None:
        """See `Screen`."""
        self._write({"event": event.name, "time": rfc3339(event.at), "level": event.level, **event.fields, "node": event.node})

    def output(self, line: OutputLine) -> None:
        """See `Screen`."""
        text = harmless(unstyled(line.data.decode("utf-8", "replace")), LONGEST_LINE, keep="\t")
        self._write({"event": "output", "time": rfc3339(time.time()), "node": line.node, "rank": line.rank, "stream": line.stream, "text": text})

    def draw(self, progress: Progress) -> None:
        """See `Screen`."""

    def close(self) -> None:
        """See `Screen`."""

    def _write(self, document: dict[str, Any]) -> None:
        self._stdout(json.dumps(document).encode() + b"\n")


class LiveScreen:
    """For a terminal: the job's state at the bottom, redrawn in place; output and notices scroll above it.

    Args:
        show: whether several workers' lines have to be told apart.
        started: seconds on the monotonic clock when the run began.
    """

    def __init__(self, show: Show, started: float) -> None:
        self._show = show
        self._started = started
        self._console = Console(stderr=True, highlight=False)
        # Where stdout is a file, the script's output goes there as it is; on the same terminal it must scroll above the live part.
        self._stdout = None if sys.stdout.isatty() else _Writer(sys.stdout)
        self._last: deque[Notice] = deque(maxlen=_LAST_NOTICES)
        self._progress: Progress | None = None
        self._live = Live(console=self._console, get_renderable=self._render, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._drawn = 0.0
        self._gone = False
        self._try(self._live.start)

    def notice(self, notice: Notice) -> None:
        """See `Screen`. Quiet ones are shown in the live part only, and are gone with it."""
        notice = notice if notice.at else dataclasses.replace(notice, at=time.time())
        self._last.append(notice)
        if notice.weight is not Weight.QUIET:
            self._try(lambda: self._console.print(_notice_text(notice), soft_wrap=True))

    def event(self, event: AgentEvent) -> None:
        """See `Screen`."""

    def output(self, line: OutputLine) -> None:
        """See `Screen`."""
        if line.stream == "stdout" and self._stdout is not None:
            self._stdout(_prefixed(line, self._show))
            return
        # What a progress bar overwrote on its line is not shown; colours are.
        text = Text.from_ansi(coloured(line.data.rstrip(b"\r").rpartition(b"\r")[2], LONGEST_LINE))
        if self._show is Show.ALL:
            text = Text.assemble((f"[{line.node} {line.rank}] ", "dim"), text)
        self._try(lambda: self._console.print(text, soft_wrap=True))

    def draw(self, progress: Progress) -> None:
        """See `Screen`."""
        self._progress = progress
        now = time.monotonic()
        if now - self._drawn >= 1 / _REFRESH:
            self._drawn = now
            self._try(self._live.refresh)

    def close(self) -> None:
        """See `Screen`."""
        self._try(self._live.stop)

    def _try(self, action: Callable[[], object]) -> None:
        """Do something to the terminal, unless it has hung up."""
        if self._gone:
            return
        try:
            action()
        except (OSError, ValueError):
            self._gone = True

    def _render(self) -> RenderableType:
        progress = self._progress
        if progress is None:
            return Text("starting ...", style="dim")
        width = self._console.width
        lines = [Text("─" * width, style="dim"), _headline(progress, time.monotonic() - self._started), *_node_lines(progress)]
        lines += [_notice_text(notice) for notice in self._last]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(*lines[: max(3, self._console.height - 2)])


def make_screen(show: Show, *, jsonl: bool, started: float) -> Screen:
    """The screen that fits: JSON lines if asked for, live on a terminal that can be drawn on, else plain."""
    if jsonl:
        return JsonScreen()
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return LiveScreen(show, started)
    return PlainScreen(show)


def _notice_text(notice: Notice) -> Text:
    return Text.assemble((clock_text(notice.at or time.time()), "dim"), " ", (_shown(notice), _STYLES[notice.weight]))


def _shown(notice: Notice) -> str:
    """A sentence may hold what a worker or another node said."""
    return harmless(notice.text, LINE_MOST, keep="\n\t")


def _headline(progress: Progress, elapsed: float) -> Text:
    status = progress.status
    text = Text.assemble((progress.job, "bold"), "  ")
    if status is None:
        return text.append("starting", style="cyan").append(f"  {age_text(elapsed)}")
    text.append_text(state_text(status.state))
    if progress.store_problem:
        text.append(" (etcd unreachable)", style="bold red")
    # What is long comes last: a narrow terminal cuts it off.
    parts = [f"step {progress.step}"] if progress.step is not None else []
    parts += [f"world size {status.world_size}", f"restarts {of_text(status.restarts_used, status.restarts_max)}", age_text(elapsed)]
    parts += [f"generation {status.generation}: {cause_text(status.cause or '')}"] if status.generation else []
    return text.append("  " + "  ".join(parts))


def _node_lines(progress: Progress) -> list[Text]:
    nodes = progress.status.nodes if progress.status else ()
    widest = max((len(node.name) for node in nodes), default=0)
    lines = []
    for node in nodes[:_ROWS]:
        state = state_text(node.state)
        state.pad_right(max(0, 9 - len(state)))
        lines.append(Text.assemble(f"  {node.name:<{widest}}  ", state, f"  ranks {ranks_text(node.ranks)}" if node.ranks else ""))
    if len(nodes) > _ROWS:
        lines.append(Text(f"  and {len(nodes) - _ROWS} more", style="dim"))
    return lines
