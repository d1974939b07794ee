"""A file of header and image is one that the safetensors library opens, and no header is believed that does not add up."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.errors import DamagedError, SetupError
from trainer.memory import CODES, layout_of
from trainer.wire.layout import ALIGN, EXTRAS, ITEMSIZE, LARGE, MAX_TEXT, PAD, PAGE, Layout, pack_extras, unpack_extras

pytestmark = pytest.mark.timeout(60)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: not name.startswith("elasticd.") and name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES), max_size=12)


def built(tensors: dict[str, tuple[str, tuple[int, ...]]], extras: int = 0) -> Layout:
    return Layout.build([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], extras=extras)


def file_of(layout: Layout, tensors: dict[str, torch.Tensor], path: Path) -> Path:
    image = bytearray(layout.size)
    for name, tensor in tensors.items():
        entry = layout.entry(name)
        image[entry.offset : entry.end] = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if entry.nbytes else b""
    path.write_bytes(layout.header + image)
    return path


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so NaNs too."""
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_the_library_reads_every_dtype_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": some(dtype, 70, 33), "b": some(dtype), "c": some(dtype, 0, 4), "d": some(dtype, 3), "e": some(torch.uint8, 5001), "f": some(dtype, 9, 999)}
    path = file_of(layout_of(tensors, extras=100), tensors, tmp_path / "a.safetensors")
    loaded = safetensors.torch.load_file(path)
    assert {name for name in loaded if not name.startswith("elasticd.")} == set(tensors)
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(path, framework="pt") as file:
        assert all(same_bits(file.get_tensor(name), tensor) for name, tensor in tensors.items())
        assert file.metadata()["format"] == "pt"


@given(TENSORS, st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_a_layout_has_no_holes_and_is_aligned(tensors: dict[str, tuple[str, tuple[int, ...]]], extras: int) -> None:
    layout = built(tensors, extras)
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        end = entry.end
        assert entry.nbytes == math.prod(entry.shape) * ITEMSIZE[entry.dtype]
        if not entry.padding and entry.name != EXTRAS:
            assert entry.offset % (ALIGN if entry.nbytes >= LARGE else ITEMSIZE[entry.dtype]) == 0
    assert end == layout.size
    assert layout.size % PAGE == len(layout.header) % PAGE == 0
    assert layout.extras.name == EXTRAS
    assert layout.extras_capacity >= extras
    assert {entry.name: (entry.dtype, entry.shape) for entry in layout.tensors} == tensors
    assert safetensors.deserialize(layout.header + bytes(layout.size))
    assert sum(entry.padding for entry in layout.entries) <= 1 + sum(entry.nbytes >= LARGE and entry.nbytes % ALIGN > 0 for entry in layout.entries)


@given(TENSORS, st.integers(0, 5000), st.randoms())
@settings(deadline=None)
def test_a_layout_depends_neither_on_the_order_nor_on_being_sent(tensors: dict[str, tuple[str, tuple[int, ...]]], extras: int, random: Any) -> None:
    layout = built(tensors, extras)
    shuffled = list(tensors.items())
    random.shuffle(shuffled)
    again = built(dict(shuffled), extras)
    parsed = Layout.parse(layout.header_text)
    assert layout == again == parsed
    assert parsed.entries == layout.entries
    assert (parsed.size, parsed.header, parsed.digest) == (layout.size, layout.header, layout.digest)
    assert layout.difference(again) == ""


BASE = json.loads(built({"a": ("F32", (1500,)), "b": ("I64", ()), "c": ("U8", (5001,)), "d": ("BF16", (0, 2))}, 100).header_text)


def changed(name: str, **values: Any) -> dict[str, Any]:
    return {**BASE, name: {**BASE[name], **values}}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        3,
        {"__metadata__": BASE["__metadata__"]},
        {**BASE, "__metadata__": {"a": 1}},
        {**BASE, "__metadata__": []},
        {name: entry for name, entry in BASE.items() if name != "b"},
        {name: entry for name, entry in BASE.items() if name != EXTRAS},
        changed("a", dtype="F31"),
        changed("a", dtype=["F32"]),
        changed("a", dtype="F64"),
        changed("a", shape=[1501]),
        changed("a", shape=[-1500]),
        changed("a", shape=[True, 1500]),
        changed("a", shape=[1500.0]),
        changed("a", shape="1500"),
        changed("a", shape=[1] * 100 + [1500]),
        changed("a", shape=[2**60, 2**60]),
        changed("a", data_offsets=[64, 6064]),
        changed("a", data_offsets=[0, 6000, 1]),
        changed("a", data_offsets=[-6000, 0]),
        changed("a", data_offsets=None),
        changed("a", more=1),
        changed("c", data_offsets=[0, 5001]),
        changed("b", data_offsets=[2**80, 2**80 + 8]),
        changed(EXTRAS, dtype="I8"),
        {**BASE, "z": {"dtype": "U8", "shape": [0], "data_offsets": [BASE[EXTRAS]["data_offsets"][1]] * 2}},
        {**BASE, "a": 1},
        {**BASE, "\ud800": BASE["d"]},
    ],
)
def test_a_header_that_does_not_add_up_is_refused(value: Any) -> None:
    with pytest.raises(DamagedError):
        Layout.parse(json.dumps(value))


def test_an_element_at_an_odd_address_is_refused() -> None:
    """Nobody could make a tensor of it."""
    table = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}
    table[EXTRAS] = {"dtype": "U8", "shape": [PAGE - 5], "data_offsets": [5, PAGE]}
    with pytest.raises(DamagedError, match="b"):
        Layout.parse(json.dumps(table))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, '{"a":NaN}', "\ud800", "1" * 10_000, " " * (MAX_TEXT + 1)])
