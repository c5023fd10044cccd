"""The base model of an adapter: which tensor an adapter's name means there, and how that is cut.

The base is a checkpoint, shards of one, or no more than its config.json; a hub id is read for its config alone.
Adapters name modules as the model has them in memory, checkpoints often otherwise (without a prefix, experts
apart and not stacked). Both are names of one rule of the family's table, by which they are brought together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .axes import Axis, Dim, Segment, replicated
from .checkpoint import open_checkpoint
from .config import CONFIG
from .degrees import axes_of
from .errors import UnsupportedError, UsageError
from .listing import is_weights, list_directory, shown
from .matching import Known, known_names
from .opened import read_small
from .registry import family_of, table_for
from .shards import is_shards, read_manifest
from .strictjson import parse_config
from .table import Table

_LARGEST_CONFIG = 16 << 20  # bytes


class Target(NamedTuple):
    """A tensor of the base; a dimension of which no config tells the length is None."""

    name: str
    dims: tuple[Dim | None, ...]
    role: str
    note: str

    @property
    def shape(self) -> str:
        """The shape in words: ``[64, 48]``, with ``?`` where it is not known."""
        return f"[{', '.join('?' if dim is None else str(dim.extent) for dim in self.dims)}]"


@dataclass(frozen=True)
class Base:
    """A base model: its table, and the dimensions of its tensors where it has any."""

    label: str
    family: str
    table: Table
    stored: Mapping[str, tuple[Dim, ...]]
    quantised: bool = False  # matrices are stored as other tensors, which may demand steps of the axes

    def targets(self, names: Iterable[str]) -> dict[str, Target]:
        """Those of the names that are tensors of this model."""
        held = {_key(known): self.stored[name] for name, known in known_names(self.table, self.stored).items()}
        axes = {axis.name: axis for axis in axes_of(self.stored)}
        found = {}
        for name, known in known_names(self.table, dict.fromkeys(names)).items():
            dims = held.get(_key(known))
            if dims is not None or self._may_be_absent(known):
                found[name] = Target(name, dims or _of_rule(known, axes), known.rule.role, known.rule.note)
        return found

    def _may_be_absent(self, known: Known) -> bool:
        """Whether the model can have a tensor that its files do not hold: optional, tied, or stored in another form."""
        rule = known.rule
        tied = any((tie.alias, tie.stack) == (rule.name, rule.stack) for tie in self.table.tied)
        return not self.stored or self.quantised or rule.optional or tied or bool(rule.block)


def _key(known: Known) -> tuple[int, tuple[int, ...]]:
    return id(known.rule), known.numbers


def _of_rule(known: Known, axes: Mapping[str, Axis]) -> tuple[Dim | None, ...]:
    """The dimensions that the table gives, along the axes of these names as the base's own tensors have them."""

    def here(segment: Segment) -> Segment:
        return segment if segment.axis is None else segment._replace(axis=axes.get(segment.axis.name, segment.axis))

    return tuple(
        Dim(tuple(map(here, dim.segments))) if isinstance(dim, Dim) else None if dim is None else replicated(dim)
        for dim in known.rule.dims
    )


def open_base(base: str | os.PathLike[str]) -> Base:
    """Open the base model of an adapter.

    Raises:
        UsageError: it is an adapter itself, or nothing is there.
        UnsupportedError, DamagedError, StorageError: as :func:`tpshard.checkpoint.open_checkpoint`.
    """
    if is_shards(base):
        root = Path(base)
        manifest = read_manifest(root)
        if manifest.is_adapter:
            raise UsageError(f"{shown(root)} holds the shards of an adapter; name the base model with --base")
        return _of(shown(root), _config(root), manifest.dims)
    root = Path(base)
    if not os.path.exists(root):
        from . import hub

        if hub.looks_like_id(os.fspath(base)):
            return _of(os.fspath(base), _config(hub.resolve(os.fspath(base), only=(CONFIG,))), {})
    elif os.path.isdir(root):
        listing = list_directory(root)
        if CONFIG in listing.sizes and not any("/" not in path and is_weights(path) for path in listing.sizes):
            return _of(shown(root), _config(root), {})
    checkpoint = open_checkpoint(base)
    return _of(shown(root), checkpoint.source.config, checkpoint.matched.dims)


def _config(root: Path) -> dict[str, Any]:
    path = root / CONFIG
    return parse_config(read_small(path, _LARGEST_CONFIG), shown(path), "Download or copy the file again.")


def _of(label: str, config: Mapping[str, Any], stored: Mapping[str, tuple[Dim, ...]]) -> Base:
    quantised = config.get("quantization_config") is not None
    if quantised and not stored:
        raise UnsupportedError(
            f"{label}: config.json declares quantisation, and how such a model is cut depends on its weights; name a "
            "base that has them, or the model in its original precision"
        )
    return Base(label, family_of(config), table_for(config), stored, quantised)
