"""What lies beside the weights: carried, left out with a reason, or refused; links, pipes and odd names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from checkpoints import (
    make_cache,
    make_indexed,
    make_single,
    paths,
    piece,
    refused,
    write_index,
)

from tpshard.errors import StorageError
from tpshard.source import open_source

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
    assert source.left_out == ("pipe.json (a FIFO)", "s (a socket)")
    for name in ("config.json", "model.safetensors"):
        make_single(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(name)
        refused(tmp_path, name, "a FIFO")
        (tmp_path / name).unlink()
    make_indexed(tmp_path / "i")
    (tmp_path / "i" / piece(2)).unlink()
    os.mkfifo(tmp_path / "i" / piece(2))
    refused(tmp_path / "i", piece(2), "a FIFO")


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


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may read everything")
def test_an_unreadable_directory_is_named(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "closed").mkdir(mode=0)
    refused(tmp_path, "closed", "Permission denied", kind=StorageError)
