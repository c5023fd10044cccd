"""A Hugging Face checkpoint held against its table: what split, plan and inspect start from."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .axes import Axis
from .collection import uncollected
from .degrees import axes_of
from .errors import DamagedError
from .header import WeightsFile, build_header
from .layout import Layout, whole_layout
from .manifest import Note
from .matching import Logical, Matched, match
from .planning import Placed, PlacedFile
from .quantisation import formats_of
from .quantisation.composition import pack, unpack
from .registry import family_of, table_for
from .routing import Extent
from .source import Source, open_source
from .sourcefiles import SourceFile


@dataclass(frozen=True)
class Checkpoint:
    """An opened source, its logical tensors in file order, and the rule of every one."""

    source: Source
    family: str
    tensors: tuple[Logical, ...]
    matched: Matched
    axes: dict[Axis, str]  # with the first tensor along each
    placed: Placed
    warnings: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return self.placed.layout

    def notes(self) -> dict[str, Note]:
        """Role and treatment of every tensor, for the manifest."""
        known = {id(rule): Note(rule.role, rule.note) for rule in self.matched.rules.values()}
        unknown = Note("unknown", "copied whole on request: no rule of the table knows it")
        rules = self.matched.rules
        return {t.name: known[id(rules[t.name])] if t.name in rules else unknown for t in self.tensors}

    def aliases(self) -> dict[str, str]:
        """Names that the model or its files have for a tensor that is stored under another name."""
        found = dict(self.matched.aliases)
        for file in self.source.files:
            found |= file.aliases
        return found


@uncollected()
def open_checkpoint(path: str | os.PathLike[str], *, copy_unknown: bool = False) -> Checkpoint:
    """Open a source and match all its tensors against the table of its family.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`open_source` and
            :func:`tpshard.matching.match`.
    """
    return checkpoint_of(open_source(path), copy_unknown=copy_unknown)


def checkpoint_of(source: Source, *, copy_unknown: bool = False) -> Checkpoint:
    """Match all tensors of an opened source against the table of its family.

    Raises:
        UnsupportedError, DamagedError: as :func:`tpshard.matching.match`.
    """
    formats = formats_of(source.config)
    family = family_of(source.config)
    table = table_for(source.config)
    placed = place_source(source)
    tensors = tuple(placed.layout.tensors.values())
    names = [*tensors, *aliased(source, placed.layout)]
    unpacked = unpack(names, formats, table)
    matched, reasons = pack(match(table, unpacked.tensors, copy_unknown=copy_unknown), unpacked)
    require_alike(source, matched)
    warnings = (*source.warnings, *_tie_warnings(matched, source))
    return Checkpoint(source, family, tensors, matched, axes_of(matched.dims) | reasons, placed, warnings)


def aliased(source: Source, layout: Layout) -> list[Logical]:
    """The other names that files have for tensors that they store once, as tensors."""
    return [
        layout.tensors[target]._replace(name=alias) for file in source.files for alias, target in file.aliases.items()
    ]


def require_alike(source: Source, matched: Matched) -> None:
    """Raise DamagedError, naming both, if a tensor is stored once under two names that are cut differently."""
    for file in source.files:
        for alias, target in file.aliases.items():
            if matched.dims[alias] != matched.dims[target]:
                raise DamagedError(
                    f"{file.name} stores {alias} and {target} as one tensor, but they are cut differently; "
                    "save the checkpoint again with separate tensors"
                )


def _tie_warnings(matched: Matched, source: Source) -> list[str]:
    shared = {alias for file in source.files for alias in file.aliases}
    return [
        f"tie_word_embeddings in config.json ties {alias} to {target}, yet both are stored; both are kept as they are"
        for alias, target in matched.tied.items()
        if alias in matched.dims and target in matched.dims and alias not in shared
    ]


@uncollected()
def place_source(source: Source) -> Placed:
    """The layout of the source's files: every tensor whole, where it lies; stale copies left out."""
    tensors: list[Logical] = []
    extents: list[tuple[Extent | None, ...]] = []
    for number, info in source.tensors():
        tensors.append(Logical(info.name, info.dtype, info.shape))
        extents.append((Extent(info.name, number, info.offset, info.nbytes),))
    files = tuple(PlacedFile(file.name, file.size, 0) for file in source.files)
    return Placed(whole_layout(tensors), files, tuple(extents))


def source_files(source: Source) -> tuple[SourceFile, ...]:
    """The weights files as the manifest remembers them, every byte that is not tensor data included.

    A file that also holds a stale tensor is remembered without it, under a header written anew.
    """
    return tuple(
        _rebuilt(file, source.stale[number])
        if source.stale.get(number)
        else SourceFile(file.name, file.size, file.format, file.frame)
        for number, file in enumerate(source.files)
    )


def _rebuilt(file: WeightsFile, stale: frozenset[str]) -> SourceFile:
    kept = [info for info in file.tensors if info.name not in stale]
    header = build_header([(info.name, info.dtype, info.shape) for info in kept], file.metadata or None)
    size = len(header) + sum(info.nbytes for info in kept)
    return SourceFile(file.name, size, "safetensors", ((0, header),), rebuilt=True)
