"""Opening a checkpoint: what is accepted, what it holds, and that damage is refused by name."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    make_indexed,
    make_single,
    paths,
    piece,
    refused,
    write_weights,
)
from hypothesis import given
from hypothesis import strategies as st

from tpshard.errors import DamagedError, StorageError, UnsupportedError, UsageError
from tpshard.source import natural_key, open_source


def test_one_file(tmp_path: Path) -> None:
    source = open_source(make_single(tmp_path / "tiny"))
    assert [info.name for _, info in source.tensors()] == ["a", "b"]
    assert (source.label, source.index, source.left_out, source.warnings) == ("tiny", None, (), ())
    assert source.config == {"model_type": "llama"}
    assert source.config_raw == (tmp_path / "tiny" / "config.json").read_bytes()
    assert paths(source) == ["config.json"]


def test_indexed_files_come_in_natural_order(tmp_path: Path) -> None:
    make_indexed(tmp_path, 12, lambda number, count: f"part-{number}.safetensors")
    source = open_source(tmp_path)
    assert [file.name for file in source.files] == [f"part-{number}.safetensors" for number in range(1, 13)]
    assert source.index is not None
    assert source.index.raw == (tmp_path / "model.safetensors.index.json").read_bytes()
    assert paths(source) == ["config.json"]
    assert [number for number, _ in source.tensors()] == [number for number in range(12) for _ in range(2)]


def test_a_short_file_is_named(tmp_path: Path) -> None:  # H20 b
    make_indexed(tmp_path)
    path = tmp_path / piece(3)
    size = path.stat().st_size
    os.truncate(path, size - 17)
    refused(tmp_path, piece(3), f"{size:,}", f"{size - 17:,}")


def test_a_long_file_is_named(tmp_path: Path) -> None:  # H20 c
    make_indexed(tmp_path)
    with (tmp_path / piece(3)).open("ab") as file:
        file.write(bytes(16))
    refused(tmp_path, piece(3), "16 bytes follow")


def test_a_missing_config_is_refused(tmp_path: Path) -> None:  # H20 f
    make_indexed(tmp_path)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json", "no such file", "copy it")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "JSON"),
        (b"[1]", "list"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\udfff"}', "surrogate"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a":' * 50_000, "nested"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "10,000 digits"),
        (b"{" + b" " * (17 << 20) + b"}", "at most 16,777,216"),
        (b'{"a": "\xc3"}', "UTF-8"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    make_single(tmp_path)
    (tmp_path / "config.json").write_bytes(raw)
    refused(tmp_path, "config.json", said)


def test_infinite_numbers_of_a_config_are_numbers(tmp_path: Path) -> None:
    """As transformers writes them: Mamba-2's limits of the time step."""
    make_single(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + ', "time_step_limit": [0.0, Infinity], "a": NaN}')
    assert open_source(tmp_path).config["time_step_limit"] == [0.0, float("inf")]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is empty")
    refused(tmp_path / "nowhere", "There is no directory", kind=UsageError)
    refused("", kind=UsageError)
    refused("a\0b", kind=UsageError)
    single = make_single(tmp_path / "single")
    refused(single / "model.safetensors", "is a file", str(single), kind=UsageError)
    refused(single / "model.safetensors" / "below", "There is no directory", kind=UsageError)
    (single / "model.safetensors").unlink()
    refused(single, "holds no weights")
    (single / "model.gguf").write_bytes(b"GGUF")
    refused(single, "model.gguf", "save_pretrained", kind=UnsupportedError)
    (single / "tpshard.json").write_text("{}")
    refused(single, "tpshard reshard", kind=UsageError)
    (tmp_path / "link").symlink_to("gone")
    refused(tmp_path / "link", "gone")


def test_a_weights_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    make_single(tmp_path)
    write_weights(tmp_path / "model.safetensors", {})
    refused(tmp_path, "no tensor")


def test_an_adapter_alone_is_unsupported_and_beside_a_model_left_out(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    write_weights(tmp_path / "adapter_model.safetensors", {"l": ("F32", (2,))})
    source = open_source(tmp_path)
    assert [text.split(" ")[0] for text in source.left_out] == ["adapter_config.json", "adapter_model.safetensors"]
    assert "adapter" in source.warnings[0]
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "PEFT adapter", kind=UnsupportedError)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "PEFT adapter", kind=UnsupportedError)


def test_errors_of_the_storage_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_indexed(tmp_path)
    real = os.open

    def denied(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(piece(5)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        refused(tmp_path, piece(5), "Permission denied", kind=StorageError)

    def broken(descriptor: int, nbytes: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    refused(tmp_path, "config.json", "Input/output error", kind=StorageError)


def test_short_reads_are_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path)
    whole = open_source(tmp_path)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: real(descriptor, min(nbytes, 3), offset))
    assert open_source(tmp_path).files == whole.files


def test_a_change_after_opening_is_noticed(tmp_path: Path) -> None:
    make_indexed(tmp_path)
    source = open_source(tmp_path)
    source.check_unchanged()
    path = tmp_path / piece(6)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    with pytest.raises(DamagedError, match=piece(6)):
        source.check_unchanged()
    source = open_source(tmp_path)
    copy = path.read_bytes()  # the same size and time, another file
    path.rename(tmp_path / "old")
    path.write_bytes(copy)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    with pytest.raises(DamagedError, match=piece(6)):
        source.check_unchanged()
    path.unlink()
    with pytest.raises(DamagedError, match="has gone"):
        source.check_unchanged()


@pytest.mark.parametrize("legacy", [False, True])
def test_pytorch_bin_alone_and_indexed(tmp_path: Path, legacy: bool) -> None:
    torch = pytest.importorskip("torch")
    options = {"_use_new_zipfile_serialization": not legacy}
    (tmp_path / "config.json").write_text("{}")
    shared = torch.ones(3, 2)
    torch.save({"embed": shared, "head": shared}, tmp_path / "pytorch_model.bin", **options)
    source = open_source(tmp_path)
    assert [(info.name, info.shape) for _, info in source.tensors()] == [("embed", (3, 2))]
    assert (source.files[0].format, source.files[0].aliases) == ("torch", {"head": "embed"})

    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    refused(tmp_path, "pytorch_model.bin.index.json")
    torch.save({"norm": torch.ones(3)}, tmp_path / "pytorch_model-00002-of-00002.bin", **options)
    weight_map = {
        "embed": "pytorch_model-00001-of-00002.bin",
        "head": "pytorch_model-00001-of-00002.bin",
        "norm": "pytorch_model-00002-of-00002.bin",
    }
    index = tmp_path / "pytorch_model.bin.index.json"
    for total in (36, 36.0, 60):  # shared bytes counted once or twice
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
        source = open_source(tmp_path)
        assert [(number, info.name) for number, info in source.tensors()] == [(0, "embed"), (1, "norm")]
        assert source.warnings == ()
    del weight_map["head"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "'head'", "does not name")

    write_weights(tmp_path / "model.safetensors", {"a": ("F32", (2,))})
    assert [file.format for file in open_source(tmp_path).files] == ["safetensors"]


def test_names_sort_by_number() -> None:
    names = [f"layers.{number}.w{other}" for number in range(12) for other in (1, 9, 10)]
    shuffled = names[:]
    random.Random(3).shuffle(shuffled)
    assert sorted(shuffled, key=natural_key) == names


@given(st.lists(st.text("a1.0９", max_size=8) | st.just("7" * 5000), max_size=8))
def test_natural_order_is_total(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)
    assert len({natural_key(name) for name in names}) == len(set(names))
