"""How long a state takes to disk and back, beside the disk itself, torch.save and torch.distributed.checkpoint.

Owns: the runs and their rows. Must not: make the state, or print; `bench.checkpoint` does.

In each run every peer has its turn, so that what slows down the machine slows down all. The floor of a run is the best of two ways to write the same
bytes and fsync them: O_DIRECT in 16 MiB, and by way of the page cache. `elasticd` is the checkpoint as the agent writes it: header, image, sums,
manifest, every fsync and the rename. Loading is from the page cache where the row is measured against a copy in memory, and from the
disk, the cache emptied, where it is measured against reading the same bytes from there; `elasticd` verifies all it reads, the others nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
import warnings
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench._common import Row, paired_ratio
from trainer.checkpoint import CHUNK, Info, load_into, name_of, write
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

OURS: Final = "elasticd"
WRITE_PEERS: Final = (OURS, "torch.save", "dcp.save", "raw O_DIRECT", "raw buffered")
LOAD_PEERS: Final = (OURS, "torch.load", "torch.load mmap", "dcp.load", "raw read")
_CODES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}


def persist_rows(size_name: str, header: bytes, image: memoryview, workdir: Path, repeats: int) -> list[dict[str, Any]]:
    """Write and load a state `repeats` times with every peer.

    Args:
        size_name: how rows call it ("300mb").
        header, image: the state as `trainer.wire.layout` lays it out; the image is page aligned and is not changed.
        workdir: an empty directory on the disk that is measured; empty again afterwards.
        repeats: runs, at least 1; one more is made first and not counted.

    Returns:
        the rows, as dictionaries of `Row`'s fields: seconds of each peer, and its ratios
        `persist_x_disk_SIZE`, `load_x_memcpy_SIZE` and `load_cold_x_disk_SIZE`, run by run.
    """
    bench = _Bench(header, image, workdir)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(repeats + 1):
        for key, value in bench.run(number).items():
            if number > 0:
                seconds[key].append(value)
    floor = [min(pair) for pair in zip(seconds["persist", "raw O_DIRECT"], seconds["persist", "raw buffered"], strict=True)]
    rows = [Row.of(f"persist_{size_name}", peer, seconds["persist", peer]) for peer in WRITE_PEERS]
    rows += _ratios(f"persist_x_disk_{size_name}", "persist", seconds, floor, WRITE_PEERS)
    rows += [Row.of(f"memcpy_{size_name}", "memmove", seconds["memcpy", ""])]
    rows += [Row.of(f"load_{size_name}", peer, seconds["load", peer]) for peer in LOAD_PEERS]
    rows += _ratios(f"load_x_memcpy_{size_name}", "load", seconds, seconds["memcpy", ""], LOAD_PEERS)
    rows += _ratios(f"load_cold_x_disk_{size_name}", "cold", seconds, seconds["cold", "raw read"], LOAD_PEERS)
    return [asdict(_noted(row)) for row in rows]


def _ratios(name: str, what: str, seconds: dict[tuple[str, str], list[float]], floor: list[float], peers: tuple[str, ...]) -> list[Row]:
    rows = (paired_ratio(name, peer, list(zip(seconds[what, peer], floor, strict=True))) for peer in peers)
    return [row for row in rows if row is not None]


def _noted(row: Row) -> Row:
    if row.peer == "torch.load mmap" and row.unit == "x":
        return row.noted("maps the file and then copies it, so that all of it is there, as with the others")
    return row


class _Bench:
    """The peers, each with its files below `workdir`."""

    def __init__(self, header: bytes, image: memoryview, workdir: Path) -> None:
        import torch

        self._header, self._image, self._workdir = header, image, workdir
        self._target = memoryview(mmap.mmap(-1, len(image)))
        self._layout = Layout.parse(header[8:].rstrip(b" ").decode())
        self._torch = torch
        self._state = self._tensors(image)
        self._into = self._tensors(self._target)
        _memmove(self._target, image)  # the first touch of memory is no peer's cost

    def _tensors(self, image: memoryview) -> dict[str, Any]:
        """The state as the other libraries take it: a tensor for each entry, over the same memory."""
        torch = self._torch
        flat = torch.frombuffer(image.obj, dtype=torch.uint8)
        return {
            entry.name: flat[entry.offset : entry.end].view(getattr(torch, _CODES[entry.dtype])).view(entry.shape)
            for entry in self._layout.tensors
            if entry.nbytes
        }

    def run(self, number: int) -> dict[tuple[str, str], float]:
        """One run: what -> seconds."""
        root = self._workdir / f"run-{number}"
        root.mkdir()
        taken: dict[tuple[str, str], float] = {}
        try:
            for peer, act in self._writers(root, number).items():
                taken["persist", peer] = _timed(act)
            taken["memcpy", ""] = _timed(lambda: _memmove(self._target, self._image))
            for peer, act in self._loaders(root, number).items():
                files = self._files(root, peer, number)
                _forget(files)
                taken["cold", peer] = _timed(act)
                _read_all(files)
                taken["load", peer] = _timed(act)
        finally:
            shutil.rmtree(root)
        return taken

    def _writers(self, root: Path, number: int) -> dict[str, Callable[[], object]]:
        info = Info(job="bench", generation=1, step=number)
        writers: dict[str, Callable[[], object]] = {
            "raw O_DIRECT": lambda: _raw_write(root / "direct", self._image, os.O_DIRECT),
            OURS: lambda: write(root / "ours", header=self._header, image=self._image, info=info),
            "torch.save": lambda: self._torch_save(root / "torch.pt"),
            "raw buffered": lambda: _raw_write(root / "buffered", self._image, 0),
            "dcp.save": lambda: self._dcp_save(root / "dcp"),
        }
        names = list(writers)
        turned = names[number % len(names) :] + names[: number % len(names)]  # nobody always comes after the same one
        return {name: writers[name] for name in turned}

    def _loaders(self, root: Path, number: int) -> dict[str, Callable[[], object]]:
        return {
            OURS: lambda: load_into(root / "ours" / name_of(1, number), self._target, header_text=self._layout.header_text),
            "torch.load": lambda: self._torch_load(root / "torch.pt", mapped=False),
            "torch.load mmap": lambda: self._torch_load(root / "torch.pt", mapped=True),
            "dcp.load": lambda: self._dcp_load(root / "dcp"),
            "raw read": lambda: _raw_read(root / "buffered", self._target),
        }

    def _files(self, root: Path, peer: str, number: int) -> list[Path]:
        places = {OURS: root / "ours" / name_of(1, number), "dcp.load": root / "dcp", "raw read": root / "buffered"}
        place = places.get(peer, root / "torch.pt")
        return sorted(place.iterdir()) if place.is_dir() else [place]

    def _torch_save(self, path: Path) -> None:
        with path.open("wb") as file:
            self._torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def _torch_load(self, path: Path, *, mapped: bool) -> None:
        """Into place, as a script does it."""
        loaded = self._torch.load(path, weights_only=True, mmap=mapped)
        for name, tensor in self._into.items():
            tensor.copy_(loaded[name])

    def _dcp_save(self, path: Path) -> None:
        from torch.distributed import checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self._state, checkpoint_id=str(path), no_dist=True)

    def _dcp_load(self, path: Path) -> None:
        from torch.distributed import checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self._into, checkpoint_id=str(path), no_dist=True)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _memmove(target: memoryview, source: memoryview) -> None:
    to, where = ((ctypes.c_char * len(view)).from_buffer(view) for view in (target, source))
    ctypes.memmove(to, where, len(source))


def _raw_write(path: Path, image: memoryview, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        for start in range(0, len(image), CHUNK):
            os.pwrite(fd, image[start : start + CHUNK], start)
        os.fsync(fd)
    finally:
        os.close(fd)


def _raw_read(path: Path, target: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(target), CHUNK):
            file.readinto(target[start : start + CHUNK])


def _forget(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(files: list[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass
