"""The safetensors header: read back what the reference writes, write the same bytes, refuse everything else."""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.header import DTYPE_BITS, Read, WeightsFile, build_header, frame_reader, read_header


def reader(data: bytes) -> Read:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def parse(data: bytes) -> WeightsFile:
    return read_header(reader(data), len(data), "model.safetensors")


def packed(header: object, data: bytes = b"", *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = packed({"a": entry("F32", [2], 0, 8)}, bytes(8))


def test_reads_tensors_in_file_order_with_absolute_offsets() -> None:
    data = packed(
        {
            "__metadata__": {"format": "pt"},
            "b": entry("BF16", [2, 2], 4, 12),
            "empty": entry("F32", [0, 7], 4, 4),
            "a": entry("F4", [8], 0, 4),
            "scalar": entry("I64", [], 12, 20),
        },
        bytes(20),
    )
    found = parse(data)
    start = len(data) - 20
    assert [(t.name, t.dtype, t.shape, t.offset - start, t.nbytes) for t in found.tensors] == [
        ("a", "F4", (8,), 0, 4),
        ("empty", "F32", (0, 7), 4, 0),
        ("b", "BF16", (2, 2), 4, 8),
        ("scalar", "I64", (), 12, 8),
    ]
    assert found.metadata == {"format": "pt"}
    assert found.frame == ((0, data[:start]),)
    assert (found.format, found.size, found.aliases) == ("safetensors", len(data), {})


def test_a_header_is_read_again_from_the_frame_alone() -> None:
    found = parse(ONE)
    assert read_header(frame_reader(found.frame, "x"), len(ONE), found.name) == found
    with pytest.raises(DamagedError, match="does not hold"):
        frame_reader(found.frame, "x")(len(ONE) - 8, 8)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_is_read_and_written(dtype: str) -> None:
    header = build_header([("w", dtype, (4, 2))], None)
    found = parse(header + bytes(DTYPE_BITS[dtype]))
    assert found.tensors[0].nbytes == DTYPE_BITS[dtype]
    assert found.tensors[0].shape == (4, 2)


def test_dtypes_are_those_of_the_reference_implementation() -> None:
    safetensors = pytest.importorskip("safetensors")
    for dtype, bits in DTYPE_BITS.items():
        data = build_header([("w", dtype, (4,))], None) + bytes(bits // 2)
        ((name, info),) = safetensors.deserialize(data)
        assert (name, info["dtype"], info["shape"]) == ("w", dtype, [4])


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=12)
TENSORS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(["F32", "BF16", "I8", "F64", "U16"]), st.lists(st.integers(0, 3), max_size=3)),
    min_size=1,  # the reference itself writes broken JSON for no tensor and empty metadata
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(TENSORS, st.none() | st.dictionaries(NAMES, st.text(st.characters(codec="utf-8")), max_size=1))
def test_header_is_byte_for_byte_that_of_the_reference(
    tensors: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "F64": torch.float64, "U16": torch.uint16}
    written = save(
        {name: torch.zeros(shape, dtype=dtypes[dtype]) for name, (dtype, shape) in tensors.items()}, metadata
    )
    found = parse(written)  # in the reference's order
    again = build_header([(t.name, t.dtype, t.shape) for t in found.tensors], metadata)
    assert again == found.frame[0][1]
    assert {t.name: (t.dtype, list(t.shape)) for t in found.tensors} == tensors


@pytest.mark.parametrize("align", [8, 64, 4096])
def test_data_begins_at_the_alignment(align: int) -> None:
    header = build_header([("a", "F32", (3,)), ("b", "I8", (5,))], {"format": "pt"}, align)
    assert len(header) % align == 0
    assert [t.offset - len(header) for t in parse(header + bytes(17)).tensors] == [0, 12]


