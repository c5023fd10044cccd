"""Reads tensors of a checkpoint, or of one rank, by position, straight into the dtype of the computation.

Nothing is mapped: a private mapping counts against a memory limit even where it is never touched.
Tensors are read in tiles of whole rows (indices of their first stored dimension), so that the bytes
as stored are never held beside a whole tensor of the computation's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from tpshard.checkpoint import place_source
from tpshard.errors import UnsupportedError
from tpshard.header import DTYPE_BITS
from tpshard.intervals import Runs
from tpshard.layout import Cut
from tpshard.openfiles import OpenFiles
from tpshard.planning import Placed
from tpshard.quantisation.methods import quantisation_of
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.traffic import COMPUTED

from .memory import Scratch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""torch's name of every safetensors dtype that models compute with; packed and 8-bit floats need their scales."""

TILE_BYTES = 4 << 20  # bytes as stored that are read at a time


@dataclass(frozen=True)
class Part:
    """What one holder stores of one tensor: where it lies, and which indices it holds.

    ``cut.dims[d].ranks[rank]`` are the runs of dimension ``d`` in stored order.
    """

    name: str
    dtype: str
    file: int
    offset: int
    cut: Cut
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        shape = self.cut.shapes[self.rank]
        assert shape is not None
        return shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.cut.shape

    def runs(self, dim: int) -> Runs:
        """The runs of a dimension, in stored order."""
        return self.cut.dims[dim].ranks[self.rank]

    @property
    def is_whole(self) -> bool:
        """Whether this holder has all of the tensor in its own order."""
        return self.shape == self.full_shape and all(
            len(self.runs(d)) <= 1 and (not self.runs(d) or self.runs(d)[0].start == 0) for d in range(len(self.shape))
        )


