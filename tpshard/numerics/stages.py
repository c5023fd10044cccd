"""What the level *backward* runs on: the twin, the model, or as many of the model's first layers as fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tpshard.convert import split
from tpshard.errors import TpshardError, UnsupportedError
from tpshard.header import DTYPE_BITS
from tpshard.listing import shown
from tpshard.manifest import Manifest
from tpshard.quantisation.methods import quantisation_of
from tpshard.shards import Shards, open_shards
from tpshard.source import Source, open_source
from tpshard.strictjson import parse_config

from .available import available_bytes
from .twin import write_twin
from .twinconfig import first_layers, layer_count, shrunk
from .ways import LOCAL

USUAL = 200_000_000  # bytes of parameters as stored that are run unless --max-memory says more: a matter of time
OF_AVAILABLE = 2  # the part of the available memory that is taken, as 1 / OF_AVAILABLE
OF_ORIGINAL = 8 * 5  # bytes of an element: value, gradient, the gradient held against, and what autograd keeps
OF_RANK = 8 * 3  # value, gradient, and what autograd keeps
OF_LARGEST = 8 * 8  # bytes of an element of the largest tensor while its elements are told apart


@dataclass
class Stage:
    """Something to run the level on: ``name`` follows "on the", ``told`` follows "on".

    ``roots`` hold the config of the original and that of the ranks, where they are not those beside the weights.
    """

    name: str
    told: str
    shards: Shards
    source: Source
    roots: tuple[Path, Path]


def twin_stage(shards: Shards, root: Path, trust_remote_code: bool) -> Stage:
    """The twin, written into ``root``.

    Raises:
        UnsupportedError: none could be made.
    """
    path = shards.root / "config.json"
    config = shrunk(parse_config(path.read_bytes(), shown(path), "Split again."), shards.manifest.tp_size)
    try:
        write_twin(config, root / "model", trust_remote_code=trust_remote_code)
        split(root / "model", root / "shards", shards.manifest.tp_size)
    except TpshardError as error:
        raise UnsupportedError(f"no twin of this model could be made: {error}") from None
    twin, source = open_shards(root / "shards"), open_source(root / "model")
    return Stage("twin", "the twin", twin, source, (source.root, twin.root))


def model_stage(
    shards: Shards, source: Source, mode: str, max_memory: int | None, root: Path, trust_remote_code: bool
) -> Stage | str:
    """The model, or as many of its first layers as fit; where none does, why.

    Args:
        max_memory: bytes for all parameters and gradients of the original and the ranks together; None for
            half of what is available, and parameters of at most :data:`USUAL` bytes.
        root: an empty directory to write into.
    """
    path = source.root / "config.json"
    config = parse_config(path.read_bytes(), shown(path), "Restore it.")
    if quantisation_of(config) is not None:
        return "the model's own matrices are quantised, and gradients go to values that are not stored"
    layers = layer_count(config)
    allowed = available_bytes() // OF_AVAILABLE if max_memory is None else max_memory
    most = USUAL if max_memory is None else None
    needed = stored = 0
    for count in range(layers, 0, -1) if layers else (0,):
        needed, stored = bytes_needed(shards.manifest, mode, None if count == layers else count)
        if needed > allowed or (most is not None and stored > most):
            continue
        if count == layers:
            return Stage("model", "the model", shards, source, (source.root, shards.root))
        name = f"first {count} layers" if count > 1 else "first layer"
        roots = (root / "original", root / "ranks")
        for folder, of in zip(roots, (source.root, shards.root), strict=True):
            _write_first(folder, of, count, trust_remote_code)
        return Stage(name, f"its {name} of {layers}", shards, source, roots)
    what = "one layer of the model" if layers else "the model"
    if needed > allowed:
        return f"{what} would take {needed:,} bytes, more than the {allowed:,} that are allowed"
    return f"{what} has {stored:,} bytes of parameters, more than the {most:,} that are run without --max-memory"


def _write_first(folder: Path, of: Path, count: int, trust_remote_code: bool) -> None:
    path = of / "config.json"
    folder.mkdir()
    config = first_layers(parse_config(path.read_bytes(), shown(path), "Restore it."), count)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for code in sorted(of.glob("*.py")) if trust_remote_code else ():
        shutil.copyfile(code, folder / code.name)


def bytes_needed(manifest: Manifest, mode: str, layers: int | None) -> tuple[int, int]:
    """Bytes that a run takes, about, and those of its parameters as stored; of the first ``layers``, or of all."""
    needed = stored = largest = 0
    for name, dtype, shape, of_ranks in _held(manifest):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if layers is not None and numbers and numbers[0] >= layers:
            continue
        whole = prod(shape)
        largest = max(largest, whole)
        stored += whole * DTYPE_BITS[dtype] // 8
        needed += whole * OF_ORIGINAL
        needed += OF_RANK * (of_ranks if mode == LOCAL else whole * manifest.tp_size)
    return needed + largest * OF_LARGEST, stored


def _held(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for stored in manifest.layout.stored:
        tensor: Any = manifest.layout.tensors[stored.name]
        yield stored.name, tensor.dtype, tensor.shape, sum(prod(shape) for shape in stored.shapes if shape is not None)
