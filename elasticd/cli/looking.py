"""Showing one picture, or one again and again.

Owns: the loop of `--watch`, and how wide and where pictures are drawn. Must not: know what they show.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elasticd.cli.failures import say
from elasticd.errors import ElasticdError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH: Final = 160
"""Columns where nobody says how many there are: in a pipe nothing is to be cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """What one look brought.

    Attributes:
        json: it for programs, one line.
        screen: makes it for people.
        over: a job that it shows has ended.
        problem: what has to be said besides, and ends a command that looks only once.
    """

    json: str
    screen: Callable[[], RenderableType]
    over: bool = False
    problem: ElasticdError | None = None


def show(look: Callable[[], Picture], *, as_json: bool, every: float | None) -> Picture:
    """Show what a look brings, once; or, with `every` seconds between two looks, until somebody interrupts.

    Returns:
        The picture shown, if it is only one.

    Raises:
        ElasticdError: the only look failed, or its picture has a problem. A watch shows errors in place and goes on: what is away may come back.
    """
    if every is not None:
        _watch(look, as_json=as_json, every=every)
    picture = look()
    _draw(picture, as_json=as_json)
    if picture.problem is not None:
        raise picture.problem
    return picture


def console() -> Console:
    """Where screens are drawn: stdout. Colours follow NO_COLOR and whether it is a terminal."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else _WIDTH)


def _watch(look: Callable[[], Picture], *, as_json: bool, every: float) -> None:
    while True:
        began = time.monotonic()
        _draw_again(look, as_json=as_json)
        time.sleep(max(0.0, every - (time.monotonic() - began)))


def _draw_again(look: Callable[[], Picture], *, as_json: bool) -> None:
    try:
        picture = look()
    except ElasticdError as error:
        if as_json:
            say(error, as_json=True)
            return
        from rich.text import Text

        failure = Text(f"elasticctl: {error}", style="red")
        picture = Picture(json="", screen=lambda: failure)
    _draw(picture, as_json=as_json, clear=True)


def _draw(picture: Picture, *, as_json: bool, clear: bool = False) -> None:
    if as_json:
        print(picture.json, flush=True)
        return
    screen = console()
    drawn = picture.screen()
    if clear and screen.is_terminal:
        screen.clear()
    screen.print(drawn)
