"""Gives every stored tensor of a layout its place in a file, and makes the files' headers.

Files of the native layout hold the tensors of one rank in source order, so that reading a source
front to back writes every target front to back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, overload

from .collection import uncollected
from .errors import DamagedError, short
from .header import WeightsFile, build_header
from .layout import Layout
from .planning import Placed, PlacedFile, sizes_of, stored_bytes
from .routing import Extent

INDEX = "model.safetensors.index.json"
ALIGN = 4096  # data of the native layout starts at a page, so that it can be read directly or mapped
_RANK, _CONTENT = "tpshard.rank", "tpshard.content"
_UNKNOWN = "-" * 64  # stands for the content digest until the data has passed


class Headed(NamedTuple):
    """A placed layout and the first bytes of every file."""

    placed: Placed
    headers: Sequence[bytes]


class _RankHeaders(Sequence[bytes]):
    """The headers of ranks' files, each made when it is asked for: those of alike ranks differ in the rank alone."""

    def __init__(self, made: Sequence[tuple[bytes, int]], size: int) -> None:
        self._made = made  # the header of rank 0, and the rank whose it is to be
        self._width = len(str(size))

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        blank, rank = self._made[at]
        return _replaced(blank, _RANK, 0, rank, self._width)


def rank_file_name(rank: int, tp_size: int, part: int = 0, parts: int = 1) -> str:
    """``model-tp-03-of-08.safetensors``, with ``-00001-of-00002`` before the suffix where there are parts."""
    width = max(2, len(str(tp_size)))
    numbered = f"-{part + 1:05d}-of-{parts:05d}" if parts > 1 else ""
    return f"model-tp-{rank:0{width}d}-of-{tp_size:0{width}d}{numbered}.safetensors"


def rank_metadata(rank: int, tp_size: int, layout: str, content: str) -> dict[str, str]:
    """What a rank's file says of itself: a stray or exchanged file is recognised by it."""
    return {
        "format": "pt",
        "tpshard.version": "1",
        _RANK: f"{rank:0{len(str(tp_size))}d}",
        "tpshard.tp_size": str(tp_size),
        "tpshard.layout": layout,
        _CONTENT: content,
    }


@uncollected()
def place_native(layout: Layout, max_file_bytes: int = 0) -> Headed:
    """One file a rank, in numbered parts where ``max_file_bytes`` is not 0.

    The headers lack the digest of the content, which :func:`sealed` fills in when it is known.

    Raises:
        UnsupportedError: a header would outgrow the format's limit.
    """
    size = layout.size
    shapes = [stored.shapes for stored in layout.stored]
    columns: list[list[Extent | None]] = []  # by rank and stored tensor
    files: list[PlacedFile] = []
    headers: list[tuple[bytes, int]] = []
    laid: dict[int, list[_Laid]] = {}
    for rank, first in enumerate(_alike(shapes, size)):
        if first == rank:
            laid[rank] = _laid_parts(layout, shapes, rank, max_file_bytes)
        column: list[Extent | None] = [None] * len(shapes)
        for part, (blank, members, end) in enumerate(laid[first]):
            number = len(files)
            for n, name, at, length in members:
                column[n] = Extent(name, number, at, length)
            files.append(PlacedFile(rank_file_name(rank, size, part, len(laid[first])), end, rank))
            headers.append((blank, rank))
        columns.append(column)
    return Headed(Placed(layout, tuple(files), tuple(zip(*columns, strict=True))), _RankHeaders(headers, size))


_Shapes = Sequence[tuple[tuple[int, ...] | None, ...]]


def _alike(shapes: _Shapes, size: int) -> list[int]:
    """For every rank the first one that holds the same tensors in the same shapes: their files differ in data only."""
    distinct = list({id(by_rank): by_rank for by_rank in shapes}.values())
    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(tuple([by_rank[rank] for by_rank in distinct]), rank) for rank in range(size)]


class _Laid(NamedTuple):
    """One file of a rank before it has a name: its header, its tensors, and where it ends."""

    header: bytes  # of rank 0, with the content unknown
    members: list[tuple[int, str, int, int]]  # number of the stored tensor, its name, offset, length
    end: int


def _laid_parts(layout: Layout, shapes: _Shapes, rank: int, limit: int) -> list[_Laid]:
    """The files of a rank: tensors in the layout's order, each header before its data."""
    held = []
    for n, stored in enumerate(layout.stored):
        length = sizes_of(shapes[n], stored.dtype)[rank]
        if length is not None:
            held.append((n, length))
    metadata = rank_metadata(0, layout.size, layout.digest, _UNKNOWN)
    out = []
    for part in _parts(held, limit):
        tensors = [(layout.stored[n].name, layout.stored[n].dtype, shapes[n][rank] or ()) for n, _ in part]
        header = build_header(tensors, metadata, ALIGN)
        at = len(header)
        members = []
        for n, length in part:
            members.append((n, layout.stored[n].name, at, length))
            at += length
        out.append(_Laid(header, members, at))
    return out