def test_what_is_no_json_is_no_header(text: str) -> None:
    with pytest.raises(DamagedError):
        Layout.parse(text)


def test_a_name_that_stands_there_twice_is_refused() -> None:
    text = built({"a": ("F32", (2,))}).header_text
    with pytest.raises(DamagedError, match="twice"):
        Layout.parse(text[:-1] + "," + text[1:])


@given(st.integers(0, 400), st.integers(0, 20), st.text(max_size=6))
@example(at=0, cut=1, put="")
@settings(max_examples=200, deadline=None)
def test_a_changed_header_is_refused_or_says_something_sound(at: int, cut: int, put: str) -> None:
    text = json.dumps(BASE, separators=(",", ":"))
    try:
        layout = Layout.parse(text[:at] + put + text[at + cut :])
    except DamagedError:
        return
    assert [entry.offset for entry in layout.entries] == [0, *(entry.end for entry in layout.entries[:-1])]
    assert all(entry.nbytes == math.prod(entry.shape) * ITEMSIZE[entry.dtype] for entry in layout.entries)
    assert layout.size % PAGE == 0


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSONS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)


@given(st.dictionaries(st.text(max_size=5), st.fixed_dictionaries({"dtype": JSONS, "shape": JSONS, "data_offsets": JSONS}) | JSONS, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_json_is_refused(value: Any) -> None:
    with pytest.raises(DamagedError):
        Layout.parse(json.dumps(value))


@pytest.mark.parametrize(
    ("ours", "theirs", "line"),
    [
        ({"a": ("F32", (2,)), "b": ("F32", ())}, {"a": ("F32", (2,))}, "b is missing"),
        ({"a": ("F32", (2,))}, {"a": ("F32", (2,)), "b": ("F32", ())}, "b is there, which nobody registered"),
        ({"a": ("F32", (2, 3))}, {"a": ("F32", (6,))}, "a has the shape [6], not [2, 3]"),
        ({"a": ("F32", (2,))}, {"a": ("BF16", (2,))}, "a is BF16, not F32"),
        (
            {"a": ("F32", (1,)), "b": ("F32", (2,)), "c": ("F32", (3,))},
            {"a": ("F32", (1,)), "b": ("F32", (9,)), "c": ("F32", (9,))},
            "b has the shape [9], not [2]",
        ),
    ],
)
def test_the_first_difference_is_named(ours: Any, theirs: Any, line: str) -> None:
    assert built(ours).difference(built(theirs)) == line


def test_room_for_extras_and_pads_are_no_difference() -> None:
    tensors = {"a": ("F32", (5000,)), "b": ("U8", (4097,))}
    assert built(tensors, 10).difference(built(tensors, 10_000)) == ""
    assert built(tensors, 10) != built(tensors, 10_000)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", "F32", ()), ("a", "F32", ())], "two tensors are called 'a'"),
        ([(EXTRAS, "U8", (1,))], "no tensor can be called"),
        ([(PAD + "1", "U8", (1,))], "no tensor can be called"),
        ([("__metadata__", "U8", (1,))], "no tensor can be called"),
        ([("", "U8", (1,))], "no tensor can be called"),
        ([("\ud800", "U8", (1,))], "no tensor can be called"),
        ([("a", "torch.complex128", (1,))], "a is torch.complex128, which a checkpoint cannot hold"),
        ([("a", "F32", (-1,))], "a has the shape"),
        ([("a", "F32", (2**40, 2**20))], "too large"),
    ],
)
def test_what_cannot_be_laid_out_is_said_at_once(tensors: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Layout.build(tensors, extras=0)


def test_extras_lie_at_the_end_of_the_image() -> None:
    layout = built({"a": ("F32", (5,))}, 100)
    image = bytearray(b"\xff" * layout.size)
    layout.put_extras(memoryview(image), b"x" * 200)
    layout.put_extras(memoryview(image), b"hello")
    assert layout.get_extras(memoryview(image)) == b"hello"
    assert image == b"\xff" * 20 + struct.pack("<Q", 5) + b"hello" + bytes(layout.size - 33), "what is left of a longer one would make replicas differ"
    with pytest.raises(SetupError, match="room"):
        layout.put_extras(memoryview(image), bytes(layout.extras_capacity + 1))
    image[20:28] = struct.pack("<Q", layout.extras_capacity + 1)
    with pytest.raises(DamagedError):
        layout.get_extras(memoryview(image))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$elasticd"), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def shown(value: Any) -> str:
    """With types, and NaN equal to itself."""
    if isinstance(value, dict):
        return f"{type(value).__name__}{sorted((shown(key), shown(item)) for key, item in value.items())}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[shown(item) for item in value]}"
    return f"{type(value).__name__}:{value!r}"


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_extras_come_back_as_they_were(value: dict[str, Any]) -> None:
    packed = pack_extras(value)
    assert shown(unpack_extras(packed)) == shown(value)
    assert pack_extras(dict(reversed(value.items()))) == packed
    json.loads(packed, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_what_cannot_be_an_extra_is_named() -> None:
    with pytest.raises(SetupError, match=r"^scheduler\.f\[1\] is a builtins\.object; keep"):
        pack_extras({"scheduler": {"f": [1, object()]}})
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(SetupError, match="nested"):
        pack_extras({"a": nested})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b"\xff",
        b"[" * 100_000,
        b'{"a":{"$elasticd":["float","1"]}}',
        b'{"a":{"$elasticd":["code","x"]}}',
        b'{"a":{"$elasticd":3}}',
        b'{"a":{"$elasticd":["dict",[[[],1]]]}}',
        b'{"a":{"$elasticd":["bytes","zz"]}}',
        b'{"a":{"$elasticd":["tuple",5]}}',
    ],
)
def test_extras_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        unpack_extras(data)