@pytest.mark.parametrize(
    "tensors",
    [[("a", "F32", (1,)), ("a", "F32", (1,))], [("a", "F7", (1,))], [("a", "F4", (3,))], [("__metadata__", "U8", ())]],
)
def test_what_the_format_cannot_hold_is_not_written(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(UnsupportedError):
        build_header(tensors, None)


BAD_ENTRIES = {
    "not an object": ({"a": 3}, 0, "'a'"),
    "a list": ({"a": [1, 2]}, 0, "'a'"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "'a'"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, 8, "'a'"),
    "unknown dtype": ({"a": entry("F33", [2], 0, 8)}, 8, "F33"),
    "dtype is a list": ({"a": entry(["F32"], [2], 0, 8)}, 8, "dtype"),
    "negative dimension": ({"a": entry("F32", [-2], 0, 8)}, 8, "-2"),
    "two negative dimensions": ({"a": entry("F32", [-2, -1], 0, 8)}, 8, "-2"),
    "true as a dimension": ({"a": entry("U8", [True], 0, 1)}, 1, "True"),
    "a float dimension": ({"a": entry("F32", [2.0], 0, 8)}, 8, "2.0"),
    "a text dimension": ({"a": entry("F32", ["2"], 0, 8)}, 8, "'2'"),
    "shape is a number": ({"a": entry("F32", 2, 0, 8)}, 8, "shape"),
    "shape is a text": ({"a": entry("F32", "2", 0, 8)}, 8, "shape"),
    "too many dimensions": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, "64 dimensions"),
    "product beyond 2**63": ({"a": entry("F32", [2**40, 2**40], 0, 8)}, 8, "'a'"),
    "zero times beyond": ({"a": entry("F32", [0, 2**64], 0, 0)}, 0, "dimension"),
    "offsets exchanged": ({"a": entry("F32", [2], 8, 0)}, 8, "data_offsets"),
    "offset negative": ({"a": entry("F32", [2], -8, 0)}, 8, "data_offsets"),
    "offset a float": ({"a": entry("F32", [2], 0, 8.0)}, 8, "data_offsets"),
    "offset true": ({"a": entry("U8", [1], 0, True)}, 1, "data_offsets"),
    "offset beyond": ({"a": entry("F32", [2], 2**63, 2**63 + 8)}, 8, "data_offsets"),
    "size wrong": ({"a": entry("F32", [3], 0, 8)}, 8, "12 bytes"),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, 1, "4/8"),
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "overlaps"),
    "same range twice": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8, "overlaps"),
    "hole": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "hole"),
    "begins late": ({"a": entry("F32", [2], 8, 16)}, 16, "hole"),
    "file longer": ({"a": entry("F32", [2], 0, 8)}, 24, "16 bytes follow"),
    "file shorter": ({"a": entry("F32", [2], 0, 8)}, 3, "cut short"),
    "empty name": ({"": entry("F32", [2], 0, 8)}, 8, "named ''"),
    "line break in a name": ({"a\nb": entry("F32", [2], 0, 8)}, 8, "line break"),
    "metadata a list": ({"__metadata__": ["pt"]}, 0, "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"format": 1}}, 0, "format"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_contradicting_header_is_refused_with_file_and_numbers(case: str) -> None:
    header, nbytes, said = BAD_ENTRIES[case]
    with pytest.raises(DamagedError) as caught:
        parse(packed(header, bytes(nbytes)))
    assert said in str(caught.value)
    assert "model.safetensors" in str(caught.value)


GOOD = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BAD_FILES = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "length beyond the file": ((10**6).to_bytes(8, "little") + b"{}", "1,000,000"),
    "length 2**64-1": (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615"),
    "zero length": (bytes(16), "begins with"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "not UTF-8": (packed(None, raw=b'{"\xff":1}'), "UTF-8"),
    "not JSON": (packed(None, raw=b"{a}"), "JSON"),
    "two objects": (packed(None, raw=b"{}{}"), "JSON"),
    "a list": (packed(None, raw=b"[1]"), "begins with"),
    "leading space": (packed(None, raw=b" {}"), "begins with"),
    "NaN": (packed(None, raw=b'{"a":NaN}'), "NaN"),
    "same name twice": (packed(None, bytes(8), raw=GOOD[:-1] + b"," + GOOD[1:]), "twice"),
    "same key twice in an entry": (
        packed(None, bytes(8), raw=GOOD.replace(b'"shape"', b'"dtype":"F32","shape"')),
        "twice",
    ),
    "deep nesting": (packed(None, raw=b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested"),
    "deep nesting of objects": (packed(None, raw=b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested"),
    "an endless integer": (packed(None, raw=b'{"a":' + b"9" * 500_000 + b"}"), "500,000 digits"),
    "half a surrogate pair": (packed(None, bytes(8), raw=GOOD.replace(b'"a"', b'"\\ud800"')), "surrogate"),
    "NUL padding": (packed(None, bytes(8), raw=GOOD + b"\0\0"), "JSON"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused(case: str) -> None:
    data, said = BAD_FILES[case]
    with pytest.raises(DamagedError) as caught:
        parse(data)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_headers_over_the_limit_are_refused_without_reading_them() -> None:
    asked: list[int] = []

    def read(offset: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        return (100_000_001).to_bytes(8, "little")[:nbytes]

    with pytest.raises(DamagedError, match="100,000,001"):
        read_header(read, 1 << 40, "x")
    assert asked == [8]


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    with pytest.raises(DamagedError, match="cut short or still being written"):
        read_header(reader(ONE[:20]), len(ONE), "x")


@pytest.mark.parametrize("filling", [b"[],", b"{},", b"1,", b'"",'])
def test_a_header_of_brackets_does_not_take_memory(filling: bytes) -> None:
    raw = b'{"a":[' + filling * (6_000_000 // len(filling)) + b"1]}"
    data = packed(None, raw=raw)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(raw)
    finally:
        tracemalloc.stop()


def test_the_work_for_an_entry_is_a_few_calls_however_many_there_are() -> None:
    """Counted, not timed: a count is the same on every machine."""

    def calls(entries: int) -> int:
        names = [(f"model.layers.{i}.mlp.experts.{i % 64}.down_proj.weight", "BF16", (2, 3)) for i in range(entries)]
        data = build_header(names, {"format": "pt"}) + bytes(12 * entries)
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            parse(data)
        finally:
            sys.setprofile(before)
        return count

    few, many = calls(1_000), calls(10_000)
    assert many - few < 40 * 9_000
    assert many < 11 * few


def outcome(data: bytes) -> None:
    try:
        found = parse(data)
    except DamagedError as error:
        assert len(str(error)) < 5000
    else:  # whatever is accepted is whole
        assert sum(t.nbytes for t in found.tensors) + len(found.frame[0][1]) == len(data)


VALID = build_header([("a.1", "F32", (2, 3)), ("b", "U8", ()), ("c", "BF16", (0,))], {"format": "pt"}) + bytes(25)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(-9, 9)
)
def test_mutated_headers_are_whole_or_refused(edits: list[tuple[int, int]], change: int) -> None:
    data = bytearray(VALID)
    for at, value in edits:
        data[at] = value
    outcome(bytes(data[:change] if change < 0 else data + bytes(change)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", ""]),
        JSON
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "U8"]) | JSON,
                "shape": st.lists(st.integers(0, 3)) | JSON,
                "data_offsets": JSON,
            }
        ),
    ),
    st.integers(0, 40),
)
def test_any_json_is_whole_or_refused(header: dict[str, Any], nbytes: int) -> None:
    outcome(packed(header, bytes(nbytes)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_whole_or_refused(data: bytes, framed: bool) -> None:
    outcome(packed(None, raw=data) if framed else data)
