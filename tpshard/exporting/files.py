"""Files of an engine's layout: which rank's tensors lie in which file, where, and under which header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import PurePosixPath
from typing import NamedTuple

from tpshard.collection import uncollected
from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.header import Frame, WeightsFile, build_header
from tpshard.place import ALIGN
from tpshard.planning import Placed, PlacedFile, stored_bytes
from tpshard.routing import Extent

from .arrange import Arranged, Shapes
from .enginetable import DISTCP, TORCH, EngineTable
from .grid import Grid, Rank
from .torchcontainer import TensorSpec, torch_file

RANK, LAYOUT = "tpshard.rank", "tpshard.layout"  # what a file says of itself, beside its tensors


class _Held(NamedTuple):
    """A tensor of a rank's file; ``number`` -1 is a constant's."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: bytes = b""


@dataclass(frozen=True)
class EngineFiles:
    """A placed layout, by file every byte that is not copied (headers, constants), and small files beside them."""

    placed: Placed
    frames: Mapping[str, Frame]
    small: Mapping[str, bytes] = field(default_factory=dict)


def held_by(arranged: Arranged, table: EngineTable, rank: int) -> list[_Held]:
    """What a rank's files hold, in their order."""
    held = []
    for number, (stored, shapes) in enumerate(zip(arranged.layout.stored, arranged.declared, strict=True)):
        shape = shapes[rank]
        if shape is not None:
            held.append(_Held(number, stored.name, stored.dtype, shape, stored_bytes(shape, stored.dtype)))
    held += [_Held(-1, f.name, f.dtype, f.shape, len(f.data), f.data) for f in arranged.fixed if rank in f.ranks]
    return sorted(held, key=lambda tensor: tensor.name) if table.sorted_names else held


def _held_by_all(arranged: Arranged, table: EngineTable) -> list[list[_Held]]:
    """What the files of every rank hold; tensors of one cut share the list of those ranks."""
    every: list[list[_Held]] = [[] for _ in arranged.grid.ranks]
    known: dict[tuple[int, str], tuple[Shapes, list[tuple[int, tuple[int, ...], int]]]] = {}
    for number, (stored, shapes) in enumerate(zip(arranged.layout.stored, arranged.declared, strict=True)):
        key = (id(shapes), stored.dtype)
        if key not in known:
            there = [
                (rank, shape, stored_bytes(shape, stored.dtype))
                for rank, shape in enumerate(shapes) if shape is not None
            ]  # fmt: skip
            known[key] = (shapes, there)  # holding the shapes keeps their id from being used again
        for rank, shape, nbytes in known[key][1]:
            every[rank].append(_Held(number, stored.name, stored.dtype, shape, nbytes))
    for f in arranged.fixed:
        for rank in f.ranks:
            every[rank].append(_Held(-1, f.name, f.dtype, f.shape, len(f.data), f.data))
    if table.sorted_names:
        for held in every:
            held.sort(key=lambda tensor: tensor.name)
    return every


@uncollected()
def place_engine(arranged: Arranged, table: EngineTable, part_bytes: int | None = None) -> EngineFiles:
    """The files of all ranks, each in parts of at most ``part_bytes`` (None: as the engine has it; 0: one file).

    Raises:
        UnsupportedError: two ranks would write one file, or the container has no type for a dtype.
    """
    if table.container == DISTCP:
        from .dcp import place_distcp

        return place_distcp(arranged, table)
    limit = table.part_bytes if part_bytes is None else part_bytes
    grid, layout = arranged.grid, arranged.layout
    rows: list[list[Extent | None]] = [[None] * layout.size for _ in layout.stored]
    files: list[PlacedFile] = []
    frames: dict[str, Frame] = {}
    every = _held_by_all(arranged, table)
    for number, rank in enumerate(grid.ranks):
        parts = _parts(every[number], limit)
        for part, members in enumerate(parts):
            name = table.file_name(grid, rank, part, len(parts))
            if name in frames:
                raise UnsupportedError(f"two ranks would write {name}; name the files otherwise")
            if table.container == TORCH:
                frame, offsets, size = _in_torch_file(table, grid, rank, name, members)
            else:
                frame, offsets, size = _in_safetensors(_metadata(arranged, table, number, members), members)
            for tensor, at in zip(members, offsets, strict=True):
                if tensor.number < 0:
                    frame.append((at, tensor.data))
                else:
                    rows[tensor.number][number] = Extent(tensor.name, len(files), at, tensor.nbytes)
            files.append(PlacedFile(name, size, number))
            frames[name] = tuple(sorted(frame))
    return EngineFiles(Placed(layout, tuple(files), frozen(rows)), frames)


def frozen(rows: list[list[Extent | None]]) -> tuple[tuple[Extent | None, ...], ...]:
    """The rows as tuples; the list is used up, as both at once would take the room of both."""
    rows.reverse()
    return tuple([tuple(rows.pop()) for _ in range(len(rows))])


