"""What a checkpoint is on disk: its names, its manifest, its sums.

Owns: the names of directories and files, the manifest's form, and the digest by which every part of elasticd knows a state. Must not: open a file,
or import torch.

::

    <root>/step-000000012000.g7/         complete; generation 7, 12000 optimizer steps done
        state.safetensors                header and image (`trainer.wire.layout`); the safetensors library opens it
        manifest.json                    which state it is, and the sums of all of it
    <root>/step-000000012000.g7.XXXX.tmp being written
    <root>/step-000000012000.g7.bad      found damaged; reason.txt says how

Sums are xxh3, 64 bits a chunk of 16 MiB, 128 bits over all. They find what disks, memory and cables do to bytes; they are no proof against
somebody who wants to deceive.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import xxhash

from trainer.errors import DamagedError, StateError

if TYPE_CHECKING:
    from mmap import mmap

FORMAT: Final = 1
CHUNK: Final = 16 * 1024 * 1024
"""Bytes of an image that have a sum of their own: what is damaged can be named, and reading, writing and summing go side by side."""
DATA: Final = "state.safetensors"
MANIFEST: Final = "manifest.json"
REASON: Final = "reason.txt"
TMP: Final = ".tmp"
BAD: Final = ".bad"
MAX_MANIFEST: Final = 64 * 1024 * 1024
"""Largest manifest believed, in bytes."""
MAX_HEADER: Final = 128 * 1024 * 1024
"""Largest header believed, in bytes."""

_NAME: Final = re.compile(r"step-([0-9]{12,18})\.g([0-9]{1,18})")
_COUNTS: Final = struct.Struct("<QQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """What whoever asks for a checkpoint knows of it. Everything is JSON: text, finite numbers, lists, and dictionaries by text.

    Attributes:
        job: whose state it is.
        generation, step: which one.
        world: how many took part: nodes, world size, and whatever else is worth knowing later.
        data: where the data stands (epoch, offset).
        fingerprint: part (data, code, config) -> digest, as the nodes compared it.
        packages: package -> version.
        metrics: name -> value, as the script gave it at this step; `Keep.best` chooses by it. What is not finite is left out.
    """

    job: str
    generation: int
    step: int
    world: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A complete checkpoint in words. Its file bears a sum of its own, so that no bit of it can change unseen.

    Attributes:
        job, generation, step, world, data, fingerprint, packages, metrics: see `Info`.
        digest: of the content, as `digest_of` makes it.
        size: of the image, in bytes; the data file has `header_size` bytes before it.
        header_size, header_digest: bytes of the header, and its xxh3_128 in hexadecimal.
        chunk_bytes, chunks: the image cut into so many bytes, the last one shorter, and the xxh3_64 of each in hexadecimal.
        created_at: seconds since the epoch.
        seconds: how long the writing took.
        format: version of this form.
    """

    job: str
    generation: int
    step: int
    digest: str
    size: int
    header_size: int
    header_digest: str
    chunk_bytes: int
    chunks: tuple[str, ...]
    created_at: float
    seconds: float
    world: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def encode(self) -> bytes:
        """The file's content.

        Raises:
            StateError: a value that JSON cannot hold.
        """
        try:
            return _sealed(asdict(self))
        except (TypeError, ValueError) as error:
            raise StateError(f"step {self.step}: the manifest cannot hold what was given for it: {error}") from None

    @classmethod
    def decode(cls, content: bytes, *, name: str = MANIFEST) -> Self:
        """Read a file's content. Keys that this version does not know are summed and passed over.

        Raises:
            DamagedError: a single bit is not what was written, or a version that is not known wrote it. `name` is what it calls the file.
        """
        values = _unsealed(content, name)
        if values.get("format") != FORMAT:
            raise DamagedError(f"{name} has format {values.get('format')!r:.20}, this version reads {FORMAT}", remedy="read it with the version that wrote it")
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        try:
            manifest = cls(**{**known, "chunks": tuple(known.get("chunks", ()))})
        except TypeError as error:
            raise DamagedError(f"{name} lacks a value: {error}") from None
        if fault := _fault(manifest):
            raise DamagedError(f"{name}: {fault}")
        return manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A directory with the name of a complete checkpoint."""

    path: Path
    generation: int
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """Newer is greater: by generation, then by step (PROTOCOL 21)."""
        return (self.generation, self.step)


def name_of(generation: int, step: int) -> str:
    """The directory of a complete checkpoint."""
    return f"step-{step:012d}.g{generation}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(generation, step) of such a name; None for any other."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match[1]), int(match[2])
    return (generation, step) if name == name_of(generation, step) else None


def digest_of(header: bytes, chunks: Sequence[bytes]) -> str:
    """Digest of a state: 32 hexadecimal digits.

    Args:
        header: of the safetensors file, padding and length included.
        chunks: xxh3_64 of every `CHUNK` bytes of the image, 8 bytes each, big endian as xxhash gives them.
    """
    whole = xxhash.xxh3_128(_COUNTS.pack(len(header), len(chunks)))
    whole.update(header)
    whole.update(b"".join(chunks))
    return whole.hexdigest()


def sum_of(content: bytes | memoryview) -> bytes:
    """Sum of one chunk. Other threads run meanwhile."""
    return xxhash.xxh3_64_digest(content)


def header_digest_of(header: bytes) -> str:
    """Digest of a header alone, as in `Manifest.header_digest`."""
    return xxhash.xxh3_128_hexdigest(header)


def digest_image(header: bytes, image: memoryview | mmap) -> tuple[str, list[str]]:
    """Digest of a state in memory, and the sum of each chunk in hexadecimal. Takes one core, and memory's time to read `image` once."""
    sums = []
    with memoryview(image) as whole, whole.cast("B") as view:
        for start in range(0, len(view), CHUNK):
            with view[start : start + CHUNK] as chunk:
                sums.append(sum_of(chunk))
    return digest_of(header, sums), [item.hex() for item in sums]


