"""Whether this node is fit to join a job: what we look at ourselves, and what the job's own check says.

Owns: the checks, and one verdict over them. Must not: decide what follows from it (`reconcile` does). A check fails only on a definite bad answer:
what cannot be asked on this machine, or is not supported by it, keeps no node out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from elasticd.daemon import usercheck
from elasticd.daemon.config import HealthSection
from elasticd.daemon.gpuhealth import faults_of
from elasticd.daemon.jobs import JobSpec
from elasticd.daemon.nvml import NvmlError, NvmlSilenceError, ask
from elasticd.daemon.patience import within
from elasticd.daemon.slots import Slot
from elasticd.rendezvous.records import TEXT_MAX

INODES_MIN: Final = 1000
"""Files that the log directory's file system must still be able to take: a generation makes a few for each worker."""
_DISK_SECONDS: Final = 20.0
_PEERS_MAX: Final = 64  # sockets at once; if none of so many answers, the fault is here
_TIME_ERROR: Final = 5  # <linux/timex.h>, as the next
_STA_UNSYNC: Final = 0x40

log = structlog.get_logger("elasticd.daemon")

Peers = Callable[[], Sequence[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        detail: one line; why it failed, or what an operator should know although it passed.
    """

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """What all checks together say.

    Attributes:
        reason: what failed, TEXT_MAX characters at most; "" if nothing did.
        checks: those that were made, in order.
    """

    ok: bool
    reason: str = ""
    checks: tuple[Check, ...] = ()


class Checker:
    """Runs all checks before a job. May be called from several threads.

    Args:
        health: limits.
        log_dir: where agents write their logs.
        peers: gives (address, port) of other nodes, any of which should be reachable; asked at each check.
        patience: seconds for which unreachable ones are asked for and tried again. After a power cut of them all their leases live on for a while.
    """

    def __init__(self, health: HealthSection, log_dir: Path, peers: Peers = lambda: (), patience: float = 0.0) -> None:
        self._health = health
        self._log_dir = log_dir
        self._peers = peers
        self._patience = patience

    def __call__(self, spec: JobSpec, slots: Sequence[Slot], cancelled: threading.Event) -> Health:
        """Run them.

        Args:
            spec: the job.
            slots: what its agent is to be given.
            cancelled: ends them early when set; the result means nothing then.
        """
        return run_checks(spec, slots, limits=self._health, log_dir=self._log_dir, peers=self._peers, patience=self._patience, cancelled=cancelled)


def run_checks(
    spec: JobSpec,
    slots: Sequence[Slot],
    *,
    limits: HealthSection,
    log_dir: Path,
    peers: Peers = lambda: (),
    patience: float = 0.0,
    cancelled: threading.Event | None = None,
) -> Health:
    """Everything that is to be well before this node joins a job.

    Args:
        spec: the job; its own check is run last, and only on a node that is well otherwise.
        slots: what its agent is to be given; their GPUs are looked at.
        limits: what is too little, and how long the job's own check may take.
        log_dir: where the agent is to write.
        peers: gives (address, port) of other nodes.
        patience: as of `Checker`.
        cancelled: ends the checks early when set; the result means nothing then.
    """
    cancelled = cancelled or threading.Event()
    checks: list[Check] = []
    looks: tuple[Callable[[], Check], ...] = (
        lambda: disk(log_dir, limits.disk_free_min),
        lambda: clock(limits.clock_skew_max),
        lambda: reachable_soon(peers, patience, cancelled),
        lambda: gpus([slot.gpu_uuid for slot in slots if slot.gpu_uuid]),
    )
    for look in looks:
        if cancelled.is_set():
            return Health(ok=False, reason="cancelled", checks=tuple(checks))
        checks.append(look())
    if all(check.ok for check in checks) and spec.health_check:
        checks.append(own_check(spec, slots, seconds=spec.health_timeout or limits.timeout, cancelled=cancelled))
    for found in checks:
        if found.ok and found.detail:
            log.warning("check_passed_but", job=spec.name, check=found.name, detail=found.detail)
    reason = "; ".join(f"{found.name}: {found.detail}" for found in checks if not found.ok)
    return Health(ok=not reason, reason=reason[:TEXT_MAX], checks=tuple(checks))


def own_check(spec: JobSpec, slots: Sequence[Slot], *, seconds: float, cancelled: threading.Event) -> Check:
    """The job's `health_check`, as its user, in its directory; it sees the GPUs of `slots` and little else of an environment."""
    env = {"ELASTICD_JOB": spec.name}
    devices = [slot.gpu_uuid for slot in slots if slot.gpu_uuid]
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    why = usercheck.run(spec.health_check, spec.user, cwd=spec.cwd, env=env, seconds=seconds, cancelled=cancelled)
    return Check("health_check", ok=not why, detail=why)


def disk(directory: Path, free_min: int) -> Check:
    """Whether a file system has room, and takes a file.

    Args:
        directory: is made if it is not there.
        free_min: bytes it must have free for users that are not root.
    """
    try:
        why = within(_DISK_SECONDS, lambda: _disk_fault(directory, free_min), name="elasticd-check-disk")
    except OSError as error:
        why = f"{directory} cannot be written: {error.strerror or error}"
    return Check("disk", ok=not why, detail=why)


def _disk_fault(directory: Path, free_min: int) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if free < free_min:
        return f"{directory} has {_size(free)} free, and {_size(free_min)} are wanted"
    if space.f_files and space.f_favail < INODES_MIN:  # some file systems count none
        return f"{directory} can take {space.f_favail} more files, and {INODES_MIN} are wanted"
    probe = directory / f".elasticd-probe-{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        probe.unlink()  # at once: whatever ends us leaves nothing behind
        os.write(fd, b"elasticd looks whether this can be written\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    return ""


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2), as far as it is read; the rest is room for what the kernel writes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def clock(skew_max: float) -> Check:
    """What the kernel says of its clock. Never keeps a node out: nothing here compares clocks of machines, and people read logs all the same.

    Args:
        skew_max: seconds by which it may be off.
    """
    told = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(told))
    except AttributeError:  # a libc without it
        state = -1
    if state < 0:  # forbidden, as in some containers
        return Check("clock", ok=True)
    return Check("clock", ok=True, detail=_clock_doubt(state, told.status, told.maxerror / 1e6, skew_max))


def _clock_doubt(state: int, status: int, off: float, skew_max: float) -> str:
    """What is wrong with a clock that may be `off` seconds off."""
    if state == _TIME_ERROR or status & _STA_UNSYNC:
        return "the kernel says that nobody synchronizes the clock; run chrony or systemd-timesyncd"
    return f"the clock may be off by {off:.1f} s, and {skew_max:g} s are thought too much" if off > skew_max else ""


def reachable_soon(peers: Peers, patience: float, cancelled: threading.Event) -> Check:
    """As `reachable`; while none answers, who there is and whether they answer is asked again, once a second for `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = reachable(peers())
        if found.ok or time.monotonic() >= deadline or cancelled.wait(1.0):
            return found


def reachable(addresses: Sequence[tuple[str, int]], *, seconds: float = 1.0) -> Check:
    """Whether any of several other nodes takes a TCP connection. One that is down is its own affair; if none answers, the fault may be here.

    Args:
        addresses: address and port of each; with none of them there is nothing to find out.
        seconds: for all together.
    """
    if not addresses:
        return Check("peers", ok=True)
    faults: dict[str, str] = {}
    with ExitStack() as stack:
        poller = select.poll()
        waiting: dict[int, tuple[str, socket.socket]] = {}
        for address, port in addresses[:_PEERS_MAX]:
            name = f"{address}:{port}"
            try:
                started = stack.enter_context(_connecting(address, port))
            except OSError as error:
                faults[name] = error.strerror or str(error)
                continue
            poller.register(started, select.POLLOUT)
            waiting[started.fileno()] = name, started
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                name, connecting = waiting.pop(fd)
                poller.unregister(fd)
                code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    return Check("peers", ok=True)
                faults[name] = os.strerror(code)
        faults |= {name: f"no answer within {seconds:g} s" for name, _ in waiting.values()}
    shown = ", ".join(f"{name} ({why})" for name, why in list(faults.items())[:3])
    return Check("peers", ok=False, detail=f"none of {len(faults)} other nodes can be reached: {shown}{', …' if len(faults) > 3 else ''}")


def _connecting(address: str, port: int) -> socket.socket:
    """A socket on its way; whether it arrives, it says when it can be written.

    Raises:
        OSError: it did not set out.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    begun = socket.socket(family, kind, protocol)
    begun.setblocking(False)
    code = begun.connect_ex(where)
    if code not in (0, errno.EINPROGRESS):  # SO_ERROR would not know of it: it holds what comes later
        begun.close()
        raise OSError(code, os.strerror(code))
    return begun


def gpus(uuids: Sequence[str]) -> Check:
    """What NVML says of these GPUs."""
    if not uuids:
        return Check("gpus", ok=True)
    try:
        faults = ask(lambda nvml: faults_of(nvml, uuids))
    except NvmlSilenceError as error:
        return Check("gpus", ok=False, detail=str(error))
    except NvmlError as error:
        return Check("gpus", ok=True, detail=f"they could not be looked at: {error}")
    return Check("gpus", ok=not faults, detail="; ".join(faults or ()))
