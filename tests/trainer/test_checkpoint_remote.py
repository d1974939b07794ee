"""Copies on other storage: data first, manifest last, verified on the way there and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.states import THREE_CHUNKS, State, layout_of, make_state, newest
from trainer.checkpoint import CHUNK, download, list_remote, name_of, scan, upload, verify
from trainer.errors import CancelledError, DamagedError, NoSpaceError, StateError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/storage/job"
        return
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield "memory://bucket/job"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def storage(url: str) -> tuple[Any, str]:
    fs, base = fsspec.core.url_to_fs(url)
    return fs, base


def written(root: Path, *orders: tuple[int, int], nbytes: int = 100_000) -> list[Path]:
    for order in orders:
        make_state(*order, nbytes=nbytes).write(root)
    return [root / name_of(*order) for order in orders]


def interrupt(monkeypatch: pytest.MonkeyPatch, url: str, when: Callable[[str, int], bool]) -> None:
    """Writing to the storage fails when `when(name, bytes so far)` says so."""
    fs, _base = storage(url)
    real = type(fs).open

    def breaking(self: Any, path: str, mode: str = "rb", **named: Any) -> Any:
        file = real(self, path, mode, **named)
        if "w" in mode:
            real_write, done = file.write, [0]

            def write(data: bytes) -> int:
                if when(path.rsplit("/", 1)[-1].removesuffix(".tmp"), done[0]):
                    raise OSError(5, "connection lost")
                done[0] += len(data)
                return int(real_write(data))

            file.write = write
        return file

    monkeypatch.setattr(type(fs), "open", breaking)


def test_what_was_copied_comes_back_whole(root: Path, url: str, tmp_path: Path) -> None:
    (path,) = written(root, (3, 40), nbytes=THREE_CHUNKS)
    copy = upload(path, url)
    assert (copy.generation, copy.step, copy.url) == (3, 40, f"{url}/{path.name}")
    assert download(url, tmp_path / "other", generation=3, step=40) == tmp_path / "other" / path.name
    assert newest(tmp_path / "other", nbytes=THREE_CHUNKS) == ((3, 40), [])
    assert (tmp_path / "other" / path.name / "state.safetensors").read_bytes() == (path / "state.safetensors").read_bytes()


def test_copies_are_listed_newest_first(root: Path, url: str) -> None:
    for path in written(root, (1, 9), (1, 10), (2, 3)):
        upload(path, url)
    fs, base = storage(url)
    fs.makedirs(f"{base}/step-000000000099.g9", exist_ok=True)  # without a manifest
    fs.pipe_file(f"{base}/notes.txt", b"hello")
    assert [copy.order for copy in list_remote(url)] == [(2, 3), (1, 10), (1, 9)]


def test_no_such_place_has_no_copies(url: str) -> None:
    assert list_remote(url) == []


def test_the_manifest_goes_last(root: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = written(root, (1, 1))
    told: list[str] = []

    def note(name: str, _done: int) -> bool:
        told.append(name)
        return False

    interrupt(monkeypatch, url, note)
    upload(path, url)
    assert told == ["state.safetensors", "state.safetensors", "manifest.json"]


@pytest.mark.parametrize("point", [("state.safetensors", 0), ("state.safetensors", 4096), ("state.safetensors", CHUNK + 4096), ("manifest.json", 0)], ids=str)
def test_an_interrupted_copy_is_not_seen_and_the_next_one_completes_it(
    root: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: tuple[str, int]
) -> None:
    (path,) = written(root, (1, 1), nbytes=THREE_CHUNKS)
    with monkeypatch.context() as patch:
        interrupt(patch, url, lambda name, done: (name, done) >= point if name == point[0] else False)
        with pytest.raises(OSError, match="connection lost"):
            upload(path, url)
    fs, base = storage(url)
    if fs.exists(f"{base}/{path.name}/manifest.json"):  # fsspec's memory, unlike a store, shows an object before it is closed
        assert url.startswith("memory:")
        assert fs.size(f"{base}/{path.name}/manifest.json") == 0
    else:
        assert list_remote(url) == []
    with pytest.raises(DamagedError, match="manifest"):
        download(url, tmp_path / "other", generation=1, step=1)
    upload(path, url)
    download(url, tmp_path / "other", generation=1, step=1)
    assert newest(tmp_path / "other", nbytes=THREE_CHUNKS) == ((1, 1), [])


def test_a_second_copy_of_the_same_state_copies_nothing(root: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = written(root, (1, 1))
    upload(path, url)
    interrupt(monkeypatch, url, lambda *_: True)
    upload(path, url)


def test_another_state_of_the_same_step_is_refused(root: Path, url: str, tmp_path: Path) -> None:
    (path,) = written(root, (1, 1))
    upload(path, url)
    other = State(layout=layout_of(100_000), image=make_state(5, 5).image, info=make_state(1, 1).info)
    other.write(tmp_path / "second")
    with pytest.raises(StateError, match="another state"):
        upload(tmp_path / "second" / path.name, url)


@pytest.mark.parametrize("offset", [20, 5000, CHUNK + 10_000, -1])
def test_a_damaged_checkpoint_is_not_copied(root: Path, url: str, offset: int) -> None:
    (path,) = written(root, (1, 1), nbytes=THREE_CHUNKS)
    content = bytearray((path / "state.safetensors").read_bytes())
    content[offset] ^= 4
    (path / "state.safetensors").write_bytes(content)
    with pytest.raises(DamagedError):
        upload(path, url)
    assert list_remote(url) == []


@pytest.mark.parametrize("change", ["flip", "cut", "longer", "missing", "manifest", "swapped"])
def test_a_damaged_copy_is_not_taken(root: Path, url: str, tmp_path: Path, change: str) -> None:
    (path,) = written(root, (1, 1), nbytes=THREE_CHUNKS)
    upload(path, url)
    fs, base = storage(url)
    data, manifest = f"{base}/{path.name}/state.safetensors", f"{base}/{path.name}/manifest.json"
    content = bytearray(fs.cat_file(data))
    if change == "flip":
        content[2 * CHUNK] ^= 1
        fs.pipe_file(data, bytes(content))
    elif change == "cut":
        fs.pipe_file(data, bytes(content[:-1]))
    elif change == "longer":
        fs.pipe_file(data, bytes(content + b"x"))
    elif change == "missing":
        fs.rm_file(data)
    elif change == "manifest":
        fs.pipe_file(manifest, fs.cat_file(manifest).replace(b'"digits"', b'"digitz"'))
    else:
        (other,) = written(tmp_path / "second", (1, 2))
        fs.pipe_file(manifest, (other / "manifest.json").read_bytes())
    with pytest.raises(DamagedError):
        download(url, tmp_path / "other", generation=1, step=1)
    assert not (tmp_path / "other").exists() or list((tmp_path / "other").iterdir()) == []


def test_what_is_here_already_and_whole_is_not_fetched(root: Path, url: str) -> None:
    (path,) = written(root, (1, 1))
    assert download(url, root, generation=1, step=1) == path  # there is no copy at all


def test_a_damaged_one_here_makes_way_for_the_copy(root: Path, url: str) -> None:
    (path,) = written(root, (1, 1))
    upload(path, url)
    content = bytearray((path / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "state.safetensors").write_bytes(content)
    download(url, root, generation=1, step=1)
    assert newest(root) == ((1, 1), [])


def test_both_ways_can_be_cancelled_and_leave_nothing(root: Path, url: str, tmp_path: Path) -> None:
    (path,) = written(root, (1, 1), nbytes=THREE_CHUNKS)
    told: list[int] = []
    with pytest.raises(CancelledError):
        upload(path, url, cancel=lambda: bool(told), progress=told.append)
    assert list_remote(url) == []
    upload(path, url)
    told.clear()
    with pytest.raises(CancelledError):
        download(url, tmp_path / "other", generation=1, step=1, cancel=lambda: len(told) > 1, progress=told.append)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_copy_that_does_not_fit_here_is_told_before_it_is_fetched(root: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    (path,) = written(root, (1, 1))
    upload(path, url)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((*real[:3], 10, 10, *real[5:])))
    with pytest.raises(NoSpaceError):
        download(url, tmp_path / "other", generation=1, step=1)
    assert scan(tmp_path / "other") == []


def test_a_mounted_file_system_has_it_durably(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real(fd)

    (path,) = written(root, (1, 1))
    monkeypatch.setattr(os, "fsync", fsync)
    upload(path, f"file://{tmp_path}/storage")
    assert synced == ["state.safetensors", "manifest.json.tmp", path.name, "storage", tmp_path.name]


def test_a_copy_on_a_mounted_file_system_is_itself_a_checkpoint(root: Path, tmp_path: Path) -> None:
    (path,) = written(root, (1, 1))
    upload(path, f"file://{tmp_path}/storage")
    verify(tmp_path / "storage" / path.name)
    shutil.rmtree(root)
    assert newest(tmp_path / "storage") == ((1, 1), [])
