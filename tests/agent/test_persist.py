"""States reach the disk while the job goes on, whatever the disk does; and whoever is killed in the middle leaves what was there before."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from structlog.testing import capture_logs

from elasticd.agent.newest import Newest
from elasticd.agent.persist import CLOSE_SECONDS, Persister
from tests.support.etcd import await_
from tests.support.states import THREE_CHUNKS, State, make_state, newest
from trainer.checkpoint import CHUNK, Best, Info, Keep, Manifest, list_remote, name_of, scan
from trainer.errors import CancelledError, DamagedError, NoSpaceError, StateError

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT = 20.0


class Watched:
    """A persister, what it said, and its states' pins."""

    def __init__(self, root: Path, **named: Any) -> None:
        self.root = root
        self.alerts: list[tuple[str, Mapping[str, Any]]] = []
        self.manifests: list[Manifest] = []
        self.given_up: list[tuple[Info, Exception]] = []
        self.pinned = 0
        self.happened = threading.Condition()
        values = {"job": "digits", "back_off": (0.01, 0.05), **named}
        self.persister = Persister(root, alert=self._alert, done=self._done, failed=self._failed, **values)

    def _alert(self, name: str, values: Mapping[str, Any]) -> None:
        with self.happened:
            self.alerts.append((name, values))
            self.happened.notify_all()

    def _done(self, manifest: Manifest) -> None:
        with self.happened:
            self.manifests.append(manifest)
            self.happened.notify_all()

    def _failed(self, info: Info, error: Exception) -> None:
        with self.happened:
            self.given_up.append((info, error))
            self.happened.notify_all()

    def until(self, condition: Callable[[], object]) -> None:
        with self.happened:
            assert self.happened.wait_for(condition, WAIT), "it did not happen"

    @contextmanager
    def reading(self, state: State) -> Iterator[tuple[bytes, memoryview]]:
        self.pinned += 1
        try:
            yield state.layout.header, state.image
        finally:
            self.pinned -= 1

    def want(self, state: State, **named: Any) -> None:
        self.persister.want(state.info, lambda: self.reading(state), **named)

    def write(self, *states: State) -> None:
        for state in states:
            self.want(state)
            assert self.persister.wait(WAIT)

    @property
    def steps(self) -> list[int]:
        return [manifest.step for manifest in self.manifests]

    @property
    def alert_names(self) -> list[str]:
        return [name for name, _ in self.alerts]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make(root: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def watched(**named: Any) -> Watched:
        made.append(Watched(root, **named))
        return made[-1]

    yield watched
    for item in made:
        item.persister.close()
        assert item.pinned == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("elasticd-")] == []