class Store:
    """The tensors of one holder: the source, or one rank of the shards.

    Stores that share a ``scratch`` must be used by one thread at a time.
    """

    def __init__(self, paths: Sequence[Path], parts: Mapping[str, Part], scratch: Scratch | None = None) -> None:
        self.scratch = scratch or Scratch()
        self.files = OpenFiles(list(paths), [False] * len(paths))
        self.parts = parts
        self.bytes_read = 0
        self.not_finite: dict[str, None] = {}  # names of tensors in which NaN or Inf was read, in order

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def raw(self, part: Part, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)`` of what is stored, in the stored dtype; a scalar has one row.

        Raises:
            UnsupportedError: a dtype that needs scales to compute with.
            DamagedError, StorageError: reading failed.
        """
        return self._read(part, start, stop, torch.empty(self._nbytes(part, start, stop), dtype=torch.uint8), None)

    def _nbytes(self, part: Part, start: int, stop: int) -> int:
        return (stop - start) * prod(part.shape[1:]) * DTYPE_BITS[part.dtype] // 8

    def _read(
        self, part: Part, start: int, stop: int, buffer: torch.Tensor, watch: Callable[[memoryview], None] | None
    ) -> torch.Tensor:
        dtype = DTYPES.get(part.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"{part.name} is stored as {part.dtype}, which cannot be computed with as it is; "
                "verify the checkpoint in its original precision, or by bytes"
            )
        if len(buffer):
            view = memoryview(buffer.numpy())
            row = len(buffer) // (stop - start)
            self.files.read(part.file, view, part.offset + start * row)
            self.bytes_read += len(buffer)
            if watch is not None:
                watch(view)
        shape = (stop - start, *part.shape[1:]) if part.shape else ()
        return buffer.view(dtype).view(shape)

    def tiles(
        self,
        part: Part,
        compute: torch.dtype,
        tile_bytes: int = TILE_BYTES,
        watch: Callable[[memoryview], None] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """``(first row, rows)`` of what is stored, converted; integers and booleans keep their dtype.

        A tile is valid until the next one is asked for, from whichever store with the same scratch.
        """
        rows = part.shape[0] if part.shape else 1
        step = max(1, tile_bytes // max(1, self._nbytes(part, 0, 1)))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            raw = self._read(part, start, stop, self.scratch.stored(self._nbytes(part, start, stop)), watch)
            yield start, self._converted(part, raw, compute)

    def _converted(self, part: Part, raw: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        if not raw.is_floating_point():
            return raw
        out = raw
        if raw.dtype != compute:
            out = self.scratch.converted(raw.numel(), compute).view(raw.shape)
            out.copy_(raw)
        if (
            part.name not in self.not_finite
            and not bool(torch.isfinite(out.sum()))
            and not bool(torch.isfinite(out).all())
        ):
            self.not_finite[part.name] = None
        return out

    def local(
        self, part: Part, compute: torch.dtype, watch: Callable[[memoryview], None] | None = None
    ) -> torch.Tensor:
        """What is stored, in the stored shape."""
        kept = DTYPES.get(part.dtype, compute)
        out = torch.empty(part.shape, dtype=compute if kept.is_floating_point else kept)
        for start, tile in self.tiles(part, compute, watch=watch):
            if part.shape:
                out[start : start + len(tile)] = tile
            else:
                out.copy_(tile)
        return out

    def full(self, part: Part, compute: torch.dtype, watch: Callable[[memoryview], None] | None = None) -> torch.Tensor:
        """The whole tensor with zeros where this holder has nothing."""
        if part.is_whole:
            return self.local(part, compute, watch)
        out: torch.Tensor | None = None
        for start, tile in self.tiles(part, compute, watch=watch):
            if out is None:
                out = torch.zeros(part.full_shape, dtype=tile.dtype)
            placed(out, tile, part, start)
        return out if out is not None else torch.zeros(part.full_shape, dtype=compute)

    def row(self, part: Part, index: int, compute: torch.dtype, *, as_stored: bool = False) -> torch.Tensor:
        """One index of the first dimension, at full size with zeros where nothing is held, or ``as_stored``."""
        if not as_stored:
            return self.rows(part, [index], compute)[0]
        for at, start, length in spans(part.runs(0)):
            if start <= index < start + length:
                row = at + index - start
                return self._converted(part, self.raw(part, row, row + 1), compute)[0].clone()
        return torch.zeros(part.shape[1:], dtype=compute)

    def rows(self, part: Part, wanted: Sequence[int], compute: torch.dtype) -> torch.Tensor:
        """The given indices of the first dimension of the whole tensor; zeros where they are not held."""
        out = torch.zeros((len(wanted), *part.full_shape[1:]), dtype=compute)
        others = [spans(part.runs(d)) for d in range(1, len(part.full_shape))]
        held = spans(part.runs(0))
        for at, index in enumerate(wanted):
            for stored, start, length in held:
                if start <= index < start + length:
                    row = stored + index - start
                    value = self._converted(part, self.raw(part, row, row + 1), compute)
                    _scatter(out[at : at + 1], value, others, 1)
        return out


def placed(out: torch.Tensor, tile: torch.Tensor, part: Part, first_row: int) -> None:
    """Put rows ``[first_row, first_row + len(tile))`` of what is stored where they belong in the whole tensor."""
    others = [spans(part.runs(d)) for d in range(1, len(part.full_shape))]
    for at, to, length in clipped_runs(part.runs(0), first_row, first_row + len(tile)):
        _scatter(out.narrow(0, to, length), tile.narrow(0, at, length), others, 1)


def _scatter(out: torch.Tensor, tile: torch.Tensor, others: Sequence[list[tuple[int, int, int]]], dim: int) -> None:
    if dim > len(others):
        out.copy_(tile)
        return
    for at, to, length in others[dim - 1]:
        _scatter(out.narrow(dim, to, length), tile.narrow(dim, at, length), others, dim + 1)


def spans(runs: Runs) -> list[tuple[int, int, int]]:
    """``(stored position, index, length)`` of every run that is not padding."""
    out, at = [], 0
    for start, length in runs:
        if start >= 0:
            out.append((at, start, length))
        at += length
    return out


def clipped_runs(runs: Runs, first: int, last: int) -> list[tuple[int, int, int]]:
    """``(position from first, index, length)`` for stored positions ``[first, last)``, padding left out."""
    out = []
    for at, to, length in spans(runs):
        low, high = max(at, first), min(at + length, last)
        if high > low:
            out.append((low - first, to + low - at, high - low))
    return out


def padded_positions(runs: Runs) -> list[tuple[int, int]]:
    """``(stored position, length)`` of the padding."""
    out, at = [], 0
    for start, length in runs:
        if start < 0:
            out.append((at, length))
        at += length
    return out


def _parts(placed: Placed, rank: int) -> dict[str, Part]:
    parts = {}
    for stored, row in zip(placed.layout.stored, placed.extents, strict=True):
        extent = row[rank]
        if extent is not None:
            parts[stored.name] = Part(stored.name, stored.dtype, extent.file, extent.offset, stored.pieces[0].cut, rank)
    return parts


def source_store(source: Source, scratch: Scratch | None = None) -> Store:
    """The source's tensors, each whole."""
    return Store([source.root / file.name for file in source.files], _parts(place_source(source), 0), scratch)


def rank_store(shards: Shards, rank: int, scratch: Scratch | None = None) -> Store:
    """What one rank of the shards stores: its own files and nothing else."""
    return Store(shards.paths(), _parts(shards.placed, rank), scratch)


def native_dtype(source: Source) -> tuple[torch.dtype, int]:
    """The floating dtype of most of the source's bytes, and the bytes of one element.

    Of a quantised source, of most of what is not quantised: scales and norms are in what it was made to compute in.

    Raises:
        UnsupportedError: it is none to compute in.
    """
    sizes: dict[str, int] = {}
    is_quantised = quantisation_of(source.config) is not None
    for _, info in source.tensors():
        if not is_quantised or info.dtype in COMPUTED:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    if not sizes:
        raise UnsupportedError("all of the weights are quantised, so no dtype to compute in is known; verify by bytes")
    most = max(sizes, key=lambda name: sizes[name])
    dtype = DTYPES.get(most)
    if dtype is None or not dtype.is_floating_point:
        raise UnsupportedError(f"most of the weights are {most}, which is no dtype to compute in; verify by bytes")
    return dtype, DTYPE_BITS[most] // 8
