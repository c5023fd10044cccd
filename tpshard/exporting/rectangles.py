"""Reads a checkpoint whose files say themselves which rectangle of which tensor they hold.

Whatever program wrote it and however it cut: names, whole shapes and cuts are in the files, and config.json tells the
family, whose table has to know them all. A table's module has ``origins_of(metadata, file)``, which gives where in the
whole tensor each of a file's begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import ModuleType
from typing import NamedTuple

from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.header import TensorInfo, WeightsFile
from tpshard.intervals import Run
from tpshard.layout import Cut, Layout, Piece, Stored, cut, whole_cut
from tpshard.matching import Logical
from tpshard.partition import interned
from tpshard.planning import Placed, PlacedFile
from tpshard.routing import Extent
from tpshard.source import natural_key

from .arrange import Arranged
from .chunked import Rectangle, Rectangles


class _Rectangle(NamedTuple):
    """What one file holds of a tensor."""

    file: int
    rank: int
    info: TensorInfo
    origin: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.origin, self.info.shape, strict=True))


def place_rectangles(files: Sequence[tuple[WeightsFile, int]], module: ModuleType) -> Placed:
    """The layout that files (file, number of the rank) say they have.

    Raises:
        DamagedError: a rank is missing, a tensor is not whole, or files contradict each other.
        UnsupportedError: a tensor is cut in more than one way over the ranks.
    """
    ranks = max(rank for _, rank in files) + 1
    missing = sorted(set(range(ranks)) - {rank for _, rank in files})
    if missing:
        lacking = ", ".join(str(rank + module.FIRST) for rank in missing[:8])
        raise DamagedError(f"shard {lacking} of {ranks} is missing; copy all files again")
    held: dict[str, list[_Rectangle]] = {}
    for number, (file, rank) in enumerate(files):
        origins: Mapping[str, tuple[int, ...]] = module.origins_of(file.metadata, file.name)
        for info in file.tensors:
            origin = origins.get(info.name)
            if origin is None or len(origin) != len(info.shape) or any(at < 0 for at in origin):
                raise DamagedError(f"{file.name} does not say where {short(info.name)} begins; copy it again")
            held.setdefault(info.name, []).append(_Rectangle(number, rank, info, origin))
    tensors: dict[str, Logical] = {}
    stored: list[Stored] = []
    extents: list[tuple[Extent | None, ...]] = []
    for name in sorted(held, key=natural_key):
        found = held[name]
        shape = _whole_shape(name, found)
        dtype = found[0].info.dtype
        tensors[name] = Logical(name, dtype, shape)
        if not shape:  # a number has no rectangle: every rank takes it from the files that have it
            by_rank = {one.rank: one for one in found}
            row: list[Extent | None] = [_extent(by_rank.get(rank, found[0])) for rank in range(ranks)]
            stored.append(Stored(name, dtype, (Piece(name, whole_cut((), ranks)),)))
        else:
            stored.append(Stored(name, dtype, (Piece(name, _cut(name, shape, found, ranks)),)))
            places = {one.rank: _extent(one) for one in found}
            row = [places.get(rank) for rank in range(ranks)]
        extents.append(tuple(row))
    placed = tuple(PlacedFile(file.name, file.size, rank) for file, rank in files)
    return Placed(Layout(ranks, tensors, tuple(stored)), placed, tuple(extents))


def spelt_as_in_checkpoints(placed: Placed, renamed: Sequence[tuple[str, str]]) -> Placed:
    """The same with tensors called as in checkpoints, of what files call otherwise: a table's ``rename``, backwards."""
    names: dict[str, str] = {}
    for name in placed.layout.tensors:
        own = name
        for old, new in reversed(renamed):
            if not old.startswith("^"):
                own = own.replace(new, old, 1)
            elif own.startswith(new):
                own = old[1:] + own[len(new) :]
        names[name] = own
    tensors = {names[name]: tensor._replace(name=names[name]) for name, tensor in placed.layout.tensors.items()}
    stored = tuple(
        one._replace(pieces=tuple(Piece(names[name], held) for name, held in one.pieces))
        for one in placed.layout.stored
    )
    return Placed(Layout(placed.layout.size, tensors, stored), placed.files, placed.extents)


