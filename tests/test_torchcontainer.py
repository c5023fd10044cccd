"""Files of torch.save made without torch: torch reads them every way it can, and so does tpshard's own reader."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.errors import UnsupportedError
from tpshard.exporting.torchcontainer import ALIGN, TensorSpec, TorchFile, torch_file, torch_tensor
from tpshard.exporting.torchpickle import Namespace, pickled
from tpshard.torchfile import read_torch
from tpshard.torchzip import Archive

torch = pytest.importorskip("torch")
CONFIG = importlib.import_module("torch.utils.serialization.config")

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, torch.empty(shape, dtype=DTYPES[dtype]).nbytes)


def data_of(made: TensorSpec) -> bytes:
    raw = bytes((31 * n + len(made.name)) % 251 for n in range(made.nbytes))
    return bytes(byte & 1 for byte in raw) if made.dtype == "BOOL" else raw


def written(made: TorchFile, specs: list[TensorSpec], path: Path) -> Path:
    with path.open("wb") as file:
        for at, data in made.frame:
            file.seek(at)
            file.write(data)
        for at, tensor in zip(made.offsets, specs, strict=True):
            file.seek(at)
            file.write(data_of(tensor))
        file.truncate(made.size)
    return path


def check(state: dict[str, Any], specs: list[TensorSpec]) -> None:
    assert list(state) == [one.name for one in specs]
    for one in specs:
        found = state[one.name]
        assert (found.dtype, tuple(found.shape), found.is_contiguous()) == (DTYPES[one.dtype], one.shape, True)
        assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == data_of(one) if one.nbytes else True


EVERY = [spec(f"layer.{dtype}", dtype, 3, 5) for dtype in DTYPES] + [
    spec("scalar", "F32"), spec("empty", "BF16", 0, 4), spec("ones", "F16", 1, 1, 7), spec("ünïcode \u2713", "I8", 2),
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": False}, {"map_location": "meta"}])
@pytest.mark.parametrize("calculated", [False, True])
def test_torch_loads_every_dtype_in_every_way(tmp_path: Path, options: dict[str, Any], calculated: bool) -> None:
    path = written(torch_file(EVERY, "weights"), EVERY, tmp_path / "weights.pth")
    with CONFIG.patch("load.calculate_storage_offsets", calculated):
        state = torch.load(path, **{"weights_only": True, **options})
    if options.get("map_location") == "meta":
        assert [tuple(tensor.shape) for tensor in state.values()] == [one.shape for one in EVERY]
    else:
        check(state, EVERY)


def test_torchs_own_computation_of_offsets_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(torch_file(EVERY, "weights"), EVERY, tmp_path / "weights.pth")
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then compares them for every storage
    check(torch.load(path, weights_only=True), EVERY)


def test_the_archive_is_laid_as_torch_lays_it(tmp_path: Path) -> None:
    """Entry by entry where torch's own file has it, headers, padding and descriptors included."""
    specs = [spec("a", "F32", 3, 5), spec("b", "BF16", 70), spec("c", "F64", 0), spec("d", "U8", 1)]
    tensors = {one.name: torch.frombuffer(bytearray(data_of(one)) or bytearray(1), dtype=torch.uint8)[: one.nbytes]
               .view(DTYPES[one.dtype]).reshape(one.shape).clone() for one in specs}  # fmt: skip
    theirs, ours = tmp_path / "theirs" / "w.pth", tmp_path / "w.pth"
    theirs.parent.mkdir()
    torch.save(tensors, theirs)
    written(torch_file(specs, "w"), specs, ours)

    def entries(path: Path, begin: str, end: str) -> bytes:
        raw = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            return raw[archive.getinfo(begin).header_offset : archive.getinfo(end).header_offset]

    with zipfile.ZipFile(theirs) as one, zipfile.ZipFile(ours) as two:
        names = [name for name in one.namelist() if not name.endswith("serialization_id")]
        assert two.namelist() == names
        shift = one.getinfo("w/data/0").header_offset - two.getinfo("w/data/0").header_offset
        assert shift % ALIGN == 0
        for name in names[4:-1]:
            assert one.getinfo(name).header_offset - two.getinfo(name).header_offset == shift, name
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, theirs)
    finally:
        torch.serialization.set_crc32_options(True)
    assert entries(ours, "w/data/0", "w/version") == entries(theirs, "w/data/0", "w/version")


def test_tpshards_reader_finds_them_where_they_are() -> None:
    made = torch_file(EVERY, "weights")
    raw = bytearray(made.size)
    for at, data in made.frame:
        raw[at : at + len(data)] = data
    found = read_torch(lambda at, nbytes: bytes(raw[at : at + nbytes]), made.size, "w.pth")
    assert {t.name: (t.dtype, t.shape, t.offset) for t in found.tensors} == {
        one.name: (one.dtype, one.shape, at) for one, at in zip(EVERY, made.offsets, strict=True)
    }
    assert all(at % ALIGN == 0 for at in made.offsets)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4)), max_size=6))
