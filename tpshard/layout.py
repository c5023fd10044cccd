"""A layout says, for every stored tensor of a checkpoint, which intervals of which logical tensor it holds.

Nothing here knows files. A stored tensor is one piece of one logical tensor, or several pieces laid
one after the other along one dimension (an engine's ``qkv_proj``); each piece is a :class:`Cut`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from .axes import Dim, replicated
from .errors import LayoutError
from .intervals import Run
from .matching import Logical, Matched
from .partition import Partition, interned, partition


@dataclass(frozen=True, eq=False)
class Cut:
    """How one logical tensor lies over the ranks: one partition a dimension.

    A rank stores the tensor if it has runs in every dimension. Compared by identity: :func:`cut`
    returns one object for one value.
    """

    dims: tuple[Partition, ...]
    size: int

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The stored shape on every rank, None where the rank does not hold the tensor."""
        out: list[tuple[int, ...] | None] = []
        for rank in range(self.size):
            held = all(dim.ranks[rank] or not dim.extent for dim in self.dims)
            out.append(tuple(dim.length(rank) for dim in self.dims) if held else None)
        return tuple(out)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(dim.extent for dim in self.dims)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank holds all of the tensor in its own order."""
        return all(dim.is_whole for dim in self.dims)

    @cached_property
    def text(self) -> str:
        """The cut as canonical text, for digests."""
        return repr([[(d.extent, [[tuple(run) for run in runs] for runs in d.ranks])] for d in self.dims])


@lru_cache(maxsize=65536)
def cut(dims: tuple[Partition, ...], size: int) -> Cut:
    """The one Cut of this value.

    Raises:
        LayoutError: the partitions are for different numbers of ranks.
    """
    for dim in dims:
        if dim.tp_size != size:
            raise LayoutError(f"a dimension is cut for {dim.tp_size} ranks in a layout of {size}")
    return Cut(dims, size)


@lru_cache(maxsize=65536)
def cut_dims(dims: tuple[Dim, ...], tp_size: int) -> Cut:
    """The cut of a tensor whose dimensions a table gave, at one degree."""
    return cut(tuple(partition(dim, tp_size) for dim in dims), tp_size)


@lru_cache(maxsize=65536)
def whole_cut(shape: tuple[int, ...], size: int = 1) -> Cut:
    """The cut that keeps a tensor of this shape whole on every rank."""
    return cut_dims(tuple(replicated(length) for length in shape), size)


def held_by(base: Cut, ranks: Iterable[int]) -> Cut:
    """The same cut with only ``ranks`` holding the tensor (an expert, a pipeline stage)."""
    keep = set(ranks)
    if not base.dims:
        raise LayoutError("a tensor without dimensions cannot be taken off a rank")
    first = base.dims[0]
    runs: tuple[tuple[Run, ...], ...] = tuple(r if rank in keep else () for rank, r in enumerate(first.ranks))
    return cut((interned(first.extent, runs), *base.dims[1:]), base.size)


class Piece(NamedTuple):
    """One logical tensor's part of a stored tensor."""

    tensor: str
    cut: Cut


class Stored(NamedTuple):
    """A tensor as files hold it: ``pieces`` laid one after the other along dimension ``dim``."""

    name: str
    dtype: str
    pieces: tuple[Piece, ...]
    dim: int = 0

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The stored shape on every rank, None where no piece is there. A rank lays what it holds of the pieces.

        Raises:
            LayoutError: pieces disagree in another dimension.
        """
        if len(self.pieces) == 1:
            return self.pieces[0].cut.shapes
        try:
            return _laid_shapes(tuple([piece.cut for piece in self.pieces]), self.dim)
        except LayoutError as error:
            raise LayoutError(f"{self.name}: {error}") from None

    def shape(self, rank: int) -> tuple[int, ...] | None:
        """The stored shape on a rank, None where no piece is there; raises as :attr:`shapes`."""
        return self.shapes[rank]


@lru_cache(maxsize=65536)
def _laid_shapes(cuts: tuple[Cut, ...], dim: int) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of pieces that are laid one after the other along ``dim``, by rank."""
    if not cuts:
        raise LayoutError("a stored tensor has at least one piece")
    out: list[tuple[int, ...] | None] = []
    for shapes in zip(*[part.shapes for part in cuts], strict=True):
        parts = [shape for shape in shapes if shape is not None]
        if not parts:
            out.append(None)
            continue
        others = {shape[:dim] + shape[dim + 1 :] for shape in parts}
        if len(others) != 1 or not 0 <= dim < len(parts[0]):
            raise LayoutError(f"the pieces {list(shapes)} cannot be laid along dimension {dim}")
        out.append((*parts[0][:dim], sum(shape[dim] for shape in parts), *parts[0][dim + 1 :]))
    return tuple(out)


@dataclass(frozen=True)
class Layout:
    """Which stored tensors there are, on how many ranks.

    Args:
        size: number of ranks; 1 for a checkpoint that is not cut.
        tensors: the logical tensors by name, in the order in which the source stores them.
        stored: the stored tensors, in the order in which files of this layout store them.
    """

    size: int
    tensors: Mapping[str, Logical]
    stored: tuple[Stored, ...] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical text of the layout, hex."""
        texts: dict[int, int] = {}
        lines = [f"ranks {self.size}"]
        for stored in self.stored:
            for piece in stored.pieces:
                if id(piece.cut) not in texts:
                    texts[id(piece.cut)] = len(texts)
                    lines.append(piece.cut.text)
            parts = " ".join(f"{p.tensor}\x00{texts[id(p.cut)]}" for p in stored.pieces)
            lines.append(f"{stored.name}\x00{stored.dtype}\x00{stored.dim}\x00{parts}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def whole_layout(tensors: Iterable[Logical]) -> Layout:
    """The layout of a checkpoint that is not cut: every tensor whole, on one rank."""
    by_name = {tensor.name: tensor for tensor in tensors}
    stored = tuple(Stored(t.name, t.dtype, (Piece(t.name, whole_cut(t.shape)),)) for t in by_name.values())
    return Layout(1, by_name, stored)


def cut_layout(tensors: Iterable[Logical], dims: Mapping[str, tuple[Dim, ...]], tp_size: int) -> Layout:
    """The native layout: every rank stores its part of every tensor under the tensor's own name.

    Raises:
        UnsupportedError: the degree asks for more ranks than an axis has parts; the message names a tensor.
        UsageError: the degree is below 1.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    cuts: dict[int, Cut] = {}  # by identity of the dimensions: all tensors of one rule share one tuple of them
    stored = []
    for tensor in by_name.values():
        of_tensor = dims[tensor.name]
        found = cuts.get(id(of_tensor))
        if found is None:
            found = cuts[id(of_tensor)] = cut_dims(of_tensor, tp_size)
        stored.append(Stored(tensor.name, tensor.dtype, (Piece(tensor.name, found),)))
    return Layout(tp_size, by_name, tuple(stored))


def table_layout(matched: Matched, tensors: Iterable[Logical], tp_size: int) -> Layout:
    """The native layout that a matched table gives at one degree."""
    return cut_layout(tensors, matched.dims, tp_size)
