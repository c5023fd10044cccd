"""pytorch_model.bin: the same tensors as torch finds, and everything else refused."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchsaves import PLAIN, PLAIN_LEGACY, outcome, parse, raw_bytes, rezipped, saved

from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.header import frame_reader
from tpshard.torchfile import read_torch

torch = pytest.importorskip("torch")


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    state = collections.OrderedDict(torch.nn.Linear(3, 2).state_dict())
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    for name, dtype in DTYPES.items():
        filled = torch.randint(0, 2, (2, 24), generator=generator, dtype=torch.uint8)
        width = 24 // torch.empty(0, dtype=dtype).element_size()
        state[f"of.{name}"] = filled.view(dtype).reshape(2, width) if dtype is not torch.bool else filled.bool()
    state["parameter"] = torch.nn.Parameter(torch.randn(5, generator=generator))
    state["scalar"] = torch.tensor(3.5)
    state["empty"] = torch.zeros(0, 4)
    state["naïve 模型"] = torch.ones(1, 3, 1).transpose(0, 2)
    return state


@pytest.mark.parametrize("legacy", [False, True])
def test_finds_the_tensors_that_torch_finds(legacy: bool) -> None:
    state = sample()
    data = saved(state, legacy=legacy)
    found = parse(data)
    assert found.format == "torch"
    assert {t.name for t in found.tensors} == set(state)
    assert [t.offset for t in found.tensors] == sorted(t.offset for t in found.tensors)
    for info in found.tensors:
        assert info.shape == tuple(state[info.name].shape)
        assert data[info.offset : info.offset + info.nbytes] == raw_bytes(state[info.name]), info.name
        if info.name.startswith("of."):
            assert info.dtype == info.name[3:]


@pytest.mark.parametrize("legacy", [False, True])
def test_frame_and_tensors_are_the_whole_file_and_the_frame_is_enough_to_read_it_again(legacy: bool) -> None:
    data = saved(sample(), legacy=legacy)
    found = parse(data)
    rebuilt = bytearray(len(data))
    covered = 0
    for offset, held in found.frame:
        rebuilt[offset : offset + len(held)] = held
        covered += len(held)
    for info in found.tensors:
        rebuilt[info.offset : info.offset + info.nbytes] = data[info.offset : info.offset + info.nbytes]
        covered += info.nbytes
    assert bytes(rebuilt) == data
    assert covered == len(data)
    assert read_torch(frame_reader(found.frame, "x"), len(data), found.name) == found


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_pickle_protocol_is_read(legacy: bool, protocol: int) -> None:
    data = saved({"a": torch.ones(2), "b": torch.zeros(3)}, legacy=legacy, pickle_protocol=protocol)
    assert {t.name for t in parse(data).tensors} == {"a", "b"}


@pytest.mark.parametrize("legacy", [False, True])
def test_one_view_under_two_names_is_an_alias(legacy: bool) -> None:
    weight = torch.ones(3, 2)
    found = parse(saved({"embed": weight, "other": torch.zeros(1), "head": weight}, legacy=legacy))
    assert {t.name for t in found.tensors} == {"embed", "other"}
    assert found.aliases == {"head": "embed"}


@pytest.mark.parametrize("legacy", [False, True])
def test_parts_of_a_storage_leave_the_rest_to_the_frame(legacy: bool) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    data = saved({"last": whole[4:], "first": whole[1:3]}, legacy=legacy)
    found = parse(data)
    first, last = found.tensors
    assert (first.name, last.name, last.offset - first.offset) == ("first", "last", 24)
    assert data[first.offset : first.offset + 16] == raw_bytes(whole[1:3])
    assert sum(len(held) for _, held in found.frame) == len(data) - 32


REFUSED: dict[str, tuple[Any, str]] = {
    "transposed": (lambda: {"w": torch.ones(2, 3).T}, "contiguous"),
    "expanded": (lambda: {"w": torch.ones(1, 3).expand(4, 3)}, "contiguous"),
    "overlapping": (lambda: {"w": (w := torch.ones(6)), "v": w[1:]}, "share a part"),
    "another shape of it": (lambda: {"w": (w := torch.ones(6)), "v": w.view(2, 3)}, "share a part"),
    "a list": (lambda: [torch.ones(2)], "list"),
    "a tensor": (lambda: torch.ones(2), "View"),
    "nested": (lambda: {"state_dict": {"w": torch.ones(2)}}, "'state_dict'"),
    "a number": (lambda: {"w": torch.ones(2), "epoch": 3}, "'epoch'"),
    "none": (lambda: {"w": None}, "'w'"),
    "a number as the name": (lambda: {3: torch.ones(2)}, "3"),
    "conjugated": (lambda: {"w": torch.ones(2, dtype=torch.complex64).conj()}, "conjugated"),
    "complex of doubles": (lambda: {"w": torch.ones(2, dtype=torch.complex128)}, "torch.ComplexDoubleStorage"),
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "_rebuild_sparse_tensor"),
    "quantised": (lambda: {"w": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, "torch."),
    "a module": (lambda: torch.nn.Linear(2, 2), "torch.nn"),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_anything_but_contiguous_tensors_is_refused_by_name(case: str, legacy: bool) -> None:
    make, said = REFUSED[case]
    with pytest.raises((UnsupportedError, DamagedError)) as caught:
        parse(saved(make(), legacy=legacy))
    assert said in str(caught.value)
    assert "pytorch_model.bin" in str(caught.value)


def test_an_archive_of_another_writer_is_read() -> None:
    assert [t.name for t in parse(rezipped(PLAIN, {})).tensors] == ["a", "b"]
    assert [t.name for t in parse(rezipped(PLAIN, {"byteorder": None, ".format_version": None})).tensors] == ["a", "b"]


ZIPS: dict[str, tuple[Any, str]] = {
    "compressed": (lambda: rezipped(PLAIN, {}, compression=zipfile.ZIP_DEFLATED), "compressed"),
    "big-endian": (lambda: rezipped(PLAIN, {"byteorder": b"big"}), "byte order"),
    "no pickle": (lambda: rezipped(PLAIN, {"data.pkl": None}), "data.pkl"),
    "a storage is missing": (lambda: rezipped(PLAIN, {"data/1": None}), "data/1"),
    "a storage is short": (lambda: rezipped(PLAIN, {"data/0": bytes(23)}), "23 bytes"),
    "TorchScript": (lambda: scripted(), "TorchScript"),
    "cut": (lambda: PLAIN[:-64], "end record"),
    "something after it": (lambda: PLAIN + bytes(16), "end record"),
    "only its first bytes": (lambda: PLAIN[:10], "cut short"),
    "empty": (lambda: b"", "0 bytes"),
    "text": (lambda: b"hello world, this is no checkpoint", "not a file of torch.save"),
    "an LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "tar": (lambda: tarred(), "tar format"),
    "a plain pickle": (lambda: pickle.dumps({"a": 1}), "not a file of torch.save"),
    "legacy, cut": (lambda: PLAIN_LEGACY[:-1], "in a file of"),
    "legacy, longer": (lambda: PLAIN_LEGACY + b"1", "end at byte"),
    "legacy, cut in the pickle": (lambda: PLAIN_LEGACY[:200], "cut short"),
    "legacy, big-endian": (
        lambda: PLAIN_LEGACY.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"),
        "endian",
    ),
}


def scripted() -> bytes:
    buffer = io.BytesIO(PLAIN)
    with zipfile.ZipFile(buffer, "a") as archive:
        folder = archive.namelist()[0].split("/", 1)[0]
        archive.writestr(folder + "/constants.pkl", b"")
    return buffer.getvalue()


def tarred() -> bytes:
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return buffer.getvalue()


@pytest.mark.parametrize("case", ZIPS)
def test_damaged_and_foreign_files_are_refused(case: str) -> None:
    make, said = ZIPS[case]
    with pytest.raises((UnsupportedError, DamagedError)) as caught:
        parse(make())
    assert said in str(caught.value)


def test_two_tensors_on_one_storage_entry_of_the_directory_are_refused() -> None:
    # The directory points both storages at the header of the first: their bytes would overlap.
    data = bytearray(rezipped(PLAIN, {"data/1": bytes(24)}))
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        at = {info.filename.split("/", 1)[1]: info.header_offset for info in archive.infolist()}
    place = bytes(data).rindex(struct.pack("<L", at["data/1"]))
    data[place : place + 4] = struct.pack("<L", at["data/0"])
    with pytest.raises(TpshardError):
        parse(bytes(data))


def test_tensors_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        pytest.skip("this torch cannot write a sparse checkpoint")
    path = tmp_path / "pytorch_model.bin"
    big = torch.empty(2**31 + 5, dtype=torch.int16)  # reserved, never touched
    with skip_data():
        torch.save({"big": big, "small": torch.zeros(7)}, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        assert size > 2**32
        found = read_torch(lambda offset, nbytes: os.pread(descriptor, nbytes, offset), size, path.name)
    finally:
        os.close(descriptor)
    assert [(t.name, t.nbytes) for t in found.tensors] == [("big", 2**32 + 10), ("small", 28)]
    assert found.tensors[1].offset > 2**32
    assert read_torch(frame_reader(found.frame, "x"), size, path.name) == found


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([PLAIN, PLAIN_LEGACY]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_mutated_files_are_whole_or_refused(data: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    changed = bytearray(data)
    for at, value in edits:
        changed[at % len(changed)] = value
    outcome(bytes(changed[: len(changed) - cut]) if cut > 30 else bytes(changed))
