"""Copies of checkpoints on other storage, by fsspec: a mounted file system, an object store, whatever it knows.

Owns: the copy's order, and that it is verified both ways. Must not: keep or remove copies, or hold credentials; fsspec finds those as usual.

An object store knows no rename and no directory. So data goes first and the manifest last: without a manifest there is no checkpoint, and an
interrupted copy is written over by the next one. A copy is made only of what verifies while it is read, and one that is fetched becomes a
checkpoint of this machine only after all of it was verified.

Errors of a store are its library's own, mostly OSErrors; nothing is left half-done by any.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.disk import check_space, make_root, saying, sync_directory
from trainer.checkpoint.load import read_manifest, verify
from trainer.checkpoint.manifest import CHUNK, DATA, MANIFEST, MAX_MANIFEST, TMP, Manifest, digest_of, header_digest_of, name_of, parse_name, sum_of
from trainer.checkpoint.write import draft, write_at
from trainer.errors import CancelledError, DamagedError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A complete copy on other storage."""

    url: str
    generation: int
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """As `Found.order`."""
        return (self.generation, self.step)


def upload(
    path: Path,
    url: str,
    *,
    options: Mapping[str, Any] | None = None,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Remote:
    """Copy the checkpoint in the directory `path` to below `url`, verifying it on the way. Does nothing if it is there.

    Args:
        path: its directory.
        url: "s3://bucket/prefix", "file:///mnt/shared/job", …: where copies lie, as `root` is on a disk.
        options: for fsspec's file system.
        cancel, progress: as of `write`.

    Raises:
        DamagedError: the checkpoint is not what was written. What was copied of it is not seen as a checkpoint.
        StateError: another state of this generation and step is there.
        CancelledError: `cancel` said so.
    """
    fs, base = _open_storage(url, options)
    manifest = read_manifest(path)
    name = name_of(manifest.generation, manifest.step)
    target = f"{base}/{name}"
    if not _is_there(fs, target, manifest):
        fs.makedirs(target, exist_ok=True)
        with fs.open(f"{target}/{DATA}", "wb", block_size=CHUNK) as file:
            for part in _verified(path / DATA, manifest, cancel, progress):
                file.write(part)
            _sync(file)
        _put_manifest(fs, target, manifest.encode())
    return Remote(url=f"{url.rstrip('/')}/{name}", generation=manifest.generation, step=manifest.step)


def download(
    url: str,
    root: Path,
    *,
    generation: int,
    step: int,
    options: Mapping[str, Any] | None = None,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Fetch the copy of one state from below `url` into the directory of checkpoints `root`, durable and verified when this returns.

    Returns:
        its directory. If it was there already and whole, nothing is fetched.

    Raises:
        DamagedError: the copy is not what was written, or there is none. Nothing is left of it here.
        NoSpaceError, CancelledError, StateError, OSError: as `write`.
    """
    final = root / name_of(generation, step)
    with suppress(DamagedError):
        verify(final, cancel=cancel)
        return final
    fs, base = _open_storage(url, options)
    source, shown = f"{base}/{final.name}", f"{url.rstrip('/')}/{final.name}"
    fs.invalidate_cache()
    manifest = _read_manifest(fs, source, shown)
    make_root(root)
    check_space(root, manifest.header_size + manifest.size)
    started = time.monotonic()
    with draft(final) as ours:
        try:
            file = fs.open(f"{source}/{DATA}", "rb", block_size=CHUNK)
        except FileNotFoundError:
            raise DamagedError(f"{shown}/{DATA} is missing") from None
        with file, saying(ours.data):
            _take(file, ours.fd, manifest, f"{shown}/{DATA}", cancel, progress)
        ours.publish(final, replace(manifest, seconds=round(time.monotonic() - started, 3)))
    return final


def list_remote(url: str, *, options: Mapping[str, Any] | None = None) -> list[Remote]:
    """Complete copies below `url`, the newest (generation, step) first; empty if there is no such place."""
    fs, base = _open_storage(url, options)
    fs.invalidate_cache()
    try:
        paths = fs.glob(f"{base}/step-*/{MANIFEST}")
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        name = str(path).rsplit("/", 2)[-2]
        if (parsed := parse_name(name)) is not None:
            found.append(Remote(url=f"{url.rstrip('/')}/{name}", generation=parsed[0], step=parsed[1]))
    return sorted(found, key=lambda item: item.order, reverse=True)


def _open_storage(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # slow to import, and needed by few

    fs, base = url_to_fs(url, **(options or {}))
    return fs, str(base).rstrip("/")


def _is_there(fs: Any, target: str, manifest: Manifest) -> bool:
    """Whether this very state is there, complete. A damaged manifest is written over."""
    fs.invalidate_cache()
    try:
        theirs = _read_manifest(fs, target, target)
        if fs.size(f"{target}/{DATA}") != theirs.header_size + theirs.size:
            return False
    except (DamagedError, FileNotFoundError):
        return False
    if theirs.digest != manifest.digest:
        raise StateError(f"{target} holds another state of the same generation and step", remedy="give each job a place of its own")
    return True


def _read_manifest(fs: Any, target: str, name: str) -> Manifest:
    try:
        with fs.open(f"{target}/{MANIFEST}", "rb") as file:
            content = file.read(MAX_MANIFEST + 1)
    except FileNotFoundError:
        raise DamagedError(f"{name}/{MANIFEST} is missing") from None
    manifest = Manifest.decode(content, name=f"{name}/{MANIFEST}")
    if parse_name(target.rsplit("/", 1)[-1]) not in {None, (manifest.generation, manifest.step)}:
        raise DamagedError(f"{name}/{MANIFEST} is that of generation {manifest.generation}, step {manifest.step}")
    return manifest


def _parts(read: Callable[[int], bytes], manifest: Manifest, name: str, cancel: Callable[[], bool] | None) -> Iterator[bytes]:
    """The header, then every chunk of the image, each verified before it is given on."""
    header = _read_whole(read, manifest.header_size, name)
    if header_digest_of(header) != manifest.header_digest or digest_of(header, [bytes.fromhex(item) for item in manifest.chunks]) != manifest.digest:
        raise DamagedError(f"{name}: the header is not what was written")
    yield header
    for index, wanted in enumerate(manifest.chunks):
        if cancel is not None and cancel():
            raise CancelledError(f"the copying of {name} was ended")
        chunk = _read_whole(read, min(CHUNK, manifest.size - index * CHUNK), name)
        if sum_of(chunk).hex() != wanted:
            raise DamagedError(f"{name}: chunk {index} is not what was written")
        yield chunk
    if read(1):
        raise DamagedError(f"{name} is longer than {manifest.header_size + manifest.size} bytes")


def _read_whole(read: Callable[[int], bytes], size: int, name: str) -> bytes:
    parts = []
    while size > 0:
        part = read(size)
        if not part:
            raise DamagedError(f"{name} ends too early")
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _verified(name: Path, manifest: Manifest, cancel: Callable[[], bool] | None, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    done = -manifest.header_size
    try:
        file = name.open("rb")
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    with file:
        for part in _parts(file.read, manifest, str(name), cancel):
            yield part
            done += len(part)
            if progress is not None:
                progress(done)


def _take(file: Any, fd: int, manifest: Manifest, name: str, cancel: Callable[[], bool] | None, progress: Callable[[int], None] | None) -> None:
    offset = 0
    for part in _parts(file.read, manifest, name, cancel):
        write_at(fd, part, offset)
        offset += len(part)
        if progress is not None:
            progress(offset - manifest.header_size)


def _put_manifest(fs: Any, target: str, content: bytes) -> None:
    """The last file, and all at once. A store shows an object when it is complete; a file system shows it growing, so there it gets its name last."""
    from fsspec.implementations.local import LocalFileSystem

    name = f"{target}/{MANIFEST}"
    mounted = isinstance(fs, LocalFileSystem)
    with fs.open(f"{name}{TMP}" if mounted else name, "wb") as file:
        file.write(content)
        _sync(file)
    if mounted:
        folder = Path(target)
        Path(f"{name}{TMP}").replace(name)
        for path in (folder, folder.parent, folder.parent.parent):
            sync_directory(path)


def _sync(file: Any) -> None:
    """Make it durable where the storage is a file system of this machine; a store answers only when it is."""
    with suppress(AttributeError, OSError, ValueError):
        file.flush()
        os.fsync(file.fileno())
