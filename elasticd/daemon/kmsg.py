"""What the kernel says about GPUs, memory, processors and disks: a thread that reads /dev/kmsg.

Owns: reading every record once, which records count, and how they are told. Must not: decide what follows from one.

Each record that counts becomes a count and a line of the log, `kernel_event`. Where many come, all are counted and some are told. A daemon's first
start begins at the end of the kernel's log; a later one, in the same boot, goes on after the last record that its predecessor had read.

Format: Documentation/ABI/testing/dev-kmsg of the kernel: one record for each read, "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT". Others than the
kernel may write there too, if they are root.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import structlog

from elasticd.daemon.gpureadings import GPUS_MAX, bus_of
from elasticd.rendezvous.nodelock import boot_id

DEVICE: Final = Path("/dev/kmsg")
TEXT_MAX: Final = 300
"""Characters of a record that are told."""
TOLD_MAX: Final = 10
TOLD_WITHIN: Final = 60.0
"""So many events of one kind are told within so many seconds."""
_RECORD_MAX: Final = 8192  # the kernel's records fit; a smaller buffer would be refused
_BATCH: Final = 500  # records read in a row; then somebody else gets the processor
_PAUSE: Final = 0.1
_OLD_MAX: Final = 200_000  # records that are passed over at a first start; no kernel keeps more
_SAVE_EVERY: Final = 60.0  # seconds between two notes of how far we are, if nothing happens

log = structlog.get_logger("elasticd.daemon")


class EventKind(StrEnum):
    """What happened."""

    XID = "xid"  # the driver's error of one GPU, by number
    NVRM = "nvrm"  # another failure that NVIDIA's driver names
    OOM = "oom"  # a process was killed for memory
    MCE = "mce"  # a fault of a processor or of memory
    HANG = "hang"  # a task, or a processor, that makes no progress
    IO = "io"  # a disk that does not read or write
    FS = "fs"  # a file system that found an error in itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record of the kernel's log.

    Attributes:
        sequence: rises by one for each; from 0 at each boot.
        text: without the lines that say where it is from.
    """

    sequence: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEvent:
    """A record that counts.

    Attributes:
        xid: number of an Xid, else None.
        bus: PCI address of its GPU, as `bus_of` writes it; "" if it names none.
        pid: of the process it names, 0 if it names none.
        text: the record, of printable ASCII and bounded.
    """

    kind: EventKind
    text: str
    xid: int | None = None
    bus: str = ""
    pid: int = 0


# --- what a record means -------------------------------------------------------------------------------------------------

_HINT: Final = re.compile(r"NVRM: |[Oo]ut of memory|Hardware Error|EDAC |INFO: |LOCKUP|lockup|I/O |EXT4-fs|XFS |BTRFS|read-only")
"""All but these are passed over at once: most of what a kernel says."""
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:]{7,16})[^)]{0,40}\): (\d{1,5})\b")
_XID_PID: Final = re.compile(r"pid='?(\d{1,10})")
_OOM: Final = re.compile(r"[Oo]ut of memory[^:]{0,40}: Kill(?:ed)? process (\d{1,10})\b")
_TASK: Final = re.compile(r"INFO: task .{1,64}:(\d{1,10}) blocked for more than \d+ seconds")
_OTHERS: Final = (
    (EventKind.NVRM, re.compile(r"NVRM: .*(fail|error|fallen off|time[d ]?out|not responding)", re.IGNORECASE)),
    (EventKind.MCE, re.compile(r"\[Hardware Error\]: (CPU \d+: )?Machine check", re.IGNORECASE)),
    (EventKind.MCE, re.compile(r"EDAC \S+: \d+ UE\b")),
    (EventKind.HANG, re.compile(r"(soft|hard) lockup|INFO: .*detected (expedited )?stalls", re.IGNORECASE)),
    (EventKind.FS, re.compile(r"EXT4-fs error|XFS \S+ ?: ?.*(corrupt|internal error|shut ?down|metadata I/O error)|BTRFS (error|critical)", re.IGNORECASE)),
    (EventKind.FS, re.compile(r"[Rr]emounting filesystem read-only")),
    (EventKind.IO, re.compile(r"\bI/O error\b|nvme\d+: I/O .*timeout|\bI/O .*aborted", re.IGNORECASE)),
)