class Gate:
    """Holds the writing of a state until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "pwrite") -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        real = getattr(os, name)

        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(WAIT)
            return real(*arguments)

        monkeypatch.setattr(os, name, held)


def failing(monkeypatch: pytest.MonkeyPatch, number: int, times: int, name: str = "fsync") -> list[int]:
    """The next `times` calls fail; gives those made so far."""
    calls: list[int] = []
    real = getattr(os, name)

    def call(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return calls


class TestOrders:
    def test_a_state_that_is_wanted_is_written_verified_and_reported(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make()
        watched.write(make_state(3, 40, nbytes=THREE_CHUNKS))
        assert [(manifest.generation, manifest.step) for manifest in watched.manifests] == [(3, 40)]
        assert newest(root, nbytes=THREE_CHUNKS) == ((3, 40), [])
        assert not watched.persister.busy
        assert watched.persister.progress is None
        assert watched.alerts == []

    def test_the_state_is_pinned_while_it_is_written_and_no_longer(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make()
        pins: list[int] = []
        real_fsync, real_preadv = os.fsync, os.preadv
        monkeypatch.setattr(os, "fsync", lambda fd: (pins.append(watched.pinned), real_fsync(fd))[1])
        monkeypatch.setattr(os, "preadv", lambda *arguments: (pins.append(-watched.pinned), real_preadv(*arguments))[1])
        watched.write(make_state(1, 1))
        written = pins.index(0)
        assert set(pins[:written]) == {1}
        assert set(pins[written:]) == {0}

    def test_of_those_that_wait_only_the_newest_is_written(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate(monkeypatch)
        watched = make()
        with capture_logs() as logs:
            watched.want(make_state(1, 1))
            assert gate.reached.wait(WAIT)
            for step in (2, 3, 4):
                watched.want(make_state(1, step))
            gate.opened.set()
            assert watched.persister.wait(WAIT)
        assert watched.steps == [1, 4]
        assert [info.step for info, error in watched.given_up if isinstance(error, CancelledError)] == [2, 3]
        assert [(entry["step"], entry["newer"]) for entry in logs if entry["event"] == "checkpoint_skipped"] == [(2, 3), (3, 4)]

    def test_progress_says_what_is_written_and_since_when(self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.mkdir()
        gate = Gate(monkeypatch, "fsync")
        watched = make()
        before = time.time()
        state = make_state(2, 7, nbytes=THREE_CHUNKS)
        watched.want(state)
        assert gate.reached.wait(WAIT)
        progress = watched.persister.progress
        assert progress is not None
        assert (progress.generation, progress.step, progress.written, progress.total) == (2, 7, len(state.image), len(state.image))
        assert before <= progress.since <= time.time()
        assert (progress.tries, progress.trouble) == (1, "")
        assert watched.persister.busy
        assert not watched.persister.wait(0.0)
        gate.opened.set()
        assert watched.persister.wait(WAIT)

    def test_a_state_that_is_no_longer_in_memory_is_given_up(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make()

        def gone() -> Any:
            raise StateError("its buffer holds another step")

        watched.persister.want(make_state(1, 1).info, gone)
        assert watched.persister.wait(WAIT)
        assert [str(error) for _, error in watched.given_up] == ["step 1 is no longer in memory: its buffer holds another step"]
        assert watched.alerts == []
        watched.write(make_state(1, 2))
        assert watched.steps == [2]

    def test_what_callbacks_raise_ends_nothing(self, root: Path) -> None:
        def refuse(*_: object) -> None:
            raise RuntimeError("not now")

        persister = Persister(root, job="digits", done=refuse, failed=refuse, alert=refuse, back_off=(0.01, 0.01))
        watched = Watched(root)
        for step in (1, 2):
            state = make_state(1, step)
            persister.want(state.info, lambda state=state: watched.reading(state))
            assert persister.wait(WAIT)
        persister.want(make_state(1, 3).info, refuse)  # type: ignore[arg-type]
        assert persister.wait(WAIT)
        persister.close()
        assert newest(root) == ((1, 2), [])

    def test_a_state_of_another_content_is_an_alert_and_is_not_tried_again(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make()
        watched.write(make_state(1, 1), State(layout=make_state(1, 1).layout, image=make_state(8, 8).image, info=make_state(1, 1).info))
        assert watched.alert_names == ["checkpoint_failed"]
        assert isinstance(watched.given_up[0][1], StateError)
        assert newest(root) == ((1, 1), [])


class TestTally:
    def test_what_was_written_is_counted_with_its_size_its_time_and_how_long_it_took(self, make: Callable[..., Watched]) -> None:
        watched = make()
        assert (watched.persister.tally.written, watched.persister.tally.at) == (0, 0.0)
        before = time.time()
        watched.write(make_state(1, 3), make_state(1, 8))
        tally = watched.persister.tally
        assert (tally.written, tally.failed, tally.step, tally.nbytes, tally.trouble) == (2, 0, 8, watched.manifests[1].size, "")
        assert before <= tally.at <= time.time()
        assert sum(tally.durations.counts) == 2
        assert 0 < tally.durations.total < time.time() - before

    def test_how_long_it_took_counts_from_the_order_and_not_from_the_try(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(back_off=(0.3, 0.3))
        failing(monkeypatch, errno.EIO, 1)
        watched.write(make_state(1, 1))
        assert watched.persister.tally.durations.total > 0.3

    def test_a_try_that_failed_counts_and_its_trouble_is_told_until_one_goes_well(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(back_off=(60.0, 60.0))
        failing(monkeypatch, errno.ENOSPC, 2)
        for step, failed in ((1, 1), (2, 2)):
            watched.want(make_state(1, step))
            await_(lambda failed=failed: watched.persister.tally.failed == failed, what="a failed try")
            assert "no space left" in watched.persister.tally.trouble
        watched.want(make_state(1, 3))
        assert watched.persister.wait(WAIT)
        tally = watched.persister.tally
        assert (tally.written, tally.failed, tally.step, tally.trouble) == (1, 2, 3, "")

    def test_a_state_that_was_gone_before_it_was_written_is_a_failure_and_one_that_a_newer_replaced_is_none(
        self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        watched = make()
        watched.want(make_state(1, 1))
        assert gate.reached.wait(WAIT)
        watched.want(make_state(1, 2))
        watched.want(make_state(1, 3))
        gate.opened.set()
        assert watched.persister.wait(WAIT)
        assert watched.persister.tally.failed == 0

        def gone() -> Any:
            raise StateError("its buffer holds another step")

        watched.persister.want(make_state(1, 4).info, gone)
        assert watched.persister.wait(WAIT)
        tally = watched.persister.tally
        assert (tally.written, tally.failed, tally.step, tally.trouble) == (2, 1, 3, "")

    def test_what_an_earlier_agent_left_is_the_last_until_something_newer_is_there(self, make: Callable[..., Watched]) -> None:
        first = make()
        first.write(make_state(1, 3))
        second = make()
        second.persister.found(first.manifests[0])
        tally = second.persister.tally
        assert (tally.written, tally.step, tally.at, tally.nbytes) == (0, 3, first.manifests[0].created_at, first.manifests[0].size)


class TestTrouble:
    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EROFS])
    def test_a_disk_that_refuses_for_a_while_is_tried_again(
        self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        watched = make()
        watched.write(make_state(1, 1))
        failing(monkeypatch, number, 3)
        watched.write(make_state(1, 2))
        assert watched.steps == [1, 2]
        assert watched.alert_names == ["checkpoint_failed"]  # once, not for each try
        assert os.strerror(number) in watched.alerts[0][1]["error"]
        assert str(root) in watched.alerts[0][1]["error"]
        assert sorted(path.name for path in root.iterdir()) == [name_of(1, 1), name_of(1, 2)]

    def test_a_full_disk_is_alerted_and_the_oldest_spare_checkpoint_goes(
        self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = make(keep=Keep(last=10, best=(Best(metric="loss"),)))
        for step, loss in ((1, 0.9), (2, 0.1), (3, 0.8), (4, 0.8), (5, 0.8)):
            watched.write(make_state(1, step, metrics={"loss": loss}))
        watched.persister.committed(1, 3)
        failing(monkeypatch, errno.ENOSPC, 1)
        watched.write(make_state(1, 6, metrics={"loss": 0.8}))
        assert watched.steps == [1, 2, 3, 4, 5, 6]
        assert watched.alert_names == ["checkpoint_disk_full"]
        assert watched.alerts[0][1]["directory"] == str(root)
        assert [found.step for found in scan(root)] == [6, 5, 4, 3, 2]

    def test_when_nothing_may_go_it_waits_and_goes_on_once_there_is_space(
        self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = make(keep=Keep(last=10, best=(Best(metric="loss"),)))
        for step, loss in ((1, 0.1), (2, 0.9), (3, 0.9)):
            watched.write(make_state(1, step, metrics={"loss": loss}))
        watched.persister.committed(1, 2)
        calls = failing(monkeypatch, errno.ENOSPC, 8)
        watched.write(make_state(1, 4))
        assert len(calls) > 8
        assert watched.steps == [1, 2, 3, 4]
        assert watched.alert_names == ["checkpoint_disk_full"]
        assert [found.step for found in scan(root)] == [4, 3, 2, 1]

    def test_no_checkpoint_goes_for_one_that_would_not_fit_all_the_same(
        self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = make(keep=Keep(last=10), back_off=(60.0, 60.0))
        watched.write(*[make_state(1, step) for step in (1, 2, 3)])
        real = os.statvfs(root)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _path: os.statvfs_result((*real[:3], 1, 1, *real[5:])))
            watched.want(make_state(1, 4, nbytes=THREE_CHUNKS))
            watched.until(lambda: watched.alerts)
            watched.persister.close()
        assert [found.step for found in scan(root)] == [3, 2, 1]

    def test_a_newer_state_takes_the_place_of_one_that_does_not_fit(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(back_off=(60.0, 60.0))
        failing(monkeypatch, errno.ENOSPC, 1)
        watched.want(make_state(1, 1))
        watched.until(lambda: watched.alerts)
        watched.want(make_state(1, 2))
        assert watched.persister.wait(WAIT)
        assert watched.steps == [2]
        assert [(info.step, type(error)) for info, error in watched.given_up] == [(1, NoSpaceError)]

    def test_trouble_shows_in_the_progress(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(back_off=(60.0, 60.0))
        failing(monkeypatch, errno.EIO, 1)
        watched.want(make_state(1, 1))
        watched.until(lambda: watched.alerts)
        progress = watched.persister.progress
        assert progress is not None
        assert progress.tries == 2
        assert "Input/output error" in progress.trouble

    def test_an_image_that_changes_while_it_is_written_is_found_and_set_aside(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make()
        state = make_state(1, 1, nbytes=THREE_CHUNKS)
        tries: list[int] = []

        @contextmanager
        def spoilt() -> Iterator[tuple[bytes, memoryview]]:
            """At the first try somebody writes into the image between sum and disk."""
            tries.append(0)
            if len(tries) > 1:
                yield state.layout.header, state.image
                return
            real = os.pwrite

            def late(fd: int, data: memoryview, offset: int) -> int:
                content = bytes(data)
                copy = mmap.mmap(-1, len(content))
                copy[:] = bytes([content[0] ^ 1]) + content[1:]
                return real(fd, copy, offset) if len(content) == CHUNK else real(fd, data, offset)

            os.pwrite = late  # type: ignore[assignment]
            try:
                yield state.layout.header, state.image
            finally:
                os.pwrite = real

        watched.persister.want(state.info, spoilt)
        assert watched.persister.wait(WAIT)
        assert watched.steps == [1]
        assert watched.alert_names == ["checkpoint_damaged"]
        assert newest(root, nbytes=THREE_CHUNKS) == ((1, 1), [])

    def test_one_that_cannot_be_read_back_right_does_not_keep_its_name(self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make()
        state = make_state(1, 1)
        real, tries = os.preadv, list[int]()

        def wrong(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = real(fd, buffers, offset)
            buffers[0][count - 1] ^= 1
            return count

        def once() -> Any:
            tries.append(0)
            if len(tries) > 1:
                raise StateError("its buffer holds another step")
            return watched.reading(state)

        monkeypatch.setattr(os, "preadv", wrong)
        watched.persister.want(state.info, once)
        assert watched.persister.wait(WAIT)
        assert watched.alert_names == ["checkpoint_damaged"]
        assert [path.name for path in root.iterdir()] == [f"{name_of(1, 1)}.bad"]

    def test_a_file_limit_of_the_process_is_survived(self, tmp_path: Path) -> None:
        """In a process of its own, by the kernel's own EFBIG."""
        code = f"""if True:
            import resource, sys, threading
            from pathlib import Path
            from tests.agent.test_persist import Watched
            from tests.support.states import THREE_CHUNKS, make_state, newest
            root = Path({str(tmp_path)!r}) / "checkpoints"
            watched = Watched(root)
            watched.write(make_state(1, 1, nbytes=THREE_CHUNKS))
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, resource.RLIM_INFINITY))
            watched.want(make_state(1, 2, nbytes=THREE_CHUNKS))
            watched.until(lambda: watched.alerts)
            assert newest(root, nbytes=THREE_CHUNKS) == ((1, 1), [])
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert watched.persister.wait(20)
            assert watched.steps == [1, 2] and watched.alert_names == ["checkpoint_disk_full"], watched.alerts
            watched.persister.close()
        """
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.root
    def test_a_disk_that_is_really_full_keeps_the_job_going(self, tmp_path: Path) -> None:
        """A file system of 64 MiB in a mount namespace of its own: three checkpoints of 8 MiB fit beside somebody's 20 MiB, a fourth does not."""
        code = f"""if True:
            import os, subprocess, sys
            from pathlib import Path
            from tests.agent.test_persist import Watched
            from tests.support.states import make_state, newest
            from trainer.checkpoint import Keep, scan
            disk = Path({str(tmp_path)!r})
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
            root = disk / "checkpoints"
            watched = Watched(root, keep=Keep(last=10))
            watched.write(*[make_state(1, step, nbytes=8 << 20) for step in (1, 2, 3)])
            hog = disk / "hog"
            hog.write_bytes(bytes(20 << 20))
            watched.write(make_state(1, 4, nbytes=8 << 20))  # step 1 makes way
            assert watched.steps == [1, 2, 3, 4], watched.steps
            assert [found.step for found in scan(root)] == [4, 3, 2]
            assert watched.alert_names == ["checkpoint_disk_full"], watched.alerts
            with hog.open("ab") as file:  # until nothing fits
                free = os.statvfs(disk)
                file.write(bytes(free.f_bavail * free.f_frsize - 4096))
            watched.persister.committed(1, 2)
            watched.alerts.clear()
            watched.want(make_state(1, 5, nbytes=8 << 20))
            watched.until(lambda: watched.alerts)
            assert newest(root, nbytes=8 << 20) == ((1, 4), [])
            hog.unlink()
            assert watched.persister.wait(20)
            assert watched.steps == [1, 2, 3, 4, 5]
            assert 2 in [found.step for found in scan(root)], "the committed one stays"
            watched.persister.close()
        """
        done = subprocess.run(["unshare", "--mount", sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestKeeping:
    def test_older_ones_go_after_each_success(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make(keep=Keep(last=2))
        watched.write(*[make_state(1, step) for step in (8, 9, 10, 11)])
        assert [found.step for found in scan(root)] == [11, 10]

    def test_the_committed_one_and_what_may_yet_be_committed_stay(self, make: Callable[..., Watched], root: Path) -> None:
        watched = make(keep=Keep(last=1))
        watched.write(make_state(1, 1))
        watched.persister.committed(1, 1)
        watched.write(*[make_state(1, step) for step in (2, 3, 4)])
        assert [found.step for found in scan(root)] == [4, 3, 2, 1]
        watched.persister.committed(1, 3)
        watched.write(make_state(1, 5))
        assert [found.step for found in scan(root)] == [5, 4, 3, 1], "the one committed before stays, should the newest turn out to be bad"
        watched.persister.committed(1, 5)
        watched.persister.committed(1, 5)
        watched.write(make_state(1, 6))
        assert [found.step for found in scan(root)] == [6, 5, 3]

    def test_nothing_goes_if_the_new_one_cannot_be_read_back(self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(keep=Keep(last=1), back_off=(60.0, 60.0))
        watched.write(make_state(1, 1))
        failing(monkeypatch, errno.EIO, 10**9, "preadv")
        watched.want(make_state(1, 2))
        watched.until(lambda: watched.alerts)
        monkeypatch.undo()
        assert watched.steps == [1]
        assert [found.step for found in scan(root)] == [2, 1]

    def test_drafts_of_earlier_writers_go_and_those_of_later_generations_stay(self, make: Callable[..., Watched], root: Path) -> None:
        for generation in (4, 5, 6):
            (root / f"{name_of(generation, 1)}.0000.tmp").mkdir(parents=True)
        make().write(make_state(5, 2))
        assert sorted(path.name for path in root.iterdir()) == [f"{name_of(6, 1)}.0000.tmp", name_of(5, 2)]


class TestCopies:
    @pytest.fixture
    def url(self) -> Iterator[str]:
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        yield "memory://bucket/job"
        memory.store.clear()

    def test_what_was_written_is_copied_where_that_is_wanted(self, make: Callable[..., Watched], url: str) -> None:
        watched = make()
        watched.want(make_state(1, 1), url=url)
        assert watched.persister.wait(WAIT)
        assert watched.persister.wait_copied(WAIT)
        assert [copy.order for copy in list_remote(url)] == [(1, 1)]

    def test_storage_that_is_away_is_tried_again_and_holds_nothing_up(self, make: Callable[..., Watched], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        watched = make()
        away = threading.Event()
        away.set()
        real = MemoryFileSystem.open

        def refuse(self: Any, path: str, mode: str = "rb", **named: Any) -> Any:
            if away.is_set() and "w" in mode:
                raise ConnectionError("no route to the store")
            return real(self, path, mode, **named)

        monkeypatch.setattr(MemoryFileSystem, "open", refuse)
        watched.want(make_state(1, 1), url=url)
        watched.until(lambda: watched.alerts)
        assert watched.alert_names == ["checkpoint_copy_failed"]
        watched.write(make_state(1, 2))
        assert watched.steps == [1, 2]
        away.clear()
        assert watched.persister.wait_copied(WAIT)
        assert [copy.order for copy in list_remote(url)] == [(1, 1)]

    def test_one_that_is_no_longer_kept_is_not_copied(self, make: Callable[..., Watched], url: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make()
        real = watched.persister._retain

        def remove(order: Any) -> None:
            real(order)
            shutil.rmtree(root / name_of(1, 1))

        monkeypatch.setattr(watched.persister, "_retain", remove)
        watched.want(make_state(1, 1), url=url)
        assert watched.persister.wait(WAIT)
        assert watched.persister.wait_copied(WAIT)
        assert list_remote(url) == []
        assert watched.alerts == []


class TestTheEnd:
    def test_close_ends_a_write_within_a_second_and_leaves_the_old_one(self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make()
        watched.write(make_state(1, 1))
        real, reached = os.pwrite, threading.Event()

        def slow(fd: int, data: memoryview, offset: int) -> int:
            reached.set()
            time.sleep(0.4)  # a slow disk: all of it would take 1.6 s
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", slow)
        watched.want(make_state(1, 2, nbytes=THREE_CHUNKS))
        assert reached.wait(WAIT)
        began = time.monotonic()
        watched.persister.close()
        assert time.monotonic() - began < CLOSE_SECONDS
        assert "elasticd-persist" not in [thread.name for thread in threading.enumerate()]
        assert [path.name for path in root.iterdir()] == [name_of(1, 1)]
        assert [type(error) for _, error in watched.given_up] == [CancelledError]

    def test_close_leaves_a_write_that_hangs_in_the_kernel(self, make: Callable[..., Watched], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make()
        watched.write(make_state(1, 1))
        gate = Gate(monkeypatch)
        watched.want(make_state(1, 2))
        assert gate.reached.wait(WAIT)
        (hanging,) = [thread for thread in threading.enumerate() if thread.name == "elasticd-persist"]
        began = time.monotonic()
        watched.persister.close()
        assert time.monotonic() - began < CLOSE_SECONDS + 0.5
        assert newest(root) == ((1, 1), [])
        assert watched.steps == [1]
        gate.opened.set()
        hanging.join(WAIT)

    def test_close_does_not_wait_for_a_pause(self, make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
        watched = make(back_off=(60.0, 60.0))
        failing(monkeypatch, errno.ENOSPC, 10**9)
        watched.want(make_state(1, 1))
        watched.until(lambda: watched.alerts)
        began = time.monotonic()
        watched.persister.close()
        assert time.monotonic() - began < 0.5

    def test_close_without_any_order_and_twice(self, root: Path) -> None:
        persister = Persister(root, job="digits")
        persister.close()
        persister.close()
        assert not root.exists()

    def test_an_order_after_the_end_is_given_up(self, make: Callable[..., Watched]) -> None:
        watched = make()
        watched.persister.close()
        watched.want(make_state(1, 1))
        assert [info.step for info, _ in watched.given_up] == [1]

    def test_killed_at_any_instant_it_leaves_the_last_that_it_reported_or_a_newer_one(self, root: Path) -> None:
        chosen = random.Random(9)
        reported, step = 0, 1
        for _round in range(20):
            done = killed_after(root, step, chosen.uniform(0.0, 0.15))
            reported = max([reported, *done])
            order, reports = newest(root, nbytes=1_000_000)
            assert reports == []
            found = order[1] if order else 0
            assert found >= reported, f"step {reported} was reported, step {found} is there"
            step = max(found, reported) + 1
        assert reported > 10, "the kills came too early to mean anything"
        done = killed_after(root, step, None)
        assert done == list(range(step, step + 12))
        assert [path.name for path in root.iterdir()] == [name_of(1, step + 11)], "what the killed ones left is gone"


def killed_after(root: Path, step: int, seconds: float | None) -> list[int]:
    """Let a process persist from `step` on, kill it, and give the steps that it reported; without `seconds` let it end its twelve."""
    argv = [sys.executable, "-m", "tests.agent._persist_forever", str(root), "1", str(step)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        if seconds is None:
            process.stdin.close()
        else:
            time.sleep(seconds)  # the instant is the point
            process.send_signal(signal.SIGKILL)
        return [int(line.split()[2]) for line in process.stdout if line.startswith("done ")]


class TestNewest:
    def test_what_one_piece_of_work_raises_does_not_keep_the_next_from_being_done(self) -> None:
        done: list[int] = []

        def work(item: int) -> None:
            done.append(item)
            if item == 1:
                raise RuntimeError("no")

        newest_first: Newest[int] = Newest("elasticd-test", work)
        for item in (1, 2):
            newest_first.put(item)
            assert newest_first.wait(WAIT)
        newest_first.close(WAIT)
        assert done == [1, 2]


def test_torch_is_not_loaded() -> None:
    code = "import sys, elasticd.agent.persist; assert not {'torch', 'numpy', 'fsspec'} & {name.split('.')[0] for name in sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_damage_is_an_error_of_its_own() -> None:
    assert not issubclass(DamagedError, OSError)
