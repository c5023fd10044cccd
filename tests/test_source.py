"""Opening a checkpoint: what is accepted, what is carried, and that every contradiction is refused by name."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpshard import hub
from tpshard.errors import DamagedError, StorageError, TpshardError, UnsupportedError, UsageError
from tpshard.header import build_header
from tpshard.source import Source, natural_key, open_source

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_weights(path: Path, tensors: Tensors, fill: int = 1) -> int:
    """A safetensors file; returns the bytes of its data."""
    header = build_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], {"format": "pt"})
    nbytes = 0
    for dtype, shape in tensors.values():
        count = {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        for dimension in shape:
            count *= dimension
        nbytes += count
    path.write_bytes(header + bytes([fill]) * nbytes)
    return nbytes


def piece(number: int, count: int = 7) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def make_indexed(root: Path, count: int = 7, name_of: Any = piece) -> dict[str, str]:
    """Seven files of two tensors each, an index and a config; returns the weight map."""
    root.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    total = 0
    for number in range(1, count + 1):
        tensors: Tensors = {
            f"model.layers.{number}.{leaf}.weight": ("F32", (number, 2)) for leaf in ("down_proj", "norm")
        }
        total += write_weights(root / name_of(number, count), tensors, number)
        weight_map.update({name: name_of(number, count) for name in tensors})
    write_index(root, weight_map, total)
    (root / "config.json").write_text('{"model_type": "llama"}')
    return weight_map


def write_index(root: Path, weight_map: dict[str, str], total: object = None) -> None:
    metadata = {} if total is None else {"total_size": total}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def make_single(root: Path, name: str = "model.safetensors") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    write_weights(root / name, {"a": ("F32", (2,)), "b": ("BF16", (3,))})
    (root / "config.json").write_text('{"model_type": "llama"}')
    return root


def refused(root: Path | str, *said: str, kind: type[TpshardError] = DamagedError) -> str:
    with pytest.raises(TpshardError) as caught:
        open_source(root)
    assert type(caught.value) is kind, caught.value
    for text in said:
        assert text in str(caught.value)
    return str(caught.value)


def paths(source: Source) -> list[str]:
    return [file.path for file in source.side_files]


def test_one_file(tmp_path: Path) -> None:
    source = open_source(make_single(tmp_path / "tiny"))
    assert [info.name for _, info in source.tensors()] == ["a", "b"]
    assert (source.label, source.index, source.left_out, source.warnings) == ("tiny", None, (), ())
    assert source.config == {"model_type": "llama"}
    assert source.config_raw == (tmp_path / "tiny" / "config.json").read_bytes()
    assert paths(source) == ["config.json"]


@pytest.mark.parametrize(
    "name", ["pytorch_model.safetensors", "weights.safetensors", "model-00001-of-00001.safetensors"]
)
def test_one_file_of_another_name(tmp_path: Path, name: str) -> None:
    assert open_source(make_single(tmp_path, name)).files[0].name == name


def test_model_safetensors_is_preferred(tmp_path: Path) -> None:
    make_single(tmp_path)
    write_weights(tmp_path / "consolidated.safetensors", {"z": ("F32", (2,))})
    source = open_source(tmp_path)
    assert [file.name for file in source.files] == ["model.safetensors"]
    assert source.left_out == ("consolidated.safetensors (weights that are not in use)",)


def test_indexed_files_come_in_natural_order(tmp_path: Path) -> None:
    make_indexed(tmp_path, 12, lambda number, count: f"part-{number}.safetensors")
    source = open_source(tmp_path)
    assert [file.name for file in source.files] == [f"part-{number}.safetensors" for number in range(1, 13)]
    assert source.index is not None
    assert source.index.raw == (tmp_path / "model.safetensors.index.json").read_bytes()
    assert paths(source) == ["config.json"]
    assert [number for number, _ in source.tensors()] == [number for number in range(12) for _ in range(2)]


def test_odd_but_sound_file_names(tmp_path: Path) -> None:  # H20 g
    make_indexed(tmp_path, 7, lambda number, count: f"model.safetensors-{number:05d}-of-{count:05d}.safetensors")
    assert len(open_source(tmp_path).files) == 7


def test_files_in_a_directory_below(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    make_indexed(tmp_path, 2, lambda number, count: f"weights/{number}.safetensors")
    assert [file.name for file in open_source(tmp_path).files] == ["weights/1.safetensors", "weights/2.safetensors"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:  # H20 a
    make_indexed(tmp_path)
    (tmp_path / piece(2)).unlink()
    refused(tmp_path, piece(2), "7 weights files", "no such file")


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


def test_an_entry_that_no_file_holds_is_named(tmp_path: Path) -> None:  # H20 d
    weight_map = make_indexed(tmp_path)
    write_index(tmp_path, {**weight_map, "model.extra.weight": piece(4)})
    refused(tmp_path, "model.extra.weight", piece(4), "no other file")


def test_an_entry_that_points_to_the_wrong_file_is_named_with_the_right_one(tmp_path: Path) -> None:
    weight_map = make_indexed(tmp_path)
    write_index(tmp_path, {**weight_map, "model.layers.4.norm.weight": piece(5)})
    refused(tmp_path, "model.layers.4.norm.weight", piece(5), f"{piece(4)} does")


def test_pieces_without_their_index_are_refused(tmp_path: Path) -> None:  # H20 e
    make_indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "7 safetensors files", "model.safetensors.index.json")
    for number in range(2, 8):
        (tmp_path / piece(number)).unlink()
    refused(tmp_path, piece(1), "7 pieces")


def test_a_missing_config_is_refused(tmp_path: Path) -> None:  # H20 f
    make_indexed(tmp_path)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json", "no such file", "copy it")


def test_a_tensor_that_the_index_does_not_know_is_named(tmp_path: Path) -> None:
    weight_map = make_indexed(tmp_path)
    del weight_map["model.layers.4.norm.weight"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, "model.layers.4.norm.weight", piece(4), "does not name")


@pytest.mark.parametrize("elsewhere", [7, 1])
def test_the_copy_that_the_index_does_not_name_is_left_out(tmp_path: Path, elsewhere: int) -> None:  # H21
    make_indexed(tmp_path)
    stale = "model.layers.4.down_proj.weight"
    own: Tensors = {
        f"model.layers.{elsewhere}.{leaf}.weight": ("F32", (elsewhere, 2)) for leaf in ("down_proj", "norm")
    }
    write_weights(tmp_path / piece(elsewhere), {**own, stale: ("F32", (4, 2))}, 9)
    heard: list[str] = []
    source = open_source(tmp_path, warn=heard.append)
    assert [number for number, info in source.tensors() if info.name == stale] == [3]
    assert source.stale == {elsewhere - 1: frozenset({stale})}
    (warning,) = source.warnings
    assert heard == [warning]
    assert all(text in warning for text in (stale, piece(4), piece(elsewhere)))
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "no index")


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "/etc/passwd",
        "a/../../b",
        "./model.safetensors",
        "a//b",
        "",
        "..",
        "a\\..\\b",
        "a\0b",
        "a/",
    ],
)
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    make_single(tmp_path / "d")
    write_weights(tmp_path / "out.safetensors", {"a": ("F32", (2,))})
    write_index(tmp_path / "d", {"a": name, "b": "model.safetensors"})
    refused(tmp_path / "d", "'a'", "own directory")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "JSON"),
        (b"[]", "list"),
        (b"{}", "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (b'{"weight_map": ["a"]}', "weight_map"),
        (b'{"weight_map": {"a": 1}}', "'a'"),
        (b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}', "twice"),
        (b'{"weight_map": {"a": ' + b"[" * 100_000, "nested"),
        (b"\xff\xfe{}", "UTF-8"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    make_single(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    refused(tmp_path, "model.safetensors.index.json", said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "JSON"),
        (b"[1]", "list"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\udfff"}', "surrogate"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a":' * 50_000, "nested"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "10,000 digits"),
        (b"{" + b" " * (17 << 20) + b"}", "more than"),
        (b'{"a": "\xc3"}', "UTF-8"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    make_single(tmp_path)
    (tmp_path / "config.json").write_bytes(raw)
    refused(tmp_path, "config.json", said)


def test_total_size_is_only_a_warning(tmp_path: Path) -> None:
    weight_map = make_indexed(tmp_path)
    assert open_source(tmp_path).warnings == ()
    write_index(tmp_path, weight_map, 12345)
    (warning,) = open_source(tmp_path).warnings
    assert "12,345" in warning
    write_index(tmp_path, weight_map, "many")
    assert open_source(tmp_path).warnings == ()


def test_a_whole_model_beside_an_index_that_does_not_name_it_is_refused(tmp_path: Path) -> None:
    make_indexed(tmp_path)
    make_single(tmp_path)
    refused(tmp_path, "model.safetensors as well as model.safetensors.index.json")


def test_pieces_beside_the_indexed_ones_are_mentioned(tmp_path: Path) -> None:
    make_indexed(tmp_path)
    write_weights(tmp_path / piece(1, 9), {"old": ("F32", (2,))})
    source = open_source(tmp_path)
    assert source.left_out == (f"{piece(1, 9)} (weights that are not in use)",)
    assert piece(1, 9) in source.warnings[0]


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


SIDE = [
    "README.md",
    "chat_template.jinja",
    "config.json",
    "configuration_x.py",
    "generation_config.json",
    "modeling_x.py",
    "special_tokens_map.json",
    "sub/deep er/extra.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "模型 été.txt",
]
OTHER = [
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "model.fp16.safetensors.index.fp16.json",
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "model-Q4.GGUF",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "sub/model.safetensors",
    "last.ckpt",
    "model.tflite",
    "arrays.npz",
]
WHOLE = [
    ".git/config",
    ".cache/x",
    "__pycache__/a.pyc",
    "original/params.json",
    "checkpoint-500/config.json",
    "global_step10/a.json",
]


def test_everything_that_is_not_a_weight_is_carried(tmp_path: Path) -> None:  # H23
    root = make_single(tmp_path / "my modèle 模型 v1")
    for name in [*SIDE, *OTHER, *WHOLE, ".DS_Store"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name != "config.json":
            path.write_text(name)
    source = open_source(root)
    assert source.label == "my modèle 模型 v1"
    assert paths(source) == sorted(SIDE)
    assert {file.path: file.size for file in source.side_files}["README.md"] == 9
    left = {text.rsplit(" (", 1)[0] for text in source.left_out}
    assert left == {*OTHER, ".DS_Store", *(name.split("/")[0] + "/" for name in WHOLE)}


def make_cache(tmp_path: Path) -> Path:
    """The indexed checkpoint as a hub cache: every file a link into ``blobs``."""
    plain = tmp_path / "plain"
    make_indexed(plain)
    (plain / "tokenizer.json").write_text("{}")
    (plain / "sub").mkdir()
    (plain / "sub" / "extra.json").write_text("{}")
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "0123abc"
    (repo / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(file for file in plain.rglob("*") if file.is_file())):
        path.rename(repo / "blobs" / f"{number:040x}")
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repo / "blobs" / f"{number:040x}", link.parent))
    return snapshot


def test_a_hub_cache_is_followed(tmp_path: Path) -> None:  # H23
    source = open_source(make_cache(tmp_path))
    assert len(source.files) == 7
    assert paths(source) == ["config.json", "sub/extra.json", "tokenizer.json"]
    assert source.files[0].size == (source.root / piece(1)).stat().st_size


@pytest.mark.parametrize(
    "name", [piece(3), "config.json", "tokenizer.json", "sub/extra.json", "model.safetensors.index.json"]
)
def test_a_link_that_leads_nowhere_is_named_with_its_target(tmp_path: Path, name: str) -> None:
    root = make_cache(tmp_path)
    target = os.readlink(root / name)
    (root / name).resolve().unlink()
    refused(root, name, target, "dangles")
    (root / name).unlink()
    (root / name).symlink_to(Path(name).name)
    refused(root, name, "circle")


def test_other_formats_may_dangle_and_directories_are_not_followed(tmp_path: Path) -> None:
    root = make_cache(tmp_path)
    (root / "pytorch_model.bin").symlink_to("gone")
    (root / "up").symlink_to("..")
    source = open_source(root)
    assert source.left_out == (
        "pytorch_model.bin (it is a link to gone that dangles)",
        "up/ (a link to a directory, which is not followed)",
    )
    (root / "model.safetensors.index.json").unlink()
    write_index(root, {"a": "up/x.safetensors"})
    refused(root, "up/x.safetensors", "not followed")


@pytest.mark.timeout(20)
def test_pipes_and_sockets_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path)
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    os.mkfifo("pipe.json")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        source = open_source(tmp_path)
    assert source.left_out == ("pipe.json (neither a file nor a directory)", "s (neither a file nor a directory)")
    for name in ("config.json", "model.safetensors"):
        make_single(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(name)
        refused(tmp_path, name if name == "config.json" else "no weights")
        (tmp_path / name).unlink()
    make_indexed(tmp_path / "i")
    (tmp_path / "i" / piece(2)).unlink()
    os.mkfifo(tmp_path / "i" / piece(2))
    refused(tmp_path / "i", piece(2), "neither a file")


def test_names_that_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    make_single(tmp_path)
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe9.json")).write_text("{}")
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    assert open_source(tmp_path).left_out == ("b\\xe9.json (its name is not UTF-8)",)
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9"))
    source = open_source(make_single(root))
    assert source.label == "r\\xe9"
    (root / "config.json").unlink()
    refused(root, "r\\xe9").encode("utf-8")


def test_depth_and_number_of_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path / "deep")
    (tmp_path / "deep" / "/".join("d" * 40)).mkdir(parents=True)
    refused(tmp_path / "deep", "directories deep")
    make_single(tmp_path / "wide")
    monkeypatch.setattr("tpshard.listing.MAX_FILES", 20)
    for number in range(30):
        (tmp_path / "wide" / f"{number}.txt").touch()
    refused(tmp_path / "wide", "more than 20 files")


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
    refused(tmp_path, piece(1), "Input/output error", kind=StorageError)


def test_short_reads_are_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path)
    whole = open_source(tmp_path)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: real(descriptor, min(nbytes, 3), offset))
    assert open_source(tmp_path).files == whole.files


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may read everything")
def test_an_unreadable_directory_is_named(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "closed").mkdir(mode=0)
    refused(tmp_path, "closed", "Permission denied", kind=StorageError)


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


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("gpt2", True),
        ("org/name", True),
        ("org/na.me-1_b@refs/pr/3", True),
        ("org/name@v1.0", True),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("..", False),
        (".", False),
        ("org/na me", False),
        ("~/x", False),
        ("org\\name", False),
        ("", False),
        ("modèle", False),
        ("a--b", False),
    ],
)
def test_what_looks_like_a_hub_id(text: str, is_id: bool) -> None:
    assert hub.looks_like_id(text) is is_id


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_id_is_resolved_where_no_such_directory_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_cache(tmp_path)
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert "*.bin" in ignore_patterns
        return str(root)

    fake_hub(monkeypatch, download)
    monkeypatch.chdir(tmp_path)
    source = open_source("org/name@v2")
    assert (source.root, source.label, asked) == (root, "org/name@v2", [("org/name", "v2")])
    make_single(tmp_path / "org" / "name")
    assert open_source("org/name").root == Path("org/name")  # what lies here comes first
    assert len(asked) == 1


def test_without_safetensors_on_the_hub_the_older_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[list[str]] = []

    def download(repo: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        patterns.append(ignore_patterns)
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    assert hub.resolve("org/name") == tmp_path
    assert ["*.bin" in asked for asked in patterns] == [True, False]


def test_a_hub_that_fails_gives_one_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise RuntimeError("401 Client Error\nand a long story")

    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, download)
    message = refused("org/name@v2", "org/name", "v2", "401 Client Error", "HF_TOKEN", kind=StorageError)
    assert "long story" not in message
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("gpt2", "no directory 'gpt2'", "pip install huggingface_hub", kind=StorageError)


def test_the_hub_cache_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = make_cache(tmp_path / "cache")
    commit = "0123456789012345678901234567890123456789"
    snapshot.rename(snapshot.parent / commit)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert len(open_source("org/name").files) == 7
    refused("org/other", "org/other", "hf download org/other", kind=StorageError)
