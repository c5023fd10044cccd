"""Lays a model out in chunks of whole tensors, as torch's distributed checkpoints have them.

Such a layout knows no heads, no fusions and no padding: every tensor is one box of numbers, and a rank stores a
rectangle of it and says where that begins. So it is there for every family and every number of ranks. What no rank
cuts is stored by one of them; which one is free, and it is the rank that has the least so far.

Source: torch ``distributed/checkpoint/_dedup_save_plans.py`` (what is stored once), ``torch.chunk`` (where cuts are).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.header import tensor_nbytes
from tpshard.intervals import Bounds, Run, Runs
from tpshard.layout import Cut, Layout, Piece, Stored, cut, held_by
from tpshard.matching import Logical
from tpshard.partition import interned
from tpshard.table import placeholders, template_of

from .arrange import Arranged, Shapes
from .enginetable import EngineTable, Entry
from .grid import Grid
from .parts import Model

Rectangle = tuple[Bounds, ...]
"""The indices ``[start, stop)`` of every dimension."""

Rectangles = Mapping[str, Sequence["Rectangle | None"]]
"""By name and rank what files hold, None where the rank's have nothing of it."""

Origins = tuple["tuple[int, ...] | None", ...]
"""By rank the indices in the whole tensor at which its rectangle begins, None where it has none."""


class _Box(NamedTuple):
    """A stored tensor of all ranks: its pieces, and by rank the shape of its rectangle and where that begins."""

    stored: Stored
    shapes: Shapes
    origins: Origins


class _Member(NamedTuple):
    """A matrix of one expert that is stored together with those of the others."""

    expert: int
    word: int
    tensor: Logical


def arrange_chunks(
    model: Model, table: EngineTable, grid: Grid, engine: str, rectangles: Rectangles | None = None
) -> Arranged:
    """Lay a model out in chunks: every tensor under its own name, matrices of single experts stacked by the entries.

    ``rectangles`` are those of files that exist, by name; without them they are chunks, each on one rank.

    Raises:
        UnsupportedError: a tensor is of no rule, of a quantised matrix, or an expert's without an entry.
        DamagedError: files that exist lack a tensor or have it in another shape.
    """
    chunks = _Chunks(len(grid.ranks), rectangles)
    boxes: list[_Box] = []
    stacks: dict[str, tuple[Entry, list[_Member]]] = {}
    roles = {rule.role for rule in model.matched.rules.values()}
    entries = [entry for entry in table.entries if roles.issuperset(entry.order)]
    for tensor in model.tensors:
        rule = model.matched.rules.get(tensor.name)
        if rule is None:
            raise UnsupportedError(f"{short(tensor.name)}: no rule of the table knows it, so its cut is unknown")
        if ":" in rule.role:
            raise UnsupportedError(
                f"{short(tensor.name)} is part of a quantised matrix, and {engine} loads no quantised model from files "
                "like these; 'tpshard split --dequantize bf16' and 'tpshard merge' make one that it does"
            )
        if "{expert}" in rule.name:
            numbers = dict(zip(placeholders(rule.name), template_of(tensor.name)[1], strict=False))
            name, entry, word = _stack_of(tensor, rule.role, numbers["{expert}"], table, entries, engine)
            stacks.setdefault(name, (entry, []))[1].append(_Member(numbers["{expert}"], word, tensor))
        else:
            boxes.append(_box(table.renamed(tensor.name), tensor, model, chunks))
    boxes += [_stacked(name, entry, members, model, chunks, engine) for name, (entry, members) in stacks.items()]
    by_name = {tensor.name: tensor for tensor in model.tensors}
    for alias, target in model.matched.aliases.items():
        if rectangles is None or table.renamed(alias) in rectangles:
            boxes.append(_box(table.renamed(alias), by_name[target], model, chunks))
    boxes.sort(key=lambda box: box.stored.name)
    if rectangles is None:
        boxes = _once(boxes, chunks.ranks)
    layout = Layout(chunks.ranks, by_name, tuple(box.stored for box in boxes))
    shapes = tuple(box.shapes for box in boxes)
    return Arranged(grid, layout, shapes, (), {}, tuple(box.origins for box in boxes))


@dataclass(frozen=True)
class _Chunks:
    """Which rectangle of a box every rank stores."""

    ranks: int
    rectangles: Rectangles | None

    def of(self, name: str, shape: tuple[int, ...], at: int | None) -> list[Rectangle]:
        """By rank the indices ``[start, stop)`` of every dimension, chunked along ``at``; raises as its caller."""
        if self.rectangles is None:
            return [
                tuple(chunk(extent, rank, self.ranks) if d == at else (0, extent) for d, extent in enumerate(shape))
                for rank in range(self.ranks)
            ]
        found = self.rectangles.get(name)
        if found is None:
            raise DamagedError(f"{short(name)} is missing from the files; copy them again")
        stop = tuple(max(ends) for ends in zip(*[[end for _, end in one] for one in found if one], strict=True))
        if stop != shape:
            raise DamagedError(f"the files hold {short(name)} as {list(stop)} where the model has it as {list(shape)}")
        return [one or ((0, 0),) * len(shape) for one in found]