def without_copies(placed: Placed, tied: Mapping[str, str]) -> Placed:
    """The same with tied tensors that are stored beside what they are tied to counted as copies of that."""
    layout = placed.layout
    copies = {
        alias: to for alias, to in tied.items()
        if alias in layout.tensors and to in layout.tensors and layout.tensors[alias][1:] == layout.tensors[to][1:]
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name not in copies}
    stored = tuple(
        one._replace(pieces=tuple(Piece(copies.get(name, name), held) for name, held in one.pieces))
        for one in layout.stored
    )
    return Placed(Layout(layout.size, tensors, stored), placed.files, placed.extents)


def rectangles_of(placed: Placed) -> Rectangles:
    """By stored tensor and rank the indices that are there."""
    found: dict[str, list[Rectangle | None]] = {}
    for stored in placed.layout.stored:
        ((_, held),) = stored.pieces
        found[stored.name] = [
            None if shape is None else tuple(
                (dim.ranks[rank][0].start, dim.ranks[rank][0].start + dim.ranks[rank][0].length) if dim.ranks[rank]
                else (0, 0)
                for dim in held.dims
            )
            for rank, shape in enumerate(held.shapes)
        ]  # fmt: skip
    return found


def spelt_as(placed: Placed, arranged: Arranged) -> Placed:
    """The same files as holding another spelling of the model: single experts' matrices where they hold stacks.

    Raises:
        DamagedError: the files hold a tensor that the other spelling does not have.
    """
    rows = {stored.name: row for stored, row in zip(placed.layout.stored, placed.extents, strict=True)}
    unknown = sorted(rows.keys() - {stored.name for stored in arranged.layout.stored}, key=natural_key)
    if unknown:
        raise DamagedError(f"the files hold {short(unknown[0])}, which the other model does not have")
    return Placed(arranged.layout, placed.files, tuple(rows[stored.name] for stored in arranged.layout.stored))


def _extent(one: _Rectangle) -> Extent:
    return Extent(one.info.name, one.file, one.info.offset, one.info.nbytes)


def _whole_shape(name: str, found: Sequence[_Rectangle]) -> tuple[int, ...]:
    """The whole tensor's shape, covered by the rectangles without a hole.

    Raises:
        DamagedError: they differ in dtype or number of dimensions, overlap, or leave a part out.
    """
    if len({(one.info.dtype, len(one.origin)) for one in found}) > 1:
        raise DamagedError(f"the parts of {short(name)} have several dtypes or numbers of dimensions")
    shape = tuple(max(stops) for stops in zip(*[one.stop for one in found], strict=True))
    distinct = {(one.origin, one.stop) for one in found if prod(one.info.shape)}
    covered = sum(prod(b - a for a, b in zip(origin, stop, strict=True)) for origin, stop in distinct)
    if covered != prod(shape) and shape:
        raise DamagedError(
            f"the files hold {covered:,} elements of {short(name)}, whose parts reach to {list(shape)} "
            f"({prod(shape):,} elements); a shard is missing or of another checkpoint"
        )
    return shape


def _cut(name: str, shape: tuple[int, ...], found: Sequence[_Rectangle], ranks: int) -> Cut:
    """One rectangle a rank, or none."""
    of_rank: dict[int, _Rectangle] = {}
    for one in found:
        if of_rank.setdefault(one.rank, one) is not one:
            raise UnsupportedError(
                f"{short(name)} has several parts in the files of one rank; consolidate the checkpoint with torch first"
            )
    dims = []
    for d, extent in enumerate(shape):
        held = [of_rank.get(rank) for rank in range(ranks)]
        lengths = [(one.origin[d], one.info.shape[d]) if one is not None else (0, 0) for one in held]
        runs = [(Run(start, length),) if length else () for start, length in lengths]
        dims.append(interned(extent, tuple(runs)))
    return cut(tuple(dims), ranks)