def _sealed(values: Mapping[str, Any]) -> bytes:
    plain = json.dumps(values, sort_keys=True, allow_nan=False).encode()
    return json.dumps({**values, "sum": header_digest_of(plain)}, sort_keys=True, allow_nan=False, indent=1).encode() + b"\n"


def _unsealed(content: bytes, name: str) -> dict[str, Any]:
    """The values, if writing them again gives the very same bytes: then no bit has changed, be it in a blank."""
    try:
        values = json.loads(content)
        del values["sum"]
        same = _sealed(values) == content
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedError(f"{name} is no manifest") from None
    if not same:
        raise DamagedError(f"{name} does not agree with its own sum")
    assert isinstance(values, dict)
    return values


def _fault(manifest: Manifest) -> str:
    """What cannot be true of a manifest, "" if all can. Its sum shows accidents; this keeps a mistaken writer from making a reader fail oddly."""
    wanted = {int: ("generation", "step", "size", "header_size", "chunk_bytes"), str: ("job", "digest", "header_digest")}
    for kind, names in wanted.items():
        for name in names:
            value = getattr(manifest, name)
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                return f"{name} = {value!r:.40}"
    if manifest.chunk_bytes != CHUNK or manifest.header_size > MAX_HEADER or len(manifest.chunks) != math.ceil(manifest.size / CHUNK):
        return f"{len(manifest.chunks)} chunks of {manifest.chunk_bytes} bytes for {manifest.size} bytes"
    if not all(isinstance(item, str) and re.fullmatch("[0-9a-f]{16}", item) for item in manifest.chunks):
        return "a chunk's sum is none"
    for name in ("world", "data", "fingerprint", "packages", "metrics"):
        if not isinstance(getattr(manifest, name), dict):
            return f"{name} is no dictionary"
    return ""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Only the numbers: what is nan or infinite is neither best nor JSON."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
