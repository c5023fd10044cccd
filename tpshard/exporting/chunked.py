"""Lays a model out in chunks of whole tensors, as torch's distributed checkpoints have them.

Such a layout knows no heads, no fusions and no padding: every tensor is one box of numbers, and a rank stores a
rectangle of it and says where that begins. So it is there for every family and every number of ranks. What no rank
cuts is stored by one of them; which one is free, and it is the rank that has the least so far.

Source: torch ``distributed/checkpoint/_dedup_save_plans.py`` (what is stored once), ``torch.chunk`` (where cuts are).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from tpshard.errors import UnsupportedError, short
from tpshard.header import tensor_nbytes
from tpshard.intervals import Run, Runs, whole
from tpshard.layout import Layout, Piece, Stored, cut, held_by
from tpshard.matching import Logical
from tpshard.partition import interned
from tpshard.table import placeholders, template_of

from .arrange import Arranged, Shapes
from .enginetable import EngineTable, Entry
from .grid import Grid
from .parts import Model

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


def arrange_chunks(model: Model, table: EngineTable, grid: Grid, engine: str) -> Arranged:
    """Lay a model out in chunks: every tensor under its own name, matrices of single experts stacked by the entries.

    Raises:
        UnsupportedError: a tensor is of no rule, of a quantised matrix, or an expert's without an entry.
    """
    boxes: list[_Box] = []
    stacks: dict[str, tuple[Entry, list[_Member]]] = {}
    for tensor in model.tensors:
        rule = model.matched.rules.get(tensor.name)
        if rule is None:
            raise UnsupportedError(f"{short(tensor.name)}: no rule of the table knows this tensor, so its cut is unknown")
        if ":" in rule.role:
            raise UnsupportedError(
                f"{short(tensor.name)} is part of a quantised matrix, and {engine} loads no quantised model from files "
                "like these; 'tpshard split --dequantize bf16' and 'tpshard merge' make one that it does"
            )
        if "{expert}" in rule.name and table.entries:
            numbers = dict(zip(placeholders(rule.name), template_of(tensor.name)[1], strict=False))
            name, entry, word = _stack_of(tensor, rule.role, numbers["{expert}"], table, engine)
            stacks.setdefault(name, (entry, []))[1].append(_Member(numbers["{expert}"], word, tensor))
        else:
            boxes.append(_box(table.renamed(tensor.name), tensor, model, grid))
    boxes += [_stacked(name, entry, members, model, grid, engine) for name, (entry, members) in stacks.items()]
    by_name = {tensor.name: tensor for tensor in model.tensors}
    for alias, target in model.matched.aliases.items():
        boxes.append(_box(table.renamed(alias), by_name[target], model, grid))
    boxes = _once(sorted(boxes, key=lambda box: box.stored.name), len(grid.ranks))
    layout = Layout(len(grid.ranks), by_name, tuple(box.stored for box in boxes))
    shapes = tuple(box.shapes for box in boxes)
    return Arranged(grid, layout, shapes, (), {}, tuple(box.origins for box in boxes))


def chunk(extent: int, rank: int, ranks: int) -> tuple[int, int]:
    """The indices ``[start, stop)`` of a rank's chunk as ``torch.chunk`` makes them; the last ranks may have none."""
    each = -(-extent // ranks)
    return min(rank * each, extent), min((rank + 1) * each, extent)


def _runs(start: int, stop: int) -> Runs:
    return (Run(start, stop - start),) if stop > start else ()


def _chunked_dim(tensor: Logical, model: Model) -> int | None:
    """The dimension that is chunked: the first that the family cuts."""
    dims = model.matched.dims[tensor.name]
    return next((d for d, dim in enumerate(dims) if dim.axes and dim.extent), None)


def _box(name: str, tensor: Logical, model: Model, grid: Grid) -> _Box:
    """A tensor by itself."""
    ranks, at = len(grid.ranks), _chunked_dim(tensor, model)
    dims, origins = [], [[0] * len(tensor.shape) for _ in range(ranks)]
    for d, extent in enumerate(tensor.shape):
        bounds = [chunk(extent, rank, ranks) if d == at else (0, extent) for rank in range(ranks)]
        dims.append(interned(extent, tuple(_runs(*bound) for bound in bounds)))
        for rank, (start, _) in enumerate(bounds):
            origins[rank][d] = start
    stored = Stored(name, tensor.dtype, (Piece(tensor.name, cut(tuple(dims), ranks)),))
    shapes = stored.shapes
    return _Box(
        stored, shapes, tuple(tuple(o) if s is not None else None for o, s in zip(origins, shapes, strict=True))
    )


# -- experts ------------------------------------------------------------------------------------------


def _stack_of(tensor: Logical, role: str, expert: int, table: EngineTable, engine: str) -> tuple[str, Entry, int]:
    """The name of the stack that an expert's matrix is in, its entry, and the place of its word in that."""
    path = tensor.name.split(".")
    kind = path[-1]
    at = len(path) - 1 - path[::-1].index(str(expert))
    for entry in table.entries:
        if role in entry.order and kind in entry.kinds:
            parent = table.renamed(".".join(path[:at]))
            return entry.name.format(parent=parent, kind=kind), entry, entry.order.index(role)
    raise UnsupportedError(
        f"{engine} holds the experts of a layer in one tensor, and its name for what {short(tensor.name)} is "
        f"({role}) is not known"
    )


def _stacked(name: str, entry: Entry, members: list[_Member], model: Model, grid: Grid, engine: str) -> _Box:
    """Matrices of all experts as one box ``[expert, rows of all words, columns]``.

    With several words the rows of an expert, word after word, are chunked; with one the dimension that the family cuts.
    """
    members.sort(key=lambda member: member[:2])
    experts = sorted({member.expert for member in members})
    due = [(expert, word) for expert in range(len(experts)) for word in range(len(entry.order))]
    if [member[:2] for member in members] != due:
        raise UnsupportedError(
            f"{engine} stores {short(name)} of {', '.join(entry.order)} of all experts in one tensor; the checkpoint "
            f"has {len(members)} of {len(due)} of them"
        )
    if len({(member.tensor.dtype, member.tensor.shape[1:]) for member in members}) > 1:
        raise UnsupportedError(f"{engine} stores {short(name)} as one tensor; its parts have several dtypes or shapes")
    ranks, first = len(grid.ranks), members[0].tensor
    rows = sum(member.tensor.shape[0] for member in members[: len(entry.order)])
    at = 0 if len(entry.order) > 1 else _chunked_dim(first, model)
    whole_shape = (rows, *first.shape[1:])
    bounds = [
        [chunk(extent, rank, ranks) if d == at else (0, extent) for d, extent in enumerate(whole_shape)]
        for rank in range(ranks)
    ]
    pieces, before = [], 0
    for number, member in enumerate(members):
        before = 0 if number % len(entry.order) == 0 else before
        dims = []
        for d, extent in enumerate(member.tensor.shape):
            skipped = before if d == 0 else 0
            held = [(max(low - skipped, 0), min(high - skipped, extent)) for low, high in (b[d] for b in bounds)]
            dims.append(interned(extent, tuple(_runs(*bound) for bound in held)))
        pieces.append(Piece(member.tensor.name, cut(tuple(dims), ranks)))
        before += member.tensor.shape[0]
    shapes: list[tuple[int, ...] | None] = []
    origins: list[tuple[int, ...] | None] = []
    for of_rank in bounds:
        shape = (len(experts), *[stop - start for start, stop in of_rank])
        shapes.append(shape if prod(shape) else None)
        origins.append((0, *[start for start, _ in of_rank]) if prod(shape) else None)
    return _Box(Stored(name, first.dtype, tuple(pieces)), tuple(shapes), tuple(origins))


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
    return len(held) > 1 and bool(held[0]) and held[1:] == held[:-1] and _holds_elements(box)


def _holds_elements(box: _Box) -> bool:
    return any(whole(prod(shape)) for shape in box.shapes if shape is not None)
