"""Keeping a run's state without an agent, for scripts started by torchrun or by hand: checkpoints in a directory, and nothing in between.

Owns: finding the newest checkpoint at the start and giving it to all, and asking for new ones. Must not: decide at which step (the session does, with
all ranks), write (`trainer.writing`), or know the files' form (`trainer.checkpoint`).

Rank 0 writes. Whoever finds the newest checkpoint reads it and gives it to the others over the process group, so that no directory has to be
shared; but a checkpoint on the disk of a node that is lost is lost with it, so where nodes have no directory in common that is said at the start.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from trainer.checkpoint import Found, Info, Keep, load_into, name_of, parse_name, read_header, read_manifest, scan, set_aside, tidy
from trainer.checkpoint.disk import make_root
from trainer.errors import DamagedError, SetupError
from trainer.keeper import NOTHING_ASKED, Asked, Beginning, Lent
from trainer.settings import Settings
from trainer.wire import channel
from trainer.wire.board import Board, Held
from trainer.wire.layout import Layout
from trainer.world import World
from trainer.writing import NOTHING, Shelf, Writer, buffer_of, mapped

DIRECTORY: Final = Path("checkpoints")
"""Where checkpoints lie if nobody says otherwise, below the working directory."""
log = logging.getLogger("trainer")


class AloneKeeper:
    """A `trainer.keeper.Keeper` of files. Collective: all ranks make one.

    Args:
        world: the ranks.
        settings: as they count.
        environ: to name the job by.

    Raises:
        SetupError: rank 0 cannot write to the directory, or a rank not to the file of telemetry.
    """

    lasting: Final = False

    def __init__(self, world: World, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self._world = world
        self._root = (settings.checkpoint_dir or DIRECTORY).absolute()
        self._job = environ.get("TORCHELASTIC_RUN_ID") or Path(sys.argv[0]).stem or "script"
        self._shelf: Shelf | None = None
        self._last = time.monotonic()
        self._writer: Writer | None = None
        self._prepare_root()
        self._lines = _appended(settings.telemetry_file) if settings.telemetry and settings.telemetry_file is not None else -1
        newest = [_offer(name)[0] for name in world.gather(_names(self._root))]
        self.generation = max(0, *newest) + 1
        self.beginning = _find(world, self._root)
        self.skip = 0
        if world.rank == 0:
            tidy(self._root, self.generation)
            self._writer = Writer(self._root, self._info, Keep(last=settings.checkpoint_keep_last, every=settings.checkpoint_keep_every_steps))

    def look(self) -> Asked:
        """See `Keeper`: rank 0 wants a checkpoint when it is time."""
        every = self.settings.checkpoint_every_s
        if self._writer is None or every <= 0 or time.monotonic() - self._last < every:
            return NOTHING_ASKED
        return Asked(checkpoint=True, reason=f"{every:g} s since the last one")

    def describe(self, layout: Layout) -> None:
        """See `Keeper`."""
        if self._writer is not None:
            self._writer.wait()
            self._shelf = Shelf(layout, self._root)

    def lend(self, *, wait: float = 0.0) -> Lent | None:
        """See `Keeper`. Rank 0 has the whole image to itself, the others have none."""
        return self._shelf.lend(wait) if self._shelf is not None else NOTHING

    def restored(self, step: int, digest: str, seconds: float) -> None:
        """See `Keeper`."""
        if self._world.rank == 0:
            log.info("goes on from step %d (%.2f s, state %s)", step, seconds, digest[:8])

    def sealed(self, step: int, index: int) -> None:
        """See `Keeper`."""
        self._last = time.monotonic()
        if self._writer is not None and self._shelf is not None:
            self._writer.put(self._shelf, Held(index=index, generation=self.generation, step=step))

    def stopped(self, step: int, *, saved: bool, reason: str) -> None:
        """See `Keeper`. All ranks wait until rank 0 has written: torchrun ends the others as soon as one is gone."""
        if self._writer is not None and self._shelf is not None and saved:
            held = next((held for held in self._shelf.board.valid() if (held.generation, held.step) == (self.generation, step)), None)
            if held is not None:
                self._writer.put(self._shelf, held)
            self._writer.wait()
        try:
            self._world.gather(b"")
        except RuntimeError:  # somebody did not wait
            log.warning("stopped at step %d, some ranks before the checkpoint was written (%s)", step, reason)

    def unfit(self, part: str, detail: str) -> None:
        """See `Keeper`: nobody is there to hear it, and the error that follows says the same."""

    def tell(self, message: channel.Telemetry | channel.Ranks, *, wait: float = 0.0) -> bool:
        """See `Keeper`: a line of the file, if there is one; all ranks of a node append to the same, each line by one write."""
        del wait
        if self._lines < 0:
            return True
        if isinstance(message, channel.Telemetry):
            said: dict[str, object] = {"event": "window", **message.window}
        else:
            said = {"event": "ranks", "step": message.step, "steps": message.steps, "columns": message.columns}
        line = json.dumps(said, separators=(",", ":")).encode() + b"\n"
        try:
            return os.write(self._lines, line) == len(line)
        except OSError:  # the disk is full, say
            return False

    def close(self) -> None:
        """See `Keeper`."""
        if self._writer is not None:
            self._writer.close()
        if self._lines >= 0:
            os.close(self._lines)
            self._lines = -1

    def _prepare_root(self) -> None:
        if self._world.rank == 0:
            try:
                make_root(self._root)
                tempfile.TemporaryFile(dir=self._root).close()
            except OSError as error:
                raise SetupError(
                    f"no checkpoint can be written to {self._root}: {error.strerror}", remedy="set checkpoint_dir to a directory that can be"
                ) from None
        if not _seen_by_all(self._world, self._root) and self._world.rank == 0:
            log.warning(
                "not every node sees %s: checkpoints on the disk of a node that is lost are lost with it; set checkpoint_dir to a directory that they share",
                self._root,
            )

    def _info(self, held: Held, data: Mapping[str, object]) -> Info:
        world = {"size": self._world.size, "local_size": self._world.place.local_world_size}
        packages = {"torch": version("torch"), "python": platform.python_version()}
        return Info(job=self._job, generation=held.generation, step=held.step, world=world, data=data, packages=packages)


def _appended(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise SetupError(f"nothing can be appended to {path}: {error.strerror}", remedy="set telemetry_file to a file that can be written") from None


def _find(world: World, root: Path) -> Beginning | None:
    """The newest checkpoint that is whole, of all that any rank sees, in a buffer of every rank. Collective."""
    unreadable: set[str] = set()
    while True:
        offers = [_offer(name) for name in world.gather(_names(root, unreadable))]
        best = max(offers)
        if best == (-1, -1):
            return None
        source = offers.index(best)
        loaded: tuple[bytes, int] | None = None
        if world.rank == source:
            found = Found(path=root / name_of(*best), generation=best[0], step=best[1])
            loaded = _load(found, root, unreadable)
        header = world.gather(loaded[0] if loaded is not None else b"")[source]
        if not header:
            continue
        layout = Layout.parse(header.decode())
        fd = loaded[1] if loaded is not None else buffer_of(layout.size, root)
        image = mapped(fd, layout.size)
        flat = torch.frombuffer(image, dtype=torch.uint8)
        world.spread(flat, source=source)
        return _beginning(layout, fd, step=best[1])


def _beginning(layout: Layout, fd: int, *, step: int) -> Beginning:
    board = Board.create(1, 1)
    index = board.claim(0, step)
    assert index is not None  # it is empty
    board.seal(index, 0, step)
    lent = Lent(board=os.dup(board.fd), buffers=(fd,), local_rank=0, local_world=1)
    board.close()
    return Beginning(lent=lent, index=index, step=step, layout=layout)


def _load(found: Found, root: Path, unreadable: set[str]) -> tuple[bytes, int] | None:
    """(header as text, descriptor of a buffer with the image); None if it is damaged, and then it is out of the way."""
    try:
        manifest = read_manifest(found.path)
        layout = Layout.parse(read_header(found.path, manifest))
        fd = buffer_of(layout.size, root)
        image = mapped(fd, layout.size)
        try:
            load_into(found.path, image)
        except BaseException:
            os.close(fd)
            raise
        finally:
            image.close()
    except DamagedError as error:
        log.error("a checkpoint is damaged, an older one is taken: %s", error)  # noqa: TRY400
        try:
            set_aside(found.path, str(error))
        except OSError:
            unreadable.add(found.path.name)
        return None
    except OSError as error:
        log.error("a checkpoint cannot be read, an older one is taken: %s: %s", found.path, error)  # noqa: TRY400
        unreadable.add(found.path.name)
        return None
    return layout.header_text.encode(), fd


def _names(root: Path, without: Collection[str] = ()) -> bytes:
    """The newest checkpoint that this rank sees, by name."""
    try:
        return next((found.path.name for found in scan(root) if found.path.name not in without), "").encode()
    except OSError:
        return b""


def _offer(name: bytes) -> tuple[int, int]:
    return parse_name(name.decode()) or (-1, -1)


def _seen_by_all(world: World, root: Path) -> bool:
    """Whether all ranks see the same directory, by a file that rank 0 puts there for a moment. Collective."""
    if world.size == world.place.local_world_size:
        return True
    mark = world.gather(secrets.token_hex(8).encode())[0].decode()
    path = root / f".seen-{mark}"
    if world.rank == 0:
        path.touch()
    world.gather(b"")
    seen = world.gather(b"1" if path.exists() else b"0")
    if world.rank == 0:
        path.unlink(missing_ok=True)
    return all(one == b"1" for one in seen)
