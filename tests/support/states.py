"""States for tests: small ones that look like a model's, and whose every byte follows from generation and step."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from trainer.checkpoint import CHUNK, Info, Manifest, load_newest, write
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.checkpoint import Found

THREE_CHUNKS = 2 * CHUNK + 300_000


@cache
def layout_of(nbytes: int) -> Layout:
    """A weight of about that size, a bias, and some extras."""
    return Layout.build([("model.weight", "F32", (nbytes // 4,)), ("model.bias", "F32", (7,)), ("model.steps", "I64", ())], extras=1000)


@dataclass(frozen=True, kw_only=True)
class State:
    layout: Layout
    image: memoryview
    info: Info

    def write(self, root: Path) -> Manifest:
        return write(root, header=self.layout.header, image=self.image, info=self.info)


def make_state(generation: int, step: int, *, nbytes: int = 100_000, **known: object) -> State:
    layout = layout_of(nbytes)
    image = memoryview(mmap.mmap(-1, layout.size))
    image[:] = _content(generation, step, layout.size)
    return State(layout=layout, image=image, info=Info(job="digits", generation=generation, step=step, **known))  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _content(generation: int, step: int, size: int) -> bytes:
    return random.Random(f"{generation} {step}").randbytes(size)


def room_for(manifest: Manifest, _header_text: str = "") -> memoryview:
    return memoryview(mmap.mmap(-1, manifest.size))


def newest(root: Path, *, nbytes: int = 100_000) -> tuple[tuple[int, int] | None, list[str]]:
    """(generation, step) of what a start would load, its content compared to what it must be; and what was reported about others."""
    reports: list[str] = []
    images: list[memoryview] = []

    def place(manifest: Manifest, text: str) -> memoryview:
        images.append(room_for(manifest, text))
        return images[-1]

    def report(found: Found, error: Exception) -> None:
        reports.append(f"{found.path.name}: {error}")

    loaded = load_newest(root, place, report=report)
    if loaded is None:
        return None, reports
    order = loaded.found.order
    expected = make_state(*order, nbytes=nbytes)
    assert images[-1] == expected.image, f"{loaded.found.path.name} holds something else"
    assert loaded.header_text == expected.layout.header_text
    return order, reports