def chunk(extent: int, rank: int, ranks: int) -> Bounds:
    """The indices ``[start, stop)`` of a rank's chunk as ``torch.chunk`` makes them; the last ranks may have none."""
    each = -(-extent // ranks)
    return min(rank * each, extent), min((rank + 1) * each, extent)


def _runs(start: int, stop: int) -> Runs:
    return (Run(start, stop - start),) if stop > start else ()


def _chunked_dim(tensor: Logical, model: Model) -> int | None:
    """The dimension that is chunked: the first that the family cuts."""
    dims = model.matched.dims[tensor.name]
    return next((d for d, dim in enumerate(dims) if dim.axes and dim.extent), None)


def _box(name: str, tensor: Logical, model: Model, chunks: _Chunks) -> _Box:
    """A tensor by itself."""
    rectangles = chunks.of(name, tensor.shape, _chunked_dim(tensor, model))
    dims = [
        interned(extent, tuple(_runs(*rectangle[d]) for rectangle in rectangles))
        for d, extent in enumerate(tensor.shape)
    ]
    stored = Stored(name, tensor.dtype, (Piece(tensor.name, cut(tuple(dims), chunks.ranks)),))
    return _described(stored, stored.shapes, rectangles)


def _described(stored: Stored, shapes: Shapes, rectangles: Sequence[Rectangle]) -> _Box:
    origins = tuple(
        None if shape is None else tuple(start for start, _ in rectangle)
        for shape, rectangle in zip(shapes, rectangles, strict=True)
    )
    return _Box(stored, shapes, origins)


# -- experts ------------------------------------------------------------------------------------------


def _stack_of(
    tensor: Logical, role: str, expert: int, table: EngineTable, entries: Sequence[Entry], engine: str
) -> tuple[str, Entry, int]:  # fmt: skip
    """The name of the stack that an expert's matrix is in, its entry, and the place of its word in that."""
    path = tensor.name.split(".")
    kind = path[-1]
    at = len(path) - 1 - path[::-1].index(str(expert))
    for entry in entries:
        if role in entry.order and kind in entry.kinds:
            parent = table.renamed(".".join(path[:at]))
            return entry.name.format(parent=parent, kind=kind), entry, entry.order.index(role)
    raise UnsupportedError(
        f"{engine} holds the experts of a layer in one tensor, and its name for what {short(tensor.name)} is "
        f"({role}) is not known"
    )


def _stacked(
    name: str, entry: Entry, members: list[_Member], model: Model, chunks: _Chunks, engine: str
) -> _Box:  # fmt: skip
    """Matrices of all experts as one box ``[expert, rows of all words, columns]``.

    With several words the rows of an expert, word after word, are chunked; with one the dimension that the family cuts.
    """
    members.sort(key=lambda member: member[:2])
    words = len(entry.order)
    due = [(expert, word) for expert in range(len(members) // words) for word in range(words)]
    if [member[:2] for member in members] != due:
        raise UnsupportedError(
            f"{engine} stores {short(name)} of {', '.join(entry.order)} of all experts in one tensor; the checkpoint "
            f"has {len(members)} matrices for it, which are not {words} of every expert"
        )
    if len({(member.tensor.dtype, member.tensor.shape[1:]) for member in members}) > 1:
        raise UnsupportedError(f"{engine} stores {short(name)} as one tensor; its parts have several dtypes or shapes")
    first = members[0].tensor
    shape = (len(members) // words, sum(member.tensor.shape[0] for member in members[:words]), *first.shape[1:])
    cut_at = 0 if words > 1 else _chunked_dim(first, model)
    rectangles = chunks.of(name, shape, None if cut_at is None else cut_at + 1)
    pieces, before = [], 0
    for member in members:
        before = before if member.word else 0
        pieces.append(Piece(member.tensor.name, _of_member(member, before, rectangles)))
        before += member.tensor.shape[0]
    shapes = tuple(
        found if prod(found) else None for found in (tuple(stop - start for start, stop in one) for one in rectangles)
    )
    return _described(Stored(name, first.dtype, tuple(pieces)), shapes, rectangles)


def _of_member(member: _Member, before: int, rectangles: Sequence[Rectangle]) -> Cut:
    """What the rectangles hold of one expert's matrix, whose first row is row ``before`` of the expert's."""
    dims = []
    for d, extent in enumerate(member.tensor.shape):
        by_rank = []
        for (low, high), *inner in rectangles:
            skipped = before if d == 0 else 0
            start, stop = (max(at - skipped, 0) for at in inner[d])
            by_rank.append(_runs(start, min(stop, extent)) if low <= member.expert < high else ())
        dims.append(interned(extent, tuple(by_rank)))
    return cut(tuple(dims), len(rectangles))


# -- what no rank cuts --------------------------------------------------------------------------------


def _once(boxes: Sequence[_Box], ranks: int) -> list[_Box]:
    """Every rectangle on one rank: what several have goes to the one with the fewest bytes, the last of equals.

    A tensor without dimensions stays on all: it has no rectangle to be taken off.
    """
    filled = [0] * ranks
    for box in boxes:
        if not _is_shared(box):
            for rank, shape in enumerate(box.shapes):
                filled[rank] += tensor_nbytes(box.stored.dtype, shape) if shape is not None else 0
    out = []
    for box in boxes:
        if _is_shared(box):
            one = min(range(ranks), key=lambda rank: (filled[rank], -rank))
            shape = box.shapes[one]
            filled[one] += tensor_nbytes(box.stored.dtype, shape or ())
            pieces = tuple(Piece(piece.tensor, held_by(piece.cut, (one,))) for piece in box.stored.pieces)
            box = _Box(
                box.stored._replace(pieces=pieces),
                tuple(shape if rank == one else None for rank in range(ranks)),
                tuple(box.origins[one] if rank == one else None for rank in range(ranks)),
            )
        out.append(box)
    return out


def _is_shared(box: _Box) -> bool:
    held = [origin for origin in box.origins if origin is not None]
    return len(held) > 1 and bool(held[0]) and held[1:] == held[:-1] and all(map(prod, filter(None, box.shapes)))
