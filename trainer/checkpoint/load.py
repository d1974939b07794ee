"""Finding and reading checkpoints, so that no damaged bit is believed.

Owns: which checkpoint is the newest that is whole, and what becomes of one that is not. Must not: write or remove any.

Reading goes through the page cache in pieces of 1 MiB, each summed while it is still in the processor's own cache: from memory that is as fast as a
copy alone, from disk as fast as the disk. `verify` has the kernel forget the file first, so that it is the disk that is read.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Final

import xxhash

from trainer.checkpoint.disk import saying, sync_directory
from trainer.checkpoint.manifest import BAD, CHUNK, DATA, MANIFEST, MAX_MANIFEST, REASON, Found, Manifest, digest_of, header_digest_of, parse_name
from trainer.errors import CancelledError, DamagedError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PIECE: Final = 1024 * 1024
_READERS: Final = 4
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR})


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint that was read into memory, whole and verified."""

    found: Found
    manifest: Manifest
    header_text: str


def scan(root: Path) -> list[Found]:
    """Directories with a complete name, the newest (generation, step) first. Says nothing of what is in them; empty if there is no `root`.

    Raises:
        OSError: `root` cannot be read.
    """
    try:
        with saying(root):
            paths = list(root.iterdir())
    except FileNotFoundError:
        return []
    found = [Found(path=path, generation=parsed[0], step=parsed[1]) for path in paths if (parsed := parse_name(path.name)) is not None]
    return sorted(found, key=lambda item: item.order, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest in the directory `path`.

    Raises:
        DamagedError: it is missing, or not what was written, or belongs to another directory.
        OSError: it cannot be read.
    """
    name = path / MANIFEST
    with _opened(name) as fd:
        if os.fstat(fd).st_size > MAX_MANIFEST:
            raise DamagedError(f"{name} is larger than any manifest")
        content = _read_bytes(fd, os.fstat(fd).st_size, 0)
    manifest = Manifest.decode(content, name=str(name))
    if parse_name(path.name) not in {None, (manifest.generation, manifest.step)}:
        raise DamagedError(f"{name} is that of generation {manifest.generation}, step {manifest.step}")
    return manifest


def read_header(path: Path, manifest: Manifest | None = None) -> str:
    """The verified header of a checkpoint as `Layout.parse` takes it. `manifest` is read if it is not given.

    Raises:
        DamagedError: it is missing, cut off, or not what was written.
        OSError: it cannot be read.
    """
    manifest = manifest or read_manifest(path)
    with _opened(path / DATA) as fd:
        return _text(_header(fd, path, manifest))


def load_into(path: Path, image: memoryview | mmap, *, header_text: str | None = None) -> Manifest:
    """Read a checkpoint into memory and verify all of it.

    Args:
        path: its directory.
        image: where to put its `Manifest.size` bytes, writable; may be longer. After an error it holds garbage.
        header_text: the layout that the caller expects, None for any.

    Raises:
        DamagedError: something is missing or not what was written; names the file and the chunk.
        StateError: it is sound, but of another layout (names the first tensor that differs), or too large for `image`.
        OSError: it cannot be read.
    """
    manifest = read_manifest(path)
    with _opened(path / DATA) as fd:
        header = _header(fd, path, manifest)
        _check_layout(path, header, header_text)
        with memoryview(image) as whole, whole.cast("B") as view:
            if len(view) < manifest.size:
                raise StateError(f"{path} has a state of {manifest.size} bytes, which does not fit into {len(view)}")
            with view[: manifest.size] as target:
                _read_chunks(fd, path, manifest, target)
    return manifest


def verify(path: Path, *, cancel: Callable[[], bool] | None = None) -> Manifest:
    """Read all of a checkpoint from its disk and check it.

    Raises:
        DamagedError, OSError: as `load_into`.
        CancelledError: `cancel`, asked before each chunk, said so.
    """
    manifest = read_manifest(path)
    with _opened(path / DATA) as fd:
        _forget(fd)
        _header(fd, path, manifest)
        _read_chunks(fd, path, manifest, None, cancel)
        _forget(fd)
    return manifest


def newest_valid(root: Path, *, report: Callable[[Found, Exception], None] | None = None) -> tuple[Found, Manifest] | None:
    """The newest checkpoint that is whole, by reading it all; None if there is none.

    Args:
        root: directory of checkpoints.
        report: told of each newer one that is not: a `DamagedError`, and it has been set aside; or an OSError, and it is where it was.
    """
    for found in scan(root):
        for _look in range(2):
            try:
                return found, verify(found.path)
            except (DamagedError, OSError) as error:
                if not _read_wrong(found, error):
                    _dismiss(found, error, report)
                    break
    return None


def load_newest(
    root: Path,
    place: Callable[[Manifest, str], memoryview | mmap],
    *,
    report: Callable[[Found, Exception], None] | None = None,
) -> Loaded | None:
    """Read the newest checkpoint that is whole into memory; None if there is none.

    Args:
        root: directory of checkpoints.
        place: given a manifest and a header's text, where to put that image (see `load_into`). It may be called again for an older one. What it raises
            ends the search.
        report: as in `newest_valid`.
    """
    for found in scan(root):
        for _look in range(2):
            try:
                manifest = read_manifest(found.path)
                text = read_header(found.path, manifest)
            except (DamagedError, OSError) as error:
                _dismiss(found, error, report)
                break
            image = place(manifest, text)
            try:
                return Loaded(found=found, manifest=load_into(found.path, image), header_text=text)
            except (DamagedError, OSError) as error:
                if not _read_wrong(found, error):
                    _dismiss(found, error, report)
                    break
    return None


@contextmanager
def opened(root: Path, digest: str) -> Iterator[tuple[bytes, memoryview]]:
    """Header and image of the newest checkpoint with that digest, read whole into memory of its own and verified.

    Not mapped: a disk that fails would end the process with SIGBUS.

    Raises:
        DamagedError: there is none, or it is not what was written.
        OSError: it cannot be read, or there is not enough memory.
    """
    for found in scan(root):
        manifest = read_manifest(found.path)
        if manifest.digest != digest:
            continue
        with mmap(-1, max(manifest.size, 1)) as memory, memoryview(memory) as whole, whole[: manifest.size] as image:
            load_into(found.path, image)
            with _opened(found.path / DATA) as fd:
                header = _header(fd, found.path, manifest)
            yield header, image
            return
    raise DamagedError(f"no checkpoint in {root} has the digest {digest}")


def set_aside(path: Path, reason: str) -> Path:
    """Give a damaged checkpoint a name that nobody loads, and write `reason` into it. It stays for people to look at.

    Returns:
        its new path; it is not there if somebody else was quicker.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 0
    target = path.with_name(path.name + BAD)
    with saying(path):
        while True:
            try:
                path.rename(target)
                break
            except FileNotFoundError:
                return target
            except OSError as error:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise
            number += 1
            target = path.with_name(f"{path.name}{BAD}.{number}")
        with suppress(OSError):  # the name says enough
            (target / REASON).write_text(reason + "\n")
            sync_directory(path.parent)
    return target


def _read_wrong(found: Found, error: Exception) -> bool:
    """Whether what looked damaged is not, when its disk is read again: then it was this machine's memory, or the way to it."""
    if not isinstance(error, DamagedError):
        return False
    try:
        verify(found.path)
    except (DamagedError, OSError):
        return False
    return True


def _dismiss(found: Found, error: Exception, report: Callable[[Found, Exception], None] | None) -> None:
    """What is damaged is set aside; what merely cannot be read now may be sound."""
    if isinstance(error, DamagedError):
        with suppress(OSError):
            set_aside(found.path, str(error))
    if report is not None:
        report(found, error)


@contextmanager
def _opened(name: Path) -> Iterator[int]:
    """A regular file, open for reading. O_NONBLOCK: a pipe of that name must not hold us up."""
    with saying(name):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE:
                raise DamagedError(f"{name} is missing") from None
            raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(f"{name} is no regular file")
        with saying(name):
            yield fd
    finally:
        os.close(fd)


def _header(fd: int, path: Path, manifest: Manifest) -> bytes:
    """The header, and that the file is as long as it must be."""
    name = path / DATA
    size, wanted = os.fstat(fd).st_size, manifest.header_size + manifest.size
    if size != wanted:
        raise DamagedError(f"{name} has {size} bytes, not {wanted}")
    header = _read_bytes(fd, manifest.header_size, 0)
    if header_digest_of(header) != manifest.header_digest:
        raise DamagedError(f"{name}: the header is not what was written")
    if digest_of(header, [bytes.fromhex(item) for item in manifest.chunks]) != manifest.digest:
        raise DamagedError(f"{path / MANIFEST}: the digest is not that of the sums")
    return header


def _text(header: bytes) -> str:
    """The JSON in a header: after its length, before its padding."""
    return header[8:].rstrip(b" ").decode(errors="replace")


def _check_layout(path: Path, header: bytes, wanted: str | None) -> None:
    if wanted is None:
        return
    from trainer.wire.layout import Layout

    text = _text(header)
    if text == wanted.rstrip(" "):
        return
    difference = Layout.parse(wanted).difference(Layout.parse(text)) or "the same tensors lie in other places"
    raise StateError(f"{path} is the checkpoint of another model: {difference}", remedy="give the script the model it was written from, or another directory")


def _read_bytes(fd: int, size: int, offset: int) -> bytes:
    content = bytearray(size)
    with memoryview(content) as view:
        done = _fill(fd, view, offset)
    return bytes(content[:done])


def _fill(fd: int, target: memoryview, offset: int) -> int:
    """Read until `target` is full or the file ends; how many bytes."""
    done = 0
    while done < len(target):
        with target[done:] as rest:
            count = os.preadv(fd, [rest], offset + done)
        if count == 0:
            break
        done += count
    return done


def _read_chunks(fd: int, path: Path, manifest: Manifest, target: memoryview | None, cancel: Callable[[], bool] | None = None) -> None:
    """Read and verify every chunk, several at a time; into `target`, or nowhere."""
    stop = threading.Event()
    scratch = threading.local()

    def one(index: int) -> None:
        if stop.is_set():
            return
        try:
            if cancel is not None and cancel():
                raise CancelledError(f"the reading of {path.name} was ended")
            _read_chunk(fd, path, manifest, index, target, scratch)
        except BaseException:
            stop.set()
            raise

    readers = min(_READERS, len(os.sched_getaffinity(0)), max(len(manifest.chunks), 1))
    with ThreadPoolExecutor(readers, thread_name_prefix="elasticd-read") as pool:
        for future in [pool.submit(one, index) for index in range(len(manifest.chunks))]:
            future.result()


def _read_chunk(fd: int, path: Path, manifest: Manifest, index: int, target: memoryview | None, scratch: threading.local) -> None:
    start, end = index * CHUNK, min((index + 1) * CHUNK, manifest.size)
    summed = xxhash.xxh3_64()
    if target is None and not hasattr(scratch, "piece"):
        scratch.piece = bytearray(_PIECE)
    for begin in range(start, end, _PIECE):
        length = min(_PIECE, end - begin)
        with memoryview(scratch.piece if target is None else target) as whole, whole[:length] if target is None else whole[begin : begin + length] as piece:
            if _fill(fd, piece, manifest.header_size + begin) < length:
                raise DamagedError(f"{path / DATA} ends within chunk {index}")
            summed.update(piece)
    if summed.hexdigest() != manifest.chunks[index]:
        raise DamagedError(f"{path / DATA}: chunk {index} (bytes {start} to {end} of the image) is not what was written")


def _forget(fd: int) -> None:
    """Have the kernel drop what it holds of a file: what was checked shall be the disk's."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
