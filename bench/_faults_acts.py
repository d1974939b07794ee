"""What is done to a job of `bench.faults` from outside: a disk that fills, a line of the kernel, neighbours; and the readings of the machine beside it.

Owns: these, and taking them back. Must not: touch the job's processes (`bench._faults_jobs`), or decide when.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from bench._faults_jobs import mortal

DEVICE: Final = Path("/dev/kmsg")
VOLUME_BYTES: Final = 200 << 30
VOLUME_INODES: Final = 25_600
_RECORD_MAX: Final = 8192
_ECHO_WITHIN: Final = 3.0
XIDS: Final = {
    79: "NVRM: Xid (PCI:0000:{bus}:00): 79, pid={pid}, name=python, GPU has fallen off the bus.",
    48: "NVRM: Xid (PCI:0000:{bus}:00): 48, pid={pid}, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer.",
}
"""Lines as NVIDIA's driver writes them, by the number of the Xid."""
BUSES: Final = {"node-0": "9e", "node-1": "d7"}


class UnavailableError(RuntimeError):
    """This machine, or this user, cannot do it."""


# --- a disk --------------------------------------------------------------------------------------------------------------


class Volume:
    """An ext4 of 200 GiB on a sparse file, seen by its holder's mount namespace alone: with the holder it is gone, whatever happens to us.

    Raises:
        UnavailableError: only root may mount, and there must be mkfs.ext4 and a loop device.
    """

    def __init__(self, folder: Path) -> None:
        image, mount = folder / "volume.img", folder / "volume"
        mount.mkdir()
        with image.open("wb") as file:
            file.truncate(VOLUME_BYTES)
        make = f"mkfs.ext4 -q -F -E lazy_itable_init=1 -O ^has_journal -N {VOLUME_INODES} '{image}' && mount -o loop '{image}' '{mount}'"
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", f"{make} && echo ready && read _"]
        try:
            self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise UnavailableError(str(error)) from None
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise UnavailableError("no file system on a file can be made or mounted here")
        self.path = Path(f"/proc/{self._holder.pid}/root{mount}")
        self._made = 0

    def fill(self, size: int) -> None:
        """Take so many bytes, or what is left. They are allocated, and not written."""
        self._made += 1
        with contextlib.suppress(OSError):
            fd = os.open(self.path / f"part-{self._made}", os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)

    def litter(self, count: int) -> None:
        """Make so many empty files, or as many as there is room for."""
        self._made += 1
        with contextlib.suppress(OSError):
            (self.path / f"files-{self._made}").mkdir()
            fd = os.open(self.path / f"files-{self._made}", os.O_RDONLY)
            try:
                for number in range(count):
                    os.mknod(f"{number}", dir_fd=fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Unmount it."""
        self._holder.kill()
        self._holder.communicate()


# --- the kernel ----------------------------------------------------------------------------------------------------------


def kernel_says(text: str) -> str:
    """Write a line to the kernel's log and read it back from there; as syslog has it, from the time on to the text.

    Raises:
        UnavailableError: it may not be written, or does not come back.
    """
    try:
        fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(f"{DEVICE}: {error.strerror}") from None
    try:
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, f"<3>{text}\n".encode())  # without a newline the kernel waits for more of it
        deadline = time.monotonic() + _ECHO_WITHIN
        while (left := deadline - time.monotonic()) > 0:
            select.select([fd], [], [], left)
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                head, _, said = os.read(fd, _RECORD_MAX).decode("utf-8", "replace").partition(";")
                if said.partition("\n")[0] == text:
                    return f"[{int(head.split(',')[2]) / 1e6:12.6f}] {text}"
            time.sleep(0.01)
    finally:
        os.close(fd)
    raise UnavailableError(f"what was written to {DEVICE} did not come back")


def kernel_line(text: str, node: str) -> tuple[str, str]:
    """(line as syslog has it, a note, "" if the kernel itself said it)."""
    note = ""
    try:
        said = kernel_says(text)
    except UnavailableError as error:
        said, note = text, f"not from the kernel: {error}; the line was put into the trace's file"
    return f"{datetime.now(UTC).isoformat()} {node} kernel: {said}", note


# --- neighbours ----------------------------------------------------------------------------------------------------------


class Neighbours:
    """Programs that compute for nothing."""

    def __init__(self, count: int) -> None:
        self._hogs = [subprocess.Popen(mortal([sys.executable, "-c", "while True: pass"]), stdin=subprocess.DEVNULL) for _ in range(count)]

    def close(self) -> None:
        """End them."""
        for hog in self._hogs:
            hog.kill()
            hog.wait()


# --- readings ------------------------------------------------------------------------------------------------------------


def reading(logs: Path, volume: Path | None = None) -> dict[str, int | float]:
    """What the machine says of itself, by the names of `detectors.metrics`.

    Args:
        logs: a directory on the disk that is called "logs".
        volume: where the one is mounted that is called "checkpoints".
    """
    times, memory = psutil.cpu_times(), psutil.virtual_memory()
    whole = sum(times[:8])  # guests are in user and nice already
    values: dict[str, int | float] = {
        "cpu_seconds": round(whole, 2),
        "cpu_busy_seconds": round(whole - times.idle - times.iowait, 2),
        "load1": round(os.getloadavg()[0], 2),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }
    disks = psutil.disk_io_counters()
    if disks is not None and hasattr(disks, "busy_time"):
        values["disk_busy_seconds"] = disks.busy_time / 1000
    for name, path in (("logs", logs), ("checkpoints", volume)):
        if path is not None:
            values |= _volume(name, path)
    return values


def _volume(name: str, path: Path) -> Iterator[tuple[str, int]]:
    found = os.statvfs(path)
    yield f"disk_free_bytes.{name}", found.f_bavail * found.f_frsize
    yield f"disk_size_bytes.{name}", found.f_blocks * found.f_frsize
    yield f"disk_free_inodes.{name}", found.f_favail
    yield f"disk_inodes.{name}", found.f_files


def write_reading(path: Path, node: str, values: dict[str, int | float]) -> None:
    """Append it as a line of JSON that `detectors.sources` reads."""
    now = re.sub(r"\d{3}\+00:00", "Z", datetime.now(UTC).isoformat(timespec="microseconds"))
    path.parent.mkdir(exist_ok=True)  # that of a node which is about to join
    with path.open("a") as file:
        file.write(json.dumps({"time": now, "event": "reading", "node": node, "values": values}, separators=(",", ":")) + "\n")
