"""Checkpoints are written whole or not at all, and no damaged bit of one is believed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.states import THREE_CHUNKS, State, layout_of, make_state, newest, room_for
from trainer.checkpoint import (
    CHUNK,
    Found,
    Info,
    Manifest,
    digest_image,
    digest_of,
    load_into,
    load_newest,
    name_of,
    newest_valid,
    opened,
    parse_name,
    read_header,
    read_manifest,
    scan,
    set_aside,
    tidy,
    verify,
    write,
)
from trainer.errors import CancelledError, DamagedError, NoSpaceError, StateError, TrainerError
from trainer.wire.layout import Layout

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        (old,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([old ^ (1 << bit % 8)]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three chunks, to be left as it is."""
    root = tmp_path_factory.mktemp("written")
    make_state(3, 40, nbytes=THREE_CHUNKS).write(root)
    return root / "step-000000000040.g3"


@pytest.fixture
def copy(written: Path, root: Path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(written, root / written.name)


class TestWriting:
    def test_what_was_written_is_read_back_bit_by_bit(self, root: Path) -> None:
        state = make_state(3, 40, nbytes=THREE_CHUNKS)
        manifest = state.write(root)
        image = room_for(manifest)
        assert load_into(root / "step-000000000040.g3", image, header_text=state.layout.header_text) == manifest
        assert image == state.image
        assert len(manifest.chunks) == 3

    def test_the_digest_is_that_of_the_state_in_memory(self, root: Path) -> None:
        state = make_state(3, 40, nbytes=THREE_CHUNKS)
        digest, chunks = digest_image(state.layout.header, state.image)
        manifest = state.write(root)
        assert (manifest.digest, list(manifest.chunks)) == (digest, chunks)
        assert digest == digest_of(state.layout.header, [bytes.fromhex(item) for item in chunks])

    def test_the_safetensors_library_opens_it(self, root: Path) -> None:
        from safetensors import safe_open

        state = make_state(1, 1)
        state.write(root)
        with safe_open(root / name_of(1, 1) / "state.safetensors", framework="numpy") as file:
            for entry in state.layout.tensors:
                assert file.get_tensor(entry.name).tobytes() == bytes(state.image[entry.offset : entry.end])

    def test_the_manifest_keeps_all_that_is_known(self, root: Path) -> None:
        info = Info(
            job="digits",
            generation=2,
            step=7,
            world={"nodes": 3, "world_size": 6},
            data={"epoch": 1, "offset": 320},
            fingerprint={"data": "ab", "code": "cd"},
            packages={"torch": "2.13.0"},
            metrics={"loss": 0.25, "broken": float("nan"), "worse": float("inf")},
        )
        state = make_state(2, 7)
        write(root, header=state.layout.header, image=state.image, info=info)
        manifest = read_manifest(root / name_of(2, 7))
        assert (manifest.job, manifest.generation, manifest.step) == ("digits", 2, 7)
        assert (manifest.world, manifest.data, manifest.fingerprint, manifest.packages) == (info.world, info.data, info.fingerprint, info.packages)
        assert manifest.metrics == {"loss": 0.25}
        assert manifest.size == len(state.image)

    def test_progress_counts_the_bytes_of_the_image(self, root: Path) -> None:
        state = make_state(1, 1, nbytes=THREE_CHUNKS)
        told: list[int] = []
        write(root, header=state.layout.header, image=state.image, info=state.info, progress=told.append)
        assert told == [CHUNK, 2 * CHUNK, len(state.image)]

    def test_cancelled_in_the_middle_it_leaves_nothing(self, root: Path) -> None:
        make_state(1, 1).write(root)
        state = make_state(1, 2, nbytes=THREE_CHUNKS)
        told: list[int] = []
        with pytest.raises(CancelledError):
            write(root, header=state.layout.header, image=state.image, info=state.info, cancel=lambda: len(told) == 2, progress=told.append)
        assert names(root) == ["step-000000000001.g1"]
        memory = state.image.obj
        assert isinstance(memory, mmap.mmap)
        state.image.release()
        memory.close()  # nothing looks at it any more

    @pytest.mark.parametrize("odd", [1, 100, 4095])
    def test_lengths_and_addresses_that_o_direct_refuses_are_written_all_the_same(self, root: Path, odd: int) -> None:
        memory = mmap.mmap(-1, 2 * CHUNK)
        memory[:] = random.Random(odd).randbytes(2 * CHUNK)
        image = memoryview(memory)[odd : CHUNK + 3 * odd]
        write(root, header=b"x" * odd, image=image, info=Info(job="j", generation=1, step=1))
        manifest = verify(root / name_of(1, 1))
        back = room_for(manifest)
        load_into(root / name_of(1, 1), back)
        assert back == image

    def test_an_image_may_be_empty(self, root: Path) -> None:
        write(root, header=b"x" * 4096, image=memoryview(b""), info=Info(job="j", generation=1, step=0))
        assert verify(root / name_of(1, 0)).chunks == ()

    def test_a_file_system_without_o_direct_is_written_to_all_the_same(self) -> None:
        root = Path("/dev/shm") / f"elasticd-test-{os.getpid()}"  # tmpfs
        try:
            make_state(1, 1, nbytes=THREE_CHUNKS).write(root)
            assert newest(root, nbytes=THREE_CHUNKS) == ((1, 1), [])
        finally:
            shutil.rmtree(root)

    def test_values_that_json_cannot_hold_are_refused_before_anything_has_a_name(self, root: Path) -> None:
        state = make_state(1, 1)
        with pytest.raises(StateError, match="manifest"):
            write(root, header=state.layout.header, image=state.image, info=Info(job="j", generation=1, step=1, data={"offset": object()}))
        assert names(root) == []

    def test_writing_the_same_state_again_keeps_the_first(self, root: Path) -> None:
        first = make_state(1, 1).write(root)
        assert make_state(1, 1).write(root) == first
        assert names(root) == ["step-000000000001.g1"]

    def test_another_state_of_the_same_step_is_refused_and_the_first_stays(self, root: Path) -> None:
        make_state(1, 1).write(root)
        other = State(layout=layout_of(100_000), image=make_state(9, 9).image, info=make_state(1, 1).info)
        with pytest.raises(StateError, match="another state"):
            other.write(root)
        assert newest(root) == ((1, 1), [])
        assert names(root) == ["step-000000000001.g1"]

    def test_a_damaged_one_of_that_name_makes_way(self, root: Path) -> None:
        make_state(1, 1).write(root)
        flip(root / name_of(1, 1) / "state.safetensors", 8 * 50_000)
        make_state(1, 1).write(root)
        assert newest(root) == ((1, 1), [])
        assert names(root) == ["step-000000000001.g1", "step-000000000001.g1.bad"]

    def test_a_directory_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file") as caught:
            make_state(1, 1).write(tmp_path / "file")
        assert caught.value.errno in {errno.EEXIST, errno.ENOTDIR}


class TestNoSpace:
    def test_too_little_space_is_seen_before_anything_is_written(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_state(1, 1).write(root)
        real = os.statvfs(root)
        small = os.statvfs_result((*real[:3], 10, 10, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _path: small)
        monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
        with pytest.raises(NoSpaceError, match="bytes free"):
            make_state(1, 2).write(root)
        assert names(root) == ["step-000000000001.g1"]

    def test_a_limit_of_file_sizes_is_no_space_and_harms_nothing(self, root: Path) -> None:
        make_state(1, 1).write(root)
        with file_limit(20 * 1024 * 1024), pytest.raises(NoSpaceError, match="larger than a file may be"):
            make_state(1, 2, nbytes=THREE_CHUNKS).write(root)
        assert names(root) == ["step-000000000001.g1"]
        assert newest(root) == ((1, 1), [])

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EACCES])
    def test_an_error_at_any_call_leaves_the_old_or_the_new(self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        nbytes = THREE_CHUNKS if number == errno.ENOSPC else 100_000
        new = make_state(1, 2, nbytes=nbytes)
        make_state(1, 1).write(root)
        calls = count_calls(monkeypatch, lambda: new.write(root))
        assert calls > 12
        shutil.rmtree(root / name_of(1, 2))
        for index in range(calls):
            with failing_at(monkeypatch, index, number), pytest.raises((NoSpaceError, OSError)) as caught:
                new.write(root)
            assert isinstance(caught.value, NoSpaceError) == (number in {errno.ENOSPC, errno.EDQUOT})
            assert not [name for name in names(root) if name.endswith(".tmp")]
            order, reports = newest(root, nbytes=nbytes if len(names(root)) == 2 else 100_000)
            assert order == ((1, 2) if len(names(root)) == 2 else (1, 1))
            assert reports == []
        new.write(root)
        assert newest(root, nbytes=nbytes) == ((1, 2), [])

    def test_the_kernels_own_no_space_is_told_as_such(self) -> None:
        from trainer.checkpoint.write import put

        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            with pytest.raises(NoSpaceError, match="/dev/full"):
                put(fd, Path("/dev/full"), b"x" * 4096, memoryview(b"y" * 4096))
        finally:
            os.close(fd)


class TestDamage:
    def test_each_of_200_flipped_bits_of_the_data_file_is_found(self, copy: Path) -> None:
        data = copy / "state.safetensors"
        image = room_for(read_manifest(copy))
        chosen = random.Random(200)
        for _ in range(200):
            bit = chosen.randrange(8 * data.stat().st_size)
            flip(data, bit)
            with pytest.raises(DamagedError, match=r"state\.safetensors: (chunk [012] |the header)"):
                load_into(copy, image)
            flip(data, bit)
        load_into(copy, image)

    def test_each_of_200_flipped_bits_of_the_header_is_found(self, copy: Path) -> None:
        chosen = random.Random(201)
        for _ in range(200):
            bit = chosen.randrange(8 * read_manifest(copy).header_size)
            flip(copy / "state.safetensors", bit)
            with pytest.raises(DamagedError, match="the header is not what was written"):
                read_header(copy)
            flip(copy / "state.safetensors", bit)
        assert read_header(copy) == layout_of(THREE_CHUNKS).header_text

    def test_every_single_flipped_bit_of_the_manifest_is_found(self, copy: Path) -> None:
        content = bytearray((copy / "manifest.json").read_bytes())
        for bit in range(8 * len(content)):
            content[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedError):
                Manifest.decode(bytes(content))
            content[bit // 8] ^= 1 << bit % 8
        assert Manifest.decode(bytes(content)) == read_manifest(copy)

    def test_damage_on_disk_is_found_by_reading_the_disk(self, copy: Path) -> None:
        verify(copy)
        flip(copy / "state.safetensors", 8 * (CHUNK + 20_000))
        with pytest.raises(DamagedError, match="chunk 1 "):
            verify(copy)

    @pytest.mark.parametrize("keep", [0, 1, 4096, CHUNK, -1])
    def test_data_that_is_cut_off_is_found(self, copy: Path, keep: int) -> None:
        size = (copy / "state.safetensors").stat().st_size
        os.truncate(copy / "state.safetensors", keep % size)
        with pytest.raises(DamagedError, match=f"has {keep % size} bytes, not {size}"):
            verify(copy)

    def test_data_that_is_too_long_is_found(self, copy: Path) -> None:
        with (copy / "state.safetensors").open("ab") as file:
            file.write(b"x")
        with pytest.raises(DamagedError, match="bytes, not"):
            verify(copy)

    def test_data_that_is_cut_off_while_it_is_read_is_found(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.preadv

        def cut(fd: int, buffers: list[memoryview], offset: int) -> int:
            return 0 if offset > CHUNK + 1_000_000 else real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(DamagedError, match="ends within chunk"):
            verify(copy)

    @pytest.mark.parametrize("keep", [0, 1, 300, -1, -2])
    def test_a_manifest_that_is_cut_off_is_found(self, copy: Path, keep: int) -> None:
        size = (copy / "manifest.json").stat().st_size
        os.truncate(copy / "manifest.json", keep % size)
        with pytest.raises(DamagedError, match="manifest"):
            verify(copy)

    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    def test_a_missing_file_is_named(self, copy: Path, name: str) -> None:
        (copy / name).unlink()
        with pytest.raises(DamagedError, match=f"{name} is missing"):
            verify(copy)

    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    def test_what_is_no_file_is_not_waited_for(self, copy: Path, name: str) -> None:
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(DamagedError, match="no regular file"):
            verify(copy)

    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    def test_links_are_not_followed(self, copy: Path, name: str, tmp_path: Path) -> None:
        (copy / name).rename(tmp_path / "elsewhere")
        (copy / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DamagedError, match="is missing"):
            verify(copy)

    def test_a_manifest_of_another_directory_is_found(self, root: Path) -> None:
        make_state(1, 1).write(root)
        shutil.copytree(root / name_of(1, 1), root / name_of(1, 2))
        with pytest.raises(DamagedError, match="that of generation 1, step 1"):
            verify(root / name_of(1, 2))

    def test_a_later_format_is_told_apart_from_damage(self) -> None:
        manifest = Manifest(
            job="j", generation=1, step=1, digest="", size=0, header_size=0, header_digest="", chunk_bytes=CHUNK, chunks=(), created_at=0, seconds=0, format=2
        )
        with pytest.raises(DamagedError, match="format 2, this version reads 1; read it with the version that wrote it"):
            Manifest.decode(manifest.encode())

    @pytest.mark.parametrize(
        "change",
        [
            {"size": -1},
            {"size": 10**15},
            {"size": True},
            {"step": "1"},
            {"chunk_bytes": 0},
            {"chunks": ("zz",)},
            {"chunks": ("0" * 16,) * 2},
            {"header_size": 10**12},
            {"world": ()},
            {"digest": None},
        ],
        ids=str,
    )
    def test_a_manifest_with_an_impossible_value_is_refused_though_its_sum_is_right(self, change: dict[str, Any]) -> None:
        values: dict[str, Any] = {
            "job": "j",
            "generation": 1,
            "step": 1,
            "digest": "",
            "size": 10,
            "header_size": 0,
            "header_digest": "",
            "chunk_bytes": CHUNK,
            "chunks": ("0" * 16,),
            "created_at": 0.0,
            "seconds": 0.0,
        }
        Manifest.decode(Manifest(**values).encode())
        with pytest.raises(DamagedError):
            Manifest.decode(Manifest(**{**values, **change}).encode())

    @given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    def test_anything_else_is_no_manifest(self, value: object) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        with pytest.raises(DamagedError):
            Manifest.decode(content)


class TestLoading:
    def test_the_newest_by_generation_then_step_is_loaded(self, root: Path) -> None:
        for generation, step in ((1, 9), (2, 1), (1, 100), (10, 2), (9, 3)):
            make_state(generation, step).write(root)
        assert [found.order for found in scan(root)] == [(10, 2), (9, 3), (2, 1), (1, 100), (1, 9)]
        assert newest(root) == ((10, 2), [])

    def test_a_damaged_one_is_set_aside_with_its_reason_and_the_one_before_is_loaded(self, root: Path) -> None:
        make_state(1, 1).write(root)
        make_state(1, 2).write(root)
        flip(root / name_of(1, 2) / "state.safetensors", 8 * 50_000)
        order, reports = newest(root)
        assert order == (1, 1)
        assert len(reports) == 1
        assert "chunk 0 " in reports[0]
        assert names(root) == ["step-000000000001.g1", "step-000000000002.g1.bad"]
        assert "chunk 0 (bytes 0 to" in (root / "step-000000000002.g1.bad" / "reason.txt").read_text()
        assert newest(root) == ((1, 1), [])

    def test_a_complete_name_without_a_manifest_is_none(self, root: Path) -> None:
        make_state(1, 1).write(root)
        (root / name_of(1, 2)).mkdir()
        assert newest(root)[0] == (1, 1)
        assert (root / "step-000000000002.g1.bad").is_dir()

    def test_the_same_name_may_be_set_aside_more_than_once(self, root: Path) -> None:
        for _ in range(3):
            make_state(1, 1).write(root)
            set_aside(root / name_of(1, 1), "for a test")
        assert names(root) == ["step-000000000001.g1.bad", "step-000000000001.g1.bad.1", "step-000000000001.g1.bad.2"]

    def test_setting_aside_what_another_has_set_aside_is_no_error(self, root: Path) -> None:
        make_state(1, 1).write(root)
        set_aside(root / name_of(1, 1), "for a test")
        set_aside(root / name_of(1, 1), "for a test")

    def test_one_that_cannot_be_read_now_is_passed_over_and_left(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_state(1, 1).write(root)
        make_state(1, 2).write(root)
        real = os.open

        def refuse(path: Any, *arguments: Any, **named: Any) -> int:
            if name_of(1, 2) in str(path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *arguments, **named)

        monkeypatch.setattr(os, "open", refuse)
        order, reports = newest(root)
        assert order == (1, 1)
        assert len(reports) == 1
        assert "Permission denied" in reports[0]
        assert names(root) == ["step-000000000001.g1", "step-000000000002.g1"]

    @pytest.mark.parametrize("look", ["load", "verify"])
    def test_one_that_was_only_read_wrong_is_read_again(self, root: Path, monkeypatch: pytest.MonkeyPatch, look: str) -> None:
        make_state(1, 1).write(root)
        make_state(1, 2).write(root)
        real, wrong = os.preadv, list[int]()

        def once_wrong(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = real(fd, buffers, offset)
            if count > 50_000 and not wrong:
                wrong.append(offset)
                buffers[0][100] ^= 1
            return count

        monkeypatch.setattr(os, "preadv", once_wrong)
        if look == "load":
            assert newest(root) == ((1, 2), [])
        else:
            found = newest_valid(root)
            assert found is not None
            assert found[0].order == (1, 2)
        assert len(wrong) == 1
        assert names(root) == ["step-000000000001.g1", "step-000000000002.g1"]

    def test_no_directory_is_no_checkpoint(self, root: Path) -> None:
        assert newest(root) == (None, [])
        assert newest_valid(root) is None

    def test_what_the_caller_raises_ends_the_search_and_sets_nothing_aside(self, root: Path) -> None:
        make_state(1, 1).write(root)

        def refuse(_manifest: Manifest, _text: str) -> memoryview:
            raise StateError("no memory")

        with pytest.raises(StateError, match="no memory"):
            load_newest(root, refuse)
        assert names(root) == ["step-000000000001.g1"]

    def test_another_models_checkpoint_is_refused_by_its_first_tensor_that_differs(self, root: Path) -> None:
        state = make_state(1, 1)
        state.write(root)
        other = Layout.build([("model.weight", "F32", (25_000,)), ("model.bias", "F32", (8,)), ("model.steps", "I64", ())], extras=1000)
        image = bytearray(state.layout.size)
        with pytest.raises(StateError, match=r"another model: model\.bias has the shape \[7\], not \[8\]"):
            load_into(root / name_of(1, 1), memoryview(image), header_text=other.header_text)
        assert not any(image)
        assert names(root) == ["step-000000000001.g1"]

    def test_the_same_tensors_in_other_places_are_refused(self, root: Path) -> None:
        state = make_state(1, 1)
        state.write(root)
        other = Layout.build([(entry.name, entry.dtype, entry.shape) for entry in state.layout.tensors], extras=50_000)
        with pytest.raises(StateError, match="the same tensors lie in other places"):
            load_into(root / name_of(1, 1), memoryview(bytearray(other.size)), header_text=other.header_text)

    def test_too_small_a_place_is_refused(self, root: Path) -> None:
        state = make_state(1, 1)
        state.write(root)
        with pytest.raises(StateError, match="does not fit"):
            load_into(root / name_of(1, 1), memoryview(bytearray(state.layout.size - 1)))

    def test_a_larger_place_is_filled_as_far_as_the_state_goes(self, root: Path) -> None:
        state = make_state(1, 1)
        state.write(root)
        image = memoryview(bytearray(b"\xff" * (state.layout.size + 100)))
        load_into(root / name_of(1, 1), image)
        assert image[: state.layout.size] == state.image
        assert bytes(image[state.layout.size :]) == b"\xff" * 100

    def test_a_peer_gets_header_and_image_by_digest(self, root: Path) -> None:
        state = make_state(1, 1)
        manifest = state.write(root)
        make_state(1, 2).write(root)
        with opened(root, manifest.digest) as (header, image):
            assert header == state.layout.header
            assert image == state.image
        with pytest.raises(DamagedError, match="no checkpoint"), opened(root, "0" * 32):
            pass

    def test_reading_can_be_cancelled(self, written: Path) -> None:
        with pytest.raises(CancelledError):
            verify(written, cancel=lambda: True)


class TestNames:
    @given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
    def test_a_name_says_generation_and_step(self, generation: int, step: int) -> None:
        assert parse_name(name_of(generation, step)) == (generation, step)

    @pytest.mark.parametrize(
        "name",
        ["step-1.g1", "step-000000000001.g01", "step-000000000001", "step-000000000001.g1.tmp", "step-0000000000001.g1", "step-00000000000\u0661.g1", ""],
    )
    def test_other_names_are_none_of_ours(self, name: str) -> None:
        assert parse_name(name) is None

    def test_newer_is_by_number_not_by_text(self) -> None:
        items = [Found(path=Path(), generation=2, step=5), Found(path=Path(), generation=10, step=1), Found(path=Path(), generation=2, step=1_000_000_000_000)]
        assert [item.order for item in sorted(items, key=lambda item: item.order)] == [(2, 5), (2, 1_000_000_000_000), (10, 1)]


class TestSeveralWriters:
    def test_two_that_write_the_same_state_at_once_both_succeed_and_there_is_one(self, root: Path) -> None:
        for step in range(1, 9):
            answers = race(root, [(1, step, "same"), (1, step, "same"), (1, step, "same")])
            assert [kind for kind, _ in answers] == ["ok", "ok", "ok"]
            assert len({digest for _, digest in answers}) == 1
            assert names(root) == [name_of(1, step)]
            verify(root / name_of(1, step))
            shutil.rmtree(root / name_of(1, step))

    def test_of_two_that_write_different_states_of_one_step_one_is_told(self, root: Path) -> None:
        for step in range(1, 5):
            answers = sorted(race(root, [(1, step, "left"), (1, step, "east")]))
            assert [kind for kind, _ in answers] == ["StateError", "ok"]
            assert read_manifest(root / name_of(1, step)).digest == answers[1][1]
            verify(root / name_of(1, step))
        assert not [name for name in names(root) if name.endswith(".tmp")]

    def test_a_draft_is_not_tidied_away_while_its_writer_lives(self, root: Path) -> None:
        state = make_state(1, 1, nbytes=THREE_CHUNKS)
        removed: list[Path] = []
        write(root, header=state.layout.header, image=state.image, info=state.info, progress=lambda _: removed.extend(tidy(root, 9)))
        assert removed == []
        assert newest(root, nbytes=THREE_CHUNKS) == ((1, 1), [])

    def test_a_draft_that_is_taken_in_its_first_moment_is_begun_again(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, taken = os.open, list[Path]()

        def tidy_first(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if str(path).endswith("state.safetensors") and flags & os.O_WRONLY and len(taken) < 3:
                taken.extend(tidy(root, 1))
            return real(path, flags, *arguments, **named)

        monkeypatch.setattr(os, "open", tidy_first)
        make_state(1, 1).write(root)
        assert len(taken) == 3
        assert names(root) == [name_of(1, 1)]

    def test_a_draft_that_is_taken_between_opening_and_locking_is_begun_again(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        real, taken = fcntl.flock, list[Path]()

        def tidy_first(fd: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", real)
            taken.extend(tidy(root, 1))
            real(fd, operation)

        monkeypatch.setattr(fcntl, "flock", tidy_first)
        make_state(1, 1).write(root)
        assert len(taken) == 1
        assert names(root) == [name_of(1, 1)]

    def test_writers_of_an_earlier_generation_leave_a_later_ones_drafts_alone(self, root: Path) -> None:
        for name in ("step-000000000001.g4.0000.tmp", "step-000000000001.g5.0000.tmp", "step-000000000001.g6.0000.tmp", "mine.tmp"):
            (root / name).mkdir(parents=True)
        assert [path.name for path in tidy(root, 5)] == ["step-000000000001.g4.0000.tmp", "step-000000000001.g5.0000.tmp"]
        assert names(root) == ["mine.tmp", "step-000000000001.g6.0000.tmp"]

    def test_a_writer_of_an_earlier_generation_does_not_become_the_newest(self, root: Path) -> None:
        make_state(6, 10).write(root)
        before = {path: path.read_bytes() for path in (root / name_of(6, 10)).iterdir()}
        make_state(5, 999).write(root)
        make_state(5, 10).write(root)
        assert newest(root) == ((6, 10), [])
        assert {path: path.read_bytes() for path in (root / name_of(6, 10)).iterdir()} == before


def test_neither_torch_nor_elasticd_is_loaded() -> None:
    code = "import sys, trainer.checkpoint; assert not {'torch', 'numpy', 'elasticd', 'fsspec'} & {name.split('.')[0] for name in sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True).returncode == 0


def test_every_error_is_in_the_one_tree() -> None:
    assert issubclass(CancelledError, TrainerError)


# --- helpers -------------------------------------------------------------------------------------------------------------

CALLS = ("open", "pwrite", "fsync", "mkdir", "rename")
RACER = """
import sys
from pathlib import Path
from tests.support.states import State, make_state
root, generation, step, which = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
state = make_state(generation, step, nbytes=1_000_000)
state.image[:4] = which.encode()
print("ready", flush=True)
sys.stdin.readline()
try:
    print("ok", state.write(root).digest)
except Exception as error:
    print(type(error).__name__, "-")
"""


def race(root: Path, writers: list[tuple[int, int, str]]) -> list[tuple[str, str]]:
    """Processes that write at the same time; what each of them says in the end."""
    with ExitStack() as stack:
        return _race([stack.enter_context(racer(root, *writer)) for writer in writers])


@contextmanager
def racer(root: Path, generation: int, step: int, which: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", RACER, str(root), str(generation), str(step), which]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _race(started: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=30)[0].split() for process in started]
    return [(kind, digest) for kind, digest in outputs]


def count_calls(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> int:
    with failing_at(monkeypatch, -1, 0) as seen:
        action()
    return len(seen)


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, index: int, number: int) -> Iterator[list[str]]:
    """The call of that index, of those that change the disk, fails. Gives the calls that were made."""
    seen: list[str] = []
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _failing(name, getattr(os, name), seen, index, number))
        yield seen


def _failing(name: str, real: Callable[..., Any], seen: list[str], index: int, number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if name == "open" and "dir_fd" in named:  # rmtree's: what is under test here is the writing
            return real(*arguments, **named)
        seen.append(name)
        if len(seen) - 1 == index:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    return call


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