def sealed(header: bytes, content: str) -> bytes:
    """A native file's header with the digest of the content filled in."""
    return header.replace(f'"{_CONTENT}":"{_UNKNOWN}"'.encode(), f'"{_CONTENT}":"{content}"'.encode(), 1)


def _replaced(header: bytes, key: str, old: int, new: int, width: int) -> bytes:
    return header.replace(f'"{key}":"{old:0{width}d}"'.encode(), f'"{key}":"{new:0{width}d}"'.encode(), 1)


def _parts(held: Sequence[tuple[int, int]], limit: int) -> list[list[tuple[int, int]]]:
    """Tensors in order, in as few parts as keep each within ``limit`` bytes; a larger tensor has its own."""
    parts: list[list[tuple[int, int]]] = [[]]
    filled = 0
    for number, length in held:
        if limit and parts[-1] and filled + length > limit:
            parts.append([])
            filled = 0
        parts[-1].append((number, length))
        filled += length
    return parts


def place_repacked(layout: Layout, max_file_bytes: int) -> Headed:
    """A checkpoint that is not cut, in ``model.safetensors`` or as many numbered files as the limit asks for."""
    lengths = [(n, sizes_of(stored.shapes, stored.dtype)[0] or 0) for n, stored in enumerate(layout.stored)]
    parts = _parts(lengths, max_file_bytes)
    extents: list[tuple[Extent | None, ...]] = [()] * len(layout.stored)
    files, headers = [], []
    for part, members in enumerate(parts):
        header = build_header(
            [(layout.stored[n].name, layout.stored[n].dtype, layout.stored[n].shape(0) or ()) for n, _ in members],
            {"format": "pt"},
        )
        at = len(header)
        for n, length in members:
            extents[n] = (Extent(layout.stored[n].name, part, at, length),)
            at += length
        many = len(parts) > 1
        name = f"model-{part + 1:05d}-of-{len(parts):05d}.safetensors" if many else "model.safetensors"
        files.append(PlacedFile(name, at, 0))
        headers.append(header)
    return Headed(Placed(layout, tuple(files), tuple(extents)), tuple(headers))


def repacked_index(headed: Headed) -> tuple[str, bytes] | None:
    """Name and bytes of the index of repacked files; None where there is one file."""
    files = headed.placed.files
    if len(files) < 2:
        return None
    weight_map = {
        extent.tensor: files[extent.file].name for row in headed.placed.extents for extent in row if extent is not None
    }
    total = sum(stored_bytes(tensor.shape, tensor.dtype) for tensor in headed.placed.layout.tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return INDEX, text.encode() + b"\n"


@uncollected()
def place_opened(layout: Layout, files: Sequence[tuple[WeightsFile, int]]) -> Placed:
    """The layout where files that exist already hold it: ``files`` are (file, rank).

    Raises:
        DamagedError: a file holds a tensor that the layout does not put there, lacks one, or holds it in
            another shape or dtype.
    """
    numbers = {stored.name: n for n, stored in enumerate(layout.stored)}
    extents: list[list[Extent | None]] = [[None] * layout.size for _ in layout.stored]
    for number, (file, rank) in enumerate(files):
        for info in file.tensors:
            n = numbers.get(info.name)
            shape = layout.stored[n].shape(rank) if n is not None else None
            if n is None or shape is None:
                raise DamagedError(f"{file.name} holds {short(info.name)}, which does not belong to rank {rank}")
            if shape != info.shape or layout.stored[n].dtype != info.dtype:
                raise DamagedError(
                    f"{file.name} holds {short(info.name)} as {info.dtype} {list(info.shape)} where "
                    f"{layout.stored[n].dtype} {list(shape)} belongs; the file is of another split"
                )
            if extents[n][rank] is not None:
                other = f"another file of rank {rank} also holds"
                raise DamagedError(f"{file.name} holds {short(info.name)}, which {other}")
            extents[n][rank] = Extent(info.name, number, info.offset, info.nbytes)
    for n, stored in enumerate(layout.stored):
        for rank in range(layout.size):
            if extents[n][rank] is None and stored.shape(rank) is not None:
                raise DamagedError(f"{short(stored.name)} is missing from the files of rank {rank}; copy them again")
    placed = tuple(PlacedFile(file.name, file.size, rank) for file, rank in files)
    return Placed(layout, placed, tuple(map(tuple, extents)))
