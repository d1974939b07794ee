"""Writes states to this node's disk, and copies them to other storage, while training goes on.

Owns: when a checkpoint is tried again, what goes for lack of space, and what stays (`trainer.checkpoint` does the writing). Must not: decide that
one is due, commit it, or end for a disk's sake: whatever a disk does becomes a log line, an alert, and another try.

Two threads, each with one order in hand and at most one waiting, of which a newer one takes the place: the disk's and, once something is to be
copied, the storage's. A state is pinned only while it is written. Then it is read back from the disk, and only what was read back whole is
reported as done, and lets older ones go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from elasticd.agent.newest import Newest
from elasticd.observability.report import Histogram
from trainer import checkpoint
from trainer.checkpoint import Found, Info, Keep, Manifest
from trainer.errors import CancelledError, DamagedError, NoSpaceError, StateError

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger("elasticd.agent.persist")

CLOSE_SECONDS: Final = 1.0
"""How long `close` waits. A thread that hangs in the kernel by then is left; all it can leave behind is a draft."""
ALERT_AGAIN: Final = 600.0
"""Seconds after which the same trouble is alerted once more."""

Reading = Callable[[], AbstractContextManager[tuple[bytes, memoryview]]]
"""Pins a state and gives its header and image; raises if it is no longer there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A state that is to be written.

    Attributes:
        info: which one, and what is known of it.
        reading: called for each try.
        url: where to copy it afterwards, "" for nowhere.
        since: when it was given, on the monotonic clock.
    """

    info: Info
    reading: Reading
    url: str = ""
    since: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[int, int]:
        """As `Found.order`."""
        return (self.info.generation, self.info.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is being written.

    Attributes:
        generation, step: of the state.
        written, total: bytes of its image; total is 0 before the first.
        since: when it was begun, seconds since the epoch.
        tries: how many times it was, this one included.
        trouble: why the last try failed, "" if none did.
    """

    generation: int
    step: int
    written: int = 0
    total: int = 0
    since: float = field(default_factory=time.time)
    tries: int = 1
    trouble: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What came of the orders so far.

    Attributes:
        written: checkpoints that are whole on disk.
        failed: tries that failed, and orders whose state was gone before it was written.
        step, at, nbytes: of the last that is whole on disk; at, in seconds since the epoch, is 0 if there is none.
        durations: from the order to the disk.
        trouble: why the last try failed; "" if it did not.
    """

    written: int = 0
    failed: int = 0
    step: int = 0
    at: float = 0.0
    nbytes: int = 0
    durations: Histogram = field(default_factory=Histogram)
    trouble: str = ""


class Persister:
    """See the module. Every method may be called from any thread, and none but `wait` and `close` blocks.

    Args:
        root: directory of this node's checkpoints; created with the first one.
        job: whose they are.
        keep: which stay; may be set anew at any time.
        alert: called with a name and values when a person should look: checkpoint_disk_full, checkpoint_failed, checkpoint_damaged,
            checkpoint_copy_failed. From a thread of its own.
        done: called with the manifest of what is durable and was read back whole. From that thread.
        failed: called when an order is given up: its state is no longer in memory, or a newer one took its place. From that thread.
        back_off: seconds before the second try, and at most between two.
    """

    def __init__(
        self,
        root: Path,
        *,
        job: str,
        keep: Keep | None = None,
        alert: Callable[[str, Mapping[str, Any]], None] | None = None,
        done: Callable[[Manifest], None] | None = None,
        failed: Callable[[Info, Exception], None] | None = None,
        back_off: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self.keep = keep or Keep()
        self._root = root
        self._job = job
        self._tell = alert
        self._done = done
        self._failed = failed
        self._back_off = back_off
        self._disk: Newest[Order] = Newest("elasticd-persist", self._persist)
        self._storage: Newest[Order] = Newest("elasticd-copy", self._copy)
        self._verified: set[tuple[int, int]] = set()
        self._committed: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None
        self._tidied = -1
        self._alerted: dict[str, tuple[str, float]] = {}
        self._progress: Progress | None = None
        self._tally = Tally()

    def want(self, info: Info, reading: Reading, *, url: str = "") -> None:
        """Have a state written, and copied to `url` afterwards. One that still waits is given up for it."""
        order = Order(info=info, reading=reading, url=url)
        replaced = self._disk.put(order)
        if replaced is not None:
            log.info("checkpoint_skipped", generation=replaced.info.generation, step=replaced.info.step, newer=info.step, trouble=self._trouble)
            self._give_up(replaced, CancelledError("a newer state is written instead"))

    def committed(self, generation: int, step: int) -> None:
        """The job's newest checkpoint is this one: it stays, and so does what this generation has written since and may still commit.

        The one before it stays too: that the newest is of a bad state may be found out after it was committed (PROTOCOL 30).
        """
        if self._committed != (generation, step):
            self._before, self._committed = self._committed, (generation, step)

    @property
    def busy(self) -> bool:
        """A state is being written to disk, or waits for that. Copies do not count."""
        return self._disk.busy

    @property
    def progress(self) -> Progress | None:
        """What is being written to disk, None if nothing is."""
        return self._progress

    @property
    def tally(self) -> Tally:
        """What came of the orders so far."""
        return self._tally

    def found(self, manifest: Manifest) -> None:
        """The newest that an earlier agent left on this disk. To be called before the first order."""
        self._tally = replace(self._tally, step=manifest.step, at=manifest.created_at, nbytes=manifest.size)

    @property
    def _trouble(self) -> str:
        progress = self._progress
        return progress.trouble if progress else ""

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is written to disk or waits for it; False after `seconds`."""
        return self._disk.wait(seconds)

    def wait_copied(self, seconds: float) -> bool:
        """The same for copies."""
        return self._storage.wait(seconds)

    def close(self) -> None:
        """End within a second or two. What is being written is given up; at worst a draft is left, which the next agent removes."""
        self._disk.close(CLOSE_SECONDS)
        self._storage.close(CLOSE_SECONDS)

    # --- the disk's thread -----------------------------------------------------------------------------------------------

    def _persist(self, order: Order) -> None:
        delay, longest = self._back_off
        self._progress = Progress(generation=order.info.generation, step=order.info.step)
        try:
            while True:
                error = self._try(order)
                if error is None:
                    return
                if isinstance(error, CancelledError | StateError | LookupError):
                    self._tally = replace(self._tally, failed=self._tally.failed + isinstance(error, LookupError))
                    break
                if isinstance(error, NoSpaceError) and self._make_room(order):
                    continue
                if not self._disk.pause(delay):
                    break
                delay = min(2 * delay, longest)
            self._give_up(order, error)
        finally:
            self._progress = None

    def _try(self, order: Order) -> Exception | None:
        """Write it once. None if all went well; LookupError if there is nothing to be written any more."""
        try:
            manifest = self._write(order)
        except (CancelledError, LookupError) as error:
            return error
        except Exception as error:
            self._say(order, error)
            return error
        self._verified.add(order.order)
        self._alerted.pop("disk", None)
        self._tally = replace(
            self._tally,
            written=self._tally.written + 1,
            step=manifest.step,
            at=time.time(),
            nbytes=manifest.size,
            durations=self._tally.durations.plus(time.monotonic() - order.since),
            trouble="",
        )
        log.info(
            "checkpoint_written",
            generation=manifest.generation,
            step=manifest.step,
            bytes=manifest.size,
            seconds=manifest.seconds,
            digest=manifest.digest,
        )
        self._call(self._done, manifest)
        self._retain(order)
        if order.url and (replaced := self._storage.put(order)) is not None:
            log.info("checkpoint_copy_skipped", generation=replaced.info.generation, step=replaced.info.step, newer=order.info.step)
        return None

    def _write(self, order: Order) -> Manifest:
        self._tidy(order.info.generation)
        with ExitStack() as stack:
            try:
                header, image = stack.enter_context(order.reading())
            except Exception as error:
                raise LookupError(f"step {order.info.step} is no longer in memory: {error}") from error
            self._note(total=len(image), written=0)
            manifest = checkpoint.write(
                self._root, header=header, image=image, info=order.info, cancel=lambda: self._disk.closing, progress=lambda count: self._note(written=count)
            )
        path = self._path(order)
        try:
            checkpoint.verify(path, cancel=lambda: self._disk.closing)
        except DamagedError as error:
            checkpoint.set_aside(path, str(error))
            raise
        return manifest

    def _tidy(self, generation: int) -> None:
        """Once a generation: remove what earlier writers that are dead have left (PROTOCOL 26)."""
        if generation != self._tidied:
            self._tidied = generation
            for path in checkpoint.tidy(self._root, generation):
                log.info("checkpoint_draft_removed", path=str(path))

    def _make_room(self, order: Order) -> bool:
        progress = self._progress
        wanted = progress.total if progress else 0
        try:
            gone = checkpoint.make_room(
                self._root,
                self.keep,
                self._protected(order, strict=False),
                generation=order.info.generation,
                wanted=wanted,
                verified=self._verified,
                report=self._report,
            )
        except (DamagedError, OSError) as error:
            log.warning("checkpoint_no_room_made", error=str(error))
            return False
        if gone is not None:
            log.warning("checkpoint_removed", path=str(gone), why="the disk is full")
        return gone is not None

    def _retain(self, order: Order) -> None:
        try:
            removed = checkpoint.retain(self._root, self.keep, self._protected(order, strict=True), verified=order.order)
        except (DamagedError, OSError) as error:
            self._alert("retain", "checkpoint_failed", error=f"old checkpoints cannot be removed: {error}")
            return
        for item in removed:
            self._verified.discard(item.order)
            log.info("checkpoint_removed", path=str(item.path), why="newer ones are kept")

    def _protected(self, order: Order, *, strict: bool) -> set[tuple[int, int]]:
        """The committed one; if `strict`, also the one before it, and those that this generation may still commit on this node's word that it has them."""
        if self._committed is None:
            return set()
        committed = self._committed
        later = {item for item in self._verified if item > committed and item[0] == order.info.generation} if strict else set()
        return {committed, *later, *({self._before} if strict and self._before else set())}

    # --- the storage's thread --------------------------------------------------------------------------------------------

    def _copy(self, order: Order) -> None:
        delay, longest = self._back_off
        path = self._path(order)
        while True:
            try:
                started = time.monotonic()
                copy = checkpoint.upload(path, order.url, cancel=lambda: self._storage.closing)
            except CancelledError:
                return
            except Exception as error:  # a store's library raises what it likes
                if not path.exists():
                    log.info("checkpoint_copy_skipped", generation=order.info.generation, step=order.info.step, why="it is no longer kept")
                    return
                self._alert("storage", "checkpoint_copy_failed", generation=order.info.generation, step=order.info.step, url=order.url, error=str(error))
            else:
                self._alerted.pop("storage", None)
                log.info("checkpoint_copied", generation=copy.generation, step=copy.step, url=copy.url, seconds=round(time.monotonic() - started, 3))
                return
            if not self._storage.pause(delay):
                return
            delay = min(2 * delay, longest)

    # --- both ------------------------------------------------------------------------------------------------------------

    def _path(self, order: Order) -> Path:
        return self._root / checkpoint.name_of(order.info.generation, order.info.step)

    def _note(self, **changes: Any) -> None:
        if self._progress is not None:
            values = {name: getattr(self._progress, name) for name in Progress.__slots__}
            self._progress = Progress(**{**values, **changes})

    def _say(self, order: Order, error: Exception) -> None:
        """One line for a failed try, and an alert if it is news."""
        if self._progress is not None:
            self._note(tries=self._progress.tries + 1, trouble=str(error))
        self._tally = replace(self._tally, failed=self._tally.failed + 1, trouble=str(error))
        name = "checkpoint_disk_full" if isinstance(error, NoSpaceError) else "checkpoint_damaged" if isinstance(error, DamagedError) else "checkpoint_failed"
        self._alert("disk", name, generation=order.info.generation, step=order.info.step, error=str(error))

    def _report(self, found: Found, error: Exception) -> None:
        """An older checkpoint turned out not to be whole."""
        self._alert(found.path.name, "checkpoint_damaged", generation=found.generation, step=found.step, error=str(error))

    def _give_up(self, order: Order, error: Exception) -> None:
        log.warning("checkpoint_given_up", generation=order.info.generation, step=order.info.step, why=str(error))
        self._call(self._failed, order.info, error)

    def _alert(self, topic: str, name: str, **values: Any) -> None:
        """Log it; alert it if it was not alerted within the last minutes."""
        log.warning(name, **values)
        known, at = self._alerted.get(topic, ("", 0.0))
        if known != name or time.monotonic() - at > ALERT_AGAIN:
            self._alerted[topic] = (name, time.monotonic())
            self._call(self._tell, name, {"job": self._job, "directory": str(self._root), **values})

    def _call(self, function: Callable[..., None] | None, *arguments: Any) -> None:
        """What somebody else's function raises is theirs, and must not end the writing."""
        if function is None:
            return
        try:
            function(*arguments)
        except Exception:
            log.exception("persist_callback_failed")