def parse(data: bytes) -> Record | None:
    """One read of the device; None if it is no record."""
    head, semicolon, rest = data.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < 3 or not fields[1].isdigit():
        return None
    return Record(sequence=int(fields[1]), text=rest.partition(b"\n")[0].decode("utf-8", "replace"))


def classify(text: str) -> KernelEvent | None:
    """What a record is; None for all that do not count."""
    if not _HINT.search(text):
        return None
    told = harmless(text)
    if xid := _XID.search(text):
        pid = _XID_PID.search(text)
        return KernelEvent(kind=EventKind.XID, xid=int(xid[2]), bus=bus_of(xid[1]), pid=int(pid[1]) if pid else 0, text=told)
    if oom := _OOM.search(text):
        return KernelEvent(kind=EventKind.OOM, pid=int(oom[1]), text=told)
    if task := _TASK.search(text):
        return KernelEvent(kind=EventKind.HANG, pid=int(task[1]), text=told)
    kind = next((kind for kind, pattern in _OTHERS if pattern.search(text)), None)
    return KernelEvent(kind=kind, text=told) if kind else None


def harmless(text: str) -> str:
    """Printable ASCII, and not too much of it. A program chooses its own name, and the kernel repeats it."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:TEXT_MAX])


# --- the thread ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCounts:
    """What was read since the daemon's start.

    Attributes:
        readable: the kernel's log is being read.
        events: of each kind.
        xids: PCI address -> (how many, the last one's number), of the first GPUs that had any.
    """

    readable: bool
    events: Mapping[EventKind, int]
    xids: Mapping[str, tuple[int, int]]


class KernelLog:
    """See the module. `start` begins, `close` ends; the counts may be read by any thread.

    Args:
        gpu_of: PCI address -> index of the GPU there, None if it is not known. It may take a while.
        note: file in which is kept how far the log was read; None: nowhere.
        opened: gives a descriptor that does not block, at the oldest record; one read of it is one record.
        told: called with each event that is told of, in the thread that reads.
    """

    def __init__(
        self,
        gpu_of: Callable[[str], int | None],
        *,
        note: Path | None = None,
        opened: Callable[[], int] | None = None,
        told: Callable[[KernelEvent], None] = lambda _: None,
    ) -> None:
        self._gpu_of = gpu_of
        self._tell = told
        self._note = note
        self._opened = opened or _open
        self._lock = threading.Lock()
        self._events: dict[EventKind, int] = dict.fromkeys(EventKind, 0)
        self._xids: dict[str, tuple[int, int]] = {}
        self._readable = False
        self._told = {kind: Told() for kind in EventKind}
        self._last = -1
        self._saved = (-1, 0.0)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> KernelCounts:
        """All so far."""
        with self._lock:
            return KernelCounts(readable=self._readable, events=dict(self._events), xids=dict(self._xids))

    def start(self) -> None:
        """Begin to read; where that is not allowed, say so once and do nothing."""
        try:
            fd = self._opened()
        except OSError as error:
            log.info("kernel_log_unreadable", device=str(DEVICE), reason=error.strerror, remedy="root may read it, or who has CAP_SYSLOG")
            return
        self._last = self._noted()
        if self._last < 0:
            self._pass_over(fd)
        self._save(now=True)
        self._readable = True
        self._thread = threading.Thread(target=self._run, args=(fd,), name="elasticd-kmsg", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more."""
        os.eventfd_write(self._stop, 1)
        if self._thread:
            self._thread.join(5.0)
        os.close(self._stop)

    def _pass_over(self, fd: int) -> None:
        """What was said before a first start is old. It is read, for its end would not tell a number to go on from."""
        with suppress(OSError):  # the thread meets it again
            for record in itertools.islice(_records(fd), _OLD_MAX):
                self._last = record.sequence if record else self._last

    def _run(self, fd: int) -> None:
        poller, pauser = select.poll(), select.poll()
        for one in (poller, pauser):
            one.register(self._stop, select.POLLIN)
        poller.register(fd, select.POLLIN)
        try:
            while True:
                ready = poller.poll(None if self._saved[0] == self._last else _SAVE_EVERY * 1000)
                if any(descriptor == self._stop for descriptor, _ in ready):
                    return
                if self._take(fd) >= _BATCH:
                    pauser.poll(_PAUSE * 1000)  # a kernel that says nothing but one thing must not keep a processor busy here
                self._save()
        except OSError as error:
            log.warning("kernel_log_lost", reason=error.strerror)
        finally:
            self._save(now=True)
            with self._lock:
                self._readable = False
            os.close(fd)

    def _take(self, fd: int) -> int:
        """Read what is there, a batch at most; how many records that were."""
        count = 0
        for count, record in enumerate(_records(fd), 1):
            if record is not None and record.sequence > self._last:
                self._last = record.sequence
                event = classify(record.text)
                if event:
                    self._count(event)
            if count >= _BATCH:
                break
        return count

    def _count(self, event: KernelEvent) -> None:
        with self._lock:
            self._events[event.kind] += 1
            if event.xid is not None and event.bus and (event.bus in self._xids or len(self._xids) < GPUS_MAX):
                self._xids[event.bus] = (self._xids.get(event.bus, (0, 0))[0] + 1, event.xid)
        held_back = self._told[event.kind].may_tell(time.monotonic())
        if held_back is None:
            return
        more = {"xid": event.xid, "gpu": self._gpu_of(event.bus) if event.bus else None} if event.xid is not None else {}
        more |= {"pid": event.pid} if event.pid else {}
        more |= {"held_back": held_back} if held_back else {}
        log.warning("kernel_event", kind=event.kind.value, text=event.text, **more)
        self._tell(event)

    # --- how far we are --------------------------------------------------------------------------------------------------

    def _noted(self) -> int:
        """The last record that was read in this boot, -1 if nobody has read any."""
        if self._note is None:
            return -1
        try:
            noted = json.loads(self._note.read_bytes()[:1000])
            return int(noted["sequence"]) if noted["boot"] == boot_id() else -1
        except (OSError, ValueError, TypeError, KeyError):
            return -1

    def _save(self, *, now: bool = False) -> None:
        """Seldom: a daemon that crashes tells a few events twice, which is better than never."""
        sequence, at = self._saved
        if self._note is None or self._last == sequence or not (now or time.monotonic() - at >= _SAVE_EVERY):
            return
        self._saved = (self._last, time.monotonic())
        fresh = self._note.with_name(f".{self._note.name}.new")
        with suppress(OSError):
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                json.dump({"boot": boot_id(), "sequence": self._last}, file)
            fresh.replace(self._note)


class Told:
    """How many events of one kind were told lately."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._held_back = 0

    def may_tell(self, now: float) -> int | None:
        """Whether one more may be told; how many were held back since the last that was, None if this one is held back too.

        Args:
            now: monotonic seconds.
        """
        self._times = [at for at in self._times if now - at < TOLD_WITHIN]
        if len(self._times) >= TOLD_MAX:
            self._held_back += 1
            return None
        self._times.append(now)
        held_back, self._held_back = self._held_back, 0
        return held_back


def _open() -> int:
    return os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _records(fd: int) -> Iterator[Record | None]:
    """What is there to read now; None for what is no record, and where some were overwritten before we came.

    Raises:
        OSError: it cannot be read any more.
    """
    while True:
        try:
            data = os.read(fd, _RECORD_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EINVAL, errno.EINTR):
                raise
            yield None  # EPIPE: the kernel wrote faster than we read; the next read is the oldest that is left
            continue
        if not data:  # the device has no end
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        yield parse(data)
