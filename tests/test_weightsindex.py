"""Which files are the checkpoint, and every way in which an index and its files can contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import (
    Tensors,
    make_indexed,
    make_single,
    piece,
    refused,
    write_index,
    write_weights,
)

from tpshard.source import open_source


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