def test_any_tensors(tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, list[int]]]) -> None:
    specs = [spec(f"t{number}", dtype, *shape) for number, (dtype, shape) in enumerate(drawn)]
    path = written(torch_file(specs, "t"), specs, tmp_path_factory.mktemp("any") / "t.pth")
    check(torch.load(path, weights_only=True, mmap=True), specs)


@pytest.mark.parametrize("large", [2**32 - 2, 2**32 - 1, 2**32, 5 * 2**30])
def test_more_than_4_gib_in_one_tensor_and_in_front_of_one(tmp_path: Path, large: int) -> None:
    specs = [TensorSpec("large", "U8", (large,), large), spec("behind", "F32", 3), TensorSpec("more", "U8", (7,), 7)]
    made = torch_file(specs, "w")
    path = tmp_path / "w.pth"
    with path.open("wb") as file:  # sparse: only the frame and the small tensors take room
        for at, data in [*made.frame, *((made.offsets[n], data_of(specs[n])) for n in (1, 2))]:
            file.seek(at)
            file.write(data)
        file.truncate(made.size)
    assert os.stat(path).st_blocks * 512 < 1 << 20
    for calculated in (False, True):
        with CONFIG.patch("load.calculate_storage_offsets", calculated):
            state = torch.load(path, weights_only=True, mmap=True)
        check({name: state[name] for name in ("behind", "more")}, specs[1:])
        assert state["large"].shape == (large,)
    with path.open("rb") as file:

        def read(at: int, nbytes: int) -> bytes:
            file.seek(at)
            return file.read(nbytes)

        found = read_torch(read, made.size, "w.pth")
    assert tuple(t.offset for t in found.tensors) == made.offsets


def test_more_entries_than_16_bits_count(tmp_path: Path) -> None:
    """Torch's reader looks every entry up by going through all of them, so the directory is read by others here."""
    specs = [TensorSpec(f"t{number}", "U8", (1,), 1) for number in range(66_000)]
    made = torch_file(specs, "w")
    path = written(made, specs, tmp_path / "w.pth")
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 66_005 and archive.read("w/version") == b"3\n"
    raw = path.read_bytes()
    found = Archive(lambda at, nbytes: raw[at : at + nbytes], made.size, "w.pth")
    assert [found.locate(found.entries[f"w/data/{number}"]) for number in range(66_000)] == list(made.offsets)


def test_values_beside_the_tensors(tmp_path: Path) -> None:
    specs = [spec("a", "F32", 2, 2)]
    beside = {
        "args": Namespace({"hidden_size": 2**40, "eps": 1e-5, "none": None, "flags": (True, False), "of": [1, -300]}),
        "checkpoint_version": 3.0, "iteration": 0, "pairs": {"x": (), "y": (1,), "z": (1, 2, 3, 4)},
    }  # fmt: skip
    path = written(torch_file(specs, "w", within="model", around=beside), specs, tmp_path / "w.pt")
    state = torch.load(path, weights_only=False)
    check(state.pop("model"), specs)
    assert state.pop("args") == argparse.Namespace(
        hidden_size=2**40, eps=1e-5, none=None, flags=(True, False), of=[1, -300]
    )
    assert state == {"checkpoint_version": 3.0, "iteration": 0, "pairs": {"x": (), "y": (1,), "z": (1, 2, 3, 4)}}
    with pytest.raises(Exception, match="Namespace"):
        torch.load(path, weights_only=True)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path, weights_only=True)["args"].eps == 1e-5


def test_several_archives_in_one_file() -> None:
    """As ``.distcp`` files have them: each is a file of its own from where it begins."""
    specs = [spec("a", "BF16", 3, 5), spec("b", "F32"), spec("c", "I64", 100)]
    raw = bytearray()
    for one in specs:
        made = torch_tensor(one, at=len(raw))
        begin = len(raw)
        raw += bytes(made.size - begin)
        for at, data in made.frame:
            raw[at : at + len(data)] = data
        raw[made.offsets[0] : made.offsets[0] + one.nbytes] = data_of(one)
        check({one.name: torch.load(io.BytesIO(bytes(raw[begin:])), weights_only=True)}, [one])


def test_what_torch_has_no_type_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"w is F6_E2M3, for which torch\.save has no type"):
        torch_file([TensorSpec("w", "F6_E2M3", (4,), 3)], "w")
    with pytest.raises(TypeError, match="a set has no place"):
        pickled({"x": {1}})
