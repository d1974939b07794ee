"""Which checkpoints stay, and which go.

Owns: the choice, and carrying it out. Must not: touch anything of a generation later than the caller's (PROTOCOL 26), or remove anything before a
newer checkpoint has been read back whole.

The choice is a pure function (`choose`). "Newer" is by generation, then by step, as numbers; names are never compared as text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from trainer.checkpoint.disk import free_space, generation_of, remove, tidy
from trainer.checkpoint.load import newest_valid, read_manifest, scan
from trainer.checkpoint.manifest import BAD, TMP, Found
from trainer.errors import DamagedError, SetupError

if TYPE_CHECKING:
    from pathlib import Path

KEPT_BAD: Final = 1
"""How many of those set aside stay for people to look at: the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Keep the `count` checkpoints whose `metric` is lowest ("min") or highest ("max"). The script gives the metric; those without it do not count."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What stays; everything else goes.

    Attributes:
        last: the newest so many, at least 1; with 2 a damaged newest one costs little.
        every: for each multiple of so many steps, the first checkpoint at or after it; 0 for none. Those that a later generation went back
            behind do not count: their steps were done again.
        best: by metrics.
    """

    last: int = 2
    every: int = 0
    best: tuple[Best, ...] = ()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise SetupError(f"keeping the last {self.last} checkpoints would keep none", remedy="keep at least 1")
        if self.every < 0 or any(item.count < 1 or item.mode not in {"min", "max"} for item in self.best):
            raise SetupError(f"checkpoints cannot be kept by {self}", remedy='every is 0 or more, a count 1 or more, a mode "min" or "max"')


def choose(found: Sequence[Found], keep: Keep, metrics: Mapping[tuple[int, int], Mapping[str, float]]) -> set[tuple[int, int]]:
    """(generation, step) of those that `keep` keeps.

    Args:
        found: all there are, newest first.
        keep: the wish.
        metrics: of each, by (generation, step); those missing have none.
    """
    return {item.order for item in found[: keep.last]} | _periodic(found, keep.every) | best_of(metrics, keep.best)


def best_of(metrics: Mapping[tuple[int, int], Mapping[str, float]], best: Iterable[Best]) -> set[tuple[int, int]]:
    """(generation, step) of the best by each of `best`; of two alike the newer."""
    chosen: set[tuple[int, int]] = set()
    for wish in best:
        sign = 1.0 if wish.mode == "max" else -1.0
        ranked = sorted(((sign * values[wish.metric], order) for order, values in metrics.items() if wish.metric in values), reverse=True)
        chosen |= {order for _value, order in ranked[: wish.count]}
    return chosen


def retain(
    root: Path,
    keep: Keep,
    protect: Collection[tuple[int, int]] = (),
    *,
    verified: tuple[int, int] | None = None,
) -> list[Found]:
    """Remove the checkpoints that `keep` does not keep, and all but the newest of those set aside.

    Args:
        root: directory of checkpoints.
        keep: what stays.
        protect: (generation, step) of others that stay: the committed one.
        verified: (generation, step) that the caller has read back whole; None to have the newest that is whole looked for here. Only what
            is older than it goes. Where there is one of a later generation nothing goes: the caller is not the one whose business it is.

    Returns:
        those removed.

    Raises:
        OSError: the directory refuses.
    """
    if verified is None:
        newest = newest_valid(root)
        if newest is None:
            return []
        verified = newest[0].order
    found = scan(root)
    if not found or found[0].generation > verified[0]:
        return []
    older = [item for item in found if item.order <= verified]
    kept = choose(older, keep, _metrics(older, keep)) | {verified, *protect}
    removed = [item for item in older if item.order not in kept and remove(item.path)]
    for path in _set_aside(root, verified[0])[KEPT_BAD:]:
        remove(path)
    return removed


def make_room(
    root: Path,
    keep: Keep,
    protect: Collection[tuple[int, int]] = (),
    *,
    generation: int,
    wanted: int,
    verified: Collection[tuple[int, int]] = (),
    report: Callable[[Found, Exception], None] | None = None,
) -> Path | None:
    """Remove one thing, for the disk is full: drafts of the dead, else the oldest that was set aside, else the oldest checkpoint.

    Never the newest that is whole, one in `protect`, one of the best, or anything of a generation after `generation`; `every` does not hold here.
    Nothing either, if all that may go would not make room for `wanted` bytes.

    Args:
        root, keep, protect: as of `retain`.
        generation: the caller's.
        wanted: bytes that are to be written.
        verified: (generation, step) of those that the caller has read back whole; if the newest is not among them, it is read here.
        report: as of `newest_valid`.

    Returns:
        what went; None if there is nothing to be gained.

    Raises:
        OSError: the directory refuses.
    """
    if drafts := tidy(root, generation):
        return drafts[0]
    found = scan(root)
    newest = found[0].order if found and found[0].order in verified else _newest_order(root, report)
    kept = best_of(_metrics(found, keep), keep.best) | set(protect)
    spare = [item.path for item in found if item.generation <= generation and item.order not in kept and (newest is None or item.order < newest)]
    removable = [*spare, *_set_aside(root, generation)]
    if not removable or free_space(root) + sum(_size(path) for path in removable) < wanted:
        return None
    return removable[-1] if remove(removable[-1]) else None


def _newest_order(root: Path, report: Callable[[Found, Exception], None] | None) -> tuple[int, int] | None:
    newest = newest_valid(root, report=report)
    return None if newest is None else newest[0].order


def _size(path: Path) -> int:
    """Bytes that the files in a directory take."""
    total = 0
    with suppress(OSError):
        for item in path.iterdir():
            total += item.lstat().st_blocks * 512
    return total


def _periodic(found: Sequence[Found], every: int) -> set[tuple[int, int]]:
    """The first of each period, of those whose steps no later generation did again."""
    if every == 0:
        return set()
    first: dict[int, tuple[int, int]] = {}
    lowest: int | None = None
    for item in found:  # from the newest down: a step that is not below all of those seen belongs to a past that was given up
        if lowest is None or item.step < lowest:
            lowest = item.step
            if item.step >= every:
                first[item.step // every] = item.order
    return set(first.values())


def _metrics(found: Iterable[Found], keep: Keep) -> dict[tuple[int, int], Mapping[str, float]]:
    """Metrics of each that can be read; nothing is read where nobody asks for the best."""
    metrics: dict[tuple[int, int], Mapping[str, float]] = {}
    for item in found if keep.best else ():
        with suppress(DamagedError, OSError):
            metrics[item.order] = read_manifest(item.path).metrics
    return metrics


def _set_aside(root: Path, generation: int) -> list[Path]:
    """Those set aside, of `generation` and before, the newest first by when they were."""
    bad = [
        path
        for path in root.iterdir()
        if BAD in path.name and not path.name.endswith(TMP) and (found := generation_of(path.name)) is not None and found <= generation
    ]
    return sorted(bad, key=_changed_at, reverse=True)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