_Container = tuple[list[tuple[int, bytes]], Sequence[int], int]
"""What is known of a file, where its tensors lie, and its size in bytes."""


def _in_safetensors(metadata: dict[str, str], members: Sequence[_Held]) -> _Container:
    header = build_header([(h.name, h.dtype, h.shape) for h in members], metadata, ALIGN)
    *offsets, size = accumulate((h.nbytes for h in members), initial=len(header))
    return [(0, header)], offsets, size


def _in_torch_file(table: EngineTable, grid: Grid, rank: Rank, name: str, members: Sequence[_Held]) -> _Container:
    around = table.around(grid, rank) if table.around is not None else {}
    specs = [TensorSpec(h.name, h.dtype, h.shape, h.nbytes) for h in members]
    made = torch_file(specs, PurePosixPath(name).stem, within=table.within, around=around)
    return list(made.frame), made.offsets, made.size


def _metadata(arranged: Arranged, table: EngineTable, rank: int, members: Sequence[_Held]) -> dict[str, str]:
    """What the header of a rank's file says beside its tensors."""
    metadata = dict(table.metadata)
    if table.described is not None:
        metadata |= table.described({held.name: arranged.origins[held.number][rank] or () for held in members})
    else:  # no engine looks at these: a file in another's place is known by them
        metadata |= {RANK: str(rank), LAYOUT: arranged.key}
    return metadata


def _parts(held: Sequence[_Held], limit: int) -> list[list[_Held]]:
    """Tensors in order, a new file where one would outgrow the limit; a larger tensor has its own."""
    parts: list[list[_Held]] = [[]]
    filled = 0
    for tensor in held:
        if limit and parts[-1] and filled + tensor.nbytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.nbytes
    return parts


def place_found(arranged: Arranged, files: Sequence[tuple[WeightsFile, int]], engine: str) -> Placed:
    """The layout where files that exist hold it: ``files`` are (file, number of the rank).

    Raises:
        DamagedError: a tensor is missing, is there twice, has another shape or dtype, or has no place in the layout.
    """
    layout = arranged.layout
    numbers: dict[tuple[str, int], int] = {}
    for number, (stored, shapes) in enumerate(zip(layout.stored, arranged.declared, strict=True)):
        for rank, shape in enumerate(shapes):
            if shape is not None:
                numbers[stored.name, rank] = number
    fixed = {(constant.name, rank): constant for constant in arranged.fixed for rank in constant.ranks}
    rows: list[list[Extent | None]] = [[None] * layout.size for _ in layout.stored]
    for at, (file, rank) in enumerate(files):
        for info in file.tensors:
            if (info.name, rank) in fixed:
                continue
            found = numbers.get((info.name, rank))
            if found is None:
                raise DamagedError(
                    f"{file.name} holds {short(info.name)}, which {engine}'s layout of this model does not have on "
                    "that rank; the files are of another model, another version of the engine, or another rank"
                )
            shape, dtype = arranged.declared[found][rank], layout.stored[found].dtype
            if (info.shape, info.dtype) != (shape, dtype):
                raise DamagedError(
                    f"{file.name} holds {short(info.name)} as {info.dtype} {list(info.shape)} where {engine} has "
                    f"{dtype} {list(shape or ())} at this degree; the files are of another degree or model"
                )
            if rows[found][rank] is not None:
                other = "which another file of the rank holds as well"
                raise DamagedError(f"{file.name} holds {short(info.name)}, {other}; remove the one that is stale")
            rows[found][rank] = Extent(info.name, at, info.offset, info.nbytes)
    for (name, rank), number in numbers.items():
        if rows[number][rank] is None:
            raise DamagedError(f"{short(name)} is missing from the files of rank {rank}; copy them again")
    placed = tuple(PlacedFile(file.name, file.size, rank) for file, rank in files)
    return Placed(layout, placed, tuple(map(tuple, rows)))


def without(placed: Placed, dropped: Mapping[str, str]) -> Placed:
    """The placed layout of a checkpoint without some of its logical tensors.

    Raises:
        UnsupportedError: one of them is stored together with another that stays.
    """
    if not dropped:
        return placed
    layout = placed.layout
    stored, extents = [], []
    for found, row in zip(layout.stored, placed.extents, strict=True):
        gone = [piece.tensor in dropped for piece in found.pieces]
        if any(gone) and not all(gone):
            kept = "holds tensors that the target keeps and others that it does not"
            raise UnsupportedError(f"{short(found.name)} {kept}; merge the source first")
        if not any(gone):
            stored.append(found)
            extents.append(row)
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name not in dropped}
    return Placed(type(layout)(layout.size, tensors, tuple(stored)), placed.files, tuple(extents))
