"""Reads a torch distributed checkpoint back, whatever the degrees of those who wrote it.

The engine's layout of the model on one rank says what every global tensor is made of; each chunk is then a rectangle
of it. Padding behind the vocabulary is not read: Megatron trains it, and it means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tpshard.axes import Padded
from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.header import Read, tensor_nbytes
from tpshard.intervals import PAD, Run, Runs, joined
from tpshard.layout import Layout, Piece, Stored, cut
from tpshard.listing import list_directory, shown
from tpshard.matching import match
from tpshard.opened import Stamp, read_small, reading, require_unchanged
from tpshard.partition import interned
from tpshard.planning import Placed, PlacedFile
from tpshard.registry import family_of, table_for
from tpshard.routing import Extent
from tpshard.torchfile import read_tensor

from .arrange import Arranged, arrange
from .dcp import slot_of
from .distmetadata import Chunk, GlobalTensor, read
from .expected import candidates, held, named, provisional
from .given import Given, without_weights
from .grid import Grid
from .parts import Model, model_of

_MAX_METADATA_BYTES = 1 << 30


class _Box(NamedTuple):
    """A chunk inside one stored tensor of the layout: where it begins there, and how large it is."""

    stored: int
    origin: tuple[int, ...]
    shape: tuple[int, ...]


def open_distcp(root: Path, module: ModuleType, metadata: str, version: str, values: dict[str, object]) -> Given:
    """Open the checkpoint whose ``.metadata`` lies at the path ``metadata`` below ``root``.

    Raises:
        UnsupportedError: the model has a part that the engine's table has no name for, or chunks cross tensors.
        DamagedError: tensors or chunks are missing, or have other shapes than the model of config.json.
        StorageError: files cannot be read.
    """
    engine: str = module.ENGINE
    folder = Path(metadata).parent
    tensors = read(read_small(root / metadata, _MAX_METADATA_BYTES), metadata)
    config, family, table = Config(values), family_of(values), table_for(values)
    possible = candidates(table, family)
    model = model_of(config, family, table, [c.tensor for c in possible], provisional(table, possible))
    of_engine = module.table(model, version)
    grid = Grid(1, ((0, model.layers),), 1, of_engine.ep_inside)
    names = {
        one.name: tensors[slot.key].dtype for one in named(model, of_engine, engine, possible)
        if (slot := slot_of(one.name)).key in tensors
        and all(at < n for at, n in zip(slot.lead, tensors[slot.key].shape, strict=False))
    }  # fmt: skip
    logical = held(model, of_engine, engine, possible, names)
    model = model_of(config, family, table, logical, match(table, logical))

    def found_in(other: Model) -> tuple[Placed, list[Path], list[Stamp]]:
        arranged = arrange(other, module.table(other, version), grid, engine)
        padded = frozenset(
            name for name, dims in other.matched.dims.items()
            if dims and any(isinstance(axis, Padded) for axis in dims[0].axes)
        )  # fmt: skip
        with ExitStack() as stack:
            return _placed(root, folder, arranged, padded, tensors, stack)

    placed, paths, stamps = found_in(model)
    weights = {path.relative_to(root).as_posix() for path in paths}
    own = {*of_engine.sides(model, grid), metadata, *weights}
    sides = {
        name: size for name, size in list_directory(root).sizes.items()
        if name not in own and not name.endswith(".distcp") and Path(name).parent != folder
    }  # fmt: skip
    sides, left_out = without_weights(sides)
    relative = [path.relative_to(root).as_posix() for path in paths]

    def check_unchanged() -> None:
        require_unchanged(root, relative, stamps)

    return Given(
        model, placed, root, paths, sides, left_out, (), check_unchanged, holding=lambda other: found_in(other)[0],
        what=f"{engine} {version} files",
    )  # fmt: skip


def _placed(
    root: Path, folder: Path, arranged: Arranged, padded: frozenset[str], tensors: Mapping[str, GlobalTensor],
    stack: ExitStack,
) -> tuple[Placed, list[Path], list[Stamp]]:
    layout = arranged.layout
    slots: dict[str, dict[tuple[tuple[int, ...], int], int]] = {}
    for number, stored in enumerate(layout.stored):
        slot = slot_of(stored.name)
        slots.setdefault(slot.key, {})[slot.lead, slot.part] = number
    counts = {slot_of(stored.name).key: slot_of(stored.name).parts for stored in layout.stored}
    files = sorted({chunk.file for key in slots if key in tensors for chunk in tensors[key].chunks})
    readers: dict[str, tuple[int, Read]] = {}
    stamps: list[Stamp] = []
    for number, file in enumerate(files):
        read_file, stamp = stack.enter_context(reading(root / folder / file))
        readers[file] = number, read_file
        stamps.append(stamp)
    names = [(folder / file).as_posix() for file in files]
    stored_chunks: list[Stored] = []
    extents: list[tuple[Extent]] = []
    filled = [0] * len(layout.stored)
    for key, places in slots.items():
        if key not in tensors:
            raise DamagedError(f"{short(key)} is not in the checkpoint; it is of another model or another program")
        for chunk in tensors[key].chunks:
            found = _box(key, tensors[key], chunk, places, counts[key], arranged, padded)
            if found is None:
                continue
            number, read_file = readers[chunk.file]
            name = names[number]
            info = read_tensor(read_file, chunk.offset, chunk.nbytes, f"{shown(root / name)}: {key}")
            stored = layout.stored[found.stored]
            if info.dtype != stored.dtype or info.nbytes != tensor_nbytes(stored.dtype, chunk.shape):
                raise DamagedError(
                    f"{name} holds {short(key)} at {list(chunk.origin)} as {info.dtype} {list(info.shape)}, and its "
                    f"metadata says {stored.dtype} {list(chunk.shape)}; copy the checkpoint again"
                )
            piece, kept = _sliced(stored, found)
            stored_chunks.append(piece)
            filled[found.stored] += kept
            nbytes = tensor_nbytes(stored.dtype, piece.shape(0) or ())
            extents.append((Extent(piece.name, number, info.offset, nbytes),))
    for stored, count in zip(layout.stored, filled, strict=True):
        wanted = _elements(stored)
        if count < wanted:
            raise DamagedError(
                f"of {short(stored.name)} the checkpoint holds {count:,} of {wanted:,} elements; chunks are missing"
            )
    placed = Placed(
        Layout(1, layout.tensors, tuple(stored_chunks)),
        tuple(PlacedFile(name, stamp.size, 0) for name, stamp in zip(names, stamps, strict=True)), tuple(extents),
    )  # fmt: skip
    return placed, [root / name for name in names], stamps


def _box(
    key: str, tensor: GlobalTensor, chunk: Chunk, places: Mapping[tuple[tuple[int, ...], int], int], parts: int,
    arranged: Arranged, of_vocabulary: frozenset[str],
) -> _Box | None:  # fmt: skip
    """Where a chunk lies; None where it is padding alone, which a vocabulary has by its writer's degree."""
    lead = len(next(iter(places))[0])
    if any(n != 1 for n in chunk.shape[:lead]) or len(chunk.shape) != len(tensor.shape):
        raise UnsupportedError(f"a chunk {list(chunk.shape)} of {short(key)} is of several layers or experts")
    origin, shape = list(chunk.origin[lead:]), list(chunk.shape[lead:])
    part = 0
    if parts > 1:
        each = tensor.shape[lead] // parts
        part = origin[0] // each
        origin[0] -= part * each
        if origin[0] + shape[0] > each:
            raise UnsupportedError(f"a chunk {list(chunk.shape)} of {short(key)} is of gates and ups at once")
    number = places.get((tuple(chunk.origin[:lead]), part))
    if number is None:
        raise DamagedError(f"{short(key)} has a chunk at {list(chunk.origin)}, which the model of config.json has not")
    declared = arranged.declared[number][0] or ()
    if len(declared) != len(shape):
        raise DamagedError(f"{short(key)} is {list(tensor.shape)} where the model has {list(declared)} a layer")
    padded = any(piece.tensor in of_vocabulary for piece in arranged.layout.stored[number].pieces)
    for d, (at, n, extent) in enumerate(zip(origin, shape, declared, strict=True)):
        if at + n > extent and not (padded and d == 0):
            raise DamagedError(
                f"{short(key)} has a chunk {list(chunk.shape)} at {list(chunk.origin)}, and the model of config.json "
                f"has {list(declared)} there"
            )
    if padded:
        rows = sum(run.length for run in arranged.layout.stored[number].pieces[0].cut.dims[0].ranks[0]
                   if run.start != PAD)  # fmt: skip
        shape[0] = min(shape[0], rows - origin[0])
        if shape[0] <= 0:
            return None
    return _Box(number, tuple(origin), tuple(shape))


