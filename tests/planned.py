"""Layouts of small random tensors, and a plain executor of plans that shares no code with the product's.

What a rank must store is worked out by picking single indices out of the logical tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tpshard.axes import Dim
from tpshard.header import DTYPE_BITS
from tpshard.intervals import PAD, Run
from tpshard.layout import Cut, Layout, Stored, cut_layout
from tpshard.matching import Logical
from tpshard.partition import Partition, interned
from tpshard.planning import Placed, PlacedFile, Plan
from tpshard.routing import Extent

Bytes = npt.NDArray[np.uint8]
Values = Mapping[str, Bytes]  # [*shape, bytes an element]
GAP = 5  # bytes before, between and behind the tensors of a file, which no plan may touch
UNTOUCHED = 0xEE


def native(tensors: Mapping[str, tuple[str, tuple[Dim, ...]]], tp_size: int) -> Layout:
    """``tensors`` maps a name to its dtype and dimensions."""
    logicals = [Logical(name, dtype, tuple(d.extent for d in dims)) for name, (dtype, dims) in tensors.items()]
    return cut_layout(logicals, {name: dims for name, (_, dims) in tensors.items()}, tp_size)


def random_values(tensors: Iterable[Logical], seed: int = 0) -> dict[str, Bytes]:
    """No byte is zero, so that padding and data cannot be mistaken for each other."""
    random = np.random.default_rng(seed)
    return {
        t.name: random.integers(1, 256, (*t.shape, DTYPE_BITS[t.dtype] // 8), dtype=np.uint8) for t in tensors
    }  # fmt: skip


def indices(dim: Partition, rank: int) -> list[int]:
    return [PAD if run.start == PAD else run.start + i for run in dim.ranks[rank] for i in range(run.length)]


def part_of(value: Bytes, cut: Cut, rank: int) -> Bytes | None:
    """What a rank holds of a tensor: index by index, zeros for padding."""
    wanted = [indices(dim, rank) for dim in cut.dims]
    if any(not want and dim.extent for want, dim in zip(wanted, cut.dims, strict=True)):
        return None
    for axis, want in enumerate(wanted):
        blank = np.zeros_like(value.take([0], axis=axis)) if value.shape[axis] else None
        picked = [blank if index == PAD else value.take([index], axis=axis) for index in want]
        value = np.concatenate(picked, axis=axis) if picked else value
    return value


def stored_part(stored: Stored, values: Values, rank: int) -> Bytes | None:
    parts = [part_of(values[piece.tensor], piece.cut, rank) for piece in stored.pieces]
    held = [part for part in parts if part is not None]
    assert len(held) in (0, len(parts))
    return np.concatenate(held, axis=stored.dim) if len(held) > 1 else held[0] if held else None


def placed(layout: Layout, values: Values) -> tuple[Placed, list[Bytes]]:
    """The layout in one file a rank, tensors with gaps between them, and the bytes of the files."""
    extents: list[list[Extent | None]] = [[None] * layout.size for _ in layout.stored]
    files, data = [], []
    for rank in range(layout.size):
        at = GAP
        found = [np.full(GAP, UNTOUCHED, np.uint8)]
        for n, stored in enumerate(layout.stored):
            part = stored_part(stored, values, rank)
            assert (None if part is None else part.shape[:-1]) == stored.shape(rank)
            if part is not None:
                extents[n][rank] = Extent(stored.name, rank, at, part.nbytes)
                found += [part.reshape(-1), np.full(GAP, UNTOUCHED, np.uint8)]
                at += part.nbytes + GAP
        files.append(PlacedFile(f"{rank}.bin", at, rank))
        data.append(np.concatenate(found))
    return Placed(layout, tuple(files), tuple(map(tuple, extents))), data


class Differs(AssertionError):
    """Replicas differ, or padding is not zero."""


def executed(plan: Plan, sources: Sequence[Bytes]) -> list[Bytes]:
    """The target files that a plan makes of the source files. A byte that is written twice is an error."""
    out = [np.full(file.size, UNTOUCHED, np.uint8) for file in plan.target.files]
    written = [np.zeros(file.size, bool) for file in plan.target.files]
    for task in plan.tasks:
        for rows, froms, tos, route in task.strips:

            def matrix(files: Sequence[Bytes], extent: Extent, at: int, width: int, rows: int = rows) -> Bytes:
                assert at >= 0
                assert at + rows * width <= extent.nbytes
                begin = extent.offset + at
                return files[extent.file][begin : begin + rows * width].reshape(rows, width)

            ins = [matrix(sources, plan.reads[task.reads[s.extent]], s.at, s.width) for s in froms]
            outs = [matrix(out, plan.writes[task.writes[t.extent]], t.at, t.width) for t in tos]
            marks = [matrix(written, plan.writes[task.writes[t.extent]], t.at, t.width) for t in tos]  # type: ignore[arg-type]
            for source, a, target, b, length in route.copies:
                outs[target][:, b : b + length] = ins[source][:, a : a + length]
                assert not marks[target][:, b : b + length].any(), f"{task.tensor} is written twice"
                marks[target][:, b : b + length] = 1
            for target, b, length in route.fills:
                outs[target][:, b : b + length] = 0
                assert not marks[target][:, b : b + length].any(), f"{task.tensor} is written twice"
                marks[target][:, b : b + length] = 1
            for source, a, other, b, length in route.same:
                if not np.array_equal(ins[source][:, a : a + length], ins[other][:, b : b + length]):
                    raise Differs(task.tensor)
            for source, a, length in route.zeros:
                if ins[source][:, a : a + length].any():
                    raise Differs(task.tensor)
    return out


def ranks_of(extent: int, *ranks: Sequence[tuple[int, int]]) -> Partition:
    """A partition from ``(start, length)`` runs."""
    return interned(extent, tuple(tuple(Run(*run) for run in runs) for runs in ranks))


def on_grid(dims: Sequence[Partition | None], shape: Sequence[int], grid: Sequence[int]) -> tuple[Partition, ...]:
    """Two partitions, each over one side of a grid of ranks, as partitions over all ranks of the grid.

    ``dims`` has the partition along the grid's first side where first met, then that along its second;
    None keeps a dimension whole.
    """
    size = grid[0] * grid[1]
    side = 0
    out = []
    for dim, extent in zip(dims, shape, strict=True):
        if dim is None:
            out.append(interned(extent, ((Run(0, extent),) if extent else (),) * size))
            continue
        place = [divmod(rank, grid[1])[side] for rank in range(size)]
        assert dim.tp_size == grid[side]
        out.append(interned(extent, tuple(dim.ranks[at] for at in place)))
        side += 1
    return tuple(out)
