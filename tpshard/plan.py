"""Joins two layouts into a plan: pure data that says which bytes of which file go where.

split, merge, reshard and export are one program with different ends: each names two layouts. A plan
is the same on every run and for any number of threads, can be printed and compared, and has been
proven when :func:`build_plan` returns it: every byte of every target tensor is written exactly once,
and every byte of every source tensor is copied, compared with a copy, or checked to be zero padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from .errors import LayoutError
from .header import DTYPE_BITS
from .join import Holder, StripShape, holders_of, joined_strips
from .layout import Layout, Stored
from .prove import prove
from .routing import Extent, Route, Span, Strip, Task


class PlacedFile(NamedTuple):
    """A file of a layout: its name in the checkpoint, its size in bytes, the rank that it belongs to."""

    name: str
    size: int
    rank: int


@dataclass(frozen=True)
class Placed:
    """A layout with a place in a file for every stored tensor: ``extents[stored][rank]``."""

    layout: Layout
    files: tuple[PlacedFile, ...]
    extents: tuple[tuple[Extent | None, ...], ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What to read, what to write, and how the bytes travel between the two."""

    source: Placed
    target: Placed
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]
    tasks: tuple[Task, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 over the text of the plan, hex: equal plans and only those have equal digests."""
        state = hashlib.sha256()
        for line in self.text():
            state.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return state.hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def text(self) -> Iterator[str]:
        """The plan as lines of text, one a strip; a route is written out where it first appears."""
        routes: dict[int, int] = {}
        for side, files in (("source", self.source.files), ("target", self.target.files)):
            for number, file in enumerate(files):
                yield f"{side} {number} {file.name} {file.size}"
        for side, extents in (("read", self.reads), ("write", self.writes)):
            for number, extent in enumerate(extents):
                yield f"{side} {number} {extent.tensor} file {extent.file} at {extent.offset} bytes {extent.nbytes}"
        for task in self.tasks:
            for strip in task.strips:
                if id(strip.route) not in routes:
                    routes[id(strip.route)] = len(routes)
                    yield f"route {len(routes) - 1} {_route_text(strip.route)}"
                ends = " ".join([f"{s.extent}+{s.at}x{s.width}" for s in strip.sources])
                aims = " ".join([f"{t.extent}+{t.at}x{t.width}" for t in strip.targets])
                yield f"{task.tensor}: {strip.rows} rows {ends} -> {aims} by route {routes[id(strip.route)]}"


def _route_text(route: Route) -> str:
    return " ".join(f"{kind}{[tuple(part) for part in parts]}" for kind, parts in route._asdict().items())


@lru_cache(maxsize=65536)
def stored_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape.

    Raises:
        LayoutError: it would end inside a byte (4-bit and 6-bit dtypes).
    """
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise LayoutError(f"{dtype} {list(shape)} is not a whole number of bytes; choose a degree that cuts on bytes")
    return bits // 8


def nbytes_of(stored: Stored, rank: int) -> int | None:
    """Bytes of a stored tensor on a rank, None where the rank does not hold it."""
    shape = stored.shape(rank)
    return None if shape is None else stored_bytes(shape, stored.dtype)


class _Join(NamedTuple):
    """The strips of one geometry and who its holders are: (number of the stored tensor, rank)."""

    sources: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]
    strips: tuple[StripShape, ...]


_Pieces = Sequence[tuple[int, int]]  # (stored tensor, piece of it) that hold one logical tensor


def build_plan(source: Placed, target: Placed) -> Plan:
    """Join two placed layouts of the same logical tensors, and prove the result.

    Raises:
        LayoutError: the layouts do not describe the same tensors, an index has no source or is used by
            nobody, or a stored tensor would not be written exactly once.
    """
    if source.layout.tensors.keys() != target.layout.tensors.keys():
        odd = sorted(source.layout.tensors.keys() ^ target.layout.tensors.keys())
        raise LayoutError(f"only one of the layouts holds {', '.join(odd[:5])}")
    reads, read_ids = _numbered(source)
    writes, write_ids = _numbered(target)
    froms, tos = _pieces_of(source.layout), _pieces_of(target.layout)
    joins: dict[tuple[object, ...], _Join] = {}
    strips: dict[str, tuple[Strip, ...]] = {}
    for name, logical in target.layout.tensors.items():
        here, there = froms[name], tos[name]
        key = (
            logical.dtype,
            tuple([_geometry(source.layout.stored[s], p) for s, p in here]),
            tuple([_geometry(target.layout.stored[s], p) for s, p in there]),
        )
        join = joins.get(key)
        if join is None:
            join = joins[key] = _joined(name, source.layout, target.layout, here, there)
        ends = [read_ids[here[n][0]][rank] for n, rank in join.sources]
        aims = [write_ids[there[n][0]][rank] for n, rank in join.targets]
        strips[name] = tuple(
            [
                Strip(
                    shape.rows,
                    tuple([Span(ends[h], at, width) for h, at, width in shape.sources]),
                    tuple([Span(aims[h], at, width) for h, at, width in shape.targets]),
                    shape.route,
                )
                for shape in join.strips
            ]
        )
    tasks = _tasks(source.layout, target.layout, read_ids, write_ids, froms, tos, strips)
    prove(tasks, reads, writes)
    return Plan(source, target, reads, writes, tasks)


