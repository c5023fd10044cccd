"""What an export starts from, a checkpoint, shards, or an engine's directory: a model and its placed tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpshard.checkpoint import open_checkpoint
from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.listing import shown
from tpshard.matching import match
from tpshard.opened import read_small
from tpshard.planning import Placed
from tpshard.registry import family_of, table_for
from tpshard.shards import is_shards, open_shards
from tpshard.strictjson import parse_config

from .parts import Model, model_of

_MAX_CONFIG_BYTES = 16 << 20
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pth|pt|ckpt|distcp)(?:\.index\.json)?")


@dataclass(frozen=True)
class Given:
    """A model in files.

    Args:
        model: what its tensors are.
        placed: where they lie.
        root: the directory, and ``files`` its weights, in the order of ``placed.files``.
        sides: sizes in bytes of what else lies there and is carried, by path.
        left_out: what is not carried, with the reason.
        warnings: what is to be said of it.
        expected: promised digests by the number of a plan's read.
        algorithm: that of ``expected``.
        check_unchanged: raises where a file is no longer the one that was opened.
        tp_size: its tensor-parallel degree, 1 for a checkpoint.
        what: what it is, for people.
        holding: of an engine's directory: where its files hold another model, as that one spells its tensors.
    """

    model: Model
    placed: Placed
    root: Path
    files: Sequence[Path]
    sides: Mapping[str, int]
    left_out: Sequence[str]
    warnings: Sequence[str]
    check_unchanged: Callable[[], None]
    tp_size: int = 1
    expected: Mapping[int, str] = field(default_factory=dict)
    algorithm: str = ""
    holding: Callable[[Model], Placed] | None = None
    what: str = "checkpoint"


def without_weights(sides: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """What lies beside an engine's files and is carried, and what is not: other weights and indexes would mislead."""
    kept = {name: size for name, size in sides.items() if not _WEIGHTS.fullmatch(name)}
    others = sorted(sides.keys() - kept.keys())
    return kept, [f"{name} (none of the engine's files: weights of another layout)" for name in others]


def open_model(path: str | os.PathLike[str]) -> Given:
    """Open a checkpoint (a directory, a hub id) or shards.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`tpshard.checkpoint.open_checkpoint` and
            :func:`tpshard.shards.open_shards`.
    """
    return _of_shards(path) if is_shards(path) else _of_checkpoint(path)


def _of_checkpoint(path: str | os.PathLike[str]) -> Given:
    checkpoint = open_checkpoint(path)
    source = checkpoint.source
    model = model_of(
        Config(source.config), checkpoint.family, table_for(source.config), checkpoint.tensors, checkpoint.matched
    )
    return Given(
        model, checkpoint.placed, source.root, [source.root / file.name for file in source.files],
        {side.path: side.size for side in source.side_files}, source.left_out, checkpoint.warnings,
        source.check_unchanged,
    )  # fmt: skip


def _of_shards(path: str | os.PathLike[str]) -> Given:
    shards = open_shards(path)
    manifest = shards.manifest
    if manifest.is_adapter:
        what = f"{shown(shards.root)} holds shards of an adapter"
        raise UnsupportedError(f"{what}; engines load adapters whole: merge it")
    config = read_config(shards.root, manifest.config_name)
    table = table_for(config)
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    others = [by_name[to]._replace(name=name) for name, to in manifest.aliases.items() if to in by_name]
    matched = match(table, [*manifest.tensors, *others])
    held = {name: dims for name, dims in matched.dims.items() if name in by_name}  # the others are stored nowhere
    matched = replace(matched, dims=held, tied={**matched.tied, **manifest.aliases})
    model = model_of(Config(config), family_of(config), table, manifest.tensors, matched)
    return Given(
        model, shards.placed, shards.root, shards.paths(), {side.path: side.size for side in manifest.side_files}, (),
        (), shards.check_unchanged, manifest.tp_size, shards.expected(), manifest.algorithm, what="shards",
    )  # fmt: skip


def read_config(root: Path, name: str = "config.json") -> dict[str, Any]:
    """The config of a directory.

    Raises:
        DamagedError: there is none, or it is no JSON object.
        StorageError: it cannot be read.
    """
    path = root / name
    if not os.path.lexists(path):
        raise DamagedError(f"{shown(root)} holds no {name}, which says what the model is; copy the model's beside it")
    return parse_config(read_small(path, _MAX_CONFIG_BYTES), shown(path), "Copy the model's config.json again.")