def _sliced(stored: Stored, box: _Box) -> tuple[Stored, int]:
    """The part of a stored tensor that a box is, and how many elements that has."""
    pieces: list[Piece] = []
    at = 0
    for piece in stored.pieces:
        dims = piece.cut.dims
        skip = len(dims) - len(box.shape)  # a bank's expert, which the box does not count
        rows: list[Runs] = []
        for d, dim in enumerate(dims):
            runs = dim.ranks[0]
            if d >= skip:
                low, n = box.origin[d - skip], box.shape[d - skip]
                before = at if d == stored.dim + skip else 0
                runs = _window(runs, low - before, low - before + n)
            rows.append(runs)
        at += piece.cut.dims[stored.dim + skip].length(0) if len(stored.pieces) > 1 else 0
        if all(rows) or not dims:
            parts = tuple([interned(dim.extent, (runs,)) for dim, runs in zip(dims, rows, strict=True)])
            pieces.append(Piece(piece.tensor, cut(parts, 1)))
    made = stored._replace(name=f"{stored.name}{list(box.origin)}", pieces=tuple(pieces))
    return made, prod(made.shape(0) or ())


def _window(runs: Runs, low: int, high: int) -> Runs:
    """What is stored at the positions ``[low, high)`` of runs, without padding."""
    out, at = [], 0
    for run in runs:
        start, stop = max(low - at, 0), min(high - at, run.length)
        if stop > start and run.start != PAD:
            out.append(Run(run.start + start, stop - start))
        at += run.length
    return joined(out)


def _elements(stored: Stored) -> int:
    """How many elements of the model a stored tensor has, padding not counted."""
    count = 0
    for piece in stored.pieces:
        count += prod(sum(run.length for run in dim.ranks[0] if run.start != PAD) for dim in piece.cut.dims)
    return count