def _geometry(stored: Stored, piece: int) -> object:
    """What the strips of a piece depend on. Cuts are interned and live as long as their layout."""
    if len(stored.pieces) == 1:
        return id(stored.pieces[0].cut)
    return (piece, stored.dim, tuple(id(p.cut) for p in stored.pieces))


def _joined(name: str, source: Layout, target: Layout, here: _Pieces, there: _Pieces) -> _Join:
    def holders(layout: Layout, pieces: _Pieces) -> tuple[list[tuple[int, int]], list[Holder]]:
        places: list[tuple[int, int]] = []
        found: list[Holder] = []
        for number, (stored, piece) in enumerate(pieces):
            for rank, holder in holders_of(layout.stored[stored], piece, layout.size):
                places.append((number, rank))
                found.append(holder)
        return places, found

    logical = target.tensors[name]
    for layout, pieces in ((source, here), (target, there)):
        for stored, piece in pieces:
            part = layout.stored[stored].pieces[piece].cut
            if part.shape != logical.shape or layout.stored[stored].dtype != logical.dtype:
                raise LayoutError(
                    f"{name}: {layout.stored[stored].dtype} {list(part.shape)} and {logical.dtype} "
                    f"{list(logical.shape)} cannot be joined by copying"
                )
    sources, froms = holders(source, here)
    targets, tos = holders(target, there)
    try:
        strips = joined_strips(logical.shape, DTYPE_BITS[logical.dtype], tuple(froms), tuple(tos))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    return _Join(tuple(sources), tuple(targets), strips)


def _numbered(placed: Placed) -> tuple[tuple[Extent, ...], list[list[int]]]:
    """All extents in one sequence, and the number of each by stored tensor and rank (-1: not held)."""
    flat: list[Extent] = []
    ids: list[list[int]] = []
    for row in placed.extents:
        numbers = []
        for extent in row:
            numbers.append(-1 if extent is None else len(flat))
            if extent is not None:
                flat.append(extent)
        ids.append(numbers)
    return tuple(flat), ids


def _pieces_of(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in layout.tensors}
    for number, stored in enumerate(layout.stored):
        for at, piece in enumerate(stored.pieces):
            if piece.tensor not in pieces:
                raise LayoutError(f"{stored.name} stores {piece.tensor}, which is no tensor of the layout")
            pieces[piece.tensor].append((number, at))
    for name, found in pieces.items():
        if not found:
            raise LayoutError(f"{name} is a tensor of the layout and stored nowhere")
    return pieces


def _tasks(
    source: Layout,
    target: Layout,
    read_ids: list[list[int]],
    write_ids: list[list[int]],
    froms: Mapping[str, _Pieces],
    tos: Mapping[str, _Pieces],
    strips: Mapping[str, tuple[Strip, ...]],
) -> tuple[Task, ...]:
    """One task for each set of logical tensors that share stored tensors, in the target's order."""
    if len(source.stored) == len(target.stored) == len(strips):
        groups = [[name] for name in strips]
    else:
        groups = _connected(strips, froms, tos)
    tasks = []
    for names in groups:
        reads = dict.fromkeys(s for name in names for s, _ in froms[name])
        writes = dict.fromkeys(s for name in names for s, _ in tos[name])
        tasks.append(
            Task(
                names[0],
                strips[names[0]] if len(names) == 1 else tuple(s for name in names for s in strips[name]),
                tuple([n for s in reads for n in read_ids[s] if n >= 0]),
                tuple([n for s in writes for n in write_ids[s] if n >= 0]),
            )
        )
    return tuple(tasks)


def _connected(names: Mapping[str, object], froms: Mapping[str, _Pieces], tos: Mapping[str, _Pieces]) -> list[list[str]]:
    """Logical tensors grouped by the stored tensors that they share, on either side."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root(key: tuple[int, int]) -> tuple[int, int]:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for name in names:
        first, *rest = [(0, s) for s, _ in froms[name]] + [(1, s) for s, _ in tos[name]]
        for key in rest:
            parent[root(key)] = root(first)
    groups: dict[tuple[int, int], list[str]] = {}
    for name in names:
        groups.setdefault(root((0, froms[name][0][0])), []).append(name)
    return list(groups.values())
