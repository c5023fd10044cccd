"""Files of a torch distributed checkpoint as Megatron writes them: chunks of global tensors, in a file for every rank.

An engine's table whose container is DISTCP calls what it stores ``KEY@L.E#I/N``: the chunk lies in the tensor KEY, at
these indices of dimensions before its own (layers, experts), and is the I-th of N equal parts of its first own
dimension (the gates before all others). What several ranks would hold alike is stored by the first of them.

Every chunk is a file of ``torch.save`` of its own inside a ``.distcp``, laid so that a plan moves its bytes in; what
torch's writer would have written around them is made beforehand, and ``.metadata`` says where everything lies.

Source: torch ``distributed/checkpoint/filesystem.py``; megatron-core ``core/dist_checkpointing/strategies/torch.py``,
``core/transformer/mlp.py`` (``apply_swiglu_sharded_factory``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tpshard.collection import uncollected
from tpshard.errors import UnsupportedError, short
from tpshard.header import Frame
from tpshard.intervals import PAD
from tpshard.layout import Layout, Piece, Stored, held_by
from tpshard.planning import Placed, PlacedFile, stored_bytes
from tpshard.routing import Extent

from .arrange import Arranged
from .distmetadata import Chunk, GlobalTensor, written
from .enginetable import EngineTable
from .files import EngineFiles, frozen
from .grid import Grid
from .torchcontainer import TensorSpec, torch_tensor

_NAME = re.compile(r"(?P<key>[^@#]+)(?:@(?P<lead>[\d.]+))?(?:#(?P<part>\d+)/(?P<parts>\d+))?")


class Slot(NamedTuple):
    """Where a stored tensor lies in a global one."""

    key: str
    lead: tuple[int, ...]
    part: int
    parts: int


def slot_of(name: str) -> Slot:
    """What a name of a table says."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise UnsupportedError(f"{short(name)} does not say where in a global tensor it lies")
    lead = tuple(int(number) for number in found["lead"].split(".")) if found["lead"] else ()
    return Slot(found["key"], lead, int(found["part"] or 0), int(found["parts"] or 1))


class _Laid(NamedTuple):
    """What is stored of a tensor: by rank that stores it where its rectangle begins; and the whole's own shape."""

    stored: Stored
    origins: dict[int, tuple[int, ...]]
    shape: tuple[int, ...]


@uncollected()
def place_distcp(arranged: Arranged, table: EngineTable) -> EngineFiles:
    """The files of all ranks that store something, and ``.metadata``.

    Raises:
        UnsupportedError: ranks hold other than equal parts, which a global tensor has no place for.
    """
    grid = arranged.grid
    laid = [_laid(s, shapes, grid) for s, shapes in zip(arranged.layout.stored, arranged.declared, strict=True)]
    slots = [slot_of(one.stored.name) for one in laid]
    leads: dict[str, tuple[int, ...]] = {}
    for slot in slots:
        before = leads.get(slot.key, slot.lead)
        leads[slot.key] = tuple(max(a, b) for a, b in zip(before, slot.lead, strict=True))
    rows: list[list[Extent | None]] = [[None] * len(grid.ranks) for _ in laid]
    chunks: dict[str, GlobalTensor] = {}
    files: list[PlacedFile] = []
    frames: dict[str, Frame] = {}
    of_rank: list[list[int]] = [[] for _ in grid.ranks]
    for number, one in enumerate(laid):
        for rank in one.origins:
            of_rank[rank].append(number)
    folder = ""
    for rank, numbers in enumerate(of_rank):
        if not numbers:
            continue
        path = table.file_name(grid, grid.ranks[rank], 0, 1)
        folder, _, base = path.rpartition("/")
        at, frame = 0, list[tuple[int, bytes]]()
        for number in numbers:
            one, slot = laid[number], slots[number]
            shape = arranged.declared[number][rank] or ()
            filed = (*(1 for _ in slot.lead), *shape)
            spec = TensorSpec(one.stored.name, one.stored.dtype, filed, stored_bytes(shape, one.stored.dtype))
            made = torch_tensor(spec, at=at)
            frame += made.frame
            rows[number][rank] = Extent(one.stored.name, len(files), made.offsets[0], spec.nbytes)
            origin, whole = list(one.origins[rank]), list(one.shape)
            if slot.parts > 1:
                origin[0] += slot.part * whole[0]
                whole[0] *= slot.parts
            whole = [*(n + 1 for n in leads[slot.key]), *whole]
            tensor = chunks.setdefault(slot.key, GlobalTensor(one.stored.dtype, tuple(whole), []))
            if tensor.dtype != one.stored.dtype or tensor.shape != tuple(whole):
                raise UnsupportedError(
                    f"{short(slot.key)} would be one tensor of {tensor.dtype} {list(tensor.shape)} and "
                    f"{one.stored.dtype} {whole}; its layers are not alike"
                )
            assert isinstance(tensor.chunks, list)
            tensor.chunks.append(Chunk((*slot.lead, *origin), filed, base, at, made.size - at))
            at = made.size
        files.append(PlacedFile(path, at, rank))
        frames[path] = tuple(frame)
    layout = Layout(arranged.layout.size, arranged.layout.tensors, tuple(one.stored for one in laid))
    placed = Placed(layout, tuple(files), frozen(rows))
    name = f"{folder}/.metadata" if folder else ".metadata"
    return EngineFiles(placed, frames, {name: written(chunks)})


def _laid(stored: Stored, shapes: Sequence[tuple[int, ...] | None], grid: Grid) -> _Laid:
    """A stored tensor on the first rank alone that holds each of its rectangles."""
    seen: dict[tuple[object, ...], int] = {}
    for rank, shape in enumerate(shapes):
        if shape is not None:
            held = [dim.ranks[rank] for piece in stored.pieces for dim in piece.cut.dims]
            padding = any(runs and all(run.start == PAD for run in runs) for runs in held)
            # padding alone looks alike wherever it lies
            seen.setdefault((*held, grid.ranks[rank].tp if padding else -1), rank)
    ranks = sorted(seen.values())
    pieces = tuple([Piece(p.tensor, held_by(p.cut, ranks) if p.cut.dims else p.cut) for p in stored.pieces])
    own = [shape for rank in ranks if (shape := shapes[rank]) is not None]
    if len(set(own)) != 1:
        raise UnsupportedError(f"{short(stored.name)} is {sorted(set(own))} on its ranks, not equal parts")
    first = own[0]
    if len(ranks) == 1:
        return _Laid(stored._replace(pieces=pieces), {ranks[0]: (0,) * len(first)}, first)
    dim = _cut_dim(stored, ranks) + len(first) - len(stored.pieces[0].cut.dims)
    origins = {rank: tuple(at * n if d == dim else 0 for d, n in enumerate(first)) for at, rank in enumerate(ranks)}
    whole = tuple(n * len(ranks) if d == dim else n for d, n in enumerate(first))
    return _Laid(stored._replace(pieces=pieces), origins, whole)


def _cut_dim(stored: Stored, ranks: Sequence[int]) -> int:
    """The dimension of its pieces along which the ranks hold other parts."""
    if len(stored.pieces) > 1:
        return stored.dim
    cut = stored.pieces[0].cut
    dims = [d for d, dim in enumerate(cut.dims) if len({dim.ranks[rank] for rank in ranks}) > 1]
    if len(dims) != 1:
        raise UnsupportedError(f"{short(stored.name)} is cut along the dimensions {dims}, not along one")
    return dims[0]
