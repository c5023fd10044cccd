"""Tiny checkpoints for the tests of reading, in the shapes that are found on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpshard.errors import DamagedError, TpshardError
from tpshard.header import build_header
from tpshard.source import Source, open_source

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
