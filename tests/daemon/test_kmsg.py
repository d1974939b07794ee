"""What the kernel says: the meaning of records by a table of real ones, and reading the real /dev/kmsg where that is allowed.

Where the kernel itself would have to fail (records overwritten, the device gone) a socket stands in for it, of which one read is one message, too.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from elasticd.daemon import kmsg
from elasticd.daemon.kmsg import DEVICE, TEXT_MAX, TOLD_MAX, TOLD_WITHIN, EventKind, KernelEvent, KernelLog, Record, Told, classify, parse
from elasticd.rendezvous.nodelock import boot_id
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemon.daemons import Cluster


# --- records -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "more"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            EventKind.XID,
            {"xid": 79, "bus": "0000:3b:00"},
        ),
        ("NVRM: Xid (PCI:0000:b1:00): 31, pid=2345, name=python, Ch 00000008", EventKind.XID, {"xid": 31, "bus": "0000:b1:00", "pid": 2345}),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, pid='77', name=x", EventKind.XID, {"xid": 43, "bus": "0000:01:00", "pid": 77}),
        ("NVRM: Xid (0010:86:00): 48, Double Bit ECC Error", EventKind.XID, {"xid": 48, "bus": "0010:86:00"}),
        ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:1860)", EventKind.NVRM, {}),
        ("Out of memory: Killed process 1234 (python) total-vm:1kB, anon-rss:2kB", EventKind.OOM, {"pid": 1234}),
        ("Memory cgroup out of memory: Killed process 99 (a) b) total-vm:1kB", EventKind.OOM, {"pid": 99}),
        ("Out of memory: Kill process 55 (old) score 900 or sacrifice child", EventKind.OOM, {"pid": 55}),
        ("mce: [Hardware Error]: Machine check events logged", EventKind.MCE, {}),
        ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400", EventKind.MCE, {}),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0 (channel:0)", EventKind.MCE, {}),
        ("INFO: task python:4321 blocked for more than 120 seconds.", EventKind.HANG, {"pid": 4321}),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:9]", EventKind.HANG, {}),
        ("watchdog: Watchdog detected hard LOCKUP on cpu 0", EventKind.HANG, {}),
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", EventKind.HANG, {}),
        ("I/O error, dev nvme0n1, sector 1234 op 0x0:(READ) flags 0x0", EventKind.IO, {}),
        ("blk_update_request: I/O error, dev sda, sector 5", EventKind.IO, {}),
        ("nvme nvme0: I/O 123 QID 4 timeout, aborting", EventKind.IO, {}),
        ("EXT4-fs error (device sda1): ext4_lookup:1855: inode #2: comm ls: deleted inode referenced: 3", EventKind.FS, {}),
        ("XFS (dm-0): Metadata corruption detected at xfs_agi_verify, xfs_agi block 0x2", EventKind.FS, {}),
        ("EXT4-fs (sda1): Remounting filesystem read-only", EventKind.FS, {}),
    ],
)
def test_a_record_of_the_kernel_is_an_event(text: str, kind: EventKind, more: dict[str, Any]) -> None:
    assert classify(text) == KernelEvent(kind=kind, text=text, **more)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "usb 1-1: new high-speed USB device",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "XFS (dm-0): Mounting V5 Filesystem",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "docker0: port 1(veth) entered disabled state",
    ],
)
def test_what_a_kernel_says_all_day_is_none(text: str) -> None:
    assert classify(text) is None


def test_hostile_names_are_told_harmless_and_bounded() -> None:
    event = classify("Out of memory: Killed process 7 (\x1b[31m\u202eevil\n) " + "x" * 100_000)
    assert event is not None
    assert len(event.text) == TEXT_MAX
    assert event.text.isascii()
    assert event.text.isprintable()


@pytest.mark.parametrize("number", range(20))
def test_no_line_takes_long(number: int) -> None:
    """Each pattern is tried on what nearly fits it."""
    rng = random.Random(number)
    pieces = ["NVRM: ", "Xid (PCI:", "0000:", "Out of memory", ": Killed process ", "INFO: task ", "I/O ", "XFS ", "EDAC ", "lockup", " ", "a" * 50]
    classify("".join(rng.choice(pieces) for _ in range(2000)))


@pytest.mark.parametrize(
    ("data", "record"),
    [
        (b"4,6627,379487,-;a text, with; all\n SUBSYSTEM=pci\n", Record(sequence=6627, text="a text, with; all")),
        (b"4,0,1,-,caller=T1;\xff\xfe\n", Record(sequence=0, text="\ufffd\ufffd")),
        (b"", None),
        (b"no record", None),
        (b"4,x,1,-;text", None),
        (b"4,1;text", None),
    ],
)
def test_a_read_is_a_record_or_none(data: bytes, record: Record | None) -> None:
    assert parse(data) == record


def test_so_many_are_told_in_a_while_and_the_rest_is_counted() -> None:
    told = Told()
    assert [told.may_tell(100.0 + number) for number in range(TOLD_MAX + 3)] == [*[0] * TOLD_MAX, None, None, None]
    assert told.may_tell(100.0 + TOLD_WITHIN) == 3
    assert told.may_tell(101.0 + TOLD_WITHIN) == 0


# --- the real device -----------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[int]:
    """Where one may speak as the kernel."""
    try:
        os.close(os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK))
        fd = os.open(DEVICE, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read and written here: {error.strerror}")
    yield fd
    os.close(fd)


def some_bus() -> str:
    """A GPU that no other test speaks of, and that is not there."""
    return f"{random.randrange(0x1000, 0xFFFF):04x}:{random.randrange(256):02x}:1f"


def test_an_xid_is_read_from_the_real_device_with_its_gpu(kernel: int) -> None:
    bus = some_bus()
    log = KernelLog(lambda address: 5 if address == bus else None)
    with capture_logs() as logs:
        log.start()
        try:
            assert log.counts.readable
            before = log.counts.events[EventKind.XID]
            for xid in (13, 79):
                os.write(kernel, f"<4>NVRM: Xid (PCI:{bus}): {xid}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n".encode())
            await_(lambda: log.counts.xids.get(bus) == (2, 79), what="the events")
            assert log.counts.events[EventKind.XID] >= before + 2
        finally:
            log.close()
    assert not log.counts.readable
    mine = [line for line in logs if line["event"] == "kernel_event" and bus in line["text"]]
    assert [(line["log_level"], line["kind"], line["xid"], line["gpu"]) for line in mine] == [("warning", "xid", 13, 5), ("warning", "xid", 79, 5)]


def test_what_was_said_before_a_first_start_is_old_and_what_was_said_between_two_daemons_is_not_lost(kernel: int, tmp_path: Path) -> None:
    note, bus = tmp_path / "kmsg.json", some_bus()

    def say(xid: int) -> None:
        os.write(kernel, f"<4>NVRM: Xid (PCI:{bus}): {xid}, GPU has fallen off the bus.\n".encode())

    say(1)
    first = KernelLog(lambda _: None, note=note)
    first.start()
    first.close()
    assert first.counts.xids.get(bus) is None
    assert json.loads(note.read_text())["boot"] == boot_id()
    assert note.stat().st_mode & 0o777 == 0o600
    say(2)
    second = KernelLog(lambda _: None, note=note)
    second.start()
    await_(lambda: bus in second.counts.xids, what="what was said meanwhile")
    say(3)
    await_(lambda: second.counts.xids[bus][0] == 2, what="what is said now")
    second.close()
    assert second.counts.xids[bus] == (2, 3)
    third = KernelLog(lambda _: None, note=note)
    third.start()
    third.close()
    assert third.counts.xids.get(bus) is None, "nothing is read twice"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": "another", "sequence": 5}', '{"sequence": 5}', '{"boot": 1, "sequence": "x"}'])
def test_a_note_that_is_garbage_or_of_another_boot_is_a_first_start(kernel: int, tmp_path: Path, text: str) -> None:
    bus = some_bus()
    os.write(kernel, f"<4>NVRM: Xid (PCI:{bus}): 1, GPU has fallen off the bus.\n".encode())
    (tmp_path / "note").write_text(text)
    log = KernelLog(lambda _: None, note=tmp_path / "note")
    log.start()
    log.close()
    assert log.counts.xids.get(bus) is None
    assert json.loads((tmp_path / "note").read_text())["boot"] == boot_id()


# --- what a kernel does seldom: a socket stands in for it ----------------------------------------------------------------


class StandIn:
    """A kernel that says what a test wants."""

    def __init__(self) -> None:
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.fd = theirs.detach()
        self.sequence = 10

    def say(self, text: str) -> None:
        self.mine.send(f"4,{self.sequence},0,-;{text}\n".encode())
        self.sequence += 1


@pytest.fixture
def standin() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.mine.close()


def test_without_permission_there_is_one_line_and_no_thread() -> None:
    def refuse() -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    log = KernelLog(lambda _: None, opened=refuse)
    with capture_logs() as logs:
        log.start()
    log.close()
    assert not log.counts.readable
    assert [(line["event"], line["reason"]) for line in logs] == [("kernel_log_unreadable", "Operation not permitted")]


def test_records_that_were_overwritten_are_passed_over_and_reading_goes_on(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    real, faults = os.read, [errno.EPIPE, errno.EINVAL]

    def read(fd: int, size: int) -> bytes:
        if fd == standin.fd and faults and log.counts.events[EventKind.OOM]:
            raise OSError(faults.pop(), "overwritten")
        return real(fd, size)

    log = KernelLog(lambda _: None, opened=lambda: standin.fd)
    log.start()
    monkeypatch.setattr(kmsg.os, "read", read)
    standin.say("Out of memory: Killed process 1 (a) total-vm:1kB")
    await_(lambda: log.counts.events[EventKind.OOM] == 1, what="the first")
    standin.say("Out of memory: Killed process 2 (b) total-vm:1kB")
    await_(lambda: log.counts.events[EventKind.OOM] == 2, what="the second")
    log.close()
    assert faults == []


def test_a_log_that_ends_is_no_longer_readable_and_what_was_counted_stays(standin: StandIn) -> None:
    log = KernelLog(lambda _: None, opened=lambda: standin.fd)
    with capture_logs() as logs:
        log.start()
        standin.say("mce: [Hardware Error]: Machine check events logged")
        await_(lambda: log.counts.events[EventKind.MCE] == 1, what="the event")
        standin.mine.close()
        await_(lambda: not log.counts.readable, what="the end")
        log.close()
    assert [line["event"] for line in logs] == ["kernel_event", "kernel_log_lost"]
    assert log.counts.events[EventKind.MCE] == 1


def test_a_storm_is_counted_to_the_last_and_told_in_ten_lines(standin: StandIn) -> None:
    log = KernelLog(lambda _: 1, opened=lambda: standin.fd)
    with capture_logs() as logs:
        log.start()
        standin.mine.settimeout(20)
        for number in range(1500):
            standin.say(f"NVRM: Xid (PCI:0000:{number % 200:02x}:00): 13, pid=5")
        await_(lambda: log.counts.events[EventKind.XID] == 1500, what="all")
        log.close()
    assert len(logs) == TOLD_MAX
    assert len(log.counts.xids) == 64, "only so many GPUs are believed"


# --- a real daemon -------------------------------------------------------------------------------------------------------


def test_a_real_daemon_logs_and_counts_what_the_kernel_says(kernel: int, cluster: Cluster) -> None:
    bus = some_bus()
    cluster.start("n1")
    await_(lambda: cluster.record("n1"), within=30, what="the node's key")
    assert "elasticd_kernel_log_readable 1.0" in cluster.api("n1").text("/metrics")[1]
    os.write(kernel, f"<4>NVRM: Xid (PCI:{bus}): 79, pid=4242, GPU has fallen off the bus.\n".encode())
    (line,) = await_(lambda: [line for line in cluster.events("n1", "kernel_event") if bus in line["text"]], what="a line of the log")
    assert (line["level"], line["kind"], line["xid"], line["pid"]) == ("warning", "xid", 79, 4242)
    counted = [line for line in cluster.api("n1").text("/metrics")[1].splitlines() if line.startswith('elasticd_kernel_events_total{kind="xid"}')]
    assert float(counted[0].split()[1]) >= 1
    assert cluster.end("n1") == 0
    assert json.loads((cluster.home("n1") / "run/kmsg.json").read_text())["boot"] == boot_id()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user, by setpriv (package util-linux)")
@pytest.mark.parametrize("capabilities", ["+syslog", "-all"])
def test_another_user_than_root_reads_it_with_the_capability_that_the_unit_grants(kernel: int, capabilities: str) -> None:
    """Without it the kernel decides by its setting dmesg_restrict."""
    restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--no-new-privs"]
    done = subprocess.run([*user, "dd", f"if={DEVICE}", "bs=8192", "count=1", "iflag=nonblock"], capture_output=True, timeout=20)
    assert (done.returncode == 0) is (capabilities == "+syslog" or not restricted), done.stderr
