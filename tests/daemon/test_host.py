"""How the machine does, against what the kernel says by other ways; and values that hang, with a look that a test holds back."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from structlog.testing import capture_logs

from elasticd.daemon import host as module
from elasticd.daemon.host import Host, disk_of, narrowest, share
from elasticd.daemon.sampled import KEPT, Sampled
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Sequence


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- the machine ---------------------------------------------------------------------------------------------------------


def test_memory_and_load_are_those_of_the_kernel() -> None:
    reading = Host({}).read()
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()}
    assert reading.memory_total == meminfo["MemTotal"]
    assert abs(reading.memory_available - meminfo["MemAvailable"]) < 1 << 30
    assert reading.load == pytest.approx(os.getloadavg()[0], abs=1.0)


def test_a_share_of_time_is_that_between_two_looks() -> None:
    assert share((100.0, 400.0), (101.0, 404.0)) == 0.25
    assert share((100.0, 400.0), (100.0, 400.0)) is None
    assert share((100.0, 400.0), (99.9, 401.0)) == 0.0, "the kernel's counts of idle time may go back a little"


def test_the_processors_share_is_that_of_the_kernels_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are pretended: user, system, idle, iowait, a guest that is in user already."""
    fields = type(psutil.cpu_times())._fields
    clock = Clock()

    def times(**seconds: float) -> None:
        made = type(psutil.cpu_times())(*(seconds.get(name, 0.0) for name in fields))
        monkeypatch.setattr(module.psutil, "cpu_times", lambda: made)

    times(user=10, system=5, idle=80, iowait=5, guest=3)
    host = Host({}, clock=clock)
    times(user=13, system=6, idle=85, iowait=6, guest=5)
    assert host.read().cpu == pytest.approx(4 / 10)
    times(user=14, system=6, idle=85, iowait=6)
    assert host.read().cpu == pytest.approx(4 / 10), "it looks once a second at most"
    clock.now += 1.0
    assert host.read().cpu == 1.0


def test_traffic_is_that_of_all_devices_but_the_loopback() -> None:
    before = Host({}).read()
    found = {}
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        found[name.strip()] = (int(numbers.split()[0]), int(numbers.split()[8]))
    after = Host({}).read()
    received, sent = (sum(pair[which] for name, pair in found.items() if name != "lo") for which in (0, 1))
    assert before.received <= received <= after.received
    assert before.sent <= sent <= after.sent


def test_the_room_on_a_disk_is_what_others_than_root_have(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    space = os.statvfs(tmp_path)
    assert disk is not None
    assert disk.size == shutil.disk_usage(tmp_path).total
    assert disk.free == pytest.approx(space.f_bavail * space.f_frsize, abs=1 << 30)
    assert disk.free_inodes == pytest.approx(space.f_favail, abs=10_000)


def test_a_directory_that_is_not_there_yet_is_where_it_would_be_made(tmp_path: Path) -> None:
    there, to_be = disk_of(tmp_path), disk_of(tmp_path / "a/b/c")
    assert there is not None
    assert to_be is not None
    assert to_be.size == there.size


def test_of_several_directories_the_one_with_the_least_room_counts(tmp_path: Path) -> None:
    places = [Path("/proc"), tmp_path]  # the first has no room at all
    least = narrowest(places)
    assert least is not None
    assert (least.free, least.size) == (0, 0)
    assert narrowest([]) is None


def test_a_volume_that_hangs_is_left_out_and_the_others_are_there(tmp_path: Path) -> None:
    held = threading.Event()

    def hung() -> Sequence[Path]:
        held.wait(60)
        return ()

    host = Host({"logs": lambda: (tmp_path,), "checkpoints": hung})
    try:
        assert set(host.read().disks) == {"logs"}
    finally:
        held.set()


# --- values that are looked up by a thread -------------------------------------------------------------------------------


class Look:
    """A look that waits until it may return."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        assert self.gate.wait(60)
        return self.count


def test_a_value_is_looked_up_at_most_once_a_second_and_not_at_all_while_nobody_asks() -> None:
    clock, look = Clock(), Look()
    sampled = Sampled("test", look, clock=clock)
    assert look.count == 0
    assert [sampled.get() for _ in range(3)] == [1, 1, 1]
    clock.now += 1.5
    assert await_(lambda: sampled.get() == 2, what="the next")
    assert look.count == 2


def test_while_a_look_hangs_the_last_value_is_given_for_a_while_and_then_none() -> None:
    clock, look = Clock(), Look()
    sampled = Sampled("test", look, clock=clock)
    assert sampled.get() == 1
    look.gate.clear()
    clock.now += 2
    assert sampled.get() == 1
    clock.now += KEPT - 2
    assert sampled.get() == 1
    clock.now += 1
    assert [sampled.get() for _ in range(5)] == [None] * 5
    assert look.count == 2, "no second look beside one that hangs"
    look.gate.set()
    assert await_(lambda: sampled.get() == 2, what="its answer")


def test_a_first_look_that_hangs_is_waited_for_once_and_not_by_every_reader() -> None:
    look = Look()
    look.gate.clear()
    sampled = Sampled("test", look)
    began = os.times().elapsed
    assert [sampled.get() for _ in range(20)] == [None] * 20
    assert os.times().elapsed - began < 3.0
    look.gate.set()
    assert await_(sampled.get, what="its answer") == 1


def test_a_look_that_fails_is_no_value_and_one_line_of_the_log_until_it_works_again() -> None:
    clock = Clock()
    looked: list[int | OSError] = []

    def look() -> int:
        looked.append(answers[len(looked)])
        if isinstance(looked[-1], OSError):
            raise looked[-1]
        return looked[-1]

    answers: list[int | OSError] = [OSError("no"), OSError("no"), 7, OSError("again")]
    sampled = Sampled("thing", look, clock=clock)
    with capture_logs() as logs:
        for number, answer in enumerate(answers, 1):
            wanted = None if isinstance(answer, OSError) else answer
            await_(lambda number=number, wanted=wanted: sampled.get() == wanted and len(looked) == number, what=f"{answer!r}")  # type: ignore[misc]
            clock.now += 2
        await_(lambda: len(logs) == 2, what="two lines")
    assert [(line["event"], line["what"], line["reason"]) for line in logs] == [("not_sampled", "thing", "no"), ("not_sampled", "thing", "again")]
