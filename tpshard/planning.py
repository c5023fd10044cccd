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

from .collection import uncollected
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
                ends = " ".join([f"{task.reads[s.extent]}+{s.at}x{s.width}" for s in strip.sources])
                aims = " ".join([f"{task.writes[t.extent]}+{t.at}x{t.width}" for t in strip.targets])
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


@lru_cache(maxsize=65536)
def sizes_of(shapes: tuple[tuple[int, ...] | None, ...], dtype: str) -> tuple[int | None, ...]:
    """Bytes of a stored tensor on every rank, None where a rank does not hold it; raises as :func:`stored_bytes`."""
    return tuple([None if shape is None else stored_bytes(shape, dtype) for shape in shapes])


class _Join(NamedTuple):
    """The strips of one geometry and who their ends are: (number of the stored tensor, rank)."""

    sources: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]
    strips: tuple[StripShape, ...]


_Pieces = Sequence[tuple[int, int]]  # (stored tensor, piece of it) that hold one logical tensor


@uncollected()
def build_plan(source: Placed, target: Placed) -> Plan:
    """Join two placed layouts of the same logical tensors, and prove the result.

    Raises:
        LayoutError: the layouts do not describe the same tensors, an index has no source or is used by
            nobody, or a stored tensor would not be written exactly once.
    """
    if source.layout.tensors.keys() != target.layout.tensors.keys():
        odd = sorted(source.layout.tensors.keys() ^ target.layout.tensors.keys())
        raise LayoutError(f"only one of the layouts holds {', '.join(odd[:5])}")
    reads, writes = _numbered(source), _numbered(target)
    froms, tos = _pieces_of(source.layout), _pieces_of(target.layout)
    joins: dict[tuple[object, ...], _Join] = {}
    joined: dict[str, _Join] = {}
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
        joined[name] = join
    tasks = _tasks(joined, froms, tos, reads, writes)
    prove(tasks, reads.extents, writes.extents)
    return Plan(source, target, reads.extents, writes.extents, tasks)


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


class _Numbered(NamedTuple):
    """All extents of a placed layout in one sequence, and where those of each stored tensor stand in it."""

    extents: tuple[Extent, ...]
    ids: list[tuple[int, ...]]  # by stored tensor and rank; -1: not held
    held: list[tuple[int, ...]]  # by stored tensor, without the ranks that do not hold it


def _numbered(placed: Placed) -> _Numbered:
    flat: list[Extent] = []
    ids: list[tuple[int, ...]] = []
    every: list[tuple[int, ...]] = []
    for row in placed.extents:
        first = len(flat)
        flat += [extent for extent in row if extent is not None]
        held = tuple(range(first, len(flat)))
        every.append(held)
        if len(held) < len(row):
            numbers = iter(held)
            ids.append(tuple([-1 if extent is None else next(numbers) for extent in row]))
        else:
            ids.append(held)
    return _Numbered(tuple(flat), ids, every)


def _pieces_of(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in layout.tensors}
    for number, stored in enumerate(layout.stored):
        if not stored.pieces:
            raise LayoutError(f"{stored.name} stores no tensor")
        for at, piece in enumerate(stored.pieces):
            if piece.tensor not in pieces:
                raise LayoutError(f"{stored.name} stores {piece.tensor}, which is no tensor of the layout")
            pieces[piece.tensor].append((number, at))
    for name, found in pieces.items():
        if not found:
            raise LayoutError(f"{name} is a tensor of the layout and stored nowhere")
    return pieces


def _tasks(
    joined: Mapping[str, _Join],
    froms: Mapping[str, _Pieces],
    tos: Mapping[str, _Pieces],
    reads: _Numbered,
    writes: _Numbered,
) -> tuple[Task, ...]:
    """One task for each set of logical tensors that share stored tensors, in the target's order."""
    shared: dict[int, tuple[Strip, ...]] = {}  # by identity of the join
    tasks = []
    # As many stored as logical tensors, each of those in one piece: every tensor is stored by itself.
    alone = len(reads.held) == len(writes.held) == len(joined)
    if alone and all(len(pieces) == 1 for side in (froms, tos) for pieces in side.values()):
        for name, join in joined.items():
            strips = shared.get(id(join))
            if strips is None:
                strips = shared[id(join)] = _strips(join, range(len(join.sources)), range(len(join.targets)))
            tasks.append(Task(name, strips, reads.held[froms[name][0][0]], writes.held[tos[name][0][0]]))
        return tuple(tasks)
    for names in _connected(joined, froms, tos):
        sources = [n for s in dict.fromkeys(s for name in names for s, _ in froms[name]) for n in reads.held[s]]
        targets = [n for s in dict.fromkeys(s for name in names for s, _ in tos[name]) for n in writes.held[s]]
        read_at, write_at = ({n: at for at, n in enumerate(numbers)} for numbers in (sources, targets))
        found: list[Strip] = []
        for name in names:
            join = joined[name]
            ends = [read_at[reads.ids[froms[name][n][0]][rank]] for n, rank in join.sources]
            aims = [write_at[writes.ids[tos[name][n][0]][rank]] for n, rank in join.targets]
            found += _strips(join, ends, aims)
        tasks.append(Task(names[0], tuple(found), tuple(sources), tuple(targets)))
    return tuple(tasks)


def _strips(join: _Join, ends: Sequence[int], aims: Sequence[int]) -> tuple[Strip, ...]:
    """The strips of a join whose holders stand at ``ends`` and ``aims`` of a task's reads and writes."""
    return tuple(
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


def _connected(
    names: Mapping[str, object], froms: Mapping[str, _Pieces], tos: Mapping[str, _Pieces]
) -> list[list[str]]:
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
