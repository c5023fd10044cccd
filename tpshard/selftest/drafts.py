"""Shards cut by a plan that is wrong: their bytes, their manifest and its digests all agree with it.

Written apart from the product's mover, index by index. Cuts that the axes of a manifest can't express
(ranges that overlap, heads in another order) exist in memory only; what can be written is read back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tpshard import manifest as manifests
from tpshard.axes import Axis, Dim, Heads, Padded, Segment, Units
from tpshard.checkpoint import place_source, source_files
from tpshard.config import Config
from tpshard.digest import digest_of
from tpshard.errors import LayoutError
from tpshard.intervals import Bounds, Runs
from tpshard.layout import Cut, Layout, Piece, Stored, cut, cut_layout
from tpshard.manifest import Manifest, Note, Origin, RankFile, SideFile
from tpshard.matching import match
from tpshard.opened import open_weights
from tpshard.partition import interned, partition
from tpshard.place import place_native, sealed
from tpshard.registry import table_for
from tpshard.shards import Shards, open_shards
from tpshard.source import Source, open_source
from tpshard.table import Table

from .scratch import NotHereError, data_of, indices, layer_of, original

ALGORITHM = "xxh3_128"


@dataclass(frozen=True)
class Dealt(Axis):
    """An axis whose units lie on the ranks as ``ranks`` says: anywhere, twice, or nowhere."""

    count: int
    ranks: tuple[Bounds, ...]

    kind = "dealt"

    def views(self) -> dict[str, int]:
        return {"unit": self.count}

    def parts(self) -> int:
        return len(self.ranks)

    def bounds(self, view: str, tp_size: int) -> tuple[Bounds, ...]:
        return self.ranks

    def each(self, size: int = 1) -> Dim:
        return Dim((Segment(self, "unit", 0, self.count, size),))


class Draft:
    """A plan in the making: right at first.

    Args:
        source: the directory of the checkpoint.
        tp_size: the degree.
        table: the table to start from; the family's own unless given.
    """

    def __init__(self, source: Path, tp_size: int, table: Callable[[Config], Table] | None = None) -> None:
        self.source: Source = open_source(source)
        self.tp_size = tp_size
        self.config = self.source.config
        self.placed = place_source(self.source)
        self.tensors = tuple(self.placed.layout.tensors.values())
        rules = table_for(self.config) if table is None else table(Config(self.config))
        matched = match(rules, self.tensors, copy_unknown=table is not None)
        self.family = str(self.config["model_type"])
        self.dims: dict[str, tuple[Dim, ...]] = dict(matched.dims)
        self.notes = {
            t.name: Note(r.role, r.note) if (r := matched.rules.get(t.name)) is not None else Note("norm")
            for t in self.tensors
        }
        self.aliases = dict(matched.aliases)
        self.runs: dict[str, dict[int, list[Runs]]] = {}

    def names(self, *roles: str) -> list[str]:
        """The tensors of these roles in the last layer that has any."""
        names = [name for name, note in self.notes.items() if note.role in roles]
        if not names:
            raise NotHereError(f"no tensor of role {' or '.join(roles)}")
        return [name for name in names if layer_of(name) == layer_of(names[-1])]

    def name(self, *roles: str) -> str:
        return self.names(*roles)[-1]

    def axis(self, name: str) -> Axis:
        return next(axis for dim in self.dims[name] for axis in dim.axes)

    def heads(self, name: str) -> Heads:
        axis = self.axis(name)
        if not isinstance(axis, Heads):
            raise NotHereError(f"{name} has no grouped heads")
        return axis

    def cut_dim(self, name: str) -> int:
        return next(number for number, dim in enumerate(self.dims[name]) if dim.axes)

    def cut_along(self, name: str, dim: Dim) -> None:
        """Cut a tensor, where it is cut, along this dimension instead."""
        at = self.cut_dim(name)
        if dim.extent != self.dims[name][at].extent:
            raise NotHereError(f"{name} has {self.dims[name][at].extent} indices, not {dim.extent}")
        self.dims[name] = (*self.dims[name][:at], dim, *self.dims[name][at + 1 :])

    def keep_whole(self, name: str) -> None:
        self.dims[name] = tuple(_whole(dim.extent) for dim in self.dims[name])

    def reorder(self, name: str, by: Callable[[int, Runs], Runs]) -> None:
        """Give the runs of the cut dimension another order on every rank."""
        at = self.cut_dim(name)
        right = partition(self.dims[name][at], self.tp_size)
        fresh = [by(rank, runs) for rank, runs in enumerate(right.ranks)]
        if tuple(fresh) == right.ranks:
            raise NotHereError("another order is the same here")
        self.runs[name] = {at: fresh}

    def note(self, name: str, text: str) -> None:
        self.notes[name] = replace(self.notes[name], text=text)

    # -- writing --------------------------------------------------------------------------------

    def layout(self) -> Layout:
        layout = cut_layout(self.tensors, self.dims, self.tp_size)
        if not self.runs:
            return layout
        return Layout(layout.size, layout.tensors, tuple(self._with_runs(stored) for stored in layout.stored))

    def _with_runs(self, stored: Stored) -> Stored:
        if stored.name not in self.runs:
            return stored
        parts = list(stored.pieces[0].cut.dims)
        for at, runs in self.runs[stored.name].items():
            parts[at] = interned(parts[at].extent, tuple(runs))
        return Stored(stored.name, stored.dtype, (Piece(stored.name, cut(tuple(parts), self.tp_size)),))

    def write(self, directory: Path) -> Shards:
        """Cut as the draft says, and open what was written."""
        directory.mkdir(parents=True)
        layout = self.layout()
        headed = place_native(layout)
        root = self.source.root
        digest = digest_of(ALGORITHM)
        data = {t.name: original(root, t.name) for t in self.tensors}
        origin = Origin(
            self.source.label, self.family, hashlib.sha256(self.source.config_raw).hexdigest(),
            source_files(self.source), None, tuple(digest(memoryview(data_of(data[t.name]))) for t in self.tensors),
        )  # fmt: skip
        content = origin.content(self.tensors)
        buffers = [bytearray(file.size) for file in headed.placed.files]
        digests: list[list[tuple[int, str]]] = [[] for _ in buffers]
        for buffer, header in zip(buffers, headed.headers, strict=True):
            buffer[: len(header)] = sealed(header, content)
        for stored, row in zip(layout.stored, headed.placed.extents, strict=True):
            for rank, extent in enumerate(row):
                if extent is not None:
                    raw = data_of(taken(data[stored.name], stored.pieces[0].cut, rank))
                    buffers[extent.file][extent.offset : extent.offset + extent.nbytes] = raw
                    digests[extent.file].append((extent.offset, digest(memoryview(raw))))
        for file, buffer in zip(headed.placed.files, buffers, strict=True):
            (directory / file.name).write_bytes(buffer)
        sides = tuple(self._carried(directory, side.path) for side in self.source.side_files)
        files = tuple(
            RankFile(file.name, file.rank, file.size, tuple(text for _, text in sorted(found)))
            for file, found in zip(headed.placed.files, digests, strict=True)
        )
        manifest = Manifest(
            self.tp_size, self.tensors, self.dims, self.notes, self.aliases, origin, sides, files, ALGORITHM, 0
        )
        if not self.runs and all(_is_writable(axis) for dims in self.dims.values() for d in dims for axis in d.axes):
            (directory / manifests.NAME).write_bytes(manifests.dumped(_named_apart(manifest)))
            return open_shards(directory)
        vars(manifest)["layout"] = layout  # what the manifest's dimensions cannot say
        opened = [open_weights(directory, file.name, "safetensors") for file in files]
        return Shards(directory, manifest, headed.placed, tuple(stamp for _, stamp in opened))

    def _carried(self, directory: Path, path: str) -> SideFile:
        raw = (self.source.root / path).read_bytes()
        (directory / path).write_bytes(raw)
        return SideFile(path, len(raw), hashlib.sha256(raw).hexdigest())


def _whole(extent: int) -> Dim:
    return Dim((Segment(None, "", 0, 1, extent),))


def _is_writable(axis: Axis) -> bool:
    return isinstance(axis, (Units, Heads, Padded))


def _named_apart(manifest: Manifest) -> Manifest:
    """The manifest, whose axes must have different names."""
    names: dict[str, Axis] = {}
    for dims in manifest.dims.values():
        for dim in dims:
            for axis in dim.axes:
                if names.setdefault(axis.name, axis) != axis:
                    raise LayoutError(f"two axes of the draft are named {axis.name}")
    return manifest


def taken(tensor: torch.Tensor, how: Cut, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor, index by index; padding is zero."""
    for dim, part in enumerate(how.dims):
        wanted = indices(part.ranks[rank])
        safe = torch.tensor([max(index, 0) for index in wanted], dtype=torch.long)
        tensor = tensor.index_select(dim, safe)
        padding = [at for at, index in enumerate(wanted) if index < 0]
        if padding:
            tensor.index_fill_(dim, torch.tensor(padding), 0)
    return tensor.contiguous()

